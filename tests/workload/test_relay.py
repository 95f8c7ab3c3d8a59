"""The layer-major order, on a chain of three layers whose bytes are worked out by hand.

Moments of a micro-batch: F0 F1 F2, R2 B2, R1 B1, R0 B0. Each layer's forward leaves 10 bytes behind.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from drawn import workloads
from hypothesis import given, settings

import pstar_sim as ps
from pstar_sim.errors import TraceError
from pstar_sim.testing import chain_workload
from pstar_sim.workload.orders import Order
from pstar_sim.workload.relay import parts_of, relay
from pstar_sim.workload.trace import load_trace, load_variants, save_trace
from pstar_sim.workload.workload import Workload


def chain(layers: int = 3, micro_batches: int = 2, *, checkpointing: bool = True) -> Workload:
    rise = [10 * (layer + 1) for layer in range(layers)]
    fall = [level for level in reversed(rise) for _ in range(1 + checkpointing)]
    return chain_workload(
        layers, 1024, tide_bytes=[*rise, *fall, 0], micro_batches=micro_batches, checkpointing=checkpointing
    )


def test_each_layer_runs_for_all_micro_batches() -> None:
    w = relay(chain())
    order = [f"{m.name[-1]}{m.phase.value[0]}{m.micro_batch}" for m in w.moments[:-1]]
    assert " ".join(order) == "0F0 0F1 1F0 1F1 2F0 2F1 2R0 2B0 2R1 2B1 1R0 1B0 1R1 1B1 0R0 0B0 0R1 0B1"
    assert w.order is Order.LAYER_MAJOR and chain().order is Order.DEPTH_FIRST
    assert parts_of(w) == [(0, 1), (2, 3), (4, 5), (6, 9), (10, 13), (14, 17), (18, 18)]
    assert [(w.reads[m], w.gradients[m]) for m in (4, 6, 7, 9)] == [((2,), ()), ((2,), ()), ((2,), (2,)), ((2,), (2,))]


def test_a_moment_holds_what_the_others_left_behind() -> None:
    peaks = [m.peak_bytes for m in relay(chain()).moments]
    forward, backward = [10, 20, 30, 40, 50, 60], [60, 60, 50, 50, 40, 40, 30, 30, 20, 20, 10, 10]
    assert peaks == [*forward, *backward, 0]


def test_one_micro_batch_has_one_order() -> None:
    assert relay(chain(micro_batches=1)).moments == chain(micro_batches=1).moments


def test_boundaries_go_to_the_host_and_come_back_a_cell_before_they_are_needed() -> None:
    """Layer 0 takes the batch, and layer 2 is needed again before its boundary could be gone. That of layer 1 in
    micro-batch 0 is in use up to moment 2; peaks count it up to moment 4, where cell 4 begins, and from moment 7 on,
    where cell 6 ends."""
    w = relay(chain(), stash="host")
    assert [(s.block, s.micro_batch, s.made, s.gone, s.back, s.needed) for s in w.stashes] == [
        ("layers.1", 0, 2, 4, 7, 10),
        ("layers.1", 1, 3, 5, 9, 12),
    ]
    assert w.boundaries_on_host and w.stash_room == (("layers.1", 512),)
    assert max(m.peak_bytes for m in w.moments) == 50  # inputs and outputs of layer 2, and one on its way


def test_with_boundaries_on_the_host_the_tide_does_not_know_the_depth() -> None:
    def peak(layers: int, stash: str) -> int:
        return relay(chain(layers, 4), stash=stash).peak_non_model_bytes

    assert peak(6, "host") == peak(24, "host")
    assert peak(24, "gpu") == 4 * peak(6, "gpu")


@pytest.mark.parametrize("family", ["gpt2", "llama-3-8b", "bert-large", "vit-b-16"])
def test_presets_of_every_family_have_the_order(family: str) -> None:
    """What the head leaves behind is there for one micro-batch at a time."""
    deep = ps.preset(family, batch=1, seq=None if family.startswith("vit") else 128, micro_batches=3)
    w, host = relay(deep), relay(deep, stash="host")
    assert w.flops == deep.flops and len(w.uses) == len(deep.uses)
    assert host.peak_non_model_bytes <= w.peak_non_model_bytes < 3 * deep.peak_non_model_bytes


@settings(max_examples=15, deadline=None)
@given(workloads())
def test_micro_batches_keep_their_own_moments(deep: Workload) -> None:
    if not any(".1" in m.module or "layers.0" in m.module for m in deep.moments):
        return
    w = relay(deep)
    for u in range(deep.micro_batches):
        names = [[m.name for m in x.moments if m.micro_batch == u] for x in (deep, w)]
        assert names[0] == names[1]
    assert sorted((u.tensor, u.kind, w.moments[u.moment].name) for u in w.uses) == sorted(
        (u.tensor, u.kind, deep.moments[u.moment].name) for u in deep.uses
    )


def test_refusals() -> None:
    for w, stash, why in (
        (relay(chain()), "gpu", "is layer-major already"),
        (relay(chain(), stash="host"), "gpu", "is layer-major already"),
        (relay(chain(5, 1), stash="host"), "gpu", "offloads activations"),
        (chain(checkpointing=False), "host", "keeps its activations"),
        (chain(), "disk", "stash is 'disk'; it is one of gpu, host"),
    ):
        with pytest.raises(TraceError, match=why):
            relay(w, stash=stash)
    flat = chain()
    flat = replace(flat, moments=tuple(replace(m, name=m.name.replace(".", ""), module="x") for m in flat.moments))
    with pytest.raises(TraceError, match="is not a stack of blocks"):
        relay(flat)
    odd = list(chain().moments)
    odd[1] = replace(odd[1], name="begin:layers.1.norm")
    with pytest.raises(TraceError, match="micro-batch 1 has other moments than micro-batch 0"):
        relay(replace(chain(), moments=tuple(odd)))


def test_an_order_that_mixes_micro_batches_at_will_is_refused() -> None:
    w = relay(chain())
    for moments, why in (
        ((w.moments[1], w.moments[0], *w.moments[2:]), "they go from 0 to 1, in order"),
        ((*w.moments[:2], w.moments[3], w.moments[2], *w.moments[4:]), "the moments are not in their order"),
        ((*w.moments[:6], w.moments[7], w.moments[6], *w.moments[8:]), "arrives before its first read|in their order"),
    ):
        with pytest.raises(TraceError, match=why):
            replace(w, moments=moments)


def test_moments_that_contradict_the_order_are_refused() -> None:
    """Micro-batch 0 continues in moment 2, after micro-batch 1 has begun."""
    w = relay(chain())
    with pytest.raises(
        TraceError, match=r"moments\[2\].micro_batch is 0; micro-batch 1 has begun, and order is depth-first"
    ):
        replace(w, order=Order.DEPTH_FIRST)


def test_a_trace_file_holds_the_order(tmp_path: Path) -> None:
    file = tmp_path / "relay.parquet"
    deep = chain()
    save_trace([deep, relay(deep), relay(deep, stash="host")], file)
    back = load_variants(file)
    assert [(w.order, len(w.stashes)) for w in back] == [
        (Order.DEPTH_FIRST, 0),
        (Order.LAYER_MAJOR, 0),
        (Order.LAYER_MAJOR, 2),
    ]
    assert back[2].moments == relay(deep, stash="host").moments
    with pytest.raises(TraceError, match="layer-major with boundaries on the host"):
        load_trace(file, batch=7)
