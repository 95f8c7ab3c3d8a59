"""A preset's kernel flavours are held against modules that run such kernels here: captured, and recorded for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from executor.capture import capture_module
from executor.models import BuiltModel, build
from executor.recording.record import record
from pstar_sim.catalog.model_shapes import ModelEntry
from pstar_sim.workload.kernels import CAPTURED
from pstar_sim.workload.presets import workload_of
from pstar_sim.workload.workload import Workload

pytest.importorskip("transformers")

LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE, BATCH = 3, 64, 4, 300, 24, 2
ACTIVATIONS = {"eager": "gelu_new", "fused": "gelu_pytorch_tanh", "megatron": "gelu_pytorch_tanh"}
PEAK_TOLERANCE = 0.03


class FusedLoss(torch.autograd.Function):
    """Cross entropy that keeps the logits and a log-sum of each token; backward is as large as the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        sums = torch.stack([row.float().logsumexp(0) for row in logits])
        ctx.save_for_backward(logits, sums, labels)
        return (sums - logits.gather(1, labels[:, None])[:, 0].float()).mean()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        logits, sums, labels = ctx.saved_tensors
        found = torch.empty_like(logits)
        for row, whole, label, out in zip(logits, sums, labels, found):
            out.copy_(((row.float() - whole).exp() - functional.one_hot(label, len(row))) * (grads[0] / len(labels)))
        return found, None


class InPlaceLoss(torch.autograd.Function):
    """Cross entropy over fp32 logits that turns them into probabilities, and these into their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wide = logits.float()
        wide -= wide.logsumexp(1, keepdim=True)
        loss = -wide.gather(1, labels[:, None]).mean()
        ctx.save_for_backward(wide.exp_(), labels)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        wide, labels = ctx.saved_tensors
        wide.scatter_add_(1, labels[:, None], torch.full((len(labels), 1), -1.0))
        return wide.mul_(grads[0] / len(labels)).bfloat16(), None


def loss_with(function: type[torch.autograd.Function]) -> Any:
    def loss(module: Any, batch: Any) -> torch.Tensor:
        logits = module(input_ids=batch["input_ids"], use_cache=False).logits
        found: torch.Tensor = function.apply(logits.view(-1, VOCABULARY), batch["labels"].view(-1))
        return found

    return loss


LOSSES = {"fused": {"loss": loss_with(FusedLoss)}, "megatron": {"loss": loss_with(InPlaceLoss)}, "eager": {}}


def model_with(folder: Path, kernels: str, device: str, *, checkpointing: bool) -> BuiltModel:
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": HIDDEN, "n_layer": LAYERS,
        "n_head": HEADS, "n_positions": SEQUENCE, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0,
        "activation_function": ACTIVATIONS[kernels], "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    name = f"hf:{folder / 'config.json'}"
    return build(name, batch=BATCH, sequence=SEQUENCE, dtype="bf16", checkpointing=checkpointing, device=device)


def captured(model: BuiltModel, kernels: str) -> Workload:
    return capture_module(model.module, model.example_batch, name="small", **LOSSES[kernels])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kernels", list(ACTIVATIONS))
def test_a_flavour_has_the_peak_of_a_module_with_such_kernels(
    tmp_path: Path, kernels: str, checkpointing: bool
) -> None:
    found = captured(model_with(tmp_path, kernels, "meta", checkpointing=checkpointing), kernels)
    entry = ModelEntry(
        name="small", family="gpt", layers=LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=HEADS, ffn=4 * HIDDEN,
        vocab=VOCABULARY, max_seq=SEQUENCE, tied=True, params=found.params, source="test",
    )  # fmt: skip
    made = workload_of(entry, batch=BATCH, sequence=SEQUENCE, checkpointing=checkpointing, kernels=kernels)
    assert (made.kernels, found.kernels) == (kernels, CAPTURED)
    assert made.flops == found.flops
    assert made.peak_non_model_bytes == pytest.approx(found.peak_non_model_bytes, rel=PEAK_TOLERANCE)


@pytest.mark.parametrize("kernels", list(ACTIVATIONS))
def test_a_captured_peak_is_the_recorded_one(tmp_path: Path, kit: Any, kernels: str) -> None:
    model = model_with(tmp_path, kernels, "cpu", checkpointing=False)
    found = captured(model, kernels)
    machine = kit.small_machine(2 * found.peak_non_model_bytes + sum(t.bytes for t in found.tensors))
    ran = record(model.module, [model.example_batch], machine, name="small", timed=1, **LOSSES[kernels])
    assert ran.kernels == CAPTURED
    assert ran.peak_non_model_bytes == pytest.approx(found.peak_non_model_bytes, rel=PEAK_TOLERANCE)
