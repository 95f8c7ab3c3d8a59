"""Pictures of capacity answers say what their frames say; looked at as data, never as pixels."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.plan import Settings
from pstar_sim.errors import PstarError
from pstar_sim.planner.limits import Limit, Limits
from pstar_sim.report.palette import BINDS
from pstar_sim.report.sweeps import plot_limits, plot_map, plot_regimes, plot_times


def frame() -> pd.DataFrame:
    """Two policies at three sizes of memory and two batches; tide does not fit the smallest."""
    rows = []
    for policy, second in (("tide", 2.0), ("optimal", 1.0)):
        for batch in (1, 2):
            for n, memory in enumerate(("8GB", "16GB", "24GB")):
                fits = policy == "optimal" or n > 0
                rows.append(
                    {
                        "policy": policy,
                        "batch": batch,
                        "set.gpu.memory": memory,
                        "iteration_s": batch * (second + (2 - n)) if fits else None,
                        "lower_bound_s": batch * 1.0,
                        "bound_by": ("h2d" if n == 0 else "compute") if fits else None,
                    }
                )
    return pd.DataFrame(rows)


def test_a_line_a_policy_and_the_bound() -> None:
    ax = Figure().subplots()
    plot_times(frame().query("batch == 1"), "set.gpu.memory", ax=ax)
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert list(lines) == ["tide", "optimal", "lower bound"]
    assert lines["tide"].get_xydata().tolist() == [[16.0, 3.0], [24.0, 2.0]]  # from where it fits
    assert lines["optimal"].get_xydata().tolist() == [[8.0, 3.0], [16.0, 2.0], [24.0, 1.0]]
    assert lines["lower bound"].get_ydata().tolist() == [1.0, 1.0, 1.0]
    assert ax.get_xlabel() == "GPU memory [GB]"


def test_an_axis_of_numbers_and_no_bound() -> None:
    ax = plot_times(frame()[frame()["set.gpu.memory"] == "24GB"], "batch", Figure().subplots(), bound=False)
    assert [line.get_label() for line in ax.get_lines()] == ["tide", "optimal"]
    assert ax.get_lines()[0].get_xydata().tolist() == [[1.0, 2.0], [2.0, 4.0]]


def test_what_else_varies_has_to_be_chosen() -> None:
    with pytest.raises(PstarError, match=r"varies in batch beside set\.gpu\.memory; choose"):
        plot_times(frame(), "set.gpu.memory", Figure().subplots())
    with pytest.raises(PstarError, match="no column 'link'"):
        plot_times(frame(), "link", Figure().subplots())
    with pytest.raises(PstarError, match="one policy, not tide, optimal"):
        plot_regimes(frame(), "set.gpu.memory", "batch", Figure().subplots())


def test_a_field_a_regime() -> None:
    ax = Figure().subplots()
    plot_regimes(frame().query("policy == 'tide'"), "set.gpu.memory", "batch", ax=ax)
    assert [text.get_text() for text in ax.texts] == ["no", "compute", "compute"] * 2
    fields = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    assert len(fields) == 6
    assert [p.get_facecolor() == fields[1].get_facecolor() for p in fields] == [False, True, True] * 2
    assert [label.get_text() for label in ax.get_xticklabels()] == ["8", "16", "24"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "2"]
    assert len(set(BINDS)) == len(BINDS)


def test_a_map_of_numbers_is_darker_for_more() -> None:
    table = pd.DataFrame([[-0.01, 5.0], [10.0, np.nan]], index=[1, 4], columns=["2GB/s", "25GB/s"])
    ax = plot_map(table, "set.link.bandwidth", "micro_batches", Figure().subplots(), unit=" %")
    assert [text.get_text() for text in ax.texts] == ["0.0 %", "5.0 %", "10.0 %", "no"]
    brightness = [sum(patch.get_facecolor()[:3]) for patch in ax.patches]
    assert brightness[0] > brightness[1] > brightness[2]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("link bandwidth [GB/s]", "micro-batches")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2", "25"]


def limits(name: str, *billions: float) -> Limits:
    rows = tuple(
        Limit(policy=policy, value=int(b), params=int(b * 1e9) or None)
        for policy, b in zip(("zero_offload", "tide"), billions)
    )
    return Limits(what="layers", of="GPT", machine=load_machine(name), settings=Settings(), rows=rows)


def test_bars_of_the_largest_models() -> None:
    ax = plot_limits([limits("v100-32", 10, 30), limits("rtx4090", 0, 8)], Figure().subplots())
    bars = {patch.get_gid(): patch.get_width() for patch in ax.patches}
    assert bars == {
        "v100-32 zero_offload": 10.0, "v100-32 tide": 30.0, "rtx4090 zero_offload": 0.0, "rtx4090 tide": 8.0,
    }  # fmt: skip
    assert [text.get_text() for text in ax.texts] == ["10.0 B", "none", "30.0 B", "8.0 B"]
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert [text.split("\n")[0] for text in labels] == ["v100-32", "rtx4090"] and "33 GB of GPU" in labels[0]
    with pytest.raises(PstarError, match="give at least one answer, all of max_model"):
        plot_limits([])
