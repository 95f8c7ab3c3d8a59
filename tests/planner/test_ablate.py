"""The ablation: its lines, its sums, its tables, its picture and its command."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.text import Text

import pstar_sim as ps
from pstar_sim.catalog.machine import Machine
from pstar_sim.cli import main
from pstar_sim.core.plan import Settings
from pstar_sim.errors import PlanError, PstarError, UnknownName
from pstar_sim.planner.ablate import Ablation, ablate, ladder, left_out
from pstar_sim.report.ablation import ablation_html, ablation_text
from pstar_sim.report.paper import Look
from pstar_sim.report.waterfall import plot_waterfall, waterfall_figure
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import MIB

EAGER = Settings(update="eager", clip=False, chunk_bytes=2 * MIB)
ON_GPU = "sums of gradients: on the GPU where that pays"
PLAINEST = "tide:capacity=peak,eviction=lru,prefetch=none,adam=after-backward,pins=0"


@pytest.fixture(scope="module")
def machine() -> Machine:
    """2 MiB cross the link in 2 s and are updated in 1 s."""
    return round_machine(gpu_memory_bytes=20 * MIB, flops_per_s=1e9, cores=2, measured=False)


@pytest.fixture(scope="module")
def found(machine: Machine) -> Ablation:
    return ablate(chain_workload(6, MIB, forward_s=1.0, tide_bytes=MIB), machine, EAGER, policy="tide")


def test_the_ladder_changes_one_coordinate_at_a_time() -> None:
    lines = ladder("tide", barrier=True)
    assert [spec for _, spec in lines] == [
        "patrickstar",
        PLAINEST + ",barrier=on",
        "tide:eviction=lru,prefetch=none,adam=after-backward,pins=0,barrier=on",
        "tide:eviction=fifo,prefetch=none,adam=after-backward,pins=0,barrier=on",
        "tide:prefetch=none,adam=after-backward,pins=0,barrier=on",
        "tide:prefetch=1,adam=after-backward,pins=0,barrier=on",
        "tide:adam=after-backward,pins=0,barrier=on",
        "tide:adam=after-backward,pins=0",
        "tide:adam=fifo,pins=0",
        "tide:pins=0",
        "tide",
    ]
    for (_, above), (_, below) in pairwise(lines[1:]):
        assert len(_place(above) ^ _place(below)) <= 2, below


def _place(spec: str) -> frozenset[str]:
    return frozenset(spec.partition(":")[2].split(","))


def test_a_barrier_of_the_setting_is_no_choice() -> None:
    """And a policy's own values end the ladder, also those that are on no scale."""
    assert ladder("tide", barrier=False)[1][1] == PLAINEST
    assert not any("barrier" in spec for _, spec in (*ladder("tide", barrier=False), *left_out("tide", barrier=False)))
    changes = [change for change, _ in ladder("tide:pins=3,prefetch=2", barrier=False)]
    assert changes[-1] == "pins: 3"
    assert "prefetch: 2" in changes
    assert "prefetch: by deadline" not in changes


def test_the_ladder_of_another_system_goes_on_from_the_point_nearest_to_it() -> None:
    assert [spec for _, spec in ladder("tide", barrier=False, begin="stronghold:window=2")] == [
        "stronghold:window=2",
        "tide:capacity=peak,eviction=lru,prefetch=1,adam=fifo",
        "tide:eviction=lru,prefetch=1,adam=fifo",
        "tide:eviction=fifo,prefetch=1,adam=fifo",
        "tide:prefetch=1,adam=fifo",
        "tide:adam=fifo",
        "tide",
    ]
    assert ladder("tide", barrier=False, begin="zero_offload")[1:] == ladder("tide", barrier=False)[1:]
    with pytest.raises(PstarError, match="begin and policy are both tide"):
        ladder("tide", barrier=False, begin="tide")


def test_each_idea_is_taken_out_by_itself() -> None:
    assert [spec for _, spec in left_out("static_partition", barrier=True)] == [
        "static_partition:eviction=lru",
        "static_partition:eviction=fifo",
        "static_partition:prefetch=none",
        "static_partition:prefetch=1",
        "static_partition:barrier=on",
        "static_partition:adam=after-backward",
        "static_partition:adam=fifo",
        "static_partition:pins=0",
    ]


def test_gains_add_up(found: Ablation) -> None:
    lines = found.lines
    first, last = lines[0], lines[-1]
    assert first.policy == "patrickstar"
    assert first.gained_s is None
    assert last.policy == found.policy == "tide"
    assert first.iteration_s is not None
    assert last.iteration_s is not None
    assert sum(line.gained_s or 0.0 for line in lines) == pytest.approx(first.iteration_s - last.iteration_s)
    assert last.total_s == pytest.approx(first.iteration_s - last.iteration_s)
    for name in ("h2d_bytes", "d2h_bytes"):
        gained = sum(getattr(line, f"gained_{name}") or 0 for line in lines)
        assert gained == getattr(first, name) - getattr(last, name)
    for line in found.without:
        assert line.fits
        assert line.gained_s is not None
        assert line.gained_s == pytest.approx(last.iteration_s - (line.iteration_s or 0.0))
    assert last.iteration_s < first.iteration_s


