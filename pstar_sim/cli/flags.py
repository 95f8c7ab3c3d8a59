"""What every command's parser is made of: one-line mistakes, lazily imported functions, and the groups of flags that
several commands share. argparse only."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

from pstar_sim.errors import PstarError, UnknownName
from pstar_sim.files import check_writable

__all__ = [
    "Commands",
    "Parser",
    "call_of",
    "certify_flag",
    "checkpointing_flag",
    "learning_rate",
    "machine_flags",
    "natural",
    "new_file",
    "policies_flag",
    "positive",
    "settings_flags",
    "workload_flags",
]


class Parser(argparse.ArgumentParser):
    """One line for a mistake in the flags, like for every other mistake; for a command that is not
    known, the nearest ones."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse has no public place for a message of one's own."""
        if action.nargs == argparse.PARSER and action.choices is not None and value not in action.choices:
            raise UnknownName(str(action.metavar).lower(), str(value), tuple(action.choices))
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        raise PstarError(f"{message} (see `{self.prog} --help`)")


def call_of(where: str) -> Callable[[argparse.Namespace], int]:
    """The command's function "module:name", imported when the command runs."""

    def call(args: argparse.Namespace) -> int:
        module, _, name = where.partition(":")
        status: int = getattr(importlib.import_module(f"pstar_sim.cli.{module}"), name)(args)
        return status

    return call


class Adding(Protocol):
    """What `ArgumentParser.add_subparsers` returns."""

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser: ...


class Taking(Protocol):
    """A parser, or a group of its flags."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action: ...


class Commands:
    """Adds a command: its name, its help, an example, and the function "module:name" of pstar_sim.cli that runs it."""

    def __init__(self, commands: Adding) -> None:
        self._commands = commands

    def __call__(self, name: str, help_: str, example: str, where: str) -> argparse.ArgumentParser:
        sub = self._commands.add_parser(
            name,
            help=help_,
            description=help_[0].upper() + help_[1:] + ".",
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(call=call_of(where))
        return sub


def workload_flags(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    group = parser.add_argument_group("workload")
    one = group.add_mutually_exclusive_group(required=required)
    one.add_argument("--trace", metavar="FILE", help="a trace file (see `pstar trace`)")
    one.add_argument("--model", metavar="NAME", help="a model preset (see `pstar models`)")
    group.add_argument(
        "--batch",
        type=positive,
        metavar="B",
        help="sequences per micro-batch, of all GPUs together (with --trace: picks a variant by each GPU's share)",
    )
    group.add_argument("--seq", type=positive, metavar="S", help="tokens a sequence (with --trace: picks a variant)")
    group.add_argument(
        "--micro-batches", type=positive, metavar="U", help="micro-batches an iteration (default: 1, or the trace's)"
    )
    group.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="working dtype (default: bf16 where the GPU has it, else fp16; with --trace: picks a variant)",
    )
    checkpointing_flag(group, default=None, note="default: on for presets; with --trace: picks a variant")
    group.add_argument(
        "--lora",
        metavar="r=R",
        help="freeze the model and train adapters of rank R, such as r=16 or r=8,targets=all-linear (presets only)",
    )
    group.add_argument(
        "--optimizer",
        metavar="O",
        help="adamw, adamw-bf16-states, sgd-momentum or sgd (default: adamw, or the trace's)",
    )


def global_batch_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--global-batch",
        type=positive,
        metavar="B",
        help="sequences an iteration on all GPUs: choose micro-batches, and what activations are kept, recomputed or "
        "offloaded, among the variants of --trace or of the preset",
    )


def checkpointing_flag(group: Taking, *, default: bool | None, note: str) -> None:
    group.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=default,
        help=f"recompute activations in the backward pass ({note})",
    )


def machine_flags(parser: argparse.ArgumentParser, *, required: bool) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--machine",
        required=required,
        metavar="M",
        help="a machine of the catalog, a .toml file, or here (see `pstar machines`)",
    )
    group.add_argument("--nodes", type=positive, metavar="N", help="so many of its nodes (default: as in the catalog)")
    group.add_argument("--gpus", type=positive, metavar="N", help="GPUs per node (default: as in the catalog)")
    group.add_argument("--gpu-memory", metavar="SIZE", help="another GPU memory, such as 8GB")
    group.add_argument("--host-memory", metavar="SIZE", help="another host memory, such as 64GB")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="another figure of the machine, such as gpu.memory=48GB, link.bandwidth=x2 or host.cores=+10%%; may be "
        "given several times",
    )


def settings_flags(parser: argparse.ArgumentParser) -> None:
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


def policies_flag(parser: argparse.ArgumentParser, help_: str) -> None:
    parser.add_argument("--policy", action="append", metavar="P", help=help_)


def certify_flag(parser: argparse.ArgumentParser, help_: str) -> None:
    parser.add_argument("--certify", action="store_true", help=help_)


def positive(text: str) -> int:
    value = _whole(text, least=1)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def learning_rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; write one such as 3e-4") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 0 and finite, not {text}; write a rate such as 3e-4")
    return value


def natural(text: str) -> int:
    return _whole(text, least=0)


def _whole(text: str, *, least: int) -> int:
    digits = text.removeprefix("-")
    if digits != text and digits.isascii() and digits.isdigit():
        raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")
    if len(text) > 9:
        raise argparse.ArgumentTypeError(f"must be less than a billion, not {text}")
    return int(text)


def new_file(text: str) -> str:
    """A file that can be written, tried before any work is done for it."""
    try:
        check_writable(Path(text))
    except PstarError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
