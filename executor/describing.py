"""The user's own optimizer, described for a plan (descriptions.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from executor.descriptions import SGD, Adafactor, Adam, AdamW, BnbAdamW, BnbLion, Lion, Muon, Optimizer, group_of
from executor.optimizer import OffloadedOptimizer
from pstar_sim.errors import ContractError
from pstar_sim.workload.optimizers import OPTIMIZERS


def description_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, max_grad_norm: float | None) -> Optimizer:
    """Raises ContractError for an optimizer that no plan has."""
    kind = type(optimizer)
    if isinstance(optimizer, OffloadedOptimizer):
        raise ContractError("the optimizer is that of a prepared model already; give the loop's own optimizer")
    inner = getattr(optimizer, "optimizer", None)
    if kind.__module__.startswith("accelerate.") and isinstance(inner, torch.optim.Optimizer):
        raise ContractError(
            f"the optimizer is accelerate's wrapper of {type(inner).__name__}; give model and optimizer as they were "
            "before accelerator.prepare, prepare the data loader alone (loader = accelerator.prepare(loader)), with "
            "dtype='bf16' in place of Accelerator(mixed_precision='bf16')"
        )
    if isinstance(optimizer, Joined):
        return Muon(optimizer.param_groups, max_grad_norm=max_grad_norm)
    library = kind.__module__.partition(".")[0]
    if library == "bitsandbytes":
        return _of_bitsandbytes(model, optimizer, max_grad_norm)
    described = _DESCRIBED.get((library, kind.__name__))
    if described is None:
        raise ContractError(
            f"the optimizer is {kind.__module__}.{kind.__name__}; a plan's updates are those of torch.optim.AdamW, "
            "Adam and SGD (and Muon with AdamW, in a list), of Lion, of transformers' Adafactor, and of bitsandbytes' "
            "AdamW and Lion: use one of them, in a Trainer TrainingArguments(optim='adamw_torch')"
        )
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}
    if kind is torch.optim.Adam and True in decoupled:
        if False in decoupled:
            raise ContractError("some groups of Adam have decoupled_weight_decay=True and some not; give all the same")
        described = AdamW
    if described is Lion and getattr(optimizer, "decoupled_wd", False):
        raise ContractError("Lion has decoupled_weight_decay=True, which is not supported; leave it out")
    settings = described().settings
    spec = described(
        optimizer.param_groups,
        max_grad_norm=max_grad_norm,
        **{name: _largest(optimizer, name) for name in settings},
    )
    for number, group in enumerate(optimizer.param_groups):
        if refused := spec.rule.refused_in(group):
            raise ContractError(f"param_groups[{number}] has {refused}, which is not supported; leave it out")
    return spec


def _of_bitsandbytes(model: nn.Module, optimizer: Any, max_grad_norm: float | None) -> Optimizer:
    kind = {"adam": BnbAdamW, "lion": BnbLion}.get(optimizer.optimizer_name)
    if kind is None:
        raise ContractError(
            f"the optimizer is bitsandbytes' {type(optimizer).__name__}; of bitsandbytes, a plan has the updates of "
            "AdamW and Lion: use one of them"
        )
    switches = ("max_unorm", "skip_zeros")
    if refused := ", ".join(f"{name}={value}" for name in switches if (value := getattr(optimizer.args, name, 0))):
        raise ContractError(f"bitsandbytes' {type(optimizer).__name__} has {refused}, which is not supported")
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer.check_overrides()
    narrow: dict[nn.Parameter, bool] = {}
    for number, group in enumerate(optimizer.param_groups):
        for at, p in enumerate(group["params"]):
            config = optimizer.get_config(number, at, group)
            narrow[p] = config["optim_bits"] == 8 and p.numel() >= config["min_8bit_size"]
    settings = {name: optimizer.defaults[name] for name in kind().settings}
    odd = ""
    for how in ({"optim_bits": 32}, {}, {"embeddings": True}):
        spec: Optimizer = kind(optimizer.param_groups, max_grad_norm=max_grad_norm, **settings, **how)
        states = OPTIMIZERS[spec.planned]
        planned = {p: states.kind_of(names.get(id(p), ""), tuple(p.shape)) > 0 for p in narrow}
        if planned == narrow:
            return spec
        odd = next(names.get(id(p), "") for p, is_narrow in narrow.items() if is_narrow != planned[p])
    raise ContractError(
        f"bitsandbytes' states of {odd!r} have not the bits that plans have: 32 for all, or 8 from 4,096 elements on "
        "with or without embeddings; leave its override and min_8bit_size out"
    )


class Joined(torch.optim.Optimizer):
    """Torch's Muon and AdamW as one optimizer. Raises ContractError for others."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        kinds = [type(each).__name__ for each in self.optimizers if isinstance(each, torch.optim.Optimizer)]
        if sorted(kinds) != ["AdamW", "Muon"]:
            raise ContractError(
                f"the optimizers are {', '.join(kinds) or 'none'}; several run under a plan as torch.optim.Muon for "
                "matrices with torch.optim.AdamW for the rest: give one of each"
            )
        groups = [group for each in self.optimizers for group in each.param_groups]
        group_of(groups)  # a parameter in both is named
        super().__init__([dict(group) for group in groups], {})
        self.param_groups = groups
        for kind, each in zip(kinds, self.optimizers):
            self.state.update(each.state)
            for group in each.param_groups:
                group["update"] = kind.lower()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups):
            group.update({**loaded, "params": group["params"]})
        self.param_groups = groups
        for each in self.optimizers:
            own = (p for group in each.param_groups for p in group["params"])
            each.state.update({p: self.state[p] for p in own if p in self.state})


_DESCRIBED: dict[tuple[str, str], type[Optimizer]] = {
    ("torch", "AdamW"): AdamW,
    ("torch", "Adam"): Adam,
    ("torch", "SGD"): SGD,
    ("lion_pytorch", "Lion"): Lion,
    ("transformers", "Adafactor"): Adafactor,
}
"""(library, class) -> description."""


def _largest(optimizer: torch.optim.Optimizer, name: str) -> Any:
    if name == "momentum":
        return max(float(group[name]) for group in optimizer.param_groups)
    return optimizer.defaults[name]


def require_its_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    its = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        other = next((p for p in group["params"] if id(p) not in its), None)
        if other is not None:
            raise ContractError(
                f"param_groups[{number}] has a parameter (shape {tuple(other.shape)}) that is not the model's; make it "
                "a part of the model, or give it an optimizer of its own"
            )
