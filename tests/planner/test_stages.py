"""Stages planned one by one and simulated together, beside formulas and with meetings that are missing or swapped."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.bounds.stages import stages_bound_s
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Fabric, Group, Machine, Neighbour
from pstar_sim.catalog.model_shapes import ExpertsShape, model_entry
from pstar_sim.cli import main
from pstar_sim.core.checker.meetings import prove_set
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.plan_set import Meeting, PlanSet, Share, meetings_of, sums_of
from pstar_sim.core.set_file import read_plans, save_set
from pstar_sim.core.step import Kind, Place, Queue, Ref
from pstar_sim.core.workspace import WORKSPACE, workspace_bytes
from pstar_sim.cost import CostModel, cost_of, expected_link
from pstar_sim.errors import CannotPlan, DoesNotFit, ModelError, PlanError, PstarError
from pstar_sim.planner.cheapest import Cheapest, cheapest
from pstar_sim.planner.compare import compare
from pstar_sim.planner.grid import load_grid
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.limits import Limit, deeper, max_model
from pstar_sim.planner.stages import PlannedStages, _with_waits, examine_set, plan_stages, planned_again
from pstar_sim.planner.stages_closed import Closed
from pstar_sim.planner.stages_compared import _Waiting, compare_stages, least_s
from pstar_sim.planner.stages_cut import Cut
from pstar_sim.planner.stages_degrees import Way, ways_of, ways_to_spread
from pstar_sim.planner.stages_machines import machine_of_stage
from pstar_sim.planner.stages_shortages import stages_shortage
from pstar_sim.planner.sweep import sweep
from pstar_sim.policy.family.asynchronous import Asynchronous
from pstar_sim.policy.registry import STAGED, find_policy
from pstar_sim.report.capacity_tables import cheapest_text
from pstar_sim.report.stages import explain_stages, stages_figure, stages_text
from pstar_sim.sim.play import play_stages
from pstar_sim.testing import round_machine
from pstar_sim.units import format_bytes
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.pipeline import Part, cells_of, in_schedule
from pstar_sim.workload.presets import preset, workload_of
from pstar_sim.workload.tape import Tape
from pstar_sim.workload.workload import Phase, Workload

MIB = 2**20


def chain_part(number: int, parts: int) -> Part:
    """One block: a second forward, two seconds backward, 1,024 parameters, borders of 1 MiB."""
    t = Tape("bf16")
    t.parameter(f"h.{number}.weight", 32, 32)
    t.open("begin", "<root>", Phase.FWD)
    if number:
        t.receive("activations", MIB)
    t.open("begin", f"h.{number}", Phase.FWD, [f"h.{number}.weight"])
    t.op(MIB)
    if number < parts - 1:
        t.send("activations", MIB)
    t.open("grad", "<root>", Phase.BWD)
    if number < parts - 1:
        t.receive("gradients", MIB)
    t.open("grad", f"h.{number}", Phase.BWD, [f"h.{number}.weight"])
    t.gradient([f"h.{number}.weight"], allocated=False)
    t.open("backward-end", "<root>", Phase.BWD)
    if number:
        t.send("gradients", MIB)
    t.close()
    seconds = {f"begin:h.{number}": 1.0, f"grad:h.{number}": 2.0}
    one = Workload(
        model="chain", dtype="bf16", batch=1, sequence=1, micro_batches=1, checkpointing=False, attention="none",
        source="recorded", recorded_on="virtual", tensors=tuple(t.tensors), uses=tuple(t.uses),
        moments=tuple(replace(m, duration_s=seconds.get(m.name, 0.0)) for m in t.moments),
    )  # fmt: skip
    return one, t.crossings


def stages_of(job: Job, machine: Machine, parallelism: Parallelism, **shape: Any) -> list[Workload]:
    return Cut(job=job, machine=machine, parallelism=parallelism, **shape).workloads


def chain_machine(number: int, stages: int, seconds: float) -> Machine:
    """seconds: of a border's transfer; 0 for no time."""
    rate = MIB / seconds if seconds else 1e18
    fabric = Fabric(name="wire", bytes_per_s=rate, latency_s=0.0, measured=True, source="")
    near = tuple(Neighbour(stage=n, fabric=fabric) for n in range(stages) if n != number)
    return replace(round_machine(hbm_bytes_per_s=1e15), neighbours=near)


def chain(
    stages: int, micro_batches: int, schedule: str = "1f1b", *, v: int = 1, seconds: float = 0.0, clip: bool = True
) -> PlanSet:
    parts = [chain_part(n, stages * v) for n in range(stages * v)]
    cells = cells_of(schedule, stages, micro_batches, v)
    plans = [
        find_policy("all_on_gpu")(
            in_schedule(parts[n::stages], cells, n),
            chain_machine(n, stages, seconds),
            Settings(clip=clip, update="step"),
        )
        for n in range(stages)
    ]
    one = Parallelism(pipeline=stages, schedule=schedule, virtual=v)
    return PlanSet(parallelism=one, plans=tuple(plans), meetings=meetings_of(plans))


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (3, 3), (4, 8), (4, 2)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bubble_is_that_of_the_formula(stages: int, micro_batches: int, schedule: str) -> None:
    """With links that take no time, m + p - 1 turns of three seconds."""
    plans = chain(stages, micro_batches, schedule)
    prove_set(plans)
    assert stages_bound_s(plans) == pytest.approx(3.0 * (micro_batches + stages - 1))
    assert [t.iteration_s for t in play_stages(plans)] == pytest.approx([3.0 * (micro_batches + stages - 1)] * stages)


@pytest.mark.parametrize(("stages", "v", "micro_batches"), [(2, 2, 4), (2, 3, 2), (3, 2, 6), (4, 2, 4), (4, 4, 8)])
def test_the_bubble_of_interleaved_stages_is_a_part_of_it(stages: int, v: int, micro_batches: int) -> None:
    """(p - 1) (F + B) / v: a stage's v parts take three seconds each, for each micro-batch, and p - 1 times more."""
    plans = chain(stages, micro_batches, "interleaved", v=v)
    prove_set(plans)
    wanted = 3.0 * (v * micro_batches + stages - 1)
    assert stages_bound_s(plans) == pytest.approx(wanted)
    assert [t.iteration_s for t in play_stages(plans)] == pytest.approx([wanted] * stages)


def test_a_slow_border_adds_its_seconds_where_nothing_hides_them() -> None:
    """Two stages, one micro-batch: forward 1 s, half a second on the way, 1 + 2 s, half a second back, 2 s."""
    (one, other) = play_stages(chain(2, 1, seconds=0.5))
    assert one.iteration_s == pytest.approx(7.0) and other.iteration_s == pytest.approx(7.0)
    assert one.stall_s == pytest.approx({"receive": 0.5, "stages": 3.5})
    assert stages_bound_s(chain(2, 1, seconds=0.5)) == pytest.approx(7.0)


def test_without_a_meeting_the_bound_is_the_longest_stage() -> None:
    """Iterations may then overlap: four micro-batches of three seconds."""
    plans = chain(3, 4)
    free = tuple(replace(plan, settings=Settings(clip=False, update="eager")) for plan in plans.plans)
    eager = replace(plans, plans=free, meetings=plans.meetings[:-1])
    assert stages_bound_s(eager) == pytest.approx(12.0)


@pytest.mark.parametrize("policy", ["all_on_gpu", "zero_offload"])
def test_one_stage_has_the_bound_of_its_job(policy: str) -> None:
    machine, job = load_machine("a100-40x8"), Job(model="gpt2", batch=8, seq=64)
    (alone,) = compare(job.of(machine), machine, policies=[policy]).rows
    (row,) = compare_stages(
        job, machine, [policy], [Way(parallelism=Parallelism(data=8), batch=8, micro_batches=1)]
    ).rows
    assert (row.iteration_s, row.lower_bound_s) == pytest.approx((alone.iteration_s, alone.lower_bound_s), rel=1e-9)


def test_no_stage_is_faster_than_alone() -> None:
    """Where CPU Adam takes longer than the longest path of moments."""
    job, machine = Job(model="gpt2", batch=1, seq=32), load_machine("a100-40x8", gpus=2, gpu_memory="1.6GB")
    planned = plan_stages(job, machine, "zero_offload", Parallelism.parse("pp=2"))
    alone_s = [lower_bound(p.workload, p.machine, p.settings, p.layout).seconds for p in planned.plans.plans]
    computed_s = [sum(cost_of(p.workload, p.machine, p.layout).moments_s) for p in planned.plans.plans]
    assert sum(computed_s) < planned.lower_bound_s == max(alone_s) <= planned.iteration_s


def test_a_send_and_its_receive_begin_and_end_together() -> None:
    plans = chain(3, 4, seconds=0.25)
    timelines = play_stages(plans)
    spans = [{s.step: (s.start_s, s.end_s) for s in t.spans if s.iteration == 1} for t in timelines]
    for meeting in plans.meetings:
        assert len({spans[stage][step] for stage, step in meeting.steps}) == 1


def test_the_norm_of_the_gradients_is_that_of_all_stages() -> None:
    """Behind a barrier the optimizer steps meet: without it the last stage is not held up by the first."""
    (*_, norm) = chain(3, 2).meetings
    assert len(norm.steps) == 3
    free = chain(3, 2, clip=False)
    assert len(free.meetings) == len(chain(3, 2).meetings)  # update=step is a barrier too


class TestWrongSets:
    def test_a_meeting_that_is_missing(self) -> None:
        plans = chain(2, 2)
        with pytest.raises(PlanError, match=r"the meeting of stage 0's step .* and stage 1's step .* is missing"):
            prove_set(replace(plans, meetings=plans.meetings[1:]))

    def test_a_meeting_with_the_wrong_micro_batch(self) -> None:
        plans = chain(2, 2)
        (a, b), (c, d) = plans.meetings[0].steps, plans.meetings[1].steps
        swapped = (Meeting((a, d)), Meeting((c, b)), *plans.meetings[2:])
        with pytest.raises(PlanError, match=r"is missing|is not one that the stages need"):
            prove_set(replace(plans, meetings=swapped))

    def test_a_border_without_its_other_end(self) -> None:
        with pytest.raises(PlanError, match="of micro-batch 0 that stage 0 sends to stage 1 have one end only"):
            meetings_of(chain(2, 2).plans[:1])

    def test_ends_of_other_sizes(self) -> None:
        plans = chain(2, 2)
        wide = plans.plans[1].workload
        borders = tuple(replace(border, bytes=border.bytes // 2) for border in wide.borders)
        other = replace(plans.plans[1], workload=replace(wide, borders=borders))
        with pytest.raises(PlanError, match="micro-batch 0 have 1048576 bytes at one end and 524288 at the other"):
            meetings_of((plans.plans[0], other))

    def test_a_border_that_is_crossed_twice(self) -> None:
        plans = chain(2, 2)
        workloads = [
            replace(p.workload, borders=tuple(replace(b, micro_batch=0) for b in p.workload.borders))
            for p in plans.plans
        ]
        with pytest.raises(PlanError, match="stage 0: the activations of micro-batch 0 cross twice"):
            meetings_of([replace(p, workload=w) for p, w in zip(plans.plans, workloads)])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"settings": Settings(clip=False)}, "stage 1 has other settings than stage 0"),
            ({"sequence": 7}, "stage 1 has sequence 7, and stage 0 1; they are of one job"),
            ({"spread": "tp=2,pp=2"}, "stage 0 is of dp=1; the set is of tp=2,pp=2"),
        ],
    )
    def test_stages_of_two_jobs(self, change: dict[str, Any], message: str) -> None:
        plans = chain(2, 2)
        last = plans.plans[1]
        if "settings" in change:
            last = replace(last, settings=change["settings"])
        if "sequence" in change:
            last = replace(last, workload=replace(last.workload, sequence=change["sequence"]))
        spread = Parallelism.parse(change["spread"]) if "spread" in change else plans.parallelism
        with pytest.raises(PlanError) as error:
            prove_set(replace(plans, parallelism=spread, plans=(plans.plans[0], last)))
        assert message in str(error.value)

    def test_stages_that_wait_for_each_other(self) -> None:
        """The first stage sends the second micro-batch first; the second stage receives the first one first."""
        plans = chain(2, 2, "gpipe")
        first = plans.plans[0]
        a, b = (n for n, step in enumerate(first.steps) if step.queue is Queue.SEND)
        steps = list(first.steps)
        steps[a], steps[b] = steps[b], steps[a]
        crossed = replace(plans, plans=(replace(first, steps=tuple(steps)), plans.plans[1]))
        with pytest.raises(PlanError, match="the stages wait for each other in a circle, through stage 0's step"):
            prove_set(crossed)
        with pytest.raises(
            PlanError, match=r"stage 0: the plan deadlocks in iteration 0: .*waits for the other end of"
        ):
            play_stages(crossed)

    @pytest.mark.parametrize("most", [1, 8])
    def test_a_stage_that_waits_for_itself(self, most: int) -> None:
        """The other ends its iteration, and waits in the next, if there is one."""
        plans = chain(2, 2)
        first, last = plans.plans
        *steps, update = last.steps
        circle = replace(last, steps=(*steps, update.waiting_for((Ref(update.id),))))
        words = (
            f"stage 1: the plan deadlocks in iteration 0: compute at step {update.id} (gpu_adam) waits for {update.id}"
        )
        with pytest.raises(PlanError, match=f"^{re.escape(words)}"):
            play_stages(replace(plans, plans=(first, circle)), max_iterations=most)

    def test_a_receive_that_nothing_waits_for(self) -> None:
        plans = chain(2, 2)
        last = plans.plans[1]
        receive = next(step.id for step in last.steps if step.kind is Kind.RECEIVE)
        deaf = tuple(
            step.waiting_for(tuple(ref for ref in step.after if ref.id != receive))
            if step.kind is Kind.COMPUTE
            else step
            for step in last.steps
        )
        with pytest.raises(PlanError, match=r"stage 1: nothing makes step .* wait for step .* \(receive stash 0\)"):
            prove_set(replace(plans, plans=(plans.plans[0], replace(last, steps=deaf))))


