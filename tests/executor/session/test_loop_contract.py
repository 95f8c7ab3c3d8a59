"""The loop contract (docs/reference/loop-contract.md), a test a line: as plain torch, or ContractError before anything
changes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import executor
from executor.driving.loop import Loop
from executor.moments.hooks import ModuleEvent
from executor.session.cursor import ACTS, Answer
from pstar_sim.core.plan import Settings
from pstar_sim.errors import ContractError, DoesNotFit


@pytest.fixture(autouse=True)
def as_planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of events that did not go through the table. In every test here: the table would have said FOLLOW, and
    memory was not short."""
    names: list[str] = []
    go = Loop._next_moment

    def check(loop: Loop, event: ModuleEvent) -> None:
        assert loop._ask_of(event, ACTS[event.kind, event.phase]) is Answer.FOLLOW
        assert not loop.ladder.on_event(event)
        names.append(event.name)
        go(loop, event)

    monkeypatch.setattr(Loop, "_next_moment", check)
    return names


@pytest.fixture(params=["tide", "zero_offload"])
def run(request: Any, start: Callable[..., Any]) -> Any:
    return start("mlp", request.param, clip=0.5)


@pytest.fixture
def eager(start: Callable[..., Any]) -> Any:
    return start("mlp", "tide", update="eager")


def backward(kit: Any, run: Any) -> None:
    """One micro-batch on both models."""
    batch = next(run.batches)
    kit.loss_of(run.model, batch).backward()
    kit.loss_of(run.reference.model, batch).backward()


def steps(kit: Any, run: Any, count: int = 1) -> None:
    mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=count, micro_batches=1)
    assert mine == pytest.approx(theirs, rel=1e-6)


def assert_same(kit: Any, run: Any) -> None:
    values = run.model.state_dict()
    for name, parameter in run.reference.model.named_parameters():
        assert kit.distance(values[name], parameter.detach()) <= 1e-6, name


def refused(kit: Any, run: Any, action: Callable[[], object], message: str) -> None:
    """The action raises, no parameter changes by it, and training can go on."""
    before = run.model.state_dict()
    with pytest.raises(ContractError, match=message):
        action()
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())


def finish_one(run: Any) -> None:
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.reference.step()


def finish(kit: Any, run: Any) -> None:
    """The iteration that was begun ends as if nothing had been tried."""
    finish_one(run)
    steps(kit, run, 2)
    assert_same(kit, run)


def first(run: Any) -> nn.Parameter:
    return next(iter(run.model.parameters()))


def test_events_of_modules_do_not_go_through_the_table(kit: Any, run: Any, as_planned: list[str]) -> None:
    """Of a usual iteration, all but the root's and the calls'. The first iteration is watched."""
    steps(kit, run)
    as_planned.clear()
    steps(kit, run)
    assert as_planned == [m.name for m in run.plan.workload.moments if m.module]
    assert len(as_planned) > 10 and run.session.deviations == 0


