"""Memory runs out while a plan runs: the step in progress is finished, a rung makes the next plan, results stay those
of plain torch."""

from __future__ import annotations

import copy
import random
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from thinned import by_turns
from torch import nn

import executor
from executor.devices.virtual_streams import VirtualStreams
from executor.off_plan.rungs import RUNGS
from executor.training import train as train_loop
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place
from pstar_sim.errors import ContractError, DoesNotFit
from pstar_sim.policy.registry import find_policy, policy_name


def train(run: Any, kit: Any, losses: list[list[float]], steps: int, micro_batches: int = 1) -> None:
    """The same batches on the prepared model and, apart from it, on the plain one: what the plain one holds must not
    count."""
    batches = [[next(run.batches) for _ in range(micro_batches)] for _ in range(steps)]
    for step in batches:
        for batch in step:
            loss = kit.loss_of(run.model, batch) / micro_batches
            loss.backward()
            losses[0].append(float(loss.detach()))
            del loss
        run.optimizer.step()
        run.optimizer.zero_grad()
    for step in batches:
        for batch in step:
            loss = kit.loss_of(run.reference.model, batch) / micro_batches
            loss.backward()
            losses[1].append(float(loss.detach()))
            run.reference.after_backward()
        run.reference.step()


def assert_same(run: Any, kit: Any, losses: list[list[float]], within: float = 1e-6) -> None:
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    values = run.model.state_dict()
    for name, parameter in run.reference.model.named_parameters():
        assert kit.distance(values[name], parameter.detach()) <= within, name
    state, plain = run.optimizer.state_dict()["state"], run.reference.optimizer.state_dict()["state"]
    for number, row in plain.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert kit.distance(state[number][key], row[key]) <= within, (number, key)


def roomy_plan(kit: Any, name: str, policy: str, *, spare: float = 0.5, layers: int = 2, **settings: Any) -> Plan:
    model, draw = kit.build(name, layers=layers)
    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)), name=name)
    params = sum(t.bytes for t in w.tensors if t.tied_to is None)
    machine = kit.small_machine(w.peak_non_model_bytes + int((1 + spare) * params))
    return find_policy(policy)(w, machine, Settings(**settings))


