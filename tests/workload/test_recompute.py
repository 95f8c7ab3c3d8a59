"""Recomputing less than all blocks: the core of attention alone, or the last of each N blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

import pstar_sim as ps
from pstar_sim.errors import CannotPlan, ModelError, TraceError
from pstar_sim.frameworks import megatron, torchtitan
from pstar_sim.planner.jobs import Job
from pstar_sim.policy.registry import find_policy, policies
from pstar_sim.workload.presets import preset, variant
from pstar_sim.workload.trace import load_trace, save_trace
from pstar_sim.workload.workload import Phase, Workload, product_flops

LAYERS, HEADS, HIDDEN, BATCH, SEQUENCE = 12, 12, 768, 2, 128  # of gpt2


def model(**axes: object) -> Workload:
    return preset(str(axes.pop("name", "gpt2")), batch=BATCH, seq=SEQUENCE, dtype="bf16", **axes)


def kept(w: Workload) -> int:
    """Bytes at the end of the last block's forward."""
    return next(m for m in w.moments if m.module == "transformer.ln_f").start_bytes


def test_attention_alone_by_hand() -> None:
    """Each layer keeps neither the probabilities (fp32) nor the scaled copies of q, k and v; everything else stays.
    Korthikanti et al.: of s b h (34 + 5 a s / h) the second term goes; here without dropout."""
    all_kept, selective = (model(attention="math", checkpointing=False, recompute=what) for what in (None, "attention"))
    of_a_layer = BATCH * HEADS * SEQUENCE**2 * 4 + 3 * BATCH * SEQUENCE * HIDDEN * 4
    assert kept(all_kept) - kept(selective) == LAYERS * of_a_layer
    assert not selective.checkpointing and all(m.phase is not Phase.RECOMPUTE for m in selective.moments)
    scores = (BATCH * HEADS, SEQUENCE, HIDDEN // HEADS, SEQUENCE)
    assert selective.flops - all_kept.flops == LAYERS * product_flops(scores)
    assert selective.moments[-2].end_bytes == all_kept.moments[-2].end_bytes


def test_fused_attention_has_next_to_nothing_to_recompute() -> None:
    """It keeps one fp32 log-sum for each query and head; the forward of all layers runs once more for that."""
    all_kept, selective = (model(checkpointing=False, recompute=what) for what in (None, "attention"))
    assert kept(all_kept) - kept(selective) == LAYERS * BATCH * SEQUENCE * HEADS * 4
    assert "saves next to nothing" in selective.notes and "attention recompute" in selective.notes
    assert len([call for m in selective.moments for call in m.attentions]) == 3 * LAYERS


@pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b", "bert-base"])
@pytest.mark.parametrize("autocast", [None, "bf16"])
def test_the_last_of_each_two_blocks_by_hand(name: str, autocast: str | None) -> None:
    """What blocks keep lies half-way between none and all, and so do the flops of recomputing. Only a checkpoint keeps
    its input where norms do not."""
    axes = {"name": name} | ({"autocast": autocast} if autocast else {})
    write = model if autocast is None else lambda **more: preset(more.pop("name"), batch=2, seq=128, **more)
    all_kept, none, half = (
        write(**axes, checkpointing=on, recompute=what) for on, what in ((False, None), (True, None), (True, "every-2"))
    )
    recomputed = {m.module.split(".")[2 if "llama" in name else -1] for m in half.moments if m.phase is Phase.RECOMPUTE}
    assert recomputed and half.checkpointing
    assert 2 * half.flops == all_kept.flops + none.flops
    tops = [next(m for m in w.moments if m.phase is Phase.BWD).start_bytes for w in (all_kept, none, half)]
    inputs = BATCH * SEQUENCE * 2048 * 2 * 16 if name.startswith("llama") else BATCH * SEQUENCE * HIDDEN * 4 * 13
    assert abs(2 * tops[2] - tops[0] - tops[1]) <= inputs
    if name == "gpt2" and autocast is None:
        assert 2 * tops[2] == tops[0] + tops[1]
    assert half.moments[-2].end_bytes == none.moments[-2].end_bytes


def test_every_first_block_is_all_blocks() -> None:
    assert model(recompute="every-1").moments == model(checkpointing=True).moments


def test_less_recomputation_takes_the_place_of_checkpointing_where_a_job_changes() -> None:
    assert variant(model(checkpointing=True), recompute="attention").moments == model(recompute="attention").moments
    assert variant(model(checkpointing=False), recompute="every-2").moments == model(recompute="every-2").moments


def test_a_model_of_any_depth_is_tried_with_every_second_block() -> None:
    """The search begins with one block, which a model of the catalog would refuse."""
    answer = ps.max_model(
        ps.machine("a100-40", gpu_memory="6GB"), batch=1, seq=64, like="gpt2", policies="all_on_gpu", catalog=False,
        recompute="every-2",
    )  # fmt: skip
    assert answer["all_on_gpu"].value > 12
    with pytest.raises(ModelError, match="the model has 12 blocks"):
        Job(model="gpt2", batch=1, seq=64, recompute="every-13").of(ps.machine("a100-40"))


@pytest.mark.parametrize("policy", sorted(policies()))
@pytest.mark.parametrize("what", ["attention", "every-3"])
def test_each_policy_plans_it(policy: str, what: str) -> None:
    machine, w = ps.machine("a100-80x8" if "zero3" in policy else "a100-80"), model(recompute=what)
    if (policy, what) == ("l2l", "every-3"):
        with pytest.raises(CannotPlan, match="a layer-major order keeps or recomputes all blocks"):
            find_policy(policy)(w, machine, ps.Settings())
    else:
        find_policy(policy)(w, machine, ps.Settings()).check()


def test_a_file_and_a_variant_keep_it(tmp_path: Path) -> None:
    w = model(recompute="every-2")
    save_trace(w, tmp_path / "w.parquet")
    assert load_trace(tmp_path / "w.parquet").recompute == "every-2"
    assert variant(w, batch=1).recompute == "every-2"
    assert variant(w, checkpointing=True).recompute is None
    assert ps.fits(preset("gpt2", batch=8, seq=64, recompute="every-2"), "a100-40x8", policies=["all_on_gpu"]).any


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"recompute": "every-0"}, "recompute is 'every-0'; it is attention or every-N, such as every-2"),
        ({"recompute": "mlp"}, "it is attention or every-N"),
        ({"recompute": "every-2", "checkpointing": False}, "checkpointing is off; leave one of them out"),
        ({"recompute": "attention", "checkpointing": True}, "checkpointing is on, which recomputes all of a block"),
        ({"recompute": "every-13"}, "the model has 12 blocks; every-12 recomputes the last alone"),
    ],
)
def test_what_it_cannot_be(axes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model(**axes)


def test_layers_of_all_micro_batches_need_equal_blocks() -> None:
    with pytest.raises(TraceError, match="recomputes every-2; a layer-major order keeps or recomputes all blocks"):
        ps.relay(preset("gpt2", batch=1, seq=64, micro_batches=2, recompute="every-2"))


def test_torchtitan_and_megatron_have_words_for_it() -> None:
    read = torchtitan.read({"activation_checkpoint": {"mode": "selective", "selective_ac_option": "3"}}, "x.toml")
    assert (read.checkpointing, read.recompute) == (True, "every-3") and not read.notes
    assert torchtitan.read({}, "x.toml").recompute == "every-2"
    by_operator = torchtitan.read({"activation_checkpoint": {"selective_ac_option": "op"}}, "x.toml")
    assert (
        by_operator.checkpointing is None
        and "selective_ac_option = op; --checkpointing decides" in by_operator.notes[0]
    )
    with pytest.raises(
        ps.PstarError, match=r'x.toml: activation_checkpoint.selective_ac_option is "0"; it is "op", or'
    ):
        torchtitan.read({"activation_checkpoint": {"selective_ac_option": "0"}}, "x.toml")
    plan = find_policy("zero_offload")(model(recompute="attention"), ps.machine("a100-80"), ps.Settings())
    assert "--recompute-granularity selective" in megatron.write(megatron.express(plan).configuration)