JOB = Job(model="tiny-gpt2", batch=2, seq=64, micro_batches=4)


@pytest.fixture(scope="module")
def node() -> Machine:
    return load_machine("a100-40x8", gpus=4)


def test_stages_leave_the_gpu_under_a_budget(node: Machine) -> None:
    """A tight GPU: chunks go to the host and come back within each stage's plan; the proofs hold."""
    small = load_machine("a100-40x8", gpus=4, gpu_memory="2.4GB")
    planned = plan_stages(replace(JOB, model="gpt2"), small, "tide", Parallelism(pipeline=2))
    assert any(step.kind is Kind.FETCH for plan in planned.plans.plans for step in plan.steps)
    reports, seconds = examine_set(planned.plans)
    assert seconds == planned.iteration_s
    assert all(r.peak_bytes["gpu"] <= r.budget_bytes["gpu"] for r in reports)


def test_stages_are_planned_again_with_the_seconds_that_they_waited() -> None:
    """Each stage copies while it waits for the other: with these seconds known, the set gets faster. Policies whose
    order is fixed have nothing to plan again."""
    small, job = load_machine("a100-40x8", gpus=2, gpu_memory="1.5GB"), replace(JOB, model="gpt2", batch=1, seq=128)
    first, last = (plan_stages(job, small, "tide", Parallelism(pipeline=2), again=again) for again in (False, True))
    assert last.iteration_s < 0.98 * first.iteration_s and last.iteration_s >= last.lower_bound_s
    assert [p.workload.moments for p in last.plans.plans] == [p.workload.moments for p in first.plans.plans]
    assert examine_set(last.plans)[1] == last.iteration_s
    fixed = [plan_stages(job, small, "zero_offload", Parallelism(pipeline=2), again=again) for again in (False, True)]
    assert [p.steps for p in fixed[0].plans.plans] == [p.steps for p in fixed[1].plans.plans]


@pytest.mark.parametrize(
    "policy",
    [
        "zero3_resident",
        "zero3_offload",
        "zero_offload",
        "patrickstar",
        pytest.param("optimal", marks=pytest.mark.whole),
    ],
)
def test_policies_of_loops_plan_stages_and_ranks_that_split_layers(node: Machine, policy: str) -> None:
    """One stage runs its micro-batches one after the other, as a loop does; in a pipeline their gradients still arrive
    one after the other."""
    little = Settings(effort=0.02)
    planned = plan_stages(JOB, node, policy, Parallelism(pipeline=2), little)
    assert not any(plan.workload.order.one_by_one for plan in planned.plans.plans)
    assert examine_set(planned.plans)[1] == planned.iteration_s >= planned.lower_bound_s
    planned = plan_stages(JOB, node, policy, Parallelism(tensor=2), little)
    (plan,) = planned.plans.plans
    assert plan.workload.order.one_by_one and plan.workload.micro_batches == 4
    assert any(m.collectives for m in plan.workload.moments)
    assert examine_set(planned.plans)[1] == planned.iteration_s >= planned.lower_bound_s


@pytest.mark.parametrize(("micro_batches", "each_bytes"), [(1, 2), (4, 6)])
def test_slices_of_states_take_a_part_per_rank(micro_batches: int, each_bytes: int) -> None:
    """6 + 12/d bytes per parameter, as Megatron-LM's distributed optimizer: working list and sum of gradients whole,
    states in slices. With one micro-batch the gradient takes the parameter's place. Per iteration a rank's links carry
    the gradient once round the ring, and the parameters."""
    machine, job = load_machine("a100-40x8"), replace(JOB, model="gpt2", batch=8, micro_batches=micro_batches)
    for spread, d in ((Parallelism(data=8, shard="states"), 8), (Parallelism.parse("pp=2,dp=4,shard=states"), 4)):
        planned = plan_stages(job, machine, "all_on_gpu", spread)
        assert examine_set(planned.plans)[1] == planned.iteration_s
        for plan in planned.plans.plans:
            layout = plan.layout
            held = sum(layout.payload_bytes(r.chunk, r.list) for r in plan.initial if r.place is Place.GPU)
            slices = sum(layout.slice_numel(c.index) for c in layout.chunks)
            assert held == slices * d * each_bytes + 12 * slices
            moved = {
                kind: [s.bytes for s in plan.steps if s.kind is kind] for kind in (Kind.GATHER, Kind.REDUCE_SCATTER)
            }
            assert sum(moved[Kind.GATHER]) == 2 * slices * d
            assert sum(moved[Kind.REDUCE_SCATTER]) == (2 if micro_batches == 1 else 4) * slices * d


def test_a_policy_slices_what_it_can(node: Machine) -> None:
    with pytest.raises(PstarError, match="tide slices as shard=parameters; leave shard=states out"):
        plan_stages(JOB, node, "tide", Parallelism.parse("pp=2,shard=states"))
    with pytest.raises(PstarError, match="zero_offload slices in its own way; leave shard=states out"):
        plan_stages(JOB, node, "zero_offload", Parallelism.parse("pp=2,shard=states"))
    whole = plan_stages(JOB, node, "all_on_gpu", Parallelism.parse("pp=2,shard=none")).plans
    slices = plan_stages(JOB, node, "zero3_resident", Parallelism.parse("pp=2,shard=parameters")).plans
    for plans, other, said in (
        (whole, "states", "stage 0 slices nothing; the set has shard=states"),
        (slices, "states", "stage 0 slices parameters, of which 1 of 8 chunks stay whole; the set has shard=states"),
        (slices, "none", "stage 0 slices parameters"),
    ):
        prove_set(plans)
        with pytest.raises(PlanError, match=said):
            prove_set(replace(plans, parallelism=replace(plans.parallelism, shard=other)))


@pytest.mark.parametrize("spread", ["dp=8", pytest.param("dp=4,pp=2", marks=pytest.mark.whole)])
def test_a_policy_that_tries_others_leaves_out_those_that_slice_otherwise(spread: str) -> None:
    """all_on_gpu with slices of states is the fastest here."""
    job, machine, settings = replace(JOB, batch=8), load_machine("rtx4090x8"), Settings(effort=0.02)
    free = plan_stages(job, machine, "optimal", Parallelism.parse(spread), settings)
    assert "that of all_on_gpu:shard=states" in str(free.plans.plans[0].choices["schedule"])
    bound = plan_stages(job, machine, "optimal", Parallelism.parse(f"{spread},shard=parameters"), settings)
    assert examine_set(bound.plans)[1] == bound.iteration_s > free.iteration_s
    with pytest.raises(PlanError, match="the set has shard=parameters"):
        prove_set(replace(free.plans, parallelism=bound.plans.parallelism))


def test_options_that_slice_otherwise_are_refused(node: Machine) -> None:
    with pytest.raises(CannotPlan, match="all_on_gpu:shard=states slices otherwise; leave shard=none out"):
        plan_stages(JOB, node, "all_on_gpu:shard=states", Parallelism.parse("pp=2,shard=none"))
    examine_set(plan_stages(JOB, node, "all_on_gpu:shard=states", Parallelism.parse("pp=2,shard=states")).plans)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "cp=2,pp=2,shard=parameters",
            "stage 0 slices parameters, of which .* stay whole; the set has shard=parameters",
        ),
        (
            "cp=2,pp=2,schedule=gpipe,shard=states",
            "stage 0 runs its micro-batches in another order than schedule=gpipe; the set",
        ),
        (
            "cp=2,pp=2,schedule=interleaved,v=2,shard=states",
            "no borders of parts are crossed; the set is of cp=2,pp=2,",
        ),
    ],
)
def test_words_that_are_not_what_the_stages_do(words: str, said: str) -> None:
    plans = plan_stages(
        replace(JOB, batch=2),
        load_machine("a100-40x8", gpus=4),
        "all_on_gpu",
        Parallelism.parse("cp=2,pp=2,shard=states"),
    ).plans
    prove_set(plans)
    with pytest.raises(PlanError, match=said):
        prove_set(replace(plans, parallelism=Parallelism.parse(words)))


def test_plans_of_stages_on_disks_leave_room_for_the_workspace() -> None:
    """Of 60 MB for each of four; the second stage needs no disks, and its plan counts none."""
    small = load_machine("a100-40x8", gpus=4, gpu_memory="1.95GB")
    few = replace(small, host=replace(small.host, memory_bytes=small.host.reserved_bytes + 240 * 10**6))
    once = plan_stages(replace(JOB, model="gpt2"), few, "tide", Parallelism(pipeline=2), again=False)
    for plans in (once.plans, planned_again(once, "tide", Settings()).plans):
        assert [plan.nvme_budget_bytes > 0 for plan in plans.plans] == [True, False]
        for plan in plans.plans:
            beside = (WORKSPACE, Place.HOST, workspace_bytes(plan.workload))
            assert plan.buffers == ((beside,) if plan.nvme_budget_bytes else ())
            assert plan.host_budget_bytes == plan.machine.host_budget_bytes == 60 * 10**6
        prove_set(plans)


def test_a_stage_has_its_part_of_the_node(node: Machine) -> None:
    own = machine_of_stage(node, Parallelism(pipeline=4), 1)
    assert own.world_size == 1 and own.host.memory_bytes == node.host.memory_bytes // 4
    assert own.host_budget_bytes == pytest.approx(node.host_budget_bytes, rel=1e-9)
    assert own.adam_params_per_s == pytest.approx(node.adam_params_per_s)
    assert [(n.stage, n.fabric) for n in own.neighbours] == [(s, node.peer) for s in (0, 2, 3)]
    assert node.nvme is not None
    beside = replace(node.nvme, read_beside_bytes_per_s=2e9, write_beside_bytes_per_s=1e9)
    part = machine_of_stage(replace(node, nvme=beside), Parallelism(pipeline=4), 1).nvme
    assert part is not None and part.read_bytes_per_s == beside.read_bytes_per_s / 4
    assert part.beside == pytest.approx(beside.beside)


