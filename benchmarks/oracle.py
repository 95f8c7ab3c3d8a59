"""The simulator against the frozen simulator of the first edition (tests/oracle/), on random plans.

    python benchmarks/oracle.py [--plans 1000] [--seed 0]

Plans of every policy on one to four equal ranks, on machines with short DRAM, one link for both ways, measured
slow-downs. Each plan is played as it is and with random factors on every step, and every tenth also with a circle of
waits.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "oracle"))

import comparison
from _results import write_result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for n, (number, plan) in enumerate(islice(comparison.plans(f"benchmark {args.seed}"), args.plans)):
        machine = plan.machine
        counts["plans"] += 1
        counts["of several ranks"] += len(machine.ranks) > 1
        counts["one link for both ways"] += not machine.link.duplex
        counts["measured slow-downs"] += bool(machine.slowdowns)
        for word, jitter in (("nominal", None), ("jittered", comparison.jitter_of(number, plan))):
            counts[f"{word} runs compared"] += 1
            problems += [f"plan {number}, {word}: {line}" for line in comparison.compare(plan, jitter)]
        if n % 10 == 0:
            counts["deadlocks compared"] += 1
            problems += [f"plan {number}: {line}" for line in comparison.both_refuse(comparison.deadlocked(plan))]
    for word, count in counts.items():
        print(f"{count:6} {word}")
    print(f"{len(problems):6} differences")
    for line in problems[:20]:
        print(line)
    print(f"written: {write_result('oracle', {'seed': args.seed, **counts, 'differences': problems})}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
