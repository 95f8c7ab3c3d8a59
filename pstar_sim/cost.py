"""Seconds and host-memory traffic of a step that runs alone; the simulator decides what sharing costs.

[Note: which rate computes a moment]
1. A moment recorded on this very machine (`workload.recorded_on == machine.name`) lasts the measured seconds; one of a
   job that stands for those of unlike GPUs (`bounds.shares.tightest`, recorded on `slowest_of(machine)`) the slowest
   rank's.
2. Every other moment, on all machines:
       kernels = products by shape + other flops / rate + other bytes / bandwidth + launch_s
       seconds = max(kernels, framework.seconds(operators)) + framework.wait_s
   Large products, element-wise operators and collectives of the ranks that split a layer run one after the other, so
   their times add. Python runs ahead of the GPU, so only the longer counts; the wait for hooks adds to both.
   - If the GPU has figures of products by shape (`gpu.products`), each product that the moment names lasts the seconds
     of its shape (catalog/product_shape.py), each call of fused attention those of its kernel
     (catalog/attention_rates.py). Where fused attention is not named, all other flops run at its share of the rate.
   - If `pstar calibrate` measured the machine, the rate is that of a product as large as the moment's, the bandwidth
     that of a training step's operators, and the bytes include the engine's work on arriving gradients.
   - Products cast to fp8 (`Workload.products`) run at its rate and read a byte per element.
   - If a GPU's rates are those of whole iterations (`gpu.launch_s` is None), they include all else: the moment lasts
     flops / rate.

A dtype that the catalog lacks for the GPU (bf16 forced on a V100) has the rate of the other 2-byte dtype, or of fp32:
too fast, as the hardware has to emulate it.

[Note: adds on the GPU] If gradients of several micro-batches add up on the GPU (in "grad32"), each but a tensor's first
is added when it arrives: that moment also reads gradient and sum and writes the sum, 10 bytes per parameter of a 2-byte
dtype, at the bandwidth of the HBM (of operators, if measured). The plan chooses these adds, so they are not in
`moments_s`, but recorded seconds include them. The add of a reduce_scatter on a sliced layout is not modelled.

[Note: adds in updates] An update with gradients in several lists first adds them up (`folded_lists` in
core/effects.py), each but one with the seconds and traffic of an add, on the host of a cpu_add. On several ranks this
takes no time on the GPU.

[Note: versions of the model] A plan file names the version behind its seconds and bound; a change that predicts others
raises VERSION, and `pstar check` wants older files planned again.

[Note: several ranks, in seconds] Figures are one rank's: its slices, and its part of the node's cores
(`Machine.adam_params_per_s`) and disks, which all use at once. A named rank has its own link; else the figures are a
policy's: the weakest GPU and link, and what is left of a PCIe switch when all its ranks copy.

[Note: collectives] A gather or reduce-scatter of S bytes (all slices) over P ranks goes round a ring, inside each node,
then between nodes:
    seconds = (L-1) * latency inside + (N-1) * latency between + (P-1)/P * S / (rate of the slowest hop)
with N nodes of L ranks. A hop between nodes has the node's whole network rate, one measured by size (`Fabric.table`)
the rate of S. If fewer than the machine's ranks slice a chunk (hybrid sharding), they are neighbours, each such group a
replica, and a reduce-scatter also adds each slice over the R replicas, twice a ring over R ranks, at the same time as a
node's other slices. Of e ranks that share experts every e-th has the same: such groups lie across each other, and share
what they pass. An all-to-all has the latencies of a gather: SimuMax's, fitted in nodes, grow with P-1 too, and NCCL
(PXN) sends what a node has for another GPU in one message. Without a peer link, hops in a node use the GPUs' links (and
a shared PCIe switch), at the GPU's `peer_share`; that this slows copies to the host is not modelled. Collectives take a
part of the GPU from compute ([Note: compute beside collectives] in core/rules.py); copies take 1 % of an iteration at
most (benchmarks/overlap.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

from pstar_sim.catalog.attention import USUAL, call_flops
from pstar_sim.catalog.curves import best_rate, rate_at
from pstar_sim.catalog.machine import ADAM_BYTES_PER_PARAM, BY_COLLECTIVES, Gpu, Link, Machine
from pstar_sim.core.effects import folded_lists, gradient_list
from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Plan
from pstar_sim.core.rules import Rates, StepCosts
from pstar_sim.core.step import PAGEABLE, ROUTES, UNFUSED, Kind, Step
from pstar_sim.dtypes import DTYPES, MASTER, WORKING
from pstar_sim.errors import PlanError
from pstar_sim.workload.mixing import block_of
from pstar_sim.workload.workload import (
    Border,
    Collective,
    Moment,
    Product,
    Workload,
    in_low_dtype,
    product_flops,
)

_COST, _MOMENTS = ("cost",), ("seconds of moments",)  # keys of `Workload.derived`: of the last machine

VERSION = 13
"""Version of the model, by [Note: versions of the model]."""

_FREE = frozenset({Kind.DROP, Kind.ALLOC, Kind.FREE})
CPU_CORE_FLOPS = 30e9
"""Matrix products of one core of a host, in flops per second (assumed: a third of eight-wide fp32 units at 3 GHz)."""
UNFUSED_TRAFFIC = 3
"""Traffic of an AdamW with a kernel per operation over that of a fused one. Reads and writes of an element in
torch/optim/adam.py, _multi_tensor_adam: mul_ (weight decay) 2, lerp_ 3, mul_ 2, addcmul_ 4, sqrt, div_ and add_ 2 each,
addcdiv_ 4; together 21. Fused: 7."""
_OF_GPUS = ("net", "sent", "received")
_ON_HOST = {kind for kind, route in ROUTES.items() if route not in _OF_GPUS} | {Kind.CPU_UPDATE, Kind.CPU_ADD}


def flops_rate(machine: Machine, dtype: str) -> float:
    """In flops per second, with this module's fallback. Raises PlanError if the GPU has no rate for the dtype."""
    return _rate_of(machine.gpu, dtype)


