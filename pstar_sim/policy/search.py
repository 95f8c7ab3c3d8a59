"""Search: how many chunks to pin, how many to stream, and the knobs around them, each choice played by the event loop.

It begins where the roofline (modes.py) and the closed form for pins alone (pins.py) say, and goes from the best of
these downhill, one thing at a time, until it is as good as the roofline or its effort is used up. The effort is counted
in ops played, not in seconds: equal arguments give equal plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.course import Course, Knobs, Modes
from pstar_sim.policy.ground import Ground
from pstar_sim.policy.modes import interleave, roofline
from pstar_sim.policy.pins import iteration_bounds
from pstar_sim.policy.program import Attempt, play

__all__ = ["Choice", "Search"]

EFFORT_OPS = 150_000  # ops played in the search over one chunk size
GOOD_ENOUGH = 1e-3  # relative distance from the floor of the roofline at which nothing more is tried
BETTER = 1e-5  # relative gain that counts
HOPELESS = 1.003  # an attempt that is so much slower than the best one is not played to its end
MOST_TRIED = 48
KEPT = 2  # attempts that are remembered with their programs
LARGE, MOST_LARGE = 2.5, 3  # a chunk so many times as large as the usual one is large
CALM = 0.02  # weight of the mean of the roofline's terms: of equal maxima the one with slack elsewhere
USUAL = Knobs()
TURNS: tuple[Mapping[str, object], ...] = (
    {"linger": False},
    {"stay": 0.0},
    {"down": "fifo"},
    {"states_first": True},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """pins, streams: numbers of chunks. head: so many of the pins are the chunks used first. front: so many of the
    streams are, before these. large: what becomes of each chunk much larger than the usual ("cpu", "pin" or "stream",
    in order of first use); it counts as so many chunks as it is large."""

    pins: int
    streams: int
    head: int
    front: int = 0
    large: tuple[str, ...] = ()
    knobs: Knobs = USUAL


class Search:
    """tried: choices that were looked at. fastest: the attempts among them that fit, the fastest first, KEPT at most.
    best: seconds of the fastest and its choice. effort_ops: ops that may still be played."""

    def __init__(self, ground: Ground, effort_ops: int) -> None:
        self.ground = ground
        self.effort_ops = effort_ops
        self.tried: set[Choice] = set()
        self.fastest: list[Attempt] = []
        self._played: set[tuple[Modes, Knobs]] = set()  # what different choices may come to
        self.best: tuple[float, Choice] | None = None
        self.least_short_bytes = 0
        self.reason: DoesNotFit | None = None  # why the first choice that did not fit did not
        self.count = len(ground.candidates)
        usual = sorted(ground.sizes[c] for c in ground.candidates)[self.count // 2] if self.count else 1
        # Chunks (a vocabulary matrix) much larger than the usual one, and how many of those they are worth.
        large = [c for c in ground.candidates if ground.sizes[c] > LARGE * usual]
        self.large = {c: round(ground.sizes[c] / usual) for c in large[:MOST_LARGE]}
        self.facts = ground.mode_facts()
        self.first_fit = ground.most_pins()
        asked = ground.point.pins
        self.most = self._most() if not isinstance(asked, int) else min(asked, self._most())
        self.fewest = self.most if isinstance(asked, int) else 0
        pins = np.arange(self.fewest, self.most + 1)
        shares = np.linspace(0.0, 1.0, self.count + 1) if ground.point.streams else np.zeros(1)
        roof = roofline(self.facts, pins.tolist(), shares.tolist())
        calm = roof.seconds + CALM * roof.mean_s
        best = self.fewest + int(calm.min(axis=1).argmin())
        streams = round(float(shares[int(calm[best - self.fewest].argmin())]) * (self.count - best))
        # (pins, streams): the best by the roofline, and fewer pins with so many more streams: what CPU Adam has to do
        # is as it was, which matters most, and there is more room.
        self.starts = [(best, streams)]
        for part in (0.9, 0.8, 0.65) if streams else ():
            number = max(self.fewest, round(part * best))
            self.starts.append((number, streams + best - number))
        if streams and self.facts.pins.barrier:  # and more: what arrives behind the barrier holds everybody up
            for number in ((self.most + best) // 2, self.most):
                if number > best + 4:
                    self.starts.append((number, max(0, streams + best - number)))
        self.alone_s = float(iteration_bounds(self.facts.pins, self.first_fit).min())
        self.roofline_s = float(roof.seconds.min())
        self.floor_s = float(roof.floor_s.min())

    def _most(self) -> int:
        """The most chunks of the usual size that could be pinned anywhere."""
        pinned = self.facts.pins.pinned_bytes
        if not pinned:
            return 0
        room = self.facts.pins.room_bytes
        usual = sorted(pinned)[len(pinned) // 2]
        return max(self.first_fit, min(self.count, room // usual))

    @property
    def good_enough(self) -> bool:
        return self.best is not None and self.best[0] <= self.floor_s * (1 + GOOD_ENOUGH)

    @property
    def spent(self) -> bool:
        return self.effort_ops <= 0 or len(self.tried) >= MOST_TRIED

    def try_one(self, choice: Choice) -> bool:
        """Whether the choice is better than what was found so far."""
        if choice in self.tried or not (self.fewest <= choice.pins <= self.most):
            return False
        if choice.streams < 0 or choice.pins + choice.streams > self.count or self.spent:
            return False
        if choice.streams and not self.ground.point.streams:
            return False
        self.tried.add(choice)
        key = (self._modes(choice), choice.knobs)
        if key in self._played:
            return False
        self._played.add(key)
        found = self._fit(*key)
        if found is None:
            return False
        self.fastest = sorted((*self.fastest, found), key=lambda a: (a.iteration_s, a.fetched_bytes))[:KEPT]
        if self.best is not None and found.iteration_s > self.best[0] * (1 - BETTER):
            return False
        self.best = (found.iteration_s, choice)
        return True

    def _modes(self, choice: Choice) -> Modes:
        g = self.ground
        order, pins, streams = g.candidates, choice.pins, choice.streams
        beside: dict[str, list[int]] = {"cpu": [], "pin": [], "stream": []}
        if choice.large:
            order = [c for c in order if c not in self.large]
            for (c, times), mode in zip(self.large.items(), choice.large):
                beside[mode].append(c)
                pins -= times if mode == "pin" else 0
                streams -= times if mode == "stream" else 0
            pins, streams = max(0, pins), max(0, streams)
        pinned, streamed = interleave(order, g.sizes, pins, streams, choice.head, choice.front)
        return Modes(frozenset((*pinned, *beside["pin"])), frozenset((*streamed, *beside["stream"])))

    def _fit(self, modes: Modes, knobs: Knobs) -> Attempt | None:
        try:
            self.ground.check_host(modes.pinned)
        except DoesNotFit as reason:
            self.reason = self.reason or reason
            return None
        course = Course(self.ground, modes, knobs)
        if course.least_room_bytes < 0:
            self.least_short_bytes = min(self.least_short_bytes or -course.least_room_bytes, -course.least_room_bytes)
            return None
        limit_s = self.best[0] * HOPELESS if self.best is not None else math.inf
        found = play(course, limit_s=limit_s, tolerance=BETTER * 5)
        self.effort_ops -= len(found.program.ops) * (len(found.outcome.periods_s) + 1)
        return found if found.outcome.stuck is None and found.outcome.window else None

    def run(self) -> list[Attempt]:
        """The attempts that fit, as far as they are kept; empty if none does."""
        for choice in self._starts():
            self.try_one(choice)
        step = max(1, self.count // 32)
        while self.best is not None and not self.good_enough and not self.spent:
            if self._descend(step):
                continue
            if step == 1:
                break
            step = max(1, step // 2)
        return self.fastest

    def short(self) -> DoesNotFit:
        """Why nothing fits."""
        if self.reason is not None:
            return self.reason
        budget = self.ground.machine.gpu_budget_bytes
        what = "chunks used in the tightest moment, what visits the GPU beside them and its non-model data"
        needed = budget + max(1, self.least_short_bytes)
        return DoesNotFit(policy=self.ground.name, place="gpu", needed_bytes=needed, available_bytes=budget, what=what)

    def _starts(self) -> Iterator[Choice]:
        alone = int(iteration_bounds(self.facts.pins, self.first_fit).argmin())
        alone = max(self.fewest, min(alone, self.most))
        yield Choice(pins=alone, streams=0, head=alone)
        if self.first_fit == self.count:
            yield Choice(pins=self.count, streams=0, head=self.count)
        if self.good_enough:
            return
        for n, (pins, streams) in enumerate(self.starts):
            yield Choice(pins=pins, streams=streams, head=pins // 5 if n else 0, front=min(2, streams))
        if self.best is not None and self.best[1].streams:
            yield replace(self.best[1], knobs=replace(USUAL, linger=False))
            yield replace(self.best[1], knobs=replace(self.best[1].knobs, down="fifo"))
            yield replace(self.best[1], head=0)
            yield replace(self.best[1], head=self.best[1].pins // 2)
        for modes in self._of_large():
            if self.best is not None and self.best[1].streams:
                yield replace(self.best[1], large=modes)
        if self.best is None:
            yield Choice(pins=self.fewest, streams=0, head=0)
            yield Choice(pins=self.most, streams=0, head=self.most)

    def _of_large(self) -> Iterator[tuple[str, ...]]:
        """Ways to treat large chunks on their own, each tried with the best choice so far."""
        if not self.large:
            return
        first = ("stream", *("cpu",) * (len(self.large) - 1))
        yield first
        yield ("pin", *first[1:])
        if len(self.large) > 1:
            yield ("stream",) * len(self.large)
            yield ("pin",) * len(self.large)
            yield ("stream", *("pin",) * (len(self.large) - 1))

    def _descend(self, step: int) -> bool:
        """Whether some change by `step` was better (on the last round, step 1, also of a knob). A change that is good
        is made again."""
        improved = False
        for pins, streams in ((-1, 1), (1, -1), (0, 1), (0, -1), (-1, 0), (1, 0)):
            while self._change(pins=pins * step, streams=streams * step):
                improved = True
        for head in (1, -1):
            while self._change(head=head * 2 * step):
                improved = True
        if step == 1:
            for knobs in TURNS:
                improved |= self._change(knobs=knobs)
        return improved

    def _change(
        self, pins: int = 0, streams: int = 0, head: int = 0, knobs: Mapping[str, object] | None = None
    ) -> bool:
        assert self.best is not None
        now = self.best[1]
        if self.good_enough:
            return False
        return self.try_one(
            replace(
                now,
                pins=now.pins + pins,
                streams=now.streams + streams,
                head=max(0, min(now.pins + pins, now.head + head)),
                front=min(now.front if now.streams else 2, max(0, now.streams + streams)),
                knobs=replace(now.knobs, **(knobs or {})),  # type: ignore[arg-type]
            )
        )
