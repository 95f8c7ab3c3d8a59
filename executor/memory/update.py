"""What the Adam steps of one iteration need, and their work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from executor.devices import updates
from executor.devices.backend import StreamBackend
from executor.devices.rounding import round_stochastically
from executor.devices.rules import RULES, Settings
from executor.devices.updates import (
    BLOCK,
    GPU_BLOCK,
    Rounding,
    Scratch,
    UpdateRange,
    clip_coefficient,
    ranges_of,
    total_norm,
)
from executor.memory.arena import Arena
from executor.memory.chunk_state import ChunkState
from executor.memory.gradients import ChunkGradients
from executor.memory.slices import SlicePart
from executor.memory.slots import Slots
from executor.memory.values import ParameterValues
from pstar_sim.core.layout import ALIGN_BYTES
from pstar_sim.core.step import Place
from pstar_sim.errors import PlanError
from pstar_sim.workload.optimizers import MASTER_LIST

GPU, HOST, NVME = Place.GPU, Place.HOST, Place.NVME
Norms = Callable[[], Iterable[torch.Tensor]]
"""Returns the norms of all gradients of an iteration; called by the first update that needs them."""


@dataclass
class Update:
    """Fixed at `optimizer.step()` (eager updates: when the iteration begins).

    hyper: per group: rule -> settings.
    norms: of each gradient, where it arrived (one micro-batch only).
    stochastic: rounding of parameters without wider masters.
    unscale: factor that undoes loss scaling.
    skip: a gradient overflowed: Adam leaves values, states and step counts, and drops the gradients.
    unused: tensors without a gradient on any rank, left as they are.
    agree: the norm over this rank's gradients -> over all ranks'; None where this rank holds all.
        streams: None unless work is issued ahead. With it, a host queue's thread gets a coefficient as a number on the
        host, and who copies one from the gpu waits for the event behind it.
    """

    hyper: list[Mapping[str, Settings]]
    max_grad_norm: float | None = None
    stochastic: bool = False
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    norm: torch.Tensor | None = None
    unscale: float = 1.0
    skip: bool = False
    unused: frozenset[int] = frozenset()
    agree: Callable[[torch.Tensor], torch.Tensor] | None = None
    streams: StreamBackend | None = None
    _coefficient: torch.Tensor | None = None
    _ready: Any = None  # event behind the work that makes the coefficient
    _on_host: torch.Tensor | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def coefficient(self, norms: Norms) -> torch.Tensor | None:
        """The factor of every gradient, None without clipping and scaling.

        norms: of this rank's gradients, called once, by the first caller.
        """
        if self.max_grad_norm is None and self.unscale == 1.0:
            return None
        with self._lock:
            if self._coefficient is None and self.max_grad_norm is None:
                self._coefficient = torch.tensor(self.unscale, dtype=torch.float32)
            elif self._coefficient is None:
                assert self.max_grad_norm is not None
                self.norm = total_norm(norms()) * self.unscale
                if self.agree is not None:
                    self.norm = self.agree(self.norm)
                self._coefficient = clip_coefficient(self.norm, self.max_grad_norm) * self.unscale
                self._settle()
            return self._coefficient

    def _settle(self) -> None:
        """Reads the coefficient, or records the event behind it, in the thread that issued it."""
        if self.streams is None:
            return
        assert self.norm is not None and self._coefficient is not None
        if self.streams.queue in self.streams.host_queues:
            self.norm, self._coefficient = self.norm.cpu(), self._coefficient.cpu()
        else:
            self._ready = self.streams.record(self.streams.queue)

    def coefficient_on(self, device: torch.device, norms: Norms) -> torch.Tensor | None:
        """A scalar on the host is an argument of the kernel; one on the gpu comes there once, for the thread that
        updates."""
        scale = self.coefficient(norms)
        if scale is None or scale.device == device or scale.device.type == "cpu":
            return scale
        with self._lock:
            if self._on_host is None:
                if self.streams is not None and self._ready is not None:
                    self.streams.synchronize(self._ready)
                self._on_host = scale.cpu()
            return self._on_host

    def skip_all(self) -> None:
        """A gradient is not finite."""
        self.skip = True
        self.norm = torch.tensor(torch.inf, dtype=torch.float32)


class Updating:
    """steps_taken: tensor -> number of its updates, counted here."""

    def __init__(
        self,
        arena: Arena,
        slots: Slots,
        chunks: Sequence[ChunkState],
        values: ParameterValues,
        gradients: ChunkGradients,
        steps_taken: dict[int, int],
    ) -> None:
        self.arena = arena
        self.slots = slots
        self.chunks = chunks
        self.values = values
        self.gradients = gradients
        self.steps_taken = steps_taken
        longest = max((arena.layout.slice_numel(c.index) for c in arena.layout.chunks), default=1)
        on_host = arena.backend.device.type == "cpu"
        self._scratch = {HOST: Scratch(), GPU: Scratch(BLOCK if on_host else min(GPU_BLOCK, longest))}

    def adam(
        self, chunk: int, place: Place, update: Update, norms: Norms, elements: tuple[int, int] | None = None
    ) -> None:
        """Every parameter of the chunk, or a part, with a gradient; the place's working list becomes current. Raises
        PlanError where a list or a gradient is elsewhere.

        elements: (first, behind the last) on the host, None: all.
        """
        if elements is None:
            self._adam(chunk, place, update, norms)
        else:
            self._adam_part(chunk, elements, update, norms)
        if self.chunks[chunk].update_in_parts is None:
            self.arena.categories.rewritten(place, chunk, "param")
            self.values.changed(chunk)

    def _adam(self, chunk: int, place: Place, update: Update, norms: Norms) -> None:
        state = self.chunks[chunk]
        self._require_all_here(chunk, place)
        if update.skip:
            self._drop_gradients(state, place)
        source = None if update.skip else self.gradients.fold(chunk, place)
        if source is not None and update.unused:
            state.current.discard(place)  # its slot may hold a gradient of zero
            for mine in state.gradients.values():
                mine.difference_update(update.unused)
            if not state.where(place, source):
                source = None
        if source is not None:
            self._update(chunk, place, source, update, norms)
        elif place not in state.current:
            self.values.rewrite(place, chunk)

    def _update(self, chunk: int, place: Place, source: str, update: Update, norms: Norms) -> None:
        state, mine = self.chunks[chunk], self.chunks[chunk].where(place, source)
        scale = update.coefficient_on(self.arena.unsettled_at(place, chunk, MASTER_LIST).device, norms)
        state.updating = True
        lent = (place, source) == (GPU, "param") and mine <= state.lent
        self._apply(chunk, place, source, mine, (0, self.arena.layout.slice_numel(chunk)), update, scale, lent=lent)
        self._count(mine)
        state.current = set()
        for marks in state.gradients.values():
            marks.clear()
        if not lent:
            self.arena.at(place, chunk, "param").copy_(self.arena.at(place, chunk, MASTER_LIST))
        state.current = {place}
        state.whole = False
        names = self.arena.layout.states_of(chunk).names
        if place is GPU:
            state.ahead = set(names)
        else:
            state.unsaved = {name for name in names if self.arena.has(NVME, chunk, name)}
        state.updating = False

    def _adam_part(self, chunk: int, elements: tuple[int, int], update: Update, norms: Norms) -> None:
        """On the host, where their gradients are; others of the chunk count as on the gpu until all have arrived, and
        the update once all elements are updated."""
        arena, state, (first, end) = self.arena, self.chunks[chunk], elements
        ends = end == arena.layout.slice_numel(chunk)
        if first != state.updated:
            raise PlanError(f"Adam of elements {first} to {end} of chunk {chunk}: {state.updated} are updated so far")
        if first == 0 or ends:
            self._require_all_here(chunk, HOST, arriving=not ends)
        master, mine = arena.at(HOST, chunk, MASTER_LIST), set[int]()
        state.updating, state.update_in_parts = True, update
        if not update.skip:
            source, mine = self.gradients.fold_part(chunk, elements)
            mine -= update.unused
            if source is not None and mine:
                scale = update.coefficient_on(master.device, norms)
                self._apply(chunk, HOST, source, mine, elements, update, scale)
        arena.at(HOST, chunk, "param")[first:end].copy_(master[first:end])
        state.updated = end
        if ends:
            self._count(mine)
            for marks in state.gradients.values():
                marks.clear()
            state.current = {HOST}
            state.whole = False
            state.updated, state.update_in_parts = 0, None
        state.updating = False

    def _apply(
        self,
        chunk: int,
        place: Place,
        source: str,
        mine: Set[int],
        elements: tuple[int, int],
        update: Update,
        scale: torch.Tensor | None,
        *,
        lent: bool = False,
    ) -> None:
        """lent: values and gradients are in each other's list: [Note: gradients in the master copy].
        mine: tensors with a gradient; others keep their values.
        elements: (first, behind the last).
        """
        arena, row, (first, end) = self.arena, self.arena.layout.chunks[chunk], elements
        at = arena.unsettled_at if lent else arena.at
        parts = [(s.tensor, self.slots.parts[s.tensor]) for s in row.slots]
        spans = [(t, max(p.offset, first), min(p.offset + p.numel, end)) for t, p in parts]
        rule, master = RULES[arena.layout.states_of(chunk).name], at(place, chunk, "param" if lent else MASTER_LIST)
        if rule.room is None:
            slots = ((a, b - a, self.steps_taken[t] if t in mine else None) for t, a, b in spans if a < b)
            runs = ranges_of(slots, max(ALIGN_BYTES // master.itemsize, rule.block))
        else:
            runs = [
                UpdateRange(s.offset, s.offset + s.numel, self.steps_taken[s.tensor], s.shape)
                for s in row.slots
                if s.tensor in mine
            ]
        updates.update(
            rule,
            runs,
            param=master,
            grad=at(place, chunk, MASTER_LIST if lent else source),
            beside=self.gradients.beside(chunk) if (place, source) == (GPU, "param") else None,
            moments=[self.slots.flat(place, chunk, field) for field in rule.states.values()],
            spans=[self.slots.span(chunk, field) for field in rule.states.values()],
            settings=update.hyper[row.group][arena.layout.states_of(chunk).name],
            scale=scale,
            scratch=self._scratch[place],
            rounding=self._rounded(parts) if update.stochastic and master.itemsize < 4 else None,
        )

    def _rounded(self, parts: Sequence[tuple[int, SlicePart]]) -> Rounding:
        def rounded(target: torch.Tensor, value: torch.Tensor, first: int) -> None:
            for tensor, part in parts:
                a, b = max(part.offset, first), min(part.offset + part.numel, first + value.numel())
                if a < b:
                    round_stochastically(
                        target[a - first : b - first],
                        value[a - first : b - first],
                        update=self.steps_taken[tensor],
                        tensor=tensor,
                        offset=a - part.offset + part.skip,
                    )

        return rounded

    def _count(self, tensors: Set[int]) -> None:
        for tensor in tensors:
            self.steps_taken[tensor] += 1

    def _require_all_here(self, chunk: int, place: Place, *, arriving: bool = False) -> None:
        for list_name in ("param", *self.arena.layout.states_of(chunk).names):
            if not self.arena.has(place, chunk, list_name):
                raise PlanError(f"Adam of chunk {chunk} on the {place.value}: {list_name} is not there")
        gradients = self.chunks[chunk].gradients
        elsewhere = [] if arriving else [key for key, mine in gradients.items() if mine and key[0] is not place]
        if elsewhere:
            where = ", ".join(f"{name} on the {spot.value}" for spot, name in elsewhere)
            raise PlanError(f"Adam of chunk {chunk} on the {place.value}: gradients are still in {where}")

    def _drop_gradients(self, state: ChunkState, place: Place) -> None:
        state.current.discard(place)  # its slot may hold a gradient
        for mine in state.gradients.values():
            mine.clear()
