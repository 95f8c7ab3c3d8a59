"""A stage of gpu_memory.py: one plan on a CUDA device, and the memory that torch reserves while it runs."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pstar_sim.core.plan import Plan
from pstar_sim.errors import DoesNotFit

CALLS = ("cudaMalloc", "cudaFree", "cuMemMap", "cuMemUnmap")
WARM_STEPS = 3
CAP_STEP_BYTES = 10**8


def preset(name: str, *, dtype: str, **shape: int) -> nn.Module:
    """Returns a model of the catalog."""
    from executor.models import TORCH_DTYPES, build

    def make() -> nn.Module:
        return build(name, dtype=dtype, device="meta", **shape).module

    return empty(make, dtype=TORCH_DTYPES[dtype])


def of_transformers(kind: str, config: str, *, dtype: str, checkpointing: bool = False, **shape: Any) -> nn.Module:
    """Returns a model of transformers with a configuration of ours."""
    import transformers

    from executor.models import TORCH_DTYPES

    made = getattr(transformers, config)(**shape)
    return empty(lambda: getattr(transformers, kind)(made), dtype=TORCH_DTYPES[dtype], checkpointing=checkpointing)


def empty(make: Callable[[], nn.Module], *, dtype: torch.dtype, checkpointing: bool = False) -> nn.Module:
    """Returns the module with zeros in place of its weights: pages of zeros take no host memory."""
    with torch.device("meta"):
        module = make().to(dtype).train()
    module.to_empty(device="cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if hasattr(module, "tie_weights"):
        module.tie_weights()
    if checkpointing:
        module.gradient_checkpointing_enable()  # type: ignore[operator]
    return module


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        middle = out // 4
        self.body = nn.Sequential(
            nn.Conv2d(channels, middle, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU(),
            nn.Conv2d(middle, middle, 3, stride, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU(),
            nn.Conv2d(middle, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        same = stride == 1 and channels == out
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """The shapes of ResNet-50."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        channels = 64
        for out, count, stride in ((256, 3, 1), (512, 4, 2), (1024, 6, 2), (2048, 3, 2)):
            for index in range(count):
                layers.append(Residual(channels, out, stride if index == 0 else 1))
                channels = out
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(images), labels)


