"""Compares the next batch with the plan's.

A smaller one runs on plan: [Note: a smaller batch] in forms.py. One of another shape is captured under fake tensors,
and runs on plan if its tide is nowhere higher than the plan's. Otherwise it has outgrown the plan:
off_plan/outgrown.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from executor.activations.planned import as_planned, recomputing
from executor.distributed.ranks import CountOf
from executor.memory.arena import Arena
from executor.models import map_batch
from executor.moments.hooks import tensors_of
from executor.session.forms import Form, covers, elements, form_of, names_of
from executor.session.reader import Reader
from executor.session.state import PlanBytes, RunState
from pstar_sim.core.step import Place
from pstar_sim.errors import DoesNotFit, ModelError, PlanError
from pstar_sim.units import format_bytes
from pstar_sim.workload.optimizers import MASTER_LIST
from pstar_sim.workload.relay import relay
from pstar_sim.workload.workload import Moment, Phase, Workload, repeat_micro_batch

MOST_KNOWN = 64  # captured forms whose moments are kept, and forms that are kept as covered or doubted


def movable(arena: Arena, chunk: int) -> bool:
    """Whether the chunk's working list may leave the gpu, because its values can be restored."""
    if arena.has(Place.GPU, chunk, MASTER_LIST):
        return False
    below = (Place.HOST, Place.NVME)
    return any(arena.has(place, chunk, name) for place in below for name in ("param", MASTER_LIST))


class Capture(Protocol):
    """`executor.capture.capture_module`, bound to a device."""

    def __call__(
        self, model: nn.Module, batch: Any, /, *, name: str, loss: Callable[[nn.Module, Any], torch.Tensor]
    ) -> Workload: ...


class Shapes:
    """skeleton: the model without memory, None where it cannot be copied.
    planned: the plan's batch, None if not known.
    covered: other batches that need no more memory.
    """

    def __init__(self, model: nn.Module, skeleton: nn.Module | None, capture: Capture) -> None:
        self.model = model
        self.skeleton = skeleton
        self.names = names_of(model)  # arguments that the forward takes by position
        self.planned: Form | None = None
        self.covered: tuple[Form, ...] = ()
        self._capture = capture

    def plan_for(self, form: Form, *, covered: tuple[Form, ...] = ()) -> None:
        self.planned = form
        self.covered = tuple(other for other in covered if not covers(form, other))[-MOST_KNOWN:]

    def covers(self, form: Form) -> bool:
        """[Note: a smaller batch]"""
        forms = self.covered if self.planned is None else (self.planned, *self.covered)
        return any(covers(other, form) for other in forms)

    def capture(self, planned: Workload, args: Any, kwargs: Any) -> Workload:
        """The model's workload for this batch, with activations as planned. Raises ModelError where that fails."""
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
        """Copies `training` and the modules' own switches to the skeleton."""
        assert self.skeleton is not None
        copies = dict(self.skeleton.named_modules())
        for name, module in self.model.named_modules():
            twin = copies.get(name)
            if twin is None:
                continue
            for key, value in module.__dict__.items():
                if not key.startswith("_") and key in twin.__dict__ and not callable(value):
                    twin.__dict__[key] = value


@dataclass(frozen=True, slots=True)
class _Known:
    """moments: under fake tensors.
    fits: its tide is nowhere higher than the plan's, and it reads no more parameters.
    """

    moments: tuple[Moment, ...]
    fits: bool


