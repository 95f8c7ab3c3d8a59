from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pstar_sim.renderers import render_text

if TYPE_CHECKING:
    import pandas


class Collection:
    """An answer as rows: iteration, length, `in` for a row or its name (policy, machine or part), a table as text and
    as a frame."""

    _name = "policy"  # the field that names a row

    def _rows(self) -> tuple[Any, ...]:
        rows: tuple[Any, ...] = self.rows  # type: ignore[attr-defined]
        return rows

    def to_json(self) -> Any:
        raise NotImplementedError

    def to_frame(self) -> pandas.DataFrame:
        """The rows of `to_json`."""
        import pandas

        return pandas.DataFrame(self.to_json())

    def __repr__(self) -> str:
        return render_text(self)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows())

    def __reversed__(self) -> Iterator[Any]:
        return iter(self._rows()[::-1])

    def __len__(self) -> int:
        return len(self._rows())

    def __contains__(self, item: object) -> bool:
        return any(row is item or row == item or getattr(row, self._name, None) == item for row in self._rows())
