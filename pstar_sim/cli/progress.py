"""A run's progress on stderr: live lines on a terminal, plain ones elsewhere.

Called after each step, with `session.status()`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from pstar_sim.cli.bars import parts
from pstar_sim.core.plan import Plan
from pstar_sim.units import format_bytes

if TYPE_CHECKING:
    from executor.measuring.status import Status
    from executor.training import StepReport

OnStep = Callable[["StepReport", "Status"], None]
PLAIN_EVERY_S = 1.0


@contextmanager
def progress(
    steps: int,
    plan: Plan,
    *,
    quiet: bool,
    file: IO[str] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[OnStep | None]:
    """The function to call after each step, unless quiet.

    file: by default stderr. A terminal has live lines, other files one per step, at most one per second, and the last.
    """
    if quiet:
        yield None
        return
    out = sys.stderr if file is None else file
    if not out.isatty():
        yield _plain(steps, plan, out, clock)
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import Progress, TimeRemainingColumn
    from rich.text import Text

    bar = Progress(*parts(TimeRemainingColumn))
    task = bar.add_task(plan.policy, total=steps)
    live = Live(console=Console(file=out), refresh_per_second=4)
    try:

        def on_step(report: StepReport, status: Status) -> None:
            bar.update(task, completed=report.step + 1)
            # On lines of their own: rich would cut text that has no room beside the bar.
            live.update(Group(bar, *(Text(f"  {line}") for line in words(plan, report, status))))
            if not live.is_started:  # from the first step on: a failure before it prints one line only, its reason
                live.start()

        yield on_step
    except BaseException:
        live.transient = True
        raise
    finally:
        if live.is_started:
            live.stop()


def _plain(steps: int, plan: Plan, out: IO[str], clock: Callable[[], float]) -> OnStep:
    last_s = -PLAIN_EVERY_S

    def on_step(report: StepReport, status: Status) -> None:
        nonlocal last_s
        now_s = clock()
        if now_s - last_s >= PLAIN_EVERY_S or report.step + 1 == steps:
            last_s = now_s
            out.write(plain_line(steps, plan, report, status) + "\n")
            out.flush()

    return on_step


def plain_line(steps: int, plan: Plan, report: StepReport, status: Status) -> str:
    return f"step {report.step + 1}/{steps}: " + "; ".join(words(plan, report, status))


def words(plan: Plan, report: StepReport, status: Status) -> list[str]:
    """Loss, speed and deviations; bytes in each place; the link in both directions."""
    rate = plan.tokens / report.time_s if report.time_s > 0 else 0.0
    held = (
        f"GPU {format_bytes(status.gpu_peak_bytes)} at most of {format_bytes(status.gpu_budget_bytes)}, "
        f"host {format_bytes(status.host_bytes)} of {format_bytes(status.host_budget_bytes)}"
    )
    if status.exchanges:
        held += f", {status.exchanges} exchanges of GPU memory with the driver"
    plan_words = "on plan" if not status.deviations else f"{status.deviations} off plan"
    links: list[str] = []
    for direction, use in status.links.items():
        of = f" of {format_bytes(use.link_bytes_per_s)}/s" if use.link_bytes_per_s is not None else ""
        busy = f" busy {use.busy_share:.0%}" if status.on_plan else ""
        links.append(f"{direction} {format_bytes(use.bytes_per_s)}/s{of}{busy}")
    links.append(f"compute waits {status.waiting_share:.0%}")
    whose = "" if plan.machine.world_size == 1 else " of the first rank"
    return [f"loss{whose} {report.loss:.4f}, {rate:,.0f} tokens/s, {plan_words}", held, ", ".join(links)]
