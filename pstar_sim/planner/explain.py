"""A plan in words: where chunks live and why, what binds, the gains of following the tide and of another order, the
first steps.

All is counted from the plan, its workload and its timeline; policies are asked only for the tide's counterpart and the
other order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pstar_sim.arguments import choice, instance, number, whole
from pstar_sim.catalog.model_shapes import is_model, model_entry
from pstar_sim.core.effects import gradient_list
from pstar_sim.core.figures import BINDS_NAMES
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Place, to_text
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import CannotPlan, DoesNotFit, PstarError
from pstar_sim.planner.binding import bound_by as binding
from pstar_sim.planner.expert_chunks import chunk_use
from pstar_sim.planner.machine_notes import disk_life
from pstar_sim.planner.streaming import hiding
from pstar_sim.planner.tried import tried_of, tried_text
from pstar_sim.policy.family.pace import period_s
from pstar_sim.policy.kit.options import options_of, split_spec
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.registry import find_policy, policy_at
from pstar_sim.sim.play import peaks_of_ranks, play
from pstar_sim.terminal import terminal_width, wrap
from pstar_sim.units import format_bytes, format_params, format_ranks, format_s
from pstar_sim.workload.kernels import kernels_text
from pstar_sim.workload.workload import Phase, Workload, activations_text

_MODES = {
    "cpu": "gradient goes down, Adam runs on the CPU, the parameters come up again",
    "pin": "parameters and optimizer states stay on the GPU, Adam runs there",
    "stream": "optimizer states visit the GPU for Adam",
    "frozen": "no gradient, no states; only read",
}
_BINDS = {
    "compute": "the accelerator itself: it is busy almost all the time",
    "adam": "CPU Adam: the accelerator waits for parameters that are still being updated",
    "h2d": "the link towards the GPU: the accelerator waits for parameters that are on their way",
    "d2h": "the link towards the host: the accelerator waits for room that gradients still take",
    "dram": "host memory bandwidth, which copies and CPU Adam share",
    "barrier": "CPU Adam behind the barrier: no Adam may run before all gradients are there",
    "net": "the collectives: the accelerator waits for slices of other ranks, or for its gradients to be summed",
    "nvme": "the disks: the accelerator waits for what is on them",
    "nvme_write": "the disks: the accelerator waits for room that what they write still takes",
    "send": "the link to another stage: the accelerator waits until what it made is there",
    "receive": "the link from another stage: the accelerator waits for what it made",
    "stages": "the other stages: the accelerator waits for what they compute (the bubble of the pipeline)",
}


WAITS = {
    "adam": "for CPU Adam",
    "h2d": "for copies to the GPU",
    "d2h": "for copies to the host",
    "dram": "because host memory is short of bandwidth",
    "barrier": "for CPU Adam behind the barrier",
    "compute": "for its own earlier steps",
    "net": "for collectives",
    "nvme": "for the disks",
    "nvme_write": "for writes to the disks",
    "send": "for transfers to other stages",
    "receive": "for transfers from other stages",
    "stages": "for other stages of the pipeline",
}


@dataclass(frozen=True, slots=True)
class BoundGap:
    """A chunk is used in moments `start` and `end`; between them it could be away.

    turn: from forward to backward, not from backward to the next micro-batch's forward.
    """

    chunk: int
    start: int
    end: int
    turn: bool


def chunk_gaps(plan: Plan) -> tuple[BoundGap, ...]:
    """Of every chunk whose parameters travel, within the iteration."""
    w, chunk_of = plan.workload, plan.layout.chunk_of
    uses: dict[int, list[int]] = {}
    for moment, (reads, gradients) in enumerate(zip(w.reads, w.gradients)):
        for tensor in {*reads, *gradients}:
            row = uses.setdefault(chunk_of[tensor], [])
            if not row or row[-1] != moment:
                row.append(moment)
    gaps: list[BoundGap] = []
    for chunk, moments in sorted(uses.items()):
        if plan.modes[chunk] == "pin" or plan.layout.chunks[chunk].small:
            continue
        for a, b in itertools.pairwise(moments):
            forward = (w.moments[a].phase is Phase.FWD, w.moments[b].phase is Phase.FWD)
            if forward == (True, False) or (
                forward == (False, True) and w.moments[a].micro_batch < w.moments[b].micro_batch
            ):
                gaps.append(BoundGap(chunk, a, b, forward[0]))
    return tuple(gaps)


def tide_gain(plan: Plan) -> str:
    """Bytes to the GPU that a capacity following the tide saves over one for its peak, or why it saves none."""
    w = plan.workload
    both: dict[str, Plan] = {}
    short: dict[str, DoesNotFit] = {}
    constant, following = policy_at(Point(capacity="peak")), policy_at(Point())
    for name in (constant, following):
        try:
            both[name] = plan if plan.policy == name else find_policy(name)(w, plan.machine, plan.settings)
        except CannotPlan as reason:
            return f"not known here: {reason}"
        except DoesNotFit as error:
            short[name] = error
    if following in short:
        return f"{'neither capacity rule fits' if constant in short else 'not known'} here: {short[following]}"
    neither = "" if plan.policy in both else f"; this plan of {plan.policy} is neither"
    if constant in short:
        gained = "a plan" if neither else "the plan itself"
        return (
            f"{gained}: with a constant capacity sized for the tide's peak nothing fits ({short[constant]}), and "
            f"{following} fits{neither}"
        )
    static, tide = both[constant].moved_bytes["h2d"], both[following].moved_bytes["h2d"]
    figures = f"{format_bytes(tide)} to the GPU per iteration, against {format_bytes(static)} with a constant capacity"
    if neither:  # the question is about the tide in this job, and only these two differ in nothing else
        figures += f" ({following} against {constant}{neither})"
    peak = max(range(len(w.moments)), key=lambda m: w.moments[m].peak_bytes)
    gaps = chunk_gaps(both[following])
    over = sum(g.start < peak < g.end for g in gaps)
    pins = (both[constant].modes.count("pin"), both[following].modes.count("pin"))
    if static == 0 and tide == 0:
        return "nothing: no chunk travels to the GPU under either rule, so there is no byte to save"
    if static > tide:
        return (
            f"{figures}: {format_bytes(static - tide)} ({(1 - tide / static) * 100:.1f} %) less. "
            f"{len(gaps) - over} of {len(gaps)} gaps between uses of a chunk lie beside the peak (moment {peak}, "
            f"{w.moments[peak].name}), where the tide leaves more room than a constant rule may use"
        )
    if static < tide:
        before_s, after_s = (period_s(both[name]) for name in (constant, following))
        return (
            f"time, not bytes: {figures}. The room of low tide holds pinned states (pinned chunks: {pins[1]} instead "
            f"of {pins[0]}), which leaves less for parameters; {following} takes {format_s(after_s)} per iteration "
            f"instead of {format_s(before_s)}"
        )
    if gaps and over == len(gaps):
        where = f"moment {peak}, {w.moments[peak].name}, {format_bytes(w.moments[peak].peak_bytes)}"
        return (
            f"no bytes: {figures}. With {_micro_batches(w.micro_batches)} every gap between the forward and the "
            f"backward use of a chunk ({len(gaps)} of {len(gaps)}) contains the peak of the tide ({where}), so a "
            "chunk kept over its gap needs room at the peak, and the room at low tide can keep nothing more. What low "
            "tide does give is room to fetch ahead. Several micro-batches would change this"
        )
    return f"no bytes: {figures}, although {len(gaps) - over} of {len(gaps)} gaps lie beside the peak (moment {peak})"


def order_gain(plan: Plan, timeline: Timeline) -> str | None:
    """The gain of the layer-major order, or why it is not known. None without another order (one micro-batch, several
    GPUs, offloaded activations, layer-major already), and for a policy that tried both."""
    w = plan.workload
    if (
        w.micro_batches == 1
        or not w.order.of_loop
        or w.stashes
        or plan.machine.data_parallel_size > 1
        or "order" in plan.choices
    ):
        return None
    spec = _relayed(plan.policy)
    try:
        other = find_policy(spec)(w, plan.machine, plan.settings)
    except (CannotPlan, DoesNotFit) as reason:
        return f"not known here: {reason}"
    seconds = play(other).iteration_s
    moves = " and ".join(
        f"{format_bytes(other.moved_bytes[way])} to the {place} instead of {format_bytes(plan.moved_bytes[way])}"
        for way, place in (("h2d", "GPU"), ("d2h", "host"))
    )
    return (
        f"layer by layer for all {w.micro_batches} micro-batches ({spec}): {format_s(seconds)} per iteration instead "
        f"of {format_s(timeline.iteration_s)}; {moves}. This is a prediction. A training loop of your own runs "
        "micro-batches one after the other; session.step(micro_batches) runs this order too (--loop step)"
    )


def _relayed(policy: str) -> str:
    name, options = split_spec(policy)
    try:
        able = "order" in options_of(find_policy(name))
    except PstarError:  # a user's policy, under a name that is not registered
        able = False
    if not able:
        name, options = policy_at(Point()), ""
    return f"{name}:" + ",".join((*([options] if options else []), "order=relay"))


def explain(
    plan: Plan,
    timeline: Timeline,
    *,
    bound_by: str | None = None,
    barrier_cost_s: float | None = None,
    first_steps: int = 12,
    width: int | None = None,
) -> str:
    """Returns the plan in words, for people.

    first_steps: how many of the plan's first steps to list.
    bound_by, barrier_cost_s: as in the comparison's row, if known.
    width: columns; None: the terminal's.
    """
    instance("plan", plan, Plan, "a Plan")
    instance("timeline", timeline, Timeline, "a Timeline, such as ps.play(plan)")
    if bound_by is not None:
        choice("bound_by", bound_by, _BINDS)
    if barrier_cost_s is not None:
        number("barrier_cost_s", barrier_cost_s, also=True)
    whole("first_steps", first_steps, least=0)
    if width is not None:
        whole("width", width)
    sections = explanation(plan, timeline, bound_by=bound_by, barrier_cost_s=barrier_cost_s, first_steps=first_steps)
    return in_words(sections, width=width)


def explanation(
    plan: Plan,
    timeline: Timeline,
    *,
    bound_by: str | None = None,
    barrier_cost_s: float | None = None,
    first_steps: int = 12,
) -> dict[str, Sequence[str]]:
    """Returns heading -> lines, the job under "". Arguments are those of `explain`."""
    other, hidden = order_gain(plan, timeline), hiding(plan.workload, plan.machine)
    return {
        "": _job(plan),
        "what lives where": _where(plan, timeline),
        "why": _why(plan),
        "what binds": _binds(plan, timeline, bound_by, barrier_cost_s),
        **({} if hidden is None else {"when copies hide": [f"  {line}" for line in hidden.lines]}),
        "what the tide gains": [f"  {tide_gain(plan)}."],
        **({} if other is None else {"what the order gains": [f"  {other}."]}),
        f"first steps (of {len(plan.steps)})": [f"  {to_text(step)}" for step in plan.steps[:first_steps]],
    }


def in_words(sections: Mapping[str, Sequence[str]], *, width: int | None = None) -> str:
    width = terminal_width() if width is None else width
    texts = [line for heading, lines in sections.items() for line in (*(["", heading] if heading else []), *lines)]
    return "\n".join(line for text in texts for line in wrap(text, width)) + "\n"


def _job(plan: Plan) -> list[str]:
    w, m, s = plan.workload, plan.machine, plan.settings
    barrier = s.barrier(w.compute_dtype)
    when = (
        f"no Adam may run before all gradients are there ({barrier})"
        if barrier
        else "Adam may run as soon as its gradient is final"
    )
    what = f"{w.model} ({format_params(w.params)} parameters, {w.dtype})"
    each = " per GPU" if m.data_parallel_size > 1 else ""
    batch = f"batch {plan.own_batches or f'{w.batch}{each}'} x {_micro_batches(w.micro_batches)}{w.order.words}"
    batch += f", sequence {w.sequence}"
    checkpointing = "with checkpointing" if w.checkpointing else "without checkpointing"
    if w.activations:
        checkpointing = activations_text(w)
    if w.kernels:
        checkpointing += f", {kernels_text(w.kernels)}"
    return [
        f"{plan.policy}: {what}, {batch}, {checkpointing}, on {m.name}",
        *([f"on each of {m.world_size} GPUs, whose steps and figures these are"] if m.world_size > 1 else []),
        f"update {s.update}, {'clipping' if s.clip else 'no clipping'}; {when}"
        + (", run by session.step" if s.loop == "step" else "")
        + (f", gradients added in {w.dtype}" if s.sums == "16-bit" else ""),
        *([w.notes] if w.notes else []),
    ]


def _chunks(count: int) -> str:
    return "1 chunk" if count == 1 else f"{count} chunks"


def _micro_batches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def _where(plan: Plan, timeline: Timeline) -> list[str]:
    lines = _lines_of_modes(plan)
    held = held_between(plan)
    ranks = peaks_of_ranks(plan, timeline)
    for place, budget in plan.budgets.items():
        parts = [f"{name} {format_bytes(size)}" for (p, name), size in sorted(held.items()) if p is place and size]
        lines.append(f"  {place.value} between iterations: {', '.join(parts) or 'nothing'}")
        budgets = plan.gpu_budgets if place is Place.GPU else (budget,) * len(ranks)
        rows = list(zip((peak.get(place.value, 0) for peak in ranks), budgets))
        for peak, of in dict.fromkeys(rows):
            alike = [r for r, row in enumerate(rows) if row == (peak, of)]
            whose = "" if len(alike) == len(rows) else f" of {format_ranks(alike)}"
            lines.append(f"  {place.value}{whose} at most: {format_bytes(peak)} of {format_bytes(of)}")
    lines += _lines_of_sums(plan)
    lines += _lines_of_experts(plan)
    if plan.workload.stashes:
        lines.append(_line_of_stashes(plan.workload))
    top = max(plan.workload.moments, key=lambda moment: moment.peak_bytes)
    low = min(moment.peak_bytes for moment in plan.workload.moments)
    lines.append(f"  the tide: {format_bytes(low)} at low water, {format_bytes(top.peak_bytes)} at {top.name}")
    lines.append(
        f"  chunks of {format_bytes(plan.layout.chunk_bytes)}, {plan.layout.waste * 100:.2f} % of them padding"
    )
    return lines


def _lines_of_experts(plan: Plan) -> list[str]:
    w = plan.workload
    experts = model_entry(w.model).experts if w.source == "preset" and is_model(w.model) else None
    if experts is None:
        return []
    likely = chunk_use(w, plan.layout, experts)
    if not likely:
        return []
    alone = f"{_chunks(len(likely))} of {len(plan.layout.chunks)} hold nothing else"
    least = f"probability {min(likely.values()):.4g} or more"
    return [f"  experts: {alone}; a micro-batch uses each with {least}, and the plan brings them all"]


def _lines_of_modes(plan: Plan) -> list[str]:
    lines = []
    for mode in dict.fromkeys(plan.modes):
        chunks = [c for c in plan.layout.chunks if plan.modes[c.index] == mode]
        size = sum(plan.layout.payload_bytes(c.index, "param") for c in chunks)
        small = sum(c.small for c in chunks)
        note = f", {small} of them small ones that are not worth moving" if small else ""
        lines.append(
            f"  {mode}: {_chunks(len(chunks))}, {format_bytes(size)} of parameters{note}: {_MODES.get(mode, mode)}"
        )
    return lines


def _lines_of_sums(plan: Plan) -> list[str]:
    batches, layout = plan.workload.micro_batches, plan.layout
    if batches == 1:
        return []
    groups: dict[str, list[int]] = {}
    for chunk, where in _places_of_sums(plan).items():
        groups.setdefault(where, []).append(chunk)
    summed = ", each summed over the GPUs first," if layout.ranks > 1 else ""
    lines = [f"  gradients of {_micro_batches(batches)}{summed} add up"]
    for where, chunks in groups.items():
        size = format_bytes(sum(layout.payload_bytes(c, "grad32") for c in chunks))
        lines.append(f"    of {_chunks(len(chunks))} ({size} as a sum) {where}")
    return lines


def _moved_sums(plan: Plan, kind: Kind) -> set[int | None]:
    return {step.chunk for step in plan.steps if step.kind is kind and step.list == "grad32"}


def _places_of_sums(plan: Plan) -> dict[int, str]:
    lists = gradient_list(plan)
    stays = {r.chunk for r in plan.initial if r.list == "grad32" and r.place is Place.GPU}
    sent, back = _moved_sums(plan, Kind.WRITEBACK), _moved_sums(plan, Kind.FETCH)
    on_gpu = {s.chunk for s in plan.steps if s.kind is Kind.ALLOC and s.list == "grad32" and s.place is Place.GPU}
    words = {}
    for chunk in sorted({chunk for chunk, _ in lists}):
        if chunk in stays:
            words[chunk] = "on the GPU, beside their states"
        elif chunk in on_gpu and chunk in back:
            words[chunk] = "on the GPU, and are on the host between micro-batches, where other lists need the room"
        elif chunk in on_gpu and chunk in sent:
            words[chunk] = "on the GPU, and go to the host once, for the update"
        elif chunk in on_gpu:
            words[chunk] = "on the GPU, and wait there for their states"
        else:
            times = plan.workload.micro_batches
            words[chunk] = f"on the host: each goes down {times} times, and the host adds them up"
    return words


def _line_of_stashes(w: Workload) -> str:
    moved = sum(s.bytes for s in w.stashes)
    largest = max(s.bytes for s in w.stashes)
    what = "inputs of {} blocks offloaded" if w.boundaries_on_host else "{} blocks offloaded"
    return (
        f"  activations: {what.format(len(w.stash_room))}, up to {format_bytes(largest)} each; "
        f"{format_bytes(moved)} go to the host and come back per iteration"
    )


def held_between(plan: Plan) -> dict[tuple[Place, str], int]:
    """(place, list or buffer) -> bytes between two iterations."""
    held: dict[tuple[Place, str], int] = {}
    for r in plan.initial:
        held[r.place, r.list] = held.get((r.place, r.list), 0) + plan.layout.payload_bytes(r.chunk, r.list)
    for name, place, size in plan.buffers:
        held[place, name] = held.get((place, name), 0) + size
    return held


def _why(plan: Plan) -> list[str]:
    if not plan.choices:
        return ["  the policy recorded no choices of its own"]
    return [
        f"  {name.removesuffix('_s').replace('_', ' ')}: {_worded(name, value)}"
        for name, value in plan.choices.items()
        if name not in ("certificate", "cost_model", "validation")
    ]


def _certificate(plan: Plan) -> list[str]:
    said = plan.choices.get("certificate")
    if not isinstance(said, Mapping):
        return []
    if said.get("bound") is None:
        return [f"  no lower bound: {said['reason']}"] if "reason" in said else []
    note = f"; {said['note']}" if "note" in said else ""
    binds = BINDS_NAMES.get(str(said["binding"]), said["binding"])
    return [f"  the bound: {said['bound']}, {binds} binds; relative to {said['relative_to']}{note}"]


def _worded(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, float) and name.endswith("_s"):
        return format_s(value)
    if name == "variants_tried":
        tried = tried_of(value)
        if tried is not None:
            return tried_text(tried) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(str(v) for v in value) or "none"
    return str(value)


def _binds(plan: Plan, timeline: Timeline, bound: str | None, barrier_cost_s: float | None) -> list[str]:
    bound = bound or binding(timeline, barrier_cost_s=barrier_cost_s)
    lines = [f"  {_BINDS[bound]}"]
    total = timeline.iteration_s
    busy = ", ".join(f"{q} {format_s(s)}" for q, s in timeline.busy_s.items() if s > 0)
    lines.append(f"  an iteration takes {format_s(total)}; busy in it: {busy}")
    stalls = timeline.stall_s
    parts = [
        f"{format_s(s)} {WAITS.get(q, q)}"
        for q, s in sorted(stalls.items(), key=lambda item: -item[1])
        if s > 1e-4 * total
    ]
    lines.append(
        f"  the accelerator waits {format_s(sum(stalls.values()))}" + (f": {', '.join(parts)}" if parts else "")
    )
    moved = {k: v for k, v in timeline.moved_bytes.items() if v}
    lines.append("  moved: " + (", ".join(f"{format_bytes(v)} {k}" for k, v in moved.items()) or "nothing"))
    if life := disk_life(plan, total):
        lines.append(f"  {life}")
    bound_s = plan.predictions.get("lower_bound_s")
    if bound_s:
        percent = round((total / bound_s - 1) * 100, 2) + 0.0  # never -0.00
        lines.append(f"  {percent:.2f} % above the lower bound of this setting ({format_s(bound_s)})")
    lines += _certificate(plan)
    if barrier_cost_s is not None:
        lines.append(f"  the barrier costs {format_s(barrier_cost_s)} per iteration")
    return lines
