"""prepare: put a model under a plan. Everything that can be wrong is found before anything is allocated or changed."""

from __future__ import annotations

import atexit
import contextlib
import copy
import dataclasses
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.activations.planned import carry_out, check_activations
from executor.adamw import AdamW, group_of
from executor.capture import capture_module
from executor.checks import check_model, check_settings
from executor.contract import changes_nothing
from executor.devices.backend import Backend, available_host_bytes, keep_freed_pages
from executor.devices.device import DeviceOptions, check_placement, move_buffers, open_backend
from executor.devices.torch_private import parameter_table, storage_key
from executor.distributed.ranks import Ranks, count_of, join, share_values
from executor.engine import Session, SessionOptions
from executor.lifetime.holdings import ask_torch_threads
from executor.lifetime.loading import load_parameters
from executor.memory.arena import Arena, check_gpu_memory, check_host_memory
from executor.moments.compiled import untraced
from executor.moments.recorder import describe_parameters
from executor.moments.unseen import unseen
from executor.optimizer import OffloadedAdamW
from executor.queues.interface import Queues
from executor.queues.streams import StreamQueues, queues_for
from executor.queues.threads import ThreadQueues
from executor.saving.weights import check_values, give_memory
from executor.scaling import LossScaling, loss_scale_for
from executor.session.others import CountOf
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.checker.check import check_plan
from pstar_sim.core.plan import Plan
from pstar_sim.errors import ContractError, DoesNotFit, PlanError, WeightsError

__all__ = ["prepare"]

log = logging.getLogger("executor")


