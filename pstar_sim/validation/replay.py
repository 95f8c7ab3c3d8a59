"""Plans and simulates a published run.

[Note: phases] Published timers wait for the GPU, so phases meet: forward is from the first moment's start to the last
forward's end (of each micro-batch, added up), the optimizer step from any chunk's first update to the next iteration's
first moment, backward what is between. Simulated phases are cut likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import UPDATES, Kind, Queue
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import DoesNotFit, PstarError
from pstar_sim.planner.compare import plan_and_play
from pstar_sim.planner.fits import with_kept
from pstar_sim.policy.registry import find_policy
from pstar_sim.units import GIB, MIB
from pstar_sim.validation.rows import PublishedRow
from pstar_sim.validation.setups import Experiment
from pstar_sim.workload.workload import Phase


@dataclass(frozen=True, kw_only=True)
class Phases:
    """[Note: phases]; their sum is the iteration's time."""

    forward_s: float
    backward_s: float
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted values by metric, or why there are none.

    batch: used, of several, the fastest.
    """

    experiment: Experiment
    predicted: Mapping[str, float]
    batch: int | None = None
    reason: str = ""


def phases_of(plan: Plan, timeline: Timeline) -> Phases:
    """Raises PstarError without compute or update steps."""
    moments = plan.workload.moments
    last = max(span.iteration for span in timeline.spans)
    spans = [span for span in timeline.spans if span.iteration == last]
    compute = {s.moment: s for s in spans if s.queue is Queue.COMPUTE and s.kind is Kind.COMPUTE}
    updates = [s.start_s for s in spans if s.kind in UPDATES]
    if not compute or not updates:
        raise PstarError(f"the plan of {plan.policy} has no {'updates' if compute else 'moments'} to cut phases at")
    forward_s = 0.0
    micro_batches = {m.micro_batch for m in moments}
    for k in micro_batches:
        ahead = [compute[i] for i, m in enumerate(moments) if m.phase is Phase.FWD and m.micro_batch == k]
        forward_s += ahead[-1].end_s - ahead[0].start_s
    before_step_s = min(updates) - compute[0].start_s
    return Phases(
        forward_s=forward_s,
        backward_s=before_step_s - forward_s,
        step_s=timeline.iteration_s - before_step_s,
    )


def replay(experiment: Experiment) -> Prediction:
    """Of several batches, that with most tokens per second, the largest size that fits. One that does not fit has a
    reason."""
    if len(experiment.sizes) > 1:
        return _largest(experiment)
    found: list[tuple[float, int, Plan, Timeline]] = []
    reason = ""
    for batch in experiment.batches:
        try:
            plan, timeline = _simulate(experiment, batch)
        except DoesNotFit as error:
            reason = str(error)
            continue
        found.append((batch / timeline.iteration_s, batch, plan, timeline))
    if not found:
        return Prediction(experiment=experiment, predicted={}, reason=reason)
    _, batch, plan, timeline = max(found, key=lambda f: f[0])
    predicted = predict(experiment, plan, timeline, batch)
    return Prediction(experiment=experiment, predicted=predicted, batch=batch)


def _simulate(experiment: Experiment, batch: int) -> tuple[Plan, Timeline]:
    _check_host(experiment, 0)
    policy = find_policy(experiment.policy)
    return plan_and_play(policy, experiment.workload(batch), experiment.machine, experiment.settings)


def _check_host(experiment: Experiment, size: int) -> None:
    needed = round(experiment.sizes[size].params * experiment.host_bytes_per_param)
    available = experiment.machine.host.memory_bytes - experiment.other_host_bytes
    if needed > available:
        raise DoesNotFit(
            policy=experiment.policy,
            place="host",
            needed_bytes=needed,
            available_bytes=available,
            what=f"{experiment.host_bytes_per_param:g} bytes per parameter",
        )


def _largest(experiment: Experiment) -> Prediction:
    """By bisection: a larger model never fits where a smaller one does not."""
    low, high = -1, len(experiment.sizes)
    batch = experiment.batches[0]
    policy = find_policy(experiment.policy)
    while high - low > 1:
        middle = (low + high) // 2
        workload = experiment.workload(batch, experiment.sizes[middle])
        try:
            _check_host(experiment, middle)
            policy(workload, experiment.machine, experiment.settings)
        except DoesNotFit as error:
            high, reason = middle, str(error)
        else:
            low = middle
    if low < 0:
        return Prediction(experiment=experiment, predicted={}, reason=reason)
    predicted = {"max_trainable_model": float(experiment.sizes[low].params)}
    return Prediction(experiment=experiment, predicted=predicted, batch=batch)


def predict(experiment: Experiment, plan: Plan, timeline: Timeline, batch: int) -> dict[str, float]:
    """By the metrics' names, in their units."""
    phases = phases_of(plan, timeline)
    iteration_s = timeline.iteration_s + experiment.loop_s * experiment.micro_batches
    ranks = experiment.machine.data_parallel_size
    tokens = ranks * batch * experiment.sequence * experiment.micro_batches
    params = experiment.sizes[0].params
    gpu, host = timeline.peak_bytes["gpu"], timeline.peak_bytes["host"]
    card = experiment.machine.gpu
    kept = with_kept(gpu, experiment.machine.kept_bytes, card.budget_bytes)
    shown = kept + card.context_bytes  # on the card; about half of the reserve is the context
    reserved = (kept + shown) / 2
    seconds = {
        "fwd": phases.forward_s,
        "bwd": phases.backward_s,
        "step": phases.step_s,
        "opt": phases.step_s,
        "optimizer": phases.step_s,
        "adam": phases.step_s,
        "iter": iteration_s,
    }
    values = {f"{name}_ms": 1e3 * value for name, value in seconds.items()}
    values |= {f"{name}_s": value for name, value in seconds.items()}
    values["fwd_bwd_ms"] = 1e3 * (phases.forward_s + phases.backward_s)
    values["tokens_per_s_per_gpu"] = tokens / ranks / iteration_s
    values["tok_s_gpu"] = tokens / ranks / iteration_s
    values["samples_s"] = tokens / experiment.sequence / iteration_s
    values["total_TFLOPS_8N"] = 8 * params * tokens / iteration_s / 1e12
    values["gpu_max_alloc_MB"] = gpu / MIB
    values["gpu_max_alloc_GiB"] = gpu / GIB
    values["peak_gpu_total_GB"] = gpu / 1e9
    values["gpu_peak_GB"] = shown / 1e9
    values["gpu_peak_reserved_GiB"] = reserved / GIB
    values["gpu_smi_MiB"] = shown / MIB
    values["gpu_peak_GiB"] = shown / GIB
    values["host_used_GiB_node"] = (host * experiment.machine.local_ranks + experiment.other_host_bytes) / GIB
    for name, moment in _BORDERS.items():
        values[name] = _chunk_bytes(plan, timeline, moment(plan)) / 1e9
    return values


