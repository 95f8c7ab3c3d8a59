"""The catalog: reads TOML files into parts and machines, the shipped files first and a user's file over them.

The shipped files are gpus.toml, links.toml, hosts.toml, disks.toml, frameworks.toml and machines.toml beside this
module; the head of each file explains its fields. A user's file holds the same entries as [gpus.NAME], [links.NAME],
[hosts.NAME], [disks.NAME], [frameworks.NAME] and [machines.NAME]. An entry with a new name extends the catalog and must
be complete, except for source and checked, because the file is its own source. An entry with a known name overrides the
fields that it gives. If a user's file has several machines, `machine = "NAME"` at its head chooses one of them.

[Note: which figure is used] Figures of an entry's `calibrated` table are preferred, field by field, and used as they
are. A datasheet peak is multiplied by the entry's efficiency; if the entry gives none, by the efficiency of its
generation or of the efficiency model. A user's datasheet figure displaces the calibrated figure of the same name.
`measured` is true of a part that has a calibration. Calibrated rates of a card that come without launch_us are those of
whole iterations: they contain its operators and launches, so nothing else takes time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from msgspec import structs

from pstar_sim.arguments import file_path, spelled, whole
from pstar_sim.catalog.curves import Curve, best_rate
from pstar_sim.catalog.efficiency import Efficiency, fitted
from pstar_sim.catalog.entries import (
    MOST_NODES_OF_A_MACHINE,
    TABLES,
    DiskEntry,
    Entry,
    FrameworkEntry,
    GpuEntry,
    HostEntry,
    LinkEntry,
    MachineEntry,
    scaled,
)
from pstar_sim.catalog.generations import Generation, generations
from pstar_sim.catalog.machine import KNOWN, Fabric, Framework, Gpu, Host, Link, Machine, Nvme, Rank
from pstar_sim.catalog.product_shape import ProductShape
from pstar_sim.errors import CatalogError, UnknownName
from pstar_sim.schema.fields import Table, fields_of, want
from pstar_sim.schema.parsing import parse_toml, read_toml
from pstar_sim.units import GB

__all__ = ["Catalog", "load_catalog", "with_nodes"]

VERSION = 1
"""Newest version of a user's file. The key `version` at the head of a file gives the file's version; files of the first
edition lack the key."""
TERA = 1e12

_DTYPES = ("fp32", "fp16", "bf16")
_ORIGIN = ("source", "checked")
_OTHER_MACHINE = (
    "any other machine: the most similar name with --gpu-memory, --host-memory, --gpus and --set, or a TOML file"
)

# Figure -> the curve whose best rate it is: a user's figure displaces both.
_CURVES = {
    "h2d_table": "h2d_gb_per_s",
    "d2h_table": "d2h_gb_per_s",
    "adam_table": "adam_gparams_per_s",
    "dram_gb_per_s": "dram_peak_gb_per_s",
    **{f"{dtype}_table": f"{dtype}_tflops" for dtype in _DTYPES},
}


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """Checked entries by name.

    efficiency: the figures that entries leave out ([Note: the efficiency model]).
    own: the machines that a user's file defined.
    main: the machine that this file chooses.
    """

    gpus: Mapping[str, Entry[GpuEntry]]
    links: Mapping[str, Entry[LinkEntry]]
    hosts: Mapping[str, Entry[HostEntry]]
    disks: Mapping[str, Entry[DiskEntry]]
    frameworks: Mapping[str, Entry[FrameworkEntry]]
    machines: Mapping[str, Entry[MachineEntry]]
    efficiency: Efficiency
    own: tuple[str, ...] = ()
    main: str | None = None

    def gpu(self, name: str) -> Gpu:
        e = self.gpus[name]
        card, measured = e.values, e.values.calibrated
        usable = card.usable_gb
        if measured is not None and measured.usable_gb is not None:
            usable = measured.usable_gb
        if not card.context_gb < usable <= card.memory_gb:
            raise e.refuse("usable_gb", "more than context_gb and at most memory_gb, calibrated or not")
        generation = (
            None
            if card.generation is None
            else generations()[e.known("generation", "generation", tuple(generations()))]
        )
        launch_s = _launch_s(e, self.efficiency)
        operators = None if measured is None else measured.operators_gb_per_s
        tables = {dtype: _curve(e, f"{dtype}_table", f"{dtype}_tflops", 1e9, TERA) for dtype in _DTYPES}
        return Gpu(
            name=name,
            memory_bytes=_bytes(card.memory_gb),
            usable_bytes=_bytes(usable),
            context_bytes=_bytes(card.context_gb),
            hbm_bytes_per_s=_rate(card, "hbm_gb_per_s", _or(card.hbm_efficiency, self.efficiency.hbm)),
            flops_per_s=self._rates(e, generation),
            measured=measured is not None,
            source=_source(card),
            launch_s=launch_s,
            known=_known(card, generation),
            matmul_tables={dtype: curve for dtype, curve in tables.items() if curve},
            operator_bytes_per_s=None if operators is None else operators * GB,
            products=None if launch_s is None else _products(e, generation),
        )

    def _rates(self, e: Entry[GpuEntry], generation: Generation | None) -> dict[str, float]:
        """Returns the matrix rate by dtype, in flops/s. Raises CatalogError for a 16-bit peak without a known share
        that products reach.
        """
        card = e.values
        wide = _or(card.fp32_efficiency, self.efficiency.matmul)
        half = card.tensor_core_efficiency
        if half is None and generation is not None:
            half = generation.plateau
        rates = {}
        for dtype in _DTYPES:
            calibrated = getattr(card.calibrated, f"{dtype}_tflops", None) is not None
            if half is None and dtype != "fp32" and getattr(card, f"{dtype}_tflops") is not None and not calibrated:
                raise e.refuse(
                    "tensor_core_efficiency", f"given beside {dtype}_tflops, or the card's generation and sms"
                )
            rate = _effective(card, f"{dtype}_tflops", wide if dtype == "fp32" else _or(half, 1))
            if rate is not None:
                rates[dtype] = rate * TERA
        return rates

    def link(self, name: str) -> Link:
        e = self.links[name]
        link = e.values
        pageable = _effective(link, "pageable_gb_per_s", 1)
        return Link(
            name=name,
            h2d_bytes_per_s=_rate(link, "h2d_gb_per_s", link.efficiency),
            d2h_bytes_per_s=_rate(link, "d2h_gb_per_s", link.efficiency),
            latency_s=link.latency_us * 1e-6,
            duplex=link.duplex,
            measured=link.calibrated is not None,
            source=_source(link),
            known=link.known,
            pageable_bytes_per_s=self.efficiency.pageable_bytes_per_s if pageable is None else pageable * GB,
            h2d_table=_curve(e, "h2d_table", "h2d_gb_per_s", 1e6, GB),
            d2h_table=_curve(e, "d2h_table", "d2h_gb_per_s", 1e6, GB),
        )

    def fabric(self, name: str) -> Fabric:
        """Returns a link between GPUs or nodes, at the slower of its two directions."""
        link = self.link(name)
        rate, table = min((link.h2d_bytes_per_s, link.h2d_table), (link.d2h_bytes_per_s, link.d2h_table))
        return Fabric(
            name=name,
            bytes_per_s=rate,
            latency_s=link.latency_s,
            measured=link.measured,
            source=link.source,
            known=link.known,
            table=table,
        )

    def nvme(self, name: str) -> Nvme:
        disks = self.disks[name].values
        return Nvme(
            name=name,
            memory_bytes=_bytes(disks.size_gb),
            read_bytes_per_s=_rate(disks, "read_gb_per_s", disks.efficiency),
            write_bytes_per_s=_rate(disks, "write_gb_per_s", disks.efficiency),
            latency_s=disks.latency_us * 1e-6,
            measured=disks.calibrated is not None,
            source=_source(disks),
            life_bytes=None if disks.life_tb is None else round(disks.life_tb * 1e12),
        )

    def host(self, name: str) -> Host:
        e = self.hosts[name]
        host, measured = e.values, e.values.calibrated
        if host.reserved_gb >= host.memory_gb:
            raise e.refuse("reserved_gb", f"less than memory_gb = {e.written('memory_gb')!r}")
        adam = _effective(host, "adam_gparams_per_s", 1)
        model = self.efficiency.adam_params_per_s(host.dram_peak_gb_per_s * GB, host.cores)
        dram = None if measured is None else measured.dram_gb_per_s
        return Host(
            name=name,
            memory_bytes=_bytes(host.memory_gb),
            reserved_bytes=_bytes(host.reserved_gb),
            dram_bytes_per_s=(host.dram_peak_gb_per_s * host.dram_efficiency if dram is None else dram) * GB,
            cores=host.cores,
            adam_params_per_s=model if adam is None else adam * 1e9,
            measured=measured is not None,
            source=_source(host),
            adam_table=_adam_curve(e),
            dram_measured=dram is not None,
            pinned_bytes=None if host.pinned_gb is None else _bytes(host.pinned_gb),
            known="fitted" if adam is None else "datasheet",
        )

    def framework(self, name: str) -> Framework:
        figures = self.frameworks[name].values
        return Framework(
            name=name,
            python_s=figures.python_us * 1e-6,
            wait_s=figures.wait_us * 1e-6,
            source=f"{figures.source} (checked {figures.checked})",
            known=figures.known,
        )

    def machine(self, name: str) -> Machine:
        """Returns the machine of that name. Raises UnknownName, and CatalogError for a part that is not in any
        table."""
        name = spelled(name, self.machines)
        if name not in self.machines:
            raise UnknownName("machine", name, (*self.machines, "here"), _OTHER_MACHINE)
        e = self.machines[name]
        given = e.values
        peer = self._joined(e, "peer_link", "gpu-gpu")
        node = self._ranks(e)
        host = self.host(e.known("host", "host", tuple(self.hosts)))
        if given.unified:
            host = self._shared_memory(e, host, node)
        root_rate = None if given.root_gb_per_s is None else given.root_gb_per_s * GB
        if given.gpus_per_root is not None:
            size = given.gpus_per_root
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
            notes=given.notes or "",
            slowdowns=_slowdowns(given),
            price_usd_per_hour=given.price_usd_per_hour,
            peer=peer,
            network=self._joined(e, "network", "node-node"),
            root_bytes_per_s=root_rate,
            unified=given.unified,
            nvme=None if given.disks is None else self.nvme(e.known("set of disks", "disks", tuple(self.disks))),
            framework=self._framework(e, node),
        )
        return with_nodes(machine, given.nodes)

    def _shared_memory(self, e: Entry[MachineEntry], host: Host, node: Sequence[Rank]) -> Host:
        """Returns the host of a unified machine. Its memory is the part that the GPUs leave. Raises CatalogError where
        they leave nothing.
        """
        left = host.memory_bytes - sum(rank.gpu.usable_bytes for rank in node)
        if left <= host.reserved_bytes:
            raise e.refuse(
                "host", f"one whose memory_gb is above usable_gb of {node[0].gpu.name} and reserved_gb together"
            )
        return replace(host, memory_bytes=left)

    def _framework(self, e: Entry[MachineEntry], node: Sequence[Rank]) -> Framework | None:
        """Returns the framework that the machine's entry names, else the catalog's first framework for cards of a known
        generation. Returns None where a GPU's measured launches, or its rates of whole iterations, include the
        framework's Python.
        """
        if e.values.framework is not None:
            return self.framework(e.known("framework", "framework", tuple(self.frameworks)))
        if any(rank.gpu.measured or rank.gpu.products is None for rank in node):
            return None
        return self.framework(next(iter(self.frameworks)))

    def _ranks(self, e: Entry[MachineEntry]) -> list[Rank]:
        """Returns the ranks of one node: `gpus` equal ranks, or the groups of `ranks` with their sequences per
        micro-batch."""
        groups = _groups(e)
        total = sum(gpus * batch for _, gpus, batch in groups)
        ranks: list[Rank] = []
        for where, gpus, batch in groups:
            link = e.known("link", f"{where}link", tuple(self.links))
            if self.links[link].values.connects != "host-gpu":
                raise e.refuse(f"{where}link", 'a link that connects = "host-gpu"')
            gpu = e.known("GPU", f"{where}gpu", tuple(self.gpus))
            ranks += [Rank(gpu=self.gpu(gpu), link=self.link(link), batch_share=batch / total)] * gpus
        return ranks

    def _joined(self, e: Entry[MachineEntry], field: str, connects: str) -> Fabric | None:
        if getattr(e.values, field) is None:
            return None
        name = e.known("link", field, tuple(self.links))
        if self.links[name].values.connects != connects:
            raise e.refuse(field, f'a link that connects = "{connects}"')
        return self.fabric(name)


def _groups(e: Entry[MachineEntry]) -> list[tuple[str, int, float]]:
    """Returns each group of equal GPUs in a node: (path of its fields, number of GPUs, sequences per GPU)."""
    given = e.values
    missing = [field for field in ("gpu", "gpus", "link") if getattr(given, field) is None]
    if given.ranks is not None:
        for field in ("gpu", "gpus", "link"):
            if field not in missing:
                raise e.refuse(field, "left out where ranks are listed")
        return [(f"ranks[{i}].", group.gpus, group.batch) for i, group in enumerate(given.ranks)]
    if missing:
        must = want(fields_of(MachineEntry)[missing[0]].kind)
        raise CatalogError(
            f"{e.file}: [{e.name}] {missing[0]} is missing; it must be {must} (or give [[machines.{e.name}.ranks]] "
            "tables with gpu, gpus, link and batch, for GPUs that differ)"
        )
    assert given.gpus is not None
    return [("", given.gpus, 1.0)]


def with_nodes(machine: Machine, nodes: int) -> Machine:
    """Returns `machine` with `nodes` nodes like its first node. The price grows in proportion. Raises CatalogError for
    several nodes without a network between them.
    """
    whole(f"machine {machine.name!r}: nodes", nodes, most=MOST_NODES_OF_A_MACHINE, error=CatalogError)
    if nodes > 1 and machine.network is None:
        raise CatalogError(
            f"machine {machine.name!r}: nodes = {nodes} but it has no network; a machine file gives a "
            'network with network = NAME, where NAME is a link with connects = "node-node"'
        )
    node = machine.ranks[: machine.local_ranks]
    ranks = tuple(replace(r, batch_share=r.batch_share * machine.nodes / nodes) for r in node) * nodes
    price = machine.price_usd_per_hour
    if price is not None:
        price = price * nodes / machine.nodes
    return replace(machine, ranks=ranks, nodes=nodes, price_usd_per_hour=price)


def _bytes(gigabytes: float) -> int:
    return round(gigabytes * GB)


def _or(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given


def _launch_s(e: Entry[GpuEntry], efficiency: Efficiency) -> float | None:
    """Returns the seconds of the launches of a moment. Returns None where the rates are those of whole iterations;
    raises CatalogError if such a card also has products by shape.
    """
    card, measured = e.values, e.values.calibrated
    launch = card.launch_us if measured is None or measured.launch_us is None else measured.launch_us
    if launch is not None:
        return launch * 1e-6
    if measured is None or not any(getattr(measured, f"{dtype}_tflops") for dtype in _DTYPES):
        return efficiency.launch_s
    if card.products is not None:
        raise e.refuse("launch_us", f"given, because [{e.name}.products] has figures of kernels, not of iterations")
    return None


def _products(e: Entry[GpuEntry], generation: Generation | None) -> ProductShape | None:
    """Returns products by shape: the card's own table, else its generation's figures. Returns None where a measured
    curve by flops replaces both. Raises CatalogError for a card that names a generation but not its SMs.
    """
    card = e.values
    given = card.products
    if given is not None:
        return ProductShape(
            sms=given.sms,
            tile=given.tile,
            wave_loss=given.wave_loss,
            depth=given.depth,
            bytes_per_s=given.gb_per_s * GB,
            kernel_s=given.kernel_us * 1e-6,
            flash=given.flash,
        )
    if generation is None or any(getattr(card.calibrated, f"{dtype}_table", None) for dtype in _DTYPES):
        return None
    if card.sms is None:
        raise e.refuse("sms", "given, because a generation's figures are those of one streaming multiprocessor")
    return generation.shape(card.sms, card.hbm_gb_per_s * GB)


def _known(card: GpuEntry, generation: Generation | None) -> str:
    """Returns how the rate of large products is known. This rate moves the seconds of a moment most; operators' share
    of the bandwidth and launches are assumed for every card.
    """
    if card.products is not None:
        return card.products.known
    if generation is None:
        return "datasheet"
    own = card.tensor_core_efficiency is not None
    return max("assumed" if own or generation.assumed else "fitted", "fitted", key=KNOWN.index)


def _curve(e: Entry[GpuEntry] | Entry[LinkEntry], field: str, best: str, size_unit: float, rate_unit: float) -> Curve:
    """Returns the calibrated curve `field`; () if there is none. Raises CatalogError where the entry's field `best` is
    above the curve's best rate. `best` may be lower, as for a throttled link.
    """
    curve = scaled(getattr(e.values.calibrated, field, None), size_unit, rate_unit)
    if not curve:
        return ()
    figure = getattr(e.values.calibrated, best)
    if figure is None:
        raise e.refuse(f"calibrated.{field}", f"given together with {best}, its best rate")
    if figure * rate_unit > 1.001 * best_rate(curve):
        raise e.refuse(f"calibrated.{best}", f"at most the best rate of {field}, {best_rate(curve) / rate_unit:.6g}")
    return curve


def _adam_curve(e: Entry[HostEntry]) -> Curve:
    """Returns Adam's rate by threads; () where it was not measured. Raises CatalogError where the entry's Adam rate is
    not on the curve.
    """
    measured = e.values.calibrated
    if measured is None or measured.adam_table is None:
        return ()
    curve = scaled(measured.adam_table, 1, 1e9)
    used = measured.adam_gparams_per_s
    if used is None:
        raise e.refuse("calibrated.adam_table", "given together with adam_gparams_per_s, one of its rates")
    if all(abs(rate / (used * 1e9) - 1) > 0.01 for _, rate in curve):
        rates = f"one of the rates of adam_table = {e.written('calibrated.adam_table')!r}"
        raise e.refuse("calibrated.adam_gparams_per_s", rates)
    if curve[-1][0] > e.values.cores:
        raise e.refuse("calibrated.adam_table", f"of at most cores = {e.values.cores} threads")
    return curve


def _slowdowns(given: MachineEntry) -> dict[str, float]:
    factors = {} if given.slowdowns is None else structs.asdict(given.slowdowns)
    return {name: factor for name, factor in factors.items() if factor is not None}


def _effective(part: Table, figure: str, efficiency: float) -> float | None:
    """Returns the calibrated figure, else the entry's figure times an efficiency; None where neither is given."""
    measured: float | None = getattr(getattr(part, "calibrated", None), figure, None)
    stated: float | None = getattr(part, figure)
    return stated * efficiency if measured is None and stated is not None else measured


