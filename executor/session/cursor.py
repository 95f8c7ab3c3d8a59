"""The state of the loop, and the loop contract as one table.

The first row of `TABLE[state, act]` whose conditions all hold counts. Conditions are names of `Fact`, with "!" before
one that must not hold; a row gives an `Answer` for the caller to carry out, or a `Refusal`, whose ContractError is in
`refusals.py`.

In words: docs/reference/loop-contract.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Protocol

from executor.session.refusals import Refusal, refused
from pstar_sim.workload.workload import Phase


class _Word(Enum):
    """Hashed by identity, which is fast: the table is looked up at every event."""

    __hash__ = object.__hash__


class State(_Word):
    """`Loop.ask` gives the last three precedence.

    BETWEEN: from the end of `optimizer.step()` to the first event of the next iteration.
    VISITING: an evaluation runs between two iterations.
    ON_PLAN: the open moment is the plan's.
    OFF_PLAN: the iteration continues on demand.
    INTERRUPTED: inside the engine's own work, not mended yet.
    HALF_LOADED: a load did not end.
    CLOSED: the session has ended.
    """

    BETWEEN = "between"
    VISITING = "visiting"
    ON_PLAN = "on plan"
    OFF_PLAN = "off plan"
    INTERRUPTED = "interrupted"
    HALF_LOADED = "half loaded"
    CLOSED = "closed"


class Act(_Word):
    """Six events of the clock, from FORWARD to STEP, then calls of the user's code."""

    FORWARD = "a module's forward begins"
    RECOMPUTE = "a module's forward begins inside backward"
    END = "a module's forward ends"
    GRADIENT = "the gradient of a module's output"
    BACKWARD_END = "a backward ends"
    STEP = "the optimizer's own moment begins"
    UPDATE = "optimizer.step()"
    CLEAR = "zero_grad()"
    READ_GRAD = "p.grad is read"
    SET_GRAD = "p.grad = tensor"
    DROP_GRAD = "p.grad = None"
    READ_VALUE = "a parameter's value is read outside every module"
    READ_STATE = "an optimizer state is read"
    DIFFERENTIATE = "torch.autograd.grad of parameters"
    LOCATE = "a parameter's address is read outside every module"
    LOOK = "values are looked at while nothing moves"


class Answer(_Word):
    """LEAVE: leave the plan, then CARRY.
    CARRY: continue on demand.
    VISIT: begin an evaluation.
    END_VISIT: end the evaluation, then ask again.
    MEND: mend the interruption, then ask again.
    FINISH: mend by finishing the optimizer step.
    STEP: update, by the plan or on demand.
    DROP: drop the iteration's gradients, then allow.
    HALF: end the run: a backward ended amid its eager updates.
    ALLOW: do as the call says.
    """

    FOLLOW = "follow"
    LEAVE = "leave"
    CARRY = "carry"
    VISIT = "visit"
    STAY = "stay"
    END_VISIT = "end visit"
    MEND = "mend"
    FINISH = "finish"
    NOTHING = "nothing"
    STEP = "step"
    DROP = "drop"
    HALF = "half"
    ALLOW = "allow"


class Fact(_Word):
    """`driving/act_facts.py` determines each of them."""

    TRAINS = "trains"
    """A forward that runs now is one of training."""
    BEGINS = "begins"
    """The act begins a module's forward that no other module's forward called, or is a call."""
    SWITCHED = "switched"
    """Requires_grad of a parameter has changed since `prepare`."""
    OUTSIDE = "outside"
    """Under loss scaling, the event begins a module's forward outside a forward of the prepared model."""
    ALONE = "alone"
    """The plan is layer-major, and the forward does not run in `session.step`."""
    EXPECTED = "expected"
    """The plan has the event next, or further on where this rank has nothing to compute before it."""
    FITS = "fits"
    """The event begins no micro-batch, or it begins a micro-batch whose batch may run on plan."""
    OUTSTANDING = "outstanding"
    """A gradient that the plan counts on has not come."""
    OF_EVALUATION = "of_evaluation"
    """The gradient is of an output that an evaluation computed."""
    PENDING = "pending"
    """Gradients have arrived and `optimizer.step()` has not come."""
    GIVEN = "given"
    """Gradients have arrived, or count as zero."""
    ARRIVED = "arrived"
    """Gradients have arrived."""
    ARRIVING = "arriving"
    """The parameter's gradient is in `.grad`: a hook of the user's own runs, before the gradient is taken."""
    CONSUMED = "consumed"
    """A gradient (of the parameter, where the act is about one) has left and is not cleared."""
    STEPPED = "stepped"
    """`optimizer.step()` came after they arrived."""
    SURPLUS = "surplus"
    """As many backwards as planned have given gradients."""
    UPDATING = "updating"
    """Parameters may be changing (eager updates)."""
    UNFINISHED = "unfinished"
    """The backward has not ended, and never will."""
    COMMITTED = "committed"
    """The updates of the iteration have begun."""
    GIVEN_UP = "given_up"
    """The iteration did not fit into memory."""
    LAST = "last"
    """The open moment is the last before the optimizer's."""
    CHANGED = "changed"
    """Settings of the update are not those it began with."""
    KEEPS = "keeps"
    """Gradient tensors are to be kept."""
    SEVERAL = "several"
    """There are several ranks."""
    INSIDE = "inside"
    """A moment of an iteration is open."""
    FROZEN = "frozen"
    """The parameter is not trained."""
    UNDUE = "undue"
    """Accelerate says that no optimizer step is due."""
    BACKWARD = "backward"
    """A backward of the open iteration has ended."""
    IN_BACKWARD = "in_backward"
    """A backward runs in this thread."""
    SCALED = "scaled"
    """Gradients are multiplied by a loss scale inside the model."""
    TRANSFORMED = "transformed"
    """A transform of torch.func runs."""
    WRITTEN = "written"
    """A parameter was written in place since it is the session's; asked where a backward begins."""
    DOUBLE = "double"
    """The backward makes a graph of its own, and the plan moves parameters."""


