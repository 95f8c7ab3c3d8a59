"""Timeline: what happened (or is predicted to happen), one schema for simulator and executor.

STUB SIGNATURES, to be completed by the owner of core/.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pstar_sim.core.step import Kind, Queue

__all__ = ["ByteSample", "Span", "Timeline"]


@dataclass(frozen=True, slots=True)
class Span:
    """One step of one iteration. ready_s: when its queue came to it; waited [ready_s, start_s) for `cause`
    ("" if it did not wait; else the queue name of the step it waited for last: "h2d", "d2h", "adam", "compute", "barrier")."""

    step: int
    iteration: int
    queue: Queue
    kind: Kind
    chunk: int | None
    moment: int | None
    bytes: int
    ready_s: float
    start_s: float
    end_s: float
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ByteSample:
    """From time_s on (until the next sample of the same place and category), `place` holds `bytes` of `category`.
    Categories: "non-model", "param", "grad", "states", "buffer"."""

    time_s: float
    place: str
    category: str
    bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """source: "simulated" or "measured". spans cover `iterations` iterations; the last is the steady one, whose period is
    iteration_s. samples cover the steady iteration, times relative to its start. peak_bytes: per place, over the steady iteration.
    moved_bytes: per direction ("h2d", "d2h"), one steady iteration. stall_s: cause -> seconds the compute queue waited in it.
    For pictures, optional: label (the policy), phases (of each moment), budget_bytes (per place, what the plan may take)."""

    source: str
    iterations: int
    iteration_s: float
    spans: tuple[Span, ...]
    samples: tuple[ByteSample, ...]
    peak_bytes: dict[str, int] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    stall_s: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    label: str = ""
    phases: tuple[str, ...] = ()
    budget_bytes: dict[str, int] = field(default_factory=dict)
