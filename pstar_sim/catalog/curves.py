"""Rates that depend on size, by measured points.

A curve is ((size, rate), ...), ascending, () for none. Between points rates are linear in the logarithm of the size,
beyond them constant.
"""

from __future__ import annotations

import math
from bisect import bisect_right

Curve = tuple[tuple[float, float], ...]


def rate_at(curve: Curve, size: float) -> float:
    """size: > 0.
    curve: at least one point.
    """
    sizes = [point[0] for point in curve]
    at = bisect_right(sizes, size)
    if at == 0:
        return curve[0][1]
    if at == len(curve):
        return curve[-1][1]
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    share = math.log(size / x0) / math.log(x1 / x0)
    return y0 + share * (y1 - y0)


def best_rate(curve: Curve) -> float:
    return max(rate for _, rate in curve)


def share_at(curve: Curve, size: float) -> float:
    """Over the best, at `size` (> 0); 1 without points."""
    return rate_at(curve, size) / best_rate(curve) if curve else 1.0
