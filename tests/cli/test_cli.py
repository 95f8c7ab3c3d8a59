"""The command line: answers on stdout, mistakes as one line on stderr with status 2, never a traceback."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from typer.main import get_command

import pstar_sim as ps
from pstar_sim.cli import main
from pstar_sim.cli.typer_app import app
from pstar_sim.testing import chain_workload
from pstar_sim.units import format_error
from pstar_sim.workload.trace import save_trace

COMMANDS = tuple(get_command(app).commands)  # type: ignore[attr-defined]
SMALL = ["--model", "1B", "--batch", "1", "--seq", "1024", "--machine", "v100-32"]
KEYS = [
    "policy",
    "fits",
    "reason",
    "iteration_s",
    "tokens_per_s",
    "lower_bound_s",
    "gap",
    "bound_by",
    "peak_gpu_bytes",
    "peak_host_bytes",
    "peak_gpu_bytes_by_rank",
    "h2d_bytes",
    "d2h_bytes",
    "barrier_cost_s",
    "certificate",
    "expected_error",
    "trust",
    "tflops_per_gpu",
    "mfu",
    "short_of",
    "needed_bytes",
    "available_bytes",
    "needed_for",
    "nearest",
]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert main(["plan", *SMALL, "--policy", "tide", "-o", str(path)]) == 0
    return path


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a command that fails with status 2 and prints no result."""
    assert main(argv) == 2
    _out, err = capsys.readouterr()
    assert err.startswith("pstar: ") and err.count("\n") == 1 and err.endswith("\n")
    assert "Traceback" not in err
    return err


def test_json_is_a_list_of_objects_with_exactly_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *SMALL, "--policy", "tide", "--policy", "zero_offload", "--json"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)["rows"]
    assert err == "" and [list(row) for row in rows] == [[*KEYS, "kernels", "notes"]] * 2
    assert [row["policy"] for row in rows] == ["tide", "zero_offload"]
    for row in rows:
        assert row["fits"] and row["reason"] is None
        assert row["gap"] == pytest.approx(row["iteration_s"] / row["lower_bound_s"] - 1)
        assert row["tokens_per_s"] == pytest.approx(1024 / row["iteration_s"])


def test_parts_of_machines_are_listed_with_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machines", "--gpus", "--json"]) == 0
    rows = {row["gpu"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    h100 = rows["h100-80"]
    assert (h100["bf16_tflops"], h100["hbm_gb_per_s"], h100["memory_gb"]) == (989, 3350, 84.9) and h100["source"]
    assert main(["machines", "--gpus", "--hosts"]) == 2
    assert "--gpus and --hosts are two tables; give one of them" in capsys.readouterr().err


HEADER = ["command", "version", "model", "machine", "verdict", "reason", "advice", "notes"]


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["fits", *SMALL, "--policy", "tide"], 0),
        (["fits", *SMALL, "--gpu-memory", "1.2GB", "--policy", "tide"], 3),
        (["compare", *SMALL, "--policy", "tide"], 0),
        (["compare", *SMALL, "--gpu-memory", "1.2GB", "--policy", "tide"], 3),
        (["plan", *SMALL, "--policy", "tide", "-o", "{plan}.new"], 0),
        (["check", "{plan}"], 0),
        (["explain", "{plan}"], 0),
        (["max-batch", "--model", "gpt2", "--seq", "64", "--machine", "t4", "--policy", "all_on_gpu"], 0),
        (["sensitivity", *SMALL, "--policy", "all_on_gpu"], 0),
        (["policies"], 0),
    ],
)
def test_every_json_answer_begins_with_what_was_asked_and_what_is_answered(
    argv: list[str], status: int, plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(plan=plan_file) for word in argv]
    capsys.readouterr()
    assert main([*words, "--json"]) == status
    said = json.loads(capsys.readouterr().out)
    assert list(said)[: len(HEADER)] == HEADER and said["command"] == shlex.join(["pstar", *words, "--json"])
    assert said["version"] == ps.__version__
    asks = words[0] in ("fits", "compare", "plan", "check", "max-batch", "sensitivity")
    assert said["verdict"] == ({0: "yes", 3: "no"}[status] if asks else None)
    if words[0] in ("fits", "compare"):
        assert all(flags.startswith("--") for flags in said["advice"])
        assert said["reason"] and said["advice"] and said["model"] == said["rows"][0].get("model", said["model"])


def test_the_table_names_every_policy_and_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["compare", *SMALL, "--policy", "tide", "--policy", "zero_offload", "--update", "eager", "--no-clip"]) == 0
    )
    out = capsys.readouterr().out
    assert "update eager, no clipping" in out and "lower bound of this setting" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith(("tide", "zero"))] == [
        ["tide", "best"],
        ["zero_offload", "yes"],
    ]


