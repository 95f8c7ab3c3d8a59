"""The semantics table, a covering part of it: every row in every dtype, the policies in turn.

benchmarks/semantics.py runs the whole product and writes down the differences.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("semantics_rows", Path(__file__).parent / "semantics_rows.py")
assert _spec is not None and _spec.loader is not None
rows: Any = importlib.util.module_from_spec(_spec)
sys.modules["semantics_rows"] = rows
_spec.loader.exec_module(rows)


STREAMED = (
    "overflow and skipped steps", "parameter groups and a schedule", "states in bf16", "LoRA", "a module called twice",
    "unused parameters", "routed experts, unused in some steps", "evaluation between micro-batches",
)  # fmt: skip


def covering() -> list[Any]:
    """Each row in each dtype once, architectures in one dtype each; which policy moves on from one to the next."""
    cells = []
    for number, row in enumerate(rows.ROWS):
        turns = list(enumerate(rows.DTYPES))
        if row.name.startswith("transformers"):
            turns = [turns[number % 3]]
        for turn, dtype in turns:
            policy = row.policies[(number + 2 * turn) % len(row.policies)]
            cells.append(pytest.param(row, dtype, policy, id=f"{row.name}-{dtype}-{policy}"))
    return cells


@pytest.mark.parametrize(("row", "dtype", "policy"), covering())
def test_equals_plain_pytorch(record_property: Any, row: Any, dtype: str, policy: str) -> None:
    if dtype in row.exceptions:
        pytest.skip(row.exceptions[dtype])
    cell = rows.run_cell(row, dtype, policy)
    record_property("worst relative difference", cell.worst)
    assert cell.worst <= rows.TOLERANCE, cell


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize("name", STREAMED)
def test_equals_plain_pytorch_while_states_come_and_go(record_property: Any, name: str) -> None:
    """Chunk mode `stream`, which the budgets here do not call for by themselves."""
    (row,) = [row for row in rows.ROWS if row.name == name]
    cell = rows.run_cell(row, list(rows.DTYPES)[STREAMED.index(name) % 3], "optimal", modes="stream")
    record_property("worst relative difference", cell.worst)
    assert cell.worst <= rows.TOLERANCE, cell


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
