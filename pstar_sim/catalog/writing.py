"""Writing of machines: a machine as a catalog file, which `load_machine` reads back. Sizes come back exactly, rates up
to rounding.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from pstar_sim.catalog.curves import Curve, best_rate
from pstar_sim.catalog.machine import Fabric, Framework, Gpu, Host, Link, Machine, Nvme
from pstar_sim.catalog.product_shape import ProductShape
from pstar_sim.errors import CatalogError
from pstar_sim.files import write_atomically
from pstar_sim.units import GB

__all__ = ["machine_toml", "save_machine"]


def machine_toml(machine: Machine, *, checked: date) -> str:
    """Returns the text of the machine's catalog file. Raises CatalogError for a machine whose ranks differ, because one
    entry cannot describe them.
    """
    if machine.mixed:
        raise CatalogError(f"machine {machine.name!r} has ranks that differ; write its file by hand")
    whole = _whole(machine, _per_root(machine))
    name = f"machines.{_key(machine.name)}"
    tables = [table for part in _parts(machine) for table in part.tables(checked)]
    tables.append((name, {**whole, "source": "written by pstar", "checked": checked}))
    if machine.slowdowns:
        tables.append((f"{name}.slowdowns", dict(machine.slowdowns)))
    texts = [f"machine = {json.dumps(machine.name)}", *(_table(name, values) for name, values in tables)]
    return "\n\n".join(texts) + "\n"


def _per_root(machine: Machine) -> int | None:
    """Returns the number of GPUs on one PCIe switch; None without a switch. Raises CatalogError for switches of
    different widths."""
    local = machine.local_ranks
    roots = [r.root for r in machine.ranks[:local]]
    width = next((i for i, root in enumerate(roots) if root != roots[0]), local) if roots[0] is not None else None
    if roots != [None if width is None else i // width for i in range(local)]:
        raise CatalogError(f"machine {machine.name!r} has PCIe switches of different widths; write its file by hand")
    return width


@dataclass(frozen=True, kw_only=True)
class _FileTable:
    """A table of the file.

    calibrated: fields of its calibrated table, if the part is measured.
    products: fields of its table of products by shape; empty if it has none.
    """

    name: str
    values: dict[str, object]
    measured: bool
    source: str
    calibrated: dict[str, object]
    products: dict[str, object] = field(default_factory=dict)

    def tables(self, checked: date) -> list[tuple[str, dict[str, object]]]:
        """Returns the part's tables: (name, fields)."""
        origin = {"source": self.source, "checked": checked}
        rows = [("", self.values, True), (".products", self.products, bool(self.products))]
        rows.append((".calibrated", self.calibrated, self.measured))
        return [(f"{self.name}{below}", {**fields, **origin}) for below, fields, written in rows if written]


def _gpu_part(gpu: Gpu) -> _FileTable:
    rates = {f"{dtype}_tflops": rate / 1e12 for dtype, rate in gpu.flops_per_s.items()}
    hbm = {"hbm_gb_per_s": gpu.hbm_bytes_per_s / GB}
    fixed = {
        "memory_gb": gpu.memory_bytes / GB,
        "usable_gb": gpu.usable_bytes / GB,
        "context_gb": gpu.context_bytes / GB,
        "hbm_efficiency": 1,
        "fp32_efficiency": 1,
        "tensor_core_efficiency": 1,
    }
    return _FileTable(
        name=f"gpus.{_key(gpu.name)}",
        values={**fixed, **hbm, **rates, **({} if gpu.measured else _launch(gpu))},
        measured=gpu.measured,
        source=gpu.source,
        calibrated={**hbm, **rates, **_gpu_curves(gpu)},
        products={} if gpu.products is None else _products(gpu.products, gpu.known),
    )


def _products(shape: ProductShape, known: str) -> dict[str, object]:
    return {
        "sms": shape.sms,
        "tile": list(shape.tile),
        "wave_loss": shape.wave_loss,
        "depth": shape.depth,
        "gb_per_s": shape.bytes_per_s / GB,
        "kernel_us": shape.kernel_s * 1e6,
        "flash": shape.flash,
        "known": known,
    }


def _link_part(link: Link) -> _FileTable:
    copies = {"h2d_gb_per_s": link.h2d_bytes_per_s / GB, "d2h_gb_per_s": link.d2h_bytes_per_s / GB}
    if link.pageable_bytes_per_s is not None:
        copies["pageable_gb_per_s"] = link.pageable_bytes_per_s / GB
    fixed = {"connects": "host-gpu", "efficiency": 1, "latency_us": link.latency_s * 1e6, "duplex": link.duplex}
    fixed["known"] = link.known
    return _FileTable(
        name=f"links.{_key(link.name)}",
        values={**fixed, **copies},
        measured=link.measured,
        source=link.source,
        calibrated={**copies, **_link_curves(link)},
    )


