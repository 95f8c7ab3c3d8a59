"""Everything that a plan states, computed again: proof and bytes by core/checker, then seconds, lower bound, and
sources of inputs.

[Note: what a check says] is in core/figures.py. Statements that only a policy can make are named, not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path

from pstar_sim.bounds.certificate import COARSE, Certificate, agree, certificate_of
from pstar_sim.bounds.shares import tightest
from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core import plan as plans
from pstar_sim.core.check_report import CheckReport
from pstar_sim.core.checker.check import prove
from pstar_sim.core.checker.same_job import check_machine, check_workload_of
from pstar_sim.core.figures import byte_figures, not_checked
from pstar_sim.core.plan import Plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import VERSION
from pstar_sim.errors import FalseFigures, PlanError
from pstar_sim.planner.asked import OnPart, teller
from pstar_sim.planner.compare import barrier_cost_of
from pstar_sim.planner.confidence import confidence
from pstar_sim.planner.trust import trust, validation_digest
from pstar_sim.planner.utilization import tflops_and_mfu
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.policy.registry import policies
from pstar_sim.sim.play import play_each, slowest
from pstar_sim.workload.workload import Workload

SECONDS_AGREE = 1e-6
"""Relative difference up to which a stated time and the simulated time agree: sums may be rounded in another order."""
_BEYOND = {
    "balance": "the policy would have to plan again with equal shares",
    "barrier_cost_s": "of another plan, without the barrier, which --certify makes again",
    "policy_iteration_s": "the policy's own estimate",
}
"""Statements that are not computed again, and why."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """report: the proof, other checks, and what was not checked.
    bound: the comparison with the recomputed lower bound.
    """

    report: CheckReport
    bound: str
    timeline: Timeline


@without_garbage_collection()
def examine(
    plan: Plan,
    workload: Workload | None = None,
    machine: Machine | None = None,
    *,
    lp: bool = False,
    on_part: OnPart | None = None,
) -> Examined:
    """Proves the plan and computes its statements again.

    workload, machine: compared with the plan's.
    lp: solve the fluid program again, and plan again without the barrier.
    on_part: called with the part, the number done and of all.

    Raises PlanError with the first error in the plan, and FalseFigures with all figures that are false.
    """
    if workload is not None:
        check_workload_of(plan, workload)
    if machine is not None:
        check_machine(plan, machine)
    tell = teller(on_part)
    tell("proving", 0, 3)
    report = prove(plan)
    tell("simulating", 1, 3)
    timelines = play_each(plan)
    tell("lower bound", 2, 3)
    found = certificate_of(plan, lp=lp)
    notes = _Notes(plan, timelines)
    notes.jobs()
    notes.bytes(report)
    notes.seconds()
    notes.barrier(again=lp)
    bound = notes.bound(found, lp=lp)
    notes.words(found)
    if notes.false:
        raise FalseFigures(tuple(notes.false))
    rest = not_checked(plan, notes.checked, notes.why, workload=workload is not None, machine=machine is not None)
    figures = tuple(notes.checked)
    return Examined(report=replace(report, figures=figures, not_checked=rest), bound=bound, timeline=notes.timeline)


class _Notes:
    """timeline: of the slowest rank.
    false: a sentence for each figure that is not as stated.
    why: a figure not computed -> the reason.
    """

    def __init__(self, plan: Plan, timelines: Sequence[Timeline]) -> None:
        self.plan = plan
        self.timelines = timelines
        self.timeline = slowest(timelines)
        self.checked: list[str] = []
        self.false: list[str] = []
        self.why = dict(_BEYOND)
        self._version()

    def _version(self) -> None:
        said = self.plan.choices.get("cost_model")
        if said == VERSION and type(said) is int:
            self.checked.append("cost_model")
        elif said is not None:
            self.false.append(
                f"cost_model is {said!r} in the plan, and this pstar-sim predicts by version {VERSION}; plan again"
            )

    def jobs(self) -> None:
        ranked, workload = self.plan.ranked, self.plan.workload
        if ranked is None:
            return
        hardest = tightest(ranked, self.plan.machine)
        if (hardest.batch, hardest.moments) != (workload.batch, workload.moments):
            self.false.append(
                "workload is not the hardest of the jobs of the plan's ranks, moment by moment; plan again"
            )

    def bytes(self, report: CheckReport) -> None:
        stated = byte_figures(self.plan, report.peak_bytes)
        self.checked += stated.checked
        self.false += stated.false

    def seconds(self) -> None:
        """Times agree to SECONDS_AGREE, peaks to the byte."""
        plan, timeline = self.plan, self.timeline
        peaks = [each.peak_bytes for each in self.timelines]
        tflops, mfu = tflops_and_mfu(plan.ranked or (plan.workload,), timeline.iteration_s, plan.machine)
        for name, value, tolerance in (
            ("iteration_s", timeline.iteration_s, SECONDS_AGREE),
            ("tokens_per_s", plan.tokens / timeline.iteration_s, SECONDS_AGREE),
            ("tflops_per_gpu", tflops, SECONDS_AGREE),
            ("mfu", mfu or 0.0, SECONDS_AGREE),
            ("peak_gpu_bytes", max(peak["gpu"] for peak in peaks), 0.0),
            ("peak_host_bytes", max(peak["host"] for peak in peaks), 0.0),
        ):
            stated = plan.predictions.get(name)
            if stated is None or any(line.startswith(f"{name} is ") for line in self.false):
                continue
            if abs(stated - value) <= tolerance * abs(value):
                self.checked += [] if name in self.checked else [name]
            else:
                self.false.append(
                    f"{name} is {stated:.15g} in the plan, but the simulation of its steps gives {value:.15g}"
                )

    def barrier(self, *, again: bool) -> None:
        """again: whether to make the plan without its barrier."""
        timeline = self.timeline
        stated = self.plan.predictions.get("barrier_cost_s")
        if stated is None:
            return
        if self.plan.settings.barrier(self.plan.workload.compute_dtype) is None:
            self.false.append(f"barrier_cost_s is {stated:.9g} in the plan, but no Adam waits for all gradients in it")
        elif not 0 <= stated < timeline.iteration_s:
            self.false.append(
                f"barrier_cost_s is {stated:.9g} in the plan, but its iteration lasts {timeline.iteration_s:.9g} s"
            )
        elif again:
            self._barrier_again(stated)

    def _barrier_again(self, stated: float) -> None:
        plan = self.plan
        if split_spec(plan.policy)[0] not in policies():
            self.why["barrier_cost_s"] = f"{plan.policy} is no policy of this pstar-sim, which would have to plan again"
            return
        if plan.workload.relayed:
            self.why["barrier_cost_s"] = (
                "the policy chose the order of the iteration, and the plan holds no other order"
            )
            return
        cost_s = barrier_cost_of(plan, self.timeline)
        if cost_s is None or abs(stated - cost_s) > SECONDS_AGREE * self.timeline.iteration_s:
            found = "that plan does not fit" if cost_s is None else f"without the barrier it is {cost_s:.9g} s faster"
            self.false.append(f"barrier_cost_s is {stated:.9g} in the plan, but planned again {found}")
        else:
            self.checked.append("barrier_cost_s")

    def bound(self, found: Certificate, *, lp: bool) -> str:
        """Returns words for the recomputed bound and gap."""
        plan = self.plan
        try:
            said = agree(plan, found=found)
        except PlanError as error:
            self.false.append(str(error))
            return str(error)
        stated = plan.predictions.get("lower_bound_s")
        seconds = self.timeline.iteration_s
        if stated is not None:
            self._stated_bound(stated, seconds, lp=lp)
        self._gap(stated, seconds)
        return said

    def _stated_bound(self, stated: float, seconds: float, *, lp: bool) -> None:
        if stated > seconds * (1 + SECONDS_AGREE):
            self.false.append(f"lower_bound_s is {stated:.9g} s in the plan, but its iteration lasts {seconds:.9g} s")
        elif self._method() == "fluid LP" and not lp:
            self.why["lower_bound_s"] = "of the fluid LP, which --certify solves again; not below the joint LP"
        else:
            self.checked.append("lower_bound_s")

    def _gap(self, stated: float | None, seconds: float) -> None:
        gap = self.plan.predictions.get("gap")
        if gap is not None and not stated:
            self.false.append(f"gap is {gap:.9g} in the plan, which states no lower_bound_s")
        elif gap is not None and stated:
            value = seconds / stated - 1
            if abs(value - gap) <= SECONDS_AGREE * max(1.0, abs(value)):
                self.checked.append("gap")
            else:
                self.false.append(
                    f"gap is {gap:.9g} in the plan, but {seconds:.9g} s is {value:.9g} over its lower_bound_s"
                )

    def _method(self) -> object:
        said = self.plan.choices.get("certificate")
        return said.get("bound") if isinstance(said, Mapping) else None

    def words(self, found: Certificate) -> None:
        plan = self.plan
        said, sources = plan.choices.get("confidence"), confidence(plan.workload, plan.machine)
        if said == sources:
            self.checked.append("confidence")
        elif said is not None:
            self.false.append(f"confidence is {said} in the plan, but by its machine it is {sources}")
        self._certificate(found)
        self._expected_error()

    def _expected_error(self) -> None:
        plan = self.plan
        error, known = plan.predictions.get("expected_error"), trust(plan.machine, plan.policy, plan.workload).error
        rows = plan.choices.get("validation")
        if rows == validation_digest():
            self.checked.append("validation")
        elif rows is not None:
            self.why["validation"] = "this pstar-sim has no validation with this digest"
        if error is None:
            return
        if not 0 <= error < inf:
            self.false.append(f"expected_error is {error:.9g} in the plan; it is a share of the seconds, 0 or more")
        elif error == known:
            self.checked.append("expected_error")
        elif isinstance(rows, str) and rows != validation_digest():
            self.why["expected_error"] = f"of a validation that this pstar-sim does not have; its own finds {known:.9g}"
        else:
            self.false.append(f"expected_error is {error:.9g} in the plan, but validation finds {known:.9g}")

    def _certificate(self, found: Certificate) -> None:
        said: object = self.plan.choices.get("certificate")
        if said is None or said == {}:
            return
        if not isinstance(said, Mapping):
            self.false.append(
                f"certificate is {said!r} in the plan; it must name the kind of bound and the term that binds"
            )
            return
        keys = ["bound", "binding", "relative_to"]
        if "fluid LP" in (said.get("bound"), found.text["bound"]):
            self.why["certificate"] = "the solver of a linear program decides which resource binds it"
            keys = ["relative_to"]
        for key in keys:
            one_bound = isinstance(said.get(key), str) and {said.get(key), found.text.get(key)} <= COARSE
            if said.get(key) != found.text.get(key) and not one_bound:
                self.false.append(
                    f"certificate.{key} is {said.get(key)!r} in the plan, but computed again {found.text.get(key)!r}"
                )
                return
        if "certificate" not in self.why:
            self.checked.append("certificate")


class LoadedPlan(Plan):
    """A plan read from a file."""

    def check(self, workload: Workload | None = None, machine: Machine | None = None) -> CheckReport:
        """Computes everything that the plan states again; see `examine`."""
        return examine(self, workload, machine).report


def load_plan(path: str | Path) -> LoadedPlan:
    """Returns the plan in a file, unchecked. Raises PlanError naming the file and the field or line."""
    plan = plans.load_plan(path)
    return LoadedPlan(**{f.name: getattr(plan, f.name) for f in fields(plan)})
