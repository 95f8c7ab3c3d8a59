"""A plain twin for a run on a device, and how far the two may be apart.

[Note: who updates] The fused AdamW of the CPU and that of CUDA round differently: alone that makes 2.4e-4 to 3.6e-4 of
the largest element of a small GPT-2's parameters and up to 9.6e-6 of an MLP's (simulated). So `Placed` updates each
parameter where the plan does: on the device with torch's AdamW there, on the host with torch's AdamW there.

[Note: the bound] The updates being the same code, what is left is the rounding of gradients: other kernels where a
chunk aligns a parameter differently, a clipping norm that is summed in other parts. Both are sums in another order, so
an element's gradient may be off by d = NOISE * max |g| of its tensor: 32 units in the last place, for sums of up to
about a thousand terms. Adam divides m by sqrt(v): from equal moments both are then off by at most d, and |m| is at most
3.2 sqrt(v) ((1 - beta1) / sqrt(1 - beta2), what one large gradient makes of them), so a step is off by at most
lr * 4.2 d / sqrt(v). It is never off by more than 2.2 lr in the first steps, each step being at most 1.1 lr long: that
is what happens where a gradient is next to nothing and rounding decides its sign. The parameter itself is rounded once.

Such a sign changes the next gradients by far more than rounding does, so each step is judged by itself: the twin takes
over the run's parameters and moments after it. An element whose gradients have all been zero may not differ at all.

A loss is a sum as well, of terms that rounding has passed through all layers: LOSS is ten times NOISE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind

NOISE = 32 * 2.0**-24
ROUNDING = 2 * 2.0**-24
LOSS = 10 * NOISE


def updated_on_gpu(plan: Plan) -> set[str]:
    """Names of the parameters whose chunks are updated on the accelerator."""
    chunks = {step.chunk for step in plan.steps if step.kind is Kind.GPU_UPDATE}
    return {plan.workload.tensors[t].name for t, chunk in plan.layout.chunk_of.items() if chunk in chunks}


def placed(kit: Any, plan: Plan, model: nn.Module, lr: float, weight_decay: float, max_grad_norm: float | None) -> Any:
    """kit.Reference with [Note: who updates]. bounds: of each parameter's last step, by element; empty for bf16, whose
    reference updates fp32 masters where the model is."""

    class Adam(torch.optim.AdamW):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            model.zero_grad(set_to_none)

    class Placed(kit.Reference):  # type: ignore[misc]
        def __post_init__(self) -> None:
            super().__post_init__()
            self.bounds: dict[str, torch.Tensor] = {}
            self.host: dict[str, nn.Parameter] = {}
            if self.bf16:
                return
            there = updated_on_gpu(plan)
            named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
            self.host = {n: nn.Parameter(p.detach().cpu().clone()) for n, p in named if n not in there}
            self.optimizer = Adam(
                [self.host.get(n, p) for n, p in named],
                lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=True,
            )  # fmt: skip

        def step(self) -> None:
            if self.bf16:
                super().step()
                return
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(list(self.model.parameters()), self.max_grad_norm)
            d = {n: NOISE * float(p.grad.abs().max()) for n, p in self.model.named_parameters() if p.grad is not None}
            for name, p in self.model.named_parameters():
                if name in self.host:
                    self.host[name].grad = None if p.grad is None else p.grad.cpu()
            self.optimizer.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    if name in self.host:
                        p.copy_(self.host[name])
            self.bounds = {name: self._bound(self.owner(name), each) for name, each in d.items()}

        def owner(self, name: str) -> nn.Parameter:
            """What the optimizer has of a parameter."""
            found: nn.Parameter = self.host[name] if name in self.host else self.model.get_parameter(name)
            return found

        def _bound(self, p: nn.Parameter, d: float) -> torch.Tensor:
            state = self.optimizer.state[p]
            root = (state["exp_avg_sq"] / (1 - self.betas[1] ** float(state["step"]))).sqrt()
            step = self.lr * torch.clamp(4.2 * d / (root + self.eps), max=2.2)
            return torch.where(root > 0, step, 0.0) + ROUNDING * p.detach().abs()

        def take_over(self, values: dict[str, torch.Tensor], moments: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
            """Parameters, and moments by number, as the run has them now."""
            with torch.no_grad():
                for number, (name, p) in enumerate(self.model.named_parameters()):
                    p.copy_(values[name])
                    if name in self.host:
                        self.host[name].copy_(values[name])
                    for key in ("exp_avg", "exp_avg_sq"):
                        if number in moments:
                            self.optimizer.state[self.owner(name)][key].copy_(moments[number][key])

    return Placed(model, lr, weight_decay, max_grad_norm)


def beyond(reference: Any, values: dict[str, torch.Tensor]) -> dict[str, float]:
    """By name, the parameters with an element outside its bound: the most by which one is, in bounds."""
    found = {}
    for name, parameter in reference.model.named_parameters():
        apart = (values[name].cpu() - parameter.detach().cpu()).abs()
        bound = reference.bounds[name].cpu() if name in reference.bounds else torch.zeros(())
        if bool((apart > bound).any()):
            found[name] = float((apart / bound.clamp_min(1e-30)).max())
    return found


def tight(reference: Any) -> float:
    """Share of the elements whose bound is below a hundredth of lr, so that it says something."""
    bounds = torch.cat([bound.flatten().cpu() for bound in reference.bounds.values()])
    return float((bounds < 0.01 * reference.lr).float().mean())


def train(kit: Any, run: Any, *, steps: int, micro_batches: int = 1) -> tuple[list[float], list[float]]:
    """`kit.train_both`, each step held against its bound."""
    mine: list[float] = []
    theirs: list[float] = []
    for step in range(steps):
        one, other = kit.train_both(
            run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=micro_batches
        )
        mine, theirs = mine + one, theirs + other
        values = run.model.state_dict()
        assert beyond(run.reference, values) == {}, f"step {step}"
        run.reference.take_over(values, run.optimizer.state_dict()["state"])
    return mine, theirs
