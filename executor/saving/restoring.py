"""Restoring: loads a checkpoint of `checkpoint.py` into a prepared model, under the same plan or another.

All errors of a folder are found before anything changes: files that are missing or of another size, another model or
other groups, a newer schema, states that do not cover their tensors.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from executor.contract import tensor_of
from executor.moments.unseen import unseen
from executor.saving.as_json import decode
from executor.saving.checkpoint import together
from executor.saving.generators import set_generators
from executor.saving.manifest import (
    EXTRA,
    Trained,
    check_between_iterations,
    find_checkpoint,
    model_table,
    read_manifest,
)
from executor.saving.tensor_files import TensorFile, piece_buffer
from executor.saving.weights import Weights, some
from executor.session.loop import LOAD
from pstar_sim.core.step import Place
from pstar_sim.errors import CheckpointError, WeightsError

if TYPE_CHECKING:
    from executor.engine import Session

__all__ = ["Restored", "load", "stored_extra"]

log = logging.getLogger("executor")

_SLICE = re.compile(r"(.*)@(\d+)")


@dataclass(frozen=True)
class Restored:
    """Values that a checkpoint gave back beside parameters and states.

    iteration: optimizer steps done when it was saved.
    extra: the value given to `save`.
    note: one line on the loaded checkpoint.
    """

    iteration: int
    extra: Any
    note: str


@dataclass(frozen=True)
class _Piece:
    """Elements from `start` on of one list of one tensor. `name` is the piece's name in the file."""

    file: TensorFile
    name: str
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.file.entries[self.name].numel


@dataclass
class _SoundCheckpoint:
    """A checkpoint whose files all exist and have their original sizes."""

    folder: Path
    manifest: dict[str, Any]
    pieces: dict[tuple[str, str], list[_Piece]] = field(default_factory=dict)  # (list, tensor name)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)


def load(optimizer: Trained, folder: str | Path, *, generators: bool = True) -> Restored:
    """Put parameters, optimizer states, step counts, groups and loss scale of a checkpoint into a prepared model.
    Returns the other values of the checkpoint.

    The plan may differ from the plan under which the checkpoint was saved. On several ranks every rank calls this.
    Raises CheckpointError for a folder that is partial, of another model, or from a newer version, before anything is
    changed; ContractError between a forward and `step()`.

    generators: whether to set the global random number generators (torch, Python, numpy) too, each rank its own.
    """
    session = optimizer.session
    session.loop.require_running()
    ranks = session.ranks
    folder = Path(folder).expanduser()
    opened, weights = together(ranks, f"be loaded from {folder}", functools.partial(_checked, optimizer, folder))
    manifest = opened.manifest
    numbers = [decode(group["numbers"], opened.extra) for group in manifest["groups"]]
    extra = decode(manifest["extra"], opened.extra)
    with session.loop.loading(LOAD), unseen(), torch.no_grad():
        weights.fill(session.arena, session.contents)
        _fill_states(opened, session)
        for tensor in session.contents.steps_taken:
            session.contents.steps_taken[tensor] = int(manifest["updates"].get(session.reader.name_of(tensor), 0))
        for mine, theirs in zip(optimizer.param_groups, numbers):
            mine.update(theirs)
        if session.scaling is not None and manifest["loss_scaling"] is not None:
            session.scaling.load_state_dict(manifest["loss_scaling"])
        session.iterations_before = int(manifest["iteration"]) - session.iteration
        if generators:
            kept = f"random.{0 if ranks is None else ranks.rank}"
            set_generators(
                {name: rows[0].file.read(rows[0].name) for (kind, name), rows in opened.pieces.items() if kind == kept}
            )
    note = f"checkpoint {opened.folder}: iteration {manifest['iteration']}"
    log.info("%s", note)
    return Restored(int(manifest["iteration"]), extra, note)


def _checked(optimizer: Trained, folder: Path) -> tuple[_SoundCheckpoint, Weights]:
    """Make every check that can be made before anything is changed."""
    session = optimizer.session
    check_between_iterations(session, "load")
    opened = _open(folder)
    _check_model(opened, session)
    _check_groups(opened, session, optimizer)
    try:
        weights = Weights(opened.folder)
        weights.match(session.model, session.plan.workload.tensors)
    except WeightsError as error:
        raise CheckpointError(f"checkpoint {opened.folder}: {error}") from error
    _check_states(opened, session)
    return opened, weights


def stored_extra(folder: str | Path) -> Restored:
    """Returns the values of a checkpoint beside parameters and states, without loading it. Raises CheckpointError as
    `load` does for a broken checkpoint."""
    opened = _open(Path(folder).expanduser())
    manifest = opened.manifest
    return Restored(int(manifest["iteration"]), decode(manifest["extra"], opened.extra), f"checkpoint {opened.folder}")


def _open(folder: Path) -> _SoundCheckpoint:
    folder = find_checkpoint(folder)
    manifest = read_manifest(folder)
    opened = _SoundCheckpoint(folder, manifest)
    for name, size in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(
                f"checkpoint {folder} is partial: {name} is missing ({len(manifest['files'])} files belong to it); "
                "copy it whole, or give another checkpoint"
            )
        if file.stat().st_size != size:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} has {file.stat().st_size} bytes, {size} were written; copy it "
                "again, or give another checkpoint"
            )
        if name.startswith("optimizer"):
            _index(opened, _sound(file))
        elif name == EXTRA:
            table = _sound(file)
            opened.extra.update({key: table.read(key) for key in table.entries})
    return opened


