"""A small story per policy, with its figures worked out by hand.

Four layers of 2**20 parameters, bf16, one chunk each: a working list of 2 MiB, states of 12 MiB. A layer's forward
takes 1 s, its backward 2 s. A working list crosses the link in 2 s either way, CPU and GPU Adam take 1 s a chunk.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind, Place, Queue, Step
from pstar_sim.errors import DoesNotFit
from pstar_sim.planner.explain import tide_gain
from pstar_sim.policy import find_policy
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import MIB
from pstar_sim.workload.workload import Workload

STEP = Settings(update="step", clip=False, chunk_bytes=2 * MIB)
EAGER = replace(STEP, update="eager")
CLIP = replace(EAGER, clip=True)
RISING = [0, 1, 2, 3, 3, 2, 1, 0, 0]  # MiB of non-model data: F0 F1 F2 F3 B3 B2 B1 B0 step


def chain(tide_mib: int | list[int] = 0, *, micro_batches: int = 1, dtype: str = "bf16") -> Workload:
    tide = tide_mib * MIB if isinstance(tide_mib, int) else [n * MIB for n in tide_mib]
    return chain_workload(4, MIB, forward_s=1.0, tide_bytes=tide, micro_batches=micro_batches, dtype=dtype)


def planned(policy: str, workload: Workload, gpu_bytes: int, settings: Settings = STEP, **more: float) -> Plan:
    plan = find_policy(policy)(workload, round_machine(gpu_memory_bytes=gpu_bytes, **more), settings)  # type: ignore[arg-type]
    plan.check()
    return plan


def short_of(policy: str, workload: Workload, where: Machine, settings: Settings = STEP) -> DoesNotFit:
    with pytest.raises(DoesNotFit) as caught:
        find_policy(policy)(workload, where, settings)
    return caught.value


# all_on_gpu


def test_all_on_gpu_needs_14_bytes_a_parameter_and_the_tide() -> None:
    """4 * 14 MiB and 1 MiB of tide; 4 * (1 + 2) s of compute and 4 * 1 s of GPU Adam."""
    plan = planned("all_on_gpu", chain(1), 57 * MIB)
    timeline = play(plan)
    assert timeline.iteration_s == pytest.approx(16.0)
    assert timeline.peak_bytes == {"gpu": 57 * MIB, "host": 0}
    assert plan.moved_bytes == {"h2d": 0, "d2h": 0}
    error = short_of("all_on_gpu", chain(1), round_machine(gpu_memory_bytes=57 * MIB - 1))
    assert (error.place, error.needed_bytes, error.short_bytes) == ("gpu", 57 * MIB, 1)


def test_all_on_gpu_accumulates_in_4_more_bytes() -> None:
    """18 bytes per parameter with several micro-batches."""
    assert short_of("all_on_gpu", chain(micro_batches=2), round_machine(gpu_memory_bytes=1)).needed_bytes == 72 * MIB
    assert play(planned("all_on_gpu", chain(micro_batches=2), 72 * MIB)).iteration_s == pytest.approx(28.0)


# zero_offload


def gradient_peak(plan: Plan) -> int:
    """Most bytes of gradient lists the GPU holds at one time in the simulated iteration."""
    return max(s.bytes for s in play(plan).samples if s.place == "gpu" and s.category == "grad")


def test_zero_offload_holds_all_parameters_and_a_bucket_of_two_chunks() -> None:
    """8 MiB of parameters, 2 * 2 MiB of gradients, 1 MiB of tide. Every gradient leaves, every parameter comes back."""
    plan = planned("zero_offload", chain(1), 13 * MIB)
    assert gradient_peak(plan) == 4 * MIB
    assert plan.moved_bytes == {"h2d": 8 * MIB, "d2h": 8 * MIB}
    assert short_of("zero_offload", chain(1), round_machine(gpu_memory_bytes=13 * MIB - 1)).needed_bytes == 13 * MIB
    assert gradient_peak(planned("zero_offload", chain(1), 100 * MIB)) == 4 * MIB  # room does not change the bucket


def test_zero_offload_updates_behind_the_barrier_and_copies_back_behind_the_update() -> None:
    """Compute ends at 12 s, the last gradient is down at 14 s. Adam of chunk 0 until 15 s, copied back until 17 s; the
    copies of the other three follow without a gap: 23 s. Eager updates are not its way."""
    assert play(planned("zero_offload", chain(), 13 * MIB)).iteration_s == pytest.approx(23.0)
    assert play(planned("zero_offload", chain(), 13 * MIB, EAGER)).iteration_s == pytest.approx(23.0)


def test_zero_offload_waits_for_its_bucket() -> None:
    """Gradients of 2 s leave in 8 s each. B3 ends at 6, its gradient is down at 14; B2 ends at 8 (two in the bucket).
    B1 waits for the first, until 14, and ends at 16; B0 for the second, until 22. The last gradient is down at 38,
    chunk 0 updated at 39, and four copies of 2 s back end at 47."""
    assert play(planned("zero_offload", chain(), 13 * MIB, d2h_bytes_per_s=MIB / 4)).iteration_s == pytest.approx(47.0)


# patrickstar


def test_patrickstar_does_one_thing_at_a_time() -> None:
    """14 MiB: all working lists (8), the fp32 buffer (4) and the reserve (2). The 2 MiB of margin hold no states.
    Nothing is evicted: gradients go down in 2 bytes (8 MiB), parameters come up in 4 (16 MiB): 12 + 8 + 16 + 4 s."""
    plan = planned("patrickstar", chain(), 14 * MIB)
    assert plan.moved_bytes == {"h2d": 16 * MIB, "d2h": 8 * MIB}
    timeline = play(plan)
    assert timeline.iteration_s == pytest.approx(40.0)
    assert timeline.iteration_s == pytest.approx(sum(timeline.busy_s.values()))


def test_patrickstar_evicts_what_is_used_last() -> None:
    """10 MiB: two chunks beside buffer and reserve. Chunks 0 and 1 are there at the cut; fetched are 2, 3, and in
    backward 1 and 0; evicted 0, 1, then 3 and 2 with their gradients. Those of 0 and 1 are sent down for Adam: 6 * 2
    MiB down, 4 * 2 and 2 * 4 MiB up: 12 + 12 + 16 + 4 s."""
    plan = planned("patrickstar", chain(), 10 * MIB)
    assert {r.chunk for r in plan.initial if r.place is Place.GPU} == {0, 1}
    fetched = [s.chunk for s in plan.steps if s.kind is Kind.FETCH and s.bytes == 2 * MIB]
    assert fetched == [2, 3, 1, 0]
    assert plan.moved_bytes == {"h2d": 16 * MIB, "d2h": 12 * MIB}
    assert play(plan).iteration_s == pytest.approx(44.0)


def test_patrickstar_puts_states_into_four_fifths_of_the_margin() -> None:
    """57 MiB with 1 MiB of tide leave 57 - 1 - 4 - 8 = 44 MiB of margin: ceil(44 / 12 * 0.8) - 1 = 2 chunks. The other
    two are updated on the CPU: 12 + 2 (GPU Adam) + 4 (down) + 8 (up) + 2 s."""
    plan = planned("patrickstar", chain(1), 57 * MIB)
    assert plan.modes == ("pin", "pin", "cpu", "cpu")
    assert play(plan).iteration_s == pytest.approx(28.0)


def test_patrickstar_says_what_it_needs() -> None:
    """A chunk of 2 MiB, the reserve (2), the buffer (4) and the tide's peak of 3 MiB."""
    error = short_of("patrickstar", chain(RISING), round_machine(gpu_memory_bytes=11 * MIB - 1))
    assert error.needed_bytes == 11 * MIB
    assert "a reserve of one chunk, 2.097 MB" in error.what
    planned("patrickstar", chain(RISING), 11 * MIB)


