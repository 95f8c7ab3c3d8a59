"""What accelerate says of the training loop, where the process has imported it."""

from __future__ import annotations

import sys

__all__ = ["Accelerated"]


class Accelerated:
    """A window of accumulation opened before the session says nothing of the session's loop."""

    def __init__(self) -> None:
        self._heard = _due()

    @property
    def skips(self) -> bool:
        """Whether no optimizer step is due: accelerate's own optimizers skip such a step."""
        due = _due()
        self._heard |= due
        return self._heard and not due


def _due() -> bool:
    state = sys.modules.get("accelerate.state")
    return state is None or bool(state.GradientState().sync_gradients)
