"""The usual training loop, for a model beside itself under a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["train"]


def train(
    model: nn.Module,
    optimizers: Any,
    batches: Iterator[Any],
    steps: int,
    micro_batches: int = 1,
    *,
    loss_of: Callable[[nn.Module, Any], Any] = lambda model, batch: model(batch),
    clip: float | None = None,
) -> list[float]:
    """Returns the loss of each micro-batch.

    optimizers: one, or a list of those that step one after the other.
    clip: norm at which the loop clips the gradients itself.
    """
    losses = []
    for _ in range(steps):
        for _ in range(micro_batches):
            loss = loss_of(model, next(batches)) / micro_batches
            loss.backward()
            losses.append(float(loss.detach()))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()
            optimizer.zero_grad()
    return losses
