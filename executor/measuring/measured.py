"""Measured bytes of one iteration, and a Timeline with the measured tide."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pstar_sim.core.step import Kind, Place, Queue
from pstar_sim.core.timeline import ByteSample, Timeline

__all__ = ["Measured", "with_tide"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One iteration's bytes.

    non_model_bytes: peak of each moment, from live storages.
    peak_gpu_bytes: most bytes of payloads and non-model data together.
    payload_peak_bytes, peak_host_bytes: most bytes that the arena held on the GPU, and on the host.
    moved_bytes: per direction, counted where bytes are copied.
    on_plan: whether the iteration followed the plan; if not, the other figures mean nothing.
    """

    non_model_bytes: tuple[int, ...]
    peak_gpu_bytes: int
    payload_peak_bytes: int
    peak_host_bytes: int
    moved_bytes: dict[str, int]
    on_plan: bool


def with_tide(timeline: Timeline, measured: Measured) -> Timeline:
    """The timeline with each moment's measured non-model bytes, of a separate, untimed iteration."""
    peaks = measured.non_model_bytes
    last = timeline.iterations - 1
    computes = [s for s in timeline.spans if s.queue is Queue.COMPUTE]
    origin_s = max((s.end_s for s in computes if s.iteration == last - 1), default=0.0)
    tide = [(0.0, min(peaks[-1], peaks[0]))]
    for span in computes:
        if span.iteration == last and span.kind is Kind.COMPUTE and span.moment is not None:
            m, following = span.moment, peaks[(span.moment + 1) % len(peaks)]
            tide += [(span.start_s - origin_s, peaks[m]), (span.end_s - origin_s, min(peaks[m], following))]
    kept = [s for s in timeline.samples if s.category != "non-model"]
    kept += [ByteSample(time_s, Place.GPU.value, "non-model", size) for time_s, size in tide]
    return replace(
        timeline,
        samples=tuple(sorted(kept, key=lambda s: s.time_s)),
        peak_bytes={**timeline.peak_bytes, "gpu": measured.peak_gpu_bytes},
    )
