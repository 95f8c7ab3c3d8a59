"""Load of this machine by other programs during a measurement: a reason to measure again that does not look at the
result.

Reads /proc/stat. Where it is missing, the load is unknown and counts as none.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["Others"]

_STAT = Path("/proc/stat")


class Others:
    """Cores that programs other than this process kept busy since the last call of `cores()`, on average."""

    def __init__(self) -> None:
        self._last = self._read()

    def cores(self) -> float:
        before, self._last = self._last, self._read()
        (busy_s, own_s, at_s), (busy0_s, own0_s, at0_s) = self._last, before
        if at_s <= at0_s:
            return 0.0
        return max(0.0, (busy_s - busy0_s - (own_s - own0_s)) / (at_s - at0_s))

    def wait(self, most_cores: float, patience_s: float) -> bool:
        """Wait until other programs have kept at most `most_cores` busy for a second. Returns False if that does not
        happen within `patience_s`."""
        give_up_s = time.perf_counter() + patience_s
        self.cores()
        while time.perf_counter() < give_up_s:
            time.sleep(1.0)
            if self.cores() <= most_cores:
                return True
        return False

    def _read(self) -> tuple[float, float, float]:
        """Returns (busy seconds of all cores, CPU seconds of this process, wall seconds)."""
        times = os.times()
        own_s = times.user + times.system + times.children_user + times.children_system
        busy_s = own_s
        if _STAT.exists():
            ticks = [int(word) for word in _STAT.read_text().splitlines()[0].split()[1:9]]
            user, nice, system, _idle, _wait, irq, soft, steal = ticks
            busy_s = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        return busy_s, own_s, time.perf_counter()
