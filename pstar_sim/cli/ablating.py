"""`pstar ablate`: the worth of each idea."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pstar_sim.cli import flag_values
from pstar_sim.cli.bars import bar
from pstar_sim.cli.declare import command
from pstar_sim.cli.flag_values import policy_names
from pstar_sim.cli.flags import JsonObject, MachineFlags, PictureFlags, SettingFlags, WorkloadFlags, certify, output
from pstar_sim.cli.output import Header, check_looks, draw, say, say_answer, tell
from pstar_sim.errors import PstarError
from pstar_sim.files import write_atomically

commands = typer.Typer()


@command(commands, "pstar ablate --model 8B --batch 8 --seq 1024 --machine v100-32 -o waterfall.png")
def ablate(
    *,
    job: WorkloadFlags,
    on: MachineFlags,
    setting: SettingFlags,
    policy: Annotated[
        str,
        typer.Option(
            parser=flag_values.policy,
            metavar="P",
            autocompletion=policy_names,
            help="the policy that the changes lead to",
        ),
    ] = "optimal",
    begin: Annotated[
        str,
        typer.Option(
            "--from",
            parser=flag_values.policy,
            metavar="P",
            autocompletion=policy_names,
            help="the policy that the changes begin with",
        ),
    ] = "patrickstar",
    lp: Annotated[
        bool, certify("compare all lines with the tighter bound of a linear program, which takes seconds")
    ] = False,
    json: JsonObject = False,
    path: Annotated[str | None, output("also draw the waterfall")] = None,
    picture: PictureFlags,
) -> int:
    """Say what each idea is worth: from a published schedule to the best schedule, one change at a time."""
    from pstar_sim.cli.inputs import machine_of, settings_of, workloads_of
    from pstar_sim.planner.ablate import ablate as ask

    if path is not None:
        check_looks(path, picture)
    elif picture != PictureFlags():
        raise PstarError("--size, --style, --legend and --data are of a picture; give its file with -o")
    machine = machine_of(on)
    workloads = workloads_of(job, machine)
    with bar("planning", quiet=json) as on_part:
        found = ask(
            workloads,
            machine,
            settings_of(setting),
            policy=policy,
            begin=begin,
            certify=lp,
            progress=lambda done, lines: on_part("planning", done, lines),
        )
    if path is not None:
        from pstar_sim.report.waterfall import waterfall_csv, waterfall_figure

        draw(lambda look: waterfall_figure(found, look=look), path, picture)
    if json:
        header = Header(model=found.workload.model, machine=machine.name, notes=found.notes)
        say_answer(header, **found.to_json())
    else:
        from pstar_sim.report.ablation import ablation_text

        say(ablation_text(found))
        if path is not None:
            tell(f"\n{path}: the waterfall")
    if picture.data is not None:
        write_atomically(Path(picture.data), waterfall_csv(found))
    return 0
