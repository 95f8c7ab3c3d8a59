"""Rows of `pstar machines` and `pstar models`: plain values, one dict a row, the same keys in every row."""

from __future__ import annotations

from pathlib import Path

from pstar_sim.catalog.loader import load_catalog
from pstar_sim.catalog.models import model_entry, model_names
from pstar_sim.units import format_bytes

__all__ = ["list_machines", "list_models"]


def list_machines(user_file: str | Path | None = None) -> list[dict[str, object]]:
    """Every machine of the catalog (and of a user's file), in catalog order; "here" is not among them."""
    catalog = load_catalog(user_file)
    rows: list[dict[str, object]] = []
    for name in catalog.machines:
        m = catalog.machine(name)
        count = len(m.ranks)
        rows.append(
            {
                "machine": name,
                "gpu": m.gpu.name if count == 1 else f"{count} x {m.gpu.name}",
                "gpu memory": format_bytes(m.gpu.usable_bytes),
                "host memory": format_bytes(m.host.memory_bytes),
                "link": f"{m.link.name}, {format_bytes(m.link.h2d_bytes_per_s)}/s",
                "dram": f"{format_bytes(m.host.dram_bytes_per_s)}/s",
                "16-bit tflops": _tflops(m.gpu.flops_per_s),
                "cpu adam": f"{m.host.adam_params_per_s / 1e9:.2g} G/s",
                "figures": m.confidence,
                "what": m.notes,
            }
        )
    return rows


def _tflops(rates: dict[str, float] | object) -> str:
    assert isinstance(rates, dict)
    best = max((rates[d] for d in ("fp16", "bf16") if d in rates), default=None)
    return "" if best is None else f"{best / 1e12:.3g}"


def list_models() -> list[dict[str, object]]:
    """Every model of the catalog, in catalog order."""
    rows: list[dict[str, object]] = []
    for name in model_names():
        m = model_entry(name)
        rows.append(
            {
                "model": name,
                "parameters": f"{m.params / 1e9:.3f} B" if m.params >= 1e8 else f"{m.params / 1e6:.3f} M",
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
