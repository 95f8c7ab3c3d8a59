"""A pipeline's stages as tables and pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pstar_sim.catalog.machine import Group, Machine
from pstar_sim.core.figures import BINDS_NAMES
from pstar_sim.core.plan import Plan
from pstar_sim.core.plan_set import PlanSet, Split
from pstar_sim.core.step import Kind, Queue
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import CostModel
from pstar_sim.planner.stages import PlannedStages
from pstar_sim.planner.stages_compared import StagesComparison, StagesRow
from pstar_sim.planner.stages_degrees import closed_bubble
from pstar_sim.report.byte_curves import steady_start_s
from pstar_sim.report.legends import dark
from pstar_sim.report.palette import ON_DARK, PHASES, QUEUE_NAMES, STEPS
from pstar_sim.report.paper import USUAL, Look, broken_at, csv_text, figure_legend, laid_out
from pstar_sim.report.tables import format_percent, format_size
from pstar_sim.terminal import table_text, terminal_width, wrap
from pstar_sim.units import format_bytes, format_count, format_s
from pstar_sim.workload.mixing import block_of
from pstar_sim.workload.pipeline import cells_of, in_flight
from pstar_sim.workload.tape import CONTEXT, EXPERTS, TENSOR

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADS = (
    "parallelism", "policy", "batch", "iteration", "tokens/s", "MFU", "above bound", "bubble", "sums", "bound by",
    "GPU peak", "host peak",
)  # fmt: skip


def stages_text(comparison: StagesComparison, *, width: int | None = None) -> str:
    """Peaks that differ are the smallest and largest."""
    width = terminal_width() if width is None else width
    fitting = [row for row in comparison.rows if row.fits]
    machine, job = comparison.machine, comparison.job
    said = "".join(f", {words}" for words in job.words)
    lines = wrap(f"{job.model}, sequence {job.seq}{said}, on {machine.name}: {machine.world_size} GPUs", width)
    if fitting:
        chosen = any(row.recompute for row in fitting)
        recomputed = [("recomputed", *(row.recompute or "" for row in fitting))] if chosen else []
        columns = list(zip(HEADS, *map(_cells, fitting)))
        heads, *rows = zip(*columns[:3], *recomputed, *columns[3:])
        lines += ["", table_text(heads, rows, width=width, keys=2).rstrip()]
        if chosen:
            lines += ["", *wrap(f"flags of the fastest: {comparison.flags}", width)]
    unfit = [row for row in comparison.rows if not row.fits]
    if len(unfit) == 1:
        lines += ["", *wrap(f"{unfit[0].parallel}: {unfit[0].reason}", width)]
    for policy in dict.fromkeys(row.policy for row in unfit if len(unfit) > 1):
        lacking = _nearest(row for row in unfit if row.policy == policy)
        others = f"; {format_count(len(lacking) - 1, 'other way')} more" if len(lacking) > 1 else ""
        lines += ["", *wrap(f"{policy} does not fit: {_lacks(lacking[0])}{others}", width)]
    if comparison.slower:
        words = "not planned, because no plan of it would be faster than the seconds in brackets"
        lines += ["", *wrap(f"{words}: {', '.join(comparison.slower)}", width)]
    if comparison.gain_of_cut is not None:
        lines += ["", f"stages cut by speed: {comparison.gain_of_cut:.2f} times as fast as stages of equal depth"]
    splits = [f"{row.parallel}: {split_words(row.split, row.gain_of_split)}" for row in fitting if row.split]
    lines += ["", *wrap(splits[0], width)] if splits else []
    for note in comparison.notes:
        lines += ["", *wrap(f"note: {note}", width)]
    for words in comparison.left_out:
        lines += ["", *wrap(f"not planned: {words}", width)]
    return "\n".join(lines) + "\n"


def split_words(split: Split, gain: float | None) -> str:
    if split.equal:
        return f"layers split equally, {split} for each GPU: none of the splits by speed that were tried is faster"
    even = "there is no plan with equal shares" if gain is None else f"{gain:.2f} times as fast as with equal shares"
    return f"layers split by speed, {split} for each GPU: {even}"


def _cells(row: StagesRow) -> tuple[str, ...]:
    assert row.iteration_s is not None and row.tokens_per_s is not None and row.bubble is not None
    return (
        row.parallel,
        row.policy,
        f"{row.batch} x {row.micro_batches}",
        ("≈ " if row.few else "") + format_s(row.iteration_s),
        f"{row.tokens_per_s:,.0f}",
        "" if row.mfu is None else format_percent(row.mfu),
        format_percent(row.gap or 0.0),
        format_percent(row.bubble),
        format_percent(row.sums or 0.0),
        BINDS_NAMES.get(row.bound_by or "", row.bound_by or ""),
        _span(row.peak_gpu_bytes),
        _span(row.peak_host_bytes),
    )


def _nearest(rows: Iterable[StagesRow]) -> list[StagesRow]:
    nearest: dict[tuple[str, int], StagesRow] = {}
    for row in sorted(rows, key=lambda row: (row.needed_bytes or 0) - (row.available_bytes or 0)):
        nearest.setdefault((row.parallel, row.micro_batches), row)
    return [*nearest.values()]


def _lacks(row: StagesRow) -> str:
    needs, has = format_size(row.needed_bytes), format_size(row.available_bytes)
    return f"{row.way} needs {needs} of {row.short_of} and has {has}"


def _span(sizes: Sequence[int]) -> str:
    least, most = format_size(min(sizes)), format_size(max(sizes))
    return least if least == most else f"{least} to {most}"


def explain_stages(planned: PlannedStages, *, width: int | None = None) -> str:
    """Seconds, bound and bubble, a row per stage, and the cost of splitting layers here and between nodes."""
    width = terminal_width() if width is None else width
    plans, spread = planned.plans.plans, planned.plans.parallelism
    first, m, p = plans[0], plans[0].workload.micro_batches, spread.pipeline
    over = planned.iteration_s / planned.lower_bound_s - 1
    each = f"{format_count(m, 'micro-batch')} of {format_count(first.workload.batch, 'sequence')} on each rank"
    machine = first.machine.name.partition(" stage ")[0]
    bound = f"{format_percent(over)} above the lower bound of plans of these stages"
    binds = BINDS_NAMES.get(planned.bound_by, planned.bound_by)
    texts = [
        f"{first.workload.model} on {machine}, {spread}, by {first.policy}: {each}.",
        f"An iteration takes {format_s(planned.iteration_s)}, {bound}; bound by: {binds}.",
    ]
    if p > 1:
        own = "m" if spread.virtual == 1 else "v m"
        equal = f"{format_percent(closed_bubble(spread, m))}, (p - 1) / ({own} + p - 1)"
        texts.append(
            f"Bubble: a GPU computes nothing for {format_percent(planned.bubble)} of the iteration; stages that take "
            f"equally long and wait for no link would have {equal}."
        )
    if split := planned.plans.split:
        texts.append(f"{split_words(split, planned.gain_of_split)}.".replace("layers", "Layers", 1))
    texts += _words_for_sums(plans)
    rows = [_stage_cells(planned, n) for n in range(len(plans))]
    lines = [line for text in texts for line in wrap(text, width)]
    heads = ("GPU", *STAGE_HEADS[1:]) if planned.plans.shares else STAGE_HEADS
    return "\n".join(lines) + "\n\n" + table_text(heads, rows, width=width, keys=1)


STAGE_HEADS = ("stage", "layers", "in flight", "computes", "waits for sums", "GPU peak", "GPU has", "host peak")


def _stage_cells(planned: PlannedStages, number: int) -> tuple[str, ...]:
    plans, plan, timeline = planned.plans, planned.plans.plans[number], planned.timelines[number]
    spread = plans.parallelism
    cells = cells_of(spread.schedule, spread.pipeline, plan.workload.micro_batches, spread.virtual)
    return (
        plans.names[number] if plans.shares else str(number),
        str(len({block for m in plan.workload.moments if (block := block_of(m.module))})),
        str(in_flight(cells[0 if plans.shares else number])),
        format_percent(planned.computing[number]),
        format_percent(_sums_s(plan, plan.machine) / timeline.iteration_s),
        format_size(timeline.peak_bytes["gpu"]),
        format_size(plan.gpu_budget_bytes),
        format_size(timeline.peak_bytes["host"]),
    )


def _sums_s(plan: Plan, machine: Machine, group: str | None = None) -> float:
    cost = CostModel(plan.workload, machine, plan.layout)
    return cost.group_s([c for m in plan.workload.moments for c in m.collectives if group in (None, c[1])])


def _words_for_sums(plans: Sequence[Plan]) -> list[str]:
    plan = max(plans, key=lambda plan: sum(len(m.collectives) for m in plan.workload.moments))
    machine = plan.machine
    sizes = {
        group: [size for m in plan.workload.moments for _, name, size in m.collectives if name == group.name]
        for group in machine.groups
    }
    return [
        *(words for group, sums in sizes.items() if group.name == TENSOR for words in _of_tensor(plan, group, sums)),
        *(
            f"{_WAITS[group.name].format(len(sums), group.ranks)}, of {format_bytes(max(sums))} at most: "
            f"{format_s(_sums_s(plan, machine, group.name))} of the iteration over {group.fabric.name}."
            for group, sums in sizes.items()
            if group.name in _WAITS and sums
        ),
    ]


_WAITS = {
    CONTEXT: "Context parallelism: attention waits {:,} times for keys and values of {} ranks, or the sum of their "
    "gradients",
    EXPERTS: "Expert parallelism: layers wait {:,} times until rows have gone to {} ranks' experts, or have come back",
}


def _of_tensor(plan: Plan, group: Group, sums: Sequence[int]) -> list[str]:
    machine = plan.machine
    here = _sums_s(plan, machine, TENSOR)
    said = (
        f"Tensor parallelism: layers of a stage wait {len(sums):,} times for sums over {group.ranks} ranks, of "
        f"{format_bytes(max(sums))} at most: {format_s(here)} of the iteration over {group.fabric.name}"
    )
    if machine.network is None:
        return [f"{said}. Nothing hides them, which is why it stays in a node."]
    network = replace(machine.network, bytes_per_s=machine.network.bytes_per_s / machine.local_ranks)
    away = format_s(_sums_s(plan, replace(machine, groups=(replace(group, fabric=network),)), TENSOR))
    return [f"{said}. Over {network.name} between nodes they would take {away}, which is why it stays in a node."]


def stages_figure(plans: PlanSet, timelines: Sequence[Timeline], *, look: Look = USUAL) -> Figure:
    """Every stage's queues over one iteration. Compute's bars are cells: a micro-batch's forward or backward, numbered.
    Less than a pixel is left out, except what stages send.

    Raises PstarError for a size without room.
    """
    from matplotlib.figure import Figure

    shown = [_rows_of(timeline) for timeline in timelines]
    size = look.size(12.0, look.scale * (1.2 + 0.3 * sum(map(len, shown))))
    figure = Figure(figsize=size, layout="constrained")
    ax = figure.subplots()
    names: list[str] = []
    found: dict[str, Any] = {}
    end_s = max(timeline.iteration_s for timeline in timelines)
    origin = min(map(steady_start_s, timelines))
    for stage, (plan, timeline, rows) in enumerate(zip(plans.plans, timelines, shown)):
        for queue in rows:
            row = len(names)
            least_s = end_s / 1000 if queue in (Queue.SEND, Queue.RECEIVE) else 0.0
            for begin_s, over_s, name, colour, label in _bars(plan.workload.moments, timeline, queue, origin):
                over_s = max(over_s, begin_s + least_s)
                if over_s - begin_s < end_s / 4000:
                    continue
                ink = "white" if name == "ADAM" else "black"
                colour, _ = ON_DARK.get(colour, (colour, ink)) if dark(ax) else (colour, ink)
                bar = ax.barh(row, over_s - begin_s, left=begin_s, height=0.8, color=colour)
                found.setdefault(name, bar)
                if label and over_s - begin_s > 0.01 * end_s:
                    ax.text(
                        (begin_s + over_s) / 2, row, label, ha="center", va="center_baseline", fontsize=6, color=ink
                    )
            names.append(f"{plans.names[stage]}: {QUEUE_NAMES[queue]}" if queue is rows[0] else QUEUE_NAMES[queue])
        ax.axhline(len(names) - 0.5, color="#BBBBBB", linewidth=0.6)
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(0, end_s)
    ax.set_xlabel("time in the iteration [s]")
    first = plans.plans[0]
    w, machine = first.workload, first.machine.name.partition(" stage ")[0]
    job = f"{w.model}, batch {w.batch} x {w.micro_batches}, sequence {w.sequence}, on {machine}"
    title = f"{job}, {first.policy}, {plans.parallelism}: {format_s(end_s)} per iteration"
    ax.set_title(broken_at(title, figure.get_figwidth() * 54, 10 * look.scale), fontsize=10, loc="left")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    figure_legend(figure, found, look, place="below" if look.scale < 1 else "right")
    return laid_out(figure, look)


def stages_csv(plans: PlanSet, timelines: Sequence[Timeline]) -> str:
    """All bars."""
    rows: list[Sequence[object]] = [("stage", "queue", "work", "micro_batch", "start_s", "end_s")]
    origin = min(map(steady_start_s, timelines))
    for stage, (plan, timeline) in enumerate(zip(plans.plans, timelines)):
        for queue in _rows_of(timeline):
            for begin_s, end_s, name, _, micro_batch in _bars(plan.workload.moments, timeline, queue, origin):
                rows.append((stage, QUEUE_NAMES[queue], name, micro_batch, begin_s, end_s))
    return csv_text(rows)


def _rows_of(timeline: Timeline) -> list[Any]:
    there = {span.queue for span in timeline.spans if span.kind is Kind.COMPUTE or span.kind in STEPS}
    return [queue for queue in QUEUE_NAMES if queue in there]


def _bars(
    moments: Sequence[Any], timeline: Timeline, queue: Any, origin: float
) -> list[tuple[float, float, str, str, str]]:
    """(begin, end, name, colour, number) on one queue; one per cell without a gap."""
    gap_s = timeline.iteration_s / 4000
    bars: list[tuple[float, float, str, str, str]] = []
    cell: object = None
    for span in timeline.spans:
        begin_s, over_s = max(span.start_s - origin, 0.0), min(span.end_s - origin, timeline.iteration_s)
        if span.queue is not queue or over_s <= begin_s:
            continue
        if span.kind is not Kind.COMPUTE:
            if span.kind in STEPS:
                name, colour, _ = STEPS[span.kind]
                bars.append((begin_s, over_s, name, colour, ""))
            continue
        moment = moments[span.moment or 0]
        phase = "FWD" if moment.phase == "FWD" else "ADAM" if moment.phase == "ADAM" else "BWD + recompute"
        own = (span.iteration, moment.micro_batch, phase)
        if own == cell and bars and begin_s - bars[-1][1] < gap_s:
            bars[-1] = (bars[-1][0], over_s, *bars[-1][2:])
        else:
            bars.append((begin_s, over_s, phase, PHASES[phase], str(moment.micro_batch)))
        cell = own
    return bars
