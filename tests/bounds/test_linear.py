"""Expressions against numpy's own arithmetic at a point, and small programs solved by hand."""

import numpy as np
import pytest

from pstar_sim.bounds.linear import Expression, LinearProgram, Solution


def at(values: list[float]) -> Solution:
    return Solution(value=0.0, proved=0.0, at=np.array(values))


def test_arithmetic_goes_row_by_row_as_in_numpy() -> None:
    p = LinearProgram()
    a, b, one = p.variables(3, most=9.0), p.variables(3, most=[1.0, 2.0, 3.0]), p.variable(most=9.0)
    x, y, z = np.array([1.0, 4.0, 2.0]), np.array([0.5, 2.0, 3.0]), 7.0
    point = at([*x, *y, z])
    factors = np.array([2.0, 0.0, -1.0])
    for expression, expected in (
        (a + b, x + y),
        (2 * a - b / 4, 2 * x - y / 4),
        (5 - factors * a, 5 - factors * x),
        (a + factors, x + factors),
        (a - one, x - z),
        (one * factors, z * factors),
        (one + factors, z + factors),
        (-(a + one)[1:], -(x + z)[1:]),
        ((a + b)[[2, 0, 0]], (x + y)[[2, 0, 0]]),
        ((a + b + 1)[np.array([False, True, False])], (x + y + 1)[1:2]),
        ((a - b)[-1], (x - y)[-1:]),
        ((a - b + 1).sum(), np.array([(x - y + 1).sum()])),
        ((a + 2 * b).gathered([3, 0, 3], 5), np.array([(x + 2 * y)[1], 0, 0, (x + 2 * y)[[0, 2]].sum(), 0])),
        ((a + 1).gathered([1, 1, 0], 2), np.array([x[2] + 1, x[0] + x[1] + 2])),
        (Expression.zero(2) + 3, np.array([3.0, 3.0])),
    ):  # fmt: skip
        assert point.of(expression).tolist() == pytest.approx(expected.tolist(), abs=1e-15)
        assert len(expression) == len(expected)


def test_rows_of_different_lengths_do_not_add_up() -> None:
    p = LinearProgram()
    with pytest.raises(ValueError, match="broadcast"):
        p.variables(3, most=1.0) + p.variables(2, most=1.0)


def test_two_comparisons_in_one_are_refused() -> None:
    p = LinearProgram()
    x = p.variable(most=1.0)
    with pytest.raises(TypeError, match="a <= b <= c is two comparisons"):
        0 <= x <= 1  # noqa: B015


def test_a_diet() -> None:
    """Two foods at 2 and 3 a unit, at least 4 of fat = a + 2 b and 3 of salt = a + b, at most 2 units of a; of the
    other three kinds of food none is needed: a = 2, b = 1, 7 in all. Terms of one variable in a row are added up; what
    a row is counted in changes nothing."""
    for unit, method in ((1.0, "simplex"), (1e3, "simplex"), (1.0, "ipx")):
        p = LinearProgram()
        food = p.variables(5, most=[2.0, 9.0, 9.0, 9.0, 9.0])
        p.minimise((food * np.array([2.0, 3.0, 4.0, 4.0, 4.0])).sum())
        p.add(food[0] + food[1] + food[1] >= 4.0, unit=unit)
        p.add(food[:2].sum() >= 3.0, unit=unit)
        found = p.solve(method=method)
        assert (found.value, found.proved) == (pytest.approx(7.0, abs=1e-9), pytest.approx(7.0, abs=1e-9))
        assert found.of(food).tolist() == pytest.approx([2, 1, 0, 0, 0], abs=1e-7)


def test_the_largest_value_that_the_bounds_allow() -> None:
    p = LinearProgram()
    a, b = p.variable(most=2.0), p.variable(most=3.0)
    assert p.most_of(5 + 2 * a - 4 * b).tolist() == [9.0]
    p.limit(a, 10.0)
    assert p.most_of(5 + 2 * a - 4 * b).tolist() == [25.0]
