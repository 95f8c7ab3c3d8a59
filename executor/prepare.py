"""prepare: puts a model under a plan. All errors are found before anything is allocated or changed."""

from __future__ import annotations

import atexit
import contextlib
import copy
import dataclasses
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from executor.activations.planned import RunOfBlocks, carry_out, check_activations
from executor.capture import capture_module
from executor.compatibility import check_model, check_settings
from executor.contract import reader_left, tensor_of
from executor.descriptions import Optimizer, group_of
from executor.devices.backend import Backend, available_host_bytes, claim_holes, keep_freed_pages, map_large_blocks
from executor.devices.opening import DeviceOptions, check_placement, move_buffers, open_backend
from executor.devices.packed import form_of, mark_packed, skeleton_of
from executor.devices.rounding import STOCHASTIC
from executor.devices.torch_private import parameter_table, storage_key
from executor.disks.folders import DiskFolders
from executor.distributed.ranks import CountOf, Ranks, count_of, join, share_values
from executor.engine import Session, SessionOptions
from executor.lifetime.loading import load_parameters, unload_parameters
from executor.lifetime.on_model import guard_model, watch_batches
from executor.lifetime.resources import ask_torch_threads
from executor.memory.arena import Arena, check_gpu_memory, check_host_memory
from executor.moments.recorder import describe_parameters, named_modules, unused_modules
from executor.optimizer import OffloadedOptimizer
from executor.queues.interface import Queues
from executor.queues.streams import StreamQueues, queues_for
from executor.queues.threads import ThreadQueues
from executor.saving.weights import Weights, check_values, give_memory
from executor.scaling import LossScaling, loss_scale_for
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.checker.check import check_plan
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place
from pstar_sim.errors import ContractError, PlanError
from pstar_sim.workload.workload import Tensor

log = logging.getLogger("executor")


