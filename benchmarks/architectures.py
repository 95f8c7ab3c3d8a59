"""Small models of many architectures of transformers under a plan beside plain PyTorch: the cells of semantics.py.

Each model trains three steps of two micro-batches, with clipping, in fp32, bf16 and fp16, under two policies a dtype,
which take turns. Writes benchmarks/results/architectures.json; exit status 1 if a cell fails.

    python benchmarks/architectures.py [--only TEXT] [--policy NAME ...] [--device cuda] [--no-result]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from semantics import load_rows, main

rows = load_rows()
POLICIES = ("tide", "optimal", "patrickstar")

Draw = Callable[[torch.Generator], Any]

TEXT = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2}
BERT = {**TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ: dict[str, Any] = {
    "d_model": 32, "vocab_size": 96, "dropout": 0.0,
    **{f"{side}_{size}": number for side in ("encoder", "decoder")
       for size, number in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 64))},
}  # fmt: skip
PICTURE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 16,
    "patch_size": 8, "num_labels": 5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
GPT_J = {
    "n_embd": 32, "n_layer": 2, "vocab_size": 96, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip


def labelled(key: str, *shape: int) -> Draw:
    """Two rows of normally distributed numbers under `key`, each with one of five labels."""

    def draw(generator: torch.Generator) -> Any:
        values = torch.randn(2, *shape, generator=generator)
        return {key: values, "labels": torch.randint(0, 5, (2,), generator=generator)}

    return draw


def pictures(size: int) -> Draw:
    return labelled("pixel_values", 3, size, size)


def videos(generator: torch.Generator) -> Any:
    return labelled("pixel_values", 2, 3, 16, 16)(generator)


def speech(generator: torch.Generator) -> Any:
    frames = torch.randn(2, 8, 24, generator=generator)
    return {"input_features": frames, "labels": torch.randint(3, 96, (2, 8), generator=generator)}


def classified_text(generator: torch.Generator) -> Any:
    ids = torch.randint(0, 96, (2, 12), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(0, 5, (2,), generator=generator)}


def series(generator: torch.Generator) -> Any:
    past, future = (torch.randn(2, length, 2, generator=generator) for length in (32, 4))
    return {"past_values": past, "future_values": future}


text: Draw = rows.text()

# name -> (names of its config and model class, their figures, its batches)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], Draw]] = {
    # decoders
    "biogpt": ("BioGptConfig:BioGptForCausalLM", BERT, text),
    "codegen": ("CodeGenConfig:CodeGenForCausalLM", {**GPT_J, "n_head": 4, "rotary_dim": 4, "n_ctx": 32}, text),
    "cohere2": ("Cohere2Config:Cohere2ForCausalLM", {**GROUPED, "sliding_window": 4}, text),
    "diffllama": (
        "DiffLlamaConfig:DiffLlamaForCausalLM", {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 4}, text
    ),
    "exaone4": ("Exaone4Config:Exaone4ForCausalLM", {**GROUPED, "sliding_window": 4}, text),
    "falcon": (
        "FalconConfig:FalconForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}, text,
    ),
    "glm4": ("Glm4Config:Glm4ForCausalLM", {**GROUPED, "head_dim": 16}, text),
    "gpt_neo": (
        "GPTNeoConfig:GPTNeoForCausalLM",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]],
         "window_size": 4, "vocab_size": 96, "max_position_embeddings": 32, "resid_dropout": 0.0,
         "embed_dropout": 0.0, "attention_dropout": 0.0}, text,
    ),
    "gptj": ("GPTJConfig:GPTJForCausalLM", {**GPT_J, "n_head": 2, "rotary_dim": 8}, text),
    "granite": ("GraniteConfig:GraniteForCausalLM", GROUPED, text),
    "helium": ("HeliumConfig:HeliumForCausalLM", {**GROUPED, "head_dim": 16}, text),
    "mpt": (
        "MptConfig:MptForCausalLM", {"d_model": 32, "n_heads": 2, "n_layers": 2, "vocab_size": 96, "max_seq_len": 32},
        text,
    ),
    "nanochat": ("NanoChatConfig:NanoChatForCausalLM", GROUPED, text),
    "olmo2": ("Olmo2Config:Olmo2ForCausalLM", GROUPED, text),
    "smollm3": ("SmolLM3Config:SmolLM3ForCausalLM", GROUPED, text),
    "stablelm": ("StableLmConfig:StableLmForCausalLM", GROUPED, text),
    "starcoder2": (
        "Starcoder2Config:Starcoder2ForCausalLM", {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0}, text
    ),
    "xglm": (
        "XGLMConfig:XGLMForCausalLM",
        {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 2, "vocab_size": 96,
         "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0}, text,
    ),
    "xlnet": (
        "XLNetConfig:XLNetForSequenceClassification",
        {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64, "vocab_size": 96, "dropout": 0.0, "num_labels": 5,
         "summary_last_dropout": 0.0}, classified_text,
    ),
    # experts
    "deepseek_v3": (
        "DeepseekV3Config:DeepseekV3ForCausalLM",
        {**GROUPED, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
         "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16,
         "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}, text,
    ),
    "gpt_oss": (
        "GptOssConfig:GptOssForCausalLM",
        {**GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, text,
    ),
    "granitemoe": (
        "GraniteMoeConfig:GraniteMoeForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, text
    ),
    # recurrences
    "lfm2": (
        "Lfm2Config:Lfm2ForCausalLM",
        {**GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8}, text,
    ),
    "mamba": (
        "MambaConfig:MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 4},
        text,
    ),
    "mamba2": (
        "Mamba2Config:Mamba2ForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 8, "num_heads": 4, "head_dim": 16,
         "n_groups": 1, "chunk_size": 4}, text,
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig:RecurrentGemmaForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 96,
         "vocab_size": 96, "lru_width": 32, "attention_window_size": 8}, text,
    ),
    # encoders
    "albert": ("AlbertConfig:AlbertForMaskedLM", {**BERT, "embedding_size": 24}, text),
    "deberta_v2": (
        "DebertaV2Config:DebertaV2ForMaskedLM",
        {**BERT, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}, text,
    ),
    "distilbert": (
        "DistilBertConfig:DistilBertForMaskedLM",
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 96, "max_position_embeddings": 32,
         "dropout": 0.0, "attention_dropout": 0.0}, text,
    ),
    "electra": ("ElectraConfig:ElectraForMaskedLM", {**BERT, "embedding_size": 24}, text),
    "esm": (
        "EsmConfig:EsmForMaskedLM", {**BERT, "mask_token_id": 1, "position_embedding_type": "rotary"}, text
    ),
    "fnet": (
        "FNetConfig:FNetForMaskedLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 96,
         "max_position_embeddings": 32, "hidden_dropout_prob": 0.0}, text,
    ),
    "modernbert": (
        "ModernBertConfig:ModernBertForMaskedLM", {**TEXT, "global_attn_every_n_layers": 2, "local_attention": 4}, text
    ),
    "nystromformer": (
        "NystromformerConfig:NystromformerForMaskedLM", {**BERT, "num_landmarks": 4, "segment_means_seq_len": 12}, text
    ),
    "roformer": ("RoFormerConfig:RoFormerForMaskedLM", BERT, text),
    "squeezebert": (
        "SqueezeBertConfig:SqueezeBertForMaskedLM",
        {**BERT, "embedding_size": 32, "q_groups": 2, "k_groups": 2, "v_groups": 2, "post_attention_groups": 1,
         "intermediate_groups": 2, "output_groups": 2}, text,
    ),
    # encoders with decoders
    "mbart": ("MBartConfig:MBartForConditionalGeneration", {**SEQ2SEQ, "max_position_embeddings": 32}, text),
    "pegasus": ("PegasusConfig:PegasusForConditionalGeneration", {**SEQ2SEQ, "max_position_embeddings": 32}, text),
    "whisper": (
        "WhisperConfig:WhisperForConditionalGeneration",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None,
         "begin_suppress_tokens": None}, speech,
    ),
    # pictures, videos, series
    "beit": ("BeitConfig:BeitForImageClassification", PICTURE, pictures(16)),
    "convnext": (
        "ConvNextConfig:ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 16, "num_labels": 5}, pictures(16),
    ),
    "deit": ("DeiTConfig:DeiTForImageClassification", PICTURE, pictures(16)),
    "dinov2": (
        "Dinov2Config:Dinov2ForImageClassification",
        {**{key: value for key, value in PICTURE.items() if key != "intermediate_size"}, "mlp_ratio": 2}, pictures(16),
    ),
    "focalnet": (
        "FocalNetConfig:FocalNetForImageClassification",
        {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "hidden_sizes": [8, 16], "focal_levels": [2, 2],
         "focal_windows": [3, 3], "num_labels": 5, "drop_path_rate": 0.0}, pictures(32),
    ),
    "levit": (
        "LevitConfig:LevitForImageClassification",
        {"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
         "key_dim": [8, 8, 8], "num_labels": 5, "drop_path_rate": 0}, pictures(64),
    ),
    "mobilevit": (
        "MobileViTConfig:MobileViTForImageClassification",
        {"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
         "num_attention_heads": 2, "num_labels": 5, "hidden_dropout_prob": 0.0, "classifier_dropout_prob": 0.0},
        pictures(64),
    ),
    "patchtsmixer": (
        "PatchTSMixerConfig:PatchTSMixerForPrediction",
        {"context_length": 32, "patch_length": 8, "patch_stride": 8, "num_input_channels": 2, "d_model": 16,
         "num_layers": 2, "prediction_length": 4, "dropout": 0.0, "head_dropout": 0.0}, series,
    ),
    "poolformer": (
        "PoolFormerConfig:PoolFormerForImageClassification",
        {"hidden_sizes": [8, 16, 16, 24], "depths": [1, 1, 1, 1], "num_labels": 5, "drop_path_rate": 0.0}, pictures(64),
    ),
    "resnet": (
        "ResNetConfig:ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}, pictures(32),
    ),
    "segformer": (
        "SegformerConfig:SegformerForImageClassification",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
         "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
         "num_labels": 5, "drop_path_rate": 0.0}, pictures(32),
    ),
    "timesformer": ("TimesformerConfig:TimesformerForVideoClassification", {**PICTURE, "num_frames": 2}, videos),
    "videomae": (
        "VideoMAEConfig:VideoMAEForVideoClassification", {**PICTURE, "num_frames": 2, "tubelet_size": 2}, videos
    ),
}  # fmt: skip

ONLY_FP32 = {
    "fnet": "plain torch: no Fourier transform of 16-bit numbers on the CPU",
    "nystromformer": "plain torch: its model multiplies a matrix in fp32 with one in 16 bits",
}


def row(number: int, name: str) -> Any:
    classes, figures, draw = ARCHITECTURES[name]
    batch = draw(torch.Generator().manual_seed(0))

    def case() -> Any:
        return rows.Case(
            model=rows.no_dropout(rows.transformer(classes, **figures)()),
            draw=draw,
            micro_batches=2,
            clip=0.5,
            half_scale=rows.QUIET,
            spare_bytes=2 * sum(value.nbytes for value in batch.values()),  # the loop holds both batches all the time
        )

    return rows.Row(
        name,
        case,
        exceptions={dtype: ONLY_FP32[name] for dtype in ("bf16", "fp16") if name in ONLY_FP32},
        policies=(POLICIES[number % 3], POLICIES[(number + 1) % 3]),
    )


if __name__ == "__main__":
    sys.exit(main("architectures", [row(number, name) for number, name in enumerate(sorted(ARCHITECTURES))]))
