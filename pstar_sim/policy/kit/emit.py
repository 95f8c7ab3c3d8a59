"""Steps into a plan: the builder every policy writes its steps with, and the room checks they share.

A policy calls `Builder.compute`, `fetch`, `writeback` ... in an order in which the steps could run one after the
other; each returns its id for the `after` of later ones. `Builder.plan` leaves out the edges that others imply and
freezes the result. `Builder.plan(predict=True)` also plays the steps once (`choose`) and adds the memory edges, so
that a policy of one's own only has to name its data edges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.choose import Op, Ops, Window, choose
from pstar_sim.core.effects import OTHERS, frees, takes
from pstar_sim.core.layout import Layout, build_layout
from pstar_sim.core.plan import STASHES, Plan, Resident, Settings
from pstar_sim.core.rules import Rates
from pstar_sim.core.step import Kind, Place, Queue, Ref, Step
from pstar_sim.cost import CostModel
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.kit.draft import Row
from pstar_sim.policy.kit.facts import facts_of
from pstar_sim.policy.passes.memory_edges import Event, Slot, fifo_edges
from pstar_sim.policy.passes.stashes import StashMoves
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

__all__ = ["After", "Builder", "check_room", "describe_moment", "memory_edges", "worst_moment"]

# Host or GPU memory that an update touches.
_TRAFFIC: Mapping[Kind, Callable[[CostModel, int], int]] = {
    Kind.CPU_ADD: CostModel.cpu_add_bytes,
    Kind.CPU_ADAM: CostModel.cpu_adam_bytes,
    Kind.GPU_ADAM: CostModel.gpu_adam_bytes,
}

After = Iterable[int | Ref]
"""Steps to wait for: ids of this iteration, or `Ref(id, 1)` for the previous one."""


class Builder:
    """Collects the steps of one iteration. Public state a policy may fill in: `modes` (per chunk), `initial`,
    `buffers`, `choices`, `predictions`.

    layout: another one than the settings and the machine's ranks lead to. stashes: `compute` also writes the copies of
    the workload's stashes; False for a policy that places them itself (`stash_out`, `stash_in`); their room on the host
    is among the buffers either way. Offers the facts policies decide by: `ranks`,
    `layout`, `uses` (Facts), `cost` (CostModel). Everything is one rank's; all ranks run these steps.
    """

    def __init__(
        self,
        policy: str,
        workload: Workload,
        machine: Machine,
        settings: Settings,
        *,
        layout: Layout | None = None,
        stashes: bool = True,
    ) -> None:
        self.policy = policy
        self.workload = workload
        self.machine = machine
        self.settings = settings
        self.ranks = len(machine.ranks)
        self.layout = layout or build_layout(workload, chunk_bytes=settings.chunk_bytes, ranks=self.ranks)
        self.uses = facts_of(workload, self.layout)
        self.uses.check()
        self.cost = CostModel(workload, machine, self.layout)
        self.modes = ["frozen" if not self.uses.updated(c.index) else "cpu" for c in self.layout.chunks]
        self.initial: set[Resident] = set()
        self.buffers: list[tuple[str, Place, int]] = []
        self.stash_bytes = sum(size for _, size in workload.stash_room)  # what the host holds for stashes
        if self.stash_bytes:
            self.buffers.append((STASHES, Place.HOST, self.stash_bytes))
        self._stash_moves = StashMoves(workload) if stashes and workload.stashes else None
        self.choices: dict[str, object] = {}
        self.predictions: dict[str, float] = {}
        self._steps: list[Step] = []

    # Residents at the cut.

    def resident(self, chunk: int, place: Place, *lists: str) -> None:
        """The chunk's lists are at `place` between two iterations."""
        self.initial.update(Resident(chunk, name, place) for name in lists)

    def reside_on_host(self, chunk: int) -> None:
        """The permanent host copy of a chunk: working list, and for one that is updated its states (with several
        micro-batches also grad32)."""
        self.resident(chunk, Place.HOST, *self.permanent_lists(chunk))

    def reside_on_gpu(self, chunk: int) -> None:
        """The chunk lives on the GPU for ever, states and all: mode "pin" ("frozen" if it has no gradient)."""
        self.resident(chunk, Place.GPU, *self.permanent_lists(chunk))
        if self.uses.updated(chunk):
            self.modes[chunk] = "pin"

    def permanent_lists(self, chunk: int) -> tuple[str, ...]:
        """Lists that a chunk keeps all the time at its home."""
        if not self.uses.updated(chunk):
            return ("param",)
        accumulated = ("grad32",) if self.workload.micro_batches > 1 else ()
        return ("param", *self.layout.state_lists, *accumulated)

    def permanent_bytes(self, chunk: int) -> int:
        return sum(self.layout.payload_bytes(chunk, name) for name in self.permanent_lists(chunk))

    def payload(self, chunk: int, list_name: str = "param") -> int:
        return self.layout.payload_bytes(chunk, list_name)

    def held_bytes(self, place: Place) -> int:
        """What `initial` and `buffers` hold at a place, the tide left out."""
        held = sum(self.layout.payload_bytes(r.chunk, r.list) for r in self.initial if r.place is place)
        return held + sum(size for _, where, size in self.buffers if where is place)

    # Steps, in an order in which they could run one after the other.

    def add(
        self,
        queue: Queue,
        kind: Kind,
        *,
        chunk: int | None = None,
        list_name: str | None = None,
        place: Place | None = None,
        moment: int | None = None,
        size_bytes: int | None = None,
        after: After = (),
        via: str | None = None,
        stash: int | None = None,
    ) -> int:
        """Any step; returns its id. size_bytes: where it is not what the table of core/step.py says."""
        if size_bytes is None:
            size_bytes = self.step_bytes(kind, chunk, list_name, stash)
        refs = tuple(r if isinstance(r, Ref) else Ref(r) for r in after)
        step = Step(
            id=len(self._steps),
            queue=queue,
            kind=kind,
            bytes=size_bytes,
            chunk=chunk,
            list=list_name,
            place=place,
            moment=moment,
            after=refs,
            via=via,
            stash=stash,
        )
        self._steps.append(step)
        return step.id

    def step_bytes(self, kind: Kind, chunk: int | None, list_name: str | None, stash: int | None = None) -> int:
        """`bytes` of a step, by the table of core/step.py."""
        if kind is Kind.COMPUTE:
            return 0
        if kind in (Kind.STASH_OUT, Kind.STASH_IN):
            assert stash is not None
            return self.workload.stashes[stash].bytes
        assert chunk is not None
        if kind in _TRAFFIC:
            return _TRAFFIC[kind](self.cost, chunk)
        assert list_name is not None
        if kind in (Kind.GATHER, Kind.REDUCE_SCATTER):
            return self.payload(chunk, OTHERS.get(list_name, list_name)) * self.layout.ranks
        return self.payload(chunk, list_name)

    def row(self, queue: Queue, row: Row, after: After = ()) -> int:
        """The step that a row of a draft stands for."""
        stash = row.stash if row.stash >= 0 else None
        if stash is not None:
            own = self.workload.stashes[stash]
            moment = own.made if row.kind is Kind.STASH_OUT else own.needed
            return self.add(queue, row.kind, stash=stash, moment=moment, after=after)
        if row.kind in (Kind.CPU_ADAM, Kind.GPU_ADAM):
            return self.add(queue, row.kind, chunk=row.chunk, moment=self.uses.last_gradient(row.chunk), after=after)
        place = Place.GPU if row.kind in (Kind.ALLOC, Kind.FREE) else None
        return self.add(
            queue, row.kind, chunk=row.chunk, list_name=row.list_name, place=place, moment=row.moment, after=after
        )

    def compute(self, moment: int, after: After = ()) -> int:
        """A moment, and the copies of stashes that begin behind it."""
        moves = self._stash_moves
        if moves is None:
            return self.add(Queue.COMPUTE, Kind.COMPUTE, moment=moment, after=after)
        step = self.add(Queue.COMPUTE, Kind.COMPUTE, moment=moment, after=[*after, *moves.waits(moment)])
        for n in moves.made.get(moment, ()):
            moves.out_of[n] = self.stash_out(n, [step])
        for n in moves.back.get(moment, ()):
            moves.in_of[n] = self.stash_in(n, [step])
        return step

    def stash_out(self, stash: int, after: After) -> int:
        """A stash of the workload, GPU to host."""
        return self.row(Queue.D2H, Row(Kind.STASH_OUT, stash=stash), after)

    def stash_in(self, stash: int, after: After) -> int:
        """And back."""
        return self.row(Queue.H2D, Row(Kind.STASH_IN, stash=stash), after)

    def alloc(
        self, queue: Queue, chunk: int, list_name: str, place: Place, moment: int | None = None, after: After = ()
    ) -> int:
        return self.add(
            queue,
            Kind.ALLOC,
            chunk=chunk,
            list_name=list_name,
            place=place,
            moment=moment,
            after=after,
        )

    def free(
        self, queue: Queue, chunk: int, list_name: str, place: Place, moment: int | None = None, after: After = ()
    ) -> int:
        return self.add(queue, Kind.FREE, chunk=chunk, list_name=list_name, place=place, moment=moment, after=after)

    def drop(
        self, queue: Queue, chunk: int, moment: int | None = None, after: After = (), list_name: str = "param"
    ) -> int:
        """Give up the chunk's working list (or another list) on the GPU."""
        return self.add(queue, Kind.DROP, chunk=chunk, list_name=list_name, moment=moment, after=after)

    def fetch(
        self,
        chunk: int,
        moment: int,
        after: After = (),
        size_bytes: int | None = None,
        list_name: str = "param",
        via: str | None = None,
    ) -> int:
        """Working list (or another list), host to GPU, for its use in `moment`."""
        return self.add(
            Queue.H2D,
            Kind.FETCH,
            chunk=chunk,
            list_name=list_name,
            moment=moment,
            size_bytes=size_bytes,
            after=after,
            via=via,
        )

    def writeback(self, chunk: int, list_name: str, moment: int, after: After = (), via: str | None = None) -> int:
        return self.add(
            Queue.D2H,
            Kind.WRITEBACK,
            chunk=chunk,
            list_name=list_name,
            moment=moment,
            after=after,
            via=via,
        )

    def gather(self, chunk: int, moment: int, after: After = (), list_name: str | None = None) -> int:
        """The other ranks' slices of the working list, for their use in `moment` (on a replicated layout: of the sum of
        the gradient in `list_name`)."""
        name = list_name or ("remote" if self.layout.ranks > 1 else "param")
        return self._collective(Kind.GATHER, chunk, name, moment, after)

    def reduce_scatter(self, chunk: int, moment: int, after: After = (), list_name: str | None = None) -> int:
        """Sum over the ranks of the gradient that is complete after `moment`: "remote" (in place in the working list)
        or "grad_remote" (in the grad list); on a replicated layout the list it lies in."""
        name = list_name or ("remote" if self.layout.ranks > 1 else "param")
        return self._collective(Kind.REDUCE_SCATTER, chunk, name, moment, after)

    def _collective(self, kind: Kind, chunk: int, list_name: str, moment: int, after: After) -> int:
        return self.add(Queue.NET, kind, chunk=chunk, list_name=list_name, moment=moment, after=after)

    def nvme_read(self, chunk: int, list_name: str, moment: int | None = None, after: After = ()) -> int:
        """A list, disk to host."""
        return self.add(Queue.NVME, Kind.NVME_READ, chunk=chunk, list_name=list_name, moment=moment, after=after)

    def nvme_write(self, chunk: int, list_name: str, moment: int | None = None, after: After = ()) -> int:
        """A list, host to disk."""
        return self.add(Queue.NVME, Kind.NVME_WRITE, chunk=chunk, list_name=list_name, moment=moment, after=after)

    def cpu_add(self, chunk: int, list_name: str, moment: int, after: After = ()) -> int:
        """grad32 += the gradient in `list_name` ("grad", which is then freed, or "param", in place) on the host."""
        return self.add(Queue.ADAM, Kind.CPU_ADD, chunk=chunk, list_name=list_name, moment=moment, after=after)

    def cpu_adam(self, chunk: int, after: After = ()) -> int:
        return self.row(Queue.ADAM, Row(Kind.CPU_ADAM, chunk), after)

    def gpu_adam(self, chunk: int, after: After = ()) -> int:
        return self.row(Queue.COMPUTE, Row(Kind.GPU_ADAM, chunk), after)

    def wait(self, step: int, *refs: Ref) -> None:
        """Let a step wait for more: for what comes later in the program, of the previous iteration."""
        old = self._steps[step]
        self._steps[step] = replace(old, after=(*old.after, *refs))

    # The end.

    @property
    def steps(self) -> Sequence[Step]:
        return self._steps

    def plan(self, *, predict: bool = False, memory: Mapping[int, Sequence[Ref]] | None = None) -> Plan:
        """The plan. memory: memory edges found by the policy. predict: find them here, by playing the steps in order
        once within the budgets; raises DoesNotFit if they cannot run in them."""
        if self.stash_bytes:
            what = f"what lies there all the time, {format_bytes(self.stash_bytes)} of it for offloaded activations"
            check_room(self, Place.HOST, self.held_bytes(Place.HOST), what)
        if predict:
            memory = self._predicted_memory_edges()
        return Plan(
            policy=self.policy,
            workload=self.workload,
            machine=self.machine,
            settings=self.settings,
            layout=self.layout,
            modes=tuple(self.modes),
            initial=frozenset(self.initial),
            steps=_reduced(self._steps, memory or {}),
            gpu_budget_bytes=self.machine.gpu_budget_bytes,
            host_budget_bytes=self.machine.host_budget_bytes,
            nvme_budget_bytes=self.machine.nvme_budget_bytes if self._uses_disks() else 0,
            buffers=tuple(self.buffers),
            predictions=dict(self.predictions),
            choices=dict(self.choices),
        )

    def _uses_disks(self) -> bool:
        return any(s.queue is Queue.NVME for s in self._steps) or any(r.place is Place.NVME for r in self.initial)

    def _predicted_memory_edges(self) -> dict[int, list[Ref]]:
        present = set(self.initial)
        ops: list[Op] = []
        last_on: dict[Queue, int] = {}  # queues run in the order of the program
        for step in self._steps:
            gpu_take = gpu_free = host_take = host_free = 0
            if step.kind is Kind.COMPUTE:
                assert step.moment is not None
                gpu_take, gpu_free = self.uses.rises[step.moment], self.uses.falls[step.moment]
            else:
                taken, freed = takes(step), frees(step)
                if taken is not None and taken[0] not in present:
                    present.add(taken[0])
                    size = self.layout.payload_bytes(taken[0].chunk, taken[0].list)
                    gpu_take = size if taken[0].place is Place.GPU else 0
                    host_take = size if taken[0].place is Place.HOST else 0
                if freed is not None and freed[0] in present:
                    present.remove(freed[0])
                    size = self.layout.payload_bytes(freed[0].chunk, freed[0].list)
                    gpu_free = size if freed[0].place is Place.GPU else 0
                    host_free = size if freed[0].place is Place.HOST else 0
            before = [Ref(last_on[step.queue])] if step.queue in last_on else []
            last_on[step.queue] = step.id
            ops.append(
                Op(
                    queue=step.queue,
                    seconds=self.cost.seconds(step),
                    gpu_take=gpu_take,
                    gpu_free=gpu_free,
                    host_take=host_take,
                    host_free=host_free,
                    after=tuple((r.id, r.back) for r in (*step.after, *before)),
                )
            )
        if present != self.initial:
            left = sorted(present ^ self.initial)[0]
            raise ValueError(f"{self.policy}: {left} is not at the end of the iteration as it was at its beginning")
        free_gpu = self.machine.gpu_budget_bytes - self.held_bytes(Place.GPU) - cut_tide(self.uses.tide)
        free_host = self.machine.host_budget_bytes - self.held_bytes(Place.HOST)
        if free_gpu < 0 or free_host < 0:
            place, short = ("gpu", free_gpu) if free_gpu < 0 else ("host", free_host)
            budget = self.machine.gpu_budget_bytes if place == "gpu" else self.machine.host_budget_bytes
            raise DoesNotFit(
                policy=self.policy,
                place=place,
                needed_bytes=budget - short,
                available_bytes=budget,
                what="what is resident between iterations",
            )
        self._check_one_by_one(ops, free_gpu, free_host)
        alone = Rates(dram_bytes_per_s=math.inf)
        result = choose(Ops(ops=tuple(ops), gpu_free_bytes=free_gpu, host_free_bytes=free_host, rates=alone))
        if result.stuck is not None:
            stuck = self._steps[result.stuck[0]]
            raise ValueError(f"{self.policy}: step {stuck.id} ({stuck.kind}) can never start, in the order given")
        return memory_edges(self._steps, ops, [(i, i) for i in range(len(ops))], result)

    def _check_one_by_one(self, ops: Sequence[Op], free_gpu: int, free_host: int) -> None:
        """Raise DoesNotFit for the step that is shortest of room when the steps run one after the other."""
        worst: tuple[int, int, str] = (0, -1, "gpu")  # bytes missing, step, place
        for i, op in enumerate(ops):
            free_gpu -= op.gpu_take
            free_host -= op.host_take
            worst = max(worst, (-free_gpu, i, "gpu"), (-free_host, i, "host"), key=lambda w: w[0])
            free_gpu += op.gpu_free
            free_host += op.host_free
        short, i, place = worst
        if short > 0:
            step = self._steps[i]
            budget = self.machine.gpu_budget_bytes if place == "gpu" else self.machine.host_budget_bytes
            at = "" if step.moment is None else f", {describe_moment(self.workload, step.moment)}"
            raise DoesNotFit(
                policy=self.policy,
                place=place,
                needed_bytes=budget + short,
                available_bytes=budget,
                what=f"what is held when step {step.id} ({step.kind.value}) runs{at}",
            )


