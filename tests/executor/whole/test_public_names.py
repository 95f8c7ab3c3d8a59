"""The names of the executor that documents and messages use: they are there after `import executor`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
_NAME = re.compile(r"\bexecutor(?:\.[A-Za-z_]\w*)+")

BY_NAME = {"executor.lightning", "executor.axolotl", "executor.axolotl.OffloadPlugin"}
"""For another package, which the user has: imported by name."""


def texts() -> list[str]:
    """README, SKILL.md, docs/, and every sentence in a string of the code that is no docstring: what users are told."""
    documents = [ROOT / "README.md", ROOT / "SKILL.md", *sorted((ROOT / "docs").rglob("*.md"))]
    # Without where links lead and where a docstring is that has another heading.
    found = [re.sub(r"\]\([^)]*\)|^::: .*\n +options:", "", path.read_text(), flags=re.MULTILINE) for path in documents]
    for file in sorted([*(ROOT / "executor").rglob("*.py"), *(ROOT / "pstar_sim").rglob("*.py")]):
        if "executor." not in (text := file.read_text()):
            continue
        tree = ast.parse(text)
        docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        found += [
            n.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and " " in n.value and id(n) not in docstrings
        ]
    return found


def test_names_that_users_are_told_are_there_after_import_executor() -> None:
    names = {match.group() for text in texts() for match in _NAME.finditer(text)}
    assert {"executor.prepare", "executor.hf.connect", "executor.AdamW"} | BY_NAME <= names
    code = (
        "import functools, sys, executor\n"
        "missing = []\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        functools.reduce(getattr, name.split('.')[1:], executor)\n"
        "    except AttributeError:\n"
        "        missing.append(name)\n"
        "print(missing, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *sorted(names - BY_NAME)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[] False"
