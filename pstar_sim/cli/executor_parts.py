"""Parts of the executor, which need torch, imported when a command needs them."""

from __future__ import annotations

import importlib
from types import ModuleType

from pstar_sim.errors import ModelError

__all__ = ["executor_module"]


def executor_module(name: str) -> ModuleType:
    """Raises ModelError where torch or transformers is missing, naming the extra to install."""
    try:
        return importlib.import_module(f"executor.{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in ("torch", "transformers"):
            raise ModelError(
                f"this command needs {error.name}; install it with `pip install -e '.[executor,hf]'` in the checkout"
            ) from None
        raise
