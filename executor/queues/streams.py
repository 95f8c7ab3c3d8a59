"""Queues on an accelerator to which work is issued ahead of time.

For other threads a device step has *ended* when it is issued; its event says when it has happened. A host step (CPU
Adam's, disks') has ended when it has happened.

[Note: edges on streams] The thread that starts a step waits until the steps in its `after` have ended in that sense.
From a device step to another queue's, the later step's stream or, for a host step, thread waits for the event. So no
event is waited for before it is recorded: such a wait returns at once, and the step would silently compute with wrong
data. The training thread waits only for steps not issued yet: in the steady state, for host steps.

[Note: in flight] A chunk's ledger says "on the gpu" when its copy is issued, but the compute stream may read it only
after the event, so its parameters stay parked until `land`, called by a moment for every chunk that it reads, by the
on-demand mode for unplanned reads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

from executor.queues.device_time import DeviceTimes
from executor.queues.interface import SIDE_QUEUES, Progress, Work
from executor.queues.threads import ThreadQueues
from pstar_sim.core.step import Kind, Queue

if TYPE_CHECKING:
    from executor.devices.backend import Backend, StreamBackend
    from executor.memory.byte_log import ByteChange
    from executor.queues.logs import IterationLog, StepLog

log = logging.getLogger("executor")

_ARRIVALS = frozenset({(Kind.FETCH, "param"), (Kind.GATHER, "remote"), (Kind.GATHER, "param")})
_POLL_S = 2e-4


def queues_for(backend: Backend, *, watchdog_s: float) -> ThreadQueues:
    if backend.streams is None:
        return ThreadQueues(watchdog_s=watchdog_s)
    return StreamQueues(backend.streams, watchdog_s=watchdog_s)


class StreamQueues(ThreadQueues):
    """Each thread issues to the backend's stream of its queue. Arguments as for ThreadQueues.

    host_wait_s: seconds that the training thread has waited on the host: for steps not issued yet, and for figures that
        it needs (`waited`: whether an fp16 gradient overflowed).
    """

    def __init__(
        self,
        backend: StreamBackend,
        *,
        watchdog_s: float = 30.0,
        join_s: float = 10.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(watchdog_s=watchdog_s, join_s=join_s, clock=clock)
        self._backend = backend
        self._events: list[dict[int, Any]] = []  # step -> iteration -> event, of the last two iterations
        self._latest: dict[Queue, Any] = {}
        self._in_flight: dict[int, Any] = {}  # chunk -> event of its copy; None while the copy is being issued
        self._times = DeviceTimes(backend)
        self.host_wait_s = 0.0
        self.host_waits = 0

    def renew(self) -> StreamQueues:
        return StreamQueues(self._backend, watchdog_s=self._watchdog_s, join_s=self._join_s, clock=self._clock)

    def start(self, progress: Progress, work: Work) -> None:
        self._events = [{} for _ in progress.steps]
        self._times.begin(progress)
        super().start(progress, work)

    # -- issuing ------------------------------------------------------------------------------------------------------

    def _arrive(self, queue: Queue, i: int, iteration: int) -> None:
        progress, backend = self._progress, self._backend
        on_host = queue in backend.host_queues
        for j, back in progress.after[i]:
            other = progress.steps[j].queue
            if other is queue or other in backend.host_queues:
                continue
            event = self._event(j, iteration - back)
            if event is None:
                continue
            if on_host:
                backend.synchronize(event)
                if self._failure is not None:  # a rank was lost: its collectives were aborted, not done
                    raise self._failure
            elif not backend.query(event):
                backend.wait_event(queue, event)
        if on_host:
            return
        step = progress.steps[i]
        if step.chunk is not None and (step.kind, step.list) in _ARRIVALS:
            self._in_flight[step.chunk] = None
        self._times.note_begin(i, iteration, backend.record(queue))

    def _depart(self, queue: Queue, i: int, iteration: int) -> None:
        if queue in self._backend.host_queues:
            return
        event = self._backend.record(queue)
        events = self._events[i]
        events[iteration] = event
        events.pop(iteration - 2, None)
        self._latest[queue] = event
        self._times.note_end(i, iteration, event)
        step = self._progress.steps[i]
        if step.chunk is not None and (step.kind, step.list) in _ARRIVALS:
            self._in_flight[step.chunk] = event

    def _refused(self, i: int) -> None:
        step = self._progress.steps[i]
        if step.chunk is not None and (step.kind, step.list) in _ARRIVALS:
            self._in_flight.pop(step.chunk, None)

    def _event(self, j: int, iteration: int) -> Any:
        """Of j's first end that counts for this iteration, None if jumped over."""
        if iteration < 0:
            return None
        events = self._events[j]
        return events.get(iteration) or events.get(iteration + 1)

    def wait(self, i: int, iteration: int) -> int | None:
        begun_s = self._clock()
        waited_for = super().wait(i, iteration)
        if waited_for is not None:
            self.host_waits += 1
            self.host_wait_s += self._clock() - begun_s
        try:
            self._arrive(Queue.COMPUTE, i, iteration)
        except Exception as error:
            with self._lock:
                self._failure = self._failure or error
                self._notify_all()
            raise
        return waited_for

    def await_steps(self, steps: Sequence[int], iteration: int) -> None:
        """In addition to ThreadQueues', later work of this thread happens after these steps; in a thread of a host
        queue they have happened."""
        super().await_steps(steps, iteration)
        backend = self._backend
        queue = backend.queue
        for i in steps:
            event = None if self._progress.steps[i].queue in backend.host_queues else self._event(i, iteration)
            if event is None or backend.query(event):
                continue
            if queue in backend.host_queues:
                backend.synchronize(event)
                if self._failure is not None:
                    raise self._failure
            else:
                backend.wait_event(queue, event)

    def note_wait(self, seconds: float) -> None:
        self.host_waits += 1
        self.host_wait_s += seconds

    def end_step(self, i: int, iteration: int) -> None:
        self._depart(Queue.COMPUTE, i, iteration)
        super().end_step(i, iteration)

    # -- arrivals -----------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> Container[int]:
        return self._in_flight

    def land(self, chunk: int) -> None:
        if chunk not in self._in_flight:
            return
        if self._in_flight[chunk] is None:
            self._wait_until(
                lambda: self._in_flight.get(chunk, True) is not None, lambda: f"the copy of chunk {chunk} to be issued"
            )
        event = self._in_flight.pop(chunk, None)
        if event is not None and not self._backend.query(event):
            self._backend.wait_event(Queue.COMPUTE, event)
        self._work.note_landing(chunk)

    # -- standing still -----------------------------------------------------------------------------------------------

    def allow(self, iteration: int) -> None:
        self._times.resolve(iteration)
        super().allow(iteration)

    def settle(self, iteration: int) -> None:
        super().settle(iteration)
        self._catch_up(SIDE_QUEUES)

    def pause(self) -> None:
        super().pause()
        if self._started is None:
            return
        self._catch_up((*SIDE_QUEUES, Queue.COMPUTE))
        for chunk in list(self._in_flight):
            self.land(chunk)

    def resume(self) -> None:
        """Continue, once all work given to the compute queue meanwhile has happened: no edge orders it before the other
        streams."""
        if self._started is not None:
            self._backend.synchronize(self._backend.record(Queue.COMPUTE))
        super().resume()

    def jump(self, iteration: int) -> None:
        super().jump(iteration)
        for events in self._events:
            events.clear()

    def stop(self) -> None:
        """Once every stream has ended, raises the error that ended one, unless that was raised before."""
        super().stop()
        unreported: Exception | None = None
        for queue in self._latest:
            try:
                # Also work issued by a step that failed halfway.
                self._backend.synchronize(self._backend.record(queue))
            except Exception as error:
                if self._failure is None:
                    self._failure = unreported = error
                elif error is not self._failure:
                    log.info("the %s stream ended with %s, after %s", queue.value, error, self._failure)
        if unreported is not None:
            raise unreported

    def _catch_up(self, queues: Sequence[Queue]) -> None:
        """Wait for work issued to these streams; log what does not happen."""
        for queue in queues:
            event = self._latest.get(queue)
            if event is None:
                continue
            since_s = self._clock()
            while not self._backend.query(event):
                if self._failure is not None:
                    raise self._failure
                if self._clock() - since_s > self._watchdog_s:
                    since_s = self._clock()
                    log.warning(
                        "waiting for the %s stream: the work issued to it has not happened for %g s; %s",
                        queue.value, self._watchdog_s, self._standing(),
                    )  # fmt: skip
                time.sleep(_POLL_S)

    # -- times --------------------------------------------------------------------------------------------------------

    def in_device_time(
        self,
        steps: Sequence[StepLog],
        iterations: Sequence[IterationLog],
        changes: Sequence[ByteChange],
        *,
        wait: bool = True,
    ) -> tuple[Sequence[StepLog], Sequence[IterationLog], Sequence[ByteChange]]:
        self._times.resolve_all(wait=wait)
        return self._times.apply(steps, iterations, changes)
