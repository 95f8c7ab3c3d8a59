"""SIGTERM, which schedulers send before they take a machine away."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    def __init__(self) -> None:
        self.asked = False


@contextlib.contextmanager
def stop_on_sigterm(*, listens: bool = True) -> Iterator[StopRequest]:
    """The first is a request, the second ends the process as ever. Signals reach the main thread only; in others
    nothing is asked.

    listens: there is something to do before the end.
    """
    request = StopRequest()
    if not listens or threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        request.asked = True
        signal.signal(signal.SIGTERM, former)

    former = signal.signal(signal.SIGTERM, ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, former)
