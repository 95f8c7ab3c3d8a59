"""From TOML to parts and machines: the shipped catalog, and a user's file over it.

The shipped files are gpus.toml, links.toml, hosts.toml, disks.toml and machines.toml beside this module; what their
fields mean is at their heads. A user's file holds the same entries as [gpus.NAME], [links.NAME], [hosts.NAME],
[disks.NAME] and [machines.NAME]: a new name extends the catalog (and must be complete, but for source and checked: the
file is its own source), a known one overrides the fields it gives. `machine = "NAME"` at the head of a user's file
says which of its machines is meant where it has several.

[Note: which figure is used] An entry's `calibrated` table is preferred, field by field, and used as it is; a datasheet
peak is multiplied by the entry's efficiency. A user's datasheet figure displaces the calibrated one of the same
name. `measured` is true of a part that has a calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from pstar_sim.arguments import file_path, spelled, whole
from pstar_sim.catalog.curves import Curve, best_rate
from pstar_sim.catalog.efficiency import Efficiency, fitted, fitted_gpu, fitted_host, fitted_link
from pstar_sim.catalog.fields import (
    Choice,
    Date,
    Entry,
    Field,
    Flag,
    Number,
    Points,
    Table,
    Tables,
    Text,
    Texts,
    one_of,
    parse_toml,
    read_toml,
)
from pstar_sim.catalog.machine import Fabric, Gpu, Host, Link, Machine, Nvme, Rank
from pstar_sim.errors import CatalogError, UnknownName
from pstar_sim.units import GB

__all__ = ["Catalog", "load_catalog", "with_nodes"]

TERA = 1e12

_ORIGIN: dict[str, Field] = {"source": Text(), "checked": Date()}
_GIGABYTES = Number(0.001, 1e5)
_RATE = Number(0.01, 2e4)
_LINK_RATE = Number(0.001, 2e3)
_TFLOPS = Number(1e-4, 1e5)
_EFFICIENCY = Number(0.01, 1)
_ADAM = Number(1e-3, 1e3)
_DTYPES = ("fp32", "fp16", "bf16")
_QUEUES = ("compute", "adam", "h2d", "d2h")
_SLOWDOWN = Number(1, 1000, required=False)


def _optional(kind: Number) -> Number:
    return replace(kind, required=False)


_FIELDS: dict[str, dict[str, Field]] = {
    "gpus": {
        "memory_gb": _GIGABYTES,
        "usable_gb": _GIGABYTES,
        "context_gb": Number(0, 100),
        "hbm_gb_per_s": _RATE,
        "hbm_efficiency": _EFFICIENCY,
        "fp32_tflops": _TFLOPS,
        "fp16_tflops": _optional(_TFLOPS),
        "bf16_tflops": _optional(_TFLOPS),
        "fp32_efficiency": _EFFICIENCY,
        "tensor_core_efficiency": _EFFICIENCY,
        "device_names": Texts(required=False),
        **_ORIGIN,
        "calibrated": Table(
            {
                "usable_gb": _optional(_GIGABYTES),
                "hbm_gb_per_s": _optional(_RATE),
                "fp32_tflops": _optional(_TFLOPS),
                "fp16_tflops": _optional(_TFLOPS),
                "bf16_tflops": _optional(_TFLOPS),
                **{f"{dtype}_table": Points("GFLOP of a product", "TFLOP/s") for dtype in _DTYPES},
                "operators_gb_per_s": _optional(_RATE),
                "launch_us": Number(0, 1e5, required=False),
                **_ORIGIN,
            }
        ),
    },
    "links": {
        "connects": Choice(("host-gpu", "gpu-gpu", "node-node")),
        "h2d_gb_per_s": _LINK_RATE,
        "d2h_gb_per_s": _LINK_RATE,
        "efficiency": _EFFICIENCY,
        "latency_us": Number(0, 1e5),
        "duplex": Flag(),
        "pageable_gb_per_s": _optional(_LINK_RATE),
        **_ORIGIN,
        "calibrated": Table(
            {
                "h2d_gb_per_s": _optional(_LINK_RATE),
                "d2h_gb_per_s": _optional(_LINK_RATE),
                "pageable_gb_per_s": _optional(_LINK_RATE),
                "h2d_table": Points("MB of a copy", "GB/s"),
                "d2h_table": Points("MB of a copy", "GB/s"),
                **_ORIGIN,
            }
        ),
    },
    "hosts": {
        "memory_gb": _GIGABYTES,
        "reserved_gb": Number(0, 1e4),
        "dram_peak_gb_per_s": _RATE,
        "dram_efficiency": _EFFICIENCY,
        "cores": Number(1, 4096, whole=True),
        "adam_gparams_per_s": _ADAM,
        **_ORIGIN,
        "calibrated": Table(
            {
                "adam_gparams_per_s": _optional(_ADAM),
                "adam_table": Points("threads", "billion parameters/s"),
                "dram_gb_per_s": _optional(_RATE),
                **_ORIGIN,
            }
        ),
    },
    "disks": {
        "size_gb": Number(1, 1e7),
        "read_gb_per_s": _LINK_RATE,
        "write_gb_per_s": _LINK_RATE,
        "efficiency": _EFFICIENCY,
        "latency_us": Number(0, 1e5),
        **_ORIGIN,
        "calibrated": Table(
            {"read_gb_per_s": _optional(_LINK_RATE), "write_gb_per_s": _optional(_LINK_RATE), **_ORIGIN}
        ),
    },
    "machines": {
        "gpu": Text(required=False),
        "gpus": Number(1, 1024, whole=True, required=False),
        "link": Text(required=False),
        "ranks": Tables(
            {
                "gpu": Text(),
                "gpus": Number(1, 1024, whole=True, required=False),
                "link": Text(),
                "batch": Number(1, 1e6),
            }
        ),
        "peer_link": Text(required=False),
        "gpus_per_root": Number(1, 64, whole=True, required=False),
        "root_gb_per_s": _optional(_LINK_RATE),
        "nodes": Number(1, 4096, whole=True, required=False),
        "network": Text(required=False),
        "disks": Text(required=False),
        "host": Text(),
        "rates": Choice(("catalog", "fitted"), required=False),
        "notes": Text(required=False),
        "price_usd_per_hour": Number(1e-3, 1e4, required=False),
        "slowdowns": Table({f"{a}_while_{b}": _SLOWDOWN for a in _QUEUES for b in _QUEUES if a != b}),
        **_ORIGIN,
    },
}

# Curves go with the figure whose best rate they hold: a user's figure displaces both.
_CURVES = {
    "h2d_table": "h2d_gb_per_s",
    "d2h_table": "d2h_gb_per_s",
    "adam_table": "adam_gparams_per_s",
    "dram_gb_per_s": "dram_peak_gb_per_s",
    **{f"{dtype}_table": f"{dtype}_tflops" for dtype in _DTYPES},
}


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """Checked entries by name. own: the machines that a user's file defined. main: the one it says is meant."""

    gpus: Mapping[str, Entry]
    links: Mapping[str, Entry]
    hosts: Mapping[str, Entry]
    disks: Mapping[str, Entry]
    machines: Mapping[str, Entry]
    own: tuple[str, ...] = ()
    main: str | None = None

    def gpu(self, name: str) -> Gpu:
        e = self.gpus[name]
        usable = e.number("usable_gb") if _calibrated(e, "usable_gb") is None else _calibrated(e, "usable_gb")
        assert usable is not None
        rates = {}
        for dtype in _DTYPES:
            if e.has(f"{dtype}_tflops") or _calibrated(e, f"{dtype}_tflops") is not None:
                efficiency = "fp32_efficiency" if dtype == "fp32" else "tensor_core_efficiency"
                rates[dtype] = _effective(e, f"{dtype}_tflops", efficiency) * TERA
        if not e.number("context_gb") < usable <= e.number("memory_gb"):
            raise e.refuse("usable_gb", "more than context_gb and at most memory_gb, calibrated or not")
        launch, operators = _calibrated(e, "launch_us"), _calibrated(e, "operators_gb_per_s")
        tables = {dtype: _curve(e, f"{dtype}_table", f"{dtype}_tflops", 1e9, TERA) for dtype in _DTYPES}
        return Gpu(
            name=name,
            memory_bytes=_bytes(e.number("memory_gb")),
            usable_bytes=_bytes(usable),
            context_bytes=_bytes(e.number("context_gb")),
            hbm_bytes_per_s=_effective(e, "hbm_gb_per_s", "hbm_efficiency") * GB,
            flops_per_s=rates,
            measured=e.has("calibrated"),
            source=_source(e),
            launch_s=None if launch is None else launch * 1e-6,
            matmul_tables={dtype: curve for dtype, curve in tables.items() if curve},
            operator_bytes_per_s=None if operators is None else operators * GB,
        )

    def link(self, name: str) -> Link:
        e = self.links[name]
        return Link(
            name=name,
            h2d_bytes_per_s=_effective(e, "h2d_gb_per_s", "efficiency") * GB,
            d2h_bytes_per_s=_effective(e, "d2h_gb_per_s", "efficiency") * GB,
            latency_s=e.number("latency_us") * 1e-6,
            duplex=e.flag("duplex"),
            measured=e.has("calibrated"),
            source=_source(e),
            pageable_bytes_per_s=_pageable(e),
            h2d_table=_curve(e, "h2d_table", "h2d_gb_per_s", 1e6, GB),
            d2h_table=_curve(e, "d2h_table", "d2h_gb_per_s", 1e6, GB),
        )

    def fabric(self, name: str) -> Fabric:
        """A link between GPUs or nodes: the slower of its two directions."""
        link = self.link(name)
        return Fabric(
            name=name,
            bytes_per_s=min(link.h2d_bytes_per_s, link.d2h_bytes_per_s),
            latency_s=link.latency_s,
            measured=link.measured,
            source=link.source,
        )

    def nvme(self, name: str) -> Nvme:
        e = self.disks[name]
        return Nvme(
            name=name,
            memory_bytes=_bytes(e.number("size_gb")),
            read_bytes_per_s=_effective(e, "read_gb_per_s", "efficiency") * GB,
            write_bytes_per_s=_effective(e, "write_gb_per_s", "efficiency") * GB,
            latency_s=e.number("latency_us") * 1e-6,
            measured=e.has("calibrated"),
            source=_source(e),
        )

    def host(self, name: str) -> Host:
        e = self.hosts[name]
        e.at_most("reserved_gb", "memory_gb", strictly=True)
        adam, dram = _calibrated(e, "adam_gparams_per_s"), _calibrated(e, "dram_gb_per_s")
        if dram is None:
            dram = e.number("dram_peak_gb_per_s") * e.number("dram_efficiency")
        return Host(
            name=name,
            memory_bytes=_bytes(e.number("memory_gb")),
            reserved_bytes=_bytes(e.number("reserved_gb")),
            dram_bytes_per_s=dram * GB,
            cores=e.whole("cores"),
            adam_params_per_s=(e.number("adam_gparams_per_s") if adam is None else adam) * 1e9,
            measured=e.has("calibrated"),
            source=_source(e),
            adam_table=_adam_curve(e),
            dram_measured=_calibrated(e, "dram_gb_per_s") is not None,
        )

    def machine(self, name: str, efficiency: Efficiency | None = None) -> Machine:
        """efficiency: instead of the shipped parameters, for a machine with fitted rates; see [Note: fitted rates].

        Raises UnknownName, and CatalogError for a part that no table has.
        """
        name = spelled(name, self.machines)
        if name not in self.machines:
            raise UnknownName("machine", name, (*self.machines, "here"))
        e = self.machines[name]
        nodes = e.whole("nodes", 1)
        peer = self._joined(e, "peer_link", "gpu-gpu")
        node = self._ranks(e)
        host = self.host(one_of("host", e, "host", tuple(self.hosts)))
        if e.text("rates") == "fitted":
            efficiency = efficiency or fitted()
            node = [
                replace(rank, gpu=self._fitted_gpu(rank.gpu, efficiency), link=fitted_link(rank.link, efficiency))
                for rank in node
            ]
            host = fitted_host(host, self.hosts[host.name].number("dram_peak_gb_per_s") * GB, efficiency)
        root_rate = e.number("root_gb_per_s") * GB if e.has("root_gb_per_s") else None
        if e.has("gpus_per_root"):
            size = e.whole("gpus_per_root")
            if len(node) % size:
                raise e.refuse("gpus_per_root", f"a number that divides the {len(node)} GPUs of a node")
            node = [replace(rank, root=i // size) for i, rank in enumerate(node)]
            if root_rate is None:
                root_rate = max(max(r.link.h2d_bytes_per_s, r.link.d2h_bytes_per_s) for r in node)
        elif root_rate is not None:
            raise e.refuse("root_gb_per_s", "given together with gpus_per_root")
        machine = Machine(
            name=name,
            ranks=tuple(node),
            host=host,
            notes=e.text("notes"),
            slowdowns=_slowdowns(e),
            price_usd_per_hour=e.number("price_usd_per_hour") if e.has("price_usd_per_hour") else None,
            peer=peer,
            network=self._joined(e, "network", "node-node"),
            root_bytes_per_s=root_rate,
            nvme=self.nvme(one_of("set of disks", e, "disks", tuple(self.disks))) if e.has("disks") else None,
        )
        return with_nodes(machine, nodes)

    def _ranks(self, e: Entry) -> list[Rank]:
        """The ranks of one node: `gpus` equal ones, or the groups of `ranks`, each with its sequences a micro-batch."""
        if e.has("ranks"):
            for field in ("gpu", "gpus", "link"):
                if e.has(field):
                    raise e.refuse(field, "left out where ranks are listed")
            groups = [(g, g.whole("gpus", 1), g.number("batch")) for g in e.tables("ranks")]
        else:
            for field in ("gpu", "gpus", "link"):
                if not e.has(field):
                    raise CatalogError(
                        f"{e.file}: [{e.name}] {field} is missing; it must be {_FIELDS['machines'][field].want} (or "
                        f"give [[machines.{e.name}.ranks]] tables with gpu, gpus, link and batch, for GPUs that differ)"
                    )
            groups = [(e, e.whole("gpus"), 1.0)]
        total = sum(count * batch for _, count, batch in groups)
        ranks: list[Rank] = []
        for g, count, batch in groups:
            link = one_of("link", g, "link", tuple(self.links))
            if self.links[link].text("connects") != "host-gpu":
                raise g.refuse("link", 'a link that connects = "host-gpu"')
            gpu = one_of("GPU", g, "gpu", tuple(self.gpus))
            ranks += [Rank(gpu=self.gpu(gpu), link=self.link(link), batch_share=batch / total)] * count
        return ranks

    def _fitted_gpu(self, gpu: Gpu, efficiency: Efficiency) -> Gpu:
        e = self.gpus[gpu.name]
        peaks = {dtype: e.number(f"{dtype}_tflops") * TERA for dtype in gpu.flops_per_s if e.has(f"{dtype}_tflops")}
        return fitted_gpu(gpu, peaks, e.number("hbm_gb_per_s") * GB, efficiency)

    def _joined(self, e: Entry, field: str, connects: str) -> Fabric | None:
        if not e.has(field):
            return None
        name = one_of("link", e, field, tuple(self.links))
        if self.links[name].text("connects") != connects:
            raise e.refuse(field, f'a link that connects = "{connects}"')
        return self.fabric(name)


def with_nodes(machine: Machine, nodes: int) -> Machine:
    """So many nodes like the (first) one of `machine`; its price grows with them. Raises CatalogError for several nodes
    that no network joins."""
    whole(f"machine {machine.name!r}: nodes", nodes, error=CatalogError)
    if nodes > 1 and machine.network is None:
        raise CatalogError(
            f"machine {machine.name!r}: nodes = {nodes} but it has no network; a machine file gives one with "
            'network = NAME, a link that connects = "node-node"'
        )
    node = machine.ranks[: machine.local_ranks]
    ranks = tuple(replace(r, batch_share=r.batch_share * machine.nodes / nodes) for r in node) * nodes
    price = machine.price_usd_per_hour
    if price is not None:
        price = price * nodes / machine.nodes
    return replace(machine, ranks=ranks, nodes=nodes, price_usd_per_hour=price)


def _bytes(gigabytes: float) -> int:
    return round(gigabytes * GB)


def _calibrated(entry: Entry, field: str) -> float | None:
    table = entry.table("calibrated")
    return table.number(field) if table is not None and table.has(field) else None


def _curve(e: Entry, field: str, best: str, size_unit: float, rate_unit: float) -> Curve:
    """The calibrated curve `field`; () without one. Raises CatalogError for a `best` of the entry that is more than its
    best rate (less is a link that is throttled)."""
    table = e.table("calibrated")
    if table is None or not table.has(field):
        return ()
    curve = table.curve(field, size_unit, rate_unit)
    if not table.has(best):
        raise table.refuse(field, f"given together with {best}, its best rate")
    if table.number(best) * rate_unit > 1.001 * best_rate(curve):
        raise table.refuse(best, f"at most the best rate of {field}, {best_rate(curve) / rate_unit:.6g}")
    return curve


def _adam_curve(e: Entry) -> Curve:
    """Adam's rate by threads; () where it was not measured. Raises CatalogError unless it has the rate that is used."""
    table = e.table("calibrated")
    if table is None or not table.has("adam_table"):
        return ()
    curve = table.curve("adam_table", 1, 1e9)
    if not table.has("adam_gparams_per_s"):
        raise table.refuse("adam_table", "given together with adam_gparams_per_s, one of its rates")
    used = table.number("adam_gparams_per_s") * 1e9
    if all(abs(rate / used - 1) > 0.01 for _, rate in curve):
        raise table.refuse("adam_gparams_per_s", f"one of the rates of adam_table = {table.values['adam_table']!r}")
    if curve[-1][0] > e.whole("cores"):
        raise table.refuse("adam_table", f"of at most cores = {e.whole('cores')} threads")
    return curve


def _slowdowns(e: Entry) -> dict[str, float]:
    table = e.table("slowdowns")
    return {} if table is None else {name: table.number(name) for name in table.values}


def _pageable(e: Entry) -> float | None:
    value = _calibrated(e, "pageable_gb_per_s")
    if value is None:
        value = e.number("pageable_gb_per_s") if e.has("pageable_gb_per_s") else None
    return None if value is None else value * GB


def _effective(entry: Entry, field: str, efficiency: str) -> float:
    value = _calibrated(entry, field)
    return entry.number(field) * entry.number(efficiency) if value is None else value


def _source(entry: Entry) -> str:
    table = entry.table("calibrated")
    text = f"{entry.text('source')} (checked {entry.values['checked']})"
    return text if table is None else f"{text}; calibrated: {table.text('source')} (checked {table.values['checked']})"


def _tables(raws: Mapping[str, Mapping[str, tuple[str, object]]]) -> dict[str, dict[str, Entry]]:
    return {
        table: {name: Entry.read(file, name, raw, _FIELDS[table]) for name, (file, raw) in raws[table].items()}
        for table in _FIELDS
    }


@cache
def _shipped() -> dict[str, dict[str, tuple[str, object]]]:
    """File and raw table of every shipped entry. The files do not change while a program runs."""
    here = files("pstar_sim.catalog")
    return {
        table: {
            name: (f"{table}.toml", raw)
            for name, raw in parse_toml(f"{table}.toml", (here / f"{table}.toml").read_text(encoding="utf-8")).items()
        }
        for table in _FIELDS
    }


def _merged(file: str, known: object, given: object) -> object:
    """A user's entry over the catalog's: given fields replace, and displace the calibrated field of the same name."""
    if not isinstance(known, dict) or not isinstance(given, dict):
        return given
    merged = {**known, **given}
    calibrated = known.get("calibrated")
    if isinstance(calibrated, dict):
        kept = {k: v for k, v in calibrated.items() if k in _ORIGIN or not {k, _CURVES.get(k, k)} & given.keys()}
        own = given.get("calibrated")
        if isinstance(own, dict):
            kept |= {"source": file} | own
        elif "calibrated" in given:
            kept = given["calibrated"]
        merged["calibrated"] = kept
    if "source" not in given:
        merged["source"] = f"{known.get('source')}, changed by {file}"
    return merged


def load_catalog(user_file: str | Path | None = None) -> Catalog:
    """The shipped catalog, and a user's file over it. Raises CatalogError for any entry of either that is wrong."""
    raws = {table: dict(entries) for table, entries in _shipped().items()}
    own: list[str] = []
    main: str | None = None
    if user_file is not None:
        file = str(file_path("user_file", user_file, error=CatalogError))
        content = read_toml(Path(file))
        named = content.pop("machine", None)
        if named is not None and not isinstance(named, str):
            raise CatalogError(f"{file}: machine = {named!r}; must be the name of one of its machines")
        main = named
        for table, entries in content.items():
            if table not in _FIELDS or not isinstance(entries, dict):
                want = ", ".join(f"[{t}.NAME]" for t in _FIELDS)
                raise CatalogError(f"{file}: {table!r} is not a known table; it takes {want} and machine = NAME")
            for name, given in entries.items():
                raws[table][name] = (file, _given(file, raws[table].get(name), given))
                if table == "machines":
                    own.append(name)
    tables = _tables(raws)
    if main is not None and main not in tables["machines"]:
        raise CatalogError(f"{user_file}: machine = {main!r}; must be one of {', '.join(tables['machines'])}")
    return Catalog(
        gpus=tables["gpus"],
        links=tables["links"],
        hosts=tables["hosts"],
        disks=tables["disks"],
        machines=tables["machines"],
        own=tuple(own),
        main=main,
    )


def _given(file: str, known: tuple[str, object] | None, given: object) -> object:
    if known is not None:
        return _merged(file, known[1], given)
    if not isinstance(given, dict):
        return given
    return {**_own_origin(file), **given, **_own_calibration(file, given)}


def _own_origin(file: str) -> dict[str, object]:
    """A user's file is its own source; it was checked when it was last written."""
    from datetime import date

    return {"source": file, "checked": date.fromtimestamp(Path(file).stat().st_mtime)}


def _own_calibration(file: str, given: Mapping[str, object]) -> dict[str, object]:
    calibrated = given.get("calibrated")
    return {"calibrated": {**_own_origin(file), **calibrated}} if isinstance(calibrated, dict) else {}
