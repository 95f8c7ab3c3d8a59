"""Machines, models and policies, by name and as a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from pstar_sim.catalog.listing_rows import list_machines, list_models
from pstar_sim.policy.kit.options import options_of, show
from pstar_sim.policy.registry import policies as all_policies
from pstar_sim.terminal import table_text, terminal_width

if TYPE_CHECKING:
    import pandas


class Listing(Sequence[str]):
    """Names that print as a table.

    rows: column -> figure per name, the first column.
    """

    def __init__(self, rows: Sequence[Mapping[str, object]], *, hidden: str = "") -> None:
        self.rows = tuple(rows)
        self._hidden = hidden  # a column for programs only
        self._names = tuple(str(next(iter(row.values()))) for row in self.rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self._names[index]

    def __len__(self) -> int:
        return len(self._names)

    def to_json(self) -> list[dict[str, object]]:
        return [dict(row) for row in self.rows]

    def to_frame(self) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(self.to_json())

    def __repr__(self) -> str:
        columns = [name for name in (self.rows[0] if self.rows else ()) if name != self._hidden]
        texts = [["" if row[c] is None else str(row[c]) for c in columns] for row in self.rows]
        return table_text(columns, texts, width=terminal_width())


def machines(user_file: str | Path | None = None) -> Listing:
    """Returns the machines of the catalog, with the names that `ps.machine` takes.

    user_file: a machine file that extends or overrides the catalog.
    """
    return Listing(list_machines(user_file))


def models() -> Listing:
    """Returns the models of the catalog, with the names that `ps.preset` takes."""
    return Listing(list_models())


def policies() -> Listing:
    """Returns all policies, with the names that `ps.compare` takes; each row has the policy's options."""
    rows: list[dict[str, object]] = []
    for name, policy in all_policies().items():
        said = (policy.__doc__ or "").strip()
        module = getattr(sys.modules.get(policy.__module__), "__doc__", None) or ""
        own = module if module.startswith(f"{name}:") else said
        what = " ".join(own.split("\n\n")[0].removeprefix(f"{name}:").split())
        options = [
            {"option": key, "values": option.allowed, "default": show(option.default), "what": option.help}
            for key, option in options_of(policy).items()
        ]
        rows.append({"policy": name, "what": what, "options": options})
    return Listing(rows, hidden="options")
