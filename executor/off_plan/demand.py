"""Demand: what the engine does when reality leaves the plan.

A parameter is fetched when somebody reads it and something else is dropped to make room: what the plan's uses need last
(Belady's rule on what is known). Nothing is overlapped, every update happens in `optimizer.step()`, results are those
of plain torch. At the step the places are brought back to the plan's cut and the next iteration is on plan again.

The same mode serves an evaluation between two iterations (`visiting`: nothing is counted, the places are put back as
they were) and a warm-up, which is a session whose plan has no steps.

Who reads what while the plan does not say so is `reads.py`'s matter.

[Note: interrupted] Ctrl-C may come between any two lines. Inside the engine's own work it leaves `AtWork.torn`, and
`zero_grad()` (or whatever comes first, where no gradient is lost by it) mends that. Before `optimizer.step()` has begun
to update, the iteration is dropped: its gradients go, values that they overwrote come back from the master copy, the
places go back to the cut. From then on (`Cursor.committed`) the step is carried to its end instead: a chunk that has a
gradient is not updated yet. What cannot be told (a chunk in the middle of its update, eager updates of half a backward)
ends the run with `Interrupted`. See [Note: between two lines] in memory/contents.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from executor.contract import (
    raw_grad,
    set_raw_grad,
)
from executor.hooks import Event
from executor.off_plan.ladder import Ladder
from executor.scaling import LossScaling
from executor.session.batches import Batches, movable
from executor.session.cursor import Answer
from executor.session.ending import Ending
from executor.session.following import Following
from executor.session.hosting import BytesHost, LoopHost
from executor.session.loop import Loop
from executor.session.reader import Reader
from executor.session.steps import Steps
from executor.session.updates import Updates
from pstar_sim.core.effects import OTHERS
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place, Queue
from pstar_sim.errors import ContractError, DoesNotFit, Interrupted, OutOfMemory, PlanError, PstarError
from pstar_sim.policy.registry import find_policy
from pstar_sim.workload.workload import Moment, Phase

if TYPE_CHECKING:
    from executor.memory.contents import Update

__all__ = ["Demand"]

log = logging.getLogger("executor")

GPU, HOST = Place.GPU, Place.HOST


class Host(BytesHost, LoopHost, Protocol):
    """What is asked of the session."""

    held: bool

    @property
    def batches(self) -> Batches: ...
    @property
    def deviation_log(self) -> deque[str]: ...
    @property
    def ending(self) -> Ending: ...
    @property
    def following(self) -> Following: ...
    @property
    def ladder(self) -> Ladder: ...
    @property
    def loop(self) -> Loop: ...
    @property
    def parameters(self) -> Sequence[nn.Parameter]: ...
    @property
    def reader(self) -> Reader: ...
    @property
    def renewing(self) -> bool: ...
    @property
    def replan_after(self) -> int: ...
    @property
    def scaling(self) -> LossScaling | None: ...
    @property
    def steps(self) -> Steps: ...
    @property
    def updates(self) -> Updates: ...

    def note_deviation(self, reason: str) -> None: ...

    def renew(self, plan: Plan) -> None: ...


class Demand:
    """The on-demand half of a session."""

    def __init__(self, session: Host) -> None:
        self.session = session
        self.in_a_row = 0
        self._stash: dict[int, torch.Tensor] = {}  # gradients of pinned chunks, kept on the host until the step
        self._frames: list[set[int]] = [set()]  # chunks used by each open module call
        self._recompute: set[int] = set()  # chunks whose views a recomputation holds
        self._backward_moment = False
        self._before_visit: frozenset[tuple[Place, int, str]] | None = None
        self._tide = _Tide(session.plan.workload.moments)
        self._owned: dict[str, set[int]] = {}  # module -> chunks of its own parameters
        self._prefix = False  # the current iteration began on plan
        self._position = 0
        self.moment = -1  # the plan's moment that what runs off plan looks like; -1: none

    # -- leaving the plan and coming back -----------------------------------------------------------------------------

    def on_event(self, event: Event, found: Answer, known_tide_bytes: int | None = None) -> None:
        """found: what comes of the event. known_tide_bytes: non-model bytes of the moment that begins, where they are
        measured; else the plan's for an event of that name."""
        s = self.session
        if found is Answer.VISIT:
            self.visit()
        elif found is Answer.LEAVE:
            self.leave(self._reason(event))
        if event.kind == "step":
            return
        s.reader.set_open(False)
        tide = self._tide if s.batches.moments is None else _Tide(s.batches.moments)
        if event.kind == "begin":
            if event.phase is Phase.RECOMPUTE and self._backward_moment:
                self._recompute = set()
                self._backward_moment = False
            if event.module == "" and event.phase is Phase.FWD:
                self._frames = [set()]
            self._frames.append(set())
        elif event.kind == "end":
            if len(self._frames) > 1:
                ended = self._frames.pop()
                if event.phase is Phase.RECOMPUTE:
                    self._recompute |= ended
        else:
            self._frames = [set()]
            self._backward_moment = True
            if event.kind == "backward-end":
                self._recompute = set()
        if known_tide_bytes is None:
            known_tide_bytes = tide.no_grad_bytes if s.cursor.visiting else tide.at(event.name, s.arena.tide_bytes)
        self._set_tide(known_tide_bytes + s.ladder.unforeseen_bytes)
        at = s.timetable.next_of_name(event.name, self._position)
        if at is not None:
            self._position = at
        self.moment = -1 if at is None else at
        if self._prefix and event.phase in (Phase.BWD, Phase.RECOMPUTE):
            self.ensure(s.timetable.read_in(event.name) | self._own_chunks(event.module))
            self.ensure(s.timetable.read_behind(event.name), required=False)

    def _reason(self, event: Event) -> str:
        s = self.session
        if s.now.outstanding:
            names = ", ".join(repr(s.reader.name_of(t)) for t in sorted(s.now.outstanding)[:3])
            return f"{event.name} came before the gradient of {names}"
        expected = (
            s.timetable.names[s.cursor.moment + 1] if s.cursor.moment + 1 < len(s.timetable.names) else "nothing more"
        )
        return (
            f"{event.name} came where the plan has {expected}" if event.name != expected else "a batch of another shape"
        )

    def _own_chunks(self, module: str) -> set[int]:
        """Chunks of the parameters that the module owns directly: what autograd saved of them is read by its backward,
        also where the plan knows no such moment."""
        if module not in self._owned:
            s = self.session
            own = s.clock.units[module].parameters(recurse=False) if module in s.clock.units else ()
            self._owned[module] = {
                s.timetable.chunk_of[t] for p in own if (t := getattr(p, "_tensor", -1)) in s.timetable.chunk_of
            }
        return self._owned[module]

    def _set_tide(self, size: int) -> None:
        """Make the gpu hold no more than leaves room for the tide, as far as it can be."""
        arena = self.session.arena
        free = arena.gpu_budget_bytes - arena.payload_bytes(GPU)
        if size > free:
            self._make_room(size - arena.tide_bytes, needed=set(), strict=False)
            free = arena.gpu_budget_bytes - arena.payload_bytes(GPU)
        arena.set_tide(min(size, max(free, 0)))

    def leave(self, reason: str) -> None:
        """From here on the iteration is carried on demand. On several ranks that cannot be: raises PlanError."""
        s = self.session
        if s.ranks is not None:
            raise s.ranks.cannot_leave(reason)
        if not s.timetable.on_demand_only:
            s.note_deviation(reason)
        s.queues.settle(s.iteration - 1)
        s.queues.pause()
        if s.cursor.moment < 0:
            s.following.begin_iteration()
        s.cursor.off_plan = True
        self._prefix = s.cursor.moment >= 0
        self._position = max(s.cursor.moment, 0)
        self.moment = s.cursor.moment
        s.following.forget_open_step()
        self._off_the_gpu()
        s.reader.set_open(False)
        # Whatever runs now was begun on plan: its chunks stay until the next event.
        self._frames = [set(s.timetable.reads[s.cursor.moment]) if s.cursor.moment >= 0 else set()]
        s.cursor.moment = max(s.cursor.moment, 0)

    def _off_the_gpu(self) -> None:
        with torch.no_grad():
            self._park_gradients()
            self._land_streams()

    def _park_gradients(self) -> None:
        """Take every gradient off the gpu's working and grad lists, so that parameters can be read again."""
        s = self.session
        contents, arena = s.contents, s.arena
        for c in s.plan.layout.chunks:
            state = contents.chunks[c.index]
            for list_name in ("param", "grad"):
                mine = state.where(GPU, list_name)
                had = bool(mine)
                if list_name == "param" and had and not self._stays(c.index):
                    state.current.discard(GPU)
                for t in sorted(mine):
                    state.adding = True  # the gradient is in two lists
                    self._to_host(t, contents.slot(GPU, t, list_name))
                    if list_name == "param" and self._stays(c.index):
                        contents.restore(GPU, t)
                    mine.discard(t)
                    state.adding = False
                if list_name == "param" and had:
                    s.reader.refresh(c.index)
                if (
                    list_name == "grad"
                    and arena.has(GPU, c.index, "grad")
                    and not self._initially(GPU, c.index, "grad")
                ):
                    contents.release(GPU, c.index, "grad")
            if arena.has(GPU, c.index, "param") and GPU not in state.current and not self._stays(c.index):
                contents.release(GPU, c.index, "param")

    def _land_streams(self) -> None:
        """Optimizer states that are on the gpu for one update only go home, updated or not."""
        s = self.session
        arena, contents = s.arena, s.contents
        for c in s.plan.layout.chunks:
            if s.plan.modes[c.index] != "stream":
                continue
            state = contents.chunks[c.index]
            for name in s.plan.layout.state_lists:
                if arena.has(GPU, c.index, name):
                    if name in state.ahead:
                        s.backend.copy(arena.host(c.index, name), arena.gpu(c.index, name), Queue.D2H)
                        s.backend.fence(Queue.D2H)
                    contents.release(GPU, c.index, name)
            state.ahead.clear()

    def _stays(self, chunk: int) -> bool:
        """The chunk's master copy is on the gpu: its working list can be rewritten there and needs no host."""
        return self.session.arena.has(GPU, chunk, "param32")

    def _initially(self, place: Place, chunk: int, list_name: str) -> bool:
        return (place, chunk, list_name) in self.session.timetable.cut

    def accept(self, tensor: int, gradient: torch.Tensor) -> None:
        """A gradient was accumulated: add it to what the tensor has."""
        s = self.session
        chunk = s.timetable.chunk_of[tensor]
        if tensor in s.updates.begun:
            raise ContractError(
                f"another gradient of {s.reader.name_of(tensor)!r} after its eager update: with AdamW(eager=True) a "
                "parameter has one backward an iteration; use eager=False"
            )
        if not s.plan.workload.tensors[tensor].frozen and s.plan.modes[chunk] == "frozen":
            raise PlanError(
                f"{s.reader.name_of(tensor)!r} gets a gradient, but the plan was made from a trace in which it never "
                "does, and has no optimizer states for it; trace the model again with batches that use it"
            )
        if s.arena.has(GPU, chunk, "grad32"):
            mine = s.contents.chunks[chunk].where(GPU, "grad32")
            s.contents.put_gradient(chunk, mine, tensor, s.contents.slot(GPU, tensor, "grad32"), gradient.reshape(-1))
            return
        self._to_host(tensor, gradient.reshape(-1))

    def _to_host(self, tensor: int, gradient: torch.Tensor) -> None:
        """Move (or add) a gradient to where it waits on the host for the step."""
        s = self.session
        arena, contents = s.arena, s.contents
        chunk = s.timetable.chunk_of[tensor]
        state = contents.chunks[chunk]
        copy = s.backend.copy
        if arena.has(HOST, chunk, "grad32"):
            list_name = "grad32"
        elif arena.has(HOST, chunk, "grad"):
            list_name = "grad"
        elif arena.has(HOST, chunk, "param") and arena.has(HOST, chunk, "param32"):
            list_name = "param"
        else:
            kept = self._stash.get(tensor)
            arrived = torch.empty(gradient.shape, dtype=gradient.dtype)
            copy(arrived, gradient, Queue.D2H)
            self._stash[tensor] = arrived if kept is None else kept + arrived
            return
        mine = state.where(HOST, list_name)
        target = contents.slot(HOST, tensor, list_name)
        if tensor in mine:
            arrived = torch.empty(gradient.shape, dtype=gradient.dtype)
            copy(arrived, gradient, Queue.D2H)
            contents.put_gradient(chunk, mine, tensor, target, arrived)
        else:
            mine.add(tensor)
            copy(target, gradient, Queue.D2H)

    def step(self) -> None:
        """Every update of the iteration, then back to the cut."""
        s = self.session
        self._collect_left_over()
        update = s.now.update or s.updates.new()
        s.now.update = update
        s.updates.decide_scaling(update)
        s.cursor.committed = s.iteration
        self._carry_out(update)

    def _carry_out(self, update: Update) -> None:
        s = self.session
        contents = s.contents
        self._unstash()
        chunks = [c for c in s.plan.layout.chunks if contents.chunks[c.index].with_gradient()]

        def norms() -> Iterable[torch.Tensor]:
            arrived = sorted(t for c in chunks for t in contents.chunks[c.index].with_gradient())
            return [contents.gradient_norm(t) for t in arrived]

        for c in chunks if not update.skip else ():
            contents.gather_gradients(c, self._home(c.index))
        if s.updates.max_grad_norm is not None and update.norm is None:
            update.coefficient(norms)
        for c in chunks:
            if not s.arena.has(self._home(c.index), c.index, "param"):
                if self._home(c.index) is GPU:
                    self._make_room(s.plan.layout.payload_bytes(c.index, "param"), needed={c.index})
                self._take(c.index, "param", needed={c.index})
                if not update.skip:
                    contents.gather_gradients(c, self._home(c.index))
            contents.adam(c.index, self._home(c.index), update, norms)
        self._back_to_cut()

    def _home(self, chunk: int) -> Place:
        """Where the chunk is updated: beside its states."""
        return GPU if self.session.arena.has(GPU, chunk, "param32") else HOST

    def _take(self, chunk: int, name: str, *, needed: set[int], place: Place | None = None) -> None:
        """Memory for a payload (at the chunk's home if no place is given). What the accelerator refuses is asked for
        again after the ladder gave something back. Raises DoesNotFit if it cannot."""
        arena = self.session.arena
        while not arena.has(where := place or self._home(chunk), chunk, name):
            try:
                arena.take(where, chunk, name)
            except OutOfMemory as error:
                self.session.ladder.give_back(error, needed=needed)

    def replan(self) -> None:
        """Called after each step off plan: a new plan if the last iterations all were, by the same policy, for what
        they did; the ladder's if memory ran out."""
        s = self.session
        if s.ladder.pending:
            s.ladder.replan()
            return
        self.in_a_row += 1
        if s.timetable.on_demand_only or not s.replan_after or self.in_a_row < s.replan_after:
            return
        self.in_a_row = 0
        try:
            policy = find_policy(s.plan.policy)
            s.renew(policy(s.batches.lasting(s.now.backwards), s.plan.machine, s.plan.settings))
        except PstarError as error:
            # Training goes on, on demand: slower, not wrong.
            log.warning("no new plan after %d iterations off plan: %s", s.replan_after, error)
            return
        log.info("new plan after %d iterations off plan", s.replan_after)
        s.deviation_log.append(f"iteration {s.iteration}: new plan, by policy {s.plan.policy}")

    def _collect_left_over(self) -> None:
        """Gradients that autograd still holds: fewer firings than the plan counted."""
        s = self.session
        for t in s.timetable.chunk_of:
            grad = raw_grad(s.parameters[t])
            if grad is not None and not s.plan.workload.tensors[t].frozen:
                if s.scaling is not None:
                    s.scaling.see(grad)
                self.accept(t, grad)
                set_raw_grad(s.parameters[t], None)

    def _unstash(self) -> None:
        """Gradients of pinned chunks go back to the gpu, into the working list: nobody reads it any more."""
        s = self.session
        for t, gradient in list(self._stash.items()):
            chunk = s.timetable.chunk_of[t]
            if not s.arena.has(self._home(chunk), chunk, "param"):
                self._take(chunk, "param", needed={chunk})
            place = self._home(chunk)
            mine = s.contents.chunks[chunk].where(place, "param")
            target = s.contents.slot(place, t, "param")
            mine.add(t)
            if place is GPU:
                s.backend.copy(target, gradient, Queue.H2D)
            else:
                target.copy_(gradient)
            del self._stash[t]

    def discard(self) -> None:
        """`zero_grad()` before `step()`: the gradients are dropped, the iteration begins anew."""
        s = self.session
        if not s.cursor.off_plan:
            s.queues.settle(s.iteration - 1)
            s.queues.pause()
            s.following.forget_open_step()
            s.cursor.off_plan = True
        self._start_over()

    def _start_over(self) -> None:
        s = self.session
        s.contents.forget_gradients()
        self._stash.clear()
        self._back_to_cut()
        s.clock.reset()
        if s.ladder.pending:
            s.ladder.replan()

    def mend(self) -> None:
        """After an interruption inside the engine's own work: see [Note: interrupted]. Raises what ends the run."""
        s = self.session
        self._refuse_to_mend()
        s.queues.settle(s.iteration - 1)
        s.queues.pause()
        self._refuse_half_an_update()
        s.following.forget_open_step()
        s.arena.mend()
        for c in s.plan.layout.chunks:
            state = s.contents.chunks[c.index]
            for place, name in list(state.hollow):
                if name == "param":
                    state.current.discard(place)
                if s.arena.has(place, c.index, name):
                    s.arena.free(place, c.index, name)
                state.hollow.discard((place, name))
            s.reader.refresh(c.index)
        s.cursor.visiting = False
        self._before_visit = None
        if s.cursor.committed != s.iteration:
            s.cursor.off_plan = True
            self._start_over()
        else:
            if not s.cursor.off_plan:
                s.cursor.off_plan = True
                self._off_the_gpu()
            assert s.now.update is not None
            self._carry_out(s.now.update)
            s.clock.reset()
            s.cursor.stepped = True

    def _refuse_to_mend(self) -> None:
        s = self.session
        if s.ranks is not None:
            raise s.ending.interrupt(
                f"rank {s.ranks.rank} was interrupted in iteration {s.iteration} and the other ranks have gone on; go "
                "on from the last checkpoint (--save-every, --resume)"
            )
        if s.renewing:
            raise s.ending.interrupt(
                f"iteration {s.iteration} was interrupted while values moved into the chunks of a new plan; go on from "
                "the last checkpoint"
            )

    def half_updated(self) -> Interrupted:
        """What to raise where a backward ended in the middle of its eager updates."""
        s = self.session
        return s.ending.interrupt(
            f"iteration {s.iteration} was interrupted when {len(s.updates.begun)} parameters had had their eager "
            "update and others had not; go on from the last checkpoint (AdamW(eager=False) updates nothing before "
            "optimizer.step())"
        )

    def _refuse_half_an_update(self) -> None:
        s = self.session
        committed = s.cursor.committed == s.iteration
        if s.updates.begun and not committed:
            raise self.half_updated()
        for c in s.plan.layout.chunks:
            state = s.contents.chunks[c.index]
            if state.updating or (committed and state.adding):
                names = ", ".join(repr(s.reader.name_of(t)) for t in s.timetable.tensors_of[c.index][:2])
                raise s.ending.interrupt(
                    f"optimizer.step() of iteration {s.iteration} was interrupted in the middle of the update of chunk "
                    f"{c.index} ({names}, ...): its values are neither those before nor those after; go on from the "
                    "last checkpoint"
                )

    def _back_to_cut(self) -> None:
        """Bring the places to the plan's cut and let the queues begin the next iteration."""
        s = self.session
        self._frames = [set()]
        self._recompute = set()
        s.arena.mark("after", len(s.timetable.names) - 1)
        s.arena.set_tide(0)
        s.reader.set_open(False)
        if not s.ladder.pending:
            try:
                self._reach(s.timetable.cut)
                s.arena.set_tide(s.timetable.cut_tide)
            except OutOfMemory as error:
                s.ladder.note(error, "a new plan is made from where everything is")
        s.cursor.off_plan = False
        s.queues.jump(s.iteration)
        s.following.next_iteration(on_plan=False)
        s.held = s.ladder.pending  # then everything stays where it is until there is a new plan
        if not s.held:
            s.queues.resume()

    def _reach(self, wanted: frozenset[tuple[Place, int, str]]) -> None:
        """Make exactly `wanted` resident. Values survive: what leaves its last place is copied first."""
        s = self.session
        arena, contents, layout = s.arena, s.contents, s.plan.layout
        present = {(r.place, r.chunk, r.list) for r in arena.present}
        wanted = frozenset(row for row in wanted if row[1] >= 0)
        # Host copies first, so that the gpu can let go.
        for place, chunk, name in sorted(wanted - present, key=lambda row: (row[0] is GPU, row[1], row[2])):
            if place is not HOST:
                continue
            self._take_and_fill(HOST, chunk, name)
        for place, chunk, name in sorted(present - wanted):
            if place is HOST and (GPU, chunk, name) in wanted and (GPU, chunk, name) not in present:
                continue  # the gpu gets it from here first
            contents.release(place, chunk, name)
        for place, chunk, name in sorted(wanted - present):
            if place is GPU:
                self._take_and_fill(GPU, chunk, name)
        for place, chunk, name in sorted(present - wanted):
            if arena.has(place, chunk, name):
                contents.release(place, chunk, name)
        for chunk in range(len(layout.chunks)):
            for place in (GPU, HOST):
                if arena.has(place, chunk, "param") and place not in contents.chunks[chunk].current:
                    self._fill(place, chunk, "param")
            if arena.has(GPU, chunk, "remote") and not contents.chunks[chunk].whole:
                self._fill(GPU, chunk, "remote")

    def _take_and_fill(self, place: Place, chunk: int, name: str) -> None:
        hollow = self.session.contents.chunks[chunk].hollow
        hollow.add((place, name))
        try:
            self.session.arena.take(place, chunk, name)
        except PstarError:
            hollow.discard((place, name))
            raise
        self._fill(place, chunk, name)
        hollow.discard((place, name))

    def _fill(self, place: Place, chunk: int, name: str) -> None:
        """Current content for a payload that just got its memory (or is out of date)."""
        s = self.session
        arena, contents = s.arena, s.contents
        state = contents.chunks[chunk]
        other = HOST if place is GPU else GPU
        target = arena.at(place, chunk, OTHERS.get(name, name))
        if name in ("grad", "grad32"):
            target.zero_()
            return
        if name == "remote":
            self.join(chunk)
            return
        direction = Queue.H2D if place is GPU else Queue.D2H
        if name != "param":
            if not arena.has(other, chunk, name):
                raise PlanError(f"{name} of chunk {chunk} is lost: neither place holds it")
            s.backend.copy(target, arena.at(other, chunk, name), direction)
            return
        if other in state.current and not state.where(other, "param"):
            s.backend.copy(target, arena.at(other, chunk, "param"), direction)
        elif arena.has(place, chunk, "param32"):
            target.copy_(arena.at(place, chunk, "param32"))
        elif arena.has(other, chunk, "param32"):
            s.backend.copy(target, arena.at(other, chunk, "param32"), direction)
        else:
            raise PlanError(f"the parameters of chunk {chunk} are lost: neither place holds them")
        state.current.add(place)
        s.reader.refresh(chunk)

    # -- evaluation between iterations --------------------------------------------------------------------------------

    def visit(self) -> None:
        """An evaluation begins between two iterations: let the updates end, hold the queues."""
        s = self.session
        if s.cursor.visiting:
            return
        s.loop.drain()
        self._before_visit = frozenset((r.place, r.chunk, r.list) for r in s.arena.present)
        s.cursor.visiting = True
        if s.ranks is not None:
            # How far each rank's copies have run ahead is its own; from the same places on they ask for the same.
            s.arena.set_tide(0)
            with torch.no_grad():
                self._reach(s.timetable.cut)
            s.arena.set_tide(s.timetable.cut_tide)
        self._frames = [set()]
        s.reader.set_open(False)

    def end_visit(self) -> None:
        """Training goes on: put the places back as they were."""
        s = self.session
        assert self._before_visit is not None
        self._frames = [set()]
        s.arena.set_tide(0)
        if not s.ladder.pending:
            try:
                with torch.no_grad():
                    self._reach(self._before_visit)
                s.arena.set_tide(s.timetable.cut_tide)
            except OutOfMemory as error:
                if s.ranks is not None:
                    raise s.ladder.ends_ranks(error) from error
                s.ladder.note(error, "a new plan is made from where everything is")
        s.steps.moved.others(s.iteration, s.backend.copied_bytes)
        s.cursor.visiting = False
        self._before_visit = None
        if s.ladder.pending:
            s.ladder.replan()
        else:
            s.queues.resume()

    # -- room ---------------------------------------------------------------------------------------------------------

    def _make_room(self, size: int, *, needed: set[int], strict: bool = True) -> None:
        """Drop working lists, the one used last first, until `size` bytes are free. Raises DoesNotFit if they cannot
        be."""
        s = self.session
        arena = s.arena
        if arena.room_on_gpu() >= size:
            return
        for chunk in self._victims(needed):
            self._drop(chunk)
            if arena.room_on_gpu() >= size:
                return
        # The tide known here is that of the plan's moments; give up of it what is only an estimate.
        short = size - arena.room_on_gpu()
        if strict and s.ladder.pending:
            short -= self.states_to_host(short, needed=needed)[1]
            if short <= 0:
                return
        if short <= arena.tide_bytes and not s.batches.moments:
            arena.set_tide(arena.tide_bytes - short)
        elif strict:
            raise DoesNotFit(
                policy=s.plan.policy,
                place="gpu",
                needed_bytes=arena.gpu_budget_bytes + short,
                available_bytes=arena.gpu_budget_bytes,
                what="what one module reads at once, off plan",
            )

    def _victims(self, needed: set[int]) -> list[int]:
        """Chunks whose working list may leave the gpu now, the one used last first."""
        s = self.session
        protected = set().union(*self._frames) | self._recompute | needed
        victims = [
            c.index
            for c in s.plan.layout.chunks
            if s.arena.has(GPU, c.index, "param")
            and c.index not in protected
            and (movable(s.arena, c.index) or s.arena.has(GPU, c.index, "remote"))
            and not s.contents.chunks[c.index].where(GPU, "param")
        ]
        return sorted(victims, key=lambda chunk: (-s.timetable.until_use(chunk, self._position), chunk))

    def _drop(self, chunk: int) -> None:
        """The working list of a chunk leaves the gpu, or of one that cannot the other ranks' slices."""
        contents = self.session.contents
        if self.session.arena.has(GPU, chunk, "remote"):
            contents.release(GPU, chunk, "remote")
        if movable(self.session.arena, chunk):
            contents.release(GPU, chunk, "param")

    def give_back(self, size: int, *, needed: set[int]) -> tuple[list[int], int]:
        """Drop working lists that nobody uses now until the gpu holds `size` bytes less, if there are so many; (chunks
        dropped, bytes)."""
        dropped: list[int] = []
        freed = 0
        for chunk in self._victims(needed):
            if freed >= size:
                break
            self.session.contents.release(GPU, chunk, "param")
            dropped.append(chunk)
            freed += self.session.plan.layout.payload_bytes(chunk, "param")
        return dropped, freed

    def states_to_host(self, size: int, *, needed: set[int]) -> tuple[list[int], int]:
        """Move the optimizer states of pinned chunks to the host until the gpu holds `size` bytes less, as far as the
        host has room; (chunks moved, bytes). Their update of this iteration runs there."""
        s = self.session
        arena, layout = s.arena, s.plan.layout
        moved: list[int] = []
        freed = 0
        pinned = [c.index for c in layout.chunks if arena.has(GPU, c.index, "param32")]
        for chunk in sorted(pinned, key=lambda c: (-layout.payload_bytes(c, "param32"), c)):
            if freed >= size:
                break
            lists = [n for n in (*layout.state_lists, "grad32") if arena.has(GPU, chunk, n)]
            room = s.plan.host_budget_bytes - arena.payload_bytes(HOST)
            if sum(layout.payload_bytes(chunk, n) for n in ("param", *lists)) > room:
                continue
            with torch.no_grad():
                freed += self._move_states(chunk, lists)
            moved.append(chunk)
            if chunk in self._victims(needed):
                s.contents.release(GPU, chunk, "param")
                freed += layout.payload_bytes(chunk, "param")
        return moved, freed

    def _move_states(self, chunk: int, lists: Sequence[str]) -> int:
        s = self.session
        arena, contents = s.arena, s.contents
        freed = 0
        state = contents.chunks[chunk]
        for name in lists:
            state.hollow.add((HOST, name))
            arena.take(HOST, chunk, name)
            s.backend.copy(arena.host(chunk, name), arena.gpu(chunk, name), Queue.D2H)
            s.backend.fence(Queue.D2H)
            state.adding = True  # gradients are in two lists
            state.where(HOST, name).update(state.where(GPU, name))
            state.where(GPU, name).clear()
            state.adding = False
            state.hollow.discard((HOST, name))
        if not arena.has(HOST, chunk, "param"):
            self._take_and_fill(HOST, chunk, "param")
        for name in lists:
            contents.release(GPU, chunk, name)
            freed += s.plan.layout.payload_bytes(chunk, name)
        for t in [slot.tensor for slot in s.plan.layout.chunks[chunk].slots]:
            for name in ("param", "grad"):
                mine = state.where(GPU, name)
                if t in mine:
                    state.adding = True  # the gradient is in two lists
                    self._to_host(t, contents.slot(GPU, t, name))
                    if name == "param":
                        contents.restore(GPU, t)
                    mine.discard(t)
                    state.adding = False
            if t in self._stash:
                state.adding = True
                self._to_host(t, self._stash.pop(t))
                state.adding = False
        s.reader.refresh(chunk)
        return freed

    def ensure(self, chunks: Iterable[int], *, required: bool = True) -> None:
        """Make the working lists of `chunks` readable on the gpu; those not `required` only if there is room."""
        s = self.session
        wanted = set(chunks)
        for chunk in sorted(wanted):
            if self.held(chunk):
                continue
            if not s.arena.has(GPU, chunk, "param"):
                size = s.plan.layout.payload_bytes(chunk, "param")
                self._make_room(size, needed=wanted, strict=required)
                if not required and s.arena.room_on_gpu() < size:
                    continue
                self._take(chunk, "param", needed=wanted, place=GPU)
            with torch.no_grad():
                if GPU not in s.contents.chunks[chunk].current:
                    self._fill(GPU, chunk, "param")
                if s.arena.sliced:
                    self._gather(chunk, wanted)
        self._frames[-1] |= wanted

    def held(self, chunk: int) -> bool:
        """The working list may be read on the gpu."""
        s = self.session
        state = s.contents.chunks[chunk]
        return s.contents.holds(chunk) and not state.where(GPU, "param")

    def _gather(self, chunk: int, wanted: set[int]) -> None:
        """The other ranks' slices come."""
        s = self.session
        if not s.arena.has(GPU, chunk, "remote"):
            self._make_room(s.plan.layout.payload_bytes(chunk, "remote"), needed=wanted)
            self._take(chunk, "remote", needed=wanted, place=GPU)
        self.join(chunk)

    def join(self, chunk: int) -> None:
        """As `_gather`, where there is room already. See [Note: evaluations that differ] in distributed/ranks.py."""
        s = self.session
        slices = None if s.ranks is None else s.ranks.slices_of(chunk)
        if slices is None:
            s.contents.gather(chunk, "remote")
        else:
            s.contents.put_together(chunk, slices)


class _Tide:
    """Peaks of moments by the event that opens them."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        self._by_name: dict[str, int] = {}
        for m in moments:
            self._by_name[m.name] = max(self._by_name.get(m.name, 0), m.peak_bytes)
        forward = [m for m in moments if m.phase is Phase.FWD] or list(moments)
        # Without gradients nothing is kept: what one moment adds, twice (input and output of the next one).
        self.no_grad_bytes = forward[0].start_bytes + 2 * max(m.peak_bytes - m.start_bytes for m in forward)

    def at(self, name: str, otherwise: int) -> int:
        return self._by_name.get(name, otherwise)
