"""What Python 3.10 lacks: StrEnum, a TOML reader, notes on errors, Unpack."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["StrEnum", "TOMLDecodeError", "Unpack", "add_note", "toml_loads"]

if sys.version_info >= (3, 11):
    from enum import StrEnum
    from typing import Unpack

    from tomllib import TOMLDecodeError
    from tomllib import loads as toml_loads

    def add_note(error: BaseException, note: str) -> None:
        error.add_note(note)

else:
    from collections.abc import Callable
    from enum import Enum

    import tomli
    from typing_extensions import Unpack

    class StrEnum(str, Enum):
        """Members are their text, also when printed or formatted."""

        __str__ = str.__str__
        __format__ = str.__format__

    TOMLDecodeError: type[ValueError] = tomli.TOMLDecodeError
    toml_loads: Callable[[str], dict[str, Any]] = tomli.loads

    def add_note(error: BaseException, note: str) -> None:
        """As Python 3.11, though 3.10's tracebacks do not print it."""
        notes: list[str] = getattr(error, "__notes__", [])
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]