class TestGradients:
    def test_reading_grad(self, kit: Any, run: Any) -> None:
        steps(kit, run)
        assert first(run).grad is None
        backward(kit, run)
        refused(kit, run, lambda: first(run).grad, "max_grad_norm")
        finish(kit, run)

    def test_reading_grad_after_step_before_zero_grad(self, kit: Any, run: Any) -> None:
        backward(kit, run)
        run.optimizer.step()
        refused(kit, run, lambda: first(run).grad, "left for its chunk")
        run.optimizer.zero_grad()
        assert first(run).grad is None

    def test_clip_grad_norm(self, kit: Any, run: Any) -> None:
        backward(kit, run)
        refused(kit, run, lambda: nn.utils.clip_grad_norm_(run.model.parameters(), 1.0), "max_grad_norm")
        finish(kit, run)

    def test_grad_scaler(self, kit: Any, run: Any) -> None:
        scaler = torch.amp.GradScaler("cpu")
        batch = next(run.batches)
        scaler.scale(kit.loss_of(run.model, batch)).backward()
        refused(kit, run, lambda: scaler.step(run.optimizer), "GradScaler")

    def test_setting_grad(self, kit: Any, run: Any) -> None:
        steps(kit, run)

        def set_it() -> None:
            first(run).grad = torch.zeros_like(first(run))

        refused(kit, run, set_it, "cannot be set")

    def test_grad_to_none_after_step(self, kit: Any, run: Any) -> None:
        backward(kit, run)
        run.optimizer.step()
        run.reference.step()
        for parameter in run.model.parameters():
            parameter.grad = None
        steps(kit, run, 2)
        assert_same(kit, run)

    def test_grad_to_none_before_step(self, kit: Any, run: Any) -> None:
        backward(kit, run)

        def drop() -> None:
            first(run).grad = None

        refused(kit, run, drop, "zero_grad")
        finish(kit, run)

    def test_norm_is_reported(self, kit: Any, run: Any) -> None:
        backward(kit, run)
        norm = nn.utils.clip_grad_norm_(run.reference.model.parameters(), 1e9)
        run.optimizer.step()
        assert run.session.grad_norm == pytest.approx(float(norm), rel=1e-6)


class TestZeroGrad:
    @pytest.mark.parametrize("who", ["optimizer", "model"])
    def test_after_step(self, kit: Any, run: Any, who: str) -> None:
        for _ in range(3):
            backward(kit, run)
            run.optimizer.step()
            (run.optimizer if who == "optimizer" else run.model).zero_grad()
            run.reference.step()
        assert_same(kit, run)

    @pytest.mark.parametrize("who", ["optimizer", "model"])
    def test_before_step_drops_the_gradients(self, kit: Any, run: Any, who: str) -> None:
        steps(kit, run)
        backward(kit, run)
        (run.optimizer if who == "optimizer" else run.model).zero_grad()
        run.reference.optimizer.zero_grad()
        run.optimizer.step()  # nothing to do
        run.reference.step()
        steps(kit, run, 2)
        assert_same(kit, run)

    def test_before_step_with_eager_updates(self, kit: Any, eager: Any) -> None:
        steps(kit, eager)
        backward(kit, eager)
        with pytest.raises(ContractError, match="eager=False"):
            eager.optimizer.zero_grad()
        finish(kit, eager)

    @pytest.mark.parametrize("policy", ["tide", "all_on_gpu", "optimal"])
    @pytest.mark.parametrize("backwards", [1, 3])
    def test_before_the_last_backward_with_eager_updates(
        self, kit: Any, start: Callable[..., Any], policy: str, backwards: int
    ) -> None:
        """Of four micro-batches one or three are dropped: no parameter was updated yet."""
        run = start("mlp", policy, update="eager", micro_batches=4)
        for _ in range(2):
            kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=4)
            for _ in range(backwards):
                backward(kit, run)
            run.optimizer.zero_grad()
            run.reference.optimizer.zero_grad()
            assert_same(kit, run)
        kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=2, micro_batches=4)
        assert_same(kit, run)

    def test_off_the_plan_with_eager_updates(self, kit: Any, eager: Any) -> None:
        """An iteration that left the plan before its backward updates in `step()`: until then it can be dropped."""
        steps(kit, eager)
        batch = next(eager.batches)
        loss = kit.loss_of(eager.model, batch)
        with torch.no_grad():
            kit.loss_of(eager.model, batch)
        loss.backward()
        eager.optimizer.zero_grad()
        steps(kit, eager, 2)
        assert_same(kit, eager)

    def test_at_the_start_of_the_loop(self, kit: Any, run: Any) -> None:
        for _ in range(3):
            run.optimizer.zero_grad()
            backward(kit, run)
            run.optimizer.step()
            run.reference.step()
        assert_same(kit, run)

    def test_between_forward_and_backward(self, kit: Any, run: Any) -> None:
        for _ in range(3):
            batch = next(run.batches)
            loss = kit.loss_of(run.model, batch)
            run.optimizer.zero_grad()
            loss.backward()
            run.optimizer.step()
            kit.loss_of(run.reference.model, batch).backward()
            run.reference.step()
        assert run.session.deviations == 0
        assert_same(kit, run)

    def test_keeping_zeros(self, kit: Any, run: Any) -> None:
        steps(kit, run)
        refused(kit, run, lambda: run.optimizer.zero_grad(set_to_none=False), r"call zero_grad\(\)")

    def test_never(self, kit: Any, run: Any) -> None:
        backward(kit, run)
        run.optimizer.step()
        loss = kit.loss_of(run.model, next(run.batches))
        refused(kit, run, loss.backward, r"optimizer\.zero_grad\(\) after each step")


