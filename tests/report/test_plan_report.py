"""The report of plans: every figure on it is the timeline's, nothing is dropped, and the file needs nothing else."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pstar_sim as ps
from pstar_sim.cli import main
from pstar_sim.cli.pages import with_distinct_titles
from pstar_sim.core.plan import load_plan
from pstar_sim.core.run_file import RunTimelines, load_timelines
from pstar_sim.core.step import Queue
from pstar_sim.planner.compare import Comparison
from pstar_sim.report.byte_curves import byte_curves
from pstar_sim.report.residence import AWAY, CONTENTS, residence
from pstar_sim.report.step_names import block_name, layer_names
from pstar_sim.report.web.charts import LANE, MOST_CORNERS, lanes_chart, same_lanes, themed, tide_chart
from pstar_sim.report.web.plan_report import Subject
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload
from pstar_sim.units import GB, MIB, format_bytes, format_s

TIDE = [200 * MIB, 400 * MIB, 600 * MIB, 800 * MIB, 800 * MIB, 600 * MIB, 400 * MIB, 200 * MIB, 50 * MIB]


@pytest.fixture(scope="module")
def compared() -> Comparison:
    w = chain_workload(4, 64 * MIB, flops=2 * 64 * MIB * 4096, tide_bytes=TIDE)
    return ps.compare(
        w, ps.machine("rtx4090", gpu_memory="3GB"), policies=["zero_offload", "tide"], chunk_bytes=128 * MIB
    )


@pytest.fixture(scope="module")
def folder(compared: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two plans, a run of one (its steps took other seconds), and their reports."""
    folder = tmp_path_factory.mktemp("reports")
    for policy in ("zero_offload", "tide"):
        compared[policy].save(folder / f"{policy}.json")
    plan = compared["tide"].plan
    slower = replace(play(plan, jitter=lambda step, k: 1.0 + 0.4 * (step % 3)), source="measured")
    RunTimelines(predicted=compared["tide"].timeline, measured=slower).save(folder / "run.json")
    plans = [str(folder / f"{policy}.json") for policy in ("tide", "zero_offload")]
    assert main(["report", *plans, "-o", str(folder / "two.html"), "--quiet"]) == 0
    assert main(["report", plans[0], str(folder / "run.json"), "-o", str(folder / "run.html"), "--quiet"]) == 0
    return folder


def values(path: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="values">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert found is not None
    return dict(json.loads(found[1]))


def test_a_report_is_one_file_that_asks_for_nothing(folder: Path) -> None:
    for name in ("two.html", "run.html"):
        text = (folder / name).read_text(encoding="utf-8")
        assert len(text.encode()) < 6e6
        page = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)  # Plotly names sites that it never asks
        assert not re.findall(r"(?:src|href)=[\"'](?!data:)", page) and "default-src 'none'" in page


def test_a_report_answers_before_its_first_table_and_says_where_it_comes_from(
    compared: Comparison, folder: Path
) -> None:
    text = (folder / "two.html").read_text(encoding="utf-8").replace("&nbsp;", " ")
    head = text[text.index("<main>") : text.index("<table>")]
    seconds = [compared[policy].timeline.iteration_s for policy in ("tide", "zero_offload")]
    for n, unit in enumerate(seconds):
        assert f"{float(f'{unit * 1e3:.3g}'):g} ms" in re.findall(r"<dt>per iteration</dt>(.*?)</div>", head)[0], n
    assert head.count("<dt>") == 4 and 'data-figure="tide both"' in head
    digests = [sha256((folder / f"{policy}.json").read_bytes()).hexdigest() for policy in ("tide", "zero_offload")]
    assert all(digest[:12] in head and digest in text for digest in digests)
    assert f"pstar-sim {ps.__version__}, {datetime.now().astimezone().year}" in head
    assert "<dd>pstar report tide.json zero_offload.json -o two.html</dd>" in text


def test_two_plans_lie_over_each_other_and_have_a_column_of_differences(compared: Comparison, folder: Path) -> None:
    text = (folder / "two.html").read_text(encoding="utf-8")
    rows = dict(re.findall(r'<tr><th scope="row">([^<]*)</th>(.*?)</tr>', text))
    first, second = (compared[policy].timeline for policy in ("tide", "zero_offload"))
    change = f"{second.iteration_s / first.iteration_s - 1:+.1%}".replace("%", " %")
    assert rows["iteration"].endswith(f'<td data-head="difference">{change}</td>')
    assert rows["GPU capacity"].endswith('<td data-head="difference">equal</td>')
    lines = {trace["hovertemplate"].split(":")[0] for trace in values(folder / "two.html")["figures"]["tide both time"][
        "data"] if "hovertemplate" in trace}  # fmt: skip
    assert {"zero_offload model data", "zero_offload tide"} <= lines


