from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pstar_sim.core.choose import Window, choose
from pstar_sim.core.draft import Draft
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Queue
from pstar_sim.policy.family.course import Course, Knobs
from pstar_sim.policy.family.pace import period_s
from pstar_sim.policy.family.shorter import LeftOut, left_out_of
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.schedule import Modes, Schedule
from pstar_sim.policy.passes.lowering import draft_of
from pstar_sim.policy.passes.write_plan import plan_of


@dataclass(slots=True)
class Attempt:
    """Modes, with the order that `choose` found.

    left_out: [Note: a shorter job].
    followed_s: per iteration, if the plan was followed.
    """

    course: Course
    schedule: Schedule
    draft: Draft
    window: Window
    left_out: LeftOut | None = None
    followed_s: float | None = None
    _plan: Plan | None = field(default=None, compare=False)
    _period_s: float | None = field(default=None, compare=False)

    @property
    def fetched_bytes(self) -> int:
        shown = sum([row.charge.gpu_take for row in self.draft.rows if row.queue is Queue.H2D])
        return shown + (self.left_out.times * self.left_out.fetched_bytes if self.left_out is not None else 0)

    @property
    def busy_s(self) -> tuple[float, float]:
        """Nominal, of CPU Adam and the busier direction of the link."""
        seconds = _work_s(self.draft, self.left_out)
        return seconds[Queue.ADAM], max(seconds[Queue.H2D], seconds[Queue.D2H])

    @property
    def modes(self) -> Modes:
        return self.course.modes

    @property
    def knobs(self) -> Knobs:
        return self.course.knobs

    @property
    def pins(self) -> int:
        return len(self.course.modes.pinned)

    @property
    def fits(self) -> bool:
        """Every step found room, and it was not given up."""
        return self.window.stuck is None and bool(self.window.events)

    @property
    def iteration_s(self) -> float:
        if self.followed_s is not None:
            return self.followed_s
        return self.window.iteration_s + (self.left_out.seconds(self.window) if self.left_out is not None else 0.0)

    def equals(self, other: Attempt) -> bool:
        same = self.iteration_s == other.iteration_s and self.modes == other.modes
        return same and burden_of(self) == burden_of(other)

    def plan(self, choices: Mapping[str, object] | None = None) -> Plan:
        if self._plan is None:
            self._plan = plan_of(self.schedule, self.draft, self.window)
        return replace(self._plan, choices=dict(choices or {}))

    def period_s(self) -> float:
        """Of its plan."""
        if self._period_s is None:
            self._period_s = period_s(self.plan())
        return self._period_s


def burden_of(made: Attempt) -> tuple[int, int]:
    """For `ties.least_of`: bytes fetched and pins. As many go down, but for chunks that the GPU updates."""
    return made.fetched_bytes, made.pins


def attempt(job: Job, modes: Modes, knobs: Knobs | None = None, *, like: Attempt | None = None) -> Attempt:
    """Stuck if a step never finds room.

    like: see `attempt_course`.
    """
    return attempt_course(Course(job, modes, knobs or Knobs()), like=like)


def attempt_course(
    course: Course, *, limit_s: float = math.inf, like: Attempt | None = None, times_left_out: int = 0
) -> Attempt:
    """For a course that is laid out already.

    limit_s: of all micro-batches, beyond which the attempt is given up (`choose`).
    like: an earlier attempt of the job, whose equal rows are used again.
    times_left_out: micro-batches not in the job.
    """
    schedule = course.schedule()
    if like is not None and schedule.rows_as(like.schedule):
        draft = replace(like.draft, room=schedule.room, lead_bytes=schedule.lead_bytes)
    else:
        draft = draft_of(schedule)
    left_out = left_out_of(course.job, draft, times_left_out) if times_left_out else None
    window = least_window(draft, left_out)
    if window.iteration_s <= limit_s:
        window = choose(draft, limit_s=limit_s - (left_out.least_s if left_out is not None else 0.0))
    return Attempt(course, schedule, draft, window, left_out)


def least_window(draft: Draft, left_out: LeftOut | None = None) -> Window:
    """Without events: the busiest queue's work, which no order undercuts."""
    return Window(max(_work_s(draft, left_out).values()), [], draft.gpu_free_bytes, draft.host_free_bytes)


def _work_s(draft: Draft, left_out: LeftOut | None) -> dict[Queue, float]:
    seconds = dict.fromkeys(Queue, 0.0)
    for row in draft.rows:
        seconds[row.queue] += row.charge.seconds
    if left_out is not None:
        for queue, work_s in left_out.work_s.items():
            seconds[queue] += left_out.times * work_s
    return seconds
