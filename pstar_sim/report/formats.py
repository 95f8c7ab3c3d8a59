"""Reference pages of file formats, from the types by which files are read.

A key's unit follows from its name. A page with `<!-- format: NAME -->` gets `format_page(NAME)`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from msgspec import Struct

from pstar_sim.catalog import catalog, prices
from pstar_sim.catalog.entries import TABLES
from pstar_sim.catalog.figures import figures_of
from pstar_sim.catalog.overrides import override_rows
from pstar_sim.core import plan_file, run_file, timeline
from pstar_sim.planner import grid
from pstar_sim.policy.kit.options import options_of, show
from pstar_sim.policy.registry import built_in
from pstar_sim.schema.fields import fields_of, is_table, meaning, split, want
from pstar_sim.schema.records import columns, file_kind, record_class
from pstar_sim.workload import trace
from pstar_sim.workload.workload import Workload

_UNITS = (
    ("gb_per_s", "GB/s"), ("gparams_per_s", "billion parameters/s"), ("gparams_core", "billion parameters/s"),
    ("bytes_per_s", "bytes/s"), ("params_per_s", "parameters/s"), ("flops_per_s", "flops/s"), ("tflops", "Tflops/s"),
    ("usd_per_hour", "USD per hour"), ("bytes_per_param", "bytes per parameter"), ("bytes", "bytes"), ("gb", "GB"),
    ("us", "microseconds"), ("s", "seconds"),
)  # fmt: skip
"""Ending of a key -> its unit."""


@dataclass(frozen=True)
class Format:
    """what: in one or two sentences.
    version: written, and the newest read.
    tables: heading -> type.
    more: Markdown behind.
    """

    what: str
    version: int
    version_place: str
    tables: Mapping[str, Any]
    more: Callable[[], str] = str


_HEAD_OF_TOML = "`version = 1` at the head of the file; a file of the first edition says none"
_HEAD_OF_JSON = 'the keys `format` ("{0}") and `version`'


def _formats() -> dict[str, Format]:
    by_column = Annotated[timeline.Timeline, columns(spans=timeline.Span, samples=timeline.ByteSample)]
    return {
        "machine": Format(
            what="A machine file (TOML) describes GPUs, links, hosts, disks and machines, or changes those of the "
            "catalog. `--machine FILE.toml` takes it. `machine = NAME` at its head names the machine that is meant "
            "where it has several.",
            version=catalog.VERSION,
            version_place=_HEAD_OF_TOML,
            tables={f"[{table}.NAME]": kind for table, kind in TABLES.items()},
        ),
        "prices": Format(
            what="A price file (TOML) says what machines cost. `--prices FILE` takes it.",
            version=prices.VERSION,
            version_place=_HEAD_OF_TOML,
            tables={"[MACHINE]": prices.Price},
        ),
        "grid": Format(
            what="A grid (TOML) lists the values that a sweep goes through. Each key is one value or a list of them.",
            version=grid.VERSION,
            version_place=_HEAD_OF_TOML,
            tables={"Axes": grid.Axes},
            more=_overrides,
        ),
        "options": Format(
            what="Options of a policy are written behind its name: `tide:capacity=peak,pins=2`.",
            version=1,
            version_place="nothing: an option is a text",
            tables={},
            more=_options,
        ),
        "plan": Format(
            what="A plan (JSON) holds everything needed to check, simulate, explain and run it.",
            version=plan_file.VERSION,
            version_place=_HEAD_OF_JSON.format(plan_file.FORMAT),
            tables={"Plan": plan_file.PlanFile},
        ),
        "timeline": Format(
            what="A timeline (JSON) holds when each step ran and how many bytes lay where.",
            version=timeline.VERSION,
            version_place=_HEAD_OF_JSON.format(timeline.FORMAT),
            tables={"Timeline": by_column},
        ),
        "run": Format(
            what="A run (JSON) holds two timelines of one plan: predicted and measured.",
            version=run_file.VERSION,
            version_place=_HEAD_OF_JSON.format(run_file.FORMAT),
            tables={"Run": run_file.RunFile},
        ),
        "trace": Format(
            what="A trace (Parquet) holds one iteration of a model, one row per variant. Each key is a column; a "
            "table in it is a list of structs. The column `digest` is the SHA-256 of the others.",
            version=trace.SCHEMA_VERSION,
            version_place="the file's metadata `pstar.format` and `pstar.schema_version`",
            tables={"Row": Workload},
        ),
    }


FORMATS = ("machine", "prices", "grid", "options", "plan", "timeline", "run", "trace")


def format_page(name: str) -> str:
    """Markdown: purpose, version, and keys by table.

    Raises KeyError for a name not in FORMATS.
    """
    form = _formats()[name]
    parts = [form.what, f"Version {form.version}, said by {form.version_place}." if form.tables else ""]
    shown: set[type[Struct]] = set()
    for heading, kind in form.tables.items():
        for title, table in _tables(heading, split(file_kind(kind))[0], shown):
            parts += [f"## {title}", _summary(table), _rows(_fields(table))]
    return "\n\n".join(part for part in (*parts, form.more()) if part) + "\n"


def _tables(title: str, table: type[Struct], shown: set[type[Struct]]) -> Iterator[tuple[str, type[Struct]]]:
    if table in shown:
        return
    shown.add(table)
    yield title, table
    for field in fields_of(table).values():
        base, args, _ = split(field.kind)
        below = base if is_table(base) else split(args[0])[0] if args else None
        if below is not None and is_table(below):
            above = title.strip("[]")
            yield from _tables(f"[{above}.{field.name}]" if title.startswith("[") else field.name, below, shown)


def _summary(table: type[Struct]) -> str:
    text = inspect.cleandoc((record_class(table) or table).__doc__ or "")
    return " ".join(text.split("\n\n")[0].split())


def _fields(table: type[Struct]) -> Iterator[tuple[str, ...]]:
    said = _said(record_class(table))
    defaults = _defaults(record_class(table))
    for field in fields_of(table).values():
        default = "required"
        if not field.required:
            default = _text(defaults.get(field.name, field.default))
        what = meaning(field.kind) or said.get(field.name, "")
        yield f"`{field.name}`", _kind(field.kind), _unit(field.name), what, default


def _kind(kind: Any) -> str:
    base, args, _ = split(kind)
    if is_table(base):
        return "columns of a table, below" if hasattr(base, "words") else "table, below"
    if base is tuple and args and not want(kind).startswith("a list of ["):
        if args[-1] is not Ellipsis:
            return f"[{', '.join(_kind(arg) for arg in args)}]"
        return "list of tables, below" if is_table(split(args[0])[0]) else f"list of: {_kind(args[0])}"
    if base is dict:
        return "anything by name" if args[1] is Any else f"by name: {_kind(args[1])}"
    nullable = type(None) in typing.get_args(kind)
    return want(kind).removeprefix("a ") + (", or null" if nullable else "")


def _unit(key: str) -> str:
    return next((unit for ending, unit in _UNITS if key == ending or key.endswith(f"_{ending}")), "")


def _text(default: object) -> str:
    if default is None:
        return "none"
    if isinstance(default, Enum):
        default = default.value
    if dataclasses.is_dataclass(default) or default in ((), {}, ""):
        return "none" if not dataclasses.is_dataclass(default) else "AdamW"
    return f"`{json.dumps(default)}`"


def _defaults(cls: Any) -> dict[str, object]:
    found: dict[str, object] = {}
    for f in dataclasses.fields(cls) if cls is not None else ():
        if f.default is not dataclasses.MISSING:
            found[f.name] = f.default
        elif f.default_factory is not dataclasses.MISSING:
            found[f.name] = f.default_factory()
    return found


def _said(cls: Any) -> dict[str, str]:
    """Of a dataclass's fields: lines "name: text" or "name, other: text" of its docstring, with indented lines below,
    else the figure's in a machine file."""
    known = {f.name for f in dataclasses.fields(cls)} if cls is not None else set()
    found = {} if cls is None else {figure.attribute: figure.says for figure in figures_of(cls)}
    names: list[str] = []
    for line in inspect.cleandoc((cls.__doc__ if cls is not None else None) or "").splitlines():
        head = re.match(r"(\w+(?:, \w+)*): (.*)", line)
        if head is not None and known.issuperset(head[1].split(", ")):
            names = head[1].split(", ")
            found |= dict.fromkeys(names, head[2])
        elif line.startswith(" ") and names:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    return {name: text.rstrip(".") for name, text in found.items()}


def _rows(
    rows: Iterable[tuple[str, ...]], head: tuple[str, ...] = ("key", "value", "unit", "meaning", "default")
) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _overrides() -> str:
    head = ("path", "value", "from", "to")
    said = (
        "The table `[set]` of a grid, and `--set PATH=VALUE`, put a figure of the machine in place of its own. A value "
        "is written with its unit, or as a change of what is there: `+10%`, `-25%`, `x2`."
    )
    return f"## [set]\n\n{said}\n\n{_rows(override_rows(), head)}"


def _options() -> str:
    parts = []
    for name, policy in built_in().items():
        options = options_of(policy)
        if options:
            rows = [
                (f"`{key}`", option.allowed, option.help, f"`{show(option.default)}`")
                for key, option in options.items()
            ]
            parts.append(f"## {name}\n\n{_rows(rows, ('option', 'value', 'meaning', 'default'))}")
    return "\n\n".join(parts)
