"""The flags of `pstar validate`."""

from __future__ import annotations

from pstar_sim.cli.flags import Commands

__all__ = ["add"]


def add(command: Commands) -> None:
    validate = command(
        "validate",
        "replay published measurements and print predicted against published: what was fitted, what was tested, "
        "every miss",
        "pstar validate --machine h100",
        "validate:validate",
    )
    validate.add_argument("--system", metavar="TEXT", help="only systems whose name contains this")
    validate.add_argument("--machine", metavar="TEXT", help="only machines whose name contains this")
    validate.add_argument("--rows", action="store_true", help="print every row in scope")
    validate.add_argument("--json", action="store_true", help="a JSON object instead of the tables")
    validate.add_argument(
        "--write", action="store_true", help="keep the errors by class of machine, for the answers that quote them"
    )
