"""Compute in the user's thread, every other queue in its own."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from executor.queues.interface import SIDE_QUEUES, Progress, QueuesBase, Work, without_locals
from pstar_sim.core.step import Queue
from pstar_sim.errors import OutOfMemory, PlanError
from pstar_sim.python310 import add_note

log = logging.getLogger("executor")

_LOOK_S = 1.0  # seconds after which a wait checks that the threads are alive


class _Crew:
    """The lock is reentrant: garbage collection may stop the crew anywhere, also in its own threads."""

    def __init__(self, join_s: float) -> None:
        self.lock = threading.RLock()
        self.conditions: list[threading.Condition] = []
        self.threads: list[threading.Thread] = []
        self.stopping = False
        self._join_s = join_s

    def notify_all(self) -> None:
        for condition in self.conditions:
            condition.notify_all()

    def stop(self) -> None:
        with self.lock:
            self.stopping = True
            self.notify_all()
        if threading.current_thread() in self.threads:
            return  # the other threads may need a lock that this thread holds; they end later
        for thread in self.threads:
            thread.join(self._join_s)
        stuck = [thread.name for thread in self.threads if thread.is_alive()]
        if stuck:
            log.warning("%s did not stop within %.0f s", ", ".join(stuck), self._join_s)


class ThreadQueues(QueuesBase):
    """watchdog_s: seconds without the end of any step, while the user's thread waits, after which the log names the
        step that waits. If no step runs or may start, PlanError is raised.
    join_s: seconds for which `stop` waits for a running step.
    """

    def __init__(
        self, *, watchdog_s: float = 30.0, join_s: float = 10.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__()
        self._watchdog_s = watchdog_s
        self._join_s = join_s
        self._clock = clock
        self._crew = _Crew(join_s)
        self._lock = self._crew.lock
        self._conditions = {queue: threading.Condition(self._lock) for queue in (Queue.COMPUTE, *SIDE_QUEUES)}
        self._busy: set[Queue] = set()
        self._waiting: set[Queue] = set()
        self._ended_here = threading.Condition(self._lock)  # for steps that wait for others (await_steps)
        self._crew.conditions = [*self._conditions.values(), self._ended_here]
        self._awaited = 0  # calls of `await_steps` that have not returned
        self._ended_steps = 0

    @property
    def stopped(self) -> bool:
        return self._crew.stopping

    def renew(self) -> ThreadQueues:
        return ThreadQueues(watchdog_s=self._watchdog_s, join_s=self._join_s, clock=self._clock)

    def stand(self, at: Mapping[Queue, tuple[int, int]]) -> None:
        with self._lock:
            self._at.update(at)

    def start(self, progress: Progress, work: Work) -> None:
        self._progress, self._worker = progress, weakref.ref(work)
        self._started = progress
        for queue in SIDE_QUEUES:
            if progress.order.get(queue):
                self._at[queue] = (0, 0)
                thread = threading.Thread(target=self._run, args=(queue,), name=f"executor-{queue.value}", daemon=True)
                self._crew.threads.append(thread)
        for thread in self._crew.threads:
            thread.start()

    def _run(self, queue: Queue) -> None:
        try:
            self._work.enter_thread(queue)
            while self._one(queue):
                pass
        except BaseException as error:  # the user's thread raises it
            with self._lock:
                iteration, at = self._at[queue]
                word = self._progress.word(self._progress.order[queue][at], iteration)
                add_note(error, f"raised in queue {queue.value}, at {word}")
                without_locals(error)
                self._busy.discard(queue)
                self._failure = self._failure or error
                self._notify_all()

    def _one(self, queue: Queue) -> bool:
        progress, condition = self._progress, self._conditions[queue]
        order = progress.order[queue]
        ready_s = self._clock()
        waited_for: int | None = None
        with self._lock:
            while True:
                if self._crew.stopping or self._failure is not None:
                    return False
                iteration, at = self._at[queue]
                i = order[at]
                if not self._paused and iteration <= self._limit(queue) and queue not in self._short:
                    missing = progress.missing(i, iteration)
                    if not missing:
                        break
                    waited_for = missing[-1]
                self._waiting.add(queue)
                condition.wait()
                self._waiting.discard(queue)
            self._busy.add(queue)
        work = self._work  # holds the work until the step has ended
        self._arrive(queue, i, iteration)
        try:
            work.begin(i, iteration, ready_s, waited_for)
        except OutOfMemory as error:
            without_locals(error)
            del work
            self._refused(i)
            with self._lock:
                self._busy.discard(queue)
                self._short[queue] = error
                self._notify_all()
            return True
        work.work(i, iteration)
        work.finish(i, iteration)
        self._depart(queue, i, iteration)
        with self._lock:
            self._busy.discard(queue)
            self._at[queue] = (iteration, at + 1) if at + 1 < len(order) else (iteration + 1, 0)
            self._mark(i, iteration)
        return True

    def _arrive(self, queue: Queue, i: int, iteration: int) -> None:
        """Its edges are satisfied; in its queue's thread, without the lock."""

    def _refused(self, i: int) -> None:
        """The last arrived step got no memory, and arrives again or is jumped over."""

    def _depart(self, queue: Queue, i: int, iteration: int) -> None:
        """Before other threads know; called as `_arrive`."""

    def _limit(self, queue: Queue) -> int:
        return min(self._allowed, self._net_allowed) if queue is Queue.NET else self._allowed

    def _mark(self, i: int, iteration: int) -> None:
        self._progress.done[i] = iteration
        self._ended_steps += 1
        self._ended_here.notify_all()
        for queue in self._progress.wakes[i]:
            if queue in self._waiting:
                self._conditions[queue].notify_all()
        if Queue.COMPUTE in self._waiting:
            self._conditions[Queue.COMPUTE].notify_all()

    def _notify_all(self) -> None:
        self._crew.notify_all()

    def allow(self, iteration: int) -> None:
        with self._lock:
            self._allowed = max(self._allowed, iteration)
            self._notify_all()

    def allow_net(self, iteration: int) -> None:
        with self._lock:
            self._net_allowed = max(self._net_allowed, iteration)
            self._notify_all()

    def await_steps(self, steps: Sequence[int], iteration: int) -> None:
        with self._lock:
            self._awaited += 1
            try:
                while any(self._progress.done[i] < iteration for i in steps):
                    if self._failure is not None:
                        raise self._failure
                    if self._crew.stopping:
                        raise PlanError("the queues were stopped while a step waited for another")
                    self._look_at_threads()
                    self._ended_here.wait(min(self._watchdog_s, _LOOK_S))
            finally:
                self._awaited -= 1

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._notify_all()

    def wait(self, i: int, iteration: int) -> int | None:
        if self._failure is None and (not self._progress.after[i] or self._progress.ready(i, iteration)):
            return None  # without the lock: ended steps stay ended
        return self._wait_for(i, iteration)

    def _wait_for(self, i: int, iteration: int) -> int | None:
        progress = self._progress
        waited_for: int | None = None

        def ready() -> bool:
            nonlocal waited_for
            missing = progress.missing(i, iteration)
            if missing:
                waited_for = missing[-1]
            return not missing

        self._wait_until(ready, lambda: progress.waiting(i, iteration), needs_all=True)
        return waited_for

    def before_end(self, i: int, iteration: int) -> None:
        return None

    def end_step(self, i: int, iteration: int) -> None:
        """[Note: who is woken] A queue may sleep until this step ends only if one of its steps waits for it (`wakes`).
        Any other sleeper is in `await_steps`, which counts itself in `_awaited` before it checks. Otherwise no thread
        has to be woken, and the lock is not taken.
        """
        self._progress.done[i] = iteration
        if self._progress.wakes[i] or self._awaited:
            with self._lock:
                self._mark(i, iteration)

    def settle(self, iteration: int) -> None:
        side = [i for queue in SIDE_QUEUES for i in self._progress.order.get(queue, ())]
        self._wait_until(
            lambda: all(self._progress.done[i] >= iteration for i in side),
            lambda: f"the end of iteration {iteration}",
        )

    def pause(self) -> None:
        with self._lock:
            self._paused = True
        self._wait_until(lambda: not self._busy, lambda: "a step that is being executed to end", idle_is_stuck=False)

    def resume(self) -> None:
        """Wakes the queues whose next step may start; a step for which another waits wakes its queue when it ends."""
        with self._lock:
            self._paused = False
            for queue in self._at:
                if queue in self._waiting and self._may_start(queue):
                    self._conditions[queue].notify_all()

    def jump(self, iteration: int) -> None:
        with self._lock:
            self._progress.done[:] = [iteration] * len(self._progress.done)
            for queue in self._at:
                self._at[queue] = (iteration + 1, 0)
            self._short.clear()

    def stop(self) -> None:
        self._crew.stop()

    def stopper(self) -> Callable[[], object]:
        return self._crew.stop

    def _wait_until(
        self,
        condition: Callable[[], bool],
        what: Callable[[], str],
        *,
        idle_is_stuck: bool = True,
        needs_all: bool = False,
    ) -> None:
        """Raises what ended a queue, PlanError if no step can ever end, OutOfMemory if a queue is short of memory and
        nothing else moves (needs_all: at once)."""
        compute = self._conditions[Queue.COMPUTE]
        with self._lock:
            try:
                self._waiting.add(Queue.COMPUTE)
                ended, since_s = self._ended_steps, self._clock()
                while True:
                    if self._failure is not None:
                        raise self._failure
                    if condition():
                        return
                    if self._short and (needs_all or not self._moves()):
                        raise next(iter(self._short.values()))
                    woken = compute.wait(min(self._watchdog_s, _LOOK_S))
                    if woken or self._ended_steps != ended:
                        ended, since_s = self._ended_steps, self._clock()
                        continue
                    self._look_at_threads()
                    if self._clock() - since_s < self._watchdog_s:
                        continue
                    since_s = self._clock()
                    message = f"waiting for {what()}: no step has ended for {self._watchdog_s:g} s; {self._standing()}"
                    if idle_is_stuck and not self._moves():
                        raise PlanError(f"the queues are stuck: {message}")
                    log.warning("%s", message)
                    if not self._busy:  # a step may start, but its thread has no processor or was not woken
                        self._notify_all()
            finally:
                self._waiting.discard(Queue.COMPUTE)

    def _look_at_threads(self) -> None:
        dead = [thread.name for thread in self._crew.threads if not thread.is_alive()]
        if dead and not self._crew.stopping and self._failure is None:
            self._failure = PlanError(f"the thread {dead[0]} has ended; prepare the model again")
            self._notify_all()

    def _moves(self) -> bool:
        return bool(self._busy) or any(map(self._may_start, self._at))

    def _may_start(self, queue: Queue) -> bool:
        iteration, at = self._at[queue]
        return (
            not self._paused
            and queue not in self._short
            and iteration <= self._limit(queue)
            and self._progress.ready(self._progress.order[queue][at], iteration)
        )

    def _standing(self) -> str:
        words = []
        for queue, (iteration, at) in self._at.items():
            i = self._progress.order[queue][at]
            if queue in self._busy:
                words.append(f"{queue.value} executes {self._progress.word(i, iteration)}")
            elif queue in self._short:
                words.append(f"{queue.value} is short of memory for {self._progress.word(i, iteration)}")
            elif iteration > self._limit(queue) or self._paused:
                words.append(f"{queue.value} is held")
            else:
                missing = [self._progress.steps[j].id for j in self._progress.missing(i, iteration)]
                words.append(f"{queue.value} at {self._progress.word(i, iteration)} waits for steps {missing}")
        return "; ".join(words)
