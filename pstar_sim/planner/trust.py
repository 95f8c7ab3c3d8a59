"""Trust: how far off predicted iteration times were, by class of machine.

[Note: classes] A class is a generation of GPUs (the first part of the GPU's catalog name: "v100", "a100", "h100") and
how many of them: "one GPU", "node" (several in one node) or "nodes"; machines that time products by shape are classes
of their own. Its errors are those of the rows of whole iterations to which nothing is fitted ("tested", "to fit"), kept
in catalog/expected_errors.json, which `pstar validate --write` makes. A policy that no published run stands for has the
errors of its class; a class without rows has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pstar_sim.catalog.machine import Machine
from pstar_sim.policy.kit.options import split_spec

__all__ = [
    "ANY", "FILE", "ExpectedError", "Trust", "class_name", "class_of", "expected_error", "trust",
]  # fmt: skip

FILE = files("pstar_sim.catalog") / "expected_errors.json"
ANY = "any policy"
FEWEST_ROWS = 4  # fewer say nothing


@dataclass(frozen=True)
class Trust:
    """How far predicted times are to be trusted.

    error: median relative error of predicted times, None where nothing is known.
    label: what it rests on.
    """

    error: float | None
    label: str


@dataclass(frozen=True, kw_only=True)
class ExpectedError:
    """Median and 90th percentile of the absolute relative error of predicted iteration times, over `rows` rows to
    which nothing is fitted.

    policy: policy whose rows they are, or "any policy" of the class if that policy has no rows.
    machine_class: for example "h100 node".
    """

    median: float
    p90: float
    rows: int
    machine_class: str
    policy: str

    @property
    def label(self) -> str:
        """For example "± 12 % (18 rows, class h100 node)"."""
        who = "" if self.policy != ANY else ", other policies"
        return f"± {self.median:.0%} ({self.rows} rows, class {self.machine_class}{who})".replace("%", " %")


def class_of(machine: Machine) -> str:
    """Class of a machine: [Note: classes]. Unequal GPUs are a class of their own ("a100 + v100 node")."""
    generations = " + ".join(dict.fromkeys(r.gpu.name.split("-")[0] for r in machine.ranks))
    name = class_name(generations, ranks=len(machine.ranks), nodes=machine.nodes)
    return name if machine.gpu.products is None else f"{name} with products by shape"


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
    key = base if base in known and known[base][2] >= FEWEST_ROWS else ANY
    median, p90, rows = known[key]
    if rows < FEWEST_ROWS:
        return None
    return ExpectedError(median=median, p90=p90, rows=int(rows), machine_class=name, policy=key)


def trust(machine: Machine, policy: str) -> Trust:
    """What validation found for this class of machine and this policy, or for the class with other policies."""
    found = expected_error(machine, policy)
    if found is not None:
        return Trust(found.median, found.label)
    name = class_of(machine)
    known = int(_shipped().get(name, {}).get(ANY, (0.0, 0.0, 0))[2])
    return Trust(
        None,
        f"not validated for class {name} ({known or 'no'} published runs of it are known, {FEWEST_ROWS} are needed)",
    )


@cache
def _shipped() -> Mapping[str, Mapping[str, tuple[float, float, float]]]:
    table = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: {policy: (e["median"], e["p90"], e["rows"]) for policy, e in policies.items()}
        for name, policies in table.items()
    }
