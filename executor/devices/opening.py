"""Opens the accelerator of `device="..."`, checks the placement of a model, and moves its buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from executor.devices.backend import Backend, VirtualBackend
from executor.devices.cuda import CudaBackend, cuda_device
from executor.devices.torch_private import buffer_table
from pstar_sim.core.plan import Plan
from pstar_sim.errors import ContractError, PlanError
from pstar_sim.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Options of the accelerator that a run uses.

    bandwidth: bytes/s of the virtual link, one figure or (to the gpu, to the host); None: as fast as memory.
    adam_threads: torch threads of CPU Adam; None: 1 on the virtual accelerator, all cores but two on CUDA.
    gpu_memory_bytes: that the run may use, context included; None: all bytes."""

    bandwidth: float | tuple[float | None, float | None] | None = None
    adam_threads: int | None = None
    gpu_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("adam_threads", "gpu_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name.removesuffix('_bytes')}={value} must be at least 1, or None")


def is_cuda(device: str) -> bool:
    return device.partition(":")[0] == "cuda"


def open_backend(device: str, plan: Plan, options: DeviceOptions) -> Backend:
    """Returns the accelerator of "virtual", "cuda" or "cuda:N". Raises PlanError for an unknown or missing device, and
    for options that it lacks."""
    if device != "virtual":
        if options.bandwidth is not None:
            raise PlanError(
                f"bandwidth={options.bandwidth!r} is for the virtual accelerator's link; leave it out for {device}"
            )
        return CudaBackend(cuda_device(device), adam_threads=options.adam_threads, limit_bytes=options.gpu_memory_bytes)
    h2d, d2h = options.bandwidth if isinstance(options.bandwidth, tuple) else (options.bandwidth, options.bandwidth)
    for rate in (h2d, d2h):
        if rate is not None and not rate > 0:
            raise PlanError(
                f"bandwidth={options.bandwidth!r}: bytes per second must be > 0, or None for as fast as memory"
            )
    card_bytes = plan.machine.gpu.memory_bytes
    if options.gpu_memory_bytes is not None and options.gpu_memory_bytes > card_bytes:
        raise PlanError(
            f"gpu_memory={options.gpu_memory_bytes} is more than the {card_bytes} bytes of the GPU that the plan "
            f"is for ({plan.machine.name}); give at most {format_bytes(card_bytes)}, or nothing for all of it"
        )
    return VirtualBackend(
        h2d_bytes_per_s=h2d,
        d2h_bytes_per_s=d2h,
        latency_s=plan.machine.link.latency_s if (h2d or d2h) else 0.0,
        gpu_bytes=options.gpu_memory_bytes,
        adam_threads=options.adam_threads or 1,
    )


def check_placement(model: nn.Module, device: torch.device) -> torch.device:
    """Returns the device of the parameters. Raises ContractError for a model on several devices, or on one other than
    the host, meta or the run's.
    """
    found = {parameter.device for parameter in model.parameters()}
    values = {where for where in found if where.type != "meta"}
    allowed = {torch.device("cpu"), device}
    odd = sorted(str(where) for where in values - allowed)
    if odd or len(values) > 1:
        where = ", ".join(sorted(map(str, found)))
        raise ContractError(
            f"the model is on a wrong device: its parameters are on {where}, the run is on {device}; build it on the "
            f"CPU (or on meta, with weights=FOLDER) and let prepare move it"
        )
    return next(iter(values), torch.device("cpu"))


def move_buffers(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """A shared buffer moves once. Returns a function that moves them back, with their values then."""
    before: dict[torch.Tensor, torch.device] = {}

    def move(to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        moved: dict[int, torch.Tensor] = {}
        kept: list[torch.Tensor] = []  # keeps the buffers alive, so that no id is used twice
        for module in model.modules():
            for name, buffer in buffer_table(module).items():
                if buffer is not None:
                    kept.append(buffer)
                    if id(buffer) not in moved:
                        moved[id(buffer)] = to(buffer)
                    buffer_table(module)[name] = moved[id(buffer)]

    def there(buffer: torch.Tensor) -> torch.Tensor:
        if buffer.device == device or buffer.is_meta:
            return buffer
        made = buffer.to(device)
        before[made] = buffer.device
        return made

    move(there)
    return lambda: move(lambda buffer: buffer.to(before[buffer]) if buffer in before else buffer)


def synchronized(device: torch.device, clock: Callable[[], float]) -> Callable[[], float]:
    """Returns a clock that waits, before each reading, until the device has done all its work."""
    if device.type != "cuda":
        return clock

    def read() -> float:
        torch.cuda.synchronize(device)
        return clock()

    return read
