"""The hardware that a plan is made for, as plain values.

A wrong one raises CatalogError when made. `catalog.py` and the TOML files say where numbers come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Literal, TypeVar, get_args

from pstar_sim.arguments import instance, number, text, whole
from pstar_sim.catalog.curves import Curve, rate_at, share_at
from pstar_sim.catalog.figures import (
    AdamRate,
    Figure,
    Gigabytes,
    Key,
    Known,
    Latency,
    LinkRate,
    Points,
    Rate,
    Share,
    Tflops,
    check_figures,
    table_of,
    worst_of,
)
from pstar_sim.catalog.product_shape import ProductShape
from pstar_sim.errors import CatalogError
from pstar_sim.renderers import render_html
from pstar_sim.schema.fields import Curve as FileCurve
from pstar_sim.schema.fields import Text, between, curve, says
from pstar_sim.units import GB, format_bytes

_P = TypeVar("_P")

KNOWN: tuple[str, ...] = get_args(Known)
"""How a figure is known, the best first: measured on this machine, a share of peaks fitted to published runs, a peak of
a datasheet times a usual share, or assumed without a measurement. An answer is as reliable as its worst-known figure.
"""
RESERVE_BYTES = GB
"""Bytes of a card that no plan uses: a context with the kernels of a training job takes about half of them, cuBLAS's
workspaces and the fragments of torch's allocator the rest. The executor keeps as many free (`devices/headroom.py`).
"""
ADAM_BYTES_PER_PARAM = 28
"""Bytes of DRAM traffic per parameter for which `Host.adam_params_per_s` is quoted: those of AdamW with fp32 states."""
BY_COLLECTIVES = "compute_while_net"
"""The factor of `Machine.slowdowns` by which compute takes longer while a collective runs."""
_SHARES = 1e-6  # largest difference of the sum of batch shares from 1, for rounding
_worst_known: Callable[[Sequence[str]], str] = partial(max, key=KNOWN.index)

_Name = Annotated[str, says("its name")]
_Measured = Annotated[bool, says("whether its figures are calibrated")]
_Source = Annotated[str, says("where its figures come from")]
_KnownAs = Annotated[str, says("how its figures are known, one of KNOWN")]
_Products = table_of(
    ProductShape, "Figures by which the rate of a matrix product depends on its shape (product_shape.py)."
)


def _products(dtype: str) -> Points:
    return Points(
        f"{dtype}_table",
        Annotated[FileCurve, curve("GFLOP of a product", "TFLOP/s")],
        calibrated="rate by size of a product",
        best=f"{dtype}_tflops",
        item=dtype,
        units=(1e9, 1e12),
    )


def _copies(key: str, best: str) -> Points:
    kind = Annotated[FileCurve, curve("MB of a copy", "GB/s")]
    return Points(key, kind, calibrated="rate by size of a copy", best=best, units=(1e6, GB))


def _check(what: str, part: object) -> str:
    where = f"{what} {text(f'the name of a {what}', getattr(part, 'name', None), 'a text', error=CatalogError)!r}"
    check_figures(where, part)
    known = getattr(part, "known", KNOWN[0])
    if known not in KNOWN:
        raise CatalogError(f"{where}: known = {known!r}; must be one of {', '.join(KNOWN)}")
    return where


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator.

    context_bytes: the one reserve: the driver's context, libraries, and fragments of the allocator. A plan's budget is
        usable - context. RESERVE_BYTES unless measured.
    hbm_bytes_per_s: effective bandwidth of its memory.
    flops_per_s: effective matrix rate by dtype; a dtype that is missing is not supported.
    launch_s: seconds of the beginnings and ends of a moment's kernels. None where rates are those of whole iterations,
        which contain these seconds and the operators.
    matmul_tables: by dtype, the curve of flops/s over the flops of a product, where it was measured; flops_per_s is
        then the best rate of the curve.
    operator_bytes_per_s: bandwidth that the operators of a moment reach, where it was measured; None: the bandwidth of
        the HBM.
    peer_share: share of its link's rate at which a collective runs where no other link joins the GPUs.
    products: how the rate of a matrix product depends on its shape (product_shape.py); flops_per_s is then the rate of
        large products. None: all products run at flops_per_s.
    """

    name: _Name
    memory_bytes: Annotated[int, Figure("memory_gb", Gigabytes, "what the driver gives to a process", known="measured")]
    usable_bytes: Annotated[
        int,
        Figure(
            "usable_gb",
            Gigabytes,
            "what a process can count on; left out: memory_gb",
            None,
            path="memory",
            calibrated="what a process can count on",
            written="entry",
        ),
    ]
    context_bytes: Annotated[
        int,
        Figure(
            "context_gb",
            Annotated[float, between(0, 100)],
            "reserve for driver context, libraries and fragmentation; part of usable_gb; left out: 1 GB",
            None,
            path="context",
        ),
    ]
    hbm_bytes_per_s: Annotated[
        float,
        Figure(
            "hbm_gb_per_s",
            Rate,
            "memory bandwidth, from the datasheet",
            known="datasheet",
            path="hbm",
            calibrated="memory bandwidth",
            share="hbm_efficiency",
        ),
        Key(
            "hbm_efficiency",
            Share,
            "effective memory bandwidth over the peak; left out: that of the efficiency model",
            None,
        ),
    ]
    flops_per_s: Annotated[
        Mapping[str, float],
        Figure(
            "fp32_tflops",
            Tflops,
            "peak matrix rate, dense, no TF32",
            known="datasheet",
            path="flops.fp32",
            calibrated="matrix rate",
            share="fp32_efficiency",
            item="fp32",
        ),
        Figure(
            "fp16_tflops",
            Tflops,
            "peak of the tensor cores; left out where the card has no fp16",
            None,
            "datasheet",
            path="flops.fp16",
            calibrated="matrix rate",
            share="tensor_core_efficiency",
            item="fp16",
        ),
        Figure(
            "bf16_tflops",
            Tflops,
            "peak of the tensor cores; left out where the card has no bf16",
            None,
            "datasheet",
            path="flops.bf16",
            calibrated="matrix rate",
            share="tensor_core_efficiency",
            item="bf16",
        ),
        Figure(
            "fp8_tflops",
            Tflops,
            "peak of the tensor cores; left out where the card has no fp8",
            None,
            "datasheet",
            path="flops.fp8",
            calibrated="matrix rate",
            share="tensor_core_efficiency",
            item="fp8",
        ),
        Key(
            "fp32_efficiency",
            Share,
            "fp32 rate of large products over the peak; left out: that of the efficiency model",
            None,
        ),
        Key(
            "tensor_core_efficiency",
            Share,
            "16-bit and fp8 rate of large products over the peak; left out: that of the generation",
            None,
        ),
    ]
    measured: _Measured
    source: _Source = field(compare=False)
    launch_s: Annotated[
        float | None,
        Figure(
            "launch_us",
            Latency,
            "beginnings and ends of a moment's kernels; left out: those of the efficiency model",
            None,
            calibrated="kernels and hooks of one moment, whatever their size",
            written="calibrated",
        ),
    ] = None
    known: _KnownAs = "datasheet"
    matmul_tables: Annotated[Mapping[str, Curve], _products("fp32"), _products("fp16"), _products("bf16")] = field(
        default_factory=dict
    )
    operator_bytes_per_s: Annotated[
        float | None,
        Figure(
            "operators_gb_per_s",
            Rate,
            calibrated="bandwidth that the operators of a moment reach",
            written="calibrated",
        ),
    ] = None
    peer_share: Annotated[
        float,
        Figure(
            "peer_share",
            Share,
            "share of its link's rate at which a collective runs without a link between GPUs; below 1 for a card that "
            "cannot reach the memory of another, so that all passes through the host's memory",
            1.0,
            path="peer_share",
        ),
    ] = 1.0
    products: Annotated[
        ProductShape | None,
        Key("sms", Annotated[int, between(1, 100_000)], "streaming multiprocessors", None, "datasheet"),
        Key("generation", Text, "name of an entry of generations.toml: rate of products by shape", None),
        Key("products", _Products, "rate of products by shape, instead of the generation's", None),
        Key("device_names", tuple[Text, ...], "what nvidia-smi calls the card", ()),
    ] = None

    def __post_init__(self) -> None:
        where = _check("GPU", self)
        if not isinstance(self.flops_per_s, Mapping) or not self.flops_per_s:
            raise CatalogError(
                f"{where}: flops_per_s = {self.flops_per_s!r}: give a rate by dtype, such as {{'bf16': 1.6e14}}"
            )
        for dtype, rate in self.flops_per_s.items():
            number(f"{where}: flops_per_s[{dtype!r}]", rate, error=CatalogError)
        if self.products is not None and self.launch_s is None:
            raise CatalogError(
                f"{where}: launch_s = None: figures of products are times of kernels without launches; give launch_s"
            )
        if self.usable_bytes > self.memory_bytes:
            raise CatalogError(
                f"{where}: usable_bytes = {self.usable_bytes}: the card has {self.memory_bytes} bytes; give no more"
            )
        if self.usable_bytes <= self.context_bytes:
            raise CatalogError(
                f"{where}: the driver context takes {format_bytes(self.context_bytes)} of "
                f"{format_bytes(self.usable_bytes)}; nothing would be left for a plan: give more usable_bytes"
            )

    @property
    def budget_bytes(self) -> int:
        return self.usable_bytes - self.context_bytes


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link between host and GPU. A transfer lasts latency_s + bytes / rate.

    h2d_bytes_per_s: effective rate to the GPU.
    d2h_bytes_per_s: effective rate from the GPU.
    pageable_bytes_per_s: rate of a copy from or to host memory that is not pinned, either way; None: not known, and a
        plan with such copies cannot be timed.
    h2d_table: bytes/s to the GPU by bytes of a copy, where it was measured; h2d_bytes_per_s is then the best rate of
        the curve, or less for a link that is throttled.
    d2h_table: the same for copies from the GPU.
    """

    name: _Name
    h2d_bytes_per_s: Annotated[
        float,
        Key("connects", Literal["host-gpu", "gpu-gpu", "node-node"], "a machine's link, peer_link or network"),
        Figure(
            "h2d_gb_per_s",
            LinkRate,
            "line rate to the GPU; between nodes, out of a whole node",
            known="datasheet",
            path="h2d",
            calibrated="large pinned copies to the GPU",
            share="efficiency",
        ),
    ]
    d2h_bytes_per_s: Annotated[
        float,
        Figure(
            "d2h_gb_per_s",
            LinkRate,
            "line rate from the GPU; between nodes, into a whole node",
            known="datasheet",
            path="d2h",
            calibrated="large pinned copies from the GPU",
            share="efficiency",
        ),
        Key("efficiency", Share, "what a large pinned copy gets of the line rate"),
    ]
    latency_s: Annotated[float, Figure("latency_us", Latency, "of one asynchronous copy", path="latency")]
    duplex: Annotated[bool, Figure("duplex", bool, "whether both directions run at full rate at once", path="duplex")]
    measured: _Measured
    source: _Source = field(compare=False)
    known: Annotated[_KnownAs, Figure("known", Known, "how the rates are known", "datasheet", worst=_worst_known)] = (
        "datasheet"
    )
    pageable_bytes_per_s: Annotated[
        float | None,
        Figure(
            "pageable_gb_per_s",
            LinkRate,
            "a copy from or to memory that is not pinned, either way",
            None,
            path="pageable",
            calibrated="copies from or to memory that is not pinned",
        ),
    ] = None
    h2d_table: Annotated[Curve, _copies("h2d_table", "h2d_gb_per_s")] = ()
    d2h_table: Annotated[Curve, _copies("d2h_table", "d2h_gb_per_s")] = ()

    def __post_init__(self) -> None:
        _check("link", self)


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The network between the GPUs of a node, or between the nodes.

    table: bytes/s by bytes of a collective (all slices together), where it was measured; bytes_per_s is then the best
        rate of the curve, or less for a link that is throttled.
    """

    name: _Name
    bytes_per_s: Annotated[
        float,
        Figure(
            "gb_per_s",
            LinkRate,
            "rate at which one member (GPU, node) sends, and at the same time receives",
            path="bandwidth",
        ),
    ]
    latency_s: Annotated[float, Figure("latency_us", Latency, "latency of one hop", path="latency")]
    measured: _Measured
    source: _Source = field(compare=False)
    known: _KnownAs = "datasheet"
    table: Curve = ()

    def __post_init__(self) -> None:
        _check("link", self)

    def rate_of(self, size_bytes: float) -> float:
        """Bytes/s of a collective of `size_bytes` (> 0)."""
        return self.bytes_per_s * share_at(self.table, size_bytes)


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """Another stage of a pipeline.

    stage: its number.
    fabric: what joins a rank with its peer there.
    """

    stage: int
    fabric: Fabric


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that run the same program beside each other.

    name: of the group in collectives (`Moment.collectives`).
    ranks: their number.
    fabric: what joins them.
    """

    name: str
    ranks: int
    fabric: Fabric


@dataclass(frozen=True, kw_only=True)
class Nvme:
    """The solid-state disks of one node, all together.

    [Note: reads beside writes] Together, reads and writes get the shares r and w of their rates: half each where they
    are not known. Where r + w is more than 1, plans have them in two queues. Reads of R seconds and writes of W, alone,
    then take R + W - (r + w - 1) * b, with b seconds of both, at most R / r and W / w.

    read_bytes_per_s, write_bytes_per_s: effective, of large sequential accesses.
    read_beside_bytes_per_s, write_beside_bytes_per_s: of both together; None: not known.
    life_bytes: bytes that may be written before the disks wear out, by the maker's rating; None: not known.
    """

    name: _Name
    memory_bytes: Annotated[
        int,
        Figure(
            "size_gb",
            Annotated[float, between(1, 1e7)],
            "what a training job may fill",
            known="datasheet",
            path="memory",
        ),
    ]
    read_bytes_per_s: Annotated[
        float,
        Figure(
            "read_gb_per_s",
            LinkRate,
            "large sequential reads of all disks at once, from the datasheet",
            known="datasheet",
            path="read",
            calibrated="large sequential reads",
            share="efficiency",
        ),
    ]
    write_bytes_per_s: Annotated[
        float,
        Figure(
            "write_gb_per_s",
            LinkRate,
            "large sequential writes of all disks at once, from the datasheet",
            known="datasheet",
            path="write",
            calibrated="large sequential writes",
            share="efficiency",
        ),
        Key("efficiency", Share, "what such accesses get of the datasheet's rates"),
    ]
    latency_s: Annotated[float, Figure("latency_us", Latency, "of one access")]
    measured: _Measured
    source: _Source = field(compare=False)
    life_bytes: Annotated[
        int | None,
        Figure(
            "life_tb",
            Annotated[float, between(1, 1e7)],
            "TB that may be written to all disks, by the maker's rating",
            None,
            "datasheet",
            path="life",
        ),
    ] = None
    read_beside_bytes_per_s: Annotated[
        float | None,
        Figure(
            "read_beside_gb_per_s",
            LinkRate,
            "large reads while others are written, as measured",
            None,
            "measured",
            path="read_beside",
            calibrated="large reads while others are written",
        ),
    ] = None
    write_beside_bytes_per_s: Annotated[
        float | None,
        Figure(
            "write_beside_gb_per_s",
            LinkRate,
            "large writes while others are read, as measured",
            None,
            "measured",
            path="write_beside",
            calibrated="large writes while others are read",
        ),
    ] = None

    def __post_init__(self) -> None:
        _check("set of disks", self)

    @property
    def only_rate_beside(self) -> str | None:
        """ "read" or "write", where of both together that alone is known."""
        known = [self.read_beside_bytes_per_s is not None, self.write_beside_bytes_per_s is not None]
        return ("read" if known[0] else "write") if sum(known) == 1 else None

    @property
    def beside(self) -> tuple[float, float]:
        """Shares of their rates that a read and a write get together."""
        if self.read_beside_bytes_per_s is None or self.write_beside_bytes_per_s is None:
            return 0.5, 0.5
        read = min(1.0, self.read_beside_bytes_per_s / self.read_bytes_per_s)
        write = min(1.0, self.write_beside_bytes_per_s / self.write_bytes_per_s)
        return read, write

    @property
    def gain(self) -> float:
        """Of a second of both over turns, 0 where these are not known to be slower: [Note: reads beside writes]."""
        return max(0.0, sum(self.beside) - 1)

    def least_s(self, read_s: float, write_s: float) -> float:
        """[Note: reads beside writes]"""
        read, write = self.beside
        return read_s + write_s - self.gain * min(read_s / read, write_s / write)


@dataclass(frozen=True, kw_only=True)
class Host:
    """The memory and the CPUs of one node. A plan's budget is memory - reserved.

    dram_bytes_per_s: DRAM bandwidth, shared by DMA (the bytes of each transfer count once) and CPU Adam
        (`OptimizerSpec.dram_bytes_per_param`).
    adam_params_per_s: rate of fused AdamW over fp32 states, with all cores given to it.
    adam_table: parameters/s by threads, where it was measured.
    adam_params_per_core_s: rate of one thread, where adam_table does not say it; None: a process's part of the whole.
    threads: of each process in CPU Adam; None: as many as its part of the cores.
    as_found: threads and binding of its processes are what a launcher leaves.
    dram_measured: whether dram_bytes_per_s was measured.
    known: how its rate of CPU Adam is known, one of KNOWN.
    """

    name: _Name
    memory_bytes: Annotated[
        int, Figure("memory_gb", Gigabytes, "DRAM as the system reports it", known="datasheet", path="memory")
    ]
    pinned_bytes: Annotated[
        int | None,
        Figure(
            "pinned_gb",
            Gigabytes,
            "the most that can be pinned; left out where all of it can",
            None,
            "measured",
            path="pinned",
        ),
    ] = None
    reserved_bytes: Annotated[
        int,
        Figure(
            "reserved_gb",
            Annotated[float, between(0, 1e4)],
            "left for the system and the training process itself",
            path="reserved",
        ),
    ]
    dram_bytes_per_s: Annotated[
        float,
        Figure(
            "dram_peak_gb_per_s",
            Rate,
            "channels x transfer rate x 8 bytes, of the memory that copies reach",
            known="datasheet",
            path="dram",
            calibrated="bandwidth of DRAM, used as it is",
            calibrated_name="dram_gb_per_s",
            share="dram_efficiency",
            written="entry",
        ),
        Key("dram_efficiency", Share, "what streaming reads and writes get of the peak"),
    ]
    cores: Annotated[
        int,
        Figure(
            "cores",
            Annotated[int, between(1, 4096)],
            "physical cores that Adam may use",
            known="datasheet",
            path="cores",
        ),
    ]
    adam_params_per_s: Annotated[
        float,
        Figure(
            "adam_gparams_per_s",
            AdamRate,
            "fused AdamW over fp32 states, alone on the host; left out: what DRAM and cores allow",
            None,
            path="adam",
            calibrated="fused AdamW over fp32 states, all cores",
        ),
    ]
    measured: _Measured
    source: _Source = field(compare=False)
    adam_table: Annotated[
        Curve,
        Points(
            "adam_table",
            Annotated[FileCurve, curve("threads", "billion parameters/s")],
            calibrated="rate by threads",
            best="adam_gparams_per_s",
            exact=True,
            units=(1, 1e9),
        ),
    ] = ()
    adam_params_per_core_s: float | None = None
    threads: Annotated[
        int | None,
        Figure(
            "threads",
            Annotated[int, between(1, 4096)],
            "threads of each process in CPU Adam, where it has fewer than its part of the cores",
            None,
            path="threads",
        ),
    ] = None
    as_found: bool = False
    dram_measured: bool = False
    known: str = "datasheet"

    def __post_init__(self) -> None:
        where = _check("host", self)
        if self.memory_bytes <= self.reserved_bytes:
            raise CatalogError(
                f"{where}: {format_bytes(self.reserved_bytes)} of {format_bytes(self.memory_bytes)} are reserved for "
                "the system; nothing would be left for a plan: give more memory_bytes, or reserve less"
            )

    def adam_params_per_s_on(self, threads: int) -> float:
        """CPU Adam alone on so many threads."""
        if self.adam_table:
            return rate_at(self.adam_table, threads)
        of_one = self.adam_params_per_core_s or self.adam_params_per_s / self.cores
        return min(self.adam_params_per_s, threads * of_one)

    def as_launched(self, params_per_s: float) -> Host:
        """Where each process has the one thread that launchers leave it.

        params_per_s: of its CPU step with all that goes with it, where adam_table does not say it.
        """
        return replace(self, threads=1, as_found=True, adam_params_per_core_s=params_per_s)

    @property
    def budget_bytes(self) -> int:
        return self.memory_bytes - self.reserved_bytes


@dataclass(frozen=True, kw_only=True)
class Framework:
    """The Python that drives the GPUs."""

    name: _Name
    python_s: Annotated[
        float, Figure("python_us", Latency, "Python of one moment; hidden as long as the GPU works longer")
    ]
    operator_s: Annotated[
        float, Figure("operator_us", Latency, "Python of one operator, where a moment counts its operators", 0.0)
    ] = 0.0
    wait_s: Annotated[
        float,
        Figure("wait_us", Latency, "time of one moment in which the GPU waits for Python, however long it works"),
    ]
    net_loss: Annotated[
        float,
        Figure(
            "net_loss",
            Annotated[float, between(0, 0.99)],
            "share of its speed that compute loses while a collective runs",
            0.0,
        ),
    ] = 0.0
    kept_bytes: Annotated[
        int,
        Figure(
            "kept_gb",
            Annotated[float, between(0, 1000)],
            "GPU memory that torch keeps beside tensors and context, where it is free",
            0.0,
        ),
    ] = 0
    source: _Source = field(compare=False)
    known: Annotated[_KnownAs, Figure("known", Known, "how the figures are known", "assumed")] = "assumed"

    def __post_init__(self) -> None:
        _check("framework", self)

    def seconds(self, operators: int) -> float:
        """Python of a moment of so many operators; 0: not counted."""
        return max(self.python_s, operators * self.operator_s)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One worker.

    gpu: its GPU.
    link: its link to the host.
    batch_share: its share of the batch; the shares of all ranks add up to 1, and 0 is an empty batch.
    root: number, within the node, of the PCIe switch to which the link is attached; None if the link has a root port of
        its own.
    """

    gpu: Gpu
    link: Link
    batch_share: float = 1.0
    root: int | None = None

    def __post_init__(self) -> None:
        instance("gpu", self.gpu, Gpu, "a Gpu", error=CatalogError)
        instance("link", self.link, Link, "a Link", error=CatalogError)
        number("batch_share", self.batch_share, also=True, error=CatalogError)  # 0: a rank whose batch is empty


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes and their ranks; a single GPU is one rank.

    ranks: ranks of all nodes, node by node, the same number in each.
    host: host of ONE node; its ranks share memory and cores in equal parts, and bandwidths as they need them.
    notes: of the catalog.
    price_usd_per_hour: price of the whole machine.
    extra: further figures by name.
    nodes: their number.
    peer: joins the GPUs of a node; None: they reach each other over their links.
    network: joins the nodes.
    root_bytes_per_s: rate of a PCIe switch to or from the host, each way, shared by the ranks on it.
    nvme: disks of ONE node; its ranks share it as they share the host.
    framework: Python that drives the GPUs; None where no moment waits for it, or where the GPU's launch_s includes it.
    slowdowns: "compute_while_adam" = 1.2 says that compute takes 1.2 times as long while CPU Adam runs; for pairs of
        "compute", "adam", "h2d" and "d2h", where measured. "compute_while_net" replaces the framework's.
    updates: "lion" = 0.4 says that the CPU updates by that rule 0.4 times as many parameters per second as by fused
        AdamW. A rule that was not measured has the rate in workload/optimizers.py.
    neighbours: of the ranks of one stage of a pipeline, the other stages with which they share a border.
    groups: ranks that work on the same layers and sequences as each rank of this machine, such as those that split the
        tensors of each layer.
    unified: whether GPU and CPU work in one memory. The GPU may take its usable_bytes of that memory; the rest is the
        host's memory_bytes. The link is a copy inside that memory.
    """

    name: _Name
    ranks: tuple[Rank, ...]
    host: Host
    notes: str = ""
    price_usd_per_hour: Annotated[
        float | None, Figure("price_usd_per_hour", Annotated[float, between(1e-3, 1e6)], path="price")
    ] = None
    extra: Mapping[str, float] = field(default_factory=dict)
    nodes: int = 1
    peer: Fabric | None = None
    network: Fabric | None = None
    root_bytes_per_s: Annotated[float | None, Figure("root_gb_per_s", LinkRate, path="root.bandwidth")] = None
    nvme: Nvme | None = None
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    updates: Mapping[str, float] = field(default_factory=dict)
    unified: bool = False
    framework: Framework | None = None
    neighbours: tuple[Neighbour, ...] = ()
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        where = _check("machine", self)
        whole(f"{where}: nodes", self.nodes, error=CatalogError)
        instance(f"{where}: host", self.host, Host, "a Host", error=CatalogError)
        if not isinstance(self.ranks, tuple) or not self.ranks or not all(isinstance(r, Rank) for r in self.ranks):
            raise CatalogError(f"{where}: ranks = {self.ranks!r:.60}: it must be a tuple of Rank, one for each GPU")
        if len(self.ranks) % self.nodes:
            raise CatalogError(
                f"{where}: {len(self.ranks)} ranks on {self.nodes} nodes; each node must have the same number"
            )
        if self.host.pinned_bytes is not None and any(r.link.pageable_bytes_per_s is None for r in self.ranks):
            raise CatalogError(
                f"{where}: host {self.host.name} can pin {format_bytes(self.host.pinned_bytes)} only, so its link "
                "needs the rate of copies of memory not pinned; give link.pageable (pageable_gb_per_s in a file)"
            )
        shares = sum(rank.batch_share for rank in self.ranks)
        if abs(shares - 1) > _SHARES:
            raise CatalogError(
                f"{where}: the batch_share of its {len(self.ranks)} ranks add up to {shares:.6g}; they must add up to "
                f"1 (equal ranks have 1/{len(self.ranks)} each)"
            )

    def _repr_html_(self) -> str:
        return render_html(self)

    def group(self, name: str) -> Group | None:
        return next((group for group in self.groups if group.name == name), None)

    @cached_property
    def gpu(self) -> Gpu:
        """Where GPUs differ, one with the worst value of each figure."""
        return _weakest_gpu([r.gpu for r in self.ranks])

    @cached_property
    def link(self) -> Link:
        """Where links differ, one with the worst value of each figure."""
        return _weakest_link([r.link for r in self.ranks])

    @cached_property
    def mixed(self) -> bool:
        """Whether its ranks have different GPUs or links."""
        first = self.ranks[0]
        return any((r.gpu, r.link) != (first.gpu, first.link) for r in self.ranks[1:])

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Rank -> the first rank with the same GPU and link."""
        parts = [(rank.gpu, rank.link) for rank in self.ranks]
        return tuple(parts.index(part) for part in parts)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that share a batch, sum their gradients and may slice their chunks: all, because each has the whole
        model."""
        return len(self.ranks)

    @property
    def local_ranks(self) -> int:
        """Ranks of one node, which share its host, disks and links."""
        return self.world_size // self.nodes

    def with_nodes(self, nodes: int) -> Machine:
        """All nodes like the first. The price grows in proportion."""
        node, price = self.ranks[: self.local_ranks], self.price_usd_per_hour
        return replace(
            self,
            nodes=nodes,
            ranks=tuple(replace(r, batch_share=r.batch_share * self.nodes / nodes) for r in node) * nodes,
            price_usd_per_hour=None if price is None else price * nodes / self.nodes,
        )

    @property
    def pool_bytes(self) -> int | None:
        """The one memory of a unified machine's node; None where GPUs have a memory of their own."""
        if not self.unified:
            return None
        return self.host.memory_bytes + sum(rank.gpu.usable_bytes for rank in self.ranks[: self.local_ranks])

    @property
    def host_memory_of(self) -> str:
        """What an advised size of host memory is taken from. Empty where it can be added."""
        return " of its one memory, the rest for the GPU" if self.unified else ""

    @property
    def gpu_budget_bytes(self) -> int:
        """Of each GPU, that a plan may use."""
        return self.gpu.budget_bytes

    @property
    def kept_bytes(self) -> int:
        """That torch keeps on a GPU beside tensors and context, where they are free (`Framework.kept_bytes`)."""
        return 0 if self.framework is None else self.framework.kept_bytes

    @property
    def host_budget_bytes(self) -> int:
        """Each rank's part of the node."""
        return self.host.budget_bytes // self.local_ranks

    @property
    def pinned_budget_bytes(self) -> int | None:
        """Each rank's part of the node; None: all."""
        return None if self.host.pinned_bytes is None else self.host.pinned_bytes // self.local_ranks

    @property
    def nvme_budget_bytes(self) -> int:
        """Each rank's part of the node; 0 without disks."""
        return 0 if self.nvme is None else self.nvme.memory_bytes // self.local_ranks

    @property
    def update_threads(self) -> float:
        """Of one rank's updates on the CPU: its part of the node's cores, or those that it has of them."""
        part = self.host.cores / self.local_ranks
        return part if self.host.threads is None else min(part, self.host.threads)

    @property
    def adam_params_per_s(self) -> float:
        """Of one rank, with its part of the node's cores, or with the threads that it has of them."""
        part = self.host.adam_params_per_s / self.local_ranks
        return part if self.host.threads is None else min(part, self.host.adam_params_per_s_on(self.host.threads))

    @property
    def compute_while_net(self) -> float:
        """As stated, or by the framework's net_loss."""
        loss = 0.0 if self.framework is None else self.framework.net_loss
        return self.slowdowns.get(BY_COLLECTIVES, 1 / (1 - loss))

    @property
    def calibrated(self) -> bool:
        return self.host.measured and all(r.gpu.measured and r.link.measured for r in self.ranks)

    @property
    def confidence_by_input(self) -> dict[str, str]:
        """Input of a prediction -> "calibrated", or one of KNOWN: the worst of its parts. "compute" is the rate of
        large products, "operators" all other kernels and launches."""
        found = {
            "compute": _worst((r.gpu.measured, r.gpu.known) for r in self.ranks),
            "link": _worst((r.link.measured, r.link.known) for r in self.ranks),
            "CPU Adam": _worst([(self.host.measured, self.host.known)]),
            "DRAM": "calibrated" if self.host.dram_measured else "datasheet",
        }
        kernels = [r.gpu for r in self.ranks if r.gpu.launch_s is not None]
        if kernels:
            found["operators"] = _worst((gpu.measured, "assumed") for gpu in kernels)
        if self.world_size > 1:
            fabrics = [f for f in (self.peer, self.network if self.nodes > 1 else None) if f is not None]
            found["network"] = _worst((f.measured, f.known) for f in fabrics) if fabrics else found["link"]
        if self.nvme is not None:
            found["disk"] = "calibrated" if self.nvme.measured else "datasheet"
        if self.framework is not None:
            found["framework"] = _worst([(self.framework.known == "measured", self.framework.known)])
        return found


