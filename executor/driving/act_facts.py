"""Conditions of the cursor's table for one act, and words in its refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from executor.contract import raw_grad
from executor.devices.torch_private import transforms_running
from executor.moments.hooks import ModuleEvent, MomentClock
from executor.off_plan.plan_run import WholeState
from executor.off_plan.shortage import Shortage
from executor.session.accelerated import Accelerated
from executor.session.cursor import Fact
from executor.session.reader import Reader


@dataclass(frozen=True)
class Facts:
    state: WholeState
    reader: Reader
    clock: MomentClock
    shortage: Shortage
    accelerated: Accelerated


class ActFacts:
    """tensor: the call's parameter, -1 for none.
    keeps: `zero_grad` is to keep gradient tensors.
    """

    __slots__ = ("_what", "asks", "event", "keeps", "of", "tensor")

    def __init__(
        self, of: Facts, event: ModuleEvent | None = None, *, tensor: int = -1, what: str = "", keeps: bool = False
    ) -> None:
        self.asks: Mapping[Fact, Callable[[ActFacts], bool]] = _FACTS
        self.of = of
        self.event = event
        self.tensor = tensor
        self.keeps = keeps
        self._what = what

    # -- words of refusals.TEXTS --------------------------------------------------------------------------------------

    @property
    def what(self) -> str:
        return self._what or f"a forward of {self.forward}"

    @property
    def forward(self) -> str:
        return "" if self.event is None else self.event.name.removeprefix("begin:")

    @property
    def module(self) -> str:
        return "" if self.event is None else self.event.module

    @property
    def source(self) -> str:
        """The module whose output a backward came from."""
        return repr(self.module or "the model")

    @property
    def name(self) -> str:
        return self.of.reader.name_of(self.tensor)

    @property
    def iteration(self) -> int:
        return self.of.state.iteration

    @property
    def loading(self) -> str:
        """The call whose load did not end."""
        return self.of.state.at_work.loading

    @property
    def policy(self) -> str:
        return self.of.state.run.plan.policy

    @property
    def planned(self) -> int:
        return self.of.state.run.plan.workload.micro_batches

    @property
    def backward(self) -> int:
        """The backward that begins, from 1."""
        return self.of.state.now.given + 1

    @property
    def setting(self) -> str:
        """Of the number of micro-batches, as in the user's program."""
        return self.of.state.spelling.micro_batches

    @property
    def backwards(self) -> str:
        count = self.of.state.now.backwards
        return f"{count} backward{'s' if count > 1 else ''}"

    @property
    def hooking(self) -> str:
        """How a hook sees or changes a gradient."""
        if self.planned == 1:
            return "register the hook before prepare, or p.register_hook"
        return (
            "use p.register_hook, or make the plan for one micro-batch: with several, a hook of "
            "register_post_accumulate_grad_hook finds one micro-batch's gradient in .grad, not their sum"
        )

    @property
    def subject(self) -> str:
        """What a transform of torch.func met."""
        return f"{self.name!r} is read" if self.tensor >= 0 else f"a forward of {self.forward}"

    @property
    def written_name(self) -> str:
        return self.of.reader.name_of(self.of.reader.written or 0)

    @property
    def switched_name(self) -> str:
        return self.of.reader.name_of(min(self.of.reader.switched))

    @property
    def switched_count(self) -> int:
        return len(self.of.reader.switched)


def _outside(act: ActFacts) -> bool:
    event = act.event
    return event is not None and act.of.reader.updates.scaling is not None and act.of.clock.outside_root(event)


def _expected(act: ActFacts) -> bool:
    return act.event is not None and act.of.state.run.following.moment_of(act.event) is not None


def _consumed(act: ActFacts) -> bool:
    consumed = act.of.reader.consumed
    return bool(consumed) if act.tensor < 0 else act.tensor in consumed


_FACTS: Mapping[Fact, Callable[[ActFacts], bool]] = {
    Fact.TRAINS: lambda act: act.of.reader.trains,
    Fact.BEGINS: lambda act: act.event is None or act.of.clock.outermost(act.event),
    Fact.SWITCHED: lambda act: bool(act.of.reader.switched),
    Fact.OUTSIDE: _outside,
    Fact.ALONE: lambda act: act.of.state.run.timetable.relayed and not act.of.clock.driven,
    Fact.EXPECTED: _expected,
    Fact.FITS: lambda act: act.event is None or act.event.module != "" or act.of.state.run.batches.fits,
    Fact.OUTSTANDING: lambda act: bool(act.of.state.now.outstanding) and not act.of.state.run.following.passes_over,
    Fact.OF_EVALUATION: lambda act: act.event is not None and act.event.micro_batch < 0,
    Fact.PENDING: lambda act: bool(act.of.state.now.arrived) and not act.of.state.cursor.stepped,
    Fact.GIVEN: lambda act: bool(act.of.state.now.arrived or act.of.state.now.missed),
    Fact.ARRIVED: lambda act: bool(act.of.state.now.arrived),
    Fact.ARRIVING: lambda act: raw_grad(act.of.reader.parameters[act.tensor]) is not None,
    Fact.CONSUMED: _consumed,
    Fact.STEPPED: lambda act: act.of.state.cursor.stepped,
    Fact.SURPLUS: lambda act: act.of.state.now.given >= act.planned,
    Fact.UPDATING: lambda act: act.of.reader.updates.running,
    Fact.UNFINISHED: lambda act: act.of.clock.unfinished,
    Fact.COMMITTED: lambda act: act.of.state.cursor.committed == act.of.state.iteration,
    Fact.GIVEN_UP: lambda act: act.of.shortage.given_up,
    Fact.LAST: lambda act: act.of.state.cursor.moment == len(act.of.state.run.timetable.names) - 2,
    Fact.CHANGED: lambda act: act.of.reader.updates.settings_changed(),
    Fact.KEEPS: lambda act: act.keeps,
    Fact.SEVERAL: lambda act: act.of.state.ranks is not None,
    Fact.INSIDE: lambda act: act.of.state.cursor.moment >= 0,
    Fact.UNDUE: lambda act: act.of.accelerated.skips,
    Fact.BACKWARD: lambda act: act.of.state.cursor.moment >= 0 and act.of.state.now.backwards > 0,
    Fact.IN_BACKWARD: lambda act: act.of.clock.in_backward,
    Fact.SCALED: lambda act: act.of.reader.updates.scaling is not None,
    Fact.TRANSFORMED: lambda act: transforms_running(),
    Fact.WRITTEN: lambda act: act.module == "" and act.of.reader.written is not None,
    Fact.DOUBLE: lambda act: act.of.state.run.timetable.moves and act.of.clock.in_backward and torch.is_grad_enabled(),
    Fact.FROZEN: lambda act: act.of.state.run.plan.workload.tensors[act.tensor].frozen,
}
