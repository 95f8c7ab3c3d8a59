"""Files of axolotl and LLaMA-Factory, and config.json of quantised models: what of a job they say, and by what each is
launched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pstar_sim.cli import main
from pstar_sim.dtypes import BASES
from pstar_sim.errors import PstarError
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.frameworks.load import load_configuration
from pstar_sim.frameworks.quantization import bits_to_base
from pstar_sim.workload.adapter import adapter

MODEL = "meta-llama/Llama-3.1-8B"
QLORA = """
base_model: NousResearch/Meta-Llama-3-8B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
bf16: auto
gradient_checkpointing: true
attn_implementation: flash_attention_2
datasets: [{path: tatsu-lab/alpaca, type: alpaca}]
"""
FACTORY = """
model_name_or_path: Qwen/Qwen3-8B
stage: sft
finetuning_type: lora
quantization_bit: 4
double_quantization: false
lora_rank: 16
lora_target: q_proj,v_proj
template: qwen3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""


def read(text: str, folder: Path, name: str = "train.yml") -> Configuration:
    path = folder / name
    path.write_text(text)
    return load_configuration(str(path))


def said(configuration: Configuration, *names: str) -> list[Any]:
    return [getattr(configuration, name) for name in names]


def test_a_file_of_axolotl_says_the_job(tmp_path: Path) -> None:
    found = read(QLORA, tmp_path)
    assert said(found, "framework", "policy", "model") == ["accelerate", "all_on_gpu", "NousResearch/Meta-Llama-3-8B"]
    assert said(found, "lora", "base") == ["r=32,targets=all-linear", "nf4"]
    assert said(found, "batch_per_gpu", "micro_batches", "optimizer") == [2, 4, "adamw-8bit"]
    assert said(found, "checkpointing", "attention", "clip") == [True, "fa2", True]
    assert found.detail["sequence"] == 4096
    assert said(found, "dtype", "masters", "loading") == [None, None, "each:bf16"]  # auto: what the GPU has
    assert {"lora_alpha", "sample_packing", "datasets"} <= {*found.without_effect}
    assert len(found.notes) == 1 and found.notes[0].startswith("launched as one process")


def test_a_file_of_llama_factory_says_the_job_in_both_forms(tmp_path: Path) -> None:
    found = read(FACTORY, tmp_path)
    assert said(found, "model", "lora", "base") == ["Qwen/Qwen3-8B", "r=16,targets=q_proj+v_proj", "nf4-single"]
    assert said(found, "batch_per_gpu", "micro_batches", "dtype", "checkpointing") == [1, 8, "bf16", True]
    assert found.detail["sequence"] == 2048
    second = read(
        "model: m\nmodel_class: llm\npeft_config: {name: lora, r: 4, target_modules: all}\nmicro_batch_size: 3\n"
        "quant_config: {name: bnb, quantization_bit: 8}\ncutoff_len: 512\ndist_config: {name: fsdp2, dcp_path: null}",
        tmp_path,
    )
    assert said(second, "lora", "base", "batch_per_gpu") == ["r=4,targets=all-linear", "int8", 3]
    assert said(second, "policy", "notes") == ["zero3_resident", ()]
    assert second.detail["version"] == 2
    assert read("model: m\nmodel_class: llm\ncutoff_len: 512", tmp_path).lora is None
    assert read('{"finetuning_type": "lora"}', tmp_path, "train.json").lora == "r=8,targets=all-linear"


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        ("base_model: m\nadapter: lora", "r=16"),
        ("base_model: m\nadapter: lora\nlora_r: 8\npeft_use_dora: true", "r=8,dora"),
        (
            "base_model: m\nadapter: lora\nlora_modules_to_save: [embed_tokens, lm_head]",
            "r=16,save=embed_tokens+lm_head",
        ),
        (
            "base_model: m\nadapter: lora\nlora_target_modules: [q_proj, mlp.down_proj]",
            "r=16,targets=q_proj+mlp.down_proj",
        ),
        ("base_model: m\nadapter: lora\nlora_target_modules: '.*[.](q|v)_proj'", "r=16,targets=.*[.](q|v)_proj"),
        (
            "finetuning_type: lora\nadditional_target: embed_tokens,lm_head\nuse_rslora: true",
            "r=8,targets=all-linear,save=embed_tokens+lm_head,rs",
        ),
        ("finetuning_type: lora\nlora_target: q_proj\nuse_dora: true", "r=8,targets=q_proj,dora"),
    ],
)
def test_an_adapter_is_said_in_our_words(text: str, lora: str, tmp_path: Path) -> None:
    found = read(text, tmp_path).lora
    assert found == lora and str(adapter(found)) == lora


