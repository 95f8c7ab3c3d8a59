"""The checker on plans of several ranks: what one rank's program has to say about collectives, one thing wrong a time.

Two layers of 1,024 bf16 parameters on two ranks, a chunk each: slices of 1,024 bytes. Chunk 0 lives on the host and is
gathered for each use; chunk 1 stays whole on both GPUs and its states lie there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pstar_sim.catalog.machine import Fabric, Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.ledger import Moves
from pstar_sim.core.plan import Plan, Resident, Settings, load_plan, steps_from_text
from pstar_sim.core.step import Place
from pstar_sim.errors import PlanError
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine

UNCLIPPED = Settings(clip=False)  # no norm, for which the sums of all gradients would have to be there

TEXT = """
0 h2d fetch chunk=0 list=param moment=0 bytes=1024 after=16@-1
1 net gather chunk=0 list=remote moment=0 bytes=2048 after=0
2 compute compute moment=0 after=1
3 compute drop chunk=0 list=remote bytes=1024
4 compute compute moment=1 after=17@-1
5 compute compute moment=2
6 net reduce_scatter chunk=1 list=remote moment=2 bytes=2048 after=5
7 net gather chunk=0 list=remote moment=3 bytes=2048 after=3
8 compute compute moment=3 after=7
9 net reduce_scatter chunk=0 list=remote moment=3 bytes=2048 after=8
10 d2h writeback chunk=0 list=param moment=3 bytes=1024 after=9
11 d2h drop chunk=0 list=param bytes=1024
12 compute compute moment=4
15 compute gpu_adam chunk=1 moment=2 bytes=14336 after=9
16 adam cpu_adam chunk=0 moment=3 bytes=14336 after=11,12
17 net gather chunk=1 list=remote bytes=2048 after=15
"""


@pytest.fixture
def two(toy_machine: Machine) -> Machine:
    rank = replace(toy_machine.ranks[0], batch_share=0.5)
    peer = Fabric(name="peer", bytes_per_s=1e6, latency_s=0.0, measured=False, source="made up")
    return replace(toy_machine, ranks=(rank, rank), peer=peer)


def make(machine: Machine, text: str = TEXT, **fields: object) -> Plan:
    """Worst case on the GPU: both chunks whole and the states of a slice in moment 0: 2 * 2,048 + 6,144 + 10. (In
    moment 2, at the highest tide, chunk 0 is a slice.)"""
    workload = chain_workload(2, 1024, tide_bytes=[10, 30, 40, 20, 10])
    states = ("param32", "momentum", "variance")
    initial = {Resident(0, name, Place.HOST) for name in ("param", *states)}
    initial |= {Resident(1, name, Place.GPU) for name in ("param", "remote", *states)}
    values: dict[str, object] = {
        "policy": "by hand",
        "workload": workload,
        "machine": machine,
        "settings": Settings(),
        "layout": build_layout(workload, chunk_bytes=2048, ranks=2),
        "modes": ("cpu", "pin"),
        "initial": frozenset(initial),
        "steps": steps_from_text(text),
        "gpu_budget_bytes": 2 * 2048 + 6144 + 10,
        "host_budget_bytes": 512 * 14,
    }
    return Plan(**(values | fields))  # type: ignore[arg-type]


def test_a_right_plan(two: Machine) -> None:
    plan = make(two)
    report = plan.check(plan.workload, two)
    assert report.peak_bytes == {"gpu": 2 * 2048 + 6144 + 10, "host": 512 * 14}
    # Four gathers and reduce-scatters of each chunk's 2,048 bytes, of which half is sent: three of chunk 0, two of 1.
    assert plan.moved_bytes == {"h2d": 1024, "d2h": 1024, "net": 5 * 1024}
    assert "on each of 2 ranks" in plan.describe()
    with pytest.raises(PlanError, match="gpu may hold 10250 bytes, 1 more than its budget"):
        make(two, gpu_budget_bytes=10_249).check()
    assert play(plan, every_rank=True).iteration_s == pytest.approx(play(plan).iteration_s)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        # A gradient that nobody sums: freed instead, sent down as it is, updated with as it is.
        (
            "9 net reduce_scatter chunk=0 list=remote moment=3 bytes=2048",
            "9 net drop chunk=0 list=remote bytes=1024",
            "step 9 .* gives up gradients that no reduce_scatter has summed",
        ),
        ("bytes=1024 after=9\n", "bytes=1024 after=8\n", "nothing makes step 10 .* wait for step 9"),
        # Read while only a slice is there.
        ("1 net gather chunk=0 list=remote moment=0 bytes=2048 after=0\n", "", "waits for step 1, which is not in the"),
        ("3 compute drop chunk=0 list=remote bytes=1024\n", "", "waits for step 3, which is not in the plan"),
        # The wrong lists and bytes.
        ("10 d2h writeback chunk=0 list=param", "10 d2h writeback chunk=0 list=remote", "are gathered, reduced and"),
        ("list=remote moment=0 bytes=2048", "list=remote moment=0 bytes=1024", "the whole chunk has 2048 bytes"),
        ("list=remote moment=0 bytes=2048", "list=param moment=0 bytes=2048", "needs list= one of remote"),
        ("1 net gather", "1 h2d gather", "it belongs on net"),
        ("2 compute compute moment=0 after=1", "2 compute compute moment=0 after=1 via=pageable", "only copies"),
        # Sent before it is complete: moment 3 brings the gradient of chunk 0.
        ("bytes=2048 after=8", "bytes=2048 after=7", "nothing makes step 9 .* wait for step 8|no gradient of this"),
        ("bytes=2048 after=5\n", "bytes=2048 after=4\n", "nothing makes step 6 .* wait for step 5"),
        # Sent before it is updated.
        ("17 net gather chunk=1 list=remote bytes=2048 after=15", "17 net gather chunk=1 list=remote bytes=2048",
         "step 17 .* sends the param list of chunk 1 on the gpu, which does not hold parameters|wait for step 15"),
    ],
)  # fmt: skip
def test_one_thing_wrong(two: Machine, old: str, new: str, says: str) -> None:
    assert TEXT.count(old) == 1
    with pytest.raises(PlanError, match=says):
        make(two, TEXT.replace(old, new), settings=UNCLIPPED).check()


def test_clipping_needs_every_sum(two: Machine) -> None:
    """Chunk 1's own gradient is summed by step 6, but its norm is that of chunk 0's sum (step 9), too. Without clipping
    there is no norm."""
    early = TEXT.replace("bytes=14336 after=9\n", "bytes=14336 after=6\n")
    with pytest.raises(PlanError, match=r"step 15 .* may start before step 9 .* needs all gradients summed over the"):
        make(two, early).check()
    make(two, early, settings=UNCLIPPED).check()
    early = REPLICATED.replace("9 compute gpu_adam chunk=0 bytes=28672 after=7\n", "").replace(
        "after=4\n", "after=4,8\n"
    )
    early += "11 compute gpu_adam chunk=0 bytes=28672 after=7\n"
    with pytest.raises(PlanError, match=r"step 10 .* may start before step 7 .* needs all gradients summed over the"):
        replicated(two, early).check()
    replicated(two, early.replace("after=4,8\n", "after=7,8\n")).check()


def test_collectives_need_somebody(toy_machine: Machine) -> None:
    with pytest.raises(PlanError, match="machine 'toy' has one gpu; collectives need several"):
        replicated(toy_machine).check()


SUM = """
0 h2d fetch chunk=0 list=param moment=0 bytes=1024 after=22@-1
1 net gather chunk=0 list=remote moment=0 bytes=2048 after=0
2 compute alloc chunk=0 list=grad32 place=gpu moment=1 bytes=2048
3 compute compute moment=0 after=1
4 compute alloc chunk=0 list=grad place=gpu moment=1 bytes=1024
5 compute alloc chunk=0 list=grad_remote place=gpu moment=1 bytes=1024
6 compute compute moment=1
7 net reduce_scatter chunk=0 list=grad_remote moment=1 bytes=2048 after=6
8 net free chunk=0 list=grad place=gpu bytes=1024
9 compute compute moment=2
10 compute alloc chunk=0 list=grad place=gpu moment=3 bytes=1024 after=8
11 compute alloc chunk=0 list=grad_remote place=gpu moment=3 bytes=1024
12 compute compute moment=3
13 net reduce_scatter chunk=0 list=grad_remote moment=3 bytes=2048 after=12
14 net free chunk=0 list=grad place=gpu bytes=1024
15 d2h writeback chunk=0 list=grad32 moment=3 bytes=2048 after=14
16 d2h free chunk=0 list=grad32 place=gpu bytes=2048
17 compute compute moment=4
18 compute compute moment=5
19 net reduce_scatter chunk=0 list=remote moment=5 bytes=2048 after=18
20 d2h writeback chunk=0 list=param moment=5 bytes=1024 after=19
21 d2h drop chunk=0 list=param bytes=1024
22 adam cpu_adam chunk=0 moment=5 bytes=14336 after=21,24
23 adam free chunk=0 list=grad32 place=host bytes=2048
24 compute compute moment=6
"""
"""One layer of 1,024 parameters and three micro-batches. The sum of the first two gradients goes down from the GPU."""


def test_a_sum_that_leaves_before_its_last_gradient(two: Machine) -> None:
    """CPU Adam would add the third gradient, in no time by the cost model."""
    workload = chain_workload(1, 1024, tide_bytes=10, micro_batches=3)
    states = ("param", "param32", "momentum", "variance")
    fields: dict[str, object] = {
        "workload": workload,
        "layout": build_layout(workload, chunk_bytes=2048, ranks=2),
        "modes": ("cpu",),
        "initial": frozenset(Resident(0, name, Place.HOST) for name in states),
        "host_budget_bytes": 500_000,
    }
    says = r"step 22 .* left the gpu without the gradient of tensor .* of micro-batch 2"
    with pytest.raises(PlanError, match=says):
        make(two, SUM, settings=UNCLIPPED, **fields).check()


REPLICATED = """
0 compute compute moment=0
1 compute compute moment=1
2 compute compute moment=2
3 net reduce_scatter chunk=1 list=param moment=2 bytes=2048 after=2
4 net gather chunk=1 list=param moment=2 bytes=2048
5 compute compute moment=3
6 net reduce_scatter chunk=0 list=param moment=3 bytes=2048 after=5
7 net gather chunk=0 list=param moment=3 bytes=2048
8 compute compute moment=4
9 compute gpu_adam chunk=0 bytes=28672 after=7
10 compute gpu_adam chunk=1 bytes=28672 after=4
"""


def replicated(machine: Machine, text: str = REPLICATED, **fields: object) -> Plan:
    lists = ("param", "param32", "momentum", "variance")
    return make(
        machine,
        text,
        layout=build_layout(make(machine).workload, chunk_bytes=2048),
        modes=("pin", "pin"),
        initial=frozenset(Resident(c, name, Place.GPU) for c in (0, 1) for name in lists),
        gpu_budget_bytes=28 * 1024 + 40,
        **fields,
    )


def test_everything_on_every_rank(two: Machine) -> None:
    assert replicated(two).check().peak_bytes["gpu"] == 28 * 1024 + 40


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("4 net gather chunk=1 list=param moment=2 bytes=2048\n", "", "step 10 .* waits for step 4"),
        ("7 net gather chunk=0 list=param moment=3 bytes=2048\n",
         "7 net free chunk=0 list=grad place=host bytes=2048\n",
         "which is not there"),
        ("3 net reduce_scatter chunk=1", "3 net gather chunk=1", "no reduce_scatter has summed a slice"),
        ("bytes=28672 after=7", "bytes=28672 after=6", "nothing makes step 9 .* wait for step 7"),
    ],
)  # fmt: skip
def test_one_thing_wrong_on_every_rank(two: Machine, old: str, new: str, says: str) -> None:
    assert REPLICATED.count(old) == 1
    with pytest.raises(PlanError, match=says):
        replicated(two, REPLICATED.replace(old, new), settings=UNCLIPPED).check()


def test_an_update_with_this_ranks_own_gradient(two: Machine) -> None:
    lines = [line for line in REPLICATED.strip().splitlines() if line.split()[0] not in ("3", "4")]
    text = "\n".join(lines).replace(" after=4", "")
    with pytest.raises(PlanError, match="is this rank's own: a reduce_scatter and a gather of it must come before"):
        replicated(two, text).check()


def test_the_ledger_follows_the_steps(two: Machine) -> None:
    plan = make(two)
    moves = Moves(plan)
    brought = int(moves.book([0, 1, 2, 3]).size.sum())
    assert brought == plan.layout.payload_bytes(0, "param") * 2, "own slice and the other's"
    with pytest.raises(PlanError, match=r"step 3 .* frees the remote list of chunk 0 on the gpu, which is not there"):
        moves.book([0, 1, 6, 7])  # the drop of the other rank's slice, which is not gathered yet


def test_disks_have_a_budget(two: Machine) -> None:
    """The states of chunk 0 are on the disks and come to the host for its update."""
    two = replace(two, nvme=round_machine(nvme_memory_bytes=2 * 6144).nvme)
    states = ("param32", "momentum", "variance")
    reads = "\n".join(
        f"{20 + i} nvme nvme_read chunk=0 list={name} bytes=2048 after=12" for i, name in enumerate(states)
    )
    writes = "\n".join(
        f"{30 + 2 * i} nvme nvme_write chunk=0 list={name} bytes=2048 after=16\n"
        f"{31 + 2 * i} nvme free chunk=0 list={name} place=host bytes=2048"
        for i, name in enumerate(states)
    )
    text = TEXT.replace("after=11,12", "after=11,12,22") + reads + "\n" + writes + "\n"
    initial = make(two).initial - {Resident(0, name, Place.HOST) for name in states}
    initial |= {Resident(0, name, Place.NVME) for name in states}
    plan = make(two, text, initial=initial, nvme_budget_bytes=6144)
    assert plan.check().peak_bytes["nvme"] == 3 * 2048
    with pytest.raises(PlanError, match="nvme may hold 6144 bytes, 1 more than its budget of 6143"):
        make(two, text, initial=initial, nvme_budget_bytes=6143).check()
    lost = "\n".join(line for line in text.splitlines() if "nvme_write chunk=0 list=momentum" not in line)
    with pytest.raises(PlanError, match="gives up the only current copy of the states"):
        make(two, lost, initial=initial, nvme_budget_bytes=6144).check()


@pytest.mark.parametrize("budget", [6, 0])
def test_a_buffer_on_the_disks_alone_is_counted(two: Machine, budget: int) -> None:
    two = replace(two, nvme=round_machine(nvme_memory_bytes=20).nvme)
    buffers = (("spare states", Place.NVME, 7),)
    assert replace(make(two), buffers=buffers, nvme_budget_bytes=7).check().peak_bytes["nvme"] == 7
    with pytest.raises(PlanError, match=f"nvme may hold 7 bytes, {7 - budget} more than its budget of {budget}"):
        replace(make(two), buffers=buffers, nvme_budget_bytes=budget).check()


def test_the_file_of_a_plan(two: Machine, tmp_path) -> None:  # type: ignore[no-untyped-def]
    two = replace(two, nvme=round_machine(nvme_memory_bytes=20).nvme)
    plan = make(two, nvme_budget_bytes=5)
    path = tmp_path / "plan.json"
    plan.save(path)
    read = load_plan(path)
    assert (read.machine, read.layout, read.steps, read.nvme_budget_bytes) == (two, plan.layout, plan.steps, 5)
    read.check(plan.workload, two)
    with pytest.raises(PlanError, match="made for 2 GPUs, not 1"):
        read.check(plan.workload, replace(two, ranks=(replace(two.ranks[0], batch_share=1.0),)))
    text = path.read_text()
    assert '"ranks": 2' in text
    path.write_text(text.replace('"ranks": 2', '"ranks": 3'))
    with pytest.raises(PlanError, match=r"layout\.ranks' is 3; it must divide the machine's 2 ranks"):
        load_plan(path)
