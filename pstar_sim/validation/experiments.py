"""Published runs as jobs for the policies here.

All is a fact of the runs (rows, the systems' code and logs) or an assumption in NOTES.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

from msgspec import structs

from pstar_sim.catalog.efficiency import Efficiency, fitted
from pstar_sim.catalog.loader import with_nodes
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry, count_params, model_entry
from pstar_sim.core.plan import Settings
from pstar_sim.dtypes import MASTER, WORKING
from pstar_sim.errors import CatalogError
from pstar_sim.python310 import toml_loads
from pstar_sim.units import GIB
from pstar_sim.validation.rows import PublishedRow
from pstar_sim.validation.setups import (
    Experiment,
    first_ranks,
    gpt_entry,
    published_machine,
    whole_number,
    with_gpu_bytes,
)
from pstar_sim.validation.whole_steps import WHOLE_STEPS, as_set_up

NOTES = (
    "memory is what the GPUs report (32 GiB of a V100), not the catalog's nominal 32 GB",
    "host memory of DeepSpeed: 24 bytes per parameter (its estimator's 16 x 1.5) and 20 GiB of system and processes",
    "the Yard's runs classify sequences, as PatrickStar's code has it, DeepSpeed's for comparison too: no logits",
    "DeepSpeed on the Yard is ZeRO-3 with buckets of 10 M parameters; its checkpoints go to CPU memory, unpinned",
    "ZeRO-Offload is stage 2: no hooks of parameters, so no moment waits for them",
    "one process on DGX-2 and Yard reaches the cores and the memory of one of two sockets",
    "PatrickStar may use 0.8 of the GPU and of the host (overall_gpu_mem_ratio, overall_cpu_mem_ratio)",
    "checkpoints are reentrant, as these systems made them: a recompute runs the whole layer",
    "runs before 2023 have no flash attention; those of the Deep Optimizer States logs are taken to have it",
    "kernels are those of the run's source: fused for MPT, eager for every other system; OPT's ReLU is taken as a GELU",
    "models of the Deep Optimizer States logs: 4 key-value heads, vocabulary 50304: this gives the published counts",
    "Polaris: processes of the logs named gaps-a100 and of the H100 node are bound with numactl, all others are not",
    "Polaris, two nodes: NCCL over TCP, at the rates that the centre's own tests measured with NCCL 2.18",
    "gradients that twin-flow and Deep Optimizer States flush as fp32 hold up the next moment",
    "ZeRO-3 with offloading hides the gathers of the forward pass; collectives of the backward pass hold it up",
)

UNEXPLAINED = (
    "CPU Adam of bound processes reaches 0.30 of the DRAM's peak on the H100 node, 0.43 on Polaris (all hosts: 0.27)",
    "Polaris: CPU Adam of one unbound process, 1.45 Gparam/s, is fitted as 7 cores' work; its log lets it use 32",
    "Polaris, 13B on one GPU: Deep Optimizer States' backward is longer than with the flush alone",
    "ZeRO-Offload on V100: 20-50 % slower than its mechanism; in its one log forward takes 2.9 s more, backward 2 s",
    "the VM's CPU Adam: a quarter of what its cores should do; its rate is fitted",
    "STRONGHOLD: a layer outside the window takes up to 90 ms more than computing it; five copies in a row take 84",
    "GPU memory of the H100 node: its monitor shows 10 GiB more than is held, perhaps the allocator's cache",
    "Polaris, two nodes: forward is predicted 11 to 21 % too short, backward 4 % too short to 21 % too long",
    "DeepSpeed gathers ahead in both passes, and why only those of the forward pass are hidden is not known",
)

OTHER_HOST_BYTES = 20 * GIB
HOST_BYTES_PER_PARAM = 24.0
PATRICKSTAR_RATIO = 0.8
YARD_DEEPSPEED = "zero3_offload:bucket=10000000,prefetch=10000000,checkpoints=host"
"""Stage 3 with clipping and checkpoints in CPU memory, as PatrickStar's authors ran it for comparison
(tests/ds_zero_stage_3_config.json there)."""
KV_HEADS, DOS_VOCAB, GPT_VOCAB = 4, 50304, 50257
POLARIS_CORES_A_RANK = 7


def runs_of(rows: Iterable[PublishedRow]) -> list[tuple[PublishedRow, ...]]:
    """By run, in the order of each run's first row."""
    found: dict[tuple[str, ...], list[PublishedRow]] = {}
    for row in rows:
        found.setdefault(row.run, []).append(row)
    return [tuple(run) for run in found.values()]


