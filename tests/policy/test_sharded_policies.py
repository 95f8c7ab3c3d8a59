"""ZeRO-3 and its successors on a story whose figures are worked out by hand.

Four layers of 2**20 parameters, bf16, one chunk each: 2 MiB of parameters, 12 MiB of states. On P = 4 ranks a slice is
0.5 MiB. Forward takes 1 s a layer, backward 2 s; a whole chunk crosses the network in (P - 1) / P x 2 MiB / rate.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Fabric, Machine
from pstar_sim.core.checker.check import check_plan
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.slabs import host_room
from pstar_sim.core.step import PAGEABLE, Kind, Place, Queue, Step
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import cost_of
from pstar_sim.errors import CannotPlan, DoesNotFit, PlanError, PstarError
from pstar_sim.policy import find_policy
from pstar_sim.policy.kit.visits import Visit
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.policy.systems.sharded_visits import (
    block_visits,
    operators_before,
    params_before,
    sub_groups,
    traced_visits,
)
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import GB, MIB
from pstar_sim.workload.presets import preset
from pstar_sim.workload.workload import Phase, Workload

SETTINGS = Settings(update="step", clip=False, chunk_bytes=2 * MIB)
LAYER = 2**20
SMALL = "bucket=1048576,reuse=0,prefetch=1048576"  # a bucket and a prefetch of one layer, nothing is kept


def machine(ranks: int = 1, *, disks: bool = True, **figures: float | None) -> Machine:
    """figures: of round_machine, per GPU."""
    return round_machine(
        **{  # type: ignore[arg-type]
            "ranks": ranks,
            "gpu_memory_bytes": GB,
            "host_memory_bytes": GB,
            "pageable_bytes_per_s": MIB,
            "adam_params_per_s": MIB * ranks,
            "peer_bytes_per_s": 6 * MIB if ranks > 1 else None,
            "nvme_memory_bytes": GB if disks else None,
            "nvme_read_bytes_per_s": 8 * MIB * ranks,
            "nvme_write_bytes_per_s": 4 * MIB * ranks,
            **figures,
        }
    )


def chain(layers: int = 4, *, micro_batches: int = 1, checkpointing: bool = False) -> Workload:
    return chain_workload(
        layers, LAYER, forward_s=1.0, micro_batches=micro_batches, checkpointing=checkpointing, tide_bytes=0
    )


def planned(spec: str, where: Machine, workload: Workload | None = None, settings: Settings = SETTINGS) -> Plan:
    plan = find_policy(spec)(workload or chain(), where, settings)
    plan.check()
    return plan


def moved(plan: Plan) -> dict[str, int]:
    """Bytes of all steps by kind."""
    total: Counter[str] = Counter()
    for step in plan.steps:
        total[step.kind.value] += step.bytes
    return total


def of(plan: Plan, kind: Kind, list_name: str | None = None) -> list[Step]:
    return [s for s in plan.steps if s.kind is kind and list_name in (None, s.list)]


def ends_of(timeline: Timeline, kind: Kind) -> list[float]:
    first = min(s.iteration for s in timeline.spans)
    return sorted(s.end_s for s in timeline.spans if s.kind is kind and s.iteration == first)


# when a chunk is whole


def test_a_block_is_whole_twice() -> None:
    """Forward and backward of the last layer are neighbours: one visit."""
    uses = Builder("x", chain(), machine(), SETTINGS).uses
    assert [(v.first, v.last, v.chunk) for v in block_visits(uses)] == [
        (0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 4, 3), (5, 5, 2), (6, 6, 1), (7, 7, 0),
    ]  # fmt: skip


def test_recomputation_and_gradient_of_a_block_are_one_visit() -> None:
    uses = Builder("x", chain(2, checkpointing=True), machine(), SETTINGS).uses
    assert [(v.first, v.last, v.chunk) for v in block_visits(uses)] == [(0, 0, 0), (1, 3, 1), (4, 5, 0)]


def test_what_is_used_again_soon_is_kept() -> None:
    """Between F2 and B2 lie the reads of F3 and B3, two layers; between F1 and B1 four."""
    uses = Builder("x", chain(), machine(), SETTINGS).uses
    kept = {v.chunk: v for v in traced_visits(uses, 2 * LAYER) if v.last - v.first > 1}
    assert kept == {2: Visit(2, 2, 5)}
    assert len(traced_visits(uses, 2 * LAYER - 1)) == 7
    assert len(traced_visits(uses, 6 * LAYER)) == 4


def test_how_far_ahead() -> None:
    visits = [Visit(m, m, m) for m in range(4)]
    assert operators_before(visits, 2) == {0: 0, 1: 0, 2: 0, 3: 1}
    uses = Builder("x", chain(), machine(), SETTINGS).uses
    assert params_before(visits, uses, 0) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert params_before(visits, uses, 1) == {0: 0, 1: 0, 2: 1, 3: 2}
    assert params_before(visits, uses, LAYER) == {0: 0, 1: 0, 2: 1, 3: 2}
    assert params_before(visits, uses, LAYER + 1) == {0: 0, 1: 0, 2: 0, 3: 1}


def test_sub_groups_are_counted_in_a_ranks_own_parameters() -> None:
    assert sub_groups(Builder("x", chain(), machine(), SETTINGS).layout, range(4), 2 * LAYER) == [[0, 1], [2, 3]]
    four = Builder("x", chain(), machine(4), SETTINGS).layout
    assert sub_groups(four, range(4), LAYER // 2) == [[0, 1], [2, 3]]
    assert sub_groups(four, range(4), LAYER) == [[0, 1, 2, 3]]


# zero3_resident


def test_replicas_slice_among_themselves_and_add_up_between() -> None:
    """Two nodes of two GPUs with a replica each, which has the slices that two GPUs have. A gather goes over the
    node's link: 1/2 x 2 / 6 s. Then both nodes add up 2 MiB at 1 MiB/s, twice 1/2 of it."""
    between = Fabric(name="between", bytes_per_s=MIB, latency_s=0.0, measured=True, source="by hand")
    two = replace(machine(4), nodes=2, network=between)
    plan = planned("zero3_resident:replicas=nodes", two)
    check_plan(plan)
    assert plan.layout.ranks == 2 and plan.initial == planned("zero3_resident", machine(2)).initial
    cost = cost_of(plan.workload, two, plan.layout)
    assert cost.collective_s(2 * MIB) == pytest.approx(1 / 6)
    assert cost.reduce_s(2 * MIB) == pytest.approx(1 / 6 + 2)
    # The last scatter ends 1/6 + 2 s after the backward pass if the others are over: each takes longer than B, 2 s.
    # Scatters begin at 1/6 + 4 + 2 and follow each other; the gathers of B1 and B0 go between them.
    ends = 1 / 6 + 4 + 2 + 4 * (2 + 1 / 6) + 2 / 6
    assert play(plan).iteration_s == pytest.approx(ends + 4 * cost.gpu_adam_s(0))
    inside = planned("zero3_resident:replicas=2", machine(4))  # of four GPUs in one node: 2 x 1/2 x 1 MiB / 6
    assert cost_of(inside.workload, inside.machine, inside.layout).reduce_s(2 * MIB) == pytest.approx(1 / 6 + 1 / 6)
    assert planned("zero_infinity:replicas=2", two).layout.ranks == 2
    for count in ("3", "4"):
        with pytest.raises(CannotPlan, match=f"replicas={count}: 4 GPUs in nodes of 2 .*; replicas can be 1, 2$"):
            planned(f"zero3_resident:replicas={count}", two)


