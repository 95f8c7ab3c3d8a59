"""LoRA, quantised bases and other optimizers: figures by hand, and plans of every policy that pass the checker."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

import pstar_sim as ps
from pstar_sim.catalog.model_shapes import model_entry
from pstar_sim.cli import main
from pstar_sim.core.layout import build_layout
from pstar_sim.dtypes import BASES
from pstar_sim.errors import CannotPlan, ModelError, UnknownName
from pstar_sim.planner.fits import fits
from pstar_sim.policy.registry import policies
from pstar_sim.workload.adapted import adapted
from pstar_sim.workload.adapter import Adapter, adapter
from pstar_sim.workload.loading import WHOLE
from pstar_sim.workload.lora import adapter_of, base_of, low_rank, quantised_params
from pstar_sim.workload.presets import axes_of, preset, variant, workload_of
from pstar_sim.workload.trace import load_trace
from pstar_sim.workload.workload import Phase, UseKind, Workload, with_optimizer


def forward_flops(w: Workload) -> int:
    return sum(m.flops for m in w.moments if m.phase is Phase.FWD)


def test_parameters_and_flops_of_gpt2_adapters_by_hand() -> None:
    plain = preset("gpt2", batch=2, seq=64, checkpointing=False)
    w = preset("gpt2", batch=2, seq=64, checkpointing=False, lora=Adapter(rank=8))
    # c_attn of 12 layers, 768 x 2304: A is 8 x 768, B is 2304 x 8
    assert w.trainable_params == 12 * 8 * (768 + 2304)
    assert w.params == plain.params + w.trainable_params
    assert forward_flops(w) - forward_flops(plain) == 12 * 2 * 128 * 8 * (768 + 2304)
    # Backward: no gradient of the base's matrices (as many flops as its forward has, attention left out), and twice
    # the adapters' forward.
    tokens, hidden, layers, vocab = 128, 768, 12, 50257
    matrices = 2 * tokens * (12 * hidden * hidden * layers + vocab * hidden)
    saved = (plain.flops - forward_flops(plain)) - (w.flops - forward_flops(w))
    assert saved == matrices - 2 * (12 * 2 * 128 * 8 * (768 + 2304))


def test_only_adapters_get_gradients_and_the_base_is_frozen() -> None:
    w = preset("llama-7b", batch=1, seq=64, lora=Adapter())
    trained = {w.tensors[u.tensor].name for u in w.uses if u.kind is UseKind.GRADIENT}
    assert len(trained) == 2 * 2 * 32  # A and B of q_proj and v_proj in 32 layers
    assert all(".lora_" in name for name in trained)
    assert all(t.frozen is (".lora_" not in t.name) for t in w.tensors if t.tied_to is None)
    assert adapter_of(w) == Adapter(rank=16, targets=("q_proj", "v_proj"))


def test_activations_of_an_adapter_are_kept_for_backward() -> None:
    """Without checkpointing A x of each target stays: tokens x rank values of 2 bytes, 24 targets."""
    plain = preset("bert-base", batch=1, seq=128, checkpointing=False)
    w = preset("bert-base", batch=1, seq=128, checkpointing=False, lora=Adapter(rank=16))
    last = max(i for i, m in enumerate(plain.moments) if m.phase is Phase.FWD and m.module.startswith("bert.encoder"))
    assert w.moments[last].end_bytes - plain.moments[last].end_bytes == 24 * 128 * 16 * 2


def test_a_last_matrix_with_an_adapter_is_recomputed_too() -> None:
    """Early stop ends a GPT layer's recompute before its last matmul; an adapter on it needs that matmul again."""
    w = preset("gpt2", batch=1, seq=64, lora=Adapter(rank=4, targets=("c_attn",)))
    all_of_it = preset("gpt2", batch=1, seq=64, lora=Adapter(rank=4, targets=("c_attn", "c_proj")))

    def recompute(one: Workload) -> int:
        return sum(m.flops for m in one.moments if m.phase is Phase.RECOMPUTE)

    adapters = 2 * 64 * 4 * ((768 + 768) + 3072)  # attn.c_proj, and A of mlp.c_proj, where the recompute stops
    assert recompute(all_of_it) - recompute(w) == 12 * (2 * 64 * 3072 * 768 + adapters)