class TestStepsAndBackwards:
    def test_a_backward_too_many(self, kit: Any, run: Any) -> None:
        steps(kit, run)
        backward(kit, run)
        batch = next(run.batches)
        refused(kit, run, lambda: kit.loss_of(run.model, batch).backward(), "micro-batches")
        finish(kit, run)

    def test_fewer_than_planned(self, kit: Any, start: Callable[..., Any]) -> None:
        run = start("mlp", "tide", micro_batches=3, clip=0.5)
        kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=3)
        kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=2)
        assert run.session.deviations == 1
        kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=2, micro_batches=3)
        assert run.session.deviations == 1
        assert_same(kit, run)

    def test_two_backwards_of_one_forward(self, kit: Any, start: Callable[..., Any]) -> None:
        """Two losses of one forward are two micro-batches, which a plan for one refuses in the second backward."""
        run = start("mlp", "tide", micro_batches=2)
        for _ in range(3):
            batch = next(run.batches)
            for model in (run.model, run.reference.model):
                loss = kit.loss_of(model, batch)
                loss.backward(retain_graph=True)
                (0.5 * loss).backward()
            finish_one(run)
        assert_same(kit, run)
        one = start("mlp", "tide")
        loss = kit.loss_of(one.model, next(one.batches))
        loss.backward(retain_graph=True)
        refused(kit, one, loss.backward, "backward number 2 of an iteration that the plan made for 1")

    def test_step_without_backward(self, kit: Any, run: Any) -> None:
        run.optimizer.step()
        steps(kit, run)
        run.optimizer.step()
        run.optimizer.zero_grad()
        with torch.no_grad():
            kit.loss_of(run.model, next(run.batches))
        run.optimizer.step()
        steps(kit, run)
        assert run.session.deviations == 0
        assert_same(kit, run)

    def test_step_twice(self, kit: Any, run: Any) -> None:
        backward(kit, run)
        run.optimizer.step()
        refused(kit, run, run.optimizer.step, "twice")

    def test_step_left_out(self, kit: Any, run: Any) -> None:
        steps(kit, run)
        backward(kit, run)
        batch = next(run.batches)
        mine, theirs = kit.loss_of(run.model, batch), kit.loss_of(run.reference.model, batch)
        assert float(mine.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
        refused(kit, run, mine.backward, "micro-batches")
        finish(kit, run)

    def test_closure(self, kit: Any, run: Any) -> None:
        refused(kit, run, lambda: run.optimizer.step(lambda: 0.0), "closure")

    def test_schedulers_and_param_groups(self, kit: Any, run: Any) -> None:
        ours = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda k: 0.5**k)
        plain = torch.optim.lr_scheduler.LambdaLR(run.reference.optimizer, lambda k: 0.5**k)
        for _ in range(4):
            steps(kit, run)
            ours.step()
            plain.step()
        for optimizer in (run.optimizer, run.reference.optimizer):
            optimizer.param_groups[0]["weight_decay"] = 0.3
            optimizer.param_groups[0]["betas"] = (0.8, 0.9)
        steps(kit, run, 2)
        assert run.session.deviations == 0
        assert_same(kit, run)

    def test_param_groups_between_forward_and_step_with_eager_updates(self, kit: Any, eager: Any) -> None:
        steps(kit, eager)
        backward(kit, eager)
        eager.optimizer.param_groups[0]["lr"] = 1.0
        with pytest.raises(ContractError, match="before the next forward"):
            eager.optimizer.step()


