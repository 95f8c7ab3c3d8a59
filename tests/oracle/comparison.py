"""Random plans, and the comparison of two simulators on one plan; for test_oracle.py and benchmarks/oracle.py."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace

import first_edition
from msgspec import structs

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Ref
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import CannotPlan, DoesNotFit, PlanError
from pstar_sim.policy.passes.parts import in_parts
from pstar_sim.policy.registry import built_in
from pstar_sim.sim.play import Jitter, play
from pstar_sim.testing import random_jitter, random_machine, random_ranks, random_settings, random_workload

__all__ = ["both_refuse", "compare", "deadlocked", "differences", "jitter_of", "parted", "plans"]

SAME = 1e-9
SLOWDOWNS = ("compute_while_adam", "adam_while_compute", "adam_while_h2d", "h2d_while_d2h", "d2h_while_h2d")


def plans(seed: str) -> Iterator[tuple[int, Plan]]:
    """Yields endless (number, plan) of every policy on one to four equal ranks. Two machines in five have measured
    slow-downs, one in five has one link for both ways; DRAM is short or plentiful."""
    number = -1
    while True:
        number += 1
        rng = random.Random(f"{seed} {number}")
        workload = random_workload(rng)
        machine = random_ranks(rng, random_machine(rng, workload), rng.choice((1, 1, 1, 2, 4)))
        if rng.random() < 0.4:
            machine = replace(machine, slowdowns={name: rng.uniform(1, 2) for name in SLOWDOWNS if rng.random() < 0.7})
        policy = rng.choice(list(built_in().values()))
        try:
            yield number, policy(workload, machine, random_settings(rng))
        except (DoesNotFit, CannotPlan):
            continue


def parted(number: int, plan: Plan) -> Plan:
    """Returns the plan with the updates of random chunks in a random number of parts."""
    rng = random.Random(number)
    return in_parts(plan, {c.index: rng.choice((2, 3, 5)) for c in plan.layout.chunks if rng.random() < 0.8})


def jitter_of(number: int, plan: Plan) -> Jitter:
    """Returns random factors, the same for both simulators: such a plan hardly ever becomes steady."""
    return functools.cache(random_jitter(random.Random(number), plan))


def deadlocked(plan: Plan) -> Plan:
    """Returns the plan with a first step that waits for its last."""
    first = plan.steps[0]
    return replace(plan, steps=(structs.replace(first, after=(*first.after, Ref(plan.steps[-1].id))), *plan.steps[1:]))


def compare(plan: Plan, jitter: Jitter | None) -> list[str]:
    """Returns the differences of today's simulator from the frozen one."""
    most = 8 if jitter is None else 4
    return differences(
        play(plan, jitter=jitter, max_iterations=most), first_edition.play(plan, jitter=jitter, max_iterations=most)
    )


def both_refuse(plan: Plan) -> list[str]:
    """Returns the differences of the two errors for a plan that deadlocks: both have to name the same steps."""
    said = []
    for player in (play, first_edition.play):
        try:
            player(plan)
        except PlanError as error:
            said.append(str(error))
        else:
            said.append("no deadlock")
    return [] if said[0] == said[1] and "deadlocks" in said[0] else said


def differences(mine: Timeline, frozen: Timeline) -> list[str]:
    """Returns the differences in words. Seconds may differ by 1e-9 of the run, which adds the same seconds in another
    order."""
    longest_s = max(span.end_s for span in frozen.spans)

    def apart(a: float, b: float, scale_s: float) -> bool:
        return abs(a - b) > SAME * max(scale_s, abs(b))

    found = [
        f"{name}: {getattr(mine, name)} instead of {getattr(frozen, name)}"
        for name in ("iterations", "moved_bytes", "peak_bytes")
        if getattr(mine, name) != getattr(frozen, name)
    ]
    if apart(mine.iteration_s, frozen.iteration_s, 0.0):
        found.append(f"iteration_s: {mine.iteration_s} instead of {frozen.iteration_s}")
    for what in ("stall_s", "busy_s"):
        ours, theirs = getattr(mine, what), getattr(frozen, what)
        found += [
            f"{what} {key}: {ours.get(key)} instead of {theirs.get(key)}"
            for key in ours.keys() | theirs.keys()
            if apart(ours.get(key, 0.0), theirs.get(key, 0.0), longest_s)
        ]
    if len(mine.spans) != len(frozen.spans):
        return [*found, f"{len(mine.spans)} spans instead of {len(frozen.spans)}"]
    for a, b in zip(mine.spans, frozen.spans):
        same = (a.step, a.iteration, a.queue, a.kind, a.bytes, a.cause) == (
            b.step, b.iteration, b.queue, b.kind, b.bytes, b.cause
        )  # fmt: skip
        times = ((a.ready_s, b.ready_s), (a.start_s, b.start_s), (a.end_s, b.end_s))
        if not same or any(apart(x, y, longest_s) for x, y in times):
            found.append(f"{a} instead of {b}")
            break
    return found