def tokens(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch, sequence, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def same(batch: Any) -> Iterator[Any]:
    while True:
        yield batch


def ragged(batch: int, sequence: int) -> Iterator[Any]:
    """Yields batches padded to their longest row, of 1/8 to all of `sequence`."""
    draw = random.Random(0)
    while True:
        yield tokens(batch, draw.randint(sequence // 8, sequence))


def packed(*lengths: int) -> dict[str, torch.Tensor]:
    """Returns one row of several sequences, each with positions of its own."""
    return {**tokens(1, sum(lengths)), "position_ids": torch.cat([torch.arange(size) for size in lengths])[None]}


def packs(room: int) -> Iterator[Any]:
    """Yields rows of 2 to 8 sequences that have `room` tokens at most together."""
    draw = random.Random(0)
    while True:
        count = draw.randint(2, 8)
        yield packed(*(draw.randint(16, room // count) for _ in range(count)))


LLAMA = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 4,
}  # fmt: skip
T5 = {
    "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
MIXTRAL = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def images(batch: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(batch, 3, 224, 224, dtype=dtype), torch.zeros(batch, dtype=torch.int64)


def pixels(batch: int) -> dict[str, torch.Tensor]:
    pictures, labels = images(batch)
    return {"pixel_values": pictures, "labels": labels}


def gpt2(dtype: str) -> nn.Module:
    return preset("gpt2", dtype=dtype)


# name -> (module, largest batch, batches of the run)
MODELS: Mapping[str, Callable[[], tuple[nn.Module, Any, Iterator[Any]]]] = {
    "gpt2 8x512 fp32": lambda: (gpt2("fp32"), tokens(8, 512), same(tokens(8, 512))),
    "gpt2 16x1024 bf16": lambda: (gpt2("bf16"), tokens(16, 1024), same(tokens(16, 1024))),
    "vit-b-16 32 fp32": lambda: (preset("vit-b-16", dtype="fp32"), pixels(32), same(pixels(32))),
    "llama, 4 layers, 4x2048 bf16 checkpointed": lambda: (
        of_transformers("LlamaForCausalLM", "LlamaConfig", dtype="bf16", checkpointing=True, **LLAMA),
        tokens(4, 2048), same(tokens(4, 2048)),
    ),
    "bert-base 16x512 fp32": lambda: (
        preset("bert-base", dtype="fp32", sequence=512), tokens(16, 512), same(tokens(16, 512))),
    "t5-base 8x512 bf16": lambda: (
        of_transformers("T5ForConditionalGeneration", "T5Config", dtype="bf16", **T5),
        tokens(8, 512), same(tokens(8, 512)),
    ),
    "mixtral 8 experts 4x1024 bf16": lambda: (
        of_transformers("MixtralForCausalLM", "MixtralConfig", dtype="bf16", **MIXTRAL),
        tokens(4, 1024), same(tokens(4, 1024)),
    ),
    "gpt2 8 x up to 512 ragged fp32": lambda: (gpt2("fp32"), tokens(8, 512), ragged(8, 512)),
    "gpt2 1 x up to 1024 packed bf16": lambda: (gpt2("bf16"), packed(512, 512), packs(1024)),
    "resnet-50 64 fp32": lambda: (empty(ResNet, dtype=torch.float32), images(64), same(images(64))),
}  # fmt: skip


def smallest_cap(plan_within: Callable[[int], Plan]) -> int:
    """Returns the smallest cap, in steps of CAP_STEP_BYTES up to 40 GB, that has a plan. Raises DoesNotFit."""
    low, high = 0, 400
    plan_within(high * CAP_STEP_BYTES)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            plan_within(middle * CAP_STEP_BYTES)
        except DoesNotFit:
            low = middle
        else:
            high = middle
    return high * CAP_STEP_BYTES


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    from executor import AdamW, prepare, training
    from executor.capture import capture_module
    from executor.models import map_batch
    from pstar_sim.catalog.loader import load_machine
    from pstar_sim.core.plan import Settings
    from pstar_sim.policy.registry import find_policy

    module, largest, batches = MODELS[job["model"]]()
    steps = job["steps"]
    workload = capture_module(module, largest, name=job["model"], device="cuda")
    row: dict[str, Any] = {"tide_bytes": workload.peak_non_model_bytes}
    settings = Settings(update=job.get("update", "eager"), clip=False)

    def plan_within(cap_bytes: int) -> Plan:
        return find_policy(job["policy"])(workload, load_machine("a100-40", gpu_memory=cap_bytes), settings)

    try:
        smallest = smallest_cap(plan_within)
        cap_bytes = int(job["share"] * smallest)
        plan = plan_within(cap_bytes)
    except DoesNotFit as error:
        return {**row, "no_plan": str(error)}
    row["cap_bytes"], row["smallest_plan_bytes"] = cap_bytes, smallest
    row["budget_bytes"] = plan.gpu_budget_bytes
    shim = ctypes.CDLL(None)
    for name in ("emulated_cuda_calls", "emulated_cuda_total"):
        getattr(shim, name).restype = ctypes.c_uint64

    def calls() -> dict[str, int]:
        return {name: shim.emulated_cuda_calls(name.encode()) for name in CALLS}

    there = (map_batch(batch, lambda tensor: tensor.cuda()) for batch in batches)
    step = -1
    model, optimizer = prepare(
        module, plan, AdamW(lr=1e-4, eager=plan.settings.update == "eager"), device="cuda", gpu_memory=cap_bytes
    )
    session = optimizer.session
    training._finite = lambda loss, number: 0.0  # without arithmetic a loss is any number
    try:
        for step in range(WARM_STEPS + steps):
            if step == WARM_STEPS:
                with session.still():
                    torch.cuda.synchronize()
                    row["first_reserved_peak_bytes"] = torch.cuda.max_memory_reserved()
                    before, exchanges, stats = calls(), session.backend.exchanges, torch.cuda.memory_stats()
            training.train_step(model, optimizer, there, workload.micro_batches)
        with session.still():
            torch.cuda.synchronize()
        after, now = calls(), torch.cuda.memory_stats()
        row["exchanges_per_step"] = (session.backend.exchanges - exchanges) / steps
        row["retries_per_step"] = (now["num_alloc_retries"] - stats["num_alloc_retries"]) / steps
        row |= {f"{name}_per_step": (after[name] - before[name]) / steps for name in CALLS}
    except Exception as error:
        row["died"] = f"step {step}: {type(error).__name__}: {error}"[:300]
    row |= {
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
        "allocated_peak_bytes": torch.cuda.max_memory_allocated(),
        "iterations": step + 1,
        "rungs": len(session.ladder),
        "deviations": session.deviations,
        "pool_bytes": session.backend.pool_bytes,
        "slack_bytes": session.backend.slack_bytes,
        "workspace_bytes": session.backend.kept.workspace_bytes,
        "chunks": len(plan.layout.chunks),
        "last_budget_bytes": session.plan.gpu_budget_bytes,
    }
    try:
        session.close(restore=False)
    except Exception as error:
        row["close"] = str(error)[:100]
    return row
