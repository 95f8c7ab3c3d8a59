"""From how many tokens on copies of layers hide: by hand, beside the rule of thumb, and beside what is simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pstar_sim as ps
from pstar_sim.catalog.loader import load_machine, resize
from pstar_sim.core.plan import Settings
from pstar_sim.core.timeline import Timeline
from pstar_sim.planner.explain import explanation
from pstar_sim.planner.streaming import Hiding, hiding
from pstar_sim.policy.registry import find_policy
from pstar_sim.report.capacity_tables import fits_text
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.workload.mixing import block_names
from pstar_sim.workload.presets import preset
from pstar_sim.workload.workload import UseKind, Workload

LONGEST = 2048


def frozen_chain(*, sequence: int = 10, checkpointing: bool = False, micro_batches: int = 1) -> Workload:
    """4 layers of 2 MiB. Each takes 2 s to come, 1 s forward, 2 s backward, and 1 s to recompute."""
    w = chain_workload(4, 2**20, forward_s=1.0, checkpointing=checkpointing, micro_batches=micro_batches)
    reads = tuple(use for use in w.uses if use.kind is UseKind.READ)
    return replace(w, sequence=sequence, uses=reads, tensors=tuple(replace(t, frozen=True) for t in w.tensors))


def adapted(model: str, base: str, tokens: int) -> Workload:
    batch = -(-tokens // LONGEST)
    return preset(model, batch=batch, seq=round(tokens / batch), lora="r=16", base=base, loss="chunked")


def hidden(w: Workload, machine: str | ps.Machine) -> Hiding:
    one = hiding(w, load_machine(machine) if isinstance(machine, str) else machine)
    assert one is not None
    return one


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_chain_hides_its_copies_from_the_tokens_worked_out_by_hand(micro_batches: int) -> None:
    # 8 s of copies; 10 tokens compute 4 s forward and 8 s backward, with a recompute 12 s.
    plain = hidden(frozen_chain(micro_batches=micro_batches), round_machine())
    assert (plain.transfer_s, plain.forward_s, plain.backward_s) == pytest.approx((8, 4, 8))
    assert (plain.tokens, plain.forward_tokens, plain.backward_tokens, plain.hides) == (10, 20, 10, False)
    again = hidden(frozen_chain(sequence=20, checkpointing=True), round_machine())
    assert (again.forward_tokens, again.backward_tokens, again.hides) == (40, 14, False)  # 20 * 8 / 12 = 13.3


def test_host_memory_and_other_ranks_bound_a_pass_too() -> None:
    assert hidden(frozen_chain(), round_machine(dram_bytes_per_s=2**18)).transfer_s == pytest.approx(32)
    # Halves of 1 s each come at once and are gathered, 1 MiB of 2 at the rate of the peers.
    pair = round_machine(ranks=2, peer_bytes_per_s=2**18)
    assert hidden(frozen_chain(), pair).transfer_s == pytest.approx(4 * 4)
    assert hidden(frozen_chain(), round_machine(ranks=2, peer_bytes_per_s=2**30)).transfer_s == pytest.approx(4)


def test_a_model_that_is_trained_whole_has_no_such_number_unless_it_has_experts() -> None:
    assert hiding(chain_workload(4, 2**20, forward_s=1.0), round_machine()) is None
    assert hiding(preset("llama-3.2-1b", batch=1, seq=512), load_machine("rtx4090-128gb")) is None
    whole = hidden(preset("qwen3-30b-a3b", batch=1, seq=16), "rtx4090-128gb")
    assert whole.experts_used == pytest.approx(1 - (1 - 8 / 128) ** 16)
    assert f"uses {whole.experts_used * 100:.4g} % if all are equally likely" in whole.words


def test_the_number_is_near_the_rule_of_thumb_and_the_same_whatever_the_job_has() -> None:
    short, long = (hidden(adapted("llama-3.1-8b", "bf16", tokens), "rtx4090-128gb") for tokens in (512, 2048))
    machine = load_machine("rtx4090-128gb")
    thumb = 2 * machine.gpu.flops_per_s["bf16"] / (2 * machine.link.h2d_bytes_per_s)
    assert short.forward_tokens == pytest.approx(thumb, rel=0.35)
    assert short.forward_tokens == pytest.approx(long.forward_tokens, rel=0.02)
    assert short.backward_tokens == pytest.approx(short.forward_tokens / 2, rel=0.1)  # recomputes, and no dW
    # 0.516 bytes instead of 2 would be 3.9 times fewer; dequantising covers some of the copies besides.
    quantised = hidden(adapted("llama-3.1-8b", "nf4", 512), "rtx4090-128gb")
    assert quantised.forward_tokens < short.forward_tokens / 3.9
    # Of 30 B parameters of experts a token goes through 3.
    experts = hidden(adapted("qwen3-30b-a3b", "bf16", 2048), "rtx4090-128gb")
    assert experts.forward_tokens > 4 * short.forward_tokens


SIMULATED = [
    ("llama-3.1-8b", "nf4", "rtx4090-128gb"),
    ("llama-3.1-8b", "int8", "rtx3090-64gb"),
    ("llama-3.1-8b", "bf16", "rtx4090-128gb"),
    ("qwen3-8b", "nf4", "a100-80"),
    ("qwen3-30b-a3b", "nf4-experts", "rtx4090-128gb"),
    ("gpt-oss-20b", "nf4-experts", "rtx4090-128gb"),
]


@pytest.mark.parametrize(
    ("model", "base", "name"),
    [pytest.param(*row, marks=[pytest.mark.whole] if n else []) for n, row in enumerate(SIMULATED)],
)
def test_the_simulated_link_binds_below_and_compute_above(model: str, base: str, name: str) -> None:
    """With room for one layer more than the least, a few are kept, so the simulated border lies up to 15 % lower."""
    least = hidden(adapted(model, base, LONGEST), name).from_tokens
    for share in (0.6, 1.0):
        w = adapted(model, base, round(share * least))
        one, timeline = hidden(w, name), simulated(w, name)
        waited = (timeline.stall_s.get("h2d", 0.0) - one.outside_s) / timeline.iteration_s
        assert (waited > 0.02, waited < 0.01) == (share < 1, share == 1)


def simulated(w: Workload, name: str) -> Timeline:
    """With room for one layer more than the least, so that the next comes while one computes."""
    machine, one = load_machine(name), hidden(w, name)
    least = ps.fits(w, machine, policies="tide", times=False, near=False).rows[0].gpu_needed_bytes
    assert least is not None
    layers = len(block_names(w))
    room = least + one.layers_bytes // layers + machine.gpu.context_bytes
    return play(find_policy("tide")(w, resize(machine, gpu_memory=room), Settings()))


def test_answers_say_it_in_a_sentence_in_json_and_with_the_formula() -> None:
    w = adapted("llama-3.1-8b", "nf4", 512)
    machine = resize(load_machine("rtx4090-128gb"), gpu_memory=6 * 10**9)
    answer = ps.fits(w, machine, policies="tide")
    one = answer.hiding
    assert one is not None
    assert one.to_json()["from_tokens"] == one.forward_tokens
    assert one.to_json()["hides"] is False
    said = " ".join(fits_text(answer).split())
    assert f"Copies of layers hide behind compute from {one.forward_tokens:,} tokens per pass on (512 here)" in said
    plan = find_policy("tide")(w, machine, Settings())
    lines = explanation(plan, play(plan))["when copies hide"]
    assert any("a + b x tokens >= bytes / link rate" in line for line in lines)
    assert any(f"from {one.forward_tokens:,} on" in line for line in lines)
