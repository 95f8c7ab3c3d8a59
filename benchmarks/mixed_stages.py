"""Stages of a pipeline and shares of layers on GPUs that differ, even and by speed, and the batch shared by speed
instead.

Each row is a model on a machine of two kinds of GPUs, as predicted: two stages of equal depth, two stages cut by speed,
layers split over all GPUs in equal shares and in shares by speed (planner/stages_cut.py), and data parallelism with
`whale`'s shares. V100 and P100 are those of Whale's own figures (1.2 to 1.4 times an even split).

    python benchmarks/mixed_stages.py               # writes benchmarks/results/mixed_stages.json
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

from _results import write_result

import pstar_sim as ps
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.plan import Plan
from pstar_sim.errors import DoesNotFit
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.stages import plan_stages
from pstar_sim.workload.parallelism import CUTS, Parallelism

POLICY = "all_on_gpu"


@dataclass(frozen=True, kw_only=True)
class Case:
    """batch: sequences per micro-batch, of all ranks of a stage."""

    machine: str
    model: str
    dtype: str
    batch: int
    seq: int
    micro_batches: int = 16


CASES = (
    Case(machine="v100-16+p100-16", model="gpt2-medium", dtype="fp32", batch=2, seq=512),
    Case(machine="v100-16x2+p100-16x2", model="gpt2-medium", dtype="fp32", batch=4, seq=512),
    Case(machine="a100-80x2+v100-32x2", model="gpt2-large", dtype="fp16", batch=4, seq=512),
    Case(machine="a100-40+v100-32", model="gpt2-large", dtype="fp16", batch=2, seq=512),
    Case(machine="rtx5090+rtx3090", model="llama-3.2-1b", dtype="bf16", batch=2, seq=512),
)


def depths(plans: tuple[Plan, ...]) -> list[int]:
    """Layers of each stage."""
    names = [[t.name.split(".") for t in plan.workload.tensors] for plan in plans]
    return [len({n for parts in stage for n in parts if n.isdigit()}) for stage in names]


def shared_s(case: Case) -> float:
    """Returns the seconds of as many sequences with the batch shared by speed, in the fastest micro-batches."""
    machine, found = load_machine(case.machine), []
    for parts in (1, 2, 4, 8, 16):
        batch = case.batch * case.micro_batches // parts
        job = Job(model=case.model, dtype=case.dtype, batch=batch, seq=case.seq, micro_batches=parts)
        row = ps.compare(job.of(machine), machine, policies=["whale:schedule=all_on_gpu"]).rows[0]
        found += [row.iteration_s] if row.iteration_s is not None else []
    return min(found)


def row_of(case: Case) -> dict[str, object]:
    job = Job(model=case.model, dtype=case.dtype, batch=case.batch, seq=case.seq, micro_batches=case.micro_batches)
    even, speed = (
        plan_stages(job, load_machine(case.machine), POLICY, Parallelism(pipeline=2, cut=cut)) for cut in CUTS
    )
    machine = load_machine(case.machine)
    split = plan_stages(job, machine, POLICY, Parallelism(tensor=machine.world_size))
    return asdict(case) | {
        "even_s": even.iteration_s,
        "speed_s": speed.iteration_s,
        "gain": even.iteration_s / speed.iteration_s,
        "even": depths(even.plans.plans),
        "speed": depths(speed.plans.plans),
        "gpus": [plan.machine.gpu.name for plan in speed.plans.plans],
        "shared_s": shared_s(case),
        "split": str(split.plans.split),
        "split_s": split.iteration_s,
        "split_gain": split.gain_of_split,
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for case in CASES:
        try:
            rows.append(row_of(case))
        except DoesNotFit as error:
            print(f"{case.machine}: {error}")
            continue
        print(rows[-1], flush=True)
    print(write_result("mixed_stages", {"rows": rows}))


if __name__ == "__main__":
    main()
