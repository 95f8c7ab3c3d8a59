"""Machines by name, from a file, or this process's, with other sizes where given."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pstar_sim.arguments import file_path, parse_bytes, refused, size_bytes
from pstar_sim.catalog.catalog import Catalog, load_catalog, with_nodes
from pstar_sim.catalog.machine import Machine, Nvme, Rank
from pstar_sim.catalog.mixed import mixed_machine, names_parts
from pstar_sim.catalog.overrides import override, parse_settings
from pstar_sim.catalog.pool import share_pool
from pstar_sim.errors import CatalogError, PstarError
from pstar_sim.units import format_bytes

__all__ = [
    "Catalog",
    "as_listed",
    "load_catalog",
    "load_machine",
    "machine_names",
    "peak_flops_per_s",
    "resize",
    "with_disks",
    "with_nodes",
]

ASSUMED_READ_BYTES_PER_S, ASSUMED_WRITE_BYTES_PER_S = 3e9, 1.5e9  # of each file system


def machine_names(user_file: str | Path | None = None) -> tuple[str, ...]:
    """That `load_machine` knows, in catalog order, without "here"."""
    return tuple(load_catalog(user_file).machines)


def load_machine(
    name: str | Path,
    *,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    nodes: int | None = None,
    gpus: int | None = None,
    cpu_threads: int | None = None,
    disks: Sequence[str | Path] = (),
    overrides: Mapping[str, str | int | float | bool] | Iterable[str] | None = None,
    user_file: str | Path | None = None,
) -> Machine:
    """Returns a machine.

    name: a name of the catalog; "here" for the machine that this process runs on; the path of a .toml file; or mixed
        GPUs, such as "a100-80x2+v100-32x2" (mixed.py).
    gpu_memory, host_memory: sizes ("8GB", or bytes) that replace those of the catalog (see `resize`).
    nodes: all like the first (see `with_nodes`).
    gpus: per node.
    cpu_threads: of each process in CPU Adam (host.threads).
    disks: folders of this machine, whose free room is the disks' (see `with_disks`).
    overrides: by path, {"link.bandwidth": "25GB/s"} or ["link.bandwidth=25GB/s"] (see overrides.py).
    user_file: a file that extends or overrides the catalog.

    Raises UnknownName, CatalogError, and PstarError for a text that is not a size.
    """
    text = str(
        file_path("machine", name, want="the name of a machine, or the path of a file of one", error=CatalogError)
    )
    if isinstance(name, Path) or text.endswith(".toml"):
        if user_file is not None:
            raise CatalogError(
                f"{text} is a file of machines itself; user_file = {str(user_file)!r} cannot be given too; leave one "
                "of them out"
            )
        machine = _only_machine(text)
    elif text.lower() == "here":
        from pstar_sim.catalog.here import this_machine

        machine = this_machine(load_catalog(user_file))
    else:
        catalog = load_catalog(user_file)
        machine = mixed_machine(text, catalog) if names_parts(text, catalog) else catalog.machine(text)
    if nodes is not None:
        machine = with_nodes(machine, nodes)
    if gpus is not None:
        machine = override(machine, {"gpus": gpus})
    if cpu_threads is not None:
        machine = override(machine, {"host.threads": cpu_threads})
    machine = with_disks(resize(machine, gpu_memory=gpu_memory, host_memory=host_memory), disks)
    if overrides is None:
        return machine
    if not isinstance(overrides, (Mapping, list, tuple)):
        raise refused("overrides", overrides, "figures by path, such as {'link.bandwidth': '25GB/s'}", CatalogError)
    changes = dict(overrides) if isinstance(overrides, Mapping) else parse_settings(overrides)
    for figure, other, known_as in (
        ("gpu.memory", gpu_memory, "gpu_memory"),
        ("host.memory", host_memory, "host_memory"),
        ("nodes", nodes, "nodes"),
        ("gpus", gpus, "gpus"),
        ("host.threads", cpu_threads, "cpu_threads"),
    ):
        if other is not None and figure in changes:
            both = f"{figure} = {changes[figure]} and {known_as} = {other}"
            raise CatalogError(f"{both} are the same figure; give it once")
    return override(machine, changes)


def peak_flops_per_s(gpu: str, dtype: str) -> float | None:
    """Of the datasheet, None where the catalog has none."""
    entry = load_catalog().gpus.get(gpu)
    tflops = None if entry is None else getattr(entry.values, f"{dtype}_tflops", None)
    return None if tflops is None else tflops * 1e12


def _only_machine(file: str) -> Machine:
    catalog = load_catalog(file)
    if catalog.main is not None:
        return catalog.machine(catalog.main)
    if len(catalog.own) != 1:
        what = (
            f"defines {len(catalog.own)} machines ({', '.join(catalog.own)})" if catalog.own else "defines no machine"
        )
        raise CatalogError(f"{file}: {what}; choose a machine with machine = NAME at the head of the file")
    return catalog.machine(catalog.own[0])


def as_listed(machine: Machine) -> Machine | None:
    """The catalog's machine of this name; None without one, and for "virtual", whose memory has no usual size."""
    try:
        return None if machine.name == "virtual" else load_machine(machine.name)
    except PstarError:
        return None


