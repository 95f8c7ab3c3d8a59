"""patrickstar: the schedule of PatrickStar (Fang et al., 2021) as published, from its code.

Reproduced:

- The capacity for chunks follows the tide: the budget, less the larger non-model data of this moment and the next.
  Forward and backward also reserve one working-list chunk (k * 2 * CS bytes in PatrickStar's code, k = 1 on one GPU).
- Chunks move on demand, and nothing overlaps: the time of an iteration is the sum of computing, copying and updating.
- Belady's rule makes room, from the recorded moments of use, again from the first behind the last.
- A payload exists in one place. A fetch frees the host copy; an eviction writes back, clean chunks too.
- After each moment, chunks beyond the budget less the non-model data of the next moment are evicted. This check ignores
  the reserve.
- Adam runs after the backward pass in chunk order. The states of the first chunks live on the GPU if there is margin
  space. Their number is (budget - peak non-model - all working lists) / states of a chunk * 0.8. The counter rule
  rounds this number up and subtracts 1.
- Others have CPU Adam. If the working list is on the GPU, the gradient goes down in 2 bytes per parameter and the
  parameters come up in 4, through a GPU buffer of one fp32 chunk that is held throughout. Otherwise Adam works on the
  host's lists.

On P ranks:

- Chunks form groups of P. Each rank owns one chunk of a group. Here a group is one unit of P * CS elements of which
  each rank holds 1/P: the same bytes in the same places.
- For a tensor of a group that is elsewhere, each rank brings its own chunk, and all P are gathered synchronously.
- The remote chunks of a group are dropped when all its tensors are HOLD_AFTER_FWD. So a group within one checkpoint
  segment is gathered a third time. Gradients are reduce-scattered when all tensors are HOLD_AFTER_BWD.
- k = P: the reserve is a group. Margin space leaves out the rank's own chunks and the remote chunks of one group.
- With msc=on ("memory saving communication") the owner broadcasts a chunk, and chunks are reduced to their owner one by
  one. The unit is one chunk and k = 1. Here each rank still holds 1/P of a chunk. The broadcast is timed as the gather
  of P slices, which is at most as long.

Not reproduced:

- It may evict states from the GPU in forward and backward. Here chunks with states on the GPU, and small chunks, stay.
  The limit of the ADAM phase (16 * CS) then has no effect.
- It has no gradient accumulation. Here gradients of several micro-batches are sent down and added.
- On several GPUs its reserve in backward is k * k, because k is multiplied twice. Here it is k. Remote chunks that have
  to make room are dropped here; PatrickStar may write them back.
- The rules are those of v0.4.3.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Layout, build_layout
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place, Ref
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.facts import facts_of
from pstar_sim.policy.kit.options import Option, switch
from pstar_sim.policy.kit.room import describe_moment
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.policy.passes.step_by_step.gradient_lists import GradientLists
from pstar_sim.policy.passes.step_by_step.on_all_ranks import gathered
from pstar_sim.policy.systems.patrickstar_groups import Groups
from pstar_sim.policy.systems.patrickstar_memory import Homes, Memory, homes_of
from pstar_sim.units import format_bytes, format_count
from pstar_sim.workload.workload import Workload

__all__ = ["CAPABILITIES", "OPTIONS", "patrickstar"]

CAPABILITIES = Capabilities(disks=False, one_at_a_time=True)
MOST_ITERATIONS = 8  # limit of the iterations until the chunks on the GPU at the cut repeat

OPTIONS = {
    "msc": Option(
        switch(), "communicate chunk by chunk (memory saving): one chunk of room instead of one per rank", False
    )
}


def patrickstar(workload: Workload, machine: Machine, settings: Settings, *, msc: bool = False) -> Plan:
    """Returns the plan of PatrickStar's steady iteration.

    msc: whether to use its memory saving communication (on several ranks).

    Raises DoesNotFit if a moment's chunks, its non-model data and the reserve exceed the GPU, or if parameters and
    states exceed the host. Raises CannotPlan for more ranks than chunks.
    """
    layout = _layout(workload, settings, machine.data_parallel_size, msc)
    homes = homes_of(facts_of(workload, layout), machine.gpu_budget_bytes)
    unit = "group" if layout.ranks > 1 and not msc else "chunk"

    def iterate(resident: frozenset[int]) -> _SerialIteration:
        b = Builder("patrickstar", workload, machine, settings, layout=layout)
        iteration = _SerialIteration(b, homes, resident, unit)
        iteration.run()
        return iteration

    seen: list[frozenset[int]] = [frozenset()]
    for _ in range(MOST_ITERATIONS):
        iteration = iterate(seen[-1])
        end = iteration.memory.resident
        if end == seen[-1]:
            break
        seen.append(end)
    else:  # the iterations repeat only after several: end each iteration where it began
        iteration = iterate(seen[-1])
        iteration.restore(seen[-1])
    return iteration.plan(rounds=len(seen))


def _layout(workload: Workload, settings: Settings, ranks: int, msc: bool) -> Layout:
    single = build_layout(workload, chunk_bytes=settings.chunk_bytes, sums=settings.sums)
    if ranks == 1:
        return single
    if any(chunk.spread > 1 for chunk in single.chunks):
        raise CannotPlan(
            "patrickstar: a group has a chunk of each rank, and ranks with other experts have none; leave ep out"
        )
    count = sum(not c.small for c in single.chunks)
    if count < ranks:
        raise CannotPlan(
            f"patrickstar: {ranks} ranks but {format_count(count, 'chunk')} of "
            f"{format_bytes(single.chunk_bytes)}; each rank owns whole chunks, so take smaller chunks (chunk_bytes, "
            "--chunk) or fewer ranks"
        )
    return build_layout(
        workload, chunk_bytes=single.chunk_bytes * (1 if msc else ranks), ranks=ranks, sums=settings.sums
    )


class _SerialIteration:
    """From a given set of chunks on the GPU, one by one."""

    def __init__(self, b: Builder, homes: Homes, resident: Collection[int], unit: str) -> None:
        self._b = b
        self._homes = homes
        self.memory = Memory(b, homes, resident, unit)
        self._groups = Groups(b.uses) if b.ranks > 1 else None
        updated = [c.index for c in b.layout.chunks if b.uses.updated(c.index)]
        stay = homes.small | homes.pinned
        self._gradients = GradientLists(b, updated, last=False, stay=stay, one_by_one=True)

    def run(self) -> None:
        """Raises DoesNotFit with the worst moment's need, not the first's that lacks room."""
        try:
            for m in range(len(self._b.workload.moments)):
                self._moment(m)
        except DoesNotFit as short:
            raise self._shortest(short) from None
        if self._groups is not None:
            self.memory.disperse_all()
        self._adam()

    def _moment(self, m: int) -> None:
        b, memory, groups = self._b, self.memory, self._groups
        memory.begin(m)
        if groups is not None and groups.begin(m):
            memory.disperse_all()
        needed = tuple(c for c in b.uses.by_moment[m] if c in self._homes.brought_bytes)
        memory.trim(needed)
        for c in needed:
            memory.bring(c, needed)
        for c in self._gradients.opens.get(m, ()):
            self._open_gradient(c, needed)
        used = memory.used_bytes
        if used + b.uses.tide[m] > memory.budget_bytes:
            what = f"{describe_moment(b.workload, m)} beside {format_bytes(used)} that cannot be evicted"
            b.check_room(Place.GPU, used + b.uses.tide[m], what)
        memory.last = b.compute(m, memory.then())
        for c in self._gradients.closes.get(m, ()):
            self._close_gradient(c)
        if groups is not None:
            self._give_up(groups.end(m))

    def _open_gradient(self, c: int, needed: Collection[int]) -> None:
        memory, size = self.memory, self._gradients.bytes_of(c)
        memory.make_room(size, needed)
        memory.last = self._gradients.open(c, memory.moment, memory.then())

    def _close_gradient(self, c: int) -> None:
        memory = self.memory
        memory.last = self._gradients.close(c, memory.moment, memory.then())

    def _give_up(self, chunks: Collection[int]) -> None:
        """A group is reduced after its last gradient, else dropped."""
        for c in chunks:
            if self.memory.moment == self._b.uses.last_gradient(c):
                self.memory.reduce(c)
            elif c in self.memory.whole and c not in self._homes.small:
                self.memory.disperse(c)

    def _shortest(self, short: DoesNotFit) -> DoesNotFit:
        needed_bytes, m = self._most_needed()
        if short.place != "gpu" or needed_bytes <= short.needed_bytes:
            return short
        return DoesNotFit(
            policy="patrickstar",
            place="gpu",
            needed_bytes=needed_bytes,
            available_bytes=short.available_bytes,
            what=f"{describe_moment(self._b.workload, m)}; its chunks and gradient lists; "
            f"{self.memory.describe_fixed()}",
        )

    def _most_needed(self) -> tuple[int, int]:
        b, lists = self._b, self._gradients
        gradients, most = 0, (0, 0)
        for m, needed in enumerate(b.uses.by_moment):
            gradients += sum(lists.bytes_of(c) for c in lists.opens.get(m, ()))
            chunks = sum(self._homes.brought_bytes.get(c, 0) for c in needed)
            reserve = b.layout.chunk_bytes if chunks or gradients else 0
            beside = self.memory.non_model_bytes(m) + reserve
            most = max(most, (self.memory.fixed_bytes + chunks + gradients + beside, m))
            gradients -= sum(lists.bytes_of(c) for c in lists.closes.get(m, ()))
        return most

    def _adam(self) -> None:
        b, memory, uses = self._b, self.memory, self._b.uses
        homes = self._homes
        offloaded = [c for c in homes.movable if uses.updated(c)]
        if self._gradients.add_last:
            for c in offloaded:
                self._send_last(c)
                memory.last = self._gradients.add_last_of(c, memory.then())
        for c in sorted((*filter(uses.updated, homes.small), *homes.pinned, *offloaded)):
            if c in homes.small or c in homes.pinned:
                memory.last = b.gpu_adam(c, memory.then())
                if c in homes.small:
                    memory.last = gathered(b, c, 0, memory.last)
                continue
            if not self._gradients.add_last:
                self._send_last(c)
            memory.last = b.cpu_adam(c, memory.then())
            if c in memory.on_gpu:
                memory.fetch_updated(c)

    def _send_last(self, c: int) -> None:
        if c in self.memory.on_gpu:
            self.memory.send_gradient(c)

    def restore(self, start: frozenset[int]) -> None:
        """Until the working lists on the GPU are `start`."""
        for c in sorted(self.memory.resident - start):
            self.memory.evict(c)
        for c in sorted(start - self.memory.resident):
            self.memory.fetch(c)

    def plan(self, rounds: int) -> Plan:
        """rounds: until the chunks on the GPU repeated.

        Raises DoesNotFit if the host has no room.
        """
        b, homes, memory = self._b, self._homes, self.memory
        b.check_room(
            Place.HOST,
            memory.host_peak_bytes,
            f"optimizer states of {len(homes.movable)} chunks and the working lists that are not on the GPU",
        )
        b.wait(b.steps[0].id, Ref(memory.last, 1))
        b.choices.update(_choices(b, homes, memory.unit))
        if rounds > MOST_ITERATIONS:
            b.choices["cycle"] = (
                "the chunks on the GPU repeat only after several iterations; each iteration ends by moving them back"
            )
        plan = b.plan()
        seconds = zip(plan.steps, b.cost.step_costs(plan).seconds)
        alone_s = sum(took_s for step, took_s in seconds if step.stash is None)
        return replace(plan, predictions={**plan.predictions, "policy_iteration_s": alone_s})


def _choices(b: Builder, homes: Homes, unit: str) -> dict[str, object]:
    choices: dict[str, object] = {
        "capacity": "GPU budget less the higher non-model peak of this moment and the next, less a reserve of one "
        f"{unit} ({format_bytes(b.layout.chunk_bytes)})",
        "margin_space": f"{format_bytes(homes.margin_bytes)}: states of {len(homes.pinned)} chunks on the GPU (as many "
        "as 0.8 of it holds, rounded up, less one)",
        "moves": "on demand and synchronous; evicted chunks are written back, clean ones too",
    }
    if b.ranks > 1:
        size = (
            "single chunks (memory saving communication)" if unit == "chunk" else f"of {b.ranks} chunks, one per rank"
        )
        choices["groups"] = f"{size}, gathered for use and given up when all their tensors were used"
    choices["adam"] = "after backward, in chunk order; nothing overlaps it"
    if b.workload.micro_batches > 1:
        choices["micro_batches"] = "not in the original: gradients are sent down and added synchronously"
    return choices