def cut_tide(tide: Sequence[int]) -> int:
    """Non-model bytes reckoned with between two iterations: the last moment's fall has happened, the first one's rise
    has not."""
    return min(tide[-1], tide[0])


def slots_of(steps: Sequence[Step]) -> tuple[dict[int, Slot], dict[str, int], dict[str, int]]:
    """(step -> queue and position, steps on each queue, first step of each queue)."""
    slots: dict[int, Slot] = {}
    lengths: dict[str, int] = {}
    first: dict[str, int] = {}
    for step in steps:
        queue = step.queue.value
        position = lengths.get(queue, 0)
        if position == 0:
            first[queue] = step.id
        slots[step.id] = Slot(queue, position)
        lengths[queue] = position + 1
    return slots, lengths, first


def memory_edges(
    steps: Sequence[Step],
    ops: Sequence[Op],
    ends: Sequence[tuple[int, int]],
    outcome: Window,
) -> dict[int, list[Ref]]:
    """Memory edges of both places from a predicted schedule. ends: op -> the first and the last step it stands for."""
    slots, lengths, _ = slots_of(steps)
    edges: dict[int, list[Ref]] = {}
    for take, free, room in (
        ("gpu_take", "gpu_free", outcome.gpu_free_bytes),
        ("host_take", "host_free", outcome.host_free_bytes),
    ):
        takes = [getattr(op, take) for op in ops]
        frees = [getattr(op, free) for op in ops]
        window = [
            Event(ends[i][1], k, -frees[i]) if done else Event(ends[i][0], k, takes[i])
            for i, k, done in outcome.events
            if (frees[i] if done else takes[i])
        ]
        for step, refs in fifo_edges(window, room, slots, lengths).items():
            edges.setdefault(step, []).extend(refs)
    return edges


