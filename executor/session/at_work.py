"""Whether an interruption came while the engine changed its own state.

An `Exception` of the engine's own leaves that in order; Ctrl-C may come between any two lines. Every way in from the
user's thread is a block `with at_work:`, and an interruption inside sets `torn`: the loop is in `State.INTERRUPTED`
(`session/cursor.py`).

From a load's first value to its last, `loading` names it, and stays where it does not end well: `State.HALF_LOADED`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any


class AtWork:
    """depth: open `with at_work:` blocks.
    torn: an interruption left one and is not mended yet (`Loop.mend`).
    loading: the unended call, "" without one.
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
        """A block `with at_work:` in one call instead of two (of hundreds per iteration)."""
        self.depth += 1
        try:
            action(*given)
        except BaseException as error:
            self.note(error)
            self.depth -= 1
            raise
        self.depth -= 1  # not in a `finally`: a block interrupted before this line stays open, and `outermost` finds it

    def note(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            self.torn = True

    def outermost(self) -> None:
        """A block is open where none can be: an interruption came as it was entered or left. Sets `torn`."""
        if self.depth:
            self.torn = True
            self.depth = 0
