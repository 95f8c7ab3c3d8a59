"""Models of the catalog are built by transformers with the parameters that their entries say; presets of new kinds of
layers are held against captures."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

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
    entry = replace(entry, layers=dense + layers)
    return replace(entry, params=count_params(entry))


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


@pytest.mark.whole
@pytest.mark.parametrize("name", KNOWN)
def test_transformers_builds_all_of_it_with_as_many_parameters(name: str) -> None:
    assert sum(p.numel() for p in built(model_entry(name)).parameters()) == model_entry(name).params


@pytest.mark.parametrize(
    ("name", "peak"), [("qwen3-0.6b", 0.005), ("gemma-3-1b", 0.005), ("mixtral-8x7b", 0.005), ("gpt-oss-20b", 0.05)]
)
def test_a_preset_of_new_layers_is_close_to_its_capture(name: str, peak: float) -> None:
    entry = with_layers(name, 2)
    if entry.experts is not None:
        entry = replace(entry, experts=msgspec.structs.replace(entry.experts, count=8, per_token=2))
        entry = replace(entry, params=count_params(entry))
    tokens = torch.randint(entry.vocab, (2, 128), device="meta")
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    found = capture_module(built(entry).train(), batch, name=name, batch=2, sequence=128)
    shape = workload_of(
        entry, batch=2, sequence=128, dtype="bf16", checkpointing=False, attention=found.attention, model=name
    )
    assert shape.params == found.params
    assert shape.flops == pytest.approx(found.flops, rel=1e-3)
    assert shape.peak_non_model_bytes == pytest.approx(found.peak_non_model_bytes, rel=peak)
