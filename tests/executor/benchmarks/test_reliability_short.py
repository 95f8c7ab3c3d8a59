"""Short versions of benchmarks/reliability.py: the same code, fewer of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import _interleavings  # type: ignore[import-not-found]
    import _leaks  # type: ignore[import-not-found]
    import _mutations  # type: ignore[import-not-found]
finally:
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    folder, threads, path = Path.cwd(), torch.get_num_threads(), list(sys.path)
    yield
    os.chdir(folder)
    torch.set_num_threads(threads)
    sys.path[:] = path


@pytest.mark.slow
def test_mutated_files_are_refused_in_one_line_or_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    from executor.measuring import rates

    monkeypatch.setattr(rates, "measure_virtual_machine", rates.measure_virtual_machine)
    report = _mutations.run_mutations(_mutations.Bench(tmp_path), 80 if whole else 20, first_seed=40)
    assert not report.misses, "\n".join(map(str, report.misses))
    outcomes = {outcome for (_, outcome), count in report.outcomes.items() if count}
    assert {"refused", "named", "right"} <= outcomes


@pytest.mark.slow
def test_interleavings_with_delays_in_every_queue_are_bit_identical(whole: bool) -> None:
    report = _interleavings.run_interleavings(count := 12 if whole else 6)
    assert not report.misses, report.misses
    assert set(report.runs.values()) == {count}


def test_a_slope_of_known_growth() -> None:
    """10 bytes per step and a saw tooth of 100: 25 blocks of 40 steps, whose means differ by 400 exactly."""
    readings = [10.0 * n + 100.0 * (n % 2) for n in range(1000)]
    slope = _leaks.slope_of(readings)
    assert slope.per_step == pytest.approx(10.0) and slope.low == pytest.approx(10.0)
    assert slope.passes  # below the bound
    assert not _leaks.slope_of([1000.0 * n for n in range(1000)]).passes
    assert _leaks.slope_of([7.0] * 100).passes


@pytest.mark.slow
def test_memory_does_not_grow() -> None:
    """Payloads are exact. Resident memory of a short run says little, as the system may join two megabytes of small
    pages to a large one at any time; the long run is in the benchmark."""
    found: dict[str, Any] = _leaks.run_leaks(150, warm_up=60)
    assert found["deviations"] == 0 and found["bytes_left_after_close"] == 0
    for name in ("accelerator", "host payloads"):
        assert found[f"{name} 95% interval"] == [0.0, 0.0]
    assert found["resident bytes/step"] < 60_000
