"""Host memory of a framework: what it asks the host for, allocation by allocation, and what PyTorch then takes.

[Note: pinned blocks] PyTorch gives pinned host memory out of a cache (CachingHostAllocator) that rounds each request up
to a power of two and keeps a block that was freed for a later request of the same size class: a buffer of 2.1 GB takes
4.3 GB, and a freed buffer is not given back. Memory that is not pinned takes what was asked for. A recent PyTorch can
be told to round less (`pinned_max_round_threshold_mb` and its like in PYTORCH_ALLOC_CONF), and DeepSpeed to pin by
itself (DS_PIN_MEMORY_BACKEND=native); neither is the default, and neither is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pstar_sim.catalog.machine import Machine
from pstar_sim.errors import DoesNotFit
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Tensor, Workload

__all__ = [
    "Allocation", "HostNeed", "MemoryRules", "allocation", "moments_bytes_per_param", "rank_sizes", "sub_groups",
    "tensor_allocations", "trained",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Memory that is asked for under one name, on one rank.

    name: what lies in it.
    sizes: bytes of each request.
    pinned: whether it is page-locked.
    """

    name: str
    sizes: tuple[int, ...]
    pinned: bool

    @property
    def asked_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def taken_bytes(self) -> int:
        """What the host gives for it: [Note: pinned blocks]."""
        return sum(map(_power_of_two, self.sizes)) if self.pinned else self.asked_bytes


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """What a framework takes of the host on one rank.

    allocations: held from the first step on.
    startup_bytes: weights while they are loaded; they are gone when the allocations are made.
    stash_bytes: activations on the host.
    """

    allocations: tuple[Allocation, ...]
    startup_bytes: int
    stash_bytes: int = 0

    @property
    def asked_bytes(self) -> int:
        """What the allocations ask for, and the activations."""
        return sum(a.asked_bytes for a in self.allocations) + self.stash_bytes

    @property
    def rounding_bytes(self) -> int:
        """What pinning adds."""
        return sum(a.taken_bytes - a.asked_bytes for a in self.allocations)

    @property
    def held_bytes(self) -> int:
        """What is held while the job trains."""
        return self.asked_bytes + self.rounding_bytes

    @property
    def host_bytes(self) -> int:
        """The most at any time."""
        return max(self.held_bytes, self.startup_bytes)

    def parts(self) -> list[str]:
        """The parts of host_bytes in words."""
        if self.startup_bytes > self.held_bytes:
            return [f"{format_bytes(self.startup_bytes)} of weights while they are loaded"]
        said = [f"{format_bytes(a.asked_bytes)} of {a.name}{' (pinned)' if a.pinned else ''}" for a in self.allocations]
        if self.stash_bytes:
            said.append(f"{format_bytes(self.stash_bytes)} of activations")
        if self.rounding_bytes:
            said.append(
                f"{format_bytes(self.rounding_bytes)} by which PyTorch rounds pinned blocks up to powers of two"
            )
        return said

    def shortage(self, machine: Machine, policy: str) -> DoesNotFit | None:
        """Why the host has no room; None where it has."""
        if self.host_bytes <= machine.host_budget_bytes:
            return None
        return DoesNotFit(
            policy=policy,
            place="host",
            needed_bytes=self.host_bytes,
            available_bytes=machine.host_budget_bytes,
            what=", ".join(self.parts()),
        )


@dataclass(frozen=True, kw_only=True)
class MemoryRules:
    """How a framework allocates: functions of (configuration, workload of one rank, number of ranks).

    allocations: what one rank asks the host for.
    start_bytes: bytes of weights while they are loaded.
    gpu_beyond_bytes: bytes that the GPU holds beside the lists of the policy; by default none.
    """

    allocations: Callable[[Configuration, Workload, int], tuple[Allocation, ...]]
    start_bytes: Callable[[Configuration, Workload, int], int]
    gpu_beyond_bytes: Callable[[Configuration, Workload, int], int] = lambda configuration, workload, ranks: 0

    def host_need(self, configuration: Configuration, workload: Workload, ranks: int) -> HostNeed:
        """What the framework takes of the host on one rank."""
        return HostNeed(
            allocations=self.allocations(configuration, workload, ranks),
            startup_bytes=self.start_bytes(configuration, workload, ranks),
            stash_bytes=sum(size for _, size in workload.stash_room),
        )


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 0


def allocation(name: str, size_bytes: float, *, pinned: bool) -> Allocation:
    """Memory that one request asks for."""
    return Allocation(name=name, sizes=(int(size_bytes),) if size_bytes else (), pinned=pinned)


def tensor_allocations(name: str, numels: Iterable[int], width: float, *, pinned: bool) -> Allocation:
    """Memory with one request per tensor. numels: elements of each tensor. width: bytes per element."""
    return Allocation(name=name, sizes=tuple(int(numel * width) for numel in numels if numel), pinned=pinned)


def moments_bytes_per_param(workload: Workload) -> int:
    """Bytes per parameter of the optimizer's states, without the fp32 master."""
    return workload.optimizer.states_bytes_per_param - 4


def trained(workload: Workload) -> list[Tensor]:
    """The parameters that are updated, in the order of the model."""
    return [t for t in workload.tensors if t.tied_to is None and not t.frozen]


def rank_sizes(tensors: Iterable[Tensor], ranks: int) -> list[int]:
    """Elements of each tensor on one rank, padded to equal slices."""
    return [-(-t.numel // ranks) for t in tensors]


def sub_groups(numels: Sequence[int], most: int) -> list[int]:
    """Elements of each sub-group: tensors in order, a group closed by the tensor that reaches `most`."""
    groups: list[int] = []
    held = 0
    for numel in numels:
        held += numel
        if held >= most:
            groups.append(held)
            held = 0
    return [*groups, held] if held else groups
