"""Visits of the ZeRO-3 family, how far ahead chunks are requested, and the optimizer's sub-groups.

[Note: visits of ZeRO-3] FSDP's follow the model's blocks, DeepSpeed's the order traced in a first iteration.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from pstar_sim.core.layout import Layout
from pstar_sim.policy.kit.facts import Facts
from pstar_sim.policy.kit.visits import Visit
from pstar_sim.workload.workload import Phase, Workload


def block_visits(uses: Facts) -> list[Visit]:
    """FSDP's, sorted: a block's chunks come before its first moment and go after its last, in each direction; its
    recomputation and gradients are one visit."""
    runs = _blocks(uses.workload)
    run_of = [r for r, (first, last) in enumerate(runs) for _ in range(first, last + 1)]
    out: list[Visit] = []
    for chunk, touched in enumerate(uses.touched):
        mine = sorted({run_of[m] for m in touched})
        begin = 0
        for n in range(1, len(mine) + 1):
            if n == len(mine) or mine[n] > mine[n - 1] + 1:
                out.append(Visit(chunk, runs[mine[begin]][0], runs[mine[n - 1]][1]))
                begin = n
    return sorted(out, key=lambda v: (v.first, v.chunk))


_BLOCK = re.compile(r"(.*?\.\d+)(?:\.|$)")


def _blocks(workload: Workload) -> list[tuple[int, int]]:
    """(first, last) moments, in one direction. A block is a module's path up to its first number ("h.5" for
    "h.5.mlp.c_fc"), or the module; moments without chunks belong to the one before."""
    runs: list[tuple[int, int]] = []
    open_key: tuple[str, bool, int] | None = None
    for m, moment in enumerate(workload.moments):
        match = _BLOCK.match(moment.module)
        key = (match[1] if match else moment.module, moment.phase is Phase.FWD, moment.micro_batch)
        busy = bool(workload.reads[m] or workload.gradients[m])
        if runs and (key == open_key or (not busy and moment.phase is not Phase.ADAM)):
            runs[-1] = (runs[-1][0], m)
        else:
            runs.append((m, m))
            open_key = key
    return runs


def traced_visits(uses: Facts, reuse_params: int) -> list[Visit]:
    """DeepSpeed's, sorted: a chunk goes after a use unless used again before `reuse_params` other parameters are read
    in the traced order (stage3_max_reuse_distance)."""
    w = uses.workload
    read = [0, *accumulate(sum(w.tensors[t].numel for t in row) for row in w.reads)]
    out: list[Visit] = []
    for chunk, touched in enumerate(uses.touched):
        if not touched:
            continue
        first = touched[0]
        for a, b in pairwise(touched):
            if b > a + 1 and read[b] - read[a + 1] > reuse_params:
                out.append(Visit(chunk, first, a))
                first = b
        out.append(Visit(chunk, first, touched[-1]))
    return sorted(out, key=lambda v: (v.first, v.chunk))


def operators_before(visits: Sequence[Visit], ahead: int) -> dict[int, int]:
    """A visit's first moment -> moment with whose start its chunk may be requested: `ahead` operators (moments that
    open visits) earlier."""
    opening = sorted({v.first for v in visits})
    return {m: opening[max(0, n - ahead)] if ahead <= n else 0 for n, m in enumerate(opening)}


def params_before(visits: Sequence[Visit], uses: Facts, ahead_params: int) -> dict[int, int]:
    """As `operators_before`, until `ahead_params` parameters are on their way (stage3_prefetch_bucket_size); unless 0,
    at least one operator ahead."""
    size: dict[int, int] = {}
    for v in visits:
        size[v.first] = size.get(v.first, 0) + uses.layout.chunks[v.chunk].numel
    opening = sorted(size)
    if ahead_params <= 0:
        return {m: m for m in opening}
    before = [0, *accumulate(size[m] for m in opening)]
    # Operator n is requested at operator j - 1, where j is the first operator with fewer than ahead_params from j to n
    # - 1.
    out: dict[int, int] = {}
    for n, m in enumerate(opening):
        j = min(n, bisect_left(before, before[n] - ahead_params + 1))
        out[m] = opening[j - 1] if j > 0 else 0
    return out


def ahead_in_forward(ahead: Mapping[int, int], workload: Workload) -> dict[int, int]:
    """Without requests ahead in backward.

    DeepSpeed has them in both, but its published backward passes take about as long as if each gather held them up; why
    is not known.
    """
    return {m: at if workload.moments[m].phase is Phase.FWD else m for m, at in ahead.items()}


def sub_groups(layout: Layout, chunks: Iterable[int], params: int) -> list[list[int]]:
    """A run ends once this rank's slices in it hold `params`."""
    groups: list[list[int]] = []
    held = 0
    for c in chunks:
        if held == 0:
            groups.append([])
        groups[-1].append(c)
        held += layout.slice_numel(c)
        if held >= params:
            held = 0
    return groups
