"""Bytes at each place over the iteration that counts, as the ledger books them.

Kept apart from the checker on purpose: the account follows one interleaving and refuses the first illegal change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.effects import CATEGORIES
from pstar_sim.core.follow import Record
from pstar_sim.core.ledger import PLACES, WIDTH, Moves

__all__ = ["Held", "held"]


@dataclass(frozen=True, slots=True)
class Held:
    """cells: bytes of each cell (place * WIDTH + category) when the iteration began.
    time_s: of each change, since the iteration began, in order.
    size: of each change; negative when freed.
    peaks: of gpu and host, and of other places that ever held bytes.
    """

    cells: tuple[int, ...]
    time_s: NDArray[np.float64]
    cell: NDArray[np.signedinteger[Any]]
    size: NDArray[Any]
    peaks: dict[str, int]

    def samples(self) -> dict[str, list[Any]]:
        """The bytes of each cell at the start, then at each change."""
        cells, changed = list(self.cells), self.cell.tolist()
        shown = [cell for cell in range(len(cells)) if PLACES[cell // WIDTH] in self.peaks]
        values = [cells[cell] for cell in shown]
        for cell, size in zip(changed, self.size.tolist()):
            cells[cell] += size
            values.append(cells[cell])
        rows = shown + changed
        return {
            "time_s": [0.0] * len(shown) + self.time_s.tolist(),
            "place": [PLACES[cell // WIDTH] for cell in rows],
            "category": [CATEGORIES[cell % WIDTH] for cell in rows],
            "bytes": values,
        }


def held(moves: Moves, record: Record) -> Held:
    """Of the record's last iteration. Raises PlanError for the first illegal change of any iteration."""
    changes = moves.book(record.events)
    last = record.iterations - 1
    low, high = np.searchsorted(changes.event, record.marks[last - 1 : last + 1])
    at_start = np.array(moves.cells, dtype=changes.size.dtype)
    np.add.at(at_start, changes.cell[:low], changes.size[:low])
    cells = at_start.tolist()
    peaks = {}
    for p, place in enumerate(PLACES):
        if p < 2 or moves.used[p] or np.any(changes.cell // WIDTH == p):
            begins = sum(cells[p * WIDTH : (p + 1) * WIDTH])
            peaks[place.value] = max(begins, int(changes.held[p][low:high].max(initial=0)))
    at_s = np.array(record.at_s)
    return Held(
        cells=tuple(cells),
        time_s=at_s[changes.event[low:high]] - at_s[record.marks[last - 1] - 1],
        cell=changes.cell[low:high],
        size=changes.size[low:high],
        peaks=peaks,
    )
