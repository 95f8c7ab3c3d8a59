"""The semantics table, a covering part of it: every row in one dtype, those of BY_DTYPE in two (--whole: in every one),
the policies in turn.

benchmarks/semantics.py runs the whole product and writes down the differences.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.devices.virtual_streams import VirtualStreams

_spec = importlib.util.spec_from_file_location("semantics_rows", Path(__file__).parents[1] / "semantics_rows.py")
assert _spec is not None and _spec.loader is not None
rows: Any = importlib.util.module_from_spec(_spec)
sys.modules["semantics_rows"] = rows
_spec.loader.exec_module(rows)


STREAMED = (
    "overflow and skipped steps", "parameter groups and a schedule", "states in bf16", "LoRA", "a module called twice",
    "unused parameters", "routed experts, unused in some steps", "evaluation between micro-batches",
)  # fmt: skip


DELAYED = (
    "overflow and skipped steps", "clipping, accumulation", "states in bf16", "LoRA in fp32 on its base",
    "routed experts, unused in some steps", "batches of other lengths",
)  # fmt: skip
ON_A_GPU = ("a module called twice", "unused parameters", "parameters of two dtypes", "frozen parameters")


BY_DTYPE = (
    "overflow and skipped steps", "states in bf16", "LoRA in fp32 on its base", "autocast", "parameters of two dtypes",
)  # fmt: skip
"""Rows in which masters, scales or casts take part in more than an update."""


def covering() -> list[Any]:
    """Each row in each dtype once, architectures in one dtype each; which policy moves on from one to the next. The
    dtypes that a row is left out in without --whole move on, too."""
    cells = []
    for number, row in enumerate(rows.ROWS):
        turns = list(enumerate(rows.DTYPES))
        if row.name.startswith("transformers"):
            turns = [turns[number % 3]]
        for turn, dtype in turns:
            policy = row.policies[(number + 2 * turn) % len(row.policies)]
            left_out = {number % 3} if row.name in BY_DTYPE else {number % 3, (number + 1) % 3}
            marks = [pytest.mark.whole] if len(turns) > 1 and turn in left_out else []
            cells.append(pytest.param(row, dtype, policy, id=f"{row.name}-{dtype}-{policy}", marks=marks))
    return cells


def in_two_steps(row: Any) -> Any:
    """The row, if it has the usual three."""

    def make() -> Any:
        case = row.make()
        return replace(case, steps=2) if case.steps == rows.Case.steps else case

    return replace(row, make=make)


@pytest.mark.parametrize(("row", "dtype", "policy"), covering())
def test_equals_plain_pytorch(record_property: Any, whole: bool, row: Any, dtype: str, policy: str) -> None:
    """Three steps with --whole, as the tests below have them, else two."""
    if dtype in row.exceptions:
        pytest.skip(row.exceptions[dtype])
    cell = rows.run_cell(row if whole else in_two_steps(row), dtype, policy)
    record_property("worst relative difference", cell.worst)
    assert cell.worst <= rows.TOLERANCE, cell


@pytest.mark.parametrize(("dtype", "streams"), [("bf16", False), ("fp16", True)])
def test_parameters_that_cross_the_link_in_fp32(dtype: str, streams: bool) -> None:
    """PatrickStar brings what the CPU has updated up in 4 bytes per parameter, in training with 2: counted where it is
    copied, for updated chunks alone (the row's own check holds the link's bytes against the plan's)."""
    (row,) = [row for row in rows.ROWS if row.name == "LoRA"]
    backend = VirtualStreams() if streams else None
    cell = rows.run_cell(row, dtype, "patrickstar", **({"backend": backend} if backend is not None else {}))
    assert cell.worst <= rows.TOLERANCE, cell


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize("name", STREAMED)
def test_equals_plain_pytorch_while_states_come_and_go(record_property: Any, name: str) -> None:
    """Chunk mode `stream`, which the budgets here do not call for by themselves."""
    (row,) = [row for row in rows.ROWS if row.name == name]
    cell = rows.run_cell(row, list(rows.DTYPES)[STREAMED.index(name) % 3], "optimal", modes="stream")
    record_property("worst relative difference", cell.worst)
    assert cell.worst <= rows.TOLERANCE, cell


@pytest.mark.parametrize("name", DELAYED)
def test_equals_plain_pytorch_on_asynchronous_streams(record_property: Any, name: str) -> None:
    """What CUDA does, with streams that are late at random."""
    number = DELAYED.index(name)
    rng = random.Random(number)
    late = VirtualStreams(delays=lambda queue: rng.choice((0.0, 4e-4 * rng.random())))
    (row,) = [row for row in rows.ROWS if row.name == name]
    cell = rows.run_cell(row, list(rows.DTYPES)[(number + 2) % 3], rows.POLICIES[number % 5], backend=late)
    record_property("worst relative difference", cell.worst)
    assert cell.worst <= rows.TOLERANCE, cell


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ON_A_GPU)
def test_equals_plain_pytorch_on_cuda(name: str, dtype: str) -> None:
    """The reference updates on the GPU, the run partly on the CPU: their Adams round differently, and a value in 16 bit
    may fall on the other side."""
    (row,) = [row for row in rows.ROWS if row.name == name]
    cell = rows.run_cell(row, dtype, "tide", device="cuda")
    assert cell.worst <= (1e-4 if dtype == "fp32" else 1e-2), cell


def test_the_comparison_sees_a_small_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate of the reference that is off by a thousandth is told from equality."""
    plain = rows.Plain

    class Off(plain):  # type: ignore[misc, valid-type]
        def step(self) -> None:
            for group in self.optimizer.param_groups:
                group["lr"] *= 1.001
            super().step()

    monkeypatch.setattr(rows, "Plain", Off)
    assert rows.run_cell(rows.ROWS[0], "fp32", "tide").worst > 10 * rows.TOLERANCE
