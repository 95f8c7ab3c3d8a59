"""play(plan): one SimPy process per queue, each running its steps in order, until two successive iterations agree.

A step starts when its queue has come to it and every step in its `after` has ended. Bytes are taken when it starts and
freed when it ends. Nothing is decided here: order and waits are the plan's, seconds are the cost model's.

[Note: when an iteration is steady] The next iteration depends on the last one only through the times at which its steps
ended. So iteration k is steady when every step ended the same time after its namesake of k-1 as every other step (to
1e-9 of the period): from there on the plan repeats for ever with that period. An equal distance between the last
compute steps of the iterations would not do, because it would hide a CPU Adam that falls behind a little each
iteration. A plan still not steady after `max_iterations` (such a backlog, or jitter) is given the pace of its slowest
queue over the later half of the run: the others fall into that pace once the slack is used up.

[Note: where an iteration begins] Iteration k lasts from the end of the last step of the compute queue of k-1 to that of
k. Samples, peaks and stalls are those of this window, and of the compute steps in it.

[Note: stall causes] While the compute queue waits, the chain of steps that it waits for is followed backwards in time:
the step that ended last, before it the step that this one waited for (or followed on its queue), and so on until the
wait began. Every second of the wait belongs to the step of the chain running then and is put down to its queue: "h2d",
"d2h", "adam". A fetch that itself waited for CPU Adam thus blames Adam for that part and the link for its own. Adam
held back by the barrier (it names the optimizer step in `after`, or follows a step that does) is "barrier". The part of
a copy or an Adam by which short DRAM bandwidth stretched it is "dram". A span carries the cause with the most seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise

import numpy as np
import simpy

from first_edition.bandwidth import Bandwidth
from first_edition.effects import CATEGORIES
from first_edition.memory import PLACES, Memory
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import COPIES, Kind, Queue
from pstar_sim.core.timeline import ByteSample, Span, Timeline
from pstar_sim.cost import CostModel
from pstar_sim.errors import PlanError
from pstar_sim.workload.workload import Workload

__all__ = ["Jitter", "Run", "play", "play_one"]

Jitter = Callable[[int, int], float]
"""(step id, iteration) -> factor on the step's nominal seconds, for tests of other legal interleavings."""

TOLERANCE = 1e-9


def play(
    plan: Plan,
    *,
    cost: CostModel | None = None,
    max_iterations: int = 8,
    jitter: Jitter | None = None,
    every_rank: bool = False,
    workloads: Sequence[Workload] | None = None,
) -> Timeline:
    """Simulate the plan on its machine until it is steady, at most `max_iterations` (>= 2) iterations. Equal arguments
    give equal timelines.

    cost: by default that of the plan's own workload, machine and layout.
    every_rank: whether to simulate all ranks one by one; by default equal ranks are simulated once (ranks.py).
    workloads: each rank's own, where they are not the plan's.

    Raises PlanError, naming the step, for a plan that deadlocks, goes over a budget, or whose steps contradict each
    other.
    """
    if max_iterations < 2:
        raise PlanError(f"max_iterations must be at least 2 (two that may agree), not {max_iterations}")
    if len(plan.machine.ranks) > 1:
        from first_edition.ranks import play_ranks

        return play_ranks(plan, cost, max_iterations, jitter, every_rank=every_rank, workloads=workloads)
    return play_one(plan, cost or CostModel(plan.workload, plan.machine, plan.layout), max_iterations, jitter)


def play_one(plan: Plan, cost: CostModel, max_iterations: int, jitter: Jitter | None) -> Timeline:
    """Simulate one rank that has DRAM and link of the plan's machine to itself."""
    return Run(plan, cost, max_iterations, jitter).timeline()


