"""Chunks that code off the plan may still read.

Those used since the enclosing module began (forward) or the last event (backward) stay; those of a recomputation until
the next begins or the backward ends: autograd reads tensors saved of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from executor.moments.hooks import ModuleEvent
from pstar_sim.workload.workload import Phase


class InUse:
    """position: the latest moment reached, by names of events; uses count from it."""

    def __init__(self) -> None:
        self.position = 0
        self._frames: list[set[int]] = [set()]  # chunks used by each open module call
        self._recomputed: set[int] = set()
        self._in_backward = False  # the moment that is open

    @property
    def chunks(self) -> set[int]:
        return set().union(*self._frames) | self._recomputed

    def add(self, chunks: Iterable[int]) -> None:
        self._frames[-1] |= set(chunks)

    def only(self, chunks: Iterable[int]) -> None:
        """Until the next event: the running code began on plan, or none runs."""
        self._frames = [set(chunks)]

    def clear(self) -> None:
        self.only(())
        self._recomputed = set()

    def see(self, event: ModuleEvent) -> None:
        if event.kind == "begin":
            if event.phase is Phase.RECOMPUTE and self._in_backward:
                self._recomputed = set()
                self._in_backward = False
            if event.module == "" and event.phase is Phase.FWD:
                self._frames = [set()]
            self._frames.append(set())
        elif event.kind == "end":
            if len(self._frames) > 1:
                ended = self._frames.pop()
                if event.phase is Phase.RECOMPUTE:
                    self._recomputed |= ended
        else:
            self._frames = [set()]
            self._in_backward = True
            if event.kind == "backward-end":
                self._recomputed = set()
