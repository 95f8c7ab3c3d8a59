"""Results for notebooks (`_repr_html_`): tables and small pictures without scripts, in the notebook's theme."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import MODES, Plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import PstarError
from pstar_sim.planner.confidence import confidence_line
from pstar_sim.planner.explain import WAITS, held_between
from pstar_sim.report.byte_curves import byte_curves
from pstar_sim.report.palette import CATEGORIES, CATEGORY_NAMES, policy_colours
from pstar_sim.report.tables import HEADS, cells, heading, reasons
from pstar_sim.units import format_bytes, format_error, format_s
from pstar_sim.workload.workload import Workload

if TYPE_CHECKING:
    from pstar_sim.planner.compare import Comparison, Planned

WIDTH, HEIGHT = 640, 120
LETTER = 8  # pixels of a letter beside a bar
POINTS = 320  # points of a curve; each is the highest instant of its stretch


def machine_html(machine: Machine) -> str:
    m, count = machine, machine.world_size
    gpus = " + ".join(f"{n} x {name}" for name, n in Counter(rank.gpu.name for rank in m.ranks).items())
    each, node = (" per GPU", " of a node") if count > 1 else ("", "")
    rows = [
        ("GPU", m.gpu.name if count == 1 else f"{gpus} on {m.nodes} node{'s'[: m.nodes > 1]}"),
        ("GPU memory for a plan", f"{format_bytes(m.gpu_budget_bytes)} of {format_bytes(m.gpu.memory_bytes)}"),
        (
            "host memory for a plan",
            f"{format_bytes(m.host_budget_bytes)}{each} of {format_bytes(m.host.memory_bytes)}{node}",
        ),
        ("link to the GPU", f"{m.link.name}, {format_bytes(m.link.h2d_bytes_per_s)}/s"),
        ("host DRAM", f"{format_bytes(m.host.dram_bytes_per_s)}/s{node}"),
        ("CPU Adam", f"{m.adam_params_per_s / 1e9:.3g} billion parameters/s{each}"),
        *((dtype, f"{rate / 1e12:.4g} Tflops/s") for dtype, rate in m.gpu.flops_per_s.items()),
        *([("disks", f"{format_bytes(m.nvme_budget_bytes)}{each}")] if m.nvme is not None else []),
        ("figures", confidence_line(m.confidence_by_input)),
    ]
    notes = [m.notes] if m.notes else []
    if m.mixed:
        notes.append("GPUs and links differ: the figures of each are the least of all")
    note = "".join(f"<p><small>{escape(text)}</small></p>" for text in notes)
    return f"<p><b>{escape(m.name)}</b></p>{_table((), rows)}{note}"


def workload_html(workload: Workload) -> str:
    w = workload
    rows = [
        ("parameters", f"{w.params / 1e9:.3f} billion, {w.dtype}"),
        ("batch", f"{w.batch} x {w.micro_batches} micro-batch{'es' if w.micro_batches > 1 else ''}"),
        ("tokens per sequence", str(w.sequence)),
        ("checkpointing", "on" if w.checkpointing else "off"),
        ("optimizer", w.optimizer.words or w.optimizer.name),
        ("moments", str(len(w.moments))),
        ("peak of the tide", format_bytes(w.peak_non_model_bytes)),
    ]
    tide = np.array([moment.peak_bytes for moment in w.moments])
    edges = np.arange(len(tide) + 1, dtype=np.float64)
    picture = _stacked(edges, {"non-model": tide}, float(tide.max()), "non-model data over the moments of an iteration")
    return f"<p><b>{escape(w.model)}</b></p>{_table((), rows)}{picture}"


def plan_html(plan: Plan) -> str:
    """Job, chunks, steps, and bytes by place between two iterations."""
    w = plan.workload
    modes = [f"{plan.modes.count(mode)} {mode}" for mode in MODES if mode in plan.modes]
    rows = [
        ("chunks", f"{len(plan.modes)} of {format_bytes(plan.layout.chunk_bytes)}: {', '.join(modes)}"),
        ("steps", _kinds(plan)),
        *((f"moved, {way}", format_bytes(size)) for way, size in plan.moved_bytes.items()),
    ]
    for place, budget in plan.budgets.items():
        held = ", ".join(
            f"{name} {format_bytes(n)}" for (p, name), n in sorted(held_between(plan).items()) if p is place
        )
        rows.append((f"{place.value} between iterations", f"{held or 'nothing'}; capacity {format_bytes(budget)}"))
    if "iteration_s" in plan.predictions:
        rows.append(("predicted iteration", format_s(plan.predictions["iteration_s"])))
    title = f"<b>{escape(plan.policy)}</b>: {escape(w.model)}, {w.dtype}, batch {w.batch} x {w.micro_batches}"
    return f"<p>{title}, on {escape(plan.machine.name)}</p>{_table((), rows)}"


def comparison_html(comparison: Comparison) -> str:
    rows = [cells(row) for row in comparison.rows]
    said = [*reasons(comparison), *(f"note: {note}" for note in comparison.notes)]
    notes = "".join(f"<p><small>{escape(text)}</small></p>" for text in said)
    seconds = {
        row.policy: (row.iteration_s, row.expected_error) for row in comparison.rows if row.fits and row.iteration_s
    }
    top = escape(heading(comparison)).replace(chr(10), "<br>")
    return f"<p>{top}</p>{_table(HEADS, rows)}{_bars(seconds) if len(seconds) > 1 else ''}{notes}"


def planned_html(planned: Planned) -> str:
    """The table's line, steps by kind, and bytes on the GPU."""
    steps = f"<p><small>{escape(_kinds(planned.plan))}</small></p>"
    return f"{_table(HEADS, [cells(planned.row)])}{steps}{_tide(planned.timeline)}"


