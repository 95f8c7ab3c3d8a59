"""Commands that need torch: trace and run. The executor is imported when they run, never before."""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from pstar_sim.arguments import parse_bytes, parse_bytes_per_s
from pstar_sim.catalog.machine import Machine
from pstar_sim.cli.planning import checked_plan, picture_kind, save_perfetto, save_picture, say, say_json, tell
from pstar_sim.cli.progress import progress
from pstar_sim.core.plan import Plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import ModelError, PstarError
from pstar_sim.report.run import Figure, figures, figures_text, losses_text
from pstar_sim.terminal import terminal_width
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

if TYPE_CHECKING:
    from executor.run import RunResult

__all__ = [
    "check_outputs",
    "compare_with_run",
    "executor_module",
    "explain_run",
    "figures_as_json",
    "machine_here",
    "others_words",
    "predicted_from",
    "predictor",
    "retimed_s",
    "run",
    "save_recording",
    "trace",
    "write_timelines",
]


def executor_module(name: str) -> ModuleType:
    """executor.NAME. Raises ModelError where torch or transformers is missing, naming the extra that brings it."""
    try:
        return importlib.import_module(f"executor.{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in ("torch", "transformers"):
            raise ModelError(
                f"this command needs {error.name}; install it with `pip install 'pstar-sim[executor,hf]'`"
            ) from None
        raise


def trace(args: argparse.Namespace) -> int:
    from pstar_sim.workload.trace import save_trace

    capture = executor_module("capture")
    shape = {"batch": args.batch, "sequence": args.seq, "dtype": args.dtype, "attention": args.attention}
    variants: tuple[Workload, ...]
    if args.device is None and (args.machine is not None or args.gpu_memory is not None):
        raise PstarError("--machine and --gpu-memory of `pstar trace` are those of a recording; give --device too")
    if args.device is not None:
        if args.variants:
            raise PstarError("--variants traces without running; a recording (--device) is of one variant")
        variants = (record_on_device(args),)
    elif args.variants:
        if args.micro_batches > 1 or args.checkpointing:
            raise ModelError(
                "--variants traces one micro-batch with and without checkpointing: leave --micro-batches and "
                "--checkpointing out"
            )
        variants = capture.capture_variants(args.model, **shape)
    else:
        more = {"micro_batches": args.micro_batches, "checkpointing": args.checkpointing}
        variants = (capture.capture(args.model, **shape, **more),)
    save_trace(variants, args.output)
    if args.json:
        rows = [{"trace": args.output, **_facts(w)} for w in variants]
        say_json({**rows[0], "variants": rows} if args.variants else rows[0])
        return 0
    first = variants[0]
    if not args.variants:
        tell(f"{args.output}: {_model_words(first)}, {_variant_words(first)}")
        return 0
    tell(f"{args.output}: {_model_words(first)}, {len(variants)} variants")
    for w in variants:
        tell(f"  batch {w.batch}: {_variant_words(w)}")
    return 0


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
        "checkpointing": w.checkpointing,
    }


def _model_words(w: Workload) -> str:
    return f"{w.model}, {w.params / 1e6:,.1f} M parameters in {w.dtype}"


def _variant_words(w: Workload) -> str:
    return (
        f"{len(w.moments)} moments, {w.flops / 1e12:.2f} TFLOP, at most {format_bytes(w.peak_non_model_bytes)} of "
        f"non-model data ({w.attention} attention, {'with' if w.checkpointing else 'without'} checkpointing)"
    )


def record_on_device(args: argparse.Namespace) -> Workload:
    """What `pstar trace --device` does: one real iteration, counted and timed."""
    from pstar_sim.catalog.loader import load_machine

    jobs = executor_module("run")
    limit = parse_bytes(args.gpu_memory) if args.gpu_memory is not None else None
    named = load_machine(args.machine) if args.machine is not None else None
    job = jobs.Job(
        model=args.model,
        batch=args.batch,
        sequence=args.seq,
        micro_batches=args.micro_batches,
        dtype=args.dtype,
        checkpointing=args.checkpointing,
        attention=args.attention,
    )
    machine = jobs.recording_machine(args.device, named, limit)
    recorded: Workload = job.record(machine, device=args.device, gpu_memory=limit)
    return recorded


