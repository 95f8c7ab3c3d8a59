"""Ending: the end of a run, by `close()`, by an interruption that cannot be repaired, or with the process.

Three lists hold functions that undo changes. `Session.hooks` removes hooks from the model's modules and parameters.
`Session.on_close` undoes other changes of the model. `Resources.at_end` undoes changes of the process; it does not hold
the session, and is also called where the session was dropped without `close()`.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from executor.queues.interface import Health, Lifetime
from executor.session.hosting import BytesHost, LoopHost
from executor.session.loop import Loop
from executor.session.reader import Reader
from executor.session.refusals import Refusal, refused
from executor.session.updates import Updates
from pstar_sim.errors import Interrupted

__all__ = ["Ending", "Host"]

log = logging.getLogger("executor")


class SessionEnd(Protocol):
    """The part of `resources.Resources` that this file uses."""

    def end(self) -> None: ...


class QueuesAsked(Lifetime, Health, Protocol):
    """The part of the queues that this file uses."""


class Host(BytesHost, LoopHost, Protocol):
    """The part of the session that this file uses."""

    closed: bool

    @property
    def queues(self) -> QueuesAsked: ...
    @property
    def reader(self) -> Reader: ...
    @property
    def updates(self) -> Updates: ...
    @property
    def loop(self) -> Loop: ...
    @property
    def resources(self) -> SessionEnd: ...
    @property
    def hooks(self) -> Sequence[Any]: ...
    @property
    def on_close(self) -> Sequence[Callable[[], object]]: ...
    @property
    def home(self) -> torch.device: ...


class Ending:
    """Ends a session's run.

    dropped: calls `Holdings.let_go` where the session is collected without `close()`.
    """

    def __init__(self, host: Host, dropped: weakref.finalize[..., Any]) -> None:
        self.host = host
        self._dropped = dropped

    def interrupt(self, why: str) -> Interrupted:
        """End the run: queues and other ranks fail with Interrupted(why). Returns that error for the caller to raise.
        Later calls of the session raise it too."""
        host = self.host
        error = Interrupted(why)
        host.queues.fail(error)
        if host.ranks is not None:
            host.ranks.announce(error, host.iteration)
        return error

    def tell_ranks(self, error: BaseException | None) -> None:
        """Tell the other ranks that this rank's run is over.

        error: the error that ends the run, where it is known.
        """
        host = self.host
        if host.ranks is not None and not host.closed:
            host.ranks.announce(host.queues.failure or error, host.iteration)

    def close(self, *, restore: bool) -> None:
        """Stop the queues and remove the hooks. A second call does nothing.

        restore: whether parameters become plain parameters with their current values.

        Afterwards raises the error of a queue that died, unless that error was raised before.
        """
        host = self.host
        if host.closed:
            return
        values: dict[int, torch.Tensor] = {}
        unreported: Exception | None = None
        host.at_work.outermost()
        if restore and host.queues.failure is None:
            self._mend()
        if restore and host.queues.failure is None:
            if host.updates.running:
                log.warning(
                    "closed between the last backward and optimizer.step() with eager updates: some parameters keep "
                    "the update of iteration %d, others do not have it",
                    host.iteration,
                )
            try:
                values = {t: host.reader.value_now(t) for t in host.timetable.chunk_of}
            except Exception as error:  # raised below, after the session has ended
                host.queues.fail(error)
                unreported = error
        if restore and host.queues.failure is not None:
            log.warning("the parameters are left without values: the run ended with %s", host.queues.failure)
        self.tell_ranks(sys.exc_info()[1])
        host.closed = True
        self._dropped.detach()
        try:
            host.queues.stop()
        finally:
            self._let_go(values)
        if unreported is not None:
            raise unreported

    def _mend(self) -> None:
        """Mend an interruption, so that values can be read. Values that a load left half loaded cannot be."""
        host = self.host
        if host.at_work.loading:
            host.queues.fail(refused(Refusal.HALF_LOADED, host.at_work))
        elif host.at_work.torn:
            try:
                host.loop.mend()
            except Exception as error:  # for example the device's own error: the session ends all the same
                host.queues.fail(error)

    def _let_go(self, values: Mapping[int, torch.Tensor]) -> None:
        """Undo the three lists. Parameters become plain before memory is freed, because they are views of it.

        values: tensor -> value of its parameter from now on; other parameters are left without a value.
        """
        host = self.host
        if host.ranks is not None:
            host.ranks.close()
        host.clock.close()
        for handle in host.hooks:
            handle.remove()
        for action in host.on_close:
            action()
        host.reader.make_plain(lambda t: values[t].to(host.home) if t in values else None)
        host.resources.end()