def prepare(
    model: nn.Module,
    plan: Plan,
    optimizer: Optimizer,
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
    disks: Sequence[str | Path] = (),
    watchdog_s: float = 30.0,
    replan_after: int = 3,
    check: bool = True,
    group: Any = None,
    count: CountOf = count_of,
    timeout_s: float = 600.0,
) -> tuple[nn.Module, OffloadedOptimizer]:
    """Run `model` under `plan` from now on. Returns the same model, and the optimizer whose `step` the loop calls.

    device: "virtual", "cuda" or "cuda:N". The model is there or on the CPU (or on meta, with weights); its buffers are
        moved there, and the loop's batches have to be there.
    machine: the machine of this run, compared with the plan's.
    bandwidth, adam_threads, gpu_memory: see DeviceOptions.
    weights: a folder (or file) of safetensors with the model's values, streamed into the chunks; parameters may then be
        on meta (see `parameters_on_meta`), and nothing but the chunks is allocated.
    queues: "threads", or a queues object.
    backend: an open accelerator, in place of the one that `device` names.
    threads: torch threads of the virtual accelerator's compute queue until the session is closed (None leaves them).
    disks: folders on disks for what the plan keeps there; see docs/how-to/disks.md.
    watchdog_s: see ThreadQueues.
    replan_after: iterations off plan in a row after which a new plan is made (0: never).
    check: run the plan's independent checker first, and compare the first iteration's tide with the plan's
        (measuring/first.py).
    group: the processes of a plan of several ranks (default: torch.distributed's, if initialised). Every process calls
        prepare alike, and all begin with the first's parameters and buffers.
    count: [Note: the weight of a rank] in distributed/ranks.py.
    timeout_s: seconds after which a collective of the run's own fails.

    Raises PlanError for a plan that fails its check or was made for another model, dtype, optimizer setting or machine;
    ContractError for a model that is prepared already; DoesNotFit if host memory is short; WeightsError for weights
    that are broken or for another model. The model is then unchanged. If reading the weights fails, or anything after
    that, parameters with values in them are left without memory.
    """
    options = DeviceOptions(bandwidth=bandwidth, adam_threads=adam_threads, gpu_memory_bytes=gpu_memory)
    _require_unprepared(model)
    given = _matched(model, plan, optimizer, weights)
    checked = check and bool(plan.steps)
    worst_bytes = check_plan(plan, machine=machine).peak_bytes["gpu"] if checked else plan.gpu_budget_bytes

    made = backend or open_backend(device, plan, options)
    mine = made if backend is None else None
    with _given_back_on_error(mine, []):
        home = check_placement(model, made.device)
        check_gpu_memory(plan, made, worst_bytes)
        ranks = join(plan, group, device=made.device, timeout_s=timeout_s)
    sessions: list[Session] = []
    with _announced_on_error(ranks), _given_back_on_error(mine, sessions, given.source), contextlib.ExitStack() as undo:
        if ranks is not None:
            _require_same(ranks, given)
        folders = _folders(plan, disks, ranks)
        if folders is not None:
            undo.callback(folders.close)
        arena = _arena_that_fits(given, made, ranks, folders)
        driven = _queues_on(made, queues, watchdog_s=watchdog_s)
        # Nothing has been changed up to here.
        if ranks is not None and given.source is None:
            share_values(ranks, model)
        take_threads_back = _set_up_process(made, threads, plan)
        undo.callback(take_threads_back)
        torch_optimizer = OffloadedOptimizer(given.groups, optimizer)
        settings = _session_options(
            given, torch_optimizer, device=made.device.type, replan_after=replan_after, count=count
        )
        put_buffers_back = move_buffers(model, made.device)
        undo.callback(put_buffers_back)
        arena.allocate_slabs()
        give_memory(given.parameters, arena)
        session = Session(
            model, plan, given.parameters, arena=arena, backend=made, queues=driven, ranks=ranks, options=settings
        )
        sessions.append(session)
        undo.pop_all()  # the session gives these back from here on
        if folders is not None:
            session.resources.at_end.append(folders.close)
        session.listen()
        session.resources.at_end.append(take_threads_back)
        on_close, state = session.ending.on_close, session.state
        on_close.append(put_buffers_back)
        session.ending.home = home
        torch_optimizer.session = session
        session.optimizer = weakref.ref(torch_optimizer)
        _load(session, given.source)
        on_close.append(guard_model(model, session.loop, session.end_after_training))
        blocks = RunOfBlocks(
            closed=lambda: state.closed,
            collects=lambda: (
                session.reader.trains and not (state.closed or state.cursor.visiting) and state.cursor.inside
            ),
            stashes=lambda: state.run.stashes,
        )
        on_close.append(carry_out(model, plan.workload.activations, made.device, blocks))
        session.ending.hooks.append(watch_batches(model, session.loop))
        session.guard_memory()
        if checked:
            session.compare_first_tide()
        session.start()
        _warn_of_stateless(plan)
        _stop_at_exit(session)
        return model, torch_optimizer


# -- what belongs together --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """groups: as torch's optimizers take them.
    tensors, parameters: in the plan's order.
    source: of the values, if not the model.
    """

    model: nn.Module
    plan: Plan
    optimizer: Optimizer
    groups: list[dict[str, Any]]
    tensors: Sequence[Tensor]
    parameters: Sequence[nn.Parameter]
    max_grad_norm: float | None
    source: Weights | None


def _require_unprepared(model: nn.Module) -> None:
    prepared = next((p for p in model.parameters() if tensor_of(p) is not None), None)
    if prepared is None:
        return
    reader = reader_left(prepared)
    if reader is not None and reader.state.run.queues.progress is None:
        reader.standstill.require_running()  # left by an interrupted prepare, which returned no optimizer to close
    raise ContractError("the model is prepared already; call optimizer.session.close() before preparing it again")


def _matched(model: nn.Module, plan: Plan, optimizer: Optimizer, weights: str | Path | None) -> _Given:
    groups = optimizer.groups(model)
    by_id = group_of(groups)
    mark_packed(model)
    tensors, parameters = describe_parameters(model, by_id)
    check_model(plan, tensors, parameters, by_id)
    check_settings(plan, optimizer)
    norm = optimizer.norm_for(clip=plan.settings.clip)
    if norm is not None and norm is not optimizer.max_grad_norm:
        log.info("gradients are clipped at a global norm of %g: the plan was made with clipping", norm)
    check_activations(plan.workload, model)
    source = check_values(model, tensors, weights)
    return _Given(model, plan, optimizer, groups, tensors, parameters, norm, source)


def _require_same(ranks: Ranks, given: _Given) -> None:
    plan, names = given.plan, {id(p): t.name for t, p in zip(given.tensors, given.parameters)}
    ranks.same(
        {
            "the plan": f"{plan.workload.fingerprint} {plan.layout.to_dict()} {plan.modes} {plan.to_text()}",
            given.optimizer.word: f"{dataclasses.replace(given.optimizer, params_or_groups=None)}",
            "the order of the optimizer's groups, or of their parameters,": str(
                [[names.get(id(p)) for p in group["params"]] for group in given.groups]
            ),
            "the source of the values (weights=)": str(given.source is not None),
        }
    )


def _warn_of_stateless(plan: Plan) -> None:
    """No gradient reached these parameters in the plan's iteration."""
    tensors, layout = plan.workload.tensors, plan.layout
    without = {t for t, c in layout.chunk_of.items() if plan.modes[c] == "frozen" and not layout.chunks[c].frozen}
    if not (without and plan.steps):
        return
    modules = unused_modules(tensors, layout.chunk_of.keys() - without)
    log.warning(
        "%s got no gradient in the iteration that the plan was made from, and the plan has no optimizer states for it: "
        "a gradient in training would end the run; freeze what is not trained, else make the plan from batches that "
        "use it, and with no layers left out at random (a layerdrop of 0 while the plan is made)",
        named_modules(modules) or tensors[min(without)].name,
    )


