"""What `mkdocs build` does beside its plugins (mkdocs.yml names this file as a hook).

- A link from a page to a file of the repository outside docs/ works on a code host as it is written. In the site the
  file is copied to repository/, and the link leads there, so that it is checked like any other.
- A line `<!-- help: COMMAND -->` is replaced by what `pstar COMMAND --help` prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pstar_sim.cli import main as pstar

ROOT = Path(__file__).resolve().parents[1]
COPIES = "repository"
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
HELP = re.compile(r"^<!-- help: ?(.*?) -->$", re.MULTILINE)
WIDTH = "100"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that a page links to, and those that these link to."""
    waiting = [(file.src_uri, Path(file.abs_src_path)) for file in files.documentation_pages() if file.abs_src_path]
    while waiting:
        source, path = waiting.pop()
        for target in _links_outside(source, path.read_text(encoding="utf-8")):
            copy = f"{COPIES}/{target}"
            if (ROOT / target).is_file() and files.get_file_from_path(copy) is None:
                files.append(File.generated(config, copy, abs_src_path=str(ROOT / target)))
                if target.endswith(".md"):
                    waiting.append((copy, ROOT / target))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = page.file.src_uri

    def to_copy(match: re.Match[str]) -> str:
        target = _outside(source, match[2])
        if target is None:
            return match[0]
        return match[1] + posixpath.relpath(f"{COPIES}/{target}", posixpath.dirname(source) or ".") + match[3]

    return HELP.sub(lambda match: f"```text\n{help_of(match[1])}\n```", _outside_of_blocks(markdown, to_copy))


def help_of(command: str) -> str:
    """What `pstar COMMAND --help` prints, as wide as a page of the site."""
    os.environ["COLUMNS"] = WIDTH  # whatever the terminal has
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        pstar([*shlex.split(command), "--help"])
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).strip("\n")


def _links_outside(source: str, markdown: str) -> Iterator[str]:
    """Paths from the root of the repository that a page links to and that are not pages of docs/."""
    for match in LINK.finditer(re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)):
        target = _outside(source, match[2])
        if target is not None:
            yield target


def _outside(source: str, link: str) -> str | None:
    """From the root of the repository, if the link of the page `source` leaves docs/; None otherwise."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    folder = posixpath.dirname(source)
    copied = f"{folder}/".startswith(f"{COPIES}/")
    folder = folder.removeprefix(COPIES).lstrip("/") if copied else posixpath.join("docs", folder)
    target = posixpath.normpath(posixpath.join(folder, link))
    return None if target.startswith(("docs/", "../")) else target


def _outside_of_blocks(markdown: str, change: Callable[[re.Match[str]], str]) -> str:
    """The links of a page changed, but for those in blocks of code."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(change, part) for part in parts)