def test_between_nodes_the_ranks_of_a_node_share_its_network() -> None:
    two = load_machine("a100-40x8", nodes=2)
    own = machine_of_stage(two, Parallelism(pipeline=2), 0)
    assert own.world_size == 8 and own.nodes == 1 and two.network is not None
    assert own.neighbours[0].fabric.bytes_per_s == two.network.bytes_per_s / 8


def test_a_layer_is_not_split_over_nodes() -> None:
    with pytest.raises(PstarError, match="tp is 16; each layer waits for sums over these ranks, so they are planned"):
        machine_of_stage(load_machine("a100-40x8", nodes=2), Parallelism(tensor=16), 0)


def test_ranks_that_split_a_layer_are_one_in_the_plan(node: Machine) -> None:
    """Two ranks that share the batch, each with one beside it: a quarter of the node's host each."""
    own = machine_of_stage(node, Parallelism(tensor=2), 0)
    group = own.group("tensor")
    assert own.world_size == 2 and group is not None and group.ranks == 2
    assert own.host_budget_bytes == pytest.approx(node.host_budget_bytes, rel=1e-9)
    two = machine_of_stage(load_machine("a100-40x8", nodes=2), Parallelism(tensor=4), 0)
    whole = load_machine("a100-40x8", nodes=2).network
    assert two.world_size == 4 and two.nodes == 2 and whole is not None and two.network is not None
    assert two.network.bytes_per_s == whole.bytes_per_s / 4


@pytest.mark.parametrize("text", ["dp=4", "pp=2", "tp=2", "tp=4", "tp=2,pp=2"])
def test_all_ranks_on_a_switch_share_it_also_those_that_are_not_planned(node: Machine, text: str) -> None:
    """One GPU has a switch of its own, three share one: no rank is planned faster than a third of it."""
    ranks = tuple(replace(rank, root=min(n, 1)) for n, rank in enumerate(node.ranks))
    spread = Parallelism.parse(text)
    own = machine_of_stage(replace(node, ranks=ranks, root_bytes_per_s=6e9), spread, spread.pipeline - 1)
    assert expected_link(own).h2d_bytes_per_s == pytest.approx(2e9)


def test_a_sum_over_the_ranks_of_a_layer_is_twice_a_gather(node: Machine) -> None:
    """2 (t - 1) hops of a latency and of a t-th of the bytes, in the moments that wait for it. (Where Python is slower
    than the GPU, each sum is one operator more.)"""
    machine = replace(machine_of_stage(node, Parallelism(tensor=4), 0), framework=None)
    (workload,) = stages_of(JOB, node, Parallelism(tensor=4))
    layout = build_layout(workload)
    alone = replace(workload, moments=tuple(replace(m, collectives=()) for m in workload.moments))
    with_sums, without = (CostModel(w, machine, layout).moments_s for w in (workload, alone))
    (group,) = machine.groups
    fabric = group.fabric
    wanted = [
        sum(6 * (fabric.latency_s + size / 4 / fabric.rate_of(size)) for _, _, size in m.collectives)
        for m in workload.moments
    ]
    assert [a - b for a, b in zip(with_sums, without)] == pytest.approx(wanted, abs=1e-12) and sum(wanted) > 0


def test_the_ranks_of_a_layer_wait_as_long_with_sequence_parallelism(node: Machine) -> None:
    """An all-reduce goes twice round the ring, a gather and a reduce-scatter once each. Backward gathers once more
    what the products keep, two in each of two layers, and the head."""
    turns, u = {}, 2 * 64 * 64 * 2  # sequences, tokens, hidden, bytes of bf16
    for text in ("tp=4", "tp=4,sp"):
        (workload,) = stages_of(replace(JOB, checkpointing=False), node, Parallelism.parse(text))
        made = [what for m in workload.moments for what, _, size in m.collectives if size == u]
        turns[text] = sum({"all_reduce": 2}.get(what, 1) for what in made) / JOB.micro_batches
    assert turns["tp=4,sp"] - turns["tp=4"] == 2 * 2 + 1


def test_ranks_that_split_a_sequence_add_up_gradients_as_ranks_that_share_the_batch(node: Machine) -> None:
    """Slices of states and gathers are those of four ranks; keys and values go round a ring of two."""
    both, shared = (Parallelism.parse(text) for text in ("cp=2,dp=2", "dp=4"))
    own, usual = (machine_of_stage(node, spread, 0) for spread in (both, shared))
    assert own.data_parallel_size == usual.data_parallel_size == 4
    assert own.group("context") == Group(name="context", ranks=2, fabric=node.peer)
    job = replace(JOB, batch=4)
    planned, other = (plan_stages(job, node, "zero3_resident", spread) for spread in (both, shared))
    (plan,) = planned.plans.plans
    assert plan.layout.ranks == 4 and plan.layout == other.plans.plans[0].layout
    assert (plan.workload.batch, plan.workload.sequence) == (2, 32)
    assert planned.tokens_per_s * planned.iteration_s == other.tokens_per_s * other.iteration_s == 4 * 4 * 64
    assert examine_set(planned.plans)[1] == planned.iteration_s >= planned.lower_bound_s
    assert planned.sums > 0 == other.sums
    with pytest.raises(PlanError, match="stage 0 is of cp=2,dp=2; the set is of dp=4"):
        prove_set(replace(planned.plans, parallelism=shared))


@pytest.mark.parametrize(("text", "hops"), [("cp=16", 7), ("cp=8,tp=2", 3), ("cp=2,tp=8", 0)])
def test_a_ring_over_nodes_leaves_each_node_once(text: str, hops: int) -> None:
    """Of two nodes, of 8 H100s each, as gathers of chunks: round a node, then between them. Rings of `tp` ranks share
    the network. Where a node's own links are slower, the ring is as slow."""
    machine, spread, size = load_machine("h100-80x8", nodes=2), Parallelism.parse(text), 16 * MIB
    assert machine.peer is not None and machine.network is not None
    workload = workload_of(model_entry("tiny-gpt2"), batch=1, sequence=64)
    latencies_s = hops * machine.peer.latency_s + machine.network.latency_s
    for peer_rate in (machine.peer.bytes_per_s, 1e9):
        own = machine_of_stage(replace(machine, peer=replace(machine.peer, bytes_per_s=peer_rate)), spread, 0)
        rate = min(machine.network.bytes_per_s / spread.tensor, peer_rate if hops else math.inf)
        seconds = CostModel(workload, own, build_layout(workload)).group_s([("all_gather", "context", size)])
        assert seconds == pytest.approx(latencies_s + size * (1 - 1 / spread.context) / rate)


