"""`pstar calibrate` at the command line, where nothing is measured yet."""

import subprocess
import sys
from pathlib import Path

import pytest

from pstar_sim.cli import main


def test_help_says_what_it_writes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["calibrate", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "machine file" in text
    assert "--quick" in text
    assert "--device" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-o", "{folder}/none/my.toml"], "there is no folder"),
        (["-o", "{folder}"], "is a folder; name a file"),
        (["-o", "{folder}/my.json"], "the name of a machine file must end in .toml"),
        ([], "-o/--output"),
        (["-o", "{folder}/my.toml", "--device", "tpu"], "'tpu'"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["calibrate", *(flag.format(folder=tmp_path) for flag in flags)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("pstar: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_imports_no_torch_for_it() -> None:
    code = (
        "import sys; from typer.main import get_command; from pstar_sim.cli.typer_app import app; get_command(app); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
