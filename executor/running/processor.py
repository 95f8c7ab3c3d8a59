"""Other programs' processor time, which tells a slow machine from a wrong prediction.

It is read from /proc/stat and this process's times. What a hypervisor gave to another machine counts as taken. None if
/proc/stat is missing or does not change.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
_IDLE = (3, 4)  # positions of idle and iowait
_COUNTED = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Seconds of all cores since the machine started: all, working ones, this process's and its ended children's."""

    total_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls, stat: Path = STAT) -> ProcessorTime | None:
        """None where the counters cannot be read."""
        try:
            line = stat.read_text(encoding="ascii").partition("\n")[0]
            words = [int(word) for word in line.split()[1 : 1 + _COUNTED]]
        except (OSError, ValueError):
            return None
        if not line.startswith("cpu ") or len(words) < _COUNTED:
            return None
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        total, idle = sum(words), sum(words[i] for i in _IDLE)
        own = os.times()
        own_s = own.user + own.system + own.children_user + own.children_system
        return cls(total * tick_s, (total - idle) * tick_s, own_s)


def taken_by_others(before: ProcessorTime | None, after: ProcessorTime | None) -> float | None:
    """Share (0 to 1) of processor time between two readings, None if unknown."""
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / (after.total_s - before.total_s)))
