"""Room without planning agrees with the policies; pinned rounding and start-up; limits worked out by hand."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pstar_sim as ps
from pstar_sim.catalog.loader import load_catalog
from pstar_sim.catalog.machine import Nvme
from pstar_sim.catalog.model_shapes import model_entry
from pstar_sim.catalog.overrides import override
from pstar_sim.core.plan import ANY_PLAN
from pstar_sim.core.slabs import host_payloads, pack_slabs
from pstar_sim.core.step import Place
from pstar_sim.core.workspace import WORKSPACE, bytes_of_all, with_host_budget, workspace_bytes
from pstar_sim.errors import PstarError
from pstar_sim.planner import memory_needs, nearest
from pstar_sim.planner.compare import plan_and_play
from pstar_sim.planner.explain import tide_gain
from pstar_sim.planner.fits import SmallestChange, fits
from pstar_sim.planner.jobs import Job, _written
from pstar_sim.planner.limits import _confirmed, _largest, _loaded_bytes, _others_go_on, deeper, max_batch, max_model
from pstar_sim.planner.memory_needs import Need, least_gpu_bytes, memory_need, need_of_plan, shortage, with_room
from pstar_sim.planner.nearest import Elsewhere
from pstar_sim.planner.trust import untuned
from pstar_sim.policy.registry import built_in, can, find_policy
from pstar_sim.report.capacity_tables import fits_text
from pstar_sim.report.tables import format_size
from pstar_sim.testing import MIB, chain_workload, round_machine
from pstar_sim.units import GB, MB, format_bytes
from pstar_sim.workload.loading import WHOLE, loading_of
from pstar_sim.workload.lora import packed_bytes
from pstar_sim.workload.presets import preset, workload_of
from pstar_sim.workload.workload import repeat_micro_batch, with_optimizer

QUICK = ("static_partition", "tide")

IN_PLACE = loading_of("in-place")


def planned(name: str, w: ps.Workload, m: ps.Machine, s: ps.Settings) -> ps.DoesNotFit | None:
    try:
        plan_and_play(find_policy(name), w, m, s, loading=WHOLE)
    except ps.DoesNotFit as error:
        return error
    return None


def test_whether_a_policy_that_tries_sizes_has_room_takes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the usual size of 436 MB pinned memory rounds 8B's lists up beyond 120 GB; at a smaller size it does not."""

    def nothing(policy: str) -> None:
        raise AssertionError(f"{policy} was asked for a plan")

    w, s = preset("llama-3.1-8b", batch=1, seq=4096), ps.Settings()
    m = ps.machine("rtx4090-128gb", host_memory="120GB")
    monkeypatch.setattr(memory_needs, "find_policy", nothing)
    short = shortage("tide", w, m, s)
    assert short is not None and "by which pinning rounds them up" in short.what
    assert shortage("optimal", w, m, s) is None
    assert shortage("optimal", w, m, replace(s, chunk_bytes=436 * 10**6), others=None) is not None


@pytest.mark.parametrize(
    ("name", "what", "gpu_memory"), [("optimal", "tried", "700MB"), ("stronghold", "windows_tried", "1.8GB")]
)
def test_a_search_for_any_plan_stops_at_the_first_that_has_room(name: str, what: str, gpu_memory: str) -> None:
    w, m = preset("gpt2-medium", batch=2, seq=128), ps.machine("virtual", gpu_memory=gpu_memory, host_memory="16GB")
    any_plan, best = (find_policy(name)(w, m, ps.Settings(effort=effort)) for effort in (ANY_PLAN, 1.0))
    assert 2 * _count(any_plan.choices[what]) <= _count(best.choices[what])


def _count(tried: object) -> int:
    return tried if isinstance(tried, int) else len(tried)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("clip", "micro_batches"),
    [(True, 3), (False, 1), *(pytest.param(*row, marks=pytest.mark.whole) for row in ((True, 1), (False, 3)))],
)
def test_a_quick_answer_is_what_planning_says(micro_batches: int, clip: bool) -> None:
    """On GPUs and hosts around the least that does: the same yes, or the same place and bytes."""
    w = preset("gpt2", batch=1, seq=64, micro_batches=micro_batches)
    s = ps.Settings(clip=clip, update="eager")
    seen = set()
    for name in QUICK:
        for gpu in ("220MB", "320MB", "400MB", "2GB"):
            for host in ("2.6GB", "3.7GB", "3.9GB"):
                m = ps.machine("virtual", gpu_memory=gpu, host_memory=host)
                quick, slow = shortage(name, w, m, s), planned(name, w, m, s)
                assert (quick is None) == (slow is None), (name, gpu, host)
                seen.add(None if quick is None else quick.place)
                if quick is not None and slow is not None:
                    assert quick.place == slow.place
                    if quick.place == "gpu":
                        assert quick.needed_bytes == slow.needed_bytes
    assert seen == {None, "gpu", "host"}


def test_a_quick_answer_is_what_planning_says_on_several_gpus() -> None:
    w = preset("gpt2", batch=1, seq=64)
    seen = set()
    for name in QUICK:
        for gpu in ("220MB", "400MB", "1GB"):
            for host in ("2.3GB", "3.7GB", "3.9GB"):
                changes = {"gpus": 4, "gpu.memory": gpu, "host.memory": host, "peer.bandwidth": "5GB/s"}
                m = ps.machine("virtual", overrides=changes)
                quick, slow = shortage(name, w, m, ps.Settings()), planned(name, w, m, ps.Settings())
                assert (quick is None) == (slow is None), (name, gpu, host)
                if quick is not None and slow is not None:
                    assert (quick.place, quick.needed_bytes) == (slow.place, slow.needed_bytes)
                seen.add(None if quick is None else quick.place)
    assert seen >= {None, "gpu"}


def test_pinned_bytes_are_the_executors_slabs() -> None:
    """tide with nothing pinned: the slabs that the plan of the same pins would be given."""
    w = preset("gpt2", batch=1, seq=64)
    m = ps.machine("virtual", gpu_memory="400MB", host_memory="16GB")
    need = memory_need("tide", w, m, ps.Settings(), loading=IN_PLACE)
    plan = find_policy("tide:pins=0")(w, m, ps.Settings())
    sizes = host_payloads(plan)
    assert need.pins == 0
    assert need.payload_bytes == sum(sizes.values())
    assert need.pinned_bytes == pack_slabs(sizes.items()).total_bytes > need.payload_bytes


def test_start_up_by_hand_and_what_it_can_break() -> None:
    w = preset("gpt2", batch=1, seq=64)
    m = ps.machine("virtual", gpu_memory="1GB")
    for text, size in (("whole", 2), ("whole:fp32", 4), ("each:fp16", 2 * 8), ("each:fp32", 4 * 8), ("in-place", 0)):
        loading = loading_of(text)
        assert str(loading) == text
        assert loading.startup_bytes(w, local_ranks=8) * 8 == 124_439_808 * size
    for text, said in (
        ("lazy", "loading = 'lazy': it must be one of whole, each, in-place"),
        ("each:", "loading's dtype = '': it must be one of fp32, bf16, fp16"),
    ):
        with pytest.raises(PstarError, match=said):
            loading_of(text)
    need = memory_need("zero_offload", w, m, ps.Settings())
    assert need.host_bytes == need.pinned_bytes + 248_879_616
    # a host with room for the slabs but not for the weights beside them
    tight = ps.machine("virtual", gpu_memory="1GB", host_memory=2_000_000_000 + need.pinned_bytes + 1)
    assert shortage("zero_offload", w, tight, ps.Settings(), loading=IN_PLACE) is None
    with pytest.raises(ps.DoesNotFit) as error:
        memory_need("zero_offload", w, tight, ps.Settings())
    assert error.value.short_bytes == 248_879_615
    assert "248.9 MB of weights while they are loaded" in str(error.value)
    assert memory_need("zero_offload", w, tight, ps.Settings(), loading=IN_PLACE).startup_bytes == 0


@pytest.mark.parametrize("policy", ["tide", "l2l", "zero_infinity"])
def test_the_least_gpu_budget_does_and_one_byte_less_does_not(policy: str) -> None:
    """tide names its need when it is refused; the others are refused with what they name first, and then name more."""
    w = preset("gpt2", batch=1, seq=64)
    m = ps.machine("virtual", gpu_memory="4GB")
    least = least_gpu_bytes(lambda where: shortage(policy, w, where, ps.Settings()), m)
    assert shortage(policy, w, ps.machine("virtual", gpu_memory=least), ps.Settings()) is None
    assert shortage(policy, w, ps.machine("virtual", gpu_memory=least - 1), ps.Settings()) is not None


def test_where_the_host_asks_for_pins_the_least_gpu_budget_is_to_the_byte() -> None:
    policy, w = "tide", preset("gpt2", batch=1, seq=64)
    m = ps.machine("virtual", gpu_memory="1.5GB", host_memory="3.6GB")
    (row,) = fits(w, m, policies=[policy], times=False, near=False)
    need = memory_need(policy, w, m, ps.Settings())
    least = row.gpu_needed_bytes
    assert need.pins and least is not None and least < m.gpu_budget_bytes
    assert shortage(policy, w, ps.machine("virtual", gpu_memory=least, host_memory="3.6GB"), ps.Settings()) is None
    less = shortage(policy, w, ps.machine("virtual", gpu_memory=least - 1, host_memory="3.6GB"), ps.Settings())
    assert less is not None and less.place == "host"


