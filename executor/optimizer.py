"""The torch optimizer that `prepare` makes of an `AdamW`.

`OffloadedAdamW` is a torch.optim.Optimizer over the model's parameters, so that schedulers and checkpoints work. Its
`step` calls the session's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from executor.adamw import NUMBERS, AdamW, refused_in
from executor.contract import tensor_of
from executor.devices.adam import Hyper
from executor.saving.checkpoint import save
from executor.saving.restoring import Restored, load
from pstar_sim.dtypes import MASTER
from pstar_sim.errors import ContractError

if TYPE_CHECKING:
    from executor.engine import Session

__all__ = ["OffloadedAdamW"]

_STATES = {"exp_avg": "momentum", "exp_avg_sq": "variance", "param32": "param32"}
"""Key of a parameter's state in a state dict -> the chunks' list that holds it."""
_KERNEL = {"fused": True, "foreach": None, "decoupled_weight_decay": True}
"""The arithmetic of every update here, in the keys of torch.optim.AdamW's groups. A torch.optim.AdamW that loads these
groups then uses the same kernel."""


class OffloadedAdamW(torch.optim.Optimizer):
    """The optimizer of a prepared model."""

    session: Session

    def __init__(self, groups: Sequence[dict[str, Any]], spec: AdamW) -> None:
        self._sealed = False
        numbers: dict[str, Any] = {name: getattr(spec, name) for name in NUMBERS}
        # The defaults of this torch's own AdamW, so that groups have the same keys.
        defaults = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], **numbers, fused=True).defaults
        super().__init__([dict(group) for group in groups], defaults)
        self._name_kernel()
        self._sealed = True

    def _name_kernel(self) -> None:
        for group in self.param_groups:
            group.update({name: value for name, value in _KERNEL.items() if name in self.defaults})

    def hyper(self) -> list[Hyper]:
        """Returns the current settings of every group. Raises ContractError for a switch that is on and not
        supported.
        """
        for number, group in enumerate(self.param_groups):
            if refused := refused_in(group):
                raise ContractError(f"param_groups[{number}] has {refused}, which is not supported; set it to False")
        return [
            Hyper(float(g["lr"]), float(g["betas"][0]), float(g["betas"][1]), float(g["eps"]), float(g["weight_decay"]))
            for g in self.param_groups
        ]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ContractError(
                "optimizer.step(closure) evaluates the loss again; run forward and backward first and call step()"
            )
        self.session.loop.optimizer_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.session.loop.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._sealed:
            raise ContractError(
                "add_param_group after prepare: the plan was made for the groups that AdamW had; give all groups to "
                "executor.AdamW(groups, ...) and make the plan for them"
            )
        super().add_param_group(param_group)

    def share_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the groups of another optimizer over the same parameters from now on. A scheduler made with it writes to
        these groups, and sees that steps were taken."""
        for mine, theirs in zip(self.param_groups, optimizer.param_groups):
            theirs.update({key: value for key, value in mine.items() if key not in theirs})
        self.param_groups = optimizer.param_groups
        self._name_kernel()

        def tell(*_: Any) -> None:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler asks for

        self.register_step_post_hook(tell)

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the current states, in torch.optim.AdamW's form: "state" by parameter number with step,
        exp_avg and exp_avg_sq. Parameters narrower than fp32 also have "param32", the master copy; with loss scaling
        there is also "loss_scaling". A torch.optim.AdamW over the same fp32 parameters that loads them continues
        bit-identically; it ignores these two keys."""
        session = self.session

        def value(tensor: int, list_name: str) -> torch.Tensor:
            if list_name == "step":
                return torch.tensor(float(session.contents.steps_taken[tensor]), dtype=torch.float32)
            return session.reader.state_value(tensor, list_name)

        with session.still():
            packed = self.packed(value, masters=True)
        return packed if session.scaling is None else {**packed, "loss_scaling": session.scaling.state_dict()}

    def packed(self, value: Callable[[int, str], torch.Tensor], *, masters: bool = False) -> dict[str, Any]:
        """Returns a state dict in torch.optim.AdamW's form, with the tensors that `value` returns for (tensor, list);
        the step count is the list "step".

        masters: whether parameters narrower than fp32 have their master copy.
        """
        session = self.session
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter, tensor in zip(parameters, self._tensors()):
            if tensor is None or not session.contents.steps_taken[tensor]:
                continue
            wide = session.plan.workload.tensors[tensor].dtype == MASTER
            keys = {"step": "step", **_STATES}
            self.state[parameter] = {
                key: value(tensor, name) for key, name in keys.items() if key != "param32" or (masters and not wide)
            }
        try:
            return super().state_dict()  # torch's own method numbers the parameters and calls the hooks
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of this class or of torch.optim.AdamW, fused or not; updates stay fused. Raises
        ContractError, before any change, between backward and step, and for other groups or shapes."""
        session = self.session
        if session.state.cursor.moment >= 0:
            raise ContractError(
                "optimizer.load_state_dict inside an iteration; call it before the forward or after step()"
            )
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        groups = copy.deepcopy(state_dict["param_groups"])
        rows = self._checked(state_dict["state"], groups)
        with session.loop.loading("optimizer.load_state_dict"):
            for number, tensor in enumerate(self._tensors()):
                if tensor is not None:
                    self._load_row(tensor, rows.get(number))
            if session.scaling is not None and "loss_scaling" in state_dict:
                session.scaling.load_state_dict(state_dict["loss_scaling"])
            for mine, theirs in zip(self.param_groups, groups):
                mine.update({key: value for key, value in theirs.items() if key != "params"})
            self._name_kernel()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_row(self, tensor: int, row: Mapping[str, Any] | None) -> None:
        """Load the states of one tensor; None: no update yet."""
        session = self.session
        session.contents.steps_taken[tensor] = 0 if row is None else int(row["step"])
        for key, list_name in _STATES.items():
            if row is not None and key in row:
                session.reader.set_state_value(tensor, list_name, row[key])
            elif row is None and key != "param32":
                zeros = torch.zeros(session.plan.workload.tensors[tensor].shape)
                session.reader.set_state_value(tensor, list_name, zeros)
        if row is not None and "param32" in row:
            session.state.run.demand.rewrite_from_master(tensor)

    def _checked(self, state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        """Returns the rows of a state by position of their parameter. Raises ContractError."""
        what = "optimizer.load_state_dict"
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise ContractError(
                f"{what}: the state has groups of {[len(g['params']) for g in groups]} parameters, "
                f"this optimizer {[len(g['params']) for g in self.param_groups]}; give the state of an optimizer with "
                "the same groups"
            )
        for number, group in enumerate(groups):
            if refused := refused_in(group):
                raise ContractError(f"{what}: group {number} has {refused}, which is not supported; set it to False")
        position = {key: at for at, key in enumerate(key for group in groups for key in group["params"])}
        tensors = self._tensors()
        rows: dict[int, Mapping[str, Any]] = {}
        for key, row in state.items():
            at = position.get(key)
            if at is None:
                raise ContractError(
                    f"{what}: the state has a row {key!r}, but no group has that parameter; give a whole state_dict"
                )
            tensor = tensors[at]
            shape = None if tensor is None else self.session.plan.workload.tensors[tensor].shape
            _check_row(what, key, row, shape)
            rows[at] = row
        return rows

    def save(self, folder: str | Path, *, extra: Any = None) -> Path:
        """Write a checkpoint: weights that transformers loads, states, step counts, groups, random number generators
        and `extra`. Returns the folder. See `executor.saving.checkpoint.save`."""
        return save(self, folder, extra=extra)

    def load(self, folder: str | Path, *, generators: bool = True, checksums: bool = True) -> Restored:
        """Continue from a checkpoint, under this plan or another. Returns its iteration, its `extra` and a note. See
        `executor.saving.restoring.load`."""
        return load(self, folder, generators=generators, checksums=checksums)

    def _tensors(self) -> list[int | None]:
        """Returns the tensor index of every parameter, in the order of the groups."""
        return [tensor_of(p) for group in self.param_groups for p in group["params"]]


def _check_row(what: str, key: Any, row: Mapping[str, Any], shape: tuple[int, ...] | None) -> None:
    """Check that the states of one parameter are AdamW's and have its shape."""
    missing = [name for name in ("step", "exp_avg", "exp_avg_sq") if name not in row]
    if missing:
        raise ContractError(f"{what}: the state of parameter {key} has no {missing[0]}; give the state of an AdamW")
    for name in _STATES:
        if name in row and tuple(row[name].shape) != shape:
            raise ContractError(f"{what}: {name} of parameter {key} has shape {tuple(row[name].shape)}, not {shape}")