class TestModel:
    @pytest.mark.parametrize(
        "action",
        [
            lambda m: m.to(torch.bfloat16),
            lambda m: m.half(),
            lambda m: m.layers[0].double(),
            lambda m: m.to("meta"),
            lambda m: m.to_empty(device="cpu"),
        ],
    )
    def test_moving(self, kit: Any, run: Any, action: Callable[[nn.Module], object]) -> None:
        refused(kit, run, lambda: action(run.model), "before executor.prepare")
        steps(kit, run)

    def test_load_state_dict(self, kit: Any, run: Any) -> None:
        values = run.reference.model.state_dict()
        refused(kit, run, lambda: run.model.load_state_dict(values), "before executor.prepare")
        refused(kit, run, lambda: run.model.layers[0].load_state_dict(values, strict=False), "before executor.prepare")

    def test_state_dict_between_steps_and_after_backward(self, kit: Any, run: Any) -> None:
        steps(kit, run)
        assert_same(kit, run)
        part = run.model.layers[2].state_dict()
        assert kit.distance(part["weight"], run.reference.model.layers[2].weight.detach()) <= 1e-6
        backward(kit, run)
        assert_same(kit, run)
        finish(kit, run)
        assert run.session.deviations == 0

    def test_a_state_dict_does_not_change_later(self, kit: Any, run: Any) -> None:
        steps(kit, run)
        kept = run.model.state_dict()
        before = {name: value.clone() for name, value in kept.items()}
        steps(kit, run, 2)
        assert all(torch.equal(before[name], kept[name]) for name in kept)

    def test_reading_parameters_between_steps(self, kit: Any, run: Any) -> None:
        steps(kit, run, 2)
        for (name, mine), theirs in zip(run.model.named_parameters(), run.reference.model.parameters()):
            assert mine.shape == theirs.shape
            assert float(mine.detach().norm()) == pytest.approx(float(theirs.detach().norm()), rel=1e-6), name
            assert kit.distance(mine.data.clone(), theirs.detach()) <= 1e-6
            assert kit.distance(copy.deepcopy(mine).detach(), theirs.detach()) <= 1e-6
            with torch.no_grad():
                assert torch.allclose(mine[0] * 2, theirs[0] * 2, rtol=1e-6)
            assert repr(mine)
        steps(kit, run)
        assert run.session.deviations == 0

    @pytest.mark.parametrize(
        "write",
        [
            lambda p: p.mul_(0.5),
            lambda p: p.data.mul_(0.5),
            lambda p: p.detach().zero_(),
            lambda p: p.copy_(torch.zeros(p.shape)),
            lambda p: nn.init.zeros_(p),
            lambda p: p.__setitem__(0, 1.0),
            lambda p: p.__imul__(2),
            lambda p: setattr(p, "data", torch.zeros(p.shape)),
            lambda p: torch.add(p, 1, out=p),
        ],
    )
    def test_writing_parameters(self, kit: Any, run: Any, write: Callable[[Any], object]) -> None:
        steps(kit, run)

        def attempt() -> None:
            with torch.no_grad():
                write(first(run))

        refused(kit, run, attempt, "written outside the optimizer")
        steps(kit, run)
        assert_same(kit, run)

    def test_copying_the_model(self, kit: Any, run: Any) -> None:
        refused(kit, run, lambda: copy.deepcopy(run.model), r"state_dict\(\) into a second model")
        refused(kit, run, lambda: copy.deepcopy(run.model.layers[1]), "second model")

    def test_evaluation(self, kit: Any, run: Any) -> None:
        steps(kit, run)
        batch = next(run.batches)
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                assert float(kit.loss_of(run.model, batch)) == pytest.approx(
                    float(kit.loss_of(run.reference.model, batch)), rel=1e-6
                )
        steps(kit, run)
        assert run.session.deviations == 0

    def test_a_parameter_read_outside_every_module(self, kit: Any, run: Any) -> None:
        steps(kit, run)
        loss = kit.loss_of(run.model, next(run.batches)) + 0.1 * first(run).norm()
        refused(kit, run, loss.backward, "outside every module call")

    def test_changing_requires_grad(self, kit: Any, run: Any) -> None:
        """The forward that would train another set of parameters is refused; see also test_switched_off.py."""
        batch = next(run.batches)
        first(run).requires_grad = False
        refused(kit, run, lambda: kit.loss_of(run.model, batch), "requires_grad")
        first(run).requires_grad_(True)
        assert first(run).requires_grad
        steps(kit, run)

    def test_preparing_twice(self, kit: Any, run: Any) -> None:
        with pytest.raises(ContractError, match="prepared already"):
            executor.prepare(run.model, run.plan, executor.AdamW(max_grad_norm=0.5))

    def test_closing_gives_a_plain_model_back(self, kit: Any, run: Any) -> None:
        steps(kit, run, 2)
        run.session.close()
        for mine, theirs in zip(run.model.parameters(), run.reference.model.parameters()):
            assert type(mine) is nn.Parameter
            assert kit.distance(mine.detach(), theirs.detach()) <= 1e-6
        run.model.to(torch.float64)
        batch = {name: value.double() for name, value in next(run.batches).items()}
        kit.loss_of(run.model, batch).backward()
        with pytest.raises(ContractError, match="closed"):
            run.optimizer.step()


