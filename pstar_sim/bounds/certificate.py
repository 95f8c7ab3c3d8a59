"""Certificates: a plan's lower bound, its binding term, and the workload, machine, settings and layout for which it
holds.

`Certifier` computes it once per layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pstar_sim.bounds.bound_facts import Bound
from pstar_sim.bounds.bounds import lower_bound, relative_to
from pstar_sim.bounds.shares import AnyShares, any_job
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.figures import BINDS_NAMES
from pstar_sim.core.layout import Layout, build_layout
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import part_counts
from pstar_sim.errors import PlanError
from pstar_sim.policy.passes.parts import parts_of
from pstar_sim.units import format_s
from pstar_sim.workload.workload import Workload

AGREE = {"closed form": 1e-6, "joint LP": 1e-6, "fluid LP": 1e-4}
"""Relative difference up to which two computations of a bound agree. A linear program's proof depends on the solver."""
COARSE = frozenset({"closed form", "joint LP"})
"""Methods that `agree` treats as the same: plans of the first edition call the joint LP a closed form."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """seconds: no schedule is faster.
    text: "bound" is "joint LP", "fluid LP" or "closed form", "binding" the largest term, "relative_to" the setting;
        "note" a program that could not be solved.
    """

    seconds: float
    text: Mapping[str, object]

    @property
    def note(self) -> str | None:
        note = self.text.get("note")
        return None if note is None else str(note)


class Certifier:
    """For a preset on unlike GPUs, bounds hold for all shares of the batch ([Note: the bound over shares] in
    shares.py), else for the ranks' own.

    lp: also solve the fluid program (seconds, not milliseconds; tighter).
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        settings: Settings,
        *,
        lp: bool = False,
        ranked: Sequence[Workload] | None = None,
    ) -> None:
        """ranked: each rank's own, if these differ."""
        self.workload, self.machine, self.settings, self.lp, self.ranked = workload, machine, settings, lp, ranked
        self._known: list[tuple[Layout, Certificate]] = []
        self._searches: list[AnyShares] = []
        first = workload if ranked is None else ranked[0]
        self._job_of = any_job(first, machine)
        each = (workload,) * machine.data_parallel_size if ranked is None else ranked
        self.batch = sum(w.batch for w in each)

    def usual(self) -> Certificate:
        """Of the layout that a policy starts from."""
        return self.of(self._usual_layout())

    def _usual_layout(self) -> Layout:
        ranks = self.machine.data_parallel_size
        return build_layout(self.workload, chunk_bytes=self.settings.chunk_bytes, ranks=ranks, sums=self.settings.sums)

    def shares(self) -> AnyShares | None:
        """With the layout that a policy starts from; None if the bounds are those of the ranks' own shares."""
        return None if self._job_of is None else self._search(self._usual_layout())

    def own_bound_s(self) -> float:
        """Of the ranks' own shares, with the layout that a policy starts from."""
        return self._bound(self._usual_layout()).seconds

    def _search(self, layout: Layout) -> AnyShares:
        for known in self._searches:
            if known.layout == layout:
                return known
        assert self._job_of is not None
        fluid = self._fluid(layout) if self.lp else None
        search = AnyShares(self.batch, self.machine, self.settings, layout, self._job_of, fluid)
        self._searches.append(search)
        return search

    def _fluid(self, layout: Layout) -> Callable[[Workload, Sequence[Workload]], Bound]:
        from pstar_sim.bounds.fluid import fluid_bound

        def bound(workload: Workload, ranked: Sequence[Workload]) -> Bound:
            return fluid_bound(workload, self.machine, self.settings, layout, ranked=ranked)

        return bound

    def of(self, layout: Layout) -> Certificate:
        """Of every plan with this layout."""
        for known, certificate in self._known:
            if known is layout or (known.chunk_bytes == layout.chunk_bytes and known == layout):
                return certificate
        certificate = self._make(layout)
        self._known.append((layout, certificate))
        return certificate

    def _make(self, layout: Layout) -> Certificate:
        over_shares = None if self._job_of is None else self._search(layout).bound()
        bound = over_shares or self._bound(layout)
        shared = f"{self.batch} in any shares" if over_shares is not None else None
        text: dict[str, object] = {
            "bound": bound.method,
            "binding": bound.binding,
            "relative_to": relative_to(self.workload, self.machine, self.settings, layout, shared),
        }
        if bound.notes:
            text["note"] = "; ".join(bound.notes)
        return Certificate(seconds=bound.seconds, text=text)

    def _bound(self, layout: Layout) -> Bound:
        if self.lp:
            from pstar_sim.bounds.fluid import fluid_bound

            return fluid_bound(self.workload, self.machine, self.settings, layout, ranked=self.ranked)
        return lower_bound(self.workload, self.machine, self.settings, layout, ranked=self.ranked)


