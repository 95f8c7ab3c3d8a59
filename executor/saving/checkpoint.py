"""Checkpoints: folders from which a run continues, and which transformers loads too.

    config.json                   of a transformers model
    model*.safetensors (+ index)  weights in the working dtype, by their names in the state_dict
    optimizer-*.safetensors       "momentum/NAME", "variance/NAME" and so on: each field of a list (`memory.slots`);
                                  "param32/NAME" (where the weights are narrower), and the states of the random number
                                  generators
    extra.safetensors             tensors of the user's `extra`, if any
    pstar.json                    schema, iteration, parameters, groups, files with their sizes and checksums, and a
                                  checksum of its own; written last

Everything is stored by tensor name, not by chunk, so a run can continue under another plan or number of ranks.

[Note: saving takes no memory] Values are written from the chunks, cast or from a device through one buffer of 16 MiB,
after the updates in flight.

[Note: slices in a checkpoint] A rank writes its part: "momentum/NAME@1024" begins at element 1024.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from executor.devices.torch_private import buffer_table
from executor.distributed.ranks import SAVES
from executor.memory.slots import fields_of
from executor.moments.unseen import unseen
from executor.saving import whole_folder
from executor.saving.as_json import encode
from executor.saving.generators import generator_states
from executor.saving.manifest import (
    EXTRA,
    MANIFEST,
    Manifest,
    StoredScale,
    Trained,
    check_between_iterations,
    groups_table,
    is_checkpoint,
    manifest_text,
    model_table,
)
from executor.saving.tensor_files import (
    StoredFile,
    TensorToStore,
    piece_buffer,
    write_tensor_file,
    write_text_file,
)
from executor.saving.weights import INDEX, persistent_buffers
from pstar_sim.core.plan import Plan
from pstar_sim.dtypes import BASES, DTYPES
from pstar_sim.errors import CheckpointError, PstarError
from pstar_sim.schema.records import read_record
from pstar_sim.units import format_bytes
from pstar_sim.version import __version__
from pstar_sim.workload.optimizers import MASTER_LIST, MASTERS
from pstar_sim.workload.workload import Tensor

if TYPE_CHECKING:
    from executor.distributed.ranks import Ranks
    from executor.engine import Session

log = logging.getLogger("executor")

SHARD_BYTES = 5 * 10**9
_OURS = re.compile(r"(model|optimizer)(-[\w-]+)?\.safetensors(\.index\.json)?|extra\.safetensors|pstar\.json")


def save(optimizer: Trained, folder: str | Path, *, extra: Any = None, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write the run's state to `folder`, atomically, and return it. An earlier checkpoint stays until the new one is
    complete, as do other files (a tokenizer).

    extra: for `load` to give back: numbers, texts, tensors, lists and dicts (a scheduler's state_dict, the position in
        the data).
    shard_bytes: approximate, of one file.

    Every rank calls it, with one folder that all see; the first rank's `extra` is kept. Raises ContractError between a
    forward and `step()`, CheckpointError if the folder holds other files, the disk has no room, or writing fails (on
    any rank).
    """
    session = optimizer.session
    session.standstill.require_running()
    folder = Path(folder).expanduser().absolute()
    ranks = session.ranks
    first = ranks is None or ranks.rank == 0
    saving = f"be saved in {folder}"
    with session.still(), unseen(), torch.no_grad():
        work = together(ranks, saving, lambda: _plan_work(optimizer, folder, extra, shard_bytes))
        needed = sum(ranks.come_to(SAVES, work.size_bytes)) if ranks is not None else work.size_bytes
        try:
            temporary = together(ranks, saving, lambda: _begin(folder, int(needed), first))
            files = together(ranks, saving, lambda: _write(session, work, temporary))
            last = functools.partial(_finish, work, folder, temporary, files)
            together(ranks, saving, last if first else lambda: None)
        except BaseException:
            if first:
                whole_folder.abandon(folder)
            raise
    log.info("checkpoint of iteration %d: %s in %s", work.manifest.iteration, format_bytes(int(needed)), folder)
    return folder


