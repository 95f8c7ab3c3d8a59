"""Plans that keep lists on disks: the same bits as without disks, and as plain AdamW's."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import executor
from executor.devices.backend import VirtualBackend
from executor.disks.folders import DiskFolders
from executor.disks.store import DiskStore
from executor.lifetime import renewal
from executor.memory.arena import Arena
from executor.memory.payloads import DiskPayloads, HostSlabs
from executor.off_plan.inline import Inline
from pstar_sim.core.plan import Settings
from pstar_sim.core.slabs import PAGE_BYTES, pool_key, pool_peak_bytes, pooled_payloads
from pstar_sim.core.step import Kind, Place, Queue
from pstar_sim.core.workspace import WORKSPACE, with_host_budget, workspace_bytes
from pstar_sim.errors import DiskError, DoesNotFit, Interrupted, OutOfMemory, PlanError
from pstar_sim.policy.registry import plan_to_run

STEPS = 3
LAYERS = 3  # of transformers: shares of the host are for as many


def full(*_: Any) -> int:
    """In place of os.pwritev or os.posix_fallocate: no room."""
    raise OSError(errno.ENOSPC, "No space left on device")


def train(kit: Any, run: Any, micro_batches: int) -> None:
    """Both models, by session.step where the plan is layer-major."""
    if run.plan.workload.order.of_loop:
        mine, theirs = kit.train_both(
            run.model, run.reference, run.optimizer, run.batches, steps=STEPS, micro_batches=micro_batches
        )
        assert mine == theirs
        return
    for _ in range(STEPS):
        rows = [next(run.batches) for _ in range(micro_batches)]
        run.session.step(rows)
        for row in rows:
            (kit.loss_of(run.reference.model, row) / micro_batches).backward()
            run.reference.after_backward()
        run.reference.step()


CASES = {
    "states": ("mlp", "states=nvme", 1, None, torch.float32, None),
    "parameters": ("mlp", "params=nvme", 3, 0.5, torch.float32, None),
    "both, in bf16": ("llama", "params=nvme,states=nvme", 2, 0.5, torch.bfloat16, None),
    "moments, clipped": ("gpt2", "tide", 1, 0.5, torch.float32, 0.3),
    "masters, clipped": ("gpt2", "tide", 1, 0.5, torch.float32, 0.5),
    "tide, in bf16": ("llama", "tide", 2, None, torch.bfloat16, 0.5),
    "streams": ("llama", "optimal:order=depth-first", 2, 0.5, torch.float32, 0.4),
    "wholly, clipped": ("gpt2", "tide", 1, 0.5, torch.float32, 0.2),
    "wholly, in bf16": ("llama", "tide", 1, None, torch.bfloat16, 0.15),
    "wholly, two": ("gpt2", "tide", 2, None, torch.float32, 0.3),
    "wholly, four, clipped": ("llama", "tide", 4, 0.5, torch.bfloat16, 0.25),
    "wholly, by layers": ("gpt2", "l2l", 2, 0.5, torch.float32, 0.3),
    "wholly, with activations": ("gpt2", "karma", 2, 0.5, torch.float32, 0.3),
    "wholly, streams": ("gpt2", "optimal:order=depth-first,sums=off", 2, 0.5, torch.float32, 0.5),
    "a window": ("gpt2", "stronghold", 1, None, torch.float32, 0.5),
}
CHUNKS = {
    "masters, clipped": 16384,
    "wholly, clipped": 16384,
    "wholly, in bf16": 4096,
    "wholly, two": 16384,
    "wholly, four, clipped": 4096,
    "wholly, by layers": 8192,
    "wholly, with activations": 8192,
    "wholly, streams": 8192,
}
"""So small that the host has no room for all working lists."""
BESIDE = ("both, in bf16", "tide, in bf16", "wholly, in bf16", "wholly, four, clipped", "wholly, streams", "a window")
"""Cases in which disks read while they write."""


@pytest.mark.parametrize("case", CASES)
def test_trains_to_the_bit_as_without_disks(
    kit: Any,
    start: Callable[..., Any],
    tmp_path: Path,
    case: str,
    whole: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside plain AdamW; with --whole beside a plan without disks, too."""
    monkeypatch.setattr(executor.session.steps, "logged_iterations", lambda _: STEPS + 1)  # `byte_changes` reads all
    name, policy, micro_batches, clip, dtype, share = CASES[case]
    if case.endswith(", streams"):
        request.getfixturevalue("streaming")
    about: dict[str, Any] = {"micro_batches": micro_batches, "clip": clip, "dtype": dtype, "checkpointing": True}
    of_plan: dict[str, Any] = {"micro_batches": micro_batches, "clip": clip is not None, "dtype": dtype}
    of_plan["chunk_bytes"] = CHUNKS.get(case)
    of_plan |= {"effort": 0.1} if case == "streams" else {}  # with less, no chunk on disks is streamed
    beside = case in BESIDE
    without = ("params=cpu" if share is None else policy, None)
    plans = [
        kit.plan_on_disks(name, spec, host_share=host, beside=beside, layers=LAYERS, **of_plan)
        for spec, host in [(policy, share), without][: 1 + whole]
    ]
    writes = {step.queue for step in plans[0].steps if step.kind is Kind.NVME_WRITE}
    assert writes == {Queue.NVME_WRITE if beside else Queue.NVME}
    lists = ("param",) if case == "wholly, streams" else plans[0].layout.lists
    on_disks = {row.chunk for row in plans[0].initial if row.place is Place.NVME and row.list in lists}
    assert not any(row.place is Place.NVME for plan in plans[1:] for row in plan.initial)
    working = any((row.place, row.list) == (Place.NVME, "param") for row in plans[0].initial)
    assert working == case.startswith(("wholly", "param", "both"))
    sums = any((row.place, row.list) == (Place.NVME, "grad32") for row in plans[0].initial)
    assert sums == (case.startswith(("wholly", "both")) and micro_batches > 1)
    states = {row.list for row in plans[0].initial if row.place is Place.NVME} - {"param", "grad", "grad32"}
    apart = {"mom": {"momentum", "variance"}, "mas": {"param32"}}.get(case[:3])
    assert case == "parameters" or apart is None or states == apart
    assert not case.endswith("streams") or any(plans[0].modes[chunk] == "stream" for chunk in on_disks)
    runs = [start(name, policy, plan=plan, disks=[tmp_path], layers=LAYERS, **about) for plan in plans]
    for run in runs:
        train(kit, run, micro_batches)
    for values in [run.model.state_dict() for run in runs]:
        for key, parameter in runs[0].reference.model.named_parameters():
            assert torch.equal(values[key], parameter.detach()), key
    session = runs[0].session
    assert session.deviations == 0
    moved = session.timeline().moved_bytes
    assert moved == {lane: plans[0].moved_bytes[lane] for lane in moved}
    assert moved["nvme_read"] and moved["nvme_write"]
    session.drain()
    logged, booked = kit.byte_changes(session)
    assert logged == booked
    session.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "case", ["all lists", pytest.param("wholly", marks=pytest.mark.whole), "wholly, two", "wholly, streams"]
)
def test_what_leaves_the_plan_is_right_on_disks_too(
    kit: Any,
    start: Callable[..., Any],
    tmp_path: Path,
    case: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An evaluation, a backward that is dropped, and a larger batch, alone and behind a micro-batch on plan. At first
    disks write so slowly that the plan is left between a write and the step that frees the host's list."""
    delay_s, write = 0.01, DiskStore.write

    def write_slowly(store: DiskStore[Any], key: Any, source: torch.Tensor) -> None:
        write(store, key, source)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(delay_s)

    monkeypatch.setattr(DiskStore, "write", write_slowly)
    if case.startswith("wholly"):
        name, count = "gpt2", 1 + (case != "wholly")
        small: dict[str, Any] = {"host_share": 0.1 + 0.1 * count, "chunk_bytes": 16384, "beside": True}
        policy = "tide:pins=4"
        if case.endswith("streams"):
            request.getfixturevalue("streaming")
            policy, small["host_share"], small["chunk_bytes"] = "optimal:order=depth-first,sums=off", 0.5, 8192
        plan = kit.plan_on_disks(name, policy, micro_batches=count, clip=True, layers=LAYERS, **small)
        on_disks = {row.list for row in plan.initial if row.place is Place.NVME}
        assert "param" in on_disks and ("grad32" in on_disks) == (count > 1)
    else:
        name, count = "mlp", 2
        plan = kit.plan_on_disks(name, "params=nvme,states=nvme", micro_batches=count, clip=True)
    about: dict[str, Any] = {"micro_batches": count, "clip": 0.5, "checkpointing": True, "layers": LAYERS}
    run = start(name, plan.policy, plan=plan, disks=[tmp_path], **about)
    model, twin = run.model, run.reference.model

    def both(batch: Any) -> None:
        for one in (model, twin):
            kit.loss_of(one, batch).backward()

    for n, rows in enumerate(times[:count] for times in ((1, 1), (1, 2), (2, 2), (1, 1))):
        delay_s = 0.01 if n < 2 else 0.0
        batch = next(run.batches)
        with torch.no_grad():
            assert float(kit.loss_of(model, batch)) == float(kit.loss_of(twin, batch))
        both(batch)
        run.optimizer.zero_grad()
        twin.zero_grad()
        for times in rows:
            both({key: torch.cat([value] * times) for key, value in next(run.batches).items()})
        with torch.no_grad():  # where gradients have overwritten parameters
            assert float(kit.loss_of(model, batch)) == float(kit.loss_of(twin, batch))
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.reference.step()
    assert run.session.deviations >= 2
    values = model.state_dict()
    for key, parameter in twin.named_parameters():
        assert kit.distance(values[key], parameter.detach()) <= 1e-6, key


def test_a_plan_on_disks_needs_a_folder(kit: Any, start: Callable[..., Any]) -> None:
    plan = kit.plan_on_disks("mlp", "states=nvme", micro_batches=1, clip=False)
    with pytest.raises(PlanError, match=r"zero_infinity.* keeps lists on disks and no folder .* give --disks FOLDER"):
        start("mlp", "zero_infinity", plan=plan)


def test_a_window_stays_until_it_is_written(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = kit.plan_on_disks("mlp", "states=nvme", micro_batches=1, clip=False)
    folders = DiskFolders(folders=[tmp_path])
    slabs = HostSlabs(plan, VirtualBackend())
    payloads = DiskPayloads(plan, folders, slabs)
    payloads.allocate()
    slabs.allocate()
    rows = sorted((row.chunk, row.list) for row in plan.initial if row.place is Place.NVME and row.chunk >= 0)
    first = payloads.at(*rows[0]).fill_(3)
    slab, offset = slabs.room.where[pool_key(0)]
    assert first.data_ptr() == slabs.slabs[slab].data_ptr() + offset
    others = list(iter(lambda: slabs.lend(4096), None))
    assert others
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", full)
        with pytest.raises(DiskError, match="No space left"):
            payloads.close_windows()
        with pytest.raises(DiskError, match="No space left"):
            for row in rows[1:4]:
                payloads.at(*row)
    assert torch.all(payloads.at(*rows[0]) == 3)
    payloads.close_windows()
    assert slabs.lend(4096) is None  # a view is left
    assert torch.all(first == 3)
    del first
    assert torch.all(payloads.at(*rows[0]) == 3)
    payloads.give_all()
    folders.close()


def test_a_checkpoint_holds_what_is_on_disks(kit: Any, start: Callable[..., Any], tmp_path: Path) -> None:
    """It continues on disks and without them, each as if it had not been interrupted."""
    plans = [
        kit.plan_on_disks("mlp", where, micro_batches=1, clip=True)
        for where in ("params=nvme,states=nvme", "params=cpu", "states=nvme")
    ]
    about = {"clip": 0.5, "checkpointing": True}
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    first, *others = [
        start("mlp", "zero_infinity", plan=plan, disks=[folder], **about) for plan, folder in zip(plans, folders)
    ]
    for _ in range(2):
        kit.train_alone(first.model, first.optimizer, first.batches, 1)
    on_disks = {row.list: 0 for row in plans[0].initial if row.place is Place.NVME}
    for row in plans[0].initial:
        on_disks[row.list] += plans[0].layout.payload_bytes(row.chunk, row.list) if row.place is Place.NVME else 0
    with first.session.still():
        before = dict(first.session.arena.disks.moved_bytes)
        first.optimizer.save(tmp_path / "checkpoint")
        after = first.session.arena.disks.moved_bytes
    assert after["nvme_write"] == before["nvme_write"]
    moments = on_disks["momentum"] + on_disks["variance"]  # each list once; of parameters, some are on the gpu
    assert moments <= after["nvme_read"] - before["nvme_read"] <= moments + on_disks["param"]
    for other in others:
        other.optimizer.load(tmp_path / "checkpoint")
    ahead = [next(first.batches) for _ in range(2)]
    for run in (first, *others):
        for batch in ahead:
            kit.train_alone(run.model, run.optimizer, iter([batch]), 1)
    states = [(run.model.state_dict(), run.optimizer.state_dict()["state"]) for run in (first, *others)]
    for values, kept in states[1:]:
        assert all(torch.equal(values[key], value) for key, value in states[0][0].items())
        assert all(torch.equal(kept[i][key], value) for i, row in states[0][1].items() for key, value in row.items())


@pytest.mark.parametrize("count", [1, 2])
def test_ctrl_c_between_a_write_and_the_free_behind_it(
    kit: Any, start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Off plan, where the host has little room: the update goes on with what is on disks."""
    plan = kit.plan_on_disks(
        "gpt2",
        "tide:pins=4",
        micro_batches=count,
        clip=True,
        host_share=0.1 + 0.1 * count,
        chunk_bytes=16384,
        layers=LAYERS,
    )
    about: dict[str, Any] = {"micro_batches": count, "clip": 0.5, "checkpointing": True, "replan_after": 0}
    run = start("gpt2", plan.policy, plan=plan, disks=[tmp_path], layers=LAYERS, **about)
    perform, left = Inline.perform, [0]  # writes until Ctrl-C comes

    def interrupted(inline: Inline, step: Any, *given: Any) -> None:
        perform(inline, step, *given)
        left[0] -= step.kind is Kind.NVME_WRITE
        if left[0] == 0 and step.kind is Kind.NVME_WRITE:
            raise KeyboardInterrupt

    monkeypatch.setattr(Inline, "perform", interrupted)
    for strike in (1, 2, 4, 8):
        for n in range(count):
            batch = {key: torch.cat([value] * (1 + (n == count - 1))) for key, value in next(run.batches).items()}
            for one in (run.model, run.reference.model):
                kit.loss_of(one, batch).backward()
        left[0] = strike
        with pytest.raises(KeyboardInterrupt):
            run.optimizer.step()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.reference.step()
    values = run.model.state_dict()
    for key, parameter in run.reference.model.named_parameters():
        assert kit.distance(values[key], parameter.detach()) <= 1e-6, key


class Tower(torch.nn.Module):
    """4.7 M parameters: 76 MB of model data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(768, 768) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def memory_bytes(name: str) -> int:
    """name: VmRSS, or VmHWM, the most since it was reset."""
    rows = dict(row.split(":") for row in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(rows[name].split()[0])


def test_a_longer_batch_takes_no_more_memory_than_either_plan(kit: Any, tmp_path: Path) -> None:
    """All values pass through the disks on their way into the new plan, which leaves room for the workspace."""
    torch.manual_seed(0)
    model = Tower()
    twin = copy.deepcopy(model)
    w = kit.workload_of(model, {"x": torch.randn(16, 768)})
    data_bytes = 4 * sum(t.bytes for t in w.tensors)
    host_bytes = data_bytes // 4 + workspace_bytes(w)
    machine = replace(kit.small_machine(5 * w.peak_non_model_bytes + data_bytes // 4), nvme=kit.DISKS)
    settings = Settings(clip=True, effort=kit.LITTLE_EFFORT)
    first = plan_to_run("tide", w, with_host_budget(machine, host_bytes), settings)
    spec = executor.AdamW(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)
    model, optimizer = executor.prepare(model, first, spec, disks=[tmp_path], watchdog_s=5.0)
    session, reference = optimizer.session, kit.Reference(twin, 1e-3, 0.1, 0.5)
    for rows in (16, 64, 64, 16):
        batch = {"x": torch.randn(rows, 768)}
        expected = kit.loss_of(reference.model, batch)
        expected.backward()
        reference.step()
        before = memory_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        loss = kit.loss_of(model, batch)
        assert memory_bytes("VmHWM") - before < data_bytes // 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(loss.detach()) == float(expected.detach())
    plan = session.plan
    assert plan.workload.batch == 64 and session.outgrown.plans == 1
    assert (WORKSPACE, Place.HOST, workspace_bytes(plan.workload)) in plan.buffers
    values = model.state_dict()
    for key, parameter in twin.named_parameters():
        assert torch.equal(values[key], parameter.detach()), key
    session.close(restore=False)
    assert list(tmp_path.iterdir()) == []


def test_a_new_plan_without_room_leaves_the_session_as_it_was(
    kit: Any, start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused are the file between two plans, then the new plan's files and its host memory, after the former plan's
    have been given back."""
    both, states = (
        kit.plan_on_disks("mlp", where, micro_batches=1, clip=True)
        for where in ("params=nvme,states=nvme", "states=nvme")
    )
    run = start("mlp", "zero_infinity", plan=both, disks=[tmp_path], clip=0.5, checkpointing=True)
    session = run.session

    def refuse_after(count: int, owner: Any, name: str, error: Exception) -> None:
        calls, real = itertools.count(), getattr(owner, name)

        def move(*given: Any) -> Any:
            if next(calls) == count:
                raise error
            return real(*given)

        monkeypatch.setattr(owner, name, move)

    def trained() -> None:
        mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=1)
        assert mine == theirs

    trained()
    no_space, none = OSError(errno.ENOSPC, "No space left on device"), RuntimeError("no memory")
    for count, owner, name, error, refusal in (
        (0, os, "posix_fallocate", no_space, DiskError),
        (1, os, "posix_fallocate", no_space, DiskError),
        (0, session.backend, "host_slab", none, DoesNotFit),
    ):
        refuse_after(count, owner, name, error)
        with pytest.raises(refusal, match=r"has no room|no memory"):
            session.renew(states)
        monkeypatch.undo()
        assert session.plan is both
        trained()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DoesNotFit, match=r"no rung of the ladder .* has no room.*; the former plan stays; after"):
        session.ladder.climb(
            OutOfMemory(what="an operator", asked_bytes=1, payload_bytes=0, other_bytes=0, limit_bytes=None)
        )
    monkeypatch.undo()
    assert session.plan is both and session.shortage.pending
    trained()
    assert session.plan is not both and not session.shortage.pending
    for plan in (states, both):
        session.renew(plan)
        assert session.plan is plan
        trained()
    assert session.deviations == 0
    read = DiskStore.read

    def lose(store: DiskStore[Any], key: Any, target: torch.Tensor) -> None:
        if len(key) == 3:  # of a value between two plans
            raise DiskError(f"{store.named(key)} cannot be read; continue from the last checkpoint")
        read(store, key, target)

    monkeypatch.setattr(DiskStore, "read", lose)
    with pytest.raises(
        Interrupted, match=r"some are lost: param of .* cannot be read; continue from the last checkpoint"
    ):
        session.renew(states)
    monkeypatch.undo()
    with pytest.raises(Interrupted, match="some are lost"):
        kit.loss_of(run.model, next(run.batches))
    session.close(restore=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("outgrown", "error"), [(True, KeyboardInterrupt), (False, RuntimeError)])
@pytest.mark.parametrize("on_disks", [True, False], ids=["disks", "memory"])
@pytest.mark.parametrize("strike", ["empty", "allocate_slabs", "load_parameters", "put", "start"])
def test_ctrl_c_between_two_plans_ends_the_run_and_saves_nothing_wrong(
    kit: Any,
    start: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strike: str,
    on_disks: bool,
    outgrown: bool,
    error: type[BaseException],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """So does any error that is none of the project's. Parameters keep values that were in memory; from disks they are
    lost, and no read succeeds."""
    owner: Any = {"load_parameters": renewal, "put": renewal._Between, "start": executor.Session}.get(strike, Arena)
    kept, folder = not on_disks and strike != "start", tmp_path / "disks"
    folder.mkdir()
    plan = kit.plan_on_disks("mlp", "tide", micro_batches=1, clip=True, host_share=0.25 if on_disks else None)
    assert on_disks == any(r.place is Place.NVME for r in plan.initial)
    run = start("mlp", "tide", plan=plan, disks=[folder] if on_disks else None, clip=0.5, checkpointing=True)
    kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=1)
    batch, expected = next(run.batches), {k: v.clone() for k, v in run.model.state_dict().items()}
    assert any(value.any() for value in expected.values())
    real = getattr(owner, strike)

    def interrupted(*given: Any, **named: Any) -> None:
        if strike == "empty":
            real(*given, **named)
        raise error("struck")

    monkeypatch.setattr(owner, strike, interrupted)
    with pytest.raises(error, match="struck"):
        if outgrown:
            run.model(**{key: torch.cat([value] * 4) for key, value in batch.items()})
        else:
            run.session.renew(run.plan)
    monkeypatch.undo()
    name, parameter = next(iter(run.model.named_parameters()))
    for act in (
        lambda: run.optimizer.save(tmp_path / "checkpoint"),
        run.optimizer.state_dict,
        lambda: kit.loss_of(run.model, batch),
        run.optimizer.step,
        run.optimizer.zero_grad,
        lambda: run.session.renew(run.plan),
    ):
        with pytest.raises(Interrupted, match="continue from the last checkpoint"):
            act()
    assert not (tmp_path / "checkpoint").exists()
    for read in (lambda: run.model.state_dict()[name], parameter.clone, lambda: parameter.detach().clone()):
        if kept:
            assert torch.equal(read(), expected[name])
        else:
            with pytest.raises(Interrupted, match="continue from the last checkpoint"):
                read()
    run.session.close()
    assert kept == ("left without values" not in caplog.text)
    if kept:
        assert all(torch.equal(value, expected[key]) for key, value in run.model.state_dict().items())
    assert type(parameter) is torch.nn.Parameter and not list(folder.iterdir())


def test_holes_of_the_pool_give_their_pages_back(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, no more pages have memory than payloads have at a time in the plan's order."""
    plan = kit.plan_on_disks("mlp", "params=nvme,states=nvme", micro_batches=1, clip=False, dtype=torch.bfloat16)
    backend, slabs_made = VirtualBackend(), list[torch.Tensor]()
    host_slab = backend.host_slab

    def noted(size_bytes: int) -> torch.Tensor:
        slabs_made.append(host_slab(size_bytes))
        return slabs_made[-1]

    monkeypatch.setattr(backend, "host_slab", noted)
    slabs = HostSlabs(plan, backend)
    slabs.allocate()
    sizes = {key: plan.layout.payload_bytes(*key) for key in sorted(pooled_payloads(plan))}
    pages = {key: -(-size // PAGE_BYTES) for key, size in sizes.items()}
    most, held = pool_peak_bytes(plan) // PAGE_BYTES, dict[tuple[int, str], int]()
    for turn in range(8):
        for key in sorted(sizes.keys() - held, key=lambda key: pages[key] * (-1) ** turn):
            if sum(held.values()) + pages[key] <= most:
                held[key] = pages[key]
                slabs.take(*key)
                slabs.at(*key).view(torch.uint8).fill_(1)
                written = sum(int(slab.view(-1, PAGE_BYTES).any(dim=1).sum()) for slab in slabs_made)
                assert sum(held.values()) <= written <= most
        for key in list(held)[::2]:
            assert torch.all(slabs.at(*key).view(torch.uint8) == 1)
            slabs.give(*key)
            del held[key]
    assert sum(slab.numel() for slab in slabs_made) > slabs.room.total_bytes
    slabs.give_all()