@pytest.mark.parametrize(
    ("changed", "base"),
    [
        ("", "nf4"),
        ("bnb_config_kwargs: {bnb_4bit_use_double_quant: false}", "nf4-single"),
        ("quantize_moe_experts: true", "nf4-experts"),
        ("load_in_4bit: false\nload_in_8bit: true\nadapter: lora", "int8"),
        ("load_in_4bit: false\nadapter: lora", None),
    ],
)
def test_the_base_follows_from_the_bits(changed: str, base: str | None, tmp_path: Path) -> None:
    lines = [line for line in QLORA.splitlines() if line.partition(":")[0] not in changed]
    assert read("\n".join([*lines, changed]), tmp_path).base == base
    assert base is None or base in BASES
    assert bits_to_base(2, nested=True) is None


@pytest.mark.parametrize(
    ("text", "dtype", "autocast", "masters"),
    [
        ("base_model: m\nbf16: true", "bf16", None, "none"),  # the optimizer updates bf16 weights
        ("base_model: m\nbf16: true\nadapter: lora", "bf16", None, None),  # adapters are fp32
        ("base_model: m\nfloat32: true", "fp32", None, None),
        ("base_model: m\nbf16: true\nfsdp: [full_shard, auto_wrap]", "bf16", None, None),
        ("finetuning_type: full\nbf16: true", None, "bf16", None),
        ("finetuning_type: full\npure_bf16: true", "bf16", None, "none"),
        ("finetuning_type: lora\nfp16: true", "fp16", None, None),
    ],
)
def test_the_dtype_is_that_in_which_the_trainer_keeps_weights(
    text: str, dtype: str | None, autocast: str | None, masters: str | None, tmp_path: Path
) -> None:
    assert said(read(text, tmp_path), "dtype", "autocast", "masters") == [dtype, autocast, masters]


def test_products_in_fp8_are_those_of_the_job(tmp_path: Path) -> None:
    assert said(read("base_model: m\nbf16: true\nfp8: true", tmp_path), "dtype", "products") == ["bf16", "fp8"]
    assert said(read("finetuning_type: full\nbf16: true\nfp8: true", tmp_path), "products") == ["fp8"]


