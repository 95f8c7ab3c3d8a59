"""Optimizers: bytes and traffic by hand, chunks with unlike states, and plans of every policy that pass the checker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import pstar_sim as ps
from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.catalog.machine import Host
from pstar_sim.cli import main
from pstar_sim.core.layout import build_layout
from pstar_sim.core.step import Part
from pstar_sim.cost import CPU_CORE_FLOPS, cost_of
from pstar_sim.errors import CannotPlan, UnknownName
from pstar_sim.policy.passes.parts import parts_of
from pstar_sim.policy.registry import policies
from pstar_sim.workload.optimizers import OPTIMIZERS, OptimizerSpec, optimizer_spec
from pstar_sim.workload.presets import preset, variant
from pstar_sim.workload.workload import with_optimizer

MATRIX = (1000, 500)
"""500,000 elements: 1,954 blocks of 256, of which the last is not full."""


def states(name: str, masters: str | None = None) -> OptimizerSpec:
    return optimizer_spec(name, masters=masters, width=2)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("torch.optim.AdamW", "adamw"),
        ("torch.optim.adam.Adam", "adam"),
        ("torch.optim.Muon", "muon"),
        ("bnb.optim.AdamW", "adamw-bnb"),
        ("bitsandbytes.optim.PagedAdamW8bit", "adamw-8bit-all"),
        ("AdamW8bit", "adamw-8bit-all"),
        ("adamw_8bit", "adamw-8bit"),
        ("8bit-adamw", "adamw-8bit"),
        ("bnb.optim.Lion", "lion-bnb"),
        ("lion_pytorch.Lion", "lion"),
        ("transformers.Adafactor", "adafactor"),
        ("DeepSpeedCPUAdam", "adamw"),
        ("deepspeed.ops.adam.FusedAdam", "adamw"),
        ("bnb.optim.Adam", None),  # adds weight decay to the gradient; bitsandbytes' AdamW does not
        ("mine.optim.AdamW", None),
        ("amsgrad", None),
    ],
)
def test_names_of_libraries(written: str, name: str | None) -> None:
    if name is not None:
        assert optimizer_spec(written).name == name
        return
    with pytest.raises(UnknownName, match=r"known: adafactor, .*sgd-momentum \(others are not modelled\)$"):
        optimizer_spec(written)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_trainer_is_told_is_read_as_the_same_optimizer(name: str) -> None:
    made, _, optim = OPTIMIZERS[name].script.partition(' (a Trainer: optim="')
    assert made
    if optim:
        assert optimizer_spec(optim.removesuffix('")')).name == name


def test_bytes_and_traffic_of_a_tensor_of_no_kind() -> None:
    """States of a parameter; traffic: each read and written, 2 bytes of gradient in, 2 of parameter out."""
    assert {
        name: (sum(size for _, size in o.state_bytes), o.dram_bytes_per_param) for name, o in OPTIMIZERS.items()
    } == {
        "adamw": (12, 28),
        "adamw-bf16-states": (8, 20),
        "adamw-8bit": (12, 28),
        "adamw-8bit-all": (12, 28),
        "adamw-bnb": (12, 28),
        "adam": (12, 28),
        "lion": (8, 20),
        "lion-8bit": (8, 20),
        "lion-8bit-all": (8, 20),
        "lion-bnb": (8, 20),
        "adafactor": (8, 20),
        "muon": (12, 28),
        "sgd-momentum": (8, 20),
        "sgd": (4, 12),
    }


@pytest.mark.parametrize(
    ("name", "tensor", "lists"),
    [
        ("adamw-8bit", "h.0.mlp.weight", {"param32": 2_000_000, "momentum": 507_816, "variance": 507_816}),
        ("adamw-8bit", "wte.weight", {"param32": 2_000_000, "momentum": 2_000_000, "variance": 2_000_000}),
        ("adamw-8bit-all", "wte.weight", {"param32": 2_000_000, "momentum": 507_816, "variance": 507_816}),
        ("lion-8bit", "h.0.mlp.weight", {"param32": 2_000_000, "momentum": 507_816}),
        ("muon", "h.0.mlp.weight", {"param32": 2_000_000, "momentum": 2_000_000}),
        ("muon", "lm_head.weight", {"param32": 2_000_000, "momentum": 2_000_000, "variance": 2_000_000}),
        ("adafactor", "wte.weight", {"param32": 2_000_000, "variance": 4 * (1000 + 500)}),
    ],
)
def test_lists_of_a_matrix(name: str, tensor: str, lists: dict[str, int]) -> None:
    """A moment of 8 bits has a byte per element and 4 bytes per block: 500,000 + 4 x 1,954."""
    spec = states(name)
    kind = spec.all_states[spec.kind_of(tensor, MATRIX)]
    assert kind.list_bytes(500_000, [MATRIX]) == lists


def test_a_stack_of_matrices_has_rows_and_columns_of_each() -> None:
    """Adafactor for (128, 20, 30): 128 x 20 row and 128 x 30 column factors of 4 bytes."""
    spec = states("adafactor")
    kind = spec.all_states[spec.kind_of("experts.down", (128, 20, 30))]
    assert kind.list_bytes(128 * 600, [(128, 20, 30)])["variance"] == 4 * 128 * (20 + 30)


@pytest.mark.parametrize(
    ("tensor", "rule"),
    [
        ("encoder.layer.0.attention.output.dense.weight", "muon"),
        ("encoder.layer.0.output.dense.weight", "muon"),
        ("model.layers.0.mlp.shared_expert.gate_proj.weight", "muon"),
        ("shared.weight", "adamw"),
        ("embed_out.weight", "adamw"),
        ("model.embed_tokens.weight", "adamw"),
        ("bert.embeddings.word_embeddings.weight", "adamw"),
        ("score.weight", "adamw"),
        ("output.weight", "adamw"),
    ],
)
def test_what_muon_updates(tensor: str, rule: str) -> None:
    spec = states("muon")
    assert spec.all_states[spec.kind_of(tensor, MATRIX)].name == rule


@pytest.mark.parametrize("name", ["adamw-8bit", "muon", "adafactor"])
def test_a_vector_keeps_the_states_of_the_rest(name: str) -> None:
    spec = states(name)
    assert spec.kind_of("h.0.mlp.bias", (768,)) == 0


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("adamw", (2, 2, 2)),  # moments have the dtype of the parameter, as torch makes them
        ("adamw-8bit", (2, 4, 4)),  # those of bitsandbytes keep theirs
        ("adafactor", (2, 4)),
        ("muon", (2, 2, 2)),
    ],
)
def test_without_masters(name: str, sizes: tuple[int, ...]) -> None:
    spec = states(name, "none")
    assert tuple(size for _, size in spec.state_bytes) == sizes
    assert (spec.masters, spec.words) == ("none", f"{name} without fp32 masters")
    kinds = [each.list_bytes(256, [(16, 16)])["param32"] for each in spec.all_states]
    assert kinds == [512] * len(kinds)
    assert optimizer_spec(name, masters="none", width=4) == OPTIMIZERS[name]  # an fp32 parameter is its own master


def test_a_chunk_holds_tensors_of_one_kind_at_whole_blocks() -> None:
    w = preset("gpt2", batch=1, seq=64, optimizer="adamw-8bit")
    layout = build_layout(w)
    for chunk in layout.chunks:
        kinds = {w.optimizer.kind_of(w.tensors[slot.tensor].name, w.tensors[slot.tensor].shape) for slot in chunk.slots}
        assert kinds == {chunk.kind}
        if chunk.kind:
            assert all(slot.offset % 256 == 0 for slot in chunk.slots)
            assert layout.payload_bytes(chunk.index, "momentum") == chunk.numel * 260 // 256
            assert layout.part_range(chunk.index, Part(1, 3))[0] % 256 == 0
    slices = build_layout(w, ranks=3)
    assert all(slices.slice_numel(c.index) % 256 == 0 for c in slices.chunks if c.kind)


def test_whole_matrices_are_updated_in_one_part() -> None:
    """Nothing cuts a matrix that Muon updates, however large its chunk is beside the others."""
    w = preset("gpt2", batch=1, seq=64)
    size = build_layout(w, chunk_bytes=4 << 20)
    assert parts_of(size)  # the vocabulary
    muon = build_layout(with_optimizer(w, "muon"), chunk_bytes=4 << 20)
    assert all(not muon.states_of(c).whole for c in parts_of(muon))


def test_seconds_of_an_update_by_muon() -> None:
    """Newton-Schulz on X [m, n]: five times X X^T, A A and the product with X, 4 m m n + 2 m^3 flops."""
    w = preset("gpt2", batch=1, seq=64, optimizer="muon")
    layout = build_layout(w)
    cost = cost_of(w, ps.machine("v100-16"), layout)
    chunk = next(c for c in layout.chunks if c.kind)
    flops = 0
    for slot in chunk.slots:
        m, n = sorted(w.tensors[slot.tensor].shape)
        flops += 5 * (4 * m * m * n + 2 * m**3)
    elementwise_s = layout.updates_bytes[chunk.index] / cost.adam_bytes_per_s
    cores = ps.machine("v100-16").host.cores
    assert cost.cpu_adam_s(chunk.index) == pytest.approx(elementwise_s + flops / (CPU_CORE_FLOPS * cores))
    assert cost.gpu_adam_s(chunk.index) > flops / max(cost.gpu.flops_per_s.values())


def test_seconds_of_an_update_by_its_own_rate() -> None:
    """The share of AdamW's rate, of this machine where it was measured; else that of the table."""
    w, m = preset("gpt2", batch=1, seq=64, optimizer="lion"), ps.machine("v100-16")
    layout = build_layout(w)
    chunk = next(c.index for c in layout.chunks if not c.small)
    adamw_s = layout.trained_params[chunk] / m.adam_params_per_s
    assert cost_of(w, m, layout).cpu_adam_s(chunk) == pytest.approx(adamw_s / 0.43)
    measured = replace(m, updates={"lion": 0.5})
    assert cost_of(w, measured, layout).cpu_adam_s(chunk) == pytest.approx(adamw_s / 0.5)


