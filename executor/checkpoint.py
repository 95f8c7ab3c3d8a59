"""Checkpoints: everything a run needs to go on, in a folder that transformers loads too.

    config.json                   of a transformers model
    model*.safetensors (+ index)  weights in the working dtype, by their names in the state_dict
    optimizer-*.safetensors       "momentum/NAME", "variance/NAME", "param32/NAME" (where the weights are narrower),
                                  and the states of the random number generators
    extra.safetensors             tensors of the user's `extra`, if any
    pstar.json                    schema, iteration, parameters, groups, files with their sizes; written last

All is by tensor name and nothing by chunk, so that a run goes on under another plan, policy, budget, chunk size or
number of ranks. Under the same plan it goes on bit by bit.

[Note: saving takes no memory] Values are written from the chunks where they lie; what has to be cast or comes from a
device goes through one buffer of 16 MiB. Reading (`restoring.py`) is the reverse. A save waits for the updates that are
still in flight.

[Note: slices in a checkpoint] A rank writes what it holds of a list: "momentum/NAME@1024" begins at element 1024 of the
tensor. A reader takes the elements it wants from whatever pieces there are.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import pstar_sim
from executor import whole_folder
from executor.as_json import encode
from executor.generators import generator_states
from executor.measure import unseen
from executor.tensor_files import Row, piece_buffer, write_tensor_file
from executor.weights import INDEX, persistent_buffers
from pstar_sim.core.step import Place
from pstar_sim.errors import CheckpointError, ContractError
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Tensor

if TYPE_CHECKING:
    from executor.engine import Session
    from executor.optimizer import OffloadedAdamW

__all__ = ["find_checkpoint", "is_checkpoint", "save"]

log = logging.getLogger("executor")

FORMAT, SCHEMA = "pstar-sim checkpoint", 1
MANIFEST = "pstar.json"
EXTRA = "extra.safetensors"
SHARD_BYTES = 5 * 10**9
_OURS = re.compile(r"(model|optimizer)(-[\w-]+)?\.safetensors(\.index\.json)?|extra\.safetensors|pstar\.json")


def is_checkpoint(folder: str | Path) -> bool:
    """A whole checkpoint was put there."""
    return (Path(folder) / MANIFEST).is_file()


def find_checkpoint(folder: str | Path) -> Path:
    """Where the newest whole checkpoint of the folder lies: the folder, or beside it if a save was killed between two
    renames."""
    return whole_folder.find(Path(folder).expanduser(), is_checkpoint)


def save(optimizer: OffloadedAdamW, folder: str | Path, *, extra: Any = None, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write the run's state to `folder`, whole or not at all; an earlier checkpoint there stays until then.

    Files in the folder that are not a checkpoint's (a tokenizer) stay. extra: anything of numbers, texts, tensors,
    lists and dicts that `load` is to give back (the state_dict of a scheduler, the position in the data). shard_bytes:
    of one file, about. Raises ContractError between a forward and `step()`, CheckpointError where the folder is
    something else, the disk has no room, or writing fails; nothing has changed then.
    """
    session = optimizer.session
    session.require_running()
    check_between_iterations(session, "save")
    folder = Path(folder).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder} cannot be written: it is a file; give a folder")
    if folder.is_dir() and any(folder.iterdir()) and not is_checkpoint(folder):
        raise CheckpointError(
            f"checkpoint {folder} cannot be written: the folder holds other files and no checkpoint; give an empty or "
            "new one"
        )
    _check_extra_state(session)
    tensors: dict[str, torch.Tensor] = {}
    kept = encode(extra, tensors, "extra")
    groups = _groups(optimizer, tensors)
    with session.still(), unseen(), torch.no_grad():
        weights = _shards(_weight_rows(session), shard_bytes)
        generators = [_row(f"random/{name}", state) for name, state in generator_states().items()]
        states = _shards([*generators, *_state_rows(session)], shard_bytes)
        extras = [_row(name, tensor) for name, tensor in tensors.items()]
        needed = sum(row.size_bytes for rows in (*weights, *states, extras) for row in rows)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder.parent).free
            if needed > free:
                raise CheckpointError(
                    f"checkpoint {folder} is not written: it needs {format_bytes(needed)}, the disk has "
                    f"{format_bytes(free)} left; make room or save elsewhere"
                )
            temporary = whole_folder.begin(folder)
            buffer = piece_buffer()
            files = _write_shards(temporary, "model", weights, buffer)
            files |= _write_shards(temporary, "optimizer", states, buffer)
            if extras:
                files[EXTRA] = write_tensor_file(temporary / EXTRA, extras, buffer)
            _save_config(session, temporary)
            manifest = {
                "format": FORMAT,
                "schema": SCHEMA,
                "written_by": {"pstar-sim": pstar_sim.__version__, "torch": torch.__version__},
                "model": session.plan.workload.model,
                "iteration": session.iterations_before + session.iteration,
                "tensors": model_table(session.plan.workload.tensors),
                "states": list(session.plan.layout.state_lists),
                "updates": {
                    session.name_of(t): n for t, n in session.contents.steps_taken.items() if not _frozen(session, t)
                },
                "groups": groups,
                "loss_scaling": None if session.scaling is None else session.scaling.state_dict(),
                "extra": kept,
                "files": files,
            }
            _write_text(temporary / MANIFEST, json.dumps(manifest, indent=1) + "\n")
            ours = {entry.name for entry in folder.iterdir() if _OURS.fullmatch(entry.name)} if folder.is_dir() else ()
            whole_folder.finish(folder, ours)
        except OSError as error:
            whole_folder.abandon(folder)
            raise CheckpointError(
                f"checkpoint {folder} is not written: {error.strerror or error}; what was there before is still there"
            ) from error
    log.info("checkpoint of iteration %d: %s in %s", manifest["iteration"], format_bytes(needed), folder)
    return folder