class Batches:
    """samples: items (sequences, tokens) in the last loss's mean, 1 on one rank.
    moments: of the last batch, under fake tensors; None where it has the plan's shape, is smaller, or is not compared
        (an evaluation, an empty batch, a plan without steps).
    form: of the last training batch, () before the first.
    last: (args, kwargs) of the last training forward on meta, None before the first.
    planned: it has the plan's shape, or is not compared.
    fits: it may run on plan.
    captured: inside its step.
    """

    def __init__(self, run: PlanBytes, state: RunState, reader: Reader, shapes: Shapes, count: CountOf) -> None:
        self.run = run
        self.ranks = state.ranks
        self.reader = reader
        self.shapes = shapes
        self.samples = 1.0
        self.moments: tuple[Moment, ...] | None = None
        self.form: Form = ()
        self.last: tuple[Any, Any] | None = None
        self.planned = self.fits = True
        self.captured = False
        self._state = state
        self._count = count
        self._known: OrderedDict[Form, _Known] = OrderedDict()  # the form used last is the last
        self._doubted: OrderedDict[Form, None] = OrderedDict()  # smaller forms that did not keep to the plan

    def see(self, args: Any, kwargs: Any) -> None:
        """A batch whose forward is about to begin, captured where its form is new."""
        shapes = self.shapes
        self.samples = self._counted(args, kwargs) if self.ranks is not None else 1.0
        self.moments, self.planned, self.fits, self.captured = None, True, True, False
        if not self.reader.trains or self.run.timetable.on_demand_only or not self.samples:
            return  # an empty batch has nothing to compare
        # Only the batch's form: keeping the batch would keep its memory.
        self.last = map_batch((args, kwargs), _without_memory)
        self.form = form = form_of(args, kwargs, shapes.names)
        if self._is_planned(form):
            shapes.planned = form
            return
        self.planned = False
        if shapes.covers(form) and form not in self._doubted:
            return
        self.captured = form not in self._known
        if self.captured:
            captured = shapes.capture(self.run.plan.workload, args, kwargs)
            fits = self._fits(captured.moments) and self._reads_as_planned(captured)
            _keep(self._known, form, _Known(captured.moments, fits))
            if self._known[form].fits and form not in self._doubted:
                shapes.covered = (*shapes.covered, form)[-MOST_KNOWN:]
        self._known.move_to_end(form)
        self.moments, self.fits = self._known[form].moments, self._known[form].fits

    def doubt(self) -> None:
        """The last batch left the plan: if it ran without a capture, one comes before the next run."""
        if not self.planned and self.form not in self._known:
            _keep(self._doubted, self.form, None)

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
        """Sequences of this rank; a plan for unequal shares is for the largest."""
        batch = self.run.plan.workload.batch
        if self.ranks is None:
            return batch
        shares = [rank.batch_share for rank in self.run.plan.machine.ranks]
        return round(batch * shares[self.ranks.rank] / max(shares))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the last training batch's first tensor with dimensions."""
        return next((tuple(t.shape) for t in tensors_of(self.last) if t.dim()), ())

    @property
    def share(self) -> float:
        planned = self.shapes.planned
        if self.planned or planned is None:
            return 1.0
        return elements(self.form) / max(1, elements(planned))

    def _fits(self, moments: tuple[Moment, ...]) -> bool:
        """On plan; in a relay, whose moments hold other micro-batches' bytes, if no dimension is longer."""
        w = self.run.plan.workload
        body = self._body()
        if len(moments) - 1 != len(body) or any(a.name != b.name for a, b in zip(moments, body)):
            return False
        if w.relayed:
            planned = self.shapes.planned
            if planned is not None:
                return covers(planned, self.form)
            return all(size <= most for size, most in zip(self.shape, (self.planned_size, w.sequence)))
        return all(a.peak_bytes <= b.peak_bytes for a, b in zip(moments, body))

    def _reads_as_planned(self, captured: Workload) -> bool:
        """A backward that reaches the batch reads the first layers' parameters too."""
        if not self.differentiated:
            return True
        w = self.run.plan.workload
        planned = {m.name: set[int]() for m in (*w.moments, *captured.moments)}
        for moment, reads in zip(w.moments, w.reads):
            planned[moment.name].update(reads)
        return all(planned[moment.name].issuperset(reads) for moment, reads in zip(captured.moments, captured.reads))

    @property
    def differentiated(self) -> bool:
        return any(part.differentiated for part in self.form)

    def _body(self) -> list[Moment]:
        return [m for m in self.run.plan.workload.moments if m.micro_batch == 0 and m.phase is not Phase.ADAM]

    def workload_of_last(self, micro_batches: int) -> Workload:
        """Of batches like the last, captured anew. Raises PlanError before the first training forward, ModelError where
        the model cannot be captured."""
        if self.last is None:
            raise PlanError("no forward of the whole model with gradients was seen; run a training batch first")
        return self.workload_of(self.last, micro_batches)

    def workload_of(self, batch: tuple[Any, Any], micro_batches: int) -> Workload:
        """batch: (args, kwargs) of the model's forward."""
        planned = self.run.plan.workload
        captured = self.shapes.capture(planned, *batch)
        # The same parameters (and their groups, which a capture does not know).
        made = repeat_micro_batch(replace(captured, tensors=planned.tensors), max(1, micro_batches))
        return relay(made, stash="host" if planned.boundaries_on_host else "gpu") if planned.relayed else made

    def _is_planned(self, form: Form) -> bool:
        """Where the plan's form is unknown, it is that of the first batch whose first tensor with dimensions has its
        batch and (of tokens) sequence."""
        planned = self.shapes.planned
        if planned is not None:
            return form == planned
        if self.differentiated:
            return False
        first = next((t for t in tensors_of(self.last) if t.dim()), None)
        if first is None:
            return True
        tokens = first.dim() == 2 and not first.is_floating_point()
        return first.shape[0] == self.planned_size and (not tokens or first.shape[1] == self.run.plan.workload.sequence)

    @property
    def outgrown(self) -> bool:
        """Whether the last batch has the plan's moments and needs more memory in one."""
        return not self.fits and [m.name for m in (self.moments or ())[:-1]] == [m.name for m in self._body()]

    def above(self) -> str:
        """Where the last batch is most above the plan, in words."""
        if not self.outgrown:
            return ""
        moments, body = self.moments or (), self._body()
        at = max(range(len(body)), key=lambda i: moments[i].peak_bytes - body[i].peak_bytes)
        return (
            f"{format_bytes(moments[at].peak_bytes)} of non-model data at moment {at}, {moments[at].name}, where the "
            f"plan has {format_bytes(body[at].peak_bytes)}"
        )

    def refusal(self) -> DoesNotFit | None:
        """Where a moment of the last batch cannot run on demand within the gpu budget."""
        plan, table, moments = self.run.plan, self.run.timetable, self.moments or ()
        worst, at = 0, 0
        for m, moment in enumerate(moments):
            chunks = table.reads[m] if len(moments) == len(table.names) else table.read_in(moment.name)
            need = sum(plan.layout.payload_bytes(c, "param") for c in chunks if movable(self.run.arena, c))
            if table.permanent_bytes + need + moment.peak_bytes > worst:
                worst, at = table.permanent_bytes + need + moment.peak_bytes, m
        if worst <= plan.gpu_budget_bytes:
            return None
        w = plan.workload
        return DoesNotFit(
            policy=plan.policy,
            place="gpu",
            needed_bytes=worst,
            available_bytes=plan.gpu_budget_bytes,
            what=f"a batch of shape {list(self.shape)} where the plan has batch {w.batch}, sequence "
            f"{w.sequence}: {format_bytes(moments[at].peak_bytes)} of non-model data at moment {at}, "
            f"{moments[at].name}; cut its rows, make a plan for this shape, give more "
            f"{self._state.spelling.gpu_memory}, or recompute activations",
        )


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def _keep(kept: OrderedDict[Form, Any], form: Form, value: Any) -> None:
    kept[form] = value
    kept.move_to_end(form)
    if len(kept) > MOST_KNOWN:
        kept.popitem(last=False)


def some_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """batch: (args, kwargs)."""
    args, kwargs = batch
    return scalar_of(model, model(*args, **kwargs))


def scalar_of(model: nn.Module, output: Any) -> torch.Tensor:
    """The loss or, where the loop computes it, the sum of the outputs."""
    outputs = [t for t in tensors_of(output) if t.requires_grad]
    if not outputs:
        raise ModelError(f"no output of {type(model).__name__} depends on a trainable parameter; leave some trainable")
    scalar = next((t for t in outputs if t.numel() == 1), None)
    return outputs[0].sum() if scalar is None else scalar.reshape(())
