"""The lower bounds (closed form, joint and fluid program) against exact optima of tiny instances, and against random
plans.

    python benchmarks/bounds.py [--tiny 320] [--plans 2000] [--seed 0]

Tiny instances have 2 or 3 chunks and 2 to 4 micro-batches, depth-first or layer-major, with every placement of
gradients (tests/helpers/exact_optimum.py says over which schedules the optimum is exact): bounds <= optimum <= every
policy's plan. Random plans (tests/helpers/bounded.py) are of any policy and option, with one to four micro-batches:
no plan is below any bound. Beside the counts: how far apart bounds, optima and plans are.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from _results import write_result
from bounded import SPECS, hold, random_job, random_spec
from exact_optimum import Tiny
from tiny import Compared, compare_tiny, layer_major, random_tiny

from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy.registry import find_policy

MOST_STATES = 30_000
OPTIONS = (
    "optimal:sums=off", "optimal:streams=off", "tide:sums=on", "tide:streams=on,sums=on", "tide:adam=fifo",
    "static_partition:sums=on", "tide:capacity=peak,prefetch=1", "zero_infinity:overlap=off", "stronghold:window=1",
    "zero3_offload:params=cpu", "deep_optimizer_states:every=1",
)  # fmt: skip
"""What is asked for every tiny instance beside all policies without options."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", type=int, default=320, help="instances that have an optimum")
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    figures = {"tiny": _tiny(args.tiny, args.seed), "plans": _plans(args.plans, args.seed)}
    for part, rows in figures.items():
        for key, value in rows.items():
            print(f"{part}: {key}: {value}")
    print(f"written: {write_result('bounds', {'seed': args.seed, **figures})}")
    return 1 if any(rows["wrong"] for rows in figures.values()) else 0


def _tiny(wanted: int, seed: int) -> Mapping[str, object]:
    """Counts and ratios of that many instances that have an optimum."""
    counts: Counter[str] = Counter()
    by_policy: dict[str, list[float]] = defaultdict(list)
    rows: list[Compared] = []
    wrong: list[str] = []
    for number in count():
        if len(rows) == wanted:
            break
        t = _drawn_tiny(random.Random(f"tiny {seed} {number}"))
        try:
            found = compare_tiny(t, (*SPECS, *OPTIONS), most_states=MOST_STATES)
        except MemoryError:
            counts["given up, too many states"] += 1
            continue
        wrong += [f"{line}: {t}" for line in found.wrong]
        if found.best is None:
            counts["nothing fits"] += 1
            continue
        rows.append(found)
        counts[f"{t.layers} chunks"] += 1
        counts[f"{t.micro_batches} micro-batches"] += 1
        counts["layer-major"] += t.order is not None
        for spec, seconds in found.plans.items():
            by_policy[spec].append(seconds / found.best)
    return {
        "instances": len(rows),
        **counts,
        "optimum over closed form": _spread([r.best_resident / r.closed for r in rows if r.best_resident]),
        "optimum over joint program": _spread([r.best / r.joint for r in rows if r.best]),
        "optimum over fluid program": _spread([r.best / r.fluid for r in rows if r.best]),
        "plans": sum(map(len, by_policy.values())),
        "plan over optimum": {spec: _spread(by_policy[spec]) for spec in sorted(by_policy)},
        "loosest": [f"{r.best} over {r.fluid:.4g} ({r.binding}): {r.tiny}" for r in _loosest(rows)],
        "wrong": wrong,
    }


def _drawn_tiny(rng: random.Random) -> Tiny:
    many = rng.random() < 0.1
    t = random_tiny(rng, layers=3 if many else 2, micro_batches=2 if many else rng.choice((2, 3, 4)))
    return layer_major(t) if rng.random() < 0.2 else t


def _loosest(rows: Sequence[Compared]) -> list[Compared]:
    return sorted(rows, key=lambda r: -(r.best or 0.0) / r.fluid)[:12]


def _plans(wanted: int, seed: int) -> Mapping[str, object]:
    """Counts and ratios of that many plans."""
    counts: Counter[str] = Counter()
    by_binding: dict[str, list[float]] = defaultdict(list)
    wrong: list[str] = []
    for number in count():
        if counts["plans"] == wanted:
            break
        rng = random.Random(f"plan {seed} {number}")
        w, machine, settings = random_job(rng)
        spec = random_spec(rng)
        try:
            plan = find_policy(spec)(w, machine, settings)
        except (DoesNotFit, CannotPlan):
            counts["no plan"] += 1
            continue
        held = hold(plan)
        counts["plans"] += 1
        counts[f"of {spec.partition(':')[0]}"] += 1
        counts[f"{w.micro_batches} micro-batches"] += 1
        counts["layer-major"] += plan.workload.layer_major
        counts["with stashes"] += bool(plan.workload.stashes)
        counts["behind a barrier"] += settings.barrier(w.dtype) is not None
        counts["with clipping"] += settings.clip
        counts["held against the closed form, too"] += "closed" in held.bounds
        by_binding[held.binding].append(held.seconds / held.bounds["fluid"])
        wrong += [f"{line}: plan {number}, {spec}, {settings}" for line in held.wrong]
    return {
        **{key: counts[key] for key in sorted(counts)},
        "plan over fluid program": {binding: _spread(by_binding[binding]) for binding in sorted(by_binding)},
        "wrong": wrong,
    }


def _spread(ratios: Sequence[float]) -> Mapping[str, float]:
    """How many there are, least, median, mean and largest."""
    if not ratios:
        return {"count": 0}
    figures = {"least": min(ratios), "median": median(ratios), "mean": mean(ratios), "largest": max(ratios)}
    return {"count": len(ratios), **{word: round(value, 4) for word, value in figures.items()}}


if __name__ == "__main__":
    raise SystemExit(main())
