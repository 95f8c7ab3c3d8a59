"""Loss scaling: the scale moves as torch.amp.GradScaler's, gradients outside the model are plain torch's, and an
overflow leaves everything as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import executor
from executor.moments.recorder import describe_parameters
from executor.scaling import LossScaling, guard_boundary, loss_scale_for
from pstar_sim.core.plan import Settings
from pstar_sim.errors import ContractError, PlanError


class Head(nn.Module):
    """Gives its logits and the loss made of them, as a transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        return {"loss": (logits.float() ** 2).mean(), "logits": logits}


@pytest.fixture
def prepared(kit: Any) -> Iterator[Callable[..., Any]]:
    sessions: list[Any] = []

    def make(
        model: nn.Module,
        *,
        micro_batches: int = 1,
        update: str = "step",
        policy: str = "tide",
        sums: str = "32-bit",
        **spec: Any,
    ) -> Any:
        batch = {"x": torch.randn(2, 8, dtype=next(model.parameters()).dtype)}

        def loss(module: nn.Module, one: Any) -> torch.Tensor:
            return module(**one)["loss"]

        w = executor.capture_module(model, batch, name="head", batch=2, sequence=1, loss=loss)
        w = kit.repeat_micro_batch(w, micro_batches)
        plan = kit.tight_plan(policy, w, Settings(update=update, clip="max_grad_norm" in spec, sums=sums))
        model, optimizer = executor.prepare(model, plan, executor.AdamW(lr=0.1, **spec), watchdog_s=10)
        sessions.append(optimizer.session)
        return model, optimizer

    yield make
    for session in sessions:
        session.close(restore=False)


def test_the_scale_moves_as_gradscalers() -> None:
    """16, an overflow: 8; two good ones: 16; one good, an overflow: 8 and the count begins anew."""
    scaling = LossScaling(executor.LossScale(init_scale=16.0, growth_interval=2))
    plain = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.0)
    seen = []
    for good in (False, True, True, True, False, True, True, True):
        weight.grad = torch.full((3,), 1.0 if good else torch.inf)
        scaling.begin_iteration()
        scaling.see(weight.grad)
        overflowed = scaling.overflowed()
        assert overflowed is not good
        scaling.close_iteration(overflowed)
        plain.scale(torch.ones(()))
        plain.step(optimizer)
        plain.update()
        assert scaling.scale == plain.get_scale()
        seen.append(scaling.scale)
    assert seen == [8, 8, 16, 16, 8, 8, 16, 16]
    assert scaling.skipped_steps == 2


def test_a_fixed_scale_stays_and_still_skips() -> None:
    scaling = LossScaling(loss_scale_for(128.0, ()))
    for _ in range(3):
        scaling.close_iteration(True)
    assert (scaling.scale, scaling.skipped_steps) == (128.0, 3)


def test_what_a_loss_scale_may_be() -> None:
    def tensors(module: nn.Module) -> Any:
        return describe_parameters(module)[0]

    assert loss_scale_for(None, tensors(Head())) is None
    assert loss_scale_for(None, tensors(Head().bfloat16())) is None
    half = Head()
    half.body.half().requires_grad_(False)  # an adapter in fp32 on a frozen fp16 base
    assert loss_scale_for(None, tensors(half)) == executor.LossScale(init_scale=65536.0)
    for bad in ("static", True, 0.0, -1.0, float("nan"), [1]):
        with pytest.raises(PlanError, match=r"loss_scale=|init_scale="):
            executor.AdamW(loss_scale=bad)
    with pytest.raises(PlanError, match="backoff_factor=2"):
        executor.LossScale(backoff_factor=2)


def gradients(model: nn.Module, use: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.linspace(-1, 1, 16).reshape(2, 8).requires_grad_()
    use(model, x).backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: m(x)["loss"],
        lambda m, x: (lambda out: out["loss"] + out["logits"].sum())(m(x)),  # the logits are inside the loss too
        lambda m, x: m(x)["logits"].pow(2).sum(),
        lambda m, x: m(m(x)["logits"].repeat(1, 2))["loss"],  # a model called on its own output
        lambda m, x: m(x)["loss"].div_(4),  # written into, as loops do
    ],
    ids=["loss", "loss and logits", "logits", "chained", "in place"],
)
def test_only_gradients_inside_the_model_are_scaled(use: Callable[..., torch.Tensor]) -> None:
    """By 8 each parameter's, by nothing the input's."""
    torch.manual_seed(0)
    model = Head()
    plain = gradients(model, use)
    handles = guard_boundary(model, lambda: 8.0)
    scaled = gradients(model, use)
    for handle in handles:
        handle.remove()
    assert torch.allclose(scaled[0], plain[0], rtol=1e-6)
    for mine, theirs in zip(scaled[1:], plain[1:]):
        assert torch.allclose(mine, 8 * theirs, rtol=1e-6)


