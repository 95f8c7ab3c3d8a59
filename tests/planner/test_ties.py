"""Of plans that are equally fast, the one that moves and pins least, wherever a plan is chosen."""

from __future__ import annotations

import pytest

import pstar_sim as ps
from pstar_sim.planner.variants import choose
from pstar_sim.policy.kit.ties import AS_FAST, burden, least_of


def test_the_rule_by_hand() -> None:
    """10 s and 10.001 s are equally fast, 10.0011 s is slower; bytes moved count before bytes pinned."""
    found = {
        "fast": (10.0, (900, 0)),
        "least": (10.001, (300, 5)),
        "pins": (10.0005, (300, 9)),
        "slow": (10.0011, (1, 1)),
    }

    def chosen(*names: str) -> str:
        return least_of(names, seconds=lambda n: found[n][0], burden=lambda n: found[n][1])

    assert AS_FAST == 1e-4
    assert chosen("fast", "pins", "least", "slow") == "least"
    assert chosen("fast", "pins") == "pins"
    assert chosen("fast", "slow") == "fast"
    with pytest.raises(ValueError, match="empty"):
        chosen()


def test_the_order_in_which_policies_are_named_does_not_decide_between_equals() -> None:
    """GPT-2 where compute binds: tide fetches 349 MB and static_partition 585 MB in the same time; optimal is as fast
    and moves no more than either."""
    m = ps.machine("virtual", gpu_memory="1.2GB", overrides=["link.bandwidth=1.5GB/s"])
    w = ps.preset("gpt2", batch=2, seq=64, dtype="fp32", checkpointing=True)
    names = ["tide", "optimal", "static_partition"]
    found = ps.compare(w, m, policies=names, barrier_cost=False, near=False)
    seconds = {name: found[name].row.iteration_s or 0.0 for name in names}
    assert max(seconds.values()) <= min(seconds.values()) * (1 + AS_FAST)
    moved = {name: burden(found[name].plan) for name in names}
    assert moved["optimal"] <= moved["tide"] < moved["static_partition"]
    assert found.best().row.policy != "static_partition"
    quick = ps.compare(w, m, policies=["tide", "static_partition"], barrier_cost=False, only_best=True)
    assert quick.best().row.policy == "tide"
    assert burden(choose([w], m, ps.Settings(), policy="tide").plan) == moved["tide"]
