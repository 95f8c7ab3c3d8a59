"""Efficiency: the share of datasheet peaks that machines reach, by a few parameters fitted to published runs.

[Note: fitted rates] A machine whose entry says `rates = "fitted"` takes its GPUs' matrix rates as matmul x peak and
their bandwidth as hbm x peak, and every moment is timed as flops / rate + bytes / bandwidth + launch (cost.py); its CPU
Adam rate is the lower of what the DRAM feeds (adam_dram x peak / 28 bytes per parameter) and what the cores compute; a
copy of memory that is not pinned runs at pageable_gb_per_s. The parameters are the same for all machines: none knows a
model, a system or a node. `pstar validate` shows the errors of predictions that rest on them. Calibrated figures of
such a machine are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Annotated

from pstar_sim.catalog.machine import Gpu, Host, Link
from pstar_sim.schema.fields import Checked, Table, Text, between, says
from pstar_sim.schema.parsing import parse_toml
from pstar_sim.schema.reading import read_table
from pstar_sim.units import GB

__all__ = ["Efficiency", "fitted", "fitted_gpu", "fitted_host", "fitted_link", "read_efficiency"]

ADAM_BYTES_PER_PARAM = 28
_Share = Annotated[float, between(0.01, 1)]


class FittedRates(Table, frozen=True, kw_only=True):
    """The table [fitted] of efficiency.toml."""

    matmul: Annotated[_Share, says("share of the peak matrix rate that large products run at")]
    hbm: Annotated[_Share, says("share of the memory bandwidth that element-wise operators reach")]
    launch_us: Annotated[float, between(0, 1e5), says("kernels and hooks of one moment, whatever their size")]
    adam_dram: Annotated[_Share, says("share of a node's DRAM bandwidth that CPU Adam reaches")]
    adam_gparams_core: Annotated[float, between(1e-4, 10), says("billion parameters per second of one core")]
    pageable_gb_per_s: Annotated[float, between(0.01, 1e3), says("copies from or to memory that is not pinned")]
    source: Annotated[Text, says("where the figures come from")]
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
    source: str


def read_efficiency(file: str, text: str) -> Efficiency:
    """The parameters of a file like efficiency.toml. Raises CatalogError for a field that is missing or wrong."""
    e = read_table(FittedRates, file, "fitted", parse_toml(file, text).get("fitted", {}))
    return Efficiency(
        matmul=e.matmul,
        hbm=e.hbm,
        launch_s=e.launch_us * 1e-6,
        adam_dram=e.adam_dram,
        adam_params_per_core_s=e.adam_gparams_core * 1e9,
        pageable_bytes_per_s=e.pageable_gb_per_s * GB,
        source=f"{e.source} (checked {e.checked})",
    )


@cache
def fitted() -> Efficiency:
    """The parameters shipped with the project."""
    name = "efficiency.toml"
    return read_efficiency(name, (files("pstar_sim.catalog") / name).read_text(encoding="utf-8"))


def fitted_gpu(gpu: Gpu, peak_flops_per_s: Mapping[str, float], hbm_peak_bytes_per_s: float, e: Efficiency) -> Gpu:
    """`gpu` with rates by the model, from its datasheet peaks (flops/s by dtype, bytes/s)."""
    return replace(
        gpu,
        flops_per_s={dtype: peak * e.matmul for dtype, peak in peak_flops_per_s.items()},
        hbm_bytes_per_s=hbm_peak_bytes_per_s * e.hbm,
        launch_s=e.launch_s,
        measured=False,
        source=f"{gpu.source}; rates: {e.source}",
    )


def fitted_host(host: Host, dram_peak_bytes_per_s: float, e: Efficiency) -> Host:
    """`host` with its CPU Adam rate computed by the model; a calibrated rate is kept."""
    if host.measured:
        return host
    by_dram = dram_peak_bytes_per_s * e.adam_dram / ADAM_BYTES_PER_PARAM
    by_cores = host.cores * e.adam_params_per_core_s
    return replace(host, adam_params_per_s=min(by_dram, by_cores), source=f"{host.source}; Adam: {e.source}")


def fitted_link(link: Link, e: Efficiency) -> Link:
    """`link` with the rate of copies that are not pinned; a link whose entry gives the rate keeps it."""
    if link.pageable_bytes_per_s is not None:
        return link
    return replace(link, pageable_bytes_per_s=e.pageable_bytes_per_s)
