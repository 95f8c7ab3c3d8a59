"""Autocast over fp32 weights: what is held in how many bytes, by hand, and what follows for plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import pstar_sim as ps
from pstar_sim.core.layout import build_layout
from pstar_sim.cost import cost_of
from pstar_sim.errors import ModelError, PlanError, TraceError
from pstar_sim.policy.registry import find_policy, policies
from pstar_sim.testing import round_machine
from pstar_sim.workload.presets import preset
from pstar_sim.workload.trace import load_trace, save_trace
from pstar_sim.workload.workload import Moment, Workload

HIDDEN, FFN, VOCAB, TOKENS = 768, 3072, 50257, 2 * 64  # of gpt2, two sequences of 64 tokens


def model(**changes: object) -> Workload:
    axes = {"autocast": "bf16", "checkpointing": False} | changes
    return preset(str(axes.pop("name", "gpt2")), batch=2, seq=64, **axes)


def planned(w: Workload, policy: str = "all_on_gpu", machine: str = "a100-80", **settings: object) -> ps.Plan:
    return find_policy(policy)(w, ps.machine(machine), ps.Settings(**settings))


def moment(w: Workload, name: str, phase: str = "FWD") -> Moment:
    return next(m for m in w.moments if m.name == name and m.phase == phase)


def test_weights_and_gradients_are_fp32_and_there_is_no_other_copy_of_the_weights() -> None:
    w = model()
    assert (w.dtype, w.autocast, w.compute_dtype) == ("fp32", "bf16", "bf16")
    assert all(t.dtype == "fp32" and t.bytes == 4 * t.numel for t in w.tensors if t.tied_to is None)
    layout = planned(w).layout
    states = sum(map(layout.states_bytes, range(len(layout.chunks))))
    working = sum(4 * chunk.numel for chunk in layout.chunks)
    assert states + working == 16 * sum(chunk.numel for chunk in layout.chunks)


def test_the_first_moment_of_a_block_by_hand() -> None:
    """The norm's output is fp32, and its copy in 16 bits stays for backward beside the statistics in fp32. The weight's
    and the bias' copies are made at their first use. q, k and v are in 16 bits."""
    first = moment(model(), "begin:transformer.h.0.ln_1")
    copies = 2 * (HIDDEN * 3 * HIDDEN + 3 * HIDDEN)
    norm = TOKENS * HIDDEN * (4 + 2) + 2 * TOKENS * 4
    assert first.end_bytes - first.start_bytes == norm + copies + TOKENS * 3 * HIDDEN * 2


def test_copies_of_weights_live_until_autocast_ends_and_those_of_matrices_until_backward() -> None:
    """With checkpoints, copies of the blocks' parameters go at the end of the forward pass, though no backward of
    theirs has come; without, those of biases alone go."""
    kept, checkpointed = model(), model(checkpointing=True)
    block = (HIDDEN * 3 * HIDDEN, HIDDEN * HIDDEN, HIDDEN * FFN, FFN * HIDDEN)
    biases = 3 * HIDDEN + HIDDEN + FFN + HIDDEN
    hidden = TOKENS * HIDDEN * 4
    logits = TOKENS * VOCAB * (2 + 4)  # those in 16 and in 32 bits end beside the copies
    for w, gone in ((kept, biases), (checkpointed, sum(block) + biases)):
        end = moment(w, "end:lm_head")
        assert end.peak_bytes - end.end_bytes == logits + hidden + 12 * 2 * gone


def test_a_gradient_of_a_weight_is_made_in_16_bits_and_becomes_fp32() -> None:
    """At the largest, backward of the head has the gradient of the weight in fp32 beside that in 16 bits; the logits'
    gradient and the hidden state's copy end before."""
    head = moment(model(), "grad:lm_head", "BWD")
    assert head.end_bytes - head.start_bytes == (
        4 * VOCAB * HIDDEN  # of the tied weight, which waits for the embedding's
        - 2 * VOCAB * HIDDEN  # the copy of the weight
        - TOKENS * VOCAB * 2
        - TOKENS * HIDDEN * 2
        + TOKENS * HIDDEN * 4
    )


