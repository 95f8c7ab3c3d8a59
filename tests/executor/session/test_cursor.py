"""The loop contract's table, row by row, against the same contract written out as branches. No model takes part."""

from __future__ import annotations

import functools
import itertools
import string
from collections.abc import Iterator

import pytest

from executor.driving.act_facts import _FACTS, ActFacts
from executor.session.cursor import ACTS, TABLE, Act, Answer, Cursor, Fact, State, answer
from executor.session.refusals import TEXTS, Refusal, refused
from pstar_sim.errors import ContractError
from pstar_sim.workload.workload import Phase

PAIRS = list(itertools.product(State, Act))
EVENTS = (Act.FORWARD, Act.RECOMPUTE, Act.END, Act.GRADIENT, Act.BACKWARD_END, Act.STEP)
World = dict[Fact, bool]


class Said:
    """Facts that were said; asking for another one is an error. Any word of a text is itself."""

    def __init__(self, world: World) -> None:
        self.world = world

    asks = {fact: functools.partial(lambda fact, said: said.world[fact], fact) for fact in Fact}

    def __getattr__(self, name: str) -> str:
        return f"<{name}>"


def asked(state: State, act: Act) -> list[Fact]:
    """Conditions that the rows of the pair look at."""
    return sorted({fact for row in TABLE[state, act] for fact, _ in row.when}, key=lambda fact: fact.name)


def worlds(state: State, act: Act) -> Iterator[World]:
    facts = asked(state, act)
    for values in itertools.product((False, True), repeat=len(facts)):
        yield dict(zip(facts, values))


def contract(state: State, act: Act, f: World) -> Answer | Refusal:
    """What comes of it, in branches."""
    if act in (Act.UPDATE, Act.CLEAR) and state is State.CLOSED:
        return Refusal.CLOSED
    if state is State.HALF_LOADED:
        return Refusal.HALF_LOADED
    if act is Act.CLEAR:
        if f[Fact.KEEPS]:
            return Refusal.KEEPS
        if state is State.INTERRUPTED:
            return Answer.MEND
        if not f[Fact.PENDING]:
            barren = f[Fact.BACKWARD] and not f[Fact.GIVEN]
            return Answer.DROP if barren else Answer.ALLOW
        if f[Fact.UPDATING]:
            return Answer.HALF if f[Fact.UNFINISHED] else Refusal.UPDATED
        return Refusal.SUMMED if f[Fact.SEVERAL] else Answer.DROP
    if act is Act.READ_GRAD:
        if not f[Fact.CONSUMED]:
            return Answer.ALLOW
        return Refusal.GRAD_IN_BACKWARD if f[Fact.IN_BACKWARD] else Refusal.GRAD
    if act is Act.SET_GRAD:
        return Answer.ALLOW if f[Fact.ARRIVING] and not f[Fact.CONSUMED] else Refusal.GRAD_SET
    if act is Act.DROP_GRAD:
        return Refusal.GRAD_LEFT if f[Fact.CONSUMED] and not f[Fact.STEPPED] else Answer.ALLOW
    if act is Act.DIFFERENTIATE:
        return Refusal.SCALED if f[Fact.SCALED] else Answer.ALLOW
    if act is Act.LOCATE:
        return Refusal.ADDRESS
    if act is Act.READ_VALUE:
        if f[Fact.TRANSFORMED]:
            return Refusal.TRANSFORMED
        if f[Fact.SEVERAL] and f[Fact.INSIDE]:
            return Refusal.BORDER
        return Refusal.UPDATING if f[Fact.UPDATING] and not f[Fact.FROZEN] else Answer.ALLOW
    if act is Act.READ_STATE:
        return Refusal.UPDATING if f[Fact.UPDATING] else Answer.ALLOW
    if state is State.CLOSED:
        return Answer.ALLOW if act is Act.LOOK else Answer.NOTHING
    if state is State.INTERRUPTED:
        if act is Act.UPDATE and f[Fact.COMMITTED]:
            return Answer.FINISH
        lost = f[Fact.PENDING] and not f[Fact.COMMITTED]
        return Answer.MEND if f[Fact.BEGINS] and not lost else Refusal.INTERRUPTED
    if act is Act.LOOK:
        return Answer.ALLOW
    if act is Act.UPDATE:
        return update(state, f)
    return event(state, act, f)


def update(state: State, f: World) -> Answer | Refusal:
    if not f[Fact.GIVEN]:
        return Refusal.NO_GRADIENT if f[Fact.BACKWARD] else Answer.NOTHING
    if f[Fact.STEPPED]:
        return Refusal.TWICE
    if f[Fact.UNDUE]:
        return Refusal.UNDUE
    if f[Fact.GIVEN_UP] and f[Fact.ARRIVED]:
        return Refusal.OUT_OF_MEMORY
    if state is State.ON_PLAN and f[Fact.LAST]:
        return Refusal.CHANGED if f[Fact.CHANGED] else Answer.STEP
    return Answer.STEP if state is State.OFF_PLAN else Answer.LEAVE


