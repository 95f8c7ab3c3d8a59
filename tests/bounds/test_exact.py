"""Bounds and plans against the exact optimum of tiny instances, and bounds against random plans: thin samples of
benchmarks/bounds.py."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import hypothesis
import pytest
from bounded import bounds_of, hold, random_job, random_spec
from drawn import TIME_TO_SHRINK, chances
from exact_optimum import Tiny, Way, exact_optimum
from hypothesis import given
from tiny import as_job, compare_tiny, from_text, layer_major, optima_of, random_tiny, sums_in_16_bits, with_experts

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.core.layout import build_layout
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy.registry import find_policy

pytestmark = TIME_TO_SHRINK

ON_CPU, ON_GPU = Way(on_gpu=False), Way(on_gpu=True)
ON_CPU_SUMMED, ON_GPU_SUMMED = Way(on_gpu=False, summed=True), Way(on_gpu=True, summed=True)
MOST_STATES = 20_000
RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "bounds.json"
SAMPLE, JOB_SAMPLE = 40, 12  # one in so many


def tiny(**changed: object) -> Tiny:
    """Two layers, forward 1 unit, backward 2, everything else 1, no tide."""
    plain = Tiny(
        layers=2, slots=4, forward=1, up=1, down=1, cpu_adam=1, gpu_adam=1, tide=(0,) * 4, barrier=False
    )  # fmt: skip
    return replace(plain, **changed)  # type: ignore[arg-type]


def test_one_micro_batch_by_hand() -> None:
    """Compute 6. With room for all (2 lists a layer) and Adam on the gpu of 1 unit each: 8. With CPU Adam of 1 unit and
    copies of 1, layer 1 alone must go round the border: 6 + 3, unless it is updated on the gpu: 6 + 1, while the
    other's copies and Adam overlap with it."""
    t = tiny()
    assert exact_optimum(t, ways=[(ON_GPU, ON_GPU)]) == 8
    assert exact_optimum(t, ways=[(ON_CPU, ON_CPU)]) == 9
    assert exact_optimum(t) == Fraction(7)


def test_where_gradients_of_two_micro_batches_live_by_hand() -> None:
    """One layer, compute 2 x 3. Updated on the CPU its border is down, Adam, up beside all of compute: 9 for a sum as
    wide as a gradient, and 10 for a list of its own that overwrites the parameters, because the update adds the other
    gradient to it; 10 where a sum is twice as wide, and 11 where the GPU takes a unit to add the second gradient to it.
    On the GPU, with room: 6 and Adam."""
    one = tiny(layers=1, tide=(0, 0), micro_batches=2)
    assert [exact_optimum(one, ways=[(way,)]) for way in (ON_CPU, ON_CPU_SUMMED)] == [10, 9]
    wide = replace(one, wide=2, slots=6)
    assert [exact_optimum(wide, ways=[(way,)]) for way in (ON_CPU, ON_CPU_SUMMED)] == [10, 10]
    slow = replace(wide, gpu_add=1)
    assert [exact_optimum(slow, ways=[(way,)]) for way in (ON_CPU_SUMMED, ON_GPU_SUMMED, ON_GPU)] == [11, 8, 7]


def test_a_sum_goes_down_and_comes_up_where_two_have_no_room() -> None:
    """One layer: parameters and a sum fill both slots, and the forward pass has a tide of one slot. So the sum goes
    down before the second forward pass and comes up behind it: two units more than the 6 of compute and 3 round the
    border, which are all without a tide."""
    t = tiny(layers=1, slots=2, tide=(0, 0), micro_batches=2)
    assert exact_optimum(t, ways=[(ON_CPU_SUMMED,)]) == 9
    assert exact_optimum(replace(t, tide=(1, 0)), ways=[(ON_CPU_SUMMED,)]) == 11


def test_the_host_adds_the_last_gradient_behind_it() -> None:
    """One layer, two micro-batches, CPU Adam of 1 unit, adds of 3. Without clipping the update adds one gradient to the
    other, with clipping a step of its own adds the last one. Either stands, with Adam, between the last gradient and
    the next forward pass; the 9 units are those without any add."""
    t = tiny(layers=1, tide=(0, 0), micro_batches=2, cpu_add=3)
    for clip in (False, True):
        assert exact_optimum(replace(t, clip=clip), ways=[(ON_CPU,)]) == 9 + 3