def test_a_line_is_what_compare_says(found: Ablation) -> None:
    for line in (found.lines[1], found.lines[-1], found.without[-1]):
        c = ps.compare(found.workload, found.machine, policies=[line.policy], settings=EAGER, barrier_cost=False)
        row = c.rows[0]
        assert (row.policy, row.iteration_s, row.h2d_bytes, row.gap) == (
            line.policy, line.iteration_s, line.h2d_bytes, line.gap,
        )  # fmt: skip


def test_optimal_is_the_last_line_and_all_have_its_chunk_size(machine: Machine) -> None:
    """The policy asked about is planned first, with the chunk size it likes best."""
    w = chain_workload(6, MIB, tensors_per_layer=4, forward_s=1.0, tide_bytes=MIB)
    found = ablate(w, machine, replace(EAGER, chunk_bytes=None))
    assert [line.change for line in found.lines][-2:] == ["pins: as many as pay", "streams: as many as pay"]
    assert found.lines[-1].policy == found.policy == "optimal"
    assert found.settings.chunk_bytes is not None
    assert min(line.iteration_s or 0.0 for line in found.lines) == pytest.approx(found.lines[-1].iteration_s)
    assert "every line has chunks of" in ablation_text(found)


def test_a_certified_bound_holds_for_all_lines(machine: Machine, found: Ablation) -> None:
    """The linear program is solved once: every line is the same job with the same chunks."""
    certified = ablate(found.workload, machine, EAGER, policy="tide", certify=True)
    bounds = [(line.iteration_s or 0.0) / (1 + line.gap) for line in certified.lines if line.gap is not None]
    assert len(bounds) == len(certified.lines)
    assert bounds[1:] == pytest.approx([bounds[-1]] * (len(bounds) - 1))
    for loose, tight in zip(found.lines, certified.lines):
        assert loose.iteration_s == tight.iteration_s
        assert loose.gap is not None
        assert tight.gap is not None
        assert -1e-9 <= tight.gap <= loose.gap + 1e-9


def test_lines_that_do_not_fit_are_passed_over(machine: Machine) -> None:
    """patrickstar needs 4 MiB of buffer and 2 of reserve more: the ladder begins below it."""
    w = chain_workload(6, MIB, forward_s=1.0, tide_bytes=MIB)
    rank = machine.ranks[0]
    small = replace(rank.gpu, memory_bytes=7 * MIB, usable_bytes=7 * MIB)
    found = ablate(w, replace(machine, ranks=(replace(rank, gpu=small),)), EAGER, policy="tide")
    assert not found.lines[0].fits
    assert "does not fit" in str(found.lines[0].reason)
    assert found.lines[1].gained_s is None
    assert found.lines[1].total_s == 0.0
    gains = sum(line.gained_s or 0.0 for line in found.lines)
    assert found.lines[-1].total_s == pytest.approx(gains)
    assert "does not fit" in ablation_text(found)
    assert waterfall_figure(found)
    tiny = replace(rank.gpu, memory_bytes=2 * MIB, usable_bytes=2 * MIB)
    with pytest.raises(PlanError, match="tide does not fit"):
        ablate(w, replace(machine, ranks=(replace(rank, gpu=tiny),)), EAGER, policy="tide")


def test_what_cannot_be_ablated_is_said(machine: Machine) -> None:
    w = chain_workload(2, MIB)
    with pytest.raises(PstarError, match="all_on_gpu is not a point of the asynchronous policies"):
        ablate(w, machine, EAGER, policy="all_on_gpu")
    with pytest.raises(UnknownName, match="did you mean tide"):
        ablate(w, machine, EAGER, policy="tida")


def test_as_a_table_and_a_frame(found: Ablation) -> None:
    text = ablation_text(found)
    assert repr(found) == text
    for line in (*found.lines, *found.without):
        assert line.change in text
    assert f"queues: none waits for another: {PLAINEST},barrier=on" in text
    assert "<table>" in ablation_html(found)
    assert found._repr_html_() == ablation_html(found)
    frame = found.to_frame()
    assert list(frame["part"]) == ["ladder"] * len(found.lines) + ["without"] * len(found.without)
    assert frame.loc[0, "policy"] == "patrickstar"


def test_the_waterfall_has_a_bar_for_each_line(found: Ablation) -> None:
    """Each change from where the line above ended to where it ends; the first and the last bar are whole."""
    figure = waterfall_figure(found)
    seconds, gigabytes = figure.axes
    bars = {patch.get_gid(): patch for patch in seconds.patches if patch.get_gid()}
    before = 0.0
    for n, line in enumerate(found.lines):
        bar, now = bars[f"line {n}"], line.iteration_s or 0.0
        low, high = (0.0, now) if n == 0 else sorted((before, now))
        assert bar.get_x() == pytest.approx(low)
        assert bar.get_x() + bar.get_width() == pytest.approx(high)
        before = now
    assert bars["last"].get_width() == pytest.approx(before)
    up = [patch.get_width() for patch in gigabytes.patches][: len(found.lines)]
    assert up == pytest.approx([(line.h2d_bytes or 0) / 1e9 for line in found.lines])
    labels = [label.get_text() for label in seconds.get_yticklabels()]
    assert labels[-1] == "tide"
    assert labels[1:-1] == [line.change for line in found.lines[1:]]


