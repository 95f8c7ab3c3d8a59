"""Planned activations: the plan's choice for each block, in the user's model.

"recompute": the call goes through `torch.utils.checkpoint` (non-reentrant, random state preserved), unless the model
does that itself. "offload": what the call saves for backward moves as the plan says (stashes.py). "keep": the call
stays as it is. A model that already recomputes or offloads a block itself is refused, but the switch of transformers'
layers (`gradient_checkpointing`) is turned off during the run.

[Note: around the call] The block's `_call_impl` is replaced, which torch runs for every call, hooks included, so events
are those of a capture in which the model checkpoints the block.

[Note: the device's generator] For a recomputation torch saves only the generators of the positional arguments' devices.
A block called with keyword arguments alone would silently draw other dropout masks the second time, so each
checkpointed call gets an empty tensor on the run's device as its first positional argument.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from executor.activations.stashes import Stashes, hooks_of_others
from executor.devices.torch_private import call_of, replace_call
from pstar_sim.errors import ModelError, PlanError, TraceError
from pstar_sim.workload.mixing import offload_blocks
from pstar_sim.workload.workload import Workload, activations_text

_SWITCH = "gradient_checkpointing"
_Call = Callable[..., Any]


def check_activations(w: Workload, model: nn.Module) -> None:
    """Raise PlanError if a block is missing, or cannot be called as planned."""
    modules = dict(model.named_modules(remove_duplicate=False))
    seen: dict[int, str] = {}
    for block, how in w.activations:
        module = modules.get(block)
        if module is None:
            raise PlanError(
                f"the plan was made for {activations_text(w)}, and the model has no module {block!r}; make a plan for "
                "this model"
            )
        if id(module) in seen:
            raise PlanError(
                f"blocks {seen[id(module)]!r} and {block!r} are one module, called twice; the plan chooses for each: "
                "make a plan without --global-batch"
            )
        seen[id(module)] = block
        around = _compiled(modules, block)
        if how != "keep" and around is not None:
            raise PlanError(
                f"{f'module {around!r}' if around else 'the model'} is compiled, and the plan would {how} the "
                f"activations of block {block!r}; compile without it, or make a plan that keeps them (without "
                "--global-batch)"
            )


def _compiled(modules: Mapping[str, nn.Module], block: str) -> str | None:
    parts = block.split(".")
    around = [".".join(parts[:n]) for n in range(len(parts), -1, -1)]
    return next((name for name in around if getattr(modules.get(name), "_compiled_call_impl", None) is not None), None)


@dataclass(frozen=True, kw_only=True)
class RunOfBlocks:
    """collects(): the call belongs to training: its saved tensors are collected."""

    closed: Callable[[], bool]
    collects: Callable[[], bool]
    stashes: Callable[[], Stashes]


def carry_out(
    model: nn.Module, activations: Iterable[tuple[str, str]], device: torch.device, run: RunOfBlocks
) -> Callable[[], None]:
    """Returns a function that undoes this."""
    modules = dict(model.named_modules(remove_duplicate=False))
    undo: list[Callable[[], None]] = []
    for block, how in activations:
        module = modules[block]
        if how != "recompute":
            undo += _switch_off(module)
        if how == "offload":
            undo.append(_around(module, _offloaded(run, block)))
        elif how == "recompute":
            undo.append(_around(module, _recomputed_on(device)))
        elif _compiled(modules, block) is None:
            undo.append(_around(module, _kept(run, block)))

    def undo_all() -> None:
        for action in undo:
            action()

    return undo_all


@contextlib.contextmanager
def recomputing(model: nn.Module, w: Workload) -> Iterator[None]:
    """Exactly the blocks that `w` recomputes are recomputed, on the host."""
    modules = dict(model.named_modules(remove_duplicate=False))
    undo: list[Callable[[], None]] = []
    for block, how in w.activations:
        if how == "recompute":
            undo.append(_around(modules[block], _recomputed_on(torch.device("cpu"))))
        else:
            undo += _switch_off(modules[block])
    try:
        yield
    finally:
        for action in undo:
            action()


def as_planned(captured: Workload, planned: Workload) -> Workload:
    """A capture inside `recomputing` gets the choices of `planned`, and stashes. Raises ModelError where its blocks
    cannot be offloaded."""
    if not planned.activations:
        return captured
    how = dict(planned.activations)
    kept = tuple((block, "keep" if choice == "offload" else choice) for block, choice in how.items())
    try:
        made = replace(captured, activations=kept, checkpointing="recompute" in how.values())
        return offload_blocks(made, [block for block, choice in how.items() if choice == "offload"])
    except TraceError as error:
        raise ModelError(str(error)) from None


def _switch_off(module: nn.Module) -> list[Callable[[], None]]:
    if getattr(module, _SWITCH, False) is not True:
        return []
    setattr(module, _SWITCH, False)
    return [lambda: setattr(module, _SWITCH, True)]


def _around(module: nn.Module, how: Callable[[_Call, nn.Module, Any, Any], Any]) -> Callable[[], None]:
    plain: _Call = call_of(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        return how(plain, module, args, kwargs)

    return replace_call(module, call)


def _recomputed_on(device: torch.device) -> Callable[[_Call, nn.Module, Any, Any], Any]:
    """[Note: the device's generator]"""
    there = () if device.type == "cpu" else (torch.empty(0, device=device),)

    def call(plain: _Call, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        ours = torch.is_grad_enabled() and module.training and not hooks_of_others()
        if not ours or _in_backward() or getattr(module, _SWITCH, False) is True:
            return plain(*args, **kwargs)

        def run(*given: Any, **named: Any) -> Any:
            return plain(*given[len(there) :], **named)

        return checkpoint(run, *there, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    return call


def _kept(run: RunOfBlocks, block: str) -> Callable[[_Call, nn.Module, Any, Any], Any]:
    def call(plain: _Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
        _refuse_its_own(run, block, "keeps")
        return plain(*args, **kwargs)

    return call


def _offloaded(run: RunOfBlocks, block: str) -> Callable[[_Call, nn.Module, Any, Any], Any]:
    def call(plain: _Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
        _refuse_its_own(run, block, "offloads")
        if not run.collects():
            return plain(*args, **kwargs)
        saves = run.stashes().collect((args, kwargs))
        with torch.autograd.graph.saved_tensors_hooks(saves.pack, saves.unpack):
            output = plain(*args, **kwargs)
        run.stashes().collected(block, saves)
        return output

    return call


def _refuse_its_own(run: RunOfBlocks, block: str, does: str) -> None:
    if run.closed():
        return
    if _in_backward():
        its = "recomputes them in backward"
    elif torch.is_grad_enabled() and hooks_of_others():
        its = "calls it under hooks on saved tensors (activation checkpointing or offload)"
    else:
        return
    raise PlanError(
        f"the plan {does} the activations of block {block!r}, and the model {its}; switch the model's own setting off, "
        "or make the plan from a trace of the model as it is (without --global-batch)"
    )


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
