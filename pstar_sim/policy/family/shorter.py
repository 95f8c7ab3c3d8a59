"""Attempts in a job with fewer micro-batches.

[Note: a shorter job] Micro-batches but the first and last do the same work with the same chunks, so an attempt soon
gets into a steady state. So it is made with SHOWN micro-batches, plus the middle one's seconds for each left out. A
queue with more work per micro-batch than the middle one lasts falls behind in each, until the others wait for it, so
one left out counts at least its busiest queue's work. Plans are made in the whole job (`Search.whole`).

In a steady state, seconds are those of the whole job to 1e-5. With few micro-batches, a queue may fall behind until the
end, and none waits for it: the seconds are too many, so jobs under FEWEST are not shortened. Behind a barrier updates
wait for every queue that brings gradients, so FEWEST_BEHIND_BARRIER suffice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pstar_sim.core.choose import Window
from pstar_sim.core.draft import Draft
from pstar_sim.core.step import Queue
from pstar_sim.errors import TraceError
from pstar_sim.policy.kit.job import Job
from pstar_sim.workload.workload import Workload, repeat_micro_batch, single_micro_batch

# Number of micro-batches of a shorter job. With 4, the middle micro-batch is sometimes not in the steady state yet, and
# seconds differ by 1 to 5 %.
SHOWN = 5
# Fewest micro-batches of a job whose attempts are made in a shorter job: without a barrier, and with a barrier.
FEWEST, FEWEST_BEHIND_BARRIER = 12, 8


def shorter(workload: Workload, *, barrier: bool) -> Workload | None:
    """None for too few, different or interleaved ones, and for stashes.

    barrier: updates wait for the last one's end.
    """
    fewest = FEWEST_BEHIND_BARRIER if barrier else FEWEST
    if workload.micro_batches < fewest or not workload.order.one_by_one or workload.stashes:
        return None
    try:
        return repeat_micro_batch(single_micro_batch(workload), SHOWN)
    except TraceError:
        return None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The middle one stands for each.

    work_s: nominal, of the middle.
    link_s: nominal, of the busier direction, or both on a shared link.
    fetched_bytes: of the middle.
    begin, end: ops of the compute queue where the middle and the next begin.
    """

    times: int
    work_s: Mapping[Queue, float]
    link_s: float
    fetched_bytes: int
    begin: int
    end: int

    @property
    def least_s(self) -> float:
        return self.times * max(self.link_s, *self.work_s.values())

    def seconds(self, window: Window) -> float:
        """window: of the shorter job."""
        return max(self.least_s, self.times * (window.starts_s[self.end] - window.starts_s[self.begin]))


def left_out_of(job: Job, draft: Draft, times: int) -> LeftOut:
    batches = [m.micro_batch for m in job.workload.moments]
    middle = SHOWN // 2
    first, behind = (job.block_of[batches.index(number)] for number in (middle, middle + 1))
    begin = end = ops = 0
    inside = False
    work_s, fetched_bytes = dict.fromkeys(Queue, 0.0), 0
    for row in draft.rows:
        if row.is_position and row.block == first:
            begin, inside = ops, True
        elif row.is_position and row.block == behind:
            end = ops
            break
        ops += row.queue is Queue.COMPUTE and row.behind is None
        if inside:
            work_s[row.queue] += row.charge.seconds
            fetched_bytes += row.charge.gpu_take if row.queue is Queue.H2D else 0
    up_s, down_s = work_s[Queue.H2D], work_s[Queue.D2H]
    link_s = max(up_s, down_s) if draft.rates.duplex else up_s + down_s
    return LeftOut(times, work_s, link_s, fetched_bytes, begin, end)
