"""The file of a plan: JSON, self-contained, read with suspicion.

Embeds workload (by columns), machine, settings, layout and steps (their one-line text form, a line each), so that a
plan can be checked, simulated, explained and run from its file alone, read by people, and compared with diff. A file
that is truncated, foreign, newer or edited into nonsense meets one PlanError that names the file and the field or
line; whether a plan that reads well is *correct* is the checker's business.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.check_fields import check_fields, check_step_fields
from pstar_sim.core.decoding import (
    Wrong,
    as_dataclass,
    brief,
    decode,
    from_columns,
    parse_json,
    to_columns,
)
from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Plan, Resident, Settings
from pstar_sim.core.step import Place, Step, from_text, to_text
from pstar_sim.errors import CatalogError, PlanError, TraceError
from pstar_sim.files import write_atomically
from pstar_sim.workload.workload import Moment, Stash, Tensor, Use, Workload

__all__ = ["FORMAT", "VERSION", "read_plan", "save_plan"]

FORMAT = "pstar-sim plan"
VERSION = 1

_COLUMNS: dict[str, type] = {"tensors": Tensor, "moments": Moment, "uses": Use, "stashes": Stash}
_FIELDS = (
    "format",
    "version",
    "policy",
    "settings",
    "gpu_budget_bytes",
    "host_budget_bytes",
    "predictions",
    "choices",
    "machine",
    "workload",
    "layout",
    "modes",
    "buffers",
    "initial",
    "steps",
)
_LATER = {"nvme_budget_bytes": 0}  # fields that older files of this version do not have -> what that means
_ONLY_IF_ANY = ("activations", "stashes", "dtype_open")  # fields of the workload that are left out where they are empty


def save_plan(plan: Plan, path: Path) -> None:
    """Write atomically: the file is the old one or the new one, never half of it."""
    write_atomically(path, _to_json(plan))


def _to_json(plan: Plan) -> str:
    header: dict[str, object] = {
        "format": FORMAT,
        "version": VERSION,
        "policy": plan.policy,
        "settings": dataclasses.asdict(plan.settings),
        "gpu_budget_bytes": plan.gpu_budget_bytes,
        "host_budget_bytes": plan.host_budget_bytes,
        "nvme_budget_bytes": plan.nvme_budget_bytes,
        "predictions": dict(plan.predictions),
        "choices": dict(plan.choices),
        "machine": dataclasses.asdict(plan.machine),
        "workload": _workload_to_dict(plan.workload),
        "layout": plan.layout.to_dict(),
        "modes": list(plan.modes),
        "buffers": [[name, place.value, size] for name, place, size in plan.buffers],
        "initial": [[r.chunk, r.list, r.place.value] for r in sorted(plan.initial)],
    }
    parts = []
    for name, value in header.items():
        try:
            parts.append(f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}")
        except (TypeError, ValueError) as error:
            raise PlanError(f"plan field {name!r} cannot be written: {error}") from None
    steps = ",\n".join(json.dumps(to_text(step)) for step in plan.steps)
    return "{\n" + ",\n".join(parts) + ',\n"steps": [\n' + steps + "\n]\n}\n"


def _workload_to_dict(w: Workload) -> dict[str, object]:
    values: dict[str, object] = {}
    for f in dataclasses.fields(w):
        value = getattr(w, f.name)
        if f.name in _ONLY_IF_ANY and not value:
            continue
        if f.name in _COLUMNS:
            values[f.name] = to_columns(_COLUMNS[f.name], value)
        else:
            values[f.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
    return values


def read_plan(path: Path) -> Plan:
    """Read and validate; see the module docstring. Raises PlanError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: is not a pstar-sim plan (it is not text)") from None
    try:
        values = parse_json(text)
    except Wrong as error:
        what = "is truncated or not JSON" if text.lstrip().startswith("{") else "is not a pstar-sim plan (not JSON)"
        raise PlanError(f"{path}: {what}: {error}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise PlanError(f"{path}: is not a pstar-sim plan (field 'format' is not {FORMAT!r})")
    version = values.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise PlanError(f"{path}: field 'version' is {version!r}, not a version number")
    if version > VERSION:
        raise PlanError(f"{path}: was written by a newer pstar-sim (plan version {version}; this one reads {VERSION})")
    try:
        plan = _from_values(values, text)
        check_fields(plan)
        check_step_fields(plan)
    except (Wrong, PlanError, TraceError) as error:
        raise PlanError(f"{path}: {error}") from None
    return plan


def _from_values(values: dict[str, Any], text: str) -> Plan:
    for name in _FIELDS:
        if name not in values:
            raise Wrong(f"field {name!r} is missing")
    for name in values:
        if name not in _FIELDS and name not in _LATER:
            raise Wrong(f"field {name!r} is not known")
    return Plan(
        policy=decode(str, values["policy"], "policy"),
        settings=_checked(Settings, values["settings"], "settings"),
        gpu_budget_bytes=decode(int, values["gpu_budget_bytes"], "gpu_budget_bytes"),
        host_budget_bytes=decode(int, values["host_budget_bytes"], "host_budget_bytes"),
        nvme_budget_bytes=decode(
            int, values.get("nvme_budget_bytes", _LATER["nvme_budget_bytes"]), "nvme_budget_bytes"
        ),
        predictions=decode(Mapping[str, float], values["predictions"], "predictions"),
        choices=decode(Mapping[str, object], values["choices"], "choices"),
        machine=_checked(Machine, values["machine"], "machine"),
        workload=_workload(values["workload"]),
        layout=Layout.from_dict(decode(Mapping[str, object], values["layout"], "layout")),
        modes=decode(tuple[str, ...], values["modes"], "modes"),
        buffers=decode(tuple[tuple[str, Place, int], ...], values["buffers"], "buffers"),
        initial=_initial(decode(tuple[tuple[int, str, Place], ...], values["initial"], "initial")),
        steps=_steps(decode(tuple[str, ...], values["steps"], "steps"), text),
    )


def _initial(rows: tuple[tuple[int, str, Place], ...]) -> frozenset[Resident]:
    residents: set[Resident] = set()
    for i, (chunk, name, place) in enumerate(rows):
        if (resident := Resident(chunk, name, place)) in residents:
            raise Wrong(f"field 'initial[{i}]' is {name} of chunk {chunk} on the {place.value}, which is there already")
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
            raise Wrong(f"{where}: {error}") from None
    return tuple(steps)


def _checked(cls: type, values: object, where: str) -> Any:
    """A dataclass that checks its own values."""
    try:
        return decode(cls, values, where)
    except (CatalogError, PlanError) as error:
        raise Wrong(f"field {where!r}: {error}") from None


def _workload(values: object) -> Workload:
    if not isinstance(values, dict):
        raise Wrong(f"field 'workload' is {brief(values)}; it must be an object")
    given = dict(values)
    for name, cls in _COLUMNS.items():
        if name in _ONLY_IF_ANY and name not in given:
            continue
        given[name] = from_columns(cls, given.get(name), f"workload.{name}")
    return typing.cast(Workload, as_dataclass(Workload, given, "workload", ready=frozenset(_COLUMNS)))
