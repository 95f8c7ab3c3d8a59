"""`make gpu-mirror`: finds errors of a first minute on a GPU machine without such a machine.

It runs in an environment like such a machine's (benchmarks/mirror.txt: Python 3.12, torch 2.11, no simpy). Every gpu
script has to end at "no CUDA device" with its own status. Every gpu test has to be collected and skipped only because
there is no device. The suite's CPU part has to pass (--tests names a part of it). Results: gpu_mirror.json in --out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _keep import check_place, results_folder
from _results import RESULTS, write_result
from gpu_test import BAD, read, results
from gpu_test import main as run_tests
from preflight import NO_DEVICE, no_cuda, report

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = (
    ("gpu-smoke", "gpu_smoke.py"), ("gpu-test", "gpu_test.py"), ("gpu-parity", "gpu_parity.py"),
    ("gpu-record", "gpu_record.py"), ("gpu-steady", "gpu_test.py", "--slow"), ("gpu-7b", "gpu_record.py"),
    ("gpu-peers", "peers.py", "--device", "cuda"), ("gpu-largest", "gpu_largest.py"),
)  # fmt: skip


def scripts() -> dict[str, Any]:
    """Returns script -> its exit status and lines."""
    found = {}
    for name, file, *argv in SCRIPTS:
        command = [sys.executable, str(ROOT / "benchmarks" / file), *argv]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        lines = (done.stdout + done.stderr).strip().splitlines()
        fine = done.returncode == NO_DEVICE and len(lines) == 1 and "no CUDA device" in lines[0]
        found[name] = {"status": done.returncode, "lines": lines[-5:], "fine": fine}
        print(f"{name}: status {done.returncode}: {lines[-1] if lines else '(nothing)'}", flush=True)
    return found


def tests(folder: Path, argv: Sequence[str]) -> dict[str, Any]:
    """Returns the counts of a run of tests, the reasons of skips, and the failed tests."""
    run_tests(["--without-device", "--minutes", "0", "--test-limit-s", "600", "--out", str(folder), *argv])
    rows = results(read(folder / "gpu_test.partial.jsonl"))
    skipped = Counter(row["text"] for row in rows.values() if row["outcome"] == "skipped")
    return {
        "counts": Counter(row["outcome"] for row in rows.values()),
        "skipped_because": skipped,
        "failed": sorted(name for name, row in rows.items() if row["outcome"] in BAD),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=results_folder, help=f"folder of the result (default: {RESULTS.relative_to(ROOT)})"
    )
    parser.add_argument("--tests", nargs="*", default=["tests"], help="of the CPU part; none: --tests alone")
    args = parser.parse_args(argv)
    if no_cuda() is None:
        print("gpu-mirror: there is a CUDA device: the scripts would run on it")
        return 1
    check_place(args.out or RESULTS, "gpu_mirror.json")
    print(report())
    if sys.version_info[:2] != (3, 12):
        print(f"this is Python {sys.version.split()[0]}, not 3.12")
    found: dict[str, Any] = {"scripts": scripts()}
    with tempfile.TemporaryDirectory() as folder:
        found["gpu_tests"] = tests(Path(folder) / "gpu", ["--marked", "gpu"])
        if args.tests:
            found["cpu_tests"] = tests(Path(folder) / "cpu", ["--marked", "not gpu", *args.tests])
    for name in ("gpu_tests", "cpu_tests"):
        print(f"{name}: {found.get(name)}")
    print(f"written: {write_result('gpu_mirror', found, folder=args.out)}")
    fine = all(row["fine"] for row in found["scripts"].values())
    alone = set(found["gpu_tests"]["counts"]) == {"skipped"} and all(
        "CUDA device" in why for why in found["gpu_tests"]["skipped_because"]
    )
    return int(not (fine and alone and not found.get("cpu_tests", {}).get("failed")))


if __name__ == "__main__":
    raise SystemExit(main())
