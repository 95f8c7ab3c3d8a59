"""Files that the first edition wrote are read: one of each format but plans, kept as it came out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.run_file import load_run, load_timelines
from pstar_sim.core.timeline import load_timeline
from pstar_sim.errors import PstarError
from pstar_sim.testing import chain_workload
from pstar_sim.workload.trace import load_trace, save_trace

FILES = Path(__file__).parent / "first_edition"


def test_its_timeline_and_run_are_read_and_written_as_they_were(tmp_path: Path) -> None:
    timeline = load_timeline(FILES / "timeline.json")
    timeline.save(tmp_path / "timeline.json")
    assert (tmp_path / "timeline.json").read_text() == (FILES / "timeline.json").read_text()
    run = load_run(FILES / "run.json")
    run.save(tmp_path / "run.json")
    assert (tmp_path / "run.json").read_text() == (FILES / "run.json").read_text()
    assert run.predicted.spans == timeline.spans
    assert set(load_timelines(FILES / "run.json")) == {"predicted", "measured"}


def test_its_trace_is_read_and_holds_what_it_was_made_of(tmp_path: Path) -> None:
    found, made = load_trace(FILES / "trace.parquet"), chain_workload(2, 1024)
    assert (found.tensors, found.moments, found.uses) == (made.tensors, made.moments, made.uses)
    save_trace(found, tmp_path / "trace.parquet")
    assert load_trace(tmp_path / "trace.parquet").fingerprint == found.fingerprint == made.fingerprint


def test_its_machine_file_is_read() -> None:
    machine = load_machine(FILES / "machine.toml")
    assert machine.gpu_budget_bytes == 30 * 10**9
    assert machine.link.h2d_bytes_per_s == pytest.approx(12e9)
    assert machine.host.adam_params_per_s == pytest.approx(1.2e9)
    assert machine.calibrated and machine.confidence_by_input["DRAM"] == "datasheet"


@pytest.mark.parametrize("name", ["timeline.json", "run.json"])
def test_a_version_that_does_not_exist_yet_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    values = json.loads((FILES / name).read_text())
    (tmp_path / name).write_text(json.dumps({**values, "version": 2}))
    kind = name.removesuffix(".json")
    with pytest.raises(PstarError, match=rf"was written by a newer pstar-sim \({kind} version 2; this one reads 1\)$"):
        load_timelines(tmp_path / name)
