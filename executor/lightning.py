"""Lightning: runs a `LightningModule` by a plan, `Trainer(strategy=OffloadStrategy("24GB"))`.

The first `training_step` is captured with its own batch, planned and prepared; then it runs. `gradient_clip_val`,
`accumulate_grad_batches` and the precisions "bf16-mixed" and "16-mixed" become settings of the plan ([Note: mixed
precision] in offloading.py). Checkpoints are Lightning's own and hold the fp32 masters with the states.

The module becomes the child of a root module, whose hooks run even if `training_step` does not call the module itself.
During the capture, `self.log` and metrics of torchmetrics do nothing; a `training_step` that itself reads numbers from
tensors (`.item()`) cannot be captured. Lightning calls `zero_grad` between forward and backward; under a plan gradients
are cleared right after the optimizer step.

Before the first `training_step` the module and its batches are on the CPU. After `fit` the module is still prepared.
Loading weights (`test(ckpt_path="best")`) ends the run; a second `fit` begins anew, from the weights in the plan's
dtype.

Tested with lightning 2.6.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torchmetrics import Metric, MetricCollection  # Lightning requires it

from executor.capture import capture_module
from executor.describing import description_of
from executor.engine import Session
from executor.offloading import Request, begin, converted, form_seen, plan_for
from executor.optimizer import OffloadedOptimizer
from executor.session.spelling import LIGHTNING
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import ContractError, ModelError

__all__ = ["OffloadStrategy"]

DTYPES = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
WRITERS = (
    callbacks.BaseFinetuning,
    callbacks.BatchSizeFinder,
    callbacks.LearningRateFinder,
    callbacks.ModelPruning,
    callbacks.StochasticWeightAveraging,
    callbacks.WeightAveraging,
)
"""Callbacks that write weights, or choose what is trainable, in the middle of a fit."""


class _StepModule(nn.Module):
    """Calls a step of the LightningModule by its name; in a copy of the root, for batches of another shape, it borrows
    the original's trainer and logs nothing."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self._original = weakref.ref(module)

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module
        original: Any = self._original()
        call = _ForwardRedirection()
        if module is original:
            return call(module, module, step, *args, **kwargs)
        module.trainer = original.trainer
        try:
            with _silent(module):
                return call(module, module, step, *args, **kwargs)
        finally:
            module.trainer = None


def _redirected(root: nn.Module, module: nn.Module, step: str, *args: Any, **kwargs: Any) -> Any:
    """Lightning's redirection would replace the module's forward before the root's call."""
    return root(step, *args, **kwargs)


