"""What accelerate, if imported, says of the training loop."""

from __future__ import annotations

import sys


class Accelerated:
    """An accumulation window opened before the session says nothing of its loop."""

    def __init__(self) -> None:
        self._heard = _due()

    @property
    def skips(self) -> bool:
        """No step is due: accelerate's optimizers skip such a one."""
        due = _due()
        self._heard |= due
        return self._heard and not due


def _due() -> bool:
    state = sys.modules.get("accelerate.state")
    return state is None or bool(state.GradientState().sync_gradients)
