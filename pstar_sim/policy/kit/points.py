"""The asynchronous policies (tide, static_partition, optimal) as points of one space, with a coordinate per idea: two
points that differ in one coordinate show what its idea is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypedDict

from pstar_sim.policy.kit.iteration_order import ORDERS
from pstar_sim.policy.kit.options import Option, either, one_of, switch, whole_number


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of the asynchronous family. The defaults are tide; `point_options` says what other coordinates mean.

    capacity: room for chunks beside each moment's non-model bytes ("tide") or the highest of any ("peak").
    pins: chunks whose states stay on the GPU, or "optimal".
    sums: gradients of micro-batches may add up on the GPU though states live elsewhere, as always in layer-major order.
    order: "depth-first" (the workload's), "relay" (layer-major), or "relay-host" (with boundary activations on the
        host).
    """

    capacity: str = "tide"
    eviction: str = "belady"
    prefetch: str | int = "edf"
    adam: str = "edf"
    pins: str | int = "optimal"
    streams: bool = False
    sums: bool = False
    barrier: bool = False
    order: str = "depth-first"


class Coordinates(TypedDict, total=False):
    capacity: str
    eviction: str
    prefetch: str | int
    adam: str
    pins: str | int
    streams: bool
    sums: bool
    barrier: bool
    order: str


def point_options(base: Point) -> Mapping[str, Option]:
    """Coordinates as options of a policy at `base`."""
    kinds = {
        "capacity": (one_of("tide", "peak"), "room for chunks: what each moment leaves free, or what the peak does"),
        "eviction": (one_of("belady", "lru", "fifo"), "which chunks stay between two uses"),
        "prefetch": (
            either(one_of("none", "edf"), whole_number(least=1)),
            "copies on demand, a number of chunks ahead, or by deadline as far ahead as there is room",
        ),
        "adam": (
            one_of("after-backward", "fifo", "edf"),
            "CPU Adam after the backward pass, as gradients arrive, or as the next forward needs parameters",
        ),
        "pins": (
            either(one_of("optimal"), whole_number()),
            "most chunks whose optimizer states stay on the GPU",
        ),
        "streams": (switch(), "optimizer states may come to the GPU for one update"),
        "sums": (switch(), "sums of gradients may be on the GPU where states are not"),
        "order": (
            one_of(*ORDERS),
            "micro-batch by micro-batch, or layer by layer for all of them, with layer boundaries on the GPU or host",
        ),
        "barrier": (switch(), "no Adam before the optimizer step, also where the setting asks for none"),
    }
    return {field.name: Option(*kinds[field.name], default=getattr(base, field.name)) for field in fields(Point)}
