"""A plan of two chunks, small enough to be worked out by hand, that the tests of core/ share.

Two layers of 1,024 bf16 parameters, a chunk each (2,048 bytes). Moments: 0 FWD layer 0, 1 FWD layer 1, 2 BWD layer 1,
3 BWD layer 0, 4 step. The tide peaks at 10, 30, 40, 20, 10 bytes.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zygote

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Resident, Settings, steps_from_text
from pstar_sim.core.step import Place
from pstar_sim.testing import chain_workload, round_machine

if importlib.util.find_spec("hypothesis") is not None:  # a machine with a GPU may be without
    from hypothesis import HealthCheck, settings

    # How long an example takes says how busy the machine is. The same examples in every run: what is found is mended by
    # who changed something, not by who happens to look.
    settings.register_profile(
        "pstar",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    settings.load_profile("pstar")

    # Hypothesis also draws numbers that stand in the source of the modules that happen to be loaded: with those the
    # examples would be others after any change of the code, and in every order of the tests.
    from hypothesis.internal.conjecture import providers

    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants

# As `make test` says it, before torch is imported: sums of several threads have other last bits, so what equals plain
# torch to the bit would hang on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

NO_SIMPY = importlib.util.find_spec("simpy") is None
FORKING: pytest.StashKey[str | None] = pytest.StashKey()
WANTED_SIMPY: pytest.StashKey[list[BaseException]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "of pytest-timeout, which is not installed: tests have no time limit")
    parser.addoption(
        "--streams",
        action="store_true",
        help="where a test of the executor opens the virtual accelerator, it gets the one with asynchronous streams, "
        "each with random delays; tests that bring queues or count threads of their own are not made for it",
    )
    parser.addoption(
        "--whole",
        action="store_true",
        help="all steps, seeds and instances, where a test runs fewer of them otherwise (its docstring says so)",
    )
    parser.addoption(
        "--forked",
        action="store_true",
        help="workers of pytest-xdist are forked from the process that the programs of tests are forked from",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where nobody has drawn with matplotlib yet, it looks for the machine's fonts: here once, because a process that
    takes longer than five seconds for it says so on stderr, which tests read."""
    cache = os.environ.get("MPLCONFIGDIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "matplotlib"
    known = any(Path(cache).expanduser().glob("fontlist-*.json"))
    if not known and not hasattr(session.config, "workerinput") and importlib.util.find_spec("matplotlib") is not None:
        importlib.import_module("matplotlib.font_manager")


def pytest_configure(config: pytest.Config) -> None:
    interpreter = getattr(config, "workerinput", {}).get("interpreter", sys.executable)
    config.stash[FORKING] = sys.executable if sys.executable != interpreter else None
    sys.executable = interpreter
    config.addinivalue_line("markers", "whole: runs with --whole alone")
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which is not installed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked whole stays out without --whole. Files with slow tests come first, the longest of all before them:
    workers of pytest-xdist take file after file (--dist loadfile --no-loadscope-reorder), and none is left with a long
    one at the end."""
    left_out = [] if config.getoption("--whole") else [item for item in items if item.get_closest_marker("whole")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
    length: dict[Path, int] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        length[item.path] = max(length.get(item.path, 0), ("slow" in marks) + ({"slow", "timeout"} <= marks))
    items.sort(key=lambda item: -length[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """With --forked, torch, transformers and the executor are imported once for all workers and their programs."""
    if config.getoption("--forked") and importlib.util.find_spec("transformers") is not None:
        block = contextlib.ExitStack()
        config.add_cleanup(block.close)
        forking = block.enter_context(zygote.running())
        for spec in specs:
            spec.python = forking


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["interpreter"] = sys.executable


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Modules and tests live as long as the process: the collector need not look at them while they are collected, nor
    at each `gc.collect()` of a test, nor a forked process when it ends. It looks seldom at what tests make, most of
    which ends without it."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A machine that runs plans need not simulate them: where simpy is missing, a test that asked for it is skipped."""
    report: Any = yield
    if not NO_SIMPY or not report.failed or call.excinfo is None:
        return report
    said = report.longreprtext + report.capstdout + report.capstderr  # a command says it there
    wanted = item.config.stash.setdefault(WANTED_SIMPY, [])
    if "simpy, which cannot be imported" in said:
        wanted.append(call.excinfo.value)
    if any(call.excinfo.value is error for error in wanted):  # a fixture that failed fails every test that uses it
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, "Skipped: needs simpy, which cannot be imported")
    return report