def resize(machine: Machine, *, gpu_memory: str | int | None = None, host_memory: str | int | None = None) -> Machine:
    """gpu_memory: of each GPU, context included.
    host_memory: of a node, the system's part included.

    On a unified machine one given size leaves the rest to the other; two must fit together. Raises CatalogError where
    nothing is left for plans.
    """
    pool_bytes = machine.pool_bytes
    if gpu_memory is not None:
        size = _size("gpu_memory", gpu_memory)
        for rank in machine.ranks:
            _must_leave("gpu memory", size, rank.gpu.context_bytes, "the driver context", machine.name)
        machine = replace(machine, ranks=tuple(_with_memory(machine.ranks, size)))
    if host_memory is not None:
        size = _size("host_memory", host_memory)
        _must_leave("host memory", size, machine.host.reserved_bytes, "the system", machine.name)
        machine = replace(machine, host=replace(machine.host, memory_bytes=size))
    if pool_bytes is None:
        return machine
    return share_pool(machine, pool_bytes, gpu_given=gpu_memory is not None, host_given=host_memory is not None)


def with_disks(machine: Machine, folders: Sequence[str | Path]) -> Machine:
    """Disks with these folders' free room, at the machine's own or assumed rates. Raises CatalogError for a folder that
    cannot be read."""
    if not isinstance(folders, (list, tuple)) or not all(isinstance(each, (str, Path)) for each in folders):
        raise refused("disks", folders, "folders, such as ['/nvme/run']", CatalogError)
    if not folders:
        return machine
    room: dict[int, int] = {}  # file system -> bytes that are free
    for folder in folders:
        path = Path(folder).expanduser()
        try:
            room[path.stat().st_dev] = shutil.disk_usage(path).free
        except OSError as error:
            raise CatalogError(
                f"disks folder {path} cannot be used ({error.strerror}); give one that exists"
            ) from error
    free = sum(room.values())
    disks = machine.nvme or Nvme(
        name="disks",
        memory_bytes=free,
        read_bytes_per_s=ASSUMED_READ_BYTES_PER_S * len(room),
        write_bytes_per_s=ASSUMED_WRITE_BYTES_PER_S * len(room),
        latency_s=1e-4,
        measured=False,
        source="rates assumed; pstar calibrate --disks FOLDER measures them",
    )
    return replace(machine, nvme=replace(disks, memory_bytes=free))


def _with_memory(ranks: Iterable[Rank], size_bytes: int) -> Iterable[Rank]:
    for rank in ranks:
        yield replace(rank, gpu=replace(rank.gpu, memory_bytes=size_bytes, usable_bytes=size_bytes))


def _size(what: str, size: str | int) -> int:
    return parse_bytes(size) if isinstance(size, str) else size_bytes(what, size, error=CatalogError)


def _must_leave(what: str, size_bytes: int, taken_bytes: int, taker: str, machine: str) -> None:
    if size_bytes <= taken_bytes:
        raise CatalogError(
            f"{what} of {format_bytes(size_bytes)} leaves nothing: {taker} of {machine} takes "
            f"{format_bytes(taken_bytes)}; give more than that"
        )
