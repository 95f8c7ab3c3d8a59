"""Published measurements as values."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from pstar_sim.errors import CatalogError

_SUFFIX = {"": 1.0, "B": 1e9, "T": 1e12}
_VALUE = re.compile(r"^(\d+(?:\.\d+)?(?:e\d+)?)(?:-(\d+(?:\.\d+)?))?([BT]?)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRow:
    """A figure as written.

    file: in `pstar_sim/validation/data`.
    line: 1 = the first after the header.
    settings: options without a column, in words.
    value: in the unit that ends the metric's name, the middle of a range.
    setup: columns that say as which job the run is replayed.
    """

    file: str
    line: int
    system: str
    hardware: str
    gpus: int
    params: str
    shape: str
    sequence: str
    batch: str
    settings: str = ""
    metric: str
    value: float
    source: str
    setup: tuple[tuple[str, str], ...] = ()

    @property
    def where(self) -> str:
        """The row in words, for messages."""
        return f"{self.file}, row {self.line}"

    @property
    def publisher(self) -> str:
        """Who measured it: the first word of its source."""
        return self.source.split(" ")[0]

    @property
    def run(self) -> tuple[str, ...]:
        """Rows of one run agree in everything but the metric."""
        return (
            self.system,
            self.hardware,
            str(self.gpus),
            self.params,
            self.shape,
            self.sequence,
            self.batch,
            self.settings,
            self.source,
        )


def number(text: str) -> float:
    """Plain, with B (1e9) or T (1e12), or the middle of a range. Raises ValueError for any other text."""
    match = _VALUE.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a figure such as 12.5, 18B or 25680-26756")
    low, high, suffix = match.groups()
    middle = float(low) if high is None else (float(low) + float(high)) / 2
    return middle * _SUFFIX[suffix]


_Raw = Mapping[str, str]


def _figure(file: str, line: int, raw: _Raw) -> PublishedRow:
    return PublishedRow(
        file=file,
        line=line,
        system=raw["system"],
        hardware=raw["hardware"],
        gpus=int(raw["gpus"]),
        params=raw["params"],
        shape=raw["layers_hidden_heads"],
        sequence=raw["seq_len"],
        batch=raw["batch"],
        metric=raw["metric"],
        value=number(raw["value"]),
        source=raw["source"],
    )


FSDP_GPUS = {"a100_80gb": "A100-80GB", "h100_80gb": "H100-80GB"}
_GPUS_PER_NODE = 8


def _fsdp_step(file: str, line: int, raw: _Raw) -> PublishedRow:
    """Raises ValueError unless the global batch is all GPUs'."""
    each, times, gpus = int(raw["micro_batch"]), int(raw["grad_accum"]), int(raw["gpus"])
    if each * times * gpus != int(raw["global_batch"]):
        raise ValueError(f"{each} sequences x {times} micro-batches x {gpus} GPUs are not {raw['global_batch']}")
    nodes, gpu = gpus // _GPUS_PER_NODE, FSDP_GPUS[raw["gpu"]]
    checkpointing = "checkpointing" if raw["checkpointing"] == "True" else "no checkpointing"
    return PublishedRow(
        file=file,
        line=line,
        system="FSDP, MPT",
        hardware=("" if nodes == 1 else f"{nodes} nodes of ") + f"{_GPUS_PER_NODE}x{gpu} (MosaicML)",
        gpus=gpus,
        params=raw["params"],
        shape=f"{raw['layers']}/{raw['hidden']}/{raw['heads']} vocab{raw['vocab']}",
        sequence=raw["seq"],
        batch=f"gbs{raw['global_batch']} mbs{each}",
        settings=f"{raw['precision']} {raw['mp_mode']} {raw['sharding']} {checkpointing}",
        metric="tokens_per_s_per_gpu",
        value=number(raw["tokens_per_s_per_gpu"]),
        source=raw["source"],
    )


def _eager_step(file: str, line: int, raw: _Raw) -> PublishedRow:
    option = raw["option"]
    gpus = int(option[2]) if option else 1  # dp4, tp4, pp4_1
    return PublishedRow(
        file=file,
        line=line,
        system="PyTorch eager" + (f" {option}" if option else ""),
        hardware=f"{gpus}x{raw['gpu']} (NeuSight)",
        gpus=gpus,
        params=raw["model"],
        shape=raw["model"],
        sequence=raw["seq"],
        batch=raw["batch"],
        settings=raw["precision"],
        metric="fwd_bwd_ms",
        value=number(raw["measured_ms"]),
        source=raw["source"],
    )


def _set_up_step(file: str, line: int, raw: _Raw) -> PublishedRow:
    return replace(
        _figure(file, line, {**raw, "params": raw["model"]}),
        setup=tuple((column, raw[column]) for column in _SETUP_COLUMNS),
    )


_FIGURE_COLUMNS = (
    "system", "hardware", "gpus", "params", "layers_hidden_heads", "seq_len", "batch", "metric", "value", "source",
)  # fmt: skip
_SETUP_COLUMNS = (
    "model", "as_machine", "as_nodes", "as_gpus", "as_policy", "as_framework", "micro_batch", "micro_batches", "dtype",
    "checkpointing", "reentrant", "attention", "kernels", "optimizer", "lora", "clip", "note", "use",
    "attention_kernel",
)  # fmt: skip
_STEP_COLUMNS = (*_FIGURE_COLUMNS[:3], "model", *_FIGURE_COLUMNS[3:], *_SETUP_COLUMNS[1:])
_FSDP_COLUMNS = (
    "seq", "gpus", "gpu", "model", "params", "micro_batch", "grad_accum", "global_batch", "tokens_per_s_per_gpu",
    "mfu_pct", "hfu_pct", "precision", "mp_mode", "sharding", "checkpointing", "layers", "hidden", "heads", "vocab",
    "source",
)  # fmt: skip
_EAGER_COLUMNS = (
    "model", "seq", "batch", "gpu", "mode", "option", "measured_ms", "forward_ms", "backward_ms", "precision", "source",
)  # fmt: skip

FILES: Mapping[str, tuple[tuple[str, ...], Callable[[str, int, _Raw], PublishedRow]]] = {
    "measurements.csv": (_FIGURE_COLUMNS, _figure),
    "measurements-2.csv": (_FIGURE_COLUMNS, _figure),
    "fsdp_steps.csv": (_FSDP_COLUMNS, _fsdp_step),
    "single_gpu_steps.csv": (_EAGER_COLUMNS, _eager_step),
    "whole_steps-3.csv": (_STEP_COLUMNS, _set_up_step),
}
"""File -> (its columns, function that makes a row of a line), in the order in which rows are shown."""


def read_rows(file: str, text: str, kind: str = "measurements.csv") -> tuple[PublishedRow, ...]:
    """Raises CatalogError, naming the line.

    kind: of FILES, whose columns the text has.
    """
    columns, make = FILES[kind]
    table = csv.DictReader(io.StringIO(text))
    if tuple(table.fieldnames or ()) != columns:
        raise CatalogError(
            f"{file}: columns are {', '.join(table.fieldnames or ())}; they must be {', '.join(columns)}"
        )
    rows: list[PublishedRow] = []
    for line, raw in enumerate(table, 1):
        try:
            rows.append(make(file, line, raw))
        except ValueError as error:
            raise CatalogError(f"{file}, row {line}: {error}") from error
    return tuple(rows)


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """Shipped with the project, of all files."""
    folder = files("pstar_sim.validation") / "data"
    return tuple(
        row for name in FILES for row in read_rows(name, (folder / name).read_text(encoding="utf-8"), kind=name)
    )
