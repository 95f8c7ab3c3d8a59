"""Machines of mixed GPUs by name."""

from __future__ import annotations

import pytest

from pstar_sim.catalog.loader import load_machine
from pstar_sim.errors import CatalogError, UnknownName


def test_two_kinds_of_gpus_in_one_node() -> None:
    m = load_machine("A100-80x2 + v100-32x2")
    assert m.name == "a100-80x2+v100-32x2" and m.mixed
    assert [r.gpu.name for r in m.ranks] == ["a100-80"] * 2 + ["v100-32"] * 2
    assert [r.link.name for r in m.ranks] == ["pcie4-x16"] * 2 + ["pcie3-x16"] * 2
    assert [r.batch_share for r in m.ranks] == [0.25] * 4
    assert m.host == load_machine("a100-80").host and (m.nodes, m.peer) == (1, None)
    assert m.gpu_budget_bytes == load_machine("v100-32").gpu_budget_bytes
    assert load_machine("a100-80x2+v100-32x2", gpu_memory="20GB").gpu_budget_bytes == 19 * 10**9


def test_a_gpu_stands_for_its_machine_and_a_name_with_an_x_is_no_number() -> None:
    m = load_machine("rtx3090+rtx4090-128gb+rtx3090")
    assert [r.gpu.name for r in m.ranks] == ["rtx3090", "rtx3090", "rtx4090"]
    assert m.name == "rtx3090x2+rtx4090-128gbx1" and m.host.name == load_machine("rtx3090-64gb").host.name
    assert load_machine(m.name) == m


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v100-16x0+p100-16", "v100-16x0: the number of GPUs must be from 1 to 1024"),
        ("v100-16+p100-16x1025", "p100-16x1025: the number of GPUs must be from 1 to 1024"),
        ("v100-16x" + "9" * 5000 + "+p100-16", "the number of GPUs must be from 1 to 1024"),
        (
            "v100-16x2+v100-16",
            "all its GPUs are v100-16; give machine v100-16 with gpus = 3 (--machine v100-16 --gpus 3)",
        ),
        ("v100-16+", "a part is empty"),
        ("+", "a part is empty"),
    ],
)
def test_names_that_say_no_machine(name: str, says: str) -> None:
    with pytest.raises(CatalogError) as error:
        load_machine(name)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "name", ["v100-16+p101-16", "v100-16+v100-16x-1", "v100-16+dgx2", "here+v100-16", "v100-16+x2"]
)
def test_parts_that_no_catalog_knows(name: str) -> None:
    with pytest.raises(UnknownName, match="unknown GPU of a mixed machine"):
        load_machine(name)


def test_gpus_that_differ_are_not_multiplied() -> None:
    with pytest.raises(CatalogError, match="differ; write a machine file"):
        load_machine("v100-16+p100-16", gpus=4)
    with pytest.raises(CatalogError, match="no network joins nodes of it"):
        load_machine("v100-16+p100-16", nodes=2)


def test_an_unknown_machine_stays_one() -> None:
    with pytest.raises(UnknownName, match="unknown machine 'v100-16x2'; known: v100-16, v100-16x8"):
        load_machine("v100-16x2")
