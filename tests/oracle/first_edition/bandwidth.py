"""Rates that queues share while they run: the link of a half-duplex machine, and host DRAM.

[Note: shared rates] A copy or a CPU Adam running alone progresses at speed 1 (nominal seconds per second). Two things
slow it down. On a half-duplex link, h2d and d2h running together get half of the link each. And when all tasks that use
host DRAM together want more bytes per second than it has, all of them slow down by the same factor: DRAM bandwidth /
sum of demands. A demand is the DRAM bytes of the task over its nominal seconds, at its speed on the link. On a
calibrated machine each task also slows the others down by the measured factors (`Machine.slowdowns`): a task's speed is
1 / product of the factors of the tasks beside it. A task that is busy for a part `duty` of its time (a copy over a
throttled link) counts by that part, and is itself slowed down only where its busy part outgrows the rest. Both describe
shortage of the same resources, so the lower of the two speeds holds. Speeds change only when a task joins or leaves.
While nothing is short, nothing is rescheduled, so a task lasts exactly its nominal seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import simpy

__all__ = ["Bandwidth", "SharedRates", "Task"]


class RunningTask(Protocol):
    """The attributes of a task that SharedRates needs: nominal seconds still to do, speed, and the event that its queue
    waits for."""

    left_s: float
    speed: float
    version: int
    done: simpy.Event


T = TypeVar("T", bound=RunningTask)


class SharedRates(Generic[T]):
    """The tasks running now, whose speeds change only when a task joins or leaves. `_speeds` gives their speeds and
    sets `_share`.

    dram_lost_s: integral over time of (1 - DRAM share): the seconds of any interval that were lost to short DRAM.
    """

    def __init__(self, env: simpy.Environment, dram_bytes_per_s: float) -> None:
        self.env = env
        self.dram_bytes_per_s = dram_bytes_per_s
        self._tasks: list[T] = []
        self._since_s = 0.0
        self._share = 1.0
        self._lost_s = 0.0

    @property
    def dram_lost_s(self) -> float:
        return self._lost_s + (self.env.now - self._since_s) * (1.0 - self._share)

    def join(self, task: T) -> simpy.Event:
        """Start the task; the event succeeds when it has ended."""
        self._settle()
        self._tasks.append(task)
        self._retime()
        return task.done

    def _speeds(self) -> list[float]:
        """Returns the speed of each of `_tasks` beside the others."""
        raise NotImplementedError

    def _share_dram(self, wanted_bytes_per_s: float) -> None:
        """Slow all running tasks down by the same factor if DRAM is short."""
        self._share = min(1.0, self.dram_bytes_per_s / wanted_bytes_per_s) if wanted_bytes_per_s > 0 else 1.0

    def _settle(self) -> None:
        """Book the progress made at the old speeds."""
        now = self.env.now
        elapsed = now - self._since_s
        if elapsed > 0:
            self._lost_s += elapsed * (1.0 - self._share)
            for task in self._tasks:
                task.left_s -= elapsed * task.speed
        self._since_s = now

    def _retime(self) -> None:
        """Set new speeds for the running tasks, and a new alarm for each task whose speed changed."""
        for task, speed in zip(self._tasks, self._speeds()):
            if speed != task.speed:
                task.speed = speed
                task.version += 1
                alarm = self.env.timeout(max(0.0, task.left_s) / speed)
                assert alarm.callbacks is not None
                alarm.callbacks.append(self._alarm(task, task.version))

    def _alarm(self, task: T, version: int) -> Callable[[simpy.Event], None]:
        def ring(_: simpy.Event) -> None:
            if task.version == version:
                self._settle()
                self._tasks.remove(task)
                task.version += 1
                self._retime()
                task.done.succeed()

        return ring


class Task:
    """A running step: nominal seconds still to do, its demand on DRAM, and the event its queue waits for.

    queue, duty: see `Bandwidth.run`.
    """

    __slots__ = ("demand", "done", "duty", "left_s", "link", "queue", "speed", "version")

    def __init__(
        self, left_s: float, demand: float, link: bool, done: simpy.Event, queue: str = "", duty: float = 1.0
    ) -> None:
        self.queue = queue
        self.duty = duty
        self.left_s = left_s
        self.demand = demand
        self.link = link
        self.done = done
        self.speed = 0.0
        self.version = 0


class Bandwidth(SharedRates[Task]):
    """The rates of one rank.

    slowdowns: "A_while_B" -> factor, see [Note: shared rates].
    """

    def __init__(
        self,
        env: simpy.Environment,
        dram_bytes_per_s: float,
        duplex: bool,
        slowdowns: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(env, dram_bytes_per_s)
        self.slowdowns = dict(slowdowns or {})
        self.duplex = duplex

    def run(self, seconds: float, dram_bytes: float, link: bool, *, queue: str = "", duty: float = 1.0) -> simpy.Event:
        """Start a task of `seconds` nominal seconds (> 0). Returns the event that succeeds when the task has ended.

        link: whether it is a copy.
        queue: the queue on which it runs.
        duty: part of its seconds in which it is busy.
        """
        return self.join(Task(seconds, dram_bytes / seconds, link, self.env.event(), queue, duty))

    def _speeds(self) -> list[float]:
        copies = sum(task.link for task in self._tasks)
        on_link = 0.5 if copies > 1 and not self.duplex else 1.0
        self._share_dram(sum(task.demand * (on_link if task.link else 1.0) for task in self._tasks))
        return [min(self._share, self._beside(task)) * (on_link if task.link else 1.0) for task in self._tasks]

    def _beside(self, task: Task) -> float:
        """Returns the speed of the task beside the running ones, by the measured factors."""
        if not self.slowdowns:
            return 1.0
        factor = 1.0
        for other in self._tasks:
            if other is not task:
                alone = self.slowdowns.get(f"{task.queue}_while_{other.queue}", 1.0)
                factor *= 1 + (alone - 1) * other.duty
        return 1 / max(1.0, factor * task.duty)
