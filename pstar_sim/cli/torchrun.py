"""`torchrun --nproc-per-node N -m executor PLAN --model MODEL`: trains on several ranks.

Flags are `pstar run`'s. The first rank prints and writes, each its own file if the name has {rank}. torch is imported
with this module.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace

import typer

from executor.compatibility import check_processes
from executor.distributed.processes import Processes, processes_of
from executor.run import Keeping, RunResult, TrainingJob, check_hardware
from pstar_sim.arguments import parse_bytes, parse_bytes_per_s
from pstar_sim.catalog.machine import Machine
from pstar_sim.cli.declare import command
from pstar_sim.cli.exit_status import status_of
from pstar_sim.cli.output import Header, say, say_answer, say_table, tell
from pstar_sim.cli.progress import progress
from pstar_sim.cli.run_flags import RunFlags
from pstar_sim.cli.run_report import (
    OUTPUTS,
    RunFigures,
    check_outputs,
    machine_here,
    others_words,
    predicted_from,
    predictor,
    save_recording,
    try_outputs,
    write_timelines,
)
from pstar_sim.cli.usage import run_app
from pstar_sim.core.plan import Plan, load_plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import PstarError, Stopped
from pstar_sim.units import format_bytes, format_s

RANK = "{rank}"  # in a file's name: replaced by the number of the rank


app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


def main(arguments: Sequence[str] | None = None) -> int:
    """One rank's command line. Returns the exit status: 0, or 2 or 3 after an error, which is one line on stderr
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
        try:
            _run(flags, plan, processes)
        except Stopped as stop:  # of all ranks, and the first one says it
            if processes.rank == 0:
                raise
            return status_of(stop)
    return 0


def _run(flags: RunFlags, plan: Plan, processes: Processes) -> None:
    rank, device, virtual = processes.rank, processes.device, flags.device == "virtual"
    check_processes(plan, processes.count, file=flags.plan, model=flags.model)
    mine = processes.on_all(lambda: _files_of(flags, rank))
    keeping = Keeping(save=flags.save, every=flags.save_every, resume=flags.resume, newest=flags.keep)
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
            logs=flags.log or (),
            disks=flags.folders,
        )
    plan, predicted = result.plan, predict(result.plan)
    write_timelines(mine, plan, predicted, result)
    if rank == 0:
        _say(plan, here, predicted, result, steps=flags.steps, as_json=flags.json)


def _files_of(flags: RunFlags, rank: int) -> RunFlags:
    """None on other ranks. Raises PstarError for what cannot be written."""
    names: dict[str, str | None] = {}
    for flag in OUTPUTS:
        name = getattr(flags, flag)
        if name is None:
            continue
        if flag == "record" and RANK in name:
            raise PstarError(f"--record {name}: one rank records, for all; leave {RANK} out")
        names[flag] = name.replace(RANK, str(rank)) if RANK in name or rank == 0 else None
    mine = replace(flags, **names, log=flags.log if rank == 0 else None)  # type: ignore[arg-type]
    try_outputs(mine)
    return mine


def _first_rank_of(machine: Machine) -> Machine:
    return replace(machine, ranks=(replace(machine.ranks[0], batch_share=1.0),), nodes=1)


def _say(plan: Plan, machine: Machine, predicted: Timeline, result: RunResult, *, steps: int, as_json: bool) -> None:
    said = RunFigures(plan=plan, machine=machine, predicted=predicted, result=result)
    if as_json:
        say_answer(Header(model=plan.workload.model, machine=machine.name), **said.to_json(steps=steps))
        return
    ranks, losses = said.ranks, said.losses
    several = f"{ranks} ranks" if ranks > 1 else "one rank"
    tell(f"{plan.policy}: {plan.workload.model} on {several}, {len(losses)} steps of {plan.tokens} tokens\n")
    say_table(("step", "loss", "seconds", "tokens/s"), _step_rows(said))
    say("")
    say_table(("", "predicted", "measured"), _predicted_rows(said))
    say("")
    tell("\n".join(_notes(said)))


def _step_rows(said: RunFigures) -> list[tuple[str, str, str, str]]:
    first, count = said.result.reports[0].step, len(said.losses)
    from_ = count - 5 if count > 6 else 0
    return [
        (str(first + i), f"{loss:.4f}", f"{said.times[i]:.3f}", f"{said.plan.tokens / said.times[i]:,.0f}")
        for i, loss in enumerate(said.losses)
        if i == 0 or i >= from_
    ]


def _predicted_rows(said: RunFigures) -> list[tuple[str, str, str]]:
    wanted, moved = said.plan.moved_bytes, said.moved
    rows = [("iteration", format_s(said.predicted.iteration_s), format_s(said.step_s))]
    if said.again_s is not None:
        rows.append(("re-timed", format_s(said.again_s), format_s(said.step_s)))
    if said.peaks:
        most = f"<= {format_bytes(said.peaks_at_most)}"
        rows.append(("GPU peak of a rank", most, format_bytes(max(said.peaks))))
    for lane, name in (("h2d", "to the GPU"), ("d2h", "to the host"), ("net", "to other ranks")):
        if lane in moved:
            rows.append((name, format_bytes(wanted.get(lane, 0)), format_bytes(moved[lane])))
    return rows


def _notes(said: RunFigures) -> list[str]:
    everywhere = ", on all ranks at once" if said.ranks > 1 else ""
    return [
        *said.result.notes,
        "iteration: median of the steps after the first, on this rank",
        f"predicted from: {predicted_from(said.plan, said.machine)}{everywhere}",
        "re-timed: the same plan simulated with the seconds that this rank's steps took in this run",
        others_words(said.result.taken_by_others),
        f"a slice that changes place holds {format_bytes(said.transient)} more for the time of a copy",
    ]
