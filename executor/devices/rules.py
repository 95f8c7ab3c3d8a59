"""Rules of updates: the arithmetic of each optimizer on flat fp32 tensors, and its names in torch's state dicts.

A rule says what a new optimizer needs in the executor. The planner's side of it is a row of
`pstar_sim.workload.optimizers.OPTIMIZERS`. `updates.py` cuts chunks into the tensors that a rule is given, and casts
what is narrower than fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

__all__ = ["RULES", "Rule", "Settings"]

Settings = Mapping[str, Any]
"""The settings of one parameter group, as of the call of `optimizer.step()`: lr, weight_decay and so on."""
Flat = Sequence[torch.Tensor]
"""One flat tensor per range."""
Kernel = Callable[[Flat, Flat, Sequence[Flat], Sequence[int], Settings, Flat], None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The update of an optimizer.

    kernel: kernel(params, grads, moments, steps, settings, scratch) updates params and moments in place. `moments` has
        a sequence of tensors per list, `steps` the number of earlier updates of each tensor, `scratch` a tensor per
        buffer, as long as the longest range.
    torch_name: class of torch.optim with the same update; "" if torch has none.
    states: key of a parameter's state in a state dict -> list of its chunk.
    settings: names of its settings.
    refused: switches of torch's class that have to be off.
    on: settings that choose this arithmetic, in a state dict's groups.
    buffers: fp32 tensors beside the lists, each as long as what is updated at a time.
    counts: whether a state dict has a step count.
    room: bytes that the update of a whole tensor of a shape takes beside its lists; None for updates of elements.
    """

    kernel: Kernel
    torch_name: str
    states: Mapping[str, str]
    settings: tuple[str, ...]
    refused: tuple[str, ...] = ()
    on: Mapping[str, Any] = field(default_factory=dict)
    buffers: int = 0
    counts: bool = True
    room: Callable[[Sequence[int]], int] | None = None

    @property
    def lists(self) -> tuple[str, ...]:
        """The chunk's lists of moments, in storage order."""
        return tuple(self.states.values())

    def read(self, group: Settings) -> Settings:
        return {name: _number(group[name]) for name in self.settings}

    def plain(self, parameters: Iterable[torch.Tensor], settings: Settings) -> torch.optim.Optimizer:
        """Returns torch's own optimizer with these settings and this arithmetic."""
        kind, fused = getattr(torch.optim, self.torch_name), self.on.get("fused")
        made: torch.optim.Optimizer = kind(parameters, **settings, **({"fused": fused} if fused else {}))
        return made

    def refused_in(self, group: Settings) -> str:
        """Returns the unsupported switches that a group sets, in words; "" for none."""
        return ", ".join(f"{name}={group[name]}" for name in self.refused if group.get(name))