def test_fused_kernels_write_16_bits_and_leave_the_residual_stream_in_fp32() -> None:
    eager, fused = (moment(model(kernels=kernels), "begin:transformer.h.1.ln_1") for kernels in ("eager", "fused"))
    gone = TOKENS * HIDDEN * 4  # the norm's fp32 output
    assert (eager.end_bytes - eager.start_bytes) - (fused.end_bytes - fused.start_bytes) == gone


@pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b", "bert-base"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_products_are_those_of_16_bits_and_moments_the_same(name: str, checkpointing: bool) -> None:
    cast, plain = (
        model(name=name, checkpointing=checkpointing, autocast=autocast, dtype=dtype)
        for autocast, dtype in (("bf16", None), (None, "bf16"))
    )
    assert [m.name for m in cast.moments] == [m.name for m in plain.moments]
    assert [m.products for m in cast.moments] == [m.products for m in plain.moments]
    assert cast.uses == plain.uses and cast.flops == plain.flops
    assert cast.moments[-2].end_bytes == plain.moments[-2].end_bytes == 2 * 8 * TOKENS  # all else is gone


def test_products_run_at_the_rate_of_16_bits() -> None:
    machine = round_machine(flops_per_s={"fp32": 1e12, "bf16": 4e12})
    fast, slow = (model(autocast=autocast, dtype="fp32") for autocast in ("bf16", None))
    seconds = [sum(cost_of(w, machine, build_layout(w)).moments_s) for w in (fast, slow)]
    assert seconds[0] == pytest.approx(seconds[1] / 4)


def test_only_fp16_needs_loss_scaling() -> None:
    for dtype, barrier in (("fp16", "loss scaling"), ("bf16", None)):
        plan = planned(model(autocast=dtype), "optimal", clip=False, update="eager")
        assert plan.settings.barrier(plan.workload.compute_dtype) == barrier


@pytest.mark.parametrize("policy", sorted(policies()))
def test_each_policy_plans_it(policy: str) -> None:
    w = model(checkpointing=True)
    planned(w, policy, "a100-80x8" if "zero3" in policy else "a100-80").check()


def test_a_plan_is_not_for_other_precision() -> None:
    with pytest.raises(PlanError, match="the plan was made for autocast to bf16, not fp32; make a plan for fp32"):
        planned(model()).check(model(autocast=None, dtype="fp32"))


def test_a_file_keeps_it(tmp_path: Path) -> None:
    save_trace(model(), tmp_path / "w.parquet")
    again = load_trace(tmp_path / "w.parquet")
    assert again.autocast == "bf16" and again.moments == model().moments
    plan = planned(model())
    plan.save(tmp_path / "plan.json")
    assert ps.load_plan(tmp_path / "plan.json").workload.autocast == "bf16"


def test_answers_say_it() -> None:
    assert model().notes == "bf16 autocast"
    assert not model().dtype_open


def test_an_answer_of_no_offers_no_adapters_that_presets_refuse() -> None:
    tiny = ps.machine("virtual", gpu_memory="300MB", host_memory="2.5GB")
    cast, narrow = (ps.fits(w, tiny).change for w in (model(), model(autocast=None, dtype="bf16")))
    assert narrow is not None and "--lora r=16" in narrow.words
    assert cast is not None and "--lora" not in cast.words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "bf16"}, "dtype is 'bf16'; autocast is over weights in fp32"),
        ({"lora": "r=8"}, "not for adapters; trace the model under autocast instead"),
        ({"loss": "fused"}, "not for a fused loss"),
        ({"name": "mixtral-8x7b"}, "not for this model"),
        ({"autocast": "fp32"}, "known dtypes are bf16, fp16"),
    ],
)
def test_what_is_not_written_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model(**changes)


def test_a_workload_by_hand_has_fp32_weights_under_autocast() -> None:
    with pytest.raises(TraceError, match="dtype is 'bf16'; under autocast it must be fp32"):
        replace(model(autocast=None, dtype="bf16"), autocast="bf16")
