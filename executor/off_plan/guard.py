"""Guard: watches every operator of an iteration for a lack of memory.

A dispatch mode below a session's iterations. On a virtual accelerator with a limit it counts the live bytes beside the
chunks, operator by operator. If the result of an operator no longer fits, the ladder makes room before the next
operator runs. If an operator itself is refused memory (torch.OutOfMemoryError on CUDA), the ladder gives back memory
and the operator runs again: it allocates before it writes.

Counting costs time for every operator. A session has a guard only where the accelerator has a limit of its own, or
where memory ran out before.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch

from executor.devices.backend import VirtualBackend
from executor.moments.standing import Host as StandingHost
from executor.moments.standing import Standing
from executor.moments.unseen import unseen
from executor.off_plan.rungs import asked_bytes
from executor.session.hosting import LoopHost
from pstar_sim.core.step import Place
from pstar_sim.errors import DoesNotFit, OutOfMemory

__all__ = ["Guard"]

TRIES = 8


class Climbing(Protocol):
    """The part of `ladder.Ladder` that this file uses."""

    @property
    def given_up(self) -> bool: ...

    def make_room(self, error: OutOfMemory, *, needed: set[int], alive_bytes: int | None = None) -> int: ...

    def give_up(self, error: OutOfMemory, short_bytes: int) -> DoesNotFit: ...


class Host(StandingHost, LoopHost, Protocol):
    """The part of the session that this file uses."""

    @property
    def ladder(self) -> Climbing: ...


class Guard(Standing[Host]):  # type: ignore[no-untyped-call]
    """Watches the operators inside the model's modules and in backward, from `begin` to `end`. Other tensors of a loop
    (a loss of its own, an evaluation's figures) count once the model's operators or backward use them."""

    def __init__(self, session: Host) -> None:
        super().__init__(session)
        backend = session.backend
        self._counts = backend if isinstance(backend, VirtualBackend) else None
        if self._counts is not None:
            self._counts.count_other = lambda: self.current

    @property
    def counts(self) -> bool:
        """Whether bytes are counted for an accelerator that has a limit of its own."""
        return self._counts is not None and self._counts.gpu_bytes is not None

    @property
    def watches(self) -> bool:
        s = self._keeper()
        if s is None or not self._entered or s.closed or s.ladder.given_up or not s.clock.inside:
            return False
        if self._counts is not None and not s.clock.at_turn:
            return False  # another prepared model's, which has an accelerator of its own
        return s.cursor.moment >= 0 or s.cursor.off_plan or s.cursor.visiting

    def closes_moment(self) -> int:
        """Close a moment. Returns the most bytes alive since the last call."""
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
                refusal = self._refusal(func, max(0, self.current - before), self._counts.gpu_bytes)
                if short_bytes := self._make_room(refusal):
                    raise self._session.ladder.give_up(refusal, short_bytes)
        return out

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        session = self._session
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
                undisturbed = getattr(session.backend, "undisturbed", None)
                if undisturbed is not None:
                    # See [Note: refused beside a pool] in cuda_blocks.py: the memory may in fact suffice.
                    with undisturbed(), contextlib.suppress(torch.OutOfMemoryError):
                        return super().__torch_dispatch__(func, types, args, kwargs)
                if session.backend.give_back():  # under the plan: only memory that nobody uses
                    continue
            if short_bytes:
                raise session.ladder.give_up(refusal, short_bytes)
            short_bytes = self._make_room(refusal)
            session.backend.give_back()  # chunks and activations come from different pools
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

    def _make_room(self, error: OutOfMemory) -> int:
        """Returns the bytes that are still missing."""
        with self._session.at_work, unseen():
            return self._session.ladder.make_room(error, needed=set(), alive_bytes=self.current)
