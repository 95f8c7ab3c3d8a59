"""How many chunks to pin and stream, and the knobs; `choose` times each trial.

It begins with the numbers of the roofline (modes.py) and the closed form for pins (pins.py), and goes downhill from the
best, one change at a time, then again from trials that this does not reach (another knob, other modes for the largest
chunks), until a plan is as good as the roofline or the effort is used up. Effort is scheduled steps, not seconds, so
equal arguments give equal plans.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import NamedTuple, TypeVar

import numpy as np

from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.family.attempt import Attempt, attempt_course, burden_of
from pstar_sim.policy.family.course import Course, Knobs
from pstar_sim.policy.family.disks import apart, with_disks
from pstar_sim.policy.family.modes import Roofline, interleave, mode_facts, roofline
from pstar_sim.policy.family.pins import iteration_bounds, least_of_rivals, most_pins_of
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.schedule import Modes, modes_of
from pstar_sim.policy.kit.ties import least_of
from pstar_sim.policy.passes.feasibility import check_host

T = TypeVar("T")

# [Note: what the constants buy] For each constant of the search, benchmarks/search_constants.md says how another
# value changes iterations, bytes and effort. The comments here say what the constants are for.
# The search ends at this relative distance from the floor: the GPU is then busy nearly all the time.
GOOD_ENOUGH = 1e-3
HOPELESS = 1.003  # an attempt slower than `Search.here` by this factor is not scheduled to its end
# A chunk LARGE times as large as the median chunk has a mode of its own, and all combinations of such modes are tried.
# Without these modes Llama-3-8B on an h100 is faster, because the effort goes into the other numbers, but most jobs of
# Qwen2.5-7B are slower: a seventh of its parameters is vocabulary. MOST_LARGE bounds the number of these chunks: a
# Llama 30B has 182 of them.
LARGE, MOST_LARGE = 2.5, 3
# The first descent begins with changes by the number of chunks divided by FIRST_STRIDE, later descents with changes by
# the number divided by NEXT_STRIDE. All descents end with changes by 1.
FIRST_STRIDE, NEXT_STRIDE = 6, 32
# Number of streams taken from the chunks used first, which have the least time between their last gradient and their
# next use.
FRONT = 2
# Largest number of points of the roofline along pins and along streams, and number of points along sums on the GPU.
POINTS, SUMS = 41, 17
MOST_PAIRS = 250_000  # pairs of pins and streams that the roofline evaluates: 10,000 chunks would take gigabytes
# Shares of the bytes without room between two micro-batches for which sums make room. The search begins at the best
# trial of the roofline with each share. The roofline does not know how much room sums on their way take, so its best
# share is often not the best.
SPILLS = (0.0, 0.5, 0.75)
# Behind a barrier, more pins in place of streams hardly change the roofline, because either needs room there. Streams
# take turns on the link, which the roofline does not count, so a plan with more pins is often faster. The search begins
# with several numbers of pins for which the roofline is slower than its minimum by at most the factor FLAT.
FLAT = 1.015
# Changes of (sums on the host, sums that spill) that a descent tries.
SUMS_TURNS = ((-1, 1), (1, -1), (-1, 0), (1, 0), (0, 1), (0, -1))
# A random trial changes pins and streams by at most WANDER times the number of chunks. The search goes downhill from
# random trials that are slower than the best by at most the factor WANDER_LIMIT.
WANDER, WANDER_LIMIT = 0.04, 1.02
# When nothing else is left to try, at most so many chunks are fetched ahead: more may take the link or room from an
# urgent copy.
AHEAD = (1, 2)
USUAL = Knobs()  # knobs with which a search begins


def _coarse(points: Sequence[T]) -> list[T]:
    chosen = np.linspace(0, len(points) - 1, min(POINTS, len(points))).round().astype(int)
    return [points[n] for n in chosen]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """head: pins among the first chunks.
    front: streams among them, before the head.
    hosts: unpinned chunks with gradients added on the host, streamed ones last.
    spills: chunks whose sum on the GPU goes to the host between two micro-batches, spread evenly.
    large: mode of each chunk much larger than the median, "cpu", "pin" or "stream", by first use; it counts as several,
        by size.
    """

    pins: int
    streams: int
    head: int
    front: int = 0
    hosts: int = 0
    spills: int = 0
    large: tuple[str, ...] = ()
    knobs: Knobs = USUAL


def _pinning(trial: Trial, pins: int) -> Trial:
    streams = max(0, trial.streams + trial.pins - pins) if trial.streams else 0
    return replace(trial, pins=pins, streams=streams, head=min(trial.head, pins), front=min(trial.front, streams))


class _Start(NamedTuple):
    seconds: float
    pins: int
    streams: int
    hosts: int
    spills: int


class Search:
    """shown: the attempts' job: `job`, or with fewer micro-batches.
    effort_ops: steps still to schedule, one per chunk for a trial given up before; until a trial fits, there is no
        limit.
    no_room: trial without room -> the nearest with room, None until sought.
    tried: trial -> seconds, inf without room or too slow.
    fastest: at most two, first the one with least burden among equals (ties.py).
    starts: the roofline's best for each of SPILLS (or 0 alone), behind a barrier with several numbers of pins, fastest
        first.
    """

    def __init__(self, job: Job, short: Job | None = None) -> None:
        """short: with fewer micro-batches ([Note: a shorter job] in shorter.py)."""
        self.job = job
        self.shown = short or job
        self._times_left_out = job.workload.micro_batches - self.shown.workload.micro_batches
        self.effort_ops = self.spent_ops = 0
        self.exhausted = False
        self.no_room: dict[Trial, Trial | None] = {}
        self._tight = False  # whether the latest course had no room
        self._must_try = False  # whether trials are made without effort
        self.tried: dict[Trial, float] = {}
        self.fastest: list[Attempt] = []
        self._seconds_of: dict[tuple[Modes, Knobs], float] = {}  # seconds of an attempt, which several trials may share
        self._busy: dict[tuple[Modes, Knobs], tuple[float, float]] = {}  # `Attempt.busy_s` of attempts that fit
        self.best: tuple[float, Trial] | None = None
        self.here: tuple[float, Trial] | None = None
        self.begun = False  # whether the starts were tried
        self.descended = False  # whether the search has gone downhill
        self.least_short_bytes = 0
        self.reason: DoesNotFit | None = None  # of the trials without room on the host, the least need
        self.count = len(job.candidates)
        usual = sorted(job.sizes[c] for c in job.candidates)[self.count // 2] if self.count else 1
        # Chunks (such as a vocabulary matrix) much larger than the median chunk -> how many median chunks each of them
        # counts as.
        large = [c for c in job.candidates if job.sizes[c] > LARGE * usual]
        self.large = {c: round(job.sizes[c] / usual) for c in large[:MOST_LARGE]}
        self.surplus = sum(self.large.values()) - len(self.large)  # count of chunks that the large chunks add
        self.facts = mode_facts(job)
        self.first_fit = most_pins_of(job)
        asked = job.point.pins
        self.most = self._most() if not isinstance(asked, int) else min(asked, self._most())
        self.fewest = self.most if isinstance(asked, int) else 0
        pins = list(range(self.fewest, self.most + 1))
        shares = np.linspace(0.0, 1.0, self.count + 1 if job.point.streams else 1).tolist()
        sums = np.linspace(0.0, 1.0, SUMS if job.may_sum else 1).tolist()
        if job.may_sum or len(pins) * len(shares) > MOST_PAIRS:
            pins, shares = _coarse(pins), _coarse(shares)
        self.starts: list[_Start] = []
        self.floor_s = math.inf
        for spill in SPILLS if job.may_sum else (0.0,):
            roof = roofline(self.facts, pins, shares, sums, spill=spill)
            self.floor_s = min(self.floor_s, float(roof.floor_s.min()))
            self.starts += self._best_starts(roof, pins, shares, sums)
        self.starts = sorted(start for start in set(self.starts) if start.seconds < math.inf)
        # The best trial of a roofline without the term of `_in_turn_s`. It lies far from some starts, where few large
        # chunks stand between.
        roof = roofline(self.facts, pins, shares, sums, in_turn=False) if job.may_sum else roof
        self.without_turns = self._best_start(roof, pins, shares, sums)
        # The best point without sums on the GPU: its seconds, pins and streams.
        p, z = np.unravel_index(int(roof.seconds[..., 0].argmin()), roof.seconds.shape[:2])
        self.without_sums = float(roof.seconds[p, z, 0]), pins[p], round(shares[z] * (self.count - pins[p]))
        self.alone_s = float(iteration_bounds(self.facts.pins, self.first_fit).min())
        self.rivals_s = least_of_rivals(self.facts.pins, self.first_fit)

    def _best_starts(
        self, roof: Roofline, pins: Sequence[int], shares: Sequence[float], sums: Sequence[float]
    ) -> list[_Start]:
        """The roofline's best; behind a barrier also those with the smallest, middle and largest number of pins within
        FLAT of its minimum."""
        least_s = roof.seconds.min(axis=(1, 2))
        chosen = {int(least_s.argmin())}
        if self.facts.pins.barrier:
            flat = np.flatnonzero(least_s <= least_s.min() * FLAT)
            chosen.update(int(flat[k]) for k in (0, len(flat) // 2, -1))
        return [self._best_start(roof.at(p), pins[p : p + 1], shares, sums) for p in sorted(chosen)]

    def _best_start(
        self, roof: Roofline, pins: Sequence[int], shares: Sequence[float], sums: Sequence[float]
    ) -> _Start:
        p, z, g = map(int, np.unravel_index(int(roof.seconds.argmin()), roof.seconds.shape))
        moving = self.count - pins[p]
        hosts = round((1 - sums[g]) * moving) if self.job.may_sum else 0
        spills = round(float(roof.spilt[p, z, g]) * self.count)
        return _Start(float(roof.seconds[p, z, g]), pins[p], round(shares[z] * moving), hosts, spills)

    def _most(self) -> int:
        pinned = self.facts.pins.pinned_bytes
        if not pinned:
            return 0
        room = self.facts.pins.room_bytes
        usual = sorted(pinned)[len(pinned) // 2]
        return max(self.first_fit, min(self.count, room // usual))

    @property
    def seconds(self) -> float:
        return self.best[0] if self.best is not None else math.inf

    @property
    def good_enough(self) -> bool:
        return self.best is not None and self.best[0] <= self.floor_s * (1 + GOOD_ENOUGH)

    @property
    def spent(self) -> bool:
        return self.effort_ops <= 0 and self.best is not None and not self._must_try

    def try_one(self, trial: Trial) -> bool:
        """Whether it is better than `here`."""
        if not (self.fewest <= trial.pins <= self.most) or trial.streams < 0:
            return False
        if trial.pins + trial.streams > self.count + (self.surplus if trial.large else 0):
            return False
        if trial.streams and not self.job.point.streams:
            return False
        if trial not in self.tried:
            if self.spent:
                return False
            self._tight = False
            self.tried[trial] = self._seconds(trial)
            if self._tight:
                self.no_room[trial] = None
        seconds = self.tried[trial]
        if seconds == math.inf or (self.here is not None and seconds >= self.here[0]):
            return False
        self.here = (seconds, trial)
        if self.best is None or seconds < self.best[0]:
            self.best = self.here
        return True

    def _seconds(self, trial: Trial) -> float:
        key = self._key(trial)
        if key not in self._seconds_of:
            found = self._fit(*key)
            if found is not None and found.iteration_s < self.seconds and not found.window.repeats:
                self._follow(found)
            self._seconds_of[key] = math.inf if found is None else found.iteration_s
            if found is not None:
                self._busy[key] = found.busy_s
            if found is not None and not any(found.equals(a) for a in self.fastest):
                known = sorted((*self.fastest, found), key=lambda a: a.iteration_s)
                # Keep the attempt with the least burden among the fast ones, and the fastest of the others: the fastest
                # is never lost.
                first = least_of(known, seconds=lambda a: a.iteration_s, burden=burden_of)
                self.fastest = [first, *(a for a in known if a is not first)][:2]
        return self._seconds_of[key]

    def _follow(self, found: Attempt) -> None:
        """A window that does not repeat may be several per cent off. Those in a shorter job are made again
        (`whole`)."""
        if not self._times_left_out:
            found.followed_s = found.period_s()
            self.effort_ops -= len(found.draft.rows)

    def _key(self, trial: Trial) -> tuple[Modes, Knobs]:
        return self._modes(trial), replace(trial.knobs, waits=True, host_states=frozenset())  # modes say all of these

    def _modes(self, trial: Trial) -> Modes:
        g = self.job
        order, pins, streams = g.candidates, trial.pins, trial.streams
        beside: dict[str, list[int]] = {"cpu": [], "pin": [], "stream": []}
        if trial.large:
            order = [c for c in order if c not in self.large]
            for (c, times), mode in zip(self.large.items(), trial.large):
                beside[mode].append(c)
                pins -= times if mode == "pin" else 0
                streams -= times if mode == "stream" else 0
            pins, streams = max(0, pins), max(0, streams)
        pinned, streamed = interleave(order, g.sizes, pins, streams, trial.head, trial.front)
        modes = modes_of(g, (*pinned, *beside["pin"]), (*streamed, *beside["stream"]))
        if not g.may_sum:
            return with_disks(g, modes, trial.knobs.host_states)
        summed = self._summed(modes, trial.hosts)
        spilt, _ = interleave([c for c in g.candidates if c in summed], g.sizes, min(trial.spills, len(summed)), 0)
        waiting = summed & modes.streamed - set(spilt) if g.may_wait and trial.knobs.waits else frozenset[int]()
        modes = replace(modes, summed=summed, spilt=frozenset(spilt), waiting=waiting)
        return with_disks(g, modes, trial.knobs.host_states)

    def _summed(self, modes: Modes, hosts: int) -> frozenset[int]:
        """Unpinned ones but `hosts`, evenly over those for CPU Adam, then the streamed."""
        g = self.job
        by_adam = [c for c in g.candidates if c not in modes.pinned and c not in modes.streamed]
        streamed = [c for c in g.candidates if c in modes.streamed]
        first, _ = interleave(by_adam, g.sizes, min(hosts, len(by_adam)), 0)
        then, _ = interleave(streamed, g.sizes, max(0, hosts - len(by_adam)), 0)
        return frozenset((*by_adam, *streamed)).difference(first, then)

    def _fit(self, modes: Modes, knobs: Knobs) -> Attempt | None:
        if not self._fits_host(modes):
            return None
        limit_s = self.here[0] * HOPELESS if self.here is not None else math.inf
        if self._adam_s(modes) > limit_s:
            self.effort_ops -= self.count
            return None
        course = Course(self.shown, modes, knobs)
        if course.least_room_bytes < 0:
            self._tight = True
            self.least_short_bytes = min(self.least_short_bytes or -course.least_room_bytes, -course.least_room_bytes)
            return None
        found = attempt_course(course, limit_s=limit_s, times_left_out=self._times_left_out)
        self.effort_ops -= len(found.draft.rows) * (len(found.window.periods_s) + 1)
        return found if found.fits else None

    def _adam_s(self, modes: Modes) -> float:
        facts, on_gpu = self.facts.pins, modes.pinned | modes.summed
        seconds = 0.0
        for c, adam_s, add_s, fold_s in zip(self.job.candidates, facts.adam_s, facts.add_s, facts.fold_s):
            by_cpu = c not in modes.pinned and c not in modes.streamed
            seconds += adam_s if by_cpu else 0.0
            if c not in on_gpu:
                seconds += add_s + (fold_s if by_cpu else 0.0)
        return seconds

    def whole(self) -> list[Attempt]:
        """The fastest, made in the whole job, which is searched if none fits there."""
        if not self._times_left_out:
            return self.fastest
        made: list[Attempt] = []
        for like in self.fastest:
            least_s = min((a.iteration_s for a in made), default=math.inf)
            if least_s <= like.iteration_s * (1 + GOOD_ENOUGH):
                break
            course = Course(self.job, like.modes, like.knobs)
            found = attempt_course(course, limit_s=least_s) if course.least_room_bytes >= 0 else None
            if found is not None and found.fits:
                made.append(found)
        return sorted(made, key=lambda a: a.iteration_s) or Search(self.job).run(self.spent_ops)

    def run(self, effort_ops: int = 0, like: Search | None = None) -> list[Attempt]:
        """Those that fit and were kept.

        like: a search with other chunk sizes, whose best trial is tried.
        """
        self.effort_ops = effort_ops
        self.here = self.best
        if like is not None and like.count:  # a search with count 0 has only small chunks
            self._try_with_room(self._like(like))
        if not self.begun:
            for trial in self._starts(turned=self.best is None):
                self._try_with_room(trial)
            self.begun = self.best is not None
        self.here = self.best
        self._downhill(NEXT_STRIDE if self.descended else FIRST_STRIDE)
        self.descended = True
        before = None
        while self.best is not None and self.best[1] != before:
            before = self.best[1]
            for trial in self._others(before):
                if self.good_enough or self.spent:
                    self.exhausted = self.good_enough
                    return self.fastest
                self.here, least_s = None, self.seconds
                if self.try_one(trial) and self.tried[trial] != least_s:  # an equal plan has the same way down
                    self._downhill()
        self.exhausted = not self.spent
        return self.fastest

    def apart(self, effort_ops: int) -> None:
        """Downhill from the best trial with states `apart`, its pins as they are or first."""
        assert self.best is not None
        self.effort_ops, trial = effort_ops, self.best[1]
        for modes in apart(self.job, self._modes(trial)):
            knobs = replace(trial.knobs, host_states=modes.host_states)
            self.here, self._must_try = None, True
            for head in (trial.head, trial.pins):
                self.try_one(replace(trial, head=head, knobs=knobs))
            self._must_try = False
            self._downhill()

    def wander(self, effort_ops: int) -> None:
        """Random trials near the best, downhill from each nearly as fast. Equal searches make equal trials. Needs a
        trial that fits."""
        self.effort_ops = effort_ops
        random = Random(len(self.tried))
        spread = max(1, round(WANDER * self.count))
        large = list(self._modes_of_large())
        while not self.good_enough and not self.spent:
            assert self.best is not None
            seconds, best = self.best
            pins = max(self.fewest, min(self.most, best.pins + random.randint(-spread, spread)))
            streams = max(0, best.streams + random.randint(-spread, spread)) if best.streams else 0
            hosts, spills = best.hosts, best.spills
            if self.job.may_sum:
                hosts = max(0, min(self.count - pins, hosts + random.randint(-spread, spread)))
            if spills:
                spills = max(0, min(self.count - pins - hosts, spills + random.randint(-spread, spread)))
            trial = replace(
                best,
                pins=pins,
                streams=streams,
                head=min(pins, random.choice((0, pins // 4, pins // 2, pins, best.head))),
                front=min(streams, random.choice((0, FRONT // 2, FRONT, 2 * FRONT))),
                hosts=hosts,
                spills=spills,
                knobs=replace(best.knobs, linger=random.random() < 0.5, states_first=random.random() < 0.25),
            )
            if large and trial.streams and random.random() < 0.5:
                trial = self._beside(trial, random.choice(large))
            self.effort_ops -= max(1, self.count)  # so that a search ends that finds no new trial
            self.here = (seconds * WANDER_LIMIT, best)
            if self.try_one(trial):
                self._downhill()

    def fetch_later(self, effort_ops: int) -> None:
        """The best with fewer chunks fetched ahead, and downhill. Needs a trial that fits."""
        self.effort_ops = effort_ops
        for ahead in AHEAD if self.job.point.prefetch == "edf" else ():
            assert self.best is not None
            if self.good_enough or self.spent:
                return
            self.here, (least_s, best) = None, self.best
            trial = replace(best, knobs=replace(best.knobs, ahead=ahead))
            if self.try_one(trial) and self.tried[trial] != least_s:
                self._downhill()

    def _others(self, best: Trial) -> Iterable[Trial]:
        """Without a barrier, the fastest of `_elsewhere`; behind one, a trial with another knob begins far slower than
        its descent ends."""
        trials = self._elsewhere(best)
        return trials if self.facts.pins.barrier else self._fastest_first(trials)

    def _fastest_first(self, trials: Iterable[Trial]) -> list[Trial]:
        made: list[Trial] = []
        for trial in trials:
            self.here = None
            if self.try_one(trial):
                made.append(trial)
        return sorted(made, key=self.tried.__getitem__)

    def _downhill(self, parts: int = NEXT_STRIDE) -> None:
        stride = max(1, self.count // parts)
        while self.here is not None and not self.good_enough and not self.spent:
            if self._descend(stride):
                continue
            if stride == 1:
                break
            stride = max(1, stride // 2)

    def _like(self, other: Search) -> Trial:
        assert other.best is not None
        trial = other.best[1]
        modes = other._modes(trial)
        mode_of: dict[int, str] = {}
        for c in other.job.candidates:
            mode = "pin" if c in modes.pinned else "stream" if c in modes.streamed else "cpu"
            mode_of.update((slot.tensor, mode) for slot in other.job.layout.chunks[c].slots)
        large = tuple(mode_of.get(self.job.layout.chunks[c].slots[0].tensor, "cpu") for c in self.large)
        times = (self.count + (self.surplus if large else 0)) / (other.count + (other.surplus if trial.large else 0))
        pins = max(self.fewest, min(self.most, round(trial.pins * times)))
        return replace(
            trial,
            pins=pins,
            streams=round(trial.streams * times),
            head=min(pins, round(trial.head * times)),
            hosts=round(trial.hosts * self.count / other.count),
            spills=round(trial.spills * self.count / other.count),
            large=large,
        )

    def _try_with_room(self, trial: Trial) -> None:
        if not self.try_one(trial) and trial in self.no_room:
            self.try_one(self._with_room(trial))

    def _with_room(self, trial: Trial) -> Trial:
        known = self.no_room[trial]
        if known is not None:
            return known
        low, high, found = self.fewest, trial.pins, trial
        while low < high:
            pins = (low + high) // 2
            fewer = _pinning(trial, pins)
            if self._has_room(fewer):
                low, found = pins + 1, fewer
            else:
                high = pins
        self.no_room[trial] = found
        return found

    def _with_host_room(self, trial: Trial) -> Trial | None:
        """The fewest pins, at least as many, with room on the host, in place of streams, or None; the roofline counts
        bytes, not chunks."""
        fewer, more = trial.pins - 1, self.most + 1
        while more - fewer > 1:
            pins = trial.pins if fewer < trial.pins else (fewer + more) // 2
            if self._fits_host(self._modes(_pinning(trial, pins))):
                more = pins
            else:
                fewer = pins
        return _pinning(trial, more) if more <= self.most else None

    def _fits_host(self, modes: Modes) -> bool:
        try:
            check_host(self.job, modes)
        except DoesNotFit as reason:
            self.reason = reason.or_less(self.reason)
            return False
        return True

    def _has_room(self, trial: Trial) -> bool:
        return Course(self.shown, self._modes(trial), trial.knobs).least_room_bytes >= 0

    def short(self) -> DoesNotFit:
        if self.reason is not None:
            return self.reason
        budget = self.job.machine.gpu_budget_bytes
        what = "chunks used in the tightest moment, lists that visit the GPU then, and the moment's non-model data"
        needed = budget + max(1, self.least_short_bytes)
        return DoesNotFit(policy=self.job.name, place="gpu", needed_bytes=needed, available_bytes=budget, what=what)

    def _starts(self, *, turned: bool) -> Iterator[Trial]:
        """turned: then variants of the best, each with one decision changed, unless a search of another size has tried
        them."""
        if not turned:
            yield from self._roofline_starts(turned=False)
            yield from self._turned_large()
            return
        may_sum = self.job.may_sum
        if may_sum:
            yield from self._roofline_starts(turned=True)
            seconds, pins, streams = self.without_sums
            if self.best is None or seconds < self.best[0]:
                self.here = None  # so that the next trial is not given up early
                yield Trial(pins=pins, streams=streams, head=0, front=min(FRONT, streams), hosts=self.count)
            if self.best is not None and self.best[0] < self.alone_s:
                return  # no plan without streams and sums is that fast
            self.here = None
        alone = int(iteration_bounds(self.facts.pins, self.first_fit).argmin())
        alone = max(self.fewest, min(alone, self.most))
        no_sums = self.count if may_sum else 0
        yield Trial(pins=alone, streams=0, head=alone, hosts=no_sums)
        if self.first_fit == self.count:
            yield Trial(pins=self.count, streams=0, head=self.count)
        if self.good_enough:
            return
        if not may_sum:
            yield from self._roofline_starts(turned=True)
        if self.best is None:
            yield Trial(pins=self.fewest, streams=0, head=0, hosts=no_sums)
            yield Trial(pins=self.most, streams=0, head=self.most, hosts=no_sums)

    def _first_knobs(self) -> Knobs:
        """Behind a barrier all streamed chunks are updated at once, so room there decides."""
        if self.facts.pins.barrier:
            return replace(USUAL, linger=False, states_first=True)
        return USUAL

    def _roofline_starts(self, *, turned: bool) -> Iterator[Trial]:
        knobs = self._first_knobs()
        # The roofline's order of the starts is often wrong, so each is tried, unless another size's trial is there.
        self._must_try = turned or self.best is None
        for _, pins, streams, hosts, spills in self.starts:
            start = Trial(pins=pins, streams=streams, head=0, front=min(FRONT, streams), hosts=hosts, knobs=knobs)
            if spills:  # sums on their way need room, which the roofline does not count
                start = replace(start, spills=spills, knobs=replace(knobs, linger=True))
            if (held := self._with_host_room(start)) is not None:
                yield held
        self._must_try = False
        if turned and self.best is not None and self.best[1].streams:
            yield from self._turned(self.best[1].knobs)

    def _turned(self, knobs: Knobs) -> Iterator[Trial]:
        assert self.best is not None
        yield replace(self.best[1], knobs=replace(USUAL, linger=not knobs.linger))
        yield replace(self.best[1], knobs=replace(self.best[1].knobs, down="fifo"))
        yield replace(self.best[1], head=0)
        yield replace(self.best[1], head=self.best[1].pins // 2)
        yield from self._turned_large()

    def _turned_large(self) -> Iterator[Trial]:
        assert self.best is not None
        if self.large and self.best[1].streams:
            first = ("stream", *("cpu",) * (len(self.large) - 1))
            for modes in (first,) if self.job.may_sum else self._modes_of_large():
                yield self._beside(self.best[1], modes)

    def _elsewhere(self, best: Trial) -> Iterator[Trial]:
        knobs = best.knobs
        if self.job.may_sum:
            _, pins, streams, hosts, _ = self.without_turns
            front = min(FRONT, streams)
            yield Trial(pins=pins, streams=streams, head=0, front=front, hosts=hosts, knobs=self._first_knobs())
        yield replace(best, knobs=replace(knobs, linger=not knobs.linger))
        if self.job.may_wait:
            yield replace(best, knobs=replace(knobs, waits=not knobs.waits))
        if best.streams:
            yield replace(best, knobs=replace(knobs, linger=False, states_first=not knobs.states_first))
            yield replace(best, head=0, front=0)
            for modes in self._modes_of_large():
                if modes != best.large:
                    yield self._beside(best, modes)
        if self.job.may_sum:
            yield replace(best, hosts=self.count)
            yield replace(best, hosts=0)
            yield replace(best, hosts=best.hosts // 2, spills=self.count - best.pins - best.hosts // 2)
            _, pins, streams = self.without_sums
            for part in (1.0, 0.8):
                fewer = max(self.fewest, round(part * pins))
                front = min(FRONT, streams)
                yield Trial(
                    pins=fewer, streams=streams + pins - fewer, head=fewer, front=front, hosts=self.count, knobs=USUAL
                )

    def _modes_of_large(self) -> Iterator[tuple[str, ...]]:
        return product(("stream", "pin", "cpu"), repeat=len(self.large)) if self.large else iter(())

    def _beside(self, trial: Trial, large: tuple[str, ...]) -> Trial:
        if trial.large:
            return replace(trial, large=large)
        modes = self._modes(trial)
        pins = trial.pins + sum(times - 1 for c, times in self.large.items() if c in modes.pinned)
        streams = trial.streams + sum(times - 1 for c, times in self.large.items() if c in modes.streamed)
        return replace(trial, pins=min(pins, self.most), streams=streams, large=large)

    def _descend(self, stride: int) -> bool:
        improved = False
        for pins, streams in self._directions():
            improved |= self._go(stride, pins=pins, streams=streams)
        for hosts, spills in SUMS_TURNS if self.job.may_sum else ():
            improved |= self._go(stride, hosts=hosts, spills=spills)
        for head in (1, -1):
            improved |= self._go(2 * stride, head=head)
        return improved

    def _directions(self) -> tuple[tuple[int, int], ...]:
        """Those that relieve the busier of CPU Adam and the link at `here` come first."""
        assert self.here is not None
        adam_s, link_s = self._busy[self._key(self.here[1])]
        if adam_s > link_s:
            return (0, 1), (1, 0), (-1, 1), (1, -1), (0, -1), (-1, 0)
        return (1, -1), (0, -1), (1, 0), (-1, 1), (-1, 0), (0, 1)

    def _go(self, first: int, **numbers: int) -> bool:
        improved, stride = False, first
        while True:
            if self._change(**{name: number * stride for name, number in numbers.items()}):
                improved, stride = True, 2 * stride
            elif stride > first:
                stride = first
            else:
                return improved

    def _change(self, **numbers: int) -> bool:
        assert self.here is not None
        now, by = self.here[1], Counter(numbers)
        if self.good_enough:
            return False
        pins, streams, hosts = now.pins + by["pins"], now.streams + by["streams"], now.hosts + by["hosts"]
        return self.try_one(
            replace(
                now,
                pins=pins,
                streams=streams,
                head=max(0, min(pins, now.head + by["head"])),
                front=min(now.front if now.streams else FRONT, max(0, streams)),
                hosts=max(0, min(self.count - pins, hosts)),
                spills=max(0, min(self.count - pins - hosts, now.spills + by["spills"])),
            )
        )
