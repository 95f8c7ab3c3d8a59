"""Parsers of flags' texts, and completion of names. An error names value and remedy, `usage.run_app` the flag."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import typer

from pstar_sim.errors import PstarError
from pstar_sim.files import check_writable
from pstar_sim.quantities import FACTOR, LENGTH, NUMBER, TIME, Quantity
from pstar_sim.words import meant

LENGTH_UNIT = re.compile("[a-z]+$")


def positive(text: str) -> int:
    value = _whole(text, least=1)
    if value < 1:
        raise typer.BadParameter(f"must be at least 1, not {value}")
    return value


@dataclass(frozen=True)
class Counts:
    """Numbers to try, each once."""

    values: tuple[int, ...]


def counts(text: str) -> Counts:
    """Reads "4" or "1,2,4"."""
    return Counts(tuple(dict.fromkeys(_whole(part.strip(), least=1) for part in text.split(","))))


def natural(text: str) -> int:
    return _whole(text, least=0)


def tokens(text: str) -> int:
    """Reads "4096", or "16k" and "1M" as people count: 16 * 1,024 and 1,024 * 1,024 tokens."""
    factor = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
    value = _whole(text if factor == 1 else text[:-1], least=1) * factor
    if not 1 <= value < 10**9:
        raise typer.BadParameter(f"must be at least 1 and less than a billion, not {text}")
    return value


def _whole(text: str, *, least: int) -> int:
    digits = text.removeprefix("-")
    if digits != text and digits.isascii() and digits.isdigit():
        raise typer.BadParameter(f"must be at least {least}, not {text}")
    if not (text.isascii() and text.isdigit()):
        raise typer.BadParameter(f"must be a whole number, not {text!r}")
    if len(text) > 9:
        raise typer.BadParameter(f"must be less than a billion, not {text}")
    return int(text)


def port(text: str) -> int:
    value = _whole(text, least=1)
    if not 1 <= value <= 65535:
        raise typer.BadParameter(f"must be a port from 1 to 65535, not {value}")
    return value


def learning_rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number; write a number such as 3e-4") from None
    if not 0 <= value < float("inf"):
        raise typer.BadParameter(f"must be at least 0 and finite, not {text}; write a rate such as 3e-4")
    return value


def new_file(text: str) -> str:
    """Writing is tried before any work is done for the file."""
    try:
        check_writable(Path(text))
    except PstarError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def new_csv(text: str) -> str:
    if Path(text).suffix.lower() != ".csv":
        raise typer.BadParameter(f"{text}: give a table a name that ends in .csv")
    return str(new_file(text))


class Inches(NamedTuple):
    width: float
    height: float | None


def size_inches(text: str) -> Inches:
    """Reads "3.3", "3.3x2.5", "85mm" or "8.5x6cm", with one unit for both."""
    width, by, height = text.lower().partition("x")
    unit = LENGTH_UNIT.search(height or width)
    both = [width, *([height] if by else [])]
    sizes = [_number(LENGTH, side if side[-1:].isalpha() or unit is None else side + unit[0]) for side in both]
    for size in sizes:
        _within(size, text, 1.0, 40.0, "a width, or a width and a height, such as 3.3, 3.3x2.5 or 85x60mm")
    return Inches(sizes[0], sizes[1] if by else None)


def new_page(text: str) -> str:
    path = Path(text)
    if path.suffix.lower() not in (".html", ".htm") and not path.is_dir():
        raise typer.BadParameter(f"{text} is a web page; give it a name that ends in .html, such as {path.stem}.html")
    return str(new_file(text))


def _number(quantity: Quantity, text: str) -> float:
    try:
        return quantity.parse(text)
    except ValueError:
        return -1.0


def _within(value: float, text: str, least: float, most: float, want: str) -> float:
    if not least <= value <= most:
        raise typer.BadParameter(f"must be {want}, not {text!r}")
    return value


def count(text: str) -> float:
    """Reads "300e9", "3.5B" or "2T"."""
    return _within(_number(NUMBER, text), text, 1, 1e18, "a positive number such as 300e9 or 3B")


def duration_s(text: str) -> float:
    """Reads "14d" or "36h"."""
    return _within(_number(TIME, text), text, 1e-9, 1e18, "a positive time such as 14d, 36h or 2w")


def share(text: str) -> float:
    """Reads "10%" or "0.1"."""
    value = _number(FACTOR, text.removesuffix("%").rstrip()) / (100 if text.endswith("%") else 1)
    return _within(value, text, 1e-9, 10, "a share above 0 and up to 10, such as 10% or 0.5")


def loading(text: str) -> str:
    from pstar_sim.workload.loading import loading_of

    try:
        return str(loading_of(text))
    except PstarError as error:
        raise typer.BadParameter(str(error)) from None


def factor(text: str) -> float:
    """Reads "4" or "0.25"."""
    return _within(_number(FACTOR, text), text, 1e-9, 1e9, "a number above 0 such as 4 or 0.5")


def policy(text: str) -> str:
    """Reads names that users of other frameworks know."""
    from pstar_sim.policy.registry import own_words

    return own_words(text)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """What it means elsewhere, or known names that begin with it, else resemble it."""
    if sentence := meant(name):
        return f"; {sentence}"
    begin = [one for one in known if len(name) > 2 and one.startswith(name)]
    near = begin or difflib.get_close_matches(name, list(known), n=3, cutoff=0.65)
    return f"; did you mean {', '.join(near)}?" if near else ""


def one_of(choices: Any, words: Mapping[str, str] | None = None) -> Callable[[Any], str]:
    """Of a Literal, or other words for these."""
    names = get_args(choices)

    def parse(text: str) -> str:
        text = (words or {}).get(text.lower(), text)
        if text not in names:
            hint = did_you_mean(text, names)
            raise typer.BadParameter(f"invalid choice: {text!r} (choose from {', '.join(names)}){hint}")
        return text

    return parse


def ways_of_loading(incomplete: str) -> list[str]:
    from pstar_sim.workload.loading import LOADING

    return [way for way in LOADING if way.startswith(incomplete)]


def machine_names(incomplete: str) -> list[str]:
    from pstar_sim.catalog.catalog import load_catalog

    return [*load_catalog().machines, "here"]


def model_names(incomplete: str) -> list[str]:
    from pstar_sim.catalog import model_shapes

    return list(model_shapes.model_names())


def policy_names(incomplete: str) -> list[str]:
    from pstar_sim.policy.registry import policies

    return list(policies())
