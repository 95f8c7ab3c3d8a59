"""Predicted against measured iteration time where transfers bind: GPT-2 124M, throttled links, runs in turns.

The warm-up is recorded and this machine's rates are measured; plans are made from both, one for each bandwidth. Then
every plan runs five times, in turns, several steps each. The figure is the median of the runs' medians over the
simulated time; the goal is within 20 %.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from _help import only_help
from _results import write_result

from executor.measuring.rates import measure_virtual_machine
from executor.run import TrainingJob
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.plan import Settings
from pstar_sim.planner.compare import play_plan
from pstar_sim.policy.registry import find_policy

BANDWIDTHS_BYTES_PER_S = (0.1e9, 0.2e9)
RUNS = 5
STEPS = 3
CASES = [("tide", bandwidth) for bandwidth in BANDWIDTHS_BYTES_PER_S] + [("patrickstar", 0.2e9)]


def main() -> None:
    job = TrainingJob(model="gpt2", batch=2, sequence=64, dtype="fp32", checkpointing=True, lr=1e-4, clip=False)
    machine = load_machine("virtual", gpu_memory="1.2GB")
    rates = measure_virtual_machine(machine)
    workload = job.record(rates)
    plans, predicted_s, busy = [], [], []
    for policy, bandwidth in CASES:
        link = replace(rates.link, h2d_bytes_per_s=bandwidth, d2h_bytes_per_s=bandwidth)
        throttled = replace(rates, ranks=(replace(rates.ranks[0], link=link),))
        plan = find_policy(policy)(workload, throttled, Settings(update="step", clip=False))
        timeline = play_plan(plan)
        plans.append(plan)
        predicted_s.append(timeline.iteration_s)
        busy.append(timeline.busy_s)
    measured: list[list[float]] = [[] for _ in CASES]
    for _ in range(RUNS):
        for column, plan, (_, bandwidth) in zip(measured, plans, CASES):
            result = job.run(plan, steps=STEPS, bandwidth=(bandwidth, bandwidth))
            column.append(statistics.median(r.time_s for r in result.reports[1:]))
    rows = []
    for (policy, bandwidth), expected_s, column, queues in zip(CASES, predicted_s, measured, busy):
        found_s = statistics.median(column)
        copies = max(queues.get("h2d", 0.0), queues.get("d2h", 0.0)) / expected_s
        waits = 1 - queues.get("compute", 0.0) / expected_s
        error = found_s / expected_s - 1
        print(
            f"{policy} at {bandwidth / 1e9:g} GB/s: predicted {expected_s:.3f} s, measured {found_s:.3f} s "
            f"({RUNS} runs, {min(column):.3f} to {max(column):.3f}), {error:+.1%}; "
            f"a link is busy {copies:.0%} of the time, compute waits {waits:.0%} of it"
        )
        rows.append(
            {
                "policy": policy,
                "bandwidth_bytes_per_s": bandwidth,
                "predicted_s": expected_s,
                "measured_s": column,
                "error": error,
                "link_busy_share": copies,
                "compute_waits_share": waits,
            }
        )
    worst = max(abs(float(str(row["error"]))) for row in rows)
    print(f"goal within 20 %: {'met' if worst <= 0.2 else 'missed'} (worst {worst:.1%})")
    write_result("accuracy", {"runs": rows})


if __name__ == "__main__":
    only_help(__doc__)
    main()
