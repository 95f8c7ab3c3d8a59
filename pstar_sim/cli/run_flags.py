"""The flags of a run, in one process or on several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from pstar_sim.cli.flag_values import learning_rate, natural, positive
from pstar_sim.cli.flags import DisksFlag, Quiet


@dataclass(frozen=True, kw_only=True)
class RunFlags(DisksFlag):
    """Flags of `pstar run` and `torchrun -m executor`; the rank that writes a file checks it."""

    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="a plan file; with torchrun, made for a machine of N GPUs")
    ]
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="the model the plan was made for, written as for `pstar trace`"),
    ]
    data: Annotated[
        str | None,
        typer.Option(
            metavar="text:FOLDER",
            help="text to train on, byte by byte (default: the Python standard library's source)",
        ),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="safetensors to begin with, streamed into the chunks (default: initialised by the seed; with --resume "
            "those of the checkpoint)",
        ),
    ] = None
    steps: Annotated[
        int,
        typer.Option(parser=positive, metavar="N", help="iterations in all, those before --resume included"),
    ] = 10
    save: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="write a checkpoint there at the end; transformers loads its weights"),
    ] = None
    save_every: Annotated[
        int | None,
        typer.Option(
            parser=positive, metavar="N", help="also write a checkpoint after every N iterations (with --save)"
        ),
    ] = None
    keep: Annotated[
        int | None,
        typer.Option(
            parser=positive,
            metavar="N",
            help="keep the newest N checkpoints, each in a folder of its own in that of --save (default: one)",
        ),
    ] = None
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="continue from that checkpoint, or the newest in that folder; it may be of another plan and of any "
            "number of ranks",
        ),
    ] = None
    log: Annotated[
        list[str] | None,
        typer.Option(
            "--log",
            "--log-to",
            metavar="TARGET",
            help="write a row per step: FILE.jsonl, tensorboard:FOLDER or wandb:PROJECT; may be given several times "
            "(behind torchrun --log-to: --log is the beginning of flags of its own)",
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="device that runs the plan: virtual, cuda or cuda:N; with torchrun virtual or cuda, where each rank "
            "takes the card of its own number",
        ),
    ] = "virtual"
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="what each rank may use of the accelerator's memory, context included, such as 24GB (default: all it "
            "has)",
        ),
    ] = None
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="link speed of the virtual accelerator of each rank, such as 2GB/s (default: the plan's)",
        ),
    ] = None
    record: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="keep the warm-up iteration, which the first rank runs alone, as a trace"),
    ] = None
    timeline: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="keep the measured timeline beside the predicted one (JSON); with torchrun that of the first rank, or "
            "one file per rank where {rank} is in the name",
        ),
    ] = None
    perfetto: Annotated[
        str | None, typer.Option(metavar="FILE", help="keep both timelines for ui.perfetto.dev, as two groups of lanes")
    ] = None
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="picture of the measured tide over the predicted one, as with --timeline"),
    ] = None
    lr: Annotated[
        float,
        typer.Option(parser=learning_rate, metavar="LR", show_default=False, help="learning rate (default: 3e-4)"),
    ] = 3e-4
    seed: Annotated[int, typer.Option(parser=natural, metavar="N", help="seed of weights and data")] = 0
    quiet: Quiet = False
    json: Annotated[bool, typer.Option("--json", help="one JSON object instead of the tables; no progress")] = False
