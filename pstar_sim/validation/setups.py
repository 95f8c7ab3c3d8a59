"""Jobs as which published runs are replayed, and their machines with own limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import as_file, files

from msgspec import structs

from pstar_sim.catalog.efficiency import Efficiency, fitted
from pstar_sim.catalog.loader import Catalog, load_catalog
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry, count_params
from pstar_sim.core.plan import Settings
from pstar_sim.errors import CatalogError
from pstar_sim.validation.rows import PublishedRow
from pstar_sim.workload.axes import Axes
from pstar_sim.workload.presets import workload_of
from pstar_sim.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Experiment(Axes):
    """A published run (rows of different metrics) as a job.

    batches: sequences per rank and micro-batch, of which the one with most tokens per second counts.
    sizes: ascending, for a largest trainable model, otherwise one model.
    loop_s: per micro-batch, outside the three phases.
    other_host_bytes: in use on the node beside plans.
    host_bytes_per_param: the system's, if more than its plan's.
    """

    rows: tuple[PublishedRow, ...]
    machine: Machine
    policy: str
    sizes: tuple[ModelEntry, ...]
    sequence: int
    batches: tuple[int, ...]
    micro_batches: int
    settings: Settings
    loop_s: float = 0.0
    other_host_bytes: int = 0
    host_bytes_per_param: float = 0.0
    early_stop: bool | None = False
    kernels: str | None = "eager"

    def workload(self, batch: int, size: ModelEntry | None = None) -> Workload:
        """One rank's share. Raises ModelError as `workload_of` does."""
        return workload_of(
            size or self.sizes[0],
            batch=batch,
            sequence=self.sequence,
            micro_batches=self.micro_batches,
            **self.given,
        )


def first_ranks(
    machine: Machine,
    count: int,
    *,
    sockets: int = 1,
    cores_a_rank: int | None = None,
    efficiency: Efficiency | None = None,
) -> Machine:
    """`count` GPUs in use, the host's memory whole.

    sockets: of the node, a process reaches only its own's cores and DRAM.
    cores_a_rank: bound to each rank, which limits CPU Adam.
    """
    if not 1 <= count <= machine.world_size:
        raise CatalogError(f"machine {machine.name!r} has {machine.world_size} GPUs, so {count} cannot be in use")
    host = machine.host
    used = -(-count * sockets // machine.local_ranks) / sockets
    if used < 1:
        host = replace(
            host,
            cores=round(host.cores * used),
            adam_params_per_s=host.adam_params_per_s * used,
            dram_bytes_per_s=host.dram_bytes_per_s * used,
        )
    if cores_a_rank is not None:
        cores = count * cores_a_rank
        by_cores = cores * (efficiency or fitted()).adam_params_per_core_s
        host = replace(host, cores=cores, adam_params_per_s=min(host.adam_params_per_s, by_cores))
    if count == machine.world_size and host is machine.host:
        return machine
    ranks = tuple(replace(rank, batch_share=1 / count) for rank in machine.ranks[:count])
    return replace(machine, name=f"{machine.name} ({count} in use)", ranks=ranks, host=host)


@cache
def _catalog() -> Catalog:
    with as_file(files("pstar_sim.validation") / "data" / "machines.toml") as path:
        return load_catalog(path)


def published_machine(name: str, efficiency: Efficiency, framework: str) -> Machine:
    """Driven by this framework."""
    catalog = replace(_catalog(), efficiency=efficiency)
    return replace(catalog.machine(name), framework=catalog.framework(framework))


def with_gpu_bytes(machine: Machine, usable_bytes: int) -> Machine:
    ranks = tuple(
        replace(r, gpu=replace(r.gpu, memory_bytes=max(r.gpu.memory_bytes, usable_bytes), usable_bytes=usable_bytes))
        for r in machine.ranks
    )
    return replace(machine, ranks=ranks)


def whole_number(row: PublishedRow, what: str, text: str) -> int:
    """Raises CatalogError for any other text."""
    if not text.isdigit():
        raise CatalogError(f"{row.where}: {what} is {text!r}, not a whole number")
    return int(text)


def gpt_entry(
    layers: int, hidden: int, heads: int, *, vocab: int, positions: int, source: str = "a published run"
) -> ModelEntry:
    """Tied embeddings, and MLPs of four times the hidden width."""
    entry = ModelEntry(
        name=f"gpt {layers}x{hidden}",
        family="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        vocab=vocab,
        max_seq=positions,
        tied=True,
        params=0,
        source=source,
    )
    return structs.replace(entry, params=count_params(entry))
