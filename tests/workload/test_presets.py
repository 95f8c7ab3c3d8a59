"""Presets: true parameter counts, flops and bytes that can be worked out by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from msgspec import structs

from pstar_sim.catalog.attention import ATTENTION
from pstar_sim.catalog.model_shapes import ExpertsShape, ModelEntry, model_entry, model_names
from pstar_sim.core.layout import build_layout
from pstar_sim.errors import ModelError, TraceError, UnknownName
from pstar_sim.workload.kernels import KERNELS
from pstar_sim.workload.presets import preset, variant, workload_of
from pstar_sim.workload.workload import Phase, Workload, product_flops

TOKENS = 2 * 8  # batch 2, sequence 8


def entry(
    family: str = "gpt", *, layers: int = 3, kv_heads: int = 4, tied: bool = True, bias: bool = False
) -> ModelEntry:
    return ModelEntry(
        name="tiny",
        family=family,
        layers=layers,
        hidden=16,
        heads=4,
        kv_heads=kv_heads,
        ffn=64,
        vocab=100,
        max_seq=32,
        tied=tied,
        params=0,
        source="test",
        attention_bias=bias,
    )


def tiny(e: ModelEntry, *, checkpointing: bool = False, attention: str = "flash", dtype: str = "bf16") -> Workload:
    return workload_of(e, batch=2, sequence=8, checkpointing=checkpointing, attention=attention, dtype=dtype)


def test_every_preset_has_the_true_parameters_and_wastes_at_most_two_percent_of_its_chunks(whole: bool) -> None:
    """Here, so that the catalog is written once; without --whole every third model, and not the 30,489 tensors of
    deepseek-v3, as long as thirty others."""
    wasted = {}
    names = model_names()
    for name in names if whole else [name for name in names[::3] if name != "deepseek-v3"]:
        e = model_entry(name)
        w = preset(name, batch=1, seq=e.max_seq if e.family == "vit" else 16)
        assert w.params == e.params, name
        assert sum(t.bytes for t in w.tensors) == 2 * e.params, name
        wasted[name] = build_layout(w).waste
    assert len(wasted) > (40 if whole else 13)
    assert {name: waste for name, waste in wasted.items() if waste > 0.02} == {}


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama-7b", "qwen2.5-0.5b", pytest.param("qwen2.5-7b", marks=pytest.mark.whole), "bert-base", "vit-b-16"],
)
def test_the_tide_comes_back_to_where_it_began(name: str, dtype: str, checkpointing: bool) -> None:
    for attention in ATTENTION:
        w = preset(name, batch=2, seq=197 if name == "vit-b-16" else 32, dtype=dtype, checkpointing=checkpointing,
                   attention=attention)  # fmt: skip
        assert w.moments[-1].end_bytes == w.moments[0].start_bytes
        assert all(a.end_bytes == b.start_bytes for a, b in pairwise(w.moments))
        read = {t for row in w.reads for t in row}
        fired = [t for row in w.gradients for t in row]
        own = {i for i, t in enumerate(w.tensors) if t.tied_to is None}
        assert read == own
        assert sorted(fired) == sorted(own)  # each gradient arrives once


def test_flops_of_a_gpt_by_hand() -> None:
    # Matrices of 3 layers (12 h^2 each) and the head, 2 flops a token and element: 2 * 16 * (3 * 12 * 256 + 1600).
    matrices = 2 * TOKENS * (3 * 12 * 16**2 + 100 * 16)
    attention = 3 * 4 * 2 * 8 * 8 * 16  # layers x 4 b s^2 h
    w = tiny(entry())
    assert sum(m.flops for m in w.moments if m.phase is Phase.FWD) == matrices + attention == 346_112 + 24_576
    assert sum(m.flops for m in w.moments if m.phase is Phase.BWD) == 2 * matrices + attention * 5 // 2
    # A recompute leaves out the layer's last matmul (4 h^2 of 12), whose output backward does not need.
    w = tiny(entry(), checkpointing=True)
    assert sum(m.flops for m in w.moments if m.phase is Phase.RECOMPUTE) == 2 * TOKENS * 3 * 8 * 16**2 + attention
    # The math kernel does not compute the scores again.
    w = tiny(entry(), attention="math")
    assert sum(m.flops for m in w.moments if m.phase is Phase.BWD) == 2 * matrices + 2 * attention


def test_products_of_a_gpt_by_hand() -> None:
    # 16 tokens, hidden 16: queries, keys and values in one product; the gradients of the input and of the weight.
    w = tiny(entry())
    forward, backward = ([m.products for m in w.moments if m.phase is phase] for phase in (Phase.FWD, Phase.BWD))
    assert forward[2] == ((1, 16, 16, 48),)
    assert next(rows for rows in backward if (1, 16, 48, 16) in rows) == ((1, 16, 48, 16), (1, 48, 16, 16))
    # Attention is no product of its own, except in the math kernel: 2 sequences of 8 tokens, as many products as heads.
    flops = sum(product_flops(row) for m in w.moments for row in m.products)
    assert w.flops - flops == 3 * 4 * 2 * 8 * 8 * 16 * 7 // 2
    math = tiny(entry(), attention="math")
    heads = entry().heads
    assert math.moments[3].products[:2] == ((2 * heads, 8, 16 // heads, 8), (2 * heads, 8, 8, 16 // heads))
    assert sum(product_flops(row) for m in math.moments for row in m.products) == math.flops


def test_peak_of_a_gpt_by_hand() -> None:
    u = TOKENS * 16 * 2  # one activation of the hidden size in bf16
    stats = 2 * TOKENS * 2  # mean and deviation of a LayerNorm
    lse = TOKENS * 4 * 4  # a log-sum for each of 4 heads
    batch = 16 * TOKENS
    # In the loss's backward: the log-softmax, its gradient and the logits' gradient, fp32; last hidden state before and
    # after ln_f. Each layer keeps 28 u without checkpointing and its input with it.
    loss = 3 * 4 * TOKENS * 100
    w = tiny(entry())
    assert w.peak_non_model_bytes == batch + u + 3 * (28 * u + 2 * stats + lse) + u + stats + loss
    assert w.moments[0].start_bytes == batch
    w = tiny(entry(), checkpointing=True)
    at_loss = next(m for m in w.moments if m.name == "grad:<root>")
    assert at_loss.peak_bytes == batch + u + 3 * u + u + stats + loss


def test_without_checkpointing_the_tide_rises_through_forward_and_falls_through_backward() -> None:
    moments = tiny(entry(layers=5)).moments
    up = [
        m.end_bytes
        for m in moments
        if m.phase is Phase.FWD and m.name.startswith("end:") and m.module.endswith("mlp.c_fc")
    ]
    down = [m.end_bytes for m in moments if m.name.startswith("grad:") and m.module.endswith("attn.c_attn")]
    layer = up[1] - up[0]
    assert len(up) == len(down) == 5
    assert [b - a for a, b in pairwise(up)] == [layer] * 4
    assert [a - b for a, b in pairwise(down)] == [layer] * 4
    with_checkpoints = tiny(entry(layers=8), checkpointing=True)
    assert with_checkpoints.peak_non_model_bytes < tiny(entry(layers=8)).peak_non_model_bytes


def test_fp32_keeps_no_second_copy_of_the_logits() -> None:
    at_loss = [next(m for m in tiny(entry(), dtype=d).moments if m.name == "end:lm_head") for d in ("bf16", "fp32")]
    taken = [m.peak_bytes - m.start_bytes for m in at_loss]
    labels = 8 * TOKENS
    assert taken == [2 * 4 * TOKENS * 100 + labels, 4 * TOKENS * 100 + labels]


def test_a_tied_head_is_the_embedding() -> None:
    w = tiny(entry())
    names = [t.name for t in w.tensors]
    head = w.tensors[names.index("lm_head.weight")]
    assert (head.tied_to, head.bytes) == (0, 0)
    assert names[0] == "transformer.wte.weight"
    reading = [w.moments[m].name for m, row in enumerate(w.reads) if 0 in row]
    assert reading == ["begin:transformer.wte", "begin:lm_head", "grad:lm_head"]
    assert [w.moments[m].name for m, row in enumerate(w.gradients) if 0 in row] == ["grad:transformer.wte"]
    loose = tiny(entry(tied=False))
    assert loose.params == w.params + 100 * 16
    assert all(t.tied_to is None for t in loose.tensors)


def test_llama_groups_its_keys_and_qwen_has_three_biases() -> None:
    shapes = {t.name.removeprefix("model.layers.0."): t.shape for t in tiny(entry("llama", kv_heads=2)).tensors}
    assert shapes["self_attn.k_proj.weight"] == (8, 16)  # 2 of 4 heads of 4
    assert "self_attn.q_proj.bias" not in shapes
    names = [
        t.name for t in tiny(entry("llama", kv_heads=2, bias=True)).tensors if "layers.0" in t.name and "bias" in t.name
    ]
    assert [n.split(".")[-2] for n in names] == ["q_proj", "k_proj", "v_proj"]


def test_kernels_of_a_gpt_by_hand() -> None:
    """What a layer keeps beside its attention's log-sum and two norms' statistics: with eager kernels 28 u, of which
    12 u are x/2, tanh and 1 + tanh of the activation. Fused keeps 16 u; compiled neither outputs of norms (2 u) nor of
    the activation (4 u)."""
    u, stats, lse, batch = TOKENS * 16 * 2, 2 * TOKENS * 2, TOKENS * 4 * 4, 16 * TOKENS
    logits, logits32, labels = TOKENS * 100 * 2, TOKENS * 100 * 4, 8 * TOKENS
    loss = {
        "eager": logits32 * 3,
        "fused": 2 * logits + labels + 4 * TOKENS,
        "compiled": 2 * logits + labels + 4 * TOKENS,
        "megatron": logits32 + logits,  # labels have gone
    }
    for kernels, kept in (("eager", 28), ("fused", 16), ("compiled", 10), ("megatron", 16)):
        w = workload_of(entry(), batch=2, sequence=8, checkpointing=False, kernels=kernels)
        at_loss = next(m for m in w.moments if m.name == "grad:<root>")
        layers = 3 * (kept * u + 2 * stats + lse)
        assert w.kernels == kernels
        assert at_loss.peak_bytes == batch + u + layers + u + stats + loss[kernels], kernels


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("kernels", KERNELS)
def test_every_flavour_comes_back_to_where_it_began(kernels: str, checkpointing: bool, family: str) -> None:
    """The same flops and uses; no flavour but eager has a higher tide than eager's."""
    for dtype in ("bf16", "fp32"):
        for early_stop in (True, False):
            w, eager = (
                workload_of(entry(family), batch=2, sequence=8, checkpointing=checkpointing, dtype=dtype,
                            early_stop=early_stop, kernels=which)
                for which in (kernels, "eager")
            )  # fmt: skip
            assert w.moments[-1].end_bytes == w.moments[0].start_bytes
            assert [(m.name, m.flops, m.products) for m in w.moments] == [
                (m.name, m.flops, m.products) for m in eager.moments
            ]
            assert w.uses == eager.uses and w.peak_non_model_bytes <= eager.peak_non_model_bytes


