"""A long command's progress on stderr, unless quiet: a bar on a terminal, else a line twice a minute."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pstar_sim.units import format_s

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

LINE_EVERY_S = 30.0


@contextmanager
def bar(first: str, *, quiet: bool, alike: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Yields the function that moves it (`planner.asked.OnPart`).

    first: text until the first call.
    alike: parts take the same time, so the time left is shown, not the time spent.
    """
    if quiet:
        yield lambda name, number, count: None
        return
    if not sys.stderr.isatty():
        with _lines(first, LINE_EVERY_S) as move:
            yield move
        return
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn

    column = TimeRemainingColumn if alike else TimeElapsedColumn
    with Progress(*parts(column), console=Console(file=sys.stderr), transient=True) as shown:
        task = shown.add_task(first, total=None)
        yield lambda name, number, count: shown.update(task, description=name, completed=number, total=count)


@contextmanager
def _lines(first: str, every_s: float) -> Iterator[Callable[[str, int, int], None]]:
    """From a thread, since one part may take minutes."""
    out, begun_s, ended = sys.stderr, time.monotonic(), threading.Event()
    now = [first]

    def move(name: str, number: int, count: int) -> None:
        now[0] = f"{name}, {number} of {count} done"

    def write() -> None:
        while not ended.wait(every_s):
            try:
                out.write(f"pstar: {now[0]}, after {format_s(time.monotonic() - begun_s)}\n")
                out.flush()
            except OSError:  # nobody reads it any more
                return

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield move
    finally:
        ended.set()
        writer.join()


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