def test_resident_gathers_twice_and_scatters_once() -> None:
    """4 + 3 gathers (the last layer's one serves both directions), 4 reduce-scatters of a whole chunk; no link."""
    plan = planned("zero3_resident", machine(4))
    assert moved(plan)["gather"] == 7 * 2 * MIB
    assert moved(plan)["reduce_scatter"] == 4 * 2 * MIB
    assert plan.moved_bytes["h2d"] == plan.moved_bytes["d2h"] == 0
    assert moved(planned("zero3_resident:reshard=off", machine(4)))["gather"] == 4 * 2 * MIB
    assert moved(planned("zero3_resident", machine(1))).keys() <= {"compute", "gpu_adam"}


def test_resident_waits_for_the_first_gather_and_the_last_scatter() -> None:
    """A collective of 2 MiB takes 3/4 x 2 / 6 = 0.25 s, Adam of a slice 0.25 s: 0.25 + 4 + 8 + 0.25 + 4 x 0.25."""
    assert play(planned("zero3_resident", machine(4))).iteration_s == pytest.approx(13.5)
    # On a slow network every collective takes 3 s. Gathers of forward end at 3, 6, 9, 12; that of B2 at 15, when B3 has
    # ended: the scatter of 3 goes to 18, the gather of B1 to 21; the scatter of 2 to 24, the gather of B0 to 27, the
    # scatter of 1 to 30, B0 ends at 29, the scatter of 0 at 33, Adam at 34.
    assert play(planned("zero3_resident", machine(4, peer_bytes_per_s=0.5 * MIB))).iteration_s == pytest.approx(34.0)