def test_chunks_have_the_names_of_their_layers(compared: Comparison, folder: Path) -> None:
    """The blocks of this model are chunks of one tensor each; of GPT-2, chunk 1 is the embedding of words."""
    plan = compared["tide"].plan
    names = layer_names(plan)
    for chunk, name in zip(plan.layout.chunks, names, strict=True):
        assert name in plan.workload.tensors[chunk.slots[0].tensor].name
    figures = values(folder / "two.html")["figures"]
    assert figures["chunks 0"]["data"][0]["meta"]["rows"] == [*names]
    hovers = [words for trace in figures["lanes 0"]["data"] for words in trace["customdata"]]
    assert any(f"({names[-1]})" in words for words in hovers)
    w = ps.preset("gpt2", batch=1, seq=128)
    gpt2 = ps.compare(w, ps.machine("v100-16"), policies=["all_on_gpu"], barrier_cost=False).best()
    assert layer_names(gpt2.plan)[:3] == ("98 small tensors", "transformer.wte", "transformer.wpe")
    assert block_name("transformer.h.11.mlp.c_proj") == "h.11" and block_name("lm_head") == "lm_head"


def test_the_certificate_is_in_plain_words_and_the_checkers_are_folded(compared: Comparison, folder: Path) -> None:
    text = (folder / "two.html").read_text(encoding="utf-8").replace("&nbsp;", " ")
    proof = text[text.index("<h2>Certificate") : text.index("<h2>Explanation")]
    report = compared["tide"].plan.check()
    assert f"Proved: in whatever order its {report.steps} steps may legally run" in proof
    room = f"{format_bytes(report.peak_bytes['gpu'])} of {format_bytes(report.budget_bytes['gpu'])}"
    assert f"<li>GPU: at most {room}, " in proof
    assert "<details><summary>the checker's own words</summary><pre>correct: " in proof
    assert "<details open" not in text


def test_pictures_say_what_they_show_to_those_who_cannot_see_them(compared: Comparison, folder: Path) -> None:
    text = (folder / "two.html").read_text(encoding="utf-8")
    says = dict(re.findall(r'aria-label="([^"]*)" data-figure="([^"]*)"', text))
    says = {figure: words for words, figure in says.items()}
    timeline = compared["tide"].timeline
    peak = format_bytes(int(byte_curves(timeline).total.max()))
    assert f"together at most {peak} of {format_bytes(timeline.budget_bytes['gpu'])}" in says["tide 0"]
    assert f"compute {format_s(timeline.busy_s['compute'])}" in says["lanes 0"]
    assert "% of them" in says["chunks 0"] and len(says) == 7


def test_the_bars_of_each_lane_add_up_to_what_the_queue_works(compared: Comparison) -> None:
    timeline = compared["tide"].timeline
    chart = lanes_chart(timeline, right_s=timeline.iteration_s)
    seconds: dict[str, float] = {}
    for trace in chart.figure["data"]:
        for lane, length in zip(trace["y"], trace["x"]):
            seconds[lane] = seconds.get(lane, 0.0) + length
    assert chart.notes == ()
    for lane, queue in (("compute", "compute"), ("host to GPU", "h2d"), ("GPU to host", "d2h"), ("CPU Adam", "adam")):
        assert seconds[lane] == pytest.approx(timeline.busy_s[queue], rel=1e-4)
    assert seconds["compute waits"] == pytest.approx(sum(timeline.stall_s.values()), rel=1e-4)


def test_bars_that_are_too_short_to_see_are_joined_and_counted(compared: Comparison) -> None:
    """A thousand steps of 1 ms, and a thousand pauses, in an iteration of 2 s: bars of 10 ms hold them all."""
    timeline = compared["tide"].timeline
    first = next(s for s in timeline.spans if s.queue is Queue.H2D)
    compute = next(s for s in timeline.spans if s.queue is Queue.COMPUTE)
    spans = [replace(first, iteration=0, start_s=n * 2e-3, end_s=n * 2e-3 + 1e-3, bytes=1) for n in range(1000)]
    whole = replace(compute, iteration=0, ready_s=0.0, start_s=0.0, end_s=2.0)
    many = replace(timeline, iterations=1, iteration_s=2.0, spans=(whole, *spans))
    chart = lanes_chart(many, right_s=2.0)
    (fetches,) = [trace for trace in chart.figure["data"] if trace["name"] == "fetch"]
    assert len(fetches["x"]) < 250
    counts = [re.match(r"(\d+) x fetch", words) for words in fetches["customdata"]]
    assert sum(int(found[1]) if found else 1 for found in counts) == 1000
    assert chart.notes[0].startswith("1001 steps and waits are drawn as") and "height of a bar" in chart.notes[1]
    areas = [length * height for length, height in zip(fetches["x"], fetches["width"])]
    assert sum(areas) == pytest.approx(1.0 * LANE, rel=0.01), "the area is the second that they work, of 2 s"


