"""A script as users have it: a LightningModule in bf16-mixed, with clipping, accumulation and a schedule. The line that
offloads it is marked."""

import argparse
import logging

import lightning
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--gpu-memory")
parser.add_argument("--policy", default="optimal")
options = parser.parse_args()

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 96)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(96, 4, 192, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(96, 256)
        self.losses = []

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        loss = nn.functional.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


draw = torch.Generator().manual_seed(1)
rows = (torch.randint(256, (8 * options.steps, 1), generator=draw) + 5 * torch.arange(17)) % 256
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows[:, :-1], rows[:, 1:]), batch_size=4)
model = Net()
strategy = "auto"
if options.gpu_memory:
    from executor.lightning import OffloadStrategy

    strategy = OffloadStrategy(options.gpu_memory, policy=options.policy)  # the one line
trainer = lightning.Trainer(
    strategy=strategy, accelerator="cpu", precision="bf16-mixed", max_steps=options.steps, accumulate_grad_batches=2,
    gradient_clip_val=0.5, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, data)
if options.out:
    torch.save({"losses": model.losses, "weights": model.state_dict()}, options.out)
