"""A script as users have it: a loop of one's own with autocast, AdamW and a schedule. The line that offloads it is
marked."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--gpu-memory")
parser.add_argument("--policy", default="optimal")
options = parser.parse_args()

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 96)
        self.blocks = nn.ModuleList(Block(96) for _ in range(5))
        self.head = nn.Linear(96, 256)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Net()
no_decay = [p for p in model.parameters() if p.dim() == 1]
decay = [p for p in model.parameters() if p.dim() > 1]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95)
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
draw = torch.Generator().manual_seed(1)


def batch():
    start = torch.randint(256, (4, 1), generator=draw)
    tokens = (start + 5 * torch.arange(25)) % 256
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, batch):
    tokens, targets = batch
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


if options.gpu_memory:
    import executor

    example = (torch.zeros(4, 24, dtype=torch.long), torch.zeros(4, 24, dtype=torch.long))
    model, optimizer = executor.offload(  # the one line
        model, optimizer, example, gpu_memory=options.gpu_memory, dtype="bf16", loss=loss_of, policy=options.policy
    )

losses = []
for _ in range(options.steps):
    loss = loss_of(model, batch())
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
if options.out:
    torch.save({"losses": losses, "weights": model.state_dict()}, options.out)
