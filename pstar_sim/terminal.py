"""Prose and tables of a terminal's width that never cut a number.

[Note: narrow terminals] A table too wide gets narrower in this order: heads fold at spaces; long texts fold at spaces,
the longest first; columns without room go to a second table below, which repeats the first column. Nothing is dropped,
no number is parted from its unit, and no figure or name is cut, so that it can be copied: a line may be longer than the
terminal.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

NO_TERMINAL = 120  # columns of a terminal of unknown width
LEAST = 24  # least columns; a narrower terminal counts as this wide
GAP = "  "
PROSE = 40  # a longer cell is a sentence, which folds into a column of COMFORTABLE
COMFORTABLE = 24
FIGURELESS = frozenset(("", "-", "?", "none", "equal", "nothing", "does not fit"))  # beside figures in a column
_UNIT = r"%|[kKMGT]?i?B(?:/s)?|[num]?s|[TG]FLOP(?:/s)?|days?|h"
_GLUED = re.compile(rf"(?<=<=) (?=\d)|(?<=±) (?=\d)|(?<=\d) (?=(?:{_UNIT})(?![A-Za-z]))")
_FIGURE = re.compile(r"(?:<= )?[-+±]?\s?\.?\d")


def terminal_width() -> int:
    """COLUMNS where it is set, else the terminal's, else 120."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked) > 0:
        return max(LEAST, int(asked))
    if not sys.stdout.isatty():
        return NO_TERMINAL
    return max(LEAST, shutil.get_terminal_size((NO_TERMINAL, 24)).columns)


def narrow_encoding(text: str, encoding: str | None) -> str:
    """Characters that the encoding lacks are replaced."""
    for character, plain in (("─", "-"), ("±", "+-")):
        text = text if _has(encoding, character) else text.replace(character, plain)
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _has(encoding: str | None, character: str) -> bool:
    try:
        character.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def wrap(text: str, width: int, *, indent: str = "", hanging: str = "  ") -> list[str]:
    """Within `width` where words allow it. A new line of the text begins one, with its leading spaces and `indent`."""
    lines: list[str] = []
    for line in text.split("\n"):
        own = indent + line[: len(line) - len(line.lstrip())]
        folded = textwrap.wrap(
            _GLUED.sub("\u00a0", line.strip()),
            width,
            initial_indent=own,
            subsequent_indent=own + hanging,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [part.replace("\u00a0", " ") for part in folded] or [""]
    return lines


@dataclass(frozen=True, slots=True)
class _TextColumn:
    """widest, natural, usual, least: characters unfolded; with a folded head; with texts folded comfortably; one word
    in a line."""

    head: str
    cells: tuple[str, ...]
    widest: int
    natural: int
    usual: int
    least: int
    figures: bool

    def folded(self, width: int) -> tuple[list[str], list[list[str]]]:
        return _fold(self.head, width), [_fold(cell, width) for cell in self.cells]


def table_text(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int,
    title: str = "",
    keys: int = 1,
    rule_before: int | None = None,
) -> str:
    """By [Note: narrow terminals], figures aligned right.

    keys: least first columns that a second table repeats.
    rule_before: row with a rule above, as above a sum.
    """
    columns = [_column(head.strip(), tuple(row[i] for row in rows)) for i, head in enumerate(heads)]
    lines = wrap(title, width) if title else []
    blocks = _blocks(columns, width, _keys(columns, rows, width, keys))
    for number, block in enumerate(blocks):
        if number:
            where = f" (all side by side on a terminal of {_taken(columns)} columns)" if number == 1 else ""
            lines += ["", *wrap(f"more of the same rows{where}:", width), ""]
        lines += _block(block, width, rule_before)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _column(head: str, cells: tuple[str, ...]) -> _TextColumn:
    words = max((len(word) for word in head.split()), default=0)
    natural = max([words, *map(len, cells)])
    least = max([words, *(len(word) for cell in cells for word in unbroken_words(cell))])
    usual = max(least, COMFORTABLE) if natural > PROSE else least
    some = [cell for cell in cells if cell not in FIGURELESS]
    figures = bool(some) and all(_FIGURE.match(cell) for cell in some)
    return _TextColumn(head, cells, max(len(head), natural), natural, usual, least, figures)


def unbroken_words(cell: str) -> list[str]:
    return [word.replace("\u00a0", " ") for word in _GLUED.sub("\u00a0", cell).split(" ")]


def _fold(cell: str, width: int) -> list[str]:
    lines, line = [], ""
    for word in unbroken_words(cell):
        joint = f"{line} {word}" if line else word
        if line and len(joint) > width:
            lines.append(line)
            joint = word
        line = joint
    return [*lines, line]


def _keys(columns: Sequence[_TextColumn], rows: Sequence[Sequence[str]], width: int, least: int) -> int:
    """Those that tell rows apart, in half of the width."""
    apart = (n for n in range(least, len(columns)) if len({tuple(row[:n]) for row in rows}) == len(rows))
    keys = next(apart, least)
    return keys if 2 * _taken(columns[:keys]) <= width else least


def _blocks(columns: Sequence[_TextColumn], width: int, keys: int) -> list[list[_TextColumn]]:
    if _taken(columns) <= width:
        return [list(columns)]
    first = list(columns[:keys])
    blocks = [list(first)]
    for column in columns[keys:]:
        if len(blocks[-1]) > keys and _taken([*blocks[-1], column]) > width:
            blocks.append(list(first))
        blocks[-1].append(column)
    return blocks


def _taken(columns: Sequence[_TextColumn]) -> int:
    return sum(column.usual for column in columns) + len(GAP) * (len(columns) - 1)


def _block(columns: Sequence[_TextColumn], width: int, rule_before: int | None) -> list[str]:
    widths = _widths(columns, width)
    folded = [column.folded(size) for column, size in zip(columns, widths)]
    # Folded heads are aligned at their last lines, folded cells at their first.
    tall = max((len(head) for head, _ in folded), default=0)
    lines = _row(columns, widths, [[""] * (tall - len(head)) + head for head, _ in folded])
    rule = "─" * (sum(widths) + len(GAP) * (len(widths) - 1))
    lines.append(rule)
    for number in range(len(columns[0].cells) if columns else 0):
        if number == rule_before:
            lines.append(rule)
        lines += _row(columns, widths, [cells[number] for _, cells in folded])
    return lines


def _widths(columns: Sequence[_TextColumn], width: int) -> list[int]:
    widths = [column.widest for column in columns]
    over = sum(widths) + len(GAP) * (len(widths) - 1) - width
    for limits in zip(*((column.natural, column.usual, column.least) for column in columns)):
        while over > 0:
            able = [i for i, limit in enumerate(limits) if widths[i] > limit]
            if not able:
                break
            widths[max(able, key=lambda i: widths[i])] -= 1
            over -= 1
    # No other column needs the room that a folded column leaves.
    for i, column in enumerate(columns):
        head, cells = column.folded(widths[i])
        widths[i] = max(len(line) for part in (head, *cells) for line in part)
    return widths


def _row(columns: Sequence[_TextColumn], widths: Sequence[int], parts: Sequence[Sequence[str]]) -> list[str]:
    return [
        GAP.join(
            text.rjust(size) if column.figures else text.ljust(size)
            for column, size, text in zip(columns, widths, line)
        )
        for line in zip_longest(*parts, fillvalue="")
    ]
