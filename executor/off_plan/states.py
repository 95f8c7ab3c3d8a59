"""A chunk is updated where its states are: pinned on the gpu, or on the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from executor.memory.shares import Shares
from executor.off_plan.inline import Inline
from executor.session.state import PlanBytes
from pstar_sim.core.step import Place
from pstar_sim.workload.optimizers import MASTER_LIST

GPU, HOST, NVME = Place.GPU, Place.HOST, Place.NVME


class States:
    def __init__(self, run: PlanBytes, inline: Inline, shares: Shares) -> None:
        self.plan = run.plan
        self.arena = run.arena
        self.contents = run.contents
        self.inline = inline
        self.shares = shares

    def pinned(self, chunk: int) -> bool:
        """Whether the working list can be rewritten from the gpu's master copy."""
        return self.arena.has(GPU, chunk, MASTER_LIST)

    def home(self, chunk: int) -> Place:
        return GPU if self.pinned(chunk) else HOST

    def leave(self, place: Place, chunk: int, list_name: str) -> None:
        """Drops the list; one updated there, or with gradients, is copied first: from gpu to host, from host to disks
        if it lives there."""
        perform, inline, state = self.inline.perform, self.inline, self.contents.chunks[chunk]
        if place is GPU and list_name in state.ahead:
            perform(inline.copy(HOST, chunk, list_name))
        newer = list_name == "param" and HOST in state.current and NVME not in state.current
        newer = newer or list_name in state.unsaved or bool(state.where(HOST, list_name))
        if place is HOST and self.arena.has(NVME, chunk, list_name) and newer:
            perform(inline.copy(NVME, chunk, list_name))
        perform(inline.drop(place, chunk, list_name))

    def send_to_disks(self, chunk: int) -> None:
        """What lives there; also between a write and the free behind it."""
        for name in self.plan.layout.lists:
            if self.arena.has(NVME, chunk, name) and self.arena.has(HOST, chunk, name):
                self.leave(HOST, chunk, name)

    def bring_from_disks(self, chunk: int, lists: Iterable[str]) -> list[str]:
        """Reads those of the lists that are on disks alone to the host, and returns them."""
        has = self.arena.has
        absent = [name for name in lists if has(NVME, chunk, name) and not has(HOST, chunk, name)]
        for name in absent:
            self.inline.perform(self.inline.copy(HOST, chunk, name))
        return absent

    def send_streams_home(self) -> None:
        """Copies states that came to the gpu for one update back to the host."""
        for c in self.plan.layout.chunks:
            if self.plan.modes[c.index] != "stream":
                continue
            for name in self.plan.layout.state_lists:
                if self.arena.has(GPU, c.index, name):
                    self.leave(GPU, c.index, name)
            self.contents.chunks[c.index].ahead.clear()

    def unpin(self, chunk: int, room_bytes: int) -> int:
        """The host updates the chunk from now on. Returns bytes freed on the gpu: 0, with nothing moved, if states and
        gradients need over `room_bytes` on the host."""
        arena, layout = self.arena, self.plan.layout
        lists = [n for n in (*layout.state_lists, "grad32") if arena.has(GPU, chunk, n)]
        if sum(layout.payload_bytes(chunk, n) for n in ("param", *lists)) > room_bytes:
            return 0
        for name in lists:
            self.inline.perform(self.inline.copy(HOST, chunk, name))
        if not arena.has(HOST, chunk, "param"):
            self.inline.bring(HOST, chunk, "param")
        for name in lists:
            self.inline.perform(self.inline.drop(GPU, chunk, name))
        with torch.no_grad():
            self.shares.leave_gpu(chunk, "param", restored=True)
            self.shares.leave_gpu(chunk, "grad", restored=False)
            self.shares.kept_to_host(chunk)
        return sum(layout.payload_bytes(chunk, n) for n in lists)
