"""Optimizers: the states that each keeps, and the bytes that one update moves through memory.

A layout, a bound or a cost never multiplies by a list's width: it asks the optimizer for the bytes of a list, of all
states, or of an update. So an optimizer whose lists have scales, or rows and columns, is a matter of this file.

Every optimizer keeps an fp32 master copy of the parameter (`MASTER_LIST`). In an update each state is read and written,
the 2-byte gradient is read and the 2-byte parameter is written:

- adamw: two fp32 moments. 4 + 4 + 4 read and written, 2 in, 2 out: 28.
- adamw-bf16-states: both moments in bf16. 4 + 2 + 2 read and written, 2 in, 2 out: 20.
- sgd-momentum: one fp32 momentum. 4 + 4 read and written, 2 in, 2 out: 20.
- sgd: no state but the master copy. 4 read and written, 2 in, 2 out: 12.

The executor runs adamw and adamw-bf16-states, and refuses the others; these can only be planned.
"""

from __future__ import annotations

from dataclasses import dataclass

from pstar_sim.arguments import text
from pstar_sim.catalog.machine import ADAM_BYTES_PER_PARAM
from pstar_sim.errors import UnknownName

__all__ = ["MASTER_LIST", "OPTIMIZERS", "OptimizerSpec", "optimizer_spec"]

MASTER_LIST = "param32"
"""The list of master copies, from which an update writes the working list."""
_MASTER = (MASTER_LIST, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """The states that the optimizer keeps for each trainable parameter.

    name: name of the optimizer.
    state_bytes: list name -> bytes per parameter, in storage order. The default is AdamW with fp32 states; with the
        2-byte working list it takes 14 bytes per parameter.
    dram_bytes_per_param: host memory traffic of one CPU update (reads and writes of the states, gradient in, parameter
        out).
    """

    name: str = "adamw"
    state_bytes: tuple[tuple[str, int], ...] = (_MASTER, ("momentum", 4), ("variance", 4))
    dram_bytes_per_param: int = ADAM_BYTES_PER_PARAM

    @property
    def lists(self) -> tuple[str, ...]:
        """Names of the state lists, in storage order."""
        return tuple(name for name, _ in self.state_bytes)

    @property
    def states_bytes_per_param(self) -> float:
        return sum(size for _, size in self.state_bytes)

    @property
    def widest_bytes_per_param(self) -> float:
        """0 without lists."""
        return max((size for _, size in self.state_bytes), default=0)

    def list_bytes(self, numel: int) -> dict[str, int]:
        return {name: numel * size for name, size in self.state_bytes}

    def states_bytes(self, numel: int) -> int:
        return sum(self.list_bytes(numel).values())

    def update_bytes(self, numel: int) -> int:
        """Reads and writes of one update."""
        return numel * self.dram_bytes_per_param


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
    """Raises UnknownName."""
    text("optimizer", name, f"one of {', '.join(OPTIMIZERS)}")
    if name not in OPTIMIZERS:
        raise UnknownName("optimizer", name, tuple(OPTIMIZERS))
    return OPTIMIZERS[name]
