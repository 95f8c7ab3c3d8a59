"""l2l: layer to layer (Pudipeddi et al., 2020): the model lives on the host, and layers pass through the GPU.

The iteration is layer-major (workload/relay.py). Twice, forward and backward (which recomputes from the boundary
stash), a layer's parameters come to the GPU and are given up once all micro-batches have run through the layer, while
the next is on its way. The gradients of all micro-batches are added up on the GPU in fp32 and go to the host once. If
nothing makes Adam wait, the host updates a layer at once, while the GPU computes the layer before it, or in the next
forward pass until the layer is needed.

Bytes to the GPU: 2 w per parameter of a layer, where w is its width, for any number of micro-batches. A tied head is a
third use of its embedding. Bytes to the host: 4 per parameter; w with one micro-batch, because the gradient then
overwrites its parameter. Bytes on the GPU: two layers, their gradients, and the tide: one layer's activations for one
micro-batch, one layer output per micro-batch, and, unless on the host, one boundary activation per layer and
micro-batch.

In the published parallel version each GPU copies whole layers, and the host adds up the
gradients of all GPUs. Here ranks hold slices, each in its own host memory, and meet only in collectives; layers
gathered from slices would be ZeRO-3 (zero3_offload.py).

A chunk is a layer, norms and biases included, so GPU bytes do not grow with the number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout, layout_of_parts
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import CannotPlan
from pstar_sim.policy.family.plan_visits import plan_visits
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.iteration_order import in_order
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.options import Option, one_of
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.visits import Visit
from pstar_sim.units import format_count
from pstar_sim.workload.relay import STASH_PLACES, parts_of
from pstar_sim.workload.workload import Workload

__all__ = ["CAPABILITIES", "OPTIONS", "l2l"]

CAPABILITIES = Capabilities(reorders=True, near=Point(eviction="lru", prefetch=1, adam="fifo", pins=0, order="relay"))
OPTIONS = {
    "stash": Option(one_of(*STASH_PLACES), "where the boundary activations of all layers are", "gpu"),
    "adam": Option(one_of("fifo", "edf"), "updates as gradients arrive, or as the next forward needs them", "fifo"),
}


def l2l(workload: Workload, machine: Machine, settings: Settings, *, stash: str = "gpu", adam: str = "fifo") -> Plan:
    """Returns the plan for the workload in layer-major order. Without a chunk size in the settings, each chunk is one
    layer.

    Raises CannotPlan for a workload that is not a stack of blocks, and for several GPUs. Raises DoesNotFit if two
    layers beside the tide exceed the GPU, or if parameters, gradients and states exceed the host.
    """
    if machine.data_parallel_size > 1:
        raise CannotPlan(
            f"l2l runs on one GPU, not on {machine.data_parallel_size}: the published parallel version adds up the "
            "gradients of all GPUs in host memory that they share, and here each rank has host memory of its own"
        )
    w = in_order("l2l", workload, "relay-host" if stash == "host" else "relay")
    parts = parts_of(w)
    sized = settings.chunk_bytes is not None
    layout = (
        build_layout(w, chunk_bytes=settings.chunk_bytes, sums=settings.sums)
        if sized
        else layout_of_parts(w, parts, sums=settings.sums)
    )
    job = Job("l2l", w, machine, settings, layout=layout)
    visits = _visits(job, parts)
    layer = _most_at_once(visits)
    plan = plan_visits(job, visits, prefetch=layer, adam=adam, lists_at_once=2 * layer)
    order = "layer by layer, forward and backward"
    if w.micro_batches > 1:
        order = f"each layer for all {w.micro_batches} micro-batches before the next, forward and backward"
    choices: dict[str, object] = {
        "order": order,
        "capacity": f"two layers, of {format_count(layer, 'chunk')} at most, and their gradients",
        "boundaries": f"the inputs of layers are on the {stash}",
    }
    return replace(plan, choices={**plan.choices, **choices})


def _visits(job: Job, parts: Sequence[tuple[int, int]]) -> list[Visit]:
    part_of = [n for n, (first, last) in enumerate(parts) for _ in range(first, last + 1)]
    visits: list[Visit] = []
    for c in job.moving:
        mine = sorted({part_of[m] for m in job.uses.touched[c]})
        begins = [n for n in mine if n - 1 not in mine]
        ends = [n for n in mine if n + 1 not in mine]
        visits += [Visit(c, parts[a][0], parts[b][1]) for a, b in zip(begins, ends)]
    return sorted(visits, key=lambda visit: (visit.first, visit.chunk))


def _most_at_once(visits: Sequence[Visit]) -> int:
    starts = [n for n, (a, b) in enumerate(pairwise(visits), start=1) if a.first != b.first]
    return max(b - a for a, b in pairwise([0, *starts, len(visits)])) if visits else 1
