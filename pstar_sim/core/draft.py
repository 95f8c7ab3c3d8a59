"""Draft: the steps of one iteration before their order is chosen.

A charge depends on kind, chunk and list alone, so a search computes each once per job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from pstar_sim.core.rules import Rates
from pstar_sim.core.step import Kind, Queue


class Charge(Struct, frozen=True):
    """seconds: nominal, of the row alone.
    gpu_take, host_take: at the start.
    gpu_free, host_free: at the end.
    """

    seconds: float = 0.0
    gpu_take: int = 0
    gpu_free: int = 0
    host_take: int = 0
    host_free: int = 0
    dram_bytes: int = 0


FREE = Charge()


class DraftRow(Struct):
    """A step or a block of moments; -1 means none.

    moment: for a block, an Adam or a stash, the other fields determine it.
    after: (row, back) that have to end first, in this iteration (0) or the previous (1).
    key: order among a queue's ready rows, smallest first (None: the draft's).
    behind: an earlier row of the queue that this row follows at once (a drop after its write-back), without time,
        bytes, waits or key.
    use: position that a fetch or gather serves.
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
    gated: bool = False


@dataclass(slots=True)
class Draft:
    """Rows of one iteration, in an order in which they could run one after the other.

    gpu_free_bytes, host_free_bytes: at the cut, when no step of the iteration has begun.
    rates: of copies and CPU Adam, without measured slow-downs.
    room: per position, bytes for fetches ahead of use.
    lead_bytes: see [Note: fetching ahead] in choose.py.
    gate: rows for which gated rows wait.
    """

    rows: Sequence[DraftRow]
    gpu_free_bytes: int
    host_free_bytes: int
    rates: Rates
    room: Sequence[int] | None = None
    lead_bytes: int = 0
    gate: Sequence[int] = ()
