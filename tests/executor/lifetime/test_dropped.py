"""A prepared model that is dropped without `close()`: when nobody holds model or optimizer, everything goes.

The session stands in reference cycles (a model's hooks and the model), so it goes when Python's collector comes by;
`gc.collect()` brings that about here. A step that a queue is executing holds the session until it has ended.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import executor
from executor.lifetime import resources
from executor.moments import standing
from executor.queues.threads import ThreadQueues
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import ContractError, DoesNotFit, PlanError
from pstar_sim.workload.mixing import block_names, offload_blocks

DROPS = 20
LIMIT_S = 200.0  # for a step that is under way, on a machine however busy


class Wide(nn.Module):
    """8 MB. Keeps an output of its own, graph included, as models that log do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(500, 500) for _ in range(8))
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.kept = x
        return (x**2).mean()


BATCH = {"x": torch.ones(4, 500)}
BYTES = 8 * 4 * (500 * 500 + 500)


PLANS: list[Plan] = []


@pytest.fixture
def plan(kit: Any) -> Plan:
    if not PLANS:
        w = executor.capture_module(Wide(), BATCH, name="wide", batch=4)
        PLANS.append(kit.tight_plan("tide", w, Settings(clip=False)))
    return PLANS[0]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What other tests dropped is gone before, what they still hold asks for nothing, and torch has two threads."""
    gc.collect()
    monkeypatch.setattr(resources, "_asked", {})
    monkeypatch.setattr(resources, "_before", {})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def prepared(plan: Plan, **options: Any) -> tuple[nn.Module, executor.OffloadedOptimizer]:
    return executor.prepare(Wide(), plan, executor.AdamW(), check=False, **options)


def iteration(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(**BATCH).backward()
    optimizer.step()
    optimizer.zero_grad()


def active_modes() -> int:
    """Modes on this thread's stack, but for those of sessions that another thread collected: these have ended, and
    leave the stack with the next count (`Standing.end`)."""
    modes = (torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack()))
    return sum(mode not in standing._LEFT for mode in modes)


class Traces:
    """What sessions had, by weak references."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._modes = active_modes()
        self._sessions: list[weakref.ref[Any]] = []
        self._storages: list[weakref.ref[Any]] = []

    def add(self, session: executor.Session) -> None:
        arena = session.arena
        held = [*arena.slabs.slabs, *(arena.payloads.whole(c.index, "param") for c in session.plan.layout.chunks)]
        self._sessions.append(weakref.ref(session))
        self._storages += [weakref.ref(tensor.untyped_storage()) for tensor in held]

    def await_first_gone(self) -> None:
        """Return when the session that was added first has been collected."""
        deadline_s = time.monotonic() + LIMIT_S
        while gc.collect() >= 0 and self._sessions[0]() is not None:
            assert time.monotonic() < deadline_s, "it is held"
            time.sleep(0.01)  # a step may be under way

    def assert_gone(self) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            gc.collect()
            sessions = sum(ref() is not None for ref in self._sessions)
            storages = sum(storage.nbytes() > 0 for ref in self._storages if (storage := ref()) is not None)
            threads = [t.name for t in threading.enumerate() if t not in self._threads]
            found = (sessions, storages, threads, active_modes() - self._modes)
            if found == (0, 0, [], 0):
                assert torch.get_num_threads() == 2
                return
            assert time.monotonic() < deadline_s, found
            time.sleep(0.01)  # a step may be under way


def collected_elsewhere(traces: Traces) -> None:
    """Runs the collector in other threads, this one never; again while a queue's thread is executing a step."""
    deadline_s = time.monotonic() + LIMIT_S
    while any(ref() is not None for ref in traces._sessions) and time.monotonic() < deadline_s:
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()


