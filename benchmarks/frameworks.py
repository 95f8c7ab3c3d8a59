"""Exported configurations in the real frameworks: each file is loaded by its package. DeepSpeed and FSDP 2 train ten
steps of a small transformer with it on this CPU, on the same batch each time: the loss has to fall. Predicted bytes per
parameter are compared with measured ones.

On a CPU the accelerator's memory is the host's and nothing is pinned. The prediction is the framework's requests on the
host, unrounded, and the plan's bytes on the GPU between two steps. The measurement is all tensors alive after the tenth
step. DeepSpeed runs in .venv-peers; torchtitan and Megatron-Core are loaded in .venv-titan (contenders/venv.py makes
both environments). Writes results/frameworks.json.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from _results import ROOT, write_result
from torch import nn

STEPS, BATCH, TOKENS, WORDS, HIDDEN, LAYERS = 10, 2, 32, 512, 128, 3


class Small(nn.Module):
    """A transformer of about 0.7 M parameters. Called with a batch of words, it returns the loss of predicting the next
    word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        layer = {"nhead": 4, "dim_feedforward": 4 * HIDDEN, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(HIDDEN, **layer) for _ in range(LAYERS)])
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def words() -> torch.Tensor:
    return torch.randint(WORDS, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))


# -- in the framework's interpreter -----------------------------------------------------------------------------------


def living_bytes() -> int:
    """Returns the bytes of the storages of all live tensors."""
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor) and one.device.type == "cpu":
            local = one.to_local() if hasattr(one, "to_local") else one
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def process_group() -> None:
    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=0, world_size=1)


def trained(step: Callable[[], float]) -> dict[str, Any]:
    """Run ten steps. Returns their losses, and the bytes alive after the last.

    step: trains once and returns the loss.
    """
    losses = [step() for _ in range(STEPS)]
    return {"losses": losses, "living_bytes": living_bytes()}


def train_deepspeed(path: str) -> dict[str, Any]:
    import deepspeed

    process_group()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = Small().bfloat16()
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    params = sum(p.numel() for p in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))

    def step() -> float:
        loss = engine(words())
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return {"params": params, **trained(step)}


def train_fsdp2(path: str) -> dict[str, Any]:
    process_group()
    made = importlib.util.spec_from_file_location("exported", path)
    assert made is not None and made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    model = Small()
    params = sum(p.numel() for p in model.parameters())
    model = module.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(words())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return {"params": params, **trained(step)}


def load_deepspeed(path: str) -> dict[str, Any]:
    from deepspeed.runtime.config import DeepSpeedConfig

    process_group()
    found = DeepSpeedConfig(json.loads(Path(path).read_text(encoding="utf-8")))
    zero = found.zero_config
    offload = zero.offload_optimizer
    return {"stage": int(zero.stage), "states": str(offload.device) if offload else "none"}


def load_accelerate(path: str) -> dict[str, Any]:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    loaded = ClusterConfig.from_yaml_file(path)
    for key, value in loaded.fsdp_config.items():  # as `accelerate launch` passes them on
        os.environ[key.upper()] = str(value) if key == "fsdp_auto_wrap_policy" else str(value).lower()
    plugin = FullyShardedDataParallelPlugin()
    return {"version": plugin.fsdp_version, "offload": type(plugin.cpu_offload).__name__}


def load_torchtitan(path: str) -> dict[str, Any]:
    from torchtitan.config import ConfigManager

    found = ConfigManager().parse_args(["--job.config_file", path])
    return {"offload": found.training.enable_cpu_offload, "batch": found.training.local_batch_size}


def load_megatron(path: str) -> dict[str, Any]:
    """Load Megatron's flags. Megatron-Core has no arguments of its own: the flags are compared with its configurations'
    fields, where these exist."""
    from dataclasses import fields

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    kinds = (DistributedDataParallelConfig, OptimizerConfig, TransformerConfig)
    known = {field.name for kind in kinds for field in fields(kind)}
    flags = [word for word in Path(path).read_text(encoding="utf-8").split() if word.startswith("--")]
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags]
    return {"fields": [n for n in names if n in known], "arguments_only": [n for n in names if n not in known]}


WORK = {
    f"{verb}-{name}": globals()[f"{verb}_{name}"]
    for verb, name in (
        ("train", "deepspeed"), ("train", "fsdp2"), ("load", "deepspeed"), ("load", "accelerate"),
        ("load", "torchtitan"), ("load", "megatron"),
    )
}  # fmt: skip

# -- here --------------------------------------------------------------------------------------------------------------


