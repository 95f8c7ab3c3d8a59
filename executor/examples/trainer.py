"""transformers.Trainer on a GPU that is too small: plan, prepare, connect, train. `python -m executor.examples.trainer`

The parts for pstar-sim are in `train`: four calls before `Trainer.train()`, and `max_grad_norm` in two places.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from executor import AdamW, OffloadedOptimizer, capture_module, prepare
from executor.hf import connect
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.plan import Settings
from pstar_sim.policy.registry import find_policy
from pstar_sim.workload.workload import repeat_micro_batch

BATCH, SEQUENCE, ACCUMULATE, MAX_GRAD_NORM = 2, 64, 2, 1.0


def make_model() -> Any:
    """Returns a small GPT-2 with random weights, the same each time. Your model comes from `from_pretrained`."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=128, n_head=4, n_positions=SEQUENCE, vocab_size=256,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def make_rows(count: int = 256) -> list[dict[str, torch.Tensor]]:
    """Returns the bytes of this file as token ids."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    starts = torch.randint(0, len(text) - SEQUENCE, (count,), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": text[s : s + SEQUENCE], "labels": text[s : s + SEQUENCE]} for s in starts.tolist()]


def make_arguments(folder: str, steps: int, *, save_every: int = 0) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=MAX_GRAD_NORM, learning_rate=1e-3, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="steps" if save_every else "no", save_steps=save_every or steps,
    )  # fmt: skip


def train(
    folder: str, *, steps: int = 10, gpu_memory: str = "12MiB", save_every: int = 0, resume: str | None = None
) -> Trainer:
    """Train to step `steps` by a plan for a GPU of `gpu_memory`. Returns the Trainer; its model is still prepared.

    save_every: steps between checkpoints, 0 for none.
    """
    model, rows = make_model(), make_rows()
    example = {key: torch.stack([row[key] for row in rows[:BATCH]]) for key in rows[0]}
    workload = repeat_micro_batch(capture_module(model, example, name="gpt2-tiny"), ACCUMULATE)
    plan = find_policy("tide")(workload, load_machine("virtual", gpu_memory=gpu_memory), Settings(clip=True))

    model, optimizer = prepare(model, plan, AdamW(lr=1e-3, max_grad_norm=MAX_GRAD_NORM))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    trainer = Trainer(
        model=model,
        args=make_arguments(folder, steps, save_every=save_every),
        train_dataset=rows,
        optimizers=(optimizer, schedule),
    )
    connect(trainer)  # the Trainer's max_grad_norm is AdamW's
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def session_of(trainer: Trainer) -> Any:
    optimizer: Any = trainer.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    assert isinstance(inner, OffloadedOptimizer)
    return inner.session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="trainer-out", help="folder of the Trainer (default: trainer-out)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--gpu-memory", default="12MiB", help="of the virtual accelerator (default: 12MiB)")
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="checkpoints in the output folder")
    parser.add_argument("--resume", metavar="CHECKPOINT", help="a folder checkpoint-N to continue from")
    args = parser.parse_args()
    trainer = train(
        args.output, steps=args.steps, gpu_memory=args.gpu_memory, save_every=args.save_every, resume=args.resume
    )
    session = session_of(trainer)
    sys.stdout.write(f"{session.status()}\n")
    session.close()


if __name__ == "__main__":
    main()
