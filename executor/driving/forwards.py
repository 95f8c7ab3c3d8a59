"""Forwards side by side: each in its own thread, one at a time.

A forward is suspended where its code calls `suspend`, with all that torch keeps per thread (grad mode, autocast, hooks
for saved tensors), and continues in `go_on`, while the caller waits: shared objects need no lock. A thread begins with
the caller's modes and context variables.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

from executor.devices.torch_private import modes_of_thread

R = TypeVar("R")


class _Stopped(BaseException):
    """Unwinds a forward that will not continue."""


class Forward(Generic[R]):
    """Begins at the first `go_on`.

    over: returned, raised or stopped.
    """

    def __init__(self, run: Callable[[], R]) -> None:
        self.over = False
        self._run = run
        self._may_run = False
        self._stopping = False
        self._change = threading.Condition()
        self._found: list[R] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def result(self) -> R:
        """Once the forward is over."""
        return self._found[0]

    def go_on(self) -> None:
        """Until the forward suspends itself or is over; raises its exception. An exception in the caller (Ctrl-C)
        leaves it running: call `stop`."""
        if self._thread is None:
            entered = modes_of_thread()
            context = contextvars.copy_context()
            self._thread = threading.Thread(target=context.run, args=(self._main, entered), daemon=True, name="forward")
            self._thread.start()
        with self._change:
            self._may_run = True
            self._change.notify_all()
        self._wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def suspend(self) -> None:
        """Called in the forward."""
        with self._change:
            self._may_run = False
            self._change.notify_all()
            self._change.wait_for(lambda: self._may_run)
        if self._stopping:
            raise _Stopped

    def stop(self) -> None:
        """On return the forward's thread has ended."""
        self._stopping = True
        if self._thread is None:
            self.over = True
            return
        with self._change:
            self._change.wait_for(lambda: self.over or not self._may_run)
        if not self.over:
            with self._change:
                self._may_run = True
                self._change.notify_all()
            self._wait()
        self._thread.join()
        self._error = None

    def _wait(self) -> None:
        with self._change:
            self._change.wait_for(lambda: self.over or not self._may_run)

    def _main(self, entered: contextlib.AbstractContextManager[object]) -> None:
        with self._change:
            self._change.wait_for(lambda: self._may_run)
        try:
            with entered:
                if not self._stopping:
                    self._found.append(self._run())
        except _Stopped:
            pass
        except BaseException as error:  # raised again in the caller's thread
            self._error = error
        with self._change:
            self.over = True
            self._change.notify_all()


class Draws:
    """Random numbers of micro-batches side by side: each has generators of its own, as after `torch.manual_seed`.

    device: whose generator (if any) counts too.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        seeds = torch.randint(2**62, (count,), device="cpu").tolist()
        self._states = [[torch.Generator(d).manual_seed(seed).get_state() for d in self._devices] for seed in seeds]

    @property
    def _devices(self) -> list[torch.device]:
        return [torch.device("cpu"), *([self._device] if self._device is not None else [])]

    @contextlib.contextmanager
    def of(self, micro_batch: int) -> Iterator[None]:
        before = self._get()
        self._set(self._states[micro_batch])
        try:
            yield
        finally:
            self._states[micro_batch] = self._get()
            self._set(before)

    def _get(self) -> list[torch.Tensor]:
        cuda = [] if self._device is None else [torch.cuda.get_rng_state(self._device)]
        return [torch.get_rng_state(), *cuda]

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device is not None:
            torch.cuda.set_rng_state(states[1], self._device)
