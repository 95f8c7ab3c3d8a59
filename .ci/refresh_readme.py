"""Put what the commands print now into the README: its terminal sessions, the contract table and the table of policies.

python .ci/refresh_readme.py [--table]   (--table also runs table_policies.py, about a minute)
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

from pstar_sim.cli import main as pstar

ROOT = Path(__file__).resolve().parents[1]


def printed(argv: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = pstar(argv)
    if status:
        raise SystemExit(f"pstar {shlex.join(argv)}: exit status {status}")
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def session(block: re.Match[str]) -> str:
    """Every command of the block with its output; "..." as the last line keeps the length it has."""
    parts = []
    for command, old in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block[1], re.MULTILINE):
        lines = printed(shlex.split(command)[1:]).splitlines()
        shown = old.rstrip("\n").splitlines()
        if shown and shown[-1] == "...":
            lines = [*lines[: len(shown) - 1], "..."]
        parts.append("\n".join([f"$ {command}", *lines]))
    return "```console\n" + "\n\n".join(parts) + "\n```"


def contract_table() -> str:
    """The table in the docstring of executor/contract.py, read without importing torch."""
    docstring = ast.get_docstring(ast.parse((ROOT / "executor" / "contract.py").read_text(encoding="utf-8"))) or ""
    return "\n".join(line for line in docstring.splitlines() if line.startswith("|"))


def policies_table() -> str:
    script = ROOT / "benchmarks" / "table_policies.py"
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout.strip()


def put(text: str, mark: str, content: str) -> str:
    """Replace what stands under the marker, up to the next empty line."""
    return re.sub(rf"(<!-- {mark} -->\n)\n*(?:\|.*\n)*\n*", lambda m: f"{m[1]}\n{content}\n\n", text, count=1)


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^```console\n(.*?)^```", session, text, flags=re.MULTILINE | re.DOTALL)
    text = put(text, "contract", contract_table())
    if "--table" in sys.argv[1:]:
        rows, _, verdict = policies_table().partition("\n\n")
        sys.stdout.write(verdict + "\n")
        text = put(text, "table", rows)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
