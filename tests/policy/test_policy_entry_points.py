"""Policies that installed packages offer under the entry-point group `pstar.policies`."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint, EntryPoints

import pytest

import pstar_sim as ps
from pstar_sim.errors import PstarError, UnknownName
from pstar_sim.policy import registry
from pstar_sim.policy.systems.all_on_gpu import all_on_gpu
from pstar_sim.testing import chain_workload


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch):
    """Pretend that packages with these entry points (name -> object reference) are installed."""

    def offered(**points: str) -> None:
        found = EntryPoints(EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in points.items())

        def entry_points(**wanted: str) -> EntryPoints:
            return found.select(**wanted)

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
        monkeypatch.setattr(registry, "entry_points", entry_points)

    return offered


def test_one_that_is_offered_is_known_by_its_name(offer) -> None:
    offer(theirs="pstar_sim.policy.systems.all_on_gpu:all_on_gpu")
    assert list(registry.policies()) == [
        "all_on_gpu",
        "zero_offload",
        "static_partition",
        "patrickstar",
        "l2l",
        "tide",
        "optimal",
        "zero3_resident",
        "zero3_offload",
        "deep_optimizer_states",
        "zero_infinity",
        "stronghold",
        "whale",
        "karma",
        "theirs",
    ]
    assert registry.find_policy("theirs") is all_on_gpu
    w = chain_workload(2, 1 << 20)
    (row,) = ps.compare(w, ps.machine("rtx4090"), policies=["theirs"]).rows
    assert (row.policy, row.fits) == ("theirs", True)


def test_a_built_in_name_stays_built_in(offer) -> None:
    offer(tide="pstar_sim.policy.systems.all_on_gpu:all_on_gpu")
    assert registry.find_policy("tide") is not all_on_gpu
    assert registry.policies()["tide"] is not all_on_gpu


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("there_is_no_such_module:policy", "cannot be loaded: ModuleNotFoundError: No module named"),
        ("pstar_sim.units:no_such_name", "cannot be loaded: AttributeError"),
        ("pstar_sim.units:MIB", "is not a function .* but a int"),
    ],
)
def test_a_broken_one_is_named(offer, value: str, reason: str) -> None:
    offer(broken=value)
    with pytest.raises(PstarError, match=rf"policy 'broken' \(entry point pstar.policies: {value}\) {reason}"):
        registry.policies()
    with pytest.raises(PstarError, match="policy 'broken'"):
        registry.find_policy("broken")
    assert registry.find_policy("all_on_gpu") is all_on_gpu  # does not keep the others from being used


def test_an_unknown_name_has_neighbours(offer) -> None:
    offer(tidal="pstar_sim.policy.systems.all_on_gpu:all_on_gpu")
    with pytest.raises(UnknownName, match="unknown policy 'tida'; did you mean tid"):
        registry.find_policy("tida")
