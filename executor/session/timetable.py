"""A plan's steps and tables by moment, compiled before anything runs."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pstar_sim.core.effects import gradient_list, needed, tide_at_cut
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Place, Queue
from pstar_sim.errors import PlanError
from pstar_sim.workload.optimizers import MASTER_LIST
from pstar_sim.workload.workload import Phase, Workload


class Timetable:
    """A moment is an index into the workload's, a step into the plan's.

    peaks: moment -> non-model bytes.
    cut_tide: between two iterations.
    between: moment -> non-model bytes between it and the next, over the border.
    cut: (place, chunk, list) resident between two iterations.
    uses: chunk -> moments that read it.
    on_demand_only: the plan has no steps.
    before: moment -> other compute steps before it.
    rows: moment -> its `before`, `compute`, `reads`, `peaks` and `due`.
    following: moment -> next moment's event, "" after the last, and everywhere with stashes, where opening a moment
        takes more than its row.
    tail: compute steps after the last moment.
    tied: trainable tensors whose gradient may come in parts: tied, or of a module called repeatedly.
    due: moment -> tensors whose gradient is final.
    early: moment -> tensors whose gradient comes again later in the micro-batch.
    goes_to: (chunk, micro-batch) -> list for gradients.
    moves: a step moves a working list off the gpu, or gradients replace its parameters.
    sums: net steps after which sums over the ranks are whole.
    first_complete: moment in which the first chunk has all its gradients.
    permanent_bytes: on the gpu, cannot leave between two iterations.
    """

    def __init__(self, plan: Plan) -> None:
        w, layout = plan.workload, plan.layout
        self.names = [m.name for m in w.moments]
        self.peaks = [m.peak_bytes for m in w.moments]
        self.cut_tide = tide_at_cut(self.peaks)
        self.between = [min(here, self.peaks[(m + 1) % len(self.peaks)]) for m, here in enumerate(self.peaks)]
        self.cut = frozenset((r.place, r.chunk, r.list) for r in plan.initial)
        self.stashes = len(w.stashes)
        self.micro_batch = [m.micro_batch for m in w.moments]
        self.chunk_of = layout.chunk_of
        self.tensors_of = [[s.tensor for s in c.slots] for c in layout.chunks]
        self.trainable = {t for t in self.chunk_of if not w.tensors[t].frozen}
        self.tied = self.trainable & _read_often(w)
        self.reads = needed(layout, w)
        self.uses = _uses(self.reads, len(layout.chunks))
        self.compute, self.before, self.tail = _compute_steps(plan)
        self.on_demand_only = not self.compute
        self.following = [*(name if not w.stashes else "" for name in self.names[1:]), ""]
        self.micro_batches = w.micro_batches
        self.relayed = w.relayed
        self.goes_to = gradient_list(plan)
        self.moves = not self.on_demand_only and (_moves(plan, self.cut) or "param" in self.goes_to.values())
        self.sums = _sums(plan)
        self._final = {(self.micro_batch[m], t): m for m, tensors in enumerate(w.gradients) for t in tensors}
        self.due = self._due(w.gradients)
        self.early = [set(tensors) - self.due[m] for m, tensors in enumerate(w.gradients)]
        self.rows = list(zip(self.before, self.compute, self.reads, self.peaks, self.due))
        self.first_complete = min(_complete(self._final, self.chunk_of).values(), default=len(w.moments))
        self.permanent_bytes = _permanent_bytes(plan, self.cut)
        self._by_name = _by_name(self.names, self.reads)
        self._by_name_next = _by_name(self.names, self.reads[1:])

    def _due(self, gradients: Sequence[Iterable[int]]) -> list[set[int]]:
        return [{t for t in tensors if self.final_in(m, t) == m} for m, tensors in enumerate(gradients)]

    def final_in(self, moment: int, tensor: int) -> int:
        """The moment in the micro-batch of `moment` in which the tensor's gradient is final."""
        return self._final.get((self.micro_batch[moment], tensor), -1)

    def gradient_list(self, moment: int, tensor: int) -> str:
        return self.goes_to[self.chunk_of[tensor], self.micro_batch[moment]]

    def read_in(self, name: str) -> set[int]:
        """Chunks that moments of this name read."""
        return self._by_name.get(name, set())

    def read_behind(self, name: str) -> set[int]:
        """Chunks read right after moments of this name: theirs if the closing event does not come."""
        return self._by_name_next.get(name, set())

    def next_of_name(self, name: str, position: int) -> int | None:
        """From `position` on, over the border of the iteration."""
        return next((m for m in self._from(position) if self.names[m] == name), None)

    def _from(self, position: int) -> Iterator[int]:
        yield from range(position, len(self.names))
        yield from range(position)

    def until_use(self, chunk: int, position: int) -> int:
        """Moments until the chunk is read again, over the border; a large number if never."""
        uses, count = self.uses[chunk], len(self.names)
        if not uses:
            return 2 * count
        at = bisect.bisect_right(uses, position)
        return uses[at] - position if at < len(uses) else uses[0] + count - position


