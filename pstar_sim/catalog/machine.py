"""Machine, Rank, Gpu, Link, Host and the fabric between GPUs: the hardware that a plan is made for, as plain values.

This module defines the fields and the values that they may take. A part with a wrong value raises CatalogError when it
is made. The TOML files and `catalog.py` say where the numbers come from. Knows no workload and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any

from pstar_sim.arguments import flag, instance, number, text, whole
from pstar_sim.catalog.curves import Curve, share_at
from pstar_sim.catalog.product_shape import ProductShape
from pstar_sim.errors import CatalogError
from pstar_sim.renderers import render_html
from pstar_sim.units import format_bytes

__all__ = ["KNOWN", "Fabric", "Framework", "Gpu", "Host", "Link", "Machine", "Nvme", "Rank"]

KNOWN = ("measured", "fitted", "datasheet", "assumed")
"""How a figure is known, the best first: measured on this machine, a share of peaks fitted to published runs, a peak of
a datasheet times a usual share, or assumed without a measurement. An answer is as reliable as its worst-known figure.
"""
_SHARES = 1e-6  # largest difference of the sum of batch shares from 1, for rounding


def _check(
    what: str, part: object, *, positive: Sequence[str] = (), natural: Sequence[str] = (), counts: Sequence[str] = ()
) -> str:
    """Raise CatalogError unless the `positive` figures are above 0, the `natural` figures at least 0 and the `counts`
    whole numbers from 1. An optional figure that is None is not checked. Returns kind and name of the part, for
    messages.
    """
    where = f"{what} {text(f'the name of a {what}', getattr(part, 'name', None), 'a text', error=CatalogError)!r}"
    optional = {name for name, default in type(part).__dict__.items() if default is None}
    for names, least in ((positive, False), (natural, True)):
        for name in names:
            value = getattr(part, name)
            if value is not None or name not in optional:
                number(f"{where}: {name}", value, also=least, error=CatalogError)
    for name in counts:
        whole(f"{where}: {name}", getattr(part, name), error=CatalogError)
    return where


def _check_known(where: str, known: object) -> None:
    if known not in KNOWN:
        raise CatalogError(f"{where}: known = {known!r}; must be one of {', '.join(KNOWN)}")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator.

    name: name of the card.
    memory_bytes: memory of the card.
    usable_bytes: memory of the card that a process can take.
    context_bytes: bytes taken by the driver context, workspaces and fragmentation before the first tensor; a plan's
        budget is usable - context.
    hbm_bytes_per_s: effective bandwidth of its memory.
    flops_per_s: effective matrix rate by dtype ("fp32", "fp16", "bf16"); a dtype that is missing is not supported.
    measured: whether its figures are calibrated.
    source: where its figures come from.
    launch_s: seconds of the beginnings and ends of a moment's kernels. None where rates are those of whole iterations,
        which contain these seconds and the operators.
    known: how its figures are known, one of KNOWN.
    matmul_tables: by dtype, the curve of flops/s over the flops of a product, where it was measured; flops_per_s is
        then the best rate of the curve.
    operator_bytes_per_s: bandwidth that the operators of a moment reach, where it was measured; None: the bandwidth of
        the HBM.
    products: how the rate of a matrix product depends on its shape (product_shape.py); flops_per_s is then the rate of
        large products. None: all products run at flops_per_s.
    """

    name: str
    memory_bytes: int
    usable_bytes: int
    context_bytes: int
    hbm_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    measured: bool
    source: str = field(compare=False)
    launch_s: float | None = None
    known: str = "datasheet"
    matmul_tables: Mapping[str, Curve] = field(default_factory=dict)
    operator_bytes_per_s: float | None = None
    products: ProductShape | None = None

    def __post_init__(self) -> None:
        positive = ("memory_bytes", "usable_bytes", "hbm_bytes_per_s", "operator_bytes_per_s")
        where = _check("GPU", self, positive=positive, natural=("context_bytes", "launch_s"))
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
        _check_known(where, self.known)
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

    name: name of the link.
    h2d_bytes_per_s: effective rate to the GPU.
    d2h_bytes_per_s: effective rate from the GPU.
    latency_s: latency of one transfer.
    duplex: whether both directions run at full rate at once.
    measured: whether its figures are calibrated.
    source: where its figures come from.
    known: how its figures are known, one of KNOWN.
    pageable_bytes_per_s: rate of a copy from or to host memory that is not pinned, either way; None: not known, and a
        plan with such copies cannot be timed.
    h2d_table: bytes/s to the GPU by bytes of a copy, where it was measured; h2d_bytes_per_s is then the best rate of
        the curve, or less for a link that is throttled.
    d2h_table: the same for copies from the GPU.
    """

    name: str
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    latency_s: float
    duplex: bool
    measured: bool
    source: str = field(compare=False)
    known: str = "datasheet"
    pageable_bytes_per_s: float | None = None
    h2d_table: Curve = ()
    d2h_table: Curve = ()

    def __post_init__(self) -> None:
        positive = ("h2d_bytes_per_s", "d2h_bytes_per_s", "pageable_bytes_per_s")
        where = _check("link", self, positive=positive, natural=("latency_s",))
        flag(f"{where}: duplex", self.duplex, error=CatalogError)
        _check_known(where, self.known)


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The network between the GPUs of a node, or between the nodes.

    name: name of the link.
    bytes_per_s: rate at which one member (GPU, node) sends, and at the same time receives.
    latency_s: latency of one hop.
    measured: whether its figures are calibrated.
    source: where its figures come from.
    known: how its figures are known, one of KNOWN.
    table: bytes/s by bytes of a collective (all slices together), where it was measured; bytes_per_s is then the best
        rate of the curve, or less for a link that is throttled.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    measured: bool
    source: str = field(compare=False)
    known: str = "datasheet"
    table: Curve = ()

    def __post_init__(self) -> None:
        _check_known(_check("link", self, positive=("bytes_per_s",), natural=("latency_s",)), self.known)

    def rate_of(self, size_bytes: float) -> float:
        """Returns the bytes/s of a collective of `size_bytes` (> 0)."""
        return self.bytes_per_s * share_at(self.table, size_bytes)


@dataclass(frozen=True, kw_only=True)
class Nvme:
    """The solid-state disks of one node, all together.

    name: name of the set of disks.
    memory_bytes: bytes that a training job may fill.
    read_bytes_per_s: rate of large sequential reads.
    write_bytes_per_s: rate of large sequential writes.
    latency_s: latency of one access.
    measured: whether its figures are calibrated.
    source: where its figures come from.
    life_bytes: bytes that may be written before the disks wear out, by the maker's rating; None: not known.
    """

    name: str
    memory_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float
    measured: bool
    source: str = field(compare=False)
    life_bytes: int | None = None

    def __post_init__(self) -> None:
        positive = ("memory_bytes", "read_bytes_per_s", "write_bytes_per_s", "life_bytes")
        _check("set of disks", self, positive=positive, natural=("latency_s",))


@dataclass(frozen=True, kw_only=True)
class Host:
    """The memory and the CPUs of one node.

    name: name of the host.
    memory_bytes: its DRAM.
    reserved_bytes: left for the operating system and the training process itself; a plan's budget is memory - reserved.
    dram_bytes_per_s: DRAM bandwidth, shared by DMA (the bytes of each transfer count once) and CPU Adam
        (`OptimizerSpec.dram_bytes_per_param`).
    cores: physical cores that CPU Adam may use.
    adam_params_per_s: rate of fused AdamW over fp32 states, with all cores given to it.
    measured: whether its figures are calibrated.
    source: where its figures come from.
    adam_table: parameters/s by threads, where it was measured.
    dram_measured: whether dram_bytes_per_s was measured.
    pinned_bytes: the most bytes that can be pinned; None: all. Copies of memory that is not pinned run at the pageable
        rate.
    known: how its rate of CPU Adam is known, one of KNOWN.
    """

    name: str
    memory_bytes: int
    reserved_bytes: int
    dram_bytes_per_s: float
    cores: int
    adam_params_per_s: float
    measured: bool
    source: str = field(compare=False)
    adam_table: Curve = ()
    dram_measured: bool = False
    pinned_bytes: int | None = None
    known: str = "datasheet"

    def __post_init__(self) -> None:
        positive = ("memory_bytes", "dram_bytes_per_s", "adam_params_per_s", "pinned_bytes")
        where = _check("host", self, positive=positive, natural=("reserved_bytes",), counts=("cores",))
        _check_known(where, self.known)
        if self.memory_bytes <= self.reserved_bytes:
            raise CatalogError(
                f"{where}: {format_bytes(self.reserved_bytes)} of {format_bytes(self.memory_bytes)} are reserved for "
                "the system; nothing would be left for a plan: give more memory_bytes, or reserve less"
            )

    @property
    def budget_bytes(self) -> int:
        return self.memory_bytes - self.reserved_bytes


@dataclass(frozen=True, kw_only=True)
class Framework:
    """The Python that drives the GPUs.

    name: name of the framework, or of the system whose hooks it runs.
    python_s: seconds of Python per moment. Python runs ahead of the GPU, and a moment lasts at least as long.
    wait_s: seconds per moment in which the GPU waits for Python, however long its kernels take.
    source: where its figures come from.
    known: how its figures are known, one of KNOWN.
    """

    name: str
    python_s: float
    wait_s: float
    source: str = field(compare=False)
    known: str = "assumed"

    def __post_init__(self) -> None:
        _check_known(_check("framework", self, natural=("python_s", "wait_s")), self.known)


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

    name: name of the machine.
    ranks: ranks of all nodes, node by node, the same number in each.
    host: host of ONE node; its ranks share memory and cores in equal parts, and bandwidths as they need them.
    notes: notes of the catalog on the machine.
    price_usd_per_hour: price of the whole machine.
    extra: further figures by name.
    nodes: number of nodes.
    peer: joins the GPUs of a node; None: they reach each other over their links.
    network: joins the nodes.
    root_bytes_per_s: rate of a PCIe switch to or from the host, each way, shared by the ranks on it.
    nvme: disks of ONE node; its ranks share it as they share the host.
    framework: Python that drives the GPUs; None where no moment waits for it, or where the GPU's launch_s includes it.
    slowdowns: "compute_while_adam" = 1.2 says that compute takes 1.2 times as long while CPU Adam runs; for pairs of
        "compute", "adam", "h2d" and "d2h", where measured.
    unified: whether GPU and CPU work in one memory. The GPU may take its usable_bytes of that memory; the rest is the
        host's memory_bytes. The link is a copy inside that memory.
    """

    name: str
    ranks: tuple[Rank, ...]
    host: Host
    notes: str = ""
    price_usd_per_hour: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    nodes: int = 1
    peer: Fabric | None = None
    network: Fabric | None = None
    root_bytes_per_s: float | None = None
    nvme: Nvme | None = None
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    unified: bool = False
    framework: Framework | None = None

    def __post_init__(self) -> None:
        positive = ("price_usd_per_hour", "root_bytes_per_s")
        where = _check("machine", self, positive=positive, counts=("nodes",))
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

    @cached_property
    def gpu(self) -> Gpu:
        """The GPU of every rank; where the GPUs differ, a GPU with the worst value of each figure."""
        return _weakest_gpu([r.gpu for r in self.ranks])

    @cached_property
    def link(self) -> Link:
        """The link of every rank; where the links differ, a link with the worst value of each figure."""
        return _weakest_link([r.link for r in self.ranks])

    @cached_property
    def mixed(self) -> bool:
        """Whether its ranks have different GPUs or links."""
        first = self.ranks[0]
        return any((r.gpu, r.link) != (first.gpu, first.link) for r in self.ranks[1:])

    @property
    def local_ranks(self) -> int:
        """Number of ranks of one node."""
        return len(self.ranks) // self.nodes

    @property
    def pool_bytes(self) -> int | None:
        """Bytes of the one memory of a unified machine's node; None where GPUs have a memory of their own."""
        if not self.unified:
            return None
        return self.host.memory_bytes + sum(rank.gpu.usable_bytes for rank in self.ranks[: self.local_ranks])

    @property
    def host_memory_of(self) -> str:
        """Words behind a size of host memory that is advised: what it is taken from. Empty where it can be added."""
        return " of its one memory, the rest for the GPU" if self.unified else ""

    @property
    def gpu_budget_bytes(self) -> int:
        """Bytes of each GPU that a plan may use."""
        return self.gpu.budget_bytes

    @property
    def host_budget_bytes(self) -> int:
        """Bytes of the host that a plan may use on each rank: its part of the node."""
        return self.host.budget_bytes // self.local_ranks

    @property
    def pinned_budget_bytes(self) -> int | None:
        """Bytes that each rank can pin: its part of the node; None: all."""
        return None if self.host.pinned_bytes is None else self.host.pinned_bytes // self.local_ranks

    @property
    def nvme_budget_bytes(self) -> int:
        """Bytes of the disks that a plan may use on each rank: its part of the node; 0 without disks."""
        return 0 if self.nvme is None else self.nvme.memory_bytes // self.local_ranks

    @property
    def adam_params_per_s(self) -> float:
        """Rate of CPU Adam on one rank, with its part of the node's cores."""
        return self.host.adam_params_per_s / self.local_ranks

    @property
    def calibrated(self) -> bool:
        """Whether host, GPUs and links were all measured on this machine."""
        return self.host.measured and all(r.gpu.measured and r.link.measured for r in self.ranks)

    @property
    def confidence_by_input(self) -> dict[str, str]:
        """How each input of a prediction is known: input -> "calibrated", or one of KNOWN. Parts that this machine
        lacks are left out. An input of several parts is known as well as the worst of them. "compute" is the rate of
        large products, "operators" all other kernels and launches.
        """
        found = {
            "compute": _worst((r.gpu.measured, r.gpu.known) for r in self.ranks),
            "link": _worst((r.link.measured, r.link.known) for r in self.ranks),
            "CPU Adam": _worst([(self.host.measured, self.host.known)]),
            "DRAM": "calibrated" if self.host.dram_measured else "datasheet",
        }
        kernels = [r.gpu for r in self.ranks if r.gpu.launch_s is not None]
        if kernels:
            found["operators"] = _worst((gpu.measured, "assumed") for gpu in kernels)
        if len(self.ranks) > 1:
            fabrics = [f for f in (self.peer, self.network if self.nodes > 1 else None) if f is not None]
            found["network"] = _worst((f.measured, f.known) for f in fabrics) if fabrics else found["link"]
        if self.nvme is not None:
            found["disk"] = "calibrated" if self.nvme.measured else "datasheet"
        if self.framework is not None:
            found["framework"] = _worst([(self.framework.known == "measured", self.framework.known)])
        return found


