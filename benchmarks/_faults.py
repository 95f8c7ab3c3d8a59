"""Faults, injected for real: their cost and their messages.

Every case ends a run, or a step of it, by a fault beneath it, and is compared with the same run without the fault. The
error is one of ours or the injected one, names the place, and comes within a bounded time, never as a hang. Parameters,
states and files are those of the last whole step.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _interleavings import MICRO_BATCHES, job_of
from msgspec import structs
from torch import nn

from executor import AdamW, VirtualBackend, prepare
from executor.queues.interface import Progress, Work
from executor.queues.threads import ThreadQueues
from executor.training import train_step
from pstar_sim.core.plan import Plan, load_plan
from pstar_sim.core.step import Kind, Queue, Ref
from pstar_sim.errors import CheckpointError, DiskError, DoesNotFit, ModelError, PlanError, PstarError

__all__ = ["FAULTS", "Report", "run_faults"]

BOUND_S = 60.0


class Broken(RuntimeError):
    """The injected error."""


# --- a queue's thread dies -------------------------------------------------------------------------------------------


class Dying(ThreadQueues):
    """Queues in which the n-th step of one queue raises, in `begin`, `work` or `finish`."""

    def __init__(self, queue: Queue, half: str, at: int) -> None:
        super().__init__(watchdog_s=BOUND_S)
        self._dies = (queue, half)
        self._left = at

    def start(self, progress: Progress, work: Work) -> None:
        self._dying = _DyingWork(work, progress, self)  # queues hold their work weakly
        super().start(progress, self._dying)

    def strike(self, half: str, queue: Queue) -> None:
        if (queue, half) == self._dies:
            self._left -= 1
            if self._left < 0:
                raise Broken(f"the {queue.value} queue broke in {half}")


class _DyingWork:
    def __init__(self, work: Work, progress: Progress, queues: Dying) -> None:
        self._work, self._progress, self._queues = work, progress, queues

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def begin(self, i: int, iteration: int, ready_s: float, waited_for: int | None) -> None:
        self._queues.strike("begin", self._progress.steps[i].queue)
        self._work.begin(i, iteration, ready_s, waited_for)

    def work(self, i: int, iteration: int) -> None:
        self._queues.strike("work", self._progress.steps[i].queue)
        self._work.work(i, iteration)

    def finish(self, i: int, iteration: int) -> None:
        self._queues.strike("finish", self._progress.steps[i].queue)
        self._work.finish(i, iteration)


@dataclass
class Run:
    """A prepared net, batches, and the results of plain training."""

    model: nn.Module
    optimizer: Any
    plan: Plan
    draw: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(2, 24, generator=self.draw), torch.randn(2, 24, generator=self.draw)

    def backward(self) -> None:
        for _ in range(MICRO_BATCHES):
            (self.model(*self.batch()) / MICRO_BATCHES).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextlib.contextmanager
def running(policy: str = "tide", *, disks: Path | None = None, **options: Any) -> Iterator[Run]:
    """disks: a folder, for a job that needs it. Neither threads are left at the end, nor descriptors or files there."""
    model, plan = _jobs(policy, on_disks=disks is not None)
    threads, descriptors = set(threading.enumerate()), _descriptors()
    spec = AdamW(lr=1e-2, max_grad_norm=0.5)
    try:
        model, optimizer = prepare(copy.deepcopy(model), plan, spec, disks=[disks] if disks else [], **options)
        try:
            yield Run(model, optimizer, plan)
        finally:
            optimizer.session.close(restore=False)
    finally:
        left = [thread.name for thread in set(threading.enumerate()) - threads]
        left += sorted(_descriptors() - descriptors)
        left += map(str, disks.glob("pstar-rank*") if disks else ())
        assert not left, f"left: {left}"


_jobs = functools.cache(job_of)  # of which runs take copies


def _descriptors() -> set[str]:
    """What this process has open, by number and name."""
    links = (row for row in Path("/proc/self/fd").iterdir() if row.is_symlink())  # not the one that lists them
    return {f"{row.name}: {row.readlink()}" for row in links}


def steps_equal(run: Run, other: Run, steps: int) -> None:
    """Check that both take steps of the same batches to the same parameters and states, bit by bit."""
    run.draw.set_state(other.draw.get_state())
    for _ in range(steps):
        run.step()
        other.step()
    rows = [[*each.model.state_dict().values()] for each in (run, other)]
    for row, each in zip(rows, (run, other)):
        row += [value for state in each.optimizer.state_dict()["state"].values() for value in state.values()]
    assert len(rows[0]) == len(rows[1]) > 0
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*rows))


def expect(kind: type[BaseException], action: Callable[[], object], *words: str) -> str:
    """Check that the action raises an error of this kind, within the time bound, with the words in its text. Returns
    the text."""
    begun_s = time.perf_counter()
    try:
        action()
    except kind as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
    else:
        raise AssertionError(f"nothing was raised where {kind.__name__} should have been")
    took_s = time.perf_counter() - begun_s
    assert took_s < BOUND_S, f"took {took_s:.0f} s"
    for word in words:
        assert word in said, f"{word!r} is not in {said!r}"
    return said


def dead_thread(queue: Queue, half: str, at: int, then: str) -> str:
    """Check that the error reaches the loop and all later calls of the session."""
    queues = Dying(queue, half, at)
    with running(queues=queues) as run:

        def go_on() -> None:
            for _ in range(4):
                run.backward()
                if then == "demand":  # the iteration leaves the plan, and the queues have to stand still
                    with torch.no_grad():
                        run.model(*run.batch())
                if then == "settle":
                    run.model.state_dict()
                run.optimizer.step()
                run.optimizer.zero_grad()
                if then == "save":
                    with tempfile.TemporaryDirectory() as folder:
                        run.optimizer.save(Path(folder) / "saved")

        words = (f"the {queue.value} queue broke in {half}", f"raised in queue {queue.value}, at step")
        said = expect(Broken, go_on, *words)
        expect(Broken, run.step, words[0])
        expect(Broken, run.model.state_dict, words[0])
        with tempfile.TemporaryDirectory() as folder:
            expect(Broken, lambda: run.optimizer.save(Path(folder) / "saved"), words[0])
            assert not list(Path(folder).iterdir()), "a file is left"
        return said


def stuck_step() -> str:
    """Check that a step that waits for ever is named, with the steps that it waits for and the state of the queues."""
    model, plan = job_of("tide")
    fetch = next(step for step in plan.steps if step.kind is Kind.FETCH)
    last = next(step for step in reversed(plan.steps) if step.queue is Queue.D2H)
    steps = tuple(structs.replace(s, after=(*s.after, Ref(last.id, 0))) if s.id == fetch.id else s for s in plan.steps)
    spec = AdamW(lr=1e-2, max_grad_norm=0.5)
    model, optimizer = prepare(model, replace(plan, steps=steps), spec, check=False, watchdog_s=0.2)
    run = Run(model, optimizer, plan)
    try:
        words = (
            f"step {fetch.id} (fetch of chunk {fetch.chunk})",
            f"waits for steps [{last.id}",
            "the queues are stuck",
        )
        return expect(PlanError, run.step, *words)
    finally:
        optimizer.session.close(restore=False)


# --- numbers ---------------------------------------------------------------------------------------------------------


def nan_loss() -> str:
    """Check that the loop stops before the backward, with the parameters of the last whole step."""
    with running() as run:
        run.step()
        before = run.model.state_dict()
        bad = (torch.full((2, 24), float("nan")), torch.zeros(2, 24))
        batches = iter([{"x": bad[0], "y": bad[1]}] * 2)
        said = expect(ModelError, lambda: train_step(run.model, run.optimizer, batches, 2, number=1), "nan at step 1")
        after = run.model.state_dict()
        assert all(torch.equal(before[name], value) for name, value in after.items())
        return said


def infinite_gradient() -> str:
    """Check that with loss scaling the step is left out and the next one counts."""
    import executor
    from executor.capture import capture_module
    from pstar_sim.catalog.loader import load_machine
    from pstar_sim.core.plan import Settings
    from pstar_sim.policy.registry import find_policy

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).half()
    w = capture_module(model, torch.randn(2, 16).half(), name="half", batch=2, sequence=1, loss=lambda m, b: m(b).sum())
    machine = load_machine("virtual", gpu_memory=w.peak_non_model_bytes + 16 * sum(t.bytes for t in w.tensors))
    plan = find_policy("tide")(w, machine, Settings(clip=False))
    model, optimizer = executor.prepare(model, plan, AdamW(lr=1e-2, loss_scale=1024.0))
    try:
        before = model.state_dict()
        (model(torch.randn(2, 16).half()).sum() * float("inf")).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = model.state_dict()
        assert all(torch.equal(before[name], value) for name, value in after.items())
        assert optimizer.session.skipped_steps == 1
        model(torch.randn(2, 16).half()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
        return "1 step left out, the next one counts"
    finally:
        optimizer.session.close(restore=False)


# --- disk and memory -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Inside this context, no file of this process may grow beyond the limit: a write across the limit is cut short,
    and the next write fails. This acts like a full disk. (Python ignores the signal, so that the write fails.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_disk_while_saving(limit_bytes: int) -> str:
    """Check that the earlier checkpoint stays whole, no other file is left, and training continues to the same end."""
    with tempfile.TemporaryDirectory() as folder, running() as run, running() as other:
        target = Path(folder) / "saved"
        run.step()
        run.optimizer.save(target)
        kept = {p.name: p.read_bytes() for p in target.iterdir()}
        run.step()
        with file_size_limit(limit_bytes):
            said = expect(CheckpointError, lambda: run.optimizer.save(target), "saved")
        assert {p.name: p.read_bytes() for p in target.iterdir()} == kept, "the earlier checkpoint changed"
        assert [p.name for p in Path(folder).iterdir()] == ["saved"], sorted(p.name for p in Path(folder).iterdir())
        run.step()
        run.optimizer.save(target)
        for _ in range(3):
            other.step()
        mine, theirs = run.model.state_dict(), other.model.state_dict()
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())
        return said


def full_disk_while_planning() -> str:
    """Check that a plan file is either whole or missing."""
    _, plan = job_of("tide")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "plan.json"
        plan.save(target)
        kept = target.read_bytes()
        with file_size_limit(5000):
            said = expect(PstarError, lambda: plan.save(target), "plan.json", "File too large")
        assert target.read_bytes() == kept and [p.name for p in Path(folder).iterdir()] == ["plan.json"]
        assert load_plan(target).steps == plan.steps
        return said


def refused_host_memory() -> str:
    """Check that the model stays unchanged if the system refuses host memory that it reported as available."""
    model, plan = job_of("tide")
    before = {name: value.clone() for name, value in model.state_dict().items()}

    class Refusing(VirtualBackend):
        def host_slab(self, size_bytes: int) -> torch.Tensor:
            return torch.zeros(2**60, dtype=torch.uint8)  # the allocator's own refusal

    spec = AdamW(lr=1e-2, max_grad_norm=0.5)
    said = expect(DoesNotFit, lambda: prepare(model, plan, spec, backend=Refusing()), "host", "slab")
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    return said


def refused_accelerator_memory() -> str:
    """Check that the running step is finished and the next plan made for less memory; see the ladder's own tests."""
    _, plan = job_of("tide")
    backend = VirtualBackend(gpu_bytes=plan.gpu_budget_bytes)
    with running() as other, running(backend=backend) as run:
        run.step()
        backend.gpu_bytes = plan.gpu_budget_bytes * 10 // 11  # wherever copies stand, the step can still be finished
        steps = 1
        while steps < 3 or (not run.optimizer.session.ladder and steps < 30):
            run.step()
            steps += 1
        for _ in range(steps):
            other.step()
        mine, theirs = run.model.state_dict(), other.model.state_dict()
        worst = max(float((mine[name] - value).abs().max()) for name, value in theirs.items())
        assert worst <= 1e-6, worst
        assert run.optimizer.session.ladder
        return str(run.optimizer.session.ladder[-1])