def _read_often(w: Workload) -> set[int]:
    """Read by several moments of a forward, tied ones included; each gives a part of the gradient."""
    ahead = [reads for m, reads in zip(w.moments, w.reads) if m.micro_batch == 0 and m.phase is Phase.FWD]
    found = Counter(t for reads in ahead for t in reads)
    return {t for t, count in found.items() if count > 1} | {t.tied_to for t in w.tensors if t.tied_to is not None}


def _compute_steps(plan: Plan) -> tuple[list[int], list[list[int]], list[int]]:
    compute: list[int] = []
    before: list[list[int]] = []
    waiting: list[int] = []
    for i, step in enumerate(plan.steps):
        if step.queue is not Queue.COMPUTE:
            continue
        if step.kind is not Kind.COMPUTE:
            waiting.append(i)
            continue
        if step.moment != len(compute):
            raise PlanError(f"compute step {step.id} is of moment {step.moment}, not {len(compute)}")
        compute.append(i)
        before.append(waiting)
        waiting = []
    if compute and len(compute) != len(plan.workload.moments):
        raise PlanError(f"the plan has compute steps for {len(compute)} of {len(plan.workload.moments)} moments")
    return compute, before, waiting


def _uses(reads: Sequence[Iterable[int]], chunks: int) -> list[list[int]]:
    uses: list[list[int]] = [[] for _ in range(chunks)]
    for m, read in enumerate(reads):
        for chunk in read:
            uses[chunk].append(m)
    return uses


def _by_name(names: Sequence[str], reads: Sequence[Iterable[int]]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for name, chunks in zip(names, reads):
        found.setdefault(name, set()).update(chunks)
    return found


def _sums(plan: Plan) -> list[int]:
    last = Kind.REDUCE_SCATTER if plan.layout.ranks > 1 else Kind.GATHER
    return [i for i, step in enumerate(plan.steps) if step.queue is Queue.NET and step.kind is last]


def _complete(final: dict[tuple[int, int], int], chunk_of: dict[int, int]) -> dict[int, int]:
    complete: dict[int, int] = {}
    for (_, tensor), moment in final.items():
        chunk = chunk_of[tensor]
        complete[chunk] = max(moment, complete.get(chunk, -1))
    return complete


def _moves(plan: Plan, cut: frozenset[tuple[Place, int, str]]) -> bool:
    stays = all((Place.GPU, c.index, "param") in cut for c in plan.layout.chunks)
    return not stays or any((s.kind, s.list) == (Kind.DROP, "param") for s in plan.steps)


def _permanent_bytes(plan: Plan, cut: frozenset[tuple[Place, int, str]]) -> int:
    pinned = {chunk for place, chunk, name in cut if place is Place.GPU and name == MASTER_LIST}
    on_host = {chunk for place, chunk, name in cut if place is Place.HOST and name in ("param", MASTER_LIST)}
    total = sum(size for _, place, size in plan.buffers if place is Place.GPU)
    for place, chunk, name in cut:
        if chunk >= 0 and place is Place.GPU and (name != "param" or chunk in pinned or chunk not in on_host):
            total += plan.layout.payload_bytes(chunk, name)
    return total
