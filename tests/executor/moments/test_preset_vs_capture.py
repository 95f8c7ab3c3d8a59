"""A preset is held against a capture of the same model: same parameters, flops and bytes, though one needs no torch.

Required: parameters equal, flops within 2 %, peak non-model bytes within 10 %. Reached: flops equal, peaks within
0.2 % (what is left: label and position tensors of a few bytes per token, and gradients of biases that a capture sees go
one by one). The preset's moments are coarser, so only figures that do not depend on the clock are compared.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from pathlib import Path

import pytest

from pstar_sim.catalog.model_shapes import ModelEntry, model_entry
from pstar_sim.workload.presets import preset, workload_of
from pstar_sim.workload.workload import Phase, UseKind, Workload, product_flops

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch.nn import functional
from transformers.integrations import sdpa_attention

from executor.capture import capture
from executor.models import config_of

COPIES = "query.contiguous()" in inspect.getsource(sdpa_attention)
"""Whether this transformers copies queries, keys and values before the kernel, as versions before 4.56 do, and repeats
the keys of grouped heads. A capture counts the copies (4 to 12 % of the peak); presets have none."""


def grouped_keys_take_flash() -> bool:
    """Whether torch's flash attention on a processor takes fewer keys than queries. In torch 2.6 it does not: the math
    kernel runs, and captures say so."""
    query, key = torch.ones(1, 2, 2, 8, requires_grad=True), torch.ones(1, 1, 2, 8, requires_grad=True)
    result = functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    return "FlashAttention" in type(result.grad_fn).__name__


of_today = pytest.mark.skipif(COPIES, reason="this transformers copies queries, keys and values; presets do not")
grouped = pytest.mark.skipif(not grouped_keys_take_flash(), reason="this torch runs the math kernel for grouped keys")


def assert_alike(shape: Workload, captured: Workload) -> None:
    assert shape.params == captured.params
    assert shape.fingerprint == captured.fingerprint  # names, shapes, dtypes and ties too
    assert shape.attention == captured.attention
    assert shape.flops == pytest.approx(captured.flops, rel=1e-3)
    assert shape.peak_non_model_bytes == pytest.approx(captured.peak_non_model_bytes, rel=2e-3)
    forward = [sum(m.flops for m in w.moments if m.phase is Phase.FWD) for w in (shape, captured)]
    assert forward[0] == pytest.approx(forward[1], rel=1e-3)
    peaks = [max(m.peak_bytes for m in w.moments if m.phase is Phase.FWD) for w in (shape, captured)]
    assert peaks[0] == pytest.approx(peaks[1], rel=5e-3)
    assert products(shape) == products(captured)
    assert attentions(shape) == attentions(captured)
    for kind in UseKind:
        assert {u.tensor for u in shape.uses if u.kind is kind} == {u.tensor for u in captured.uses if u.kind is kind}


def attentions(w: Workload) -> Counter[tuple[int, ...]]:
    return Counter(call for m in w.moments for call in m.attentions)


def products(w: Workload) -> Counter[tuple[int, ...]]:
    """How often each product is computed, but for those of patches, which a model computes as a convolution."""
    rows = [row for m in w.moments for row in m.products if 3 * 16**2 not in row]
    return Counter((batches, k, *sorted((m, n))) for batches, m, k, n in rows)


SHAPES = {
    ("gpt2", 2, 128, "bf16"): [False],
    ("gpt2", 8, 1024, "bf16"): [],
    ("gpt2", 4, 512, "fp32"): [True],
    ("gpt2-medium", 2, 1024, "bf16"): [],
    ("qwen2.5-0.5b", 2, 256, "bf16"): [True],
    ("qwen2.5-0.5b", 2, 256, "fp32"): [],
    ("bert-base", 4, 128, "bf16"): [True],
    ("vit-b-16", 4, 197, "bf16"): [False],
}
"""Model, batch, sequence, dtype -> with checkpointing or not; with --whole each both ways."""


def of_few_layers(name: str, folder: Path) -> str:
    """Writes the configuration of a preset with four layers, of which the two between are alike."""
    config, architecture = config_of(model_entry(name))
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:4]
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return f"hf:{folder}"


@of_today
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "sequence", "dtype", "checkpointing"),
    [
        pytest.param(
            *shape,
            checkpointing,
            marks=[pytest.mark.whole] * (checkpointing not in some) + [grouped] * shape[0].startswith("qwen"),
        )
        for shape, some in SHAPES.items()
        for checkpointing in (False, True)
    ],
)
def test_preset_and_capture_agree(
    name: str, batch: int, sequence: int, dtype: str, checkpointing: bool, tmp_path: Path, whole: bool
) -> None:
    """Of four layers but for --whole and the first row."""
    if not whole and (name, batch) != ("gpt2", 2):
        name = of_few_layers(name, tmp_path)
    assert_alike(
        preset(name, batch=batch, seq=sequence, dtype=dtype, checkpointing=checkpointing),
        capture(name, batch=batch, sequence=sequence, dtype=dtype, checkpointing=checkpointing),
    )


@of_today
@pytest.mark.parametrize(
    ("name", "sequence", "checkpointing"),
    [
        ("gpt2", 256, True),
        ("bert-base", 128, False),
        *(pytest.param(*row, marks=pytest.mark.whole) for row in (("gpt2", 256, False), ("bert-base", 128, True))),
    ],
)
def test_under_autocast(name: str, sequence: int, checkpointing: bool, tmp_path: Path, whole: bool) -> None:
    """Of four layers but for --whole."""
    name = name if whole else of_few_layers(name, tmp_path)
    shape = preset(name, batch=2, seq=sequence, autocast="bf16", checkpointing=checkpointing)
    captured = capture(name, batch=2, sequence=sequence, autocast="bf16", checkpointing=checkpointing)
    assert_alike(shape, captured)
    assert (shape.dtype, shape.autocast) == (captured.dtype, captured.autocast) == ("fp32", "bf16")
    assert shape.notes.split(", ")[-1] == captured.notes.split("; ")[-1] == "bf16 autocast"


@of_today
@grouped
@pytest.mark.parametrize(
    ("precision", "checkpointing"),
    [
        pytest.param(precision, checkpointing, marks=[pytest.mark.whole] if (n + checkpointing) % 2 else [])
        for n, precision in enumerate(({"dtype": "bf16"}, {"dtype": "fp32"}, {"autocast": "fp16"}))
        for checkpointing in (False, True)
    ],
)
def test_a_small_llama_with_grouped_keys_and_its_own_head(
    tmp_path: Path, precision: dict[str, str], checkpointing: bool
) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 688,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 500,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    captured = capture(f"hf:{path}", batch=2, sequence=128, checkpointing=checkpointing, **precision)
    entry = ModelEntry(
        name="small", family="llama", layers=3, hidden=256, heads=8, kv_heads=2, ffn=688, vocab=500, max_seq=512,
        tied=False, params=captured.params, source="test",
    )  # fmt: skip
    assert_alike(workload_of(entry, batch=2, sequence=128, checkpointing=checkpointing, **precision), captured)


@of_today
@pytest.mark.parametrize(
    ("precision", "checkpointing"),
    [
        pytest.param({"dtype": "bf16"}, False, marks=pytest.mark.whole),
        ({"dtype": "bf16"}, True),
        pytest.param({"dtype": "fp32"}, True, marks=pytest.mark.whole),
        ({"autocast": "bf16"}, False),
    ],
)
def test_masks_of_dropout_are_those_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: dict[str, str], checkpointing: bool
) -> None:
    """There dropout is native_dropout, which keeps a byte per element. Flash attention on a processor drops nothing."""
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 3, "n_head": 4,
        "n_positions": 256, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.1,
        "embd_pdrop": 0.1, "attn_pdrop": 0.0,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    monkeypatch.setattr(functional, "dropout", lambda x, p, training, inplace: torch.native_dropout(x, p, training)[0])
    captured = capture(f"hf:{path}", batch=2, sequence=256, checkpointing=checkpointing, **precision)
    entry = ModelEntry(
        name="small", family="gpt", layers=3, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=50, max_seq=256,
        tied=True, params=captured.params, source="test",
    )  # fmt: skip
    axes = {"checkpointing": checkpointing, "dropout": 0.1, **precision}
    assert_alike(workload_of(entry, batch=2, sequence=256, **axes), captured)


def test_the_math_kernel_is_modelled_roughly() -> None:
    shape = preset("gpt2", batch=2, seq=512, checkpointing=False, attention="math")
    captured = capture("gpt2", batch=2, sequence=512, dtype="bf16", checkpointing=False, attention="math")
    assert shape.attention == captured.attention == "math"
    assert shape.flops == captured.flops == sum(map(product_flops, (p for m in captured.moments for p in m.products)))
    assert products(shape) == products(captured)
    assert attentions(shape) == attentions(captured)
    assert shape.peak_non_model_bytes == pytest.approx(captured.peak_non_model_bytes, rel=0.1)
