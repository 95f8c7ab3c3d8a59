"""AtWork: whether an interruption came while the engine changed what it keeps.

An error of the engine's own (any `Exception`) leaves what it keeps in order; Ctrl-C may come between any two lines.
Every way into the engine from the user's thread is a block `with at_work:`, and an interruption inside sets `torn`,
whatever line the interruption came at. While `torn` is set the loop stands in `State.INTERRUPTED` of the contract's
table (`session/cursor.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["AtWork"]


class AtWork:
    """Whether the engine's own work is under way, or was interrupted.

    Attributes:
        depth: number of `with at_work:` blocks that are open.
        torn: an interruption left a block, and nothing has been mended since. `Loop.mend` clears it.
    """

    __slots__ = ("depth", "torn")

    def __init__(self) -> None:
        self.depth = 0
        self.torn = False

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.note(error)
        self.depth -= 1

    def run(self, action: Callable[..., None], *given: Any) -> None:
        """Call the action as in a block `with at_work:`, at the cost of one call instead of two: an iteration has
        hundreds of events and gradients."""
        self.depth += 1
        try:
            action(*given)
        except BaseException as error:
            self.note(error)
            self.depth -= 1
            raise
        self.depth -= 1  # not in a `finally`: interrupted before it is noted, the block stays open and is found

    def note(self, error: BaseException) -> None:
        """Note the exception with which a block is left."""
        if not isinstance(error, Exception):
            self.torn = True

    def outermost(self) -> None:
        """Called where no block can be open. If a block still counts as open, an interruption came while it was entered
        or left: close the block and set `torn`."""
        if self.depth:
            self.torn = True
            self.depth = 0