# static_partition and tide


@pytest.mark.parametrize(("gpu_mib", "kept"), [(5, 0), (7, 1), (9, 2), (11, 3)])
def test_with_one_micro_batch_tide_and_static_copy_the_same(gpu_mib: int, kept: int) -> None:
    """At the peak (3 MiB, with layer 3 in use: 2 MiB) there is room for (gpu - 5) / 2 of the chunks 0, 1 and 2 that are
    needed again; no low tide makes up for it. 7 uses less the kept ones are fetched."""
    for policy in ("static_partition", "tide"):
        plan = planned(policy, chain(RISING), gpu_mib * MIB, EAGER)
        assert plan.choices["kept_gaps"] == kept, policy
        assert plan.moved_bytes == {"h2d": (7 - kept) * 2 * MIB, "d2h": 8 * MIB}, policy


@pytest.mark.parametrize(("micro_batches", "gpu_mib"), [(2, 10), (2, 12), (4, 10), (4, 12)])
def test_between_micro_batches_low_tide_keeps_more(micro_batches: int, gpu_mib: int) -> None:
    """6 fetches a micro-batch and one more without keeping any (its last and first layer stay from one half to the
    next); every gap kept saves one."""
    plans = {}
    for policy in ("static_partition", "tide"):
        plans[policy] = plan = planned(policy, chain(RISING, micro_batches=micro_batches), gpu_mib * MIB, EAGER)
        kept = plan.choices["kept_gaps"]
        assert isinstance(kept, int)
        assert plan.moved_bytes["h2d"] == (6 * micro_batches + 1 - kept) * 2 * MIB
        assert plan.moved_bytes["d2h"] == 4 * micro_batches * 2 * MIB
    assert plans["tide"].moved_bytes["h2d"] < plans["static_partition"].moved_bytes["h2d"]
    assert play(plans["tide"]).iteration_s < play(plans["static_partition"]).iteration_s


