"""The table of mutations names what is in the sources and in the tests; one that does not is refused."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def mutations() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutations", Path(__file__).with_name("mutations.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutations"] = module
    spec.loader.exec_module(module)
    return module


def test_each_text_is_in_its_source_once_and_each_test_is_there(mutations: ModuleType) -> None:
    for name, mutation in mutations.MUTATIONS.items():
        assert (mutations.ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.text) == 1, name
        path, *_, test = mutation.test.split("::")
        assert f"def {test}(" in (mutations.ROOT / path).read_text(encoding="utf-8"), name


def test_a_text_that_is_not_in_the_source_is_refused(mutations: ModuleType, tmp_path: Path) -> None:
    mutation = replace(next(iter(mutations.MUTATIONS.values())), file="source.py", text="wait()\n")
    (tmp_path / "source.py").write_text("wait()\nwork()\n")
    mutation.apply(tmp_path)
    assert (tmp_path / "source.py").read_text() == f"{mutation.instead}work()\n"
    (tmp_path / "source.py").write_text("work()\n")
    with pytest.raises(SystemExit, match=r"source\.py has this text 0 times, not once"):
        mutation.apply(tmp_path)
