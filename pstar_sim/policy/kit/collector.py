"""Collector: planning without Python's cycle collector.

What a search tries, plans and timelines are hundreds of thousands of small objects, few of which hold each other in
circles; the cycle collector walks them again and again and finds next to nothing, for a third of the CPU time.
Reference counts still free the others.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["without_garbage_collection"]


_lock = threading.Lock()
_inside = 0  # who plans now, in all threads
_was_enabled = False  # before the first of them


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """The collector is left as it was found, when the last of all threads is done. Also a decorator:
    `@without_garbage_collection()`."""
    global _inside, _was_enabled
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_enabled:
                gc.enable()
