"""`app`: the commands, in the help's order. `pstar --help` imports no planner."""

from __future__ import annotations

from typing import Annotated

import typer

from pstar_sim.cli import (
    ablating,
    calibrating,
    capacity,
    demo,
    exporting,
    launching,
    listing_commands,
    pages,
    planning,
    recording,
    running,
    validate,
)
from pstar_sim.cli.exit_status import HELP
from pstar_sim.cli.usage import CommandGroup
from pstar_sim.version import __version__

app = typer.Typer(
    name="pstar",
    cls=CommandGroup,
    invoke_without_command=True,
    subcommand_metavar="COMMAND ...",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"example: pstar compare --model 12B --batch 8 --seq 1024 --machine v100-32\n{HELP}",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
PARTS = (
    planning, exporting, pages, running, recording, launching, demo, ablating, calibrating, capacity, validate,
    listing_commands,
)  # fmt: skip
for part in PARTS:
    app.add_typer(part.commands)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"pstar-sim {__version__}")
        raise typer.Exit


@app.callback()
def _pstar(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="show the version and exit")
    ] = False,
) -> int:
    """Plan, simulate and execute training with more model data than GPU memory: does it fit, how fast, with which
    policy; then run that very plan."""
    if context.invoked_subcommand is None:
        print(context.get_help())
    return 0