def test_charts_of_queues_side_by_side_have_the_same_lanes(compared: Comparison) -> None:
    """A run that never waits beside one that does: no row of one stands beside another row of the other."""
    timeline = compared["tide"].timeline
    steady = replace(timeline, spans=[replace(span, cause=None) for span in timeline.spans])
    charts = [lanes_chart(one, right_s=1.0) for one in (timeline, steady)]
    waits, calm = (chart.figure["layout"]["yaxis"]["categoryarray"] for chart in charts)
    assert "compute waits" in waits and "compute waits" not in calm
    first, second = (chart.figure["layout"] for chart in same_lanes(charts))
    assert first["yaxis"] == second["yaxis"] == charts[0].figure["layout"]["yaxis"]
    assert first["height"] == second["height"]


def test_a_curve_of_thousands_of_changes_keeps_its_peak_and_says_what_was_joined(compared: Comparison) -> None:
    timeline = compared["tide"].timeline
    sample = timeline.samples[0]
    rows = [replace(sample, time_s=n / 5000, place="gpu", category="param", bytes=GB) for n in range(5000)]
    rows[3210] = replace(rows[3210], bytes=2 * GB)
    many = replace(timeline, iteration_s=1.0, samples=rows)
    chart = tide_chart(many, x="time", right=1.0, top_bytes=3 * GB)
    drawn = chart.figure["data"][0]
    assert len(drawn["x"]) == MOST_CORNERS + 1 and max(drawn["y"]) == 2.0
    assert "5000 changes are drawn as" in chart.notes[0]


@pytest.mark.parametrize("policy", ["zero_offload", "tide"])
def test_the_map_of_chunks_holds_the_bytes_that_the_timeline_counts(compared: Comparison, policy: str) -> None:
    """Chunks that are there take no more than what the timeline counts, and just that where only parameters are."""
    planned = compared[policy]
    found = residence(planned.plan, planned.timeline, bins=400)
    curves = byte_curves(planned.timeline)
    middle = (found.edges_s[1:] + found.edges_s[:-1]) / 2
    at = np.clip(np.searchsorted(curves.edges, middle, side="right") - 1, 0, len(curves.edges) - 2)
    chunks = np.array([planned.plan.layout.payload_bytes(c, "param") for c in range(found.chunks)])
    least = ((found.contents != AWAY) * chunks[:, np.newaxis]).sum(axis=0)
    model = (curves.model_data - curves.values["buffer"])[at]
    near = np.diff(found.edges_s)[0] * 2
    calm = [np.abs(curves.edges - m).min() > near for m in middle]  # bins in which nothing changes
    assert sum(calm) > 20 and (least[calm] <= model[calm]).all()
    plain = np.array(calm) & (found.contents <= CONTENTS.index("parameters")).all(axis=0)
    assert (least[plain] == curves.values["param"][at][plain]).all()
    assert plain.sum() > 20 or policy == "tide"  # some chunk of tide always has its states there


def test_the_run_is_drawn_over_its_prediction_by_moment(folder: Path) -> None:
    page = values(folder / "run.html")
    tides = {name for name in page["figures"] if name.startswith("tide")}
    assert page["x"] == "moment" and tides == {"tide 0 time", "tide 0 moment", "tide 1 time"}
    apart = [trace.get("hovertemplate", "") for trace in page["figures"]["tide 0 time"]["data"]]
    assert not any("measured" in name for name in apart), "by time each has a chart of its own"
    names = [trace.get("hovertemplate", "") for trace in page["figures"]["tide 0 moment"]["data"]]
    assert any(name.startswith("measured model data") for name in names)
    text = (folder / "run.html").read_text(encoding="utf-8")
    assert "tide, predicted beside tide, measured" in text and "% longer" in text and ">difference<" in text


