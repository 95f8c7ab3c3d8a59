"""Points: the asynchronous policies as places in one space of ideas, one coordinate an idea.

tide, static_partition and optimal differ in these coordinates only, so what one idea is worth is the difference of two
points that agree in all others.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Point"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """The defaults are tide.

    capacity: what a moment's non-model bytes leave free: "tide" reckons with each moment's own, "peak" with the highest
    of any. eviction: which chunks stay between two uses: "belady", "lru" or "fifo". prefetch: "none" (on demand), a
    number of chunks ahead, or "edf" (the earliest deadline among those that are ready, as far ahead as there is room).
    adam: order of CPU Adam: "after-backward", "fifo" (as gradients arrive) or "edf" (as the next forward needs them).
    pins: chunks whose states stay on the GPU, a number or "optimal". streams: states may also come to the GPU for one
    update. barrier: no Adam before the optimizer step, also where the settings would allow it.
    """

    capacity: str = "tide"
    eviction: str = "belady"
    prefetch: str | int = "edf"
    adam: str = "edf"
    pins: str | int = "optimal"
    streams: bool = False
    barrier: bool = False
