"""Ladder: lets a session continue when the accelerator refuses memory that the plan counted on.

The running iteration is carried to its end on demand (`demand.py`): unused working lists leave the accelerator, then
optimizer states of pinned chunks, and the refused memory is requested again. After the optimizer step the next plan is
made by the first rung that fits the existing memory: [Note: rungs] in rungs.py. Nothing is computed twice and nothing
is lost: the updates of that iteration are those of plain torch, as of any iteration off plan.

[Note: what is measured] A virtual accelerator with a limit counts every live byte (`guard.py`), so the tide of each
moment is known. Elsewhere only the refusal is known: then the budget shrinks to the bytes held at the refusal.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, overload

import torch

from executor.memory.arena import check_gpu_memory
from executor.moments.hooks import ModuleEvent
from executor.moments.unseen import unseen
from executor.off_plan.guard import Guard
from executor.off_plan.rungs import RUNGS, Rung, asked_bytes, spec_of_rung, tide_of, with_gpu_budget
from executor.queues.interface import Health, without_locals
from executor.session.hosting import BytesHost, LoopHost
from executor.session.loop import Loop
from executor.session.reader import Reader
from executor.session.updates import Updates
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place
from pstar_sim.errors import DoesNotFit, OutOfMemory, PlanError
from pstar_sim.policy.registry import find_policy
from pstar_sim.python310 import add_note
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Phase, Workload

__all__ = ["Ladder"]

log = logging.getLogger("executor")


class OnDemand(Protocol):
    """The part of `demand.Demand` that this file uses."""

    @property
    def moment(self) -> int: ...

    def discard(self) -> None: ...

    def leave(self, reason: str) -> None: ...

    def give_back(self, size: int, *, needed: set[int]) -> tuple[list[int], int]: ...

    def states_to_host(self, size: int, *, needed: set[int]) -> tuple[list[int], int]: ...


class Host(BytesHost, LoopHost, Protocol):
    """The part of the session that this file uses."""

    held: bool

    @property
    def queues(self) -> Health: ...
    @property
    def reader(self) -> Reader: ...
    @property
    def updates(self) -> Updates: ...
    @property
    def loop(self) -> Loop: ...
    @property
    def demand(self) -> OnDemand: ...
    @property
    def guard(self) -> Guard | None: ...
    @property
    def deviation_log(self) -> deque[str]: ...

    def guard_memory(self, *, always: bool = False) -> None: ...

    def renew(self, plan: Plan) -> None: ...


class Ladder(Sequence[Rung]):
    """The rungs climbed by now, oldest first.

    pending: whether memory ran out and there is no new plan yet.
    level: index into RUNGS of the rung that made the plan, -1 for the plan that was given.
    measured: moment -> non-model bytes seen in it, where they are counted.
    unforeseen_bytes: bytes by which the measured tide exceeded the plan's where memory ran out.
    """

    def __init__(self, session: Host) -> None:
        self.session = session
        self.pending = False
        self.given_up = False  # the running iteration cannot be made to fit
        self.level = -1
        self.measured: dict[int, int] = {}
        self.unforeseen_bytes = 0
        self._rungs: list[Rung] = []
        self._error: OutOfMemory | None = None
        self._was_in_fragments = False  # what it requested: as many bytes were idle
        self._made: Plan | None = None  # the latest plan of the ladder
        self._known: tuple[int, tuple[int, ...]] | None = None  # (budget, tide) of the latest plan

    @overload
    def __getitem__(self, index: int) -> Rung: ...
    @overload
    def __getitem__(self, index: slice) -> list[Rung]: ...
    def __getitem__(self, index: int | slice) -> Rung | list[Rung]:
        return self._rungs[index]

    def __len__(self) -> int:
        return len(self._rungs)

    def __iter__(self) -> Iterator[Rung]:
        return iter(self._rungs)

    # -- inside an iteration ------------------------------------------------------------------------------------------

    def on_event(self, event: ModuleEvent) -> bool:
        """Note the bytes measured since the last event, and a queue that is short of memory. Called before each event.
        Returns whether this has changed the loop's state."""
        s = self.session
        dropped = self.given_up and event.kind == "begin" and event.phase is Phase.FWD
        if dropped:
            with torch.no_grad():
                s.demand.discard()
        if s.guard is not None:
            peak = s.guard.closes_moment()
            moment = s.demand.moment if s.cursor.off_plan else s.cursor.moment
            if moment >= 0 and not s.cursor.visiting:
                self.measured[moment] = max(self.measured.get(moment, 0), peak)
        if s.cursor.visiting:
            return dropped
        if s.queues.short is not None and not s.cursor.off_plan:
            self.climb(s.queues.short)
        elif self.pending and not s.cursor.inside:
            self.replan()
        else:
            return dropped
        return True

    def note(
        self, error: OutOfMemory, done: str, alive_bytes: int | None = None, *, in_fragments: bool = False
    ) -> None:
        """Note that memory ran out; a new plan is due.

        alive_bytes: non-model bytes that are needed, if they are known.
        in_fragments: whether as many bytes as were requested were idle.
        """
        self.pending = True
        without_locals(error)
        self._error, self._was_in_fragments = error, in_fragments
        moment = self._log(error, done)
        if in_fragments and error.limit_bytes is None:  # the accelerator has the bytes that the plan counts on
            self._pause()
        else:
            self._shrink(error, error.other_bytes if alive_bytes is None else alive_bytes, moment)

    def _pause(self) -> None:
        """Let the plan's steps end: a step that begins now would count on the plan's budget."""
        if not self.session.cursor.off_plan:
            self.session.loop.drain()

    def _log(self, error: OutOfMemory, done: str) -> int:
        """Log one more rung, and the moment in which it was climbed. Returns the moment."""
        s = self.session
        moment = s.demand.moment if s.cursor.off_plan else s.cursor.moment
        name = s.timetable.names[moment] if moment >= 0 else ""
        rung = Rung(
            s.iteration, moment, name, error.what, error.asked_bytes, error.payload_bytes, error.other_bytes,
            error.limit_bytes, done,
        )  # fmt: skip
        self._rungs.append(rung)
        log.warning("%s", rung)
        return moment

    def _shrink(self, error: OutOfMemory, alive_bytes: int, moment: int) -> None:
        """Limit the bytes that the arena may hold for the rest of the iteration."""
        s = self.session
        self._pause()
        arena = s.arena
        foreseen = s.plan.workload.moments[moment].peak_bytes if moment >= 0 else arena.tide_bytes
        budget = error.payload_bytes + foreseen
        if error.limit_bytes is not None:
            budget = error.limit_bytes
            self.unforeseen_bytes = max(self.unforeseen_bytes, alive_bytes - foreseen)
        arena.gpu_budget_bytes = min(arena.gpu_budget_bytes, budget)

    def climb(self, error: OutOfMemory) -> None:
        """Continue after a step of the plan was refused memory: the iteration continues on demand; between two
        iterations a new plan is made at once."""
        s = self.session
        if s.ranks is not None:
            raise self.ends_ranks(error) from error
        if s.cursor.moment < 0 and not s.cursor.off_plan:
            self.note(error, "a new plan is made at once")
            self.replan()
            return
        self.note(error, "the iteration continues without the plan, each chunk fetched when it is read")
        if not s.cursor.off_plan:
            s.demand.leave(f"out of memory: {error.what} in moment {s.cursor.moment}")

    def recover(self, error: OutOfMemory | torch.OutOfMemoryError) -> None:
        """Recover from a refusal of memory inside the loop's own forward or backward, whose error reached the loop (a
        CUDA allocation inside an operator; on a virtual accelerator the guard handles it). Call this from the loop. The
        iteration's gradients are dropped, and none of them has updated anything. The next plan is made for less memory,
        and the loop runs the iteration's micro-batches again, as `executor.training.train_step` does. Operators are
        watched from then on. Raises the error itself where eager updates of this iteration have been made, and
        PlanError on several ranks, which wait for each other."""
        s = self.session
        if s.updates.begun and s.ranks is None:
            add_note(error, "it cannot be run again: AdamW(eager=True) has updated parameters inside its backward")
            raise error
        refused, in_fragments, watched = error, False, s.guard is not None
        if not isinstance(error, OutOfMemory):
            error = OutOfMemory(
                what="an operator",
                asked_bytes=asked_bytes(str(error)),
                payload_bytes=s.arena.payload_bytes(Place.GPU),
                other_bytes=s.arena.tide_bytes,
                limit_bytes=s.backend.available_gpu_bytes(),
            )
            in_fragments = self._in_fragments(error)
        if s.ranks is not None:
            raise self.ends_ranks(error) from refused
        s.guard_memory(always=True)
        if in_fragments and not watched:  # [Note: refused beside a pool] in cuda_blocks.py
            self._log(error, "the iteration is given up, to be run again under the same plan: as many bytes were idle")
        else:
            self.note(error, "the iteration is given up, to be run again", in_fragments=in_fragments)
        with s.at_work, unseen(), torch.no_grad():
            if s.cursor.moment >= 0 or s.cursor.off_plan:
                s.demand.discard()
            elif self.pending:
                self.replan()
        s.backend.give_back()
        s.reader.consumed.clear()
        s.now.arrived.clear()

    def give_back(self, error: OutOfMemory, *, needed: set[int]) -> None:
        """Make room for a chunk off plan that was refused memory. Raises DoesNotFit if that is not possible."""
        if short_bytes := self.make_room(error, needed=needed):
            raise self.give_up(error, short_bytes)

    def make_room(self, error: OutOfMemory, *, needed: set[int], alive_bytes: int | None = None) -> int:
        """Give back chunks, then optimizer states, for memory that was refused. Returns the bytes that are still
        missing.

        alive_bytes: as in `note`.
        """
        s = self.session
        if s.ranks is not None:
            raise self.ends_ranks(error) from error
        in_fragments = self._in_fragments(error)  # before chunks leave
        short = error.asked_bytes
        if error.limit_bytes is not None:
            short = error.payload_bytes + error.other_bytes + error.asked_bytes - error.limit_bytes
        if s.cursor.moment >= 0 and not s.cursor.off_plan:
            s.demand.leave(f"out of memory: {error.what} in moment {s.cursor.moment}")
        dropped, freed = s.demand.give_back(short, needed=needed)
        words = [f"gave back {format_bytes(freed)} ({len(dropped)} chunks) "] if dropped else []
        if freed < short:
            moved, more = s.demand.states_to_host(short - freed, needed=needed)
            freed += more
            if moved:
                words.append(f"moved the optimizer states of {len(moved)} chunks to the host ({format_bytes(more)}) ")
        s.arena.flush()
        self.note(
            error, "and ".join(words).strip() or "nothing is left to give back", alive_bytes, in_fragments=in_fragments
        )
        return max(0, short - freed)

    def give_up(self, error: OutOfMemory, short_bytes: int) -> DoesNotFit:
        """End the iteration, which cannot be made to fit. Returns the error to raise."""
        self.given_up = True
        self.session.clock.reset()  # the running forward ends with the error
        return self._does_not_fit(error, short_bytes)

    def _in_fragments(self, error: OutOfMemory) -> bool:
        """Returns whether as many bytes as were requested are reserved and unused."""
        idle = getattr(self.session.backend, "idle_bytes", None)
        return idle is not None and 0 < error.asked_bytes <= idle()

    def ends_ranks(self, error: OutOfMemory) -> PlanError:
        """Returns the error to raise where one of several ranks was refused memory. The other ranks get word. They wait
        for the plan's next steps, so this rank can neither leave the plan nor begin the iteration again."""
        s = self.session
        assert s.ranks is not None
        if s.cursor.visiting:
            where = f"in an evaluation after step {s.iteration - 1}"
        elif s.cursor.moment < 0:
            where = f"before iteration {s.iteration}"
        else:
            where = f"in iteration {s.iteration}, moment {s.cursor.moment} ({s.timetable.names[s.cursor.moment]})"
        planned, limit = s.plan.gpu_budget_bytes, error.limit_bytes
        less = max(0, planned - max(error.asked_bytes, planned // 8))
        budget = limit if limit is not None and limit < planned else less
        return s.ranks.ends(
            f"rank {s.ranks.rank} ran out of memory {where}: {error}. One process would continue with a smaller "
            "plan; several end, because the others wait for the next steps of this plan. Plan again for "
            f"{s.spelling.gpu_memory} {format_bytes(budget)} or less (this one has {format_bytes(planned)}), or "
            "for a smaller batch, and continue from the last checkpoint (--save-every, --resume)"
        )

    def _does_not_fit(self, error: OutOfMemory, short: int) -> DoesNotFit:
        s = self.session
        limit = error.limit_bytes
        if limit is None:
            limit = error.payload_bytes + error.other_bytes
        eager = "; eager updates of this iteration that were made already stay" if s.updates.begun else ""
        return DoesNotFit(
            policy=f"{s.plan.policy} in iteration {s.iteration}",
            place="gpu",
            needed_bytes=limit + short,
            available_bytes=limit,
            what=f"{error.what} of {format_bytes(error.asked_bytes)} beside {format_bytes(error.other_bytes)} of other "
            f"data and chunks that are in use; parameters are those after step {s.iteration - 1}{eager}; use a smaller "
            "batch or checkpointing",
        )

    # -- between two iterations ---------------------------------------------------------------------------------------

    def replan(self) -> None:
        """Make the next plan, by the first rung that fits. Raises DoesNotFit if none does. The session then stands
        between two iterations with the values of the last whole iteration, and tries again after the next."""
        s = self.session
        assert s.cursor.moment < 0 and not s.cursor.off_plan and not s.cursor.visiting
        self.given_up = False
        if not s.held:
            s.loop.drain()
            s.held = True
        if s.plan is not self._made:  # another part has made a plan since
            self.level, self._known = -1, None
        workload, budget = self._workload(), self._available()
        first = max(self.level, 0) if (budget, tide_of(workload)) != self._known else self.level + 1
        tried: dict[str, DoesNotFit] = {}
        for level in range(first, len(RUNGS)):
            spec = spec_of_rung(s.plan.policy, level)
            if spec in tried:
                continue
            error = self._try_rung(level, spec, workload, budget)
            if error is None:
                return
            log.warning("rung %r (%s): %s", RUNGS[level], spec, error)
            tried[spec] = error
        if self._was_in_fragments:
            self._keep_plan()
            return
        s.clock.reset()  # the forward that was about to begin does not run
        last = list(tried.values())[-1] if tried else None
        raise self._no_rung_fits(list(tried), last, budget) from last

    def _try_rung(self, level: int, spec: str, workload: Workload, budget: int) -> DoesNotFit | None:
        """Continue under the rung's plan if it fits. Returns why it does not fit."""
        s = self.session
        try:
            plan = find_policy(spec)(workload, with_gpu_budget(s.plan.machine, budget), s.plan.settings)
            check_gpu_memory(plan, s.backend, plan.gpu_budget_bytes)
            s.renew(plan)
        except DoesNotFit as error:
            without_locals(error)
            return error
        self.level, self._known, self._made, self.pending = level, (budget, tide_of(workload)), plan, False
        self.unforeseen_bytes = 0
        done = (
            f"new plan by {spec} (rung {RUNGS[level]!r}) for {format_bytes(budget)} and a tide of at most "
            f"{format_bytes(workload.peak_non_model_bytes)}"
        )
        self._rungs.append(replace(self._rungs[-1], done=done))
        log.warning("iteration %d: %s", s.iteration, done)
        s.deviation_log.append(f"iteration {s.iteration}: {done}")
        return None

    def _keep_plan(self) -> None:
        """Continue under the present plan. Its bytes are there, and an operator that is refused memory is given what is
        idle."""
        self.session.renew(self.session.plan)
        self.pending = False
        log.warning(
            "iteration %d: the plan stays: no smaller plan fits; its bytes are there, in fragments",
            self.session.iteration,
        )

    def _no_rung_fits(self, tried: Sequence[str], last: DoesNotFit | None, budget: int) -> DoesNotFit:
        s, refused = self.session, self._error
        assert refused is not None
        return DoesNotFit(
            policy=f"no rung of the ladder ({', '.join(tried) or s.plan.policy})",
            place=last.place if last else "gpu",
            needed_bytes=last.needed_bytes if last else budget + refused.asked_bytes,
            available_bytes=last.available_bytes if last else budget,
            what=(f"{last.what}; " if last else "")
            + f"after {refused}; all parameters are those after step {s.iteration - 1}",
        )

    def _available(self) -> int:
        """Returns the bytes that a new plan may count on: at most the present budget and the accelerator's bytes. If
        the accelerator has the present budget and the tide is not counted, fragments or a tide above the plan's took
        the memory. Then the result is the budget less a sixteenth where as many bytes as requested were idle, in
        fragments; else less an eighth, or less the requested bytes if these are more."""
        s = self.session
        budget = s.plan.gpu_budget_bytes
        limit = s.backend.available_gpu_bytes()
        if limit is not None and (limit < budget or (s.guard is not None and s.guard.counts)):
            return min(budget, limit)
        if self._was_in_fragments:
            return budget - budget // 16
        asked = self._error.asked_bytes if self._error is not None else 0
        return max(0, budget - max(asked, budget // 8))

    def _workload(self) -> Workload:
        """Returns the plan's workload, with the measured tide where that was higher."""
        w = self.session.plan.workload
        moments = tuple(
            replace(m, peak_bytes=self.measured[i]) if self.measured.get(i, 0) > m.peak_bytes else m
            for i, m in enumerate(w.moments)
        )
        return w if moments == w.moments else replace(w, moments=moments)
