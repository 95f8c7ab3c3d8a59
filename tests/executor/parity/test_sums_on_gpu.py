"""Sums of gradients on the GPU while states live on the host: the same numbers as accumulation in plain PyTorch, to the
bit, on the plan and off it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import executor
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind, Place
from pstar_sim.policy.family.attempt import attempt
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.schedule import Modes

MICRO_BATCHES = 3


def mixed_plan(
    kit: Any, model: nn.Module, update: str, clip: bool, *, spill: bool = False, sums: str = "32-bit"
) -> Plan:
    """Of six chunks in the order of use: pinned, sum on the GPU for CPU Adam, sum on the GPU for a streamed update, sum
    on the host for either, sum on the GPU for CPU Adam. spill: the sums on the GPU are on the host between
    micro-batches, and there is no room for what waits for the barrier."""
    x = torch.randn(3, 48, dtype=next(model.parameters()).dtype)
    w = kit.workload_of(model, {"x": x}, micro_batches=MICRO_BATCHES, name="layers")
    params = sum(t.bytes for t in w.tensors)
    settings = Settings(update=update, clip=clip, chunk_bytes=48 * 49 * x.element_size(), sums=sums)
    room = 6.0 if not spill else 2.1 if x.element_size() == 4 else 3.5  # bytes per byte of the parameters
    machine = kit.small_machine(w.peak_non_model_bytes + int(room * params))
    job = Job("by hand", w, machine, settings, Point(streams=True, sums=True))
    pinned, cpu_sum, stream_sum, stream_host, _, last = job.candidates
    summed = frozenset({cpu_sum, stream_sum, last})
    spilt = summed if spill else frozenset[int]()
    made = attempt(job, Modes(frozenset({pinned}), frozenset({stream_sum, stream_host}), summed, spilt))
    assert made.window.stuck is None
    plan = made.plan()
    plan.check()
    return plan


@pytest.fixture
def trained(kit: Any) -> Iterator[Callable[..., Any]]:
    sessions: list[Any] = []

    def make(update: str, clip: float | None, dtype: torch.dtype, *, spill: bool = False, sums: str = "32-bit") -> Any:
        torch.manual_seed(0)
        model = kit.Switch().to(dtype)
        twin = copy.deepcopy(model)
        plan = mixed_plan(kit, model, update, clip is not None, spill=spill, sums=sums)
        spec = executor.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=clip, eager=update == "eager")
        model, optimizer = executor.prepare(model, plan, spec, watchdog_s=5.0)
        sessions.append(optimizer.session)
        reference = (kit.Reference if sums == "32-bit" else added_in_dtype(kit))(twin, 1e-2, 0.1, clip)
        return kit.Run(model, optimizer, reference, plan, iter(lambda: {"x": torch.randn(3, 48, dtype=dtype)}, None))

    yield make
    for session in sessions:
        session.close(restore=False)


def both(kit: Any, run: Any, *, relative: float = 0.0) -> None:
    for model in (run.model, run.reference.model):
        model.order = list(range(6))
    mine, theirs = kit.train_both(
        run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=MICRO_BATCHES
    )
    assert mine == pytest.approx(theirs, rel=relative, abs=0)


def assert_same(run: Any, *, exact: bool) -> None:
    """Parameters and states: to the bit, or to 1e-6 behind a norm, which either side adds up in its own order, and off
    the plan, where a gradient that was on its way to the host is added last."""
    values = run.model.state_dict()
    mine = run.optimizer.state_dict()["state"]
    pairs = [(values[name], p.detach()) for name, p in run.reference.model.named_parameters()]
    for number, plain in run.reference.optimizer.state_dict()["state"].items():
        pairs += [(mine[number][name], plain[name]) for name in ("exp_avg", "exp_avg_sq")]
    for found, wanted in pairs:
        if exact:
            assert torch.equal(found, wanted)
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


SETTINGS = pytest.mark.parametrize(("update", "clip"), [("eager", None), ("step", None), ("step", 0.5)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@SETTINGS
def test_every_place_of_a_sum_trains_as_plain_pytorch_does(
    kit: Any, trained: Callable[..., Any], update: str, clip: float | None, dtype: torch.dtype
) -> None:
    run = trained(update, clip, dtype)
    opened = {s.chunk for s in run.plan.steps if s.kind is Kind.ALLOC and s.list == "grad32" and s.place is Place.GPU}
    sent = [s.chunk for s in run.plan.steps if s.kind is Kind.WRITEBACK and s.list == "grad32"]
    kept = {r.chunk for r in run.plan.initial if r.list == "grad32" and r.place is Place.HOST}
    held = {c for c, mode in enumerate(run.plan.modes) if mode == "stream"} - kept
    assert len(opened) == 3
    assert len(held) == 1
    assert sorted(sent) == sorted(opened - held)  # once in an iteration
    relative = 0.0 if clip is None else 1e-6
    for _ in range(2):
        both(kit, run, relative=relative)
    if update == "step" and dtype == torch.float32:  # the engine's own loop
        rows = [next(run.batches) for _ in range(MICRO_BATCHES)]
        run.session.step(rows)
        for row in rows:
            (run.reference.model(**row) / MICRO_BATCHES).backward()
        run.reference.step()
    both(kit, run, relative=relative)
    assert run.session.deviations == 0
    assert_same(run, exact=clip is None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@SETTINGS
def test_sums_that_spill_train_as_plain_pytorch_does(
    kit: Any, trained: Callable[..., Any], update: str, clip: float | None, dtype: torch.dtype
) -> None:
    """Each sum goes down behind every micro-batch and comes up before the next one. Behind the barrier the sum of the
    streamed chunk also waits for its states on the host."""
    run = trained(update, clip, dtype, spill=True)
    plan = run.plan
    copies = [(s.kind, s.chunk) for s in plan.steps if s.list == "grad32" and s.kind in (Kind.FETCH, Kind.WRITEBACK)]
    _, cpu_sum, stream_sum, stream_host, _, last = sorted(c.index for c in plan.layout.chunks)
    barrier = update == "step"
    for chunk, ups, downs in ((cpu_sum, 2, 3), (stream_sum, 2 + barrier, 2 + barrier), (last, 2, 3)):
        assert copies.count((Kind.FETCH, chunk)) == ups
        assert copies.count((Kind.WRITEBACK, chunk)) == downs
    assert copies.count((Kind.FETCH, stream_host)) == 1
    relative = 0.0 if clip is None else 1e-6
    for _ in range(3):
        both(kit, run, relative=relative)
    assert run.session.deviations == 0
    assert_same(run, exact=clip is None)


def added_in_dtype(kit: Any) -> Any:
    """Plain PyTorch whose gradients of all micro-batches add up in `.grad` of the bf16 parameters."""

    class Reference(kit.Reference):  # type: ignore[misc]
        def after_backward(self) -> None:
            pass

        def step(self) -> None:
            for name, parameter in self.model.named_parameters():
                self.master[name].grad = parameter.grad.float()
                parameter.grad = None
            super().step()

    return Reference


@pytest.mark.parametrize("spill", [False, True])
@SETTINGS
def test_sums_in_16_bits_train_as_plain_pytorch_adds_them(
    kit: Any, trained: Callable[..., Any], update: str, clip: float | None, spill: bool
) -> None:
    """Wherever a sum is, every addition is rounded as in `.grad`; in fp32 the parameters would be others."""
    run = trained(update, clip, torch.bfloat16, spill=spill, sums="16-bit")
    plan = run.plan
    assert all(plan.layout.payload_bytes(c, "grad32") == plan.layout.payload_bytes(c, "param") for c in range(6))
    relative = 0.0 if clip is None else 1e-6
    for _ in range(2):
        both(kit, run, relative=relative)
    assert run.session.deviations == 0
    assert_same(run, exact=clip is None)


@pytest.mark.parametrize("spill", [False, True])
@pytest.mark.parametrize(("update", "clip"), [("step", None), ("step", 0.5)])
def test_off_the_plan_sums_go_where_the_states_are(
    kit: Any, trained: Callable[..., Any], update: str, clip: float | None, spill: bool
) -> None:
    """The second micro-batch leaves a layer out, so the plan is left with sums on the GPU; then a whole iteration is
    off the plan, then one whose gradients are dropped."""
    run = trained(update, clip, torch.float32, spill=spill)
    both(kit, run, relative=1e-6)
    for orders in ([range(6), [0, 1, 3, 4, 5], range(6)], [[5, 4, 3, 2, 1, 0]] * 3):
        for order in orders:
            x = next(run.batches)["x"]
            for model in (run.model, run.reference.model):
                model.order = list(order)
                (model(x) / 3).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.reference.step()
        assert_same(run, exact=False)
    assert run.session.deviations == 2
    run.model.order = list(range(6))
    run.model(next(run.batches)["x"]).backward()
    run.optimizer.zero_grad()
    both(kit, run, relative=1e-6)
    both(kit, run, relative=1e-6)
    assert run.session.deviations == 2
    assert {(r.place, r.chunk, r.list) for r in run.plan.initial} == run.session.timetable.cut
    assert_same(run, exact=False)


@pytest.mark.parametrize("spill", [False, True])
def test_an_overflow_leaves_sums_and_states_as_they_were(kit: Any, trained: Callable[..., Any], spill: bool) -> None:
    """fp16, so losses are scaled. The sums of an iteration that overflows are dropped wherever they are; what follows
    is as under a plan whose gradients add up on the host alone."""
    run = trained("step", 0.5, torch.float16, spill=spill)
    twin = copy.deepcopy(run.reference.model)
    plan = kit.tight_plan("tide:sums=off", run.plan.workload, run.plan.settings)
    assert not [s for s in plan.steps if s.kind is Kind.ALLOC and s.list == "grad32"]
    spec = executor.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    other, optimizer = executor.prepare(twin, plan, spec, watchdog_s=5.0)
    rows = [next(run.batches)["x"] for _ in range(3 * MICRO_BATCHES)]
    rows[MICRO_BATCHES + 1] = torch.full_like(rows[0], 6e4)  # its gradients overflow
    for one, optimizer_of in ((run.model, run.optimizer), (other, optimizer)):
        for n, x in enumerate(rows):
            (one(x) / MICRO_BATCHES).backward()
            if n % MICRO_BATCHES == MICRO_BATCHES - 1:
                optimizer_of.step()
                optimizer_of.zero_grad()
    assert run.session.scaling.skipped_steps == optimizer.session.scaling.skipped_steps == 1
    assert run.session.deviations == 0
    assert [s for s in run.plan.steps if s.kind is Kind.ALLOC and s.list == "param"]  # lists that the update fills
    for mine, theirs in zip(run.model.parameters(), other.parameters()):
        assert torch.equal(mine.detach().clone(), theirs.detach().clone())
    mine, theirs = run.optimizer.state_dict()["state"], optimizer.state_dict()["state"]
    for number, states in theirs.items():
        assert all(torch.equal(mine[number][name], states[name]) for name in ("exp_avg", "exp_avg_sq"))
    optimizer.session.close(restore=False)


@pytest.mark.parametrize("update", ["eager", "step"])
def test_a_run_with_sums_that_spill_goes_on_from_its_checkpoint(
    kit: Any, trained: Callable[..., Any], tmp_path: Path, update: str
) -> None:
    run = trained(update, None, torch.float32, spill=True)
    both(kit, run)
    run.optimizer.save(tmp_path / "c")
    both(kit, run)
    again = trained(update, None, torch.float32, spill=True)
    both(kit, again)
    both(kit, again)  # other values than the checkpoint's
    again.optimizer.load(tmp_path / "c")
    again.reference, again.batches = run.reference, run.batches
    run.optimizer.load(tmp_path / "c")
    rows = [next(run.batches)["x"] for _ in range(MICRO_BATCHES)]
    for one in (run, again):
        for x in rows:
            (one.model(x) / MICRO_BATCHES).backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
        assert one.session.deviations == 0
    values, others = run.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(values[name], others[name]) for name in values)


def test_sums_that_are_dropped_do_not_go_to_the_host(kit: Any, trained: Callable[..., Any]) -> None:
    """`zero_grad()` between two micro-batches finds sums on the GPU. The host gets no list that the plan does not have
    there."""
    run = trained("step", 0.5, torch.float32)
    both(kit, run, relative=1e-6)
    for _ in range(2):
        run.model(next(run.batches)["x"]).backward()
    copied = run.session.backend.copied_bytes["d2h"]
    run.optimizer.zero_grad()
    assert run.session.backend.copied_bytes["d2h"] == copied
    both(kit, run, relative=1e-6)
    run.session.drain()
    on_host = {(r.place, r.chunk, r.list) for r in run.session.arena.present if r.place is Place.HOST}
    assert on_host <= run.session.timetable.cut


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_between_backward_and_update_no_working_list_is_kept_for_its_own_sake(
    kit: Any, trained: Callable[..., Any], dtype: torch.dtype, clip: float | None
) -> None:
    """Behind the barrier the pinned chunk and the streamed chunk with its sum on the GPU have their gradients in
    grad32, so their working lists are dropped without a copy until the update. In between the loop reads parameters,
    evaluates and drops the gradients as in plain PyTorch."""
    run = trained("step", clip, dtype)
    pinned, _, stream_sum, *_ = sorted(c.index for c in run.plan.layout.chunks)
    kinds = {c: [s.kind for s in run.plan.steps if (s.chunk, s.list) == (c, "param")] for c in (pinned, stream_sum)}
    assert kinds[pinned] == kinds[stream_sum] == [Kind.DROP, Kind.ALLOC]
    relative = 0.0 if clip is None else 1e-6
    both(kit, run, relative=relative)
    for updates in (True, False):
        rows = [next(run.batches)["x"] for _ in range(MICRO_BATCHES)]
        for model in (run.model, run.reference.model):
            for x in rows:
                (model(x) / MICRO_BATCHES).backward()
                if model is run.reference.model:
                    run.reference.after_backward()
        run.session.drain()
        held = {(r.chunk, r.list) for r in run.session.arena.present if r.place is Place.GPU}
        assert not held & {(pinned, "param"), (stream_sum, "param")}
        for mine, theirs in zip(run.model.parameters(), run.reference.model.parameters()):
            torch.testing.assert_close(mine.detach().clone(), theirs.detach(), rtol=0, atol=1e-6 if clip else 0)
        if updates:
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.reference.step()
            continue
        with torch.no_grad():
            for model in (run.model, run.reference.model):
                model.eval()
            values = [float(model(rows[0])) for model in (run.model, run.reference.model)]
            assert values[0] == pytest.approx(values[1], rel=relative, abs=0)
            for model in (run.model, run.reference.model):
                model.train()
        run.optimizer.zero_grad()
        for parameter in (*run.reference.model.parameters(), *run.reference.master.values()):
            parameter.grad = None
    both(kit, run, relative=relative)
    assert run.session.deviations == 1  # the evaluation, which needs chunks that gradients have overwritten
    assert_same(run, exact=clip is None)
