"""Loads a checkpoint into a prepared model, under the same plan or another.

A folder's errors are found before anything changes. For checksums a host's ranks share a reading of the whole folder. A
load that fails later leaves a session that refuses every act until one ends (`Loop.loading`).
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from executor.contract import tensor_of
from executor.driving.loop import LOAD
from executor.memory.arena import PLACES
from executor.memory.slots import fields_of, list_of
from executor.moments.unseen import unseen
from executor.saving.as_json import decode
from executor.saving.checkpoint import stored_fields, together
from executor.saving.generators import checked_generators
from executor.saving.manifest import (
    EXTRA,
    MANIFEST,
    Manifest,
    Trained,
    check_between_iterations,
    check_files,
    find_checkpoint,
    model_table,
    read_manifest,
)
from executor.saving.tensor_files import TensorFile, piece_buffer
from executor.saving.weights import Weights, some
from pstar_sim.core.step import Place
from pstar_sim.dtypes import MASTER
from pstar_sim.errors import CheckpointError, PstarError, WeightsError
from pstar_sim.workload.optimizers import MASTER_LIST

if TYPE_CHECKING:
    from executor.engine import Session

log = logging.getLogger("executor")

_SLICE = re.compile(r"(.*)@(\d+)")


@dataclass(frozen=True)
class Restored:
    """What a checkpoint gives back beside parameters and states.

    iteration: steps done by then.
    extra: given to `save`.
    note: one line on the checkpoint.
    """

    iteration: int
    extra: Any
    note: str


@dataclass(frozen=True)
class _Piece:
    """From `start` on, of one list of one tensor; `name` is the file's."""

    file: TensorFile
    name: str
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.file.entries[self.name].numel


@dataclass
class _SoundCheckpoint:
    """Files have their original sizes."""

    folder: Path
    manifest: Manifest
    pieces: dict[tuple[str, str], list[_Piece]] = field(default_factory=dict)  # (list, tensor name)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)

    def decoded(self, value: Any, name: str) -> Any:
        """name: the manifest's field. Raises CheckpointError where a tensor is missing."""
        try:
            return decode(value, self.extra)
        except KeyError as error:
            raise CheckpointError(
                f"{self.folder / MANIFEST}: field {name!r} holds the tensor {error}, which {EXTRA} does not; give "
                "another checkpoint"
            ) from error


def load(optimizer: Trained, folder: str | Path, *, generators: bool = True, checksums: bool = True) -> Restored:
    """Put parameters, optimizer states, step counts, groups and loss scale into a prepared model, and return the
    checkpoint's other values.

    The plan may differ; every rank calls this. Raises CheckpointError for a folder that is partial, damaged, of another
    model or groups, or from a newer version, before anything is changed; ContractError between a forward and `step()`.

    generators: set the global random generators (torch, Python, numpy) too, on each rank its own.
    checksums: compare all files' first, which reads the folder once more.
    """
    session = optimizer.session
    session.standstill.require_running()
    ranks = session.ranks
    folder = Path(folder).expanduser()
    what = f"be loaded from {folder}"
    opened = together(ranks, what, lambda: _opened_for(optimizer, folder))
    manifest = opened.manifest
    if checksums:
        sharing = [0] if ranks is None else ranks.on_this_host()
        place = 0 if ranks is None else sharing.index(ranks.rank)
        names = sorted(manifest.files)[place :: len(sharing)]
        together(ranks, what, lambda: check_files(opened.folder, manifest, names))
    values = together(ranks, what, lambda: _checked(opened, session, generators))
    with session.loop.loading(LOAD), unseen(), torch.no_grad():
        together(ranks, what, lambda: _fill(values, optimizer))
    note = f"checkpoint {opened.folder}: iteration {manifest.iteration}"
    if not all(file.xxh3_64 for file in manifest.files.values()):
        note += "; it has no checksums (an earlier version wrote it): damaged values are not found"
    log.info("%s", note)
    return Restored(manifest.iteration, values.extra, note)


@dataclass(frozen=True, kw_only=True)
class _Values:
    opened: _SoundCheckpoint
    weights: Weights
    numbers: list[dict[str, Any]]
    extra: Any
    generators: list[Callable[[], object]]


def _opened_for(optimizer: Trained, folder: Path) -> _SoundCheckpoint:
    session = optimizer.session
    check_between_iterations(session, "load")
    opened = _open(folder)
    _check_model(opened, session)
    _check_groups(opened, session, optimizer)
    return opened


