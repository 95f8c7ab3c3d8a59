"""Batches: compares the next forward's batch with the batch that the plan was made for.

A batch of another shape is captured under fake tensors, on a copy of the model without memory. If its tide is nowhere
higher than the plan's, it runs on plan. If it fits the budget, it runs on demand. Otherwise it is refused before
anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from executor.activations.planned import as_planned, recomputing
from executor.memory.arena import Arena
from executor.models import map_batch
from executor.moments.hooks import tensors_of
from executor.session.hosting import BytesHost, LoopHost
from executor.session.others import CountOf
from executor.session.reader import Reader
from pstar_sim.core.step import Place
from pstar_sim.errors import DoesNotFit, ModelError, PlanError
from pstar_sim.units import format_bytes
from pstar_sim.workload.relay import relay
from pstar_sim.workload.workload import Moment, Phase, Workload, repeat_micro_batch

__all__ = ["Batches", "Capture", "Host", "Shapes", "movable", "some_loss"]


class Host(BytesHost, LoopHost, Protocol):
    """The part of the session that this file uses."""

    @property
    def reader(self) -> Reader: ...
    @property
    def shapes(self) -> Shapes: ...


def movable(arena: Arena, chunk: int) -> bool:
    """Returns whether the chunk's working list may leave the gpu, because its values can be restored."""
    if arena.has(Place.GPU, chunk, "param32"):
        return False
    return arena.has(Place.HOST, chunk, "param") or arena.has(Place.HOST, chunk, "param32")


class Capture(Protocol):
    """Type of `executor.capture.capture_module`, which lies above this file and comes in as an argument."""

    def __call__(
        self, model: nn.Module, batch: Any, /, *, name: str, loss: Callable[[nn.Module, Any], torch.Tensor]
    ) -> Workload: ...


class Shapes:
    """The model under fake tensors, for batches of any shape.

    capture: makes a workload of a model and a batch.

    Attributes:
        skeleton: a copy of the model whose parameters have no memory; None where it cannot be copied.
    """

    def __init__(self, model: nn.Module, skeleton: nn.Module | None, capture: Capture) -> None:
        self.model = model
        self.skeleton = skeleton
        self._capture = capture

    def capture(self, planned: Workload, args: Any, kwargs: Any) -> Workload:
        """Returns the model's workload for a batch of this shape, with each block's activations treated as in the
        plan's workload. Raises ModelError where the model cannot be captured."""
        if self.skeleton is None:
            raise ModelError(
                f"a batch of another shape than planned, and {type(self.model).__name__} cannot be copied for a "
                "capture under fake tensors; make a plan for this shape"
            )
        self.copy_attributes()
        with recomputing(self.skeleton, planned):
            captured = self._capture(self.skeleton, (args, kwargs), name=planned.model, loss=some_loss)
        return as_planned(captured, planned)

    def copy_attributes(self) -> None:
        """Give the skeleton the present plain attributes of the model's modules (`training`, switches of their own)."""
        assert self.skeleton is not None
        copies = dict(self.skeleton.named_modules())
        for name, module in self.model.named_modules():
            twin = copies.get(name)
            if twin is None:
                continue
            for key, value in module.__dict__.items():
                if not key.startswith("_") and key in twin.__dict__ and not callable(value):
                    twin.__dict__[key] = value


