"""Bytes by place over the counted iteration, as the ledger books one interleaving, which it refuses at the first
illegal change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.effects import CATEGORIES
from pstar_sim.core.follow import Record
from pstar_sim.core.ledger import PLACES, WIDTH, Moves


@dataclass(frozen=True, slots=True)
class Held:
    """cells: at its begin, by place * WIDTH + category.
    time_s: per change, since the begin.
    size: negative when freed.
    peaks: of gpu, host, and other places that held bytes.
    """

    cells: tuple[int, ...]
    time_s: NDArray[np.float64]
    cell: NDArray[np.signedinteger[Any]]
    size: NDArray[Any]
    peaks: dict[str, int]

    def samples(self) -> dict[str, list[Any]]:
        """At the start, then at each change."""
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
    """Of the last iteration. Raises PlanError for the first illegal change of any iteration."""
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
