"""Plans, or a run beside its prediction, as one HTML file, whose first screen has the answer, four figures, their
source, and the tide."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.effects import category_of, tide_at_cut
from pstar_sim.core.figures import BINDS_NAMES, BINDS_WORDS
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import PstarError
from pstar_sim.planner.binding import bound_by
from pstar_sim.planner.explain import WAITS, explain, held_between
from pstar_sim.planner.machine_notes import disk_life
from pstar_sim.planner.stated import Examined
from pstar_sim.report.byte_curves import CATEGORIES, byte_curves, moment_windows
from pstar_sim.report.palette import CATEGORY_NAMES, QUEUE_NAMES
from pstar_sim.report.residence import AWAY, Residence, residence
from pstar_sim.report.run_figures import Figure
from pstar_sim.report.step_names import layer_names
from pstar_sim.report.tables import format_change, format_percent, plan_words
from pstar_sim.report.web.charts import Chart, lanes_chart, residence_chart, same_lanes, tide_chart
from pstar_sim.report.web.document import breakable, chart_place, document, legend_html, table_html, unbroken
from pstar_sim.units import format_bytes, format_error, format_s

XS = ("time", "moment")
_PLACES = {"gpu": "GPU", "host": "host", "nvme": "disks"}
_TWO_PEAKS = (
    "The peaks of the certificate are the worst of every legal order of the steps; those of the figures are of the "
    "predicted order, and never above."
)


@dataclass(frozen=True, kw_only=True)
class Made:
    """command: that wrote it, without folders."""

    version: str
    date: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A column.

    timeline: predicted or measured.
    examined: None for a run (its plan is another's).
    digest: SHA-256 of the plan's file, "" if it has none.
    """

    title: str
    plan: Plan
    timeline: Timeline
    examined: Examined | None
    digest: str = ""

    @property
    def measured(self) -> bool:
        return self.timeline.source == "measured"

    @property
    def as_planned(self) -> bool:
        """Whether the seconds are of the plan's own machine, not rates measured at a run's start."""
        if self.measured or self.examined is None:
            return False
        return math.isclose(self.timeline.iteration_s, self.examined.timeline.iteration_s, rel_tol=1e-6)


class _Quantity(NamedTuple):
    """unit: as in `Figure`, for comparisons, "" without."""

    name: str
    text: str
    unit: str = ""
    number: float = 0.0


def plan_report(subjects: Sequence[Subject], made: Made) -> str:
    """Side by side, a run also over the one before.

    Raises PstarError for none, another plan's timeline, and without Plotly.
    """
    if not subjects:
        raise PstarError("a report needs at least one plan")
    page = _Page(subjects, made)
    title = f"{', '.join(s.title for s in subjects)}: {subjects[0].plan.workload.model}"
    data = {"figures": page.figures, "x": page.first_x}
    return document(title, page.html(), data, script="plan_report.js")


