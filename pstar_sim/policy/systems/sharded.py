"""An iteration of all_on_gpu and the ZeRO systems: their choices (shards.py), lowered by passes in a fixed order.

Every rank holds its slice of each chunk on the GPU, the host or disks, or all of it (shards.py). A chunk is made whole
some way ahead of a visit, or when the moment before it ends (sharded_visits.py, gathers.py); gradients leave in buckets
(buckets.py). optimizer.step() blocks, so iterations do not overlap; each policy writes its own from the parts here
(`Sharded.gpu_adam`, `cpu_adam`, `copy_up`, `stage`, `finish`).

On one rank there are no collectives, and chunks on the GPU do not move.

Hybrid sharding (HSDP) slices over a replica's GPUs alone, by default a node's; every replica has all slices, gathers
within itself, and adds its gradients to the others'. So the layout has fewer ranks than the machine, from which all
else follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.step import Place, Queue, Ref
from pstar_sim.dtypes import DTYPES
from pstar_sim.errors import CannotPlan
from pstar_sim.policy.kit.options import Option, either, one_of, whole_number
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.policy.passes.step_by_step.checks import check_beside_tide
from pstar_sim.policy.systems.buckets import Buckets
from pstar_sim.policy.systems.gathers import Gathers
from pstar_sim.policy.systems.shards import Scheme, Shards
from pstar_sim.units import format_bytes

# DeepSpeed's defaults, in parameters (deepspeed/runtime/zero/config.py).
REDUCE_BUCKET_PARAMS = 500_000_000
PREFETCH_PARAMS = 50_000_000
MAX_REUSE_PARAMS = 1_000_000_000
SUB_GROUP_PARAMS = 1_000_000_000

REPLICAS = Option(
    either(one_of("nodes"), whole_number(least=1)),
    "groups of GPUs with all slices each (HSDP); nodes: every node is one",
    1,
)


def slices_on(machine: Machine, replicas: int | str) -> int:
    """GPUs that slice a chunk in each replica. Raises CannotPlan unless replicas are equal groups of two or more
    neighbours, each within a node or of whole nodes."""
    ranks, local = machine.data_parallel_size, machine.local_ranks
    count = machine.nodes if isinstance(replicas, str) else replicas
    slices = ranks // count
    if slices * count != ranks or (local % slices if 0 < slices < local else 0) or (slices == 1 < ranks):
        each = [n for n in range(1, ranks) if ranks % n == 0 and (local % (ranks // n) == 0 or local * n <= ranks)]
        raise CannotPlan(
            f"replicas={replicas}: {ranks} GPUs in nodes of {local} are no {count} equal groups of two or more; "
            f"replicas can be {', '.join(map(str, each))}"
        )
    return slices


class Sharded:
    """The constructor writes residents, `run` moments, the other methods the update."""

    def __init__(self, b: Builder, scheme: Scheme) -> None:
        self.b = b
        self.shards = Shards(b, scheme)
        self.gathers = Gathers(self.shards)
        self.buckets = Buckets(self.shards)
        self.last_moment = len(b.workload.moments) - 1
        self.shards.reside(self.buckets.lists.host_list)
        self.barrier = -1  # the latest moment

    @without_garbage_collection()
    def run(self) -> None:
        at_once = self.shards.scheme.at_once
        for m in range(len(self.b.workload.moments)):
            waits = [*self.gathers.before(m), *self.buckets.before(m)]
            here = self.barrier = self.b.compute(m, after=waits)
            self.gathers.behind(m, here)
            self.buckets.behind(m, here)
            for c in self.buckets.complete.get(m, ()) if at_once else ():
                if m == self.b.uses.last_gradient(c):
                    self.gpu_adam(c)

    # The update, behind the barrier: optimizer.step().

    def before_update(self, c: int) -> list[int]:
        return [self.barrier, *self.buckets.arrived[c]]

    def cpu_adam(self, c: int, after: Iterable[int] = ()) -> int:
        """After all gradients that the norm needs."""
        return self.b.cpu_adam(c, after=[*self.before_update(c), *self.buckets.lists.all_there(), *after])

    def gpu_adam(self, c: int, after: Iterable[int] = (), via: str | None = None) -> int:
        """After all gradients that the norm needs."""
        ready = [*self.before_update(c), *self.buckets.lists.all_there(), *after]
        return self.b.gpu_adam(c, after=ready, via=via)

    def update_resident(self, c: int) -> list[int]:
        """Returns the steps that bring its parameters home."""
        b, m = self.b, self.last_moment
        if self.shards.lives_on_gpu(c):
            return [self.gpu_adam(c)]
        there = self.shards.in_place(c)  # the gradient holds the memory of the parameters
        room = [] if there else [b.alloc(Queue.COMPUTE, c, "param", Place.GPU, m, self.before_update(c))]
        down = b.writeback(c, "param", m, [self.gpu_adam(c, room)])
        return [b.drop(Queue.D2H, c, m, [down])]

    def stage(self, c: int, room: Iterable[int]) -> tuple[int, int]:
        """States come up, are updated and go down: (gpu_adam, the step with which they have left).

        room: to end first.
        """
        b, m = self.b, self.last_moment
        before = [*self.before_update(c), *room]
        states = b.layout.states_of(c).names
        lists = [name for name in (*states, "grad32") if name in b.uses.home_lists(c)]
        update = self.gpu_adam(c, [b.fetch(c, m, before, list_name=name) for name in lists])
        gone = update
        for name in lists:
            down = [b.writeback(c, name, m, [update])] if name in states else [update]
            gone = b.drop(Queue.D2H, c, m, down, name)
        return update, gone

    def copy_up(self, c: int, after: Iterable[int], *, pinned: bool = True) -> list[int]:
        """Copies to where parameters live; returns the steps, none on the host."""
        if not self.shards.lives_on_gpu(c):
            return []
        return [self.b.fetch(c, 0, after=after, via=None if pinned else self.shards.unpinned)]

    def finish(self, last: Iterable[int], updated: Mapping[int, list[int]]) -> None:
        """Whole chunks are whole again, before the next iteration.

        last: they end optimizer.step(), which a stage that trains nothing has not: its last moment ends it.
        updated: chunk -> steps of its own slice.
        """
        ends = list(last) or [self.barrier]
        if self.shards.ranks > 1:
            ends += [self.gathers.gather_updated(c, updated[c]) for c in sorted(self.shards.kept & set(updated))]
        for step in self.gathers.opening:
            self.b.wait(step, *(Ref(i, 1) for i in ends))

    # Buffers beyond the lists of the plan.

    def hold(self, name: str, place: Place, size_bytes: int) -> None:
        """A buffer of 0 or fewer bytes is left out."""
        if size_bytes > 0:
            self.b.buffers.append((name, place, size_bytes))

    def hold_on_host(self, name: str, total_bytes: int) -> None:
        """A buffer that raises the host's bytes to what the system is known to take (without activations)."""
        self.hold(name, Place.HOST, total_bytes + self.b.stash_bytes - self.b.held_bytes(Place.HOST))

    def hold_bucket(self) -> None:
        """With the bucket's allocated size."""
        b = self.b
        width = DTYPES[b.workload.dtype].bytes
        whole = sum(b.layout.whole_bytes(c) for c in self.shards.trained)  # no bucket holds more than all gradients
        allocated = min(self.shards.scheme.bucket_params * width, whole)
        self.hold("gradient bucket", Place.GPU, allocated - self.buckets.peak_bytes)

    def check_gpu_room(self, what: str) -> None:
        """Raise DoesNotFit if what the GPU always holds leaves no room for the tide."""
        held = self.b.held_bytes(Place.GPU)
        check_beside_tide(self.b, held, f"{what}, {format_bytes(held)},")

    def describe_moves(self) -> str:
        ranks = self.shards.ranks
        if ranks == 1:
            return "one rank: no collectives"
        return (
            f"{self.b.ranks} ranks: each holds 1/{ranks} of every chunk; {format_bytes(self.gathers.bytes_gathered)} "
            "are gathered per iteration"
        )
