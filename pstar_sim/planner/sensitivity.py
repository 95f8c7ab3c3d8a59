"""Sensitivity: what a tenth more of each part of a machine, or a GPU more, is worth: in time and in the largest model.

"More RAM or a second GPU?": each part is enlarged by itself (`override`), the job planned and simulated again, and the
depth of the largest model of the same family searched again. The answer is a difference of predictions, each by the
fastest of the policies asked about.

[Note: better is not worse] What is planned for a better machine may turn out slower: policies are heuristics, and a
faster link takes DRAM bandwidth from CPU Adam while it copies. But any plan for the machine as it is is one for the
better machine, and a better part can be run as the old one was. So of a machine with more of one part counts the
fastest of what is planned for it, the unchanged plan simulated there (REPLAYED), and the time of now (AS_NOW); `how`
says which. One more GPU is another job for each of them: there the first alone counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from pstar_sim.arguments import flag, function, number
from pstar_sim.arguments import names as listed
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.models import model_entry
from pstar_sim.catalog.overrides import override
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import PstarError
from pstar_sim.planner.asked import asked_names, settings_of
from pstar_sim.planner.collection import Collection
from pstar_sim.planner.collector import without_garbage_collection
from pstar_sim.planner.compare import compare
from pstar_sim.planner.limits import Written, max_model
from pstar_sim.planner.ranks import machine_of, share_out
from pstar_sim.policy.registry import named
from pstar_sim.renderers import render_text
from pstar_sim.sim.play import play
from pstar_sim.workload.lora import adapter_of
from pstar_sim.workload.workload import Workload

if TYPE_CHECKING:
    import pandas

__all__ = ["PARTS", "POLICIES", "Effect", "Sensitivity", "sensitivity"]

PARTS: dict[str, tuple[str, ...]] = {
    "GPU memory": ("gpu.memory",),
    "GPU speed": ("gpu.flops.fp32", "gpu.flops.fp16", "gpu.flops.bf16", "gpu.hbm"),
    "host RAM": ("host.memory",),
    "link": ("link.h2d", "link.d2h"),
    "DRAM bandwidth": ("host.dram",),
    "CPU cores": ("host.cores",),
    "peer link": ("peer.bandwidth",),
    "network": ("network.bandwidth",),
    "NVMe": ("nvme.read", "nvme.write"),
    "one more GPU": ("gpus",),
}
"""What is enlarged -> its figures. Parts that the machine does not have are left out. Cores and Adam: see overrides.py.
The DRAM alone does not speed up Adam here: its rate is a figure of its own, of the cores. One more GPU in each node is
no tenth: it has its own link and as many sequences as the others, and shares the host with them."""


ROUNDING = 1e-9  # relative difference of simulated times that is none

POLICIES = named(lambda able: able.yardstick)
"""Tried where none is named. What tries others is left out for speed: every part is planned and its limit searched
again."""


PLANNED, REPLAYED, AS_NOW = "planned", "replayed", "as now"
"""Whose iteration_s it is, see [Note: better is not worse]."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """part: None for the machine as it is. iteration_s: of the fastest policy that fits, None if none does; change: of
    the time a token takes, relative (-0.05: 5 % faster). how: [Note: better is not worse]; planned_s: what the fastest
    plan made for it takes, where another time counts. layers, params: of the largest model of the family, found by
    largest_policy (the one that trains the largest now); more_layers against now."""

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Sensitivity(Collection):
    """workload: what one rank does. batch: sequences per micro-batch, of all GPUs together. now: the machine as it is.
    rows: one a part. policies: those that were tried. short: what each of them lacks on the machine as it is, where
    none fits."""

    workload: Workload
    machine: Machine
    settings: Settings
    batch: int
    by: float
    policies: tuple[str, ...]
    now: Effect
    rows: tuple[Effect, ...]
    short: tuple[str, ...] = ()

    _name = "part"

    def _rows(self) -> tuple[Effect, ...]:
        return (self.now, *self.rows)

    def to_json(self) -> list[dict[str, object]]:
        return [asdict(row) for row in (self.now, *self.rows)]

    def to_frame(self) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(self.to_json())

    def __repr__(self) -> str:
        return render_text(self)


@without_garbage_collection()
def sensitivity(
    workload: Workload | Sequence[Workload],
    machine: Machine | str,
    *,
    policies: Sequence[str] | str = POLICIES,
    settings: Settings | None = None,
    by: float = 0.1,
    parts: Iterable[str] | None = None,
    largest: bool = True,
    on_part: Callable[[str, int, int], None] | None = None,
) -> Sensitivity:
    """workload, machine: as in `compare` (where ranks take different shares, one more GPU is left out: nobody says what
    it takes). by: how much more, 0.1 for a tenth. parts: of `PARTS`, by default all that the machine has.
    largest: also search the largest model (presets only; of a trace only times are compared). on_part: called with a
    part, its number and how many there are before it is looked at. Raises PstarError for a part that is none."""
    machine, settings = machine_of(machine), settings_of(settings)
    policies = asked_names(policies)
    if not -1 < number("by", by, above=-1) < 100 or by == 0:
        raise PstarError(f"by = {by:g} is no change; give a share such as 0.1")
    flag("largest", largest)
    if on_part is not None:
        function("on_part", on_part)
    names = list(PARTS) if parts is None else [str(part) for part in listed("parts", parts, "parts of a machine")]
    for name in names:
        if name not in PARTS:
            raise PstarError(f"{name!r} is no part of a machine; it can be {', '.join(PARTS)}")
    share = share_out(workload, machine)
    ranked, one = share.ranked, share.workload
    largest = largest and one.source == "preset"
    written: Written = {}
    short: list[str] = []
    plans: list[Plan] = []  # the fastest for the machine as it is, if any fits

    def effect(part: str | None, where: Machine, now: Effect | None) -> Effect:
        each = ranked or (one,) * len(where.ranks)
        found = compare(each, where, policies=policies, settings=settings, barrier_cost=False, near=False)
        fitting = [row for row in found.rows if row.iteration_s is not None]
        best = found.best().row if fitting else None
        if now is None and best is not None:
            plans.append(found[best.policy].plan)
        elif now is None:
            short.extend(str(row.reason) for row in found.rows)
        asked = policies if now is None or now.largest_policy is None else (now.largest_policy,)
        batch = sum(w.batch for w in ranked) if ranked else one.batch * len(where.ranks)
        near = {} if now is None or now.largest_policy is None else {now.largest_policy: now.layers or 0}
        deepest = _deepest(one, batch, where, asked, settings, near, written) if largest else None
        planned_s = seconds = None if best is None else best.iteration_s
        policy, how = None if best is None else best.policy, PLANNED
        if now is not None and now.iteration_s is not None and by > 0 and part != "one more GPU":
            replayed_s = play(replace(plans[0], machine=where), workloads=ranked).iteration_s
            kept_s = min(replayed_s, now.iteration_s)
            if seconds is None or kept_s < seconds * (1 - ROUNDING):
                seconds, policy, how = kept_s, now.policy, REPLAYED if replayed_s <= now.iteration_s else AS_NOW
        change = None
        if now is not None and now.iteration_s is not None and seconds is not None:
            change = seconds / len(where.ranks) / (now.iteration_s / len(machine.ranks)) - 1
        layers = None if deepest is None else deepest[0]
        return Effect(
            part=part,
            policy=policy,
            iteration_s=seconds,
            change=change,
            layers=layers,
            params=None if deepest is None else deepest[1],
            more_layers=None if now is None or layers is None or now.layers is None else layers - now.layers,
            largest_policy=None if deepest is None else deepest[2],
            how=how,
            planned_s=None if how == PLANNED else planned_s,
        )

    changed = [(name, None if ranked and name == "one more GPU" else _more(machine, name, by)) for name in names]
    if parts is not None:
        for name, where in changed:
            if where is None and name == "one more GPU":
                raise PstarError(f"the ranks of {machine.name} differ: it is not said which GPU one more would be")
            if where is None:
                raise PstarError(f"{machine.name} has no {name} to enlarge")
    wanted = [(name, where) for name, where in changed if where is not None]

    def told(count: int, part: str | None, where: Machine, now: Effect | None) -> Effect:
        if on_part is not None:
            on_part(part or "as it is", count, 1 + len(wanted))
        return effect(part, where, now)

    now = told(0, None, machine, None)
    return Sensitivity(
        workload=one,
        machine=machine,
        settings=settings,
        batch=share.batch,
        by=by,
        policies=tuple(policies),
        now=now,
        rows=tuple(told(count, name, where, now) for count, (name, where) in enumerate(wanted, start=1)),
        short=tuple(short),
    )


def _more(machine: Machine, part: str, by: float) -> Machine | None:
    """The machine with more of one part; None if it has no such part."""
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
    paths = [p for p in PARTS[part] if not p.startswith("gpu.flops") or p[10:] in machine.gpu.flops_per_s]
    return override(machine, dict.fromkeys(paths, f"x{1 + by:.6g}"))


def _deepest(
    workload: Workload,
    batch: int,
    machine: Machine,
    policies: Sequence[str],
    settings: Settings,
    near: Mapping[str, int],
    written: Written,
) -> tuple[int, int | None, str]:
    """(layers, parameters, policy) of the largest model of the workload's family. batch: of all ranks. near, written:
    see `max_model`; a tenth more of a part moves the limit little, or not at all."""
    limits = max_model(
        machine,
        batch=batch,
        seq=workload.sequence,
        like=model_entry(workload.model).name,
        policies=policies,
        settings=settings,
        micro_batches=workload.micro_batches,
        dtype=workload.dtype,
        checkpointing=workload.checkpointing,
        lora=adapter_of(workload),
        optimizer=workload.optimizer.name,
        catalog=False,
        near=near,
        written=written,
    )
    best = max(limits.rows, key=lambda row: row.value)
    return best.value, best.params, best.policy
