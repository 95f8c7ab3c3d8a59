"""Guard: every operator of an iteration, watched for memory that is not there.

A dispatch mode that stands under a session's iterations. On a virtual accelerator with a limit it counts what is alive
beside the chunks, operator by operator, and an operator whose result no longer fits has room made for it by the ladder
before the next one runs. Where an operator itself is refused (torch.OutOfMemoryError on CUDA), the ladder gives back
what it can and the operator runs again: it allocates before it writes.

Counting costs time for every operator; a session has a guard only where the accelerator has a limit of its own, or
where memory ran out before.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from executor.devices.backend import VirtualBackend
from executor.measuring.live_bytes import LiveStorages
from executor.measuring.measure import unseen
from pstar_sim.core.step import Place
from pstar_sim.errors import OutOfMemory

if TYPE_CHECKING:
    from executor.engine import Session

__all__ = ["Guard"]

TRIES = 8
_FLAGS = (
    "old_dispatch_mode_flags",
    "old_non_infra_dispatch_mode_flags",
    "old_without_ignore_compile_internals_dispatch_mode_flags",
)


class Guard(LiveStorages):  # type: ignore[no-untyped-call]
    """Watches what runs inside the model's modules and in backward, from `begin` to `end`. What else a loop does (a
    loss of its own, an evaluation's figures) counts where the model's operators or backward meet it."""

    def __init__(self, session: Session) -> None:
        super().__init__([], session.model.buffers(), costs=False, device=session.backend.device)
        self._keeper = weakref.ref(session)
        self._entered = False
        self._thread = 0
        backend = session.backend
        self._counts = backend if isinstance(backend, VirtualBackend) else None
        if self._counts is not None:
            self._counts.count_other = lambda: self.current
        self.bind()

    def bind(self) -> None:
        """The session has a new plan, and its parameters new storages."""
        self._ours.clear()
        self._keep.clear()
        s = self._session
        for chunk in s.plan.layout.chunks:
            self.ignore(s.arena.whole(chunk.index, "param").untyped_storage())

    @property
    def _session(self) -> Session:
        session = self._keeper()
        assert session is not None  # `watches` has asked
        return session

    def begin(self) -> None:
        self._thread = threading.get_ident()
        for other in list(_LEFT):
            if other._thread == self._thread and take_off(other):
                _LEFT.discard(other)
        self.__enter__()  # type: ignore[no-untyped-call]
        self._entered = True

    def end(self) -> None:
        """No more watching. Where it cannot leave its thread's stack now (this is another thread, or the modes stand
        aside), it does nothing there until the next guard of that thread begins."""
        self._ours.clear()
        self._keep.clear()
        if self._entered and not (threading.get_ident() == self._thread and take_off(self)):
            _LEFT.add(self)
        self._entered = False

    @property
    def counts(self) -> bool:
        """The accelerator goes by what is counted here, so that nothing else is held."""
        return self._counts is not None and self._counts.gpu_bytes is not None

    @property
    def watches(self) -> bool:
        s = self._keeper()
        if s is None or not self._entered or s.closed or s.ladder.given_up or not s.clock.inside:
            return False
        return s.cursor >= 0 or s.demand.active or s.demand.visiting

    def closes_moment(self) -> int:
        """Most bytes alive since the last call."""
        peak = self.peak
        self.reset_peak()
        return peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.watches:
            return func(*args, **(kwargs or {}))
        before = self.current
        out = self._run(func, types, args, kwargs)
        if self._counts is not None:
            for _ in range(TRIES):
                if self._counts.over_bytes() > 0:
                    self._session.arena.flush()
                if self._counts.over_bytes() <= 0:
                    break
                self._make_room(self._refusal(func, max(0, self.current - before), self._counts.gpu_bytes))
        return out

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        for left in reversed(range(TRIES)):
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except torch.OutOfMemoryError:
                if not left:
                    raise
                # How much was asked for is only in the text; what its inputs hold is of the same order.
                asked = sum(t.numel() * t.element_size() for t in args if isinstance(t, torch.Tensor))
                self._make_room(self._refusal(func, asked, None))
                self._session.backend.give_back()  # chunks and activations come from different pools
        raise AssertionError("the last try raises")

    def _refusal(self, func: Any, asked_bytes: int, limit_bytes: int | None) -> OutOfMemory:
        session = self._session
        counted = self._counts is not None
        return OutOfMemory(
            what=f"operator {func}",
            asked_bytes=asked_bytes,
            payload_bytes=self._counts.payload_bytes if self._counts else session.arena.payload_bytes(Place.GPU),
            other_bytes=self.current - (asked_bytes if counted else 0),
            limit_bytes=limit_bytes,
        )

    def _make_room(self, error: OutOfMemory) -> None:
        with self._session.at_work, unseen():
            self._session.ladder.give_back(error, needed=set(), alive_bytes=self.current)


_LEFT: weakref.WeakSet[Guard] = weakref.WeakSet()  # ended, and on a stack still


def take_off(mode: TorchDispatchMode) -> bool:
    """Take a mode off this thread's stack, also from under modes that were entered later; False if it is not there."""
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
    for name in _FLAGS:  # what was before this mode is now before the one over it
        if hasattr(mode, name):
            getattr(above[-1], name)[-1] = getattr(mode, name).pop()
    for other in reversed(above):
        _push_mode(other)
    return True
