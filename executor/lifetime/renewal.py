"""Renewal: a session continues under another plan of the same model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from executor.devices.backend import available_host_bytes
from executor.lifetime.loading import load_parameters
from executor.memory.arena import Arena, check_host_memory
from executor.queues.interface import Lifetime, Queues, Stillness
from executor.session.hosting import BytesHost
from executor.session.loop import Loop
from executor.session.reader import Reader
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place
from pstar_sim.errors import DoesNotFit, PlanError

__all__ = ["Host", "renew"]


class QueuesAsked(Lifetime, Stillness, Protocol):
    """The part of the queues that this file uses."""


class Host(BytesHost, Protocol):
    """The part of the session that this file uses."""

    held: bool
    renewing: bool

    @property
    def queues(self) -> QueuesAsked: ...
    @property
    def reader(self) -> Reader: ...
    @property
    def loop(self) -> Loop: ...

    def install(self, plan: Plan, arena: Arena, queues: Queues) -> None: ...

    def start(self) -> None: ...


def renew(host: Host, plan: Plan) -> None:
    """Continue under another plan of the same model, between two iterations, on one rank. Values and optimizer states
    move into the new plan's chunks.

    Raises, before anything changes, PlanError if the new plan has no optimizer states for a parameter that the present
    plan trains, DoesNotFit if the host cannot hold both plans' memory while values move.
    `host.renewing` stays set if an error ends the move itself: the values may then be incomplete in both places.
    """
    assert not host.cursor.inside
    trained = {t for tensors in host.plan.workload.gradients for t in tensors}
    if any(plan.modes[plan.layout.chunk_of[t]] == "frozen" for t in trained):
        raise PlanError("its iteration leaves out layers that the present plan trains, and would lose their states")
    arena = Arena(plan, host.backend)
    layout = host.plan.layout
    moving = sum(layout.payload_bytes(c.index, "param") + layout.states_bytes(c.index) for c in layout.chunks)
    check_host_memory(
        plan,
        arena.slabs.room,
        available_bytes=available_host_bytes(),
        gpu_is_host=host.backend.device.type == "cpu",
        model_bytes=-moving,  # needed besides: all values are first copied out of the old plan's chunks
    )
    with torch.no_grad():
        host.loop.drain()
        try:
            arena.allocate_slabs()
        except DoesNotFit:
            host.backend.begin(host.plan)
            if not host.held:
                host.queues.resume()
            raise
        host.held = True
        reader, old, contents, queues = host.reader, host.arena, host.contents, host.queues
        steps_taken = contents.steps_taken
        values = {t: reader.current_value(t) for t in host.timetable.chunk_of}
        states = {
            (s.tensor, name): reader.state_value(s.tensor, name)
            for c in layout.chunks
            for s in c.slots
            for name in plan.layout.state_lists
            if any(old.has(place, c.index, name) for place in (Place.GPU, Place.HOST))
        }
        host.renewing = True
        queues.stop()
        reader.set_open(False)
        for t, value in values.items():
            reader.parameters[t].__class__ = nn.Parameter
            reader.parameters[t].data = value
        old.empty()  # the accelerator may not have room for both plans
        host.install(plan, arena, queues.renew())
        load_parameters(host)
        for (t, name), value in states.items():
            reader.put_state(t, name, value)
        host.contents.steps_taken.update(steps_taken)
    del old, contents, queues, values, states
    host.backend.give_host_back()  # the former plan's slabs
    host.held = False
    host.start()
    host.renewing = False
