"""FSDP under each of its names: the policies that stand for it, and what it allocates on the host.

Offloaded, everything lives on the host: a block's parameters come up as blocks run, gradients go down beside the
backward pass, torch's AdamW updates on the CPU in optimizer.step(): zero_infinity with its lists on the host, without
buckets. Otherwise everything is on the GPUs in slices: zero3_resident. Parameters are fp32 under mixed precision, and
are their own masters: 16 bytes per parameter with AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable

from pstar_sim.core.plan import Plan
from pstar_sim.frameworks.configuration import Configuration, spec
from pstar_sim.frameworks.express import Expressed, common_limits, common_says, options_of_plan, whereabouts
from pstar_sim.frameworks.host_memory import Block, rank_sizes, tensor_blocks, trained
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.policy.systems.sharded import MAX_REUSE_PARAMS
from pstar_sim.workload.workload import Tensor, Workload

__all__ = ["OWN", "express_as", "fsdp_policy", "host_blocks", "start_bytes"]

OWN = ("zero3_resident", "zero_infinity")
"""Policies that stand for FSDP."""

_WIDTH = 4  # bytes of a parameter, its gradient and each moment


def fsdp_policy(*, offload: bool, reshard: bool) -> str:
    """The policy of FSDP. reshard: give parameters up after forward, and gather them again for backward."""
    if not offload:
        return spec("zero3_resident", {"reshard": reshard})
    return spec("zero_infinity", {"bucket": 0, "reuse": 0 if reshard else MAX_REUSE_PARAMS})


def offloads(configuration: Configuration) -> bool:
    return configuration.base == "zero_infinity"


def reshards(configuration: Configuration) -> bool:
    options = configuration.options
    return options["reuse"] == 0 if offloads(configuration) else bool(options.get("reshard", True))


def host_blocks(configuration: Configuration, workload: Workload, ranks: int) -> tuple[Block, ...]:
    """What one rank asks the host for where everything is offloaded. FSDP2 pins parameter by parameter, FSDP 1 the flat
    parameter of each wrapped block; a gradient arrives in a block as large as its parameter."""
    if not offloads(configuration):
        return ()
    tensors = trained(workload)
    sizes = rank_sizes(tensors, ranks)
    if configuration.detail.get("version") == 1:
        sizes = [-(-sum(t.numel for t in unit) // ranks) for unit in _units(tensors)]
    moments = workload.optimizer.states_bytes_per_param - 4
    return (
        tensor_blocks("fp32 parameters", sizes, _WIDTH, pinned=configuration.pinned_params),
        tensor_blocks("fp32 gradients", sizes, _WIDTH, pinned=configuration.pinned_params),
        tensor_blocks("the optimizer's moments", sizes, moments, pinned=False),
    )


def _units(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors by the block that they lie in: what their names share up to the first number."""
    units: dict[str, list[Tensor]] = {}
    for t in tensors:
        parts = t.name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        units.setdefault("" if at is None else ".".join(parts[: at + 1]), []).append(t)
    return list(units.values())


def start_bytes(configuration: Configuration, workload: Workload, ranks: int) -> int:
    """Weights while they are loaded, in fp32: every process loads the whole model, or one does for all."""
    whole = workload.params * _WIDTH
    return -(-whole // ranks) if configuration.detail.get("loads_once") else whole


def express_as(plan: Plan, framework: str, details: dict[str, object]) -> Expressed:
    """The FSDP configuration nearest to a plan: offloaded where the plan keeps anything off the GPU."""
    where = whereabouts(plan)
    known = options_of_plan(plan, *OWN)
    cannot = common_limits(plan, framework, *OWN)
    offload = min(where.params_on_gpu, where.states_on_gpu) < 1
    reshard = True
    if known is not None:
        base = split_spec(plan.policy)[0]
        reshard = bool(known["reshard"]) if base == "zero3_resident" else known["reuse"] == 0
    if offload and (where.params_on_gpu > 0 or where.states_on_gpu > 0):
        cannot.append(
            f"the {where.params_on_gpu:.0%} of the parameters and {where.states_on_gpu:.0%} of the optimizer states "
            f"that stay on the GPU: {framework} offloads everything or nothing"
        )
    if where.params_on_disks or where.states_on_disks:
        cannot.append(f"disks: {framework} has none; predicted with everything on the host")
    if plan.workload.dtype == "fp16":
        cannot.append("loss scaling: the script needs a gradient scaler for fp16")
    if plan.workload.optimizer.name != "adamw":
        cannot.append(f"the states of {plan.workload.optimizer.name}: the script makes the optimizer")
    w = plan.workload
    configuration = Configuration(
        framework=framework,
        policy=fsdp_policy(offload=offload, reshard=reshard),
        dtype=w.dtype,
        checkpointing=True if w.checkpointing else None,
        details=tuple(sorted(details.items())),
    )
    says = [
        *common_says(plan),
        "parameters, gradients and optimizer states on the host" if offload else "everything on the GPUs, in slices",
        f"parameters {'given up' if reshard else 'kept'} after forward",
    ]
    if w.checkpointing:
        says.append("activations recomputed")
    return Expressed(configuration=configuration, says=tuple(says), cannot=tuple(cannot))
