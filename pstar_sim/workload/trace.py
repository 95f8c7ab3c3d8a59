"""Trace file: workloads in one Parquet file, a row a variant, and back again without loss.

Header fields are typed columns; `moments`, `tensors` and `uses` are lists of structs. The file's metadata carries the
format name and the schema version; each row carries a digest of its content, so that a damaged file is refused instead
of believed. Knows nothing about where a workload came from or what it is for.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pstar_sim.arguments import choice, file_path, flag, whole
from pstar_sim.errors import TraceError
from pstar_sim.files import replaced_atomically
from pstar_sim.workload.workload import (
    DTYPE_BYTES,
    Moment,
    OptimizerSpec,
    Phase,
    Stash,
    Tensor,
    Use,
    UseKind,
    Workload,
    activations_text,
    repeat_micro_batch,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "FORMAT",
    "SCHEMA_VERSION",
    "load_trace",
    "load_variants",
    "moments_frame",
    "save_trace",
    "tensors_frame",
    "uses_frame",
]

FORMAT = "pstar-sim trace"
SCHEMA_VERSION = 1

# The schema: field -> type, in file order. "?" marks a field that may be null; nested tables are dicts, "[]" lists.
_MOMENT = {
    "name": "str", "phase": "str", "module": "str", "micro_batch": "int", "flops": "int", "bytes_read": "int",
    "bytes_written": "int", "start_bytes": "int", "peak_bytes": "int", "end_bytes": "int", "duration_s": "float?",
}  # fmt: skip
_TENSOR = {
    "name": "str", "shape": "int[]", "dtype": "str", "bytes": "int", "frozen": "bool", "tied_to": "int?",
    "group": "int",
}  # fmt: skip
_USE = {"moment": "int", "tensor": "int", "kind": "str"}
_ACTIVATION = {"block": "str", "how": "str"}
_STASH = {
    "block": "str", "micro_batch": "int", "bytes": "int", "made": "int", "gone": "int", "back": "int", "needed": "int",
}  # fmt: skip
_CHOSEN = {"activations": _ACTIVATION, "stashes": _STASH}  # only in files in which some variant has them
_STATE = {"name": "str", "bytes": "int"}
_HEADER = {
    "model": "str", "dtype": "str", "batch": "int", "sequence": "int", "micro_batches": "int", "checkpointing": "bool",
    "attention": "str", "source": "str", "torch_version": "str", "recorded_on": "str?", "notes": "str",
}  # fmt: skip


def save_trace(workloads: Workload | Sequence[Workload], path: str | os.PathLike[str]) -> None:
    """Write one workload or several variants to `path` (Parquet, zstd); an existing file is replaced in one step.

    Raises TraceError if there is nothing to write, a value does not fit the format (an integer over 64 bits, text that
    is not Unicode), two variants cannot be told apart, or the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    variants = (workloads,) if isinstance(workloads, Workload) else tuple(workloads)
    target = Path(path)
    if not variants:
        raise TraceError(f"{target}: a trace needs at least one workload")
    keys = [(w.model, w.dtype, w.attention, w.source, *_key(w)) for w in variants]
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise TraceError(f"{target}: variants {keys.index(key)} and {i} are both {_words(variants[i])}")
    chosen = any(w.activations for w in variants)
    schema = _schema(chosen)
    try:
        table = pa.Table.from_pylist([_row(w, chosen) for w in variants], schema=schema)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError, ValueError) as error:
        raise TraceError(f"{target}: a field does not fit the trace format ({_first_line(error)})") from error
    with replaced_atomically(target, error=TraceError) as temporary:
        pq.write_table(table, temporary, compression="zstd", compression_level=9, row_group_size=1,
                       write_statistics=False, write_page_checksum=True)  # fmt: skip


def load_variants(path: str | os.PathLike[str]) -> tuple[Workload, ...]:
    """All workloads of a trace file, in file order.

    Raises TraceError (naming the file and the field) for a file that is missing, truncated, foreign, damaged, written
    by a newer version or inconsistent.
    """
    source = Path(path)
    rows = _read_rows(source)
    if not rows:
        raise TraceError(f"{source}: holds no workload")
    return tuple(_workload(source, i, row) for i, row in enumerate(rows))


