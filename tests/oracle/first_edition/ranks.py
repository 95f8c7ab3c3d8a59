"""play_ranks: a plan on a machine of several ranks, which all run its steps.

Collectives are a rendezvous: each starts on all ranks when the last one has come to it, and ends on all at once. The
ranks of a node share its host DRAM and PCIe switches.

[Note: representative ranks] Ranks with the same GPU, link and workload, in equal nodes and on equal PCIe switches, do
the same at the same time. So one of each such class is simulated and counts for the number of its ranks. If all ranks
are of one class they also always share evenly, so a single rank with its part of DRAM and switch is simulated.
`every_rank` simulates each rank by itself; tests compare the two.

[Note: PCIe switches] All copies of one direction through a switch together may want more than it passes. Then its rate
is divided max-min fairly: no copy gets less than another that wants more. The switch stretches a copy's bytes, not its
fixed part (latency). The measured slow-downs of a calibrated machine (`Machine.slowdowns`) are followed where all ranks
are of one class; where they differ, only DRAM and links are shared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import simpy

from first_edition.bandwidth import SharedRates
from first_edition.play import Jitter, Run, play_one
from pstar_sim.catalog.machine import Machine, Rank
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import COPIES, PAGEABLE, Kind, Queue, Step
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import CostModel, expected_link
from pstar_sim.errors import PlanError
from pstar_sim.workload.workload import Workload

__all__ = ["classes_of", "fair_rates", "play_ranks"]


def play_ranks(
    plan: Plan,
    cost: CostModel | None,
    max_iterations: int,
    jitter: Jitter | None,
    *,
    every_rank: bool = False,
    workloads: Sequence[Workload] | None = None,
) -> Timeline:
    """Returns the timeline of the slowest class of ranks (the first of equally slow ones), whose period is the
    machine's.

    Raises PlanError as `play` does, and if `workloads` are not one per rank, with the plan's own moments and uses.
    """
    machine = plan.machine
    count = len(machine.ranks)
    if workloads is not None:
        _check_workloads(plan, workloads)
    classes = classes_of(machine, workloads)
    if len(set(classes)) == 1 and not every_rank:
        whole = plan if workloads is None else replace(plan, workload=workloads[0])
        seconds = cost or CostModel(whole.workload, machine, plan.layout)
        timeline = play_one(replace(whole, machine=_one_rank(machine)), seconds, max_iterations, jitter)
        return replace(timeline, moved_bytes=dict(plan.moved_bytes))
    if cost is not None:
        raise PlanError("ranks that differ, or every one of equal ranks, are timed by their own GPUs and links")
    members = range(count) if every_rank else [classes.index(c) for c in sorted(set(classes))]
    env = simpy.Environment()
    nodes: dict[Hashable, _Node] = {}
    everyone = _Everyone(max_iterations)
    for r in members:
        share = _share_of(machine, classes, r, alone=every_rank)
        node = nodes.setdefault(share.node, _Node(env, machine.host.dram_bytes_per_s, machine.root_bytes_per_s))
        own = plan if workloads is None else replace(plan, workload=workloads[r])
        own = replace(own, gpu_budget_bytes=max(plan.gpu_budget_bytes, machine.ranks[r].gpu.budget_bytes))
        seconds = CostModel(own.workload, machine, plan.layout, rank=r)
        everyone.join(_RankRun(own, seconds, max_iterations, jitter, env, machine.ranks[r], node, share, everyone))
    env.run()
    for run in everyone.runs:
        if not run.stopped:
            raise run.deadlock()
    timelines = [run.timeline() for run in everyone.runs]
    return max(timelines, key=lambda t: t.iteration_s)


def _check_workloads(plan: Plan, workloads: Sequence[Workload]) -> None:
    count = len(plan.machine.ranks)
    if len(workloads) != count:
        raise PlanError(f"{len(workloads)} workloads for {count} ranks; each rank needs its own")
    mine = plan.workload
    for r, w in enumerate(workloads):
        if (w.fingerprint, w.uses, len(w.moments)) != (mine.fingerprint, mine.uses, len(mine.moments)):
            raise PlanError(f"the workload of rank {r} has other parameters, moments or uses than the plan's")


def _one_rank(machine: Machine) -> Machine:
    """Returns the part of the machine that one of equal ranks has while all do the same."""
    local = machine.local_ranks
    host = replace(machine.host, dram_bytes_per_s=machine.host.dram_bytes_per_s / local)
    return replace(
        machine, ranks=(replace(machine.ranks[0], batch_share=1.0, link=expected_link(machine)),), nodes=1, host=host
    )


def classes_of(machine: Machine, workloads: Sequence[Workload] | None = None) -> list[int]:
    """Returns the class of each rank ([Note: representative ranks]), numbered in order of first appearance."""
    local = machine.local_ranks
    colours: list[Hashable] = []
    seen: list[tuple[Rank, int]] = []
    kinds: dict[int, int] = {}  # identity of a workload -> number
    for r, rank in enumerate(machine.ranks):
        load = 0 if workloads is None else kinds.setdefault(id(workloads[r]), len(kinds))
        for n, (other, its_load) in enumerate(seen):
            if load == its_load and (rank.gpu, rank.link) == (other.gpu, other.link):
                colours.append(n)
                break
        else:
            colours.append(len(seen))
            seen.append((rank, load))
    while True:
        nodes = [_counted(colours[n * local : (n + 1) * local]) for n in range(machine.nodes)]
        roots: dict[tuple[int, int], list[Hashable]] = defaultdict(list)
        for r, rank in enumerate(machine.ranks):
            if rank.root is not None:
                roots[r // local, rank.root].append(colours[r])
        finer: list[Hashable] = []
        for r, rank in enumerate(machine.ranks):
            beside = None if rank.root is None else _counted(roots[r // local, rank.root])
            finer.append((colours[r], nodes[r // local], beside))
        numbers: dict[Hashable, int] = {}
        result = [numbers.setdefault(c, len(numbers)) for c in finer]
        if len(numbers) == len(set(colours)):
            return result
        colours = list(result)


def _counted(colours: Sequence[Hashable]) -> Hashable:
    return frozenset(Counter(colours).items())


@dataclass(frozen=True)
class _Share:
    """The shared parts of a simulated rank: its node and its PCIe switch (None: none), and the number of ranks it
    counts for."""

    node: Hashable
    root: Hashable
    in_node: int = 1
    in_root: int = 1


def _share_of(machine: Machine, classes: Sequence[int], r: int, *, alone: bool) -> _Share:
    local = machine.local_ranks
    n, root = r // local, machine.ranks[r].root
    if alone:
        return _Share(n, None if root is None else (n, root))
    mates = range(n * local, (n + 1) * local)
    here = [classes[i] for i in mates]
    if root is None:
        return _Share(_counted(here), None, here.count(classes[r]))
    beside = [classes[i] for i in mates if machine.ranks[i].root == root]
    return _Share(_counted(here), _counted(beside), here.count(classes[r]), beside.count(classes[r]))


class _Everyone:
    """All runs of one simulation: where they meet, and when they have ended."""

    def __init__(self, max_iterations: int) -> None:
        self.max_iterations = max_iterations
        self.runs: list[_RankRun] = []
        self._waiting: dict[tuple[int, int], list[tuple[simpy.Event, float]]] = defaultdict(list)

    def join(self, run: _RankRun) -> None:
        self.runs.append(run)

    def meet(self, i: int, k: int, duration: float, event: simpy.Event) -> None:
        """Meet the other runs. The last to come starts the collective for all, for as long as the slowest takes."""
        waiting = self._waiting[i, k]
        waiting.append((event, duration))
        if len(waiting) == len(self.runs):
            longest = max(seconds for _, seconds in waiting)
            for each, _ in self._waiting.pop((i, k)):
                each.succeed(longest)

    def iteration_ended(self, k: int) -> None:
        if any(run.through < k for run in self.runs):
            return
        steady = k >= 1 and all(run.even(k) for run in self.runs)
        if steady or k == self.max_iterations - 1:
            for run in self.runs:
                run.steady, run.stopped, run.last = steady, True, k


class _RankRun(Run):
    """One rank among others."""

    def __init__(
        self,
        plan: Plan,
        cost: CostModel,
        max_iterations: int,
        jitter: Jitter | None,
        env: simpy.Environment,
        rank: Rank,
        node: _Node,
        share: _Share,
        everyone: _Everyone,
    ) -> None:
        super().__init__(plan, cost, max_iterations, jitter, env)
        self.rank = rank
        self.node = node
        self.share = share
        self.everyone = everyone
        self.through = -1
        self.arrived = [list(row) for row in self.begun]
        collectives = (Kind.GATHER, Kind.REDUCE_SCATTER)
        self.meets = frozenset(i for i, step in enumerate(plan.steps) if step.kind in collectives)
        self.wire_s = [_wire_s(step, cost) for step in plan.steps]
        self.bandwidth = node  # type: ignore[assignment]  # it has dram_lost_s; `_work` is this class's own

    def _rates_may_be_short(self) -> bool:
        return True

    def _work(self, i: int, duration: float) -> simpy.Event:
        step = self.plan.steps[i]
        wire_s = self.wire_s[i] * (duration / self.seconds[i])
        return self.node.join(_Task(self, step, duration, wire_s, self.dram[i], self.env.event()))

    def _meet(self, i: int, k: int, duration: float) -> simpy.Event:
        self.arrived[k][i] = self.env.now
        event = self.env.event()
        self.everyone.meet(i, k, duration, event)
        return event

    def _iteration_ended(self, k: int) -> None:
        self.through = k
        self.everyone.iteration_ended(k)

    def even(self, k: int) -> bool:
        return self._pace_is_even(k)

    def timeline(self) -> Timeline:
        for begun, arrived in zip(self.begun, self.arrived):
            for i in range(len(begun)):
                if i not in self.meets:
                    arrived[i] = begun[i]
        return super().timeline()


def _wire_s(step: Step, cost: CostModel) -> float:
    """Returns the part of a copy's nominal seconds in which its bytes pass the link; 0 for other steps."""
    if step.kind not in COPIES:
        return 0.0
    link = cost.link
    rate = link.h2d_bytes_per_s if step.queue is Queue.H2D else link.d2h_bytes_per_s
    if step.via == PAGEABLE and link.pageable_bytes_per_s is not None:
        rate = min(rate, link.pageable_bytes_per_s)
    return step.bytes / rate


