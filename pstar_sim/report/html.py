"""HTML of results for notebooks: small tables without scripts or colours of their own, behind `_repr_html_`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from pstar_sim.core.timeline import Timeline
from pstar_sim.report.tables import HEADS, cells, heading, reasons
from pstar_sim.units import format_bytes, format_s

if TYPE_CHECKING:
    from pstar_sim.planner.compare import Comparison, Planned

__all__ = ["comparison_html", "planned_html", "timeline_html"]


def comparison_html(comparison: Comparison) -> str:
    """Heading, table, reasons and notes."""
    rows = [cells(row) for row in comparison.rows]
    said = [*reasons(comparison), *(f"note: {note}" for note in comparison.notes)]
    notes = "".join(f"<p><small>{escape(text)}</small></p>" for text in said)
    return f"<p>{escape(heading(comparison)).replace(chr(10), '<br>')}</p>{_table(HEADS, rows)}{notes}"


def planned_html(planned: Planned) -> str:
    """The line of the table, and the number of the plan's steps by kind."""
    kinds: dict[str, int] = {}
    for step in planned.plan.steps:
        kinds[step.kind.value] = kinds.get(step.kind.value, 0) + 1
    what = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items(), key=lambda item: -item[1]))
    return f"{_table(HEADS, [cells(planned.row)])}<p><small>{len(planned.plan.steps)} steps: {escape(what)}</small></p>"


def timeline_html(timeline: Timeline) -> str:
    """Iteration time, peaks, bytes moved and stalls."""
    rows = [("iteration", format_s(timeline.iteration_s))]
    rows += [(f"peak {place}", format_bytes(size)) for place, size in timeline.peak_bytes.items()]
    rows += [(direction, format_bytes(size)) for direction, size in timeline.moved_bytes.items()]
    rows += [(f"compute waits for {cause}", format_s(s)) for cause, s in timeline.stall_s.items() if s > 0]
    title = f"{timeline.label or 'timeline'} ({timeline.source})"
    return f"<p>{escape(title)}</p>{_table((), rows)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table>{'<thead><tr>' + top + '</tr></thead>' if heads else ''}<tbody>{body}</tbody></table>"
