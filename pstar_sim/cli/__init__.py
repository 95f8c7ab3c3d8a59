"""`pstar ...`, which alone joins pstar_sim and executor (imported when needed).

A user's mistake is one line on stderr and status 2, "it does not fit" an answer with status 3, Ctrl-C one line on
stderr and status 130. JSON is the only output on stdout, an object for an error too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pstar_sim.errors import CatalogError, PstarError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status (`exit_status.HELP`)."""
    from pstar_sim.cli.exit_status import INTERRUPTED, MISTAKE, status_of

    _open_streams()
    status, words = 0, list(sys.argv[1:] if argv is None else argv)
    try:
        from pstar_sim.cli.typer_app import app
        from pstar_sim.cli.usage import run_app

        if "_PSTAR_COMPLETE" in os.environ:  # a shell asks for completions
            app(prog_name="pstar")
        status = run_app(app, "pstar", words)
        sys.stdout.flush()
    except PstarError as error:
        return _complain(words, str(error), status_of(error), lines=isinstance(error, CatalogError))
    except KeyboardInterrupt as stop:
        return _complain(words, " ".join(("interrupted", *map(str, stop.args))), INTERRUPTED)
    except BrokenPipeError:  # the reader of the pipe has ended, as in `pstar ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _complain(words, f"{name}{error.strerror or error}", MISTAKE)
    return status


def _open_streams() -> None:
    """A stream closed before Python started is None (`pstar ... >&-`): its text is dropped, files are written."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (open to the end)


def _complain(words: Sequence[str], text: str, status: int, *, lines: bool = False) -> int:
    """lines: an error per line."""
    from pstar_sim.cli.output import say_error

    errors = [" ".join(line.split()) for line in (text.splitlines() if lines else [text])]
    sys.stderr.write("".join(f"pstar: {error}\n" for error in errors))
    say_error(("pstar", *words), "; ".join(errors), status)
    return status