def prepare(
    model: nn.Module,
    plan: Plan,
    optimizer: AdamW,
    *,
    device: str = "virtual",
    machine: Machine | None = None,
    bandwidth: float | tuple[float | None, float | None] | None = None,
    weights: str | Path | None = None,
    queues: Queues | str = "threads",
    backend: Backend | None = None,
    threads: int | None = 1,
    adam_threads: int | None = None,
    gpu_memory: int | None = None,
    watchdog_s: float = 30.0,
    replan_after: int = 3,
    check: bool = True,
    group: Any = None,
    count: CountOf = count_of,
    timeout_s: float = 600.0,
) -> tuple[nn.Module, OffloadedAdamW]:
    """Run `model` under `plan` from now on: the same model, and the optimizer whose `step` the loop calls.

    device: "virtual", "cuda" or "cuda:N". The model is on the CPU (or on meta, with weights), or on that device; its
    buffers are moved there, the loop's batches have to be there. machine: the machine the run is on, compared with the
    plan's. bandwidth, adam_threads, gpu_memory (bytes): see DeviceOptions. weights: a folder (or file) of
    safetensors whose values the model gets, streamed into the chunks; the model's parameters may then be on meta (see
    `parameters_on_meta`), and nothing but the chunks is allocated. queues: "threads", or a queues object.
    threads: torch threads of the virtual accelerator's compute queue until the session is closed (None leaves them).
    watchdog_s: see ThreadQueues. replan_after: so many iterations off plan in a row make a new plan (0: never). check:
    run the plan's independent checker first, and hold the first iteration's tide against the plan's (where it is
    higher, the session goes on under a new plan: measuring/first.py). group: the processes of a plan of several ranks
    (default: torch.distributed's, if it is initialised); every one calls prepare with the same plan and settings, and
    all begin with the parameters and buffers of the first. count: [Note: the weight of a rank] in distributed/ranks.py.
    timeout_s: of a collective of the run's own.

    Raises PlanError for a plan that fails its check or was made for another model, dtype, optimizer setting or machine,
    ContractError for a model that is prepared already, DoesNotFit if host memory is short, WeightsError for weights
    that are broken or not of this model; the model is then unchanged.
    """
    options = DeviceOptions(bandwidth=bandwidth, adam_threads=adam_threads, gpu_memory_bytes=gpu_memory)
    if (prepared := next((p for p in model.parameters() if hasattr(p, "_reader")), None)) is not None:
        reader = prepared._reader()
        if reader is not None and reader.host.queues.program is None:
            reader.host.loop.require_running()  # a prepare that was interrupted: there is no optimizer to close
        raise ContractError("the model is prepared already; call optimizer.session.close() before preparing it again")
    groups = optimizer.groups(model)
    by_id = group_of(groups)
    tensors, parameters = describe_parameters(model, by_id)
    check_model(plan, tensors, parameters, by_id)
    check_settings(plan, optimizer)
    norm = optimizer.norm_for(clip=plan.settings.clip)
    if norm is not None and norm is not optimizer.max_grad_norm:
        log.info("gradients are clipped at a global norm of %g: the plan was made with clipping", norm)
    check_activations(plan.workload, model)
    source = check_values(model, tensors, weights)
    worst_bytes = plan.gpu_budget_bytes
    if check and plan.steps:
        worst_bytes = check_plan(plan, machine=machine).peak_bytes["gpu"]

    made = backend or open_backend(device, plan, options)
    mine = made if backend is None else None
    with _closed(mine, []):
        home = check_placement(model, made.device)
        check_gpu_memory(plan, made, worst_bytes)
        ranks = join(plan, group, device=made.device, timeout_s=timeout_s)
    sessions: list[Session] = []
    with _heard(ranks), _closed(mine, sessions):
        if ranks is not None:
            names = {id(p): t.name for t, p in zip(tensors, parameters)}
            ranks.same(
                {
                    "the plan": f"{plan.workload.fingerprint} {plan.layout.to_dict()} {plan.modes} {plan.to_text()}",
                    "AdamW": f"{dataclasses.replace(optimizer, params_or_groups=None)}",
                    "the order of AdamW's groups, or of their parameters,": str(
                        [[names.get(id(p)) for p in group["params"]] for group in groups]
                    ),
                    "the source of the values (weights=)": str(source is not None),
                }
            )
        arena = Arena(plan, made, rank=0 if ranks is None else ranks.rank)
        model_bytes = _host_bytes(parameters)
        check_host_memory(
            plan,
            arena.room,
            available_bytes=available_host_bytes(),
            gpu_is_host=made.device.type == "cpu",
            model_bytes=model_bytes,
            processes=1 if ranks is None else ranks.on_this_host(),
        )
        # Nothing has been changed up to here.
        if ranks is not None and source is None:
            share_values(ranks, model)
        if made.device.type == "cpu" and not keep_freed_pages():
            log.info("the C library is not glibc: evicted memory may go back to the system each time")
        if made.device.type != "cpu":
            threads = None
        take_threads_back = ask_torch_threads(threads) if threads is not None else lambda: None
        torch_optimizer = OffloadedAdamW(groups, optimizer)
        scale = loss_scale_for(optimizer.loss_scale, tensors)
        skeleton = _skeleton(model) if plan.steps else None
        if queues == "threads":
            queues = queues_for(made, watchdog_s=watchdog_s)
        if isinstance(queues, str):
            raise PlanError(f"queues={queues!r} is not known; use 'threads' or a queues object such as SerialQueues")
        if hasattr(made, "record") and isinstance(queues, ThreadQueues) and not isinstance(queues, StreamQueues):
            raise PlanError(
                f"queues={type(queues).__name__} on {made.name}: a copy is only issued when its step has ended there, "
                "and these queues would not wait for it; leave queues out, or give StreamQueues"
            )
        put_buffers_back = move_buffers(model, made.device)
        try:
            arena.allocate_slabs()
        except DoesNotFit:
            put_buffers_back()
            take_threads_back()
            raise
        give_memory(parameters, arena)
        session = Session(
            model,
            plan,
            parameters,
            arena=arena,
            backend=made,
            queues=queues,
            ranks=ranks,
            options=SessionOptions(
                hyper=torch_optimizer.hyper,
                max_grad_norm=norm,
                eager=optimizer.eager and plan.settings.barrier(plan.workload.dtype) is None,
                scaling=None if scale is None else LossScaling(scale),
                capture=capture_module,
                skeleton=skeleton,
                replan_after=replan_after,
                count=count,
            ),
        )
        sessions.append(session)
        torch_optimizer.session = session
        session.holdings.at_end.append(take_threads_back)
        session.home = home
        session.optimizer = weakref.ref(torch_optimizer)
        session.on_close.append(put_buffers_back)
        session.weights_note = source.note if source is not None else ""
        try:
            with torch.no_grad():
                load_parameters(session, source)
        except WeightsError:  # a file that changed after its header was read
            session.close(restore=False)
            raise
        session.on_close += [_guard_model(model, session), carry_out(session)]
        _watch_batches(model, session)
        session.guard_memory()
        if check and plan.steps:
            session.compare_first_tide()
        session.start()
        stop = _stop_at_exit(session)
        atexit.register(stop)
        session.holdings.at_end.append(lambda: atexit.unregister(stop))
        return model, torch_optimizer


