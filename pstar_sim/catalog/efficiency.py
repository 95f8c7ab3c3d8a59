"""Efficiency: what machines reach of their datasheet peaks, by a few parameters fitted to published runs.

[Note: fitted rates] A machine whose entry says `rates = "fitted"` takes its GPUs' matrix rates as matmul x peak and
their bandwidth as hbm x peak, and every moment is timed as flops / rate + bytes / bandwidth + launch (cost.py); its
CPU Adam as the less of what the DRAM feeds (adam_dram x peak / 28 bytes a parameter) and what the cores compute; a
copy of memory that is not pinned at pageable_gb_per_s. The parameters are the same for all machines: none knows a
model, a system or a node. `pstar validate` shows how far they carry. Calibrated figures stand beside them unused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from pstar_sim.catalog.fields import Date, Entry, Field, Number, Text, parse_toml
from pstar_sim.catalog.machine import Gpu, Host, Link
from pstar_sim.units import GB

__all__ = ["Efficiency", "fitted", "fitted_gpu", "fitted_host", "fitted_link", "read_efficiency"]

ADAM_BYTES_PER_PARAM = 28
_SHARE = Number(0.01, 1)
_FIELDS: dict[str, Field] = {
    "matmul": _SHARE,
    "hbm": _SHARE,
    "launch_us": Number(0, 1e5),
    "adam_dram": _SHARE,
    "adam_gparams_core": Number(1e-4, 10),
    "pageable_gb_per_s": Number(0.01, 1e3),
    "source": Text(),
    "checked": Date(),
}


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of peaks (0 to 1), seconds and rates; what each is, at the head of efficiency.toml."""

    matmul: float
    hbm: float
    launch_s: float
    adam_dram: float
    adam_params_per_core_s: float
    pageable_bytes_per_s: float
    source: str


def read_efficiency(file: str, text: str) -> Efficiency:
    """The parameters of a file like efficiency.toml. Raises CatalogError for a field that is missing or wrong."""
    e = Entry.read(file, "fitted", parse_toml(file, text).get("fitted", {}), _FIELDS)
    return Efficiency(
        matmul=e.number("matmul"),
        hbm=e.number("hbm"),
        launch_s=e.number("launch_us") * 1e-6,
        adam_dram=e.number("adam_dram"),
        adam_params_per_core_s=e.number("adam_gparams_core") * 1e9,
        pageable_bytes_per_s=e.number("pageable_gb_per_s") * GB,
        source=f"{e.text('source')} (checked {e.values['checked']})",
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
    """`host` with CPU Adam by the model; one with a calibrated Adam keeps it."""
    if host.measured:
        return host
    by_dram = dram_peak_bytes_per_s * e.adam_dram / ADAM_BYTES_PER_PARAM
    by_cores = host.cores * e.adam_params_per_core_s
    return replace(host, adam_params_per_s=min(by_dram, by_cores), source=f"{host.source}; Adam: {e.source}")


def fitted_link(link: Link, e: Efficiency) -> Link:
    """`link` with the rate of copies that are not pinned; one whose entry gives it keeps it."""
    if link.pageable_bytes_per_s is not None:
        return link
    return replace(link, pageable_bytes_per_s=e.pageable_bytes_per_s)
