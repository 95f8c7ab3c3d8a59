"""`pstar demo`: the main job from beginning to end on this machine, by the other commands' functions, with GPT-2 124M
and an accelerator too small for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pstar_sim.cli.declare import command
from pstar_sim.cli.executor_parts import executor_module
from pstar_sim.cli.flag_values import natural, positive
from pstar_sim.cli.output import save_picture, say, tell
from pstar_sim.dtypes import MASTER

commands = typer.Typer()

MODEL = "gpt2"
BATCH, SEQUENCE = 2, 64
GPU_MEMORY = "1.2GB"
BANDWIDTH_BYTES_PER_S = 1.5e9
MICRO_BATCHES = (1, 4)
LEARNING_RATE = 1e-4
DRAWN = ("patrickstar", "static_partition", "tide")  # each has one idea more than the one before it


@command(commands, "pstar demo -o demo-out")
def demo(
    *,
    folder: Annotated[str, typer.Option("-o", "--out", metavar="FOLDER", help="folder for its files")] = "demo-out",
    seed: Annotated[int, typer.Option(parser=natural, metavar="N", help="seed of weights and data")] = 0,
    steps: Annotated[int, typer.Option(parser=positive, metavar="N", help="iterations of training")] = 6,
) -> int:
    """Trace a GPT-2, compare policies on a machine too small for it, plan, run the plan beside plain PyTorch."""
    from pstar_sim.catalog.loader import load_machine
    from pstar_sim.cli.progress import progress
    from pstar_sim.cli.run_report import compare_with_run, explain_run, figures_as_json, measured_words, predictor
    from pstar_sim.files import write_atomically
    from pstar_sim.planner.compare import compare
    from pstar_sim.report.run_figures import figures_text, losses_text
    from pstar_sim.report.tables import comparison_text
    from pstar_sim.report.tide_picture import tide_figure
    from pstar_sim.terminal import terminal_width
    from pstar_sim.units import format_bytes, format_params
    from pstar_sim.workload.trace import save_trace
    from pstar_sim.workload.workload import repeat_micro_batch

    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    capture = executor_module("capture")
    rates = executor_module("measuring.rates")

    tell(f"1. Trace: {MODEL} from transformers, batch {BATCH}, sequence {SEQUENCE}, fp32, under fake tensors")
    traced = capture.capture(MODEL, batch=BATCH, sequence=SEQUENCE, dtype=MASTER, checkpointing=True)
    save_trace(traced, out / "trace.parquet")
    need = traced.params * (4 + traced.states_bytes_per_param)
    tell(
        f"   {format_params(traced.params)} parameters, {len(traced.moments)} moments, tide between "
        f"{format_bytes(min(m.peak_bytes for m in traced.moments))} and {format_bytes(traced.peak_non_model_bytes)}; "
        f"model data {format_bytes(need)}, GPU {GPU_MEMORY}\n"
    )
    machine = rates.measure_virtual_machine(
        load_machine("virtual", gpu_memory=GPU_MEMORY),
        h2d_bytes_per_s=BANDWIDTH_BYTES_PER_S,
        d2h_bytes_per_s=BANDWIDTH_BYTES_PER_S,
    )
    for micro_batches in MICRO_BATCHES:
        tell(f"2. Compare: {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}, on the rates measured here")
        say(comparison_text(compare(repeat_micro_batch(traced, micro_batches), machine)))

    job = executor_module("run").TrainingJob(
        model=MODEL, batch=BATCH, sequence=SEQUENCE, dtype=MASTER, checkpointing=True, lr=LEARNING_RATE, seed=seed
    )
    tell("3. Warm-up: real iterations, chunks fetched on demand, bytes and seconds of every moment recorded")
    recorded = job.record(machine)
    save_trace(recorded, out / "warm_up.parquet")
    result = compare(recorded, machine)
    best = result.best()
    plan, predict = best.plan, predictor(machine)
    best.save(out / "plan.json")
    tell(f"   plan.json: {plan.describe()}\n")

    tell(f"4. Run the plan for {steps} steps, and the same steps in plain PyTorch")
    rate = (BANDWIDTH_BYTES_PER_S, BANDWIDTH_BYTES_PER_S)
    with progress(steps, plan, quiet=False) as on_step:
        ran = job.run(plan, steps=steps, bandwidth=rate, order=predict, on_step=on_step)
    plan, predicted = ran.plan, predict(ran.plan)
    plain = job.run_plain(plan, steps=steps)
    losses = {"plain PyTorch": [r.loss for r in plain], plan.policy: [r.loss for r in ran.reports]}
    say(losses_text(losses, width=terminal_width()))
    rows = compare_with_run(plan, predicted, ran)
    say(figures_text(rows, width=terminal_width()))
    tell(explain_run(plan, machine, ran))
    if ran.timeline is not None:
        ran.timeline.save(out / "timeline.json")
    drawn = [result[policy].timeline for policy in DRAWN if policy in result.planned]
    job_words = f"{MODEL}, batch {BATCH}, sequence {SEQUENCE}, {GPU_MEMORY} of GPU memory: what fills the GPU"
    save_picture(tide_figure(drawn, xs=("time",), title=job_words), out / "tide.png", dpi=110)
    title = f"{plan.policy}, {MODEL}: a run over its prediction, moment by moment; below, both by time"
    run = tide_figure([predicted], measured=ran.timeline, measured_as=measured_words(ran), title=title)
    save_picture(run, out / "measured.png", dpi=110)
    summary = {"losses": losses, "figures": figures_as_json(rows), "deviations": list(ran.deviations)}
    write_atomically(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    tell(f"\nin {out}: " + " ".join(sorted(p.name for p in out.iterdir())))
    return 0
