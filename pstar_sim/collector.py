"""Python's cycle collector is off while plans are made and proved: hundreds of thousands of small objects, with few
cycles, which it visits for a third of the CPU time."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_inside = 0  # number of threads that plan or prove now
_was_enabled = False  # whether the collector was on before the first of them


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """On again, if it was, when the last thread has left. Also a decorator: `@without_garbage_collection()`."""
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
