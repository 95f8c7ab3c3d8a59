"""What the executor's log says the bytes are, beside what the simulator books for the same steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pstar_sim.core.effects import overwritten_in_place


@pytest.mark.parametrize(
    ("policy", "micro_batches"),
    [("tide", 1), ("tide", 3), ("zero_offload", 1), ("patrickstar", 1), ("patrickstar", 3), ("stronghold", 1)],
)
def test_the_log_names_bytes_as_the_simulator_does(
    kit: Any, start: Callable[..., Any], policy: str, micro_batches: int
) -> None:
    """A working list counts as gradients once they fill it, its copy on the host too, until an update rewrites it.
    test_several_ranks.py asks the same of ranks."""
    run = start("mlp", policy, micro_batches=micro_batches, clip=0.5)
    for _ in range(3):
        for _ in range(micro_batches):
            (kit.loss_of(run.model, next(run.batches)) / micro_batches).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.session.drain()
    logged, booked = kit.byte_changes(run.session)
    assert logged == booked
    in_place = any(r.category == "grad" and r.chunk < 0 for r in run.session.arena.log.changes)
    assert in_place == bool(overwritten_in_place(run.plan))
