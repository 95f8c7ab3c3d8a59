"""axolotl: reads its YAML as far as it is about memory. Source: axolotl 0.19's schemas and loaders."""

from __future__ import annotations

from typing import Annotated, Literal

from pstar_sim.dtypes import WORKING
from pstar_sim.errors import PstarError
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.frameworks.keys import PARALLELISM, SLIP, Count, KeyReading, Names, ignored, read_keys, unmodelled, used
from pstar_sim.frameworks.quantization import bits_of, bits_to_base
from pstar_sim.frameworks.trainers import adapter_text, launched, optimizer_of, trained
from pstar_sim.schema.fields import least
from pstar_sim.workload.adapter import ALL_LINEAR, Adapter

_PART = "adapters are taken to be on all layers, and nothing else to be trained"
_EXPERTS = "experts are taken to run as transformers runs them"

KEYS = (
    used("base_model", "model", str),
    used("adapter", "adapter", str),
    used("load_in_4bit", "four", bool, False),
    used("load_in_8bit", "eight", bool, False),
    used("quantize_moe_experts", "experts", bool, False),
    used("bnb_config_kwargs.bnb_4bit_use_double_quant", "nested", bool, True),
    used("lora_r", "rank", Count),
    used("lora_target_modules", "targets", Names),
    used("lora_modules_to_save", "save", Names),
    used("peft_use_rslora", "rs", bool, False),
    used("peft_use_dora", "dora", bool, False),
    used("lora_target_linear", "all_linear", bool, False),
    used("optimizer", "optimizer", str),
    used("micro_batch_size", "batch_per_gpu", Count),
    used("gradient_accumulation_steps", "micro_batches", Count),
    used("sequence_len", "sequence", Count),
    used("max_grad_norm", "clip", Annotated[float, least(0)], 1.0),
    used("bf16", "bf16", bool | Literal["full"], False, also=("bfloat16",)),
    used("fp8", "fp8", bool, False),
    used("fp16", "fp16", bool, False, also=("float16",)),
    used("float32", "fp32", bool, False),
    used("gradient_checkpointing", "checkpointing", None, False),
    used("attn_implementation", "attention", str),
    used("flash_attention", "fa2", bool, False),
    used("sdp_attention", "sdpa", bool, False),
    used("xformers_attention", "efficient", bool, False),
    used("flex_attention", "flex", bool, False),
    used("eager_attention", "math", bool, False),
    used("chunked_cross_entropy", "chunked", bool, False),
    used("liger_fused_linear_cross_entropy", "fused_loss", bool, False, also=("cut_cross_entropy",)),
    used("liger_rms_norm", "fused_norms", bool, False),
    used("liger_glu_activation", "fused_mlp", bool, False, also=("liger_swiglu",)),
    used("torch_compile", "compiled", bool | Literal["auto"], False),
    used("deepspeed", "deepspeed", None),
    used("fsdp", "fsdp", None),
    used("fsdp_config", "fsdp_config", None),
    used("fsdp_version", "version", Count),
    unmodelled("activation_offloading", "activations are taken to stay on the GPU"),
    unmodelled("layer_offloading", "frozen layers are taken to stay on the GPU; policies here stream them (--policy)"),
    unmodelled("lora_target_parameters", _PART, off=None),
    unmodelled("lora_rank_pattern", _PART, off=None),
    unmodelled("peft_layers_to_transform", _PART, off=None),
    unmodelled("peft_layer_replication", _PART, off=None),
    unmodelled("peft_trainable_token_indices", _PART, off=None),
    unmodelled("unfrozen_parameters", "all parameters are taken to be trained", off=None),
    unmodelled("lisa_n_layers", "all parameters are taken to be trained", off=None),
    unmodelled("relora", "adapters are taken to stay as they are"),
    unmodelled("gptq", "bases here are int8, nf4 and fp8"),
    unmodelled("model_quantization_config", "bases here are int8, nf4 and fp8", off=None),
    unmodelled("bnb_config_kwargs.*", "bitsandbytes is taken to quantise as axolotl has it by default", off=None),
    unmodelled("qat", "weights are taken to be trained as they are", off=None),
    unmodelled("rl", "one model and one sequence per row are taken", off=None),
    unmodelled("reward_model", "one sequence per row is taken"),
    unmodelled("auto_find_batch_size", "the batch is that of micro_batch_size"),
    unmodelled("batch_size", "the batch is that of micro_batch_size", off=None),
    unmodelled("tiled_mlp", "feed-forward layers are taken to run whole"),
    unmodelled("expert_parallel_size", PARALLELISM, off=1),
    unmodelled("context_parallel_size", PARALLELISM, off=1, also=("sequence_parallel_degree",)),
    unmodelled("tensor_parallel_size", "its degrees are --parallel tp=N", off=1),
    unmodelled("dp_shard_size", "each replica is taken to slice over all its ranks", off=None),
    unmodelled("dp_replicate_size", "parameters are taken to be sliced over all ranks", off=1),
    unmodelled("experts_implementation", _EXPERTS, off="grouped_mm"),
    unmodelled("llama4_linearized_experts", _EXPERTS),
    unmodelled("use_kernels", "kernels are those of --kernels"),
    unmodelled("use_scattermoe", _EXPERTS),
    unmodelled("use_sonicmoe", _EXPERTS),
    unmodelled("lora_mlp_kernel", "adapters are taken to run operator by operator"),
    unmodelled("lora_qkv_kernel", "adapters are taken to run operator by operator"),
    unmodelled("lora_o_kernel", "adapters are taken to run operator by operator"),
    unmodelled("freeze_mm_modules", "the model is taken to be one of text"),
    *ignored(
        "adam_beta1", "adam_beta2", "adam_epsilon", "chat_template", "dataloader_num_workers",
        "dataset_num_proc", "dataset_prepared_path", "datasets", "ddp_find_unused_parameters", "debug",
        "early_stopping_patience", "eot_tokens", "eval_batch_size", "eval_sample_packing", "eval_steps",
        "eval_strategy", "evals_per_epoch", "gptq_groupsize", "gptq_model_v1", "gradient_checkpointing_kwargs",
        "group_by_length", "hub_model_id", "learning_rate", "liger_layer_norm", "liger_rope",
        "load_best_model_at_end", "local_rank", "logging_steps", "lora_alpha", "lora_dropout",
        "lora_fan_in_fan_out", "lora_model_dir", "loraplus_lr_ratio", "loss_watchdog_patience",
        "loss_watchdog_threshold", "lr_scheduler", "max_packed_sequence_len", "max_steps", "model_type",
        "num_epochs", "output_dir", "pad_to_sequence_len", "peft_init_lora_weights",
        "plugins", "pretraining_dataset", "processor_type", "push_dataset_to_hub", "remove_unused_columns",
        "resume_from_checkpoint", "sample_packing", "save_safetensors", "save_steps", "save_strategy",
        "save_total_limit", "saves_per_epoch", "seed", "shuffle_merged_datasets", "skip_prepare_dataset",
        "special_tokens", "strict", "test_datasets", "tf32", "tokenizer_type", "tokenizer_use_mistral_common",
        "tokens", "torchdistx_path", "train_on_inputs", "trust_remote_code", "val_set_size", "wandb_entity",
        "wandb_log_model", "wandb_name", "wandb_project", "wandb_run_id", "wandb_watch", "warmup_ratio",
        "warmup_steps", "weight_decay",
    ),
)  # fmt: skip
_ATTENTION = {"eager": "math", "flash_attention_2": "fa2", "flash_attention_3": "fa3", "flex_attention": "flex"}
_ATTENTION |= {"sdpa": "flash", "xformers": "efficient"}


