"""Errors by class of machine, which answers show with predicted times (planner/trust.py)."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pstar_sim.dtypes import MASTER
from pstar_sim.errors import PstarError
from pstar_sim.files import write_atomically
from pstar_sim.planner.trust import ANY, ANY_CLASS, FILE, class_name, enough, generation_of, tells_of
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.validation.results import WHOLE, Result, Validation, errors_of
from pstar_sim.validation.rows import published_rows

ERRORS_FILE = Path(str(FILE))
INSIDE = 0.683
"""Share of rows that one standard deviation holds."""
_Z90 = 1.645


def errors_by_class(results: Iterable[Result]) -> dict[str, dict[str, dict[str, float]]]:
    """Class (and "any class") -> policy (and "any policy") -> median, p90, bar, rows and sources, of whole iterations
    to which nothing is fitted and from which nothing is inferred."""
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
                "sources": _sources(groups[name][key]),
            }
    return found


class Quoted(NamedTuple):
    """A row and its quoted bar.

    of_class: of the row's class, not of all rows.
    """

    row: Result
    bar: float
    of_class: bool


def quoted_bars(results: Iterable[Result]) -> list[Quoted]:
    """Rows of `errors_by_class` with the bar quoted without the row's source: of class and policy, of the class, or of
    all rows (at least that of a class of the same machines)."""
    judged = _judged(results)
    others = {name: _groups(r for r in judged if r.publisher != name) for name in {r.publisher for r in judged}}
    return [_quoted(r, others[r.publisher]) for r in judged if others[r.publisher]]


def _quoted(r: Result, groups: Mapping[str, Mapping[str, list[Result]]]) -> Quoted:
    name = _class(r)
    of_class = groups.get(name, {})
    for rows in (of_class.get(split_spec(r.policy)[0], []), of_class.get(ANY, [])):
        if enough(len(rows), _sources(rows)):
            return Quoted(r, _bar(rows), of_class=True)
    same = [_bar(of[ANY]) for other, of in groups.items() if tells_of(other, name)]
    return Quoted(r, max([_bar(groups[ANY_CLASS][ANY]), *same]), of_class=False)


def inside_by_source(quoted: Iterable[Quoted]) -> float:
    """Share of rows inside bars, every source with the same weight."""
    of: dict[str, list[bool]] = {}
    for row, bar, _ in quoted:
        of.setdefault(row.publisher, []).append(abs(row.error) <= bar)
    return sum(sum(inside) / len(inside) for inside in of.values()) / len(of)


def binomial_interval(rows: int) -> tuple[int, int]:
    """(least, most) rows inside their bars, with 90 % probability, if each is with probability INSIDE (normal law)."""
    middle, wide = rows * INSIDE, _Z90 * math.sqrt(rows * INSIDE * (1 - INSIDE))
    return max(0, math.floor(middle - wide)), min(rows, math.ceil(middle + wide))


def write_errors(validation: Validation, path: Path = ERRORS_FILE) -> None:
    """Raises PstarError for a part of the rows."""
    if sum(validation.counts.values()) != len(published_rows()):
        raise PstarError("errors are written only after a validation of all rows: leave out --system and --machine")
    write_atomically(path, json.dumps(errors_by_class(validation.results), indent=2) + "\n")


def _judged(results: Iterable[Result]) -> list[Result]:
    return [r for r in results if r.use != "fitted" and not r.inferred and r.metric in WHOLE]


def _class(r: Result) -> str:
    return class_name(
        generation_of(r.gpu),
        ranks=r.gpus,
        nodes=r.nodes,
        kernels=r.kernels,
        fp32=r.dtype == MASTER,
        autocast=r.autocast,
        lora=r.lora,
        as_found=r.as_found,
    )


def _groups(results: Iterable[Result]) -> dict[str, dict[str, list[Result]]]:
    groups: dict[str, dict[str, list[Result]]] = {}
    for r in results:
        for name, key in ((_class(r), ANY), (_class(r), split_spec(r.policy)[0]), (ANY_CLASS, ANY)):
            groups.setdefault(name, {}).setdefault(key, []).append(r)
    return groups


def _sources(results: Iterable[Result]) -> int:
    return len({r.publisher for r in results})


def _bar(results: Sequence[Result]) -> float:
    """Not exceeded by INSIDE of the rows, every source with the same weight."""
    rows_of = Counter(r.publisher for r in results)
    ordered = sorted((abs(r.error), 1 / rows_of[r.publisher] / len(rows_of)) for r in results)
    below, share = 0.0, []
    for _, weight in ordered:
        share.append(below + weight / 2)
        below += weight
    i = bisect_left(share, INSIDE)
    if i in (0, len(share)):
        return ordered[min(i, len(share) - 1)][0]
    part = (INSIDE - share[i - 1]) / (share[i] - share[i - 1])
    return ordered[i - 1][0] + part * (ordered[i][0] - ordered[i - 1][0])
