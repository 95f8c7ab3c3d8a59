"""A plan on several ranks, which all run its steps.

A collective starts when the last rank has come, and ends on all at once.

[Note: representative ranks] Ranks with the same GPU, link and workload, on nodes and switches of the same make-up, form
a class: they do the same at the same time, and one, simulated, counts for all. If there is one class, a rank with its
part of DRAM and switch is simulated. `every_rank` simulates each; tests compare the two.

[Note: PCIe switches] If one direction's copies want more than a switch passes, its bandwidth is divided max-min fairly,
which stretches their bytes, not their latency. Measured factors between queues (`Machine.slowdowns`) hold for one
class; else only DRAM and links are shared, and collectives slow compute down.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pstar_sim.catalog.machine import Machine, Rank
from pstar_sim.core.follow import Deadlock, Record, deadlock
from pstar_sim.core.ledger import Moves
from pstar_sim.core.plan import Plan
from pstar_sim.core.program import Program
from pstar_sim.core.rules import Rates
from pstar_sim.core.step import COPIES, DISK_QUEUES, PAGEABLE, ROUTES, Kind, Queue, Step
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import CostModel, cost_of, expected_link
from pstar_sim.errors import PlanError, PstarError
from pstar_sim.sim.bytes_held import held
from pstar_sim.sim.one import Jitter, play_one
from pstar_sim.sim.outcome import timeline
from pstar_sim.workload.workload import Workload

if TYPE_CHECKING:
    import simpy


def play_ranks(
    plan: Plan, cost: CostModel | None, max_iterations: int, jitter: Jitter | None, *, every_rank: bool = False
) -> tuple[Timeline, ...]:
    """A class's ranks share a timeline.

    Raises PlanError as `play`.
    """
    machine = plan.machine
    classes = classes_of(machine, plan.ranked)
    if len(set(classes)) == 1 and not every_rank:
        return (_play_one_class(plan, cost, max_iterations, jitter),) * len(classes)
    if cost is not None:
        raise PlanError("leave cost out: ranks that are simulated one by one are timed by their own GPUs and links")
    env = new_environment()
    nodes: dict[Hashable, _Node] = {}
    simulation = _Simulation(env, max_iterations, jitter)
    runs = list(range(len(classes))) if every_rank else classes  # rank -> number of its simulation
    for r in (runs.index(n) for n in sorted(set(runs))):
        share = _commons_of(machine, classes, r, alone=every_rank)
        node = nodes.setdefault(share.node, _Node(env, machine.host.dram_bytes_per_s, machine.root_bytes_per_s))
        own = replace(plan, workload=plan.jobs[r], ranked=None, gpu_budget_bytes=plan.gpu_budgets[r])
        seconds = CostModel(own.workload, machine, plan.layout, rank=r)
        meetings = {i: (i, len(set(runs))) for i, step in enumerate(own.steps) if ROUTES.get(step.kind) == "net"}
        simulation.join(_RankRun(own, seconds, machine.ranks[r], node, share, simulation, meetings))
    timelines = simulation.timelines()
    return tuple(timelines[n] for n in runs)


def _play_one_class(plan: Plan, cost: CostModel | None, max_iterations: int, jitter: Jitter | None) -> Timeline:
    job = plan.jobs[0]
    seconds = cost or cost_of(job, plan.machine, plan.layout)
    one = replace(plan, workload=job, ranked=None, machine=_one_rank(plan.machine))
    return play_one(one, seconds, max_iterations, jitter, moved_bytes=plan.moved_bytes)


def new_environment() -> simpy.Environment:
    """SimPy is loaded only here: plans of equal ranks do without it. Raises PstarError if it cannot be."""
    try:
        import simpy
    except ModuleNotFoundError as error:
        raise PstarError(
            "a simulation of ranks that differ needs the package simpy, which cannot be imported; pip install simpy"
        ) from error
    return simpy.Environment()


def _one_rank(machine: Machine) -> Machine:
    local = machine.local_ranks
    host = replace(machine.host, dram_bytes_per_s=machine.host.dram_bytes_per_s / local)
    rank = replace(machine.ranks[0], link=expected_link(machine), batch_share=1.0)
    return replace(machine, ranks=(rank,), nodes=1, host=host)


def classes_of(machine: Machine, workloads: Sequence[Workload] | None = None) -> list[int]:
    """The class of each rank ([Note: representative ranks]), by first appearance."""
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
class _Commons:
    """root: PCIe switch, if any.
    in_node, in_root: ranks that it stands for.
    """

    node: Hashable
    root: Hashable
    in_node: int = 1
    in_root: int = 1


def _commons_of(machine: Machine, classes: Sequence[int], r: int, *, alone: bool) -> _Commons:
    local = machine.local_ranks
    n, root = r // local, machine.ranks[r].root
    if alone:
        return _Commons(n, None if root is None else (n, root))
    mates = range(n * local, (n + 1) * local)
    here = [classes[i] for i in mates]
    if root is None:
        return _Commons(_counted(here), None, here.count(classes[r]))
    beside = [classes[i] for i in mates if machine.ranks[i].root == root]
    return _Commons(_counted(here), _counted(beside), here.count(classes[r]), beside.count(classes[r]))


class _Simulation:
    def __init__(self, env: simpy.Environment, max_iterations: int, jitter: Jitter | None) -> None:
        self.env = env
        self.max_iterations = max_iterations
        self.jitter = jitter
        self.runs: list[_RankRun] = []
        self._waiting: dict[tuple[Hashable, int], list[tuple[simpy.Event, float]]] = defaultdict(list)

    def join(self, run: _RankRun) -> None:
        self.runs.append(run)

    def timelines(self) -> tuple[Timeline, ...]:
        """Raises a rank's error of memory, else PlanError for one that waits for ever."""
        self.env.run()
        stuck = next((run for run in self.runs if not run.stopped), None)
        if stuck is not None:
            for run in self.runs:
                run.moves.book(run.record.events)
            raise stuck.deadlock()
        return tuple(run.timeline() for run in self.runs)

    def meet(self, meeting: tuple[Hashable, int], k: int, duration: float, event: simpy.Event) -> None:
        """The last to come starts it on all, as long as the slowest.

        meeting: key, and number of ranks.
        """
        key, ranks = meeting
        waiting = self._waiting[key, k]
        waiting.append((event, duration))
        if len(waiting) == ranks:
            longest = max(seconds for _, seconds in waiting)
            for each, _ in self._waiting.pop((key, k)):
                each.succeed(longest)

    def end_iteration(self, k: int) -> None:
        if any(run.through < k for run in self.runs):
            return
        verdicts = [run.record.end_iteration(k) for run in self.runs]  # all runs, because each computes its times
        steady = all(verdicts)
        if steady or k == self.max_iterations - 1:
            for run in self.runs:
                run.record.steady, run.stopped = steady, True