T = TypeVar("T")


def together(ranks: Ranks | None, what: str, action: Callable[[], T]) -> T:
    """On every rank, until all are done; an error on one raises on all, OSError as CheckpointError."""
    error: PstarError | None = None
    result: Any = None
    try:
        result = action()
    except OSError as caught:
        error = CheckpointError(
            f"the checkpoint cannot {what}: {caught.strerror or caught} ({caught.filename or 'while writing'}); what "
            "was there before is still there"
        )
    except PstarError as caught:
        error = caught
    failed: list[int] = []
    if ranks is not None:
        failed = [r for r, bad in enumerate(ranks.come_to(SAVES, float(error is not None))) if bad]
    if error is not None:
        raise error
    if failed:
        raise CheckpointError(f"the checkpoint cannot {what}: rank {failed[0]} failed, see its own message")
    made: T = result
    return made


@dataclass(frozen=True, kw_only=True)
class _Writing:
    """A rank's: rows by file, and the manifest without files.

    rows_read: of weights; on several ranks reading takes all of them.
    """

    weights: list[list[TensorToStore]]
    states: list[list[TensorToStore]]
    extras: list[TensorToStore]
    manifest: Manifest
    rows_read: set[str]

    @property
    def size_bytes(self) -> int:
        return sum(row.size_bytes for rows in (*self.weights, *self.states, self.extras) for row in rows)


def _plan_work(optimizer: Trained, folder: Path, extra: Any, shard_bytes: int) -> _Writing:
    """Errors that show before writing are raised here."""
    session = optimizer.session
    check_between_iterations(session, "save")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder} cannot be written: it is a file; give a folder")
    if folder.is_dir() and any(folder.iterdir()) and not is_checkpoint(folder):
        raise CheckpointError(
            f"checkpoint {folder} cannot be written: the folder holds other files and no checkpoint; give an empty or "
            "new one"
        )
    _check_extra_state(session)
    rank = 0 if session.ranks is None else session.ranks.rank
    tensors: dict[str, torch.Tensor] = {}
    rows_read: set[str] = set()
    generators = [_row(f"random.{rank}/{name}", state) for name, state in generator_states().items()]
    states = _state_rows(session) if session.contents.sliced or rank == 0 else []
    return _Writing(
        weights=_shards([_noted(row, rows_read) for row in _weight_rows(session)], shard_bytes),
        states=_shards([*generators, *states], shard_bytes),
        manifest=Manifest(
            written_by={"pstar-sim": __version__, "torch": torch.__version__},
            model=session.plan.workload.model,
            iteration=session.iterations_before + session.iteration,
            ranks=1 if session.ranks is None else session.ranks.count,
            tensors=model_table(session.plan.workload.tensors),
            states=stored_fields(session.plan),
            updates={
                session.reader.name_of(t): n for t, n in session.contents.steps_taken.items() if not _frozen(session, t)
            },
            groups=groups_table(optimizer, tensors),
            loss_scaling=None if session.scaling is None else read_record(StoredScale, session.scaling.state_dict()),
            extra=encode(extra, tensors, "extra"),
            files={},
        ),
        extras=[_row(name, tensor) for name, tensor in tensors.items()],
        rows_read=rows_read,
    )


def _noted(row: TensorToStore, rows_read: set[str]) -> TensorToStore:
    def pieces() -> Iterable[torch.Tensor]:
        rows_read.add(row.name)
        return row.pieces()

    return TensorToStore(row.name, row.dtype, row.shape, pieces)