@pytest.mark.parametrize(
    "spec",
    [
        "zero3_resident",
        f"zero3_offload:subgroup={LAYER},{SMALL}",
        f"deep_optimizer_states:every=2,subgroup={LAYER // 4},{SMALL}",
        f"zero_infinity:subgroup={LAYER},bucket=1048576,reuse=0",
        "zero_offload",
        "all_on_gpu",
        "tide",
        "patrickstar",
    ],
)
def test_the_clipped_norm_waits_for_the_sums_of_all_gradients(spec: str) -> None:
    """On a network as slow as that the gradient of layer 0 is the last to be summed, long after the others. With
    clipping no chunk is updated before, not even layers 1 and 3, which deep_optimizer_states has on the GPU first."""
    plan = planned(spec, machine(4, peer_bytes_per_s=0.5 * MIB), settings=replace(SETTINGS, clip=True))
    timeline = play(plan)
    first = min(s.iteration for s in timeline.spans)
    spans = [s for s in timeline.spans if s.iteration == first]
    summed = max(s.end_s for s in spans if s.kind is Kind.REDUCE_SCATTER)
    updates = [s.start_s for s in spans if s.kind in (Kind.CPU_UPDATE, Kind.GPU_UPDATE)]
    assert updates and min(updates) >= summed
    plan.check()


def test_resident_holds_eighteen_bytes_a_parameter_and_two_blocks() -> None:
    """18 N / P = 18 MiB; a block's gradients 2 MiB; the others' slices of this block and the next, 1.5 MiB each."""
    timeline = play(planned("zero3_resident", machine(4)))
    assert timeline.peak_bytes["gpu"] == (18 + 2 + 2 * 1.5) * MIB
    assert timeline.peak_bytes["host"] == 0
    two = planned("zero3_resident", machine(4), chain(micro_batches=2))
    assert sum(two.layout.payload_bytes(r.chunk, r.list) for r in two.initial) == 18 * MIB


def test_resident_says_what_it_is_short_of() -> None:
    with pytest.raises(DoesNotFit, match="a rank's slices of everything") as caught:
        find_policy("zero3_resident")(chain(), machine(4, gpu_memory_bytes=15 * MIB), SETTINGS)
    assert caught.value.needed_bytes == 20 * MIB


# zero3_offload


def test_blocking_flush_stands_in_the_backward_pass() -> None:
    """Every chunk's 2 MiB of gradients take 2 s behind its backward: 4 + 4 x (2 + 2) s. The step: Adam of one sub-group
    4 s, then 8 MiB up."""
    plan = planned(f"zero3_offload:{SMALL}", machine(d2h_bytes_per_s=8 * MIB))
    assert all(s.via == PAGEABLE for s in of(plan, Kind.WRITEBACK))
    assert (plan.moved_bytes["h2d"], plan.moved_bytes["d2h"]) == (8 * MIB, 8 * MIB)
    timeline = play(plan)
    assert ends_of(timeline, Kind.WRITEBACK) == pytest.approx([8, 12, 16, 20])
    assert timeline.iteration_s == pytest.approx(20 + 4 + 8)


def test_asynchronous_flush_stands_in_it_as_fp32() -> None:
    """4 MiB per chunk at 8 MiB/s: the next moment waits half a second for each."""
    plan = planned(f"zero3_offload:flush=async,{SMALL}", machine(d2h_bytes_per_s=8 * MIB))
    assert plan.moved_bytes["d2h"] == 16 * MIB
    assert all(s.via is None for s in plan.steps)
    assert play(plan).iteration_s == pytest.approx(14 + 4 + 8)


def test_checkpoints_on_the_host_are_blocking_copies_of_unpinned_memory() -> None:
    """Each block's input goes down and comes back at 1 MiB/s while compute waits. The last block recomputes at once."""
    workload = preset("gpt2", batch=1, seq=64, checkpointing=True)
    here = machine(
        h2d_bytes_per_s=64 * MIB, d2h_bytes_per_s=64 * MIB, gpu_memory_bytes=8 * GB, host_memory_bytes=8 * GB
    )
    on_gpu, on_host = (planned(f"zero3_offload:checkpoints={place}", here, workload) for place in ("gpu", "host"))
    out = of(on_host, Kind.STASH_OUT)
    assert [s.bytes for s in out] == [64 * 768 * 2] * 11
    assert {s.via for s in (*out, *of(on_host, Kind.STASH_IN))} == {PAGEABLE}
    copies_s = 2 * sum(s.bytes for s in out) / MIB
    assert play(on_host).iteration_s == pytest.approx(play(on_gpu).iteration_s + copies_s, rel=1e-3)
    tide = [[m.peak_bytes for m in plan.workload.moments] for plan in (on_gpu, on_host)]
    assert all(b <= a for a, b in zip(*tide)) and sum(tide[0]) - sum(tide[1]) > 50 * out[0].bytes
    with pytest.raises(CannotPlan, match="keeps its activations"):
        planned("zero3_offload:checkpoints=host", here, preset("gpt2", batch=1, seq=64, checkpointing=False))


