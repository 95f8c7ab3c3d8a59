"""Watches every operator for a lack of memory.

On a virtual accelerator with a limit, a dispatch mode counts live bytes beside the chunks, and if a result no longer
fits, the ladder makes room before the next operator. An operator that is refused memory (torch.OutOfMemoryError on
CUDA) runs again after the ladder has given some back: it allocates before it writes.

Counting costs time: a guard is only where the accelerator has a limit of its own, or memory ran out before.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from executor.devices.backend import VirtualBackend
from executor.moments.hooks import MomentClock
from executor.moments.standing import Standing
from executor.moments.unseen import unseen
from executor.off_plan.rungs import asked_bytes
from executor.off_plan.shortage import Shortage
from executor.session.state import PlanBytes, RunState
from executor.session.weakly import weakly
from pstar_sim.core.step import Place
from pstar_sim.errors import DoesNotFit, OutOfMemory

TRIES = 8


class Guard(Standing):  # type: ignore[no-untyped-call]
    """Inside modules and in backward, from `begin` to `end`; a loop's other tensors count once used there.

    make_room: returns the bytes still missing. give_up: ends the iteration, returns the error to raise.
    measured: moment -> non-model bytes seen.
    """

    def __init__(
        self,
        model: nn.Module,
        state: RunState,
        clock: MomentClock,
        shortage: Shortage,
        *,
        make_room: Callable[[OutOfMemory, int], int],
        give_up: Callable[[OutOfMemory, int], DoesNotFit],
    ) -> None:
        keeper, backend = weakref.ref(state), state.run.backend

        def run() -> PlanBytes:
            held = keeper()
            assert held is not None  # the guard counts on demand only: `watches`
            return held.run

        self._keeper = keeper
        self._run_of = run
        super().__init__(model, backend.device, lambda: run().arena)
        self.measured: dict[int, int] = {}
        self._clock = weakref.ref(clock)
        self._shortage = weakref.ref(shortage)
        self._make_room = weakly(make_room)
        self._give_up = weakly(give_up)
        self._counts = backend if isinstance(backend, VirtualBackend) else None
        if self._counts is not None:
            self._counts.count_other = lambda: self.current

    @property
    def counts(self) -> bool:
        return self._counts is not None and self._counts.gpu_bytes is not None

    @property
    def watches(self) -> bool:
        state, clock, shortage = self._keeper(), self._clock(), self._shortage()
        if state is None or clock is None or shortage is None or not self._entered or state.closed:
            return False
        if shortage.given_up or not clock.inside:
            return False
        if self._counts is not None and not clock.at_turn:
            return False  # another prepared model's, which has an accelerator of its own
        return state.cursor.moment >= 0 or state.cursor.off_plan or state.cursor.visiting

    def see_event(self, moment: int) -> None:
        if moment >= 0:
            self.measured[moment] = max(self.measured.get(moment, 0), self.peak)
        self.reset_peak()

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
                    self._run_of().arena.flush()
                if self._counts.over_bytes() <= 0:
                    break
                refusal = self._refusal(func, max(0, self.current - before), self._counts.gpu_bytes)
                if short_bytes := self._room_for(refusal):
                    raise self._give_up(refusal, short_bytes)
        return out

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        backend = self._run_of().backend
        short_bytes = 0  # missing although everything was given back
        for left in reversed(range(TRIES)):
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except torch.OutOfMemoryError as error:
                if not left:
                    raise
                # Where the text does not say what was requested, the bytes of the inputs are of the same order.
                asked = asked_bytes(str(error)) or sum(
                    t.numel() * t.element_size() for t in args if isinstance(t, torch.Tensor)
                )
                refusal = self._refusal(func, asked, None)
            if left == TRIES - 1:
                undisturbed = backend.undisturbed()
                if undisturbed is not None:
                    # See [Note: refused beside a pool] in cuda_blocks.py: the memory may in fact suffice.
                    with undisturbed, contextlib.suppress(torch.OutOfMemoryError):
                        return super().__torch_dispatch__(func, types, args, kwargs)
                if backend.give_back():  # under the plan: only memory that nobody uses
                    continue
            if short_bytes:
                raise self._give_up(refusal, short_bytes)
            short_bytes = self._room_for(refusal)
            backend.give_back()  # chunks and activations come from different pools
        raise AssertionError("the last try raises")

    def _refusal(self, func: Any, asked_bytes: int, limit_bytes: int | None) -> OutOfMemory:
        arena, counted = self._run_of().arena, self._counts is not None
        return OutOfMemory(
            what=f"operator {func}",
            asked_bytes=asked_bytes,
            payload_bytes=self._counts.payload_bytes if self._counts else arena.payload_bytes(Place.GPU),
            other_bytes=self.current - (asked_bytes if counted else 0),
            limit_bytes=limit_bytes,
        )

    def _room_for(self, error: OutOfMemory) -> int:
        state = self._keeper()
        assert state is not None
        with state.at_work, unseen():
            return self._make_room(error, self.current)
