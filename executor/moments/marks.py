"""Marks of a trace's moments in what torch records: memory snapshots and profiler traces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from executor.moments.hooks import ModuleEvent, MomentClock


@contextlib.contextmanager
def mark_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside this context, each moment of the training loop ([Note: the clock]) begins with a mark of its name
    (`torch.profiler.record_function`), for any model and optimizer, prepared or not. With `pstar trace --from-snapshot
    --like` a memory snapshot of these steps has its tide by moment."""

    def mark(event: ModuleEvent) -> None:
        with torch.profiler.record_function(event.name):
            pass

    clock = MomentClock(model, mark)
    clock.listen()
    handle = optimizer.register_step_pre_hook(lambda *_: clock.step())
    try:
        yield
    finally:
        handle.remove()
        clock.close()
