"""The one way to write text, a table, JSON, a note on stderr, a picture."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pstar_sim.cli.exit_status import NO
from pstar_sim.errors import PstarError
from pstar_sim.terminal import narrow_encoding, table_text, terminal_width, wrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pstar_sim.cli.flags import PictureFlags
    from pstar_sim.core.plan import Plan
    from pstar_sim.core.timeline import Timeline
    from pstar_sim.report.paper import Look


def say(text: str) -> None:
    """Already laid out."""
    sys.stdout.write(narrow_encoding(text if text.endswith("\n") else text + "\n", sys.stdout.encoding))


def tell(text: str) -> None:
    """Prose, folded to the terminal."""
    say("\n".join(wrap(text, terminal_width())))


def say_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """By [Note: narrow terminals] in terminal.py."""
    say(table_text(heads, rows, width=terminal_width()))


@dataclass(frozen=True, kw_only=True)
class Header:
    """A JSON answer's beginning, after command and version.

    verdict: "yes" or "no", None where there is none.
    reason: of the verdict, in words.
    advice: flags, smallest change first.
    """

    model: str | None = None
    machine: str | None = None
    verdict: str | None = None
    reason: str = ""
    advice: Sequence[str] = ()
    notes: Sequence[str] = ()


def say_answer(header: Header, **answer: object) -> None:
    """JSON without NaN and Infinity: command, version, header, then the answer."""
    from pstar_sim.cli.usage import words_typed

    _say_object(words_typed(), header, answer)


def say_error(words: Sequence[str], reason: str, status: int) -> None:
    """JSON of a command that ends with an error, if `words` ask for it. verdict: "no", or None for no answer.

    words: as typed, the program first.
    """
    if "--json" in words:
        _say_object(words, Header(verdict="no" if status == NO else None, reason=reason), {"exit_status": status})


def _say_object(words: Sequence[str], header: Header, answer: Mapping[str, object]) -> None:
    from pstar_sim.version import __version__

    asked = {"command": " ".join((*words[:1], *map(shlex.quote, words[1:]))), "version": __version__}
    said = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(header).items()}
    say(json.dumps({**asked, **said, **answer}, indent=2, allow_nan=False))


def yes_or_no(answer: bool) -> str:
    return "yes" if answer else "no"


def note(text: str) -> None:
    """One line on stderr, beside the answer on stdout."""
    sys.stderr.write(f"pstar: {text}\n")


def check_apart(read: Sequence[str], written: Sequence[str]) -> None:
    """Refuse a file written twice, or also read."""
    used = {Path(path).resolve() for path in read}
    for path in written:
        if Path(path).resolve() in used:
            raise PstarError(f"{path}: is a file that this command reads or writes already; give another name")
        used.add(Path(path).resolve())


def save_picture(figure: Figure, path: Path, *, dpi: int) -> None:
    """Writes atomically; the ending of the file is the kind of picture, PNG without one. Letters are TrueType (Type
    42), as publishers ask; the same picture has the same bytes.

    Raises PstarError for an unknown ending, or what cannot be written.
    """
    from matplotlib import rc_context

    from pstar_sim.files import replaced_atomically

    kind = picture_kind(path)
    dated = {"svg": "Date", "pdf": "CreationDate"}
    metadata = {dated[kind]: None} if kind in dated else None
    with replaced_atomically(path) as temporary:
        try:
            with rc_context({"pdf.fonttype": 42, "ps.fonttype": 42, "svg.hashsalt": "pstar-sim"}):
                figure.savefig(temporary, dpi=dpi, format=kind, metadata=metadata)
        except OSError:
            raise
        except Exception as error:  # a backend may raise anything, such as RuntimeError for LaTeX that is not installed
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise PstarError(
                f"{path}: matplotlib cannot write a picture of kind {kind!r} here: {why}; name a file that ends in "
                ".png, .svg or .pdf"
            ) from error


def check_looks(path: str, picture: PictureFlags, read: Sequence[str] = ()) -> None:
    """Refuse an impossible file or style before planning.

    read: the command's inputs.
    """
    from pstar_sim.report.paper import styled

    check_apart(read, [path, *([picture.data] if picture.data else [])])
    picture_kind(Path(path))
    with styled(picture.style):
        pass


def draw(figure: Callable[[Look], Figure], path: str, picture: PictureFlags) -> None:
    from pstar_sim.report.paper import styled

    with styled(picture.style):
        save_picture(figure(picture.look), Path(path), dpi=picture.dpi)


def write_table(path: str, text: str) -> None:
    from pstar_sim.files import write_atomically

    write_atomically(Path(path), text)
    tell(f"{path}: {text.count(chr(10)) - 1} rows")


def picture_kind(path: Path) -> str:
    """Raises PstarError for an ending that matplotlib does not know."""
    from matplotlib.backend_bases import FigureCanvasBase

    kind = path.suffix.removeprefix(".") or "png"
    known = FigureCanvasBase.get_supported_filetypes()
    if kind.lower() not in known:
        raise PstarError(f"{path}: {kind!r} is not a kind of picture; it is one of {', '.join(sorted(known))}")
    return kind.lower()


def save_perfetto(timelines: Sequence[Timeline], plan: Plan, path: Path) -> None:
    """For ui.perfetto.dev, atomically."""
    from pstar_sim.files import write_atomically
    from pstar_sim.report.perfetto import to_perfetto

    text = json.dumps(to_perfetto(timelines, plan), allow_nan=False, separators=(",", ":"))
    write_atomically(path, text + "\n")
