"""Predicted against measured iteration time of plans on disks, how much of the disks' time compute hides, and what the
process takes beside what a plan counts on the host.

Rates of this machine and of the folder are measured, a warm-up is recorded, and three policies plan for a host with
room for a third of the states. Each plan runs three times, in turns, several steps each. The measured figure is the
median of the runs' medians. Disk time is hidden while a moment computes, in the last iteration of each run.

Memory is taken in a process per job, whose model data are 4 times the host budget, 500 times a second while values are
loaded from files, and while it trains. The baseline is the process after a run of a model of one layer of the same
widths: programs, kernels' workspaces, and text. The virtual device is in the process too: its arena, the planned peak
of the GPU, is taken off, or what it counts where that is more; while values are loaded what it holds.

A checkpoint is written by a run with over 3 GB in its slots and a host with room for a sixth of the model data. It is
resumed on disks, without disks, and by two processes on disks, and each saves what it has: digests of all values and
states, by name.

Jobs are trained with states, and with states and parameters, on disks, without disks, and in plain PyTorch (where that
has the same optimizer), for 20 steps with clipping: their losses, and bytes moved beside the plan's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from _results import write_result

from executor import AdamW, prepare
from executor.calibration.folders import folder_rates
from executor.capture import capture
from executor.devices.backend import VirtualBackend
from executor.measuring.rates import measure_virtual_machine
from executor.models import build
from executor.run import TrainingJob
from executor.running.data import ByteText, batches_like, open_data
from executor.saving.tensor_files import TensorFile, bytes_of, piece_buffer
from executor.training import train
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.checker.check import check_plan
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import DISK_QUEUES, Place, Queue
from pstar_sim.core.timeline import Span
from pstar_sim.core.workspace import with_host_budget, workspace_bytes
from pstar_sim.errors import PstarError
from pstar_sim.planner.compare import play_plan
from pstar_sim.planner.memory_needs import need_of_plan, with_room
from pstar_sim.policy.kit.sharing import plan_once
from pstar_sim.policy.registry import find_policy, plan_to_run
from pstar_sim.units import format_bytes
from pstar_sim.workload.loading import Loading
from pstar_sim.workload.workload import Workload, with_optimizer

POLICIES = ("tide", "stronghold", "zero_infinity:params=nvme,states=nvme,subgroup=1000000")
MODEL = {
    "model_type": "gpt2", "n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 4096, "n_positions": 128,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
"""12 M parameters."""
RUNS, STEPS = 3, 4
SHARE = 1 / 3  # of the states that have room on the host


def hidden_share(spans: Iterable[Span]) -> float:
    """The share of the seconds of the disks in which a moment computes, too."""
    rows = sorted(spans, key=lambda span: span.start_s)
    computing = [(span.start_s, span.end_s) for span in rows if span.queue is Queue.COMPUTE]
    disks = [(span.start_s, span.end_s) for span in rows if span.queue in DISK_QUEUES]
    both_s = sum(max(0.0, min(d[1], c[1]) - max(d[0], c[0])) for d in disks for c in computing)
    return both_s / sum(end - start for start, end in disks)


def measure(folder: Path) -> list[dict[str, object]]:
    """folder: on a disk."""
    config = folder / "model.json"
    config.write_text(json.dumps(MODEL), encoding="utf-8")
    job = TrainingJob(model=f"hf:{config}", batch=2, sequence=128, dtype="fp32", checkpointing=True, lr=1e-4, clip=True)
    disks = folder / "disk"
    disks.mkdir()
    rates = measure_virtual_machine(load_machine("virtual", gpu_memory="130MB", disks=[disks]))
    on_disk, nvme = folder_rates([disks]), rates.nvme
    assert nvme is not None
    workload = job.record(rates)
    params = sum(tensor.bytes for tensor in workload.tensors if tensor.tied_to is None)
    machine = replace(
        rates,
        host=replace(rates.host, memory_bytes=rates.host.reserved_bytes + round(params * (1 + 3 * SHARE))),
        nvme=replace(nvme, **on_disk.figures),
    )
    plans = {policy: find_policy(policy)(workload, machine, Settings(clip=True)) for policy in POLICIES}
    predicted = {policy: play_plan(plan) for policy, plan in plans.items()}
    measured: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    for _ in range(RUNS):
        for policy, plan in plans.items():
            result = job.run(plan, steps=STEPS, disks=[str(disks)])
            seconds = statistics.median(report.time_s for report in result.reports[1:])
            measured[policy].append((seconds, hidden_share(result.timeline.spans)))
    rows: list[dict[str, object]] = []
    for policy, timeline in predicted.items():
        seconds, hidden = zip(*measured[policy])
        rows.append(
            {
                "policy": policy,
                "disk_bytes": plans[policy].moved_bytes["nvme_read"] + plans[policy].moved_bytes["nvme_write"],
                "predicted_s": timeline.iteration_s,
                "predicted_hidden_share": hidden_share(timeline.spans),
                "measured_s": seconds,
                "error": statistics.median(seconds) / timeline.iteration_s - 1,
                "hidden_share": statistics.median(hidden),
            }
        )
    return rows


ON_DISKS = "zero_infinity:params=nvme,states=nvme,subgroup=1000000"


class MemoryJob(NamedTuple):
    """gpu: its memory.
    longer: sequence of the batches from the middle on, for which the run plans again.
    """

    family: str
    layers: int
    width: int
    dtype: str
    gpu: str
    policy: str
    micro_batches: int = 1
    longer: int | None = None


MEMORY = {
    "gpt2 of 29 M, fp32, tide": MemoryJob("gpt2", 8, 512, "fp32", "90MB", "tide"),
    "gpt2 of 91 M, fp32, tide": MemoryJob("gpt2", 8, 960, "fp32", "160MB", "tide"),
    "gpt2 of 29 M, bf16 with masters, tide": MemoryJob("gpt2", 8, 512, "bf16", "90MB", "tide"),
    "llama of 32 M, bf16 with masters, optimal": MemoryJob("llama", 8, 512, "bf16", "180MB", "optimal"),
    "llama of 44 M, bf16 with masters, zero_infinity": MemoryJob("llama", 12, 512, "bf16", "250MB", ON_DISKS),
    "gpt2 of 29 M, fp32, stronghold": MemoryJob("gpt2", 8, 512, "fp32", "250MB", "stronghold"),
    "gpt2 of 29 M, fp32, 4 micro-batches, tide": MemoryJob("gpt2", 8, 512, "fp32", "200MB", "tide", 4),
    "gpt2 of 29 M, fp32, longer batches, tide": MemoryJob("gpt2", 8, 512, "fp32", "130MB", "tide", longer=96),
}
MEMORY_STEPS = 20
SEQUENCE = 64
DATA_SHARE = 1 / 4  # of the model data that have room on the host
DATA_BYTES = {"fp32": 16, "bf16": 14}  # per parameter


CHECKPOINT = MemoryJob("gpt2", 20, 1024, "fp32", "400MB", "tide")
CHECKPOINT_SHARE = 1 / 6
PHASES = ("loading", "training", "saving", "resuming")
PARTS = ("on disks", "without disks", "two processes")  # that resume it


EXACT_STEPS = 20
EXACT_POLICIES = ("tide", "optimal", "stronghold", "zero_infinity")
SMALL = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
EXACT_MODELS: dict[str, dict[str, object]] = {
    "gpt2 of 124 M": {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024},
    "gpt2 of 1 M": {"model_type": "gpt2", "n_layer": 6, "n_embd": 128, "n_head": 4, "n_positions": 64, **SMALL},
    "llama of 1 M": {
        "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 352, **SMALL,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    },
}  # fmt: skip


class ExactJob(NamedTuple):
    """chunk_bytes: None: the policy's."""

    model: str
    dtype: str
    gpu: str
    policies: tuple[str, ...]
    micro_batches: int = 1
    optimizer: str = "adamw"
    chunk_bytes: int | None = None