@pytest.mark.parametrize(
    ("policy", "at"),
    [
        pytest.param("tide", "before", marks=pytest.mark.whole),
        pytest.param("tide", "forward", marks=pytest.mark.whole),
        ("tide", "backward"),
        ("static_partition", "forward"),
        ("all_on_gpu", "backward"),
        ("zero_offload", "forward"),
        ("patrickstar", "before"),
    ],
)
def test_less_memory_than_the_plan_counted_on(kit: Any, start: Callable[..., Any], policy: str, at: str) -> None:
    plan = roomy_plan(kit, "gpt2", policy, clip=True, spare=4.0)
    backend = executor.VirtualBackend(gpu_bytes=plan.gpu_budget_bytes)
    run = start("gpt2", policy, clip=0.5, plan=plan, backend=backend)
    losses: list[list[float]] = [[], []]
    train(run, kit, losses, 2)
    assert run.session.deviations == 0 and not run.session.ladder
    less = plan.workload.peak_non_model_bytes + sum(t.bytes for t in plan.workload.tensors) // 2
    if at == "before":
        backend.gpu_bytes = less
    else:
        moments = plan.workload.moments
        phase = "FWD" if at == "forward" else "BWD"
        middle = [i for i, m in enumerate(moments) if m.phase == phase]
        target = middle[len(middle) // 2]
        advance = run.session.following.advance

        def shrink(moment: int) -> None:
            advance(moment)
            if moment == target:
                backend.gpu_bytes = less
                run.session.following.advance = advance

        run.session.following.advance = shrink
    train(run, kit, losses, 3)
    assert run.session.ladder
    assert run.session.plan.gpu_budget_bytes <= less
    assert_same(run, kit, losses)
    run.session.plan.check()
    before = len(run.session.ladder)
    train(run, kit, losses, 2)
    assert len(run.session.ladder) == before
    assert_same(run, kit, losses)


@pytest.mark.parametrize("at", ["FWD", "BWD"])
def test_where_work_is_issued_ahead(kit: Any, start: Callable[..., Any], at: str) -> None:
    """Streams: what is given back may still be in use, what is fetched may not be there yet."""
    plan = roomy_plan(kit, "mlp", "tide", clip=True, spare=3.0)
    rng = random.Random(1)
    backend = VirtualStreams(delays=lambda queue: rng.random() * 3e-4 if rng.random() < 0.5 else 0.0)
    backend.gpu_bytes = plan.gpu_budget_bytes
    run = start("mlp", "tide", clip=0.5, plan=plan, backend=backend)
    losses: list[list[float]] = [[], []]
    train(run, kit, losses, 2)
    target = next(i for i, m in enumerate(plan.workload.moments) if m.phase == at) + 3
    real = run.session.following.advance

    def shrink(moment: int) -> None:
        real(moment)
        if moment == target:
            backend.gpu_bytes = plan.gpu_budget_bytes // 2
            run.session.following.advance = real

    run.session.following.advance = shrink
    train(run, kit, losses, 4)
    assert run.session.ladder and run.session.plan is not plan
    assert_same(run, kit, losses)


@pytest.mark.parametrize("level", range(4))
def test_each_rung_trains_like_plain_torch(kit: Any, start: Callable[..., Any], level: int) -> None:
    plan = roomy_plan(kit, "mlp", "tide", clip=True, spare=3.0)
    backend = executor.VirtualBackend(gpu_bytes=plan.gpu_budget_bytes)
    run = start("mlp", "tide", clip=0.5, plan=plan, backend=backend)
    losses: list[list[float]] = [[], []]
    train(run, kit, losses, 1)
    run.session.ladder.level, run.session.ladder._made = level, plan  # as if that rung had made it
    backend.gpu_bytes = plan.gpu_budget_bytes // 3
    train(run, kit, losses, 3)
    spec = ("tide", "tide:pins=0", "tide:pins=0,prefetch=none", "static_partition:pins=0,prefetch=none")[level]
    assert run.session.plan.policy == policy_name(spec)
    assert run.session.ladder[-1].done.startswith(f"new plan by {spec} (rung {RUNGS[level]!r})")
    assert run.session.plan.gpu_budget_bytes == backend.gpu_bytes
    run.session.plan.check()
    assert_same(run, kit, losses)


@pytest.mark.parametrize(("update", "micro_batches"), [("eager", 1), ("step", 3)])
def test_a_step_is_not_lost_whatever_it_was_doing(
    kit: Any, start: Callable[..., Any], update: str, micro_batches: int
) -> None:
    """The memory goes at ten moments of the iteration in turn, and comes back before the next."""
    model, draw = kit.build("mlp")
    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)), micro_batches=micro_batches, name="mlp")
    params = sum(t.bytes for t in w.tensors)
    clip = None if update == "eager" else 0.5
    machine = kit.small_machine(w.peak_non_model_bytes + 4 * params)
    plan = find_policy("tide:streams=on")(w, machine, Settings(update=update, clip=clip is not None))
    backend = executor.VirtualBackend(gpu_bytes=plan.gpu_budget_bytes)
    run = start(
        "mlp", "tide", clip=clip, update=update, micro_batches=micro_batches, plan=plan, backend=backend,
    )  # fmt: skip
    losses: list[list[float]] = [[], []]
    session = run.session
    for n in range(10):
        backend.gpu_bytes = plan.gpu_budget_bytes
        session.renew(plan)
        target = n * (len(w.moments) - 1) // 9
        real, climbed = session.following.advance, len(session.ladder)

        def advance(moment: int, target: int = target, real: Any = real) -> None:
            real(moment)
            if moment == target:
                backend.gpu_bytes = w.peak_non_model_bytes + params
                session.following.advance = real

        session.following.advance = advance
        train(run, kit, losses, 2, micro_batches)
        assert len(session.ladder) > climbed, target
    assert_same(run, kit, losses, within=5e-6)  # twenty steps, sums in another order


