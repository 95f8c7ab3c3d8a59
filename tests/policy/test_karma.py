"""karma: what it keeps, swaps and recomputes, and where parameters and updates are.

Six layers of 2 MiB (MIB bf16 parameters); a copy of one takes 2 s, Adam 1 s, a forward pass 10 s.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind, Queue
from pstar_sim.errors import DoesNotFit, TraceError
from pstar_sim.planner.ablate import ladder
from pstar_sim.planner.variants import choose
from pstar_sim.planner.ways import candidates
from pstar_sim.policy.systems.karma import karma, ways
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import MIB
from pstar_sim.workload.mixing import block_names, mix_blocks, offload_blocks
from pstar_sim.workload.workload import UseKind, Workload, repeat_micro_batch, single_micro_batch

LAYERS = 6
CLIPPED, FREE = Settings(chunk_bytes=2 * MIB), Settings(update="eager", clip=False, chunk_bytes=2 * MIB)
SAVED, BOUNDARY = 10, 1  # MiB of a layer's activations kept, and recomputed


def variant(*, recomputed: bool, micro_batches: int = 1, layers: int = LAYERS) -> Workload:
    forward = [(BOUNDARY if recomputed else SAVED) * (i + 1) for i in range(layers)]
    backward = [BOUNDARY * (i + 1) + SAVED for i in range(layers) for _ in range(2)] if recomputed else forward
    return chain_workload(
        layers,
        MIB,
        tide_bytes=[mib * MIB for mib in (*forward, *reversed(backward), 1)],
        checkpointing=recomputed,
        micro_batches=micro_batches,
        forward_s=10.0,
    )


def made(gpu_mib: int, *, layers: int = LAYERS) -> dict[str, str]:
    """Way, a letter per layer -> words of where parameters and states are."""
    recomputed, kept = (variant(recomputed=one, layers=layers) for one in (True, False))
    machine = round_machine(gpu_memory_bytes=gpu_mib * MIB)
    found = {}
    for way in ways(recomputed, kept, machine, CLIPPED):
        plan = karma(way, machine, CLIPPED)
        plan.check()
        found[letters(way)] = str(plan.choices["capacity"])
    return found


def letters(w: Workload) -> str:
    alike = "recompute" if w.checkpointing else "keep"
    return "".join(dict(w.activations).get(block, alike)[0] for block in block_names(w))


def test_only_what_is_beyond_memory_leaves() -> None:
    """Kept activations take 60 MiB at the peak, parameters 12, all model data 84; a swapped layer leaves two stashes
    of 10 MiB at a time. Where states fit beside recomputed activations, that is a way too."""
    states, parameters = "parameters and states stay on the GPU", "parameters stay until their last gradient"
    parameters += ", where there is room"
    assert made(144) == {"kkkkkk": states}
    assert made(100) == {"rrrrrk": states, "kkkkkk": parameters}
    assert made(72) == {"kkkkkk": parameters}
    assert made(64) == {"rkkkkk": parameters, "kokkkk": parameters}
    assert made(54) == dict.fromkeys(("rrkkkk", "rokkkk", "kookkk"), parameters)
    assert made(44) == dict.fromkeys(("rrrrkk", "rrrork", "rrokkk", "rookkk"), parameters)


def test_swapped_and_recomputed_blocks_alternate() -> None:
    """From none to all of those beyond memory, which are as few as fit."""
    spread = ["rrrrrrkkkkkk", "rrrrorkkkkkk", "rrrorrkkkkkk", "rrororkkkkkk", "rroorokkkkkk", "roooookkkkkk"]
    assert list(made(90, layers=12)) == [*spread, "kooooookkkkk"]


@pytest.mark.parametrize(
    ("micro_batches", "ranks", "settings"), list(itertools.product((1, 3), (1, 2), (CLIPPED, FREE)))
)
def test_plans_are_proved_whatever_the_job(micro_batches: int, ranks: int, settings: Settings) -> None:
    """One layer swaps, one recomputes. The host updates, and each gradient is summed and leaves behind its block."""
    kept, recomputed = variant(recomputed=False), variant(recomputed=True)
    mixed = mix_blocks(recomputed, kept, [f"layers.{i}" for i in (1, 2, 3, 4, 5)])
    w = repeat_micro_batch(offload_blocks(mixed, ["layers.2"]), micro_batches)
    machine = round_machine(gpu_memory_bytes=90 * MIB, ranks=ranks, peer_bytes_per_s=MIB if ranks > 1 else None)
    plan = karma(w, machine, settings)
    plan.check(w, machine)
    timeline = play(plan)
    assert timeline.peak_bytes["gpu"] <= 90 * MIB
    stashes = [s for s in plan.steps if s.kind is Kind.STASH_OUT]
    assert [s.bytes for s in stashes] == [w.stashes[0].bytes] * micro_batches
    assert counted(plan, Kind.CPU_UPDATE) == LAYERS and counted(plan, Kind.GPU_UPDATE) == 0
    assert counted(plan, Kind.REDUCE_SCATTER) == (LAYERS * micro_batches if ranks > 1 else 0)
    order = [s.chunk for s in plan.steps if s.kind is Kind.CPU_UPDATE]
    assert order == sorted(order, reverse=True)  # as gradients arrive


def counted(plan: Plan, kind: Kind) -> int:
    return sum(step.kind is kind for step in plan.steps)


def test_gradients_leave_during_the_backward_pass() -> None:
    machine = round_machine(gpu_memory_bytes=80 * MIB)
    timeline = play(karma(variant(recomputed=False), machine, FREE))
    ends = {s.chunk: s.end_s for s in timeline.spans if s.queue is Queue.D2H and s.kind is Kind.WRITEBACK}
    last = max(s.end_s for s in timeline.spans if s.queue is Queue.COMPUTE)
    assert sum(end < last for end in ends.values()) >= LAYERS - 1


def test_parameters_are_swapped_by_blocks_where_they_do_not_fit() -> None:
    """Recomputed, the tide's peak is 16 MiB; 12 MiB of parameters do not fit beside it in 26. The last layers stay."""
    w = variant(recomputed=True)
    plan = karma(w, round_machine(gpu_memory_bytes=26 * MIB), CLIPPED)
    plan.check()
    fetches = [s.chunk for s in plan.steps if s.kind is Kind.FETCH]
    assert LAYERS < len(fetches) < 2 * LAYERS
    assert fetches.count(0) == 2 and fetches.count(LAYERS - 1) == 1
    with pytest.raises(DoesNotFit) as short:
        karma(w, round_machine(gpu_memory_bytes=17 * MIB), CLIPPED)
    assert (short.value.policy, short.value.place) == ("karma", "gpu")


