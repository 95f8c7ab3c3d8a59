"""Modules that test_lightning.py fits. Lightning takes seconds to import: their first use imports it."""

from __future__ import annotations

from typing import Any

import lightning
import torch
import torchmetrics
from torch import nn

__all__ = ["ClipsItself", "Measures", "Net", "ReadsANumber"]


class Net(lightning.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.losses: list[float] = []
        self.validated: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x.float() ** 2).mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self(batch) * (1 + self.trainer.current_epoch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated.append(float(self(batch)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Measures(Net):
    """Metrics of the training, whose updates read numbers from tensors; a value to choose checkpoints by."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.both = torchmetrics.MetricCollection(
            {"first": torchmetrics.MeanSquaredError(), "second": torchmetrics.MeanAbsoluteError()}
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self(batch)
        self.mean(loss.detach())
        self.log("mean", self.mean)
        found = self.both(loss.detach()[None], batch.mean()[None])
        self.log_dict({name: 2 * value for name, value in found.items()}, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("wanted", self(batch))

    test_step = validation_step


class ReadsANumber(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self(batch)
        self.log("loss", loss.item())
        return loss


class ClipsItself(Net):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
