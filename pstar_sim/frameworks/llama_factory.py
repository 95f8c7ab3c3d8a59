"""LLaMA-Factory: reads its YAML or JSON as far as it is about memory, in the form of releases and in that of its second
edition (peft_config, quant_config). Source: LLaMA-Factory 0.9.4's arguments and adapter.py.
"""

from __future__ import annotations

from typing import Annotated

from pstar_sim.dtypes import WORKING
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.frameworks.keys import SLIP, Count, KeyReading, Names, ignored, read_keys, unmodelled, used
from pstar_sim.frameworks.quantization import bits_to_base
from pstar_sim.frameworks.trainers import adapter_text, launched, optimizer_of, trained
from pstar_sim.schema.fields import least

_WHOLE = "all parameters are taken to be trained with the optimizer of optim"
_RANK = 8

KEYS = (
    used("model_name_or_path", "model", str, also=("model",)),
    used("finetuning_type", "way", str, also=("peft_config.name",)),
    used("quantization_bit", "bits", Count, also=("quant_config.quantization_bit",)),
    used("quantization_method", "method", str, "bnb", also=("quant_config.name",)),
    used("double_quantization", "nested", bool, True),
    used("lora_rank", "rank", Count, _RANK, also=("peft_config.r",)),
    used("lora_target", "targets", Names, "all", also=("peft_config.target_modules",)),
    used("additional_target", "save", Names),
    used("use_rslora", "rs", bool, False),
    used("use_dora", "dora", bool, False),
    used("pure_bf16", "pure", bool, False),
    used("optim", "optimizer", str),
    used("use_muon", "muon", bool, False),
    used("per_device_train_batch_size", "batch_per_gpu", Count, also=("micro_batch_size",)),
    used("gradient_accumulation_steps", "micro_batches", Count),
    used("cutoff_len", "sequence", Count),
    used("max_grad_norm", "clip", Annotated[float, least(0)], 1.0),
    used("bf16", "bf16", bool, False),
    used("fp8", "fp8", bool, False),
    used("fp16", "fp16", bool, False),
    used("disable_gradient_checkpointing", "kept", bool, False),
    used("flash_attn", "attention", str, "auto"),
    used("enable_liger_kernel", "liger", bool, False),
    used("deepspeed", "deepspeed", None),
    used("fsdp", "fsdp", None),
    used("fsdp_config", "fsdp_config", None),
    used("dist_config.name", "spread", str),
    used("dist_config.config_file", "spread_file", str),
    unmodelled("dist_config.*", "ranks are taken to slice what they hold", off=None),
    unmodelled("use_unsloth", "kernels and activations are taken to be those of --kernels"),
    unmodelled("use_unsloth_gc", "inputs of recomputed blocks are taken to stay on the GPU"),
    unmodelled("upcast_layernorm", "norms are taken to have the working dtype"),
    unmodelled("upcast_lmhead_output", "logits are those of --loss"),
    unmodelled("freeze_trainable_layers", _WHOLE, off=None),
    unmodelled("freeze_trainable_modules", _WHOLE, off=None),
    unmodelled("use_llama_pro", _WHOLE),
    unmodelled("use_galore", _WHOLE),
    unmodelled("use_apollo", _WHOLE),
    unmodelled("use_badam", _WHOLE),
    unmodelled("use_adam_mini", _WHOLE),
    unmodelled("stage", "one model and one sequence per row are taken", off="sft"),
    unmodelled("use_kt", "experts are taken to run on the GPU"),
    unmodelled("shift_attn", "attention is taken to see the whole sequence"),
    unmodelled("mixture_of_depths", "every token is taken to go through every layer", off=None),
    unmodelled("freeze_vision_tower", "the model is taken to be one of text", off=True),
    *ignored(
        "adam_beta1", "adam_beta2", "adam_epsilon", "adapter_name_or_path", "create_new_adapter",
        "dataloader_num_workers", "dataset", "dataset_dir", "ddp_find_unused_parameters_static_graph",
        "ddp_timeout", "do_eval", "do_train", "enable_thinking", "eval_dataset", "eval_steps", "eval_strategy",
        "freeze_multi_modal_projector", "image_max_pixels", "init_config.*", "kernel_config.*", "learning_rate",
        "logging_steps", "lora_alpha", "lora_dropout", "loraplus_lr_ratio", "lr_scheduler_type",
        "max_new_tokens", "max_samples", "max_steps", "model_class", "neat_packing", "num_train_epochs",
        "output_dir", "overwrite_cache", "overwrite_output_dir", "packing", "peft_config.*",
        "per_device_eval_batch_size", "plot_loss", "pref_beta", "pref_loss", "preprocessing_num_workers",
        "quantization_device_map", "quantization_type", "report_to", "resume_from_checkpoint", "rope_scaling",
        "sample_backend", "save_only_model", "save_steps", "seed", "template", "tokenized_path",
        "train_dataset", "trust_remote_code", "use_cache", "use_reentrant_gc", "val_size",
        "warmup_ratio", "warmup_steps", "weight_decay",
    ),
)  # fmt: skip
_ATTENTION = {"disabled": "math", "sdpa": "flash", "fa2": "fa2", "fa3": "fa3", "flash_attention_2": "fa2"}


def read(content: object, file: str) -> Configuration:
    """Raises PstarError as `read_keys` and `launched` do. Trained weights are fp32 under
    autocast, but for DeepSpeed, FSDP, adapters and pure_bf16."""
    found = read_keys(KEYS, content, file, "a LLaMA-Factory configuration", alike=SLIP)
    optimizer, notes = optimizer_of("muon" if found["muon"] else found.known("optimizer"), "optim")
    way = found["way"] or ("lora" if isinstance(content, dict) and "model_class" not in content else "full")
    if way not in ("lora", "full"):
        said = "LoRA" if way == "oft" else "training all parameters"
        notes.append(f"not modelled: finetuning_type = {way}: predicted as {said}")
    dtype = "fp16" if found.known("fp16") else WORKING if found.known("bf16") or found["pure"] else None
    two = str(found["spread"] or "").startswith("fsdp")
    if found["attention"] not in (*_ATTENTION, "auto"):
        notes.append(f"not modelled: flash_attn = {found['attention']}: predicted with torch's own attention")
    launch = launched(
        file,
        dtype=dtype,
        zero=found.known("deepspeed") or (found["spread"] == "deepspeed" and found["spread_file"]),
        words=found.known("fsdp"),
        values=found.known("fsdp_config") or ({"version": 2} if two else None),
    )
    adapted = way in ("lora", "oft")
    upcast = not adapted and not found["pure"] and launch.policy_base == "all_on_gpu"
    return trained(
        launch,
        found,
        file,
        notes,
        lora=adapter_text(found, found["rank"], found["targets"]) if adapted else None,
        base=_base(found, notes),
        autocast=dtype if upcast else None,
        optimizer=optimizer,
        checkpointing=not found["kept"],
        attention=_ATTENTION.get(found["attention"]),
        loss="fused" if found["liger"] else None,
        kernels="fused" if found["liger"] else None,
    )


def _base(found: KeyReading, notes: list[str]) -> str | None:
    bits, method = found["bits"], found["method"]
    if bits is None:
        return None
    base = bits_to_base(bits, nested=found["nested"])
    if base is None:
        notes.append(f"not modelled: quantization_bit = {bits}: predicted in the working dtype")
    elif method not in ("bnb", "auto", "bitsandbytes"):
        notes.append(f"not modelled: quantization_method = {method}: predicted in {base}, which is about as wide")
    return base
