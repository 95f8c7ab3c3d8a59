"""The traffic of copies and collectives in GPU memory, which the cost model does not take from running kernels.

A copy over the link reads or writes each byte once in the memory of the GPU. A collective reads a byte to send it,
writes a byte that it receives, and reads it again to pass it on or to add it: three times its bytes at most. A kernel
that is bound by memory waits for as many bytes. So `most` is an upper bound on what this costs: the seconds of all
these bytes at the GPU's bandwidth, over the seconds of the iteration. Products are not bound by memory, and a copy
that runs beside nothing slows nothing down, so the cost is less.

    python benchmarks/overlap.py        # writes benchmarks/results/overlap.json
"""

from __future__ import annotations

from _help import only_help
from _results import write_result

import pstar_sim as ps
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import ROUTES

MODEL, SEQUENCE = "llama-3-8b", 1024
JOBS = (
    ("v100-32", 1, "tide"),
    ("rtx4090", 4, "tide"),
    ("a100-80", 4, "tide"),
    ("h100-80", 4, "tide"),
    ("gh200", 4, "tide"),
    ("a100-80x8", 32, "zero3_resident"),
    ("h100-80x8", 32, "zero3_resident"),
    ("h100-80x8", 8, "zero3_resident"),
)
"""Machine, sequences of an iteration, policy."""
PASSES = 3  # of a collective's bytes through the memory of a GPU


def traffic(plan: Plan) -> tuple[int, int]:
    """Returns the bytes of GPU memory traffic per iteration and rank: of copies, and of collectives."""
    ranks = len(plan.machine.ranks)
    copies = sum(plan.moved_bytes.get(route, 0) for route in ("h2d", "d2h"))
    shared = sum(step.bytes for step in plan.steps if ROUTES.get(step.kind) == "net")
    return copies, PASSES * shared * (ranks - 1) // ranks


def measure(name: str, batch: int, policy: str) -> dict[str, object]:
    workload = ps.preset(MODEL, batch=batch, seq=SEQUENCE, checkpointing=True)
    compared = ps.compare(workload, load_machine(name), policies=(policy,), near=False, barrier_cost=False)
    seconds, plan = compared.rows[0].iteration_s, compared.planned[policy].plan
    assert seconds is not None and plan is not None
    copies, collectives = traffic(plan)
    bandwidth = plan.machine.gpu.hbm_bytes_per_s
    return {
        "machine": name,
        "batch": batch,
        "policy": policy,
        "iteration_s": seconds,
        "copies_bytes": copies,
        "collectives_bytes": collectives,
        "most_of_copies": round(copies / bandwidth / seconds, 4),
        "most_of_collectives": round(collectives / bandwidth / seconds, 4),
    }


def main() -> None:
    only_help(__doc__)
    rows = [measure(*job) for job in JOBS]
    for row in rows:
        print("{machine:10s} {batch:>3} {policy:15s} {most_of_copies:.1%} {most_of_collectives:.1%}".format(**row))
    write_result("overlap", {"model": MODEL, "sequence": SEQUENCE, "rows": rows})


if __name__ == "__main__":
    main()