class FactSource(Protocol):
    """Facts of one act, each determined only where a row needs it; their names are the words in `refusals.TEXTS`."""

    @property
    def asks(self) -> Mapping[Fact, Callable[[Any], bool]]: ...


@dataclass(frozen=True, slots=True)
class TableRow:
    """when: (fact, must it hold?), all as stated."""

    when: tuple[tuple[Fact, bool], ...]
    then: Answer | Refusal


def _row(when: str, then: Answer | Refusal) -> TableRow:
    return TableRow(tuple((Fact(word.removeprefix("!")), not word.startswith("!")) for word in when.split()), then)


_FORWARD = (
    _row("begins transformed", Refusal.TRANSFORMED),
    _row("switched trains", Refusal.SWITCHED_FORWARD),
    _row("outside trains", Refusal.OUTSIDE),
    _row("alone trains", Refusal.LAYER_MAJOR),
    _row("given_up arrived", Refusal.OUT_OF_MEMORY),
)
_GRADIENT = (
    _row("switched", Refusal.SWITCHED_BACKWARD),
    _row("written", Refusal.WRITTEN),
    _row("of_evaluation", Refusal.OF_EVALUATION),
    _row("double", Refusal.DOUBLE),
    _row("surplus arrived", Refusal.SURPLUS),
)
_FOLLOW = _row("expected !outstanding", Answer.FOLLOW)
_FIRST = _row("trains expected fits !outstanding", Answer.FOLLOW)
_UPDATING = _row("updating", Refusal.UPDATING)
_EVALUATION = _row("!trains", Answer.VISIT)
_STAY = (_row("!trains", Answer.STAY), _row("", Answer.END_VISIT))
_LEAVE = _row("", Answer.LEAVE)
_CARRY = _row("", Answer.CARRY)
_NOTHING = _row("", Answer.NOTHING)
_ALLOW = _row("", Answer.ALLOW)
_CLOSED = _row("", Refusal.CLOSED)
_INTERRUPTED = (
    _row("!begins", Refusal.INTERRUPTED),
    _row("pending !committed", Refusal.INTERRUPTED),
    _row("", Answer.MEND),
)
_UPDATE = (
    _row("!given backward", Refusal.NO_GRADIENT),
    _row("!given", Answer.NOTHING),
    _row("stepped", Refusal.TWICE),
    _row("undue", Refusal.UNDUE),
    _row("given_up arrived", Refusal.OUT_OF_MEMORY),
)
_CLEAR = (
    _row("keeps", Refusal.KEEPS),
    _row("pending updating unfinished", Answer.HALF),
    _row("pending updating", Refusal.UPDATED),
    _row("pending several", Refusal.SUMMED),
    _row("pending", Answer.DROP),
    _row("!given backward", Answer.DROP),
    _ALLOW,
)
_CALLS: dict[Act, tuple[TableRow, ...]] = {
    Act.CLEAR: _CLEAR,
    Act.READ_GRAD: (
        _row("consumed in_backward", Refusal.GRAD_IN_BACKWARD),
        _row("consumed", Refusal.GRAD),
        _ALLOW,
    ),
    Act.SET_GRAD: (_row("arriving !consumed", Answer.ALLOW), _row("", Refusal.GRAD_SET)),
    Act.DROP_GRAD: (_row("consumed !stepped", Refusal.GRAD_LEFT), _ALLOW),
    Act.READ_VALUE: (
        _row("transformed", Refusal.TRANSFORMED),
        _row("several inside", Refusal.BORDER),
        _row("!frozen updating", Refusal.UPDATING),
        _ALLOW,
    ),
    Act.READ_STATE: (_UPDATING, _ALLOW),
    Act.DIFFERENTIATE: (_row("scaled", Refusal.SCALED), _ALLOW),
    Act.LOCATE: (_row("", Refusal.ADDRESS),),
    Act.LOOK: (_ALLOW,),
}
_EVENTS = (Act.FORWARD, Act.RECOMPUTE, Act.END, Act.GRADIENT, Act.BACKWARD_END, Act.STEP)

