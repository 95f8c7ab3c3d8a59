"""What the asynchronous policies plan from: chunks and their uses, blocks of moments (positions of the compute queue),
and what each holds besides chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.draft import Charge
from pstar_sim.core.effects import tide_moves
from pstar_sim.core.layout import Layout, build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import cost_of
from pstar_sim.errors import CannotPlan
from pstar_sim.policy.kit.blocks import Block, Position, Stretch, blocks_of, merged
from pstar_sim.policy.kit.charges import charges_of
from pstar_sim.policy.kit.facts import facts_of
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.trip_moves import trip_cuts
from pstar_sim.workload.workload import Phase, Workload


class Job:
    """ranks: with a slice of each chunk.
    barrier: why no Adam runs before the optimizer step, None if it may.
    sums_on_gpu: all micro-batches' gradients add up on the GPU and go to the host once: in a layer-major workload,
        where they follow one another.
    add_last: a last gradient without a sum on the GPU is added before the update: clipping takes the norm of sums.
    host_adds: chunk -> adds on the host, if gradients do not add up on the GPU.
    folds: chunk -> its update then adds the last itself.
    may_sum: modes may ask for sums on the GPU.
    may_wait: for the first of two gradients to wait there, in fewer bytes than a sum.
    tide: per moment, with capacity "peak" the highest.
    small: always on the GPU.
    moving: all others, pinned ones too.
    stash_bytes: on the host.
    candidates: for pins, in this order.
    sizes: of one rank's working list.
    remote: of the other ranks' slices.
    permanent: of lists that a chunk keeps where it lives.
    small_bytes: always on the GPU.
    """

    def __init__(
        self,
        name: str,
        workload: Workload,
        machine: Machine,
        settings: Settings,
        point: Point | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.name = name
        self.point = point = point or Point()
        self.workload = workload
        self.machine = machine
        self.settings = settings
        self.layout = layout or build_layout(
            workload, chunk_bytes=settings.chunk_bytes, ranks=machine.data_parallel_size, sums=settings.sums
        )
        self.ranks = self.layout.ranks
        self._states_bytes: dict[tuple[int, frozenset[str]], int] = {}
        self._check_order()
        self.uses = uses = facts_of(workload, self.layout)
        uses.check()
        self.cost = cost_of(workload, machine, self.layout)
        self.charges = charges_of(self.cost)
        self.several = workload.micro_batches > 1
        self.barrier = settings.barrier(workload.compute_dtype) or ("barrier=on" if point.barrier else None)
        self._place_sums()
        self.follow_tide = point.capacity == "tide"
        self.tide = uses.tide if self.follow_tide else (max(uses.tide),) * len(uses.tide)
        self.stash_bytes = sum(size for _, size in workload.stash_room)
        self._weigh_chunks()

    def _check_order(self) -> None:
        ranks = self.machine.data_parallel_size
        if not self.workload.order.on_several_ranks and ranks > 1:
            raise CannotPlan(f"{self.name}: a layer-major workload runs on one GPU, not on {ranks}")

    def _place_sums(self) -> None:
        w = self.workload
        self.sums_on_gpu = not w.order.sums_leave_gpu
        on_host = self.several and not self.sums_on_gpu
        self.add_last = on_host and self.settings.clip
        given = [len(spans) if on_host else 0 for spans in self.uses.spans]  # gradients that add up on the host
        self.host_adds = [max(0, count - (not self.add_last)) for count in given]
        self.folds = [count > 1 and not self.add_last for count in given]
        self.may_sum = on_host and self.point.sums
        size = self.layout.payload_bytes
        narrow = any(size(c, "grad") < size(c, "grad32") for c in self.uses.trained)
        self.may_wait = self.may_sum and self.ranks == 1 and w.micro_batches == 2 and narrow

    def _weigh_chunks(self) -> None:
        uses, chunks = self.uses, self.layout.chunks
        self.small = frozenset(c.index for c in chunks if c.small)
        self.moving = [c.index for c in chunks if not c.small]
        self.candidates = sorted(filter(uses.updated, self.moving), key=lambda c: (uses.first_use(c), c))
        self.sizes = [self.layout.payload_bytes(c.index, "param") for c in chunks]
        self.remote = self._others()
        self.permanent = [uses.home_bytes(c.index) for c in chunks]
        self.small_bytes = sum(self.permanent[c] + self.remote[c] for c in self.small)

    def _others(self) -> list[int]:
        if self.ranks == 1:
            return [0] * len(self.layout.chunks)
        return [self.layout.payload_bytes(c.index, "remote") for c in self.layout.chunks]

    @cached_property
    def forward_s(self) -> float:
        w = self.workload
        return sum(s for s, m in zip(self.cost.moments_s, w.moments) if m.micro_batch == 0 and m.phase is Phase.FWD)

    @cached_property
    def blocks(self) -> list[Block]:
        return blocks_of(self.uses, self.cost.moments_s, self.tide, self.small, self._cuts())

    @cached_property
    def block_positions(self) -> list[Position]:
        """Before adds of gradients make them longer."""
        return [Position(n, -1, block.tide_bytes, block.seconds) for n, block in enumerate(self.blocks)]

    @cached_property
    def block_of(self) -> list[int]:
        return [n for n, block in enumerate(self.blocks) for _ in range(block.first, block.last + 1)]

    @cached_property
    def touched(self) -> list[list[int]]:
        """Chunk -> blocks that need it, empty for a small chunk."""
        every = self.uses.touched
        return [
            [] if c in self.small else sorted({self.block_of[m] for m in moments}) for c, moments in enumerate(every)
        ]

    @cached_property
    def touched_stretches(self) -> list[list[Stretch]]:
        return [merged(Stretch(n, n) for n in blocks) for blocks in self.touched]

    def _cuts(self) -> frozenset[int]:
        """Gradient lists open and close, and eager GPU Adam runs, only at a block's edge."""
        cuts = set(trip_cuts(self.workload))
        for c, spans in enumerate(self.uses.spans):
            if c in self.small and self.ranks == 1:  # such a chunk adds its gradients in place
                spans = spans[-1:]
            elif self.sums_on_gpu:
                cuts.update(first for first, _ in self.lists_of(c, summed=True))
                cuts.update(last + 1 for _, last in self.lists_of(c, summed=True))
                continue
            cuts.update(first for _, first, _ in spans[:-1])
            if c not in self.small or self.barrier is None:
                cuts.update(last + 1 for _, _, last in spans)
        return frozenset(cuts)

    @cached_property
    def gradient_lists(self) -> list[list[tuple[int, int]]]:
        """(chunk, bytes) open in each block, without sums that a mode asks for."""
        lists: list[list[tuple[int, int]]] = [[] for _ in self.blocks]
        names = self.gradient_names(summed=self.sums_on_gpu)
        for c in self.moving if self.ranks == 1 else range(len(self.sizes)):
            size = sum(self.layout.payload_bytes(c, name) for name in names) if self.uses.updated(c) else 0
            for first, last in self.lists_of(c, summed=self.sums_on_gpu):
                for n in range(self.block_of[first], self.block_of[last] + 1):
                    lists[n].append((c, size))
        return lists

    @cached_property
    def small_visits(self) -> dict[int, tuple[int, int]]:
        """Small updated chunk -> first and last block with the others' slices here."""
        uses = self.uses
        return {
            c: (self.block_of[uses.first_use(c)], self.block_of[uses.touched[c][-1]])
            for c in sorted(self.small)
            if self.ranks > 1 and uses.updated(c)
        }

    @cached_property
    def up(self) -> dict[tuple[int, str], tuple[int, float]]:
        """(chunk, list) -> bytes and seconds to the GPU."""
        return self._copies("h2d")

    @cached_property
    def down(self) -> dict[tuple[int, str], tuple[int, float]]:
        """As `up`, for a copy to the host."""
        return self._copies("d2h")

    def _copies(self, direction: str) -> dict[tuple[int, str], tuple[int, float]]:
        sizes = {
            (c, name): self.layout.payload_bytes(c, name)
            for c in self.moving
            for name in ("param", *(self.visiting(c, held=False) if self.uses.updated(c) else ()))
        }
        return {key: (size, self.cost.transfer_s(size, direction)) for key, size in sizes.items()}

    @cached_property
    def block_charges(self) -> list[Charge]:
        """The tide rises at a block's begin and falls at its end."""
        rises, falls = tide_moves([block.tide_bytes for block in self.blocks])
        return [Charge(block.seconds, rise, fall) for block, rise, fall in zip(self.blocks, rises, falls)]

    def gradient_names(self, *, summed: bool) -> tuple[str, ...]:
        """Lists where gradients arrive that do not overwrite the working list; on several ranks whole chunks', summed
        first.

        summed: all micro-batches add up on the GPU.
        """
        if self.ranks > 1:
            return ("grad", "grad_remote")
        return ("grad32",) if summed else ("grad",)

    def lists_of(self, chunk: int, *, summed: bool) -> Sequence[tuple[int, int]]:
        """(first, last) moment of each gradient list besides the working list: per micro-batch but the last, `summed`
        one for all, or on several ranks one per micro-batch."""
        spans = self.uses.spans[chunk]
        if summed and self.ranks > 1:
            return [(first, last) for _, first, last in spans]
        if summed:
            return [(spans[0][1], spans[-1][2])] if spans else []
        return [(first, last) for _, first, last in spans[:-1]]

    @property
    def drops_pinned_lists(self) -> bool:
        """Whether pinned chunks drop working lists between last gradient and update behind the barrier: gradients are
        in grad32, and the update writes the list from the master copy."""
        return self.barrier is not None and self.several and self.ranks == 1

    def all_in_grad32(self, chunk: int, summed: Collection[int]) -> bool:
        """No part of a moving chunk's gradient is in the working list at its update.

        summed: with a sum on the GPU by a mode.
        """
        return self.add_last or self.sums_on_gpu or chunk in summed

    def leaving(self, chunk: int, *, streamed: bool, summed: bool) -> Sequence[tuple[int, int, float]]:
        """(last moment, bytes, seconds down) of each gradient.

        summed: as a mode asks.
        """
        if summed and streamed:
            return ()
        sums = summed or self.sums_on_gpu
        last = self.uses.last_gradient(chunk)
        lists = [last] if sums else [end for _, end in self.lists_of(chunk, summed=False)]
        if not sums and not streamed:
            lists.append(last)
        size, seconds = self.down[chunk, "grad32" if sums else "param"]
        return [(moment, size, seconds) for moment in lists]

    def states_of(self, chunk: int) -> tuple[str, ...]:
        return self.layout.states_of(chunk).names

    def states_bytes(self, chunk: int, without: frozenset[str] = frozenset()) -> int:
        """Of a chunk that is trained, without these lists."""
        key = chunk, without
        if key not in self._states_bytes:
            names = (name for name in self.states_of(chunk) if name not in without)
            self._states_bytes[key] = sum(self.layout.payload_bytes(chunk, name) for name in names)
        return self._states_bytes[key]

    def visiting(self, chunk: int, *, held: bool) -> tuple[str, ...]:
        """Lists that come up for a streamed chunk's update.

        held: its sum is on the GPU already.
        """
        return (*(("grad32",) if self.several and not held else ()), *self.states_of(chunk))

    def visiting_bytes(self, chunk: int, *, held: bool = False) -> int:
        return sum(self.up[chunk, name][0] for name in self.visiting(chunk, held=held))

    def whole_bytes(self, chunk: int) -> int:
        """The working list of all ranks together."""
        return self.sizes[chunk] + self.remote[chunk]

    @cached_property
    def gather_s(self) -> list[float]:
        """Per chunk."""
        return [self.cost.collective_s(self.whole_bytes(c), c) for c in range(len(self.sizes))]

    @cached_property
    def update_block(self) -> list[int]:
        """Chunk -> block behind which an eager update on the GPU runs, -1 without one."""
        return [self._update_block(c) if self.uses.updated(c) else -1 for c in range(len(self.sizes))]

    def _update_block(self, chunk: int) -> int:
        """Of the last use; on several ranks, the first by whose end the gradient should be summed."""
        n = self.block_of[max(self.uses.last_gradient(chunk), self.uses.touched[chunk][-1])]
        if self.ranks == 1:
            return n
        left_s = self.gather_s[chunk]
        while left_s > 0 and n < len(self.blocks) - 1:
            n += 1
            left_s -= self.blocks[n].seconds
        return n
