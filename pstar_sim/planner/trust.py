"""Trust: how far off predicted times were where they could be held against published ones.

Validation stands above the planner and is found when asked for, as the pictures of a comparison are. Knows no numbers
of its own.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from pstar_sim.catalog.machine import Machine

__all__ = ["NOT_VALIDATED", "Trust", "trust"]

NOT_VALIDATED = "not validated on this class"


@dataclass(frozen=True)
class Trust:
    """error: median relative error of predicted times, None where nothing is known. label: what it rests on."""

    error: float | None
    label: str


def trust(machine: Machine, policy: str) -> Trust:
    """What validation found for this class of machine and this policy, or for the class with other policies."""
    found = importlib.import_module("pstar_sim.validation.errors").expected_error(machine, policy)
    return Trust(None, NOT_VALIDATED) if found is None else Trust(found.median, found.label)
