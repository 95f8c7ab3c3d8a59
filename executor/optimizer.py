"""AdamW as the user writes it, and the torch optimizer that `prepare` makes of it.

`AdamW` is a description (what torch.optim.AdamW takes, clipping and eager updates besides); `OffloadedAdamW` is a
torch.optim.Optimizer over the model's parameters, so that schedulers and checkpoints work, whose `step` is the
session's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from executor.adam import Hyper
from executor.memory.arena import STATE_DTYPES
from executor.scaling import LossScale, loss_scale_for
from pstar_sim.errors import ContractError, PlanError

if TYPE_CHECKING:
    from executor.engine import Session
    from executor.saving.restoring import Restored

__all__ = ["AdamW", "OffloadedAdamW"]

_NUMBERS = ("lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True)
class AdamW:
    """What to optimize and how; the defaults are torch.optim.AdamW's.

    params_or_groups: None (every trainable parameter, one group), parameters, or groups as torch takes them (dicts with
    "params" and numbers of their own); the plan has to be made for the same groups. max_grad_norm: clip the global
    norm. eager: update each chunk as soon as its gradient is final, inside backward (the plan has to be made with
    update "eager"). state_dtype: of both moments; torch.bfloat16 where the plan's optimizer is "adamw-bf16-states"
    (the update is done in fp32 and rounded, so small changes of a moment are lost). loss_scale: None for what the
    model needs (dynamic if it has fp16 parameters, else none), "dynamic", a number for a fixed scale, or a LossScale;
    the loop stays as it is, see scaling.py. Raises PlanError for numbers out of range.
    """

    params_or_groups: Any = None
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    max_grad_norm: float | None = None
    eager: bool = False
    state_dtype: torch.dtype = torch.float32
    loss_scale: str | float | LossScale | None = None

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise PlanError(f"AdamW: max_grad_norm={self.max_grad_norm} must be > 0, or None for no clipping")
        if self.state_dtype not in STATE_DTYPES.values():
            raise PlanError(f"AdamW: state_dtype={self.state_dtype} is not known; use torch.float32 or torch.bfloat16")
        loss_scale_for(self.loss_scale, ())
        if self.params_or_groups is not None:  # `model.parameters()` can be read once only
            object.__setattr__(self, "params_or_groups", _read(self.params_or_groups))
        _check_numbers({name: getattr(self, name) for name in _NUMBERS})

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Parameter groups of `model`, as torch takes them."""
        given = self.params_or_groups
        if given is None:
            return [{"params": [p for p in model.parameters() if p.requires_grad]}]
        rows: list[Any] = list(given)
        if rows and isinstance(rows[0], Mapping):
            groups = [dict(row) for row in rows]
            for group in groups:
                held = group["params"]
                group["params"] = [held] if isinstance(held, torch.Tensor) else list(held)
                _check_numbers({name: group.get(name, getattr(self, name)) for name in _NUMBERS})
                if group.get("amsgrad") or group.get("maximize"):
                    raise PlanError("AdamW: amsgrad and maximize are not supported")
            return groups
        return [{"params": rows}]


def _read(params_or_groups: Iterable[Any]) -> tuple[Any, ...]:
    """The same as tuples."""

    def group(row: Any) -> Any:
        if not isinstance(row, Mapping) or isinstance(row.get("params"), torch.Tensor) or "params" not in row:
            return row
        return {**row, "params": tuple(row["params"])}

    return tuple(group(row) for row in params_or_groups)


def _check_numbers(numbers: Mapping[str, Any]) -> None:
    beta1, beta2 = numbers["betas"]
    for name, value, fits in (
        ("lr", numbers["lr"], float(numbers["lr"]) >= 0),
        ("betas", numbers["betas"], 0 <= beta1 < 1 and 0 <= beta2 < 1),
        ("eps", numbers["eps"], numbers["eps"] >= 0),
        ("weight_decay", numbers["weight_decay"], numbers["weight_decay"] >= 0),
    ):
        if not fits:
            raise PlanError(f"AdamW: {name}={value} is out of range")


