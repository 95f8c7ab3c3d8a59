"""A dispatch mode that counts during a session's iterations, without holding the session."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from executor.memory.arena import Arena
from executor.moments.listener import Listener
from executor.moments.live_bytes import LiveStorages

_FLAGS = (
    "old_dispatch_mode_flags",
    "old_non_infra_dispatch_mode_flags",
    "old_without_ignore_compile_internals_dispatch_mode_flags",
)


class Standing(LiveStorages, Listener):  # type: ignore[no-untyped-call]
    """Active from `begin` to `end`, in `begin`'s thread; working lists do not count."""

    def __init__(self, model: nn.Module, device: torch.device, arena: Callable[[], Arena]) -> None:
        super().__init__([], model.buffers(), costs=False, device=device)
        self._arena = arena
        self._entered = False
        self.thread = 0
        self.bind()

    def bind(self) -> None:
        """Under a new plan parameters have new storages."""
        self._ours.clear()
        self._keep.clear()
        arena = self._arena()
        for chunk in arena.layout.chunks:
            self.ignore(arena.payloads.whole(chunk.index, "param").untyped_storage())

    # A plain model beside may have sparse tensors, which do not count. Sparse gradients of this model are refused.

    def _see_inputs(self, inputs: Iterable[torch.Tensor]) -> None:
        super()._see_inputs(t for t in inputs if t.layout is torch.strided)

    def _see_outputs(self, outputs: Iterable[torch.Tensor], *, resized: bool) -> None:
        super()._see_outputs((t for t in outputs if t.layout is torch.strided), resized=resized)

    def begin(self) -> None:
        self.thread = threading.get_ident()
        for other in list(_LEFT):
            if other.thread == self.thread and take_off(other):
                _LEFT.discard(other)
        self.__enter__()
        self._entered = True

    def end(self) -> None:
        """A mode that cannot leave its thread's stack now (another thread calls, or modes stand aside) stays and does
        nothing until that thread's next count."""
        self._ours.clear()
        self._keep.clear()
        if self._entered and not (threading.get_ident() == self.thread and take_off(self)):
            _LEFT.add(self)
        self.resume_compiler()
        self._entered = False


_LEFT: weakref.WeakSet[Standing] = weakref.WeakSet()  # modes that have ended and are still on a stack


def take_off(mode: TorchDispatchMode) -> bool:
    """Takes a mode off this thread's stack, also from under later modes; False without it."""
    size = torch._C._len_torch_dispatch_stack()
    if not any(torch._C._get_dispatch_stack_at(i) is mode for i in range(size)):
        return False
    above: list[TorchDispatchMode] = []
    while torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1) is not mode:
        above.append(_pop_mode())
    if not above:
        mode.__exit__(None, None, None)
        return True
    _pop_mode()
    for name in _FLAGS:  # the mode below this mode is now below the mode above it
        if hasattr(mode, name):
            getattr(above[-1], name)[-1] = getattr(mode, name).pop()
    for other in reversed(above):
        _push_mode(other)
    return True
