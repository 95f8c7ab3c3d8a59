"""Commands that need torch: trace and run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from pstar_sim.cli.bars import bar
from pstar_sim.cli.declare import command
from pstar_sim.cli.executor_parts import executor_module
from pstar_sim.cli.flag_values import model_names, natural, positive, tokens
from pstar_sim.cli.flags import MicroBatches, output
from pstar_sim.cli.output import Header, note, say, say_answer, tell
from pstar_sim.cli.recording import trace_snapshots
from pstar_sim.cli.run_flags import RunFlags
from pstar_sim.errors import ModelError, PstarError
from pstar_sim.workload.axes import Axes

if TYPE_CHECKING:
    from pstar_sim.workload.workload import Workload

commands = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class _TraceFlags(Axes):
    OF_MODULES = True

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=model_names,
            help="a preset's name, hf:FILE (a transformers config.json), hf:ORG/NAME, or py:package.module:factory",
        ),
    ] = None
    batch: Annotated[
        int | None, typer.Option(parser=positive, metavar="B", help="sequences per micro-batch, of one GPU")
    ] = None
    seq: Annotated[int | None, typer.Option(parser=tokens, metavar="S", help="tokens per sequence")] = None
    micro_batches: MicroBatches = 1
    variants: Annotated[
        bool,
        typer.Option(
            "--variants",
            help="write several variants into one file, from which `pstar plan --global-batch` chooses: the batch, "
            "half and a quarter of it, each with and without recomputing activations",
        ),
    ] = False
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="record a real iteration, with seconds, on virtual, cuda or cuda:N (default: nothing runs)",
        ),
    ] = None
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.toml",
            help="with --device: the machine that this is, whose seconds are recorded (see pstar calibrate)",
        ),
    ] = None
    gpu_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="with --device: GPU memory that the recording may use, such as 24GB"),
    ] = None

    def needed(self, path: str | None) -> tuple[str, int, int, str]:
        """Raises PstarError naming those missing."""
        if self.model is None or self.batch is None or self.seq is None or path is None:
            given = {"MODEL": self.model, "--batch": self.batch, "--seq": self.seq, "-o/--output": path}
            missing = ", ".join(name for name, value in given.items() if value is None)
            raise PstarError(f"the following arguments are required: {missing} (see `pstar trace --help`)")
        return self.model, self.batch, self.seq, path


@dataclass(frozen=True, kw_only=True)
class _SnapshotFlags:
    SECTION = "a snapshot of torch, instead of MODEL"

    from_snapshot: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="what torch.cuda.memory._dump_snapshot wrote: what the GPU holds at its peak; -o FILE.png or "
            "FILE.json keeps the tide; may be given several times",
        ),
    ] = None
    like: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE",
            help="a trace of the same model and batch, whose moments get the snapshot's non-model bytes in -o "
            "FILE.parquet",
        ),
    ] = None
    cuda: Annotated[
        int | None,
        typer.Option(parser=natural, metavar="N", help="device of the snapshot (default: the one that held most)"),
    ] = None

    def __post_init__(self) -> None:
        if not self.from_snapshot and (self.like is not None or self.cuda is not None):
            raise typer.BadParameter("--like and --cuda of `pstar trace` go with --from-snapshot")


@command(
    commands,
    "pstar trace hf:gpt2 --batch 4 --seq 1024 -o gpt2.parquet\n"
    "example: pstar trace --from-snapshot snapshot.pickle -o tide.png",
)
def trace(
    *,
    asked: _TraceFlags,
    snapshot: _SnapshotFlags,
    path: Annotated[str | None, output("the trace file to write (.parquet)")] = None,
    json: Annotated[bool, typer.Option("--json", help="what was traced as a JSON object")] = False,
) -> int:
    """Trace one training iteration of a model, without a GPU and without its memory; or read the memory snapshot of a
    run."""
    from pstar_sim.workload.trace import save_trace

    if snapshot.from_snapshot:
        if asked.model is not None:
            raise PstarError(f"trace a model ({asked.model}) or read --from-snapshot: not both")
        return trace_snapshots(snapshot.from_snapshot, snapshot.like, path, device=snapshot.cuda, as_json=json)
    model, batch, seq, path = asked.needed(path)
    capture = executor_module("capture")
    from pstar_sim.cli.inputs import axes_of

    shape = {"batch": batch, "sequence": seq, **axes_of(asked)}
    variants: tuple[Workload, ...]
    if asked.device is None and (asked.machine is not None or asked.gpu_memory is not None):
        raise PstarError("--machine and --gpu-memory of `pstar trace` are for a recording; give --device too")
    if asked.device is not None:
        if asked.autocast:
            raise PstarError("--autocast traces without running the model; leave --device out")
        if asked.lora is not None:
            raise PstarError(
                "--lora traces without running the model; leave --device out, or record a model that has its adapters: "
                "pstar trace py:MODULE:FACTORY"
            )
        if asked.variants:
            raise PstarError(
                "--variants traces without running the model; a recording (--device) has one variant: leave one of "
                "them out"
            )
        with bar(f"recording {model}", quiet=json):
            variants = (record_on_device(asked),)
    elif asked.variants:
        if asked.micro_batches > 1 or asked.checkpointing:
            raise ModelError(
                "--variants traces one micro-batch with and without checkpointing: leave --micro-batches and "
                "--checkpointing out"
            )
        with bar(f"tracing {model}", quiet=json):
            variants = capture.capture_variants(model, **shape)
    else:
        with bar(f"tracing {model}", quiet=json):
            variants = (capture.capture(model, micro_batches=asked.micro_batches, **shape),)
    if not asked.variants:
        _note_own_shape(variants[0], model, batch, seq)
    save_trace(variants, path)
    if json:
        rows = [{"trace": path, **_facts(w)} for w in variants]
        said = {**rows[0], "notes": [variants[0].notes] if variants[0].notes else []}
        say_answer(Header(), **said, **({"variants": rows} if asked.variants else {}))
        return 0
    first = variants[0]
    if not asked.variants:
        tell(f"{path}: {_model_words(first)}, {_variant_words(first)}")
    else:
        tell(f"{path}: {_model_words(first)}, {len(variants)} variants")
        for w in variants:
            tell(f"  batch {w.batch}: {_variant_words(w)}")
    if first.notes:
        tell(f"note: {first.notes}")
    return 0


def _note_own_shape(w: Workload, model: str, batch: int, seq: int) -> None:
    if not model.startswith("py:"):
        return
    for name, flag, own, wanted in (
        ("batch", "--batch", w.batch, batch),
        ("sequence", "--seq", w.sequence, seq),
    ):
        if own not in (wanted, 1 if name == "sequence" else wanted):
            note(f"{model} takes no `{name}`: its own batch is traced, with {name} {own}, not {flag} {wanted}")


def _facts(w: Workload) -> dict[str, object]:
    return {
        "model": w.model,
        "params": w.params,
        "dtype": w.dtype,
        "batch": w.batch,
        "moments": len(w.moments),
        "flops": w.flops,
        "peak_non_model_bytes": w.peak_non_model_bytes,
        "attention": w.attention,
        **w.said,
        "checkpointing": w.checkpointing,
    }


def _model_words(w: Workload) -> str:
    from pstar_sim.units import format_params

    return f"{w.model}, {format_params(w.params)} parameters in {w.dtype}"


def _variant_words(w: Workload) -> str:
    from pstar_sim.units import format_bytes

    how = f"{w.attention} attention, {w.kernels} kernels, {'with' if w.checkpointing else 'without'} checkpointing"
    return (
        f"{len(w.moments)} moments, {w.flops / 1e12:.2f} TFLOP, at most {format_bytes(w.peak_non_model_bytes)} of "
        f"non-model data ({how})"
    )


def record_on_device(asked: _TraceFlags) -> Workload:
    """One real iteration, counted and timed."""
    from pstar_sim.arguments import parse_bytes
    from pstar_sim.catalog.loader import load_machine

    jobs = executor_module("run")
    limit = parse_bytes(asked.gpu_memory) if asked.gpu_memory is not None else None
    named = load_machine(asked.machine) if asked.machine is not None else None
    job = jobs.TrainingJob(
        model=asked.model,
        batch=asked.batch,
        sequence=asked.seq,
        micro_batches=asked.micro_batches,
        **asked.given,
    )
    machine = jobs.recording_machine(asked.device, named, limit)
    recorded: Workload = job.record(machine, device=asked.device, gpu_memory=limit)
    return recorded


@command(commands, "pstar run plan.json --model hf:gpt2 --steps 20 --bandwidth 2GB/s")
def run(*, flags: RunFlags) -> int:
    """Train a real model by a plan, and compare predicted with measured figures."""
    from pstar_sim.arguments import parse_bytes, parse_bytes_per_s
    from pstar_sim.cli import run_report
    from pstar_sim.cli.planning import checked_plan
    from pstar_sim.cli.progress import progress
    from pstar_sim.report.run_figures import figures_text, losses_text
    from pstar_sim.terminal import terminal_width

    try:
        run_report.try_outputs(flags)
    except PstarError as error:
        raise typer.BadParameter(str(error)) from None
    run_report.check_outputs(flags)
    plan, _ = checked_plan(flags.plan)
    jobs = executor_module("run")
    executor_module("compatibility").check_processes(plan, 1, file=flags.plan, model=flags.model)
    jobs.check_device(plan, flags.device)
    link = plan.machine.link
    limit = parse_bytes_per_s(flags.bandwidth) if flags.bandwidth is not None else None
    bandwidth = (limit or link.h2d_bytes_per_s, limit or link.d2h_bytes_per_s)
    keeping = jobs.Keeping(save=flags.save, every=flags.save_every, resume=flags.resume, newest=flags.keep)
    keeping.check(flags.steps)
    job = jobs.TrainingJob.of_plan(
        plan, flags.model, data=flags.data, lr=flags.lr, seed=flags.seed, weights=flags.weights
    )
    virtual = flags.device == "virtual"
    memory = parse_bytes(flags.gpu_memory) if flags.gpu_memory is not None else None
    with bar("measuring this machine's rates", quiet=flags.json or flags.quiet):
        measured_machine = run_report.machine_here(plan, bandwidth, virtual=virtual)
    if flags.record is not None:
        with bar("recording the warm-up", quiet=flags.json or flags.quiet):
            recorded = job.record(plan.machine, device=flags.device, gpu_memory=memory)
        run_report.save_recording(recorded, measured_machine, flags.record, quiet=flags.json)
    predict = run_report.predictor(measured_machine)
    predict(plan)
    with progress(flags.steps, plan, quiet=flags.json or flags.quiet) as on_step:
        result = job.run(
            plan,
            steps=flags.steps,
            device=flags.device,
            bandwidth=bandwidth if virtual or limit is not None else None,
            gpu_memory=memory,
            order=predict,
            keeping=keeping,
            on_step=on_step,
            logs=flags.log or (),
            disks=flags.folders,
        )
    plan, predicted = result.plan, predict(result.plan)
    run_report.write_timelines(flags, plan, predicted, result)
    if flags.json:
        figures = run_report.RunFigures(plan=plan, machine=measured_machine, predicted=predicted, result=result)
        header = Header(model=plan.workload.model, machine=measured_machine.name)
        say_answer(header, **figures.to_json(steps=flags.steps))
        return 0
    rows = run_report.compare_with_run(plan, predicted, result)
    losses = {plan.policy: [r.loss for r in result.reports]}
    say(losses_text(losses, width=terminal_width(), first=result.reports[0].step, most=6))
    say(figures_text(rows, width=terminal_width()))
    tell(run_report.explain_run(plan, measured_machine, result))
    return 0
