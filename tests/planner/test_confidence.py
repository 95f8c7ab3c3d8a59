"""Which inputs of a prediction were measured: in words, in a plan's file, in JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pstar_sim.catalog.loader import load_machine
from pstar_sim.cli import main
from pstar_sim.cli.run_report import predicted_from
from pstar_sim.core.plan import Settings, load_plan
from pstar_sim.planner.compare import compare
from pstar_sim.planner.confidence import confidence, confidence_line, worst_known
from pstar_sim.policy import find_policy
from pstar_sim.report.tables import heading
from pstar_sim.testing import chain_workload


def test_both_words_always() -> None:
    assert confidence_line({"compute": "calibrated", "DRAM": "datasheet"}) == "calibrated: compute; datasheet: DRAM"
    assert confidence_line({"compute": "calibrated"}) == "calibrated: compute; datasheet: none"
    assert confidence_line({"compute": "recorded"}) == "recorded: compute; calibrated: none; datasheet: none"


def test_durations_recorded_on_the_machine_count_as_recorded() -> None:
    machine = load_machine("virtual")
    workload = replace(chain_workload(2, 1024), recorded_on=None)
    assert confidence(workload, machine)["compute"] == "datasheet"
    recorded = confidence(replace(workload, recorded_on="virtual"), machine)
    assert recorded["compute"] == "recorded" and "operators" not in recorded
    assert confidence(replace(workload, recorded_on="another"), machine)["compute"] == "datasheet"


def test_a_heading_says_the_worst_known_inputs() -> None:
    workload, machine = chain_workload(2, 1024), load_machine("a100-80")
    assert worst_known(confidence(workload, machine)) == "assumed: operators, framework"
    assert "host memory (assumed: operators, framework)" in heading(compare(workload, machine, policies=["tide"]))
    recorded = confidence(replace(workload, recorded_on="a100-80"), machine)  # with its operators and its Python
    assert worst_known(recorded) == "datasheet: link, DRAM"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "a100-80",
            "compute by the fitted rates of a100-80; copies by the datasheet rates and CPU Adam by the fitted ",
        ),
        ("v100-32", "compute by the assumed rates of v100-32; copies by the datasheet rates and CPU Adam by the "),
    ],
)
def test_a_run_says_where_its_prediction_comes_from(name: str, words: str) -> None:
    machine = load_machine(name)
    plan = find_policy("tide")(chain_workload(3, 1 << 20), machine, Settings())
    assert predicted_from(plan, machine).startswith(words)


WORDS = "calibrated: none; fitted: CPU Adam; datasheet: link, DRAM; assumed: compute, operators, framework"


def test_a_plan_carries_it(tmp_path: Path) -> None:
    workload = chain_workload(3, 1 << 20, dtype="fp32")
    answer = compare(workload, load_machine("v100-32"), policies=["tide"])
    answer.best().save(tmp_path / "plan.json")
    found = load_plan(tmp_path / "plan.json").choices["confidence"]
    assert found == {
        "compute": "assumed",
        "link": "datasheet",
        "CPU Adam": "fitted",
        "DRAM": "datasheet",
        "operators": "assumed",
        "framework": "assumed",
    }
    assert WORDS in repr(answer)


def test_the_command_line_says_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--model", "1B", "--batch", "4", "--seq", "1024", "--machine", "v100-32"]
    assert main(["compare", *flags, "--policy", "tide"]) == 0
    assert WORDS in capsys.readouterr().out
    plan = str(tmp_path / "plan.json")
    assert main(["plan", *flags, "--policy", "tide", "-o", plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["confidence"]["DRAM"] == "datasheet"
    assert main(["explain", plan]) == 0
    assert "compute: assumed" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["fits", pytest.param("sensitivity", marks=pytest.mark.whole)])
def test_every_answer_with_seconds_says_it_and_none_without(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [command, "--model", "gpt2", "--batch", "4", "--seq", "128", "--machine", "v100-32", "--policy", "tide"]
    assert main([*flags, "--host-memory", "11GB"]) == 0  # of a deepest model with some tens of layers, not 8,000
    assert f"inputs: {WORDS}" in " ".join(capsys.readouterr().out.split())
    assert main([*flags, "--host-memory", "8.2GB", "--gpu-memory", "1.2GB"]) == 3
    assert "inputs:" not in capsys.readouterr().out
