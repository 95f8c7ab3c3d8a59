"""The one-line text form of a step, and what is said of lines that are not one."""

import pytest

from pstar_sim.core.plan import steps_from_text, steps_to_text
from pstar_sim.core.step import Kind, Place, Queue, Ref, Step, from_text, to_text
from pstar_sim.errors import PlanError


def test_a_step_is_one_line():
    step = Step(
        id=12,
        queue=Queue.H2D,
        kind=Kind.FETCH,
        bytes=67_108_864,
        chunk=3,
        list="param",
        moment=15,
        after=(Ref(4), Ref(9, 1)),
    )
    line = "12 h2d fetch chunk=3 list=param moment=15 bytes=67108864 after=4,9@-1"
    assert to_text(step) == line
    assert from_text(line) == step


def test_what_is_not_set_is_not_written():
    step = Step(id=0, queue=Queue.COMPUTE, kind=Kind.COMPUTE, moment=0)
    assert to_text(step) == "0 compute compute moment=0"
    assert from_text("0 compute compute moment=0") == step
    free = Step(id=1, queue=Queue.ADAM, kind=Kind.FREE, chunk=0, list="grad", place=Place.HOST, bytes=64)
    assert from_text(to_text(free)) == free


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("12 h2d", "needs at least an id, a queue and a kind"),
        ("x h2d fetch", "'x' is not a whole number"),
        ("-1 h2d fetch", "'-1' is not a whole number"),
        ("1 pcie fetch", r"'pcie' is not a queue \(compute, h2d"),
        ("1 h2d move", "'move' is not a kind of step"),
        ("1 h2d fetch chunk", "'chunk' is not one of"),
        ("1 h2d fetch chunk=", "'chunk=' is not one of"),
        ("1 h2d fetch size=3", "'size=3' is not one of"),
        ("1 h2d fetch chunk=1 chunk=2", "'chunk=2' is not one of .* given once"),
        ("1 h2d fetch chunk=1.5", "'chunk' is not a whole number"),
        ("1 h2d alloc place=disk", r"'disk' is not a place \(gpu, host, nvme\)"),
        ("1 h2d fetch after=3,x", "'x' is not a step id"),
        ("1 h2d fetch after=3@-2", "'3@-2' is not a step id"),
    ],
)
def test_a_bad_line_is_named_with_the_word_that_is_wrong(line: str, said: str):
    with pytest.raises(PlanError, match=said) as caught:
        from_text(line)
    assert repr(line) in str(caught.value)


def test_a_program_is_lines_with_comments_allowed(hand_text: str):
    steps = steps_from_text(hand_text)
    assert steps_to_text(steps) == hand_text
    assert steps_from_text("# one\n\n" + hand_text) == steps
    with pytest.raises(PlanError, match="line 3: step '1 h2d jump'"):
        steps_from_text("# one\n0 compute compute moment=0\n1 h2d jump\n")


def test_a_step_is_not_changed():
    step = from_text("4 h2d fetch chunk=3 list=param moment=7 bytes=64 after=2,9@-1")
    waiting = step.waiting_for((Ref(1),))
    assert to_text(waiting) == "4 h2d fetch chunk=3 list=param moment=7 bytes=64 after=1"
    assert waiting != step and hash(waiting) != hash(step)
    with pytest.raises(AttributeError, match="immutable"):
        step.id = 5  # type: ignore[misc]
