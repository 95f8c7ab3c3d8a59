"""The worth of each constant of the search: plans of a few jobs with the constant as it is, and with another value in
its place (none of it, half, twice).

The figures of a row: how much longer the iterations are than with the constant (the mean over the jobs, and the job
with the largest change), how many jobs no longer fit, how many more bytes the plans move, the effort of planning (rows
scheduled and rows of linear programs, and chunk sizes scored), and CPU seconds of planning. All but the CPU seconds are
the same in every run. Each constant is measured on the jobs of its group (GROUPS). For constants of the bounds the
figure is the rise of the fluid bound.

Prints a row per change and keeps it at once in results/search_constants.json. Earlier rows of the file stay if nothing
that plans depend on has changed since; otherwise the file begins anew. --missing measures only the rows that the file
lacks, so that an interrupted run can be continued. At the end the script names constants without a row, and rows of
constants that no longer exist: exit status 1. `.ci/refresh_readme.py` writes the table of
benchmarks/search_constants.md from the file. About 20 minutes of CPU time.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from _results import PLANNED, RESULTS, ROOT, changes_since, write_result

import pstar_sim as ps
from pstar_sim.bounds import fluid
from pstar_sim.bounds.linear import LinearProgram
from pstar_sim.catalog.machine import Machine, Nvme
from pstar_sim.core import choose, layout
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.planner import variants
from pstar_sim.planner.ways import Way, candidates
from pstar_sim.policy import find_policy
from pstar_sim.policy.family.course import Knobs
from pstar_sim.policy.family.pace import period_s
from pstar_sim.policy.family.searched import own_plans
from pstar_sim.policy.family.tide import tide
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.ties import burden, least_of
from pstar_sim.policy.optimal import POINT
from pstar_sim.policy.systems import karma
from pstar_sim.policy.systems.stronghold import stronghold
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB, format_bytes
from pstar_sim.workload.workload import Workload

EAGER, BARRIER = Settings(update="eager", clip=False), Settings(update="step", clip=True)

Job = tuple[Workload, Machine, Settings]


class Change(NamedTuple):
    """A constant, and the value that replaces it on the jobs of a group.

    words: for a value that is not a number.
    """

    group: str
    module: str
    name: str
    value: Any
    words: str = ""

    @property
    def becomes(self) -> str:
        return self.words or in_words(self.name, self.value)


def in_words(name: str, value: Any) -> str:
    if name.endswith("_BYTES"):
        return format_bytes(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def instead(groups: str, constant: str, *values: Any, **worded: Any) -> Iterator[Change]:
    """Yields changes of one constant, MODULE.NAME without "pstar_sim.", in each of the groups.

    worded: values with words for them, "_" for a blank.
    """
    module, _, name = constant.rpartition(".")
    for group in groups.split(", "):
        for value in values:
            yield Change(group, f"pstar_sim.{module}", name, value)
        for words, value in worded.items():
            yield Change(group, f"pstar_sim.{module}", name, value, words.replace("_", " "))


CHANGES: tuple[Change, ...] = (
    *instead("sums", "policy.family.search.HOPELESS", 1.0, 2.0),
    *instead("sums, net", "policy.family.search.FRONT", 0),
    *instead("search", "policy.family.search.USUAL", a_lead_of_1_chunk=Knobs(lead_chunks=1),
             a_lead_of_3_chunks=Knobs(lead_chunks=3), nothing_stays=Knobs(stay=0.0), short_stays=Knobs(stay=0.25)),
    *instead("search, sums, large chunks", "policy.family.search.FIRST_STRIDE", 32, 10**6),
    *instead("search, sums, large chunks", "policy.family.search.NEXT_STRIDE", 6, 10**6),
    *instead("many chunks", "policy.family.search.MOST_PAIRS", 2_500),
    *instead("sums", "policy.family.search.POINTS", 11),
    *instead("sums", "policy.family.search.SUMS", 5),
    *instead("sums", "policy.family.search.SPILLS", (0.0, 0.5), (0.0, 0.75), nothing_spills=(0.0,)),
    *instead("sums", "policy.family.search.SUMS_TURNS", nothing_spills=((-1, 0), (1, 0))),
    *instead("alike", "policy.family.shorter.FEWEST", none_shorter=10**6),
    *instead("alike behind a barrier", "policy.family.shorter.FEWEST_BEHIND_BARRIER", none_shorter=10**6),
    *instead("alike", "policy.family.shorter.SHOWN", 4, 8),
    *instead("sums, few chunks, small batches", "policy.family.search.AHEAD", (1,), nothing_ahead=()),
    *instead("plenty", "policy.family.search.GOOD_ENOUGH", -1.0, 1e-2),
    *instead("large chunks", "policy.family.search.LARGE", 1e9),
    *instead("large chunks", "policy.family.search.MOST_LARGE", 1, 6),
    *instead("search", "policy.family.searched.FIRST_OPS", 25_000),
    *instead("search", "policy.family.searched.OTHER_OPS", 15_000),
    *instead("search", "policy.family.searched.NEXT_OPS", 20_000, 80_000),
    *instead("search", "policy.family.searched.OPS_OF_FEW", 185_000, 740_000),
    *instead("small batches", "policy.family.searched.MORE", 1.0, 2.0),
    *instead("few chunks", "policy.family.searched.MORE_OF_SEVERAL", 1.0, 2.0),
    *instead("small batches, few chunks", "policy.family.searched.RANDOM", 0.0, 1.0),
    *instead("large chunks, full GPUs", "policy.family.search.FLAT", 1.0, 1.05),
    *instead("small batches", "policy.family.searched.WORTH_MORE", 0.0, 0.06),
    *instead("full GPUs", "policy.family.searched.WORTH_MORE_BEHIND_BARRIER", 0.0, 1.0),
    *instead("small batches", "policy.family.search.WANDER", 0.02, 0.08),
    *instead("small batches", "policy.family.search.WANDER_LIMIT", 1.0, 1.1),
    *instead("many chunks", "policy.family.searched.OPS", 145_000, 580_000),
    *instead("one size", "policy.family.searched.ALONE", 0.33, 1.0),
    *instead("search", "policy.family.searched.FACTORS_OF_FEW", (0.5, 2.0), none=()),
    *instead("many chunks", "policy.family.searched.FACTORS", (0.5,), (2.0,), none=()),
    *instead("search, plenty", "policy.family.searched.WORTH_A_SIZE_OF_FEW", 0.0, 1.0),
    *instead("many chunks, plenty", "policy.family.searched.WORTH_A_SIZE", 0.0, 1.0),
    *instead("search", "policy.family.searched.COARSE", 0, 200),
    *instead("experts", "policy.family.searched.VISITS", 2_250, none_coarse=10**9),
    *instead("search, many chunks", "policy.family.searched.MOST_CHUNKS", 200, 10**6),
    *instead("search, sums", "policy.family.course.LINGER_COPIES", 0, 4),
    *instead("tide, stronghold, plenty", "policy.kit.ties.AS_FAST", 0.0),
    *instead("many chunks, sums", "policy.family.searched.FEWEST_ATTEMPTS", 0, 6),
    *instead("few chunks", "policy.family.searched.LONG_LOOK", 0.0, 0.4),
    *instead("sums", "core.choose.MOST_WINDOWS", 2, 3),
    *instead("tide, net of tide", "policy.family.asynchronous.CLOSE_TO_BOUND", 0.0, 1.0),
    *instead("tide, net of tide", "policy.family.asynchronous.NEIGHBOURS", 0, 4),
    *instead("tide", "core.layout.GRANULE_BYTES", MIB, 4 * MIB),
    *instead("tide", "core.layout.WANTED_CHUNKS", 12, 48),
    *instead("tide", "core.layout.MOST_WASTE", 0.009, 0.036),
    *instead("tide", "core.layout.USUAL_BYTES", 64 * MIB, 256 * MIB),
    *instead("tide", "core.layout.USUAL_PART", 16, 64),
    *instead("tide", "core.layout.OVERSIZE", 0.0, 0.6),
    *instead("tide", "core.layout.OCTAVES", 0.0, 0.24),
    *instead("tide", "core.layout.WASTE", 0.0, 20.0),
    *instead("tide", "core.layout.GOOD", 0.0, 1.0),
    *instead("tide", "core.layout.MOST_SIZES", 24),
    *instead("tide", "core.layout.MOST_STARTS", 1),
    *instead("tide", "core.layout.SMALL_BYTES", 0, 16 * MIB),
    *instead("tide", "core.layout.SMALL_PART", 40, 10**9),
    *instead("tide", "core.layout.MOST_SMALL", 1.0),
    *instead("vocabulary", "policy.passes.parts.LARGE", 1.5, 4.0, none=1e9),
    *instead("disks", "policy.passes.feasibility.IN_FLIGHT", 1, 3),
    *instead("disks", "policy.passes.feasibility.IN_FLIGHT_BESIDE", 2, 4),
    *instead("disks", "policy.family.disks.LARGE", 1.0, none=1e9),
    *instead("small hosts", "policy.kit.schedule.TRIPS", 1, 3),
    *instead("karma", "policy.systems.karma.INTERLEAVES", none_interleaved=((0.0, 0),),
             all_or_none=((0.0, 0), (1.0, 0)), every_other=(*karma.INTERLEAVES[:-1:2], karma.INTERLEAVES[-1]),
             without_the_last=karma.INTERLEAVES[:-1]),
    *instead("variants", "planner.variants.SEARCHED", 3, 10**6),
    *instead("variants", "planner.variants.ALIKE", 1),
    *instead("ranks", "policy.passes.collective_rows.GATHERS_AHEAD", 2, 1000),
    *instead("fluid", "bounds.fluid.MOST_POINTS", 150, 1200),
)  # fmt: skip

# Modules with constants of a search or a heuristic, and their numbers that are no such constants.
SEARCHES = ("policy/family", "policy/kit", "policy/passes", "policy/systems/karma.py", "core/layout.py",
            "core/choose.py", "bounds", "planner/variants.py", "planner/ways.py")  # fmt: skip
OTHER_NUMBERS = {
    "ALIGN": "alignment of tensors",
    "ALIGN_BYTES": "the same of masters",
    "PART_ALIGN": "alignment of parts of a chunk",
    "ROUNDING": "rounding of seconds",
    "TOLERANCE": "agreement of seconds",
    "SHOWN": "the first micro-batch, one for those that are alike, the last three",
    "FAR": "a number that no stall reaches: variables of a linear program need an upper bound",
    "STAND_INS": "a limit of time: the bound of 3 micro-batches takes 0.04 s, of 128 micro-batches 1 s",
    "MOST_STEPS": "patience with the solver",
    "MANY_CHUNKS": "a limit of time: 795 chunks take 6 s of CPU time at 226 points and 18 at 600",
    "MOST_FLUID": "a limit of time: each takes as long as a fluid bound",
    "NEAR": "how much of a bound its search may lose",
    "MOST_MICRO_BATCHES": "a limit of the question",
    "MOST_SPLITS_NAMED": "length of a message",
    "_MOST_RECORDS": "a limit of memory: timelines that are kept",
    "MOST_PARTS": "a limit of the number of steps that no job here reaches",
    "LEAST_BYTES": "a limit that no job here reaches: below it the latency of copies counts",
}


class Planned(NamedTuple):
    """Figures of a planned job.

    seconds: per iteration, or of a bound; inf if the job does not fit.
    moved_bytes: by one rank per iteration.
    rows: rows scheduled, and rows of linear programs.
    sizes: number of chunk sizes that were scored.
    cpu_s: CPU seconds of planning.
    """

    seconds: float
    moved_bytes: int
    rows: int
    sizes: int
    cpu_s: float


def gpt(name: str, batch: int, micro_batches: int = 1) -> Workload:
    return ps.preset(name, batch=batch, seq=1024, dtype="bf16", micro_batches=micro_batches)


def jobs() -> dict[str, Job]:
    """Returns one job of each kind of bottleneck."""
    return {
        "1B, 5 GB, eager": (gpt("1B", 4), ps.machine("rtx4090", gpu_memory="5GB"), EAGER),
        "12B, v100-32": (gpt("12B", 8), ps.machine("v100-32"), BARRIER),
        "llama-3-8b, h100-80, eager": (gpt("llama-3-8b", 1), ps.machine("h100-80"), EAGER),
        "12B, h100-80": (gpt("12B", 1), ps.machine("h100-80"), BARRIER),
    }


def of_one_size() -> dict[str, Job]:
    """Returns the same jobs with their usual chunk size given, so that no other one is tried."""
    return {
        name: (workload, machine, replace(settings, chunk_bytes=build_layout(workload).chunk_bytes))
        for name, (workload, machine, settings) in jobs().items()
    }


def of_many_chunks() -> dict[str, Job]:
    """Returns jobs with more than a hundred chunks, far from the roofline. In the last job half of the chunks are much
    larger than the others."""
    return {
        "llama-7b, rtx4090": (gpt("llama-7b", 4), ps.machine("rtx4090"), BARRIER),
        "8B, v100-32, eager": (gpt("8B", 4), ps.machine("v100-32"), EAGER),
        "llama-30b, h100-80": (gpt("llama-30b", 4), ps.machine("h100-80"), BARRIER),
    }


def of_large_chunks() -> dict[str, Job]:
    """Returns jobs with vocabulary matrices much larger than the usual chunk, above all those of Qwen."""
    return {
        f"qwen2.5-7b, {machine}": (gpt("qwen2.5-7b", 1), ps.machine(machine), BARRIER)
        for machine in ("v100-32", "a100-80", "rtx4090", "h100-80")
    } | {
        "llama-3-8b, h100-80, eager": (gpt("llama-3-8b", 1), ps.machine("h100-80"), EAGER),
        "qwen2.5-7b, h100-80, batch 2": (gpt("qwen2.5-7b", 2), ps.machine("h100-80"), BARRIER),
        "4B, rtx4090": (gpt("4B", 1), ps.machine("rtx4090"), BARRIER),
        "llama-30b, h100-80": (gpt("llama-30b", 4), ps.machine("h100-80"), BARRIER),
    }


def of_small_batches() -> dict[str, Job]:
    """Returns jobs with short iterations, in which all queues are busy, and which a search leaves
    far above the roofline."""
    return {
        f"{model}, {machine}, batch {batch}, eager": (gpt(model, batch), ps.machine(machine), EAGER)
        for model, machine, batch in (
            ("qwen2.5-7b", "a100-80", 1), ("qwen2.5-7b", "h100-80", 2), ("llama-3-8b", "h100-80", 1),
            ("llama-3-8b", "h100-80", 2), ("8B", "h100-80", 1), ("15B", "rtx4090", 1), ("18B", "rtx4090", 1),
            ("4B", "v100-32", 2),
        )
    }  # fmt: skip


def of_full_gpus() -> dict[str, Job]:
    """Returns jobs behind a barrier whose GPUs have room for most of the states."""
    return {
        f"{model}, {machine}, {batch} x {times}, barrier": (gpt(model, batch, times), ps.machine(machine), BARRIER)
        for model, machine, batch, times in (
            ("8B", "a100-80", 8, 1), ("8B", "a100-80", 4, 1), ("12B", "h100-80", 8, 1), ("8B", "h100-80", 4, 4),
        )
    }  # fmt: skip


def of_plenty() -> dict[str, Job]:
    """Returns jobs whose GPUs are busy all the time, or nearly."""
    return {
        f"{model}, {machine}, batch {batch}, {word}": (gpt(model, batch), ps.machine(machine), settings)
        for model, machine, batch in (
            ("1B", "rtx4090", 8), ("1B", "h100-80", 32), ("4B", "h100-80", 8), ("1B", "v100-32x8", 8),
            ("4B", "v100-32x8", 8),
        )
        for word, settings in (("eager", EAGER), ("barrier", BARRIER))
    }  # fmt: skip


def of_net(*policies: str) -> dict[str, Any]:
    """Returns jobs of tests/golden: chunks of one given size, on machines with different bottlenecks."""
    spec = importlib.util.spec_from_file_location("golden_net", ROOT / "tests" / "golden" / "net.py")
    assert spec is not None and spec.loader is not None
    net = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = net  # dataclasses look their module up
    spec.loader.exec_module(net)
    made = {name: make() for name, make in net.jobs().items() if name.startswith(policies)}
    return {name: (find_policy(j.policy), (j.workload, j.machine, j.settings)) for name, j in made.items()}


def of_sums() -> dict[str, Job]:
    """Returns jobs with several micro-batches in which it matters on which side the gradients add up."""
    return {
        "1B, 6 GB, 3 micro-batches": (gpt("1B", 2, 3), ps.machine("rtx4090", gpu_memory="6GB"), BARRIER),
        "llama-3-8b, h100-80, 4 micro-batches, eager": (gpt("llama-3-8b", 1, 4), ps.machine("h100-80"), EAGER),
        "12B, rtx4090, 8 micro-batches, eager": (gpt("12B", 1, 8), ps.machine("rtx4090"), EAGER),
        "8B, rtx4090, 8 micro-batches, eager": (gpt("8B", 1, 8), ps.machine("rtx4090"), EAGER),
    }  # fmt: skip


def of_alike() -> dict[str, Job]:
    """Returns jobs of many micro-batches that are alike."""
    return {
        f"{model}, {machine}, 32 micro-batches, eager": (gpt(model, 1, 32), ps.machine(machine), EAGER)
        for model, machine in (("8B", "v100-32"), ("12B", "a100-80"), ("qwen2.5-7b", "rtx4090"))
    }


def of_alike_behind_a_barrier() -> dict[str, Job]:
    """Returns jobs of as many micro-batches as a shorter job behind a barrier needs."""
    return {
        f"{model}, {machine}, 8 micro-batches, barrier": (gpt(model, 1, 8), ps.machine(machine), BARRIER)
        for model, machine in (("8B", "v100-32"), ("12B", "a100-80"), ("qwen2.5-7b", "rtx4090"))
    }


def of_few_chunks() -> dict[str, Job]:
    """Returns jobs of several micro-batches of few chunks, so that an attempt with smaller chunks takes much effort."""
    return {
        f"{model}, rtx4090, {batch} x {times}, {word}": (gpt(model, batch, times), ps.machine("rtx4090"), settings)
        for model in ("llama-3-8b", "qwen2.5-7b")
        for batch, times, word, settings in ((1, 8, "eager", EAGER), (2, 4, "barrier", BARRIER))
    }


def of_tide() -> dict[str, Job]:
    """Returns jobs for smaller and larger GPUs, one and three micro-batches, and a model of many thin layers: a plan of
    tide takes little time."""
    thin = chain_workload(600, 2**18, tide_bytes=8 * MIB, checkpointing=True, flops=10**11)
    return {
        "600 thin layers, rtx4090, 1.5 GB": (thin, ps.machine("rtx4090", gpu_memory="1.5GB"), EAGER),
    } | {
        f"{model}, {machine}, {memory}, {micro} micro-batches, {word}": (
            gpt(model, 4, micro), ps.machine(machine, gpu_memory=memory), settings,
        )
        for model, machine, memory, micro_batches in (
            ("gpt2", "rtx4090", "2GB", (1, 3)), ("1B", "rtx4090", "5GB", (1, 3)), ("1B", "rtx4090", "10GB", (1, 3)),
            ("4B", "rtx4090", "23GB", (1, 3)), ("llama-3-8b", "rtx4090", "23GB", (1,)),
            ("12B", "v100-32", "31GB", (1, 3)), ("llama-30b", "h100-80", "79GB", (1,)),
        )
        for micro in micro_batches
        for word, settings in (("eager", EAGER), ("barrier", BARRIER))
        if (model, micro, word) != ("12B", 3, "barrier")  # as the eager one, and takes long
    }  # fmt: skip


def of_vocabulary() -> dict[str, Job]:
    """Returns jobs of which a vocabulary matrix, a chunk much larger than the others, is updated on the CPU."""
    return {
        f"{model}, {machine}, {word}": (gpt(model, 1), ps.machine(machine), settings)
        for model in ("llama-3-8b", "qwen2.5-7b")
        for machine in ("a100-80", "h100-80", "rtx4090")
        for word, settings in (("eager", EAGER), ("barrier", BARRIER))
    }


def of_ranks() -> dict[str, Job]:
    """Returns jobs for eight GPUs, with chunks in slices."""
    return {"llama-3-70b, h100-80x8, eager": (gpt("llama-3-70b", 4), ps.machine("h100-80x8"), EAGER)}


def of_experts() -> dict[str, Job]:
    """Returns jobs of many chunks that several micro-batches use."""
    return {
        f"qwen3-30b-a3b, h100-80, {batch} x {times}, eager": (gpt("qwen3-30b-a3b", batch, times), machine, EAGER)
        for machine in (ps.machine("h100-80"),)
        for batch, times in ((4, 2), (2, 4), (1, 8))
    }


def of_fluid() -> dict[str, Job]:
    """Returns jobs for the fluid bound, some with micro-batches: with as many runs of moments as points, with more, and
    with more than are shown one by one."""
    twelve = {"1B, 5 GB, 12 micro-batches": (gpt("1B", 1, 12), ps.machine("rtx4090", gpu_memory="5GB"), EAGER)}
    return jobs() | {name: job for name, job in of_sums().items() if "12B" not in name} | twelve


def of_variants() -> dict[str, tuple[Sequence[Way], Machine]]:
    """Returns candidates of a batch."""

    def among(model: str, batch: int, parts: Sequence[int]) -> Sequence[Way]:
        plain = [
            ps.preset(model, batch=batch // part, seq=1024, dtype="bf16", checkpointing=how)
            for part in parts
            for how in (True, False)
        ]
        return candidates(plain, batch)

    return {
        "1B, batch 32, 5 GB": (among("1B", 32, (32, 16, 8, 4, 2, 1)), ps.machine("rtx4090", gpu_memory="5GB")),
        "1B, batch 32, 12 GB": (among("1B", 32, (32, 16, 8, 4, 2, 1)), ps.machine("rtx4090", gpu_memory="12GB")),
        "4B, batch 16": (among("4B", 16, (4, 2, 1)), ps.machine("rtx4090")),
    }


def of_stronghold() -> dict[str, Job]:
    return {
        f"{model}, {machine}, {word}": (gpt(model, 4), ps.machine(machine), settings)
        for model, machine in (("4B", "rtx3090-64gb"), ("4B", "rtx4090"), ("12B", "v100-32"), ("4B", "v100-32"))
        for word, settings in (("eager", EAGER), ("barrier", BARRIER))
    }


def of_disks(small: bool = False) -> dict[str, Job]:
    """Returns jobs whose states have no room on the host, on disks of two rates, some of which read and write at the
    same time; one with a large vocabulary.

    small: hosts without room for working lists either, or for sums.
    """
    found = {}
    for model, host, rate, share in (
        ("4B", "14GB" if small else "40GB", 5e9, None),
        ("4B", "12GB" if small else "40GB", 20e9, 0.8),
        ("12B", "24GB" if small else "128GB", 5e9, 0.8),
        ("llama-3-8b", "26GB" if small else "72GB", 5e9, None),
    ):
        disks = Nvme(
            name="disks", memory_bytes=10**12, read_bytes_per_s=rate, write_bytes_per_s=rate / 2, latency_s=1e-4,
            read_beside_bytes_per_s=share and share * rate, write_beside_bytes_per_s=share and share * rate / 2,
            measured=False, source="assumed",
        )  # fmt: skip
        machine = replace(ps.machine("rtx4090", host_memory=host), nvme=disks)
        for word, settings in (("eager", EAGER), ("barrier", BARRIER)):
            name = f"{model}, rtx4090, {host}, {format_bytes(int(rate))}/s, {word}"
            found[name] = gpt(model, 4, 2 if small else 1), machine, settings
    return found


def of_karma() -> dict[str, tuple[Workload, Workload, Machine]]:
    """Returns jobs with all activations recomputed, and with all kept, where neither is best."""
    return {
        f"{model}, batch {batch}, {machine}": (
            *(ps.preset(model, batch=batch, seq=1024, dtype="bf16", checkpointing=how) for how in (True, False)),
            ps.machine(machine),
        )
        for model, batch, machine in (("1B", 16, "rtx4090"), ("1B", 32, "v100-32"), ("4B", 8, "a100-40"))
    }  # type: ignore[misc]


def best_plan(found: Iterator[Any]) -> tuple[float, int]:
    best = least_of(found, seconds=lambda f: f.seconds, burden=lambda f: burden(f.plan))
    return best.seconds, sum(best.plan.moved_bytes.values())


def own(job: Job, point: Point) -> tuple[float, int]:
    return best_plan(own_plans(*job, point, "optimal", sizes=True))


def by_policy(policy: Callable[..., Plan], job: Job) -> tuple[float, int]:
    plan = policy(*job)
    seconds = plan.predictions.get("policy_iteration_s")
    return period_s(plan) if seconds is None else float(str(seconds)), sum(plan.moved_bytes.values())


def of_race(job: tuple[Sequence[Way], Machine]) -> tuple[float, int]:
    chosen = variants.choose(*job, EAGER)
    return chosen.iteration_s, sum(chosen.plan.moved_bytes.values())


def of_ways(job: tuple[Workload, Workload, Machine]) -> tuple[float, int]:
    """Returns seconds and bytes of the fastest way of karma."""
    *both, machine = job
    plans = [karma.karma(way, machine, BARRIER) for way in karma.ways(*both, machine, BARRIER)]
    return min((period_s(plan), sum(plan.moved_bytes.values())) for plan in plans)


def bounded(job: Job) -> tuple[float, int]:
    workload, machine, settings = job
    bound = fluid.fluid_bound(workload, machine, settings, build_layout(workload), most_points=fluid.MOST_POINTS)
    return bound.seconds, 0


# group -> its jobs, and the function that plans a job
GROUPS: Mapping[str, tuple[Callable[[], Mapping[str, Any]], Callable[[Any], tuple[float, int]]]] = {
    "search": (jobs, lambda job: own(job, POINT)),
    "sums": (of_sums, lambda job: own(job, POINT)),
    "alike": (of_alike, lambda job: own(job, POINT)),
    "one size": (of_one_size, lambda job: own(job, POINT)),
    "many chunks": (of_many_chunks, lambda job: own(job, POINT)),
    "plenty": (of_plenty, lambda job: own(job, POINT)),
    "full GPUs": (of_full_gpus, lambda job: own(job, POINT)),
    "small batches": (of_small_batches, lambda job: own(job, POINT)),
    "large chunks": (of_large_chunks, lambda job: own(job, POINT)),
    "net": (partial(of_net, "optimal"), lambda job: by_policy(*job)),
    "net of tide": (partial(of_net, "tide", "static_partition"), lambda job: by_policy(*job)),
    "alike behind a barrier": (of_alike_behind_a_barrier, lambda job: own(job, POINT)),
    "few chunks": (of_few_chunks, lambda job: own(job, POINT)),
    "tide": (of_tide, lambda job: by_policy(tide, job)),
    "vocabulary": (of_vocabulary, lambda job: by_policy(tide, job)),
    "stronghold": (of_stronghold, lambda job: by_policy(stronghold, job)),
    "disks": (of_disks, lambda job: by_policy(tide, job)),
    "small hosts": (partial(of_disks, small=True), lambda job: by_policy(tide, job)),
    "karma": (of_karma, of_ways),
    "variants": (of_variants, of_race),
    "ranks": (of_ranks, lambda job: own(job, POINT)),
    "experts": (of_experts, lambda job: own(job, POINT)),
    "fluid": (of_fluid, bounded),
}


@contextmanager
def changed(module: str, name: str, value: Any) -> Iterator[None]:
    """Inside this context, the name has another value, also in modules that import it."""
    usual = getattr(importlib.import_module(module), name)
    rooms = [room for key, room in sys.modules.items() if key.startswith("pstar_sim")]
    rooms = [room for room in rooms if getattr(room, name, None) is usual]
    for room in rooms:
        setattr(room, name, value)
    try:
        yield
    finally:
        for room in rooms:
            setattr(room, name, usual)


class Effort:
    """Effort of planning while it is counted.

    rows: rows scheduled, and rows of the linear programs solved.
    sizes: number of chunk sizes that were scored.
    """

    def __init__(self) -> None:
        self.rows = self.sizes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        choose_usual, score_usual, stacked_usual = choose.choose, layout._score, LinearProgram._stacked

        def choosing(draft: Any, **named: Any) -> Any:
            window = choose_usual(draft, **named)
            self.rows += len(draft.rows) * (len(window.periods_s) + 1)
            return window

        def scoring(*given: Any) -> float:
            self.sizes += 1
            return score_usual(*given)

        def stacking(program: LinearProgram) -> Any:
            rows, equal = stacked_usual(program)
            self.rows += len(rows)
            return rows, equal

        with (
            changed("pstar_sim.core.choose", "choose", choosing),
            changed("pstar_sim.core.layout", "_score", scoring),
            patch.object(LinearProgram, "_stacked", stacking),
        ):
            yield


def planned(group: str) -> list[Planned]:
    """Returns the figures of every job of the group."""
    make, plan = GROUPS[group]
    found = []
    for job in make().values():
        begin_s, effort = time.process_time(), Effort()
        with effort.counted():
            try:
                seconds, moved_bytes = plan(job)
            except (DoesNotFit, CannotPlan):
                seconds, moved_bytes = math.inf, 0
        found.append(Planned(seconds, moved_bytes, effort.rows, effort.sizes, time.process_time() - begin_s))
    return found


def measured(change: Change) -> list[Planned]:
    """Returns the figures of every job of the group, with a constant changed."""
    with changed(change.module, change.name, change.value):
        return planned(change.group)


def figures(now: list[Planned], usual: list[Planned]) -> dict[str, float]:
    both = [(a, b) for a, b in zip(now, usual) if a.seconds < math.inf and b.seconds < math.inf]
    longer = [a.seconds / b.seconds - 1 for a, b in both]
    return {
        "mean_longer": sum(longer) / len(longer),
        "most_longer": max(longer),
        "most_shorter": -min(longer),
        "no_longer_fit": sum(a.seconds == math.inf > b.seconds for a, b in zip(now, usual)),
        "moved": _ratio(sum(a.moved_bytes for a, _ in both), sum(b.moved_bytes for _, b in both)),
        "rows": _ratio(sum(a.rows for a in now), sum(b.rows for b in usual)),
        "sizes": _ratio(sum(a.sizes for a in now), sum(b.sizes for b in usual)),
        "cpu_s": sum(a.cpu_s for a in now),
    }


def _ratio(now: float, usual: float) -> float:
    return now / usual if usual else 1.0


def kept() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns (groups, rows) of the file if nothing that plans depend on has changed since; otherwise nothing."""
    path = RESULTS / "search_constants.json"
    if not path.exists():
        return {}, []
    held = json.loads(path.read_text(encoding="utf-8"))
    stamp = held["taken_at"]
    if stamp is None or stamp["dirty"] or changes_since(ROOT, stamp["commit"], PLANNED):
        print("plans may have changed since the rows in the file were measured: it begins anew", flush=True)
        return {}, []
    return held["groups"], held["rows"]


