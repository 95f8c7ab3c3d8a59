"""The ladder, and the policy without each of its ideas, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from pstar_sim.core.figures import BINDS_NAMES
from pstar_sim.report.tables import format_percent, heading
from pstar_sim.terminal import table_text, terminal_width, wrap
from pstar_sim.units import GB, format_bytes, format_s

if TYPE_CHECKING:
    from pstar_sim.planner.ablate import Ablation, Line

LADDER = ("change", "iteration", "gains", "in all", "h2d", "gains ", "d2h", "gains  ", "over bound", "binds")
WITHOUT = ("instead", "iteration", "costs", "h2d", "more", "d2h", "more ", "over bound", "binds")


def ladder_cells(line: Line) -> tuple[str, ...]:
    if not line.fits:
        return (line.change, "does not fit", *[""] * (len(LADDER) - 2))
    return (
        line.change,
        _seconds(line.iteration_s),
        _signed(line.gained_s),
        _signed(line.total_s),
        _gigabytes(line.h2d_bytes),
        _signed_bytes(line.gained_h2d_bytes),
        _gigabytes(line.d2h_bytes),
        _signed_bytes(line.gained_d2h_bytes),
        "" if line.gap is None else format_percent(line.gap),
        BINDS_NAMES.get(line.bound_by or "", line.bound_by or ""),
    )


def without_cells(line: Line) -> tuple[str, ...]:
    if not line.fits:
        return (line.change, "does not fit", *[""] * (len(WITHOUT) - 2))
    return (
        line.change,
        _seconds(line.iteration_s),
        _signed(None if line.gained_s is None else -line.gained_s),
        _gigabytes(line.h2d_bytes),
        _signed_bytes(None if line.gained_h2d_bytes is None else -line.gained_h2d_bytes),
        _gigabytes(line.d2h_bytes),
        _signed_bytes(None if line.gained_d2h_bytes is None else -line.gained_d2h_bytes),
        "" if line.gap is None else format_percent(line.gap),
        BINDS_NAMES.get(line.bound_by or "", line.bound_by or ""),
    )


def ablation_text(ablation: Ablation, *, width: int | None = None) -> str:
    """All that `pstar ablate` prints."""
    width = terminal_width() if width is None else width
    ladder = f"from {ablation.lines[0].policy} to {ablation.policy}, one change at a time"
    lines = [*wrap(heading(ablation), width), ""]
    lines.append(table_text(LADDER, [ladder_cells(line) for line in ablation.lines], width=width, title=ladder))
    without = [without_cells(line) for line in ablation.without]
    title = f"{ablation.policy} without one of its ideas"
    lines.append(table_text(WITHOUT, without, width=width, title=title))
    lines += [line for note in _notes(ablation) for line in wrap(note, width)]
    return "\n".join(lines).rstrip() + "\n"


def ablation_html(ablation: Ablation) -> str:
    ladder = _table(LADDER, [ladder_cells(line) for line in ablation.lines])
    without = _table(WITHOUT, [without_cells(line) for line in ablation.without])
    notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in _notes(ablation))
    top = escape(heading(ablation)).replace("\n", "<br>")
    return f"<p>{top}</p>{ladder}<p>{escape(ablation.policy)} without one of its ideas</p>{without}{notes}"


def _notes(ablation: Ablation) -> list[str]:
    plainest = ablation.lines[1]
    notes = [f"{plainest.change}: {plainest.policy}"]
    if ablation.settings.chunk_bytes is not None:
        notes.append(f"every line has chunks of {format_bytes(ablation.settings.chunk_bytes)}")
    if ablation.barrier is not None:
        notes.append(f"every line has the barrier that this setting asks for ({ablation.barrier})")
    notes += ablation.notes
    reasons: dict[str | None, list[str]] = {}
    for line in (*ablation.lines, *ablation.without):
        if not line.fits:
            reasons.setdefault(line.reason, []).append(line.change)
    return notes + [f"{'; '.join(changes)}: {reason}" for reason, changes in reasons.items()]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(head.strip())}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else format_s(seconds)


def _signed(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return "0 s" if abs(seconds) < 5e-7 else f"{'+' if seconds > 0 else '-'}{format_s(abs(seconds))}"


def _gigabytes(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / GB:.1f} GB"


def _signed_bytes(size_bytes: int | None) -> str:
    if size_bytes is None:
        return ""
    return "0" if abs(size_bytes) < GB / 20 else f"{size_bytes / GB:+.1f}"
