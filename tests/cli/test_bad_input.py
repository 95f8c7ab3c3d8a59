"""Bad input to the commands that need no torch: one line that names the thing and what would do, nothing
half-written."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import pytest

from pstar_sim import files
from pstar_sim.cli import main
from pstar_sim.collector import without_garbage_collection
from pstar_sim.errors import DoesNotFit, PstarError

SMALL = ["--model", "1B", "--batch", "1", "--seq", "128"]
MACHINE = '[machines.mine]\ngpu = "v100-32"\ngpus = 1\nlink = "pcie3-x16"\nhost = "xeon-ddr4-2666"\n'


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr of a command that fails with status 2 and prints no result."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pstar: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad-input") / "plan.json"
    assert main(["plan", *SMALL, "--machine", "v100-32", "--policy", "tide", "-o", str(path)]) == 0
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MACHINE.replace('gpu = "v100-32"\n', ""), "[machines.mine] gpu is missing"),
        (MACHINE + 'colour = "red"\n', "colour = 'red' is not a known field; it takes gpu, gpus"),
        (MACHINE.replace("gpus = 1", "gpus = -1"), "gpus = -1; must be a whole number from 1 to 1024"),
        (MACHINE.replace("v100-32", "v100-33"), "gpu = 'v100-33'; must be the name of a GPU, such as v100-32"),
        (MACHINE + "[gpus.v100-32]\nmemory_gb = 1e9\n", "memory_gb = 1000000000.0; must be a number from"),
        (MACHINE[:20], "not a TOML file"),
        (
            "[machines.mine]\nranks = []\nhost = 'xeon-ddr4-2666'\n",
            "[machines.mine] ranks = []; must be a list of tables, one at least",
        ),
        (MACHINE + "nodes = " + "9" * 5000, "a number has too many digits"),
        (MACHINE + "nodes = " + "[" * 3000 + "]" * 3000, "its lists or tables are nested too deeply"),
    ],
)
def test_a_catalog_entry_that_is_wrong(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    said = complaint(capsys, "compare", *SMALL, "--machine", str(file))
    assert f"{file}: " in said and says in said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"micro_batches = {10**40}", "it must be a whole number from 1 to 1e+09"),
        ('[set]\n"host.cores" = [8, "x2"]', "write its values all as texts or all as numbers"),
    ],
)
def test_a_grid_whose_values_have_no_place_in_the_results(
    line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, out = tmp_path / "grid.toml", tmp_path / "out.parquet"
    grid.write_text(f'machine = "v100-32"\nmodel = "1B"\nbatch = 1\nseq = 128\npolicy = "tide"\n{line}\n')
    said = complaint(capsys, "sweep", str(grid), "-o", str(out), "--quiet")
    assert f"{grid}: " in said and says in said and not out.exists()


def test_an_argument_behind_two_dashes_that_no_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unexpected argument '-x' (see `pstar models --help`)" in complaint(capsys, "models", "--", "-x")


def test_a_batch_that_the_gpus_cannot_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "compare", *SMALL, "--machine", "v100-32x8")
    assert "batch 1 cannot be shared evenly by the 8 ranks of v100-32x8; give 8" in said
    argv = ["--model", "1B", "--seq", "128", "--batch", "12"]
    said = complaint(capsys, "compare", *argv, "--machine", "a100-80x8", "--nodes", "2")
    assert "batch 12 cannot be shared evenly by the 16 ranks of a100-80x8; give 16" in said
    plan = tmp_path / "plan.json"
    assert "give 8 or 16" in complaint(capsys, "plan", *argv, "--machine", "v100-32x8", "-o", str(plan))
    assert not plan.exists()


def test_more_ranks_than_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "1B", "--seq", "128", "--batch", "8", "--machine", "v100-32x8", "--policy", "patrickstar"]
    assert main(["compare", *argv, "--chunk", "1GB"]) == 3
    said = capsys.readouterr()
    assert "8 ranks but 3 chunks of 1.00 GB" in said.out and "take smaller chunks" in said.out
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ('link = "pcie3-x16"\n', "link is missing; it must be a text"),
        ("gpus = 1\n", "gpus is missing; it must be a whole number from 1 to 1024"),
    ],
)
def test_a_machine_file_without_a_link(
    change: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(MACHINE.replace(change, ""))
    assert says in complaint(capsys, "compare", *SMALL, "--machine", str(file))


def test_nodes_without_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "compare", *SMALL, "--machine", "v100-32", "--nodes", "2")
    assert "nodes = 2, and no network joins nodes of it; a machine file names one (network = NAME" in said


def test_this_machine_says_what_was_found_and_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["compare", *SMALL, "--policy", "zero_offload", "--machine", "here", "--gpu-memory", "40GB"])
    assert status in (0, 2, 3)  # 3: the host's free memory, which other programs have, is too little
    assert "\nhere: " in capsys.readouterr().out


@pytest.mark.parametrize("size", ["1e400GB", "1e30TB"])
def test_a_size_beyond_all_machines(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"'{size}'" in complaint(capsys, "compare", *SMALL, "--machine", "v100-32", "--gpu-memory", size)


def test_a_batch_beyond_all_machines(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", "--model", "1B", "--seq", "128", "--machine", "v100-32", "--policy", "tide", "--batch"]
    assert "less than a billion" in complaint(capsys, *argv, "9" * 20)
    assert main([*argv, "999999937"]) == 3  # a prime: no number of micro-batches divides it
    assert "short by" in capsys.readouterr().out


def test_too_large_for_the_chunk_budget_says_by_how_much_and_what_does(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", "--model", "15B", "--batch", "48", "--seq", "1024", "--machine", "v100-32", "--policy", "tide"]
    assert main([*argv, "--json"]) == 3
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert re.search(r"gpu needs [\d.]+ GB .* short by [\d.]+ GB; fits with --.* or on a100-", row["reason"])


def test_shortages_are_written_in_their_own_unit() -> None:
    said = str(DoesNotFit(policy="tide", place="gpu", needed_bytes=219_700, available_bytes=200_000, what="all"))
    assert said == "tide does not fit: gpu needs 219.7 kB (all) but has 200 kB, short by 19.7 kB"


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", *SMALL, "--machine", "v100-32", "-o"],
        ["export", "PLAN", "--perfetto", "-o"],
        ["export", "PLAN", "--timeline", "-o"],
        ["plot", "tide", "PLAN", "-o"],
        ["trace", "1B", "--batch", "1", "--seq", "8", "-o"],
        ["run", "PLAN", "--model", "1B", "--record"],
        ["run", "PLAN", "--model", "1B", "--timeline"],
    ],
    ids=" ".join,
)
def test_a_place_that_cannot_be_written_to(
    argv: list[str], plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(plan_file) if word == "PLAN" else word for word in argv]
    missing = tmp_path / "none" / "file.png"
    said = complaint(capsys, *argv, str(missing))
    assert f"{missing}: there is no folder" in said and not missing.parent.exists()
    assert f"{tmp_path} is a folder" in complaint(capsys, *argv, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_fails_leaves_nothing(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    def full(self: object, file: Path, **options: object) -> None:
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    target = tmp_path / "tide.png"
    said = complaint(capsys, "plot", "tide", str(plan_file), "-o", str(target))
    assert f"{target}: cannot be written: No space left on device" in said and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (
            "pgf",
            RuntimeError("xelatex not found; install it"),
            "xelatex not found; install it; name a file that ends in",
        ),
        (
            "ps",
            ValueError("Image size too large\nmore"),
            "Image size too large; name a file that ends in .png, .svg or",
        ),
        ("webp", KeyError(), "KeyError; name a file that ends in .png"),
    ],
)
def test_a_kind_of_picture_that_matplotlib_cannot_write_here(
    kind: str,
    error: Exception,
    said: str,
    plan_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from matplotlib.figure import Figure

    def fail(self: object, file: Path, **options: object) -> None:
        raise error

    monkeypatch.setattr(Figure, "savefig", fail)
    target = tmp_path / f"tide.{kind}"
    line = complaint(capsys, "plot", "tide", str(plan_file), "-o", str(target))
    assert f"{target}: matplotlib cannot write a picture of kind {kind!r} here: {said}" in line
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind_of_picture_is_refused_before_any_planning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pstar_sim.cli.inputs.workloads_of", lambda *_: pytest.fail("planned"))
    job = ["--model", "gpt2", "--batch", "1", "--seq", "64", "--machine", "virtual"]
    for command in (["plot", "tide", *job, "-o"], ["ablate", *job, "-o"]):
        assert "'xyz' is not a kind of picture" in complaint(capsys, *command, str(tmp_path / "tide.xyz"))
    picture = ["-o", str(tmp_path / "tide.png")]
    for looks, said in (
        (["--size", "3.3x"], "argument --size: must be a width, or a width and a height, such as 3.3, 3.3x2.5"),
        (["--size", "0.5"], "argument --size: must be a width"),
        (["--style", "nice"], "style = 'nice': it must be one of light, dark, "),
        (["--legend", "top"], "argument --legend: invalid choice: 'top' (choose from below, right, none)"),
        (["--data", "tide.txt"], "argument --data: tide.txt: give a table a name that ends in .csv"),
    ):
        assert said in complaint(capsys, "plot", "tide", *job, *picture, *looks)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    target = tmp_path / "file.json"
    files.write_atomically(target, "old")
    with pytest.raises(ZeroDivisionError), files.replaced_atomically(target) as temporary:
        temporary.write_text("ne")
        raise ZeroDivisionError
    assert target.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file.json"]
    with pytest.raises(PstarError, match="there is no folder"):
        files.write_atomically(tmp_path / "none" / "file.json", "text")


def test_a_plan_edited_by_hand_so_that_it_is_wrong(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget a tenth of what the plan was made for: the steps still read well, the checker finds the moment."""
    plan = json.loads(plan_file.read_text())
    plan["gpu_budget_bytes"] //= 10_000
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(plan))
    for command in (["check"], ["explain"], ["export", "--timeline", "-o", str(tmp_path / "t.json")], ["plot", "tide"]):
        said = complaint(capsys, *command, str(path))
        assert str(path) in said and "gpu" in said and "budget" in said
    assert [p.name for p in tmp_path.iterdir()] == ["edited.json"]


