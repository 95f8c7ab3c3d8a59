"""Reality leaves the plan: results stay those of plain torch, the deviation is counted, the next iteration is on
plan."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from thinned import half

import executor
from executor.moments.hooks import tensors_of
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.registry import find_policy


def captures(session: Any) -> list[tuple[int, ...]]:
    """The shape of the first tensor of each batch that the session captures from now on."""
    found: list[tuple[int, ...]] = []
    plain = session.shapes.capture

    def capture(planned: Any, args: Any, kwargs: Any) -> Any:
        found.append(tuple(next(tensors_of((args, kwargs))).shape))
        return plain(planned, args, kwargs)

    session.shapes.capture = capture
    return found


def trained(kit: Any, run: Any, batch: Any) -> None:
    """One step of both on the batch."""
    mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, iter([batch]), steps=1, micro_batches=1)
    assert mine == pytest.approx(theirs, rel=1e-6)


PLANNED: dict[tuple[Any, ...], Plan] = {}
"""What `switch` planned, by what it depends on."""


@pytest.fixture
def switch(kit: Any) -> Iterator[Callable[..., Any]]:
    sessions: list[Any] = []

    def make(
        policy: str = "tide", *, update: str = "step", clip: float | None = 0.5, micro_batches: int = 1, **options: Any
    ) -> Any:
        torch.manual_seed(0)
        model = kit.Switch()
        twin = copy.deepcopy(model)
        x = torch.randn(3, 48)
        key = (policy, update, clip is not None, micro_batches)
        if key not in PLANNED:
            w = kit.workload_of(model, {"x": x}, micro_batches=micro_batches, name="switch")
            PLANNED[key] = kit.tight_plan(policy, w, Settings(update=update, clip=clip is not None))
        plan = PLANNED[key]
        spec = executor.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=clip, eager=update == "eager")
        model, optimizer = executor.prepare(model, plan, spec, watchdog_s=5.0, **options)
        sessions.append(optimizer.session)
        reference = kit.Reference(twin, 1e-2, 0.1, clip)
        return kit.Run(model, optimizer, reference, plan, iter(lambda: {"x": torch.randn(3, 48)}, None))

    yield make
    for session in sessions:
        session.close(restore=False)


def assert_same(kit: Any, run: Any) -> None:
    values = run.model.state_dict()
    for name, parameter in run.reference.model.named_parameters():
        assert kit.distance(values[name], parameter.detach()) <= 1e-6, name


def both(kit: Any, run: Any, *, micro_batches: int = 1, order: list[int] | None = None) -> None:
    for model in (run.model, run.reference.model):
        model.order = order or list(range(6))
    mine, theirs = kit.train_both(
        run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=micro_batches
    )
    assert mine == pytest.approx(theirs, rel=1e-6)


POLICIES = ["tide", "static_partition", "patrickstar", "zero_offload", "all_on_gpu"]
ODD = {
    "another order": [3, 1, 2, 0, 5, 4],
    "an unused module": [0, 1, 2, 4, 5],
    "a module twice": [0, 1, 2, 2, 3, 4, 5],
    "only one": [4],
    "backwards": [5, 4, 3, 2, 1, 0],
}


@pytest.mark.parametrize(("policy", "odd", "way"), half(POLICIES, list(ODD), [("step", 1), ("eager", 1), ("step", 2)]))
def test_other_module_order(kit: Any, switch: Callable[..., Any], policy: str, odd: str, way: tuple[str, int]) -> None:
    update, micro_batches = way
    run = switch(policy, update=update, clip=0.5 if update == "step" else None, micro_batches=micro_batches)
    both(kit, run, micro_batches=micro_batches)
    both(kit, run, micro_batches=micro_batches, order=ODD[odd])
    assert run.session.deviations == 1
    both(kit, run, micro_batches=micro_batches)
    both(kit, run, micro_batches=micro_batches)
    assert run.session.deviations == 1, list(run.session.deviation_log)
    assert_same(kit, run)
    cut = {(r.place, r.chunk, r.list) for r in run.plan.initial}
    assert run.session.timetable.cut == cut


@pytest.mark.parametrize("policy", ["tide", "zero_offload"])
def test_a_layer_left_out_of_the_second_micro_batch(kit: Any, switch: Callable[..., Any], policy: str) -> None:
    run = switch(policy, micro_batches=2)
    both(kit, run, micro_batches=2)
    for model in (run.model, run.reference.model):
        for order in (list(range(6)), [0, 2, 3, 4, 5]):
            model.order = order
            torch.manual_seed(7)
            (model(torch.randn(3, 48)) / 2).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.reference.step()
    assert run.session.deviations == 1
    both(kit, run, micro_batches=2)
    assert run.session.deviations == 1
    assert_same(kit, run)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_leaving_the_plan_wherever_the_queues_stand(
    kit: Any, switch: Callable[..., Any], policy: str, micro_batches: int, whole: bool
) -> None:
    """The queues are let run by chance, so that the deviation meets them anywhere between far behind and far ahead.
    Twelve seeds with --whole, else two, others in each case."""
    first = 2 * (POLICIES.index(policy) + len(POLICIES) * (micro_batches - 1))
    for seed in range(first, first + (12 if whole else 2)):
        rng = random.Random(seed)

        def choose(possible: Any, compute: Any, may: bool, rng: random.Random = rng) -> int | None:
            pick = rng.randrange(len(possible) + 2)
            return None if pick >= len(possible) else pick

        run = switch(policy, micro_batches=micro_batches, queues=executor.SerialQueues(choose))
        both(kit, run, micro_batches=micro_batches)
        odd = rng.choice([order for order in ODD.values() if len(order) > 1])
        for model in (run.model, run.reference.model):
            for u in range(micro_batches):
                model.order = odd if u == micro_batches - 1 else list(range(6))
                torch.manual_seed(seed)
                (model(torch.randn(3, 48)) / micro_batches).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.reference.step()
        assert run.session.deviations == 1
        both(kit, run, micro_batches=micro_batches)
        both(kit, run, micro_batches=micro_batches)
        assert run.session.deviations == 1
        assert_same(kit, run)


@pytest.mark.parametrize("policy", POLICIES)
def test_evaluation_between_steps_and_in_the_middle(kit: Any, switch: Callable[..., Any], policy: str) -> None:
    run = switch(policy)
    x = torch.randn(5, 48)

    def evaluate() -> None:
        run.model.eval()
        run.reference.model.eval()
        with torch.no_grad():
            assert float(run.model(x)) == pytest.approx(float(run.reference.model(x)), rel=1e-6)
        run.model.train()
        run.reference.model.train()

    evaluate()
    both(kit, run)
    evaluate()
    evaluate()
    both(kit, run)
    assert run.session.deviations == 0
    batch = next(run.batches)
    kit.loss_of(run.model, batch).backward()
    kit.loss_of(run.reference.model, batch).backward()
    evaluate()  # gradients have overwritten parameters by now
    assert run.session.deviations == 1
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.reference.step()
    both(kit, run)
    assert run.session.deviations == 1
    assert_same(kit, run)


def test_a_forward_with_gradients_but_no_backward(kit: Any, switch: Callable[..., Any]) -> None:
    run = switch()
    both(kit, run)
    run.model(torch.randn(3, 48))
    both(kit, run)
    both(kit, run)
    assert run.session.deviations == 1
    assert_same(kit, run)


def test_a_submodule_called_directly(kit: Any, switch: Callable[..., Any]) -> None:
    run = switch()
    both(kit, run)
    x = torch.randn(2, 48)
    with torch.no_grad():
        assert torch.allclose(run.model.layers[3](x), run.reference.model.layers[3](x), rtol=1e-6)
    both(kit, run)
    assert run.session.deviations == 0
    for model in (run.model, run.reference.model):
        (model.layers[2](x) ** 2).sum().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.reference.step()
    both(kit, run)
    assert run.session.deviations == 1
    assert_same(kit, run)


def test_on_demand_keeps_the_gpu_budget(kit: Any, switch: Callable[..., Any]) -> None:
    run = switch()
    both(kit, run)
    both(kit, run, order=ODD["backwards"])
    held = 0
    for change in run.session.arena.log.changes:
        if change.place is Place.GPU:
            held += change.change
            assert held <= run.plan.gpu_budget_bytes


class TestShapes:
    """Batches of another shape than the plan's."""

    def test_smaller_ones_run_and_are_counted(self, kit: Any, start: Callable[..., Any]) -> None:
        run = start("gpt2", "tide", clip=0.5)
        for length in (12, 6, 12):
            batch = {k: v[:, :length] for k, v in next(run.batches).items()}
            mine, theirs = kit.train_both(
                run.model, run.reference, run.optimizer, iter([batch]), steps=1, micro_batches=1
            )
            assert mine == pytest.approx(theirs, rel=1e-6)
        assert run.session.deviations == 1

    def test_one_that_no_tensor_of_is_longer_is_not_captured(self, kit: Any, start: Callable[..., Any]) -> None:
        """Shorter ones, and fewer rows of the full length."""
        run = start("gpt2", "tide", clip=0.5)
        captured = captures(run.session)
        full = next(run.batches)
        for rows, length in ((2, 12), (2, 6), (1, 12), (2, 9), (1, 3), (2, 6)):
            batch = {k: v[:rows, :length] for k, v in full.items()}
            trained(kit, run, batch)
        assert captured == [] and run.session.deviations == run.session.state.other_shapes == 5
        log = run.session.steps.logs
        assert [row.shares for row in log] == [(1.0,), (0.5,), (0.5,), (0.75,), (0.125,), (0.5,)]
        assert run.session.steps.last_on_plan() is log[0]
        assert_same(kit, run)

    def test_one_that_does_not_keep_to_the_plan_is_captured_the_next_time(
        self, kit: Any, switch: Callable[..., Any]
    ) -> None:
        run = switch(replan_after=0)
        captured = captures(run.session)
        both(kit, run)
        run.batches = iter(lambda: {"x": torch.randn(2, 48)}, None)
        both(kit, run, order=ODD["backwards"])
        assert captured == [] and run.session.deviations == 2  # taken to be on plan, and left it
        both(kit, run)
        assert len(captured) == 1
        both(kit, run)
        assert len(captured) == 1
        assert_same(kit, run)

    def test_what_is_kept_of_shapes_is_bounded(self, kit: Any, start: Callable[..., Any], monkeypatch: Any) -> None:
        monkeypatch.setattr(executor.session.batches, "MOST_KNOWN", 3)
        run = start("gpt2", "tide", clip=0.5)
        captured = captures(run.session)
        for length in range(7, 12):  # each longer than those before, and shorter than planned
            trained(kit, run, {k: v[:, :length] for k, v in next(run.batches).items()})
        assert captured == [(2, length) for length in range(7, 12)]
        batches = run.session.batches
        assert [form[0].shape for form in batches._known] == [(2, 9), (2, 10), (2, 11)]
        assert len(run.session.shapes.covered) == 3

    def test_a_longer_one_runs_if_it_fits(self, kit: Any, start: Callable[..., Any]) -> None:
        model, draw = kit.build("gpt2")
        w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)))
        machine = kit.small_machine(2 * w.peak_non_model_bytes + sum(t.bytes for t in w.tensors) // 2)
        run = start("gpt2", "tide", clip=0.5, plan=find_policy("tide")(w, machine, Settings(clip=True)))
        for length in (12, 15, 12, 15):
            ids = torch.randint(0, 96, (2, length))
            trained(kit, run, {"input_ids": ids, "labels": ids})
        assert run.session.plan.workload.sequence == 15 and run.session.outgrown.plans == 1
        assert run.session.deviations == run.session.state.other_shapes == 1  # the 12 after the 15
        assert_same(kit, run)

    def test_a_longer_one_inside_an_iteration_gets_its_plan_before_the_next(
        self, kit: Any, start: Callable[..., Any]
    ) -> None:
        """The second micro-batch is longer: it runs on demand. Lengths that grow with every step are planned for after
        1 and 2 of them, and after three iterations off plan in a row."""
        model, draw = kit.build("gpt2")
        w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)), micro_batches=2)
        machine = kit.small_machine(3 * w.peak_non_model_bytes + sum(t.bytes for t in w.tensors) // 2)
        run = start(
            "gpt2", "tide", clip=0.5, micro_batches=2, plan=find_policy("tide")(w, machine, Settings(clip=True))
        )
        planned_for = []
        for length in (12, 13, 14, 15, 16, 17, 18):
            pair = [torch.randint(0, 96, (2, size)) for size in (12, length)]
            rows = iter([{"input_ids": ids, "labels": ids} for ids in pair])
            kit.train_both(run.model, run.reference, run.optimizer, rows, steps=1, micro_batches=2)
            planned_for.append(run.session.plan.workload.sequence)
        assert planned_for == [12, 12, 13, 13, 15, 15, 18]
        assert_same(kit, run)

    def test_one_that_does_not_fit_is_refused_before_anything_changes(
        self, kit: Any, start: Callable[..., Any]
    ) -> None:
        run = start("gpt2", "tide", clip=0.5)
        before = run.model.state_dict()
        ids = torch.randint(0, 96, (2, 32))
        with pytest.raises(DoesNotFit, match=r"a batch of shape \[2, 32\] where the plan has batch 2, sequence 12"):
            run.model(input_ids=ids, labels=ids)
        assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
        mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=2, micro_batches=1)
        assert mine == pytest.approx(theirs, rel=1e-6)
        assert run.session.deviations == 0


