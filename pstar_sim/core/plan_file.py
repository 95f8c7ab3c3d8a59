"""A plan's file: self-contained JSON. One that is truncated, foreign, newer or inconsistent raises one PlanError naming
the file and the field or line.

Whether a readable plan is *correct* is for the checker.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.check_fields import check_fields, check_step_fields
from pstar_sim.core.layout_file import LayoutForm, layout_of
from pstar_sim.core.plan import Plan, Resident, Settings
from pstar_sim.core.step import Place, Step, from_text, to_text
from pstar_sim.errors import PlanError, PstarError
from pstar_sim.files import write_atomically
from pstar_sim.schema.fields import says
from pstar_sim.schema.parsing import parse_json, without_head
from pstar_sim.schema.reading import Fault
from pstar_sim.schema.records import columns, read_record, to_columns
from pstar_sim.workload.orders import Order
from pstar_sim.workload.workload import Border, Moment, Stash, Tensor, Use, Workload

FORMAT = "pstar-sim plan"
VERSION = 2

_COLUMNS: dict[str, type] = {"tensors": Tensor, "moments": Moment, "uses": Use, "stashes": Stash, "borders": Border}
_USUAL = {
    "activations": (), "stashes": (), "borders": (), "dtype_open": False, "kernels": "", "order": Order.DEPTH_FIRST,
}  # fmt: skip
"""Values of fields of the workload that the first files did not have. A field with this value is left out."""
_FIRST = {
    "measured", "duplex", "launch_s", "matmul_tables", "operator_bytes_per_s", "pageable_bytes_per_s", "h2d_table",
    "d2h_table", "adam_table", "dram_measured", "root", "notes", "price_usd_per_hour", "extra", "peer", "network",
    "root_bytes_per_s", "nvme", "slowdowns",
}  # fmt: skip
"""Fields of a machine that are written also if they are empty: those of the first files."""


@dataclass(frozen=True, kw_only=True)
class RanksFile:
    """Ranks with one job, of ranks whose jobs differ."""

    ranks: Annotated[tuple[int, ...], says("numbers of these ranks")]
    workload: Annotated[
        Workload, columns(**_COLUMNS), says("their job: the fields that differ from those of the plan's workload")
    ]


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """The contents of the file besides its format and version."""

    policy: Annotated[str, says("name of the policy, with the options that are not at their defaults")]
    settings: Annotated[Settings, says("what the caller asked of the policy")]
    gpu_budget_bytes: Annotated[int, says("what one rank may take of its GPU")]
    host_budget_bytes: Annotated[int, says("what one rank may take of the host")]
    nvme_budget_bytes: Annotated[int, says("what one rank may take of the disks; 0: the plan does not use them")] = 0
    predictions: Annotated[Mapping[str, float], says("figures by name, such as iteration_s")]
    choices: Annotated[Mapping[str, object], says("what the policy decided and why")]
    machine: Annotated[Machine, says("the machine the plan was made for")]
    workload: Annotated[Workload, columns(**_COLUMNS), says("the iteration the plan was made for, tables by column")]
    ranked: Annotated[tuple[RanksFile, ...], says("the jobs of ranks that differ; empty: each rank has the workload")]
    layout: Annotated[LayoutForm, says("which parameter lives where in which chunk")]
    modes: Annotated[tuple[str, ...], says("of each chunk: cpu, pin, stream or frozen")]
    buffers: Annotated[
        tuple[tuple[str, Place, int], ...], says("[name, place, bytes] that the policy holds throughout")
    ]
    initial: Annotated[
        tuple[tuple[int, str, Place], ...], says("[chunk, list, place] of what is where between two iterations")
    ]
    steps: Annotated[tuple[str, ...], says("the steps, one line of text each, in the order in which they run")]


def save_plan(plan: Plan, path: Path) -> None:
    write_atomically(path, file_text(plan))


def file_text(plan: Plan) -> str:
    return object_text({**HEAD, **_header(plan)}, _steps_text(plan))


def text_of(plan: Plan) -> str:
    """A plan in the file of several."""
    return object_text(_header(plan), _steps_text(plan)).rstrip()


HEAD: dict[str, object] = {"format": FORMAT, "version": VERSION}


def _header(plan: Plan) -> dict[str, object]:
    return {
        "policy": plan.policy,
        "settings": _settings_to_dict(plan.settings),
        "gpu_budget_bytes": plan.gpu_budget_bytes,
        "host_budget_bytes": plan.host_budget_bytes,
        "nvme_budget_bytes": plan.nvme_budget_bytes,
        "predictions": dict(plan.predictions),
        "choices": dict(plan.choices),
        "machine": dataclasses.asdict(plan.machine, dict_factory=_written),
        "workload": _workload_to_dict(plan.workload),
        "ranked": _ranked_to_list(plan),
        "layout": plan.layout.to_dict(),
        "modes": list(plan.modes),
        "buffers": [[name, place.value, size] for name, place, size in plan.buffers],
        "initial": [[r.chunk, r.list, r.place.value] for r in sorted(plan.initial)],
    }


def _steps_text(plan: Plan) -> str:
    steps = ",\n".join(json.dumps(to_text(step)) for step in plan.steps)
    return f'"steps": [\n{steps}\n]'


def object_text(header: Mapping[str, object], last: str) -> str:
    parts = []
    for name, value in header.items():
        try:
            parts.append(f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}")
        except (TypeError, ValueError) as error:
            raise PlanError(f"plan field {name!r} cannot be written: {error}") from None
    return "{\n" + ",\n".join((*parts, last)) + "\n}\n"


def _written(fields: list[tuple[str, Any]]) -> dict[str, object]:
    """Left out if empty: files from before these fields stay the same."""
    usual = {"known": "datasheet"} if any(name == "measured" for name, _ in fields) else {}
    empty = (None, False, ())
    return {n: v for n, v in fields if n in _FIRST or not (any(v is e for e in empty) or v == usual.get(n))}


def _settings_to_dict(settings: Settings) -> dict[str, object]:
    values = dataclasses.asdict(settings)
    for name in ("loop", "sums", "effort"):
        if values[name] == getattr(Settings, name):
            del values[name]
    return values


def _workload_to_dict(w: Workload) -> dict[str, object]:
    names = [f.name for f in dataclasses.fields(w)]
    return {name: _plain(w, name) for name in names if name not in _USUAL or getattr(w, name) != _USUAL[name]}


def _plain(w: Workload, name: str) -> object:
    value = getattr(w, name)
    if name in _COLUMNS:
        return to_columns(_COLUMNS[name], value)
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]


def _ranked_to_list(plan: Plan) -> list[dict[str, object]]:
    if plan.ranked is None:
        return []
    ranks_of: dict[int, list[int]] = {}
    for r, job in enumerate(plan.ranked):
        ranks_of.setdefault(id(job), []).append(r)
    rows: list[dict[str, object]] = []
    for ranks in ranks_of.values():
        job, names = plan.ranked[ranks[0]], [f.name for f in dataclasses.fields(Workload)]
        own = {name: _plain(job, name) for name in names if getattr(job, name) != getattr(plan.workload, name)}
        rows.append({"ranks": ranks, "workload": own})
    return rows


def with_whole_jobs(body: dict[str, Any]) -> dict[str, Any]:
    workload, rows = body.get("workload"), body.get("ranked")
    if not isinstance(workload, dict) or not isinstance(rows, list):
        return body
    whole = [
        {**row, "workload": workload | row["workload"]}
        if isinstance(row, dict) and isinstance(row.get("workload"), dict)
        else row
        for row in rows
    ]
    return {**body, "ranked": whole}


def read_plan(path: Path) -> Plan:
    """Raises PlanError. The file of a pipeline is refused."""
    body, text = read_body(path)
    stages = body.get("stages")
    if isinstance(stages, list):
        raise PlanError(
            f"{path}: has the plans of {len(stages)} stages ({body.get('parallelism')}); `pstar check` and `pstar plot "
            "stages` take it, and stages are planned, not yet run"
        )
    return plan_in(path, body, text)


def read_body(path: Path) -> tuple[dict[str, Any], str]:
    """The values behind a file's head, and its text. Raises PlanError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: is not a pstar-sim plan (it is not text)") from None
    try:
        values = parse_json(text)
    except Fault as fault:
        what = "is truncated or not JSON" if text.lstrip().startswith("{") else "is not a pstar-sim plan (not JSON)"
        raise PlanError(f"{path}: {what}: {fault.in_json()}") from None
    with naming(path):
        return without_head(values, what="a pstar-sim plan", format=FORMAT, version=VERSION, error=PlanError), text


