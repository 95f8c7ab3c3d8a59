"""Frameworks whose configurations are written or read, with their functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pstar_sim.core.plan import Plan
from pstar_sim.frameworks import accelerate, deepspeed, fsdp, fsdp2, megatron, torchtitan
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.frameworks.express import Expressed
from pstar_sim.frameworks.host_memory import MemoryRules
from pstar_sim.workload.parallelism import Parallelism


@dataclass(frozen=True, kw_only=True)
class Target:
    """file: kind, in words.
    express: with what cannot be.
    degrees: a plan's -> the file's, None without any.
    driver: framework of the catalog that drives the GPUs.
    read: (content, name) -> configuration, None: not read.
    """

    name: str
    file: str
    express: Callable[[Plan], Expressed]
    read: Callable[[object, str], Configuration] | None
    write: Callable[[Configuration], str]
    memory: MemoryRules
    driver: Callable[[Configuration], str] = lambda configuration: "pytorch"
    endings: tuple[str, ...] = ()
    degrees: Callable[[Parallelism], Parallelism] | None = None


TARGETS = {
    target.name: target
    for target in (
        Target(
            name=deepspeed.DEEPSPEED,
            file="a DeepSpeed configuration (JSON)",
            express=deepspeed.express,
            read=deepspeed.read,
            write=deepspeed.write,
            memory=deepspeed.MEMORY,
            driver=deepspeed.driver,
            endings=(".json",),
        ),
        Target(
            name=accelerate.ACCELERATE,
            file="accelerate's configuration with FSDP (YAML)",
            express=accelerate.express,
            read=accelerate.read,
            write=accelerate.write,
            memory=accelerate.MEMORY,
            endings=(".yaml", ".yml"),
        ),
        Target(
            name=fsdp2.FSDP2,
            file="a Python function that applies FSDP 2",
            express=fsdp2.express,
            read=None,
            write=fsdp2.write,
            memory=fsdp.MEMORY,
        ),
        Target(
            name=torchtitan.TORCHTITAN,
            file="a torchtitan configuration (TOML)",
            express=torchtitan.express,
            read=torchtitan.read,
            write=torchtitan.write,
            memory=fsdp.MEMORY,
            endings=(".toml",),
            degrees=torchtitan.degrees,
        ),
        Target(
            name=megatron.MEGATRON,
            file="Megatron-LM's flags",
            express=megatron.express,
            read=megatron.read,
            write=megatron.write,
            memory=megatron.MEMORY,
            endings=(".sh", ".args"),
            degrees=megatron.degrees,
        ),
    )
}


def target_of(configuration: Configuration) -> Target:
    return TARGETS[configuration.framework]