def load_trace(
    path: str | os.PathLike[str],
    *,
    batch: int | None = None,
    sequence: int | None = None,
    checkpointing: bool | None = None,
    micro_batches: int | None = None,
    dtype: str | None = None,
) -> Workload:
    """The workload of a trace file that agrees with everything named; if several do, the first of them in the file.

    micro_batches: a number that the file does not hold is made from the variant with one, by repeating it.
    Raises TraceError as `load_variants` does, and if no variant agrees (the text lists what there is).
    """
    for name, count in (("batch", batch), ("sequence", sequence), ("micro_batches", micro_batches)):
        if count is not None:
            whole(name, count, error=TraceError)
    if checkpointing is not None:
        flag("checkpointing", checkpointing, error=TraceError)
    if dtype is not None:
        choice("dtype", dtype, DTYPE_BYTES, error=TraceError)
    variants = load_variants(file_path("path", path, error=TraceError))
    wanted = {"batch": batch, "sequence": sequence, "checkpointing": checkpointing, "dtype": dtype}
    found = [w for w in variants if all(v is None or getattr(w, name) == v for name, v in wanted.items())]
    if micro_batches is not None:
        exact = [w for w in found if w.micro_batches == micro_batches]
        found = exact or [repeat_micro_batch(w, micro_batches) for w in found if w.micro_batches == 1]
    if found:
        return found[0]
    asked = ", ".join(
        f"{name}={value}" for name, value in (wanted | {"micro_batches": micro_batches}).items() if value is not None
    )
    listed = "; ".join(_words(w) for w in variants[:12])
    raise TraceError(f"{path}: no variant has {asked}; it holds: {listed}")


def moments_frame(w: Workload) -> pd.DataFrame:
    """The moments as a pandas DataFrame, one row each (index: moment), fields as columns."""
    import pandas as pd

    frame = pd.DataFrame([asdict(m) | {"phase": m.phase.value} for m in w.moments], columns=list(_MOMENT))
    frame.index.name = "moment"
    frame["duration_s"] = frame["duration_s"].astype("float64")
    return frame


def tensors_frame(w: Workload) -> pd.DataFrame:
    """The tensors as a pandas DataFrame, one row each (index: tensor), with `numel`, `reads`, `gradients` (counts)."""
    import pandas as pd

    frame = pd.DataFrame([asdict(t) | {"numel": t.numel} for t in w.tensors], columns=[*_TENSOR, "numel"])
    frame.index.name = "tensor"
    frame["tied_to"] = frame["tied_to"].astype("Int64")
    for column, kind in (("reads", UseKind.READ), ("gradients", UseKind.GRADIENT)):
        counts = [0] * len(w.tensors)
        for use in w.uses:
            counts[use.tensor] += use.kind is kind
        frame[column] = counts
    return frame


def uses_frame(w: Workload) -> pd.DataFrame:
    """The uses as a pandas DataFrame: moment, tensor, kind."""
    import pandas as pd

    return pd.DataFrame([(u.moment, u.tensor, u.kind.value) for u in w.uses], columns=list(_USE))


def _key(w: Workload) -> tuple[int, int, int, bool, tuple[tuple[str, str], ...]]:
    return w.batch, w.sequence, w.micro_batches, w.checkpointing, w.activations


def _words(w: Workload) -> str:
    """A variant in words, for messages."""
    recompute = "checkpointing" if w.checkpointing else "no checkpointing"
    if w.activations:
        recompute = activations_text(w)
    return f"batch {w.batch} x {w.sequence}, {w.micro_batches} micro-batch(es), {w.dtype}, {recompute}"


