"""Medians of timed actions in rounds, so that a busy spell does not affect one point only."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Action = Callable[[], object]
Timed = Callable[[Action], float]
"""Runs an action to its end and returns its seconds."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Each point takes about `point_s` seconds in each of `rounds` rounds, with `least` to `most` calls.

    window_s: seconds for which two actions are timed at once.
    memory_bytes: that a measurement may use.
    """

    point_s: float = 0.12
    rounds: int = 3
    least: int = 2
    most: int = 40
    window_s: float = 0.5
    memory_bytes: int = 512 << 20

    @classmethod
    def quick(cls) -> Effort:
        return cls(point_s=0.04, rounds=2, least=1, most=10, window_s=0.2, memory_bytes=256 << 20)


class Bench:
    """breathe: called before every point (progress, interruption)."""

    def __init__(self, effort: Effort, *, breathe: Callable[[], object] = lambda: None) -> None:
        self.effort = effort
        self._breathe = breathe

    def medians(
        self,
        actions: Mapping[Key, Action],
        timed: Timed,
        *,
        longest_s: float = 1.0,
        reduce: Callable[[list[float]], float] = statistics.median,
    ) -> dict[Key, float]:
        """Median (or `reduce`) of each action's seconds, after one untimed call for caches, pages and kernels.

        One longer than `longest_s` is measured once per round, and later ones (larger, by convention) are left out."""
        samples: dict[Key, list[float]] = {}
        left_out: set[Key] = set()
        for number in range(self.effort.rounds):
            too_long = False
            for key, action in actions.items():
                if key in left_out or too_long:
                    left_out.add(key)
                    continue
                self._breathe()
                if number == 0:
                    too_long = timed(action) > longest_s
                samples.setdefault(key, []).extend(self._one_round(action, timed, longest_s))
        return {key: reduce(values) for key, values in samples.items() if key not in left_out}

    def _one_round(self, action: Action, timed: Timed, longest_s: float) -> list[float]:
        taken: list[float] = []
        while len(taken) < self.effort.most:
            taken.append(timed(action))
            spent = sum(taken)
            if taken[-1] > longest_s or (len(taken) >= self.effort.least and spent >= self.effort.point_s):
                break
        return taken
