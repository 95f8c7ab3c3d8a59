"""Chrome trace JSON, for ui.perfetto.dev.

The format is Perfetto's "other formats": complete events (ph X), counters (C), metadata (M), flows (s, f), in
microseconds. Counters cover the steady iteration, where several timelines, as groups of lanes, begin together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Queue
from pstar_sim.core.timeline import Span, Timeline
from pstar_sim.report.byte_curves import steady_start_s
from pstar_sim.report.step_names import chunk_words

_LANES = {
    Queue.COMPUTE: "compute",
    Queue.H2D: "h2d copies",
    Queue.D2H: "d2h copies",
    Queue.ADAM: "CPU Adam",
    Queue.NET: "collectives",
    Queue.NVME: "NVMe",
    Queue.NVME_WRITE: "NVMe writes",
    Queue.SEND: "sends",
    Queue.RECEIVE: "receives",
}


def to_perfetto(timelines: Timeline | Sequence[Timeline], plan: Plan | None = None) -> dict[str, Any]:
    """For `json.dump`. Raises PstarError where one of several has no compute spans.

    plan: names moments, lists and parts of chunks.
    """
    many = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    steady = [steady_start_s(t) for t in many] if len(many) > 1 else [0.0]
    events: list[dict[str, Any]] = []
    for number, (timeline, start_s) in enumerate(zip(many, steady), start=1):
        events.extend(_group(timeline, plan, number, max(steady) - start_s))
    about: Mapping[str, Any] = _about(many[0])
    if len(many) > 1:
        about = {f"{n} {t.source}": _about(t) for n, t in enumerate(many, start=1)}
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": about}


def _group(timeline: Timeline, plan: Plan | None, pid: int, shift_s: float) -> list[dict[str, Any]]:
    name = f"{timeline.label or 'plan'} ({timeline.source})"
    events = [_meta("process_name", pid, 0, {"name": name}), _meta("process_sort_index", pid, 0, {"sort_index": pid})]
    lanes = {queue: number for number, queue in enumerate(_LANES, start=1)}
    for queue in sorted({s.queue for s in timeline.spans}, key=lambda q: lanes[q]):
        events.append(_meta("thread_name", pid, lanes[queue], {"name": _LANES[queue]}))
        events.append(_meta("thread_sort_index", pid, lanes[queue], {"sort_index": lanes[queue]}))
    computes = {(s.iteration, s.moment): s for s in timeline.spans if s.kind is Kind.COMPUTE}
    names = chunk_words(plan)
    for number, span in enumerate(timeline.spans):
        if span.end_s <= span.start_s:
            continue  # bookkeeping that takes no time (drop, alloc, free): the counters show it
        where = (pid, lanes[span.queue], shift_s)
        if span.start_s > span.ready_s and span.queue is Queue.COMPUTE and span.cause:
            name = f"waits for {span.cause}"
            events.append(_slice(name, "stall", where, span.ready_s, span.start_s, {"cause": span.cause}))
        args = {
            "step": span.step,
            "iteration": span.iteration,
            "bytes": span.bytes,
            "moment": span.moment,
            "chunk": span.chunk,
        }
        args = {k: v for k, v in args.items() if v is not None}
        events.append(_slice(_name(span, plan, names), span.kind.value, where, span.start_s, span.end_s, args))
        use = computes.get((span.iteration, span.moment)) if span.kind is Kind.FETCH else None
        if use is not None and use.start_s >= span.start_s:
            flow = {"cat": "fetch to use", "name": "fetch to use", "id": f"{pid}.{number}", "pid": pid}
            begin, end = _us(span.start_s + shift_s), _us(use.start_s + shift_s)
            events.append({**flow, "ph": "s", "tid": lanes[span.queue], "ts": begin})
            events.append({**flow, "ph": "f", "bp": "e", "tid": lanes[Queue.COMPUTE], "ts": end})
    events.extend(_counters(timeline, pid, shift_s))
    return events


def _about(timeline: Timeline) -> Mapping[str, Any]:
    return {
        "source": timeline.source,
        "label": timeline.label,
        "iteration_s": timeline.iteration_s,
        "iterations": timeline.iterations,
    }


def _counters(timeline: Timeline, pid: int, shift_s: float) -> list[dict[str, Any]]:
    origin = steady_start_s(timeline) + shift_s
    events: list[dict[str, Any]] = []
    for place in sorted({s.place for s in timeline.samples}):
        now: dict[str, int] = {s.category: 0 for s in timeline.samples if s.place == place}
        rows: dict[float, dict[str, int]] = {}
        for sample in (s for s in timeline.samples if s.place == place):
            now[sample.category] = sample.bytes
            rows[sample.time_s] = dict(now)
        name = f"{place} memory [bytes]"
        for time_s, row in rows.items():
            events.append({"ph": "C", "name": name, "pid": pid, "ts": _us(origin + time_s), "args": row})
    return events


def _name(span: Span, plan: Plan | None, names: Mapping[int, str]) -> str:
    if span.kind is Kind.COMPUTE and span.moment is not None:
        return plan.workload.moments[span.moment].name if plan is not None else f"moment {span.moment}"
    if span.kind in (Kind.STASH_OUT, Kind.STASH_IN) and span.moment is not None and plan is not None:
        module = plan.workload.moments[span.moment].module
        return f"{span.kind.value} {module}"
    return span.kind.value if span.chunk is None else f"{span.kind.value} {names.get(span.step, f'chunk {span.chunk}')}"


def _slice(
    name: str, category: str, where: tuple[int, int, float], start_s: float, end_s: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    pid, tid, shift_s = where
    begin = _us(start_s + shift_s)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": begin,
        "dur": round(_us(end_s + shift_s) - begin, 3),
        "args": dict(args),
    }


def _meta(kind: str, pid: int, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": dict(args)}


def _us(time_s: float) -> float:
    return round(time_s * 1e6, 3)
