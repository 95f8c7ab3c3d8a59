"""The training loop of `pstar run`, the demo and the benchmarks, under the executor and in plain PyTorch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from executor.driving.again import Before
from executor.models import forward_loss
from pstar_sim.errors import ModelError, OutOfMemory


@dataclass(frozen=True, slots=True)
class StepReport:
    """step: from 0.
    loss: mean over the micro-batches."""

    step: int
    loss: float
    time_s: float


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    micro_batches: int,
    *,
    number: int = 0,
) -> float:
    """Run every micro-batch forward and backward, then step and zero_grad. Returns the mean loss. Raises ModelError
    when a loss is not finite, before its backward.

    If the accelerator refuses memory, a prepared model climbs its ladder (see off_plan/), and the same micro-batches
    run again with the same random numbers. Under a relay plan the session runs the step.
    """
    session = getattr(optimizer, "session", None)
    if session is not None and session.plan.workload.relayed:
        rows = [next(batches) for _ in range(micro_batches)]
        return float(session.step(rows, loss=_checked(model, micro_batches, number)).loss)
    drawn: list[Any] = []
    before = Before(model)
    while True:
        try:
            total = 0.0
            for i in range(micro_batches):
                if i == len(drawn):
                    drawn.append(next(batches))
                total += _micro_batch(model, drawn[i], micro_batches, number)
            break
        except (OutOfMemory, torch.OutOfMemoryError) as error:
            if session is None:
                raise
            refused = error.with_traceback(None)  # the error's frames hold the forward's tensors
        session.ladder.recover(refused)
        before.restore()
    optimizer.step()
    optimizer.zero_grad()
    return total


def _micro_batch(model: torch.nn.Module, batch: Any, micro_batches: int, number: int) -> float:
    loss = forward_loss(model, batch) / micro_batches
    value = _finite(loss, number)
    loss.backward()  # type: ignore[no-untyped-call]
    return value


def _finite(loss: torch.Tensor, number: int) -> float:
    value = float(loss.detach())
    if not math.isfinite(value):
        raise ModelError(
            f"the loss is {value} at step {number}; lower the learning rate (--lr), clip gradients (--clip) "
            "or use fp32, and start again from the last good state"
        )
    return value


def _checked(prepared: torch.nn.Module, micro_batches: int, number: int) -> Callable[[torch.nn.Module, Any], Any]:
    """Raises ModelError for a loss that is not finite; copies under fake tensors have no values."""

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        value = forward_loss(model, batch)
        if model is prepared:
            _finite(value / micro_batches, number)
        return value

    return loss


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    *,
    steps: int,
    micro_batches: int,
    first: int = 0,
    on_step: Callable[[StepReport], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[StepReport]:
    """Train for `steps` optimizer steps, numbered from `first`, with a report of each. Raises ModelError when a loss is
    not finite, before any update with it."""
    reports: list[StepReport] = []
    for step in range(first, first + steps):
        start_s = clock()
        loss = train_step(model, optimizer, batches, micro_batches, number=step)
        report = StepReport(step, loss, clock() - start_s)
        reports.append(report)
        if on_step is not None:
            on_step(report)
    return reports
