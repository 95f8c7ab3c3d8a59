"""Errors, orders and misses of results made by hand; and a small part of the real validation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pstar_sim.catalog.loader import load_machine
from pstar_sim.cli import main
from pstar_sim.errors import PstarError
from pstar_sim.planner.fits import fits
from pstar_sim.planner.trust import FEWEST_ROWS, class_of, expected_error, tells_of, trust, untuned
from pstar_sim.report.capacity_tables import fits_text
from pstar_sim.report.validation import validation_text
from pstar_sim.validation import expected_errors
from pstar_sim.validation.expected_errors import binomial_interval, errors_by_class, quoted_bars, write_errors
from pstar_sim.validation.results import Result, Validation, errors_of, validate
from pstar_sim.workload.presets import preset


def result(published: float, predicted: float | None, **changes: object) -> Result:
    values: dict[str, object] = {
        "file": "measurements.csv",
        "line": 1,
        "system": "A",
        "hardware": "4xH100-80GB",
        "gpus": 4,
        "params": "1e9",
        "shape": "s",
        "batch": "gbs4 mbs1",
        "metric": "iter_ms",
        "kind": "time",
        "use": "tested",
        "rule": "r",
        "machine": "h100-80x4",
        "gpu": "h100-80",
        "nodes": 1,
        "policy": "zero3_offload:ratio=0.8",
        "published": published,
        "predicted": predicted,
    }
    return Result(**{**values, **changes})  # type: ignore[arg-type]


def test_errors_are_relative_and_quantiles_interpolate() -> None:
    found = errors_of([result(100, 110), result(100, 80), result(100, 100), result(100, 130), result(100, 60)])
    assert found is not None
    # sizes 0, 0.1, 0.2, 0.3, 0.4: the 90th percentile is 0.6 of the way from 0.3 to 0.4
    assert (found.rows, found.median, found.p90) == (5, pytest.approx(0.2), pytest.approx(0.36))
    assert found.worst == pytest.approx(-0.4)
    assert errors_of([]) is None


def test_a_run_that_does_not_fit_is_an_error_of_everything() -> None:
    lost = result(100, None, reason="too small")
    assert lost.error == -1.0
    v = Validation(counts={"tested": 1}, results=(lost,))
    assert v.misses() == [lost]
    assert "too small" in validation_text(v) and "does not fit" in validation_text(v)


def test_bias_is_of_seconds_and_leaves_out_what_does_not_fit() -> None:
    """A throughput that is predicted too high is a time that is too short: 125 for 100 is -20 %."""
    fast = result(100, 125, metric="tokens_per_s_per_gpu")
    found = errors_of([fast, result(100, 90), result(100, None)])
    assert (fast.error, fast.slower) == (0.25, pytest.approx(-0.2))
    assert found is not None and (found.bias, found.lost, found.rows) == (pytest.approx(-0.15), 1, 3)
    assert found.median == pytest.approx(0.25)  # of 0.1, 0.25 and the run that does not fit, 1


def test_bias_is_of_times_alone() -> None:
    memory = result(100, 300, kind="memory", metric="gpu_peak_GiB")
    found = errors_of([result(100, 80), memory, result(100, None, kind="size", metric="max_trainable_model")])
    assert memory.slower is None
    assert found is not None and (found.bias, found.lost, found.rows) == (pytest.approx(-0.2), 1, 3)


def test_rows_of_later_files_are_reported_alone() -> None:
    later = result(100, 150, line=3, file="fsdp_steps.csv", system="FSDP, MPT", metric="tokens_per_s_per_gpu")
    lost = result(100, None, line=4, file="fsdp_steps.csv", system="FSDP, MPT", params="2e9", use="to fit")
    v = Validation(counts={"tested": 2, "to fit": 1}, results=(result(100, 110), later, lost))
    text = validation_text(v, width=120)
    lines = {tuple(line.split()[:2]): line.split() for line in text.splitlines() if line}
    assert lines["measurements", "tested"][2:] == ["1", "10.0%", "10.0%", "+10.0%"]
    assert lines["fsdp_steps", "tested"][2:] == ["1", "50.0%", "50.0%", "-33.3%"]
    assert lines["fsdp_steps", "to"][3:] == ["1", "100.0%", "100.0%", "1"]
    assert "had never been replayed when their scope was fixed: 1, median 50.0%, 90th percentile 50.0%, 0 of" in text
    assert [r.where for r in v.misses()] == ["fsdp_steps 3"]
    assert v.to_json()["first_replayed"] is not None
    only = validation_text(Validation(counts={}, results=(result(100, 110),)))
    assert "had never been replayed" not in only and "rows of" not in only


def test_errors_by_distance_from_the_fitted_machines() -> None:
    """Fitted on a Polaris node: it with fewer GPUs is the same machine, two such nodes and another A100 are of the same
    generation, an H100 is of a new one, and apart where its rates are the catalog's; memory does not count, and without
    fitted rows nothing is near or far."""

    def on(machine: str, gpu: str, predicted: float, **changes: object) -> Result:
        return result(100, predicted, machine=machine, gpu=gpu, **changes)

    fitted = on("polaris-a100-40x4", "a100-40", 500, use="fitted")
    tested = (
        on("polaris-a100-40x4 (1 in use)", "a100-40", 110),
        on("polaris-a100-40x4", "a100-40", 120, nodes=2),
        on("a100-80x8", "a100-80", 140),
        on("h100-80x4", "h100-80", 150),
        on("h100-80x4", "h100-80", 900, kind="memory", metric="gpu_peak_GiB"),
        on("h100-80x8", "h100-80", 130),
    )
    v = Validation(counts={}, results=(fitted, *tested))
    found = {name: (e.rows, round(e.median, 3)) for name, e in v.by_distance().items()}
    assert found == {
        "same machine": (1, 0.1),
        "same generation": (2, 0.3),
        "new generation": (2, 0.4),
    }
    lines = [line.split() for line in validation_text(v, width=120).splitlines()]
    assert ["new", "generation", "2", "40.0%", "48.0%", "+40.0%"] in lines
    assert Validation(counts={}, results=tested).by_distance() == {}


def test_orders_of_systems_and_models() -> None:
    a, b = result(100, 90, line=1), result(120, 80, line=2, system="B")  # reversed
    c = result(105, 95, line=3, system="C")  # within 10 % of a; 14 % from b: reversed against it
    d = result(300, 310, line=4, params="2e9")  # another model of A
    e = result(300, 310, line=5, batch="gbs8 mbs1", system="E")  # another batch: no pair
    v = Validation(counts={}, results=(a, b, c, d, e))
    assert [(p.first.line, p.second.line, p.kept) for p in v.pairs() if p.kind == "systems"] == [
        (1, 2, False),
        (2, 3, False),
    ]
    assert v.order("systems") == (0, 2)
    assert v.order("models") == (1, 1)


def test_pairs_of_fitted_rows_alone_do_not_count() -> None:
    v = Validation(counts={}, results=(result(100, 100, use="fitted"), result(200, 200, system="B", use="fitted")))
    assert v.pairs() == []


def test_every_miss_is_listed() -> None:
    rows = (result(100, 127, line=11), result(100, 129, line=12), result(100, 50, line=13, use="fitted"))
    v = Validation(counts={"tested": 2, "fitted": 1}, results=rows)
    assert [r.line for r in v.misses()] == [12]
    assert v.to_json()["misses"] == ["12"]
    text = validation_text(v)
    assert "+29%" in text and "+27%" not in text
    assert "+27%" in validation_text(v, every_row=True)


def test_two_nodes_of_polaris_have_a_label_of_their_own() -> None:
    polaris = {"hardware": "Polaris-A100-40GB", "machine": "polaris-a100-40x4"}
    rows = (result(100, 110, use="fitted", **polaris), result(100, 50, gpus=8, nodes=2, **polaris))
    text = validation_text(Validation(counts={}, results=rows), width=120)
    assert "Polaris, 1-4 A100-40" in text and "Polaris, 2x4 A100-40" in text and "1-8 A100" not in text


def test_the_verdict_says_what_is_missed() -> None:
    far = validation_text(
        Validation(counts={}, results=(result(100, 110), result(100, 105), result(100, 160))), width=140
    )
    assert (
        "median 10.0% (at most 9% wanted: missed), 90th percentile 50.0% (at most 28% wanted: missed), worst +60%"
        in far
    )
    near = validation_text(Validation(counts={}, results=(result(100, 108),)), width=140)
    assert "missed" not in near


def test_rows_whose_choices_were_made_in_view_of_figures_are_counted() -> None:
    """The first rule has `looked_at`, the second has not."""
    seen = result(100, 110, file="measurements-2.csv", rule="Yard, DeepSpeed on 2 GPUs")
    v = Validation(
        counts={}, results=(seen, result(100, 110, file="measurements-2.csv", rule="eager fp32, V100 PCIe and H100"))
    )
    assert "were fixed with figures of 1 of them, or about them, in view" in " ".join(validation_text(v).split())


def test_errors_by_class_are_those_of_iterations_that_nothing_is_fitted_to() -> None:
    found = errors_by_class(
        [
            result(100, 110),
            result(100, 130, policy="deep_optimizer_states:every=2"),
            result(100, 300, kind="phase", metric="fwd_ms"),
            result(100, 300, use="fitted"),
            result(100, 80, use="to fit"),
            result(100, 95, gpus=1),
            result(100, 300, metric="fwd_bwd_ms"),  # no whole iteration
            result(100, 80, metric="tokens_per_s_per_gpu", gpus=16, nodes=2, policy="zero3_resident"),
        ]
    )
    shown = {
        name: {key: (e["median"], e["p90"], e["bar"], e["rows"]) for key, e in policies.items()}
        for name, policies in found.items()
        if name != "any class"
    }
    # 0.1, 0.2 and 0.3 of one source stand for a sixth, a half and five sixths: 68.3 % is 0.549 of the way to the third
    assert shown == {
        "h100 node": {
            "any policy": (0.2, 0.28, 0.2549, 3),
            "deep_optimizer_states": (0.3, 0.3, 0.3, 1),
            "zero3_offload": (0.15, 0.19, 0.1866, 2),
        },
        "h100 nodes": {"any policy": (0.2, 0.2, 0.2, 1), "zero3_resident": (0.2, 0.2, 0.2, 1)},
        "h100 one GPU": {"any policy": (0.05, 0.05, 0.05, 1), "zero3_offload": (0.05, 0.05, 0.05, 1)},
    }


def test_every_source_has_the_same_weight() -> None:
    """Nine rows off by 0.1 of one source, one by 0.5 of another: the half of the first ends where that of the second
    begins, so 68.3 % lies 0.616 of the way from the middle of the last of the nine to the middle of the one."""
    rows = [*(result(100, 110, publisher="a") for _ in range(9)), result(100, 150, publisher="b")]
    any_policy = errors_by_class(rows)["h100 node"]["any policy"]
    way = (0.683 - (0.5 - 0.5 / 18)) / (0.75 - (0.5 - 0.5 / 18))
    assert any_policy["bar"] == pytest.approx(0.1 + 0.4 * way, abs=1e-4) and any_policy["sources"] == 2


def test_a_row_is_held_against_the_bar_of_the_other_sources() -> None:
    """Three sources of one class: a row's bar knows the other two alone. A row whose class has no two other sources is
    held against all other rows."""
    sizes = {"a": (0.1, 0.1), "b": (0.2, 0.2), "c": (0.4, 0.4)}
    rows = [result(100, 100 * (1 + e), publisher=name) for name, errors in sizes.items() for e in errors]
    lone = result(100, 150, gpu="v100-32", gpus=1, publisher="d")
    found = [(one.row.publisher, round(one.bar, 2), one.of_class) for one in quoted_bars([*rows, lone])]
    assert found[::2] == [("a", 0.4, True), ("b", 0.4, True), ("c", 0.2, True), ("d", 0.32, False)]
    text = validation_text(Validation(counts={}, results=(*rows, lone)), width=120)
    assert "a bar of the class: 4 of 6, 66.7% (2 to 6 wanted), 66.7% by source" in text
    assert "the bar of all rows: 0 of 1, 0.0% (at least 0 wanted)" in text
    assert binomial_interval(100) == (60, 76)


def test_fp32_and_adapters_are_classes_of_their_own() -> None:
    found = errors_by_class([result(100, 110), result(100, 120, dtype="fp32"), result(100, 140, lora=True)])
    assert {name: of["any policy"]["median"] for name, of in found.items() if name != "any class"} == {
        "h100 node": 0.1, "h100 node with fp32": 0.2, "h100 node with LoRA": 0.4,
    }  # fmt: skip
    card, plain = load_machine("a100-80"), preset("1B", batch=1, seq=128)
    assert class_of(card, plain) == "a100 one GPU"
    own = replace(card, ranks=(replace(card.ranks[0], gpu=replace(card.gpu, name="my-card")),))
    assert class_of(own, plain) == "my-card one GPU"
    assert class_of(card, preset("1B", batch=1, seq=128, lora=8, dtype="fp32")) == "a100 one GPU with fp32 and LoRA"


def test_no_run_of_fp16_tells_of_bf16_on_a_card_without_units_for_it() -> None:
    old = load_machine("v100-32")
    assert class_of(old, preset("1B", batch=1, seq=128, dtype="fp16")) == "v100 one GPU"
    forced = preset("1B", batch=1, seq=128, dtype="bf16")
    assert class_of(old, forced) == "v100 one GPU with forced dtype"
    assert trust(old, "tide", forced).error > trust(old, "tide", preset("1B", batch=1, seq=128, dtype="fp16")).error
    text = fits_text(fits(forced, old, policies=["all_on_gpu"]), width=200)
    assert "bf16 is forced: v100-32 has no bf16 units; timed at the rate of fp16" in text


def test_steps_on_the_cpu_as_users_find_them_are_a_class_of_their_own() -> None:
    found = errors_by_class([result(100, 110), result(100, 300, as_found=True)])
    assert found["h100 node"]["any policy"]["rows"] == 1
    assert found["h100 node, CPU steps as found"]["any policy"]["median"] == 2.0
    assert not tells_of("h100 node, CPU steps as found", "h100 node with LoRA")
    assert tells_of("h100 node", "h100 node with LoRA, CPU steps as found")


def test_rows_from_which_a_rule_is_inferred_count_in_no_bar() -> None:
    kept = [result(100, 100 + n, publisher=f"source {n}") for n in (10, 20, 30, 40, 50)]
    inferred = [result(100, 101, inferred=True), result(100, 101, gpus=8, nodes=2, inferred=True)]
    assert errors_by_class([*kept, *inferred]) == errors_by_class(kept)
    assert quoted_bars([*kept, *inferred]) == quoted_bars(kept) != []


def test_where_nothing_was_measured_the_bar_is_no_smaller_than_where_something_was() -> None:
    """A class without rows, or with one source, has at least the bar of all rows."""
    t4, workload = load_machine("t4"), preset("1B", batch=1, seq=128, dtype="fp16")
    far = trust(t4, "tide", workload)
    assert far.error == untuned()
    assert far.label == (
        f"± {untuned():.0%}".replace("%", " %")
        + ", no measurement is near this: not validated for class t4 one GPU (no published run counts; 4 runs of 2 "
        "sources are needed)"
    )
    node = trust(load_machine("h100-80x8"), "zero3_resident", preset("1B", batch=8, seq=128, kernels="fused"))
    assert node.error >= untuned() and "(18 published runs of 1 source count; 4 runs of 2 sources" in node.label


def test_an_expected_error_names_its_class() -> None:
    node, eager = load_machine("a100-80x8"), preset("1B", batch=8, seq=128)
    known = expected_error(node, "zero3_offload:ratio=0.5", eager)
    assert known is not None and class_of(node, eager) == known.machine_class == "a100 node"
    words = f"± {known.bar:.0%} ({known.rows} rows of {known.sources} sources, class a100 node".replace("%", " %")
    assert known.label.startswith(words)
    other = expected_error(node, "tide", eager)
    assert other is not None and other.sources >= 2 and "other policies" in other.label
    assert expected_error(load_machine("t4"), "tide", eager) is None
    fused = preset("1B", batch=8, seq=128, kernels="fused")
    assert expected_error(load_machine("h100-80x8"), "zero3_resident", fused) is None  # 18 rows of one source


def test_kernels_and_experts_that_no_row_has_are_not_near() -> None:
    """The bar is no smaller than any of the same machines."""
    card = load_machine("v100-32")
    near = expected_error(card, "tide", preset("1B", batch=1, seq=128, dtype="fp16"))
    assert near is not None
    for workload, with_ in (
        (preset("1B", batch=1, seq=128, dtype="fp16", kernels="compiled"), "compiled kernels"),
        (preset("1B", batch=1, seq=128, dtype="fp16", kernels="megatron"), "megatron kernels"),
        (preset("Qwen3-30B-A3B", batch=1, seq=128, dtype="fp16"), "experts"),
        (preset("Qwen3-30B-A3B", batch=1, seq=128, dtype="fp16", kernels="fused"), "fused kernels and experts"),
    ):
        assert expected_error(card, "tide", workload) is None
        far = trust(card, "tide", workload)
        assert f"not validated for class v100 one GPU with {with_} (no published run counts" in far.label
        assert far.error >= near.bar
    by_hand = replace(preset("1B", batch=1, seq=128, dtype="fp16"), kernels="captured")
    assert expected_error(card, "tide", by_hand) == near  # its operators run one by one


def test_few_rows_of_a_policy_say_nothing_of_it() -> None:
    card, w = load_machine("v100-32"), preset("1B", batch=1, seq=128, dtype="fp16")
    infinity, class_ = expected_error(card, "zero_infinity", w), expected_error(card, "tide", w)  # two of the former
    assert infinity is not None and infinity == class_ and infinity.rows >= FEWEST_ROWS


@pytest.mark.whole
def test_kept_errors_are_those_of_a_run_of_today(tmp_path: Path) -> None:
    """The Yard's rows replayed again give the figures of expected_errors.json."""
    v = validate(machine="Yard")
    kept = json.loads(expected_errors.ERRORS_FILE.read_text(encoding="utf-8"))
    for policy, values in errors_by_class(v.results)["v100 node"].items():
        assert kept["v100 node"][policy] == pytest.approx(values, abs=0.002)
    tested = v.errors(use="tested")
    assert tested is not None and tested.rows == v.counts["tested"] == 34 and v.counts["fitted"] == 0
    with pytest.raises(PstarError, match="only after a validation of all rows"):
        write_errors(v, tmp_path / "errors.json")
    frame = v.to_frame()
    assert len(frame) == 34 and {"published", "predicted", "error", "use"} <= set(frame.columns)
    json.dumps(v.to_json(), allow_nan=False)


