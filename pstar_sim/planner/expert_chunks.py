"""Chunks that hold only experts, and the probability that a micro-batch uses them (workload/experts.py)."""

from __future__ import annotations

import re

from pstar_sim.catalog.model_shapes import ExpertsShape
from pstar_sim.core.layout import Chunk, Layout
from pstar_sim.workload.experts import use_probability
from pstar_sim.workload.workload import Workload

_EXPERT = re.compile(r"(.+\.experts\.\d+)\.")


def chunk_use(workload: Workload, layout: Layout, experts: ExpertsShape) -> dict[int, float]:
    """The probability that a micro-batch uses each chunk of experts alone."""
    tokens = workload.batch * workload.sequence
    found = {}
    for chunk in layout.chunks:
        held = _experts_in(chunk, workload)
        if held:
            missed = 1.0
            for of in held.values():
                missed *= 1 - use_probability(experts, tokens, of=of)
            found[chunk.index] = 1 - missed
    return found


def _experts_in(chunk: Chunk, workload: Workload) -> dict[str, int]:
    """Layer -> number of experts; empty for a chunk that holds any other parameter."""
    names = [_EXPERT.match(workload.tensors[slot.tensor].name) for slot in chunk.slots]
    if not all(names):
        return {}
    held: dict[str, int] = {}
    for expert in {match[1] for match in names if match is not None}:
        layer = expert.rpartition(".")[0]
        held[layer] = held.get(layer, 0) + 1
    return held
