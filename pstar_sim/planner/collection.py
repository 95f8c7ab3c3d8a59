"""Collection: makes an answer of several rows usable as a collection of these rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["Collection"]


class Collection:
    """Gives an answer `for row in answer`, `len(answer)`, and `in` for a row or its name (policy, machine or part)."""

    _name = "policy"  # the field that names a row

    def _rows(self) -> tuple[Any, ...]:
        rows: tuple[Any, ...] = self.rows  # type: ignore[attr-defined]
        return rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows())

    def __reversed__(self) -> Iterator[Any]:
        return iter(self._rows()[::-1])

    def __len__(self) -> int:
        return len(self._rows())

    def __contains__(self, item: object) -> bool:
        return any(row is item or row == item or getattr(row, self._name, None) == item for row in self._rows())
