"""A run's files, figures beside predictions, and words that explain both, for `pstar run`, `pstar demo` and `torchrun
-m executor`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pstar_sim.catalog.machine import Machine
from pstar_sim.cli.executor_parts import executor_module
from pstar_sim.cli.output import note, picture_kind, save_perfetto, save_picture, tell
from pstar_sim.core.plan import Plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import PstarError
from pstar_sim.files import check_writable
from pstar_sim.report.run_figures import Figure, figures
from pstar_sim.units import format_s
from pstar_sim.workload.workload import Workload

if TYPE_CHECKING:
    from executor.run import RunResult
    from pstar_sim.cli.run_flags import RunFlags

OUTPUTS = ("record", "timeline", "perfetto", "plot")
"""Flags of a run that name a file to write."""


def predictor(machine: Machine) -> Callable[[Plan], Timeline]:
    """Each plan is predicted once: a run may end with another."""
    from pstar_sim.planner.compare import play_plan

    known: dict[int, tuple[Plan, Timeline]] = {}

    def predict(plan: Plan) -> Timeline:
        if id(plan) not in known:
            known[id(plan)] = plan, play_plan(replace(plan, machine=machine))
        return known[id(plan)][1]

    return predict


def machine_here(plan: Plan, bandwidth: tuple[float, float], *, virtual: bool) -> Machine:
    """The machine for which a run is predicted.

    bandwidth: bytes per second of the virtual link (to the gpu, to the host).
    """
    if not virtual:
        return plan.machine
    rates = executor_module("measuring.rates")
    found: Machine
    if plan.machine.gpu.launch_s is not None and plan.machine.calibrated:
        found = rates.throttled(plan.machine, *bandwidth)  # keeps the plan's own prediction
    else:
        found = rates.measure_virtual_machine(plan.machine, h2d_bytes_per_s=bandwidth[0], d2h_bytes_per_s=bandwidth[1])
    return found


def save_recording(recorded: Workload, machine: Machine, path: str, *, quiet: bool) -> None:
    """Of --record: the trace, and rates as a machine file of its name."""
    from pstar_sim.catalog.writing import save_machine
    from pstar_sim.workload.trace import save_trace

    save_trace(recorded, path)
    machine_file = Path(path).with_suffix(".toml")
    save_machine(machine, machine_file)
    if not quiet:
        tell(f"warm-up recorded: {path}; rates measured here: {machine_file}")


def check_outputs(flags: RunFlags) -> None:
    """Refuse two flags with one file, and --plot without a kind of picture."""
    named: dict[Path, str] = {}
    for flag in OUTPUTS:
        name = getattr(flags, flag)
        if name is None:
            continue
        path = Path(name).resolve()
        paths = [path, path.with_suffix(".toml")] if flag == "record" else [path]
        for one in paths:
            if one in named:
                raise PstarError(
                    f"--{named[one]} and --{flag} would both write {one.name}; give each a file of its own"
                )
            named[one] = flag
    for target in flags.log or ():
        path = Path(target).resolve()
        if path in named:
            raise PstarError(f"--{named[path]} and --log would both write {path.name}; give each a file of its own")
        named[path] = "log"
    if flags.plot is not None:
        picture_kind(Path(flags.plot))


def try_outputs(flags: RunFlags) -> None:
    """Refuse, naming the flag, a file that cannot be written, before any work."""
    for flag in OUTPUTS:
        name = getattr(flags, flag)
        if name is not None:
            try:
                check_writable(Path(name))
            except PstarError as error:
                raise PstarError(f"argument --{flag}: {error}") from None
    for target in flags.log or ():
        try:
            executor_module("running.step_log").check_log(target)
        except PstarError as error:
            raise PstarError(f"argument --log: {error}") from None


def write_timelines(flags: RunFlags, plan: Plan, predicted: Timeline, result: RunResult) -> None:
    """Measured beside predicted, as asked."""
    asked = [name for name in (flags.timeline, flags.perfetto, flags.plot) if name is not None]
    if result.timeline is None:
        for name in asked:
            note(f"{name} is not written: the last iteration did not run on plan")
        return
    if flags.timeline is not None:
        from pstar_sim.core.run_file import RunTimelines

        RunTimelines(predicted=predicted, measured=result.timeline).save(flags.timeline)
    if flags.perfetto is not None:
        save_perfetto([predicted, result.timeline], plan, Path(flags.perfetto))
    if flags.plot is not None:
        from pstar_sim.report.tide_picture import tide_figure

        w = plan.workload
        each = " per GPU" if plan.machine.data_parallel_size > 1 else ""
        times = f" x {w.micro_batches} micro-batches" if w.micro_batches > 1 else ""
        title = (
            f"{plan.policy}, {w.model}, batch {w.batch}{each}{times}: a run over its prediction; below, both by time"
        )
        drawn = tide_figure([predicted], measured=result.timeline, measured_as=measured_words(result), title=title)
        save_picture(drawn, Path(flags.plot), dpi=150)


def measured_s(result: RunResult) -> float:
    """Per iteration: the median of the steps after the first."""
    times = [r.time_s for r in result.reports]
    return statistics.median(times[1:] or times)


def _counted(result: RunResult) -> str:
    steps = len(result.reports)
    return f"median of steps 2 to {steps}" if steps > 2 else "the last step" if steps == 2 else "the one step"


def measured_words(result: RunResult) -> str:
    """With the seconds of the table."""
    return f"measured: {format_s(measured_s(result))} per iteration ({_counted(result)}); drawn: the last step"


def compare_with_run(plan: Plan, predicted: Timeline, result: RunResult) -> list[Figure]:
    """Seconds of the median step after the first, bytes of the measured iteration.

    "re-timed" is the plan simulated with the run's seconds (sim/retime.py).
    """
    step_s = measured_s(result)
    wanted: dict[str, float] = {"iteration_s": predicted.iteration_s}
    found: dict[str, float] = {"iteration_s": step_s}
    if result.timeline is not None:
        if (again_s := retimed_s(plan, result.timeline)) is not None:
            wanted["re-timed_s"], found["re-timed_s"] = again_s, step_s
        moved = result.timeline.moved_bytes
        wanted |= {f"{way}_bytes": predicted.moved_bytes[way] for way in moved}
        found |= {f"{way}_bytes": moved[way] for way in moved}
    if result.measured is not None and result.measured.on_plan:
        wanted |= {"GPU peak_bytes": predicted.peak_bytes["gpu"], "host peak_bytes": predicted.peak_bytes["host"]}
        found |= {"GPU peak_bytes": result.measured.peak_gpu_bytes, "host peak_bytes": result.measured.peak_host_bytes}
    return figures(wanted, found)


def retimed_s(plan: Plan, measured: Timeline) -> float | None:
    """None for ranks that differ, simulated with seconds of their own."""
    from pstar_sim.sim.retime import retime
    from pstar_sim.sim.several_ranks import classes_of

    return None if len(set(classes_of(plan.machine))) > 1 else retime(plan, measured)


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """The run from one rank's view; `to_json` has the same keys for several."""

    plan: Plan
    machine: Machine
    predicted: Timeline
    result: RunResult

    @property
    def ranks(self) -> int:
        return self.plan.machine.world_size

    @cached_property
    def times(self) -> list[float]:
        return [report.time_s for report in self.result.reports]

    @cached_property
    def step_s(self) -> float:
        """Median, without the first step if there are others."""
        return statistics.median(self.times[1:] or self.times)

    @cached_property
    def losses(self) -> Sequence[float]:
        shared = self.result.shared
        return [report.loss for report in self.result.reports] if shared is None else shared.losses

    @cached_property
    def again_s(self) -> float | None:
        """Simulated with this rank's measured seconds."""
        return None if self.result.timeline is None else retimed_s(self.plan, self.result.timeline)

    @cached_property
    def peaks_at_most(self) -> int:
        return self.plan.check().peak_bytes["gpu"]

    @cached_property
    def moved(self) -> dict[str, int]:
        """Measured, by lane."""
        here, shared = self.result.measured, self.result.shared
        return {**(here.moved_bytes if here is not None else {}), **({"net": shared.sent_bytes} if shared else {})}

    @cached_property
    def peaks(self) -> list[int]:
        """GPU peaks of the ranks that reported one."""
        here, shared = self.result.measured, self.result.shared
        if shared is not None:
            return list(shared.peak_gpu_bytes)
        return [here.peak_gpu_bytes] if here is not None else []

    @property
    def transient(self) -> int:
        return 0 if self.result.shared is None else self.result.shared.transient_bytes

    def to_json(self, *, steps: int) -> dict[str, object]:
        """steps: in all, those before a checkpoint included."""
        plan, result, wanted = self.plan, self.result, self.plan.moved_bytes
        return {
            "policy": plan.policy, "model": plan.workload.model, "ranks": self.ranks, "steps": steps,
            "first_step": result.reports[0].step, "losses": list(self.losses),
            "step_s": self.times, "tokens_per_s": self.plan.tokens / self.step_s, "peak_gpu_bytes": self.peaks,
            "peak_gpu_bytes_at_most": self.peaks_at_most, "transient_bytes": self.transient, "moved_bytes": self.moved,
            "predicted_moved_bytes": {lane: wanted.get(lane, 0) for lane in self.moved},
            "predicted_iteration_s": self.predicted.iteration_s, "retimed_iteration_s": self.again_s,
            "figures": figures_as_json(compare_with_run(plan, self.predicted, result)),
            "predicted_from": predicted_from(plan, self.machine), "taken_by_others": result.taken_by_others,
            "notes": list(result.notes), "deviations": list(result.deviations),
            "tide": str(result.tide) if result.tide is not None else None,
        }  # fmt: skip