class TestExperts:
    """Four layers of 8 experts of 3 x 256 x 128, of which a token takes two, on 8 GPUs."""

    JOB = Job(model="qwen3-30b-a3b", batch=8, seq=64, micro_batches=2, dtype="bf16")
    SHAPE = structs.replace(
        model_entry("qwen3-30b-a3b"), layers=4, hidden=256, heads=8, kv_heads=4, own_head_dim=32, ffn=512, vocab=1000,
        experts=ExpertsShape(count=8, per_token=2, ffn=128),
    )  # fmt: skip

    def plan(self, policy: str, text: str) -> PlannedStages:
        machine = load_machine("a100-40x8")
        return plan_stages(self.JOB, machine, policy, Parallelism.parse(text), shape=self.SHAPE)

    @pytest.mark.parametrize(
        ("policy", "text"),
        [
            ("all_on_gpu", "ep=8"),
            ("zero3_resident", "ep=4"),
            ("zero3_offload", "tp=2,sp,ep=2"),
            ("zero_infinity", "cp=2,ep=8"),
            ("tide", "ep=8"),
            ("tide", "ep=2,pp=2"),
            ("tide", "tp=2,ep=4"),
        ],
    )
    def test_ranks_that_share_experts_are_planned_and_proved(self, policy: str, text: str, tmp_path: Path) -> None:
        """Each expert's slices are those of the ranks that have it: together all states are there once."""
        planned, spread = self.plan(policy, text), Parallelism.parse(text)
        assert examine_set(planned.plans)[1] == planned.iteration_s >= planned.lower_bound_s
        experts, sliced = 4 * 8 * 3 * 256 * 128 // spread.pipeline, policy != "all_on_gpu"
        for plan in planned.plans.plans:
            layout, ranks = plan.layout, plan.machine.data_parallel_size
            own = [c.index for c in layout.chunks if c.spread > 1]
            assert {layout.slices_of(c) for c in own} == {ranks // spread.experts if sliced else 1}
            holders = ranks * spread.tensor if sliced else spread.experts
            assert sum(layout.own_params[c] for c in own) * holders == experts
        file = tmp_path / "plan.json"
        save_set(planned.plans, file)
        again = read_plans(file)
        assert isinstance(again, PlanSet) and again.plans[0].layout == planned.plans.plans[0].layout
        with pytest.raises(PlanError, match="; the set is of "):
            prove_set(replace(planned.plans, parallelism=replace(spread, experts=1)))

    def test_gradients_of_experts_are_summed_by_the_ranks_that_have_them(self) -> None:
        """Of 8 ranks in a ring each pair has the same experts: half of the bytes over one hop, where all of them send
        7/8 over seven. Four pairs at a time have each its own links, and share the network between two nodes."""
        node = load_machine("a100-40x8")
        (plan,) = self.plan("all_on_gpu", "ep=4").plans.plans
        cost, peer = CostModel(plan.workload, plan.machine, plan.layout), node.peer
        assert peer is not None
        dense, shared = (next(c.index for c in plan.layout.chunks if c.spread == n) for n in (1, 4))
        rate, size = peer.rate_of(MIB), MIB
        assert cost.collective_s(size, dense) == pytest.approx(7 * peer.latency_s + 7 / 8 * size / rate)
        assert cost.collective_s(size, shared) == cost.reduce_s(size, shared)
        assert cost.collective_s(size, shared) == pytest.approx(peer.latency_s + 1 / 2 * size / rate)
        two = machine_of_stage(load_machine("a100-40x8", nodes=2), Parallelism.parse("ep=8"), 0)
        (workload,) = stages_of(
            replace(self.JOB, batch=16), load_machine("a100-40x8", nodes=2), Parallelism.parse("ep=8"), shape=self.SHAPE
        )
        across, between = CostModel(workload, two, build_layout(workload)), two.network
        assert between is not None
        wanted = between.latency_s + 1 / 2 * 8 * size / between.rate_of(8 * size)
        assert across.collective_s(size, shared) == pytest.approx(wanted)

    def test_an_all_to_all_between_nodes_leaves_them_with_a_part(self) -> None:
        """Of 16 ranks' rows on two nodes, half leaves a node, through a share of its network for each of 8 GPUs."""
        machine = load_machine("a100-40x8", nodes=2)
        own = machine_of_stage(machine, Parallelism.parse("ep=16"), 0)
        (workload,) = stages_of(
            replace(self.JOB, batch=16),
            machine,
            Parallelism.parse("ep=16"),
            shape=structs.replace(self.SHAPE, experts=ExpertsShape(count=16, per_token=2, ffn=128)),
        )
        assert machine.network is not None
        seconds = CostModel(workload, own, build_layout(workload)).group_s([("all_to_all", "experts", MIB)])
        share = machine.network.bytes_per_s / 8
        assert machine.peer is not None
        latencies_s = 7 * machine.peer.latency_s + machine.network.latency_s
        assert seconds == pytest.approx(latencies_s + MIB / 2 / share)
        with pytest.raises(
            PstarError, match="6 GPUs share experts, which do not fill the nodes of a100-40x8, of 4 GPUs each; ep=4 "
        ):
            machine_of_stage(load_machine("a100-40x8", gpus=4, nodes=3), Parallelism.parse("ep=6"), 0)

    def test_policies_that_cannot_say_so(self) -> None:
        with pytest.raises(
            CannotPlan, match=r"^patrickstar: a group has a chunk of each rank, and ranks with other experts have none"
        ):
            self.plan("patrickstar", "ep=4")
        with pytest.raises(CannotPlan, match="replicas have all experts each; leave replicas or ep out"):
            self.plan("zero3_resident:replicas=2", "ep=4")

    def test_a_file_with_experts_of_other_ranks_is_refused(self) -> None:
        (plan,) = self.plan("all_on_gpu", "ep=4").plans.plans
        chunks = tuple(replace(c, spread=3) if c.spread > 1 else c for c in plan.layout.chunks)
        with pytest.raises(PlanError, match=r"spread' is 3; it must divide the machine's 8 ranks"):
            replace(plan, layout=replace(plan.layout, chunks=chunks)).check()
        whole = tuple(replace(c, spread=1) for c in plan.layout.chunks)
        with pytest.raises(
            PlanError, match=r"does not fit tensor 'model\.layers\.0\.mlp\.experts\.0\.gate_up_proj' in size, dtype"
        ):
            replace(plan, layout=replace(plan.layout, chunks=whole)).check()

    def test_ways_to_share_experts_are_none_those_of_a_node_and_all(self) -> None:
        machine = load_machine("a100-40x8", nodes=2)
        for parallel, wanted in (("auto", {1, 8}), ("all", {1, 2, 4, 8})):
            ways, _ = ways_of(replace(self.JOB, batch=16), machine, parallel, shape=self.SHAPE)
            assert {
                way.parallelism.experts for way in ways if way.parallelism.tensor == way.parallelism.pipeline == 1
            } == wanted


def test_a_sequence_is_split_over_nodes_that_it_fills() -> None:
    two = load_machine("a100-40x8", nodes=2)
    assert two.network is not None
    inside, across = (machine_of_stage(two, Parallelism.parse(text), 0) for text in ("tp=2,cp=4,pp=2", "tp=2,cp=8"))
    assert [group.fabric for group in inside.groups] == [two.peer, two.peer]
    assert across.groups[1].fabric.bytes_per_s == two.network.bytes_per_s / 2 and across.nodes == 2
    with pytest.raises(PstarError, match=r"12 GPUs split each sequence, which do not .* each; cp=8,dp=3 would"):
        machine_of_stage(load_machine("a100-40x8", nodes=3), Parallelism.parse("cp=12,dp=2"), 0)


def test_long_sequences_are_split_and_short_ones_shared(node: Machine) -> None:
    """gpt2 keeps 12 x 2 x 768 bytes of a token, a layer's 34 x 768 and its logits' 6 x 50,257: 347 kB, so that of
    sequences that many GPUs can share 65,536 tokens fill half of 40 GB. Four GPUs cannot share two sequences."""
    entry = structs.replace(model_entry("gpt2"), max_seq=1 << 20)

    def degrees(tokens: int, sequences: int, parallel: str = "auto") -> set[int]:
        job = Job(model="gpt2", batch=sequences, seq=tokens, dtype="bf16")
        ways, left_out = ways_of(job, node, parallel, shape=entry)
        assert parallel == "auto" or not any("ways with cp" in words for words in left_out)
        return {way.parallelism.context for way in ways}

    assert degrees(1024, 4) == {1} and degrees(65_536, 4) == {1, 2, 4} == degrees(1024, 4, "all")
    assert degrees(1024, 2) == {1, 2, 4}


def test_jobs_that_cannot_be_cut_say_why(node: Machine) -> None:
    mixed = load_machine("a100-40x2+v100-32x2")
    for job, machine, text, message in (
        (replace(JOB, batch=3), node, "pp=2", "batch is 3; the 2 ranks of a stage share it, so give a multiple of 2"),
        (JOB, node, "pp=3", "pp=3 is 3 GPUs, and the machine has 4; pp=2 or pp=4 would do"),
        (JOB, node, "pp=2,schedule=interleaved,v=100", "the model has 2 blocks, so at most 2 parts of stages"),
        (replace(JOB, seq=63), node, "cp=2", "sequence is 63; cp=2 cuts it into 4 equal pieces; 64 would do"),
        (JOB, node, "pp=4", "the model has 2 blocks, so at most 2 stages"),
        (
            replace(JOB, batch=4),
            mixed,
            "pp=1",
            "of each are equal, split layers by speed over all (tp=4, without stages), or share the batch by speed",
        ),
        (JOB, mixed, "tp=4,sp", "ranks of sp have equal parts of the tokens, and a100-40x2+v100-32x2 has GPUs that"),
        (
            replace(JOB, model="gpt2-xl"),
            mixed,
            "tp=4",
            "of which 2 and 2 ranks of GPUs that differ cannot have whole ones, the same on equal GPUs; tp=2 would",
        ),
        (replace(JOB, batch=4), mixed, "dp=4", "have GPUs that differ, a100-40 and v100-32; take so many stages"),
    ):
        with pytest.raises(PstarError) as error:
            plan_stages(job, machine, "tide", Parallelism.parse(text))
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("model", "tokens"), [pytest.param("bert-base", 64, marks=pytest.mark.whole), ("vit-b-16", 197)]
)
def test_encoders_are_spread_as_decoders_are(node: Machine, model: str, tokens: int) -> None:
    """But for an image, whose tokens do not split."""
    job = Job(model=model, batch=8, seq=tokens, micro_batches=2)
    (own,) = stages_of(job, node, Parallelism(data=4))
    whole = preset(model, batch=2, seq=tokens, micro_batches=2)
    assert (own.tensors, own.moments, own.uses, own.borders) == (whole.tensors, whole.moments, whole.uses, ())
    ways, _ = ways_to_spread(job, node)
    assert {"dp=4", "tp=2,pp=2,dp=1" if model[0] == "v" else "tp=2,sp,pp=2,dp=1"} <= {str(w.parallelism) for w in ways}
    for text in ("tp=4", "tp=2,pp=2", "pp=2,schedule=interleaved,v=2"):
        planned = plan_stages(job, node, "all_on_gpu" if text == "tp=4" else "tide", Parallelism.parse(text))
        assert examine_set(planned.plans)[1] == planned.iteration_s >= planned.lower_bound_s
    if model == "vit-b-16":
        for text, why in (("tp=2,sp", "2 ranks split it (sp); leave sp out"), ("cp=2", "4 equal pieces; take fewer")):
            with pytest.raises(
                ModelError, match=re.escape(f"model vit-b-16: sequence is 197; {why}".partition(";")[0])
            ):
                plan_stages(job, node, "tide", Parallelism.parse(text))


class TestUnequalGpus:
    """Twelve layers of gpt2 over a GPU that is about three times as fast as the other."""

    JOB = Job(model="gpt2", batch=1, seq=512, micro_batches=4, dtype="fp16")
    SPEED = Parallelism(pipeline=2, cut="speed")

    def layers(self, planned: Any) -> list[int]:
        names = [{t.name.split(".")[2] for t in plan.workload.tensors if ".h." in t.name} for plan in planned]
        return [len(each) for each in names]

    def test_stages_are_cut_by_speed(self) -> None:
        """Each layer once, more on the faster GPU; one layer more or less there would make the slower of both stages
        slower."""
        machine = load_machine("a100-40+v100-32")
        even, speed = (
            plan_stages(self.JOB, machine, "all_on_gpu", Parallelism(pipeline=2, cut=cut)) for cut in ("even", "speed")
        )
        assert self.layers(even.plans.plans) == [6, 6]
        first, last = self.layers(speed.plans.plans)
        assert first + last == 12 and first > last and speed.iteration_s < even.iteration_s
        busy = [t.busy_s["compute"] for t in speed.timelines]
        assert max(busy) / min(busy) < 1.5
        prove_set(speed.plans)

    def test_a_stage_without_room_gives_layers_to_the_others(self) -> None:
        machine = load_machine("a100-40+v100-32")
        fast, slow = machine.ranks
        small = replace(fast, gpu=replace(fast.gpu, memory_bytes=2 * 10**9, usable_bytes=2 * 10**9))
        tight = replace(machine, ranks=(small, slow))
        planned = plan_stages(self.JOB, tight, "all_on_gpu", self.SPEED)
        assert [plan.machine.gpu.name for plan in planned.plans.plans] == ["v100-32", "a100-40"]  # by memory
        free = plan_stages(
            self.JOB, replace(tight, ranks=(replace(small, gpu=fast.gpu), slow)), "all_on_gpu", self.SPEED
        )
        assert self.layers(planned.plans.plans)[1] < self.layers(free.plans.plans)[0]
        tiny = replace(small, gpu=replace(fast.gpu, memory_bytes=1_100_000_000, usable_bytes=1_100_000_000))
        with pytest.raises(DoesNotFit, match="stage 1: "):
            plan_stages(self.JOB, replace(machine, ranks=(tiny, slow)), "all_on_gpu", self.SPEED)

    def test_both_cuts_are_compared(self) -> None:
        machine = load_machine("a100-40+v100-32")
        ways, left_out = ways_to_spread(replace(self.JOB, batch=2), machine)
        assert {w.parallelism.cut for w in ways} == {"even", "speed"}
        assert any("stage 0 would have GPUs that differ" in words for words in left_out)
        ways = [way for way in ways if way.micro_batches == 8]
        four, left_out = ways_to_spread(replace(self.JOB, batch=4), load_machine("a100-40x2+v100-32x2"))
        assert {str(way.parallelism) for way in four if way.parallelism.pipeline == 1} == {"tp=2,dp=2", "tp=4,dp=1"}
        assert any("dp=4" in words and "GPUs that differ" in words for words in left_out)
        found = compare_stages(replace(self.JOB, batch=2), machine, ["all_on_gpu"], ways, every=True)
        assert found.gain_of_cut is not None and found.gain_of_cut > 1.1
        for row in found.rows:
            mean = (312 + 125) / 2  # of the datasheets, in fp16
            assert row.tflops_per_gpu is not None and row.mfu == pytest.approx(row.tflops_per_gpu / mean)
        assert f"stages cut by speed: {found.gain_of_cut:.2f} times as fast" in stages_text(found)
        job = Job(model="gpt2", batch=1, seq=512, lora="r=8,targets=c_attn", base="NF4", checkpointing=False)
        words = "gpt2, sequence 512, no checkpointing, lora r=8,targets=c_attn, base nf4, on "
        assert stages_text(replace(found, job=job), width=160).startswith(words)


