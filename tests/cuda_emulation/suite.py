"""`make gpu-emulated`: the tests marked gpu on the emulated device, with random delays and poisoned memory.

suite.py [--slow] [ARGUMENTS OF PYTEST]. Without arguments every such test runs but for those marked slow, and fewer
passed tests than LEAST_PASSED fail; with --slow those marked slow run, and no others. The seed of the delays is
printed; EMULATED_CUDA_SEED repeats it.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

LEAST_PASSED = 260
COUNTED = "EMULATED_CUDA_LEAST_PASSED"
DEVICE = {
    "EMULATED_CUDA_DEVICES": "2",
    "EMULATED_CUDA_NAME": "NVIDIA A100-SXM4-40GB",  # one that the catalog has
    "EMULATED_CUDA_DELAY_US": "300",
    "EMULATED_CUDA_POISON": "1",
}


def main(arguments: list[str]) -> None:
    import build
    import emulated

    build.ensure_built()
    seed = os.environ.get("EMULATED_CUDA_SEED") or str(random.randrange(10**6))
    print(f"emulated CUDA: EMULATED_CUDA_SEED={seed}", flush=True)
    outer = {**DEVICE, **os.environ, "EMULATED_CUDA_SEED": seed}
    slow = "--slow" in arguments
    arguments = [argument for argument in arguments if argument != "--slow"]
    if not arguments:
        outer[COUNTED] = str(1 if slow else LEAST_PASSED)
    inner = emulated.environment(outer)
    inner["PYTHONPATH"] = os.pathsep.join([str(build.HERE), inner["PYTHONPATH"]])
    os.chdir(emulated.ROOT)
    marked = "gpu and slow" if slow else "gpu and not slow"
    command = ["python", "-m", "pytest", "-p", "suite", "-m", marked, *(arguments or whole())]
    os.execvpe(command[0], command, inner)


def whole() -> list[str]:
    """All files with a test for a GPU, in two processes; what a file makes once, one of them makes."""
    files = [str(path) for path in Path("tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    return ["-n", "2", "--dist", "loadscope", *sorted(files)]


# -- the same file as a plugin of pytest


def pytest_sessionfinish(session, exitstatus) -> None:  # type: ignore[no-untyped-def]
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if missing_passes(reporter) and not exitstatus:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter) -> None:  # type: ignore[no-untyped-def]
    if text := missing_passes(terminalreporter):
        terminalreporter.write_line(text, red=True)


def missing_passes(reporter) -> str | None:  # type: ignore[no-untyped-def]
    least = os.environ.get(COUNTED)
    if reporter is None or least is None:  # a worker of pytest-xdist, or a part of the tests
        return None
    passed = len(reporter.stats.get("passed", ()))
    return f"{passed} tests passed on the emulated device, at least {least} have to" if passed < int(least) else None


if __name__ == "__main__":
    main(sys.argv[1:])