def figures_as_json(rows: Sequence[Figure]) -> list[dict[str, object]]:
    return [{"name": r.name, "unit": r.unit, "predicted": r.predicted, "measured": r.measured} for r in rows]


def predicted_from(plan: Plan, machine: Machine) -> str:
    """For a run on `machine` (see `machine_here`)."""
    w, known = plan.workload, machine.confidence_by_input
    if w.recorded_on is not None and w.recorded_on == machine.name:
        compute = "compute as recorded in a warm-up"
    elif machine.gpu.measured and "measured here" in machine.gpu.source:
        compute = "compute by the rate of one matrix product measured at the start (a trace without a warm-up)"
    else:
        compute = f"compute by the {known['compute']} rates of {machine.name}"
    if machine.host.measured and "measured here" in machine.host.source:
        return f"{compute}; copies and CPU Adam by rates measured at the start"
    copies = f"copies by the {known['link']} rates and CPU Adam by the {known['CPU Adam']} rate of {machine.name}"
    return f"{compute}; {copies}"


def predicted_bar(plan: Plan, machine: Machine) -> str:
    """For a run on `machine` (see `machine_here`)."""
    if is_lower_bound(plan, machine):
        return "at least: matrix products, copies and updates count, other operators and Python do not"
    from pstar_sim.planner.trust import trust

    return trust(machine, plan.policy, plan.workload).label


