"""What a script learns from the exit status: 0 done, 2 a mistake, 3 the answer is no; and what helps when names are
not known."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import pstar_sim as ps
from pstar_sim.cli import main
from pstar_sim.errors import PstarError

JOB = ["--model", "1B", "--batch", "1", "--seq", "128"]
TIGHT = [*JOB, "--machine", "v100-32", "--gpu-memory", "1.2GB"]


@pytest.mark.parametrize(
    "argv",
    [
        ["compare", *TIGHT, "--policy", "tide"],
        ["fits", *TIGHT, "--policy", "tide"],
        ["plan", *TIGHT, "--policy", "tide", "-o", "plan.json"],
        ["plan", *TIGHT[2:], "--model", "1B", "--global-batch", "1", "--policy", "tide", "-o", "plan.json"],
        ["plot", "tide", *TIGHT, "-o", "tide.png"],
        ["ablate", *TIGHT, "--policy", "tide"],
        ["max-batch", "--model", "1B", "--seq", "128", *TIGHT[6:], "--policy", "all_on_gpu"],
        pytest.param(
            ["max-model", "--like", "1B", "--batch", "1", "--seq", "128", *TIGHT[6:8], "--gpu-memory", "1.001GB",
             "--policy", "all_on_gpu"],
            marks=pytest.mark.whole,
        ),
        ["sensitivity", *TIGHT, "--policy", "all_on_gpu"],
        ["cheapest", *JOB, "--tokens", "1e9", "--deadline", "1s", "--machine", "a100-80", "--policy", "all_on_gpu"],
    ],
)  # fmt: skip
def test_no_is_an_answer(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if argv[0] == "plan" and "--global-batch" in argv:
        argv = [a for i, a in enumerate(argv) if "--batch" not in (a, argv[i - 1])]
    assert main(argv) == 3
    assert capsys.readouterr().err.startswith("pstar: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["comparre"], "unknown command 'comparre'; did you mean compare"),
        (["plot", "tides"], "unknown picture 'tides'; did you mean tide, stages?"),
        (["compare", *JOB, "--machine", "h100-81"], "unknown machine 'h100-81'; did you mean h100-80"),
        (["compare", *JOB, "--machine", "v100-32", "--gpu-memory", "8"], "'8' has no unit; write 8GB"),
        (["compare", *JOB, "--machine", "v100-32", "--set", "gpu.memory=48"], "'48' has no unit; write 48GB"),
        (["compare", *JOB, "--machine", "v100-32", "--set", "link.latency=10"], "'10' has no unit; write 10us"),
        (["compare", *JOB, "--machine", "v100-32", "--chunk", "128"], "'128' has no unit; write 128GB or 128MiB"),
        (["run", "no.json", "--model", "gpt2", "--bandwidth", "2"], "no.json"),
        (["check", "no.json"], "no.json"),
    ],
)
def test_a_mistake_is_named(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    if argv[0] != "plot":
        assert main([*argv, "--json"]) == 2
        assert_an_object(capsys, [*argv, "--json"], None, 2)


def test_a_no_without_a_table_is_an_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["ablate", *TIGHT, "--policy", "tide", "--json"]
    assert main(argv) == 3
    assert_an_object(capsys, argv, "no", 3)


def assert_an_object(capsys: pytest.CaptureFixture[str], argv: list[str], verdict: str | None, status: int) -> None:
    """On stdout: what the line on stderr says."""
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["command"] == shlex.join(["pstar", *argv])
    assert (answer["verdict"], answer["exit_status"]) == (verdict, status)
    assert err == f"pstar: {answer['reason']}\n"


def test_help_and_version_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, said in ((["--help"], "3 the answer is no"), (["--version"], f"pstar-sim {ps.__version__}")):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 0 and said in " ".join(capsys.readouterr().out.split())


def test_names_are_known_regardless_of_case() -> None:
    assert ps.machine("A100-80") == ps.machine("a100-80")
    assert ps.preset("12b", batch=1, seq=8).fingerprint == ps.preset("12B", batch=1, seq=8).fingerprint


def test_listings_and_answers_are_collections() -> None:
    assert "v100-32" in ps.machines() and "12B" in ps.models() and "tide" in ps.policies()
    assert ps.machines()[0] == ps.machines().to_json()[0]["machine"] and len(ps.models()) == len(list(ps.models()))
    assert "16-bit" in repr(ps.machines()) and "zero_offload" in repr(ps.policies())
    answer = ps.compare(ps.preset("1B", batch=1, seq=128), "v100-32", policies=["tide", "all_on_gpu"], near=False)
    assert [row.policy for row in answer] == ["tide", "all_on_gpu"] and len(answer) == 2
    assert "tide" in answer and "optimal" not in answer and answer.rows[0] in answer
    assert [row.policy for row in reversed(answer)] == ["all_on_gpu", "tide"]
    with pytest.raises(PstarError, match="policy = 0: it must be the name of one that was compared"):
        answer[0]  # type: ignore[index]
    fits = ps.fits(answer.workload, "v100-32", policies=["tide"], times=False)
    assert len(fits) == 1 and "tide" in fits and [row.fits for row in fits] == [True]
    limits = ps.max_batch("t4", lambda n: ps.preset("tiny-gpt2", batch=n, seq=8), policies=["all_on_gpu"])
    assert len(limits) == 1 and "all_on_gpu" in limits
    with pytest.raises(PstarError, match="unknown policy 'tied'"):
        limits["tied"]


@pytest.mark.parametrize(("words", "status"), [("policies >&-", 0), ("polices 2>&-", 2)])
def test_a_stream_that_was_closed_before_is_no_crash(words: str, status: int) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m pstar_sim {words}'], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout + done.stderr) == (status, "")