EXACT = {
    "gpt2 of 124 M, fp32": ExactJob("gpt2 of 124 M", "fp32", "1300MB", EXACT_POLICIES),
    "llama of 1 M, fp32": ExactJob("llama of 1 M", "fp32", "15MB", EXACT_POLICIES, chunk_bytes=2**19),
    "llama of 1 M, bf16 with masters, 4 micro-batches": ExactJob(
        "llama of 1 M", "bf16", "15MB", EXACT_POLICIES, 4, chunk_bytes=2**18
    ),
    "gpt2 of 1 M, fp32, 4 micro-batches": ExactJob("gpt2 of 1 M", "fp32", "15MB", EXACT_POLICIES, 4, chunk_bytes=2**19),
    "gpt2 of 1 M, bf16 with masters, adamw-8bit": ExactJob(
        "gpt2 of 1 M", "bf16", "15MB", EXACT_POLICIES, 1, "adamw-8bit", 2**18
    ),
}


def plans_on_disks(job: ExactJob, policy: str, workload: Workload, disks: Path) -> dict[str, Plan]:
    """Of the most host memory with states alone on disks, and with states and parameters."""
    machine = load_machine("virtual", gpu_memory=job.gpu, disks=[disks])
    settings = Settings(clip=True, chunk_bytes=job.chunk_bytes, effort=0.1)
    params = sum(prod(tensor.shape) for tensor in workload.tensors if tensor.tied_to is None)
    plans: dict[str, Plan] = {}
    for where, options in (("states", "params=cpu,states=nvme"), ("states and parameters", "params=nvme,states=nvme")):
        spec = f"{policy}:{options},subgroup={params // 8}" if policy == "zero_infinity" else policy
        for share in (0.9, 0.7, 0.55, 0.45, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1):
            room = round(share * DATA_BYTES[job.dtype] * params) + workspace_bytes(workload)
            try:
                plan = plan_to_run(spec, workload, with_host_budget(machine, room), settings)
            except PstarError:
                continue
            on_disks = {row.list for row in plan.initial if row.place is Place.NVME}
            if on_disks and ("param" in on_disks) == (where != "states"):
                plans[where] = plan
                break
    return plans


