"""Hugging Face: a prepared model in `transformers.Trainer`.

`Trainer` clips gradients itself, between backward and `optimizer.step()`, through `accelerator.clip_grad_norm_`; here
they have left for their chunks by then and are clipped inside `optimizer.step()`, by `AdamW(max_grad_norm=)`.
`connect(trainer)`
joins the two: it checks that both clip at the same norm, and gives the Trainer the norm that the session knows. Without
it `trainer.train()` stops at its first clipping with a ContractError: nothing is ever left unclipped in silence.
`executor/examples/trainer.py` is a whole script.

Checkpoints of a connected Trainer hold the folder `pstar` (`saving/checkpoint.py`) in place of `optimizer.pt`; with it
`trainer.train(resume_from_checkpoint=)` goes on bit by bit, under another plan too. Scheduler, random number generators
and the position in the data are the Trainer's own.

Tried with transformers 5.23 and accelerate 1.15; a version that looks at gradients elsewhere too stops with the
ContractError of `p.grad`. transformers is not imported before `connect`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from executor.engine import Session
from executor.optimizer import OffloadedAdamW
from executor.saving.manifest import find_checkpoint, is_checkpoint
from pstar_sim.errors import CheckpointError, ContractError

__all__ = ["connect"]

FOLDER, SCHEDULER = "pstar", "scheduler.pt"  # the second is the Trainer's own name


def connect(trainer: Any) -> Any:
    """Make a `transformers.Trainer(model=prepared, optimizers=(optimizer, scheduler))` run by the plan; the same
    trainer.

    Raises ContractError, naming the argument, for what the plan was not made for: another `max_grad_norm`,
    `gradient_accumulation_steps` or `per_device_train_batch_size`, mixed precision by autocast (the plan is for the
    model's own dtype), checkpointing or compilation switched on by the Trainer, `load_best_model_at_end`.
    """
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate's wrapper after train()
    if not isinstance(optimizer, OffloadedAdamW):
        raise ContractError(
            f"executor.hf.connect: the Trainer's optimizer is {type(trainer.optimizer).__name__}; give it what "
            "executor.prepare returned: Trainer(model=model, optimizers=(optimizer, scheduler))"
        )
    session = optimizer.session
    if trainer.model is not session.model:
        raise ContractError(
            f"executor.hf.connect: the Trainer's model ({type(trainer.model).__name__}) is not the one its optimizer "
            "was prepared with"
        )
    if session.ranks is not None:
        raise ContractError(
            "executor.hf.connect: a Trainer of several processes is not supported; write the loop, or use "
            "`torchrun -m executor PLAN --model M`, for a plan of several ranks"
        )
    _check_arguments(trainer.args, session)
    accelerator = trainer.accelerator
    accelerator.device_placement = False  # the plan says where things are; states would be copied to be put back
    norm = _Norm(session)
    accelerator.clip_grad_norm_ = norm.clip_grad_norm_
    if hasattr(trainer, "_has_mixed_mesh_grads"):  # transformers 5.2x: it looks at p.grad to choose who clips
        trainer._has_mixed_mesh_grads = _one_mesh
    trainer.add_callback(_callback(norm))
    kept = _Kept(trainer, optimizer)
    trainer._save_optimizer_and_scheduler = kept.save
    trainer._load_from_checkpoint = kept.check
    trainer._load_optimizer_and_scheduler = kept.load
    return trainer


def _check_arguments(args: Any, session: Session) -> None:
    w = session.plan.workload
    wanted = args.max_grad_norm or None  # the Trainer's 0 is not clipping
    if wanted != session.max_grad_norm:
        raise ContractError(
            f"TrainingArguments(max_grad_norm={args.max_grad_norm}) and AdamW(max_grad_norm={session.max_grad_norm}): "
            "gradients are clipped inside optimizer.step(), at AdamW's norm; give both the same norm (for no clipping "
            "0.0 to the Trainer and None to AdamW, with a plan made without clipping)"
        )
    accumulated = args.gradient_accumulation_steps
    if accumulated != w.micro_batches:
        raise ContractError(
            f"TrainingArguments(gradient_accumulation_steps={accumulated}), but the plan was made for "
            f"{w.micro_batches} micro-batches per iteration; make the plan for {accumulated} (--micro-batches)"
        )
    if args.per_device_train_batch_size != w.batch:
        raise ContractError(
            f"TrainingArguments(per_device_train_batch_size={args.per_device_train_batch_size}), but the plan was made "
            f"for batches of {w.batch}; make the plan for that batch (--batch)"
        )
    checkpointing = bool(getattr(args, "gradient_checkpointing", False) or getattr(args, "activation_checkpointing", 0))
    if checkpointing and not w.checkpointing:
        raise ContractError(
            "TrainingArguments switch checkpointing on, the plan was made without; enable it in the model before "
            "planning, or plan with --checkpointing"
        )
    for name, why in (
        ("fp16", "loss scaling is AdamW(loss_scale=) here; load the model in float16 and plan for fp16"),
        ("bf16", "the plan is for the model's own dtype; load the model in bfloat16 and plan for bf16"),
        ("torch_compile", "the plan is for the model as it was captured"),
        (
            "load_best_model_at_end",
            "weights alone cannot be loaded into a prepared model; load the best checkpoint afterwards",
        ),
    ):
        if getattr(args, name, False):
            raise ContractError(f"TrainingArguments({name}=True) on a prepared model: {why}")


class _Kept:
    """Takes the place of the Trainer's own saving and loading, which would put states and weights in files that are
    never read."""

    def __init__(self, trainer: Any, optimizer: OffloadedAdamW) -> None:
        self._trainer = trainer
        self._optimizer = optimizer

    def save(self, output_dir: str) -> None:
        """Optimizer and scheduler, into a checkpoint folder of the Trainer's."""
        self._optimizer.save(Path(output_dir) / FOLDER)
        if self._trainer.args.should_save:
            torch.save(self._trainer.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def check(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Takes the place of loading weights; weights come with the states (`load`)."""
        folder = Path(resume_from_checkpoint)
        if not is_checkpoint(find_checkpoint(folder / FOLDER)):
            raise CheckpointError(
                f"resume_from_checkpoint: {folder} has no whole folder {FOLDER!r}; give one that a connected Trainer "
                "saved (not with save_only_model), or load its weights into the model before executor.prepare"
            )

    def load(self, checkpoint: str | None) -> None:
        """Weights, states and scheduler. Raises CheckpointError, before anything changes, where they do not fit."""
        if checkpoint is None:
            return
        self.check(checkpoint)
        path = Path(checkpoint) / SCHEDULER
        if not path.is_file():
            raise CheckpointError(f"resume_from_checkpoint: {path} is not there; give a whole checkpoint")
        try:
            scheduler = torch.load(path, weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"resume_from_checkpoint: {path} cannot be read ({type(error).__name__}); give a whole checkpoint"
            ) from error
        self._optimizer.load(Path(checkpoint) / FOLDER, generators=False)
        self._trainer.lr_scheduler.load_state_dict(scheduler)


def _one_mesh(model: Any) -> bool:
    return False


class _Norm:
    """The global norm of the gradients, which the Trainer asks for before `optimizer.step()` and the session knows
    after it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._asked: torch.Tensor | None = None

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """Takes the place of accelerate's clipping. The step clips; the norm that is returned gets its value when it is
        logged."""
        wanted = None if math.isinf(max_norm) else float(max_norm)
        mine = self.session.max_grad_norm
        if norm_type != 2 or (wanted is not None and wanted != mine):
            raise ContractError(
                f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}) on a prepared model, whose step clips "
                f"the 2-norm at AdamW(max_grad_norm={mine}); use the same"
            )
        if mine is None:
            return None  # a norm is taken only to clip
        self._asked = torch.full((), math.nan)
        return self._asked

    def fill(self) -> None:
        norm = self.session.grad_norm
        if self._asked is not None and norm is not None:
            self._asked.fill_(norm)


def _callback(norm: _Norm) -> Any:
    from transformers import TrainerCallback

    class FillNorm(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Fills in the gradient norm of a step that is logged. Waiting for the norm of every step would hold the
        updates up."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if control.should_log:
                norm.fill()

    return FillNorm()
