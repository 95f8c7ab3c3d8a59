"""benchmarks/families.py: twice the GPUs of any family give about twice the tokens, and other factors have a reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pstar_sim.catalog.catalog import load_catalog

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("families")


@pytest.fixture
def user_file(tmp_path: Path) -> Callable[[str], Path]:
    def written(text: str) -> Path:
        path = tmp_path / "own.toml"
        path.write_text(text)
        return path

    return written


@pytest.mark.parametrize("model", ["1B", pytest.param("4B", marks=pytest.mark.whole)])
def test_twice_the_gpus_of_every_family_give_about_twice_the_tokens(script: Any, model: str, whole: bool) -> None:
    """Of half of the pairs without --whole."""
    catalog = load_catalog()
    families = script.Families(catalog)
    asked = [pair for pair in script.asked(catalog) if pair[0] == script.HARDWARE][:: 1 if whole else 2]
    found = [pair for pair in (families.pair(*a, model) for a in asked) if pair is not None]
    assert len(found) >= (20 if whole else 10)
    assert [pair for pair in found if not 1.6 <= pair.factor <= 2.02] == []


def test_a_pair_with_unequal_hosts_names_the_host(script: Any) -> None:
    families = script.Families(load_catalog())
    pair = families.pair(script.HOST, script.Side("v100-32", 1), script.Side("v100-32x8", 2), "1B")
    assert pair.factor > script.MOST
    assert pair.why.startswith("CPU Adam binds; 1.9") and pair.why.endswith("the rate of CPU Adam and DRAM")
    assert script.inside(pair.relieved) and not pair.wrong


def test_a_pair_over_a_slow_network_names_the_network(script: Any, user_file: Callable[[str], Path]) -> None:
    own = """
[links.dial-up]
connects = "node-node"
h2d_gb_per_s = 0.5
d2h_gb_per_s = 0.5
efficiency = 1.0
latency_us = 10
duplex = true
source = "test"
checked = 2026-11-27

[machines.slow]
gpu = "a100-80"
gpus = 4
link = "pcie4-x16"
peer_link = "nvlink3"
network = "dial-up"
host = "node-a100-1tb"
source = "test"
checked = 2026-11-27
"""
    families = script.Families(load_catalog(user_file(own)))
    pair = families.pair(script.NETWORK, script.Side("slow", 4), script.Side("slow", 4, nodes=2), "1B")
    assert pair.factor < script.LEAST
    assert pair.why.startswith("compute binds the smaller, collectives the larger; ")
    assert pair.why.endswith(" times the rate of network") and script.inside(pair.relieved) and not pair.wrong


def test_a_pair_outside_is_wrong_where_hardware_alone_decides_or_no_part_is_the_reason(script: Any) -> None:
    def pair(kind: str, factor: float, relieved: float | None = None) -> Any:
        return script.Pair(kind, "a", 1, "b", 2, 1, "1B", factor, "", relieved)

    assert pair(script.HARDWARE, 2.1, 2.0).wrong and pair(script.HOST, 1.5).wrong and pair(script.HOST, 1.5, 1.59).wrong
    assert not pair(script.HARDWARE, 2.0).wrong and not pair(script.HOST, 1.5, 1.6).wrong
