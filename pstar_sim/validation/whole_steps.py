"""Published runs without phases (FSDP, eager fp32, whole_steps-3.csv), as jobs.

Facts about them are in data/README.md, written before the first replay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from msgspec import structs

from pstar_sim.catalog.attention import ATTENTION
from pstar_sim.catalog.efficiency import Efficiency
from pstar_sim.catalog.loader import with_nodes
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry, model_entry
from pstar_sim.core.plan import Settings
from pstar_sim.dtypes import MASTER, WORKING
from pstar_sim.errors import CatalogError
from pstar_sim.validation.rows import PublishedRow
from pstar_sim.validation.setups import Experiment, first_ranks, gpt_entry, published_machine, whole_number

_MPT_SHAPE = re.compile(r"(\d+)/(\d+)/(\d+) vocab(\d+)")
_MPT_BATCH = re.compile(r"gbs(\d+) mbs(\d+)")


def _mpt(row: PublishedRow) -> ModelEntry:
    match = _MPT_SHAPE.fullmatch(row.shape)
    if match is None:
        raise CatalogError(f"{row.where}: {row.shape!r} is not a shape such as 32/4096/32 vocab50368")
    layers, hidden, heads, vocab = map(int, match.groups())
    positions = whole_number(row, "sequence", row.sequence)
    entry = gpt_entry(layers, hidden, heads, vocab=vocab, positions=positions, source=row.source)
    if entry.params != int(row.params):
        raise CatalogError(f"{row.where}: {row.shape} has {entry.params} parameters, not {row.params}")
    return entry


def _fsdp(run: tuple[PublishedRow, ...], efficiency: Efficiency) -> Experiment:
    row = run[0]
    match = _MPT_BATCH.fullmatch(row.batch)
    if match is None:
        raise CatalogError(f"{row.where}: batch {row.batch!r} is not a batch such as gbs16 mbs4")
    whole, each = map(int, match.groups())
    machine = published_machine("a100-80x8" if "A100" in row.hardware else "h100-80x8", efficiency, "pytorch")
    return Experiment(
        rows=run,
        machine=with_nodes(machine, row.gpus // machine.world_size),
        policy="zero3_resident" + (":reshard=off" if "SHARD_GRAD_OP" in row.settings else ""),
        sizes=(_mpt(row),),
        sequence=whole_number(row, "sequence", row.sequence),
        batches=(each,),
        micro_batches=whole // (each * row.gpus),
        dtype=WORKING,
        attention="triton",
        settings=Settings(update="step", clip=True),
        checkpointing="no checkpointing" not in row.settings,
        early_stop=True,
        kernels="fused",
    )


_EAGER_SHAPES = {"gpt2_large": (36, 1280, 20), "gpt3_xl": (24, 3072, 24), "gpt3_27": (32, 2560, 32)}
_EAGER_MACHINES = {
    "Tesla_V100-PCIE-32GB": "v100-32",
    "NVIDIA_A100_80GB_PCIe": "a100-80",
    "NVIDIA_H100_80GB_HBM3": "h100-80",
}
_EAGER_NODES = {"NVIDIA_A100-SXM4-40GB": "a100-40x8", "NVIDIA_H100_80GB_HBM3": "h100-80x8"}


def _eager_model(row: PublishedRow) -> ModelEntry:
    sequence = whole_number(row, "sequence", row.sequence)
    if row.shape == "bert_large":
        return model_entry("bert-large")
    if row.shape == "opt_13":
        return gpt_entry(24, 2048, 32, vocab=50272, positions=sequence, source=row.source)
    if row.shape not in _EAGER_SHAPES:
        raise CatalogError(f"{row.where}: no shape is known for {row.shape}")
    return gpt_entry(*_EAGER_SHAPES[row.shape], vocab=50257, positions=sequence, source=row.source)


def _eager_machine(row: PublishedRow, efficiency: Efficiency) -> Machine:
    gpu = row.hardware.partition("x")[2].partition(" ")[0]
    if row.gpus == 1:
        return published_machine(_EAGER_MACHINES[gpu], efficiency, "pytorch")
    return first_ranks(published_machine(_EAGER_NODES[gpu], efficiency, "pytorch"), row.gpus)


def _eager(run: tuple[PublishedRow, ...], efficiency: Efficiency) -> Experiment:
    row = run[0]
    return Experiment(
        rows=run,
        machine=_eager_machine(row, efficiency),
        policy="all_on_gpu",
        sizes=(_eager_model(row),),
        sequence=whole_number(row, "sequence", row.sequence),
        batches=(whole_number(row, "batch", row.batch) // row.gpus,),
        micro_batches=1,
        dtype=MASTER,
        attention="math",
        settings=Settings(update="step", clip=False),
        checkpointing=False,
        early_stop=True,
        optimizer="sgd",  # the runs make no updates, so moments take no memory
    )


def as_set_up(run: tuple[PublishedRow, ...], efficiency: Efficiency) -> Experiment:
    """The job as which the row says it is replayed."""
    row, setup = run[0], dict(run[0].setup)
    sequence = whole_number(row, "sequence", row.sequence)
    entry = model_entry(row.params)
    kernel = setup["attention_kernel"]  # "not said", "sdpa": the column beside it decides
    autocast = setup["dtype"] if "AMP" in setup["note"] and setup["dtype"] != MASTER else None
    machine = published_machine(setup["as_machine"], efficiency, setup["as_framework"])
    if "offload" in row.system and row.hardware.startswith("8xA800"):  # the launcher is not said: as torchrun leaves it
        machine = replace(machine, host=machine.host.as_launched(efficiency.adam_found_params_per_s))
    return Experiment(
        rows=run,
        machine=first_ranks(machine, whole_number(row, "as_gpus", setup["as_gpus"])),
        policy=setup["as_policy"],
        sizes=(structs.replace(entry, max_seq=max(entry.max_seq, sequence)),),
        sequence=sequence,
        batches=(whole_number(row, "micro_batch", setup["micro_batch"]),),
        micro_batches=whole_number(row, "micro_batches", setup["micro_batches"]),
        dtype=None if autocast else setup["dtype"],
        autocast=autocast,
        attention=kernel if kernel in ATTENTION else setup["attention"],
        settings=Settings(update="step", clip=setup["clip"] == "1"),
        checkpointing=setup["checkpointing"] == "1",
        early_stop=setup["reentrant"] == "0",
        kernels=setup["kernels"],
        optimizer=setup["optimizer"],
        lora=setup["lora"] or None,
        loss="fused" if "Liger" in row.system else None,
    )


WHOLE_STEPS: Mapping[str, Callable[[tuple[PublishedRow, ...], Efficiency], Experiment]] = {
    "*(MosaicML)": _fsdp,
    "*(NeuSight)": _eager,
}
"""Hardware as published, as a shell pattern -> function that makes the experiment of a run."""
