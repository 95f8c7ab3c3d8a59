"""The torch optimizer that `prepare` makes of an `Optimizer` (descriptions.py), so that schedulers and checkpoints
work."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from executor.contract import tensor_of
from executor.descriptions import REST, REST_RULE, Optimizer
from executor.devices.rules import RULES, STEP, Rule, Settings
from executor.saving.checkpoint import save
from executor.saving.restoring import Restored, load
from pstar_sim.errors import ContractError
from pstar_sim.workload.optimizers import MASTER_LIST, OPTIMIZERS

if TYPE_CHECKING:
    from executor.engine import Session


_WRAPPED = "__bnb_optimizer_quant_state__"
"""Key under which bitsandbytes' state dict has what it keeps of a parameter."""


class OffloadedOptimizer(torch.optim.Optimizer):
    """The optimizer of a prepared model."""

    session: Session

    def __init__(self, groups: Sequence[dict[str, Any]], spec: Optimizer) -> None:
        self._sealed = False
        self.rule = spec.rule
        self.planned = spec.planned
        self._rules = [states.name for states in OPTIMIZERS[spec.planned].all_states]
        several = any({"update", REST} & group.keys() for group in groups)
        defaults = {} if several else _defaults(spec.rule, spec.settings)
        super().__init__([dict(group) for group in groups], defaults)
        self._name_kernel()
        self._sealed = True

    def _name_kernel(self) -> None:
        """An optimizer of torch that loads the groups then has the same arithmetic."""
        for group in self.param_groups:
            known = self.defaults or group
            group.update({name: value for name, value in self._rule(group).on.items() if name in known})

    def _rule(self, group: Mapping[str, Any]) -> Rule:
        return RULES[group["update"]] if "update" in group else self.rule

    def _settings(self, group: Mapping[str, Any]) -> dict[str, Settings]:
        if "update" in group:
            return {group["update"]: self._rule(group).read(group)}
        rest = group.get(REST, group)
        return {name: RULES[name].read(rest if name == REST_RULE else group) for name in self._rules}

    def _rule_of(self, tensor: int) -> Rule:
        layout = self.session.plan.layout
        return RULES[layout.states_of(layout.chunk_of[tensor]).name]

    def hyper(self) -> list[Mapping[str, Settings]]:
        """Returns the current settings of every group. Raises ContractError for a switch that is on and not
        supported.
        """
        for number, group in enumerate(self.param_groups):
            if refused := self._rule(group).refused_in(group):
                raise ContractError(f"param_groups[{number}] has {refused}, which is not supported; switch it off")
        return [self._settings(group) for group in self.param_groups]

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
            for each in getattr(optimizer, "optimizers", (optimizer,)):
                each._opt_called = True  # type: ignore[union-attr]  # what a scheduler asks for

        self.register_step_post_hook(tell)

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the current states, in the form of the library's optimizer: "state" by parameter number,
        with step, exp_avg and exp_avg_sq for AdamW. Parameters narrower than their masters also have "param32", the
        master copy; with loss scaling there is also "loss_scaling". The library's optimizer over the same fp32
        parameters that loads them continues bit-identically; it ignores these two keys."""
        session = self.session
        meetings = [session.reader.meet_for_states]

        def value(tensor: int, field: str) -> torch.Tensor:
            if field == STEP:
                return torch.tensor(float(session.contents.steps_taken[tensor]), dtype=torch.float32)
            constant = self._rule_of(tensor).constants.get(field)
            if constant is not None:
                return constant().clone()
            while meetings:  # before the first state: without one, a rank may call this alone
                meetings.pop()()
            return session.reader.state_value(tensor, field)

        with session.still():
            packed = self.packed(value, masters=True)
        return packed if session.scaling is None else {**packed, "loss_scaling": session.scaling.state_dict()}

    def packed(self, value: Callable[[int, str], torch.Tensor], *, masters: bool = False) -> dict[str, Any]:
        """Returns a state dict in the form of the library's optimizer, with the tensors that `value` returns for
        (tensor, field of a list); the step count is the field STEP.

        masters: whether parameters narrower than their masters have the master copy.
        """
        session = self.session
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter, tensor in zip(parameters, self._tensors()):
            if tensor is None or not session.contents.steps_taken[tensor]:
                continue
            rule = self._rule_of(tensor)
            keys = {**({STEP: STEP} if rule.counts is torch.Tensor else {}), **rule.states}
            keys |= {key: key for key in rule.constants}
            if masters and not session.plan.layout.is_own_master(session.plan.layout.chunk_of[tensor]):
                keys[MASTER_LIST] = MASTER_LIST
            counted = {STEP: session.contents.steps_taken[tensor]} if rule.counts is int else {}
            self.state[parameter] = {**counted, **{key: value(tensor, field) for key, field in keys.items()}}
        try:
            return super().state_dict()  # torch's own method numbers the parameters and calls the hooks
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of this class or of the library's optimizer, fused or not; updates stay fused. Raises
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
        session = self.session
        session.contents.steps_taken[tensor] = 0 if row is None else int(row.get("step", 1))
        for key, field in self._rule_of(tensor).states.items():
            value = torch.zeros(session.contents.slots.shape(tensor, field)) if row is None else row[key]
            session.reader.set_state_value(tensor, field, value)
        if row is not None and MASTER_LIST in row:
            session.reader.set_state_value(tensor, MASTER_LIST, row[MASTER_LIST])
            session.state.run.demand.rewrite_from_master(tensor)

    def _checked(self, state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        what = "optimizer.load_state_dict"
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise ContractError(
                f"{what}: the state has groups of {[len(g['params']) for g in groups]} parameters, "
                f"this optimizer {[len(g['params']) for g in self.param_groups]}; give the state of an optimizer with "
                "the same groups"
            )
        for number, (mine, group) in enumerate(zip(self.param_groups, groups)):
            if refused := self._rule(mine).refused_in(group):
                raise ContractError(f"{what}: group {number} has {refused}, which is not supported; switch it off")
            missing = [name for name in self._rule(mine).settings if name not in group]
            if missing and group.keys() - {"params"}:  # a group without settings changes none
                raise ContractError(
                    f"{what}: group {number} has no {missing[0]}; give the state of the plan's optimizer, "
                    f"{self.planned}"
                )
        position = {key: at for at, key in enumerate(key for group in groups for key in group["params"])}
        tensors = self._tensors()
        rows: dict[int, Mapping[str, Any]] = {}
        for key, given in state.items():
            row = {**given, **given.get(_WRAPPED, {})}
            at = position.get(key)
            if at is None:
                raise ContractError(
                    f"{what}: the state has a row {key!r}, but no group has that parameter; give a whole state_dict"
                )
            tensor = tensors[at]
            if tensor is None or not self._rule_of(tensor).states or None in row.values():
                continue  # torch's SGD: no momentum, or none yet
            self._check_row(what, key, row, tensor)
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
        return [tensor_of(p) for group in self.param_groups for p in group["params"]]

    def _check_row(self, what: str, key: Any, row: Mapping[str, Any], tensor: int) -> None:
        rule, slots = self._rule_of(tensor), self.session.contents.slots
        wanted = [*([STEP] if rule.counts else []), *rule.states]
        missing = [name for name in wanted if name not in row]
        if missing:
            raise ContractError(
                f"{what}: the state of parameter {key} has no {missing[0]}; give the state of the plan's optimizer, "
                f"{self.session.plan.workload.optimizer.name}"
            )
        for name, field in {**rule.states, MASTER_LIST: MASTER_LIST}.items():
            if name not in row:
                continue
            if tuple(row[name].shape) != (shape := slots.shape(tensor, field)):
                raise ContractError(
                    f"{what}: {name} of parameter {key} has shape {tuple(row[name].shape)}, not {shape}"
                )
            dtype = slots.dtype(slots.chunk_of(tensor), field)
            if row[name].is_floating_point() != dtype.is_floating_point:
                raise ContractError(f"{what}: {name} of parameter {key} is in {row[name].dtype}, not {dtype}")


def _defaults(rule: Rule, settings: Settings) -> dict[str, Any]:
    """Of the library's optimizer, so that groups have the same keys."""
    if not rule.has_plain:
        return dict(settings)
    return rule.plain([torch.zeros(1, requires_grad=True)], settings).defaults
