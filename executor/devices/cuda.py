"""CudaBackend: one CUDA device for the engine's queues.

The code above it, which also runs on `virtual_streams.py`, decides the order of streams and when memory is free. This
file has the calls about memory, `cuda_streams.py` those about order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterable

import torch

from executor.devices.backend import StreamBackend
from executor.devices.cuda_blocks import (
    COLLECTED_SHARE,
    Blocks,
    check_no_capture,
    limit_fragments,
    pool_shape,
    restore_settings,
    set_up_allocator,
)
from executor.devices.cuda_streams import CudaStreams
from executor.devices.gate import Gate
from executor.devices.headroom import Headroom, measure_room, outside_bytes
from executor.devices.updates import scratch_bytes
from pstar_sim.catalog.machine import RESERVE_BYTES
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place
from pstar_sim.errors import PlanError
from pstar_sim.units import format_bytes

log = logging.getLogger("executor")


def cuda_device(name: str) -> torch.device:
    """Returns the device of "cuda" or "cuda:N". Raises PlanError for another word or a missing device."""
    word, colon, number = name.partition(":")
    if word != "cuda" or (colon and not (number.isascii() and number.isdigit())):
        raise PlanError(f"device {name!r} is not known; use 'virtual', 'cuda' or 'cuda:0'")
    if not torch.cuda.is_available():
        raise PlanError(f"device {name!r} is not there: torch {torch.__version__} finds no CUDA device; use 'virtual'")
    index = int(number) if colon else torch.cuda.current_device()
    count = torch.cuda.device_count()
    if index >= count:
        raise PlanError(f"device {name!r} is not there: there are {count} CUDA devices; use cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def default_adam_threads() -> int:
    """All cores of the process but one for training and one for issuing copies. More threads than cores slow Adam down
    (OpenMP barriers) far more than the last core speeds it up."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)
    return max(1, cores - 2)


