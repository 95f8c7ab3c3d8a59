"""Parts written with few layers beside the same parts written whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry, model_entry
from pstar_sim.cost import Computing
from pstar_sim.planner.stages_machines import machine_of_stage
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.pipeline import INTERLEAVED, cells_of, in_schedule, peak_in_schedule
from pstar_sim.workload.presets import shared, stage_of, taped_stage, workload_of
from pstar_sim.workload.presets.shared import Stage
from pstar_sim.workload.presets.shortened import Shortened, shortened
from pstar_sim.workload.tape import Tape
from pstar_sim.workload.workload import Moment, Workload

LAYERS = 17
JOBS: dict[str, dict[str, Any]] = {
    "gpt2": {"optimizer": "adamw-8bit"},
    "llama-3.2-1b": {"recompute": "every-2"},
    "gemma-3-1b": {"checkpointing": False},  # every sixth layer sees all tokens
    "bert-base": {"autocast": "bf16", "recompute": "every-3"},
    "vit-b-16": {"optimizer": "adafactor"},
    "gpt-oss-20b": {"recompute": "every-2"},
    "deepseek-v3": {"optimizer": "muon"},  # the first layers have no experts
    "qwen3-0.6b": {"lora": "r=4", "base": "nf4"},
    "qwen3-1.7b": {"lora": r"r=4,targets=.*\.layers\.(9|1[0-2])\..*q_proj"},
}


def _figures(moments: Sequence[Moment]) -> list[Moment]:
    """Without the module, whose layer may be another."""
    return [replace(m, name=m.name.partition(":")[0], module="") for m in moments]


def _both(model: str, machine: Machine, **stage: Any) -> tuple[Shortened, Workload, Any]:
    entry, axes = _job(model)
    part = Stage(**stage)
    return shortened(entry, part, **axes), *stage_of(entry, part, **axes)


def _job(model: str) -> tuple[ModelEntry, dict[str, Any]]:
    entry = structs.replace(model_entry(model), layers=LAYERS)
    sequence = entry.max_seq if entry.family == "vit" else 64
    return entry, {
        "batch": 2,
        "sequence": sequence,
        "dtype": "fp32" if "autocast" in JOBS[model] else "bf16",
    } | JOBS[model]


SPLIT = {"tensor": 2, "sequence": True}


@pytest.mark.parametrize(
    ("model", "part"),
    [(m, part) for m in JOBS for part in ({}, {"first": False}, {"last": False})]
    + [("gpt2", SPLIT), ("gpt-oss-20b", SPLIT | {"experts": 2}), ("llama-3.2-1b", {"context": 2})],
)
def test_a_tape_that_repeats_layers_is_the_one_that_writes_them_all(
    model: str, part: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(layers=range(3, LAYERS), **part)
    entry, axes = _job(model)
    made, tape = taped_stage(entry, stage, **axes)
    monkeypatch.setattr(shared, "period_of", lambda kinds: (0, 0))
    monkeypatch.delattr(Tape, "repeat")
    whole, other = taped_stage(entry, stage, **axes)
    assert (made.tensors, made.moments, made.uses) == (whole.tensors, whole.moments, whole.uses)
    assert (tape.crossings, tape.summed) == (other.crossings, other.summed)


def test_layers_are_repeated_but_where_some_have_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, axes = _job("qwen3-0.6b")
    some = r"r=4,targets=.*[02468]\.self_attn\.[qv]_proj"
    tensors = workload_of(entry, **axes | {"lora": some}).tensors
    assert {int(t.name.split(".")[2]) % 2 for t in tensors if "lora_A" in t.name} == {0}
    monkeypatch.delattr(Tape, "repeat")
    workload_of(entry, **axes | {"lora": some})
    with pytest.raises(AttributeError, match="repeat"):
        workload_of(entry, **axes)


class TestFewLayersStandForAll:
    @pytest.mark.parametrize("model", JOBS)
    @pytest.mark.parametrize(("first", "last"), [(True, True), (True, False), (False, False), (False, True)])
    def test_moments_bytes_and_seconds_are_those_of_the_whole_part(self, model: str, first: bool, last: bool) -> None:
        layers = range(0 if first else 5, LAYERS if last else 16)
        machine = load_machine("h100-80x8")
        few, whole, crossings = _both(model, machine, layers=layers, first=first, last=last)
        assert _figures(few.moments) == _figures(whole.moments)
        assert few.crossings == crossings
        assert few.model_bytes == whole.weights_bytes + whole.states_bytes
        seconds = few.each(Computing(few.written.workload, machine).moments_s[:-1])
        assert tuple(seconds) == Computing(whole, machine).moments_s[:-1]
        written = len(few.written.workload.moments)
        all_written = "autocast" in JOBS[model] or "targets" in JOBS[model].get("lora", "")
        assert written == len(whole.moments) if all_written else written < len(whole.moments)

    def test_ranks_that_split_layers_sum_as_much_at_the_end(self) -> None:
        spread = Parallelism.parse("tp=4,sp,dp=2,ep=2")
        machine = machine_of_stage(load_machine("h100-80x8"), spread, 0)
        few, whole, _ = _both("gpt-oss-20b", machine, layers=range(LAYERS), tensor=4, sequence=True, experts=2)
        assert few.more and _figures(few.moments) == _figures(whole.moments)
        cost = Computing(few.written.workload, machine)
        step_s = cost.group_s(few.moments[-1].collectives)
        assert (*few.each(cost.moments_s[:-1]), step_s) == Computing(whole, machine).moments_s
        assert step_s > 0

    @pytest.mark.parametrize(("schedule", "parts"), [("1f1b", 1), (INTERLEAVED, 2)])
    def test_a_schedule_takes_as_many_bytes(self, schedule: str, parts: int) -> None:
        machine = load_machine("h100-80x8")
        each = [
            _both("llama-3.2-1b", machine, layers=range(8 * n, 8 * n + 8), first=n == 0, last=False)
            for n in range(parts)
        ]
        cells = cells_of(schedule, 2, 4, parts)
        whole = in_schedule([(one, crossings) for _, one, crossings in each], cells, 0)
        few = [(one.moments, one.crossings) for one, _, _ in each]
        assert peak_in_schedule(few, cells, 0) == whole.peak_non_model_bytes
