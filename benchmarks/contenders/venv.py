"""DeepSpeed's environment on a CPU: made once, beside the project's own environment, whose packages it sees.

DeepSpeed builds its CPU Adam from C++ on first use, into a folder of this environment. A build that is killed midway
leaves a lock on which every later run would wait for ever. No other program builds there, so old locks are removed.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["DEEPSPEED", "VenvError", "environment_of", "make_venv"]

DEEPSPEED = "deepspeed==0.19.8"
_BUILD_TIMEOUT_S = 900
_BUILD = """
from deepspeed.accelerator import get_accelerator
for name in ("CPUAdamBuilder", "ShareMemCommBuilder"):
    get_accelerator().create_op_builder(name).load(verbose=False)
"""


class VenvError(Exception):
    """The reason why there is no DeepSpeed here."""


def environment_of(folder: Path) -> dict[str, str]:
    """Returns the environment variables for a process of the environment: a CPU as accelerator, and a folder of its own
    for builds."""
    path = os.pathsep.join((str(folder / "bin"), os.environ.get("PATH", "")))
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "PATH": path}


def make_venv(folder: Path, constraints: Path, say: Callable[[str], object]) -> str:
    """Returns the interpreter of an environment in `folder` that has DeepSpeed with its CPU Adam built, and all
    packages of the running interpreter. Raises VenvError where pip or the compiler fails."""
    folder = folder.absolute()
    interpreter = folder / "bin" / "python"
    stamp = folder / ".ready"
    wanted = f"{DEEPSPEED} torch {importlib.metadata.version('torch')} {sys.version}"
    if not (stamp.exists() and stamp.read_text(encoding="utf-8") == wanted):
        say(f"making {folder} for {DEEPSPEED} (once, some minutes: its CPU Adam is built from C++)")
        _run([sys.executable, "-m", "venv", str(folder)], "making the environment", {})
        packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (packages / "_project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
        install = [str(interpreter), "-m", "pip", "install", "--quiet", "-c", str(constraints), DEEPSPEED]
        _run(install, f"pip install {DEEPSPEED}", {})
    environment = environment_of(folder)
    for lock in (folder / "extensions").rglob("lock"):
        lock.unlink()
    _run([str(interpreter), "-c", _BUILD], "building DeepSpeed's operators (needs a C++ compiler)", environment)
    stamp.write_text(wanted, encoding="utf-8")
    return str(interpreter)


def _run(command: list[str], what: str, environment: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT_S,
            env={**os.environ, **environment},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise VenvError(f"{what}: not done after {_BUILD_TIMEOUT_S} s") from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise VenvError(f"{what} failed: {words[-1][:300] if words else 'it said nothing'}")