def _rate_of(gpu: Gpu, dtype: str) -> float:
    return gpu.flops_per_s[timed_as(gpu, dtype)]


def timed_as(gpu: Gpu, dtype: str) -> str:
    """Whose matrix rate stands for `dtype`: another's if the GPU has no units for it. Raises PlanError if it has
    neither."""
    for name in DTYPES[dtype].products if dtype in DTYPES else (dtype,):
        if name in gpu.flops_per_s:
            return name
    raise PlanError(f"gpu {gpu.name!r} has no rate for {dtype!r}; it has {', '.join(gpu.flops_per_s)}")


def slowest_of(machine: Machine) -> str:
    """`Workload.recorded_on` of a job for all unlike GPUs."""
    return f"slowest GPU of {machine.name}"


def _product_bytes(product: Product, width: int) -> int:
    batches, m, k, n = product
    return batches * (m * k + k * n + m * n) * width


def expected_link(machine: Machine) -> Link:
    """The link when all ranks copy at once: the weakest, slower on a shared PCIe switch."""
    link = machine.link
    sharing = Counter(r.root for r in machine.ranks[: machine.local_ranks] if r.root is not None)
    if not sharing or machine.root_bytes_per_s is None:
        return link
    part = machine.root_bytes_per_s / max(sharing.values())
    if part >= max(link.h2d_bytes_per_s, link.d2h_bytes_per_s):
        return link
    return replace(
        link, h2d_bytes_per_s=min(link.h2d_bytes_per_s, part), d2h_bytes_per_s=min(link.d2h_bytes_per_s, part)
    )


def gradient_traffic_bytes(w: Workload, moment: int) -> int:
    """GPU memory traffic of gradients that arrive: each is copied into its chunk, and its norm taken."""
    return 3 * sum(w.tensors[t].bytes for t in w.gradients[moment])


def cost_of(workload: Workload, machine: Machine, layout: Layout) -> CostModel:
    """One object for the same three, so a job's policies and the simulator share results. Other rates need another
    machine object (`dataclasses.replace`)."""
    known = workload.derived.get(_COST)
    if not (isinstance(known, CostModel) and known.machine is machine and known.layout is layout):
        workload.derived[_COST] = known = CostModel(workload, machine, layout)
    return known


