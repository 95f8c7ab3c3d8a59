"""Each pass alone writes the rows of its concern, and no others."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from drawn import TIME_TO_SHRINK, Drawn, chances, jobs
from hypothesis import given, settings

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.effects import tide_at_cut
from pstar_sim.core.ledger import Holdings
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Kind, Place, Queue
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy.family.attempt import attempt_course
from pstar_sim.policy.family.course import Course, Knobs
from pstar_sim.policy.family.pace import period_s
from pstar_sim.policy.family.pins import iteration_bounds, least_of_rivals, most_pins_of, pin_facts
from pstar_sim.policy.family.searched import jobs_of_sizes
from pstar_sim.policy.kit.blocks import Stretch
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.schedule import Modes, Schedule, modes_of
from pstar_sim.policy.passes import collective_rows, gradient_rows, update_rows
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.policy.passes.collective_rows import Collectives
from pstar_sim.policy.passes.disk_rows import DiskTrips
from pstar_sim.policy.passes.draft_rows import DraftRows, Pass
from pstar_sim.policy.passes.feasibility import needed_on_host
from pstar_sim.policy.passes.floors import Floors
from pstar_sim.policy.passes.gradient_rows import GradientRows
from pstar_sim.policy.passes.lowering import draft_of
from pstar_sim.policy.passes.update_rows import UpdateRows
from pstar_sim.policy.passes.working_lists import WorkingLists
from pstar_sim.policy.passes.write_plan import step_of
from pstar_sim.policy.registry import built_in, can, find_policy
from pstar_sim.sim.play import play
from pstar_sim.testing import (
    chain_workload,
    random_machine,
    random_ranks,
    random_settings,
    random_workload,
    round_machine,
)
from pstar_sim.units import MIB
from pstar_sim.workload.mixing import block_names, offload_blocks
from pstar_sim.workload.workload import Workload, repeat_micro_batch

PARAMS = MIB
CHUNK = 2 * PARAMS  # bytes of a working list: a layer each
LAYERS = 3


def schedule(
    *,
    micro_batches: int = 1,
    machine: str = "h100-80",
    pinned: Sequence[int] = (),
    streamed: Sequence[int] = (),
    clip: bool = False,
    prefetch: str | int = "edf",
) -> Schedule:
    """Every chunk comes for each of its uses and does not stay."""
    workload = chain_workload(LAYERS, PARAMS, micro_batches=micro_batches)
    settings = Settings(update="step" if clip else "eager", clip=clip, chunk_bytes=CHUNK)
    job = Job("any", workload, load_machine(machine), settings, Point(prefetch=prefetch))
    blocks = job.touched_stretches
    return Course(job, Modes(frozenset(pinned), frozenset(streamed)), Knobs(linger=False), blocks).schedule()


def moment(rows: DraftRows) -> int:
    """Any moment, as the next position."""
    return rows.add(Queue.COMPUTE, Kind.COMPUTE, charge=rows.schedule.job.block_charges[0], is_position=True)


def write(rows: DraftRows, one: Pass) -> list[tuple[int, Kind, int, str]]:
    """(position, kind, chunk, list) of the rows that a pass writes by itself; a moment stands for itself."""
    written: list[tuple[int, Kind, int, str]] = []
    for n in range(len(rows.schedule.positions)):
        first = len(rows.rows)
        waits = one.before(n)
        assert n in one.before_at or (not waits and len(rows.rows) == first)
        here = moment(rows)
        rows.end(here)
        one.behind(n, here)
        assert n in one.behind_at or len(rows.rows) == here + 1
        rows.leave()
        new = [row for i, row in enumerate(rows.rows[first:], first) if i != here]
        written += [(n, row.kind, row.chunk, row.list_name) for row in new]
    return written


def working_lists(rows: DraftRows) -> WorkingLists:
    return WorkingLists(rows, Floors(rows), DiskTrips(rows))


def test_working_lists_come_for_their_visits_and_clean_ones_leave() -> None:
    s = schedule()
    rows = DraftRows(s)
    # Positions: forward of 0, 1, 2 (with the backward of 2 in a block of its own), backward of 1 and 0, the step.
    assert {c: list(runs) for c, runs in s.visits.items()} == {
        0: [Stretch(0, 0), Stretch(4, 4)],
        1: [Stretch(1, 1), Stretch(3, 3)],
        2: [Stretch(2, 2)],
    }
    fetch, drop = Kind.FETCH, Kind.DROP
    assert write(rows, working_lists(rows)) == [
        (0, fetch, 0, "param"),
        (0, drop, 0, "param"),
        (1, fetch, 1, "param"),
        (1, drop, 1, "param"),
        (2, fetch, 2, "param"),  # what a last visit leaves behind is a gradient, which is another pass's
        (3, fetch, 1, "param"),
        (4, fetch, 0, "param"),
    ]


def test_a_second_fetch_waits_for_the_first_list_to_be_gone() -> None:
    rows = DraftRows(schedule())
    write(rows, working_lists(rows))
    again = next(row for row in rows.rows if row.kind is Kind.FETCH and row.use == 4)
    drop = next(i for i, row in enumerate(rows.rows) if row.kind is Kind.DROP and row.chunk == 0)
    assert (drop, 0) in again.after


def test_gradients_of_early_micro_batches_have_a_list_and_the_last_one_takes_the_working_list() -> None:
    s = schedule(micro_batches=2)
    rows = DraftRows(s)
    mine = [
        (kind, name)
        for _, kind, c, name in write(rows, GradientRows(rows, working_lists(rows), DiskTrips(rows)))
        if c == 1
    ]
    early = [(Kind.ALLOC, "grad"), (Kind.WRITEBACK, "grad"), (Kind.FREE, "grad"), (Kind.CPU_ADD, "grad")]
    assert mine == [*early, (Kind.WRITEBACK, "param"), (Kind.DROP, "param")]
    assert set(rows.send_of) == {0, 1, 2}


def test_on_several_ranks_a_gradient_is_whole_until_it_is_summed_and_a_pinned_one_stays() -> None:
    s = schedule(micro_batches=2, machine="h100-80x4", pinned=[0])
    rows = DraftRows(s)
    written = write(rows, GradientRows(rows, working_lists(rows), DiskTrips(rows)))
    opened = [(Kind.ALLOC, "grad"), (Kind.ALLOC, "grad_remote"), (Kind.REDUCE_SCATTER, "grad_remote")]
    assert [(kind, name) for _, kind, c, name in written if c == 0] == [*opened, (Kind.FREE, "grad")]
    assert [(kind, name) for _, kind, c, name in written if c == 1][:5] == [
        *opened,
        (Kind.WRITEBACK, "grad"),
        (Kind.FREE, "grad"),
    ]


def test_collectives_make_a_chunk_whole_for_each_visit_and_sum_behind_the_last() -> None:
    s = schedule(machine="h100-80x4")
    rows = DraftRows(s)
    written = write(rows, Collectives(rows, Floors(rows)))
    assert [(n, kind) for n, kind, c, _ in written if c == 1] == [
        (1, Kind.GATHER),
        (1, Kind.DROP),
        (3, Kind.GATHER),
        (3, Kind.REDUCE_SCATTER),
    ]
    others = 3 * s.job.sizes[1]  # three ranks of four
    assert collective_rows.room(s.job, {1: s.whole[1]}, 6) == [0, others, 0, others, 0, 0]


def test_states_of_a_streamed_chunk_come_and_go() -> None:
    s = schedule(streamed=[1], pinned=[0])
    rows = DraftRows(s)
    floors = Floors(rows)
    trips = DiskTrips(rows)
    one = UpdateRows(rows, WorkingLists(rows, floors, trips), trips)
    update = s.updates[1]
    for n in range(update + 1):
        waits = one.before(n) if n in one.before_at else ()
        here = one.update(1, waits) if n == update else moment(rows)
        rows.end(here)
        one.behind(n, here)
        rows.leave()
    lists = list(s.job.layout.state_lists)
    mine = [row for row in rows.rows if row.chunk == 1]
    assert [row.list_name for row in mine if row.kind is Kind.FETCH] == lists
    assert [row.list_name for row in mine if row.kind is Kind.WRITEBACK] == [*lists, "param"]
    adam = next(i for i, row in enumerate(rows.rows) if row.kind is Kind.GPU_UPDATE and row.chunk == 1)
    assert rows.gpu_update_of[1] == adam
    assert update_rows.room(s.job, 1, s.modes) == sum(s.job.layout.payload_bytes(1, name) for name in lists)


def test_a_list_of_gradients_takes_room_unless_it_is_pinned() -> None:
    job = schedule(micro_batches=2).job
    open_in = [n for n in range(len(job.blocks)) if gradient_rows.room(job, n)]
    assert open_in
    assert all(gradient_rows.room(job, n) == CHUNK for n in open_in)
    assert not any(gradient_rows.room(job, n, frozenset(range(LAYERS))) for n in open_in)


@pytest.mark.parametrize("prefetch, floor", [("none", 2), (1, 1), ("edf", None)])
def test_a_copy_waits_for_its_floor(prefetch: str | int, floor: int | None) -> None:
    """The copy for position 3 waits for the position before it, or for the one before the copy that is one ahead."""
    rows = draft_of(schedule(prefetch=prefetch)).rows
    fetch = next(row for row in rows if row.kind is Kind.FETCH and row.use == 3)
    waited_for = [i for i, back in fetch.after if not back and rows[i].queue is Queue.COMPUTE]
    # A row of the compute queue belongs to the last position that stands before it. The list itself left behind 1.
    of = [sum(row.is_position for row in rows[: i + 1]) - 1 for i in waited_for]
    assert max(of) == (1 if floor is None else floor)


def with_stashes(rng: random.Random) -> Workload:
    """A chain in which the activations of every second layer of the first half go to the host and come back."""
    layers = 2 * rng.randint(2, 4) + 1
    up = [n * MIB for n in range(1, layers + 1)]
    workload = chain_workload(layers, PARAMS, tide_bytes=[*up, *up[::-1], 0])
    return repeat_micro_batch(offload_blocks(workload, block_names(workload)[: layers // 2 : 2]), rng.randint(1, 3))


@TIME_TO_SHRINK
def test_rows_are_charged_what_the_ledger_books() -> None:
    """`choose` counts the bytes of charges alone. On random jobs they are those of the steps that the rows stand for,
    booked one after the other from the residents of the plan; and what is free at the cut is what these leave."""
    rows = stashes = 0

    @settings(max_examples=40)
    @given(chances())
    def holds(rng: random.Random) -> None:
        nonlocal rows, stashes
        workload = with_stashes(rng) if rng.random() < 0.4 else random_workload(rng)
        machine = random_ranks(rng, random_machine(rng, workload), rng.choice((1, 1, 2, 3)))
        job = Job("any", workload, machine, random_settings(rng), Point(capacity=rng.choice(("tide", "peak"))))
        modes = [rng.choice(("pin", "stream", "cpu", "cpu")) for _ in job.candidates]
        chosen = {way: frozenset(c for c, mode in zip(job.candidates, modes) if mode == way) for way in set(modes)}
        none: frozenset[int] = frozenset()
        course = Course(job, Modes(chosen.get("pin", none), chosen.get("stream", none)), Knobs())
        made = attempt_course(course) if course.least_room_bytes >= 0 else None
        if made is None or made.window.stuck is not None:
            return
        plan, draft = made.plan(), made.draft
        book = Holdings(job.layout, plan.initial, plan.buffers)
        start = list(book.used_bytes)
        assert draft.gpu_free_bytes + start[0] + tide_at_cut([b.tide_bytes for b in job.blocks]) == (
            machine.gpu_budget_bytes
        )
        assert draft.host_free_bytes + start[1] == machine.host_budget_bytes
        b = Builder("any", workload, machine, job.settings, layout=job.layout, trips=False)
        for row in draft.rows:
            if row.block >= 0:
                continue
            step = b.steps[step_of(b, row, ())]
            before = list(book.used_bytes)
            book.begin(step)
            most = list(book.used_bytes)
            book.end(step)
            charge = row.charge
            assert (charge.gpu_take, charge.host_take) == (most[0] - before[0], most[1] - before[1]), step
            assert (charge.gpu_free, charge.host_free) == (
                most[0] - book.used_bytes[0], most[1] - book.used_bytes[1]
            ), step  # fmt: skip
            rows += 1
            stashes += row.stash >= 0
        assert (book.used_bytes, book.changed) == (start, frozenset())

    holds()
    assert rows > 500 and stashes > 5


def test_a_pinned_chunk_stays_whole_while_its_last_gradients_arrive() -> None:
    """They arrive in place, in all ranks' slices, also where a streamed chunk is updated in between."""
    between = 0

    @settings(max_examples=40)
    @given(jobs(ranks=(2,)), chances())
    def holds(drawn: Drawn, chance: random.Random) -> None:
        nonlocal between
        asked = replace(drawn.settings, update="eager", clip=False, chunk_bytes=4 * MIB)
        job = Job("any", drawn.workload, drawn.machine, asked, Point(streams=True))
        modes = {c: chance.choice(("pin", "stream")) for c in job.candidates}
        pinned, streamed = ([c for c, mode in modes.items() if mode == wanted] for wanted in ("pin", "stream"))
        course = Course(job, modes_of(job, pinned, streamed), Knobs())
        for c in pinned:
            first, last = (course.at[job.block_of[m]] for m in job.uses.spans[c][-1][1:])
            assert any(stretch.first <= first and last <= stretch.last for stretch in course.needed_whole[c])
            between += any(first < n < last for n in course.updates.values())

    holds()
    assert between


