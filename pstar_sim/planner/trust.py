"""Trust: the errors of predicted iteration times, by class of machine.

[Note: classes] A class is a kind of GPU (its name without the gigabytes), the number of GPUs ("one GPU", "node" or
"nodes"), the flavour of the kernels (workload/kernels.py; captured modules count as eager), whether the model has
experts, is in fp32, in a dtype that the GPU lacks units for ("forced dtype") or has adapters, and whether the threads
of CPU Adam are as a launcher leaves them ("as found"). Its errors are those of rows of whole iterations to which
nothing is fitted ("tested") and from which no rule is inferred (`inferred` in scope.toml), kept in
catalog/expected_errors.json.

[Note: bars] A bar is one standard deviation: 68 % of the rows of its class and policy had at most this error, every
source (who published the rows) with the same weight, from at least FEWEST_SOURCES sources and FEWEST_ROWS rows. Without
such a class, the bar is that of all rows, or the largest of a class of the same machines, and says so. `pstar validate`
counts the rows inside the bar that the other sources alone would give them.

[Note: error of a change] Two times of one model and one machine share most of their errors, which cancel in their
ratio. What remains is the error of the seconds by which they differ, with the bar of both times. If nothing cancels, as
between different numbers of GPUs, the bar is that of a ratio of independent times, the smaller where one time is less
than half of the other.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pstar_sim.catalog.machine import Machine
from pstar_sim.cost import timed_as
from pstar_sim.dtypes import MASTER
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.units import format_error
from pstar_sim.workload.kernels import FLAVOURS
from pstar_sim.workload.workload import Workload

FILE = files("pstar_sim.catalog") / "expected_errors.json"
ANY = "any policy"
ANY_CLASS = "any class"
_AS_FOUND = ", CPU steps as found"
FEWEST_ROWS = 4  # fewer rows are no basis for an error
FEWEST_SOURCES = 2
NOT_NEAR = "no measurement is near this"
"""Words of the label of a class without rows."""


@dataclass(frozen=True)
class Trust:
    """error: a standard deviation, as a share of the time ([Note: bars])."""

    error: float
    label: str


@dataclass(frozen=True, kw_only=True)
class ExpectedError:
    """Absolute relative errors over `rows` rows to which nothing is fitted.

    bar: not exceeded by 68 % of them ([Note: bars]).
    policy: of the rows, or "any policy" of the class if that has none.
    machine_class: for example "h100 node".
    """

    median: float
    p90: float
    bar: float
    rows: int
    sources: int
    machine_class: str
    policy: str

    @property
    def label(self) -> str:
        """Words such as "± 12 % (18 rows, class h100 node)"."""
        who = "" if self.policy != ANY else ", other policies"
        counted = f"{self.rows} rows of {self.sources} sources"
        return f"{format_error(self.bar)} ({counted}, class {self.machine_class}{who})"


def error_of_change(change: float, *errors: float) -> float:
    """As a share of the time before: [Note: error of a change].

    change: relative to the time before.
    errors: bars of both times.
    """
    return min(abs(change) * math.hypot(*errors), error_of_ratio(1 + change, *errors))


def error_of_ratio(ratio: float, *errors: float) -> float:
    """For times of which no errors cancel: [Note: error of a change].

    errors: bars of both times.
    """
    return ratio * math.hypot(*errors)


def class_of(machine: Machine, workload: Workload) -> str:
    """Of unlike GPUs "a100 + v100 node" ([Note: classes])."""
    return class_name(
        " + ".join(dict.fromkeys(generation_of(r.gpu.name) for r in machine.ranks)),
        ranks=machine.world_size,
        nodes=machine.nodes,
        kernels=workload.kernels,
        experts=any(".experts." in t.name for t in workload.tensors),
        fp32=workload.compute_dtype == MASTER,
        autocast=workload.autocast is not None,
        fp8=workload.products is not None,
        lora=any(t.frozen for t in workload.tensors),
        forced_dtype=any(timed_as(r.gpu, workload.compute_dtype) != workload.compute_dtype for r in machine.ranks),
        as_found=machine.host.as_found,
    )


def generation_of(gpu: str) -> str:
    return re.sub(r"-[0-9]+$", "", gpu)


def class_name(
    generation: str,
    *,
    ranks: int,
    nodes: int,
    kernels: str,
    experts: bool = False,
    fp32: bool = False,
    autocast: bool = False,
    fp8: bool = False,
    lora: bool = False,
    forced_dtype: bool = False,
    as_found: bool = False,
) -> str:
    """Such as "h100 node" (eager kernels) or "h100 node with fused kernels" ([Note: classes])."""
    flavour = [f"{kernels} kernels"] if kernels in FLAVOURS and kernels != "eager" else []
    facts = {"experts": experts, "fp32": fp32, "autocast": autocast, "LoRA": lora, "forced dtype": forced_dtype}
    facts["products in fp8"] = fp8
    rest = " and ".join(flavour + [name for name, holds in facts.items() if holds])
    machines = f"{generation} {'nodes' if nodes > 1 else 'node' if ranks > 1 else 'one GPU'}"
    return f"{machines}{rest and f' with {rest}'}{_AS_FOUND if as_found else ''}"


def tells_of(other: str, name: str) -> bool:
    """Whether one class tells something of another: both have the same machines; one as found tells only of one as
    found."""
    found = name.endswith(_AS_FOUND) or not other.endswith(_AS_FOUND)
    return found and _machines_of(other) == _machines_of(name)


def _machines_of(name: str) -> str:
    return name.removesuffix(_AS_FOUND).split(" with ")[0]


def expected_error(machine: Machine, policy: str, workload: Workload) -> ExpectedError | None:
    """For the job's class and the policy without options; with too few rows or sources, for the class; else None."""
    name = class_of(machine, workload)
    for key in (split_spec(policy)[0], ANY):
        found = _shipped().get(name, {}).get(key)
        if found is not None and enough(found["rows"], found["sources"]):
            return ExpectedError(
                median=found["median"],
                p90=found["p90"],
                bar=found["bar"],
                rows=int(found["rows"]),
                sources=int(found["sources"]),
                machine_class=name,
                policy=key,
            )
    return None