def test_tide_pins_more_and_copies_more_where_that_is_faster() -> None:
    """Two micro-batches take 24 s. With room for all working lists, chunk 0 is updated between its last use and the
    next: 2 s down, 1 s of Adam, which adds the last gradient in 10/28 s, 2 s up, 29.357 s in all. Pinned, it takes 18
    MiB (list, states, sum), which tide has, and chunk 1 has the longest window: it ends 3 s of compute later, and 1 s
    of it is the Adam of chunk 0. The working lists of two chunks have no room then and come up once more."""
    w = chain(RISING, micro_batches=2)
    static, tide = (planned(policy, w, 28 * MIB, EAGER) for policy in ("static_partition", "tide"))
    assert [play(plan).iteration_s for plan in (static, tide)] == pytest.approx([29 + 10 / 28, 27 + 10 / 28])
    assert (static.modes.count("pin"), tide.modes.count("pin")) == (0, 1)
    assert (static.moved_bytes["h2d"], tide.moved_bytes["h2d"]) == (8 * MIB, 12 * MIB)
    assert tide_gain(tide) == (
        "time, not bytes: 12.58 MB to the GPU per iteration, against 8.389 MB with a constant capacity. The room of "
        "low tide holds pinned states (pinned chunks: 1 instead of 0), which leaves less for parameters; tide takes "
        "27.357 s per iteration instead of 29.357 s"
    )


def test_the_first_chunk_is_updated_between_its_last_and_its_next_use() -> None:
    """With room for all working lists but for nobody's states only this binds: F0 to B0 (12 s), the gradient down (2
    s), Adam (1 s), the parameters up (2 s): 17 s. Pinned states of two chunks take their windows away, for 2 s of GPU
    Adam."""
    assert play(planned("tide", chain(RISING), 12 * MIB, EAGER)).iteration_s == pytest.approx(17.0)
    roomy = planned("tide", chain(1), 57 * MIB)
    assert roomy.modes == ("pin", "pin", "cpu", "cpu")
    assert play(roomy).iteration_s == pytest.approx(14.0)