def _checked(opened: _SoundCheckpoint, session: Session, generators: bool) -> _Values:
    _read_headers(opened)
    try:
        weights = Weights(opened.folder)
        weights.match(session.model, session.plan.workload.tensors)
    except WeightsError as error:
        raise CheckpointError(f"checkpoint {opened.folder}: {error}") from error
    foreign = sorted(path.name for path in weights.paths if path.name not in opened.manifest.files)
    if foreign:
        raise CheckpointError(
            f"checkpoint {opened.folder}: {foreign[0]} is not one of its files; remove it, or give another checkpoint"
        )
    _check_states(opened, session)
    return _Values(
        opened=opened,
        weights=weights,
        numbers=[opened.decoded(group.numbers, f"groups[{i}]") for i, group in enumerate(opened.manifest.groups)],
        extra=opened.decoded(opened.manifest.extra, "extra"),
        generators=_generators(opened, session) if generators else [],
    )


def _generators(opened: _SoundCheckpoint, session: Session) -> list[Callable[[], object]]:
    kept = f"random.{0 if session.ranks is None else session.ranks.rank}"
    rows = [pieces[0] for (kind, _), pieces in opened.pieces.items() if kind == kept]
    try:
        return checked_generators({row.name.partition("/")[2]: row.file.read(row.name) for row in rows})
    except PstarError as error:
        raise CheckpointError(f"{rows[0].file.path} is damaged: {error}; give another checkpoint") from error


def _fill(values: _Values, optimizer: Trained) -> None:
    session, manifest = optimizer.session, values.opened.manifest
    try:
        values.weights.fill(session.arena, session.contents)
        _fill_states(values.opened, session)
    except (OSError, WeightsError) as error:
        raise CheckpointError(f"checkpoint {values.opened.folder} was loaded in part: {error}") from error
    for tensor in session.contents.steps_taken:
        session.contents.steps_taken[tensor] = manifest.updates.get(session.reader.name_of(tensor), 0)
    for mine, theirs in zip(optimizer.param_groups, values.numbers):
        mine.update(theirs)
    if session.scaling is not None and manifest.loss_scaling is not None:
        session.scaling.load_state_dict(dataclasses.asdict(manifest.loss_scaling))
    session.iterations_before = manifest.iteration - session.iteration
    for set_generator in values.generators:
        set_generator()


def stored_extra(folder: str | Path) -> Restored:
    """What is beside parameters and states, without loading. Raises CheckpointError as `load` does."""
    opened = _open(Path(folder).expanduser())
    check_files(opened.folder, opened.manifest, opened.manifest.files.keys() & {EXTRA})
    _read_headers(opened)
    extra = opened.decoded(opened.manifest.extra, "extra")
    return Restored(opened.manifest.iteration, extra, f"continued from checkpoint {opened.folder}")


def _open(folder: Path) -> _SoundCheckpoint:
    folder = find_checkpoint(folder)
    opened = _SoundCheckpoint(folder, read_manifest(folder))
    files = opened.manifest.files
    for name, written in files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(
                f"checkpoint {folder} is partial: {name} is missing ({len(files)} files belong to it); copy it whole, "
                "or give another checkpoint"
            )
        if file.stat().st_size != written.bytes:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} has {file.stat().st_size} bytes, {written.bytes} were "
                "written; copy it again, or give another checkpoint"
            )
    return opened


def _read_headers(opened: _SoundCheckpoint) -> None:
    for name in opened.manifest.files:
        file = opened.folder / name
        try:
            if name.startswith("optimizer"):
                _index(opened, TensorFile(file))
            elif name == EXTRA:
                table = TensorFile(file)
                opened.extra.update({key: table.read(key) for key in table.entries})
        except WeightsError as error:
            raise CheckpointError(f"checkpoint {opened.folder} is damaged: {error}") from error


def _index(opened: _SoundCheckpoint, file: TensorFile) -> None:
    for key in file.entries:
        kind, _, name = key.partition("/")
        cut = _SLICE.fullmatch(name)
        piece = _Piece(file, key, int(cut[2]) if cut else 0)
        opened.pieces.setdefault((kind, cut[1] if cut else name), []).append(piece)


def _check_model(opened: _SoundCheckpoint, session: Session) -> None:
    theirs = {row.name: row for row in opened.manifest.tensors}
    mine = {row.name: row for row in model_table(session.plan.workload.tensors)}
    where = f"checkpoint {opened.folder} is of another model ({opened.manifest.model!r})"
    only_there, only_here = sorted(theirs.keys() - mine.keys()), sorted(mine.keys() - theirs.keys())
    if only_there or only_here:
        parts = [f"only the checkpoint has {some(only_there)}"] if only_there else []
        parts += [f"only the model has {some(only_here)}"] if only_here else []
        raise CheckpointError(f"{where}: {'; '.join(parts)}; build the model that was saved")
    for name, row in mine.items():
        for what in ("shape", "frozen", "tied_to"):
            stored, wanted = getattr(theirs[name], what), getattr(row, what)
            if stored != wanted:
                raise CheckpointError(
                    f"{where}: {what} of {name!r} is {stored} in the checkpoint and {wanted} in the model; build the "
                    "model that was saved"
                )


