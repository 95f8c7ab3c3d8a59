"""Optimizers by name: the states that each keeps, and the bytes that one update moves through memory.

Figures are bytes per parameter. Every optimizer keeps an fp32 master copy of the parameter (`param32`). In an update
each state is read and written, the 2-byte gradient is read and the 2-byte parameter is written:

- adamw: two fp32 moments. 4 + 4 + 4 read and written, 2 in, 2 out: 28.
- adamw-bf16-states: both moments in bf16. 4 + 2 + 2 read and written, 2 in, 2 out: 20.
- sgd-momentum: one fp32 momentum. 4 + 4 read and written, 2 in, 2 out: 20.
- sgd: no state but the master copy. 4 read and written, 2 in, 2 out: 12.

The executor runs adamw and adamw-bf16-states, and refuses the others; these can only be planned.
"""

from __future__ import annotations

from dataclasses import replace

from pstar_sim.arguments import text
from pstar_sim.errors import UnknownName
from pstar_sim.workload.workload import OptimizerSpec, Workload

__all__ = ["OPTIMIZERS", "optimizer_spec", "with_optimizer"]

_MASTER = ("param32", 4)

OPTIMIZERS = {
    "adamw": OptimizerSpec(),
    "adamw-bf16-states": OptimizerSpec(
        name="adamw-bf16-states",
        state_bytes=(_MASTER, ("momentum", 2), ("variance", 2)),
        dram_bytes_per_param=2 * (4 + 2 + 2) + 2 + 2,
    ),
    "sgd-momentum": OptimizerSpec(
        name="sgd-momentum", state_bytes=(_MASTER, ("momentum", 4)), dram_bytes_per_param=2 * (4 + 4) + 2 + 2
    ),
    "sgd": OptimizerSpec(name="sgd", state_bytes=(_MASTER,), dram_bytes_per_param=2 * 4 + 2 + 2),
}


def optimizer_spec(name: str) -> OptimizerSpec:
    """Returns the optimizer of that name. Raises UnknownName."""
    text("optimizer", name, f"one of {', '.join(OPTIMIZERS)}")
    if name not in OPTIMIZERS:
        raise UnknownName("optimizer", name, tuple(OPTIMIZERS))
    return OPTIMIZERS[name]


def with_optimizer(workload: Workload, name: str) -> Workload:
    """Returns the same workload with another optimizer. Raises UnknownName."""
    return replace(workload, optimizer=optimizer_spec(name))
