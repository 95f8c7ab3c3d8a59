"""Configurations of transformers: parameters as published, from config.json alone."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import pstar_sim as ps
from pstar_sim.catalog.configurations import _FAMILIES, NoPreset
from pstar_sim.catalog.model_shapes import is_model, model_entry
from pstar_sim.cli import main
from pstar_sim.errors import ModelError, PstarError
from pstar_sim.workload.presets import preset, variant

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN_2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "sliding_window": None,
    "vocab_size": 32000,
}
BERT_LARGE = {
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
QWEN_3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MOONLIGHT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "kv_lora_rank": 512,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "q_lora_rank": 1536,
    "vocab_size": 163840,
}
TINY = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64}


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(values: object, name: str = "config.json") -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
        return file

    return write


@pytest.mark.parametrize(
    ("values", "params"),
    [
        (LLAMA_3_8B, 8_030_261_248),
        (QWEN_2_5_7B, 7_615_616_512),
        (QWEN_3_8B, 8_190_735_360),
        (MIXTRAL_8X7B, 46_702_792_704),
        ({"model_type": "gpt2"}, 124_439_808),
        (BERT_LARGE, 335_174_458),
        ({"model_type": "vit", "num_labels": 1000, "architectures": ["ViTForImageClassification"]}, 86_567_656),
    ],
)
def test_parameters_are_those_that_were_published(written: Any, values: dict[str, Any], params: int) -> None:
    assert model_entry(f"hf:{written(values)}").params == params


def test_a_file_a_folder_and_a_name_in_the_local_cache(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    file = written(TINY, "hub/models--some--model/snapshots/abc/config.json")
    shapes = [model_entry(name) for name in (f"hf:{file}", f"hf:{file.parent}", "hf:some/model", "some/model")]
    assert {(shape.layers, shape.params) for shape in shapes} == {(2, shapes[0].params)}
    assert is_model("some/model") and not is_model("some/other")
    w = ps.preset("some/model", batch=2, seq=32)
    assert variant(w, batch=1).fingerprint == w.fingerprint  # written anew from the same file
    with pytest.raises(ModelError, match=r"no config\.json of 'some/other' in .*hub; give hf:FILE"):
        ps.preset("some/other", batch=1, seq=32)


def test_other_models_are_no_presets(written: Any) -> None:
    for values, why in (
        ({"model_type": "phi3"}, "model type 'phi3'"),
        ({**LLAMA_3_8B, "mlp_bias": True}, "llama with mlp_bias = True"),
        ({**LLAMA_3_8B, "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({**LLAMA_3_8B, "layer_types": ["sliding_attention"] * 32}, "llama with other layer_types"),
    ):
        with pytest.raises(NoPreset, match=f"no preset is written for {why}; trace it: pstar trace hf:"):
            model_entry(f"hf:{written(values)}")
    with pytest.raises(ModelError, match="has no field 'model_type'"):
        model_entry(f"hf:{written({'hidden_size': 4})}")
    with pytest.raises(NoPreset, match="deepseek_v3 with q_lora_rank = null"):
        model_entry(f"hf:{written({**MOONLIGHT, 'q_lora_rank': None})}")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"hidden_size": "2048"}, 'hidden_size = "2048"; must be a whole number from 1 to 1,000,000'),
        ({"num_attention_heads": 0}, "num_attention_heads = 0; must be a whole number from 1"),
        ({"num_key_value_heads": 5}, "num_key_value_heads = 5; must be a divisor of num_attention_heads = 32"),
        ({"num_attention_heads": 24}, "num_attention_heads = 24; must be a divisor of hidden_size = 4096"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1; must be true or false"),
        ({"layer_types": 3}, "layer_types = 3; must be a list of names"),
        ({"architectures": "LlamaForCausalLM"}, 'architectures = "LlamaForCausalLM"; must be a list of names'),
        ({"hidden_size": None}, "hidden_size = null; must be a whole number"),
        ({**MIXTRAL_8X7B, "num_experts_per_tok": 9}, "num_experts_per_tok = 9; must be a whole number from 1 to 8"),
        ({"model_type": "vit", "patch_size": 17}, "patch_size = 17; must be a divisor of image_size = 224"),
        ({"model_type": "vit", "id2label": []}, r"id2label = \[\]; must be an object with a name for each label"),
    ],
)
def test_a_broken_value_is_named_by_its_own_key(written: Any, values: dict[str, Any], says: str) -> None:
    file = written({**LLAMA_3_8B, **values} if "model_type" not in values else values)
    with pytest.raises(ModelError, match=rf"{re.escape(str(file))}: {says}"):
        model_entry(f"hf:{file}")


@pytest.mark.parametrize("config", [LLAMA_3_8B, QWEN_3_8B, MOONLIGHT, {"model_type": "vit", "image_size": 224}])
def test_each_key_may_hold_anything(written: Any, config: dict[str, Any]) -> None:
    for key in config:
        for value in ("x", 0, -1, None, [], {}, 1.5, True, [224, 224]):
            file = written({**config, key: value})
            with contextlib.suppress(PstarError):
                assert model_entry(f"hf:{file}").params > 0, (key, value)


def test_a_quantisation_that_a_job_leaves_out_is_noted(written: Any) -> None:
    file = written({**LLAMA_3_8B, "quantization_config": {"quant_method": "mxfp4"}})
    left_out = f"its quantization_config (mxfp4) is left out: --like {file} takes it, or --base one beside --lora"
    job: dict[str, Any] = {"batch": 1, "seq": 64, "lora": "r=4"}
    assert left_out in preset(f"hf:{file}", **job).notes
    assert "left out" not in preset(f"hf:{file}", **job, base="bf16").notes
    assert "left out" not in preset(f"hf:{written({**LLAMA_3_8B, 'quantization_config': None})}", **job).notes
    with pytest.raises(ModelError, match='quantization_config = "yes"; must be an object or null'):
        preset(f"hf:{written({**LLAMA_3_8B, 'quantization_config': 'yes'})}", **job)


def _shape_or_words(file: Path) -> object:
    try:
        return replace(model_entry(f"hf:{file}"), name="", source="")
    except ModelError as error:  # qwen2 has 32 heads of keys beside any number of heads
        return str(error).replace(str(file), "")


_OPTIONAL = ("num_key_value_heads", "head_dim", "sliding_window", "n_inner")


@pytest.mark.parametrize("kind", [*_FAMILIES])
def test_what_is_absent_or_null_is_what_the_class_makes_of_it(written: Any, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    from huggingface_hub.errors import StrictDataclassError

    _, defaults, _ = _FAMILIES[kind]
    made = transformers.CONFIG_MAPPING[kind]()
    made_by_class = {key: getattr(made, key) for key in defaults if key != "sliding_window_pattern"}
    assert made_by_class == {key: value for key, value in defaults.items() if key in made_by_class}
    small = {"hidden_size": 1024, "num_attention_heads": 16, "n_embd": 1024, "n_head": 16, "head_dim": 64}
    small = {key: value for key, value in small.items() if hasattr(made, key)}
    for changes in (small, *({**small, key: None} for key in _OPTIONAL if hasattr(made, key))):
        try:
            full = transformers.CONFIG_MAPPING[kind](**changes).to_dict()
        except StrictDataclassError:  # null is not for this class
            continue
        files = written(full, "saved.json"), written({"model_type": kind, **changes})
        saved, given = (_shape_or_words(file) for file in files)
        assert saved == given, changes


def test_a_class_that_decides_gives_the_parameters(written: Any) -> None:
    """Heads of Mistral are hidden // heads wide where nothing else is said (the parameters of transformers' model), and
    transformers saves num_experts as num_local_experts."""
    small = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 4}
    counts = []
    for head_dim in ({}, {"head_dim": None}, {"head_dim": 64}):
        entry = model_entry(f"hf:{written({'model_type': 'mistral', **small, **head_dim})}")
        assert entry.window == 4096
        counts.append(entry.params)
    assert counts == [115_876_864] * 3
    experts = {"model_type": "qwen3_moe", "num_experts_per_tok": 2}
    of_either_key = [
        model_entry(f"hf:{written({**experts, key: 4})}").params for key in ("num_experts", "num_local_experts")
    ]
    assert of_either_key[0] == of_either_key[1]


def test_a_command_captures_what_is_no_preset_once(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    others = {"num_key_value_heads": 4, "vocab_size": 512, "pad_token_id": 0}
    model = f"hf:{written({'model_type': 'phi3', **sizes, **others})}"
    command = ["compare", "--model", model, "--batch", "2", "--seq", "32", "--machine", "v100-16", "--policy", "tide"]
    assert main([*command, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    (kept,) = (tmp_path / "cache").rglob("*.parquet")
    written_ns = kept.stat().st_mtime_ns
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert kept.stat().st_mtime_ns == written_ns
    assert main([*command, "--optimizer", "sgd", "--micro-batches", "2"]) == 0
    assert len([*kept.parent.iterdir()]) == 1
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-9])  # a damaged trace is captured anew
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert len(kept.read_bytes()) == len(whole)
    for wrong in (["--kernels", "fused"], ["--base", "nf4"], ["--lora", "r=4,targets=q_proj"]):
        assert main([*command, *wrong]) == 2
    said = capsys.readouterr().err
    assert "--kernels is for presets" in said and "base is 'nf4'; what is trained is not quantised" in said
    assert "no linear module is q_proj; try " in said


def test_questions_about_adapters_beside_what_is_no_preset(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = f"hf:{written({'model_type': 'phi', **sizes, 'vocab_size': 512})}"
    job, on = ["--seq", "32", "--lora", "r=4", "--base", "qlora"], ["--machine", "v100-16", "--policy", "zero_offload"]
    assert main(["fits", "--model", model, "--batch", "2", *job, *on]) == 0
    assert "LoRA r=4 on q_proj, v_proj, 0.06 M of 0.13 M parameters in nf4" in " ".join(capsys.readouterr().out.split())
    assert main(["fits", "--model", model, "--batch", "2", "--seq", "32", "--lora", "r=8", *on]) == 0
    assert len([*(tmp_path / "cache").rglob("*.parquet")]) == 1  # of all ranks and bases
    capsys.readouterr()
    assert main(["max-batch", "--model", model, *job, *on, "--gpu-memory", "1002MB", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["value"] >= 1
    tokens = ["--batch", "2", "--tokens", "1e6", "--machine", "rtx4090-128gb", "--policy", "zero_offload"]
    assert main(["cheapest", "--model", model, *job, *tokens]) == 0
    assert ", captured kernels, on 1,000,000 tokens" in " ".join(capsys.readouterr().out.split())
    assert main(["max-model", "--like", model, "--batch", "2", *job, *on]) == 2
    assert "no preset is written for it, whose layers could be fewer or more" in capsys.readouterr().err
    assert main(["cheapest", "--model", model, *job, *tokens, "--parallel", "auto"]) == 2
    assert "--parallel auto is for presets, and none is written for hf:" in capsys.readouterr().err