class OffloadStrategy(SingleDeviceStrategy):
    """Trains by a plan for this machine. Arguments: see `executor.offloading.Request`.

    Raises ContractError, in `fit`, for several devices, several optimizers, manual optimization, clipping by value,
    clipping at another norm than the Trainer's, callbacks of WRITERS, accumulation that changes within a
    fit, and optimizers that no plan has.
    """

    strategy_name = "pstar"

    def __init__(
        self,
        gpu_memory: str | int | None = None,
        *,
        device: str | None = None,
        machine: Machine | str = "here",
        policy: str = "optimal",
        masters: str | None = None,
        disks: Sequence[str | Path] = (),
        on_plan: Callable[[Plan], None] | None = None,
    ) -> None:
        self.request = Request(
            gpu_memory=gpu_memory, device=device, machine=machine, policy=policy, masters=masters, disks=disks,
            on_plan=on_plan,
        )  # fmt: skip
        self.offloaded: OffloadedOptimizer | None = None
        self._root: _StepModule | None = None
        where = self.request.where
        super().__init__(device="cpu" if where == "virtual" else where)
        self._forward_redirection = _redirected  # type: ignore[assignment]

    @property
    def session(self) -> Session:
        """The session of the run. Raises ContractError before the first `training_step`."""
        if self.offloaded is None:
            raise ContractError("OffloadStrategy.session: there is no session before the first training_step")
        return self.offloaded.session

    def model_to_device(self) -> None:
        """Does nothing: the plan decides where parameters are."""

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        where = self.root_device if self._prepared else torch.device("cpu")
        return super().batch_to_device(batch, device or where, dataloader_idx)

    @property
    def _prepared(self) -> bool:
        if self.offloaded is None or self._root is None or self.session.closed:
            return False
        return self._root.module is self.lightning_module

    def setup(self, trainer: Any) -> None:
        fit = trainer.state.fn == "fit"
        if fit and self.offloaded is not None:
            self.session.close()
            self.offloaded = None
        super().setup(trainer)
        module: Any = self.lightning_module
        if fit:
            self._check(trainer)
            self._root = _StepModule(module)
        if fit or self._prepared:
            self.model = self._root

    def _check(self, trainer: Any) -> None:
        module: Any = self.lightning_module
        devices = trainer._accelerator_connector._devices_flag  # as given: Lightning itself ignores it
        if devices not in ("auto", 1, "1") and not (isinstance(devices, list) and len(devices) == 1):
            raise ContractError(
                f"OffloadStrategy runs one process on one device; give devices=1 in place of {devices!r}"
            )
        if len(self.optimizers) != 1 or not module.automatic_optimization:
            raise ContractError(
                f"OffloadStrategy: {len(self.optimizers)} optimizers, automatic_optimization="
                f"{module.automatic_optimization}; a plan is for one optimizer that Lightning steps"
            )
        if trainer.gradient_clip_val and (trainer.gradient_clip_algorithm or "norm") != "norm":
            raise ContractError(
                "OffloadStrategy: gradients are clipped by their norm; leave gradient_clip_algorithm out"
            )
        _check_callbacks(trainer.callbacks)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.offloaded is None:
            self._begin(args, kwargs)
            args, kwargs = move_data_to_device((args, kwargs), self.root_device)
        return super().training_step(*args, **kwargs)

    def _begin(self, args: Any, kwargs: Any) -> None:
        module: Any = self.lightning_module
        plugin: Any = self.precision_plugin
        root: Any = self.model
        (own,) = self.optimizers
        trainer = module.trainer
        norm = trainer.gradient_clip_val or None
        spec = description_of(root, own, max_grad_norm=norm)

        def loss(whole: Any, batch: Any) -> torch.Tensor:
            with plugin.train_step_context():
                out: Any = whole("training_step", *batch[0], **batch[1])
            value: torch.Tensor = out["loss"] if isinstance(out, Mapping) else out
            return value

        with converted(root, DTYPES.get(str(plugin.precision))) as masters:
            with _silent(module), form_seen(root) as form, _explained():
                workload = capture_module(
                    root, (args, kwargs), name=type(module).__name__, groups=spec, loss=loss, device=self.request.kind
                )
            plan = plan_for(
                workload,
                self.request,
                micro_batches=trainer.accumulate_grad_batches,
                settings=Settings(clip=norm is not None),
            )
            self.offloaded = begin(
                root, plan, spec, self.request, optimizer=own, masters=masters, spelling=LIGHTNING, form=form[0]
            )
        own.zero_grad = _nothing  # type: ignore[method-assign]
        plugin.clip_gradients = _clipping_at(norm)
        _update_properties(module, device=self.root_device)  # sets the module's `self.device`
        for part in module.modules():
            if isinstance(part, Metric):
                part.to(self.root_device)  # its states are neither parameters nor buffers
        if getattr(plugin, "scaler", None) is not None:
            plugin.scaler = None  # the session scales the loss: AdamW(loss_scale=)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass from the loss, multiplied by the loss scale. Returns the loss."""
        with (
            contextlib.nullcontext(closure_loss)
            if self.offloaded is None
            else self.session.scaled(closure_loss) as scaled
        ):
            super().backward(scaled, *args, **kwargs)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure (`training_step` and backward), update the parameters and clear the gradients. Returns the
        closure's result."""
        plugin: Any = self.precision_plugin
        done = plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        assert self.offloaded is not None
        self.offloaded.step()
        self.offloaded.zero_grad()
        return done

    def teardown(self) -> None:
        """Tear down as Lightning does, but do not move a prepared module to the CPU."""
        if self.offloaded is not None:
            self.session.state.trained = True
        module = self._lightning_module
        if self._prepared:
            self._lightning_module = None
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns the state of the run's optimizer, in torch.optim.AdamW's form."""
        return super().optimizer_state(optimizer) if self.offloaded is None else self.offloaded.state_dict()


def _check_callbacks(given: Sequence[Any]) -> None:
    for callback in given:
        if isinstance(callback, WRITERS):
            raise ContractError(
                f"OffloadStrategy: the callback {type(callback).__name__} writes weights, or changes what is "
                "trainable, within a fit, and the plan's other copies would not know; leave the callback out"
            )
        scheduled = isinstance(callback, callbacks.GradientAccumulationScheduler)
        if scheduled and len(set(callback.scheduling.values())) > 1:
            raise ContractError(
                f"OffloadStrategy: GradientAccumulationScheduler({callback.scheduling}) changes the number of "
                "micro-batches per step, for which a plan is made; give Trainer(accumulate_grad_batches=) instead"
            )


@contextlib.contextmanager
def _silent(module: nn.Module) -> Iterator[None]:
    """Logging does nothing, and metrics give zeros and keep their states."""
    replaced: list[tuple[nn.Module, dict[str, Any]]] = [(module, dict.fromkeys(("log", "log_dict"), _nothing))]
    for part in module.modules():
        if isinstance(part, (Metric, MetricCollection)):
            result = _no_result(part)
            replaced.append((part, {"forward": result, "update": _nothing, "compute": result}))
    before = [(part, dict(part.__dict__)) for part, _ in replaced]
    for part, functions in replaced:
        part.__dict__.update(functions)
    try:
        yield
    finally:
        for (part, functions), (_, kept) in zip(replaced, before):
            for name in functions:
                del part.__dict__[name]
            part.__dict__.update({name: kept[name] for name in functions if name in kept})


def _no_result(metric: Metric | MetricCollection) -> Callable[..., Any]:
    def result(*_: Any, **__: Any) -> Any:
        names = metric.keys() if isinstance(metric, MetricCollection) else None
        return torch.zeros(()) if names is None else {name: torch.zeros(()) for name in names}

    return result


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        if not isinstance(error.__cause__, DataDependentOutputException):
            raise
        raise ModelError(
            f"{error}. A LightningModule gives self.log the tensor itself, and reads numbers in on_train_batch_end"
        ) from error.__cause__


def _clipping_at(norm: float | None) -> Callable[..., None]:
    """Only checks arguments: the optimizer step clips, at `norm`."""

    def clip_gradients(optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        if clip_val > 0 and (clip_val != norm or gradient_clip_algorithm != "norm"):
            raise ContractError(
                f"clip_gradients(gradient_clip_val={clip_val}, "
                f"gradient_clip_algorithm={str(gradient_clip_algorithm)!r}) on a prepared module, whose step clips the "
                f"norm at Trainer(gradient_clip_val={norm}); give the Trainer that norm"
            )

    return clip_gradients


def _nothing(*_: Any, **__: Any) -> None:
    return None
