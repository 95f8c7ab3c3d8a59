"""Plans in a framework's terms: the nearest configuration, what it states, and what it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.plan_set import PlanSet
from pstar_sim.core.step import Place
from pstar_sim.errors import ModelError, UnknownName
from pstar_sim.frameworks.configuration import Configuration, in_full
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.registry import built_in, can
from pstar_sim.units import format_bytes
from pstar_sim.workload.axes import AxesGiven
from pstar_sim.workload.lora import adapter_of, base_of
from pstar_sim.workload.optimizers import MASTERS
from pstar_sim.workload.parallelism import CUTS, Parallelism
from pstar_sim.workload.presets import variant
from pstar_sim.workload.workload import Workload, activations_text, with_optimizer

NOT_PINNED = "host memory not pinned: the host cannot pin as much"
"""What a file says where the host cannot pin the bytes that the framework would pin."""


@dataclass(frozen=True, kw_only=True)
class Expressed:
    """configuration: the nearest.
    says: what the file states, a line each.
    cannot: what the framework cannot express.
    """

    configuration: Configuration
    says: tuple[str, ...]
    cannot: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """Between two iterations, shares of each kind's bytes.

    streamed: states come to the GPU for the update.
    """

    params_on_gpu: float
    states_on_gpu: float
    params_on_disks: float
    states_on_disks: float
    streamed: int


def express_set(
    plans: PlanSet, express: Callable[[Plan], Expressed], degrees: Callable[[Parallelism], Parallelism]
) -> Expressed:
    """All stages' plans; that of the stage which keeps least on the GPU stands for all. Its tokens are those of a rank.

    express, degrees: the framework's (targets.py).
    """
    kept = [(where.params_on_gpu, where.states_on_gpu) for where in map(whereabouts, plans.plans)]
    stage = min(range(len(kept)), key=lambda n: sum(kept[n]))
    plan, spread = plans.plans[stage], replace(plans.parallelism, data=None, shard=None)
    found, said = express(plan), degrees(replace(spread, cut=CUTS[0]))
    own, parts = found.configuration, spread.context
    configuration = replace(
        own,
        parallelism=said,
        micro_batches=plan.workload.micro_batches,
        train_batch=None if own.train_batch is None else own.train_batch // parts,
        details=(*own.detail.items(), *([("sequence", plan.workload.sequence * parts)] if parts > 1 else [])),
    )
    cannot = [] if said == spread else [f"{spread}: {configuration.framework} has {said}"]
    cannot += [f"{plans.split} of each layer: {configuration.framework} has equal shares"] if plans.shares else []
    if more := [plans.names[n] for n, shares in enumerate(kept) if shares != kept[stage]]:
        cannot.append(
            f"what {', '.join(more)} keep on the GPU beyond {plans.names[stage]}: the file has one place for all"
        )
    return Expressed(configuration=configuration, says=(str(said), *found.says), cannot=(*found.cannot, *cannot))


def whereabouts(plan: Plan) -> Whereabouts:
    held: dict[tuple[bool, Place], int] = {}
    on_gpu = {(r.chunk, r.list) for r in plan.initial if r.place is Place.GPU}
    for r in plan.initial:
        if r.chunk < 0 or (r.list != "param" and r.list not in plan.layout.state_lists):
            continue
        if r.place is not Place.GPU and (r.chunk, r.list) in on_gpu:
            continue  # the host's list is a copy; the original stays on the GPU
        key = r.list == "param", r.place
        held[key] = held.get(key, 0) + plan.layout.payload_bytes(r.chunk, r.list)

    def share(params: bool, place: Place) -> float:
        whole = sum(size for (kind, _), size in held.items() if kind is params)
        return held.get((params, place), 0) / whole if whole else 1.0

    return Whereabouts(
        params_on_gpu=share(True, Place.GPU),
        states_on_gpu=share(False, Place.GPU),
        params_on_disks=share(True, Place.NVME),
        states_on_disks=share(False, Place.NVME),
        streamed=plan.modes.count("stream"),
    )


def job_left(plan: Plan, configuration: Configuration) -> tuple[Workload, Settings]:
    """What a framework runs in place of the plan's job: depth-first, updated in optimizer.step(), all activations kept
    or recomputed, the stated precision and optimizer, fp32 masters, a base in the working dtype. Traced workloads
    otherwise stay."""
    settings = replace(plan.settings, update="step", loop="own")
    w, c = plan.workload, configuration
    changes: AxesGiven = {}
    if w.autocast and not c.autocast:
        changes["dtype"] = c.dtype
    if w.recompute != c.recompute and c.checkpointing is not None:
        changes["checkpointing"] = c.checkpointing
    if base_of(w):
        changes["base"] = "bf16"
    optimizer = None if c.optimizer == w.optimizer.name else c.optimizer
    try:
        w = with_optimizer(w, optimizer, None if w.optimizer.masters == MASTERS[0] else MASTERS[0])
        return variant(w, **changes) if changes or w.activations or w.relayed else w, settings
    except (ModelError, UnknownName):
        return w, settings


def options_of_plan(plan: Plan, *names: str) -> Mapping[str, object] | None:
    """All options, for one of `names`."""
    base = split_spec(plan.policy)[0]
    return in_full(plan.policy) if base in names else None


def common_limits(plan: Plan, framework: str, *own: str, autocast: bool = False) -> list[str]:
    """own: policies of the framework itself."""
    base = split_spec(plan.policy)[0]
    w, settings = plan.workload, plan.settings
    said = []
    if base not in own:
        said.append(f"the order of copies and updates of {plan.policy}: {framework} has its own")
        if base in built_in() and _follows_tide(plan):
            said.append(f"room that follows the activations (the tide): {framework} reserves for their peak")
    if plan.modes.count("stream"):
        said.append(
            f"states of {plan.modes.count('stream')} of {len(plan.modes)} chunks come to the GPU for the update"
        )
    if settings.barrier(w.compute_dtype) is None:
        said.append(f"updates as gradients arrive: {framework} updates in optimizer.step()")
    if not w.order.of_loop and not w.borders:
        said.append(f"the {w.order} order of micro-batches: {framework} runs them one after the other")
    if adapter := adapter_of(w):
        kind = "DoRA" if adapter.dora else "LoRA"
        whole = f", {', '.join(adapter.save)} trained whole" if adapter.save else ""
        on = ", ".join(adapter.targets or ())
        said.append(f"adapters ({kind} r={adapter.rank} on {on}{whole}): the script makes them")
    if stored := base_of(w):
        predicted = f"; predicted in {w.compute_dtype}" if w.source == "preset" else ""
        said.append(f"frozen matrices in {stored}: the script quantises them{predicted}")
    if w.activations:
        said.append(f"activations block by block ({activations_text(w)})")
    if w.autocast and not autocast:
        said.append(f"{w.autocast} autocast: {framework} casts whole blocks, over fp32 masters")
    if settings.sums == "16-bit" and w.micro_batches > 1:
        said.append("sums of gradients in 16 bits")
    said.append(f"chunks of {format_bytes(plan.layout.chunk_bytes)}: {framework} has units of its own")
    return said


def optimizer_limits(w: Workload, framework: str, written: str | None) -> list[str]:
    """written: name here of the file's optimizer, None: the script makes it."""
    said = []
    if written is None:
        said.append(f"the optimizer {w.optimizer.name}: the script makes {w.optimizer.script}")
    elif w.optimizer.name != written:
        said.append(f"the optimizer {w.optimizer.name}: the file names {written} instead; predicted with {written}")
    if w.optimizer.masters != MASTERS[0]:
        said.append(f"training without fp32 masters: predicted with those of {framework}")
    return said


