"""The commands, their flags and their help: argparse only, so that `pstar --help` answers at once."""

from __future__ import annotations

import argparse
import textwrap

from pstar_sim.cli import parse_ablate, parse_calibrate, parse_capacity, parse_run, parse_validate
from pstar_sim.cli.flags import (
    Commands,
    Parser,
    call_of,
    certify_flag,
    checkpointing_flag,
    global_batch_flag,
    machine_flags,
    natural,
    new_file,
    policies_flag,
    positive,
    settings_flags,
    workload_flags,
)
from pstar_sim.cli.status import HELP
from pstar_sim.version import __version__

__all__ = ["make_parser"]


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="pstar",
        description="Plan, simulate and execute training with more model data than GPU memory: "
        "does it fit, how fast, with which policy; then run that very plan.",
        epilog="example: pstar compare --model 12B --batch 8 --seq 1024 --machine v100-32\n" + textwrap.fill(HELP, 100),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pstar-sim {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", parser_class=Parser)
    command = Commands(commands)

    compare = command(
        "compare",
        "compare policies on a machine: what fits, how fast, what binds, and why the rest does not fit",
        "pstar compare --model 15B --batch 8 --seq 1024 --machine v100-32 --policy tide --policy patrickstar",
        "planning:compare",
    )
    workload_flags(compare)
    global_batch_flag(compare)
    machine_flags(compare, required=True)
    settings_flags(compare)
    policies_flag(compare, "compare this policy; may be given several times (default: all policies)")
    certify_flag(compare, "hold the policies against the tighter bound of a linear program, which takes seconds")
    compare.add_argument("--json", action="store_true", help="a list of JSON objects instead of the table")

    plan = command(
        "plan",
        "make a plan and write it to a file",
        "pstar plan --trace gpt2.parquet --machine virtual --policy auto -o plan.json",
        "planning:plan",
    )
    workload_flags(plan)
    global_batch_flag(plan)
    machine_flags(plan, required=True)
    settings_flags(plan)
    plan.add_argument(
        "--policy", default="auto", metavar="P", help="policy, or auto: the fastest that fits (default: auto)"
    )
    plan.add_argument("-o", "--output", type=new_file, required=True, metavar="FILE", help="the plan file to write")
    certify_flag(plan, "give the plan the tighter bound of a linear program, which takes seconds")
    plan.add_argument("--json", action="store_true", help="the plan's line of the comparison as a JSON object")

    check = command(
        "check",
        "prove that a plan file is right: chunks resident when used, no place over its budget in any legal order, "
        "every parameter updated once",
        "pstar check plan.json",
        "planning:check",
    )
    check.add_argument("plan", metavar="PLAN", help="a plan file")
    certify_flag(check, "also solve the linear program of the tighter bound again")
    check.add_argument("--json", action="store_true", help="a JSON object instead of a sentence")

    explain = command(
        "explain",
        "say what a plan does: what lives where and why, what binds, what the tide gains, its first steps",
        "pstar explain plan.json",
        "planning:explain",
    )
    explain.add_argument("plan", metavar="PLAN", help="a plan file")
    explain.add_argument("--steps", type=natural, default=12, metavar="N", help="first steps to show (default: 12)")

    plot = command(
        "plot",
        "draw pictures",
        "pstar plot tide --model 15B --batch 8 --seq 1024 --machine v100-32 -o tide.png",
        "planning:plot_help",
    )
    pictures = plot.add_subparsers(
        dest="picture", metavar="PICTURE", title="pictures", required=True, parser_class=Parser
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
    tide.set_defaults(call=call_of("planning:plot_tide"))
    tide.add_argument("plans", nargs="*", metavar="PLAN", help="plan files to draw, instead of planning")
    workload_flags(tide, required=False)
    machine_flags(tide, required=False)
    settings_flags(tide)
    policies_flag(tide, "draw this policy; may be given several times (default: static_partition and tide)")
    tide.add_argument("--x", choices=("time", "moment", "both"), default="both", help="against what (default: both)")
    tide.add_argument("--measured", metavar="FILE", help="what `pstar run --timeline` kept, over the first policy")
    tide.add_argument(
        "-o",
        "--output",
        type=new_file,
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
    export.add_argument(
        "--measured", metavar="FILE", help="with --perfetto: what `pstar run --timeline` kept, beside the prediction"
    )
    export.add_argument("-o", "--output", type=new_file, required=True, metavar="FILE", help="file to write")

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
    trace.add_argument(
        "--batch", type=positive, required=True, metavar="B", help="sequences per micro-batch, of one GPU"
    )
    trace.add_argument("--seq", type=positive, required=True, metavar="S", help="tokens a sequence")
    trace.add_argument(
        "--micro-batches", type=positive, default=1, metavar="U", help="micro-batches an iteration (default: 1)"
    )
    trace.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="working dtype (default: bf16; of a py: factory, the module's own)",
    )
    checkpointing_flag(trace, default=False, note="default: off, as transformers models come")
    trace.add_argument(
        "--variants",
        action="store_true",
        help="with and without recomputing activations, at the batch, half and a quarter of it, in one file: what "
        "`pstar plan --global-batch` chooses among",
    )
    trace.add_argument(
        "--attention", choices=("flash", "efficient", "math"), help="attention kernel (default: torch's choice)"
    )
    trace.add_argument(
        "--device",
        metavar="DEVICE",
        help="record a real iteration, with seconds, on virtual, cuda or cuda:N (default: nothing runs, no seconds)",
    )
    trace.add_argument(
        "--machine",
        metavar="NAME|FILE.toml",
        help="with --device: the machine whose seconds these are (pstar calibrate)",
    )
    trace.add_argument("--gpu-memory", metavar="SIZE", help="with --device: what the recording may use, such as 24GB")
    trace.add_argument(
        "-o", "--output", type=new_file, required=True, metavar="FILE", help="the trace file to write (.parquet)"
    )
    trace.add_argument("--json", action="store_true", help="what was traced as a JSON object")

    parse_run.add(command)

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
    demo.add_argument("--seed", type=natural, default=0, metavar="N", help="seed of weights and data (default: 0)")
    demo.add_argument("--steps", type=positive, default=6, metavar="N", help="iterations of training (default: 6)")

    parse_ablate.add(command)
    parse_calibrate.add(command)
    parse_capacity.add(command)
    parse_validate.add(command)

    for name, what, example in (
        ("machines", "list the machines of the catalog", "pstar machines"),
        ("models", "list the model presets", "pstar models"),
        ("policies", "list the policies", "pstar policies --json"),
    ):
        listing = command(name, what, example, f"planning:{name}")
        listing.add_argument("--json", action="store_true", help="a list of JSON objects instead of the table")
    return parser
