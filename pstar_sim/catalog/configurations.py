"""Configurations of transformers as shapes of presets: config.json without transformers and without torch.

A family reads the keys that decide its shape. A key that is absent has the default of the family's class. For another
model type, another class, or biases and windows elsewhere there is no preset (`NoPreset`): such a model is traced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pstar_sim.errors import ModelError

__all__ = ["NoPreset", "configuration_file", "is_configuration", "read_configuration", "shape_of"]

_Values = Mapping[str, Any]
_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForImageClassification")


class NoPreset(ModelError):
    """A configuration of a model for which no preset is written."""


def is_configuration(model: str) -> bool:
    """Returns whether a name means a configuration: hf:FILE, hf:FOLDER, hf:ORG/NAME or ORG/NAME."""
    return model.startswith("hf:") or ("/" in model and not model.startswith("py:"))


def configuration_file(model: str) -> Path:
    """Returns the config.json of a file, of a folder, or of a name in the local cache of the Hugging Face hub, its
    newest snapshot. Raises ModelError without one."""
    what = model.removeprefix("hf:")
    path = Path(what).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return path
    hub = _hub()
    snapshots = (hub / f"models--{what.replace('/', '--')}" / "snapshots").glob("*/config.json")
    newest = max(snapshots, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        raise ModelError(
            f"model {model!r}: there is no such file or folder, and no config.json of {what!r} in {hub}; give hf:FILE, "
            "the model's config.json"
        )
    return newest


def _hub() -> Path:
    """The folder of huggingface_hub."""
    environment = os.environ
    if "HF_HUB_CACHE" in environment:
        return Path(environment["HF_HUB_CACHE"])
    cache = Path(environment.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(environment.get("HF_HOME", cache / "huggingface")) / "hub"


def read_configuration(model: str) -> tuple[Path, dict[str, Any]]:
    """Returns the file and its values. Raises ModelError for a file that is no configuration of transformers."""
    path = configuration_file(model)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model {model!r}: {path} is not a readable config.json: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ModelError(
            f"model {model!r}: {path} has no field 'model_type'; give the config.json of a transformers model"
        )
    return path, values


def shape_of(model: str, values: _Values) -> dict[str, Any]:
    """Returns the fields of a model's entry but for name, params and source. Raises NoPreset."""
    kind = values["model_type"]
    read, defaults, expected = _FAMILIES.get(kind, (None, {}, {}))

    def refuse(why: str) -> NoPreset:
        return NoPreset(
            f"model {model!r}: no preset is written for {why}; trace it: pstar trace {model} --batch B --seq S -o FILE"
        )

    if read is None:
        raise refuse(f"model type {kind!r}")
    architecture = next(iter(values.get("architectures") or ()), None)
    if architecture is not None and not str(architecture).endswith(_ENDINGS):
        raise refuse(architecture)
    for key, value in expected.items():
        if values.get(key, value) not in (value, None):
            raise refuse(f"{kind} with {key} = {values[key]!r}")
    given = {**defaults, **{key: value for key, value in values.items() if value is not None}}
    if given.get("use_sliding_window") is False:
        given.pop("sliding_window", None)
    shape = read(given)
    if "layer_types" in given and list(given["layer_types"]) != _layer_types(shape):
        raise refuse(f"{kind} with other layer_types")
    return shape


def _layer_types(shape: Mapping[str, Any]) -> list[str]:
    every = shape.get("full_every", 0)
    sliding = "sliding_attention" if shape.get("window") else "full_attention"
    return ["full_attention" if every and (i + 1) % every == 0 else sliding for i in range(shape["layers"])]


