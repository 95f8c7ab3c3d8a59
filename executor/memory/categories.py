"""The kind of data of each payload ([Note: categories] in core/ledger.py), which changes without a copy where a
gradient overwrites parameters."""

from __future__ import annotations

import threading

from executor.memory.byte_log import ByteLog
from pstar_sim.core.ledger import Ledger
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place


class Categories:
    """Payloads without memory have none.

    lock: the ledger's.
    """

    def __init__(self, plan: Plan, ledger: Ledger, lock: threading.Lock, log: ByteLog) -> None:
        self._layout = plan.layout
        self._sliced = plan.layout.ranks > 1
        self._ledger = ledger
        self._lock = lock
        self._log = log

    def overwritten(self, chunk: int) -> None:
        """Gradients alone fill the working list on the gpu."""
        for list_name in ("param", "remote") if self._sliced else ("param",):
            self._turn(Place.GPU, chunk, list_name, "grad", by_moment=True)

    def copied(self, source: Place, target: Place, chunk: int, list_name: str) -> None:
        """Give a payload the category of its copy in `source`."""
        with self._lock:
            category = self._log.category(source, chunk, list_name)
        self._turn(target, chunk, list_name, category)

    def rewritten(self, place: Place, chunk: int, list_name: str) -> None:
        """The working list holds parameters from now on."""
        self._turn(place, chunk, list_name, "param")

    def _turn(self, place: Place, chunk: int, list_name: str, category: str, *, by_moment: bool = False) -> None:
        with self._lock:
            if self._ledger.holds(chunk, list_name, place):
                size = self._layout.payload_bytes(chunk, list_name)
                self._log.note_turn(place, category, size, chunk, list_name, by_moment=by_moment)
