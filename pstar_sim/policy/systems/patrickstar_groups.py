"""PatrickStar's groups of chunks, given up when all tensors are HOLD_AFTER_FWD, or all HOLD_AFTER_BWD."""

from __future__ import annotations

from collections import Counter
from enum import IntEnum, auto

from pstar_sim.policy.kit.facts import Facts
from pstar_sim.workload.workload import Phase


class _Hold(IntEnum):  # hashed without a call of Python, unlike Enum
    HOLD = auto()
    AFTER_FWD = auto()
    AFTER_BWD = auto()


class Groups:
    """The tensors' states in one iteration; `begin` and `end` are called once per moment, in order."""

    def __init__(self, uses: Facts) -> None:
        self._uses = uses
        self._workload = uses.workload
        self._tensors = [len(chunk.slots) for chunk in uses.layout.chunks]
        self._chunk_of = {slot.tensor: c for c, chunk in enumerate(uses.layout.chunks) for slot in chunk.slots}
        self._hold()

    def begin(self, m: int) -> bool:
        """FWD's end sets tensors used in it to HOLD, a micro-batch's end all. Returns whether one has ended: all groups
        are then given up."""
        if m == 0:
            return False
        before, moment = self._workload.moments[m - 1], self._workload.moments[m]
        if moment.micro_batch != before.micro_batch:
            self._hold()
            return True
        if before.phase is Phase.FWD and moment.phase is not Phase.FWD:
            for t, state in list(self._state.items()):
                if state is _Hold.AFTER_FWD:
                    self._enter(t, _Hold.HOLD)
        return False

    def _hold(self) -> None:
        self._state = dict.fromkeys(self._chunk_of, _Hold.HOLD)
        self._count = Counter({(c, _Hold.HOLD): tensors for c, tensors in enumerate(self._tensors)})  # tensors by state

    def _enter(self, t: int, state: _Hold) -> None:
        c, before = self._chunk_of[t], self._state[t]
        if before is state:
            return
        self._count[c, before] -= 1
        self._count[c, state] += 1
        self._state[t] = state

    def end(self, m: int) -> list[int]:
        """Chunks whose groups are given up after the moment, ascending."""
        w, chunk_of = self._workload, self._chunk_of
        moment, final = w.moments[m], self._uses.final
        for t in w.reads[m]:
            if moment.phase is not Phase.BWD:
                self._enter(t, _Hold.AFTER_FWD)
            elif final.get((moment.micro_batch, t), m) <= m:
                self._enter(t, _Hold.AFTER_BWD)
        for t in w.gradients[m]:
            if final[moment.micro_batch, t] == m:
                self._enter(t, _Hold.AFTER_BWD)
        touched = {chunk_of[t] for t in (*w.reads[m], *w.gradients[m])}
        return [c for c in sorted(touched) if m == self._uses.last_gradient(c) or self._all_used(c, m)]

    def _all_used(self, c: int, m: int) -> bool:
        same = self._tensors[c] in (self._count[c, _Hold.AFTER_FWD], self._count[c, _Hold.AFTER_BWD])
        return same and not self._holds_gradient(c, m)

    def _holds_gradient(self, c: int, m: int) -> bool:
        last_batch = self._workload.moments[m].micro_batch == self._workload.micro_batches - 1
        return last_batch and self._uses.updated(c) and self._uses.spans[c][-1][1] <= m
