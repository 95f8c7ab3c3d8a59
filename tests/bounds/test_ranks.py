"""The bound of several ranks: figures worked out by hand, and no policy ever under it."""

from dataclasses import replace
from functools import partial
from random import Random

import hypothesis
import pytest
from drawn import TIME_TO_SHRINK, Drawn, chances, jobs, planned
from hypothesis import given

from pstar_sim.bounds.bound_facts import BoundFacts
from pstar_sim.bounds.bounds import lower_bound, relative_to
from pstar_sim.bounds.fluid import fluid_bound
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import BY_COLLECTIVES, Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import cost_of
from pstar_sim.policy import find_policy
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import MIB
from pstar_sim.workload.presets import preset

EAGER, CLIP = Settings(update="eager", clip=False), Settings(update="step", clip=True)
pytestmark = TIME_TO_SHRINK

two = partial(round_machine, ranks=2, gpu_memory_bytes=2**40, host_memory_bytes=2**40, adam_params_per_s=1e4)
"""Two GPUs with room for everything, and a CPU that is too slow for any Adam."""


@pytest.mark.parametrize(
    ("settings", "peer_s", "slower", "seconds", "binding"),
    [
        (EAGER, 0.1, 1.0, 10.5, "compute"),
        (EAGER, 1, 1.0, 11.5, "net"),
        (CLIP, 1, 1.0, 11.5, "barrier"),
        (EAGER, 0.1, 5.0, 10.98, "net"),
    ],
)
def test_three_layers_that_fit(settings: Settings, peer_s: float, slower: float, seconds: float, binding: str) -> None:
    """3 layers of 2 MiB: moments of 3 * 1 + 3 * 2 = 9 s, and Adam of the slices on the GPU, 3 * 0.5 s: 10.5 s. With
    collectives of 1 s the first layer's gradient, final after 9 s, is summed, updated and gathered before the next
    iteration: 9 + 1 + 0.5 + 1 = 11.5 s. With clipping no update comes before 10 s: 10 + 0.5 + 1 and 10 + 3 * 0.5. If
    compute takes five times as long beside collectives, it loses 0.8 of the seconds of these six: 10.5 + 0.8 * 0.6."""
    w = chain_workload(3, MIB, forward_s=1.0)
    m = replace(two(peer_bytes_per_s=MIB / peer_s), slowdowns={BY_COLLECTIVES: slower})
    layout = build_layout(w, ranks=2)
    for bound in (lower_bound(w, m, settings, layout), lower_bound(w, m, settings, layout, stream=False)):
        assert (bound.seconds, bound.binding) == (pytest.approx(seconds, rel=1e-6), binding)
        assert bound.terms["net"] >= 6 * peer_s * (1 - 1e-9)
    assert "sliced over 2 GPUs" in relative_to(w, m, settings, layout)


def test_what_compute_loses_before_a_barrier_adds_up_with_copies_behind_it() -> None:
    """As above, with 8 MiB per GPU: the 18 MiB of states come and go in 3 s per 9 MiB. Sums of 3 s, of which compute
    loses 0.8, come before the barrier, and beside own slices of three gradients 5 MiB of states at most."""
    w = chain_workload(3, MIB, forward_s=1.0)
    m = two(peer_bytes_per_s=float(MIB), gpu_memory_bytes=8 * MIB, adam_params_per_s=1.0, h2d_bytes_per_s=3 * MIB)
    m = replace(m, slowdowns={BY_COLLECTIVES: 5.0})
    job = (w, m, CLIP, build_layout(w, ranks=2))
    fluid = fluid_bound(*job)
    assert 9 + 0.8 * 3 + (18 - 5) / 3 <= fluid.seconds <= play(find_policy("optimal")(w, m, CLIP)).iteration_s
    assert lower_bound(*job).seconds == pytest.approx(9 + 1.5 + 0.8 * 6)


def test_whole_chunks_on_each_rank() -> None:
    """Plain data parallelism: the last gradient is summed and gathered in 2 s, and the update takes 1 s: 12 s."""
    w = chain_workload(3, MIB, forward_s=1.0)
    m = two(peer_bytes_per_s=float(MIB))
    plan = find_policy("all_on_gpu")(w, m, EAGER)
    assert lower_bound(w, m, EAGER, plan.layout).seconds == pytest.approx(12.0)
    assert play(plan).iteration_s >= 12.0
    assert "whole on each of 2 GPUs" in relative_to(w, m, EAGER, plan.layout)


@pytest.mark.parametrize(("memory", "sums"), [(2**40, 6), (6 * MIB, 10)])
def test_gradients_are_summed_once_if_whole_sums_have_room(memory: int, sums: int) -> None:
    """6 layers of 2 MiB that are computed in no time: 6 gathers of 1 s. Two micro-batches are summed over the ranks
    together if the other rank's 2 MiB of a layer's sum have room between them, else one by one. Beside the 2 MiB of a
    layer that is read, 4 MiB are room for two."""
    w = chain_workload(6, MIB, forward_s=1e-6, micro_batches=2)
    m = two(peer_bytes_per_s=float(MIB), gpu_memory_bytes=memory)
    facts = BoundFacts(w, m, layout := build_layout(w, ranks=2), cost_of(w, m, layout))
    own, others = facts.read_from
    assert own.tolist() == others.tolist() and own[0] > own[-1] == 0
    assert facts.net.updates_s == pytest.approx(6.0 + sums, rel=1e-3)


