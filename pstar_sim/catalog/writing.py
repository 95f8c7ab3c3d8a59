"""A machine as a catalog file of one's own, which `load_machine` reads back. Sizes come back exactly, rates to
rounding."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

from pstar_sim.catalog.curves import Curve, best_rate
from pstar_sim.catalog.machine import Gpu, Host, Link, Machine
from pstar_sim.errors import CatalogError
from pstar_sim.files import write_atomically
from pstar_sim.units import GB

__all__ = ["machine_toml", "save_machine"]


def machine_toml(machine: Machine, *, checked: date) -> str:
    """The text of the file. Raises CatalogError for a machine whose ranks differ, which one entry cannot say."""
    if any((r.gpu, r.link) != (machine.gpu, machine.link) for r in machine.ranks):
        raise CatalogError(f"machine {machine.name!r} has ranks that differ; write its file by hand")
    local = machine.local_ranks
    roots = [r.root for r in machine.ranks[:local]]
    per_root = next((i for i, root in enumerate(roots) if root != roots[0]), local) if roots[0] is not None else None
    if roots != [None if per_root is None else i // per_root for i in range(local)]:
        raise CatalogError(f"machine {machine.name!r} has PCIe switches of different widths; write its file by hand")
    gpu, link, host = machine.gpu, machine.link, machine.host
    rates = {f"{dtype}_tflops": rate / 1e12 for dtype, rate in gpu.flops_per_s.items()}
    hbm = {"hbm_gb_per_s": gpu.hbm_bytes_per_s / GB}
    copies = {"h2d_gb_per_s": link.h2d_bytes_per_s / GB, "d2h_gb_per_s": link.d2h_bytes_per_s / GB}
    if link.pageable_bytes_per_s is not None:
        copies["pageable_gb_per_s"] = link.pageable_bytes_per_s / GB
    adam = {"adam_gparams_per_s": host.adam_params_per_s / 1e9}
    tables: list[tuple[str, dict[str, object]]] = [
        (
            f"gpus.{_key(gpu.name)}",
            {
                "memory_gb": gpu.memory_bytes / GB,
                "usable_gb": gpu.usable_bytes / GB,
                "context_gb": gpu.context_bytes / GB,
                "hbm_efficiency": 1,
                "fp32_efficiency": 1,
                "tensor_core_efficiency": 1,
                **hbm,
                **rates,
            },
        ),
        (
            f"links.{_key(link.name)}",
            {
                "connects": "host-gpu",
                "efficiency": 1,
                "latency_us": link.latency_s * 1e6,
                "duplex": link.duplex,
                **copies,
            },
        ),
        (
            f"hosts.{_key(host.name)}",
            {
                "memory_gb": host.memory_bytes / GB,
                "reserved_gb": host.reserved_bytes / GB,
                "dram_peak_gb_per_s": host.dram_bytes_per_s / GB,
                "dram_efficiency": 1,
                "cores": host.cores,
                **adam,
            },
        ),
    ]
    parts_of: list[tuple[bool, str, dict[str, object]]] = [
        (gpu.measured, gpu.source, {**hbm, **rates, **_gpu_curves(gpu)}),
        (link.measured, link.source, {**copies, **_link_curves(link)}),
        (host.measured, host.source, {**adam, **_host_curves(host)}),
    ]
    whole: dict[str, object] = {"gpu": gpu.name, "gpus": local, "link": link.name, "host": host.name}
    if machine.notes:
        whole["notes"] = machine.notes
    if per_root is not None:
        whole["gpus_per_root"] = per_root
        if machine.root_bytes_per_s is not None:
            whole["root_gb_per_s"] = machine.root_bytes_per_s / GB
    if machine.price_usd_per_hour is not None:
        whole["price_usd_per_hour"] = machine.price_usd_per_hour / machine.nodes
    if machine.nodes > 1:
        whole["nodes"] = machine.nodes
    for field, connects, fabric in (
        ("peer_link", "gpu-gpu", machine.peer),
        ("network", "node-node", machine.network),
    ):
        if fabric is not None:
            whole[field] = fabric.name
            rate: dict[str, object] = {"h2d_gb_per_s": fabric.bytes_per_s / GB, "d2h_gb_per_s": fabric.bytes_per_s / GB}
            fixed = {"connects": connects, "efficiency": 1, "latency_us": fabric.latency_s * 1e6, "duplex": True}
            tables.append((f"links.{_key(fabric.name)}", {**fixed, **rate}))
            parts_of.append((fabric.measured, fabric.source, rate))
    if machine.nvme is not None:
        disks = machine.nvme
        whole["disks"] = disks.name
        rate = {"read_gb_per_s": disks.read_bytes_per_s / GB, "write_gb_per_s": disks.write_bytes_per_s / GB}
        fixed = {"size_gb": disks.memory_bytes / GB, "efficiency": 1, "latency_us": disks.latency_s * 1e6}
        tables.append((f"disks.{_key(disks.name)}", {**fixed, **rate}))
        parts_of.append((disks.measured, disks.source, rate))
    tables.append((f"machines.{_key(machine.name)}", whole))
    parts = [f"machine = {json.dumps(machine.name)}"]
    for (name, values), part in zip(tables, (*parts_of, None)):
        source = part[1] if part is not None else "written by pstar"
        parts.append(_table(name, {**values, "source": source, "checked": checked}))
        if part is not None and part[0]:
            parts.append(_table(f"{name}.calibrated", {**part[2], "source": source, "checked": checked}))
    if machine.slowdowns:
        parts.append(_table(f"machines.{_key(machine.name)}.slowdowns", dict(machine.slowdowns)))
    return "\n\n".join(parts) + "\n"


def save_machine(machine: Machine, path: str | Path) -> None:
    """Write the machine's file, whole or not at all."""
    write_atomically(Path(path), machine_toml(machine, checked=date.today()), error=CatalogError)


def _gpu_curves(gpu: Gpu) -> dict[str, object]:
    """Curves without those that a figure set by hand went beyond, as with the others below."""
    found: dict[str, object] = {
        f"{dtype}_table": _points(curve, 1e9, 1e12)
        for dtype, curve in gpu.matmul_tables.items()
        if gpu.flops_per_s[dtype] <= best_rate(curve)
    }
    if gpu.launch_s is not None:
        found["launch_us"] = gpu.launch_s * 1e6
    if gpu.operator_bytes_per_s is not None:
        found["operators_gb_per_s"] = gpu.operator_bytes_per_s / GB
    return found


def _link_curves(link: Link) -> dict[str, object]:
    curves = {
        "h2d_table": (link.h2d_table, link.h2d_bytes_per_s),
        "d2h_table": (link.d2h_table, link.d2h_bytes_per_s),
    }
    return {
        name: _points(curve, 1e6, GB) for name, (curve, rate) in curves.items() if curve and rate <= best_rate(curve)
    }


def _host_curves(host: Host) -> dict[str, object]:
    found: dict[str, object] = {}
    if any(rate == host.adam_params_per_s for _, rate in host.adam_table):
        found["adam_table"] = _points(host.adam_table, 1, 1e9)
    if host.dram_measured:
        found["dram_gb_per_s"] = host.dram_bytes_per_s / GB
    return found


def _points(curve: Curve, size_unit: float, rate_unit: float) -> list[list[float]]:
    return [[size / size_unit, rate / rate_unit] for size, rate in curve]


def _key(name: str) -> str:
    return json.dumps(name)


def _table(name: str, values: dict[str, object]) -> str:
    return "\n".join([f"[{name}]", *(f"{key} = {_value(value)}" for key, value in values.items())])


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float, date)):
        return str(value)
    return json.dumps(value)
