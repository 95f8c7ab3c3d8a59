"""Products of parameters of which only a part runs without --whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["by_turns", "half"]


def half(*factors: Sequence[Any]) -> list[Any]:
    """Returns the rows of `pytest.mark.parametrize` for the product of three factors or more. Every second row runs
    only with --whole, and yet every pair of values of two factors occurs."""
    rows = itertools.product(*(list(enumerate(values)) for values in factors))
    return [
        pytest.param(*(value for _, value in row), marks=[pytest.mark.whole] if sum(n for n, _ in row) % 2 else [])
        for row in rows
    ]


def by_turns(rows: Sequence[tuple[Any, ...]], ways: Sequence[tuple[Any, ...]], most: int = 1) -> list[Any]:
    """Returns the rows of `pytest.mark.parametrize` for each row in each way. Without --whole a row runs in `most` of
    them, the next in others."""
    return [
        pytest.param(*row, *way, marks=[pytest.mark.whole] if (number + turn) % (len(ways) // most) else [])
        for number, row in enumerate(rows)
        for turn, way in enumerate(ways)
    ]
