"""Where a benchmark leaves its figures: NAME.json in benchmarks/results or another folder, with machine, versions and
date inside."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from pstar_sim.files import write_atomically

__all__ = ["RESULTS", "write_result"]

RESULTS = Path(__file__).resolve().parent / "results"


def write_result(name: str, figures: Mapping[str, object], *, folder: Path | None = None) -> Path:
    """Write the figures and say where."""
    packages = ("torch", "transformers", "numpy", "simpy", "pstar-sim")
    content = {
        "date": date.today().isoformat(),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {p: version for p in packages if (version := _version(p)) is not None},
        **figures,
    }
    path = (folder or RESULTS) / f"{name}.json"
    write_atomically(path, json.dumps(content, indent=1) + "\n")
    return path


def _version(package: str) -> str | None:
    """None where it is not installed: a machine with a GPU may have the source tree and torch only."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
