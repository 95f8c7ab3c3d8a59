"""Products of parameters of which only a part runs without --whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["half"]


def half(*factors: Sequence[Any]) -> list[Any]:
    """Returns the rows of `pytest.mark.parametrize` for the product of three factors or more. Every second row runs
    only with --whole, and yet every pair of values of two factors occurs."""
    rows = itertools.product(*(list(enumerate(values)) for values in factors))
    return [
        pytest.param(*(value for _, value in row), marks=[pytest.mark.whole] if sum(n for n, _ in row) % 2 else [])
        for row in rows
    ]
