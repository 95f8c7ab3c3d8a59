"""torchtitan's TOML, up to version 0.2; from 0.3 on Python functions and flags have the same keys: `[training]
local_batch_size` is --training.local_batch_size.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Literal

from pstar_sim.core.plan import Plan
from pstar_sim.dtypes import DTYPES, MASTER, WORKING
from pstar_sim.errors import PstarError
from pstar_sim.frameworks.configuration import Configuration, spec
from pstar_sim.frameworks.express import Expressed
from pstar_sim.frameworks.fsdp import express_as, fsdp_policy, offloads, reshards
from pstar_sim.frameworks.keys import Count, ignored, nested, read_keys, unmodelled, used
from pstar_sim.schema.fields import least
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.pipeline import INTERLEAVED, SCHEDULES

TORCHTITAN = "torchtitan"
_Dtype = Literal["bfloat16", "float32"]

KEYS = (
    used("training.local_batch_size", "batch_per_gpu", Count, 8),
    used("training.global_batch_size", "train_batch", int, -1),
    used("training.seq_len", "sequence", Count, 2048),
    used("training.max_norm", "clip", Annotated[float, least(0)], 1.0),
    used("training.enable_cpu_offload", "offload", bool, False),
    used("training.mixed_precision_param", "dtype", _Dtype, "bfloat16"),
    used("parallelism.fsdp_reshard_after_forward", "reshard", Literal["default", "always", "never"], "default"),
    used("parallelism.data_parallel_replicate_degree", "replicas", Count, 1),
    used("parallelism.tensor_parallel_degree", "tensor", Count, 1),
    used("parallelism.context_parallel_degree", "context", Count, 1),
    used("parallelism.expert_parallel_degree", "experts", Count, 1),
    used("parallelism.pipeline_parallel_degree", "pipeline", Count, 1),
    used("parallelism.pipeline_parallel_schedule", "schedule", str, "1F1B"),
    used("parallelism.pipeline_parallel_microbatch_size", "pipelined_batch", Count, 1),
    used("activation_checkpoint.mode", "recompute", Literal["none", "selective", "full", "memory_budget"], "selective"),
    used("activation_checkpoint.selective_ac_option", "every", str, "2"),
    used("optimizer.name", "optimizer", str, "AdamW"),
    unmodelled("training.dtype", "parameters are taken to be fp32", off="float32"),
    unmodelled("optimizer.early_step_in_backward", "all updates are taken to run in optimizer.step()"),
    unmodelled("parallelism.data_parallel_shard_degree", "each replica is taken to slice over all its ranks", off=-1),
    unmodelled(
        "parallelism.expert_tensor_parallel_degree", "experts are taken to be split as the layers are", off=None
    ),
    unmodelled("parallelism.pipeline_parallel_layers_per_stage", "stages have equal numbers of layers", off=None),
    unmodelled("compile.enable", "compiled kernels are a choice of the model's preset (--kernels compiled)"),
    unmodelled("quantize.*", "8-bit training is not modelled", off=None),
    unmodelled("activation_checkpoint.memory_budget", "which activations a budget keeps is not known", off=0.5),
    *ignored(
        "activation_checkpoint.*",
        "checkpoint.*",
        "comm.*",
        "compile.*",
        "debug.*",
        "experimental.*",
        "fault_tolerance.*",
        "job.*",
        "lr_scheduler.*",
        "memory_estimation.*",
        "metrics.*",
        "model.*",
        "optimizer.*",
        "parallelism.*",
        "profiling.*",
        "training.*",
        "validation.*",
    ),
)

_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "Muon": "muon"}
"""optimizer.name -> pstar_sim's name. Muon comes with branches of torchtitan; releases make the other two."""
_FACTS = {
    "seq": ("sequence",),
    "dtype": ("dtype",),
    "clip": ("clip",),
    "checkpointing": ("recompute",),
    "recompute": ("recompute", "every"),
    "optimizer": ("optimizer",),
}
_SCHEDULES = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": INTERLEAVED}
_PARTS = 2
"""Of an interleaved stage, unless the file gives its layers."""
_DTYPES = {DTYPES[dtype].torch_name: dtype for dtype in (WORKING, MASTER)}


