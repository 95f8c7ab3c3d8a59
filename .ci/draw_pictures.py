"""The pictures of docs/images: the tide of the README, and the schedule of every policy on one small job.

python .ci/draw_pictures.py   draws all of them again; .ci/refresh_readme.py draws those whose plans have changed.

Each is drawn twice: for light pages, and in docs/images/dark for dark ones.

A picture carries the digest of the timelines that it shows, so a test sees when it no longer shows today's plans.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin

import pstar_sim as ps
from pstar_sim.core.plan import Plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.planner.compare import Planned
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.stages import PlannedStages, plan_stages
from pstar_sim.planner.variants import choose
from pstar_sim.planner.ways import Way, candidates
from pstar_sim.policy.registry import can
from pstar_sim.report.paper import Look, styled
from pstar_sim.report.stages import stages_figure
from pstar_sim.report.tide_picture import tide_figure
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.workload import Workload, repeat_micro_batch

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
DARK = IMAGES / "dark"
FOLDERS: Mapping[Path, str] = {IMAGES: "light", DARK: "dark"}
KEY = "timelines"

WIDTH = 7.6  # inches; a page shows 750 pixels, in which letters of 9 points are 12 pixels high
DPI = 200  # for screens with two pixels for one

LAYERS = 6
LAYER_PARAMS = 64 * MIB
TOKENS = 12_288
TIDE_BYTES = 400 * MIB
SEQUENCES = 12
SAVED_BYTES, BOUNDARY_BYTES = 300 * MIB, 30 * MIB  # of a layer's activations kept, and recomputed
MICRO_BATCHES = 4
TIDE_TITLE = "15B, batch 8, sequence 1024, on one V100 of 32 GB; --update step --clip (the defaults)"

# Policy -> number of GPUs and memory of each. A GPU of 3 GB has 2.00 GB for a plan, a third of the model data.
MACHINES = {
    "all_on_gpu": (1, "10GB"),
    "zero_offload": (1, "3GB"),
    "static_partition": (1, "3GB"),
    "patrickstar": (1, "3GB"),
    "l2l": (1, "3GB"),
    "tide": (1, "3GB"),
    "optimal": (1, "3GB"),
    "zero3_resident": (4, "4GB"),
    "zero3_offload": (4, "3GB"),
    "deep_optimizer_states": (4, "3GB"),
    "zero_infinity": (4, "3GB"),
    "stronghold": (1, "3GB"),
    "karma": (1, "3GB"),
}
# The published sizes of sub-groups and buckets hold the whole small job; these hold one or two of its layers.
OPTIONS = {
    "l2l": "stash=host",
    "zero3_offload": "bucket=70000000,subgroup=17000000,reuse=0",
    "deep_optimizer_states": "bucket=70000000,subgroup=17000000,reuse=0",
    "zero_infinity": "bucket=70000000,subgroup=17000000,reuse=0",
}
# Policy -> micro-batches, where low tide saves copies only if parameters come more than once. static_partition and tide
# take equally long with one.
REPEATED = {"static_partition": 2, "tide": 2, "optimal": 2}
# Settings other than the default one: where a policy is drawn as it was published.
AS_PUBLISHED = {"update": "eager", "clip": False}
SETTINGS: Mapping[str, Mapping[str, Any]] = {"stronghold": AS_PUBLISHED, "l2l": AS_PUBLISHED}


def job() -> Workload:
    """Six equal layers, a chunk each; a tide that rises to 400 MiB in the forward pass and falls again."""
    rise = [TIDE_BYTES * (layer + 1) // LAYERS for layer in range(LAYERS)]
    return chain_workload(
        LAYERS, LAYER_PARAMS, flops=2 * LAYER_PARAMS * TOKENS, tide_bytes=[*rise, *reversed(rise), 50 * MIB]
    )


def ways() -> Sequence[Way]:
    """The ways to run the same layers with more activations than fit: all recomputed, all kept."""
    kept = [SAVED_BYTES * (layer + 1) for layer in range(LAYERS)]
    forward = [BOUNDARY_BYTES * (layer + 1) for layer in range(LAYERS)]
    again = [BOUNDARY_BYTES * (layer + 1) + SAVED_BYTES for layer in reversed(range(LAYERS)) for _ in range(2)]
    flops = 2 * LAYER_PARAMS * TOKENS
    tides = {True: [*forward, *again, 50 * MIB], False: [*kept, *reversed(kept), 50 * MIB]}
    made = [
        chain_workload(LAYERS, LAYER_PARAMS, flops=flops, tide_bytes=tide, checkpointing=checkpointing)
        for checkpointing, tide in tides.items()
    ]
    return candidates(made, 1)


def recomputing_job() -> Workload:
    """The same layers and tokens in four micro-batches; each layer leaves its input behind and recomputes."""
    rise = [TIDE_BYTES * (layer + 1) // LAYERS // MICRO_BATCHES for layer in range(LAYERS)]
    fall = [level for level in reversed(rise) for _ in range(2)]
    flops = 2 * LAYER_PARAMS * TOKENS // MICRO_BATCHES
    return chain_workload(
        LAYERS,
        LAYER_PARAMS,
        flops=flops,
        tide_bytes=[*rise, *fall, 50 * MIB // MICRO_BATCHES],
        checkpointing=True,
        micro_batches=MICRO_BATCHES,
    )


def scheduled(policy: str) -> Planned:
    """What the policy does with the small job; one that chooses activations, with the ways to run it."""
    gpus, gpu_memory = MACHINES[policy]
    name = f"{policy}:{OPTIONS[policy]}" if policy in OPTIONS else policy
    machine = ps.machine("rtx4090", gpus=gpus, gpu_memory=gpu_memory)
    if can(policy).activations is not None:
        chosen = choose(ways(), machine, ps.Settings(chunk_bytes=2 * LAYER_PARAMS), policy=policy)
        return replace(chosen, timeline=chosen.timeline.labelled(policy))
    w = recomputing_job() if can(policy).reorders else repeat_micro_batch(job(), REPEATED.get(policy, 1))
    own = SETTINGS.get(policy, {})
    return ps.compare([w] * gpus, machine, policies=[name], chunk_bytes=2 * LAYER_PARAMS, **own).best()


def share_of_job(sequences: int) -> Workload:
    """The small job for a GPU that takes so many of its SEQUENCES."""
    part, w = sequences / SEQUENCES, job()
    scaled = ("flops", "start_bytes", "peak_bytes", "end_bytes")
    moments = (replace(m, **{name: round(getattr(m, name) * part) for name in scaled}) for m in w.moments)
    return replace(w, moments=tuple(moments), batch=sequences)


def whale_timelines() -> list[Timeline]:
    """Both GPUs of a mixed machine, each with its share of twice the small job."""
    machine = ps.machine("rtx4090+rtx3090", gpu_memory="10GB")
    each = [share_of_job(SEQUENCES)] * 2
    found = ps.compare(each, machine, policies=["whale"], chunk_bytes=2 * LAYER_PARAMS, cut=share_of_job).best()
    plan = found.plan
    return [
        ps.play(plan, rank=r, label=f"whale: {rank.gpu.name}, {job.batch} of {2 * SEQUENCES} sequences")
        for r, (rank, job) in enumerate(zip(plan.machine.ranks, plan.jobs))
    ]


def whale_picture(timelines: Sequence[Timeline]) -> Figure:
    """A GPU above the other: what its queues do, and what fills it."""
    figure = Figure(figsize=(WIDTH, 8.0), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True, height_ratios=[1.05, 1.5] * 2)
    for n, timeline in enumerate(timelines):
        ps.plot_schedule(timeline, ax=axes[2 * n])
        ps.plot_tide(timeline, ax=axes[2 * n + 1])
        axes[2 * n].set_xlabel("")
        axes[2 * n + 1].set_title("", loc="left")
    axes[1].set_xlabel("")
    legend_below(figure)
    return figure


def legend_below(figure: Figure) -> None:
    """Put the legends below the axes, which are then as wide as the figure: of the queues left, of the bytes right."""
    shown = [legend for ax in figure.axes if (legend := ax.get_legend()) is not None]
    for legend, corner, columns in zip(shown, ("left", "right"), (2, 1), strict=True):
        words = [text.get_text() for text in legend.get_texts()]
        place = {"loc": f"outside lower {corner}", "ncols": columns}
        legend.remove()
        figure.legend(legend.legend_handles, words, frameon=False, fontsize=9, columnspacing=1.0, **place)


def schedule_picture(timeline: Timeline, plan: Plan) -> Figure:
    """What every queue does, over what fills the GPU."""
    queues = len({span.queue for span in timeline.spans if span.end_s > span.start_s})
    figure = Figure(figsize=(WIDTH, 4.6 + 0.4 * queues), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[0.25 + 0.4 * queues, 2.3])
    ps.plot_schedule(timeline, ax=above, plan=plan)
    ps.plot_tide(timeline, ax=below)
    above.set_xlabel("")
    if plan.workload.micro_batches > 1:  # else it would seem slower than a policy whose picture has one
        title = f"{above.get_title(loc='left')} of {plan.workload.micro_batches} micro-batches"
        above.set_title(title, fontsize=10, loc="left")
    below.set_title("", loc="left")
    legend_below(figure)
    return figure


@cache
def stages() -> PlannedStages:
    """A model of 13 billion parameters in four stages, on GPUs that hold a fifth of its model data together."""
    job = Job(model="llama-2-13b", batch=2, seq=2048, micro_batches=8)
    return plan_stages(job, ps.machine("rtx4090x8", gpus=4), "tide", Parallelism(pipeline=4))


def tide_timelines() -> list[Timeline]:
    """The plans of the default setting, --update step and --clip."""
    comparison = ps.compare(
        ps.preset("15B", batch=8, seq=1024), ps.machine("v100-32"), policies=["patrickstar", "tide"]
    )
    return [comparison[policy].timeline for policy in ("patrickstar", "tide")]


def tide_picture(timelines: Sequence[Timeline]) -> Figure:
    return tide_figure(timelines, xs=("time",), title=TIDE_TITLE, look=Look(width=WIDTH))


# Name of the file -> the timelines that it shows; they alone decide whether it is drawn again.
SHOWN: Mapping[str, Callable[[], list[Timeline]]] = {
    "tide_15b": tide_timelines,
    "whale": whale_timelines,
    "stages": lambda: list(stages().timelines),
    **{policy: partial(lambda policy: [scheduled(policy).timeline], policy) for policy in MACHINES},
}


def digest(timelines: Sequence[Timeline]) -> str:
    """Of what is drawn, to the microsecond."""
    told = hashlib.sha256()
    for timeline in timelines:
        rows = [(s.queue.value, s.kind.value, s.chunk, s.moment, f"{s.start_s:.6f}") for s in timeline.spans]
        samples = [(f"{s.time_s:.6f}", s.place, s.category, s.bytes) for s in timeline.samples]
        told.update(repr((timeline.label, f"{timeline.iteration_s:.6f}", rows, samples)).encode())
    return told.hexdigest()[:16]


def digest_in(path: Path) -> str | None:
    """What the picture says that it shows; None where it is not there or says nothing."""
    if not path.exists():
        return None
    with Image.open(path) as image:
        return image.info.get(KEY)


def figure_of(name: str, timelines: Sequence[Timeline]) -> Figure:
    several = {
        "tide_15b": tide_picture,
        "whale": whale_picture,
        "stages": lambda timelines: stages_figure(stages().plans, timelines, look=Look(width=1.4 * WIDTH)),
    }
    return several[name](timelines) if name in several else schedule_picture(timelines[0], scheduled(name).plan)


def draw(name: str, timelines: Sequence[Timeline]) -> None:
    """A palette of 256 colours makes the file a third as large. With fewer colours, thin bars lost theirs."""
    about = PngImagePlugin.PngInfo()
    about.add_text(KEY, digest(timelines))
    for folder, name_of_style in FOLDERS.items():
        drawn = io.BytesIO()
        with styled(name_of_style):
            figure_of(name, timelines).savefig(drawn, format="png", dpi=DPI)
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        image.save(folder / f"{name}.png", optimize=True, pnginfo=about)


def draw_changed() -> None:
    for name, shown in SHOWN.items():
        timelines = shown()
        if any(digest(timelines) != digest_in(folder / f"{name}.png") for folder in FOLDERS):
            draw(name, timelines)


if __name__ == "__main__":
    for name, shown in SHOWN.items():
        draw(name, shown())
