"""PatrickStar's own node, 8 V100 of 32 GB and 240 GB of host memory: the largest trainable model by policy beside the
published ones, and the worth of each idea for its 8B model, on one GPU of the node (batch 16, whose profile is
published: 26.5 s per iteration) and on all of them (16 per GPU).

Writes results/patrickstar_node.json.

fp16, sequence 1024, checkpointing, update=step with clipping, as in PatrickStar's own training. --eager leaves the
barrier out (bf16 in place of fp16, at the same rate). -o FOLDER also draws the waterfalls there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from _results import write_result

import pstar_sim as ps
from pstar_sim.catalog.loader import load_machine
from pstar_sim.report.waterfall import waterfall_figure

NODE = "v100-32x8"
LIMITS = ("zero_offload", "patrickstar", "static_partition", "tide", "optimal")
BATCH = 16  # sequences per GPU


def limits() -> dict[str, object]:
    node = load_machine(NODE)
    found: dict[str, object] = {}
    for of, like, hidden in (("18B's width", "18B", 4096), ("8B's width", "8B", 3072)):
        answer = ps.max_model(node, batch=8 * len(node.ranks), seq=1024, like=like, hidden=hidden, policies=LIMITS)
        print(f"== largest trainable model of {of}, batch 8 a GPU\n\n{answer!r}")
        found[like] = answer.to_json()
    return found


def ablations(eager: bool, folder: Path | None) -> dict[str, object]:
    answers: dict[str, object] = {}
    settings = ps.Settings(update="eager", clip=False) if eager else ps.Settings()
    for gpus in (1, 8):
        machine = load_machine(NODE, overrides={"gpus": gpus})
        workload = ps.preset("8B", batch=BATCH * gpus, seq=1024, dtype="bf16" if eager else "fp16")
        print(f"== 8B on {gpus} GPU{'s' if gpus > 1 else ''} of the node, batch {BATCH} a GPU\n")
        found = ps.ablate(workload, machine, settings)
        print(found)
        answers[f"{gpus} GPU{'s' if gpus > 1 else ''}"] = found.to_json()
        if folder is not None:
            path = folder / f"waterfall-8b-{gpus}gpu{'-eager' if eager else ''}.png"
            waterfall_figure(found).savefig(path, dpi=150)
            print(f"{path}\n")
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eager", action="store_true", help="no barrier")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="draw the waterfalls there")
    args = parser.parse_args()
    figures = {"largest": limits(), "eager" if args.eager else "step": ablations(args.eager, args.output)}
    print(write_result("patrickstar_node", figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
