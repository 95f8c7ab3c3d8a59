"""Several ranks against times worked out by hand: collectives, shared PCIe switches, DRAM and cores, ranks that differ.

The unit: one layer of 1,000,000 bf16 parameters on two ranks is one chunk of 2 MB, a slice of 1 MB each. FWD takes 1 s
and BWD 2 s. A slice is copied in 1 s each way, a gather or reduce-scatter takes 0.5 s + 1/2 * 2 MB / 2 MB/s = 1 s, and
CPU Adam of a slice takes 500,000 / (1,000,000 / 2) = 1 s. One after the other: 1 + 1 + 1 + 2 + 1 + 1 + 1 = 8 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pstar_sim.bounds.shares import tightest
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Fabric, Machine, Rank
from pstar_sim.core.layout import Layout, build_layout
from pstar_sim.core.layout_file import LayoutForm, layout_of
from pstar_sim.core.plan import Plan, Resident, Settings, steps_from_text
from pstar_sim.core.step import Place
from pstar_sim.cost import CostModel, cost_of
from pstar_sim.errors import CatalogError, PlanError, PstarError
from pstar_sim.planner.batch_shares import shares_of_batch
from pstar_sim.planner.machine_notes import thread_notes
from pstar_sim.policy.registry import find_policy
from pstar_sim.schema.reading import convert
from pstar_sim.sim.play import play
from pstar_sim.sim.several_ranks import classes_of, fair_rates
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.workload.workload import Workload

MB = 10**6

STEPS = """
0 h2d fetch chunk=0 list=param moment=0 bytes=1000000 after=8@-1
1 net gather chunk=0 list=remote moment=0 bytes=2000000 after=0
2 compute compute moment=0 after=1
3 compute compute moment=1
4 net reduce_scatter chunk=0 list=remote moment=1 bytes=2000000 after=3
5 d2h writeback chunk=0 list=param moment=1 bytes=1000000 after=4
6 d2h drop chunk=0 list=param bytes=1000000
7 compute compute moment=2
8 adam cpu_adam chunk=0 moment=1 bytes=14000000 after=6,7
"""

ONE = round_machine(
    gpu_memory_bytes=10**9,
    host_memory_bytes=10**9,
    h2d_bytes_per_s=MB,
    hbm_bytes_per_s=28 * MB,
    flops_per_s=1e9,
    cores=2,
    adam_params_per_s=1e6,
    ranks=2,
    peer_bytes_per_s=2 * MB,
    peer_latency_s=0.5,
)
GPU, LINK, PEER, RANK = ONE.gpu, ONE.link, ONE.peer, ONE.ranks[0]


def machine(ranks: Sequence[Rank] = ONE.ranks, *, dram: float = 1e12, **fields: object) -> Machine:
    whole = sum(rank.batch_share for rank in ranks)
    shared = tuple(replace(rank, batch_share=rank.batch_share / whole) for rank in ranks)
    return replace(ONE, ranks=shared, host=replace(ONE.host, dram_bytes_per_s=dram), **fields)  # type: ignore[arg-type]


def layout(w: Workload, ranks: int = 2) -> Layout:
    """One chunk of exactly the layer: its 500,000 elements a rank are a multiple of 16."""
    return build_layout(w, chunk_bytes=2 * MB, ranks=ranks)


def plan(m: Machine, text: str = STEPS) -> Plan:
    w = chain_workload(1, MB, forward_s=1.0)
    states = ("param", "param32", "momentum", "variance")
    return Plan(
        policy="by hand",
        workload=w,
        machine=m,
        settings=Settings(),
        layout=layout(w),
        modes=("cpu",),
        initial=frozenset(Resident(0, name, Place.HOST) for name in states),
        steps=steps_from_text(text),
        gpu_budget_bytes=2 * MB,  # the own slice and the other one
        host_budget_bytes=7 * MB,  # 14 bytes per parameter, of half of them
    )


@pytest.mark.parametrize("every_rank", [False, True])
def test_two_equal_ranks(every_rank: bool) -> None:
    p = plan(machine())
    p.check()
    timeline = play(p, every_rank=every_rank)
    assert timeline.iteration_s == pytest.approx(8.0)
    # Each rank sends its slice in the gather and half of the gradient in the reduce-scatter.
    assert timeline.moved_bytes == {"h2d": MB, "d2h": MB, "net": 2 * MB}
    assert timeline.peak_bytes["gpu"] == 2 * MB
    assert timeline.busy_s["net"] == pytest.approx(2.0)


@pytest.mark.parametrize("every_rank", [False, True])
def test_two_gpus_on_one_switch_get_half_each(every_rank: bool) -> None:
    """Both slices go through 1 MB/s: 2 s up and 2 s down instead of 1 s and 1 s."""
    m = machine([replace(RANK, root=0)] * 2, root_bytes_per_s=MB)
    assert play(plan(m), every_rank=every_rank).iteration_s == pytest.approx(10.0)
    apart = machine([replace(RANK, root=0), replace(RANK, root=1)], root_bytes_per_s=MB)
    assert play(plan(apart), every_rank=every_rank).iteration_s == pytest.approx(8.0)


@pytest.mark.parametrize("every_rank", [False, True])
def test_dram_is_shared_by_the_ranks_of_a_node(every_rank: bool) -> None:
    """Adam moves 14 MB/s on each rank. Of 14 MB/s of DRAM each gets half: 2 s. Copies (1 MB/s each) are not short."""
    assert play(plan(machine(dram=14e6)), every_rank=every_rank).iteration_s == pytest.approx(9.0)
    two_nodes = machine(dram=14e6, nodes=2, network=PEER)
    # Each node has its rank's own 14 MB/s, and all cores for it: Adam takes half a second at 28 MB/s, stretched to 1 s.
    assert play(plan(two_nodes), every_rank=every_rank).iteration_s == pytest.approx(8.0)


def test_the_latency_of_a_copy_is_not_stretched_by_a_switch() -> None:
    """0.25 s + 1 MB / 0.5 MB/s each way."""
    slow = replace(RANK, link=replace(LINK, latency_s=0.25), root=0)
    m = machine([slow] * 2, root_bytes_per_s=MB)
    for every_rank in (False, True):
        assert play(plan(m), every_rank=every_rank).iteration_s == pytest.approx(10.5)


def test_who_comes_first_waits_for_the_other() -> None:
    """Rank 0 takes 2 s for its write-back, rank 1 for its fetch. From one gather to the next: gather 1, compute 3,
    reduce-scatter 1, then rank 0: 2 + Adam 1 + fetch 1 (rank 1: 1 + 1 + 2), so 9 s."""
    down = replace(RANK, link=replace(LINK, d2h_bytes_per_s=MB / 2))
    up = replace(RANK, link=replace(LINK, h2d_bytes_per_s=MB / 2))
    p = plan(machine([down, up]))
    assert play(p).iteration_s == pytest.approx(9.0)
    assert play(p, every_rank=True).iteration_s == pytest.approx(9.0)
    # The policy reckoned with one rank that is slow both ways.
    assert CostModel(p.workload, p.machine, p.layout).transfer_s(MB, "h2d") == 2.0


def test_ranks_of_different_batches() -> None:
    """Rank 1 computes 2 + 4 s instead of 1 + 2 s, and rank 0 waits for it at each reduce-scatter: 8 + 3 s."""
    p = plan(machine())
    large = chain_workload(1, MB, forward_s=2.0)
    apart = replace(p, ranked=(p.workload, large))
    assert play(apart).iteration_s == pytest.approx(11.0)
    assert play(apart, every_rank=True).iteration_s == pytest.approx(11.0)
    with pytest.raises(PlanError, match="1 workloads for 2 ranks"):
        replace(p, ranked=(large,))
    with pytest.raises(PlanError, match="the workload of rank 1 has other parameters, moments or uses"):
        replace(p, ranked=(p.workload, chain_workload(2, MB)))


def test_classes_of_ranks() -> None:
    """Four ranks: 0 and 1 share a switch, 2 has one with 3, whose GPU is another. 2 is not like 0."""
    other = replace(GPU, name="other")
    ranks = [replace(RANK, root=i // 2) for i in range(4)]
    assert classes_of(machine(ranks)) == [0, 0, 0, 0]
    ranks[3] = replace(ranks[3], gpu=other)
    assert classes_of(machine(ranks)) == [0, 0, 1, 2]
    # Without switches only the GPU matters; in two nodes also who else is in the node.
    assert classes_of(machine([replace(r, root=None) for r in ranks])) == [0, 0, 0, 1]
    assert classes_of(machine([replace(r, root=None) for r in ranks], nodes=2, network=PEER)) == [0, 0, 1, 2]


def test_max_min_fair_rates() -> None:
    # 10 among 2, 3 and 9: the first two get all they want, the third what is left.
    assert fair_rates([9.0, 2.0, 3.0], [1, 1, 1], 10.0) == [5.0, 2.0, 3.0]
    # Two that want 8 each count twice in the node: 10 / 4 each.
    assert fair_rates([8.0, 8.0], [2, 2], 10.0) == [2.5, 2.5]
    assert fair_rates([1.0], [1], 10.0) == [1.0]


def test_collectives_by_hand() -> None:
    """Ring over 4 GPUs: 3 hops of 1 ms and 3/4 of 4 MB at 1 MB/s: 3.003 s. Over 2 nodes of 2: 1 ms inside, 10 ms
    between, at the network's 0.5 MB/s: 6.011 s. Without a peer link over PCIe, whose switch passes 0.25 MB/s."""
    w = chain_workload(1, MB)
    peer = Fabric(name="p", bytes_per_s=1e6, latency_s=1e-3, measured=True, source="by hand")
    network = Fabric(name="n", bytes_per_s=0.5e6, latency_s=1e-2, measured=True, source="by hand")

    def seconds(m: Machine) -> float:
        return CostModel(w, m, layout(w, 4)).collective_s(4 * MB)

    assert seconds(machine([RANK] * 4, peer=peer)) == pytest.approx(3.003)
    assert seconds(machine([RANK] * 4, peer=peer, nodes=2, network=network)) == pytest.approx(6.011)
    by_size = replace(network, table=((1e6, 0.2e6), (4e6, 0.25e6), (1e9, 0.5e6)))  # 4 MB go at half of the best rate
    assert seconds(machine([RANK] * 4, peer=peer, nodes=2, network=by_size)) == pytest.approx(12.011)
    slow = [replace(RANK, root=0, link=replace(LINK, latency_s=1e-3))] * 4
    assert seconds(machine(slow, peer=None)) == pytest.approx(3.003)
    assert seconds(machine(slow, peer=None, root_bytes_per_s=0.25e6)) == pytest.approx(12.003)
    through_host = [replace(rank, gpu=replace(GPU, peer_share=0.5)) for rank in slow]  # half of the link's 1 MB/s
    assert seconds(machine(through_host, peer=None)) == pytest.approx(6.003)
    with pytest.raises(PlanError, match="2 nodes and no network"):
        seconds(machine([RANK] * 4, nodes=2))