def test_a_prediction_by_other_rates_has_neither_the_bound_nor_the_error_of_the_plan(
    compared: Comparison, folder: Path
) -> None:
    """The run's rates are twice as fast as the plan's: its prediction is below the plan's bound, which is no fault.
    Each run is compared with its own prediction."""
    plan = compared["tide"].plan
    fast = play(plan, jitter=lambda step, k: 0.5)
    slower = replace(play(plan, jitter=lambda step, k: 0.75), source="measured")
    RunTimelines(predicted=fast, measured=slower).save(folder / "fast.json")
    files = [str(folder / name) for name in ("zero_offload.json", "tide.json", "fast.json")]
    out = folder / "fast.html"
    assert main(["report", *files, "-o", str(out), "--quiet"]) == 0
    text = out.read_text(encoding="utf-8").replace("&nbsp;", " ")
    answer = re.search(r'<p class="answer">(.*?)</p>', text)
    assert answer is not None and "tide, measured: " in answer[1] and answer[1].endswith(" % longer than predicted.")
    rows = dict(re.findall(r'<tr><th scope="row">([^<]*)</th>(.*?)</tr>', text))
    bounds, times = (re.findall(r"<td[^>]*>([^<]*)</td>", rows[name]) for name in ("lower bound", "iteration"))
    assert re.findall(r"<dt>(.*?)</dt>", text)[3] == "compute waits", "not every subject has a bound"
    assert bounds[0] and bounds[1:] == ["", ""] and "±" in times[0] and "±" not in times[1]
    assert "tide, predicted: predicted with the rates that the run measured at its start" in text
    own = (folder / "run.html").read_text(encoding="utf-8")
    assert "above the bound" in own and "predicted with the rates" not in own


def test_many_times_as_long_is_no_percentage(compared: Comparison, folder: Path) -> None:
    planned = compared["tide"]
    slow = replace(play(planned.plan, jitter=lambda step, k: 40.0), source="measured")
    RunTimelines(predicted=planned.timeline, measured=slow).save(folder / "slow.json")
    out = folder / "slow.html"
    assert main(["report", str(folder / "tide.json"), str(folder / "slow.json"), "-o", str(out), "--quiet"]) == 0
    answer = re.search(r'<p class="answer">(.*?)</p>', out.read_text(encoding="utf-8").replace("&nbsp;", " "))
    assert answer is not None and answer[1].endswith(", 40 times as long.")


def test_a_legend_names_what_its_chart_draws_and_shows_lines_as_lines(folder: Path) -> None:
    text = (folder / "run.html").read_text(encoding="utf-8")
    found = re.findall(r'<div data-x="(time|moment)"(?: hidden)?><ul class="legend">(.*?)</ul>', text)
    legends = {
        x: re.findall(r'class="(swatch|swatch line)" style="([^"]*)"></span>([^<]*)', items) for x, items in found
    }
    lines = {x: {name: style for kind, style, name in items if kind == "swatch line"} for x, items in legends.items()}
    assert lines["time"] == {"capacity (dashed)": "border-top:3px dashed var(--line)"}
    assert lines["moment"] == {
        **lines["time"],
        "measured model data (line)": "border-top:3px solid var(--ink)",
        "measured tide line (dotted)": "border-top:3px dotted #D55E00",
    }
    assert len(legends["time"]) > 3 and "parameters" in {name for kind, _, name in legends["time"] if kind == "swatch"}


def test_the_table_of_bytes_has_the_peak_of_an_instant(compared: Comparison, folder: Path) -> None:
    """The peak that the figures name stands in the table of bytes, too, whether or not a curve can show it."""
    text = (folder / "two.html").read_text(encoding="utf-8")
    bytes_table = text[text.index("Where every byte lives") :]
    for policy in ("tide", "zero_offload"):
        assert f"<td>{format_bytes(compared[policy].timeline.peak_bytes['gpu'])}</td>" in bytes_table


def test_plans_of_one_name_are_told_apart(folder: Path) -> None:
    plan = folder / "tide.json"
    subject = Subject(
        title="tide", plan=load_plan(plan), timeline=load_timelines(folder / "run.json")["measured"], examined=None
    )
    for files, titles in (
        (["a/one.json", "two.json"], ["tide (one)", "tide (two)"]),
        (["a/one.json", "b/one.json"], ["tide (a/one.json)", "tide (b/one.json)"]),
        (["one.json", "one.json"], ["tide (1)", "tide (2)"]),
    ):
        assert [one.title for one in with_distinct_titles([subject] * 2, files)] == titles


