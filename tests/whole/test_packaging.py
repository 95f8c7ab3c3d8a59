"""What pyproject.toml promises is what is tested: versions, extras, and a clear word where torch is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from pstar_sim.python310 import toml_loads

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = toml_loads((ROOT / "pyproject.toml").read_text())["project"]
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]


def pythons() -> list[str]:
    """Of the classifiers."""
    found = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", one) for one in PROJECT["classifiers"])
    return [one[1] for one in found if one]


def test_continuous_integration_runs_every_python_and_torch_from_the_oldest_on() -> None:
    rows = JOBS["versions"]["strategy"]["matrix"]["include"]
    assert [row["python"] for row in rows] == pythons() == JOBS["package"]["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={pythons()[0]}"
    (oldest,) = (one.removeprefix("torch>=") for one in PROJECT["optional-dependencies"]["executor"] if "torch>" in one)
    assert rows[0]["torch"] == oldest and rows[-1]["torch"] == "newest"


def test_all_is_every_extra_but_the_tests() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    named = re.fullmatch(r"pstar-sim\[(.+)\]", everything)
    assert named is not None and {*named[1].split(",")} == {*extras} - {"all", "test"}


def test_without_torch_the_executor_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import executor"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: executor needs torch, which is not installed; "
        "`pip install -e '.[executor]'` in the checkout installs it"
    )
