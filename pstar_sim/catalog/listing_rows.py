"""Rows of `pstar machines` and `pstar models`, with the same keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from msgspec import structs

from pstar_sim.catalog.loader import load_catalog
from pstar_sim.catalog.model_shapes import model_entry, model_names
from pstar_sim.dtypes import AUTOCAST
from pstar_sim.units import GB

PARTS = ("gpus", "links", "hosts")
"""Tables of the catalog beside that of machines."""


def list_machines(user_file: str | Path | None = None) -> list[dict[str, object]]:
    """In the catalog's order (and of a user's file), without "here"."""
    catalog = load_catalog(user_file)
    rows: list[dict[str, object]] = []
    for name in catalog.machines:
        m = catalog.machine(name)
        count = m.world_size
        rows.append(
            {
                "machine": name,
                "gpu": m.gpu.name if count == 1 else f"{count} x {m.gpu.name}",
                "GPU GB": _short(m.gpu.usable_bytes / GB),
                "host GB": _short(m.host.memory_bytes / GB),
                "link": m.link.name,
                "link GB/s": _short(min(m.link.h2d_bytes_per_s, m.link.d2h_bytes_per_s) / GB),
                "DRAM GB/s": _short(m.host.dram_bytes_per_s / GB),
                "16-bit TFLOPS": _tflops(m.gpu.flops_per_s),
                "Adam G/s": _short(m.host.adam_params_per_s / 1e9),
                "compute is": m.confidence_by_input["compute"],
                "what": m.notes,
            }
        )
    return rows


def list_parts(table: str, user_file: str | Path | None = None) -> list[dict[str, object]]:
    """Of one of PARTS: figures, with where they come from."""
    catalog = load_catalog(user_file)
    entries = {name: structs.asdict(entry.values) for name, entry in getattr(catalog, table).items()}
    used = {key for values in entries.values() for key, value in values.items() if _is_figure(value)}
    return [
        {table.removesuffix("s"): name}
        | {key: _short(value) if _is_figure(value) else None for key, value in values.items() if key in used}
        | {"source": values.get("source")}
        for name, values in entries.items()
    ]


def _is_figure(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _tflops(rates: Mapping[str, float]) -> float | int | None:
    best = max((rate for dtype, rate in rates.items() if dtype in AUTOCAST), default=None)
    return None if best is None else _short(best / 1e12)


def _short(value: float) -> float | int:
    rounded = float(f"{value:.3g}") if value < 1000 else round(value)
    return int(rounded) if rounded == int(rounded) else rounded


def list_models() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name in model_names():
        m = model_entry(name)
        rows.append(
            {
                "model": name,
                "billion parameters": round(m.params / 1e9, 3 if m.params >= 1e8 else 6),
                "active": None if m.experts is None else round(m.active_params / 1e9, 3),
                "family": m.family,
                "layers": m.layers,
                "hidden": m.hidden,
                "heads": m.heads if m.kv_heads == m.heads else f"{m.heads}/{m.kv_heads}",
                "ffn": m.ffn,
                "vocabulary": m.vocab or None,
                "positions": m.max_seq,
                "also": ", ".join(m.aliases) or None,
                "notes": m.notes or None,
            }
        )
    return rows