def test_optimal_fits_where_streams_or_other_pins_leave_less_on_the_host_than_its_first_chunks() -> None:
    w = preset("gpt2", batch=1, seq=256, optimizer="adafactor")
    m = ps.machine("virtual", gpu_memory="376726576B", host_memory="2949854151B")
    eager = ps.Settings(update="eager", clip=False)
    with pytest.raises(ps.DoesNotFit):
        memory_need("tide", w, m, eager)
    assert memory_need("optimal", w, m, eager).host_bytes <= m.host_budget_bytes
    assert planned("optimal", w, m, eager) is None


def test_least_memories_of_an_answer_are_those_of_each_policy_alone_and_few_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """zero_infinity is refused with what its plan takes, so it is not planned again; optimal asks none again."""
    m, asked = ps.machine("a100-80x8", gpus=2), list[tuple[str, int]]()

    def counted(policy: str, w: ps.Workload, where: ps.Machine, *rest: Any, **more: Any) -> ps.DoesNotFit | None:
        asked.append((policy, where.gpu_budget_bytes))
        assert policy != "optimal" or more["others"] == [policy]
        return shortage(policy, w, where, *rest, **more)

    monkeypatch.setattr(nearest, "shortage", counted)
    answer = fits(preset("gpt2", batch=4, seq=64), m, near=False)
    least = {row.policy: row.gpu_needed_bytes for row in answer.rows if row.fits}
    assert {"optimal", "zero_infinity", "karma", "tide"} < least.keys()
    for policy, needed_bytes in least.items():
        ask = partial(shortage, policy, answer.workload, settings=ps.Settings())
        assert needed_bytes == least_gpu_bytes(ask, m), policy
    assert ("zero_infinity", least["zero_infinity"]) not in asked and ("karma", least["karma"]) in asked


def test_the_least_memory_of_optimal_is_not_that_of_a_policy_that_it_does_not_try() -> None:
    """l2l needs less and is layer-major, which optimal does not search for one micro-batch."""
    m, eager = ps.machine("rtx4090", gpu_memory="3GB"), ps.Settings(update="eager", clip=False)
    answer = fits(preset("gpt2", batch=2, seq=128), m, settings=eager, near=False, policies=["l2l", "optimal"])
    needed = {row.policy: row.gpu_needed_bytes or 0 for row in answer.rows}
    assert needed["l2l"] < needed["optimal"]
    least_bytes = least_gpu_bytes(partial(shortage, "optimal", answer.workload, settings=eager), m)
    assert needed["optimal"] == least_bytes
    just = ps.machine("rtx4090", gpu_memory=needed["optimal"] + m.gpu.context_bytes)
    assert shortage("optimal", answer.workload, just, eager) is None


def test_where_the_host_is_short_chunks_are_pinned() -> None:
    w = preset("gpt2", batch=1, seq=64)
    roomy = memory_need("tide", w, ps.machine("virtual", gpu_memory="1.5GB"), ps.Settings(), loading=IN_PLACE)
    tight = memory_need(
        "tide", w, ps.machine("virtual", gpu_memory="1.5GB", host_memory="3GB"), ps.Settings(), loading=IN_PLACE
    )
    assert roomy.pins == 0
    assert tight.pins is not None and tight.pins > 0
    assert tight.host_bytes <= 10**9 < roomy.host_bytes


def test_payloads_that_pass_through_the_host_take_turns_in_a_pool() -> None:
    """With the disks no payload is on the host for ever: the pool holds the peak that compare names, and its slabs
    little more. With parameters on the host those have their own places beside the pool."""
    w = preset("1B", batch=1, seq=128)
    m = ps.machine("a100-40x8")
    both, states = (f"zero_infinity:params={where},states=nvme,subgroup=10000000" for where in ("nvme", "cpu"))
    for spec in (both, states):
        need = memory_need(spec, w, m, ps.Settings(), loading=IN_PLACE)
        assert need.plan is not None
        sizes = host_payloads(need.plan)
        kept = {(r.chunk, r.list) for r in need.plan.initial if r.place is Place.HOST}
        permanent = sum(sizes[key] for key in kept)
        peak = ps.compare([w] * 8, m, policies=[spec]).rows[0].peak_host_bytes
        assert peak is not None and (permanent == 0) == (spec == both)
        assert need.payload_bytes == sum(sizes.values())
        assert need.workspace_bytes == workspace_bytes(w)
        peak -= need.workspace_bytes
        assert peak <= need.payload_bytes <= need.pinned_bytes < 1.25 * peak


def test_what_a_run_with_disks_takes_beside_payloads_is_in_plan_need_and_refusal() -> None:
    """A piece of 4 MiB, 1 MiB of threads' buffers, another for narrow gradients and one for a rule; 8 kB per moment of
    a micro-batch, and 2 kB for each of 3 steps per moment; 500 B per step in a log of 4,000 steps, of 16 iterations if
    they are fewer, of 2 if they are more."""
    w = preset("gpt2", batch=1, seq=64)
    beside, count = workspace_bytes(w), len(w.moments)
    always = (4 << 20) + (1 << 20) + 2 * (1 << 20)
    assert 2 * 3 * count < 4_000 < 16 * 3 * count
    assert beside == always + (8_000 + 3 * 2_000) * count + 500 * 4_000
    many = 3 * len(repeat_micro_batch(w, 16).moments)
    assert workspace_bytes(repeat_micro_batch(w, 16)) == always + 8_000 * many // 48 + (2_000 + 2 * 500) * many
    assert workspace_bytes(with_optimizer(w, "adafactor")) == beside + 16 * max(t.numel for t in w.tensors)
    m = beside_disks("2.5GB", 10 * GB)
    plan, timeline = plan_and_play(find_policy("tide"), w, m, ps.Settings(), loading=IN_PLACE)
    assert (WORKSPACE, Place.HOST, beside) in plan.buffers
    checked, need = plan.check().peak_bytes["host"], need_of_plan(plan, IN_PLACE)
    assert beside + 100 * MB < timeline.peak_bytes["host"] <= checked <= m.host_budget_bytes == plan.host_budget_bytes
    assert need.workspace_bytes == beside and need.host_bytes <= m.host_budget_bytes
    assert all(phase.host_bytes == need.host_bytes for phase in need.phases(1))
    roomy, _ = plan_and_play(find_policy("tide"), w, beside_disks("5GB", 10 * GB), ps.Settings(), loading=IN_PLACE)
    assert not roomy.buffers and roomy.host_budget_bytes == 3 * GB
    with pytest.raises(ps.DoesNotFit, match=r"that a run with disks takes beside.* but has 20 MB") as refusal:
        plan_and_play(find_policy("tide"), w, beside_disks("2.02GB", 10 * GB), ps.Settings(), loading=IN_PLACE)
    enough = replace(m.host, memory_bytes=m.host.reserved_bytes + refusal.value.needed_bytes)
    assert shortage("tide", w, replace(m, host=enough), ps.Settings(), loading=IN_PLACE) is None


