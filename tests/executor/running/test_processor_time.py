"""How much of the processor others had: counters worked out by hand, a real program beside, a system without them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from executor.running.processor import ProcessorTime, taken_by_others


def test_counters_by_hand(tmp_path: Path) -> None:
    """In 100 seconds of two cores this process worked 40 s and all programs 90 s: others had 50 of 200."""
    before = ProcessorTime(total_s=1000.0, busy_s=500.0, own_s=10.0)
    after = ProcessorTime(total_s=1200.0, busy_s=590.0, own_s=50.0)
    assert taken_by_others(before, after) == pytest.approx(0.25)
    assert taken_by_others(before, before) is None
    assert taken_by_others(None, after) is None
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 400 50 6 7 8 9 9\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    read = ProcessorTime.now(stat)
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert read is not None
    assert read.total_s == pytest.approx(621 * tick_s) and read.busy_s == pytest.approx(171 * tick_s)


@pytest.mark.parametrize("text", ["", "cpu  1 2 3\n", "cpu a b c d e f g h\n", "intr 5 5 5 5 5 5 5 5 5\n"])
def test_no_counters_is_unknown_and_not_zero(tmp_path: Path, text: str) -> None:
    stat = tmp_path / "stat"
    stat.write_text(text)
    assert ProcessorTime.now(stat) is None
    assert ProcessorTime.now(tmp_path / "absent") is None


@pytest.mark.skipif(ProcessorTime.now() is None, reason="this system has no /proc/stat")
def test_a_busy_program_beside_is_seen() -> None:
    """It runs while this process sleeps, so some of the processor's time is somebody else's."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = ProcessorTime.now()
        deadline = time.monotonic() + 30
        share: float | None = None
        while not share and time.monotonic() < deadline:
            time.sleep(0.3)
            share = taken_by_others(before, ProcessorTime.now())
    finally:
        busy.kill()
        busy.wait()
    assert share is not None and share > 0
