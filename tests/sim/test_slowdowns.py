"""What queues do to each other: finish times of small cases, by hand."""

from collections.abc import Mapping

import pytest

from pstar_sim.core.follow import follow
from pstar_sim.core.program import Program
from pstar_sim.core.rules import Rates, StepCosts
from pstar_sim.core.step import Kind, Queue


def ends(
    tasks: list[tuple[str, float, float]],
    slowdowns: Mapping[str, float],
    *,
    dram: float = 1e9,
    demand: float = 0.0,
    compute_while_net: float = 1.0,
    disks: tuple[float, float] | None = None,
) -> list[float]:
    """When each (queue, seconds, duty) ends, all begun at 0: one step per queue, and behind it one that takes no time
    and waits for all of them, so that the next iteration begins when every task has ended."""
    count = len(tasks)
    names = [Queue(queue) for queue, _, _ in tasks]
    copies = [queue in (Queue.H2D, Queue.D2H) for queue in names]
    program = Program(
        ids=tuple(range(2 * count)),
        position={i: i for i in range(2 * count)},
        kinds=(Kind.COMPUTE,) * (2 * count),
        queues=tuple(names),
        queue_of=(*range(count), *range(count)),
        order=tuple((i, count + i) for i in range(count)),
        waits=((),) * count + (tuple((i, 0) for i in range(count)),) * count,
        copies=(*copies, *copies),
        lanes=tuple(name.value for name in names) * 2,
        compute=0,
    )
    nothing = [0.0] * count
    costs = StepCosts(
        seconds=[*(seconds for _, seconds, _ in tasks), *nothing],
        dram_bytes=[*(demand * seconds for _, seconds, _ in tasks), *nothing],
        duty=[*(duty for _, _, duty in tasks), *nothing],
    )
    rates = Rates(dram_bytes_per_s=dram, slowdowns=slowdowns, compute_while_net=compute_while_net, disks=disks)
    record = follow(program, costs, rates)
    return list(record.times.end[0, :count].tolist())


def test_a_read_and_a_write_of_the_disks_share_their_rates() -> None:
    """Together until the write's 3 s at 0.6 end at 5; the read has done 4 of 7 s by then."""
    tasks = [("compute", 1.0, 1.0), ("nvme", 7.0, 1.0), ("nvme_write", 3.0, 1.0)]
    assert ends(tasks, {}, demand=1.0, disks=(0.8, 0.6)) == pytest.approx([1.0, 8.0, 5.0])
    assert ends(tasks[:2], {}, demand=1.0, disks=(0.8, 0.6)) == pytest.approx([1.0, 7.0])


def test_alone_nothing_is_slowed_down() -> None:
    assert ends([("compute", 3.0, 1.0)], {"compute_while_adam": 2.0}) == [3.0]


def test_compute_while_adam_runs() -> None:
    # Adam ends at 2; until then compute does 2 / 1.25 = 1.6 of its 3 seconds, the other 1.4 at full speed.
    assert ends([("compute", 3.0, 1.0), ("adam", 2.0, 1.0)], {"compute_while_adam": 1.25}) == pytest.approx([3.4, 2.0])


def test_factors_of_two_partners_multiply() -> None:
    slow = {"compute_while_h2d": 1.5, "compute_while_d2h": 2.0}
    tasks = [("compute", 1.0, 1.0), ("h2d", 10.0, 1.0), ("d2h", 10.0, 1.0)]
    assert ends(tasks, slow)[0] == pytest.approx(3.0)


def test_a_throttled_copy_counts_by_how_busy_it_is() -> None:
    # Busy for a fifth of its time: 1 + (1.5 - 1) / 5 = 1.1
    assert ends([("compute", 1.0, 1.0), ("h2d", 10.0, 0.2)], {"compute_while_h2d": 1.5})[0] == pytest.approx(1.1)


def test_a_throttled_copy_hides_its_own_slow_down() -> None:
    slow = {"h2d_while_compute": 2.0}
    assert ends([("h2d", 1.0, 0.4), ("compute", 10.0, 1.0)], slow)[0] == pytest.approx(1.0)
    assert ends([("h2d", 1.0, 0.8), ("compute", 10.0, 1.0)], slow)[0] == pytest.approx(1.6)


def test_the_lower_of_dram_share_and_factor_holds() -> None:
    # Two tasks that want 1 B/s each of 1 B/s: a half each; a factor of 1.5 changes nothing, one of 4 does.
    tasks = [("adam", 1.0, 1.0), ("h2d", 1.0, 1.0)]
    assert ends(tasks, {"adam_while_h2d": 1.5}, dram=1.0, demand=1.0) == pytest.approx([2.0, 2.0])
    assert ends(tasks, {"adam_while_h2d": 4.0}, dram=1.0, demand=1.0) == pytest.approx([2.5, 2.0])


def test_compute_while_a_collective_runs() -> None:
    # The collective ends at 2; until then compute does 1 of its 3 seconds.
    assert ends([("compute", 3.0, 1.0), ("net", 2.0, 1.0)], {}, compute_while_net=2.0) == pytest.approx([4.0, 2.0])
    # Compute ends first: 1 second takes 2.
    assert ends([("compute", 1.0, 1.0), ("net", 5.0, 1.0)], {}, compute_while_net=2.0) == pytest.approx([2.0, 5.0])


def test_copies_beside_a_collective_keep_their_rates() -> None:
    tasks = [("compute", 3.0, 1.0), ("net", 2.0, 1.0), ("h2d", 2.0, 1.0)]
    assert ends(tasks, {}, compute_while_net=2.0) == pytest.approx([4.0, 2.0, 2.0])
