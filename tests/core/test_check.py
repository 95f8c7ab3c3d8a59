"""The checker: plans that are right pass, and each way to be wrong is caught by name.

One thing is changed at a time in a small plan that passes.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from msgspec import structs

from pstar_sim.core.checker.check import check_plan
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Resident, Settings
from pstar_sim.core.step import Place
from pstar_sim.errors import PlanError
from pstar_sim.testing import chain_workload
from pstar_sim.workload.workload import Use, UseKind

GPU, HOST = Place.GPU, Place.HOST
STATES = ("param32", "momentum", "variance")
MakePlan = Callable[..., Plan]


def reject(plan: Plan, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_plan(plan)


# Two chunks, one micro-batch, classical update (tests/conftest.py).


def test_the_plan_is_right_and_its_worst_case_is_exact(hand_plan: MakePlan):
    report = check_plan(hand_plan())
    assert (report.steps, report.moments, report.iterations) == (15, 5, 2)
    # Both chunks and the highest tide: 2 * 2,048 + 40; chunk 0 is fetched again (step 6) while moment 2 runs.
    assert report.peak_bytes == {"gpu": 4136, "host": 28_672}
    assert report.peak_at == {"gpu": 2, "host": -1}
    assert set(report.running["gpu"]) == {5, 6}
    assert "gpu: at most 4.136 kB (4136 bytes, in moment 2)" in report.describe()


def test_one_byte_less_is_too_little(hand_plan: MakePlan):
    with pytest.raises(PlanError) as caught:
        check_plan(hand_plan(gpu_budget_bytes=4135))
    said = str(caught.value)
    assert "gpu may hold 4136 bytes, 1 more than its budget of 4135: in moment 2" in said
    assert "step 5 (moment 2)" in said and "step 6 (fetch chunk 0 param)" in said
    reject(
        hand_plan(host_budget_bytes=28_671), "host may hold 28672 bytes, 1 more than its budget of 28671: between two"
    )
    buffers = (("staging", GPU, 100),)
    reject(hand_plan(buffers=buffers), "gpu may hold 4236 bytes, 100 more")


def test_a_memory_edge_lowers_the_worst_case(hand_plan: MakePlan, hand_text: str):
    fetch = "6 h2d fetch chunk=0 list=param moment=3 bytes=2048 after=3\n"
    late = hand_text.replace(fetch, "").replace("9 compute", fetch.replace("after=3", "after=3,8") + "9 compute")
    # Chunk 0 comes back only after chunk 1 has left: the worst is now both chunks before and in moment 0, tide 10.
    assert check_plan(hand_plan(late)).peak_bytes["gpu"] == 2 * 2048 + 10


def test_the_tide_alone_can_be_the_worst(hand_plan: MakePlan):
    w = chain_workload(2, 1024, tide_bytes=[10, 9000, 40, 20, 10])
    # Moment 1 starts while chunk 0 (dropped by step 3 before) is away: chunk 1 and 9,000.
    assert check_plan(hand_plan(workload=w, gpu_budget_bytes=20_000)).peak_bytes["gpu"] == 9000 + 4096
    # 4,096: step 6 may bring chunk 0 back as soon as step 3 has dropped it, while moment 1 runs.


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        # structure
        ("1 h2d fetch", "0 h2d fetch", "step id 0 is used twice"),
        ("after=7,12", "after=7,99", r"step 13 \(cpu_adam chunk 1\) waits for step 99, which is not in the plan"),
        ("moment=0 after=0", "moment=0 after=14", "a deadlock: .* in a circle"),
        ("compute moment=1 ", "compute moment=3 ", "compute queue has moment 3 where moment 1 belongs"),
        (
            "12 compute compute moment=4\n",
            "12 compute gpu_adam chunk=0 bytes=28672\n",
            "already|the end where moment 4",
        ),
        ("0 h2d fetch", "0 d2h fetch", r"step 0 \(fetch chunk 0 param\) is on queue d2h; it belongs on h2d"),
        (
            "13 adam cpu_adam chunk=1 moment=2",
            "13 adam cpu_adam chunk=0 moment=3",
            "step 14 .* that step 13 .* updates already",
        ),
        (
            "14 adam cpu_adam chunk=0 moment=3 bytes=28672",
            "14 adam alloc chunk=0 list=grad place=host bytes=2048",
            "chunk 0 gets gradients but no cpu_adam",
        ),
        (
            "0 h2d fetch chunk=0 list=param moment=0 bytes=2048",
            "0 h2d fetch chunk=0 list=param moment=0 bytes=2047",
            "step 0 .* has bytes=2047; the payload has 2048 bytes",
        ),
        ("bytes=28672 after=7", "after=7", "step 13 .* has bytes=0; bytes= must be its memory traffic"),
        # 28 bytes of each of 1,024 parameters
        ("bytes=28672 after=7", "bytes=28671 after=7", "step 13 .* has bytes=28671; .* 28672 .1024 parameters"),
        ("moment=2 bytes=28672", "moment=1 bytes=28672", "step 13 .* has moment=1; .* last gradient comes in moment"),
        ("13 adam cpu_adam chunk=1", "13 adam cpu_adam chunk=1 list=param", "step 13 .* has list=param; an update"),
        (
            "13 adam cpu_adam chunk=1",
            "13 adam cpu_adam chunk=1 place=host",
            "step 13 .* has place=host; where a cpu_adam",
        ),
        ("0 h2d fetch chunk=0", "0 h2d fetch place=gpu chunk=0", "step 0 .* has place=gpu; where a fetch"),
        (
            "0 h2d fetch chunk=0 list=param moment=0",
            "0 h2d fetch chunk=0 list=param moment=5",
            "has moment=5; .* has 5",
        ),
        ("2 compute compute moment=0", "2 compute compute chunk=0 moment=0", "step 2 .* has chunk=, list= or place="),
        (
            "2 compute compute moment=0",
            "2 compute compute bytes=5 moment=0",
            "step 2 .* has bytes=5; a moment moves no bytes",
        ),
        ("0 h2d fetch chunk=0 list=param", "0 h2d fetch chunk=0", "step 0 .* needs list="),
        ("7 d2h writeback chunk=1", "7 d2h writeback chunk=8", "step 7 .* needs chunk=, below 2"),
        ("13 adam cpu_adam", "13 net gather list=remote", "collectives need several"),
        # what a moment needs
        (
            "0 h2d fetch chunk=0 list=param moment=0",
            "0 h2d fetch chunk=1 list=param moment=0",
            "reads tensor 'layers.0.weight0' in the param list of chunk 0 on the gpu, which is not there|nothing makes",
        ),
        (
            "moment=1 after=1",
            "moment=1",
            r"nothing makes step 4 \(moment 1\) wait for step 1 \(fetch chunk 1 param\).*an edge after=1 is missing",
        ),
        ("moment=3 after=6", "moment=3", r"nothing makes step 9 \(moment 3\) wait for step 6"),
        (
            "bytes=2048 after=3\n",
            "bytes=2048\n",
            r"nothing makes step 6 \(fetch chunk 0 param\) wait for step 3 \(drop chunk 0 param\)",
        ),
        # moved while in use, or before it is complete
        (
            "bytes=2048 after=5\n",
            "bytes=2048 after=4\n",
            r"nothing makes step 7 \(writeback chunk 1 param\) wait for step 5 \(moment 2\)",
        ),
        ("bytes=2048 after=9\n", "bytes=2048\n", r"nothing makes step 10 \(writeback chunk 0 param\) wait for step 9"),
        # updates
        (
            "after=7,12",
            "after=12",
            r"nothing makes step 13 \(cpu_adam chunk 1\) wait for step 7 \(writeback chunk 1 param\)",
        ),
        (
            "after=7,12",
            "after=7",
            r"step 13 .* may start before step 12 \(moment 4\) has ended; the barrier \(clip\) forbids it",
        ),
        # across the cut
        (
            "after=11@-1,14@-1",
            "after=11@-1",
            r"step 0 .* wait for step 14 \(cpu_adam chunk 0\) of the previous iteration.*after=14@-1 is missing",
        ),
        (
            "after=11@-1,14@-1",
            "after=14@-1",
            r"nothing makes step 0 .* wait for step 11 \(drop chunk 0 param\) of the previous",
        ),
        (
            "11 d2h drop chunk=0 list=param bytes=2048\n",
            "11 d2h alloc chunk=0 list=grad place=host bytes=2048\n",
            "not a steady state: after iteration 0 the grad list of chunk 0 .* left over|nothing makes step 14",
        ),
        (
            "8 d2h drop chunk=1 list=param",
            "8 d2h free chunk=1 place=host list=param",
            "which is not there|nothing makes",
        ),
    ],
)
def test_one_thing_wrong_is_caught_by_name(hand_plan: MakePlan, hand_text: str, old: str, new: str, said: str):
    assert hand_text.count(old) >= 1
    reject(hand_plan(hand_text.replace(old, new, 1)), said)


def test_a_chunk_that_is_not_written_back_is_caught(hand_plan: MakePlan, hand_text: str):
    text = hand_text.replace("7 d2h writeback chunk=1 list=param moment=2 bytes=2048 after=5\n", "").replace(
        "7,12", "12"
    )
    text = text.replace("8 d2h drop chunk=1 list=param bytes=2048", "8 d2h drop chunk=1 list=param bytes=2048 after=5")
    reject(
        hand_plan(text),
        r"step 8 \(drop chunk 1 param\) gives up the only current copy of the gradients in the param list of chunk 1",
    )


def test_without_barrier_adam_may_run_inside_backward(hand_plan: MakePlan, hand_text: str):
    eager = hand_text.replace("after=7,12", "after=7").replace("after=10,12", "after=10")
    check_plan(hand_plan(eager, settings=Settings(update="eager", clip=False)))
    reject(hand_plan(eager, settings=Settings(update="step", clip=False)), r"barrier \(update=step\)")
    half = chain_workload(2, 1024, tide_bytes=[10, 30, 40, 20, 10], dtype="fp16")
    scaled = {"workload": half, "layout": build_layout(half, chunk_bytes=2048)}
    reject(hand_plan(eager, **scaled, settings=Settings(update="eager", clip=False)), r"barrier \(loss scaling\)")


def test_a_chunk_kept_across_the_cut_would_be_stale(hand_plan: MakePlan, hand_text: str):
    kept = hand_text.replace("11 d2h drop chunk=0 list=param bytes=2048\n", "").replace("11@-1,14@-1", "14@-1")
    kept = kept.replace("0 h2d fetch chunk=0 list=param moment=0 bytes=2048 after=14@-1\n", "").replace(
        " after=0\n", "\n"
    )
    kept = kept.replace("after=13@-1", "after=8@-1,13@-1")
    initial = hand_plan().initial | {Resident(0, "param", GPU)}
    reject(
        hand_plan(kept, initial=initial),
        r"step 2 \(moment 0\) reads stale parameters: .* has 0 updates where iteration 1 needs 1|after its gradient",
    )


def test_fresh_parameters_may_be_fetched_into_a_payload_that_stays(hand_plan: MakePlan, hand_text: str):
    # As ZeRO-Offload's copy-back, but one iteration later: the fetch writes over last iteration's gradient.
    kept = hand_text.replace("11 d2h drop chunk=0 list=param bytes=2048\n", "").replace("11@-1,14@-1", "14@-1")
    kept = kept.replace("3 compute drop chunk=0 list=param bytes=2048\n", "")
    kept = kept.replace("6 h2d fetch chunk=0 list=param moment=3 bytes=2048 after=3\n", "").replace(
        "moment=3 after=6", "moment=3"
    )
    report = check_plan(hand_plan(kept, initial=hand_plan().initial | {Resident(0, "param", GPU)}))
    assert report.peak_bytes["gpu"] == 2 * 2048 + 40


def test_a_read_after_the_final_gradient_is_caught(hand_plan: MakePlan):
    w = hand_plan().workload
    late = replace(w, uses=(*w.uses, Use(moment=3, tensor=1, kind=UseKind.READ)))
    plan = hand_plan(workload=late)
    reject(plan, r"step 9 \(moment 3\)")
    text = plan.to_text()
    # Even where chunk 1 is still there: its gradient lies in its place since moment 2.
    stay = text.replace("7 d2h writeback chunk=1 list=param moment=2 bytes=2048 after=5\n", "")
    stay = stay.replace("8 d2h drop chunk=1 list=param bytes=2048\n", "").replace(
        "12 compute",
        "7 d2h writeback chunk=1 list=param moment=2 bytes=2048 after=9\n"
        "8 d2h drop chunk=1 list=param bytes=2048\n12 compute",
    )
    reject(
        hand_plan(stay, workload=late), r"reads tensor 'layers.1.weight0' in .* after its gradient has overwritten it"
    )


def test_a_wider_copy_is_allowed_and_counted(hand_plan: MakePlan, hand_text: str):
    wide = hand_text.replace("moment=0 bytes=2048", "moment=0 bytes=4096")
    check_plan(hand_plan(wide))  # fp32 over the link, 1,024 * 4
    reject(hand_plan(hand_text.replace("moment=0 bytes=2048", "moment=0 bytes=8192")), "has bytes=8192")


def test_nothing_may_run_ahead_without_bound(hand_plan: MakePlan):
    # Compute needs nothing from d2h, so d2h may be any number of iterations late.
    w = chain_workload(1, 1024)
    pinned = frozenset(Resident(0, name, GPU) for name in ("param", *STATES))
    text = """
