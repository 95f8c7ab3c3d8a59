"""AdamW on flat chunks: one fused torch call for the neighbouring parameters with a gradient.

All tensors of a call are fp32 and flat. A parameter without a gradient in this iteration is left out, as torch does, so
a chunk is cut into runs. Knows no queue and no place: the caller passes tensors of the host or of the gpu.

[Note: where runs end] The fused kernel of the CPU handles whole vectors of 4 to 16 elements, and one by one, with
another rounding, the elements that are left at a tensor's end. A run therefore ends where a tensor ends whose elements
are no multiple of ALIGN, and everything else is cut at multiples of ALIGN: slots, slices of ranks, parts of an update,
blocks. So each element is rounded as in torch's AdamW for its tensor alone, at any width.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pstar_sim.core.layout import ALIGN
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind
from pstar_sim.dtypes import MASTER

__all__ = ["GPU_BLOCK", "Hyper", "Scratch", "UpdateRange", "adamw", "ranges_of", "scratch_bytes", "total_norm"]

BLOCK = 1 << 20  # elements of one piece where a cast needs scratch: its 4 MiB stay in cache
GPU_BLOCK = 4 * BLOCK  # larger on the gpu: a piece that fits a cache is too small for a kernel


@dataclass(frozen=True, slots=True)
class Hyper:
    """AdamW's settings for one parameter group, as of the call of `optimizer.step()`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class UpdateRange(NamedTuple):
    """Elements [start, stop) of a chunk, whose parameters have had `steps` updates before this update."""

    start: int
    stop: int
    steps: int


def ranges_of(slots: Iterable[tuple[int, int, int | None]]) -> list[UpdateRange]:
    """Returns the ranges of a chunk that an update covers. Neighbouring tensors with the same number of earlier updates
    share a range up to a tensor that ends between two multiples of ALIGN ([Note: where runs end]); tensors without a
    gradient are in none.

    slots: per tensor, ascending by offset: (offset, numel, earlier updates or None without a gradient).
    """
    runs: list[UpdateRange] = []
    open_run = False
    for offset, numel, steps in slots:
        if steps is None:
            open_run = False
        elif open_run and runs[-1].steps == steps and (runs[-1].stop - runs[-1].start) % ALIGN == 0:
            runs[-1] = UpdateRange(runs[-1].start, offset + numel, steps)
        else:
            runs.append(UpdateRange(offset, offset + numel, steps))
            open_run = True
    return runs


def scratch_bytes(plan: Plan) -> int:
    """Returns the bytes that `Scratch` takes on the gpu, beside the payloads and the tide: a piece for the gradient and
    one for each moment that is narrower than fp32."""
    chunks = {s.chunk for s in plan.steps if s.kind is Kind.GPU_UPDATE and s.chunk is not None}
    if not chunks:
        return 0
    layout = plan.layout
    narrow = sum(width < 4 for name, width in layout.optimizer.state_bytes if name in ("momentum", "variance"))
    narrow += any(layout.chunks[c].dtype != MASTER for c in chunks)
    return narrow * 4 * min(GPU_BLOCK, max(layout.slice_numel(c) for c in chunks))


class Scratch:
    """fp32 buffers for the casts of the updates at one place, kept from one update to the next.

    block: elements of a piece.
    """

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self._kept: dict[int, torch.Tensor] = {}

    def get(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """Returns a buffer [block] on the device of `like`; each number has its own."""
        kept = self._kept.get(number)
        if kept is None or kept.device != like.device:
            kept = self._kept[number] = torch.empty(self.block, dtype=torch.float32, device=like.device)
        return kept


def adamw(
    runs: Sequence[UpdateRange],
    *,
    param: torch.Tensor,
    grad: torch.Tensor,
    momentum: torch.Tensor,
    variance: torch.Tensor,
    hyper: Hyper,
    scale: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Run one AdamW update of each range, in place. All tensors are flat [numel of the chunk] and fp32. `grad`,
    `momentum` and `variance` may be narrower: the update is done in fp32, and the new moments are rounded to nearest.

    scale: fp32 scalar that multiplies the gradients first (clipping, loss scaling). The gradients are overwritten.
    scratch: None: buffers for this call alone.
    """
    room = scratch or Scratch()
    lists = (param, grad, momentum, variance)
    narrow = [number for number, each in enumerate(lists) if each.dtype != torch.float32]
    for piece in _pieces(runs, room.block if narrow else sys.maxsize):
        first, end = piece[0].start, piece[-1].stop
        wide = [each[first:end] for each in lists]
        for number in narrow:
            wide[number] = room.get(number, grad)[: end - first].copy_(wide[number])
        if scale is not None:
            wide[1].mul_(scale)
        _fused(piece, wide, first, hyper)
        for number in narrow:
            if number > 1:
                lists[number][first:end].copy_(wide[number])


def _pieces(runs: Iterable[UpdateRange], block: int) -> Iterator[list[UpdateRange]]:
    """Yields the runs in pieces of at most `block` elements, of runs with nothing but padding between them."""
    piece: list[UpdateRange] = []
    for run in runs:
        for start in range(run.start, run.stop, block):
            part = UpdateRange(start, min(start + block, run.stop), run.steps)
            if piece and (part.start - piece[-1].stop >= ALIGN or part.stop - piece[0].start > block):
                yield piece
                piece = []
            piece.append(part)
    if piece:
        yield piece


def _fused(runs: Sequence[UpdateRange], lists: Sequence[torch.Tensor], first: int, hyper: Hyper) -> None:
    """Run torch's AdamW on each run.

    lists: param, grad, momentum, variance, from element `first` on.
    """
    # Filled on the device: no copy, no wait. torch wants fp32 here; fp16 cannot count beyond 2048.
    counts = {
        steps: torch.full((), float(steps + 1), dtype=torch.float32, device=lists[0].device)
        for steps in {run.steps for run in runs}
    }
    params, grads, momenta, variances = ([each[a - first : b - first] for a, b, _ in runs] for each in lists)
    torch._fused_adamw_(
        params,
        grads,
        momenta,
        variances,
        [],
        [counts[run.steps] for run in runs],
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=False,
    )


def total_norm(norms: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the norm of the norms of all gradients, as `torch.nn.utils.clip_grad_norm_` computes it; 0 without
    gradients."""
    stacked = list(norms)
    if not stacked:
        return torch.zeros((), dtype=torch.float32)
    if len({each.device for each in stacked}) > 1:  # of chunks updated on the host and chunks updated on the gpu
        stacked = [each.cpu() for each in stacked]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(stacked))
    return norm


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Returns `clip_grad_norm_`'s factor: max_norm / (norm + 1e-6), at most 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
