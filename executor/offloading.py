"""Offloading: puts a model and its torch optimizer under a plan for this machine, in one call.

[Note: mixed precision] Scripts that ask for mixed precision (`bf16=True`) have a model in fp32 and cast inside every
operator. Here every floating parameter is converted to the plan's dtype once, and the fp32 values become the master
copies; updates, and sums over several micro-batches, are in fp32. The script's own autocast stays around the forward.
Buffers keep their dtype, and so do parameters of batch norms, whose kernels want that of their running statistics. The
result differs from the script's own run by the rounding of the working copies.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from executor.capture import NotOnFakeTensors, capture_module
from executor.compatibility import check_processes
from executor.contract import tensor_of
from executor.describing import Joined, description_of, require_its_parameters
from executor.descriptions import Optimizer
from executor.devices.cuda import CudaBackend, cuda_device
from executor.devices.dtypes import TORCH_DTYPES
from executor.devices.opening import is_cuda
from executor.devices.rounding import NEAREST
from executor.models import forward_loss, under_autocast
from executor.optimizer import OffloadedOptimizer
from executor.prepare import prepare
from executor.recording.record import record
from executor.session.forms import Form, form_of, names_of
from executor.session.spelling import LOOP, Spelling
from pstar_sim.arguments import choice, parse_bytes
from pstar_sim.catalog.catalog import load_catalog
from pstar_sim.catalog.here import nvidia_smi, this_machine
from pstar_sim.catalog.loader import load_machine, resize, with_disks
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.overrides import override
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.dtypes import DTYPES
from pstar_sim.errors import ContractError, DoesNotFit, ModelError, PstarError
from pstar_sim.policy.registry import plan_to_run
from pstar_sim.units import MIB
from pstar_sim.workload.optimizers import MASTER_LIST, MASTERS
from pstar_sim.workload.workload import Workload, repeat_micro_batch, with_optimizer

log = logging.getLogger("executor")


@dataclass(frozen=True, kw_only=True)
class Request:
    """gpu_memory: that each process may use, "24GB" or bytes; None: all free memory.
    device: "virtual", "cuda" or "cuda:N"; None: "cuda" where torch has a CUDA device, else "virtual".
    machine: a machine or its name, as for `pstar_sim.machine`; "here": the machine that this runs on.
    masters: "fp32": 16-bit parameters have masters of 4 bytes each; "none": updates are in the parameters' dtype, as in
        plain torch, also for an fp32 model that the plan's dtype converts; None: "fp32", with a warning where plain
        torch has none.
    disks: folders for what a plan keeps on disks; their free room is the machine's disks.
    on_plan: called with the plan before the run begins.
    """

    gpu_memory: str | int | None = None
    device: str | None = None
    machine: Machine | str = "here"
    policy: str = "optimal"
    masters: str | None = None
    disks: Sequence[str | Path] = ()
    on_plan: Callable[[Plan], None] | None = None

    def __post_init__(self) -> None:
        if self.masters is not None:
            choice("masters", self.masters, MASTERS, error=ContractError)

    @property
    def where(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "virtual")

    @property
    def kind(self) -> str:
        """The type of the device to run on."""
        return "cuda" if is_cuda(self.where) else "cpu"

    @property
    def limit_bytes(self) -> int | None:
        """None without a limit. Raises PstarError for a text that is not a size."""
        return parse_bytes(self.gpu_memory) if isinstance(self.gpu_memory, str) else self.gpu_memory


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    example_batch: Any,
    *,
    gpu_memory: str | int | None = None,
    micro_batches: int = 1,
    max_grad_norm: float | None = None,
    dtype: str | None = None,
    masters: str | None = None,
    update: str = Settings.update,
    rounding: str = NEAREST,
    loss: Callable[[nn.Module, Any], torch.Tensor] = forward_loss,
    device: str | None = None,
    machine: Machine | str = "here",
    policy: str = "optimal",
    disks: Sequence[str | Path] = (),
    on_plan: Callable[[Plan], None] | None = None,
) -> tuple[nn.Module, OffloadedOptimizer]:
    """Run the model of a training loop by a plan for this machine. Returns the same model, and the optimizer for the
    loop.

    optimizer: torch's AdamW, Adam or SGD over the model's parameters, lion_pytorch's Lion, transformers' Adafactor, or
        bitsandbytes' AdamW or Lion; or torch's Muon and AdamW in a list. Its settings and states are kept, its groups
        shared: a scheduler made with it continues to work.
    example_batch: a batch of the largest shape, as the model takes it (a mapping: keyword arguments; a tuple:
        positional arguments).
    micro_batches: number of backwards before each `optimizer.step()`.
    max_grad_norm: clip at this global norm inside `step()`, instead of `torch.nn.utils.clip_grad_norm_`.
    dtype: bf16 or fp16: train in it, by [Note: mixed precision]; None: the model's own dtypes. The plan has room for a
        loop under autocast.
    update: "step"; or "eager": each chunk is updated inside the backward as soon as its gradients are there (LOMO,
        torch's optimizer in backward). The loop still calls `step()`.
    rounding: "nearest"; or "stochastic", for bf16 without masters: parameters are rounded to one of their neighbours,
        so that small updates are kept in the mean. A run has the same bits under every plan.
    loss: loss(model, batch) -> the scalar on which the loop calls `backward()`. By default the model's own loss.
    gpu_memory, device, machine, policy, masters, disks, on_plan: see `Request`.

    Where the model cannot run on fake tensors, an iteration is recorded on the device, as by `record`; the log says so.

    Raises ContractError for another optimizer or a model that is prepared already, DoesNotFit where no plan fits,
    ModelError as `capture_module` and `record` do. The model and its optimizer are then unchanged.
    """
    if micro_batches < 1:
        raise ContractError(f"executor.offload: micro_batches={micro_batches} must be at least 1")
    request = Request(
        gpu_memory=gpu_memory, device=device, machine=machine, policy=policy, masters=masters, disks=disks,
        on_plan=on_plan,
    )  # fmt: skip
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = Joined(optimizer if isinstance(optimizer, Sequence) else ())
    settings = Settings(clip=max_grad_norm is not None, update=update)
    spec = description_of(model, optimizer, max_grad_norm=max_grad_norm)
    spec = replace(spec, eager=update != Settings.update, rounding=rounding)
    require_its_parameters(model, optimizer)
    with converted(model, dtype) as values:
        with form_seen(model) as form:
            loss = under_autocast(loss, request.kind, dtype)
            workload = traced(model, example_batch, spec, request, loss=loss)
        plan = plan_for(workload, request, micro_batches=micro_batches, settings=settings)
        return model, begin(
            model,
            plan,
            spec,
            request,
            optimizer=optimizer,
            masters=values,
            spelling=LOOP,
            form=form[0],
        )


@contextlib.contextmanager
def form_seen(model: nn.Module) -> Iterator[list[Form | None]]:
    """Yields a list with the form of the batch of the model's first call with gradients, None before it."""
    found: list[Form | None] = [None]
    names = names_of(model)

    def see(module: nn.Module, args: Any, kwargs: Any) -> None:
        if found[0] is None and torch.is_grad_enabled():
            found[0] = form_of(args, kwargs, names)

    handle = model.register_forward_pre_hook(see, with_kwargs=True, prepend=True)
    try:
        yield found
    finally:
        handle.remove()


def traced(
    model: nn.Module,
    batch: Any,
    spec: Optimizer,
    request: Request,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    name: str | None = None,
) -> Workload:
    """One micro-batch: captured, or recorded on the run's device where fake tensors cannot run the model. Raises
    DoesNotFit where a recording does not fit the device, else ModelError."""
    try:
        return capture_module(model, batch, name=name, groups=spec, loss=loss, device=request.kind)
    except NotOnFakeTensors as error:
        if _processes() > 1:
            raise
        machine = _machine(request, gpus=1)
        log.warning("%s; an iteration is recorded instead, on %s", error.reason, request.where)
        try:
            return record(
                model, [batch], machine, name=name or type(model).__name__, device=request.where,
                optimizer=spec, loss=loss, timed=0,
                gpu_memory=request.limit_bytes if is_cuda(request.where) else None,
            )  # fmt: skip
        except DoesNotFit:
            raise
        except Exception as failed:
            raise ModelError(
                f"{error.reason}; an iteration recorded on {request.where} ended with {type(failed).__name__}: {failed}"
            ) from failed


# -- the plan ---------------------------------------------------------------------------------------------------------


def plan_for(workload: Workload, request: Request, *, micro_batches: int, settings: Settings) -> Plan:
    """The first process makes the plan for all. Raises DoesNotFit, on all processes, where nothing fits."""
    count = _processes()
    workload = with_optimizer(workload, masters=request.masters)
    whole = repeat_micro_batch(workload, micro_batches) if micro_batches > 1 else workload
    made: list[Any] = [None]
    if count == 1 or dist.get_rank() == 0:
        try:
            machine = with_disks(_machine(request, gpus=count), request.disks)
            dtype = DTYPES[whole.dtype]
            plain = count == 1 and whole.optimizer.masters == MASTERS[1] and dtype.can_sum and not dtype.scaled
            settings = replace(settings, sums="16-bit" if plain else Settings.sums)  # as torch adds gradients up
            made[0] = plan_to_run(request.policy, whole, machine, settings)
        except PstarError as error:  # every process raises the error below
            if isinstance(error, DoesNotFit) and whole.notes:
                error = error.restated(what=f"{error.what}; {whole.notes}")
            made[0] = Refused(type(error), error.args, dict(error.__dict__))
    if count > 1:
        dist.broadcast_object_list(made, src=0)
    if isinstance(made[0], Refused):
        raise made[0].error()
    plan: Plan = made[0]
    check_processes(plan, count)
    if request.on_plan is not None:
        request.on_plan(plan)
    return plan


@dataclass(frozen=True)
class Refused:
    """An error in parts that can be sent to other processes."""

    kind: type[PstarError]
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    def error(self) -> PstarError:
        made = self.kind.__new__(self.kind)
        made.args = self.args
        made.__dict__.update(self.attributes)
        return made


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _machine(request: Request, *, gpus: int) -> Machine:
    """With the memory that chunks and tide can really use."""
    many = gpus if gpus > 1 else None
    on_cuda = is_cuda(request.where)
    if isinstance(request.machine, Machine):
        machine = request.machine
    elif on_cuda and str(request.machine).lower() == "here":
        machine = this_machine(load_catalog(), gpus=lambda: nvidia_smi() or cuda_devices())
        if machine.world_size != gpus:  # a process may use one GPU of several
            machine = override(machine, {"gpus": gpus})
    else:
        machine = load_machine(request.machine, gpus=many)
    if not on_cuda:
        return resize(machine, gpu_memory=request.gpu_memory)
    backend = CudaBackend(cuda_device(request.where), limit_bytes=request.limit_bytes)
    try:
        free_bytes = backend.plannable_gpu_bytes()
    finally:
        backend.close()
    if machine.gpu_budget_bytes <= free_bytes:
        return machine
    # `free_bytes` is without the CUDA context, which the machine's memory includes.
    return resize(machine, gpu_memory=free_bytes - free_bytes // 64 + machine.gpu.context_bytes)


def cuda_devices() -> str:
    """As `nvidia_smi`, which a container may lack, would list them. All memory counts as free: asking would open a
    context on every device."""
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    mib = ((device.name, device.total_memory // MIB) for device in devices)
    return "".join(f"{name}, {memory}, {memory}, [N/A], [N/A]\n" for name, memory in mib)


def describe(plan: Plan) -> str:
    """The plan's policy, and the number of chunks in each mode."""
    modes = [plan.modes.count(mode) for mode in ("pin", "stream", "cpu", "frozen")]
    words = zip(modes, ("pinned", "updated on the GPU", "updated on the CPU", "frozen"))
    parts = ", ".join(f"{count} {name}" for count, name in words if count)
    return f"policy {plan.policy}: {len(plan.layout.chunks)} chunks ({parts})"


# -- the run ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def converted(model: nn.Module, dtype: str | None) -> Iterator[dict[nn.Parameter, torch.Tensor]]:
    """Convert the model's floating parameters. Yields their fp32 values for the master copies, which they get back if
    the context's body raises. [Note: mixed precision]

    Raises ContractError for another dtype, and for a prepared model."""
    if dtype is not None and dtype not in TORCH_DTYPES:
        raise ContractError(f"dtype {dtype!r} is not known; it is one of {', '.join(TORCH_DTYPES)}")
    if any(tensor_of(p) is not None for p in model.parameters()):
        raise ContractError("the model is prepared already; call optimizer.session.close() before preparing it again")
    kept: dict[nn.Parameter, torch.Tensor] = {}
    if dtype is not None:
        stays = {id(p) for part in model.modules() if isinstance(part, _NormBase) for p in part.parameters()}
        for parameter in model.parameters():
            if parameter.dtype == torch.float32 and id(parameter) not in stays:
                kept[parameter] = parameter.data
                parameter.data = parameter.data.to(TORCH_DTYPES[dtype])
    try:
        yield kept
    except BaseException:
        for parameter, value in kept.items():
            if tensor_of(parameter) is None:
                parameter.data = value
        raise


def begin(
    model: nn.Module,
    plan: Plan,
    spec: Optimizer,
    request: Request,
    *,
    optimizer: torch.optim.Optimizer,
    masters: Mapping[nn.Parameter, torch.Tensor],
    spelling: Spelling,
    count: Callable[[Any, Any], float] | None = None,
    form: Form | None = None,
) -> OffloadedOptimizer:
    """masters: fp32 values of converted parameters.
    spelling: names of settings in the user's program.
    count: as for `prepare`.
    form: of the plan's batch, if known; smaller batches then run without a capture.
    """
    more = {} if count is None else {"count": count}
    limit = request.limit_bytes if is_cuda(request.where) else None
    _, offloaded = prepare(model, plan, spec, device=request.where, gpu_memory=limit, disks=request.disks, **more)  # type: ignore[arg-type]
    offloaded.session.shapes.planned = form
    offloaded.session.state.spelling = spelling
    if request.masters != MASTERS[1]:
        _take_masters(offloaded, masters)
    if request.masters is None and not (masters or all(plan.layout.is_own_master(c.index) for c in plan.layout.chunks)):
        log.warning(
            "%s has %s parameters, to which the plan adds fp32 masters: updates are made in fp32, and take more bytes; "
            'masters="none" (pstar launch --masters none) updates them as plain torch does, masters="fp32" says that '
            "masters are wanted",
            plan.workload.model, plan.workload.dtype,
        )  # fmt: skip
    if optimizer.state:
        offloaded.load_state_dict(optimizer.state_dict())
    offloaded.share_groups(optimizer)
    log.info("%s offloaded, %s", plan.workload.model, describe(plan))
    return offloaded


def _take_masters(offloaded: OffloadedOptimizer, masters: Mapping[nn.Parameter, torch.Tensor]) -> None:
    session = offloaded.session
    with session.still():
        for parameter, value in masters.items():
            tensor = tensor_of(parameter)
            assert tensor is not None
            if not session.plan.workload.tensors[tensor].frozen:
                session.reader.put_state(tensor, MASTER_LIST, value.reshape(-1))
