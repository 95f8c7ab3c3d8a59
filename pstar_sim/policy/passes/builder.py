"""Builder: collects a plan's steps, called in an order in which they could run one after the other.

Each call returns its step's id, for `after`. `Builder.plan` removes implied edges; with `predict=True` it also
schedules the steps once (`choose`) and adds memory edges, so a user's policy gives only data edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.choose import choose
from pstar_sim.core.draft import Charge, Draft, DraftRow
from pstar_sim.core.layout import Layout, build_layout
from pstar_sim.core.ledger import Holdings
from pstar_sim.core.plan import STASHES, Plan, Resident, Settings
from pstar_sim.core.rules import Rates
from pstar_sim.core.step import DISK_QUEUES, Kind, Place, Queue, Ref, Step
from pstar_sim.core.trips import TRIPS
from pstar_sim.cost import cost_of
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy.kit.charges import step_bytes
from pstar_sim.policy.kit.facts import facts_of
from pstar_sim.policy.kit.room import budget_bytes, describe_moment
from pstar_sim.policy.kit.trip_moves import TripMoves
from pstar_sim.policy.passes.edges import memory_edges, without_implied
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

After = Iterable[int | Ref]
"""Steps to wait for: ids of this iteration, or `Ref(id, 1)` for the previous one."""


class Builder:
    """One iteration, which all ranks run; figures are one rank's.

    A policy may fill in `modes` (per chunk), `initial`, `buffers`, `choices` and `predictions`, and may read `ranks`,
    `layout`, `uses` (Facts), `cost` (CostModel) and `whole` (lists of a chunk that is whole on a GPU).

    layout: by default by settings and `slices`.
    slices: ranks with a slice of each chunk, by default all.
    trips: `compute` also writes the workload's trips (core/trips.py), not the policy; their room on the host is in the
        buffers.
    stash_via: "pageable" for unpinned host memory: the next moment waits for each copy, as with `to("cpu")`, None:
        beside compute.
    """

    def __init__(
        self,
        policy: str,
        workload: Workload,
        machine: Machine,
        settings: Settings,
        *,
        layout: Layout | None = None,
        slices: int | None = None,
        trips: bool = True,
        stash_via: str | None = None,
    ) -> None:
        self.policy = policy
        self.workload = workload
        self.machine = machine
        self.settings = settings
        self.ranks = machine.data_parallel_size
        if slices not in (None, self.ranks) and any(t.spread > 1 for t in workload.tensors):
            raise CannotPlan(f"{policy}: replicas have all experts each; leave replicas or ep out")
        self.layout = layout or build_layout(
            workload, chunk_bytes=settings.chunk_bytes, ranks=slices or self.ranks, sums=settings.sums
        )
        self.whole = ("param", "remote") if self.layout.ranks > 1 else ("param",)
        self.uses = facts_of(workload, self.layout)
        self.uses.check()
        self.cost = cost_of(workload, machine, self.layout)
        self.modes = ["frozen" if not self.uses.updated(c.index) else "cpu" for c in self.layout.chunks]
        self.initial: set[Resident] = set()
        self.buffers: list[tuple[str, Place, int]] = []
        self.stash_bytes = sum(size for _, size in workload.stash_room)  # bytes that the host holds for stashes
        if self.stash_bytes:
            self.buffers.append((STASHES, Place.HOST, self.stash_bytes))
        some = trips and (workload.stashes or workload.borders)
        self._trips = TripMoves(workload, blocking=stash_via is not None) if some else None
        self._stash_via = stash_via
        self.choices: dict[str, object] = {}
        self.predictions: dict[str, float] = {}
        self._steps: list[Step] = []
        self._holdings: Holdings | None = None

    # Residents at the cut.

    def resident(self, chunk: int, place: Place, *lists: str) -> None:
        """Records that the chunk's lists are at `place` between two iterations."""
        self.initial.update(Resident(chunk, name, place) for name in lists)

    def live(self, chunk: int, place: Place) -> None:
        """Makes `place` the chunk's home, with `Facts.home_lists`, on the GPU with mode "pin", or "frozen" without a
        gradient."""
        self.resident(chunk, place, *self.uses.home_lists(chunk))
        if place is Place.GPU and self.uses.updated(chunk):
            self.modes[chunk] = "pin"

    def held_bytes(self, place: Place) -> int:
        """Held by `initial` and `buffers`, without the tide."""
        held = sum(self.layout.payload_bytes(r.chunk, r.list) for r in self.initial if r.place is place)
        return held + sum(size for _, where, size in self.buffers if where is place)

    @property
    def holdings(self) -> Holdings:
        """After the steps so far, one by one, without the tide. `initial` and `buffers` must be complete before."""
        if self._holdings is None:
            self._holdings = Holdings(self.layout, self.initial, self.buffers)
            for step in self._steps:
                self._holdings.run(step)
        return self._holdings

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
        if size_bytes is None:
            size_bytes = step_bytes(self.cost, kind, chunk, list_name, stash)
        refs = tuple([r if isinstance(r, Ref) else Ref(r) for r in after])
        number = len(self._steps)
        step = Step(
            id=number, queue=queue, kind=kind, bytes=size_bytes, chunk=chunk, list=list_name, place=place,
            moment=moment, after=refs, via=via, stash=stash,
        )  # fmt: skip
        self._steps.append(step)
        if self._holdings is not None and chunk is not None:
            self._holdings.run(step)
        return number

    def compute(self, moment: int, after: After = ()) -> int:
        """Also adds the trips that begin when the moment ends."""
        moves = self._trips
        if moves is None:
            return self.add(Queue.COMPUTE, Kind.COMPUTE, moment=moment, after=after)
        step = self.add(Queue.COMPUTE, Kind.COMPUTE, moment=moment, after=[*after, *moves.waits(moment)])
        for trip in moves.behind.get(moment, ()):
            queue = TRIPS[trip.kind]
            via = self._stash_via if queue in (Queue.H2D, Queue.D2H) else None
            moves.step_of[trip.kind, trip.number] = self.add(
                queue, trip.kind, stash=trip.number, moment=trip.moment, after=[step], via=via
            )
        return step

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
        """Adds a copy from the host to the GPU, for `moment`."""
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

    def writeback(
        self,
        chunk: int,
        list_name: str,
        moment: int,
        after: After = (),
        size_bytes: int | None = None,
        via: str | None = None,
    ) -> int:
        return self.add(
            Queue.D2H,
            Kind.WRITEBACK,
            chunk=chunk,
            list_name=list_name,
            moment=moment,
            size_bytes=size_bytes,
            after=after,
            via=via,
        )

    def gather(self, chunk: int, moment: int, after: After = (), list_name: str | None = None) -> int:
        """The other ranks' slices of the working list, on a replicated layout of the gradient's sum in `list_name`."""
        name = list_name or ("remote" if self.layout.ranks > 1 else "param")
        return self._collective(Kind.GATHER, chunk, name, moment, after)

    def reduce_scatter(self, chunk: int, moment: int, after: After = (), list_name: str | None = None) -> int:
        """Of the gradient complete after `moment`.

        list_name: "remote" (in place) or "grad_remote" (in the grad list), on a replicated layout, the list of the
            gradient.
        """
        name = list_name or ("remote" if self.layout.ranks > 1 else "param")
        return self._collective(Kind.REDUCE_SCATTER, chunk, name, moment, after)

    def _collective(self, kind: Kind, chunk: int, list_name: str, moment: int, after: After) -> int:
        return self.add(Queue.NET, kind, chunk=chunk, list_name=list_name, moment=moment, after=after)

    def cpu_add(self, chunk: int, list_name: str, moment: int, after: After = ()) -> int:
        """grad32 += the gradient in `list_name`.

        list_name: "grad", which is then freed, or "param", in place.
        """
        return self.add(Queue.ADAM, Kind.CPU_ADD, chunk=chunk, list_name=list_name, moment=moment, after=after)

    def cpu_adam(self, chunk: int, after: After = ()) -> int:
        moment = self.uses.last_gradient(chunk)
        return self.add(Queue.ADAM, Kind.CPU_UPDATE, chunk=chunk, moment=moment, after=after)

    def gpu_adam(self, chunk: int, after: After = (), via: str | None = None) -> int:
        moment = self.uses.last_gradient(chunk)
        return self.add(Queue.COMPUTE, Kind.GPU_UPDATE, chunk=chunk, moment=moment, after=after, via=via)

    def check_room(self, place: Place, needed_bytes: int, what: str) -> None:
        """Raises DoesNotFit if `needed_bytes` exceed the place's budget."""
        missing = needed_bytes - budget_bytes(self.machine, place)
        if missing > 0:
            raise self._no_room(place, missing, what)

    def wait(self, step: int, *refs: Ref) -> None:
        """For a step of the previous iteration that comes later in the program."""
        old = self._steps[step]
        self._steps[step] = old.waiting_for((*old.after, *refs))

    # The end.

    @property
    def steps(self) -> Sequence[Step]:
        return self._steps

    @without_garbage_collection()
    def plan(self, *, predict: bool = False, memory: Mapping[int, Sequence[Ref]] | None = None) -> Plan:
        """memory: edges found by the policy.
        predict: find them by scheduling once. Raises DoesNotFit over a budget.
        """
        if self.stash_bytes:
            stashes = f"{format_bytes(self.stash_bytes)} of them for offloaded activations"
            what = f"lists and buffers that are always there, {stashes}"
            self.check_room(Place.HOST, self.held_bytes(Place.HOST), what)
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
            steps=without_implied(self._steps, memory or {}),
            gpu_budget_bytes=self.machine.gpu_budget_bytes,
            host_budget_bytes=self.machine.host_budget_bytes,
            nvme_budget_bytes=self._nvme_budget_bytes(),
            buffers=tuple(self.buffers),
            predictions=dict(self.predictions),
            choices=dict(self.choices),
        )

    def _nvme_budget_bytes(self) -> int:
        if not self.machine.nvme_budget_bytes:
            return 0
        held = {r.place for r in self.initial} | {place for _, place, _ in self.buffers}
        used = Place.NVME in held or any(s.queue in DISK_QUEUES for s in self._steps)
        return self.machine.nvme_budget_bytes if used else 0

    def _predicted_memory_edges(self) -> dict[int, list[Ref]]:
        holdings = Holdings(self.layout, self.initial, self.buffers, self.uses.tide)
        gpu, host, _ = holdings.used_bytes
        free = (self.machine.gpu_budget_bytes - gpu, self.machine.host_budget_bytes - host)
        rows, shortest = self._rows(holdings)
        self._check_one_by_one(free, shortest)
        alone = Rates(dram_bytes_per_s=math.inf)
        window = choose(Draft(rows=rows, gpu_free_bytes=free[0], host_free_bytes=free[1], rates=alone))
        if window.stuck is not None:
            stuck = self._steps[window.stuck[0]]
            raise ValueError(f"{self.policy}: step {stuck.id} ({stuck.kind}) can never start in the given order")
        ends = [(i, i) for i in range(len(rows))]
        return memory_edges(self._steps, rows, ends, window, host_as_predicted=bool(self._nvme_budget_bytes()))

    def _rows(self, holdings: Holdings) -> tuple[list[DraftRow], _Short]:
        """Queues in the given order, and the step that lacks most room one by one.

        holdings: at the cut, advanced to the iteration's end.
        """
        rows: list[DraftRow] = []
        last_on: dict[Queue, int] = {}
        shortest = _Short(0, -1, Place.GPU)
        budgets = self.machine.gpu_budget_bytes, self.machine.host_budget_bytes
        gpu, host, _ = holdings.used_bytes
        for step in self._steps:
            before = ((last_on[step.queue], 0),) if step.queue in last_on else ()
            last_on[step.queue] = step.id
            after = (*[(ref.id, ref.back) for ref in step.after], *before)
            holdings.begin(step)
            gpu_most, host_most, _ = holdings.used_bytes
            if gpu_most - budgets[0] > shortest.missing_bytes:
                shortest = _Short(gpu_most - budgets[0], step.id, Place.GPU)
            if host_most - budgets[1] > shortest.missing_bytes:
                shortest = _Short(host_most - budgets[1], step.id, Place.HOST)
            holdings.end(step)
            gpu_left, host_left, _ = holdings.used_bytes
            charge = Charge(
                seconds=self.cost.seconds(step),  # without adds of gradients, which depend on the whole plan
                gpu_take=gpu_most - gpu,
                gpu_free=gpu_most - gpu_left,
                host_take=host_most - host,
                host_free=host_most - host_left,
                dram_bytes=self.cost.dram_bytes(step),
            )
            rows.append(DraftRow(step.queue, step.kind, charge=charge, after=after))
            gpu, host = gpu_left, host_left
        if changed := holdings.changed:
            raise ValueError(
                f"{self.policy}: {min(changed)} is held at the beginning or at the end of the iteration, "
                "but not at both"
            )
        return rows, shortest

    def _check_one_by_one(self, free: Iterable[int], shortest: _Short) -> None:
        """Raise DoesNotFit for residents over a budget, else for the step that lacks most.

        free: what residents leave on GPU and host.
        """
        for place, left in zip((Place.GPU, Place.HOST), free):
            if left < 0:
                raise self._no_room(place, -left, "everything resident between iterations")
        if shortest.missing_bytes > 0:
            step = self._steps[shortest.step]
            at = "" if step.moment is None else f", {describe_moment(self.workload, step.moment)}"
            what = f"everything held when step {step.id} ({step.kind.value}) runs{at}"
            raise self._no_room(shortest.place, shortest.missing_bytes, what)

    def _no_room(self, place: Place, missing_bytes: int, what: str) -> DoesNotFit:
        budget = budget_bytes(self.machine, place)
        return DoesNotFit(
            policy=self.policy,
            place=place.value,
            needed_bytes=budget + missing_bytes,
            available_bytes=budget,
            what=what,
        )


class _Short(NamedTuple):
    missing_bytes: int
    step: int
    place: Place
