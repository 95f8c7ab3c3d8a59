"""Host memory while loading, in the first step, saving, resuming."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pstar_sim.report.tables import format_size
from pstar_sim.terminal import table_text, terminal_width, wrap

if TYPE_CHECKING:
    from pstar_sim.catalog.machine import Host
    from pstar_sim.planner.fits import Fit
    from pstar_sim.planner.memory_needs import Phase


def phases_text(rows: Sequence[Fit], host: Host, *, width: int | None = None) -> str:
    """A line per known policy or configuration, and what comes beside steps."""
    width = terminal_width() if width is None else width
    rows = [row for row in rows if row.phases]
    if not rows:
        return ""
    head = f"host memory of a node by phase, all its GPUs together, of {format_size(host.budget_bytes)}"
    names = [phase.name for phase in rows[0].phases]
    cells = [(row.policy, *(_cell(phase, host) for phase in row.phases)) for row in rows]
    alike: dict[tuple[str, str], list[str]] = {}  # phase, what comes beside -> policies
    for row in rows:
        for phase in row.phases:
            if phase.what:
                alike.setdefault((phase.name, phase.what), []).append(row.policy)
    beside = [f"{_who(policies, len(rows))}, {name}: {what}" for (name, what), policies in alike.items()]
    beside += [f"{row.policy}: {_pins(row, host)}" for row in rows if _pins(row, host)]
    lines = [*wrap(head, width), table_text(["policy", *names], cells, width=width).rstrip(), ""]
    return "\n".join([*lines, *(line for text in beside for line in wrap(text, width))]) + "\n"


def short_phases(row: Fit, host: Host) -> Iterator[str]:
    """If the host has no room for saving or resuming."""
    for phase in row.phases[2:]:
        if _lacks(phase, host):
            need = f"{format_size(phase.host_bytes)} of host memory of a node, of {format_size(host.budget_bytes)}"
            instead = f"; {phase.instead} needs less" if phase.instead else ""
            yield f"{phase.name} needs {need}: {phase.what or 'the memory of its steps'}{instead}."


def _who(policies: Sequence[str], rows: int) -> str:
    return "all" if len(policies) == rows > 1 else ", ".join(policies)


def _pins(row: Fit, host: Host) -> str:
    most = max(phase.pinned_bytes for phase in row.phases)
    if not _pins_too_much(most, host):
        return ""
    return f"{format_size(most)} are to be pinned, and this system pins {format_size(host.pinned_bytes or 0)}"


def _cell(phase: Phase, host: Host) -> str:
    if phase.host_bytes is None:
        return "not counted"
    lacks = _lacks(phase, host) or _pins_too_much(phase.pinned_bytes, host)
    return f"{'no: ' if lacks else ''}{format_size(phase.host_bytes)}"


def _lacks(phase: Phase, host: Host) -> bool:
    return phase.host_bytes is not None and phase.host_bytes > host.budget_bytes


def _pins_too_much(pinned_bytes: int, host: Host) -> bool:
    return host.pinned_bytes is not None and pinned_bytes > host.pinned_bytes