READS: dict[str, Callable[[Any, Any, Any], object]] = {
    "evaluation": lambda kit, run, batch: kit.loss_of(run.model, batch),
    "evaluation of a part": lambda kit, run, batch: run.model.layers[2](torch.zeros(1, 48)),
    "state_dict": lambda kit, run, batch: run.model.state_dict(),
    "state_dict of a part": lambda kit, run, batch: run.model.layers[2].state_dict(),
    "reading a parameter": lambda kit, run, batch: first(run).detach().norm(),
    "its data": lambda kit, run, batch: first(run).data.clone(),
    "copying a parameter": lambda kit, run, batch: copy.deepcopy(first(run)),
    "optimizer.state_dict": lambda kit, run, batch: run.optimizer.state_dict(),
    "saving": lambda kit, run, batch: run.optimizer.save("nowhere"),
}


class TestEagerUpdates:
    """Between the last backward and `step()` some parameters are updated and others not."""

    @pytest.mark.parametrize("micro_batches", [1, 3])
    @pytest.mark.parametrize("policy", ["tide", "all_on_gpu"])
    def test_reads_between_the_last_backward_and_step(
        self, kit: Any, start: Callable[..., Any], policy: str, micro_batches: int
    ) -> None:
        run = start("mlp", policy, update="eager", micro_batches=micro_batches)
        kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=micro_batches)
        batch = next(run.batches)
        for _ in range(2):
            for _ in range(micro_batches):
                backward(kit, run)
            for name, read in READS.items():
                for guard in (torch.no_grad, torch.enable_grad):
                    with pytest.raises(ContractError, match=r"(after|call) (optimizer\.)?step\(\)"), guard():
                        read(kit, run, batch)
                        raise AssertionError(f"{name} was not refused")
            run.optimizer.step()
            run.reference.step()
            run.optimizer.zero_grad()
            assert_same(kit, run)
        kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=micro_batches)
        assert run.session.deviations == 0
        assert_same(kit, run)

    def test_a_forward_with_gradients_before_step(self, kit: Any, eager: Any) -> None:
        backward(kit, eager)
        with pytest.raises(ContractError, match="a forward of <root> between the last backward and"):
            kit.loss_of(eager.model, next(eager.batches))
        finish(kit, eager)

    def test_a_hook_that_reads_in_the_last_backward(self, kit: Any, eager: Any) -> None:
        """Never a value that plain torch would not have: an error, or the value from before the update.

        How many updates have begun depends on the threads. What is read stays on the gpu until the next event, so that
        reading everything at once does not fit where few updates have begun.
        """
        steps(kit, eager)
        names = dict(eager.model.named_parameters())
        before = eager.model.state_dict()
        seen: dict[str, torch.Tensor] = {}
        refusals: list[str] = []

        def look(_: torch.Tensor) -> None:
            for name, parameter in names.items():
                try:
                    seen[name] = parameter.detach().clone()
                except (ContractError, DoesNotFit) as error:
                    refusals.append(str(error))

        batch = next(eager.batches)
        loss = kit.loss_of(eager.model, batch)
        handle = names["layers.0.weight"].register_hook(look)
        loss.backward()
        handle.remove()
        assert len(seen) + len(refusals) == len(names)
        assert all(torch.equal(value, before[name]) for name, value in seen.items())
        assert all("is read between" in text or "reads at once, off plan" in text for text in refusals)
        kit.loss_of(eager.reference.model, batch).backward()
        finish(kit, eager)

    def test_reads_before_the_last_backward(self, kit: Any, start: Callable[..., Any]) -> None:
        """Of three micro-batches two are done: no parameter is updated, everything reads as in plain torch."""
        run = start("mlp", "tide", update="eager", micro_batches=3)
        batch = next(run.batches)
        for _ in range(2):
            for _ in range(2):
                backward(kit, run)
            assert_same(kit, run)
            with torch.no_grad():
                assert torch.equal(kit.loss_of(run.model, batch), kit.loss_of(run.reference.model, batch))
            backward(kit, run)
            assert_same(kit, run)  # the evaluation left the plan: every update comes in step()
            run.optimizer.step()
            run.reference.step()
            run.optimizer.zero_grad()
        kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=2, micro_batches=3)
        assert_same(kit, run)

    def test_what_logs_and_debuggers_ask(self, kit: Any, eager: Any) -> None:
        backward(kit, eager)
        parameter = first(eager)
        assert f"size={tuple(parameter.shape)}" in repr(parameter)
        assert "with eager updates" in f"{parameter}"
        assert parameter.numel() and parameter.requires_grad and repr(eager.model)
        finish(kit, eager)
        assert "tensor([[" in repr(parameter)

    def test_closing_then_is_reported(self, kit: Any, eager: Any, caplog: pytest.LogCaptureFixture) -> None:
        backward(kit, eager)
        with caplog.at_level("WARNING", logger="executor"):
            eager.session.close()
        assert "others do not have it" in caplog.text
        assert all(type(p) is nn.Parameter and bool(p.isfinite().all()) for p in eager.model.parameters())


