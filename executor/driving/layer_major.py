"""Relay: the layer-major order, as planned (pstar_sim/workload/relay.py).

The micro-batch of the plan's next moment runs: its forward in a thread of its own (`forwards.py`), suspended before an
event that is not the plan's next, its backward part by part (`borders.py`). So each block runs for all micro-batches,
always in one order, and gradients add up as in the usual loop.

Where several parts add to a parameter's gradient (tied weights), it stays in `grad` until the micro-batch's last part,
and outside while others run.

Off the plan, the first unfinished micro-batch runs to its end, then the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from executor.contract import raw_grad, set_raw_grad
from executor.driving.borders import BlockTape
from executor.driving.forwards import Draws, Forward
from executor.driving.loop import Loop
from pstar_sim.workload.mixing import block_of

Run = Callable[[], tuple[BlockTape, torch.Tensor]]


def relay(loop: Loop, runs: Sequence[Run]) -> tuple[list[torch.Tensor], int]:
    """Returns each micro-batch's part of the loss, and the calls of blocks in one.

    runs: forwards, which return their tape and part of the loss.
    """
    return _Relay(loop, runs).run()


class _Relay:
    def __init__(self, loop: Loop, runs: Sequence[Run]) -> None:
        self._state = loop.state
        self._clock = loop.clock
        self._parameters = loop.reader.parameters
        count = len(runs)
        self._draws = Draws(count, loop.state.run.backend.device)
        self._forwards = [Forward(run) for run in runs]
        self._waiting = list(range(count))  # unfinished micro-batches, in order
        self._aside: dict[int, dict[int, torch.Tensor]] = {}  # micro-batch -> tensor -> parts of its gradient
        self._now = 0

    def run(self) -> tuple[list[torch.Tensor], int]:
        with self._clock.side_by_side(self._before_event):
            try:
                while self._waiting:
                    self._turn_to(self._next)
                    with self._draws.of(self._now):
                        self._go_on()
            finally:
                for forward in self._forwards:
                    forward.stop()
        results = [forward.result for forward in self._forwards]
        return [value for _, value in results], results[-1][0].calls

    @property
    def _planned(self) -> int | None:
        cursor, table = self._state.cursor, self._state.run.timetable
        following = cursor.moment + 1
        if cursor.off_plan or following >= len(table.micro_batch):
            return None
        return table.micro_batch[following]

    @property
    def _next(self) -> int:
        planned = self._planned
        return planned if planned in self._waiting and planned is not None else self._waiting[0]

    @property
    def _mine(self) -> bool:
        return self._next == self._now

    def _turn_to(self, micro_batch: int) -> None:
        if micro_batch == self._now:
            return
        parameters = self._parameters
        aside = self._aside.setdefault(self._now, {})
        for t in self._state.run.timetable.tied:
            part = raw_grad(parameters[t])
            if part is not None:
                aside[t] = part
                set_raw_grad(parameters[t], None)
        self._now = micro_batch
        for t, part in self._aside.pop(micro_batch, {}).items():
            set_raw_grad(parameters[t], part)
        self._clock.turn_to(micro_batch)

    def _before_event(self) -> None:
        while not self._mine:
            self._forwards[self._now].suspend()

    def _go_on(self) -> None:
        forward = self._forwards[self._now]
        if not forward.over:
            forward.go_on()
            return
        tape, _ = forward.result
        following = self._state.run.following
        following.in_parts = following.keeps_tied = True
        try:
            self._back(tape)
        finally:
            following.in_parts = following.keeps_tied = False

    def _back(self, tape: BlockTape) -> None:
        while tape.parts and (self._mine or self._belongs(tape)):
            tape.back()
        if not tape.parts and self._mine:
            if self._state.cursor.off_plan:
                self._state.run.following.take_tied()
            self._clock.end_backward()
            self._waiting.remove(self._now)

    def _belongs(self, tape: BlockTape) -> bool:
        """Of the cell that has just run: before that cell's block, and without an event in the plan."""
        if not tape.parts[-1].before_block:
            return False
        table, m = self._state.run.timetable, self._state.cursor.moment
        mine = (name for name, u in zip(table.names[m + 1 :], table.micro_batch[m + 1 :]) if u == self._now)
        return block_of(next(mine, "").partition(":")[2]) is not None
