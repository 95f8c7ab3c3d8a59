"""Every update of an iteration off the plan, in `optimizer.step()`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from executor.memory.update import Update
from executor.off_plan.cut import PlanCut
from executor.off_plan.gradients_off_plan import OffPlanGradients
from executor.off_plan.inline import Inline
from executor.off_plan.room_maker import RoomMaker
from executor.off_plan.states import States
from executor.session.state import RunState
from pstar_sim.core.step import Place

GPU, HOST, NVME = Place.GPU, Place.HOST, Place.NVME


class Stepping:
    def __init__(
        self,
        state: RunState,
        inline: Inline,
        states: States,
        room: RoomMaker,
        gradients: OffPlanGradients,
        cut: PlanCut,
    ) -> None:
        self.state = state
        self.run = gradients.run
        self.updates = gradients.updates
        self.inline = inline
        self.states = states
        self.room = room
        self.gradients = gradients
        self.cut = cut

    def step(self) -> None:
        state = self.state
        self.gradients.collect_left_over()
        update = state.now.update or self.updates.new()
        state.now.update = update
        self.updates.decide_scaling(update)
        state.cursor.committed = state.iteration
        self.carry_out(update)

    def carry_out(self, update: Update) -> None:
        contents, arena, layout = self.run.contents, self.run.arena, self.run.plan.layout
        self._take_kept_back()
        chunks = [c for c in layout.chunks if contents.chunks[c.index].with_gradient()]

        def norms() -> Iterable[torch.Tensor]:
            arrived = sorted(t for c in chunks for t in contents.chunks[c.index].with_gradient())
            return [contents.gradients.norm(t) for t in arrived]

        for c in chunks if not update.skip else ():
            self._fold(c.index)
        if self.updates.max_grad_norm is not None and update.norm is None:
            update.coefficient(norms)
        for c in chunks:
            home = self.states.home(c.index)
            read = self.states.bring_from_disks(c.index, self._with_gradients(c.index))
            if not arena.has(home, c.index, "param"):
                if home is GPU:
                    self.room.make(layout.payload_bytes(c.index, "param"), needed={c.index})
                self._take(c.index)
                read += ["param"] if arena.has(NVME, c.index, "param") else []
                if not update.skip:
                    contents.gradients.fold(c.index, self.states.home(c.index))
            if self.states.home(c.index) is HOST:
                read += self.states.bring_from_disks(c.index, layout.states_of(c.index).names)
            self.inline.perform(self.inline.adam(self.states.home(c.index), c.index), update, norms)
            for name in read:
                self.states.leave(HOST, c.index, name)
        self.cut.return_to()

    def _with_gradients(self, chunk: int) -> list[str]:
        return [name for (_, name), mine in self.run.contents.chunks[chunk].gradients.items() if mine]

    def _fold(self, chunk: int) -> None:
        """What comes from disks goes back, since the host may have no room for the sums of all chunks."""
        names = self._with_gradients(chunk)
        read = self.states.bring_from_disks(chunk, sorted({*names, "grad32"}) if len(names) > 1 else ())
        self.run.contents.gradients.fold(chunk, self.states.home(chunk))
        for name in read:
            self.states.leave(HOST, chunk, name)

    def _take_kept_back(self) -> None:
        """Of a chunk whose working list lives on disks, on through the host to there."""
        shares, contents = self.gradients.shares, self.run.contents
        tensors: defaultdict[int, list[int]] = defaultdict(list)
        for t in shares.kept:
            tensors[contents.slots.chunk_of(t)].append(t)
        for chunk, mine in tensors.items():
            has = self.run.arena.has
            passes = has(NVME, chunk, "param") and not has(HOST, chunk, "param")
            if passes and contents.chunks[chunk].where(NVME, "param"):
                self.states.bring_from_disks(chunk, ["param"])
            self._take(chunk)
            for t in mine:
                shares.kept_to_param(t, self.states.home(chunk))
            if passes:
                self.states.leave(HOST, chunk, "param")

    def _take(self, chunk: int) -> None:
        def take() -> None:
            home = self.states.home(chunk)  # another place if the chunk's states were moved to make room
            if not self.run.arena.has(home, chunk, "param"):
                self.inline.perform(self.inline.alloc(home, chunk, "param"))

        self.room.until_taken(take, needed={chunk})
