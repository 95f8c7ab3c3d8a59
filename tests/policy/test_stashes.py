"""Activations moved to the host and back: the workload, the plans, the checker, the seconds, all worked out by hand.

Six layers, one moment each: moments 0-5 forward (1 s), 6-11 backward of layers 5-0 (2 s), 12 the step. Each layer
leaves 1 MiB behind, so the tide is 1, 2 ... 6, 6 ... 1, 0 MiB. Layers 0 and 1 are offloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import STASHES, Plan, Settings, load_plan
from pstar_sim.core.slabs import host_room, stash_key
from pstar_sim.core.step import Kind, Place, Ref, Step, from_text, to_text
from pstar_sim.errors import CannotPlan, DoesNotFit, PlanError, TraceError
from pstar_sim.planner.explain import explain
from pstar_sim.planner.memory_needs import memory_need
from pstar_sim.planner.variants import choose
from pstar_sim.policy.registry import find_policy, named
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import MIB
from pstar_sim.workload.mixing import mix_blocks, offload_blocks
from pstar_sim.workload.orders import Order
from pstar_sim.workload.trace import load_trace, load_variants, save_trace
from pstar_sim.workload.workload import Stash, Workload, activations_text, repeat_micro_batch

EAGER = Settings(update="eager", clip=False)
TIDE_MIB = [1, 2, 3, 4, 5, 6, 6, 5, 4, 3, 2, 1, 0]


def kept(layers: int = 6) -> Workload:
    up = list(range(1, layers + 1))
    return chain_workload(layers, 1024, tide_bytes=[MIB * t for t in (*up, *up[::-1], 0)], forward_s=1.0)


def offloaded() -> Workload:
    return offload_blocks(kept(), ["layers.0", "layers.1"])


@pytest.fixture
def machine() -> Machine:
    """1.5 s a MiB either way; Adam takes no time; the moments' seconds are this machine's."""
    return round_machine(
        gpu_memory_bytes=10**8,
        host_memory_bytes=10**8,
        h2d_bytes_per_s=MIB / 1.5,
        hbm_bytes_per_s=1e15,
        flops_per_s=1e9,
        dram_bytes_per_s=1e15,
        adam_params_per_s=1e12,
        measured=False,
    )


# The workload.


def test_where_two_layers_go_and_when_they_are_counted() -> None:
    """Layer 0: made in moment 0, gone when layer 1 (the next that is offloaded) has passed, in moment 2; counted again
    from the moment before layer 1's backward (9), needed in its own (11). Layer 1, the last one, has as many layers as
    layer 0 had: one. So moments 3-8 hold 1 MiB less, and 4-7 another."""
    w = offloaded()
    assert w.stashes == (
        Stash(block="layers.0", micro_batch=0, bytes=MIB, made=0, gone=2, back=9, needed=11),
        Stash(block="layers.1", micro_batch=0, bytes=MIB, made=1, gone=3, back=8, needed=10),
    )
    assert [m.peak_bytes // MIB for m in w.moments] == [1, 2, 3, 3, 3, 4, 4, 3, 3, 3, 2, 1, 0]
    assert activations_text(w) == "activations of blocks 0-1 of 6 offloaded, 2-5 kept"
    assert w.stash_room == (("layers.0", MIB), ("layers.1", MIB))
    assert w.flops == kept().flops


def test_every_second_layer_has_the_time_of_two() -> None:
    """Layers 0 and 2 of eight: layer 0 is gone behind layer 2's forward, layer 2 behind layer 4's."""
    w = offload_blocks(kept(8), ["layers.0", "layers.2"])
    assert [(s.made, s.gone, s.back, s.needed) for s in w.stashes] == [(0, 3, 12, 15), (2, 5, 10, 13)]
    assert activations_text(w) == "activations of blocks 0, 2 of 8 offloaded, 1, 3-7 kept"


def test_micro_batches_have_a_stash_each_and_share_the_room() -> None:
    w = repeat_micro_batch(offloaded(), 3)
    assert [(s.micro_batch, s.made, s.needed) for s in w.stashes[::2]] == [(0, 0, 11), (1, 12, 23), (2, 24, 35)]
    assert sum(size for _, size in w.stash_room) == 2 * MIB


def test_what_cannot_be_offloaded_is_said() -> None:
    w = kept()
    with pytest.raises(TraceError, match=r"block layers\.5 are needed again before they could be gone"):
        offload_blocks(w, ["layers.5"])
    with pytest.raises(TraceError, match=r"has no blocks layers\.9"):
        offload_blocks(w, ["layers.9"])
    with pytest.raises(TraceError, match="keeps no activations"):
        offload_blocks(chain_workload(6, 1024, tide_bytes=MIB), ["layers.0"])
    with pytest.raises(TraceError, match=r"layers\.0 recomputes its activations"):
        offload_blocks(replace(w, checkpointing=True), ["layers.0"])
    with pytest.raises(TraceError, match="one micro-batch"):
        offload_blocks(repeat_micro_batch(w, 2), ["layers.0"])
    with pytest.raises(TraceError, match="one micro-batch"):
        offload_blocks(offloaded(), ["layers.2"])
    assert offload_blocks(w, []) is w


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stashes": ()}, "one stash per micro-batch, in total 2"),
        ({"activations": (("layers.0", "offload"), ("layers.0", "keep"))}, "each block is named once"),
        ({"activations": (("layers.0", "burn"),)}, "known choices are keep, recompute, offload"),
        ({"gone": 9}, "made < gone < back < needed"),
        ({"bytes": 0}, "it must have bytes"),
        ({"bytes": 7 * MIB}, "bytes of stashes are on the GPU then"),
        ({"micro_batch": 1}, "each offloaded block has one"),
    ],
)
def test_a_workload_that_contradicts_itself(changes: dict[str, object], said: str) -> None:
    w = offloaded()
    if set(changes) & {"stashes", "activations"}:
        with pytest.raises(TraceError, match=said):
            replace(w, **changes)  # type: ignore[arg-type]
    else:
        first = replace(w.stashes[0], **changes)  # type: ignore[arg-type]
        with pytest.raises(TraceError, match=said):
            replace(w, stashes=(first, *w.stashes[1:]))


# The files.


def test_files_carry_them_and_files_without_are_as_they_were(machine: Machine, tmp_path: Path) -> None:
    w = offloaded()
    trace, path = tmp_path / "t.parquet", tmp_path / "plan.json"
    save_trace([kept(), w, repeat_micro_batch(w, 2)], trace)
    plain, one, two = load_variants(trace)
    assert (plain.activations, plain.stashes) == ((), ())
    assert (one.activations, one.stashes, two.stashes) == (
        w.activations,
        w.stashes,
        repeat_micro_batch(w, 2).stashes,
    )
    save_trace(kept(), trace)
    assert load_trace(trace).activations == ()
    plan = find_policy("tide")(w, machine, EAGER)
    plan.save(path)
    loaded = load_plan(path)
    assert (loaded.steps, loaded.workload.stashes, loaded.buffers) == (plan.steps, w.stashes, plan.buffers)
    loaded.check(w, machine)
    find_policy("tide")(kept(), machine, EAGER).save(path)
    assert "stashes" not in path.read_text() and "activations" not in path.read_text()


def test_a_step_and_its_text() -> None:
    line = "7 d2h stash_out stash=1 moment=4 bytes=1048576 after=6"
    assert to_text(from_text(line)) == line
    assert from_text(line).stash == 1
    with pytest.raises(PlanError, match="is not a whole number"):
        from_text("7 d2h stash_out stash=x moment=4")


# The plans.


def test_blocks_that_offload_their_activations_have_no_other_order(machine: Machine) -> None:
    with pytest.raises(CannotPlan, match=r"l2l: .* offloads activations, which a layer-major order cannot"):
        find_policy("l2l")(offloaded(), machine, Settings())
    slower = chain_workload(6, 1024, tide_bytes=MIB, checkpointing=True, forward_s=1.0)
    chosen = choose([offloaded(), slower], machine, Settings(), policy="l2l")
    assert chosen.workload.checkpointing and len(chosen.tried) == 1
    assert "1 of 2 ways: l2l: workload" in chosen.left_out[-1]
    with pytest.raises(CannotPlan, match="which a layer-major order cannot"):
        choose([offloaded()], machine, Settings(), policy="l2l")


@pytest.mark.parametrize("name", sorted(named(lambda able: able.balance is None and not able.reorders)))
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_policy_moves_them_and_the_checker_agrees(name: str, micro_batches: int, machine: Machine) -> None:
    w = repeat_micro_batch(offloaded(), micro_batches)
    plan = find_policy(name)(w, machine, Settings())
    plan.check()
    moves = [s for s in plan.steps if s.stash is not None]
    assert len(moves) == 4 * micro_batches and sum(s.bytes for s in moves) == 4 * micro_batches * MIB
    assert (STASHES, Place.HOST, 2 * MIB) in plan.buffers
    without = find_policy(name)(repeat_micro_batch(kept(), micro_batches), machine, Settings())
    for way in ("h2d", "d2h"):
        assert play(plan).moved_bytes[way] - without.moved_bytes[way] == 2 * micro_batches * MIB
    assert {stash_key("layers.0"), stash_key("layers.1")} <= set(host_room(plan).where)


@pytest.mark.parametrize("name", ["all_on_gpu", "static_partition", "tide", "optimal"])
def test_the_seconds_worked_out_by_hand(name: str, machine: Machine) -> None:
    """A copy takes 1.5 s. Layer 0 ends at 1 and is gone at 2.5, so moment 2 waits 0.5 s; layer 1 ends at 2 and is gone
    at 4.0, so moment 3 (ready at 3.5) waits 0.5 s. Moment 8 ends at 13: layer 1 is back at 14.5, before its moment 10
    (at 15). Moment 9 ends at 15: layer 0 is back at 16.5, before moment 11 (at 17), which ends at 19."""
    plan = find_policy(name)(offloaded(), machine, EAGER)
    assert play(plan).iteration_s == pytest.approx(19.0, rel=1e-6)
    bound = lower_bound(offloaded(), machine, EAGER, plan.layout)
    assert (bound.seconds, bound.binding) == (pytest.approx(19.0, rel=1e-9), "stashes")
    assert "2 blocks offloaded" in explain(plan, play(plan))


def test_a_link_twice_as_fast_hides_them(machine: Machine) -> None:
    link = replace(machine.link, h2d_bytes_per_s=MIB / 0.75, d2h_bytes_per_s=MIB / 0.75)
    fast = replace(machine, ranks=(replace(machine.ranks[0], link=link),))
    plan = find_policy("tide")(offloaded(), fast, EAGER)
    assert play(plan).iteration_s == pytest.approx(18.0, rel=1e-6)


def test_room_on_the_host_is_asked_for(machine: Machine) -> None:
    """Pinned to the GPU whole the model takes nothing of the host; the stashes take 2 MiB of it."""
    host = replace(machine.host, memory_bytes=MIB)
    short = replace(machine, host=host)
    for name in ("all_on_gpu", "tide", "optimal"):
        find_policy(name)(kept(), short, EAGER)
        with pytest.raises(DoesNotFit, match="host"):
            find_policy(name)(offloaded(), short, EAGER)
    need = memory_need("tide", offloaded(), machine, EAGER)
    assert need.payload_bytes - memory_need("tide", kept(), machine, EAGER).payload_bytes == 2 * MIB


# The checker.


@pytest.fixture
def plan(machine: Machine) -> Plan:
    return find_policy("tide")(offloaded(), machine, EAGER)


def _changed(plan: Plan, step: Step, **fields: object) -> Plan:
    steps = tuple(structs.replace(s, **fields) if s.id == step.id else s for s in plan.steps)
    return replace(plan, steps=steps)


def _of(plan: Plan, kind: Kind, stash: int) -> Step:
    return next(s for s in plan.steps if (s.kind, s.stash) == (kind, stash))


def _moment(plan: Plan, moment: int) -> Step:
    return next(s for s in plan.steps if s.kind is Kind.COMPUTE and s.moment == moment)


def _without(plan: Plan, step: Step, other: Step) -> Plan:
    return _changed(plan, step, after=tuple(ref for ref in step.after if ref != Ref(other.id)))


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (lambda p: _moment(p, 0), lambda p: _of(p, Kind.STASH_OUT, 0), "which makes it"),
        (lambda p: _of(p, Kind.STASH_OUT, 0), lambda p: _moment(p, 2), "no longer counted"),
        (lambda p: _moment(p, 8), lambda p: _of(p, Kind.STASH_IN, 1), "counted again"),
        (lambda p: _of(p, Kind.STASH_IN, 1), lambda p: _moment(p, 10), "which needs it"),
        (lambda p: _of(p, Kind.STASH_IN, 0), lambda p: _moment(p, 11), "which needs it"),
    ],
)
def test_a_dropped_edge_is_caught(
    plan: Plan, first: Callable[[Plan], Step], then: Callable[[Plan], Step], said: str
) -> None:
    plan.check()
    broken = _without(plan, then(plan), first(plan))
    assert broken.steps != plan.steps
    with pytest.raises(PlanError, match=said):
        broken.check()


def test_every_edge_of_a_stash_counts(machine: Machine) -> None:
    """No edge to or from a stash step is there for nothing, in the plan of any policy."""
    for name in ("all_on_gpu", "zero_offload", "patrickstar", "tide"):
        plan = find_policy(name)(repeat_micro_batch(offloaded(), 2), machine, Settings())
        dropped = 0
        steps = {step.id: step for step in plan.steps}
        for step in plan.steps:
            for ref in step.after:
                other = steps[ref.id]
                if step.stash is None and other.stash is None:
                    continue
                dropped += 1
                with pytest.raises(PlanError):
                    _without(plan, step, other).check()
        assert dropped >= 12


def test_other_mistakes_are_caught(plan: Plan) -> None:
    out, back = _of(plan, Kind.STASH_OUT, 0), _of(plan, Kind.STASH_IN, 0)
    for broken, said in (
        (_changed(plan, out, bytes=MIB - 1), r"stash 0 \(of layers.0\) has 1048576 bytes"),
        (_changed(plan, out, moment=1), "it belongs to moment 0"),
        (_changed(plan, out, stash=7), "needs stash=, below 2"),
        (_changed(plan, out, chunk=0), "a stash is not a list of a chunk"),
        (_changed(plan, _moment(plan, 3), stash=0), "only stash_out, stash_in, send, receive steps move one"),
        (replace(plan, buffers=((STASHES, Place.HOST, MIB),)), "the stashes take 2097152"),
        (replace(plan, buffers=()), "has 0 bytes"),
        (
            replace(plan, buffers=((STASHES, Place.HOST, MIB),) * 2),
            "'stashes' on the host a second time",
        ),
        (
            replace(plan, buffers=((STASHES, Place.GPU, 2 * MIB),)),
            "2097152 bytes on the gpu.*it needs one, on the host",
        ),
        (replace(plan, steps=tuple(s for s in plan.steps if s.id != back.id)), "stash_in|is not in the plan"),
        (_changed(plan, back, stash=1, moment=10), "moves a stash that"),
    ):
        with pytest.raises(PlanError, match=said):
            broken.check()


def test_a_room_for_stashes_that_there_are_not(machine: Machine) -> None:
    """Memory that no stash takes would be left out of what the host has to give."""
    plan = find_policy("tide")(kept(), machine, EAGER)
    with pytest.raises(PlanError, match="it needs none: its workload has no stashes"):
        replace(plan, buffers=(*plan.buffers, (STASHES, Place.HOST, MIB))).check()


def test_the_host_has_room_for_the_stashes_of_a_block_that_are_there_at_once() -> None:
    """Two micro-batches one inside the other: the forward of both, then the backward of both. The two stashes of a
    block are there together, so the block has room for two; depth-first, where the first is needed before the second
    is made, it has room for one."""
    w = repeat_micro_batch(offloaded(), 2)
    assert w.stash_room == (("layers.0", MIB), ("layers.1", MIB))
    forward, backward = w.moments[:6], w.moments[6:12]
    second = [replace(m, micro_batch=1) for m in (*forward, *backward)]
    moments = tuple(replace(m, peak_bytes=20 * MIB) for m in (*forward, *second, *backward, w.moments[-1]))
    inside = tuple(replace(s, made=s.made + 6, gone=s.gone + 6, back=s.back + 6, needed=s.needed + 6, micro_batch=1)
                   for s in w.stashes[:2])  # fmt: skip
    around = tuple(replace(s, back=s.back + 12, needed=s.needed + 12) for s in w.stashes[:2])
    flat = tuple(replace(m, start_bytes=0, end_bytes=0) for m in moments)
    both = replace(w, moments=flat, uses=(), stashes=(*around, *inside), order=Order.LAYER_MAJOR)
    assert both.stash_room == (("layers.0", 2 * MIB), ("layers.1", 2 * MIB))
    for s in (repeat_micro_batch(offloaded(), 3)).stashes[:-2]:
        later = [o for o in repeat_micro_batch(offloaded(), 3).stashes if o.block == s.block and o.made > s.made]
        assert all(o.made > s.needed for o in later)


def test_a_plan_for_other_choices_is_refused(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"blocks 0-1 of 6 offloaded, 2-5 kept, not for activations of blocks 0 of 6"):
        plan.check(offload_blocks(kept(), ["layers.0"]))


def test_offload_beside_recompute() -> None:
    """Layers 0 recompute, 1 is offloaded, the rest kept: stashes are those of what keeps."""
    recomputed = replace(chain_workload(6, 1024, tide_bytes=MIB, forward_s=1.0, checkpointing=True), micro_batches=1)
    w = offload_blocks(mix_blocks(recomputed, kept(), [f"layers.{i}" for i in range(1, 6)]), ["layers.1"])
    assert activations_text(w) == "activations of blocks 1 of 6 offloaded, 0 recomputed, 2-5 kept"
    assert [s.bytes for s in w.stashes] == [MIB]