class Run:
    """One simulation: the compiled plan, the clock, and the events by now."""

    def __init__(
        self,
        plan: Plan,
        cost: CostModel,
        max_iterations: int,
        jitter: Jitter | None,
        env: simpy.Environment | None = None,
    ) -> None:
        self.plan = plan
        self.max_iterations = max_iterations
        self.jitter = jitter
        self.env = env or simpy.Environment()
        self.memory = Memory(plan)
        steps = plan.steps
        count = len(steps)
        index_of = {step.id: i for i, step in enumerate(steps)}
        if len(index_of) < count:
            raise PlanError(f"plan of {plan.policy!r} gives one id to several steps")
        self.after: list[tuple[tuple[int, int], ...]] = []
        for step in steps:
            for ref in step.after:
                if ref.id not in index_of:
                    raise PlanError(f"step {step.id} waits for step {ref}, which the plan has not")
            self.after.append(tuple((index_of[ref.id], ref.back) for ref in step.after))
        self.order: dict[Queue, list[int]] = defaultdict(list)
        for i, step in enumerate(steps):
            self.order[step.queue].append(i)
        if Queue.COMPUTE not in self.order:
            raise PlanError(f"plan of {plan.policy!r} has no compute steps")
        costs = cost.step_costs(plan)
        self.seconds, self.dram = costs.seconds, costs.dram_bytes
        self.link = [step.kind in COPIES for step in steps]
        self.lane = self._lanes()
        machine = plan.machine
        self.shared = self._rates_may_be_short()
        self.bandwidth = Bandwidth(self.env, machine.host.dram_bytes_per_s, machine.link.duplex, machine.slowdowns)
        self.duty = [cost.duty(step) for step in steps] if machine.slowdowns else [1.0] * count

        self.done = [0] * count  # iterations in which the step has ended
        self.waiters: list[list[simpy.Event]] = [[] for _ in steps]
        self.at: dict[Queue, tuple[int, int]] = {}  # position of each queue: (step, iteration)
        self.ready = [[0.0] * count for _ in range(max_iterations)]
        self.begun = [[0.0] * count for _ in range(max_iterations)]
        self.ended = [[0.0] * count for _ in range(max_iterations)]
        self.arrived = self.begun  # when a step could have started: earlier, where it had to meet those of other ranks
        self.meets: frozenset[int] = frozenset()
        self.dram_lost = [[0.0] * count for _ in range(max_iterations)] if self.shared else []
        self.waited_for: list[dict[int, int]] = [{} for _ in range(max_iterations)]
        self.queues_done = [0] * max_iterations
        self.mark = [0] * max_iterations  # length of the byte log when the compute queue ended the iteration
        self.cells_at: list[list[int]] = [[] for _ in range(max_iterations)]
        self.stopped = False
        self.steady = False
        self.last = max_iterations - 1

        for queue in self.order:
            self.env.process(self._run_queue(queue))
        if env is None:
            self.env.run()
            if not self.stopped:
                raise self.deadlock()

    # -- the processes ------------------------------------------------------------------------------------------------

    def _run_queue(self, queue: Queue) -> Generator[simpy.Event, float, None]:
        env, memory, after, done, waiters = self.env, self.memory, self.after, self.done, self.waiters
        seconds, dram, order, jitter = self.seconds, self.dram, self.order[queue], self.jitter
        at = self.at
        for k in range(self.max_iterations):
            ready, begun, ended, waited_for = self.ready[k], self.begun[k], self.ended[k], self.waited_for[k]
            for i in order:
                if self.stopped:
                    return
                ready[i] = env.now
                at[queue] = (i, k)
                for j, back in after[i]:
                    wanted = k + 1 - back
                    while done[j] < wanted:
                        wake = env.event()
                        waiters[j].append(wake)
                        yield wake
                        waited_for[i] = j
                duration = seconds[i]
                if jitter is not None:
                    duration *= jitter(self.plan.steps[i].id, k)
                if i in self.meets:
                    duration = yield self._meet(i, k, duration)
                begun[i] = env.now
                memory.start(i, env.now)
                if duration > 0:
                    if self.shared and (dram[i] or self.plan.machine.slowdowns):
                        lost = self.bandwidth.dram_lost_s
                        yield self._work(i, duration)
                        self.dram_lost[k][i] = self.bandwidth.dram_lost_s - lost
                    else:
                        yield env.timeout(duration)
                ended[i] = env.now
                memory.end(i, env.now)
                done[i] += 1
                if waiters[i]:
                    for event in waiters[i]:
                        event.succeed()
                    waiters[i].clear()
            if queue is Queue.COMPUTE:
                self.mark[k] = len(memory.log)
                self.cells_at[k] = list(memory.cells)
            self.queues_done[k] += 1
            if self.queues_done[k] == len(self.order):
                self._iteration_ended(k)
        del at[queue]

    def _work(self, i: int, duration: float) -> simpy.Event:
        """Returns a step whose rate others may share."""
        queue = self.plan.steps[i].queue.value
        return self.bandwidth.run(duration, self.dram[i], self.link[i], queue=queue, duty=self.duty[i])

    def _meet(self, i: int, k: int, duration: float) -> simpy.Event:
        """Wait for the same step of the other ranks. The event's value is the step's duration for all."""
        raise NotImplementedError

    def _iteration_ended(self, k: int) -> None:
        self.steady = k >= 1 and self._pace_is_even(k)
        if self.steady or k == self.max_iterations - 1:
            self.stopped = True
            self.last = k

    def _pace_is_even(self, k: int) -> bool:
        """Returns whether iteration k is steady: [Note: when an iteration is steady]."""
        shift = np.subtract(self.ended[k], self.ended[k - 1])
        return bool(shift.max() - shift.min() <= TOLERANCE * shift.max())

    def deadlock(self) -> PlanError:
        """Returns the error for a run in which every queue waits, with the steps that each waits for."""
        steps = self.plan.steps
        lines = []
        for queue, (i, k) in sorted(self.at.items()):
            missing = [str(r) for r, (j, back) in zip(steps[i].after, self.after[i]) if self.done[j] < k + 1 - back]
            lines.append(f"{queue} at step {steps[i].id} ({steps[i].kind}) waits for {', '.join(missing)}")
        return PlanError(f"the plan deadlocks in iteration {min(k for _, k in self.at.values())}: {'; '.join(lines)}")

    # -- compiling ----------------------------------------------------------------------------------------------------

    def _rates_may_be_short(self) -> bool:
        """Returns whether DRAM or link could ever be short, so that the shared rates have to be followed at all."""
        if not self.plan.machine.link.duplex or self.plan.machine.slowdowns:
            return True
        most: dict[Queue, float] = {}
        for i, step in enumerate(self.plan.steps):
            if self.dram[i]:
                if self.seconds[i] <= 0 or self.jitter is not None:
                    return True
                most[step.queue] = max(most.get(step.queue, 0.0), self.dram[i] / self.seconds[i])
        return sum(most.values()) > self.plan.machine.host.dram_bytes_per_s

    def _lanes(self) -> list[str]:
        """Returns the cause of a wait for each step: its queue, or "barrier"."""
        lanes = [step.queue.value for step in self.plan.steps]
        last_moment = len(self.plan.workload.moments) - 1
        ends = {s.id for s in self.plan.steps if s.kind is Kind.COMPUTE and s.moment == last_moment}
        behind = False
        for i in self.order.get(Queue.ADAM, ()):
            step = self.plan.steps[i]
            behind = behind or any(ref.id in ends and not ref.back for ref in step.after)
            if behind and step.kind is Kind.CPU_UPDATE:
                lanes[i] = "barrier"
        return lanes

    # -- results ------------------------------------------------------------------------------------------------------

    def _blame(self, i: int, k: int) -> dict[str, float]:
        """Returns the seconds by cause of the wait of step i of iteration k: [Note: stall causes]."""
        since_s, at_s = self.ready[k][i], self.begun[k][i]
        blame: dict[str, float] = defaultdict(float)
        j = self.waited_for[k][i]
        kj = self._iteration_of(i, k, j)
        previous = self._previous
        while at_s > since_s:
            start_s = max(self.arrived[kj][j], since_s)
            if start_s < at_s:
                whole = self.ended[kj][j] - self.arrived[kj][j]
                lost = self.dram_lost[kj][j] * (at_s - start_s) / whole if self.shared and whole > 0 else 0.0
                blame[self.lane[j]] += at_s - start_s - lost
                if lost > 0:
                    blame["dram"] += lost
                at_s = start_s
            if at_s <= since_s:
                break
            if j in self.waited_for[kj]:
                before = self.waited_for[kj][j]
                j, kj = before, self._iteration_of(j, kj, before)
            elif previous[j] >= 0:
                j = previous[j]
            elif kj > 0:
                j, kj = self.order[self.plan.steps[j].queue][-1], kj - 1
            else:
                break
        return blame

    def _iteration_of(self, i: int, k: int, j: int) -> int:
        """Returns the iteration of j for which step i of iteration k waited."""
        return k - min(back for other, back in self.after[i] if other == j)

    def timeline(self) -> Timeline:
        plan, k = self.plan, self.last
        steps = plan.steps
        self._previous = [-1] * len(steps)
        for order in self.order.values():
            for a, b in pairwise(order):
                self._previous[b] = a
        stall_s: dict[str, float] = defaultdict(float)
        spans: list[Span] = []
        for it in range(k + 1):
            ready, begun, ended, waited_for = self.ready[it], self.begun[it], self.ended[it], self.waited_for[it]
            for i, step in enumerate(steps):
                cause = ""
                if begun[i] > ready[i]:
                    if step.queue is Queue.COMPUTE:
                        blame = self._blame(i, it)
                        cause = max(blame, key=lambda c: blame[c]) if blame else self.lane[waited_for[i]]
                        if it == k:
                            for name, seconds in blame.items():
                                stall_s[name] += seconds
                    else:  # a collective may also have waited for other ranks only
                        cause = self.lane[waited_for.get(i, i)]
                spans.append(
                    Span(
                        step=step.id,
                        iteration=it,
                        queue=step.queue,
                        kind=step.kind,
                        chunk=step.chunk,
                        moment=step.moment,
                        bytes=step.bytes,
                        ready_s=ready[i],
                        start_s=begun[i],
                        end_s=ended[i],
                        cause=cause,
                    )
                )
        busy_s = {
            queue.value: sum(self.ended[k][i] - self.begun[k][i] for i in order) for queue, order in self.order.items()
        }
        samples, peaks = self._samples(k)
        return Timeline(
            source="simulated",
            iterations=k + 1,
            iteration_s=self._iteration_s(k),
            spans=tuple(spans),
            samples=samples,
            peak_bytes=peaks,
            moved_bytes=dict(plan.moved_bytes),
            stall_s=dict(stall_s),
            busy_s=busy_s,
            label=plan.policy,
            phases=tuple(m.phase.value for m in plan.workload.moments),
            budget_bytes={place.value: size for place, size in plan.budgets.items()},
        )

    def _iteration_s(self, k: int) -> float:
        last = self.order[Queue.COMPUTE][-1]
        if self.steady:
            return self.ended[k][last] - self.ended[k - 1][last]
        half = max(1, k // 2)
        return max((self.ended[k][order[-1]] - self.ended[k - half][order[-1]]) / half for order in self.order.values())

    def _samples(self, k: int) -> tuple[tuple[ByteSample, ...], dict[str, int]]:
        """Returns bytes over the window of iteration k, and the peak of each place in it."""
        begin_s = self.ended[k - 1][self.order[Queue.COMPUTE][-1]]
        cells = list(self.cells_at[k - 1])
        width = len(CATEGORIES)
        places = sorted({cell // width for _, cell, _ in self.memory.log} | {0, 1})
        samples = [
            ByteSample(0.0, PLACES[p], CATEGORIES[c], cells[p * width + c]) for p in places for c in range(width)
        ]
        used = [sum(cells[p * width : (p + 1) * width]) for p in range(len(PLACES))]
        peaks = list(used)
        for time_s, cell, change in self.memory.log[self.mark[k - 1] : self.mark[k]]:
            cells[cell] += change
            place = cell // width
            used[place] += change
            if used[place] > peaks[place]:
                peaks[place] = used[place]
            samples.append(ByteSample(time_s - begin_s, PLACES[place], CATEGORIES[cell % width], cells[cell]))
        return tuple(samples), {PLACES[p]: peaks[p] for p in places}
