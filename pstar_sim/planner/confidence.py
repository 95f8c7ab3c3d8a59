"""Where the inputs of a prediction come from: measured on the machine itself, fitted, a datasheet, or assumed."""

from __future__ import annotations

from collections.abc import Mapping

from pstar_sim.catalog.machine import KNOWN, Machine
from pstar_sim.workload.workload import Workload

ORDER = ("recorded", "calibrated", *KNOWN)  # the best known first


def confidence(workload: Workload, machine: Machine) -> dict[str, str]:
    """For each input one of "calibrated", "measured", "fitted", "datasheet", "assumed";  for compute also "recorded":
    the moments' own durations on this machine."""
    found = machine.confidence_by_input
    if workload.recorded_on is not None and workload.recorded_on == machine.name:
        found["compute"] = "recorded"
        for included in ("operators", "framework"):
            found.pop(included, None)
    return found


def worst_known(found: Mapping[str, str]) -> str:
    """Such as "assumed: operators, framework"."""
    word = max(found.values(), key=ORDER.index)
    return f"{word}: {', '.join(name for name, known in found.items() if known == word)}"


def confidence_line(found: Mapping[str, str]) -> str:
    """Such as "calibrated: compute, link; datasheet: CPU Adam, DRAM"."""
    always = ("calibrated", "datasheet")
    words = [w for w in ORDER if w in always or w in found.values()]
    named = {word: [name for name, source in found.items() if source == word] for word in words}
    return "; ".join(f"{word}: {', '.join(names) or 'none'}" for word, names in named.items())
