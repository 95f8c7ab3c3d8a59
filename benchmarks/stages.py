"""Random jobs of random parallelism: planned, proved, simulated, replayed by other means, and damaged.

A job is a small GPT on 2 to 8 GPUs of random memory, with random degrees, schedule, micro-batches, policy and settings.
In one of five, unlike GPUs split its layers. Its set of plans is proved. The replay shares no code with simulator and
checker: it takes each step's seconds and computes when steps begin, as the longest path to them (every step behind the
step before it on its queue and behind those for which it waits, a meeting where the last of its steps could begin, and
behind each moment with sums over unlike GPUs a step that takes no time, where they meet). The hosts have DRAM without
limit, no link is shared, and collectives cost no compute, so that nothing but the order decides; then replay and
simulation agree to rounding. No set is faster than its bound (bounds/stages.py).

A mutant is a set with one mistake, of stages or of unlike GPUs. It is accepted if the proof holds. An accepted mutant
is played under random timings, and none may go over a budget, wait for ever, use more of a GPU than its proof says, or
end a sum over unlike GPUs on one of them before the others.

    python benchmarks/stages.py [--jobs 500] [--mutants 800] [--seed 40]    # writes benchmarks/results/stages.json
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from _results import write_result
from msgspec import structs

from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import BY_COLLECTIVES, Machine
from pstar_sim.core.checker.meetings import prove_set
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.plan_set import Meeting, PlanSet
from pstar_sim.core.step import Kind, Queue, Step
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import CostModel
from pstar_sim.errors import CannotPlan, DoesNotFit, PlanError, PstarError
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.stages import PlannedStages, plan_stages
from pstar_sim.policy.registry import can
from pstar_sim.sim.play import play_stages
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.pipeline import INTERLEAVED, SCHEDULES

AGREE = 1e-9
ITERATIONS = 8
POLICIES = ("all_on_gpu", "tide", "tide", "static_partition", "zero3_resident", "zero3_offload", "zero_offload")
MEMORY = ("1.25GB", "1.5GB", "2GB", "3GB", "40GB")
UNLIKE = ("a100-40", "v100-32", "rtx4090")
GROUPS = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (1, 1, 1), (2, 1, 1))
"""GPUs of each kind that split layers."""


def drawn(rng: random.Random) -> tuple[Job, Machine, Parallelism, str, Settings]:
    policy = rng.choice(POLICIES)
    shard = rng.choice((None, *can(policy).shards))
    machine, spread = (_unlike if rng.random() < 0.2 else _alike)(rng, shard)
    host = replace(machine.host, dram_bytes_per_s=1e18)
    ranks = tuple(replace(rank, root=None, link=replace(rank.link, duplex=True)) for rank in machine.ranks)
    job = Job(
        model=rng.choice(("gpt2", "gpt2-medium")),
        batch=spread.data_on(machine.world_size) * rng.choice((1, 2)),
        seq=rng.choice((32, 128)),
        micro_batches=spread.pipeline * rng.randint(1, 2) if spread.virtual > 1 else rng.randint(1, 5),
        checkpointing=rng.random() < 0.6,
        kernels=rng.choice(("eager", "fused", "megatron")),
        lora=rng.choice((None, None, None, 4)),
        optimizer=rng.choice((None, None, "adamw-8bit")),
    )
    settings = Settings(clip=rng.random() < 0.6, update=rng.choice(("step", "eager")))
    return (
        job,
        replace(machine, host=host, ranks=ranks, root_bytes_per_s=None, slowdowns={BY_COLLECTIVES: 1.0}),
        spread,
        policy,
        settings,
    )


def _unlike(rng: random.Random, shard: str | None) -> tuple[Machine, Parallelism]:
    counts = rng.choice(GROUPS)
    groups = rng.choice((1, 2))
    name = "+".join(f"{gpu}x{count * groups}" for gpu, count in zip(rng.sample(UNLIKE, len(counts)), counts))
    spread = Parallelism(tensor=sum(counts), context=rng.choice((1, groups)), shard=shard)
    return load_machine(name, gpu_memory=rng.choice(MEMORY)), spread


def _alike(rng: random.Random, shard: str | None) -> tuple[Machine, Parallelism]:
    gpus = rng.choice((2, 4, 8))
    tensor, stages = rng.choice(
        [(t, p) for t in (1, 2, 4) for p in (1, 2, 3, 4) if t * p <= gpus and gpus % (t * p) == 0]
    )
    sequence = tensor > 1 and rng.random() < 0.5
    schedule = rng.choice(SCHEDULES) if stages > 1 else SCHEDULES[0]
    virtual = rng.choice((2, 3)) if schedule == INTERLEAVED else 1
    spread = Parallelism(
        tensor=tensor, sequence=sequence, pipeline=stages, schedule=schedule, virtual=virtual, shard=shard
    )
    machine = rng.choice(("a100-40x8", "v100-32x8", "rtx4090x8"))
    return load_machine(machine, gpus=gpus, gpu_memory=rng.choice(MEMORY)), spread


def summed(plan: Plan) -> set[int]:
    """Moments that end with a sum over the GPUs that split layers."""
    return {n for n, m in enumerate(plan.workload.moments) if any(group == "tensor" for _, group, _ in m.collectives)}


def replayed(plans: PlanSet) -> float:
    """Returns the seconds of an iteration, by the longest path to each step."""
    seconds: dict[tuple[int, int], float] = {}
    behind: dict[tuple[int, int], list[tuple[tuple[int, int], int]]] = {}  # step -> (step, iterations back)
    group: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
    final: list[tuple[int, int]] = []
    for stage, plan in enumerate(plans.plans):
        costs = CostModel(plan.workload, plan.machine, plan.layout, rank=0).step_costs(plan).seconds
        with_sums = summed(plan) if plans.shares else set()
        # a step that ends with a sum -> the sum, behind it
        ends = {s.id: -1 - s.moment for s in plan.steps if s.kind is Kind.COMPUTE and s.moment in with_sums}
        last: dict[Queue, int] = {}
        firsts: dict[Queue, int] = {}
        for step, takes_s in zip(plan.steps, costs):
            me = (stage, step.id)
            seconds[me] = takes_s
            behind[me] = [((stage, ends.get(ref.id, ref.id)), ref.back) for ref in step.after]
            if step.queue in last:
                behind[me].append(((stage, last[step.queue]), 0))
            firsts.setdefault(step.queue, step.id)
            last[step.queue] = step.id
            if step.id in ends:
                end = (stage, ends[step.id])
                seconds[end], behind[end] = 0.0, [(me, 0)]
                group[end] = tuple((other, ends[step.id]) for other in range(len(plans.plans)))
                last[step.queue] = ends[step.id]
        for queue, first in firsts.items():
            behind[stage, first].append(((stage, last[queue]), 1))
        final.append((stage, last[Queue.COMPUTE]))
    for meeting in plans.meetings:
        for member in meeting.steps:
            group[member] = meeting.steps
    group = {me: group.get(me, (me,)) for me in seconds}
    order = sorted_groups(group, behind)
    ended: list[dict[tuple[int, int], float]] = []
    for k in range(ITERATIONS):
        now: dict[tuple[int, int], float] = {}
        for members in order:
            begin = 0.0
            for me in members:
                for other, back in behind[me]:
                    if back == 0:
                        begin = max(begin, now[other])
                    elif k:
                        begin = max(begin, ended[k - 1][other])
            over = begin + max(seconds[me] for me in members)
            now.update(dict.fromkeys(members, over))
        ended.append(now)
    return max(ended[-1][me] - ended[-2][me] for me in final)


def sorted_groups(group, behind):  # type: ignore[no-untyped-def]
    """Returns the groups of steps that begin together, each behind those for which it waits."""
    order, state = [], {}
    for root in group:
        stack = [(group[root], False)]
        while stack:
            members, left = stack.pop()
            if left:
                state[members] = 2
                order.append(members)
            elif members not in state:
                state[members] = 1
                stack.append((members, True))
                for me in members:
                    for other, back in behind[me]:
                        if not back and state.get(group[other]) != 2:
                            stack.append((group[other], False))
    return list(dict.fromkeys(order))


# -- mutants ----------------------------------------------------------------------------------------------------------


def _with_plan(plans: PlanSet, stage: int, plan: Plan) -> PlanSet:
    return replace(plans, plans=(*plans.plans[:stage], plan, *plans.plans[stage + 1 :]))


def _with_step(plans: PlanSet, stage: int, step: Step) -> PlanSet:
    plan = plans.plans[stage]
    return _with_plan(plans, stage, replace(plan, steps=tuple(step if s.id == step.id else s for s in plan.steps)))


def _trips(plans: PlanSet, *kinds: Kind) -> list[tuple[int, Step]]:
    return [(n, s) for n, plan in enumerate(plans.plans) for s in plan.steps if s.kind in kinds]


def drop_meeting(plans: PlanSet, rng: random.Random) -> PlanSet:
    left = rng.choice(plans.meetings)
    return replace(plans, meetings=tuple(m for m in plans.meetings if m is not left))


def swap_partners(plans: PlanSet, rng: random.Random) -> PlanSet:
    a, b = rng.sample([m for m in plans.meetings if len(m.steps) == 2], 2)
    swapped = {a: Meeting((a.steps[0], b.steps[1])), b: Meeting((b.steps[0], a.steps[1]))}
    return replace(plans, meetings=tuple(swapped.get(m, m) for m in plans.meetings))


def norm_without_a_stage(plans: PlanSet, rng: random.Random) -> PlanSet:
    norm = next(m for m in plans.meetings if len(m.steps) == len(plans.plans) and m is plans.meetings[-1])
    left = Meeting(tuple(s for s in norm.steps if s is not rng.choice(norm.steps[:1])))
    return replace(plans, meetings=(*plans.meetings[:-1], left))


def drop_trip(plans: PlanSet, rng: random.Random) -> PlanSet:
    stage, gone = rng.choice(_trips(plans, Kind.SEND, Kind.RECEIVE))
    plan = plans.plans[stage]
    steps = tuple(
        s.waiting_for(tuple(ref for ref in s.after if ref.id != gone.id)) for s in plan.steps if s.id != gone.id
    )
    return _with_plan(plans, stage, replace(plan, steps=steps))


def early_receive(plans: PlanSet, rng: random.Random) -> PlanSet:
    stage, step = rng.choice(_trips(plans, Kind.RECEIVE))
    return _with_step(plans, stage, step.waiting_for(()))


def early_send(plans: PlanSet, rng: random.Random) -> PlanSet:
    stage, step = rng.choice(_trips(plans, Kind.SEND))
    return _with_step(plans, stage, step.waiting_for(()))


def nothing_waits(plans: PlanSet, rng: random.Random) -> PlanSet:
    stage, gone = rng.choice(_trips(plans, Kind.SEND, Kind.RECEIVE))
    plan = plans.plans[stage]
    steps = tuple(s.waiting_for(tuple(ref for ref in s.after if ref.id != gone.id)) for s in plan.steps)
    return _with_plan(plans, stage, replace(plan, steps=steps))


def cross_on_queue(plans: PlanSet, rng: random.Random) -> PlanSet:
    stage = rng.randrange(len(plans.plans))
    plan = plans.plans[stage]
    queue = rng.choice((Queue.SEND, Queue.RECEIVE))
    a, b = sorted(rng.sample([n for n, s in enumerate(plan.steps) if s.queue is queue], 2))
    steps = list(plan.steps)
    steps[a], steps[b] = steps[b], steps[a]
    return _with_plan(plans, stage, replace(plan, steps=tuple(steps)))


def other_border(plans: PlanSet, rng: random.Random) -> PlanSet:
    stage, step = rng.choice(_trips(plans, Kind.SEND, Kind.RECEIVE))
    other = rng.choice([s for n, s in _trips(plans, step.kind) if n == stage and s.id != step.id])
    return _with_step(plans, stage, structs.replace(step, stash=other.stash))


def other_bytes(plans: PlanSet, rng: random.Random) -> PlanSet:
    stage, step = rng.choice(_trips(plans, Kind.SEND, Kind.RECEIVE))
    return _with_step(plans, stage, structs.replace(step, bytes=step.bytes + rng.choice((-1, 1))))


def _with_job(plans: PlanSet, kind: int, **changes: Any) -> PlanSet:
    plan = plans.plans[kind]
    return _with_plan(plans, kind, replace(plan, workload=replace(plan.workload, **changes)))


def end_before_others(plans: PlanSet, rng: random.Random) -> PlanSet:
    kind = rng.randrange(len(plans.plans))
    moments = list(plans.plans[kind].workload.moments)
    n = rng.choice(sorted(summed(plans.plans[kind])))
    moments[n] = replace(moments[n], collectives=())
    return _with_job(plans, kind, moments=tuple(moments))


def other_sum(plans: PlanSet, rng: random.Random) -> PlanSet:
    kind = rng.randrange(len(plans.plans))
    moments = list(plans.plans[kind].workload.moments)
    n = rng.choice(sorted(summed(plans.plans[kind])))
    by = rng.choice((-1, 1))
    sums = tuple((what, group, size + by * (group == "tensor")) for what, group, size in moments[n].collectives)
    moments[n] = replace(moments[n], collectives=sums)
    return _with_job(plans, kind, moments=tuple(moments))


def other_share(plans: PlanSet, rng: random.Random) -> PlanSet:
    a, b = rng.sample(range(len(plans.shares)), 2)
    shares = list(plans.shares)
    shares[a] = shares[a]._replace(parts=shares[a].parts - 1)
    shares[b] = shares[b]._replace(parts=shares[b].parts + 1)
    return replace(plans, shares=tuple(shares))


def plan_of_another_kind(plans: PlanSet, rng: random.Random) -> PlanSet:
    a, b = rng.sample(range(len(plans.plans)), 2)
    if plans.shares[a].parts == plans.shares[b].parts:
        raise ValueError("equal parts")
    return _with_plan(plans, a, plans.plans[b])


def compute_in_another_order(plans: PlanSet, rng: random.Random) -> PlanSet:
    kind = rng.randrange(len(plans.plans))
    plan = plans.plans[kind]
    computing = [n for n, s in enumerate(plan.steps) if s.queue is Queue.COMPUTE]
    steps, at = list(plan.steps), rng.randrange(len(computing) - 1)
    a, b = computing[at : at + 2]
    steps[a], steps[b] = steps[b], steps[a]
    return _with_plan(plans, kind, replace(plan, steps=tuple(steps)))


Mutation = Callable[[PlanSet, random.Random], PlanSet]
OF_STAGES: tuple[Mutation, ...] = (
    drop_meeting, swap_partners, norm_without_a_stage, drop_trip, early_receive, early_send, nothing_waits,
    cross_on_queue, other_border, other_bytes,
)  # fmt: skip
OF_KINDS: tuple[Mutation, ...] = (
    drop_meeting, norm_without_a_stage, end_before_others, other_sum, other_share, plan_of_another_kind,
    compute_in_another_order,
)  # fmt: skip


def _factor(factors: list[float], step: int, iteration: int) -> float:
    return factors[(step * 31 + iteration * 7) % len(factors)]


def broken(plans: PlanSet, rng: random.Random) -> str:
    """Plays an accepted mutant under random timings. Returns what went wrong; "" if nothing did."""
    reports = prove_set(plans)
    for _ in range(5):
        factors = [rng.choice((0.01, 0.3, 1.0, 3.0, 30.0)) for _ in range(97)]
        try:
            timelines = play_stages(plans, jitter=partial(_factor, factors))
        except PlanError as error:
            return str(error)
        for stage, (report, timeline) in enumerate(zip(reports, timelines)):
            if timeline.peak_bytes["gpu"] > report.peak_bytes["gpu"]:
                return f"stage {stage} takes {timeline.peak_bytes['gpu']} bytes"
        if plans.shares and len({tuple(sum_ends(*each)) for each in zip(plans.plans, timelines)}) > 1:
            return "a sum ends on one kind before it does on others"
    return ""


def sum_ends(plan: Plan, timeline: Timeline) -> Iterator[tuple[int, int, float]]:
    """(iteration, moment, second)"""
    moments = summed(plan)
    for span in timeline.spans:
        if span.kind is Kind.COMPUTE and span.moment in moments:
            yield span.iteration, span.moment, span.end_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--mutants", type=int, default=800)
    parser.add_argument("--seed", type=int, default=40)
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    begin = time.process_time()
    planned: list[PlannedStages] = []
    refused: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    worst, disagree, below = 0.0, 0, 0
    while len(planned) < asked.jobs:
        job, machine, spread, policy, settings = drawn(rng)
        try:
            found = plan_stages(job, machine, policy, spread, settings)
        except (DoesNotFit, CannotPlan) as error:
            refused[type(error).__name__] += 1
            continue
        except PstarError as error:
            refused[str(error)] += 1
            continue
        prove_set(found.plans)
        apart = abs(replayed(found.plans) / found.iteration_s - 1)
        worst, disagree = max(worst, apart), disagree + (apart > AGREE)
        if apart > AGREE:
            print(f"apart by {apart:.2e}: {policy} {spread} {job} {machine.gpu.memory_bytes} {settings}")
        below += found.lower_bound_s > found.iteration_s * (1 + AGREE)
        planned.append(found)
        parts = f" of {spread.virtual} parts" if spread.virtual > 1 else ""
        kinds[f"{policy}, {found.plans.count}{parts}"] += 1
    print(f"{len(planned)} sets proved; refused {dict(refused)}; {dict(kinds)}")
    print(
        f"replay and simulation apart by at most {worst:.2e}; {disagree} by more than {AGREE}; {below} below the bound"
    )
    sets = {
        OF_STAGES: [p.plans for p in planned if p.plans.parallelism.pipeline > 1],
        OF_KINDS: [p.plans for p in planned if p.plans.shares],
    }
    kinds_of_mistakes = [(mutation, every) for every in sets for mutation in every]
    made, accepted, bad = Counter[str](), Counter[str](), []
    while sum(made.values()) < asked.mutants:
        mutation, every = kinds_of_mistakes[sum(made.values()) % len(kinds_of_mistakes)]
        try:
            mutant = mutation(rng.choice(sets[every]), rng)
        except (ValueError, IndexError, StopIteration):  # this set has no such place
            continue
        made[mutation.__name__] += 1
        try:
            prove_set(mutant)
        except PstarError:
            continue
        accepted[mutation.__name__] += 1
        if said := broken(mutant, rng):
            bad.append(f"{mutation.__name__}: {said}")
    print(f"{sum(made.values())} mutants, accepted {dict(accepted)}, of these broken {len(bad)}: {bad[:5]}")
    print(f"{time.process_time() - begin:.0f} s of CPU")
    figures = {
        "sets": len(planned), "of_unlike": len(sets[OF_KINDS]), "refused": dict(refused), "kinds": dict(kinds),
        "apart": worst, "disagree": disagree, "below": below,
        "mutants": dict(made), "accepted": dict(accepted), "broken": bad,
    }  # fmt: skip
    if asked.jobs >= 500:
        print(write_result("stages", figures))
    if disagree or below or bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