def test_rows_of_an_attempt_like_it_are_those_that_would_be_written() -> None:
    taken = written = 0

    @settings(max_examples=40)
    @given(jobs(ranks=(1, 1, 2)), chances())
    def holds(drawn: Drawn, chance: random.Random) -> None:
        nonlocal taken, written
        job = Job("any", drawn.workload, drawn.machine, drawn.settings, Point())
        modes = Modes(frozenset(c for c in job.candidates if chance.random() < 0.4))
        first = Course(job, modes, Knobs())
        second = Course(job, modes, Knobs(linger=False, down=chance.choice(("edf", "edf", "fifo"))))
        if min(first.least_room_bytes, second.least_room_bytes) < 0:
            return
        known = attempt_course(first)
        made, anew = attempt_course(second, like=known), attempt_course(second)
        assert (made.draft, made.window) == (anew.draft, anew.window)
        taken += made.draft.rows is known.draft.rows
        written += made.draft.rows is not known.draft.rows

    holds()
    assert taken > 2
    assert written > 2


def test_the_closed_form_leaves_out_no_number_of_pins_that_is_faster() -> None:
    """No iteration is shorter than it surely is; its estimate of copies around updates of unlike chunks may be."""
    tried = above = 0

    @settings(max_examples=60)
    @given(jobs(ranks=(1, 1, 2)), chances())
    def holds(drawn: Drawn, chance: random.Random) -> None:
        nonlocal tried, above
        job = Job("any", drawn.workload, drawn.machine, drawn.settings, Point())
        least_s = iteration_bounds(pin_facts(job), most := most_pins_of(job), surely=True)
        pins = chance.randint(0, most)
        course = Course(job, Modes(frozenset(job.candidates[:pins])), Knobs())
        if course.least_room_bytes >= 0 and (made := attempt_course(course)).fits:
            assert made.iteration_s >= least_s[pins] * (1 - 1e-9)
            tried += 1
            above += least_s.max() > made.iteration_s

    holds()
    assert tried > 30
    assert above > 3


