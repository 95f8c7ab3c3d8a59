"""pstar launch: an unchanged script in this process, as by `python SCRIPT`, whose transformers.Trainer trains by a
plan."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pstar_sim.cli.declare import command
from pstar_sim.cli.executor_parts import executor_module
from pstar_sim.cli.flags import DisksFlag, Quiet
from pstar_sim.cli.output import note, say, tell
from pstar_sim.errors import PstarError

if TYPE_CHECKING:
    from pstar_sim.catalog.machine import Machine
    from pstar_sim.core.plan import Plan
    from pstar_sim.core.timeline import Timeline

commands = typer.Typer()

_NOT_SCRIPTS = frozenset({".json", ".yaml", ".yml", ".toml", ".sh", ".ipynb", ".txt", ".parquet"})


@dataclass(frozen=True, kw_only=True)
class _LaunchFlags(DisksFlag):
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="a Python file that trains with transformers.Trainer")]
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGUMENTS", help="of the script", show_default=False),
    ] = None
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="what the script may use of the GPU's memory, context included, such as 24GB (default: all that is "
            "free)",
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="virtual, cuda or cuda:N (default: cuda where there is one)"),
    ] = None
    machine: Annotated[
        str,
        typer.Option(metavar="NAME|FILE.toml", help="the machine to plan for (see pstar calibrate)"),
    ] = "here"
    policy: Annotated[str, typer.Option(metavar="NAME", help="policy that plans")] = "optimal"
    masters: Annotated[
        str | None,
        typer.Option(
            metavar="<fp32|none>",
            help="masters of 16-bit parameters: fp32 (default), or none, as plain PyTorch trains a 16-bit model",
        ),
    ] = None
    quiet: Quiet = False


@command(commands, "pstar launch train.py --gpu-memory 24GB -- --epochs 3")
def launch(*, asked: _LaunchFlags) -> int:
    """Run an unchanged script of a transformers.Trainer (TRL's included) by a plan for this machine. Prints the plan
    and its prediction before training, and the measured figures afterwards. With several GPUs: torchrun
    --nproc-per-node 2 -m pstar_sim launch SCRIPT. The exit status of a script that fails is its own."""
    script = Path(asked.script)
    if not script.is_file():
        raise PstarError(f"argument SCRIPT: {asked.script} is not a file; give the Python file that trains")
    if script.suffix.lower() in _NOT_SCRIPTS:
        raise PstarError(
            f"argument SCRIPT: {asked.script} is not a Python file; give the Python file that trains (a plan runs by "
            "`pstar run PLAN --model M`; a framework's configuration is for --like of fits and compare)"
        )
    _check_flags(asked)
    hf = executor_module("hf")
    if find_spec("transformers") is None:  # the script imports it, by its own environment
        raise PstarError(
            "pstar launch is for scripts of a transformers.Trainer: transformers is not installed; install pstar-sim "
            "with the extra 'hf'"
        )
    first = os.environ.get("RANK", "0") == "0"
    report = _Report(quiet=asked.quiet or not first)
    request = executor_module("offloading").Request(
        gpu_memory=asked.gpu_memory,
        device=asked.device,
        machine=asked.machine,
        policy=asked.policy,
        masters=asked.masters,
        disks=asked.folders,
        on_plan=report.announce,
    )
    with hf.trainers_offloaded(request, report.compare) as begun:
        status = _run(script, asked.arguments or ())
        if not begun and not status:
            raise PstarError(
                f"{asked.script} ended without Trainer.train(): nothing ran by a plan; `pstar launch` is for "
                "scripts of a transformers.Trainer (a loop of your own: executor.offload)"
            )
    return status


def _check_flags(asked: _LaunchFlags) -> None:
    from pstar_sim.catalog.loader import load_machine
    from pstar_sim.policy.registry import find_policy

    load_machine(asked.machine, gpu_memory=asked.gpu_memory, disks=asked.folders)
    find_policy(asked.policy)
    if asked.device is not None and asked.device != "virtual" and not asked.device.startswith("cuda"):
        raise PstarError(f"device {asked.device!r} is not known; use --device virtual, cuda or cuda:N")


def _run(script: Path, arguments: Sequence[str]) -> int:
    """An exception of the script is printed as by Python, with status 1."""
    with _as_main(script, arguments):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return end.code or 0
            sys.stderr.write(f"{end.code}\n")
            return 1
        except (PstarError, KeyboardInterrupt):
            raise
        except Exception as error:
            _print_own(error, script)
            return 1
    return 0


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def _print_own(error: Exception, script: Path) -> None:
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename != str(script):
        tb = tb.tb_next
    traceback.print_exception(type(error), error, tb)


class _Report:
    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self._predicted: tuple[Plan, Machine, Timeline] | None = None

    def announce(self, plan: Plan) -> None:
        """With predicted seconds and bytes."""
        with self._while_read():
            self._announce(plan)

    def _announce(self, plan: Plan) -> None:
        if self.quiet:
            return
        from pstar_sim.cli.run_report import predicted_bar, predicted_from
        from pstar_sim.units import format_bytes, format_params, format_s

        machine, timeline = self._predict(plan)
        w, peaks, moved = plan.workload, timeline.peak_bytes, timeline.moved_bytes
        tell(
            f"{w.model}: {format_params(w.params)} parameters in {w.dtype}, "
            f"{w.micro_batches} x batch {w.batch} per step"
            f"{', activations recomputed' if w.checkpointing else ''}"
        )
        tell(executor_module("offloading").describe(plan))
        tell(
            f"predicted: {format_s(timeline.iteration_s)} per step ({predicted_bar(plan, machine)}), "
            f"GPU {format_bytes(peaks['gpu'])} of "
            f"{format_bytes(plan.gpu_budget_bytes)}, host {format_bytes(peaks['host'])} of "
            f"{format_bytes(plan.host_budget_bytes)}, {format_bytes(moved['h2d'])} to the GPU and "
            f"{format_bytes(moved['d2h'])} to the host per step"
        )
        tell(f"predicted from: {predicted_from(plan, machine)}")

    def _predict(self, plan: Plan) -> tuple[Machine, Timeline]:
        from pstar_sim.cli.run_report import machine_here, predictor

        if self._predicted is None or self._predicted[0] is not plan:
            virtual = plan.machine.gpu.name == "virtual"
            machine = machine_here(plan, (float("inf"), float("inf")), virtual=virtual)
            self._predicted = plan, machine, predictor(machine)(plan)
        return self._predicted[1:]

    def compare(self, session: Any) -> None:
        with self._while_read():
            self._compare(session)

    @contextmanager
    def _while_read(self) -> Iterator[None]:
        """Falls silent where nobody reads it (`pstar launch ... | head`); the script goes on."""
        try:
            yield
        except BrokenPipeError:
            self.quiet = True

    def _compare(self, session: Any) -> None:
        if self.quiet:
            return
        from pstar_sim.cli.run_report import is_lower_bound, predictor, smaller_batches
        from pstar_sim.report.run_figures import figures, figures_text
        from pstar_sim.terminal import terminal_width
        from pstar_sim.units import format_count

        session.drain()
        plan, status, step = session.plan, session.status(), session.steps.last_on_plan()
        if step is None:
            note(
                f"{plan.workload.model}: none of {status.iterations} steps ran on plan throughout, so that no step is "
                f"compared with the prediction; last: {status.last_deviation}"
            )
            return
        measured = session.timeline(step.number)
        machine, predicted = self._predict(plan)
        if not step.planned:
            predicted = predictor(machine)(smaller_batches(plan, machine, step.shares))
        name = f"iteration{', at least' if is_lower_bound(plan, machine) else ''}_s"
        rows = figures(
            {
                name: predicted.iteration_s,
                **{f"{lane}_bytes": predicted.moved_bytes[lane] for lane in ("h2d", "d2h")},
                "GPU peak_bytes": predicted.peak_bytes["gpu"],
            },
            {
                name: measured.iteration_s,
                **{f"{lane}_bytes": measured.moved_bytes[lane] for lane in ("h2d", "d2h")},
                "GPU peak_bytes": status.gpu_peak_bytes,
            },
        )
        say(figures_text(rows, width=terminal_width()))
        tell(f"{format_count(status.iterations, 'step')}, measured: {_measured_step(step)}; {_deviations(status)}")
        if status.tide is not None:
            tell(str(status.tide))


def _measured_step(step: Any) -> str:
    if step.planned:
        return "the last on plan with the planned batch"
    share = sum(step.shares) / len(step.shares)
    return (
        f"step {step.number}, on plan with smaller batches ({share:.0%} of the planned elements, to which the "
        "predicted compute is scaled)"
    )


def _deviations(status: Any) -> str:
    left = status.deviations - status.other_shapes
    shapes = f", {status.other_shapes} batches of another shape than planned" if status.other_shapes else ""
    if not left:
        return f"all on plan{shapes}"
    times = "once" if left == 1 else f"{left} times"
    return f"a step left the plan {times}{shapes}, last: {status.last_deviation}"
