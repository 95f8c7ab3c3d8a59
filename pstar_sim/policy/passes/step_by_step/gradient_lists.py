"""Gradient lists.

A list opens when a gradient's first part arrives; complete, it is summed over the ranks, and added on the GPU, or on
the host for several micro-batches. passes/gradient_rows.py does the same for the asynchronous family.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from pstar_sim.core.step import Place, Queue
from pstar_sim.errors import CannotPlan
from pstar_sim.policy.kit.facts import Facts
from pstar_sim.policy.passes.builder import Builder


def arrivals(
    uses: Facts, chunks: Iterable[int], *, last: bool = True
) -> tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]]:
    """Moment -> chunks whose gradient begins to arrive, and moment -> chunks whose gradient is complete after it.

    last: with each chunk's last.
    """
    opens: dict[int, list[int]] = {}
    closes: dict[int, list[int]] = {}
    for c in chunks:
        for _, first, final in uses.spans[c] if last else uses.spans[c][:-1]:
            opens.setdefault(first, []).append(c)
            closes.setdefault(final, []).append(c)
    return opens, closes


class GradientLists:
    """Writes the steps of the gradients of `chunks` into `b`.

    last: a chunk's last gradient has a list too, else it overwrites the working list.
    stay: on the GPU, on one rank without lists, added in place.
    whole: so they are on several, before they are summed over the ranks.
    one_by_one: each step waits for the one before, and no other.
    add_last: a last gradient without a list is added to the others before any update, for clipping's norm
        (`add_last_of`).
    opens: moment -> chunks whose lists open.
    closes: moment -> chunks whose gradient in a list is complete after it.
    host_list: where Adam on the host finds a gradient.
    freed: chunk -> step that last freed its lists on the GPU.
    added: chunk -> step after which its sum on the host is up to date.

    Raises CannotPlan for a layer-major workload, where a chunk's lists would overlap.
    """

    def __init__(
        self,
        b: Builder,
        chunks: Iterable[int],
        *,
        last: bool = True,
        stay: Collection[int] = (),
        whole: bool = False,
        one_by_one: bool = False,
    ) -> None:
        self._b = b
        self._stay = frozenset(stay)
        self._one_by_one = one_by_one
        self._several = b.workload.micro_batches > 1
        self._names = ("grad", "grad_remote") if b.layout.ranks > 1 else ("grad",)
        self._add_first = whole or b.layout.ranks == 1
        listed = [c for c in chunks if not self._add_first or c not in self._stay]
        if listed and not b.workload.order.sums_leave_gpu:
            raise CannotPlan(
                f"{b.policy} takes gradients one after the other; a {b.workload.order} workload is for l2l, tide, "
                "static_partition and optimal"
            )
        self.chunks = frozenset(listed)
        self.add_last = not last and self._several and b.settings.clip
        self.opens, self.closes = arrivals(b.uses, listed, last=last)
        self.host_list = "grad32" if self._several else "grad"
        self.freed: dict[int, int] = {}
        self.added: dict[int, int] = {}
        self._latest_sums: dict[str, int] = {}  # "ranks" or "host" -> the latest sum there

    # Bytes.

    def bytes_of(self, c: int) -> int:
        """On the GPU, while they are open."""
        return sum(self._b.layout.payload_bytes(c, name) for name in self._names)

    def passing_bytes(self, c: int) -> int:
        """Of a gradient that waits on the host to be added, 0 if none does."""
        return self._b.layout.payload_bytes(c, "grad") if self._several and c not in self._stay else 0

    @property
    def on_host(self) -> str:
        """Words for the gradients on the host."""
        return "accumulated gradients, gradients" if self._several else "gradients"

    # Steps.

    def open(self, c: int, m: int, after: Iterable[int] = ()) -> int:
        """Opens the lists in moment `m`; returns the step that opens the last."""
        waits = [*after, *self._earlier(self.freed, c)]
        return [self._b.alloc(Queue.COMPUTE, c, name, Place.GPU, m, after=waits) for name in self._names][-1]

    def close(self, c: int, m: int, after: Sequence[int]) -> int:
        """Moves the gradient, complete after moment `m`, to the place of its update. Returns the step after which it is
        there and its lists are free."""
        summed = self.sum(c, m, after)
        if c in self._stay:
            return self.keep(c, m, summed)
        self.send(c, m, summed)
        return self.add(c, m)

    def sum(self, c: int, m: int, after: Sequence[int], list_name: str = "grad_remote") -> Sequence[int]:
        """Over the ranks; returns the steps after which it is complete (on one rank `after`), once accumulated if it is
        whole until then.

        list_name: "remote" for one in the working list.
        """
        b = self._b
        if b.layout.ranks > 1 and not (self._add_first and c in self._stay):
            step = b.reduce_scatter(c, m, after, list_name)
        elif b.ranks > 1 and c in self._stay and m == b.uses.last_gradient(c):
            step = self._sum_accumulated(c, m, after)
        else:
            return after
        self._latest_sums["ranks"] = step
        return [step]

    def _sum_accumulated(self, c: int, m: int, after: Sequence[int]) -> int:
        b = self._b
        if b.layout.ranks == 1:
            own = "grad32" if self._several else "param"
            return b.gather(c, m, [b.reduce_scatter(c, m, after, own)], own)
        step = b.reduce_scatter(c, m, after, "grad32_remote" if self._several else "remote")
        return b.alloc(Queue.NET, c, "grad32_remote", Place.GPU, m, [step]) if self._several else step

    def keep(self, c: int, m: int, after: Iterable[int]) -> int:
        """Frees the list of a gradient once added to its sum on the GPU."""
        self.freed[c] = self._b.free(Queue.NET, c, "grad", Place.GPU, m, after)
        return self.freed[c]

    def send(
        self, c: int, m: int, after: Iterable[int], *, size_bytes: int | None = None, via: str | None = None
    ) -> int:
        """Copies the gradient to the host, after the sum there. Returns the copy; `freed` then names the step that
        frees the list."""
        waits = [*after, *self._earlier(self.added, c)]
        down = self._b.writeback(c, "grad", m, waits, size_bytes=size_bytes, via=via)
        self.freed[c] = self._b.free(Queue.D2H, c, "grad", Place.GPU, m)
        return down

    def add(self, c: int, m: int, after: Iterable[int] = ()) -> int:
        """Adds the gradient to those of earlier micro-batches, on the host. Returns the step after which Adam there may
        take it (with one: its arrival)."""
        if not self._several:
            return self.freed[c]
        step = self._b.cpu_add(c, "grad", m, after=[self.freed[c], *after])
        self.added[c] = self._latest_sums["host"] = step
        return step

    def add_last_of(self, c: int, after: Iterable[int]) -> int:
        """Which came in the working list, to the others on the host."""
        return self._b.cpu_add(c, "param", self._b.uses.last_gradient(c), after)

    def _earlier(self, steps: Mapping[int, int], c: int) -> list[int]:
        return [steps[c]] if c in steps and not self._one_by_one else []

    def all_there(self) -> list[int]:
        """What every update waits for, once all moments are written: the latest sum on the host, with clipping also
        over the ranks, because the norm is of all."""
        wanted = ("host", "ranks") if self._b.settings.clip else ("host",)
        return [self._latest_sums[name] for name in wanted if name in self._latest_sums]
