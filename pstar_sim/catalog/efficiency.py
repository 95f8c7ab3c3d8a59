"""Efficiency: the shares of datasheet peaks that machines reach, from four parameters fitted to published runs and two
assumed parameters.

[Note: the efficiency model] Every GPU, link and host of the catalog is timed by one formula (cost.py); machines differ
in data. A figure that an entry gives is used. A figure that the entry leaves out is derived here: matrix rates are
matmul x peak (16 bit: the plateau of the card's generation); bandwidth of the GPU's memory is hbm x peak; beginnings
and ends of a moment's kernels take launch_us; CPU Adam runs at the lower of the rate that the DRAM feeds (adam_dram x
peak / 28 bytes per parameter) and the rate that the cores compute; copies of memory that is not pinned run at
pageable_gb_per_s. The parameters are the same for all machines: none depends on a model, a system or a node. `pstar
validate` shows the errors of predictions that rest on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from pstar_sim.catalog.machine import ADAM_BYTES_PER_PARAM
from pstar_sim.schema.fields import Checked, Table, Text, between, says
from pstar_sim.schema.parsing import parse_toml
from pstar_sim.schema.reading import read_table
from pstar_sim.units import GB

__all__ = ["Efficiency", "efficiency_tables", "fitted", "read_efficiency"]

_NAME = "efficiency.toml"

_Share = Annotated[float, between(0.01, 1)]


class FittedRates(Table, frozen=True, kw_only=True):
    """The table [fitted] of efficiency.toml."""

    matmul: Annotated[_Share, says("share of the peak fp32 rate that large products run at")]
    adam_dram: Annotated[_Share, says("share of a node's DRAM bandwidth that CPU Adam reaches")]
    adam_gparams_core: Annotated[float, between(1e-4, 10), says("billion parameters per second of one core")]
    pageable_gb_per_s: Annotated[float, between(0.01, 1e3), says("copies from or to memory that is not pinned")]
    source: Annotated[Text, says("where the figures come from")]
    checked: Annotated[Checked, says("date when the figure was looked up")]


class AssumedRates(Table, frozen=True, kw_only=True):
    """The table [assumed] of efficiency.toml."""

    hbm: Annotated[_Share, says("share of the memory bandwidth that element-wise operators reach")]
    launch_us: Annotated[float, between(0, 1e5), says("beginnings and ends of one moment's kernels")]
    source: Annotated[Text, says("why these figures")]
    checked: Annotated[Checked, says("date when the figure was looked up")]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of peaks (0 to 1), seconds and rates; the head of efficiency.toml explains each."""

    matmul: float
    hbm: float
    launch_s: float
    adam_dram: float
    adam_params_per_core_s: float
    pageable_bytes_per_s: float

    def adam_params_per_s(self, dram_peak_bytes_per_s: float, cores: int) -> float:
        """Returns the rate of CPU Adam on a host, in parameters per second, with all cores given to Adam."""
        by_dram = dram_peak_bytes_per_s * self.adam_dram / ADAM_BYTES_PER_PARAM
        return min(by_dram, cores * self.adam_params_per_core_s)


def read_efficiency(file: str, text: str) -> Efficiency:
    """Returns the parameters of a file like efficiency.toml. Raises CatalogError for a field that is missing or
    wrong."""
    raw = parse_toml(file, text)
    e = read_table(FittedRates, file, "fitted", raw.get("fitted", {}))
    assumed = read_table(AssumedRates, file, "assumed", raw.get("assumed", {}))
    return Efficiency(
        matmul=e.matmul,
        hbm=assumed.hbm,
        launch_s=assumed.launch_us * 1e-6,
        adam_dram=e.adam_dram,
        adam_params_per_core_s=e.adam_gparams_core * 1e9,
        pageable_bytes_per_s=e.pageable_gb_per_s * GB,
    )


@cache
def fitted() -> Efficiency:
    """Returns the parameters shipped with the project."""
    return read_efficiency(_NAME, _shipped())


def efficiency_tables() -> Mapping[str, Any]:
    """Returns the tables of the shipped file: "fitted" and "assumed" -> figures, source and date."""
    return parse_toml(_NAME, _shipped())


def _shipped() -> str:
    return (files("pstar_sim.catalog") / _NAME).read_text(encoding="utf-8")
