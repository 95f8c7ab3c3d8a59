"""When a job's chunks are read and their gradients arrive, and the tide, once per workload and layout."""

from __future__ import annotations

from functools import cached_property

from pstar_sim.core.layout import Layout
from pstar_sim.dtypes import STORAGE
from pstar_sim.errors import CannotPlan
from pstar_sim.workload.workload import Workload


def facts_of(workload: Workload, layout: Layout) -> Facts:
    """The same two objects give the same facts."""
    key = ("facts", id(layout))  # which they keep, so no other layout has its id
    known = workload.derived.get(key)
    if not isinstance(known, Facts):
        workload.derived[key] = known = Facts(workload, layout)
    return known


class Facts:
    """reads: chunk -> ascending moments that read a parameter of it.
    final: (micro-batch, tensor) -> moment of its last gradient.
    spans: chunk -> (micro-batch, first moment, last) of its final gradients, per micro-batch.
    """

    def __init__(self, workload: Workload, layout: Layout) -> None:
        self.workload = workload
        self.layout = layout
        chunk_of = layout.chunk_of
        moments = workload.moments
        count = len(layout.chunks)
        reads: list[list[int]] = [[] for _ in range(count)]
        for m, chunks in enumerate(self.read_in):
            for c in chunks:
                reads[c].append(m)
        self.final: dict[tuple[int, int], int] = {}
        for m, gradients in enumerate(workload.gradients):
            for t in gradients:
                self.final[moments[m].micro_batch, t] = m
        spans: list[dict[int, tuple[int, int]]] = [{} for _ in range(count)]
        for (batch, t), m in self.final.items():
            mine = spans[chunk_of[t]]
            first, last = mine.get(batch, (m, m))
            mine[batch] = (min(first, m), max(last, m))
        self.reads = tuple(map(tuple, reads))
        self.spans = tuple(tuple((batch, *mine[batch]) for batch in sorted(mine)) for mine in spans)

    def check(self) -> None:
        """Raise CannotPlan for a read after the last gradient has overwritten the parameter."""
        if self._read_too_late is not None:
            tensor, moment, gradient = self._read_too_late
            raise CannotPlan(
                f"parameter {self.workload.tensors[tensor].name!r} is read in moment {moment} "
                f"({self.workload.moments[moment].name}), after its last gradient in moment {gradient}: a gradient "
                "overwrites its parameter, so no policy can plan this workload"
            )

    @cached_property
    def _read_too_late(self) -> tuple[int, int, int] | None:
        last_batch = max((batch for batch, _ in self.final), default=0)
        for m, reads in enumerate(self.workload.reads):
            for t in reads:
                if m > self.final.get((last_batch, t), m):
                    return t, m, self.final[last_batch, t]
        return None

    @cached_property
    def read_in(self) -> tuple[frozenset[int], ...]:
        chunk_of = self.layout.chunk_of
        return tuple(frozenset(chunk_of[t] for t in tensors) for tensors in self.workload.reads)

    @cached_property
    def touched(self) -> tuple[tuple[int, ...], ...]:
        """Chunk -> ascending moments with its working list on the GPU: every read, and from the first final gradient of
        the last micro-batch, which overwrites the list, to the last (or a later read)."""
        # Once the first gradient of its last micro-batch has overwritten a part of a working list, the list holds bytes
        # that exist nowhere else. It stays until the last gradient has arrived and the list can be written back.
        rows: list[tuple[int, ...]] = []
        for reads, spans in zip(self.reads, self.spans):
            if not spans:
                rows.append(reads)
                continue
            _, first, last = spans[-1]
            until = max(last, reads[-1] if reads else -1)
            rows.append((*(m for m in reads if m < first), *range(first, until + 1)))
        return tuple(rows)

    @cached_property
    def by_moment(self) -> tuple[tuple[int, ...], ...]:
        """Moment -> ascending chunks with their working list on the GPU."""
        needs: list[list[int]] = [[] for _ in self.workload.moments]
        for c, moments in enumerate(self.touched):
            for m in moments:
                needs[m].append(c)
        return tuple(map(tuple, needs))

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Ascending chunks that are read and get gradients."""
        return tuple(c for c, reads in enumerate(self.reads) if reads and self.spans[c])

    @cached_property
    def only_read(self) -> tuple[int, ...]:
        return tuple(c for c, reads in enumerate(self.reads) if reads and not self.spans[c])

    @cached_property
    def every_batch(self) -> bool:
        """Each chunk of `trained` gets a gradient in every micro-batch."""
        return all(len(self.spans[c]) == self.workload.micro_batches for c in self.trained)

    @cached_property
    def read_bytes(self) -> tuple[int, ...]:
        """Working lists that each moment reads, all slices."""
        return tuple(sum(map(self.layout.whole_bytes, chunks)) for chunks in self.read_in)

    def width(self, chunk: int) -> int:
        return STORAGE[self.layout.chunks[chunk].dtype].bytes

    def reads_until_final(self, chunk: int) -> tuple[int, ...]:
        """Moments that read the chunk, up to its last gradient; all of them if it has none."""
        final = self.last_gradient(chunk)
        return self.reads[chunk] if final < 0 else tuple(m for m in self.reads[chunk] if m <= final)

    def updated(self, chunk: int) -> bool:
        return bool(self.spans[chunk])

    def first_use(self, chunk: int) -> int:
        """The first moment that needs the chunk, len(moments) if none does."""
        return self.touched[chunk][0] if self.touched[chunk] else len(self.workload.moments)

    def last_gradient(self, chunk: int) -> int:
        """The moment after which all gradients are final, -1 without one."""
        return self.spans[chunk][-1][2] if self.spans[chunk] else -1

    def home_lists(self, chunk: int) -> tuple[str, ...]:
        """Lists that a chunk keeps all the time where it lives: working list and, if updated, states (with several
        micro-batches also grad32)."""
        if not self.updated(chunk):
            return ("param",)
        accumulated = ("grad32",) if self.workload.micro_batches > 1 else ()
        return ("param", *self.layout.states_of(chunk).names, *accumulated)

    def home_bytes(self, chunk: int) -> int:
        """Of `home_lists`, of one rank's slice."""
        return sum(self.layout.payload_bytes(chunk, name) for name in self.home_lists(chunk))

    @cached_property
    def tide(self) -> tuple[int, ...]:
        """Non-model bytes assumed for each moment: the cut counts the last moment's peak ([Note: the cut]), and every
        moment the difference if the first's is lower."""
        peaks = [m.peak_bytes for m in self.workload.moments]
        extra = max(0, peaks[-1] - peaks[0])
        return tuple(peak + extra for peak in peaks)
