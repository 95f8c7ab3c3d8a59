"""FSDP by any name: its policies, and allocations on the host.

With offloading it is zero_infinity with lists on the host, without buckets, else zero3_resident. Under mixed precision
fp32 parameters are their own masters: 16 bytes each with AdamW, half of that in pure bf16 (without fp32 masters).
"""

from __future__ import annotations

from collections.abc import Iterable

from pstar_sim.core.plan import Plan
from pstar_sim.dtypes import DTYPES, MASTER, WORKING
from pstar_sim.frameworks.configuration import Configuration, spec
from pstar_sim.frameworks.express import (
    Expressed,
    Whereabouts,
    common_limits,
    common_says,
    optimizer_limits,
    options_of_plan,
    whereabouts,
)
from pstar_sim.frameworks.host_memory import (
    Allocation,
    Copies,
    MemoryRules,
    frozen,
    moments_bytes_per_param,
    tensor_allocations,
    trained,
)
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.policy.systems.sharded import MAX_REUSE_PARAMS
from pstar_sim.workload.workload import Tensor, Workload

OWN = ("zero3_resident", "zero_infinity")
"""Policies that stand for FSDP."""


def fsdp_policy(*, offload: bool, reshard: bool, replicas: int | str = 1) -> str:
    """reshard: parameters go after forward, and are gathered for backward."""
    if not offload:
        return spec("zero3_resident", {"reshard": reshard, "replicas": replicas})
    options = {"bucket": 0, "reuse": 0 if reshard else MAX_REUSE_PARAMS, "replicas": replicas}
    return spec("zero_infinity", options)


def offloads(configuration: Configuration) -> bool:
    return configuration.policy_base == "zero_infinity"


def reshards(configuration: Configuration) -> bool:
    options = configuration.options
    whole = options.get("shard") == "states"
    return options["reuse"] == 0 if offloads(configuration) else bool(options.get("reshard", not whole))