def _worst(parts: Iterable[tuple[bool, str]]) -> str:
    """Returns how the worst-known of these parts is known.

    parts: (whether the part is calibrated, how its figures are known).
    """
    words = ["calibrated" if measured else known for measured, known in parts]
    return max(words, key=("calibrated", *KNOWN).index)


def _weakest_gpu(gpus: Sequence[Gpu]) -> Gpu:
    kinds = _different(gpus)
    first = kinds[0]
    if len(kinds) == 1:
        return first
    figures: dict[str, Any] = {name: worst([getattr(g, name) for g in kinds]) for name, worst in _WORST_OF_GPUS.items()}
    common = [d for d in first.flops_per_s if all(d in g.flops_per_s for g in kinds)]
    return Gpu(
        name=" + ".join(dict.fromkeys(g.name for g in kinds)),
        usable_bytes=min(g.budget_bytes for g in kinds) + figures["context_bytes"],
        flops_per_s={d: min(g.flops_per_s[d] for g in kinds) for d in common},
        source="the least of each figure",
        **figures,
    )


def _weakest_products(shapes: Sequence[ProductShape | None]) -> ProductShape | None:
    """Returns products with the worst value of each figure; None if some GPU has no products by shape."""
    given = [shape for shape in shapes if shape is not None]
    if len(given) < len(shapes):
        return None
    return ProductShape(
        sms=min(s.sms for s in given),
        tile=max((s.tile for s in given), key=prod),
        wave_loss=max(s.wave_loss for s in given),
        depth=max(s.depth for s in given),
        bytes_per_s=min(s.bytes_per_s for s in given),
        kernel_s=max(s.kernel_s for s in given),
        flash=min(s.flash for s in given),
    )


