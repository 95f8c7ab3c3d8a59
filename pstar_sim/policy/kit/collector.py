"""Python's collector of reference circles, paused while many objects without circles are made at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """For milliseconds: every few hundred new objects the collector would look through all young ones in vain, a tenth
    of the time of a search. What other threads leave behind is found afterwards."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
