"""FSDP 2: a Python function that applies `fully_shard` to a model."""

from __future__ import annotations

from dataclasses import replace

from pstar_sim.core.plan import Plan
from pstar_sim.dtypes import DTYPES, MASTER
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.frameworks.express import NOT_PINNED, Expressed
from pstar_sim.frameworks.fsdp import MEMORY, express_as, offloads, reshards

FSDP2 = "FSDP2"

_CODE = '''"""FSDP 2 as exported by pstar-sim: call `shard(model)` once, before the optimizer is made.

The process group has to exist; with offloading on a GPU it needs both backends, "cpu:gloo,cuda:nccl", for clipping.
Parameters are fp32, each its own master; blocks compute in {dtype}.
"""

from functools import partial

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

DTYPE = torch.{torch_dtype}
OFFLOAD = {offload}
PIN = {pin}
RESHARD = {reshard}
REPLICAS = {replicas}
CHECKPOINTING = {checkpointing}


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the model's lists: its layers. One within another comes first, as `fully_shard` needs."""
    found = [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]
    return [block for block in reversed(found) if not isinstance(block, nn.ModuleList | nn.ModuleDict)]


def recompute(model: nn.Module) -> None:
    """Recompute the activations of every block that is in no other block."""
    inner = {{id(part) for block in blocks(model) for part in block.modules() if part is not block}}
    for block in blocks(model):
        if id(block) not in inner:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def shard(model: nn.Module) -> nn.Module:
    """Slice every block and the rest of the model, in place."""
    model.float()
    if CHECKPOINTING and hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable()
    elif CHECKPOINTING:
        recompute(model)
    pin = PIN and torch.cuda.is_available()
    options = {{
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if OFFLOAD else OffloadPolicy(),
        "reshard_after_forward": RESHARD,
    }}
    if REPLICAS > 1:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        options["mesh"] = init_device_mesh(kind, (REPLICAS, distributed.get_world_size() // REPLICAS))
    if DTYPE is not torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=DTYPE, reduce_dtype=torch.float32)
    for block in blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model
'''


def write(configuration: Configuration) -> str:
    dtype = configuration.dtype or MASTER
    return _CODE.format(
        dtype=dtype,
        torch_dtype=DTYPES[dtype].torch_name,
        offload=offloads(configuration),
        pin=configuration.pinned_params,
        reshard=reshards(configuration),
        replicas=configuration.replicas,
        checkpointing=bool(configuration.checkpointing),
    )


def express(plan: Plan) -> Expressed:
    """The script makes the optimizer and sets clipping, batch and micro-batches."""
    found = express_as(plan, FSDP2, {"version": 2}, says_batch=False)
    if MEMORY.pins_too_much(found.configuration, plan.workload, plan.machine):
        unpinned = replace(found.configuration, pinned=False, pinned_params=False)
        found = replace(found, configuration=unpinned, says=(*found.says, NOT_PINNED))
    return replace(found, cannot=(*found.cannot, "clipping: the script's"))
