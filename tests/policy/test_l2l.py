"""l2l, and the layer-major order of the asynchronous policies, on chains of equal layers of 2**20 parameters, a chunk
each: what moves, what the GPU holds, what waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

import pstar_sim as ps
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import model_entry
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind, Place, Queue
from pstar_sim.errors import CannotPlan, NothingFits, PlanError
from pstar_sim.planner.ablate import ablate, ladder, left_out
from pstar_sim.planner.explain import explain
from pstar_sim.policy import find_policy, registry
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.registry import can_follow, named, policies
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import MIB
from pstar_sim.workload.presets import workload_of
from pstar_sim.workload.relay import relay
from pstar_sim.workload.workload import Workload

LAYER = 2**20
EAGER = Settings(update="eager", clip=False)
BY_MICRO_BATCH = "order: micro-batch by micro-batch"
CLIP = Settings(update="step", clip=True)


def chain(
    layers: int = 4, micro_batches: int = 4, dtype: str = "bf16", tide_bytes: int = 64, forward_s: float = 1.0
) -> Workload:
    rise = [tide_bytes * (layer + 1) for layer in range(layers)]
    fall = [level for level in reversed(rise) for _ in range(2)]
    return chain_workload(
        layers, LAYER, tide_bytes=[*rise, *fall, 0], checkpointing=True, micro_batches=micro_batches, dtype=dtype,
        forward_s=forward_s,
    )  # fmt: skip


def planned(workload: Workload, spec: str = "l2l", settings: Settings = EAGER, gpu_mib: int = 64) -> Plan:
    plan = find_policy(spec)(workload, round_machine(gpu_memory_bytes=gpu_mib * MIB), settings)
    plan.check(workload)
    return plan


@pytest.mark.parametrize("settings", [EAGER, CLIP])
def test_the_bytes_do_not_depend_on_the_number_of_micro_batches(settings: Settings) -> None:
    """fp32: 4 MiB per layer, up for forward and again for backward, but for the last layer, whose backward follows its
    forward; the gradient down once."""
    moved = [planned(chain(4, u, "fp32"), settings=settings).moved_bytes for u in (1, 4, 16)]
    assert moved == [{"h2d": 7 * 4 * MIB, "d2h": 4 * 4 * MIB}] * 3


def test_a_16_bit_gradient_goes_down_as_a_sum_in_fp32() -> None:
    """With one micro-batch it overwrites its parameter and goes down in 2 bytes."""
    moved = [planned(chain(4, u)).moved_bytes["d2h"] for u in (1, 2, 8)]
    assert moved == [4 * 2 * MIB, 4 * 4 * MIB, 4 * 4 * MIB]


def test_boundaries_on_the_host_go_down_and_come_up_once() -> None:
    """64 bytes for each of four micro-batches and each layer but the first, which takes the input of the model, and the
    last, which is needed again at once."""
    on_gpu, on_host = planned(chain()), planned(chain(), "l2l:stash=host")
    stashed = sum(s.bytes for s in on_host.workload.stashes)
    assert len(on_host.workload.stashes) == 2 * 4 and stashed == 2 * 4 * 64
    assert on_host.moved_bytes == {way: size + stashed for way, size in on_gpu.moved_bytes.items()}


def test_the_gpu_holds_two_layers_however_deep_the_model_is() -> None:
    """Two layers of 2 MiB, the gradients of two of 4 MiB, and a tide of 7 MiB beside them, four outputs of a layer and
    three of its inputs, two of which are on their way: simulated and proved."""
    peaks = set()
    for layers in (4, 16):
        plan = planned(chain(layers, 4, tide_bytes=MIB), "l2l:stash=host")
        peaks |= {play(plan).peak_bytes["gpu"], plan.check().peak_bytes["gpu"]}
    assert peaks == {19 * MIB}


def test_a_real_model_of_four_times_the_layers_needs_no_more_of_the_gpu() -> None:
    def proved(layers: int) -> int:
        entry = structs.replace(model_entry("llama-2-7b"), layers=layers)
        w = workload_of(entry, batch=2, sequence=128, micro_batches=2, model="llama")
        return find_policy("l2l:stash=host")(w, ps.machine("v100-16"), EAGER).check().peak_bytes["gpu"]

    assert proved(5) == proved(15)


def test_a_layer_is_updated_while_the_gpu_is_at_the_one_before() -> None:
    plan = planned(chain(6, 8))
    timeline = play(plan)
    backward = [s for s in timeline.spans if s.kind is Kind.COMPUTE and plan.workload.moments[s.moment].phase == "BWD"]
    update = [s for s in timeline.spans if s.kind is Kind.CPU_UPDATE and s.chunk == 4]
    assert any(u.start_s < b.end_s and b.start_s < u.end_s for u in update for b in backward)


def test_no_update_begins_before_all_sums_are_on_the_host_where_the_norm_needs_them() -> None:
    plan = planned(chain(), settings=CLIP)
    drops = [s.id for s in plan.steps if s.kind is Kind.DROP and s.queue is Queue.D2H and s.list == "grad32"]
    assert len(drops) == 4
    first = next(s for s in plan.steps if s.kind is Kind.CPU_UPDATE)
    last = max(s.id for s in plan.steps if s.kind is Kind.COMPUTE)
    early = structs.replace(first, after=tuple(ref for ref in first.after if ref.id not in drops[1:]))
    own = next(s.id for s in plan.steps if s.id in drops and s.chunk == first.chunk)
    early = structs.replace(
        early, after=(*early.after, structs.replace(first.after[0], id=own), structs.replace(first.after[0], id=last))
    )
    steps = tuple(early if s is first else s for s in plan.steps)
    with pytest.raises(PlanError, match=r"the gradient norm .* needs all sums of gradients on the host first"):
        replace(plan, steps=steps).check()


def test_the_order_is_an_option_of_the_asynchronous_policies() -> None:
    """The same plan as for the layer-major workload itself, with fewer bytes than depth-first."""
    tide, relayed = planned(chain(), "tide", gpu_mib=40), planned(chain(), "tide:order=relay", gpu_mib=40)
    assert relayed.to_text() == planned(relay(chain()), "tide", gpu_mib=40).to_text()
    small = [planned(chain(8, 4), spec, gpu_mib=12).moved_bytes for spec in ("tide", "tide:order=relay")]
    assert small[1]["h2d"] < small[0]["h2d"] and small[1]["d2h"] < small[0]["d2h"]
    assert tide.workload is not relayed.workload and tide.workload.order.of_loop
    assert planned(chain(), "tide:streams=on,order=relay-host", CLIP, gpu_mib=24).workload.boundaries_on_host


def test_a_plan_is_for_the_workload_it_was_asked_for(tmp_path: Path) -> None:
    plan = planned(chain(), "l2l:stash=host")
    plan.save(tmp_path / "plan.json")
    loaded = ps.load_plan(tmp_path / "plan.json")
    loaded.check(chain())
    assert loaded.to_text() == plan.to_text()
    with pytest.raises(PlanError, match="made for 4 micro-batches per iteration, not 3"):
        loaded.check(chain(micro_batches=3))


def test_the_best_of_a_comparison_can_be_followed_by_a_loop() -> None:
    """l2l is faster here; it is the best only where it is asked for alone, and optimal leaves it out."""
    w, machine = chain(8, 4, forward_s=0.125), round_machine(gpu_memory_bytes=12 * MIB)
    c = ps.compare(w, machine, policies=["tide", "l2l", "optimal"])
    assert c["l2l"].row.iteration_s < c["tide"].row.iteration_s
    assert c.best().plan.workload.order.of_loop and c["optimal"].plan.workload.order.of_loop
    for name in ("l2l", "tide"):  # each by the bound of its own order
        row = c[name].row
        assert row.lower_bound_s is not None and row.iteration_s is not None and row.lower_bound_s <= row.iteration_s
    assert "layer by layer" in str(c["l2l"].row.certificate)
    assert "The fastest is tide" in str(ps.fits(w, machine, policies=["tide", "l2l"]))
    alone = ps.compare(w, machine, policies="l2l")
    assert not alone.best().plan.workload.order.of_loop
    assert named(lambda able: able.reorders) == ("l2l",)


def test_a_streamed_layers_sum_waits_on_the_gpu() -> None:
    """CPU Adam takes 2 s for each layer of 2**20 parameters, so one is streamed. Its sum, complete when the states
    come, crosses the link in neither direction."""
    slow = round_machine(gpu_memory_bytes=20 * MIB, adam_params_per_s=2.0**19)
    for settings in (EAGER, replace(EAGER, update="step")):
        plan = find_policy("tide:streams=on,order=relay")(chain(), slow, settings)
        plan.check()
        (streamed,) = (c for c, mode in enumerate(plan.modes) if mode == "stream")
        copied = {step.chunk for step in plan.steps if step.list == "grad32" and step.queue in (Queue.H2D, Queue.D2H)}
        assert copied == {0, 1, 2, 3} - {streamed}


def test_the_order_of_optimal_is_the_loops() -> None:
    """A loop of the user's own follows depth-first plans only; session.step takes the faster order, and says so."""
    w, machine = chain(8, 4, forward_s=0.125), round_machine(gpu_memory_bytes=12 * MIB)
    own, step = (replace(EAGER, loop=loop) for loop in ("own", "step"))
    first, either = (find_policy("optimal")(w, machine, settings) for settings in (own, step))
    assert first.workload.order.of_loop and "order" not in first.choices
    assert not either.workload.order.of_loop and play(either).iteration_s < play(first).iteration_s
    said = str(either.choices["order"])
    assert said.startswith("layer by layer") and "; micro-batch by micro-batch: " in said
    asked = find_policy("optimal:order=depth-first")(w, machine, step)
    assert asked.workload.order.of_loop and asked.steps == first.steps and "order" not in asked.choices
    assert find_policy("optimal:order=fastest") is find_policy("optimal")
    either.check(w)
    named = ps.compare(w, machine, policies=["tide", "l2l"], settings=step)
    assert named.best().policy == "l2l"
    chosen = ps.compare(w, machine, loop="step", update="eager", clip=False, only_best=True, near=False).best()
    assert not chosen.plan.workload.order.of_loop
    room = round_machine(gpu_memory_bytes=2**40, hbm_bytes_per_s=1e12)  # all stays there: the order gains nothing
    assert find_policy("optimal")(w, room, step).workload.order.of_loop


