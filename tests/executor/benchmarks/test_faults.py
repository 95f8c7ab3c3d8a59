"""Faults injected for real, one by one (benchmarks/_faults.py, which also says what each has to keep)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import _faults  # type: ignore[import-not-found]
finally:
    sys.path.remove(str(BENCHMARKS))

OWN = [name for name in _faults.FAULTS if name != "a rank dies" and "mounted" not in name]  # that one runs a test


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", OWN)
def test_what_a_fault_costs_and_says(name: str, caplog: Any) -> None:
    said = _faults.FAULTS[name]()
    assert said and "Traceback" not in said