def test_without_streams_states_stay() -> None:
    """Two layers with one slot beside what a moment reads: states visit it, or nothing is updated on the GPU."""
    t = tiny(slots=3, cpu_adam=9)
    everything_on_cpu = exact_optimum(t, ways=[(ON_CPU, ON_CPU)])
    best, resident = exact_optimum(t), exact_optimum(t, streams=False)
    assert best is not None and resident is not None and everything_on_cpu is not None
    assert best < resident < everything_on_cpu


def test_a_search_that_grows_too_large_is_given_up() -> None:
    with pytest.raises(MemoryError, match="more than 10 states"):
        exact_optimum(tiny(), most_states=10)


def test_pruned_ways_are_no_better() -> None:
    """Every choice of ways, searched by itself: the least is what the search finds that leaves out most of them."""
    t = tiny(slots=4, micro_batches=2, cpu_adam=2, gpu_add=1)
    each = [exact_optimum(t, ways=[ways]) for ways in product(t.ways, repeat=2)]
    assert min(found for found in each if found is not None) == exact_optimum(t)


def test_states_on_disks_by_hand() -> None:
    """Two layers updated on the CPU as gradients arrive. A state takes 2 units to read and 3 to write. With room for
    both on the host, 9 units as without disks. With room for one, the update of layer 0, with which the next forward
    pass begins, follows that of layer 1 behind a write and a read: 4 until the gradient of layer 1, down, Adam, 5,
    Adam, up: 13. The states change places again beside the rest of the iteration. Where a state is two lists, of 1 unit
    to read and 2 to write each, and three have room, two of them change places: 3 units between both Adams, 11."""
    t = tiny(host=2, read=2, write=3)
    assert [exact_optimum(replace(t, host=room)) for room in (2, 1)] == [9, 13]
    apart = replace(t, lists=2, read=1, write=2)
    assert [exact_optimum(replace(apart, host=room)) for room in (4, 3, 2)] == [9, 11, 14]


def test_reads_beside_writes_take_no_longer_than_turns() -> None:
    """Three layers with room for two states, which take 6 units to read or write. One change of places in each
    iteration: 12 units in turns, and 17 units in two iterations in which the disks wait for gradients and updates, 41.
    A read beside a write, both at full speed, hides one of them; where the write then has half its speed, none."""
    t = tiny(layers=3, tide=(0,) * 6, host=2, read=6, write=6)
    found = [exact_optimum(replace(t, beside=beside)) for beside in (None, (2, 2, 1), (1, 1, 1))]
    assert found == [Fraction(41, 2), Fraction(41, 2), 20]


@pytest.mark.parametrize(("rooms", "parts"), [(1, 1.5), (2, 0.5)])
def test_behind_a_barrier_what_has_no_room_moves_beside_no_pass_after_the_last_first_read(
    rooms: int, parts: float
) -> None:
    """Three layers with room for one or two states on the host and for half of one on the GPU, beside what it reads.
    The others are read in 2 units and written in 3, by the bound beside all moments, or behind a barrier not beside the
    last forward and the backward passes: 1 and 3 * 2 more."""
    nvme = {}
    for barrier in (False, True):
        job = as_job(tiny(layers=3, slots=1, tide=(0,) * 6, wide=2, host=rooms, read=2, write=3, barrier=barrier))
        layout = build_layout(job[0], chunk_bytes=job[2].chunk_bytes)
        nvme[barrier] = lower_bound(*job, layout).terms["nvme"]
    assert nvme == pytest.approx({False: parts * 5, True: parts * 5 + 7})


