"""Python 3.10 can read every file and finds every name: the checks that need no 3.10 to run."""

from __future__ import annotations

import ast
import re
import sys
from enum import Enum
from pathlib import Path

import pytest

from pstar_sim.python310 import StrEnum, TOMLDecodeError, add_note, toml_loads

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    p for folder in ("pstar_sim", "executor", "benchmarks", "tests", "notebooks") for p in (ROOT / folder).rglob("*.py")
)

# Names of the standard library that came with 3.11 or later and have been used, or might be, here.
NEWER = {
    "datetime": {"UTC"},
    "enum": {"ReprEnum", "StrEnum", "verify"},
    "hashlib": {"file_digest"},
    "contextlib": {"chdir"},
    "itertools": {"batched"},
    "math": {"cbrt", "exp2", "sumprod"},
    "typing": {
        *("LiteralString", "Never", "NotRequired", "Required", "Self", "TypeVarTuple", "Unpack"),
        *("assert_never", "assert_type", "override", "reveal_type"),
    },
}
MODULES = {"tomllib", "wsgiref.types"}
BUILTINS = {"BaseExceptionGroup", "ExceptionGroup"}
METHODS = {"add_note"}
ANY_OF_THEM = re.compile("|".join(set().union(*NEWER.values(), MODULES, BUILTINS, METHODS)))


def newer_names(path: Path) -> list[str]:
    """What 3.10 lacks of what the file uses. Raises SyntaxError for grammar that 3.10 does not know."""
    found: list[str] = []
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, feature_version=(3, 10))
    for node in ast.walk(tree) if ANY_OF_THEM.search(text) else ():
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = {alias.name for alias in node.names}
            found += sorted(names & NEWER.get(node.module or "", set()))
            found += [node.module] if node.module in MODULES else []
        elif isinstance(node, ast.Attribute):
            module = node.value.id if isinstance(node.value, ast.Name) else ""
            found += [node.attr] if node.attr in NEWER.get(module, set()) | METHODS else []
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            found.append(node.id)
    return found


def test_no_file_needs_more_than_310(whole: bool) -> None:
    """Without --whole, files with one of the names; grammar is held against 3.10 by ruff too, in `make check`."""
    allowed = {ROOT / "pstar_sim" / "python310.py"}
    read = [p for p in FILES if p not in allowed and (whole or ANY_OF_THEM.search(p.read_text(encoding="utf-8")))]
    wrong = {str(p.relative_to(ROOT)): names for p in read if (names := newer_names(p))}
    assert len(FILES) > 200 and len(read) > 5
    assert wrong == {}


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    file = tmp_path / "new.py"
    file.write_text("import tomllib\nfrom enum import StrEnum\nimport datetime\nx = datetime.UTC\ne.add_note('a')\n")
    assert newer_names(file) == ["tomllib", "StrEnum", "UTC", "add_note"]
    file.write_text("try:\n    pass\nexcept* OSError:\n    pass\n")
    with pytest.raises(SyntaxError):
        newer_names(file)


def test_str_enum_and_notes() -> None:
    class Fruit(StrEnum):
        APPLE = "apple"

    assert (str(Fruit.APPLE), f"{Fruit.APPLE:>6}", Fruit("apple"), Fruit.APPLE == "apple") == (
        "apple",
        " apple",
        Fruit.APPLE,
        True,
    )
    assert issubclass(Fruit, Enum)
    error = OSError("disk")
    for note in ("first", "second"):
        add_note(error, note)
    assert error.__notes__ == ["first", "second"]
    assert toml_loads("a = 1") == {"a": 1}
    with pytest.raises(TOMLDecodeError):
        toml_loads("a = ")
    assert (sys.version_info >= (3, 11)) == (StrEnum.__module__ == "enum")
