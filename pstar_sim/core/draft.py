"""Draft: the steps of one iteration before their order is chosen.

The charge of a row (seconds, bytes) depends on its kind, its chunk and its list, so a search computes each charge once
per job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pstar_sim.core.rules import Rates
from pstar_sim.core.step import Kind, Queue

__all__ = ["FREE", "Charge", "Draft", "DraftRow"]


@dataclass(frozen=True, slots=True)
class Charge:
    """seconds: nominal, of the row running alone.
    gpu_take, host_take: bytes taken at the start.
    gpu_free, host_free: bytes freed at the end.
    """

    seconds: float = 0.0
    gpu_take: int = 0
    gpu_free: int = 0
    host_take: int = 0
    host_free: int = 0
    dram_bytes: int = 0


FREE = Charge()


@dataclass(slots=True)
class DraftRow:
    """One step, or a block of moments. The value -1 means none.

    moment: for a block, an Adam or a stash, the other fields determine it.
    after: (row, back) pairs that have to end first, in this iteration (back 0) or the previous iteration (back 1).
    key: order among the ready rows of a queue, smallest first (None: the order of the draft).
    behind: an earlier row of the same queue that this row follows at once (a drop after its write-back), with no time,
        bytes, waits or key.
    use: position that a fetch or a gather serves.
    is_position: whether the row is the next position of the compute queue.
    """

    queue: Queue
    kind: Kind
    chunk: int = -1
    list_name: str = "param"
    moment: int = -1
    charge: Charge = FREE
    after: tuple[tuple[int, int], ...] = ()
    key: tuple[float, ...] | None = None
    behind: int | None = None
    use: int | None = None
    is_position: bool = False
    block: int = -1
    stash: int = -1


@dataclass(slots=True)
class Draft:
    """Rows of one iteration, in an order in which they could run one after the other.

    gpu_free_bytes, host_free_bytes: at the cut, when no step of the iteration has begun.
    rates: of copies and CPU Adam, without measured slow-downs. Collectives use other wires.
    room: per position, bytes that fetches ahead of their use may take.
    lead_bytes: see [Note: fetching ahead] in choose.py.
    """

    rows: Sequence[DraftRow]
    gpu_free_bytes: int
    host_free_bytes: int
    rates: Rates
    room: Sequence[int] | None = None
    lead_bytes: int = 0
