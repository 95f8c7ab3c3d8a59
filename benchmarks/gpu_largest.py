"""`make gpu-largest`: the largest model of a width that trains here, two steps of it.

The first try has the layers that both memories would hold by arithmetic. If there is no plan, or it does not run, the
next try has a twentieth fewer, until one trains. Weights are drawn once and shared, so that the model takes no memory
beside the plan's. Every try has a process of its own and its result is kept: a later run continues from the folder
--out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _keep import Keep, results_folder
from _results import RESULTS, write_result
from contenders.stages import Stages
from gpu_record import in_process, line
from preflight import cannot_run, report

ROOT = Path(__file__).resolve().parents[1]
# Beside model data: the context, workspaces, the tide and the allocator's rounding; the program and the system.
GPU_REST_BYTES, HOST_REST_BYTES = 8 * 10**9, 10 * 10**9


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="of this run; 0 for no limit")
    add("--fresh", action="store_true", help="forget the tries of a run before this one")
    add("--again", action="store_true", help="try what failed again")
    add("--out", type=results_folder, help=f"folder of what is found (default: {RESULTS.relative_to(ROOT)})")
    add("--device", choices=("cuda", "virtual"), default="cuda", help="virtual: to try this script")
    add("--model", default="llama-7b", help="whose width it has, as for `pstar trace`")
    add("--layers", type=int, help="to begin with (default: by arithmetic)")
    add("--policy", default="tide")
    add("--machine", help="machine file for the plans (default: the catalog's entry for this machine)")
    add("--gpu-memory", help="such as 80GB (default: all that is free)")
    add("--host-memory", help="of the machine, the system's included (default: what there is)")
    add("--batch", type=int, default=1)
    add("--sequence", type=int, default=1024)
    add("--dtype", choices=("fp32", "bf16"), default="bf16")
    args = parser.parse_args(argv)
    from pstar_sim.arguments import parse_bytes
    from pstar_sim.errors import PstarError

    try:
        for name in ("gpu_memory", "host_memory"):
            text = getattr(args, name)
            setattr(args, name, None if text is None else parse_bytes(text))
    except PstarError as error:
        parser.error(str(error))
    return args


def layers_by_arithmetic(*, fixed_params: int, layer_params: int, dtype: str, gpu_bytes: int, host_bytes: int) -> int:
    """Returns the layers whose model data (14 bytes per parameter in bf16, 16 in fp32) fill both memories; at least
    1."""
    each = 14 if dtype == "bf16" else 16
    return max(1, ((gpu_bytes + host_bytes) // each - fixed_params) // layer_params)


def fewer(layers: int) -> int:
    """Returns a twentieth fewer layers, at least one fewer."""
    return layers - max(1, layers // 20)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    on_card = args.device == "cuda"
    if (status := cannot_run("gpu-largest", ("numpy", "scipy", "transformers"), device=on_card)) is not None:
        return status
    keep = Keep(args.out or RESULTS, "gpu_largest")
    if args.fresh:
        keep.partial.unlink(missing_ok=True)
    keep.say(report())
    import torch
    from peers import Shapes, available_bytes

    gpu_bytes = args.gpu_memory or (torch.cuda.mem_get_info()[0] if on_card else 10**9)
    host_bytes = (args.host_memory or available_bytes()) - HOST_REST_BYTES
    machine = args.machine or ("here" if on_card else "virtual")
    stages = Stages(
        keep.partial, minutes=args.minutes or None, expected_s=60.0 if on_card else 0.0, say=keep.say, again=args.again
    )
    tried: dict[int, Any] = {}
    trains = None
    with tempfile.TemporaryDirectory() as folder:
        shapes = Shapes(args.model, Path(folder))
        layers = args.layers or layers_by_arithmetic(
            fixed_params=shapes.params(0),
            layer_params=shapes.layer_params,
            dtype=args.dtype,
            gpu_bytes=gpu_bytes - (GPU_REST_BYTES if on_card else 0),
            host_bytes=host_bytes,
        )
        while layers >= 1:
            shape = {
                "stage": "planned", "policy": args.policy, "batch": args.batch, "sequence": args.sequence,
                "dtype": args.dtype, "checkpointing": True, "device": args.device, "steps": [0, 2],
                "gpu_memory_bytes": args.gpu_memory if on_card else gpu_bytes,
            }  # fmt: skip
            key = json.dumps({**shape, "width": args.model, "layers": layers}, sort_keys=True)
            job = {**shape, "model": shapes.spec(layers), "machine": machine, "host_memory_bytes": args.host_memory}
            what = f"{layers} layers, {shapes.params(layers) / 1e9:.2f} G parameters"
            result = stages.run(key, what, lambda left_s, job=job: in_process(keep, job, left_s))
            if result is None:
                break
            tried[layers] = {"params": shapes.params(layers), **result}
            keep.say(line(what, result))
            if "failed" not in result:
                trains = layers
                break
            layers = fewer(layers)
    content = {
        "device": args.device, "model": args.model, "dtype": args.dtype, "gpu_bytes": gpu_bytes,
        "host_bytes": host_bytes, "trains_layers": trains, "trains_params": tried.get(trains, {}).get("params"),
        "tried": tried, "stages_left": stages.left_out,
    }  # fmt: skip
    keep.say(f"written: {write_result('gpu_largest', content, folder=args.out)}")
    if stages.left_out:
        keep.say("no time left for the next try; run the same command again and it goes on")
    elif args.out is None:
        stages.forget()
    return int(trains is None)


if __name__ == "__main__":
    raise SystemExit(main())