def _number(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else float(value)


def _counts(steps: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Returns step counts of this update. They are filled on the device: no copy, no wait. torch wants fp32 here; fp16
    cannot count beyond 2048."""
    counts = {n: torch.full((), float(n + 1), dtype=torch.float32, device=device) for n in set(steps)}
    return [counts[n] for n in steps]


def _adam_with(fused: Callable[..., None]) -> Kernel:
    def kernel(
        params: Flat, grads: Flat, moments: Sequence[Flat], steps: Sequence[int], settings: Settings, scratch: Flat
    ) -> None:
        momenta, variances = moments
        beta1, beta2 = settings["betas"]
        fused(
            params,
            grads,
            momenta,
            variances,
            [],
            _counts(steps, params[0].device),
            lr=settings["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            amsgrad=False,
            maximize=False,
        )

    return kernel


def _sgd(
    params: Flat, grads: Flat, moments: Sequence[Flat], steps: Sequence[int], settings: Settings, scratch: Flat
) -> None:
    """As torch's SGD without `fused`: that of the CPU leaves the ends of bf16 momenta undefined (torch 2.13)."""
    for n, (param, grad) in enumerate(zip(params, grads)):
        if settings["weight_decay"]:
            grad.add_(param, alpha=settings["weight_decay"])
        if settings["momentum"]:
            momentum = moments[0][n]
            if steps[n]:
                momentum.mul_(settings["momentum"]).add_(grad, alpha=1 - settings["dampening"])
            else:  # the first momentum is the gradient
                momentum.copy_(grad)
            grad.copy_(momentum) if not settings["nesterov"] else grad.add_(momentum, alpha=settings["momentum"])
        param.add_(grad, alpha=-settings["lr"])


def _lion(
    params: Flat, grads: Flat, moments: Sequence[Flat], steps: Sequence[int], settings: Settings, scratch: Flat
) -> None:
    """p (1 - lr wd) - lr sign(b1 m + (1 - b1) g), then m = b2 m + (1 - b2) g (Chen et al. 2023, lion-pytorch)."""
    (beta1, beta2), lr = settings["betas"], settings["lr"]
    for param, grad, momentum in zip(params, grads, moments[0]):
        param.mul_(1 - lr * settings["weight_decay"])
        direction = (
            scratch[0].view(param.dtype)[: param.numel()].copy_(momentum).mul_(beta1).add_(grad, alpha=1 - beta1)
        )
        param.add_(direction.sign_(), alpha=-lr)
        momentum.mul_(beta2).add_(grad, alpha=1 - beta2)


def _muon(
    params: Flat, grads: Flat, moments: Sequence[Flat], steps: Sequence[int], settings: Settings, scratch: Flat
) -> None:
    """torch's own Muon, of matrices [m, n]."""
    from torch.optim._muon import muon

    muon(list(params), list(grads), list(moments[0]), foreach=False, has_complex=False, **settings)


def _room_of_muon(shape: Sequence[int]) -> int:
    """fp32 gradient and direction, two bf16 matrices of their shape, and two of m x m, m <= n."""
    m, n = sorted(shape)
    return (4 + 4 + 2 + 2) * m * n + 2 * 2 * m * m


_ADAM = {"exp_avg": "momentum", "exp_avg_sq": "variance"}
_SWITCHES = ("amsgrad", "maximize", "differentiable")
_FUSED = {"fused": True, "foreach": None}
_UNFUSED = {"fused": None, "foreach": None}
_OF_ADAM = ("lr", "betas", "eps", "weight_decay")
_OF_SGD = ("lr", "momentum", "dampening", "weight_decay", "nesterov")

ADAMW = Rule(
    kernel=_adam_with(torch._fused_adamw_),
    torch_name="AdamW",
    states=_ADAM,
    settings=_OF_ADAM,
    refused=_SWITCHES,
    on={**_FUSED, "decoupled_weight_decay": True},
)
RULES = {
    "adamw": ADAMW,
    "adamw-bf16-states": ADAMW,
    "adam": Rule(
        kernel=_adam_with(torch._fused_adam_),
        torch_name="Adam",
        states=_ADAM,
        settings=_OF_ADAM,
        refused=(*_SWITCHES, "decoupled_weight_decay"),
        on=_FUSED,
    ),
    "lion": Rule(
        kernel=_lion,
        torch_name="",
        states={"exp_avg": "momentum"},
        settings=("lr", "betas", "weight_decay"),
        buffers=1,
        counts=False,
    ),
    "sgd-momentum": Rule(
        kernel=_sgd,
        torch_name="SGD",
        states={"momentum_buffer": "momentum"},
        settings=_OF_SGD,
        refused=("maximize", "differentiable"),
        on=_UNFUSED,
        counts=False,
    ),
    "sgd": Rule(
        kernel=_sgd,
        torch_name="SGD",
        states={},
        settings=_OF_SGD,
        refused=("maximize", "differentiable", "momentum"),
        on=_UNFUSED,
        counts=False,
    ),
}
"""Name of `States` -> their update. The executor refuses plans with others."""
if find_spec("torch.optim._muon") is not None:  # torch 2.9 and later
    RULES["muon"] = Rule(
        kernel=_muon,
        torch_name="Muon",
        states={"momentum_buffer": "momentum"},
        settings=(
            "lr",
            "weight_decay",
            "momentum",
            "nesterov",
            "ns_coefficients",
            "eps",
            "ns_steps",
            "adjust_lr_fn",
        ),
        on=_UNFUSED,
        counts=False,
        room=_room_of_muon,
    )
