"""The layer-major order beside depth-first at a throttled link: one GPT-2 of 8 layers in 8 micro-batches on the virtual
accelerator, under plans of `tide`, `tide:order=relay`, `tide:order=relay-host` and `l2l` for one GPU, which run in
turns.

Recomputation, update eager, no clipping. Prints measured beside simulated seconds, the bytes that were copied to the
accelerator and back, and how many times faster than `tide` each is; writes results/relay.json. A gain is the median of
the ratios within a turn, in which a loaded machine delays all alike. Losses have to be equal.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from _help import only_help
from _results import write_result

import pstar_sim as ps
from executor.measuring.rates import measure_virtual_machine
from executor.run import Job, RunResult
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.policy.registry import find_policy

CONFIG = {"model_type": "gpt2", "n_layer": 8, "n_embd": 256, "n_head": 4, "n_positions": 64, "vocab_size": 512,
          "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
BATCH, SEQUENCE, MICRO_BATCHES = 2, 64, 8
BANDWIDTH_BYTES_PER_S = 0.1e9
POLICIES = ("tide", "tide:order=relay", "tide:order=relay-host", "l2l")
ROOM_SHARE = 0.5  # of the parameters in fp32, beside the layer-major tide
RUNS, STEPS = 3, 3


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIG))
        job = Job(model=f"hf:{path}", batch=BATCH, sequence=SEQUENCE, dtype="fp32", checkpointing=True, lr=1e-4,
                  clip=False)  # fmt: skip
        plans = planned(job)
        runs: dict[str, list[RunResult]] = {spec: [] for spec in plans}
        for _ in range(RUNS):
            for spec, plan in plans.items():
                runs[spec].append(job.run(plan, steps=STEPS, bandwidth=(BANDWIDTH_BYTES_PER_S, BANDWIDTH_BYTES_PER_S)))
    rows = [row_of(spec, plan, runs, plans) for spec, plan in plans.items()]
    losses = {tuple(round(report.loss, 5) for report in result.reports) for mine in runs.values() for result in mine}
    print(f"losses equal: {len(losses) == 1}")
    gpu_bytes = plans["tide"].gpu_budget_bytes
    write_result("relay", {"rows": rows, "losses_equal": len(losses) == 1, "gpu_bytes": gpu_bytes})


def planned(job: Job) -> Mapping[str, Plan]:
    """The plan of each policy, for the rates of this machine, the throttled link and a GPU without room for the
    model."""
    rates = measure_virtual_machine(ps.machine("virtual", gpu_memory="2GB"))
    workload = ps.repeat_micro_batch(job.record(rates), MICRO_BATCHES)
    rank = rates.ranks[0]
    room = ps.relay(workload).peak_non_model_bytes + int(4 * ROOM_SHARE * workload.params)
    gpu = replace(rank.gpu, usable_bytes=rank.gpu.context_bytes + room)
    link = replace(rank.link, h2d_bytes_per_s=BANDWIDTH_BYTES_PER_S, d2h_bytes_per_s=BANDWIDTH_BYTES_PER_S)
    machine = replace(rates, ranks=(replace(rank, gpu=gpu, link=link),))
    return {spec: find_policy(spec)(workload, machine, Settings(update="eager", clip=False)) for spec in POLICIES}


def row_of(
    spec: str, plan: Plan, runs: Mapping[str, list[RunResult]], plans: Mapping[str, Plan]
) -> Mapping[str, object]:
    """Print the policy's row; returns it."""
    seconds = {name: [_step_s(result) for result in mine] for name, mine in runs.items()}
    simulated = {name: ps.play(one).iteration_s for name, one in plans.items()}
    gain = statistics.median(other / own for other, own in zip(seconds["tide"], seconds[spec]))
    expected = simulated["tide"] / simulated[spec]
    measured_s = statistics.median(seconds[spec])
    timeline = runs[spec][-1].timeline
    moved = None if timeline is None else timeline.moved_bytes
    taken = statistics.median(result.taken_by_others or 0.0 for result in runs[spec])
    print(
        f"{spec}: measured {measured_s:.3f} s, simulated {simulated[spec]:.3f} s; {gain:.2f}x as fast as tide, "
        f"simulated {expected:.2f}x; copied {moved}; {taken:.0%} of the processor was others'",
        flush=True,
    )
    return {"policy": spec, "measured_s": measured_s, "runs_s": seconds[spec], "simulated_s": simulated[spec],
            "gain": gain, "simulated_gain": expected, "moved_bytes": moved, "planned_bytes": dict(plan.moved_bytes),
            "taken_by_others": taken, "on_plan": all(not result.deviations for result in runs[spec])}  # fmt: skip


def _step_s(result: RunResult) -> float:
    """Median of the steps but the first."""
    return statistics.median(report.time_s for report in result.reports[1:])


if __name__ == "__main__":
    only_help(__doc__)
    main()
