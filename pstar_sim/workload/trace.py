"""Trace file: workloads in one Parquet file, a row per variant, without loss.

Header fields are typed columns, `moments`, `tensors` and `uses` lists of structs. Each row's digest shows damage.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pstar_sim.arguments import choice, file_path, flag, whole
from pstar_sim.dtypes import DTYPES
from pstar_sim.errors import TraceError
from pstar_sim.files import replaced_atomically
from pstar_sim.schema.fields import split
from pstar_sim.schema.reading import Fault, convert
from pstar_sim.schema.records import file_kind, made
from pstar_sim.workload.kernels import LOSSES
from pstar_sim.workload.workload import (
    Moment,
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

FORMAT = "pstar-sim trace"
SCHEMA_VERSION = 3
"""Version of files that name calls of fused attention or count operators. Files that name kernels or products alone are
of version 2, all others of version 1: they have no columns for what they do not name."""

_AGAIN = "copy the file again, or trace the model again"

_HEADER = (
    "model", "dtype", "batch", "sequence", "micro_batches", "checkpointing", "attention", "kernels", "source",
    "torch_version", "recorded_on", "notes",
)  # fmt: skip
"""Fields of a workload that have columns of their own, in file order. Their types are those of `Workload`."""
_TABLES: dict[str, type] = {"moments": Moment, "tensors": Tensor, "uses": Use}
_CHOSEN = ("activations", "stashes")  # only in files in which some variant has them
_SELDOM: Mapping[str, Callable[[Workload], bool]] = {
    "order": lambda w: not w.order.of_loop,
    "loss": lambda w: w.loss != LOSSES[0],
    "dropout": lambda w: w.dropout is not None,
    "autocast": lambda w: w.autocast is not None,
    "recompute": lambda w: w.recompute is not None,
    "products": lambda w: w.products is not None,
}
"""Columns only of files in which some variant needs them: another order than a loop of the user's own, another loss
than that of all logits, dropout, autocast, less recomputation than of all blocks, products in fp8."""


def save_trace(workloads: Workload | Sequence[Workload], path: str | os.PathLike[str]) -> None:
    """Writes one workload or several variants (Parquet, zstd), atomically.

    Raises TraceError if there is nothing to write, a value does not fit (an integer over 64 bits, text that is not
    Unicode), two variants cannot be told apart, or the file cannot be written.
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
    optional: tuple[str, ...] = _CHOSEN if any(w.activations or w.stashes for w in variants) else ()
    optional += tuple(name for name, needed in _SELDOM.items() if any(map(needed, variants)))
    version = max(map(_version, variants))
    schema = _schema(version, optional)
    try:
        table = pa.Table.from_pylist([_row(w, version, optional) for w in variants], schema=schema)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError, ValueError) as error:
        raise TraceError(f"{target}: a field does not fit the trace format ({_first_line(error)})") from error
    with replaced_atomically(target, error=TraceError) as temporary:
        pq.write_table(table, temporary, compression="zstd", compression_level=9, row_group_size=1,
                       write_statistics=False, write_page_checksum=True)  # fmt: skip


