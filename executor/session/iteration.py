"""What belongs to one iteration of the loop.

`RunState.now` is replaced by one assignment, so an interruption finds the old value or the new one. Steps that run into
the next forward use their own iteration's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from executor.memory.update import Update


@dataclass(kw_only=True, slots=True, eq=False)
class Iteration:
    """number: from 0; -1 before the first.
    before: the one before, while steps of it may run.
    arrived: tensors whose gradient left autograd.
    outstanding: tensors whose gradient is due in the open moment.
    missed: tensors whose gradient counted as zero somewhere.
    passed_over: this rank had nothing to compute in some moment.
    early: tensors whose eager update has begun.
    norms: tensor -> one element, fp32, where taken on arrival.
    given: backwards that gave a parameter its gradient: micro-batches.
    gives: the running one has.
    shares: elements of each micro-batch over the plan's.
    captured: a batch was, inside the iteration.
    update: for the Adam steps; None until `optimizer.step()` (eager updates: never None).
    """

    number: int
    before: Iteration | None = None
    arrived: set[int] = field(default_factory=set)
    outstanding: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)
    passed_over: bool = False
    early: set[int] = field(default_factory=set)
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    backwards: int = 0
    given: int = 0
    gives: bool = False
    shares: list[float] = field(default_factory=list)
    captured: bool = False
    update: Update | None = None

    def see(self, share: float, *, captured: bool) -> None:
        """share: size of the micro-batch that begins."""
        self.shares.append(share)
        self.captured |= captured

    def end_backward(self) -> None:
        self.backwards += 1
        self.given += self.gives
        self.gives = False

    def next(self, number: int, update: Update | None) -> Iteration:
        """Only the last two iterations are kept."""
        if self.before is not None:
            self.before.before = None
        return Iteration(number=number, before=self, update=update)

    def of(self, number: int) -> Iteration | None:
        """None if it has not begun or is no longer kept."""
        found: Iteration | None = self
        while found is not None and found.number != number:
            found = found.before
        return found

    def update_of(self, number: int) -> Update | None:
        found = self.of(number)
        return None if found is None else found.update