def read(content: object, file: str) -> Configuration:
    """Raises PstarError as `read_keys` does."""
    found = read_keys(KEYS, content, file, "a torchtitan configuration")
    notes = list(found.notes)
    every = None
    if found["recompute"] == "selective" and found["every"].isdigit():
        if int(found["every"]) < 1:
            key = "activation_checkpoint.selective_ac_option"
            raise PstarError(f'{file}: {key} is "{found["every"]}"; it is "op", or N for every Nth block, at least 1')
        every = f"every-{int(found['every'])}"
    if found["recompute"] in ("selective", "memory_budget") and every is None:
        option = f" with selective_ac_option = {found['every']}" if found["recompute"] == "selective" else ""
        notes.append(
            f"not modelled: activation_checkpoint.mode = {found['recompute']}{option}; --checkpointing decides"
        )
    if found["optimizer"] not in _OPTIMIZERS:
        notes.append(f"not modelled: optimizer.name = {found['optimizer']}: predicted as AdamW")
    spread = any(found[name] > 1 for name in ("tensor", "context", "experts", "pipeline"))
    if found["pipeline"] > 1 and found["schedule"] not in _SCHEDULES:
        notes.append(f"not modelled: parallelism.pipeline_parallel_schedule = {found['schedule']}: predicted as 1F1B")
    whole, batch = found["batch_per_gpu"], found["pipelined_batch"] if found["pipeline"] > 1 else found["batch_per_gpu"]
    if whole % batch:
        raise PstarError(
            f"{file}: training.local_batch_size = {whole} is no multiple of "
            f"parallelism.pipeline_parallel_microbatch_size = {batch}; torchtitan refuses it"
        )
    schedule = _SCHEDULES.get(found["schedule"], SCHEDULES[0]) if found["pipeline"] > 1 else SCHEDULES[0]
    train_batch = found["train_batch"] if found["train_batch"] > 0 else None
    keeps = found["reshard"] == "never" or (found["reshard"] == "default" and found["pipeline"] > 1)
    gathered_once = keeps and found["pipeline"] > 1 and not found["offload"] and found["replicas"] == 1
    return Configuration(
        framework=TORCHTITAN,
        policy=spec("all_on_gpu", {"shard": "states"})
        if gathered_once
        else fsdp_policy(offload=found["offload"], reshard=not keeps, replicas=found["replicas"]),
        dtype=_DTYPES[found["dtype"]],
        batch_per_gpu=batch,
        micro_batches=whole // batch if train_batch is None and whole > batch else None,
        parallelism=Parallelism(
            tensor=found["tensor"],
            sequence=found["tensor"] > 1,
            context=found["context"],
            experts=found["experts"],
            pipeline=found["pipeline"],
            schedule=schedule,
            virtual=_PARTS if schedule == INTERLEAVED else 1,
        )
        if spread
        else None,
        train_batch=train_batch,
        train_batch_key="training.global_batch_size",
        clip=found["clip"] > 0,
        checkpointing=True if every else {"full": True, "none": False}.get(found["recompute"]),
        recompute=every,
        optimizer=_OPTIMIZERS.get(found["optimizer"], "adamw"),
        details=(("sequence", found["sequence"]), ("version", 2)),
        defaults=found.unsaid(_FACTS),
        notes=tuple(notes),
        without_effect=found.without_effect,
    )


def write(configuration: Configuration) -> str:
    """As TOML. `read` of the text gives the configuration back."""
    c = configuration
    values: dict[str, object] = {
        "batch_per_gpu": c.batch_per_gpu,
        "train_batch": None if c.parallelism and c.parallelism.pipeline > 1 and c.micro_batches else c.train_batch,
        "sequence": c.detail["sequence"],
        "clip": 1.0 if c.clip else 0.0,
        "offload": offloads(c),
        "dtype": DTYPES[c.dtype or WORKING].torch_name,
        "reshard": "always" if reshards(c) else "never",
        "replicas": None if c.replicas == 1 else c.replicas,
        **_degrees(c),
        "recompute": "selective" if c.recompute else "full" if c.checkpointing else "none",
        "every": c.recompute and c.recompute.removeprefix("every-"),
        "optimizer": next(name for name, here in _OPTIMIZERS.items() if here == (c.optimizer or "adamw")),
    }
    lines = []
    for table, keys in nested(KEYS, values).items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()), ""]
    return "\n".join(lines)


def degrees(spread: Parallelism) -> Parallelism:
    """Ranks that split layers split the sequence too; interleaved stages have two parts."""
    virtual = min(spread.virtual, _PARTS)
    return replace(spread, virtual=virtual, sequence=spread.tensor > 1)


def _degrees(c: Configuration) -> dict[str, object]:
    spread = c.parallelism
    if spread is None:
        return {}
    degrees = {"tensor": spread.tensor, "context": spread.context, "experts": spread.experts}
    said: dict[str, object] = {name: ranks for name, ranks in degrees.items() if ranks > 1}
    if spread.pipeline > 1:
        said |= {"pipeline": spread.pipeline, "pipelined_batch": c.batch_per_gpu}
        said["schedule"] = next(name for name, here in _SCHEDULES.items() if here == spread.schedule)
        said["batch_per_gpu"] = (c.batch_per_gpu or 1) * (c.micro_batches or 1)
    return said


def express(plan: Plan) -> Expressed:
    w = plan.workload
    found = express_as(
        plan,
        TORCHTITAN,
        {"version": 2, "sequence": w.sequence},
        trains_scaled=False,
        recomputes_blocks=True,
        optimizer="adam" if w.optimizer.name == "adam" else "adamw",
    )
    configuration = replace(
        found.configuration,
        batch_per_gpu=w.batch,
        train_batch=w.batch * w.micro_batches * plan.machine.data_parallel_size,
        clip=plan.settings.clip,
        checkpointing=w.checkpointing,
        recompute=w.recompute if w.checkpointing else None,
    )
    return replace(found, configuration=configuration)