class _Task:
    """A running copy, CPU Adam or access to disks.

    left_s: nominal seconds still to do.
    """

    __slots__ = ("demand", "done", "left_s", "nominal_s", "rank", "speed", "step", "version", "wire_s")

    def __init__(
        self, rank: _RankRun, step: Step, nominal_s: float, wire_s: float, dram_bytes: int, done: simpy.Event
    ) -> None:
        self.rank = rank
        self.step = step
        self.nominal_s = nominal_s
        self.left_s = nominal_s
        self.wire_s = wire_s
        self.demand = dram_bytes / nominal_s
        self.done = done
        self.speed = 0.0
        self.version = 0


class _Node(SharedRates[_Task]):
    """The tasks of the ranks of one node, and their speeds: [Note: shared rates] of bandwidth.py for all of them
    together, and [Note: PCIe switches]."""

    def __init__(self, env: simpy.Environment, dram_bytes_per_s: float, root_bytes_per_s: float | None) -> None:
        super().__init__(env, dram_bytes_per_s)
        self.root_bytes_per_s = root_bytes_per_s

    def _speeds(self) -> list[float]:
        on_links = self._on_links()
        self._share_dram(sum(t.demand * speed * t.rank.share.in_node for t, speed in zip(self._tasks, on_links)))
        return [on_link * self._share for on_link in on_links]

    def _on_links(self) -> list[float]:
        """Returns the speeds by links and switches alone."""
        copying = Counter(id(t.rank) for t in self._tasks if t.wire_s)
        speeds: list[float] = []
        through: dict[tuple[Hashable, Kind], list[int]] = defaultdict(list)
        for n, t in enumerate(self._tasks):
            half = t.wire_s and copying[id(t.rank)] > 1 and not t.rank.rank.link.duplex
            speeds.append(0.5 if half else 1.0)
            if t.wire_s and t.rank.share.root is not None:
                through[t.rank.share.root, t.step.kind].append(n)
        if self.root_bytes_per_s is None:
            return speeds
        for tasks in through.values():
            wanted = [self._tasks[n].step.bytes / self._tasks[n].wire_s * speeds[n] for n in tasks]
            counts = [self._tasks[n].rank.share.in_root for n in tasks]
            for n, want, rate in zip(tasks, wanted, fair_rates(wanted, counts, self.root_bytes_per_s)):
                if rate < want:
                    task = self._tasks[n]
                    fixed_s = task.nominal_s - task.wire_s
                    speeds[n] = task.nominal_s / (fixed_s / speeds[n] + task.step.bytes / rate)
        return speeds


def fair_rates(wanted: Sequence[float], counts: Sequence[int], capacity: float) -> list[float]:
    """Returns a max-min fair division of `capacity` (bytes/s) among flows: `wanted` is each flow's demand, `counts` the
    number of flows that it stands for."""
    rates = [0.0] * len(wanted)
    left, flows = capacity, sum(counts)
    for n in sorted(range(len(wanted)), key=lambda n: wanted[n]):
        rates[n] = min(wanted[n], left / flows)
        left -= rates[n] * counts[n]
        flows -= counts[n]
    return rates
