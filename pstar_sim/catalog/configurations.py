"""transformers' config.json as shapes of presets, without transformers and torch.

A family reads the keys that decide its shape; an absent one has the default of its class, null what the class makes of
it. Another model type or class, or biases and windows elsewhere, have no preset (`NoPreset`) and are traced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pstar_sim.errors import ModelError

MOST_WIDTH = 10**6
QUANTISATION = "quantization_config"
_Values = Mapping[str, Any]
_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForImageClassification")


class NoPreset(ModelError):
    """A configuration without a preset."""


def is_configuration(model: str) -> bool:
    """Whether a name is hf:FILE, hf:FOLDER, hf:ORG/NAME or ORG/NAME."""
    return model.startswith("hf:") or ("/" in model and not model.startswith("py:"))


def configuration_file(model: str) -> Path:
    """Returns the config.json of a file, a folder, or a name in the Hugging Face hub's local cache (newest snapshot).
    Raises ModelError without one."""
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
    environment = os.environ
    if "HF_HUB_CACHE" in environment:
        return Path(environment["HF_HUB_CACHE"])
    cache = Path(environment.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(environment.get("HF_HOME", cache / "huggingface")) / "hub"


def read_configuration(model: str) -> tuple[Path, dict[str, Any]]:
    """Returns the file and its values. Raises ModelError for a file that is no configuration."""
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


@dataclass(frozen=True)
class _Config:
    """Values are checked when read.

    values: of the file, over the class's defaults.
    """

    model: str
    path: Path
    values: _Values

    def refuse(self, key: str, want: str) -> ModelError:
        value = json.dumps(self.values.get(key))
        return ModelError(f"model {self.model!r}: {self.path}: {key} = {value}; must be {want}")

    def no_preset(self, why: str) -> NoPreset:
        trace = f"pstar trace {self.model} --batch B --seq S -o FILE"
        return NoPreset(f"model {self.model!r}: no preset is written for {why}; trace it: {trace}")

    def count(self, key: str, *, least: int = 1, most: int = MOST_WIDTH, divides: str | None = None) -> int:
        """divides: key of a count."""
        value = self.values.get(key)
        if type(value) is not int or not least <= value <= most:
            raise self.refuse(key, f"a whole number from {least:,} to {most:,}")
        if divides is not None and self.count(divides) % value:
            raise self.refuse(key, f"a divisor of {divides} = {self.count(divides)}")
        return value

    def optional(self, key: str, *, divides: str | None = None) -> int | None:
        """A count, None for null."""
        return None if self.values.get(key) is None else self.count(key, divides=divides)

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def names(self, key: str) -> list[str]:
        """[] for null."""
        value = self.values.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise self.refuse(key, "a list of names")
        return value or []


def every_expert_note(values: _Values) -> str:
    """Empty for a model whose tokens run through the experts to which they are sent."""
    kind, text = values["model_type"], values.get("text_config") or values
    if kind not in _EVERY_EXPERT:
        return ""
    count = text.get("num_local_experts", _EVERY_EXPERT[kind])
    sent = text.get("num_experts_per_tok", 1)
    return (
        f"every token runs through all {count} experts of a layer, though sent to {sent}, as transformers codes {kind}"
    )


def stored_note(path: Path, values: _Values) -> str:
    """Empty for a model whose file says nothing of quantisation. Raises ModelError for what is no such table."""
    stored = values.get(QUANTISATION)
    if stored is None:
        return ""
    if not isinstance(stored, dict):
        raise ModelError(f"{path}: {QUANTISATION} = {json.dumps(stored)}; must be an object or null")
    method = stored.get("quant_method", "bitsandbytes")
    return f"its {QUANTISATION} ({method}) is left out: --like {path} takes it, or --base one beside --lora"


def shape_of(model: str, path: Path, values: _Values) -> dict[str, Any]:
    """Returns a model entry's fields but name, params and source. Raises NoPreset, and ModelError naming file, key and
    value for one that the family cannot have."""
    kind = values["model_type"]
    read, defaults, expected = _FAMILIES.get(kind, (None, {}, {}))
    c = _Config(model, path, {**defaults, **values})
    if read is None:
        raise c.no_preset(f"model type {kind!r}")
    for architecture in c.names("architectures")[:1]:
        if not architecture.endswith(_ENDINGS):
            raise c.no_preset(architecture)
    for key, value in expected.items():
        if values.get(key, value) != value and (value or values[key] is not None):
            raise c.no_preset(f"{kind} with {key} = {values[key]!r}")
    shape = read(c)
    layer_types = c.names("layer_types")
    if layer_types and layer_types != _layer_types(shape):
        raise c.no_preset(f"{kind} with other layer_types")
    stored = stored_note(path, values)
    return {**shape, "stored": stored} if stored else shape


def _layer_types(shape: Mapping[str, Any]) -> list[str]:
    every = shape.get("full_every", 0)
    sliding = "sliding_attention" if shape.get("window") else "full_attention"
    return ["full_attention" if every and (i + 1) % every == 0 else sliding for i in range(shape["layers"])]


def _vocabulary(c: _Config, positions: str) -> dict[str, Any]:
    return {"vocab": c.count("vocab_size", most=10**7), "max_seq": c.count(positions, most=10**8)}


def _gpt2(c: _Config) -> dict[str, Any]:
    hidden, heads = c.count("n_embd"), c.count("n_head", divides="n_embd")
    return {
        "family": "gpt",
        "layers": c.count("n_layer"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": c.optional("n_inner") or 4 * hidden,
        "tied": c.flag("tie_word_embeddings"),
        **_vocabulary(c, "n_positions"),
    }


def _encoder(c: _Config, family: str) -> dict[str, Any]:
    return _blocks(c, family, heads=c.count("num_attention_heads", divides="hidden_size"))


def _blocks(c: _Config, family: str, *, heads: int) -> dict[str, Any]:
    return {
        "family": family,
        "layers": c.count("num_hidden_layers"),
        "hidden": c.count("hidden_size"),
        "heads": heads,
        "kv_heads": heads,
        "ffn": c.count("intermediate_size"),
        "tied": c.flag("tie_word_embeddings"),
    }


def _bert(c: _Config) -> dict[str, Any]:
    return {**_encoder(c, "bert"), **_vocabulary(c, "max_position_embeddings")}


def _vit(c: _Config) -> dict[str, Any]:
    for key in ("image_size", "patch_size"):
        if isinstance(c.values[key], list):
            raise c.no_preset(f"vit with {key} = {c.values[key]}")
    image, patch = c.count("image_size"), c.count("patch_size", divides="image_size")
    labels = c.values.get("id2label")
    if labels is not None and not (isinstance(labels, dict) and labels):
        raise c.refuse("id2label", "an object with a name for each label")
    return {
        **_encoder(c, "vit"),
        "tied": False,
        "vocab": 0,
        "max_seq": (image // patch) ** 2 + 1,
        "image": image,
        "patch": patch,
        "classes": len(labels) if labels else c.count("num_labels"),
    }


def _decoder(c: _Config) -> dict[str, Any]:
    return {
        **_blocks(c, "llama", heads=c.count("num_attention_heads")),
        **_vocabulary(c, "max_position_embeddings"),
    }


def _grouped(c: _Config) -> dict[str, Any]:
    kv_heads = c.optional("num_key_value_heads", divides="num_attention_heads")
    shape, width = _decoder(c), c.optional("head_dim")
    if width is None:
        c.count("num_attention_heads", divides="hidden_size")
    own = {"head_dim": width} if width and width * shape["heads"] != shape["hidden"] else {}
    return {**shape, **own, "kv_heads": kv_heads or shape["heads"]}


def _biases(c: _Config) -> dict[str, Any]:
    biased = c.flag("attention_bias")
    return {"attention_bias": biased, "output_bias": biased}


def _window(c: _Config, *, needed: bool = False) -> dict[str, Any]:
    window = c.optional("sliding_window")
    if needed and window is None:
        raise c.no_preset(f"{c.values['model_type']} with sliding_window = null")
    return {"window": window} if window else {}


def _experts(c: _Config, count: str, ffn: str) -> dict[str, Any]:
    experts = c.count(count)
    return {"count": experts, "per_token": c.count("num_experts_per_tok", most=experts), "ffn": c.count(ffn)}


def _llama(c: _Config) -> dict[str, Any]:
    return {**_grouped(c), **_biases(c)}


def _mistral(c: _Config) -> dict[str, Any]:
    return {**_grouped(c), **_window(c)}


def _qwen2(c: _Config) -> dict[str, Any]:
    return {**_grouped(c), "attention_bias": True}


def _qwen3(c: _Config) -> dict[str, Any]:
    c.count("head_dim")
    return {**_llama(c), "qk_norm": True}


def _mixtral(c: _Config) -> dict[str, Any]:
    return {**_mistral(c), "experts": _experts(c, "num_local_experts", "intermediate_size")}


def _qwen3_moe(c: _Config) -> dict[str, Any]:
    c.count("num_key_value_heads")
    count = "num_experts" if "num_experts" in c.values else "num_local_experts"
    return {**_llama(c), "experts": _experts(c, count, "moe_intermediate_size"), "qk_norm": True}


def _gpt_oss(c: _Config) -> dict[str, Any]:
    experts = {**_experts(c, "num_local_experts", "intermediate_size"), "biases": True}
    return {**_llama(c), **_window(c, needed=True), "sinks": True, "full_every": 2, "experts": experts}


def _gemma3(c: _Config) -> dict[str, Any]:
    for key in ("head_dim", "num_key_value_heads"):
        c.count(key)
    return {
        **_grouped(c),
        "qk_norm": True,
        **_window(c, needed=True),
        "post_norms": True,
        "full_every": c.count("sliding_window_pattern"),
    }


def _deepseek_v3(c: _Config) -> dict[str, Any]:
    shape = _decoder(c)
    if c.values["q_lora_rank"] is None:
        raise c.no_preset("deepseek_v3 with q_lora_rank = null, whose queries have no narrow projection")
    latent = {
        "q_rank": c.count("q_lora_rank"),
        "kv_rank": c.count("kv_lora_rank"),
        "rotary": c.count("qk_rope_head_dim"),
        "plain": c.count("qk_nope_head_dim"),
        "value": c.count("v_head_dim"),
    }
    experts = {
        **_experts(c, "n_routed_experts", "moe_intermediate_size"),
        "shared": c.count("n_shared_experts", least=0),
        "dense_layers": c.count("first_k_dense_replace", least=0, most=shape["layers"] - 1),
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
_QWEN = {
    **_DECODER,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_PLAIN = {"mlp_bias": False, "use_sliding_window": False}

_EVERY_EXPERT = {"llama4": 16, "llama4_text": 16}
"""Model type whose code runs every expert on every token -> experts of a layer by default."""

_FAMILIES: dict[str, tuple[Callable[[_Config], dict[str, Any]] | None, _Values, _Values]] = {
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
        {**_ENCODER, "vocab_size": 30522, "max_position_embeddings": 512, "tie_word_embeddings": True},
        {"type_vocab_size": 2, "is_decoder": False, "position_embedding_type": "absolute"},
    ),
    "vit": (
        _vit,
        {**_ENCODER, "image_size": 224, "patch_size": 16, "num_labels": 2},
        {"num_channels": 3, "qkv_bias": True},
    ),
    "llama": (_llama, {**_DECODER, "intermediate_size": 11008, "max_position_embeddings": 2048}, _PLAIN),
    "mistral": (_mistral, {**_MISTRAL, "sliding_window": 4096}, _PLAIN),
    "qwen2": (_qwen2, _QWEN, _PLAIN),
    "qwen3": (_qwen3, {**_QWEN, "head_dim": 128}, _PLAIN),
    "mixtral": (
        _mixtral,
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
            "num_local_experts": 128,
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
