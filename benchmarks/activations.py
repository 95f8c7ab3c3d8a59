"""The worth of choosing block by block: the fastest plan that `optimal` finds in three cases. In the first all blocks
keep or all recompute their activations. In the second the last blocks (a quarter, half or three quarters) may keep them
while the others recompute. In the third blocks may also be offloaded.

bf16 (fp16 on v100-32), update eager, no clipping, one micro-batch. `optimal` plans only some of the ways ([Note: what
is planned] in pstar_sim/planner/variants.py), so a wider choice may come out slower; the script fails if it is slower
by more than TOLERANCE. Prints a row per case with the chosen way of the widest choice and its gain over all blocks
alike ("-" where that does not fit), and writes results/activations.json.
"""

from __future__ import annotations

import argparse
import sys
import time

from _results import write_result

import pstar_sim as ps
from pstar_sim.cli.inputs import default_dtype
from pstar_sim.core.plan import Settings
from pstar_sim.errors import DoesNotFit
from pstar_sim.planner.variants import Chosen, choose
from pstar_sim.planner.ways import Way, candidates
from pstar_sim.workload.workload import activations_text

CASES = (
    ("llama-3-8b", 8192, 2, "a100-80"),
    ("llama-7b", 2048, 8, "v100-32"),
    ("4B", 1024, 16, "rtx4090"),
    ("1B", 1024, 8, "rtx4090"),
    ("NV_39B", 1024, 8, "a100-80"),
)
TOLERANCE = 0.02  # a wider choice is searched with the same effort


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    settings = Settings(update="eager", clip=False)
    rows: list[dict[str, object]] = []
    wrong = 0
    print(
        "| model | sequence | batch | machine | all alike | kept or recomputed | also offloaded | gain | CPU | chosen |"
    )
    print("|---|---:|---:|---|---:|---:|---:|---:|---:|---|")
    for model, sequence, batch, name in CASES:
        machine = ps.machine(name)
        dtype = default_dtype(machine)
        plain = [ps.preset(model, batch=batch, seq=sequence, dtype=dtype, checkpointing=c) for c in (True, False)]
        every = candidates(plain, batch)
        sets = {
            "all alike": [w for w in every if not w.activations],
            "kept or recomputed": [w for w in every if not w.stashes],
            "also offloaded": list(every),
        }
        seconds: dict[str, float | None] = {}
        chosen: Chosen | None = None
        begin_s = time.process_time()
        for what, among in sets.items():
            chosen = _chosen(among, machine, settings)
            seconds[what] = chosen.iteration_s if chosen is not None else None
        cpu_s = time.process_time() - begin_s
        known = [s for s in seconds.values() if s is not None]
        if not known or chosen is None:
            print(f"| {model} | {sequence} | {batch} | {name} | does not fit |")
            continue
        wrong += any(wider > min(known[:n]) * (1 + TOLERANCE) for n, wider in enumerate(known) if n)
        alike = seconds["all alike"]
        gain = None if alike is None else 1 - known[-1] / alike
        how = activations_text(chosen.workload).removeprefix("activations ").removeprefix("of ")
        said = "-" if gain is None else f"{gain:.1%}"
        cells = [f"{s:.3f} s" if s is not None else "-" for s in seconds.values()]
        print(
            f"| {model} | {sequence} | {batch} | {name} | {' | '.join(cells)} | {said} | {cpu_s:.1f} s | {how} |",
            flush=True,
        )
        rows.append({"model": model, "sequence": sequence, "batch": batch, "machine": name, "chosen": how,
                     "seconds": seconds, "gain": gain, "cpu_s": cpu_s})  # fmt: skip
    write_result("activations", {"rows": rows})
    return 1 if wrong else 0


def _chosen(among: list[Way], machine: ps.Machine, settings: Settings) -> Chosen | None:
    try:
        return choose(among, machine, settings)
    except DoesNotFit:
        return None


if __name__ == "__main__":
    sys.exit(main())
