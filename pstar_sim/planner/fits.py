"""Fits: does this job fit this machine, by policy; with how much room to spare, or what is short and the nearest yes.

Asks memory.py for room (pinned rounding and start-up included), nearest.py for what would do, and simulates what fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from pstar_sim.arguments import choice, flag
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Settings
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.planner.asked import asked_names, settings_of
from pstar_sim.planner.collection import Collection
from pstar_sim.planner.memory import LOADING, least_gpu_bytes, memory_need
from pstar_sim.planner.nearest import nearest
from pstar_sim.planner.ranks import Share, machine_of, share_out
from pstar_sim.planner.trust import trust
from pstar_sim.policy.kit.collector import without_garbage_collection
from pstar_sim.policy.registry import find_policy
from pstar_sim.renderers import render_text
from pstar_sim.sim.play import play
from pstar_sim.workload.workload import Workload

if TYPE_CHECKING:
    import pandas

__all__ = ["Fit", "Fits", "fits"]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One policy's answer; bytes are those of one rank.

    gpu_needed_bytes: the least GPU budget with which it would still fit on this host. host_needed_bytes: payloads,
    pinned rounding and start-up, with as few chunks pinned as the host allows. Headroom is what is left beside them.
    Where it does not fit: short_of ("gpu" or "host"), short_bytes, reason (with the nearest yes), and no figures but
    that place's; reason alone where the policy has no plan for such a machine at all. iteration_s, tokens_per_s:
    simulated. error: median relative error of such times that validation found for this class of machine; trust says
    where it comes from, or that there is none.
    """

    policy: str
    fits: bool
    gpu_needed_bytes: int | None = None
    gpu_available_bytes: int
    host_needed_bytes: int | None = None
    host_available_bytes: int
    host_payload_bytes: int | None = None
    host_rounding_bytes: int | None = None
    host_startup_bytes: int | None = None
    short_of: str | None = None
    short_bytes: int | None = None
    reason: str | None = None
    iteration_s: float | None = None
    tokens_per_s: float | None = None
    error: float | None = None
    trust: str | None = None

    @property
    def gpu_headroom_bytes(self) -> int | None:
        return (
            None if not self.fits or self.gpu_needed_bytes is None else self.gpu_available_bytes - self.gpu_needed_bytes
        )

    @property
    def host_headroom_bytes(self) -> int | None:
        if not self.fits or self.host_needed_bytes is None:
            return None
        return self.host_available_bytes - self.host_needed_bytes

    def to_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "gpu_headroom_bytes": self.gpu_headroom_bytes,
            "host_headroom_bytes": self.host_headroom_bytes,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Fits(Collection):
    """One `Fit` a policy, in the order asked for. workload: what one rank does. batch: sequences per micro-batch, of
    all GPUs together."""

    workload: Workload
    machine: Machine
    settings: Settings
    batch: int
    rows: tuple[Fit, ...]

    @property
    def any(self) -> bool:
        return any(row.fits for row in self.rows)

    def to_json(self) -> list[dict[str, object]]:
        return [row.to_json() for row in self.rows]

    def to_frame(self) -> pandas.DataFrame:
        """One row a policy, columns as in `Fit`."""
        import pandas

        return pandas.DataFrame(self.to_json())

    def __repr__(self) -> str:
        return render_text(self)


@without_garbage_collection()
def fits(
    workload: Workload | Sequence[Workload],
    machine: Machine | str,
    *,
    policies: Iterable[str] | str | None = None,
    settings: Settings | None = None,
    loading: str = "whole",
    times: bool = True,
    near: bool = True,
) -> Fits:
    """Whether each policy (all known ones if none is named) has room for the job, start-up and rounding included.

    workload, machine: as in `compare`. loading: how the weights come ([Note: what the host really has to give] in
    memory.py). times: also plan and simulate what fits. near: look for the nearest yes of what does not. Raises
    UnknownName for a policy nobody knows.
    """
    machine, settings = machine_of(machine), settings_of(settings)
    choice("loading", loading, LOADING)
    flag("times", times)
    flag("near", near)
    names = asked_names(policies)
    share = share_out(workload, machine)
    rows = [_fit(name, share, machine, settings, loading=loading, times=times) for name in names]
    answers = [row for row, _ in rows]
    fitting = [row.policy for row in sorted(answers, key=lambda r: r.iteration_s or 0.0) if row.fits]
    for i, (row, error) in enumerate(rows):
        if error is not None:
            hint = ""
            if near:
                hint = "; " + _nearest(row.policy, share.workload, machine, settings, error, loading, fitting)
            answers[i] = replace(row, reason=str(error) + hint)
    return Fits(workload=share.workload, machine=machine, settings=settings, batch=share.batch, rows=tuple(answers))


def _fit(
    name: str, share: Share, machine: Machine, settings: Settings, *, loading: str, times: bool
) -> tuple[Fit, DoesNotFit | None]:
    workload = share.workload
    gpu, host = machine.gpu_budget_bytes, machine.host_budget_bytes
    try:
        need = memory_need(name, workload, machine, settings, loading=loading)
    except CannotPlan as reason:
        row = Fit(policy=name, fits=False, gpu_available_bytes=gpu, host_available_bytes=host, reason=str(reason))
        return row, None
    except DoesNotFit as error:
        row = Fit(
            policy=name,
            fits=False,
            gpu_available_bytes=gpu,
            host_available_bytes=host,
            gpu_needed_bytes=error.needed_bytes if error.place == "gpu" else None,
            host_needed_bytes=error.needed_bytes if error.place == "host" else None,
            short_of=error.place,
            short_bytes=error.short_bytes,
            reason=str(error),
        )
        return row, error
    row = Fit(
        policy=name,
        fits=True,
        gpu_available_bytes=gpu,
        host_available_bytes=host,
        gpu_needed_bytes=least_gpu_bytes(lambda where: _asked(name, workload, where, settings, loading), machine),
        host_needed_bytes=need.host_bytes,
        host_payload_bytes=need.payload_bytes,
        host_rounding_bytes=need.pinned_bytes - need.payload_bytes,
        host_startup_bytes=need.startup_bytes,
    )
    if times:
        plan = need.plan or find_policy(name)(workload, machine, settings)
        seconds = play(plan, workloads=share.ranked).iteration_s
        belief = trust(machine, name)
        row = replace(
            row,
            iteration_s=seconds,
            tokens_per_s=share.tokens / seconds,
            error=belief.error,
            trust=belief.label,
        )
    return row, None


def _nearest(
    name: str,
    workload: Workload,
    machine: Machine,
    settings: Settings,
    error: DoesNotFit,
    loading: str,
    fitting: list[str],
) -> str:
    def ask(other: Workload, where: Machine, with_settings: Settings) -> DoesNotFit | None:
        return _asked(name, other, where, with_settings, loading)

    return nearest(find_policy(name), workload, machine, settings, error, fitting=fitting, ask=ask)


def _asked(name: str, workload: Workload, machine: Machine, settings: Settings, loading: str) -> DoesNotFit | None:
    """Why the policy has no room, None if it has."""
    try:
        memory_need(name, workload, machine, settings, loading=loading, fewest=False)
    except DoesNotFit as short:
        return short
    return None
