"""AdamW on flat chunks: one fused torch call for each run of neighbouring parameters with a gradient.

All tensors of a call are fp32 and flat. A parameter without a gradient in this iteration is left out, as torch does, so
a chunk is cut into runs. Padding between two neighbours belongs to their run (its gradient, states and values are 0).
Knows no queue and no place: the caller passes tensors of the host or of the gpu.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind

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


@dataclass(frozen=True, slots=True)
class UpdateRange:
    """Elements [start, stop) of a chunk, whose parameters have had `steps` updates before this update."""

    start: int
    stop: int
    steps: int


def ranges_of(slots: Iterable[tuple[int, int, int | None]]) -> list[UpdateRange]:
    """Returns the ranges of a chunk that an update covers. Neighbouring tensors with the same number of earlier updates
    share a range; tensors without a gradient are in none.

    slots: per tensor, ascending by offset: (offset, numel, number of earlier updates or None without a gradient).
    """
    runs: list[UpdateRange] = []
    open_run = False
    for offset, numel, steps in slots:
        if steps is None:
            open_run = False
        elif open_run and runs[-1].steps == steps:
            runs[-1] = UpdateRange(runs[-1].start, offset + numel, steps)
        else:
            runs.append(UpdateRange(offset, offset + numel, steps))
            open_run = True
    return runs


def scratch_bytes(plan: Plan) -> int:
    """Returns the bytes that `Scratch` takes on the gpu for the plan's updates there, beside the payloads and the tide:
    one piece for the gradient and one for each moment, where these are narrower than fp32."""
    chunks = {s.chunk for s in plan.steps if s.kind is Kind.GPU_ADAM and s.chunk is not None}
    if not chunks:
        return 0
    layout = plan.layout
    narrow = sum(width < 4 for name, width in layout.state_bytes if name in ("momentum", "variance"))
    narrow += any(layout.chunks[c].dtype != "fp32" for c in chunks)
    return narrow * 4 * min(GPU_BLOCK, max(layout.slice_numel(c) for c in chunks))


class Scratch:
    """fp32 buffers for the casts of the updates at one place, kept from one update to the next.

    block: elements of a piece.
    """

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self._kept: dict[int, torch.Tensor] = {}

    def get(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """Returns a buffer [block] on the device of `like`; each number has a buffer of its own."""
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
    `momentum` and `variance` may be narrower: they are widened, the update is done in fp32, and the new moments are
    rounded to nearest.

    scale: fp32 scalar that multiplies the gradients first (clipping, loss scaling). The gradients are overwritten.
    scratch: buffers for widened lists; None: buffers for this call alone.
    """
    room = scratch or Scratch()
    narrow = [each.dtype != torch.float32 for each in (grad, momentum, variance)]
    for run in runs:
        if not any(narrow):
            _fused(param, grad, momentum, variance, run.start, run.stop, run.steps, hyper, scale)
            continue
        wider = [room.get(number, grad) if each else None for number, each in enumerate(narrow)]
        for start in range(run.start, run.stop, room.block):
            stop = min(start + room.block, run.stop)
            g, m, v = (
                each[start:stop] if wide is None else wide[: stop - start].copy_(each[start:stop])
                for each, wide in zip((grad, momentum, variance), wider)
            )
            _fused(param[start:stop], g, m, v, 0, stop - start, run.steps, hyper, scale)
            if narrow[1]:
                momentum[start:stop].copy_(m)
            if narrow[2]:
                variance[start:stop].copy_(v)


def _fused(
    param: torch.Tensor,
    grad: torch.Tensor,
    momentum: torch.Tensor,
    variance: torch.Tensor,
    start: int,
    stop: int,
    steps: int,
    hyper: Hyper,
    scale: torch.Tensor | None,
) -> None:
    gradient = grad[start:stop]
    if scale is not None:
        gradient.mul_(scale)
    torch._fused_adamw_(
        [param[start:stop]],
        [gradient],
        [momentum[start:stop]],
        [variance[start:stop]],
        [],
        # Filled on the device: no copy, no wait. torch wants fp32 here; fp16 cannot count beyond 2048.
        [torch.full((), float(steps + 1), dtype=torch.float32, device=param.device)],
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
    """Returns the factor with which `clip_grad_norm_` multiplies every gradient: max_norm / (norm + 1e-6), at most
    1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
