"""The shares of datasheet peaks that machines reach, from five parameters fitted to published runs and two assumed.

[Note: the efficiency model] What an entry leaves out: matrix rates are matmul x peak (16 bit: the plateau of the card's
generation); bandwidth of the GPU's memory is hbm x peak; beginnings and ends of a moment's kernels take launch_us; CPU
Adam runs at the lower of the rate that the DRAM feeds (adam_dram x peak / 28 bytes per parameter) and the rate that the
cores compute, or at adam_found_gparams_per_s where a launcher left a process one thread; copies of memory that is not
pinned run at pageable_gb_per_s. None depends on a model, a system or a node; `pstar validate` shows errors of what
rests on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from pstar_sim.catalog.figures import Figure, Known, Latency, Share, figures_of, table_of
from pstar_sim.catalog.machine import ADAM_BYTES_PER_PARAM
from pstar_sim.schema.fields import between
from pstar_sim.schema.parsing import parse_toml
from pstar_sim.schema.reading import read_table

_NAME = "efficiency.toml"


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares (0 to 1), seconds and rates, explained in efficiency.toml's head."""

    matmul: Annotated[
        float, Figure("matmul", Share, "share of the peak fp32 rate that large products run at", known="fitted")
    ]
    hbm: Annotated[float, Figure("hbm", Share, "share of the memory bandwidth that element-wise operators reach")]
    launch_s: Annotated[float, Figure("launch_us", Latency, "beginnings and ends of one moment's kernels")]
    adam_dram: Annotated[
        float,
        Figure("adam_dram", Share, "share of a node's DRAM bandwidth that CPU Adam reaches", known="fitted"),
    ]
    adam_params_per_core_s: Annotated[
        float,
        Figure(
            "adam_gparams_core",
            Annotated[float, between(1e-4, 10)],
            "billion parameters per second of one core",
            known="fitted",
        ),
    ]
    adam_found_params_per_s: Annotated[
        float,
        Figure(
            "adam_found_gparams_per_s",
            Annotated[float, between(1e-4, 10)],
            "billion parameters per second of a process with the one thread that a launcher leaves it, with all passes",
            known="fitted",
        ),
    ]
    pageable_bytes_per_s: Annotated[
        float,
        Figure(
            "pageable_gb_per_s",
            Annotated[float, between(0.01, 1e3)],
            "copies from or to memory that is not pinned",
            known="fitted",
        ),
    ]

    def adam_params_per_s(self, dram_peak_bytes_per_s: float, cores: int) -> float:
        """On a host, with all cores given to Adam."""
        by_dram = dram_peak_bytes_per_s * self.adam_dram / ADAM_BYTES_PER_PARAM
        return min(by_dram, cores * self.adam_params_per_core_s)


_KINDS: tuple[Known, ...] = ("fitted", "assumed")
_TABLES = {known: table_of(Efficiency, f"The table [{known}] of efficiency.toml.", known=known) for known in _KINDS}


def read_efficiency(file: str, text: str) -> Efficiency:
    """file: like efficiency.toml. Raises CatalogError for a field that is missing or wrong."""
    raw = parse_toml(file, text)
    rates: dict[str, float] = {}
    for known, table in _TABLES.items():
        values = read_table(table, file, known, raw.get(known, {}))
        figures = [figure for figure in figures_of(Efficiency) if figure.known == known]
        rates |= {figure.attribute: figure.from_file(getattr(values, figure.name)) for figure in figures}
    return Efficiency(**rates)


@cache
def fitted() -> Efficiency:
    """Shipped with the project."""
    return read_efficiency(_NAME, _shipped())


def efficiency_tables() -> Mapping[str, Any]:
    """Tables "fitted" and "assumed" -> figures, source and date."""
    return parse_toml(_NAME, _shipped())


def _shipped() -> str:
    return (files("pstar_sim.catalog") / _NAME).read_text(encoding="utf-8")