def is_lower_bound(plan: Plan, machine: Machine) -> bool:
    """Predicted seconds have only products, copies and updates: the run takes longer. True on the virtual accelerator
    for a trace not recorded on `machine`."""
    return plan.machine.gpu.name == "virtual" and plan.workload.recorded_on != machine.name


def smaller_batches(plan: Plan, machine: Machine, shares: Sequence[float]) -> Plan:
    """Seconds are scaled by the sizes of batches; steps and bytes stay.

    shares: of the plan's batch, per micro-batch.
    """
    from pstar_sim.cost import cost_of
    from pstar_sim.workload.workload import Phase

    w = plan.workload
    moments_s = cost_of(w, machine, plan.layout).moments_s
    moments = tuple(
        replace(m, duration_s=seconds if m.phase is Phase.ADAM else seconds * shares[m.micro_batch])
        for m, seconds in zip(w.moments, moments_s)
    )
    return replace(plan, workload=replace(w, moments=moments, recorded_on=machine.name), ranked=None)


def explain_run(plan: Plan, machine: Machine, result: RunResult) -> str:
    """What the figures mean, the prediction's sources, other programs' disturbance, and how the run left the plan."""
    lines = [
        *result.notes,
        (
            f"iteration: {_counted(result)}; bytes: counted where they are copied or allocated, the GPU peak in one "
            "more, untimed iteration in the predicted order"
        ),
        f"predicted from: {predicted_from(plan, machine)}",
    ]
    if result.tide is not None:
        lines.append(str(result.tide))
    if result.timeline is None:
        lines.append("no iteration ran on plan: bytes were not measured")
    else:
        lines.append(
            "re-timed: the same plan simulated with the seconds that its steps took in this run; the rest of the "
            "difference above is the machine's (rates that changed since they were measured)"
        )
    from pstar_sim.planner.machine_notes import disk_life

    if life := disk_life(plan, measured_s(result)):
        lines.append(life)
    lines.append(others_words(result.taken_by_others))
    if result.deviations:
        lines.append(f"the run left the plan {len(result.deviations)} times, first: {result.deviations[0]}")
    return "\n".join(lines)


BUSY = 0.1
"""Share of the processor time from which on other programs are worth a warning."""


def others_words(share: float | None) -> str:
    if share is None:
        return "other programs: their processor time is not measurable here"
    words = f"other programs had {share:.0%} of this machine's processor time meanwhile"
    return f"{words}: run again when the machine is idle" if share > BUSY else words
