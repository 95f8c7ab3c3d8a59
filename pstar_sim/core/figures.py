"""The figures that a plan states beside its steps.

[Note: what a check says] A plan carries figures (`predictions`), words (`choices`) and the inputs of both (workload,
machine). A check names what it does not compute again: bytes are computed here, seconds and bounds with the simulator
(planner/stated.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place

BINDS_NAMES = {
    "adam": "CPU Adam",
    "barrier": "CPU Adam",
    "dram": "host DRAM",
    "net": "collectives",
    "nvme": "disks",
    "nvme_write": "writes to disks",
}
"""Resource that binds -> its short name. A resource that is missing here has the name that plans use. Behind a barrier
CPU Adam binds, too: answers that do not know the cost of the barrier cannot tell the two apart."""
BINDS_WORDS = BINDS_NAMES | {"h2d": "copies to the GPU", "d2h": "copies to the host"}
"""Resource that binds -> its name on a page."""
_MOVED = {"h2d_bytes": "h2d", "d2h_bytes": "d2h"}
_EVERY = (
    "iteration_s", "tokens_per_s", "peak_gpu_bytes", "peak_host_bytes", "h2d_bytes", "d2h_bytes", "expected_error",
    "cost_model", "validation", "confidence", "certificate",
)  # fmt: skip
"""Figures and words that every plan states that a comparison has saved."""
_PEAKS = {"peak_gpu_bytes": Place.GPU, "peak_host_bytes": Place.HOST}


@dataclass(frozen=True, kw_only=True)
class Stated:
    """false: a sentence for each figure that differs.
    checked: those that are right.
    """

    false: tuple[str, ...]
    checked: tuple[str, ...]


def byte_figures(plan: Plan, peak_bytes: Mapping[str, int]) -> Stated:
    """peak_bytes: of each place, as proved.

    A run's peak depends on its timing, so a stated one has to lie between what every run holds and the proved peak; on
    several ranks, of the rank with the largest.
    """
    false: list[str] = []
    checked: list[str] = []
    for name, lane in _MOVED.items():
        stated, moved = plan.predictions.get(name), plan.moved_bytes[lane]
        if stated is None:
            continue
        checked.append(name)
        if stated != moved:
            false.append(f"{name} is {stated:.15g} in the plan, but its steps move {moved}")
    for name, place in _PEAKS.items():
        stated = plan.predictions.get(name)
        if stated is None:
            continue
        checked.append(name)
        least, most = _least_bytes(plan, place), peak_bytes[place.value]
        if not least <= stated <= most:
            false.append(f"{name} is {stated:.15g} in the plan, but its steps hold {least} to {most} at their peak")
    return Stated(false=tuple(false), checked=tuple(checked))


def _least_bytes(plan: Plan, place: Place) -> int:
    """At the place's peak on some rank, whatever the timing: those at the cut or, on the gpu, of the moment with the
    largest need."""
    cut = sum(size for _, where, size in plan.buffers if where is place)
    cut += sum(plan.layout.payload_bytes(r.chunk, r.list) for r in plan.initial if r.chunk >= 0 and r.place is place)
    if place is not Place.GPU:
        return cut
    chunk_of, read = plan.layout.chunk_of, plan.workload.reads
    return max(
        cut,
        *(
            m.peak_bytes + sum(plan.layout.payload_bytes(c, "param") for c in {chunk_of[t] for t in tensors})
            for job in {id(job): job for job in plan.jobs}.values()
            for m, tensors in zip(job.moments, read)
        ),
    )


def not_checked(
    plan: Plan, checked: Collection[str], why: Mapping[str, str], *, workload: bool, machine: bool
) -> tuple[str, ...]:
    """Returns a line per kind of statement that was not computed again, or is missing.

    checked: figures and words.
    why: name -> reason why not.
    """
    lines: list[str] = []
    rest: dict[str, list[str]] = {}
    for name in plan.predictions:
        if name not in checked:
            rest.setdefault(why.get(name, "no rule computes it"), []).append(name)
    lines += [f"{', '.join(names)}: {reason}" for reason, names in rest.items()]
    for name in plan.choices:
        if name not in checked and name in why:
            lines.append(f"{name}: {why[name]}")
    words = [name for name in plan.choices if name not in checked and name not in why]
    if words:
        lines.append(f"{', '.join(words)}: words of the policy ({plan.policy}) about its choices")
    missing = [name for name in _EVERY if name not in plan.predictions and name not in plan.choices]
    if missing:
        lines.append(f"{', '.join(missing)}: missing in the plan")
    if not workload:
        lines.append("the workload (moments, uses, tide, flops, batch): taken as stated; check(workload=) compares it")
    if not machine:
        lines.append("the machine (memory, rates, prices): taken as stated; check(machine=) compares its memory")
    lines.append("names of the policy and of buffers, sizes aimed at (chunk_bytes), the moment that a copy serves")
    return tuple(lines)