def test_checkpoints_of_each_micro_batch_go_to_the_host() -> None:
    """Two micro-batches one after the other copy twice as much, and the host holds those of one at a time."""
    here = machine(
        h2d_bytes_per_s=64 * MIB, d2h_bytes_per_s=64 * MIB, gpu_memory_bytes=8 * GB, host_memory_bytes=8 * GB
    )
    one, two = (preset("gpt2", batch=1, seq=64, checkpointing=True, micro_batches=n) for n in (1, 2))
    on_gpu, on_host = (planned(f"zero3_offload:checkpoints={place}", here, two) for place in ("gpu", "host"))
    alone = planned("zero3_offload:checkpoints=host", here, one)
    out = of(on_host, Kind.STASH_OUT)
    assert [s.bytes for s in out] == [64 * 768 * 2] * 22
    assert on_host.workload.order.of_loop and on_host.workload.stash_room == alone.workload.stash_room
    copies_s = 2 * sum(s.bytes for s in out) / MIB
    assert play(on_host).iteration_s == pytest.approx(play(on_gpu).iteration_s + copies_s, rel=1e-3)
    check_plan(on_host, two)


def test_two_buckets_at_most_are_under_way() -> None:
    """Of the first of two micro-batches a bucket takes 4 s at 0.5 MiB/s; the third waits for the first: B1 starts at
    10, B0 at 14, the end is at 22."""
    slow, twice = machine(d2h_bytes_per_s=0.5 * MIB), chain(micro_batches=2)
    plan = planned(f"zero3_offload:flush=async,{SMALL}", slow, twice)
    assert ends_of(play(plan), Kind.WRITEBACK)[:4] == pytest.approx([10, 14, 18, 22])
    whole = planned("zero3_offload:flush=async,reuse=0,bucket=4194304", slow, twice)
    assert ends_of(play(whole), Kind.WRITEBACK)[:4] == pytest.approx([16, 20, 24, 28])  # all leave behind the last


def test_updated_parameters_go_up_behind_each_sub_group() -> None:
    """Adam 1 s and 2 s up, four times; deep_optimizer_states updates the next one meanwhile."""
    one_by_one = planned(f"zero3_offload:flush=async,subgroup=1048576,{SMALL}", machine(d2h_bytes_per_s=8 * MIB))
    assert play(one_by_one).iteration_s == pytest.approx(14 + 4 * (1 + 2))
    overlapped = planned(f"deep_optimizer_states:every=9,subgroup=1048576,{SMALL}", machine(d2h_bytes_per_s=8 * MIB))
    assert play(overlapped).iteration_s == pytest.approx(14 + 1 + 4 * 2)


def test_unpinned_parameters_go_up_at_that_rate() -> None:
    plan = planned(f"zero3_offload:pinned=off,{SMALL}", machine(pageable_bytes_per_s=0.5 * MIB))
    assert {s.via for s in of(plan, Kind.FETCH)} == {PAGEABLE}
    unknown = planned(f"zero3_offload:pinned=off,{SMALL}", machine(pageable_bytes_per_s=None))
    assert {s.via for s in unknown.steps} == {None}
    assert "no rate" in str(unknown.choices["unpinned"])


def test_offload_on_ranks_divides_link_and_adam() -> None:
    """A rank's slices: 2 N / P down and up; 7 gathers and 4 scatters of whole chunks; Adam of N / P parameters."""
    plan = planned(f"zero3_offload:{SMALL}", machine(4))
    assert (plan.moved_bytes["h2d"], plan.moved_bytes["d2h"]) == (2 * MIB, 2 * MIB)
    assert (moved(plan)["gather"], moved(plan)["reduce_scatter"]) == (14 * MIB, 8 * MIB)
    assert sum(s.bytes for s in of(plan, Kind.CPU_UPDATE)) == 28 * LAYER
    kept = planned("zero3_offload", machine(4))  # DeepSpeed's defaults keep a model this small from forward on
    assert moved(kept)["gather"] == 8 * MIB


