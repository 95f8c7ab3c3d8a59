"""Two and four processes train as one process does on the joined batch: parameters and both moments, and a rank's bytes
are the plan's; also on accelerators with asynchronous streams, collectives on one of their own, all with random delays.
Between two iterations the ranks may evaluate different modules, in another order, different numbers of batches, or
nothing: each gets bit by bit what one process gets, and training goes on as if nothing had been. The processes are
started once for all cases (rank_worker.py, apart.py). 46 of 80 without --whole: WITH_WHOLE, on_streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = "bucket=2000,reuse=2000,prefetch=1000,subgroup=3000"
POLICIES = {
    "all_on_gpu": "all_on_gpu",
    "zero_offload": "zero_offload",
    "patrickstar": "patrickstar",
    "zero3_resident": "zero3_resident",
    "zero3_offload": f"zero3_offload:{SMALL}",
    "deep_optimizer_states": f"deep_optimizer_states:{SMALL}",
    "zero_infinity": "zero_infinity:params=nvme,states=nvme,bucket=2000,reuse=2000,subgroup=3000",
    "tide": "tide",
    "optimal": "optimal",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": 0.05},
    "eager": {"eager": True},
    "accumulated": {"clip": 0.05, "micro_batches": 2},
}
CASES: list[dict[str, Any]] = [
    {"name": f"{policy}-2-{setting}", "ranks": 2, "policy": spec, **SETTINGS[setting]}
    for number, (policy, spec) in enumerate(POLICIES.items())
    for setting in ("accumulated", "eager" if number % 2 else "clip")
]
CASES += [  # the slowest by far
    {"name": "zero3_offload-4-accumulated", "ranks": 4, "policy": POLICIES["zero3_offload"], **SETTINGS["accumulated"]},
]
CASES += [
    {"name": "gpt2-tide-2", "ranks": 2, "policy": "tide", "model": "gpt2", "checkpointing": True, "clip": 0.05},
    {
        "name": "gpt2-offload-2",
        "ranks": 2,
        "policy": "tide",
        "model": "gpt2",
        "offload": [0],
        **SETTINGS["accumulated"],
    },
    {
        "name": "gpt2-zero3-2",
        "ranks": 2,
        "policy": "zero3_resident",
        "model": "gpt2",
        "checkpointing": True,
        "clip": 0.05,
    },
    {"name": "unequal", "ranks": 2, "policy": "tide", "sequences": [2, 1], "clip": 0.05, "evaluate": True},
    {"name": "whale", "ranks": 2, "policy": "whale", "sequences": [2, 1], **SETTINGS["accumulated"]},
    {"name": "stronghold", "ranks": 2, "policy": "stronghold:window=1", "eager": True, "micro_batches": 2},
    {"name": "karma", "ranks": 2, "policy": "karma", "model": "gpt2", "offload": [0], **SETTINGS["accumulated"]},
    *(  # sums of gradients on the GPU beside states on the host
        {
            "name": f"sums-{'spilt-' if spill else ''}{setting}",
            "ranks": ranks,
            "spill": spill,
            **SETTINGS[setting],
            "micro_batches": 3,
        }
        for ranks, spill, setting in ((2, False, "eager"), (2, True, "clip"))
    ),
    *(  # each rank updates its slices in parts
        {"name": f"parts-{setting}", "ranks": ranks, "policy": "tide", "parts": 3, **SETTINGS[setting]}
        for ranks, setting in ((2, "eager"), (3, "accumulated"))
    ),
    {"name": "experts-sums", "ranks": 2, "spill": False, "model": "experts", "steps": 3, **SETTINGS["accumulated"]},
    {"name": "an empty batch", "ranks": 2, "policy": "tide", "sequences": [2, 0], "clip": 0.05},
    {"name": "evaluated", "ranks": 2, "policy": "zero3_resident", "evaluate": True},
    {"name": "experts", "ranks": 2, "policy": "tide", "model": "experts", "steps": 3, "clip": 0.05},
    {"name": "experts-whole", "ranks": 2, "policy": "zero_offload", "model": "experts", "steps": 3},
    {"name": "experts-3", "ranks": 3, "policy": "zero3_resident", "model": "experts", **SETTINGS["accumulated"]},
    {"name": "three", "ranks": 3, "policy": "all_on_gpu", "clip": 0.05, "model": "mlp"},  # three do not divide it
    {"name": "states", "ranks": 2, "policy": "all_on_gpu:shard=states", **SETTINGS["accumulated"]},
]

ON_STREAMS = ("tide", "optimal", "zero_offload", "patrickstar", "all_on_gpu", "zero3_resident", "zero3_offload")
ON_FOUR = "streams-zero_offload-4-eager"
OTHERS_ON_STREAMS: list[dict[str, Any]] = [
    {"name": "streams-tide-clip", "ranks": 2, "policy": "tide", "clip": 0.05},
    {"name": "streams-states", "ranks": 2, "policy": "all_on_gpu:shard=states", **SETTINGS["accumulated"]},
    {
        "name": "streams-gpt2-offload",
        "ranks": 2,
        "policy": "tide",
        "model": "gpt2",
        "offload": [0],
        **SETTINGS["accumulated"],
    },
    {"name": "streams-unequal", "ranks": 2, "policy": "tide", "sequences": [2, 1], "clip": 0.05, "evaluate": True},
]
APART: list[dict[str, Any]] = [
    {"name": "modules", "ranks": 2, "policy": "tide", "apart": "modules"},
    {"name": "modules on streams", "ranks": 2, "policy": "zero3_resident", "apart": "modules", "streams": True},
    {"name": "order", "ranks": 2, "policy": "zero3_offload:bucket=2000,reuse=2000,prefetch=1000", "apart": "order"},
    {"name": "numbers", "ranks": 3, "policy": "zero3_resident", "apart": "numbers"},
    {"name": "numbers on streams", "ranks": 2, "policy": "tide", "apart": "numbers", "streams": True},
    {"name": "alone", "ranks": 2, "policy": "optimal", "apart": "alone"},
    {"name": "saved meanwhile", "ranks": 2, "policy": "tide", "apart": "alone", "save": "here"},
    {"name": "experts apart", "ranks": 2, "policy": "tide", "apart": "numbers", "model": "experts"},
    {"name": "nothing is sliced", "ranks": 2, "policy": "all_on_gpu", "apart": "modules"},
]
WITH_WHOLE = {
    "zero_offload-2-eager", "patrickstar-2-accumulated", "zero3_resident-2-accumulated", "tide-2-eager",
    "optimal-2-accumulated", "gpt2-offload-2", "modules",  # another is on streams
    "all_on_gpu-2-clip", "zero3_offload-2-clip", "zero_infinity-2-clip", "streams-tide-clip",  # accumulated ones clip
    "zero3_offload-4-accumulated", "gpt2-tide-2",  # on streams on four ranks, and with another policy
}  # fmt: skip
"""Every policy, setting, model and number of ranks is in another case."""


def on_streams(whole: bool) -> list[dict[str, Any]]:
    """Every policy on two and on four ranks, in both settings, and GPT-2 with checkpointing; without --whole on two
    ranks, in one or the other setting by turns, and ON_FOUR: a case of four takes as long as four of two."""
    settings = ("accumulated", "eager")
    every = [
        {"name": f"streams-{policy}-{ranks}-{name}", "ranks": ranks, "policy": POLICIES[policy], **SETTINGS[name]}
        for ranks in (2, 4)
        for policy in ON_STREAMS
        for name in settings
    ]
    gpt2 = {"name": "streams-gpt2", "ranks": 2, "policy": "tide", "model": "gpt2", "checkpointing": True, "clip": 0.05}
    every.append(gpt2)
    alternate = {f"streams-{policy}-2-{settings[(n + 1) % 2]}" for n, policy in enumerate(ON_STREAMS)}
    rows = [case for case in every if whole or case["name"] in {ON_FOUR, *alternate}]
    for row in rows:
        if row["policy"] == "patrickstar":
            row["model"] = "mlp"  # with four layers, nothing moves where it fits
    return [{**case, "streams": True} for case in thinned(rows + OTHERS_ON_STREAMS, whole)]


def thinned(cases: list[dict[str, Any]], whole: bool) -> list[dict[str, Any]]:
    return [case for case in cases if whole or case["name"] not in WITH_WHOLE]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    whole = bool(metafunc.config.getoption("--whole"))
    for name, cases in (
        ("case", thinned(CASES, whole)),
        ("streamed", on_streams(whole)),
        ("apart", thinned(APART, whole)),
    ):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, cases, ids=[case["name"] for case in cases])


@pytest.fixture(scope="module")
def results(whole: bool, python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Case -> what each of its ranks wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    apart = [{**case, "clip": 0.05, **({"save": str(folder / "kept")} if "save" in case else {})} for case in APART]
    cases = [*thinned(CASES, whole), *on_streams(whole), *thinned(apart, whole)]
    (folder / "cases.json").write_text(json.dumps(cases))
    run = subprocess.run(
        [python, "-W", "ignore", str(Path(__file__).parents[1] / "rank_worker.py"), "4", str(folder), "840"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=850,
    )
    found = {
        case["name"]: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{case['name']}.[0-9].json"))]
        for case in cases
    }
    assert run.returncode == 0, run.stderr[-4000:]
    return found


def test_trains_as_one_process_on_the_joined_batch(
    results: dict[str, list[dict[str, Any]]], case: dict[str, Any]
) -> None:
    rows = results[case["name"]]
    assert [row.get("error") for row in rows] == [None] * case["ranks"]
    for key in ("parameters", "exp_avg", "exp_avg_sq"):
        assert rows[0][key] <= 1e-6, key
    for rank, row in enumerate(rows):
        assert row["evaluations"] == [0.0] * len(row["evaluations"])
        if case.get("model") == "experts":  # each rank leaves some out; an expert with more rows has a higher tide
            assert all("does not come on this rank" in reason for reason in row["deviations"])
            assert len(row["deviations"]) >= 2
            continue
        assert row["deviations"] == []
        assert row.get("renamed", []) == []
        smaller = "sequences" in case and case["sequences"][rank] < max(case["sequences"])
        assert row["peak"][0] < row["peak"][1] if smaller else row["peak"][0] == row["peak"][1]
        assert row["host"][0] == row["host"][1]
        # [Note: what a slice moves through]: one slice, and none where nothing is sliced
        assert row["transient"][0] == (row["transient"][1] if row["layout_ranks"] > 1 else 0)
        assert {"gather", "reduce_scatter"} <= set(row["kinds"])


def test_several_processes_on_streams_train_as_one(
    results: dict[str, list[dict[str, Any]]], streamed: dict[str, Any]
) -> None:
    """Thinned (on_streams) but for --whole."""
    rows = results[streamed["name"]]
    assert [row.get("error") for row in rows] == [None] * streamed["ranks"]
    for key in ("parameters", "exp_avg", "exp_avg_sq"):
        assert rows[0][key] <= 1e-6, key
    for row in rows:
        assert row["deviations"] == []
        assert row["evaluations"] == [0.0] * len(row["evaluations"])
        assert {"gather", "reduce_scatter"} <= set(row["kinds"])


def test_each_rank_gets_what_one_process_gets(results: dict[str, list[dict[str, Any]]], apart: dict[str, Any]) -> None:
    rows = results[apart["name"]]
    assert [row.get("error") for row in rows] == [None] * apart["ranks"]
    for rank, row in enumerate(rows):
        rounds = 6 if "save" in apart else 4  # before each of three steps and at the end; around a load
        each = {"modules": 2, "order": 4, "numbers": 2 * rank, "alone": 2 * (rank == 0)}[apart["apart"]]
        assert row["equal"] == [True] * (rounds * each)
        assert row["unchanged"] and row["restored"]
        assert row["parameters"] <= 1e-6
        assert row["sliced"] == (apart["policy"] != "all_on_gpu")
        if apart.get("model") != "experts":
            assert row["deviations"] == []
