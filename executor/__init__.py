"""Executor: runs a plan in the user's own training loop. The only part that imports torch.

`prepare(model, plan, AdamW(...))` returns the model and a torch optimizer; the loop stays as it was. `capture` traces a
model under fake tensors, `record` a real warm-up iteration.
"""

from executor.backend import Backend, VirtualBackend
from executor.capture import capture, capture_module
from executor.drive import StepResult
from executor.engine import Session
from executor.ladder import Ladder, Rung
from executor.measure import Measured
from executor.optimizer import AdamW, OffloadedAdamW
from executor.prepare import prepare
from executor.queues import SerialQueues, ThreadQueues, follow
from executor.record import record
from executor.scaling import LossScale
from executor.status import LinkUse, Status
from executor.streams import StreamQueues
from executor.virtual_streams import VirtualStreams
from executor.weights import parameters_on_meta

__all__ = [
    "AdamW",
    "Backend",
    "Ladder",
    "LinkUse",
    "LossScale",
    "Measured",
    "OffloadedAdamW",
    "Rung",
    "SerialQueues",
    "Session",
    "Status",
    "StepResult",
    "StreamQueues",
    "ThreadQueues",
    "VirtualBackend",
    "VirtualStreams",
    "capture",
    "capture_module",
    "follow",
    "parameters_on_meta",
    "prepare",
    "record",
]