def _host_part(host: Host) -> _FileTable:
    adam = {"adam_gparams_per_s": host.adam_params_per_s / 1e9}
    pinned = {} if host.pinned_bytes is None else {"pinned_gb": host.pinned_bytes / GB}
    fixed = {
        "memory_gb": host.memory_bytes / GB,
        **pinned,
        "reserved_gb": host.reserved_bytes / GB,
        "dram_peak_gb_per_s": host.dram_bytes_per_s / GB,
        "dram_efficiency": 1,
        "cores": host.cores,
    }
    return _FileTable(
        name=f"hosts.{_key(host.name)}",
        values={**fixed, **adam},
        measured=host.measured,
        source=host.source,
        calibrated={**adam, **_host_curves(host)},
    )


def _fabric_part(fabric: Fabric, connects: str) -> _FileTable:
    rate: dict[str, object] = {"h2d_gb_per_s": fabric.bytes_per_s / GB, "d2h_gb_per_s": fabric.bytes_per_s / GB}
    fixed = {"connects": connects, "efficiency": 1, "latency_us": fabric.latency_s * 1e6, "duplex": True}
    fixed["known"] = fabric.known
    curve = _points(fabric.table, 1e6, GB) if fabric.table and fabric.bytes_per_s <= best_rate(fabric.table) else None
    return _FileTable(
        name=f"links.{_key(fabric.name)}",
        values={**fixed, **rate},
        measured=fabric.measured,
        source=fabric.source,
        calibrated=rate if curve is None else {**rate, "h2d_table": curve, "d2h_table": curve},
    )


def _framework_part(framework: Framework) -> _FileTable:
    return _FileTable(
        name=f"frameworks.{_key(framework.name)}",
        values={
            "python_us": framework.python_s * 1e6,
            "wait_us": framework.wait_s * 1e6,
            "known": framework.known,
        },
        measured=False,
        source=framework.source,
        calibrated={},
    )


def _disks_part(disks: Nvme) -> _FileTable:
    rate: dict[str, object] = {
        "read_gb_per_s": disks.read_bytes_per_s / GB,
        "write_gb_per_s": disks.write_bytes_per_s / GB,
    }
    fixed = {"size_gb": disks.memory_bytes / GB, "efficiency": 1, "latency_us": disks.latency_s * 1e6}
    if disks.life_bytes is not None:
        fixed["life_tb"] = disks.life_bytes / 1e12
    return _FileTable(
        name=f"disks.{_key(disks.name)}",
        values={**fixed, **rate},
        measured=disks.measured,
        source=disks.source,
        calibrated=rate,
    )


def _parts(machine: Machine) -> list[_FileTable]:
    """Returns the parts of the machine, in the order of the file."""
    host = replace(machine.host, memory_bytes=machine.pool_bytes or machine.host.memory_bytes)
    parts = [
        _gpu_part(machine.gpu),
        _link_part(machine.link),
        _host_part(host),
    ]
    for fabric, connects in ((machine.peer, "gpu-gpu"), (machine.network, "node-node")):
        if fabric is not None:
            parts.append(_fabric_part(fabric, connects))
    if machine.nvme is not None:
        parts.append(_disks_part(machine.nvme))
    if machine.framework is not None:
        parts.append(_framework_part(machine.framework))
    return parts


def _whole(machine: Machine, per_root: int | None) -> dict[str, object]:
    """Returns the machine's own table, which names its parts.

    per_root: GPUs on one PCIe switch, None without a switch.
    """
    price, root = machine.price_usd_per_hour, machine.root_bytes_per_s
    fields: dict[str, object] = {
        "gpu": machine.gpu.name,
        "gpus": machine.local_ranks,
        "link": machine.link.name,
        "host": machine.host.name,
        "notes": machine.notes or None,
        "gpus_per_root": per_root,
        "root_gb_per_s": None if per_root is None or root is None else root / GB,
        "price_usd_per_hour": None if price is None else price / machine.nodes,
        "unified": machine.unified or None,
        "nodes": machine.nodes if machine.nodes > 1 else None,
        "peer_link": _name(machine.peer),
        "network": _name(machine.network),
        "disks": _name(machine.nvme),
        "framework": _name(machine.framework),
    }
    return {field: value for field, value in fields.items() if value is not None}


def _name(part: Fabric | Nvme | Framework | None) -> str | None:
    return None if part is None else part.name


def save_machine(machine: Machine, path: str | Path) -> None:
    """Write the machine's file, atomically."""
    write_atomically(Path(path), machine_toml(machine, checked=date.today()), error=CatalogError)


def _gpu_curves(gpu: Gpu) -> dict[str, object]:
    """Returns the curves of the GPU. A curve is left out where a figure set by hand is above its best rate."""
    found: dict[str, object] = {
        f"{dtype}_table": _points(curve, 1e9, 1e12)
        for dtype, curve in gpu.matmul_tables.items()
        if gpu.flops_per_s[dtype] <= best_rate(curve)
    }
    found |= _launch(gpu)
    if gpu.operator_bytes_per_s is not None:
        found["operators_gb_per_s"] = gpu.operator_bytes_per_s / GB
    return found


def _launch(gpu: Gpu) -> dict[str, object]:
    return {} if gpu.launch_s is None else {"launch_us": gpu.launch_s * 1e6}


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
