"""Everything that a plan states, computed again: the proof and the bytes of core/checker, then the seconds of a
simulation, the lower bound, and the sources of the inputs of a prediction.

[Note: what a check says] is in core/figures.py. The module looks into no policy. Statements that only a policy can make
are named, not computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path

from pstar_sim.bounds.certificate import COARSE, Certificate, agree, certificate_of
from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core import plan as plans
from pstar_sim.core.check_report import CheckReport
from pstar_sim.core.checker.check import prove
from pstar_sim.core.checker.same_job import check_machine, check_workload_of
from pstar_sim.core.figures import byte_figures, not_checked, own_shares
from pstar_sim.core.plan import Plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import VERSION, changed_since
from pstar_sim.errors import FalseFigures, PlanError
from pstar_sim.planner.asked import OnPart, teller
from pstar_sim.planner.confidence import claims_more, confidence
from pstar_sim.planner.trust import trust
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.policy.registry import policies
from pstar_sim.sim.play import play
from pstar_sim.units import format_s
from pstar_sim.workload.workload import Workload

__all__ = ["SECONDS_AGREE", "Examined", "LoadedPlan", "examine", "load_plan"]

SECONDS_AGREE = 1e-6
"""Relative difference up to which a stated time and the simulated time agree: sums may be rounded in another order."""
_BEYOND = {
    "barrier_cost_s": "the policy would have to plan again without its barrier",
    "policy_iteration_s": "the policy's own estimate",
}
"""Figures that are not computed again, and why."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """The results of examining a plan.

    report: the proof, the other checks, and the statements that were not checked.
    bound: words for the comparison with the recomputed lower bound.
    timeline: the simulated timeline.
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
    """Proves the plan and computes its statements again. Returns the results.

    workload, machine: also compare the plan with these.
    lp: whether to solve the fluid program of the bound again.
    on_part: called with the next part of the work, the number of parts done and the number of all parts.

    Raises PlanError with the first error in the plan itself. Raises FalseFigures with all its figures that are false.
    """
    if workload is not None:
        check_workload_of(plan, workload)
    if machine is not None:
        check_machine(plan, machine)
    tell = teller(on_part)
    tell("proving", 0, 3)
    report = prove(plan)
    tell("simulating", 1, 3)
    timeline = play(plan)
    tell("lower bound", 2, 3)
    found = certificate_of(plan, lp=lp)
    notes = _Notes(plan, timeline)
    notes.bytes(report)
    notes.seconds()
    bound = notes.bound(found, lp=lp)
    notes.words(found)
    if notes.false:
        raise FalseFigures(tuple(notes.false))
    rest = not_checked(plan, notes.checked, notes.why, workload=workload is not None, machine=machine is not None)
    figures = tuple(notes.checked)
    return Examined(report=replace(report, figures=figures, not_checked=rest), bound=bound, timeline=timeline)