class _RankRun:
    """A SimPy process per queue."""

    def __init__(
        self,
        plan: Plan,
        cost: CostModel,
        rank: Rank,
        node: _Node,
        share: _Commons,
        simulation: _Simulation,
        meetings: Mapping[int, tuple[Hashable, int]],
    ) -> None:
        self.plan = plan
        self.env = env = simulation.env
        self.jitter = simulation.jitter
        self.max_iterations = max_iterations = simulation.max_iterations
        self.rank = rank
        self.node = node
        self.share = share
        self.simulation = simulation
        self.through = -1
        self.stopped = False
        self.program = program = Program.of(plan)
        self.moves = Moves(plan)
        self.costs = cost.step_costs(plan)
        self.record = Record.empty(program, max_iterations, shared=True)
        rates = cost.rates(measured=False)
        self.slow, self.disks = rates.compute_while_net, rates.disks
        self.meetings = meetings
        self.wire_s = [_wire_s(step, cost) for step in plan.steps]
        self.done = [-1] * len(program.ids)  # last iteration in which the step ended
        self.waiters: list[list[simpy.Event]] = [[] for _ in program.ids]
        self.at: dict[int, tuple[int, int]] = {}  # queue -> its (step, iteration)
        self.queues_done = [0] * max_iterations
        for q in range(len(program.queues)):
            env.process(self._follow_queue(q))

    def _follow_queue(self, q: int) -> Generator[simpy.Event, float, None]:
        env, record, done, waiters = self.env, self.record, self.done, self.waiters
        seconds, dram = self.costs.seconds, self.costs.dram_bytes
        beside = self.slow > 1 and self.program.queues[q] in (Queue.COMPUTE, Queue.NET)
        for k in range(self.max_iterations):
            for i in self.program.order[q]:
                if self.stopped:
                    return
                self.at[q] = (i, k)
                for j, back in self.program.waits[i]:
                    while done[j] < k - back:
                        wake = env.event()
                        waiters[j].append(wake)
                        yield wake
                        record.last_wait[k][i] = j
                duration = seconds[i]
                if self.jitter is not None:
                    duration *= self.jitter(self.program.ids[i], k)
                if i in self.meetings:
                    record.arrival_s[k][i] = env.now
                    met = env.event()
                    self.simulation.meet(self.meetings[i], k, duration, met)
                    duration = yield met
                record.events.append(2 * i)
                record.at_s.append(env.now)
                if duration > 0:
                    if dram[i] or beside:
                        lost = self.node.dram_loss_s
                        wire_s = self.wire_s[i] * (duration / seconds[i])
                        yield self.node.join(_Task(self, self.plan.steps[i], duration, wire_s, dram[i], env.event()))
                        record.dram_loss_s[k][i] = self.node.dram_loss_s - lost if dram[i] else 0.0
                    else:
                        yield env.timeout(duration)
                record.events.append(2 * i + 1)
                record.at_s.append(env.now)
                done[i] += 1
                for event in waiters[i]:
                    event.succeed()
                waiters[i].clear()
            if q == self.program.compute:
                record.marks.append(len(record.events))
            self.queues_done[k] += 1
            if self.queues_done[k] == len(self.program.queues):
                self.through = k
                self.simulation.end_iteration(k)
        del self.at[q]

    def deadlock(self) -> PlanError:
        return Deadlock(deadlock(self.program, self.at, self.done))

    def timeline(self) -> Timeline:
        return timeline(self.plan, self.record, held(self.moves, self.record))


