"""Errors by class of machine: how far off predicted iteration times are, for whoever quotes one.

[Note: classes] A class is a generation of GPUs (the first part of the GPU's catalog name: "v100", "a100", "h100") and
how many of them: "one GPU", "node" (several in one node) or "nodes". Its errors are those of the tested rows of whole
iterations, kept in data/errors.json, which `pstar validate --write` makes. A policy that no published run stands for
has the errors of its class; a class without rows has none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from pstar_sim.catalog.machine import Machine
from pstar_sim.errors import PstarError
from pstar_sim.files import write_atomically
from pstar_sim.policy.options import split_spec
from pstar_sim.validation.results import Result, Validation, errors_of

__all__ = ["ERRORS_FILE", "ExpectedError", "class_of", "expected_error", "write_errors"]

ERRORS_FILE = Path(__file__).parent / "data" / "errors.json"
ANY = "any policy"
FEWEST_ROWS = 4  # fewer say nothing


@dataclass(frozen=True, kw_only=True)
class ExpectedError:
    """Of predicted iteration times: median and 90th percentile of the absolute relative error over `rows` tested rows.

    policy: whose rows they are, or "any policy" of the class where that policy has none. machine_class: "h100 node".
    """

    median: float
    p90: float
    rows: int
    machine_class: str
    policy: str

    @property
    def label(self) -> str:
        """± 12 % (18 rows, class h100 node)"""
        who = "" if self.policy != ANY else ", other policies"
        return f"± {self.median:.0%} ({self.rows} rows, class {self.machine_class}{who})".replace("%", " %")


def class_of(machine: Machine) -> str:
    """See [Note: classes]; unequal GPUs are a class of their own ("a100 + v100 node")."""
    generations = " + ".join(dict.fromkeys(r.gpu.name.split("-")[0] for r in machine.ranks))
    return f"{generations} {_kind(len(machine.ranks), machine.nodes)}"


def _kind(ranks: int, nodes: int) -> str:
    if nodes > 1:
        return "nodes"
    return "node" if ranks > 1 else "one GPU"


def expected_error(machine: Machine, policy: str) -> ExpectedError | None:
    """What validation found for the machine's class and the policy (a name or a spec; options do not matter). Where the
    policy has fewer than FEWEST_ROWS rows, those of the whole class; None where that has no more either."""
    name = class_of(machine)
    known = _shipped().get(name)
    if known is None:
        return None
    base = split_spec(policy)[0]
    key = base if base in known and known[base][2] >= FEWEST_ROWS else ANY
    median, p90, rows = known[key]
    if rows < FEWEST_ROWS:
        return None
    return ExpectedError(median=median, p90=p90, rows=int(rows), machine_class=name, policy=key)


def errors_by_class(results: Iterable[Result]) -> dict[str, dict[str, tuple[float, float, int]]]:
    """Class -> policy (and "any policy") -> (median, 90th percentile, rows), of tested rows of whole iterations."""
    groups: dict[str, dict[str, list[Result]]] = {}
    for r in results:
        if r.use != "tested" or r.kind != "time":
            continue
        name = f"{r.gpu.split('-')[0]} {_kind(r.gpus, 1)}"
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
    everything = sum(validation.counts.values())
    from pstar_sim.validation.rows import published_rows

    if everything != len(published_rows()):
        raise PstarError("the errors of a part of the rows are not kept: leave out --system and --machine")
    table = {
        name: {policy: dict(zip(("median", "p90", "rows"), values, strict=True)) for policy, values in policies.items()}
        for name, policies in errors_by_class(validation.results).items()
    }
    write_atomically(path, json.dumps(table, indent=2) + "\n")


@cache
def _shipped() -> Mapping[str, Mapping[str, tuple[float, float, float]]]:
    path = files("pstar_sim.validation") / "data" / "errors.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: {policy: (e["median"], e["p90"], e["rows"]) for policy, e in policies.items()}
        for name, policies in table.items()
    }
