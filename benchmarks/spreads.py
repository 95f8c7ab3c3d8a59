"""Which parallelism, with and without offloading: the fastest way to spread a large model over the GPUs of one, two and
four nodes, beside FSDP alone.

Each row is a model on a machine with a global batch of 256 sequences, as predicted: the fastest way
whose chunks leave the GPU (`tide`), the fastest with everything on the GPUs (`all_on_gpu`, `zero3_resident`), and data
parallelism alone with FSDP, offloaded where it does not fit otherwise (planner/stages_compared.py). Each chooses what
it recomputes.

    python benchmarks/spreads.py [--cases 1,7]      # writes benchmarks/results/spreads.json, with all cases
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from _results import write_result

from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Machine
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.stages_compared import StagesRow, compare_stages
from pstar_sim.planner.stages_degrees import Way, ways_of
from pstar_sim.workload.parallelism import Parallelism

SEQUENCES = 256
CASES = [("llama-3.1-70b", 4096, name, nodes) for name in ("h100-80x8", "a100-40x8") for nodes in (1, 2, 4)]
CASES += [("40B", 1024, "a100-40x8", 1)]  # its preset has learned 1,024 positions
OFFLOADED = ["tide"]
RESIDENT = ["all_on_gpu", "zero3_resident"]
FSDP = (["zero3_resident"], ["zero3_offload"])


def fastest(job: Job, machine: Machine, policies: Sequence[str], ways: Sequence[Way]) -> StagesRow | None:
    rows = compare_stages(job, machine, policies, ways).rows
    return next((row for row in rows if row.fits), None)


def said(row: StagesRow | None) -> dict[str, object] | None:
    if row is None:
        return None
    return {
        "parallel": row.parallel,
        "policy": row.policy,
        "batch": f"{row.batch} x {row.micro_batches}",
        "recompute": row.recompute,
        "iteration_s": row.iteration_s,
        "tokens_per_s": row.tokens_per_s,
        "gap": row.gap,
        "bubble": row.bubble,
        "peak_gpu_bytes": max(row.peak_gpu_bytes),
        "peak_host_bytes": max(row.peak_host_bytes),
    }


def row_of(model: str, length: int, name: str, nodes: int) -> dict[str, object]:
    machine = load_machine(name, nodes=nodes)
    gpus = machine.world_size
    job = Job(model=model, batch=gpus, seq=length, micro_batches=SEQUENCES // gpus)
    began = time.process_time()
    ways, _ = ways_of(job, machine, "auto")
    offloaded = fastest(job, machine, OFFLOADED, ways)
    auto_s = time.process_time() - began
    counts = [count for count in (1, 2, 4, 8, 16, 32) if SEQUENCES // count >= gpus]
    alone = [
        Way(parallelism=Parallelism(data=gpus), batch=SEQUENCES // count, micro_batches=count, recompute=how)
        for count in counts
        for how in dict.fromkeys(way.recompute for way in ways)
    ]
    fsdp = (fastest(job, machine, policies, alone) for policies in FSDP)
    return {
        "model": model,
        "length": length,
        "machine": name,
        "nodes": nodes,
        "offloaded": said(offloaded),
        "resident": said(fastest(job, machine, RESIDENT, ways)),
        "fsdp": said(next((row for row in fsdp if row is not None), None)),
        "auto_cpu_s": auto_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="numbers of cases, from 1; without it all")
    asked = parser.parse_args()
    numbers = [int(number) for number in asked.cases.split(",")] if asked.cases else range(1, len(CASES) + 1)
    rows = []
    for number in numbers:
        rows.append(row_of(*CASES[number - 1]))
        print(rows[-1], flush=True)
    if not asked.cases:
        print(write_result("spreads", {"rows": rows}))


if __name__ == "__main__":
    main()
