"""The lower bounds of several GPUs against random plans: no plan of any policy and option is below any bound.

    python benchmarks/bounds_ranks.py [--plans 600] [--seed 0]

Jobs are those of tests/helpers/bounded.py, on two to eight GPUs, equal ones and such that differ, with and without PCIe
switches and a link between GPUs, on one node or two. Prints counts and how far plans are above the larger bound, by
what binds it; writes results/bounds_ranks.json; exit 1 where a plan is below a bound.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from _results import write_result
from bounded import hold, random_job, random_spec, several

from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy.registry import find_policy


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    counts: Counter[str] = Counter()
    over: defaultdict[str, list[float]] = defaultdict(list)
    wrong: list[str] = []
    for number in count():
        if counts["plans"] >= args.plans:
            break
        rng = random.Random(f"ranks {args.seed} {number}")
        w, machine, settings = random_job(rng)
        machine = several(rng, machine, rng.choice((2, 3, 4, 6, 8)))
        spec = random_spec(rng)
        try:
            plan = find_policy(spec)(w, machine, settings)
        except (DoesNotFit, CannotPlan):
            counts["no plan"] += 1
            continue
        held = hold(plan)
        counts["plans"] += 1
        counts[f"of {spec.partition(':')[0]}"] += 1
        counts[f"{len(machine.ranks)} GPUs"] += 1
        counts[f"{w.micro_batches} micro-batches"] += 1
        counts["GPUs that differ"] += machine.mixed
        counts["whole chunks on each GPU"] += plan.layout.ranks == 1
        over[held.binding].append(held.seconds / held.bounds["fluid"])
        wrong += [f"{line}: plan {number}, {spec}, {settings}" for line in held.wrong]
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
