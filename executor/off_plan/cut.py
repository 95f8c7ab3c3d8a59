"""Cut: the places of a plan's payloads between two iterations, and the ways to bring payloads back there."""

from __future__ import annotations

from typing import Protocol

from executor.memory.shares import Shares
from executor.off_plan.in_use import InUse
from executor.off_plan.inline import Inline
from executor.off_plan.states import States
from executor.queues.interface import Stillness
from executor.session.following import Following
from executor.session.hosting import BytesHost, LoopHost
from executor.session.reader import Reader
from pstar_sim.core.step import Place
from pstar_sim.errors import OutOfMemory

__all__ = ["Host", "Places", "PlanCut"]

GPU, HOST = Place.GPU, Place.HOST
Places = frozenset[tuple[Place, int, str]]
"""(place, chunk, list) of each resident payload."""


class Climbing(Protocol):
    """The part of `ladder.Ladder` that this file uses."""

    @property
    def pending(self) -> bool: ...

    def note(self, error: OutOfMemory, done: str) -> None: ...

    def replan(self) -> None: ...


class Host(BytesHost, LoopHost, Protocol):
    """The part of the session that this file uses."""

    held: bool

    @property
    def queues(self) -> Stillness: ...
    @property
    def following(self) -> Following: ...
    @property
    def ladder(self) -> Climbing: ...
    @property
    def reader(self) -> Reader: ...


class PlanCut:
    def __init__(self, host: Host, inline: Inline, in_use: InUse, shares: Shares, states: States) -> None:
        self.host = host
        self.inline = inline
        self.in_use = in_use
        self.shares = shares
        self.states = states

    def return_to(self) -> None:
        """Bring the payloads to the plan's cut and let the queues begin the next iteration."""
        host = self.host
        self.in_use.clear()
        host.arena.log.mark("after", len(host.timetable.names) - 1)
        host.arena.set_tide(0)
        host.reader.set_open(False)
        if not host.ladder.pending:
            try:
                self.reach(host.timetable.cut)
            except OutOfMemory as error:
                host.ladder.note(error, "a new plan is made for the present places")
        host.cursor.off_plan = False
        host.queues.jump(host.iteration)
        host.following.next_iteration(on_plan=False)
        host.held = host.ladder.pending  # then all payloads stay until there is a new plan
        if not host.held:
            host.queues.resume()

    def start_over(self) -> None:
        """Drop the iteration's gradients and begin the iteration anew. The iteration must not have made any update."""
        host = self.host
        self.shares.forget()
        self.return_to()
        host.clock.reset()
        if host.ladder.pending:
            host.ladder.replan()

    @property
    def places(self) -> Places:
        """Returns (place, chunk, list) of all payloads that have memory now."""
        return frozenset((r.place, r.chunk, r.list) for r in self.host.arena.present)

    def reach(self, wanted: Places) -> None:
        """Make exactly `wanted` resident, with current content, beside the tide between two iterations. Values survive:
        a payload that leaves its last place is copied first. Raises OutOfMemory where the accelerator refuses
        memory."""
        arena = self.host.arena
        present = self.places
        wanted = frozenset(row for row in wanted if row[1] >= 0)
        new = wanted - present
        coming, leaving = sorted(new), sorted(present - wanted)
        # Host copies first, so that the gpu's memory can be freed.
        for place, chunk, name in coming:
            if place is HOST:
                self.inline.bring(HOST, chunk, name)
        for place, chunk, name in leaving:
            if place is GPU or (GPU, chunk, name) not in new:  # otherwise the gpu fetches it from the host first
                self._leave(place, chunk, name)
        for place, chunk, name in coming:
            if place is GPU:
                self.inline.bring(GPU, chunk, name)
        for place, chunk, name in leaving:
            if arena.has(place, chunk, name):
                self._leave(place, chunk, name)
        self._refresh()
        arena.set_tide(self.host.timetable.cut_tide)

    def _leave(self, place: Place, chunk: int, list_name: str) -> None:
        if place is GPU:
            self.states.leave_gpu(chunk, list_name)
        else:
            self.inline.perform(self.inline.drop(HOST, chunk, list_name))

    def _refresh(self) -> None:
        """Update the working lists that stayed and are not current any more."""
        host = self.host
        for chunk, state in enumerate(host.contents.chunks):
            for place in (GPU, HOST):
                if host.arena.has(place, chunk, "param") and place not in state.current:
                    self.inline.bring(place, chunk, "param")
            if host.arena.has(GPU, chunk, "remote") and not state.whole:
                self.inline.bring(GPU, chunk, "remote")
