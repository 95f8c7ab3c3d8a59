"""A policy plans, with the host memory that the framework takes: its own blocks, as PyTorch rounds them
(host_memory.py), replace the policy's host bytes and decide whether there is room."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from pstar_sim.catalog.efficiency import fitted
from pstar_sim.catalog.loader import load_catalog
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import STASHES, Plan, Settings
from pstar_sim.core.step import COPIES, PAGEABLE, Kind, Place
from pstar_sim.errors import DoesNotFit
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.frameworks.targets import target_of
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.registry import find_policy
from pstar_sim.sim.play import play
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

CAPABILITIES = Capabilities(counts_host=True)

_ROOMY_BYTES = 1 << 50
"""Host memory that is enough for every policy."""

_BUFFER = "the framework's own host buffers"
_GPU_BUFFER = "the framework's own gradients"


def stands_for(configuration: Configuration, data: int) -> str:
    """The policy for a configuration on `data` ranks that share a batch. FSDP over one slices nothing."""
    sliced = configuration.policy_base == "zero3_resident" or configuration.options.get("shard") == "states"
    return "all_on_gpu" if sliced and data == 1 else configuration.policy


def as_run(machine: Machine, configuration: Configuration) -> Machine:
    """Driven by the framework, each process with the thread that torchrun and accelerate leave it (`Host.as_launched`),
    unless the machine's file names a framework or the user threads."""
    catalog, driver = load_catalog(), target_of(configuration).driver(configuration)
    usual = machine.framework == catalog.framework(next(iter(catalog.frameworks)))
    host = machine.host
    if machine.local_ranks > 1 and host.threads is None:
        host = host.as_launched(fitted().adam_found_params_per_s)
    return replace(machine, host=host, framework=catalog.framework(driver) if usual else machine.framework)


def _planned_on(machine: Machine, gpu_bytes: int) -> Machine:
    ranks = tuple(
        replace(rank, gpu=replace(rank.gpu, usable_bytes=max(rank.gpu.context_bytes + 1, left)))
        for rank in machine.ranks
        for left in (rank.gpu.usable_bytes - gpu_bytes,)
    )
    host = replace(machine.host, memory_bytes=_ROOMY_BYTES)
    return replace(machine, host=host, ranks=ranks if gpu_bytes else machine.ranks)


def _copied(plan: Plan, configuration: Configuration) -> Plan:
    pinned = configuration.pinned or "pinned" in configuration.options
    if pinned or plan.machine.link.pageable_bytes_per_s is None:
        return plan
    return replace(plan, steps=tuple(structs.replace(s, via=PAGEABLE) if s.kind in COPIES else s for s in plan.steps))


class Follows:
    """plans_by: spec of the policy that stands for the configuration."""

    def __init__(self, configuration: Configuration, label: str) -> None:
        self.configuration = configuration
        self.plans_by = configuration.policy
        self.__name__ = label

    def __repr__(self) -> str:
        return f"<policy {self.__name__}: {self.configuration.policy}>"

    def __call__(self, workload: Workload, machine: Machine, settings: Settings) -> Plan:
        """Raises DoesNotFit if allocations exceed the host, or lists the GPU or disks."""
        configuration, alone = self.configuration.for_model(workload), machine.host
        machine = as_run(machine, configuration)
        memory, ranks = target_of(configuration).memory, machine.data_parallel_size
        need = memory.host_need(configuration, configuration.job(workload), machine)
        short = memory.shortage(configuration, configuration.job(workload), machine, self.__name__)
        if short is not None:
            raise short
        more_bytes = memory.gpu_beyond_bytes(configuration, workload, ranks)
        try:
            plan = find_policy(configuration.policy)(workload, _planned_on(machine, more_bytes), settings)
        except DoesNotFit as error:
            if error.place != "gpu" or not more_bytes:
                raise error.restated(policy=self.__name__) from error
            raise DoesNotFit(
                policy=self.__name__,
                place="gpu",
                needed_bytes=error.needed_bytes + more_bytes,
                available_bytes=machine.gpu_budget_bytes,
                what=f"{error.what}, and {format_bytes(more_bytes)} of gradients",
            ) from error
        if all(step.kind is not Kind.CPU_UPDATE for step in plan.steps):
            machine = replace(machine, host=alone)
        return self._with_own_buffers(_copied(plan, configuration), machine, need.host_bytes, more_bytes)

    def _with_own_buffers(self, plan: Plan, machine: Machine, host_bytes: int, gpu_bytes: int) -> Plan:
        """Host buffer and lists together take host_bytes, the framework's most at any time. Raises DoesNotFit beyond
        the host."""
        kept = tuple(b for b in plan.buffers if b[1] is not Place.HOST or b[0] == STASHES)
        gone = {name for name, *_ in plan.buffers} - {name for name, *_ in kept}
        own = sum(size for name, place, size in plan.buffers if place is Place.HOST and name in gone)
        lists = play(plan).peak_bytes["host"] - own
        if max(lists, host_bytes) > machine.host_budget_bytes:
            raise DoesNotFit(
                policy=self.__name__,
                place="host",
                needed_bytes=max(lists, host_bytes),
                available_bytes=machine.host_budget_bytes,
                what="the lists of its policy",
            )
        own_buffers = ((_BUFFER, Place.HOST, host_bytes - lists), (_GPU_BUFFER, Place.GPU, gpu_bytes))
        more = tuple(buffer for buffer in own_buffers if buffer[2] > 0)
        made = replace(
            plan,
            policy=self.__name__,
            machine=machine,
            gpu_budget_bytes=machine.gpu_budget_bytes,
            host_budget_bytes=machine.host_budget_bytes,
            buffers=(*kept, *more),
            choices={**plan.choices, "follows": self.configuration.policy},
        )
        made.check()
        return made
