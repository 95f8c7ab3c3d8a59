"""Off the plan: which chunks have to be on the gpu, and which leave it to make room: unused working lists, the farthest
next use first (Belady's rule), where memory ran out, then optimizer states of pinned chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from executor.off_plan.in_use import InUse
from executor.off_plan.inline import Inline
from executor.off_plan.shortage import Shortage
from executor.off_plan.states import States
from executor.session.batches import Batches, movable
from pstar_sim.core.step import Place
from pstar_sim.errors import DoesNotFit, OutOfMemory
from pstar_sim.workload.optimizers import MASTER_LIST
from pstar_sim.workload.workload import Moment, Phase

GPU, HOST = Place.GPU, Place.HOST


Relief = Callable[[OutOfMemory, set[int]], None]
"""(refusal, chunks that stay): makes room for the refused memory: `Ladder.give_back`. Raises DoesNotFit if that is not
possible."""


class RoomMaker:
    def __init__(
        self, batches: Batches, shortage: Shortage, inline: Inline, in_use: InUse, states: States, relieve: Relief
    ) -> None:
        self.batches = batches
        self.run = batches.run
        self.shortage = shortage
        self.inline = inline
        self.in_use = in_use
        self.states = states
        self._relieve = relieve

    def set_tide(self, size: int) -> None:
        """Working lists are dropped until it has room, as far as possible."""
        arena = self.run.arena
        free = arena.gpu_budget_bytes - arena.payload_bytes(GPU)
        if size > free:
            self.make(size - arena.tide_bytes, needed=set(), strict=False)
            free = arena.gpu_budget_bytes - arena.payload_bytes(GPU)
        arena.set_tide(min(size, max(free, 0)))

    def make(self, size: int, *, needed: set[int], strict: bool = True) -> None:
        """Drop working lists for `size` free bytes.

        strict: raise DoesNotFit if that fails.
        """
        arena, plan = self.run.arena, self.run.plan
        if arena.room_bytes(Place.GPU) >= size:
            return
        for chunk in self._victims(needed):
            self._drop(chunk)
            if arena.room_bytes(Place.GPU) >= size:
                return
        # The known tide is that of the plan's moments; give up the part of it that is only an estimate.
        short = size - arena.room_bytes(Place.GPU)
        if strict and self.shortage.pending:
            short -= self.unpin(short, needed=needed)[1]
            if short <= 0:
                return
        if short <= arena.tide_bytes and not self.batches.moments:
            arena.set_tide(arena.tide_bytes - short)
        elif strict:
            raise DoesNotFit(
                policy=plan.policy,
                place="gpu",
                needed_bytes=arena.gpu_budget_bytes + short,
                available_bytes=arena.gpu_budget_bytes,
                what="what one module reads at once, off plan",
            )

    def _victims(self, needed: set[int]) -> list[int]:
        arena, table = self.run.arena, self.run.timetable
        protected = self.in_use.chunks | needed
        victims = [
            c.index
            for c in self.run.plan.layout.chunks
            if arena.has(GPU, c.index, "param")
            and c.index not in protected
            and (movable(arena, c.index) or arena.has(GPU, c.index, "remote"))
            and not self.run.contents.chunks[c.index].where(GPU, "param")
        ]
        position = self.in_use.position
        return sorted(victims, key=lambda chunk: (-table.until_use(chunk, position), chunk))

    def _drop(self, chunk: int) -> None:
        """Only the other ranks' slices if it cannot leave."""
        if self.run.arena.has(GPU, chunk, "remote"):
            self.inline.perform(self.inline.drop(GPU, chunk, "remote"))
        if movable(self.run.arena, chunk):
            self.inline.perform(self.inline.drop(GPU, chunk, "param"))

    def give_back(self, size: int, *, needed: set[int]) -> tuple[list[int], int]:
        """Until the gpu holds `size` less, as far as possible: (chunks dropped, bytes)."""
        dropped: list[int] = []
        freed = 0
        for chunk in self._victims(needed):
            if freed >= size:
                break
            self.inline.perform(self.inline.drop(GPU, chunk, "param"))
            dropped.append(chunk)
            freed += self.run.plan.layout.payload_bytes(chunk, "param")
        return dropped, freed

    def unpin(self, size: int, *, needed: set[int]) -> tuple[list[int], int]:
        """Moves pinned chunks' optimizer states to the host, as far as there is room; this iteration updates them
        there. Returns (chunks moved, bytes)."""
        run, layout = self.run, self.run.plan.layout
        moved: list[int] = []
        freed = 0
        pinned = [c.index for c in layout.chunks if self.states.pinned(c.index)]
        for chunk in sorted(pinned, key=lambda c: (-layout.payload_bytes(c, MASTER_LIST), c)):
            if freed >= size:
                break
            gained = self.states.unpin(chunk, run.plan.host_budget_bytes - run.arena.payload_bytes(HOST))
            if not gained:
                continue
            freed += gained
            moved.append(chunk)
            if chunk in self._victims(needed):
                self.inline.perform(self.inline.drop(GPU, chunk, "param"))
                freed += layout.payload_bytes(chunk, "param")
        return moved, freed

    def until_taken(self, take: Callable[[], object], *, needed: set[int]) -> None:
        """Makes room after each refusal. Raises DoesNotFit without any."""
        while True:
            try:
                take()
                return
            except OutOfMemory as error:
                self._relieve(error, needed)

    # -- what has to be there -----------------------------------------------------------------------------------------

    def held(self, chunk: int) -> bool:
        contents = self.run.contents
        return contents.values.holds(chunk) and not contents.chunks[chunk].where(GPU, "param")

    def ensure(self, chunks: Iterable[int], *, required: bool = True) -> None:
        """Make the working lists readable on the gpu. Raises DoesNotFit without room, unless not `required`: then lists
        are left out."""
        run, wanted = self.run, set(chunks)
        for chunk in sorted(wanted):
            if self.held(chunk):
                continue
            if not run.arena.has(GPU, chunk, "param"):
                size = run.plan.layout.payload_bytes(chunk, "param")
                self.make(size, needed=wanted, strict=required)
                if not required and run.arena.room_bytes(Place.GPU) < size:
                    continue
            if GPU not in run.contents.chunks[chunk].current:
                self._bring(chunk, "param", wanted)
            if run.arena.sliced:
                self._gather(chunk, wanted)
        self.in_use.add(wanted)

    def _gather(self, chunk: int, wanted: set[int]) -> None:
        if not self.run.arena.has(GPU, chunk, "remote"):
            self.make(self.run.plan.layout.payload_bytes(chunk, "remote"), needed=wanted)
        self._bring(chunk, "remote", wanted)

    def _bring(self, chunk: int, list_name: str, wanted: set[int]) -> None:
        self.until_taken(lambda: self.inline.bring(GPU, chunk, list_name), needed=wanted)


class Tides:
    """Non-model peaks of moments, by the event that opens them."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        self._by_name: dict[str, int] = {}
        for m in moments:
            self._by_name[m.name] = max(self._by_name.get(m.name, 0), m.peak_bytes)
        forward = [m for m in moments if m.phase is Phase.FWD] or list(moments)
        # Without gradients no activations are kept: a moment adds its bytes twice (its output, and the next one's).
        self.no_grad_bytes = forward[0].start_bytes + 2 * max(m.peak_bytes - m.start_bytes for m in forward)

    def at(self, name: str, otherwise: int) -> int:
        return self._by_name.get(name, otherwise)
