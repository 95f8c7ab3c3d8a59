"""The catalog: TOML files as parts and machines, a user's file over the shipped ones.

A user's file holds entries [gpus.NAME], ..., [machines.NAME]. A new name extends the catalog and must be complete, but
for source and checked; a known one overrides the given fields.

[Note: which figure is used] Figures of an entry's `calibrated` table come first, field by field, as they are. A
datasheet peak is multiplied by the entry's efficiency, or that of its generation or of the efficiency model. A user's
datasheet figure displaces the calibrated one of the same name. Calibrated rates of a card without launch_us are of
whole iterations, with operators and launches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import structs

from pstar_sim.arguments import file_path, spelled, whole
from pstar_sim.catalog.curves import best_rate
from pstar_sim.catalog.efficiency import Efficiency, fitted
from pstar_sim.catalog.entries import MOST_NODES_OF_A_MACHINE, TABLES, Entry, MachineEntry
from pstar_sim.catalog.figures import Figure, Points, figures_of
from pstar_sim.catalog.generations import Generation, generations
from pstar_sim.catalog.machine import KNOWN, RESERVE_BYTES, Fabric, Framework, Gpu, Host, Link, Machine, Nvme, Rank
from pstar_sim.catalog.product_shape import ProductShape
from pstar_sim.dtypes import DTYPES
from pstar_sim.errors import CatalogError, UnknownName
from pstar_sim.schema.fields import fields_of, want
from pstar_sim.schema.parsing import parse_toml, read_toml
from pstar_sim.schema.reading import Refusals
from pstar_sim.units import GB, GIB
from pstar_sim.words import letters

VERSION = 1
"""Newest version of a user's file. The key `version` at the head of a file gives the file's version; files of the first
edition lack the key."""

_ORIGIN = ("source", "checked")
_OTHER_MACHINE = (
    "any other machine: the most similar name with --gpu-memory, --host-memory, --gpus and --set, or a TOML file"
)

_DISPLACED = {
    figure.calibrated_key: figure.best if isinstance(figure, Points) else figure.name
    for part in (Gpu, Link, Host)
    for figure in figures_of(part)
}
"""Calibrated figure -> the entry's figure: a user's figure displaces both. A curve goes with its rate."""


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """efficiency: what entries leave out ([Note: the efficiency model]).
    own: from a user's file.
    main: chosen by it.
    """

    gpus: Mapping[str, Entry[Any]]
    links: Mapping[str, Entry[Any]]
    hosts: Mapping[str, Entry[Any]]
    disks: Mapping[str, Entry[Any]]
    frameworks: Mapping[str, Entry[Any]]
    machines: Mapping[str, Entry[MachineEntry]]
    efficiency: Efficiency
    own: tuple[str, ...] = ()
    main: str | None = None

    def gpu(self, name: str) -> Gpu:
        e = self.gpus[name]
        card = e.values
        generation = (
            None
            if card.generation is None
            else generations()[e.known("generation", "generation", tuple(generations()))]
        )
        shares = {"hbm_efficiency": self.efficiency.hbm, "fp32_efficiency": self.efficiency.matmul}
        if generation is not None:
            shares["tensor_core_efficiency"] = generation.plateau
        figures = {"context_bytes": RESERVE_BYTES} | _figures(Gpu, e, shares)
        figures.setdefault("usable_bytes", figures["memory_bytes"])
        if not figures["context_bytes"] < figures["usable_bytes"] <= figures["memory_bytes"]:
            raise e.refuse("usable_gb", "more than context_gb and at most memory_gb, calibrated or not")
        if "launch_s" not in figures:
            figures["launch_s"] = _launch_s(e, self.efficiency)
        products = None if figures["launch_s"] is None else _products(e, generation)
        return Gpu(**figures, known=_known(card, generation), products=products)

    def link(self, name: str) -> Link:
        return Link(**{"pageable_bytes_per_s": self.efficiency.pageable_bytes_per_s} | _figures(Link, self.links[name]))

    def fabric(self, name: str) -> Fabric:
        """At the slower of the link's two directions."""
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
        e = self.disks[name]
        disks = Nvme(**_figures(Nvme, e))
        if one := disks.only_rate_beside:
            raise e.refuse(f"{one}_beside_gb_per_s", "written with the rate of the other direction")
        return disks

    def host(self, name: str) -> Host:
        e = self.hosts[name]
        host, figures = e.values, _figures(Host, e)
        if host.reserved_gb >= host.memory_gb:
            raise e.refuse("reserved_gb", f"less than memory_gb = {e.written('memory_gb')!r}")
        if figures.get("adam_table", ((0, 0),))[-1][0] > host.cores:
            raise e.refuse("calibrated.adam_table", f"of at most cores = {host.cores} threads")
        model = self.efficiency.adam_params_per_s(host.dram_peak_gb_per_s * GB, host.cores)
        return Host(
            **{"adam_params_per_s": model} | figures,
            adam_params_per_core_s=self.efficiency.adam_params_per_core_s,
            dram_measured=figures["measured"] and host.calibrated.dram_gb_per_s is not None,
            known="datasheet" if "adam_params_per_s" in figures else "fitted",
        )

    def framework(self, name: str) -> Framework:
        return Framework(**_figures(Framework, self.frameworks[name]))

    def _known_machines(self, name: str) -> list[str]:
        """In the catalog, for 8xa100-80, and a GPU alone, such as H100 or 8 x H100: all machines that have so many of
        it. Raises UnknownName where others have it."""
        number = re.fullmatch(r"(\d{1,3}) ?[x*] ?(.+)|(.+?) ?[x*] ?(\d{1,3})", name)  # more are a model: rtx3090
        gpu, count = (name, "1") if number is None else (number[2] or number[3], number[1] or number[4])
        for known in (spelled(name, self.machines), spelled(f"{gpu}x{count}", self.machines)):
            if known in self.machines:
                return [known]
        word = re.sub("(sxm[2-6]?|gb)$", "", letters(gpu))
        word = f"rtx{word}" if word.isdecimal() else word
        alike = {
            known: entry.values.gpus
            for known, entry in self.machines.items()
            if entry.values.gpu is not None
            and word in (letters(entry.values.gpu), letters(entry.values.gpu.split("-")[0]))
        }
        same = [known for known, gpus in alike.items() if gpus == int(count)]
        named = [known for known in same if known.startswith(word[:4])]
        if alike and not same:
            hint = f"with --gpus {count}, and what differs by --gpu-memory, --host-memory and --set"
            raise UnknownName("machine", name, tuple(alike), hint, guess=False)
        if same and not named:
            raise UnknownName("machine", name, tuple(same), _OTHER_MACHINE)
        return named

    def machine(self, name: str) -> Machine:
        """Raises UnknownName, and CatalogError for a part in no table."""
        alike = self._known_machines(name)
        if len(alike) != 1:
            raise UnknownName("machine", name, tuple(alike) or (*self.machines, "here"), _OTHER_MACHINE)
        (name,) = alike
        e = self.machines[name]
        given = e.values
        wrong = Refusals()
        peer = wrong.of(lambda: self._joined(e, "peer_link", "gpu-gpu"))
        network = wrong.of(lambda: self._joined(e, "network", "node-node"))
        node = wrong.of(lambda: self._ranks(e))
        host = wrong.of(lambda: self.host(e.known("host", "host", tuple(self.hosts))))
        disks = wrong.of(lambda: self._disks(e))
        wrong.say()
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
            slowdowns=_factors(given),
            updates=given.updates or {},
            price_usd_per_hour=given.price_usd_per_hour,
            peer=peer,
            network=network,
            root_bytes_per_s=root_rate,
            unified=given.unified,
            nvme=disks,
            framework=self._framework(e, node),
        )
        return with_nodes(machine, given.nodes)

    def _disks(self, e: Entry[MachineEntry]) -> Nvme | None:
        return None if e.values.disks is None else self.nvme(e.known("set of disks", "disks", tuple(self.disks)))

    def _shared_memory(self, e: Entry[MachineEntry], host: Host, node: Sequence[Rank]) -> Host:
        """What the GPUs leave. Raises CatalogError where they leave nothing."""
        left = host.memory_bytes - sum(rank.gpu.usable_bytes for rank in node)
        if left <= host.reserved_bytes:
            raise e.refuse(
                "host", f"one whose memory_gb is above usable_gb of {node[0].gpu.name} and reserved_gb together"
            )
        return replace(host, memory_bytes=left)

    def _framework(self, e: Entry[MachineEntry], node: Sequence[Rank]) -> Framework | None:
        """The entry's, else the catalog's first for cards of a known generation. None where measured launches, or rates
        of whole iterations, include the framework's Python."""
        if e.values.framework is not None:
            return self.framework(e.known("framework", "framework", tuple(self.frameworks)))
        if any(rank.gpu.measured or rank.gpu.products is None for rank in node):
            return None
        return self.framework(next(iter(self.frameworks)))

    def _ranks(self, e: Entry[MachineEntry]) -> list[Rank]:
        groups = _groups(e)
        total = sum(gpus * batch for _, gpus, batch in groups)
        parts: list[tuple[Gpu, Link, float, int]] = []
        wrong = Refusals()
        for where, gpus, batch in groups:
            link = wrong.of(partial(self._host_link, e, f"{where}link"))
            parts.append((wrong.of(partial(self._card, e, f"{where}gpu")), link, batch / total, gpus))
        wrong.say()
        ranks = ([Rank(gpu=gpu, link=link, batch_share=share)] * gpus for gpu, link, share, gpus in parts)
        return [rank for group in ranks for rank in group]

    def _card(self, e: Entry[MachineEntry], field: str) -> Gpu:
        return self.gpu(e.known("GPU", field, tuple(self.gpus)))

    def _host_link(self, e: Entry[MachineEntry], field: str) -> Link:
        name = e.known("link", field, tuple(self.links))
        if self.links[name].values.connects != "host-gpu":
            raise e.refuse(field, 'a link that connects = "host-gpu"')
        return self.link(name)

    def _joined(self, e: Entry[MachineEntry], field: str, connects: str) -> Fabric | None:
        if getattr(e.values, field) is None:
            return None
        name = e.known("link", field, tuple(self.links))
        if self.links[name].values.connects != connects:
            raise e.refuse(field, f'a link that connects = "{connects}"')
        return self.fabric(name)


