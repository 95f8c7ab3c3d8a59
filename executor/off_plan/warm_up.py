"""Warm-up: the engine's side of a recorded iteration, on-demand mode with a recorder."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from executor.devices.backend import Backend
from executor.moments.hooks import ModuleEvent
from executor.moments.live_bytes import LiveStorages
from executor.moments.recorder import MomentRecorder
from executor.moments.unseen import unseen
from executor.session.cursor import Answer
from executor.session.reader import Reader

__all__ = ["WarmUp", "listen", "time_moments"]


class OnDemand(Protocol):
    """The part of `demand.Demand` that this file uses."""

    def on_event(self, event: ModuleEvent, found: Answer, known_tide_bytes: int) -> None: ...

    def ensure(self, chunks: set[int]) -> None: ...

    def accept(self, tensor: int, grad: torch.Tensor) -> None: ...


class Host(Protocol):
    """The part of the session that this file uses."""

    warming: WarmUp | None

    @property
    def reader(self) -> Reader: ...
    @property
    def demand(self) -> OnDemand: ...
    @property
    def backend(self) -> Backend: ...


class WarmUp:
    """Passes events on to the on-demand mode.

    With a recorder (and its live storages), the recorder gets every event and gradient first. With a script ((chunks
    read, non-model peak) of each moment), the chunks are fetched before the moment begins, and the seconds of each
    moment without the fetches go to `durations`, read from `clock`. Copies of gradients to the host do not count
    either. A plan would copy a gradient into its chunk's list on the device, so such a copy is made and counted
    instead.

    firings: number of gradients of a tensor in one micro-batch, where more than one.
    """

    def __init__(
        self,
        session: Host,
        firings: Mapping[int, int],
        *,
        recorder: MomentRecorder | None = None,
        live: LiveStorages | None = None,
        script: Sequence[tuple[set[int], int]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.durations: list[float] = []
        self._clock = clock
        self._session = session
        self._firings = firings
        self._recorder = recorder
        self._live = live
        self._script = script
        self._fired: Counter[tuple[int, int]] = Counter()
        self._micro_batch = 0
        self._begun_s: float | None = None
        largest = max((p.numel() for p in session.reader.parameters), default=0)
        # Stands for a chunk's list; zeros, so that its pages exist before a moment begins.
        self._list = (
            None if script is None else torch.zeros(largest, dtype=torch.float32, device=session.backend.device)
        )

    def on_event(self, event: ModuleEvent, found: Answer) -> None:
        self.close()
        self._micro_batch = event.micro_batch
        session, at = self._session, len(self.durations)
        if self._recorder is not None:
            self._recorder.on_event(event)
        with unseen():
            if self._script is None:
                assert self._live is not None
                session.demand.on_event(event, found, self._live.current)
            elif at < len(self._script):
                chunks, peak_bytes = self._script[at]
                session.demand.on_event(event, found, peak_bytes)
                session.demand.ensure(chunks)
                session.reader.set_open(True)
        self._begun_s = self._clock()

    def close(self) -> None:
        """End the open moment now."""
        if self._begun_s is not None:
            self.durations.append(self._clock() - self._begun_s)
            self._begun_s = None

    def accept(self, tensor: int, gradient: torch.Tensor) -> None:
        """Take a final gradient to the host. A copy on the device counts for the moment's seconds; the copy to the host
        does not."""
        if self._list is not None:
            flat = gradient.reshape(-1)
            self._list.view(flat.dtype)[: flat.numel()].copy_(flat)
        begun_s = self._clock()
        self._session.demand.accept(tensor, gradient)
        if self._begun_s is not None:
            self._begun_s += self._clock() - begun_s

    def gradient_is_final(self, tensor: int) -> bool:
        """Note that a gradient was accumulated. Returns whether it is the tensor's last in this micro-batch."""
        if self._recorder is not None:
            return self._recorder.gradient(tensor) >= self._firings.get(tensor, 1)
        key = (self._micro_batch, tensor)
        self._fired[key] += 1
        return self._fired[key] >= self._firings.get(tensor, 1)


def listen(
    session: Host, recorder: MomentRecorder | None, live: LiveStorages | None, firings: Mapping[int, int]
) -> None:
    """Send every event and gradient to `recorder` from now on; None: stop."""
    if recorder is None or live is None:
        session.warming = None
    else:
        session.warming = WarmUp(session, firings, recorder=recorder, live=live)


def time_moments(
    session: Host,
    script: Sequence[tuple[set[int], int]],
    firings: Mapping[int, int],
    iteration: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Returns the seconds of each moment of one iteration, without waits.

    script: (chunks read, non-model peak) of each moment.
    """
    session.warming = warm = WarmUp(session, firings, script=script, clock=clock)
    try:
        iteration()
        warm.close()
    finally:
        session.warming = None
    return warm.durations
