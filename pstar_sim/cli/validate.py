"""`pstar validate`: compares predicted with published figures."""

from __future__ import annotations

from typing import Annotated

import typer

from pstar_sim.cli.bars import bar
from pstar_sim.cli.declare import command
from pstar_sim.cli.flags import JsonObject
from pstar_sim.cli.output import Header, say, say_answer
from pstar_sim.errors import PstarError

commands = typer.Typer()


@command(commands, "pstar validate --machine h100")
def validate(
    *,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="only systems whose name contains this")] = None,
    machine: Annotated[str | None, typer.Option(metavar="TEXT", help="only machines whose name contains this")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="print every row in scope")] = False,
    json: JsonObject = False,
    write: Annotated[
        bool,
        typer.Option("--write", help="keep the errors by class of machine, for the answers that quote them"),
    ] = False,
) -> int:
    """Replay published measurements and print predicted against published: what was fitted, what was tested, every
    miss."""
    from pstar_sim.validation import expected_errors, results

    if write and (system or machine):
        raise PstarError("--write keeps the errors of all rows: leave out --system and --machine")
    with bar("replaying published runs", quiet=json) as on_part:
        found = results.validate(
            system=system, machine=machine, progress=lambda done, runs: on_part("replaying published runs", done, runs)
        )
    if write:
        expected_errors.write_errors(found)
    if json:
        say_answer(Header(), **found.to_json())
    else:
        from pstar_sim.report.validation import validation_text

        say(validation_text(found, every_row=rows))
    return 0