# --- disks -----------------------------------------------------------------------------------------------------------

Strike = Callable[[Path], contextlib.AbstractContextManager[object]]  # does the fault to a run's folder


def failing(name: str, error: int) -> Strike:
    """os.preadv or os.pwritev fails."""

    def refuse(*_: Any) -> int:
        raise OSError(error, os.strerror(error))

    return lambda folder: mock.patch.object(os, name, refuse)


@contextlib.contextmanager
def changed_byte(folder: Path) -> Iterator[None]:
    """In each page, since the next access to most lists may be a write."""
    (path,) = folder.glob("*.slots")
    content = bytearray(path.read_bytes())
    for at in range(0, len(content), 4096):
        content[at] ^= 1
    with path.open("r+b") as file:
        file.write(content)
        os.fsync(file.fileno())
    yield


@contextlib.contextmanager
def removed_folder(folder: Path) -> Iterator[None]:
    shutil.rmtree(folder)
    yield


@contextlib.contextmanager
def folders(count: int) -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory() as name:
        made = [Path(name) / str(number) for number in range(count)]
        for folder in made:
            folder.mkdir()
        yield made


def three_steps_of(run: Run) -> Callable[[], None]:
    """Writes of one may go on in the next."""

    def go_on() -> None:
        for _ in range(3):
            run.step()

    return go_on


