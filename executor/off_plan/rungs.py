"""The plans that the ladder makes one after another, and a record of each.

[Note: rungs] 0 "margin": the same policy, for the memory that there really is and the measured tide. 1 "states on the
host": no chunk's optimizer states stay on the accelerator. 2 "no prefetch": chunks are fetched only when needed. 3
"static": static_partition, room for the highest tide in every moment. After a refusal under a rung's plan, the same
rung plans again if the refusal tells something new (less memory, a higher tide), otherwise the next. Policies without
these options continue as `tide`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from pstar_sim.arguments import parse_bytes
from pstar_sim.catalog.machine import Machine
from pstar_sim.policy.kit.options import options_of, show, split_spec
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.registry import find_policy, policy_at
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

RUNGS = ("margin", "states on the host", "no prefetch", "static")


@dataclass(frozen=True, slots=True)
class Rung:
    """moment: index and name of the open moment (-1: between two iterations).
    what: the step or operator that requested memory.
    payload_bytes, other_bytes: those of chunks on the accelerator then, and all others.
    done: the reaction, in words.
    """

    iteration: int
    moment: int
    name: str
    what: str
    asked_bytes: int
    payload_bytes: int
    other_bytes: int
    limit_bytes: int | None
    done: str

    def __str__(self) -> str:
        where = "between two iterations" if self.moment < 0 else f"in moment {self.moment} ({self.name})"
        of = "" if self.limit_bytes is None else f" of {format_bytes(self.limit_bytes)}"
        return (
            f"iteration {self.iteration}, {where}: {self.what} asked for {format_bytes(self.asked_bytes)} beside "
            f"{format_bytes(self.payload_bytes)} of chunks and {format_bytes(self.other_bytes)} of other data{of}; "
            f"{self.done}"
        )


def asked_bytes(text: str) -> int:
    """What torch tried to allocate, by its message; 0 where it does not say."""
    found = re.search(r"allocate ([0-9.]+) ?([KMGT]i?B|bytes)", text)
    if found is None:
        return 0
    return parse_bytes(found[1] + found[2].replace("bytes", "B"))


def with_gpu_budget(machine: Machine, budget_bytes: int) -> Machine:
    return replace(
        machine,
        ranks=tuple(
            replace(rank, gpu=replace(rank.gpu, usable_bytes=rank.gpu.context_bytes + max(1, budget_bytes)))
            for rank in machine.ranks
        ),
    )


def spec_of_rung(spec: str, level: int) -> str:
    """Raises UnknownName."""
    if level == 0:
        return spec
    name, text = split_spec(spec)
    options = options_of(find_policy(name))
    turned = dict(part.split("=", 1) for part in text.split(",") if "=" in part) if "pins" in options else {}
    if "pins" not in options:
        name = policy_at(Point())
    turned = {key.strip(): value.strip() for key, value in turned.items()}
    turned["pins"] = show(0)
    if level >= 2:
        turned["prefetch"] = "none"
    if level >= 3:
        name = policy_at(Point(capacity="peak"))
        turned.pop("capacity", None)
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in turned.items())


def tide_of(workload: Workload) -> tuple[int, ...]:
    return tuple(m.peak_bytes for m in workload.moments)