class Add(NamedTuple):
    """`dram_bytes` is traffic on the host."""

    seconds: float
    dram_bytes: int


class GpuAdds:
    """[Note: adds on the GPU]

    add_bytes: tensor -> GPU traffic of one add.
    free: they take no seconds.
    moments_s: (chunk, micro-batch) -> moment -> seconds, on the GPU, if there are adds.
    chunks_s: chunk -> per iteration.
    """

    def __init__(
        self, workload: Workload, layout: Layout, bytes_per_s: float, add_bytes: Callable[[int], int], *, free: bool
    ) -> None:
        self._table = partial(_adds_s, workload, layout, add_bytes, bytes_per_s)
        self._none = free or workload.micro_batches == 1
        self.moments_s = {} if self._none or layout.ranks > 1 else self._table()
        self.chunks_s = [0.0] * len(layout.chunks)
        for (chunk, _), at in self.moments_s.items():
            self.chunks_s[chunk] += sum(at.values())

    def whole_s(self) -> Mapping[int, float]:
        """Chunk -> seconds per iteration, if its gradients add up whole."""
        chunks_s: dict[int, float] = {}
        for (chunk, _), at in ({} if self._none else self._table()).items():
            chunks_s[chunk] = chunks_s.get(chunk, 0.0) + sum(at.values())
        return chunks_s

    def of(self, plan: Plan) -> Mapping[int, float]:
        """Moment -> seconds of the adds that the plan makes, on a sliced layout of whole sums alone."""
        added: dict[int, float] = {}
        sliced = not self._none and plan.layout.ranks > 1
        whole = sliced and "grad32_remote" in {*(r.list for r in plan.initial), *(step.list for step in plan.steps)}
        if table := self._table() if whole else self.moments_s:
            lists = gradient_list(plan)
            for where, at in table.items():
                if lists[where] == "grad32":
                    for m, seconds in at.items():
                        added[m] = added.get(m, 0.0) + seconds
        return added


class UpdateAdds:
    """[Note: adds in updates]"""

    def __init__(self, cost: CostModel, gpu_bytes_per_s: float) -> None:
        self._cost = cost
        self._gpu_bytes_per_s = gpu_bytes_per_s

    def of(self, plan: Plan) -> Mapping[int, Add]:
        """Step -> adds of an update, if any."""
        adds: dict[int, Add] = {}
        for i, lists in folded_lists(plan).items():
            step = plan.steps[i]
            assert step.chunk is not None
            add = self.of_update(step.kind, step.chunk, lists)
            if step.part is not None:
                size = self._cost.layout.part_bytes(step.chunk, step.part, add.dram_bytes)
                add = Add(add.seconds * size / add.dram_bytes, size)
            adds[i] = add
        return adds

    def of_update(self, kind: Kind, chunk: int, lists: int = 1) -> Add:
        """lists: added to another list."""
        cost = self._cost
        if kind is Kind.CPU_UPDATE:
            return Add(lists * cost.cpu_add_s(chunk), lists * cost.cpu_add_bytes(chunk))
        return Add(lists * cost.cpu_add_bytes(chunk) / self._gpu_bytes_per_s, 0)


def _adds_s(
    w: Workload, layout: Layout, add_bytes: Callable[[int], int], bytes_per_s: float
) -> dict[tuple[int, int], dict[int, float]]:
    """(chunk, micro-batch) -> moment -> seconds, if all gradients add up on the GPU."""
    table: dict[tuple[int, int], dict[int, float]] = {}
    known: set[int] = set()
    for (t, batch), m in sorted(_final_moments(w).items()):
        if t in known:  # a tensor's first gradient is copied
            at = table.setdefault((layout.chunk_of[t], batch), {})
            at[m] = at.get(m, 0.0) + add_bytes(t) / bytes_per_s
        known.add(t)
    return table


def _final_moments(w: Workload) -> dict[tuple[int, int], int]:
    return {(t, w.moments[m].micro_batch): m for m, tensors in enumerate(w.gradients) for t in tensors}


