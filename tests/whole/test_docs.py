"""`make docs`: the site is built without a warning, its links lead somewhere, and it loads nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

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


def pages(site: Path) -> Iterator[tuple[Path, Page]]:
    for path in sorted(site.rglob("*.html")):
        yield path, Page(path)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    far = re.compile(r"(?:https?:)?//")
    loaded = [
        f"{path.relative_to(site)}: {attrs[key]}"
        for path, page in pages(site)
        for tag, attrs in page.elements
        for key in LOADS.get(tag, ())
        if far.match(attrs.get(key, "")) and not (tag == "link" and attrs.get("rel") == "canonical")
    ]
    assert not loaded
    imported = re.compile(r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')]+)")
    assert not [found for path in site.rglob("*.css") for found in imported.findall(path.read_text(encoding="utf-8"))]


def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path) -> None:
    """Those of the finished pages, menus and copied files included; links to other sites are not looked at."""
    known = {path.resolve(): page for path, page in pages(site)}
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


def test_the_search_works_without_a_server(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = ") and "tide" in index
    assert (site / "assets" / "iframe-worker.js").exists()
