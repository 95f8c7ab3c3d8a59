"""Values of flags: parsers of texts, and completion of names for shells. An error names the value and what would do;
`usage.run_app` adds the flag."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar, get_args

import typer

from pstar_sim.errors import PstarError
from pstar_sim.files import check_writable

__all__ = [
    "count",
    "did_you_mean",
    "duration_s",
    "factor",
    "learning_rate",
    "loading",
    "machine_names",
    "model_names",
    "natural",
    "new_file",
    "new_page",
    "one_of",
    "policy_names",
    "port",
    "positive",
    "share",
]

T = TypeVar("T")


def _value(parse: Callable[[str], T]) -> Callable[[Any], T]:
    """Returns a parser that leaves defaults alone: typer hands a default, which is a value already, to the parser
    too."""

    @functools.wraps(parse)
    def parse_text(given: Any) -> T:
        return parse(given) if isinstance(given, str) else given

    return parse_text


@_value
def positive(text: str) -> int:
    value = _whole(text, least=1)
    if value < 1:
        raise typer.BadParameter(f"must be at least 1, not {value}")
    return value


@_value
def natural(text: str) -> int:
    return _whole(text, least=0)


def _whole(text: str, *, least: int) -> int:
    digits = text.removeprefix("-")
    if digits != text and digits.isascii() and digits.isdigit():
        raise typer.BadParameter(f"must be at least {least}, not {text}")
    if not (text.isascii() and text.isdigit()):
        raise typer.BadParameter(f"must be a whole number, not {text!r}")
    if len(text) > 9:
        raise typer.BadParameter(f"must be less than a billion, not {text}")
    return int(text)


@_value
def port(text: str) -> int:
    value = _whole(text, least=1)
    if not 1 <= value <= 65535:
        raise typer.BadParameter(f"must be a port from 1 to 65535, not {value}")
    return value


@_value
def learning_rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number; write a number such as 3e-4") from None
    if not 0 <= value < float("inf"):
        raise typer.BadParameter(f"must be at least 0 and finite, not {text}; write a rate such as 3e-4")
    return value


@_value
def new_file(text: str) -> str:
    """Returns the name of a file that can be written. The writing is tried before any work is done for the file."""
    try:
        check_writable(Path(text))
    except PstarError as error:
        raise typer.BadParameter(str(error)) from None
    return text


@_value
def new_page(text: str) -> str:
    """Returns the name of a web page that can be written."""
    path = Path(text)
    if path.suffix.lower() not in (".html", ".htm") and not path.is_dir():
        raise typer.BadParameter(f"{text} is a web page; give it a name that ends in .html, such as {path.stem}.html")
    return str(new_file(text))


@_value
def count(text: str) -> float:
    """Returns the number of "300e9", "3.5B" or "2T"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([kMBGT]?)", text)
    value = 0.0
    if match is not None:
        value = float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}[match[2]]
    if not 1 <= value <= 1e18:
        raise typer.BadParameter(f"must be a positive number such as 300e9 or 3B, not {text!r}")
    return value


_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


@_value
def duration_s(text: str) -> float:
    """Returns the seconds of "14d" or "36h"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*(s|min|m|h|d|w)", text)
    if match is None or float(match[1]) <= 0:
        raise typer.BadParameter(f"must be a positive time such as 14d, 36h or 2w, not {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


@_value
def share(text: str) -> float:
    """Returns the share of "10%" or "0.1"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*(%?)", text)
    value = 0.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 < value <= 10:
        raise typer.BadParameter(f"must be a share above 0 and up to 10, such as 10% or 0.5, not {text!r}")
    return value


@_value
def loading(text: str) -> str:
    """Returns the text of a `Loading`."""
    from pstar_sim.workload.loading import loading_of

    try:
        return str(loading_of(text))
    except PstarError as error:
        raise typer.BadParameter(str(error)) from None


@_value
def factor(text: str) -> float:
    """Returns the number of "4" or "0.25"."""
    match = re.fullmatch(r"[0-9]+(?:\.[0-9]*)?(?:e-?[0-9]+)?", text)
    value = 0.0 if match is None else float(text)
    if not 1e-9 <= value <= 1e9:
        raise typer.BadParameter(f"must be a number above 0 such as 4 or 0.5, not {text!r}")
    return value


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Returns a hint with the known names that begin with `name`, or else resemble it; "" if there are none."""
    begin = [one for one in known if len(name) > 2 and one.startswith(name)]
    near = begin or difflib.get_close_matches(name, list(known), n=3, cutoff=0.65)
    return f"; did you mean {', '.join(near)}?" if near else ""


def one_of(choices: Any) -> Callable[[Any], str]:
    """Returns a parser that accepts the texts of a Literal."""
    names = get_args(choices)

    def parse(text: str) -> str:
        if text not in names:
            raise typer.BadParameter(
                f"invalid choice: {text!r} (choose from {', '.join(names)}){did_you_mean(text, names)}"
            )
        return text

    return _value(parse)


def machine_names(incomplete: str) -> list[str]:
    from pstar_sim.catalog.catalog import load_catalog

    return [*load_catalog().machines, "here"]


def model_names(incomplete: str) -> list[str]:
    from pstar_sim.catalog import model_shapes

    return list(model_shapes.model_names())


def policy_names(incomplete: str) -> list[str]:
    from pstar_sim.policy.registry import policies

    return list(policies())
