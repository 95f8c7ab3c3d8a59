"""Trust: how far off predicted iteration times were, by class of machine.

[Note: classes] A class is a kind of GPU (the first part of its catalog name: "v100", "a100", "h100") and the number of
GPUs: "one GPU", "node" (several in one node) or "nodes". Its errors are those of the rows of whole
iterations to which nothing is fitted ("tested"), kept in catalog/expected_errors.json, which `pstar validate --write`
makes. A policy that no published run stands for has the errors of its class.

[Note: bars] The bar of an answer is one standard deviation: 68 % of the rows of its class and policy were no farther
off. A class without enough rows has the bar of ANY_CLASS: that of all rows, times the factor by which the errors of a
class exceed those of all other classes. The answer then says that no measurement is near.

[Note: error of a change] Two times of one model and one machine share most of their errors, which fall out of their
ratio. What is left is the error of the seconds by which the two times differ. These seconds are predicted as the others
are, so their bar is that of both times. The bar does not hold where the model is wrong about what binds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pstar_sim.catalog.machine import Machine
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.units import format_error

__all__ = [
    "ANY", "ANY_CLASS", "FEWEST_ROWS", "FILE", "NOT_NEAR", "ExpectedError", "Trust", "class_name", "class_of",
    "error_of_change", "expected_error", "trust",
]  # fmt: skip

FILE = files("pstar_sim.catalog") / "expected_errors.json"
ANY = "any policy"
ANY_CLASS = "any class"
FEWEST_ROWS = 4  # fewer say nothing
NOT_NEAR = "no measurement is near this"
"""Words of a label whose class has no rows."""


@dataclass(frozen=True)
class Trust:
    """How far predicted times are to be trusted.

    error: one standard deviation of predicted times, as a share of them ([Note: bars]).
    label: what it rests on.
    """

    error: float
    label: str


@dataclass(frozen=True, kw_only=True)
class ExpectedError:
    """Absolute relative errors of predicted iteration times, over `rows` rows to which nothing is fitted.

    bar: what 68 % of them do not exceed ([Note: bars]).
    policy: policy whose rows they are, or "any policy" of the class if that policy has no rows.
    machine_class: for example "h100 node".
    """

    median: float
    p90: float
    bar: float
    rows: int
    machine_class: str
    policy: str

    @property
    def label(self) -> str:
        """For example "± 12 % (18 rows, class h100 node)"."""
        who = "" if self.policy != ANY else ", other policies"
        return f"{format_error(self.bar)} ({self.rows} rows, class {self.machine_class}{who})"


def error_of_change(change: float, *errors: float) -> float:
    """Returns the bar of a change of time, as a share of the time before: [Note: error of a change].

    change: (time after - time before) / time before.
    errors: bars of both times.
    """
    return abs(change) * math.hypot(*errors)


def class_of(machine: Machine) -> str:
    """Class of a machine: [Note: classes]. Unequal GPUs are a class of their own ("a100 + v100 node")."""
    generations = " + ".join(dict.fromkeys(r.gpu.name.split("-")[0] for r in machine.ranks))
    return class_name(generations, ranks=len(machine.ranks), nodes=machine.nodes)


def class_name(generation: str, *, ranks: int, nodes: int) -> str:
    return f"{generation} {'nodes' if nodes > 1 else 'node' if ranks > 1 else 'one GPU'}"


def expected_error(machine: Machine, policy: str) -> ExpectedError | None:
    """Errors that validation found for the machine's class and the policy (a name or a spec; options do not matter). If
    the policy has fewer than FEWEST_ROWS rows, the errors of the whole class; None if the class has too few rows,
    too."""
    name = class_of(machine)
    known = _shipped().get(name)
    if known is None:
        return None
    base = split_spec(policy)[0]
    key = base if base in known and known[base]["rows"] >= FEWEST_ROWS else ANY
    found = known[key]
    if found["rows"] < FEWEST_ROWS:
        return None
    return ExpectedError(
        median=found["median"],
        p90=found["p90"],
        bar=found["bar"],
        rows=int(found["rows"]),
        machine_class=name,
        policy=key,
    )


def trust(machine: Machine, policy: str) -> Trust:
    """What validation found for this class of machine and this policy, or for the class with other policies; the bar of
    any class where no measurement is near."""
    found = expected_error(machine, policy)
    if found is not None:
        return Trust(found.bar, found.label)
    name, bar = class_of(machine), _shipped()[ANY_CLASS][ANY]["bar"]
    known = int(_shipped().get(name, {}).get(ANY, {"rows": 0})["rows"])
    return Trust(
        bar,
        f"{format_error(bar)}, {NOT_NEAR}: not validated for class {name} ({known or 'no'} published runs of "
        f"it are known, {FEWEST_ROWS} are needed)",
    )


@cache
def _shipped() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """Class -> policy -> figures."""
    table: dict[str, dict[str, dict[str, float]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return table