def test_frozen_layers_are_not_copied_where_all_of_the_model_fits() -> None:
    w = variant(recomputed=True)
    frozen = tuple(replace(t, frozen=n < 4) for n, t in enumerate(w.tensors))
    w = replace(w, tensors=frozen, uses=tuple(use for use in w.uses if use.kind is UseKind.READ or use.tensor >= 4))
    plan = karma(w, round_machine(gpu_memory_bytes=100 * MIB), CLIPPED)
    plan.check()
    assert counted(plan, Kind.GPU_UPDATE) == 2 and not counted(plan, Kind.FETCH)


def test_the_planner_races_the_ways_of_the_policy_alone() -> None:
    recomputed, kept = (variant(recomputed=one) for one in (True, False))
    machine = round_machine(gpu_memory_bytes=44 * MIB)
    every = candidates([recomputed, kept], 1)
    chosen = choose(every, machine, CLIPPED, policy="karma")
    own = list(ways(recomputed, kept, machine, CLIPPED))
    assert chosen.workload.activations in [way.activations for way in own]
    assert len(chosen.tried) == len(own)
    assert chosen.left_out == ("activations chosen block by block in other ways: karma has a rule of its own",)
    assert chosen.iteration_s < play(karma(recomputed, machine, CLIPPED)).iteration_s
    every_kept = choose([w for w in every if not w.checkpointing], machine, CLIPPED, policy="karma")  # no pair: as ever
    assert every_kept.workload.stashes


def test_a_model_that_is_no_stack_of_blocks_has_no_ways() -> None:
    pair = [variant(recomputed=one) for one in (True, False)]
    other = chain_workload(LAYERS - 1, MIB, forward_s=10.0)
    assert not list(ways(pair[0], other, round_machine(), CLIPPED))


def test_micro_batches_that_differ_have_no_ways() -> None:
    recomputed, kept = (variant(recomputed=one, micro_batches=2) for one in (True, False))
    assert list(ways(recomputed, kept, round_machine(), CLIPPED))
    last = kept.moments[-2]
    odd = replace(kept, moments=(*kept.moments[:-2], replace(last, flops=last.flops + 1), kept.moments[-1]))
    with pytest.raises(TraceError, match="2 micro-batches differ"):
        single_micro_batch(odd)
    assert not list(ways(recomputed, odd, round_machine(), CLIPPED))


def test_an_ablation_goes_from_karma_to_optimal() -> None:
    """What a search adds to what karma does: updates by deadline, states that come for one update."""
    specs = [spec for _, spec in ladder("optimal", barrier=False, begin="karma")]
    assert specs == ["karma", "optimal:adam=fifo,streams=off", "optimal:streams=off", "optimal"]
