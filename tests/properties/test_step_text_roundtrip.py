"""from_text is the exact reverse of to_text, for any step."""

from hypothesis import given
from hypothesis import strategies as st

from pstar_sim.core.plan import steps_from_text, steps_to_text
from pstar_sim.core.step import Kind, Part, Place, Queue, Ref, Step, from_text, to_text

naturals = st.integers(min_value=0, max_value=2**50)
refs = st.builds(Ref, naturals, st.sampled_from([0, 1]))
parts = st.integers(min_value=2, max_value=2**20).flatmap(
    lambda of: st.builds(Part, st.integers(min_value=0, max_value=of - 1), st.just(of))
)
steps = st.builds(
    Step,
    id=naturals,
    queue=st.sampled_from(Queue),
    kind=st.sampled_from(Kind),
    bytes=naturals,
    chunk=st.none() | naturals,
    list=st.none() | st.sampled_from(["param", "grad", "grad32", "param32", "momentum", "variance"]),
    place=st.none() | st.sampled_from(Place),
    moment=st.none() | naturals,
    after=st.lists(refs, max_size=5).map(tuple),
    part=st.none() | parts,
)


@given(steps)
def test_a_step_survives_its_text(step: Step):
    line = to_text(step)
    assert "\n" not in line
    assert from_text(line) == step
    assert to_text(from_text(line)) == line


@given(st.lists(steps, max_size=8).map(tuple))
def test_a_program_survives_its_text(program: tuple[Step, ...]):
    assert steps_from_text(steps_to_text(program)) == program
