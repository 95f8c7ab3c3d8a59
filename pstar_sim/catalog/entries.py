"""The tables of catalog files, field by field: the fields of an entry of gpus.toml, of its sister files, or of a user's
file.

Units are in the names: gb is 1e9 bytes, gb_per_s 1e9 bytes per second, tflops 1e12 flops per second, us 1e-6 s. A
`calibrated` table holds effective values with a source of their own; catalog.py says which figure is used ([Note: which
figure is used]).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from pstar_sim.catalog import curves
from pstar_sim.errors import CatalogError
from pstar_sim.schema.fields import Checked, Curve, Table, Text, between, curve, filled, says
from pstar_sim.schema.reading import nearest, read_table

__all__ = [
    "MOST_GPUS_OF_A_KIND",
    "MOST_NODES_OF_A_MACHINE",
    "TABLES",
    "DiskEntry",
    "Entry",
    "FrameworkEntry",
    "GpuEntry",
    "HostEntry",
    "LinkEntry",
    "MachineEntry",
    "ProductsEntry",
    "scaled",
]

MOST_GPUS_OF_A_KIND = 1024
MOST_NODES_OF_A_MACHINE = 4096
_Gigabytes = Annotated[float, between(0.001, 1e5)]
_Rate = Annotated[float, between(0.01, 2e4)]
_LinkRate = Annotated[float, between(0.001, 2e3)]
_Tflops = Annotated[float, between(1e-4, 1e5)]
_Efficiency = Annotated[float, between(0.01, 1)]
_Adam = Annotated[float, between(1e-3, 1e3)]
_Latency = Annotated[float, between(0, 1e5)]
_SlowDown = Annotated[float, between(1, 1000)]
_Extent = Annotated[int, between(1, 100_000)]
_Tile = tuple[_Extent, _Extent]
Known = Literal["measured", "fitted", "datasheet", "assumed"]


class _Origin(Table, frozen=True, kw_only=True):
    """Where the figures of a table come from."""

    source: Annotated[Text, says("where the figures come from; a user's file is its own source")]
    checked: Annotated[Checked, says("date when the figure was looked up; of a user's file, when it was last written")]


class CalibratedGpu(_Origin, frozen=True, kw_only=True):
    """Effective values of a card, as measured."""

    usable_gb: Annotated[_Gigabytes | None, says("what a process can count on")] = None
    hbm_gb_per_s: Annotated[_Rate | None, says("memory bandwidth")] = None
    fp32_tflops: Annotated[_Tflops | None, says("matrix rate")] = None
    fp16_tflops: Annotated[_Tflops | None, says("matrix rate")] = None
    bf16_tflops: Annotated[_Tflops | None, says("matrix rate")] = None
    fp32_table: Annotated[Curve | None, curve("GFLOP of a product", "TFLOP/s"), says("rate by size of a product")] = (
        None
    )
    fp16_table: Annotated[Curve | None, curve("GFLOP of a product", "TFLOP/s"), says("rate by size of a product")] = (
        None
    )
    bf16_table: Annotated[Curve | None, curve("GFLOP of a product", "TFLOP/s"), says("rate by size of a product")] = (
        None
    )
    operators_gb_per_s: Annotated[_Rate | None, says("bandwidth that the operators of a moment reach")] = None
    launch_us: Annotated[_Latency | None, says("kernels and hooks of one moment, whatever their size")] = None


class ProductsEntry(_Origin, frozen=True, kw_only=True):
    """Figures by which the rate of a matrix product depends on its shape (product_shape.py)."""

    sms: Annotated[int, between(1, 100_000), says("streaming multiprocessors")]
    tile: Annotated[_Tile, says("rows and columns of a tile of the result")]
    wave_loss: Annotated[float, between(0, 1), says("share of the last wave's idle time that is lost")]
    depth: Annotated[float, between(0, 1e6), says("terms of a dot product that a tile's beginning and end take")]
    gb_per_s: Annotated[_Rate, says("rate at which factors and result move through the card's memory")]
    kernel_us: Annotated[_Latency, says("beginning and end of a kernel")]
    flash: Annotated[_Efficiency, says("share of the rate of large products that fused attention reaches")] = 1.0
    known: Annotated[Known, says("how the figures are known")] = "measured"


class GpuEntry(_Origin, frozen=True, kw_only=True):
    """A card: an entry [gpus.NAME]."""

    memory_gb: Annotated[_Gigabytes, says("what the card is sold with")]
    usable_gb: Annotated[_Gigabytes, says("what a process can count on")]
    context_gb: Annotated[float, between(0, 100), says("driver context, libraries, fragmentation; part of usable_gb")]
    hbm_gb_per_s: Annotated[_Rate, says("memory bandwidth, from the datasheet")]
    hbm_efficiency: Annotated[
        _Efficiency | None, says("effective memory bandwidth over the peak; left out: that of the efficiency model")
    ] = None
    fp32_tflops: Annotated[_Tflops, says("peak matrix rate, dense, no TF32")]
    fp16_tflops: Annotated[_Tflops | None, says("peak of the tensor cores; left out where the card has no fp16")] = None
    bf16_tflops: Annotated[_Tflops | None, says("peak of the tensor cores; left out where the card has no bf16")] = None
    fp32_efficiency: Annotated[
        _Efficiency | None, says("fp32 rate of large products over the peak; left out: that of the efficiency model")
    ] = None
    tensor_core_efficiency: Annotated[
        _Efficiency | None, says("16-bit rate of large products over the peak; left out: that of the generation")
    ] = None
    launch_us: Annotated[
        _Latency | None, says("beginnings and ends of a moment's kernels; left out: those of the efficiency model")
    ] = None
    sms: Annotated[Annotated[int, between(1, 100_000)] | None, says("streaming multiprocessors")] = None
    generation: Annotated[Text | None, says("name of an entry of generations.toml: rate of products by shape")] = None
    products: Annotated[ProductsEntry | None, says("rate of products by shape, instead of the generation's")] = None
    device_names: Annotated[tuple[Text, ...], says("what nvidia-smi calls the card")] = ()
    calibrated: Annotated[CalibratedGpu | None, says("effective values; they are used as they are")] = None


class CalibratedLink(_Origin, frozen=True, kw_only=True):
    """Effective values of a link, as measured."""

    h2d_gb_per_s: Annotated[_LinkRate | None, says("large pinned copies to the GPU")] = None
    d2h_gb_per_s: Annotated[_LinkRate | None, says("large pinned copies from the GPU")] = None
    pageable_gb_per_s: Annotated[_LinkRate | None, says("copies from or to memory that is not pinned")] = None
    h2d_table: Annotated[Curve | None, curve("MB of a copy", "GB/s"), says("rate by size of a copy")] = None
    d2h_table: Annotated[Curve | None, curve("MB of a copy", "GB/s"), says("rate by size of a copy")] = None


class LinkEntry(_Origin, frozen=True, kw_only=True):
    """A link between a host and a GPU, between the GPUs of a node, or between nodes."""

    connects: Annotated[Literal["host-gpu", "gpu-gpu", "node-node"], says("a machine's link, peer_link or network")]
    h2d_gb_per_s: Annotated[_LinkRate, says("line rate to the GPU; between nodes, out of a whole node")]
    d2h_gb_per_s: Annotated[_LinkRate, says("line rate from the GPU; between nodes, into a whole node")]
    efficiency: Annotated[_Efficiency, says("what a large pinned copy gets of the line rate")]
    latency_us: Annotated[_Latency, says("of one asynchronous copy")]
    duplex: Annotated[bool, says("whether both directions run at full rate at once")]
    known: Annotated[Known, says("how the rates are known")] = "datasheet"
    pageable_gb_per_s: Annotated[_LinkRate | None, says("a copy from or to memory that is not pinned, either way")] = (
        None
    )
    calibrated: Annotated[CalibratedLink | None, says("effective values; they are used as they are")] = None


class CalibratedHost(_Origin, frozen=True, kw_only=True):
    """Effective values of a host, as measured."""

    adam_gparams_per_s: Annotated[_Adam | None, says("fused AdamW over fp32 states, all cores")] = None
    adam_table: Annotated[Curve | None, curve("threads", "billion parameters/s"), says("rate by threads")] = None
    dram_gb_per_s: Annotated[_Rate | None, says("bandwidth of DRAM, used as it is")] = None


class HostEntry(_Origin, frozen=True, kw_only=True):
    """Memory and processors of a node."""

    memory_gb: Annotated[_Gigabytes, says("DRAM")]
    reserved_gb: Annotated[float, between(0, 1e4), says("left for the system and the training process itself")]
    pinned_gb: Annotated[_Gigabytes | None, says("the most that can be pinned; left out where all of it can")] = None
    dram_peak_gb_per_s: Annotated[_Rate, says("channels x transfer rate x 8 bytes, of the memory that copies reach")]
    dram_efficiency: Annotated[_Efficiency, says("what streaming reads and writes get of the peak")]
    cores: Annotated[int, between(1, 4096), says("physical cores that Adam may use")]
    adam_gparams_per_s: Annotated[
        _Adam | None, says("fused AdamW over fp32 states, alone on the host; left out: what DRAM and cores allow")
    ] = None
    calibrated: Annotated[CalibratedHost | None, says("effective values; they are used as they are")] = None


class CalibratedDisk(_Origin, frozen=True, kw_only=True):
    """Effective values of a node's disks, as measured."""

    read_gb_per_s: Annotated[_LinkRate | None, says("large sequential reads")] = None
    write_gb_per_s: Annotated[_LinkRate | None, says("large sequential writes")] = None


