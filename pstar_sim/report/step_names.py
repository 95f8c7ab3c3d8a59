"""Step names: the chunk that a step handles, in words. A timeline knows the chunk; the plan also knows list and part,
without which the copies of one chunk would all have one name."""

from __future__ import annotations

from collections.abc import Mapping

from pstar_sim.core.plan import Plan

__all__ = ["chunk_words"]

_USUAL = (None, "param", "grad")


def chunk_words(plan: Plan | None) -> Mapping[int, str]:
    """Returns id of a step -> "chunk 3", "chunk 3, momentum" or "chunk 3, part 2 of 8". The kind of the step tells
    parameters and gradients apart. Empty without a plan."""
    found: dict[int, str] = {}
    for step in plan.steps if plan is not None else ():
        if step.chunk is not None:
            listed = "" if step.list in _USUAL else f", {step.list}"
            part = "" if step.part is None else f", part {step.part.number + 1} of {step.part.of}"
            found[step.id] = f"chunk {step.chunk}{listed}{part}"
    return found