def test_collectives_of_the_backward_pass_stand_in_it() -> None:
    """A collective of 2 MiB takes 0.25 s. Forward waits for its first gather alone. B3 has its chunk from forward on;
    behind it the sum of 3 and the gather of 2 take half a second, and so on."""
    where = machine(4, d2h_bytes_per_s=64 * MIB)
    for spec in ("zero3_offload:flush=async", "deep_optimizer_states:every=9"):
        timeline = play(planned(f"{spec},{SMALL}", where))
        assert ends_of(timeline, Kind.COMPUTE)[:8] == pytest.approx([1.25, 2.25, 3.25, 4.25, 6.25, 8.75, 11.25, 13.75])
    infinity = play(planned("zero_infinity:bucket=1048576,reuse=0", machine(4, h2d_bytes_per_s=64 * MIB)))
    assert [round(b - a, 2) for a, b in pairwise(ends_of(infinity, Kind.COMPUTE)[3:8])] == [2.0] * 4  # as published
    hidden = play(planned("zero3_resident", where))  # FSDP's gathers are ahead in both directions
    assert ends_of(hidden, Kind.COMPUTE)[:8] == pytest.approx([1.25, 2.25, 3.25, 4.25, 6.25, 8.25, 10.25, 12.25])


def test_a_recomputed_layer_is_gathered_when_the_moment_before_ends() -> None:
    """A layer's recomputation waits for the sum of the layer before and for its own gather; its backward waits for
    nothing."""
    workload = chain(checkpointing=True)
    moments = workload.moments
    timeline = play(planned(f"zero3_offload:flush=async,{SMALL}", machine(4, d2h_bytes_per_s=64 * MIB), workload))
    ends = ends_of(timeline, Kind.COMPUTE)
    starts = [e - m.duration_s for e, m in zip(ends, moments)]
    waited = {i: round(s - e, 2) for i, (e, s) in enumerate(zip(ends, starts[1:]), 1)}
    recomputed = [i for i, m in enumerate(moments) if m.phase is Phase.RECOMPUTE]
    assert recomputed and [waited[i] for i in recomputed[1:]] == [0.5] * (len(recomputed) - 1)
    assert all(waited[i + 1] == 0 for i in recomputed)


def test_chunks_whose_gradients_stay_hold_up_the_next_moment_too() -> None:
    """The last two layers keep their optimizer on the GPU: no copy goes down, and their sums are waited for."""
    spec = f"zero3_offload:ratio=0.5,subgroup=262144,flush=async,{SMALL}"
    plan = planned(spec, machine(4, d2h_bytes_per_s=64 * MIB))
    assert plan.modes == ("cpu", "cpu", "pin", "pin")
    assert ends_of(play(plan), Kind.COMPUTE)[4:8] == pytest.approx([6.25, 8.75, 11.25, 13.75])


def test_copies_from_the_host_go_ahead_in_both_passes() -> None:
    """The slice of 1 comes up when B3 has ended, one layer ahead; its gather waits for the end of B2."""
    plan = planned(f"zero3_offload:params=cpu,flush=async,{SMALL}", machine(4, d2h_bytes_per_s=64 * MIB))
    spans = [s for s in play(plan).spans if s.iteration == 1]
    b3, b2 = sorted(s.end_s for s in spans if s.kind is Kind.COMPUTE)[4:6]
    starts = {
        kind: max(s.start_s for s in spans if (s.kind, s.chunk) == (kind, 1)) for kind in (Kind.FETCH, Kind.GATHER)
    }
    assert starts == pytest.approx({Kind.FETCH: b3, Kind.GATHER: b2 + 0.25})  # behind the sum of 2


def test_a_plan_says_for_which_collectives_compute_waits() -> None:
    words = "compute waits for the gathers of the backward pass and for the sums of gradients"
    for spec in ("zero3_offload", "deep_optimizer_states"):
        assert words in planned(spec, machine(4)).choices["moves"]
        assert planned(spec, machine(1)).choices["moves"] == "one rank: no collectives"
    assert words not in planned("zero_infinity", machine(4)).choices["moves"]


def test_a_moment_waits_for_the_sum_of_the_whole_bucket() -> None:
    """The bucket of two layers is full behind B2: two sums and the gather of 1 take 0.75 s. In the first of two
    micro-batches its copies to the host are hidden; the second, which finds 0 on the GPU, waits for the last sums."""
    where = machine(4, d2h_bytes_per_s=64 * MIB)
    spec = "zero3_offload:flush=async,bucket=2097152,reuse=0,prefetch=1048576"
    ends = ends_of(play(planned(spec, where, chain(micro_batches=2))), Kind.COMPUTE)
    assert ends[:8] == pytest.approx([1.25, 2.25, 3.25, 4.25, 6.25, 8.5, 11.25, 13.5])
    assert ends[8] == pytest.approx(13.5 + 0.5 + 1)