def test_kernels_of_a_llama_by_hand() -> None:
    """Of the feed-forward layer eager keeps gate, its SiLU, up and their product; fused all but the SiLU; compiled gate
    and up. Fused norms keep their input and 4 bytes of a token, not an fp32 copy and what they normalized."""
    e = entry("llama", kv_heads=2)
    u, f, kv, row = TOKENS * 16 * 2, TOKENS * 64 * 2, TOKENS * 8 * 2, TOKENS * 4
    lse = TOKENS * 4 * 4
    kept = {}
    for kernels in ("eager", "fused", "compiled"):
        w = workload_of(e, batch=2, sequence=8, checkpointing=False, kernels=kernels)
        ends = [m.end_bytes for m in w.moments if m.name.startswith("end:") and m.module.endswith("up_proj")]
        kept[kernels] = ends[1] - ends[0]
    attention = 2 * u + 2 * kv + lse  # q, k, v and the output
    assert kept["eager"] == 2 * (2 * u + u + u + row) + attention + 4 * f  # fp32 copy, normalized, output
    assert kept["fused"] == 2 * (u + u + row) + attention + 3 * f
    assert kept["compiled"] == 2 * (u + row) + attention + 2 * f


MASKED = [("gpt", kernels) for kernels in KERNELS] + [(name, "megatron") for name in ("llama", "experts", "gemma")]