def _wire_s(step: Step, cost: CostModel) -> float:
    if step.kind not in COPIES:
        return 0.0
    link = cost.link
    rate = link.h2d_bytes_per_s if step.queue is Queue.H2D else link.d2h_bytes_per_s
    if step.via == PAGEABLE and link.pageable_bytes_per_s is not None:
        rate = min(rate, link.pageable_bytes_per_s)
    return step.bytes / rate


class _Task:
    """A running copy, CPU Adam or disk access, and collectives and compute where they share the GPU.

    left_s: nominal.
    halved: a copy on a link that both directions share.
    """

    __slots__ = (
        "demand",
        "disk",
        "done",
        "halved",
        "left_s",
        "nominal_s",
        "rank",
        "speed",
        "step",
        "version",
        "wire_s",
    )

    def __init__(
        self, rank: _RankRun, step: Step, nominal_s: float, wire_s: float, dram_bytes: float, done: simpy.Event
    ) -> None:
        self.rank = rank
        self.step = step
        self.nominal_s = nominal_s
        self.left_s = nominal_s
        self.wire_s = wire_s
        self.demand = dram_bytes / nominal_s
        self.halved = bool(wire_s) and not rank.rank.link.duplex
        self.disk = rank.disks is not None and step.queue in DISK_QUEUES
        self.done = done
        self.speed = 0.0
        self.version = 0


