"""Axes of a job: what is declared once reaches flags, grids, presets, captures and files of other frameworks."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pytest
from typer.main import get_command

import pstar_sim as ps
from pstar_sim.cli.typer_app import app
from pstar_sim.errors import ModelError
from pstar_sim.planner.grid import AXES
from pstar_sim.planner.jobs import Job
from pstar_sim.validation.setups import Experiment
from pstar_sim.workload.axes import Axes, AxesGiven, all_axes
from pstar_sim.workload.presets import axes_of, variant


def flags_of(command: str) -> set[str]:
    return {str(parameter.name) for parameter in get_command(app).commands[command].params}  # type: ignore[attr-defined]


def test_signatures_name_the_axes_and_their_types() -> None:
    assert get_type_hints(AxesGiven) == get_type_hints(Axes)


@pytest.mark.parametrize("command", ["compare", "fits", "plan", "cheapest", "max-model", "max-batch", "sensitivity"])
def test_each_axis_is_a_flag_of_each_question(command: str) -> None:
    assert {name for name, axis in all_axes().items() if axis.help} <= flags_of(command)


def test_axes_of_modules_are_flags_of_a_trace() -> None:
    stated = {name for name, axis in all_axes().items() if axis.of_modules}
    assert stated == all_axes().keys() & flags_of("trace")


def test_each_axis_is_an_axis_of_grids_jobs_and_published_runs() -> None:
    assert {name for name, axis in all_axes().items() if axis.values} <= AXES.keys()
    for kind in (Job, Experiment):
        assert all_axes().keys() <= {field.name for field in fields(kind)}


def test_a_variant_keeps_what_does_not_change() -> None:
    w = ps.preset("gpt2", batch=2, seq=64, attention="math", kernels="fused", lora="r=4", checkpointing=False)
    other = variant(w, checkpointing=True)
    assert axes_of(other) == axes_of(w).but(checkpointing=True)
    assert (other.attention, other.kernels, other.checkpointing) == ("math", "fused", True)


def test_what_nobody_said_is_the_default_of_a_preset() -> None:
    w = ps.preset("gpt2", batch=2, seq=64, attention=None, checkpointing=None, optimizer=None)
    assert (w.attention, w.checkpointing, w.optimizer.name, w.dtype_open) == ("flash", True, "adamw", True)


def test_a_name_that_is_none_of_an_axis_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model gpt2: attention is 'flsh'; known kernels are flash, fa2, .*, math"):
        ps.preset("gpt2", batch=2, seq=64, attention="flsh")


def test_answers_say_an_axis_that_is_not_as_usual() -> None:
    usual, other = (ps.preset("gpt2", batch=2, seq=64, attention=kernel) for kernel in (None, "math"))
    assert (usual.notes, other.notes) == ("", "math attention")
    small = ps.machine("rtx4090", gpu_memory="4GB")  # of some tens of layers, not hundreds
    limits = ps.max_model(small, batch=2, seq=64, like="gpt2", policies="all_on_gpu", catalog=False, attention="math")
    assert limits.of.endswith(", eager kernels, attention math")
