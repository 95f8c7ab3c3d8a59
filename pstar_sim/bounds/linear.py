"""Linear programs of expressions, solved with HiGHS, with a safe lower bound of the optimum.

[Note: expressions] `program.variables(n, most=...)` is a block of n variables. An `Expression` is a block of rows.
Arithmetic goes row by row, as in numpy, with broadcasting: `2 * a - b[1:] + limits`.

[Note: what the dual proves] A solver's optimum is right up to some tolerance, so the reported value is the one that its
dual solution proves. For min c.v, A v <= b, E v = d, 0 <= v <= u and any multipliers p >= 0 and q, c.v >= -p.b - q.d +
sum_j min(0, r_j u_j) with r = c + A'p + E'q for every feasible v.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.intp]


class Unsolved(Exception):
    """The text says why the solver found no optimum."""


class Expression:
    """Row r is constant[r] + the sum of factor * variable over the terms of row r.

    column: each term's variable.
    """

    __slots__ = ("column", "constant", "factor", "row")
    __array_ufunc__ = None  # makes array * expression an expression, not an array of expressions
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, constant: Array, row: Index, column: Index, factor: Array) -> None:
        self.constant, self.row, self.column, self.factor = constant, row, column, factor

    @staticmethod
    def zero(rows: int) -> Expression:
        none = np.zeros(0, dtype=np.intp)
        return Expression(np.zeros(rows), none, none, np.zeros(0))

    def __len__(self) -> int:
        return len(self.constant)

    def __getitem__(self, index: int | slice | Index | NDArray[np.bool_]) -> Expression:
        """As numpy; a number gives a single row."""
        if isinstance(index, int):
            at = range(len(self))[index]
            (terms,) = np.nonzero(self.row == at)
            return Expression(self.constant[at : at + 1], np.zeros_like(terms), self.column[terms], self.factor[terms])
        chosen = np.atleast_1d(np.arange(len(self))[index])
        by_row = np.argsort(self.row, kind="stable")
        begin, end = (np.searchsorted(self.row, chosen, side, sorter=by_row) for side in ("left", "right"))
        count = end - begin
        first = np.cumsum(count) - count  # index of each chosen row's first term among the chosen terms
        terms = by_row[np.arange(count.sum()) + np.repeat(begin - first, count)]
        row = np.repeat(np.arange(len(chosen)), count)
        return Expression(self.constant[chosen], row, self.column[terms], self.factor[terms])

    def gathered(self, where: Sequence[int] | Index, count: int) -> Expression:
        """Row k of `count` is the sum of the rows r with where[r] == k."""
        to = np.asarray(where, dtype=np.intp)
        constant = np.asarray(np.bincount(to, self.constant, minlength=count), dtype=float)
        return Expression(constant, to[self.row], self.column, self.factor)

    def sum(self) -> Expression:
        """A single row."""
        return self.gathered(np.zeros(len(self), dtype=np.intp), 1)

    def spread(self, rows: int) -> Expression:
        if len(self.constant) == rows:
            return self
        # From a single row only: numpy has refused other lengths.
        row = np.repeat(np.arange(rows), len(self.row))
        factor = np.concatenate([self.factor] * rows)
        return Expression(np.repeat(self.constant, rows), row, np.concatenate([self.column] * rows), factor)

    def __add__(self, other: Expression | Array | float) -> Expression:
        if isinstance(other, Expression):
            constant = self.constant + other.constant
            a, b = self.spread(len(constant)), other.spread(len(constant))
            row = np.concatenate((a.row, b.row))
            return Expression(constant, row, np.concatenate((a.column, b.column)), np.concatenate((a.factor, b.factor)))
        constant = self.constant + other
        own = self.spread(len(constant)) if isinstance(other, np.ndarray) else self
        return Expression(constant, own.row, own.column, own.factor)

    def __mul__(self, factor: Array | float) -> Expression:
        if not isinstance(factor, np.ndarray):
            return Expression(self.constant * factor, self.row, self.column, self.factor * factor)
        constant = self.constant * factor
        own = self.spread(len(constant))
        return Expression(constant, own.row, own.column, own.factor * np.broadcast_to(factor, len(own))[own.row])

    def __truediv__(self, factor: Array | float) -> Expression:
        return self * (1 / factor)

    def __neg__(self) -> Expression:
        return self * -1.0

    def __sub__(self, other: Expression | Array | float) -> Expression:
        return self + -other

    def __rsub__(self, other: Array | float) -> Expression:
        return -self + other

    __radd__ = __add__
    __rmul__ = __mul__

    def __le__(self, other: Expression | Array | float) -> Rows:
        return Rows(self - other, equal=False)

    def __ge__(self, other: Expression | Array | float) -> Rows:
        return Rows(other - self, equal=False)

    def __eq__(self, other: Expression | Array | float) -> Rows:  # type: ignore[override]
        return Rows(self - other, equal=True)


@dataclass(frozen=True)
class Rows:
    """Each row of `difference` is at most 0, or equal to 0."""

    difference: Expression
    equal: bool

    def __bool__(self) -> bool:
        raise TypeError("rows of a linear program are neither true nor false; a <= b <= c is two comparisons")


@dataclass(frozen=True, kw_only=True)
class Solution:
    """value: by the solver.
    proved: holds exactly, up to the rounding of one sum.
    """

    value: float
    proved: float
    at: Array

    def of(self, expression: Expression) -> Array:
        """Value of each row."""
        terms = expression.factor * self.at[expression.column]
        return expression.constant + np.bincount(expression.row, terms, minlength=len(expression))


class LinearProgram:
    """Variables lie between 0 and a finite upper bound."""

    def __init__(self) -> None:
        self._most: list[float] = []
        self._rows: list[Rows] = []
        self._objective = Expression.zero(1)

    def variable(self, *, most: float) -> Expression:
        """From 0 to `most`. Returns an expression of one row."""
        return self.variables(1, most=most)

    def variables(self, count: int, *, most: float | Sequence[float] | Array) -> Expression:
        """One variable per row, from 0 to `most` (for all, or each)."""
        row, before = np.arange(count), len(self._most)
        each = [most] * count if isinstance(most, int | float) else most
        self._most += [max(0.0, float(value)) for value in each]
        return Expression(np.zeros(count), row, row + before, np.ones(count))

    def limit(self, variable: Expression, most: float) -> None:
        self._most[int(variable.column[0])] = most

    def most_of(self, expression: Expression) -> Array:
        """Largest value of each row that the variables' bounds allow."""
        terms = np.maximum(0.0, expression.factor * np.array(self._most)[expression.column])
        return expression.constant + np.bincount(expression.row, terms, minlength=len(expression))

    def minimise(self, objective: Expression) -> None:
        """objective: an expression of one row."""
        self._objective = objective

    def add(self, rows: Rows, *, unit: float = 1.0) -> None:
        """unit: of the solver's rows, so that factors are near 1."""
        self._rows.append(rows if unit == 1.0 else Rows(rows.difference * (1 / unit), rows.equal))

    def solve(self, *, method: str = "simplex", most_steps: int | None = None) -> Solution:
        """method: "simplex" or "ipx" (interior point, then a vertex if it is near).
        most_steps: interior points (vertices: 10 times as many).

        Raises Unsolved if HiGHS finds no optimum in these.
        """
        rows, equal = self._stacked()
        limit = -rows.constant
        most = np.array(self._most)
        cost = np.bincount(self._objective.column, self._objective.factor, minlength=len(most))
        highspy: Any = importlib.import_module("highspy")
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(most), len(rows)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.zeros(len(most)), most
        lp.row_lower_, lp.row_upper_ = np.where(equal, limit, -highspy.kHighsInf), limit
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = _by_column(rows, len(most))
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("solver", method)
        if most_steps is not None:
            highs.setOptionValue("ipm_iteration_limit", most_steps)
            highs.setOptionValue("simplex_iteration_limit", 10 * most_steps)
        highs.passModel(lp)
        highs.run()
        status = highs.getModelStatus()
        limited = most_steps is not None and status == highspy.HighsModelStatus.kIterationLimit
        if limited and method == "ipx" and highs.getInfo().ipm_iteration_count < most_steps:
            highs.setOptionValue("run_crossover", "off")  # the dual of an interior point proves as much
            highs.clearSolver()
            highs.run()
            status = highs.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise Unsolved(f"HiGHS: {highs.modelStatusToString(status).lower()}")
        solution = highs.getSolution()
        # [Note: what the dual proves]
        multipliers = -np.array(solution.row_dual, dtype=float)
        multipliers = np.where(equal, multipliers, np.maximum(0.0, multipliers))
        reduced = cost + np.bincount(rows.column, rows.factor * multipliers[rows.row], minlength=len(most))
        constant = float(self._objective.constant[0])
        proved = constant - float(multipliers @ limit) + float(np.minimum(0.0, reduced * most).sum())
        if not solution.dual_valid or not np.isfinite(proved):
            raise Unsolved("HiGHS gave no dual solution")
        at = np.array(solution.col_value, dtype=float)
        return Solution(value=constant + float(cost @ at), proved=proved, at=at)

    def _stacked(self) -> tuple[Expression, NDArray[np.bool_]]:
        parts = [Expression.zero(0), *(rows.difference for rows in self._rows)]
        lengths = [len(part) for part in parts]
        begins = np.cumsum([0, *lengths[:-1]])
        return Expression(
            np.concatenate([part.constant for part in parts]),
            np.concatenate([part.row + begin for part, begin in zip(parts, begins)]),
            np.concatenate([part.column for part in parts]),
            np.concatenate([part.factor for part in parts]),
        ), np.repeat([False, *(rows.equal for rows in self._rows)], lengths)


def _by_column(rows: Expression, columns: int) -> tuple[Index, Index, Array]:
    """Start of each column, row and value of each entry; equal terms are added up."""
    place = rows.column * len(rows) + rows.row
    order = np.argsort(place, kind="stable")
    place = place[order]
    first = np.flatnonzero(np.diff(place, prepend=-1))
    value = np.add.reduceat(rows.factor[order], first) if len(first) else rows.factor
    column, row = np.divmod(place[first], max(1, len(rows)))
    return np.searchsorted(column, np.arange(columns + 1)), row, value