def test_host_memory_is_that_of_the_estimators() -> None:
    """16 x 1.5 = 24 bytes per parameter of a rank's own; with the parameters there 18 x 1.5 = 27."""
    for ranks in (1, 4):
        own = 4 * LAYER // ranks
        for spec, each in (("zero3_offload", 24), ("zero3_offload:params=cpu", 27), ("zero_infinity", 27)):
            assert planned(spec, machine(ranks)).check().peak_bytes["host"] == each * own, spec
        assert planned("deep_optimizer_states", machine(ranks)).check().peak_bytes["host"] == 27 * own


def test_twin_flow_keeps_its_share_on_the_gpu() -> None:
    """Half of the optimizer: chunks 0 and 1 on the CPU; 24 bytes per parameter of 2 and 3 beside 2 N of parameters and
    a bucket; their gradients stay."""
    plan = planned(f"zero3_offload:ratio=0.5,subgroup=1048576,{SMALL}", machine())
    assert plan.modes == ("cpu", "cpu", "pin", "pin")
    assert (plan.moved_bytes["h2d"], plan.moved_bytes["d2h"]) == (4 * MIB, 4 * MIB)
    assert plan.check().peak_bytes["host"] == 24 * 2 * LAYER
    gpu = sum(plan.layout.payload_bytes(r.chunk, r.list) for r in plan.initial if r.place is Place.GPU)
    gpu += sum(size for _, place, size in plan.buffers if place is Place.GPU)
    assert gpu == 8 * MIB + 24 * 2 * LAYER


def test_parameters_on_the_host_come_up_for_each_visit() -> None:
    plan = planned(f"zero3_offload:params=cpu,{SMALL}", machine())
    assert moved(plan)["fetch"] == 7 * 2 * MIB  # forward and backward, the last layer's once; none behind Adam
    plan = planned("zero3_offload:params=cpu,reuse=6291456", machine(4))
    assert moved(plan)["fetch"] == 4 * MIB // 2
    assert moved(plan)["gather"] == 8 * MIB


def test_gradients_of_several_micro_batches_are_added_on_the_host() -> None:
    """Only the last micro-batch's go blocking: the first one's are hidden, as the published runs show."""
    plan = planned(f"zero3_offload:{SMALL}", machine(d2h_bytes_per_s=8 * MIB), chain(micro_batches=2))
    down = of(plan, Kind.WRITEBACK)
    assert [s.via for s in down] == [None] * 4 + [PAGEABLE] * 4
    assert len(of(plan, Kind.CPU_ADD)) == 8
    assert ends_of(play(plan), Kind.WRITEBACK)[-1] == pytest.approx(12 + 20)


def test_offload_says_what_it_is_short_of() -> None:
    with pytest.raises(DoesNotFit, match=r"a rank\'s optimizer of 0\.00 B parameters with its buffers") as caught:
        find_policy("zero3_offload")(chain(), machine(host_memory_bytes=50 * MIB), SETTINGS)
    assert (caught.value.place, caught.value.needed_bytes) == ("host", 96 * MIB)
    with pytest.raises(DoesNotFit) as caught:
        find_policy("zero3_offload")(chain(), machine(gpu_memory_bytes=9 * MIB), SETTINGS)
    assert caught.value.place == "gpu"
    with pytest.raises(PstarError, match="did you mean blocking"):
        find_policy("zero3_offload:flush=blockin")


# deep_optimizer_states


def test_every_second_sub_group_is_staged() -> None:
    """Chunks 1 and 3: 12 MiB of states up and down each, their gradients stay; 0 and 2 as zero3_offload."""
    plan = planned(f"deep_optimizer_states:subgroup=1048576,{SMALL}", machine())
    assert plan.modes == ("cpu", "stream", "cpu", "stream")
    assert plan.moved_bytes["h2d"] == 2 * 12 * MIB + 2 * 2 * MIB
    assert plan.moved_bytes["d2h"] == 2 * 12 * MIB + 2 * 4 * MIB
    four = planned(f"deep_optimizer_states:subgroup=262144,{SMALL}", machine(4))
    assert four.moved_bytes["h2d"] == plan.moved_bytes["h2d"] // 4


