"""Listener: an object that hears of a run's moments: a counter of its operators, or the recorder of a warm-up."""

from __future__ import annotations

from typing import Any

import torch

from executor.moments.hooks import ModuleEvent

__all__ = ["Listener"]


class Listener:
    """Hears of a run's moments. A listener has those of these methods for which it listens; the others do nothing."""

    def bind(self) -> None:
        """The run continues under a new plan."""

    def require_plan(self) -> None:
        """A forward with gradients is about to begin. Raises an error where it cannot run."""

    def begin_iteration(self) -> None:
        """An iteration begins; the queues run."""

    def close_moment(self, moment: int) -> None:
        """The open moment, an index in the plan, ends. The engine's own work comes next."""

    def see_event(self, moment: int) -> None:
        """An event has come in the plan's moment `moment` (-1 without one), on plan or off, outside an evaluation."""

    def open_moment(self) -> None:
        """The moment that has just begun is open. The engine's own work is done."""

    def end_iteration(self) -> None:
        """An iteration on plan has ended, before the next iteration begins."""

    def takes_event(self, event: ModuleEvent, found: Any) -> bool:
        """Returns whether the listener has carried out the event, whose answer of the contract's table is `found`."""
        return False

    def takes_gradient(self, tensor: int, gradient: torch.Tensor) -> bool:
        """Returns whether the listener has taken a whole gradient off the plan."""
        return False

    def gradient_is_final(self, tensor: int) -> bool:
        """Returns whether a gradient that was accumulated is the tensor's last in this micro-batch."""
        return True