class _Page:
    """figures: name -> Plotly's."""

    def __init__(self, subjects: Sequence[Subject], made: Made) -> None:
        self.subjects = subjects
        self.made = made
        self.figures: dict[str, Any] = {}
        self.overlaid = any(s.measured for s in subjects)
        self.first_x = "moment" if self.overlaid else "time"
        self.right_s = max(s.timeline.iteration_s for s in subjects)
        self.top_bytes = max(s.timeline.budget_bytes.get("gpu") or s.timeline.peak_bytes["gpu"] for s in subjects)
        self.moments = max(int(moment_windows(s.timeline)[0][-1]) + 1 for s in subjects)

    def html(self) -> str:
        parts = (
            self._head,
            self._tides,
            self._table,
            self._lanes,
            self._chunks,
            self._bytes,
            self._proofs,
            self._words,
            self._origin,
        )
        return "\n".join(part() for part in parts)

    def _head(self) -> str:
        said = [plan_words(subject.plan) for subject in self.subjects]
        rooms = [_budgets(subject.plan.machine) for subject in self.subjects]
        if len(set(rooms)) > 1:
            said = [f"{job} with {room}" for job, room in zip(said, rooms)]
        if len(set(said)) > 1:
            said = [f"{subject.title}: {job}" for subject, job in zip(self.subjects, said)]
        jobs = dict.fromkeys(said)
        soft = "".join(f'<p class="soft">{escape(job)}</p>' for job in jobs)
        plans = dict.fromkeys(subject.digest[:12] for subject in self.subjects if subject.digest)
        plan = f", plan{'s'[: len(plans) > 1]} {' and '.join(plans)}" if plans else ""
        soft += f'<p class="note made">pstar-sim {self.made.version}, {self.made.date}{plan}</p>'
        theme = '<button data-theme-button aria-label="change between light and dark">dark</button>'
        models = {subject.plan.workload.model for subject in self.subjects}
        model = f"{escape(models.pop())}: " if len(models) == 1 else ""
        titles = breakable(" beside ".join(subject.title for subject in self.subjects))
        return (
            f'<div class="row top"><h1>{model}{titles}</h1>{theme}</div>'
            f'<p class="answer">{unbroken(self._verdict())}</p>{soft}{self._tiles()}'
        )

    def _tiles(self) -> str:
        bounded = all(_bound_s(subject) is not None for subject in self.subjects)
        four = [list(_four(subject, bounded=bounded)) for subject in self.subjects]
        tiles = []
        for row in zip(*four):
            cells = "".join(
                f"<dd>{unbroken(text)}{f' <small>{breakable(one.title)}</small>' if len(row) > 1 else ''}</dd>"
                for one, (_, text) in zip(self.subjects, row)
            )
            tiles.append(f"<div><dt>{escape(row[0][0])}</dt>{cells}</div>")
        return f'<dl class="tiles">{"".join(tiles)}</dl>'

    def _verdict(self) -> str:
        """Against the first prediction, a run against its own."""
        first, *others = self.subjects
        said = [f"{first.title}: {format_s(first.timeline.iteration_s)} per iteration{_error(first)}"]
        if not others and not first.measured:
            said[0] += f", bound by {_binds(first)}"
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
            if other.measured and share > 1:
                than = f"{1 + share:.3g} times as long"
            if other.measured and len(others) > 1:
                than += " as predicted" if than.endswith("as long") else " than predicted"
            said.append(f"{other.title}: {format_s(seconds)}{_error(other)}, {than}")
        return "; ".join(said) + "."

    def _table(self) -> str:
        columns = [{quantity.name: quantity for quantity in _quantities(s)} for s in self.subjects]
        names = list(dict.fromkeys(name for column in columns for name in column))
        rows = [[name, *(column[name].text if name in column else "" for column in columns)] for name in names]
        heads = ["", *(s.title for s in self.subjects)]
        if len(columns) == 2 and self._alike():
            heads.append("difference")
            for row in rows:
                row.append(_difference(*(column.get(row[0]) for column in columns)))
        wear = [disk_life(s.plan, s.timeline.iteration_s) for s in self.subjects]
        notes = [f"{s.title}: measured in one iteration, the last of the run" for s in self.subjects if s.measured]
        notes += [
            f"{s.title}: predicted with the rates that the run measured at its start; the plan's bound and error, "
            "which are of the rates in its file, are left out"
            for s in self.subjects
            if not s.measured and not s.as_planned
        ]
        notes += [one for one in dict.fromkeys(wear) if one]
        said = "".join(f'<p class="note">{unbroken(note)}.</p>' for note in notes)
        what = "<p>Seconds, and bytes between places, are those of one iteration.</p>"
        return f"<h2>Figures</h2>{what}{table_html(heads, rows)}{said}"

    def _alike(self) -> bool:
        return len({_work(subject.plan) for subject in self.subjects}) == 1

    def _columns(self, cells: Sequence[str]) -> str:
        return f'<div class="columns">{"".join(f"<div>{cell}</div>" for cell in cells)}</div>'

    def _each(self, name: str, says: Sequence[str], charts: Sequence[Chart]) -> str:
        cells = [self._drawn(f"{name} {n}", *one) for n, one in enumerate(zip(self.subjects, charts, says))]
        return f"{_legend(charts)}{self._columns(cells)}"

    def _drawn(self, name: str, subject: Subject, chart: Chart, says: str) -> str:
        self.figures[name] = chart.figure
        place = chart_place(name, f"{subject.title}: {says}")
        return f"<h3>{breakable(subject.title)}</h3>{place}{_notes(chart)}"

    def _tides(self) -> str:
        drawn: dict[str, list[Chart]] = {x: [] for x in XS}
        both, cells = self._both(drawn), []
        for n, subject in enumerate(self.subjects):
            after = self.subjects[n + 1 : n + 2]
            over = after[0].timeline if after and after[0].measured else None
            alone = n > 0 and subject.measured  # by moment, a run lies over its prediction
            above, below = "", ""
            for x in XS[:1] if alone else XS:
                chart = self._tide(f"tide {n}", subject, x, ("measured", over) if over and x == "moment" else None)
                drawn[x].append(chart)
                title = f"{subject.title} (areas), measured (lines)" if over and x == "moment" else subject.title
                above += f'<div data-x="{x}"{self._hidden(x)}><h3>{breakable(title)}</h3></div>'
                below += f'<div data-x="{x}"{self._hidden(x)}>{_notes(chart)}</div>'  # charts side by side stay level
            place = chart_place(f"tide {n}", f"{subject.title}: {_tide_words(subject.timeline)}")
            cell = f"{above}{place}{below}"
            cells.append(f'<div data-x="{XS[0]}"{self._hidden(XS[0])}>{cell}</div>' if alone else cell)
        pressed = {x: str(x == self.first_x).lower() for x in XS}
        legends = "".join(f'<div data-x="{x}"{self._hidden(x)}>{_legend(charts)}</div>' for x, charts in drawn.items())
        buttons = "".join(f'<button value="{x}" aria-pressed="{pressed[x]}">by {x}</button>' for x in XS)
        return (
            f'<div class="row head"><h2>What fills the GPU</h2><div data-choice="x">{buttons}</div></div>'
            f"{both}{'' if both else self._columns(cells)}{legends}{self._columns(cells) if both else ''}"
            "<p>Model data stands on the floor, the tide hangs from the capacity. What is between them is free.</p>"
        )

    def _both(self, drawn: dict[str, list[Chart]]) -> str:
        if len(self.subjects) != 2 or self.overlaid or not self._alike():
            return ""
        first, other = self.subjects
        for x in XS:
            drawn[x].append(self._tide("tide both", first, x, (other.title, other.timeline)))
        words = f"{first.title}: {_tide_words(first.timeline)} {other.title}: {_tide_words(other.timeline)}"
        title = f"{first.title} (areas), {other.title} (lines)"
        return f"<h3>{breakable(title)}</h3>{chart_place('tide both', words)}"

    def _tide(self, name: str, subject: Subject, x: str, over: tuple[str, Timeline] | None) -> Chart:
        right = self.right_s if x == "time" else float(self.moments)
        chart = tide_chart(subject.timeline, x=x, right=right, top_bytes=self.top_bytes, over=over)
        self.figures[f"{name} {x}"] = chart.figure
        return chart

    def _hidden(self, x: str) -> str:
        return "" if x == self.first_x else " hidden"

    def _lanes(self) -> str:
        drawn = same_lanes([lanes_chart(s.timeline, right_s=self.right_s, plan=s.plan) for s in self.subjects])
        charts = self._each("lanes", [_lanes_words(s.timeline) for s in self.subjects], drawn)
        return (
            "<h2>What the queues do</h2><p>A gap in a lane is time in which the queue waits. The lane below compute "
            "says what compute waits for, in the colour of the cause with most of the wait; the seconds of every cause "
            f"stand above.</p>{charts}"
        )

    def _chunks(self) -> str:
        found = [residence(s.plan, s.timeline) for s in self.subjects]
        drawn = [
            residence_chart(one, right_s=self.right_s, layers=layer_names(s.plan))
            for one, s in zip(found, self.subjects)
        ]
        charts = self._each("chunks", [_chunks_words(one) for one in found], drawn)
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
                words = _proof(subject, subject.examined)
                text = f"{subject.examined.report.describe()}\n{subject.examined.bound}"
                peaks = subject.examined.timeline.peak_bytes
                if any(peaks.get(place, size) != size for place, size in subject.examined.report.peak_bytes.items()):
                    text += f"\n{_TWO_PEAKS}"
                exact = f"<details><summary>the checker's own words</summary><pre>{escape(text)}</pre></details>"
                cells.append(f"<h3>{breakable(subject.title)}</h3>{words}{exact}")
        return f"<h2>Certificate</h2>{self._columns(cells)}"

    def _words(self) -> str:
        parts = []
        for subject in self.subjects:
            if subject.examined is None:
                continue
            cost = subject.plan.predictions.get("barrier_cost_s")
            text = explain(subject.plan, subject.examined.timeline, barrier_cost_s=cost, width=100_000)
            parts.append(
                f"<details><summary>{breakable(subject.title)}: what lives where, why, what binds, what the tide "
                f"gains, the first steps</summary><pre>{escape(text)}</pre></details>"
            )
        return "<h2>Explanation</h2>" + "".join(parts)

    def _origin(self) -> str:
        rows = [("written by", f"pstar-sim {self.made.version}, {self.made.date}"), ("command", self.made.command)]
        rows += [(f"SHA-256 of the plan of {s.title}", s.digest) for s in self.subjects if s.digest and not s.measured]
        cells = "".join(f"<div><dt>{breakable(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in rows)
        return f'<h2>Where this page comes from</h2><dl class="origin">{cells}</dl>'


def _legend(charts: Sequence[Chart]) -> str:
    lines = {name: style for chart in charts for name, style in chart.lines.items()}
    return legend_html(_merged([chart.legend for chart in charts]), lines)


def _merged(legends: Sequence[Mapping[str, str]]) -> dict[str, str]:
    names: list[str] = []
    for legend in legends:
        at = 0
        for name in legend:
            if name not in names:
                names.insert(at, name)
            at = names.index(name) + 1
    colours = {name: colour for legend in legends for name, colour in legend.items()}
    return {name: colours[name] for name in names}


def _budgets(machine: Machine) -> str:
    return (
        f"{format_bytes(machine.gpu_budget_bytes)} of GPU and {format_bytes(machine.host_budget_bytes)} of host memory"
    )


def _work(plan: Plan) -> tuple[str, int, int]:
    """Seconds are compared for equal work, also on other machines."""
    return plan.workload.model, plan.workload.params, plan.tokens


def _notes(chart: Chart) -> str:
    return "".join(f'<p class="note">{unbroken(note)}.</p>' for note in chart.notes)


def _expected(subject: Subject) -> float | None:
    return subject.plan.predictions.get("expected_error") if subject.as_planned else None


def _error(subject: Subject) -> str:
    error = _expected(subject)
    return "" if error is None else f" {format_error(error)}"


def _binds(subject: Subject) -> str:
    binds = bound_by(subject.timeline, barrier_cost_s=subject.plan.predictions.get("barrier_cost_s"))
    return BINDS_WORDS.get(binds, binds)


def _four(subject: Subject, *, bounded: bool) -> Iterator[tuple[str, str]]:
    """With digits that their error leaves.

    bounded: all have a bound.
    """
    plan, timeline, error = subject.plan, subject.timeline, _error(subject)
    seconds = timeline.iteration_s
    yield "per iteration", f"{_digits_s(seconds)}{error}"
    yield "tokens/s", f"{float(f'{plan.tokens / seconds:.3g}'):,.0f}{error}"
    peak, budget = timeline.peak_bytes["gpu"], timeline.budget_bytes.get("gpu")
    yield "GPU memory at most", f"{format_bytes(peak)} of {format_bytes(budget)}" if budget else format_bytes(peak)
    bound_s = _bound_s(subject)
    if bounded and bound_s is not None:
        yield "above the lower bound", format_percent(seconds / bound_s - 1)
    else:
        yield "compute waits", f"{sum(timeline.stall_s.values()) / seconds * 100:.1f} %"


def _digits_s(seconds: float) -> str:
    number, unit = format_s(seconds).split()
    return f"{float(f'{float(number):.3g}'):g} {unit}"


def _bound_s(subject: Subject) -> float | None:
    return subject.plan.predictions.get("lower_bound_s") or None if subject.as_planned else None


def _quantities(subject: Subject) -> Iterator[_Quantity]:
    plan, timeline = subject.plan, subject.timeline
    seconds = timeline.iteration_s
    yield _Quantity("iteration", f"{format_s(seconds)}{_error(subject)}", "s", seconds)
    rate = plan.tokens / seconds
    yield _Quantity("tokens/s", f"{rate:,.0f}{_error(subject)}", "/s", rate)
    bound_s = _bound_s(subject)
    if bound_s:
        yield _Quantity("lower bound", format_s(bound_s))
        yield _Quantity("above the bound", format_percent(seconds / bound_s - 1))
    if not subject.measured:
        yield _Quantity("binds", _binds(subject))
    for place, name in _PLACES.items():
        peak, budget = timeline.peak_bytes.get(place), timeline.budget_bytes.get(place)
        if peak or (budget and peak is not None):
            yield _Quantity(f"{name} peak", format_bytes(peak), "B", peak)
        if budget:
            yield _Quantity(f"{name} capacity", format_bytes(budget), "B", budget)
    for way, name in _ways(timeline):
        moved = timeline.moved_bytes.get(way, 0)
        yield _Quantity(name, format_bytes(moved), "B", moved)
    stall_s = sum(timeline.stall_s.values())
    yield _Quantity("compute waits", format_s(stall_s), "s", stall_s)
    for cause, stall_s in sorted(timeline.stall_s.items(), key=lambda item: -item[1]):
        if stall_s > 0:
            yield _Quantity(f"- {WAITS.get(cause, cause)}", format_s(stall_s), "s", stall_s)
    if plan.ranked is not None or plan.machine.mixed:
        yield _Quantity("seconds and bytes", "of the slowest rank")


def _difference(one: _Quantity | None, other: _Quantity | None) -> str:
    """A cause that only one has is 0 for the other."""
    known = one or other
    if known is None or not known.unit:
        return ""
    before, after = (0.0 if quantity is None else quantity.number for quantity in (one, other))
    return Figure(known.name, known.unit, before, after).words()[3].replace("%", " %")


def _ways(timeline: Timeline) -> Iterator[tuple[str, str]]:
    yield "h2d", "host to GPU"
    yield "d2h", "GPU to host"
    for way, name in (("nvme_read", "read from disk"), ("nvme_write", "written to disk")):
        if timeline.moved_bytes.get(way, 0):
            yield way, name


# Pictures in words, for those who cannot see them.


def _tide_words(timeline: Timeline) -> str:
    curves = byte_curves(timeline)
    budget = timeline.budget_bytes.get("gpu")
    return (
        f"GPU memory over an iteration of {format_s(timeline.iteration_s)}. The tide is between "
        f"{format_bytes(int(curves.tide.min()))} and {format_bytes(int(curves.tide.max()))}, model data between "
        f"{format_bytes(int(curves.model_data.min()))} and {format_bytes(int(curves.model_data.max()))}; together at "
        f"most {format_bytes(int(curves.total.max()))}{f' of {format_bytes(budget)}' if budget else ''}."
    )


def _lanes_words(timeline: Timeline) -> str:
    works = [f"{name} {format_s(s)}" for q, name in QUEUE_NAMES.items() if (s := timeline.busy_s.get(q.value, 0.0)) > 0]
    stalls = sorted(timeline.stall_s.items(), key=lambda item: -item[1])
    waits = [f"{format_s(s)} {WAITS.get(cause, cause)}" for cause, s in stalls if s > 0]
    waiting = f"; compute waits {', '.join(waits)}" if waits else "; compute never waits"
    return f"seconds in which each queue works, of {format_s(timeline.iteration_s)}: {', '.join(works)}{waiting}."


def _chunks_words(found: Residence) -> str:
    there = (found.contents != AWAY).mean(axis=0) * 100
    return (
        f"which of {found.chunks} chunks are on the GPU over the iteration: between {there.min():.0f} % and "
        f"{there.max():.0f} % of them."
    )


def _proof(subject: Subject, examined: Examined) -> str:
    report, plan = examined.report, subject.plan
    rooms = []
    for place, size in report.peak_bytes.items():
        moment = report.peak_at[place]
        when = "between two iterations" if moment < 0 else f"in moment {moment} ({plan.workload.moments[moment].name})"
        rooms.append(
            f"{_PLACES[place]}: at most {format_bytes(size)} of {format_bytes(report.budget_bytes[place])}, {when}"
        )
    proved = (
        f"Proved: in whatever order its {report.steps} steps may legally run, each chunk is on the GPU when compute "
        "uses it, each parameter is updated once per iteration, and no place holds more than it has room for:"
    )
    bound = ""
    bound_s, certificate = _bound_s(subject), plan.choices.get("certificate")
    if bound_s is not None:
        binding = str(certificate.get("binding")) if isinstance(certificate, Mapping) else ""
        binds = f", of which {BINDS_NAMES[binding]} is the largest term" if binding in BINDS_NAMES else ""
        share = subject.timeline.iteration_s / bound_s - 1
        bound = (
            "No schedule of this job on this machine, with these chunks and settings, takes less than "
            f"{format_s(bound_s)}{binds}. This plan takes {format_percent(share)} more."
        )
    rest = (
        f"Not proved: the seconds, which are simulated with the machine's rates{_error(subject)}; the rates and the "
        "job, which are taken as the plan states them."
    )
    items = "".join(f"<li>{unbroken(room)}</li>" for room in rooms)
    others = "".join(f"<p>{unbroken(text)}</p>" for text in (bound, rest) if text)
    return f"<p>{unbroken(proved)}</p><ul>{items}</ul>{others}"


def _places(subject: Subject) -> Iterator[tuple[str, str, str]]:
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
                yield f"{name}: {CATEGORY_NAMES[category]}", format_bytes(now), format_bytes(most)
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