def test_bytes_of_a_quantised_base_by_hand() -> None:
    w = preset("gpt2", batch=1, seq=64, lora="r=8", base="nf4")
    matrices = (768, 2304), (768, 768), (768, 3072), (3072, 768)
    quantised = [t for t in w.tensors if t.dtype == "nf4"]
    assert quantised_params(w.tensors) == sum(t.numel for t in quantised) == 12 * sum(a * b for a, b in matrices)
    # c_attn: 768 x 2304 / 2 bytes, 27,648 scales of blocks of 64, 108 fp32 scales of 256 of these
    assert quantised[0].bytes == 884_736 + 27_648 + 4 * 108
    assert {t.dtype for t in w.tensors if t not in quantised} == {"bf16"}
    eight = {b: preset("gpt2", batch=1, seq=64, lora="r=8", base=b) for b in ("int8", "fp8")}
    sizes = {b: next(t.bytes for t in one.tensors if t.dtype == b) for b, one in eight.items()}
    assert sizes == {"int8": 768 * 2304 + 4 * 2304, "fp8": 768 * 2304 + 4 * 6 * 18}
    assert BASES["nf4"].bytes_per_param == pytest.approx(0.51587, abs=1e-5)
    # A chunk of the base has its stored bytes and no list beside them. Loading needs no more than the model has.
    layout = build_layout(w)
    base = [c for c in layout.chunks if c.dtype == "nf4"]
    assert sum(c.params for c in base) == sum(t.bytes for t in quantised)
    assert {name for c in base for name in layout.lists if layout.list_bytes(name)[c.index]} == {"param"}
    assert WHOLE.startup_bytes(w, 1) == sum(t.bytes for t in w.tensors)


@pytest.mark.parametrize(("model", "base"), [("llama-7b", "nf4"), ("qwen3-30b-a3b", "nf4-experts"), ("gpt2", "fp8")])
def test_each_pass_dequantises_each_matrix_once(model: str, base: str) -> None:
    shape = structs.replace(model_entry(model), layers=1)
    plain, w = (
        workload_of(shape, batch=1, sequence=128, checkpointing=False, lora="r=4,targets=all-linear", base=given)
        for given in (None, base)
    )
    for phase in (Phase.FWD, Phase.BWD):
        of_phase = [i for i, m in enumerate(w.moments) if m.phase is phase]
        written = sum(w.moments[i].bytes_written - plain.moments[i].bytes_written for i in of_phase)
        assert written == 2 * quantised_params(w.tensors) > 0
    assert [m.end_bytes for m in w.moments] == [m.end_bytes for m in plain.moments]
    rooms = [m.peak_bytes - n.peak_bytes for m, n in zip(w.moments, plain.moments)]
    alone = max(t.numel for t in w.tensors if t.dtype == base)
    largest = sum(t.numel for t in w.tensors if t.name.endswith("gate_up_proj")) or alone
    assert min(rooms) >= 0 and alone < max(rooms) <= 2 * largest
    assert w.flops == plain.flops


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_experts_stay_in_the_working_dtype(base: str) -> None:
    """Their stacks are no linear modules in transformers, which alone bitsandbytes quantises."""
    shape = structs.replace(model_entry("qwen3-30b-a3b"), layers=1)
    w = workload_of(shape, batch=1, sequence=128, lora="r=4", base=base)
    stacks = [t for t in w.tensors if ".experts." in t.name]
    assert {t.dtype for t in stacks} == {"bf16"} and sum(t.numel for t in stacks) == 3 * 128 * 2048 * 768
    assert quantised_params(w.tensors) == 2 * 2048 * (4096 + 512)
    assert "0.60 B of experts stay in bf16 (nf4-experts quantises their stacks too)" in w.notes


