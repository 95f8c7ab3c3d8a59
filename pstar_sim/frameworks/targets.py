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

    name: its name.
    file: what is written, in words.
    express: the configuration nearest to a plan.
    read: the configuration that a file's content says; (content, name of the file). None where files are not read.
    write: the text of the file.
    blocks: what one rank asks the host for; (configuration, workload of one rank, number of ranks).
    start_bytes: weights while they are loaded, of the same three.
    gpu_beyond_bytes: what the GPU holds beyond the lists of the policy, of the same three; None for nothing.
    """

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
