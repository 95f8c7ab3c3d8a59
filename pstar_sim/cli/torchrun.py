"""`torchrun --nproc-per-node N -m executor PLAN --model MODEL`: trains a model by name on several ranks.

The command does on several ranks what `pstar run` does in one process, with the same flags. The first rank prints and
writes. If a file's name contains {rank}, each rank writes its own file. Every process of torchrun runs `main`; torch is
imported with this module.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import typer

from executor.compatibility import check_processes
from executor.distributed.processes import Processes, processes_of
from executor.run import Keeping, RunResult, TrainingJob, check_hardware
from pstar_sim.arguments import parse_bytes, parse_bytes_per_s
from pstar_sim.catalog.machine import Machine
from pstar_sim.cli.declare import command
from pstar_sim.cli.exit_status import status_of
from pstar_sim.cli.output import say, say_table, tell
from pstar_sim.cli.progress import progress
from pstar_sim.cli.run_flags import RunFlags
from pstar_sim.cli.run_report import (
    OUTPUTS,
    check_outputs,
    machine_here,
    others_words,
    predicted_from,
    predictor,
    retimed_s,
    save_recording,
    try_outputs,
    write_timelines,
)
from pstar_sim.cli.usage import run_app
from pstar_sim.core.plan import Plan, load_plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import PstarError
from pstar_sim.units import format_bytes, format_s

__all__ = ["main"]

RANK = "{rank}"  # in a file's name: replaced by the number of the rank


app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of one rank. Returns the exit status: 0; after an error, which is one line on stderr, 2 or 3
    (`pstar_sim.cli.exit_status`)."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        return run_app(app, "torchrun --nproc-per-node N -m executor", sys.argv[1:] if arguments is None else arguments)
    except PstarError as error:
        sys.stderr.write(f"pstar: {' '.join(str(error).split())}\n")
        return status_of(error)


@command(app, "torchrun --nproc-per-node 2 -m executor plan.json --model hf:gpt2 --timeline run.{rank}.json")
def run(*, flags: RunFlags) -> int:
    """Train a real model by a plan of N ranks: `pstar run` in N processes, of which the first prints."""
    check_outputs(flags)
    plan = load_plan(flags.plan)
    check_hardware(plan, flags.device)
    with processes_of(flags.device) as processes:
        _run(flags, plan, processes)
    return 0


def _run(flags: RunFlags, plan: Plan, processes: Processes) -> None:
    rank, device, virtual = processes.rank, processes.device, flags.device == "virtual"
    check_processes(plan, processes.count, file=flags.plan, model=flags.model)
    mine = processes.on_all(lambda: _files_of(flags, rank))
    keeping = Keeping(save=flags.save, every=flags.save_every, resume=flags.resume)
    keeping.check(flags.steps)
    job = TrainingJob.of_plan(plan, flags.model, data=flags.data, lr=flags.lr, seed=flags.seed, weights=flags.weights)
    rate = parse_bytes_per_s(flags.bandwidth) if flags.bandwidth is not None else None
    memory = parse_bytes(flags.gpu_memory) if flags.gpu_memory is not None else None
    link = plan.machine.link
    bandwidth = (rate or link.h2d_bytes_per_s, rate or link.d2h_bytes_per_s)
    # All ranks measure at the same time, as they will run. One prediction is used for all: see `predicted`.
    here = processes.of_first(machine_here(plan, bandwidth, virtual=virtual))
    if (recording := flags.record) is not None:
        alone = processes.group_of_first()

        def record() -> None:
            if rank == 0:
                one = _first_rank_of(plan.machine)
                save_recording(
                    job.record(one, device=device, gpu_memory=memory, group=alone), here, recording, quiet=flags.json
                )

        processes.on_all(record)
    # The order of the measured iteration has to be the same on every rank: the ranks wait for each other in it.
    predict = predictor(here)
    predict(plan)
    with progress(flags.steps, plan, quiet=flags.json or flags.quiet or rank > 0) as on_step:
        result = job.run(
            plan,
            steps=flags.steps,
            device=device,
            bandwidth=bandwidth if virtual else None,
            gpu_memory=memory,
            order=predict,
            keeping=keeping,
            on_step=on_step,
        )
    plan, predicted = result.plan, predict(result.plan)
    write_timelines(mine, plan, predicted, result)
    if rank == 0:
        _say(plan, here, predicted, result, as_json=flags.json)


def _files_of(flags: RunFlags, rank: int) -> RunFlags:
    """Sets the files of other ranks to None. Raises PstarError for a file that cannot be written."""
    names: dict[str, str | None] = {}
    for flag in OUTPUTS:
        name = getattr(flags, flag)
        if name is None:
            continue
        if flag == "record" and RANK in name:
            raise PstarError(f"--record {name}: one rank records, for all; leave {RANK} out")
        names[flag] = name.replace(RANK, str(rank)) if RANK in name or rank == 0 else None
    mine = replace(flags, **names)  # type: ignore[arg-type]
    try_outputs(mine)
    return mine


def _first_rank_of(machine: Machine) -> Machine:
    return replace(machine, ranks=(replace(machine.ranks[0], batch_share=1.0),), nodes=1)


def _say(plan: Plan, machine: Machine, predicted: Timeline, result: RunResult, *, as_json: bool) -> None:
    said = _Said(plan=plan, machine=machine, predicted=predicted, result=result)
    if as_json:
        sys.stdout.write(json.dumps(said.figures()) + "\n")
        return
    ranks, losses = said.ranks, said.losses
    several = f"{ranks} ranks" if ranks > 1 else "one rank"
    tell(f"{plan.policy}: {plan.workload.model} on {several}, {len(losses)} steps of {plan.tokens} tokens\n")
    say_table(("step", "loss", "seconds", "tokens/s"), said.step_rows())
    say("")
    say_table(("", "predicted", "measured"), said.predicted_rows())
    say("")
    tell("\n".join(said.notes()))


@dataclass(frozen=True, kw_only=True)
class _Said:
    """The figures of a run of several ranks, from the view of one rank."""

    plan: Plan
    machine: Machine
    predicted: Timeline
    result: RunResult

    @property
    def ranks(self) -> int:
        return self.plan.machine.world_size

    @cached_property
    def times(self) -> list[float]:
        return [report.time_s for report in self.result.reports]

    @cached_property
    def step_s(self) -> float:
        """Median seconds per step, without the first step if there are others."""
        return statistics.median(self.times[1:] or self.times)

    @cached_property
    def losses(self) -> Sequence[float]:
        shared = self.result.shared
        return [report.loss for report in self.result.reports] if shared is None else shared.losses

    @cached_property
    def again_s(self) -> float | None:
        """Seconds of the plan, simulated with the measured seconds of this rank's steps."""
        return None if self.result.timeline is None else retimed_s(self.plan, self.result.timeline)

    @cached_property
    def peaks_at_most(self) -> int:
        return self.plan.check().peak_bytes["gpu"]

    @cached_property
    def moved(self) -> dict[str, int]:
        """Measured bytes by lane."""
        here, shared = self.result.measured, self.result.shared
        return {**(here.moved_bytes if here is not None else {}), **({"net": shared.sent_bytes} if shared else {})}

    @cached_property
    def peaks(self) -> list[int]:
        """GPU peaks in bytes, of the ranks that reported a peak."""
        here, shared = self.result.measured, self.result.shared
        if shared is not None:
            return list(shared.peak_gpu_bytes)
        return [here.peak_gpu_bytes] if here is not None else []

    @property
    def transient(self) -> int:
        return 0 if self.result.shared is None else self.result.shared.transient_bytes

    def figures(self) -> dict[str, object]:
        plan, result, wanted = self.plan, self.result, self.plan.moved_bytes
        return {
            "policy": plan.policy, "model": plan.workload.model, "ranks": self.ranks,
            "first_step": result.reports[0].step, "losses": list(self.losses),
            "step_s": self.times, "tokens_per_s": self.plan.tokens / self.step_s, "peak_gpu_bytes": self.peaks,
            "peak_gpu_bytes_at_most": self.peaks_at_most, "transient_bytes": self.transient, "moved_bytes": self.moved,
            "predicted_moved_bytes": {lane: wanted.get(lane, 0) for lane in self.moved},
            "predicted_iteration_s": self.predicted.iteration_s, "retimed_iteration_s": self.again_s,
            "predicted_from": predicted_from(plan, self.machine), "taken_by_others": result.taken_by_others,
            "notes": list(result.notes), "deviations": list(result.deviations),
            "tide": str(result.tide) if result.tide is not None else None,
        }  # fmt: skip

    def step_rows(self) -> list[tuple[str, str, str, str]]:
        first, count = self.result.reports[0].step, len(self.losses)
        from_ = count - 5 if count > 6 else 0
        return [
            (str(first + i), f"{loss:.4f}", f"{self.times[i]:.3f}", f"{self.plan.tokens / self.times[i]:,.0f}")
            for i, loss in enumerate(self.losses)
            if i == 0 or i >= from_
        ]

    def predicted_rows(self) -> list[tuple[str, str, str]]:
        wanted, moved = self.plan.moved_bytes, self.moved
        rows = [("iteration", format_s(self.predicted.iteration_s), format_s(self.step_s))]
        if self.again_s is not None:
            rows.append(("re-timed", format_s(self.again_s), format_s(self.step_s)))
        if self.peaks:
            most = f"<= {format_bytes(self.peaks_at_most)}"
            rows.append(("GPU peak of a rank", most, format_bytes(max(self.peaks))))
        for lane, name in (("h2d", "to the GPU"), ("d2h", "to the host"), ("net", "to other ranks")):
            if lane in moved:
                rows.append((name, format_bytes(wanted.get(lane, 0)), format_bytes(moved[lane])))
        return rows

    def notes(self) -> list[str]:
        everywhere = ", on all ranks at once" if self.ranks > 1 else ""
        return [
            *self.result.notes,
            "iteration: median of the steps after the first, on this rank",
            f"predicted from: {predicted_from(self.plan, self.machine)}{everywhere}",
            "re-timed: the same plan simulated with the seconds that this rank's steps took in this run",
            others_words(self.result.taken_by_others),
            f"a slice that changes place holds {format_bytes(self.transient)} more for the time of a copy",
        ]