def damaged_disk(policy: str, strike: Strike, *words: str) -> str:
    """Check that the error names folder, list and chunk, that the last checkpoint stays as it is, and that a run which
    continues from it in another folder equals one without the fault."""
    with folders(4) as (first, second, third, checkpoints):
        saved = checkpoints / "saved"
        with running(policy, disks=first) as run:
            run.step()
            run.optimizer.save(saved)
            kept = {p.name: p.read_bytes() for p in saved.iterdir()}

            named = f"disks folder {first}: "
            with strike(first):
                said = expect(DiskError, three_steps_of(run), named, " of chunk ", "the last checkpoint", *words)
            expect(DiskError, run.step, named)
        assert {p.name: p.read_bytes() for p in saved.iterdir()} == kept, "the checkpoint changed"
        with running(policy, disks=second) as run, running(policy, disks=third) as other:
            other.step()
            run.optimizer.load(saved)
            steps_equal(run, other, 2)
        return said


def short_transfers_on_disk(policy: str) -> str:
    """Check that transfers of which the system moves a part are continued."""
    parts = {
        name: mock.patch.object(os, name, lambda at, rows, offset, move=move: move(at, [rows[0][:4096]], offset))
        for name, move in (("preadv", os.preadv), ("pwritev", os.pwritev))
    }
    with folders(2) as (first, second), running(policy, disks=first) as run, running(policy, disks=second) as other:
        other.step()
        with parts["preadv"], parts["pwritev"]:
            run.step()
            steps_equal(run, other, 2)
        return "transfers are continued"


