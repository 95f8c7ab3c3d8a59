"""AdamW on flat chunks: one fused torch call for each run of neighbouring parameters that got a gradient.

All tensors of a call are fp32 and flat. A parameter without a gradient in this iteration is left out, as torch does, so
a chunk is cut into runs; padding between two neighbours belongs to their run (its gradient, states and values are 0).
Knows no queue and no place: the caller hands it tensors of the host or of the gpu.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Hyper", "Run", "adamw", "runs_of", "total_norm"]

BLOCK = 1 << 20  # elements of one piece where a cast needs scratch: 4 MiB stay in cache


@dataclass(frozen=True, slots=True)
class Hyper:
    """AdamW's numbers for one parameter group, as they were when `optimizer.step()` was called."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, stop) of a chunk whose parameters have had `steps` updates before this one."""

    start: int
    stop: int
    steps: int


def runs_of(slots: Iterable[tuple[int, int, int | None]]) -> list[Run]:
    """Runs of a chunk. slots: (offset, numel, updates so far, or None without a gradient), ascending by offset."""
    runs: list[Run] = []
    open_run = False
    for offset, numel, steps in slots:
        if steps is None:
            open_run = False
        elif open_run and runs[-1].steps == steps:
            runs[-1] = Run(runs[-1].start, offset + numel, steps)
        else:
            runs.append(Run(offset, offset + numel, steps))
            open_run = True
    return runs


def adamw(
    runs: Sequence[Run],
    *,
    param: torch.Tensor,
    grad: torch.Tensor,
    momentum: torch.Tensor,
    variance: torch.Tensor,
    hyper: Hyper,
    scale: torch.Tensor | None = None,
) -> None:
    """One AdamW update of each run, in place. All flat [numel of the chunk]; fp32 but `grad`, which may be narrower.

    scale: fp32 scalar that multiplies the gradients first (the clipping coefficient); the gradients are spent.
    """
    for run in runs:
        if grad.dtype == torch.float32:
            _fused(param, grad, momentum, variance, run.start, run.stop, run.steps, hyper, scale)
            continue
        scratch = torch.empty(min(BLOCK, run.stop - run.start), dtype=torch.float32, device=grad.device)
        for start in range(run.start, run.stop, BLOCK):
            stop = min(start + BLOCK, run.stop)
            piece = scratch[: stop - start]
            piece.copy_(grad[start:stop])
            _fused(
                param[start:stop], piece, momentum[start:stop], variance[start:stop],
                0, stop - start, run.steps, hyper, scale,
            )  # fmt: skip


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
        [torch.tensor(float(steps + 1), device=param.device)],
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=False,
    )


def total_norm(norms: Iterable[torch.Tensor]) -> torch.Tensor:
    """Norm of the norms of all gradients, as `torch.nn.utils.clip_grad_norm_` takes it; 0 if there is none."""
    stacked = list(norms)
    if not stacked:
        return torch.zeros(())
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(stacked))
    return norm


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What `clip_grad_norm_` multiplies every gradient with: max_norm / (norm + 1e-6), at most 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
