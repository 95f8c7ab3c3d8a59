"""calibrate: measures the machine that this runs on, and describes it as a `Machine` with the measured figures.

[Note: the virtual accelerator's memory] The virtual accelerator has no memory of its own: a quarter of the available
memory counts as the device's and the rest as the host's, until a plan says otherwise (`--gpu-memory`, `--host-memory`).
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import torch

from executor.calibration import compute, copies, host, shapes, together, wire
from executor.calibration.bench import Bench, Effort
from executor.calibration.folders import FolderRates, folder_rates
from executor.calibration.measured_device import Device, VirtualDevice, open_device
from executor.disks.folders import DiskFolders
from executor.recording import moment_costs
from pstar_sim.catalog.curves import Curve, best_rate
from pstar_sim.catalog.here import read_cores, read_memory, read_numa
from pstar_sim.catalog.loader import load_catalog, load_machine
from pstar_sim.catalog.machine import Fabric, Framework, Gpu, Host, Link, Machine, Nvme, Rank
from pstar_sim.catalog.product_shape import ProductShape
from pstar_sim.catalog.writing import machine_toml
from pstar_sim.core.step import Queue
from pstar_sim.dtypes import DTYPES
from pstar_sim.errors import CatalogError, DiskError, PlanError
from pstar_sim.files import check_writable, write_atomically
from pstar_sim.units import GB, format_bytes, format_count

_BUSY = 0.1
# Compute while it is timed beside other queues: a product's extent, rows of the other operators, dtype.
_TYPICAL = {"virtual": (1024, 64, torch.float32), "cuda": (4096, 4096, torch.bfloat16)}


@dataclass(kw_only=True)
class Findings:
    """The measurements. Rates in bytes/s, flops/s, parameters/s.

    skipped: figures not measured, each with its reason.
    matmul: dtype -> curve of flops/s over the flops of a product.
    wait_s: that the engine adds to a moment.
    constant_s: the constant of [Note: seconds of a moment].
    operator_bytes_per_s: the bandwidth of [Note: seconds of a moment].
    adam: curve of parameters/s over threads.
    updates: rule -> its parameters/s over AdamW's.
    network: (backend, curve of bytes/s over the bytes of a collective, latency in s).
    numa: NUMA nodes: (of the cores that this process may use, of the machine); None: not known.
    disks: (rates, bytes of the disk).
    taken_by_others: share of processor time that other programs had.
    """

    matmul: dict[str, Curve] = field(default_factory=dict)
    products: ProductShape | None = None
    python_s: float = 0.0
    wait_s: float = 0.0
    memory_bytes_per_s: float = 0.0
    constant_s: float = 0.0
    operator_bytes_per_s: float = 0.0
    h2d: Curve = ()
    d2h: Curve = ()
    pageable_bytes_per_s: float | None = None
    adam: Curve = ()
    dram_bytes_per_s: float = 0.0
    network: tuple[str, Curve, float] | None = None
    numa: tuple[int, int] | None = None
    disks: tuple[FolderRates, int] | None = None
    slowdowns: dict[str, float] = field(default_factory=dict)
    updates: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    taken_by_others: float = 0.0


def calibrate(
    path: str | Path,
    *,
    device: str = "auto",
    quick: bool = False,
    on_part: Callable[[str, int, int], object] = lambda name, number, count: None,
) -> tuple[Machine, Findings]:
    """Measure this machine and write its catalog file, atomically. Returns the machine, named after the file, and the
    measurements.

    path: the file, which must end in .toml for `pstar --machine`.
    device: "virtual", "cuda" or "auto" (CUDA where there is one).
    quick: a quarter of the time, twice the scatter. on_part: called before each part with its name, its number and
    their count.

    Raises PlanError for a missing device, CatalogError for a file that cannot be written.
    """
    path = Path(path)
    check_writable(path, error=CatalogError)
    cores = read_cores(Path("/"))
    opened = open_device(device, cores=cores)
    found = measure(opened, Effort.quick() if quick else Effort(), cores=cores, folder=path.parent, on_part=on_part)
    machine = machine_of(found, opened, name=path.stem, cores=cores)
    write_machine(machine, found, path)
    return machine, found


def write_machine(machine: Machine, found: Findings, path: Path) -> None:
    head = [
        f"A machine measured by `pstar calibrate` on {date.today()}: {_origin()}.",
        f"Use it with --machine {path.name}; sizes with --gpu-memory and --host-memory.",
        "Tables are [size, rate] pairs, sizes ascending: products in GFLOP and TFLOP/s, copies in MB and GB/s, Adam in",
        "threads and billion parameters per second.",
        *found.skipped,
    ]
    text = "".join(f"# {line}\n" for line in head) + "\n" + machine_toml(machine, checked=date.today())
    write_atomically(path, text, error=CatalogError)


def measure(
    device: Device,
    effort: Effort,
    *,
    cores: int,
    folder: Path,
    on_part: Callable[[str, int, int], object] = lambda name, number, count: None,
) -> Findings:
    found = Findings(numa=read_numa(Path("/")))
    bench = Bench(effort)
    threads = host.thread_counts(cores)

    def products() -> None:
        found.matmul = compute.matmul_rates(device, bench)

    def products_by_shape() -> None:
        found.products = _products(device, bench, found)

    def memory() -> None:
        found.memory_bytes_per_s = compute.memory_rate(device, bench)

    def training() -> None:
        found.python_s = moment_costs.python_s(device, bench)
        found.constant_s, found.operator_bytes_per_s, found.wait_s = _moments(device, bench, found)

    def to_device() -> None:
        found.h2d = copies.copy_rates(device, bench, Queue.H2D)

    def to_host() -> None:
        found.d2h = copies.copy_rates(device, bench, Queue.D2H)

    def pageable() -> None:
        found.pageable_bytes_per_s = copies.pageable_rate(device, bench)
        if found.pageable_bytes_per_s is None:
            found.skipped.append("pinned against pageable: the virtual accelerator's host memory is never pinned")

    def adam() -> None:
        found.adam = tuple((float(count), rate) for count, rate in host.adam_rates(bench, threads))

    def updates() -> None:
        found.updates = host.update_shares(bench, threads[-1])

    def dram() -> None:
        found.dram_bytes_per_s = host.dram_rate(bench, threads)

    def disks() -> None:
        try:
            rates = folder_rates([folder], threads=(DiskFolders.threads,))
        except DiskError as error:
            found.skipped.append(f"disk: {error}")
        else:
            found.disks = rates, shutil.disk_usage(folder).total

    def network() -> None:
        answer = wire.collective_rates()
        if isinstance(answer, str):
            found.skipped.append(answer)
        else:
            found.network = answer

    def beside() -> None:
        found.slowdowns = _slowdowns(device, bench)

    parts: list[tuple[str, Callable[[], None]]] = [
        ("products by size and dtype", products),
        ("products by shape", products_by_shape),
        ("device memory", memory),
        ("moments of training", training),
        ("copies to the device", to_device),
        ("copies to the host", to_host),
        ("pinned against pageable", pageable),
        ("CPU Adam by threads", adam),
        ("updates of other optimizers", updates),
        ("host memory", dram),
        ("things that run at once", beside),
        ("disk", disks),
        ("collectives", network),
    ]
    for number, (name, part) in enumerate(parts):
        on_part(name, number, len(parts))
        part()
    found.taken_by_others = device.taken_by_others()
    return found


def _products(device: Device, bench: Bench, found: Findings) -> ProductShape:
    dtype = next(dtype for dtype in shapes.TIMED_DTYPE[device.kind] if dtype in found.matmul)
    flops_per_s = best_rate(found.matmul[dtype])
    sms, tile = device.multiprocessors
    shape = shapes.fit_products(
        shapes.product_seconds(device, bench, dtype),
        flops_per_s=flops_per_s,
        itemsize=DTYPES[dtype].bytes,
        sms=sms,
        tile=tile,
    )
    return replace(shape, flash=shapes.attention_share(device, bench, dtype, flops_per_s))


def _moments(device: Device, bench: Bench, found: Findings) -> tuple[float, float, float]:
    """(seconds of a moment besides products and bytes, bytes/s of its operators, seconds that the engine adds)."""
    if device.kind != "virtual":
        # Operators alone, and about three kernels so small that only their launch takes time.
        _, rate = max(compute.memory_rates(device, bench))
        assert found.products is not None
        found.skipped.append("moments of training: timed on the virtual accelerator only; operators timed alone")
        return 3 * found.products.kernel_s, rate, 0.0
    machine = load_machine("virtual", gpu_memory="1GB", host_memory="3GB")
    gpu = replace(
        machine.gpu,
        flops_per_s={dtype: best_rate(curve) for dtype, curve in found.matmul.items()},
        matmul_tables=found.matmul,
        products=found.products,
    )
    machine = replace(machine, ranks=(replace(machine.ranks[0], gpu=gpu),))
    samples = moment_costs.recorded_samples(machine)
    try:
        constant_s, bytes_per_s = moment_costs.fit(samples)
    except ValueError as error:
        found.skipped.append(f"moments of training: {error}; operators timed alone")
        constant_s, bytes_per_s = 0.0, max(compute.memory_rates(device, bench))[1]
    return constant_s, bytes_per_s, moment_costs.engine_overhead_s(device, bench, machine)


def _slowdowns(device: Device, bench: Bench) -> dict[str, float]:
    """Of compute, CPU Adam and copies both ways, for every pair that runs at once."""
    extent, rows, dtype = _TYPICAL[device.kind]
    _, multiply = compute.product(device, extent, dtype)
    _, operate = compute.between_products(device, rows)
    _, update = host.adam_update(bench.effort.memory_bytes // 4)
    slab = device.backend.host_slab(bench.effort.memory_bytes // 4)
    copier = copies.Copier(device, slab, min(8 << 20, slab.numel() // 4))
    adam_threads = device.adam_threads

    def computing() -> None:
        multiply()
        operate()
        device.finish(Queue.COMPUTE)

    def updating() -> None:
        torch.set_num_threads(adam_threads)
        update()

    def watched(actions: Mapping[str, Callable[[], object]], window_s: float) -> dict[str, float]:
        return together.watch(actions, window_s, enter=device.backend.enter_thread, work_clock=device.work_clock())

    before = torch.get_num_threads()
    try:
        return together.slowdowns(
            {"compute": computing, "adam": updating, "h2d": copier.fetch, "d2h": copier.write_back}, bench, watched
        )
    finally:
        copier.close()
        torch.set_num_threads(before)


# -- from measurements to a machine -----------------------------------------------------------------------------------


def machine_of(
    found: Findings, device: Device, *, name: str, cores: int, memory: tuple[int, int] | None = None
) -> Machine:
    """memory: (bytes, available bytes) of the host, by default the system's."""
    total, available = read_memory(Path("/")) if memory is None else memory
    origin = f"measured by pstar calibrate: {device.title}, {_origin()}"
    notes = list(found.skipped)
    if found.taken_by_others > _BUSY:
        notes.append(
            f"other programs had {found.taken_by_others:.0%} of the processor time meanwhile: measure again when the "
            "machine is idle"
        )
    gpu = _gpu(found, device, available, origin, notes)
    mine = gpu.usable_bytes if device.kind == "virtual" else 0
    reserved = min(total - 1, max(total - available, min(GB, total // 8)) + mine)
    used = int(device.adam_threads)
    by_threads = {int(count): rate for count, rate in found.adam}
    adam = by_threads.get(used) or max(by_threads.values())
    link = Link(
        name=f"{name}-link",
        h2d_bytes_per_s=best_rate(found.h2d),
        d2h_bytes_per_s=best_rate(found.d2h),
        latency_s=0.0,
        duplex=True,  # the cost of both directions at once is among the slow-downs
        measured=True,
        source=origin,
        known="measured",
        pageable_bytes_per_s=found.pageable_bytes_per_s,
        h2d_table=found.h2d,
        d2h_table=found.d2h,
    )
    ram = Host(
        name=f"{name}-host",
        memory_bytes=total,
        reserved_bytes=reserved,
        dram_bytes_per_s=found.dram_bytes_per_s,
        cores=cores,
        adam_params_per_s=adam,
        measured=True,
        source=f"{origin}; Adam on {format_count(used, 'thread')} as the executor runs it{_bound(found.numa)}",
        known="measured",
        adam_table=found.adam,
        dram_measured=True,
    )
    peer = nvme = None
    if found.network is not None:
        backend, curve, latency_s = found.network
        peer = Fabric(
            name=f"{name}-{backend}",
            bytes_per_s=best_rate(curve),
            latency_s=latency_s,
            measured=True,
            source=f"{origin}; {backend}",
            known="measured",
            table=curve,
        )
    if found.disks is not None:
        rates, size = found.disks
        nvme = Nvme(
            name=f"{name}-disk",
            memory_bytes=size,
            **rates.figures,
            measured=True,
            source=origin,
        )
    return Machine(
        name=name,
        ranks=(Rank(gpu=gpu, link=link, batch_share=1 / device.count),) * device.count,
        host=ram,
        notes="; ".join(notes),
        peer=peer,
        nvme=nvme,
        slowdowns=found.slowdowns,
        updates=found.updates,
        framework=Framework(
            name=f"{name}-python",
            python_s=found.python_s,
            wait_s=found.wait_s,
            source=f"{origin}; wait: what the engine adds to plain torch",
            known="measured",
        ),
    )


def _bound(numa: tuple[int, int] | None) -> str:
    if numa is None or numa[1] == 1:
        return ""
    mine, nodes = numa
    return (
        f"; process bound to one of {nodes} NUMA nodes" if mine == 1 else f"; process on {mine} of {nodes} NUMA nodes"
    )


def _gpu(found: Findings, device: Device, available: int, origin: str, notes: list[str]) -> Gpu:
    own = device.memory()
    if own is None:
        total, context = available // 4, 0
        notes.append(f"{format_bytes(total)} of host memory stand for the virtual accelerator's")
    else:
        total, context = own
    if total <= context:
        raise PlanError(
            f"{device.title} has {format_bytes(total)}, of which {format_bytes(context)} are taken or have to stay "
            "free: nothing is left; end the programs that use it"
        )
    return Gpu(
        name=_gpu_name(device),
        memory_bytes=total,
        usable_bytes=total,
        context_bytes=context,
        hbm_bytes_per_s=found.memory_bytes_per_s,
        flops_per_s={dtype: best_rate(curve) for dtype, curve in found.matmul.items()},
        measured=True,
        source=origin,
        launch_s=found.constant_s,
        known="measured",
        products=found.products,
        matmul_tables=found.matmul,
        operator_bytes_per_s=found.operator_bytes_per_s,
    )


def _gpu_name(device: Device) -> str:
    if isinstance(device, VirtualDevice) or device.kind == "virtual":
        return "virtual"
    known = {alias: name for name, entry in load_catalog().gpus.items() for alias in entry.values.device_names}
    return known.get(device.title, device.title)


def _origin() -> str:
    return f"torch {torch.__version__}, {_processor()}, Python {platform.python_version()}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # without a name the architecture will do
    return platform.machine()