def test_the_waterfall_fits_into_the_column_of_a_paper(found: Ablation) -> None:
    figure = waterfall_figure(found, look=Look(width=3.3))
    figure.draw_without_rendering()
    (seconds,) = figure.axes
    words = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert len(words) > 2 * len(found.lines)
    for text in words:
        box = text.get_window_extent()
        assert box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, text
    labels = [label.get_text().replace("\n", " ") for label in seconds.get_yticklabels()]
    assert labels[1:-1] == [line.change for line in found.lines[1:]]


def test_it_draws_on_axes_of_ones_own(found: Ablation) -> None:
    own = Figure().subplots()
    assert plot_waterfall(found, ax=own) is own
    left, right = Figure().subplots(1, 2)
    plot_waterfall(found, ax=[left, right])
    first = [min(ax.patches, key=lambda bar: bar.get_xy()[1]).get_y() for ax in (left, right)]
    rows = [ax.transAxes.inverted().transform(ax.transData.transform((0, y)))[1] for ax, y in zip((left, right), first)]
    assert rows == pytest.approx([rows[0]] * 2, abs=0.02) and rows[0] > 0.8, "the first line is the top of both"
    assert left.get_yticklabels()[0].get_text() and not right.get_yticklabels()[0].get_text()
    with style.context("dark_background"):
        own = Figure().subplots()
        plot_waterfall(found, ax=own)
    boxes = [text.get_bbox_patch() for text in own.texts if text.get_bbox_patch() is not None]
    assert [box.get_facecolor() for box in boxes] == [own.get_facecolor()], "light words on a white box cannot be read"
    with pytest.raises(PstarError, match="one axes or two, not 3"):
        plot_waterfall(found, ax=list(Figure().subplots(1, 3)))


def test_the_command_on_several_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """--batch is that of all ranks; every rank's bytes are one rank's."""
    flags = "--model 1B --seq 1024 --machine v100-32x8 --chunk 256MiB --policy tide --json"
    assert main(["ablate", *flags.split(), "--batch", "32"]) == 0
    answer = json.loads(capsys.readouterr().out)
    lines = answer["lines"]
    assert all(line["fits"] and line["gap"] >= 0 for line in lines)
    assert lines[-1]["total_s"] == pytest.approx(lines[0]["iteration_s"] - lines[-1]["iteration_s"])
    assert main(["ablate", *flags.split(), "--batch", "12"]) == 2
    assert "8" in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "waterfall.png"
    flags = "--model 1B --batch 4 --seq 1024 --machine v100-32 --gpu-memory 8GB --chunk 256MiB --policy tide"
    table = picture.with_suffix(".csv")
    assert main(["ablate", *flags.split(), "-o", str(picture), "--data", str(table)]) == 0
    out = capsys.readouterr().out
    assert "from patrickstar to tide, one change at a time" in out
    assert "every line has the barrier that this setting asks for (clip)" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["ablate", *flags.split(), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["policy"] for row in rows] == [line["policy"] for line in answer["lines"]]
    assert [float(row["iteration_s"]) for row in rows] == [line["iteration_s"] for line in answer["lines"]]
    assert (answer["policy"], answer["barrier"]) == ("tide", "clip")
    assert [line["policy"] for line in answer["lines"]][:2] == ["patrickstar", PLAINEST]
    assert main(["ablate", *flags.split(), "--size", "3.3"]) == 2
    assert "--size, --style, --legend and --data are of a picture; give its file with -o" in capsys.readouterr().err
    assert main(["ablate", *flags.split(), "--policy", "zero_offload"]) == 2
    assert "not a point of the asynchronous policies" in capsys.readouterr().err


def test_sums_of_gradients_have_a_line_where_they_are_a_choice() -> None:
    changes = [change for change, _ in ladder("optimal", barrier=False, sums=True)]
    assert changes == [*(change for change, _ in ladder("optimal", barrier=False)), ON_GPU]
    assert ladder("optimal", barrier=False, sums=True)[-1][1] == "optimal"
    assert ("sums of gradients: where states are", "optimal:sums=off") in left_out("optimal", barrier=False, sums=True)
    # Layer by layer all of them add up on the GPU, and tide leaves them where the states are.
    assert ladder("optimal:order=relay", barrier=False, sums=True) == ladder("optimal:order=relay", barrier=False)
    assert [change for change, _ in ladder("tide", barrier=False, sums=True)] == [
        change for change, _ in ladder("tide", barrier=False)
    ]


def test_lines_refused_for_one_reason_share_a_note(found: Ablation) -> None:
    first, second, third, *others = found.lines
    refused = [replace(line, fits=False, reason="one GPU only") for line in (first, third)]
    said = ablation_text(replace(found, lines=(refused[0], second, refused[1], *others)), width=1000)
    assert said.count("one GPU only") == 1
    assert f"{first.change}; {third.change}: one GPU only" in said
