"""Plain PyTorch: the model, torch.optim.AdamW(fused=True), clip_grad_norm_.

In bf16 the training is the same as the others': AdamW updates an fp32 copy of every parameter, the gradient is cast up,
and the working copy is cast down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from contenders.task import MAX_GRAD_NORM, Task
from contenders.worker import Built
from executor.models import forward_loss

__all__ = ["Contender", "imports"]


def imports(task: Task) -> None:
    """Import everything that belongs to the baseline of host memory."""


class Contender:
    def __init__(self, built: Built, settings: Mapping[str, Any]) -> None:
        self.task = built.task
        self.model = built.module.to(self.task.device)
        self.parameters = list(self.model.parameters())
        self.params = sum(p.numel() for p in self.parameters)
        self.masters = self.parameters
        if self.task.dtype != "fp32":
            self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=self.task.lr, **settings["adamw"])

    def step(self, micro_batches: Sequence[Any]) -> float:
        total = 0.0
        for batch in micro_batches:
            loss = forward_loss(self.model, batch) / len(micro_batches)
            loss.backward()
            total += float(loss.detach())
        if self.masters is not self.parameters:
            for master, parameter in zip(self.masters, self.parameters):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        if self.task.clip:
            torch.nn.utils.clip_grad_norm_(self.masters, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters is not self.parameters:
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.parameters):
                    parameter.copy_(master)
        return total

    def figures(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass
