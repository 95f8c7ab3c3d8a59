"""Environments for packages that pin versions of other packages or have to be built: each is made once, beside the
project's own environment, whose packages (torch above all) it sees.

DeepSpeed builds its CPU Adam from C++ on first use, into a folder of its environment. A build that is killed midway
leaves a lock on which every later run would wait for ever. No other program builds there, so old locks are removed.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["AXOLOTL", "DEEPSPEED", "TITAN", "VenvError", "environment_of", "make_environment", "make_venv"]

DEEPSPEED = "deepspeed==0.19.8"
AXOLOTL = ("axolotl==0.19.0",)
TITAN = ("torchtitan==0.2.2", "megatron-core==0.16.1", "triton==3.9.0")
"""torchtitan imports triton without requiring it; torch for a CPU comes without triton."""
_BUILD_TIMEOUT_S = 900
_BUILD = """
from deepspeed.accelerator import get_accelerator
for name in ("CPUAdamBuilder", "ShareMemCommBuilder"):
    get_accelerator().create_op_builder(name).load(verbose=False)
"""


class VenvError(Exception):
    """The reason why there is no such environment here."""


def environment_of(folder: Path) -> dict[str, str]:
    """Returns the environment variables for a process of the environment: a CPU as accelerator, and a folder of its own
    for builds."""
    path = os.pathsep.join((str(folder / "bin"), os.environ.get("PATH", "")))
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "PATH": path}


def make_environment(
    folder: Path, packages: Sequence[str], say: Callable[[str], object], *, constraints: Path | None = None
) -> str:
    """Returns the interpreter of an environment in `folder` that has these packages, with the versions that they pin,
    and all other packages of the running interpreter. Raises VenvError where pip fails."""
    folder = folder.absolute()
    interpreter, stamp = str(folder / "bin" / "python"), folder / ".installed"
    torch = importlib.metadata.version("torch")
    wanted = f"{' '.join(packages)} torch {torch} {sys.version}"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return interpreter
    say(f"making {folder} for {', '.join(packages)} (once, some minutes)")
    _run([sys.executable, "-m", "venv", str(folder)], "making the environment", {})
    seen = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages" / "_project.pth"
    seen.write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    held = [] if constraints is None else ["-c", str(constraints)]
    words = ["-m", "pip", "install", "--quiet", *held, *packages, f"torch=={torch.partition('+')[0]}"]
    _run([interpreter, *words], f"pip install {' '.join(packages)}", {})
    stamp.write_text(wanted, encoding="utf-8")
    return interpreter


def make_venv(folder: Path, constraints: Path, say: Callable[[str], object]) -> str:
    """Returns the interpreter of an environment in `folder` that has DeepSpeed with its CPU Adam built, and all
    packages of the running interpreter. Raises VenvError where pip or the compiler fails."""
    folder = folder.absolute()
    interpreter = make_environment(folder, (DEEPSPEED,), say, constraints=constraints)
    environment = environment_of(folder)
    for lock in (folder / "extensions").rglob("lock"):
        lock.unlink()
    _run([interpreter, "-c", _BUILD], "building DeepSpeed's operators (needs a C++ compiler)", environment)
    return interpreter


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