def second_run_in_a_folder(policy: str) -> str:
    """Check that it is refused, and that the first run is as without it."""
    with (
        folders(2) as (first, other_disk),
        running(policy, disks=first) as run,
        running(policy, disks=other_disk) as other,
    ):
        second = functools.partial(prepare, *_jobs(policy, on_disks=True), AdamW(lr=1e-2), disks=[first])
        words = f"disks folder {first} is in use by another run (process {os.getpid()}); give another folder"
        said = expect(DiskError, second, words)
        steps_equal(run, other, 2)
        return said


def no_room_at_the_start(policy: str, folder: Path, *words: str) -> str:
    """Check that nothing has changed and no file is left."""

    def start() -> None:
        with running(policy, disks=folder):
            pass

    said = expect(DiskError, start, f"disks folder {folder}", *words)
    assert not list(folder.glob("pstar*"))
    return said


def limit_on_files_at_the_start(policy: str) -> str:
    with folders(1) as (folder,), file_size_limit(100_000):
        return no_room_at_the_start(policy, folder, "(File too large); raise the limit on files (ulimit -f)")


@contextlib.contextmanager
def mounted(*what: str) -> Iterator[Path]:
    """Only root may mount."""
    with folders(1) as (folder,):
        subprocess.run(["mount", *what, str(folder)], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)


def small_disk(policy: str) -> str:
    with mounted("-t", "tmpfs", "-o", "size=100k", "tmpfs") as folder:
        return no_room_at_the_start(policy, folder, " has no room: the plan puts ", "make room, or give more folders")