def _schema(chosen: bool = False) -> Any:
    """The file's Arrow schema, with format and version in its metadata; chosen: with what becomes of the activations of
    each block."""
    import pyarrow as pa

    plain = {"str": pa.string(), "int": pa.int64(), "bool": pa.bool_(), "float": pa.float64()}

    def fields(table: dict[str, str]) -> list[Any]:
        built = []
        for name, kind in table.items():
            base = plain[kind.removesuffix("?").removesuffix("[]")]
            built.append(pa.field(name, pa.list_(base) if kind.endswith("[]") else base, nullable=kind.endswith("?")))
        return built

    optimizer = [*fields({"name": "str"}), pa.field("state_bytes", pa.list_(pa.struct(fields(_STATE))), nullable=False)]
    optimizer += fields({"dram_bytes_per_param": "int"})
    columns = [*fields(_HEADER), pa.field("optimizer", pa.struct(optimizer), nullable=False)]
    tables = {"moments": _MOMENT, "tensors": _TENSOR, "uses": _USE} | (_CHOSEN if chosen else {})
    for name, table in tables.items():
        columns.append(pa.field(name, pa.list_(pa.struct(fields(table))), nullable=False))
    columns.append(pa.field("digest", pa.string(), nullable=False))
    return pa.schema(columns, metadata={"pstar.format": FORMAT, "pstar.schema_version": str(SCHEMA_VERSION)})


def _row(w: Workload, chosen: bool = False) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(w, name) for name in _HEADER}
    row["optimizer"] = {
        "name": w.optimizer.name,
        "state_bytes": [{"name": name, "bytes": size} for name, size in w.optimizer.state_bytes],
        "dram_bytes_per_param": w.optimizer.dram_bytes_per_param,
    }
    row["moments"] = [{name: getattr(m, name) for name in _MOMENT} | {"phase": m.phase.value} for m in w.moments]
    row["tensors"] = [{name: getattr(t, name) for name in _TENSOR} | {"shape": list(t.shape)} for t in w.tensors]
    row["uses"] = [{"moment": u.moment, "tensor": u.tensor, "kind": u.kind.value} for u in w.uses]
    if chosen:
        row["activations"] = [{"block": block, "how": how} for block, how in w.activations]
        row["stashes"] = [{name: getattr(s, name) for name in _STASH} for s in w.stashes]
    return row | {"digest": _digest(row)}


