"""A machine's rates from torch's profiler (Chrome trace JSON).

[Note: rates of a trace] Sizes within a factor of two are one point of a curve, each shape with its median seconds. A
product is an operator with shapes (`record_shapes=True`), and takes its kernels' seconds, or without a GPU its own.
Copies have bytes; those of unpinned memory are apart. A kernel launched before the one in front had ended waits for
that alone, so the gap between, with the shortest kernels, is what a kernel begins and ends with. A collective waits for
other ranks, a CPU for other programs: the fastest quarter counts. What a trace lacks stays as in the machine.
"""

from __future__ import annotations

import bisect
import gzip
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pstar_sim.catalog.catalog import Catalog, load_catalog
from pstar_sim.catalog.curves import Curve, best_rate
from pstar_sim.catalog.machine import Fabric, Gpu, Host, Link, Machine
from pstar_sim.errors import TraceError
from pstar_sim.units import format_bytes, format_count

LARGEST_BYTES = 8_000_000_000  # of a file, unpacked
LEAST_COPY_BYTES = 64 << 10  # smaller copies are all latency
LEAST_FLOPS = 1e6  # of a product
LEAST_PARAMS = 1e6  # of an update
KERNELS_OF_MOMENT = 3  # small ones, as `pstar calibrate` counts them

_DTYPES = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16"}
_WIDTHS = {"Float": 4, "BFloat16": 2, "Half": 2, "Byte": 1, "Char": 1, "Int": 4, "Long": 8, "Double": 8}
_SENT: Mapping[str, Callable[[float, float, int], float]] = {
    "allgather": lambda sent, got, ranks: got * (ranks - 1) / ranks,
    "_allgather_base": lambda sent, got, ranks: got * (ranks - 1) / ranks,
    "reduce_scatter": lambda sent, got, ranks: sent * (ranks - 1) / ranks,
    "_reduce_scatter_base": lambda sent, got, ranks: sent * (ranks - 1) / ranks,
    "allreduce": lambda sent, got, ranks: 2 * sent * (ranks - 1) / ranks,
}
"""Collective -> bytes that a rank sends, of those that it gives and gets."""


class _Point(NamedTuple):
    """seconds: of the amount (flops, bytes, parameters)."""

    size: float
    amount: float
    seconds: float
    shape: object = None


