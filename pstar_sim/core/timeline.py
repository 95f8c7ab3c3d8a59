"""Timeline: what happened (or is predicted to happen), one schema for simulator and executor, and its file.

Knows spans and bytes; draws nothing. Its picture and its HTML live in `report`, looked up by name when they are asked for,
so that nothing here depends on matplotlib.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pstar_sim.core.step import Kind, Queue
from pstar_sim.errors import TraceError

if TYPE_CHECKING:
    import pandas

__all__ = ["ByteSample", "Span", "Timeline", "load_timeline"]

FORMAT = "pstar-sim timeline"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Span:
    """One step of one iteration. ready_s: when its queue came to it; waited [ready_s, start_s) for `cause`
    ("" if it did not wait; else the queue name of the step it waited for last: "h2d", "d2h", "adam", "compute", "barrier")."""

    step: int
    iteration: int
    queue: Queue
    kind: Kind
    chunk: int | None
    moment: int | None
    bytes: int
    ready_s: float
    start_s: float
    end_s: float
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ByteSample:
    """From time_s on (until the next sample of the same place and category), `place` holds `bytes` of `category`.
    Categories: "non-model", "param", "grad", "states", "buffer"."""

    time_s: float
    place: str
    category: str
    bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """source: "simulated" or "measured". spans cover `iterations` iterations; the last is the steady one, whose period is
    iteration_s. samples cover the steady iteration, times relative to its start. peak_bytes: per place, over the steady iteration.
    moved_bytes: per direction ("h2d", "d2h"), one steady iteration. stall_s: cause -> seconds the compute queue waited in it.
    For pictures, optional: label (the policy), phases (of each moment), budget_bytes (per place, what the plan may take)."""

    source: str
    iterations: int
    iteration_s: float
    spans: tuple[Span, ...]
    samples: tuple[ByteSample, ...]
    peak_bytes: dict[str, int] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    stall_s: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    label: str = ""
    phases: tuple[str, ...] = ()
    budget_bytes: dict[str, int] = field(default_factory=dict)

    def to_frame(self) -> pandas.DataFrame:
        """The spans, one row each, in the order of `spans`; columns are the fields of Span."""
        import pandas

        names = [f.name for f in fields(Span)]
        frame = pandas.DataFrame({name: [getattr(span, name) for span in self.spans] for name in names})
        return frame.astype({"queue": "str", "kind": "str", "chunk": "Int64", "moment": "Int64"})

    def samples_frame(self) -> pandas.DataFrame:
        """The byte samples, one row each: time_s (from the start of the steady iteration), place, category, bytes."""
        import pandas

        names = [f.name for f in fields(ByteSample)]
        return pandas.DataFrame({name: [getattr(sample, name) for sample in self.samples] for name in names})

    def plot_tide(self, ax: Any = None, x: str = "time", **more: Any) -> Any:
        """Draw GPU memory over the steady iteration on `ax` (matplotlib axes; None makes a figure) and return the axes.

        x: "time" or "moment". See `pstar_sim.report.tide.plot_tide`.
        """
        return importlib.import_module("pstar_sim.report.tide").plot_tide(self, ax=ax, x=x, **more)

    def _repr_html_(self) -> str:
        html: str = importlib.import_module("pstar_sim.report.html").timeline_html(self)
        return html

    def save(self, path: str | Path) -> None:
        """Write the timeline as JSON; `load_timeline` is the exact reverse."""
        values: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in _ROWS:
                names = [column.name for column in fields(_ROWS[f.name])]
                value = {name: [getattr(row, name) for row in value] for name in names}
            values[f.name] = value
        Path(path).write_text(json.dumps(values, allow_nan=False) + "\n", encoding="utf-8")


_ROWS: dict[str, type] = {"spans": Span, "samples": ByteSample}


def load_timeline(path: str | Path) -> Timeline:
    """Read what `Timeline.save` wrote. Raises TraceError naming the file and the field."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise TraceError(f"{path}: is truncated or no timeline file: {error}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise TraceError(f"{path}: field 'format' is not {FORMAT!r}; this is no timeline file")
    version = values.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise TraceError(f"{path}: timeline version {version!r}; this pstar-sim reads up to {VERSION}")
    given: dict[str, Any] = {}
    for f in fields(Timeline):
        if f.name not in values:
            raise TraceError(f"{path}: field {f.name!r} is missing")
        try:
            given[f.name] = _read_field(f.name, values[f.name])
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise TraceError(f"{path}: field {f.name!r} is not what a timeline holds: {error}") from None
    return Timeline(**given)


def _read_field(name: str, value: Any) -> Any:
    if name == "iterations":
        return int(value)
    if name == "iteration_s":
        return float(value)
    if name in ("source", "label"):
        return str(value)
    if name == "phases":
        return tuple(map(str, value))
    if name in ("peak_bytes", "moved_bytes", "budget_bytes"):
        return {str(k): int(v) for k, v in value.items()}
    if name in ("stall_s", "busy_s"):
        return {str(k): float(v) for k, v in value.items()}
    row = _ROWS[name]
    columns = [value[f.name] for f in fields(row)]
    if len({len(c) for c in columns}) > 1:
        raise ValueError("its columns differ in length")
    if row is Span:
        at = [f.name for f in fields(Span)]
        columns[at.index("queue")] = [Queue(q) for q in columns[at.index("queue")]]
        columns[at.index("kind")] = [Kind(k) for k in columns[at.index("kind")]]
    return tuple(row(*cells) for cells in zip(*columns))
