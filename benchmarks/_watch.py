"""A pytest plugin for runs on a machine that may go away, or hang: `-p _watch`, settings in the environment variable
PSTAR_WATCH as JSON: {"partial", "limit_s", "left_s", "first", "done"}.

Every test's beginning and end is a line of the file `partial` as it happens. If a test takes longer than limit_s, the
stacks of all threads are written and the process is ended. A thread of faulthandler's own does so without the
interpreter, because the main thread may hang in a backward. After left_s no further test begins. Tests with one of the
words of `first` in their names come first; those in `done` are left out.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_TEXT = 6000  # characters kept of a failure: its end names the error


class Watch:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.partial = Path(settings["partial"])
        self.limit_s = float(settings["limit_s"])
        self.ends_s = time.monotonic() + float(settings["left_s"])
        self.first: list[str] = settings["first"]
        self.done = frozenset(settings["done"])
        # While a test runs, pytest has a file in place of standard error.
        self._errors = os.dup(sys.stderr.fileno())
        self._outcome: dict[str, dict[str, Any]] = {}

    def write(self, row: dict[str, Any]) -> None:
        with self.partial.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @pytest.hookimpl(trylast=True)  # tests that were not requested have been removed
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left = [item for item in items if item.nodeid not in self.done]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.done])
        turn = len(self.first)
        items[:] = sorted(
            left, key=lambda item: next((i for i, word in enumerate(self.first) if word in item.nodeid), turn)
        )
        self.write({"collected": len(items) + len(self.done), "done_before": len(self.done)})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write({"test": report.nodeid, "outcome": "error", "text": str(report.longrepr)[-_TEXT:]})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.write({"started": item.nodeid, "at_s": time.time()})
        begun_s = time.monotonic()
        self._outcome[item.nodeid] = {"outcome": "passed"}
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            took_s = round(time.monotonic() - begun_s, 2)
            self.write({"test": item.nodeid, "took_s": took_s, **self._outcome.pop(item.nodeid)})
            if time.monotonic() > self.ends_s:
                item.session.shouldstop = "no time left"

    def _arm(self, item: pytest.Item) -> None:
        """Set the time limit before each phase, because pytest's own plugin removes it when a test fails. A test may
        name its limit."""
        marker = item.get_closest_marker("timeout")
        limit_s = float(marker.args[0]) if marker is not None and marker.args else self.limit_s
        faulthandler.dump_traceback_later(limit_s, exit=True, file=self._errors)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._arm(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._arm(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._arm(item)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self._outcome.get(report.nodeid)
        if found is None or report.passed:
            return
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            found.update(outcome="skipped", text=reason[-_TEXT:])
        else:
            found.update(outcome="failed" if report.when == "call" else "error", text=report.longreprtext[-_TEXT:])

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, nodeid: str) -> None:
        self.write({"warned": f"{warning_message.category.__name__}: {warning_message.message}"[:500], "at": nodeid})


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("gpu", "slow", "timeout(seconds): ends the process"):
        config.addinivalue_line("markers", marker)
    config.pluginmanager.register(Watch(json.loads(os.environ["PSTAR_WATCH"])), "pstar-watch")
