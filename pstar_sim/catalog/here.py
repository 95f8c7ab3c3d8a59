"""This process's machine: GPUs and their free memory, RAM and cgroup limit, cores, from nvidia-smi, /proc and /sys.

Other figures (bandwidths, Adam rate) are the catalog's, as the notes say. torch is not imported.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from pstar_sim.catalog.catalog import Catalog
from pstar_sim.catalog.machine import Gpu, Host, Link, Machine, Rank
from pstar_sim.errors import CatalogError
from pstar_sim.units import GB, MIB, format_bytes

_QUERY = "name,memory.total,memory.free,pcie.link.gen.max,pcie.link.width.max"


def nvidia_smi() -> str | None:
    """A line per GPU; None where there is no nvidia-smi or it fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def this_machine(
    catalog: Catalog, *, gpus: Callable[[], str | None] = nvidia_smi, root: Path = Path("/"), cores: int | None = None
) -> Machine:
    """Returns the machine that this process runs on.

    gpus: nvidia-smi's output.
    root: has proc/ and sys/.
    cores: by default `read_cores`.

    Raises CatalogError for a GPU not in the catalog.
    """
    notes: list[str] = []
    text = gpus()
    lines = [line for line in (text or "").splitlines() if line.strip()]
    if lines:
        ranks = tuple(_rank(catalog, line, 1 / len(lines), notes) for line in lines)
    else:
        notes.append("no GPU found (nvidia-smi does not list one): the virtual accelerator stands in for it")
        ranks = (Rank(gpu=catalog.gpu("virtual"), link=catalog.link("virtual")),)
    host = _host(catalog, root, read_cores(root) if cores is None else cores, notes)
    framework = catalog.framework(next(iter(catalog.frameworks))) if lines else None
    return Machine(name="here", ranks=ranks, host=host, notes="; ".join(notes), framework=framework)


def _rank(catalog: Catalog, line: str, share: float, notes: list[str]) -> Rank:
    words = [word.strip() for word in line.split(",")]
    if len(words) != 5:
        raise CatalogError(
            f"nvidia-smi: {line!r} has {len(words)} fields in place of five ({_QUERY}); name a machine instead"
        )
    device, total, free, generation, width = words
    known = {alias: name for name, entry in catalog.gpus.items() for alias in entry.values.device_names}
    if device not in known:
        raise CatalogError(
            f"this machine's GPU {device!r} is not in the catalog; describe it in a file, with "
            f"device_names = [{device!r}], or name a machine that is like this one"
        )
    gpu = catalog.gpu(known[device])
    usable = _whole(line, free) * MIB
    if usable <= gpu.context_bytes:
        raise CatalogError(
            f"GPU {device!r} has {format_bytes(usable)} free, and the driver context takes all of it; end "
            "other programs that use this GPU"
        )
    notes.append(f"{device}: {format_bytes(usable)} of {format_bytes(_whole(line, total) * MIB)} free")
    gpu = replace(gpu, memory_bytes=_whole(line, total) * MIB, usable_bytes=usable)
    return Rank(gpu=gpu, link=_link(catalog, gpu, generation, width, notes), batch_share=share)


def _whole(line: str, word: str) -> int:
    if not word.isdigit():
        raise CatalogError(f"nvidia-smi: {line!r}: {word!r} is not a number of MiB; name a machine instead")
    return int(word)


def _link(catalog: Catalog, gpu: Gpu, generation: str, width: str, notes: list[str]) -> Link:
    """With the lanes in use, which a virtual machine may hide: then a link is assumed and noted."""
    name = f"pcie{generation}-x16"
    if name not in catalog.links or not width.isdigit() or int(width) < 1:
        like = next((e for e in catalog.machines.values() if e.values.gpu == gpu.name), None)
        name = "pcie4-x16" if like is None or like.values.link is None else like.values.link
        notes.append(f"PCIe generation and width are hidden: {name} assumed")
        return catalog.link(name)
    link = catalog.link(name)
    lanes = min(16, int(width))
    if lanes == 16:
        return link
    notes.append(f"{lanes} of 16 PCIe lanes")
    return replace(
        link,
        name=f"pcie{generation}-x{lanes}",
        h2d_bytes_per_s=link.h2d_bytes_per_s * lanes / 16,
        d2h_bytes_per_s=link.d2h_bytes_per_s * lanes / 16,
    )


