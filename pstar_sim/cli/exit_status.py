"""Exit status: tells a script the result of a command without reading its output."""

from __future__ import annotations

from pstar_sim.errors import DoesNotFit, NothingFits, PstarError

__all__ = ["HELP", "INTERRUPTED", "MISTAKE", "NO", "status_of"]

MISTAKE, NO, INTERRUPTED = 2, 3, 130

HELP = (
    "exit status: 0 done; 2 a mistake, which one line on stderr names; 3 the answer is no (it does not fit, none by "
    "the deadline); 130 interrupted"
)


def status_of(error: PstarError) -> int:
    """NO for an error that is an answer, MISTAKE for any other."""
    return NO if isinstance(error, DoesNotFit | NothingFits) else MISTAKE
