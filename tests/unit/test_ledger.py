"""Ledger and effects: who takes and frees what, and that a refused move changes nothing."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from pstar_sim.core.effects import (
    Effect,
    Move,
    frees,
    gradient_list,
    held_at_cut,
    resolve,
    takes,
    tide_moves,
    topological,
)
from pstar_sim.core.layout import build_layout
from pstar_sim.core.ledger import Ledger
from pstar_sim.core.plan import Plan, Resident, steps_from_text
from pstar_sim.core.step import Place, from_text
from pstar_sim.errors import PlanError
from pstar_sim.testing import chain_workload

GPU, HOST = Place.GPU, Place.HOST
MakePlan = Callable[..., Plan]


@pytest.fixture
def ledger() -> Ledger:
    """Two chunks of 2,048 bytes; room for one and a half on the gpu, 100 bytes of which are a buffer."""
    layout = build_layout(chain_workload(2, 1024), chunk_bytes=2048)
    return Ledger({GPU: 3072, HOST: 100_000}, layout, buffers=[("staging", GPU, 100)])


def test_bytes_by_place_and_category(ledger: Ledger):
    ledger.take(Resident(0, "param", GPU))
    ledger.take(Resident(0, "momentum", HOST))
    ledger.take(Resident(0, "grad32", HOST))
    ledger.set_tide(500)
    assert ledger.bytes(GPU) == 100 + 2048 + 500
    assert {c: ledger.bytes(GPU, c) for c in ("non-model", "param", "grad", "states", "buffer")} == {
        "non-model": 500,
        "param": 2048,
        "grad": 0,
        "states": 0,
        "buffer": 100,
    }
    assert (ledger.bytes(HOST, "states"), ledger.bytes(HOST, "grad")) == (4096, 4096)
    assert ledger.room(GPU) == 3072 - 2648
    ledger.release(Resident(0, "param", GPU))
    assert (ledger.bytes(GPU), ledger.peak_bytes[GPU]) == (600, 2648)
    ledger.reset_peaks()
    assert ledger.peak_bytes[GPU] == 600


def test_what_is_refused_changes_nothing(ledger: Ledger):
    here = Resident(0, "param", GPU)
    ledger.take(here)
    before = ledger.bytes(GPU)
    for move, said in [
        (lambda: ledger.take(here), "the param list of chunk 0 on the gpu is there already"),
        (lambda: ledger.take(Resident(1, "param", GPU)), "takes 2048 bytes and gpu has 924 left of 3072"),
        (lambda: ledger.release(Resident(1, "param", GPU)), "is not there"),
        (lambda: ledger.set_tide(925), "takes 925 bytes and gpu has 924 left"),
        (lambda: ledger.use(Resident(1, "param", GPU)), "is needed and is not there"),
        (lambda: ledger.unuse(here), "is not in use"),
        (lambda: ledger.take_bytes("x", Place.NVME, 1), "takes 1 bytes and nvme has 0 left of 0"),
        (lambda: ledger.take_bytes("x", GPU, 1, "odds"), "'odds' is not a category"),
    ]:
        with pytest.raises(PlanError, match=said):
            move()
        assert ledger.bytes(GPU) == before
    assert set(ledger.residents()) == {here}


def test_what_is_in_use_cannot_be_freed(ledger: Ledger):
    here = Resident(0, "param", GPU)
    ledger.take(here)
    ledger.use(here)
    ledger.use(here)
    ledger.unuse(here)
    with pytest.raises(PlanError, match="is in use and cannot be freed"):
        ledger.release(here)
    ledger.unuse(here)
    ledger.release(here)
    assert not ledger.holds(0, "param", GPU)


def test_any_other_resident_has_a_key_of_its_own(ledger: Ledger):
    ledger.take_bytes(("stash", 3), GPU, 64, "non-model")
    assert ledger.bytes(GPU, "non-model") == 64
    ledger.release_bytes(("stash", 3), GPU)
    assert ledger.bytes(GPU) == 100


def test_it_follows_a_plan_step_by_step_and_returns_to_the_cut(hand_plan: MakePlan):
    plan = hand_plan()
    ledger = Ledger.for_plan(plan)
    at_cut = (ledger.bytes(GPU), ledger.bytes(HOST))
    assert at_cut == (10, 28_672)
    log = []
    for step in topological(plan.steps):  # one after the other, in order of the plan
        ledger.apply_start(step)
        log.append(ledger.bytes(GPU))
        ledger.apply_end(step)
    # fetch 0, fetch 1, m0, drop 0, m1 (tide 30), m2 (tide 40), fetch 0, wb 1, drop 1, m3 (20), wb 0, drop 0, step (10)
    assert log[:7] == [2058, 4106, 4106, 4106, 2078, 2088, 4116]
    assert log[-4:] == [2058, 10, 10, 10]
    assert (ledger.bytes(GPU), ledger.bytes(HOST)) == at_cut


def test_a_step_out_of_turn_is_refused_by_name(hand_plan: MakePlan):
    plan = hand_plan()
    by_id = plan.step_by_id
    ledger = Ledger.for_plan(plan)
    with pytest.raises(PlanError, match=r"step 2 \(compute\): moment 0 needs the param list of chunk 0 on the gpu"):
        ledger.apply_start(by_id[2])
    ledger.apply_start(by_id[0])
    ledger.apply_end(by_id[0])
    ledger.apply_start(by_id[2])
    with pytest.raises(PlanError, match=r"step 3 \(drop\): .* is in use and cannot be freed"):
        ledger.apply_end(by_id[3])
    ledger.apply_end(by_id[2])
    ledger.apply_end(by_id[3])
    with pytest.raises(PlanError, match=r"step 7 \(writeback\): the param list of chunk 1 on the gpu is needed"):
        ledger.apply_start(by_id[7])


def test_over_budget_is_refused_by_name(hand_plan: MakePlan):
    plan = hand_plan(gpu_budget_bytes=4000)
    ledger = Ledger.for_plan(plan)
    ledger.apply_start(plan.step_by_id[0])
    with pytest.raises(PlanError, match=r"step 1 \(fetch\): the param list of chunk 1 on the gpu takes 2048 bytes"):
        ledger.apply_start(plan.step_by_id[1])
    with pytest.raises(PlanError, match="short by 5 B"):
        Ledger.for_plan(hand_plan(host_budget_bytes=28_667))


def test_resolve_says_what_each_step_takes_and_frees(hand_plan: MakePlan):
    plan = hand_plan()
    effects = resolve(plan)
    chunk = Move(GPU, "param", 2048)
    assert effects[0] == Effect(take=chunk)
    assert effects[2] == Effect()  # 10 after 10
    assert effects[3] == Effect(free=chunk)
    assert effects[4] == Effect(take=Move(GPU, "non-model", 20))  # 10 -> 30
    assert effects[5] == Effect(take=Move(GPU, "non-model", 10), free=Move(GPU, "non-model", 20))  # 40, then 20
    assert effects[7] == Effect()  # the host has a copy already
    assert held_at_cut(plan) == {(GPU, "non-model"): 10, (HOST, "param"): 4096, (HOST, "states"): 24_576}


def test_the_tide_at_the_cut_is_the_lower_of_last_and_first_moment(hand_plan: MakePlan):
    high_end = chain_workload(2, 1024, tide_bytes=[10, 30, 40, 20, 25])
    assert tide_moves(high_end) == ((0, 20, 10, 0, 5), (0, 0, 20, 0, 15))
    assert held_at_cut(hand_plan(workload=high_end))[GPU, "non-model"] == 10


def test_resolve_refuses_doubled_takes_missing_frees_and_cycles(hand_plan: MakePlan, hand_text: str):
    with pytest.raises(
        PlanError, match=r"step 15 \(alloc\) takes the param list of chunk 0 on the host, which is there"
    ):
        resolve(hand_plan(hand_text + "15 adam alloc chunk=0 list=param place=host bytes=2048\n"))
    with pytest.raises(PlanError, match=r"step 15 \(drop\) frees the param list of chunk 0 on the gpu, which is not"):
        resolve(hand_plan(hand_text + "15 d2h drop chunk=0 list=param bytes=2048\n"))
    with pytest.raises(PlanError, match="in a circle, among them"):
        resolve(hand_plan(hand_text.replace("moment=0 after=0", "moment=0 after=12")))
    with pytest.raises(PlanError, match="step 2 is after step 99, which the plan does not have"):
        resolve(hand_plan(hand_text.replace("moment=0 after=0", "moment=0 after=99")))


def test_what_single_steps_take_and_free():
    add = from_text("5 adam cpu_add chunk=2 list=grad bytes=1")
    assert takes(add) == (Resident(2, "grad32", HOST), True)
    assert frees(add) == (Resident(2, "grad", HOST), True)
    assert frees(replace(add, list="param")) is None  # the last gradient lies in place, which stays
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