def test_logits_written_in_place_raise_rather_than_lose_the_scale() -> None:
    model = Head()
    guard_boundary(model, lambda: 8.0)
    with pytest.raises(RuntimeError, match="inplace"):
        model(torch.randn(2, 8))["logits"].mul_(2)


def test_an_overflow_leaves_everything_as_it_was(prepared: Callable[..., Any]) -> None:
    """A scale of 2^40 overflows in fp16 whatever the gradients: 40 halvings later the first update happens."""
    torch.manual_seed(0)
    model, optimizer = prepared(Head().half(), loss_scale=executor.LossScale(init_scale=2.0**40, backoff_factor=0.25))
    before = model.state_dict()
    x = torch.randn(2, 8).half()
    for _ in range(3):
        model(x)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    session = optimizer.session
    assert (session.loss_scale, session.skipped_steps, session.iteration) == (2.0**34, 3, 3)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert optimizer.state_dict()["state"] == {}  # no step was counted
    for _ in range(12):
        model(x)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert session.skipped_steps < 15
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert session.deviations == 0


def test_the_norm_is_that_of_the_gradients_before_scaling(prepared: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Head().half()
    twin = copy.deepcopy(model)
    model, optimizer = prepared(model, max_grad_norm=1e-3, loss_scale=64.0)
    x = torch.randn(2, 8).half()
    model(x)["loss"].backward()
    twin(x)["loss"].backward()
    optimizer.step()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.float().norm() for p in twin.parameters()]))
    assert optimizer.session.grad_norm == pytest.approx(float(norm), rel=2e-3)  # fp16 gradients
    model, optimizer = prepared(copy.deepcopy(twin), max_grad_norm=1e-3, loss_scale=2.0**60)
    model(x)["loss"].backward()
    optimizer.step()
    assert optimizer.session.grad_norm == float("inf")


def test_the_scale_goes_with_the_optimizers_state(prepared: Callable[..., Any]) -> None:
    spec = {"loss_scale": executor.LossScale(init_scale=2.0**40, growth_interval=5)}
    model, optimizer = prepared(Head().half(), **spec)
    model(torch.ones(2, 8).half())["loss"].backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert state["loss_scaling"] == {"scale": 2.0**39, "growth_tracker": 0, "skipped_steps": 1}
    _, second = prepared(Head().half(), **spec)
    second.load_state_dict(state)
    assert (second.session.loss_scale, second.session.skipped_steps) == (2.0**39, 1)


def test_fp16_is_scaled_without_asking_and_bf16_is_not(prepared: Callable[..., Any]) -> None:
    assert prepared(Head().half())[1].session.loss_scale == 65536
    assert prepared(Head().bfloat16())[1].session.loss_scale is None


def test_eager_updates_and_scaling(prepared: Callable[..., Any]) -> None:
    """An fp16 plan has its barrier whatever the update; a bf16 plan made for eager updates has none."""
    _, optimizer = prepared(Head().half(), update="eager", eager=True)
    assert optimizer.session.loss_scale == 65536
    with pytest.raises(PlanError, match="has to see all gradients before any update"):
        prepared(Head().bfloat16(), update="eager", eager=True, loss_scale="dynamic")


def test_sums_whose_overflow_no_gradient_shows_are_not_run(prepared: Callable[..., Any]) -> None:
    with pytest.raises(
        PlanError, match=r"sums in 16 bits of fp16 gradients, .* are planned, not run; make the plan with"
    ):
        prepared(Head().half(), micro_batches=2, sums="16-bit")
    assert prepared(Head().bfloat16(), micro_batches=2, sums="16-bit")[1].session.loss_scale is None


def test_a_part_of_the_model_on_its_own_is_refused(prepared: Callable[..., Any]) -> None:
    """Its gradients would enter unscaled."""
    model, optimizer = prepared(Head().half())
    x = torch.randn(2, 8).half()
    with pytest.raises(ContractError, match="'body' is called with gradients outside a forward"):
        model.body(x)
    with torch.no_grad():
        assert model.body(x).shape == (2, 16)
    model(x)["loss"].backward()
    optimizer.step()
    assert optimizer.session.iteration == 1


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_part_on_its_own_is_refused_also_behind_a_forward_that_raised(
    kind: type[BaseException], prepared: Callable[..., Any]
) -> None:
    model, optimizer = prepared(Head().half())
    x = torch.randn(2, 8).half()

    def fail(*_: Any) -> None:
        raise kind("no forward of body today")

    handle = model.body.register_forward_pre_hook(fail)
    with pytest.raises(kind, match="no forward of body today"):
        model(x)
    handle.remove()
    with pytest.raises(ContractError, match="'body' is called with gradients outside a forward"):
        model.body(x)
    model(x)["loss"].backward()
    optimizer.step()
    assert optimizer.session.iteration == 1


def test_gradscaler_is_refused_and_named(prepared: Callable[..., Any]) -> None:
    model, optimizer = prepared(Head().half())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 8).half())["loss"]).backward()
    with pytest.raises(ContractError, match=r"AdamW\(loss_scale"):
        scaler.step(optimizer)
