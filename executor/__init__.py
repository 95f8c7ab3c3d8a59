"""Executor: runs a plan in the user's own training loop. The only part that imports torch.

`prepare(model, plan, AdamW(...))` returns the model and a torch optimizer; the loop stays as it was. `capture` traces a
model under fake tensors, `record` a real warm-up iteration.
"""

from executor.engine import Session
from executor.optimizer import AdamW, OffloadedAdamW
from executor.prepare import prepare
from executor.queues import SerialQueues, ThreadQueues, follow

__all__ = [
    "AdamW",
    "OffloadedAdamW",
    "SerialQueues",
    "Session",
    "ThreadQueues",
    "follow",
    "prepare",
]
