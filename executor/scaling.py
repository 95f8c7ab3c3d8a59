"""Loss scaling: keeps fp16 gradients in range.

Gradients are multiplied where they enter an fp16 model and divided in the fp32 update. The scale changes as in
torch.amp.GradScaler: an iteration with a gradient that is not finite updates nothing (no value, moment or step count),
and the scale falls; after `growth_interval` iterations in a row without one it grows.

[Note: where the scale acts] `guard_boundary` puts a view behind every output of the root module, whose backward
multiplies, and one before every input with a gradient, whose backward divides. A tensor hook on the output would be
wrong: an output such as the logits is also an inner value of the loss beside it, whose gradient is scaled already.

The gradient of an fp16 output (logits, from which the loop computes its loss) is rounded to fp16 before it is
multiplied, so small ones are lost. Where the caller has the loss before its backward (a Trainer, Lightning), `of_loss`
multiplies the loss, as GradScaler does, and the boundary nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from executor.devices.updates import norm_of
from executor.moments.nests import map_tensors
from pstar_sim.dtypes import DTYPES
from pstar_sim.errors import PlanError
from pstar_sim.workload.workload import Tensor

log = logging.getLogger("executor")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """The settings of the scale; the defaults are torch.amp.GradScaler's.

    growth_interval: iterations without an overflow after which the scale grows; 0 for a fixed scale (an overflow then
        only skips the update).

    Raises PlanError for numbers out of range.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if not (math.isfinite(self.init_scale) and self.init_scale > 0):
            raise PlanError(f"LossScale: init_scale={self.init_scale} must be a finite number > 0")
        if not self.growth_factor > 1:
            raise PlanError(f"LossScale: growth_factor={self.growth_factor} must be > 1")
        if not 0 < self.backoff_factor < 1:
            raise PlanError(f"LossScale: backoff_factor={self.backoff_factor} must be between 0 and 1")
        if self.growth_interval < 0:
            raise PlanError(f"LossScale: growth_interval={self.growth_interval} must be > 0, or 0 for a fixed scale")


def needs_loss_scaling(tensors: Iterable[Tensor]) -> bool:
    """Whether a parameter is fp16, frozen or not (an adapter in fp32 on an fp16 base)."""
    return any(t.dtype in DTYPES and DTYPES[t.dtype].scaled for t in tensors)


def loss_scale_for(asked: str | float | LossScale | None, tensors: Iterable[Tensor]) -> LossScale | None:
    """The scale that AdamW(loss_scale=asked) means. Raises PlanError for another value."""
    if asked is None:
        return LossScale() if needs_loss_scaling(tensors) else None
    if isinstance(asked, LossScale):
        return asked
    if asked == "dynamic":
        return LossScale()
    if isinstance(asked, (int, float)) and not isinstance(asked, bool):
        return LossScale(init_scale=float(asked), growth_interval=0)
    raise PlanError(
        f"AdamW: loss_scale={asked!r} is not known; use 'dynamic', a number (a fixed scale), executor.LossScale(...), "
        "or None for what the dtype needs (dynamic in fp16)"
    )


class LossScaling:
    """scale: factor by which gradients that arrive now were multiplied."""

    def __init__(self, spec: LossScale) -> None:
        self.spec = spec
        self.scale = spec.init_scale
        self.skipped_steps = 0
        self._good_in_a_row = 0
        self._norms: list[torch.Tensor] = []
        self._on_loss = False

    @property
    def at_boundary(self) -> float:
        """Factor where gradients enter the model."""
        return 1.0 if self._on_loss else self.scale

    @contextlib.contextmanager
    def of_loss(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """For a backward inside this context."""
        self._on_loss = True
        try:
            yield loss * self.scale
        finally:
            self._on_loss = False

    def begin_iteration(self) -> None:
        self._norms = []

    def see(self, gradient: torch.Tensor) -> None:
        """The norm shows elements that are not finite (or beyond 1e19, only in bf16 and fp32)."""
        self._norms.append(norm_of(gradient.reshape(-1), torch.float32))

    def overflowed(self) -> bool:
        """Whether a gradient is not finite; waits for the device that has the norms."""
        if not self._norms:
            return False
        devices: dict[torch.device, list[torch.Tensor]] = {}
        for norm in self._norms:
            devices.setdefault(norm.device, []).append(norm)
        return not all(bool(torch.isfinite(torch.stack(norms)).all()) for norms in devices.values())

    def close_iteration(self, overflowed: bool) -> None:
        """As GradScaler.update does."""
        self._norms = []
        moves = self.spec.growth_interval > 0
        if overflowed:
            self.skipped_steps += 1
            self._good_in_a_row = 0
            if moves:
                before, self.scale = self.scale, self.scale * self.spec.backoff_factor
                if self.scale < 1 <= before:
                    log.warning("gradients overflow at a loss scale of 1: the loss itself may be no longer finite")
            return
        self._good_in_a_row += 1
        if moves and self._good_in_a_row >= self.spec.growth_interval:
            self._good_in_a_row = 0
            grown = self.scale * self.spec.growth_factor
            if math.isfinite(grown):
                self.scale = grown

    def state_dict(self) -> dict[str, float | int]:
        return {
            "scale": self.scale,
            "growth_tracker": self._good_in_a_row,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale = float(state["scale"])
        self._good_in_a_row = int(state["growth_tracker"])
        self.skipped_steps = int(state["skipped_steps"])


class _Boundary(torch.autograd.Function):
    """Multiplies gradients by `factor()`. The result is a view without memory of its own; scalars are copied, because
    loops write into losses (`loss /= n`), which torch forbids in such a view."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: Callable[[], float]) -> torch.Tensor:
        ctx.factor = factor
        return value.clone() if value.numel() == 1 else value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient * ctx.factor(), None


def guard_boundary(
    model: nn.Module,
    scale: Callable[[], float],
    *,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda hook: hook,
) -> list[Any]:
    """[Note: where the scale acts]. Returns the handles.

    scale: read in each backward.
    wrap: applied to both hooks (`executor.moments.compiled.untraced`).
    """

    def shrink() -> float:
        return 1.0 / scale()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        return _bounded(args, shrink, {}), _bounded(kwargs, shrink, {})

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return _bounded(output, scale, {}) if torch.is_grad_enabled() else None

    return [
        model.register_forward_pre_hook(wrap(enter), with_kwargs=True),
        model.register_forward_hook(wrap(leave)),
    ]


def _bounded(value: Any, factor: Callable[[], float], made: dict[int, torch.Tensor]) -> Any:
    def bounded(tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())):
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = _Boundary.apply(tensor, factor)  # type: ignore[no-untyped-call]
        return made[id(tensor)]

    return map_tensors(value, bounded)