def _different(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Returns the first GPU, and all GPUs that differ from it."""
    kinds = list({id(g): g for g in gpus}.values())
    return [kinds[0], *(g for g in kinds[1:] if g != kinds[0])]


def _of_known(pick: Callable[[list[float]], float], figures: Sequence[float | None]) -> float | None:
    """Returns `pick` of the figures; None if some figure is None."""
    known = [figure for figure in figures if figure is not None]
    return pick(known) if len(known) == len(figures) else None


_WORST_OF_GPUS: Mapping[str, Callable[[list[Any]], object]] = {
    "memory_bytes": min,
    "context_bytes": min,
    "hbm_bytes_per_s": min,
    "measured": all,
    "known": partial(max, key=KNOWN.index),
    "launch_s": partial(_of_known, max),
    "operator_bytes_per_s": partial(_of_known, min),
    "products": _weakest_products,
}
"""Field of a Gpu -> its worst value over several GPUs."""


def _weakest_link(links: Sequence[Link]) -> Link:
    kinds = list({id(k): k for k in links}.values())
    first = kinds[0]
    kinds = [first, *(k for k in kinds[1:] if k != first)]
    if len(kinds) == 1:
        return first
    pageable = [k.pageable_bytes_per_s for k in kinds if k.pageable_bytes_per_s is not None]
    return replace(
        first,
        name=" + ".join(dict.fromkeys(k.name for k in kinds)),
        h2d_bytes_per_s=min(k.h2d_bytes_per_s for k in kinds),
        d2h_bytes_per_s=min(k.d2h_bytes_per_s for k in kinds),
        latency_s=max(k.latency_s for k in kinds),
        duplex=all(k.duplex for k in kinds),
        measured=all(k.measured for k in kinds),
        source="the least of each figure",
        pageable_bytes_per_s=min(pageable) if len(pageable) == len(kinds) else None,
        h2d_table=(),
        d2h_table=(),
    )
