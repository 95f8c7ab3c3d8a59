"""Configurations of transformers: parameters as published, from config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pstar_sim as ps
from pstar_sim.catalog.configurations import NoPreset
from pstar_sim.catalog.model_shapes import is_model, model_entry
from pstar_sim.cli import main
from pstar_sim.errors import CatalogError, ModelError
from pstar_sim.workload.presets import variant

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
    with pytest.raises(CatalogError, match=r"kv_heads = 5; must be a divisor"):
        model_entry(f"hf:{written({**LLAMA_3_8B, 'num_key_value_heads': 5})}")


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
    capsys.readouterr()
    assert main([*command, "--kernels", "fused"]) == 2
    assert "--kernels is for presets" in capsys.readouterr().err
