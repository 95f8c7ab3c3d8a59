"""The executor tests' helpers (tests/executor/conftest.py) for the tests that hold backends together."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "executor_test_kit", Path(__file__).parents[1] / "executor" / "conftest.py"
)
assert _SPEC is not None and _SPEC.loader is not None
_KIT = importlib.util.module_from_spec(_SPEC)
sys.modules["executor_test_kit"] = _KIT
_SPEC.loader.exec_module(_KIT)

kit = _KIT.kit
streaming = _KIT.streaming
start = _KIT.start


@pytest.fixture
def bounds() -> ModuleType:
    """bounds.py: a plain twin that updates where the plan does, and how far the two may be apart."""
    spec = importlib.util.spec_from_file_location("bounds_on_a_device", Path(__file__).with_name("bounds.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
