"""Blocks that a framework requests on the host, and the bytes that PyTorch takes.

[Note: pinned blocks] PyTorch's cache of pinned memory (CachingHostAllocator) rounds requests up to a power of two (2.1
GB takes 4.3 GB), and keeps a freed block for a request of its size class. Neither a PyTorch that rounds less
(`pinned_max_round_threshold_mb` in PYTORCH_ALLOC_CONF) nor DeepSpeed's own pinning (DS_PIN_MEMORY_BACKEND=native) is
the default, or assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pstar_sim.catalog.machine import Machine
from pstar_sim.errors import DoesNotFit
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.planner.memory_needs import Phase
from pstar_sim.policy.systems.sharded import slices_on
from pstar_sim.units import format_bytes
from pstar_sim.workload.loading import Loading, loading_of
from pstar_sim.workload.workload import Tensor, Workload


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """name: in words.
    sizes: per request.
    freed: by the framework, but kept by PyTorch's cache.
    """

    name: str
    sizes: tuple[int, ...]
    pinned: bool
    freed: bool = False

    @property
    def asked_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def taken_bytes(self) -> int:
        """[Note: pinned blocks]"""
        return sum(map(_power_of_two, self.sizes)) if self.pinned else self.asked_bytes


@dataclass(frozen=True, kw_only=True)
class Copies:
    """A job's state on the fullest node's host, beside what training holds.

    saving_bytes, saved: while a checkpoint is written, and words for it.
    resuming_bytes, read: while one is read.
    instead: value of the configuration that copies less, "" without one.
    """

    saving_bytes: int
    saved: str
    resuming_bytes: int
    read: str
    instead: str = ""


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """Of one rank.

    allocations: from the first step on.
    startup_bytes: weights while they are loaded, freed before allocations.
    loading: in words.
    stash_bytes: activations on the host.
    copies: for checkpoints, None: not counted.
    """

    allocations: tuple[Allocation, ...]
    startup_bytes: int
    loading: str = ""
    stash_bytes: int = 0
    copies: Copies | None = None

    @property
    def asked_bytes(self) -> int:
        """Of the allocations, and the activations."""
        return sum(a.asked_bytes for a in self.allocations) + self.stash_bytes

    @property
    def rounding_bytes(self) -> int:
        """What pinning adds to the requested bytes."""
        return sum(a.taken_bytes - a.asked_bytes for a in self.allocations)

    @property
    def pinned_bytes(self) -> int:
        """As PyTorch rounds them."""
        return sum(a.taken_bytes for a in self.allocations if a.pinned)

    @property
    def held_bytes(self) -> int:
        """While the job trains."""
        return self.asked_bytes + self.rounding_bytes

    @property
    def host_bytes(self) -> int:
        """The most at any time."""
        return max(self.held_bytes, self.startup_bytes)

    def phases(self, local_ranks: int) -> tuple[Phase, ...]:
        """Loaded weights are freed before the first step."""
        loading, steps, copies = self.startup_bytes * local_ranks, self.held_bytes * local_ranks, self.copies
        pinned = self.pinned_bytes * local_ranks
        first = (
            Phase(name="loading", host_bytes=loading, what=f"the weights, {self.loading or 'whole'}"),
            Phase(name="first step", host_bytes=steps, pinned_bytes=pinned),
        )
        if copies is None:
            return (*first, Phase(name="saving", host_bytes=None), Phase(name="resuming", host_bytes=None))
        own = steps + copies.resuming_bytes
        saving = replace(first[1], name="saving", host_bytes=steps + copies.saving_bytes, what=copies.saved)
        resuming = replace(first[1], name="resuming", host_bytes=own, what=copies.read)
        again = replace(first[0], name="resuming", pinned_bytes=pinned)
        return (*first, replace(saving, instead=copies.instead), resuming if own >= loading else again)

    def parts(self) -> list[str]:
        """For a message."""
        if self.startup_bytes > self.held_bytes:
            how = f", {self.loading}" if self.loading else ""
            return [f"{format_bytes(self.startup_bytes)} of weights while they are loaded{how}"]
        said = [f"{format_bytes(a.asked_bytes)} of {a.name}{' (pinned)' if a.pinned else ''}" for a in self.allocations]
        if self.stash_bytes:
            said.append(f"{format_bytes(self.stash_bytes)} of activations")
        if self.rounding_bytes:
            said.append(
                f"{format_bytes(self.rounding_bytes)} by which PyTorch rounds pinned blocks up to powers of two"
            )
        return said

    def shortage(self, machine: Machine, policy: str) -> DoesNotFit | None:
        """For a host short of room, or of memory that can be pinned."""
        if self.host_bytes > machine.host_budget_bytes:
            return DoesNotFit(
                policy=policy,
                place="host",
                needed_bytes=self.host_bytes,
                available_bytes=machine.host_budget_bytes,
                what=", ".join(self.parts()),
            )
        can_pin = machine.pinned_budget_bytes
        if can_pin is None or self.pinned_bytes <= can_pin:
            return None
        pinned = replace(
            self, allocations=tuple(a for a in self.allocations if a.pinned), startup_bytes=0, stash_bytes=0
        )
        return DoesNotFit(
            policy=policy,
            place="pinned",
            needed_bytes=self.pinned_bytes,
            available_bytes=can_pin,
            what=", ".join(pinned.parts()).replace(" (pinned)", ""),
        )


@dataclass(frozen=True, kw_only=True)
class MemoryRules:
    """Functions of (configuration, a rank's workload, ranks).

    allocations: one rank's.
    loaded_dtype: while weights are loaded, unless the job says it, None: the working dtype.
    once: makes one process load for a node, "" without.
    unpinned: makes the framework pin less, "" without.
    gpu_beyond_bytes: beside the policy's lists.
    copies: also of ranks per node, None: not counted.
    """

    allocations: Callable[[Configuration, Workload, int], tuple[Allocation, ...]]
    loaded_dtype: str | None = None
    once: str = ""
    unpinned: Callable[[Configuration], str] = lambda configuration: ""
    gpu_beyond_bytes: Callable[[Configuration, Workload, int], int] = lambda configuration, workload, ranks: 0
    copies: Callable[[Configuration, Workload, int, int], Copies | None] | None = None

    def shortage(
        self, configuration: Configuration, workload: Workload, machine: Machine, policy: str
    ) -> DoesNotFit | None:
        """For a host short of room, with the configuration's value that would do."""
        short = self.host_need(configuration, workload, machine).shortage(machine, policy)
        if short is None:
            return None
        for words, changed in (
            (self.once, replace(configuration, loading="whole")),
            (self.unpinned(configuration), replace(configuration, pinned=False, pinned_params=False)),
        ):
            if words and self.host_need(changed, workload, machine).shortage(machine, policy) is None:
                return short.restated(change=words)
        return short

    def pins_too_much(self, configuration: Configuration, workload: Workload, machine: Machine) -> bool:
        need = self.host_need(configuration, workload, machine)
        return machine.pinned_budget_bytes is not None and need.pinned_bytes > machine.pinned_budget_bytes

    def loading(self, configuration: Configuration) -> Loading:
        loading = loading_of(configuration.loading)
        return loading if loading.dtype is not None else replace(loading, dtype=self.loaded_dtype)

    def host_need(self, configuration: Configuration, workload: Workload, machine: Machine) -> HostNeed:
        loading = self.loading(configuration)
        slices = slices_on(machine, configuration.replicas)
        return HostNeed(
            allocations=self.allocations(configuration, workload, slices),
            startup_bytes=loading.startup_bytes(workload, machine.local_ranks),
            loading=loading.words(machine.local_ranks, workload.tensors),
            stash_bytes=sum(size for _, size in workload.stash_room),
            copies=self.copies and self.copies(configuration, workload, slices, machine.local_ranks),
        )


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 0


def allocation(name: str, size_bytes: float, *, pinned: bool) -> Allocation:
    return Allocation(name=name, sizes=(int(size_bytes),) if size_bytes else (), pinned=pinned)


def tensor_allocations(name: str, numels: Iterable[int], width: float, *, pinned: bool) -> Allocation:
    """One request per tensor."""
    return Allocation(name=name, sizes=tuple(int(numel * width) for numel in numels if numel), pinned=pinned)


def moments_bytes_per_param(workload: Workload) -> float:
    """Without the master."""
    return workload.states_bytes_per_param - workload.optimizer.master_bytes


def trained(workload: Workload) -> list[Tensor]:
    """In the model's order."""
    return [t for t in workload.tensors if t.tied_to is None and not t.frozen]


def frozen(workload: Workload) -> list[Tensor]:
    """In the model's order. An offloaded one is on the host as it is stored."""
    return [t for t in workload.tensors if t.tied_to is None and t.frozen]


def rank_sizes(tensors: Iterable[Tensor], ranks: int) -> list[int]:
    """Slices are padded to equal length."""
    return [-(-t.numel // ranks) for t in tensors]


def sub_groups(numels: Sequence[int], most: int) -> list[int]:
    """Elements of each: the tensor that reaches `most` closes one."""
    groups: list[int] = []
    held = 0
    for numel in numels:
        held += numel
        if held >= most:
            groups.append(held)
            held = 0
    return [*groups, held] if held else groups
