"""The commands, their flags and their help: argparse only, so that `pstar --help` answers at once."""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pstar_sim.errors import PstarError

__all__ = ["make_parser"]


class _Parser(argparse.ArgumentParser):
    """One line for a mistake in the flags, like for every other mistake."""

    def error(self, message: str) -> NoReturn:
        raise PstarError(f"{message} (see `{self.prog} --help`)")


def _call(where: str) -> Callable[[argparse.Namespace], int]:
    """The command's function "module:name", imported when the command runs."""

    def call(args: argparse.Namespace) -> int:
        module, _, name = where.partition(":")
        status: int = getattr(importlib.import_module(f"pstar_sim.cli.{module}"), name)(args)
        return status

    return call


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pstar",
        description="Plan, simulate and execute training with more model data than GPU memory: "
        "does it fit, how fast, with which policy; then run that very plan.",
        epilog="example: pstar compare --model 12B --batch 8 --seq 1024 --machine v100-32",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=_Parser)

    def command(name: str, help_: str, example: str, where: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=help_,
            description=help_[0].upper() + help_[1:] + ".",
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(call=_call(where))
        return sub

    compare = command(
        "compare",
        "compare policies on a machine: what fits, how fast, what binds, and why the rest does not fit",
        "pstar compare --model 15B --batch 8 --seq 1024 --machine v100-32 --policy tide --policy patrickstar",
        "planning:compare",
    )
    _workload(compare)
    _machine(compare, required=True)
    _settings(compare)
    _policies(compare, "compare this policy; may be given several times (default: all policies)")
    compare.add_argument("--json", action="store_true", help="a list of JSON objects instead of the table")

    plan = command(
        "plan",
        "make a plan and write it to a file",
        "pstar plan --trace gpt2.parquet --machine virtual --policy auto -o plan.json",
        "planning:plan",
    )
    _workload(plan)
    _machine(plan, required=True)
    _settings(plan)
    plan.add_argument(
        "--policy", default="auto", metavar="P", help="policy, or auto: the fastest that fits (default: auto)"
    )
    plan.add_argument("-o", "--output", type=_new_file, required=True, metavar="FILE", help="the plan file to write")
    plan.add_argument("--json", action="store_true", help="the plan's line of the comparison as a JSON object")

    check = command(
        "check",
        "prove that a plan file is right: chunks resident when used, no place over its budget in any legal order, "
        "every parameter updated once",
        "pstar check plan.json",
        "planning:check",
    )
    check.add_argument("plan", metavar="PLAN", help="a plan file")
    check.add_argument("--json", action="store_true", help="a JSON object instead of a sentence")

    explain = command(
        "explain",
        "say what a plan does: what lives where and why, what binds, what the tide gains, its first steps",
        "pstar explain plan.json",
        "planning:explain",
    )
    explain.add_argument("plan", metavar="PLAN", help="a plan file")
    explain.add_argument("--steps", type=_natural, default=12, metavar="N", help="first steps to show (default: 12)")

    plot = command(
        "plot",
        "draw pictures",
        "pstar plot tide --model 15B --batch 8 --seq 1024 --machine v100-32 -o tide.png",
        "planning:plot_help",
    )
    pictures = plot.add_subparsers(
        dest="picture", metavar="PICTURE", title="pictures", required=True, parser_class=_Parser
    )
    tide = pictures.add_parser(
        "tide",
        help="GPU memory over an iteration, stacked by what fills it, policies side by side",
        description="Draw GPU memory over an iteration, stacked by what fills it: non-model data, param16, gradients, "
        "optimizer states, free; policies side by side.",
        epilog="examples: pstar plot tide --model 15B --batch 8 --seq 1024 --machine v100-32 -o tide.png\n"
        "          pstar plot tide plan.json --measured timeline.json -o tide.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tide.set_defaults(call=_call("planning:plot_tide"))
    tide.add_argument("plans", nargs="*", metavar="PLAN", help="plan files to draw, instead of planning")
    _workload(tide, required=False)
    _machine(tide, required=False)
    _settings(tide)
    _policies(tide, "draw this policy; may be given several times (default: static_partition and tide)")
    tide.add_argument("--x", choices=("time", "moment", "both"), default="both", help="against what (default: both)")
    tide.add_argument("--measured", metavar="FILE", help="a timeline file of a run, drawn over the first policy")
    tide.add_argument(
        "-o",
        "--output",
        type=_new_file,
        default="tide.png",
        metavar="FILE",
        help="picture to write (default: tide.png)",
    )

    export = command(
        "export",
        "simulate a plan and write its timeline for other tools",
        "pstar export plan.json --perfetto -o trace.json   (open it at ui.perfetto.dev)",
        "planning:export",
    )
    export.add_argument("plan", metavar="PLAN", help="a plan file")
    form = export.add_mutually_exclusive_group(required=True)
    form.add_argument("--perfetto", action="store_true", help="Chrome trace JSON: a lane a queue, counters of memory")
    form.add_argument("--timeline", action="store_true", help="our own timeline JSON")
    export.add_argument("-o", "--output", type=_new_file, required=True, metavar="FILE", help="file to write")

    trace = command(
        "trace",
        "trace one training iteration of a model, without a GPU and without its memory",
        "pstar trace hf:gpt2 --batch 4 --seq 1024 -o gpt2.parquet",
        "running:trace",
    )
    trace.add_argument(
        "model",
        metavar="MODEL",
        help="a preset's name, hf:FILE (a transformers config.json), hf:ORG/NAME, or py:package.module:factory",
    )
    trace.add_argument("--batch", type=_positive, required=True, metavar="B", help="sequences a micro-batch")
    trace.add_argument("--seq", type=_positive, required=True, metavar="S", help="tokens a sequence")
    trace.add_argument(
        "--micro-batches", type=_positive, default=1, metavar="U", help="micro-batches an iteration (default: 1)"
    )
    trace.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="working dtype (default: bf16; of a py: factory, the module's own)",
    )
    _checkpointing(trace, default=False, note="default: off, as transformers models come")
    trace.add_argument(
        "--attention", choices=("flash", "efficient", "math"), help="attention kernel (default: torch's choice)"
    )
    trace.add_argument(
        "-o", "--output", type=_new_file, required=True, metavar="FILE", help="the trace file to write (.parquet)"
    )
    trace.add_argument("--json", action="store_true", help="what was traced as a JSON object")

    run = command(
        "run",
        "train a real model by a plan, and hold what was predicted against what is measured",
        "pstar run plan.json --model hf:gpt2 --steps 20 --bandwidth 2GB/s",
        "running:run",
    )
    run.add_argument("plan", metavar="PLAN", help="a plan file")
    run.add_argument(
        "--model", required=True, metavar="MODEL", help="the model the plan was made for, written as for `pstar trace`"
    )
    run.add_argument(
        "--data",
        metavar="text:FOLDER",
        help="text to train on, byte by byte (default: the Python standard library's source)",
    )
    run.add_argument("--steps", type=_positive, default=10, metavar="N", help="iterations (default: 10)")
    run.add_argument("--device", choices=("virtual",), default="virtual", help="what runs it (default: virtual)")
    run.add_argument(
        "--bandwidth", metavar="RATE", help="link speed of the virtual accelerator, such as 2GB/s (default: the plan's)"
    )
    run.add_argument("--record", type=_new_file, metavar="FILE", help="keep the warm-up iteration as a trace")
    run.add_argument("--timeline", type=_new_file, metavar="FILE", help="keep the measured timeline")
    run.add_argument("--lr", type=float, default=3e-4, metavar="LR", help="learning rate (default: 3e-4)")
    run.add_argument("--seed", type=_natural, default=0, metavar="N", help="seed of weights and data (default: 0)")
    run.add_argument("--json", action="store_true", help="one JSON object instead of the tables")

    demo = command(
        "demo",
        "trace a GPT-2, compare policies on a machine too small for it, plan, run the plan beside plain PyTorch",
        "pstar demo -o demo-out",
        "demo:demo",
    )
    demo.add_argument(
        "-o",
        "--out",
        dest="output",
        default="demo-out",
        metavar="FOLDER",
        help="folder for its files (default: demo-out)",
    )
    demo.add_argument("--seed", type=_natural, default=0, metavar="N", help="seed of weights and data (default: 0)")
    demo.add_argument("--steps", type=_positive, default=6, metavar="N", help="iterations of training (default: 6)")

    for name, what, example in (
        ("machines", "list the machines of the catalog", "pstar machines"),
        ("models", "list the model presets", "pstar models"),
        ("policies", "list the policies", "pstar policies --json"),
    ):
        listing = command(name, what, example, f"planning:{name}")
        listing.add_argument("--json", action="store_true", help="a list of JSON objects instead of the table")
    return parser


def _workload(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    group = parser.add_argument_group("workload")
    one = group.add_mutually_exclusive_group(required=required)
    one.add_argument("--trace", metavar="FILE", help="a trace file (see `pstar trace`)")
    one.add_argument("--model", metavar="NAME", help="a model preset (see `pstar models`)")
    group.add_argument(
        "--batch", type=_positive, metavar="B", help="sequences a micro-batch (with --trace: picks a variant)"
    )
    group.add_argument("--seq", type=_positive, metavar="S", help="tokens a sequence (with --trace: picks a variant)")
    group.add_argument(
        "--micro-batches", type=_positive, metavar="U", help="micro-batches an iteration (default: 1, or the trace's)"
    )
    group.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="working dtype (default: bf16 where the GPU has it, else fp16; with --trace: picks a variant)",
    )
    _checkpointing(group, default=None, note="default: on for presets; with --trace: picks a variant")


def _checkpointing(group: argparse._ActionsContainer, *, default: bool | None, note: str) -> None:
    group.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=default,
        help=f"recompute activations in the backward pass ({note})",
    )


