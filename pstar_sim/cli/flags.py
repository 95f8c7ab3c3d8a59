"""Flags of several commands, declared once: a type for one, a dataclass for those that go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pstar_sim.cli.flag_values import (
    Inches,
    factor,
    loading,
    machine_names,
    model_names,
    new_csv,
    new_file,
    one_of,
    policy,
    policy_names,
    positive,
    size_inches,
    tokens,
    ways_of_loading,
)
from pstar_sim.workload.axes import Axes

if TYPE_CHECKING:
    from pstar_sim.report.paper import Look

UPDATES = Literal["step", "eager"]
LOOPS = Literal["own", "step"]
SUMS = Literal["32-bit", "16-bit"]
LEGENDS = Literal["below", "right", "none"]

Batch = Annotated[
    int | None,
    typer.Option(
        parser=positive,
        metavar="B",
        help="sequences per micro-batch, of all GPUs together (with --trace: picks a variant by each GPU's share)",
    ),
]
JsonList = Annotated[bool, typer.Option("--json", help="a JSON object with the rows of the table, and what was asked")]
JsonObject = Annotated[bool, typer.Option("--json", help="a JSON object instead of sentences and tables")]
LoadingFlag = Annotated[
    str | None,
    typer.Option(
        parser=loading,
        metavar="WAY",
        autocompletion=ways_of_loading,
        help="how the weights come into host memory, beside what a plan keeps there: whole, once per node; each: "
        "whole, by every process; in-place: never whole; in another dtype than the job's: each:fp32 (default: whole, "
        "or as --like says)",
    ),
]
MicroBatches = Annotated[int, typer.Option(parser=positive, metavar="U", help="micro-batches per iteration")]
PlanFile = Annotated[str, typer.Argument(metavar="PLAN", help="a plan file")]
Preset = Annotated[
    str, typer.Option(metavar="NAME", autocompletion=model_names, help="a model preset (see `pstar models`)")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress on stderr")]


def policies(what: str, default: str) -> Any:
    """The flag may be given several times."""
    return typer.Option(
        "--policy",
        parser=policy,
        metavar="P",
        autocompletion=policy_names,
        help=f"{what} this policy; may be given several times (default: {default})",
    )


def certify(what: str) -> Any:
    return typer.Option("--certify", help=what)


def output(what: str, *, parser: Callable[[Any], str] = new_file) -> Any:
    """Checked before the work begins."""
    return typer.Option("-o", "--output", parser=parser, metavar="FILE", help=what)


@dataclass(frozen=True, kw_only=True)
class OptionalWorkloadFlags(Axes):
    """The work of each iteration. The flags may be left out."""

    SECTION = "workload"

    trace: Annotated[str | None, typer.Option(metavar="FILE", help="a trace file (see `pstar trace`)")] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=model_names,
            help="instead of --trace: a model preset (see `pstar models`), or hf:FILE, hf:FOLDER or ORG/NAME: a "
            "config.json of transformers, the name from the local cache",
        ),
    ] = None
    batch: Batch = None
    seq: Annotated[
        int | None,
        typer.Option(
            parser=tokens, metavar="S", help="tokens per sequence; an image has its own (with --trace: picks a variant)"
        ),
    ] = None
    micro_batches: Annotated[
        int | None,
        typer.Option(parser=positive, metavar="U", help="micro-batches per iteration (default: 1, or the trace's)"),
    ] = None

    def __post_init__(self) -> None:
        if self.trace is not None and self.model is not None:
            raise typer.BadParameter("argument --trace: not allowed with argument --model; give one of them")


@dataclass(frozen=True, kw_only=True)
class WorkloadFlags(OptionalWorkloadFlags):
    """The work of each iteration."""

    SECTION = "workload (--trace or --model is needed)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trace is None and self.model is None:
            raise typer.BadParameter("one of the arguments --trace --model is required")


@dataclass(frozen=True, kw_only=True)
class LikedWorkloadFlags(OptionalWorkloadFlags):
    """The work of each iteration, beside configurations."""

    SECTION = "workload (--trace, --model or --like)"


@dataclass(frozen=True, kw_only=True)
class JobFlags(Axes):
    """The work of each iteration of a preset, without its batch."""

    SECTION = "workload"

    seq: Annotated[
        int | None,
        typer.Option(parser=tokens, metavar="S", help="tokens per sequence; an image has its own"),
    ] = None


MACHINE = typer.Option(
    metavar="M",
    autocompletion=machine_names,
    help="a machine of the catalog, GPUs that differ (a100-80x2+v100-32x2), a .toml file, or here (see `pstar "
    "machines`)",
)


@dataclass(frozen=True, kw_only=True)
class DisksFlag:
    disks: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER[,FOLDER]",
            help="folders for what a plan keeps on disks: a plan is made for the room that they have, a run writes "
            "there",
        ),
    ] = None

    @property
    def folders(self) -> tuple[str, ...]:
        return tuple(self.disks.split(",")) if self.disks else ()


@dataclass(frozen=True, kw_only=True)
class _MachineChanges(DisksFlag):
    SECTION = "machine"

    nodes: Annotated[
        int | None, typer.Option(parser=positive, metavar="N", help="number of nodes (default: as in the catalog)")
    ] = None
    gpus: Annotated[
        int | None, typer.Option(parser=positive, metavar="N", help="GPUs per node (default: as in the catalog)")
    ] = None
    gpu_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="another GPU memory, such as 8GB")] = None
    host_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="another host memory, such as 64GB")] = None
    cpu_threads: Annotated[
        int | None,
        typer.Option(
            parser=positive,
            metavar="N",
            help="threads of each process in CPU Adam (default: its part of the cores; torchrun leaves a process 1 "
            "unless OMP_NUM_THREADS is set)",
        ),
    ] = None
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="another figure of the machine, such as gpu.memory=48GB, link.bandwidth=x2 or host.cores=+10%; may "
            "be given several times",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class _MachineFlag:
    machine: Annotated[str, MACHINE]


@dataclass(frozen=True, kw_only=True)
class _OptionalMachine:
    machine: Annotated[str | None, MACHINE] = None


@dataclass(frozen=True, kw_only=True)
class MachineFlags(_MachineChanges, _MachineFlag):
    """The machine that the command is about."""


@dataclass(frozen=True, kw_only=True)
class OptionalMachineFlags(_MachineChanges, _OptionalMachine):
    """The machine that the command is about. The flags may be left out."""


@dataclass(frozen=True, kw_only=True)
class PictureFlags:
    """The looks of a picture, and its numbers."""

    SECTION = "picture"

    size: Annotated[
        Inches | None,
        typer.Option(
            parser=size_inches,
            metavar="WxH",
            help="width, or width and height, in inches, cm or mm: 3.3 is the column of a paper, 85x60mm",
        ),
    ] = None
    style: Annotated[
        str, typer.Option(metavar="STYLE", help="light, dark, a style of matplotlib, or a .mplstyle file")
    ] = "light"
    legend: Annotated[
        LEGENDS | None, typer.Option(parser=one_of(LEGENDS), help="where the legend is (default: where it has room)")
    ] = None
    data: Annotated[
        str | None, typer.Option(parser=new_csv, metavar="FILE", help="also write what is drawn as a table (.csv)")
    ] = None

    @property
    def look(self) -> Look:
        from pstar_sim.report.paper import Look

        width, height = self.size or (None, None)
        return Look(width=width, height=height, legend=self.legend)

    @property
    def dpi(self) -> int:
        """Of pixels: a narrow picture is printed, or drawn large."""
        return 300 if self.look.scale < 1 else 150


@dataclass(frozen=True, kw_only=True)
class SettingFlags:
    """The settings of the training."""

    SECTION = "setting"

    update: Annotated[
        UPDATES,
        typer.Option(
            parser=one_of(UPDATES),
            help="when Adam may run: in optimizer.step(), or in backward as soon as a gradient is final",
        ),
    ] = "step"
    clip: Annotated[
        bool | None,
        typer.Option("--clip/--no-clip", help="clip gradients by their global norm (default: clip, or as --like says)"),
    ] = None
    loop: Annotated[
        LOOPS,
        typer.Option(
            parser=one_of(LOOPS),
            help="who runs the iterations: your own loop, micro-batch by micro-batch, or session.step, which can also "
            "run layer by layer",
        ),
    ] = "own"
    sums: Annotated[
        SUMS | None,
        typer.Option(
            parser=one_of(SUMS),
            help="gradients of several micro-batches add up in fp32, or in the dtype of a 16-bit model, as in "
            "plain PyTorch: half of the room, other results (default: 32-bit, or as --like says)",
        ),
    ] = None
    chunk: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="chunk size, such as 128MiB (default: searched for least waste)"),
    ] = None
    effort: Annotated[
        float,
        typer.Option(
            parser=factor,
            metavar="X",
            show_default=False,
            help="effort of a policy that searches, as a multiple of the usual effort (default: 1)",
        ),
    ] = 1.0
