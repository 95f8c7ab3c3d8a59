"""Memory that a run leaves free on a card for uses that no plan counts: the driver's context, with kernels loaded when
first needed; the workspaces that cuBLAS takes through torch's allocator, one per thread and stream that multiplies; the
allocator's fragments. The first two, and other programs' memory, are measured when a run begins, after products forward
and backward in fp32 and bf16. Fragments cannot be.

A new plan leaves all of these free, and at least the reserve of the catalog's machines; an existing plan is refused
only because of measured bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pstar_sim.catalog.machine import RESERVE_BYTES
from pstar_sim.units import format_bytes

FRAGMENT_BYTES = 256 << 20
_EXTENT = 256


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """outside_bytes: not torch's: the context of this process, other programs.
    workspace_bytes: of cuBLAS, in torch's memory.
    least_bytes: free in all where fewer were measured.
    """

    outside_bytes: int
    workspace_bytes: int
    least_bytes: int = RESERVE_BYTES

    @property
    def measured_bytes(self) -> int:
        return self.outside_bytes + self.workspace_bytes

    @property
    def kept_bytes(self) -> int:
        """Of the card, or of a run's cap on it, that a plan leaves."""
        return max(self.least_bytes, self.measured_bytes + FRAGMENT_BYTES)

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.kept_bytes)} kept for the context and other programs "
            f"({format_bytes(self.outside_bytes)}), workspaces ({format_bytes(self.workspace_bytes)}) and fragments "
            f"({format_bytes(FRAGMENT_BYTES)}), at least {format_bytes(self.least_bytes)}"
        )


def outside_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(total) - int(free) - int(torch.cuda.memory_reserved(device))


def measure_room(device: torch.device, *, least_bytes: int = RESERVE_BYTES) -> Headroom:
    """Stops the device."""
    torch._C._cuda_clearCublasWorkspaces()  # of earlier products
    products = _multiply(device)  # held: backward's thread holds its last gradients for a moment longer
    torch.cuda.synchronize(device)
    before = int(torch.cuda.memory_allocated(device))
    torch._C._cuda_clearCublasWorkspaces()
    taken = before - int(torch.cuda.memory_allocated(device))
    del products
    _multiply(device)
    torch.cuda.synchronize(device)
    return Headroom(outside_bytes=outside_bytes(device), workspace_bytes=taken, least_bytes=least_bytes)


def _multiply(device: torch.device) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    with torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            leaves = [
                torch.ones(shape, dtype=dtype, device=device, requires_grad=True)
                for shape in ((_EXTENT, _EXTENT), (_EXTENT, _EXTENT), (_EXTENT,))
            ]
            tensors += leaves
            tensors += torch.autograd.grad(torch.nn.functional.linear(*leaves).sum(), leaves)
    return tensors
