"""The worth of following the tide: bytes to the GPU and seconds per iteration under `tide` and `static_partition`.

15B on v100-32, sequence 1024, default setting: one micro-batch, four, and four with no optimizer state pinned.
"""

from __future__ import annotations

import sys

from _help import only_help
from _results import write_result

import pstar_sim as ps

MODEL, MACHINE, SEQUENCE, BATCH = "15B", "v100-32", 1024, 4
POLICIES = ("tide", "static_partition")
JOBS = {"four micro-batches": (4, ""), "four micro-batches, nothing pinned": (4, ":pins=0"), "one micro-batch": (1, "")}


def main() -> int:
    machine = ps.machine(MACHINE)
    rows, seconds = {}, {}
    for name, (micro_batches, choice) in JOBS.items():
        workload = ps.preset(MODEL, batch=BATCH, seq=SEQUENCE, micro_batches=micro_batches)
        policies = [policy + choice for policy in POLICIES]
        found = ps.compare(workload, machine, policies=policies, barrier_cost=False, near=False)
        rows[name] = {policy: row.h2d_bytes for policy, row in zip(POLICIES, found.rows, strict=True)}
        seconds[name] = {policy: row.iteration_s for policy, row in zip(POLICIES, found.rows, strict=True)}
        print(name, {policy: f"{size / 1e9:.2f} GB" for policy, size in rows[name].items() if size is not None})
    job = {"model": MODEL, "simulated_machine": MACHINE, "sequence": SEQUENCE, "batch": BATCH, "micro_batches": 4}
    write_result("tide_bytes", {**job, "to_gpu_bytes_per_iteration": rows, "iteration_s": seconds})
    return 1 if any(size is None for row in rows.values() for size in row.values()) else 0


if __name__ == "__main__":
    only_help(__doc__)
    sys.exit(main())
