"""The end of a run: `close()`, an interruption beyond repair, or the process's end.

`Ending.hooks` removes hooks, `Ending.on_close` undoes other changes of the model. `Resources.at_end` undoes changes of
the process, without the session, which may be dropped without `close()`.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from executor.contract import ChunkParameter
from executor.driving.loop import Loop
from executor.lifetime.resources import Resources
from executor.session.refusals import Refusal, refused

log = logging.getLogger("executor")


class Ending:
    """dropped: calls `Resources.let_go` where the session is collected without `close()`.
    on_close: undo other changes of the model.
    """

    def __init__(self, loop: Loop, resources: Resources, dropped: weakref.finalize[..., Any]) -> None:
        self.loop = loop
        self.state = loop.state
        self.reader = loop.reader
        self.resources = resources
        self.home = torch.device("cpu")
        self.hooks: list[Any] = []
        self.on_close: list[Callable[[], object]] = []
        self._dropped = dropped

    def tell_ranks(self, error: BaseException | None) -> None:
        """error: what ends the run, where known."""
        state = self.state
        if state.ranks is not None and not state.closed:
            state.ranks.announce(state.run.queues.failure or error, state.iteration)

    def close(self, *, restore: bool) -> None:
        """See `Session.close`."""
        state, queues = self.state, self.state.run.queues
        if state.closed:
            return
        values: dict[int, torch.Tensor] = {}
        unreported: Exception | None = None
        state.at_work.outermost()
        if restore and queues.failure is None:
            self._mend()
            queues = state.run.queues  # mending may have made a new plan
        if restore and queues.failure is None:
            if self.loop.updates.running:
                log.warning(
                    "closed between the last backward and optimizer.step() with eager updates: some parameters keep "
                    "the update of iteration %d, others do not have it",
                    state.iteration,
                )
            try:
                values = {t: self.reader.value_now(t) for t in state.run.timetable.chunk_of}
            except Exception as error:  # raised below, after the session has ended
                queues.fail(error)
                unreported = error
        if (
            restore
            and queues.failure is not None
            and any(isinstance(p, ChunkParameter) for p in self.reader.parameters)
        ):
            log.warning("the parameters are left without values: the run ended with %s", queues.failure)
        self.tell_ranks(sys.exc_info()[1])
        state.closed = True
        self._dropped.detach()
        try:
            queues.stop()
        finally:
            self._let_go(values)
        if unreported is not None:
            raise unreported

    def _mend(self) -> None:
        state = self.state
        if state.at_work.loading:
            state.run.queues.fail(refused(Refusal.HALF_LOADED, state.at_work))
        elif state.at_work.torn:
            try:
                self.loop.mend()
            except Exception as error:  # for example the device's own error: the session ends all the same
                state.run.queues.fail(error)

    def _let_go(self, values: Mapping[int, torch.Tensor]) -> None:
        """Parameters, views of the memory, become plain before it is freed.

        values: tensor -> value; others have none.
        """
        if self.state.ranks is not None:
            self.state.ranks.close()
        self.loop.clock.close()
        for handle in self.hooks:
            handle.remove()
        for action in self.on_close:
            action()
        self.reader.make_plain(lambda t: values[t].to(self.home) if t in values else None)
        self.resources.end()