def test_disks_are_shared_by_the_ranks_of_a_node() -> None:
    """1 MB of each of two ranks from 4 MB/s, to 2 MB/s, after 0.5 s."""
    disks = round_machine(
        nvme_memory_bytes=100, nvme_read_bytes_per_s=4e6, nvme_write_bytes_per_s=2e6, nvme_latency_s=0.5
    )
    w = chain_workload(1, MB)
    m = machine(nvme=disks.nvme)
    cost = CostModel(w, m, layout(w))
    assert (cost.nvme_s(MB, "read"), cost.nvme_s(MB, "write")) == (1.0, 1.5)
    assert m.nvme_budget_bytes == 50


def test_reads_beside_writes_take_as_long_on_each_rank() -> None:
    disks = round_machine(nvme_memory_bytes=10**9, nvme_read_bytes_per_s=8e6, nvme_write_bytes_per_s=4e6).nvme
    assert disks is not None
    beside = replace(disks, read_beside_bytes_per_s=6e6, write_beside_bytes_per_s=3e6)
    w, seconds = chain_workload(4, MB, forward_s=0.25), list[float]()
    for nvme in (disks, beside):
        on_disks = find_policy("zero_infinity:params=nvme,states=nvme,subgroup=1")(w, machine(nvme=nvme), Settings())
        seconds.append(play(on_disks).iteration_s)
        assert play(on_disks, every_rank=True).iteration_s == pytest.approx(seconds[-1])
    assert seconds[1] < 0.92 * seconds[0]
    in_turns = replace(on_disks, machine=machine(nvme=disks))
    for every_rank in (False, True):
        assert play(in_turns, every_rank=every_rank).iteration_s >= 0.999 * seconds[0]


