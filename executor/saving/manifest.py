"""The file of a checkpoint that is written last."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import xxhash

from executor.contract import tensor_of
from executor.saving import whole_folder
from executor.saving.as_json import encode
from executor.saving.tensor_files import StoredFile, piece_buffer, stored_file
from pstar_sim.errors import CheckpointError, ContractError
from pstar_sim.schema.reading import Fault
from pstar_sim.schema.records import read_record
from pstar_sim.version import __version__
from pstar_sim.workload.workload import Tensor

if TYPE_CHECKING:
    from executor.engine import Session

FORMAT, SCHEMA = "pstar-sim checkpoint", 2
CHECKSUM = "xxh3_64"
MANIFEST = "pstar.json"
EXTRA = "extra.safetensors"


@dataclass(frozen=True, kw_only=True)
class StoredParameter:
    name: str
    shape: tuple[int, ...]
    dtype: str
    frozen: bool
    tied_to: str | None


@dataclass(frozen=True, kw_only=True)
class StoredGroup:
    """numbers: the group's settings, as `as_json.encode` makes them."""

    params: tuple[str, ...]
    numbers: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StoredScale:
    scale: float
    growth_tracker: int
    skipped_steps: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """written_by: package -> its version.
    iteration: steps done.
    states: optimizer's lists.
    extra: the user's own, by `as_json.encode`.
    """

    written_by: dict[str, str]
    model: str | None
    iteration: int
    ranks: int
    tensors: tuple[StoredParameter, ...]
    states: tuple[str, ...]
    updates: dict[str, int]
    groups: tuple[StoredGroup, ...]
    loss_scaling: StoredScale | None
    extra: Any
    files: dict[str, StoredFile]


class Trained(Protocol):
    """What saving and loading use of `optimizer.OffloadedOptimizer`."""

    session: Session
    param_groups: list[dict[str, Any]]

    def packed(self, value: Callable[[int, str], torch.Tensor]) -> dict[str, Any]:
        """A state dict of what `value` returns for (tensor, list), without masters."""
        ...


def is_checkpoint(folder: str | Path) -> bool:
    return (Path(folder) / MANIFEST).is_file()


def find_checkpoint(folder: str | Path) -> Path:
    return whole_folder.find(Path(folder).expanduser(), is_checkpoint)


def manifest_text(manifest: Manifest) -> str:
    """The last field is the checksum of all before."""
    values = {"format": FORMAT, "schema": SCHEMA, **dataclasses.asdict(manifest)}
    return json.dumps({**values, CHECKSUM: _checksum(values)}, indent=1) + "\n"


def _checksum(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values).encode())


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError if the folder has no usable manifest."""
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {str(folder)!r} is not a folder; give a folder that optimizer.save wrote")
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{str(folder)!r} is not a whole checkpoint: {MANIFEST}, which is written last, is missing; give another "
            "one (plain weights are loaded with prepare(..., weights=FOLDER))"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); give another checkpoint") from error
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT or type(values.get("schema")) is not int:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint; give a folder that optimizer.save wrote")
    schema, written_by = values.pop("schema"), values.get("written_by")
    if schema > SCHEMA:
        by = written_by.get("pstar-sim") if isinstance(written_by, dict) else None
        raise CheckpointError(
            f"checkpoint {folder} is of schema {schema}, written by pstar-sim {by}; this version ({__version__}) reads "
            f"up to {SCHEMA}: upgrade pstar-sim"
        )
    checksum = values.pop(CHECKSUM, None)
    if schema > 1 or checksum is not None:
        if checksum != _checksum({"format": FORMAT, "schema": schema, **values}):
            raise CheckpointError(
                f"{path} is damaged, or was edited: field {CHECKSUM!r} is not the checksum of the others; copy it "
                "again, or give another checkpoint"
            )
    elif isinstance(values.get("files"), dict):  # the first schema has sizes alone
        values["files"] = {name: {"bytes": size, CHECKSUM: ""} for name, size in values["files"].items()}
    try:
        manifest: Manifest = read_record(Manifest, values)
    except Fault as fault:
        raise CheckpointError(f"{path}: {fault.in_json()}; give another checkpoint") from None
    return manifest


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise CheckpointError where a named file is not as written (without a checksum it passes)."""
    buffer = piece_buffer()
    for name in names:
        written = manifest.files[name]
        if not written.xxh3_64:
            continue
        try:
            present = stored_file(folder / name, buffer)
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error.strerror or error}") from error
        if present != written:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} has the checksum {present.xxh3_64}, {written.xxh3_64} was "
                "written; copy it again, or give another checkpoint"
            )


def check_between_iterations(session: Session, what: str) -> None:
    state = session.state
    if state.cursor.inside or (state.now.arrived and not state.cursor.stepped):
        raise ContractError(
            f"optimizer.{what} inside an iteration, whose gradients are in the chunks; call it after optimizer.step() "
            "and before the next forward"
        )


def model_table(tensors: Sequence[Tensor]) -> tuple[StoredParameter, ...]:
    return tuple(
        StoredParameter(
            name=t.name,
            shape=t.shape,
            dtype=t.dtype,
            frozen=t.frozen,
            tied_to=None if t.tied_to is None else tensors[t.tied_to].name,
        )
        for t in tensors
    )


def groups_table(optimizer: Trained, tensors: dict[str, torch.Tensor]) -> tuple[StoredGroup, ...]:
    """Settings, and parameters by name."""
    session = optimizer.session
    return tuple(
        StoredGroup(
            params=tuple(session.reader.name_of(t) for p in group["params"] if (t := tensor_of(p)) is not None),
            numbers=encode({k: v for k, v in group.items() if k != "params"}, tensors, f"group {i}"),
        )
        for i, group in enumerate(optimizer.param_groups)
    )
