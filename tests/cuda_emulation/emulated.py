"""Runs a command with the emulated device: `.venv-cuda/bin/python tests/cuda_emulation/emulated.py COMMAND...`

The command's `python` is this interpreter. Variables named EMULATED_CUDA_... say what the device is like: they are
listed in runtime/settings.h.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import build

ROOT = Path(__file__).resolve().parents[2]


def environment(outer: Mapping[str, str]) -> dict[str, str]:
    folders = [str(build.HERE / "autoload"), str(ROOT), *filter(None, [outer.get("PYTHONPATH")])]
    return {
        "OMP_NUM_THREADS": "1",
        **outer,
        "LD_PRELOAD": ":".join(str(build.BUILT / name) for name in build.LIBRARIES),
        "EMULATED_CUDA_OPERATORS": str(build.BUILT / build.OPERATORS),
        "PYTHONPATH": os.pathsep.join(folders),
        "PATH": os.pathsep.join(
            [str(Path(sys.executable).parent), str(build.HERE / "commands"), outer.get("PATH", os.defpath)]
        ),
    }


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    build.ensure_built()
    os.execvpe(sys.argv[1], sys.argv[1:], environment(os.environ))
