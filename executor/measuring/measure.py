"""Measured memory of one iteration: non-model bytes of live storages, payload bytes of the arena.

Two iterations run without threads, in a timeline's order (or as early as edges allow): the first brings the queues into
it, the second is measured. Counting costs time, so neither is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from executor.driving.loop import Loop
from executor.measuring.measured import Measured
from executor.memory.arena import PLACES, Arena
from executor.moments.listener import Listener
from executor.moments.live_bytes import LiveStorages
from executor.queues.interface import Queues
from executor.queues.logs import counted_bytes
from executor.queues.serial import QueueEvent, SerialQueues, follow
from pstar_sim.core.step import Place
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import PlanError

if TYPE_CHECKING:
    from executor.memory.byte_log import ByteChange


def measure_iteration(
    model: nn.Module,
    loop: Loop,
    use_queues: Callable[[Queues], None],
    step_fn: Callable[[], Any],
    order: Timeline | None = None,
) -> Measured:
    """Run `step_fn` (a whole iteration, with step and zero_grad) twice, and measure the second.

    Raises PlanError inside an iteration, for another plan's timeline, and where `step_fn` makes another plan."""
    state, run, parameters = loop.state, loop.state.run, loop.reader.parameters
    if state.cursor.moment >= 0:
        raise PlanError("measure_iteration inside an iteration; call it after optimizer.step()")
    chooser = follow(order, run.plan) if order is not None else _as_early_as_possible
    threads, log = run.queues, run.arena.log
    serial = SerialQueues(chooser)
    loop.standstill.drain()
    use_queues(serial)
    watch: TideWatch | None = None
    try:
        step_fn()
        if state.run is not run:
            raise PlanError("measure_iteration: the first iteration has made another plan; measure again")
        live = LiveStorages(
            [parameters[t] for t in sorted(run.timetable.chunk_of)],
            model.buffers(),
            costs=False,
            device=run.backend.device,
        )
        watch = TideWatch(run.arena, live)
        first = state.iteration
        state.listeners.append(watch)
        begun = watch.payloads_now()
        log.marks = []
        log_at = len(log.changes)
        deviations = state.deviations
        with live:
            step_fn()
        marks, log.marks = log.marks, None
        changes = log.changes[log_at:]
        state.listeners.remove(watch)
        run.queues.settle(first)  # the iteration's last steps run on into the next forward
        moved = counted_bytes(run.plan, run.steps.span_log, first)  # before the threads continue and add to it
    finally:
        if watch is not None and watch in state.listeners:
            state.listeners.remove(watch)
        log.marks = None
        if state.run is run:
            use_queues(threads)
    peaks = tuple(watch.peaks)
    gpu = PeakMeter(peaks, begun[Place.GPU])
    gpu.follow(changes, marks, log_at)
    host = host_peak = begun[Place.HOST]
    for change in changes:
        if change.place is Place.HOST:
            host += change.change
            host_peak = max(host_peak, host)
    return Measured(
        non_model_bytes=peaks,
        peak_gpu_bytes=gpu.peak,
        payload_peak_bytes=gpu.payload_peak,
        peak_host_bytes=host_peak,
        moved_bytes=moved,
        on_plan=state.deviations == deviations and state.iteration == first + 1,
    )


def _as_early_as_possible(possible: Sequence[QueueEvent], compute: QueueEvent, may: bool) -> int | None:
    return 0


class TideWatch(Listener):
    def __init__(self, arena: Arena, live: LiveStorages) -> None:
        self.peaks = [0] * len(arena.plan.workload.moments)
        self._live = live
        self._arena = arena

    def payloads_now(self) -> dict[Place, int]:
        return {place: self._arena.payload_bytes(place) for place in PLACES}

    def close_moment(self, moment: int) -> None:
        self.peaks[moment] = self._live.peak

    def open_moment(self) -> None:
        self._live.reset_peak()


class PeakMeter:
    """Adds up payloads and the measured tide through the iteration."""

    def __init__(self, peaks: Sequence[int], payload: int) -> None:
        self._peaks = peaks
        self._payload = self.payload_peak = payload
        # Between the last moment of the iteration before and the first of this one; equal moments have equal peaks.
        self._tide = min(peaks[-1], peaks[0])
        self.peak = payload + self._tide

    def follow(self, changes: Sequence[ByteChange], marks: Sequence[tuple[int, str, int]], log_at: int) -> None:
        """changes: of the log, from `log_at` on.
        marks: the log's, of the same time.
        """
        at = 0
        for i, change in enumerate(changes):
            while at < len(marks) and marks[at][0] - log_at <= i:
                self.mark(*marks[at][1:])
                at += 1
            if change.place is Place.GPU and change.category != "non-model":
                self.change(change.change)
        for row in marks[at:]:
            self.mark(*row[1:])

    def mark(self, word: str, moment: int) -> None:
        following = self._peaks[(moment + 1) % len(self._peaks)]
        self._tide = self._peaks[moment] if word == "in" else min(self._peaks[moment], following)
        self._note()

    def change(self, size: int) -> None:
        self._payload += size
        self._note()

    def _note(self) -> None:
        self.payload_peak = max(self.payload_peak, self._payload)
        self.peak = max(self.peak, self._payload + self._tide)
