"""Renewal: a session continues under another plan of the same model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from executor.devices.backend import available_host_bytes
from executor.devices.packed import point_at, unpacked
from executor.lifetime.loading import load_parameters
from executor.memory.arena import PLACES, Arena, check_host_memory
from executor.memory.slots import fields_of, list_of
from executor.queues.interface import Queues
from executor.session.reader import Reader
from pstar_sim.core.plan import Plan
from pstar_sim.errors import DiskError, DoesNotFit, PlanError


def renew(
    reader: Reader, plan: Plan, install: Callable[[Plan, Arena, Queues], None], start: Callable[[], None]
) -> None:
    """Between two iterations, on one rank: values and states move into another plan's chunks.

    Raises, before anything changes, PlanError if it lacks states of a parameter trained now, DoesNotFit if the host
    cannot hold both plans' memory meanwhile. `RunState.renewing` stays set if the move itself fails.
    """
    state, run = reader.state, reader.state.run
    backend, queues, arena_before = run.backend, run.queues, run.arena
    assert not state.cursor.inside
    trained = {t for tensors in run.plan.workload.gradients for t in tensors}
    if any(plan.modes[plan.layout.chunk_of[t]] == "frozen" for t in trained):
        raise PlanError("its iteration leaves out layers that the present plan trains, and would lose their states")
    arena = Arena(plan, backend, disks=arena_before.disks.folders)
    layout = run.plan.layout
    moving = sum(layout.payload_bytes(c.index, "param") + layout.states_bytes(c.index) for c in layout.chunks)
    check_host_memory(
        plan,
        arena.slabs.room,
        available_bytes=available_host_bytes(),
        gpu_is_host=backend.device.type == "cpu",
        model_bytes=-moving,  # needed besides: all values are first copied out of the old plan's chunks
    )
    with torch.no_grad():
        reader.standstill.drain()
        try:
            arena.allocate_slabs()
        except (DiskError, DoesNotFit):
            backend.begin(run.plan)
            if not state.held:
                queues.resume()
            raise
        state.held = True
        steps_taken = run.contents.steps_taken
        values = {t: reader.value_now(t) for t in run.timetable.chunk_of}
        states = {
            (s.tensor, field): reader.state_value(s.tensor, field)
            for c in layout.chunks
            if not c.frozen
            for s in c.slots
            for field in fields_of(layout.states_of(c.index))
            if any(arena_before.has(place, c.index, list_of(field)) for place in PLACES)
        }
        state.renewing = True
        queues.stop()
        reader.set_open(False)
        for t, value in values.items():
            reader.parameters[t].__class__ = reader.parameters[t].plan_class  # type: ignore[attr-defined]
            point_at(reader.parameters[t], unpacked(reader.parameters[t], value.reshape(-1)))
        arena_before.empty()  # the accelerator may not have room for both plans
        install(plan, arena, queues.renew())
        load_parameters(reader)
        for (t, field), value in states.items():
            reader.put_state(t, field, value)
        state.run.contents.steps_taken.update(steps_taken)
    del run, arena_before, queues, values, states
    backend.give_host_back()  # the former plan's slabs
    state.held = False
    start()
    state.renewing = False
