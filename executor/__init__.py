"""Executor: runs a plan in the user's own training loop. The only part that imports torch.

`prepare(model, plan, AdamW(...))` returns the model and a torch optimizer; the loop stays as it was. `capture` traces a
model under fake tensors, `record` a real warm-up iteration.

Folders and files, lowest first (each imports only from its own row and the rows above it):

    devices       memory, copies, the arithmetic of updates; beside it disks, files with slots for lists of chunks
    memory        payloads of chunks, their values, gradients and updates
    queues        execution of a plan's steps, and logs of it
    moments       hooks on the user's model, counts of operators and live bytes, a workload made of them
    activations   blocks that are recomputed or offloaded; beside it calibration, contract, models, scaling
    descriptions, capture, compatibility
    distributed   the other ranks
    session       the state of a run, an iteration on plan, reads by user code
    off_plan      an iteration without a plan; warm-up; the ladder when memory runs out
    driving       the acts of the training loop, `session.step`
    measuring     the first iteration's tide, measured iterations, status
    lifetime      a session's begin, its change to another plan, its end
    engine        Session: puts the parts above together
    saving        weights and checkpoints; beside it training, the loop of `pstar run`
    optimizer, describing, prepare
    recording     a real iteration as a workload, and the cost of its moments
    offloading    one call: capture or record, plan, prepare; beside it longest_rows of a data set
    hf, lightning, axolotl    the same for their trainers; below hf trainer_capture
    running, calibrate, run, examples
"""

from importlib.util import find_spec

if find_spec("torch") is None:  # raised here, with a hint, before any other file imports torch
    raise ModuleNotFoundError(
        "executor needs torch, which is not installed; `pip install -e '.[executor]'` in the checkout installs it",
        name="torch",
    )

from executor import hf
from executor.capture import capture, capture_module
from executor.descriptions import SGD, Adafactor, Adam, AdamW, BnbAdamW, BnbLion, Lion, Muon
from executor.devices.backend import Backend, VirtualBackend
from executor.devices.on_meta import parameters_on_meta
from executor.devices.virtual_streams import VirtualStreams
from executor.driving.drive import StepResult
from executor.engine import Session
from executor.measuring.measured import Measured
from executor.measuring.status import LinkUse, Status
from executor.moments.marks import mark_moments
from executor.off_plan.ladder import Ladder
from executor.off_plan.rungs import Rung
from executor.offloading import offload
from executor.optimizer import OffloadedOptimizer
from executor.prepare import prepare
from executor.queues.serial import SerialQueues, follow
from executor.queues.streams import StreamQueues
from executor.queues.threads import ThreadQueues
from executor.recording.record import record
from executor.running.step_log import StepLog
from executor.scaling import LossScale

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Backend",
    "BnbAdamW",
    "BnbLion",
    "Ladder",
    "LinkUse",
    "Lion",
    "LossScale",
    "Measured",
    "Muon",
    "OffloadedOptimizer",
    "Rung",
    "SerialQueues",
    "Session",
    "Status",
    "StepLog",
    "StepResult",
    "StreamQueues",
    "ThreadQueues",
    "VirtualBackend",
    "VirtualStreams",
    "capture",
    "capture_module",
    "follow",
    "hf",
    "mark_moments",
    "offload",
    "parameters_on_meta",
    "prepare",
    "record",
]