@pytest.mark.parametrize(("family", "kernels"), MASKED)
@pytest.mark.parametrize(
    "axes",
    [{}, {"checkpointing": False}, {"early_stop": False}, {"recompute": "attention"}, {"dtype": "fp32"}, {"lora": 4}],
)
@pytest.mark.parametrize("attention", ["flash", "math"])
def test_masks_by_hand(family: str, kernels: str, axes: dict[str, Any], attention: str) -> None:
    """A byte per element of the embedding's output, and of those of attention and of the feed-forward layer in each of
    three layers that keep theirs; of scores with what they drop, unless attention is recomputed. All come back."""
    shape = entry(family if family == "gpt" else "llama")
    if family == "gemma":
        shape = structs.replace(shape, post_norms=True, qk_norm=True)
    if family == "experts":
        shape = structs.replace(shape, experts=ExpertsShape(count=4, per_token=2, ffn=32))
    with_masks, without = (
        workload_of(shape, batch=2, sequence=8, kernels=kernels, attention=attention, dropout=rate, **axes)
        for rate in (0.1, 0)
    )
    assert (with_masks.dropout, without.dropout) == ("0.1", None)
    at_loss = [next(m for m in w.moments if m.module == "lm_head").start_bytes for w in (with_masks, without)]
    layers = 0 if axes.get("checkpointing", "recompute" not in axes) else 3
    hidden, scores = TOKENS * 16, 2 * 4 * 8**2
    width = 3 if kernels == "megatron" else 5
    of_scores = scores * width if attention == "math" and "recompute" not in axes else 0
    assert at_loss[0] - at_loss[1] == hidden * (1 + 2 * layers) + layers * of_scores
    assert with_masks.moments[-1].end_bytes == with_masks.moments[0].start_bytes
    assert with_masks.peak_non_model_bytes > without.peak_non_model_bytes
    assert with_masks.uses == without.uses


