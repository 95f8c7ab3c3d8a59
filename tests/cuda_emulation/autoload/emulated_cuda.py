"""Loads the operators of the emulated device: torch calls `install` when it has been imported (its entry point for
backends, `torch.backends`)."""

from __future__ import annotations

import ctypes
import os


def install() -> None:
    """Does nothing in a process that was not started with the emulated runtime."""
    library = os.environ.get("EMULATED_CUDA_OPERATORS")
    if library and "libcudart" in os.environ.get("LD_PRELOAD", ""):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL).emulated_cuda_install()
