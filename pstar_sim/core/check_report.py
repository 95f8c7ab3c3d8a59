"""The report of a check: what it has proved of a plan, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass, field

from pstar_sim.units import format_bytes

__all__ = ["CheckReport"]


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of a check.

    steps: number of steps of the plan.
    moments: number of moments of the plan.
    iterations: number of iterations that had to be unrolled; 2 unless a queue may run further ahead.
    peak_bytes: place -> the most bytes that the place can hold in any legal interleaving (exact).
    peak_at: place -> the moment of this peak, -1 for the cut.
    running: place -> ids of the steps under way at this peak.
    budget_bytes: place -> bytes of the place that the plan may take.
    where: place -> words that say whose bytes these are; empty if all ranks are alike.
    figures: names of the plan's figures that were computed again and are right.
    not_checked: a line for each kind of statement in the plan that was not computed again ([Note: what a check says] in
        figures.py).
    """

    steps: int
    moments: int
    iterations: int
    peak_bytes: dict[str, int]
    peak_at: dict[str, int]
    running: dict[str, tuple[int, ...]]
    budget_bytes: dict[str, int] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    figures: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()

    def describe(self) -> str:
        """Returns the report in words, for people."""
        lines = [f"correct: {self.steps} steps, {self.moments} moments, every legal interleaving"]
        for place, size in self.peak_bytes.items():
            moment = self.peak_at[place]
            when = "between two iterations" if moment < 0 else f"in moment {moment}"
            lines.append(
                f"{place}: at most {format_bytes(size)} ({size} bytes, {when}) "
                f"of {format_bytes(self.budget_bytes[place])}{self.where.get(place, '')}"
            )
        if self.figures:
            lines.append(f"as stated: {', '.join(self.figures)}")
        lines += [f"not checked: {line}" for line in self.not_checked]
        return "\n".join(lines)
