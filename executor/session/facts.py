"""What one act of the loop is, for the cursor's table: conditions and words of `cursor.Facts`, asked of the session."""

from __future__ import annotations

from typing import Protocol

from executor.hooks import Event, MomentClock
from executor.session.batches import Batches
from executor.session.cursor import Cursor
from executor.session.following import Following
from executor.session.iteration import Iteration
from executor.session.reader import Reader
from executor.session.timetable import Timetable
from executor.session.updates import Updates
from pstar_sim.core.plan import Plan

__all__ = ["ActFacts", "Host"]


class Climbing(Protocol):
    """What is asked of `off_plan.ladder.Ladder`."""

    @property
    def given_up(self) -> bool: ...


class Host(Protocol):
    """What is asked of the session."""

    @property
    def plan(self) -> Plan: ...
    @property
    def timetable(self) -> Timetable: ...
    @property
    def cursor(self) -> Cursor: ...
    @property
    def now(self) -> Iteration: ...
    @property
    def iteration(self) -> int: ...
    @property
    def clock(self) -> MomentClock: ...
    @property
    def reader(self) -> Reader: ...
    @property
    def updates(self) -> Updates: ...
    @property
    def following(self) -> Following: ...
    @property
    def batches(self) -> Batches: ...
    @property
    def ladder(self) -> Climbing: ...
    @property
    def scaling(self) -> object | None: ...
    @property
    def ranks(self) -> object | None: ...
    @property
    def absent(self) -> object | None: ...


class ActFacts:
    """See `cursor.Facts`. event: the clock's, None for a call. tensor: the parameter that the call is about. what: for
    messages. keeps: gradient tensors are to be kept."""

    __slots__ = ("_what", "event", "host", "keeps", "tensor")

    def __init__(
        self, host: Host, event: Event | None = None, *, tensor: int = -1, what: str = "", keeps: bool = False
    ) -> None:
        self.host = host
        self.event = event
        self.tensor = tensor
        self.keeps = keeps
        self._what = what

    # -- conditions ---------------------------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        return self.host.reader.trains

    @property
    def begins(self) -> bool:
        return self.event is None or self.host.clock.outermost(self.event)

    @property
    def switched(self) -> bool:
        return bool(self.host.reader.switched)

    @property
    def outside(self) -> bool:
        event = self.event
        return event is not None and self.host.scaling is not None and self.host.clock.outside_root(event)

    @property
    def expected(self) -> bool:
        return self.event is not None and self.host.following.moment_of(self.event) is not None

    @property
    def fits(self) -> bool:
        return self.event is None or self.event.module != "" or self.host.batches.fits

    @property
    def outstanding(self) -> bool:
        return bool(self.host.now.outstanding) and self.host.absent is None

    @property
    def of_evaluation(self) -> bool:
        return self.event is not None and self.event.micro_batch < 0

    @property
    def pending(self) -> bool:
        return self.arrived and not self.stepped

    @property
    def given(self) -> bool:
        return self.arrived or bool(self.host.now.missed)

    @property
    def arrived(self) -> bool:
        return bool(self.host.now.arrived)

    @property
    def consumed(self) -> bool:
        return bool(self.host.reader.consumed) if self.tensor < 0 else self.tensor in self.host.reader.consumed

    @property
    def stepped(self) -> bool:
        return self.host.cursor.stepped

    @property
    def surplus(self) -> bool:
        return self.host.now.backwards >= self.planned

    @property
    def updating(self) -> bool:
        return self.host.updates.running

    @property
    def unfinished(self) -> bool:
        return self.host.clock.unfinished

    @property
    def committed(self) -> bool:
        return self.host.cursor.committed == self.iteration

    @property
    def given_up(self) -> bool:
        return self.host.ladder.given_up

    @property
    def last(self) -> bool:
        return self.host.cursor.moment == len(self.host.timetable.names) - 2

    @property
    def changed(self) -> bool:
        return self.host.updates.settings_changed()

    @property
    def several(self) -> bool:
        return self.host.ranks is not None

    @property
    def inside(self) -> bool:
        return self.host.cursor.moment >= 0

    @property
    def frozen(self) -> bool:
        return self.host.plan.workload.tensors[self.tensor].frozen

    # -- words --------------------------------------------------------------------------------------------------------

    @property
    def what(self) -> str:
        return self._what or f"a forward of {self.forward}"

    @property
    def forward(self) -> str:
        """The module whose forward begins."""
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
        return self.host.reader.name_of(self.tensor)

    @property
    def iteration(self) -> int:
        return self.host.iteration

    @property
    def planned(self) -> int:
        return self.host.plan.workload.micro_batches

    @property
    def backward(self) -> int:
        return self.host.now.backwards + 1

    @property
    def switched_name(self) -> str:
        return self.host.reader.name_of(min(self.host.reader.switched))

    @property
    def switched_count(self) -> int:
        return len(self.host.reader.switched)