@pytest.fixture(autouse=True, scope="module")
def earlier_files_are_not_looked_at() -> None:
    """What the files before left alive, the collector of cycles visits no more: a test that calls it a hundred times
    took three times as long at the end as by itself."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have the width that they have in a pipe, whatever the terminal is that the tests run in (workers of
    pytest-xdist are told its width)."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session")
def python(pytestconfig: pytest.Config) -> Iterator[str]:
    """In place of `sys.executable`, with torch, transformers and the executor imported already (helpers/zygote.py)."""
    pytest.importorskip("transformers")
    forking = pytestconfig.stash[FORKING]
    with contextlib.nullcontext(forking) if forking is not None else zygote.running() as executable:
        yield executable


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """With --whole: nothing is thinned."""
    return bool(request.config.getoption("--whole"))


TEXT = """
0 h2d fetch chunk=0 list=param moment=0 bytes=2048 after=11@-1,14@-1
1 h2d fetch chunk=1 list=param moment=1 bytes=2048 after=13@-1
2 compute compute moment=0 after=0
3 compute drop chunk=0 list=param bytes=2048
4 compute compute moment=1 after=1
5 compute compute moment=2
6 h2d fetch chunk=0 list=param moment=3 bytes=2048 after=3
7 d2h writeback chunk=1 list=param moment=2 bytes=2048 after=5
8 d2h drop chunk=1 list=param bytes=2048
9 compute compute moment=3 after=6
10 d2h writeback chunk=0 list=param moment=3 bytes=2048 after=9
11 d2h drop chunk=0 list=param bytes=2048
12 compute compute moment=4
13 adam cpu_adam chunk=1 moment=2 bytes=28672 after=7,12
14 adam cpu_adam chunk=0 moment=3 bytes=28672 after=10,12
"""


@pytest.fixture
def toy_machine() -> Machine:
    """1 MB of gpu and host memory, round rates."""
    return round_machine(
        gpu_memory_bytes=1_000_000,
        host_memory_bytes=1_000_000,
        h2d_bytes_per_s=1e6,
        hbm_bytes_per_s=1e9,
        flops_per_s={"bf16": 1e9, "fp32": 1e9},
        dram_bytes_per_s=1e9,
        cores=2,
        adam_params_per_s=1e6,
        measured=False,
        name="toy",
    )


@pytest.fixture
def hand_plan(toy_machine: Machine) -> Callable[..., Plan]:
    """The plan; `text` and any field of Plan can be given instead of the right ones.

    Worst case on the gpu: both chunks and the highest tide, 2 * 2,048 + 40 = 4,136 bytes (moment 2, while chunk 0 is
    fetched again). Host: param, param32, momentum, variance of both: 2 * 1,024 * 14 = 28,672 bytes.
    """

    def make(text: str = TEXT, **fields: object) -> Plan:
        workload = chain_workload(2, 1024, tide_bytes=[10, 30, 40, 20, 10])
        lists = ("param", "param32", "momentum", "variance")
        values: dict[str, object] = {
            "policy": "by hand",
            "workload": workload,
            "machine": toy_machine,
            "settings": Settings(),
            "layout": build_layout(workload, chunk_bytes=2048),
            "modes": ("cpu", "cpu"),
            "initial": frozenset(Resident(c, name, Place.HOST) for c in (0, 1) for name in lists),
            "steps": steps_from_text(text),
            "gpu_budget_bytes": 4136,
            "host_budget_bytes": 28_672,
        }
        return Plan(**(values | fields))  # type: ignore[arg-type]

    return make


@pytest.fixture
def hand_text() -> str:
    """Its steps as text."""
    return TEXT.lstrip("\n")
