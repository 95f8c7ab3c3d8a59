"""KeyboardInterrupt at every line of the executor; a full run leaves its figures in results/interrupts.json.

    python benchmarks/interrupts.py                        # the first, a middle and the last hit of every line
    python benchmarks/interrupts.py --all --count 5000     # a sample of all hits of all lines, drawn with --seed
    python benchmarks/interrupts.py --minutes 20           # as many hits as the time allows, in random order

_interrupts.py defines the interruptions and their expected results. Exit status 1 if a result is another.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

from _interrupts import CASES, Bench, Outcome, Point, three_of
from _results import dependencies, taken_at, write_result

__all__ = ["main"]

RESULTS = Path(__file__).resolve().parent / "results" / "interrupts.json"
AT_ONCE = 25  # points of a case that one process takes at a time


@cache
def bench_of(number: int) -> Bench:
    """Returns the bench of a case, made once per process."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    return Bench(CASES[number])


def hits_of(number: int) -> dict[tuple[str, int, str], int]:
    return bench_of(number).hits()


def strike(number: int, points: Sequence[Point]) -> list[tuple[Point, Outcome]]:
    bench = bench_of(number)
    return [(point, bench.strike(point)) for point in points]


def all_of(hits: dict[tuple[str, int, str], int]) -> list[Point]:
    return [
        Point(file=file, line=line, thread=thread, hit=hit)
        for (file, line, thread), count in sorted(hits.items())
        for hit in range(1, count + 1)
    ]


def class_of(said: str) -> str:
    """Returns the error without the parts that differ from one interruption to the next."""
    said = re.sub(r"injected at .*", "(raised in a queue's thread)", said)
    said = re.sub(r"\(?'[^)]*\)?", "", re.sub(r"\d+", "N", said))
    return said.split(";")[0].split(":", 1)[-1].strip()[:90]


def run(every: bool, count: int | None, minutes: float | None, seed: int, processes: int) -> dict[str, Any]:
    begun_s = time.perf_counter()
    rng = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    misses = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        found = list(pool.map(hits_of, range(len(CASES))))
        chosen = [all_of(hits) if every else three_of(hits) for hits in found]
        of = [len(points) for points in chosen]
        for points in chosen:
            rng.shuffle(points)
        if count is not None:
            chosen = [points[: max(1, count * len(points) // sum(of))] for points in chosen]
        tasks = [
            (number, points[i : i + AT_ONCE])
            for number, points in enumerate(chosen)
            for i in range(0, len(points), AT_ONCE)
        ]
        rng.shuffle(tasks)
        outcomes: list[Counter[str]] = [Counter() for _ in CASES]
        errors: list[Counter[str]] = [Counter() for _ in CASES]
        numbers = {pool.submit(strike, number, points): number for number, points in tasks}
        for future in as_completed(numbers):
            number = numbers[future]
            for point, outcome in future.result():
                where = "user's thread" if point.thread == "user" else "queues' threads"
                outcomes[number][f"{outcome.kind}, {where}"] += 1
                if outcome.kind == "error":
                    errors[number][class_of(outcome.said)] += 1
                if not outcome.right:
                    misses += 1
                    print(f"MISS {CASES[number]}: {point}: {outcome.kind}: {outcome.said}", flush=True)
            done = sum(sum(counter.values()) for counter in outcomes)
            print(f"\r{done} of {sum(len(points) for points in chosen)}", end="", file=sys.stderr, flush=True)
            if minutes is not None and time.perf_counter() - begun_s > minutes * 60:
                for waiting in numbers:
                    waiting.cancel()
                break
    print(file=sys.stderr)
    for number, case in enumerate(CASES):
        rows[str(case)] = {
            "lines": len(found[number]), "hits": sum(found[number].values()), "points": of[number],
            "struck": sum(outcomes[number].values()), "outcomes": dict(sorted(outcomes[number].items())),
            "errors": dict(errors[number].most_common()),
        }  # fmt: skip
    total = sum(outcomes, Counter())
    return {
        "points": sum(of),
        "struck": sum(total.values()),
        "seed": seed,
        "taken_at": taken_at(dependencies("interrupts")),
        "misses": misses,
        "outcomes": dict(sorted(total.items())),
        "seconds": round(time.perf_counter() - begun_s, 1),
        "cases": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="draw from all hits rather than three of each line")
    parser.add_argument("--count", type=int, help="how many (default: every one)")
    parser.add_argument("--minutes", type=float, help="stop after this number of minutes (default: at the end)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-write", action="store_true", help="leave results/interrupts.json as it is")
    args = parser.parse_args()
    figures = run(args.all, args.count, args.minutes, args.seed, args.processes)
    for key in ("points", "struck", "misses", "seconds", *figures["outcomes"]):
        print(f"{key}: {figures.get(key, figures['outcomes'].get(key))}")
    if not args.no_write:
        kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        name = "all_hits" if args.all else "three_hits_per_line"
        known = {key: kept[key] for key in ("three_hits_per_line", "all_hits") if key in kept}
        write_result("interrupts", known | {name: figures})
    return 1 if figures["misses"] else 0


if __name__ == "__main__":
    sys.exit(main())
