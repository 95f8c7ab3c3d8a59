"""The queues' calls for each step of one plan, and their logs.

The compute queue's run in the user's thread, others in their own. Work on payloads is in `memory/contents.py`, on
activations in `activations/stashes.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from executor.activations.stashes import Stashes
from executor.devices.backend import give_freed_pages_back
from executor.queues.logs import IterationLog, StepLog
from executor.queues.measured_timeline import build_timeline
from executor.queues.moved import Moved
from executor.session.reader import Reader
from executor.session.state import PlanBytes, RunState
from pstar_sim.core.step import COPIES, DISK_COPIES, UPDATES, Kind, Queue
from pstar_sim.core.timeline import Timeline
from pstar_sim.core.workspace import LOGGED_ITERATIONS, logged_iterations

KEPT_CHANGES = 2_000  # least number of changes of bytes to keep; with a quarter more the older ones are summed up


class Steps:
    """span_log: of these iterations, in the order of ends.
    first_s: when the first may begin.
    """

    def __init__(
        self, run: PlanBytes, state: RunState, reader: Reader, stashes: Stashes, clock: Callable[[], float]
    ) -> None:
        self.run = run
        self.state = state
        self.reader = reader
        self.updates = reader.updates
        self.stashes = stashes
        self._plan_steps = run.plan.steps
        self._clock = clock
        kept = logged_iterations(len(run.plan.steps)) if run.plan.nvme_budget_bytes else LOGGED_ITERATIONS
        self.logs: deque[IterationLog] = deque(maxlen=kept)
        self.span_log: deque[StepLog] = deque(maxlen=kept * max(1, len(run.plan.steps)))
        self.moved = Moved(run.backend.copied_bytes)
        self.first_s = clock()
        self._begun: dict[int, tuple[float, float, str]] = {}  # step -> (ready, begun, cause of the wait)
        self._copied: dict[int, int] = {}  # step that copies -> bytes
        self._last_moment = len(run.timetable.names) - 1
        self._most_changes = KEPT_CHANGES

    def start(self) -> None:
        """Bytes copied before do not count."""
        self.moved = Moved(self.run.backend.copied_bytes)

    # -- Work: calls of the queues ------------------------------------------------------------------------------------

    def enter_thread(self, queue: Queue) -> None:
        self.run.backend.enter_thread(queue)

    def note_landing(self, chunk: int) -> None:
        self.reader.refresh(chunk)

    def begin(self, i: int, iteration: int, ready_s: float, waited_for: int | None, *, take: bool = True) -> None:
        start_s = self._clock()
        cause = "" if waited_for is None else self._cause(waited_for)
        self._begun[i] = (ready_s or start_s, start_s, cause)
        if take:
            step = self._plan_steps[i]
            if step.stash is None:
                self.run.contents.begin(step)

    def _cause(self, waited_for: int) -> str:
        other = self._plan_steps[waited_for]
        barrier = other.kind is Kind.COMPUTE and other.moment == self._last_moment
        return "barrier" if barrier else other.queue.value

    def work(self, i: int, iteration: int) -> None:
        step, contents, updates, stashes = self._plan_steps[i], self.run.contents, self.updates, self.stashes
        ahead_bytes = 0
        if step.kind in COPIES:
            before = stashes.copied_bytes(step.queue)
        elif step.kind in DISK_COPIES:
            before = self.run.arena.disks.moved_bytes[step.kind]
        with torch.no_grad():
            now = self.state.now  # the user's thread may begin the next iteration between two lines
            if updates.eager and step.kind in UPDATES and iteration == now.number and step.chunk is not None:
                now.early.update(contents.chunks[step.chunk].with_gradient())
                self.reader.refresh(step.chunk)
            if step.stash is not None:
                ahead_bytes = stashes.move(step)
            else:
                contents.work(step, self.state.now.update_of(iteration), lambda: updates.norms(iteration))
        if step.kind in COPIES:
            copied_bytes = stashes.copied_bytes(step.queue) - before
            self._copied[i] = copied_bytes + ahead_bytes
            self.moved.step(iteration, step.queue.value, copied_bytes + ahead_bytes)
        elif step.kind in DISK_COPIES:
            self._copied[i] = self.run.arena.disks.moved_bytes[step.kind] - before

    def finish(self, i: int, iteration: int) -> None:
        step = self._plan_steps[i]
        if step.stash is None:
            self.run.contents.finish(step)
        self.note_end(i, iteration, self._clock())

    # -- the user's thread --------------------------------------------------------------------------------------------

    def note_end(self, i: int, iteration: int, end_s: float) -> None:
        ready_s, start_s, cause = self._begun.pop(i)
        copied_bytes = self._copied.pop(i, 0)
        row = (self._plan_steps[i], iteration, ready_s, start_s, cause, end_s, copied_bytes)
        self.span_log.append(tuple.__new__(StepLog, row))  # past a constructor in Python

    def run_inline(self, i: int, iteration: int) -> None:
        """Runs a step of the compute queue other than a moment."""
        queues = self.run.queues
        ready_s = self._clock()
        waited_for = queues.wait(i, iteration)
        self.begin(i, iteration, ready_s, waited_for)
        self.work(i, iteration)
        queues.before_end(i, iteration)
        self.finish(i, iteration)
        queues.end_step(i, iteration)

    def forget(self, i: int) -> None:
        self._begun.pop(i, None)

    def close_iteration(self, iteration: int, *, on_plan: bool) -> None:
        """Write the log of an iteration whose compute is over."""
        log, backend, now = self.run.arena.log, self.run.backend, self.state.now
        if self.run.plan.nvme_budget_bytes and backend.device.type == "cpu":
            give_freed_pages_back()  # [Note: glibc and eviction]: small blocks would leave 8 MB of a small model
        self.logs.append(
            IterationLog(iteration, self._clock(), on_plan, backend.exchanges, tuple(now.shares), captured=now.captured)
        )
        if not on_plan:
            self.moved.others(iteration, backend.copied_bytes)
        self.moved.forget(self.logs[0].number)
        measured = log.marks is not None  # a measurement needs the changes of this iteration
        if len(self.logs) == self.logs.maxlen and len(log.changes) > self._most_changes and not measured:
            log.trim(self.logs[0].end_s)
            self._most_changes = max(KEPT_CHANGES, len(log.changes) * 5 // 4)

    def last_on_plan(self) -> IterationLog | None:
        """The newest kept with the plan's shape, else with smaller batches; those with a capture inside do not
        count."""
        ran = [row for row in self.logs if row.on_plan and not row.captured]
        return next((row for row in reversed(ran) if row.planned), ran[-1] if ran else None)

    def timeline(self, last: int | None = None) -> Timeline:
        """See `Session.timeline`."""
        run = self.run
        if not self.state.closed:
            run.queues.settle(self.state.iteration - 1)
        steps, iterations, changes = run.queues.in_device_time(
            list(self.span_log), [row for row in self.logs if last is None or row.number <= last],
            list(run.arena.log.changes),
        )  # fmt: skip
        return build_timeline(run.plan, steps, iterations, changes, self.first_s)
