"""Random jobs and policies whose plans are compared with all lower bounds. On each job one resource is scarce, so that
every row of the bounds binds somewhere."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.bounds.fluid import fluid_bound
from pstar_sim.catalog.machine import BY_COLLECTIVES, Machine, Rank
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import LOOPS, SUMS, Plan, Settings
from pstar_sim.errors import CannotPlan, DoesNotFit, TraceError
from pstar_sim.policy.kit.options import options_of
from pstar_sim.policy.registry import find_policy, named
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, random_ranks, random_workload, round_machine
from pstar_sim.units import KIB, MIB
from pstar_sim.workload.mixing import block_names, mix_blocks, offload_blocks
from pstar_sim.workload.workload import Workload, repeat_micro_batch

__all__ = [
    "SPECS",
    "Held",
    "bounds_of",
    "held_plans",
    "hold",
    "offloaded_chain",
    "random_job",
    "random_spec",
    "several",
]  # fmt: skip

_POINT = {
    "capacity": ("tide", "peak"),
    "eviction": ("belady", "lru", "fifo"),
    "prefetch": ("none", "edf", "1", "2"),
    "adam": ("after-backward", "fifo", "edf"),
    "pins": ("optimal", "0", "1", "3"),
    "streams": ("on", "off"),
    "sums": ("on", "off"),
    "barrier": ("on", "off"),
    "order": ("depth-first", "depth-first", "relay", "relay-host"),
}
_ZERO = {"bucket": ("0", "1e6", "5e8"), "reuse": ("0", "1e9"), "prefetch": ("0", "5e7")}
VALUES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "static_partition": _POINT,
    "tide": _POINT,
    "optimal": _POINT,
    "patrickstar": {"msc": ("on", "off")},
    "l2l": {"stash": ("gpu", "host"), "adam": ("fifo", "edf")},
    "zero3_resident": {"reshard": ("on", "off")},
    "zero3_offload": {
        **_ZERO, "subgroup": ("1e6", "1e9"), "ratio": ("0", "0.5", "1"), "flush": ("blocking", "async"),
        "params": ("gpu", "cpu"),
    },
    "deep_optimizer_states": {**_ZERO, "every": ("1", "2", "3"), "subgroup": ("1e6", "1e8"), "ratio": ("0.5", "1")},
    "zero_infinity": {"overlap": ("on", "off"), "subgroup": ("1e6", "1e9"), "bucket": ("0", "5e8")},
    "stronghold": {"window": ("auto", "1", "3")},
}  # fmt: skip
"""Policy -> option -> values to choose from. Options that need disks, memory that is not pinned or several GPUs are
left out."""

SPECS = named(lambda able: able.balance is None)
"""The shipped policies for one GPU."""


def random_spec(rng: random.Random) -> str:
    """Returns a policy with random options. Policies that search or choose freely come more often than the others."""
    name = rng.choice((*SPECS, "tide", "tide", "tide", "optimal", "optimal"))
    values = VALUES.get(name, {})
    assert set(values) <= set(options_of(find_policy(name)))
    chosen = {key: rng.choice(words) for key, words in values.items() if rng.random() < 0.3}
    if chosen.get("order") == "relay-host" and "sums" in chosen:
        del chosen["sums"]
    return name + "".join(f"{',' if n else ':'}{key}={word}" for n, (key, word) in enumerate(chosen.items()))


def offloaded_chain(rng: random.Random) -> Workload:
    """Returns a chain whose layers keep random bytes of activations, some recomputed, some offloaded, in one to three
    micro-batches."""
    layers = rng.randint(4, 9)
    left = [rng.randrange(1, 64) * KIB for _ in range(layers)]
    up = [sum(left[: n + 1]) for n in range(layers)]
    kept = chain_workload(layers, 4096, tide_bytes=[*up, *up[::-1], 0])
    recomputed = chain_workload(layers, 4096, tide_bytes=64 * KIB, checkpointing=True)
    blocks = block_names(kept)
    keep = [block for block in blocks if rng.random() < 0.7]
    mixed = mix_blocks(recomputed, kept, keep)
    offload = [block for block in keep if rng.random() < 0.6]
    while True:
        try:
            return repeat_micro_batch(offload_blocks(mixed, offload), rng.randint(1, 3))
        except TraceError:  # the last layer's activations are needed again at once
            offload = offload[:-1]


def random_job(rng: random.Random) -> tuple[Workload, Machine, Settings]:
    """Returns a workload of one to four micro-batches (sometimes with offloaded activations), a machine on which one
    resource is scarce and the others are nearly so, and settings."""
    if rng.random() < 0.1:
        w = offloaded_chain(rng)
    else:
        checkpointing = rng.random() < 0.6
        w = random_workload(rng, micro_batches=rng.choice((1, 2, 2, 3, 4)), checkpointing=checkpointing)
    compute_s = 1.0
    scarce = rng.choice(("compute", "h2d", "d2h", "adam", "dram", "room", "link"))

    def rate(name: str, work: float) -> float:
        """Returns a rate at which the work takes a random multiple of the compute seconds: above 1 for the scarce
        resource."""
        part = 10 ** rng.uniform(0.2, 1.1) if name == scarce else 10 ** rng.uniform(-1.2, 0.0)
        return work / (compute_s * part)

    params = max(1, w.trainable_params)
    model = sum(t.bytes for t in w.tensors)
    copies = model * rng.choice((1, w.micro_batches))
    all_states = params * (w.states_bytes_per_param + 4 * (w.micro_batches > 1))
    beside = rng.uniform(0.2, 1.0) if scarce == "room" else rng.choice((0.5, 1.0, 1.5, 2.0, 4.0))
    machine = round_machine(
        name="random",
        gpu_memory_bytes=int(w.peak_non_model_bytes + beside * model + rng.choice((0.0, 0.2, 0.6, 1.0)) * all_states),
        host_memory_bytes=int(params * 24 * (rng.uniform(0.4, 1.0) if rng.random() < 0.1 else 2.0)) + 8 * MIB,
        h2d_bytes_per_s=rate("link" if scarce == "link" else "h2d", copies),
        d2h_bytes_per_s=rate("link" if scarce == "link" else "d2h", copies),
        adam_params_per_s=rate("adam", params),
        dram_bytes_per_s=rate("dram", 28 * params) if rng.random() < 0.5 or scarce == "dram" else 1e15,
        hbm_bytes_per_s=28 * params / (compute_s * 10 ** rng.uniform(-2.5, -0.2)),
        flops_per_s=max(1.0, float(sum(m.flops for m in w.moments))) / compute_s,
        duplex=scarce != "link",
        latency_s=rng.choice((0.0, 0.0, 1e-3, 1e-2)),
    )
    if rng.random() < 0.3:
        gpu = replace(machine.gpu, operator_bytes_per_s=machine.gpu.hbm_bytes_per_s * rng.uniform(0.2, 1.0))
        machine = replace(machine, ranks=(replace(machine.ranks[0], gpu=gpu),))
    asked = Settings(
        update=rng.choice(("step", "eager", "eager")),
        clip=rng.random() < 0.35,
        chunk_bytes=rng.choice((None, rng.randint(MIB // 2, 8 * MIB))),
        loop=rng.choice(LOOPS),
    )
    return w, machine, asked


def several(rng: random.Random, machine: Machine, count: int) -> Machine:
    """Returns a machine with `count` of the machine's GPU, each with as much of the host as it has alone. Sometimes
    some of the GPUs are slower, or have a slower link, or compute is slower beside collectives."""
    ranks = random_ranks(rng, machine, count)
    host, local = ranks.host, ranks.local_ranks
    host = replace(
        host, adam_params_per_s=host.adam_params_per_s * local, dram_bytes_per_s=host.dram_bytes_per_s * local
    )
    slower = rng.choice((1.0, 1.0, 2.0))
    mixed = [_slowed(r, slower if rng.random() < 0.5 else 1.0) for r in ranks.ranks]
    slowdowns = {BY_COLLECTIVES: rng.choice((1.0, 2.0, 5.0))}
    return replace(ranks, host=host, ranks=tuple(mixed), slowdowns=slowdowns)


def _slowed(rank: Rank, by: float) -> Rank:
    gpu, link = rank.gpu, rank.link
    return replace(
        rank,
        gpu=replace(gpu, flops_per_s={dtype: rate / by for dtype, rate in gpu.flops_per_s.items()}),
        link=replace(link, h2d_bytes_per_s=link.h2d_bytes_per_s / by),
    )


def bounds_of(number: int) -> tuple[float, float, float]:
    """Returns closed form, joint and fluid program of the random job of that number, in the chunks that policies start
    from."""
    w, machine, settings = random_job(random.Random(f"job {number}"))
    job = (w, machine, settings, build_layout(w, chunk_bytes=settings.chunk_bytes))
    return lower_bound(*job, stream=False).seconds, lower_bound(*job).seconds, fluid_bound(*job).seconds


@dataclass(frozen=True, kw_only=True)
class Held:
    """Seconds of a plan beside its bounds: name of a bound -> seconds.

    binding: of the fluid bound.
    """

    seconds: float
    bounds: Mapping[str, float]
    binding: str

    @property
    def wrong(self) -> tuple[str, ...]:
        """Bounds that exceed the plan's seconds, in words."""
        return tuple(f"{n} bound {s} > {self.seconds}" for n, s in self.bounds.items() if s > self.seconds * (1 + 1e-9))