class OffloadedAdamW(torch.optim.Optimizer):
    """The optimizer of a prepared model. `session`: the run behind it."""

    session: Session

    def __init__(self, groups: Sequence[dict[str, Any]], spec: AdamW) -> None:
        self._sealed = False
        defaults = {
            "lr": spec.lr, "betas": spec.betas, "eps": spec.eps, "weight_decay": spec.weight_decay,
            "amsgrad": False, "maximize": False,
        }  # fmt: skip
        super().__init__([dict(group) for group in groups], defaults)
        self._sealed = True

    def hyper(self) -> list[Hyper]:
        """Numbers of every group now."""
        return [
            Hyper(float(g["lr"]), float(g["betas"][0]), float(g["betas"][1]), float(g["eps"]), float(g["weight_decay"]))
            for g in self.param_groups
        ]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ContractError(
                "optimizer.step(closure) evaluates the loss again; run forward and backward first and call step()"
            )
        self.session.optimizer_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.session.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._sealed:
            raise ContractError(
                "add_param_group after prepare: the plan was made for the groups there were; give all groups to "
                "executor.AdamW(groups, ...) and make the plan for them"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's: "state" by parameter number with step, exp_avg and exp_avg_sq; for parameters
        narrower than fp32 also "param32", the master copy; with loss scaling also "loss_scaling". Copies of the current
        values."""
        session = self.session
        with session.still():
            state: dict[int, dict[str, torch.Tensor]] = {}
            for number, tensor in enumerate(self._tensors()):
                if tensor is None or not session.contents.steps_taken[tensor]:
                    continue
                row = {
                    "step": torch.tensor(float(session.contents.steps_taken[tensor])),
                    "exp_avg": session.state_value(tensor, "momentum"),
                    "exp_avg_sq": session.state_value(tensor, "variance"),
                }
                if session.plan.workload.tensors[tensor].dtype != "fp32":
                    row["param32"] = session.state_value(tensor, "param32")
                state[number] = row
        groups: list[dict[str, Any]] = []
        number = 0
        for group in self.param_groups:
            packed = {key: value for key, value in group.items() if key != "params"}
            packed["params"] = list(range(number, number + len(group["params"])))
            number += len(group["params"])
            groups.append(packed)
        scaling = {} if session.scaling is None else {"loss_scaling": session.scaling.state_dict()}
        return {"state": state, "param_groups": groups, **scaling}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. Raises ContractError between backward and step, and for other groups or shapes, before any
        change."""
        session = self.session
        if session.cursor >= 0:
            raise ContractError(
                "optimizer.load_state_dict inside an iteration; call it before the forward or after step()"
            )
        groups = state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise ContractError(
                f"optimizer.load_state_dict: the state has groups of {[len(g['params']) for g in groups]} parameters, "
                f"this optimizer {[len(g['params']) for g in self.param_groups]}"
            )
        tensors = self._tensors()
        names = (("exp_avg", "momentum"), ("exp_avg_sq", "variance"), ("param32", "param32"))
        for number, row in state_dict["state"].items():
            tensor = tensors[int(number)]
            shape = None if tensor is None else session.plan.workload.tensors[tensor].shape
            for key, _ in names:
                if key in row and tuple(row[key].shape) != shape:
                    raise ContractError(
                        f"optimizer.load_state_dict: {key} of parameter {number} has shape {tuple(row[key].shape)}, "
                        f"not {shape}"
                    )
        for number, tensor in enumerate(tensors):
            row = state_dict["state"].get(number)
            if tensor is None:
                continue
            session.contents.steps_taken[tensor] = 0 if row is None else int(row["step"])
            for key, list_name in names:
                if row is not None and key in row:
                    session.set_state_value(tensor, list_name, row[key])
                elif row is None and key != "param32":
                    session.set_state_value(tensor, list_name, torch.zeros(session.plan.workload.tensors[tensor].shape))
            if row is not None and "param32" in row:
                session.rewrite_from_master(tensor)
        if session.scaling is not None and "loss_scaling" in state_dict:
            session.scaling.load_state_dict(state_dict["loss_scaling"])
        for mine, theirs in zip(self.param_groups, groups):
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    def save(self, folder: str | Path, *, extra: Any = None) -> Path:
        """Write a checkpoint: weights that transformers loads, states, step counts, groups, random number generators
        and `extra`. See `executor.saving.checkpoint.save`."""
        from executor.saving.checkpoint import save  # it is about sessions, which are about optimizers

        return save(self, folder, extra=extra)

    def load(self, folder: str | Path, *, generators: bool = True) -> Restored:
        """Go on from a checkpoint, under this plan or another. See `executor.saving.restoring.load`."""
        from executor.saving.restoring import load

        return load(self, folder, generators=generators)

    def _tensors(self) -> list[int | None]:
        """Tensor index of every parameter, in the order of the groups."""
        return [getattr(p, "_tensor", None) for group in self.param_groups for p in group["params"]]


def group_of(groups: Iterable[dict[str, Any]]) -> dict[int, int]:
    """id(parameter) -> index of its group. Raises PlanError for a parameter in two groups."""
    found: dict[int, int] = {}
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if found.setdefault(id(parameter), index) != index:
                raise PlanError(
                    f"AdamW: one parameter (shape {tuple(parameter.shape)}) is in groups {found[id(parameter)]} and "
                    f"{index}"
                )
    return found
