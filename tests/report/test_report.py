"""Pictures, exports and tables say what the timeline says. What is drawn is looked at as data, never as pixels."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import style
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.textpath import TextPath

import pstar_sim as ps
from pstar_sim.core.step import Kind, Queue
from pstar_sim.core.timeline import ByteSample, Span, Timeline, load_timeline
from pstar_sim.errors import PstarError, TraceError
from pstar_sim.report.byte_curves import byte_curves, moment_windows, phase_bands, steady_start_s
from pstar_sim.report.html import timeline_html
from pstar_sim.report.palette import CATEGORIES as COLOURS
from pstar_sim.report.paper import Look, _width, tide_csv
from pstar_sim.report.perfetto import to_perfetto
from pstar_sim.report.schedule_picture import plot_schedule
from pstar_sim.report.tide_picture import plot_tide, spread, tide_figure

GB = 10**9


def timeline(*, label: str = "tide", source: str = "simulated", param_gb: int = 4) -> Timeline:
    """Two equal iterations of 4 s; three moments FWD [0,1), BWD [1,3), ADAM [3,4); capacity 10 GB.

    The tide is 2, 5, 1 GB; param16 `param_gb` GB, and 1 GB more in the second half of BWD.
    """
    spans = []
    for k in range(2):
        for moment, (start, end) in enumerate(((0, 1), (1, 3), (3, 4))):
            spans.append(_span(moment, k, Queue.COMPUTE, Kind.COMPUTE, moment, 4 * k + start, 4 * k + end))
        spans.append(_span(3, k, Queue.H2D, Kind.FETCH, 1, 4 * k + 1, 4 * k + 2, chunk=7))
        spans.append(_span(4, k, Queue.H2D, Kind.DROP, 1, 4 * k + 3, 4 * k + 3, chunk=7))
    samples = [
        (0.0, "param", param_gb),
        (0.0, "states", 0),
        (0.0, "non-model", 2),
        (1.0, "non-model", 5),
        (2.0, "param", param_gb + 1),
        (3.0, "non-model", 1),
        (3.0, "param", param_gb),
    ]
    return Timeline(
        source=source,
        iterations=2,
        iteration_s=4.0,
        spans=tuple(spans),
        samples=tuple(ByteSample(t, "gpu", c, n * GB) for t, c, n in samples),
        peak_bytes={"gpu": (param_gb + 6) * GB},
        moved_bytes={"h2d": GB, "d2h": 0},
        stall_s={"h2d": 0.5},
        label=label,
        phases=("FWD", "BWD", "ADAM"),
        budget_bytes={"gpu": 10 * GB},
    )


def _span(
    step: int, k: int, queue: Queue, kind: Kind, moment: int, start: float, end: float, chunk: int | None = None
) -> Span:
    return Span(step, k, queue, kind, chunk, moment, 0, start, start, end)


def test_curves_over_time_are_the_samples_held_until_the_next() -> None:
    curves = byte_curves(timeline())
    assert curves.edges.tolist() == [0, 1, 2, 3, 4]
    assert (curves.tide // GB).tolist() == [2, 5, 5, 1]
    assert (curves.values["param"] // GB).tolist() == [4, 4, 5, 4]
    assert (curves.total // GB).tolist() == [6, 9, 10, 5]
    assert curves.values["states"].tolist() == [0, 0, 0, 0]


def test_curves_over_moments_show_the_worst_instant_of_each() -> None:
    curves = byte_curves(timeline(), x="moment")
    assert curves.edges.tolist() == [0, 1, 2, 3]
    assert (curves.total // GB).tolist() == [6, 10, 5]
    assert (curves.tide // GB).tolist() == [2, 5, 1]


def test_the_steady_iteration_is_the_last_and_begins_where_compute_ended_the_one_before() -> None:
    t = timeline()
    assert steady_start_s(t) == 4.0
    moments, start_s, end_s = moment_windows(t)
    assert (moments.tolist(), start_s.tolist(), end_s.tolist()) == ([0, 1, 2], [0, 1, 3], [1, 3, 4])


def test_phases_follow_the_moments_and_recompute_counts_as_backward() -> None:
    bands = phase_bands(timeline())
    assert [(b.name, b.start, b.end) for b in bands] == [("FWD", 0, 1), ("BWD", 1, 3), ("ADAM", 3, 4)]
    bands = phase_bands(timeline(), x="moment")
    assert [(b.name, b.start, b.end) for b in bands] == [("FWD", 0, 1), ("BWD", 1, 2), ("ADAM", 2, 3)]


def test_updates_that_run_while_no_phase_computes_are_adam() -> None:
    """Before the second iteration two chunks are updated on the host, from 0.25 to 0.85 s and from 0.9 to 1.5 s."""
    t = timeline()
    late = {0: 0.0, 1: 1.5}
    spans = [
        dataclasses.replace(s, start_s=s.start_s + late[s.iteration], end_s=s.end_s + late[s.iteration])
        for s in t.spans
    ]
    spans += [_span(5, 0, Queue.ADAM, Kind.CPU_UPDATE, 2, start, start + 0.6, chunk=7) for start in (4.25, 4.9)]
    shifted = dataclasses.replace(t, spans=tuple(spans), iteration_s=5.5)
    found = [(b.name, b.start, b.end) for b in phase_bands(shifted)]
    assert found == [("ADAM", 0.25, 1.5), ("FWD", 1.5, 2.5), ("BWD", 2.5, 4.5), ("ADAM", 4.5, 5.5)]
    assert [b.name for b in phase_bands(shifted, x="moment")] == ["FWD", "BWD", "ADAM"]


def _filled(ax: object, colour: str) -> np.ndarray:
    """Height of the one area of that colour at every corner: the y extent of its polygon."""
    from matplotlib.colors import to_rgb

    for area in ax.collections:  # type: ignore[attr-defined]
        if isinstance(area, PolyCollection) and len(area.get_facecolor()):
            if np.allclose(area.get_facecolor()[0][:3], to_rgb(colour)):
                return np.asarray(area.get_paths()[0].vertices)
    raise AssertionError(f"nothing is filled in {colour}")


def test_the_tide_hangs_from_the_capacity_and_model_data_stands_on_the_floor() -> None:
    ax = Figure().subplots()
    assert plot_tide(timeline(), ax=ax) is ax
    param = _filled(ax, COLOURS["param"])
    assert (param[:, 1].min(), param[:, 1].max()) == (0, 5)
    tide = _filled(ax, COLOURS["non-model"])
    assert (tide[:, 1].min(), tide[:, 1].max()) == (5, 10)
    capacity = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert [line.get_ydata()[0] for line in capacity] == [10]
    constant = [line for line in ax.lines if line.get_linestyle() == ":"]
    assert [line.get_ydata()[0] for line in constant] == [5], "10 GB less the tide's peak of 5 GB"


def test_what_a_static_partition_wastes_is_the_hatched_area() -> None:
    """Between the constant 5 GB and the tide line (8, 5, 5, 9 GB), above the model data (all at or below 5 GB)."""
    ax = Figure().subplots()
    plot_tide(timeline(label="static_partition"), ax=ax)
    (hatched,) = [a for a in ax.collections if a.get_hatch()]
    ys = np.concatenate([p.vertices[:, 1] for p in hatched.get_paths()])
    assert (ys.min(), ys.max()) == (5, 9)
    labels = [t.get_text() for t in ax.get_legend().get_texts()]
    assert "free, but out of reach of a static partition" in labels


def test_no_hatching_where_the_tide_does_not_move() -> None:
    flat = timeline()
    flat = Timeline(
        source="simulated",
        iterations=2,
        iteration_s=4.0,
        spans=flat.spans,
        samples=(ByteSample(0.0, "gpu", "non-model", GB), ByteSample(0.0, "gpu", "param", GB)),
        budget_bytes={"gpu": 10 * GB},
    )
    ax = Figure().subplots()
    plot_tide(flat, ax=ax, x="moment")
    assert not [a for a in ax.collections if a.get_hatch()]


def test_policies_share_their_axes_and_one_legend_so_that_the_faster_one_is_shorter() -> None:
    slow = dataclasses.replace(timeline(label="a"), iteration_s=6.0)
    figure = tide_figure([slow, timeline(label="b", param_gb=3)], xs=("time",))
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim() and first.get_xlim() == second.get_xlim() == (0, 6)
    assert first.get_title(loc="left").startswith("a: ") and second.get_title(loc="left").startswith("b: ")
    assert first.get_legend() is None and second.get_legend() is None and len(figure.legends) == 1


def test_a_long_title_breaks_at_the_width_of_its_axes_and_lines_are_light_in_a_dark_style() -> None:
    """Axes of 304 points have room for 57 letters of 5.3 points; the name of the policy has more."""
    policy = "tide:capacity=peak,eviction=lru,prefetch=3,adam=after-backward,pins=0"
    with style.context("dark_background"):
        left, right = Figure(figsize=(12, 4)).subplots(1, 2)
        plot_tide(timeline().labelled(policy), ax=left)
        plot_schedule(timeline().labelled(policy), ax=right)
    for ax in (left, right):
        lines = ax.get_title(loc="left").splitlines()
        assert len(lines) > 1 and max(map(len, lines)) <= 57 < len(policy) and "".join(lines).startswith(policy)
    assert {line.get_color() for line in left.lines if line.get_linestyle() == "--"} == {"white"}
    edges = {bar.get_edgecolor() for bar in right.patches}
    assert (1.0, 1.0, 1.0, 1.0) not in edges, "white edges would be bars of their own"


@pytest.mark.parametrize("text", ["OO", "S(c)", "0.62 s: 4 of 9", "jumps over"])
def test_words_are_as_wide_as_their_outlines(text: str) -> None:
    assert _width(text, 9.5) == pytest.approx(TextPath((0, 0), text, size=9.5).get_extents().width, rel=1e-12)
    assert _width(text, 9.5) > _width(text[:-1], 9.5)


def test_a_legend_names_the_tide_where_there_is_one() -> None:
    on_host = tuple(dataclasses.replace(s, place="host") for s in timeline().samples if s.category != "non-model")
    both = dataclasses.replace(timeline(), samples=(*timeline().samples, *on_host))
    for place, names in (("gpu", {"non-model (the tide)", "parameters"}), ("host", {"parameters"})):
        ax = plot_tide(both, ax=Figure(figsize=(8, 3)).subplots(), place=place)
        shown = {text.get_text() for text in ax.get_legend().get_texts()}
        assert shown & {"non-model (the tide)", "parameters"} == names


def test_pictures_in_the_subplots_of_one_figure_share_a_legend() -> None:
    """The second picture has gradients, which the first one has not: the one legend names both."""
    figure = Figure(figsize=(10, 6))
    (left, right), (below, last) = figure.subplots(2, 2)
    plot_tide(timeline(), ax=left)
    samples = (ByteSample(0.0, "gpu", "grad", GB), ByteSample(0.0, "gpu", "non-model", GB))
    plot_tide(dataclasses.replace(timeline(), samples=samples), ax=right, x="moment")
    plot_schedule(timeline(), ax=below)
    plot_schedule(timeline(), ax=last)
    assert left.get_legend() is None and below.get_legend() is None
    assert {"gradients", "parameters"} <= {t.get_text() for t in right.get_legend().get_texts()}
    texts = [t.get_text() for t in last.get_legend().get_texts()]
    assert texts == ["FWD", "BWD", "ADAM", "fetch", "numbers: chunks", "numbers on compute: moments"]


def test_names_of_phases_stand_in_strips_that_hold_them() -> None:
    """A strip is as tall as its letters, however low the axes; a name that its stretch cannot hold is left out."""
    for height in (2.0, 6.0):
        figure = Figure(figsize=(5, height))
        ax = figure.subplots()
        plot_tide(timeline(), ax=ax)
        assert {text.get_text() for text in ax.texts} == {"FWD", "BWD", "ADAM"}
        figure.canvas.draw()
        letters = ax.texts[0].get_window_extent()
        line = next(one for one in ax.lines if one.get_linestyle() == "--")
        assert letters.y0 > ax.transData.transform((0, line.get_ydata()[0]))[1]
    narrow = Figure(figsize=(0.9, 3)).subplots()
    plot_tide(timeline(), ax=narrow)
    assert "FWD" not in {text.get_text() for text in narrow.texts}


@pytest.mark.parametrize(
    ("height", "legend"),
    [
        (None, None),
        *(pytest.param(*row, marks=pytest.mark.whole) for row in ((2.6, "below"), (2.2, "none"))),
        (2.6, "right"),
    ],
)
def test_nothing_is_clipped_in_the_column_of_a_paper(height: float | None, legend: str | None) -> None:
    """3.3 inches; the name of the policy is longer than that."""
    long = timeline(label="tide:capacity=peak,eviction=lru,prefetch=3,adam=after-backward")
    look = Look(width=3.3, height=height, legend=legend)
    plans, xs = ([long, timeline()], ("time", "moment")) if height is None else ([timeline()], ("time",))
    title = "llama-3-8b, batch 8 x 4, sequence 2048, bf16, on rtx4090-128gb"
    figure = tide_figure(plans, xs=xs, title=title, look=look)
    figure.draw_without_rendering()
    words = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert len(words) > 15 and len(figure.axes) == len(plans) * len(xs) and figure.get_figwidth() == 3.3
    for drawn in (*words, *figure.legends):
        box = drawn.get_window_extent()
        if box.width and isinstance(drawn, Text) and drawn.axes is not None and drawn in drawn.axes.texts:
            continue  # of a phase: it stands inside its strip, which the next test measures
        assert box.x0 >= -1 and box.y0 >= -1, drawn
        assert box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, drawn
    assert bool(figure.legends) is (legend != "none")
    (above,) = (text for text in words if text.get_text().startswith("llama-3-8b"))
    if legend == "right":
        assert above.get_window_extent().x1 <= figure.legends[0].get_window_extent().x0
    letters = figure.axes[0].texts[0].get_window_extent()
    line = next(one for one in figure.axes[0].lines if one.get_linestyle() == "--")
    assert letters.y0 > figure.axes[0].transData.transform((0, line.get_ydata()[0]))[1]


def test_a_size_without_room_is_refused() -> None:
    with pytest.raises(PstarError, match=r"3.3 x 1 inches has no room beside its words; make it higher or wider"):
        tide_figure([timeline()], look=Look(width=3.3, height=1.0))


def test_the_table_of_a_picture_has_the_bytes_that_it_draws() -> None:
    """The tide is 2, 5, 5, 1 GB over the seconds of the iteration, and 2, 5, 1 GB over its moments."""
    rows = list(csv.DictReader(io.StringIO(tide_csv([timeline()], ("time", "moment")))))
    assert [(row["x"], float(row["from"]), int(row["non_model_bytes"]) // GB) for row in rows] == [
        *(("time_s", at, tide) for at, tide in enumerate((2, 5, 5, 1))),
        *(("moment", at, tide) for at, tide in enumerate((2, 5, 1))),
    ]
    assert {(row["timeline"], row["source"], int(row["capacity_bytes"])) for row in rows} == {
        ("tide", "simulated", 10 * GB)
    }


def test_measured_is_drawn_over_predicted_by_moment_and_below_it_by_time() -> None:
    slow = dataclasses.replace(timeline(source="measured", param_gb=3), iteration_s=9.0)
    figure = tide_figure([timeline()], measured=slow)
    over, predicted, measured = figure.axes
    assert over.get_xlabel() == "moment" and predicted.get_xlim() == measured.get_xlim() == (0, 9)
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert "measured model data" in labels and "measured tide line" in labels
    (line,) = [line for line in over.lines if line.get_color() == "black" and line.get_linestyle() == "-"]
    assert line.get_ydata().max() == 4


def test_a_figure_can_be_written_without_a_display(tmp_path: Path) -> None:
    path = tmp_path / "tide.png"
    tide_figure([timeline()]).savefig(path, dpi=40)
    assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: plot_tide([]), r"timelines = \[\]: it must be a Timeline"),
        (lambda: plot_tide(timeline(), ax=Figure().subplots(), x="day"), "'day'"),
        (lambda: plot_tide([timeline(), timeline()], ax=[Figure().subplots()]), "2 timelines and 1 axes"),
        (lambda: byte_curves(timeline(), place="nvme"), "'nvme'"),
    ],
)
def test_mistakes_are_named(call: object, text: str) -> None:
    with pytest.raises(PstarError, match=text):
        call()  # type: ignore[operator]


def test_perfetto_has_a_lane_a_queue_counters_and_flows_to_the_use() -> None:
    trace = to_perfetto(timeline())
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    events = trace["traceEvents"]
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert set(lanes) == {"compute", "h2d copies"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 2 * (3 + 1), "three moments and a fetch an iteration; a drop takes no time"
    fetch = next(e for e in slices if e["cat"] == "fetch" and e["args"]["iteration"] == 1)
    assert (fetch["ts"], fetch["dur"], fetch["tid"]) == (5e6, 1e6, lanes["h2d copies"])
    counters = [e for e in events if e["ph"] == "C"]
    assert [e["ts"] for e in counters] == [4e6, 5e6, 6e6, 7e6]
    assert counters[-1]["args"] == {"param": 4 * GB, "states": 0, "non-model": 1 * GB}
    starts, ends = ([e for e in events if e["ph"] == ph] for ph in "sf")
    assert {e["id"] for e in starts} == {e["id"] for e in ends} and len(starts) == 2


def test_slices_of_a_lane_do_not_overlap() -> None:
    events = [e for e in to_perfetto(timeline())["traceEvents"] if e["ph"] == "X"]
    for tid in {e["tid"] for e in events}:
        lane = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == tid)
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(lane))


def test_html_of_a_timeline_names_its_figures() -> None:
    html = timeline_html(timeline(label="<tide>"))
    assert "&lt;tide&gt; (simulated)" in html and "4.000 s" in html and "compute waits for copies to the GPU" in html


def test_of_many_policies_the_slowest_the_middle_and_the_fastest_are_drawn() -> None:
    w = ps.preset("tiny-gpt2", batch=2, seq=32)
    found = ps.compare(w, ps.machine("v100-32"), barrier_cost=False, near=False)
    fitting = sorted((row.iteration_s or 0.0 for row in found.rows if row.fits), reverse=True)
    drawn = [planned.row.iteration_s for planned in spread(found)]
    assert spread(found)[-1].policy == found.best().policy
    assert len(fitting) > 4 and drawn == [fitting[0], fitting[len(fitting) // 2], fitting[-1]]


def test_what_a_notebook_shows_is_html_with_pictures_and_without_scripts() -> None:
    w = ps.preset("tiny-gpt2", batch=2, seq=32)
    machine = ps.machine("v100-32x8")
    found = ps.compare(w, ps.machine("v100-32"), policies=["zero_offload", "tide"], barrier_cost=False, near=False)
    best = found.best()
    for answer, says in (
        (machine, ("v100-32x8", "8 x v100-32 on 1 node", "link to the GPU", "33.08 GB of", "29.00 GB per GPU of 240")),
        (ps.machine("a100-80x2+v100-32"), ("2 x a100-80 + 1 x v100-32 on 1 node", "the least of all")),
        (w, ("tiny-gpt2", "peak of the tide", "<polygon")),
        (best.plan, (f"<b>{best.policy}</b>", f"{len(best.plan.steps)} steps", "gpu between iterations")),
        (best, (best.policy, "<polygon", "GPU memory over the iteration")),
        (best.timeline, ("<polygon", "optimizer states")),
        (found, ("zero_offload, ", "tide, ", "<rect")),
    ):
        html = answer._repr_html_()
        ElementTree.fromstring(f"<div>{html.replace('&nbsp;', ' ').replace('<br>', ' ')}</div>")  # well-formed
        assert all(text in html for text in says), (type(answer), says)
        assert "<script" not in html and "http" not in html


def test_a_timeline_file_reads_back_equal(tmp_path: Path) -> None:
    t = timeline()
    t.save(tmp_path / "timeline.json")
    again = load_timeline(tmp_path / "timeline.json")
    for f in dataclasses.fields(Timeline):
        assert getattr(again, f.name) == getattr(t, f.name), f.name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "'format'"),
        ('{"format": "pstar-sim timeline", "version": 9}', "newer"),
        ('{"format": "pstar-sim timeline", "version": 1}', "field 'source' is missing"),
        ('{"format": "pstar-sim timeline", "version": 1, "source": "simulated"}', "field '.*' is missing"),
        ('{"format": "pstar', "truncated"),
    ],
)
def test_a_timeline_file_that_is_none(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=says) as error:
        load_timeline(path)
    assert str(path) in str(error.value)


def test_a_timeline_as_frames() -> None:
    frame = timeline().to_frame()
    assert frame[frame.kind == "compute"].groupby("iteration").size().tolist() == [3, 3]
    assert timeline().bytes_frame().bytes.max() == 5 * GB


def test_a_timeline_draws_itself() -> None:
    ax = Figure().subplots()
    assert timeline().plot_tide(ax=ax, x="moment") is ax
    assert ax.get_xlabel() == "moment"
    assert "<table>" in timeline()._repr_html_()
