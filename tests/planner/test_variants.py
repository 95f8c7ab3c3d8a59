"""Variants of a trace for one global batch: which there are, which is chosen, and what the command says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import pstar_sim as ps
from pstar_sim.catalog.machine import Machine
from pstar_sim.cli import main
from pstar_sim.core.plan import Plan, Settings, load_plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import DoesNotFit, TraceError
from pstar_sim.planner import variants
from pstar_sim.planner.compare import plan_and_play
from pstar_sim.planner.tried import Cap, Tried, WayOutcome, tried_of, tried_text
from pstar_sim.planner.variants import choose
from pstar_sim.planner.ways import candidates, words
from pstar_sim.policy.kit.ties import AS_FAST
from pstar_sim.policy.registry import Policy, can
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB
from pstar_sim.workload.mixing import block_names, mix_blocks
from pstar_sim.workload.trace import save_trace
from pstar_sim.workload.workload import Phase, Workload, repeat_micro_batch

EAGER = Settings(update="eager", clip=False)
STEP = Settings(update="eager", clip=False, loop="step")


def variant(batch: int, *, checkpointing: bool = True, tide_mib: int = 1, forward_s: float = 0.1) -> Workload:
    """Four layers of 2 MiB; seconds and non-model bytes grow with the batch; without recomputation it is faster and
    takes four times the bytes."""
    seconds = forward_s * batch * (1.0 if checkpointing else 0.75)
    tide = tide_mib * MIB * batch * (1 if checkpointing else 4)
    w = chain_workload(4, MIB, forward_s=seconds, tide_bytes=tide)
    return replace(w, batch=batch, checkpointing=checkpointing)


def with_gpu_bytes(budget: int) -> Machine:
    """Named as the machine whose seconds the moments carry."""
    machine = ps.machine("v100-32")
    gpu = replace(machine.ranks[0].gpu, usable_bytes=machine.gpu.context_bytes + budget)
    return replace(machine, name="virtual", ranks=(replace(machine.ranks[0], gpu=gpu),))


def test_every_batch_that_divides_the_share_is_repeated() -> None:
    made = candidates([variant(1), variant(2), variant(3), variant(4, checkpointing=False)], 4)
    assert [(w.batch, w.micro_batches, w.checkpointing) for w in made] == [(1, 4, True), (2, 2, True), (4, 1, False)]
    assert [words(w) for w in made][1:] == [
        "2 micro-batches of 2, activations recomputed",
        "1 micro-batch of 4, activations kept",
    ]
    with pytest.raises(TraceError, match=r"share of the global batch is 5 sequences; .* micro-batches of 2, 3, none"):
        candidates([variant(2), variant(3)], 5)
    with pytest.raises(TraceError, match="variants are of"):
        candidates([variant(2), replace(variant(2), sequence=7)], 4)
    with pytest.raises(TraceError, match="variants is empty"):
        candidates([], 4)


def test_the_fastest_that_fits_is_chosen() -> None:
    """On a large GPU activations are kept: 0.75 of the seconds, in one micro-batch. On a small one (6 MiB; a
    working list takes 2, the activations of 4 sequences 16 MiB) fewer at a time, or recomputed."""
    machine = with_gpu_bytes(1000 * MIB)
    made = candidates([variant(b, checkpointing=c) for b in (1, 2, 4) for c in (True, False)], 4)
    chosen = choose(made, machine, EAGER)
    assert not chosen.workload.checkpointing
    assert chosen.plan.choices["variant"] == words(chosen.workload)
    tried = dict(chosen.tried)
    assert len(tried) == 15  # three batches, each kept, recomputed and in three mixtures
    assert any(str(row).startswith("not planned: computing alone takes") for row in tried.values())
    assert chosen.left_out[-1].startswith("activations of some blocks offloaded: these blocks keep none")
    fitting = choose(made, with_gpu_bytes(6 * MIB), EAGER)
    assert fitting.workload.batch < 4 or fitting.workload.checkpointing
    assert any(str(row).startswith("does not fit: short by") for row in dict(fitting.tried).values())
    with pytest.raises(DoesNotFit):
        choose(made, with_gpu_bytes(MIB), EAGER)
    with pytest.raises(TraceError, match="give workloads with the same number"):
        choose([variant(1), variant(2)], machine, EAGER)


def test_ways_whose_activations_alone_have_no_room_are_planned_by_no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """But by those that run micro-batches in another order, in which there may be fewer."""
    machine = with_gpu_bytes(6 * MIB)
    made = candidates([variant(b, checkpointing=c) for b in (1, 2, 4) for c in (True, False)], 4)
    asked: list[tuple[Policy, Workload]] = []

    def recorded(policy: Policy, workload: Workload, *job: Any, **beside: Any) -> tuple[Plan, Timeline]:
        asked.append((policy, workload))
        return plan_and_play(policy, workload, *job, **beside)

    monkeypatch.setattr(variants, "plan_and_play", recorded)
    tried = dict(choose(made, machine, EAGER).tried)
    assert sum(row.outcome is WayOutcome.NO_ROOM for row in tried.values()) >= 3
    assert asked and all(w.peak_non_model_bytes <= 6 * MIB for policy, w in asked if not can(policy).reorders)


def deep_variant(batch: int, checkpointing: bool) -> Workload:
    """Eight layers of 2 MiB; each leaves 1 MiB a sequence behind where its activations are kept."""
    up = [MIB * batch * n for n in range(1, 9)]
    tide: int | list[int] = MIB * batch if checkpointing else [*up, *up[::-1], 0]
    w = chain_workload(8, MIB, tide_bytes=tide, forward_s=0.05 * batch, checkpointing=checkpointing)
    return replace(w, batch=batch)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("gpu_mib", "link_mib_per_s", "settings"), [(12, 40, EAGER), (12, 160, Settings()), (20, 10, EAGER)]
)
def test_optimal_is_never_slower_than_what_another_policy_would_choose(
    gpu_mib: int, link_mib_per_s: int, settings: Settings
) -> None:
    """The first ways that `optimal` plans, those of the lowest bounds, are not the best here."""
    base = with_gpu_bytes(gpu_mib * MIB)
    rate = float(link_mib_per_s * MIB)
    link = replace(base.link, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate, latency_s=0.0)
    machine = replace(base, ranks=(replace(base.ranks[0], link=link),))
    made = candidates([deep_variant(b, c) for b in (1, 2, 4) for c in (True, False)], 4)
    seconds = dict[str, float]()
    for name in ("static_partition", "patrickstar", "tide", "karma", "optimal"):  # the others have no room
        seconds[name] = choose(made, machine, settings, policy=name).iteration_s
    assert seconds["optimal"] <= min(seconds.values()) * (1 + AS_FAST)


def test_where_session_step_runs_the_iterations_both_orders_are_ways() -> None:
    """A slow link and room for half of the layers: layer by layer each comes up twice, instead of eight times."""
    machine = with_gpu_bytes(10 * MIB)
    link = replace(machine.link, h2d_bytes_per_s=20.0 * MIB, d2h_bytes_per_s=20.0 * MIB, latency_s=0.0)
    machine = replace(machine, ranks=(replace(machine.ranks[0], link=link),))
    made = candidates([chain_workload(8, MIB, tide_bytes=64, forward_s=0.01, checkpointing=True)], 4)
    own, step = (choose(made, machine, settings) for settings in (EAGER, STEP))
    assert (own.words, step.words) == (
        "4 micro-batches of 1, activations recomputed",
        "4 micro-batches of 1, layer by layer, activations recomputed",
    )
    assert own.words in dict(step.tried) and list(dict(own.tried)) == [own.words]
    assert not step.workload.order.of_loop and step.iteration_s < own.iteration_s
    assert step.plan.settings == STEP and step.plan.check().steps == len(step.plan.steps)


def test_what_was_not_tried_is_told_from_what_cannot_win() -> None:
    """Two ways promise too little (proof: their bounds), three were left out although they might have been the best."""
    cap = Cap(policy="optimal", ways=5, alike=2)
    tried = {
        "a": Tried(outcome=WayOutcome.PLANNED, seconds=2.5),
        "b": Tried(outcome=WayOutcome.COMPUTING, seconds=2.6),
        "c": Tried(outcome=WayOutcome.BOUND, seconds=2.5, chunk_bytes=2_100_000),
        "d": Tried(outcome=WayOutcome.CAPPED, seconds=1.1, cap=cap),
        "e": Tried(outcome=WayOutcome.CAPPED, seconds=1.2, cap=cap),
        "f": Tried(outcome=WayOutcome.CAPPED, seconds=2.0, cap=cap),
        "g": Tried(outcome=WayOutcome.NO_ROOM, place="gpu", short_bytes=10),
        "h": Tried(outcome=WayOutcome.PLANNED, seconds=3.0),
        "i": Tried(outcome=WayOutcome.COMPUTING, seconds=2.7, stashes=True),
    }
    rule = (
        "optimal plans at most 5 ways, at most 2 with equal micro-batches, and besides those that another policy "
        "plans faster"
    )
    assert tried_text(tried, "a") == (
        f"h: 3.000 s; 3 promise too little; 3 not tried ({rule}; their bounds are 1.100 s to 2.000 s); 1 do not fit"
    )
    assert tried_text({"d": tried["d"]}) == f"1 not tried ({rule}; its bound is 1.100 s)"
    assert [str(tried[way]) for way in "abcdgi"] == [
        "2.500 s",
        "not planned: computing alone takes 2.600 s",
        "not planned: no plan of it with chunks of 2.1 MB takes less than 2.500 s",
        f"not tried: {rule}; its bound is 1.100 s",
        "does not fit: short by 10 bytes of the gpu",
        "not planned: computing and its stashes alone take 2.700 s",
    ]
    kept = json.loads(json.dumps({way: row.to_json() for way, row in tried.items()}))
    assert tried_of(kept) == tried


@pytest.mark.parametrize(
    "odd",
    [
        "words",
        {"a": "2.500 s"},
        {"a": {}},
        {"a": {"outcome": "planned", "seconds": "soon"}},
        {"a": {"outcome": "lost"}},
        {"a": {"outcome": "planned", "colour": "red"}},
        {"a": {"outcome": "not tried", "seconds": 1.0, "cap": "few"}},
        {"a": {"outcome": "its bound is too high", "seconds": 1.0, "chunk_bytes": [1]}},
    ],
)
def test_what_is_no_record_of_ways_is_not_taken_for_one(odd: object) -> None:
    assert tried_of(odd) is None


def test_numbers_of_micro_batches_without_a_variant_are_named() -> None:
    made = candidates([variant(2), variant(4)], 8)
    chosen = choose(made, with_gpu_bytes(1000 * MIB), EAGER, policy="tide")
    assert chosen.left_out[0] == "1, 8 micro-batches: there is no variant for them"


def test_attention_is_named_where_variants_differ_in_it() -> None:
    pair = [variant(2), replace(variant(2), attention="math")]
    assert words(pair[0], pair) == f"{words(pair[0])}, {pair[0].attention} attention"
    assert words(pair[0], pair[:1]) == words(pair[0])
    chosen = choose(candidates(pair, 2), with_gpu_bytes(1000 * MIB), EAGER, policy="tide")
    assert {how.rpartition(", ")[2] for how, _ in chosen.tried} == {f"{w.attention} attention" for w in pair}
    assert chosen.plan.choices["variant"] == chosen.words


def test_the_command_chooses_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "t.parquet", tmp_path / "plan.json"
    save_trace([variant(b, checkpointing=c) for b in (1, 2) for c in (True, False)], trace)
    plan = ["plan", "--trace", str(trace), "--machine", "v100-32", "--policy", "tide", "-o", str(out)]
    assert main([*plan, "--global-batch", "4"]) == 0
    loaded = load_plan(out)
    assert loaded.workload.batch * loaded.workload.micro_batches == 4
    assert loaded.choices["variant"] == words(loaded.workload)
    assert len(loaded.choices["variants_tried"]) == 10  # type: ignore[arg-type]
    capsys.readouterr()
    compare = ["compare", "--trace", str(trace), "--machine", "v100-32", "--policy", "tide"]
    assert main([*compare, "--global-batch", "4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "note: global batch 4:" in said
        and "fastest by tide" in said
        and "not considered: activations of some blocks offloaded" in said
    )
    assert main([*compare, "--global-batch", "4", "--no-checkpointing", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["policy"] == "tide"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--global-batch", "3", "--batch", "1"], "give --global-batch alone, or both of them"),
        (["--global-batch", "5"], "micro-batches of 2, none of which divides it"),
        (["--global-batch", "4", "--seq", "77"], "no variant of 1 has --seq"),
        (["--global-batch", "0"], "must be at least 1"),
    ],
)
def test_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str) -> None:
    trace = tmp_path / "t.parquet"
    save_trace([variant(2)], trace)
    try:
        code = main(["compare", "--trace", str(trace), "--machine", "v100-32", "--policy", "tide", *more])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code != 0
    assert said in " ".join(capsys.readouterr().err.split())


# Blocks that keep their activations beside blocks that do not.


def test_mixing_all_or_none_gives_the_variants_themselves() -> None:
    both = [ps.preset("1B", batch=2, seq=256, dtype="bf16", checkpointing=c) for c in (True, False)]
    recomputed, kept = both
    blocks = block_names(recomputed)
    assert (len(blocks), blocks[0]) == (20, "transformer.h.0")
    assert mix_blocks(recomputed, kept, []).moments == recomputed.moments
    everything = mix_blocks(recomputed, kept, blocks)
    assert (everything.moments, everything.uses, everything.checkpointing) == (kept.moments, kept.uses, False)


def test_each_kept_block_adds_its_activations_and_saves_its_recomputation() -> None:
    """Blocks are alike: the peak rises, and the work falls, by the same for each of them."""
    recomputed, kept = (ps.preset("1B", batch=2, seq=256, dtype="bf16", checkpointing=c) for c in (True, False))
    blocks = block_names(recomputed)
    mixed = [mix_blocks(recomputed, kept, blocks[20 - n :]) for n in (0, 5, 10, 15, 20)]
    work = [w.flops for w in mixed]
    assert [a - b for a, b in pairwise(work)] == [work[0] - work[1]] * 4
    turn = [max(m.peak_bytes for m in w.moments if m.phase is Phase.FWD) for w in mixed]
    assert [b - a for a, b in pairwise(turn)] == [turn[1] - turn[0]] * 4
    assert words(mixed[1]) == "1 micro-batch of 2, activations of blocks 0-14 of 20 recomputed, 15-19 kept"
    with pytest.raises(TraceError, match=r"has no blocks transformer\.h\.77"):
        mix_blocks(recomputed, kept, ["transformer.h.77"])
    with pytest.raises(TraceError, match="one micro-batch"):
        mix_blocks(repeat_micro_batch(recomputed, 2), kept, [])
    with pytest.raises(TraceError, match="one model, batch and sequence"):
        mix_blocks(recomputed, ps.preset("1B", batch=4, seq=256, dtype="bf16", checkpointing=False), [])
    fused = ps.preset("1B", batch=2, seq=256, dtype="bf16", checkpointing=False, kernels="fused")
    with pytest.raises(
        TraceError, match="kernels is 'eager' in the variant that recomputes and 'fused' in the variant that"
    ):
        mix_blocks(recomputed, fused, [])


def test_where_all_activations_do_not_fit_some_may() -> None:
    recomputed, kept = (ps.preset("1B", batch=4, seq=1024, dtype="bf16", checkpointing=c) for c in (True, False))
    machine = ps.machine("rtx4090", gpu_memory="14GB", overrides={"link.bandwidth": "5GB/s"})
    made = candidates([recomputed, kept], 4)
    chosen = choose(made, machine, EAGER)
    how = [choice for _, choice in chosen.workload.activations]
    assert set(how) >= {"keep", "recompute"} and chosen.workload.checkpointing
    assert "in other ways" in chosen.left_out[-1]


def long_variant(checkpointing: bool) -> Workload:
    """Eight layers of 1,024 parameters, 1 s forward and 2 s backward each. Kept, each leaves 1 MiB behind, so that the
    tide goes up to 8 MiB; recomputed, the tide is 1 MiB and 8 s come on top."""
    up = [MIB * n for n in range(1, 9)]
    tide: int | list[int] = MIB if checkpointing else [*up, *up[::-1], 0]
    w = chain_workload(8, 1024, tide_bytes=tide, forward_s=1.0, checkpointing=checkpointing)
    return replace(w, batch=4)


@pytest.mark.parametrize(
    ("seconds_a_mib", "how", "seconds"),
    [
        (0.5, "activations of blocks 1-4 of 8 offloaded, 0, 5-7 kept", 24.0),
        (4.0, "activations of blocks 0-3 of 8 recomputed, 4-7 kept", 28.0),
    ],
)
def test_offloading_wins_where_the_link_is_fast(seconds_a_mib: float, how: str, seconds: float) -> None:
    """5.9 MiB of the GPU hold the model and a tide of less than 6 MiB. All kept takes 24 s and 8 MiB; the first half
    recomputed 28 s. Half of the layers offloaded, the first one not, takes 24 s if a copy (0.5 s) is hidden behind the
    forward pass of a layer, and 8 - 4 = 4 MiB; at 4 s a copy it waits. (Two of the eight are not enough.)"""
    base = with_gpu_bytes(int(5.9 * MIB))
    rate = MIB / seconds_a_mib
    link = replace(base.link, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate, latency_s=0.0)
    machine = replace(base, ranks=(replace(base.ranks[0], link=link),))
    made = candidates([long_variant(True), long_variant(False)], 4)
    chosen = choose(made, machine, EAGER, policy="tide")
    assert words(chosen.workload) == f"1 micro-batch of 4, {how}"
    assert chosen.iteration_s == pytest.approx(seconds, rel=0.01)
    chosen.plan.check()


def test_a_preset_is_tried_in_several_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    plan = ["plan", "--model", "gpt2", "--seq", "256", "--machine", "v100-32", "--policy", "tide", "-o", str(out)]
    assert main([*plan, "--global-batch", "8"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "fastest by tide of " in said and "promise too little" in said
    tried = load_plan(out).choices["variants_tried"]
    assert {str(what).split(",")[0] for what in tried} == {  # type: ignore[attr-defined]
        "1 micro-batch of 8",
        "2 micro-batches of 4",
        "4 micro-batches of 2",
        "8 micro-batches of 1",
    }
    assert main([*plan, "--global-batch", "2", "--checkpointing"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "activations kept or offloaded: every variant recomputes them" in said and "trace" not in said
    assert main(["plan", "--model", "gpt2", "--machine", "v100-32", "--global-batch", "8", "-o", str(out)]) != 0
    assert "--model needs --seq" in capsys.readouterr().err


def test_where_none_fits_the_policy_asked_for_says_what_would_do() -> None:
    """509 sequences (a prime) of GPT-2 on an L4: one micro-batch is too large, 509 of one sequence are not tried."""
    machine = ps.machine("l4")
    variants = [ps.preset("gpt2", batch=n, seq=256, dtype="bf16", checkpointing=True) for n in (1, 509)]
    with pytest.raises(DoesNotFit) as refused:
        choose(candidates(variants, 509), machine, EAGER)
    assert str(refused.value).startswith("optimal does not fit: gpu needs")
    assert "that is 1 micro-batch of 509, activations recomputed, which lacks least of 1 tried; fits with --" in str(
        refused.value
    )