def _link_of_pins(link: Link, machine: Machine, layout: Layout) -> Link:
    """Means over parameters and states, of which only a part can be pinned; the rest is pageable."""
    can_pin = machine.pinned_budget_bytes
    if can_pin is None or link.pageable_bytes_per_s is None:
        return link
    home_bytes = sum(layout.payload_bytes(c.index, "param") + layout.states_bytes(c.index) for c in layout.chunks)
    pinned = min(1.0, can_pin / max(1, home_bytes))
    pageable = link.pageable_bytes_per_s

    def mean(rate: float) -> float:
        return 1 / (pinned / rate + (1 - pinned) / min(rate, pageable))

    return replace(link, h2d_bytes_per_s=mean(link.h2d_bytes_per_s), d2h_bytes_per_s=mean(link.d2h_bytes_per_s))


class Computing:
    """In any layout, as `CostModel`."""

    def __init__(self, workload: Workload, machine: Machine, *, rank: int | None = None) -> None:
        self.workload = workload
        self.machine = machine
        self.gpu = machine.gpu if rank is None else machine.ranks[rank].gpu
        self._products: dict[tuple[Product, bool], tuple[int, float]] = {}

    @cached_property
    def moments_s(self) -> tuple[float, ...]:
        """[Note: which rate computes a moment]"""
        gpu = replace(self.gpu, memory_bytes=1, usable_bytes=1, context_bytes=0)  # its rates
        rates = (gpu, self.machine.framework, self.machine.groups, self._recorded)
        known = self.workload.derived.get(_MOMENTS)
        if not (isinstance(known, tuple) and known[0] == rates):
            self.workload.derived[_MOMENTS] = known = rates, self._moments_s()
        seconds: tuple[float, ...] = known[1]
        return seconds

    def _moments_s(self) -> tuple[float, ...]:
        w, gpu = self.workload, self.gpu
        rate = _rate_of(gpu, w.compute_dtype)
        out: list[float] = []
        known: dict[tuple[object, ...], float] = {}  # micro-batches repeat each other's kernels
        for i, m in enumerate(w.moments):
            summed_s = self.group_s(m.collectives) if m.collectives else 0.0
            if self._recorded and m.duration_s is not None:
                out.append(m.duration_s)
            elif gpu.launch_s is None:
                out.append((m.flops - self._saved_flops(m, rate)) / rate + summed_s)
            elif m.flops or m.bytes_read or m.bytes_written:
                key = (
                    m.module, m.flops, m.bytes_read, m.bytes_written, id(m.products), id(m.attentions), w.gradients[i]
                )  # fmt: skip
                if (kernels_s := known.get(key, -1.0)) < 0:
                    kernels_s = known[key] = self._kernels_s(i, rate)
                python = self.machine.framework
                own_s = kernels_s + summed_s
                if python is not None:
                    own_s = max(own_s, python.seconds(m.operators + len(m.collectives))) + python.wait_s
                out.append(own_s)
            else:
                out.append(summed_s)
        return tuple(out)

    def group_s(self, collectives: Sequence[Collective]) -> float:
        """One after the other round a ring, an all-reduce twice. Raises PlanError where nothing joins the ranks."""
        seconds = 0.0
        for what, name, size in collectives:
            group = self.machine.group(name)
            if group is None:
                raise PlanError(f"machine {self.machine.name!r} has no {name} group; the job has an {what} over it")
            hops = (2 if what == "all_reduce" else 1) * (group.ranks - 1)
            seconds += hops * (group.fabric.latency_s + size / group.ranks / group.fabric.rate_of(size))
        return seconds

    @property
    def _recorded(self) -> bool:
        return self.workload.recorded_on in (self.machine.name, slowest_of(self.machine))

    @property
    def _operator_bytes_per_s(self) -> float:
        return self.gpu.operator_bytes_per_s or self.gpu.hbm_bytes_per_s

    def _kernels_s(self, moment: int, rate: float) -> float:
        w, gpu = self.workload, self.gpu
        m = w.moments[moment]
        moved = m.bytes_read + m.bytes_written
        assert gpu.launch_s is not None
        shape, low = gpu.products if m.products else None, self._low_rate(m)
        curve = gpu.matmul_tables.get(w.compute_dtype, ())
        if curve and m.flops and shape is None:
            rate *= rate_at(curve, m.flops) / best_rate(curve)  # a rate that the user changed keeps the curve's form
        if gpu.operator_bytes_per_s is not None:
            moved += gradient_traffic_bytes(w, moment)
        flops, products_s = m.flops, 0.0
        if shape is None:
            flops -= self._saved_flops(m, rate)
        else:
            rows = [self._product(product, rate, low) for product in m.products]
            flops -= sum(map(product_flops, m.products))
            moved = max(0, moved - sum(size for size, _ in rows))
            products_s = sum(seconds for _, seconds in rows)
        if gpu.products is not None and m.attentions:
            flops -= sum(map(call_flops, m.attentions))
            products_s += sum(gpu.products.attention_s(w.attention, call, rate) for call in m.attentions)
        elif gpu.products is not None and w.attention == USUAL:
            rate *= gpu.products.flash
        return products_s + flops / rate + moved / self._operator_bytes_per_s + gpu.launch_s

    def _product(self, product: Product, rate: float, low: float | None) -> tuple[int, float]:
        """(bytes, seconds).

        rate: of large products.
        low: that of products in fp8, in a moment that has such.
        """
        low = low if in_low_dtype(product) else None
        known = self._products.get((product, low is None))
        if known is None:
            assert self.gpu.products is not None
            width = DTYPES[self.workload.compute_dtype].bytes
            size = moved = _product_bytes(product, width)
            if low is not None:
                batches, m, _, n = product
                moved = (size + batches * m * n * width) // 2
            fp32 = width == DTYPES[MASTER].bytes
            known = size, self.gpu.products.seconds(product, low or rate, moved, fp32=fp32)
            self._products[product, low is None] = known
        return known

    def _low_rate(self, moment: Moment) -> float | None:
        dtype = self.workload.products
        if dtype is None or block_of(moment.module) is None:
            return None
        if dtype not in self.gpu.flops_per_s:
            raise PlanError(
                f"gpu {self.gpu.name!r} has no units for products in {dtype}; leave --products out, or take a card "
                "that has them, such as an H100, an L40S or an RTX 4090"
            )
        return self.gpu.flops_per_s[dtype]

    def _saved_flops(self, moment: Moment, rate: float) -> int:
        """Which take no time at `rate`, because products run at that of fp8."""
        low = self._low_rate(moment)
        if low is None:
            return 0
        cast = sum(map(product_flops, filter(in_low_dtype, moment.products)))
        return round(cast * (1 - rate / low))