def asked(work: str, path: Path, interpreter: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the answer of `work` in another interpreter, or {"failed": its last line}."""
    argv = [interpreter, str(Path(__file__).resolve()), "--work", work, str(path)]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, **environment, "PYTHONPATH": paths},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = (done.stderr or done.stdout).strip().splitlines()
        return {"failed": said[-1][:300] if said else f"status {done.returncode}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


JOBS = (  # policy of the plan, its target, what trains it
    ("zero_offload", "DeepSpeed", "train-deepspeed"),
    ("zero3_offload:subgroup=200000,flush=async,params=cpu,bucket=100000", "DeepSpeed", "train-deepspeed"),
    ("zero_infinity:bucket=0,reuse=0", "FSDP2", "train-fsdp2"),
    ("zero_infinity:bucket=0,reuse=0", "accelerate", None),
    ("zero_infinity:bucket=0,reuse=0", "torchtitan", None),
    ("zero3_offload:subgroup=100000,ratio=0.5", "Megatron-LM", None),
)  # fmt: skip
LOADS = {
    "DeepSpeed": "load-deepspeed", "accelerate": "load-accelerate", "torchtitan": "load-torchtitan",
    "Megatron-LM": "load-megatron",
}  # fmt: skip


def predicted(prediction: Any, width: int) -> dict[str, float]:
    """Returns the bytes on a CPU between two steps: requested host blocks, without those that only the pinning cache
    keeps, and the plan's bytes on the GPU."""
    from pstar_sim.core.step import Place

    plan, host = prediction.plan, prediction.host
    held = sum(a.asked_bytes for a in host.allocations if not a.freed)
    lists = [r for r in plan.initial if r.place is Place.GPU and r.chunk >= 0]
    gpu = sum(plan.layout.payload_bytes(r.chunk, r.list) for r in lists)
    bucket = prediction.configuration.options.get("bucket", 0) if prediction.policy.startswith("zero3") else 0
    return {"host": held, "gpu": gpu, "bucket": bucket * width}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-peers", help="the environment that has DeepSpeed")
    parser.add_argument("--titan", type=Path, default=ROOT / ".venv-titan", help="that of torchtitan, megatron-core")
    parser.add_argument("--out", type=Path, help="where the result is kept (default: benchmarks/results)")
    parser.add_argument("--work", nargs=2, metavar=("WORK", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        torch.manual_seed(0)
        print(json.dumps(WORK[args.work[0]](args.work[1])))
        return 0
    return compare(args)


def compare(args: argparse.Namespace) -> int:
    from contenders.venv import DEEPSPEED, TITAN, environment_of, make_environment, make_venv

    import pstar_sim as ps
    from executor import capture_module
    from pstar_sim.frameworks.express import job_left
    from pstar_sim.frameworks.prediction import predict
    from pstar_sim.frameworks.targets import TARGETS

    interpreter = make_venv(args.venv, ROOT / "constraints.txt", print)
    environment = environment_of(args.venv.absolute())
    titan = make_environment(args.titan, TITAN, print)
    workload = capture_module(Small(), words(), dtype="bf16", loss=lambda module, batch: module(batch))
    machine = ps.machine("v100-32", host_memory="64GB")
    rows = []
    for policy, name, trainer in JOBS:
        if name not in TARGETS:
            continue
        plan = ps.compare(workload, machine, policies=policy).best().plan
        target = TARGETS[name]
        expressed = target.express(plan)
        job, settings = job_left(plan, expressed.configuration)
        prediction = predict(expressed.configuration, [job], machine, settings, label=name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"exported.{'yaml' if name == 'accelerate' else 'py' if name == 'FSDP2' else 'txt'}"
            path.write_text(target.write(expressed.configuration), encoding="utf-8")
            theirs = {"DeepSpeed": interpreter, "torchtitan": titan, "Megatron-LM": titan}
            run = theirs.get(name, sys.executable)
            row: dict[str, Any] = {"plan": policy, "target": name, "policy": prediction.policy}
            if name in LOADS:
                row["loaded"] = asked(LOADS[name], path, run, environment if name == "DeepSpeed" else {})
            if trainer is not None:
                row |= beside(asked(trainer, path, run, environment if name == "DeepSpeed" else {}), prediction)
        rows.append(row)
        print(json.dumps(row))
    write_result("frameworks", {"deepspeed": DEEPSPEED, "steps": STEPS, "rows": rows}, folder=args.out)
    untrained = [row for row in rows if "losses" in row and not row["losses"][-1] < row["losses"][0]]
    return int(bool(untrained) or any("failed" in row.get("loaded", {}) or "failed" in row for row in rows))


def beside(measured: Mapping[str, Any], prediction: Any) -> dict[str, Any]:
    """Returns predicted and measured bytes per parameter."""
    if "failed" in measured:
        return dict(measured)
    params = measured["params"]
    parts = predicted(prediction, 2)
    return {
        "params": params,
        "losses": measured["losses"],
        "predicted_bytes_per_param": round(sum(parts.values()) / params, 3),
        "measured_bytes_per_param": round(measured["living_bytes"] / params, 3),
        "parts_bytes_per_param": {part: round(size / params, 3) for part, size in parts.items()},
        "host_with_pinning_bytes_per_param": round(prediction.host.host_bytes / params, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