def test_a_plan_for_other_hardware_is_not_run(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    said = complaint(capsys, "run", str(plan_file), "--model", "1B")
    assert "made for machine 'v100-32'" in said and "--machine virtual" in said


def test_the_garbage_collector_stays_off_until_the_last_thread_has_planned() -> None:
    before = gc.isenabled()
    gc.enable()
    try:
        first, second = without_garbage_collection(), without_garbage_collection()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not gc.isenabled(), "the second still plans"
        second.__exit__(None, None, None)
        assert gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_compare_leaves_the_garbage_collector_as_it_was(
    enabled: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        "pstar_sim.bounds.certificate.lower_bound", lambda *a, **k: seen.append(gc.isenabled()) or 1 / 0
    )
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError):
            main(["compare", *SMALL, "--machine", "v100-32"])
        assert gc.isenabled() is enabled and seen == [False]
    finally:
        (gc.enable if before else gc.disable)()


def test_a_machine_file_is_refused_once_with_all_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values first; names of parts where all values can be used."""
    file = tmp_path / "mine.toml"
    job = ["fits", "--model", "1B", "--batch", "1", "--seq", "128", "--machine", str(file)]
    file.write_text("[hosts.h]\ncores = 0\n[machines.mine]\ngpu = 'rtx9090'\ngpus = 0\nlink = 'x'\nhost = 'nohost'\n")
    assert main(job) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6 and all(line.startswith(f"pstar: {file}: ") for line in lines)
    assert "[hosts.h] cores = 0" in lines[4] and "[machines.mine] gpus = 0" in lines[5]
    file.write_text("[machines.mine]\ngpu = 'rtx9090'\ngpus = 1\nlink = 'x'\nhost = 'nohost'\n")
    assert main(job) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" = ")[0].rpartition(" ")[2] for line in lines] == ["link", "gpu", "host"]
