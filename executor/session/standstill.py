"""Brings the queues to rest, so that other code can read and write values; ends a run that cannot continue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from executor.session.refusals import Refusal, refused
from executor.session.state import RunState
from pstar_sim.errors import Interrupted


class Standstill:
    """meet_interruption(): see `driving.loop.Loop`.
    inside: whether code inside `still` runs.
    """

    def __init__(self, state: RunState, meet_interruption: Callable[[], None]) -> None:
        self.state = state
        self.inside = False
        self._meet_interruption = meet_interruption

    def require_running(self) -> None:
        if self.state.closed:
            raise refused(Refusal.CLOSED, self)
        if self.state.run.queues.failure is not None:
            raise self.state.run.queues.failure
        if self.state.renewing:
            raise self.interrupt(
                f"iteration {self.state.iteration} was interrupted while values moved into the chunks of a new plan; "
                "continue from the last checkpoint"
            )

    def rest(self) -> None:
        """Updates of finished iterations are in the parameters, and nothing moves."""
        queues = self.state.run.queues
        queues.settle(self.state.iteration - 1)
        queues.pause()

    def drain(self) -> None:
        """`rest`. Raises the error that ended the run."""
        self.require_running()
        self.rest()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """`rest` until the context ends."""
        state = self.state
        if not state.at_work.depth:
            self._meet_interruption()
        # The queues may stand still already.
        held = state.held or self.inside or state.cursor.off_plan or state.cursor.visiting
        held = held and not state.renewing
        with state.at_work:
            if not held:
                self.drain()
                self.inside = True
            try:
                yield
            finally:
                if not held:
                    self.inside = False
                    state.run.queues.resume()

    def interrupt(self, why: str) -> Interrupted:
        """Queues and other ranks fail with Interrupted(why), which later calls of the session raise too."""
        error = Interrupted(why)
        self.state.run.queues.fail(error)
        if self.state.ranks is not None:
            self.state.ranks.announce(error, self.state.iteration)
        return error
