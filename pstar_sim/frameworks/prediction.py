"""Memory and seconds of a framework's configuration on a machine, by the policy that stands for it (follows.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.frameworks.follows import Follows, as_run
from pstar_sim.frameworks.host_memory import HostNeed
from pstar_sim.frameworks.targets import target_of
from pstar_sim.planner.batch_shares import share_out
from pstar_sim.planner.compare import plan_and_play
from pstar_sim.planner.fits import Fit
from pstar_sim.planner.machine_notes import thread_notes
from pstar_sim.planner.trust import trust
from pstar_sim.sim.play import peaks_of_ranks
from pstar_sim.workload.workload import Workload


@dataclass(frozen=True, kw_only=True, eq=False)
class ConfigurationPrediction:
    """Bytes are one rank's.

    label: such as its file.
    configuration: with the script's values for this model.
    reason: why it does not fit or cannot be planned.
    short_of: None without a lack.
    gpu_needed_bytes: the most, or the need if the GPU lacks memory, None if the host does. If GPUs differ, the smallest
        budget less the least room left.
    iteration_s, tokens_per_s, plan, timeline: simulated; None if it does not fit.
    expected_error, trust: as in `Fit`, for the policy.
    """

    label: str
    configuration: Configuration
    policy: str
    host: HostNeed
    host_available_bytes: int
    gpu_available_bytes: int
    machine: Machine
    reason: str | None = None
    short_of: str | None = None
    short_bytes: int | None = None
    gpu_needed_bytes: int | None = None
    iteration_s: float | None = None
    tokens_per_s: float | None = None
    expected_error: float | None = None
    trust: str | None = None
    plan: Plan | None = None
    timeline: Timeline | None = None

    @property
    def fits(self) -> bool:
        return self.reason is None

    def noted(self, *notes: str) -> ConfigurationPrediction:
        return replace(self, configuration=replace(self.configuration, notes=(*self.configuration.notes, *notes)))

    def as_policy(self) -> Follows:
        """For `compare`."""
        return Follows(self.configuration, self.label)

    def as_fit(self) -> Fit:
        return Fit(
            policy=self.label,
            fits=self.fits,
            gpu_needed_bytes=self.gpu_needed_bytes,
            gpu_available_bytes=self.gpu_available_bytes,
            gpu_reserve_bytes=self.machine.gpu.context_bytes,
            gpu_kept_bytes=as_run(self.machine, self.configuration).kept_bytes,
            host_needed_bytes=self.host.host_bytes,
            host_available_bytes=self.host_available_bytes,
            host_payload_bytes=self.host.asked_bytes,
            host_rounding_bytes=self.host.rounding_bytes,
            host_startup_bytes=self.host.startup_bytes,
            host_buffer_bytes=0,
            short_of=self.short_of,
            short_bytes=self.short_bytes,
            reason=self.reason,
            iteration_s=self.iteration_s,
            tokens_per_s=self.tokens_per_s,
            expected_error=self.expected_error,
            trust=self.trust,
            phases=self.host.phases(self.machine.local_ranks),
        )

    def to_json(self) -> dict[str, object]:
        """Host memory first, without the plan."""
        return {
            "label": self.label,
            "framework": self.configuration.framework,
            "host_needed_bytes": self.host.host_bytes,
            "host_available_bytes": self.host_available_bytes,
            "host_rounding_bytes": self.host.rounding_bytes,
            "host_startup_bytes": self.host.startup_bytes,
            "host_allocations": [
                {"name": a.name, "asked_bytes": a.asked_bytes, "taken_bytes": a.taken_bytes, "pinned": a.pinned}
                for a in self.host.allocations
            ],
            "fits": self.fits,
            "reason": self.reason,
            "gpu_needed_bytes": self.gpu_needed_bytes,
            "gpu_available_bytes": self.gpu_available_bytes,
            "policy": self.policy,
            "iteration_s": self.iteration_s,
            "tokens_per_s": self.tokens_per_s,
            "configuration": {k: v for k, v in asdict(self.configuration).items() if k != "policy"},
        }


def predict(
    configuration: Configuration,
    workload: Workload | Sequence[Workload],
    machine: Machine,
    settings: Settings,
    *,
    label: str,
) -> ConfigurationPrediction:
    """workload: as for `compare`."""
    share = share_out(workload, machine)
    configuration = configuration.for_model(share.workload)
    found = ConfigurationPrediction(
        label=label,
        configuration=configuration,
        policy=configuration.policy,
        host=target_of(configuration).memory.host_need(configuration, configuration.job(share.workload), machine),
        host_available_bytes=machine.host_budget_bytes,
        gpu_available_bytes=machine.gpu_budget_bytes,
        machine=machine,
    )
    try:
        plan, timeline = plan_and_play(
            Follows(configuration, label), share.workload, machine, settings, label=label, workloads=share.ranked
        )
    except CannotPlan as error:
        return replace(found, reason=str(error))
    except DoesNotFit as error:
        return replace(
            found,
            reason=str(error) + (f"; fits {error.change}" if error.change else ""),
            short_of=error.place,
            short_bytes=error.short_bytes,
            gpu_needed_bytes=error.needed_bytes if error.place == "gpu" else None,
        )
    belief = trust(plan.machine, configuration.policy, share.workload)
    if plan.machine.host != machine.host:
        found = found.noted(*thread_notes(plan.machine))
    peaks = peaks_of_ranks(plan, timeline)
    least_room = min(budget - peak["gpu"] for budget, peak in zip(plan.gpu_budgets, peaks))
    return replace(
        found,
        gpu_needed_bytes=plan.gpu_budget_bytes - least_room,
        iteration_s=timeline.iteration_s,
        tokens_per_s=share.tokens / timeline.iteration_s,
        expected_error=belief.error,
        trust=belief.label,
        plan=plan,
        timeline=timeline,
    )