# -- parts of the session ---------------------------------------------------------------------------------------------


def _folders(plan: Plan, disks: Sequence[str | Path], ranks: Ranks | None) -> DiskFolders | None:
    if not any(resident.place is Place.NVME for resident in plan.initial):
        return None
    if not disks:
        raise PlanError(
            f"the plan by {plan.policy} keeps lists on disks and no folder is given for them; give --disks FOLDER "
            "(prepare(..., disks=[FOLDER])), a folder on a disk"
        )
    rank, count = (0, 1) if ranks is None else (ranks.rank, ranks.count)
    folders = DiskFolders(folders=[Path(folder) for folder in disks], rank=rank, ranks=count)
    for note in folders.notes:
        log.warning("disks: %s, where transfers go through the page cache: its memory, or memory itself", note)
    return folders


def _arena_that_fits(given: _Given, backend: Backend, ranks: Ranks | None, folders: DiskFolders | None) -> Arena:
    """Raises DoesNotFit before it takes memory."""
    arena = Arena(given.plan, backend, rank=0 if ranks is None else ranks.rank, disks=folders)
    check_host_memory(
        given.plan,
        arena.slabs.room,
        available_bytes=available_host_bytes(),
        gpu_is_host=backend.device.type == "cpu",
        model_bytes=_host_bytes(given.parameters),
        processes=1 if ranks is None else len(ranks.on_this_host()),
    )
    return arena


def _host_bytes(parameters: Sequence[nn.Parameter]) -> int:
    storages = {storage_key(p): p.untyped_storage() for p in parameters if p.device.type == "cpu"}
    return sum(storage.nbytes() for storage in storages.values())


def _queues_on(backend: Backend, queues: Queues | str, *, watchdog_s: float) -> Queues:
    if queues == "threads":
        queues = queues_for(backend, watchdog_s=watchdog_s)
    if isinstance(queues, str):
        raise PlanError(f"queues={queues!r} is not known; use 'threads' or a queues object such as SerialQueues")
    if isinstance(queues, ThreadQueues) and queues.stopped:
        raise PlanError("the queues have been stopped with an earlier run; give new queues (queues.renew() makes them)")
    if backend.streams is not None and isinstance(queues, ThreadQueues) and not isinstance(queues, StreamQueues):
        raise PlanError(
            f"queues={type(queues).__name__} on {backend.name}: they do not wait for copies, which this device "
            "only issues in a step; leave queues out, or give StreamQueues"
        )
    return queues