def event(state: State, act: Act, f: World) -> Answer | Refusal:
    if act is Act.FORWARD:
        if f[Fact.BEGINS] and f[Fact.TRANSFORMED]:
            return Refusal.TRANSFORMED
        if f[Fact.TRAINS] and f[Fact.SWITCHED]:
            return Refusal.SWITCHED_FORWARD
        if f[Fact.TRAINS] and f[Fact.OUTSIDE]:
            return Refusal.OUTSIDE
        if f[Fact.TRAINS] and f[Fact.ALONE]:
            return Refusal.LAYER_MAJOR
        if f[Fact.GIVEN_UP] and f[Fact.ARRIVED]:
            return Refusal.OUT_OF_MEMORY
    if state is State.VISITING:
        evaluates = act in (Act.FORWARD, Act.RECOMPUTE, Act.END) and not f[Fact.TRAINS]
        return Answer.STAY if evaluates else Answer.END_VISIT
    if act is Act.GRADIENT:
        if f[Fact.SWITCHED]:
            return Refusal.SWITCHED_BACKWARD
        if f[Fact.WRITTEN]:
            return Refusal.WRITTEN
        if f[Fact.OF_EVALUATION]:
            return Refusal.OF_EVALUATION
        if f[Fact.DOUBLE]:
            return Refusal.DOUBLE
        if f[Fact.SURPLUS] and f[Fact.ARRIVED]:
            return Refusal.SURPLUS
    begins = act in (Act.FORWARD, Act.RECOMPUTE)
    evaluates = state is State.BETWEEN and begins and not f[Fact.TRAINS]
    if state is not State.OFF_PLAN and f[Fact.EXPECTED] and not f[Fact.OUTSTANDING]:
        if not evaluates and (f[Fact.FITS] if begins else True):
            return Answer.FOLLOW
    if act is Act.FORWARD and f[Fact.UPDATING]:
        return Refusal.UPDATING
    if evaluates:
        return Answer.VISIT
    if state is State.OFF_PLAN:
        return Answer.CARRY
    return Answer.NOTHING if state is State.BETWEEN and act is Act.STEP else Answer.LEAVE


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_every_pair_in_every_world(state: State) -> None:
    for act in (act for of, act in PAIRS if of is state):
        for facts in worlds(state, act):
            expected = contract(state, act, facts)
            if isinstance(expected, Answer):
                assert answer(state, act, Said(facts)) is expected, (act, facts)
                continue
            with pytest.raises(ContractError) as error:
                answer(state, act, Said(facts))
            assert str(error.value) == str(refused(expected, Said({}))), (act, facts)


def test_the_table_is_whole() -> None:
    """Every pair has rows, every answer and refusal comes of one, every condition is asked for and every row counts
    somewhere."""
    assert set(TABLE) == set(PAIRS)
    ends = {row.then for rows in TABLE.values() for row in rows}
    assert ends == {*Answer, *Refusal} - {Refusal.NOT_CLEARED}  # of a gradient that arrives, not of an act
    assert {fact for pair in PAIRS for fact in asked(*pair)} == set(Fact) == set(_FACTS)
    for state, act in PAIRS:
        rows = TABLE[state, act]
        found = set()
        for facts in worlds(state, act):
            found.add(next(i for i, row in enumerate(rows) if all(facts[fact] is holds for fact, holds in row.when)))
        assert found == set(range(len(rows))), (state, act)


def test_every_text_says_what_its_act_knows() -> None:
    assert set(TEXTS) == set(Refusal)
    words = {field for text in TEXTS.values() for _, field, _, _ in string.Formatter().parse(text) if field}
    assert {word.removeprefix("f.") for word in words} <= set(dir(ActFacts))
    for refusal in Refusal:
        assert "{" not in str(refused(refusal, Said({})))


def test_where_a_cursor_stands() -> None:
    cursor = Cursor()
    assert cursor.state is State.BETWEEN and not cursor.inside
    cursor.visiting = True
    assert cursor.state is State.VISITING and not cursor.inside
    cursor.visiting, cursor.moment = False, 0
    assert cursor.state is State.ON_PLAN and cursor.inside
    cursor.off_plan = True
    assert cursor.state is State.OFF_PLAN and cursor.inside


def test_events_are_acts() -> None:
    assert ACTS["begin", Phase.FWD] is Act.FORWARD and ACTS["begin", Phase.RECOMPUTE] is Act.RECOMPUTE
    assert ACTS["end", Phase.FWD] is ACTS["end", Phase.RECOMPUTE] is Act.END
    assert [ACTS[kind, Phase.BWD] for kind in ("grad", "backward-end", "step")] == [*EVENTS[3:]]