def test_no_layer_major_plan_is_made_for_a_loop_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is asked for by name. No other policy than l2l can plan here."""
    assert can_follow(EAGER, chain(8, 1), "l2l") and not can_follow(EAGER, chain(8, 4), "tide:order=relay")
    assert can_follow(EAGER, relay(chain(8, 4)), "l2l")
    w, machine = chain(8, 4, forward_s=0.125), round_machine(gpu_memory_bytes=12 * MIB)
    others = [name for name in policies() if name not in ("l2l", "whale")]
    for name in others:
        monkeypatch.setitem(registry._BUILT_IN, name, refusing)
    c = ps.compare(w, machine, settings=EAGER)
    assert c["l2l"].row.fits
    with pytest.raises(NothingFits, match="l2l runs layer by layer, which needs loop='step'"):
        c.best()
    assert ps.compare(w, machine, settings=replace(EAGER, loop="step")).best().policy == "l2l"
    assert [row.policy for row in ps.compare(w, machine, settings=EAGER, only_best=True).rows] == others


def refusing(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    raise CannotPlan("not now")


def test_explain_says_what_the_order_would_gain() -> None:
    machine = round_machine(gpu_memory_bytes=12 * MIB)
    c = ps.compare(chain(8, 4, forward_s=0.125), machine, policies=["tide", "l2l"], settings=EAGER)
    said = " ".join(c["tide"].explain().split())
    assert "what the order gains layer by layer for all 4 micro-batches (tide:order=relay):" in said
    assert "instead of" in said
    assert "runs this order too (--loop step)" in said
    ours = " ".join(c["l2l"].explain().split())
    assert "4 micro-batches, layer by layer" in ours and "what the order gains" not in ours
    plan = planned(chain(8), "l2l:stash=host")
    assert "inputs of 6 blocks offloaded" in explain(plan, play(plan))


def test_an_ablation_from_l2l_begins_in_its_order_and_ends_in_the_other() -> None:
    lines = ladder("optimal", barrier=False, begin="l2l")
    near = "optimal:eviction=lru,prefetch=1,adam=fifo,pins=0,streams=off,order=relay"
    assert [spec for _, spec in lines][:2] == ["l2l", near]
    assert lines[-2:] == [("streams: as many as pay", "optimal:order=relay"), (BY_MICRO_BATCH, "optimal")]
    assert (BY_MICRO_BATCH, "tide") in left_out("tide:order=relay", barrier=True)
    assert ladder("tide:order=relay", barrier=False, begin="l2l")[-1][1] == "tide:order=relay"


def test_an_ablation_for_session_step_ends_in_the_order_that_optimal_takes() -> None:
    w, machine = chain(6, 2, forward_s=0.125), round_machine(gpu_memory_bytes=12 * MIB)
    found = ablate(w, machine, replace(EAGER, loop="step"), begin="l2l")
    assert found.policy == found.lines[-1].policy == "optimal:order=relay"
    assert BY_MICRO_BATCH not in {line.change for line in found.lines} and found.settings.loop == "step"
    assert BY_MICRO_BATCH in {line.change for line in found.without}


def test_refusals() -> None:
    w = relay(chain())
    for spec in ("zero_offload", "patrickstar", "zero3_offload", "zero_infinity"):
        with pytest.raises(CannotPlan, match=f"{spec} takes gradients one after the other"):
            planned(w, spec)
    with pytest.raises(CannotPlan, match="l2l runs on one GPU, not on 2"):
        find_policy("l2l")(chain(), round_machine(ranks=2, peer_bytes_per_s=MIB), EAGER)
    with pytest.raises(CannotPlan, match="tide: a layer-major workload runs on one GPU, not on 2"):
        find_policy("tide:order=relay")(chain(), round_machine(ranks=2, peer_bytes_per_s=MIB), EAGER)
    flat = replace(chain(), moments=tuple(replace(m, module="x") for m in chain().moments))
    with pytest.raises(CannotPlan, match=r"l2l: workload .* is not a stack of blocks"):
        planned(flat)
    with pytest.raises(CannotPlan, match=r"tide: workload .* keeps its activations"):
        planned(chain_workload(4, LAYER), "tide:order=relay-host")


def test_the_host_holds_the_sums_of_gradients() -> None:
    """Per parameter: 2 for itself, 12 of states, 4 of its gradient's sum; nothing waits there to be added."""
    plan = planned(chain())
    assert play(plan).peak_bytes["host"] == 4 * LAYER * 18
    assert {r.list for r in plan.initial if r.place is Place.GPU} == set()
    assert not [s for s in plan.steps if s.kind is Kind.CPU_ADD]
    assert Job("l2l", plan.workload, plan.machine, EAGER).sums_on_gpu