def _set_up_process(backend: Backend, threads: int | None, plan: Plan) -> Callable[[], None]:
    """[Note: glibc and eviction] in backend.py, and torch's threads (None: no change). Returns a function that gives
    them back."""
    if backend.device.type != "cpu":
        return lambda: None
    on_disks, undo = plan.nvme_budget_bytes > 0, contextlib.ExitStack()
    if not (map_large_blocks if on_disks else keep_freed_pages)():
        log.info("the C library is not glibc: evicted memory may go back to the system each time")
    elif on_disks:
        undo.callback(claim_holes())
    if threads is not None:
        undo.callback(ask_torch_threads(threads))
    return undo.close


def _session_options(
    given: _Given, optimizer: OffloadedOptimizer, *, device: str, replan_after: int, count: CountOf
) -> SessionOptions:
    plan, scale = given.plan, loss_scale_for(given.optimizer.loss_scale, given.tensors)
    return SessionOptions(
        hyper=optimizer.hyper,
        max_grad_norm=given.max_grad_norm,
        eager=given.optimizer.eager and plan.settings.barrier(plan.workload.compute_dtype) is None,
        stochastic=given.optimizer.rounding == STOCHASTIC,
        scaling=None if scale is None else LossScaling(scale),
        capture=partial(capture_module, device=device),
        skeleton=_skeleton(given.model) if plan.steps else None,
        replan_after=replan_after,
        count=count,
    )


def _skeleton(model: nn.Module) -> nn.Module | None:
    """`session.batches.Shapes.skeleton`. Tensors that an earlier forward or capture left on the model have no memory
    either."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in parameter_table(module).items():
            if parameter is not None and id(parameter) not in memo:
                form = torch.empty_like(parameter, device="meta").as_subclass(torch.Tensor)
                memo[id(parameter)] = nn.Parameter(form, requires_grad=parameter.requires_grad)
                if form_of(parameter) is not None:
                    skeleton_of(module, name, memo)
    try:
        with _Skeletal():
            return copy.deepcopy(model, memo)
    except Exception as error:  # a module may hold any object; without a copy only captures of other shapes are lost
        log.info("%s cannot be copied: %s", type(model).__name__, error)
        return None


class _Skeletal(TorchFunctionMode):
    """`copy.deepcopy` copies tensors that torch refuses to copy (fake, or with a gradient function) as tensors on
    meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and (isinstance(args[0], FakeTensor) or not args[0].is_leaf):
            return torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
        return func(*args, **(kwargs or {}))


# -- how the session begins, and how it ends before that --------------------------------------------------------------


def _load(session: Session, source: Weights | None) -> None:
    session.weights_note = source.note if source is not None else ""
    with torch.no_grad():
        if source is None:
            load_parameters(session.reader)
        else:
            load_parameters(session.reader, source.tensors, source.fill)


def _stop_at_exit(session: Session) -> None:
    """No thread may be inside torch when the interpreter ends."""
    keeper = weakref.ref(session)

    def stop() -> None:
        held = keeper()
        if held is not None:
            held.ending.tell_ranks(getattr(sys, "last_value", None))
            held.queues.stop()

    atexit.register(stop)
    session.resources.at_end.append(lambda: atexit.unregister(stop))


@contextlib.contextmanager
def _given_back_on_error(
    backend: Backend | None, sessions: Sequence[Session], source: Weights | None = None
) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        for session in sessions:
            _call_off(session, error, source)
        if backend is not None and not sessions:
            backend.close()
        raise


def _call_off(session: Session, error: BaseException, source: Weights | None) -> None:
    """The model gets its values back, except those from a source, and not where ranks hold slices or after an
    interruption: both places may be incomplete."""
    if not isinstance(error, Exception):
        session.standstill.interrupt(
            "executor.prepare was interrupted while values moved into the chunks; build or load the model again"
        )
        return
    try:
        if session.ranks is None:
            unload_parameters(session.reader, session.home, () if source is None else source.tensors)
    except Exception as second:  # the device may be lost; prepare raises the first error
        log.warning("the parameters are left without values: %s: %s", type(second).__name__, second)
    finally:
        session.close(restore=False)


@contextlib.contextmanager
def _announced_on_error(ranks: Ranks | None) -> Iterator[None]:
    """The other ranks would wait for this one."""
    try:
        yield
    except BaseException as error:
        if ranks is not None:
            ranks.announce(error, 0)
        raise