def _factors(given: MachineEntry) -> dict[str, float]:
    stated = {} if given.slowdowns is None else structs.asdict(given.slowdowns)
    return {name: factor for name, factor in stated.items() if factor is not None}


def _groups(e: Entry[MachineEntry]) -> list[tuple[str, int, float]]:
    """(path of its fields, GPUs, sequences per GPU) of each in a node."""
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
            f"{e.file}: [{e.place}] {missing[0]} is missing; it must be {must} (or give [[machines.{e.name}.ranks]] "
            "tables with gpu, gpus, link and batch, for GPUs that differ)"
        )
    assert given.gpus is not None
    return [("", given.gpus, 1.0)]


def with_nodes(machine: Machine, nodes: int) -> Machine:
    """All like the first, with the price in proportion. Raises CatalogError for several nodes without a network."""
    whole(f"machine {machine.name!r}: nodes", nodes, most=MOST_NODES_OF_A_MACHINE, error=CatalogError)
    if nodes > 1 and machine.network is None:
        raise CatalogError(
            f"machine {machine.name!r}: nodes = {nodes}, and no network joins nodes of it; a machine file names one "
            "(network = NAME, such as ib-ndr-x8; pstar machines --links lists them)"
        )
    return machine.with_nodes(nodes)


def _launch_s(e: Entry[Any], efficiency: Efficiency) -> float | None:
    """For an entry without them, None where rates are of whole iterations. Raises CatalogError if such a card also has
    products by shape."""
    card = e.values
    if not any(getattr(card.calibrated, f"{dtype}_tflops", None) for dtype in DTYPES):
        return efficiency.launch_s
    if card.products is not None:
        raise e.refuse("launch_us", f"given, because [{e.place}.products] has figures of kernels, not of iterations")
    return None


