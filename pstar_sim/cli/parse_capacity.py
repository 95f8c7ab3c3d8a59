"""The flags of the capacity commands: fits, max-model, max-batch, cheapest, sensitivity, sweep."""

from __future__ import annotations

import argparse
import re

from pstar_sim.cli.flags import (
    Commands,
    checkpointing_flag,
    machine_flags,
    new_file,
    policies_flag,
    positive,
    settings_flags,
    workload_flags,
)

__all__ = ["add"]


def add(command: Commands) -> None:
    fits = command(
        "fits",
        "say whether a job fits a machine, by policy: with how much room to spare, or what is short and what would do",
        "pstar fits --model 12B --batch 8 --seq 1024 --machine rtx4090-128gb",
        "capacity:fits",
    )
    workload_flags(fits)
    _question_flags(fits)

    model = command(
        "max-model",
        "find the largest model a machine can train, by policy: of the catalog, and of a family by its depth",
        "pstar max-model --machine v100-32 --batch 8 --seq 1024 --like 12B",
        "capacity:max_model",
    )
    model.add_argument(
        "--like", default="12B", metavar="NAME", help="the family: this preset with more or fewer layers (default: 12B)"
    )
    model.add_argument("--hidden", type=positive, metavar="H", help="another hidden size for it")
    model.add_argument("--heads", type=positive, metavar="N", help="another number of heads for it")
    _job_flags(model, "sequences a micro-batch, of all GPUs together")
    model.add_argument("--micro-batches", type=positive, default=1, metavar="U", help="an iteration (default: 1)")
    _question_flags(model)

    batch = command(
        "max-batch",
        "find the largest batch with which a machine can train a model, by policy",
        "pstar max-batch --model 8B --seq 1024 --machine rtx4090",
        "capacity:max_batch",
    )
    batch.add_argument("--model", required=True, metavar="NAME", help="a model preset (see `pstar models`)")
    _job_flags(batch, None)
    batch.add_argument("--micro-batches", type=positive, default=1, metavar="U", help="an iteration (default: 1)")
    _question_flags(batch)

    cheapest = command(
        "cheapest",
        "find the cheapest machine that trains a model on so many tokens by a deadline",
        "pstar cheapest --model 8B --tokens 3e9 --deadline 14d --batch 64 --seq 1024",
        "capacity:cheapest",
    )
    cheapest.add_argument("--model", required=True, metavar="NAME", help="a model preset (see `pstar models`)")
    cheapest.add_argument("--tokens", type=count, required=True, metavar="N", help="tokens in all, such as 300e9")
    cheapest.add_argument("--deadline", type=duration_s, metavar="TIME", help="such as 14d, 36h or 2w (default: none)")
    _job_flags(cheapest, "sequences an iteration, of all GPUs and micro-batches together")
    cheapest.add_argument(
        "--machine",
        action="append",
        metavar="M",
        help="only this machine; may be given several times (default: every machine with a price)",
    )
    cheapest.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="another figure of every --machine"
    )
    cheapest.add_argument("--prices", metavar="FILE", help="prices of your own: [MACHINE] usd_per_hour = ...")
    cheapest.add_argument(
        "--nodes", dest="most_nodes", type=positive, default=64, metavar="N", help="at most so many (default: 64)"
    )
    settings_flags(cheapest)
    policies_flag(cheapest, "use this policy; may be given several times (default: optimal)")
    cheapest.add_argument("--json", action="store_true", help="a list of JSON objects instead of the table")

    sensitivity = command(
        "sensitivity",
        "say what a tenth more GPU memory, RAM, link, DRAM, cores or network is worth, in time and in model size",
        "pstar sensitivity --model 12B --batch 8 --seq 1024 --machine v100-32",
        "capacity:sensitivity",
    )
    workload_flags(sensitivity)
    machine_flags(sensitivity, required=True)
    settings_flags(sensitivity)
    policies_flag(sensitivity, "ask about this policy; may be given several times (default: three of them)")
    sensitivity.add_argument(
        "--by", type=share, default=0.1, metavar="SHARE", help="such as 10%% or 0.5 (default: 10%%)"
    )
    sensitivity.add_argument("--json", action="store_true", help="a list of JSON objects instead of the table")

    sweep = command(
        "sweep",
        "plan and simulate every point of a grid; goes on where an interrupted one stopped",
        "pstar sweep grid.toml -o results.parquet",
        "capacity:sweep",
    )
    sweep.add_argument("grid", metavar="GRID", help="a .toml file of axes (see the README)")
    sweep.add_argument(
        "-o", "--output", type=new_file, required=True, metavar="FILE", help="the results to write (.parquet)"
    )
    sweep.add_argument("--jobs", type=positive, metavar="N", help="processes (default: one a core)")
    sweep.add_argument("--backend", metavar="B", help="a backend of joblib (default: loky, processes on this machine)")
    sweep.add_argument("--cache", metavar="FOLDER", help="where points are kept (default: FILE.points)")
    sweep.add_argument("--quiet", action="store_true", help="no progress bar")
    sweep.add_argument("--json", action="store_true", help="all points as a list of JSON objects")


def _job_flags(parser: argparse.ArgumentParser, batch: str | None) -> None:
    group = parser.add_argument_group("workload")
    if batch is not None:
        group.add_argument("--batch", type=positive, required=True, metavar="B", help=batch)
    group.add_argument("--seq", type=positive, required=True, metavar="S", help="tokens a sequence")
    group.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="working dtype (default: bf16 where the GPU has it, else fp16)",
    )
    checkpointing_flag(group, default=True, note="default: on")
    group.add_argument("--lora", metavar="r=R", help="freeze the model and train adapters of rank R, such as r=16")
    group.add_argument(
        "--optimizer",
        default="adamw",
        metavar="O",
        help="adamw, adamw-bf16-states, sgd-momentum or sgd (default: adamw)",
    )


def _question_flags(parser: argparse.ArgumentParser) -> None:
    """What is asked about (machine, settings, policies, start-up) and how the answer is printed."""
    machine_flags(parser, required=True)
    settings_flags(parser)
    policies_flag(parser, "ask about this policy; may be given several times (default: all policies)")
    parser.add_argument(
        "--loading",
        choices=("whole", "in-place"),
        default="whole",
        help="how the weights come: whole, into host memory beside the chunks, or made in place (default: whole)",
    )
    parser.add_argument("--json", action="store_true", help="a list of JSON objects instead of the table")


def count(text: str) -> float:
    """ "300e9", "3.5B", "2T"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([kMBGT]?)", text)
    value = 0.0
    if match is not None:
        value = float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}[match[2]]
    if not 1 <= value <= 1e18:
        raise argparse.ArgumentTypeError(f"must be a positive number such as 300e9 or 3B, not {text!r}")
    return value


_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def duration_s(text: str) -> float:
    """ "14d", "36h"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*(s|min|m|h|d|w)", text)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"must be a positive time such as 14d, 36h or 2w, not {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def share(text: str) -> float:
    """ "10%", "0.1"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*(%?)", text)
    value = 0.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 < value <= 10:
        raise argparse.ArgumentTypeError(f"must be a share above 0 and up to 10, such as 10% or 0.5, not {text!r}")
    return value
