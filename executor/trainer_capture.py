"""What is captured of a Hugging Face trainer: one micro-batch of its own data, with its own loss.

[Note: what is captured] The batch is the largest that the trainer's collator makes of the data set's longest rows. A
loss that is not transformers' (TRL) may read numbers from tensors for its metrics, which a capture cannot follow. What
it runs before (a reference model) is captured; the backward then begins at the outputs of the model's first call with
gradients, and the first iteration measures the rest. Such a loss works on a copy of the trainer, which keeps its
metrics.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.capture import capture_module
from executor.longest_rows import largest_batch
from executor.models import under_autocast
from executor.offloading import traced
from executor.saving.generators import generator_states, set_generators
from executor.session.batches import scalar_of, some_loss
from pstar_sim.errors import ContractError, ModelError


def captured(trainer: Any, spec: Any, dtype: str | None) -> Any:
    """[Note: what is captured]

    dtype: the plan's where the trainer casts by autocast, else None.

    Raises ContractError for a data set without a batch and a trainer that generates within its steps, ModelError as
    `capture_module` does.
    """
    model = trainer.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # beneath adapters of peft
    name = Path(getattr(getattr(model, "config", None), "_name_or_path", "") or type(base).__name__).name
    with _untouched_generators(), _refusing_to_generate(trainer):
        inputs = _example(trainer)
        accumulated = [inputs] * trainer.args.gradient_accumulation_steps
        items = trainer._get_num_items_in_batch(accumulated, trainer.args.device)
        batch = dict(inputs), items
        request = trainer.offload_request
        casts = None if trainer.args.device.type == "cpu" else dtype  # accelerate casts around the model's forward

        def cast(loss: Callable[[nn.Module, Any], torch.Tensor]) -> Callable[[nn.Module, Any], torch.Tensor]:
            return under_autocast(loss, request.kind, casts)

        if _stock(trainer):
            loss = cast(_loss_of(trainer))
            return traced(model, batch, spec, request, loss=loss, name=name)
        followed = cast(_as_far_as_followed(_loss_of(_twin(trainer))))
        try:
            return capture_module(model, batch, name=name, groups=spec, loss=followed, device=request.kind)
        except ModelError:  # it cannot be followed up to the model's call
            call = _call_in(lambda: trainer.compute_loss(model, inputs, num_items_in_batch=items), model)
        some = cast(some_loss)
        return traced(model, call, spec, request, loss=some, name=name)


def _loss_of(trainer: Any) -> Callable[[nn.Module, Any], torch.Tensor]:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value: torch.Tensor = trainer.compute_loss(model, dict(batch[0]), num_items_in_batch=batch[1])
        return value

    return loss


def _as_far_as_followed(loss: Callable[[nn.Module, Any], torch.Tensor]) -> Callable[[nn.Module, Any], torch.Tensor]:
    """Or a scalar of the model's outputs where it fails after the model's call with gradients."""

    def followed(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs: list[Any] = []

        def see(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled() and not outputs:
                outputs.append(output)

        handle = model.register_forward_hook(see)
        try:
            return loss(model, batch)
        except Exception as error:
            if not outputs:
                raise
            traceback.clear_frames(error.__traceback__)  # their tensors are not the loss's any more
        finally:
            handle.remove()
        return scalar_of(model, outputs.pop())

    return followed


def _twin(trainer: Any) -> Any:
    twin = copy.copy(trainer)
    twin.__dict__.update({name: _copied(value) for name, value in vars(trainer).items()})
    return twin


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        twin = copy.copy(value)
        twin.update({key: _copied(item) for key, item in value.items()})
        return twin
    return copy.copy(value) if isinstance(value, (list, set, deque)) else value


def _stock(trainer: Any) -> bool:
    return str(type(trainer).compute_loss.__module__) == "transformers.trainer"


@contextlib.contextmanager
def _refusing_to_generate(trainer: Any) -> Iterator[None]:
    """A trainer that generates its data (GRPO) would keep what it generates for the capture, and train on it."""
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
    def __init__(self, args: Any, kwargs: Any) -> None:
        self.call = args, kwargs


def _call_in(action: Callable[[], Any], model: nn.Module) -> tuple[Any, Any]:
    """(args, kwargs) of the model's first call with gradients in `action`, which it ends."""

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
    """The largest, or the first if the data set cannot be indexed."""
    loader = trainer.get_train_dataloader()
    batch = largest_batch(getattr(loader, "dataset", None), trainer._train_batch_size, loader.collate_fn)
    batch = next(iter(loader), None) if batch is None else batch
    if not batch:
        raise ContractError("the Trainer's train_dataset gives no batch; give a data set of at least one batch")
    return trainer._prepare_inputs(batch)


@contextlib.contextmanager
def _untouched_generators() -> Iterator[None]:
    """Samplers and collators may draw random numbers."""
    before = generator_states()
    try:
        yield
    finally:
        set_generators(before)