def test_shipped_errors_are_of_whole_classes() -> None:
    assert expected_errors.ERRORS_FILE.is_file()
    kept = json.loads(expected_errors.ERRORS_FILE.read_text(encoding="utf-8"))
    assert set(kept) == {
        "a100 node", "a100 node, CPU steps as found", "a100 nodes with fused kernels", "a100 one GPU",
        "a100 one GPU with LoRA", "any class", "h100 node", "h100 node with fused kernels",
        "h100 nodes with fused kernels", "h200 node with fused kernels", "v100 node", "v100 one GPU",
        "v100 one GPU with autocast", "v100 one GPU with fp32",
    }  # fmt: skip
    assert all(any_policy["any policy"]["rows"] >= 1 for any_policy in kept.values())


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--system", "Megatron-LM", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["counts"] == {"fitted": 6, "to fit": 0, "tested": 0, "no policy": 0, "out": 0}
    assert {row["metric"] for row in answer["rows"]} >= {"iter_ms", "gpu_max_alloc_MB", "max_trainable_model"}
    assert main(["validate", "--system", "Megatron-LM", "--rows"]) == 0
    assert "Rows in scope" in capsys.readouterr().out
    assert main(["validate", "--system", "L2L"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("13 published rows: 11 of systems without a policy yet, 2 out of scope")
    assert "L2L, claims of the abstract: the largest model and the largest batch are published without" in said


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--system", "nobody"]) != 0
    assert "no published row has system 'nobody'" in capsys.readouterr().err
    assert main(["validate", "--write", "--machine", "h100"]) != 0
    assert "leave out --system and --machine" in capsys.readouterr().err
