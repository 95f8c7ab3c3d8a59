"""Losses in pieces: bytes by hand, flops, and what they have in common with the whole loss."""

from dataclasses import replace
from pathlib import Path

import pytest

from pstar_sim.errors import ModelError
from pstar_sim.workload.presets import preset, variant
from pstar_sim.workload.trace import load_trace, save_trace
from pstar_sim.workload.workload import Moment, UseKind, Workload

HIDDEN, VOCAB = 2048, 128256  # of Llama 3.2 1B, whose head is tied to the embedding; of 3B untied here


def model(loss: str, tokens: int = 4096, **changes: object) -> Workload:
    return preset("llama-3.2-1b", batch=1, seq=tokens, kernels="fused", loss=loss, dtype="bf16", **changes)


def head(w: Workload, phase: str) -> Moment:
    return next(m for m in w.moments if m.module == "lm_head" and m.phase == phase)


def test_a_fused_loss_by_hand() -> None:
    """ceil(128256 / 2048) = 63 pieces, so 4096 / 63 tokens, rounded up to 128, are one piece. The gradients of hidden
    state and weight, and the labels, are alive beside one piece's logits and its gradient of the weight in bf16 and
    fp32."""
    forward = head(model("fused"), "FWD")
    hidden, weight = 4096 * HIDDEN * 2, VOCAB * HIDDEN * 2
    assert forward.peak_bytes - forward.start_bytes == hidden + weight + 4096 * 8 + 128 * VOCAB * 2 + 3 * weight
    assert len(forward.products) == 32 * 3 and forward.products[0] == (1, 128, HIDDEN, VOCAB)
    assert forward.end_bytes - forward.start_bytes == weight  # the gradient took the hidden state's place
    assert head(model("fused"), "BWD").flops == 0


def test_a_chunked_loss_by_hand() -> None:
    """512 tokens are a piece: logits in bf16 and fp32, and their log-softmax. Backward has the weight's gradient twice
    while the second piece is added."""
    forward, backward = (head(model("chunked"), phase) for phase in ("FWD", "BWD"))
    piece, weight, hidden = 512 * VOCAB, VOCAB * HIDDEN * 2, 4096 * HIDDEN * 2
    assert forward.peak_bytes - forward.start_bytes == piece * (2 + 4 + 4)
    assert backward.peak_bytes - backward.start_bytes == hidden + weight + max(piece * 10, piece * 2 + weight)
    assert len(forward.products) == 8 and len(backward.products) == 8 * 3


@pytest.mark.parametrize("loss", ["chunked", "fused"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b", "gpt2"])
def test_pieces_change_nothing_but_head_and_loss(name: str, loss: str) -> None:
    whole, pieces = (preset(name, batch=2, seq=96, loss=x, dtype="bf16", checkpointing=False) for x in ("whole", loss))
    assert [m.name for m in pieces.moments] == [m.name for m in whole.moments]
    assert pieces.uses == whole.uses and pieces.tensors == whole.tensors
    last = max(i for i, m in enumerate(whole.moments) if m.module in ("lm_head", "<root>") and m.phase == "BWD")
    assert pieces.moments[-2].end_bytes == whole.moments[-2].end_bytes
    first = next(i for i, m in enumerate(whole.moments) if m.module == "lm_head")
    assert pieces.moments[: first - 1] == whole.moments[: first - 1] and last > first
    again = 2 * 2 * 96 * whole.tensors[0].numel if loss == "chunked" else 0  # head once more in backward
    assert sum(m.flops for m in pieces.moments) == sum(m.flops for m in whole.moments) + again


def test_long_sequences_need_less_memory_in_pieces() -> None:
    peaks = [model(loss, 65536).peak_non_model_bytes for loss in ("whole", "chunked", "fused")]
    assert peaks[0] > 2 * peaks[1] > 2 * peaks[2]


def test_a_frozen_head_has_no_gradient() -> None:
    """LoRA: a fused loss holds the gradient of the hidden state alone."""
    forward = head(model("fused", lora="r=8"), "FWD")
    assert forward.end_bytes == forward.start_bytes
    assert len(forward.products) == 32 * 2
    assert not [u for u in model("chunked", lora=8).uses if u.tensor == 0 and u.kind is UseKind.GRADIENT]


def test_it_comes_back_from_a_file_and_in_a_variant(tmp_path: Path) -> None:
    w = model("fused", 64)
    save_trace([w, replace(model("whole", 64), batch=2)], tmp_path / "w.parquet")
    back = load_trace(tmp_path / "w.parquet", batch=1)
    assert (back.loss, back.moments, back.notes) == ("fused", w.moments, "fused loss")
    assert load_trace(tmp_path / "w.parquet", batch=2).loss == "whole"
    assert variant(w, batch=2).loss == "fused" and "fused loss" in variant(w, batch=2).notes


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ModelError, match="loss is 'tiled'; known losses are whole, chunked, fused"):
        model("tiled")
    with pytest.raises(ModelError, match="bert-large: loss is 'fused'; only language models have"):
        preset("bert-large", batch=1, loss="fused")