class DiskEntry(_Origin, frozen=True, kw_only=True):
    """The solid-state disks of a node, all together."""

    size_gb: Annotated[float, between(1, 1e7), says("what a training job may fill")]
    read_gb_per_s: Annotated[_LinkRate, says("large sequential reads of all disks at once, from the datasheet")]
    write_gb_per_s: Annotated[_LinkRate, says("large sequential writes of all disks at once, from the datasheet")]
    efficiency: Annotated[_Efficiency, says("what such accesses get of the datasheet's rates")]
    latency_us: Annotated[_Latency, says("of one access")]
    life_tb: Annotated[
        Annotated[float, between(1, 1e7)] | None, says("TB that may be written to all disks, by the maker's rating")
    ] = None
    calibrated: Annotated[CalibratedDisk | None, says("effective values; they are used as they are")] = None


class RankGroup(Table, frozen=True, kw_only=True):
    """One group of equal GPUs, in a node whose GPUs differ."""

    gpu: Annotated[Text, says("name of an entry of gpus")]
    gpus: Annotated[int, between(1, MOST_GPUS_OF_A_KIND), says("number of such GPUs")] = 1
    link: Annotated[Text, says("name of an entry of links")]
    batch: Annotated[float, between(1, 1e6), says("sequences of a micro-batch for each; only the proportion counts")]