@pytest.mark.parametrize("when", ["in the forward", "in the backward", "before the next plan"])
def test_when_no_rung_helps_the_last_whole_step_stands(kit: Any, start: Callable[..., Any], when: str) -> None:
    plan = roomy_plan(kit, "mlp", "tide", clip=True)
    backend = executor.VirtualBackend(gpu_bytes=plan.gpu_budget_bytes)
    run = start("mlp", "tide", clip=0.5, plan=plan, backend=backend)
    losses: list[list[float]] = [[], []]
    train(run, kit, losses, 2)
    batch = next(run.batches)
    if when != "in the forward":
        backend.gpu_bytes = plan.gpu_budget_bytes // 2

    def take(*_: Any) -> None:
        backend.gpu_bytes = 8_000

    loss = None
    with pytest.raises(DoesNotFit, match=r"does not fit: gpu needs .* but has .* kB, short by .*") as told:
        if when == "in the forward":  # inside it: queues that run ahead of the loop belong to the iteration before
            hook = run.model.layers[2].register_forward_pre_hook(take)
        loss = kit.loss_of(run.model, batch)
        if when == "in the backward":
            hook = run.model.layers[4].weight.register_hook(take)
        loss.backward()
        take()
        run.optimizer.step()
    said = str(told.value)
    del told, loss  # with them the graph
    if when == "before the next plan":
        assert "all parameters are those after step 2" in said
        run.optimizer.zero_grad()
        kit.loss_of(run.reference.model, batch).backward()
        run.reference.step()
        with pytest.raises(DoesNotFit, match="no rung of the ladder"):
            run.model(**batch)
    else:
        assert "parameters are those after step 1;" in said
    if when != "before the next plan":
        hook.remove()
    if when == "in the backward":
        with pytest.raises(ContractError, match=r"call optimizer\.zero_grad"):
            run.optimizer.step()
    assert_same(run, kit, losses)
    # The memory comes back: the loop drops what there is of the step, and goes on.
    backend.gpu_bytes = plan.gpu_budget_bytes // 2
    if when == "in the backward":
        run.optimizer.zero_grad()
    train(run, kit, losses, 2)
    assert_same(run, kit, losses)


class ShortOfHostMemory(executor.VirtualBackend):
    """A system that has no host memory for any plan but `only`, after that plan's first slab."""

    def __init__(self, gpu_bytes: int) -> None:
        super().__init__(gpu_bytes=gpu_bytes)
        self.only: Plan | None = None
        self.alive_at_begin: list[int] = []  # slabs that are alive when a plan's payloads are about to be asked for
        self._slabs: list[weakref.ref[torch.UntypedStorage]] = []
        self._left: int | None = None  # slabs that can still be had; None: any number

    def begin(self, plan: Plan) -> None:
        super().begin(plan)
        self._left = None if self.only in (None, plan) else 1
        self.alive_at_begin.append(sum(ref() is not None for ref in self._slabs))

    def host_slab(self, size_bytes: int) -> torch.Tensor:
        if self._left is not None:
            if not self._left:
                raise RuntimeError("no memory")
            self._left -= 1
        slab = super().host_slab(size_bytes)
        self._slabs.append(weakref.ref(slab.untyped_storage()))
        return slab


def test_a_rung_that_fails_keeps_no_host_memory(kit: Any, start: Callable[..., Any]) -> None:
    plan = roomy_plan(kit, "gpt2", "tide", clip=True, spare=1.0, layers=3)
    backend = ShortOfHostMemory(plan.gpu_budget_bytes)
    run = start("gpt2", "tide", clip=0.5, plan=plan, backend=backend, layers=3)
    losses: list[list[float]] = [[], []]
    train(run, kit, losses, 1)
    backend.alive_at_begin.clear()
    backend.only, backend.gpu_bytes = plan, plan.gpu_budget_bytes * 3 // 4
    batch = next(run.batches)
    kit.loss_of(run.model, batch).backward()
    with pytest.raises(DoesNotFit, match="no rung of the ladder"):
        run.optimizer.step()
    # Each of the four rungs takes a slab, is refused the next one, and leaves the plan in use as it was.
    assert len(backend.alive_at_begin) == 8 and len(set(backend.alive_at_begin)) == 1, backend.alive_at_begin
    backend.only = None
    run.optimizer.zero_grad()
    kit.loss_of(run.reference.model, batch).backward()
    run.reference.step()
    train(run, kit, losses, 1)
    assert_same(run, kit, losses)


def test_a_new_plan_in_the_middle_of_an_evaluation_loses_nothing(kit: Any, start: Callable[..., Any]) -> None:
    run = start("mlp", "tide", clip=0.5)
    losses: list[list[float]] = [[], []]
    train(run, kit, losses, 2)
    with torch.no_grad():
        kit.loss_of(run.model, next(run.batches))
    run.optimizer.session.renew(run.plan)
    train(run, kit, losses, 2)
    assert_same(run, kit, losses)