def _host(catalog: Catalog, root: Path, cores: int, notes: list[str]) -> Host:
    base = catalog.host("virtual")
    memory, available = read_memory(root)
    reserved = max(memory - available, min(GB, memory // 8))
    notes.append("DRAM bandwidth and Adam rate were not measured: two DRAM channels assumed")
    return replace(
        base,
        name="here",
        memory_bytes=memory,
        reserved_bytes=min(reserved, memory - 1),
        cores=cores,
        adam_params_per_s=catalog.efficiency.adam_params_per_s(base.dram_bytes_per_s, cores),
        known="assumed",
        measured=False,
        source="RAM, cgroup limit and cores of this machine; two DRAM channels assumed",
    )


def read_memory(root: Path) -> tuple[int, int]:
    """That this process may use (RAM, or its cgroup's limit if lower), and of these the available ones.

    Raises CatalogError without /proc/meminfo.
    """
    table: dict[str, int] = {}
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            key, _, rest = line.partition(":")
            words = rest.split()
            if words and words[0].isdigit():
                table[key] = int(words[0]) * 1024
    except OSError as error:
        raise CatalogError(
            f"{root / 'proc/meminfo'}: cannot be read: {error.strerror}; name a machine instead"
        ) from None
    if "MemTotal" not in table:
        raise CatalogError(f"{root / 'proc/meminfo'} has no MemTotal; name a machine instead")
    total = table["MemTotal"]
    limits = [n for path in _groups(root, "memory") for n in [_limit(path / "memory.max")] if n is not None]
    limits += [n for path in _groups(root, "memory") for n in [_limit(path / "memory.limit_in_bytes")] if n is not None]
    memory = min([total, *limits])
    return memory, min(memory, table.get("MemAvailable", total))


def read_cores(root: Path) -> int:
    """The affinity, or the cgroup's CPU quota if lower (at least 1)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quotas = [float(cores)]
    for path in _groups(root, "cpu"):
        words = _words(path / "cpu.max")
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _words(path / "cpu.cfs_quota_us"), _words(path / "cpu.cfs_period_us")
        if quota and period and int(quota[0]) > 0:
            quotas.append(int(quota[0]) / int(period[0]))
    return max(1, math.ceil(min(quotas)))


def read_numa(root: Path, cores: Collection[int] | None = None) -> tuple[int, int] | None:
    """(nodes whose cores this process may use, the machine's), None where the system does not say.

    cores: by default the affinity.
    """
    if cores is None:
        if not hasattr(os, "sched_getaffinity"):
            return None
        cores = os.sched_getaffinity(0)
    lists = [_words(path) for path in sorted(root.glob("sys/devices/system/node/node[0-9]*/cpulist"))]
    nodes = [_numbers(words[0]) for words in lists if words]  # a node without cores has memory only
    mine = sum(1 for node in nodes if node & set(cores))
    return (mine, len(nodes)) if mine else None


def _numbers(ranges: str) -> set[int]:
    pairs = [part.partition("-") for part in ranges.split(",")]
    return {n for low, _, high in pairs for n in range(int(low), int(high or low) + 1)}


def _groups(root: Path, controller: str) -> Sequence[Path]:
    """This process's and all above: version 2, and version 1 of one controller."""
    folders: list[Path] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []  # a system without cgroups has no limits
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = base / path.lstrip("/")
        folders.append(folder)
        while folder != base and base in folder.parents:
            folder = folder.parent
            folders.append(folder)
    return folders


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []  # this version of cgroups keeps the limit elsewhere, or the group has none


def _limit(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None