class Slowdowns(Table, frozen=True, kw_only=True):
    """Factors by which one queue takes longer while another queue works."""

    compute_while_adam: Annotated[_SlowDown | None, says("compute, while CPU Adam runs")] = None
    compute_while_h2d: Annotated[_SlowDown | None, says("compute, while a copy to the GPU runs")] = None
    compute_while_d2h: Annotated[_SlowDown | None, says("compute, while a copy from the GPU runs")] = None
    adam_while_compute: Annotated[_SlowDown | None, says("CPU Adam, while compute runs")] = None
    adam_while_h2d: Annotated[_SlowDown | None, says("CPU Adam, while a copy to the GPU runs")] = None
    adam_while_d2h: Annotated[_SlowDown | None, says("CPU Adam, while a copy from the GPU runs")] = None
    h2d_while_compute: Annotated[_SlowDown | None, says("a copy to the GPU, while compute runs")] = None
    h2d_while_adam: Annotated[_SlowDown | None, says("a copy to the GPU, while CPU Adam runs")] = None
    h2d_while_d2h: Annotated[_SlowDown | None, says("a copy to the GPU, while a copy from the GPU runs")] = None
    d2h_while_compute: Annotated[_SlowDown | None, says("a copy from the GPU, while compute runs")] = None
    d2h_while_adam: Annotated[_SlowDown | None, says("a copy from the GPU, while CPU Adam runs")] = None
    d2h_while_h2d: Annotated[_SlowDown | None, says("a copy from the GPU, while a copy to the GPU runs")] = None


