"""Ctrl-C anywhere in an iteration (benchmarks/_interrupts.py, which also says what has to come of it).

The suite strikes a spread of the first, middle and last hits of every line of the executor; all of them are
`python benchmarks/interrupts.py`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import executor
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Queue
from pstar_sim.errors import ContractError, Interrupted

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import _interrupts  # type: ignore[import-not-found]
finally:
    sys.path.remove(str(BENCHMARKS))

STRIKES = 16  # of each case, a quarter of them without --whole: a fraction of a second each
BENCHES: dict[Any, Any] = {}


def bench_of(case: Any) -> Any:
    return BENCHES.setdefault(case, _interrupts.Bench(case))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", range(len(_interrupts.CASES)), ids=[str(case) for case in _interrupts.CASES])
def test_an_interruption_at_any_line(number: int, whole: bool) -> None:
    """Each case strikes other lines: the spread begins at another one. Before anything runs, the loop can go on."""
    bench = bench_of(_interrupts.CASES[number])
    points = _interrupts.three_of(bench.hits())
    strikes = STRIKES if whole else STRIKES // 4
    stride = len(points) / strikes
    share = number / len(_interrupts.CASES)
    earliest = next(point for point in points if point.thread == "user")
    struck = [earliest, *(points[int((i + share) * stride)] for i in range(strikes))]
    outcomes = {point: bench.strike(point) for point in struck}
    wrong = [f"{point}: {outcome.kind}: {outcome.said}" for point, outcome in outcomes.items() if not outcome.right]
    assert not wrong, "\n".join(wrong)
    assert outcomes[earliest].kind == "equal"


class Interrupting(executor.VirtualBackend):
    """Ctrl-C in a copy over the link, when half of it is there. left: copies to the host before that one."""

    left = -1

    def copy(self, target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None:
        if direction is Queue.D2H and self.left >= 0:
            self.left -= 1
            if self.left < 0:
                half = target.numel() // 2
                super().copy(target[:half], source[:half], direction)
                raise KeyboardInterrupt
        super().copy(target, source, direction)


@pytest.mark.parametrize("policy", ["tide", "optimal"])
def test_ctrl_c_in_a_gradients_copy_to_the_host(policy: str) -> None:
    """Off plan every gradient goes to the host in the user's thread, over the parameters' own slots. Six tensors, six
    copies: each is interrupted once, in one run; a seventh iteration is not."""
    case = _interrupts.Case(policy=policy, update="step", path="off plan")
    bench = bench_of(case)
    backend = Interrupting()
    model, optimizer = executor.prepare(
        copy.deepcopy(bench.model), bench.plan, executor.AdamW(lr=_interrupts.LR), backend=backend
    )
    loop = _interrupts.Loop(model, optimizer)
    before, broken, *after = bench.batches
    loop.iterate(before)
    for copies in range(6):
        loss = model(broken)
        loop.evaluate(broken)
        backend.left = copies
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        optimizer.zero_grad()
    for batch in after:
        loop.iterate(batch)
    assert all(torch.equal(a, b) for a, b in zip(loop.standing(), bench.left_out))
    optimizer.session.close()


def test_without_zero_grad_an_interrupted_backward_is_refused() -> None:
    """Half a gradient is never stepped with, nor added to."""
    bench = bench_of(_interrupts.Case(policy="tide", update="step", path="off plan"))
    backend = Interrupting()
    model, optimizer = executor.prepare(
        copy.deepcopy(bench.model), bench.plan, executor.AdamW(lr=_interrupts.LR), backend=backend
    )
    loop = _interrupts.Loop(model, optimizer)
    before, broken, *after = bench.batches
    loop.iterate(before)
    loss = model(broken)
    loop.evaluate(broken)
    backend.left = 3
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    with pytest.raises(ContractError, match=r"was interrupted; call optimizer.zero_grad\(\)"):
        optimizer.step()
    with pytest.raises(ContractError, match="was interrupted"):
        model(broken)
    model.zero_grad()
    for batch in after:
        loop.iterate(batch)
    assert all(torch.equal(a, b) for a, b in zip(loop.standing(), bench.left_out))
    optimizer.session.close()


@pytest.mark.parametrize("restore", [True, False])
def test_an_interrupted_session_closes(restore: bool) -> None:
    """Without `zero_grad()` too: parameters have the values of the last whole step."""
    bench = bench_of(_interrupts.Case(policy="tide", update="step", path="off plan"))
    backend = Interrupting()
    model, optimizer = executor.prepare(
        copy.deepcopy(bench.model), bench.plan, executor.AdamW(lr=_interrupts.LR), backend=backend
    )
    loop = _interrupts.Loop(model, optimizer)
    loop.iterate(bench.batches[0])
    before = model.state_dict()
    loss = model(bench.batches[1])
    loop.evaluate(bench.batches[1])
    backend.left = 2
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    threads = list(optimizer.session.queues._crew.threads)
    optimizer.session.close(restore=restore)
    assert threads and not [thread for thread in threads if thread.is_alive()]
    if restore:
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Taking(executor.VirtualBackend):
    """Ctrl-C while memory is taken for the chunks. left: takes before that one."""

    left = 2

    def take(self, payload: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        super().take(payload)


def test_an_interrupted_prepare_says_so_from_then_on() -> None:
    """No optimizer was returned that could be closed, and the values are in no one place."""
    bench = bench_of(_interrupts.Case(policy="tide", update="step", path="off plan"))
    model = copy.deepcopy(bench.model)
    with pytest.raises(KeyboardInterrupt):
        executor.prepare(model, bench.plan, executor.AdamW(lr=_interrupts.LR), backend=Taking())
    for asks in (
        lambda: executor.prepare(model, bench.plan, executor.AdamW(lr=_interrupts.LR)),
        model.state_dict,
        lambda: model(bench.batches[0]),
    ):
        with pytest.raises(Interrupted, match=r"prepare was interrupted .* build or load the model again"):
            asks()


@pytest.mark.parametrize("place", ["between moments", "in a gradient"])
def test_a_second_ctrl_c_where_the_first_is_noted(place: str, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block that the first one left stays open, and whatever comes next finds it."""
    model, draw = kit.build("mlp")
    generator = torch.Generator().manual_seed(3)
    plan = kit.tight_plan("tide", kit.workload_of(model, draw(generator)), Settings())
    model, optimizer = executor.prepare(model, plan, executor.AdamW(), watchdog_s=10)
    session = optimizer.session
    for _ in range(2):
        kit.train_alone(model, optimizer, iter([draw(generator)]), 1)

    def strike_again(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "note" and frame.f_code.co_filename.endswith("at_work.py"):
            raise KeyboardInterrupt("second")

    def strike() -> None:
        sys.settrace(strike_again)
        raise KeyboardInterrupt("first")

    owner, name = (session.following, "advance") if place == "between moments" else (session.contents.gradients, "put")
    plain, calls = getattr(owner, name), iter(range(100))

    def struck(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        if next(calls) == 2:
            strike()
        return result

    before = sys.gettrace()
    with monkeypatch.context() as interrupted:
        interrupted.setattr(owner, name, struck)
        try:
            with pytest.raises(KeyboardInterrupt, match="second"):
                kit.loss_of(model, draw(generator)).backward()
        finally:
            sys.settrace(before)
    assert session.state.at_work.depth, "the block is open"
    if place == "in a gradient":
        with pytest.raises(ContractError, match="was interrupted"):
            optimizer.step()
    optimizer.zero_grad()
    assert not (session.state.at_work.depth or session.state.at_work.torn)
    kit.train_alone(model, optimizer, iter([draw(generator)]), 1)
    session.close()
