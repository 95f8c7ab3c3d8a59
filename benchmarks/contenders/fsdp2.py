"""FSDP2 on one rank: every block and the root sharded; parameters, gradients and states on the host (CPUOffloadPolicy)
with fused AdamW there; fp32 masters with a bf16 working copy where the task is in bf16."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from contenders.task import MAX_GRAD_NORM, Task
from contenders.worker import Built
from executor.models import TORCH_DTYPES, forward_loss

__all__ = ["Contender", "imports"]


def imports(task: Task) -> None:
    """Import everything that belongs to the baseline of host memory."""
    import torch.distributed as dist
    import torch.distributed.fsdp  # noqa: F401

    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_RANK", "0")
    # Clipping sums norms of gradients that lie on the host: without gloo beside nccl it fails.
    store = dist.HashStore()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if task.device == "cuda" else "gloo", store=store, rank=0, world_size=1
    )


def blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of the model's lists: its layers."""
    return [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]


class Contender:
    def __init__(self, built: Built, settings: Mapping[str, Any]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        self.task = built.task
        model = built.module
        self.params = sum(p.numel() for p in model.parameters())
        on_card = self.task.device == "cuda"
        mesh = init_device_mesh(self.task.device, (1,))
        options: dict[str, Any] = {
            "mesh": mesh,
            "offload_policy": CPUOffloadPolicy(pin_memory=on_card and settings["pin_memory"]),
            "reshard_after_forward": settings["reshard_after_forward"],
        }
        if self.task.dtype != "fp32":
            model = model.float()
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=TORCH_DTYPES[self.task.dtype], reduce_dtype=TORCH_DTYPES[settings["reduce_dtype"]]
            )
        for block in blocks(model):
            fully_shard(block, **options)
        fully_shard(model, **options)
        for name, buffer in model.named_buffers():
            owner = model.get_submodule(name.rpartition(".")[0])
            owner._buffers[name.rpartition(".")[2]] = buffer.to(self.task.device)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=self.task.lr, **settings["adamw"])

    def step(self, micro_batches: Sequence[Any]) -> float:
        total = 0.0
        for batch in micro_batches:
            loss = forward_loss(self.model, batch) / len(micro_batches)
            loss.backward()
            total += float(loss.detach())
        if self.task.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def figures(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