def load_variants(path: str | os.PathLike[str]) -> tuple[Workload, ...]:
    """Returns all workloads, in file order.

    Raises TraceError (naming file and field) for one that is missing, truncated, foreign, damaged, newer or
    inconsistent.
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
    """Returns the workload of a trace file that agrees with all named arguments; if several do, the first of them in
    the file.

    batch: sequences per micro-batch.
    sequence: tokens per sequence.
    checkpointing: whether activations are recomputed.
    dtype: a name of DTYPES.
    micro_batches: a number that the file does not hold is made from the variant with one micro-batch, by repeating it.

    Raises TraceError as `load_variants` does, and if no variant agrees (the text lists the variants of the file).
    """
    for name, count in (("batch", batch), ("sequence", sequence), ("micro_batches", micro_batches)):
        if count is not None:
            whole(name, count, error=TraceError)
    if checkpointing is not None:
        flag("checkpointing", checkpointing, error=TraceError)
    if dtype is not None:
        choice("dtype", dtype, DTYPES, error=TraceError)
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
    import pandas as pd

    frame = pd.DataFrame([asdict(m) | {"phase": m.phase.value} for m in w.moments], columns=_names(Moment))
    frame.index.name = "moment"
    frame["duration_s"] = frame["duration_s"].astype("float64")
    return frame


def tensors_frame(w: Workload) -> pd.DataFrame:
    """With `numel`, `reads`, `gradients` (counts)."""
    import pandas as pd

    frame = pd.DataFrame([asdict(t) | {"numel": t.numel} for t in w.tensors], columns=[*_names(Tensor), "numel"])
    frame.index.name = "tensor"
    frame["tied_to"] = frame["tied_to"].astype("Int64")
    for column, kind in (("reads", UseKind.READ), ("gradients", UseKind.GRADIENT)):
        counts = [0] * len(w.tensors)
        for use in w.uses:
            counts[use.tensor] += use.kind is kind
        frame[column] = counts
    return frame


def uses_frame(w: Workload) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame([(u.moment, u.tensor, u.kind.value) for u in w.uses], columns=_names(Use))


def _key(w: Workload) -> tuple[object, ...]:
    order = (w.order, bool(w.stashes))
    return w.batch, w.sequence, w.micro_batches, w.checkpointing, w.activations, order


def _words(w: Workload) -> str:
    recompute = "checkpointing" if w.checkpointing else "no checkpointing"
    if w.activations:
        recompute = activations_text(w)
    if not w.order.of_loop:
        recompute += f", {w.order}" + (" with boundaries on the host" if w.stashes else "")
    micro_batches = f"{w.micro_batches} micro-batch{'es' if w.micro_batches > 1 else ''}"
    return f"batch {w.batch} x {w.sequence}, {micro_batches}, {w.dtype}, {recompute}"


_NEVER = SCHEMA_VERSION + 1
_SINCE = {"kernels": 2, "products": 2, "attentions": 3, "operators": 3, "collectives": _NEVER, "spread": _NEVER}
"""Fields of a workload, its moments or tensors that files of earlier versions lack. A trace is of a whole model, whose
ranks split no tensor."""


def _version(w: Workload) -> int:
    if any(m.attentions or m.operators for m in w.moments):
        return SCHEMA_VERSION
    return 2 if w.kernels or any(m.products for m in w.moments) else 1


def _columns(cls: Any, version: int) -> list[str]:
    return [name for name in _names(cls) if _SINCE.get(name, 1) <= version]


def _header(version: int) -> list[str]:
    return [name for name in _HEADER if _SINCE.get(name, 1) <= version]


def _schema(version: int = SCHEMA_VERSION, optional: Collection[str] = ()) -> Any:
    """optional: columns of _CHOSEN and _SELDOM."""
    import pyarrow as pa

    def rows(name: str, fields: Iterable[Any]) -> Any:
        return pa.field(name, pa.list_(pa.struct(fields)), nullable=False)

    text, whole = (
        partial(pa.field, type=pa.string(), nullable=False),
        partial(pa.field, type=pa.int64(), nullable=False),
    )
    states = rows("state_bytes", [text("name"), whole("bytes")])
    optimizer = pa.struct([text("name"), states, whole("dram_bytes_per_param")])
    header = {field.name: field for field in _arrow_fields(Workload, _header(version))}
    columns = [*header.values(), pa.field("optimizer", optimizer, nullable=False)]
    columns += [rows(name, _arrow_fields(cls, _columns(cls, version))) for name, cls in _TABLES.items()]
    if "activations" in optional:
        columns.append(rows("activations", [text("block"), text("how")]))
        columns.append(rows("stashes", _arrow_fields(Stash, _names(Stash))))
    columns += _arrow_fields(Workload, [name for name in _SELDOM if name in optional])
    columns.append(text("digest"))
    return pa.schema(columns, metadata={"pstar.format": FORMAT, "pstar.schema_version": str(version)})


def _names(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _arrow_fields(cls: type, names: Iterable[str]) -> list[Any]:
    import pyarrow as pa

    plain = {str: pa.string(), int: pa.int64(), bool: pa.bool_(), float: pa.float64()}
    hints = typing.get_type_hints(cls)
    found = []
    for name in names:
        of, lists = hints[name], 0
        while split(of)[0] is tuple:
            of, lists = split(of)[1][0], lists + 1
        kind = plain.get(split(of)[0], pa.string())
        for _ in range(lists):
            kind = pa.list_(kind)
        optional = type(None) in typing.get_args(hints[name])
        found.append(pa.field(name, kind, nullable=optional))
    return found


def _row(w: Workload, version: int = SCHEMA_VERSION, optional: Collection[str] = ()) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(w, name) for name in _header(version)}
    row["optimizer"] = {
        "name": w.optimizer.name,
        "state_bytes": [{"name": name, "bytes": size} for name, size in w.optimizer.state_bytes],
        "dram_bytes_per_param": w.optimizer.dram_bytes_per_param,
    }
    names = _columns(Moment, version)
    row["moments"] = [{name: getattr(m, name) for name in names} | {"phase": m.phase.value} for m in w.moments]
    names = _columns(Tensor, version)
    row["tensors"] = [{name: getattr(t, name) for name in names} | {"shape": list(t.shape)} for t in w.tensors]
    row["uses"] = [{"moment": u.moment, "tensor": u.tensor, "kind": u.kind.value} for u in w.uses]
    if "activations" in optional:
        row["activations"] = [{"block": block, "how": how} for block, how in w.activations]
        row["stashes"] = [{name: getattr(s, name) for name in _names(Stash)} for s in w.stashes]
    row |= {name: str(getattr(w, name)) for name in _SELDOM if name in optional}
    return row | {"digest": _digest(row)}


def _digest(row: dict[str, Any]) -> str:
    content = {name: value for name, value in row.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read_rows(source: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        data = source.read_bytes()
    except OSError as error:
        raise TraceError(f"{source}: cannot be read ({error.strerror or _first_line(error)})") from error
    if data[:4] != b"PAR1":
        raise TraceError(f"{source}: is not a trace (a trace is a Parquet file, which begins with PAR1)")
    if len(data) < 12 or data[-4:] != b"PAR1":
        raise TraceError(f"{source}: is truncated (a Parquet file ends with PAR1); {_AGAIN}")
    # Arrow reports damage as any of these, depending on which byte is wrong.
    damage = (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError, UnicodeError)
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        metadata = file.schema_arrow.metadata or {}
    except damage as error:
        raise TraceError(f"{source}: is damaged ({_first_line(error)}); {_AGAIN}") from error
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
        _check_schema(source, file.schema_arrow, int(version))
        rows: list[dict[str, Any]] = file.read().to_pylist()
    except damage as error:
        raise TraceError(f"{source}: is damaged ({_first_line(error)}); {_AGAIN}") from error
    return rows


def _check_schema(source: Path, found: Any, version: int) -> None:
    """Raise TraceError naming the first field missing, unknown or of another type."""
    optional = [
        name
        for names in (_CHOSEN, *((name,) for name in _SELDOM))
        if any(found.get_field_index(one) >= 0 for one in names)
        for name in names
    ]
    expected = _schema(version, optional)
    for field in expected:
        if found.get_field_index(field.name) < 0:
            raise TraceError(f"{source}: field {field.name} is missing; {_AGAIN}")
        actual, wanted = (str(t).replace("item:", "element:") for t in (found.field(field.name).type, field.type))
        if actual != wanted:
            raise TraceError(f"{source}: field {field.name} is {actual}; expected {wanted}")
    for name in found.names:
        if expected.get_field_index(name) < 0:
            raise TraceError(f"{source}: field {name} is unknown in schema_version {version}")


def _workload(source: Path, index: int, row: dict[str, Any]) -> Workload:
    """Raises TraceError naming a field that is null, unknown or contradictory."""
    digest = row.pop("digest")
    try:
        form = convert(file_kind(Workload), _plain(row))
        if _digest(row) != digest:
            want = f"it does not match the content, so the file is damaged or was edited; {_AGAIN}"
            raise TraceError(f"{source}: variant {index}: digest is {digest!r}; {want}")
        found: Workload = made(Workload, form)
    except Fault as fault:
        raise TraceError(f"{source}: variant {index}: {fault.in_json()}") from None
    return found


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(row)
    if isinstance(row["optimizer"], dict):
        values["optimizer"] = {**row["optimizer"], "state_bytes": _pairs(row["optimizer"]["state_bytes"])}
    if "activations" in row:
        values["activations"] = _pairs(row["activations"])
    return values


def _pairs(table: list[dict[str, Any] | None] | None) -> list[list[Any] | None] | None:
    return None if table is None else [None if pair is None else list(pair.values()) for pair in table]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
