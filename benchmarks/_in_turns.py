"""Plans of several policies for one small GPT-2 in several micro-batches, executed in turns on the virtual accelerator
with a throttled link: measured beside simulated seconds.

Recomputation, update eager, no clipping, fp32, one GPU. A gain is the median of the ratios within a turn, in which a
loaded machine delays all plans alike.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pstar_sim as ps
from executor.measuring.rates import measure_virtual_machine
from executor.run import RunResult, TrainingJob
from pstar_sim.core.plan import Plan, Settings

CONFIG = {"model_type": "gpt2", "n_layer": 8, "n_embd": 256, "n_head": 4, "n_positions": 64, "vocab_size": 512,
          "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
BATCH, SEQUENCE, MICRO_BATCHES = 2, 64, 8
RUNS, STEPS = 3, 3


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A comparison of policies.

    policies: the first is the reference for the others.
    bandwidth_bytes_per_s: of the link, each way.
    room_share: room on the GPU beside the highest tide of a layer-major iteration, as a share of the parameters in
        fp32.
    """

    policies: Sequence[str]
    bandwidth_bytes_per_s: float
    room_share: float

    def run(self) -> Mapping[str, object]:
        """Plan, execute in turns, and print a row per policy. Returns the content of a result file."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(CONFIG))
            job = TrainingJob(
                model=f"hf:{path}",
                batch=BATCH,
                sequence=SEQUENCE,
                dtype="fp32",
                checkpointing=True,
                lr=1e-4,
                clip=False,
            )
            planned = self._planned(job)
            plans = {spec: planned[spec][0] for spec in self.policies}
            link = (self.bandwidth_bytes_per_s, self.bandwidth_bytes_per_s)
            runs: dict[str, list[RunResult]] = {spec: [] for spec in plans}
            for _ in range(RUNS):
                for spec, plan in plans.items():
                    runs[spec].append(job.run(plan, steps=STEPS, bandwidth=link))
        rows = [_row(spec, planned[spec][1], runs, plans) for spec in plans]
        losses = {tuple(round(report.loss, 5) for report in each.reports) for mine in runs.values() for each in mine}
        print(f"losses equal: {len(losses) == 1}")
        gpu_bytes = plans[self.policies[0]].gpu_budget_bytes
        return {"rows": rows, "losses_equal": len(losses) == 1, "gpu_bytes": gpu_bytes}

    def _planned(self, job: TrainingJob) -> Mapping[str, tuple[Plan, float | None]]:
        """Returns the plan of each policy and its lower bound, for the rates of this machine, the throttled link and a
        GPU without room for the states."""
        rates = measure_virtual_machine(ps.machine("virtual", gpu_memory="2GB"))
        workload = ps.repeat_micro_batch(job.record(rates), MICRO_BATCHES)
        rank = rates.ranks[0]
        room = ps.relay(workload).peak_non_model_bytes + int(4 * self.room_share * workload.params)
        gpu = replace(rank.gpu, usable_bytes=rank.gpu.context_bytes + room)
        throttled = self.bandwidth_bytes_per_s
        link = replace(rank.link, h2d_bytes_per_s=throttled, d2h_bytes_per_s=throttled)
        machine = replace(rates, ranks=(replace(rank, gpu=gpu, link=link),))
        settings = Settings(update="eager", clip=False)
        compared = ps.compare(workload, machine, policies=self.policies, settings=settings, barrier_cost=False)
        return {row.policy: (compared[row.policy].plan, row.lower_bound_s) for row in compared.rows}


def _row(
    spec: str, bound_s: float | None, runs: Mapping[str, list[RunResult]], plans: Mapping[str, Plan]
) -> Mapping[str, object]:
    """Print the policy's row and return it."""
    first = next(iter(plans))
    seconds = {name: [_step_s(result) for result in mine] for name, mine in runs.items()}
    simulated = {name: ps.play(one).iteration_s for name, one in plans.items()}
    gain = statistics.median(other / own for other, own in zip(seconds[first], seconds[spec]))
    expected = simulated[first] / simulated[spec]
    measured_s = statistics.median(seconds[spec])
    timeline = runs[spec][-1].timeline
    moved = None if timeline is None else timeline.moved_bytes
    taken = statistics.median(result.taken_by_others or 0.0 for result in runs[spec])
    print(
        f"{spec}: measured {measured_s:.3f} s, simulated {simulated[spec]:.3f} s, bound "
        f"{bound_s} s; "
        f"{gain:.2f}x as fast as {first}, simulated {expected:.2f}x; copied {moved}; {taken:.0%} of the processor was "
        "others'",
        flush=True,
    )
    return {"policy": spec, "measured_s": measured_s, "runs_s": seconds[spec], "simulated_s": simulated[spec],
            "bound_s": bound_s, "gain": gain, "simulated_gain": expected, "moved_bytes": moved,
            "planned_bytes": dict(plans[spec].moved_bytes), "taken_by_others": taken,
            "on_plan": all(not result.deviations for result in runs[spec])}  # fmt: skip


def _step_s(result: RunResult) -> float:
    """Returns the median seconds of the steps without the first."""
    return statistics.median(report.time_s for report in result.reports[1:])
