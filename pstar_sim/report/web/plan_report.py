"""The report of plans: pictures, table, certificate and explanation of one plan or several, or of a run beside its
prediction, as one HTML file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.effects import category_of, tide_at_cut
from pstar_sim.core.figures import moves_on_disks
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import PstarError
from pstar_sim.planner.binding import bound_by
from pstar_sim.planner.explain import WAITS, explain, held_between
from pstar_sim.planner.machine_notes import NO_DISKS, disk_life
from pstar_sim.planner.stated import Examined
from pstar_sim.report.byte_curves import CATEGORIES, byte_curves, moment_windows
from pstar_sim.report.residence import residence
from pstar_sim.report.run_figures import Figure
from pstar_sim.report.tables import BINDS_WORDS, format_change, format_percent
from pstar_sim.report.web.charts import CATEGORY_NAMES, Chart, lanes_chart, residence_chart, same_lanes, tide_chart
from pstar_sim.report.web.document import breakable, chart_place, document, legend_html, table_html, unbroken
from pstar_sim.units import format_bytes, format_error, format_params, format_s

__all__ = ["Subject", "plan_report"]

XS = ("time", "moment")
_PLACES = {"gpu": "GPU", "host": "host", "nvme": "disks"}
_TWO_PEAKS = (
    "The peaks of the certificate are the worst of every legal order of the steps; those of the figures are of the "
    "predicted order, and never above."
)
_CATEGORIES = {**CATEGORY_NAMES, "non-model": "the tide"}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One column of a report.

    title: different from the others'.
    timeline: predicted or measured.
    examined: None for a run, whose plan is another subject's.
    """

    title: str
    plan: Plan
    timeline: Timeline
    examined: Examined | None

    @property
    def measured(self) -> bool:
        return self.timeline.source == "measured"

    @property
    def as_planned(self) -> bool:
        """Whether the seconds are those of the plan's own machine. A run is predicted with the rates that it measures
        at its start; bound and error of the plan are not about such seconds."""
        if self.measured or self.examined is None:
            return False
        return math.isclose(self.timeline.iteration_s, self.examined.timeline.iteration_s, rel_tol=1e-6)


def plan_report(subjects: Sequence[Subject]) -> str:
    """Returns HTML, subjects side by side. A measured subject is also drawn over the one before it.

    Raises PstarError for no subject, for a timeline of another plan, and where Plotly is not installed.
    """
    if not subjects:
        raise PstarError("a report needs at least one plan")
    page = _Page(subjects)
    title = f"{', '.join(s.title for s in subjects)}: {subjects[0].plan.workload.model}"
    data = {"figures": page.figures, "x": page.first_x}
    return document(title, page.html(), data, script="plan_report.js")


