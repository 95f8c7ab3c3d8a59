"""Optimizer states in a file that a plain optimizer loads, as `torch.save` writes it: a plain Trainer goes on from it,
without masters.

[Note: a state dict without memory] `optimizer.state_dict()` copies every state, for which a full host has no room. So
torch writes a state dict of fake tensors, whose values are then written at their places from the chunks, through one
buffer.
"""

from __future__ import annotations

import functools
import os
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from executor.devices.rules import RULES, STEP
from executor.moments.unseen import unseen
from executor.saving.checkpoint import state_of, together, whole_of
from executor.saving.manifest import Trained
from executor.saving.tensor_files import piece_buffer, write_elements, write_whole
from pstar_sim.errors import CheckpointError

if TYPE_CHECKING:
    from executor.engine import Session

_LOCAL_HEADER = struct.Struct("<26xHH")  # of a member of a zip file: lengths of its name and of its extra field


def write_plain_states(optimizer: Trained, path: Path) -> None:
    """Every rank calls this, and the first writes. Raises CheckpointError."""
    session = optimizer.session
    first = session.ranks is None or session.ranks.rank == 0
    values: list[_Value] = []  # each tensor in the file, in its order
    rules = [RULES[session.plan.layout.states_of(c.index).name] for c in session.plan.layout.chunks]
    constants = {key: constant() for rule in rules for key, constant in rule.constants.items()}

    def fake(tensor: int, field: str) -> torch.Tensor:
        if field in constants:
            shape, dtype = tuple(constants[field].shape), constants[field].dtype
        else:
            shape, dtype = _form(session, tensor, field)
        values.append((dtype, functools.partial(_parts, session, tensor, field, constants)))
        return torch.empty(shape, dtype=dtype)

    with session.still(), unseen(), torch.no_grad():
        with FakeTensorMode():
            packed = optimizer.packed(fake)
        for action in (_write_without_values, _write_values) if first else (_nothing, _give_parts):
            together(session.ranks, f"be saved in {path}", functools.partial(action, path, packed, values))


_Value = tuple[torch.dtype, Callable[[], list[torch.Tensor]]]
_Values = Sequence[_Value]


def _form(session: Session, tensor: int, field: str) -> tuple[tuple[int, ...], torch.dtype]:
    if field == STEP:
        return (), torch.float32
    slots = session.contents.slots
    dtype = slots.dtype(slots.chunk_of(tensor), field)
    return slots.shape(tensor, field), torch.float32 if dtype.is_floating_point else dtype


def _nothing(path: Path, packed: Mapping[str, Any], values: _Values) -> None:
    """The first rank makes the file."""


def _write_without_values(path: Path, packed: Mapping[str, Any], values: _Values) -> None:
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(packed, path)
    except RuntimeError as error:  # torch's writer
        raise CheckpointError(f"{path} cannot be written: {str(error).splitlines()[0]}") from error


def _write_values(path: Path, packed: Mapping[str, Any], values: _Values) -> None:
    """Where writing fails, others still wait for this rank's part."""
    buffer = piece_buffer()
    left = iter(values)
    try:
        places = _places(path)
        assert len(places) == len(values)
        with path.open("r+b", buffering=0) as file:
            write = functools.partial(write_whole, file.fileno())
            for place, (dtype, parts) in zip(places, left):
                file.seek(place)
                for part in parts():
                    write_elements(write, part, dtype, buffer)
            os.fsync(file.fileno())
    except OSError:
        _give_parts(path, packed, tuple(left))
        raise


def _give_parts(path: Path, packed: Mapping[str, Any], values: _Values) -> None:
    for _, parts in values:
        parts()


def _parts(session: Session, tensor: int, field: str, constants: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    if field in constants:
        return [constants[field]]
    if field == STEP:
        return [torch.tensor(float(session.contents.steps_taken[tensor]))]
    return [whole_of(session, tensor, part, field) for part in state_of(session, tensor, field)()]


def _places(path: Path) -> list[int]:
    places: dict[int, int] = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for member in archive.infolist():
            folder, _, name = member.filename.rpartition("/")
            if folder.endswith("/data"):
                file.seek(member.header_offset)
                header = file.read(_LOCAL_HEADER.size)
                places[int(name)] = member.header_offset + len(header) + sum(_LOCAL_HEADER.unpack(header))
    return [place for _, place in sorted(places.items())]
