"""The checker and the simulator on streamed chunks: states live on the host and visit the GPU for one update.

Chunk 0 of the plan of tests/conftest.py is as it was (CPU Adam), chunk 1 is streamed.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from pstar_sim.core.checker.check import check_plan
from pstar_sim.core.effects import CATEGORIES
from pstar_sim.core.layout import build_layout
from pstar_sim.core.ledger import WIDTH, Moves
from pstar_sim.core.plan import Plan, Resident, Settings
from pstar_sim.core.step import Place
from pstar_sim.errors import PlanError
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload

MakePlan = Callable[..., Plan]
EAGER = Settings(update="eager", clip=False)
HOST_LISTS = ("param", "param32", "momentum", "variance")

STREAM = """
0 h2d fetch chunk=0 list=param moment=0 bytes=2048 after=24@-1,25@-1
1 h2d fetch chunk=1 list=param moment=1 bytes=2048 after=22@-1
2 compute compute moment=0 after=0
3 compute drop chunk=0 list=param bytes=2048
4 compute compute moment=1 after=1
5 h2d fetch chunk=1 list=param32 moment=2 bytes=4096 after=16@-1
6 h2d fetch chunk=1 list=momentum moment=2 bytes=4096 after=18@-1
7 h2d fetch chunk=1 list=variance moment=2 bytes=4096 after=20@-1
8 h2d fetch chunk=0 list=param moment=3 bytes=2048 after=3
9 compute compute moment=2
10 compute gpu_adam chunk=1 moment=2 bytes=28672 after=5,6,7
15 d2h writeback chunk=1 list=param32 moment=2 bytes=4096 after=10
16 d2h drop chunk=1 list=param32 bytes=4096
17 d2h writeback chunk=1 list=momentum moment=2 bytes=4096
18 d2h drop chunk=1 list=momentum bytes=4096
19 d2h writeback chunk=1 list=variance moment=2 bytes=4096
20 d2h drop chunk=1 list=variance bytes=4096
21 d2h writeback chunk=1 list=param moment=2 bytes=2048
22 d2h drop chunk=1 list=param bytes=2048
11 compute compute moment=3 after=8
23 d2h writeback chunk=0 list=param moment=3 bytes=2048 after=11
24 d2h drop chunk=0 list=param bytes=2048
12 compute compute moment=4
25 adam cpu_adam chunk=0 moment=3 bytes=28672 after=23
"""


def line(text: str, step: int) -> str:
    return next(row for row in text.splitlines() if row.startswith(f"{step} ")) + "\n"


def without(text: str, *steps: int) -> str:
    for step in steps:
        text = text.replace(line(text, step), "")
    return text


@pytest.fixture
def streamed(hand_plan: MakePlan) -> MakePlan:
    def make(text: str = STREAM, **fields: object) -> Plan:
        values: dict[str, object] = {"settings": EAGER, "modes": ("cpu", "stream"), "gpu_budget_bytes": 16_424}
        return hand_plan(text, **(values | fields))

    return make


def reject(plan: Plan, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_plan(plan)


def test_a_streamed_chunk_is_right_and_its_worst_case_is_exact(streamed: MakePlan) -> None:
    """Both working lists, 2 * 2,048, the states of chunk 1, 12 * 1,024, and the highest tide, 40."""
    report = check_plan(streamed())
    assert report.peak_bytes == {"gpu": 2 * 2048 + 12_288 + 40, "host": 28_672}
    reject(streamed(gpu_budget_bytes=16_423), "gpu may hold 16424 bytes, 1 more")


def test_the_simulator_and_the_ledger_follow_it(streamed: MakePlan) -> None:
    plan = streamed()
    timeline = play(plan)
    assert timeline.peak_bytes == {"gpu": 16_424, "host": 28_672}
    assert timeline.moved_bytes == {"h2d": 3 * 2048 + 12_288, "d2h": 2 * 2048 + 12_288}
    changes = Moves(plan).book(range(2 * len(plan.steps)))  # one step after the other
    by_step: dict[tuple[int, int], list[tuple[str, int]]] = {}  # (id, ends?) -> (category, bytes)
    for event, cell, size in zip(changes.event.tolist(), changes.cell.tolist(), changes.size.tolist()):
        key = plan.steps[event // 2].id, event % 2
        by_step.setdefault(key, []).append((CATEGORIES[cell % WIDTH], size))
    assert [by_step[i, 0] for i in (5, 6, 7)] == [[("states", 4096)]] * 3
    assert (15, 0) not in by_step  # the host has its copy all the time
    assert [by_step[i, 1] for i in (16, 18, 20)] == [[("states", -4096)]] * 3
    assert changes.held[0][-1] == Moves(plan).used[0] == 10


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # dropping what only the GPU knows
        (lambda t: without(t, 17), r"step 18 \(drop .* only current copy of the states in the momentum list"),
        (
            lambda t: without(t, 21).replace("list=param bytes=2048\n11", "list=param bytes=2048 after=10\n11"),
            r"step 22 \(drop chunk 1 param\) gives up the only current copy of the parameters",
        ),
        # Adam without its states, or before they are there
        (
            lambda t: without(t, 7, 19, 20).replace("after=5,6,7", "after=5,6"),
            r"step 10 .* needs the variance list of chunk 1 on the gpu, which is not there",
        ),
        (lambda t: t.replace("after=5,6,7", "after=5,6"), r"nothing makes step 10 .* wait for step 7"),
        # the next iteration must not fetch states before the last one has written them back
        (
            lambda t: line(t, 5).replace("after=16@-1", "after=3@-1") + without(t, 5).lstrip(),
            r"nothing makes step 5 .* wait for step 1[56] .* previous",
        ),
        # written back before it is updated
        (
            lambda t: t.replace(
                "15 d2h writeback chunk=1 list=param32 moment=2 bytes=4096 after=10",
                "15 d2h writeback chunk=1 list=param32 moment=2 bytes=4096 after=9",
            ),
            r"nothing makes step 15 .* wait for step 10|which is not there|nothing makes step 15",
        ),
        # states that stay on the GPU are not there when the iteration began
        (lambda t: without(t, 20).replace("20@-1", "19@-1"), r"the variance list of chunk 1 on the gpu is left over"),
    ],
)
def test_one_thing_wrong_with_a_stream_is_caught(streamed: MakePlan, change: Callable[[str], str], said: str) -> None:
    text = change(STREAM)
    assert text != STREAM
    reject(streamed(text), said)


def test_a_state_kept_on_both_sides_may_not_diverge(streamed: MakePlan) -> None:
    """The momentum stays on the GPU for good and its host copy is never told."""
    both = streamed().initial | {Resident(1, "momentum", Place.GPU)}
    text = without(STREAM, 6, 17, 18).replace("after=5,6,7", "after=5,7")
    reject(streamed(text, initial=both), "the copies of the momentum list of chunk 1 diverge: .*1 updates on the gpu")
    told = without(STREAM, 6, 18).replace("after=5,6,7", "after=5,7")
    # Step 17 writes it back; the next update must wait for that copy.
    told = told.replace("after=5,7", "after=5,7,17@-1")
    report = check_plan(streamed(told, initial=both))
    assert report.peak_bytes["gpu"] == 16_424


def test_parameters_may_stay_over_the_border(streamed: MakePlan) -> None:
    """Written back and not dropped: the updated parameters are there for the next forward."""
    kept = without(STREAM, 1, 22).replace("moment=1 after=1", "moment=1")
    kept = kept.replace("moment=2\n10 ", "moment=2 after=21@-1\n10 ")  # the gradient goes where the copy was read
    initial = streamed().initial | {Resident(1, "param", Place.GPU)}
    assert check_plan(streamed(kept, initial=initial)).peak_bytes["gpu"] == 16_424
    silent = without(kept, 21).replace(" after=21@-1", "")
    # The host's parameters then are for ever one update behind.
    reject(streamed(silent, initial=initial), "has other contents after each iteration|diverge")


def test_the_mode_says_where_adam_runs(streamed: MakePlan) -> None:
    reject(streamed(modes=("cpu", "cpu")), r"step 10 .* is not how a chunk of mode 'cpu' is updated")
    reject(streamed(modes=("stream", "stream")), r"step 25 .* is not how a chunk of mode 'stream' is updated")


# One chunk, two micro-batches, clipping: the sum is on the host and comes along.

TWO = """
0 h2d fetch chunk=0 list=param moment=0 bytes=2048 after=24@-1
1 compute compute moment=0 after=0
2 compute alloc chunk=0 list=grad place=gpu moment=1 bytes=2048
3 compute compute moment=1
4 d2h writeback chunk=0 list=grad moment=1 bytes=2048 after=3
5 d2h free chunk=0 list=grad place=gpu bytes=2048
6 adam cpu_add chunk=0 list=grad moment=1 bytes=10240 after=4
7 compute compute moment=2
8 compute compute moment=3
9 d2h writeback chunk=0 list=param moment=3 bytes=2048 after=8
10 adam cpu_add chunk=0 list=param moment=3 bytes=10240 after=9
11 compute compute moment=4
12 h2d fetch chunk=0 list=grad32 moment=4 bytes=4096 after=10
13 h2d fetch chunk=0 list=param32 moment=4 bytes=4096
14 h2d fetch chunk=0 list=momentum moment=4 bytes=4096
15 h2d fetch chunk=0 list=variance moment=4 bytes=4096
16 compute gpu_adam chunk=0 moment=3 bytes=28672 after=15
17 compute drop chunk=0 list=grad32 bytes=4096
18 d2h writeback chunk=0 list=param32 moment=3 bytes=4096 after=16
19 d2h drop chunk=0 list=param32 bytes=4096
20 d2h writeback chunk=0 list=momentum moment=3 bytes=4096
21 d2h drop chunk=0 list=momentum bytes=4096
22 d2h writeback chunk=0 list=variance moment=3 bytes=4096
23 d2h drop chunk=0 list=variance bytes=4096
25 d2h writeback chunk=0 list=param moment=3 bytes=2048
24 d2h drop chunk=0 list=param bytes=2048
"""


@pytest.fixture
def two(hand_plan: MakePlan) -> MakePlan:
    w = chain_workload(1, 1024, micro_batches=2, tide_bytes=100)

    def make(text: str = TWO, **fields: object) -> Plan:
        values: dict[str, object] = {
            "workload": w,
            "layout": build_layout(w),
            "modes": ("stream",),
            "initial": frozenset(Resident(0, name, Place.HOST) for name in (*HOST_LISTS, "grad32")),
            "gpu_budget_bytes": 2048 + 16_384 + 100,
        }
        return hand_plan(text, **(values | fields))

    return make


def test_accumulated_gradients_come_along(two: MakePlan) -> None:
    """On the GPU the working list, three states, grad32 and the tide; on the host 18 bytes per parameter and one
    gradient on its way."""
    assert check_plan(two()).peak_bytes == {"gpu": 2048 + 16_384 + 100, "host": 18_432 + 2048}
    assert play(two()).peak_bytes["gpu"] == 2048 + 16_384 + 100


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: without(t, 12, 17).replace(
                "13 h2d fetch chunk=0 list=param32 moment=4 bytes=4096",
                "13 h2d fetch chunk=0 list=param32 moment=4 bytes=4096 after=10",
            ),
            "does not find the gradient .* of micro-batch 0 on the gpu",
        ),
        (
            lambda t: without(t, 10).replace("bytes=4096 after=10", "bytes=4096 after=6,9"),
            "the norm misses the gradient .* of micro-batch 1",
        ),
        (
            lambda t: t.replace("bytes=4096 after=10", "bytes=4096 after=6"),
            r"step 16 .* may start before step 10 .*; the gradient norm",
        ),
        (lambda t: without(t, 17), "the grad32 list of chunk 0 on the gpu is left over"),
    ],
)
def test_one_thing_wrong_with_accumulation_is_caught(two: MakePlan, change: Callable[[str], str], said: str) -> None:
    text = change(TWO)
    assert text != TWO
    reject(two(text), said)


def test_without_clipping_the_last_gradient_lies_in_place(two: MakePlan) -> None:
    text = without(TWO, 9, 10).replace("bytes=4096 after=10", "bytes=4096 after=5,6")
    plan = two(text, settings=Settings(update="step", clip=False))
    check_plan(plan)
    reject(replace(plan, settings=Settings()), "the norm misses the gradient")


def test_a_sum_that_is_there_already_is_changed_by_what_is_added(two: MakePlan) -> None:
    """The sum begins with micro-batch 0 and takes in micro-batch 1: it is copied behind both."""
    plain = Settings(update="step", clip=False)
    last = "25 d2h writeback chunk=0 list=param moment=3 bytes=2048"
    text = TWO.replace(last, f"{last} after=10")
    check_plan(two(text, settings=plain))
    early = text.replace("list=grad32 moment=4 bytes=4096 after=10", "list=grad32 moment=4 bytes=4096 after=6")
    reject(two(early, settings=plain), "nothing makes step 12 .* wait for step 10 .*: both touch the grad32 list")
