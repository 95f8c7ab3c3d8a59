"""Facts of several ranks for the bounds: the seconds of each kind of rank, and the collectives of one rank.

[Note: the bound of several ranks] All ranks run the same steps, so the bound is the largest bound of one rank over the
kinds of ranks (GPU, link and workload). A rank's lists are its slices, 1/P of each chunk, and its CPU Adam, its copies
and its states are those of the slices. With L ranks per node, a rank has 1/L of the cores and of host DRAM. If all
ranks do the same at the same time, a PCIe switch passes each of them an equal part; otherwise the link counts as
unshared. Every row of pinned.py, joint.py and fluid.py holds for the slices. Also:

- A moment reads whole chunks. So K_t, and the bytes read again behind a turn, count all slices; one without room is
  copied up again (this rank's) or gathered again.
- Each updated chunk is gathered once per iteration, after its update and before its first read. The slices of frozen
  chunks are gathered if they are not kept over the border.
- sums over the ranks: the gradients of each micro-batch are summed once (a reduce-scatter), unless they add up with
  those of the next (ZeRO-1). Whole sums then stay on the GPU from one backward pass to the next, and as many seconds of
  collectives are saved as sums have room there beside what moments read; in joint.py (`later`) also beside pinned
  states, own sums and what a turn keeps. There the own slices add up on the GPU, too, which adds whole gradients.
- net: all collectives follow one another on one queue (`CostModel.collective_s`).
- sums on the GPU: a slice's sum goes down with all its gradients in it. The checker refuses a plan in which CPU Adam
  adds a gradient to a sum that came from the GPU.
- windows: the shortest sum comes before the first copy down of J_j or its first update on the GPU, and the shortest
  gather after the last copy up or update. All last sums and all gathers of J_j follow one another in the window.
- compute and net: compute takes `Rates.compute_while_net` times as long while a collective runs ([Note: compute beside
  collectives] in core/rules.py). So of the seconds of the collectives the part 1 - 1 / compute_while_net is lost to
  compute: T >= compute + that part of net. A machine with other measured factors has no such term.
- clipping: no update begins before all sums.

Over time (fluid.py): in N seconds of collectives compute gets N / compute_while_net done, so an interval's moments,
updates and adds on the GPU take at most its seconds less lost N. Others' slices lie on the GPU from a last gradient to
its sum, from a gather to the first read, and between two reads or are gathered again. With clipping a point behind the
last moment parts sums from updates.

A layout that is not sliced (plain data parallelism) has no gathers of parameters: each last gradient is summed and
gathered at least once per iteration, and a rank updates whole chunks. As in the model, collectives slow down no copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Layout
from pstar_sim.cost import CostModel, cost_of
from pstar_sim.policy.kit.facts import Facts
from pstar_sim.sim.several_ranks import classes_of
from pstar_sim.workload.workload import Workload

Array = NDArray[np.float64]


def costs_of_ranks(
    workload: Workload, machine: Machine, layout: Layout, ranked: Sequence[Workload] | None = None
) -> list[CostModel]:
    """ranked: each rank's own workload, if these differ."""
    classes = classes_of(machine, ranked)
    if len(set(classes)) == 1:
        return [cost_of(workload if ranked is None else ranked[0], machine, layout)]
    first = [classes.index(kind) for kind in sorted(set(classes))]
    return [CostModel(workload if ranked is None else ranked[r], machine, layout, rank=r) for r in first]


class NetFacts:
    """All zero with one rank.

    reduce_s: per chunk in `job.trained`, of the last sum.
    gather_s: likewise, after the update.
    each_time_s: of all updated chunks, summed in every micro-batch.
    saved_s, saves: seconds, and seconds per byte of others' slices of whole sums between two micro-batches, that these
        save at most, of `most_saved_s`.
    updates_s: of all updated chunks, if such sums alone have the room.
    add_s: of compute, at least, per byte of them.
    own: bytes of them per own parameter, and those of padding.
    byte_s: per byte gathered once more.
    lost: share of collectives that compute loses.
    others: chunk -> bytes without padding.
    most_others: largest share of a chunk.
    frozen_bytes: others' slices of chunks only read.
    """

    def __init__(self, job: Facts, cost: CostModel, rooms: Sequence[float]) -> None:
        """rooms: bytes for sums between each micro-batch and the next."""
        layout = job.layout
        chunks = [*job.trained, *job.only_read]
        whole = {c: layout.chunks[c].params * job.width(c) for c in chunks}
        self.others = {c: whole[c] - layout.own_params[c] * job.width(c) for c in chunks}
        self.frozen_bytes = float(sum(self.others[c] for c in job.only_read))
        self.most_others = max((self.others[c] / whole[c] for c in chunks if whole[c]), default=0.0)
        together = cost.machine.data_parallel_size > 1
        once_s = {c: cost.collective_s(layout.whole_bytes(c), c) if together else 0.0 for c in chunks}
        sliced = layout.ranks > 1
        each = np.array([once_s[c] for c in job.trained], dtype=float)
        summed = [cost.reduce_s(layout.whole_bytes(c), c) if together else 0.0 for c in job.trained]
        self.reduce_s: Array = np.array(summed, dtype=float) if sliced else 2 * each
        self.gather_s: Array = each if sliced else 0 * each
        self.each_time_s = self.updates_s = float((self.reduce_s + self.gather_s).sum())
        self.saved_s = self.saves = self.most_saved_s = self.most_sums = self.add_s = 0.0
        if sliced and rooms:
            sums = np.array([max(1, layout.payload_bytes(c, "grad32_remote")) for c in job.trained], dtype=float)
            self.most_saved_s, self.most_sums = float(self.reduce_s.sum()), float(sums.sum())
            self.saved_s, self.saves = _most_saved(self.reduce_s, sums)
            adds_s = cost.gpu_adds.whole_s()
            self.add_s = min(adds_s.get(c, 0.0) / size for c, size in zip(job.trained, sums)) / len(rooms)
            beside = (layout.ranks - 1) * min(layout.sum_width(c) for c in job.trained)
            own = np.array([cost.params[c] for c in job.trained], dtype=float)
            self.own = float(beside), float(np.maximum(0.0, sums - beside * own).sum())
            self.each_time_s += len(rooms) * self.most_saved_s
            self.updates_s = self.each_time_s - sum(map(self._saved_beside, rooms))
        self.lost = 1 - 1 / cost.rates().compute_while_net
        self.byte_s = min((once_s[c] / size for c, size in self.others.items() if size), default=0.0)

    def _saved_beside(self, room: float) -> float:
        return min(self.most_saved_s, self.saved_s + self.saves * room)


def _most_saved(seconds: Array, sizes: Array) -> tuple[float, float]:
    """(seconds, seconds per byte) of a line over bytes that is never below the seconds of the sums, or of parts of
    them, that take so many: through the middle of all seconds, most per byte first."""
    order = np.argsort(-seconds / sizes, kind="stable")
    upto_s, upto = np.cumsum(seconds[order]), np.cumsum(sizes[order])
    at = int(np.searchsorted(upto_s, upto_s[-1] / 2))
    per_byte_s = float(seconds[order[at]] / sizes[order[at]])
    return float(upto_s[at]) - per_byte_s * float(upto[at]), per_byte_s
