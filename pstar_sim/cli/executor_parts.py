"""Parts of the executor, imported when needed."""

from __future__ import annotations

import importlib
from types import ModuleType

from pstar_sim.errors import ModelError


def executor_module(name: str) -> ModuleType:
    """Raises ModelError without torch or transformers, naming the extra."""
    try:
        return importlib.import_module(f"executor.{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in ("torch", "transformers"):
            raise ModelError(
                f"this command needs {error.name}; install it with `pip install -e '.[executor,hf]'` in the checkout"
            ) from None
        raise
