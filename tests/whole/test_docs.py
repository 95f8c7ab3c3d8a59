"""`make docs`: the site is built without a warning, its links lead somewhere, and it loads nothing from elsewhere."""

from __future__ import annotations

import contextlib
import importlib
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import executor
import pstar_sim
from pstar_sim.cli import main
from pstar_sim.policy.registry import built_in

ROOT = Path(__file__).resolve().parents[2]
LOADS = {
    "script": ("src",), "link": ("href",), "img": ("src", "srcset"), "iframe": ("src",), "source": ("src", "srcset"),
    "video": ("src",), "audio": ("src",), "object": ("data",), "embed": ("src",),
}  # fmt: skip
"""Element -> attributes that a browser loads without being asked."""


class Page(HTMLParser):
    """Every element's attributes, and every name that an anchor can lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.names = {attrs[key] for _, attrs in self.elements for key in ("id", "name") if key in attrs}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `mkdocs build --strict` makes it; any warning ends the build."""
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


@pytest.mark.whole
def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    far = re.compile(r"(?:https?:)?//")
    loaded = [
        f"{path.relative_to(site)}: {attrs[key]}"
        for path, page in pages.items()
        for tag, attrs in page.elements
        for key in LOADS.get(tag, ())
        if far.match(attrs.get(key, "")) and not (tag == "link" and attrs.get("rel") == "canonical")
    ]
    assert not loaded
    imported = re.compile(r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')]+)")
    assert not [found for path in site.rglob("*.css") for found in imported.findall(path.read_text(encoding="utf-8"))]


@pytest.mark.whole
def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    """Those of the finished pages, menus and copied files included; links to other sites are not looked at."""
    known = {path.resolve(): page for path, page in pages.items()}
    missing = []
    for path, page in known.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for tag, attrs in page.elements:
            link = urlsplit(attrs.get("href" if tag in ("a", "link") else "src", ""))
            if link.scheme or link.netloc or not (link.path or link.fragment):
                continue
            target = (path.parent / unquote(link.path)).resolve() if link.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(link.fragment)
            if not target.exists() or (anchor and anchor not in known[target].names):
                missing.append(f"{path.relative_to(site)}: {link.geturl()}")
    assert len(known) > 20 and not missing


@pytest.mark.whole
def test_the_search_works_without_a_server(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = ") and "tide" in index
    assert (site / "assets" / "iframe-worker.js").exists()


def named_in(package: ModuleType) -> list[str]:
    """Public names that the page of the reference asks for."""
    page = (ROOT / "docs" / "reference" / f"{package.__name__}.md").read_text(encoding="utf-8")
    return re.findall(rf"^(?: +heading:|:::) {re.escape(package.__name__)}\.(\w+)$", page, re.MULTILINE)


def test_every_public_name_has_its_place_in_the_reference() -> None:
    by_name = {executor: ["lightning", "axolotl"]}  # for packages of others: imported by name, not with executor
    for package in (pstar_sim, executor):
        assert sorted(named_in(package)) == sorted([*package.__all__, *by_name.get(package, [])])


@pytest.mark.whole
def test_every_command_and_every_public_name_has_an_anchor(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = Page(site / "reference" / "command-line.html")
    text = (site / "reference" / "command-line.html").read_text(encoding="utf-8")
    with contextlib.suppress(SystemExit):
        main(["--help"])
    listed = re.findall(r"^[ │]{1,4}([a-z][a-z-]+)(?:  +|$)", capsys.readouterr().out, re.MULTILINE)
    assert {"compare", "plan", "sensitivity", "policies"} <= {*listed}
    groups = {"plot": "plot-tide"}  # a command of commands
    assert not [name for name in listed if f"pstar-{groups.get(name, name)}" not in commands.names]
    assert "--gpu-memory" in text and "help: " not in text
    assert text.count("another GPU memory, such as 8GB") == 1 < text.count("shared: --machine ")
    for package in (pstar_sim, executor):
        assert len(Page(site / "reference" / f"{package.__name__}.html").names) > len(named_in(package))


@pytest.mark.whole
def test_commands_can_be_copied_and_pictures_have_a_dark_form(site: Path, pages: dict[Path, Page]) -> None:
    """A block that is copied has no prompt; a name is not broken."""
    shown = [attrs for page in pages.values() for tag, attrs in page.elements if tag == "img" and "class" in attrs]
    light, dark = ([a["src"] for a in shown if a["class"] == form] for form in ("on-light", "on-dark"))
    assert len(light) > 15 and dark == [src.replace("images/", "images/dark/") for src in light]
    text = (site / "how-to" / "plan-for-my-machine.html").read_text(encoding="utf-8")
    assert "$ pstar" not in text and '<span class="whole">max-batch</span>' in text


def test_the_pictures_show_the_plans_of_today(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """A digest in each says what it was drawn from; of every second one without --whole."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    pictures = importlib.import_module("draw_pictures")
    for folder in pictures.FOLDERS:  # for light pages and for dark ones
        drawn = {path.stem for path in folder.glob("*.png")}
        assert drawn == {*pictures.SHOWN} and drawn >= {*built_in()}
    old = [
        name for name, shown in [*pictures.SHOWN.items()][:: 1 if whole else 2]
        if {pictures.digest_in(folder / f"{name}.png") for folder in pictures.FOLDERS} != {pictures.digest(shown())}
    ]  # fmt: skip
    assert not old, "run .ci/refresh_readme.py"