def overcommitted_disk(policy: str) -> str:
    """Check what is said where a file system promises more room than the device beneath it has: an ext4 of 64 MB in a
    file on a tmpfs that has been filled meanwhile."""
    with mounted("-t", "tmpfs", "-o", "size=4m", "tmpfs") as beneath:
        image = beneath / "image"
        image.touch()
        os.truncate(image, 64 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-N", "16", str(image)], check=True)
        with mounted("-o", "loop", str(image)) as folder, running(policy, disks=folder) as run:
            with contextlib.suppress(OSError), (beneath / "filler").open("wb") as filler:
                while True:
                    filler.write(bytes(4096))
            words = (
                f"disks folder {folder}: ",
                " of chunk ",
                "cannot be written",
                "and continue from the last checkpoint",
            )
            return expect(DiskError, three_steps_of(run), *words)


_LOST_RANKS = Path(__file__).resolve().parent.parent / "tests" / "executor" / "distributed" / "test_lost_ranks.py"


def lost_rank() -> str:
    """Check that the other processes end with a message, in bounded time, if one dies. Runs the test that kills a
    process."""
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(_LOST_RANKS), "-k", "end_soon"]
    done = subprocess.run(argv, cwd=_LOST_RANKS.parents[3], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout.strip().splitlines()[-1]


FAULTS: dict[str, Callable[[], str]] = {
    **{
        f"{queue.value} thread dies in {half}": lambda queue=queue, half=half, at=at: dead_thread(
            queue, half, at, "step"
        )
        for queue, half, at in (
            (Queue.H2D, "begin", 2),
            (Queue.H2D, "work", 5),
            (Queue.H2D, "finish", 9),
            (Queue.D2H, "begin", 3),
            (Queue.D2H, "work", 0),
            (Queue.D2H, "finish", 6),
            (Queue.ADAM, "begin", 4),
            (Queue.ADAM, "work", 1),
            (Queue.ADAM, "finish", 0),
        )
    },
    "adam thread dies, an evaluation follows": lambda: dead_thread(Queue.ADAM, "work", 3, "demand"),
    "d2h thread dies, parameters are read": lambda: dead_thread(Queue.D2H, "work", 4, "settle"),
    "adam thread dies, a checkpoint is saved": lambda: dead_thread(Queue.ADAM, "work", 5, "save"),
    "a step waits for ever": stuck_step,
    "the loss is not a number": nan_loss,
    "a gradient is infinite, with loss scaling": infinite_gradient,
    "disk full at a checkpoint's first bytes": lambda: full_disk_while_saving(100),
    "short write in a checkpoint": lambda: full_disk_while_saving(20_001),
    "short write in a plan": full_disk_while_planning,
    "host memory refused": refused_host_memory,
    "accelerator memory refused": refused_accelerator_memory,
    "disks: writes are full": lambda: damaged_disk(
        "tide", failing("pwritev", errno.ENOSPC), "(No space left on device); make room in the folder"
    ),
    "disks: writes fail": lambda: damaged_disk(
        "zero_infinity:states=nvme", failing("pwritev", errno.EIO), "cannot be written"
    ),
    "disks: reads fail": lambda: damaged_disk("optimal", failing("preadv", errno.EIO), "cannot be read (Input/output"),
    "disks: a write moves nothing": lambda: damaged_disk(
        "tide", lambda folder: mock.patch.object(os, "pwritev", lambda *_: 0), "cannot be written (0 of"
    ),
    "disks: bytes change": lambda: damaged_disk("optimal", changed_byte, "is not what was written there (checksum"),
    "disks: a folder is removed": lambda: damaged_disk("tide", removed_folder, "is gone: somebody has removed"),
    "disks: transfers are short": lambda: short_transfers_on_disk("zero_infinity:params=nvme,states=nvme"),
    "disks: a second run in the folder": lambda: second_run_in_a_folder("tide"),
    "disks: a limit on files": lambda: limit_on_files_at_the_start("tide"),
    **(
        {
            "disks: a small disk, mounted": lambda: small_disk("tide"),
            "disks: a disk that promises too much, mounted": lambda: overcommitted_disk("tide"),
        }
        if os.geteuid() == 0
        else {}
    ),
    **({"a rank dies": lost_rank} if _LOST_RANKS.exists() else {}),
}


@dataclass
class Report:
    """Results of the faults.

    said: message of each fault.
    misses: faults that were not handled as they should be.
    """

    said: dict[str, str] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run_faults(names: tuple[str, ...] = tuple(FAULTS), on_miss: Callable[[str], None] = lambda miss: None) -> Report:
    report = Report()
    begun_s = time.perf_counter()
    for name in names:
        try:
            report.said[name] = re.sub(r"/\S*/tmp\w+/", "", " ".join(FAULTS[name]().split()))[:300]
        except Exception as error:
            report.misses.append(f"{name}: {type(error).__name__}: {error}")
            on_miss(report.misses[-1])
    report.seconds = time.perf_counter() - begun_s
    return report