def test_what_a_rank_has_of_its_node() -> None:
    """Yard: 240 GB less 8 for the system, of which each of 8 GPUs has an eighth, as of the cores. Two GPUs share a
    switch of 12 GB/s, so when all copy each has 6."""
    m = load_machine("v100-32x8")
    assert m.host_budget_bytes == 29 * 10**9
    assert m.adam_params_per_s == m.host.adam_params_per_s / 8
    cost = CostModel(chain_workload(1, MB), m, layout(chain_workload(1, MB), 8))
    assert cost.link.h2d_bytes_per_s == 6e9
    assert CostModel(cost.workload, m, cost.layout, rank=0).link.h2d_bytes_per_s == 15.75e9 * 0.78
    two = load_machine("v100-32x8", nodes=2)
    assert (len(two.ranks), two.local_ranks, two.host_budget_bytes) == (16, 8, 29 * 10**9)


def test_a_process_with_few_threads_has_a_slower_cpu_adam() -> None:
    usual = load_machine("a100-80x8")
    of_core = usual.host.adam_params_per_core_s
    assert of_core is not None
    assert load_machine("a100-80x8", cpu_threads=1).adam_params_per_s == of_core < usual.adam_params_per_s
    assert load_machine("a100-80x8", overrides={"host.threads": 1}).adam_params_per_s == of_core
    assert load_machine("a100-80x8", cpu_threads=128).adam_params_per_s == usual.adam_params_per_s
    measured = replace(usual.host, adam_table=((1, 1e8), (16, 1e9)), threads=1)
    assert replace(usual, host=measured).adam_params_per_s == 1e8
    with pytest.raises(CatalogError, match="are the same figure; give it once"):
        load_machine("a100-80x8", cpu_threads=1, overrides={"host.threads": 2})


