"""Ground: what the asynchronous policies know of a job before they decide anything.

Chunks and their uses, blocks of moments (the positions of the compute queue), what each block holds besides chunks, how
many chunks could be pinned at most, and whether the job fits at all. Decides nothing and plays nothing.
"""

from __future__ import annotations

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.draft import Charge
from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Settings
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.family.modes import ModeFacts
from pstar_sim.policy.family.pins import PinFacts, most_pins
from pstar_sim.policy.family.residency import blocks_of
from pstar_sim.policy.kit.builder import Builder
from pstar_sim.policy.kit.charges import Charges
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.room import describe_moment
from pstar_sim.policy.passes.stashes import stash_cuts
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Phase, Workload

__all__ = ["Ground"]

SUMS_TAKE = 1.5
"""How long a gradient's sum over the ranks is reckoned to take, in times of it running alone."""


class Ground:
    """The facts for one workload, machine, settings and point. `builder` collects the steps once a program is chosen.

    candidates: chunks that could be pinned, in the order in which they would be. tide: non-model bytes to reckon with
    in each moment. touched: chunk -> blocks that need it. small_bytes: what the small chunks hold on the GPU for ever.
    """

    def __init__(
        self,
        name: str,
        workload: Workload,
        machine: Machine,
        settings: Settings,
        point: Point,
        layout: Layout | None = None,
    ) -> None:
        self.name = name
        self.point = point
        self.workload = workload
        self.machine = machine
        self.settings = settings
        self.builder = b = Builder(name, workload, machine, settings, layout=layout)
        self.uses = uses = b.uses
        self.cost = b.cost
        self.charges = Charges(b.cost)
        self.several = workload.micro_batches > 1
        self.barrier = settings.barrier(workload.dtype) or ("barrier=on" if point.barrier else None)
        self.add_last = self.several and settings.clip  # the norm is that of the accumulated gradient
        self.follow_tide = point.capacity == "tide"
        peak = max(uses.tide)
        self.tide = uses.tide if self.follow_tide else (peak,) * len(uses.tide)
        chunks = [c.index for c in b.layout.chunks]
        self.small = frozenset(c for c in chunks if b.layout.chunks[c].small)
        self.moving = [c for c in chunks if c not in self.small]
        self.sizes = [b.layout.payload_bytes(c, "param") for c in chunks]
        self.ranks = b.layout.ranks
        self.remote = [b.layout.payload_bytes(c, "remote") if self.ranks > 1 else 0 for c in chunks]
        # In the order in which they would be pinned.
        self.candidates = sorted((c for c in self.moving if uses.updated(c)), key=lambda c: (uses.first_use(c), c))
        self.permanent = [b.uses.home_bytes(c) for c in chunks]  # working list and states
        self.small_bytes = sum(self.permanent[c] + self.remote[c] for c in self.small)
        seconds = b.cost.moments_s
        # A gradient list opens and closes, and an eager GPU Adam follows, at the edge of a block.
        cuts: set[int] = set(stash_cuts(workload))
        for c in chunks:
            spans = uses.spans[c] if c not in self.small or self.ranks > 1 else uses.spans[c][-1:]
            for n, (_, first, last) in enumerate(spans):
                if n < len(spans) - 1:
                    cuts.add(first)
                if c not in self.small or self.barrier is None:
                    cuts.add(last + 1)
        self.blocks = blocks_of(uses, seconds, self.tide, self.small, frozenset(cuts))
        self.block_of = [n for n, block in enumerate(self.blocks) for _ in range(block.first, block.last + 1)]
        self.touched = [
            sorted({self.block_of[m] for m in uses.touched[c]}) if c not in self.small else [] for c in chunks
        ]
        # Block -> (chunk, bytes) of the gradient lists that are open in it.
        self.gradient_lists: list[list[tuple[int, int]]] = [[] for _ in self.blocks]
        for c in self.moving if self.ranks == 1 else chunks:
            size = self.gradient_bytes(c) if uses.updated(c) else 0
            for _, first, last in uses.spans[c][:-1]:
                for n in range(self.block_of[first], self.block_of[last] + 1):
                    self.gradient_lists[n].append((c, size))
        # Updated small chunks on several ranks: first and last block in which the others' slices are here.
        self.small_visits: dict[int, tuple[int, int]] = {}
        if self.ranks > 1:
            for c in sorted(self.small):
                if uses.updated(c):
                    self.small_visits[c] = (self.block_of[uses.first_use(c)], self.block_of[uses.touched[c][-1]])
        # Lists that come to the GPU for the update of a streamed chunk.
        self.visiting_lists = (*(("grad32",) if self.several else ()), *b.layout.state_lists)
        # (chunk, list) -> its bytes, and seconds of a copy to the GPU or from there.
        self.up: dict[tuple[int, str], tuple[int, float]] = {}
        self.down: dict[tuple[int, str], tuple[int, float]] = {}
        for c in self.moving:
            for name in ("param", *(self.visiting_lists if uses.updated(c) else ())):
                size = b.layout.payload_bytes(c, name)
                self.up[c, name] = (size, b.cost.transfer_s(size, "h2d"))
                self.down[c, name] = (size, b.cost.transfer_s(size, "d2h"))
        # Block -> bytes by which the tide rises to it, and falls behind it.
        tides = [block.tide_bytes for block in self.blocks]
        self.rises = [max(0, tide - tides[n - 1]) for n, tide in enumerate(tides)]
        self.falls = [max(0, tide - tides[(n + 1) % len(tides)]) for n, tide in enumerate(tides)]
        self.block_charges = [
            Charge(block.seconds, rise, fall) for block, rise, fall in zip(self.blocks, self.rises, self.falls)
        ]
        self.update_block = [self._update_block(c) if uses.updated(c) else -1 for c in chunks]

    # Which numbers of pins to try.
    def gradient_bytes(self, chunk: int) -> int:
        """Bytes on the GPU of a gradient list of its own, with several ranks that of the whole chunk."""
        b = self.builder
        return b.layout.payload_bytes(chunk, "grad") + (
            b.layout.payload_bytes(chunk, "grad_remote") if self.ranks > 1 else 0
        )

    def visiting_bytes(self, chunk: int) -> int:
        """Bytes that come to the GPU for the update of a streamed chunk."""
        return sum(self.up[chunk, name][0] for name in self.visiting_lists)

    def whole_bytes(self, chunk: int) -> int:
        """The working list of all ranks together."""
        return self.sizes[chunk] + self.remote[chunk]

    def _update_block(self, chunk: int) -> int:
        """Block behind which an eager update on the GPU runs: that of its last use; on several ranks the first one by
        whose end the gradient should have been summed."""
        n = self.block_of[max(self.uses.last_gradient(chunk), self.uses.touched[chunk][-1])]
        if self.ranks == 1:
            return n
        left_s = SUMS_TAKE * self.cost.collective_s(self.whole_bytes(chunk))
        while left_s > 0 and n < len(self.blocks) - 1:
            n += 1
            left_s -= self.blocks[n].seconds
        return n

    # How many chunks can be pinned.

    def most_pins(self) -> int:
        """The most chunks, in the order of `candidates`, whose working list and states could stay on the GPU."""
        budget = self.machine.gpu_budget_bytes
        room = [
            budget - self.small_bytes - block.tide_bytes - self.gradients(n) - sum(self.remote[c] for c in block.chunks)
            for n, block in enumerate(self.blocks)
        ]
        position = {c: n for n, c in enumerate(self.candidates)}
        need = [tuple(position[c] for c in block.chunks if c in position) for block in self.blocks]
        fixed = [sum(self.sizes[c] for c in block.chunks if c not in position) for block in self.blocks]
        return most_pins(
            [self.sizes[c] for c in self.candidates],
            [self.permanent[c] for c in self.candidates],
            need,
            [left - beside for left, beside in zip(room, fixed)],
        )

    def least_room_bytes(self) -> int:
        """Bytes that the tide, gradient lists and small chunks leave for all others in the tightest block."""
        budget = self.machine.gpu_budget_bytes - self.small_bytes
        return min(
            budget - block.tide_bytes - self.gradients(n) - sum(self.remote[c] for c in block.chunks)
            for n, block in enumerate(self.blocks)
        )

    def pin_facts(self) -> PinFacts:
        """What the closed form for the number of pins needs to know."""
        uses, cost, order = self.uses, self.cost, self.candidates
        adds = self.workload.micro_batches - (0 if self.add_last else 1) if self.several else 0
        return PinFacts(
            first=[uses.first_use(c) for c in order],
            final=[uses.last_gradient(c) for c in order],
            working_bytes=[self.sizes[c] for c in order],
            pinned_bytes=[self.permanent[c] for c in order],
            adam_s=[cost.cpu_adam_s(c) for c in order],
            gpu_adam_s=[cost.gpu_adam_s(c) for c in order],
            add_s=[cost.cpu_add_s(c) * adds for c in order],
            down_s=[cost.transfer_s(self.sizes[c], "d2h") for c in order],
            up_s=[cost.transfer_s(self.sizes[c], "h2d") for c in order],
            moments_s=cost.moments_s,
            barrier=self.barrier is not None,
            room_bytes=self.least_room_bytes(),
            gaps=2 * self.workload.micro_batches - 1,
        )

    # Room.
    def mode_facts(self) -> ModeFacts:
        """What the roofline over pinned and streamed chunks needs to know."""
        w, link = self.workload, self.cost.link
        states = [self.visiting_bytes(c) for c in self.candidates]
        last = w.micro_batches - 1
        turn = next(
            (i for i, m in enumerate(w.moments) if m.micro_batch == last and m.phase is not Phase.FWD), len(w.moments)
        )
        largest = max((self.sizes[c] for c in self.candidates), default=0)
        return ModeFacts(
            pins=self.pin_facts(),
            states_bytes=states,
            h2d_bytes_per_s=link.h2d_bytes_per_s,
            d2h_bytes_per_s=link.d2h_bytes_per_s,
            dram_bytes_per_s=self.machine.host.dram_bytes_per_s / self.machine.local_ranks,
            duplex=link.duplex,
            dram_adam_bytes=[self.cost.cpu_adam_bytes(c) for c in self.candidates],
            passing_bytes=max(states, default=0) + largest,
            last_room_bytes=self.machine.gpu_budget_bytes - self.small_bytes - self.tide[-1],
            turn_s=sum(self.cost.moments_s[:turn]),
            net_s=self._least_net_s(),
        )

    def _least_net_s(self) -> float:
        """Each updated chunk is gathered once, and its gradient summed in each micro-batch."""
        if self.ranks == 1:
            return 0.0
        each = sum(self.cost.collective_s(self.whole_bytes(c)) for c in self.candidates)
        return each * (1 + self.workload.micro_batches)

    def gradients(self, n: int, pinned: frozenset[int] = frozenset()) -> int:
        """Bytes of the gradient lists that block n needs, of chunks that are not pinned."""
        if self.ranks > 1:  # they arrive whole, wherever they are added up
            return sum(size for _, size in self.gradient_lists[n])
        return sum(size for c, size in self.gradient_lists[n] if c not in pinned)

    def check_gpu(self) -> None:
        """Raise DoesNotFit if the worst block needs more than the budget with nothing pinned."""
        budget = self.machine.gpu_budget_bytes
        worst, short = 0, -budget
        for n, block in enumerate(self.blocks):
            own = sum(self.whole_bytes(c) for c in block.chunks) + self.gradients(n)
            over = self.small_bytes + own + block.tide_bytes - budget
            if over > short:
                worst, short = n, over
        if short <= 0:
            return
        block = self.blocks[worst]
        moment = max(range(block.first, block.last + 1), key=lambda m: self.tide[m])
        own = sum(self.whole_bytes(c) for c in block.chunks)
        parts = [
            describe_moment(self.workload, moment)
            if self.follow_tide
            else f"the tide's peak, {format_bytes(max(self.tide))}, at every moment"
        ]
        if block.chunks:
            number = f"{len(block.chunks)} chunk{'s' if len(block.chunks) > 1 else ''}"
            parts.append(f"{number} used in moment {moment}, {format_bytes(own)}")
        if self.gradients(worst):
            parts.append(f"gradient lists, {format_bytes(self.gradients(worst))}")
        if self.small_bytes:
            parts.append(f"small parameters and their states, {format_bytes(self.small_bytes)}")
        raise DoesNotFit(
            policy=self.name, place="gpu", needed_bytes=budget + short, available_bytes=budget, what="; ".join(parts)
        )

    def host_bytes(self, pinned: frozenset[int]) -> tuple[int, int]:
        """(held for ever, needed to move) on the host."""
        held = sum(self.permanent[c] for c in self.moving if c not in pinned)
        held += self.builder.stash_bytes
        passing = 0
        if self.several:
            passing = max(
                (self.builder.layout.payload_bytes(c, "grad") for c in self.candidates if c not in pinned), default=0
            )
        return held, passing

    def check_host(self, pinned: frozenset[int]) -> None:
        """Raise DoesNotFit if the host has no room for what is not pinned."""
        held, passing = self.host_bytes(pinned)
        budget = self.machine.host_budget_bytes
        if held + passing > budget:
            raise DoesNotFit(
                policy=self.name,
                place="host",
                needed_bytes=held + passing,
                available_bytes=budget,
                what=f"working list and optimizer states of all chunks but {len(pinned)} pinned ones"
                + (", accumulated gradients" if self.several else "")
                + (", offloaded activations" if self.workload.stashes else ""),
            )

    def span(self, chunk: int, number: int) -> tuple[int, int]:
        """First and last moment in which a gradient of its `number`-th micro-batch becomes final."""
        _, first, last = self.uses.spans[chunk][number]
        return first, last
