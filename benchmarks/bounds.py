"""The lower bounds (closed form, joint and fluid program) against exact optima of tiny instances, and against random
plans.

    python benchmarks/bounds.py [--tiny 320] [--plans 2000] [--seed 0] [--search]

Tiny instances have 2 or 3 chunks and 2 to 4 micro-batches, depth-first or layer-major, with every placement of
gradients (tests/helpers/exact_optimum.py says over which schedules the optimum is exact): bounds <= optimum <= every
policy's plan. Random plans (tests/helpers/bounded.py) are of any policy and option, with one to four micro-batches: no
plan is below any bound. The script also prints the distances of bounds, optima and plans. Optima in the file are kept
unless --search is given (half an hour): they do not depend on the product.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import count
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from _results import RESULTS, write_result
from bounded import SPECS, bounds_of, held_plans
from exact_optimum import Tiny
from tiny import Compared, Optima, compare_tiny, from_text, layer_major, optima_of, random_tiny, to_text

MOST_STATES = 30_000
JOBS = 90
"""Random jobs whose bounds the file keeps, so that the suite sees where one of their rows changes."""
TOO_MANY, NOTHING = "left out: too many states", "left out: nothing fits"
OPTIONS = (
    "optimal:sums=off", "optimal:streams=off", "tide:sums=on", "tide:streams=on,sums=on", "tide:adam=fifo",
    "static_partition:sums=on", "tide:capacity=peak,prefetch=1", "zero_infinity:overlap=off", "stronghold:window=1",
    "zero3_offload:params=cpu", "deep_optimizer_states:every=1",
)  # fmt: skip
"""Policies that plan every tiny instance, beside all policies without options."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", type=int, default=320, help="with --search: instances that have an optimum")
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--search", action="store_true", help="draw instances and search their optima anew")
    args = parser.parse_args(argv)
    figures = {"plans": _plans(args.plans, args.seed)}
    rows, left_out = _searched(args.tiny, args.seed) if args.search else _known()
    figures["tiny"] = _tiny(rows, left_out)
    for part, values in figures.items():
        for key, value in values.items():
            print(f"{part}: {key}: {value}")
    jobs = [json.dumps({"job": n, "bounds": _short(bounds_of(n))}) for n in range(JOBS)]
    result = {"seed": args.seed, **figures, "instances": [*map(_line, rows)], "jobs": jobs}
    print(f"written: {write_result('bounds', result)}")
    return 1 if any(values["wrong"] for values in figures.values()) else 0


