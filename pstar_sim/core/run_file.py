"""What a run leaves: the timeline that was predicted and the one that was measured, side by side in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pstar_sim.core.timeline import Timeline, read_values
from pstar_sim.errors import TraceError
from pstar_sim.files import write_atomically

__all__ = ["RunTimelines", "load_run", "load_timelines"]

FORMAT = "pstar-sim run"
VERSION = 1
_BOTH = ("predicted", "measured")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunTimelines:
    """Both of one plan, in the same schema: steps and bytes are equal, seconds are what is compared."""

    predicted: Timeline
    measured: Timeline

    def save(self, path: str | Path) -> None:
        """Write as JSON, atomically; `load_run` is the reverse."""
        rows = (f"{json.dumps(name)}: {json.dumps(getattr(self, name).to_dict())}" for name in _BOTH)
        head = f'"format": {json.dumps(FORMAT)},\n"version": {VERSION}'
        write_atomically(Path(path), "{\n" + head + ",\n" + ",\n".join(rows) + "\n}\n")


def load_run(path: str | Path) -> RunTimelines:
    """Read what `pstar run --timeline` wrote. Raises TraceError naming the file and the field that is wrong."""
    return _run(read_values(path), path)


def load_timelines(path: str | Path) -> dict[str, Timeline]:
    """The timelines of a file: "predicted" and "measured" of a run's, the one of a timeline's own by its source.

    Raises TraceError naming the file and the field that is wrong.
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


def _run(values: Mapping[str, Any], path: str | Path) -> RunTimelines:
    if values.get("format") != FORMAT:
        raise TraceError(f"{path}: is not what a run left (field 'format' is not {FORMAT!r})")
    version = values.get("version")
    if not isinstance(version, int) or version < 1:
        raise TraceError(f"{path}: field 'version' is {version!r}, not a version number")
    if version > VERSION:
        raise TraceError(f"{path}: was written by a newer pstar-sim (version {version}; this one reads {VERSION})")
    odd = sorted(set(values) - {"format", "version", *_BOTH})
    if odd:
        raise TraceError(f"{path}: field {odd[0]!r} is not known")
    found: dict[str, Timeline] = {}
    for name in _BOTH:
        if not isinstance(values.get(name), dict):
            raise TraceError(f"{path}: field {name!r} is missing or not a timeline")
        try:
            found[name] = Timeline.from_dict(values[name])
        except TraceError as error:
            raise TraceError(f"{path}: {name}: {error}") from None
    return RunTimelines(**found)
