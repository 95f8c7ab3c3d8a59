"""The published rows are read as they are written, and every one of them has exactly one place in the scope."""

from collections import Counter

import pytest

from pstar_sim.errors import CatalogError
from pstar_sim.validation.rows import FILES, number, published_rows, read_rows
from pstar_sim.validation.scope import published_scope, read_scope, rule_of


@pytest.mark.parametrize(
    ("text", "value"), [("12.5", 12.5), ("18B", 18e9), ("1T", 1e12), ("25680-26756", 26218.0), ("1.717B", 1.717e9)]
)
def test_a_figure_is_a_number_a_count_or_the_middle_of_a_range(text: str, value: float) -> None:
    assert number(text) == value


@pytest.mark.parametrize("text", ["", "about 3", "1-2-3", "5 B"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a figure"):
        number(text)


def test_a_line_that_cannot_be_read_is_named() -> None:
    head = ",".join(FILES["measurements.csv"][0])
    with pytest.raises(CatalogError, match=r"m.csv, row 2: 'fast' is not a figure"):
        read_rows("m.csv", f"{head}\na,b,1,,,,,iter_ms,3,s\na,b,1,,,,,iter_ms,fast,s\n")
    with pytest.raises(CatalogError, match="they must be system, hardware"):
        read_rows("m.csv", "system,value\na,1\n")
    step = dict.fromkeys(FILES["fsdp_steps.csv"][0], "1") | {"gpus": "8", "gpu": "a100_80gb", "global_batch": "16"}
    with pytest.raises(CatalogError, match=r"f.csv, row 1: 1 sequences x 1 micro-batches x 8 GPUs are not 16"):
        read_rows("f.csv", f"{','.join(step)}\n{','.join(step.values())}\n", kind="fsdp_steps.csv")


def test_a_whole_step_by_hand() -> None:
    """The first row of each file of steps: 48 layers of 7168 on 64 nodes, and GPT-2 large on four GPUs."""
    first = {row.file: row for row in reversed(published_rows())}
    step, eager = first["fsdp_steps.csv"], first["single_gpu_steps.csv"]
    assert (step.system, step.hardware, step.gpus) == ("FSDP, MPT", "64 nodes of 8xH100-80GB (MosaicML)", 512)
    assert (step.shape, step.batch, step.sequence) == ("48/7168/56 vocab50368", "gbs4096 mbs8", "2048")
    assert step.settings == "amp_bf16 DEFAULT FULL_SHARD checkpointing"
    assert (step.metric, step.value, step.where) == ("tokens_per_s_per_gpu", 2115.0, "fsdp_steps.csv, row 1")
    assert (eager.system, eager.gpus, eager.metric) == ("PyTorch eager dp4", 4, "fwd_bwd_ms")
    assert eager.hardware == "4xNVIDIA_A100-SXM4-40GB (NeuSight)"


def test_every_row_has_one_use() -> None:
    rules = published_scope()
    uses: dict[str, Counter[str]] = {}
    for row in published_rows():
        uses.setdefault(row.file, Counter())[rule_of(row, rules).use] += 1
    assert uses == {
        "measurements.csv": {"tested": 304, "fitted": 111, "no policy": 14, "out": 177},
        "measurements-2.csv": {"tested": 71, "out": 15},
        "fsdp_steps.csv": {"fitted": 59, "tested": 34},
        "single_gpu_steps.csv": {"fitted": 8, "tested": 14, "out": 12},
        "whole_steps-3.csv": {"fitted": 52, "tested": 42, "out": 2},
    }
    assert [sum(counts.values()) for counts in uses.values()] == [606, 86, 93, 34, 96]


def test_a_row_that_says_its_use_keeps_it() -> None:
    words = {"fit": ("to fit", "fitted"), "test": ("tested",), "out": ("out",)}
    rules = published_scope()
    said = [(rule_of(row, rules).use, dict(row.setup)["use"]) for row in published_rows() if row.setup]
    assert len(said) == 96 and all(use in words[word] for use, word in said)


def test_what_was_looked_at_is_tested_all_the_same() -> None:
    seen = {rule.name for rule in published_scope() if rule.looked_at}
    assert "H100 node, GPU memory" in seen and all(r.use == "tested" for r in published_scope() if r.looked_at)


def test_what_is_inferred_was_looked_at() -> None:
    inferred = [rule for rule in published_scope() if rule.inferred]
    assert [rule.name for rule in inferred] == ["Polaris, two nodes"]
    assert all("no source but the errors" in rule.looked_at for rule in inferred)


def test_no_time_in_16_bit_on_an_h100_is_called_unseen() -> None:
    """The H100's plateau and fused attention were chosen after errors of some of them had been seen."""
    rules = published_scope()
    hopper = [
        rule_of(r, rules)
        for r in published_rows()
        if "H100" in r.hardware and r.file != "single_gpu_steps.csv" and not r.metric.endswith("_GiB")
    ]
    tested = [rule for rule in hopper if rule.use == "tested"]
    assert len(tested) > 100 and all(rule.looked_at for rule in tested)


def test_every_rule_says_something() -> None:
    rules = published_scope()
    used = {rule_of(row, rules).name for row in published_rows()}
    assert used == {rule.name for rule in rules}


def test_no_system_of_a_machine_is_both_fitted_and_tested() -> None:
    """Of Polaris' baseline, runs on one node are fitted and runs on two nodes, another machine, are tested. Rows that
    say their use are apart by model or stage."""
    rules = published_scope()
    found: dict[str, set[tuple[str, str]]] = {"fitted": set(), "tested": set()}
    for r in published_rows():
        if r.setup:
            continue
        use = {"to fit": "fitted"}.get(rule_of(r, rules).use, rule_of(r, rules).use)
        if use in found:
            nodes = " 2 nodes" if r.hardware.startswith("Polaris") and r.gpus == 8 else ""
            found[use].add((r.hardware + nodes, r.system))
    assert not found["fitted"] & found["tested"]
    by_use = found
    fitted_machines = {machine for machine, _ in by_use["fitted"]}
    assert not any("H100" in machine for machine in fitted_machines)
    untouched = {machine for machine, _ in by_use["tested"]} - fitted_machines
    assert {m.split(" ")[0] for m in untouched} == {
        "4xH100-80GB-node(local)",
        "4xH100-80GB",
        "8xV100-SXM2-32GB",
        "1xV100-32GB",
        "Polaris-A100-40GB",  # two nodes
        "8xH100-80GB",
        *(f"{n}" for n in (2, 4, 8, 16, 32, 64)),  # nodes of 8 A100 or H100
        "1xTesla_V100-PCIE-32GB",
        "1xNVIDIA_H100_80GB_HBM3",
        "4xNVIDIA_H100_80GB_HBM3",
        "4xNVIDIA_A100-SXM4-40GB",
    }


def test_a_rule_needs_a_use_and_a_reason() -> None:
    with pytest.raises(CatalogError, match="rule 'a': needs a name, a use"):
        read_scope("s.toml", '[[rule]]\nname = "a"\nuse = "tested"\n')
    with pytest.raises(CatalogError, match="rule 'a': unknown key 'machine'"):
        read_scope("s.toml", '[[rule]]\nname = "a"\nuse = "out"\nwhy = "b"\nmachine = ["c"]\n')


@pytest.mark.parametrize("more", ["inferred = true", 'inferred = "no"\nlooked_at = "c"'])
def test_what_is_inferred_says_what_was_looked_at(more: str) -> None:
    with pytest.raises(CatalogError, match="rule 'a': inferred is true or false, and true only beside looked_at"):
        read_scope("s.toml", f'[[rule]]\nname = "a"\nuse = "tested"\nwhy = "b"\n{more}\n')


def test_a_row_that_no_rule_matches_is_an_error() -> None:
    with pytest.raises(CatalogError, match=r"row 1 .*: no rule of scope"):
        rule_of(published_rows()[0], ())
