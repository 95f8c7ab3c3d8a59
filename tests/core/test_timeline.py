"""Timeline: frames, file, and that neither pandas nor matplotlib is needed until asked for."""

import gc
import json
import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Queue
from pstar_sim.core.timeline import ByteSample, Span, Timeline, load_timeline
from pstar_sim.errors import TraceError
from pstar_sim.sim import play


@pytest.fixture
def timeline() -> Timeline:
    return Timeline(
        source="simulated",
        iterations=1,
        iteration_s=2.5,
        spans=(
            Span(0, 0, Queue.H2D, Kind.FETCH, 3, 0, 2048, 0.0, 0.0, 1.0),
            Span(1, 0, Queue.COMPUTE, Kind.COMPUTE, None, 0, 0, 0.0, 1.0, 2.5, "h2d"),
        ),
        samples=(ByteSample(0.0, "gpu", "param", 2048), ByteSample(0.0, "gpu", "non-model", 10)),
        peak_bytes={"gpu": 2058},
        moved_bytes={"h2d": 2048, "d2h": 0},
        stall_s={"h2d": 1.0},
        busy_s={"compute": 1.5},
        label="by hand",
        phases=("FWD",),
        budget_bytes={"gpu": 4096},
    )


def test_frames_have_a_row_a_span_and_a_row_a_sample(timeline: Timeline):
    frame = timeline.to_frame()
    assert list(frame.columns)[:5] == ["step", "iteration", "queue", "kind", "chunk"]
    assert frame["queue"].tolist() == ["h2d", "compute"]
    assert frame["chunk"].isna().tolist() == [False, True]
    assert (frame["end_s"] - frame["start_s"]).sum() == 2.5
    samples = timeline.bytes_frame()
    assert samples.groupby("place")["bytes"].sum().to_dict() == {"gpu": 2058}
    empty = Timeline(source="measured", iterations=0, iteration_s=0.0, spans=(), samples=())
    assert len(empty.to_frame()) == len(empty.bytes_frame()) == 0


def test_everything_survives_the_file(timeline: Timeline, tmp_path: Path):
    timeline.save(tmp_path / "t.json")
    read = Timeline.load(tmp_path / "t.json")
    assert read.to_dict() == timeline.to_dict()
    assert read.spans == timeline.spans and read.samples == timeline.samples
    assert read.phases == ("FWD",)


def test_a_damaged_file_is_named(timeline: Timeline, tmp_path: Path):
    path = tmp_path / "t.json"
    for change, said in [
        ({"format": "x"}, "is not a timeline"),
        ({"version": 9}, "newer pstar-sim"),
        ({"iteration_s": "long"}, "field 'iteration_s' is \"long\"; it must be a finite number"),
        ({"spans": []}, "field 'spans' is .*; it must be an object of columns"),
        ({"colour": 1}, "field 'colour' is not known"),
    ]:
        path.write_text(json.dumps(timeline.to_dict() | change))
        with pytest.raises(TraceError, match=said) as caught:
            load_timeline(path)
        assert str(path) in str(caught.value)
    path.write_text(json.dumps(timeline.to_dict())[:-40])
    with pytest.raises(TraceError, match="is truncated or not JSON"):
        load_timeline(path)
    with pytest.raises(TraceError, match="cannot be read"):
        load_timeline(tmp_path / "none.json")


def test_it_shows_itself(timeline: Timeline):
    assert "by hand" in timeline._repr_html_()


def test_a_class_of_ones_own_shows_itself_too(timeline: Timeline):
    class Mine(Timeline):
        pass

    assert "by hand" in Mine(**{f.name: getattr(timeline, f.name) for f in fields(timeline)})._repr_html_()


def test_spans_and_samples_of_a_simulation_are_made_when_they_are_asked_for(hand_plan: Callable[..., Plan]):
    def rows() -> int:
        gc.collect()
        return sum(type(value) in (Span, ByteSample) for value in gc.get_objects())

    plan = hand_plan()
    before = rows()
    timeline = play(plan)
    assert (f"{len(plan.steps) * timeline.iterations} spans" in repr(timeline), rows()) == (True, before)
    assert (timeline.labelled("mine").label, timeline.label, rows()) == ("mine", plan.policy, before)
    columns = timeline.to_dict()
    assert (len(columns["spans"]["step"]), rows()) == (len(plan.steps) * timeline.iterations, before)
    assert [span.step for span in timeline.spans] == columns["spans"]["step"] and rows() > before
    assert timeline.spans is timeline.spans and isinstance(timeline.samples, tuple)
    again = pickle.loads(pickle.dumps(play(plan)))
    assert (again.spans, again.samples) == (timeline.spans, timeline.samples)