class TestSharesOfLayers:
    """Gpt2's layers have 12 parts, a head each."""

    JOB = Job(model="gpt2", batch=2, seq=64, micro_batches=2, dtype="fp16", checkpointing=False)
    TWO = Parallelism(tensor=2)

    def unlike(self, *rates: float, memory: Sequence[int] = (2**34, 2**34), each: int = 1) -> Machine:
        """GPUs that compute at these rates alone, joined by links that take no time."""
        machine = round_machine(ranks=len(rates) * each, peer_bytes_per_s=1e18, hbm_bytes_per_s=1e18)
        ranks = [
            replace(machine.ranks[0], gpu=replace(gpu, name=name, memory_bytes=size, usable_bytes=size))
            for size, rate in zip(memory, rates)
            for name in ("a" if (size, rate) == (memory[0], rates[0]) else "b",)
            for gpu in (replace(machine.gpu, flops_per_s=dict.fromkeys(machine.gpu.flops_per_s, rate)),)
            for _ in range(each)
        ]
        return replace(machine, ranks=tuple(ranks))

    def planned(self, machine: Machine, text: str = "tp=2", **changes: Any) -> PlannedStages:
        planned = plan_stages(replace(self.JOB, **changes), machine, "all_on_gpu", Parallelism.parse(text))
        assert examine_set(planned.plans)[1] == planned.iteration_s >= planned.lower_bound_s
        return planned

    @pytest.mark.parametrize(("text", "each", "parts"), [("tp=2", 1, (9, 3)), ("tp=2,dp=2", 2, (9, 3))])
    def test_time_is_that_of_all_rates_together(self, text: str, each: int, parts: tuple[int, int]) -> None:
        """3 : 1 in 9 and 3 of 12 parts, so both end each moment at once, but for a row of the vocabulary; equal shares
        take as long as the slower for half of the work."""
        planned = self.planned(self.unlike(3e12, 1e12, each=each), text)
        flops = preset("gpt2", batch=2 // each, seq=64, micro_batches=2, dtype="fp16", checkpointing=False).flops
        assert planned.iteration_s == pytest.approx(flops / 4e12, rel=1e-4)
        assert planned.lower_bound_s == pytest.approx(planned.iteration_s)
        assert planned.plans.shares == tuple(Share(1, own) for own in parts)
        assert planned.gain_of_split == pytest.approx((flops / 2 / 1e12) / (flops / 4e12), rel=1e-4)
        assert planned.bubble == pytest.approx(0, abs=1e-4)
        a, b = (plan.workload for plan in planned.plans.plans)
        for one, other in zip(a.tensors, b.tensors):
            assert one.numel == other.numel or 1 / 3 <= other.numel / one.numel < 1 / 3 + 1e-4

    def test_equal_rates_have_equal_shares(self) -> None:
        """GPUs that differ in memory alone: seconds and bytes of GPUs that do not differ."""
        unlike = self.planned(self.unlike(1e12, 1e12, memory=(2**34, 2**33)))
        alike = self.planned(self.unlike(1e12, 1e12))
        assert unlike.plans.shares == (Share(1, 6), Share(1, 6)) and alike.plans.shares == ()
        assert unlike.gain_of_split == 1 and alike.gain_of_split is None
        assert unlike.iteration_s == alike.iteration_s
        assert [t.peak_bytes for t in unlike.timelines] == [t.peak_bytes for t in alike.timelines * 2]
        for parts in ((11, 1), (7, 5)):
            with pytest.raises(PlanError, match=f"b has tensors as large as a; the shares are a {parts[0]}/12"):
                prove_set(replace(unlike.plans, shares=tuple(Share(1, own) for own in parts)))

    @pytest.mark.parametrize(
        ("machine", "text", "policy"),
        [
            ("a100-40x2+v100-32x2", "tp=2,cp=2", "tide"),
            pytest.param("rtx5090x2+rtx3090x2", "tp=4", "all_on_gpu", marks=pytest.mark.whole),
            pytest.param("a100-40x2+v100-32x2", "tp=2,cp=2", "all_on_gpu", marks=pytest.mark.whole),
            pytest.param("rtx5090x2+rtx3090x2", "tp=4", "tide", marks=pytest.mark.whole),
        ],
    )
    def test_never_slower_than_equal_shares(self, machine: str, text: str, policy: str) -> None:
        planned = plan_stages(self.JOB, load_machine(machine), policy, Parallelism.parse(text))
        ranks, parts, _ = zip(*planned.plans.shares)
        assert sum(a * b for a, b in zip(ranks, parts)) == 12 and parts[0] >= parts[1]
        assert planned.gain_of_split is not None and planned.gain_of_split >= 1
        assert examine_set(planned.plans)[1] == planned.iteration_s >= planned.lower_bound_s

    def test_moments_with_sums_end_together(self) -> None:
        planned = plan_stages(self.JOB, load_machine("a100-40+v100-32"), "tide", self.TWO)
        ends = []
        for plan, timeline in zip(planned.plans.plans, planned.timelines):
            summed, last = {*sums_of(plan).values()}, timeline.iterations - 1
            spans = [s for s in timeline.spans if s.kind is Kind.COMPUTE and s.iteration == last]
            ends.append({span.moment: span.end_s for span in spans if span.moment in summed})
        assert ends[0] == ends[1] and len(ends[0]) > 100

    def test_a_gpu_without_room_takes_less(self) -> None:
        free, tight = (self.planned(self.unlike(3e12, 1e12, memory=(size, 2**34))) for size in (2**34, 1_400_000_000))
        has = {name: share.parts for name, share in zip(tight.plans.names, tight.plans.shares)}
        assert free.plans.shares[0].parts == 9 > has["a"] and sum(has.values()) == 12
        assert free.iteration_s < tight.iteration_s
        with pytest.raises(DoesNotFit, match=r"[ab]: "):
            self.planned(self.unlike(3e12, 1e12, memory=(10**8, 10**9)))
        node, way = self.unlike(3e12, 1e12, memory=(10**9, 2**34)), Way(parallelism=self.TWO, batch=2, micro_batches=2)
        assert stages_shortage(self.JOB, node, "all_on_gpu", [way], Settings()) is None
        small = self.unlike(3e12, 1e12, memory=(10**8, 10**9))
        assert isinstance(stages_shortage(self.JOB, small, "all_on_gpu", [way], Settings()), DoesNotFit)

    @pytest.mark.parametrize(
        ("policy", "host", "batch", "seq", "parts"),
        [
            ("zero_offload", "160GB", 4, 1024, (6, 2)),
            pytest.param("static_partition", "76GB", 4, 1024, (5, 3), marks=pytest.mark.whole),
            ("tide", "200GB", 4, 1024, (5, 3)),
        ],
    )
    def test_copies_and_the_host_count_too(
        self, policy: str, host: str, batch: int, seq: int, parts: tuple[int, int]
    ) -> None:
        """By speed of computing 6 and 2 of 8 parts: those between them and equal ones may be faster, or have room. The
        host is divided as layers are, then by what each kind uses of it."""
        machine = load_machine("a100-40+v100-32", host_memory=host)
        job = Job(model="llama-3-8b", batch=batch, seq=seq)
        assert Cut(job=job, machine=machine, parallelism=self.TWO).shares == (Share(1, 6), Share(1, 2))
        planned = plan_stages(job, machine, policy, self.TWO, again=False)
        assert tuple(share.parts for share in planned.plans.shares) == parts
        assert planned.gain_of_split is not None and planned.gain_of_split > 1.1
        prove_set(planned.plans)
        hosts = [plan.machine.host.memory_bytes for plan in planned.plans.plans]
        assert sum(hosts) == pytest.approx(machine.host.memory_bytes) and sum(hosts) <= machine.host.memory_bytes
        each = [share.node or share.parts for share in planned.plans.shares]
        assert hosts[0] / sum(hosts) == pytest.approx(each[0] / sum(each))
        assert (each[0] > parts[0]) == (policy != "zero_offload")  # all states are there, as large as the shares
        way = Way(parallelism=self.TWO, batch=batch, micro_batches=1)
        assert stages_shortage(job, machine, policy, [way], Settings()) is None

    def test_relieved_cuts_have_each_split_timed_once(self) -> None:
        """A refusal by a third of a kind's bytes takes a third of its parts at least."""
        cut = Cut(job=self.JOB, machine=self.unlike(3e12, 1e12), parallelism=self.TWO)
        assert cut.shares == (Share(1, 9), Share(1, 3))
        short = DoesNotFit(policy="tide", place="gpu", needed_bytes=300, available_bytes=200, what="states")
        less = cut.after(0, short)
        assert less is not None and less.shares == (Share(1, 6), Share(1, 6))
        assert less.ends is cut.ends and len(cut.ends) == 11

    def test_a_kind_without_room_on_the_host_gets_what_it_needs_of_it(self) -> None:
        """The slower kind has 3 of 12 parts and needs 4: the other keeps 8. If it needs 13, or one lacks room then too,
        that with most parts gives some away; those of equal ones get no nearer."""

        def lacking(parts: int) -> DoesNotFit:
            needed = parts * 10**9
            return DoesNotFit(
                policy="tide", place="host", needed_bytes=needed, available_bytes=3 * 10**9, what="states"
            )

        cut = Cut(job=self.JOB, machine=self.unlike(3e12, 1e12), parallelism=self.TWO)
        given = cut.after(1, lacking(4))
        assert given is not None and given.shares == (Share(1, 9, 7999), Share(1, 3, 4004))
        whole = cut.machine.host.memory_bytes
        assert [m.host.memory_bytes for m in given.machines] == [whole * own // 12003 for own in (7999, 4004)]
        assert given.machines[1].host.memory_bytes >= whole * 4 / 12
        for still in (given.after(1, lacking(4)), cut.after(1, lacking(13))):
            assert still is not None and still.shares == (Share(1, 8), Share(1, 4))
        equal = replace(cut, even=True, nodes=(1, 1))
        assert equal.after(1, lacking(4)) is None

    def test_kinds_are_planned_again_with_the_seconds_of_the_slowest(self) -> None:
        """With 6 of 12 parts each, the kind that is three times as fast computes for a third of the iteration, and
        waits in moments with sums for the rest."""
        even = Cut(job=self.JOB, machine=self.unlike(3e12, 1e12), parallelism=self.TWO, even=True)
        planned = plan_stages(self.JOB, even.machine, "tide", self.TWO, cut=even)
        assert planned.computing == pytest.approx((1 / 3, 1), rel=1e-3)
        for plan, timeline in zip(planned.plans.plans, planned.timelines):
            moments = _with_waits(plan, timeline, sums_of(plan)).moments
            assert sum(m.duration_s or 0 for m in moments) == pytest.approx(planned.iteration_s)
        again = planned_again(planned, "tide", Settings())
        assert again.plans.shares == planned.plans.shares and again.gain_of_split == 1

    def test_a_file_keeps_the_shares(self, tmp_path: Path) -> None:
        planned = self.planned(self.unlike(3e12, 1e12))
        save_set(planned.plans, tmp_path / "two.json")
        found = read_plans(tmp_path / "two.json")
        assert isinstance(found, PlanSet) and found.shares == planned.plans.shares == (Share(1, 9), Share(1, 3))
        assert examine_set(found)[1] == planned.iteration_s
        said = explain_stages(PlannedStages(plans=found, timelines=play_stages(found)), width=200)
        assert "Layers split by speed, a 9/12, b 3/12 for each GPU: 2.00 times as fast as with equal shares." in said

    def test_shares_that_the_plans_do_not_have_are_refused(self) -> None:
        plans = self.planned(self.unlike(3e12, 1e12)).plans
        for shares, message in (
            ((Share(1, 3), Share(1, 9)), "the shares are a 3/12, b 9/12"),
            ((Share(2, 9), Share(1, 3)), "of ranks and parts of a layer; the set is of tp=2"),
            ((Share(1, 12), Share(1, 0)), "of ranks and parts of a layer; the set is of tp=2"),
        ):
            with pytest.raises(PlanError) as error:
                prove_set(replace(plans, shares=shares))
            assert message in str(error.value)
        divided = tuple(share._replace(node=n) for share, n in zip(plans.shares, (1, 1)))
        with pytest.raises(PlanError, match=r"b has .* of host memory, and a .*; of the node b has 1 part and a 1"):
            prove_set(replace(plans, shares=divided))
        with pytest.raises(PlanError, match="2 plans for 1 shares; each share has one"):
            replace(plans, shares=plans.shares[:1])
        last = plans.plans[1]
        less = tuple(replace(m, collectives=m.collectives[1:]) for m in last.workload.moments)
        other = replace(last, workload=replace(last.workload, moments=less))
        with pytest.raises(PlanError, match="b waits for other sums than a, or in another order"):
            prove_set(replace(plans, plans=(plans.plans[0], other)))

    def test_they_are_compared_and_said(self) -> None:
        machine = load_machine("a100-40+v100-32")
        ways, _ = ways_of(replace(self.JOB, checkpointing=None), machine, "auto")
        ways = [way for way in ways if way.micro_batches == 2 and way.parallelism.tensor == 2]
        found = compare_stages(replace(self.JOB, checkpointing=None), machine, ["all_on_gpu"], ways)
        split = [row for row in found.rows if row.split]
        assert {row.recompute for row in split} >= {"none"} and all("sp" not in row.parallel for row in split)
        assert all(row.gain_of_split is not None and row.gain_of_split >= 1 for row in split)
        assert f"layers split by speed, {split[0].split} for each GPU: {split[0].gain_of_split:.2f} times" in (
            " ".join(stages_text(found, width=200).split())
        )


def test_a_stage_that_does_not_fit_is_named() -> None:
    small = load_machine("a100-40x8", gpus=2, gpu_memory="1.0003GB", host_memory="17GB")
    with pytest.raises(DoesNotFit, match="stage 0: "):
        plan_stages(replace(JOB, batch=1), small, "all_on_gpu", Parallelism(pipeline=2))


def test_every_way_is_planned_or_said_to_be_left_out(node: Machine) -> None:
    ways, left_out = ways_to_spread(JOB, node)
    assert [(str(w.parallelism), w.batch, w.micro_batches) for w in ways] == [
        ("dp=4", 4, 2),
        ("dp=4", 8, 1),
        ("pp=2,dp=2", 2, 4),
        ("tp=2,sp,dp=2", 2, 4),
        ("tp=2,sp,dp=2", 8, 1),
        ("tp=2,sp,pp=2,dp=1", 2, 4),
        ("tp=2,sp,pp=2,dp=1", 1, 8),
        ("tp=4,sp,dp=1", 2, 4),
        ("tp=4,sp,dp=1", 1, 8),
        ("tp=4,sp,dp=1", 8, 1),
    ]
    assert left_out == [
        "pp=4,dp=1: model tiny-gpt2: pp is 4; the model has 2 blocks, so at most 2 stages",
        "4 ways with cp: ranks can share the sequences, and each has room for one",
    ]
    found = compare_stages(JOB, node, ["all_on_gpu", "l2l"], ways[2:3], left_out=left_out)
    assert [row.policy for row in found.rows] == ["all_on_gpu"] and found.best is not None
    assert found.left_out[-1].startswith("pp=2,dp=2 by l2l: stage 0: ")


class TestAdapters:
    """Parts have some, or none, of the modules that an adapter names."""

    shape = structs.replace(model_entry("llama-2-7b"), layers=4)
    job = Job(model="llama-2-7b", batch=2, micro_batches=2, seq=64)

    @pytest.mark.parametrize("parallel", ["pp=2,dp=2", "pp=4,dp=1", "pp=2,dp=2,schedule=interleaved,v=2"])
    @pytest.mark.parametrize(
        "lora",
        [
            "r=8,save=lm_head",
            "r=8,targets=all-linear,save=embed_tokens+norm",
            r"r=8,targets=model\.layers\.(1|2)\..*q_proj",
            "r=8,targets=layers.3.mlp.up_proj,save=lm_head",
        ],
    )
    def test_stages_train_together_what_the_model_trains(self, node: Machine, lora: str, parallel: str) -> None:
        stages = stages_of(replace(self.job, lora=lora), node, Parallelism.parse(parallel), shape=self.shape)
        alone = workload_of(self.shape, batch=1, sequence=64, lora=lora)
        shapes = [{t.name: t.shape for t in w.tensors if not t.frozen} for w in (*stages, alone)]
        assert {name: extents for part in shapes[:-1] for name, extents in part.items()} == shapes[-1]
        assert sum(w.trainable_params for w in stages) == alone.trainable_params

    def test_a_name_that_the_model_has_not_is_refused(self, node: Machine) -> None:
        for lora, words in (
            ("r=8,save=score", "save: no module is score"),
            ("r=8,targets=qq", "no linear module is qq"),
        ):
            job = replace(self.job, lora=lora)
            with pytest.raises(ModelError, match=words):
                stages_of(job, node, Parallelism(pipeline=2, data=2), shape=self.shape)
            with pytest.raises(ModelError, match=words):
                compare_stages(job, node, ["all_on_gpu"], ways_of(job, node, "auto")[0][:2])
        with pytest.raises(ModelError, match=r"lm_head\.weight shares its table"):
            stages_of(replace(JOB, lora="r=8,save=lm_head"), node, Parallelism(pipeline=2))

    @pytest.mark.parametrize("policy", ["all_on_gpu", "zero3_resident", "zero3_offload", "zero_infinity", "tide"])
    def test_a_stage_that_trains_nothing_is_planned_and_proved(self, node: Machine, policy: str) -> None:
        job = Job(model="gpt2", batch=2, micro_batches=2, seq=64, lora=r"r=8,targets=transformer\.h\.3\.attn\.c_attn")
        planned = plan_stages(job, node, policy, Parallelism(pipeline=2, data=2))
        first, last = (plan.workload for plan in planned.plans.plans)
        assert (first.trainable_params, last.trainable_params) == (8 * (768 + 2304), 0)
        assert examine_set(planned.plans)[1] == planned.iteration_s >= planned.lower_bound_s

    def test_of_several_ways_one_that_cannot_be_is_left_out(self, node: Machine) -> None:
        """A fourth of c_attn is 768 x 576, too narrow for the rank."""
        job = Job(model="gpt2", batch=4, seq=64, lora="r=800,targets=c_attn")
        ways = [Way(parallelism=Parallelism.parse(p), batch=4, micro_batches=1) for p in ("tp=4,dp=1", "dp=4")]
        found = compare_stages(job, node, ["all_on_gpu"], ways)
        assert {row.parallel for row in found.rows} == {"dp=4", "dp=4,shard=states"}
        assert found.left_out[0].startswith("tp=4,dp=1 by any policy: lora r=800: ")
        assert stages_shortage(job, node, "all_on_gpu", ways, Settings()) is None
        with pytest.raises(ModelError, match="the rank must be less than 768"):
            stages_shortage(job, node, "all_on_gpu", ways[:1], Settings())


def test_the_ways_are_those_of_the_sequences_however_they_are_written(node: Machine) -> None:
    """Eight sequences of an iteration, in one to eight micro-batches."""
    ways = [
        {(str(w.parallelism), w.batch * w.micro_batches) for w in ways_to_spread(job, node)[0]}
        for job in (replace(JOB, batch=8 // m, micro_batches=m) for m in (1, 2, 8))
    ]
    assert ways[0] >= {("dp=4", 8), ("tp=4,sp,dp=1", 8)} and ways[0] == ways[1] == ways[2]
    _, left_out = ways_to_spread(replace(JOB, batch=3, micro_batches=2), node)
    words = "dp=4: the iteration's batch is 6; the 4 ranks of a stage share it, so give a multiple of 4"
    assert words in left_out


def test_a_pipeline_that_is_named_says_what_auto_would_try_beside_it(node: Machine) -> None:
    job = replace(JOB, batch=8, micro_batches=1)
    (way,), (left_out,) = ways_of(job, node, "pp=2")
    assert (way.batch, way.micro_batches) == (8, 1)
    assert left_out.startswith("pp=2 in single sequences, --batch 2 --micro-batches 4: a way that is named runs in")
    for named in ("tp=2", Parallelism(pipeline=2)):
        assert ways_of(job, node, named)[1] == []
    assert ways_of(replace(job, batch=2, micro_batches=4), node, "pp=2")[1] == []


class TestRecomputation:
    """Two GPUs with room for every activation, then with room for fewer. What is chosen is what its flags run."""

    JOB = Job(model="gpt2", batch=2, seq=1024)

    def kinds(self, job: Job, machine: Machine) -> list[str | None]:
        ways, _ = ways_of(job, machine, "auto")
        return list(dict.fromkeys(way.recompute for way in ways))

    def test_what_the_job_leaves_open_is_tried(self, node: Machine) -> None:
        assert self.kinds(self.JOB, node) == ["none", "every-2", "all"]
        assert self.kinds(replace(self.JOB, attention="math"), node) == ["none", "attention", "all"]
        for said in ({"checkpointing": True}, {"checkpointing": False}, {"recompute": "every-3"}):
            assert self.kinds(replace(self.JOB, **said), node) == [None]  # type: ignore[arg-type]
        (named,), _ = ways_of(self.JOB, node, "dp=4")
        assert named.recompute is None and named.of(self.JOB).checkpointing is None
        way = Way(parallelism=Parallelism(data=4), batch=4, micro_batches=1)
        jobs = [
            way.but(how).of(replace(self.JOB, checkpointing=True)) for how in ("none", "attention", "every-2", "all")
        ]
        said_of_jobs = [(job.checkpointing, job.recompute) for job in jobs]
        assert said_of_jobs == [(False, None), (None, "attention"), (None, "every-2"), (True, None)]

    @pytest.mark.parametrize(
        ("memory", "how", "flag"),
        [
            pytest.param("40GB", "none", "--no-checkpointing", marks=pytest.mark.whole),
            ("3GB", "every-2", "--recompute every-2"),
        ],
    )
    def test_less_is_recomputed_where_there_is_room(
        self, memory: str, how: str, flag: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        machine = load_machine("a100-40x8", gpus=2, gpu_memory=memory)
        ways, _ = ways_of(self.JOB, machine, "auto")
        few, every = (compare_stages(self.JOB, machine, ["all_on_gpu"], ways, every=every) for every in (False, True))
        assert few.best is not None and every.best is not None
        assert few.rows[0].recompute == every.rows[0].recompute == how
        assert few.rows[0].iteration_s == every.rows[0].iteration_s  # what is left out would not be faster
        assert len(few.rows) < len(every.rows)
        assert few.flags.endswith(flag) and f"flags of the fastest: {few.flags}" in stages_text(few, width=400)
        job = ["--model", "gpt2", "--batch", "2", "--seq", "1024"]
        where = ["--machine", "a100-40x8", "--gpus", "2", "--gpu-memory", memory]
        assert main(["compare", *job, *where, *few.flags.split(), "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert (row["iteration_s"], row["recompute"]) == (few.rows[0].iteration_s, None)

    def test_a_way_that_its_waits_rule_out_holds_no_other_back(self) -> None:
        """Recomputing attention would take 9.7 s and the 0.6 s that all waits, above the 10 s of tp=4; nothing, 8.6."""
        bounds_s = {"all": 9.9, "attention": 9.7, "none": 8.0}
        deep, wide = (
            Way(parallelism=Parallelism.parse(text), batch=1, micro_batches=4, recompute="all")
            for text in ("pp=4", "tp=4")
        )
        closed = [Closed(way=deep.but(how), bound_s=bound_s) for how, bound_s in bounds_s.items()]
        waiting = _Waiting([*closed, Closed(way=wide, bound_s=9.95)], room_bytes=0, every=False)
        fastest_s = math.inf
        for way, seconds in ((deep, 10.5), (wide, 10.0), (deep.but("none"), 8.9)):
            assert waiting.next_below(fastest_s) == way
            waiting.planned(way, fastest_s := seconds)
        assert waiting.next_below(8.9) is None

    def test_waits_are_those_of_a_plan_once_there_is_one(self) -> None:
        """An estimate of all is high: its plan is slices' and waits for 0.2 s, not 0.5 s."""
        way = Way(parallelism=Parallelism.parse("dp=4"), batch=4, micro_batches=1, recompute="all")
        sliced = replace(way, parallelism=Parallelism.parse("dp=4,shard=states"))
        ways = [Closed(way=way, bound_s=9.9), Closed(way=way.but("none"), bound_s=9.7)]
        waiting = _Waiting(ways, room_bytes=0, every=False)
        waiting.planned(way, 10.4)
        (said,) = waiting.said_of_others(10.1)
        assert waiting.next_below(10.1) is None and said.startswith("1 way with less recomputation: at least the waits")
        waiting.takes(sliced, 10.1)
        assert waiting.next_below(10.1) == way.but("none")

    def test_a_way_without_room_for_states_waits_as_long_as_the_nearest(self) -> None:
        deep, wide = (Way(parallelism=Parallelism.parse(text), batch=1, micro_batches=4) for text in ("pp=4", "tp=4"))
        less = Closed(way=deep.but("none"), bound_s=9.0, activation_bytes=1, model_bytes=1)
        waiting = _Waiting([less, Closed(way=wide, bound_s=8.0)], room_bytes=1, every=False)
        waiting.planned(wide, 10.0)
        assert waiting.next_below(10.0) is None
        assert waiting.said_of_others(10.0)[0].startswith("1 way with less recomputation: no room for weights")

    def test_activations_without_room_are_counted(self) -> None:
        """A GPU that holds a part of what nothing recomputed keeps."""
        machine = load_machine("a100-40x8", gpus=2, gpu_memory="2GB")
        job = replace(self.JOB, batch=8)
        ways, _ = ways_of(job, machine, "auto")
        found = compare_stages(job, machine, ["all_on_gpu", "tide"], ways)
        assert found.rows[0].fits and "none" not in {row.recompute for row in found.rows if row.batch == 8}
        (words,) = [words for words in found.left_out if "recomputing none: activations alone take" in words]
        least = int(words.split()[0])
        assert 0 < least <= sum(way.recompute == "none" for way in ways)

    def test_a_set_of_plans_and_the_files_written_from_it_carry_the_choice(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file, titan = str(tmp_path / "plan.json"), tmp_path / "x.toml"
        job = ["--model", "tiny-gpt2", "--batch", "2", "--seq", "64", "--machine", "a100-40", "--gpus", "2"]
        assert main(["plan", *job, "--parallel", "auto", "--policy", "all_on_gpu", "-o", file]) == 0
        assert " recomputing none, " in " ".join(capsys.readouterr().out.split())
        plans = read_plans(Path(file))
        assert isinstance(plans, PlanSet) and not any(plan.workload.checkpointing for plan in plans.plans)
        assert main(["export", file, "--torchtitan", str(titan)]) == 0
        assert 'mode = "none"' in titan.read_text()


class TestOtherQuestions:
    """Each question that takes a parallelism answers with what `compare` plans."""

    def test_the_deepest_model_of_a_pipeline(self) -> None:
        """Two stages have room for more than one GPU, and more again if they offload; one more layer does not fit."""
        small, job = load_machine("a100-40x8", gpus=2, gpu_memory="2.5GB"), Job(model="gpt2", batch=2, seq=64)

        def limit(policy: str, parallel: str) -> Limit:
            asked = {"like": "gpt2", "policies": [policy], "parallel": parallel, "catalog": False}
            return max_model(small, batch=2, seq=64, **asked)[policy]  # type: ignore[arg-type]

        alone, two, more = limit("all_on_gpu", "dp=2"), limit("all_on_gpu", "pp=2"), limit("zero_offload", "pp=2")
        assert alone.value < two.value < more.value and "pp=2, stage 0" in str(two.reason)
        plan_stages(job, small, "all_on_gpu", Parallelism(pipeline=2), shape=deeper("gpt2", two.value))
        with pytest.raises(DoesNotFit):
            plan_stages(job, small, "all_on_gpu", Parallelism(pipeline=2), shape=deeper("gpt2", two.value + 1))

    def test_the_cheapest_machine_with_the_fastest_way(self) -> None:
        machine = replace(load_machine("a100-40x8", gpus=4), price_usd_per_hour=8.0)
        answer = cheapest("tiny-gpt2", tokens=1e9, batch=8, seq=64, machines=[machine], parallel="auto", most_nodes=1)
        best = compare_stages(
            replace(JOB, batch=8, micro_batches=1), machine, ["all_on_gpu", "tide"],
            ways_of(replace(JOB, batch=8, micro_batches=1), machine, "auto")[0],
        ).rows[0]  # fmt: skip
        (row,) = answer.rows
        assert (row.parallel, row.policy, row.tokens_per_s) == (best.parallel, best.policy, best.tokens_per_s)
        assert f"{best.policy}, {best.parallel}" in cheapest_text(answer, width=200)

    def test_machines_that_cannot_be_the_cheapest_are_not_planned(self) -> None:
        """One is dearer by its bound, one by all its ways that might be cheaper; alone they cost no less than said."""
        usual, job = load_machine("a100-40x8", gpus=2), replace(JOB, batch=8, micro_batches=1)
        ways, _ = ways_of(job, usual, "auto")
        fastest_s = compare_stages(job, usual, STAGED, ways).rows[0].iteration_s
        bound_s = least_s(job, usual, STAGED, ways, Settings())
        assert fastest_s is not None and bound_s < fastest_s
        near = (fastest_s / bound_s) ** 0.5  # times the price, so that its bound alone is below the cheapest
        prices = {"dear": 8 * fastest_s / bound_s * 1.01, "near": 8 * near, "cheap": 8.0}
        machines = [replace(usual, name=name, price_usd_per_hour=usd) for name, usd in prices.items()]

        def asked(machines: list[Machine]) -> Cheapest:
            return cheapest("tiny-gpt2", tokens=1e9, batch=8, seq=64, machines=machines, parallel="auto", most_nodes=1)

        answer, alone = asked(machines), {machine.name: asked([machine]).rows[0] for machine in machines}
        best, *others = answer.rows
        assert best == alone["cheap"] and [row.machine for row in others] == ["near", "dear"]
        for row in others:
            own, least_usd = alone[row.machine], row.least_usd
            assert row.usd is None and own.usd is not None and best.usd is not None
            assert least_usd is not None and best.usd <= least_usd <= own.usd
            assert row.least_days is not None and own.days is not None and row.least_days <= own.days
            assert f"≥ {least_usd:,.0f}" in cheapest_text(answer, width=200)
        assert others[0].least_usd == best.usd
        assert {row["machine"]: row["in_time"] for row in answer.to_json()} == {
            "cheap": True,
            "near": True,
            "dear": None,
        }

    def test_more_nodes_may_cost_less_than_a_number_that_is_left_out(self) -> None:
        """One node waits for its host: late, dearer than the other machine; two keep more and are the cheapest."""
        sizes, usd = {"crowded": "1.6GB", "roomy": "1.9GB"}, {"crowded": 8.0, "roomy": 7.9}
        crowded, roomy = (
            replace(load_machine("v100-16x8", gpus=2, gpu_memory=size), name=name, price_usd_per_hour=usd[name])
            for name, size in sizes.items()
        )
        job = {"model": "gpt2", "tokens": 1e9, "batch": 8, "seq": 256, "policies": ["tide"], "parallel": "tp=2"}
        alone = cheapest(machines=[crowded], nodes=[1, 2], **job)  # type: ignore[arg-type]
        other = cheapest(machines=[roomy], nodes=[1], **job).rows[0]  # type: ignore[arg-type]
        two, one = alone.rows
        assert two.usd is not None and one.usd is not None and other.usd is not None and two.usd < other.usd < one.usd
        assert one.days is not None and two.days is not None and other.days is not None
        deadline_s = (one.days + max(two.days, other.days)) / 2 * 86400
        answer = cheapest(machines=[crowded, roomy], deadline_s=deadline_s, **job)  # type: ignore[arg-type]
        assert answer.best is not None and (answer.best.machine, answer.best.nodes) == ("crowded", 2)
        assert (answer.best.usd, answer.rows[1].usd) == (two.usd, other.usd)

    def test_all_numbers_of_nodes_are_asked_for_what_they_cost_at_least(self) -> None:
        """Nobody knows whether one node, which is not planned, has room."""
        usual = load_machine("v100-16x8", gpus=2)
        machines = [replace(usual, name=f"at {usd:g}", price_usd_per_hour=usd) for usd in (8.0, 800.0)]
        answer = cheapest("tiny-gpt2", tokens=1e9, batch=8, seq=64, machines=machines, parallel="tp=2", most_nodes=8)
        assert [(row.machine, row.tried, row.in_time) for row in answer.rows] == [
            ("at 8", (1,), True), ("at 800", (1, 2, 4), None),
        ]  # fmt: skip

    def test_a_deadline_that_no_bound_meets_is_not_planned_for(self) -> None:
        machine = replace(load_machine("a100-40x8", gpus=4), price_usd_per_hour=8.0)
        asked = {"tokens": 1e12, "batch": 8, "seq": 64, "machines": [machine], "parallel": "auto", "most_nodes": 1}
        (row,) = cheapest("tiny-gpt2", deadline_s=1.0, **asked).rows  # type: ignore[arg-type]
        (late,) = cheapest("tiny-gpt2", deadline_s=1.0, nodes=[1], **asked).rows  # type: ignore[arg-type]
        assert row.days is None and row.least_days is not None and str(row.reason).startswith("too slow")
        assert late.days is not None and row.least_days <= late.days and not late.in_time

    def test_a_model_beyond_all_memory_is_refused_at_once(self) -> None:
        """As every way is, if it is planned."""
        job, machine = replace(JOB, model="llama-3.1-70b", batch=8, micro_batches=1), load_machine("rtx4090-128gb")
        ways, _ = ways_of(job, machine, "auto")
        answer = compare_stages(job, machine, STAGED, ways)
        has = format_bytes(machine.gpu_budget_bytes + machine.host_budget_bytes)
        (why,) = (words for words in answer.left_out if "do not fit" in words)
        assert not answer.rows and why.startswith(f"all {len(ways)} ways") and why.endswith(f"together have {has}")
        (row,) = compare_stages(job, machine, ["tide"], ways[-1:]).rows
        assert not row.fits

    @pytest.mark.parametrize("policy", ["tide", "l2l"])
    def test_disks_hold_what_is_beyond_gpus_and_hosts_without_an_option(self, policy: str) -> None:
        machine = load_machine("a100-40x8", gpus=2, gpu_memory="1.4GB", host_memory="16.8GB")
        job = replace(JOB, model="gpt2", micro_batches=1)
        ways, _ = ways_of(job, machine, "auto")
        rows = compare_stages(job, machine, [policy], ways).rows
        assert rows and rows[0].fits
        assert not compare_stages(job, replace(machine, nvme=None), [policy], ways).rows

    def test_a_sweep_over_parallelism(self) -> None:
        grid = {
            "model": "tiny-gpt2", "machine": "a100-40x8", "batch": 8, "seq": 64, "policy": ["all_on_gpu"],
            "parallel": ["dp=8", "tp=2,sp,dp=4", "pp=3", "auto"],
        }  # fmt: skip
        rows = sweep(grid, jobs=1).rows
        assert [row["fits"] for row in rows] == [True, True, None, True]
        job, machine = replace(JOB, batch=8, micro_batches=1), load_machine("a100-40x8")
        ways = [way for way in ways_of(job, machine, "auto")[0] if way.recompute == "all"]
        best = compare_stages(job, machine, ["all_on_gpu"], ways).rows[0]
        assert [row["way"] for row in rows] == ["dp=8 8 x 1", "tp=2,sp,dp=4 8 x 1", None, str(best.way)]
        assert "pp=3 is 3 GPUs, and the machine has 8" in str(rows[2]["reason"])
        assert isinstance(rows[1]["peak_gpu_bytes"], int)
        with pytest.raises(PstarError, match="parallel = 'pp=x': parallelism: pp = 'x'"):
            load_grid(grid | {"parallel": "pp=x"})

    def test_a_sweep_recomputes_as_its_grid_says(self) -> None:
        """All by default, whatever auto would choose: a point names no choice."""
        grid = {"model": "tiny-gpt2", "machine": "a100-40", "batch": 2, "seq": 64, "policy": "all_on_gpu"}
        each = [
            {"parallel": "auto"},
            {"parallel": "auto", "checkpointing": True},
            {"parallel": "auto", "checkpointing": False},
        ]
        default_s, whole_s, none_s = (sweep(grid | axes, jobs=1).rows[0]["iteration_s"] for axes in each)
        assert default_s == whole_s and default_s != none_s

    def test_fits_prints_the_comparison(self, capsys: pytest.CaptureFixture[str]) -> None:
        args = ["--model", "tiny-gpt2", "--batch", "2", "--seq", "64", "--machine", "a100-40", "--gpus", "2"]
        assert main(["fits", *args, "--parallel", "pp=2", "--policy", "all_on_gpu"]) == 0
        assert "pp=2" in capsys.readouterr().out
        assert main(["fits", *args, "--parallel", "pp=2", "--why"]) == 2
        assert "--parallel pp=2 does not go with --why" in capsys.readouterr().err


def test_a_way_that_cannot_be_the_fastest_is_not_planned() -> None:
    """Its bound is above the fastest plan: planned all the same, it is slower."""
    job, machine = replace(JOB, model="gpt2", batch=4), load_machine("rtx4090x8", gpus=2)
    ways, _ = ways_to_spread(job, machine)
    few, every = (compare_stages(job, machine, ["all_on_gpu"], ways, every=every) for every in (False, True))
    assert few.best is not None and every.best is not None and few.slower and not every.slower
    assert few.best.iteration_s == every.best.iteration_s
    shared = [way for way in ways if way.parallelism.data_on(2) > 1]  # these also with slices of states
    assert len(every.rows) == len(ways) + len(shared) and len(few.rows) < len(every.rows)
    assert {row.parallel for row in few.rows} >= {f"{way.parallelism},shard=states" for way in shared[:1]}


def test_ways_whose_first_stage_alone_is_slower_are_left_out() -> None:
    machine = load_machine("a100-40x8", gpus=2, gpu_memory="3GB")
    job = Job(model="gpt2", batch=4, seq=256, micro_batches=2)
    ways = [way for way in ways_of(job, machine, "auto")[0] if way.recompute == "all"]
    few, every = (compare_stages(job, machine, ["tide"], ways, every=every) for every in (False, True))
    assert few.best is not None and every.best is not None and len(few.rows) < len(every.rows)
    assert few.best.iteration_s == every.best.iteration_s
    (said,) = (line for line in few.left_out if "stage 0 alone" in line)
    ((count, names),) = re.findall(r"^(\d+) ways?: stage 0 alone .* with the bubble: (.*)$", said)
    assert 0 < names.count(" by tide (") <= int(count) < len(ways)
    assert not any("stage 0 alone" in line for line in every.left_out)


def test_the_first_attempt_is_near_the_plan(node: Machine) -> None:
    for spread in ("dp=4", "tp=2,sp,dp=2"):
        parallelism, job = Parallelism.parse(spread), replace(JOB, model="gpt2", batch=4, seq=256)
        workload, on = stages_of(job, node, parallelism)[0], machine_of_stage(node, parallelism, 0)
        first_s = Asynchronous("tide", workload, on, Settings()).first_s()
        planned = plan_stages(job, node, "tide", parallelism, again=False)
        assert planned.iteration_s <= first_s * (1 + 1e-9) and first_s <= 1.02 * planned.iteration_s


def test_of_many_micro_batches_the_fastest_way_alone_has_all() -> None:
    """The others' seconds lie on a line, near those of their whole plans, with the same peaks."""
    job, machine = Job(model="gpt2", batch=1, seq=64, micro_batches=12), load_machine("a100-40x8", gpus=2)
    ways = [Way(parallelism=Parallelism.parse(text), batch=1, micro_batches=12) for text in ("pp=2", "tp=2")]
    found = compare_stages(job, machine, ["all_on_gpu", "tide"], ways, every=True)
    first, *others = found.rows
    assert first.few is None and found.best is not None and found.best.iteration_s == first.iteration_s
    assert found.best.plans.plans[0].workload.micro_batches == 12
    assert {row.few for row in others} <= {None, 3, 4} and any(row.few for row in others)
    for row in others:
        way = next(way for way in ways if str(way.parallelism) == row.parallel)
        (whole,) = compare_stages(job, machine, [row.policy], [way]).rows
        assert whole.few is None and max(row.peak_gpu_bytes) <= 40 * 2**30
        if row.policy == "all_on_gpu":  # what tide leaves on the GPU depends on the seconds that there are to copy
            assert row.peak_gpu_bytes == pytest.approx(whole.peak_gpu_bytes, rel=1e-3)
        assert (row.iteration_s, row.tokens_per_s) == pytest.approx((whole.iteration_s, whole.tokens_per_s), rel=0.03)
        assert (row.bubble, row.sums) == pytest.approx((whole.bubble, whole.sums), abs=0.03)
        assert row.lower_bound_s == pytest.approx(whole.lower_bound_s, rel=1e-6)
    assert "≈ " in stages_text(found, width=160) and "seconds follow a line" in found.notes[-1]


def test_stages_pin_as_many_chunks_as_asked_and_plan_jobs_that_are_written_already() -> None:
    job, machine = Job(model="gpt2", batch=1, seq=64, micro_batches=3), load_machine("a100-40x8", gpus=2)
    spread = Parallelism.parse("pp=2")

    def planned(policy: str, *pins: int, cut: Cut | None = None) -> PlannedStages:
        return plan_stages(job, machine, policy, spread, again=False, pins=pins, cut=cut)

    assert planned("tide", 3, 5).pins == (3, 5)
    assert planned("tide:pins=2", 3, 5).pins == (2, 2)  # the user's stay
    searched, own = planned("tide"), Cut(job=job, machine=machine, parallelism=spread)
    assert planned("tide", *searched.pins, cut=own).iteration_s == searched.iteration_s
    assert all(plan.workload is one for plan, one in zip(planned("tide", cut=own).plans.plans, own.workloads))
    assert planned("all_on_gpu", 3, 5).iteration_s == planned("all_on_gpu").iteration_s


def test_random_sets_are_proved_and_keep_their_bytes_under_jitter() -> None:
    rng = random.Random(40)
    for _ in range(8):
        job = Job(
            model=rng.choice(["tiny-gpt2", "gpt2"]), batch=1, seq=rng.choice([16, 64]), micro_batches=rng.randint(1, 5),
            checkpointing=rng.random() < 0.5,
        )  # fmt: skip
        machine = load_machine("a100-40x8", gpus=2, gpu_memory=rng.choice(["40GB", "1.9GB"]))
        one = Parallelism.parse(rng.choice(["pp=2", "pp=2,schedule=gpipe", "cp=2", "tp=2,sp"]))
        try:
            planned = plan_stages(job, machine, rng.choice(["tide", "all_on_gpu"]), one)
        except DoesNotFit:
            continue
        reports = prove_set(planned.plans)
        assert planned.lower_bound_s <= planned.iteration_s * (1 + 1e-9)
        for timelines in (planned.timelines, play_stages(planned.plans, jitter=lambda i, k: 0.5 + (i * 7 + k) % 5)):
            for report, timeline in zip(reports, timelines):
                assert timeline.peak_bytes["gpu"] <= report.peak_bytes["gpu"]


class TestCommands:
    ARGS = (
        *("--model", "tiny-gpt2", "--batch", "1", "--seq", "64", "--micro-batches", "4"),
        *("--machine", "a100-40", "--gpus", "2", "--policy", "tide"),
    )

    def test_a_pipeline_is_planned_proved_and_drawn(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file, picture = tmp_path / "plan.json", tmp_path / "stages.png"
        assert main(["plan", *self.ARGS, "--parallel", "pp=2,schedule=gpipe", "-o", str(file)]) == 0
        assert "tide, pp=2,schedule=gpipe, " in " ".join(capsys.readouterr().out.split())
        assert main(["check", str(file)]) == 0
        assert "meetings, in no circle; simulated together as stated" in " ".join(capsys.readouterr().out.split())
        assert main(["plot", "stages", str(file), "-o", str(picture)]) == 0
        assert picture.stat().st_size > 10_000
        plans = read_plans(file)
        assert isinstance(plans, PlanSet) and not isinstance(plans, Plan)
        again = tmp_path / "again.json"
        save_set(plans, again)
        assert again.read_bytes() == file.read_bytes()

    def test_the_picture_has_every_transfer(self) -> None:
        """However short: of 4 micro-batches, and of the table that both stages have."""
        planned = plan_stages(JOB, load_machine("h100-80x8", gpus=2), "all_on_gpu", Parallelism(pipeline=2))
        (axes,) = stages_figure(planned.plans, planned.timelines).axes
        rows = [label.get_text().rpartition(": ")[2] for label in axes.get_yticklabels()]
        drawn = Counter(rows[round(bar.get_y() + bar.get_height() / 2)] for bar in axes.patches)
        assert (drawn["sends"], drawn["receives"]) == (2 * 5, 2 * 5)

    def test_commands_of_one_plan_refuse_a_pipeline(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "plan.json"
        assert main(["plan", *self.ARGS, "--parallel", "pp=2", "-o", str(file)]) == 0
        capsys.readouterr()
        assert main(["report", str(file), "-o", str(tmp_path / "report.html")]) == 2
        assert "has the plans of 2 stages (pp=2)" in capsys.readouterr().err

    def test_stages_are_explained(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """What is in flight, the bubble's formula, and sums of layers over the links that they have and would have."""
        file = str(tmp_path / "plan.json")
        job = ["--model", "tiny-gpt2", "--batch", "1", "--seq", "64", "--micro-batches", "4", "--policy", "tide"]
        machine = ["--machine", "a100-40x8", "--nodes", "2", "--gpus", "2"]
        assert main(["plan", *job, *machine, "--parallel", "tp=2,sp,pp=2", "-o", file]) == 0
        capsys.readouterr()
        assert main(["explain", file]) == 0
        text = capsys.readouterr().out
        said = " ".join(text.split())
        assert "wait for no link would have 20.0 %, (p - 1) / (m + p - 1)." in said and "above the lower bound" in said
        within, between = re.findall(r"([\d.]+) (us|ms)(?: of the iteration over|, which is why)", said)
        scale = {"us": 1, "ms": 1000}
        assert float(between[0]) * scale[between[1]] > float(within[0]) * scale[within[1]]
        assert [line.split()[:3] for line in text.splitlines()[-2:]] == [["0", "1", "2"], ["1", "1", "1"]]

    def test_gathers_and_exchanges_are_explained(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Keys and values: forward, recompute, backward and the sum of the gradients of two layers in four
        micro-batches, of 2 x 64 x 64 elements each, 16,384 bytes. Rows: dispatch and combine in
        forward, recompute and backward."""
        file = str(tmp_path / "plan.json")
        assert main(["plan", *self.ARGS, "--parallel", "cp=2", "-o", file]) == 0
        assert main(["explain", file]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "Context parallelism: attention waits 32 times for keys and values of 2 ranks" in said
        assert "of 16.38 kB at most" in said and "Tensor parallelism" not in said
        said = " ".join(explain_stages(TestExperts().plan("all_on_gpu", "ep=4")).split())
        assert f"layers wait {4 * 2 * 3 * 2} times until rows have gone to 4 ranks' experts" in said

    def test_files_of_frameworks_say_the_degrees(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """torchtitan's and Megatron's are written from stages, and read; others say that they cannot."""
        file, titan, flags = (str(tmp_path / name) for name in ("plan.json", "x.toml", "x.sh"))
        machine = ["--machine", "a100-40", "--gpus", "2"]
        assert main(["plan", *self.ARGS, "--parallel", "pp=2", "-o", file]) == 0
        assert main(["export", file, "--torchtitan", titan, "--megatron", flags]) == 0
        assert "torchtitan: pp=2; 1 sequences per GPU in 4 micro-batches" in " ".join(capsys.readouterr().out.split())
        files = (titan, [], "zero_infinity:bucket=0,reuse=0"), (flags, ["--policy", "tide"], "zero3_offload")
        for path, named, policy in files:  # of stage 1, which leaves its GPU
            assert main(["fits", "--model", "tiny-gpt2", *machine, "--like", path, *named, "--json"]) == 0
            said = capsys.readouterr()
            rows = json.loads(said.out)
            rows = rows["rows"] if isinstance(rows, dict) else rows
            assert {row["parallel"] for row in rows} == {"pp=2"} and len(rows) == 1 + len(named) // 2
            assert f"predicted as {policy}" in said.err and ", pp=2" in said.err
        assert main(["export", file, "--deepspeed", str(tmp_path / "ds.json")]) == 2
        assert "--deepspeed cannot say; --torchtitan and --megatron can" in capsys.readouterr().err
        assert main(["compare", "--model", "tiny-gpt2", *machine, "--like", titan, "--like", flags]) == 2
        assert "give it alone" in capsys.readouterr().err

    def test_a_comparison_of_ways(self, capsys: pytest.CaptureFixture[str]) -> None:
        args = [*self.ARGS[:-2], "--parallel", "auto"]
        assert main(["compare", *args]) == 0
        text = capsys.readouterr().out
        assert (
            "dp=2" in text
            and "bubble" in text
            and "pp=2,dp=1 1 x 4 recomputing" in " ".join(text.split("in brackets: ")[-1].split())
        )
        assert main(["compare", *args, "--global-batch", "4"]) == 2
        assert "--parallel auto does not go with --global-batch" in capsys.readouterr().err
