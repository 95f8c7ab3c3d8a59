"""What is captured of a trainer of Hugging Face: one micro-batch of its own data, with its own loss.

[Note: what is captured] The batch of the capture is the largest that the trainer's collator makes of the longest rows
of the data set. A trainer with the stock `compute_loss` is captured with this loss. A trainer with a loss of its own
(TRL) may run other models in it and read numbers from tensors for its metrics, which a capture cannot follow. Then only
the model's first call with gradients is captured. The first iteration measures the memory that the loss holds beside
that call (`measuring/first.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.capture import capture_module
from executor.longest_rows import largest_batch
from executor.models import TORCH_DTYPES
from executor.saving.generators import generator_states, set_generators
from executor.session.batches import some_loss
from pstar_sim.errors import ContractError, ModelError

__all__ = ["captured"]


def captured(trainer: Any, spec: Any, dtype: str | None) -> Any:
    """Returns the workload of one of the trainer's micro-batches. See [Note: what is captured].

    spec: the AdamW of the run.
    dtype: the plan's dtype where the trainer casts by autocast, else None.

    Raises ContractError for a data set without a batch and for a trainer that generates within its steps, ModelError as
    `capture_module` does.
    """
    model = trainer.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # beneath adapters of peft
    name = Path(getattr(getattr(model, "config", None), "_name_or_path", "") or type(base).__name__).name
    with _untouched_generators(), _refusing_to_generate(trainer):
        inputs = _example(trainer)
        accumulated = [inputs] * trainer.args.gradient_accumulation_steps
        items = trainer._get_num_items_in_batch(accumulated, trainer.args.device)
        if _stock(trainer):

            def loss(module: nn.Module, batch: Any) -> torch.Tensor:
                value: torch.Tensor = trainer.compute_loss(module, dict(batch[0]), num_items_in_batch=batch[1])
                return value

            return capture_module(
                model, (dict(inputs), items), name=name, groups=spec, loss=_under_autocast(trainer, dtype, loss)
            )
        call = _call_in(lambda: trainer.compute_loss(model, inputs, num_items_in_batch=items), model)
    return capture_module(model, call, name=name, groups=spec, loss=_under_autocast(trainer, dtype, some_loss))


def _stock(trainer: Any) -> bool:
    """Returns whether the loss is transformers' own."""
    return str(type(trainer).compute_loss.__module__) == "transformers.trainer"


def _under_autocast(trainer: Any, dtype: str | None, loss: Callable[[nn.Module, Any], torch.Tensor]) -> Any:
    """Returns the loss to capture with. Tensors of a capture are on the CPU; where the trainer casts on another device,
    the returned loss casts on the CPU.
    """
    if dtype is None or trainer.args.device.type == "cpu":
        return loss

    def cast(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=TORCH_DTYPES[dtype]):
            return loss(model, batch)

    return cast


@contextlib.contextmanager
def _refusing_to_generate(trainer: Any) -> Iterator[None]:
    """Inside this context, `model.generate` raises ContractError: a trainer that generates the data of its own steps
    (GRPO) keeps what it generates for the capture, and would train on it."""
    model = trainer.model
    if not hasattr(model, "generate"):
        yield
        return

    def generate(*_: Any, **__: Any) -> Any:
        raise ContractError(
            f"{type(trainer).__mro__[2].__name__} generates within its steps, which is not supported by a plan; use a "
            "trainer whose batches come from a data set (SFT, DPO), or write the loop (executor.offload)"
        )

    model.generate = generate
    try:
        yield
    finally:
        del model.generate


class _Called(Exception):
    """Ends the trainer's `compute_loss` at the model's first call with gradients."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.call = args, kwargs


def _call_in(action: Callable[[], Any], model: nn.Module) -> tuple[Any, Any]:
    """Returns (args, kwargs) of the first call of the model with gradients in `action`. The call ends `action`."""

    def see(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            raise _Called(args, kwargs)

    handle = model.register_forward_pre_hook(see, with_kwargs=True, prepend=True)
    try:
        action()
    except _Called as found:
        return found.call
    finally:
        handle.remove()
    raise ModelError("the trainer's compute_loss does not call the model with gradients; call the model in it")


def _example(trainer: Any) -> Any:
    """Returns a batch of the trainer's own data: its largest, or its first batch if the data set cannot be indexed."""
    loader = trainer.get_train_dataloader()
    batch = largest_batch(getattr(loader, "dataset", None), trainer._train_batch_size, loader.collate_fn)
    batch = next(iter(loader), None) if batch is None else batch
    if not batch:
        raise ContractError("the Trainer's train_dataset gives no batch; give a data set of at least one batch")
    return trainer._prepare_inputs(batch)


@contextlib.contextmanager
def _untouched_generators() -> Iterator[None]:
    """Inside this context, samplers and collators may draw random numbers. Afterwards the generators are as before."""
    before = generator_states()
    try:
        yield
    finally:
        set_generators(before)
