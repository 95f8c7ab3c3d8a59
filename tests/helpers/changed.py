"""Changes of a file's values, for tests that damage one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["put"]


def put(*where: str | int, value: object) -> Callable[[Any], None]:
    """Returns a function that puts `value` into nested dictionaries and lists, at the path `where`."""

    def change(values: Any) -> None:
        for name in where[:-1]:
            values = values[name]
        values[where[-1]] = value

    return change
