"""Errors by class of machine, which validation keeps and answers show with predicted times (planner/trust.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pstar_sim.errors import PstarError
from pstar_sim.files import write_atomically
from pstar_sim.planner.trust import ANY, FILE, class_name
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.validation.results import WHOLE, Result, Validation, errors_of
from pstar_sim.validation.rows import published_rows

__all__ = ["ERRORS_FILE", "errors_by_class", "write_errors"]

ERRORS_FILE = Path(str(FILE))


def errors_by_class(results: Iterable[Result]) -> dict[str, dict[str, tuple[float, float, int]]]:
    """Class -> policy (and "any policy") -> (median, 90th percentile, rows), of the rows of whole iterations to which
    nothing is fitted: those "tested", and those "to fit"."""
    groups: dict[str, dict[str, list[Result]]] = {}
    for r in results:
        if r.use == "fitted" or r.metric not in WHOLE:
            continue
        name = class_name(r.gpu.split("-")[0], ranks=r.gpus, nodes=r.nodes)
        for key in (ANY, split_spec(r.policy)[0]):
            groups.setdefault(name, {}).setdefault(key, []).append(r)
    found: dict[str, dict[str, tuple[float, float, int]]] = {}
    for name in sorted(groups):
        for key in sorted(groups[name]):
            e = errors_of(groups[name][key])
            assert e is not None
            found.setdefault(name, {})[key] = (round(e.median, 4), round(e.p90, 4), e.rows)
    return found


def write_errors(validation: Validation, path: Path = ERRORS_FILE) -> None:
    """Keep the errors of a whole validation; raises PstarError for one of a part of the rows."""
    if sum(validation.counts.values()) != len(published_rows()):
        raise PstarError("the errors of a part of the rows are not kept: leave out --system and --machine")
    table = {
        name: {policy: dict(zip(("median", "p90", "rows"), values, strict=True)) for policy, values in policies.items()}
        for name, policies in errors_by_class(validation.results).items()
    }
    write_atomically(path, json.dumps(table, indent=2) + "\n")
