"""Plans by search: chunks are pinned, streamed or updated on the CPU, in numbers from a roofline and neighbouring
trials.

If the chunk size is open, a few are tried, and the most promising searches continue; plans found are followed
(pace.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.layout import Layout, build_layout, size_near
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.family.attempt import Attempt
from pstar_sim.policy.family.pace import faster_in_parts
from pstar_sim.policy.family.search import GOOD_ENOUGH, Search
from pstar_sim.policy.family.shorter import shorter
from pstar_sim.policy.kit.iteration_order import in_order
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.ties import burden, least_of
from pstar_sim.policy.passes.feasibility import check_gpu
from pstar_sim.units import format_bytes, format_s
from pstar_sim.workload.workload import Workload

# See [Note: what the constants buy] in search.py.
MOST_CHUNKS = 400  # largest number of chunks of the other chunk sizes that are tried: many chunks make a search long
FACTORS = (2.0, 0.5)  # other chunk sizes, as multiples of the usual size, if chunks are many
FACTORS_OF_FEW = (0.5, 0.25, 0.125)  # the same if chunks are few
# If chunks are used more often than this per iteration, the search begins with so much larger chunks that they are not.
VISITS = 4_500
COARSE = 100  # up to this number of chunks, chunks count as few
# Effort for `Settings.effort` 1, in scheduled steps: in total, and in total if chunks are few. ALONE: the share of this
# effort if only one chunk size is searched.
OPS, OPS_OF_FEW, ALONE = 380_000, 480_000, 0.65
# Effort for the usual chunk size, for each other size, and for each continuation of a search.
FIRST_OPS, OTHER_OPS, NEXT_OPS = 50_000, 30_000, 40_000
# If the plans of all searches are slower than their floors by WORTH_MORE, jobs with one micro-batch get MORE times the
# effort that they used. Jobs with several micro-batches get MORE_OF_SEVERAL times this effort: attempts take longer.
# With one micro-batch behind a barrier, floors are farther from what is possible, and WORTH_MORE_BEHIND_BARRIER takes
# the place of WORTH_MORE. The share RANDOM of what is added goes into random trials near the best, except behind a
# barrier with one micro-batch, where descents from other trials find faster plans.
WORTH_MORE, WORTH_MORE_BEHIND_BARRIER = 2e-2, 5e-2
MORE, MORE_OF_SEVERAL, RANDOM = 1.8, 1.5, 0.5
# Fewest attempts that a look at another size should allow. Where chunks are few, a look gets the effort for them, up to
# the share LONG_LOOK of all effort. A size that allows fewer attempts waits until the other searches are exhausted.
FEWEST_ATTEMPTS, LONG_LOOK = 3, 0.2
WORTH_A_SIZE = 2e-2  # relative distance from the floor above which other sizes are tried
WORTH_A_SIZE_OF_FEW = 5e-3  # the same if chunks are few


COPIES_DOWN = {"edf": "as the next forward needs them", "fifo": "in the order they come"}


@dataclass(frozen=True, slots=True)
class SearchResult:
    """pins_alone_s: least of the closed form without streams.
    rivals_s: `least_of_rivals` of any size.
    left: of the effort, unless a plan is good enough.
    """

    seconds: float
    of: str
    plan: Plan
    pins_alone_s: float = 0.0
    rivals_s: tuple[float, float] = (0.0, 0.0)
    left: float = 0.0


@without_garbage_collection()
def searched(name: str, workload: Workload, machine: Machine, settings: Settings, point: Point) -> Plan:
    """The best at the usual chunk size, for another policy that may stream. Raises DoesNotFit."""
    own = own_plans(workload, machine, settings, point, name)
    best = least_of(own, seconds=lambda f: f.seconds, burden=lambda f: burden(f.plan))
    predictions = dict(best.plan.predictions) | {"policy_iteration_s": best.seconds}
    return replace(best.plan, predictions=predictions)


def own_plans(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    point: Point,
    name: str,
    *,
    sizes: bool = False,
) -> Iterator[SearchResult]:
    """Of the best search over chunk sizes, and the next best until none can be faster.

    sizes: others are tried, if the settings leave the size open.

    Raises DoesNotFit if no size fits.
    """
    over = _Sizes(workload, machine, settings, point, name, sizes)
    over.run()
    least_s = math.inf
    without_pins_s, with_any_s = (min(seconds) for seconds in zip(*(search.rivals_s for search in over.searches)))
    for search in over.by_seconds():
        if search.seconds >= least_s:
            return
        for attempt in search.whole():
            plan, seconds = attempt.plan(_choices(search, attempt, over)), attempt.iteration_s
            if not settings.any_will_do:  # followed, because the seconds of `choose` are a prediction
                plan, seconds = faster_in_parts(plan, attempt.period_s())
            least_s = min(least_s, seconds)
            yield SearchResult(seconds, name, plan, search.alone_s, (without_pins_s, with_any_s), over.left())


def jobs_of_sizes(name: str, workload: Workload, machine: Machine, settings: Settings, point: Point) -> Iterator[Job]:
    """The jobs that `own_plans` tries, at the usual chunk size first."""
    over = _Sizes(workload, machine, settings, point, name, True)
    for layout in chain((over.usual,), over.others()):
        yield over.job(layout)


class _Sizes:
    """Until a plan is good enough, or the effort or every search is exhausted.

    few: at the usual size.
    searches: of sizes that fit.
    tried: size -> seconds, in words.
    all_ops, left_ops: steps to schedule, in total and still.
    """

    def __init__(
        self, workload: Workload, machine: Machine, settings: Settings, point: Point, name: str, sizes: bool
    ) -> None:
        workload = in_order(name, workload, point.order)
        self._job = partial(Job, name, machine=machine, settings=settings)
        self._barrier = settings.barrier(workload.compute_dtype) is not None
        self._workload, self._machine, self._settings, self._point = workload, machine, settings, point
        self._open = sizes and settings.chunk_bytes is None
        self.usual = self._layout(settings.chunk_bytes)
        self.few = len(self.usual.chunks) <= COARSE
        ops = OPS_OF_FEW if self.few else OPS
        self.all_ops = self.left_ops = round(settings.effort * (ops if self._open else ALONE * ops))
        self.searches: list[Search] = []
        self._later: list[Layout] = []  # layouts with which an attempt takes too much effort for a look
        self._in_vain: Counter[Search] = Counter()  # continuations of a search since its best trial became faster
        self.tried: dict[str, str] = {}
        self._reason: DoesNotFit | None = None  # why no size fits, with the least need

    def _layout(self, chunk_bytes: int | None) -> Layout:
        return build_layout(
            self._workload, chunk_bytes=chunk_bytes, ranks=self._machine.data_parallel_size, sums=self._settings.sums
        )

    def job(self, layout: Layout, point: Point | None = None) -> Job:
        return self._job(self._workload, point=point or self._point, layout=layout)

    @cached_property
    def _short(self) -> Workload | None:
        return shorter(self._workload, barrier=self._barrier)

    def run(self) -> None:
        """Raises DoesNotFit if no size fits."""
        if (coarse := self._coarse()) is not None:
            self._look(coarse, min(FIRST_OPS, self.all_ops))
        self._look(self.usual, min(FIRST_OPS, self.all_ops))
        self._look_elsewhere()
        if not self.searches:
            assert self._reason is not None
            raise self._reason
        self._continue()
        several = self._workload.micro_batches > 1
        if self._above_floor(WORTH_MORE_BEHIND_BARRIER if self._barrier and not several else WORTH_MORE):
            used = min(self.all_ops, self.all_ops - self.left_ops)
            more = round(((MORE_OF_SEVERAL if several else MORE) - 1) * used)
            if self.left_ops <= 0:
                self.all_ops, self.left_ops = self.all_ops + more, self.left_ops + more
            if several or not self._barrier:
                self._run_on(self.best(), Search.wander, min(round(RANDOM * more), self.left_ops))
            self._continue()
        left_ops = self.left_ops
        self._run_on(self.best(), Search.apart, round(self._settings.effort * NEXT_OPS))
        self.all_ops, self.left_ops = self.all_ops + left_ops - self.left_ops, left_ops
        if self.left_ops > 0:
            self._run_on(self.best(), Search.fetch_later, self.left_ops)

    def _coarse(self) -> Layout | None:
        job = self.job(self.usual)
        visits = sum(len(job.touched[c]) for c in job.moving)
        if not self._open or visits <= VISITS:
            return None
        layout = self._layout(self.usual.chunk_bytes * 2 ** math.ceil(math.log2(visits / VISITS)))
        return layout if 2 * len(layout.chunks) <= len(self.usual.chunks) + 1 else None

    def _continue(self) -> None:
        while self.left_ops > 0 and not self.best().good_enough:
            if (search_left := self._promising()) is not None:
                self._go_on(search_left, NEXT_OPS)
            elif self._later:
                self._look(self._later.pop(0), NEXT_OPS)
            else:
                return

    def best(self) -> Search:
        return self.by_seconds()[0]

    def left(self) -> float:
        return 0.0 if self.best().good_enough else max(0, self.left_ops) / max(1, self.all_ops)

    def stopped(self) -> str:
        if self.best().good_enough:
            return f"a plan is within {GOOD_ENOUGH:.1%} of the roofline"
        return "the effort is used up" if self.left_ops <= 0 else "there is nothing left to try"

    def _look(self, layout: Layout, effort_ops: int, point: Point | None = None) -> None:
        if self.searches and self.left_ops <= 0:
            return
        point = point or self._point
        job = self.job(layout, point)
        try:
            check_gpu(job)
        except DoesNotFit as reason:
            self._reason = reason.or_less(self._reason)
            return
        short = None if self._short is None else self._job(self._short, point=point, layout=layout)
        search = Search(job, short)
        self._go_on(search, effort_ops)
        if search.fastest:
            self.searches.append(search)
        else:
            self._reason = search.short().or_less(self._reason)

    def _look_elsewhere(self) -> None:
        """With constant capacity: room at low tide is sometimes better left to chunks that pass."""
        if self._open and not self._far():
            less = round((1 - ALONE) * self.all_ops)
            self.all_ops, self.left_ops = self.all_ops - less, self.left_ops - less
        elif self._open:
            for layout in self.others():
                needed_ops = FEWEST_ATTEMPTS * self._attempt_ops(layout)
                if needed_ops <= (LONG_LOOK * self.all_ops if self.few else OTHER_OPS):
                    self._look(layout, max(OTHER_OPS, round(needed_ops)))
                else:
                    self._later.append(layout)
        if self._point.capacity == "tide" and not self.searches:
            self._look(self.usual, FIRST_OPS, replace(self._point, capacity="peak"))

    def others(self) -> Iterator[Layout]:
        for factor in (FACTORS_OF_FEW if self.few else FACTORS) if self._open else ():
            size = int(self.usual.chunk_bytes * factor)
            layout = self._layout(size_near(self._workload, size) if self.few else size)
            if len(layout.chunks) <= MOST_CHUNKS:
                yield layout

    def _attempt_ops(self, layout: Layout) -> float:
        if not self.searches:
            return 0.0
        first = self.searches[0]
        return first.spent_ops / len(first.tried) * len(layout.chunks) / len(first.job.layout.chunks)

    def _promising(self) -> Search | None:
        """It promises to come nearer to its floor, less with each continuation in vain."""
        least_s = self.best().seconds
        may_win = (s for s in self.searches if not s.exhausted and s.floor_s < least_s)
        return min(may_win, key=lambda s: s.seconds - (s.seconds - s.floor_s) / (2 + self._in_vain[s]), default=None)

    def _go_on(self, search: Search, effort_ops: int) -> None:
        best = self.best() if self.searches else None
        least = effort_ops if best is None else min(effort_ops, self.left_ops)
        self._run_on(search, partial(Search.run, like=None if best is search else best), least)

    def _run_on(self, search: Search, run: Callable[[Search, int], object], effort_ops: int) -> None:
        before_s = search.seconds
        run(search, effort_ops)
        self._in_vain[search] = 0 if search.seconds < before_s else self._in_vain[search] + 1
        search.spent_ops += effort_ops - search.effort_ops
        self.left_ops -= effort_ops - search.effort_ops
        if search.fastest:
            size = format_bytes(search.job.layout.chunk_bytes)
            self.tried[size + ("" if search.job.follow_tide else ", constant capacity")] = format_s(search.seconds)

    def _far(self) -> bool:
        return self._above_floor(WORTH_A_SIZE_OF_FEW if self.few else WORTH_A_SIZE)

    def _above_floor(self, distance: float) -> bool:
        return not any(search.seconds <= search.floor_s * (1 + distance) for search in self.searches)

    def by_seconds(self) -> list[Search]:
        return sorted(self.searches, key=lambda search: search.seconds)


def _choices(search: Search, attempt: Attempt, over: _Sizes) -> dict[str, object]:
    modes, knobs = attempt.modes, attempt.knobs
    count = len(search.job.candidates)
    cpu = count - len(modes.pinned) - len(modes.streamed)
    return {
        "capacity": "GPU budget less the non-model bytes of each moment"
        if attempt.course.job.follow_tide
        else "GPU budget less the highest non-model bytes of any moment",
        "modes": f"of {count} chunks {len(modes.pinned)} pinned, {len(modes.streamed)} streamed, {cpu} by CPU Adam",
        **_sums(search, attempt),
        "pins": f"{len(modes.pinned)} of {count} chunks ({search.most} would fit)",
        "tried": len(search.tried),
        "chunk_sizes": over.tried,
        "search": f"{over.all_ops - over.left_ops:,} of {over.all_ops:,} steps scheduled, until {over.stopped()}; the "
        f"plan is {search.seconds / search.floor_s - 1:.1%} above the roofline",
        "kept_gaps": len(attempt.course.kept),
        "stay_over_the_border": len(attempt.course.stays),
        "copies_down": COPIES_DOWN[knobs.down],
        "roofline_s": search.floor_s,
    }


def _sums(search: Search, attempt: Attempt) -> dict[str, object]:
    job, modes = search.job, attempt.modes
    if not job.may_sum:
        return {}
    moving = len(job.candidates) - len(modes.pinned)
    batches = job.workload.micro_batches
    there = len(modes.summed)
    trips = [len(stretches) - 1 for stretches in attempt.schedule.sums.values()]
    spilt = (
        f"; {sum(map(bool, trips))} of the sums on the GPU make room for other lists: {sum(trips)} times one goes to "
        "the host and comes back"
        if any(trips)
        else ""
    )
    waiting = (
        f"; the first of {len(modes.waiting)} waits for the update, in the bytes of a working list"
        if modes.waiting
        else ""
    )
    return {
        "sums": f"of {moving} chunks whose states are not on the GPU, the gradients of {there} add up on the GPU: "
        f"{job.layout.sum_bytes} bytes per parameter there instead of {batches} copies to the host and an add for "
        f"each; those of {moving - there} on the host, which leaves room for pins and copies ahead{waiting}{spilt}"
    }