def _gpt2(c: _Values) -> dict[str, Any]:
    hidden, heads = c["n_embd"], c["n_head"]
    return {
        "family": "gpt",
        "layers": c["n_layer"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": c.get("n_inner", 4 * hidden),
        "vocab": c["vocab_size"],
        "max_seq": c["n_positions"],
        "tied": c["tie_word_embeddings"],
    }


def _transformer(c: _Values, family: str) -> dict[str, Any]:
    heads = c["num_attention_heads"]
    return {
        "family": family,
        "layers": c["num_hidden_layers"],
        "hidden": c["hidden_size"],
        "heads": heads,
        "kv_heads": c.get("num_key_value_heads", heads),
        "ffn": c["intermediate_size"],
        "tied": c.get("tie_word_embeddings", True),
    }


def _bert(c: _Values) -> dict[str, Any]:
    return {**_transformer(c, "bert"), "vocab": c["vocab_size"], "max_seq": c["max_position_embeddings"]}


def _vit(c: _Values) -> dict[str, Any]:
    image, patch = c["image_size"], c["patch_size"]
    return {
        **_transformer(c, "vit"),
        "tied": False,
        "vocab": 0,
        "max_seq": (image // patch) ** 2 + 1,
        "image": image,
        "patch": patch,
        "classes": len(c["id2label"]) if "id2label" in c else c.get("num_labels", 2),
    }


def _llama(c: _Values) -> dict[str, Any]:
    """Llama and Mistral, and what the other models of the family share with them."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    width, window = c.get("head_dim", hidden // heads), c.get("sliding_window", 0)
    biased = bool(c.get("attention_bias"))
    return {
        **_transformer(c, "llama"),
        "tied": c.get("tie_word_embeddings", False),
        "vocab": c["vocab_size"],
        "max_seq": c["max_position_embeddings"],
        "attention_bias": biased,
        "output_bias": biased,
        **({"head_dim": width} if width * heads != hidden else {}),
        **({"window": window} if window else {}),
    }


def _qwen2(c: _Values) -> dict[str, Any]:
    return {**_llama(c), "attention_bias": True}


def _qwen3(c: _Values) -> dict[str, Any]:
    return {**_llama(c), "qk_norm": True}


def _experts(count: str, ffn: str) -> Callable[[_Values], dict[str, Any]]:
    """Returns the reader of a model of experts.

    count, ffn: keys of the number of experts and of their width.
    """

    def read(c: _Values) -> dict[str, Any]:
        experts = {
            "count": c.get(count, c.get("num_local_experts")),
            "per_token": c["num_experts_per_tok"],
            "ffn": c[ffn],
        }
        return {**_llama(c), "experts": experts}

    return read


def _qwen3_moe(c: _Values) -> dict[str, Any]:
    return {**_experts("num_experts", "moe_intermediate_size")(c), "qk_norm": True}


def _gpt_oss(c: _Values) -> dict[str, Any]:
    shape = _experts("num_local_experts", "intermediate_size")(c)
    return {**shape, "sinks": True, "full_every": 2, "experts": {**shape["experts"], "biases": True}}


def _gemma3(c: _Values) -> dict[str, Any]:
    return {
        **_qwen3(c),
        "tied": c["tie_word_embeddings"],
        "post_norms": True,
        "full_every": c["sliding_window_pattern"],
    }


def _deepseek_v3(c: _Values) -> dict[str, Any]:
    shape = _llama({key: value for key, value in c.items() if key != "head_dim"})
    shape.pop("head_dim", None)
    latent = {
        "q_rank": c["q_lora_rank"],
        "kv_rank": c["kv_lora_rank"],
        "rotary": c["qk_rope_head_dim"],
        "plain": c["qk_nope_head_dim"],
        "value": c["v_head_dim"],
    }
    experts = {
        "count": c["n_routed_experts"],
        "per_token": c["num_experts_per_tok"],
        "ffn": c["moe_intermediate_size"],
        "shared": c["n_shared_experts"],
        "dense_layers": c["first_k_dense_replace"],
        "fp32_router": True,
    }
    return {**shape, "latent": latent, "experts": experts}


_DECODER = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
_ENCODER = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_MISTRAL = {**_DECODER, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN = {**_DECODER, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_PLAIN = {"mlp_bias": False, "use_sliding_window": False}

_FAMILIES: dict[str, tuple[Callable[[_Values], dict[str, Any]] | None, _Values, _Values]] = {
    "gpt2": (
        _gpt2,
        {
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "vocab_size": 50257,
            "n_positions": 1024,
            "tie_word_embeddings": True,
        },
        {"add_cross_attention": False},
    ),
    "bert": (
        _bert,
        {**_ENCODER, "vocab_size": 30522, "max_position_embeddings": 512},
        {"type_vocab_size": 2, "is_decoder": False, "position_embedding_type": "absolute"},
    ),
    "vit": (_vit, {**_ENCODER, "image_size": 224, "patch_size": 16}, {"num_channels": 3, "qkv_bias": True}),
    "llama": (_llama, {**_DECODER, "intermediate_size": 11008, "max_position_embeddings": 2048}, _PLAIN),
    "mistral": (_llama, {**_MISTRAL, "head_dim": 128}, _PLAIN),
    "qwen2": (_qwen2, _QWEN, _PLAIN),
    "qwen3": (_qwen3, {**_QWEN, "head_dim": 128}, _PLAIN),
    "mixtral": (
        _experts("num_local_experts", "intermediate_size"),
        {**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2},
        _PLAIN,
    ),
    "qwen3_moe": (
        _qwen3_moe,
        {
            **_QWEN,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        {**_PLAIN, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "gpt_oss": (
        _gpt_oss,
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "sliding_window": 128,
        },
        {},
    ),
    "gemma3_text": (
        _gemma3,
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
        {"attention_bias": False},
    ),
    "deepseek_v3": (
        _deepseek_v3,
        {
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "max_position_embeddings": 4096,
        },
        {"attention_bias": False, "moe_layer_freq": 1},
    ),
}
"""Model type -> its reader, defaults of its class, and values without which no preset is written for it."""
