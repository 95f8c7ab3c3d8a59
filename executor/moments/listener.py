"""An object that hears of a run's moments."""

from __future__ import annotations

from typing import Any

import torch

from executor.moments.hooks import ModuleEvent


class Listener:
    """Has those of these methods for which it listens."""

    def bind(self) -> None:
        """The run continues under a new plan."""

    def require_plan(self) -> None:
        """Called before a forward with gradients; raises where it cannot run."""

    def begin_iteration(self) -> None:
        """The queues run."""

    def close_moment(self, moment: int) -> None:
        """The open moment ends; called before the engine's own work after the moment."""

    def see_event(self, moment: int) -> None:
        """moment: on plan or off, outside an evaluation; -1 without one."""

    def open_moment(self) -> None:
        """The engine's own work is done."""

    def end_iteration(self) -> None:
        """Before the next iteration begins, on plan."""

    def takes_event(self, event: ModuleEvent, found: Any) -> bool:
        """Whether the listener has carried out the event, with the answer `found`."""
        return False

    def takes_gradient(self, tensor: int, gradient: torch.Tensor) -> bool:
        """Whether the listener has taken a whole gradient off the plan."""
        return False

    def gradient_is_final(self, tensor: int) -> bool:
        """Whether an accumulated gradient is the tensor's last in this micro-batch."""
        return True