def _allocations(configuration: Configuration, workload: Workload, ranks: int) -> tuple[Allocation, ...]:
    """One rank's, with everything offloaded. FSDP 2 pins each parameter, FSDP 1 each wrapped block's flat parameter; a
    gradient arrives in a block of its parameter's size."""
    if not offloads(configuration):
        return ()
    width = workload.optimizer.master_bytes  # a parameter is its own master
    dtype = MASTER if width == DTYPES[MASTER].bytes else workload.dtype
    own, others = ([[t] for t in tensors] for tensors in (trained(workload), frozen(workload)))
    if configuration.detail.get("version") == 1:
        own, others = _units(trained(workload)), _units(frozen(workload))
    sizes = [-(-sum(t.numel for t in unit) // ranks) for unit in own]
    as_stored = [-(-sum(t.bytes for t in unit) // ranks) for unit in others]
    held = [tensor_allocations("frozen parameters", as_stored, 1, pinned=configuration.pinned_params)] if others else []
    return (
        *held,
        tensor_allocations(f"{dtype} parameters", sizes, width, pinned=configuration.pinned_params),
        tensor_allocations(f"{dtype} gradients", sizes, width, pinned=configuration.pinned_params),
        tensor_allocations("the optimizer's moments", sizes, moments_bytes_per_param(workload), pinned=False),
    )


def _units(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """A block's names share the part up to the first number."""
    units: dict[str, list[Tensor]] = {}
    for t in tensors:
        parts = t.name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        units.setdefault("" if at is None else ".".join(parts[: at + 1]), []).append(t)
    return list(units.values())


def copies(configuration: Configuration, workload: Workload, ranks: int, local_ranks: int) -> Copies:
    """A full state dict is gathered on the first process's CPU, weights before moments, each freed before the next; a
    file of it is read there, too. accelerate offloads sharded ones to the CPU, where host slices lie already (its
    fsdp_utils.py). torch.distributed.checkpoint alone copies tensor by tensor."""
    detail = configuration.detail
    as_stored = sum(t.bytes for t in frozen(workload))
    weights = as_stored + workload.optimizer.master_bytes * workload.trainable_params
    moments = int(moments_bytes_per_param(workload) * workload.trainable_params)
    larger = "the optimizer's moments" if moments > weights else "the weights" if as_stored else "the fp32 weights"
    if detail.get("saves", "FULL_STATE_DICT" if detail.get("version") == 1 else "") == "FULL_STATE_DICT":
        what, whole = f"{larger}, whole on one process", max(weights, moments)
        instead = "fsdp_state_dict_type: SHARDED_STATE_DICT"
        return Copies(saving_bytes=whole, saved=what, resuming_bytes=whole, read=what, instead=instead)
    copied = detail.get("type") == "FSDP" and not offloads(configuration)  # accelerate names its type
    slices = local_ranks * -(-max(weights, moments) // ranks) if copied else 0
    what = f"each rank's slices of {larger}" if slices else ""
    return Copies(saving_bytes=slices, saved=what, resuming_bytes=slices, read=what)


MEMORY = MemoryRules(
    allocations=_allocations,
    copies=copies,
    loaded_dtype=MASTER,
    unpinned=lambda configuration: "with CPUOffloadPolicy(pin_memory=False) of FSDP 2 in the script",
)
"""Rules by which FSDP allocates, under each of its names."""


def express_as(
    plan: Plan,
    framework: str,
    details: dict[str, object],
    *,
    says_batch: bool = True,
    trains_scaled: bool = True,
    recomputes_blocks: bool = False,
    optimizer: str | None = None,
) -> Expressed:
    """With offloading if anything is off the GPU.

    recomputes_blocks: the file can say which (every-N).
    """
    where = whereabouts(plan)
    offload = min(where.params_on_gpu, where.states_on_gpu) < 1
    reshard = _gives_up(plan)
    own = split_spec(plan.policy)[0] in OWN
    replicas = plan.machine.data_parallel_size // plan.layout.ranks if own else 1
    w = plan.workload
    dtype = w.compute_dtype if trains_scaled or not DTYPES[w.compute_dtype].scaled else WORKING
    cannot = common_limits(plan, framework, *OWN) + [
        limit
        for limit, applies in _limits(
            plan, framework, where, dtype, says_batch=says_batch, recomputes_blocks=recomputes_blocks
        ).items()
        if applies
    ]
    cannot += optimizer_limits(w, framework, optimizer)
    configuration = Configuration(
        framework=framework,
        policy=fsdp_policy(offload=offload, reshard=reshard, replicas=replicas),
        dtype=dtype,
        checkpointing=w.checkpointing if w.checkpointing or w.recompute else None,
        optimizer=optimizer,
        details=tuple(sorted(details.items())),
    )
    says = [
        *(common_says(plan) if says_batch else [dtype]),
        "parameters, gradients and optimizer states on the host" if offload else "everything on the GPUs, in slices",
        f"parameters {'given up' if reshard else 'kept'} after forward",
    ]
    if replicas > 1:
        says.append(f"{replicas} replicas")
    if w.checkpointing:
        says.append("activations recomputed")
    return Expressed(configuration=configuration, says=tuple(says), cannot=tuple(cannot))


def _gives_up(plan: Plan) -> bool:
    """Parameters go after forward; True for policies not FSDP's."""
    known = options_of_plan(plan, *OWN)
    if known is None:
        return True
    return bool(known["reshard"]) if split_spec(plan.policy)[0] == "zero3_resident" else known["reuse"] == 0


def batch_limit(w: Workload) -> str:
    steps = f" and its {w.micro_batches} micro-batches" if w.micro_batches > 1 else ""
    return f"the batch of {w.batch} sequences per GPU{steps}: the script's"


def _limits(
    plan: Plan, framework: str, where: Whereabouts, dtype: str, *, says_batch: bool, recomputes_blocks: bool
) -> dict[str, bool]:
    """Words for what the file cannot say -> does the plan have it?"""
    w = plan.workload
    stays = {"parameters": where.params_on_gpu, "optimizer states": where.states_on_gpu}
    shares = " and ".join(f"{share:.0%} of the {name}" for name, share in stays.items() if share > 0)
    return {
        f"the {shares} that stay on the GPU: {framework} offloads everything or nothing": (
            min(stays.values()) < 1 and bool(shares)
        ),
        f"disks: {framework} has none; predicted with everything on the host": (
            where.params_on_disks > 0 or where.states_on_disks > 0
        ),
        "loss scaling: the script needs a gradient scaler for fp16": DTYPES[dtype].scaled,
        f"fp16: {framework} trains in bf16 or fp32; the file says {dtype}": dtype != w.compute_dtype,
        f"{w.recompute} recompute: the file says {'all blocks' if w.checkpointing else 'none'}": (
            w.recompute is not None and not (recomputes_blocks and w.checkpointing)
        ),
        batch_limit(w): not says_batch,
    }
