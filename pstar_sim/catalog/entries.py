"""Types of the entries of catalog files.

The tables of parts follow from the parts (figures.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from msgspec import defstruct

from pstar_sim.catalog.figures import LinkRate, Origin, table_of
from pstar_sim.catalog.machine import Framework, Gpu, Host, Link, Nvme
from pstar_sim.errors import CatalogError
from pstar_sim.schema.fields import Table, Text, between, filled, says
from pstar_sim.schema.reading import nearest, read_table

MOST_GPUS_OF_A_KIND = 1024
MOST_NODES_OF_A_MACHINE = 4096
_SlowDown = Annotated[float, between(1, 1000)]


class RankGroup(Table, frozen=True, kw_only=True):
    """One group of equal GPUs, in a node whose GPUs differ."""

    gpu: Annotated[Text, says("name of an entry of gpus")]
    gpus: Annotated[int, between(1, MOST_GPUS_OF_A_KIND), says("number of such GPUs")] = 1
    link: Annotated[Text, says("name of an entry of links")]
    batch: Annotated[float, between(1, 1e6), says("sequences of a micro-batch for each; only the proportion counts")]


_QUEUES = {"compute": "compute", "adam": "CPU Adam", "h2d": "a copy to the GPU", "d2h": "a copy from the GPU"}
_Slowdowns: Any = defstruct(
    "Slowdowns",
    [
        (f"{slow}_while_{other}", Annotated[_SlowDown | None, says(f"{what}, while {meanwhile} runs")], None)
        for slow, what in _QUEUES.items()
        for other, meanwhile in _QUEUES.items()
        if slow != other
    ]
    + [("compute_while_net", Annotated[_SlowDown | None, says("compute, while a collective runs")], None)],
    bases=(Table,),
    namespace={"__doc__": "Factors by which one queue takes longer while another queue works."},
    frozen=True,
    kw_only=True,
)


class MachineEntry(Origin, frozen=True, kw_only=True):
    """The parts of a node by name, and the number of such nodes."""

    gpu: Annotated[Text | None, says("name of an entry of gpus; left out where ranks are listed")] = None
    gpus: Annotated[
        Annotated[int, between(1, MOST_GPUS_OF_A_KIND)] | None, says("GPUs of a node; left out where ranks are listed")
    ] = None
    link: Annotated[Text | None, says("name of an entry of links, host-gpu; left out where ranks are listed")] = None
    ranks: Annotated[
        Annotated[tuple[RankGroup, ...], filled()] | None, says("GPUs that differ, instead of gpu, gpus and link")
    ] = None
    peer_link: Annotated[Text | None, says("joins the GPUs of a node; without one they use their links")] = None
    gpus_per_root: Annotated[Annotated[int, between(1, 64)] | None, says("GPUs that share one PCIe switch")] = None
    root_gb_per_s: Annotated[LinkRate | None, says("what a switch passes to and from the host; default: one link")] = (
        None
    )
    nodes: Annotated[int, between(1, MOST_NODES_OF_A_MACHINE), says("number of such nodes")] = 1
    network: Annotated[Text | None, says("joins the nodes")] = None
    disks: Annotated[Text | None, says("name of an entry of disks")] = None
    host: Annotated[Text, says("name of an entry of hosts")]
    unified: Annotated[
        bool, says("GPU and CPU work in one memory, the host's: the GPU takes usable_gb of it, the host has the rest")
    ] = False
    framework: Annotated[Text | None, says("name of an entry of frameworks, the Python that drives the GPUs")] = None
    notes: Annotated[Text | None, says("what `pstar machines` prints")] = None
    price_usd_per_hour: Annotated[Annotated[float, between(1e-3, 1e4)] | None, says("of one node")] = None
    slowdowns: Annotated[_Slowdowns | None, says("compute_while_adam = 1.2: compute takes 1.2 times as long then")] = (
        None
    )
    updates: Annotated[
        dict[str, Annotated[float, between(1e-4, 100)]] | None,
        says("lion = 0.4: the CPU updates by that rule 0.4 times as many parameters per second as by fused AdamW"),
    ] = None


TABLES: dict[str, type[Table]] = {
    "gpus": table_of(Gpu, "A card: an entry [gpus.NAME].", "Effective values of a card, as measured."),
    "links": table_of(
        Link,
        "A link between a host and a GPU, between the GPUs of a node, or between nodes.",
        "Effective values of a link, as measured.",
    ),
    "hosts": table_of(Host, "Memory and processors of a node.", "Effective values of a host, as measured."),
    "disks": table_of(
        Nvme,
        "The solid-state disks of a node, all together.",
        "Effective values of a node's disks, as measured.",
    ),
    "frameworks": table_of(Framework, "A framework's Python that drives the GPUs, with the hooks of a system."),
    "machines": MachineEntry,
}
"""Table of a catalog file -> type of its entries."""

_E = TypeVar("_E", bound=Table, covariant=True)


@dataclass(frozen=True)
class Entry(Generic[_E]):
    """One entry whose fields have been checked.

    place: the header of its table.
    """

    file: str
    name: str
    place: str
    raw: object
    values: _E

    @classmethod
    def read(cls, file: str, name: str, raw: object, table: type[_E], place: str = "") -> Entry[_E]:
        """Raises CatalogError for a missing, unknown or absurd field."""
        place = place or name
        return cls(file, name, place, raw, read_table(table, file, place, raw))

    def refuse(self, field: str, want: str) -> CatalogError:
        """For a value in range that contradicts another field.

        field: or "calibrated.usable_gb" in a table below.
        """
        *tables, last = field.split(".")
        place = ".".join((self.place, *tables))
        return CatalogError(f"{self.file}: [{place}] {last} = {self.written(field)!r}; must be {want}")

    def known(self, what: str, field: str, names: tuple[str, ...]) -> str:
        """The field names an entry of another table, which must exist."""
        name = str(self.written(field))
        if name not in names:
            raise self.refuse(field, f"the name of a {what}, such as {nearest(name, names) or ', '.join(names)}")
        return name

    def written(self, field: str) -> Any:
        """None where it was not.

        field: as for `refuse`, or "ranks[0].gpu".
        """
        value: Any = self.raw
        for part in field.split("."):
            part, _, index = part.removesuffix("]").partition("[")
            value = value.get(part)
            value = value[int(index)] if index else value
        return value