def _check_groups(opened: _SoundCheckpoint, session: Session, optimizer: Trained) -> None:
    groups = [set(group.params) for group in opened.manifest.groups]
    name_of = session.reader.name_of
    here = [{name_of(t) for p in g["params"] if (t := tensor_of(p)) is not None} for g in optimizer.param_groups]
    if groups != here:
        raise CheckpointError(
            f"the optimizer groups of checkpoint {opened.folder} ({[len(g) for g in groups]} parameters) are not those "
            f"of this optimizer ({[len(g) for g in here]} parameters); give AdamW the groups it was saved with"
        )


def _names(lists: Iterable[str]) -> str:
    return " and ".join(sorted(lists)) or "none"


def _wanted_states(session: Session) -> list[tuple[int, str]]:
    layout = session.plan.layout
    return [
        (s.tensor, name)
        for c in layout.chunks
        if not c.frozen
        for s in c.slots
        for name in fields_of(layout.states_of(c.index))
    ]


def _check_states(opened: _SoundCheckpoint, session: Session) -> None:
    theirs, mine = (set(lists) - {MASTER_LIST} for lists in (opened.manifest.states, stored_fields(session.plan)))
    if theirs != mine:
        raise CheckpointError(
            f"checkpoint {opened.folder} is of another optimizer: its states are {_names(theirs)}, those of "
            f"{session.plan.workload.optimizer.name} are {_names(mine)}; plan for the optimizer that was saved"
        )
    stored = {row.name: row.dtype for row in opened.manifest.tensors}
    slots = session.contents.slots
    for tensor, name in _wanted_states(session):
        t = session.plan.workload.tensors[tensor]
        dtype = slots.dtype(slots.chunk_of(tensor), name)
        if name == MASTER_LIST and (stored[t.name] == MASTER or MASTER_LIST not in opened.manifest.states):
            continue  # the parameter's weights are its master
        reached = 0
        for piece in sorted(opened.pieces.get((name, t.name), []), key=lambda piece: piece.start):
            reached = piece.stop if piece.start == reached else -1
            entry = piece.file.entries[piece.name]
            if entry.dtype is None or entry.dtype.is_floating_point != dtype.is_floating_point:
                raise CheckpointError(
                    f"checkpoint {opened.folder} is damaged: {piece.name!r} in {piece.file.path.name} is in "
                    f"{entry.code}, which no state is; give another checkpoint"
                )
        if reached != (numel := prod(slots.shape(tensor, name))):
            raise CheckpointError(
                f"checkpoint {opened.folder} is damaged: {name} of {t.name!r} does not cover the tensor's "
                f"{numel} elements; give another checkpoint"
            )


def _fill_states(opened: _SoundCheckpoint, session: Session) -> None:
    """This rank's part; working copies follow masters."""
    contents, arena, chunk_of = session.contents, session.arena, session.plan.layout.chunk_of
    buffer = piece_buffer()
    by_file: dict[Path, list[tuple[int, str, _Piece]]] = {}
    for tensor, name in _wanted_states(session):
        for piece in opened.pieces.get((name, session.reader.name_of(tensor)), []):
            by_file.setdefault(piece.file.path, []).append((tensor, name, piece))
    for rows in by_file.values():
        rows.sort(key=lambda row: row[2].file.entries[row[2].name].start)
        with rows[0][2].file.opened() as descriptor:
            for tensor, name, piece in rows:
                chunk, part = chunk_of[tensor], contents.slots.part(tensor, name)
                names = (MASTER_LIST, "param") if name == MASTER_LIST else (name,)
                targets = [(p, n) for p in PLACES for n in names if arena.has(p, chunk, list_of(n))]
                begin, end = max(piece.start, part.skip), min(piece.stop, part.skip + part.numel)
                if name == MASTER_LIST and arena.sliced and arena.has(Place.GPU, chunk, "remote"):
                    begin, end = piece.start, piece.stop  # the other ranks' slices are on the gpu too
                if begin >= end:
                    continue
                within = piece.file.pieces(descriptor, piece.name, buffer, begin - piece.start, end - piece.start)
                for first, values in within:
                    for place, target in targets:
                        contents.slots.put(place, tensor, target, values, piece.start + first)
