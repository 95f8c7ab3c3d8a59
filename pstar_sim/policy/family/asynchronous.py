"""The asynchronous policies pin the chunks used first: a closed form proposes how many, and `choose` times each
proposal (attempt.py). Its window fixes the order on each queue and the memory edges (passes/write_plan.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.family.attempt import Attempt, attempt, burden_of
from pstar_sim.policy.family.course import Knobs
from pstar_sim.policy.family.disks import disks_s, fastest_apart, fastest_on_disks, least_disks_s, with_disks
from pstar_sim.policy.family.pace import faster_in_parts
from pstar_sim.policy.family.pins import PinFacts, iteration_bounds, most_pins_of, pin_facts
from pstar_sim.policy.family.residency import gaps_of
from pstar_sim.policy.kit.iteration_order import in_order
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.policy.kit.ties import AS_FAST, least_of
from pstar_sim.policy.passes.feasibility import check_gpu, check_host
from pstar_sim.units import format_bytes, format_s
from pstar_sim.workload.workload import Workload

_RIVAL = ("what static_partition chose",)
# benchmarks/search_constants.md says what each of these constants buys.
CLOSE_TO_BOUND = 2e-3  # this close to the closed form, no other number of pins is tried; saves effort
NEIGHBOURS = 2  # pins tried on either side of the closed form's number, which is inexact where chunks are few


def _fastest(attempts: Sequence[Attempt]) -> Attempt:
    return least_of(attempts, seconds=lambda a: a.iteration_s, burden=burden_of)


@dataclass(frozen=True)
class _Rival:
    """What static_partition chose for a job.

    linger: gradients on their way down have room.
    """

    machine: Machine
    settings: Settings
    point: Point
    pins: int
    linger: bool
    fetched_bytes: int


class Asynchronous:
    def __init__(
        self, name: str, workload: Workload, machine: Machine, settings: Settings, *, point: Point | None = None
    ) -> None:
        self.point = point = point or Point()
        self.job = Job(name, in_order(name, workload, point.order), machine, settings, point)
        self._attempts: dict[tuple[Modes, Knobs], Attempt] = {}

    @cached_property
    def _facts(self) -> PinFacts:
        return pin_facts(self.job)

    @without_garbage_collection()
    def plan(self) -> Plan:
        g = self.job
        check_gpu(g)
        if g.settings.any_will_do and not isinstance(self.point.pins, int):
            most = most_pins_of(g)  # which leaves least on the host
            if (refusal := self._refusal(most)) is not None:
                raise refusal
            attempts = [self._attempt(most)]
            return self._emit(attempts[0], attempts, most, attempts[0].iteration_s)
        best, most, bound_s = self._scan()
        if g.follow_tide and not g.several and not g.settings.any_will_do and (rival := self._static()) is not None:
            # [Note: one micro-batch] Every gap between forward and backward contains the peak, so the room of low tide
            # helps no chunk in such a gap. Both policies decide the pins at the peak, so both copy the same chunks.
            attempts = [self._on_disks(self._attempt(rival.pins, linger=rival.linger), most)]
            return self._emit(attempts[0], attempts, most, bound_s)
        attempts = self._search(best, most, bound_s)
        chosen = self._on_disks(_fastest(attempts), most)
        self._remember(chosen)
        return self._emit(chosen, attempts, most, bound_s)

    @without_garbage_collection()
    def first_s(self) -> float:
        """Of `plan`'s first attempt. Raises DoesNotFit."""
        check_gpu(self.job)
        best, _, _ = self._scan()
        if (refusal := self._refusal(best)) is not None:
            raise refusal
        return self._attempt(best).iteration_s

    def _search(self, best: int, most: int, bound_s: float) -> list[Attempt]:
        """With the closed form's number of pins, none and all; neighbours if `choose` finds an iteration clearly
        slower. None surely slower than the fastest."""
        g = self.job
        attempts: dict[int, Attempt] = {}
        error: DoesNotFit | None = None
        least_s = iteration_bounds(self._facts, most, surely=True)

        def attempt(p: int) -> None:
            nonlocal error
            if not 0 <= p <= most or p in attempts:
                return
            surely_s = max(least_s[p], disks_s(g, self._modes(p))) if attempts else 0.0
            if attempts and surely_s > min(a.iteration_s for a in attempts.values()) * (1 + AS_FAST):
                return
            if (reason := self._refusal(p)) is not None:
                error = error or reason
                return
            attempts[p] = self._attempt(p)

        attempt(best)
        if isinstance(self.point.pins, int):  # the user gave the number, so there is nothing to search
            if not attempts:
                assert error is not None
                raise error
            return list(attempts.values())
        if most == len(g.candidates):
            attempt(most)
        attempt(0)
        if not attempts or min(a.window.iteration_s for a in attempts.values()) > bound_s * (1 + CLOSE_TO_BOUND):
            for distance in range(1, NEIGHBOURS + 1):
                attempt(best - distance)
                attempt(best + distance)
        if not attempts:
            attempt(most)
        if not attempts:
            assert error is not None
            raise error
        found = list(attempts.values())
        if not g.several:  # no gradient list waits for room; only fetches do
            fastest = _fastest(found)
            found.append(self._attempt(fastest.pins, linger=False, like=fastest))
        return found

    def _on_disks(self, first: Attempt, most: int) -> Attempt:
        """With states there whole or apart, whichever is faster, and more pins or fewer."""
        whole = self._with_pins(first, most)
        best = fastest_apart(whole, lambda modes: self._once(modes, whole.knobs))
        return best if best is whole else self._with_pins(best, most)

    def _with_pins(self, best: Attempt, most: int) -> Attempt:
        for step in (1, -1) if best.modes.on_disks and not isinstance(self.point.pins, int) else ():
            while step:
                pins, before = best.pins + step, best
                if 0 <= pins <= most and self._refusal(pins) is None:
                    made = self._once(self._modes(pins, best.modes.host_states), best.knobs)
                    best = fastest_on_disks([best, made]) if made.fits else best
                step = int(step / 2) if best is before else 2 * step
        return best

    def _static(self) -> _Rival | None:
        """None if static_partition does not fit; a comparison's choice is used again."""
        g = self.job
        point = replace(self.point, capacity="peak")
        known = g.workload.derived.get(_RIVAL)
        if (
            isinstance(known, _Rival)
            and known.machine is g.machine
            and (known.settings, known.point) == (g.settings, point)
        ):
            return known
        other = Asynchronous("static_partition", g.workload, g.machine, g.settings, point=point)
        try:
            return other.rival()
        except DoesNotFit:
            return None

    def rival(self) -> _Rival:
        """For another of the family."""
        check_gpu(self.job)
        return self._remember(_fastest(self._search(*self._scan())))

    def _remember(self, chosen: Attempt) -> _Rival:
        g = self.job
        made = _Rival(g.machine, g.settings, self.point, chosen.pins, chosen.knobs.linger, chosen.fetched_bytes)
        if not g.follow_tide:
            g.workload.derived[_RIVAL] = made
        return made

    def _scan(self) -> tuple[int, int, float]:
        most = most_pins_of(self.job)
        bounds, asked = iteration_bounds(self._facts, most), self.point.pins
        if isinstance(asked, int):
            best = min(asked, most)
            return best, most, max(float(bounds[best]), disks_s(self.job, self._modes(best)))
        least_s, best = math.inf, 0
        surely_s = np.maximum(bounds, least_disks_s(self.job)[: most + 1])
        for pins in np.argsort(surely_s, kind="stable").tolist():
            if surely_s[pins] > least_s:
                break
            seconds = max(float(bounds[pins]), disks_s(self.job, self._modes(pins)))
            least_s, best = min((least_s, best), (seconds, pins))
        return best, most, least_s

    def _modes(self, pins: int, host_states: frozenset[str] = frozenset()) -> Modes:
        return with_disks(self.job, Modes(frozenset(self.job.candidates[:pins])), host_states)

    def _refusal(self, pins: int) -> DoesNotFit | None:
        try:
            check_host(self.job, self._modes(pins))
        except DoesNotFit as reason:
            return reason
        return None

    def _once(self, modes: Modes, knobs: Knobs, like: Attempt | None = None) -> Attempt:
        if (modes, knobs) not in self._attempts:
            self._attempts[modes, knobs] = attempt(self.job, modes, knobs, like=like)
        return self._attempts[modes, knobs]

    def _attempt(self, pins: int, *, linger: bool = True, like: Attempt | None = None) -> Attempt:
        g = self.job
        made = self._once(self._modes(pins), Knobs(linger=linger), like)
        if made.window.stuck is not None:
            op, place, wanted, free = made.window.stuck
            raise AssertionError(
                f"{g.name}: {made.draft.rows[op]} wants {wanted} bytes of the {place}, {free} are free"
            )
        return made

    def _emit(self, chosen: Attempt, attempts: Sequence[Attempt], most: int, bound_s: float) -> Plan:
        plan = chosen.plan(self._choices(chosen, attempts, most, bound_s))
        return plan if self.job.settings.any_will_do else faster_in_parts(plan, chosen.iteration_s)[0]

    def _choices(self, chosen: Attempt, attempts: Sequence[Attempt], most: int, bound_s: float) -> dict[str, object]:
        g = self.job
        choices: dict[str, object] = {}
        choices["capacity"] = (
            "GPU budget less the non-model bytes of each moment"
            if g.follow_tide
            else f"GPU budget less the highest non-model bytes of any moment ({format_bytes(max(g.tide))})"
        )
        choices["pins"] = f"{chosen.pins} of {len(g.candidates)} chunks ({most} would fit)"
        tried: dict[int, float] = {}
        for a in attempts:
            tried[a.pins] = min(a.window.iteration_s, tried.get(a.pins, a.window.iteration_s))
        choices["pins_tried"] = {p: format_s(seconds) for p, seconds in sorted(tried.items())}
        pinned = chosen.modes.pinned
        gaps = [gap for c in g.moving if c not in pinned for gap in gaps_of(c, g.touched_stretches[c])]
        peak = max(range(len(g.blocks)), key=lambda n: g.blocks[n].tide_bytes)
        over = sum(gap.start < peak < gap.end for gap in gaps)
        choices["kept_gaps"] = len(chosen.course.kept)
        if g.follow_tide:
            choices["gaps_over_the_peak"] = f"{over} of {len(gaps)}" + (
                ", so low tide cannot keep what high tide cannot" if gaps and over == len(gaps) else ""
            )
        choices["closed_form_s"] = bound_s
        return choices
