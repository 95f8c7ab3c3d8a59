"""How CPU seconds of planning grow: `optimal` with its bound, simulation and proof, while one number doubles.

    python benchmarks/growth.py [--repeats 3]

- layers: a chain of layers with a chunk each, 1,250 to 10,000
- micro-batches: GPT 8B on `v100-32`, 4 to 32
- experts: of each layer of Mixtral's shape, 8 to 64, on `h100-80` with 1 TB
- ranks: GPT 18B on 1 to 8 nodes of 8 `h100-80`

Prints seconds (the least of the repeats) and, for each doubling, the exponent of a power of the number; writes
results/growth.json. Exit status 1 if the last exponent of an axis is above LIMIT, that of N log N with room for noise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from math import log2
from typing import Any

from _results import write_result
from msgspec import structs
from planning_speed import SETTINGS, Job, gpt, planned

import pstar_sim as ps
from pstar_sim.catalog.model_shapes import model_entry
from pstar_sim.core.plan import Settings
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB
from pstar_sim.workload.presets import workload_of

LIMIT = 1.3
LAYER_PARAMS = 2**20


def layers(count: int) -> Job:
    w = chain_workload(count, LAYER_PARAMS, tide_bytes=8 * MIB, flops=10**11)
    return w, ps.machine("rtx4090"), Settings(update="eager", clip=False, chunk_bytes=2 * LAYER_PARAMS)


def micro_batches(count: int) -> Job:
    return gpt("8B", "v100-32", "eager", 1, count)


def experts(count: int) -> Job:
    """The model keeps its size: more experts are narrower, and a token goes to as many more."""
    entry, on = model_entry("mixtral-8x7b"), ps.machine("h100-80", host_memory="1TB")
    assert entry.experts is not None
    factor = count // entry.experts.count
    narrow = structs.replace(
        entry.experts, count=count, per_token=entry.experts.per_token * factor, ffn=entry.experts.ffn // factor
    )
    shape = structs.replace(entry, name=f"mixtral of {count}", experts=narrow)
    return workload_of(shape, batch=1, sequence=1024, micro_batches=2, dtype="bf16"), on, SETTINGS["eager"]


def ranks(count: int) -> Job:
    return gpt("18B", "h100-80x8", "eager", 4, nodes=count // 8)


AXES: dict[str, tuple[Callable[[int], Job], tuple[int, ...]]] = {
    "layers": (layers, (1250, 2500, 5000, 10_000)),
    "micro-batches": (micro_batches, (4, 8, 16, 32)),
    "experts": (experts, (8, 16, 32, 64)),
    "ranks": (ranks, (8, 16, 32, 64)),
}


def rows(repeats: int) -> Iterator[dict[str, Any]]:
    for axis, (job_of, counts) in AXES.items():
        before = None
        for count in counts:
            cpu_s = min(seconds_of(job_of(count)) for _ in range(repeats))
            exponent = None if before is None else round(log2(cpu_s / before), 2)
            yield {"axis": axis, "count": count, "cpu_s": round(cpu_s, 3), "exponent": exponent}
            before = cpu_s


def seconds_of(job: Job) -> float:
    begin_s = time.process_time()
    planned(job, prove=True)
    return time.process_time() - begin_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    seconds_of(gpt("1B", "v100-32", "eager", 1))  # imports are not the planner's
    found = []
    for row in rows(repeats):
        found.append(row)
        print(f"{row['axis']} {row['count']}: {row['cpu_s']} s, exponent {row['exponent']}", flush=True)
    steep = [row["axis"] for row in found if row["count"] == AXES[row["axis"]][1][-1] and row["exponent"] > LIMIT]
    print(f"above {LIMIT}: {', '.join(steep) or 'none'}; written: {write_result('growth', {'rows': found})}")
    return 1 if steep else 0


if __name__ == "__main__":
    sys.exit(main())