def resident_bytes() -> int:
    """Of this process, without what the allocator keeps of memory that was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_twenty_drops_leave_no_thread_no_storage_and_no_memory(plan: Plan) -> None:
    """A notebook cell that is run again: each preparation replaces the one before."""
    traces = Traces()

    def cell() -> None:
        model, optimizer = prepared(plan)
        traces.add(optimizer.session)
        iteration(model, optimizer)  # its updates run on into the next iteration

    def drops() -> int:
        for _ in range(DROPS):
            cell()
        traces.assert_gone()
        return resident_bytes()

    before = drops()  # several sessions wait for the collector at a time; the allocator's share of that stays
    assert drops() - before < 3 * BYTES


def _in_an_iteration(model: Any, optimizer: Any) -> None:
    model(**BATCH)


def _between_backward_and_step(model: Any, optimizer: Any) -> None:
    model(**BATCH).backward()


def _off_the_plan(model: Any, optimizer: Any) -> None:
    loss = model(**BATCH)
    with torch.no_grad():
        model(**BATCH)
    loss.backward()


def _in_an_evaluation(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model(**BATCH)


def _other_queues(model: Any, optimizer: Any) -> None:
    optimizer.session.use_queues(ThreadQueues())
    iteration(model, optimizer)


def _a_new_plan(model: Any, optimizer: Any) -> None:
    optimizer.session.renew(optimizer.session.plan)
    iteration(model, optimizer)


def _a_queue_that_died(model: Any, optimizer: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no more")

    optimizer.session.contents.work = fail
    with pytest.raises(OSError, match="no more"):
        for _ in range(3):
            iteration(model, optimizer)


def guarded() -> executor.VirtualBackend:
    """With a limit of its own the accelerator has a guard, which is a mode of the interpreter."""
    return executor.VirtualBackend(gpu_bytes=10**9)


@pytest.mark.parametrize(
    ("leave", "backend"),
    [
        (_in_an_iteration, guarded),
        (_between_backward_and_step, executor.VirtualStreams),
        (_off_the_plan, guarded),
        (_in_an_evaluation, None),
        (_other_queues, None),
        (_a_new_plan, guarded),
        (_a_queue_that_died, executor.VirtualStreams),
    ],
)
def test_a_drop_in_the_middle(plan: Plan, leave: Callable[..., Any], backend: Callable[[], Any] | None) -> None:
    traces = Traces()

    def cell() -> None:
        model, optimizer = prepared(plan, backend=None if backend is None else backend())
        traces.add(optimizer.session)
        iteration(model, optimizer)
        leave(model, optimizer)

    for _ in range(2):
        cell()
    traces.assert_gone()


def test_offloaded_activations_and_their_graphs(kit: Any) -> None:
    """What hangs on a graph holds nobody, though the model keeps the graph."""
    w = executor.capture_module(*_text(kit), name="llama")
    plan = kit.tight_plan("tide", offload_blocks(w, block_names(w)[:1]), Settings(clip=False))
    traces = Traces()

    def cell() -> None:
        model, batch = _text(kit)
        model, optimizer = executor.prepare(model, plan, executor.AdamW())
        traces.add(optimizer.session)
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.kept = model(**batch).loss

    cell()
    traces.assert_gone()


def test_a_run_whose_tide_fits_no_plan(kit: Any) -> None:
    """The refusal is raised again at each forward, and holds none of the frames that it went through."""
    w = executor.capture_module(Wide(), BATCH, name="wide", batch=4)
    blind = replace(w, moments=tuple(replace(m, start_bytes=0, peak_bytes=0, end_bytes=0) for m in w.moments))
    plan = kit.tight_plan("static_partition", blind, Settings(clip=False))
    traces = Traces()

    def cell() -> None:
        model, optimizer = executor.prepare(Wide(), plan, executor.AdamW())
        traces.add(optimizer.session)
        for _ in range(2):
            with pytest.raises(DoesNotFit, match="tide of iteration 0"):
                iteration(model, optimizer)

    cell()
    traces.assert_gone()


def _text(kit: Any) -> tuple[nn.Module, Any]:
    model, draw = kit.build("llama")
    return model, draw(torch.Generator().manual_seed(9))


def test_a_connected_trainer(tmp_path: Path, kit: Any) -> None:
    from executor.examples import trainer

    traces = Traces()

    def cell() -> None:
        run = trainer.train(str(tmp_path), steps=1)
        traces.add(trainer.session_of(run))

    cell()
    traces.assert_gone()


@pytest.mark.parametrize("held", ["model", "optimizer", "session", "a layer", "a scheduler", "a loss"])
def test_whoever_holds_a_part_keeps_all(plan: Plan, held: str) -> None:
    """Training goes on with what is left; then that goes, too."""
    traces = Traces()

    def cell() -> Any:
        model, optimizer = prepared(plan)
        traces.add(optimizer.session)
        iteration(model, optimizer)
        return {
            "model": lambda: model,
            "optimizer": lambda: optimizer,
            "session": lambda: optimizer.session,
            "a layer": lambda: model.layers[3],
            "a scheduler": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1),
            "a loss": lambda: model(**BATCH),
        }[held]()

    kept = cell()
    gc.collect()
    (alive,) = traces._sessions
    if held == "a loss":  # a graph alone cannot be trained with
        traces.assert_gone()
        with pytest.raises(ContractError, match="no longer exists"):
            kept.backward()
        return
    session = alive()
    assert session is not None
    iteration(session.model, session.optimizer())
    assert session.deviations == 0
    del session, kept
    traces.assert_gone()


def test_a_parameter_alone_keeps_nothing(plan: Plan) -> None:
    traces = Traces()

    def cell() -> nn.Parameter:
        model, optimizer = prepared(plan)
        traces.add(optimizer.session)
        return next(model.parameters())

    parameter = cell()
    traces.await_first_gone()
    with pytest.raises(ContractError, match="session is gone"):
        parameter.norm()


def test_of_two_the_first_is_dropped_and_the_second_goes_on(plan: Plan) -> None:
    """Their guards lie on one stack of modes, and both asked for torch's threads."""
    traces = Traces()

    def limited() -> Any:
        return prepared(plan, backend=guarded())

    first = limited()
    second = limited()
    for one in (first, second):
        traces.add(one[1].session)
        iteration(*one)
    del first, one
    traces.await_first_gone()
    assert torch._C._len_torch_dispatch_stack() - traces._modes == 1
    assert torch.get_num_threads() == 1
    iteration(*second)
    assert second[1].session.deviations == 0
    second[1].session.close()
    del second
    traces.assert_gone()


