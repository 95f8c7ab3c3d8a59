"""The tide of a run's first iteration, measured and compared with the plan's, moment by moment.

A trace may be wrong: an operator keeps memory that its fake version does not show, the device has other kernels, the
loop keeps other tensors. So the first iteration on plan is counted operator by operator (`moments/live_bytes.py`). If a
moment holds more than planned, the same policy makes a new plan from the measured tide, and the next iteration is
counted too.

[Note: tolerance] A moment may hold 2 % of the plan's highest tide more than planned, and at least 4 KiB, for a loop's
own variables (a loss, a mask, the next batch) and another torch: a capture of Llama and a real run differ by 1.4 %,
because the mask is built differently.

[Note: several ranks] Each rank counts its own tide, and a new plan would have to be the same on all, so none is made: a
rank warns and continues if the plan holds for the measured tide (by the checker), else the run ends on all.

Not counted: workspaces inside operators, a loop in another thread than `prepare`'s, and compiled blocks.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from executor.measuring.measure import PeakMeter
from executor.memory.arena import Arena, check_gpu_memory
from executor.moments.hooks import MomentClock
from executor.moments.standing import Standing
from executor.moments.unseen import unseen
from executor.off_plan.plan_run import WholeState
from executor.off_plan.rungs import with_gpu_budget
from executor.session.weakly import weakly
from pstar_sim.core.plan import Plan
from pstar_sim.errors import DiskError, DoesNotFit, PlanError, UnknownName
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.registry import find_policy, plan_to_run, policy_at
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

log = logging.getLogger("executor")

TOLERANCE = 0.02  # [Note: tolerance]
LEAST_BYTES = 4096
OTHERWISE = policy_at(Point())  # policy for a new plan, where the plan's policy is not a known name
MOST_ITERATIONS = 16  # iterations off plan, or with other batches, before one is compared
MOST_PLANS = 3  # new plans in a row; a tide that grows with each iteration comes from the loop


@dataclass(frozen=True, kw_only=True)
class TideReport:
    """One iteration's tide beside its plan's.

    moment: where the difference rises most, on the way to its largest value.
    most_bytes: the largest difference, negative if none is above the plan and some are below.
    above, below: moments more than `tolerance_bytes` off.
    gpu_peak_bytes: payloads and measured non-model data.
    done: the reaction, in words.
    """

    model: str
    iteration: int
    moment: int
    name: str
    module: str
    planned_bytes: int
    measured_bytes: int
    most_bytes: int
    above: int
    below: int
    moments: int
    tolerance_bytes: int
    gpu_peak_bytes: int
    gpu_budget_bytes: int
    done: str = ""

    def __str__(self) -> str:
        where = f"module {self.module!r}" if self.module else "the model"
        held = (
            f"GPU {format_bytes(self.gpu_peak_bytes)} at most of {format_bytes(self.gpu_budget_bytes)}, payloads and "
            "measured tide"
        )
        at = (
            f"{where} in moment {self.moment} ({self.name}) has {format_bytes(self.measured_bytes)} of non-model data, "
            f"the plan {format_bytes(self.planned_bytes)} ({self.measured_bytes - self.planned_bytes:+,} bytes"
        )
        more = self.most_bytes - (self.measured_bytes - self.planned_bytes)
        at += f", later up to {self.most_bytes:+,})" if more else ")"
        if self.above:
            text = f"{at}; {self.above} of {self.moments} moments are above the plan"
        elif self.below:
            text = f"{at}; {self.below} of {self.moments} moments are below the plan, none above"
        else:
            text = f"as planned, within {format_bytes(self.tolerance_bytes)} in each of {self.moments} moments"
        return f"tide of iteration {self.iteration} of {self.model}: {text}; {held}" + (
            f"; {self.done}" if self.done else ""
        )


def tolerance_bytes(w: Workload) -> int:
    return max(LEAST_BYTES, int(TOLERANCE * w.peak_non_model_bytes))


def compare(
    w: Workload, measured: Sequence[int], *, iteration: int, gpu_peak_bytes: int, gpu_budget_bytes: int
) -> TideReport:
    """measured: peak of non-model bytes of each moment."""
    tolerance = tolerance_bytes(w)
    more = [there - m.peak_bytes for there, m in zip(measured, w.moments)]
    above = sum(size > tolerance for size in more)
    below = sum(size < -tolerance for size in more)
    sign = -1 if below and not above else 1
    worst = max(range(len(more)), key=lambda i: sign * more[i])
    # A kept tensor is in every moment until it is freed; it belongs to the module in whose moment the difference rises.
    at = max(range(worst + 1), key=lambda i: sign * (more[i] - (more[i - 1] if i else 0)))
    return TideReport(
        model=w.model,
        iteration=iteration,
        moment=at,
        name=w.moments[at].name,
        module=w.moments[at].module,
        planned_bytes=w.moments[at].peak_bytes,
        measured_bytes=measured[at],
        most_bytes=more[worst],
        above=above,
        below=below,
        moments=len(more),
        tolerance_bytes=tolerance,
        gpu_peak_bytes=gpu_peak_bytes,
        gpu_budget_bytes=gpu_budget_bytes,
    )


class FirstIteration(Standing):  # type: ignore[no-untyped-call]
    """Counts from `begin` until an iteration has run on plan.

    refused: the next forward's error.
    """

    def __init__(self, model: nn.Module, state: WholeState, clock: MomentClock, renew: Callable[[Plan], None]) -> None:
        self._keeper = keeper = weakref.ref(state)
        self._clock = weakref.ref(clock)
        self._renew = weakly(renew)
        self._model = weakref.ref(model)
        self.peaks: list[int] = []

        def arena() -> Arena:
            held = keeper()
            assert held is not None  # operators are counted on demand only: `_watches`
            return held.run.arena

        super().__init__(model, state.run.backend.device, arena)
        self.report: TideReport | None = None
        # A new error each time: a traceback holds the loop's frames, and with them the session.
        self.refused: Callable[[], DoesNotFit] | None = None
        self._done = False
        self._plans = 0
        self._iterations = 0
        self._seen = False  # whether an operator was seen in this iteration
        self._other_batch = False
        self._marks: list[tuple[int, str, int]] | None = None
        self._log_at = self._payload_bytes = 0

    def bind(self) -> None:
        super().bind()
        self.peaks = [0] * len(self._state.run.timetable.names)

    def begin(self) -> None:
        super().begin()
        self._state.listeners.append(self)

    def end(self) -> None:
        self._done = True
        state = self._keeper()
        if state is not None:
            if self in state.listeners and self.refused is None:  # else the next forward is refused
                state.listeners.remove(self)
            log_of = state.run.arena.log
            if self._marks is not None and log_of.marks is self._marks:
                log_of.marks = None
        self._marks = None
        if self._entered:
            super().end()

    @property
    def _state(self) -> WholeState:
        state = self._keeper()
        assert state is not None
        return state

    @property
    def _watches(self) -> bool:
        """From the first forward to the last backward's end, without the loop's operators after a backward (as in
        `off_plan/guard.py`), and another prepared model's, whose plan has room for them."""
        state, clock = self._keeper(), self._clock()
        if state is None or clock is None or self._done or state.closed:
            return False
        cursor = state.cursor
        if cursor.moment < 0 or cursor.off_plan or cursor.visiting:
            return False
        return clock.at_turn and state.run.timetable.names[cursor.moment] not in ("backward-end", "step")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._watches:
            return func(*args, **(kwargs or {}))
        self._seen = True
        return super().__torch_dispatch__(func, types, args, kwargs)

    # -- calls of the session -----------------------------------------------------------------------------------------

    def require_plan(self) -> None:
        if self.refused is not None:
            raise self.refused()

    def begin_iteration(self) -> None:
        if self._done:
            return
        log_of = self._state.run.arena.log
        self._seen = self._other_batch = False
        self.peaks = [0] * len(self.peaks)
        # Tensors of an abandoned iteration (its graph, in a traceback) do not belong to this iteration.
        self._live.clear()
        self.current = 0
        model = self._model()
        for buffer in () if model is None else model.buffers():
            self._see(buffer)
        self._iterations += 1
        if self._iterations > MOST_ITERATIONS:
            log.warning(
                "the tide was not compared with the plan's: %d iterations, none on plan with its batch", MOST_ITERATIONS
            )
            self.end()
            return
        if log_of.marks is None or log_of.marks is self._marks:  # otherwise another measurement runs
            self._marks = []
            self._log_at, self._payload_bytes = log_of.keep_marks(self._marks)

    def close_moment(self, moment: int) -> None:
        self._other_batch |= not self._state.run.batches.planned
        self.peaks[moment] = max(self.peaks[moment], self.peak)

    def open_moment(self) -> None:
        self.reset_peak()

    def end_iteration(self) -> None:
        """Raises DoesNotFit if no plan fits, PlanError if several ranks cannot continue."""
        if self._done:
            return
        state, plan, log_of, marks = self._state, self._state.run.plan, self._state.run.arena.log, self._marks
        if marks is None or log_of.marks is not marks or (self._other_batch and not self._any_above()):
            return  # wait for the next iteration
        changes = log_of.changes[self._log_at :]
        log_of.marks = None
        if not self._seen:
            why = "compiled blocks run without operators"
            if threading.get_ident() != self.thread:
                why = "the loop runs in another thread than executor.prepare was called in"
            log.warning("the tide of iteration %d was not compared with the plan's: %s", state.iteration - 1, why)
            self.end()
            return
        walk = PeakMeter(self.peaks, self._payload_bytes)
        walk.follow(changes, marks, self._log_at)
        self.report = compare(
            plan.workload, self.peaks, iteration=state.iteration - 1, gpu_peak_bytes=walk.peak,
            gpu_budget_bytes=plan.gpu_budget_bytes,
        )  # fmt: skip
        if not self.report.above:
            log.info("%s", self.report)
            self.end()
        elif state.ranks is not None:
            self._on_ranks()
        else:
            self._replan()

    def _any_above(self) -> bool:
        """A smaller batch may show that a plan is too low, never that it is enough."""
        w = self._state.run.plan.workload
        tolerance = tolerance_bytes(w)
        return any(there - m.peak_bytes > tolerance for there, m in zip(self.peaks, w.moments))

    def _say(self, done: str) -> None:
        assert self.report is not None
        self.report = replace(self.report, done=done)
        log.warning("%s", self.report)

    def _measured(self) -> Workload:
        w = self._state.run.plan.workload
        return replace(
            w,
            moments=tuple(replace(m, peak_bytes=max(m.peak_bytes, size)) for m, size in zip(w.moments, self.peaks)),
        )

    def _on_ranks(self) -> None:
        state, ranks = self._state, self._state.ranks
        assert ranks is not None
        workload = self._measured()
        try:
            replace(state.run.plan, workload=workload, ranked=None).check()
        except PlanError as error:
            self._say("the plan does not hold for this tide")
            self.end()
            raise ranks.ends(
                f"rank {ranks.rank}: {self.report}: {error}. Several ranks cannot plan again during a run: record "
                "the trace (executor.record, pstar run --record) and plan from it, or plan for less "
                f"{state.spelling.gpu_memory}"
            ) from None
        self._say("the plan has room for this tide and stays, because several ranks cannot plan again during a run")
        self.end()

    def _replan(self) -> None:
        state, backend, former = self._state, self._state.run.backend, self._state.run.plan
        if self._plans == MOST_PLANS:
            self._say(f"no further plan after {self._plans} new plans: the tide grows with every iteration")
            self.end()
            return
        self._plans += 1
        workload, budget = self._measured(), former.gpu_budget_bytes
        try:
            spec = former.policy
            try:
                find_policy(spec)
            except UnknownName:  # the policy is the user's own function
                spec = OTHERWISE
            plan = plan_to_run(spec, workload, with_gpu_budget(former.machine, budget), former.settings)
            check_gpu_memory(plan, backend, plan.gpu_budget_bytes)
            with unseen():
                self._renew(plan)
        except DiskError as error:
            self._say(f"the former plan stays: {error}")
            self.end()
            return
        except DoesNotFit as error:
            report = self.report
            self._say(f"no plan for this tide fits: {error}")
            self.refused = partial(
                DoesNotFit,
                policy=former.policy,
                place=error.place,
                needed_bytes=error.needed_bytes,
                available_bytes=error.available_bytes,
                what=f"{error.what}; {report}; all parameters are those after step {state.iteration - 1}; give "
                f"more {state.spelling.gpu_memory}, a smaller batch or checkpointing, or record the trace and plan "
                "from it",
            )
            self.end()
            raise self.refused() from None
        self._say(f"planned again by {spec}, for a tide of at most {format_bytes(workload.peak_non_model_bytes)}")
