"""fp32 weights under autocast, with `torch.autocast` around the model: under a plan, the bits of the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from plain_loop import train
from thinned import by_turns
from torch import nn
from torch.utils.checkpoint import checkpoint

import executor

WIDTH = 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return added


class Net(nn.Module):
    """Its embedding is tied to its head, so that one weight has two casts or one from autocast's cache."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        loss: torch.Tensor = nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
        return loss


def batches() -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    while True:
        yield torch.randint(64, (2, 8), generator=draw)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: torch.Tensor = model(batch)
    return loss


@pytest.mark.parametrize(
    ("policy", "micro_batches", "update", "clip", "checkpointed"),
    by_turns(
        [
            ("tide", 1, "step", 0.1),
            ("tide", 4, "eager", None),
            ("optimal", 4, "step", 0.1),
            ("optimal", 1, "eager", None),
            ("zero_offload", 1, "step", None),
            ("patrickstar", 4, "step", None),
        ],
        [(False,), (True,)],
    ),
)
def test_autocast_over_fp32_weights_is_the_plain_loop(
    policy: str, micro_batches: int, update: str, clip: float | None, checkpointed: bool
) -> None:
    """Six rows, with and without checkpointing by turns; 12 with --whole."""
    torch.manual_seed(3)
    reference = Net(checkpointed)
    model = copy.deepcopy(reference)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    losses = train(reference, plain, batches(), 3, micro_batches, loss_of=loss_of, clip=clip)
    _, optimizer = executor.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        torch.zeros(2, 8, dtype=torch.long),
        gpu_memory="420KB" if policy == "zero_offload" else "260KB",
        micro_batches=micro_batches,
        max_grad_norm=clip,
        update=update,
        policy=policy,
        loss=loss_of,
    )
    session = optimizer.session
    assert session.plan.workload.dtype == "fp32"
    assert train(model, optimizer, batches(), 3, micro_batches, loss_of=loss_of) == losses
    assert session.deviations == 0 and session.status().links["h2d"].moved_bytes > 0
    session.close()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters()))