def test_no_policy_is_faster_than_the_closed_form_by_which_optimal_leaves_it_out() -> None:
    """Policies whose updates all run on the CPU, and on several GPUs those like a point without streams."""
    tried: Counter[str] = Counter()

    @settings(max_examples=40)
    @given(jobs(ranks=(1, 2)))
    def holds(drawn: Drawn) -> None:
        w, machine, asked = drawn.workload, drawn.machine, drawn.settings
        of_sizes = [
            least_of_rivals(pin_facts(job), most_pins_of(job))
            for job in jobs_of_sizes("optimal", w, machine, asked, Point(streams=True))
        ]
        without_pins_s, with_any_s = map(min, zip(*of_sizes))
        for name in built_in():
            able = can(name)
            least_s = without_pins_s if able.cpu_updates else with_any_s
            if able.cpu_updates or (able.near is not None and not able.reorders and machine.data_parallel_size > 1):
                with contextlib.suppress(CannotPlan, DoesNotFit):
                    assert period_s(find_policy(name)(w, machine, asked)) >= least_s * (1 - 1e-9), name
                    tried[name] += 1

    holds()
    assert len(tried) == 5
    assert min(tried.values()) > 3


def test_an_update_is_due_before_the_disks_would_stand_still() -> None:
    """The host lacks room for 4 of 8 layers' states. With room for two layers on their way, 6 are on the disks: 1 s to
    read and 1 s to write each, 12 s an iteration. Updated in the order of first uses alone, they would wait for those
    of the other layers: 14 s.

    Disks that read and write together at 3/4 of each rate take 4/3 s for both: 7 layers are on them, one more on its
    way, and take 9 1/3 s. Where both get half of each rate, or hardly more, a seventh is not worth it.

    The moments alone of all 8 layers take 10 2/3 s. Their shorter turns hide less of the way from the last update to
    the first gradient: they are on the disks alone only where that is faster."""
    workload = chain_workload(8, 2**20, forward_s=0.125)
    asked = Settings(update="eager", clip=False, chunk_bytes=2 * MIB)
    roomy = round_machine(
        gpu_memory_bytes=8 * MIB,
        h2d_bytes_per_s=16 * MIB,
        nvme_memory_bytes=2**30,
        nvme_read_bytes_per_s=12 * MIB,
        nvme_write_bytes_per_s=12 * MIB,
    )
    room_bytes = needed_on_host(Job("any", workload, roomy, asked), Modes(frozenset())) - 4 * 12 * MIB
    little = replace(roomy, host=replace(roomy.host, memory_bytes=room_bytes))
    rate = 12.0 * MIB

    def planned(beside: float) -> tuple[set[int], set[str], Timeline]:
        assert little.nvme is not None
        disks = replace(little.nvme, read_beside_bytes_per_s=beside * rate, write_beside_bytes_per_s=beside * rate)
        plan = find_policy("tide:pins=0")(workload, replace(little, nvme=disks), asked)
        plan.check()
        on_disks = [r for r in plan.initial if r.place is Place.NVME]
        return {r.chunk for r in on_disks}, {r.list for r in on_disks}, play(plan)

    moments = {"momentum", "variance"}
    chunks, lists, timeline = planned(0.5)
    assert (chunks, lists) == ({2, 3, 4, 5, 6, 7}, {"param32", *moments})
    assert timeline.iteration_s == pytest.approx(12) == timeline.busy_s["nvme"]
    chunks, lists, timeline = planned(0.53)
    assert (chunks, lists) == ({*range(8)}, moments)
    assert 32 / 3 / 1.06 <= timeline.iteration_s < 11
    chunks, lists, timeline = planned(0.75)
    assert (chunks, lists) == ({1, 2, 3, 4, 5, 6, 7}, {"param32", *moments})
    assert 7 * 4 / 3 <= timeline.iteration_s < 9.6