def _worst(parts: Iterable[tuple[bool, str]]) -> str:
    words = ["calibrated" if measured else known for measured, known in parts]
    return max(words, key=("calibrated", *KNOWN).index)


def _weakest_gpu(gpus: Sequence[Gpu]) -> Gpu:
    kinds = _different(gpus)
    if len(kinds) == 1:
        return kinds[0]
    figures = worst_of(kinds)
    common = [d for d in kinds[0].flops_per_s if all(d in g.flops_per_s for g in kinds)]
    return Gpu(
        name=" + ".join(dict.fromkeys(g.name for g in kinds)),
        flops_per_s={d: min(g.flops_per_s[d] for g in kinds) for d in common},
        source="the least of each figure",
        measured=all(g.measured for g in kinds),
        known=_worst_known([g.known for g in kinds]),
        products=_weakest_products([g.products for g in kinds]),
        **figures | {"usable_bytes": min(g.budget_bytes for g in kinds) + figures["context_bytes"]},
    )


def _weakest_products(shapes: Sequence[ProductShape | None]) -> ProductShape | None:
    return None if None in shapes else ProductShape(**worst_of(shapes))


def _different(parts: Sequence[_P]) -> list[_P]:
    kinds = list({id(part): part for part in parts}.values())
    return [kinds[0], *(part for part in kinds[1:] if part != kinds[0])]


def _weakest_link(links: Sequence[Link]) -> Link:
    kinds = _different(links)
    if len(kinds) == 1:
        return kinds[0]
    return Link(
        name=" + ".join(dict.fromkeys(k.name for k in kinds)),
        source="the least of each figure",
        measured=all(k.measured for k in kinds),
        **worst_of(kinds),
    )