def test_arithmetic_of_an_update_is_shared_by_the_threads_of_a_rank() -> None:
    """bitsandbytes' 8 bits: 0.043 billion parameters per second and thread, of all cores, of a rank's part of them, or
    of its threads; many threads are bound by memory."""
    w, m = preset("gpt2", batch=8, seq=64, optimizer="adamw-8bit"), ps.machine("v100-16")
    layout = build_layout(w)
    chunk = next(c.index for c in layout.chunks if layout.states_of(c.index).name == "adamw-8bit")
    params = layout.trained_params[chunk]

    def seconds(host: Host) -> float:
        return cost_of(w, replace(m, host=host), layout).cpu_adam_s(chunk)

    eight = replace(m.host, cores=8)
    assert seconds(eight) == pytest.approx(params / (8 * 0.043e9))
    assert seconds(replace(eight, threads=1)) == pytest.approx(params / 0.043e9)
    many = replace(m.host, cores=4096)
    assert seconds(many) == pytest.approx(layout.updates_bytes[chunk] / (28 * many.adam_params_per_s))
    node = ps.machine("v100-32x8")
    assert node.update_threads == node.host.cores / 8


@pytest.mark.parametrize(
    ("name", "masters", "gpus", "micro_batches"),
    [
        pytest.param(*optimizer, *spread, marks=[pytest.mark.whole] if (n + m) % 2 else [])
        for n, optimizer in enumerate((("adamw-8bit", "none"), ("adafactor", "fp32"), ("muon", "fp32")))
        for m, spread in enumerate(((1, 2), (4, 1)))
    ],
)
def test_every_policy_plans_them(name: str, masters: str, gpus: int, micro_batches: int, tmp_path: Path) -> None:
    """The checker agrees, no plan is faster than the bound, and a file gives the same plan back."""
    w = preset("gpt2", batch=1, seq=64, micro_batches=micro_batches, optimizer=name, masters=masters)
    changes = {"gpu.memory": "900MB", "peer.bandwidth": "5GB/s"} if gpus > 1 else {"gpu.memory": "900MB"}
    m = ps.machine("virtual", overrides={"gpus": gpus, **changes})
    settings = ps.Settings(update="step", clip=True)
    fitting = {}
    for policy_name, policy in policies().items():
        if policy_name == "optimal":  # takes longest; tide has its parts
            continue
        try:
            fitting[policy_name] = policy(w, m, settings)
        except (ps.DoesNotFit, CannotPlan):
            continue
    assert {"tide", "karma" if gpus == 1 else "zero3_offload"} <= set(fitting)
    for plan in fitting.values():
        plan.check()
        bound = lower_bound(w, m, settings, layout=plan.layout)
        assert ps.play(plan).iteration_s >= bound.seconds * (1 - 1e-9)
    plan = fitting["tide"]
    plan.save(tmp_path / "plan.json")
    assert ps.load_plan(tmp_path / "plan.json").layout == plan.layout


