"""Each chunk's data on the GPU over the steady iteration, booked by the policies' ledger in the timeline's order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.effects import category_of, overwritten_in_place
from pstar_sim.core.ledger import Holdings
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import UPDATES, Kind, Place, Step
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import PstarError
from pstar_sim.report.byte_curves import steady_start_s

CONTENTS = ("not on the GPU", "parameters", "gradients", "optimizer states")
"""Kinds of data that a chunk can have on the GPU. A chunk that has several counts as the last of them in this order."""
AWAY, PARAM, GRAD, STATES = range(len(CONTENTS))
ROWS = 240  # at most
LEAST_PART = 1e-6  # part of a bin below which a spell on the GPU is rounding of seconds
_OF_CATEGORY = {"param": PARAM, "grad": GRAD, "states": STATES}

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Residence:
    """The data of chunks on the GPU, in bins of time of equal length.

    edges_s: n + 1, from the iteration's start.
    first_chunks: of each row, a row ends before the next.
    contents: rows x n indices into CONTENTS: what most of a row's bytes are, a chunk's for its longest time in the bin.
    """

    edges_s: NDArray[np.float64]
    first_chunks: tuple[int, ...]
    chunks: int
    contents: Ints


def residence(plan: Plan, timeline: Timeline, *, bins: int = 240) -> Residence:
    """More chunks than ROWS share rows.

    Raises PstarError for steps not in the plan.
    """
    count = len(plan.layout.chunks)
    per_row = max(1, -(-count // ROWS))
    first = tuple(range(0, count, per_row))
    weight = np.array([plan.layout.payload_bytes(c, "param") for c in range(count)], np.float64)
    edges = np.linspace(0.0, timeline.iteration_s, bins + 1)
    votes = np.zeros((len(first), len(CONTENTS), bins))
    columns = np.arange(bins)
    for chunk, spells in _spells(plan, timeline).items():
        held_s = np.zeros((len(CONTENTS), bins))
        for begin_s, end_s, content in spells:
            low, high = max(begin_s, 0.0), min(end_s, timeline.iteration_s)
            if high > low:
                held_s[content] += np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0.0, None)
        held_s[AWAY] = LEAST_PART * (edges[1] - edges[0])  # a chunk that was there for any longer is shown
        votes[chunk // per_row, held_s.argmax(axis=0), columns] += weight[chunk]
    votes[AWAY] *= LEAST_PART  # a row is away only when all of its chunks are
    return Residence(edges_s=edges, first_chunks=first, chunks=count, contents=votes.argmax(axis=1))


def _spells(plan: Plan, timeline: Timeline) -> dict[int, list[tuple[float, float, int]]]:
    book = _Book(plan)
    known = {step.id: step for step in plan.steps}
    check_of_plan(plan, timeline)
    origin = steady_start_s(timeline)
    events: list[tuple[float, int, int, bool]] = []
    for n, span in enumerate(timeline.spans):
        brief = span.end_s <= span.start_s
        events.append((span.start_s, 1, 2 * n, True))
        events.append((span.end_s, 1 if brief else 0, 2 * n + 1, False))
    events.sort()
    spells: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
    now = {c: (-np.inf, book.content(c)) for c in range(len(plan.layout.chunks))}
    for at_s, _, n, begins in events:
        for chunk in book.advance(known[timeline.spans[n // 2].step], begins=begins):
            content = book.content(chunk)
            since_s, before = now[chunk]
            if content != before:
                spells[chunk].append((since_s, at_s - origin, before))
                now[chunk] = at_s - origin, content
    for chunk, (since_s, content) in now.items():
        spells[chunk].append((since_s, np.inf, content))
    return spells


def check_of_plan(plan: Plan, timeline: Timeline) -> None:
    known = {step.id: step for step in plan.steps}
    for span in timeline.spans:
        step = known.get(span.step)
        if step is None or (step.queue, step.kind, step.chunk) != (span.queue, span.kind, span.chunk):
            of = "" if span.chunk is None else f" of chunk {span.chunk}"
            raise PstarError(
                f"the {timeline.source} timeline is not of this plan: its step {span.step}, a {span.kind.value}{of}, "
                "is not in the plan; give the plan that was run"
            )


class _Book:
    def __init__(self, plan: Plan) -> None:
        self._held = Holdings(plan.layout, plan.initial)
        self._lists = [(name, _OF_CATEGORY[category_of(name)]) for name in _lists_on_gpu(plan)]
        self._final: dict[int, list[int]] = defaultdict(list)  # moment -> chunks whose gradients are final after it
        for moment, chunk in overwritten_in_place(plan):
            self._final[moment].append(chunk)
        self._overwritten: set[int] = set()  # chunks whose working list holds gradients

    def advance(self, step: Step, *, begins: bool) -> tuple[int, ...]:
        """Returns the chunks that may have changed."""
        if begins:
            self._held.begin(step)
        else:
            self._held.end(step)
        if step.kind is Kind.COMPUTE and step.moment is not None and not begins:
            final = tuple(self._final.get(step.moment, ()))
            self._overwritten.update(final)
            return final
        if step.chunk is None:
            return ()
        if step.kind in UPDATES and not begins:
            self._overwritten.discard(step.chunk)
        return (step.chunk,)

    def content(self, chunk: int) -> int:
        """Returns an index into CONTENTS."""
        found = [content for name, content in self._lists if self._held.holds(chunk, name, Place.GPU)]
        most = max(found, default=AWAY)
        return GRAD if most == PARAM and chunk in self._overwritten else most


def _lists_on_gpu(plan: Plan) -> list[str]:
    lists = {r.list for r in plan.initial if r.chunk >= 0 and r.place is Place.GPU}
    lists |= {step.list for step in plan.steps if step.list is not None}
    return sorted(lists)