def run(args: argparse.Namespace) -> int:
    """Load, check, measure this machine's rates (unless the plan's machine was calibrated), (record,) train, and say
    what was predicted and what was measured."""
    check_outputs(args)
    plan, _ = checked_plan(args.plan)
    jobs = executor_module("run")
    executor_module("checks").check_processes(plan, 1, file=args.plan, model=args.model)
    jobs.check_device(plan, args.device)
    link = plan.machine.link
    limit = parse_bytes_per_s(args.bandwidth) if args.bandwidth is not None else None
    bandwidth = (limit or link.h2d_bytes_per_s, limit or link.d2h_bytes_per_s)
    keeping = jobs.Keeping(save=args.save, every=args.save_every, resume=args.resume)
    keeping.check(args.steps)
    job = jobs.Job.of_plan(plan, args.model, data=args.data, lr=args.lr, seed=args.seed, weights=args.weights)
    virtual = args.device == "virtual"
    memory = parse_bytes(args.gpu_memory) if args.gpu_memory is not None else None
    measured_machine = machine_here(plan, bandwidth, virtual=virtual)
    if args.record is not None:
        save_recording(job.record(plan.machine, device=args.device, gpu_memory=memory), measured_machine, args)
    predict = predictor(measured_machine)
    predict(plan)
    with progress(args.steps, plan, quiet=args.json or args.quiet) as on_step:
        result = job.run(
            plan,
            steps=args.steps,
            device=args.device,
            bandwidth=bandwidth if virtual or limit is not None else None,
            gpu_memory=memory,
            order=predict,
            keeping=keeping,
            on_step=on_step,
        )
    plan, predicted = result.plan, predict(result.plan)
    write_timelines(args, plan, predicted, result)
    rows = compare_with_run(plan, predicted, result)
    if args.json:
        say_json(
            {
                "policy": plan.policy,
                "model": plan.workload.model,
                "steps": args.steps,
                "losses": [r.loss for r in result.reports],
                "step_s": [r.time_s for r in result.reports],
                "first_step": result.reports[0].step,
                "notes": list(result.notes),
                "deviations": list(result.deviations),
                "tide": str(result.tide) if result.tide is not None else None,
                "figures": figures_as_json(rows),
                "predicted_from": predicted_from(plan, measured_machine),
                "taken_by_others": result.taken_by_others,
            }
        )
        return 0
    losses = {plan.policy: [r.loss for r in result.reports]}
    say(losses_text(losses, width=terminal_width(), first=result.reports[0].step, most=6))
    say(figures_text(rows, width=terminal_width()))
    tell(explain_run(plan, measured_machine, result))
    return 0


def predictor(machine: Machine) -> Callable[[Plan], Timeline]:
    """Predicts plans on `machine`, each once: a run may end with another plan than it began with."""
    from pstar_sim.planner.compare import play_plan

    known: dict[int, tuple[Plan, Timeline]] = {}

    def predict(plan: Plan) -> Timeline:
        if id(plan) not in known:
            known[id(plan)] = plan, play_plan(replace(plan, machine=machine))
        return known[id(plan)][1]

    return predict


def machine_here(plan: Plan, bandwidth: tuple[float, float], *, virtual: bool) -> Machine:
    """The machine that a run of the plan is predicted for. bandwidth: bytes per second of the virtual link, (to the
    gpu, to the host)."""
    if not virtual:
        return plan.machine
    rates = executor_module("measuring.rates")
    found: Machine
    if plan.machine.gpu.launch_s is not None and plan.machine.confidence == "calibrated":
        found = rates.throttled(plan.machine, *bandwidth)  # the plan's own prediction stands
    else:
        found = rates.measure_virtual_machine(plan.machine, h2d_bytes_per_s=bandwidth[0], d2h_bytes_per_s=bandwidth[1])
    return found


def save_recording(recorded: Workload, machine: Machine, args: argparse.Namespace) -> None:
    """What --record keeps: the trace, and the rates measured here as a machine file of the same name."""
    from pstar_sim.catalog.writing import save_machine
    from pstar_sim.workload.trace import save_trace

    save_trace(recorded, args.record)
    machine_file = Path(args.record).with_suffix(".toml")
    save_machine(machine, machine_file)
    if not args.json:
        tell(f"warm-up recorded: {args.record}; rates measured here: {machine_file}")


def check_outputs(args: argparse.Namespace) -> None:
    """Raise PstarError where two flags name one file (the second would take the place of the first), and where --plot
    names no kind of picture."""
    named: dict[Path, str] = {}
    for flag in ("record", "timeline", "perfetto", "plot"):
        name = getattr(args, flag)
        if name is None:
            continue
        path = Path(name).resolve()
        paths = [path, path.with_suffix(".toml")] if flag == "record" else [path]
        for one in paths:
            if one in named:
                raise PstarError(
                    f"--{named[one]} and --{flag} would both write {one.name}; give each a file of its own"
                )
            named[one] = flag
    if args.plot is not None:
        picture_kind(Path(args.plot))