def timeline_html(timeline: Timeline) -> str:
    rows = [("iteration", format_s(timeline.iteration_s))]
    rows += [(f"peak {place}", format_bytes(size)) for place, size in timeline.peak_bytes.items()]
    rows += [(direction, format_bytes(size)) for direction, size in timeline.moved_bytes.items()]
    rows += [
        (f"compute waits {WAITS.get(cause, cause)}", format_s(s)) for cause, s in timeline.stall_s.items() if s > 0
    ]
    title = f"{timeline.label or 'timeline'} ({timeline.source})"
    return f"<p>{escape(title)}</p>{_table((), rows)}{_tide(timeline)}"


def _kinds(plan: Plan) -> str:
    kinds: dict[str, int] = {}
    for step in plan.steps:
        kinds[step.kind.value] = kinds.get(step.kind.value, 0) + 1
    what = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items(), key=lambda item: -item[1]))
    return f"{len(plan.steps)} steps: {what}"


def _tide(timeline: Timeline) -> str:
    try:
        curves = byte_curves(timeline)
    except PstarError:  # a timeline may have no samples; its table needs none
        return ""
    capacity = float(timeline.budget_bytes.get("gpu") or curves.total.max())
    return _stacked(curves.edges, curves.values, capacity, "GPU memory over the iteration", hanging="non-model")


def _stacked(
    edges: np.ndarray, values: Mapping[str, np.ndarray], top: float, says: str, *, hanging: str | None = None
) -> str:
    """An SVG with legend; areas of `hanging` start from the top.

    edges: n + 1 positions.
    values: category -> n bytes.
    """
    at = np.searchsorted(edges, np.linspace(edges[0], edges[-1], POINTS + 1)[:-1], side="right") - 1
    ends = np.append(at[1:], len(edges) - 1)
    xs = np.repeat(np.linspace(0, WIDTH, POINTS + 1), 2)[1:-1]
    floor = np.zeros(POINTS)
    areas, names = [], []
    for category, column in values.items():
        if not column.any():
            continue
        high = np.array([column[a : max(b, a + 1)].max() for a, b in zip(at, ends)], np.float64)
        low, up = (top - high, np.full(POINTS, top)) if category == hanging else (floor, floor + high)
        floor = floor if category == hanging else up
        colour = CATEGORIES.get(category, "#999999")
        ys = [HEIGHT * (1 - np.repeat(edge, 2) / (top or 1.0)) for edge in (up, low)]
        line = [f"{x:.0f},{y:.1f}" for x, y in zip(xs, ys[0])] + [
            f"{x:.0f},{y:.1f}" for x, y in zip(xs[::-1], ys[1][::-1])
        ]
        areas.append(f'<polygon fill="{colour}" points="{" ".join(line)}"/>')
        names.append(f'<span style="color:{colour}">&#9632;</span> {escape(CATEGORY_NAMES.get(category, category))}')
    frame = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>'
    picture = (
        f'<svg role="img" aria-label="{escape(says)}" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'style="max-width:100%">{"".join(areas)}{frame}</svg>'
    )
    text = f"{escape(says)}, up to {format_bytes(top)}: {' &nbsp; '.join(names)}"
    return f"<p><small>{text}</small></p>{picture}"


def _bars(seconds: Mapping[str, tuple[float, float | None]]) -> str:
    longest, row = max(time_s for time_s, _ in seconds.values()), 22
    lines = []
    colours = policy_colours(seconds)
    for n, (policy, (time_s, error)) in enumerate(seconds.items()):
        length = 0.62 * WIDTH * time_s / longest
        colour, y = colours[n], n * row
        time = f"{format_s(time_s)} {format_error(error)}"
        room = max(4, int((WIDTH - length - 6) / LETTER) - len(time) - 2)  # the table above has the whole name
        name = policy if len(policy) <= room else f"{policy[: room - 1]}\N{HORIZONTAL ELLIPSIS}"
        text = f"<title>{escape(policy)}</title>{escape(name)}, {time}"
        lines.append(
            f'<rect y="{y + 2}" width="{length:.0f}" height="{row - 5}" fill="{colour}"/>'
            f'<text x="{length + 6:.0f}" y="{y + 15}" font-size="13" fill="currentColor">{text}</text>'
        )
    height = row * len(seconds)
    return (
        "<p><small>seconds per iteration: the shorter, the faster</small></p>"
        f'<svg role="img" aria-label="seconds per iteration" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'style="max-width:100%">{"".join(lines)}</svg>'
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table>{'<thead><tr>' + top + '</tr></thead>' if heads else ''}<tbody>{body}</tbody></table>"
