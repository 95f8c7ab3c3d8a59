"""Where a plan's payloads are between two iterations, and ways to bring them back there."""

from __future__ import annotations

from executor.memory.arena import PLACES
from executor.memory.shares import Shares
from executor.off_plan.in_use import InUse
from executor.off_plan.inline import Inline
from executor.off_plan.shortage import Shortage
from executor.off_plan.states import States
from executor.session.following import Following
from pstar_sim.core.step import Place
from pstar_sim.errors import OutOfMemory

GPU = Place.GPU
Places = frozenset[tuple[Place, int, str]]
"""(place, chunk, list) of each resident payload."""


class PlanCut:
    def __init__(
        self, following: Following, shortage: Shortage, inline: Inline, in_use: InUse, shares: Shares, states: States
    ) -> None:
        self.run = following.run
        self.following = following
        self.shortage = shortage
        self.inline = inline
        self.in_use = in_use
        self.shares = shares
        self.states = states

    def return_to(self) -> None:
        """Brings the payloads to the plan's cut; the queues begin the next iteration."""
        run, state, shortage = self.run, self.following.state, self.shortage
        self.in_use.clear()
        run.arena.log.mark("after", len(run.timetable.names) - 1)
        run.arena.set_tide(0)
        self.following.reader.set_open(False)
        if not shortage.pending:
            try:
                self.reach(run.timetable.cut)
            except OutOfMemory as error:
                shortage.note(error, "a new plan is made for the present places")
        state.cursor.off_plan = False
        run.queues.jump(state.iteration)
        self.following.next_iteration(on_plan=False)
        state.held = shortage.pending  # then all payloads stay until there is a new plan
        if not state.held:
            run.queues.resume()

    def start_over(self) -> None:
        """Drop the iteration's gradients, before any update, and begin anew."""
        self.shares.forget()
        self.return_to()

    @property
    def places(self) -> Places:
        """(place, chunk, list) of all payloads with memory."""
        return frozenset((r.place, r.chunk, r.list) for r in self.run.arena.present)

    def reach(self, wanted: Places) -> None:
        """Exactly `wanted` is resident, with current content; what leaves its last place is copied first. Raises
        OutOfMemory where the accelerator refuses."""
        arena = self.run.arena
        present = self.places
        wanted = frozenset(row for row in wanted if row[1] >= 0)
        new = wanted - present
        coming, leaving = sorted(new), sorted(present - wanted)
        # Host copies come first, so that the gpu's memory can be freed. What a later place fetches stays until then.
        for n, place in enumerate(PLACES, start=1):
            for row in coming:
                if row[0] is place:
                    self.inline.bring(*row)
            for row in leaving:
                if arena.has(*row) and not any((later, *row[1:]) in new for later in PLACES[n:]):
                    self.states.leave(*row)
        self._refresh()
        arena.set_tide(self.run.timetable.cut_tide)

    def _refresh(self) -> None:
        arena = self.run.arena
        for chunk, state in enumerate(self.run.contents.chunks):
            for place in reversed(PLACES):
                if arena.has(place, chunk, "param") and place not in state.current:
                    self.inline.bring(place, chunk, "param")
            if arena.has(GPU, chunk, "remote") and not state.whole:
                self.inline.bring(GPU, chunk, "remote")