class TestOptimizer:
    def test_add_param_group(self, kit: Any, run: Any) -> None:
        extra = {"params": [nn.Parameter(torch.zeros(2))]}
        refused(kit, run, lambda: run.optimizer.add_param_group(extra), "groups")

    def test_state_dict_is_torchs(self, kit: Any, run: Any) -> None:
        steps(kit, run, 3)
        mine, theirs = run.optimizer.state_dict(), run.reference.optimizer.state_dict()
        assert mine["state"].keys() == theirs["state"].keys()
        for number, row in theirs["state"].items():
            for key, value in row.items():
                assert kit.distance(mine["state"][number][key], value) <= 1e-6
        assert [g["params"] for g in mine["param_groups"]] == [g["params"] for g in theirs["param_groups"]]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_resuming(self, kit: Any, start: Callable[..., Any], dtype: torch.dtype) -> None:
        """Trained 2 + 3 steps with a new session in between equals 5 steps in one."""
        whole = start("mlp", "tide", clip=0.5, dtype=dtype)
        batches = [next(whole.batches) for _ in range(5)]
        losses = [kit.train_alone(whole.model, whole.optimizer, iter([b]), 1) for b in batches]
        part = start("mlp", "tide", clip=0.5, dtype=dtype)
        again = [kit.train_alone(part.model, part.optimizer, iter([b]), 1) for b in batches[:2]]
        saved, state = part.model.state_dict(), part.optimizer.state_dict()
        part.session.close()
        model, _ = kit.build("mlp", seed=5)
        model.to(dtype).load_state_dict(saved)
        model, optimizer = executor.prepare(
            model, part.plan, executor.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
        )
        optimizer.load_state_dict(state)
        again += [kit.train_alone(model, optimizer, iter([b]), 1) for b in batches[2:]]
        ended = model.state_dict()
        optimizer.session.close(restore=False)
        assert again == losses
        assert all(torch.equal(ended[name], value) for name, value in whole.model.state_dict().items())

    def test_loading_another_shape(self, kit: Any, run: Any) -> None:
        steps(kit, run)
        state = run.optimizer.state_dict()
        state["state"][0]["exp_avg"] = torch.zeros(3)
        refused(kit, run, lambda: run.optimizer.load_state_dict(state), "shape")