class _Notes:
    """Findings about one plan.

    earlier: words for the difference between the earlier version of the cost model that made the plan's predictions and
        today's version; None if today's version made them, or predicts the same.
    checked: names of the figures that are as the plan states them.
    false: a sentence for each figure that is not.
    why: name of a figure that was not computed again -> the reason.
    """

    def __init__(self, plan: Plan, timeline: Timeline) -> None:
        self.plan = plan
        self.timeline = timeline
        self.apart = own_shares(plan)
        self.checked: list[str] = []
        self.false: list[str] = []
        self.why = dict(_BEYOND)
        self.old = False  # whether an earlier version of the cost model wrote the plan's figures
        self.bounds_rose = False  # bounds of several micro-batches are higher than under earlier cost models
        self.earlier = self._version()

    def _version(self) -> str | None:
        said = self.plan.choices.get("cost_model", 1)
        if type(said) is not int or not 1 <= said <= VERSION:
            self.false.append(f"cost_model is {said!r} in the plan; this pstar-sim knows versions 1 to {VERSION}")
            return None
        self.checked += ["cost_model"] if "cost_model" in self.plan.choices else []
        self.old = said < VERSION
        self.bounds_rose = self.old and self.plan.workload.micro_batches > 1
        changed = changed_since(said, self.plan)
        if changed is None:
            return None
        seconds = format_s(self.timeline.iteration_s)
        return (
            f"predicted by version {said} of the cost model, in which {changed}; version {VERSION} predicts {seconds} "
            "per iteration"
        )

    def _differs(self, name: str, sentence: str) -> None:
        """Record a prediction that differs from the figure computed now: as false, or as that of an earlier cost
        model."""
        if self.earlier is None:
            self.false.append(sentence)
        else:
            self.why[name] = self.earlier

    def bytes(self, report: CheckReport) -> None:
        stated = byte_figures(self.plan, report.peak_bytes)
        self.checked += stated.checked
        self.false += stated.false

    def seconds(self) -> None:
        """Compare the figures of the simulation with the plan's: times to SECONDS_AGREE, peaks to the byte."""
        plan, timeline = self.plan, self.timeline
        tokens = plan.workload.tokens * len(plan.machine.ranks)
        for name, value, tolerance in (
            ("iteration_s", timeline.iteration_s, SECONDS_AGREE),
            ("tokens_per_s", tokens / timeline.iteration_s, SECONDS_AGREE),
            ("peak_gpu_bytes", timeline.peak_bytes["gpu"], 0.0),
            ("peak_host_bytes", timeline.peak_bytes["host"], 0.0),
        ):
            stated = plan.predictions.get(name)
            if stated is None or any(line.startswith(f"{name} is ") for line in self.false):
                continue
            if self.apart is not None:
                self.why[name] = self.apart
            elif abs(stated - value) <= tolerance * abs(value):
                self.checked += [] if name in self.checked else [name]
            else:
                self._differs(
                    name, f"{name} is {stated:.9g} in the plan, but the simulation of its steps gives {value:.9g}"
                )
        self._barrier()

    def _barrier(self) -> None:
        timeline = self.timeline
        stated = self.plan.predictions.get("barrier_cost_s")
        if stated is None:
            return
        if self.plan.settings.barrier(self.plan.workload.dtype) is None:
            self.false.append(f"barrier_cost_s is {stated:.9g} in the plan, but no Adam waits for all gradients in it")
        elif self.apart is None and not 0 <= stated < timeline.iteration_s:
            self.false.append(
                f"barrier_cost_s is {stated:.9g} in the plan, but its iteration lasts {timeline.iteration_s:.9g} s"
            )

    def bound(self, found: Certificate, *, lp: bool) -> str:
        """Compare the stated lower bound, and the gap over it, with a recomputation. Returns words for the
        comparison."""
        plan = self.plan
        try:
            said = agree(plan, found=found, earlier=self.bounds_rose)
        except PlanError as error:
            self.false.append(str(error))
            return str(error)
        stated = plan.predictions.get("lower_bound_s")
        seconds = self.timeline.iteration_s
        if self.apart is not None or "iteration_s" in self.why:
            seconds = plan.predictions.get("iteration_s", 0.0)
        if stated is not None:
            self._stated_bound(stated, found, seconds, lp=lp)
        self._gap(stated, seconds)
        return said

    def _stated_bound(self, stated: float, found: Certificate, seconds: float, *, lp: bool) -> None:
        """Record, for a stated bound that agrees with the recomputed bound, whether it is as stated, or why this is not
        known."""
        if stated > seconds * (1 + SECONDS_AGREE):
            self.false.append(f"lower_bound_s is {stated:.9g} s in the plan, but its iteration lasts {seconds:.9g} s")
        elif self.apart is not None:
            self.why["lower_bound_s"] = self.apart
        elif self.bounds_rose and abs(stated - found.seconds) > SECONDS_AGREE * found.seconds:
            self.why["lower_bound_s"] = self.earlier or "of an earlier version of the cost model, with other bounds"
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
        """Compare the words about the sources of the figures: the measured parts, the bound, and the errors of
        validation."""
        plan = self.plan
        said, sources = plan.choices.get("confidence"), confidence(plan.workload, plan.machine)
        if said == sources:
            self.checked.append("confidence")
        elif self.old and said is not None:
            self.why["confidence"] = "of an earlier version of the cost model, which had other words for it"
        elif isinstance(said, Mapping) and set(said) != set(sources) and not claims_more(said, sources):
            self.why["confidence"] = (
                f"of a version of pstar-sim that names other inputs ({', '.join(map(str, said)) or 'none'}) "
                f"than this version ({', '.join(sources)})"
            )
        elif said is not None:
            self.false.append(f"confidence is {said} in the plan, but by its machine it is {sources}")
        self._certificate(found)
        self._expected_error()

    def _expected_error(self) -> None:
        """Compare the expected error. An earlier validation, with other rows, may have found another error, so only an
        impossible error is false."""
        plan = self.plan
        error, known = plan.predictions.get("expected_error"), trust(plan.machine, plan.policy, plan.workload).error
        if error is None:
            return
        if not 0 <= error < inf:
            self.false.append(f"expected_error is {error:.9g} in the plan; it is a share of the seconds, 0 or more")
        elif split_spec(plan.policy)[0] not in policies():
            self.why["expected_error"] = "not one of the policies that were validated"
        elif error == known:
            self.checked.append("expected_error")
        else:
            self.why["expected_error"] = f"validation had other rows then; it finds {known:.9g} now"

    def _certificate(self, found: Certificate) -> None:
        said: object = self.plan.choices.get("certificate")
        if said is None or said == {}:
            return
        if not isinstance(said, Mapping):
            self.false.append(
                f"certificate is {said!r} in the plan; it must name the kind of bound and the term that binds"
            )
            return
        if said.get("bound") is None and "lower_bound_s" not in self.plan.predictions:
            self.why["certificate"] = "it states no lower bound; plans for several GPUs once had none"
            return
        keys = ["bound", "binding", "relative_to"]
        if self.apart is not None:
            self.why["certificate"] = self.apart
            keys = ["relative_to"]
        elif "fluid LP" in (said.get("bound"), found.text["bound"]):
            self.why["certificate"] = "the solver of a linear program decides which resource binds it"
            keys = ["relative_to"]
        for key in keys:
            one_bound = isinstance(said.get(key), str) and {said.get(key), found.text.get(key)} <= COARSE
            if said.get(key) != found.text.get(key) and not one_bound:
                self._differs(
                    "certificate",
                    f"certificate.{key} is {said.get(key)!r} in the plan, but computed again {found.text.get(key)!r}",
                )
                return
        if "certificate" not in self.why:
            self.checked.append("certificate")


class LoadedPlan(Plan):
    """A plan read from a file. `check` computes everything that it states again, seconds and bounds included."""

    def check(self, workload: Workload | None = None, machine: Machine | None = None) -> CheckReport:
        """Compute everything that the plan states again; see `examine`. Returns the report."""
        return examine(self, workload, machine).report


def load_plan(path: str | Path) -> LoadedPlan:
    """Returns the plan in a file, without checking the plan. Raises PlanError naming the file and the field or line."""
    plan = plans.load_plan(path)
    return LoadedPlan(**{f.name: getattr(plan, f.name) for f in fields(plan)})