def check_between_iterations(session: Session, what: str) -> None:
    """Raise ContractError where gradients of an iteration are under way."""
    if session.cursor >= 0 or session.demand.active or (session.arrived and not session.stepped):
        raise ContractError(
            f"optimizer.{what} inside an iteration, whose gradients are in the chunks; call it after optimizer.step() "
            "and before the next forward"
        )


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
    """Index of each tensor that has memory -> all its names, its own first."""
    names: dict[int, list[str]] = {}
    for index, t in enumerate(tensors):
        names.setdefault(index if t.tied_to is None else t.tied_to, []).append(t.name)
    return names


def _row(name: str, value: torch.Tensor) -> Row:
    return Row(name, value.dtype, tuple(value.shape), lambda: [value])


def _weight_rows(session: Session) -> list[Row]:
    """Every parameter's current value, under the name that transformers keeps of tied ones, and every buffer that a
    state_dict holds."""
    derived = getattr(session.model, "_tied_weights_keys", None) or ()
    rows = []
    for index, names in _own(session.plan.workload.tensors).items():
        name = next((n for n in names if n not in derived), names[0])
        dtype = session.arena.dtype(session.plan.layout.chunk_of[index], "param")
        rows.append(Row(name, dtype, session.plan.workload.tensors[index].shape, _value_of(session, index)))
    for name, (module, key) in persistent_buffers(session.model).items():
        buffer = module._buffers[key]
        assert buffer is not None
        rows.append(_row(name, buffer))
    return rows


def _value_of(session: Session, tensor: int) -> Callable[[], Iterable[torch.Tensor]]:
    def pieces() -> Iterable[torch.Tensor]:
        contents, arena, chunk = session.contents, session.arena, session.plan.layout.chunk_of[tensor]
        state = contents.chunks[chunk]
        for place in (Place.HOST, Place.GPU):
            if place in state.current and tensor not in state.where(place, "param"):
                return [contents.slot(place, tensor, "param")]
        for place in (Place.HOST, Place.GPU):
            if arena.has(place, chunk, "param32"):
                return [contents.slot(place, tensor, "param32")]
        raise AssertionError(f"no place holds the value of {session.name_of(tensor)!r}")

    return pieces


