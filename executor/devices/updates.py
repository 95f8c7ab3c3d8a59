"""Updates of flat chunks: one call of the rule for neighbouring parameters with a gradient (torch too leaves out the
others).

[Note: where runs end] The CPU's fused kernel handles whole vectors of 4 to 16 elements, and rounds those left at a
tensor's end differently. So a run ends with a tensor whose elements are no multiple of 64 bytes, and all else is cut at
multiples of 64 bytes: slots, slices, parts, blocks; each element is rounded as in torch's optimizer for its tensor
alone, at any width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from executor.devices.rounding import ROUND_BLOCK
from executor.devices.rules import RULES, Rule, Settings
from pstar_sim.core.layout import ALIGN
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind
from pstar_sim.core.workspace import CAST_ELEMENTS, ROUNDING_BYTES
from pstar_sim.dtypes import DTYPES
from pstar_sim.workload.optimizers import MASTERS

BLOCK = CAST_ELEMENTS
GPU_BLOCK = 16 * BLOCK  # larger on the gpu: a piece that fits a cache is too small for a kernel


Span = Callable[[int, int], tuple[int, int]]
"""Elements (start, stop) of a chunk -> those of a state, which may have fewer."""


Rounding = Callable[[torch.Tensor, torch.Tensor, int], None]
"""Writes fp32 values into a narrower tensor, of a chunk's elements from a number on."""


class UpdateRange(NamedTuple):
    """Elements [start, stop) of a chunk, after `steps` updates.

    shape: of a tensor updated whole.
    """

    start: int
    stop: int
    steps: int
    shape: tuple[int, ...] = ()


def ranges_of(slots: Iterable[tuple[int, int, int | None]], align: int = ALIGN) -> list[UpdateRange]:
    """Neighbours with the same earlier updates share a range up to a tensor that ends between two multiples of `align`
    ([Note: where runs end]).

    slots: ascending (offset, numel, earlier updates or None without a gradient).
    align: elements of the longest vector.
    """
    runs: list[UpdateRange] = []
    open_run = False
    for offset, numel, steps in slots:
        if steps is None:
            open_run = False
        elif open_run and runs[-1].steps == steps and (runs[-1].stop - runs[-1].start) % align == 0:
            runs[-1] = UpdateRange(runs[-1].start, offset + numel, steps)
        else:
            runs.append(UpdateRange(offset, offset + numel, steps))
            open_run = True
    return runs


def scratch_bytes(plan: Plan) -> int:
    """Bytes of `Scratch` on the gpu."""
    chunks = {s.chunk for s in plan.steps if s.kind is Kind.GPU_UPDATE and s.chunk is not None}
    if not chunks:
        return 0
    layout, several = plan.layout, plan.workload.micro_batches > 1
    buffers = max(RULES[layout.states_of(c).name].buffers for c in chunks)
    pieces, whole_bytes = 0, 0
    for c in chunks:
        of_chunk = layout.optimizer.of_width(DTYPES[layout.chunks[c].dtype].bytes)
        widths = [DTYPES[layout.chunks[c].dtype].bytes, *(size for _, size in of_chunk.state_bytes)]
        casts = len({*widths, *([layout.sum_width(c)] if several else ())}) > 1
        if (room := RULES[layout.states_of(c).name].room) is None:
            pieces = max(pieces, casts * sum(size < 4 for size in widths))
            continue
        wide = 4 * casts * sum(0 < row.per_element < 4 for row in layout.states_of(c).lists)
        whole_bytes = max(whole_bytes, *(room(slot.shape) + wide * slot.numel for slot in layout.chunks[c].slots))
    rounded = ROUNDING_BYTES if layout.optimizer.masters == MASTERS[1] else 0
    return whole_bytes + rounded + (pieces + buffers) * 4 * min(GPU_BLOCK, max(layout.slice_numel(c) for c in chunks))