class _Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]
    deviceProperties: list[dict[str, Any]] = []


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a trace says of its machine ([Note: rates of a trace]), empty where it says nothing.

    gpu: the first, by the driver.
    products: dtype -> flops/s over a product's flops.
    kernel_s: beginning and end of a kernel.
    collectives: bytes/s that a rank sends, over a collective's bytes.
    counts: in words.
    """

    path: str
    gpu: str | None
    products: Mapping[str, Curve]
    h2d: Curve
    d2h: Curve
    pageable_bytes_per_s: float | None
    kernel_s: float | None
    adam_params_per_s: float | None
    collectives: Curve
    counts: Sequence[str]


def load_profile(path: str | Path) -> Profile:
    """Raises TraceError, naming the file, without rates."""
    trace = _read(Path(path))
    spans = [e for e in trace.traceEvents if e.ph == "X" and e.dur > 0]
    copies = [e for e in spans if e.cat == "gpu_memcpy"]
    kernels = [e for e in spans if e.cat == "kernel"]
    pinned = [e for e in copies if "Pageable" not in e.name]
    h2d, d2h = (_curve(_copies(pinned, way)) for way in ("HtoD", "DtoH"))
    pageable = [p for way in ("HtoD", "DtoH") for p in _copies([e for e in copies if "Pageable" in e.name], way)]
    on_gpu = bool(trace.deviceProperties or kernels or copies)
    rows = _products(spans, kernels, on_gpu=on_gpu)
    products = {dtype: _curve(points, fastest=not on_gpu) for dtype, points in rows.items()}
    kernel_s = _kernel_s(spans, kernels)
    adam = list(_updates(spans, on_gpu=on_gpu))
    collectives = _curve(_collectives(kernels), fastest=True)
    numbers = {
        "kernel": len(kernels),
        "product": sum(map(len, rows.values())),
        "memory transfer": len(copies),
        "CPU update": len(adam),
    }
    counts = [format_count(number, what) for what, number in numbers.items() if number]
    if not (h2d or d2h or products or adam or collectives or pageable):
        raise TraceError(
            f"{path}: has no copies of a GPU's memory and no products with shapes; record it with "
            "torch.profiler.profile(activities=[CPU, CUDA], record_shapes=True) and export_chrome_trace"
        )
    names = [one.get("name") for one in trace.deviceProperties]
    return Profile(
        path=str(path),
        gpu=next((name for name in names if isinstance(name, str)), None),
        products=products,
        h2d=h2d,
        d2h=d2h,
        pageable_bytes_per_s=_rate(pageable, fastest=False) if pageable else None,
        kernel_s=kernel_s,
        adam_params_per_s=_rate(adam, fastest=True) if adam else None,
        collectives=collectives,
        counts=counts,
    )


def _read(path: Path) -> _Trace:
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = file.read(LARGEST_BYTES + 1)
        else:
            data = path.read_bytes() if path.stat().st_size <= LARGEST_BYTES else bytes(LARGEST_BYTES + 1)
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > LARGEST_BYTES:
        raise TraceError(f"{path}: has more than {format_bytes(LARGEST_BYTES)}; trace fewer steps")
    try:
        return msgspec.json.decode(data, type=_Trace)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise TraceError(f"{path}: is not a trace of torch's profiler: {why}") from None


def _curve(points: Iterable[_Point], *, fastest: bool = False) -> Curve:
    """Sizes seen under three times are left out where others are seen more often."""
    groups: list[list[_Point]] = []
    for point in sorted(points, key=lambda point: point.size):
        if groups and point.size <= 2 * groups[-1][0].size:
            groups[-1].append(point)
        else:
            groups.append([point])
    often = [group for group in groups if len(group) >= 3] or groups
    return tuple((statistics.median(p.size for p in group), _rate(group, fastest=fastest)) for group in often)


def _rate(group: Sequence[_Point], *, fastest: bool) -> float:
    shapes: dict[object, list[_Point]] = defaultdict(list)
    for point in group:
        shapes[point.shape].append(point)
    amount = seconds = 0.0
    for rows in shapes.values():
        times = sorted(point.seconds / point.amount for point in rows)
        count = max(1, len(times) // 4) if fastest else len(times)
        of_shape = sum(point.amount for point in rows)
        amount += of_shape
        seconds += of_shape * statistics.median(times[:count])
    return amount / seconds


def _copies(copies: Sequence[_Event], way: str) -> Iterator[_Point]:
    for event in copies:
        size = event.args.get("bytes")
        if way in event.name and isinstance(size, int) and size >= LEAST_COPY_BYTES:
            yield _Point(size, size, event.dur * 1e-6)


def _products(spans: Sequence[_Event], kernels: Sequence[_Event], *, on_gpu: bool) -> dict[str, list[_Point]]:
    seconds: dict[object, float] = defaultdict(float)
    for kernel in kernels:
        seconds[kernel.args.get("External id")] += kernel.dur * 1e-6
    found: dict[str, list[_Point]] = defaultdict(list)
    for event in spans:
        if event.cat == "cpu_op" and (flops := _flops(event)) >= LEAST_FLOPS:
            took_s = seconds.get(event.args.get("External id"), 0.0) if on_gpu else event.dur * 1e-6
            dtype = _dtype(event)
            if took_s > 0 and dtype is not None:
                shape = str((event.args.get("Input Dims"), event.args.get("Input Strides")))
                found[dtype].append(_Point(flops, flops, took_s, shape))
    return found


_FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operator -> position of the first factor among its inputs."""


def _flops(event: _Event) -> float:
    first, dims = _FACTORS.get(event.name), event.args.get("Input Dims")
    if first is None or not isinstance(dims, list) or len(dims) < first + 2:
        return 0.0
    one, two = dims[first], dims[first + 1]
    whole = all(isinstance(d, list) and all(isinstance(n, int) and 0 < n < 2**40 for n in d) for d in (one, two))
    if not whole or len(one) < 2 or len(two) < 2 or one[-1] != two[-2]:
        return 0.0
    return float(2 * prod(one) * two[-1])


def _dtype(event: _Event) -> str | None:
    types = event.args.get("Input type")
    place = _FACTORS[event.name]
    return _DTYPES.get(str(types[place])) if isinstance(types, list) and len(types) > place else None


