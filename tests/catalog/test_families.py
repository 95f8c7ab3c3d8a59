"""Cards of one generation agree where their hardware does, over all pairs; links and hosts are what their parts say."""

from __future__ import annotations

from itertools import combinations

import pytest

from pstar_sim.catalog.loader import load_catalog, load_machine, machine_names
from pstar_sim.catalog.machine import Rank

CATALOG = load_catalog()
SINGLE = [name for name in machine_names() if CATALOG.machines[name].values.gpus is not None]


def rank(name: str) -> Rank:
    return load_machine(name).ranks[0]


def pairs(of: str) -> list[tuple[str, str]]:
    """Pairs of machines whose GPUs have equal entries ("gpu"), equal generations, or equal links."""
    key = {
        "gpu": lambda m: CATALOG.machines[m].values.gpu,
        "generation": lambda m: CATALOG.gpus[str(CATALOG.machines[m].values.gpu)].values.generation,
        "link": lambda m: CATALOG.machines[m].values.link,
    }[of]
    return [(a, b) for a, b in combinations(SINGLE, 2) if key(a) is not None and key(a) == key(b)]


def test_machines_of_one_card_have_the_same_card() -> None:
    assert [pair for pair in pairs("gpu") if rank(pair[0]).gpu != rank(pair[1]).gpu] == []


def test_machines_of_one_link_have_the_same_link() -> None:
    assert [pair for pair in pairs("link") if rank(pair[0]).link != rank(pair[1]).link] == []


def test_cards_of_one_generation_reach_the_same_shares_of_their_peaks() -> None:
    for one, other in pairs("generation"):
        assert_same_shares(one, other)


def assert_same_shares(one: str, other: str) -> None:
    """But for cards of which one has shares of its own, guessed or measured."""
    shares = []
    for name in (one, other):
        gpu, card = rank(name).gpu, CATALOG.gpus[rank(name).gpu.name].values
        given = (card.hbm_efficiency, card.fp32_efficiency, card.tensor_core_efficiency, card.calibrated)
        reached = {dtype: rate / getattr(card, f"{dtype}_tflops") / 1e12 for dtype, rate in gpu.flops_per_s.items()}
        shares.append((given, {**reached, "hbm": gpu.hbm_bytes_per_s / card.hbm_gb_per_s / 1e9}))
    (given, first), (others, second) = shares
    for figure in first.keys() & second.keys():
        if given == others:
            assert first[figure] == pytest.approx(second[figure], rel=1e-6), (one, other, figure)


def test_a_pair_that_has_to_agree_is_among_them() -> None:
    assert {("h100-80", "h200"), ("h100-80", "gh200")} <= set(pairs("generation"))
    assert ("h100-80", "h100-80x8") in pairs("gpu")
