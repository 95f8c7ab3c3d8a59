"""TOML and JSON files as plain values, with their version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pstar_sim.errors import CatalogError, PstarError
from pstar_sim.python310 import TOMLDecodeError, toml_loads
from pstar_sim.schema.reading import REFUSED, Fault


def parse_toml(file: str, text: str) -> dict[str, object]:
    """Raises CatalogError for a text that is not TOML."""
    try:
        return toml_loads(text)
    except TOMLDecodeError as error:
        raise CatalogError(f"{file}: not a TOML file: {error}") from None
    except RecursionError:
        raise CatalogError(f"{file}: its lists or tables are nested too deeply") from None
    except ValueError as error:  # Python refuses a number with thousands of digits
        raise CatalogError(f"{file}: a number has too many digits: {error}") from None


def read_toml(path: Path, what: str, version: int) -> dict[str, object]:
    """Without the optional `version`. Raises CatalogError for a file that is unreadable, no TOML, or newer.

    version: newest readable.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CatalogError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise CatalogError(f"{path}: cannot be read: {error.strerror}") from None
    content = parse_toml(str(path), text)
    if not isinstance(content.get("version"), dict):
        _check_version(content.pop("version", 1), what, version, CatalogError, f"{path}: ")
    return content


def parse_json(text: str) -> object:
    """Raises Fault, naming the place."""
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        raise _not_json(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise _not_json("its lists or objects are nested too deeply") from None
    except ValueError as error:  # Python refuses a number with thousands of digits
        raise _not_json(f"a number has too many digits: {error}") from None


def _not_json(why: str) -> Fault:
    return Fault((), REFUSED, why)


def _no_constant(name: str) -> object:
    raise _not_json(f"{name} is not a number this file may contain")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _not_json(f"field {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return values


def without_head(values: object, *, what: str, format: str, version: int, error: type[PstarError]) -> dict[str, Any]:
    """A JSON object without `format` and `version`. Raises `error` for others."""
    if not isinstance(values, dict) or values.get("format") != format:
        raise error(f"is not {what} (field 'format' is not {format!r})")
    _check_version(values.get("version"), format.removeprefix("pstar-sim "), version, error)
    return {name: value for name, value in values.items() if name not in ("format", "version")}


def _check_version(found: object, what: str, version: int, error: type[PstarError], place: str = "") -> None:
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise error(f"{place}field 'version' is {found!r}, not a version number")
    if found != version:
        which, do = ("a newer", "") if found > version else ("an earlier", f"; make the {what} again")
        raise error(f"{place}was written by {which} pstar-sim ({what} version {found}; this one reads {version}){do}")