class Batches:
    """The batches of one plan.

    count: see `others.CountOf`.

    Attributes:
        samples: number of items (sequences, tokens) that the loss of the last batch is a mean over; 1 on one rank.
        moments: moments of the last batch, under fake tensors; None where the batch has the plan's shape, or is not
            compared (an evaluation, an empty batch, a plan without steps).
        last: (args, kwargs) of the last training forward, tensors on meta; None before the first.
    """

    def __init__(self, host: Host, count: CountOf) -> None:
        self.host = host
        self.samples = 1.0
        self.moments: tuple[Moment, ...] | None = None
        self.last: tuple[Any, Any] | None = None
        self._count = count
        self._known: dict[Any, tuple[Moment, ...] | None] = {}  # shapes -> moments; None: the plan's own shapes

    def see(self, args: Any, kwargs: Any) -> None:
        """Handle the batch with which the root's forward is about to begin. Raises DoesNotFit before anything
        changes."""
        host = self.host
        self.samples = self._counted(args, kwargs) if host.ranks is not None else 1.0
        if not host.reader.trains or host.timetable.on_demand_only:
            self.moments = None
            return
        if not self.samples:  # an empty batch has nothing to compare
            self.moments = None
            return
        # Only the batch's form: keeping the batch would keep its memory.
        self.last = map_batch((args, kwargs), lambda t: torch.empty_like(t, device="meta"))
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors_of((args, kwargs)))
        if shapes not in self._known:
            if self._is_planned(shapes):
                self._known[shapes] = None
            else:
                moments = host.shapes.capture(host.plan.workload, args, kwargs).moments
                self._check_fits(shapes, moments)
                self._known[shapes] = moments
        self.moments = self._known[shapes]

    def _counted(self, args: Any, kwargs: Any) -> float:
        found: Any = self._count(args, kwargs)
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError):
            raise ModelError(
                f"prepare(count=...) gives {found!r:.60} for a micro-batch; let it give a number: over how many "
                "(sequences, tokens) the rank's loss is a mean"
            ) from None

    @property
    def planned_size(self) -> int:
        """Number of sequences of this rank's micro-batch. A plan for ranks with unequal shares is made for the largest
        share."""
        batch = self.host.plan.workload.batch
        if self.host.ranks is None:
            return batch
        shares = [rank.batch_share for rank in self.host.plan.machine.ranks]
        return round(batch * shares[self.host.ranks.rank] / max(shares))

    @property
    def planned(self) -> bool:
        """Whether the last batch has the shape that the plan was made for."""
        return self.moments is None

    @property
    def fits(self) -> bool:
        """Whether the last batch may run on plan: its tide is nowhere higher than the plan's. In a relay, moments hold
        bytes of other micro-batches too; there a batch fits if no dimension is longer than the plan's."""
        moments = self.moments
        if moments is None:
            return True
        w = self.host.plan.workload
        body = [m for m in w.moments if m.micro_batch == 0 and m.phase is not Phase.ADAM]
        if len(moments) - 1 != len(body) or any(a.name != b.name for a, b in zip(moments, body)):
            return False
        if w.relayed:
            shape = next((t.shape for t in tensors_of(self.last) if t.dim()), torch.Size())
            return all(size <= most for size, most in zip(shape, (self.planned_size, w.sequence)))
        return all(a.peak_bytes <= b.peak_bytes for a, b in zip(moments, body))

    def workload_of_last(self, micro_batches: int) -> Workload:
        """Returns the workload of an iteration of `micro_batches` batches like the last one, captured anew. Raises
        PlanError before the first training forward, ModelError where the model cannot be captured."""
        if self.last is None:
            raise PlanError("no forward of the whole model with gradients was seen")
        planned = self.host.plan.workload
        captured = self.host.shapes.capture(planned, *self.last)
        # The same parameters (and their groups, which a capture does not know).
        made = repeat_micro_batch(replace(captured, tensors=planned.tensors), max(1, micro_batches))
        return relay(made, stash="host" if planned.boundaries_on_host else "gpu") if planned.relayed else made

    def _is_planned(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> bool:
        """Returns whether the first tensor with dimensions has the plan's batch and (of tokens) sequence. Only the
        first such batch counts: its shapes become the plan's, and other shapes are captured."""
        w = self.host.plan.workload
        if None in self._known.values():
            return False
        for shape, dtype in shapes:
            if shape:
                tokens = len(shape) == 2 and not dtype.is_floating_point
                return shape[0] == self.planned_size and (not tokens or shape[1] == w.sequence)
        return True

    def _check_fits(self, shapes: Any, moments: tuple[Moment, ...]) -> None:
        """Raise DoesNotFit where a moment needs more than the gpu budget for the payloads that never leave, the chunks
        that the moment reads, and its non-model data."""
        plan, table = self.host.plan, self.host.timetable
        worst, at = 0, 0
        for m, moment in enumerate(moments):
            chunks = table.reads[m] if len(moments) == len(table.names) else table.read_in(moment.name)
            need = sum(plan.layout.payload_bytes(c, "param") for c in chunks if movable(self.host.arena, c))
            if table.permanent_bytes + need + moment.peak_bytes > worst:
                worst, at = table.permanent_bytes + need + moment.peak_bytes, m
        if worst > plan.gpu_budget_bytes:
            first = next((shape for shape, _ in shapes if shape), ())
            w = plan.workload
            raise DoesNotFit(
                policy=plan.policy,
                place="gpu",
                needed_bytes=worst,
                available_bytes=plan.gpu_budget_bytes,
                what=f"a batch of shape {list(first)} where the plan has batch {w.batch}, sequence {w.sequence}: "
                f"{format_bytes(moments[at].peak_bytes)} of non-model data at moment {at}, {moments[at].name}; "
                "cut its rows, or make a plan for this shape",
            )


def some_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Returns a scalar for backward: the model's loss, or (where the loop computes the loss itself) the sum of its
    outputs."""
    args, kwargs = batch
    outputs = [t for t in tensors_of(model(*args, **kwargs)) if t.requires_grad]
    if not outputs:
        raise ModelError(f"no output of {type(model).__name__} depends on a trainable parameter")
    scalar = next((t for t in outputs if t.numel() == 1), None)
    return outputs[0].sum() if scalar is None else scalar.reshape(())