@pytest.mark.parametrize("clip", [False, True])
def test_working_lists_and_gradients_go_to_disks_where_states_do_not_suffice(clip: bool) -> None:
    """12 layers: 24 MB of working lists and 24 MB of two layers' states on their way fit in 48 MB. With less, some
    working lists live on disks; the host has 8 MB for trips and 28 MB for two layers on their way. A state is read and
    written once; a working list and a gradient are written once and read thrice, less what stays on the GPU."""
    workload = chain_workload(12, 2**20, forward_s=0.125)
    asked = Settings(update="step" if clip else "eager", clip=clip, chunk_bytes=2 * MIB)
    for host_bytes in (48 * MIB, 46 * MIB, 40 * MIB):
        machine = round_machine(
            gpu_memory_bytes=8 * MIB,
            h2d_bytes_per_s=16 * MIB,
            host_memory_bytes=host_bytes,
            nvme_memory_bytes=2**30,
            nvme_read_bytes_per_s=12 * MIB,
            nvme_write_bytes_per_s=12 * MIB,
        )
        plan = find_policy("tide")(workload, machine, asked)
        proved = plan.check()
        wholly = {r.chunk for r in plan.initial if (r.place, r.list) == (Place.NVME, "param")}
        left = host_bytes - (12 - len(wholly)) * 2 * MIB
        assert (
            len(wholly) == 0
            if host_bytes == 48 * MIB
            else 8 * MIB + 2 * 14 * MIB <= left < 8 * MIB + 2 * 14 * MIB + 2 * MIB
        )
        assert proved.peak_bytes["host"] <= host_bytes
        written = 12 * 12 + 2 * 2 * len(wholly)
        assert plan.moved_bytes["nvme_write"] == written * MIB
        assert plan.moved_bytes["nvme_read"] <= (written + 2 * len(wholly)) * MIB
        bound = lower_bound(workload, machine, asked, plan.layout)
        assert play(plan).iteration_s >= bound.seconds