def test_groups(kit: Any) -> None:
    """Two groups with numbers of their own; the plan has to be made for them."""
    from executor.moments.recorder import describe_parameters

    model, draw = kit.build("mlp")
    twin = copy.deepcopy(model)

    def groups(m: nn.Module) -> list[dict[str, Any]]:
        weights = [p for n, p in m.named_parameters() if n.endswith("weight")]
        biases = [p for n, p in m.named_parameters() if n.endswith("bias")]
        return [{"params": weights, "weight_decay": 0.2}, {"params": biases, "weight_decay": 0.0, "lr": 3e-3}]

    from dataclasses import replace

    from pstar_sim.errors import PlanError

    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)))
    numbered = {id(p): i for i, group in enumerate(groups(model)) for p in group["params"]}
    tensors, _ = describe_parameters(model, numbered)
    plan = kit.tight_plan("tide", replace(w, tensors=tensors), Settings(clip=False))
    with pytest.raises(PlanError, match="is in optimizer group 0, the plan was made for group 1"):
        executor.prepare(model, plan, executor.AdamW(lr=1e-2))
    model, optimizer = executor.prepare(model, plan, executor.AdamW(groups(model), lr=1e-2))
    reference = kit.Reference(twin, 1e-2, 0.1, None)
    reference.optimizer = torch.optim.AdamW(groups(twin), lr=1e-2, fused=True)
    run = kit.Run(model, optimizer, reference, plan, kit.batches(draw))
    steps(kit, run, 5)
    assert run.session.deviations == 0
    assert_same(kit, run)
    optimizer.session.close(restore=False)


def test_every_line_of_the_contract_says_what_happens() -> None:
    """What raises has its replacement or reason; what is neither plain torch nor ContractError says what it is."""
    page = Path(__file__).parents[3] / "docs" / "reference" / "loop-contract.md"
    tables = {
        name: re.findall(r"^\| (.+?) \| (.*?) ?\|$", body, flags=re.M)[1:]
        for name, body in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", page.read_text(encoding="utf-8"), flags=re.M)
    }
    assert {*tables} == {"As in plain PyTorch", "ContractError", "Otherwise"}
    assert sum(map(len, tables.values())) >= 60
    assert all(instead for _, instead in tables["ContractError"])
    words = ("DoesNotFit", "PlanError", "Interrupted", "error", "not seen")
    assert all(any(word in what for word in words) for _, what in tables["Otherwise"])