def read(content: object, file: str) -> Configuration:
    """Raises PstarError as `read_keys` and `launched` do."""
    found = read_keys(KEYS, content, file, "an axolotl configuration", alike=SLIP)
    optimizer, notes = optimizer_of(found.known("optimizer"), "optimizer")
    dtype = "fp32" if found["fp32"] else "fp16" if found["fp16"] is True else None
    dtype = dtype or (WORKING if found.known("bf16") else None)
    checkpointing = found["checkpointing"]
    if isinstance(checkpointing, str):
        notes.append(f"not modelled: gradient_checkpointing = {checkpointing}: inputs of blocks stay on the GPU")
    attention = found.known("attention")
    named = next((name for name in ("fa2", "efficient", "flex", "math") if found[name] is True), None)
    if attention is not None and attention not in _ATTENTION:
        notes.append(f"not modelled: attn_implementation = {attention}: predicted with torch's own attention")
    bits = bits_of(found)
    if found["adapter"] == "qlora" and bits != 4:
        raise PstarError(f"{file}: adapter = qlora is beside a base in four bits: load_in_4bit must be true")
    values = found.known("fsdp_config")
    if found.known("version") is not None and values:
        values = {"version": found["version"], **values}
    launch = launched(file, dtype=dtype, zero=found.known("deepspeed"), words=found.known("fsdp"), values=values)
    return trained(
        launch,
        found,
        file,
        notes,
        lora=_adapter(found, notes),
        base=bits_to_base(bits, nested=found["nested"], experts=found["experts"]),
        optimizer=optimizer,
        checkpointing=bool(checkpointing),
        attention=_ATTENTION.get(attention or "", named),
        loss="fused" if found["fused_loss"] else "chunked" if found["chunked"] else None,
        kernels=_kernels(found),
    )


def _adapter(found: KeyReading, notes: list[str]) -> str | None:
    if found["adapter"] is None:
        return None
    if found["adapter"] not in ("lora", "qlora"):
        notes.append(f"not modelled: adapter = {found['adapter']}: predicted as LoRA")
    targets = ALL_LINEAR if found["all_linear"] else found["targets"]
    return adapter_text(found, found["rank"] or Adapter().rank, targets)


def _kernels(found: KeyReading) -> str | None:
    if found["compiled"] is True:
        return "compiled"
    return "fused" if found["fused_norms"] and found["fused_mlp"] else None
