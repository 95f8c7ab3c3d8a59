"""Flags: each mistake in them is one line that names the flag, the value and what would do; help has them all; a shell
completes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from pstar_sim import Settings, load_plan
from pstar_sim.cli import main
from pstar_sim.cli.typer_app import app

COMMANDS = tuple(get_command(app).commands)  # type: ignore[attr-defined]
JOB = ["--model", "1B", "--batch", "1", "--seq", "128", "--machine", "v100-32"]
PATHS = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["compare", *JOB, "--polcy", "tide"], "unknown flag '--polcy'; did you mean --policy? (see `pstar compare"),
        (["compare", "--mach", "v100-32"], "unknown flag '--mach'; did you mean --machine?"),
        (["compare", *JOB, "--frobnicate"], "unknown flag '--frobnicate' (see `pstar compare --help`)"),
        (["fits", *JOB, "--global-batch", "8"], "unknown flag '--global-batch'; it is a flag of compare and plan (see"),
        (["plot", "--model", "1B"], "unknown flag '--model'; it is a flag of plot tide (see `pstar plot --help`)"),
        (["--versoin"], "unknown flag '--versoin'; did you mean --version? (see `pstar --help`)"),
        (["compare", *JOB, "--certify=yes"], "argument --certify: takes no value, not 'yes'"),
        (["compare", *JOB, "--chunk"], "argument --chunk: needs a value, SIZE (see `pstar compare --help`)"),
        (["plan", *JOB, "-o", "--clip"], "argument -o/--output: needs a value, FILE"),
        (["plan", *JOB, "--output=no/plan.json"], "argument -o/--output: no/plan.json: there is no folder 'no'"),
        (["plan", *JOB, "-ono/plan.json"], "argument -o/--output: no/plan.json: there is no folder 'no'"),
        (["compare", *JOB, "--update", "stepp"], "'stepp' (choose from step, eager); did you mean step?"),
        (["compare", *JOB, "--update", "now"], "'now' (choose from step, eager) (see `pstar compare --help`)"),
        (["compare", *JOB, "--trace", "x"], "argument --trace: not allowed with argument --model; give one of them"),
        (["compare", "--machine", "v100-32"], "give --trace FILE, or --model NAME with --batch and --seq"),
        (["export", "plan.json", "-o", "x.json"], "one of the arguments --perfetto --timeline --memory-viz "),
        (["trace"], "the following arguments are required: MODEL, --batch, --seq, -o/--output (see `pstar trace"),
        (["run", "--steps", "2"], "the following arguments are required: PLAN, --model"),
        (["run", "plan.json", "--model", "1B", "--steps", "-1"], "argument --steps: must be at least 1, not -1"),
        (["compare", *JOB, "--effort", "much"], "--effort: must be a number above 0 such as 4 or 0.5, not 'much'"),
        (["compare", *JOB, "--effort", "0"], "argument --effort: must be a number above 0 such as 4 or 0.5, not '0'"),
        (["machines", "v100-32"], "unexpected argument 'v100-32' (see `pstar machines --help`)"),
        (["check", "a.json", "b.json"], "unexpected argument 'b.json'"),
        (["check", "--", "-a.json", "b.json"], "b.json"),
        (["plot"], "say which picture: tide, stages (see `pstar plot --help`)"),
        (["plot", "tide"], "--machine is needed"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pstar: ") and err.count("\n") == 1 and said in err, err
    assert list(tmp_path.iterdir()) == []


def test_flags_of_the_setting_reach_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    flags = ["--dtype", "bf16", "--micro-batches", "2", "--chunk", "64MiB", "--loop", "step", "--effort", "0.5"]
    more = ["--sums", "16-bit", "--update", "eager", "--no-clip", "--policy", "tide", "-o", str(file)]
    assert main(["plan", *JOB[:6], "--machine", "rtx4090", *flags, *more]) == 0
    want = Settings(update="eager", clip=False, chunk_bytes=64 << 20, loop="step", sums="16-bit", effort=0.5)
    assert load_plan(file).settings == want


def test_words_behind_two_dashes_are_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--", "-a.json"]) == 2
    assert capsys.readouterr().err.startswith("pstar: -a.json: ")


@pytest.mark.parametrize("width", [40, 60, 100])
@pytest.mark.parametrize("command", ["", "plot tide", *COMMANDS])
def test_help_is_no_wider_than_the_terminal(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Examples, which are copied, stay on one line; names that are wider than their column stand above the text."""
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as done:
        main([*command.split(), "-h"])
    out, err = capsys.readouterr()
    assert (done.value.code, err) == (0, "") and "…" not in out and "\x1b" not in out
    lines = [line for line in out.splitlines() if not line.startswith("example: ")]
    assert not [line for line in lines if len(line) > width and len(line.split()) > 1]
    assert "\nexample: pstar" in out


def test_no_command_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in out
    help_ = get_command(app).commands["fits"].help  # type: ignore[attr-defined]
    assert help_.removesuffix(".") in " ".join(out.split()), "it is not cut"


def complete(python: str, words: str) -> list[str]:
    """What a shell is offered for the last of the words."""
    env = {"_PSTAR_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    argv = [python, "-m", "pstar_sim"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=PATHS | env, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_completes_commands_flags_and_values(python: str) -> None:
    assert complete(python, "pstar comp") == ["compare"]
    assert complete(python, "pstar compare --gpu") == ["--gpus", "--gpu-memory"]
    assert complete(python, "pstar compare --dtype ") == ["fp32", "bf16", "fp16"]
    assert complete(python, "pstar compare --machine v100-32") == ["v100-32", "v100-32x8"]
    assert "12B" in complete(python, "pstar max-batch --model 1")
    assert complete(python, "pstar plan --policy zero_") == ["zero_offload", "zero_infinity"]
    assert complete(python, "pstar plot ") == ["tide", "stages"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_ask(python: str, shell: str) -> None:
    env = PATHS | {"_PSTAR_COMPLETE": f"source_{shell}"}
    done = subprocess.run([python, "-m", "pstar_sim"], capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stderr) == (0, "") and f"_PSTAR_COMPLETE=complete_{shell}" in done.stdout


def test_a_reader_who_leaves_is_no_mistake() -> None:
    for words in ("--help", "policies"):
        command = f'"{sys.executable}" -m pstar_sim {words} | true; exit "${{PIPESTATUS[0]}}"'
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, ""), words


def test_an_image_has_its_own_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    """197 tokens: 14 x 14 patches and one more."""
    on = ["--machine", "rtx4090", "--policy", "all_on_gpu"]
    for asked in (["fits", "--model", "vit-b-16", "--batch", "4"], ["max-batch", "--model", "vit-b-16"]):
        assert main([*asked, *on]) == 0
        assert "sequence 197" in capsys.readouterr().out
    for asked in (["max-batch", "--model", "gpt2"], ["max-model", "--batch", "4"]):
        assert main([*asked, *on]) == 2
        assert "--seq is needed for " in capsys.readouterr().err
