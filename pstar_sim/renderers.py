"""Renderers: functions that show an answer as text, HTML or a picture. The renderer registered for an answer is looked
up when the answer is shown.

The form "proof" of a plan is the checker's report: a plan can check itself without knowing its checker.

`pstar_sim/__init__.py`, which every import of a module of the package passes, registers the renderers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["register", "render", "render_html", "render_text"]

Renderer = Callable[..., Any]
"""Takes the answer, then the options of the form."""

_FINDERS: dict[tuple[str, str], Callable[[], Renderer]] = {}


def register(answer: str, form: str, find: Callable[[], Renderer]) -> None:
    """answer: name of the class.
    find: called when an answer is shown.
    """
    _FINDERS[answer, form] = find


def render(answer: object, form: str, **options: Any) -> Any:
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
