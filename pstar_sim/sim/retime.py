"""Simulated seconds of a plan, given each step's measured seconds.

A prediction is wrong because steps last longer than the cost model says, or queues work together otherwise than
simulated. With the run's steps only the second is left; they include what queues lose by sharing a link or host memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Queue, Step
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import Add, CostModel, GpuAdds, UpdateAdds
from pstar_sim.errors import PlanError
from pstar_sim.sim.play import play


class _OneSecond(CostModel):
    """Every step lasts one second and shares nothing: factors of `play`'s jitter are seconds."""

    def seconds(self, step: Step) -> float:
        return 1.0

    def dram_bytes(self, step: Step) -> int:
        return 0

    @cached_property
    def gpu_adds(self) -> GpuAdds:
        """The seconds of the moments contain the adds."""
        return GpuAdds(self.workload, self.layout, 1.0, lambda tensor: 0, free=True)

    @cached_property
    def update_adds(self) -> UpdateAdds:
        """The seconds of an update contain the adds."""
        return _NoAdds(self, 1.0)


class _NoAdds(UpdateAdds):
    def of(self, plan: Plan) -> Mapping[int, Add]:
        return {}


def retime(plan: Plan, measured: Timeline) -> float:
    """Median per iteration, with the measured steps.

    The first of several does not count. Raises PlanError if `measured` lacks a step, or the plan's ranks differ (each
    has its own).
    """
    took_s = {(span.step, span.iteration): span.end_s - span.start_s for span in measured.spans}
    last = measured.iterations - 1
    for step in plan.steps:
        for iteration in range(measured.iterations):
            if (step.id, iteration) not in took_s:
                raise PlanError(f"step {step.id} of iteration {iteration} was not measured")
    machine = replace(plan.machine, slowdowns={}, framework=None)
    machine = replace(
        machine, ranks=tuple(replace(rank, link=replace(rank.link, duplex=True)) for rank in machine.ranks)
    )
    alone = replace(plan, machine=machine, ranked=None)
    timeline = play(
        alone,
        cost=_OneSecond(plan.workload, machine, plan.layout),
        jitter=lambda step, iteration: took_s[step, min(iteration, last)],
        max_iterations=max(2, measured.iterations),
    )
    ends = [0.0] * timeline.iterations
    for span in timeline.spans:
        if span.queue is Queue.COMPUTE:
            ends[span.iteration] = max(ends[span.iteration], span.end_s)
    return statistics.median(b - a for a, b in pairwise(ends))
