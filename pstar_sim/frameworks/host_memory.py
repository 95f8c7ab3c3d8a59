"""Host memory of a framework: what it asks the host for, block by block, and what PyTorch then takes.

[Note: pinned blocks] PyTorch gives pinned host memory out of a cache (CachingHostAllocator) that rounds each request up
to a power of two and keeps a block that was freed for a later request of the same size class: a buffer of 2.1 GB takes
4.3 GB, and a freed buffer is not given back. Memory that is not pinned takes what was asked for. A recent PyTorch can
be told to round less (`pinned_max_round_threshold_mb` and its like in PYTORCH_ALLOC_CONF), and DeepSpeed to pin by
itself (DS_PIN_MEMORY_BACKEND=native); neither is the default, and neither is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pstar_sim.catalog.machine import Machine
from pstar_sim.errors import DoesNotFit
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Tensor, Workload

__all__ = ["Block", "HostNeed", "block", "rank_sizes", "sub_groups", "tensor_blocks", "trained"]


@dataclass(frozen=True, kw_only=True)
class Block:
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

    blocks: held from the first step on.
    startup_bytes: weights while they are loaded; they are gone when the blocks are asked for.
    stash_bytes: activations on the host.
    """

    blocks: tuple[Block, ...]
    startup_bytes: int
    stash_bytes: int = 0

    @property
    def asked_bytes(self) -> int:
        """What the blocks ask for, and the activations."""
        return sum(block.asked_bytes for block in self.blocks) + self.stash_bytes

    @property
    def rounding_bytes(self) -> int:
        """What pinning adds."""
        return sum(block.taken_bytes - block.asked_bytes for block in self.blocks)

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
        said = [f"{format_bytes(b.asked_bytes)} of {b.name}{' (pinned)' if b.pinned else ''}" for b in self.blocks]
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


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 0


def block(name: str, size_bytes: float, *, pinned: bool) -> Block:
    """A block that is asked for at once."""
    return Block(name=name, sizes=(int(size_bytes),) if size_bytes else (), pinned=pinned)


def tensor_blocks(name: str, numels: Iterable[int], width: float, *, pinned: bool) -> Block:
    """A block per number of elements, `width` bytes each."""
    return Block(name=name, sizes=tuple(int(numel * width) for numel in numels if numel), pinned=pinned)


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
