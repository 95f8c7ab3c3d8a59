"""A session continues when the accelerator refuses memory that the plan counted on.

The iteration ends on demand (`demand.py`): unused working lists leave, then optimizer states of pinned chunks, and the
memory is requested again. After the optimizer step the first rung that fits makes the next plan: [Note: rungs] in
rungs.py. Nothing is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import overload

import torch
from torch import nn

from executor.devices.backend import VirtualBackend
from executor.memory.arena import check_gpu_memory
from executor.moments.hooks import ModuleEvent, MomentClock
from executor.moments.unseen import unseen
from executor.off_plan.guard import Guard
from executor.off_plan.plan_run import WholeState
from executor.off_plan.rungs import RUNGS, Rung, asked_bytes, spec_of_rung, tide_of, with_gpu_budget
from executor.off_plan.shortage import Shortage
from executor.queues.interface import without_locals
from executor.session.reader import Reader
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place
from pstar_sim.errors import DiskError, DoesNotFit, OutOfMemory
from pstar_sim.policy.registry import plan_to_run
from pstar_sim.python310 import add_note
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Phase, Workload

log = logging.getLogger("executor")


class Ladder(Sequence[Rung]):
    """The rungs climbed by now, oldest first.

    guard: None as long as operators are not watched.
    level: index into RUNGS of the rung that made the plan, -1 for the plan that was given.
    """

    def __init__(
        self,
        state: WholeState,
        shortage: Shortage,
        reader: Reader,
        clock: MomentClock,
        renew: Callable[[Plan], None],
        at_end: list[Callable[[], object]],
    ) -> None:
        self.state = state
        self.cursor = state.cursor
        self.shortage = shortage
        self.standstill = shortage.standstill
        self.reader = reader
        self.clock = clock
        self.guard: Guard | None = None
        self.level = -1
        self._renew = renew
        self._at_end = at_end
        self._made: Plan | None = None  # the latest plan of the ladder
        self._known: tuple[int, tuple[int, ...]] | None = None  # (budget, tide) of the latest plan

    @overload
    def __getitem__(self, index: int) -> Rung: ...
    @overload
    def __getitem__(self, index: slice) -> list[Rung]: ...
    def __getitem__(self, index: int | slice) -> Rung | list[Rung]:
        return self.shortage.rungs[index]

    def __len__(self) -> int:
        return len(self.shortage.rungs)

    def __iter__(self) -> Iterator[Rung]:
        return iter(self.shortage.rungs)

    # -- inside an iteration ------------------------------------------------------------------------------------------

    def watch(self, model: nn.Module, *, always: bool) -> None:
        """Watch every operator, if the accelerator is virtual and has a memory limit, or if `always`."""
        backend, state = self.state.run.backend, self.state
        limited = isinstance(backend, VirtualBackend) and backend.gpu_bytes is not None
        if self.guard is None and (limited or always):
            self.guard = Guard(
                model, state, self.clock, self.shortage, make_room=self.room_for_operator, give_up=self.give_up
            )
            self.guard.begin()
            state.listeners.append(self.guard)
            self._at_end.append(self.guard.end)

    def on_event(self, event: ModuleEvent) -> bool:
        """React, before an event, to memory that ran out. Returns whether the loop's state has changed."""
        state, cursor, shortage = self.state, self.cursor, self.shortage
        dropped = shortage.given_up and event.kind == "begin" and event.phase is Phase.FWD
        if dropped:
            with torch.no_grad():
                self.discard()
        for listener in state.listeners:
            listener.see_event(-1 if cursor.visiting else state.moment)
        if cursor.visiting:
            return dropped
        if state.run.queues.short is not None and not cursor.off_plan:
            self.climb(state.run.queues.short)
        elif shortage.pending and not cursor.inside:
            self.replan()
        else:
            return dropped
        return True

    def discard(self) -> None:
        self.state.run.demand.discard()
        if self.shortage.pending:
            self.replan()

    def climb(self, error: OutOfMemory) -> None:
        """Continue after a step was refused memory: on demand or, between two iterations, under a new plan."""
        cursor = self.cursor
        if self.state.ranks is not None:
            raise self.shortage.ends_ranks(error) from error
        if cursor.moment < 0 and not cursor.off_plan:
            self.shortage.note(error, "a new plan is made at once")
            self.replan()
            return
        self.shortage.note(error, "the iteration continues without the plan, each chunk fetched when it is read")
        if not cursor.off_plan:
            self._leave(error)

    def _leave(self, error: OutOfMemory) -> None:
        self.state.run.demand.leave(f"out of memory: {error.what} in moment {self.cursor.moment}")

    def recover(self, error: OutOfMemory | torch.OutOfMemoryError) -> None:
        """Recover from a refusal of memory whose error reached the loop (a CUDA allocation inside an operator; on a
        virtual accelerator the guard handles it). The iteration's gradients are dropped, the next plan is for less
        memory, and the loop runs the micro-batches again. Operators are watched from then on. Raises the error where
        eager updates of this iteration have been made, and PlanError on several ranks."""
        state, shortage, arena = self.state, self.shortage, self.state.run.arena
        backend = arena.backend
        if self.reader.updates.begun and state.ranks is None:
            add_note(error, "it cannot be run again: AdamW(eager=True) has updated parameters inside its backward")
            raise error
        refused, in_fragments, watched = error, False, self.guard is not None
        if not isinstance(error, OutOfMemory):
            error = OutOfMemory(
                what="an operator",
                asked_bytes=asked_bytes(str(error)),
                payload_bytes=arena.payload_bytes(Place.GPU),
                other_bytes=arena.tide_bytes,
                limit_bytes=backend.available_gpu_bytes(),
            )
            in_fragments = self._in_fragments(error)
        if state.ranks is not None:
            raise shortage.ends_ranks(error) from refused
        self.watch(self.clock.units[""], always=True)
        if in_fragments and not watched:  # [Note: refused beside a pool] in cuda_blocks.py
            shortage.log(
                error, "the iteration is given up, to be run again under the same plan: as many bytes were idle"
            )
        else:
            shortage.note(error, "the iteration is given up, to be run again", in_fragments=in_fragments)
        with state.at_work, unseen(), torch.no_grad():
            if state.cursor.moment >= 0 or state.cursor.off_plan:
                self.discard()
            elif shortage.pending:
                self.replan()
        backend.give_back()
        self.reader.consumed.clear()
        state.now.arrived.clear()

    def give_back(self, error: OutOfMemory, needed: set[int]) -> None:
        """Make room for a chunk off plan. Raises DoesNotFit without success."""
        if short_bytes := self._make_room(error, needed):
            raise self.give_up(error, short_bytes)

    def room_for_operator(self, error: OutOfMemory, alive_bytes: int) -> int:
        """Returns the bytes still missing.

        alive_bytes: as in `Shortage.note`.
        """
        return self._make_room(error, set(), alive_bytes)

    def _make_room(self, error: OutOfMemory, needed: set[int], alive_bytes: int | None = None) -> int:
        cursor, run = self.cursor, self.state.run
        if self.state.ranks is not None:
            raise self.shortage.ends_ranks(error) from error
        in_fragments = self._in_fragments(error)  # before chunks leave
        short = error.asked_bytes
        if error.limit_bytes is not None:
            short = error.payload_bytes + error.other_bytes + error.asked_bytes - error.limit_bytes
        if cursor.moment >= 0 and not cursor.off_plan:
            self._leave(error)
        room = run.demand.room
        dropped, freed = room.give_back(short, needed=needed)
        words = [f"gave back {format_bytes(freed)} ({len(dropped)} chunks) "] if dropped else []
        if freed < short:
            moved, more = room.unpin(short - freed, needed=needed)
            freed += more
            if moved:
                words.append(f"moved the optimizer states of {len(moved)} chunks to the host ({format_bytes(more)}) ")
        run.arena.flush()
        self.shortage.note(
            error, "and ".join(words).strip() or "nothing is left to give back", alive_bytes, in_fragments=in_fragments
        )
        return max(0, short - freed)

    def give_up(self, error: OutOfMemory, short_bytes: int) -> DoesNotFit:
        """Returns the error to raise."""
        self.shortage.given_up = True
        self.clock.reset()  # the running forward ends with the error
        return self._does_not_fit(error, short_bytes)

    def _in_fragments(self, error: OutOfMemory) -> bool:
        """As many bytes as requested are reserved and unused."""
        return 0 < error.asked_bytes <= self.state.run.backend.idle_bytes()

    def _does_not_fit(self, error: OutOfMemory, short: int) -> DoesNotFit:
        state, limit = self.state, error.limit_bytes
        if limit is None:
            limit = error.payload_bytes + error.other_bytes
        eager = "; eager updates of this iteration that were made already stay" if self.reader.updates.begun else ""
        return DoesNotFit(
            policy=f"{state.run.plan.policy} in iteration {state.iteration}",
            place="gpu",
            needed_bytes=limit + short,
            available_bytes=limit,
            what=f"{error.what} of {format_bytes(error.asked_bytes)} beside {format_bytes(error.other_bytes)} of other "
            f"data and chunks that are in use; parameters are those after step {state.iteration - 1}{eager}; use a "
            "smaller batch or checkpointing",
        )

    # -- between two iterations ---------------------------------------------------------------------------------------

    def replan(self) -> None:
        """Make the next plan, by the first rung that fits. Raises DoesNotFit if none does: the session then stands
        between two iterations with the values of the last whole one."""
        state, plan = self.state, self.state.run.plan
        assert not self.cursor.inside and not self.cursor.visiting
        self.shortage.given_up = False
        if not state.held:
            self.standstill.drain()
            state.held = True
        if plan is not self._made:  # another part has made a plan since
            self.level, self._known = -1, None
        workload, budget = self._workload(), self._available()
        first = max(self.level, 0) if (budget, tide_of(workload)) != self._known else self.level + 1
        tried: dict[str, DoesNotFit | DiskError] = {}
        for level in range(first, len(RUNGS)):
            spec = spec_of_rung(plan.policy, level)
            if spec in tried:
                continue
            error = self._try_rung(level, spec, workload, budget)
            if error is None:
                return
            log.warning("rung %r (%s): %s", RUNGS[level], spec, error)
            tried[spec] = error
        last = list(tried.values())[-1] if tried else None
        if self.shortage.in_fragments:
            last = self._keep_plan()
            if last is None:
                return
        self.clock.reset()  # the forward that was about to begin does not run
        raise self._no_rung_fits(list(tried), last, budget) from last

    def _try_rung(self, level: int, spec: str, workload: Workload, budget: int) -> DoesNotFit | DiskError | None:
        state, run, shortage = self.state, self.state.run, self.shortage
        try:
            plan = plan_to_run(spec, workload, with_gpu_budget(run.plan.machine, budget), run.plan.settings)
            check_gpu_memory(plan, run.backend, plan.gpu_budget_bytes)
            self._renew(plan)
        except (DoesNotFit, DiskError) as error:
            without_locals(error)
            return error
        self.level, self._known, self._made, shortage.pending = level, (budget, tide_of(workload)), plan, False
        shortage.unforeseen_bytes = 0
        done = (
            f"new plan by {spec} (rung {RUNGS[level]!r}) for {format_bytes(budget)} and a tide of at most "
            f"{format_bytes(workload.peak_non_model_bytes)}"
        )
        shortage.rungs.append(replace(shortage.rungs[-1], done=done))
        log.warning("iteration %d: %s", state.iteration, done)
        state.note(done)
        return None

    def _keep_plan(self) -> DoesNotFit | DiskError | None:
        """The bytes are there: a refused operator is given what is idle."""
        try:
            self._renew(self.state.run.plan)
        except (DoesNotFit, DiskError) as error:
            without_locals(error)
            return error
        self.shortage.pending = False
        log.warning(
            "iteration %d: the plan stays: no smaller plan fits; its bytes are there, in fragments",
            self.state.iteration,
        )
        return None

    def _no_rung_fits(self, tried: Sequence[str], last: DoesNotFit | DiskError | None, budget: int) -> DoesNotFit:
        refused = self.shortage.error
        assert refused is not None
        fit = last if isinstance(last, DoesNotFit) else None
        why = fit.what if fit else f"{last}; the former plan stays" if last else ""
        return DoesNotFit(
            policy=f"no rung of the ladder ({', '.join(tried) or self.state.run.plan.policy})",
            place=fit.place if fit else "gpu",
            needed_bytes=fit.needed_bytes if fit else budget + refused.asked_bytes,
            available_bytes=fit.available_bytes if fit else budget,
            what=(f"{why}; " if why else "")
            + f"after {refused}; all parameters are those after step {self.state.iteration - 1}",
        )

    def _available(self) -> int:
        """At most the present budget and the accelerator's bytes. Where that is enough and the tide is not counted,
        fragments or a higher tide took it: less a sixteenth where the requested bytes were idle, else less an eighth,
        or those bytes if more."""
        budget, error = self.state.run.plan.gpu_budget_bytes, self.shortage.error
        limit = self.state.run.backend.available_gpu_bytes()
        if limit is not None and (limit < budget or (self.guard is not None and self.guard.counts)):
            return min(budget, limit)
        if self.shortage.in_fragments:
            return budget - budget // 16
        asked = error.asked_bytes if error is not None else 0
        return max(0, budget - max(asked, budget // 8))

    def _workload(self) -> Workload:
        w, measured = self.state.run.plan.workload, {} if self.guard is None else self.guard.measured
        moments = tuple(
            replace(m, peak_bytes=measured[i]) if measured.get(i, 0) > m.peak_bytes else m
            for i, m in enumerate(w.moments)
        )
        return w if moments == w.moments else replace(w, moments=moments)
