"""The ledger: who holds what where, one move at a time and a whole run at once; what is refused changes nothing."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest
from drawn import TIME_TO_SHRINK, Drawn, jobs, planned, seeds
from hypothesis import given, settings
from msgspec import structs

from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.effects import CATEGORIES, frees, gradient_list, takes, tide_at_cut, tide_moves
from pstar_sim.core.follow import follow
from pstar_sim.core.ledger import PLACES, WIDTH, Changes, Holdings, Ledger, Moves, Payloads
from pstar_sim.core.plan import Plan, Resident, Settings, steps_from_text
from pstar_sim.core.program import Program
from pstar_sim.core.step import EFFECTS, Kind, Place, from_text
from pstar_sim.cost import CostModel
from pstar_sim.errors import PlanError
from pstar_sim.policy.registry import built_in
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, random_jitter

GPU, HOST = Place.GPU, Place.HOST
MakePlan = Callable[..., Plan]


@pytest.fixture
def ledger(hand_plan: MakePlan) -> Ledger:
    """Two chunks of 2,048 bytes; room for one and a half on the gpu, 100 bytes of which are a buffer."""
    return Ledger(hand_plan(gpu_budget_bytes=3072, host_budget_bytes=100_000, buffers=(("staging", GPU, 100),)))


def test_a_claim_counts_before_memory_is_there_and_is_withdrawn_where_it_is_refused(ledger: Ledger):
    assert ledger.claim(0, "param", GPU) == 2048
    assert (ledger.used_bytes(GPU), ledger.room_bytes(GPU), ledger.holds(0, "param", GPU)) == (2148, 924, False)
    with pytest.raises(PlanError, match="param of chunk 0 already has memory on the gpu"):
        ledger.claim(0, "param", GPU)
    ledger.withdraw(0, "param", GPU)
    assert (ledger.used_bytes(GPU), ledger.peak_bytes[0], ledger.residents) == (100, 100, frozenset())
    ledger.claim(0, "param", GPU)
    ledger.hold(0, "param", GPU)
    assert (ledger.peak_bytes[0], ledger.residents) == (2148, {Resident(0, "param", GPU)})
    ledger.begin_release(0, "param", GPU)
    assert ledger.used_bytes(GPU) == 2148, "until its memory is given back"
    assert ledger.end_release(0, "param", GPU) == 2048
    assert (ledger.used_bytes(GPU), ledger.residents) == (100, frozenset())


def test_an_interruption_between_two_columns_of_a_new_payload_leaves_nothing_behind(hand_plan: MakePlan):
    class Once:
        """A layout whose first answer does not come."""

        def __init__(self) -> None:
            self.asked = 0

        def payload_bytes(self, chunk: int, list_name: str) -> int:
            self.asked += 1
            if self.asked == 1:
                raise KeyboardInterrupt
            return hand_plan().layout.payload_bytes(chunk, list_name)

    payloads = Payloads(Once())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        payloads.number(0, "param", 0)
    assert [payloads.number(1, "param", 1), payloads.number(0, "grad32", 0)] == [0, 1]
    assert payloads.names == [(1, "param", 1), (0, "grad32", 0)]
    assert (len(payloads.sizes), payloads.places, len(payloads.categories)) == (2, [1, 0], 2)


def test_figures_of_the_past_have_no_claims_and_stay_when_all_is_given_back(ledger: Ledger):
    ledger.claim(0, "param", GPU)
    assert (ledger.used_bytes(GPU), ledger.held_bytes(GPU)) == (2148, 100)
    ledger.hold(0, "param", GPU)
    ledger.clear()
    assert (ledger.held_bytes(GPU), ledger.residents) == (2148, frozenset())


@pytest.mark.parametrize("name", ["all_on_gpu", "tide", "zero_offload", "patrickstar"])
def test_an_iteration_that_is_the_optimizer_step_alone(name: str):
    whole = chain_workload(2, 10**6)
    alone = replace(whole, moments=(whole.moments[-1],), uses=())
    plan = built_in()[name](alone, load_machine("v100-32"), Settings())
    assert play(plan).peak_bytes["gpu"] >= 0


@pytest.mark.parametrize("chunk", [2, 2**63, 2**64, -(2**64)])
def test_a_step_of_no_chunk_is_refused(hand_plan: MakePlan, chunk: int):
    plan = hand_plan()
    steps = [structs.replace(s, chunk=chunk) if s.kind is Kind.FETCH else s for s in plan.steps]
    with pytest.raises(PlanError, match=f"there is no chunk {chunk}; the layout has chunks 0 to 1"):
        play(replace(plan, steps=tuple(steps)))


def test_what_is_refused_changes_nothing(ledger: Ledger):
    ledger.claim(0, "param", GPU)
    ledger.hold(0, "param", GPU)
    for move, said in [
        (lambda: ledger.claim(0, "param", GPU), "param of chunk 0 already has memory on the gpu"),
        (lambda: ledger.claim(1, "param", GPU), r"would bring it to 4196 bytes, 1124 more than the plan's 3072"),
        (lambda: ledger.begin_release(1, "param", GPU), "param of chunk 1 has no memory on the gpu to free"),
        (lambda: ledger.set_tide(925), "2148 bytes of payloads and 925 of non-model data are 1 more than the plan's"),
        (lambda: ledger.claim(0, "param", Place.NVME), "nvme over budget"),
    ]:
        with pytest.raises(PlanError, match=said):
            move()
        assert (ledger.used_bytes(GPU), ledger.tide_bytes, ledger.unfinished) == (2148, 0, [])
    assert ledger.residents == {Resident(0, "param", GPU)}
    assert (ledger.set_tide(924), ledger.room_bytes(GPU), ledger.set_tide(24)) == (924, 0, -900)


def test_what_an_interruption_left_unfinished_is_nobodys(ledger: Ledger):
    ledger.claim(0, "param", GPU)
    ledger.hold(0, "param", GPU)
    ledger.begin_release(0, "param", GPU)
    ledger.claim(1, "momentum", HOST)
    assert {r.chunk for r in ledger.unfinished} == {0, 1}
    ledger.mend()
    assert (ledger.unfinished, ledger.residents, ledger.used_bytes(GPU), ledger.used_bytes(HOST)) == (
        [], frozenset(), 100, 0
    )  # fmt: skip


def bytes_after(changes: Changes, place: Place, start: int, events: int) -> list[int]:
    """Bytes of the place after each event."""
    at = PLACES.index(place)
    rows = [0] * events
    for event, cell, size in zip(changes.event.tolist(), changes.cell.tolist(), changes.size.tolist()):
        rows[event] += size * (cell // WIDTH == at)
    return [start + held for held in accumulate(rows)]


def test_a_run_is_booked_at_once_and_returns_to_the_cut(hand_plan: MakePlan):
    moves = Moves(hand_plan())
    assert moves.used == [10, 28_672, 0]
    assert moves.cells[:WIDTH] == [10, 0, 0, 0, 0]
    assert moves.cells[WIDTH : 2 * WIDTH] == [0, 4096, 0, 24_576, 0]
    changes = moves.book(range(30))  # one step after the other, in order of the plan
    gpu = bytes_after(changes, GPU, 10, 30)
    # fetch 0, fetch 1, m0, drop 0, m1 (tide 30), m2 (tide 40), fetch 0, wb 1, drop 1, m3 (20), wb 0, drop 0, step (10)
    assert gpu[::2][:7] == [2058, 4106, 4106, 4106, 2078, 2088, 4116]
    assert (gpu[::2][-4:], gpu[-1]) == ([2058, 10, 10, 10], 10)
    assert set(bytes_after(changes, HOST, 28_672, 30)) == {28_672}
    grad = WIDTH + CATEGORIES.index("grad")  # on the host: from the end of a write-back (7, 10) to Adam's (13, 14)
    rows = zip(changes.event.tolist(), changes.cell.tolist(), changes.size.tolist())
    assert [(event, size) for event, cell, size in rows if cell == grad] == [
        (15, 2048), (21, 2048), (27, -2048), (29, -2048)
    ]  # fmt: skip
    assert not any(changes.size[changes.cell == cell].sum() for cell in range(3 * WIDTH))


def test_a_run_that_goes_wrong_is_refused_by_the_first_step_that_does(hand_plan: MakePlan, hand_text: str):
    book = Moves(hand_plan()).book
    for events, said in [
        ([4], r"step 2 \(compute at moment 0\) needs the param list of chunk 0 on the gpu, which is not there"),
        ([6, 7], r"step 3 \(drop of chunk 0\) frees the param list of chunk 0 on the gpu, which is not there"),
        ([14, 4, 7], r"step 7 \(writeback of chunk 1 at moment 2\) needs the param list of chunk 1 on the gpu"),
    ]:
        with pytest.raises(PlanError, match=said):
            book(events)
    twice = Moves(hand_plan(hand_text + "15 adam alloc chunk=0 list=param place=host bytes=2048\n"))
    with pytest.raises(PlanError, match=r"step 15 .* takes the param list of chunk 0 on the host, which is there alre"):
        twice.book(range(32))
    short = Moves(hand_plan(gpu_budget_bytes=4000))
    with pytest.raises(PlanError, match=r"step 1 .* takes 2048 bytes: the place holds 4106 bytes on the gpu, 106 more"):
        short.book([0, 2])
    with pytest.raises(PlanError, match=r"step 4 .* raises the tide by 20 bytes: the gpu holds 4126 .* 20 more than"):
        Moves(hand_plan(gpu_budget_bytes=4106)).book([0, 1, 2, 3, 8])
    with pytest.raises(PlanError, match="between two iterations the plan holds 28672 bytes on the host, 5 more"):
        Moves(hand_plan(host_budget_bytes=28_667))


def test_sums_beyond_64_bits_are_exact(hand_plan: MakePlan):
    buffers = tuple((f"b{n}", GPU, 2**62) for n in range(5))
    moves = Moves(hand_plan(buffers=buffers, gpu_budget_bytes=5 * 2**62 + 4136))
    assert int(moves.book(range(30)).held[0].max()) == 5 * 2**62 + 4116


def test_a_book_of_steps_one_after_the_other(hand_plan: MakePlan):
    """Bytes with the tide of 10, a rise of 20 in moment 1 and of 10 in moment 2; two chunks of 2,048."""
    plan = hand_plan()
    book = Holdings(plan.layout, plan.initial, [("staging", GPU, 100)], [m.peak_bytes for m in plan.workload.moments])
    assert book.used_bytes == [110, 28_672, 0]
    held = []
    for step in plan.steps:
        book.begin(step)
        held.append(book.used_bytes[0])
        book.end(step)
        if step.id == 6:
            assert (book.chunks("param", GPU), book.holds(0, "param", GPU), book.holds(1, "momentum", GPU)) == (
                {0, 1}, True, False
            )  # fmt: skip
    assert [size - 100 for size in held[:7]] == [2058, 4106, 4106, 4106, 2078, 2088, 4116]
    assert (book.used_bytes, book.peak_bytes) == ([110, 28_672, 0], [4216, 28_672, 0])
    assert not book.changed
    book.run(plan.steps[3])  # the drop of what is not there
    book.run(from_text("99 h2d fetch chunk=0 list=param moment=0 bytes=2048"))
    book.run(from_text("99 h2d fetch chunk=0 list=param moment=0 bytes=2048"))
    assert book.used_bytes[0] == 110 + 2048, "once"
    assert book.changed == {Resident(0, "param", GPU)}


@TIME_TO_SHRINK
@settings(max_examples=6)
@given(jobs(), seeds())
def test_all_books_say_the_same_of_random_runs(job: Drawn, shake: random.Random):
    """Those that take a move or a step at a time, and the one that takes all at once."""
    for policy in built_in().values():
        plan = planned(policy, job)
        if plan is None:
            continue
        jitter = random_jitter(shake, plan)
        cost = CostModel(plan.workload, plan.machine, plan.layout)
        record = follow(Program.of(plan), cost.step_costs(plan), cost.rates(), factor=jitter, most=3)
        ledger = Ledger(plan)
        peaks = [m.peak_bytes for m in plan.workload.moments]  # l2l has them in another order
        ledger.set_tide(tide_at_cut(peaks))
        for r in plan.initial:
            if r.chunk >= 0:
                ledger.claim(r.chunk, r.list, r.place)
                ledger.hold(r.chunk, r.list, r.place)
        moves = Moves(plan)
        rise, fall = tide_moves(peaks)
        booked = [bytes_after(moves.book(record.events), place, used, len(record.events))
                  for place, used in zip(PLACES, moves.used)]  # fmt: skip
        steps = Holdings(plan.layout, plan.initial, plan.buffers, peaks)
        for n, event in enumerate(record.events):
            step, ends = plan.steps[event // 2], event % 2
            (steps.end if ends else steps.begin)(step)
            if step.kind is Kind.COMPUTE:
                ledger.set_tide(ledger.tide_bytes + (-fall[step.moment] if ends else rise[step.moment]))
            elif ends and (freed := frees(step)) and (not freed[1] or ledger.holds(*structs.astuple(freed[0]))):
                ledger.begin_release(*structs.astuple(freed[0]))
                ledger.end_release(*structs.astuple(freed[0]))
            elif not ends and (taken := takes(step)) and (not taken[1] or not ledger.holds(*structs.astuple(taken[0]))):
                ledger.claim(*structs.astuple(taken[0]))
                ledger.hold(*structs.astuple(taken[0]))
            now = [ledger.used_bytes(GPU) + ledger.tide_bytes, *map(ledger.used_bytes, PLACES[1:])]
            assert now == [row[n] for row in booked] == steps.used_bytes, (plan.policy, n, step)
        assert steps.changed == ledger.residents ^ {r for r in plan.initial if r.chunk >= 0}


def test_the_tide_at_the_cut_is_the_lower_of_last_and_first_moment(hand_plan: MakePlan):
    peaks = [10, 30, 40, 20, 25]
    high_end = chain_workload(2, 1024, tide_bytes=peaks)
    assert tide_at_cut(peaks) == 10
    assert tide_moves(peaks) == ((0, 20, 10, 0, 5), (0, 0, 20, 0, 15))
    assert Moves(hand_plan(workload=high_end)).cells[0] == 10


def test_every_kind_of_step_is_in_the_table():
    assert set(EFFECTS) == set(Kind)


def test_what_single_steps_take_and_free():
    add = from_text("5 adam cpu_add chunk=2 list=grad bytes=1")
    assert takes(add) == (Resident(2, "grad32", HOST), True)
    assert frees(add) == (Resident(2, "grad", HOST), True)
    assert frees(structs.replace(add, list="param")) is None  # the last gradient lies in place, which stays
    assert takes(from_text("6 d2h writeback chunk=2 list=grad bytes=1")) == (Resident(2, "grad", HOST), True)
    assert takes(from_text("6 adam cpu_adam chunk=2 bytes=1")) is None
    assert takes(from_text("7 net gather chunk=2 list=remote bytes=1")) == (Resident(2, "remote", GPU), True)
    assert takes(from_text("7 net gather chunk=2 list=grad bytes=1")) is None, "the sum of what is whole everywhere"
    reduced = from_text("7 net reduce_scatter chunk=2 list=grad_remote bytes=1")
    assert (takes(reduced), frees(reduced)) == (None, (Resident(2, "grad_remote", GPU), False))
    with pytest.raises(PlanError, match="step 8: a alloc step needs place="):
        takes(from_text("8 h2d alloc chunk=2 list=grad bytes=1"))


def test_where_gradients_arrive(hand_plan: MakePlan):
    w = chain_workload(2, 1024, micro_batches=2)
    alloc = "0 d2h alloc chunk=0 list=grad place=gpu bytes=2048\n"
    plan = hand_plan(workload=w, steps=steps_from_text(alloc), initial=frozenset({Resident(1, "grad32", GPU)}))
    assert gradient_list(plan) == {(0, 0): "grad", (0, 1): "param", (1, 0): "grad32", (1, 1): "grad32"}
    bucket = hand_plan(workload=w, steps=(), initial=frozenset({Resident(0, "grad", GPU)}))
    assert gradient_list(bucket)[0, 1] == "grad"