def _follows_tide(plan: Plan) -> bool:
    name = split_spec(plan.policy)[0]
    point = can(name).point
    return point is not None and in_full(plan.policy).get("capacity", Point().capacity) == "tide"


def common_says(plan: Plan) -> list[str]:
    """Stated for every framework."""
    w = plan.workload
    steps = f" in {w.micro_batches} micro-batches" if w.micro_batches > 1 else ""
    return [f"{w.batch} sequences per GPU{steps}, {w.compute_dtype}"]


def placed(plan: Plan, *, zero_offload: bool) -> tuple[str, dict[str, object]]:
    """DeepSpeed's policy that keeps model data where the plan keeps most.

    zero_offload: parameters may stay whole on the GPU, all else on the host.
    """
    where = whereabouts(plan)
    if where.states_on_disks > 0 or where.params_on_disks > 0:
        params = "nvme" if where.params_on_disks > 0.5 else "cpu"
        return "zero_infinity", {"params": params, "states": "nvme" if where.states_on_disks > 0 else "cpu"}
    if where.states_on_gpu == 1 and where.params_on_gpu == 1:
        return "zero3_resident", {}
    if where.params_on_gpu > 0.99 and where.states_on_gpu < 0.01 and zero_offload:
        return "zero_offload", {}
    ratio = round(1 - where.states_on_gpu, 2)
    return "zero3_offload", {"params": "gpu" if where.params_on_gpu > 0.99 else "cpu", "ratio": ratio}