def _begin(folder: Path, needed_bytes: int, first: bool) -> Path:
    if not first:
        return whole_folder.temporary(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if needed_bytes > free:
        raise CheckpointError(
            f"checkpoint {folder} is not written: it needs {format_bytes(needed_bytes)}, the disk has "
            f"{format_bytes(free)} left; make room or save elsewhere"
        )
    return whole_folder.begin(folder)


def _write(session: Session, work: _Writing, folder: Path) -> dict[str, StoredFile]:
    """The first rank writes the weights, with the others' parts. Each writes its states, and the others a list of their
    files for the first."""
    buffer = piece_buffer()
    ranks = session.ranks
    if ranks is not None and ranks.rank:
        for row in (row for rows in work.weights for row in rows):
            row.pieces()
        files = _write_shards(folder, f"optimizer-rank{ranks.rank}", work.states, buffer)
        rows = {name: dataclasses.asdict(file) for name, file in files.items()}
        write_text_file(_list_of(folder, ranks.rank), json.dumps(rows))
        return files
    try:
        files = _write_shards(folder, "model", work.weights, buffer)
    except OSError:
        for row in (row for rows in work.weights for row in rows):
            if row.name not in work.rows_read:
                row.pieces()  # the other ranks wait for this rank's part
        raise
    files |= _write_shards(folder, "optimizer" if ranks is None else "optimizer-rank0", work.states, buffer)
    if work.extras:
        files[EXTRA] = write_tensor_file(folder / EXTRA, work.extras, buffer)
    _save_config(session, folder)
    return files


def _list_of(folder: Path, rank: int) -> Path:
    return folder / f"files-rank{rank}.json"


def _finish(work: _Writing, folder: Path, temporary: Path, files: Mapping[str, StoredFile]) -> None:
    listed = dict(files)
    for rank in range(1, work.manifest.ranks):
        path = _list_of(temporary, rank)
        if not path.is_file():
            raise CheckpointError(
                f"checkpoint {folder} is not written: the first rank does not see the files of rank {rank}; save to a "
                "folder that all ranks see"
            )
        listed |= {name: StoredFile(**row) for name, row in json.loads(path.read_text(encoding="utf-8")).items()}
        path.unlink()
    write_text_file(temporary / MANIFEST, manifest_text(dataclasses.replace(work.manifest, files=listed)))
    ours = {entry.name for entry in folder.iterdir() if _OURS.fullmatch(entry.name)} if folder.is_dir() else ()
    whole_folder.finish(folder, ours)


def _check_extra_state(session: Session) -> None:
    for name, module in session.model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            raise CheckpointError(
                f"module {name or '<root>'!r} ({type(module).__name__}) has a get_extra_state(), which a checkpoint "
                "here does not hold; give it in save(extra=...) and put it back after load"
            )


def _frozen(session: Session, tensor: int) -> bool:
    return session.plan.workload.tensors[tensor].frozen


def _own(tensors: Sequence[Tensor]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for index, t in enumerate(tensors):
        names.setdefault(index if t.tied_to is None else t.tied_to, []).append(t.name)
    return names


def _row(name: str, value: torch.Tensor) -> TensorToStore:
    return TensorToStore(name, value.dtype, tuple(value.shape), lambda: [value])


def _weight_rows(session: Session) -> list[TensorToStore]:
    """Every parameter and every buffer of a state_dict, without matrices of a quantised base, with which a model is
    loaded. Of tied names, the one that transformers keeps."""
    derived = getattr(session.model, "_tied_weights_keys", None) or ()
    rows = []
    for index, names in _own(session.plan.workload.tensors).items():
        if session.plan.workload.tensors[index].dtype in BASES:
            continue
        name = next((n for n in names if n not in derived), names[0])
        dtype = session.arena.dtype(session.plan.layout.chunk_of[index], "param")
        rows.append(TensorToStore(name, dtype, session.plan.workload.tensors[index].shape, _value_of(session, index)))
    for name, (module, key) in persistent_buffers(session.model).items():
        buffer = buffer_table(module)[key]
        assert buffer is not None
        rows.append(_row(name, buffer))
    return rows


def _value_of(session: Session, tensor: int) -> Callable[[], Iterable[torch.Tensor]]:
    def pieces() -> Iterable[torch.Tensor]:
        contents = session.contents
        place, list_name = contents.values.source(contents.slots.chunk_of(tensor), (tensor,))
        return [whole_of(session, tensor, contents.slots.at(place, tensor, list_name))]

    return pieces


def whole_of(session: Session, tensor: int, part: torch.Tensor, field: str = "param") -> torch.Tensor:
    return session.contents.exchange.joined(tensor, part, field) if session.contents.sliced else part


def stored_fields(plan: Plan) -> tuple[str, ...]:
    """Fields of the optimizer's lists (`memory.slots`) that have files in a checkpoint."""
    own = plan.workload.optimizer.masters == MASTERS[1]
    fields = dict.fromkeys(field for states in plan.workload.optimizer.all_states for field in fields_of(states))
    return tuple([field for field in fields if not (own and field == MASTER_LIST)])


def _state_rows(session: Session) -> list[TensorToStore]:
    """Chunk by chunk and list by list, so that a list on disks is read once; own masters are with the weights."""
    rows = []
    for chunk in session.plan.layout.chunks:
        for field in () if chunk.frozen else fields_of(session.plan.layout.states_of(chunk.index)):
            if field == MASTER_LIST and session.plan.layout.is_own_master(chunk.index):
                continue
            for slot in chunk.slots:
                t = session.plan.workload.tensors[slot.tensor]
                slots = session.contents.slots
                part, shape = slots.part(slot.tensor, field), slots.shape(slot.tensor, field)
                whole = part.numel == prod(shape)
                if part.numel or whole:
                    key = f"{field}/{t.name}" if whole else f"{field}/{t.name}@{part.skip}"
                    shape, dtype = shape if whole else (part.numel,), slots.dtype(chunk.index, field)
                    rows.append(TensorToStore(key, dtype, shape, state_of(session, slot.tensor, field)))
    return rows


def state_of(session: Session, tensor: int, field: str) -> Callable[[], Iterable[torch.Tensor]]:
    def pieces() -> Iterable[torch.Tensor]:
        return [session.contents.slots.source(tensor, field)]

    return pieces


def _shards(rows: Sequence[TensorToStore], shard_bytes: int) -> list[list[TensorToStore]]:
    """Wide dtypes first, so that every tensor is aligned."""
    shards: list[list[TensorToStore]] = [[]]
    size = 0
    for row in rows:
        if shards[-1] and size + row.size_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(row)
        size += row.size_bytes
    return [sorted(rows, key=lambda row: -row.dtype.itemsize) for rows in shards]


def _write_shards(
    folder: Path, stem: str, shards: Sequence[Sequence[TensorToStore]], buffer: torch.Tensor
) -> dict[str, StoredFile]:
    count = len(shards)
    ends = [f"-{i:05d}-of-{count:05d}" for i in range(1, count + 1)] if count > 1 else [""]
    names = [f"{stem}{end}.safetensors" for end in ends]
    files = {
        name: write_tensor_file(folder / name, rows, buffer, {"format": "pt"}) for name, rows in zip(names, shards)
    }
    if stem == "model" and count > 1:
        index = {
            "metadata": {"total_size": sum(row.size_bytes for rows in shards for row in rows)},
            "weight_map": {row.name: name for name, rows in zip(names, shards) for row in rows},
        }
        files[INDEX] = write_text_file(folder / INDEX, json.dumps(index, indent=1) + "\n")
    return files


def _save_config(session: Session, folder: Path) -> None:
    for config in (getattr(session.model, "config", None), getattr(session.model, "generation_config", None)):
        to_json = getattr(config, "to_json_string", None)
        if to_json is None:
            continue
        name = "config.json" if config is session.model.config else "generation_config.json"
        values = json.loads(to_json())
        if name == "config.json":
            values["architectures"] = [type(session.model).__name__]
            values["dtype"] = DTYPES[session.plan.workload.dtype].torch_name
        write_text_file(folder / name, json.dumps(values, indent=2, sort_keys=True) + "\n")
