"""A real warm-up iteration as a Workload, with a capture's schema and moments.

The first iteration on demand counts every operator (live bytes, reads, gradients) and fetches chunks as operators are
about to read them. Later ones are timed: a moment's chunks are fetched before it, outside of its time. No layer is
dropped at random ([Note: draws] in moments/draws.py). The model and torch's random numbers stay: gradients are dropped,
nothing is updated.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.descriptions import AdamW, Optimizer, group_of
from executor.devices.opening import synchronized
from executor.engine import Session
from executor.models import forward_loss, map_batch
from executor.moments.beside import note_of, runs_beside, tensors_beside
from executor.moments.compiled import eagerly
from executor.moments.draws import Draws, Undropped, host_draws, with_every_layer
from executor.moments.hooks import tensors_of
from executor.moments.live_bytes import LiveStorages
from executor.moments.recorder import MomentRecorder, describe_parameters, working_dtype
from executor.moments.unseen import unseen
from executor.off_plan.warm_up import WarmUp, time_moments, warmed_up
from executor.prepare import prepare
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Resident, Settings
from pstar_sim.core.step import Place
from pstar_sim.errors import PlanError
from pstar_sim.workload.optimizers import OPTIMIZERS
from pstar_sim.workload.workload import Moment, Phase, Workload


def record(
    model: nn.Module,
    batches: Sequence[Any],
    machine: Machine,
    *,
    name: str,
    device: str = "virtual",
    batch: int | None = None,
    sequence: int | None = None,
    optimizer: Optimizer | None = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] = forward_loss,
    timed: int = 3,
    threads: int | None = 1,
    weights: str | Path | None = None,
    gpu_memory: int | None = None,
    group: Any = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Workload:
    """Returns the workload of one iteration of `model` on `batches` (one per micro-batch), run for real within
    `machine`'s gpu budget.

    device: as for `prepare`; the batches are copied there.
    batch, sequence: by default the first two extents of the batch's first tensor.
    optimizer: `prepare`'s (its groups and whether it clips are part of the recording).
    loss: forward pass and loss; it is divided by the number of micro-batches, as the loops here do.
    timed: iterations whose median gives each moment's seconds; 0 for none.
    threads, weights, gpu_memory: as for `prepare`.
    group: this process alone, where it is one of several.

    Raises DoesNotFit if the parameters that one operator reads do not fit the gpu, ModelError as capture does.
    """
    if not batches:
        raise PlanError("record: batches is empty; give one batch for each micro-batch of an iteration")
    spec = replace(optimizer or AdamW(), eager=False, max_grad_norm=None)
    plan = empty_plan(model, machine, name=name, micro_batches=len(batches), optimizer=spec)
    model, prepared = prepare(
        model, plan, spec, device=device, threads=threads, check=False, weights=weights, gpu_memory=gpu_memory,
        group=group,
    )  # fmt: skip
    session = prepared.session
    where = session.backend.device
    clock = synchronized(where, clock)
    devices = [where] if where.type == "cuda" else []
    if devices:
        batches = [map_batch(one, lambda tensor: tensor.to(where)) for one in batches]
    session.following.takes_norms = optimizer is not None and optimizer.max_grad_norm is not None

    def fresh(one: Any) -> Any:
        made: dict[int, torch.Tensor] = {}  # ids and labels are often one tensor
        with unseen():  # a loader made the batch before; it counts from the first operator that reads it
            return map_batch(one, lambda tensor: made.setdefault(id(tensor), tensor.clone()))

    def iteration() -> None:
        # The usual loop, as in a capture: a batch stays alive until the next one is drawn.
        for number, one in enumerate(batches):
            drawn = fresh(one)
            value = loss(model, drawn) / len(batches)
            session.clock.require_backwards(number, name)
            value.backward()  # type: ignore[no-untyped-call]
            del value
        session.clock.step()

    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(eagerly())
        stack.callback(session.close)
        stack.callback(_restore, buffers)
        stack.enter_context(torch.random.fork_rng(devices=devices))

        def counted(draws: Draws) -> tuple[MomentRecorder, tuple[nn.Module, ...]]:
            with host_draws(draws), Undropped(draws):
                return _counted(session, iteration)

        (recorder, beside), draws = with_every_layer(counted, lambda made: len(made[0].without_gradient()))
        shape = next((tuple(t.shape) for t in tensors_of(batches[0]) if t.dim()), ())
        w = recorder.workload(
            model=name,
            batch=batch if batch is not None else (int(shape[0]) if shape else 1),
            sequence=sequence if sequence is not None else (int(shape[1]) if len(shape) == 2 else 1),
            source="recorded",
            dtype=plan.workload.dtype,
            optimizer=plan.workload.optimizer,
            recorded_on=machine.name if timed else None,
            notes=note_of(beside),
        )
        if timed:
            with host_draws(draws), Undropped(draws) if draws.drew else contextlib.nullcontext():
                w = replace(w, moments=_timed(session, iteration, w, timed, clock))
    return w


def _restore(buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def _counted(session: Session, iteration: Callable[[], None]) -> tuple[MomentRecorder, tuple[nn.Module, ...]]:
    """Twice if a gradient fires more than once per micro-batch or modules run beside the model, as the first run shows;
    with these modules."""
    firings: dict[int, int] = {}
    beside: tuple[nn.Module, ...] = ()
    while True:
        with runs_beside(session.model, lambda module: None) as others:
            recorder = _count_once(session, iteration, firings, beside)
        seen = {tensor: count for tensor, count in recorder.firings().items() if count > 1}
        if seen == firings and (beside or not others):
            return recorder, beside
        firings, beside = seen, beside or tuple(others)


def _count_once(
    session: Session, iteration: Callable[[], None], firings: dict[int, int], beside: Sequence[nn.Module]
) -> MomentRecorder:
    state, clock, parameters = session.state, session.clock, session.reader.parameters
    chunk_of = state.run.timetable.chunk_of
    own = sorted(chunk_of)

    def read(index: int) -> None:
        recorder.read(own[index])
        state.run.reads.read({chunk_of[own[index]]})

    live = LiveStorages(
        [parameters[t] for t in own],
        itertools.chain(session.model.buffers(), tensors_beside(beside)),
        on_param_read=read,
        device=session.backend.device,
    )
    recorder = MomentRecorder(session.plan.workload.tensors, live, inside=lambda: clock.inside)
    with warmed_up(state, WarmUp(state, firings, recorder=recorder, live=live)), live:
        iteration()
        recorder.finish()
    session.loop.zero_grad()
    return recorder


def _timed(
    session: Session, iteration: Callable[[], None], w: Workload, repeats: int, clock: Callable[[], float]
) -> tuple[Moment, ...]:
    chunk_of = session.plan.layout.chunk_of
    script = [({chunk_of[t] for t in reads}, m.peak_bytes) for reads, m in zip(w.reads, w.moments)]
    final: dict[tuple[int, int], int] = {}
    firings: dict[int, int] = {}
    for m, tensors in enumerate(w.gradients):
        for t in tensors:
            key = (w.moments[m].micro_batch, t)
            final[key] = final.get(key, 0) + 1
            firings[t] = max(firings.get(t, 1), final[key])
    columns: list[list[float]] = [[] for _ in w.moments]
    for _ in range(repeats):
        durations = time_moments(session.state, script, firings, iteration, clock)
        if len(durations) != len(w.moments):
            raise PlanError(
                f"record: a repeated iteration had {len(durations)} moments, the first {len(w.moments)}; a model that "
                "has other moments each time cannot be timed (give timed=0)"
            )
        for column, duration_s in zip(columns, durations):
            column.append(duration_s)
        session.loop.zero_grad()
    return tuple(replace(m, duration_s=statistics.median(column)) for m, column in zip(w.moments, columns))


def empty_plan(
    model: nn.Module, machine: Machine, *, name: str, micro_batches: int, optimizer: Optimizer | None = None
) -> Plan:
    """Everything on the host, fetched on demand, and nothing updated."""
    spec = optimizer or AdamW()
    tensors, _ = describe_parameters(model, group_of(spec.groups(model)))
    w = Workload(
        model=name,
        dtype=working_dtype(tensors),
        batch=1,
        sequence=1,
        micro_batches=micro_batches,
        checkpointing=False,
        attention="none",
        source="recorded",
        tensors=tensors,
        moments=(_step(micro_batches),),
        uses=(),
        optimizer=OPTIMIZERS[spec.planned],
    )
    layout = build_layout(w)
    return Plan(
        policy="warm-up",
        workload=w,
        machine=machine,
        settings=Settings(update="step", clip=False),
        layout=layout,
        modes=tuple("frozen" if c.frozen else "cpu" for c in layout.chunks),
        initial=frozenset(Resident(c.index, "param", Place.HOST) for c in layout.chunks),
        steps=(),
        gpu_budget_bytes=machine.gpu_budget_bytes,
        host_budget_bytes=machine.host_budget_bytes,
    )


def _step(micro_batches: int) -> Moment:
    return Moment(
        name="step", phase=Phase.ADAM, module="", micro_batch=micro_batches - 1, flops=0, bytes_read=0, bytes_written=0,
        start_bytes=0, peak_bytes=0, end_bytes=0,
    )  # fmt: skip