def test_int8_sums_in_32_bits() -> None:
    """The forward pass has the input's codes, beside them its fp16 copy or 32-bit sums, and no dequantised matrix."""
    plain, w = (
        preset("gpt2", batch=1, seq=64, lora="r=4", base=base, checkpointing=False, attention="math")
        for base in (None, "int8")
    )
    more = [
        sum(m.bytes_written - n.bytes_written for m, n in zip(w.moments, plain.moments) if m.phase is phase)
        for phase in (Phase.FWD, Phase.BWD)
    ]
    widths = (768, 2304), (768, 768), (768, 3072), (3072, 768)
    assert more == [12 * 64 * sum(a + max(2 * a, 4 * b) for a, b in widths), 2 * quantised_params(w.tensors)]


def test_a_variant_keeps_adapter_base_and_optimizer() -> None:
    packed = preset("gpt2", batch=4, seq=64, lora="r=4", base="NF4")
    assert base_of(variant(packed, batch=2)) == axes_of(packed).base == "nf4"
    w = preset("gpt2", batch=4, seq=64, lora=Adapter(rank=4), optimizer="sgd")
    other = variant(w, batch=2, micro_batches=2)
    assert (other.batch, other.micro_batches, other.fingerprint) == (2, 2, w.fingerprint)
    assert other.optimizer == w.optimizer


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ModelError, match=r"lora r=2304: .* is 768 x 2304; the rank must be less than 2304"):
        preset("gpt2", batch=1, seq=64, lora=Adapter(rank=2304))
    with pytest.raises(ModelError, match=r"lora targets: no linear module is nothing; try c_attn, c_proj, c_fc"):
        preset("gpt2", batch=1, seq=64, lora=Adapter(targets=("nothing",)))
    with pytest.raises(ModelError, match=r"no module is lm; try .* q_proj, k_proj"):
        preset("qwen3-8b", batch=1, seq=64, lora=Adapter(save=("lm",)))
    router = low_rank(Adapter(rank=16), "router", 2048, 8, packed=False)  # peft takes a rank above the smaller side
    assert router.parameters["router.lora_B.weight"] == (8, 16)
    with pytest.raises(ModelError, match="base is 'nf4'; what is trained is not quantised; train adapters beside it"):
        preset("gpt2", batch=1, seq=64, base="nf4")
    with pytest.raises(ModelError, match="base is 'fp4'; known bases are bf16, int8, nf4, nf4-single, fp8"):
        preset("gpt2", batch=1, seq=64, lora="r=4", base="fp4")
    with pytest.raises(ModelError, match="lora: rank = 0"):
        preset("gpt2", batch=1, seq=64, lora=Adapter(rank=0))
    with pytest.raises(UnknownName, match="unknown optimizer 'adamv'; known: adafactor, adam, adamw"):
        preset("gpt2", batch=1, seq=64, optimizer="adamv")


@pytest.mark.parametrize(
    ("job", "micro_batches", "gpus"),
    [
        pytest.param(job, count, gpus, marks=[pytest.mark.whole] if (n + m) % 2 else [])
        for n, (job, count) in enumerate((("bf16", 2), ("nf4", 2), ("int8", 1), ("adamw-bf16-states", 2), ("sgd", 1)))
        for m, gpus in enumerate((1, 4))
    ],
)
def test_every_policy_plans_them_and_the_checker_agrees(job: str, micro_batches: int, gpus: int, whole: bool) -> None:
    """`optimal`, which takes longest, with --whole alone: tide has its parts."""
    lora = job in ("bf16", *BASES)
    given = Adapter(rank=8, targets=("all-linear",)) if lora else None
    w = preset("gpt2", batch=1, seq=64, micro_batches=micro_batches, lora=given, base=job if lora else None)
    w = w if lora else with_optimizer(w, job)
    changes = {"gpu.memory": "450MB", "peer.bandwidth": "5GB/s"} if gpus > 1 else {"gpu.memory": "650MB"}
    m = ps.machine("virtual", overrides={"gpus": gpus, **changes})
    fitting = set()
    for name, policy in policies().items():
        if name == "optimal" and not whole:
            continue
        try:
            plan = policy(w, m, ps.Settings(update="eager", clip=False, effort=0.1))
        except (ps.DoesNotFit, CannotPlan):
            continue
        plan.check()
        fitting.add(name)
    assert {"tide", "patrickstar"} <= fitting