def _known() -> tuple[list[Compared], Mapping[str, int]]:
    """Returns the instances of the file of results, compared anew with bounds and plans, and the number of instances
    without an optimum."""
    result = json.loads((RESULTS / "bounds.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in result["instances"]]
    optima = [tuple(None if word is None else Fraction(word) for word in row["optima"]) for row in rows]
    counts = {word: result["tiny"][word] for word in (TOO_MANY, NOTHING) if word in result["tiny"]}
    return [_compared(from_text(row["tiny"]), (best, resident)) for row, (best, resident) in zip(rows, optima)], counts


def _compared(t: Tiny, optima: Optima) -> Compared:
    return compare_tiny(t, optima, (*SPECS, *OPTIONS))


def _line(row: Compared) -> str:
    """Returns an instance in one line of JSON."""
    optima = [None if each is None else str(each) for each in row.optima]
    bounds = _short((row.closed, row.joint, row.fluid))
    return json.dumps({"tiny": to_text(row.tiny), "optima": optima, "bounds": bounds})


def _short(bounds: Sequence[float]) -> list[float]:
    return [float(f"{each:.8g}") for each in bounds]


def _searched(wanted: int, seed: int) -> tuple[list[Compared], Mapping[str, int]]:
    """Returns that many random instances with an optimum, and the numbers of instances without an optimum or with too
    many states."""
    rows: list[Compared] = []
    left_out = {TOO_MANY: 0, NOTHING: 0}
    for number in count():
        if len(rows) == wanted:
            break
        t = _drawn_tiny(random.Random(f"tiny {seed} {number}"))
        try:
            optima = optima_of(t, most_states=MOST_STATES)
        except MemoryError:
            left_out[TOO_MANY] += 1
            continue
        if optima[0] is None:
            left_out[NOTHING] += 1
            continue
        rows.append(_compared(t, optima))
    return rows, left_out


def _tiny(rows: Sequence[Compared], left_out: Mapping[str, int]) -> Mapping[str, object]:
    """Returns counts and ratios."""
    counts: Counter[str] = Counter()
    by_policy: dict[str, list[float]] = defaultdict(list)
    over: dict[str, list[float]] = {name: [] for name in ("closed form", "joint program", "fluid program")}
    for row in rows:
        best, resident = row.optima
        assert best is not None
        counts[f"{row.tiny.layers} chunks"] += 1
        counts[f"{row.tiny.micro_batches} micro-batches"] += 1
        counts["layer-major"] += row.tiny.order is not None
        if resident is not None:
            over["closed form"].append(float(resident) / row.closed)
        over["joint program"].append(float(best) / row.joint)
        over["fluid program"].append(float(best) / row.fluid)
        for spec, seconds in row.plans.items():
            by_policy[spec].append(seconds / float(best))
    return {
        "instances": len(rows),
        **counts,
        **left_out,
        **{f"optimum over {name}": spread(ratios) for name, ratios in over.items()},
        "optimum over fluid program, with room": spread([_ratio(r) for r in rows if _has_room(r.tiny)]),
        "plans": sum(map(len, by_policy.values())),
        "plan over optimum": {spec: spread(by_policy[spec]) for spec in sorted(by_policy)},
        "loosest with room": [
            f"{r.optima[0]} over {r.fluid:.4f}, {r.binding} binds: {to_text(r.tiny)}"
            for r in sorted(rows, key=_ratio, reverse=True)
            if _has_room(r.tiny)
        ][:8],
        "wrong": [f"{line}: {to_text(row.tiny)}" for row in rows for line in row.wrong],
    }


def _ratio(row: Compared) -> float:
    return float(row.optima[0] or 0) / row.fluid


def _has_room(t: Tiny) -> bool:
    """Returns whether the GPU has room for two working lists and two sums. With less room, the wholeness of chunks
    limits more than any bound with divisible chunks."""
    return t.slots >= 2 * (1 + t.wide)


def _drawn_tiny(rng: random.Random) -> Tiny:
    many = rng.random() < 0.1
    t = random_tiny(rng, layers=3 if many else 2, micro_batches=2 if many else rng.choice((2, 3, 4)))
    return layer_major(t) if rng.random() < 0.2 else t


def _plans(wanted: int, seed: int) -> Mapping[str, object]:
    """Returns counts and ratios of that many plans."""
    counts: Counter[str] = Counter()
    by_binding: dict[str, list[float]] = defaultdict(list)
    wrong: list[str] = []
    for plan, held, below in held_plans(f"plan {seed}", wanted, counts):
        counts["layer-major"] += not plan.workload.order.of_loop
        counts["with stashes"] += bool(plan.workload.stashes)
        counts["behind a barrier"] += plan.settings.barrier(plan.workload.dtype) is not None
        counts["with clipping"] += plan.settings.clip
        counts["held against the closed form, too"] += "closed" in held.bounds
        by_binding[held.binding].append(held.seconds / held.bounds["fluid"])
        wrong += below
    return {
        **{key: counts[key] for key in sorted(counts)},
        "plan over fluid program": {binding: spread(by_binding[binding]) for binding in sorted(by_binding)},
        "wrong": wrong,
    }


def spread(ratios: Sequence[float]) -> Mapping[str, float]:
    """Returns the number of ratios, and their least, median, mean and largest value."""
    if not ratios:
        return {"count": 0}
    figures = {"least": min(ratios), "median": median(ratios), "mean": mean(ratios), "largest": max(ratios)}
    return {"count": len(ratios), **{word: round(value, 4) for word, value in figures.items()}}


if __name__ == "__main__":
    raise SystemExit(main())
