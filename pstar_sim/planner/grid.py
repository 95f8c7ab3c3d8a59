"""Grid: the axes of a sweep, its points, and the hash of everything that determines a point's result.

    machine = ["v100-32", "a100-80"]
    model = ["4B", "12B"]
    batch = [4, 8]
    seq = 1024                      # one value: an axis that does not vary
    policy = ["zero_offload", "tide"]
    [set]                           # any figure of the machine (catalog/overrides.py)
    "gpu.memory" = ["24GB", "48GB"]

Names and values are checked before anything is computed. A point that makes no sense by itself (too long a sequence) is
an answer of the sweep.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from msgspec import defstruct, structs

from pstar_sim.arguments import MOST, file_path, parse_bytes
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import model_entry
from pstar_sim.catalog.overrides import override, override_paths
from pstar_sim.core.plan import LOOPS, SUMS, Settings
from pstar_sim.errors import PstarError
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.stages_degrees import ASKED
from pstar_sim.policy.registry import find_policy
from pstar_sim.schema.fields import (
    Positive,
    Table,
    between,
    choice,
    fields_of,
    meaning,
    rule_of,
    says,
    split,
    want,
)
from pstar_sim.schema.parsing import read_toml
from pstar_sim.schema.reading import Fault, convert, nearest
from pstar_sim.version import __version__
from pstar_sim.workload.adapter import adapter
from pstar_sim.workload.axes import Axis, all_axes
from pstar_sim.workload.kernels import dropout
from pstar_sim.workload.optimizers import optimizer_spec
from pstar_sim.workload.parallelism import Parallelism

VERSION = 1
"""Version of the file of a grid. `version` at its head names another version; a file of the first edition has none."""
SCHEMA = 1
"""Version of the cached points and the results file. A change of meaning or of columns raises it by 1."""
CODE = ("schema", "catalog", "workload", "core", "policy", "sim", "bounds", "planner")
"""Folders of this package that determine the result of a point."""

NO_ADAPTER = "none"
Value = str | int | float | bool
_Count = Annotated[int, between(1, MOST)]


class _Work(Table, frozen=True, kw_only=True):
    model: Annotated[str | None, says("a model preset")] = None
    trace: Annotated[str | None, says("a trace file")] = None
    machine: Annotated[str, says("a machine of the catalog, or a .toml file")]
    batch: Annotated[_Count | None, says("sequences per micro-batch, all ranks together")] = None
    seq: Annotated[_Count | None, says("tokens per sequence")] = None
    micro_batches: Annotated[_Count, says("micro-batches per iteration")] = 1
    parallel: Annotated[str | None, says("auto, all, or a parallelism such as tp=2,pp=4")] = None


class _Training(Table, frozen=True, kw_only=True):
    update: Annotated[str, choice(("step", "eager")), says("step or eager")] = "step"
    clip: Annotated[bool, says("true or false")] = True
    chunk: Annotated[str | None, says("chunk size, such as 128MiB")] = None
    loop: Annotated[str, choice(LOOPS), says("own or step")] = "own"
    sums: Annotated[str, choice(SUMS), says("32-bit or 16-bit")] = "32-bit"
    effort: Annotated[Positive, says("effort of a policy that searches, as a multiple of the usual effort")] = 1.0
    policy: Annotated[str, says("a policy, with its options if any")]


def _of_work(name: str, axis: Axis) -> tuple[str, Any, Any]:
    if name == "lora":
        return name, Annotated[str, says(axis.values)], NO_ADAPTER
    kind: Any = bool if isinstance(axis.default, bool) else str
    notes = (choice(axis.names), says(axis.values)) if axis.names else (says(axis.values),)
    return name, Annotated[(kind if axis.default is not None else kind | None, *notes)], axis.default


def _listed(table: type[Table]) -> Iterator[tuple[str, Any] | tuple[str, Any, Any]]:
    for field in fields_of(table).values():
        yield (field.name, field.kind) if field.required else (field.name, field.kind, field.default)


_WORK_AXES = {name: axis for name, axis in all_axes().items() if axis.values}
Axes = defstruct(
    "Axes",
    [*_listed(_Work), *(_of_work(name, axis) for name, axis in _WORK_AXES.items()), *_listed(_Training)],
    bases=(Table,),
    namespace={"__doc__": "The axes of a sweep, each with the values that it takes. [set] holds paths of `override`."},
    frozen=True,
    kw_only=True,
)
_KINDS = {name: field.kind for name, field in fields_of(Axes).items()}
_OF_NODES = ("nodes", "gpus")
"""Figures of a machine that a grid may name beside [set], too."""
AXES = {name: meaning(kind) for name, kind in _KINDS.items()}
"""Axis -> words for its values."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """values: every axis but the policy.
    policies: each with its point's index in the grid.
    """

    values: tuple[tuple[str, Value], ...]
    policies: tuple[tuple[int, str], ...]

    @property
    def cost(self) -> float:
        """Long groups are handed out first: layers x micro-batches."""
        given = dict(self.values)
        layers = model_entry(str(given["model"])).layers if "model" in given else 100
        return layers * float(given.get("micro_batches", 1)) * len(self.policies)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """axes: in the order in which points count (the last varies fastest)."""

    axes: Mapping[str, tuple[Value, ...]]
    source: str = "grid"

    def __len__(self) -> int:
        count = 1
        for values in self.axes.values():
            count *= len(values)
        return count

    def points(self) -> Iterator[dict[str, Value]]:
        for values in product(*self.axes.values()):
            yield dict(zip(self.axes, values))

    def groups(self) -> list[Group]:
        rows: dict[tuple[tuple[str, Value], ...], list[tuple[int, str]]] = {}
        for index, point in enumerate(self.points()):
            policy = str(point.pop("policy"))
            rows.setdefault(tuple(point.items()), []).append((index, policy))
        return [Group(values=values, policies=tuple(policies)) for values, policies in rows.items()]

    @property
    def digest(self) -> str:
        """Grids with the same digest have the same results."""
        text = json.dumps({name: list(values) for name, values in self.axes.items()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_grid(source: str | Path | Mapping[str, object], more: Mapping[str, object] | None = None) -> Grid:
    """Returns the grid of a TOML file, of a mapping of the same form, or the shipped one of that name ("whatif").

    more: axes in place of those of the same name.

    Raises PstarError, naming file and axis, for an axis that is unknown, empty, has a value twice or a wrong one, and
    for a grid without machine or policy, or with both or neither of model and trace.
    """
    if isinstance(source, Mapping):
        file, content = "grid", dict(source)
    else:
        place = _own_or_shipped(file_path("grid", source))
        file, content = str(place), read_toml(place, "grid", VERSION)
    content |= more or {}
    table = content.pop("set", {})
    if not isinstance(table, Mapping):
        raise PstarError(f'{file}: set = {table!r}; write a table: [set] and "gpu.memory" = ["24GB", "48GB"] below it')
    table = {**table, **{name: content.pop(name) for name in _OF_NODES if name in content}}
    axes: dict[str, tuple[Value, ...]] = {}
    for name, given in content.items():
        if name not in AXES:
            hint = _hint(name, AXES, f"known axes are {', '.join(AXES)} and [set]")
            raise PstarError(f"{file}: {name!r} is not an axis of a sweep; {hint}")
        axes[name] = _values(file, name, given)
    for path, given in _flat(table).items():
        if path not in override_paths():
            hint = _hint(path, override_paths(), f"it can be {', '.join(override_paths())}")
            raise PstarError(f"{file}: [set] {path!r} is not a figure of a machine; {hint}")
        values = axes[f"set.{path}"] = _values(file, f"[set] {path}", given)
        if len({isinstance(value, str) for value in values}) > 1:
            raise PstarError(f"{file}: [set] {path} = {given!r}; write its values all as texts or all as numbers")
    _check_axes(file, axes)
    ordered = {name: axes[name] for name in (*AXES, *sorted(axes)) if name in axes and name != "policy"}
    grid = Grid(axes={**ordered, "policy": axes["policy"]}, source=file)
    for name, values in grid.axes.items():
        for value in values:
            _check(file, name, value)
    _check_machines(file, grid)
    return grid


def _own_or_shipped(path: Path) -> Path:
    shipped = Path(str(files("pstar_sim.catalog") / "grids" / f"{path}.toml"))
    plain = path.name == str(path) and not path.suffix
    return shipped if plain and not path.exists() and shipped.is_file() else path


def _hint(word: str, known: Iterable[str], otherwise: str) -> str:
    near = nearest(word, known)
    return f"did you mean {near}?" if near else otherwise


def _check_axes(file: str, axes: Collection[str]) -> None:
    if ("model" in axes) == ("trace" in axes):
        raise PstarError(f"{file}: a sweep is over models or over traces; give one of the axes model and trace")
    needed = ["machine", "policy"] + (["batch", "seq"] if "model" in axes else [])
    for name in needed:
        if name not in axes:
            raise PstarError(f"{file}: the axis {name} is missing; give {AXES[name]}")
    for name, axis in _WORK_AXES.items():
        if axis.not_of_traces and name in axes and "trace" in axes:
            raise PstarError(f"{file}: {name} is for models; {axis.not_of_traces}")


def _flat(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """[set] with dotted keys, quoted or not, as paths."""
    out: dict[str, object] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out


def _values(file: str, name: str, given: object) -> tuple[Value, ...]:
    values = given if isinstance(given, list | tuple) else [given]
    if not values:
        raise PstarError(f"{file}: axis {name} has no values")
    for value in values:
        if not isinstance(value, (str, int, float, bool)):
            raise PstarError(f"{file}: axis {name} has the value {value!r}; a value is a text, a number, true or false")
    values = [_as_flags_mean(file, name, value) for value in values]
    keys = [(type(v).__name__, v) for v in values]
    for key in keys:
        if keys.count(key) > 1:
            raise PstarError(f"{file}: axis {name} has the value {key[1]!r} twice")
    return tuple(values)


def _as_flags_mean(file: str, name: str, value: Any) -> Any:
    """Raises PstarError for what is no adapter or dropout."""
    axis, read = _WORK_AXES.get(name), {"lora": adapter, "dropout": dropout}.get(name)
    if axis is None or read is None:
        return value if axis is None else axis.words.get(str(value).lower(), value)
    if name == "lora" and value in (0, "0", NO_ADAPTER):
        return NO_ADAPTER
    try:
        return str(read(value))
    except PstarError as error:
        raise PstarError(f"{file}: {error}") from None


def _file_of(value: str) -> None:
    if not Path(value).is_file():
        raise PstarError("there is no such file")


_LOOK_UP: dict[str, Callable[[str], object]] = {
    "model": model_entry,
    "policy": find_policy,
    "optimizer": optimizer_spec,
    "chunk": parse_bytes,
    "trace": _file_of,
    "parallel": lambda value: value in ASKED or Parallelism.parse(value),
}
"""Axis -> function that raises PstarError for a value that the axis does not take."""


def _check(file: str, name: str, value: Value) -> None:
    if name.startswith("set."):
        return  # checked on each machine
    kind = _KINDS[name]
    try:
        convert(kind, value)
    except Fault:
        plain = split(kind)[0] is str and rule_of(kind) is None
        raise PstarError(f"{file}: {name} = {value!r}; it must be {AXES[name] if plain else want(kind)}") from None
    try:
        if name in _LOOK_UP:
            _LOOK_UP[name](str(value))
    except PstarError as error:
        raise PstarError(f"{file}: {name} = {value!r}: {error}") from None


def _check_machines(file: str, grid: Grid) -> None:
    paths = [name for name in grid.axes if name.startswith("set.")]
    for name in grid.axes["machine"]:
        for values in product(*(grid.axes[path] for path in paths)):
            try:
                machine_of(str(name), tuple(zip(paths, values)))
            except PstarError as error:
                raise PstarError(f"{file}: machine = {name!r}: {error}") from None


# From a point to its job.


@lru_cache(maxsize=64)
def machine_of(name: str, overrides: tuple[tuple[str, Value], ...]) -> Machine:
    machine = load_machine(name)
    return override(machine, {path.removeprefix("set."): value for path, value in overrides})


def job_of(group: Group) -> tuple[Job, Machine, Settings]:
    """Raises PstarError for values that make no sense together."""
    given = dict(group.values)
    machine = machine_of(str(given["machine"]), tuple((k, v) for k, v in group.values if k.startswith("set.")))
    chunk = parse_bytes(str(given["chunk"])) if "chunk" in given else None
    settings = Settings(
        update=str(given.get("update", "step")),
        clip=bool(given.get("clip", True)),
        chunk_bytes=chunk,
        loop=str(given.get("loop", "own")),
        sums=str(given.get("sums", "32-bit")),
        effort=float(given.get("effort", 1.0)),
    )
    axes = {name: given[name] for name in _OF_JOB if name in given and (name, given[name]) != ("lora", NO_ADAPTER)}
    return Job(**axes), machine, settings  # type: ignore[arg-type]


_OF_JOB = {field.name for field in fields(Job)} & set(AXES)
"""Axes that describe the work of an iteration."""


# Hashes.


def point_hash(group: Group, policy: str) -> str:
    """A hash of all that determines the result: values, machine and model (or the trace's bytes), policy, version and
    code."""
    given = dict(group.values)
    content: dict[str, object] = {"schema": SCHEMA, "code": _code_digest(), "values": given, "policy": policy}
    overrides = tuple((k, v) for k, v in group.values if k.startswith("set."))
    content["machine"] = _machine_digest(str(given["machine"]), overrides)
    if "model" in given:
        content["model"] = structs.asdict(model_entry(str(given["model"])))
    else:
        content["trace"] = _file_digest(str(given["trace"]))
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


@lru_cache(maxsize=4096)
def _machine_digest(name: str, overrides: tuple[tuple[str, Value], ...]) -> str:
    text = json.dumps(asdict(machine_of(name, overrides)), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=64)
def _file_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


@cache
def _code_digest() -> str:
    """Another code makes another point."""
    digest = hashlib.sha256(__version__.encode())
    root = files("pstar_sim")
    places = [root / name for name in CODE]
    entries = [entry for entry in root.iterdir() if entry.is_file()]
    while places:
        for entry in places.pop().iterdir():
            (places if entry.is_dir() else entries).append(entry)
    for entry in sorted(entries, key=str):
        if entry.name.endswith((".py", ".toml", ".json")):
            digest.update(entry.name.encode() + entry.read_bytes())
    return digest.hexdigest()