def test_fits_says_yes_where_compare_plans_from_the_disks() -> None:
    """76 billion parameters are 16 x 76e9 / 8 = 152 GB per rank, of which 33.6 GB are on the host at once."""
    spec = "zero_infinity:params=nvme,states=nvme"
    w, m = preset("NV_76B", batch=1, seq=1024), ps.machine("a100-40x8")  # what one rank does
    need = memory_need(spec, w, m, ps.Settings())
    assert 33e9 < need.payload_bytes < 35e9
    assert need.startup_bytes == -(-w.params * 2 // 8)
    assert need.host_bytes < m.host_budget_bytes < 152e9


def test_optimal_falls_back_on_the_others_where_rounding_or_start_up_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its own modes nor its plan have room: the first policy that has, in their order, all_on_gpu left out as
    the GPU is too small for it."""
    w = preset("gpt2", batch=1, seq=64)
    m = ps.machine("virtual", gpu_memory="1GB")
    short = ps.DoesNotFit(policy="optimal", place="host", needed_bytes=2, available_bytes=1, what="rounding")
    asked: list[str] = []

    def refuse(*_: object, **__: object) -> None:
        asked.append("own")
        raise short

    monkeypatch.setattr(memory_needs, "_asynchronous_need", refuse)
    monkeypatch.setattr(memory_needs, "find_policy", lambda name: refuse if name == "optimal" else find_policy(name))
    need = memory_need("optimal", w, m, ps.Settings())
    assert need.policy == "optimal"
    assert need.host_bytes == memory_need("zero_offload", w, m, ps.Settings()).host_bytes
    assert asked == ["own", "own"]
    with pytest.raises(ps.DoesNotFit, match="optimal does not fit: gpu needs"):
        memory_need("optimal", w, ps.machine("virtual", gpu_memory="10MB"), ps.Settings())


def test_no_policy_is_planned_for_a_model_beyond_all_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte more, and others are asked: their plans may lie where optimal's own cannot. Weights are loaded beside."""
    w = preset("GPT2small", batch=1, seq=64)
    model_bytes = 2 * w.weights_bytes + w.states_bytes
    assert model_bytes == 16 * w.trainable_params  # bf16 twice, and three fp32 lists

    def asked_others(spare_bytes: int) -> list[str]:
        m = ps.machine("virtual", gpu_memory="1.5GB", host_memory="2.5GB")
        usable = m.gpu.context_bytes + model_bytes + spare_bytes - m.host_budget_bytes
        m = replace(m, ranks=(replace(m.ranks[0], gpu=replace(m.gpu, usable_bytes=usable, memory_bytes=usable)),))
        assert bytes_of_all(m) == model_bytes + spare_bytes
        others: list[str] = []
        monkeypatch.setattr(memory_needs, "_need_of_any", lambda names, *_: others.extend(names))
        with pytest.raises(ps.DoesNotFit, match="optimal does not fit"):
            memory_need("optimal", w, m, ps.Settings(), fewest=False)
        return others

    assert not asked_others(-1)
    assert asked_others(0)


def beside_disks(host: str | int, disk_bytes: int, *, gpu: str = "1.2GB") -> ps.Machine:
    disks = Nvme(
        name="disks",
        memory_bytes=disk_bytes,
        read_bytes_per_s=3e9,
        write_bytes_per_s=1.5e9,
        latency_s=1e-4,
        measured=False,
        source="a test",
    )
    return replace(ps.machine("virtual", gpu_memory=gpu, host_memory=host), nvme=disks)


@pytest.mark.parametrize("disk_bytes", [pytest.param(400 * MB, marks=pytest.mark.whole), 10 * GB])
def test_with_disks_a_yes_stays_a_yes_as_the_host_grows_and_has_a_plan(disk_bytes: int) -> None:
    """Whatever the room on the disks; what compare plans has the room."""
    w, settings = preset("gpt2", batch=1, seq=64), ps.Settings()
    answers, kept = [], list[int]()
    for host in ("2.1GB", "2.3GB", "2.8GB", "2.9GB", "3.4GB", "3.5GB"):
        m = beside_disks(host, disk_bytes)
        refusal = shortage("tide", w, m, settings)
        answers.append(refusal is None)
        if refusal is not None:
            assert planned("tide", w, m, settings) is not None
            continue
        plan, _ = plan_and_play(find_policy("tide"), w, m, settings, loading=WHOLE)
        assert need_of_plan(plan).host_bytes <= m.host_budget_bytes
        kept.append(plan.check().peak_bytes.get("nvme", 0))
    assert answers == sorted(answers) and {*answers} == {True, False}
    if disk_bytes == 10 * GB:  # of two sizes of the host, the larger leaves less to the disks
        assert kept == sorted(kept, reverse=True) and kept[0] > 1.5 * kept[-2] > kept[-1] == 0


@pytest.mark.parametrize(("policy", "searches"), [("optimal", 2), ("stronghold", 1)])
def test_with_disks_few_of_the_plans_are_searched_for_most_of_the_host(policy: str, searches: int) -> None:
    w, settings, efforts = preset("gpt2", batch=1, seq=64), ps.Settings(effort=0.02), list[float]()

    def plan_with(where: ps.Machine, asked: ps.Settings) -> ps.Plan:
        efforts.append(asked.effort)
        return find_policy(policy)(w, where, asked)

    m = beside_disks("2.8GB", 10 * GB)
    plan = with_room(plan_with, policy, w, m, settings)
    assert efforts.count(settings.effort) <= searches and len(efforts) <= 10
    assert plan.check().peak_bytes["nvme"] > 0 and (plan.settings, plan.machine) == (settings, m)
    assert 0.8 * m.host_budget_bytes <= need_of_plan(plan).host_bytes <= m.host_budget_bytes


def test_a_policy_that_leaves_the_disks_alone_is_asked_for_its_smallest_plan_alone() -> None:
    """With 1.3 GB: as the host is, then with the fewest bytes, which the refusal of one byte names."""
    w, hosts = preset("gpt2", batch=1, seq=64), list[int]()

    def patrickstar(w: ps.Workload, m: ps.Machine, s: ps.Settings) -> ps.Plan:
        hosts.append(m.host_budget_bytes)
        return find_policy("patrickstar")(w, m, s)

    short = shortage(patrickstar, w, beside_disks("3.3GB", 10 * GB), ps.Settings())
    assert short is not None and short.place == "host" and "while they are loaded" in short.what
    whole, least, smallest = hosts
    assert whole == 1300 * MB - workspace_bytes(w) and least == 1 and least < smallest < whole


@pytest.mark.parametrize("policy", ["tide", "stronghold"])
def test_with_disks_the_deepest_model_is_larger_than_gpu_and_host(policy: str) -> None:
    """The disks have room for many more layers: while the weights are loaded, the host is short."""
    answer = max_model(beside_disks("2.8GB", 10 * GB), batch=1, seq=64, like="gpt2", policies=[policy], catalog=False)
    (row,) = answer.rows
    assert row.params is not None and answer.most_params is not None and row.params > answer.most_params
    assert row.short_of == "host"


def test_deeper_models_than_anybody_trains_are_not_asked_about_for_disks() -> None:
    """4 TB of disks have room for the states of 50,000 layers of gpt2's, and the host could load 1,270."""
    m = beside_disks("20GB", 4000 * GB, gpu="16GB")
    answer = max_model(m, batch=1, seq=64, like="gpt2", policies=["tide", "optimal"], catalog=False)
    assert [row.value for row in answer.rows] == [1024, 1024]
    assert answer["tide"].reason == "depths of more than 1,024 layers are not asked about"
    assert repr(answer).count("depths of more than 1,024 layers") == 1
    assert "enough for at most 2.43 B parameters without disks" in " ".join(repr(answer).split())


def test_a_depth_beyond_which_nothing_is_asked_is_never_the_largest_without_a_word() -> None:
    """GPU and host hold 1,364 layers of gpt2's, and the disks many more."""
    m = beside_disks("122GB", 4000 * GB, gpu="16GB")
    answer = max_model(m, batch=1, seq=64, like="gpt2", policies=["tide"], catalog=False)["tide"]
    assert (answer.value, answer.short_of) == (1364, None)
    assert answer.reason == "depths of more than 1,364 layers are not asked about"


@pytest.mark.parametrize(
    ("policies", "layers"),
    [
        (["tide"], 44),
        pytest.param(["optimal"], 45, marks=pytest.mark.whole),
        pytest.param(["tide", "optimal"], 45, marks=pytest.mark.whole),
    ],
)
def test_the_deepest_model_that_nearly_fills_the_disks_is_what_compare_plans(policies: list[str], layers: int) -> None:
    """Whoever else is asked. Optimal's modes at any chunk size would have room for 46 layers, at that which pinning
    rounds up least for 45; the search alone would end at 43."""
    m, settings = beside_disks("3.60GB", 3_364_105_544), ps.Settings(update="eager", clip=False)
    answer = max_model(m, batch=1, seq=64, like="gpt2", policies=policies, settings=settings, catalog=False)
    name = policies[-1]
    assert (answer[name].value, answer[name].short_of) == (layers, "host")
    held, more = (workload_of(deeper("gpt2", n), batch=1, sequence=64, dtype="bf16") for n in (layers, layers + 1))
    assert planned(name, held, m, settings) is None
    assert planned(name, more, m, settings) is not None


@pytest.mark.parametrize(
    ("fitting", "most", "limit"),
    [
        ({*range(44)}, 99, (43, 44)),  # agrees
        ({*range(44), 45}, 99, (45, 46)),  # above a refusal
        ({*range(50)}, 46, (46, None)),  # to the most that is asked about
        ({*range(43)}, 99, (42, 43)),
        ({*range(31)}, 99, (30, 31)),  # strides of 1, 2, 4, 8 go down to 28
        (set[int](), 99, (0, 1)),
    ],
)
def test_a_limit_is_confirmed_by_plans(fitting: set[int], most: int, limit: tuple[int, int | None]) -> None:
    asked = list[int]()

    def refused(n: int) -> ps.DoesNotFit:
        return ps.DoesNotFit(policy="p", place="host", needed_bytes=100 + n, available_bytes=100, what="w")

    def ask(n: int) -> ps.DoesNotFit | None:
        asked.append(n)
        return None if n in fitting else refused(n)

    value, error = _confirmed((43, refused(44)), ask, most)
    assert (
        value,
        None if error is None else error.needed_bytes - 100 if isinstance(error, ps.DoesNotFit) else -1,
    ) == limit
    assert value in asked or not value
    assert len(asked) == len(set(asked)) <= 9


@pytest.mark.parametrize("policy", [name for name in built_in() if not can(name).disks])
def test_a_policy_that_leaves_the_disks_alone_keeps_nothing_there(policy: str) -> None:
    """The disks have room for all of gpt2, which fits GPU and host."""
    w, m = preset("gpt2", batch=1, seq=64), beside_disks("8GB", 10 * GB, gpu="6GB")
    assert find_policy(policy)(w, m, ps.Settings()).nvme_budget_bytes == 0


def test_options_may_keep_lists_on_disks() -> None:
    assert not can("zero_infinity").disks
    assert can("zero_infinity:states=nvme").disks


@pytest.mark.parametrize("loading", ["whole", "each", "each:fp32", "in-place"])
@pytest.mark.parametrize("given", [{}, {"dtype": "fp32"}, {"lora": "r=16", "base": "nf4"}])
@pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b", "gemma-3-1b"])
def test_no_model_is_left_out_that_the_host_could_load(name: str, given: dict[str, str], loading: str) -> None:
    """Embeddings of an output that is tied are loaded once; small parameters of a quantised base stay as they are."""
    entry, job, way = model_entry(name), Job(model=name, batch=8, seq=64, **given), loading_of(loading)
    m = ps.machine("v100-32x8")
    working = job.dtype_on(m)
    least_bytes = entry.params * _loaded_bytes(way, working, given.get("base"), m)
    most_bytes = way.startup_bytes(job.write(entry, 1, working), m.local_ranks)
    assert least_bytes <= most_bytes
    assert given.get("base") or most_bytes == pytest.approx(least_bytes)


def test_of_one_memory_the_gpu_loads_what_it_holds() -> None:
    """The host could load less."""
    m = ps.machine("gb10", gpu_memory="8GB", host_memory="4.5GB")
    m = replace(m, unified=True, host=replace(m.host, memory_bytes=m.host.reserved_bytes + 200 * MB))
    answer = max_model(m, batch=1, seq=64, like="gpt2", policies=["all_on_gpu"], catalog=False)
    params = answer["all_on_gpu"].params
    assert params is not None and 2 * params > m.host_budget_bytes


def test_with_disks_the_need_is_that_of_the_smallest_plan() -> None:
    """With it the job fits, and with a MB less it does not."""
    w, settings = preset("gpt2", batch=1, seq=64), ps.Settings()
    short = shortage("tide", w, beside_disks("2.1GB", 10 * GB), settings)
    assert short is not None and short.place == "host" and short.needed_bytes < 450 * MB
    assert shortage("tide", w, beside_disks(2000 * MB + short.needed_bytes, 10 * GB), settings) is None
    less = shortage("tide", w, beside_disks(1999 * MB + short.needed_bytes, 10 * GB), settings)
    assert less is not None and less.needed_bytes == short.needed_bytes


@pytest.mark.parametrize("policy", ["zero_offload", "tide"])
def test_a_job_that_leaves_the_disks_alone_needs_no_more_of_the_host_with_them(policy: str) -> None:
    """As much as without disks; with a byte less, the host is refused or the disks are used, beside the workspace."""
    w, settings = preset("gpt2", batch=1, seq=64), ps.Settings()
    bare, disks = ps.machine("rtx4090"), beside_disks("5GB", 10 * GB).nvme
    need_bytes = memory_need(policy, w, bare, settings, fewest=False).host_bytes
    enough, less = (with_host_budget(replace(bare, nvme=disks), size) for size in (need_bytes, need_bytes - 1))
    plan, _ = plan_and_play(find_policy(policy), w, enough, settings, loading=WHOLE)
    assert (plan.nvme_budget_bytes, plan.buffers, plan.machine) == (0, (), enough)
    need = memory_need(policy, w, enough, settings, fewest=False)
    assert (need.host_bytes, need.workspace_bytes) == (need_bytes, 0)
    assert need_of_plan(plan).host_bytes <= need_bytes
    short = planned(policy, w, less, settings)
    assert (short is None) == (shortage(policy, w, less, settings) is None)
    assert short is None or short.needed_bytes > less.host_budget_bytes


def test_of_a_host_of_one_byte_beside_disks_the_weights_that_are_loaded_are_named() -> None:
    """The GPU holds all of the job, so one byte is enough for its payloads, and no smaller host can be asked for."""
    w, m = preset("gpt2", batch=1, seq=64), beside_disks("5GB", 10 * GB)
    one = replace(ps.machine("rtx4090"), nvme=m.nvme)
    one = replace(one, host=replace(one.host, memory_bytes=one.host.reserved_bytes + 1))
    refusals = planned("tide", w, one, ps.Settings()), shortage("tide", w, one, ps.Settings())
    for short in refusals:
        assert short is not None and short.place == "host" and short.needed_bytes >= w.weights_bytes
        assert "of weights while they are loaded" in short.what and short.available_bytes == 1


def test_optimal_fits_where_it_has_a_plan_from_the_disks() -> None:
    """Its own modes without disks need more than twice this host."""
    w, settings = preset("gpt2", batch=1, seq=64), ps.Settings(effort=0.02)
    need = memory_need("optimal", w, beside_disks("2.5GB", 10 * GB), settings)
    assert need.plan is not None and need.host_bytes <= 500 * MB
    assert need.plan.check().peak_bytes["nvme"] > 0


def test_disks_that_are_too_small_are_named_with_what_would_do() -> None:
    w = preset("gpt2", batch=1, seq=64)
    (row,) = fits(w, beside_disks("2.5GB", 100 * MB), policies=["tide"], times=False).rows
    assert row.short_of == "nvme" and row.reason is not None and "tide does not fit: nvme needs" in row.reason
    assert "with --set nvme.memory=10GB" in row.changes
    assert shortage("tide", w, beside_disks("2.5GB", 10 * GB), ps.Settings()) is None


def test_whether_small_disks_do_is_what_planning_says() -> None:
    """Refusals of disks count bytes of disks, of which no need of the host follows. The host that they suggest may have
    a plan whose slabs have no room, where that for a smaller host has: payloads almost fill slabs."""
    w, settings = chain_workload(8, 2**20 - 1), ps.Settings(update="eager", clip=False, effort=ANY_PLAN)
    answers = set[bool]()
    for disk_mib, host_mib in itertools.product((4, 16, 24, 32), range(104, 144, 8)):
        m = round_machine(gpu_memory_bytes=16 * MIB, host_memory_bytes=host_mib * MIB, nvme_memory_bytes=disk_mib * MIB)
        refusal = planned("tide", w, m, settings)
        short = shortage("tide", w, m, settings)
        assert (short is None) == (refusal is None), (disk_mib, host_mib, short or refusal)
        answers.add(short is None)
    assert answers == {True, False}


# Limits.


def test_the_largest_that_fits_is_found_by_halves() -> None:
    def ask(n: int) -> ps.DoesNotFit | None:
        return None if n <= 37 else ps.DoesNotFit(policy="p", place="gpu", needed_bytes=n, available_bytes=37, what="n")

    value, error = _largest(ask, 100)
    assert value == 37
    assert error is not None and error.short_bytes == 1
    assert _largest(ask, 20) == (20, None)
    assert _largest(ask, 37) == (37, None)
    assert _largest(ask, 100, first=64)[0] == 37
    assert _largest(ask, 0) == (0, None)


@pytest.mark.parametrize("limit", [0, 1, 37, 99, 100, 612, 999, 1000])
@pytest.mark.parametrize("shape", ["line", "square", "root", "stairs"])
def test_the_largest_that_fits_is_found_along_lines(limit: int, shape: str) -> None:
    """Whatever the bytes, the answer is that of asking every n; where they are a line, few n are asked."""
    asked: list[int] = []

    def needed(n: int) -> int:
        return {"line": 5000 + 40 * n, "square": n * n, "root": int(300 * n**0.5), "stairs": n // 90 * 1000}[shape]

    def ask(n: int) -> ps.DoesNotFit | None:
        asked.append(n)
        room = needed(limit)
        if n <= limit:
            return None
        return ps.DoesNotFit(policy="p", place="gpu", needed_bytes=needed(n), available_bytes=room, what="n")

    value, error = _largest(ask, 1000, first=60)
    assert value == limit
    assert (error is None) == (limit == 1000)
    assert len(asked) == len(set(asked)) <= 24
    if shape == "line":
        assert len(asked) <= 10
    for least in {0, limit // 2, limit}:
        assert _largest(ask, 1000, least=least, known=[70, limit, 900])[0] == limit
    for near in (0, 1, limit - 1, limit, limit + 1, limit + 60, 1000, 2000):
        asked.clear()
        assert _largest(ask, 1000, first=60, near=near)[0] == limit
        assert len(asked) == len(set(asked)) <= 24
        if near == limit and limit:
            assert asked == ([limit, limit + 1] if limit < 1000 else [limit])


def test_a_search_that_begins_near_the_limit_of_another_machine_finds_the_same() -> None:
    """Workloads are written once for both, and the machine that is a little larger is asked about few models."""
    m = ps.machine("v100-32", gpu_memory="4GB", host_memory="12GB")
    larger = override(m, {"gpu.memory": "+10%", "host.memory": "+10%"})
    job = {"batch": 4, "seq": 256, "like": "gpt2", "policies": ["zero_offload", "tide"], "catalog": False}
    now = max_model(m, **job)  # type: ignore[arg-type]
    written = _written.cache_info().misses
    near = {row.policy: row.value for row in now.rows}
    again = max_model(m, **job, near=near)  # type: ignore[arg-type]
    assert again.rows == now.rows
    assert _written.cache_info().misses == written
    there = max_model(larger, **job, near=near)  # type: ignore[arg-type]
    assert there.rows == max_model(larger, **job).rows  # type: ignore[arg-type]
    assert all(row.value > near[row.policy] for row in there.rows)


@pytest.mark.parametrize("host", ["9GB", "15GB", "17GB", "20GB", "22GB", "30GB"])
def test_whether_there_is_room_is_told_without_looking_for_the_fewest_pins(host: str) -> None:
    m = ps.machine("v100-32", gpu_memory="8GB", host_memory=host)
    w = preset("GPT2small", batch=2, seq=128, dtype="fp16")

    def answer(*, fewest: bool) -> tuple[str, int | None]:
        try:
            need = memory_need("tide", w, m, ps.Settings(), fewest=fewest)
        except ps.DoesNotFit as short:
            return str(short), None
        assert need.host_bytes <= m.host_budget_bytes
        return "fits", need.pins

    (said, fewest), (also, some) = answer(fewest=True), answer(fewest=False)
    assert said == also
    assert fewest is None or (some is not None and fewest <= some)


@pytest.mark.parametrize("policy", ["all_on_gpu", pytest.param("zero_offload", marks=pytest.mark.whole), "tide"])
def test_the_deepest_model_has_room_and_the_next_has_none(policy: str) -> None:
    m = ps.machine("virtual", gpu_memory="3GB", host_memory="8GB")
    most = max_model(m, batch=1, seq=64, like="1B", hidden=512, policies=[policy], catalog=False)[policy].value

    def need(n: int) -> None:
        w = workload_of(deeper("1B", n, hidden=512), batch=1, sequence=64, dtype="bf16")
        memory_need(policy, w, m, ps.Settings())

    need(most)
    with pytest.raises(ps.DoesNotFit):
        need(most + 1)


def test_the_deepest_model_by_hand() -> None:
    """all_on_gpu in bf16: 14 bytes per parameter and the tide's peak, which here does not depend on depth: it is that
    of the embedding's gradient, when all checkpoints are gone.

    Hidden size 64: a layer has 12 x 64 x 64 + 13 x 64 = 49,984 parameters, the rest (50257 + 1024) x 64 + 2 x 64 =
    3,282,112. With chunks of 64 bytes each tensor has a chunk of its own size: nothing is padded. So a GPU for seven
    layers and half of one holds seven, and the eighth is short by the other half.
    """
    one = workload_of(deeper("1B", 1, hidden=64), batch=1, sequence=16)
    assert one.params == 3_282_112 + 49_984
    budget = 14 * (3_282_112 + 7 * 49_984) + one.peak_non_model_bytes + 7 * 49_984
    m = ps.machine("virtual", gpu_memory=budget, host_memory="2.01GB")
    answer = max_model(
        m,
        batch=1,
        seq=16,
        like="1B",
        hidden=64,
        policies=["all_on_gpu"],
        settings=ps.Settings(chunk_bytes=64),
        dtype="bf16",
        catalog=False,
    )
    row = answer["all_on_gpu"]
    assert (row.value, row.params) == (7, 3_282_112 + 7 * 49_984)
    assert (row.short_of, row.short_bytes) == ("gpu", 7 * 49_984)


def test_the_largest_batch_by_hand() -> None:
    """From some batch on each sequence adds the same bytes to the tide: the room over them, rounded down."""
    some, more = (preset("tiny-gpt2", batch=b, seq=32) for b in (100, 101))
    each = more.peak_non_model_bytes - some.peak_non_model_bytes
    m = ps.machine("virtual", gpu_memory="30MB")
    short = shortage("all_on_gpu", some, ps.machine("virtual", gpu_memory="1MB"), ps.Settings())
    assert short is not None
    answer = max_batch(m, lambda b: preset("tiny-gpt2", batch=b, seq=32), policies=["all_on_gpu"])
    assert answer["all_on_gpu"].value == 100 + (30_000_000 - short.needed_bytes) // each
    assert answer["all_on_gpu"].short_of == "gpu"


def test_tide_trains_larger_models_than_zero_offload_and_the_catalog_is_searched() -> None:
    m = ps.machine("v100-32", host_memory="128GB")
    answer = max_model(m, batch=4, seq=1024, policies=["zero_offload", "tide"])
    small, large = answer["zero_offload"], answer["tide"]
    assert small.params is not None and large.params is not None and large.params > small.params
    assert large.catalog_params is not None and large.catalog_params <= large.params * 1.05
    assert [row["policy"] for row in answer.to_json()] == ["zero_offload", "tide"]
    assert "tide" in repr(answer)
    frame = answer.to_frame()
    assert list(frame["value"]) == [small.value, large.value]


def test_models_that_presets_cannot_write_under_autocast_are_left_out() -> None:
    """Of all the catalog, even that with experts; 16 bytes of each of 1.236 B parameters of Llama 3.2 1B have room."""
    m = ps.machine("rtx4090-128gb")
    answer = max_model(m, batch=4, seq=256, like="gpt2", policies=["all_on_gpu"], autocast="bf16")
    assert answer["all_on_gpu"].catalog_model == "llama-3.2-1b"


def test_models_without_the_modules_of_an_adapter_are_left_out() -> None:
    """Of larger models that have room, those of GPT have no q_proj, and the others one table for head and embedding."""
    m = ps.machine("rtx4090", gpu_memory="10GB", host_memory="16GB")
    given = {"batch": 1, "seq": 64, "like": "llama-2-7b", "policies": ["all_on_gpu"]}
    answer = max_model(m, **given, lora="r=8,targets=q_proj,save=lm_head")  # type: ignore[arg-type]
    assert answer["all_on_gpu"].catalog_model == "qwen-1.8b"


def test_shapes_that_cannot_be_are_refused() -> None:
    assert deeper("12B", 3, hidden=1024).heads == 4  # as wide as before: 256
    assert deeper("llama-2-70b", 2, hidden=4096).kv_heads == 4  # groups of 8
    with pytest.raises(PstarError, match="hidden = 100 is not a multiple of heads = 3"):
        deeper("12B", 3, hidden=100, heads=3)
    with pytest.raises(PstarError, match="needs at least 1 of each"):
        deeper("12B", 0)
    with pytest.raises(PstarError, match=r"like 12B have learned 1024 positions; give --like .* model that takes 2048"):
        max_model("rtx4090", batch=1, seq=2048)


def test_fits_says_what_is_short_and_the_nearest_yes() -> None:
    w = preset("2B", batch=4, seq=1024)
    answer = fits(w, ps.machine("rtx3090-64gb"), policies=["all_on_gpu", "tide"])
    no, yes = answer.rows
    assert (no.fits, yes.fits) == (False, True)
    assert no.short_of == "gpu"
    assert no.short_bytes is not None and no.gpu_needed_bytes is not None
    assert no.gpu_needed_bytes - no.gpu_available_bytes == no.short_bytes
    assert no.reason is not None and "with --policy tide" in no.reason
    assert yes.gpu_headroom_bytes is not None and yes.gpu_headroom_bytes > 0
    assert yes.host_needed_bytes is not None and yes.host_rounding_bytes is not None
    assert yes.host_startup_bytes == 2 * w.params
    assert yes.iteration_s == ps.compare(w, ps.machine("rtx3090-64gb"), policies=["tide"]).best().row.iteration_s
    assert "all_on_gpu" in repr(answer)
    assert answer.to_json()[1]["gpu_headroom_bytes"] == yes.gpu_headroom_bytes
    assert {row["kernels"] for row in answer.to_json()} == {"eager"}


def test_what_the_card_will_show_is_the_tensors_and_the_one_reserve() -> None:
    w = preset("tiny-gpt2", batch=2, seq=32, dtype="fp16")
    answer = fits(w, ps.machine("t4"), policies=["all_on_gpu"])
    (row,) = answer.rows
    assert row.gpu_needed_bytes is not None and row.gpu_shown_bytes == row.gpu_needed_bytes + 10**9
    assert answer.to_json()[0]["gpu_shown_bytes"] == row.gpu_shown_bytes
    said = "The card will show at least 1.0 GB: the tensors, 1.0 GB of context and fragments, and what torch keeps."
    assert said in fits_text(answer, width=200).splitlines()
    (first, *_) = fits_text(fits(w, ps.machine("t4", gpu_memory="24GiB"), policies=["all_on_gpu"])).splitlines()
    assert "on t4 with 25.77 GB of GPU memory under" in first
    assert "card will show" not in repr(fits(w, ps.machine("virtual"), policies=["all_on_gpu"])), "it has no context"


@pytest.mark.parametrize(
    ("model", "free_bytes", "kept_bytes", "said"),
    [
        ("gpt2-xl", 10**10, 6_460_000_000, "6.5 GB (where they are free) that torch keeps."),
        ("gpt2-xl", 10**9, 10**9, "A part of what torch keeps is in use at the step: this yes is not certain."),
        ("gpt2", 10**10, None, "(where they are free) that torch keeps."),  # as much again as the tensors
    ],
)
def test_torch_keeps_memory_of_zero_3_where_it_is_free(
    model: str, free_bytes: int, kept_bytes: int | None, said: str
) -> None:
    w, card = preset(model, batch=1, seq=128), ps.machine("a100-80")
    zero = replace(card, framework=load_catalog().framework("deepspeed"))
    needed_bytes = fits(w, zero, policies=["all_on_gpu"], times=False).rows[0].gpu_needed_bytes
    assert needed_bytes is not None
    gpu = replace(card.gpu, usable_bytes=needed_bytes + card.gpu.context_bytes + free_bytes)
    answer = fits(w, replace(zero, ranks=(replace(card.ranks[0], gpu=gpu),)), policies=["all_on_gpu"], times=False)
    row = answer.rows[0]
    assert row.fits and row.gpu_shown_bytes is not None
    assert row.gpu_shown_bytes - needed_bytes - row.gpu_reserve_bytes == (kept_bytes or needed_bytes)
    assert said in fits_text(answer, width=300)
    assert row.is_tight == ("not certain" in fits_text(answer, width=300)) == (free_bytes < 6_460_000_000)


def test_what_does_not_fit_says_what_it_needs_of_both_places() -> None:
    """Given just that, the policy fits; with a byte less of the place that was short it does not."""
    w, m = preset("1B", batch=4, seq=1024), ps.machine("rtx4090", gpu_memory="6.5GB", host_memory="17GB")
    for row in fits(w, m, policies=["tide", "all_on_gpu", "zero3_offload"], times=False):
        assert not row.fits and row.gpu_needed_bytes is not None and row.host_needed_bytes is not None, row.policy
        left = {"gpu": row.gpu_headroom_bytes, "host": row.host_headroom_bytes}
        assert left[str(row.short_of)] == -row.short_bytes and min(left.values()) < 0 <= max(left.values())
        gpu, host = row.gpu_needed_bytes + m.gpu.context_bytes, row.host_needed_bytes + m.host.reserved_bytes
        gpu_resized = replace(m.gpu, usable_bytes=gpu, memory_bytes=max(gpu, m.gpu.memory_bytes))
        for missing, enough in ((0, True), (1, False)):
            there = host - (missing if row.short_of == "host" else 0)
            part = gpu_resized if row.short_of == "host" else replace(gpu_resized, usable_bytes=gpu - missing)
            roomy = replace(
                m, ranks=(replace(m.ranks[0], gpu=part),), host=replace(m.host, memory_bytes=max(there, 9 * 10**9))
            )
            assert fits(w, roomy, policies=[row.policy], times=False, near=False).any == enough, (row.policy, missing)


def test_what_is_short_is_what_is_needed_less_what_is_there() -> None:
    """With 0.2 GB of GPU zero3_offload is refused before it plans and, given what that lacks, again for what is held
    when a step runs: the answer names the second figure throughout."""
    w = preset("1B", batch=2, seq=512)
    answer = fits(
        w, ps.machine("rtx4090", gpu_memory="1.2GB"), policies=["zero3_offload", "zero_infinity"], times=False
    )
    for row in answer:
        assert row.short_of == "gpu" and row.gpu_needed_bytes is not None
        assert row.short_bytes == row.gpu_needed_bytes - row.gpu_available_bytes
        assert f"gpu needs {format_bytes(row.gpu_needed_bytes)} (" in str(row.reason)


def test_the_smallest_change_alone_is_that_of_all_rows_and_asks_less(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(policy: str, *rest: Any, **more: Any) -> ps.DoesNotFit | None:
        asked.append(policy)
        return shortage(policy, *rest, **more)

    monkeypatch.setattr(nearest, "shortage", counted)
    w, m = preset("4B", batch=4, seq=1024), ps.machine("rtx4090", host_memory="32GB")
    question = partial(fits, w, m, policies=["patrickstar", "zero3_offload", "tide", "zero_offload"], times=False)
    every, of_rows = question(near=True), len(asked)
    alone = question(near=None)
    assert (alone.change, alone.others) == (every.change, every.others) and alone.others
    assert len(asked) < 1.8 * of_rows
    for row, full in zip(alone, every):
        assert full.changes and not row.changes
        assert replace(full, reason=row.reason, changes=()) == row and str(full.reason).startswith(
            f"{row.reason}; fits"
        )


def test_a_policy_that_tries_others_asks_none_that_is_known_to_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that chooses shares, which plans on equal GPUs as another."""
    w, m = preset("8B", batch=4, seq=1024), ps.machine("rtx4090", host_memory="120GB")
    assert shortage("tide", w, m, ps.Settings()) is not None
    asked: list[str] = []

    def counted(policy: str, *rest: Any, **more: Any) -> Need:
        asked.append(policy)
        return memory_need(policy, *rest, **more)

    monkeypatch.setattr(memory_needs, "memory_need", counted)
    assert shortage("optimal", w, m, ps.Settings()) is not None
    assert "patrickstar" in asked and not {"tide", "whale"} & {*asked}


def test_the_host_has_room_for_a_policys_buffers() -> None:
    """ZeRO-3's optimizer keeps buffers of 66.8 GB beside its payloads: more than the weights at start-up."""
    w = preset("8B", batch=4, seq=1024)
    need = memory_need("zero3_offload", w, ps.machine("rtx4090"), ps.Settings())
    assert need.plan is not None
    assert need.buffer_bytes == sum(b for _, place, b in need.plan.buffers if place is Place.HOST) > need.startup_bytes
    assert need.host_bytes == need.pinned_bytes + need.buffer_bytes
    tight = ps.machine("rtx4090", host_memory=8_000_000_000 + need.host_bytes - 1)
    find_policy("zero3_offload")(w, tight, ps.Settings())  # whose own check knows no slabs
    with pytest.raises(ps.DoesNotFit, match=r"short by 1 B$") as refusal:
        memory_need("zero3_offload", w, tight, ps.Settings())
    assert "of the policy's own buffers" in str(refusal.value)


def test_the_answer_begins_with_yes_or_no_then_why_then_the_smallest_change() -> None:
    w, m = preset("8B", batch=4, seq=1024), ps.machine("rtx4090", host_memory="64GB")
    answer = fits(w, m, policies=["all_on_gpu", "tide", "zero_offload"], times=False)
    # 8-bit moments alone lack as many bytes as the weights take while they are loaded
    words = "with --loading in-place --optimizer adamw-8bit"
    assert answer.change == SmallestChange(words=words, policies=("tide",))
    assert [row.changes[0] for row in answer.rows if row.policy != "tide"] == [
        "with --lora r=16",
        "with --loading in-place --optimizer adafactor --masters none",
    ]
    assert answer.rows[1].changes == (words, "with --host-memory 128GB")
    lines = fits_text(answer, width=200).splitlines()
    assert lines[0] == "No: 8B does not fit on rtx4090 with 64 GB of host memory under any of the 3 policies."
    assert lines[1].startswith("Why: tide needs 115.41 GB of host memory, but only 56.00 GB can be used (8.00 GB of 64")
    assert lines[1].endswith(": 59.41 GB too little.")
    assert lines[2] == "Smallest change that makes it fit: --loading in-place --optimizer adamw-8bit, under tide."
    assert lines[3] == "With the job as it is: --host-memory 128GB, under tide; or on h200, under all_on_gpu."
    easy = fits(w, m, policies=["tide"], times=False, loading="in-place").change
    assert easy == SmallestChange(words="with --optimizer adamw-8bit", policies=("tide",)), "and it fits then"
    assert fits(w, ps.machine("rtx4090", host_memory="128GB"), policies=["tide"], times=False).any


@pytest.mark.whole
def test_changed_jobs_are_sized_as_if_all_their_layers_were_written() -> None:
    """Of every kind of change, alone and beside adapters and another optimizer."""
    machine = load_catalog().machine("a100-40")
    elsewhere = Elsewhere(preset("gpt-oss-20b", batch=4, seq=64, optimizer="adam", attention="math"), machine)
    last = {kind: options[-1] for kind, options in elsewhere.options.items()}
    assert {"loading", "kernels", "loss", "micro-batches", "optimizer", "LoRA"} <= last.keys()
    beside = {kind: last[kind] for kind in ("LoRA", "optimizer")}
    for options in [*({kind: each} | more for kind, each in last.items() for more in ({}, beside)), {}]:
        changed, sizes = elsewhere.job(options), elsewhere.sizes(options)
        assert changed is not None and sizes is not None
        w, loading = changed
        trained_bytes = w.trainable_params * 2 + w.states_bytes
        assert sizes.model_bytes == sum(t.bytes for t in w.tensors) + trained_bytes
        assert (sizes.peak_bytes, sizes.startup_bytes) == (w.peak_non_model_bytes, loading.startup_bytes(w, 1))
        read = [
            sum(w.tensors[u.tensor].bytes for u in w.uses if u.moment == n and u.kind == "read")
            for n in range(len(w.moments))
        ]
        assert sizes.least_gpu_bytes == max(m.peak_bytes + size for m, size in zip(w.moments, read))


def test_a_job_is_not_asked_about_where_what_a_moment_reads_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's experts are 2.8 GB, and a quarter of that where a base is packed."""
    w, m = preset("mixtral-8x7b", batch=8, seq=64), ps.machine("virtual", gpu_memory="4.2GB", host_memory="1TB")
    asked = list[ps.Workload]()

    def recorded(policy: str, changed: ps.Workload, where: ps.Machine, *rest: Any, **more: Any) -> ps.DoesNotFit | None:
        asked.extend([changed] if where is m and policy == "tide" else [])
        return shortage(policy, changed, where, *rest, **more)

    monkeypatch.setattr(nearest, "shortage", recorded)
    (row,) = fits(w, m, policies=["tide"], times=False, near=None).rows
    least_bytes = [_least_bytes(each, m) for each in (w, *asked)]
    assert 0.95 * (row.gpu_needed_bytes or 0) < least_bytes[0] <= (row.gpu_needed_bytes or 0)
    assert asked and max(least_bytes[1:]) <= m.gpu_budget_bytes < least_bytes[0]


def _least_bytes(w: ps.Workload, machine: ps.Machine) -> int:
    sizes = Elsewhere(w, machine).sizes({})
    assert sizes is not None
    return sizes.least_gpu_bytes


@pytest.mark.whole
def test_the_smallest_change_of_logits_policies_and_bases() -> None:
    """65,536 logits of 128,256 tokens: 16.8 GB in bf16, twice that in fp32."""
    long = preset("llama-3.2-1b", batch=1, seq=65536)
    card = fits(long, ps.machine("rtx4090"), policies=["tide"], times=False)
    assert card.change == SmallestChange(words="with --loss fused", policies=("tide",))
    assert fits(
        preset("llama-3.2-1b", batch=1, seq=65536, loss="fused"), ps.machine("rtx4090"), policies=["tide"], times=False
    ).any
    assert "tensor or sequence parallelism" not in fits_text(card, width=200)
    kept = preset("llama-3.2-1b", batch=1, seq=65536, checkpointing=False)
    card = fits(kept, ps.machine("rtx4090"), policies=["tide"], times=False)
    assert card.change is not None and card.change.words == "with --loss fused --checkpointing"

    big = preset("15B", batch=8, seq=1024)
    other = fits(big, ps.machine("rtx4090"), policies=["zero_offload"])
    assert other.change == SmallestChange(words="with --policy optimal", policies=("optimal",))
    assert "Smallest change that makes it fit: --policy optimal." in repr(other).splitlines()

    small = fits(ps.preset("1B", batch=8, seq=1024), ps.machine("rtx4090"), policies=["static_partition", "tide"])
    (equals,) = [line for line in fits_text(small, width=200).splitlines() if "The fastest is" in line]
    assert "The fastest is static_partition (1 other is as fast): it takes " in equals
    yes = fits_text(fits(big, ps.machine("rtx4090"), policies=["tide", "all_on_gpu"]), width=200).splitlines()
    assert yes[0].startswith("Yes: 15B fits on rtx4090 under 1 of the 2 policies. The fastest is tide: it takes 13.")
    assert yes[1].startswith("tide needs at least 10.4 GB of 24.4 GB of GPU memory and 255.6 GB of 532.1 GB of host")

    # 15 B parameters in 4 bits are 7.8 GB; adapters alone leave 30 GB, and a base that is there already needs none
    both = fits(preset("15B", batch=1, seq=64), ps.machine("t4"), policies=["all_on_gpu"])
    assert both.change == SmallestChange(words="with --lora r=16 --base nf4", policies=("all_on_gpu",))
    assert both.change is not None and both.change.brings_bytes == packed_bytes(
        preset("15B", batch=1, seq=64, lora="r=16", base="nf4")
    )
    assert f"--lora r=16 --base nf4 (brings {format_bytes(both.change.brings_bytes)})." in fits_text(both, width=200)
    adapted = preset("llama-3-8b", batch=1, seq=64, lora="r=16")
    twelve = ps.machine("rtx4090", gpu_memory="12GB")
    assert fits(adapted, twelve, policies=["all_on_gpu"], times=False).rows[0].changes[0] == "with --base nf4"
    # nothing helps all_on_gpu under autocast, which takes no adapters, and optimal needs another machine too
    both = fits(preset("18B", batch=1, seq=64, autocast="fp16"), ps.machine("t4"), policies=["all_on_gpu"], times=False)
    assert both.change == SmallestChange(words="with --policy optimal on a100-40", policies=("optimal",))


def test_where_experts_are_the_most_the_base_that_stores_their_stacks_is_advised(tmp_path: Path) -> None:
    """201 M of 218 M parameters are experts, which nf4 leaves in bf16: 0.4 GB, in 4 bits 0.1 GB."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_hidden_layers": 4, "num_experts": 16}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 512}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_moe", "num_experts_per_tok": 2, **sizes, **heads}))
    machine = ps.machine("virtual", gpu_memory="250MB")
    w = preset(f"hf:{path}", batch=1, seq=32, lora="r=16")
    answer = fits(w, machine, policies=["all_on_gpu"], times=False)
    assert answer.rows[0].changes[0] == "with --base nf4-experts"
    four = fits(preset(f"hf:{path}", batch=1, seq=32, lora="r=16", base="nf4"), machine, policies=["all_on_gpu"])
    assert four.rows[0].changes[0] == "with --base nf4-experts"
    assert answer.change is not None
    stacked = preset(f"hf:{path}", batch=1, seq=32, lora="r=16", base="nf4-experts")
    assert packed_bytes(stacked) > 201e6 * 1.48
    assert f"(brings {format_bytes(packed_bytes(stacked))})" in str(answer.rows[0].reason)


@pytest.mark.parametrize(
    ("job", "host", "words"),
    [
        # 8.03 B parameters x 14 bytes = 112 GB in AdamW, x 8.03 = 64.5 GB with moments in 8 bits
        ({}, "100GB", "--optimizer adamw-8bit"),
        pytest.param({"optimizer": "lion"}, "72GB", "--optimizer lion-8bit", marks=pytest.mark.whole),
        # masters of 4 bytes and factors, 6 bytes in all, are more than 2 x 4 without masters
        ({"optimizer": "adamw-8bit", "loading": "in-place"}, "52GB", "--masters none"),
        ({"optimizer": "adamw-8bit"}, "70GB", "--loading in-place"),
        # loss scaling needs fp32 masters
        ({"optimizer": "adamw-8bit", "dtype": "fp16", "loading": "in-place"}, "53GB", "--optimizer adafactor"),
    ],
)
def test_a_job_that_does_not_fit_is_told_which_flags_would_do(job: dict[str, str], host: str, words: str) -> None:
    loading = job.pop("loading", "whole")
    w, m = preset("llama-3.1-8b", batch=1, seq=512, **job), ps.machine("rtx4090", host_memory=host)
    answer = fits(w, m, policies=["tide"], times=False, loading=loading)
    assert answer.change == SmallestChange(words=f"with {words}", policies=("tide",))
    flags = dict(zip(*[iter(words.replace("--", "").split())] * 2))
    changed = with_optimizer(w, flags.get("optimizer"), flags.get("masters"))
    assert fits(changed, m, policies=["tide"], times=False, loading=flags.get("loading", loading)).any


def test_fits_says_what_takes_memory_and_marks_one_policy() -> None:
    """124,439,808 parameters of GPT-2, 2 bytes each, as many for gradients, 12 for states. The logits of 8 sequences of
    512 tokens and 50,257 words are there in bf16 and fp32, with a log-softmax and a gradient: 12 bytes each."""
    w = preset("gpt2", batch=8, seq=512, dtype="bf16")
    answer = fits(w, ps.machine("rtx4090"))
    parts = {part.name: part for part in answer.parts}
    trained = w.params
    assert [parts[name].job_bytes // trained for name in ("weights", "gradients", "optimizer states")] == [2, 2, 12]
    assert parts["activations"].job_bytes + parts["logits"].job_bytes == w.peak_non_model_bytes
    assert parts["logits"].job_bytes == pytest.approx(12 * 8 * 512 * 50257, rel=1e-3)
    best = answer.fastest[0]
    held = sum(part.gpu_bytes or 0 for part in answer.parts)
    assert best.gpu_needed_bytes is not None
    assert best.gpu_needed_bytes + best.gpu_reserve_bytes <= held <= ps.machine("rtx4090").gpu.memory_bytes
    lines = fits_text(answer, width=200).splitlines()
    assert [line.split()[:2] for line in lines if " best " in line] == [[best.policy, "best"]]
    (equals,) = [line for line in lines if line.startswith(f"as fast as {best.policy}: ")]
    folded = equals.partition(": ")[2].split(", ")
    assert folded == [row.policy for row in answer.fastest[1:]] and folded
    assert not any(line.startswith(f"{folded[0]} ") for line in lines)
    assert all(part.gpu_bytes is None for part in fits(w, "rtx4090", policies=["tide"], times=False).parts)


@pytest.mark.whole
def test_what_costs_nothing_is_advised_before_memory_and_memory_before_a_card() -> None:
    """16,384 tokens of Qwen3 8B on a 3090: activations of eager kernels, not states, are too much. Each advice fits,
    and with less of it the job does not."""
    m, job = ps.machine("rtx3090-64gb"), {"lora": "r=16", "batch": 1, "seq": 16384}
    answer = fits(preset("qwen3-8b", **job), m, policies=["all_on_gpu", "tide"], times=False)
    assert answer.change == SmallestChange(words="with --kernels fused", policies=("tide",))
    assert answer.others == (SmallestChange(words="on a100-40", policies=("tide",)),)
    states = "with --kernels fused --loss fused --optimizer adamw-8bit --masters none"
    assert answer.rows[0].changes == (states, "on a100-80")
    for changes, fit in (({}, False), ({"optimizer": "adamw-8bit"}, False), ({"masters": "none"}, False)):
        w = preset("qwen3-8b", **job, kernels="fused", loss="fused", **changes)
        assert fits(w, m, policies=["all_on_gpu"], times=False, near=False).any == fit
    w = preset("qwen3-8b", **job, kernels="fused", loss="fused", optimizer="adamw-8bit", masters="none")
    assert fits(w, m, policies=["all_on_gpu"], times=False).any
    little = ps.machine("rtx3090-64gb", gpu_memory="12GB", host_memory="16GB")
    for adapters, words in (({"lora": "r=16"}, "with --base nf4"), ({}, "with --lora r=16 --base nf4")):
        w = preset("qwen3-8b", batch=1, seq=512, **adapters)
        assert fits(w, little, policies=["all_on_gpu"], times=False).change == SmallestChange(
            words=words, policies=("all_on_gpu",)
        )
    w = preset("qwen3-8b", batch=1, seq=512, lora="r=16", base="nf4")
    assert fits(w, little, policies=["all_on_gpu"], times=False).any
    quick = fits(preset("1B", batch=1, seq=128), "t4", policies=["all_on_gpu", "tide"], times=False, near=None)
    assert [row.changes for row in quick] == [(), ()] and "with" not in str(quick.rows[0].reason), "one of them fits"
    least, both = quick.rows[0], fits(quick.workload, "t4", policies=["all_on_gpu"], times=False).rows[0]
    assert least.host_needed_bytes is None and 0 < (least.gpu_needed_bytes or 0) <= (both.gpu_needed_bytes or 0)
    assert "≥, ≤: only what is short was sought" in fits_text(quick)
    assert f"≥ {format_size(least.gpu_needed_bytes)}" in fits_text(quick) and both.host_needed_bytes is not None


def test_a_time_comes_with_what_validation_found_for_the_class_or_says_that_it_is_unvalidated() -> None:
    w = preset("1B", batch=1, seq=128)
    known = fits(w, ps.machine("v100-32"), policies=["all_on_gpu"]).rows[0]
    assert known.expected_error is not None and 0 < known.expected_error < 1
    assert known.trust is not None and "class v100 one GPU" in known.trust
    unknown = fits(w, ps.machine("l4"), policies=["all_on_gpu"]).rows[0]
    assert unknown.iteration_s is not None
    label = "not validated for class l4 one GPU (no published run counts; 4 runs of 2 sources are needed)"
    assert unknown.expected_error == untuned()
    assert (
        unknown.trust
        == f"± {unknown.expected_error:.0%}".replace("%", " %") + f", no measurement is near this: {label}"
    )
    row = ps.compare(w, ps.machine("l4"), policies=["all_on_gpu"]).rows[0]
    assert (row.expected_error, row.trust) == (unknown.expected_error, unknown.trust)


def test_the_limit_of_optimal_is_the_furthest_of_all() -> None:
    refusal = ps.DoesNotFit(policy="p", place="gpu", needed_bytes=2, available_bytes=1, what="w")

    def ask_of(name: str) -> Callable[[int], ps.DoesNotFit | None]:
        most = {"patrickstar": 9, "zero_offload": 20}.get(name, 5)  # the latter's limit is known already
        return lambda n: None if n <= most else refusal

    assert _others_go_on((7, refusal), {}, ask_of, 50) == (20, refusal)
    assert _others_go_on((7, refusal), {"zero_offload": (4, refusal)}, ask_of, 50) == (9, refusal)
    assert _others_go_on((7, refusal), {"zero_offload": (11, refusal)}, ask_of, 50) == (11, refusal)
    assert _others_go_on((7, None), {}, ask_of, 50) == (7, None)


def test_a_smaller_card_is_named_and_gets_its_own_memory_back() -> None:
    """Of a v100-32 with 9 GB, 8 GB are for plans; patrickstar needs 7.92 GB there, zero_infinity 8.48 GB."""
    m = ps.machine("v100-32", gpu_memory="9GB")
    answer = fits(preset("4B", batch=8, seq=1024), m, policies=["patrickstar", "zero_infinity"], times=False)
    short = answer.rows[1]
    assert short.changes == ("with --kernels fused", "with --gpu-memory 9.5GB") and fits_text(answer).startswith(
        "Yes: 4B fits on v100-32 with 9 "
    )
    assert short.reason is not None and short.reason not in fits_text(answer, width=1000)
    assert short.reason in fits_text(answer, width=1000, why=True)


def test_where_the_host_is_short_and_there_are_disks_the_options_for_disks_are_named() -> None:
    w, m = preset("20B", batch=4, seq=1024), ps.machine("rtxpro6000")
    (row,) = fits(w, m, policies=["zero_infinity:overlap=off"], times=False).rows
    spec = "zero_infinity:overlap=off,params=cpu,states=nvme"
    assert row.short_of == "host" and row.changes[0] == f"with --policy {spec}"
    compared = ps.compare(w, m, policies=[spec], barrier_cost=False)
    assert compared.rows[0].fits and compared.rows[0].gap is not None and compared.rows[0].gap > 0


@pytest.mark.whole
def test_where_the_host_is_short_even_with_the_disks_more_memory_and_the_options_are_named() -> None:
    """One memory of 128 GB, of which the host has 20: the states of 18 billion parameters fit the disks alone. Their
    36 GB of weights lie on the host while they are loaded. With the options given, only the memory is named."""
    w, m = preset("18B", batch=2, seq=1024), ps.machine("gb10")
    spec = "zero_infinity:params=nvme,states=nvme"
    first, second = ps.compare(w, m, policies=["zero_infinity", spec], barrier_cost=False).rows
    memory = "--host-memory 80GB of its one memory, the rest for the GPU"
    assert first.reason is not None and first.reason.endswith(f"; fits with --policy {spec} and {memory}")
    assert second.reason is not None and second.reason.endswith(f", or with {memory}")
    enough = ps.compare(w, ps.machine("gb10", host_memory="96GB"), policies=[spec], barrier_cost=False)
    assert enough.rows[0].fits


def test_the_answer_says_how_much_gpus_and_hosts_hold_in_all() -> None:
    """Why a node of eight may train a smaller model than a server with one GPU of the kind: its host has 240 GB.
    8 x 33.08 + 232 = 496.64 GB, 14 bytes per parameter."""
    node = max_model("v100-32x8", batch=8, seq=64, like="18B", policies=["all_on_gpu"], catalog=False)
    assert node.most_params == (8 * (round(31.74 * 2**30) - 10**9) + 232 * 10**9) // 14
    said = "8 GPUs and their host hold 496.64 GB in all, enough for at most 35.47 B parameters"
    assert said in repr(node).splitlines()
    one = max_model("v100-32", batch=1, seq=64, like="18B", policies=["all_on_gpu"], catalog=False)
    said = "the GPU and its host hold 565.17 GB in all, enough for at most 40.37 B parameters"
    assert said in repr(one).splitlines()


@pytest.mark.whole
def test_what_the_tide_gains_is_said_of_a_plan_that_does_not_follow_it() -> None:
    """32 GB of host memory have no room for lists on their way from and to disks, for either capacity rule. Without
    disks, 388 GB are too little for the constant one, which pins fewer chunks."""
    w, twice = (preset("qwen2.5-32b", batch=4, seq=2048, micro_batches=count) for count in (1, 2))
    small = ps.machine("rtxpro6000", gpu_memory="95GB", host_memory="32GB")
    few = find_policy("zero_infinity:params=nvme,states=nvme,subgroup=100000000")
    neither = tide_gain(few(twice, small, ps.Settings()))
    assert neither.startswith("neither capacity rule fits here: tide does not fit: host needs ")
    m = replace(ps.machine("rtxpro6000", gpu_memory="95GB", host_memory="396GB"), nvme=None)
    tide, other = (tide_gain(find_policy(name)(w, m, ps.Settings())) for name in ("tide", "optimal"))
    short = "with a constant capacity sized for the tide's peak nothing fits (static_partition does not fit: host needs"
    assert tide.startswith(f"the plan itself: {short} ") and tide.endswith(", and tide fits")
    assert other.startswith(f"a plan: {short} ")
    assert other.endswith("; this plan of optimal is neither")


def test_where_not_even_one_sequence_fits_the_nearest_yes_is_named() -> None:
    """GPT 18B on a T4: its 60 GB of host memory lack 185 GB of what tide needs; 288 GB would do, and do."""
    t4 = ps.machine("t4")

    def write(batch: int) -> ps.Workload:
        return ps.preset("18B", batch=batch, seq=512, dtype="fp16", checkpointing=True)

    row = ps.max_batch(t4, write, policies=["tide", "zero3_resident"])["tide"]
    assert row.value == 0 and row.reason is not None and row.reason.endswith("--lora r=16, or with --host-memory 288GB")
    enough = ps.max_batch(ps.machine("t4", host_memory="288GB"), write, policies=["tide"])["tide"]
    assert enough.value >= 1 and "fits" not in (enough.reason or "").replace("does not fit", "")


def test_where_not_even_one_layer_fits_smaller_batches_are_tried_for_it() -> None:
    """A shape of one layer is in no catalog; the nearest yes is found all the same, and is one."""
    flags = {"dtype": "fp16", "kernels": "fused", "loss": "fused", "lora": "r=16"}
    m = ps.machine("v100-16", gpu_memory="1.2GB")
    job = {"seq": 128, "like": "gpt2", "policies": ["zero_offload"], "catalog": False, **flags}
    row = max_model(m, batch=32, **job).rows[0]  # type: ignore[arg-type]
    assert row.value == 0 and row.reason is not None
    found = re.search(r"with --batch (\d+) --micro-batches (\d+)", row.reason)
    assert found is not None, row.reason
    batch, micro_batches = map(int, found.groups())
    yes = workload_of(deeper("gpt2", 1), batch=batch, micro_batches=micro_batches, sequence=128, **flags)  # type: ignore[arg-type]
    memory_need("zero_offload", yes, m, ps.Settings())