def test_staged_states_are_updated_beside_cpu_adam() -> None:
    """Links of 48 MiB/s; gradients of 2 and 0 go down in 1/12 s each, which moments wait for: the step begins at
    12 + 1/6 s. The CPU updates 0, 2 for 2 s; 1 and 3 are up 0.25 and 0.5 s after the beginning, updated 1.25 and 2.25 s
    after it, and all is down a quarter of a second later."""
    fast = machine(d2h_bytes_per_s=48 * MIB)
    link = replace(fast.link, h2d_bytes_per_s=48 * MIB)
    fast = replace(fast, ranks=(replace(fast.ranks[0], link=link),))
    plan = planned(f"deep_optimizer_states:subgroup=1048576,{SMALL}", fast)
    assert play(plan).iteration_s == pytest.approx(12 + 1 / 6 + 2.5, abs=1e-6)


def test_sums_of_several_micro_batches_are_staged_too() -> None:
    plan = planned(f"deep_optimizer_states:subgroup=262144,{SMALL}", machine(4), chain(micro_batches=2))
    assert len(of(plan, Kind.FETCH, "grad32")) == plan.modes.count("stream") == 2
    assert not of(plan, Kind.WRITEBACK, "grad32")


# zero_infinity


def test_infinity_brings_slices_over_all_links() -> None:
    """7 visits: a slice of 0.5 MiB over each rank's link, then the whole chunk over the network."""
    plan = planned("zero_infinity:reuse=0,bucket=0", machine(4))
    assert moved(plan)["fetch"] == 7 * MIB // 2
    assert moved(plan)["gather"] == 14 * MIB
    assert moved(plan)["writeback"] == 2 * MIB


def test_the_chain_is_one_two_three_operators_ahead() -> None:
    plan = planned("zero_infinity:params=nvme,reuse=0", machine(4))
    compute = {s.id: s.moment for s in plan.steps if s.kind is Kind.COMPUTE}

    def asked(kind: Kind, moment: int) -> int:
        """Last moment that has to end before the step for `moment` may start; -1 for none."""
        (step,) = (s for s in of(plan, kind) if s.moment == moment and s.list in ("param", "remote"))
        return max((compute[r.id] for r in step.after if r.id in compute and not r.back), default=-1)

    assert asked(Kind.GATHER, 3) == 1  # while 2 computes
    assert asked(Kind.FETCH, 3) == 0  # while 1 computes
    assert asked(Kind.NVME_READ, 3) == -1
    off = planned("zero_infinity:overlap=off,reuse=0", machine())
    assert play(off).iteration_s > play(planned("zero_infinity:reuse=0", machine())).iteration_s


def test_states_on_disks_cross_the_host_once() -> None:
    """Gradients 2 bytes per parameter out and in, states 12 in and out."""
    plan = planned("zero_infinity:states=nvme,subgroup=1048576", machine())
    assert moved(plan)["nvme_write"] == 4 * (2 + 12) * MIB
    assert moved(plan)["nvme_read"] == 4 * (2 + 12) * MIB
    assert plan.check().peak_bytes["nvme"] == 4 * (2 + 12) * MIB
    # Reading 14 MiB takes 1.75 s, writing 12 MiB 3 s: the disks are busy all the time, 4 x 4.75 s, and the last write
    # waits for Adam of the last sub-group, which began while the third was written.
    timeline = play(plan)
    busy = sum(s.end_s - s.start_s for s in timeline.spans if s.queue is Queue.NVME and s.iteration == 0)
    assert busy == pytest.approx(4 * (1.75 + 3 + 2 / 4))


def test_parameters_on_disks_are_on_the_host_only_on_their_way() -> None:
    plan = planned("zero_infinity:params=nvme,states=nvme,subgroup=1048576,reuse=0,bucket=0", machine())
    assert plan.check().peak_bytes["nvme"] == 4 * (2 + 2 + 12) * MIB
    assert not [r for r in plan.initial if r.place is Place.HOST]
    assert moved(plan)["nvme_read"] == (7 * 2 + 4 * 14) * MIB
    assert moved(plan)["nvme_write"] == 4 * (2 + 2 + 12) * MIB


