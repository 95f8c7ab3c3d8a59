"""AtWork: whether an interruption came while the engine changed its own state.

An error of the engine's own (any `Exception`) leaves that state in order; Ctrl-C may come between any two lines. Every
way into the engine from the user's thread is a block `with at_work:`, and an interruption inside sets `torn`: the loop
is then in `State.INTERRUPTED` (`session/cursor.py`).

From the first value of a load to its last, `loading` names it, and stays where an error or an interruption ends the
load: the loop is then in `State.HALF_LOADED`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["AtWork"]


class AtWork:
    """depth: number of open `with at_work:` blocks.
    torn: whether an interruption left a block and is not mended yet. `Loop.mend` clears it.
    loading: the call whose load has begun and not ended; "" without one.
    """

    __slots__ = ("depth", "loading", "torn")

    def __init__(self) -> None:
        self.depth = 0
        self.torn = False
        self.loading = ""

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.note(error)
        self.depth -= 1

    def run(self, action: Callable[..., None], *given: Any) -> None:
        """As a block `with at_work:`, at the cost of one call instead of two (of hundreds per iteration)."""
        self.depth += 1
        try:
            action(*given)
        except BaseException as error:
            self.note(error)
            self.depth -= 1
            raise
        self.depth -= 1  # not in a `finally`: a block interrupted before this line stays open, and `outermost` finds it

    def note(self, error: BaseException) -> None:
        """An interruption that leaves a block sets `torn`."""
        if not isinstance(error, Exception):
            self.torn = True

    def outermost(self) -> None:
        """Close a block that is open where none can be: an interruption came while it was entered or left. Sets
        `torn`."""
        if self.depth:
            self.torn = True
            self.depth = 0
