"""Among equally fast plans, all code chooses the one that moves and pins the fewest bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from pstar_sim.core.plan import Plan

T = TypeVar("T")
# Plans whose seconds differ by less than this share count as equally fast: benchmarks/search_constants.md.
AS_FAST = 1e-4


def least_of(found: Iterable[T], *, seconds: Callable[[T], float], burden: Callable[[T], tuple[int, ...]]) -> T:
    """The least burden at most AS_FAST slower than the fastest, of equals the first.

    burden: (bytes moved per iteration, bytes held), after what counts more, called only for several equals.

    Raises ValueError if `found` is empty.
    """
    everyone = list(found)
    limit_s = min(map(seconds, everyone)) * (1 + AS_FAST)
    fast = [one for one in everyone if seconds(one) <= limit_s]
    return fast[0] if len(fast) == 1 else min(fast, key=burden)


def burden(plan: Plan) -> tuple[int, int]:
    """Of one rank: moved per iteration, and of pinned parameters."""
    pinned = (c.index for c in plan.layout.chunks if plan.modes[c.index] == "pin")
    return sum(plan.moved_bytes.values()), sum(plan.layout.payload_bytes(chunk, "param") for chunk in pinned)
