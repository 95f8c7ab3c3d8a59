"""The gain from a tenth more of each part of a machine, or from one more GPU, in time and in the largest model.

Each part is enlarged by itself (`override`), the job is planned and simulated again, and the deepest model of the
family is searched again. Each prediction is the fastest policy's.

[Note: better is not worse] The plan for a better machine may turn out slower: policies are heuristics, and a faster
link takes more DRAM bandwidth from CPU Adam. But a better part can run as slowly as the old one, so the time with more
of it is the least of three: of the fastest plan made for it, of the unchanged plan simulated on it (REPLAYED), and the
present one (AS_NOW). One more GPU gives every GPU another job, so only a plan made for it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypedDict

from pstar_sim.arguments import flag, function, number
from pstar_sim.arguments import names as listed
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import model_entry
from pstar_sim.catalog.overrides import has_figure, override
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import PstarError
from pstar_sim.planner.asked import asked_names, settings_of
from pstar_sim.planner.balance import refuse_balance
from pstar_sim.planner.batch_shares import Share, machine_of, share_out
from pstar_sim.planner.collection import Collection
from pstar_sim.planner.compare import Comparison, compare
from pstar_sim.planner.limits import max_model
from pstar_sim.planner.trust import error_of_change, error_of_ratio, trust
from pstar_sim.policy.registry import named
from pstar_sim.sim.play import play
from pstar_sim.workload.loading import Loading, loading_of
from pstar_sim.workload.presets import axes_of, can_vary
from pstar_sim.workload.workload import Workload

PARTS: dict[str, tuple[str, ...]] = {
    "GPU memory": ("gpu.memory",),
    "GPU speed": ("gpu.flops.fp32", "gpu.flops.fp16", "gpu.flops.bf16", "gpu.hbm"),
    "host RAM": ("host.memory",),
    "link": ("link.h2d", "link.d2h"),
    "DRAM bandwidth": ("host.dram",),
    "CPU cores": ("host.cores",),
    "peer link": ("peer.bandwidth",),
    "network": ("network.bandwidth",),
    "NVMe": ("nvme.read", "nvme.write", "nvme.read_beside", "nvme.write_beside"),
    "one more GPU": ("gpus",),
}
"""Parts that can be enlarged -> their figures. Parts that the machine does not have are left out. Cores and Adam: see
overrides.py. More DRAM alone does not speed up Adam here, because Adam's rate is a separate figure, that of the cores.
One more GPU in each node is not a tenth: it has its own link and as many sequences as the others, and shares the host
with them."""


ROUNDING = 1e-9  # relative difference below which simulated times count as equal

POLICIES = named(lambda able: able.yardstick)
"""Policies that are tried if none is named. Policies that try others are left out for speed: every part is planned and
its limit searched again."""


PLANNED, REPLAYED, AS_NOW = "planned", "replayed", "as now"
"""Origin of iteration_s, see [Note: better is not worse]."""


@dataclass(frozen=True, kw_only=True)
class PartEffect:
    """part: None for the machine as it is.
    iteration_s: of the fastest policy that fits; None if none fits.
    expected_error, trust: of iteration_s, as in `Row`.
    change: relative change of the time per token (-0.05: 5 % faster).
    change_error: one standard deviation of `change` (trust.py, [Note: error of a change]).
    how: origin of iteration_s ([Note: better is not worse]).
    planned_s: of the fastest plan for the larger machine, if iteration_s is another.
    layers: of the family's largest model, trained by largest_policy.
    more_layers: than on the machine as it is.
    largest_policy: trains the largest model now.
    """

    part: str | None
    policy: str | None
    iteration_s: float | None
    change: float | None
    layers: int | None
    params: int | None
    more_layers: int | None
    largest_policy: str | None
    how: str = PLANNED
    planned_s: float | None = None
    expected_error: float | None = None
    trust: str | None = None
    change_error: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Sensitivity(Collection):
    """workload: the job of one rank.
    batch: sequences per micro-batch, of all GPUs together.
    by: share by which each part is enlarged.
    short: what each policy lacks now, if none fits.
    """

    workload: Workload
    machine: Machine
    settings: Settings
    batch: int
    by: float
    policies: tuple[str, ...]
    now: PartEffect
    rows: tuple[PartEffect, ...]
    short: tuple[str, ...] = ()

    _name = "part"

    def _rows(self) -> tuple[PartEffect, ...]:
        return (self.now, *self.rows)

    def to_json(self) -> list[dict[str, object]]:
        return [{**asdict(row), **self.workload.said} for row in (self.now, *self.rows)]


@without_garbage_collection()
def sensitivity(
    workload: Workload | Sequence[Workload],
    machine: Machine | str,
    *,
    policies: Sequence[str] | str = POLICIES,
    settings: Settings | None = None,
    loading: Loading | str | None = None,
    by: float = 0.1,
    parts: Iterable[str] | None = None,
    largest: bool = True,
    on_part: Callable[[str, int, int], None] | None = None,
) -> Sensitivity:
    """Returns the gain from a little more of each part of the machine, in time and in the largest model.

    workload, machine: as in `compare`. If ranks take different shares, one more GPU is left out, because its share is
        not known.
    policies, settings: as in `compare`. Each machine gets the fastest of these policies.
    loading: as in `fits`.
    by: share by which each part is enlarged, 0.1 for a tenth.
    parts: names in `PARTS`; None: all that the machine has.
    largest: whether to search the largest model too (presets only; for a trace only times are compared).
    on_part: called before each part, with the part, its number and the number of parts.

    Raises PstarError for an unknown part.
    """
    machine, settings = machine_of(machine), settings_of(settings)
    policies = asked_names(policies)
    refuse_balance(policies, machine)
    if not -1 < number("by", by, above=-1) < 100 or by == 0:
        raise PstarError(f"by = {by:g} is not a change; give a share such as 0.1")
    flag("largest", largest)
    if on_part is not None:
        function("on_part", on_part)
    names = list(PARTS) if parts is None else _known_parts(parts)
    share = share_out(workload, machine)
    ranked, one = share.ranked, share.workload
    largest = largest and can_vary(one)
    asked = _MachineQuestion(
        share=share,
        machine=machine,
        policies=policies,
        settings=settings,
        loading=loading_of(loading),
        by=by,
        largest=largest,
    )

    changed = [(name, None if ranked and name == "one more GPU" else _more(machine, name, by)) for name in names]
    wanted = [(name, where) for name, where in changed if where is not None]
    if parts is not None and len(wanted) < len(changed):
        raise _no_part(machine, next(name for name, where in changed if where is None))

    def tell(part: str, count: int) -> None:
        if on_part is not None:
            on_part(part, count, 1 + len(wanted))

    tell("as it is", 0)
    now, plan, short = asked.now()
    rows: list[PartEffect] = []
    for count, (name, where) in enumerate(wanted, start=1):
        tell(name, count)
        rows.append(asked.effect(name, where, now, plan))
    return Sensitivity(
        workload=one,
        machine=machine,
        settings=settings,
        batch=share.batch,
        by=by,
        policies=tuple(policies),
        now=now,
        rows=tuple(rows),
        short=short,
    )


@dataclass(frozen=True, kw_only=True)
class _Deepest:
    layers: int
    params: int | None
    policy: str


class _Larger(TypedDict):
    layers: int | None
    params: int | None
    more_layers: int | None
    largest_policy: str | None


@dataclass(frozen=True, kw_only=True)
class _MachineQuestion:
    share: Share
    machine: Machine
    policies: Sequence[str]
    settings: Settings
    loading: Loading
    by: float
    largest: bool

    def now(self) -> tuple[PartEffect, Plan | None, tuple[str, ...]]:
        """The machine as it is, its fastest plan, and words for what each policy lacks."""
        found = self._compared(self.machine)
        best = found.best().row if any(row.fits for row in found.rows) else None
        deepest = self._deepest(self.machine, self.policies, {})
        effect = PartEffect(
            part=None,
            policy=None if best is None else best.policy,
            iteration_s=None if best is None else best.iteration_s,
            change=None,
            layers=None if deepest is None else deepest.layers,
            params=None if deepest is None else deepest.params,
            more_layers=None,
            largest_policy=None if deepest is None else deepest.policy,
            expected_error=None if best is None else best.expected_error,
            trust=None if best is None else best.trust,
        )
        if best is None:
            return effect, None, tuple(str(row.reason) for row in found.rows)
        return effect, found[best.policy].plan, ()

    def effect(self, part: str, where: Machine, now: PartEffect, plan: Plan | None) -> PartEffect:
        """plan: the fastest for the machine as it is."""
        found = self._compared(where)
        best = found.best().row if any(row.fits for row in found.rows) else None
        policy, seconds = (None, None) if best is None else (best.policy, best.iteration_s)
        how, planned_s = PLANNED, None
        if part != "one more GPU" and self.by > 0 and plan is not None and now.iteration_s is not None:
            replayed_s = play(replace(plan, machine=where)).iteration_s
            kept_s = min(replayed_s, now.iteration_s)
            if seconds is None or kept_s < seconds * (1 - ROUNDING):
                how = REPLAYED if replayed_s <= now.iteration_s else AS_NOW
                policy, seconds, planned_s = now.policy, kept_s, seconds
        change, belief = (
            self._change(seconds, where, now),
            None if policy is None else trust(where, policy, self.share.workload),
        )
        return PartEffect(
            part=part,
            policy=policy,
            iteration_s=seconds,
            change=change,
            how=how,
            planned_s=planned_s,
            expected_error=None if belief is None else belief.error,
            trust=None if belief is None else belief.label,
            change_error=_change_error(part, change, now.expected_error, None if belief is None else belief.error),
            **self._larger(where, now),
        )

    def _compared(self, where: Machine) -> Comparison:
        each = self.share.ranked or (self.share.workload,) * where.world_size
        return compare(
            each,
            where,
            policies=self.policies,
            settings=self.settings,
            loading=self.loading,
            barrier_cost=False,
            near=False,
        )

    def _change(self, seconds: float | None, where: Machine, now: PartEffect) -> float | None:
        if seconds is None or now.iteration_s is None:
            return None
        return seconds / where.data_parallel_size / (now.iteration_s / self.machine.data_parallel_size) - 1

    def _larger(self, where: Machine, now: PartEffect) -> _Larger:
        """Searched with the policy that trains the largest model now, from that depth."""
        if now.largest_policy is None:
            deepest = self._deepest(where, self.policies, {})
        else:
            deepest = self._deepest(where, (now.largest_policy,), {now.largest_policy: now.layers or 0})
        if deepest is None:
            return {"layers": None, "params": None, "more_layers": None, "largest_policy": None}
        more = None if now.layers is None else deepest.layers - now.layers
        layers, params, policy = deepest.layers, deepest.params, deepest.policy
        return {"layers": layers, "params": params, "more_layers": more, "largest_policy": policy}

    def _deepest(self, where: Machine, policies: Sequence[str], near: Mapping[str, int]) -> _Deepest | None:
        if not self.largest:
            return None
        ranked, workload = self.share.ranked, self.share.workload
        limits = max_model(
            where,
            batch=sum(w.batch for w in ranked) if ranked else workload.batch * where.data_parallel_size,
            seq=workload.sequence,
            like=model_entry(workload.model).name,
            policies=policies,
            settings=self.settings,
            micro_batches=workload.micro_batches,
            loading=self.loading,
            catalog=False,
            near=near,
            **axes_of(workload).given,
        )
        best = max(limits.rows, key=lambda row: row.value)
        return _Deepest(layers=best.value, params=best.params, policy=best.policy)


def _change_error(part: str, change: float | None, *errors: float | None) -> float | None:
    known = [error for error in errors if error is not None]
    if change is None or len(known) < len(errors):
        return None
    return error_of_ratio(1 + change, *known) if part == "one more GPU" else error_of_change(change, *known)


def _known_parts(parts: Iterable[str]) -> list[str]:
    names = [str(part) for part in listed("parts", parts, "parts of a machine")]
    for name in names:
        if name not in PARTS:
            raise PstarError(f"{name!r} is not a part of a machine; it can be {', '.join(PARTS)}")
    return names


def _no_part(machine: Machine, part: str) -> PstarError:
    if part == "one more GPU":
        return PstarError(f"the ranks of {machine.name} differ, so nothing says which GPU one more would be")
    return PstarError(f"{machine.name} has no {part} to enlarge")


def _more(machine: Machine, part: str, by: float) -> Machine | None:
    if part == "network" and machine.nodes == 1:
        return None
    if part == "peer link" and (machine.peer is None or machine.local_ranks == 1):
        return None
    if part == "NVMe" and machine.nvme is None:
        return None
    if part == "one more GPU":
        if any((r.gpu, r.link) != (machine.ranks[0].gpu, machine.ranks[0].link) for r in machine.ranks):
            return None
        return override(machine, {"gpus": machine.local_ranks + 1})
    paths = [path for path in PARTS[part] if has_figure(machine, path)]
    return override(machine, dict.fromkeys(paths, f"x{1 + by:.6g}"))
