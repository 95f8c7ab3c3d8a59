"""Rules of updates: the arithmetic of each optimizer on flat fp32 tensors, and its names in torch's state dicts.

The planner's side of a rule is a row of `pstar_sim.workload.optimizers.OPTIMIZERS`; `updates.py` cuts chunks into the
tensors that it is given, and casts what is narrower than fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

STEP = "step"
"""Key of the number of updates in a parameter's state."""

Settings = Mapping[str, Any]
"""The settings of one parameter group, as of the call of `optimizer.step()`: lr, weight_decay and so on."""
Flat = Sequence[torch.Tensor]
"""One flat tensor per range."""
Kernel = Callable[[Flat, Flat, Sequence[Flat], Sequence[int], Settings, Flat], None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The update of an optimizer.

    kernel: updates params and moments in place, given (params, grads, moments, steps, settings, scratch): `moments` has
        a sequence per state, `steps` the earlier updates of each tensor, `scratch` a tensor per buffer, as long as the
        longest range.
    plain_name: class of `library` with the same update, "" without one.
    states: key in a state dict -> list of the chunk, or a field of one (`memory.slots`).
    refused: switches of the library's class that have to be off.
    on: settings that choose this arithmetic, in a state dict's groups.
    given: those that the library's class takes beside `settings`.
    buffers: fp32 tensors beside the lists, as long as what is updated at a time.
    counts: type of a state dict's step count, if any.
    block: elements updated together.
    room: bytes for a whole tensor of a shape beside fp32 states, None for updates of elements.
    needs: its package, "" for torch.
    constants: key -> tensor that a state dict has beside the states.
    """

    kernel: Kernel
    plain_name: str
    states: Mapping[str, str]
    settings: tuple[str, ...]
    refused: tuple[str, ...] = ()
    on: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    buffers: int = 0
    counts: type[torch.Tensor] | type[int] | None = torch.Tensor
    block: int = 1
    room: Callable[[Sequence[int]], int] | None = None
    library: str = "torch.optim"
    needs: str = ""
    constants: Mapping[str, Callable[[], torch.Tensor]] = field(default_factory=dict)

    def read(self, group: Settings) -> Settings:
        return {name: _number(group[name]) for name in self.settings}

    @property
    def has_plain(self) -> bool:
        """Whether a library that is installed has the same update."""
        return bool(self.plain_name) and find_spec(self.library.partition(".")[0]) is not None

    def plain(self, parameters: Iterable[torch.Tensor], settings: Settings) -> torch.optim.Optimizer:
        """The library's own, with this arithmetic."""
        kind = getattr(import_module(self.library), self.plain_name)
        made: torch.optim.Optimizer = kind(parameters, **settings, **self.given)
        return made

    def refused_in(self, group: Settings) -> str:
        """Unsupported switches that a group sets, in words; "" for none."""
        return ", ".join(f"{name}={group[name]}" for name in self.refused if group.get(name))


def _number(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else float(value)


def _counts(steps: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Of this update, filled on the device: no copy, no wait. fp16 cannot count beyond 2048."""
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
    from torch.optim._muon import muon

    muon(list(params), list(grads), list(moments[0]), foreach=False, has_complex=False, **settings)


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    rms: torch.Tensor = tensor.norm(2) / (tensor.numel() ** 0.5)
    return rms


def _adafactor(
    params: Flat, grads: Flat, moments: Sequence[Flat], steps: Sequence[int], settings: Settings, scratch: Flat
) -> None:
    """transformers' without a first moment, on whole tensors; factors of matrices are flat."""
    least, least_scale = settings["eps"]
    for n, (param, grad) in enumerate(zip(params, grads)):
        step, lr = steps[n] + 1, settings["lr"]
        if settings["relative_step"]:
            lr = min(1e-6 * step if settings["warmup_init"] else 1e-2, 1.0 / math.sqrt(step))
        if settings["scale_parameter"]:
            lr = max(least_scale, _rms(param)) * lr
        beta = 1.0 - math.pow(step, settings["decay_rate"])
        update = (grad**2) + least
        if len(moments) > 1:
            shape = grad.shape
            rows, columns = moments[0][n].view(shape[:-1]), moments[1][n].view(shape[:-2] + shape[-1:])
            rows.mul_(beta).add_(update.mean(dim=-1), alpha=1.0 - beta)
            columns.mul_(beta).add_(update.mean(dim=-2), alpha=1.0 - beta)
            by_row = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = torch.mul(by_row, columns.unsqueeze(-2).rsqrt()).mul_(grad)
        else:
            update = moments[0][n].mul_(beta).add_(update, alpha=1.0 - beta).rsqrt().mul_(grad)
        update.div_((_rms(update) / settings["clip_threshold"]).clamp_(min=1.0)).mul_(lr)
        if settings["weight_decay"]:
            param.add_(param, alpha=-settings["weight_decay"] * lr)
        param.add_(-update)


def _room_of_adafactor(shape: Sequence[int]) -> int:
    """fp32 gradient, direction and what two operators of it make."""
    return 4 * 4 * math.prod(shape)


def _room_of_muon(shape: Sequence[int]) -> int:
    """fp32 gradient and direction, two bf16 matrices of their shape, and two of m x m, m <= n."""
    m, n = sorted(shape)
    return (4 + 4 + 2 + 2) * m * n + 2 * 2 * m * m


@cache
def _code(signed: bool, device: torch.device) -> torch.Tensor:
    """bitsandbytes' values of the 256 codes of moments."""
    from bitsandbytes.functional import create_dynamic_map

    code: torch.Tensor = create_dynamic_map(signed=signed).to(device)
    return code


_CPU = torch.device("cpu")


def _in_8_bits(name: str) -> Kernel:
    def kernel(
        params: Flat, grads: Flat, moments: Sequence[Flat], steps: Sequence[int], settings: Settings, scratch: Flat
    ) -> None:
        from bitsandbytes.functional import optimizer_update_8bit_blockwise as update

        (beta1, beta2), device = settings["betas"], params[0].device
        signs = (True, False)[: len(moments) // 2]  # a variance has no negative values
        codes = [*(_code(signed, device) for signed in signs), None][:2]
        for n, (param, grad) in enumerate(zip(params, grads)):
            states, scales = ([*(each[n] for each in moments[first::2]), None][:2] for first in (0, 1))
            how = (beta1, beta2, 0.0, 0.0, settings.get("eps", 0.0), steps[n] + 1, settings["lr"])
            update(name, grad, param, *states, *how, *codes, *scales, settings["weight_decay"])

    return kernel


def _in_32_bits(name: str) -> Kernel:
    def kernel(
        params: Flat, grads: Flat, moments: Sequence[Flat], steps: Sequence[int], settings: Settings, scratch: Flat
    ) -> None:
        from bitsandbytes.functional import optimizer_update_32bit as update

        beta1, beta2 = settings["betas"]
        for n, (param, grad) in enumerate(zip(params, grads)):
            first, second = [*(each[n] for each in moments), None][:2]
            how = (beta1, settings.get("eps", 0.0), steps[n] + 1, settings["lr"])
            update(name, grad, param, first, *how, second, beta2, 0.0, 0.0, settings["weight_decay"])

    return kernel


def _factored(states: Mapping[str, str]) -> Rule:
    return Rule(
        kernel=_adafactor,
        plain_name="Adafactor",
        states=states,
        settings=(
            "lr",
            "eps",
            "clip_threshold",
            "decay_rate",
            "weight_decay",
            "scale_parameter",
            "relative_step",
            "warmup_init",
        ),
        refused=("beta1",),
        counts=int,
        room=_room_of_adafactor,
        library="transformers.optimization",
    )


_ADAM = {"exp_avg": "momentum", "exp_avg_sq": "variance"}
_SWITCHES = ("amsgrad", "maximize", "differentiable")
_FUSED = {"fused": True, "foreach": None}
_UNFUSED = {"fused": None, "foreach": None}
_OF_ADAM = ("lr", "betas", "eps", "weight_decay")
_OF_LION = ("lr", "betas", "weight_decay")
_OF_SGD = ("lr", "momentum", "dampening", "weight_decay", "nesterov")


def _of_bitsandbytes(kind: str, name: str, moments: Sequence[str], settings: tuple[str, ...], bits: int) -> Rule:
    narrow, states = bits == 8, dict[str, str]()
    for n, moment in enumerate(moments, 1):
        states |= {f"state{n}": moment, **({f"absmax{n}": f"{moment}.scale"} if narrow else {})}
    return Rule(
        kernel=_in_8_bits(name) if narrow else _in_32_bits(name),
        plain_name=kind,
        states=states,
        settings=settings,
        given={"optim_bits": bits},
        counts=int,
        block=256 if narrow else 1,
        library="bitsandbytes.optim",
        needs="bitsandbytes",
        constants={f"qmap{n}": partial(_code, n == 1, _CPU) for n in range(1, len(moments) + 1)} if narrow else {},
    )


ADAMW = Rule(
    kernel=_adam_with(torch._fused_adamw_),
    plain_name="AdamW",
    states=_ADAM,
    settings=_OF_ADAM,
    refused=_SWITCHES,
    on={**_FUSED, "decoupled_weight_decay": True},
    given={"fused": True},
)
RULES = {
    "adamw": ADAMW,
    "adamw-bf16-states": ADAMW,
    "adam": Rule(
        kernel=_adam_with(torch._fused_adam_),
        plain_name="Adam",
        states=_ADAM,
        settings=_OF_ADAM,
        refused=(*_SWITCHES, "decoupled_weight_decay"),
        on=_FUSED,
        given={"fused": True},
    ),
    "adamw-8bit": _of_bitsandbytes("AdamW", "adam", ("momentum", "variance"), _OF_ADAM, 8),
    "adamw-bnb": _of_bitsandbytes("AdamW", "adam", ("momentum", "variance"), _OF_ADAM, 32),
    "lion-8bit": _of_bitsandbytes("Lion", "lion", ("momentum",), _OF_LION, 8),
    "lion-bnb": _of_bitsandbytes("Lion", "lion", ("momentum",), _OF_LION, 32),
    "lion": Rule(
        kernel=_lion,
        plain_name="",
        states={"exp_avg": "momentum"},
        settings=_OF_LION,
        buffers=1,
        counts=None,
    ),
    "adafactor": _factored({"exp_avg_sq_row": "variance.row", "exp_avg_sq_col": "variance.column"}),
    "adafactor-vectors": _factored({"exp_avg_sq": "variance"}),
    "sgd-momentum": Rule(
        kernel=_sgd,
        plain_name="SGD",
        states={"momentum_buffer": "momentum"},
        settings=_OF_SGD,
        refused=("maximize", "differentiable"),
        on=_UNFUSED,
        counts=None,
    ),
    "sgd": Rule(
        kernel=_sgd,
        plain_name="SGD",
        states={},
        settings=_OF_SGD,
        refused=("maximize", "differentiable", "momentum"),
        on=_UNFUSED,
        counts=None,
    ),
}
"""Name of `States` -> their update. The executor refuses plans with others."""
if find_spec("torch.optim._muon") is not None:  # torch 2.9 and later
    RULES["muon"] = Rule(
        kernel=_muon,
        plain_name="Muon",
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
        counts=None,
        room=_room_of_muon,
    )