def _state_rows(session: Session) -> list[Row]:
    """Every optimizer state, chunk by chunk; of fp32 parameters the weights are the master."""
    rows = []
    for chunk in session.plan.layout.chunks:
        for slot in () if chunk.frozen else chunk.slots:
            t = session.plan.workload.tensors[slot.tensor]
            for name in session.plan.layout.state_lists:
                if name == "param32" and t.dtype == "fp32":
                    continue
                dtype = session.arena.dtype(chunk.index, name)
                rows.append(Row(f"{name}/{t.name}", dtype, t.shape, _state_of(session, slot.tensor, name)))
    return rows


def _state_of(session: Session, tensor: int, name: str) -> Callable[[], Iterable[torch.Tensor]]:
    def pieces() -> Iterable[torch.Tensor]:
        chunk = session.plan.layout.chunk_of[tensor]
        place = Place.HOST if session.arena.has(Place.HOST, chunk, name) else Place.GPU
        return [session.contents.slot(place, tensor, name)]

    return pieces


def _shards(rows: Sequence[Row], shard_bytes: int) -> list[list[Row]]:
    """Rows in files of about `shard_bytes`; in each, wide dtypes first, so that every tensor is aligned."""
    shards: list[list[Row]] = [[]]
    size = 0
    for row in rows:
        if shards[-1] and size + row.size_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(row)
        size += row.size_bytes
    return [sorted(rows, key=lambda row: -row.dtype.itemsize) for rows in shards]


def _write_shards(folder: Path, stem: str, shards: Sequence[Sequence[Row]], buffer: torch.Tensor) -> dict[str, int]:
    """File name -> bytes. Several files of weights get the index that transformers looks for."""
    count = len(shards)
    names = [
        f"{stem}-{i:05d}-of-{count:05d}.safetensors" if count > 1 else f"{stem}.safetensors"
        for i in range(1, count + 1)
    ]
    files = {
        name: write_tensor_file(folder / name, rows, buffer, {"format": "pt"}) for name, rows in zip(names, shards)
    }
    if stem == "model" and count > 1:
        index = {
            "metadata": {"total_size": sum(row.size_bytes for rows in shards for row in rows)},
            "weight_map": {row.name: name for name, rows in zip(names, shards) for row in rows},
        }
        files[INDEX] = _write_text(folder / INDEX, json.dumps(index, indent=1) + "\n")
    return files


def _save_config(session: Session, folder: Path) -> None:
    """What from_pretrained needs beside the weights."""
    for config in (getattr(session.model, "config", None), getattr(session.model, "generation_config", None)):
        to_json = getattr(config, "to_json_string", None)
        if to_json is None:
            continue
        name = "config.json" if config is session.model.config else "generation_config.json"
        values = json.loads(to_json())
        if name == "config.json":
            values["architectures"] = [type(session.model).__name__]
            values["dtype"] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[session.plan.workload.dtype]
        _write_text(folder / name, json.dumps(values, indent=2, sort_keys=True) + "\n")


def _write_text(path: Path, text: str) -> int:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return len(text.encode())


def model_table(tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    """The model as a checkpoint knows it."""
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


def _groups(optimizer: OffloadedAdamW, tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Parameter groups: their numbers, and their parameters by name."""
    session = optimizer.session
    return [
        {
            "params": [session.name_of(p._tensor) for p in group["params"] if hasattr(p, "_tensor")],
            "numbers": encode({k: v for k, v in group.items() if k != "params"}, tensors, f"group {i}"),
        }
        for i, group in enumerate(optimizer.param_groups)
    ]
