"""Where a benchmark leaves its figures: benchmarks/results/NAME.json, with machine, versions and date inside."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from datetime import date
from pathlib import Path

__all__ = ["write_result"]


def write_result(name: str, figures: Mapping[str, object]) -> Path:
    """Write the figures and say where."""
    packages = ("torch", "transformers", "numpy", "simpy", "pstar-sim")
    content = {
        "date": date.today().isoformat(),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {p: importlib.metadata.version(p) for p in packages},
        **figures,
    }
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path
