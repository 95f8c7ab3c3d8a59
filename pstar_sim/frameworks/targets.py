"""Targets: the frameworks whose configurations are written and read, each with what its module offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pstar_sim.core.plan import Plan
from pstar_sim.frameworks import accelerate, deepspeed, fsdp, fsdp2, megatron, torchtitan
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.frameworks.express import Expressed
from pstar_sim.frameworks.host_memory import Block, HostNeed
from pstar_sim.workload.workload import Workload

__all__ = ["TARGETS", "Target", "host_need", "target_of"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One framework.

    name: name of the framework.
    file: the kind of file that is written, in words.
    express: plan -> the nearest configuration, and what it cannot express.
    read: (content of a file, name of the file) -> configuration; None if its files are not read.
    write: configuration -> text of the file.
    blocks: (configuration, workload of one rank, number of ranks) -> what one rank asks the host for.
    start_bytes: the same arguments -> bytes of weights while they are loaded.
    gpu_beyond_bytes: the same arguments -> bytes that the GPU holds beside the lists of the policy; None if it holds
    none."""

    name: str
    file: str
    express: Callable[[Plan], Expressed]
    read: Callable[[object, str], Configuration] | None
    write: Callable[[Configuration], str]
    blocks: Callable[[Configuration, Workload, int], tuple[Block, ...]]
    start_bytes: Callable[[Configuration, Workload, int], int]
    gpu_beyond_bytes: Callable[[Configuration, Workload, int], int] | None = None


TARGETS = {
    target.name: target
    for target in (
        Target(
            name=deepspeed.DEEPSPEED,
            file="a DeepSpeed configuration (JSON)",
            express=deepspeed.express,
            read=deepspeed.read,
            write=deepspeed.write,
            blocks=deepspeed.host_blocks,
            start_bytes=deepspeed.start_bytes,
            gpu_beyond_bytes=deepspeed.gpu_beyond_bytes,
        ),
        Target(
            name=accelerate.ACCELERATE,
            file="accelerate's configuration with FSDP (YAML)",
            express=accelerate.express,
            read=accelerate.read,
            write=accelerate.write,
            blocks=fsdp.host_blocks,
            start_bytes=fsdp.start_bytes,
        ),
        Target(
            name=fsdp2.FSDP2,
            file="a Python function that applies FSDP 2",
            express=fsdp2.express,
            read=None,
            write=fsdp2.write,
            blocks=fsdp.host_blocks,
            start_bytes=fsdp.start_bytes,
        ),
        Target(
            name=torchtitan.TORCHTITAN,
            file="a torchtitan configuration (TOML)",
            express=torchtitan.express,
            read=torchtitan.read,
            write=torchtitan.write,
            blocks=fsdp.host_blocks,
            start_bytes=fsdp.start_bytes,
        ),
        Target(
            name=megatron.MEGATRON,
            file="Megatron-LM's flags",
            express=megatron.express,
            read=None,
            write=megatron.write,
            blocks=megatron.host_blocks,
            start_bytes=megatron.start_bytes,
            gpu_beyond_bytes=megatron.gpu_beyond_bytes,
        ),
    )
}


def target_of(configuration: Configuration) -> Target:
    return TARGETS[configuration.framework]


def host_need(configuration: Configuration, workload: Workload, ranks: int) -> HostNeed:
    """What the framework takes of the host on one rank. workload: of one rank."""
    target = target_of(configuration)
    return HostNeed(
        blocks=target.blocks(configuration, workload, ranks),
        startup_bytes=target.start_bytes(configuration, workload, ranks),
        stash_bytes=sum(size for _, size in workload.stash_room),
    )
