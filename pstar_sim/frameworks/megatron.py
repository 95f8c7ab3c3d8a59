"""Megatron-LM: writes its flags. Its distributed optimizer slices the optimizer states, a share of which may live on
the host and is updated there. Parameters and their fp32 gradients stay whole on every GPU.
"""

from __future__ import annotations

from pstar_sim.core.plan import Plan
from pstar_sim.dtypes import MASTER
from pstar_sim.frameworks.configuration import Configuration, spec
from pstar_sim.frameworks.express import Expressed, common_limits, common_says, optimizer_limits, whereabouts
from pstar_sim.frameworks.host_memory import (
    Allocation,
    MemoryRules,
    moments_bytes_per_param,
    rank_sizes,
    tensor_allocations,
    trained,
)
from pstar_sim.workload.workload import ATTENTION_ALONE, Workload

__all__ = ["MEGATRON", "MEMORY", "express", "write"]

MEGATRON = "Megatron-LM"
_SHARE = "share"


def write(configuration: Configuration) -> str:
    """One flag per line."""
    c, detail = configuration, configuration.detail
    share = detail[_SHARE]
    flags = [
        f"--micro-batch-size {c.batch_per_gpu}",
        f"--global-batch-size {c.train_batch}",
        f"--seq-length {detail['sequence']}",
        *([f"--{c.dtype}"] if c.dtype != MASTER else []),
        f"--clip-grad {1.0 if c.clip else 0.0}",
        "--optimizer adam",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    ]
    if share:
        flags += [
            "--optimizer-cpu-offload",
            f"--optimizer-offload-fraction {share:g}",
            "--overlap-cpu-optimizer-d2h-h2d",
            "--use-precision-aware-optimizer",
        ]
    if c.recompute == ATTENTION_ALONE:
        flags += ["--recompute-granularity selective"]
    elif c.checkpointing:
        flags += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    return "\n".join(flags) + "\n"


def express(plan: Plan) -> Expressed:
    w, where = plan.workload, whereabouts(plan)
    share = round(1 - where.states_on_gpu, 2)
    cannot = common_limits(plan, MEGATRON)
    if where.params_on_gpu < 1:
        cannot.append(
            f"the {1 - where.params_on_gpu:.0%} of the parameters that leave the GPU: Megatron keeps all of them there"
        )
    if where.states_on_disks or where.params_on_disks:
        cannot.append("disks: Megatron has none; predicted with the states on the host")
    cannot += optimizer_limits(w, MEGATRON, "adamw")
    if w.recompute and w.checkpointing:
        cannot.append(f"blocks of which {w.recompute} recomputes: the flags say all of them")
    several = share < 1 and plan.machine.data_parallel_size > 1
    notes = {
        "not modelled: parameters whole on every GPU; predicted as gathered when they are needed": several,
        "not modelled: sums beside the backward pass; predicted as waited for": several and share > 0,
    }
    configuration = Configuration(
        framework=MEGATRON,
        policy="zero_offload" if share == 1 else _partly(share, w.trainable_params // plan.machine.data_parallel_size),
        dtype=w.compute_dtype,
        batch_per_gpu=w.batch,
        micro_batches=w.micro_batches,
        train_batch=w.batch * w.micro_batches * plan.machine.data_parallel_size,
        clip=plan.settings.clip,
        checkpointing=True if w.checkpointing else None,
        recompute=w.recompute if w.recompute == ATTENTION_ALONE else None,
        optimizer="adamw",
        details=(("sequence", w.sequence), (_SHARE, share)),
        notes=tuple(text for text, applies in notes.items() if applies),
    )
    says = [
        *common_says(plan),
        f"{share:.0%} of the optimizer on the host" if share else "optimizer states on the GPUs, in slices",
        f"clipping {'at 1.0' if plan.settings.clip else 'off'}",
        *(["activations recomputed"] if w.checkpointing else []),
    ]
    return Expressed(configuration=configuration, says=tuple(says), cannot=tuple(cannot))


def _partly(share: float, own_params: int) -> str:
    """The policy with this share (0 to 1) of the optimizer on the host.

    own_params: of one rank, cut into enough sub-groups for the share.
    """
    if share == 0:
        return spec("zero3_resident", {"reshard": False})
    subgroup = max(1, own_params // 20)
    return spec("zero3_offload", {"ratio": share, "flush": "async", "reuse": 10**12, "subgroup": subgroup})


def _allocations(configuration: Configuration, workload: Workload, ranks: int) -> tuple[Allocation, ...]:
    """Of one rank, for the offloaded share: one request per parameter."""
    share = configuration.detail[_SHARE]
    assert isinstance(share, float | int)
    sizes = [int(share * size) for size in rank_sizes(trained(workload), ranks)]
    return (
        tensor_allocations("fp32 masters", sizes, 4, pinned=True),
        tensor_allocations("fp32 gradients", sizes, 4, pinned=True),
        tensor_allocations("the optimizer's moments", sizes, moments_bytes_per_param(workload), pinned=False),
    )


def _gpu_beyond_bytes(configuration: Configuration, workload: Workload, ranks: int) -> int:
    """fp32 gradients of all parameters. Where states are on the GPU, the policy counts those of the rank's own
    slices."""
    counted = 1 / ranks if configuration.base == "zero3_resident" else 0.0
    return int(4 * workload.trainable_params * (1 - counted))


MEMORY = MemoryRules(allocations=_allocations, gpu_beyond_bytes=_gpu_beyond_bytes)
"""Rules by which Megatron-LM allocates."""
