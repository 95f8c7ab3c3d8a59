"""The engine's side of a recorded iteration: on-demand mode with a recorder."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from executor.moments.hooks import ModuleEvent
from executor.moments.listener import Listener
from executor.moments.live_bytes import LiveStorages
from executor.moments.recorder import MomentRecorder
from executor.moments.unseen import unseen
from executor.off_plan.plan_run import WholeState
from executor.session.cursor import Answer


class WarmUp(Listener):
    """Passes events on to the on-demand mode, after a recorder, which also gets gradients.

    With a script ((chunks read, non-model peak) per moment), chunks
    are fetched before the moment, and `durations` has its seconds without that. Gradients copied to the host do not
    count: a copy on the device, as a plan makes, counts instead.

    firings: of a tensor's gradient per micro-batch, where more than one.
    """

    def __init__(
        self,
        state: WholeState,
        firings: Mapping[int, int],
        *,
        recorder: MomentRecorder | None = None,
        live: LiveStorages | None = None,
        script: Sequence[tuple[set[int], int]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.durations: list[float] = []
        self._clock = clock
        self._state = state
        self._firings = firings
        self._recorder = recorder
        self._live = live
        self._script = script
        self._fired: Counter[tuple[int, int]] = Counter()
        self._micro_batch = 0
        self._begun_s: float | None = None
        run = state.run
        largest = max((p.numel() for p in run.demand.reader.parameters), default=0)
        # Stands for a chunk's list; zeros, so that its pages exist before a moment begins.
        self._list = None if script is None else torch.zeros(largest, dtype=torch.float32, device=run.backend.device)

    def takes_event(self, event: ModuleEvent, found: Answer) -> bool:
        self.close()
        self._micro_batch = event.micro_batch
        demand, at = self._state.run.demand, len(self.durations)
        if self._recorder is not None:
            self._recorder.on_event(event)
        with unseen():
            if self._script is None:
                assert self._live is not None
                demand.on_event(event, found, self._live.current)
            elif at < len(self._script):
                chunks, peak_bytes = self._script[at]
                demand.on_event(event, found, peak_bytes)
                demand.room.ensure(chunks)
                demand.reader.set_open(True)
        self._begun_s = self._clock()
        return True

    def close(self) -> None:
        if self._begun_s is not None:
            self.durations.append(self._clock() - self._begun_s)
            self._begun_s = None

    def takes_gradient(self, tensor: int, gradient: torch.Tensor) -> bool:
        if self._list is not None:
            flat = gradient.reshape(-1)
            self._list.view(flat.dtype)[: flat.numel()].copy_(flat)
        begun_s = self._clock()
        self._state.run.demand.gradients.accept(tensor, gradient)
        if self._begun_s is not None:
            self._begun_s += self._clock() - begun_s
        return True

    def gradient_is_final(self, tensor: int) -> bool:
        if self._recorder is not None:
            return self._recorder.gradient(tensor) >= self._firings.get(tensor, 1)
        key = (self._micro_batch, tensor)
        self._fired[key] += 1
        return self._fired[key] >= self._firings.get(tensor, 1)


@contextlib.contextmanager
def warmed_up(state: WholeState, warm_up: WarmUp) -> Iterator[WarmUp]:
    state.listeners.append(warm_up)
    try:
        yield warm_up
    finally:
        state.listeners.remove(warm_up)


def time_moments(
    state: WholeState,
    script: Sequence[tuple[set[int], int]],
    firings: Mapping[int, int],
    iteration: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """The seconds of each moment of one iteration, without waits."""
    with warmed_up(state, WarmUp(state, firings, script=script, clock=clock)) as warm_up:
        iteration()
        warm_up.close()
    return warm_up.durations