def hold(plan: Plan) -> Held:
    """Returns the plan's simulated seconds beside every bound that holds for it."""
    job = (plan.workload, plan.machine, plan.settings, plan.layout)
    fluid = fluid_bound(*job)
    bounds = {"joint": lower_bound(*job).seconds, "fluid": fluid.seconds}
    if "stream" not in plan.modes:
        bounds["closed"] = lower_bound(*job, stream=False).seconds
    return Held(seconds=play(plan).iteration_s, bounds=bounds, binding=fluid.binding)


def held_plans(
    drawn: str, wanted: int, counts: Counter[str], *, gpus: Sequence[int] = ()
) -> Iterator[tuple[Plan, Held, list[str]]]:
    """Yields `wanted` random plans, each with its bounds and, in words, the bounds that exceed its seconds.

    drawn: the same text draws the same plans.
    counts: gets "plans", "no plan", plans of each policy and plans of each number of micro-batches.
    gpus: numbers of GPUs to choose from; none: one GPU.
    """
    for number in count():
        if counts["plans"] >= wanted:
            return
        rng = random.Random(f"{drawn} {number}")
        w, machine, settings = random_job(rng)
        if w.dtype == "bf16":
            settings = replace(settings, sums=rng.choice(SUMS))
        if gpus:
            machine = several(rng, machine, rng.choice(gpus))
        spec = random_spec(rng)
        try:
            plan = find_policy(spec)(w, machine, settings)
        except (DoesNotFit, CannotPlan):
            counts["no plan"] += 1
            continue
        held = hold(plan)
        counts["plans"] += 1
        counts[f"of {spec.partition(':')[0]}"] += 1
        counts[f"{w.micro_batches} micro-batches"] += 1
        yield plan, held, [f"{line}: plan {number}, {spec}, {settings}" for line in held.wrong]
