"""Reliability, as figures. There is one command per kind; a full run leaves its figures in results/reliability.json.

    python benchmarks/reliability.py interleavings --count 1000   # of each of three policies, bit by bit
    python benchmarks/reliability.py kills --count 100            # SIGKILLs; every resume equals the whole run
    python benchmarks/reliability.py leaks --steps 2000           # slopes of host and accelerator memory
    python benchmarks/reliability.py mutations --count 1000       # damaged plan, trace and machine files (or 10000)
    python benchmarks/reliability.py faults                       # dead threads, full disks, refused memory, lost ranks

Exit status 1 if a result is not as it should be. Without a command: a few of each, nothing written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from _results import dependencies, taken_at, write_result

__all__ = ["main"]

RESULTS = Path(__file__).resolve().parent / "results" / "reliability.json"
FULL = {"interleavings": 1000, "kills": 100, "leaks": 2000, "mutations": 1000, "faults": 0}
SHORT = {"interleavings": 12, "kills": 4, "leaks": 100, "mutations": 30, "faults": 0}


def say_miss(miss: object) -> None:
    print(f"MISS {miss}", flush=True)


def interleavings(count: int, seed: int) -> dict[str, Any]:
    from _interleavings import MICRO_BATCHES, STEPS, run_interleavings

    report = run_interleavings(count, first_seed=seed, on_miss=say_miss)
    return {
        "runs": report.runs, "steps_a_run": STEPS, "micro_batches": MICRO_BATCHES, "misses": len(report.misses),
        "seconds": round(report.seconds, 1),
    }  # fmt: skip


def kills(count: int, seed: int) -> dict[str, Any]:
    from kills import kill_and_resume

    figures = dict(kill_and_resume(count, seed=seed))
    problems: list[str] = figures.pop("problems")
    for problem in problems:
        say_miss(problem)
    return figures | {"misses": len(problems)}


def leaks(count: int, seed: int) -> dict[str, Any]:
    from _leaks import run_leaks

    return run_leaks(count)


def mutations(count: int, seed: int) -> dict[str, Any]:
    from _mutations import Bench, run_mutations

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        report = run_mutations(Bench(Path(folder).resolve()), count, first_seed=seed, on_miss=say_miss)
        os.chdir(before)
    outcomes = {f"{file}: {outcome}": n for (file, outcome), n in sorted(report.outcomes.items())}
    return {"files": count, "misses": len(report.misses), "seconds": round(report.seconds, 1), **outcomes}


def faults(count: int, seed: int) -> dict[str, Any]:
    from _faults import run_faults

    report = run_faults(on_miss=say_miss)
    return {
        "faults": len(report.said) + len(report.misses), "misses": len(report.misses),
        "seconds": round(report.seconds, 1), "said": report.said,
    }  # fmt: skip


COMMANDS: Mapping[str, Callable[[int, int], dict[str, Any]]] = {
    "interleavings": interleavings, "kills": kills, "leaks": leaks, "mutations": mutations, "faults": faults,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=tuple(COMMANDS))
    parser.add_argument("--count", "--steps", type=int, help="how many (default: as above)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true", help="leave results/reliability.json as it is")
    args = parser.parse_args()
    wanted = (args.command,) if args.command else tuple(COMMANDS)
    missed = 0
    for name in wanted:
        count = args.count or (FULL if args.command else SHORT)[name]
        figures = COMMANDS[name](count, args.seed) | {
            "seed": args.seed,
            "taken_at": taken_at(dependencies("reliability")),
        }
        missed += figures["misses"]
        print(f"{name}:")
        for key, value in figures.items():
            print(f"  {key}: {value}")
        if args.command and not args.no_write:
            kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
            write_result("reliability", {key: kept[key] for key in COMMANDS if key in kept} | {name: figures})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