def untuned() -> float:
    """Of all rows."""
    return _shipped()[ANY_CLASS][ANY]["bar"]


def borrowed_bar(name: str) -> float:
    """Of all rows, or a larger one of the same machines."""
    return max([untuned(), *(c[ANY]["bar"] for other, c in _shipped().items() if tells_of(other, name))])


def enough(rows: float, sources: float) -> bool:
    """Whether so many rows and sources are enough for a bar of its own ([Note: bars])."""
    return rows >= FEWEST_ROWS and sources >= FEWEST_SOURCES


def trust(machine: Machine, policy: str, workload: Workload) -> Trust:
    """By validation, for this class of job and this policy ([Note: bars])."""
    found = expected_error(machine, policy, workload)
    if found is not None:
        return Trust(found.bar, found.label)
    name = class_of(machine, workload)
    bar = borrowed_bar(name)
    known = _shipped().get(name, {}).get(ANY, {"rows": 0, "sources": 0})
    runs, sources = (int(known[key]) for key in ("rows", "sources"))
    counted = (
        f"{runs} published runs of {sources} source{'s' * (sources > 1)} count" if runs else "no published run counts"
    )
    needed = f"{FEWEST_ROWS} runs of {FEWEST_SOURCES} sources are needed"
    return Trust(bar, f"{format_error(bar)}, {NOT_NEAR}: not validated for class {name} ({counted}; {needed})")


@cache
def validation_digest() -> str:
    """Answers with the same digest state the same errors."""
    return hashlib.sha256(json.dumps(_shipped(), sort_keys=True).encode()).hexdigest()[:16]


@cache
def _shipped() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    table: dict[str, dict[str, dict[str, float]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return table