class Scratch:
    """fp32 buffers for the casts of updates at one place."""

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self._kept: dict[int, torch.Tensor] = {}

    def get(self, number: int, like: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(number)
        if kept is None or kept.device != like.device:
            kept = self._kept[number] = torch.empty(self.block, dtype=torch.float32, device=like.device)
        return kept


def update(
    rule: Rule,
    runs: Sequence[UpdateRange],
    *,
    param: torch.Tensor,
    grad: torch.Tensor,
    moments: Sequence[torch.Tensor],
    spans: Sequence[Span] | None = None,
    settings: Settings,
    scale: torch.Tensor | None = None,
    scratch: Scratch | None = None,
    rounding: Rounding | None = None,
    beside: torch.Tensor | None = None,
) -> None:
    """Update in place flat tensors, [numel of the chunk] but for states with `spans`. Where all have one dtype, the
    rule works in it; else, and with `rounding` or `beside`, in fp32, and what is narrower is rounded to nearest
    afterwards. Codes are the rule's own.

    param: the master copy.
    spans: of each state, None: as long as the chunk.
    scale: scalar, fp32 or the gradients' dtype, on the gradients first (clipping, loss scaling), which are overwritten.
    rounding: of the master copy, not to nearest.
    beside: as `grad`, to add to it in fp32, before `scale`.
    """
    room = scratch or Scratch()
    lists = (param, grad, *moments)
    of_list = (_same, _same, *(spans or [_same] * len(moments)))
    alike = len({each.dtype for each in lists}) == 1 and rounding is None and beside is None
    narrow = [] if alike else [n for n, each in enumerate(lists) if each.dtype not in (torch.float32, torch.uint8)]
    early = scale if scale is not None and scale.dtype == grad.dtype and beside is None else None
    if rule.room is None:
        block = room.block if narrow or rule.buffers or rule.block > 1 else sys.maxsize
        pieces = _pieces(runs, block if rounding is None else min(block, ROUND_BLOCK))
    else:
        pieces = ([run] for run in runs)
    for piece in pieces:
        first, end = piece[0].start, piece[-1].stop
        begins = [span(first, end)[0] for span in of_list]
        here = [each[slice(*span(first, end))] for each, span in zip(lists, of_list)]
        if early is not None:  # else the product is rounded after the update alone
            here[1].mul_(early)
        wide = list(here)
        for number in narrow:
            if rule.room is None:
                wide[number] = room.get(number, grad)[: end - first].copy_(here[number])
            else:
                wide[number] = here[number].float()
        if beside is not None:
            wide[1].add_(beside[first:end])
        if scale is not None and early is None:
            wide[1].mul_(scale)
        cut = [
            [_view(each[slice(*(at - begin for at in span(run.start, run.stop)))], run) for run in piece]
            for each, span, begin in zip(wide, of_list, begins)
        ]
        buffers = [room.get(len(lists) + n, grad) for n in range(rule.buffers)]
        rule.kernel(cut[0], cut[1], cut[2:], [run.steps for run in piece], settings, buffers)
        for number in narrow:
            if number == 0 and rounding is not None:
                rounding(here[0], wide[0], first)
            elif number != 1:
                here[number].copy_(wide[number])


def _same(start: int, stop: int) -> tuple[int, int]:
    return start, stop


def _view(flat: torch.Tensor, run: UpdateRange) -> torch.Tensor:
    return flat.view(run.shape) if run.shape and flat.numel() == run.stop - run.start else flat


def _pieces(runs: Iterable[UpdateRange], block: int) -> Iterator[list[UpdateRange]]:
    piece: list[UpdateRange] = []
    for run in runs:
        for start in range(run.start, run.stop, block):
            part = UpdateRange(start, min(start + block, run.stop), run.steps)
            if piece and (part.start - piece[-1].stop >= ALIGN or part.stop - piece[0].start > block):
                yield piece
                piece = []
            piece.append(part)
    if piece:
        yield piece


def add(target: torch.Tensor, source: torch.Tensor) -> None:
    """In place, to a contiguous tensor; torch's CPU casts all of a narrower one first, so pieces are added."""
    if target.dtype == source.dtype or target.device.type != "cpu":
        target.add_(source)
        return
    for piece, more in zip(torch.split(target.view(-1), BLOCK), torch.split(source.reshape(-1), BLOCK)):
        piece.add_(more)


def norm_of(flat: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """As `torch.linalg.vector_norm`, which on the CPU casts all of a narrower tensor: here pieces are cast.

    [Note: lanes of a norm] Torch adds the squares of every eighth element in turn, then these sums. So do pieces.
    """
    casts = dtype is torch.float32 and flat.dtype is not dtype and flat.device.type == "cpu"
    lanes = _lanes() if casts and flat.numel() > BLOCK else 0
    norm: torch.Tensor = _norm(flat, lanes, BLOCK) if lanes else torch.linalg.vector_norm(flat, dtype=dtype)
    return norm


def _norm(flat: torch.Tensor, lanes: int, block: int) -> torch.Tensor:
    whole, sums = flat.numel() - flat.numel() % lanes, np.zeros(lanes, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for piece in torch.split(flat[:whole], block):
            squares = np.square(piece.float().numpy()).reshape(-1, lanes)
            squares[0] += sums
            sums = np.add.reduce(squares, axis=0)
        total = sums[0]
        for square in (*sums[1:], *np.square(flat[whole:].float().numpy())):
            total += square
    return torch.tensor(np.sqrt(total), dtype=torch.float32)


@cache
def _lanes() -> int:
    """0: torch's kernel does something else."""
    samples = [torch.sin(torch.arange(5000 + n, dtype=torch.float32) * n) for n in range(1, 17)]
    exact = [torch.linalg.vector_norm(sample) for sample in samples]
    found = (n for n in (8, 16, 4) if all(map(torch.equal, exact, (_norm(each, n, 1024) for each in samples))))
    return next(found, 0)


def total_norm(norms: Iterable[torch.Tensor]) -> torch.Tensor:
    """As in `torch.nn.utils.clip_grad_norm_`."""
    stacked = list(norms)
    if not stacked:
        return torch.zeros((), dtype=torch.float32)
    if len({each.device for each in stacked}) > 1:  # of chunks updated on the host and chunks updated on the gpu
        stacked = [each.cpu() for each in stacked]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(stacked))
    return norm


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """`clip_grad_norm_`'s factor: max_norm / (norm + 1e-6), at most 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