@pytest.mark.parametrize("policy", ["tide", "patrickstar", "zero_offload"])
def test_a_new_plan_after_three_in_a_row(kit: Any, switch: Callable[..., Any], policy: str) -> None:
    run = switch(policy, clip=0.5)
    first = run.plan
    both(kit, run)
    for _ in range(2):
        both(kit, run, order=ODD["backwards"])
    both(kit, run)  # on plan again: the count begins anew
    assert run.session.deviations == 2
    for _ in range(3):
        both(kit, run, order=ODD["backwards"])
    assert run.session.plan is not first
    assert run.session.plan.policy == policy
    run.session.plan.check()
    for _ in range(3):
        both(kit, run, order=ODD["backwards"])
    assert run.session.deviations == 5, list(run.session.deviation_log)
    assert_same(kit, run)
    state, plain = run.optimizer.state_dict()["state"], run.reference.optimizer.state_dict()["state"]
    for number, row in plain.items():
        assert kit.distance(state[number]["exp_avg_sq"], row["exp_avg_sq"]) <= 1e-6


def test_a_new_plan_for_a_longer_batch(kit: Any, start: Callable[..., Any]) -> None:
    model, draw = kit.build("gpt2")
    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)))
    machine = kit.small_machine(2 * w.peak_non_model_bytes + sum(t.bytes for t in w.tensors) // 2)
    run = start("gpt2", "tide", clip=0.5, plan=find_policy("tide")(w, machine, Settings(clip=True)))
    for _ in range(6):
        ids = torch.randint(0, 96, (2, 15))
        batch = iter([{"input_ids": ids, "labels": ids}])
        mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, batch, steps=1, micro_batches=1)
        assert mine == pytest.approx(theirs, rel=1e-6)
    assert run.session.plan.workload.sequence == 15
    assert run.session.deviations == 0
    assert_same(kit, run)