class _Node:
    """[Note: shared rates] of core/rules.py for a node's tasks, and [Note: PCIe switches].

    dram_loss_s: integral of (1 - DRAM share), from which any interval's loss follows.
    """

    def __init__(self, env: simpy.Environment, dram_bytes_per_s: float, root_bytes_per_s: float | None) -> None:
        self.env = env
        self.rates = Rates(dram_bytes_per_s=dram_bytes_per_s)
        self.root_bytes_per_s = root_bytes_per_s
        self._tasks: list[_Task] = []
        self._since_s = 0.0
        self._share = 1.0
        self._loss_s = 0.0

    @property
    def dram_loss_s(self) -> float:
        return self._loss_s + (self.env.now - self._since_s) * (1.0 - self._share)

    def join(self, task: _Task) -> simpy.Event:
        """Returns the event of the task's end."""
        self._settle()
        self._tasks.append(task)
        self._retime()
        return task.done

    def _settle(self) -> None:
        now = self.env.now
        elapsed = now - self._since_s
        if elapsed > 0:
            self._loss_s += elapsed * (1.0 - self._share)
            for task in self._tasks:
                task.left_s -= elapsed * task.speed
        self._since_s = now

    def _retime(self) -> None:
        for task, speed in zip(self._tasks, self._speeds()):
            if speed != task.speed:
                task.speed = speed
                task.version += 1
                alarm = self.env.timeout(max(0.0, task.left_s) / speed)
                assert alarm.callbacks is not None
                alarm.callbacks.append(self._alarm(task, task.version))

    def _alarm(self, task: _Task, version: int) -> Callable[[simpy.Event], None]:
        def ring(_: simpy.Event) -> None:
            if task.version == version:
                self._settle()
                self._tasks.remove(task)
                task.version += 1
                self._retime()
                task.done.succeed()

        return ring

    def _speeds(self) -> list[float]:
        on_links = self._on_links()
        wanted = sum([t.demand * speed * t.rank.share.in_node for t, speed in zip(self._tasks, on_links) if t.demand])
        self._share = self.rates.share_of_dram(wanted)
        collective = {t.rank for t in self._tasks if t.step.queue is Queue.NET}
        return [
            1 / t.rank.slow
            if t.step.queue is Queue.COMPUTE and t.rank in collective
            else on_link * self._share
            if t.demand
            else on_link
            for t, on_link in zip(self._tasks, on_links)
        ]

    def _on_links(self) -> list[float]:
        speeds = [1.0] * len(self._tasks)
        halved = [n for n, t in enumerate(self._tasks) if t.halved]
        if len(halved) > 1:
            copying = Counter(self._tasks[n].rank for n in halved)
            for n in halved:
                speeds[n] = 0.5 if copying[self._tasks[n].rank] > 1 else 1.0
        disks = [n for n, t in enumerate(self._tasks) if t.disk]
        if len(disks) > 1:
            moving = {(self._tasks[n].rank, self._tasks[n].step.queue) for n in disks}
            for n in disks:
                t = self._tasks[n]
                if t.rank.disks is not None and all((t.rank, queue) in moving for queue in DISK_QUEUES):
                    speeds[n] = t.rank.disks[DISK_QUEUES.index(t.step.queue)]
        if self.root_bytes_per_s is None:
            return speeds
        through: dict[tuple[Hashable, Kind], list[int]] = defaultdict(list)
        for n, t in enumerate(self._tasks):
            if t.wire_s and t.rank.share.root is not None:
                through[t.rank.share.root, t.step.kind].append(n)
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
    """Bytes per second of each, if `capacity` is divided max-min fairly.

    wanted: by each.
    counts: equal flows that each stands for.
    """
    rates = [0.0] * len(wanted)
    left, flows = capacity, sum(counts)
    for n in sorted(range(len(wanted)), key=lambda n: wanted[n]):
        rates[n] = min(wanted[n], left / flows)
        left -= rates[n] * counts[n]
        flows -= counts[n]
    return rates
