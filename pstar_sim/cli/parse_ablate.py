"""The flags of `pstar ablate`."""

from __future__ import annotations

from pstar_sim.cli.flags import Commands, certify_flag, machine_flags, new_file, settings_flags, workload_flags

__all__ = ["add"]


def add(command: Commands) -> None:
    ablate = command(
        "ablate",
        "say what each idea is worth: from PatrickStar's schedule to the best one, one change at a time",
        "pstar ablate --model 8B --batch 8 --seq 1024 --machine v100-32 -o waterfall.png",
        "ablating:ablate",
    )
    workload_flags(ablate)
    machine_flags(ablate, required=True)
    settings_flags(ablate)
    ablate.add_argument(
        "--policy", default="optimal", metavar="P", help="the policy that the changes lead to (default: optimal)"
    )
    certify_flag(ablate, "hold all lines against the tighter bound of a linear program, which takes seconds")
    ablate.add_argument("--json", action="store_true", help="a JSON object instead of the tables")
    ablate.add_argument("-o", "--output", type=new_file, metavar="FILE", help="also draw the waterfall")
