"""Tiny instances as jobs: the same chain of layers for exact_optimum.py and for the product, one unit per second."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction

from exact_optimum import Tiny, exact_optimum

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.bounds.fluid import fluid_bound
from pstar_sim.catalog.machine import Machine, Nvme
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.policy.passes.feasibility import needed_on_host
from pstar_sim.policy.registry import find_policy
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.workload.optimizers import MASTER_LIST, OptimizerSpec
from pstar_sim.workload.relay import relay
from pstar_sim.workload.workload import Moment, Phase, Workload

__all__ = [
    "LAYER",
    "Compared",
    "as_job",
    "asked",
    "compare_tiny",
    "from_text",
    "layer_major",
    "optima_of",
    "random_tiny",
    "sums_in_16_bits",
    "to_text",
    "with_experts",
]

LAYER = 2**21
"""Parameters of a layer."""
BY_ROUNDING = 1e-7
"""Relative difference of two figures that are the same."""
Optima = tuple[Fraction | None, Fraction | None]
_FLOPS_PER_S = 1e12


def as_job(t: Tiny, sums: str = "32-bit") -> tuple[Workload, Machine, Settings]:
    """Returns the instance as a job: a unit is a second, a slot the working list of a layer.

    sums: as `Settings.sums`. In 16 bits, a sum and the states take a slot each (`Tiny.wide` is 1).
    """
    wide = 4 if sums == "32-bit" else 2
    width = wide // t.wide
    slot = width * LAYER
    # moments of a micro-batch; `Tiny.order` gives the order of all moments, and the tide in that order
    tide = [level * slot for level in t.tide] if t.order is None else [0] * (2 * t.layers)
    w = chain_workload(
        t.layers,
        LAYER,
        dtype="fp32" if width == 4 else "bf16",
        flops=int(t.forward * _FLOPS_PER_S),
        tide_bytes=[*tide, 0],
        micro_batches=t.micro_batches,
    )
    if t.times is not None:
        w = replace(
            w, moments=tuple(replace(m, flops=m.flops * t.times[_layer(m)]) if m.flops else m for m in w.moments)
        )
    if t.order is not None:
        w = relay(w)
        assert _order(w) == t.order
        levels = [*t.levels, 0]
        moments = tuple(
            replace(
                m,
                start_bytes=min(levels[n - 1], levels[n]) * slot,
                peak_bytes=levels[n] * slot,
                end_bytes=min(levels[n], levels[(n + 1) % len(levels)]) * slot,
            )
            for n, m in enumerate(w.moments)
        )
        w = replace(w, moments=moments)
    # an add on the host reads and writes the sum, and reads the gradient
    traffic, rest = divmod((2 * wide + width) * t.cpu_adam, t.cpu_add)
    assert not rest, t
    names = {1: ("momentum",), 2: (MASTER_LIST, "momentum")}[t.lists]
    states = tuple((name, wide // t.lists) for name in names)
    optimizer = OptimizerSpec(name="momentum", state_bytes=states, dram_bytes_per_param=traffic)
    m = round_machine(
        gpu_memory_bytes=t.slots * slot,
        host_memory_bytes=2**40,
        h2d_bytes_per_s=slot / t.up,
        d2h_bytes_per_s=slot / t.down,
        hbm_bytes_per_s=traffic * LAYER / t.gpu_adam,
        flops_per_s=_FLOPS_PER_S,
        dram_bytes_per_s=1e18,
        adam_params_per_s=traffic * LAYER / t.cpu_adam / 28,  # quoted for 28 bytes per parameter
    )
    if t.host is not None:
        whole = needed_on_host(Job("any", replace(w, optimizer=optimizer), m, asked(t, slot, sums)), Modes(frozenset()))
        list_bytes = wide // t.lists * LAYER
        room_bytes = whole - (t.layers * t.lists - t.host) * list_bytes
        disks = Nvme(
            name="tiny", memory_bytes=2**40, read_bytes_per_s=list_bytes / t.read,
            write_bytes_per_s=list_bytes / t.write, latency_s=0.0, measured=False, source="tiny",
        )  # fmt: skip
        if t.beside is not None:
            read, write = (together / t.beside[0] for together in t.beside[1:])
            beside = {
                "read_beside_bytes_per_s": read * disks.read_bytes_per_s,
                "write_beside_bytes_per_s": write * disks.write_bytes_per_s,
            }
            disks = replace(disks, **beside)
        host = replace(m.host, memory_bytes=room_bytes + m.host.reserved_bytes)
        m = replace(m, host=host, nvme=disks)
    # bytes that an add on the GPU moves, beside copying the gradient
    adds_per_s = (2 * wide - width) * LAYER / t.gpu_add if t.gpu_add else 1e18
    rank = replace(m.ranks[0], gpu=replace(m.gpu, operator_bytes_per_s=adds_per_s))
    return replace(w, optimizer=optimizer), replace(m, ranks=(rank,)), asked(t, slot, sums)


def asked(t: Tiny, slot: int, sums: str) -> Settings:
    return Settings(update="step" if t.barrier else "eager", clip=t.clip, chunk_bytes=slot, sums=sums)


def _order(w: Workload) -> tuple[tuple[int, bool, int], ...]:
    return tuple((_layer(m), m.phase is Phase.BWD, m.micro_batch) for m in w.moments if m.flops > 0)


def _layer(m: Moment) -> int:
    return int(m.module.rpartition(".")[2])


def layer_major(t: Tiny) -> Tiny:
    """Returns the same instance in layer-major order, with the tide of its first micro-batch throughout."""
    w = relay(chain_workload(t.layers, LAYER, micro_batches=t.micro_batches))
    order = _order(w)
    tide = tuple(t.tide[layer if not back else 2 * t.layers - 1 - layer] for layer, back, _ in order)
    return replace(t, order=order, tide=tide)


def sums_in_16_bits(t: Tiny) -> Tiny:
    """Returns the same instance with sums as wide as a gradient, of two micro-batches at least."""
    return replace(t, wide=1, micro_batches=max(2, t.micro_batches))


def with_experts(t: Tiny, rng: random.Random) -> Tiny:
    """Returns the same instance where some layers, their attention, compute two to four times as long as others, their
    routed experts."""
    return replace(t, forward=1, times=tuple(rng.choice((1, 2, 3, 4)) for _ in range(t.layers)))


def random_tiny(rng: random.Random, *, layers: int = 2, micro_batches: int | None = None) -> Tiny:
    """Returns a random instance on which compute, a copy direction, CPU Adam, adds on the host or room binds."""
    count = rng.choice((1, 2, 2, 3, 3, 4)) if micro_batches is None else micro_batches
    wide = rng.choice((1, 2))
    cpu_add = rng.choice((1, 1, 2, 3))
    whole = [k for k in (1, 2, 3, 4, 6, 8) if (8 + 4 // wide) * k % cpu_add == 0]
    return Tiny(
        layers=layers,
        slots=2 + wide + rng.randint(0, layers * (1 + wide)),
        forward=rng.choice((1, 1, 1, 2)),
        up=rng.choice((1, 1, 2, 3, 4)),
        down=rng.choice((1, 1, 2, 3, 4)),
        cpu_adam=rng.choice(whole),
        gpu_adam=rng.choice((1, 2, 3, 5)),
        tide=tuple(rng.choice((0, 0, 1)) for _ in range(2 * layers)),
        barrier=rng.random() < 0.4,
        micro_batches=count,
        clip=rng.random() < 0.3,
        wide=wide,
        cpu_add=cpu_add,
        gpu_add=rng.choice((0, 0, 1, 2)),
    )


def to_text(t: Tiny) -> str:
    """Returns the instance as one line of JSON."""
    return json.dumps({key: value for key, value in asdict(t).items() if value is not None})


def from_text(line: str) -> Tiny:
    """Returns the instance that `to_text` wrote."""
    found = json.loads(line)
    lists = {name: tuple(found.pop(name)) for name in ("tide", "beside", "times") if name in found}
    order = found.pop("order", None)
    return Tiny(**found, **lists, order=None if order is None else tuple(tuple(each) for each in order))


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Seconds of an instance, with one second per unit.

    optima: the exact optimum, and that of schedules that stream no states; None where nothing fits.
    closed, joint, fluid: the lower bounds.
    binding: the binding resource of the fluid bound.
    plans: spec of a policy -> seconds of its plan in the instance's chunks and order.
    wrong: contradictions to "bounds <= optimum <= plans", in words.
    """

    tiny: Tiny
    optima: Optima
    closed: float
    joint: float
    fluid: float
    binding: str
    plans: Mapping[str, float]
    wrong: tuple[str, ...]