def test_machines_that_differ_are_told_apart_and_traffic_of_disks_is_shown(tmp_path: Path) -> None:
    """Both plans are for "rtxpro6000", one with less host memory: without its size the seconds look comparable."""
    w = chain_workload(4, 64 * MIB, flops=2 * 64 * MIB * 4096, tide_bytes=TIDE)
    disk = "zero_infinity:states=nvme,params=nvme"
    for policy, host, file in ((disk, "60GB", "disk"), ("zero_offload", "120GB", "host")):
        where = ps.machine("rtxpro6000", host_memory=host)
        ps.compare(w, where, policies=[policy], chunk_bytes=128 * MIB)[policy].save(tmp_path / f"{file}.json")
    out = tmp_path / "both.html"
    assert main(["report", str(tmp_path / "disk.json"), str(tmp_path / "host.json"), "-o", str(out), "--quiet"]) == 0
    head = re.findall(r'<p class="soft">(.*?)</p>', out.read_text(encoding="utf-8"))[:2]
    assert all("of GPU and" in line for line in head) and head[0].split(" with ")[1] != head[1].split(" with ")[1]
    moved = play(load_plan(tmp_path / "disk.json")).moved_bytes
    for way, name in (("nvme_read", "read from disk"), ("nvme_write", "written to disk")):
        assert moved[way] > 0
        assert re.search(rf"{name}.*?{re.escape(format_bytes(moved[way]))}", out.read_text(encoding="utf-8"), re.DOTALL)


def test_both_plans_share_their_axes(folder: Path) -> None:
    figures = values(folder / "two.html")["figures"]
    for kind in ("tide {} time", "tide {} moment", "lanes {}", "chunks {}"):
        one, other = (figures[kind.format(n)]["layout"] for n in (0, 1))
        assert one["xaxis"]["range"] == other["xaxis"]["range"]
    assert figures["tide 0 time"]["layout"]["yaxis"]["range"] == figures["tide 1 time"]["layout"]["yaxis"]["range"]


def test_every_colour_of_the_theme_is_known() -> None:
    assert themed({"a": ["@ink", 1, {"b": "@paper"}]}, "dark") == {"a": ["#e8e8e8", 1, {"b": "#16181c"}]}


def test_mistakes_are_named(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = str(folder / "none.html")
    assert main(["report", str(folder / "run.json"), "-o", out]) == 2
    assert "is a run; give the file of its plan" in capsys.readouterr().err
    plan, run = str(folder / "tide.json"), str(folder / "run.json")
    assert main(["report", plan, run, run, "-o", out, "--quiet"]) == 2, "a second run would take the first one's place"
    assert "is a run; give the file of its plan" in capsys.readouterr().err
    before = Path(plan).read_bytes()
    page_of_itself = str(folder / "plan.html")
    Path(page_of_itself).write_bytes(before)
    for command in (["report", page_of_itself, "-o", page_of_itself], ["export", plan, "--deepspeed", plan]):
        assert main(command) == 2
        assert f"{command[1]}: is a file that this command reads" in capsys.readouterr().err
    for name in ("report.pdf", "report", "tide.json"):
        assert main(["report", plan, "-o", str(folder / name)]) == 2
        assert f"{name} is a web page; give it a name that ends in .html, such as " in capsys.readouterr().err
    assert main(["export", plan, "--fsdp2", out, "--megatron", out]) == 2 and "give another" in capsys.readouterr().err
    assert Path(plan).read_bytes() == before
    assert main(["report", str(folder / "no.json"), "-o", out, "--quiet"]) == 2
    assert "no.json" in capsys.readouterr().err
    assert main(["report", str(folder / "zero_offload.json"), str(folder / "run.json"), "-o", out, "--quiet"]) == 2
    said = capsys.readouterr().err
    assert f"{folder / 'run.json'}: the simulated timeline is not of this plan: its step" in said
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    from pstar_sim.report.web import document

    document.plotly_script.cache_clear()
    assert main(["report", str(folder / "tide.json"), "-o", out, "--quiet"]) == 2
    assert "pip install -e '.[report]' in the checkout" in capsys.readouterr().err
    assert not Path(out).exists()


def test_plans_of_two_jobs_are_named_and_not_compared(compared: Comparison, folder: Path) -> None:
    w = ps.preset("tiny-gpt2", batch=1, seq=32)
    other = ps.compare(w, ps.machine("virtual"), policies=["all_on_gpu"], barrier_cost=False).best()
    other.save(folder / "other.json")
    compared["tide"].save(folder / "one.json")
    out = folder / "jobs.html"
    assert main(["report", str(folder / "one.json"), str(folder / "other.json"), "-o", str(out), "--quiet"]) == 0
    text = out.read_text(encoding="utf-8")
    assert "all_on_gpu: tiny-gpt2, 0.1 M parameters" in text and "for another job" in text
    assert " longer" not in text[: text.index("Figures")] and " shorter" not in text[: text.index("Figures")]
