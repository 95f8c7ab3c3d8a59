"""Functions that show an answer as text, HTML or a picture, looked up when it is shown; `pstar_sim/__init__.py`, which
every import passes, registers them.

A plan's "proof" is the checker's report: it checks itself without knowing its checker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Renderer = Callable[..., Any]
"""Takes the answer, then the options of the form."""

_FINDERS: dict[tuple[str, str], Callable[[], Renderer]] = {}


def register(answer: str, form: str, find: Callable[[], Renderer]) -> None:
    """answer: a class's name.
    find: called when it is shown.
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
