"""The one table of tensor and chunk states; what leads where, as h11 keeps its own.

A tensor's state says what its working list means: FREE (no content), COMPUTE (a running moment or Adam uses it; the
only immovable state), HOLD (parameters), HOLD_AFTER_FWD (parameters, read in FWD), HOLD_AFTER_BWD (its gradient, which
overwrote them). A chunk's state follows from its tensors by priority, and is RELEASED where it has no payload at all.
Knows no place, no bytes and no plan. (PatrickStar's states; an illegal transition raises and changes nothing.)
"""

from __future__ import annotations

from collections.abc import Iterable

from pstar_sim.core.layout import Layout
from pstar_sim.errors import IllegalTransition
from pstar_sim.python310 import StrEnum

__all__ = ["Event", "State", "StateTable", "after"]


class State(StrEnum):
    FREE = "free"
    COMPUTE = "compute"
    HOLD = "hold"
    HOLD_AFTER_FWD = "hold-after-fwd"
    HOLD_AFTER_BWD = "hold-after-bwd"
    RELEASED = "released"


class Event(StrEnum):
    LOAD = "load"  # content arrives: first weights, or a remote payload gathered
    READ = "read"  # a moment that reads it begins
    READ_FWD = "read-fwd"  # that moment ends, in FWD or RECOMPUTE
    READ_BWD = "read-bwd"  # that moment ends in BWD and the parameter stays what it is
    OVERWRITE = "overwrite"  # that moment ends and the final gradient lies where the parameter was
    TURN = "turn"  # FWD is over, or the micro-batch
    ADAM = "adam"  # its update begins
    UPDATED = "updated"  # its update ends
    RELEASE = "release"  # content is given up


_TABLE: dict[State, dict[Event, State]] = {
    State.FREE: {Event.LOAD: State.HOLD},
    State.HOLD: {
        Event.READ: State.COMPUTE,
        Event.ADAM: State.COMPUTE,
        Event.TURN: State.HOLD,
        Event.RELEASE: State.FREE,
    },
    State.COMPUTE: {
        Event.READ_FWD: State.HOLD_AFTER_FWD,
        Event.READ_BWD: State.HOLD,
        Event.OVERWRITE: State.HOLD_AFTER_BWD,
        Event.UPDATED: State.HOLD,
    },
    State.HOLD_AFTER_FWD: {
        Event.READ: State.COMPUTE,
        Event.ADAM: State.COMPUTE,
        Event.TURN: State.HOLD,
        Event.RELEASE: State.FREE,
    },
    State.HOLD_AFTER_BWD: {
        Event.ADAM: State.COMPUTE,
        Event.TURN: State.HOLD_AFTER_BWD,
        Event.RELEASE: State.FREE,
    },
}

_PRIORITY = (State.COMPUTE, State.HOLD, State.HOLD_AFTER_FWD, State.HOLD_AFTER_BWD)


def after(state: State, event: Event) -> State:
    """The state that `event` leads to. Raises IllegalTransition where it leads nowhere."""
    try:
        return _TABLE[state][event]
    except KeyError:
        legal = ", ".join(_TABLE.get(state, {})) or "nothing"
        raise IllegalTransition(
            f"{event.value!r} is not possible in state {state.value!r}; possible: {legal}"
        ) from None


class StateTable:
    """States of all tensors of a layout, and of its chunks (kept as counts, so that asking costs nothing)."""

    def __init__(self, layout: Layout, initial: State = State.HOLD) -> None:
        self._chunk_of = layout.chunk_of
        self._state = dict.fromkeys(self._chunk_of, initial)
        self._counts: list[dict[State, int]] = [{initial: len(c.slots)} for c in layout.chunks]
        self._payload = [True] * len(layout.chunks)

    def tensor(self, tensor: int) -> State:
        return self._state[tensor]

    def chunk(self, chunk: int) -> State:
        """RELEASED without payload; else COMPUTE if any tensor is, then HOLD, HOLD_AFTER_FWD, HOLD_AFTER_BWD, FREE."""
        if not self._payload[chunk]:
            return State.RELEASED
        counts = self._counts[chunk]
        return next((state for state in _PRIORITY if counts.get(state)), State.FREE)

    def movable(self, chunk: int) -> bool:
        return self.chunk(chunk) is not State.COMPUTE

    def apply(self, tensors: Iterable[int], event: Event) -> None:
        """All tensors go through `event`, or none does. Raises IllegalTransition naming the first that cannot."""
        moves: list[tuple[int, State]] = []
        for tensor in tensors:
            try:
                moves.append((tensor, after(self._state[tensor], event)))
            except IllegalTransition as error:
                raise IllegalTransition(f"tensor {tensor} (chunk {self._chunk_of[tensor]}): {error}") from None
        for tensor, state in moves:
            counts = self._counts[self._chunk_of[tensor]]
            counts[self._state[tensor]] -= 1
            counts[state] = counts.get(state, 0) + 1
            self._state[tensor] = state

    def release(self, chunk: int) -> None:
        """The chunk's payload is given up: its tensors become FREE. Raises IllegalTransition while one is in use."""
        if not self._payload[chunk]:
            raise IllegalTransition(f"chunk {chunk} is released already")
        held = [t for t, c in self._chunk_of.items() if c == chunk and self._state[t] is not State.FREE]
        self.apply(held, Event.RELEASE)
        self._payload[chunk] = False

    def restore(self, chunk: int) -> None:
        """The chunk has a payload again, without content. Raises IllegalTransition if it had one."""
        if self._payload[chunk]:
            raise IllegalTransition(f"chunk {chunk} has a payload already")
        self._payload[chunk] = True
