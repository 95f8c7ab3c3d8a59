"""Predicted against measured iteration time of plans on disks, and how much of the disks' time compute hides.

Rates of this machine and of the folder are measured, a warm-up is recorded, and three policies plan for a host with
room for a third of the states. Each plan runs three times, in turns, several steps each. The measured figure is the
median of the runs' medians. Disk time is hidden while a moment computes, in the last iteration of each run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from _results import write_result

from executor.calibration.folders import folder_rates
from executor.measuring.rates import measure_virtual_machine
from executor.run import TrainingJob
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import DISK_QUEUES, Queue
from pstar_sim.core.timeline import Span
from pstar_sim.planner.compare import play_plan
from pstar_sim.policy.registry import find_policy

POLICIES = ("tide", "stronghold", "zero_infinity:params=nvme,states=nvme,subgroup=1000000")
MODEL = {
    "model_type": "gpt2", "n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 4096, "n_positions": 128,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
"""12 M parameters."""
RUNS, STEPS = 3, 4
SHARE = 1 / 3  # of the states that have room on the host


def hidden_share(spans: Iterable[Span]) -> float:
    """The share of the seconds of the disks in which a moment computes, too."""
    rows = sorted(spans, key=lambda span: span.start_s)
    computing = [(span.start_s, span.end_s) for span in rows if span.queue is Queue.COMPUTE]
    disks = [(span.start_s, span.end_s) for span in rows if span.queue in DISK_QUEUES]
    both_s = sum(max(0.0, min(d[1], c[1]) - max(d[0], c[0])) for d in disks for c in computing)
    return both_s / sum(end - start for start, end in disks)


def measure(folder: Path) -> list[dict[str, object]]:
    """folder: on a disk."""
    config = folder / "model.json"
    config.write_text(json.dumps(MODEL), encoding="utf-8")
    job = TrainingJob(model=f"hf:{config}", batch=2, sequence=128, dtype="fp32", checkpointing=True, lr=1e-4, clip=True)
    disks = folder / "disk"
    disks.mkdir()
    rates = measure_virtual_machine(load_machine("virtual", gpu_memory="130MB", disks=[disks]))
    on_disk, nvme = folder_rates([disks]), rates.nvme
    assert nvme is not None
    workload = job.record(rates)
    params = sum(tensor.bytes for tensor in workload.tensors if tensor.tied_to is None)
    machine = replace(
        rates,
        host=replace(rates.host, memory_bytes=rates.host.reserved_bytes + round(params * (1 + 3 * SHARE))),
        nvme=replace(nvme, **on_disk.figures),
    )
    plans = {policy: find_policy(policy)(workload, machine, Settings(clip=True)) for policy in POLICIES}
    predicted = {policy: play_plan(plan) for policy, plan in plans.items()}
    measured: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    for _ in range(RUNS):
        for policy, plan in plans.items():
            result = job.run(plan, steps=STEPS, disks=[str(disks)])
            seconds = statistics.median(report.time_s for report in result.reports[1:])
            measured[policy].append((seconds, hidden_share(result.timeline.spans)))
    rows: list[dict[str, object]] = []
    for policy, timeline in predicted.items():
        seconds, hidden = zip(*measured[policy])
        rows.append(
            {
                "policy": policy,
                "disk_bytes": plans[policy].moved_bytes["nvme_read"] + plans[policy].moved_bytes["nvme_write"],
                "predicted_s": timeline.iteration_s,
                "predicted_hidden_share": hidden_share(timeline.spans),
                "measured_s": seconds,
                "error": statistics.median(seconds) / timeline.iteration_s - 1,
                "hidden_share": statistics.median(hidden),
            }
        )
    return rows


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--folder", default=".", help="on a disk that O_DIRECT reaches (default: the current folder)")
    with tempfile.TemporaryDirectory(dir=flags.parse_args().folder) as folder:
        rows = measure(Path(folder))
    for row in rows:
        print(
            f"{row['policy']}: predicted {row['predicted_s']:.3f} s, measured "
            f"{', '.join(f'{each:.3f}' for each in row['measured_s'])} s, {row['error']:+.1%}; of the disks' time "  # type: ignore[attr-defined]
            f"{row['hidden_share']:.0%} is hidden, {row['predicted_hidden_share']:.0%} predicted"
        )
    write_result("disks", {"runs": rows})


if __name__ == "__main__":
    main()
