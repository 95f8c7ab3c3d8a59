"""`make gpu-test`: the tests marked gpu, with the current interpreter, a file at a time.

A file is a stage: a run that was cut off or used up its --minutes goes on with the next one. The options of
pyproject.toml that need plugins are left out: pytest alone is enough. Results: benchmarks/results/gpu_test.json.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contenders.process import Failed
from contenders.stages import Stages
from preflight import missing, no_cuda, report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
# pytest-timeout's own setting is unknown where the plugin is not: no error, then.
OPTIONS = (
    *("-o", "addopts=", "--strict-markers", "--import-mode=importlib"),
    *("-W", "default::pytest.PytestConfigWarning", "-p", "no:cacheprovider", "-m", "gpu", "-ra", "-q"),
)


def gpu_files() -> list[Path]:
    """Test files that have a test for a GPU."""
    return sorted(p for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text(encoding="utf-8"))


def counts(output: str) -> dict[str, int]:
    """{"passed": 12, "failed": 1, ...} of pytest's last line."""
    lines = [line for line in output.strip().splitlines() if re.search(r"\b\d+ \w+.* in [\d.]+s", line)]
    words = re.findall(r"(\d+) (passed|failed|skipped|errors?)", lines[-1]) if lines else []
    return {word: int(number) for number, word in words}


def run_file(path: Path, left_s: float) -> dict[str, Any]:
    """Raises Failed where there was no time to finish."""
    command = [sys.executable, "-m", "pytest", *OPTIONS, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=max(left_s, 1.0), check=False
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{path.name}: no answer within {left_s:.0f} s", lasting=False) from None
    found = counts(done.stdout)
    if done.returncode:
        print(done.stdout[-6000:] + done.stderr[-1000:])
    return {"exit_status": done.returncode, "counts": found, "end": done.stdout.strip().splitlines()[-3:]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="of this run; 0 for no limit")
    parser.add_argument("--fresh", action="store_true", help="forget the files that a run before this one did")
    args = parser.parse_args(argv)
    if (why := no_cuda()) is not None:
        print(f"gpu-test: skipped: {why}")
        return 0
    print(report())
    if gone := missing(("pytest", "numpy")):
        print(f"gpu-test: skipped: {', '.join(gone)} cannot be imported by {sys.executable}")
        return 0
    partial = RESULTS / "gpu_test.partial.jsonl"
    if args.fresh:
        partial.unlink(missing_ok=True)
    stages = Stages(partial, minutes=args.minutes or None, expected_s=30.0)
    found: dict[str, Any] = {}
    for path in gpu_files():
        name = str(path.relative_to(ROOT))
        result = stages.run(name, name, lambda left_s, path=path: run_file(path, left_s))
        if result is not None:
            found[name] = result
            print(f"{name}: {', '.join(f'{n} {word}' for word, n in result.get('counts', {}).items()) or result}")
    from _results import write_result

    print(f"written: {write_result('gpu_test', {'files': found, 'files_left': stages.left_out}).relative_to(ROOT)}")
    if stages.left_out:
        print(f"{stages.left_out} files had no time left; run the same command again and it goes on")
    else:
        stages.forget()
    return int(any(result.get("exit_status") not in (0, 5) for result in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
