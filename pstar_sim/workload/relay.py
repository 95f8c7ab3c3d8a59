"""Relay: the layer-major order of an iteration (L2L, Pudipeddi et al., 2020; "vertical scheduling" in GreedySnake).

Each block runs forward for all micro-batches before the next block does, and then backward for all, so its parameters
are needed twice per iteration.

[Note: cells] A micro-batch's moments are cut into parts: each block's forward, each block's backward, and what lies
between two. Head and loss are one part, so only one micro-batch's logits are alive. A cell is one part of one
micro-batch. Each part runs from the first micro-batch to the last, so sums are bit-identical with depth-first.

A cell's live bytes are its own and what other micro-batches have left so far: when recomputing, a block's input per
block and micro-batch (the boundary stash), the latest block's output, and what autograd holds across parts, such as a
tied head's gradient. The first block's stash may also be held by a variable of the model (transformers'
`inputs_embeds`) until its forward returns, or by the loop if it is the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import attrgetter

from pstar_sim.arguments import instance
from pstar_sim.errors import TraceError
from pstar_sim.workload.mixing import BlockRun, block_runs, levelled, shifted, without_stashed
from pstar_sim.workload.orders import Order
from pstar_sim.workload.workload import Moment, Stash, Use, Workload, odd_micro_batch

STASH_PLACES = ("gpu", "host")
"""Places where the boundary stash may be."""


def relay(workload: Workload, *, stash: str = "gpu") -> Workload:
    """Returns the workload in layer-major order ([Note: cells]). With one micro-batch and the stash on the GPU, this is
    the workload itself.

    stash: "gpu", or "host" for a boundary stash that goes to the host while the next cell runs and comes back one cell
        before it is needed. A block needed again before its stash could be gone keeps the stash on the GPU: the last
        block, if there is one micro-batch.

    Raises TraceError for a workload that is layer-major already, that offloads activations, that is not a stack of
    blocks, or whose micro-batches do not all have the same moments. With the stash on the host, also raises TraceError
    for a workload that keeps its activations.
    """
    if stash not in STASH_PLACES:
        raise TraceError(f"relay: stash is {stash!r}; it is one of {', '.join(STASH_PLACES)}")
    _check(workload, stash)
    bodies = _bodies(workload)
    parts = _parts(workload, bodies[0])
    cells = [[body[m] for m in part] for _, _, part in parts for body in bodies]
    places = [m for cell in cells for m in cell]
    rows = [[workload.moments[m] for m in cell] for cell in cells]
    moments = [*levelled([(row[0].micro_batch, row) for row in rows]), workload.moments[-1]]
    moments[-1] = _step(workload, moments)
    position = {m: n for n, m in enumerate(places)}
    moved = [Use(moment=position[use.moment], tensor=use.tensor, kind=use.kind) for use in workload.uses]
    uses = sorted(moved, key=attrgetter("moment", "tensor", "kind"))
    order = Order.LAYER_MAJOR if workload.micro_batches > 1 else workload.order
    made = replace(workload, moments=tuple(moments), uses=tuple(uses), order=order)
    return made if stash == "gpu" else _with_stashes(made, _stashes(workload, parts, cells, workload.micro_batches))


def boundaries_on_host(workload: Workload) -> Workload:
    """In its own order, with boundary stashes on the host. Raises TraceError as `relay` does for stash="host"."""
    _check(workload, "host")
    made: list[Stash] = []
    for u, body in enumerate(_bodies(workload)):
        parts = _parts(workload, body)
        own = _stashes(workload, parts, [list(moments) for _, _, moments in parts], 1)
        made += (replace(stash, micro_batch=u) for stash in own)
    return _with_stashes(workload, made)


def _check(workload: Workload, stash: str) -> None:
    instance("workload", workload, Workload, "a Workload", error=TraceError)
    if not workload.order.of_loop or workload.stashes:
        why = (
            "offloads activations, which a layer-major order cannot"
            if workload.order.of_loop
            else f"is {workload.order} already"
        )
        raise TraceError(f"workload {workload.model!r} {why}")
    if workload.recompute is not None and workload.checkpointing:
        raise TraceError(
            f"workload {workload.model!r} recomputes {workload.recompute}; a layer-major order keeps or recomputes all "
            "blocks"
        )
    if stash == "host" and not workload.checkpointing:
        raise TraceError(
            f"workload {workload.model!r} keeps its activations; boundaries on the host need a workload that "
            "recomputes them (checkpointing)"
        )


def parts_of(workload: Workload) -> list[tuple[int, int]]:
    """(first, last) moment of each part of a layer-major workload, all micro-batches together; the optimizer step is
    one."""
    parts: list[tuple[int, int]] = []
    last: tuple[str | None, bool] | None = None
    step = len(workload.moments) - 1
    for block, forward, moments in block_runs(workload):
        if moments[0] == step:
            break
        kind = (block, block is None or forward)  # the turn to the backward pass is one part
        if kind != last:
            parts.append((moments[0], moments[-1]))
        parts[-1] = (parts[-1][0], min(moments[-1], step - 1))
        last = kind
    return [*parts, (step, step)]


def _bodies(w: Workload) -> list[range]:
    begin = [next(i for i, m in enumerate(w.moments) if m.micro_batch == u) for u in range(w.micro_batches)]
    bodies = [range(a, b) for a, b in zip(begin, [*begin[1:], len(w.moments) - 1])]
    odd = odd_micro_batch(w)
    if odd is not None:
        raise TraceError(
            f"workload {w.model!r}: micro-batch {odd} has other moments than micro-batch 0, so the blocks of the two "
            "cannot be run side by side; trace micro-batches of one shape"
        )
    return bodies


def _parts(w: Workload, body: range) -> list[BlockRun]:
    runs = [
        (block, forward, range(moments[0], min(moments[-1], body[-1]) + 1))
        for block, forward, moments in block_runs(w)
        if moments[0] in body
    ]
    ahead = [n for n, (block, forward, _) in enumerate(runs) if block is not None and forward]
    back = [n for n, (block, forward, _) in enumerate(runs) if block is not None and not forward]
    if not ahead or not back:
        raise TraceError(
            f"workload {w.model!r} is not a stack of blocks, so it has no layer-major order; plan it depth-first"
        )
    last, first = ahead[-1], back[0]
    turn = [m for _, _, moments in runs[last + 1 : first] for m in moments]
    between: list[BlockRun] = [(None, False, range(turn[0], turn[-1] + 1))] if turn else []
    return [*runs[: last + 1], *between, *runs[first:]]


def _step(w: Workload, moments: Sequence[Moment]) -> Moment:
    return shifted(w.moments[-1], moments[-2].end_bytes - w.moments[-2].end_bytes)


def _with_stashes(made: Workload, stashes: Sequence[Stash]) -> Workload:
    return replace(made, moments=without_stashed(made, stashes), stashes=tuple(stashes)) if stashes else made


def _stashes(source: Workload, parts: Sequence[BlockRun], cells: Sequence[Sequence[int]], count: int) -> list[Stash]:
    """Of `count` micro-batches of the depth-first `source`, which run `cells` without a pause."""
    first = list(accumulate((len(cell) for cell in cells), initial=cells[0][0]))  # moment of each cell
    backward = _backward_parts(parts)
    blocks = [(n, block) for n, (block, forward, _) in enumerate(parts) if forward and block in backward]
    names = [block for _, block in blocks]
    twice = next((block for block in names if names.count(block) > 1), None)
    if twice is not None:
        raise TraceError(
            f"workload {source.model!r} calls block {twice} more than once per micro-batch; boundaries on the host "
            "need one call per block; boundaries on the GPU do not (l2l, tide:order=relay)"
        )
    sizes = [
        _boundary_bytes(
            source,
            body[0],
            [cells[n * count + u] for n, _ in blocks],
            [cells[backward[block] * count + u][0] for _, block in blocks],
        )
        for u, body in enumerate(cells[:count])
    ]
    returned = (min(backward.values(), default=0) - 1) * count  # the cell in which the first micro-batch's forward ends
    stashes: list[Stash] = []
    for k, (n, block) in enumerate(blocks):
        held = returned if k == 0 else 0
        stashes += _stashes_of(block, [mine[k] for mine in sizes], first, n * count, backward[block] * count, held)
    return stashes


def _boundary_bytes(w: Workload, begin: int, ahead: Sequence[Sequence[int]], back: Sequence[int]) -> list[int]:
    """To the host, for each block of one micro-batch, from its moment `begin`.

    When a block's backward begins, the level is what blocks up to it keep, and its output's gradient.
    """
    if not back:
        return []
    held = min(m.end_bytes for m in w.moments[ahead[0][-1] : back[0]])
    start = w.moments[ahead[0][0]].start_bytes
    levels = [w.moments[m].start_bytes for m in back]
    left = [held - min(start, held), *(b - a for a, b in pairwise(levels))]
    if w.activations:
        return left
    return [min(left[0], start - w.moments[begin].start_bytes), *left[:-1]]


def _backward_parts(parts: Sequence[BlockRun]) -> dict[str, int]:
    return {block: n for n, (block, forward, _) in enumerate(parts) if block is not None and not forward}


def _stashes_of(
    block: str, sizes: Sequence[int], first: Sequence[int], ahead: int, back: int, held: int
) -> list[Stash]:
    """Per micro-batch; none if one has nothing to stash or no time.

    sizes: bytes of each micro-batch.
    first: moment of each cell.
    ahead, back: the block's first cell in forward and in backward.
    held: the first micro-batch's cell up to which something else holds the bytes.
    """
    made: list[Stash] = []
    for u, size in enumerate(sizes):
        a, b = ahead + u, back + u
        gone, returns = first[max(a + 2, held + u + 1)], first[b - 1] - 1
        if size <= 0 or gone >= returns:
            return []
        made.append(
            Stash(
                block=block,
                micro_batch=u,
                bytes=size,
                made=first[a + 1] - 1,
                gone=gone,
                back=returns,
                needed=first[b],
            )
        )
    return made
