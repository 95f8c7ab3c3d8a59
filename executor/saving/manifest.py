"""Manifest: the file of a checkpoint that is written last and lists its content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from executor.contract import tensor_of
from executor.saving import whole_folder
from executor.saving.as_json import encode
from pstar_sim.errors import CheckpointError, ContractError
from pstar_sim.version import __version__
from pstar_sim.workload.workload import Tensor

if TYPE_CHECKING:
    from executor.engine import Session

__all__ = [
    "EXTRA",
    "FORMAT",
    "MANIFEST",
    "SCHEMA",
    "Trained",
    "check_between_iterations",
    "find_checkpoint",
    "groups_table",
    "is_checkpoint",
    "model_table",
    "read_manifest",
]

FORMAT, SCHEMA = "pstar-sim checkpoint", 1
MANIFEST = "pstar.json"
EXTRA = "extra.safetensors"
_MANIFEST_FIELDS = {"iteration", "tensors", "states", "updates", "groups", "loss_scaling", "extra", "files"}


class Trained(Protocol):
    """The part of an optimizer that saving and loading use.

    session: the run behind it.
    """

    session: Session
    param_groups: list[dict[str, Any]]


def is_checkpoint(folder: str | Path) -> bool:
    """Returns whether the folder is a complete checkpoint."""
    return (Path(folder) / MANIFEST).is_file()


def find_checkpoint(folder: str | Path) -> Path:
    """Returns the newest complete checkpoint: the folder itself, or the folder beside it if a save was killed between
    two renames."""
    return whole_folder.find(Path(folder).expanduser(), is_checkpoint)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint. Raises CheckpointError if the folder has no usable manifest."""
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {str(folder)!r} is not a folder; give a folder that optimizer.save wrote")
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{str(folder)!r} is not a whole checkpoint: {MANIFEST}, which is written last, is missing; give another "
            "one (plain weights are loaded with prepare(..., weights=FOLDER))"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        known = isinstance(manifest, dict) and manifest["format"] == FORMAT
        schema = manifest["schema"] if known else None
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); give another checkpoint") from error
    if not known or type(schema) is not int:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint; give a folder that optimizer.save wrote")
    if schema > SCHEMA:
        raise CheckpointError(
            f"checkpoint {folder} is of schema {schema}, written by pstar-sim "
            f"{(manifest.get('written_by') or {}).get('pstar-sim')}; this version ({__version__}) reads up "
            f"to {SCHEMA}: upgrade pstar-sim"
        )
    missing = _MANIFEST_FIELDS - manifest.keys()
    if missing:
        raise CheckpointError(f"{path} has no field {sorted(missing)[0]!r}; give another checkpoint")
    files = manifest["files"]
    if not isinstance(files, dict):
        raise CheckpointError(f"{path}: 'files' must name the files of the checkpoint; give another checkpoint")
    found: dict[str, Any] = manifest
    return found


def check_between_iterations(session: Session, what: str) -> None:
    """Raise ContractError if an iteration is open."""
    if session.cursor.inside or (session.now.arrived and not session.cursor.stepped):
        raise ContractError(
            f"optimizer.{what} inside an iteration, whose gradients are in the chunks; call it after optimizer.step() "
            "and before the next forward"
        )


def model_table(tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Returns the parameters of the model as the table in a checkpoint."""
    return [
        {
            "name": t.name,
            "shape": list(t.shape),
            "dtype": t.dtype,
            "frozen": t.frozen,
            "tied_to": None if t.tied_to is None else tensors[t.tied_to].name,
        }
        for t in tensors
    ]


def groups_table(optimizer: Trained, tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Returns the parameter groups: their settings, and their parameters by name."""
    session = optimizer.session
    return [
        {
            "params": [session.reader.name_of(t) for p in group["params"] if (t := tensor_of(p)) is not None],
            "numbers": encode({k: v for k, v in group.items() if k != "params"}, tensors, f"group {i}"),
        }
        for i, group in enumerate(optimizer.param_groups)
    ]