def write_timelines(args: argparse.Namespace, plan: Plan, predicted: Timeline, result: RunResult) -> None:
    """The files that lay the measured timeline beside the predicted one, as far as they were asked for."""
    asked = [name for name in (args.timeline, args.perfetto, args.plot) if name is not None]
    if result.timeline is None:
        for name in asked:
            sys.stderr.write(f"pstar: {name} is not written: the last iteration did not run on plan\n")
        return
    if args.timeline is not None:
        from pstar_sim.core.run_file import RunTimelines

        RunTimelines(predicted=predicted, measured=result.timeline).save(args.timeline)
    if args.perfetto is not None:
        save_perfetto([predicted, result.timeline], plan, Path(args.perfetto))
    if args.plot is not None:
        from pstar_sim.report.tide import tide_figure

        w = plan.workload
        each = " per GPU" if len(plan.machine.ranks) > 1 else ""
        title = f"{plan.policy}, {w.model}, batch {w.batch}{each}: predicted (areas) and measured (lines)"
        save_picture(tide_figure([predicted], measured=result.timeline, title=title), Path(args.plot), dpi=150)


def compare_with_run(plan: Plan, predicted: Timeline, result: RunResult) -> list[Figure]:
    """Predicted beside measured: seconds are the median step after the first, bytes those of the measured iteration.

    "re-timed" is the same plan, simulated with the seconds that its steps took in the run (sim/retime.py).
    """
    times = [r.time_s for r in result.reports]
    step_s = statistics.median(times[1:] or times)
    wanted: dict[str, float] = {"iteration_s": predicted.iteration_s}
    found: dict[str, float] = {"iteration_s": step_s}
    if result.timeline is not None:
        if (again_s := retimed_s(plan, result.timeline)) is not None:
            wanted["re-timed_s"], found["re-timed_s"] = again_s, step_s
        wanted |= {"h2d_bytes": predicted.moved_bytes["h2d"], "d2h_bytes": predicted.moved_bytes["d2h"]}
        found |= {"h2d_bytes": result.timeline.moved_bytes["h2d"], "d2h_bytes": result.timeline.moved_bytes["d2h"]}
    if result.measured is not None and result.measured.on_plan:
        wanted |= {"GPU peak_bytes": predicted.peak_bytes["gpu"], "host peak_bytes": predicted.peak_bytes["host"]}
        found |= {"GPU peak_bytes": result.measured.peak_gpu_bytes, "host peak_bytes": result.measured.peak_host_bytes}
    return figures(wanted, found)


def retimed_s(plan: Plan, measured: Timeline) -> float | None:
    """Seconds of the re-timed iteration; None for ranks that differ, whose plan is simulated with seconds of their
    own."""
    from pstar_sim.sim.ranks import classes_of
    from pstar_sim.sim.retime import retime

    return None if len(set(classes_of(plan.machine))) > 1 else retime(plan, measured)


def figures_as_json(rows: Sequence[Figure]) -> list[dict[str, object]]:
    return [{"name": r.name, "unit": r.unit, "predicted": r.predicted, "measured": r.measured} for r in rows]


def predicted_from(plan: Plan, machine: Machine) -> str:
    """What the predicted seconds of a run of the plan on `machine` (see `machine_here`) rest on."""
    w = plan.workload
    if w.recorded_on is not None and w.recorded_on == machine.name:
        compute = "compute as recorded in a warm-up"
    elif machine.gpu.measured and "measured here" in machine.gpu.source:
        compute = "compute by the rate of one matrix product measured at the start (a trace without a warm-up)"
    else:
        compute = f"compute by the {machine.confidence} rates of {machine.name}"
    if machine.host.measured and "measured here" in machine.host.source:
        return f"{compute}; copies and CPU Adam by rates measured at the start"
    return f"{compute}; copies and CPU Adam by the {machine.confidence} rates of {machine.name}"


def explain_run(plan: Plan, machine: Machine, result: RunResult) -> str:
    """Lines below the table: what the figures are, what the prediction rests on, whether other programs disturbed the
    run, and how the run left the plan if it did. machine: the one that the run was predicted for."""
    steps = len(result.reports)
    counted = f"median of steps 2 to {steps}" if steps > 2 else "of the last step" if steps == 2 else "of the one step"
    lines = [
        *result.notes,
        (
            f"iteration: {counted}; bytes: counted where they are copied or allocated, the GPU peak in one more, "
            "untimed iteration in the predicted order"
        ),
        f"predicted from: {predicted_from(plan, machine)}",
    ]
    if result.tide is not None:
        lines.append(str(result.tide))
    if result.timeline is None:
        lines.append("no iteration ran on plan: bytes were not measured")
    else:
        lines.append(
            "re-timed: the same plan simulated with the seconds that its steps took in this run; the rest of the "
            "difference above is the machine's (rates that changed since they were measured)"
        )
    lines.append(others_words(result.taken_by_others))
    if result.deviations:
        lines.append(f"the run left the plan {len(result.deviations)} times, first: {result.deviations[0]}")
    return "\n".join(lines)


BUSY = 0.1
"""Share of the processor time from which on other programs are worth a warning."""


def others_words(share: float | None) -> str:
    if share is None:
        return "other programs: their processor time is not measurable here"
    words = f"other programs had {share:.0%} of this machine's processor time meanwhile"
    return f"{words}: run again when the machine is idle" if share > BUSY else words