def _first_backward(plan: Plan) -> int:
    return next(i for i, m in enumerate(plan.workload.moments) if m.phase not in (Phase.FWD, Phase.ADAM))


def _update(plan: Plan) -> int:
    return next(i for i, m in enumerate(plan.workload.moments) if m.phase is Phase.ADAM)


_BORDERS: Mapping[str, Callable[[Plan], int]] = {
    "chunk_gpu_start_bwd_GB": _first_backward,
    "chunk_gpu_end_bwd_GB": _update,
}


def _chunk_bytes(plan: Plan, timeline: Timeline, moment: int) -> int:
    last = max(span.iteration for span in timeline.spans)
    starts = {s.moment: s.start_s for s in timeline.spans if s.iteration == last and s.kind is Kind.COMPUTE}
    time_s = starts[moment] - starts[0]
    held: dict[str, int] = {}
    origin: float | None = None
    for sample in timeline.samples:
        if sample.place != "gpu":
            continue
        origin = sample.time_s if origin is None else origin
        if sample.time_s - origin <= time_s + 1e-9:
            held[sample.category] = sample.bytes
    return sum(size for category, size in held.items() if category in ("param", "grad", "states"))


def row_value(row: PublishedRow, outcome: Prediction) -> float | None:
    """None where the run did not fit. Raises PstarError for another metric."""
    if outcome.reason:
        return None
    if row.metric not in outcome.predicted:
        raise PstarError(f"{row.where}: no prediction for {row.metric}")
    return outcome.predicted[row.metric]
