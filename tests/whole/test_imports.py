"""What importing costs: the package alone pulls in nothing heavy, and planning never pulls in torch."""

from __future__ import annotations

import os
import subprocess
import sys

HEAVY = ("torch", "matplotlib", "pandas", "simpy", "transformers", "scipy", "pyarrow", "numpy", "rich", "highspy")


def loaded(statement: str) -> set[str]:
    """Heavy modules loaded after the statement, in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def first_that_loads(names: set[str], modules: list[str]) -> str:
    """Of modules of the package, imported one after another into a fresh interpreter: the first after which one of the
    names is there, and which; "" for none."""
    code = (
        "import sys, importlib\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module('pstar_sim.' + module)\n"
        f"    if found := {names!r} & set(sys.modules):\n"
        "        sys.exit(f'{module} loads {found}')\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stderr


def test_the_package_is_light() -> None:
    assert loaded("import pstar_sim") == set()


def test_the_catalog_is_light() -> None:
    assert loaded("import pstar_sim; pstar_sim.machine('rtx4090', gpu_memory='8GB')") == set()


def test_these_are_light() -> None:
    modules = ["core.plan", "core.step", "catalog.loader", "cli"]
    assert not first_that_loads({"torch", "matplotlib", "pandas", "simpy"}, modules)


def test_planning_needs_neither_torch_nor_matplotlib() -> None:
    modules = ["cost", "sim.play", "policy.registry", "planner.compare", "planner.explain", "report.tables",
               "report.tide_picture", "workload.presets"]  # fmt: skip
    assert not first_that_loads({"torch", "matplotlib"}, modules)


def test_only_ranks_that_differ_need_simpy() -> None:
    """A machine without the package makes, proves and simulates plans of one rank and of equal ranks; where every rank
    is simulated by itself, the message names the package."""
    code = (
        "import sys; sys.modules['simpy'] = None\n"
        "import pstar_sim as ps\n"
        "from pstar_sim.errors import PstarError\n"
        "from pstar_sim.policy.registry import find_policy\n"
        "from pstar_sim.testing import chain_workload, check_policy\n"
        "print(check_policy(find_policy('tide'), examples=5))\n"
        "machine = ps.machine('v100-32x8')\n"
        "plan = find_policy('patrickstar')(chain_workload(16, 10**6), machine, ps.Settings(chunk_bytes=2 * 10**6))\n"
        "from pstar_sim.sim.play import play\n"
        "print('equal ranks:', play(plan).iteration_s > 0)\n"
        "try:\n"
        "    play(plan, every_rank=True)\n"
        "except PstarError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "every plan is correct" in done.stdout and "equal ranks: True" in done.stdout
    assert "needs the package simpy, which cannot be imported; pip install simpy" in done.stdout


def test_help_imports_next_to_nothing() -> None:
    """`pstar --help` answers at once: about 180 modules, most of them Python's own. numpy alone has more."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pstar_sim", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "100"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "compare" in done.stdout
    names = [line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert not {name.split(".")[0] for name in names} & set(HEAVY)
    assert 50 < len(names) < 300
