"""The policy in docs/how-to/add-a-policy.md works as it is printed there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import pstar_sim as ps
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Kind
from pstar_sim.errors import DoesNotFit
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB

TEXT = (Path(__file__).parents[2] / "docs" / "how-to" / "add-a-policy.md").read_text(encoding="utf-8")


def blocks() -> list[str]:
    marked = re.search(r"<!-- policy-example: begin -->(.*)<!-- policy-example: end -->", TEXT, re.DOTALL)
    assert marked is not None
    return re.findall(r"```python\n(.*?)```", marked[1], re.DOTALL)


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(blocks()[0], "add-a-policy.md", "exec"), names)
    return names


def test_it_is_short_and_knows_neither_micro_batches_nor_ranks() -> None:
    code = blocks()[0]
    assert len(code.splitlines()) < 25
    assert not re.search("batch|rank|grad", code)


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("clip", [True, False])
def test_its_plan_is_correct(example: dict[str, Any], micro_batches: int, clip: bool, gpus: int) -> None:
    w = chain_workload(4, MIB, tide_bytes=MIB, micro_batches=micro_batches)
    settings = Settings(clip=clip, chunk_bytes=2 * MIB)
    name = "h100-80" if gpus == 1 else f"h100-80x{gpus}"
    plan = example["layer_by_layer"](w, ps.machine(name, gpu_memory="8GB"), settings)
    plan.check()
    fetched = sum(step.kind is Kind.FETCH for step in plan.steps)
    # 8 moments a micro-batch need a chunk each; the last layer stays from forward to backward, the first one from
    # backward to the next micro-batch.
    assert fetched == micro_batches * 7 - (micro_batches - 1)
    assert sum(step.kind is Kind.GATHER for step in plan.steps) == (fetched if gpus > 1 else 0)
    assert ps.play(plan).iteration_s > 0


def test_it_says_when_it_does_not_fit(example: dict[str, Any]) -> None:
    w = chain_workload(4, 256 * MIB, tide_bytes=MIB)  # a layer is 512 MiB
    with pytest.raises(DoesNotFit, match=r"layer_by_layer does not fit: gpu needs .* short by"):
        example["layer_by_layer"](w, ps.machine("rtx4090", gpu_memory="1.2GB"), Settings())


def test_it_compares_and_passes_as_printed(example: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks()[1].replace("check_policy(layer_by_layer)", "check_policy(layer_by_layer, examples=20)")
    names = dict(example)
    exec(compile(code, "add-a-policy.md", "exec"), names)
    assert re.search(r"layer_by_layer: \d+ of 20 random jobs fitted", capsys.readouterr().out)
    tide, mine = names["comparison"].rows
    assert (tide.policy, mine.policy) == ("tide", "layer_by_layer")
    assert mine.fits and tide.iteration_s < mine.iteration_s
