"""Flags of `pstar calibrate`."""

from __future__ import annotations

from pstar_sim.cli.flags import Commands, new_file

__all__ = ["add"]


def add(command: Commands) -> None:
    calibrate = command(
        "calibrate",
        "measure the machine this runs on, in less than two minutes, and write it as a machine file",
        "pstar calibrate -o my.toml && pstar plan --trace gpt2.parquet --machine my.toml --gpu-memory 1GB -o plan.json",
        "calibrating:calibrate",
    )
    calibrate.add_argument(
        "-o", "--output", type=new_file, required=True, metavar="FILE", help="the machine file to write (.toml)"
    )
    calibrate.add_argument(
        "--device",
        choices=("auto", "virtual", "cuda"),
        default="auto",
        help="what to measure (default: the GPU where there is one, else the virtual accelerator)",
    )
    calibrate.add_argument("--quick", action="store_true", help="a quarter of the time, for twice the scatter")
    calibrate.add_argument("--json", action="store_true", help="what was measured as a JSON object")
