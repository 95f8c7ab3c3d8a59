"""Put what the commands print now into the README: its terminal sessions, the contract table and the table of policies.

python .ci/refresh_readme.py [--table]   (--table also runs table_policies.py and `pstar validate`, about two minutes)
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
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


def gaps_table() -> str:
    """The summaries that benchmarks/optimal.py has written."""
    lines = ["| configurations | bound | fit | median gap | mean | largest | at |", "|---|---|---:|---:|---:|---:|---|"]
    for path in sorted((ROOT / "benchmarks" / "results").glob("optimal*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        what, _, bound = result["what"].partition(", gap to the ")
        s = result["summary"]
        figures = " | ".join(f"{100 * s[key]:.2f} %" for key in ("median_gap", "mean_gap", "max_gap"))
        lines.append(f"| {what} | {bound} | {s['fit']} of {s['configurations']} | {figures} | {s['max_gap_at']} |")
    return "\n".join(lines)


def peers_table() -> str:
    """What benchmarks/peers.py has written: on this CPU and, where it has run there, on a GPU."""
    lines = []
    for name in ("peers", "peers_cuda"):
        path = ROOT / "benchmarks" / "results" / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        if not lines:
            lines = [
                "| contender | clipped | micro-batch | tokens/s | GPU | host peak | a parameter | largest | losses |",
                "|---|---|---:|---:|---:|---:|---:|---:|---:|",
            ]
        for row in result["rows"]:
            gpu, most, apart = row["gpu_reserved_bytes"], row["largest_params"], row["loss_apart"]
            lines.append(
                f"| {row['contender']}{', on ' + result['device'] if name == 'peers_cuda' else ''} "
                f"| {'yes' if row['clip'] else 'no'} | {row['micro_batch']} | {row['tokens_per_s']:,.0f} "
                f"| {'n/a' if gpu is None else f'{gpu / 1e9:.2f} GB'} | {row['host_peak_bytes'] / 1e9:.2f} GB "
                f"| {row['host_bytes_per_param']:.1f} B | {'-' if most is None else f'{most / 1e6:,.0f} M'} "
                f"| {'-' if apart is None else f'{apart:.1e}'} |"
            )
    return "\n".join(lines)


def validation_summary() -> str:
    """The first part of what `pstar validate` prints, up to the list of misses, as a block of text."""
    return "```text\n" + printed(["validate"]).partition("\n\nTested rows off")[0] + "\n```"


def put(text: str, mark: str, content: str) -> str:
    """Replace what stands under the marker, a table or a block of text, up to the next empty line."""
    if f"<!-- {mark} -->\n" not in text:
        raise SystemExit(f"README.md has no marker <!-- {mark} -->")
    old = r"(?:\|[^\n]*\n)*" if content.startswith("|") else r"(?:```text\n.*?\n```\n)?"
    return re.sub(
        rf"(<!-- {mark} -->\n)\n*{old}\n*", lambda m: f"{m[1]}\n{content}\n\n", text, count=1, flags=re.DOTALL
    )


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^```console\n(.*?)^```", session, text, flags=re.MULTILINE | re.DOTALL)
    text = put(text, "contract", contract_table())
    text = put(text, "gaps", gaps_table())
    text = put(text, "peers", peers_table())
    if "--table" in sys.argv[1:]:
        rows, _, verdict = policies_table().partition("\n\n")
        sys.stdout.write(verdict + "\n")
        text = put(text, "table", rows)
        text = put(text, "validation", validation_summary())
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