def row_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["group"], row["module"], row["constant"], row["is"], row["becomes"]


def unmeasured() -> list[str]:
    """Returns MODULE.NAME of each number of SEARCHES that no change names, and of each change whose constant no longer
    exists."""
    package = ROOT / "pstar_sim"
    files = [file for place in SEARCHES for file in (sorted((package / place).glob("**/*.py")) or [package / place])]
    there = {
        f"pstar_sim.{'.'.join(file.relative_to(package).with_suffix('').parts)}.{name}"
        for file in files
        for name in numbers(file.read_text(encoding="utf-8"))
    }
    named = {f"{change.module}.{change.name}" for change in CHANGES}
    without = sorted(path for path in there - named if path.rpartition(".")[2] not in OTHER_NUMBERS)
    gone = sorted({f"{c.module}.{c.name}" for c in CHANGES if not hasattr(importlib.import_module(c.module), c.name)})
    return [*(f"{path} has no row" for path in without), *(f"{path} is gone" for path in gone)]


def numbers(source: str) -> Iterator[str]:
    """Yields the names of the module's constants whose values are numbers, or tuples of numbers."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Tuple):
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
            plain = all(isinstance(n, NUMBERS) for n in ast.walk(node.value))
            plain = plain and any(isinstance(n, ast.Constant) for n in ast.walk(node.value))
            text = any(
                isinstance(n, ast.Constant) and not isinstance(n.value, int | float) for n in ast.walk(node.value)
            )
            yield from (t.id for t in targets if isinstance(t, ast.Name) and t.id.isupper() and plain and not text)


NUMBERS = (ast.Constant, ast.Tuple, ast.BinOp, ast.UnaryOp, ast.Name, ast.operator, ast.unaryop, ast.expr_context)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="constants of these names")
    parser.add_argument("--missing", action="store_true", help="rows that the file lacks")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    groups, rows = kept()
    changes = {
        (c.group, c.module, c.name, in_words(c.name, getattr(importlib.import_module(c.module), c.name)), c.becomes): c
        for c in CHANGES
        if hasattr(importlib.import_module(c.module), c.name)
    }
    known = {row_key(row): row for row in rows if row_key(row) in changes}
    todo = {
        key: change
        for key, change in changes.items()
        if (not args.only or change.name in args.only) and not (args.missing and key in known)
    }
    print(
        "| constant | is | becomes | group | longer | most | shorter | lost | bytes | rows | sizes | CPU s |\n"
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    with ProcessPoolExecutor(args.workers) as pool:
        needed = sorted({change.group for change in todo.values()})
        usual = dict(zip(needed, pool.map(planned, needed)))
        for group, found in usual.items():
            groups[group] = {
                "jobs": list(GROUPS[group][0]()),
                "rows": sum(f.rows for f in found),
                "cpu_s": sum(f.cpu_s for f in found),
            }
            print(f"| as it is | | | {group} | | | | | | | | {groups[group]['cpu_s']:.1f} |", flush=True)
        asked = {pool.submit(measured, change): key for key, change in todo.items()}
        for done in as_completed(asked):
            key, now = asked[done], done.result()
            group, module, name, was, becomes = key
            row = figures(now, usual[group])
            known[key] = {"group": group, "module": module, "constant": name, "is": was, "becomes": becomes, **row}
            write_result("search_constants", {"groups": groups, "rows": [known[k] for k in changes if k in known]})
            print(
                f"| {module.removeprefix('pstar_sim.')}.{name} | {was[:24]} | {becomes[:60]} | {group} | "
                f"{row['mean_longer']:+.3%} | {row['most_longer']:+.3%} | {row['most_shorter']:+.3%} | "
                f"{row['no_longer_fit']} | {row['moved'] - 1:+.2%} | {row['rows']:.0%} | {row['sizes']:.0%} | "
                f"{row['cpu_s']:.1f} |",
                flush=True,
            )
    print(f"{len(known)} of {len(changes)} rows are in the file")
    found = unmeasured()
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
