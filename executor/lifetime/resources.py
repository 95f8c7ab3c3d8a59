"""What a session takes from the process beyond objects: threads, chunks' memory, a dispatch mode, torch's threads.

Nothing here holds the session, so it is collected with its model and optimizer; `let_go` then does as `Session.close`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from executor.devices.backend import Backend, give_freed_pages_back
from executor.distributed.ranks import Ranks
from executor.memory.arena import Arena

log = logging.getLogger("executor")

_before: dict[int, int] = {}  # thread -> number of torch's threads there before the first request
_asked: dict[object, tuple[int, int]] = {}  # request -> (thread, requested number), the latest last


class Resources:
    """arena: emptied at the end, None before there is a plan.
    stoppers: end the queues' threads.
    at_end: undo changes of the process; None may hold the session.
    """

    def __init__(self, backend: Backend, ranks: Ranks | None) -> None:
        self._backend = backend
        self._ranks = ranks
        self.arena: Arena | None = None
        self.stoppers: list[Callable[[], object]] = []
        self.at_end: list[Callable[[], object]] = []

    def end(self) -> None:
        """After the queues have been stopped."""
        for action in self.at_end:
            action()
        if self.arena is not None:
            self.arena.empty()
        self._backend.close()
        if self._backend.device.type == "cpu":
            give_freed_pages_back()

    def let_go(self) -> None:
        """After the session was collected, in the collection's thread."""
        try:
            if self._ranks is not None:
                self._ranks.announce(None, 0)
            for stop in self.stoppers:
                stop()
            if self._ranks is not None:
                self._ranks.close()
        except Exception as error:  # no caller could handle the error
            log.warning("the end of a run without any reference to it: %s: %s", type(error).__name__, error)
        finally:
            self.end()


def ask_torch_threads(count: int) -> Callable[[], None]:
    """torch keeps the number per thread; returns a function that undoes this.

    The latest request counts; when the last is undone, the number is as before the first. If another thread undoes one
    (garbage collection), it stays until this thread requests or undoes again."""
    thread = threading.get_ident()
    _before.setdefault(thread, torch.get_num_threads())
    who = object()
    _asked[who] = (thread, count)
    torch.set_num_threads(count)

    def take_back() -> None:
        if _asked.pop(who, None) is None or threading.get_ident() != thread:
            return
        left = [number for where, number in _asked.values() if where == thread]
        torch.set_num_threads(left[-1] if left else _before.pop(thread))

    return take_back