class _Page:
    """figures: name -> Plotly figure."""

    def __init__(self, subjects: Sequence[Subject]) -> None:
        self.subjects = subjects
        self.figures: dict[str, Any] = {}
        self.overlaid = any(s.measured for s in subjects)
        self.first_x = "moment" if self.overlaid else "time"
        self.right_s = max(s.timeline.iteration_s for s in subjects)
        self.top_bytes = max(s.timeline.budget_bytes.get("gpu") or s.timeline.peak_bytes["gpu"] for s in subjects)
        self.moments = max(int(moment_windows(s.timeline)[0][-1]) + 1 for s in subjects)

    def html(self) -> str:
        parts = (
            self._head,
            self._table,
            self._tides,
            self._lanes,
            self._chunks,
            self._bytes,
            self._proofs,
            self._words,
        )
        return "\n".join(part() for part in parts)

    def _head(self) -> str:
        said = [_job(subject.plan) for subject in self.subjects]
        rooms = [_budgets(subject.plan.machine) for subject in self.subjects]
        if len(set(rooms)) > 1:
            said = [f"{job} with {room}" for job, room in zip(said, rooms)]
        if len(set(said)) > 1:
            said = [f"{subject.title}: {job}" for subject, job in zip(self.subjects, said)]
        jobs = dict.fromkeys(said)
        soft = "".join(f'<p class="soft">{escape(job)}</p>' for job in jobs)
        theme = '<button data-theme-button aria-label="change between light and dark">dark</button>'
        return (
            f'<div class="row"><h1>{breakable(" beside ".join(s.title for s in self.subjects))}</h1>{theme}</div>'
            f'{soft}<p class="answer">{unbroken(self._verdict())}</p>'
        )

    def _verdict(self) -> str:
        """The seconds of each subject: a prediction compared with the first one, a run with its own prediction."""
        first, *others = self.subjects
        said = [f"{first.title}: {format_s(first.timeline.iteration_s)} per iteration{_error(first)}"]
        for before, other in pairwise(self.subjects):
            base = before if other.measured else first
            seconds = other.timeline.iteration_s
            share = seconds / base.timeline.iteration_s - 1
            errors = [] if other.measured else [_expected(first), _expected(other)]
            change = format_change(share, *errors) if errors else f"{share:+.1%}".replace("%", " %")
            if _work(other.plan) != _work(base.plan):
                said.append(f"{other.title}: {format_s(seconds)}{_error(other)} for another job")
                continue
            than = "as long" if abs(share) < 5e-4 else f"{change[1:]} {'longer' if share > 0 else 'shorter'}"
            if other.measured and len(others) > 1:
                than += " as predicted" if than == "as long" else " than predicted"
            said.append(f"{other.title}: {format_s(seconds)}{_error(other)}, {than}")
        return "; ".join(said) + "."

    def _table(self) -> str:
        columns = [dict(_quantities(s)) for s in self.subjects]
        names = list(dict.fromkeys(name for column in columns for name in column))
        rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
        heads = ["", *(s.title for s in self.subjects)]
        if len(self.subjects) == 2 and self.subjects[1].measured:
            heads.append("difference")
            apart = {figure.name: figure.words()[3].replace("%", " %") for figure in _differences(*self.subjects)}
            rows = [(*row, apart.get(row[0], "")) for row in rows]
        wear = [disk_life(s.plan, s.timeline.iteration_s) for s in self.subjects]
        notes = [f"{s.title}: measured in one iteration, the last of the run" for s in self.subjects if s.measured]
        notes += [
            f"{s.title}: predicted with the rates that the run measured at its start; the plan's bound and error, "
            "which are of the rates in its file, are left out"
            for s in self.subjects
            if not s.measured and not s.as_planned
        ]
        notes += [one for one in dict.fromkeys(wear) if one]
        said = "".join(f'<p class="note">{escape(note)}.</p>' for note in notes)
        return f"<h2>Figures</h2>{table_html(heads, rows)}{said}"

    def _columns(self, cells: Sequence[str]) -> str:
        return f'<div class="columns">{"".join(f"<div>{cell}</div>" for cell in cells)}</div>'

    def _each(self, name: str, says: str, charts: Sequence[Chart]) -> str:
        """Returns the legend, and a column per subject with its chart.

        says: the charts in words.
        """
        cells = [self._drawn(f"{name} {n}", *one, says) for n, one in enumerate(zip(self.subjects, charts))]
        return f"{_legend(charts)}{self._columns(cells)}"

    def _drawn(self, name: str, subject: Subject, chart: Chart, says: str) -> str:
        self.figures[name] = chart.figure
        place = chart_place(name, f"{says} of {subject.title}")
        return f"<h3>{breakable(subject.title)}</h3>{place}{_notes(chart)}"

    def _tides(self) -> str:
        drawn: dict[str, list[Chart]] = {x: [] for x in XS}
        cells = []
        for n, subject in enumerate(self.subjects):
            after = self.subjects[n + 1 : n + 2]
            over = after[0].timeline if after and after[0].measured else None
            alone = n > 0 and subject.measured  # by moment, a run lies over its prediction
            above, below = "", ""
            for x in XS[:1] if alone else XS:
                chart = self._tide(n, x, over if x == "moment" else None)
                drawn[x].append(chart)
                title = f"{subject.title} (areas), measured (lines)" if over and x == "moment" else subject.title
                above += f'<div data-x="{x}"{self._hidden(x)}><h3>{breakable(title)}</h3></div>'
                below += f'<div data-x="{x}"{self._hidden(x)}>{_notes(chart)}</div>'  # charts side by side stay level
            place = chart_place(f"tide {n}", f"GPU memory over the iteration of {subject.title}")
            cell = f"{above}{place}{below}"
            cells.append(f'<div data-x="{XS[0]}"{self._hidden(XS[0])}>{cell}</div>' if alone else cell)
        pressed = {x: str(x == self.first_x).lower() for x in XS}
        legends = "".join(f'<div data-x="{x}"{self._hidden(x)}>{_legend(charts)}</div>' for x, charts in drawn.items())
        buttons = "".join(f'<button value="{x}" aria-pressed="{pressed[x]}">by {x}</button>' for x in XS)
        return (
            f'<div class="row head"><h2>What fills the GPU</h2><div data-choice="x">{buttons}</div></div>'
            "<p>Model data stands on the floor, the tide hangs from the capacity. What is between them is free.</p>"
            f"{legends}{self._columns(cells)}"
        )

    def _tide(self, n: int, x: str, over: Timeline | None) -> Chart:
        """Keeps the figure among the page's.

        over: a run, drawn as lines.
        """
        right = self.right_s if x == "time" else float(self.moments)
        timeline = self.subjects[n].timeline
        chart = tide_chart(timeline, x=x, right=right, top_bytes=self.top_bytes, measured=over)
        self.figures[f"tide {n} {x}"] = chart.figure
        return chart

    def _hidden(self, x: str) -> str:
        return "" if x == self.first_x else " hidden"

    def _lanes(self) -> str:
        drawn = same_lanes([lanes_chart(s.timeline, right_s=self.right_s, plan=s.plan) for s in self.subjects])
        charts = self._each("lanes", "what every queue does", drawn)
        return (
            "<h2>What the queues do</h2><p>A gap in a lane is time in which the queue waits. The lane below compute "
            "says what compute waits for, in the colour of the cause with most of the wait; the seconds of every cause "
            f"stand above.</p>{charts}"
        )

    def _chunks(self) -> str:
        drawn = [residence_chart(residence(s.plan, s.timeline), right_s=self.right_s) for s in self.subjects]
        charts = self._each("chunks", "which chunks are on the GPU", drawn)
        sliced = ""
        if any(subject.plan.layout.ranks > 1 for subject in self.subjects):
            sliced = " Chunks are sliced over the GPUs. A chunk counts as there if this GPU has its own slice of it."
        return (
            "<h2>Which chunks are on the GPU</h2><p>A row per chunk, from the first layers at the top to the last. "
            f"A chunk that has several things there has the colour of the last one named.{sliced}</p>{charts}"
        )

    def _bytes(self) -> str:
        cells = []
        for subject in self.subjects:
            heads = ("", "between iterations", "when fullest")
            cells.append(f"<h3>{breakable(subject.title)}</h3>{table_html(heads, list(_places(subject)))}")
        return f"<h2>Where every byte lives</h2>{self._columns(cells)}"

    def _proofs(self) -> str:
        cells = []
        for subject in self.subjects:
            if subject.examined is not None:
                text = f"{subject.examined.report.describe()}\n{subject.examined.bound}"
                if moves_on_disks(subject.plan.moved_bytes):
                    text += f"\n{NO_DISKS}"
                peaks = subject.examined.timeline.peak_bytes
                if any(peaks.get(place, size) != size for place, size in subject.examined.report.peak_bytes.items()):
                    text += f"\n{_TWO_PEAKS}"
                cells.append(f"<h3>{breakable(subject.title)}</h3><pre>{escape(text)}</pre>")
        return f"<h2>Certificate</h2>{self._columns(cells)}"

    def _words(self) -> str:
        parts = []
        for subject in self.subjects:
            if subject.examined is None:
                continue
            cost = subject.plan.predictions.get("barrier_cost_s")
            text = explain(subject.plan, subject.examined.timeline, barrier_cost_s=cost, width=100_000)
            parts.append(
                f"<details open><summary>{breakable(subject.title)}</summary><pre>{escape(text)}</pre></details>"
            )
        return "<h2>Explanation</h2>" + "".join(parts)