def test_deepspeed_and_fsdp_are_read_as_their_own_files(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": "auto"}
    (tmp_path / "zero2.json").write_text(json.dumps(zero))
    by_file, inside = read(f"{FACTORY}deepspeed: zero2.json", tmp_path), read(f"{FACTORY}deepspeed: {zero}", tmp_path)
    for found in (by_file, inside):
        assert said(found, "framework", "policy", "batch_per_gpu") == ["DeepSpeed", "zero_offload", 1]
        assert said(found, "dtype", "lora", "clip") == ["bf16", "r=16,targets=q_proj+v_proj", True]
    sharded = read(
        f"{QLORA}fsdp: [full_shard, auto_wrap, offload]\nfsdp_config:\n  cpu_ram_efficient_loading: true\n"
        "  fsdp_state_dict_type: FULL_STATE_DICT\n",
        tmp_path,
    )
    assert said(sharded, "policy", "loading") == ["zero_infinity:bucket=0,reuse=0", "whole:bf16"]
    two = read(f"{QLORA}fsdp_version: 2\nfsdp_config: {{offload_params: false, reshard_after_forward: true}}", tmp_path)
    assert said(two, "policy", "base") == ["zero3_resident", "nf4"] and two.detail["version"] == 2


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (f"{QLORA}relora: true", "not modelled: relora = true: adapters are taken to stay as they are"),
        (f"{QLORA}lora_target_parameters: [mlp.experts.down_proj]", "not modelled: lora_target_parameters = "),
        (f"{QLORA}made_up: 1", "made_up = 1: not a known key of an axolotl configuration"),
        (
            QLORA.replace("adamw_bnb_8bit", "came_pytorch"),
            'not modelled: optimizer = "came_pytorch": predicted as AdamW',
        ),
        (
            QLORA.replace("checkpointing: true", "checkpointing: offload"),
            "not modelled: gradient_checkpointing = offload",
        ),
        (f"{FACTORY}quantization_method: hqq", "quantization_method = hqq: predicted in nf4-single"),
        (FACTORY.replace("bit: 4", "bit: 2"), "not modelled: quantization_bit = 2: predicted in the working dtype"),
        (
            FACTORY.replace("type: lora", "type: freeze").replace("quantization_bit: 4\n", ""),
            "finetuning_type = freeze: predicted as training all parameters",
        ),
        ("finetuning_type: lora\nflash_attn: fa9", "flash_attn = fa9: predicted with torch's own attention"),
        (f"{FACTORY}use_galore: true", "not modelled: use_galore = true: all parameters are taken to be trained"),
    ],
)
def test_what_cannot_be_followed_is_a_note(text: str, note: str, tmp_path: Path) -> None:
    assert any(note in line for line in read(text, tmp_path).notes)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"{QLORA}deepspeed: none_here.json", "names none_here.json, which is neither beside it nor in this folder"),
        (QLORA.replace("lora_r: 32", "lora_r: many"), 'lora_r = "many"; it'),
        (
            f"{QLORA}deepspeed: {{train_micro_batch_size_per_gpu: 4}}",
            "batch per gpu is 2, and 4 in the launcher's file",
        ),
        (f"{QLORA}lora_rr: 8", "lora_rr is not a known key of an axolotl configuration; did you mean lora_r?"),
        ("model_type: llama\narchitectures: [L]", "is the config.json of a model without quantization_config"),
        (f"{QLORA}load_in_8bit: true", "load_in_4bit and load_in_8bit are both true; a base has one width"),
        (QLORA.replace("in_4bit: true", "in_4bit: false"), "adapter = qlora is beside a base in four bits"),
        (QLORA.replace("adapter: qlora", ""), "says a base in nf4 without adapters"),
        (FACTORY.replace("_type: lora", "_type: full"), "says a base in nf4-single without adapters"),
        (FACTORY.replace("q_proj,v_proj", "{q_proj: 1}"), 'lora_target = {"q_proj": 1}; it must be a text | a list'),
        (
            "model_type: llama\nquantization_config: {load_in_4bit: true, load_in_8bit: true}",
            "load_in_4bit and load_in_8bit are both true",
        ),
    ],
)
def test_wrong_files_are_refused_in_one_line(text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(PstarError) as caught:
        read(text, tmp_path)
    assert error in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "base", "note"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", ""),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "nf4", ""),
        ({"_load_in_4bit": True, "_load_in_8bit": False}, "nf4-single", ""),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, "fp8", ""),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "fp8", "predicted with blocks of 128 x 128"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "nf4", "quant_method = gptq: predicted in nf4"),
        ({"quant_method": "mxfp4"}, None, "quant_method = mxfp4: predicted in the working dtype"),
    ],
)
def test_a_quantised_model_says_its_base(stored: dict[str, Any], base: str | None, note: str, tmp_path: Path) -> None:
    content = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": stored}
    found = read(json.dumps(content), tmp_path, "config.json")
    assert said(found, "base", "dtype", "model") == [base, "bf16", f"hf:{tmp_path}/config.json"]
    assert not note or any(note in line for line in found.notes)


def test_the_file_fills_flags_and_names_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "qlora.yml"
    path.write_text(QLORA.replace("NousResearch/Meta-Llama-3-8B", MODEL))
    asked = ["fits", "--like", str(path), "--machine", "rtx4090-128gb"]
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (row,) = answer["rows"]
    assert (answer["model"], row["tokens_per_s"]) == ("llama-3.1-8b", pytest.approx(2 * 4 * 4096 / row["iteration_s"]))
    assert row["like"]["configuration"]["base"] == "nf4"
    assert main(asked) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "LoRA r=32 on all-linear, 6.98 B of 8.11 B parameters in nf4, 0.516 bytes each" in out
    assert "weights while they are loaded, in bf16 and the base in nf4" in out
    path.write_text("distributed_type: MULTI_GPU")
    flags = ["--model", "gpt2", "--batch", "1", "--seq", "64", "--lora", "r=8", "--base", "int8"]
    assert main([*asked, *flags]) == 0
    assert "qlora.yml: LoRA r=8 on c_attn, 0.08 B" in " ".join(capsys.readouterr().out.split())
    path.write_text(QLORA.replace("NousResearch/Meta-Llama-3-8B", MODEL))
    assert main([*asked, "--lora", "r=8"]) == 2
    assert "--lora r=8, but qlora.yml says r=32,targets=all-linear" in capsys.readouterr().err
    path.write_text(QLORA.replace("NousResearch/Meta-Llama-3-8B", "nobody/nothing"))
    assert main(asked) == 2
    assert "qlora.yml names the model 'nobody/nothing', which is no preset" in capsys.readouterr().err