def test_a_plan_that_the_accelerator_cannot_hold_is_refused_before_anything_is_taken(kit: Any) -> None:
    plan = roomy_plan(kit, "mlp", "tide", clip=True)
    model, _ = kit.build("mlp")
    backend = executor.VirtualBackend(gpu_bytes=plan.gpu_budget_bytes // 2)
    spec = executor.AdamW(max_grad_norm=0.5)
    with pytest.raises(DoesNotFit, match=r"plan again with --gpu-memory .*GB or less"):
        executor.prepare(model, plan, spec, backend=backend)
    assert backend.payload_bytes == 0 and not any(hasattr(p, "plan_reader") for p in model.parameters())


class Refuses(nn.Module):
    """An operator that CUDA would refuse: in the given calls of forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 64), nn.Linear(64, 24)
        self.calls = 0
        self.refused: set[tuple[str, int]] = set()

    def refuse(self, where: str) -> None:
        if (where, self.calls) in self.refused:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has ...")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.dropout(self.first(x), 0.2, True)
        self.refuse("forward")
        if x.requires_grad:
            x.register_hook(lambda _: self.refuse("backward"))
        return ((self.last(torch.relu(x)) - y) ** 2).mean()


def by_the_engine(model: Any, optimizer: Any, batches: Iterator[Any]) -> list[float]:
    """Four steps of two micro-batches by `session.step`."""
    return [optimizer.session.step([next(batches), next(batches)]).loss for _ in range(4)]


def by_a_loop_of_its_own(model: Any, optimizer: Any, batches: Iterator[Any]) -> list[float]:
    """The same as a loop writes it, with what the contract says for an operator that is refused memory."""
    losses = []
    for _ in range(4):
        rows, state = [next(batches), next(batches)], torch.get_rng_state()
        while True:
            try:
                total = 0.0
                for row in rows:
                    loss = model(**row) / 2
                    loss.backward()
                    total += float(loss.detach())
                break
            except torch.OutOfMemoryError as error:
                refused = error
            optimizer.session.ladder.recover(refused)
            torch.set_rng_state(state)
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def by_train_step(model: Any, optimizer: Any, batches: Iterator[Any]) -> list[float]:
    return [report.loss for report in train_loop(model, optimizer, batches, steps=4, micro_batches=2)]


@pytest.mark.parametrize(
    ("refused", "loop", "late"),
    by_turns(
        [
            ({("forward", 3)}, by_train_step),
            ({("backward", 3)}, by_train_step),
            ({("backward", 4)}, by_train_step),
            ({("forward", 2), ("backward", 4)}, by_train_step),
            ({("forward", 2), ("backward", 4)}, by_the_engine),
            ({("forward", 2), ("backward", 4)}, by_a_loop_of_its_own),
        ],
        [(False,), (True,)],
    ),
)
def test_an_operator_that_torch_itself_refuses(
    kit: Any,
    monkeypatch: pytest.MonkeyPatch,
    refused: set[tuple[str, int]],
    loop: Callable[[Any, Any, Iterator[Any]], list[float]],
    late: bool,
) -> None:
    """The micro-batches of the step run again, with the same dropout. late: fetches wait for the updates before, and
    what the plan lets begin then counts on the plan's budget."""

    def draw() -> Any:
        generator = torch.Generator().manual_seed(3)
        while True:
            yield {"x": torch.randn(2, 24, generator=generator), "y": torch.randn(2, 24, generator=generator)}

    torch.manual_seed(0)
    twin = Refuses()
    model = copy.deepcopy(twin)
    w = kit.workload_of(model, next(draw()), micro_batches=2, name="refuses")
    machine = kit.small_machine(w.peak_non_model_bytes + 4 * sum(t.bytes for t in w.tensors))
    plan = find_policy("tide")(w, machine, Settings(clip=False))
    model.calls, model.refused = 0, refused
    model, optimizer = executor.prepare(model, plan, executor.AdamW(lr=1e-2))
    if late:
        ladder, contents = optimizer.session.ladder, optimizer.session.contents
        adam, shrink = contents.adam, ladder.shortage._shrink

        def slow_adam(chunk: int, place: Place, *rest: Any) -> None:
            time.sleep(0.1 if place is Place.HOST else 0.0)
            adam(chunk, place, *rest)

        def slow_shrink(*figures: Any) -> None:
            shrink(*figures)
            time.sleep(0.2)

        monkeypatch.setattr(contents, "adam", slow_adam)
        monkeypatch.setattr(ladder.shortage, "_shrink", slow_shrink)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    losses = []
    for module, chosen, trained in ((model, optimizer, loop), (twin, plain, by_train_step)):
        torch.manual_seed(5)
        losses.append(trained(module, chosen, draw()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len([rung for rung in optimizer.session.ladder if rung.done.startswith("the iteration is")]) == len(refused)
    assert optimizer.session.plan.gpu_budget_bytes < plan.gpu_budget_bytes
    values = model.state_dict()
    for name, parameter in twin.named_parameters():
        assert kit.distance(values[name], parameter.detach()) <= 1e-6, name
    optimizer.session.close(restore=False)