def _products(e: Entry[Any], generation: Generation | None) -> ProductShape | None:
    """The card's own, else its generation's figures. None where a measured curve by flops replaces both. Raises
    CatalogError for a generation without SMs."""
    card = e.values
    if card.products is not None:
        figures = {f.attribute: f.from_file(getattr(card.products, f.name)) for f in figures_of(ProductShape)}
        return ProductShape(**figures)
    if generation is None or any(getattr(card.calibrated, f"{dtype}_table", None) for dtype in DTYPES):
        return None
    if card.sms is None:
        raise e.refuse("sms", "given, because a generation's figures are those of one streaming multiprocessor")
    return generation.shape(card.sms, card.hbm_gb_per_s * GB)


def _known(card: Any, generation: Generation | None) -> str:
    """For the rate of large products, which moves a moment's seconds most."""
    if card.products is not None:
        return str(card.products.known)
    if generation is None:
        return "datasheet"
    own = card.tensor_core_efficiency is not None
    return max("assumed" if own or generation.assumed else "fitted", "fitted", key=KNOWN.index)


def _figures(part: type, e: Entry[Any], shares: Mapping[str, float] = MappingProxyType({})) -> dict[str, Any]:
    """Name, origin and given figures, by attribute. Raises CatalogError for an unknown share, and a curve that
    contradicts its rate.

    shares: that an entry may leave out.
    """
    measured = getattr(e.values, "calibrated", None)
    found: dict[str, Any] = {"name": e.name, "source": _source(e.values)}
    if hasattr(e.values, "calibrated"):
        found["measured"] = measured is not None
    for figure in figures_of(part):
        value = getattr(measured, figure.calibrated_key, None) if figure.calibrated else None
        if isinstance(figure, Points):
            _check_curve(e, figure, value)
        elif value is None:
            value = _stated(e, figure, shares)
        if value is not None:
            value = figure.from_file(value)
            found[figure.attribute] = {**found.get(figure.attribute, {}), figure.item: value} if figure.item else value
    return found


