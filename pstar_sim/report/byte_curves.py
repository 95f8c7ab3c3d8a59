"""Byte samples as arrays over time or moments, for pictures and tables: int64, seconds from the steady iteration's
start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.step import UPDATES, Kind, Queue
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import PstarError
from pstar_sim.units import GB, KB, MB
from pstar_sim.workload.workload import Phase

CATEGORIES = ("states", "param", "grad", "buffer", "non-model")
"""Bottom to top, as they are stacked."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Bytes of each category at one place: values[c][i] holds in [edges[i], edges[i + 1]).

    edges: n + 1 (seconds, or moments), ascending.
    values: category -> n bytes.
    """

    place: str
    edges: FloatArray
    values: dict[str, IntArray]

    @property
    def model_data(self) -> IntArray:
        """All categories but the tide."""
        return sum((v for c, v in self.values.items() if c != "non-model"), np.zeros(len(self.edges) - 1, np.int64))

    @property
    def tide(self) -> IntArray:
        return self.values["non-model"]

    @property
    def total(self) -> IntArray:
        return self.model_data + self.tide


@dataclass(frozen=True, kw_only=True)
class PhaseBand:
    """[start, end) in the unit of the x axis."""

    name: str
    start: float
    end: float


def steady_start_s(timeline: Timeline) -> float:
    """By the spans' clock: the end of compute in the iteration before, for one iteration its first moment.

    Raises PstarError without compute spans.
    """
    last = timeline.iterations - 1
    computes = [s for s in timeline.spans if s.queue is Queue.COMPUTE]
    before = [s.end_s for s in computes if s.iteration == last - 1]
    if before:
        return max(before)
    starts = [s.start_s for s in computes if s.iteration == last]
    if not starts:
        raise PstarError(f"the {timeline.source} timeline {timeline.label!r} has no compute spans to draw a tide from")
    return min(starts)


def moment_windows(timeline: Timeline) -> tuple[IntArray, FloatArray, FloatArray]:
    """(indices, start_s, end_s) in order, from the steady iteration's start.

    Raises PstarError without compute spans.
    """
    last = timeline.iterations - 1
    spans = [s for s in timeline.spans if s.kind is Kind.COMPUTE and s.iteration == last and s.moment is not None]
    spans.sort(key=lambda s: (s.start_s, s.moment or 0))
    origin = steady_start_s(timeline)
    return (
        np.array([s.moment for s in spans], np.int64),
        np.array([s.start_s - origin for s in spans]),
        np.array([s.end_s - origin for s in spans]),
    )


def byte_curves(timeline: Timeline, *, x: str = "time", place: str = "gpu") -> Curves:
    """x: "time": all changes, in seconds; "moment": a value per moment, of its instant with the largest total.

    Raises PstarError for another x and without samples of `place`.
    """
    if x not in ("time", "moment"):
        raise PstarError(f'x must be "time" or "moment", not {x!r}')
    samples = [s for s in timeline.samples if s.place == place]
    if not samples:
        raise PstarError(f"the {timeline.source} timeline {timeline.label!r} has no byte samples of place {place!r}")
    times = np.unique(np.array([s.time_s for s in samples]))
    values: dict[str, IntArray] = {c: np.full(len(times), -1, np.int64) for c in CATEGORIES}
    for sample in samples:  # in order of time; at equal times the later sample holds
        values.setdefault(sample.category, np.full(len(times), -1, np.int64))
        values[sample.category][np.searchsorted(times, sample.time_s)] = sample.bytes
    for category, column in values.items():
        known = np.where(column >= 0, np.arange(len(times)), -1)
        np.maximum.accumulate(known, out=known)
        values[category] = np.where(known >= 0, column[np.maximum(known, 0)], 0)
    end = max(timeline.iteration_s, float(times[-1]))
    curves = Curves(place=place, edges=np.append(times, end), values=values)
    return curves if x == "time" else _by_moment(timeline, curves)


def _by_moment(timeline: Timeline, curves: Curves) -> Curves:
    moments, start_s, _ = moment_windows(timeline)
    first = np.maximum(np.searchsorted(curves.edges[:-1], start_s, side="right") - 1, 0)
    last = np.append(first[1:], len(curves.edges) - 2)
    total = curves.total
    # A moment of no length still sees the values that hold when it opens.
    at = np.array([lo + int(np.argmax(total[lo : max(hi, lo + 1)])) for lo, hi in zip(first, last)])
    edges = np.append(moments, moments[-1] + 1).astype(np.float64)
    return Curves(place=curves.place, edges=edges, values={c: v[at] for c, v in curves.values.items()})


def axis_unit(top_bytes: float) -> tuple[int, str]:
    """(bytes, name), for an axis up to `top_bytes`."""
    return next((unit for unit in ((GB, "GB"), (MB, "MB"), (KB, "kB")) if top_bytes >= unit[0]), (1, "B"))


def phase_bands(timeline: Timeline, *, x: str = "time") -> tuple[PhaseBand, ...]:
    """FWD, BWD (with recomputation) and ADAM, empty if unknown. By time, ADAM is also where updates run and no phase
    computes."""
    if not timeline.phases:
        return ()
    moments, start_s, end_s = moment_windows(timeline)
    where = list(zip(start_s, end_s)) if x == "time" else [(float(m), float(m) + 1) for m in moments]
    bands: list[PhaseBand] = []
    recompute = "RECOMPUTE" in timeline.phases
    for moment, (start, end) in zip(moments, where):
        phase = timeline.phases[moment]
        name = ("BWD + recompute" if recompute else "BWD") if phase in ("BWD", "RECOMPUTE") else phase
        if bands and bands[-1].name == name:
            bands[-1] = PhaseBand(name=name, start=bands[-1].start, end=end)
        else:
            bands.append(PhaseBand(name=name, start=start, end=end))
    return tuple(bands if x == "moment" else _with_updates(timeline, bands))


def _with_updates(timeline: Timeline, bands: Sequence[PhaseBand]) -> Iterator[PhaseBand]:
    origin = steady_start_s(timeline)
    updates = [(s.start_s - origin, s.end_s - origin) for s in timeline.spans if s.kind in UPDATES]
    at_s = 0.0
    for band in (*bands, PhaseBand(name="", start=timeline.iteration_s, end=timeline.iteration_s)):
        within = [(max(start, at_s), min(end, band.start)) for start, end in updates]
        within = [(start, end) for start, end in within if end > start]
        if within:
            ends = [end for _, end in within]
            yield PhaseBand(name=Phase.ADAM.value, start=min(within)[0], end=max(ends))
        if band.name:
            yield band
        at_s = band.end
