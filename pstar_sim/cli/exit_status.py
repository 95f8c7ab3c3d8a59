"""Tells a script the result of a command."""

from __future__ import annotations

from pstar_sim.errors import DoesNotFit, NothingFits, PstarError, Stopped

MISTAKE, NO, INTERRUPTED, STOPPED = 2, 3, 130, 143

HELP = (
    "exit status: 0 done; 2 a mistake, which one line on stderr names; 3 the answer is no (it does not fit, none by "
    "the deadline); 130 interrupted; 143 ended by SIGTERM, its checkpoint saved"
)


def status_of(error: PstarError) -> int:
    """NO for an answer, STOPPED for a run asked to end, else MISTAKE."""
    if isinstance(error, Stopped):
        return STOPPED
    return NO if isinstance(error, DoesNotFit | NothingFits) else MISTAKE
