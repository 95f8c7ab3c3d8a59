"""Mixing: block by block, activations are kept, recomputed, or moved to the host and back.

Blocks come from two variants of one model: one keeps all activations (offloaded ones too), the other recomputes them.

A block is a module's path up to its first number ("h.5" of "h.5.mlp.c_fc"). Every moment of block b holds its own
variant's bytes, plus those that the blocks before b keep here, less those that they keep in that variant. Traces in
which activations of blocks overlap are refused.

[Note: two stashes at a time] A stash has the next offloaded block's forward pass to reach the host, and that block's
backward to come back. The tide counts its bytes until the first moment behind that forward, and again from the last
before that backward, so the GPU holds at most two: one being made (or used) and one on its way. The last offloaded
block gets the time of as many blocks as the one before.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace

from pstar_sim.errors import TraceError
from pstar_sim.workload.workload import Moment, Phase, Stash, Use, Workload, copy_moment

_BLOCK = re.compile(r"(.*?\.\d+)(?:\.|$)")
BlockRun = tuple[str | None, bool, range]
"""(block, whether it is the forward pass, moments). The block is None for moments of no block."""

_RUNS = ("runs of blocks",)  # key of `Workload.derived`
_Block = tuple[str, range, range]  # name, moments forward, moments backward


def block_of(path: str) -> str | None:
    """Returns "h.5" of "h.5.mlp.weight"; None outside blocks."""
    match = _BLOCK.match(path)
    return match and match[1]


def block_names(w: Workload) -> list[str]:
    """In forward order; empty for no stack of blocks."""
    return [block for block, forward, _ in block_runs(w) if block is not None and forward]


def mix_blocks(recomputed: Workload, kept: Workload, keep: Collection[str]) -> Workload:
    """The blocks `keep` keep their activations, others recompute.

    Raises TraceError for several micro-batches, different jobs, and what is not stacks of the same blocks.
    """
    ours, theirs = block_runs(recomputed), block_runs(kept)
    blocks = _check_variants(recomputed, kept, ours, theirs)
    _check_names(recomputed, blocks, keep)
    if set(keep) == set(blocks):
        return replace(kept, activations=(), stashes=(), checkpointing=False)
    variants = (recomputed, kept)
    reads = [_uses_by_moment(w) for w in variants]
    more = _more_below(blocks, keep, [_left_behind(recomputed, ours), _left_behind(kept, theirs)])
    order = {block: n for n, block in enumerate(blocks)}
    moments: list[Moment] = []
    uses: list[Use] = []
    below = 0  # blocks whose activations are on the GPU
    for (at, forward, mine), (_, _, other) in zip(ours, theirs):
        variant = int(at in keep)
        if at is not None:
            below = order[at]
        for m in (mine, other)[variant]:
            moments.append(shifted(variants[variant].moments[m], more[variant][below]))
            uses += [
                Use(moment=len(moments) - 1, tensor=use.tensor, kind=use.kind) for use in reads[variant].get(m, ())
            ]
        if at is not None and forward:
            below += 1
    how = tuple((block, "keep" if block in keep else "recompute") for block in blocks)
    if len({choice for _, choice in how}) == 1:
        how = ()  # as in the variant
    checkpointing = any(block not in keep for block in blocks)
    return replace(
        recomputed, moments=tuple(moments), uses=tuple(uses), activations=how, stashes=(), checkpointing=checkpointing
    )


def _check_variants(
    recomputed: Workload, kept: Workload, ours: Sequence[BlockRun], theirs: Sequence[BlockRun]
) -> list[str]:
    """Raises TraceError unless both are one job and stacks of the same blocks."""
    if recomputed.micro_batches != 1 or kept.micro_batches != 1:
        raise TraceError("blocks are mixed in variants of one micro-batch; mix first, then repeat the micro-batch")
    if (recomputed.fingerprint, recomputed.batch, recomputed.sequence) != (kept.fingerprint, kept.batch, kept.sequence):
        raise TraceError(
            f"variants of {recomputed.model!r} (batch {recomputed.batch}, sequence {recomputed.sequence}) and of "
            f"{kept.model!r} (batch {kept.batch}, sequence {kept.sequence}) cannot be mixed; "
            "only variants of one model, batch and sequence can be mixed"
        )
    for what, one, other in (
        ("kernels", recomputed.kernels, kept.kernels),
        ("attention", recomputed.attention, kept.attention),
    ):
        if one != other:
            raise TraceError(
                f"{recomputed.model!r}: {what} is {one!r} in the variant that recomputes and {other!r} in the variant "
                "that keeps; write both with the same"
            )
    blocks = block_names(recomputed)
    if [run[:2] for run in ours] != [run[:2] for run in theirs] or len(set(blocks)) != len(blocks):
        raise TraceError(
            f"{recomputed.model!r}: the variants are not stacks of the same blocks; trace both from one model"
        )
    return blocks


def _check_names(w: Workload, blocks: Sequence[str], named: Collection[str]) -> None:
    unknown = sorted(set(named) - set(blocks))
    if unknown or not blocks:
        raise TraceError(
            f"{w.model!r} has no blocks {', '.join(unknown)}; its blocks are {blocks[0]} to {blocks[-1]}"
            if blocks
            else f"{w.model!r} is not a stack of blocks; keep or recompute the activations of all of it"
        )


def _more_below(blocks: Sequence[str], keep: Collection[str], left: Sequence[dict[str, int]]) -> list[list[int]]:
    """Per variant, what blocks before the n-th keep here, less what they keep there.

    left: per variant (recomputed, kept), block -> bytes.
    """
    more = [[0] for _ in left]
    for block in blocks:
        chosen = left[block in keep][block]
        for sums, its in zip(more, left):
            sums.append(sums[-1] + chosen - its[block])
    return more


def _uses_by_moment(w: Workload) -> dict[int, list[Use]]:
    uses: dict[int, list[Use]] = {}
    for use in w.uses:
        uses.setdefault(use.moment, []).append(use)
    return uses


def offload_blocks(w: Workload, offload: Collection[str]) -> Workload:
    """`offload`'s activations, kept in w, go to the host and back ([Note: two stashes at a time]).

    Raises as `stashes_of`.
    """
    stashes = stashes_of(w, offload)
    if not stashes:
        return w
    usual = "recompute" if w.checkpointing else "keep"
    before = w.activations or [(block, usual) for block in block_names(w)]
    how = tuple((block, "offload" if block in offload else chosen) for block, chosen in before)
    return replace(w, moments=without_stashed(w, stashes), activations=how, stashes=tuple(stashes))


def stashes_of(w: Workload, offload: Collection[str]) -> list[Stash]:
    """[Note: two stashes at a time]

    Raises TraceError for several micro-batches, offloads already made, no stack of blocks, and a block that recomputes,
    keeps nothing, or is needed again before it could be gone.
    """
    if w.micro_batches != 1 or w.stashes:
        raise TraceError(
            "blocks are offloaded in a workload of one micro-batch without offloaded blocks; offload all at once, then "
            "repeat the micro-batch"
        )
    runs = block_runs(w)
    stack = _stack(w, runs, offload)
    blocks = [block for block, _, _ in stack]
    before = dict(w.activations) or dict.fromkeys(blocks, "recompute" if w.checkpointing else "keep")
    left = _left_behind(w, runs)
    chosen = [n for n, block in enumerate(blocks) if block in offload]
    stashes: list[Stash] = []
    for i, n in enumerate(chosen):
        block = blocks[n]
        if before[block] != "keep":
            raise TraceError(
                f"{w.model!r}: block {block} recomputes its activations; only kept activations are offloaded"
            )
        if left[block] <= 0:
            raise TraceError(f"{w.model!r}: block {block} keeps no activations; there is nothing to offload")
        until = chosen[i + 1] if i + 1 < len(chosen) else n + (n - chosen[i - 1] if i else 1)
        stashes.append(_stash(w, stack, n, min(until, len(stack) - 1), left[block]))
    return stashes


def _stack(w: Workload, runs: Sequence[BlockRun], offload: Collection[str]) -> list[_Block]:
    ahead = [(block, run) for block, forward, run in runs if block is not None and forward]
    blocks = [block for block, _ in ahead]
    backward = {block: run for block, forward, run in runs if block is not None and not forward}
    twice = len(set(blocks)) != len(blocks) or sum(block is not None for block, _, _ in runs) != 2 * len(blocks)
    _check_names(w, blocks, offload)
    if twice or set(backward) != set(blocks):
        raise TraceError(f"{w.model!r} is not a stack of blocks, each run once forward and once backward")
    return [(block, run, backward[block]) for block, run in ahead]


def _stash(w: Workload, stack: Sequence[_Block], n: int, until: int, size: int) -> Stash:
    block, forward, backward = stack[n]
    gone, back = stack[until][1][-1] + 1, stack[until][2][0] - 1
    if until == n or back <= gone:
        raise TraceError(
            f"{w.model!r}: the activations of block {block} are needed again before they could be gone; offload "
            "earlier blocks"
        )
    return Stash(block=block, micro_batch=0, bytes=size, made=forward[-1], gone=gone, back=back, needed=backward[0])


def without_stashed(w: Workload, stashes: Sequence[Stash]) -> tuple[Moment, ...]:
    """Without the bytes of stashes that are on the host."""
    start, peak, end = ([0] * len(w.moments) for _ in range(3))
    for stash in stashes:
        for m in range(stash.gone, stash.back + 1):
            start[m] += stash.bytes if m > stash.gone else 0
            peak[m] += stash.bytes if stash.gone < m < stash.back else 0
            end[m] += stash.bytes if m < stash.back else 0
    return tuple(
        copy_moment(m, m.start_bytes - a, m.peak_bytes - b, m.end_bytes - c) if a or b or c else m
        for m, a, b, c in zip(w.moments, start, peak, end)
    )


def block_runs(w: Workload) -> Sequence[BlockRun]:
    """Runs of one block and direction; moments between two are a run of their own."""
    known = w.derived.get(_RUNS)
    if not isinstance(known, tuple):
        known = w.derived[_RUNS] = tuple(_block_runs(w.moments))
    return known


def _block_runs(moments: Sequence[Moment]) -> Iterator[BlockRun]:
    sides = [(block_of(moment.module), moment.phase is Phase.FWD) for moment in moments]
    begin = 0
    for m, side in enumerate(sides):
        if m + 1 == len(sides) or sides[m + 1] != side:
            yield (*side, range(begin, m + 1))
            begin = m + 1


def _left_behind(w: Workload, runs: Sequence[BlockRun]) -> dict[str, int]:
    return {
        block: w.moments[run[-1]].end_bytes - w.moments[run[0]].start_bytes
        for block, forward, run in runs
        if block is not None and forward
    }


def levelled(cells: Sequence[tuple[Hashable, Sequence[Moment]]]) -> list[Moment]:
    """Each cell holds its own bytes, and what other micro-batches have left so far.

    cells: (micro-batch, or a part of one, its moments, with its bytes alone), one after the other.
    """
    return [shifted(m, left) for (_, row), left in zip(cells, others_of(cells)) for m in row]


def others_of(cells: Sequence[tuple[Hashable, Sequence[Moment]]]) -> Iterator[int]:
    """Bytes beside each cell."""
    level = {own: row[0].start_bytes for own, row in reversed(cells)}
    total = sum(level.values())
    for own, row in cells:
        others = total - level[own]
        yield others
        level[own] = row[-1].end_bytes
        total = others + level[own]


def shifted(moment: Moment, shift: int) -> Moment:
    """Non-model bytes, at least 0."""
    if not shift:
        return moment
    start, peak, end = (max(0, size + shift) for size in (moment.start_bytes, moment.peak_bytes, moment.end_bytes))
    return copy_moment(moment, start, peak, end)