_ROWS: dict[State, dict[Act, tuple[TableRow, ...]]] = {
    State.BETWEEN: {
        Act.FORWARD: (*_FORWARD, _FIRST, _UPDATING, _EVALUATION, _LEAVE),
        Act.RECOMPUTE: (_FIRST, _EVALUATION, _LEAVE),
        Act.END: (_FOLLOW, _LEAVE),
        Act.GRADIENT: (*_GRADIENT, _FOLLOW, _LEAVE),
        Act.BACKWARD_END: (_FOLLOW, _LEAVE),
        Act.STEP: (_FOLLOW, _NOTHING),
        Act.UPDATE: (*_UPDATE, _LEAVE),
    },
    State.VISITING: {
        Act.FORWARD: (*_FORWARD, *_STAY),
        Act.RECOMPUTE: _STAY,
        Act.END: _STAY,
        Act.GRADIENT: (_row("", Answer.END_VISIT),),
        Act.BACKWARD_END: (_row("", Answer.END_VISIT),),
        Act.STEP: (_row("", Answer.END_VISIT),),
        Act.UPDATE: (*_UPDATE, _LEAVE),
    },
    State.ON_PLAN: {
        Act.FORWARD: (*_FORWARD, _row("expected fits !outstanding", Answer.FOLLOW), _UPDATING, _LEAVE),
        Act.RECOMPUTE: (_row("expected fits !outstanding", Answer.FOLLOW), _LEAVE),
        Act.END: (_FOLLOW, _LEAVE),
        Act.GRADIENT: (*_GRADIENT, _FOLLOW, _LEAVE),
        Act.BACKWARD_END: (_FOLLOW, _LEAVE),
        Act.STEP: (_FOLLOW, _LEAVE),
        Act.UPDATE: (*_UPDATE, _row("last changed", Refusal.CHANGED), _row("last", Answer.STEP), _LEAVE),
    },
    State.OFF_PLAN: {
        Act.FORWARD: (*_FORWARD, _UPDATING, _CARRY),
        Act.RECOMPUTE: (_CARRY,),
        Act.END: (_CARRY,),
        Act.GRADIENT: (*_GRADIENT, _CARRY),
        Act.BACKWARD_END: (_CARRY,),
        Act.STEP: (_CARRY,),
        Act.UPDATE: (*_UPDATE, _row("", Answer.STEP)),
    },
    State.INTERRUPTED: {
        **dict.fromkeys(_EVENTS, _INTERRUPTED),
        Act.UPDATE: (_row("committed", Answer.FINISH), *_INTERRUPTED),
        Act.CLEAR: (_row("keeps", Refusal.KEEPS), _row("", Answer.MEND)),
        Act.LOOK: _INTERRUPTED,
    },
    State.HALF_LOADED: dict.fromkeys(Act, (_row("", Refusal.HALF_LOADED),)),
    State.CLOSED: {**dict.fromkeys(_EVENTS, (_NOTHING,)), Act.UPDATE: (_CLOSED,), Act.CLEAR: (_CLOSED,)},
}

TABLE: Mapping[tuple[State, Act], tuple[TableRow, ...]] = MappingProxyType(
    {(state, act): rows for state, mine in _ROWS.items() for act, rows in {**_CALLS, **mine}.items()}
)
"""(state of the loop, act of the loop) -> rows; the first row that holds counts."""


_KINDS = {"end": Act.END, "grad": Act.GRADIENT, "backward-end": Act.BACKWARD_END, "step": Act.STEP}

ACTS: Mapping[tuple[str, Phase], Act] = MappingProxyType(
    {(kind, phase): act for kind, act in _KINDS.items() for phase in Phase}
    | {("begin", phase): Act.FORWARD if phase is Phase.FWD else Act.RECOMPUTE for phase in Phase}
)
"""(kind of an event of the clock, phase of the moment that the event opens) -> the act of the loop."""


def answer(state: State, act: Act, facts: FactSource) -> Answer:
    """Raises ContractError where the table refuses the act."""
    asks = facts.asks
    for row in TABLE[state, act]:
        for fact, wanted in row.when:
            if asks[fact](facts) is not wanted:
                break
        else:
            if isinstance(row.then, Refusal):
                raise refused(row.then, facts)
            return row.then
    raise AssertionError(f"no row of {state}, {act} holds")


class Cursor:
    """moment: the open one, -1 between two iterations.
    stepped: `optimizer.step()` came after gradients.
    committed: last iteration whose updates `optimizer.step()` has begun, -1 before.
    """

    __slots__ = ("committed", "moment", "off_plan", "stepped", "visiting")

    def __init__(self) -> None:
        self.moment = -1
        self.visiting = False
        self.off_plan = False
        self.stepped = False
        self.committed = -1

    @property
    def inside(self) -> bool:
        """On plan or off."""
        return self.moment >= 0 or self.off_plan

    @property
    def state(self) -> State:
        if self.visiting:
            return State.VISITING
        if self.off_plan:
            return State.OFF_PLAN
        return State.BETWEEN if self.moment < 0 else State.ON_PLAN
