"""What README, SKILL.md, docs/ and the other documents show is what happens: their commands and their Python run as
written, in order, in one folder per document; terminal sessions print what they claim."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pstar_sim.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    p
    for p in ROOT.rglob("*.md")
    if not {"node_modules", "site"} & {*p.parts}
    and not any(part.startswith(".") for part in p.relative_to(ROOT).parts)  # environments, caches of tools
    and p.stem != "CHANGELOG"
)
README = (ROOT / "README.md").read_text(encoding="utf-8")
SESSIONS = [
    (path, session)
    for path in DOCUMENTS
    for session in re.findall(r"^```console\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
]

NOT_RUN = {
    "make ": "sets up an environment or runs the suite that this test is part of",
    ".venv/bin/python -m pytest": "runs the suite that this test is part of",
    "pstar validate": "half a minute; a small part runs in test_validation_results.py",
    "pstar calibrate": "two minutes; shorter runs are in test_cli_calibrate.py and test_calibrate.py",
    "pstar trace --from-snapshot": "needs the snapshot of a GPU; test_recording.py makes some",
    "pstar diff ": "needs the snapshot of a GPU or a run; test_recording.py makes both",
    "pstar run plan.json --model hf:small.json --log": "a plan of another page; test_watching_a_job.py runs it",
    "torchrun ": "two processes; test_torchrun.py runs this line on a smaller model",
    "from dask.distributed": "needs a cluster and dask",
    "from pstar_sim.policy import Job, Visit": "runs in test_contributing_example.py, which looks at its plans",
    "import pstar_sim as ps\nfrom pstar_sim.testing": "runs in test_contributing_example.py, after the block above it",
}
"""How a command or a block of Python begins that is not run, and the reason."""

IN_SMALL = {
    "pstar fits --model 4B": "--policy tide --model 1B",
    "pstar compare --model 4B": "--policy zero_offload --model 1B",
    "pstar plan --model 4B": "--policy tide --model 1B --gpu-memory 8GB",
    "pstar fits --like": "--policy tide",
    "pstar compare --like": "--policy tide",
    "pstar max-model ": "--policy zero_offload --like 1B --host-memory 24GB",
    "pstar max-batch ": "--policy zero_offload --model 1B",
    "pstar cheapest --model 8B": "--policy tide --model 1B",
    "pstar cheapest --model 1B": "--model gpt2",
    "pstar sensitivity ": "--policy zero_offload --model 1B --host-memory 36GB",
    "pstar sweep ": "--jobs 1",
    "pstar plan --model 1B --global-batch 8": "--policy tide --global-batch 2",
    "pstar compare --model 1B --batch 2": "--policy zero_offload",
    "pstar compare --model llama-3.2-3b": "--policy tide --model llama-3.2-1b",
    "pstar compare --model bert-large": "--model bert-base --batch 8 --effort 0.1",
    "pstar ablate --model 1B": "--policy tide --model gpt2",
    "pstar plan --trace small.parquet --micro-batches 4": "--micro-batches 2",
    "pstar run plan.json": "--steps 2",
    "pstar run adapters.json": "--steps 2",
    "pstar plot tide --model 4B": "--model gpt2",
    "pstar plan --model llama-3.2-3b": "--model llama-3.2-1b",
    'from matplotlib import pyplot as plt\n\nimport pstar_sim as ps\n\nw = ps.preset("12B"': '"12B" -> "1B"',
    "from matplotlib import pyplot as plt\n\nimport pstar_sim as ps\n\nc = ps.compare(": '"1B" -> "gpt2"',
    "import pstar_sim as ps\n\nbest = ps.compare(": '"1B" -> "gpt2"',
    "import torch\nfrom transformers import GPT2Config, GPT2LMHeadModel\n\nimport executor\nimport pstar_sim": (
        "range(3) -> range(1)"
    ),
}
"""How a command begins that takes long, and the flags that it gets beside its own without --whole; how Python does, and
what stands in it for what. The `compare` of add-a-gpu.md is asked about every policy."""


LONG = ("$ pstar ablate --model 8B", "$ pstar compare --model 15B", "$ pstar max-model --machine v100-32x8 --batch 64")
"""How a terminal session begins that takes as long as five others, and runs with --whole alone."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Something to run or to write, and where it stands. language: bash, python, toml or yaml. TOML, YAML, and Python
    whose head names a file, is written."""

    language: str
    text: str
    where: str

    @property
    def skipped(self) -> bool:
        return any(self.text.startswith(begin) for begin in NOT_RUN)


def pieces(path: Path) -> Iterator[Piece]:
    """Of a document, in order: its blocks, a shell block line by line, and the commands of its table of questions.
    Terminal sessions have a test of their own; text blocks are not commands."""
    text = path.read_text(encoding="utf-8")
    found = re.compile(r"^```(\w*)\n(.*?)^```|^\| question \| command \|\n((?:\|[^\n]*\n)*)", re.MULTILINE | re.DOTALL)
    for match in found.finditer(text):
        where = f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        language, block, questions = match.groups()
        if questions is not None:
            for command in re.findall(r"`(pstar [^`]*)`", questions):
                yield Piece(language="bash", text=command, where=where)
        elif language == "bash":
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                if line.strip() and not line.startswith("#"):
                    yield Piece(language="bash", text=line, where=where)
        elif language in ("python", "toml", "yaml"):
            yield Piece(language=language, text=block, where=where)
        else:
            assert language in ("console", "text"), f"{where}: a block of {language or 'no language'!r} is not run"


def run(piece: Piece, whole: bool) -> None:
    """In the current folder. A command of pstar runs in this process, which has torch loaded already; with the flags of
    IN_SMALL, unless whole."""
    small = next((more for begin, more in IN_SMALL.items() if piece.text.startswith(begin)), None)
    if piece.language in ("toml", "yaml"):
        (name,) = re.findall(r"\A# (\S+\.(?:toml|yaml))\n", piece.text) or [None]
        assert name, f"{piece.where}: a block of TOML or YAML begins with the name of its file"
        Path(name).write_text(piece.text, encoding="utf-8")
    elif named := re.match(r"# (\S+\.py)\n", piece.text):
        Path(named[1]).write_text(piece.text, encoding="utf-8")
    elif piece.language == "python":
        from matplotlib import pyplot

        long, _, short = (small if small is not None and not whole else " -> ").partition(" -> ")
        assert long in piece.text, piece.where
        text = piece.text.replace(long, short) if long else piece.text
        exec(compile(text, piece.where, "exec"), {"__name__": "document"})
        pyplot.close("all")
    elif piece.text.startswith("pstar "):
        more = [] if whole or small is None else small.split()
        words = [*shlex.split(piece.text, comments=True), *more]
        assert main(words[1:]) == 0, f"{piece.where}: {piece.text}"
    else:
        folder = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        paths = {"PATH": folder, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        line = ["bash", "-c", piece.text]
        done = subprocess.run(line, env={**os.environ, **paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, f"{piece.where}: {piece.text}\n{done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.timeout(1200)  # thirty commands, beside whatever else the machine does
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_runs_in_order_in_one_folder(
    path: Path, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --whole, the commands of IN_SMALL are asked for less."""
    import matplotlib

    matplotlib.use("Agg")
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    for piece in pieces(path):
        if not piece.skipped:
            run(piece, whole)