0 compute compute moment=0
1 compute compute moment=1
2 compute compute moment=2
3 compute gpu_adam chunk=0 bytes=28672
4 d2h writeback chunk=0 list=momentum bytes=4096 after=3
5 d2h free chunk=0 list=momentum place=host bytes=4096
"""
    values = {
        "workload": w,
        "layout": build_layout(w),
        "modes": ("pin",),
        "initial": pinned,
        "gpu_budget_bytes": 14_336,
    }
    reject(hand_plan(text, **values), "nothing keeps queue compute from running 3 iterations ahead")
    alone = "\n".join(line for line in text.splitlines() if "d2h" not in line)
    report = check_plan(hand_plan(alone, **values))
    assert report.peak_bytes == {"gpu": 1024 * 14, "host": 0}  # param, param32, momentum, variance
    assert report.iterations == 2
    early = alone.replace("3 compute gpu_adam chunk=0 bytes=28672", "").replace(
        "2 compute compute", "3 compute gpu_adam chunk=0 bytes=28672\n2 compute compute"
    )
    reject(hand_plan(early, **values), r"step 3 \(gpu_adam chunk 0\) may start before step 2 \(moment 2\)")
    reject(hand_plan(alone, **values | {"initial": pinned - {Resident(0, "momentum", GPU)}}), "needs the momentum list")


# One chunk, two micro-batches: the first gradient leaves through a list of its own, the second in place.

TWO = """
0 h2d fetch chunk=0 list=param moment=0 bytes=2048 after=10@-1,13@-1
1 compute compute moment=0 after=0
2 compute alloc chunk=0 list=grad place=gpu moment=1 bytes=2048
3 compute compute moment=1
4 d2h writeback chunk=0 list=grad moment=1 bytes=2048 after=3
5 d2h free chunk=0 list=grad place=gpu bytes=2048
6 adam cpu_add chunk=0 list=grad moment=1 bytes=10240 after=4
7 compute compute moment=2
8 compute compute moment=3
9 d2h writeback chunk=0 list=param moment=3 bytes=2048 after=8
10 d2h drop chunk=0 list=param bytes=2048
11 compute compute moment=4
12 adam cpu_add chunk=0 list=param moment=3 bytes=10240 after=9
13 adam cpu_adam chunk=0 moment=3 bytes=28672 after=11
"""


@pytest.fixture
def two(hand_plan: MakePlan) -> MakePlan:
    w = chain_workload(1, 1024, micro_batches=2, tide_bytes=100)

    def make(text: str = TWO, **fields: object) -> Plan:
        values: dict[str, object] = {
            "workload": w,
            "layout": build_layout(w),
            "modes": ("cpu",),
            "initial": frozenset(Resident(0, name, HOST) for name in ("param", "grad32", *STATES)),
            "gpu_budget_bytes": 10_000,
        }
        return hand_plan(text, **(values | fields))

    return make


def test_gradients_are_accumulated_over_micro_batches(two: MakePlan):
    # gpu: param and grad of 2,048 and the tide; host: 1,024 * (2 + 12 + 4) and the grad on its way, 2,048.
    assert check_plan(two()).peak_bytes == {"gpu": 4196, "host": 18_432 + 2048}
    plain = TWO.replace("12 adam cpu_add chunk=0 list=param moment=3 bytes=10240 after=9\n", "")
    plain = plain.replace("after=11", "after=9,11")
    check_plan(two(plain, settings=Settings(clip=False)))  # Adam itself reads the last gradient where it lies


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "6 adam cpu_add chunk=0 list=grad moment=1 bytes=10240 after=4\n",
            "",
            "the norm misses the gradient of tensor 'layers.0.weight0' of micro-batch 0",
        ),
        (
            "moment=1 bytes=10240 after=4",
            "moment=1 bytes=10240",
            r"nothing makes step 6 \(cpu_add|which is not there|no gradient",
        ),
        ("2 compute alloc chunk=0 list=grad place=gpu moment=1 bytes=2048\n", "", "which is not there|overwritten"),
        ("5 d2h free chunk=0 list=grad place=gpu bytes=2048\n", "", "left over"),
        # 8 bytes of grad32 and 2 of the gradient, of each of 1,024 parameters
        (
            "moment=1 bytes=10240",
            "moment=1 bytes=8192",
            "step 6 .* has bytes=8192; .* 10240 .1024 parameters, 10 bytes",
        ),
        (
            "cpu_add chunk=0 list=grad",
            "cpu_add chunk=0 list=momentum",
            "step 6 .* has list=momentum; list= must be grad",
        ),
        (
            "moment=3 bytes=10240 after=9",
            "moment=3 bytes=10240",
            "nothing makes step 9 .* wait for step 12|nothing makes step 12|holds no gradient",
        ),
        (
            "list=grad moment=1 bytes=2048 after=3",
            "list=grad moment=1 bytes=2048 after=1",
            "nothing makes step 4 .* wait for step 3|which is not there|nothing has filled",
        ),
        (
            "12 adam cpu_add chunk=0 list=param",
            "12 adam cpu_add chunk=0 list=grad",
            "the grad list of chunk 0 on the host, which is not there",
        ),
    ],
)
def test_one_thing_wrong_with_accumulation_is_caught(two: MakePlan, old: str, new: str, said: str):
    assert TWO.count(old) == 1
    reject(two(TWO.replace(old, new)), said)


def test_a_lost_micro_batch_is_caught(two: MakePlan):
    lost = TWO.replace(
        "6 adam cpu_add chunk=0 list=grad moment=1 bytes=10240",
        "6 adam free chunk=0 list=grad place=host bytes=2048 moment=1",
    )
    reject(two(lost), "does not find the gradient of tensor 'layers.0.weight0' of micro-batch 0 on the host")


def test_a_gradient_added_twice_is_caught(two: MakePlan):
    twice = TWO.replace("after=11\n", "after=11,14\n") + "14 adam cpu_add chunk=0 list=param moment=3 bytes=10240\n"
    twice = twice.replace("13 adam cpu_adam chunk=0 moment=3 bytes=28672 after=11,14\n", "") + (
        "13 adam cpu_adam chunk=0 moment=3 bytes=28672 after=11\n"
    )
    reject(two(twice), "step 14 .* adds the gradient of micro-batch 1 a second time")


def test_with_clipping_no_adam_before_the_last_add(two: MakePlan):
    late = TWO.replace("12 adam cpu_add chunk=0 list=param moment=3 bytes=10240 after=9\n", "").replace(
        "after=11", "after=9,11"
    )
    swapped = late + "12 adam cpu_add chunk=0 list=param moment=3 bytes=10240 after=9\n"
    reject(two(swapped), r"step 13 .* may start before step 12 \(cpu_add chunk 0 param\) has ended; the gradient norm")


def test_a_gradient_in_place_between_micro_batches_is_caught(two: MakePlan):
    text = "\n".join(line for line in TWO.splitlines() if line.split() and line.split()[0] not in ("2", "4", "5", "6"))
    reject(two(text), r"step 7 \(moment 2\) reads tensor 'layers.0.weight0' .* after its gradient has overwritten it")


def test_pinned_chunks_accumulate_where_they_are(two: MakePlan):
    text = """
