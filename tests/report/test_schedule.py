"""The picture of a schedule shows every step of the steady iteration, on its queue, when it ran."""

from __future__ import annotations

from dataclasses import replace

import matplotlib
from msgspec import structs

matplotlib.use("Agg")

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import pstar_sim as ps
from pstar_sim.core.step import Kind, Part, Queue
from pstar_sim.core.timeline import Span, Timeline
from pstar_sim.errors import PstarError
from pstar_sim.report.perfetto import to_perfetto
from pstar_sim.report.step_names import chunk_words
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB


def span(step: int, iteration: int, queue: Queue, kind: Kind, start_s: float, end_s: float, **more: int) -> Span:
    return Span(
        step=step, iteration=iteration, queue=queue, kind=kind, chunk=more.get("chunk"), moment=more.get("moment"),
        bytes=0, ready_s=start_s, start_s=start_s, end_s=end_s,
    )  # fmt: skip


def two_iterations() -> Timeline:
    """Iterations of 4 s: FWD [0, 2), BWD [2, 4). CPU Adam of chunk 3 runs over the border, [3, 5) of each iteration; a
    drop takes no time."""
    spans = []
    for k in range(2):
        spans.append(span(0, k, Queue.COMPUTE, Kind.COMPUTE, 4 * k, 4 * k + 2, moment=0))
        spans.append(span(1, k, Queue.COMPUTE, Kind.COMPUTE, 4 * k + 2, 4 * k + 4, moment=1))
        spans.append(span(2, k, Queue.ADAM, Kind.CPU_UPDATE, 4 * k + 3, 4 * k + 5, chunk=3))
        spans.append(span(3, k, Queue.H2D, Kind.DROP, 4 * k + 1, 4 * k + 1, chunk=3))
    return Timeline(
        source="simulated", iterations=2, iteration_s=4.0, spans=tuple(spans), samples=(), label="mine",
        phases=("FWD", "BWD"),
    )  # fmt: skip


def drawn(timeline: Timeline) -> Axes:
    axes = Figure().subplots()
    assert ps.plot_schedule(timeline, ax=axes) is axes
    return axes


def test_bars_are_the_steps_of_the_steady_iteration_cut_at_its_ends() -> None:
    axes = drawn(two_iterations())
    bars = sorted((bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for bar in axes.patches)
    assert bars == [(0, 0, 2), (0, 2, 2), (1, 0, 1), (1, 3, 1)]  # CPU Adam: the end of the one before, then its own
    assert [label.get_text() for label in axes.get_yticklabels()] == ["compute", "CPU Adam"]  # a drop is no bar
    assert sorted(text.get_text() for text in axes.texts) == ["0", "1", "3", "3"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "FWD", "BWD", "Adam on the CPU", "numbers: chunks", "numbers on compute: moments",
    ]  # fmt: skip
    assert axes.get_title(loc="left") == "mine: 4.000 s per iteration"


def test_copies_of_one_chunk_have_names_of_their_own() -> None:
    """In reports, in Perfetto, and on a bar that is wide enough."""
    w, m = chain_workload(2, 16 * MIB, flops=10**12, tide_bytes=MIB), ps.machine("rtx4090", gpu_memory="3GB")
    planned = ps.compare(w, m, policies=["zero_offload"], barrier_cost=False).planned["zero_offload"]
    update = next(step for step in planned.plan.steps if step.kind is Kind.CPU_UPDATE)
    parts = [structs.replace(step, part=Part(1, 8)) if step is update else step for step in planned.plan.steps]
    plan = replace(planned.plan, steps=tuple(parts))
    assert chunk_words(plan)[update.id] == f"chunk {update.chunk} (layers.0), part 2 of 8" and chunk_words(None) == {}
    names = {event["name"] for event in to_perfetto(planned.timeline, plan)["traceEvents"]}
    assert f"cpu_adam chunk {update.chunk} (layers.0), part 2 of 8" in names
    axes = Figure(figsize=(12, 3)).subplots()
    ps.plot_schedule(planned.timeline, ax=axes, plan=plan)
    assert f"{update.chunk} (2/8)" in [text.get_text() for text in axes.texts]


def test_bars_of_a_plan_take_as_long_as_its_queues_are_busy() -> None:
    workload = chain_workload(4, 16 * MIB, flops=10**12, tide_bytes=MIB)
    planned = ps.compare(workload, ps.machine("rtx4090", gpu_memory="2GB"), policies=["zero_offload"]).best()
    axes = drawn(planned.timeline)
    rows = [label.get_text() for label in axes.get_yticklabels()]
    for queue, name in ((Queue.COMPUTE, "compute"), (Queue.ADAM, "CPU Adam"), (Queue.H2D, "host to GPU")):
        row = rows.index(name)
        seconds = sum(bar.get_width() for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == row)
        assert seconds == pytest.approx(planned.timeline.busy_s[queue.value], rel=1e-9)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(PstarError, match="a Timeline or a plan of a comparison"):
        ps.plot_schedule("plan.json")  # type: ignore[arg-type]
    with pytest.raises(PstarError, match="an Axes"):
        ps.plot_schedule(two_iterations(), ax="here")  # type: ignore[arg-type]
    with pytest.raises(PstarError, match="no compute spans"):
        ps.plot_schedule(Timeline(source="measured", iterations=1, iteration_s=1.0, spans=(), samples=()))