def test_the_answer_says_the_threads_of_a_process() -> None:
    (note,) = thread_notes(load_machine("a100-80x8", cpu_threads=1))
    assert note == "CPU Adam: each process has 1 thread of 16 cores, 0.23 billion parameters/s"
    assert thread_notes(load_machine("a100-80x8")) == []


def test_slices() -> None:
    """1,000 elements on 3 ranks: 334 each, rounded up to 336 (a multiple of 16)."""
    w = chain_workload(1, 1000)
    three = build_layout(w, chunk_bytes=2000, ranks=3)
    assert three.slice_numel(0) == 336
    assert three.payload_bytes(0, "param") == 672
    assert three.payload_bytes(0, "remote") == three.payload_bytes(0, "grad_remote") == 2 * 672
    assert three.payload_bytes(0, "momentum") == 4 * 336
    assert three.whole_bytes(0) == 3 * 672
    assert build_layout(w, chunk_bytes=2000).slice_numel(0) == 1008  # the chunk itself is aligned, too
    with pytest.raises(PlanError, match="has no list 'remote'"):
        build_layout(w, chunk_bytes=2000).payload_bytes(0, "remote")
    assert layout_of(convert(LayoutForm, three.to_dict()), w) == three


def test_shares_of_a_batch() -> None:
    m = machine([replace(RANK, batch_share=2 / 3), replace(RANK, batch_share=1 / 3)])
    assert shares_of_batch(12, m) == [8, 4]
    with pytest.raises(PstarError, match="batch 8 cannot be shared 2:1 among the 2 ranks of virtual; give 6 or 9"):
        shares_of_batch(8, m)
    assert shares_of_batch(6, machine()) == [3, 3]
    with pytest.raises(PstarError, match="batch 7 cannot be shared evenly by the 2 ranks of virtual; give 6 or 8"):
        shares_of_batch(7, machine())


def shaped(w: Workload, k: int) -> Workload:
    """The workload with one matrix product in each moment that computes."""
    return replace(w, moments=tuple(replace(m, products=((1, 2, 3, k),) if m.flops else ()) for m in w.moments))


def test_the_tightest_of_different_jobs() -> None:
    """Rank 0: 100 bytes of room, rank 1: 80. In moment 0 they hold 60 and 30 (40 and 50 are left): the weakest GPU (80)
    with 40 left holds 40. In moment 1 they hold 10 and 20: 80 - min(90, 60) = 20. Rank 0 is twice as fast, and has
    three times the work: it takes 3/2 of rank 1's seconds, 300 and 600 ns."""
    big = replace(RANK, gpu=replace(GPU, usable_bytes=100, flops_per_s={"bf16": 2e9}))
    small = replace(RANK, gpu=replace(GPU, usable_bytes=80))
    m = machine([big, small])
    assert m.gpu_budget_bytes == 80
    one = chain_workload(1, 1000, tide_bytes=[60, 10, 10], flops=600)
    other = chain_workload(1, 1000, tide_bytes=[30, 20, 20], flops=200)
    both = tightest([one, other], m)
    assert [x.peak_bytes for x in both.moments] == [40, 20, 20]
    assert cost_of(both, m, build_layout(both)).moments_s == pytest.approx([300e-9, 600e-9, 0])
    assert tightest([one, one], machine()) is one
    # On GPUs that are alike the products of the rank with the most work are left, so that their shapes count.
    wide, narrow = (shaped(w, k) for w, k in ((one, 5), (other, 1)))
    alike = tightest([wide, narrow], machine([small, small]))
    assert [x.products for x in alike.moments] == [((1, 2, 3, 5),), ((1, 2, 3, 5),), ()]
    with pytest.raises(PstarError, match="rank 1 of virtual is given another model"):
        tightest([one, chain_workload(2, 1000)], m)
    with pytest.raises(PstarError, match="1 workloads for the 2 ranks"):
        tightest([one], m)
