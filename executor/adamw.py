"""AdamW as the user writes it: a description of the parameters to optimize and of the update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from executor.memory.payloads import STATE_DTYPES
from executor.scaling import LossScale, loss_scale_for
from pstar_sim.errors import PlanError
from pstar_sim.workload.workload import Tensor

__all__ = ["NUMBERS", "AdamW", "check_groups", "group_of", "refused_in"]

AS_PLANNED = "plan"
"""AdamW(max_grad_norm=AS_PLANNED): the plan's setting decides whether gradients are clipped."""
DEFAULT_NORM = 1.0
"""The norm for a plan that clips, where AdamW names no norm; most training scripts use it."""

NUMBERS = ("lr", "betas", "eps", "weight_decay")
_REFUSED = ("amsgrad", "maximize", "differentiable")


@dataclass(frozen=True)
class AdamW:
    """The parameters to optimize and the settings of the update; the defaults are torch.optim.AdamW's.

    params_or_groups: None (every trainable parameter, one group), parameters, or groups as torch takes them (dicts with
        "params" and settings); the plan has to be made for the same ones.
    max_grad_norm: clip the global norm; by default as the plan says, at DEFAULT_NORM where it clips; None for no
        clipping.
    eager: update each chunk when its gradient is final, inside backward (the plan has to be made with update "eager").
    state_dtype: dtype of both moments; torch.bfloat16 where the plan's optimizer is "adamw-bf16-states" (the update is
        done in fp32 and rounded, so small changes of a moment are lost).
    loss_scale: None: dynamic if the model has fp16 parameters, else no scaling; "dynamic"; a number for a fixed scale;
        or a LossScale. The loop stays as it is, see scaling.py.

    Raises PlanError for numbers out of range.
    """

    params_or_groups: Any = None
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    max_grad_norm: float | str | None = AS_PLANNED
    eager: bool = False
    state_dtype: torch.dtype = torch.float32
    loss_scale: str | float | LossScale | None = None

    def __post_init__(self) -> None:
        norm = self.max_grad_norm
        number = isinstance(norm, (int, float)) and not isinstance(norm, bool)
        if norm is not None and norm != AS_PLANNED and not (number and float(norm) > 0):
            raise PlanError(
                f"AdamW: max_grad_norm={norm!r} must be a number > 0, None for no clipping, or {AS_PLANNED!r}"
            )
        if self.state_dtype not in STATE_DTYPES.values():
            raise PlanError(f"AdamW: state_dtype={self.state_dtype} is not known; use torch.float32 or torch.bfloat16")
        loss_scale_for(self.loss_scale, ())
        if self.params_or_groups is not None:  # `model.parameters()` is an iterator, which can be read only once
            object.__setattr__(self, "params_or_groups", _read(self.params_or_groups))
        _check_numbers({name: getattr(self, name) for name in NUMBERS})

    def norm_for(self, *, clip: bool) -> float | None:
        """Returns the norm of clipping under a plan made with or without it; None for no clipping."""
        if isinstance(self.max_grad_norm, str):
            return DEFAULT_NORM if clip else None
        return self.max_grad_norm

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Returns the parameter groups of `model`, as torch takes them."""
        given = self.params_or_groups
        if given is None:
            return [{"params": [p for p in model.parameters() if p.requires_grad]}]
        rows: list[Any] = list(given)
        if rows and isinstance(rows[0], Mapping):
            groups = [dict(row) for row in rows]
            for group in groups:
                held = group["params"]
                group["params"] = [held] if isinstance(held, torch.Tensor) else list(held)
                _check_numbers({name: group.get(name, getattr(self, name)) for name in NUMBERS})
                refused = refused_in(group)
                if refused:
                    raise PlanError(f"AdamW: {refused} is not supported; leave it out")
            return groups
        return [{"params": rows}]


def _read(params_or_groups: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the argument with tuples for iterators and lists of parameters, to be read twice."""

    def group(row: Any) -> Any:
        if not isinstance(row, Mapping) or isinstance(row.get("params"), torch.Tensor) or "params" not in row:
            return row
        return {**row, "params": tuple(row["params"])}

    return tuple(group(row) for row in params_or_groups)


def _check_numbers(numbers: Mapping[str, Any]) -> None:
    beta1, beta2 = numbers["betas"]
    for name, fits, want in (
        ("lr", float(numbers["lr"]) >= 0, "at least 0"),
        ("betas", 0 <= beta1 < 1 and 0 <= beta2 < 1, "two numbers, each at least 0 and below 1"),
        ("eps", numbers["eps"] >= 0, "at least 0"),
        ("weight_decay", numbers["weight_decay"] >= 0, "at least 0"),
    ):
        if not fits:
            raise PlanError(f"AdamW: {name}={numbers[name]} is out of range; it must be {want}")


def refused_in(group: Mapping[str, Any]) -> str:
    """Returns the unsupported options of torch's AdamW that the group sets, in words; "" for none."""
    return ", ".join(f"{name}={group[name]}" for name in _REFUSED if group.get(name))


def group_of(groups: Iterable[dict[str, Any]]) -> dict[int, int]:
    """Returns id(parameter) -> index of its group. Raises PlanError for a parameter in two groups."""
    found: dict[int, int] = {}
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if found.setdefault(id(parameter), index) != index:
                raise PlanError(
                    f"AdamW: a parameter of shape {tuple(parameter.shape)} is in groups {found[id(parameter)]} and "
                    f"{index}; leave it in one of them"
                )
    return found


def check_groups(tensors: Sequence[Tensor], parameters: Sequence[nn.Parameter], groups: Mapping[int, int]) -> None:
    """Raise PlanError for a trainable parameter that is in no group.

    groups: see `group_of`.
    """
    for t, parameter in zip(tensors, parameters):
        if not t.frozen and t.tied_to is None and id(parameter) not in groups:
            raise PlanError(
                f"parameter {t.name!r} is trainable but in no group of AdamW; freeze it or add it to a group"
            )