class CostModel(Computing):
    """rank: whose GPU and link count, by default a policy's ([Note: several ranks, in seconds]).

    Raises PlanError for a dtype without a rate, and a step that it cannot time.
    """

    def __init__(self, workload: Workload, machine: Machine, layout: Layout, *, rank: int | None = None) -> None:
        super().__init__(workload, machine, rank=rank)
        self.layout = layout
        link = expected_link(machine) if rank is None else machine.ranks[rank].link
        self.link = _link_of_pins(link, machine, layout)

    @cached_property
    def gpu_adds(self) -> GpuAdds:
        return GpuAdds(self.workload, self.layout, self._operator_bytes_per_s, self._add_bytes, free=self._recorded)

    def _add_bytes(self, tensor: int) -> int:
        t = self.workload.tensors[tensor]
        copied = 2 * t.bytes if self.gpu.operator_bytes_per_s is not None else 0
        return 2 * self.layout.sum_width(self.layout.chunk_of[tensor]) * t.numel + t.bytes - copied

    @cached_property
    def update_adds(self) -> UpdateAdds:
        return UpdateAdds(self, self._operator_bytes_per_s)

    @property
    def params(self) -> tuple[int, ...]:
        """Of one rank's slice without padding, 0 if frozen."""
        return self.layout.trained_params

    @cached_property
    def adam_bytes_per_s(self) -> float:
        """Host traffic of one rank's CPU Adam alone."""
        return self.machine.adam_params_per_s * ADAM_BYTES_PER_PARAM

    def transfer_s(self, size_bytes: int, direction: str, via: str | None = None) -> float:
        """Latency + bytes / rate; 0 bytes take no time.

        direction: "h2d" or "d2h".
        via: "pageable" for host memory that is not pinned.

        Raises PlanError without a rate.
        """
        link = self.link
        if size_bytes == 0:
            return 0.0
        rate = {"h2d": link.h2d_bytes_per_s, "d2h": link.d2h_bytes_per_s}[direction]
        curve = {"h2d": link.h2d_table, "d2h": link.d2h_table}[direction]
        # The difference to a copy at the best rate, in seconds, stays the same on a link that is throttled.
        fixed_s = size_bytes / rate_at(curve, size_bytes) - size_bytes / best_rate(curve) if curve else 0.0
        if via == PAGEABLE:
            if link.pageable_bytes_per_s is None:
                raise PlanError(
                    f"link {link.name!r} has no rate for copies of memory that is not pinned; give pageable_gb_per_s "
                    "in a machine file, or measure this machine (pstar calibrate)"
                )
            rate = min(rate, link.pageable_bytes_per_s)
        return link.latency_s + fixed_s + size_bytes / rate

    def collective_s(self, size_bytes: int, chunk: int | None = None) -> float:
        """Of a gather, or a reduce-scatter within one replica ([Note: collectives]).

        size_bytes: all slices together.
        chunk: whose; None for one that all ranks have.
        """
        spread = 1 if chunk is None else self.layout.chunks[chunk].spread
        inside, nodes = self._slices
        beside = min(spread, inside)
        return self._ring_s(size_bytes * beside, inside // beside, nodes * beside // spread, beside=beside)

    def reduce_s(self, size_bytes: int, chunk: int | None = None) -> float:
        """Of a reduce-scatter whose slices are sums over all ranks that have the chunk ([Note: collectives]).

        size_bytes: all slices together.
        """
        inside, nodes = self._slices
        summed = (self.machine.local_ranks // inside, self.machine.nodes // nodes)
        if summed == (1, 1):
            return self.collective_s(size_bytes, chunk)
        return self.collective_s(size_bytes) + 2 * self._ring_s(size_bytes // nodes, *summed, beside=inside)

    @cached_property
    def _slices(self) -> tuple[int, int]:
        """Ranks of a node and nodes among which a chunk is sliced; those of the machine for a layout that is not."""
        m = self.machine
        if m.data_parallel_size == 1:
            raise PlanError(f"machine {m.name!r} has one gpu; collectives need several")
        ranks = self.layout.ranks if self.layout.ranks > 1 else m.data_parallel_size
        inside = min(ranks, m.local_ranks)
        return inside, ranks // inside

    def _ring_s(self, size_bytes: int, inside: int, nodes: int, *, beside: int = 1) -> float:
        """Rings over `inside` ranks of each of `nodes` nodes.

        size_bytes: of all rings that pass a node together.
        beside: rings that pass a node, each over ranks of its own.
        """
        if size_bytes == 0 or inside * nodes == 1:
            return 0.0
        m, rates, latency_s = self.machine, [], 0.0
        if inside > 1 and m.peer is not None:
            rates.append(beside * m.peer.rate_of(size_bytes / beside))
            latency_s += (inside - 1) * m.peer.latency_s
        elif inside > 1:
            rates.append(beside * min(m.link.h2d_bytes_per_s, m.link.d2h_bytes_per_s) * m.gpu.peer_share)
            if m.root_bytes_per_s is not None:
                rates.append(m.root_bytes_per_s)
            latency_s += (inside - 1) * m.link.latency_s
        if nodes > 1:
            if m.network is None:
                raise PlanError(
                    f"machine {m.name!r} has {m.nodes} nodes and no network; give network = NAME in a machine file"
                )
            rates.append(m.network.rate_of(size_bytes))
            latency_s += (nodes - 1) * m.network.latency_s
        ranks = inside * nodes
        return latency_s + size_bytes * (ranks - 1) / ranks / min(rates)

    def border_s(self, border: Border) -> float:
        """Once both stages are ready. Raises PlanError if the machine does not say what joins the two."""
        fabric = next((each.fabric for each in self.machine.neighbours if each.stage == border.peer), None)
        if fabric is None:
            raise PlanError(f"machine {self.machine.name!r} does not say what joins it with stage {border.peer}")
        return fabric.latency_s + border.bytes / fabric.rate_of(border.bytes)

    def nvme_s(self, size_bytes: int, direction: str) -> float:
        """The node's ranks use its disks in equal parts.

        direction: "read" or "write".

        Raises PlanError for a machine without disks.
        """
        disks = self.machine.nvme
        if disks is None:
            raise PlanError(
                f"machine {self.machine.name!r} has no disks; give --disks FOLDER, or disks = NAME in a machine file"
            )
        rate = disks.read_bytes_per_s if direction == "read" else disks.write_bytes_per_s
        return disks.latency_s + size_bytes * self.machine.local_ranks / rate if size_bytes else 0.0

    def cpu_adam_bytes(self, chunk: int) -> int:
        """Host memory traffic of one update; `Step.bytes` of its cpu_adam."""
        return self.layout.updates_bytes[chunk]

    def cpu_adam_s(self, chunk: int) -> float:
        """Elements by the rate of the optimizer's update beside AdamW's or else by its traffic beside AdamW's 28 bytes
        per parameter, no less than its arithmetic on the rank's threads; and the update's matrix products."""
        m, states, params = self.machine, self.layout.states_of(chunk), self.params[chunk]
        share = m.updates.get(states.name, states.cpu_share)
        if share is not None:
            elements_s = params / (m.adam_params_per_s * share)
        else:
            elements_s = self.cpu_adam_bytes(chunk) / self.adam_bytes_per_s
            if states.cpu_core_params_per_s is not None:
                elements_s = max(elements_s, params / (m.update_threads * states.cpu_core_params_per_s))
        flops = sum(map(product_flops, self._update_products(chunk)))
        return elements_s + flops / self.layout.slices_of(chunk) / (CPU_CORE_FLOPS * m.host.cores / m.local_ranks)

    def cpu_add_bytes(self, chunk: int) -> int:
        """Traffic of grad32 += grad: read the gradient (working dtype), read and write the sum."""
        width = DTYPES[self.layout.chunks[chunk].dtype].bytes
        return self.params[chunk] * (2 * self.layout.sum_width(chunk) + width)

    def cpu_add_s(self, chunk: int) -> float:
        """At the memory rate that CPU Adam reaches."""
        return self.cpu_add_bytes(chunk) / self.adam_bytes_per_s

    def gpu_adam_bytes(self, chunk: int) -> int:
        return self.layout.updates_bytes[chunk]

    def gpu_adam_s(self, chunk: int) -> float:
        """Traffic over the HBM bandwidth (28 bytes per parameter for AdamW), and the products of the update."""
        products_s, shape = 0.0, self.gpu.products
        for product in self._update_products(chunk):
            rate = _rate_of(self.gpu, WORKING if WORKING in self.gpu.flops_per_s else self.workload.dtype)
            size = _product_bytes(product, DTYPES[WORKING].bytes)
            products_s += product_flops(product) / rate if shape is None else shape.seconds(product, rate, size)
        return self.gpu_adam_bytes(chunk) / self.gpu.hbm_bytes_per_s + products_s / self.layout.slices_of(chunk)

    def _update_products(self, chunk: int) -> list[Product]:
        of_tensor = self.layout.states_of(chunk).products
        return [] if of_tensor is None else [p for s in self.layout.chunks[chunk].slots for p in of_tensor(s.shape)]

    def work_bytes(self, kind: Kind, chunk: int) -> int | None:
        """Memory traffic of a step that computes with a chunk's lists: its `Step.bytes`. None for other kinds."""
        return _WORK[kind][0](self, chunk) if kind in _WORK else None

    def seconds(self, step: Step) -> float:
        """Running alone; for a moment without the adds of [Note: adds on the GPU]."""
        kind = step.kind
        if kind is Kind.COMPUTE:
            if step.moment is None:
                raise PlanError(f"step {step.id}: a compute step needs a moment")
            return self.moments_s[step.moment]
        if kind in _FREE:
            return 0.0
        route = ROUTES.get(kind)
        if route == "h2d" or route == "d2h":
            return self.transfer_s(step.bytes, route, step.via)
        if route == "net":
            assert step.chunk is not None
            summed = self.reduce_s if kind is Kind.REDUCE_SCATTER else self.collective_s
            return summed(step.bytes, step.chunk)
        if route in _OF_GPUS:
            assert step.stash is not None
            return self.border_s(self.workload.borders[step.stash])
        if route is not None:
            return self.nvme_s(step.bytes, "read" if route == "nvme_read" else "write")
        _, seconds = _WORK[kind]
        if step.chunk is None:
            raise PlanError(f"step {step.id}: {kind} needs a chunk")
        if step.part is not None:
            return step.bytes / self.adam_bytes_per_s
        return seconds(self, step.chunk) * (UNFUSED_TRAFFIC if step.via == UNFUSED else 1)

    def duty(self, step: Step) -> float:
        """Share of the nominal seconds in which a step keeps the shared resources busy: below 1 for a copy over a link
        that is throttled below the measured rate."""
        link = self.link
        route = ROUTES.get(step.kind)
        if route == "h2d" and link.h2d_table:
            return min(1.0, link.h2d_bytes_per_s / best_rate(link.h2d_table))
        if route == "d2h" and link.d2h_table:
            return min(1.0, link.d2h_bytes_per_s / best_rate(link.d2h_table))
        return 1.0

    def dram_bytes(self, step: Step) -> int:
        """A copy's bytes once, Adam's `step.bytes`, otherwise 0."""
        return step.bytes if step.kind in _ON_HOST else 0

    def step_costs(self, plan: Plan) -> StepCosts:
        """For `follow`."""
        slowed, steps = bool(self._measured_slowdowns), plan.steps
        seconds = [self.seconds(step) for step in steps]
        added = self.gpu_adds.of(plan)
        if added:
            for i, step in enumerate(steps):
                if step.kind is Kind.COMPUTE and step.moment is not None:
                    seconds[i] += added.get(step.moment, 0.0)
        dram_bytes = [self.dram_bytes(step) for step in steps]
        for i, add in self.update_adds.of(plan).items():
            seconds[i] += add.seconds
            dram_bytes[i] += add.dram_bytes
        return StepCosts(
            seconds=seconds,
            dram_bytes=dram_bytes,
            duty=[self.duty(step) for step in steps] if slowed else [1.0] * len(steps),
        )

    def rates(self, *, measured: bool = True) -> Rates:
        """While the other ranks of the node do the same.

        measured: with the measured factors of a calibrated machine. `choose` leaves them out, because a draft's rows do
            not say how busy they keep a link.
        """
        machine, slowdowns = self.machine, self._measured_slowdowns
        return Rates(
            dram_bytes_per_s=machine.host.dram_bytes_per_s / machine.local_ranks,
            duplex=machine.link.duplex,
            slowdowns=slowdowns if measured else {},
            compute_while_net=1.0 if measured and slowdowns else machine.compute_while_net,
            disks=None if machine.nvme is None else machine.nvme.beside,
        )

    @cached_property
    def _measured_slowdowns(self) -> Mapping[str, float]:
        """A machine that has only that of collectives has none."""
        slowdowns = self.machine.slowdowns
        return slowdowns if slowdowns.keys() - {BY_COLLECTIVES} else {}


_WORK: dict[Kind, tuple[Callable[[CostModel, int], int], Callable[[CostModel, int], float]]] = {
    Kind.CPU_ADD: (CostModel.cpu_add_bytes, CostModel.cpu_add_s),
    Kind.CPU_UPDATE: (CostModel.cpu_adam_bytes, CostModel.cpu_adam_s),
    Kind.GPU_UPDATE: (CostModel.gpu_adam_bytes, CostModel.gpu_adam_s),
}
"""Kinds that compute with a chunk's lists -> (bytes of memory traffic, seconds) as functions of the chunk."""
