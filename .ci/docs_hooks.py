"""What `mkdocs build` does beside its plugins (mkdocs.yml names this file as a hook).

- A link from a page to a file of the repository outside docs/ works on a code host as it is written. In the site the
  file is copied to repository/, and the link leads there, so that it is checked like any other.
- A line `<!-- help: COMMAND -->` is replaced by what `pstar COMMAND --help` prints, but for flags that
  `<!-- shared flags -->` has explained: these are named.
- A terminal session becomes a block per command, so that it can be copied, and one per output.
- A picture of docs/images/ has a second form in docs/images/dark/, which is shown on dark pages.
- A name within a sentence, a table or a command is not broken.
- A line `<!-- catalog: TABLE -->` is replaced by every figure of that table (pstar_sim/report/catalog_page.py).
- A line `<!-- format: NAME -->` is replaced by the reference of that file format (pstar_sim/report/formats.py).
- A line `::: NAME` without options has those of its page: in the reference the name is the heading, on the page of a
  system the text of the module stands alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pstar_sim.cli import main as pstar
from pstar_sim.report.catalog_page import catalog_page
from pstar_sim.report.formats import format_page

ROOT = Path(__file__).resolve().parents[1]
COPIES = "repository"
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
HELP = re.compile(r"^<!-- help: ?(.*?) -->$", re.MULTILINE)
CATALOG = re.compile(r"^<!-- catalog: (\w+) -->$", re.MULTILINE)
FORMAT = re.compile(r"^<!-- format: (\w+) -->$", re.MULTILINE)
SHARED = "<!-- shared flags -->"
SHARED_OF = "compare"
SECTION = re.compile(r"^(workload|machine|setting)\b(.*):\n((?: .*\n?)+)", re.MULTILINE)
FLAG = re.compile(r"^  -.*\n?(?: {3,}.*\n?)*", re.MULTILINE)
SESSION = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
PICTURE = re.compile(r"<img ([^>]*)src=\"([^\"]*images/)(\w+\.png)\"([^>]*)>")
NAME = re.compile(r"(?<!<pre>)(?<!</span>)<code>([^<\n]+)</code>")
BASH = re.compile(r'<div class="language-bash highlight">.*?</div>', re.DOTALL)
LONGEST_NAME = 32  # characters; a longer one is broken on a phone
NAMED = re.compile(r"^::: (\S+)$(?!\n    options:)", re.MULTILINE)
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
    folder = posixpath.dirname(source) or "."

    def within_site(match: re.Match[str]) -> str:
        target = _target(source, match[2])
        if target is None or not (_is_copy(source) or _is_outside(target)):
            return match[0]
        uri = f"{COPIES}/{target}" if _is_outside(target) else target.removeprefix("docs/")
        return match[1] + posixpath.relpath(uri, folder) + match[3]

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    text = "".join(part if part.startswith("```") else LINK.sub(within_site, part) for part in parts)
    text = SESSION.sub(lambda match: COMMAND.sub(_copied, match[1]).strip(), text)
    text = NAMED.sub(lambda match: f"{match[0]}\n    options:\n{_options(source, match[1])}", text)
    text = FORMAT.sub(lambda match: format_page(match[1]), text)
    text = CATALOG.sub(lambda match: catalog_page(match[1]), text)
    shared = SECTION.findall(help_of(SHARED_OF)) if SHARED in text else []
    text = text.replace(SHARED, "\n\n".join(f"### {name}\n\n```text\n{flags}```" for name, _, flags in shared))
    known = {_words(flag) for _, _, flags in shared for flag in FLAG.findall(flags)}
    return HELP.sub(lambda match: f"```text\n{_without(known, help_of(match[1]))}\n```", text)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    forms = (("on-light", ""), ("on-dark", "dark/"))
    both = "".join(rf'<img class="{name}" loading="lazy" \1src="\2{folder}\3"\4>' for name, folder in forms)
    html = PICTURE.sub(both, html)
    html = BASH.sub(lambda match: re.sub(r"(?<=[>\n])[^<>\s]+(?=[<\n])", lambda name: _whole(name[0]), match[0]), html)
    return NAME.sub(lambda match: f"<code>{' '.join(map(_whole, match[1].split(' ')))}</code>", html)


def _whole(name: str) -> str:
    return name if len(name) > LONGEST_NAME else f'<span class="whole">{name}</span>'


def _copied(session: re.Match[str]) -> str:
    command, output = session.groups()
    return f"```bash\n{command}\n```\n\n```{{ .text .output }}\n{output.strip(chr(10))}\n```\n\n"


def _words(flag: str) -> str:
    return " ".join(flag.replace("[required]", "").split())


def _without(known: set[str], text: str) -> str:
    """The help of a command, where flags with a known explanation stand by their names alone."""

    def section(match: re.Match[str]) -> str:
        flags = FLAG.findall(match[3])
        again = [flag for flag in flags if _words(flag) in known]
        names = f"  shared: {' '.join(flag.split()[0] for flag in again)}" if again else ""
        lines = textwrap.wrap(names, int(WIDTH), subsequent_indent=" " * 10, break_on_hyphens=False)
        others = "".join(flag for flag in flags if flag not in again)
        return "\n".join([f"{match[1]}{match[2]}:", *lines, others])

    return SECTION.sub(section, text)


def _options(source: str, name: str) -> str:
    if source.startswith("explanation/systems/"):
        options = {"members": "false", "show_root_heading": "false", "show_root_toc_entry": "false"}
    else:
        options = {"heading": name, "toc_label": name.rpartition(".")[2]}
    return "".join(f"      {key}: {value}\n" for key, value in options.items())


def help_of(command: str) -> str:
    """What `pstar COMMAND --help` prints, as wide as a page of the site."""
    os.environ["COLUMNS"] = WIDTH  # whatever the terminal has
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        pstar([*shlex.split(command), "--help"])
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).strip("\n")


def _links_outside(source: str, markdown: str) -> Iterator[str]:
    """Paths from the root of the repository that a page links to and that are not in docs/."""
    for match in LINK.finditer(re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)):
        target = _target(source, match[2])
        if target is not None and _is_outside(target):
            yield target


def _target(source: str, link: str) -> str | None:
    """Where a link of the page `source` leads, from the root of the repository; None if it leads to another site."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    path = source.removeprefix(f"{COPIES}/") if _is_copy(source) else f"docs/{source}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _is_copy(source: str) -> bool:
    return source.startswith(f"{COPIES}/")


def _is_outside(target: str) -> bool:
    return not target.startswith("docs/")
