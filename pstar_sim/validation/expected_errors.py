"""Errors by class of machine. Validation keeps them, and answers show them with predicted times (planner/trust.py).
Also counts the rows that lie inside the bar that an answer would have quoted for them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from pstar_sim.errors import PstarError
from pstar_sim.files import write_atomically
from pstar_sim.planner.trust import ANY, FEWEST_ROWS, FILE, UNTUNED, class_name, machines_of
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.validation.results import WHOLE, Result, Validation, errors_of, quantile
from pstar_sim.validation.rows import published_rows

__all__ = ["ERRORS_FILE", "INSIDE", "binomial_interval", "errors_by_class", "quoted_bars", "write_errors"]

ERRORS_FILE = Path(str(FILE))
INSIDE = 0.683
"""Share of rows that one standard deviation holds."""
_Z90 = 1.645


def errors_by_class(results: Iterable[Result]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns class -> policy (and "any policy") -> median, p90, bar and rows, of whole iterations to which nothing is
    fitted, and from which nothing is inferred."""
    groups = _groups(_judged(results))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in sorted(groups):
        for key in sorted(groups[name]):
            e = errors_of(groups[name][key])
            assert e is not None
            found.setdefault(name, {})[key] = {
                "median": round(e.median, 4),
                "p90": round(e.p90, 4),
                "bar": round(_bar(groups[name][key]), 4),
                "rows": e.rows,
            }
    return found


def quoted_bars(results: Iterable[Result]) -> list[tuple[Result, float]]:
    """Returns the rows of `errors_by_class`, each with the bar that an answer would quote without knowing it: of its
    class and policy, of its class, or UNTUNED (at least that of a class of the same machines)."""
    judged = _judged(results)
    groups = _groups(judged)
    found = []
    for r in judged:
        name, policy = _class(r), split_spec(r.policy)[0]
        for known in (groups[name].get(policy, []), groups[name][ANY]):
            others = [o for o in known if o is not r]
            if len(others) >= FEWEST_ROWS:
                found.append((r, _bar(others)))
                break
        else:
            same = [
                _bar(groups[other][ANY])
                for other in groups
                if other != name and machines_of(other) == machines_of(name)
            ]
            found.append((r, max([UNTUNED, *same])))
    return found


def binomial_interval(rows: int) -> tuple[int, int]:
    """Returns (least, most) of the number of rows inside their bars, with 90 % probability. Each of the `rows` is
    inside with probability INSIDE (normal law)."""
    middle, wide = rows * INSIDE, _Z90 * math.sqrt(rows * INSIDE * (1 - INSIDE))
    return max(0, math.floor(middle - wide)), min(rows, math.ceil(middle + wide))


def write_errors(validation: Validation, path: Path = ERRORS_FILE) -> None:
    """Raises PstarError for the validation of a part of the rows."""
    if sum(validation.counts.values()) != len(published_rows()):
        raise PstarError("errors are written only after a validation of all rows: leave out --system and --machine")
    write_atomically(path, json.dumps(errors_by_class(validation.results), indent=2) + "\n")


def _judged(results: Iterable[Result]) -> list[Result]:
    return [r for r in results if r.use != "fitted" and not r.inferred and r.metric in WHOLE]


def _class(r: Result) -> str:
    return class_name(r.gpu.split("-")[0], ranks=r.gpus, nodes=r.nodes, kernels=r.kernels)


def _groups(results: Iterable[Result]) -> dict[str, dict[str, list[Result]]]:
    """Returns class -> policy, and class -> "any policy", -> rows."""
    groups: dict[str, dict[str, list[Result]]] = {}
    for r in results:
        for key in (ANY, split_spec(r.policy)[0]):
            groups.setdefault(_class(r), {}).setdefault(key, []).append(r)
    return groups


def _bar(results: Sequence[Result]) -> float:
    return quantile(sorted(abs(r.error) for r in results), INSIDE)
