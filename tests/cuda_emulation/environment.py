"""Makes the environment of `make gpu-emulated`: torch's CUDA build and what the tests marked gpu need.

environment.py FOLDER: where it cannot be made here, the last line says why, after `NOT RUN:`, and the status is 3.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NEEDED_BYTES = 8 * 10**9  # 6 GB installed, the rest for pip's files on the way
CANNOT_BE_MADE = 3


def reason_against(folder: Path) -> str | None:
    """Why torch's CUDA build cannot be installed here."""
    system = (platform.system(), platform.machine())
    if system != ("Linux", "x86_64"):
        return f"torch's CUDA build with the runtime apart is for x86-64 Linux, this is {' '.join(system)}"
    missing = [tool for tool in ("gcc", "g++", "nm") if shutil.which(tool) is None]
    if missing:
        return f"a compiler is needed, {', '.join(missing)} is missing"
    free_bytes = shutil.disk_usage(folder.parent).free + taken_bytes(folder)
    if free_bytes < NEEDED_BYTES:
        return f"the environment needs {NEEDED_BYTES / 1e9:.0f} GB on the disk, {free_bytes / 1e9:.1f} GB are free"
    return None


def taken_bytes(folder: Path) -> int:
    """Bytes of an environment that is there, which is made anew."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0


def install(folder: Path) -> str | None:
    """Installs with the versions of constraints.txt but for torch's; returns why pip could not."""
    venv.create(folder, with_pip=True, clear=True)
    options = []
    if sys.version_info >= (3, 11):  # as in the Makefile
        lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        constraints = folder / "constraints.txt"
        constraints.write_text("".join(line for line in lines if not line.startswith("torch==")))
        options = ["-c", constraints]
    wanted = ["-r", HERE / "requirements.txt", "-e", f"{ROOT}[hf]"]
    done = subprocess.run(
        [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *options, *wanted],
        stderr=subprocess.PIPE,
        text=True,
    )
    if not done.returncode:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    return f"pip: {(errors or ['status ' + str(done.returncode)])[-1].removeprefix('ERROR: ')}"


def main(folder: Path) -> int:
    reason = reason_against(folder) or install(folder)
    if reason:
        print(f"NOT RUN: {reason}")
        shutil.rmtree(folder, ignore_errors=True)
    return CANNOT_BE_MADE if reason else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).resolve()))