def test_pure_bf16_takes_eight_bytes_a_parameter() -> None:
    """2 of the parameter, 2 of its gradient, 2 + 2 of the moments: 12 bytes less than the 16 with fp32 masters, less
    the 4 bytes of one."""
    m = ps.machine("a100-80")
    peaks = []
    for masters in ("fp32", "none"):
        w = preset("1B", batch=1, seq=64, masters=masters)
        peak = ps.compare(w, m, policies=["all_on_gpu"]).best().row.peak_gpu_bytes
        assert peak is not None
        peaks.append(peak)
        assert w.states_bytes_per_param == (12 if masters == "fp32" else 6)
    assert peaks[0] - peaks[1] == pytest.approx(6 * w.trainable_params, rel=0.02)  # padding


def test_a_variant_keeps_the_masters() -> None:
    w = preset("gpt2", batch=4, seq=64, optimizer="muon", masters="none")
    assert variant(w, batch=2).optimizer == w.optimizer
    assert with_optimizer(w, "lion").optimizer.masters == "none"
    assert with_optimizer(w) is w


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["fits", "--model", "gpt2", "--batch", "1", "--seq", "64", "--machine", "v100-16", "--policy", "all_on_gpu"]
    assert main([*job, "--optimizer", "adamw_bnb_8bit", "--masters", "none"]) == 0
    assert "adamw-8bit without fp32 masters" in capsys.readouterr().out
    assert main([*job, "--optimizer", "shampoo"]) == 2
    assert "unknown optimizer 'shampoo'; known: adafactor, adam, adamw," in capsys.readouterr().err
    assert main([*job, "--optimizer", "nadam"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "unknown optimizer 'nadam'; known: adafactor, adam," in line and "(others are not modelled)" in line
    trace = ["fits", "--trace", "traces/gpt2.parquet", "--machine", "v100-16", "--policy", "all_on_gpu"]
    assert main([*trace, "--optimizer", "muon"]) == 0
    assert "muon" in capsys.readouterr().out
