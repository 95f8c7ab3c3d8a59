"""The listings: machines, models, policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from pstar_sim.cli.declare import command
from pstar_sim.cli.flags import JsonList
from pstar_sim.cli.output import Header, say_answer, say_table, tell
from pstar_sim.errors import PstarError

commands = typer.Typer()


@command(commands, "pstar machines --gpus")
def machines(
    *,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="list the GPUs instead, by the names that machine files take")
    ] = False,
    links: Annotated[bool, typer.Option("--links", help="list the links instead")] = False,
    hosts: Annotated[bool, typer.Option("--hosts", help="list the hosts instead")] = False,
    json: JsonList = False,
) -> int:
    """List the machines of the catalog."""
    from pstar_sim.catalog.listing_rows import list_machines, list_parts

    parts = [name for name, wanted in (("gpus", gpus), ("links", links), ("hosts", hosts)) if wanted]
    if len(parts) > 1:
        raise PstarError(f"--{parts[0]} and --{parts[1]} are two tables; give one of them")
    return _listing(list_parts(parts[0]) if parts else list_machines(), json)


@command(commands, "pstar models")
def models(*, json: JsonList = False) -> int:
    """List the model presets."""
    from pstar_sim.report.listing import models as listed

    return _listing(listed().to_json(), json)


@command(commands, "pstar policies --json")
def policies(*, json: JsonList = False) -> int:
    """List the policies."""
    from pstar_sim.report.listing import policies as listed

    rows = listed().to_json()
    alike: dict[tuple[str, str, str], dict[str, str]] = {}  # option, its values and meaning -> policy -> default
    for row in rows:
        options = row["options"] if json else row.pop("options")
        assert isinstance(options, list)
        for option in options:
            meaning = (option["option"], option["values"], option["what"])
            alike.setdefault(meaning, {})[str(row["policy"])] = option["default"]
    _listing(rows, json)
    if alike and not json:
        tell("\nOptions, as in --policy tide:capacity=peak,adam=fifo:\n")
        _listing([_option_row(*meaning, defaults) for meaning, defaults in alike.items()], False)
    return 0


def _option_row(key: str, values: str, what: str, defaults: dict[str, str]) -> dict[str, object]:
    shared = set(defaults.values())
    default = ", ".join(shared) if len(shared) == 1 else ", ".join(f"{v} ({p})" for p, v in defaults.items())
    return {"option": key, "values": values, "what": f"{what} ({', '.join(defaults)}; default {default})"}


def _listing(rows: Sequence[dict[str, object]], as_json: bool) -> int:
    if as_json:
        say_answer(Header(), rows=list(rows))
        return 0
    columns = list(rows[0]) if rows else []
    say_table(columns, [["" if row[c] is None else str(row[c]) for c in columns] for row in rows])
    return 0
