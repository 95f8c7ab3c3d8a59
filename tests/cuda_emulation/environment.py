"""Makes the environment of `make gpu-emulated`: torch's CUDA build and what the tests marked gpu need.

environment.py FOLDER [VERSION OF TORCH]: without a version, that of requirements.txt. A former environment stays in
its place where this one fails. The status is 3 on a machine that cannot have one, and the last line says why, after
`NOT RUN:`. Whatever else fails is a failure. So is a package index that is not reached: pip's words for it are those
for a version that does not exist, and the tests would be left out without anybody missing them.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from locked import locked

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NEEDED_BYTES = 8 * 10**9  # 6 GB installed, the rest for pip's files on the way
CANNOT_BE_MADE = 3
STAMP = ".installed"  # of an environment that is whole; the Makefile looks at it too
TORCH = re.compile(r"^torch===(\S+)", re.MULTILINE)


def reason_against(folder: Path) -> str | None:
    """Why this machine cannot have torch's CUDA build."""
    system = (platform.system(), platform.machine())
    if system != ("Linux", "x86_64"):
        return f"torch's CUDA build with the runtime apart is for x86-64 Linux, this is {' '.join(system)}"
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < NEEDED_BYTES:
        text = f"the environment needs {NEEDED_BYTES / 1e9:.0f} GB on the disk, {free_bytes / 1e9:.1f} GB are free"
        return f"{text} beside the former one in {folder}" if folder.exists() else text
    return None


def require_compiler() -> None:
    if missing := [tool for tool in ("gcc", "g++", "nm") if shutil.which(tool) is None]:
        raise SystemExit(f"the emulated device needs a compiler, {', '.join(missing)} is missing")


def install(folder: Path, version: str | None) -> None:
    """Installs with the versions of constraints.txt but for torch's. Raises CalledProcessError where pip fails."""
    venv.create(folder, with_pip=True)
    options = []
    if sys.version_info >= (3, 11):  # as in the Makefile
        lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        constraints = folder / "constraints.txt"
        constraints.write_text("".join(line for line in lines if not line.startswith("torch==")))
        options = ["-c", constraints]
    requirements = folder / "requirements.txt"
    text = (HERE / "requirements.txt").read_text()
    requirements.write_text(TORCH.sub(f"torch==={version}", text) if version else text)
    wanted = ["-r", requirements, "-e", f"{ROOT}[hf]"]
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-qq", *options, *wanted], check=True)


def replace(folder: Path, version: str | None) -> None:
    """Installs in place of a former environment, which stands aside until pip has succeeded. The new one is made where
    it stays: commands of an environment name its folder."""
    former = folder.with_name(f"{folder.name}-former")
    if (folder / STAMP).exists():
        shutil.rmtree(former, ignore_errors=True)
        folder.rename(former)
    else:  # there is none, or one whose making was cut off
        shutil.rmtree(folder, ignore_errors=True)
    try:
        install(folder, version)
        (folder / STAMP).touch()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if former.exists():
            former.rename(folder)
        raise
    shutil.rmtree(former, ignore_errors=True)


def main(folder: Path, version: str | None = None) -> int:
    if reason := reason_against(folder):
        print(f"NOT RUN: {reason}")
        return CANNOT_BE_MADE
    require_compiler()
    stamp = folder / STAMP
    before = stamp.stat().st_mtime_ns if stamp.exists() else None
    with locked(folder.with_name(f"{folder.name}.lock")):
        if stamp.exists() and stamp.stat().st_mtime_ns != before:
            return 0  # another process has made it meanwhile
        try:
            replace(folder, version)
        except subprocess.CalledProcessError as error:
            print(f"pip could not install {folder}, status {error.returncode}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
