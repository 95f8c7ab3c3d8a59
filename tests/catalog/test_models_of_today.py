"""Models that people train today: published counts, experts, windows, latent attention; all bytes are freed."""

from __future__ import annotations

import csv
from importlib.resources import files
from math import comb

import pytest
from msgspec import structs

import pstar_sim as ps
from pstar_sim.catalog.model_shapes import ModelEntry, count_params, expert_params, model_entry, model_names
from pstar_sim.core.layout import Layout
from pstar_sim.errors import UnknownName
from pstar_sim.planner.expert_chunks import chunk_use
from pstar_sim.policy.registry import find_policy
from pstar_sim.sim.play import play
from pstar_sim.workload.experts import use_probability
from pstar_sim.workload.kernels import KERNELS
from pstar_sim.workload.presets import preset, workload_of
from pstar_sim.workload.workload import Phase

# Parameters, and those that are active per token, as the model cards say them (in billions).
PUBLISHED = {
    "qwen3-0.6b": (0.596, None), "qwen3-1.7b": (1.7206, None), "qwen3-4b": (4.0225, None), "qwen3-8b": (8.1907, None),
    "qwen3-14b": (14.7683, None), "qwen3-32b": (32.7621, None), "qwen3-30b-a3b": (30.5321, 3.3),
    "gpt-oss-20b": (20.9148, 3.61), "gpt-oss-120b": (116.829, 5.13), "gemma-3-1b": (0.99989, None),
    "gemma-3-4b": (3.8803, None), "gemma-3-12b": (11.766, None), "gemma-3-27b": (27.0093, None),
    "llama-3.1-8b": (8.0303, None), "llama-3.1-70b": (70.5537, None), "llama-3.1-405b": (405.85, None),
    "llama-3.2-1b": (1.2358, None), "llama-3.2-3b": (3.2127, None), "llama-3.3-70b": (70.5537, None),
    "mistral-small-24b": (23.5724, None), "mixtral-8x7b": (46.7028, 12.9), "mixtral-8x22b": (140.63, 39.0),
    "deepseek-v3": (671.03, 37.0),
}  # fmt: skip


@pytest.mark.parametrize(("name", "counts"), PUBLISHED.items())
def test_counts_are_the_published_ones(name: str, counts: tuple[float, float | None]) -> None:
    entry, (params, active) = model_entry(name), counts
    assert entry.params / 1e9 == pytest.approx(params, rel=1e-3)
    if active is None:
        assert entry.active_params == entry.params
        return
    unread = entry.vocab * entry.hidden if name.startswith("gpt-oss") else 0  # its card leaves the embedding out
    assert (entry.active_params - unread) / 1e9 == pytest.approx(active, rel=0.02)


def test_models_of_the_fsdp_runs_have_their_parameters() -> None:
    text = (files("pstar_sim.validation") / "data" / "fsdp_steps.csv").read_text()
    rows = {row["model"]: int(row["params"]) for row in csv.DictReader(text.splitlines()) if row["seq"] == "2048"}
    assert {f"mpt-{name}": params for name, params in rows.items()} == {
        name: model_entry(name).params for name in model_names() if name.startswith("mpt-")
    }


def test_a_name_that_is_nearly_right_is_guessed() -> None:
    for wrong, meant in (("qwen3-30b", "qwen3-30b-a3b"), ("gpt-oss-20", "gpt-oss-20b"), ("gemma-3-4", "gemma-3-4b")):
        with pytest.raises(UnknownName, match=f"did you mean .*{meant}"):
            preset(wrong, batch=1, seq=64)


def small(name: str) -> ModelEntry:
    """The model with four layers, and few experts."""
    entry = structs.replace(model_entry(name), layers=4)
    if entry.experts is not None:
        entry = structs.replace(entry, experts=structs.replace(entry.experts, count=8, per_token=2))
    return structs.replace(entry, params=count_params(entry))


KINDS = ("qwen3-0.6b", "gemma-3-1b", "gpt-oss-20b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")


@pytest.mark.parametrize("name", KINDS)
def test_all_bytes_of_an_iteration_are_freed(name: str) -> None:
    entry = small(name)
    for kernels in KERNELS:
        for checkpointing in (True, False):
            w = workload_of(entry, batch=2, sequence=64, kernels=kernels, checkpointing=checkpointing)
            assert w.params == entry.params
            assert w.moments[-2].end_bytes == 2 * 8 * 2 * 64, "nothing is left but the batch"


def test_flops_are_those_of_active_parameters() -> None:
    # Mixtral with 2 of 8 experts: forward is 2 flops per active parameter that multiplies, and attention.
    entry, tokens = small("mixtral-8x7b"), 128
    w = workload_of(entry, batch=2, sequence=64, checkpointing=False)
    idle = entry.layers * 6 * expert_params(entry)
    assert entry.active_params == entry.params - idle
    multiplied = entry.active_params - entry.vocab * entry.hidden - (2 * entry.layers + 1) * entry.hidden
    forward = sum(m.flops for m in w.moments if m.phase is Phase.FWD)
    assert forward == 2 * tokens * multiplied + entry.layers * 4 * 2 * 64**2 * entry.hidden


def test_a_window_saves_flops_of_flash_attention_alone() -> None:
    # gpt-oss: two of four layers see 128 tokens of 1024, the others all.
    entry = small("gpt-oss-20b")
    saved = forward_flops(entry, "math") - forward_flops(entry, "flash")
    assert saved == 2 * 4 * 1024 * (1024 - 128) * entry.heads * entry.head_dim


def forward_flops(entry: ModelEntry, attention: str) -> int:
    w = workload_of(entry, batch=1, sequence=1024, attention=attention, checkpointing=False)
    return sum(m.flops for m in w.moments if m.phase is Phase.FWD)


def test_an_expert_is_used_with_the_probability_of_the_formula() -> None:
    experts = model_entry("qwen3-30b-a3b").experts
    assert experts is not None
    assert use_probability(experts, 16) == pytest.approx(1 - (1 - 8 / 128) ** 16)
    assert use_probability(experts, 1, of=2) == pytest.approx(1 - comb(126, 8) / comb(128, 8))
    assert use_probability(experts, 4096) == 1.0


def test_chunks_of_experts_and_both_counts_are_in_an_answer() -> None:
    w = preset("qwen3-30b-a3b", batch=1, seq=16)
    plan = find_policy("zero_infinity")(w, ps.machine("h100-80", host_memory="2TB"), ps.Settings(clip=True))
    experts = model_entry("qwen3-30b-a3b").experts
    assert experts is not None
    layout: Layout = plan.layout
    likely = chunk_use(w, layout, experts)
    assert 0 < len(likely) < len(layout.chunks)
    one = use_probability(experts, 16)
    for index, probability in likely.items():
        held = {w.tensors[slot.tensor].name.rpartition(".")[0] for slot in layout.chunks[index].slots}
        assert one <= probability < 1
        assert (probability > one * 1.000001) == (len(held) > 1)
    text = " ".join(ps.explain(plan, play(plan)).split())
    assert f"{len(likely)} chunks of {len(layout.chunks)} hold nothing else" in text
    assert w.notes == "3.35 B active per token (8 of 128 experts)"
