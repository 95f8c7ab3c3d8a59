"""The one state table: what leads where, and that an illegal transition changes nothing."""

import pytest

from pstar_sim.core.layout import build_layout
from pstar_sim.core.state import Event, State, StateTable, after
from pstar_sim.errors import IllegalTransition
from pstar_sim.testing import chain_workload


@pytest.fixture
def table() -> StateTable:
    """One chunk of two tensors (0, 1), parameters loaded."""
    return StateTable(build_layout(chain_workload(1, 2048, tensors_per_layer=2), chunk_bytes=4096))


def test_a_tensor_goes_through_one_iteration():
    state = State.FREE
    log = []
    for event in (
        Event.LOAD,
        Event.READ,
        Event.READ_FWD,
        Event.TURN,
        Event.READ,
        Event.OVERWRITE,
        Event.ADAM,
        Event.UPDATED,
        Event.RELEASE,
    ):
        state = after(state, event)
        log.append(state.value)
    assert log == ["hold", "compute", "hold-after-fwd", "hold", "compute", "hold-after-bwd", "compute", "hold", "free"]


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (State.FREE, Event.READ),  # nothing there to read
        (State.COMPUTE, Event.RELEASE),  # in use: immovable
        (State.COMPUTE, Event.READ),
        (State.HOLD_AFTER_BWD, Event.READ),  # the gradient lies there
        (State.HOLD, Event.OVERWRITE),  # no gradient without a running moment
        (State.RELEASED, Event.LOAD),  # no payload at all
    ],
)
def test_what_is_not_in_the_table_is_refused(state: State, event: Event):
    with pytest.raises(IllegalTransition, match=f"'{event.value}' is not possible in state '{state.value}'"):
        after(state, event)


def test_the_chunk_follows_its_tensors_by_priority(table: StateTable):
    assert table.chunk(0) is State.HOLD
    table.apply([0], Event.READ)
    assert table.chunk(0) is State.COMPUTE and not table.movable(0)
    table.apply([0], Event.READ_FWD)
    assert table.chunk(0) is State.HOLD  # tensor 1 is
    table.apply([1], Event.READ)
    table.apply([1], Event.READ_FWD)
    assert table.chunk(0) is State.HOLD_AFTER_FWD
    table.apply([0], Event.READ)
    table.apply([0], Event.OVERWRITE)
    assert table.chunk(0) is State.HOLD_AFTER_FWD  # tensor 1 is
    table.apply([1], Event.READ)
    table.apply([1], Event.OVERWRITE)
    assert table.chunk(0) is State.HOLD_AFTER_BWD and table.movable(0)


def test_an_illegal_transition_changes_nothing_not_even_the_legal_half(table: StateTable):
    table.apply([0], Event.READ)
    with pytest.raises(IllegalTransition, match=r"tensor 0 \(chunk 0\)"):
        table.apply([1, 0], Event.READ)
    assert (table.tensor(0), table.tensor(1)) == (State.COMPUTE, State.HOLD)


def test_a_released_chunk_has_no_payload_until_it_is_restored(table: StateTable):
    table.apply([0], Event.READ)
    with pytest.raises(IllegalTransition):
        table.release(0)
    assert table.chunk(0) is State.COMPUTE
    table.apply([0], Event.READ_FWD)
    table.release(0)
    assert table.chunk(0) is State.RELEASED and table.tensor(0) is State.FREE
    with pytest.raises(IllegalTransition, match="chunk 0 is released already"):
        table.release(0)
    table.restore(0)
    assert table.chunk(0) is State.FREE
    with pytest.raises(IllegalTransition, match="has a payload already"):
        table.restore(0)