def plan_in(path: Path, body: dict[str, Any], text: str) -> Plan:
    """Raises PlanError."""
    with naming(path):
        return plan_of(read_record(PlanFile, with_whole_jobs(body)), text)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors name the file."""
    try:
        yield
    except Fault as fault:
        raise PlanError(f"{path}: {fault.in_json()}") from None
    except PstarError as error:
        raise PlanError(f"{path}: {error}") from None


def plan_of(found: PlanFile, text: str) -> Plan:
    """Raises PlanError for fields that do not go together."""
    plan = _plan(found, text)
    check_fields(plan)
    check_step_fields(plan)
    return plan


def _plan(found: PlanFile, text: str) -> Plan:
    return Plan(
        policy=found.policy,
        settings=found.settings,
        gpu_budget_bytes=found.gpu_budget_bytes,
        host_budget_bytes=found.host_budget_bytes,
        nvme_budget_bytes=found.nvme_budget_bytes,
        predictions=found.predictions,
        choices=found.choices,
        machine=found.machine,
        workload=found.workload,
        layout=layout_of(found.layout, found.workload),
        modes=found.modes,
        buffers=found.buffers,
        initial=_initial(found.initial),
        steps=_steps(found.steps, text),
        ranked=_ranked(found),
    )


def _ranked(found: PlanFile) -> tuple[Workload, ...] | None:
    if not found.ranked:
        return None
    jobs = {r: row.workload for row in found.ranked for r in row.ranks}
    named, ranks = sorted(r for row in found.ranked for r in row.ranks), range(found.machine.world_size)
    if named != list(ranks):
        raise PlanError(f"field 'ranked' has jobs for ranks {named}; each of the ranks 0 to {ranks[-1]} has one")
    return tuple(jobs[r] for r in ranks)


def _initial(rows: tuple[tuple[int, str, Place], ...]) -> frozenset[Resident]:
    residents: set[Resident] = set()
    for i, (chunk, name, place) in enumerate(rows):
        if (resident := Resident(chunk, name, place)) in residents:
            raise PlanError(f"field 'initial[{i}]' is {name} of chunk {chunk} on the {place.value} a second time")
        residents.add(resident)
    return frozenset(residents)


def _steps(lines: tuple[str, ...], text: str) -> tuple[Step, ...]:
    steps: list[Step] = []
    for index, line in enumerate(lines):
        try:
            steps.append(from_text(line))
        except PlanError as error:
            number = next((n for n, row in enumerate(text.splitlines(), 1) if json.dumps(line) in row), None)
            where = f"steps[{index}]" if number is None else f"line {number} (steps[{index}])"
            raise PlanError(f"{where}: {error}") from None
    return tuple(steps)
