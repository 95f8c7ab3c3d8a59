"""What a stage of a pipeline, or a kind of GPU, runs on.

A stage has its GPUs' part of the node's host memory, bandwidth, cores and disks, a kind that of its share of layers.
Ranks of a stage follow one another, so neighbours in a pipeline are far apart and ranks that share a batch near
(Megatron-LM's order).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from pstar_sim.catalog.machine import Fabric, Group, Host, Machine, Neighbour, Nvme, Rank
from pstar_sim.errors import PstarError
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.tape import CONTEXT, EXPERTS, TENSOR


def machine_of_stage(machine: Machine, parallelism: Parallelism, stage: int, share: Fraction | None = None) -> Machine:
    """The ranks of a stage with their part of the nodes, and what joins them with its neighbours.

    stage: or a kind of `kinds_of`.
    share: of layers, if unequal.

    Raises PstarError for ranks that differ within a stage, or do not fill nodes.
    """
    data, local, tensor = parallelism.data_on(machine.world_size), machine.local_ranks, parallelism.tensor
    summing = data * parallelism.context  # ranks that add up gradients
    gpus = summing * tensor
    if local % tensor:
        raise PstarError(
            f"parallelism {parallelism}: tp is {tensor}; each layer waits for sums over these ranks, so they are "
            f"planned inside a node, of {local} GPUs on {machine.name}: take a number that divides {local}"
        )
    if gpus % local and local % gpus:
        raise PstarError(
            f"the {gpus} GPUs of a stage do not fill the nodes of {machine.name}, of {local} GPUs each; take a number "
            f"that divides {local}, or a multiple of it"
        )
    here = min(gpus, local) // tensor  # ranks of a node that are planned: one stands for all that split its tensors
    part = here * tensor * (share or Fraction(1, tensor)) / local
    host, disks, network = machine.host, machine.nvme, machine.network
    kinds = kinds_of(machine, parallelism)
    every = kinds[stage] if kinds else _roomy_first(machine)[stage * gpus : (stage + 1) * gpus]
    each = len(every) // summing  # ranks of a group that splits layers, for which one stands
    if any((rank.gpu, rank.link) != (every[0].gpu, every[0].link) for rank in every):
        names = " and ".join(dict.fromkeys(rank.gpu.name for rank in every))
        raise PstarError(
            f"{machine.name}: stage {stage} would have GPUs that differ, {names}; take so many stages that the GPUs of "
            f"each are equal, split layers by speed over all (tp={local}, without stages), or share the batch by speed "
            "(policy whale, without a parallelism)"
        )
    price = machine.price_usd_per_hour
    return replace(
        machine,
        name=f"{machine.name} stage {stage}" if parallelism.pipeline > 1 else machine.name,
        ranks=tuple(replace(rank, batch_share=1 / summing) for rank in every[::each]),
        nodes=summing // here,
        network=network if network is None else replace(network, bytes_per_s=network.bytes_per_s / tensor),
        groups=_groups_of(machine, parallelism),
        host=host if part == 1 else _part_of_host(host, part),
        nvme=disks if disks is None or part == 1 else _part_of_disks(disks, part),
        root_bytes_per_s=_part_of_root(machine, every[: here * each], each),
        price_usd_per_hour=None if price is None else price / parallelism.pipeline * (len(every) / gpus),
        neighbours=tuple(
            Neighbour(stage=other, fabric=_between(machine, stage * gpus, other * gpus, here * tensor))
            for other in sorted({0, stage - 1, stage + 1, parallelism.pipeline - 1} - {stage})
            if 0 <= other < parallelism.pipeline and not kinds
        ),
    )


def kinds_of(machine: Machine, parallelism: Parallelism) -> list[list[Rank]]:
    """Ranks of each kind, roomy first, where all groups that split layers have as many of each; [] for one kind, and
    several stages."""
    tensor, local = parallelism.tensor, machine.local_ranks
    if parallelism.pipeline > 1 or tensor == 1 or local % tensor or not machine.mixed:
        return []
    nodes = [Counter(machine.kinds[n : n + local]) for n in range(0, machine.world_size, local)]
    if any(node != nodes[0] for node in nodes) or any(count % (local // tensor) for count in nodes[0].values()):
        return []
    ranks = [[rank for rank, kind in zip(machine.ranks, machine.kinds) if kind == first] for first in nodes[0]]
    return sorted(ranks, key=lambda alike: -alike[0].gpu.memory_bytes)


def _groups_of(machine: Machine, parallelism: Parallelism) -> tuple[Group, ...]:
    """Raises PstarError for ranks of cp or ep that do not fill nodes."""
    groups, tensor, local = [], parallelism.tensor, machine.local_ranks
    summing = parallelism.data_on(machine.world_size) * parallelism.context
    if tensor > 1:
        groups.append(Group(name=TENSOR, ranks=tensor, fabric=_inside(machine)))
    for name, key, ranks, what in (
        (CONTEXT, "cp", parallelism.context, "split each sequence"),
        (EXPERTS, "ep", parallelism.experts, "share experts"),
    ):
        here = tensor * ranks
        if here % local and local % here:
            near = [n for n in divisors(summing) if not (tensor * n) % local or not local % (tensor * n)]
            best = min(near, key=lambda n: (abs(n - ranks), n))
            beside = f",dp={summing // best}" if name == CONTEXT and parallelism.data else ""
            raise PstarError(
                f"parallelism {parallelism}: {here} GPUs {what}, which do not fill the nodes of {machine.name}, of "
                f"{local} GPUs each; {key}={best}{beside} would"
            )
        if ranks > 1:
            groups.append(Group(name=name, ranks=ranks, fabric=_joining(machine, name, here, tensor)))
    return tuple(groups)


def _joining(machine: Machine, name: str, gpus: int, tensor: int) -> Fabric:
    """What joins every `tensor`-th of `gpus`; over nodes as in [Note: collectives] (cost.py). What an all-to-all
    has for ranks of its own node stays inside."""
    inside, away = _inside(machine), gpus // machine.local_ranks
    if away <= 1:
        return inside
    ranks, here, fabric = gpus // tensor, machine.local_ranks // tensor, _between(machine, 0, gpus - 1, tensor)
    hops_s = (here - 1) * inside.latency_s + (away - 1) * fabric.latency_s
    if name == EXPERTS:
        share = (ranks - 1) / ranks * away / (away - 1)
        fabric = replace(fabric, bytes_per_s=fabric.bytes_per_s / here * share)
    elif here > 1:
        fabric = min(fabric, inside, key=lambda each: each.bytes_per_s)
    return replace(fabric, latency_s=hops_s / (ranks - 1))


def _roomy_first(machine: Machine) -> tuple[Rank, ...]:
    """First stages hold more activations, so GPUs with more memory come first."""
    if not machine.mixed or machine.nodes > 1:
        return machine.ranks
    return tuple(sorted(machine.ranks, key=lambda rank: -rank.gpu.memory_bytes))


def _between(machine: Machine, rank: int, other: int, together: int) -> Fabric:
    """`together` ranks send at once and share the network."""
    if rank // machine.local_ranks == other // machine.local_ranks:
        return _inside(machine)
    if machine.network is None:
        raise PstarError(f"machine {machine.name!r} has {machine.nodes} nodes and no network; give network = NAME")
    return replace(machine.network, bytes_per_s=machine.network.bytes_per_s / together)


def _inside(machine: Machine) -> Fabric:
    if machine.peer is not None:
        return machine.peer
    link = machine.link
    rate = min(link.h2d_bytes_per_s, link.d2h_bytes_per_s) * machine.gpu.peer_share
    return Fabric(
        name=f"{link.name} through the host", bytes_per_s=rate, latency_s=link.latency_s, measured=False, source=""
    )


def _part_of_host(host: Host, part: Fraction) -> Host:
    rate = float(part)
    return replace(
        host,
        memory_bytes=int(host.memory_bytes * part),
        reserved_bytes=int(host.reserved_bytes * part),
        pinned_bytes=None if host.pinned_bytes is None else int(host.pinned_bytes * part),
        dram_bytes_per_s=host.dram_bytes_per_s * rate,
        cores=max(1, int(host.cores * part)),
        adam_params_per_s=host.adam_params_per_s * rate,
    )


def _part_of_disks(disks: Nvme, part: Fraction) -> Nvme:
    rate, read_beside, write_beside = float(part), disks.read_beside_bytes_per_s, disks.write_beside_bytes_per_s
    return replace(
        disks,
        memory_bytes=int(disks.memory_bytes * part),
        read_bytes_per_s=disks.read_bytes_per_s * rate,
        write_bytes_per_s=disks.write_bytes_per_s * rate,
        read_beside_bytes_per_s=read_beside and read_beside * rate,
        write_beside_bytes_per_s=write_beside and write_beside * rate,
    )


def _part_of_root(machine: Machine, ranks: Sequence[Rank], tensor: int) -> float | None:
    """So that the most planned ranks on one switch have what each rank on the fullest one has.

    ranks: of a stage in a node, of which one stands for `tensor`.
    """
    planned = Counter(rank.root for rank in ranks[::tensor] if rank.root is not None)
    if machine.root_bytes_per_s is None or not planned:
        return machine.root_bytes_per_s
    every = Counter(rank.root for rank in machine.ranks[: machine.local_ranks])
    return machine.root_bytes_per_s * (max(planned.values()) / max(every[rank.root] for rank in ranks))


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