def _reduced(steps: Sequence[Step], memory: Mapping[int, Sequence[Ref]]) -> tuple[Step, ...]:
    """The steps with data and memory edges, without those that are implied: by the order of a queue, or by an earlier
    step of the same queue that waited for the same step or a later one. A reference more than one iteration back
    becomes one to the first step of that queue in the previous iteration, which comes after it."""
    slots, lengths, first = slots_of(steps)
    # (queue, other queue) -> latest position waited for, in the previous iteration < 0
    waited: dict[tuple[str, str], int] = {}
    out: list[Step] = []
    for step in steps:
        mine = slots[step.id]
        best: dict[str, tuple[int, Ref]] = {}
        for ref in (*step.after, *memory.get(step.id, ())):
            if ref.back > 1:
                ref = Ref(first[slots[ref.id].queue], 1)
            slot = slots[ref.id]
            if slot.queue == mine.queue and (ref.back or slot.position < mine.position):
                continue
            absolute = slot.position - ref.back * lengths[slot.queue]
            if absolute <= waited.get((mine.queue, slot.queue), -lengths[slot.queue] - 1):
                continue
            if slot.queue not in best or absolute > best[slot.queue][0]:
                best[slot.queue] = (absolute, ref)
        for queue, (absolute, _) in best.items():
            waited[mine.queue, queue] = absolute
        after = tuple(sorted((ref for _, ref in best.values()), key=lambda r: (r.back, r.id)))
        out.append(step if after == step.after else replace(step, after=after))
    return tuple(out)


def check_room(builder: Builder, place: Place, needed_bytes: int, what: str) -> None:
    """Raise DoesNotFit if `needed_bytes` is more than the place's budget."""
    machine = builder.machine
    budget = {
        Place.GPU: machine.gpu_budget_bytes,
        Place.HOST: machine.host_budget_bytes,
        Place.NVME: machine.nvme_budget_bytes,
    }[place]
    if needed_bytes > budget:
        raise DoesNotFit(
            policy=builder.policy, place=place.value, needed_bytes=needed_bytes, available_bytes=budget, what=what
        )


def describe_moment(workload: Workload, moment: int) -> str:
    """For messages: "moment 361 (grad:h.5.mlp, 12.40 GB of non-model data)"."""
    m = workload.moments[moment]
    return f"moment {moment} ({m.name}, {format_bytes(m.peak_bytes)} of non-model data)"


def worst_moment(tide: Sequence[int]) -> int:
    """The moment of the highest tide (the first of several)."""
    return max(range(len(tide)), key=lambda m: tide[m])