def test_the_documents_have_what_is_looked_for_and_every_exception_is_needed() -> None:
    found = [piece for path in DOCUMENTS for piece in pieces(path)]
    commands = [p.text for p in found if p.language == "bash"]
    of = {text.split()[1] for text in commands if text.startswith("pstar ")}
    assert of >= {
        "fits", "compare", "plan", "check", "ablate", "max-model", "max-batch", "cheapest", "sensitivity", "sweep",
        "validate", "calibrate", "trace", "run", "launch",
    }  # fmt: skip
    skill = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    assert of >= {*re.findall(r"`pstar ([\w-]+)", skill)}, "a command that SKILL.md recommends is in no block that runs"
    assert any(text.startswith("torchrun ") and "-m executor" in text for text in commands)
    assert sum(p.language == "python" for p in found) >= 5
    assert all(any(p.where.startswith(page) for p in found) for page in ("README.md", "SKILL.md", "docs/tutorial.md"))
    unused = [begin for begin in [*NOT_RUN, *IN_SMALL] if not any(p.text.startswith(begin) for p in found)]
    assert not unused
    assert SESSIONS


def test_commands_in_the_text_name_flags_and_files_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands within a sentence are often cut short, so they are not run."""
    helps: dict[str, str] = {}
    for path in DOCUMENTS:
        assert_commands_exist(path, helps, capsys)


def assert_commands_exist(path: Path, helps: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """helps: command -> what its --help prints, as far as it was asked."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for words in map(str.split, re.findall(r"`((?:pstar|python3?|make) [^`]+)`", text)):
        flags = [re.split(r"[=|]", word)[0] for word in words if word.startswith("--")]
        if words[0] == "make":
            known = (ROOT / "Makefile").read_text(encoding="utf-8")
            flags = [f"\n{target}:" for target in words[1:2]]
        elif words[0] == "pstar":
            if words[1] not in helps and not words[1].startswith("-"):
                with pytest.raises(SystemExit) as end:
                    main([*words[1:2], *(["tide"] if words[1] == "plot" else []), "--help"])
                assert end.value.code == 0, f"{path.name}: {' '.join(words)}"
                helps[words[1]] = capsys.readouterr().out
            known = helps.get(words[1], "--version --help")
        elif words[1] != "-m":
            known = (ROOT / words[1]).read_text(encoding="utf-8")
        else:
            continue
        assert not [flag for flag in flags if flag not in known], f"{path.name}: {' '.join(words)}"


@pytest.mark.parametrize(
    ("path", "session"),
    [
        pytest.param(
            path,
            session,
            id=f"{path.stem}-{number}",
            marks=[pytest.mark.whole] * session.startswith(LONG),
        )
        for number, (path, session) in enumerate(SESSIONS)
    ],
)
def test_a_terminal_session_prints_what_it_claims(
    path: Path, session: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands begin with "$ "; the lines up to the next one are their output, where a last "..." skips the rest."""
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    for command, claimed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE):
        words = shlex.split(command)
        assert words[0] == "pstar", f"{path.name}: a terminal session shows pstar"
        assert main(words[1:]) in (0, 3)  # 3: the answer is no
        printed = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
        shown = [line.rstrip() for line in claimed.strip().splitlines()]
        if shown and shown[-1] == "...":
            shown.pop()
            printed = printed[: len(shown)]
        assert printed == shown, "run .ci/refresh_readme.py"


def test_contributing_names_the_tests_that_run_with_whole_alone() -> None:
    """Those that have no other row; of the others it may name some."""
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    found = {
        n for text in files for n in re.findall(r"^@pytest\.mark\.whole\n(?:[@ )].*\n)*def (test_\w+)", text, re.M)
    }
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## ")[2]
    named = {*re.findall(r"^\| `(test_\w+)`", section, re.M)}
    assert section.startswith("Tests that run with") and found <= named
    assert all(any(f"def {name}(" in text for text in files) for name in named)


def test_the_readme_is_one_page() -> None:
    assert len(README.split()) < 900
    assert "](docs/images/tide_15b.png)" in README


def test_every_link_of_a_document_leads_to_a_file() -> None:
    """As a code host shows it; anchors are looked at in test_docs.py."""
    for path in DOCUMENTS:
        links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
        assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == [], path
