"""Hosting: protocols for the parts of a session that several of its other parts use.

Each part declares a protocol `Host` with its needs of the session. `Host` inherits a protocol of this file and adds the
needs of that part only. This file imports no part that declares a `Host`, so that no imports form a circle.
"""

from __future__ import annotations

from typing import Protocol

from executor.devices.backend import Backend
from executor.memory.arena import Arena
from executor.memory.contents import Contents
from executor.moments.hooks import MomentClock
from executor.session.at_work import AtWork
from executor.session.cursor import Cursor
from executor.session.iteration import Iteration
from executor.session.others import Others
from executor.session.spelling import Spelling
from executor.session.timetable import Timetable
from pstar_sim.core.plan import Plan

__all__ = ["BytesHost", "LoopHost", "PlanHost"]


class PlanHost(Protocol):
    """The plan that a run follows, and the run's position.

    iteration: number of the current or next iteration, from 0.
    spelling: names of the plan's settings in the user's program.
    """

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
    def closed(self) -> bool: ...
    @property
    def spelling(self) -> Spelling: ...


class BytesHost(PlanHost, Protocol):
    """`PlanHost`, and the parts of the session that move bytes."""

    @property
    def arena(self) -> Arena: ...
    @property
    def contents(self) -> Contents: ...
    @property
    def backend(self) -> Backend: ...


class LoopHost(PlanHost, Protocol):
    """`BytesHost`, and the parts of the session that deal with the training loop.

    ranks: None if this process is the only rank.
    """

    @property
    def at_work(self) -> AtWork: ...
    @property
    def clock(self) -> MomentClock: ...
    @property
    def ranks(self) -> Others | None: ...
