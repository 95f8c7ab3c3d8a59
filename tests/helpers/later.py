"""Packages that take long to import, imported by the first test that uses them: every worker of pytest-xdist collects
every file, and runs few."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

__all__ = ["Later"]


class Later:
    """Stands for a module. Where its package is not installed, the file that asks for it is skipped."""

    def __init__(self, module: str) -> None:
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"could not import '{package}'", allow_module_level=True)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks for such of everything in a file that it collects
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name)
