"""`pstar ablate`: what each idea is worth."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pstar_sim.cli.planning import save_picture, say, say_json, tell

__all__ = ["ablate"]


def ablate(args: argparse.Namespace) -> int:
    from pstar_sim.cli.inputs import machine_of, settings_of, workloads_of
    from pstar_sim.planner.ablate import ablate as ask

    machine = machine_of(args)
    found = ask(
        workloads_of(args, machine),
        machine,
        settings_of(args),
        policy=args.policy,
        certify=args.certify,
        progress=_progress,
    )
    if args.output is not None:
        from pstar_sim.report.waterfall import waterfall_figure

        save_picture(waterfall_figure(found), Path(args.output), dpi=150)
    if args.json:
        say_json(found.to_json())
    else:
        from pstar_sim.report.ablation import ablation_text

        say(ablation_text(found))
        if args.output is not None:
            tell(f"\n{args.output}: the waterfall")
    return 0


def _progress(done: int, lines: int) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        end = "\r" if done < lines else "\r\033[K"
        sys.stderr.write(f"planning: {done} of {lines}{end}")
        sys.stderr.flush()