def _digest(row: dict[str, Any]) -> str:
    """SHA-256 of everything in the row but the digest (floats by their exact shortest form)."""
    content = {name: value for name, value in row.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read_rows(source: Path) -> list[dict[str, Any]]:
    """Rows of the file after everything about the file itself has been checked."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        data = source.read_bytes()
    except OSError as error:
        raise TraceError(f"{source}: cannot be read ({error.strerror or _first_line(error)})") from error
    if data[:4] != b"PAR1":
        raise TraceError(f"{source}: is not a trace (a trace is a Parquet file; this does not begin as one)")
    if len(data) < 12 or data[-4:] != b"PAR1":
        raise TraceError(f"{source}: is truncated (a Parquet file ends with PAR1, this does not)")
    # Arrow reports damage as any of these, depending on which byte is wrong.
    damage = (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError, UnicodeError)
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        metadata = file.schema_arrow.metadata or {}
    except damage as error:
        raise TraceError(f"{source}: is damaged ({_first_line(error)})") from error
    if metadata.get(b"pstar.format", b"").decode(errors="replace") != FORMAT:
        raise TraceError(f"{source}: is a Parquet file but not a trace (metadata pstar.format is not {FORMAT!r})")
    version = metadata.get(b"pstar.schema_version", b"").decode(errors="replace")
    if not (version.isascii() and version.isdigit()):
        raise TraceError(f"{source}: field schema_version is {version!r}; it must be a whole number")
    if int(version[:9]) > SCHEMA_VERSION:
        raise TraceError(
            f"{source}: schema_version is {version}, this pstar-sim reads up to {SCHEMA_VERSION}; update pstar-sim"
        )
    try:
        _check_schema(source, file.schema_arrow)
        rows: list[dict[str, Any]] = file.read().to_pylist()
    except damage as error:
        raise TraceError(f"{source}: is damaged ({_first_line(error)})") from error
    return rows


def _check_schema(source: Path, found: Any) -> None:
    """Raise TraceError naming the first field that is missing, unknown or of another type."""
    expected = _schema(any(found.get_field_index(name) >= 0 for name in _CHOSEN))
    for field in expected:
        if found.get_field_index(field.name) < 0:
            raise TraceError(f"{source}: field {field.name} is missing")
        actual, wanted = (str(t).replace("item:", "element:") for t in (found.field(field.name).type, field.type))
        if actual != wanted:
            raise TraceError(f"{source}: field {field.name} is {actual}; expected {wanted}")
    for name in found.names:
        if expected.get_field_index(name) < 0:
            raise TraceError(f"{source}: field {name} is unknown in schema_version {SCHEMA_VERSION}")


def _workload(source: Path, index: int, row: dict[str, Any]) -> Workload:
    """The workload of one row. Raises TraceError naming the field that is null, unknown or contradicts another."""

    def bad(field: str, value: object, want: str) -> TraceError:
        return TraceError(f"{source}: variant {index}: {field} is {value!r}; {want}")

    def whole(field: str, value: Any, table: dict[str, str]) -> dict[str, Any]:
        if value is None:
            raise bad(field, value, "it must not be null")
        for name, kind in table.items():
            if value[name] is None and not kind.endswith("?"):
                raise bad(f"{field}.{name}" if field else name, None, "it must not be null")
        return dict(value)

    def rows(field: str, table: dict[str, str]) -> list[dict[str, Any]]:
        if row[field] is None:
            raise bad(field, None, "it must not be null")
        return [whole(f"{field}[{i}]", value, table) for i, value in enumerate(row[field])]

    header = whole("", row, _HEADER)
    moments, tensors, uses = rows("moments", _MOMENT), rows("tensors", _TENSOR), rows("uses", _USE)
    activations, stashes = (rows(name, table) if name in row else [] for name, table in _CHOSEN.items())
    optimizer = whole("optimizer", row["optimizer"], {"name": "str", "state_bytes": "", "dram_bytes_per_param": "int"})
    states = [whole("optimizer.state_bytes", state, _STATE) for state in optimizer["state_bytes"]]
    if _digest(row) != row["digest"]:
        raise bad("digest", row["digest"], "it does not match the content; the file is damaged or was edited")
    _check_words(moments, tensors, uses, bad)
    try:
        return Workload(
            **{name: header[name] for name in _HEADER},
            optimizer=OptimizerSpec(
                name=optimizer["name"],
                state_bytes=tuple((state["name"], state["bytes"]) for state in states),
                dram_bytes_per_param=optimizer["dram_bytes_per_param"],
            ),
            moments=tuple(Moment(**m | {"phase": Phase(m["phase"])}) for m in moments),
            tensors=tuple(Tensor(**t | {"shape": tuple(t["shape"])}) for t in tensors),
            uses=tuple(Use(**u | {"kind": UseKind(u["kind"])}) for u in uses),
            activations=tuple((a["block"], a["how"]) for a in activations),
            stashes=tuple(Stash(**s) for s in stashes),
        )
    except TraceError as error:
        raise TraceError(f"{source}: variant {index}: {error}") from error


def _check_words(
    moments: Sequence[Mapping[str, Any]],
    tensors: Sequence[Mapping[str, Any]],
    uses: Sequence[Mapping[str, Any]],
    bad: Callable[[str, object, str], TraceError],
) -> None:
    """What no column's type says: the words that there are, and numbers where a list may hold null. bad: makes the
    error of field, value, and what it must be."""
    for i, m in enumerate(moments):
        if m["phase"] not in list(Phase):
            raise bad(f"moments[{i}].phase", m["phase"], f"it must be one of {', '.join(Phase)}")
    for i, t in enumerate(tensors):
        if None in t["shape"]:
            raise bad(f"tensors[{i}].shape", t["shape"], "it must be whole numbers")
    for i, u in enumerate(uses):
        if u["kind"] not in list(UseKind):
            raise bad(f"uses[{i}].kind", u["kind"], f"it must be one of {', '.join(UseKind)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
