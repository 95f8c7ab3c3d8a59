"""PatrickStar's published rules by themselves: states in margin space, and when groups are given up.

Two layers of 2 MiB; moments F0, F1, B1, B0, the step.
"""

from __future__ import annotations

import pytest

from pstar_sim.core.layout import build_layout
from pstar_sim.policy.kit.facts import Facts, facts_of
from pstar_sim.policy.systems.patrickstar_groups import Groups
from pstar_sim.policy.systems.patrickstar_memory import chunks_in_margin, fp32_buffer_bytes, homes_of, margin_space
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB


def facts(*, chunk_mib: int = 2, checkpointing: bool = False, micro_batches: int = 1, ranks: int = 1) -> Facts:
    workload = chain_workload(2, MIB, checkpointing=checkpointing, micro_batches=micro_batches, tide_bytes=MIB)
    return facts_of(workload, build_layout(workload, chunk_bytes=chunk_mib * MIB, ranks=ranks))


def given_up(uses: Facts) -> list[list[int]]:
    """Behind each moment."""
    groups = Groups(uses)
    rows = []
    for m in range(len(uses.workload.moments)):
        groups.begin(m)
        rows.append(groups.end(m))
    return rows


@pytest.mark.parametrize(
    ("margin", "states", "count"),
    [
        (44, [12] * 4, 2),  # ceil(44 / 12 * 0.8) - 1 = ceil(2.9) - 1
        (45, [12] * 4, 2),  # ceil(3.0) - 1: of a whole number one chunk is left out
        (46, [12] * 4, 3),
        (44, [40, 12, 12, 12], 1),  # the two first would be 52
        (12, [12] * 4, 0),
        (-1, [12] * 4, 0),
        (44, [], 0),
    ],
)
def test_states_take_four_fifths_of_the_margin_less_one_chunk(margin: int, states: list[int], count: int) -> None:
    assert chunks_in_margin(margin, states) == count


def test_margin_space_is_what_all_else_leaves() -> None:
    """48 MiB - a tide of 1 - a buffer of 4 - working lists of 4; on two ranks half of all, and the remote half of one
    group."""
    assert fp32_buffer_bytes(facts()) == 4 * MIB
    assert margin_space(facts(), 48 * MIB) == (48 - 1 - 4 - 4) * MIB
    assert margin_space(facts(ranks=2), 48 * MIB) == (48 - 1 - 2 - 2 - 1) * MIB
    homes = homes_of(facts(), 48 * MIB)
    assert (sorted(homes.pinned), homes.movable, homes.buffer_bytes) == ([0, 1], (), 0)  # ceil(39 / 12 * 0.8) - 1 = 2
    homes = homes_of(facts(ranks=2), 20 * MIB)
    assert (sorted(homes.pinned), homes.movable) == ([0], (1,))  # 15 MiB of margin: ceil(15 / 6 * 0.8) - 1 = 1
    assert homes.brought_bytes == {0: MIB, 1: 2 * MIB}  # of a pinned one the remote half alone


def test_a_group_is_given_up_when_all_its_tensors_were_used() -> None:
    assert given_up(facts()) == [[0], [1], [1], [0], []]
    assert given_up(facts(chunk_mib=4)) == [[], [0], [], [0], []]  # both layers in one group


def test_behind_a_recomputation_a_group_is_given_up_once_more() -> None:
    """F0 F1 R1 B1 R0 B0 and the step: each group is gathered a third time for its gradient."""
    assert given_up(facts(checkpointing=True)) == [[0], [1], [1], [1], [0], [0], []]


def test_a_micro_batch_ends_with_no_group_left() -> None:
    groups = Groups(facts(micro_batches=2))
    assert [m for m in range(9) if groups.begin(m)] == [4]
