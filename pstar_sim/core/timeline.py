"""Timeline: spans of steps on queues, and bytes per place and category, measured or predicted.

Imports neither pandas nor matplotlib: frames and pictures are made on demand.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from pstar_sim.arguments import file_path
from pstar_sim.core.step import Kind, Queue
from pstar_sim.errors import TraceError
from pstar_sim.files import write_atomically
from pstar_sim.renderers import render, render_html
from pstar_sim.schema.parsing import parse_json, without_head
from pstar_sim.schema.reading import Fault
from pstar_sim.schema.records import columns, read_record, to_columns

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

FORMAT = "pstar-sim timeline"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Span:
    """One step of one iteration.

    step: its id.
    iteration: its number.
    queue, kind: of the step.
    chunk, moment: None without one.
    bytes: that the step moves.
    ready_s: when the queue came to the step, which then waited until start_s.
    start_s, end_s: of the step.
    cause: the last of waiting: the queue of a step ("h2d", "d2h", "adam", "compute") or "barrier"; "" for none.
    """

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
    """Bytes of one category in one place, until the next of both.

    time_s: from which the bytes are there.
    place, bytes: where, how many.
    category: "non-model", "param", "grad", "states" or "buffer".
    """

    time_s: float
    place: str
    category: str
    bytes: int


_COLUMNS: dict[str, type] = {"spans": Span, "samples": ByteSample}

_Row = TypeVar("_Row")


class RowsByColumn(Generic[_Row]):
    """Kept by column, each form made at first use."""

    def __init__(
        self,
        cls: type[_Row],
        columns: Callable[[], Mapping[str, list[Any]]],
        rows: tuple[_Row, ...] | None = None,
    ) -> None:
        self._cls = cls
        self._make: Callable[[], Mapping[str, list[Any]]] | None = columns
        self._columns: Mapping[str, list[Any]] = {}
        self._rows = rows

    def columns(self) -> Mapping[str, list[Any]]:
        """Field -> its values."""
        if self._make is not None:
            self._columns, self._make = self._make(), None
        return self._columns

    def rows(self) -> tuple[_Row, ...]:
        if self._rows is None:
            columns = self.columns()
            self._rows = tuple(map(self._cls, *(columns[f.name] for f in dataclasses.fields(self._cls))))  # type: ignore[arg-type]
        return self._rows


class _RowsField(Generic[_Row]):
    """Set as rows or as `RowsByColumn`, read as a tuple of rows."""

    def __init__(self, cls: type[_Row]) -> None:
        self._cls = cls

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __set__(self, holder: object, rows: Iterable[_Row] | RowsByColumn[_Row]) -> None:
        if not isinstance(rows, RowsByColumn):
            table = tuple(rows)
            rows = RowsByColumn(self._cls, partial(to_columns, self._cls, table), table)
        holder.__dict__[self._name] = rows

    def __get__(self, holder: object | None, owner: type) -> tuple[_Row, ...]:
        if holder is None:  # a field without a default
            raise AttributeError(self._name)
        kept: RowsByColumn[_Row] = holder.__dict__[self._name]
        return kept.rows()


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """The times of each step of a plan, and the places of its bytes.

    source: "simulated" or "measured".
    iterations: how many `spans` cover; the last is the steady one.
    iteration_s: period of the steady iteration.
    spans: one per step and iteration.
    samples: of the steady iteration, from its start.
    peak_bytes: by place, of the steady iteration.
    moved_bytes: by direction ("h2d", "d2h").
    stall_s: cause -> seconds for which the compute queue waited.
    busy_s: by queue.
    label: for pictures: the policy.
    phases: for pictures, of each moment.
    budget_bytes: for pictures: what the plan may take, by place.
    """

    source: str
    iterations: int
    iteration_s: float
    spans: _RowsField[Span] = _RowsField(Span)
    samples: _RowsField[ByteSample] = _RowsField(ByteSample)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    stall_s: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    label: str = ""
    phases: tuple[str, ...] = ()
    budget_bytes: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"<Timeline {self.label or 'of a plan'}, {self.source}: {self.iteration_s:.6g} s, "
            f"{len(self.columns('spans')['step'])} spans>"
        )

    def labelled(self, label: str) -> Timeline:
        """Makes no row."""
        twin = copy.copy(self)
        object.__setattr__(twin, "label", label)
        return twin

    def columns(self, name: str) -> dict[str, list[Any]]:
        """Of "spans" or "samples": field -> its values. Makes no row."""
        kept: RowsByColumn[Any] = self.__dict__[f"_{name}"]
        return dict(kept.columns())

    def at_peak(self, place: str) -> dict[str, int]:
        """Returns category -> bytes at the instant of the steady iteration at which the place holds most."""
        columns = self.columns("samples")
        rows = zip(columns["time_s"], columns["place"], columns["category"], columns["bytes"])
        held: dict[str, int] = {}
        most: dict[str, int] = {}
        for _, changes in groupby((row for row in rows if row[1] == place), key=lambda row: row[0]):
            held |= {category: size for _, _, category, size in changes}
            if sum(held.values()) > sum(most.values()):
                most = dict(held)
        return most

    def to_frame(self) -> pandas.DataFrame:
        """Returns one row per span, with the fields of `Span`; a missing chunk or moment is <NA>."""
        import pandas

        columns = self.columns("spans")
        frame = pandas.DataFrame(columns, columns=[f.name for f in dataclasses.fields(Span)])
        frame["queue"] = [queue.value for queue in columns["queue"]]
        frame["kind"] = [kind.value for kind in columns["kind"]]
        return frame.astype({"chunk": "Int64", "moment": "Int64"})

    def bytes_frame(self) -> pandas.DataFrame:
        """Returns one row per sample: time_s, place, category, bytes."""
        import pandas

        columns = [f.name for f in dataclasses.fields(ByteSample)]
        return pandas.DataFrame(self.columns("samples"), columns=columns)

    def plot_tide(self, ax: Axes | None = None, x: str = "time") -> Axes:
        """Plots the tide of the steady iteration, against x="time" or x="moment", without showing it."""
        axes: Axes = render(self, "tide", ax=ax, x=x)
        return axes

    def _repr_html_(self) -> str:
        return render_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Spans and samples are by column; `Timeline.from_dict` is the reverse."""
        values: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for f in dataclasses.fields(self):
            value = self.columns(f.name) if f.name in _COLUMNS else getattr(self, f.name)
            values[f.name] = list(value) if isinstance(value, tuple) else value
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Timeline:
        """The reverse of `to_dict`. Raises TraceError naming the wrong field."""
        try:
            body = without_head(values, what="a timeline", format=FORMAT, version=VERSION, error=TraceError)
            timeline: Timeline = read_record(Annotated[Timeline, columns(**_COLUMNS)], body)
        except Fault as fault:
            raise TraceError(fault.in_json()) from None
        return timeline

    def save(self, path: str | Path) -> None:
        """As JSON, atomically; `load_timeline` is the reverse."""
        lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in self.to_dict().items())
        write_atomically(Path(path), "{\n" + ",\n".join(lines) + "\n}\n")

    @staticmethod
    def load(path: str | Path) -> Timeline:
        return load_timeline(path)


def load_timeline(path: str | Path) -> Timeline:
    """Returns the timeline in a file. Raises TraceError naming the file and the wrong field or line."""
    values = read_values(file_path("path", path, error=TraceError))
    try:
        return Timeline.from_dict(values)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def read_values(path: str | Path) -> dict[str, Any]:
    """Raises TraceError naming the file and the error in it."""
    try:
        values = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not a timeline: {error}") from None
    except Fault as fault:
        raise TraceError(f"{path}: is truncated or not JSON: {fault.in_json()}") from None
    if not isinstance(values, dict):
        raise TraceError(f"{path}: is not a timeline (not a JSON object)")
    return values
