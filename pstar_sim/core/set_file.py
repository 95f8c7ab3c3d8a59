"""The file of a pipeline's plans: the head of a plan file, the parallelism, the meetings, and a plan per stage. A plan
file is a set of one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pstar_sim.core.plan import Plan
from pstar_sim.core.plan_file import (
    HEAD,
    PlanFile,
    naming,
    object_text,
    plan_in,
    plan_of,
    read_body,
    text_of,
    with_whole_jobs,
)
from pstar_sim.core.plan_set import Meeting, PlanSet, Share
from pstar_sim.files import write_atomically
from pstar_sim.schema.fields import Natural, says
from pstar_sim.schema.records import read_record
from pstar_sim.workload.parallelism import Parallelism


@dataclass(frozen=True, kw_only=True)
class SetFile:
    """The contents of the file besides its format and version."""

    parallelism: Annotated[str, says("how the model is spread over GPUs, such as pp=2")]
    meetings: Annotated[
        tuple[tuple[tuple[int, int], ...], ...], says("[stage, id of its step] of the steps that begin together")
    ]
    stages: Annotated[tuple[PlanFile, ...], says("the plan of each stage, or kind of GPU")]
    shares: Annotated[
        tuple[tuple[Natural, Natural, Natural], ...],
        says("[ranks that split layers, parts of a layer, of the host (0: as many)] of kinds of GPUs"),
    ] = ()


def save_set(plans: PlanSet, path: Path) -> None:
    header = {
        **HEAD,
        "parallelism": str(plans.parallelism),
        "meetings": [[list(member) for member in meeting.steps] for meeting in plans.meetings],
        **({"shares": [list(share) for share in plans.shares]} if plans.shares else {}),
    }
    stages = ",\n".join(map(text_of, plans.plans))
    write_atomically(path, object_text(header, f'"stages": [\n{stages}\n]'))


def read_plans(path: Path) -> Plan | PlanSet:
    """The plan of a file, or those of a pipeline's stages. Raises PlanError as `read_plan` does."""
    body, text = read_body(path)
    if "stages" not in body:
        return plan_in(path, body, text)
    with naming(path):
        found: SetFile = read_record(SetFile, _with_whole_stages(body))
        return PlanSet(
            parallelism=Parallelism.parse(found.parallelism),
            plans=tuple(plan_of(each, text) for each in found.stages),
            meetings=tuple(Meeting(steps) for steps in found.meetings),
            shares=tuple(Share(*share) for share in found.shares),
        )


def _with_whole_stages(body: dict[str, Any]) -> dict[str, Any]:
    stages = body["stages"]
    if not isinstance(stages, list):
        return body
    return {**body, "stages": [with_whole_jobs(each) if isinstance(each, dict) else each for each in stages]}
