"""A headless Chromium for tests of pages, without a network. It records the logs and the requests of pages."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
)  # fmt: skip


@dataclass
class Browser:
    """A browser that records the logs and the requests of its pages."""

    context: Any
    log: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def open(self, address: str, *, width: int = 1280, dark: bool = False) -> Any:
        page = self.context.new_page()
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme="dark" if dark else "light")
        page.on("console", lambda message: self.log.append(message.text))
        page.on("pageerror", lambda error: self.log.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(address)
        return page


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yields a browser. Skips the test where there is no Chromium or no playwright."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no Chromium to open pages in (Debian: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started, tempfile.TemporaryDirectory() as profile:
        context = started.chromium.launch_persistent_context(
            profile, executable_path=path, headless=True, args=list(FLAGS), offline=True, timeout=120_000
        )
        context.set_default_timeout(120_000)
        try:
            yield Browser(context)
        finally:
            context.close()
