"""Families with odd tensor sizes: state spaces, linear attention beside experts, matrix memories, windows, queries,
convolutions in one dimension with weights in two parts and in two. Under a plan, each optimizer has the plain loop's
bits. The autoencoder of diffusers runs where that package is installed (on PYTHONPATH)."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import train
from thinned import by_turns
from torch import nn

import executor
from executor.capture import capture_module
from executor.descriptions import Optimizer
from pstar_sim.errors import DoesNotFit
from pstar_sim.workload.optimizers import OPTIMIZERS as OF_PLANS
from pstar_sim.workload.workload import Workload

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

Draw = Callable[[torch.Generator], dict[str, Any]]


def text(draw: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(99, (2, 12), generator=draw)
    return {"input_ids": ids, "labels": ids.clone()}


def zamba2() -> tuple[nn.Module, Draw]:
    config = transformers.Zamba2Config(
        vocab_size=99, hidden_size=36, num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "hybrid"],
        num_attention_heads=4, num_key_value_heads=4, attention_head_dim=18, intermediate_size=52, mamba_d_state=10,
        mamba_headdim=12, n_mamba_heads=6, mamba_ngroups=1, num_mem_blocks=1, chunk_size=4, use_mem_rope=False,
        use_cache=False,
    )  # fmt: skip
    return transformers.Zamba2ForCausalLM(config), text


def qwen3_next() -> tuple[nn.Module, Draw]:
    config = transformers.Qwen3NextConfig(
        vocab_size=99, hidden_size=36, intermediate_size=50, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=12, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=28, layer_types=["linear_attention", "full_attention"], use_cache=False,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config), text


def swin() -> tuple[nn.Module, Draw]:
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=18, depths=[2, 2], num_heads=[3, 6], window_size=4, num_labels=5
    )

    def images(draw: torch.Generator) -> dict[str, Any]:
        return {
            "pixel_values": torch.randn(2, 3, 32, 32, generator=draw),
            "labels": torch.randint(5, (2,), generator=draw),
        }

    return transformers.SwinForImageClassification(config), images


def detr() -> tuple[nn.Module, Draw]:
    backbone = transformers.ResNetConfig(
        embedding_size=10, hidden_sizes=[10, 14], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone=None, use_pretrained_backbone=False, backbone_config=backbone, d_model=24,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=46,
        decoder_ffn_dim=46, num_queries=7, num_labels=4, dropout=0.0,
    )  # fmt: skip

    def boxes(draw: torch.Generator) -> dict[str, Any]:
        found = {"class_labels": torch.tensor([1, 2]), "boxes": torch.rand(2, 4, generator=draw) * 0.4 + 0.2}
        return {"pixel_values": torch.randn(1, 3, 64, 64, generator=draw), "labels": [found]}

    return transformers.DetrForObjectDetection(config), boxes


class Autoencoder(nn.Module):
    """EnCodec without its codebooks, which learn without gradients."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.EncodecConfig(
            num_filters=6, hidden_size=18, upsampling_ratios=[4, 2], num_lstm_layers=1, codebook_size=16,
            codebook_dim=18, target_bandwidths=[1.5], num_residual_layers=1,
        )  # fmt: skip
        whole = transformers.EncodecModel(config)
        self.encoder, self.decoder = whole.encoder, whole.decoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = ((self.decoder(self.encoder(x)) - x) ** 2).mean()
        return loss


def encodec() -> tuple[nn.Module, Draw]:
    return Autoencoder(), lambda draw: {"x": torch.randn(2, 1, 64, generator=draw)}


def xlstm() -> tuple[nn.Module, Draw]:
    config = transformers.xLSTMConfig(
        vocab_size=99, hidden_size=36, embedding_dim=36, num_hidden_layers=2, num_blocks=2, num_heads=2, chunk_size=4,
        ffn_round_up_to_multiple_of=2, max_inference_chunksize=12, use_cache=False,
    )  # fmt: skip
    return transformers.xLSTMForCausalLM(config), text


class Images(nn.Module):
    """The autoencoder of a latent diffusion model, of which a loop takes the mean of the latents."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = pytest.importorskip("diffusers").AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=3,
            block_out_channels=(6, 10), layers_per_block=1, norm_num_groups=2, sample_size=16,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latents = self.vae.encode(x).latent_dist
        loss: torch.Tensor = ((self.vae.decode(latents.mode()).sample - x) ** 2).mean() + 1e-3 * latents.kl().mean()
        return loss


def vae() -> tuple[nn.Module, Draw]:
    return Images(), lambda draw: {"x": torch.randn(2, 3, 16, 16, generator=draw)}


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    optimizer: torch.optim.Optimizer = Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False)
    return optimizer


def in_8_bits(parameters: Any) -> torch.optim.Optimizer:
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("no bitsandbytes")
    from bitsandbytes.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(parameters, lr=1e-3)
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "adafactor": adafactor,
    "8 bits": in_8_bits,
}


def seeded(draw_batch: Draw) -> Iterator[dict[str, Any]]:
    """Batches from a seed, and the dropout of the models too."""
    torch.manual_seed(1)
    draw = torch.Generator().manual_seed(5)
    while True:
        yield draw_batch(draw)


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    output: Any = model(**batch)
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


CAPTURED: dict[object, Workload] = {}
"""Family -> one micro-batch."""


def captured(family: object, model: nn.Module, batch: Any, *, groups: Optimizer, **options: Any) -> Workload:
    """Captures a family once: all parameters are in one group, so the optimizer's states alone differ."""
    if family not in CAPTURED:
        CAPTURED[family] = capture_module(model, batch, groups=groups, **options)
    return replace(CAPTURED[family], optimizer=OF_PLANS[groups.planned])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "least", "name", "policy", "micro_batches"),
    by_turns(
        [(zamba2, 4), (qwen3_next, 16), (xlstm, 2), (swin, 8), (detr, 4), (encodec, 4), (vae, 4)],
        [("adamw", "tide", 2), ("adafactor", "zero_offload", 1), ("8 bits", "tide", 2)],
    ),
)
def test_is_the_plain_loop_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
    family: Callable[[], tuple[nn.Module, Draw]],
    least: int,
    name: str,
    policy: str,
    micro_batches: int,
    whole: bool,
) -> None:
    """least: GPU memory as a multiple of the weights, or the next one at which the policy has room. Two steps of each
    family with one optimizer, with --whole three with each. On one thread: with several, kernels such as those of layer
    norm sum in another order under a plan."""
    monkeypatch.setattr("executor.offloading.capture_module", partial(captured, family))
    steps = 3 if whole else 2
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        reference, batch = family()
        reference.train()
        model = copy.deepcopy(reference)
        plain = OPTIMIZERS[name](reference.parameters())
        losses = train(reference, plain, seeded(batch), steps, micro_batches, loss_of=loss_of)
        size, example = sum(4 * p.numel() for p in model.parameters()), batch(torch.Generator().manual_seed(9))
        own = OPTIMIZERS[name](model.parameters())
        for share in (least, 2 * least, 4 * least):
            try:
                _, optimizer = executor.offload(
                    model, own, example, gpu_memory=size * share, micro_batches=micro_batches, policy=policy,
                    loss=loss_of,
                )  # fmt: skip
                break
            except DoesNotFit:
                continue
        assert train(model, optimizer, seeded(batch), steps, micro_batches, loss_of=loss_of) == losses
        assert optimizer.session.deviations == 0
        optimizer.session.close()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters()))
    finally:
        torch.set_num_threads(threads)