def _machine(parser: argparse.ArgumentParser, *, required: bool) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--machine",
        required=required,
        metavar="M",
        help="a machine of the catalog, a .toml file, or here (see `pstar machines`)",
    )
    group.add_argument("--gpu-memory", metavar="SIZE", help="another GPU memory, such as 8GB")
    group.add_argument("--host-memory", metavar="SIZE", help="another host memory, such as 64GB")


def _settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("setting")
    group.add_argument(
        "--update",
        choices=("step", "eager"),
        default="step",
        help="when Adam may run: in optimizer.step(), or in backward as soon as a gradient is final (default: step)",
    )
    group.add_argument(
        "--clip",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="clip gradients by their global norm (default: on)",
    )
    group.add_argument("--chunk", metavar="SIZE", help="chunk size, such as 128MiB (default: searched for least waste)")


def _policies(parser: argparse.ArgumentParser, help_: str) -> None:
    parser.add_argument("--policy", action="append", metavar="P", help=help_)


def _positive(text: str) -> int:
    value = _natural(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1, not 0")
    return value


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")
    if len(text) > 9:
        raise argparse.ArgumentTypeError(f"must be less than a billion, not {text}")
    return int(text)


def _new_file(text: str) -> str:
    """A file that can be written, tried before any work is done for it."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {str(path.parent)!r}; make it first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text}: the folder {str(path.parent)!r} cannot be written to ({error.strerror}); choose another"
        ) from None
    return text