def test_what_slow_disks_have_not_written_does_not_pile_up() -> None:
    """However long the disks take, the host never holds more than predicted, though its budget is far larger: 24 layers
    of 2 MiB of parameters and 8 lists of 4 MiB. The pool takes slabs of these 32 MiB."""
    spec = f"zero_infinity:states=nvme,subgroup={LAYER},bucket={LAYER},reuse=0"
    plan = planned(spec, machine(host_memory_bytes=100 * GB), chain(24, micro_batches=2))
    most = plan.check().peak_bytes["host"]
    assert most == play(plan).peak_bytes["host"] == 24 * 2 * MIB + 8 * 4 * MIB
    disk_steps = {step.id for step in plan.steps if step.queue is Queue.NVME}
    slow = play(plan, jitter=lambda step, _: 50.0 if step in disk_steps else 1.0)
    assert slow.peak_bytes["host"] <= most
    assert host_room(plan).total_bytes == most


@pytest.mark.parametrize("room", [32, 44])
def test_gradients_of_a_large_bucket_leave_room_for_their_sums(room: int) -> None:
    """24 gradients of 2 MiB come down at once, for which the host has less room, and each becomes a sum of 4 MiB there
    before the disks take it."""
    slow = machine(host_memory_bytes=(24 * 2 + room) * MIB, h2d_bytes_per_s=100 * MIB, nvme_write_bytes_per_s=MIB)
    spec = f"zero_infinity:states=nvme,subgroup={LAYER},bucket={24 * LAYER},reuse=0"
    plan = planned(spec, slow, chain(24, micro_batches=2))
    assert plan.check().peak_bytes["host"] <= (24 * 2 + room) * MIB


def test_infinity_needs_the_disks_it_is_told_to_use() -> None:
    with pytest.raises(PlanError, match="has no disks"):
        find_policy("zero_infinity:states=nvme")(chain(), machine(disks=False), SETTINGS)
    with pytest.raises(DoesNotFit, match="lives on the disks") as caught:
        full = machine()
        assert full.nvme is not None
        full = replace(full, nvme=replace(full.nvme, memory_bytes=MIB))
        find_policy("zero_infinity:states=nvme")(chain(), full, SETTINGS)
    assert caught.value.place == "nvme"


@pytest.mark.parametrize("spec", ["zero3_resident", "zero3_offload", "deep_optimizer_states:subgroup=262144"])
def test_all_ranks_played_take_as_long_as_one(spec: str) -> None:
    job = chain(micro_batches=2)
    plan = planned(spec, machine(4), job)
    alone_s = play(plan).iteration_s
    assert play(plan, every_rank=True).iteration_s == pytest.approx(alone_s, rel=1e-9)
    slow = planned(spec, replace(machine(4), slowdowns={"compute_while_net": 1.5}), job)
    slow_s = play(slow).iteration_s
    assert play(slow, every_rank=True).iteration_s == pytest.approx(slow_s, rel=1e-9)
    assert slow_s > 1.001 * alone_s


def test_optimal_goes_to_the_disks_where_nothing_else_fits() -> None:
    # layers of 0.25 G parameters: 0.5 GB of working list, 3 GB of states; 36 GB of host, 1 TB of disks
    where = machine(gpu_memory_bytes=10 * GB, host_memory_bytes=36 * GB)
    with_room = replace(where, nvme=replace(where.nvme, memory_bytes=1000 * GB)) if where.nvme else where
    plans = []
    for layers, micro_batches in ((16, 1), (48, 2)):  # 48 GB of sums have no room on the host
        workload = chain_workload(layers, 250_000_000, forward_s=1.0, micro_batches=micro_batches)
        plans.append(find_policy("optimal")(workload, with_room, SETTINGS))
        with pytest.raises(DoesNotFit):
            find_policy("optimal")(workload, replace(where, nvme=None), SETTINGS)
    own, all_on_disks = plans
    assert not any("schedule" in plan.choices for plan in plans)
    # what GPU and host have no room for, at most what the host has no room for and the states of two layers that pass
    assert (56 - 36 - 10) * GB <= own.check().peak_bytes["nvme"] <= (56 - 36 + 2 * 3) * GB
    assert all_on_disks.check().peak_bytes["nvme"] >= (48 * (3 + 1) - 36 - 10) * GB
    other = planned("zero_infinity:params=nvme,states=nvme", with_room, workload)
    assert play(all_on_disks).iteration_s < play(other).iteration_s


def test_optimal_slices_states_alone_where_that_is_fastest() -> None:
    workload = preset("tiny-gpt2", batch=1, seq=64, micro_batches=4)
    specs = ("optimal", "all_on_gpu:shard=states", "all_on_gpu")
    plans = [planned(spec, load_machine("rtx4090x8"), workload) for spec in specs]
    best_s, sliced_s, whole_s = (play(plan).iteration_s for plan in plans)
    assert best_s == sliced_s < whole_s
    assert "that of all_on_gpu:shard=states" in str(plans[0].choices["schedule"])
