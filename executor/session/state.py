"""What the parts of a session share.

[Note: one plan] What lives as long as a plan is one value, `RunState.run`, replaced by one assignment, so that an
interruption finds one of both. Parts that outlive a plan read it from the state; others get it in their constructor.
"""

from __future__ import annotations

import logging
from collections import deque

from executor.distributed.ranks import Ranks
from executor.memory.arena import Arena
from executor.memory.contents import Contents
from executor.moments.listener import Listener
from executor.queues.interface import Progress, Queues
from executor.session.at_work import AtWork
from executor.session.cursor import Cursor
from executor.session.iteration import Iteration
from executor.session.spelling import COMMAND, Spelling
from executor.session.timetable import Timetable
from pstar_sim.core.plan import Plan

log = logging.getLogger("executor")


class PlanBytes:
    """A plan with its memory and queues; `off_plan.plan_run.PlanRun` adds the parts.

    queues: replaced for a measurement.
    """

    def __init__(self, plan: Plan, arena: Arena, contents: Contents, queues: Queues) -> None:
        self.plan = plan
        self.arena = arena
        self.backend = arena.backend
        self.contents = contents
        self.queues = queues
        self.progress = Progress(plan)
        self.timetable = Timetable(plan)


class RunState:
    """now: the current iteration, between two the last.
    moment_off_plan: the plan's, for code that runs off plan, -1 without one.
    held: queues stay paused until there is a new plan.
    renewing: values move into a new plan's chunks.
    trained: a Trainer's training is over: `Session.end_after_training`.
    other_shapes: batches on plan of another shape.
    """

    run: PlanBytes

    def __init__(self, ranks: Ranks | None, replan_after: int) -> None:
        self.ranks = ranks
        self.replan_after = replan_after
        self.cursor = Cursor()
        self.at_work = AtWork()
        self.now = Iteration(number=-1)
        self.iteration = 0
        self.moment_off_plan = -1
        self.held = False
        self.renewing = False
        self.closed = False
        self.trained = False
        self.deviations = 0
        self.other_shapes = 0
        self.deviation_log: deque[str] = deque(maxlen=100)
        self.spelling: Spelling = COMMAND  # names of the plan's settings in the user's program
        self.listeners: list[Listener] = []

    @property
    def moment(self) -> int:
        """On plan or off; -1 without one."""
        return self.moment_off_plan if self.cursor.off_plan else self.cursor.moment

    def note_deviation(self, reason: str) -> None:
        self.deviations += 1
        self.note(reason)
        log.info("iteration %d left the plan: %s", self.iteration, reason)

    def note(self, text: str) -> None:
        self.deviation_log.append(f"iteration {self.iteration}: {text}")