def _sound(path: Path) -> TensorFile:
    try:
        return TensorFile(path)
    except WeightsError as error:
        raise CheckpointError(f"checkpoint {path.parent} is damaged: {error}") from error


def _index(opened: _SoundCheckpoint, file: TensorFile) -> None:
    for key in file.entries:
        kind, _, name = key.partition("/")
        cut = _SLICE.fullmatch(name)
        piece = _Piece(file, key, int(cut[2]) if cut else 0)
        opened.pieces.setdefault((kind, cut[1] if cut else name), []).append(piece)


def _check_model(opened: _SoundCheckpoint, session: Session) -> None:
    theirs = {row["name"]: row for row in opened.manifest["tensors"]}
    mine = {row["name"]: row for row in model_table(session.plan.workload.tensors)}
    where = f"checkpoint {opened.folder} is of another model ({opened.manifest.get('model')!r})"
    only_there, only_here = sorted(theirs.keys() - mine.keys()), sorted(mine.keys() - theirs.keys())
    if only_there or only_here:
        parts = [f"only the checkpoint has {some(only_there)}"] if only_there else []
        parts += [f"only the model has {some(only_here)}"] if only_here else []
        raise CheckpointError(f"{where}: {'; '.join(parts)}; build the model that was saved")
    for name, row in mine.items():
        for what in ("shape", "frozen", "tied_to"):
            if row[what] != theirs[name][what]:
                raise CheckpointError(
                    f"{where}: {what} of {name!r} is {theirs[name][what]} in the checkpoint and {row[what]} in the "
                    "model; build the model that was saved"
                )


def _check_groups(opened: _SoundCheckpoint, session: Session, optimizer: Trained) -> None:
    groups = [set(group["params"]) for group in opened.manifest["groups"]]
    name_of = session.reader.name_of
    here = [{name_of(t) for p in g["params"] if (t := tensor_of(p)) is not None} for g in optimizer.param_groups]
    if groups != here:
        raise CheckpointError(
            f"the optimizer groups of checkpoint {opened.folder} ({[len(g) for g in groups]} parameters) are not those "
            f"of this optimizer ({[len(g) for g in here]} parameters); give AdamW the groups it was saved with"
        )


def _wanted_states(session: Session) -> list[tuple[int, str]]:
    lists = session.plan.layout.state_lists
    return [(s.tensor, n) for c in session.plan.layout.chunks if not c.frozen for s in c.slots for n in lists]


def _check_states(opened: _SoundCheckpoint, session: Session) -> None:
    """Check that the checkpoint has every element of each optimizer state."""
    stored = {row["name"]: row["dtype"] for row in opened.manifest["tensors"]}
    for tensor, list_name in _wanted_states(session):
        t = session.plan.workload.tensors[tensor]
        if list_name == "param32" and stored[t.name] == "fp32":
            continue  # the parameter's weights are its master
        reached = 0
        for piece in sorted(opened.pieces.get((list_name, t.name), []), key=lambda piece: piece.start):
            reached = piece.stop if piece.start == reached else -1
        if reached != t.numel:
            raise CheckpointError(
                f"checkpoint {opened.folder} is damaged: {list_name} of {t.name!r} does not cover the tensor's "
                f"{t.numel} elements; give another checkpoint"
            )


def _fill_states(opened: _SoundCheckpoint, session: Session) -> None:
    """Read this rank's part of every state into all places that hold its list. The working copies follow their
    masters."""
    contents, arena, chunk_of = session.contents, session.arena, session.plan.layout.chunk_of
    buffer = piece_buffer()
    by_file: dict[Path, list[tuple[int, str, _Piece]]] = {}
    for tensor, list_name in _wanted_states(session):
        for piece in opened.pieces.get((list_name, session.reader.name_of(tensor)), []):
            by_file.setdefault(piece.file.path, []).append((tensor, list_name, piece))
    for rows in by_file.values():
        rows.sort(key=lambda row: row[2].file.entries[row[2].name].start)
        with rows[0][2].file.opened() as descriptor:
            for tensor, list_name, piece in rows:
                chunk, part = chunk_of[tensor], contents.slots.parts[tensor]
                lists = ("param32", "param") if list_name == "param32" else (list_name,)
                targets = [(p, n) for p in (Place.HOST, Place.GPU) for n in lists if arena.has(p, chunk, n)]
                begin, end = max(piece.start, part.skip), min(piece.stop, part.skip + part.numel)
                if list_name == "param32" and arena.sliced and arena.has(Place.GPU, chunk, "remote"):
                    begin, end = piece.start, piece.stop  # the other ranks' slices are on the gpu too
                if begin >= end:
                    continue
                within = piece.file.pieces(descriptor, piece.name, buffer, begin - piece.start, end - piece.start)
                for first, values in within:
                    for place, name in targets:
                        contents.slots.put(place, tensor, name, values, piece.start + first)
