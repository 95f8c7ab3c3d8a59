"""SIGKILL at random times, also while saving: every resumed run equals the uninterrupted one, bit by bit.

A job saves after every step. Its process is killed at a random time, and the next process resumes from the disk, until
the job is finished; then the next job begins. Counted are kills of a running process. Compared with the uninterrupted
run are every loss of every process, and at the end the files of the last checkpoint, byte by byte (values, moments,
step counts, random number generators). A checkpoint may never be older than the last finished save. Jobs on disks
share one folder of slots: a killed run leaves its files there, and behind the end of the next that is not killed there
are none.

    python benchmarks/kills.py --count 100
    python benchmarks/kills.py --count 20 --only "on disks"
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import multiprocessing
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

STEPS = 24
DISK = "disk"
PROCESSES = multiprocessing.get_context("fork")  # of one that runs no backward: after that, none could train
SHARES = (0.25, 0.4, 0.55, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0)


@dataclass(frozen=True)
class Case:
    """A job: dtype, micro-batches, when updates run, policy.

    host_share: host memory, as a share of parameters and states, of which the rest lives on disks; None: no disks.
    """

    dtype: str
    micro_batches: int
    update: str
    policy: str
    host_share: float | None = None

    @property
    def name(self) -> str:
        where = "" if self.host_share is None else " on disks"
        return f"{self.policy}{where}, {self.dtype}, {self.micro_batches} micro-batches, update {self.update}"


CASES = (
    Case("bf16", 1, "step", "tide"),
    Case("fp32", 4, "eager", "tide"),
    Case("fp32", 1, "step", "zero_offload"),
    Case("bf16", 4, "step", "static_partition"),
    Case("bf16", 1, "step", "tide", host_share=0.6),
    Case("fp32", 4, "step", "optimal", host_share=0.6),
    Case("fp32", 1, "eager", "stronghold", host_share=0.3),
    Case("fp32", 1, "step", "tide", host_share=0.3),
    Case("bf16", 2, "step", "zero_infinity:params=nvme,states=nvme,subgroup=30000", host_share=0.8),
)


def make_plan(case: Case, path: Path) -> None:
    """Write a plan for a budget that is too small for the model, so that chunks move. For disks: those of the folder
    "disk" beside the plan."""
    from executor.capture import capture
    from pstar_sim.catalog.loader import load_machine
    from pstar_sim.core.plan import Settings
    from pstar_sim.core.step import Place
    from pstar_sim.errors import DoesNotFit
    from pstar_sim.policy.registry import find_policy

    workload = capture("tiny-gpt2", batch=2, sequence=32, micro_batches=case.micro_batches, dtype=case.dtype)
    size = sum(t.bytes for t in workload.tensors if t.tied_to is None)
    for share in SHARES:
        machine = load_machine(
            "virtual",
            gpu_memory=str(workload.peak_non_model_bytes + int(share * size)),
            disks=[path.parent / DISK] if case.host_share else [],
        )
        if case.host_share:
            states_and_params = size * (4 if case.dtype == "fp32" else 7)
            host_bytes = machine.host.reserved_bytes + int(case.host_share * states_and_params)
            machine = replace(machine, host=replace(machine.host, memory_bytes=host_bytes))
        try:
            plan = find_policy(case.policy)(workload, machine, Settings(update=case.update, clip=False))
        except DoesNotFit:
            continue
        assert not case.host_share or any(row.place is Place.NVME for row in plan.initial), case.name
        plan.save(path)
        return
    raise SystemExit(f"{case.name}: no budget fits")


def train(folder: str, name: str, resume: bool) -> None:
    """Run the job in a process, with a line for each step, until it is finished or killed."""
    from executor.run import TrainingJob
    from executor.running.keeping import Keeping
    from pstar_sim.core.plan import load_plan

    here = Path(folder)
    plan = load_plan(here / "plan.json")
    job = TrainingJob.of_plan(plan, "tiny-gpt2", data=f"text:{here / 'corpus'}", lr=1e-3, seed=1)
    checkpoint = str(here / name)
    with (here / f"{name}.log").open("a") as log:

        def on_step(report: Any, status: Any) -> None:
            log.write(f"{report.step} {report.loss.hex()}\n")
            log.flush()

        keeping = Keeping(save=checkpoint, every=1, resume=checkpoint if resume else None)
        disks = [str(path) for path in [here / DISK] if path.exists()]
        job.run(plan, steps=STEPS, keeping=keeping, on_step=on_step, disks=disks)


def losses_of(log: Path) -> list[tuple[int, str]]:
    """Returns (step, loss) of every complete line."""
    if not log.exists():
        return []
    rows = [line.split() for line in log.read_text().split("\n")[:-1]]
    return [(int(step), loss) for step, loss in rows]


def digests(checkpoint: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(checkpoint.glob("*.safetensors"))}


class Kills:
    """The kills of one case.

    counts: number of events by kind.
    problems: wrong results.
    """

    def __init__(self, case: Case, folder: Path, draw: random.Random) -> None:
        self.case = case
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._draw = draw
        self._jobs = 0
        (folder / "corpus").mkdir()
        if case.host_share:
            (folder / DISK).mkdir()
        (folder / "corpus" / "letters.txt").write_text("".join(chr(97 + draw.randrange(26)) for _ in range(20_000)))
        with ProcessPoolExecutor(1, mp_context=PROCESSES) as pool:
            pool.submit(make_plan, case, folder / "plan.json").result()
        start_s = time.perf_counter()
        process = self._start("whole", resume=False)
        while process.is_alive() and not losses_of(folder / "whole.log"):
            process.join(0.01)
        self._start_s = time.perf_counter() - start_s  # until the first step
        process.join()
        self._step_s = (time.perf_counter() - start_s - self._start_s) / STEPS
        self._curve = dict(losses_of(folder / "whole.log"))
        self._files = digests(folder / "whole")
        if process.exitcode or len(self._curve) != STEPS:
            raise SystemExit(f"{case.name}: the uninterrupted run ended with {process.exitcode}")

    def _start(self, name: str, *, resume: bool) -> Any:
        process = PROCESSES.Process(target=train, args=(str(self.folder), name, resume))
        process.start()
        return process

    def run(self, count: int) -> None:
        """Kill `count` running processes. Whole jobs in between are compared with the uninterrupted one."""
        while self.counts["kills"] < count and not self.problems:
            name = f"job{self._jobs}"
            self._jobs += 1
            while not self._attempt(name, last=self.counts["kills"] >= count):
                pass

    def _wait(self, process: Any, log: Path) -> None:
        """Wait for the random moment of the kill. One kill in four is at any time from the start of the process; the
        others come while it trains and saves, at most about six steps after its first."""
        if self._draw.random() < 0.25:
            process.join(self._draw.uniform(0.0, 1.0) * self._start_s)
            return
        while process.is_alive() and not losses_of(log):
            process.join(0.01)
        process.join(self._draw.uniform(0.0, 6.0) * self._step_s)

    def _attempt(self, name: str, *, last: bool) -> bool:
        """Run one process, and kill it unless it is the `last`. Returns whether the job is finished."""
        from executor.saving.manifest import find_checkpoint, is_checkpoint
        from executor.saving.restoring import stored_extra

        checkpoint = find_checkpoint(self.folder / name)
        resume = is_checkpoint(checkpoint)
        done = stored_extra(checkpoint).iteration if resume else 0
        if done >= STEPS:
            return self._through(name)
        process = self._start(name, resume=resume)
        if not last:
            self._wait(process, self.folder / f"{name}.log")
        killed = not last and process.is_alive()
        if killed:
            process.kill()
        process.join()
        log = self.folder / f"{name}.log"
        rows = losses_of(log)
        other = [step for step, loss in rows if loss != self._curve[step]]
        if other:
            self.problems.append(f"{self.case.name}: step {other[0]} has another loss")
        log.write_text("")
        remains = sorted(path.name for path in (self.folder / DISK).glob("*"))  # of no more than the last run
        if remains and (not killed or not set(remains) <= {"pstar-rank0.lock", "pstar-rank0.0.slots"}):
            self.problems.append(f"{self.case.name}: {', '.join(remains)} left in the folder of the disks")
        if killed:
            self.counts["kills"] += 1
            self.counts["with files on disks"] += len(remains) > 1
            self.counts["before a resumed step"] += resume and not rows
            self.counts["while saving"] += (self.folder / f".{name}.saving").exists()
            self.counts["before the first checkpoint"] += not is_checkpoint(find_checkpoint(self.folder / name))
        elif process.exitcode != 0:
            self.problems.append(f"{self.case.name}: a process that was not killed ended with {process.exitcode}")
        # The save of a step ended before the next step was reported.
        least = max([done, *(step for step, _ in rows)])
        found = find_checkpoint(self.folder / name)
        stored = stored_extra(found).iteration if is_checkpoint(found) else 0
        if stored < least:
            self.problems.append(f"{self.case.name}: the checkpoint is of iteration {stored}, {least} had been saved")
        if self.problems:
            return True
        return self._through(name) if stored >= STEPS else False

    def _through(self, name: str) -> bool:
        self.counts["jobs"] += 1
        if digests(self.folder / name) != self._files:
            self.problems.append(f"{self.case.name}: {name} ended with other values or states")
        shutil.rmtree(self.folder / name)
        return True


def kill_and_resume(count: int, *, seed: int = 0, cases: Sequence[Case] = CASES) -> Mapping[str, Any]:
    """Kill `count` processes, spread over the cases. Returns the figures: kills, kills during a save, jobs that were
    finished and found equal, problems (empty if all is well)."""
    for name in ("executor.run", "transformers.models.gpt2.modeling_gpt2", "torch._dynamo"):  # here once
        importlib.import_module(name)
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    problems: list[str] = []
    start_s = time.perf_counter()
    for number, case in enumerate(cases):
        share = count * (number + 1) // len(cases) - count * number // len(cases)
        with tempfile.TemporaryDirectory() as folder:
            kills = Kills(case, Path(folder), draw)
            kills.run(share)
            seen = kills.counts
            print(
                f"{case.name}: {seen['kills']} kills, {seen['while saving']} while saving, {seen['jobs']} jobs",
                flush=True,
            )
            counts += kills.counts
            problems += kills.problems
    return {
        "kills": counts["kills"],
        "while_saving": counts["while saving"],
        "before_a_step_of_a_resumed_run": counts["before a resumed step"],
        "with_files_on_disks": counts["with files on disks"],
        "before_the_first_checkpoint": counts["before the first checkpoint"],
        "jobs_finished_and_equal": counts["jobs"],
        "steps_a_job": STEPS,
        "cases": [case.name for case in cases],
        "problems": problems,
        "seed": seed,
        "seconds": round(time.perf_counter() - start_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="processes to kill (default: 100)")
    parser.add_argument("--only", default="", metavar="WORDS", help="jobs that have these words in their name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results/kills.json as it is")
    args = parser.parse_args()
    cases = [case for case in CASES if args.only in case.name]
    if not cases:
        parser.error(f"--only {args.only}: no job has these words; jobs: {'; '.join(case.name for case in CASES)}")
    figures = kill_and_resume(args.count, seed=args.seed, cases=cases)
    print(
        f"{figures['kills']} kills, {figures['while_saving']} of them while a checkpoint was written, "
        f"{figures['before_a_step_of_a_resumed_run']} before a resumed run's first step, "
        f"{figures['with_files_on_disks']} with files on disks; "
        f"{figures['jobs_finished_and_equal']} jobs of {STEPS} steps finished, "
        f"{len(figures['problems'])} problems"
    )
    for problem in figures["problems"]:
        print(f"  {problem}")
    if not args.no_write:
        from _results import write_result

        write_result("kills", figures)
    raise SystemExit(1 if figures["problems"] else 0)


if __name__ == "__main__":
    main()
