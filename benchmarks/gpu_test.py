"""`make gpu-test`, `make gpu-steady`: the tests marked gpu, with the current interpreter.

Every test's result is kept at once. A later run continues from the folder --out where an interrupted run, or one whose
--minutes were over, stopped. A test that hangs or kills its process counts as failed, with the stacks of all threads in
the log, and the following tests run in a new process. Warnings are shown and kept, and fail nothing: torch has warnings
of its own on a device. Tests marked slow run alone: `--slow`. pytest without plugins is enough.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _keep import Keep, python_path, results_folder
from _results import RESULTS, write_result
from preflight import cannot_run, report

ROOT = Path(__file__).resolve().parents[1]
BAD = frozenset({"failed", "error", "hung", "died"})
# Tests of streams and events come first: if they fail, the others mean little.
FIRST = ("TestHazards", "test_streams_equal_the_serial_order_to_the_bit")
OPTIONS = (
    *("-o", "addopts=", "--strict-markers", "--import-mode=importlib", "-W", "default"),
    *(
        "-p",
        "_watch",
        "-p",
        "no:timeout",
        "-p",
        "no:xdist",
        "-p",
        "no:hypothesispytest",
        "-p",
        "no:cacheprovider",
        "-ra",
        "-q",
    ),
    "--continue-on-collection-errors",
)


def gpu_files() -> list[str]:
    """Returns the test files that have a test for a GPU."""
    found = (p for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text(encoding="utf-8"))
    return sorted(str(p.relative_to(ROOT)) for p in found)


def read(partial: Path) -> list[dict[str, Any]]:
    """Returns the complete rows; an interrupted run may have left an incomplete one."""
    rows = []
    for line in partial.read_text(encoding="utf-8").splitlines() if partial.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def results(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns test -> its last result."""
    return {row["test"]: row for row in rows if "test" in row}


def unfinished(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the beginning of the test that was running when the process ended; None if there is none."""
    last = next((row for row in reversed(rows) if row.keys() & {"started", "test", "cut_off"}), {})
    return last if "started" in last else None


def run(keep: Keep, args: argparse.Namespace) -> int:
    """Returns the number of tests left when the minutes were over."""
    ends_s = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    again = args.again
    while True:
        done = [t for t, row in results(read(keep.partial)).items() if not (again and row["outcome"] in BAD)]
        again = False
        left_s = min(ends_s - time.monotonic(), 1e6)
        settings = {
            "partial": str(keep.partial.resolve()), "limit_s": args.test_limit_s, "left_s": left_s, "first": FIRST,
            "done": sorted(done),
        }  # fmt: skip
        marked = f"({args.marked}) and {'slow' if args.slow else 'not slow'}"
        status, over = keep.run(
            [sys.executable, "-X", "faulthandler", "-m", "pytest", *OPTIONS, "-m", marked, *args.tests],
            limit_s=left_s + 5,
            cwd=ROOT,
            environment={
                "PYTHONPATH": python_path(ROOT, ROOT / "benchmarks"), "PSTAR_WATCH": json.dumps(settings),
            },
        )  # fmt: skip
        rows = read(keep.partial)
        begun = unfinished(rows)
        if begun is None:
            if not over and status not in (0, 1, 2, 5):
                raise SystemExit(f"gpu-test: pytest itself ended with status {status}; see {keep.log}")
            collected = next((row["collected"] for row in reversed(rows) if "collected" in row), 0)
            return int(collected - sum("::" in test for test in results(rows)))
        test = begun["started"]
        if over:
            keep.say(f"gpu-test: {test} had not ended when the time was up; it comes again with the next run")
            append(keep.partial, {"cut_off": test})
            return 1
        why = "hung" if time.time() - begun["at_s"] >= args.test_limit_s else "died"
        text = f"the process ended with status {status} in it; where each thread was is in {keep.log.name}"
        append(keep.partial, {"test": test, "outcome": why, "text": text})
        keep.say(f"gpu-test: {test} {why}: {text}; the other tests go on")


def append(partial: Path, row: dict[str, Any]) -> None:
    with partial.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="of this run; 0 for no limit")
    parser.add_argument("--fresh", action="store_true", help="forget the tests that a run before this one did")
    parser.add_argument("--again", action="store_true", help="run what failed again")
    parser.add_argument(
        "--out", type=results_folder, help=f"folder of what is found (default: {RESULTS.relative_to(ROOT)})"
    )
    parser.add_argument("--slow", action="store_true", help="the tests marked slow, and no others")
    parser.add_argument("--test-limit-s", type=float, default=90.0, help="of a test that does not name its own limit")
    parser.add_argument("--marked", default="gpu", help="which tests, as for pytest -m")
    parser.add_argument("--without-device", action="store_true", help="run all the same: gpu tests are then skipped")
    parser.add_argument("tests", nargs="*", help="files or tests (default: every file that has a test marked gpu)")
    args = parser.parse_args(argv)
    args.tests = args.tests or gpu_files()
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    name = "gpu-steady" if args.slow else "gpu-test"
    if (status := cannot_run(name, ("pytest", "numpy"), device=not args.without_device)) is not None:
        return status
    keep = Keep(args.out or RESULTS, name.replace("-", "_"))
    if args.fresh:
        keep.partial.unlink(missing_ok=True)
    keep.say(report())
    left = run(keep, args)
    rows = read(keep.partial)
    found = results(rows)
    counts = Counter(row["outcome"] for row in found.values())
    bad = {test: row for test, row in found.items() if row["outcome"] in BAD}
    for test, row in bad.items():
        keep.say(f"{row['outcome']}: {test}: {row.get('text', '').strip().splitlines()[-1]}")
    warned = Counter(row["warned"] for row in rows if "warned" in row)
    for warning, count in warned.most_common(20):
        keep.say(f"warned {count} times: {warning.splitlines()[0]}")
    figures = {"counts": counts, "tests": found, "warnings": warned, "tests_left": left}
    keep.say(f"{name}: {', '.join(f'{n} {word}' for word, n in sorted(counts.items()))}; {left} left")
    keep.say(f"written: {write_result(keep.name, figures, folder=args.out)}")
    if left:
        keep.say(f"{left} tests had no time left; run the same command again and it goes on")
    elif args.out is None:
        keep.partial.unlink()
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
