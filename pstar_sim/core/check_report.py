"""The report of a check: what it has proved of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from pstar_sim.units import format_bytes, format_ranks


@dataclass(frozen=True, kw_only=True)
class GpuPeak:
    """The most bytes that these ranks' GPU can hold in any legal interleaving (exact).

    moment: -1 for the cut.
    running: ids of the steps under way.
    """

    ranks: tuple[int, ...]
    bytes: int
    moment: int
    running: tuple[int, ...]
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """iterations: unrolled; 2 unless a queue may run further ahead.
    peak_bytes: place -> the most on any rank in any legal interleaving (exact).
    peak_at: place -> moment, -1 for the cut.
    gpus: one peak for all ranks that are alike.
    figures: that were computed again.
    not_checked: a line per kind of statement that was not ([Note: what a check says] in figures.py).
    """

    steps: int
    moments: int
    iterations: int
    peak_bytes: dict[str, int]
    peak_at: dict[str, int]
    running: dict[str, tuple[int, ...]]
    budget_bytes: dict[str, int] = field(default_factory=dict)
    gpus: tuple[GpuPeak, ...] = ()
    figures: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()

    def describe(self) -> str:
        lines = [f"correct: {self.steps} steps, {self.moments} moments, every legal interleaving"]
        rows = [(place, size, self.peak_at[place], self.budget_bytes[place]) for place, size in self.peak_bytes.items()]
        if len(self.gpus) > 1:
            gpus = [(f"gpu of {format_ranks(p.ranks)}", p.bytes, p.moment, p.budget_bytes) for p in self.gpus]
            rows = [*gpus, *(row for row in rows if row[0] != "gpu")]
        for what, size, moment, budget in rows:
            when = "between two iterations" if moment < 0 else f"in moment {moment}"
            lines.append(f"{what}: at most {format_bytes(size)} ({size} bytes, {when}) of {format_bytes(budget)}")
        lines.append(f"as stated: {', '.join(self.figures) or 'no figure was computed again'}")
        lines += [f"not checked: {line}" for line in self.not_checked]
        return "\n".join(lines)
