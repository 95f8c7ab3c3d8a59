"""`pstar validate`: predicted against published."""

from __future__ import annotations

import argparse
import sys

from pstar_sim.cli.planning import say, say_json
from pstar_sim.errors import PstarError

__all__ = ["validate"]


def validate(args: argparse.Namespace) -> int:
    from pstar_sim.validation import errors, results

    if args.write and (args.system or args.machine):
        raise PstarError("--write keeps the errors of all rows: leave out --system and --machine")
    found = results.validate(system=args.system, machine=args.machine, progress=_progress)
    if args.write:
        errors.write_errors(found)
    if args.json:
        say_json(found.to_json())
    else:
        from pstar_sim.report.validation import validation_text

        say(validation_text(found, every_row=args.rows))
    return 0


def _progress(done: int, runs: int) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        end = "\r" if done < runs else "\r\033[K"
        sys.stderr.write(f"replaying published runs: {done} of {runs}{end}")
        sys.stderr.flush()
