"""`pstar run` as it is watched and kept: progress, both timelines in one file, a trace, a picture."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from small_model import MODEL

from pstar_sim.cli import main
from pstar_sim.cli.progress import plain_line, progress
from pstar_sim.cli.torchrun import main as of_ranks
from pstar_sim.core.plan import load_plan
from pstar_sim.core.run_file import load_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a model and a plan for it that moves chunks."""
    (tmp_path / "pstar_seen.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = ["--batch", "2", "--seq", "32", "-o", "net.parquet"]
    assert main(["trace", "py:pstar_seen:net", *argv]) == 0
    plan = ["plan", "--trace", "net.parquet", "--machine", "virtual", "--gpu-memory", "450kB", "--policy", "tide"]
    assert main([*plan, "-o", "plan.json"]) == 0
    return tmp_path


def test_a_run_keeps_what_was_predicted_beside_what_was_measured(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", "plan.json", "--model", "py:pstar_seen:net", "--steps", "3"]
    capsys.readouterr()
    assert main([*argv, "--timeline", "run.json", "--perfetto", "trace.json", "--plot", "tide.png"]) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()  # stderr is no terminal here: one line per step, once a second, and the last
    assert lines[0].startswith("step 1/3: loss ") and lines[-1].startswith("step 3/3: loss ")
    for word in ("tokens/s, on plan", " at most of 450 kB", "host ", "h2d ", " of 2.00 GB/s busy ", "compute waits "):
        assert word in lines[-1], lines[-1]
    assert "predicted  measured" in out
    assert "iteration: median of steps 2 to 3;" in out
    assert "re-timed  " in out and "re-timed: the same plan simulated with the seconds that its steps took" in out
    assert "predicted from: compute by the rate of one matrix product measured at the start" in out
    assert "other programs" in out

    both = load_run("run.json")
    assert both.predicted.moved_bytes == both.measured.moved_bytes
    plan = load_plan("plan.json")
    assert both.measured.peak_bytes["gpu"] <= plan.gpu_budget_bytes
    # The tide in the file is the measured one: peaks of moments from live storages, which are those of the trace.
    tide = {s.bytes for s in both.measured.samples if s.category == "non-model"}
    assert max(tide) == plan.workload.peak_non_model_bytes
    trace = json.loads(Path("trace.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"tide (simulated)", "tide (measured)"}
    assert Path("tide.png").read_bytes().startswith(b"\x89PNG")

    assert main(["plot", "tide", "plan.json", "--measured", "run.json", "-o", "again.png"]) == 0
    assert main(["export", "plan.json", "--perfetto", "--measured", "run.json", "-o", "again.json"]) == 0
    again = json.loads(Path("again.json").read_text())
    assert {e["pid"] for e in again["traceEvents"]} == {1, 2}

    capsys.readouterr()
    assert main(["export", "plan.json", "--timeline", "-o", "predicted.json"]) == 0
    assert main(["plot", "tide", "plan.json", "--measured", "predicted.json", "-o", "no.png"]) == 2
    assert "holds a predicted timeline and no measured one" in capsys.readouterr().err
    assert main(["export", "plan.json", "--timeline", "--measured", "run.json", "-o", "no.json"]) == 2
    assert "--measured goes with --perfetto" in capsys.readouterr().err
    assert not Path("no.png").exists() and not Path("no.json").exists()


def test_quiet_is_quiet(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["run", "plan.json", "--model", "py:pstar_seen:net", "--steps", "2", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "predicted" in out


def test_the_command_of_several_ranks_has_the_same_flags(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here on a plan of one rank, in this process; test_torchrun.py starts two."""
    monkeypatch.setattr("executor.measuring.rates.measure_virtual_machine", lambda base, **rates: base)
    argv = ["plan.json", "--model", "py:pstar_seen:net", "--steps", "2"]
    capsys.readouterr()
    assert of_ranks([*argv, "--timeline", "run.{rank}.json"]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].startswith("step 2/2: loss ") and "tide: py:pstar_seen:net on one rank" in out
    assert load_run("run.0.json").measured.iterations
    assert "re-timed" in out and "predicted from: " in out and "other programs" in out
    assert of_ranks([*argv, "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    for wrong, says in (
        (["--timeline", "no/x.json"], "argument --timeline: no/x.json: there is no folder 'no'; make it first"),
        (["--record", "r{rank}.pq"], "--record r{rank}.pq: one rank records, for all; leave {rank} out"),
        (["--plot", "a.json"], "'json' is not a kind of picture"),
        (["--perfetto", "a", "--timeline", "a"], "--timeline and --perfetto would both write a; give each a file of"),
        (["--steps", "0"], "argument --steps: must be at least 1, not 0"),
    ):
        assert of_ranks([*argv, *wrong]) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1

    flags = []
    for command in (lambda: main(["run", "--help"]), lambda: of_ranks(["--help"])):
        with pytest.raises(SystemExit):
            command()
        flags.append(set(re.findall(r"--[a-z-]+", capsys.readouterr().out)))
    assert flags[0] <= flags[1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_live_lines_on_a_terminal_and_plain_ones_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from executor.measuring.status import LinkUse, Status
    from executor.training import StepReport

    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    use = LinkUse(iteration=0, moved_bytes=10**9, bytes_per_s=1e9, link_bytes_per_s=2e9, busy_share=0.5)
    status = Status(
        policy="tide", iterations=1, on_plan=True, iteration_s=0.5, tokens_per_s=128.0, gpu_bytes=10**5,
        gpu_peak_bytes=4 * 10**5, gpu_budget_bytes=450_000, host_bytes=10**6, host_budget_bytes=10**9,
        links={"h2d": use, "d2h": use}, waiting_share=0.25, adam_share=0.1, deviations=2, last_deviation="",
    )  # fmt: skip
    plan = load_plan("plan.json")
    expected = (
        "step 1/9: loss 1.5000, 128 tokens/s, 2 off plan; GPU 400 kB at most of 450 kB, host 1 MB of 1.00 GB; "
        "h2d 1.00 GB/s of 2.00 GB/s busy 50%, d2h 1.00 GB/s of 2.00 GB/s busy 50%, compute waits 25%"
    )
    assert plain_line(9, plan, StepReport(0, 1.5, 0.5), status) == expected
    storm = replace(status, exchanges=7)
    assert "of 1.00 GB, 7 exchanges of GPU memory with the driver; h2d" in plain_line(
        9, plan, StepReport(0, 1.5, 0.5), storm
    )

    # By a clock of its own: steps at 0, 0.4, 0.8, 1.2 s ...; a line at 0, 1.2, 2.4 and for the last, at 3.2.
    now = iter(0.4 * k for k in range(9))
    plain = io.StringIO()
    with progress(9, plan, quiet=False, file=plain, clock=lambda: next(now)) as on_step:
        assert on_step is not None
        for k in range(9):
            on_step(StepReport(k, 1.5, 0.5), status)
    assert [line.split(":")[0] for line in plain.getvalue().splitlines()] == [
        "step 1/9", "step 4/9", "step 7/9", "step 9/9",
    ]  # fmt: skip

    screen = Terminal()
    with progress(9, plan, quiet=False, file=screen) as on_step:
        assert on_step is not None and screen.getvalue() == ""  # nothing before the first step
        on_step(StepReport(0, 1.5, 0.5), status)
    shown = screen.getvalue()
    assert "1/9" in shown and "loss 1.5000" in shown and "busy 50%" in shown and "400 kB at most" in shown
    with progress(9, plan, quiet=True) as on_step:
        assert on_step is None
