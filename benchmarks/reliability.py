"""Reliability, as figures. One command each; figures go to results/reliability.json.

python benchmarks/reliability.py mutations --count 1000
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

__all__ = ["main"]


def mutations(args: argparse.Namespace) -> dict[str, object]:
    from _mutations import Bench, run_mutations

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder).resolve())
        report = run_mutations(
            bench, args.count, first_seed=args.seed, on_miss=lambda miss: print(f"MISS {miss}", flush=True)
        )
    outcomes = {f"{file}: {outcome}": n for (file, outcome), n in sorted(report.outcomes.items())}
    return {"files": args.count, "misses": len(report.misses), "seconds": round(report.seconds, 1), **outcomes}


def interleavings(args: argparse.Namespace) -> dict[str, object]:
    from _interleavings import run_interleavings

    report = run_interleavings(args.count, first_seed=args.seed, on_miss=lambda miss: print(f"MISS {miss}", flush=True))
    return {"runs": report.runs, "misses": len(report.misses), "seconds": round(report.seconds, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("mutations", help="mutated plan, trace and machine files")
    one.add_argument("--count", type=int, default=1000)
    one.add_argument("--seed", type=int, default=0)
    one.set_defaults(call=mutations)
    one = commands.add_parser("interleavings", help="random interleavings of three policies' plans, bit by bit")
    one.add_argument("--count", type=int, default=1000)
    one.add_argument("--seed", type=int, default=0)
    one.set_defaults(call=interleavings)
    args = parser.parse_args()
    figures = args.call(args)
    for name, value in figures.items():
        print(f"{name}: {value}")
    return 1 if figures.get("misses") else 0


if __name__ == "__main__":
    sys.exit(main())
