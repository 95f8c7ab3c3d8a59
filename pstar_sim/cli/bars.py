"""The progress bar of a long command: on stderr, on a terminal only; none if quiet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

__all__ = ["bar", "parts"]


@contextmanager
def bar(first: str, *, quiet: bool, alike: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Yields the function that moves the bar (`planner.asked.OnPart`), which goes away at the end.

    first: the text until the first call.
    alike: all parts take about the same time, so the bar shows the time left instead of the time spent.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda name, number, count: None
        return
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn

    time = TimeRemainingColumn if alike else TimeElapsedColumn
    with Progress(*parts(time), console=Console(file=sys.stderr), transient=True) as shown:
        task = shown.add_task(first, total=None)
        yield lambda name, number, count: shown.update(task, description=name, completed=number, total=count)


def parts(time: type[ProgressColumn]) -> tuple[ProgressColumn, ...]:
    """On a narrow terminal the description folds. rich cuts the figures only where there is no room (32 columns for
    thousands of parts)."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.table import Column

    return (
        TextColumn("{task.description}", table_column=Column(overflow="fold")),
        BarColumn(bar_width=12, table_column=Column(no_wrap=True)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        time(table_column=Column(no_wrap=True)),
    )
