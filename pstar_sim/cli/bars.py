"""A long command's progress bar: on a terminal's stderr, unless quiet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


@contextmanager
def bar(first: str, *, quiet: bool, alike: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Yields the function that moves it (`planner.asked.OnPart`).

    first: text until the first call.
    alike: parts take the same time, so the time left is shown, not the time spent.
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
    """On a narrow terminal the description folds; rich cuts figures only without room (32 columns for thousands of
    parts)."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.table import Column

    return (
        TextColumn("{task.description}", table_column=Column(overflow="fold")),
        BarColumn(bar_width=12, table_column=Column(no_wrap=True)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        time(table_column=Column(no_wrap=True)),
    )