def _rate(part: Table, figure: str, efficiency: float) -> float:
    """Returns the figure in bytes per second. Entries give it in GB per second."""
    rate = _effective(part, figure, efficiency)
    assert rate is not None, figure
    return rate * GB


def _source(part: GpuEntry | LinkEntry | HostEntry | DiskEntry) -> str:
    text = f"{part.source} (checked {part.checked})"
    measured = part.calibrated
    return text if measured is None else f"{text}; calibrated: {measured.source} (checked {measured.checked})"


def _read(raws: Mapping[str, Mapping[str, tuple[str, object]]], table: str) -> dict[str, Entry[Any]]:
    return {name: Entry.read(file, name, raw, TABLES[table]) for name, (file, raw) in raws[table].items()}


@cache
def _shipped() -> dict[str, dict[str, tuple[str, object]]]:
    """Returns the shipped entries: table -> name -> (file, raw table). Cached, because the files do not change while a
    program runs.
    """
    here = files("pstar_sim.catalog")
    return {
        table: {
            name: (f"{table}.toml", raw)
            for name, raw in parse_toml(f"{table}.toml", (here / f"{table}.toml").read_text(encoding="utf-8")).items()
        }
        for table in TABLES
    }


def _merged(file: str, known: object, given: object) -> object:
    """Returns a user's entry over the catalog's entry. Each given field replaces the entry's field and the calibrated
    field of the same name.
    """
    if not isinstance(known, dict) or not isinstance(given, dict):
        return given
    calibrated = known.get("calibrated")
    own_tables = ("products",) if isinstance(calibrated, dict) else ("calibrated", "products")
    merged = {**known, **given, **_own_tables(file, given, own_tables)}
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
    """Returns the shipped catalog, with a user's file over it. Raises CatalogError for a wrong entry in either."""
    raws = {table: dict(entries) for table, entries in _shipped().items()}
    own: list[str] = []
    main: str | None = None
    if user_file is not None:
        file = str(file_path("user_file", user_file, error=CatalogError))
        content = read_toml(Path(file), "machine file", VERSION)
        named = content.pop("machine", None)
        if named is not None and not isinstance(named, str):
            raise CatalogError(f"{file}: machine = {named!r}; must be the name of one of its machines")
        main = named
        for table, entries in content.items():
            if table not in TABLES or not isinstance(entries, dict):
                known = ", ".join(f"[{t}.NAME]" for t in TABLES)
                raise CatalogError(f"{file}: {table!r} is not a known table; it takes {known} and machine = NAME")
            for name, given in entries.items():
                raws[table][name] = (file, _given(file, raws[table].get(name), given))
                if table == "machines":
                    own.append(name)
    tables = {table: _read(raws, table) for table in TABLES}
    if main is not None and main not in tables["machines"]:
        raise CatalogError(f"{user_file}: machine = {main!r}; must be one of {', '.join(tables['machines'])}")
    return Catalog(
        gpus=tables["gpus"],
        links=tables["links"],
        hosts=tables["hosts"],
        disks=tables["disks"],
        frameworks=tables["frameworks"],
        efficiency=fitted(),
        machines=tables["machines"],
        own=tuple(own),
        main=main,
    )


def _given(file: str, known: tuple[str, object] | None, given: object) -> object:
    if known is not None:
        return _merged(file, known[1], given)
    if not isinstance(given, dict):
        return given
    return {**_own_origin(file), **given, **_own_tables(file, given, ("calibrated", "products"))}


def _own_origin(file: str) -> dict[str, object]:
    """Returns source and date of a user's file: the file is its own source, checked when it was last written."""
    from datetime import date

    return {"source": file, "checked": date.fromtimestamp(Path(file).stat().st_mtime)}


def _own_tables(file: str, given: Mapping[str, object], names: Sequence[str]) -> dict[str, object]:
    """Returns the tables of these names in a user's entry. A table without an origin of its own gets the entry's."""
    tables = {name: given.get(name) for name in names}
    return {name: {**_own_origin(file), **table} for name, table in tables.items() if isinstance(table, dict)}