def experiment_of(run: tuple[PublishedRow, ...], efficiency: Efficiency | None = None) -> Experiment:
    """efficiency: in place of the shipped (for fitting).

    Raises CatalogError for a run out of scope.
    """
    row = run[0]
    if row.setup:
        return as_set_up(run, efficiency or fitted())
    for pattern, make in _KNOWN.items():
        if fnmatchcase(row.hardware, pattern):
            return make(run, efficiency or fitted())
    raise CatalogError(f"{row.where}: no experiment is known for {row.system} on {row.hardware}")


@cache
def _harness() -> Mapping[str, float]:
    """Seconds per micro-batch of a training loop outside the model, by source."""
    text = (files("pstar_sim.validation") / "data" / "harness.toml").read_text(encoding="utf-8")
    return {name: float(entry["loop_ms"]) / 1e3 for name, entry in toml_loads(text).items()}


def _loop_s(source: str) -> float:
    return next((seconds for name, seconds in _harness().items() if source.startswith(name)), 0.0)


# Deep Optimizer States logs: ZeRO-3 with the optimizer on the CPU, on Polaris and on the H100 node.

_BOUND = "-gaps-a100"
"""Ending of the sources whose logs start each process with numactl, on the cores and the memory of one NUMA domain."""
_DOS_SHAPE = re.compile(r"(\d+)/(\d+)/(\d+) ffn(\d+) swiglu")
_DOS_BATCH = re.compile(r"gbs(\d+) mbs(\d+)")


def _dos_model(row: PublishedRow) -> ModelEntry:
    match = _DOS_SHAPE.fullmatch(row.shape)
    if match is None:
        raise CatalogError(f"{row.where}: {row.shape!r} is not a shape such as 32/4096/32 ffn11008")
    layers, hidden, heads, ffn = map(int, match.groups())
    entry = ModelEntry(
        name=f"llama {layers}x{hidden} ffn {ffn}",
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=KV_HEADS,
        ffn=ffn,
        vocab=DOS_VOCAB,
        max_seq=2048,
        tied=False,
        params=0,
        source=row.source,
    )
    entry = structs.replace(entry, params=count_params(entry))
    if entry.params != int(row.params):
        raise CatalogError(f"{row.where}: {row.shape} has {entry.params} parameters, not {row.params}")
    return entry


def _dos_policy(system: str) -> str:
    options: list[str] = ["subgroup=100000000"]
    if match := re.search(r"ratio([\d.]+)", system):
        options.append(f"ratio={float(match[1]):g}")
    if match := re.search(r"gap(\d+)", system):
        return "deep_optimizer_states:" + ",".join([f"every={match[1]}", *options])
    flush = "async" if "async flush" in system else "blocking"
    return "zero3_offload:" + ",".join([f"flush={flush}", *options])