def measure_exact(folder: Path, name: str) -> dict[str, Any]:
    job, disks, config = EXACT[name], folder / "disk", folder / "config.json"
    disks.mkdir(exist_ok=True)
    config.write_text(json.dumps(EXACT_MODELS[job.model]), encoding="utf-8")
    of_job: dict[str, Any] = {"batch": 1, "sequence": 32, "micro_batches": job.micro_batches, "dtype": job.dtype}
    training = TrainingJob(model=f"hf:{config}", checkpointing=True, lr=1e-3, clip=True, **of_job)
    workload = with_optimizer(capture(f"hf:{config}", checkpointing=True, **of_job), job.optimizer)
    roomy = load_machine("virtual", gpu_memory=job.gpu)
    kept = plan_to_run("tide", workload, roomy, Settings(clip=True, chunk_bytes=job.chunk_bytes))
    losses = {"without disks": [row.loss for row in training.run(kept, steps=EXACT_STEPS).reports]}
    if job.dtype == "fp32" and job.optimizer == "adamw":
        losses["plain"] = [row.loss for row in training.run_plain(kept, steps=EXACT_STEPS)]
    rows: list[dict[str, Any]] = []
    for policy in job.policies:
        for where, plan in plans_on_disks(job, policy, workload, disks).items():
            result = training.run(plan, steps=EXACT_STEPS, disks=[str(disks)])
            mine = [report.loss for report in result.reports]
            moved = {lane: size for lane, size in result.timeline.moved_bytes.items() if lane.startswith("nvme")}
            rows.append(
                {
                    "policy": policy,
                    "on_disks": where,
                    "host_budget_bytes": plan.host_budget_bytes,
                    "equal": {with_: mine == theirs for with_, theirs in losses.items()},
                    "last_loss": mine[-1],
                    "deviations": list(result.deviations),
                    "moved_bytes": moved,
                    "planned_bytes": {lane: plan.moved_bytes[lane] for lane in moved},
                    "left": sorted(path.name for path in disks.iterdir()),
                }
            )
            print(name, rows[-1], flush=True)
    return {
        "job": name,
        "losses": {"first": losses["without disks"][0], "last": losses["without disks"][-1]},
        "rows": rows,
    }