@contextlib.contextmanager
def _closed(backend: Backend | None, sessions: Sequence[Session]) -> Iterator[None]:
    """What was taken of the device for a run that does not begin is given back; a session does so itself."""
    try:
        yield
    except BaseException as error:
        if sessions and not isinstance(error, Exception):
            sessions[0].ending.interrupt(
                "executor.prepare was interrupted while values moved into the chunks; build or load the model again"
            )
        if backend is not None and not sessions:
            backend.close()
        raise


@contextlib.contextmanager
def _heard(ranks: Ranks | None) -> Iterator[None]:
    """What is raised inside reaches the other ranks, which would wait for this one."""
    try:
        yield
    except BaseException as error:
        if ranks is not None:
            ranks.announce(error, 0)
        raise


def _skeleton(model: nn.Module) -> nn.Module | None:
    """A copy of the model whose parameters have no memory, for captures of other batch shapes; None if it cannot be
    copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # a module may hold anything; only captures of other shapes are lost
        log.info("%s cannot be copied: %s", type(model).__name__, error)
        return None


def _host_bytes(parameters: Sequence[nn.Parameter]) -> int:
    """Host memory of the model's own storages, each counted once: views share one, those of a device are not there."""
    storages = {storage_key(p): p.untyped_storage() for p in parameters if p.device.type == "cpu"}
    return sum(storage.nbytes() for storage in storages.values())


def _guard_model(model: nn.Module, session: Session) -> Callable[[], None]:
    """Put the module-level half of the contract (contract.py) in place; returns what takes it away."""
    keeper = weakref.ref(session)
    undo: list[Callable[[], None]] = []

    def moved(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        with unseen():
            if changes_nothing(self, fn):
                return self
        raise ContractError(
            f"{type(self).__name__}.to() and its like (half, float, cuda, cpu) cannot move a prepared model: its "
            "memory is the plan's; convert the model before executor.prepare"
        )

    def loaded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise ContractError(
            f"{type(self).__name__}.load_state_dict on a prepared model: the master copies would not know; load the "
            "weights before executor.prepare"
        )

    def copied(self: nn.Module, memo: Any) -> Any:
        raise ContractError(
            f"copy.deepcopy of a prepared {type(self).__name__} would share its session; load model.state_dict() into "
            "a "
            "second model instead"
        )

    def zeroed(self: nn.Module, set_to_none: bool = True) -> None:
        held = keeper()
        if held is not None:
            held.loop.zero_grad(set_to_none)

    for module in model.modules():
        for name, function in (("_apply", moved), ("load_state_dict", loaded), ("__deepcopy__", copied)):
            module.__dict__[name] = types.MethodType(function, module)
            undo.append(_remover(module, name))
        handle = module.register_state_dict_post_hook(_current_values(keeper))  # type: ignore[no-untyped-call]
        undo.append(handle.remove)
    model.__dict__["zero_grad"] = types.MethodType(zeroed, model)
    undo.append(_remover(model, "zero_grad"))

    def undo_all() -> None:
        for action in undo:
            action()

    return undo_all


def _stop_at_exit(session: Session) -> Callable[[], None]:
    """A queue's thread must not be inside torch while the interpreter goes down."""
    keeper = weakref.ref(session)

    def stop() -> None:
        held = keeper()
        if held is not None:
            held.ending.tell_ranks(getattr(sys, "last_value", None))
            held.queues.stop()

    return stop


def _remover(module: nn.Module, name: str) -> Callable[[], None]:
    def remove() -> None:
        module.__dict__.pop(name, None)

    return remove


def _current_values(keeper: Callable[[], Session | None]) -> Callable[..., None]:
    """A state_dict hook: the module's own parameters are given as copies of their current values."""

    def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        session = keeper()
        if session is None or session.closed:
            return
        for name, parameter in parameter_table(module).items():
            key = prefix + name
            if parameter is not None and key in state_dict and hasattr(parameter, "_tensor"):
                state_dict[key] = session.reader.current_value(parameter._tensor)

    return hook


def _watch_batches(model: nn.Module, session: Session) -> None:
    keeper = weakref.ref(session)

    def see(module: nn.Module, args: Any, kwargs: Any) -> None:
        held = keeper()
        if held is not None and not held.closed:
            held.loop.see_batch(args, kwargs)

    handle = model.register_forward_pre_hook(untraced(see), prepend=True, with_kwargs=True)
    session.hooks.append(handle)