def _dos(run: tuple[PublishedRow, ...], efficiency: Efficiency) -> Experiment:
    row = run[0]
    match = _DOS_BATCH.fullmatch(row.batch)
    if match is None:
        raise CatalogError(f"{row.where}: batch {row.batch!r} is not a batch such as gbs16 mbs4")
    whole, each = map(int, match.groups())
    if row.hardware.startswith("Polaris"):
        bound = row.source.endswith(_BOUND)
        machine = published_machine("polaris-bound" if bound else "polaris-dos", efficiency, "deepspeed")
        used = min(row.gpus, machine.world_size)
        machine = first_ranks(machine, used, cores_a_rank=POLARIS_CORES_A_RANK, efficiency=efficiency)
        if row.gpus > used:
            machine = with_nodes(machine, row.gpus // used)
    else:
        machine = first_ranks(published_machine("h100-80x4", efficiency, "deepspeed"), row.gpus)
    return Experiment(
        rows=run,
        machine=machine,
        policy=_dos_policy(row.system),
        sizes=(_dos_model(row),),
        sequence=whole_number(row, "sequence", row.sequence),
        batches=(each,),
        micro_batches=whole // (each * row.gpus),
        dtype=WORKING,
        attention="flash",
        settings=Settings(update="step", clip=False),
        loop_s=_loop_s(row.source),
        other_host_bytes=OTHER_HOST_BYTES,
    )


# GPT shapes: PatrickStar's table, Megatron's.


def _gpt(layers: int, hidden: int, heads: int, sequence: int) -> ModelEntry:
    return gpt_entry(layers, hidden, heads, vocab=GPT_VOCAB, positions=sequence)


def _gpt_of(row: PublishedRow) -> ModelEntry:
    layers, hidden, heads = (whole_number(row, "shape", part) for part in row.shape.split("/"))
    return _gpt(layers, hidden, heads, whole_number(row, "sequence", row.sequence))


def _dgx2(run: tuple[PublishedRow, ...], efficiency: Efficiency) -> Experiment:
    row = run[0]
    return Experiment(
        rows=run,
        machine=first_ranks(published_machine("dgx2", efficiency, "pytorch"), row.gpus, sockets=2),
        policy="zero_offload",
        sizes=(_gpt_of(row),),
        sequence=whole_number(row, "sequence", row.sequence),
        batches=(whole_number(row, "batch", row.batch),),
        micro_batches=1,
        dtype="fp16",
        attention="math",
        settings=Settings(update="step", clip=False),
        other_host_bytes=OTHER_HOST_BYTES,
        host_bytes_per_param=HOST_BYTES_PER_PARAM,
    )


_YARD_BATCHES = (8, 16, 32)
_YARD_SIZES = ("8B", "10B", "11B", "12B", "13B", "15B", "18B", "DS_20B")
"""PatrickStar's models around its largest one on the Yard."""


def _yard(run: tuple[PublishedRow, ...], efficiency: Efficiency) -> Experiment:
    row = run[0]
    patrickstar = row.system.startswith("PatrickStar")
    framework = "patrickstar" if patrickstar else "deepspeed"
    machine = first_ranks(published_machine("v100-32x8", efficiency, framework), row.gpus, sockets=2)
    if patrickstar:
        machine = _with_ratio(machine, PATRICKSTAR_RATIO)
    largest = row.metric == "max_trainable_model"
    one = re.match(r"\d+", row.batch)  # "16 (inferred)", "best of 8/16/32", "best", ""
    batches = (int(one[0]),) if one else (_YARD_BATCHES[:1] if largest else _YARD_BATCHES)
    return Experiment(
        rows=run,
        machine=machine,
        policy="patrickstar" if patrickstar else YARD_DEEPSPEED,
        sizes=tuple(model_entry(name) for name in _YARD_SIZES) if largest else (_gpt_of(row),),
        sequence=whole_number(row, "sequence", row.sequence),
        batches=batches,
        micro_batches=1,
        dtype="fp16",
        attention="math",
        settings=Settings(update="step", clip=not patrickstar),
        other_host_bytes=OTHER_HOST_BYTES,
        host_bytes_per_param=0.0 if patrickstar else HOST_BYTES_PER_PARAM,
        language_head=False,
    )


def _with_ratio(machine: Machine, ratio: float) -> Machine:
    reserved = round(machine.host.memory_bytes * (1 - ratio))
    machine = replace(machine, host=replace(machine.host, reserved_bytes=reserved))
    return with_gpu_bytes(machine, round(machine.gpu.usable_bytes * ratio) + machine.gpu.context_bytes)


_VM_POLICIES = {"Megatron-LM": "all_on_gpu", "ZeRO-Offload": "zero_offload", "ZeRO-Infinity CPU": "zero_infinity"}
_VM_WINDOW = re.compile(r"STRONGHOLD(?: w(\d+))?")
_VM_LAYERS = (16, 24, 32, 48, 64, 78, 100)
"""Numbers of layers of the models that were tried on STRONGHOLD's machine (0.9 B to 5.1 B parameters)."""


def _vm_policy(system: str) -> str:
    if match := _VM_WINDOW.fullmatch(system):
        return "stronghold" + (f":window={match[1]}" if match[1] else "")
    return _VM_POLICIES[system]


def _vm(run: tuple[PublishedRow, ...], efficiency: Efficiency) -> Experiment:
    row = run[0]
    sequence = whole_number(row, "sequence", row.sequence)
    largest = row.metric == "max_trainable_model"
    framework = "deepspeed" if row.system.startswith("ZeRO-Infinity") else "pytorch"
    return Experiment(
        rows=run,
        machine=published_machine("v100-32-vm", efficiency, framework),
        policy=_vm_policy(row.system),
        sizes=tuple(_gpt(n, 2048, 16, sequence) for n in _VM_LAYERS) if largest else (_gpt_of(row),),
        sequence=sequence,
        batches=(whole_number(row, "batch", row.batch),),
        micro_batches=1,
        dtype=MASTER,
        attention="math",
        settings=Settings(update="eager" if _VM_WINDOW.fullmatch(row.system) else "step", clip=False),
        other_host_bytes=OTHER_HOST_BYTES,
        host_bytes_per_param=HOST_BYTES_PER_PARAM if row.system == "ZeRO-Offload" else 0.0,
    )


_KNOWN: Mapping[str, Callable[[tuple[PublishedRow, ...], Efficiency], Experiment]] = {
    "Polaris-A100-40GB*": _dos,
    "4xH100-80GB*": _dos,
    "1xV100-SXM3-32GB (DGX-2 class)*": _dgx2,
    "8xV100-SXM2-32GB 240GB DRAM (Yard)*": _yard,
    "1xV100-32GB (Yard)*": _yard,
    "1xV100-32GB, 12 cores*": _vm,
    **WHOLE_STEPS,
}