def write_models(folder: Path, job: MemoryJob) -> None:
    """Configuration and weights of the job's model, and of one with one layer."""
    family, layers, width, dtype, *_ = job
    for count in {1, layers}:
        if family == "gpt2":
            sizes = {"n_layer": count, "n_embd": width, "n_head": 8, "n_positions": 128}
        else:
            sizes = {
                "num_hidden_layers": count, "hidden_size": width, "intermediate_size": 11 * width // 4,
                "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 128,
            }  # fmt: skip
        config = {"model_type": family, "vocab_size": 8192, "bos_token_id": 0, "eos_token_id": 0, **sizes}
        (at := folder / str(count)).mkdir()
        (at / "config.json").write_text(json.dumps(config), encoding="utf-8")
        built = build(f"hf:{at / 'config.json'}", batch=1, sequence=64, device="cpu", dtype=dtype)
        built.module.save_pretrained(at, max_shard_size="50MB")  # type: ignore[operator]


class Watch:
    """The most memory of the process above a baseline, less the device's, by phase."""

    def __init__(self) -> None:
        self.baseline_bytes = self._resident_bytes()
        self.phase = "loading"
        self.most_bytes: dict[str, int] = {}
        self.device_bytes: Callable[[], int] = lambda: 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            phase, before = self.phase, self.device_bytes()
            size = self._resident_bytes() - self.baseline_bytes - max(before, self.device_bytes())
            self.most_bytes[phase] = max(size, self.most_bytes.get(phase, size))

    def _resident_bytes(self) -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def planned(weights: Path, disks: Path | None, job: MemoryJob, share: float, gpus: int = 1) -> Plan:
    workload = capture(
        f"hf:{weights / 'config.json'}", batch=1, sequence=SEQUENCE, micro_batches=job.micro_batches, dtype=job.dtype,
        checkpointing=True,
    )  # fmt: skip
    machine = load_machine("virtual", gpu_memory=job.gpu, gpus=gpus, disks=[] if disks is None else [disks])
    policy = job.policy
    params = sum(prod(tensor.shape) for tensor in workload.tensors if tensor.tied_to is None)
    room = round(share * DATA_BYTES[job.dtype] * params)
    machine, plan_on = with_host_budget(machine, room), partial(plan_once, find_policy(policy), workload)
    return with_room(plan_on, policy, workload, machine, Settings(clip=True), loading=Loading(way="in-place"))


class Loaded:
    """A model of weights under a plan, from "loading" to "training"."""

    def __init__(self, weights: Path, disks: Path | None, plan: Plan, watch: Watch | None) -> None:
        name, backend = f"hf:{weights / 'config.json'}", VirtualBackend(gpu_bytes=2 * plan.gpu_budget_bytes)
        if watch is not None:
            watch.phase, watch.device_bytes = "loading", lambda: backend.payload_bytes
        self.plan = plan
        self.built = build(
            name, batch=1, sequence=SEQUENCE, device="cpu", dtype=plan.workload.dtype, checkpointing=True, empty=True
        )
        self.model, self.optimizer = prepare(
            self.built.module, plan, AdamW(lr=1e-4, max_grad_norm=1.0), backend=backend, weights=weights,
            disks=[] if disks is None else [disks],
        )  # fmt: skip
        self.session = self.optimizer.session
        if watch is not None:
            arena_bytes = check_plan(plan).peak_bytes["gpu"]
            watch.phase, watch.device_bytes = (
                "training",
                lambda: max(arena_bytes, backend.payload_bytes + backend.count_other()),
            )

    def train(self, text: ByteText, steps: int, sequence: int = SEQUENCE) -> None:
        example = {key: value[:, :1].expand(-1, sequence) for key, value in self.built.example_batch.items()}
        batches = batches_like(example, text, vocabulary=self.built.vocabulary, seed=0)
        train(self.model, self.optimizer, batches, steps=steps, micro_batches=self.plan.workload.micro_batches)

    def close(self) -> None:
        assert not self.session.deviations, self.session.deviation_log
        self.session.close(restore=False)


