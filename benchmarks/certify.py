"""The cost of a certificate, and the distance of the two bounds: CPU seconds of the joint and of the fluid linear
program (`--certify`) for GPT 18B on one GPU of four kinds, eager, behind the barrier, and with four micro-batches.

Batch 8, sequence 1024, checkpointing, bf16. Prints a row per case with the gap of `optimal` (or of --policy) to each
bound and writes results/certify.json. Fails if a fluid program takes more than 15 s or the policy is faster than a
bound.
"""

from __future__ import annotations

import argparse
import sys
import time

from _results import write_result

import pstar_sim as ps
from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.bounds.fluid import fluid_bound
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.registry import find_policy
from pstar_sim.sim.play import play

MACHINES = ("v100-32", "rtx4090", "a100-80", "h100-80")
CASES = (("eager", False, 1), ("barrier", True, 1), ("eager, 4 micro-batches", False, 4))
LIMIT_S = 15.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="18B")
    parser.add_argument("--policy", default="optimal")
    parser.add_argument("--machine", action="append", choices=MACHINES)
    args = parser.parse_args()
    # the first call's imports do not count for the bound
    warm = ps.preset("1B", batch=1, seq=1024, dtype="bf16")
    lower_bound(warm, ps.machine("v100-32"), Settings(), build_layout(warm))

    rows: list[dict[str, object]] = []
    wrong = 0
    print("| machine | case | iteration | joint LP | CPU | gap | fluid LP | CPU | gap | binds |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for name in args.machine or MACHINES:
        machine = ps.machine(name)
        for case, barrier, micro_batches in CASES:
            workload = ps.preset(args.model, batch=8, seq=1024, dtype="bf16", micro_batches=micro_batches)
            settings = Settings(update="step" if barrier else "eager", clip=barrier)
            try:
                plan = find_policy(args.policy)(workload, machine, settings)
            except DoesNotFit as reason:
                print(f"| {name} | {case} | does not fit: {reason} |")
                continue
            seconds = play(plan).iteration_s
            begin_s = time.process_time()
            closed = lower_bound(workload, machine, settings, plan.layout)
            between_s = time.process_time()
            fluid = fluid_bound(workload, machine, settings, plan.layout)
            closed_cpu_s, fluid_cpu_s = between_s - begin_s, time.process_time() - between_s
            gaps = [seconds / bound.seconds - 1 for bound in (closed, fluid)]
            wrong += fluid_cpu_s > LIMIT_S or min(gaps) < -1e-9 or fluid.method != "fluid LP"
            print(
                f"| {name} | {case} | {seconds:.3f} s | {closed.seconds:.3f} s | {closed_cpu_s * 1e3:.0f} ms | "
                f"{gaps[0]:.2%} | {fluid.seconds:.3f} s | {fluid_cpu_s:.1f} s | {gaps[1]:.2%} | {fluid.binding} |",
                flush=True,
            )
            rows.append(
                {
                    "machine": name, "case": case, "iteration_s": seconds, "closed_form_s": closed.seconds,
                    "closed_form_cpu_s": closed_cpu_s, "closed_form_gap": gaps[0], "fluid_s": fluid.seconds,
                    "fluid_cpu_s": fluid_cpu_s, "fluid_gap": gaps[1], "binding": fluid.binding,
                }
            )  # fmt: skip
    write_result("certify", {"model": args.model, "policy": args.policy, "rows": rows})
    print(f"\n{wrong} of {len(rows)} cases over {LIMIT_S:g} s, unsolved, or with a policy below a bound")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
