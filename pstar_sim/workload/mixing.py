"""Mixing: activations of some blocks kept, of others recomputed, from two variants of one model that do either in all.

A block is a module's path up to its first number ("h.5" of "h.5.mlp.c_fc"). What a block leaves behind in forward
stands in the way until its backward is over, and of nothing else; so every moment of block b holds what it holds in the
variant it is taken from, plus what the blocks before b leave here more (or less) than they do there. Activations of
different blocks do not overlap; a trace in which they do is not a stack of blocks and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from pstar_sim.errors import TraceError
from pstar_sim.workload.workload import Moment, Phase, Use, Workload

__all__ = ["block_names", "mix_blocks"]

_BLOCK = re.compile(r"(.*?\.\d+)(?:\.|$)")
_Run = tuple[str | None, bool, range]  # block, forward?, moments


def block_names(w: Workload) -> list[str]:
    """Blocks in the order of the forward pass; empty for a model that is not a stack of them."""
    return [block for block, forward, _ in _runs(w) if block is not None and forward]


def mix_blocks(recomputed: Workload, kept: Workload, keep: Collection[str]) -> Workload:
    """The workload in which the blocks `keep` keep their activations and all others recompute theirs.

    Raises TraceError for variants of several micro-batches, for two that are not of the same job, and where they are
    not stacks of the same blocks.
    """
    if recomputed.micro_batches != 1 or kept.micro_batches != 1:
        raise TraceError("blocks are mixed in variants of one micro-batch; repeat the result")
    if (recomputed.fingerprint, recomputed.batch, recomputed.sequence) != (kept.fingerprint, kept.batch, kept.sequence):
        raise TraceError("only variants of one model, batch and sequence can be mixed")
    ours, theirs = _runs(recomputed), _runs(kept)
    blocks = block_names(recomputed)
    if [run[:2] for run in ours] != [run[:2] for run in theirs] or len(set(blocks)) != len(blocks):
        raise TraceError(f"{recomputed.model!r}: the variants are not stacks of the same blocks")
    unknown = sorted(set(keep) - set(blocks))
    if unknown or not blocks:
        raise TraceError(
            f"{recomputed.model!r} has no blocks {', '.join(unknown)}" if blocks else "there are no blocks"
        )
    left = [_left_behind(recomputed, ours), _left_behind(kept, theirs)]
    chosen = [left[block in keep][block] for block in blocks]
    # Bytes that the blocks before the n-th leave here more than in the variant.
    more = [[0], [0]]
    for n, block in enumerate(blocks):
        for variant in (0, 1):
            more[variant].append(more[variant][-1] + chosen[n] - left[variant][block])
    order = {block: n for n, block in enumerate(blocks)}
    moments: list[Moment] = []
    uses: list[Use] = []
    by_moment: list[dict[int, list[Use]]] = [{}, {}]
    for variant, w in enumerate((recomputed, kept)):
        for use in w.uses:
            by_moment[variant].setdefault(use.moment, []).append(use)
    below = 0  # blocks whose activations are there
    for mine, other in zip(ours, theirs):
        at, forward, _ = mine
        variant = int(at in keep)
        run = (mine, other)[variant][2]
        if at is not None:
            below = order[at]
        shift = more[variant][below]
        for m in run:
            old = (recomputed, kept)[variant].moments[m]
            moments.append(_shifted(old, shift))
            uses += [replace(use, moment=len(moments) - 1) for use in by_moment[variant].get(m, ())]
        if at is not None and forward:
            below += 1
    kept_ones = [n for n, block in enumerate(blocks) if block in keep]
    note = f"blocks {_spans(kept_ones)} of {len(blocks)} keep theirs" if kept_ones else recomputed.notes
    checkpointing = len(kept_ones) < len(blocks)
    return replace(recomputed, moments=tuple(moments), uses=tuple(uses), notes=note, checkpointing=checkpointing)


def _runs(w: Workload) -> list[_Run]:
    """Moments in runs of one block and direction; moments of no block between two runs are a run of their own."""
    out: list[_Run] = []
    for m, moment in enumerate(w.moments):
        match = _BLOCK.match(moment.module)
        block, forward = (match[1] if match else None), moment.phase is Phase.FWD
        if out and out[-1][:2] == (block, forward):
            out[-1] = (block, forward, range(out[-1][2].start, m + 1))
        else:
            out.append((block, forward, range(m, m + 1)))
    return out


def _left_behind(w: Workload, runs: Sequence[_Run]) -> dict[str, int]:
    """Bytes by which the end of each block's forward lies above its start."""
    return {
        block: w.moments[run[-1]].end_bytes - w.moments[run[0]].start_bytes
        for block, forward, run in runs
        if block is not None and forward
    }


def _shifted(moment: Moment, shift: int) -> Moment:
    if not shift:
        return moment
    start, peak, end = (max(0, size + shift) for size in (moment.start_bytes, moment.peak_bytes, moment.end_bytes))
    return replace(moment, start_bytes=start, peak_bytes=peak, end_bytes=end)


def _spans(numbers: Sequence[int]) -> str:
    """ "0-3, 7" for 0, 1, 2, 3, 7."""
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in out)