class CudaBackend(CudaStreams):
    """One CUDA device.

    limit_bytes: of the card that this process may use, context included: torch refuses more, also to operators.
    room_bytes: free for uses that no plan counts, more where more was measured (headroom.py).

    Raises PlanError for a limit larger than the card or without room beside the memory in use, for an allocator with
    which budgets would not hold (`cuda_blocks.set_up_allocator`), and while a CUDA graph is captured.
    """

    name = "cuda"

    def __init__(
        self,
        device: torch.device,
        *,
        adam_threads: int | None = None,
        limit_bytes: int | None = None,
        room_bytes: int = RESERVE_BYTES,
    ) -> None:
        check_no_capture("a run begins")
        super().__init__(device, adam_threads=default_adam_threads() if adam_threads is None else adam_threads)
        with torch.cuda.device(device):
            set_up_allocator()
            total = int(torch.cuda.mem_get_info(device)[1])
            if limit_bytes is not None and limit_bytes > total:
                raise PlanError(
                    f"--gpu-memory {format_bytes(limit_bytes)} is more than {torch.cuda.get_device_name(device)} has "
                    f"({format_bytes(total)}), by {format_bytes(limit_bytes - total)}; give at most its memory"
                )
            self._blocks = Blocks(device)
            self.kept = measure_room(device, least_bytes=room_bytes)
        log.info("%s: %s", torch.cuda.get_device_name(device), self.kept)
        self._total_bytes = total
        self._limit_bytes = limit_bytes
        self._reservable_bytes = total  # by this process
        if limit_bytes is not None:
            self._cap(limit_bytes)
        self._budget_bytes = 0
        self._pins_all = True
        blocks = self._blocks
        self.gate = Gate(self, grow=blocks.grow, shrink=blocks.shrink, before_early=blocks.unmap_after)

    @property
    def streams(self) -> StreamBackend:
        return self

    def _cap(self, limit_bytes: int) -> None:
        """Torch's own limit on reserved memory, less other memory on the card."""
        kept = self.kept
        if limit_bytes <= kept.measured_bytes:
            raise PlanError(
                f"--gpu-memory {format_bytes(limit_bytes)} leaves nothing on "
                f"{torch.cuda.get_device_name(self.device)}: {kept}; give more, or free memory on the card"
            )
        self._reservable_bytes = limit_bytes - kept.outside_bytes
        torch.cuda.set_per_process_memory_fraction(self._reservable_bytes / self._total_bytes, self.device)

    # -- memory -------------------------------------------------------------------------------------------------------

    def give_back(self) -> int:
        check_no_capture("memory is given back")
        self.gate.flush()
        return self._blocks.give_back()

    def give_host_back(self) -> None:
        """Unused pinned memory goes back to the system; torch would keep it. Stops the device."""
        torch.cuda.synchronize(self.device)
        empty = getattr(torch._C, "_host_emptyCache", None)
        if empty is None:
            log.info("torch %s keeps pinned memory until the process ends", torch.__version__)
        else:
            empty()

    @property
    def exchanges(self) -> int:
        return self._blocks.exchanges

    @property
    def pool_bytes(self) -> int:
        return self._blocks.pool_bytes

    @property
    def slack_bytes(self) -> int:
        """[Note: exchanges] in cuda_blocks.py."""
        return self._blocks.slack_bytes

    def begin(self, plan: Plan) -> None:
        self._budget_bytes = plan.gpu_budget_bytes
        available = self.available_gpu_bytes()
        assert available is not None
        beside = sum(size for _, place, size in plan.buffers if place is Place.GPU) + scratch_bytes(plan)
        self._blocks.expect(
            pool_shape(plan),
            plan.gpu_budget_bytes,
            beyond_bytes=max(0, available - plan.gpu_budget_bytes),
            resting_bytes=beside + plan.workload.moments[0].peak_bytes + self.kept.workspace_bytes,
            operators_bytes=beside + plan.workload.peak_non_model_bytes,
        )
        limit_fragments(COLLECTED_SHARE * plan.gpu_budget_bytes / self._reservable_bytes)

    def host_slab(self, size_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # an error of cudaHostAlloc, for which torch has no class
            if self._pins_all:
                self._pins_all = False
                why = str(error).splitlines()[0]
                log.warning("the driver pins no more host memory (%s); copies of the rest are slower", why)
            return torch.empty(size_bytes, dtype=torch.uint8)

    def empty_pages(self, memory: torch.Tensor) -> None:
        """Pinned pages keep their memory."""

    def gpu_payload(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._blocks.payload(numel, dtype)

    def take(self, payload: torch.Tensor) -> None:
        self.gate.take(payload, self.queue)

    def give(self, payload: torch.Tensor) -> None:
        self.gate.give(payload, self.queue)

    def room(self, payload_bytes: int) -> None:
        self.gate.room(payload_bytes, self.queue)
        self._blocks.make_room(self._budget_bytes - payload_bytes)

    def available_gpu_bytes(self) -> int | None:
        """The card, or the limit, less memory beside torch's now and workspaces."""
        return max(0, (self._limit_bytes or self._total_bytes) - self._room_now().measured_bytes)

    def plannable_gpu_bytes(self) -> int:
        """Bytes of GPU memory for which a new plan is made."""
        return max(0, (self._limit_bytes or self._total_bytes) - self._room_now().kept_bytes)

    def _room_now(self) -> Headroom:
        return dataclasses.replace(self.kept, outside_bytes=outside_bytes(self.device))

    def idle_bytes(self) -> int:
        """Reserved, unused bytes, without the pool, which operators cannot use."""
        return self._blocks.idle_bytes()

    def recount(self, payloads: Iterable[torch.Tensor]) -> None:
        return None  # torch counts them

    def undisturbed(self) -> contextlib.AbstractContextManager[object]:
        return self._blocks.undisturbed()

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self.gate.abandon()
        self._blocks.close()
        self.give_host_back()
        if self._limit_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        restore_settings(self._blocks)
