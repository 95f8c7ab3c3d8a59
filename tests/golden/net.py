"""About 300 jobs, and what is kept of the plan and the timeline of each: a net under every change of structure.

Machines and workloads are written here or drawn from a seed, so that a new figure in the catalog changes nothing.

[Note: what is kept of a plan] A hash of its steps, modes, initial residents, buffers, budgets and layout. A step is
named by its queue and its place on that queue: another numbering, or another order in which the queues are written
down, is no difference; every byte, wait, moment and place on a queue is.

[Note: what is kept of a timeline] Period, peaks, moved bytes, stalls by cause, seconds by queue, number of iterations;
and per queue two sums over all spans, of `start * n` and of `end * n` with n the number of the span, so that no two
spans can trade places. Seconds are compared to 1e-9 of the period (the same seconds added in another order differ in
their last bits), everything else has to be equal.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import to_text
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy import find_policy
from pstar_sim.sim.play import play
from pstar_sim.testing import (
    chain_workload,
    random_machine,
    random_ranks,
    random_settings,
    random_workload,
    round_machine,
)
from pstar_sim.units import MIB
from pstar_sim.workload.mixing import block_names, mix_blocks, offload_blocks
from pstar_sim.workload.workload import Workload, repeat_micro_batch

FILE = Path(__file__).with_name("net.json")
SAME = 1e-9

POLICIES = (
    "all_on_gpu",
    "zero_offload",
    "static_partition",
    "patrickstar",
    "tide",
    "optimal",
    "zero3_resident",
    "zero3_offload",
    "deep_optimizer_states",
    "zero_infinity",
)
OPTIONS = (
    "patrickstar:msc=on",
    "tide:capacity=peak",
    "tide:streams=on",
    "tide:eviction=lru,prefetch=1,adam=fifo",
    "optimal:streams=off",
    "optimal:pins=0,capacity=peak",
    "zero_infinity:params=nvme,states=nvme",
    "zero_infinity:states=nvme",
)
DRAWN = ("tide", "optimal", "static_partition", "patrickstar", "zero3_offload")
STEP = Settings(update="step", clip=True, chunk_bytes=2 * MIB)
EAGER = Settings(update="eager", clip=False, chunk_bytes=2 * MIB)
ROOM_MIB = {
    "all_on_gpu": 300,
    "zero3_resident": 300,
    "zero_offload": 40,
    "patrickstar": 44,
    "static_partition": 14,
    "tide": 14,
    "optimal": 14,
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One policy asked for one plan."""

    policy: str
    workload: Workload
    machine: Machine
    settings: Settings


# -- machines and workloads ------------------------------------------------------------------------------------------