def require_bounded(plan: Plan) -> None:
    """Raise PlanError for a chunk updated in more parts than the bounds count with."""
    most = parts_of(plan.layout)
    for chunk, count in part_counts(plan.steps).items():
        if count > most.get(chunk, 1):
            name = plan.workload.tensors[plan.layout.chunks[chunk].slots[0].tensor].name
            raise PlanError(
                f"plan of {plan.policy!r} updates chunk {chunk} ({name}, ...) in {count} parts; the lower bound counts "
                f"with at most {most.get(chunk, 1)}; give it as many parts or fewer"
            )


def certificate_of(plan: Plan, *, lp: bool = False) -> Certificate:
    """Raises the error of `require_bounded`.

    lp: also solve the fluid program.
    """
    require_bounded(plan)
    return Certifier(plan.workload, plan.machine, plan.settings, lp=lp, ranked=plan.ranked).of(plan.layout)


def agree(plan: Plan, *, lp: bool = False, found: Certificate | None = None) -> str:
    """Returns a sentence if the plan's figures agree with a recomputation, or if there are none.

    Raises PlanError, naming both figures, if they do not.
    """
    stored = plan.predictions.get("lower_bound_s")
    said = plan.choices.get("certificate")
    method = said.get("bound") if isinstance(said, Mapping) else None
    found = found or certificate_of(plan, lp=lp)
    kind = str(found.text["bound"])
    binds = BINDS_NAMES.get(str(found.text["binding"]), found.text["binding"])
    own = f"{kind}: {format_s(found.seconds)}, {binds} binds; relative to {found.text['relative_to']}"
    if found.note is not None:
        own += f"; {found.note}"
    if stored is None:
        return f"lower bound by {own}; the plan carries none to compare"
    return f"lower bound by {own}; {_verdict(stored, method, found.seconds, kind)}"


def _verdict(stored_s: float, method: object, found_s: float, kind: str) -> str:
    if stored_s <= 0:
        raise PlanError(f"lower_bound_s is {stored_s:.9g} s in the plan; a lower bound is above 0")
    tolerance = max(AGREE[kind], AGREE.get(str(method), AGREE["joint LP"]))
    if method == kind or method not in AGREE or {method, kind} <= COARSE:
        if abs(stored_s - found_s) > tolerance * found_s:
            raise PlanError(
                f"lower_bound_s is {stored_s:.9g} s in the plan, but the {kind} of its workload, machine, settings and "
                f"layout is {found_s:.9g} s"
            )
        return "as stored"
    if method == "fluid LP":  # the fluid LP never proves less than the joint LP
        if found_s > stored_s * (1 + tolerance):
            raise PlanError(
                f"lower_bound_s is {stored_s:.9g} s in the plan, by the fluid LP, but the {kind} gives "
                f"{found_s:.9g} s; the {kind} is never above the fluid LP"
            )
        return f"below the stored {format_s(stored_s)} of the fluid LP, which --certify solves again"
    if found_s < stored_s * (1 - tolerance):
        raise PlanError(
            f"lower_bound_s is {stored_s:.9g} s in the plan, by the {method}, but the fluid LP gives {found_s:.9g} s; "
            f"the fluid LP is never below the {method}"
        )
    return f"above the stored {format_s(stored_s)} of the {method}"