def test_a_drop_seen_by_another_thread(plan: Plan) -> None:
    """The collector may come by in any thread; a guard leaves its own thread's stack when the next one begins there."""
    traces = Traces()

    def limited() -> Any:
        return prepared(plan, backend=guarded())

    model, optimizer = limited()
    traces.add(optimizer.session)
    gc.disable()
    try:
        del model, optimizer
        collected_elsewhere(traces)
    finally:
        gc.enable()
    assert traces._sessions[0]() is None
    torch.ones(2) + 1  # what is left of it does nothing
    model, optimizer = limited()
    assert torch._C._len_torch_dispatch_stack() - traces._modes == 1
    iteration(model, optimizer)
    del model, optimizer
    traces.assert_gone()


@pytest.mark.parametrize("queues", ["fibres", ThreadQueues()])
def test_queues_that_cannot_be_had_are_refused_and_nothing_stays_of_it(plan: Plan, queues: Any) -> None:
    model = Wide()
    with pytest.raises(PlanError, match=r"use 'threads' or a queues object|leave queues out, or give StreamQueues"):
        executor.prepare(model, plan, executor.AdamW(), check=False, queues=queues, backend=executor.VirtualStreams())
    assert torch.get_num_threads() == 2
    assert not any(hasattr(p, "plan_tensor") for p in model.parameters())
    optimizer = executor.prepare(model, plan, executor.AdamW(), check=False)[1]
    assert torch.get_num_threads() == 1
    optimizer.session.close()
    assert torch.get_num_threads() == 2