@pytest.mark.parametrize(
    ("layers", "rooms", "lists"), [(3, 1, 1), pytest.param(3, 2, 1, marks=pytest.mark.whole), (2, 1, 1), (2, 3, 2)]
)
def test_bounds_with_disks_are_below_the_exact_optimum_and_plans_above_it(
    layers: int, rooms: int, lists: int, whole: bool
) -> None:
    """States, of one or two lists, are twice as large as working lists and have no room on the GPU; the host has room
    for some of the lists. Two layers have two or three micro-batches, one where states are two lists. Disks take turns,
    read at full speed beside writes, or slow one another down: then the helper's optimum is one of fewer schedules, and
    says nothing of plans."""
    compared: list[float] = []

    @hypothesis.settings(max_examples=100 if whole else 3)
    @given(chances())
    def holds(chance: random.Random) -> None:
        t = random_tiny(chance, layers=layers, micro_batches=1 if layers == 3 or lists == 2 else chance.choice((2, 3)))
        t = replace(
            t,
            wide=2,
            cpu_add=1,
            slots=2,
            tide=(0,) * len(t.tide),
            host=rooms,
            lists=lists,
            read=chance.choice((1, 2, 12)),
            write=chance.choice((1, 3, 18)),
            beside=chance.choice((None, (1, 1, 1), (2, 2, 1), (3, 2, 2))),
        )
        try:
            best = exact_optimum(t, most_states=10 * MOST_STATES)
        except MemoryError:
            return
        exact = t.beside in (None, (1, 1, 1))
        found = compare_tiny(t, (best, best), ("tide", "optimal", "static_partition") if exact else ())
        assert not found.wrong, found
        compared.append(found.joint)

    holds()
    assert compared


@pytest.mark.parametrize("order", ["depth-first", "layer-major", "sums in 16 bits", "routed experts"])
def test_bounds_are_below_the_exact_optimum_and_plans_above_it(order: str, whole: bool) -> None:
    """Random instances: closed form, joint and fluid program <= exact optimum <= plans."""
    sums = "16-bit" if order == "sums in 16 bits" else "32-bit"
    compared: list[float] = []

    @hypothesis.settings(max_examples=(100 if whole else 3) * (2 if order == "depth-first" else 1))
    @given(chances())
    def holds(chance: random.Random) -> None:
        t = random_tiny(chance)
        if order == "layer-major":
            t = layer_major(t)
        if sums == "16-bit":
            t = sums_in_16_bits(t)
        if order == "routed experts":
            t = with_experts(t, chance)
        try:
            optima = optima_of(t, most_states=MOST_STATES)
        except MemoryError:
            return
        found = compare_tiny(t, optima, ("tide:sums=on", "optimal", "stronghold", "zero_offload"), sums=sums)
        assert not found.wrong, found
        if optima[0] is not None:
            compared.append(float(optima[0]) / found.fluid)

    holds()
    assert len(compared) >= 2


def test_bounds_are_what_the_benchmark_found_them_to_be() -> None:
    """Of instances whose exact optimum is in the file: a row of a bound that says too much or nothing at all changes
    one of these figures. Where a change is meant, `python benchmarks/bounds.py` writes them again."""
    rows = [json.loads(line) for line in json.loads(RESULT.read_text(encoding="utf-8"))["instances"]]
    assert len(rows) >= 300
    for row in rows[::SAMPLE]:
        optima = tuple(None if word is None else Fraction(word) for word in row["optima"])
        assert len(optima) == 2
        found = compare_tiny(from_text(row["tiny"]), optima)
        assert not found.wrong, found
        assert [found.closed, found.joint, found.fluid] == pytest.approx(row["bounds"], rel=1e-5), row


def test_bounds_of_random_jobs_are_what_they_were() -> None:
    """The same of jobs of several layers, on which other rows bind than on two."""
    rows = [json.loads(line) for line in json.loads(RESULT.read_text(encoding="utf-8"))["jobs"]]
    for row in rows[::JOB_SAMPLE]:
        assert bounds_of(row["job"]) == pytest.approx(row["bounds"], rel=1e-5), row


def test_no_random_plan_is_below_any_bound(whole: bool) -> None:
    held = 0

    @hypothesis.settings(max_examples=600 if whole else 10)
    @given(chances())
    def holds(chance: random.Random) -> None:
        nonlocal held
        job, spec = random_job(chance), random_spec(chance)
        try:
            plan = find_policy(spec)(*job)
        except (DoesNotFit, CannotPlan):
            return
        assert not hold(plan).wrong, (spec, hold(plan))
        held += 1

    holds()
    assert held >= 5
