"""Models of the catalog are built by transformers with the parameters that their entries say; presets of new kinds of
layers are held against captures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import structs

from pstar_sim.catalog.model_shapes import ModelEntry, count_params, model_entry, model_names
from pstar_sim.workload.presets import workload_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from executor.capture import capture_module  # noqa: E402
from executor.models import config_of  # noqa: E402

KNOWN = [name for name in model_names() if model_entry(name).family == "llama"]


def with_layers(name: str, layers: int) -> ModelEntry:
    entry = model_entry(name)
    dense = 0 if entry.experts is None else entry.experts.dense_layers
    entry = structs.replace(entry, layers=dense + layers)
    return structs.replace(entry, params=count_params(entry))


def built(entry: ModelEntry) -> torch.nn.Module:
    config, architecture = config_of(entry)
    config.use_cache = False
    with torch.device("meta"):
        return getattr(transformers, architecture)._from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", KNOWN)
def test_transformers_builds_it_with_as_many_parameters(name: str) -> None:
    # Two layers (of experts) and those before; each further layer adds as much, and tests of the catalog have the sum.
    entry = with_layers(name, 2)
    assert sum(p.numel() for p in built(entry).parameters()) == entry.params


@pytest.mark.parametrize("name", [*KNOWN, "gpt2", "bert-base"])
def test_its_configuration_leads_back_to_its_shape(name: str, tmp_path: Path) -> None:
    entry = model_entry(name)
    config, architecture = config_of(entry)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config.to_dict(), "architectures": [architecture]}, default=str))
    again = model_entry(f"hf:{file}")
    own = {"name", "aliases", "notes", "source", "kernels", "own_head_dim"}
    shapes = [{key: value for key, value in structs.asdict(one).items() if key not in own} for one in (entry, again)]
    assert shapes[0] == shapes[1]
    assert entry.head_dim == again.head_dim


@pytest.mark.whole
@pytest.mark.parametrize("name", KNOWN)
def test_transformers_builds_all_of_it_with_as_many_parameters(name: str) -> None:
    assert sum(p.numel() for p in built(model_entry(name)).parameters()) == model_entry(name).params


@pytest.mark.parametrize(
    ("name", "attention", "experts", "peak"),
    [
        ("qwen3-0.6b", None, None, 0.005),
        ("gemma-3-1b", None, None, 0.005),
        ("mixtral-8x7b", None, (8, 2), 0.005),
        ("gpt-oss-20b", None, (8, 2), 0.05),
        # Queries and values of unequal width: flash attention of a processor refuses them. Presets of every family keep
        # q, k and v in bf16 beside the copies of the math kernel.
        ("deepseek-v3", "efficient", (32, 8), 0.001),
        ("deepseek-v3", "math", (32, 8), 0.09),
    ],
)
def test_a_preset_of_new_layers_is_close_to_its_capture(
    name: str, attention: str | None, experts: tuple[int, int] | None, peak: float
) -> None:
    entry = with_layers(name, 2)
    if entry.experts is not None and experts is not None:
        count, per_token = experts
        entry = structs.replace(entry, experts=structs.replace(entry.experts, count=count, per_token=per_token))
        entry = structs.replace(entry, params=count_params(entry))
    tokens = torch.randint(entry.vocab, (2, 128), device="meta")
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    found = capture_module(built(entry).train(), batch, name=name, batch=2, sequence=128, attention=attention)
    shape = workload_of(
        entry, batch=2, sequence=128, dtype="bf16", checkpointing=False, attention=found.attention, model=name
    )
    assert shape.params == found.params
    assert shape.flops == pytest.approx(found.flops, rel=1e-3)
    assert shape.peak_non_model_bytes == pytest.approx(found.peak_non_model_bytes, rel=peak)
