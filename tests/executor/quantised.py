"""A small Llama with a quantised base and adapters, as transformers, bitsandbytes and peft build one on a CPU."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["build", "quantised_llama"]


def quantised_llama(kind: str, *, seed: int = 0, dora: bool = False) -> Any:
    """kind: nf4, nf4-single, int8, or bf16 for none of them. The linear modules of the layers are replaced as
    transformers' `replace_with_bnb_linear` does, which needs a folder of weights to load from."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=512, use_cache=False, pad_token_id=0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and name != "lm_head" and kind != "bf16":
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _quantised(linear, kind))
    model.requires_grad_(False)
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind.startswith("nf4"), kind == "int8"
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", use_dora=dora)
    return get_peft_model(model, config).train()


def _quantised(linear: nn.Linear, kind: str) -> nn.Module:
    sizes = linear.in_features, linear.out_features
    if kind == "int8":
        eight = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0)
        eight.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        return eight.to("cpu")
    double = kind == "nf4"
    four = bnb.nn.Linear4bit(
        *sizes, bias=False, compute_dtype=torch.bfloat16, compress_statistics=double, quant_type="nf4"
    )
    four.weight = bnb.nn.Params4bit(
        linear.weight.data, requires_grad=False, compress_statistics=double, quant_type="nf4", module=four
    )
    return four.to("cpu")


def build() -> tuple[Any, dict[str, torch.Tensor]]:
    """For `pstar trace py:...`."""
    tokens = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(1))
    return quantised_llama("nf4"), {"input_ids": tokens, "labels": tokens}
