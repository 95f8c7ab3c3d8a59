"""The module-level half of the contract, and a hook that sees batches.

A module may outlive its session, which is held weakly.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from executor.contract import changes_nothing, tensor_of
from executor.devices.packed import same_elements, scales_of
from executor.devices.torch_private import override, parameter_table
from executor.driving.loop import Loop
from executor.moments.compiled import untraced
from executor.moments.unseen import unseen
from pstar_sim.errors import ContractError


def guard_model(model: nn.Module, loop: Loop, end_after_training: Callable[[], bool]) -> Callable[[], None]:
    """The module-level half of contract.py; returns the function that removes it."""
    keeper, end_of = weakref.ref(loop), weakref.WeakMethod(end_after_training)
    undo: list[Callable[[], None]] = []

    def ended() -> bool:
        end = end_of()
        return end is not None and end()

    def moved(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        with unseen():
            if changes_nothing(self, fn):
                return self
        if ended():
            again: nn.Module = self._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own
            return again
        raise ContractError(
            f"{type(self).__name__}.to() and its like (half, float, cuda, cpu) cannot move a prepared model: its "
            "memory is the plan's; convert the model before executor.prepare"
        )

    def loaded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if ended():
            return self.load_state_dict(*args, **kwargs)
        raise ContractError(
            f"{type(self).__name__}.load_state_dict on a prepared model: the master copies would keep the old values; "
            "load the weights before executor.prepare"
        )

    def copied(self: nn.Module, memo: Any) -> Any:
        if ended():
            return copy.deepcopy(self, memo)
        raise ContractError(
            f"copy.deepcopy of a prepared {type(self).__name__} would share its session; load model.state_dict() into "
            "a second model instead"
        )

    def pickled(self: nn.Module, protocol: Any) -> Any:
        if ended():
            return self.__reduce_ex__(protocol)
        raise ContractError(
            f"a prepared {type(self).__name__} cannot be pickled or copied, because its memory is the plan's: save "
            "model.state_dict(), or end the session first with session.close()"
        )

    def zeroed(self: nn.Module, set_to_none: bool = True) -> None:
        loop = keeper()
        if loop is not None:
            loop.zero_grad(set_to_none)

    for module in model.modules():
        for name, function in (
            ("_apply", moved),
            ("load_state_dict", loaded),
            ("__deepcopy__", copied),
            ("__reduce_ex__", pickled),
        ):
            undo.append(override(module, name, types.MethodType(function, module)))
        handle = module.register_state_dict_post_hook(_current_values(keeper))  # type: ignore[no-untyped-call]
        undo.append(handle.remove)
    undo.append(override(model, "zero_grad", types.MethodType(zeroed, model)))

    def undo_all() -> None:
        for action in undo:
            action()

    return undo_all


def _current_values(keeper: Callable[[], Loop | None]) -> Callable[..., None]:
    def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        loop = keeper()
        if loop is None or loop.state.closed:
            return
        for name, parameter in parameter_table(module).items():
            key = prefix + name
            tensor = None if parameter is None else tensor_of(parameter)
            if tensor is not None and key in state_dict:
                state_dict[key], *scales = loop.reader.parts_now(tensor)
                views = [view for of, view in scales_of(module) if of == name]
                for part in [k for k in state_dict if k.startswith(prefix)] if scales else ():
                    for view, scale in zip(views, scales):
                        state_dict[part] = scale if same_elements(state_dict[part], view) else state_dict[part]

    return hook


def watch_batches(model: nn.Module, loop: Loop) -> RemovableHandle:
    """Before any other forward hook."""
    keeper = weakref.ref(loop)

    def see(module: nn.Module, args: Any, kwargs: Any) -> None:
        loop = keeper()
        if loop is not None and not loop.state.closed:
            loop.see_batch(args, kwargs)

    return model.register_forward_pre_hook(untraced(see), prepend=True, with_kwargs=True)
