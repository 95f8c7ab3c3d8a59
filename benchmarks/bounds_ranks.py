"""The lower bounds of several GPUs against random plans: no plan of any policy and option is below any bound.

    python benchmarks/bounds_ranks.py [--plans 600] [--seed 0]

Jobs are those of tests/helpers/bounded.py, on two to eight equal or different GPUs, with and without PCIe switches and
a link between GPUs, on one node or two. Prints counts and how far plans are above the larger bound, by the binding
resource; writes results/bounds_ranks.json. Exit status 1 if a plan is below a bound.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from _results import write_result
from bounded import held_plans


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    counts: Counter[str] = Counter()
    over: defaultdict[str, list[float]] = defaultdict(list)
    wrong: list[str] = []
    for plan, held, below in held_plans(f"ranks {args.seed}", args.plans, counts, gpus=(2, 3, 4, 6, 8)):
        counts[f"{len(plan.machine.ranks)} GPUs"] += 1
        counts["GPUs that differ"] += plan.machine.mixed
        counts["whole chunks on each GPU"] += plan.layout.ranks == 1
        over[held.binding].append(held.seconds / held.bounds["fluid"])
        wrong += below
    figures = {
        **{key: counts[key] for key in sorted(counts)},
        "plan over bound, median": {binding: round(median(over[binding]), 4) for binding in sorted(over)},
        "wrong": wrong,
    }
    for key, value in figures.items():
        print(f"{key}: {value}")
    print(f"written: {write_result('bounds_ranks', {'seed': args.seed, **figures})}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
