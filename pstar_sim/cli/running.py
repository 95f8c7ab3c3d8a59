"""Commands that need torch: trace and run. The executor is imported when they run, never before."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

from pstar_sim.cli.planning import say, say_json
from pstar_sim.errors import ModelError
from pstar_sim.units import format_bytes, parse_bytes_per_s

__all__ = ["executor_module", "run", "trace"]


def executor_module(name: str) -> ModuleType:
    """executor.NAME. Raises ModelError where torch or transformers is not installed, naming the extra that brings it."""
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

    workload = executor_module("capture").capture(
        args.model,
        batch=args.batch,
        sequence=args.seq,
        micro_batches=args.micro_batches,
        dtype=args.dtype,
        checkpointing=args.checkpointing,
        attention=args.attention,
    )
    save_trace(workload, args.output)
    facts: dict[str, object] = {
        "trace": args.output,
        "model": workload.model,
        "params": workload.params,
        "dtype": workload.dtype,
        "moments": len(workload.moments),
        "flops": workload.flops,
        "peak_non_model_bytes": workload.peak_non_model_bytes,
        "attention": workload.attention,
        "checkpointing": workload.checkpointing,
    }
    if args.json:
        say_json(facts)
    else:
        say(
            f"{args.output}: {workload.model}, {workload.params / 1e6:,.1f} M parameters in {workload.dtype}, "
            f"{len(workload.moments)} moments, {workload.flops / 1e12:.2f} TFLOP, at most "
            f"{format_bytes(workload.peak_non_model_bytes)} of non-model data ({workload.attention} attention, "
            f"{'with' if workload.checkpointing else 'without'} checkpointing)"
        )
    return 0


def run(args: argparse.Namespace) -> int:
    from pstar_sim.core.plan import load_plan

    plan = load_plan(args.plan)
    bandwidth = parse_bytes_per_s(args.bandwidth) if args.bandwidth is not None else None
    status: int = executor_module("run").run_plan(
        plan,
        model=args.model,
        data=args.data,
        steps=args.steps,
        device=args.device,
        bandwidth_bytes_per_s=bandwidth,
        record=args.record,
        timeline=args.timeline,
        lr=args.lr,
        seed=args.seed,
        as_json=args.json,
    )
    return status
