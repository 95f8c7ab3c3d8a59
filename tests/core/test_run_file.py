"""What a run leaves: two timelines in one file, two groups in one Perfetto trace, one picture of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pstar_sim.core.run_file import RunTimelines, load_run, load_timelines
from pstar_sim.core.step import Kind, Queue
from pstar_sim.core.timeline import ByteSample, Span, Timeline, load_timeline
from pstar_sim.errors import TraceError
from pstar_sim.report.perfetto import to_perfetto
from pstar_sim.report.tide_picture import plot_tide, tide_figure
from pstar_sim.units import MB


def timeline(source: str, *, moment_s: float, iterations: int = 1) -> Timeline:
    """`iterations` iterations of two moments of `moment_s`, a fetch in the first; tide 20 MB, then 30; 40 MB param."""
    spans: list[Span] = []
    for k in range(iterations):
        begin = 2 * moment_s * k
        spans.append(Span(0, k, Queue.H2D, Kind.FETCH, 0, 0, MB, begin, begin, begin + moment_s / 4))
        for m in range(2):
            start = begin + m * moment_s
            spans.append(Span(m + 1, k, Queue.COMPUTE, Kind.COMPUTE, None, m, 0, start, start, start + moment_s))
    samples = (
        ByteSample(0.0, "gpu", "param", 40 * MB),
        ByteSample(0.0, "gpu", "non-model", 20 * MB),
        ByteSample(moment_s, "gpu", "non-model", 30 * MB),
    )
    return Timeline(
        source=source,
        iterations=iterations,
        iteration_s=2 * moment_s,
        spans=tuple(spans),
        samples=samples,
        peak_bytes={"gpu": 70 * MB, "host": 0},
        label="tide",
        phases=("FWD", "BWD"),
        budget_bytes={"gpu": 100 * MB},
    )


BOTH = RunTimelines(
    predicted=timeline("simulated", moment_s=1.0), measured=timeline("measured", moment_s=1.5, iterations=3)
)


def test_both_come_back(tmp_path: Path) -> None:
    BOTH.save(tmp_path / "run.json")
    again = load_run(tmp_path / "run.json")
    assert again.predicted.to_dict() == BOTH.predicted.to_dict()
    assert again.measured.to_dict() == BOTH.measured.to_dict()
    assert {n: t.source for n, t in load_timelines(tmp_path / "run.json").items()} == {
        "predicted": "simulated",
        "measured": "measured",
    }
    BOTH.measured.save(tmp_path / "alone.json")
    assert list(load_timelines(tmp_path / "alone.json")) == ["measured"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "x"}, "is not a timeline"),
        ({"version": 2}, "newer pstar-sim"),
        ({"version": "1"}, "not a version number"),
        ({"measured": None}, "field 'measured' is null; it must be an object with the fields of a timeline"),
        ({"measured": {}}, "field 'measured' is .*; it must be an object with the fields of a timeline"),
        ({"more": 1}, "'more' is not known"),
        ({"predicted": {"format": "pstar-sim timeline", "version": 1}}, "predicted: "),
    ],
)
def test_a_file_that_is_not_right_is_named_with_the_field(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = tmp_path / "run.json"
    BOTH.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(TraceError, match=says) as caught:
        load_timelines(path)
    assert str(path) in str(caught.value)


def test_a_plain_timeline_reader_refuses_it_and_the_other_way_round(tmp_path: Path) -> None:
    BOTH.save(tmp_path / "run.json")
    BOTH.measured.save(tmp_path / "alone.json")
    with pytest.raises(TraceError, match=r"run.json: is not a timeline"):
        load_timeline(tmp_path / "run.json")
    with pytest.raises(TraceError, match=r"alone.json: is not what a run left"):
        load_run(tmp_path / "alone.json")


def test_two_groups_in_one_trace_begin_their_steady_iteration_together() -> None:
    """The measured one's last iteration begins at 2 x 3 s = 6 s; the predicted one's, at 0, is moved there."""
    trace = to_perfetto([BOTH.predicted, BOTH.measured])
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "tide (simulated)", 2: "tide (measured)"}
    first = {
        pid: min(e["ts"] for e in trace["traceEvents"] if e["pid"] == pid and e["ph"] == "C") / 1e6 for pid in (1, 2)
    }
    assert first == {1: 6.0, 2: 6.0}
    flows = [e for e in trace["traceEvents"] if e["ph"] in "sf"]
    assert len({e["id"] for e in flows}) == len(flows) / 2 == 4  # one fetch predicted, three measured
    assert set(trace["otherData"]) == {"1 simulated", "2 measured"}
    alone = to_perfetto(BOTH.predicted)
    assert {e["pid"] for e in alone["traceEvents"]} == {1} and alone["otherData"]["source"] == "simulated"


def test_the_longer_of_both_sets_the_time_axis_and_small_memory_is_in_mb() -> None:
    ax = Figure().subplots()
    plot_tide(BOTH.predicted, ax=ax, measured=BOTH.measured)
    assert ax.get_xlim() == (0.0, 3.0)
    assert ax.get_ylabel() == "GPU memory [MB]"
    assert ax.get_title(loc="left") == "tide: 2.000 s per iteration predicted, 3.000 s measured"
    texts = [t.get_text() for t in ax.texts]
    assert texts == ["FWD", "BWD", "FWD measured", "BWD measured"]
    (tide,) = [line for line in ax.get_lines() if line.get_color() == "#D55E00"]
    assert list(tide.get_ydata()) == [80, 80, 70, 70]  # 100 MB less the tide


def test_a_whole_figure_fits_its_strips(tmp_path: Path) -> None:
    figure = tide_figure([BOTH.predicted], measured=BOTH.measured, title="both")
    figure.savefig(tmp_path / "tide.png", dpi=50)
    for ax in figure.axes:
        strips = [area.get_datalim(ax.transData).y1 for area in ax.collections]
        assert 100 < max(strips) <= ax.get_ylim()[1]