@pytest.mark.parametrize("policy", ["static_partition", "tide"])
def test_they_fit_where_one_moment_fits(policy: str) -> None:
    """The peak of 3 MiB and a chunk of 2 MiB; on the host 14 bytes per parameter."""
    planned(policy, chain(RISING), 5 * MIB)
    assert short_of(policy, chain(RISING), round_machine(gpu_memory_bytes=5 * MIB - 1)).needed_bytes == 5 * MIB
    planned(policy, chain(RISING), 5 * MIB, host_memory_bytes=56 * MIB)
    error = short_of(policy, chain(RISING), round_machine(gpu_memory_bytes=5 * MIB, host_memory_bytes=56 * MIB - 1))
    assert (error.place, error.needed_bytes) == ("host", 56 * MIB)


def test_only_tide_follows_the_tide() -> None:
    """Non-model data peaks while layer 3 is in use; a huge head (layer 0 here: 4 layers in one chunk) is used
    elsewhere."""
    w = chain_workload(2, MIB, tensors_per_layer=1, tide_bytes=[0, 6 * MIB, 6 * MIB, 0, 0], forward_s=1.0)
    big = replace(w.tensors[0], shape=(4 * MIB,), bytes=8 * MIB)
    w = replace(w, tensors=(big, w.tensors[1]))
    planned("tide", w, 8 * MIB, EAGER)  # 8 MiB at no tide; 6 + 2 MiB at the peak
    assert short_of("static_partition", w, round_machine(gpu_memory_bytes=8 * MIB), EAGER).needed_bytes == 14 * MIB


# The barrier.


def ancestors(plan: Plan, step: Step) -> set[int]:
    """Steps of this iteration that have to end before `step` may start."""
    before: dict[int, list[int]] = {}
    latest: dict[Queue, int] = {}
    for s in plan.steps:
        before[s.id] = [r.id for r in s.after if not r.back] + ([latest[s.queue]] if s.queue in latest else [])
        latest[s.queue] = s.id
    found: set[int] = set()
    todo = list(before[step.id])
    while todo:
        i = todo.pop()
        if i not in found:
            found.add(i)
            todo += before[i]
    return found


def behind_the_step(plan: Plan) -> list[bool]:
    """For each Adam step, on either side: does it wait for the step moment?"""
    end = next(s.id for s in plan.steps if s.kind is Kind.COMPUTE and s.moment == len(plan.workload.moments) - 1)
    return [end in ancestors(plan, s) for s in plan.steps if s.kind in (Kind.CPU_UPDATE, Kind.GPU_UPDATE)]


@pytest.mark.parametrize("policy", ["all_on_gpu", "zero_offload", "static_partition", "patrickstar", "tide"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("settings", "dtype"), [(STEP, "bf16"), (CLIP, "bf16"), (EAGER, "fp16")])
def test_a_barrier_holds_every_update_back(policy: str, micro_batches: int, settings: Settings, dtype: str) -> None:
    plan = planned(policy, chain(1, micro_batches=micro_batches, dtype=dtype), 80 * MIB, settings)
    assert behind_the_step(plan) == [True] * 4


@pytest.mark.parametrize("policy", ["all_on_gpu", "static_partition", "tide"])
def test_eager_updates_do_not_wait(policy: str) -> None:
    """On the GPU, behind the gradient; with 12 MiB all on the CPU, behind the write-back."""
    assert behind_the_step(planned(policy, chain(), 80 * MIB, EAGER)) == [False] * 4
    if policy != "all_on_gpu":
        plan = planned(policy, chain(), 12 * MIB, EAGER)
        assert plan.modes == ("cpu",) * 4
        assert behind_the_step(plan) == [False] * 4


def test_with_clipping_all_gradients_are_added_before_the_first_update() -> None:
    for policy in ("zero_offload", "static_partition", "patrickstar", "tide"):
        plan = planned(policy, chain(micro_batches=2), 16 * MIB, CLIP)
        kinds = [s.kind for s in plan.steps if s.queue is Queue.ADAM]
        assert kinds == [Kind.CPU_ADD] * 8 + [Kind.CPU_UPDATE] * 4, policy