0 compute compute moment=0
1 compute compute moment=1
2 compute compute moment=2
3 compute compute moment=3
4 compute compute moment=4
5 compute gpu_adam chunk=0 bytes=28672
"""
    lists = ("param", "grad32", *STATES)
    pinned = {"modes": ("pin",), "initial": frozenset(Resident(0, name, GPU) for name in lists)}
    report = check_plan(two(text, gpu_budget_bytes=18_532, **pinned))
    assert report.peak_bytes["gpu"] == 1024 * 18 + 100
    more = text.replace("bytes=28672", "bytes=28673")
    said = "step 5 .gpu_adam chunk 0. has bytes=28673; bytes= must be its memory traffic, 28672 .1024 parameters, 28 "
    reject(two(more, gpu_budget_bytes=18_532, **pinned), said)
    without = frozenset(Resident(0, name, GPU) for name in ("param", *STATES))
    reject(two(text, gpu_budget_bytes=18_532, modes=("pin",), initial=without), "after its gradient has overwritten it")


def test_numbers_below_zero_are_not_taken_from_the_end(hand_plan: MakePlan, hand_text: str):
    """Plan files have none; a policy of one's own could."""
    plan = hand_plan(hand_text)
    for at, field in ((0, "chunk"), (13, "moment")):
        steps = tuple(structs.replace(s, **{field: -1}) if s.id == at else s for s in plan.steps)
        reject(replace(plan, steps=steps), f"step {at} .*{field}=")
