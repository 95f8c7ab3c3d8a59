"""The capacity commands: fits, max-model, max-batch, cheapest, sensitivity, sweep."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pstar_sim.cli.bars import bar, parts
from pstar_sim.cli.inputs import lora_of, machine_of, settings_of, workloads_of
from pstar_sim.cli.planning import say, say_json, tell
from pstar_sim.cli.status import NO
from pstar_sim.errors import PstarError

if TYPE_CHECKING:
    from pstar_sim.planner.sweep import Progress

__all__ = ["cheapest", "fits", "max_batch", "max_model", "sensitivity", "sweep"]


def fits(args: argparse.Namespace) -> int:
    from pstar_sim.planner.fits import fits as ask
    from pstar_sim.report.capacity import fits_text

    machine = machine_of(args)
    answer = ask(
        workloads_of(args, machine), machine, policies=args.policy, settings=settings_of(args), loading=args.loading
    )
    if args.json:
        say_json(answer.to_json())
    else:
        say(fits_text(answer))
    if not answer.any:
        what = "no policy fits" if len(answer.rows) > 1 else f"{answer.rows[0].policy} does not fit"
        sys.stderr.write(f"pstar: {what} {answer.workload.model} on {machine.name}; the answer says why\n")
        return NO
    return 0


def max_model(args: argparse.Namespace) -> int:
    from pstar_sim.planner.limits import max_model as ask
    from pstar_sim.report.capacity import limits_text

    with bar("starting", quiet=args.json) as on_policy:
        answer = ask(
            machine_of(args),
            batch=args.batch,
            seq=args.seq,
            like=args.like,
            hidden=args.hidden,
            heads=args.heads,
            policies=args.policy,
            settings=settings_of(args),
            micro_batches=args.micro_batches,
            dtype=args.dtype,
            checkpointing=args.checkpointing,
            lora=lora_of(args),
            optimizer=args.optimizer,
            loading=args.loading,
            on_policy=on_policy,
        )
    if args.json:
        say_json(answer.to_json())
    else:
        say(limits_text(answer))
    if not any(row.value for row in answer.rows):
        sys.stderr.write(f"pstar: not even one layer like {args.like} fits {args.machine}; the answer says why\n")
        return NO
    return 0


def max_batch(args: argparse.Namespace) -> int:
    from pstar_sim.planner.limits import max_batch as ask
    from pstar_sim.report.capacity import limits_text
    from pstar_sim.workload.presets import default_dtype, preset
    from pstar_sim.workload.workload import Workload

    machine = machine_of(args)
    adapter = lora_of(args)

    def write(batch: int) -> Workload:
        return preset(
            args.model,
            batch=batch,
            seq=args.seq,
            micro_batches=args.micro_batches,
            dtype=args.dtype or default_dtype(machine),
            checkpointing=args.checkpointing,
            lora=adapter,
            optimizer=args.optimizer,
        )

    with bar("starting", quiet=args.json) as on_policy:
        answer = ask(
            machine,
            write,
            policies=args.policy,
            settings=settings_of(args),
            loading=args.loading,
            on_policy=on_policy,
        )
    if args.json:
        say_json(answer.to_json())
    else:
        say(limits_text(answer))
    if not any(row.value for row in answer.rows):
        sys.stderr.write(f"pstar: not even one sequence of {args.model} fits {machine.name}; the answer says why\n")
        return NO
    return 0


def cheapest(args: argparse.Namespace) -> int:
    from pstar_sim.catalog.loader import load_machine
    from pstar_sim.planner.cheapest import cheapest as ask
    from pstar_sim.report.capacity import cheapest_text

    if args.set and not args.machine:
        raise PstarError("--set changes machines that are named: give --machine too")
    machines = None if args.machine is None else [load_machine(name, overrides=args.set) for name in args.machine]
    answer = ask(
        args.model,
        tokens=args.tokens,
        batch=args.batch,
        seq=args.seq,
        deadline_s=args.deadline,
        machines=machines,
        policies=args.policy,
        settings=settings_of(args),
        dtype=args.dtype,
        checkpointing=args.checkpointing,
        lora=lora_of(args),
        optimizer=args.optimizer,
        prices=args.prices,
        most_nodes=args.most_nodes,
    )
    if args.json:
        say_json(answer.to_json())
    else:
        say(cheapest_text(answer))
    if answer.best is None:
        what = f"none in time for {args.model}" if answer.too_late else f"no machine trains {args.model}"
        sys.stderr.write(f"pstar: {what}; the answer says why\n")
        return NO
    return 0


def sensitivity(args: argparse.Namespace) -> int:
    from pstar_sim.planner.sensitivity import sensitivity as ask
    from pstar_sim.report.capacity import sensitivity_text

    machine = machine_of(args)
    named = {} if args.policy is None else {"policies": args.policy}
    with bar("starting", quiet=args.json) as on_part:
        answer = ask(
            workloads_of(args, machine), machine, settings=settings_of(args), by=args.by, on_part=on_part, **named
        )
    if args.json:
        say_json(answer.to_json())
    else:
        say(sensitivity_text(answer))
    if answer.now.policy is None:
        sys.stderr.write(f"pstar: no policy fits {answer.workload.model} on {machine.name} as it is\n")
        return NO
    return 0


def sweep(args: argparse.Namespace) -> int:
    from pstar_sim.planner.sweep import sweep as ask

    done = [0, 0]

    with _bar(quiet=args.quiet) as bar:

        def on_progress(points: int, cached: int, total: int) -> None:
            done[:] = points, total
            if bar is not None:
                bar(points, cached, total)

        try:
            answer = ask(
                args.grid,
                args.output,
                jobs=args.jobs or -1,
                backend=args.backend,
                cache=args.cache,
                on_progress=on_progress,
            )
        except KeyboardInterrupt:
            sys.stderr.write(f"pstar: {done[0]} of {done[1]} points are kept; the same command goes on from there\n")
            raise
    if args.json:
        say_json(answer.to_json())
        return 0
    fitting = sum(row["fits"] is True for row in answer.rows)
    refused = sum(row["fits"] is None for row in answer.rows)
    note = f", {refused} make no sense (see reason)" if refused else ""
    tell(f"{args.output}: {len(answer.rows)} points, {fitting} fit{note}; {answer.cached} were known already")
    return 0


@contextlib.contextmanager
def _bar(*, quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on stderr; none if quiet."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, TimeRemainingColumn

    with Progress(*parts(TimeRemainingColumn), console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("points", total=None)

        def show(points: int, cached: int, total: int) -> None:
            known = f"points, {cached} known already" if cached else "points"
            progress.update(task, completed=points, total=total, description=known)

        yield show
