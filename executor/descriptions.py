"""Optimizers as the user writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from executor.devices.rounding import NEAREST, STOCHASTIC
from executor.devices.rules import RULES, Rule
from executor.memory.payloads import STATE_DTYPES
from executor.scaling import LossScale, loss_scale_for
from pstar_sim.arguments import choice
from pstar_sim.errors import PlanError
from pstar_sim.workload.optimizers import OPTIMIZERS
from pstar_sim.workload.workload import Tensor

AS_PLANNED = "plan"
"""max_grad_norm=AS_PLANNED: the plan's setting decides whether gradients are clipped."""
REST, REST_RULE = "rest", "adamw"
"""Key of a group under Muon for the settings of parameters that are no matrices, and their rule."""
DEFAULT_NORM = 1.0
"""The norm for a plan that clips, where the optimizer names no norm; most training scripts use it."""

_RANGES: dict[str, tuple[Any, str]] = {
    "lr": (lambda value: float(value) >= 0, "at least 0"),
    "betas": (lambda value: all(0 <= beta < 1 for beta in value), "two numbers, each at least 0 and below 1"),
    "eps": (lambda value: value >= 0, "at least 0"),
    "weight_decay": (lambda value: value >= 0, "at least 0"),
    "momentum": (lambda value: value >= 0, "at least 0"),
    "ns_steps": (lambda value: 1 <= value < 100, "from 1 to 99"),
}
"""Setting -> whether a value is in its range, and the range in words."""


