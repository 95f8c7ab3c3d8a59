"""Small sparse linear programs by name, solved with HiGHS, and a lower bound of the optimum that is safe.

A solver's optimum is right to some tolerance; a certificate must not be. So what is reported is not the solver's value
but what its dual solution proves. [Note: what the dual proves] For  min c.v,  A v <= b,  E v = d,  l <= v <= u  and any
multipliers p >= 0 and q,  c.v >= -p.b - q.d + sum_j min(r_j l_j, r_j u_j)  with  r = c + A'p + E'q  for every feasible
v. With the solver's own multipliers that is its optimum but for rounding, and it is true of any others too. So every
variable has finite bounds.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Program", "Solution", "Unsolved"]

Array = NDArray[np.float64]
Terms = Iterable[tuple[int, float]]


class Unsolved(Exception):
    """The solver gave no optimum; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """value: what the solver says the optimum is. proved: a lower bound of it that holds exactly (but for the rounding
    of one sum). at: the variables' values."""

    value: float
    proved: float
    at: Array


class Program:
    """Minimise a sum over variables with finite bounds, under rows of the form sum <= b or sum = b."""

    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.cost: list[float] = []
        self._most = _Rows()
        self._equal = _Rows()

    def variable(self, upper: float, *, lower: float = 0.0, cost: float = 0.0) -> int:
        """A new variable in [lower, upper]; its number."""
        self.lower.append(lower)
        self.upper.append(max(lower, upper))
        self.cost.append(cost)
        return len(self.cost) - 1

    def variables(self, count: int, upper: float | Sequence[float] | Array, *, lower: float = 0.0) -> range:
        """`count` new variables in [lower, upper]; their numbers."""
        uppers = [upper] * count if isinstance(upper, int | float) else list(map(float, upper))
        first = len(self.cost)
        for each in uppers:
            self.variable(each, lower=lower)
        return range(first, first + count)

    def at_most(self, terms: Terms, limit: float) -> int:
        """A row: sum of factor * variable <= limit; its number among these rows."""
        return self._most.add(terms, limit)

    def equal(self, terms: Terms, value: float) -> None:
        """A row: sum of factor * variable = value."""
        self._equal.add(terms, value)

    def solve(self, *, method: str = "highs-ds", time_limit_s: float | None = None) -> Solution:
        """Raises Unsolved where HiGHS finds no optimum in time."""
        linprog: Any = importlib.import_module("scipy.optimize").linprog
        c, low, high = np.array(self.cost), np.array(self.lower), np.array(self.upper)
        small = len(c) < 60
        a, b = self._most.matrix(len(c), dense=small)
        e, d = self._equal.matrix(len(c), dense=small)
        options = {} if time_limit_s is None else {"time_limit": time_limit_s}
        result = linprog(
            c,
            A_ub=a if len(b) else None,
            b_ub=b if len(b) else None,
            A_eq=e if len(d) else None,
            b_eq=d if len(d) else None,
            bounds=np.column_stack((low, high)),
            method=method,
            options=options,
        )
        if result.status != 0 or result.x is None:
            raise Unsolved(" ".join(str(result.message).split()))
        reduced, proved = c.copy(), 0.0
        if len(b):
            p = np.maximum(0.0, -np.asarray(result.ineqlin.marginals, dtype=float))
            reduced = reduced + a.T @ p
            proved -= float(p @ b)
        if len(d):
            q = -np.asarray(result.eqlin.marginals, dtype=float)
            reduced = reduced + e.T @ q
            proved -= float(q @ d)
        proved += float(np.minimum(reduced * low, reduced * high).sum())
        if not np.isfinite(proved):
            raise Unsolved("the solver gave no dual solution")
        return Solution(value=float(result.fun), proved=proved, at=np.asarray(result.x, dtype=float))


class _Rows:
    def __init__(self) -> None:
        self.limits: list[float] = []
        self._row: list[int] = []
        self._column: list[int] = []
        self._factor: list[float] = []

    def add(self, terms: Terms, limit: float) -> int:
        row = len(self.limits)
        for column, factor in terms:
            if factor:
                self._row.append(row)
                self._column.append(column)
                self._factor.append(factor)
        self.limits.append(limit)
        return row

    def matrix(self, columns: int, *, dense: bool) -> tuple[Any, Array]:
        """(matrix, right-hand side); doubled terms are added up."""
        sparse: Any = importlib.import_module("scipy.sparse")
        shape = (len(self.limits), columns)
        limits = np.array(self.limits, dtype=float)
        if dense:
            full = np.zeros(shape)
            np.add.at(full, (self._row, self._column), self._factor)
            return full, limits
        return sparse.csr_array(sparse.coo_array((self._factor, (self._row, self._column)), shape=shape)), limits