class FrameworkEntry(_Origin, frozen=True, kw_only=True):
    """A framework's Python that drives the GPUs, with the hooks of a system."""

    python_us: Annotated[_Latency, says("Python of one moment; hidden as long as the GPU works longer")]
    wait_us: Annotated[_Latency, says("time of one moment in which the GPU waits for Python, however long it works")]
    known: Annotated[Known, says("how the figures are known")] = "assumed"


class MachineEntry(_Origin, frozen=True, kw_only=True):
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
    root_gb_per_s: Annotated[_LinkRate | None, says("what a switch passes to and from the host; default: one link")] = (
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
    slowdowns: Annotated[Slowdowns | None, says("compute_while_adam = 1.2: compute takes 1.2 times as long then")] = (
        None
    )


TABLES: dict[str, type[Table]] = {
    "gpus": GpuEntry,
    "links": LinkEntry,
    "hosts": HostEntry,
    "disks": DiskEntry,
    "frameworks": FrameworkEntry,
    "machines": MachineEntry,
}
"""Table of a catalog file -> type of its entries."""

_E = TypeVar("_E", bound=Table, covariant=True)


@dataclass(frozen=True)
class Entry(Generic[_E]):
    """One entry whose fields have been checked.

    file: the file with the entry, for messages.
    raw: the entry as written.
    values: its fields.
    """

    file: str
    name: str
    raw: object
    values: _E

    @classmethod
    def read(cls, file: str, name: str, raw: object, table: type[_E]) -> Entry[_E]:
        """Check the entry's fields. Returns the entry. Raises CatalogError for a missing, unknown or absurd field."""
        return cls(file, name, raw, read_table(table, file, name, raw))

    def refuse(self, field: str, want: str) -> CatalogError:
        """Returns the error for a value that is in range but contradicts another field.

        field: path of the field, such as "calibrated.usable_gb" in a table below.
        """
        *tables, last = field.split(".")
        place = ".".join((self.name, *tables))
        return CatalogError(f"{self.file}: [{place}] {last} = {self.written(field)!r}; must be {want}")

    def known(self, what: str, field: str, names: tuple[str, ...]) -> str:
        """Returns the value of a field that names an entry of another table. Raises CatalogError if no entry has that
        name."""
        name = str(self.written(field))
        if name not in names:
            raise self.refuse(field, f"the name of a {what}, such as {nearest(name, names) or ', '.join(names)}")
        return name

    def written(self, field: str) -> Any:
        """Returns the value of a field as it was written, None where it was not.

        field: as for `refuse`, or "ranks[0].gpu".
        """
        value: Any = self.raw
        for part in field.split("."):
            part, _, index = part.removesuffix("]").partition("[")
            value = value.get(part)
            value = value[int(index)] if index else value
        return value


def scaled(points: Curve | None, size_unit: float, rate_unit: float) -> curves.Curve:
    """Returns a curve in base units; () where the entry gives none."""
    return tuple((size * size_unit, rate * rate_unit) for size, rate in points or ())