def test_fewer_state_bytes_take_less_room_and_less_time() -> None:
    m = ps.machine("v100-32")
    adamw = ps.compare(preset("1B", batch=1, seq=64), m, policies=["zero_offload"]).best().row
    sgd = ps.compare(preset("1B", batch=1, seq=64, optimizer="sgd"), m, policies=["zero_offload"]).best().row
    assert adamw.peak_host_bytes is not None and sgd.peak_host_bytes is not None
    assert sgd.peak_host_bytes == pytest.approx(adamw.peak_host_bytes * 8 / 16, rel=1e-3)  # 2 + 2 + 4 of 2 + 2 + 12
    assert sgd.iteration_s is not None and adamw.iteration_s is not None
    assert sgd.iteration_s < adamw.iteration_s * 0.6  # 12 of 28 bytes of traffic


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["fits", "--model", "gpt2", "--batch", "1", "--seq", "64", "--machine", "v100-16", "--policy", "all_on_gpu"]
    assert main([*job, "--lora", "r=8", "--optimizer", "sgd"]) == 0
    assert "LoRA r=8 on c_attn, sgd" in capsys.readouterr().out
    assert main([*job, "--lora", "r=8", "--base", "QLoRA"]) == 0
    assert "0.08 B of 0.12 B parameters in nf4, 0.516 bytes each" in " ".join(capsys.readouterr().out.split())
    for wrong, said in (
        ("r=x", "'r=x' is not r=RANK"),
        ("targets=c_attn", "a rank is needed"),
        ("r=0", "--lora r=0: rank must be at least 1, not 0"),
    ):
        assert main([*job, "--lora", wrong]) == 2
        assert said in capsys.readouterr().err
    trace = ["fits", "--trace", "traces/gpt2.parquet", "--machine", "v100-16", "--policy", "all_on_gpu"]
    assert main([*trace, "--lora", "r=8", "--base", "int8"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "LoRA r=8 on c_attn, 0.08 B of 0.12 B parameters in int8, 1.004 bytes each; an upper bound" in said
    for flags, wanted in (
        (["--base", "nf4"], "base is 'nf4'; what is trained is not quantised; train adapters beside it"),
        (["--lora", "r=8,targets=q_proj"], "no linear module is q_proj; try c_attn, c_proj, c_fc"),
        (["--lora", "r=8,targets=("], "'(' is no regular expression"),
        (["--lora", "r=8,save=score"], "lora save: no module is score; try transformer, wte"),
        (["--lora", "r=8,save=lm_head"], "lm_head.weight shares its table with transformer.wte.weight"),
        (["--lora", "r=2304"], "transformer.h.0.attn.c_attn.weight is 768 x 2304; the rank must be less than 2304"),
    ):
        assert main([*trace, *flags]) == 2
        assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("model", ["llama-3-8b", "gpt2"])
def test_a_preset_says_that_a_head_has_no_adapter(model: str) -> None:
    with pytest.raises(ModelError, match=r"no adapter on lm_head: .* --lora r=4,targets=lm_head\)"):
        ps.preset(model, batch=1, seq=64, lora="r=4,targets=lm_head")
    assert ps.preset(model, batch=1, seq=64, lora="r=4,targets=all-linear").params > 0


def test_a_trace_that_does_not_fit_is_told_of_adapters_and_a_base() -> None:
    w, m = load_trace("traces/gpt2.parquet", batch=4, checkpointing=True), ps.machine("v100-16", gpu_memory="3.95GB")
    row = fits(w, m, policies=["all_on_gpu"], times=False).rows[0]
    assert not row.fits and row.changes and row.changes[0].startswith("with --lora r=16"), row.changes


def test_recorded_seconds_stay_where_adapters_change_nothing() -> None:
    w = load_trace("traces/gpt2.parquet", batch=4, checkpointing=True)
    timed = adapted(replace(w, moments=tuple(replace(m, duration_s=1e-3) for m in w.moments)), Adapter(rank=8))
    seconds = {(m.module, m.phase): m.duration_s for m in timed.moments if m.name.startswith("begin")}
    assert seconds["transformer.h.0.attn.c_attn", Phase.FWD] is None
    assert seconds["transformer.h.0.mlp.c_fc", Phase.FWD] == 1e-3
    assert "seconds of moments that adapters or a base change are estimated" in timed.notes


def test_an_adapter_is_read_as_it_is_written() -> None:
    for text, given in (
        ("r=8,targets=q_proj+v_proj", Adapter(rank=8, targets=("q_proj", "v_proj"))),
        (
            "r=8,targets=all-linear,save=lm_head+norm",
            Adapter(rank=8, targets=("all-linear",), save=("lm_head", "norm")),
        ),
        (r"r=8,targets=.*\.h\.\d{1,2}\.(q|v)+_proj", Adapter(rank=8, targets=r".*\.h\.\d{1,2}\.(q|v)+_proj")),
        ("r=4,alpha=32.5,rs,dora", Adapter(rank=4, alpha=32.5, rs=True, dora=True)),
    ):
        assert adapter(text) == given
        assert str(given) == text
    assert adapter("lora_r=8,target_modules=c_fc,use_rslora=true") == Adapter(rank=8, targets=("c_fc",), rs=True)
    with pytest.raises(ModelError, match="says rank once more"):
        adapter("r=8,rank=4")


def test_modules_that_are_trained_whole_have_copies_gradients_and_states() -> None:
    """peft keeps the frozen original beside the copy."""
    given = Adapter(rank=4, save=("norm", "lm_head"))  # "norm" is the end of input_layernorm too
    shape = structs.replace(model_entry("llama-7b"), layers=2)
    plain, w = (workload_of(shape, batch=1, sequence=64, lora=one) for one in (Adapter(rank=4), given))
    copied = 32000 * 4096 + 5 * 4096
    assert w.params - plain.params == w.trainable_params - plain.trainable_params == copied
    assert w.flops - plain.flops == 2 * 64 * 32000 * 4096  # the head's gradient
    assert axes_of(w).lora == Adapter(rank=4, targets=("q_proj", "v_proj"), save=adapter_of(w).save)  # type: ignore[union-attr]
    assert variant(w, batch=2, shape=shape).fingerprint == w.fingerprint
    with pytest.raises(ModelError, match=r"transformer.wte.weight shares its table with lm_head.weight"):
        preset("gpt2", batch=1, seq=64, lora=Adapter(save=("wte",)))


def test_dora_by_hand() -> None:
    """Beside LoRA: a magnitude per output, the product of the pair by an identity matrix in each forward pass, and the
    outputs of base and adapter for backward."""
    plain, w = (
        preset("gpt2", batch=1, seq=64, checkpointing=False, lora=Adapter(rank=8, dora=dora)) for dora in (False, True)
    )
    assert w.trainable_params - plain.trainable_params == 12 * 2304
    assert w.flops - plain.flops == 12 * 2 * 8 * 768 * (768 + 2304)
    last = max(i for i, m in enumerate(w.moments) if m.phase is Phase.FWD)
    assert w.moments[last].end_bytes - plain.moments[last].end_bytes == 12 * 2 * 64 * 2304 * 2
    assert "DoRA r=8 on c_attn" in w.notes and adapter_of(w) == Adapter(rank=8, targets=("c_attn",), dora=True)