def test_all_policies_are_compared_when_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *SMALL, "--json"]) == 0
    named = {row["policy"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {"all_on_gpu", "zero_offload", "static_partition", "patrickstar", "tide"} <= named


def test_plan_check_explain_export_plot(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(plan_file)]) == 0
    assert "correct: " in capsys.readouterr().out
    assert main(["explain", str(plan_file)]) == 0
    words = capsys.readouterr().out
    for heading in ("what lives where", "why", "what binds", "what the tide gains", "first steps"):
        assert f"\n{heading}" in words
    trace = tmp_path / "trace.json"
    assert main(["export", str(plan_file), "--perfetto", "-o", str(trace)]) == 0
    assert json.loads(trace.read_text())["traceEvents"]
    picture = tmp_path / "tide.png"
    assert main(["plot", "tide", str(plan_file), "-o", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_auto_is_the_fastest_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", *SMALL, "-o", str(path), "--json"]) == 0
    (chosen,) = json.loads(capsys.readouterr().out)["rows"]
    assert main(["compare", *SMALL, "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out)["rows"] if row["fits"]]
    assert chosen["iteration_s"] == min(row["iteration_s"] for row in rows)


@pytest.mark.parametrize(
    "what", ["machines", "machines --gpus", "machines --links", "machines --hosts", "models", "policies"]
)
def test_listings(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(what.split()) == 0
    assert len(capsys.readouterr().out.splitlines()) > 4
    assert main([*what.split(), "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out)["rows"], list)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--machine", "v100-23"], "v100-32"),
        (["--model", "12BB"], "12B"),
        (["--policy", "tied"], "tide"),
        (["--gpu-memory", "lots"], "'lots' is not a size"),
        (["--gpu-memory", "8ib"], "'8ib' is not a size"),
        (["--host-memory", "0GB"], "positive"),
        (["--batch", "0"], "--batch: must be at least 1"),
        (["--batch", "two"], "'two'"),
        (["--update", "later"], "'later'"),
        (["--chunk", "12 apples"], "'12 apples' is not a size"),
        (["--trace", "x.parquet"], "not allowed with argument"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_a_wrong_flag_is_one_line(change: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in complaint(capsys, "compare", *SMALL, *change)


def test_a_trace_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "none.parquet")
    assert path in complaint(capsys, "compare", "--trace", path, "--machine", "v100-32")


def test_a_trace_that_is_foreign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "foreign.parquet"
    path.write_bytes(b"PAR1 this is no trace")
    assert str(path) in complaint(capsys, "compare", "--trace", str(path), "--machine", "v100-32")


def test_a_model_without_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--batch and --seq" in complaint(capsys, "compare", "--model", "1B", "--machine", "v100-32")


@pytest.mark.parametrize("command", ["check", "explain", "run"])
def test_a_truncated_plan(command: str, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "half.json"
    path.write_text(plan_file.read_text()[:5000])
    more = ["--model", "1B"] if command == "run" else []
    assert str(path) in complaint(capsys, command, str(path), *more)


def test_a_newer_plan(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "newer.json"
    path.write_text(plan_file.read_text().replace('"version": 2', '"version": 99', 1))
    assert "newer" in complaint(capsys, "check", str(path))


def test_a_plan_edited_by_hand_so_that_it_is_wrong(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One CPU or GPU Adam step is deleted: a parameter is then never updated, which only the checker can see."""
    lines = plan_file.read_text().splitlines()
    victim = max(i for i, line in enumerate(lines) if "_adam " in line)
    number = lines[victim].strip('"').split()[0]
    lines = [line.replace(f",{number}@-1", "").replace(f"={number}@-1,", "=") for line in lines]
    del lines[victim]
    path = tmp_path / "edited.json"
    path.write_text("\n".join(lines) + "\n")
    assert str(path) in complaint(capsys, "check", str(path))


def test_what_does_not_fit_says_why_by_how_much_and_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", "--model", "15B", "--batch", "8", "--seq", "1024", "--machine", "v100-32"]
    assert main([*argv, "--policy", "zero_offload", "--policy", "tide", "--json"]) == 0
    zero, tide = json.loads(capsys.readouterr().out)["rows"]
    assert not zero["fits"] and tide["fits"]
    assert "short by" in zero["reason"] and ", or on l40s" in zero["reason"] and "--policy tide" in zero["reason"]
    assert zero["iteration_s"] is None and zero["bound_by"] is None


def test_nothing_fits_is_a_table_and_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", *SMALL, "--gpu-memory", "1.2GB", "--policy", "tide", "--json"]
    assert main(argv) == 3
    out, err = capsys.readouterr()
    (row,) = json.loads(out)["rows"]
    assert not row["fits"] and "short by" in row["reason"]
    assert err.count("\n") == 1 and "does not fit" in err


def test_no_plan_is_written_when_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    refused = ["plan", *SMALL, "--gpu-memory", "1.2GB", "--policy", "tide", "-o", str(path)]
    assert main(refused) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "tide does not fit: gpu needs" in out and "; fits with --" in out and not path.exists()
    assert main([*refused, "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert not answer["fits"] and answer["rows"][0]["needed_bytes"] > answer["rows"][0]["available_bytes"]


def test_host_memory_too_small_names_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "compare",
        "--model",
        "4B",
        "--batch",
        "8",
        "--seq",
        "1024",
        "--machine",
        "v100-32",
        "--host-memory",
        "24GB",
    ]
    assert main([*argv, "--policy", "zero_offload", "--json"]) == 3
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert "host needs" in row["reason"] and "--host-memory " in row["reason"]


def test_figures_for_papers(plan_file: Path, tmp_path: Path) -> None:
    """The same bytes twice, fonts that publishers take, a size and a style as asked, and the numbers as a table."""
    svg, pdf, png, data = (tmp_path / f"tide.{kind}" for kind in ("svg", "pdf", "png", "csv"))
    looks = ["--size", "85x60mm", "--x", "time", "--legend", "none"]
    written = []
    for _ in range(2):
        assert main(["plot", "tide", str(plan_file), *looks, "-o", str(svg), "--data", str(data)]) == 0
        written.append((svg.read_bytes(), data.read_bytes()))
    assert written[0] == written[1] and b"<dc:date>" not in written[0][0]
    assert written[0][1].startswith(b"timeline,source,x,from,to,states_bytes,")
    assert main(["plot", "tide", str(plan_file), *looks, "-o", str(pdf)]) == 0
    assert b"/CIDFontType2" in pdf.read_bytes() and b"/Type3" not in pdf.read_bytes()
    assert main(["plot", "tide", str(plan_file), *looks, "--style", "dark", "-o", str(png)]) == 0
    with Image.open(png) as image:
        assert image.size == (1003, 708) and image.getpixel((2, 2))[:3] == (0x1E, 0x21, 0x29)


def test_a_title_says_the_error_of_its_seconds(plan_file: Path, tmp_path: Path) -> None:
    style, svg = tmp_path / "letters.mplstyle", tmp_path / "tide.svg"
    style.write_text("svg.fonttype: none\n")
    error = format_error(ps.load_plan(plan_file).predictions["expected_error"])
    for drawn in ([str(plan_file)], [*SMALL, "--policy", "tide"]):
        assert main(["plot", "tide", *drawn, "--style", str(style), "-o", str(svg)]) == 0
        assert re.search(rf"; predicted seconds {error}\s*</text>", svg.read_text(encoding="utf-8"))


def test_a_picture_of_an_unknown_kind(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tide.xyz" in complaint(capsys, "plot", "tide", str(plan_file), "-o", str(tmp_path / "tide.xyz"))


def test_a_folder_that_is_not_there(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none" / "trace.json"
    assert str(path) in complaint(capsys, "export", str(plan_file), "--perfetto", "-o", str(path))


def test_ctrl_c_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pstar_sim.planner.compare.compare", interrupted)
    assert main(["compare", *SMALL]) == 130
    assert capsys.readouterr().err == "pstar: interrupted\n"


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) as done:
            main([str(name), "--help"])
        assert done.value.code == 0
        assert f"example: pstar {name}" in capsys.readouterr().out


def test_every_answer_from_a_trace_says_the_traces_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "no image in the batch: tower does not run"
    trace, plan = str(tmp_path / "text.parquet"), str(tmp_path / "plan.json")
    save_trace([replace(chain_workload(3, 4_000_000), notes=note)], trace)
    asked = ["--trace", trace, "--machine", "a100-80", "--policy", "tide"]
    for argv in (["fits", *asked], ["compare", *asked], ["plan", *asked, "-o", plan], ["explain", plan]):
        assert main(argv) == 0
        assert note in " ".join(capsys.readouterr().out.split())
    for argv in (["fits", *asked, "--json"], ["compare", *asked, "--json"]):
        assert main(argv) == 0
        assert [row["notes"] for row in json.loads(capsys.readouterr().out)["rows"]] == [note]
