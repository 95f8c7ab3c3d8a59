"""Names of a plan's settings in the user's program, for messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """own_plan: what runs a plan that the user has made."""

    micro_batches: str
    gpu_memory: str = "gpu_memory"
    own_plan: str = "executor.prepare()"


COMMAND = Spelling(micro_batches="--micro-batches", gpu_memory="--gpu-memory")
LOOP = Spelling(micro_batches="executor.offload(micro_batches=)")
TRAINER = Spelling(
    micro_batches="TrainingArguments(gradient_accumulation_steps=)",
    own_plan="executor.prepare and executor.hf.connect",
)
LIGHTNING = Spelling(
    micro_batches="Trainer(accumulate_grad_batches=)", own_plan="executor.prepare in a loop without Lightning"
)