def optima_of(t: Tiny, *, most_states: int | None = None) -> Optima:
    """Returns the exact optimum, and that of schedules that stream no states. Raises MemoryError for a graph with more
    than `most_states` states."""
    best, resident = (exact_optimum(t, streams=streams, most_states=most_states) for streams in (True, False))
    return best, resident


def compare_tiny(t: Tiny, optima: Optima, specs: Sequence[str] = (), *, sums: str = "32-bit") -> Compared:
    """Compare bounds and plans with the exact optima.

    sums: as in `as_job`.
    """
    w, machine, settings = as_job(t, sums)
    layout = build_layout(w, chunk_bytes=settings.chunk_bytes, sums=sums)
    assert [c.numel for c in layout.chunks] == [LAYER] * t.layers
    best, resident = optima
    fluid = fluid_bound(w, machine, settings, layout)
    bounds = {
        "closed": lower_bound(w, machine, settings, layout, stream=False).seconds,
        "joint": lower_bound(w, machine, settings, layout).seconds,
        "fluid": fluid.seconds,
    }
    plans: dict[str, float] = {}
    for spec in specs:
        try:
            plan = find_policy(spec)(w, machine, settings)
        except (DoesNotFit, CannotPlan):
            continue
        if plan.layout == layout and plan.workload.order is w.order:
            plans[spec] = play(plan).iteration_s
    wrong = [f"{name} bound {s} > {b}" for name, s, b in (
        ("closed", bounds["closed"], resident), ("joint", bounds["joint"], best), ("fluid", bounds["fluid"], best)
    ) if b is not None and s > float(b) * (1 + BY_ROUNDING)]  # fmt: skip
    wrong += [f"joint {bounds['joint']} > fluid {bounds['fluid']}"] * (bounds["joint"] > bounds["fluid"] * (1 + 1e-12))
    for spec, seconds in plans.items():
        if best is None or seconds < float(best) * (1 - BY_ROUNDING):
            wrong.append(f"{spec} takes {seconds}, the optimum is {best}")
    return Compared(
        tiny=t,
        optima=optima,
        **bounds,
        binding=fluid.binding,
        plans=plans,
        wrong=tuple(wrong),
    )