@pytest.mark.parametrize("event", ["grad:layers.2", "begin:layers.4", "backward-end", "step"])
def test_a_moment_that_the_plan_calls_otherwise(kit: Any, start: Callable[..., Any], event: str) -> None:
    """The plan's trace knows this event by another name: left there, wherever it is, and carried on."""
    model, draw = kit.build("mlp")
    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)))
    renamed = replace(w, moments=tuple(replace(m, name="x") if m.name == event else m for m in w.moments))
    run = start("mlp", "tide", clip=0.5, plan=kit.tight_plan("tide", renamed, Settings(clip=True)), replan_after=0)
    mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=3, micro_batches=1)
    assert mine == pytest.approx(theirs, rel=1e-6)
    assert run.session.deviations == 3
    assert_same(kit, run)


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize("event", ["grad:layers.1", "backward-end"])
def test_states_that_only_the_gpu_has_go_home_before_the_plan_is_left(
    kit: Any, start: Callable[..., Any], event: str
) -> None:
    """Left inside a backward that has updated streamed chunks already, with copies to the host as late as possible: the
    moments of those chunks are newer on the GPU, and are dropped there."""
    model, draw = kit.build("mlp")
    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)))
    renamed = replace(w, moments=tuple(replace(m, name="x") if m.name == event else m for m in w.moments))
    plan = kit.tight_plan("optimal", renamed, Settings(update="eager", clip=False))
    assert plan.modes.count("stream") > 1
    late = executor.SerialQueues(lambda possible, compute, may: None)
    run = start("mlp", "optimal", update="eager", plan=plan, replan_after=0, queues=late)
    kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=3, micro_batches=1)
    assert run.session.deviations == 3
    assert_same(kit, run)
    state, plain = run.optimizer.state_dict()["state"], run.reference.optimizer.state_dict()["state"]
    for number, row in plain.items():
        assert int(state[number]["step"]) == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert kit.distance(state[number][key], row[key]) <= 1e-6, (number, key)
