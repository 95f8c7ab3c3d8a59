"""The public names: they exist, they are all that is listed, and listing them costs nothing."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import pstar_sim as ps


def test_every_public_name_exists_and_is_where_it_says() -> None:
    for name in ps.__all__:
        assert getattr(ps, name) is not None, name
    assert list(ps.__all__) == sorted(ps.__all__)
    assert set(ps.__all__) <= set(dir(ps))


def test_the_names_the_readme_promises_are_public() -> None:
    promised = {"load_trace", "preset", "machine", "compare", "Settings", "load_plan", "explain", "plot_tide"}
    assert promised <= set(ps.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ps.nonsense  # type: ignore[attr-defined]


def test_importing_pstar_sim_imports_nothing_heavy() -> None:
    code = (
        "import sys, pstar_sim\n"
        "heavy = {'torch', 'matplotlib', 'pandas', 'simpy', 'transformers', 'numpy', 'pyarrow', 'scipy', 'highspy'}\n"
        "heavy.add('rich')\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_planning_imports_neither_torch_nor_matplotlib_nor_pandas() -> None:
    code = (
        "import sys, pstar_sim as ps\n"
        "ps.compare, ps.preset, ps.machine, ps.load_plan\n"
        "print(sorted({'torch', 'matplotlib', 'pandas', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_answer_is_shown_by_what_registered_for_it() -> None:
    """The front door names answers by their class, and renderers that take one first."""
    for answer, forms in ps._RENDERERS.items():
        assert ps._look_up(_CLASSES[answer]).__name__ == answer
        for where in forms.values():
            assert next(iter(inspect.signature(ps._look_up(where)).parameters))
    assert set(_CLASSES) == set(ps._RENDERERS)


_CLASSES = {
    "Ablation": "planner.ablate:Ablation",
    "Cheapest": "planner.cheapest:Cheapest",
    "Comparison": "planner.compare:Comparison",
    "Fits": "planner.fits:Fits",
    "Limits": "planner.limits:Limits",
    "Machine": "catalog.machine:Machine",
    "Plan": "core.plan:Plan",
    "Planned": "planner.compare:Planned",
    "Sensitivity": "planner.sensitivity:Sensitivity",
    "Timeline": "core.timeline:Timeline",
    "Workload": "workload.workload:Workload",
}
