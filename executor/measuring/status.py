"""session.status(): a run in a few figures, for a progress line or a log.

It is read between two iterations, in any thread, without waiting. Figures are of the last finished iteration, as a
timeline measures it (queues/measured_timeline.py). Bytes are of the newest iteration whose bytes ([Note: whose bytes])
are all copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from executor.devices.backend import VirtualBackend
from executor.measuring.first import FirstIteration, TideReport
from executor.memory.arena import Arena
from executor.off_plan.plan_run import PlanRun, WholeState
from executor.queues.logs import IterationLog, StepLog
from executor.session.steps import Steps
from pstar_sim.core.step import COPIES, Place, Queue


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """One direction of the link.

    iteration: the newest whose copies have all ended; before there is one, the first, with its copies by now.
    moved_bytes: bytes that it copied, on plan or off; on plan the plan's.
    bytes_per_s: moved_bytes over the iteration's wall time.
    link_bytes_per_s: rate of the link (None: as fast as memory).
    busy_share: part of the last finished iteration in which a copy of the plan ran, 0 to 1.
    """

    iteration: int
    moved_bytes: int
    bytes_per_s: float
    link_bytes_per_s: float | None
    busy_share: float


@dataclass(frozen=True, kw_only=True)
class Status:
    """A run after its last finished iteration. Before the first has finished, seconds and rates are None and `links` is
    empty.

    on_plan: whether the last iteration ran as the plan says.
    iteration_s: wall time of the last iteration, the loop's time between two included.
    tokens_per_s: the plan's tokens (rows) per iteration over `iteration_s`.
    gpu_bytes: payloads and the plan's non-model bytes now.
    gpu_peak_bytes: most of these at once in the iteration; before the first iteration, by now.
    links: direction -> use of the link.
    waiting_share: part of the iteration in which the compute queue waited for another.
    waits_s: cause -> seconds of that waiting, as in `Timeline.stall_s`.
    adam_share: part in which the CPU ran an update.
    other_shapes: number of these that are batches of another shape than planned, which ran on plan.
    tide: the measured tide of the first iteration beside the plan's, and the most bytes that the gpu held with the
        measured tide; None before the comparison.
    exchanges: times in the iteration that memory went back to the driver, which stops the device ([Note: exchanges] in
        devices/cuda_blocks.py); 0 on the virtual accelerator.
    """

    policy: str
    iterations: int
    on_plan: bool
    iteration_s: float | None
    tokens_per_s: float | None
    gpu_bytes: int
    gpu_peak_bytes: int
    gpu_budget_bytes: int
    host_bytes: int
    host_budget_bytes: int
    links: Mapping[str, LinkUse]
    waiting_share: float
    adam_share: float
    deviations: int
    last_deviation: str
    tide: TideReport | None = None
    exchanges: int = 0
    other_shapes: int = 0
    waits_s: Mapping[str, float] = field(default_factory=dict)


def status_of(state: WholeState, first: FirstIteration | None) -> Status:
    log, (run, arena, own) = state.deviation_log, _present(state)
    plan = run.plan
    steps, logs, _ = run.queues.in_device_time(list(own.span_log), list(own.logs), (), wait=False)
    last: IterationLog | None = logs[-1] if logs else None
    start_s, end_s = _window(own, logs)
    length_s = end_s - start_s
    busy, waits_s = _busy(steps, last.number if last else 0, start_s, end_s)
    known = last is not None and length_s > 0
    links = _links(run, own, logs, busy, length_s) if known else {}
    return Status(
        policy=plan.policy,
        iterations=state.iteration,
        on_plan=last.on_plan if last is not None else True,
        iteration_s=length_s if known else None,
        tokens_per_s=plan.workload.tokens / length_s if known else None,
        gpu_bytes=arena.payload_bytes(Place.GPU) + arena.tide_bytes,
        gpu_peak_bytes=arena.log.gpu_peak_bytes(start_s, end_s if last is not None else math.inf),
        gpu_budget_bytes=plan.gpu_budget_bytes,
        host_bytes=arena.payload_bytes(Place.HOST),
        host_budget_bytes=plan.host_budget_bytes,
        links=links,
        waiting_share=min(1.0, sum(waits_s.values()) / length_s) if known else 0.0,
        adam_share=min(1.0, busy[Queue.ADAM.value] / length_s) if known else 0.0,
        deviations=state.deviations,
        last_deviation=log[-1] if log else "",
        tide=first.report if first is not None else None,
        other_shapes=state.other_shapes,
        waits_s=waits_s if known else {},
        exchanges=(last.exchanges - (logs[-2].exchanges if len(logs) > 1 else 0)) if last is not None else 0,
    )


def _present(state: WholeState) -> tuple[PlanRun, Arena, Steps]:
    """A new plan may take over meanwhile: the former run has no parts any more, and the state names the new one."""
    while True:
        run = state.run
        try:
            return run, run.arena, run.steps
        except AttributeError:
            if run is state.run:
                raise


def _busy(
    steps: Sequence[StepLog], number: int, start_s: float, end_s: float
) -> tuple[dict[str, float], dict[str, float]]:
    """In an iteration's window: queue -> seconds busy, and cause -> seconds in which compute waited."""
    busy = dict.fromkeys((q.value for q in Queue), 0.0)
    waits_s: dict[str, float] = {}
    # Steps are logged as they end, so the window's steps are the newest ones.
    for row in reversed(steps):
        if row.end_s <= start_s and row.iteration < number - 1:
            break
        busy[row.step.queue.value] += max(0.0, min(row.end_s, end_s) - max(row.start_s, start_s))
        if row.step.queue is Queue.COMPUTE and row.cause:
            waited_s = max(0.0, min(row.start_s, end_s) - max(row.ready_s, start_s))
            waits_s[row.cause] = waits_s.get(row.cause, 0.0) + waited_s
    return busy, waits_s


def _links(
    run: PlanRun, own: Steps, logs: Sequence[IterationLog], busy: Mapping[str, float], length_s: float
) -> dict[str, LinkUse]:
    """In the newest iteration with all copies ended.

    busy: `_busy` for a window of `length_s`.
    """
    backend, link = run.backend, run.plan.machine.link
    rates: Mapping[str, float | None] = {"h2d": link.h2d_bytes_per_s, "d2h": link.d2h_bytes_per_s}
    if isinstance(backend, VirtualBackend):
        rates = backend.link.bytes_per_s
    at = _copied(run, own, logs)
    moved = own.moved.of(logs[at].number)
    took_s = logs[at].end_s - (logs[at - 1].end_s if at else own.first_s)
    return {
        direction: LinkUse(
            iteration=logs[at].number,
            moved_bytes=moved[direction],
            bytes_per_s=moved[direction] / took_s if took_s > 0 else 0.0,
            link_bytes_per_s=rates[direction],
            busy_share=min(1.0, busy[direction] / length_s),
        )
        for direction in ("h2d", "d2h")
    }


def _copied(run: PlanRun, own: Steps, logs: Sequence[IterationLog]) -> int:
    planned = sum(step.kind in COPIES for step in run.plan.steps)
    for at in reversed(range(len(logs))):
        if not logs[at].on_plan or own.moved.ends_in(logs[at].number) >= planned:
            return at
    return 0


def _window(own: Steps, logs: Sequence[IterationLog]) -> tuple[float, float]:
    if not logs:
        return own.first_s, own.first_s
    return (logs[-2].end_s if len(logs) > 1 else own.first_s), logs[-1].end_s