@pytest.mark.parametrize(("memory", "sums"), [(2**40, 6), (58 * MIB, 10)])
def test_whole_sums_have_the_room_that_pinned_states_leave(memory: int, sums: int) -> None:
    """As above, with a link and a CPU that are too slow for anything: the states of 6 slices take 36 MiB, their first
    gradients 6, and all layers, which stay for the backward, 12. The other 4 MiB are room for two layers' sums."""
    w = chain_workload(6, MIB, forward_s=1e-6, micro_batches=2)
    m = two(peer_bytes_per_s=float(MIB), gpu_memory_bytes=memory, h2d_bytes_per_s=1e3, d2h_bytes_per_s=1e3)
    assert lower_bound(w, m, EAGER, build_layout(w, ranks=2)).terms["net"] == pytest.approx(6.0 + sums, rel=1e-2)


@pytest.mark.parametrize("micro_batches", [4, 16])
def test_ranks_that_slice_states_alone_are_not_below_it(micro_batches: int) -> None:
    w = preset("tiny-gpt2", batch=1, seq=64, micro_batches=micro_batches)
    m = load_machine("rtx4090x8")
    plan = find_policy("all_on_gpu:shard=states")(w, m, CLIP)
    assert lower_bound(w, m, CLIP, plan.layout).seconds <= play(plan).iteration_s


def test_what_a_turn_cannot_keep_is_copied_or_gathered_again() -> None:
    """6 layers of 2 MiB and room for 8 MiB: 4 MiB come again behind the turn. The others' slices, 1 MiB of each layer,
    come again in 1 s each: 12 + 4 s of collectives and 6 s of copies of 1 s."""
    w = chain_workload(6, MIB, forward_s=1e-6)
    m = two(gpu_memory_bytes=8 * MIB, peer_bytes_per_s=float(MIB), adam_params_per_s=1e15)
    bound = lower_bound(w, m, EAGER, build_layout(w, ranks=2))
    assert bound.terms["net"] + bound.terms["h2d"] == pytest.approx(12 + 4 + 6, rel=1e-3)


def _with(machine: Machine, *slower: float) -> Machine:
    """The machine with GPUs that are slower by these factors."""
    ranks = [
        replace(r, gpu=replace(r.gpu, flops_per_s={d: rate / by for d, rate in r.gpu.flops_per_s.items()}))
        for r, by in zip(machine.ranks, slower, strict=True)
    ]
    return replace(machine, ranks=tuple(ranks))


def test_the_slowest_rank_decides() -> None:
    w = chain_workload(3, MIB, flops=10**12)
    hardly = chain_workload(3, MIB, flops=10**10)
    m, layout = two(peer_bytes_per_s=float(MIB)), build_layout(w, ranks=2)
    mixed = _with(m, 1.0, 3.0)
    alone = [lower_bound(w, _with(m, by, by), EAGER, layout).seconds for by in (1.0, 3.0)]
    assert alone[0] < alone[1] == lower_bound(w, mixed, EAGER, layout).seconds
    # the slow rank has next to nothing to do
    assert lower_bound(w, mixed, EAGER, layout, ranked=(w, hardly)).seconds == pytest.approx(alone[0], rel=0.01)


def test_no_plan_is_faster(whole: bool) -> None:
    """Equal ranks and ranks that differ, on switches, with and without a peer link, on one node and two; compute may be
    slower beside collectives."""
    played = 0
    examples = 8 if whole else 4

    @hypothesis.settings(max_examples=examples)
    @given(jobs(ranks=(2, 3, 4), layers=2), chances())
    def holds(job: Drawn, chance: Random) -> None:
        nonlocal played
        if chance.random() < 0.4:
            job = job._replace(machine=_with(job.machine, *(chance.choice((1.0, 2.0)) for _ in job.machine.ranks)))
        slower = {BY_COLLECTIVES: chance.choice((1.0, 5.0))}
        job = job._replace(machine=replace(job.machine, slowdowns=slower))
        whole = ("all_on_gpu", "all_on_gpu:shard=states")
        for policy in ("tide:streams=on", *whole, "zero_offload", "zero3_offload", "zero3_resident"):
            plan = planned(find_policy(policy), job)
            if plan is None:
                continue
            own = (plan.workload, plan.machine, plan.settings, plan.layout)
            bounds = [lower_bound(*own), fluid_bound(*own)]
            if "stream" not in plan.modes:
                bounds.append(lower_bound(*own, stream=False))
            seconds = play(plan).iteration_s
            played += 1
            for bound in bounds:
                assert seconds >= bound.seconds * (1 - 1e-9), (policy, bound)
                assert not bound.notes

    holds()
    assert played >= examples