def test_masks_are_asked_for_in_words() -> None:
    said = preset("gpt2", batch=1, seq=8, dropout="hidden=0.1,attention=0.2")
    assert said.dropout == "hidden=0.1,attention=0.2" and "hidden=0.1,attention=0.2 dropout" in said.notes
    assert variant(said, batch=2).dropout == said.dropout and variant(said, dropout=0).dropout is None
    for wrong in ("often", 1, -0.1, True, "scores=0.1", "hidden=0.1,hidden=0.1", ""):
        with pytest.raises(ModelError, match=r"it must be a rate from 0 to below 1, such as 0\.1, or hidden=0\.1 or "):
            preset("gpt2", batch=1, seq=8, dropout=wrong)
    for name, seq in (("bert-base", 8), ("vit-b-16", 197)):
        with pytest.raises(ModelError, match=rf"{name}: dropout is 0\.1; it is written for a gpt or llama, or trace"):
            preset(name, batch=1, seq=seq, dropout=0.1)
    with pytest.raises(ModelError, match="of a llama Megatron alone has masks; give kernels megatron without autocast"):
        preset("llama-3.2-1b", batch=1, seq=8, dropout=0.1)


def test_a_flavour_nobody_knows_is_refused() -> None:
    with pytest.raises(ModelError, match="kernels is 'fast'; known flavours are eager, fused, compiled, megatron"):
        preset("gpt2", batch=1, seq=8, kernels="fast")
    assert variant(preset("gpt2", batch=1, seq=8, kernels="fused"), batch=2).kernels == "fused"


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["bert-base", "vit-b-16"])
def test_a_family_runs_in_the_flavours_it_is_written_for(name: str, kernels: str) -> None:
    def ask() -> Workload:
        return preset(name, batch=1, seq=None if name == "vit-b-16" else 8, kernels=kernels)

    if kernels == "eager":
        assert ask().kernels == "eager"
        return
    with pytest.raises(ModelError, match=f"{name}: kernels is '{kernels}'; presets .* have eager kernels only; trace"):
        ask()


