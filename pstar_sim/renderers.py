"""Renderers: an answer is shown as text, HTML or a picture by the renderer registered for it, which is looked up when
it is shown.

A plan's form "proof" is what the checker finds: a plan can check itself and does not know its checker.

An answer knows the name of a form, not its renderer. Renderers are registered at the package's front door
(`pstar_sim/__init__.py`), which every import of a module of the package passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["register", "render", "render_html", "render_text"]

Renderer = Callable[..., Any]
"""Takes the answer, then what the form has as options."""

_FINDERS: dict[tuple[str, str], Callable[[], Renderer]] = {}


def register(answer: str, form: str, find: Callable[[], Renderer]) -> None:
    """Register a renderer. answer: name of the class of answers. find: gives the renderer, called when an answer is
    shown."""
    _FINDERS[answer, form] = find


def render(answer: object, form: str, **options: Any) -> Any:
    """Returns the answer in that form."""
    kinds = (kind.__name__ for kind in type(answer).__mro__)
    find = next((_FINDERS[kind, form] for kind in kinds if (kind, form) in _FINDERS), None)
    assert find is not None, f"nobody registered for {form} of {type(answer).__name__}"
    return find()(answer, **options)


def render_text(answer: object) -> str:
    text: str = render(answer, "text")
    return text


def render_html(answer: object) -> str:
    html: str = render(answer, "html")
    return html
