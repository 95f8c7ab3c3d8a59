"""The packages that a machine with a GPU has for the `make gpu-...` commands. The commands use the machine's own
interpreter and install nothing.

python benchmarks/preflight.py         prints the packages that are there and those that are missing, with the effect
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Sequence

from _help import only_help

__all__ = ["NO_DEVICE", "NO_PACKAGE", "cannot_run", "missing", "no_cuda", "report", "slug"]

# Exit statuses of the scripts, beside 0 and 1 for their results.
NO_DEVICE, NO_PACKAGE = 3, 4

# Package -> the parts that need it.
NEEDED_FOR = {
    "torch": "anything",
    "numpy": "planning",
    "transformers": "building GPT-2, Llama and ViT: gpu-record and gpu-peers",
    "safetensors": "weights and checkpoints",
    "pytest": "gpu-test",
    "hypothesis": "tests that use it",
    "peft": "tests of adapters",
    "scipy": "the check that every plan passes before it runs",
    "highspy": "lower bounds and certificates",
    "simpy": "simulations of ranks that differ (one rank, and equal ranks, are simulated without it)",
    "pyarrow": "trace files (Parquet)",
    "pandas": "tables as frames",
    "rich": "tables on the terminal",
    "deepspeed": "the DeepSpeed contenders of gpu-peers",
}


def missing(names: Sequence[str] | None = None) -> dict[str, str]:
    """Returns package -> the parts that need it, for packages that this interpreter cannot import."""
    return {name: NEEDED_FOR[name] for name in names or NEEDED_FOR if importlib.util.find_spec(name) is None}


def no_cuda() -> str | None:
    """Returns why nothing can run on a GPU here, in one line; None if there is a GPU."""
    if importlib.util.find_spec("torch") is None:
        return f"torch cannot be imported by {sys.executable}"
    import torch

    if not torch.cuda.is_available():
        return f"no CUDA device (torch {torch.__version__} finds none)"
    return None


def report() -> str:
    """Returns the packages that are there, with versions, and those that are missing."""
    gone = missing()
    there = [f"{name} {_version(name)}" for name in NEEDED_FOR if name not in gone]
    lines = [f"python {sys.version.split()[0]} ({sys.executable})", "there: " + ", ".join(there)]
    return "\n".join([*lines, *(f"missing: {name}, needed for {what}" for name, what in gone.items())])


def slug(text: str) -> str:
    """Returns a name for files: "NVIDIA H100 80GB" -> "nvidia-h100-80gb"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"


def cannot_run(name: str, packages: Sequence[str], *, device: bool = True) -> int | None:
    """Returns the exit status of a script that cannot run here, after one printed line; None if it can."""
    if device and (why := no_cuda()) is not None:
        print(f"{name}: skipped: {why}")
        return NO_DEVICE
    if gone := missing(packages):
        print(f"{name}: skipped: {', '.join(gone)} cannot be imported by {sys.executable}")
        return NO_PACKAGE
    return None


if __name__ == "__main__":
    only_help(__doc__)
    print(report())
    print(f"CUDA: {no_cuda() or 'there'}")
