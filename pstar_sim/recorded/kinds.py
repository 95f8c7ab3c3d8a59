"""What a snapshot's blocks are: parameters, gradients, optimizer states, buffers, or non-model data.

[Note: how a block is named] By the first that says something:

1. the recorder's category (`category`, `user_metadata`); CHUNKS of a plan's run; a cuBLAS workspace by its size is a
   buffer.
2. for blocks of the recording, the calls that allocated it: of an optimizer, of a module that is built or moved, of a
   forward; no calls mean the backward, as autograd threads have none in Python;
3. and how long it lives. What an optimizer allocated for good is a state; what the backward allocated is a gradient
   where the optimizer frees it, or where it lives across the optimizer's step and not across `zero_grad`; what a
   forward or backward allocated for good (a library's workspace) is a buffer. All that comes and goes is non-model
   data, and so is what lives at the dump and whose calls allocated other blocks that ended, but for what a forward left
   across the optimizer's step;
4. for older blocks, with the job's tensors, their sizes: in the bytes of a parameter per element they
   are the parameter, in those of fp32 a state. Without the job, or by another size, the block stays UNKNOWN.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.effects import NON_MODEL
from pstar_sim.dtypes import MASTER
from pstar_sim.recorded.snapshot import ROUND_BYTES, DeviceHistory, Frame, is_torch
from pstar_sim.workload.workload import Workload

UNKNOWN, CHUNKS = "unknown", "chunks"
IN_CHUNKS = ("states", "param", "grad")
KINDS = (*IN_CHUNKS, CHUNKS, "buffer", NON_MODEL, UNKNOWN)
_STATES, _PARAM, _GRAD, _CHUNKS, _BUFFER, _TIDE, _UNKNOWN = range(len(KINDS))

_TAGS = (
    ("optim", _STATES), ("state", _STATES), ("moment", _STATES), ("param", _PARAM), ("weight", _PARAM),
    ("grad", _GRAD), ("buffer", _BUFFER), ("act", _TIDE), ("temp", _TIDE), ("input", _TIDE), ("autograd", _TIDE),
)  # fmt: skip
"""Part of a category's name -> kind, in torch's words and people's."""

_CUBLAS_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
"""A workspace of cuBLAS per handle and stream, as torch sets it up (":4096:2:16:8"). Its calls are those of the first
product, whatever that is part of."""

_OF_CHUNKS = "executor/devices/cuda_blocks.py"
_BUILDS = {"__init__", "reset_parameters", "_apply", "to", "cuda", "to_empty", "load_state_dict", "from_pretrained"}
_BACKWARD = {"backward", "_engine_run_backward", "grad"}


class _Calls(NamedTuple):
    optimizer: bool
    backward: bool
    forward: bool
    builds: bool
    chunks: bool

    @classmethod
    def of(cls, stack: Sequence[Frame]) -> _Calls:
        names, files = {frame.function for frame in stack}, [f.file.replace(_BACK, "/") for f in stack]
        optimizer = any("/optim/" in file for file in files) or "optimizer_step" in names
        backward = not stack or bool(names & _BACKWARD)
        forward = any(name.startswith("forward") for name in names)
        chunks = any(file.endswith(_OF_CHUNKS) for file in files)
        return cls(optimizer, backward, forward, bool(names & _BUILDS), chunks)


def kinds_of(history: DeviceHistory, job: Workload | None = None) -> NDArray[np.int64]:
    """Per block, an index into KINDS ([Note: how a block is named])."""
    blocks, events = history.blocks, history.events
    calls = [_Calls.of(stack) for stack in history.stacks]
    tags = [_tagged(tag) for tag in history.tags]
    updates = [history.event_at(m.start_us) for m in history.marks if m.name.startswith("Optimizer.step#")]
    by_optimizer = np.array([bool(stack) and call.optimizer for stack, call in zip(history.stacks, calls)])
    by_backward = np.array([call.backward for call in calls])
    released = by_optimizer[blocks.end_stack] & by_backward[blocks.stack] & (blocks.died < events)
    last_release = int(blocks.died[released].max(initial=-1))
    ending = set(blocks.stack[blocks.died < events].tolist()) - {0}
    any_stacks = len(history.stacks) > 1
    kinds = np.full(len(blocks.born), _UNKNOWN, np.int64)
    columns = (blocks.size_bytes, blocks.born, blocks.died, blocks.stack, blocks.tag, released)
    rows = zip(*(column.tolist() for column in columns))
    for row, (size, born, died, stack, tag, is_released) in enumerate(rows):
        lasts = died >= events
        if (tagged := tags[tag]) is not None:
            kinds[row] = tagged
        elif calls[stack].chunks:
            kinds[row] = _CHUNKS
        elif size == _CUBLAS_BYTES:
            kinds[row] = _BUFFER
        elif (born >= 0 or stack) and any_stacks:
            crosses = any(born < update <= died for update in updates)
            kept = is_released or (crosses and not (lasts and born < last_release))
            passing = stack in ending and not (crosses and calls[stack].forward)
            kinds[row] = _by_calls(calls[stack], lasts=lasts, kept=kept, passing=passing)
        elif born >= 0 and not lasts:
            kinds[row] = _TIDE
    if job is not None:
        _by_size(history, job, kinds)
    return kinds


def _tagged(tag: str) -> int | None:
    lower = tag.lower()
    return next((kind for part, kind in _TAGS if part in lower), None)


def _by_calls(calls: _Calls, *, lasts: bool, kept: bool, passing: bool) -> int:
    if calls.optimizer:
        return _STATES if lasts else _TIDE
    if calls.backward:
        return _GRAD if kept else _BUFFER if lasts else _TIDE
    if not lasts:
        return _TIDE
    if calls.builds and not calls.forward:
        return _PARAM
    return _TIDE if passing else _BUFFER if calls.forward else _UNKNOWN


def _by_size(history: DeviceHistory, job: Workload, kinds: NDArray[np.int64]) -> None:
    masters = {r for r, _ in job.optimizer.state_bytes}
    wanted: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
    for tensor in job.tensors:
        if tensor.tied_to is None:
            wanted[_rounded(tensor.bytes)].append(_PARAM)
    for tensor in job.tensors:
        if tensor.tied_to is None and not tensor.frozen:
            wide = _rounded(tensor.numel * 4)
            wanted[wide].extend([_STATES] * len(masters))
            if tensor.dtype != MASTER:
                wanted[_rounded(tensor.bytes)].append(_GRAD)
    unknown = np.flatnonzero(kinds == _UNKNOWN)
    for row in unknown.tolist():
        left = wanted.get(int(history.blocks.size_bytes[row]))
        if left:
            kinds[row] = left.popleft()


def _rounded(size: int) -> int:
    return -(-size // ROUND_BYTES) * ROUND_BYTES


def site_words(history: DeviceHistory, row: int) -> str:
    """The innermost call outside torch that allocated a block, and what it called there."""
    stack = history.stacks[int(history.blocks.stack[row])]
    if not stack:
        return "before the recording" if history.blocks.born[row] < 0 else "autograd (no Python calls)"
    caller = next((frame for frame in stack if not is_torch(frame.file)), None)
    if caller is None or caller is stack[0]:
        return str(stack[0])
    return f"{caller} > {stack[0].file.replace(_BACK, '/').rpartition('/')[2]} {stack[0].function}"


_BACK = "\\"
