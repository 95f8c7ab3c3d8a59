"""Stages of a long benchmark. Each stage is done once and its result kept as a line of JSON, so that a later run
continues where an interrupted one stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contenders.process import Failed

__all__ = ["OutOfTime", "Stages"]


class OutOfTime(Exception):
    """The run's minutes are over; results by now are kept."""


class Stages:
    """Runs and keeps the stages of a benchmark. A stage that failed for good is kept with its reason and not tried
    again, unless `again` is set.

    path: the file of results.
    minutes: time of this run, None for no limit.
    expected_s: estimated seconds of a stage before any was timed.
    """

    def __init__(
        self,
        path: Path,
        *,
        minutes: float | None,
        expected_s: float = 120.0,
        say: Callable[[str], object] = print,
        clock: Callable[[], float] = time.perf_counter,
        again: bool = False,
    ) -> None:
        self.path, self._say, self._clock = path, say, clock
        self._begun_s = clock()
        self._minutes = minutes
        self._expected_s = expected_s
        self._done: dict[str, dict[str, Any]] = {}
        self._left_out = 0
        if path.exists():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                try:
                    row = json.loads(line)
                    self._done[row["key"]] = row["result"]
                    if again and "failed" in row["result"]:
                        del self._done[row["key"]]
                except (ValueError, KeyError, TypeError):
                    say(f"{path}, line {number}: not a result, left out (a run was cut off while it wrote)")
            if self._done:
                say(f"{path}: {len(self._done)} stages are done already; --fresh begins anew")

    def __len__(self) -> int:
        return len(self._done)

    def __contains__(self, key: str) -> bool:
        """Returns whether the stage is done already."""
        return key in self._done

    @property
    def left_out(self) -> int:
        """Number of stages that were requested and had no time left."""
        return self._left_out

    @property
    def left_s(self) -> float:
        if self._minutes is None:
            return float("inf")
        return 60.0 * self._minutes - (self._clock() - self._begun_s)

    def run(self, key: str, what: str, work: Callable[[float], dict[str, Any]]) -> dict[str, Any] | None:
        """Returns the kept result of this key. Otherwise runs work(seconds left) and keeps its result; None where there
        is no time for it. A stage that fails for good gives {"failed": reason}.
        """
        if key in self._done:
            return self._done[key]
        if self.left_s < self._expected_s:
            self._left_out += 1
            return None
        self._say(f"{what} ...")
        begun_s = self._clock()
        try:
            result = work(self.left_s)
        except Failed as error:
            result = {"failed": str(error)}
            self._say(f"  {error}")
            if not error.lasting:
                if self.left_s <= 5:
                    self._left_out += 1
                    return None
                result = {"failed": f"{error} (not tried again; --again does)"}
        took_s = self._clock() - begun_s
        if self._minutes is not None:
            self._expected_s = max(self._expected_s / 2, took_s)
        self._done[key] = result
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "what": what, "took_s": round(took_s, 1), "result": result}) + "\n")
        return result

    def forget(self) -> None:
        """Remove the file: all stages are done and their results written elsewhere."""
        self.path.unlink(missing_ok=True)
