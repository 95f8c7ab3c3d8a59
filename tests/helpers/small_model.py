"""A small language model, as the text of a module that `py:MODULE:net` names."""

from __future__ import annotations

__all__ = ["MODEL"]

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 256)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

def net(batch, sequence):
    torch.manual_seed(0)
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    return Net(), {"input_ids": ids, "labels": ids}
"""
