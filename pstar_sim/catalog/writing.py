"""Machines as catalog files: sizes exactly, rates up to rounding."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pstar_sim.catalog.figures import Figure, Points, calibrated_figures, figures_of, keys_of
from pstar_sim.catalog.machine import Fabric, Framework, Link, Machine, Nvme
from pstar_sim.catalog.product_shape import ProductShape
from pstar_sim.errors import CatalogError
from pstar_sim.files import write_atomically
from pstar_sim.units import GB


def machine_toml(machine: Machine, *, checked: date) -> str:
    """Raises CatalogError for ranks that differ: one entry cannot describe them."""
    if machine.mixed:
        raise CatalogError(f"machine {machine.name!r} has ranks that differ; write its file by hand")
    whole = _whole(machine, _per_root(machine))
    name = f"machines.{_key(machine.name)}"
    tables = [*_tables(machine, checked), (name, {**whole, "source": "written by pstar", "checked": checked})]
    if machine.slowdowns:
        tables.append((f"{name}.slowdowns", dict(machine.slowdowns)))
    if machine.updates:
        tables.append((f"{name}.updates", dict(machine.updates)))
    texts = [f"machine = {json.dumps(machine.name)}", *(_table(name, values) for name, values in tables)]
    return "\n\n".join(texts) + "\n"


def _per_root(machine: Machine) -> int | None:
    local = machine.local_ranks
    roots = [r.root for r in machine.ranks[:local]]
    width = next((i for i, root in enumerate(roots) if root != roots[0]), local) if roots[0] is not None else None
    if roots != [None if width is None else i // width for i in range(local)]:
        raise CatalogError(f"machine {machine.name!r} has PCIe switches of different widths; write its file by hand")
    return width


def _tables(machine: Machine, checked: date) -> Iterator[tuple[str, dict[str, object]]]:
    yield from _of_part("gpus", machine.gpu, checked)
    yield from _of_part("links", machine.link, checked, {"connects": "host-gpu"})
    host = replace(machine.host, memory_bytes=machine.pool_bytes or machine.host.memory_bytes)
    yield from _of_part("hosts", host, checked)
    for fabric, connects in ((machine.peer, "gpu-gpu"), (machine.network, "node-node")):
        if fabric is not None:
            yield from _of_part("links", _as_link(fabric), checked, {"connects": connects})
    for kind, part in (("disks", machine.nvme), ("frameworks", machine.framework)):
        if part is not None:
            yield from _of_part(kind, part, checked)


def _as_link(fabric: Fabric) -> Link:
    return Link(
        name=fabric.name,
        h2d_bytes_per_s=fabric.bytes_per_s,
        d2h_bytes_per_s=fabric.bytes_per_s,
        latency_s=fabric.latency_s,
        duplex=True,
        measured=fabric.measured,
        source=fabric.source,
        known=fabric.known,
        h2d_table=fabric.table,
        d2h_table=fabric.table,
    )


def _of_part(
    kind: str, part: Any, checked: date, head: Mapping[str, object] = MappingProxyType({})
) -> Iterator[tuple[str, dict[str, object]]]:
    """Rates are effective, so each share is 1.

    head: fields in front.
    """
    name, origin = f"{kind}.{_key(part.name)}", {"source": part.source, "checked": checked}
    measured = getattr(part, "measured", False)
    part_type: type = type(part)
    entry, rates = dict(head), dict[str, object]()
    shares = {figure.share for figure in figures_of(part_type)}
    for key in keys_of(part_type):
        if not isinstance(key, Figure):
            entry |= {key.name: 1} if key.name in shares else {}
        elif key.says and not (measured and key.written == "calibrated"):
            (rates if key.calibrated and key.written != "entry" else entry)[key.name] = key.of(part)
    yield name, _given({**entry, **rates, **origin})
    if getattr(part, "products", None) is not None:
        products = {figure.name: figure.of(part.products) for figure in figures_of(ProductShape)}
        yield f"{name}.products", _given({**products, "known": part.known, **origin})
    if measured:
        effective = [f for f in calibrated_figures(part_type) if f.written != "entry" and _holds(f, part)]
        calibrated = {figure.name: figure.of(part) for figure in effective}
        if getattr(part, "dram_measured", False):
            calibrated["dram_gb_per_s"] = part.dram_bytes_per_s / GB
        yield f"{name}.calibrated", _given({**calibrated, **origin})


def _holds(figure: Figure, part: object) -> bool:
    if not isinstance(figure, Points) or not figure.get(part):
        return True
    kind: type = type(part)
    rate = next(f for f in figures_of(kind) if f.name == figure.best).get(part)
    rates = [rate for _, rate in figure.get(part)]
    return rate in rates if figure.exact else bool(rate <= max(rates))


def _given(fields: Mapping[str, object]) -> dict[str, object]:
    return {field: value for field, value in fields.items() if value is not None}


def _whole(machine: Machine, per_root: int | None) -> dict[str, object]:
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
    return _given(fields)


def _name(part: Fabric | Nvme | Framework | None) -> str | None:
    return None if part is None else part.name


def save_machine(machine: Machine, path: str | Path) -> None:
    """Atomic."""
    write_atomically(Path(path), machine_toml(machine, checked=date.today()), error=CatalogError)


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