def _kernel_s(spans: Sequence[_Event], kernels: Sequence[_Event]) -> float | None:
    launched = {
        e.args.get("correlation"): e.ts + e.dur for e in spans if e.cat == "cuda_runtime" and "Launch" in e.name
    }
    streams: dict[object, list[_Event]] = defaultdict(list)
    for kernel in kernels:
        streams[kernel.args.get("device"), kernel.args.get("stream")].append(kernel)
    gaps = []
    for rows in streams.values():
        rows.sort(key=lambda kernel: kernel.ts)
        for before, after in itertools.pairwise(rows):
            ready = launched.get(after.args.get("correlation"))
            end = before.ts + before.dur
            if ready is not None and ready < end <= after.ts:
                gaps.append(after.ts - end)
    if not gaps:
        return None
    durations = sorted(kernel.dur for kernel in kernels)
    return (statistics.median(gaps) + durations[len(durations) // 20]) * 1e-6


def _updates(spans: Sequence[_Event], *, on_gpu: bool) -> Iterator[_Point]:
    """Each fused Adam on the CPU: it launched nothing."""
    launches = sorted(e.ts for e in spans if e.cat == "cuda_runtime") if on_gpu else []
    for event in spans:
        if event.cat != "cpu_op" or event.name not in ("aten::_fused_adamw_", "aten::_fused_adam_"):
            continue
        dims = event.args.get("Input Dims")
        shapes = dims[0] if isinstance(dims, list) and dims and isinstance(dims[0], list) else []
        rows = [s for s in shapes if isinstance(s, list) and s and all(isinstance(n, int) and n > 0 for n in s)]
        params = float(sum(prod(shape) for shape in rows))
        first = bisect.bisect_left(launches, event.ts)
        launches_any = first < len(launches) and launches[first] < event.ts + event.dur
        if params >= LEAST_PARAMS and not launches_any:
            yield _Point(params, params, event.dur * 1e-6)


def _collectives(kernels: Sequence[_Event]) -> Iterator[_Point]:
    """By all slices' bytes, where NCCL said sizes."""
    for kernel in kernels:
        args = kernel.args
        sent = _SENT.get(str(args.get("Collective name")))
        width, ranks = _WIDTHS.get(str(args.get("dtype"))), args.get("Group size")
        given, got = args.get("In msg nelems"), args.get("Out msg nelems")
        if sent is None or width is None or not (isinstance(given, int) and isinstance(got, int)):
            continue
        if isinstance(ranks, int) and ranks > 1:
            size = float(max(given, got) * width)
            if size >= LEAST_COPY_BYTES:
                yield _Point(size, sent(given * width, got * width, ranks), kernel.dur * 1e-6)


def machine_named_by(profile: Profile, catalog: Catalog | None = None) -> str | None:
    """The first of the catalog whose GPU the trace names."""
    catalog = catalog or load_catalog()
    if profile.gpu is None:
        return None
    gpu = next((n for n, e in catalog.gpus.items() if profile.gpu in e.values.device_names), None)
    return next((name for name, entry in catalog.machines.items() if entry.values.gpu == gpu), None) if gpu else None


def with_profile(machine: Machine, profile: Profile, *, name: str) -> Machine:
    """The rates of a trace in place of its own."""
    source = f"measured in a trace of torch's profiler, {Path(profile.path).name}: {', '.join(profile.counts)}"
    gpu = _gpu(machine.gpu, profile, source, name)
    link = _link(machine.link, profile, source, name)
    ranks = tuple(replace(rank, gpu=gpu, link=link) for rank in machine.ranks)
    peer = machine.peer
    if peer is not None and profile.collectives:
        peer = _peer(peer, profile.collectives, source, name)
    host = _host(machine.host, profile, source, name)
    return replace(machine, name=name, ranks=ranks, host=host, peer=peer)


def _gpu(gpu: Gpu, profile: Profile, source: str, name: str) -> Gpu:
    if not profile.products and profile.kernel_s is None:
        return gpu
    best = {dtype: best_rate(curve) for dtype, curve in profile.products.items()}
    launch_s, shape = gpu.launch_s, gpu.products
    if profile.kernel_s is not None:
        launch_s = KERNELS_OF_MOMENT * profile.kernel_s
        shape = None if shape is None else replace(shape, kernel_s=profile.kernel_s)
    return replace(
        gpu,
        flops_per_s={**gpu.flops_per_s, **best},
        matmul_tables={**gpu.matmul_tables, **profile.products},
        launch_s=launch_s,
        products=shape,
        operator_bytes_per_s=gpu.operator_bytes_per_s or gpu.hbm_bytes_per_s,
        measured=True,
        known="measured",
        source=source,
    )


def _link(link: Link, profile: Profile, source: str, name: str) -> Link:
    if not profile.h2d and not profile.d2h and profile.pageable_bytes_per_s is None:
        return link
    return replace(
        link,
        name=f"{name}-link",
        h2d_bytes_per_s=best_rate(profile.h2d) if profile.h2d else link.h2d_bytes_per_s,
        d2h_bytes_per_s=best_rate(profile.d2h) if profile.d2h else link.d2h_bytes_per_s,
        h2d_table=profile.h2d or link.h2d_table,
        d2h_table=profile.d2h or link.d2h_table,
        pageable_bytes_per_s=profile.pageable_bytes_per_s or link.pageable_bytes_per_s,
        measured=True,
        known="measured",
        source=source,
    )


def _host(host: Host, profile: Profile, source: str, name: str) -> Host:
    if profile.adam_params_per_s is None:
        return host
    rate = profile.adam_params_per_s
    return replace(
        host, name=f"{name}-host", adam_params_per_s=rate, adam_table=(), measured=True, known="measured", source=source
    )


def _peer(peer: Fabric, curve: Curve, source: str, name: str) -> Fabric:
    return replace(
        peer,
        name=f"{name}-peer",
        bytes_per_s=best_rate(curve),
        table=curve,
        measured=True,
        known="measured",
        source=source,
    )
