"""The README's table: six GPT models at batch 8 on three machines, under every policy.

Setting: bf16 everywhere (forced on v100-32, which has no bf16 units), sequence 1024, activation checkpointing, update
eager, no clipping, so that no barrier stands between a gradient and its Adam. Prints Markdown; fails if `tide` is more
than 0.1 % slower than `patrickstar`, or `optimal` slower than any other, anywhere."""

from __future__ import annotations

import sys

from _help import only_help
from _results import write_result

import pstar_sim as ps

MODELS = ("1B", "4B", "8B", "12B", "15B", "18B")
MACHINES = ("v100-32", "rtx4090", "a100-80")
POLICIES = ("all_on_gpu", "zero_offload", "static_partition", "patrickstar", "tide", "optimal")


def compared() -> list[tuple[str, str, dict[str, ps.Row]]]:
    """Returns (machine, model, row by policy) of every configuration."""
    out = []
    for machine_name in MACHINES:
        machine = ps.machine(machine_name)
        for model in MODELS:
            workload = ps.preset(model, batch=8, seq=1024, dtype="bf16")
            result = ps.compare(
                workload, machine, policies=POLICIES, update="eager", clip=False, barrier_cost=False, near=False
            )
            out.append((machine_name, model, {row.policy: row for row in result.rows}))
    return out


def seconds(row: ps.Row) -> str:
    return "-" if row.iteration_s is None else f"{row.iteration_s:.3f}"


def main() -> int:
    table = compared()
    rows_of = [
        {
            "machine": machine,
            "model": model,
            "seconds": {policy: rows[policy].iteration_s for policy in POLICIES},
            "lower_bound_s": rows["optimal"].lower_bound_s,
            "gap": rows["optimal"].gap,
        }
        for machine, model, rows in table
    ]
    write_result("table_policies", {"rows": rows_of})
    print("| machine | model | " + " | ".join(POLICIES) + " | lower bound | optimal over bound |")
    print("|---|---|" + "---:|" * (len(POLICIES) + 2))
    slower = beaten = 0
    for machine, model, rows in table:
        tide, patrickstar, optimal = rows["tide"], rows["patrickstar"], rows["optimal"]
        gap = "-" if optimal.gap is None else f"{100 * optimal.gap:.2f} %"
        times = " | ".join(seconds(rows[p]) for p in POLICIES)
        print(f"| {machine} | {model} | {times} | {optimal.lower_bound_s:.3f} | {gap} |")
        if patrickstar.iteration_s is not None:
            slower += tide.iteration_s is None or tide.iteration_s > 1.001 * patrickstar.iteration_s
        fastest = min((row.iteration_s for row in rows.values() if row.iteration_s is not None), default=None)
        if fastest is not None:
            beaten += optimal.iteration_s is None or optimal.iteration_s > fastest * (1 + 1e-9)
    print(f"\ntide is more than 0.1 % slower than patrickstar in {slower} of {len(table)} configurations, ", end="")
    print(f"optimal slower than another in {beaten}")
    return 1 if slower or beaten else 0


if __name__ == "__main__":
    only_help(__doc__)
    sys.exit(main())