def test_the_math_kernel_keeps_the_scores() -> None:
    peaks = {
        a: preset("gpt2", batch=4, seq=512, checkpointing=False, attention=a).peak_non_model_bytes for a in ATTENTION
    }
    assert peaks["flash"] == peaks["efficient"]
    scores = 4 * 12 * 512 * 512 * 4  # batch, heads, s^2, fp32
    assert peaks["math"] - peaks["flash"] >= 12 * scores


def test_four_moments_a_layer_each_way() -> None:
    w = preset("12B", batch=1, seq=128)  # 60 layers: 4 FWD, 4 recompute, 4 BWD
    count = {p: sum(m.phase is p for m in w.moments) for p in Phase}
    assert count[Phase.RECOMPUTE] == 240
    assert len(w.moments) == 12 * 60 + 11
    assert [m.name for m in w.moments][-2:] == ["backward-end", "step"]
    assert w.moments[0].name == "begin:<root>"


def test_micro_batches_repeat_the_first() -> None:
    one, four = preset("1B", batch=2, seq=64), preset("1B", batch=2, seq=64, micro_batches=4)
    assert len(four.moments) == 4 * (len(one.moments) - 1) + 1
    assert four.flops == 4 * one.flops
    assert four.tokens == 512


def test_a_sequence_left_out_is_all_positions() -> None:
    assert preset("gpt2", batch=1).sequence == 1024
    assert preset("vit-b-16", batch=1).sequence == 197


def test_rotary_positions_have_no_size() -> None:
    """llama-3-8b has 8,192 positions. Twice as many tokens take twice the memory, in the same model."""
    within, beyond = (preset("llama-3-8b", batch=1, seq=seq) for seq in (8192, 16384))
    assert (within.notes, beyond.notes) == ("", "beyond its 8,192 positions (rotary)")
    assert beyond.params == within.params
    assert beyond.peak_non_model_bytes == 2 * within.peak_non_model_bytes
    longer = preset("llama-3-8b", batch=1, seq=102_400, lora="r=8")
    assert longer.notes.startswith("beyond its 8,192 positions (rotary), LoRA r=8")


def test_names_and_values_a_preset_cannot_have() -> None:
    with pytest.raises(UnknownName, match=r"unknown model '12Bx'.*did you mean .*12B"):
        preset("12Bx", batch=1)
    for arguments, words in (
        ({"batch": 0}, "batch = 0: it must be a whole number of at least 1"),
        ({"batch": 1, "seq": 2048}, "sequence is 2048; the model has learned 1024 positions"),
        ({"batch": 1, "micro_batches": 0}, "micro_batches = 0"),
        (
            {"batch": 1, "micro_batches": 10**40},
            f"micro_batches = {10**40}: it must be a whole number of at most 10{8 * '0'}",
        ),
        ({"batch": 10**5000}, "batch = a number of thousands of digits: it must be"),
        ({"batch": 1, "dtype": "int8"}, "dtype is 'int8'; known dtypes are fp32, bf16, fp16"),
        ({"batch": 1, "attention": "eager"}, "attention is 'eager'; known kernels are flash"),
    ):
        with pytest.raises(ModelError, match=f"model gpt2: {words}"):
            preset("gpt2", **arguments)  # type: ignore[arg-type]
    with pytest.raises(
        TraceError, match=r"micro_batches is 20000; one micro-batch has 154 moments .* so give at most 12987"
    ):
        preset("gpt2", batch=1, micro_batches=20_000)
    with pytest.raises(ModelError, match="sequence is 100; an image of this model is 197 tokens"):
        preset("vit-b-16", batch=1, seq=100)


def test_memory_of_an_operator_is_no_operator_of_its_own() -> None:
    """Behind q, k and v: fused attention with its log-sums, the output's product, the residual sum."""
    w = preset("gpt2", batch=2, seq=64, dtype="bf16", checkpointing=False)
    assert next(m for m in w.moments if m.name == "end:transformer.h.0.attn.c_attn").operators == 3
