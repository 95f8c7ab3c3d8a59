"""CPU seconds of `compare` with five policies for the 12B preset, including the cost of the barrier and the changes
that would make a policy fit.

Start-up (imports, reading the catalog, making the workload) is left out. Fails above 2 s.
"""

from __future__ import annotations

import sys
import time

from _help import only_help

import pstar_sim as ps

POLICIES = ("all_on_gpu", "zero_offload", "static_partition", "patrickstar", "tide")
LIMIT_S = 2.0


def main() -> int:
    machine = ps.machine("v100-32")
    ps.compare(ps.preset("1B", batch=1, seq=1024), machine, policies=["tide"])  # makes the late imports
    workload = ps.preset("12B", batch=8, seq=1024, dtype="fp16")
    times = []
    for _ in range(3):
        start_s = time.process_time()
        result = ps.compare(workload, machine, policies=POLICIES)
        times.append(time.process_time() - start_s)
    print(
        f"compare, 12B, {len(result.rows)} policies: {min(times):.2f} s of CPU time "
        f"(limit {LIMIT_S} s; the best of {len(times)} runs)"
    )
    return 0 if min(times) < LIMIT_S else 1


if __name__ == "__main__":
    only_help(__doc__)
    sys.exit(main())