def _legend(charts: Sequence[Chart]) -> str:
    lines = {name: style for chart in charts for name, style in chart.lines.items()}
    return legend_html(_merged([chart.legend for chart in charts]), lines)


def _merged(legends: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """A name that a later legend brings stands behind the one before it there."""
    names: list[str] = []
    for legend in legends:
        at = 0
        for name in legend:
            if name not in names:
                names.insert(at, name)
            at = names.index(name) + 1
    colours = {name: colour for legend in legends for name, colour in legend.items()}
    return {name: colours[name] for name in names}


def _job(plan: Plan) -> str:
    w, m = plan.workload, plan.machine
    each = f"{w.batch}{f' on each of {m.world_size} GPUs' if m.world_size > 1 else ''}"
    batch = f"batch {plan.own_batches or each}"
    batch += f" x {w.micro_batches} micro-batches" if w.micro_batches > 1 else ""
    return f"{w.model}, {format_params(w.params)} parameters, {batch}, sequence {w.sequence}, {w.dtype}, on {m.name}"


def _budgets(machine: Machine) -> str:
    return (
        f"{format_bytes(machine.gpu_budget_bytes)} of GPU and {format_bytes(machine.host_budget_bytes)} of host memory"
    )


def _work(plan: Plan) -> tuple[str, int, int]:
    """Seconds of plans are compared if their work is equal, also on different machines."""
    return plan.workload.model, plan.workload.params, plan.tokens


def _notes(chart: Chart) -> str:
    return "".join(f'<p class="note">{escape(note)}.</p>' for note in chart.notes)


def _expected(subject: Subject) -> float | None:
    return subject.plan.predictions.get("expected_error") if subject.as_planned else None


def _error(subject: Subject) -> str:
    error = _expected(subject)
    return "" if error is None else f" {format_error(error)}"


def _quantities(subject: Subject) -> Iterator[tuple[str, str]]:
    plan, timeline, said = subject.plan, subject.timeline, subject.plan.predictions
    seconds = timeline.iteration_s
    yield "iteration", f"{format_s(seconds)}{_error(subject)}"
    tokens = plan.tokens
    yield "tokens/s", f"{tokens / seconds:,.0f}{_error(subject)}"
    bound_s = said.get("lower_bound_s")
    if bound_s and subject.as_planned:
        on_disks = moves_on_disks(timeline.moved_bytes)
        yield "lower bound", format_s(bound_s) + (" (counts no disks)" if on_disks else "")
        if not on_disks:
            yield "above the bound", format_percent(seconds / bound_s - 1)
    if not subject.measured:
        binds = bound_by(timeline, barrier_cost_s=said.get("barrier_cost_s"))
        yield "binds", BINDS_WORDS.get(binds, binds)
    for place, name in _PLACES.items():
        peak, budget = timeline.peak_bytes.get(place), timeline.budget_bytes.get(place)
        if peak or (budget and peak is not None):
            yield f"{name} peak", format_bytes(peak)
        if budget:
            yield f"{name} capacity", format_bytes(budget)
    for way, name in _ways(timeline):
        yield name, format_bytes(timeline.moved_bytes.get(way, 0))
    yield "compute waits", format_s(sum(timeline.stall_s.values()))
    for cause, stall_s in sorted(timeline.stall_s.items(), key=lambda item: -item[1]):
        if stall_s > 0:
            yield f"- {WAITS.get(cause, cause)}", format_s(stall_s)
    if plan.ranked is not None or plan.machine.mixed:
        yield "seconds and bytes", "of the slowest rank"


def _ways(timeline: Timeline) -> Iterator[tuple[str, str]]:
    """Yields key and name. The ways to and from disks are there only if something moves."""
    yield "h2d", "host to GPU"
    yield "d2h", "GPU to host"
    for way, name in (("nvme_read", "read from disk"), ("nvme_write", "written to disk")):
        if timeline.moved_bytes.get(way, 0):
            yield way, name


def _differences(predicted: Subject, measured: Subject) -> Iterator[Figure]:
    a, b = predicted.timeline, measured.timeline
    yield Figure("iteration", "s", a.iteration_s, b.iteration_s)
    yield Figure("tokens/s", "s", 1 / a.iteration_s, 1 / b.iteration_s)
    for place, name in _PLACES.items():
        if place in a.peak_bytes and place in b.peak_bytes:
            yield Figure(f"{name} peak", "B", a.peak_bytes[place], b.peak_bytes[place])
    for way, name in _ways(a):
        yield Figure(name, "B", a.moved_bytes.get(way, 0), b.moved_bytes.get(way, 0))
    yield Figure("compute waits", "s", sum(a.stall_s.values()), sum(b.stall_s.values()))


def _places(subject: Subject) -> Iterator[tuple[str, str, str]]:
    """Yields each category, the sum, and the capacity."""
    cut = _between(subject.plan)
    sampled = set(subject.timeline.columns("samples")["place"])
    for place, name in _PLACES.items():
        if place not in sampled:
            continue
        curves = byte_curves(subject.timeline, place=place)
        at = int(curves.total.argmax())
        full = {category: int(values[at]) for category, values in curves.values.items()}
        for category in CATEGORIES:
            now, most = cut.get((place, category), 0), full.get(category, 0)
            if now or most:
                yield f"{name}: {_CATEGORIES[category]}", format_bytes(now), format_bytes(most)
        in_all = sum(size for (where, _), size in cut.items() if where == place)
        yield f"{name}: in all", format_bytes(in_all), format_bytes(sum(full.values()))
        most = subject.timeline.peak_bytes.get(place, 0)
        if most > sum(full.values()):  # at an instant of length 0, which no curve shows
            yield f"{name}: at most, for an instant", "", format_bytes(most)
        budget = subject.timeline.budget_bytes.get(place)
        if budget:
            yield f"{name}: capacity", format_bytes(budget), format_bytes(budget)


def _between(plan: Plan) -> dict[tuple[str, str], int]:
    held: dict[tuple[str, str], int] = {}
    buffers = {name for name, _, _ in plan.buffers}
    for (place, name), size in held_between(plan).items():
        key = place.value, "buffer" if name in buffers else category_of(name)
        held[key] = held.get(key, 0) + size
    tide = tide_at_cut([moment.peak_bytes for moment in plan.workload.moments])
    return {**held, (Place.GPU.value, "non-model"): tide}
