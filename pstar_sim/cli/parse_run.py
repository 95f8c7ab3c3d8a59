"""The flags of `pstar run`, which are those of `torchrun -m executor` too."""

from __future__ import annotations

import argparse

from pstar_sim.cli.flags import Commands, learning_rate, natural, new_file, positive

__all__ = ["add", "run_flags"]


def add(command: Commands) -> None:
    run = command(
        "run",
        "train a real model by a plan, and hold what was predicted against what is measured",
        "pstar run plan.json --model hf:gpt2 --steps 20 --bandwidth 2GB/s",
        "running:run",
    )
    run_flags(run)


def run_flags(run: argparse.ArgumentParser, *, several: bool = False) -> None:
    """several: of one of several processes. Only some of them write files, so what is named is tried later, by the one
    that will write it (`cli/torchrun.py`)."""
    file = str if several else new_file
    of = " of the first rank; one file a rank where {rank} is in the name" if several else ""
    each = " of each rank" if several else ""
    run.add_argument("plan", metavar="PLAN", help="a plan file" + (", made for a machine of N GPUs" if several else ""))
    run.add_argument(
        "--model", required=True, metavar="MODEL", help="the model the plan was made for, written as for `pstar trace`"
    )
    run.add_argument(
        "--data",
        metavar="text:FOLDER",
        help="text to train on, byte by byte (default: the Python standard library's source)",
    )
    run.add_argument(
        "--weights",
        metavar="FOLDER",
        help="safetensors to begin with, streamed into the chunks (default: initialised by the seed; with --resume "
        "those of the checkpoint)",
    )
    run.add_argument(
        "--steps",
        type=positive,
        default=10,
        metavar="N",
        help="iterations in all, those before --resume included (default: 10)",
    )
    run.add_argument(
        "--save", metavar="FOLDER", help="write a checkpoint there at the end; transformers loads its weights"
    )
    run.add_argument("--save-every", type=positive, metavar="N", help="and after every N iterations (with --save)")
    run.add_argument(
        "--resume",
        metavar="FOLDER",
        help="go on from that checkpoint, under this plan (need not be the one it had"
        + ("; of any number of ranks)" if several else ")"),
    )
    run.add_argument(
        "--device",
        default="virtual",
        metavar="DEVICE",
        help="what runs it: virtual, or cuda, of which each rank takes the card of its number (default: virtual)"
        if several
        else "what runs it: virtual, cuda or cuda:N (default: virtual)",
    )
    run.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help=f"what the run may use of the accelerator's memory{each}, context included, such as 24GB (default: all it "
        "has)",
    )
    run.add_argument(
        "--bandwidth",
        metavar="RATE",
        help=f"link speed of the virtual accelerator{each}, such as 2GB/s (default: the plan's)",
    )
    run.add_argument(
        "--record",
        type=file,
        metavar="FILE",
        help="keep the warm-up iteration as a trace" + (", which the first rank runs alone" if several else ""),
    )
    run.add_argument(
        "--timeline",
        type=file,
        metavar="FILE",
        help=f"keep the measured timeline beside the predicted one (JSON){of}",
    )
    run.add_argument(
        "--perfetto",
        type=file,
        metavar="FILE",
        help="the same for ui.perfetto.dev, two groups of lanes",
    )
    run.add_argument(
        "--plot",
        type=file,
        metavar="FILE",
        help="picture of the measured tide over the predicted one" + (", as with --timeline" if several else ""),
    )
    run.add_argument("--lr", type=learning_rate, default=3e-4, metavar="LR", help="learning rate (default: 3e-4)")
    run.add_argument("--seed", type=natural, default=0, metavar="N", help="seed of weights and data (default: 0)")
    run.add_argument("--quiet", action="store_true", help="no progress on stderr")
    run.add_argument("--json", action="store_true", help="one JSON object instead of the tables; no progress")
