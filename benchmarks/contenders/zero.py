"""DeepSpeed ZeRO-2 and ZeRO-3 offload on one rank, with the settings of the JSON files beside this module."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from contenders.task import MAX_GRAD_NORM, Task
from contenders.worker import Built
from executor.models import forward_loss

__all__ = ["Contender", "config_of", "imports"]


def imports(task: Task) -> None:
    """Import and start everything that belongs to the baseline of host memory. (The first such process also builds the
    optimizer's C++, which takes about a minute.)"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if task.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend="nccl" if task.device == "cuda" else "gloo", verbose=False)


def config_of(task: Task, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns DeepSpeed's own configuration: the file's, with the task's batch, dtype, clipping and learning rate."""
    config = copy.deepcopy(dict(settings["deepspeed"]))
    config["train_micro_batch_size_per_gpu"] = task.micro_batch
    config["gradient_accumulation_steps"] = task.micro_batches
    config["gradient_clipping"] = MAX_GRAD_NORM if task.clip else 0.0
    config["optimizer"]["params"]["lr"] = task.lr
    config["bf16"] = {"enabled": task.dtype == "bf16"}
    config["fp16"] = {"enabled": task.dtype == "fp16"}
    return config


class Contender:
    def __init__(self, built: Built, settings: Mapping[str, Any]) -> None:
        import deepspeed

        self.task = built.task
        self.params = sum(p.numel() for p in built.module.parameters())
        self.engine, *_ = deepspeed.initialize(
            model=built.module,
            config=config_of(self.task, settings),
            model_parameters=list(built.module.parameters()),
        )

    def step(self, micro_batches: Sequence[Any]) -> float:
        total = 0.0
        for batch in micro_batches:
            loss = forward_loss(self.engine, batch)
            self.engine.backward(loss)
            self.engine.step()
            total += float(loss.detach()) / len(micro_batches)
        return total

    def figures(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        import torch.distributed as dist

        self.engine.destroy()
        if dist.is_initialized():
            dist.destroy_process_group()