def train_on(weights: Path, disks: Path, plan: Plan, text: ByteText, watch: Watch | None, longer: int | None) -> None:
    run = Loaded(weights, disks, plan, watch)
    for sequence in (SEQUENCE, longer or SEQUENCE):
        run.train(text, MEMORY_STEPS // 2, sequence)
    assert run.session.outgrown.plans == (longer is not None)
    run.close()


def measure_memory(folder: Path, name: str) -> dict[str, object]:
    """In a process of its own."""
    job = MEMORY[name]
    (disks := folder / "disk").mkdir()
    small, large, text = folder / "1", folder / str(job.layers), open_data(None)
    plan = planned(large, disks, job, DATA_SHARE)
    first = job._replace(gpu="1GB", policy=ON_DISKS, micro_batches=1)
    train_on(small, disks, planned(small, disks, first, 4), text, None, None)
    gc.collect()
    with Watch() as watch:
        train_on(large, disks, plan, text, watch, job.longer)
    return {"job": name, **memory_of(plan, watch)}


def memory_of(plan: Plan, watch: Watch) -> dict[str, object]:
    layout = plan.layout
    return {
        "parameters": sum(chunk.numel for chunk in layout.chunks),
        "model_data_bytes": sum(
            layout.payload_bytes(c.index, "param") + layout.states_bytes(c.index) for c in layout.chunks
        ),
        "host_budget_bytes": plan.host_budget_bytes,
        "baseline_bytes": watch.baseline_bytes,
        "planned_host_peak_bytes": check_plan(plan).peak_bytes["host"],
        "host_needed_bytes": need_of_plan(plan, Loading(way="in-place")).host_bytes,
        "planned_gpu_peak_bytes": check_plan(plan).peak_bytes["gpu"],
        **{f"{phase}_bytes": size for phase, size in watch.most_bytes.items()},
    }


def save_checkpoint(folder: Path) -> dict[str, object]:
    """In a process of its own: the run on disks, and what resumes it there."""
    disks, text = folder / "disk", open_data(None)
    small, large = folder / "1", folder / str(CHECKPOINT.layers)
    plan = planned(large, disks, CHECKPOINT, CHECKPOINT_SHARE)
    first = Loaded(small, disks, planned(small, disks, CHECKPOINT._replace(gpu="1GB", policy=ON_DISKS), 4), None)
    first.train(text, 2)
    first.optimizer.save(folder / "first")
    first.optimizer.load(folder / "first")
    first.close()
    gc.collect()
    with Watch() as watch:
        run = Loaded(large, disks, plan, watch)
        run.train(text, 2)
        watch.phase = "saving"
        run.optimizer.save(folder / "checkpoint")
        run.close()
        del run
        resumed = Loaded(folder / "checkpoint", disks, plan, None)
        watch.phase = "resuming"
        resumed.optimizer.load(folder / "checkpoint")
        resumed.optimizer.save(folder / PARTS[0])
        resumed.close()
    on_disks = [row for row in plan.initial if row.place is Place.NVME]
    return {
        **memory_of(plan, watch),
        "slots_bytes": sum(plan.layout.payload_bytes(row.chunk, row.list) for row in on_disks),
    }


def resume_checkpoint(folder: Path, part: str) -> None:
    """In one process, or in each of two (`RANK`)."""
    ranks, weights = 1 + (part == PARTS[2]), folder / "checkpoint"
    disks = folder / "disk" if ranks > 1 else None
    plan = planned(weights, disks, CHECKPOINT, CHECKPOINT_SHARE if ranks > 1 else 3, gpus=ranks)
    if ranks > 1:
        store = f"file://{folder / 'store'}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=ranks)
    run = Loaded(weights, disks, plan, None)
    run.optimizer.load(weights)
    run.optimizer.save(folder / part)
    run.close()


def digests(checkpoint: Path) -> dict[str, str]:
    """Of each tensor, slices of several processes joined."""
    buffer, pieces = piece_buffer(), dict[str, list[tuple[int, TensorFile, str]]]()
    for path in sorted(checkpoint.glob("*.safetensors")):
        file = TensorFile(path)
        for key in file.entries:
            name, _, start = key.partition("@")
            if not key.startswith("random."):
                pieces.setdefault(name, []).append((int(start or 0), file, key))
    sums: dict[str, str] = {}
    for name, rows in pieces.items():
        checksum = xxhash.xxh3_64()
        for _, file, key in sorted(rows, key=lambda row: row[0]):
            with file.opened() as descriptor:
                for _, piece in file.pieces(descriptor, key, buffer):
                    checksum.update(bytes_of(piece.view(torch.uint8)))
        sums[name] = checksum.hexdigest()
    return sums


def measure_checkpoint(folder: Path) -> dict[str, Any]:
    write_models(folder, CHECKPOINT)
    (folder / "disk").mkdir()

    def begin(part: str, rank: int = 0) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--folder", str(folder), "--checkpoint", part]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "RANK": str(rank)})

    def ended(process: subprocess.Popen[str]) -> str:
        said, _ = process.communicate()
        assert process.returncode == 0, f"{process.args}: exit status {process.returncode}"
        return said

    row: dict[str, Any] = json.loads(ended(begin(PARTS[0])).splitlines()[-1])
    saved = digests(folder / "checkpoint")
    row["tensors"], row["equal"] = len(saved), {}
    for part in PARTS:
        for process in [begin(part, rank) for rank in range({PARTS[0]: 0, PARTS[1]: 1, PARTS[2]: 2}[part])]:
            ended(process)
        row["equal"][part] = digests(folder / part) == saved
        shutil.rmtree(folder / part)
    row["left"] = sorted(path.name for path in (folder / "disk").iterdir())
    return row


def memory_rows(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for number, name in enumerate(MEMORY):
        (at := folder / f"memory{number}").mkdir()
        for part in ("models", "memory"):
            done = subprocess.run(
                [sys.executable, __file__, "--folder", str(at), f"--{part}", name],
                check=True, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        shutil.rmtree(at)
    return rows


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--folder", default=".", help="on a disk that O_DIRECT reaches (default: the current folder)")
    flags.add_argument("--only", choices=("memory", "seconds", "checkpoint", "exact"), help="leave out the others")
    flags.add_argument("--models", help=argparse.SUPPRESS)
    flags.add_argument("--memory", help=argparse.SUPPRESS)
    flags.add_argument("--checkpoint", choices=PARTS, help=argparse.SUPPRESS)
    given = flags.parse_args()
    if given.models:
        write_models(Path(given.folder), MEMORY[given.models])
        return
    if given.checkpoint == PARTS[0]:
        print(json.dumps(save_checkpoint(Path(given.folder))))
        return
    if given.checkpoint:
        resume_checkpoint(Path(given.folder), given.checkpoint)
        return
    if given.memory:
        print(json.dumps(measure_memory(Path(given.folder), given.memory)))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        memory = memory_rows(Path(folder)) if given.only in (None, "memory") else []
        rows = measure(Path(folder)) if given.only in (None, "seconds") else []
        exact = [measure_exact(Path(folder), name) for name in EXACT] if given.only in (None, "exact") else []
        checkpoint = measure_checkpoint(Path(folder)) if given.only in (None, "checkpoint") else {}
    for row in memory:
        keys = ("planned_host_peak_bytes", "host_needed_bytes", "loading_bytes", "training_bytes")
        peak, needed, loading, training = (format_bytes(row[key]) for key in keys)
        print(
            f"{row['job']}: the plan's host peak is {peak}, with slabs {needed}; above the baseline, less the device, "
            f"the process takes {loading} while loading, {training} while training"
        )
    for row in rows:
        print(
            f"{row['policy']}: predicted {row['predicted_s']:.3f} s, measured "
            f"{', '.join(f'{each:.3f}' for each in row['measured_s'])} s, {row['error']:+.1%}; of the disks' time "  # type: ignore[attr-defined]
            f"{row['hidden_share']:.0%} is hidden, {row['predicted_hidden_share']:.0%} predicted"
        )
    if exact:
        write_result("disks_exact", {"jobs": exact})
    if checkpoint:
        keys = ("slots_bytes", "planned_host_peak_bytes", *(f"{phase}_bytes" for phase in PHASES))
        slots, peak, *phases = (format_bytes(checkpoint[key]) for key in keys)
        print(
            f"a checkpoint of {slots} on disks: the plan's host peak is {peak}; the process takes "
            f"{', '.join(f'{size} while {phase}' for size, phase in zip(phases, PHASES))}; all {checkpoint['tensors']} "
            f"tensors are equal: {checkpoint['equal']}; left on the disks: {checkpoint['left']}"
        )
        write_result("disks_checkpoint", {"row": checkpoint})
    if memory:
        write_result("disks_memory", {"rows": memory})
    if rows:
        write_result("disks", {"runs": rows})


if __name__ == "__main__":
    main()