def machine(
    gpu_mib: int,
    *,
    ranks: int = 1,
    duplex: bool = True,
    dram_gb_per_s: float = 40.0,
    disk: bool = False,
    slowdowns: Mapping[str, float] | None = None,
) -> Machine:
    """A GPU of gpu_mib, 0.1 ms for a list of 2 MiB over the link; two ranks a switch, a peer link where there are
    several."""
    made = round_machine(
        name="net",
        gpu_memory_bytes=gpu_mib * MIB,
        host_memory_bytes=2 * 2**30 * ranks,
        h2d_bytes_per_s=2e10,
        d2h_bytes_per_s=1.8e10,
        latency_s=1e-5,
        duplex=duplex,
        hbm_bytes_per_s=8e11,
        flops_per_s={"bf16": 4e13, "fp16": 4e13, "fp32": 1e13},
        dram_bytes_per_s=dram_gb_per_s * 1e9 * ranks,
        cores=8,
        adam_params_per_s=1.5e9 * ranks,
        ranks=ranks,
        peer_bytes_per_s=5e10 if ranks > 1 else None,
        peer_latency_s=1e-5,
        nvme_memory_bytes=2**33 if disk else None,
        nvme_read_bytes_per_s=6e9,
        nvme_write_bytes_per_s=3e9,
        nvme_latency_s=1e-4,
    )
    if ranks > 1:
        on_switches = tuple(replace(rank, root=i // 2) for i, rank in enumerate(made.ranks))
        made = replace(made, ranks=on_switches, root_bytes_per_s=2.2e10)
    return replace(made, slowdowns=slowdowns or {})


MEASURED = {
    "compute_while_adam": 1.2,
    "adam_while_compute": 1.1,
    "adam_while_h2d": 1.3,
    "adam_while_d2h": 1.25,
    "h2d_while_d2h": 1.4,
    "d2h_while_h2d": 1.3,
    "h2d_while_adam": 1.1,
}


def chain(micro_batches: int, layers: int = 8) -> Workload:
    """Layers of 2 MiB, recomputed, under a tide of up to half a MiB a layer."""
    up = [n * MIB // 2 for n in range(layers)]
    down = [size for n in reversed(range(layers)) for size in (n * MIB // 2 + MIB // 2, n * MIB // 2)]
    return chain_workload(
        layers,
        MIB,
        tensors_per_layer=2,
        tide_bytes=[*up, *down, 0],
        checkpointing=True,
        micro_batches=micro_batches,
        flops=8_000_000_000,
    )


def offloaded(micro_batches: int, layers: int = 6) -> Workload:
    """The same layers, the first half kept, of which every second one is offloaded, the rest recomputed."""
    left = [(n + 1) * MIB for n in range(layers)]
    kept = chain_workload(layers, MIB, tide_bytes=[*left, *left[::-1], 0], flops=8_000_000_000)
    recomputed = chain_workload(layers, MIB, tide_bytes=MIB, checkpointing=True, flops=8_000_000_000)
    blocks = block_names(kept)
    keep = blocks[: layers // 2]
    return repeat_micro_batch(offload_blocks(mix_blocks(recomputed, kept, keep), keep[::2]), micro_batches)


# -- jobs ------------------------------------------------------------------------------------------------------------


def jobs() -> dict[str, Callable[[], Job]]:
    """Name of each job, and what builds it."""
    return dict(itertools.chain(_grid(), _options(), _stashes(), _shared_rates(), _larger(), _drawn()))


def _room(policy: str) -> int:
    """MiB of GPU memory in which the policy has to move something and can."""
    return ROOM_MIB.get(policy.partition(":")[0], 32)


def _grid() -> Iterator[tuple[str, Callable[[], Job]]]:
    """Every policy on 1, 2 and 8 ranks, with 1 and 3 micro-batches, behind a barrier and eager."""
    for policy, ranks, micro, (word, settings) in itertools.product(
        POLICIES, (1, 2, 8), (1, 3), (("clip", STEP), ("eager", EAGER))
    ):
        yield (
            f"{policy}, {ranks} ranks, {micro} micro-batches, {word}",
            functools.partial(_job, policy, (chain, micro), {"gpu_mib": _room(policy), "ranks": ranks}, settings),
        )


def _options() -> Iterator[tuple[str, Callable[[], Job]]]:
    for policy, micro, (word, settings) in itertools.product(OPTIONS, (1, 2), (("clip", STEP), ("eager", EAGER))):
        disk = "nvme" in policy
        yield (
            f"{policy}, {micro} micro-batches, {word}",
            functools.partial(_job, policy, (chain, micro), {"gpu_mib": _room(policy) + 2, "disk": disk}, settings),
        )


def _stashes() -> Iterator[tuple[str, Callable[[], Job]]]:
    for policy, micro in itertools.product(POLICIES, (1, 2)):
        yield (
            f"{policy}, stashes, {micro} micro-batches",
            functools.partial(_job, policy, (offloaded, micro), {"gpu_mib": _room(policy) + 6}, STEP),
        )


def _shared_rates() -> Iterator[tuple[str, Callable[[], Job]]]:
    """Machines whose queues slow each other down: measured factors, one link for both ways, short DRAM."""
    slow: dict[str, dict[str, Any]] = {
        "measured slow-downs": {"slowdowns": MEASURED},
        "half duplex": {"duplex": False},
        "short DRAM": {"dram_gb_per_s": 18.0},
        "all three": {"slowdowns": MEASURED, "duplex": False, "dram_gb_per_s": 18.0},
    }
    for (word, changed), policy, (how, settings) in itertools.product(
        slow.items(), POLICIES, (("clip", STEP), ("eager", EAGER))
    ):
        yield (
            f"{policy}, {word}, {how}",
            functools.partial(_job, policy, (chain, 2), {"gpu_mib": _room(policy), **changed}, settings),
        )


def _larger() -> Iterator[tuple[str, Callable[[], Job]]]:
    """Twenty-four layers, so that searches have something to search."""
    for policy, (word, settings) in itertools.product(
        ("static_partition", "patrickstar", "tide", "optimal"), (("clip", STEP), ("eager", EAGER))
    ):
        yield (
            f"{policy}, 24 layers, {word}",
            functools.partial(_job, policy, (functools.partial(chain, layers=24), 1), {"gpu_mib": 60}, settings),
        )


def _drawn() -> Iterator[tuple[str, Callable[[], Job]]]:
    """Random jobs, for the policies whose schedule depends most on the job."""
    for number in range(100):
        yield f"drawn {number}", functools.partial(_drawn_job, number)


def _drawn_job(number: int) -> Job:
    rng = random.Random(f"net {number}")
    workload = random_workload(rng)
    drawn = random_ranks(rng, random_machine(rng, workload), rng.choice((1, 1, 2, 4)))
    return Job(policy=DRAWN[number % len(DRAWN)], workload=workload, machine=drawn, settings=random_settings(rng))


def _job(policy: str, workload: tuple[Callable[[int], Workload], int], host: dict[str, Any], settings: Settings) -> Job:
    make, micro_batches = workload
    return Job(policy=policy, workload=make(micro_batches), machine=machine(**host), settings=settings)


# -- what is kept ----------------------------------------------------------------------------------------------------


def record(job: Job) -> dict[str, Any]:
    """What is kept of the job: of its plan and timeline, or the words of the refusal."""
    try:
        plan = find_policy(job.policy)(job.workload, job.machine, job.settings)
    except (DoesNotFit, CannotPlan) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"plan": plan_hash(plan), "steps": len(plan.steps), "timeline": of_timeline(play(plan))}


def plan_hash(plan: Plan) -> str:
    """[Note: what is kept of a plan]"""
    place: dict[int, tuple[str, int]] = {}
    length: dict[str, int] = {}
    for step in plan.steps:
        n = length.get(step.queue.value, 0)
        length[step.queue.value] = n + 1
        place[step.id] = (step.queue.value, n)
    lines = []
    for step in plan.steps:
        queue, n = place[step.id]
        waits = sorted((*place[ref.id], ref.back) for ref in step.after)
        lines.append((queue, n, to_text(structs.replace(step, id=0, after=())), waits))
    kept = {
        "steps": sorted(lines),
        "modes": plan.modes,
        "initial": sorted((r.chunk, r.list, r.place.value) for r in plan.initial),
        "buffers": sorted((name, at.value, size) for name, at, size in plan.buffers),
        "budgets": sorted((at.value, size) for at, size in plan.budgets.items()),
        "chunks": [[slot.tensor for slot in chunk.slots] for chunk in plan.layout.chunks],
    }
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


def of_timeline(timeline: Timeline) -> dict[str, Any]:
    """[Note: what is kept of a timeline]"""
    sums: dict[str, list[float]] = {}
    number: dict[str, int] = {}
    for span in sorted(timeline.spans, key=lambda s: (s.iteration, s.queue.value)):  # stable: the order on each queue
        queue = span.queue.value
        n = number[queue] = number.get(queue, 0) + 1
        both = sums.setdefault(queue, [0.0, 0.0])
        both[0] += span.start_s * n
        both[1] += span.end_s * n
    return {
        "iteration_s": timeline.iteration_s,
        "iterations": timeline.iterations,
        "peak_bytes": dict(sorted(timeline.peak_bytes.items())),
        "moved_bytes": dict(sorted(timeline.moved_bytes.items())),
        "stall_s": dict(sorted(timeline.stall_s.items())),
        "busy_s": dict(sorted(timeline.busy_s.items())),
        "spans": number,
        "weighted_s": dict(sorted(sums.items())),
    }


def load() -> dict[str, Any]:
    """What was kept, by name of the job."""
    kept: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return kept


def save(records: Mapping[str, Any]) -> None:
    """A line per job, so that a difference names the jobs."""
    lines = [f"{json.dumps(name)}: {json.dumps(kept)}" for name, kept in records.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def differences(kept: Any, now: Any) -> list[str]:
    """Where the record `now` differs from `kept`, in words; [Note: what is kept of a timeline] says what may differ."""
    timeline = kept.get("timeline") or {}
    return _differences(kept, now, timeline.get("iteration_s", 0.0), "")


def _differences(kept: Any, now: Any, scale_s: float, where: str) -> list[str]:
    if isinstance(kept, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted(kept.keys() | now.keys())
            for line in _differences(kept.get(key), now.get(key), scale_s, f"{where}.{key}" if where else key)
        ]
    if isinstance(kept, list) and isinstance(now, list) and len(kept) == len(now):
        return [d for i, (a, b) in enumerate(zip(kept, now)) for d in _differences(a, b, scale_s, f"{where}[{i}]")]
    if isinstance(kept, float) and isinstance(now, float):
        return [] if abs(kept - now) <= SAME * max(scale_s, abs(kept)) else [f"{where}: {kept!r} is now {now!r}"]
    return [] if kept == now else [f"{where}: {kept!r} is now {now!r}"]
