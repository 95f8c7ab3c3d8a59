"""Interleaved rounds: several contenders are alive at once and make one step each in turn, so that the machine's load
affects all of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from contenders.process import Failed, Process

__all__ = ["interleave"]


def interleave(
    made: Sequence[Process], *, warm_up: int, steps: int, build_s: float, step_s: float
) -> dict[str, dict[str, Any]]:
    """Returns the results of each contender by name: times and losses of every round, memory; or {"failed": reason}.
    The order turns by one position every round. A contender that fails drops out, the others continue.

    build_s, step_s: most seconds of a build and of a step.
    """
    alive = {process.task.contender: process for process in made}
    found: dict[str, dict[str, Any]] = {name: {"times_s": [], "losses": []} for name in alive}

    def drop(name: str, error: Failed) -> None:
        found[name] = {"failed": str(error)}
        del alive[name]

    for name, process in list(alive.items()):  # built one after the other, because builds take memory and cores
        try:
            process.start_building()
            process.answer(build_s)
        except Failed as error:
            drop(name, error)
    for number in range(warm_up + steps):
        names = list(alive)
        turn = number % len(names) if names else 0
        for name in (*names[turn:], *names[:turn]):
            try:
                if number == warm_up:
                    found[name]["start"] = alive[name].ask("settle", 60)
                answer = alive[name].ask("step", step_s)
            except Failed as error:
                drop(name, error)
                continue
            found[name]["losses"].append(answer["loss"])
            if number >= warm_up:
                found[name]["times_s"].append(answer["time_s"])
    for name, process in list(alive.items()):
        try:
            found[name]["memory"] = process.ask("memory", step_s)
        except Failed as error:
            drop(name, error)
            continue
        found[name]["median_s"] = statistics.median(found[name]["times_s"])
        found[name]["tokens_per_s"] = process.task.tokens / found[name]["median_s"]
    return found