def _stated(e: Entry[Any], figure: Figure, shares: Mapping[str, float]) -> Any:
    value = getattr(e.values, figure.name, None)
    if value is None or not figure.share:
        return value
    share = getattr(e.values, figure.share)
    if share is None and figure.share not in shares:
        raise e.refuse(figure.share, f"given beside {figure.name}, or the card's generation and sms")
    return value * (shares[figure.share] if share is None else share)


def _check_curve(e: Entry[Any], points: Points, curve: Sequence[tuple[float, float]] | None) -> None:
    """Refuse a curve without its best rate, and a rate above the curve's best (lower for a throttled link). Adam's is
    one of the curve's.
    """
    if curve is None:
        return
    used = getattr(e.values.calibrated, points.best)
    if points.exact:
        if used is None:
            raise e.refuse(f"calibrated.{points.name}", f"given together with {points.best}, one of its rates")
        if all(abs(rate / used - 1) > 0.01 for _, rate in curve):
            rates = f"one of the rates of {points.name} = {e.written(f'calibrated.{points.name}')!r}"
            raise e.refuse(f"calibrated.{points.best}", rates)
        return
    if used is None:
        raise e.refuse(f"calibrated.{points.name}", f"given together with {points.best}, its best rate")
    if used > 1.001 * best_rate(tuple(curve)):
        raise e.refuse(
            f"calibrated.{points.best}", f"at most the best rate of {points.name}, {best_rate(tuple(curve)):.6g}"
        )


def _source(part: Any) -> str:
    text = f"{part.source} (checked {part.checked})"
    measured = getattr(part, "calibrated", None)
    return text if measured is None else f"{text}; calibrated: {measured.source} (checked {measured.checked})"


