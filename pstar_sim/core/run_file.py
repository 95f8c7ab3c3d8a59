"""The file of a run: the predicted timeline and the measured timeline, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from pstar_sim.core.timeline import Timeline, read_values
from pstar_sim.errors import TraceError
from pstar_sim.files import write_atomically
from pstar_sim.schema.fields import Rule, says
from pstar_sim.schema.parsing import without_head
from pstar_sim.schema.reading import Fault
from pstar_sim.schema.records import read_record

FORMAT = "pstar-sim run"
VERSION = 1
_BOTH = ("predicted", "measured")
_TIMELINE = Meta(extra={"rule": Rule(bool, "an object with the fields of a timeline")})


@dataclass(frozen=True, kw_only=True, eq=False)
class RunTimelines:
    """Both timelines of one plan. Steps and bytes are equal."""

    predicted: Timeline
    measured: Timeline

    def save(self, path: str | Path) -> None:
        """Write as JSON, atomically; `load_run` is the reverse."""
        rows = (f"{json.dumps(name)}: {json.dumps(getattr(self, name).to_dict())}" for name in _BOTH)
        head = f'"format": {json.dumps(FORMAT)},\n"version": {VERSION}'
        write_atomically(Path(path), "{\n" + head + ",\n" + ",\n".join(rows) + "\n}\n")


def load_run(path: str | Path) -> RunTimelines:
    """The timelines in a file of `pstar run --timeline`. Raises TraceError naming the file and the wrong field."""
    return _run(read_values(path), path)


def load_timelines(path: str | Path) -> dict[str, Timeline]:
    """Returns "predicted" and "measured" of a run file; of a timeline file, its timeline under its source.

    Raises TraceError naming the file and the wrong field.
    """
    values = read_values(path)
    if values.get("format") == FORMAT:
        both = _run(values, path)
        return {"predicted": both.predicted, "measured": both.measured}
    try:
        timeline = Timeline.from_dict(values)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    return {"measured" if timeline.source == "measured" else "predicted": timeline}


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """The contents of the file besides its format and version."""

    predicted: Annotated[
        Mapping[str, object], _TIMELINE, says("a timeline, as in a timeline's own file: what was predicted")
    ]
    measured: Annotated[Mapping[str, object], _TIMELINE, says("a timeline of the same steps: what was measured")]


def _run(values: Mapping[str, Any], path: str | Path) -> RunTimelines:
    try:
        body = without_head(values, what="what a run left", format=FORMAT, version=VERSION, error=TraceError)
        both: RunFile = read_record(RunFile, body)
        return RunTimelines(predicted=_timeline(both, "predicted"), measured=_timeline(both, "measured"))
    except Fault as fault:
        raise TraceError(f"{path}: {fault.in_json()}") from None
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _timeline(both: RunFile, name: str) -> Timeline:
    try:
        return Timeline.from_dict(getattr(both, name))
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from None
