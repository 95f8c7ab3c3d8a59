"""Bars: how far a command is that takes a while, on stderr; nothing if quiet or where stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["bar"]

OnPart = Callable[[str, int, int], None]
"""Called with what is being done, how many parts are behind it and how many there are."""


@contextmanager
def bar(first: str, *, quiet: bool) -> Iterator[OnPart]:
    """A progress bar that goes away at the end. first: what is being done until it is told."""
    if quiet or not sys.stderr.isatty():
        yield lambda name, number, count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as shown:
        task = shown.add_task(first, total=None)
        yield lambda name, number, count: shown.update(task, description=name, completed=number, total=count)