def _in_gb(file: str, table: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes in GiB (memory_gib = 24) in GB. Raises CatalogError for both."""
    keys = fields_of(TABLES[table])

    def converted(name: str, raw: dict[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, value in raw.items():
            in_gb = f"{key.removesuffix('_gib')}_gb"
            if not key.endswith("_gib") or in_gb not in keys or not isinstance(value, (int, float)):
                fields[key] = value
            elif in_gb in raw:
                raise CatalogError(f"{file}: [{table}.{name}] {key} = {value!r} beside {in_gb}; give one of them")
            else:
                fields[in_gb] = value * GIB / GB
        return fields

    return {name: converted(name, raw) if isinstance(raw, dict) else raw for name, raw in entries.items()}


def _read(raws: Mapping[str, Mapping[str, tuple[str, object]]], table: str, wrong: Refusals) -> dict[str, Entry[Any]]:
    shipped = _shipped()[table]
    return {
        name: wrong.of(
            partial(_shipped_entry, table, name)
            if row is shipped.get(name)
            else partial(Entry.read, row[0], name, row[1], TABLES[table], f"{table}.{name}")
        )
        for name, row in raws[table].items()
    }


@cache
def _shipped_entry(table: str, name: str) -> Entry[Any]:
    file, raw = _shipped()[table][name]
    return Entry.read(file, name, raw, TABLES[table])


@cache
def _shipped() -> dict[str, dict[str, tuple[str, object]]]:
    shipped: dict[str, dict[str, tuple[str, object]]] = {}
    for table in TABLES:
        file = f"{table}.toml"
        entries = parse_toml(file, (files("pstar_sim.catalog") / file).read_text(encoding="utf-8"))
        shipped[table] = {name: (file, raw) for name, raw in _in_gb(file, table, entries).items()}
    return shipped


def _merged(file: str, known: object, given: object) -> object:
    """A user's field replaces the catalog's, and the calibrated one of the same name."""
    if not isinstance(known, dict) or not isinstance(given, dict):
        return given
    calibrated = known.get("calibrated")
    own_tables = ("products",) if isinstance(calibrated, dict) else ("calibrated", "products")
    merged = {**known, **given, **_own_tables(file, given, own_tables)}
    if isinstance(calibrated, dict):
        kept = {k: v for k, v in calibrated.items() if k in _ORIGIN or not {k, _DISPLACED.get(k, k)} & given.keys()}
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
    """A user's file over the shipped ones. Raises CatalogError for a wrong entry in either."""
    raws = {table: dict(entries) for table, entries in _shipped().items()}
    own: list[str] = []
    main: str | None = None
    wrong = Refusals()
    if user_file is not None:
        file = str(file_path("user_file", user_file, error=CatalogError))
        content = read_toml(Path(file), "machine file", VERSION)
        named = content.pop("machine", None)
        if named is not None and not isinstance(named, str):
            raise CatalogError(f"{file}: machine = {named!r}; must be the name of one of its machines")
        main = named
        given_tables = {name: rows for name, rows in content.items() if name in TABLES and isinstance(rows, dict)}
        if unknown := [name for name in content if name not in given_tables]:
            known = ", ".join(f"[{t}.NAME]" for t in TABLES)
            are = "is not a known table" if len(unknown) == 1 else "are not known tables"
            what = f"{', '.join(map(repr, unknown))} {are}; it takes {known} and machine = NAME"
            wrong.errors.append(CatalogError(f"{file}: {what}"))
        for table, entries in given_tables.items():
            for name, given in (wrong.of(partial(_in_gb, file, table, entries)) or {}).items():
                raws[table][name] = (file, _given(file, raws[table].get(name), given))
                if table == "machines":
                    own.append(name)
    tables = {table: _read(raws, table, wrong) for table in TABLES}
    wrong.say()
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
    """The file is its own source, checked when last written."""
    from datetime import date

    return {"source": file, "checked": date.fromtimestamp(Path(file).stat().st_mtime)}


def _own_tables(file: str, given: Mapping[str, object], names: Sequence[str]) -> dict[str, object]:
    tables = {name: given.get(name) for name in names}
    return {name: {**_own_origin(file), **table} for name, table in tables.items() if isinstance(table, dict)}