@dataclass(frozen=True)
class Optimizer:
    """The parameters to optimize and the settings of the update.

    params_or_groups: None (every trainable parameter, one group), parameters, or groups as torch takes them; the plan
        has to be made for the same ones.
    max_grad_norm: clip the global norm, by default as the plan says, at DEFAULT_NORM where it clips; None for no
        clipping.
    eager: update each chunk when its gradient is final, inside backward (needs a plan with update "eager").
    loss_scale: None: dynamic if the model has fp16 parameters, else no scaling; "dynamic"; a number for a fixed scale;
        or a LossScale.
    rounding: "nearest"; or "stochastic" of parameters without fp32 masters, whose updates are then computed in fp32.

    Raises PlanError for numbers out of range.
    """

    params_or_groups: Any = None
    max_grad_norm: float | str | None = field(default=AS_PLANNED, kw_only=True)
    eager: bool = field(default=False, kw_only=True)
    loss_scale: str | float | LossScale | None = field(default=None, kw_only=True)
    rounding: str = field(default=NEAREST, kw_only=True)

    def __post_init__(self) -> None:
        norm = self.max_grad_norm
        number = isinstance(norm, (int, float)) and not isinstance(norm, bool)
        if norm is not None and norm != AS_PLANNED and not (number and float(norm) > 0):
            raise PlanError(
                f"{self.word}: max_grad_norm={norm!r} must be a number > 0, None for no clipping, or {AS_PLANNED!r}"
            )
        loss_scale_for(self.loss_scale, ())
        choice("rounding", self.rounding, (NEAREST, STOCHASTIC), error=PlanError)
        if self.params_or_groups is not None:  # `model.parameters()` is an iterator, which can be read only once
            object.__setattr__(self, "params_or_groups", _read(self.params_or_groups))
        self._check(self.settings)

    @property
    def planned(self) -> str:
        """Name of the optimizer that the plan has to be made for."""
        raise NotImplementedError

    @property
    def rule(self) -> Rule:
        name = OPTIMIZERS[self.planned].all_states[-1].name
        if name not in RULES:
            raise PlanError(f"{self.word}: torch {torch.__version__} has no such optimizer; torch 2.9 has")
        return RULES[name]

    @property
    def word(self) -> str:
        return type(self).__name__

    @property
    def given(self) -> str:
        """As a user writes it, without parameters and settings."""
        return f"{self.word}()"

    @property
    def settings(self) -> dict[str, Any]:
        """Of groups that name none."""
        return {name: getattr(self, name) for name in self.rule.settings}

    def plain(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The library's optimizer with the same arithmetic. Raises PlanError if there is none."""
        if not self.rule.has_plain:
            where = self.rule.library if self.rule.plain_name else "torch.optim"
            raise PlanError(f"{self.word}: {where} has no such optimizer to run beside the plan")
        return self.rule.plain(parameters, self.settings)

    def norm_for(self, *, clip: bool) -> float | None:
        """None for no clipping."""
        if isinstance(self.max_grad_norm, str):
            return DEFAULT_NORM if clip else None
        return self.max_grad_norm

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """As torch takes them."""
        given = self.params_or_groups
        if given is None:
            return [{"params": [p for p in model.parameters() if p.requires_grad]}]
        rows: list[Any] = list(given)
        if rows and isinstance(rows[0], Mapping):
            groups = [dict(row) for row in rows]
            for group in groups:
                held = group["params"]
                group["params"] = [held] if isinstance(held, torch.Tensor) else list(held)
                self._check({name: group.get(name, value) for name, value in self.settings.items()})
                if refused := self.rule.refused_in(group):
                    raise PlanError(f"{self.word}: {refused} is not supported; leave it out")
            return groups
        return [{"params": rows}]

    def _check(self, settings: Mapping[str, Any]) -> None:
        for name, value in settings.items():
            fits, want = _RANGES.get(name, (lambda _: True, ""))
            if not fits(value):
                raise PlanError(f"{self.word}: {name}={value} is out of range; it must be {want}")


@dataclass(frozen=True)
class AdamW(Optimizer):
    """torch.optim.AdamW; its defaults.

    state_dtype: dtype of both moments; torch.bfloat16 where the plan's optimizer is "adamw-bf16-states". Without fp32
        masters, moments have the dtype of the parameters.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    state_dtype: torch.dtype = field(default=torch.float32, kw_only=True)

    def __post_init__(self) -> None:
        if self.state_dtype not in STATE_DTYPES.values():
            raise PlanError(f"AdamW: state_dtype={self.state_dtype} is not known; use torch.float32 or torch.bfloat16")
        super().__post_init__()

    @property
    def given(self) -> str:
        return f"AdamW(state_dtype={self.state_dtype})"

    @property
    def planned(self) -> str:
        return "adamw" if self.state_dtype == torch.float32 else "adamw-bf16-states"


@dataclass(frozen=True)
class Adam(Optimizer):
    """torch.optim.Adam, which adds the weight decay to the gradient; its defaults."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    planned: ClassVar[str] = "adam"


@dataclass(frozen=True)
class SGD(Optimizer):
    """torch.optim.SGD; its defaults."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and (not self.momentum or self.dampening):
            raise PlanError("SGD: nesterov=True needs a momentum above 0 and a dampening of 0")
        super().__post_init__()

    @property
    def given(self) -> str:
        return f"SGD(momentum={self.momentum:g})"

    @property
    def planned(self) -> str:
        return "sgd-momentum" if self.momentum else "sgd"


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion (Chen et al. 2023) with the defaults of its authors."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    planned: ClassVar[str] = "lion"


@dataclass(frozen=True)
class _OfBitsandbytes(Optimizer):
    """An optimizer of bitsandbytes.optim.

    optim_bits: 32, or 8 for states of tensors of 4,096 elements and more.
    embeddings: whether theirs have 8 bits too; the Trainer of transformers keeps them in 32.
    """

    optim_bits: int = field(default=8, kw_only=True)
    embeddings: bool = field(default=False, kw_only=True)
    _kind: ClassVar[str]

    def __post_init__(self) -> None:
        if self.optim_bits not in (8, 32):
            raise PlanError(f"{self.word}: optim_bits={self.optim_bits} is not known; use 8 or 32")
        super().__post_init__()

    @property
    def given(self) -> str:
        more = ", embeddings=True" if self.embeddings and self.optim_bits == 8 else ""
        return f"{self.word}(optim_bits={self.optim_bits}{more})"

    @property
    def planned(self) -> str:
        if self.optim_bits == 32:
            return f"{self._kind}-bnb"
        return f"{self._kind}-8bit-all" if self.embeddings else f"{self._kind}-8bit"


@dataclass(frozen=True)
class BnbAdamW(_OfBitsandbytes):
    """bitsandbytes.optim.AdamW, which is its Adam too; its defaults but for the bits."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    _kind: ClassVar[str] = "adamw"


@dataclass(frozen=True)
class BnbLion(_OfBitsandbytes):
    """bitsandbytes.optim.Lion; its defaults but for the bits."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    _kind: ClassVar[str] = "lion"


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """transformers' Adafactor without a first moment (beta1); its defaults."""

    lr: float | None = None
    eps: tuple[float, float] = (1e-30, 1e-3)
    clip_threshold: float = 1.0
    decay_rate: float = -0.8
    weight_decay: float = 0.0
    scale_parameter: bool = True
    relative_step: bool = True
    warmup_init: bool = False
    planned: ClassVar[str] = "adafactor"

    def _check(self, settings: Mapping[str, Any]) -> None:
        super()._check({name: value for name, value in settings.items() if name != "eps" and value is not None})
        if (settings["lr"] is None) != settings["relative_step"]:
            raise PlanError("Adafactor: give an lr with relative_step=False, or no lr with relative_step=True")


@dataclass(frozen=True)
class Muon(Optimizer):
    """torch.optim.Muon for matrices but embeddings and the head, and torch.optim.AdamW for the rest; their defaults.

    Groups may name their rule: {"params": ..., "update": "muon" or "adamw"}, with its settings. A group without one has
    both kinds of parameters, Muon's settings, and AdamW's in REST; a scheduler changes Muon's lr there.
    """

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    rest: AdamW = AdamW()
    planned: ClassVar[str] = "muon"

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        rest, groups = self.rest.settings, super().groups(model)
        self._check_split(groups, split(model))
        defaults = {"muon": self.settings, REST_RULE: rest, "": {**self.settings, REST: rest}}
        return [{**defaults[group.get("update", "")], **group} for group in groups]

    def plain(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        raise PlanError("Muon: plain PyTorch has two optimizers in its place, which one loop here does not run")

    def _check_split(self, groups: Sequence[Mapping[str, Any]], rule_of: Mapping[int, str]) -> None:
        for number, group in enumerate(groups):
            for p in group["params"]:
                rule = group.get("update", rule_of.get(id(p)))
                if rule_of.get(id(p), rule) != rule:
                    raise PlanError(
                        f"Muon: group {number} updates a parameter of shape {tuple(p.shape)} by {group['update']}; "
                        f"plans update it by {rule_of[id(p)]}: Muon has matrices but embeddings and the head, AdamW "
                        "the rest"
                    )


DESCRIPTIONS: dict[str, Callable[..., Optimizer]] = {
    "adamw": AdamW,
    "adamw-bf16-states": partial(AdamW, state_dtype=torch.bfloat16),
    "adam": Adam,
    "lion": Lion,
    "adafactor": Adafactor,
    "adamw-8bit": BnbAdamW,
    "adamw-8bit-all": partial(BnbAdamW, embeddings=True),
    "adamw-bnb": partial(BnbAdamW, optim_bits=32),
    "lion-8bit": BnbLion,
    "lion-8bit-all": partial(BnbLion, embeddings=True),
    "lion-bnb": partial(BnbLion, optim_bits=32),
    "sgd-momentum": partial(SGD, momentum=0.9),
    "sgd": SGD,
    **({"muon": Muon} if "muon" in RULES else {}),
}
"""Name of a plan's optimizer -> its description with default settings."""


def described(planned: str) -> str:
    """As a user writes it."""
    return DESCRIPTIONS[planned]().given


def split(model: nn.Module) -> dict[int, str]:
    """id(parameter) -> the rule that updates it under Muon, by the usual split (optimizers.py)."""
    spec = OPTIMIZERS["muon"]
    return {id(p): spec.all_states[spec.kind_of(name, tuple(p.shape))].name for name, p in model.named_parameters()}


def _read(params_or_groups: Iterable[Any]) -> tuple[Any, ...]:
    def group(row: Any) -> Any:
        if not isinstance(row, Mapping) or isinstance(row.get("params"), torch.Tensor) or "params" not in row:
            return row
        return {**row, "params": tuple(row["params"])}

    return tuple(group(row) for row in params_or_groups)


def group_of(groups: Iterable[dict[str, Any]]) -> dict[int, int]:
    """id(parameter) -> index of its group. Raises PlanError for a parameter in two groups."""
    found: dict[int, int] = {}
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if found.setdefault(id(parameter), index) != index:
                raise PlanError(
                    f"a parameter of shape {tuple(parameter.shape)} is in groups {found[id(parameter)]} and {index} of "
                    "the optimizer; leave it in one of them"
                )
    return found


def check_groups(tensors: Sequence[Tensor], parameters: Sequence[nn.Parameter], groups: Mapping[int, int]) -> None:
    """Raise PlanError for a trainable parameter that is in no group.

    groups: see `group_of`.
    """
    for t, parameter in zip(tensors, parameters):
        if not t.frozen and t.tied_to is None and id(parameter) not in groups:
            raise PlanError(
                f"parameter {t.name!r} is trainable but in no group of the optimizer; freeze it or add it to a group"
            )
