"""DeepSpeed (version 0.19): its JSON configuration, and allocations on the host.

Stage 3 is zero3_offload with the optimizer on the CPU, zero_infinity with disks, else zero3_resident; stages 1 and 2
zero_offload with the optimizer on the CPU, else zero3_resident with reshard=False (parameters gathered in forward
stay); stage 0 all_on_gpu.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pstar_sim.core.plan import Plan
from pstar_sim.dtypes import DTYPES, MASTER, WORKING
from pstar_sim.errors import PstarError
from pstar_sim.frameworks.configuration import Configuration, in_full, spec
from pstar_sim.frameworks.express import (
    NOT_PINNED,
    Expressed,
    common_limits,
    common_says,
    optimizer_limits,
    options_of_plan,
    placed,
    whereabouts,
)
from pstar_sim.frameworks.host_memory import (
    Allocation,
    Copies,
    MemoryRules,
    allocation,
    frozen,
    moments_bytes_per_param,
    rank_sizes,
    sub_groups,
    tensor_allocations,
    trained,
)
from pstar_sim.frameworks.keys import AUTO, PARALLELISM, Count, KeyReading, ignored, nested, read_keys, unmodelled, used
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.policy.systems.sharded import (
    MAX_REUSE_PARAMS,
    PREFETCH_PARAMS,
    REDUCE_BUCKET_PARAMS,
    SUB_GROUP_PARAMS,
)
from pstar_sim.schema.fields import between, least
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.workload import Workload

DEEPSPEED = "DeepSpeed"

_Size = Annotated[int, least(0)]
_HALF = tuple(dtype for dtype in DTYPES if dtype != MASTER)
"""Dtypes that a section of their name switches on."""
_Device = Literal["none", "cpu", "nvme"]
_ZERO = "zero_optimization"

KEYS = (
    used("train_micro_batch_size_per_gpu", "batch_per_gpu", Count),
    used("gradient_accumulation_steps", "micro_batches", Count),
    used("train_batch_size", "train_batch", Count),
    used("gradient_clipping", "clip", Annotated[float, least(0)], 1.0),
    used("bf16.enabled", "bf16", bool, False, also=("bfloat16.enabled",)),
    used("bf16.bf16_master_weights_and_grads", "bf16_masters", bool, False),
    used("bf16.bf16_optimizer_states", "bf16_states", bool, False),
    used("fp16.enabled", "fp16", bool, False),
    used("fp16.fp16_master_weights_and_grads", "fp16_masters", bool, False),
    used("data_types.grad_accum_dtype", "sums", Literal["fp32", "fp16", "bf16"]),
    used(f"{_ZERO}.stage", "stage", Literal[0, 1, 2, 3], 0),
    used(f"{_ZERO}.offload_optimizer.device", "states", _Device, "none"),
    used(f"{_ZERO}.offload_optimizer.nvme_path", "states_path", str),
    used(f"{_ZERO}.offload_optimizer.pin_memory", "pinned", bool, True),
    used(f"{_ZERO}.offload_optimizer.ratio", "ratio", Annotated[float, between(0, 1)], 1.0),
    used(f"{_ZERO}.offload_optimizer.buffer_count", "states_buffers", _Size, 4),
    used(f"{_ZERO}.offload_optimizer.pipeline_read", "read_ahead", bool, False),
    used(f"{_ZERO}.offload_optimizer.pipeline_write", "write_behind", bool, False),
    used(f"{_ZERO}.offload_param.device", "params", _Device, "none"),
    used(f"{_ZERO}.offload_param.nvme_path", "params_path", str),
    used(f"{_ZERO}.offload_param.pin_memory", "pinned_params", bool, True),
    used(f"{_ZERO}.offload_param.buffer_count", "params_buffers", _Size, 5),
    used(f"{_ZERO}.offload_param.buffer_size", "params_buffer", _Size, 100_000_000),
    used(f"{_ZERO}.offload_param.max_in_cpu", "params_in_cpu", _Size, 1_000_000_000),
    used(f"{_ZERO}.cpu_offload", "cpu_offload", bool, False),
    used(f"{_ZERO}.cpu_offload_param", "cpu_offload_param", bool, False, also=(f"{_ZERO}.cpu_offload_params",)),
    used(
        f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
        "gathers",
        bool,
        False,
        also=(f"{_ZERO}.stage3_gather_fp16_weights_on_model_save", f"{_ZERO}.gather_16bit_weights_on_model_save"),
    ),
    used(f"{_ZERO}.sub_group_size", "subgroup", _Size, SUB_GROUP_PARAMS),
    used(f"{_ZERO}.reduce_bucket_size", "bucket", Count, REDUCE_BUCKET_PARAMS),
    used(f"{_ZERO}.stage3_max_reuse_distance", "reuse", _Size, MAX_REUSE_PARAMS, also=(f"{_ZERO}.max_reuse_distance",)),
    used(
        f"{_ZERO}.stage3_prefetch_bucket_size",
        "prefetch",
        _Size,
        PREFETCH_PARAMS,
        also=(f"{_ZERO}.prefetch_bucket_size",),
    ),
    used("optimizer.type", "optimizer", str),
    used("optimizer.params.adam_w_mode", "decoupled", bool, True),
    used("optimizer.params.momentum", "momentum", Annotated[float, least(0)], 0.0),
    used("zero_allow_untested_optimizer", "untested", bool, False),
    used("activation_checkpointing.cpu_checkpointing", "checkpoints_on_host", bool, False),
    unmodelled(
        f"{_ZERO}.overlap_comm",
        "gradients are taken to be summed beside backward (zero3_offload: compute waits)",
        off=True,
    ),
    unmodelled(f"{_ZERO}.contiguous_gradients", "gradients are taken to pass through one bucket", off=True),
    unmodelled(f"{_ZERO}.reduce_scatter", "gradients are taken to be reduce-scattered", off=True),
    unmodelled(f"{_ZERO}.allgather_partitions", "parameters are taken to be all-gathered", off=True),
    unmodelled(f"{_ZERO}.round_robin_gradients", "ranks are taken to copy their own slices"),
    unmodelled(
        f"{_ZERO}.stage3_max_live_parameters",
        "gathered parameters are not limited in number",
        off=10**9,
        also=(f"{_ZERO}.max_live_parameters",),
    ),
    unmodelled(
        f"{_ZERO}.stage3_param_persistence_threshold",
        "which small tensors stay whole is our own rule",
        off=100_000,
        also=(f"{_ZERO}.param_persistence_threshold",),
    ),
    unmodelled(
        f"{_ZERO}.stage3_model_persistence_threshold",
        "small tensors that stay whole are not limited",
        off=None,
        also=(f"{_ZERO}.model_persistence_threshold",),
    ),
    unmodelled(
        f"{_ZERO}.stage3_module_granularity_threshold",
        "parameters are gathered chunk by chunk",
        off=0,
        also=(f"{_ZERO}.module_granularity_threshold",),
    ),
    unmodelled(
        f"{_ZERO}.stage3_use_all_reduce_for_fetch_params",
        "parameters are taken to be all-gathered",
        also=(f"{_ZERO}.use_all_reduce_for_fetch_params",),
    ),
    unmodelled(
        f"{_ZERO}.stage3_allgather_sequential",
        "parameters are taken to be gathered in buckets",
        also=(f"{_ZERO}.allgather_sequential",),
    ),
    unmodelled(f"{_ZERO}.offload_optimizer.super_offload", "the optimizer is taken to be DeepSpeed's CPU Adam"),
    unmodelled(f"{_ZERO}.zenflow.*", "every gradient is taken to be used in its own step", off=None),
    unmodelled(f"{_ZERO}.zero_hpz_partition_size", "slices are taken to be spread over all ranks", off=1),
    unmodelled(f"{_ZERO}.zero_quantized_weights", "parameters are taken to be gathered in the working dtype"),
    unmodelled(f"{_ZERO}.zero_quantized_nontrainable_weights", "frozen parameters are held in the working dtype"),
    unmodelled(f"{_ZERO}.zero_quantized_gradients", "gradients are taken to be exchanged in the working dtype"),
    unmodelled(f"{_ZERO}.mics_shard_size", "slices are taken to be spread over all ranks", off=-1),
    unmodelled(f"{_ZERO}.mics_hierarchical_params_gather", "slices are taken to be spread over all ranks"),
    unmodelled(f"{_ZERO}.parameter_alignment", "padding between parameters is not counted"),
    unmodelled("activation_checkpointing.partition_activations", PARALLELISM),
    unmodelled("activation_checkpointing.contiguous_memory_optimization", "its buffer is not counted"),
    unmodelled("aio.*", "disks are taken to run at the machine's rate", off=None),
    unmodelled("amp.*", "amp is not modelled; bf16 and fp16 are"),
    unmodelled("torch_autocast.enabled", "parameters are taken to be in the working dtype"),
    unmodelled("communication_data_type", "gradients are taken to be exchanged in the working dtype", off=None),
    unmodelled("sparse_gradients", "gradients are taken to be dense"),
    unmodelled("zero_force_ds_cpu_optimizer", "the optimizer on the CPU is taken to be DeepSpeed's", off=True),
    used("sequence_parallel_size", "context", Count, 1),
    unmodelled("seq_parallel_communication_data_type", PARALLELISM, off=None),
    unmodelled("use_data_before_expert_parallelism", PARALLELISM),
    unmodelled("disable_allgather", "parameters are taken to be all-gathered"),
    unmodelled("pipeline.*", PARALLELISM, off=None),
    used("tensor_parallel.autotp_size", "tensor", Annotated[int, least(0)], 0),
    unmodelled("tensor_parallel.*", PARALLELISM, off=None),
    unmodelled("expert_parallel.*", PARALLELISM, off=None),
    unmodelled("compile.*", "compiled kernels are a choice of the model's preset (--kernels compiled)"),
    unmodelled("elasticity.*", "the number of GPUs is that of the machine"),
    unmodelled("sparse_attention.*", "attention is taken to be dense", off=None),
    unmodelled("compression_training.*", "the model is taken as it is", off=None),
    unmodelled("progressive_layer_drop.*", "every layer is taken to run"),
    unmodelled("data_efficiency.*", "every sequence is taken to be whole"),
    unmodelled("curriculum_learning.*", "every sequence is taken to be whole"),
    unmodelled("hybrid_engine.*", "generation is not modelled"),
    *ignored(
        f"{_ZERO}.allgather_bucket_size",
        f"{_ZERO}.ignore_unused_parameters",
        f"{_ZERO}.load_from_fp32_weights",
        f"{_ZERO}.elastic_checkpoint",
        f"{_ZERO}.legacy_stage1",
        f"{_ZERO}.memory_efficient_linear",
        f"{_ZERO}.override_module_apply",
        f"{_ZERO}.pipeline_loading_checkpoint",
        f"{_ZERO}.log_trace_cache_warnings",
        f"{_ZERO}.enable_sanity_checks",
        f"{_ZERO}.compute_grad_norm",
        f"{_ZERO}.cpu_offload_use_pin_memory",
        f"{_ZERO}.save_muon_momentum_buffer_in_memory",
        f"{_ZERO}.use_multi_rank_bucket_allreduce",
        f"{_ZERO}.leaf_module.*",
        f"{_ZERO}.offload_optimizer.fast_init",
        f"{_ZERO}.offload_optimizer.cpuadam_cores_perc",
        "torch_autocast.dtype",
        "torch_autocast.lower_precision_safe_modules",
        "bf16.immediate_grad_update",
        "bf16.check_grad_overflow",
        "bf16.loss_scale",
        "bf16.initial_scale_power",
        "fp16.auto_cast",
        "fp16.loss_scale",
        "fp16.initial_scale_power",
        "fp16.loss_scale_window",
        "fp16.hysteresis",
        "fp16.consecutive_hysteresis",
        "fp16.min_loss_scale",
        "optimizer.params.*",
        "optimizer.legacy_fusion",
        "scheduler.*",
        "activation_checkpointing.number_checkpoints",
        "activation_checkpointing.synchronize_checkpoint_boundary",
        "activation_checkpointing.profile",
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "disable_python_gc",
        "log_level",
        "check_overflow",
        "managed_gradient_accumulation",
        "prescale_gradients",
        "gradient_predivide_factor",
        "gradient_allreduce_op",
        "dataloader_drop_last",
        "vocabulary_size",
        "checkpoint.*",
        "flops_profiler.*",
        "comms_logger.*",
        "comms_config.*",
        "tensorboard.*",
        "wandb.*",
        "comet.*",
        "csv_monitor.*",
        "monitor_config.*",
        "timers.*",
        "autotuning.*",
        "nebula.*",
        "train_steps",
    ),
)

_OPTIMIZERS: dict[str, dict[str, object]] = {
    "adamw": {"optimizer": "AdamW"},
    "adamw-bf16-states": {"optimizer": "AdamW", "bf16_states": True},
    "adam": {"optimizer": "Adam", "decoupled": False},
    "lion": {"optimizer": "Lion"},
    "muon": {"optimizer": "Muon"},
    "sgd-momentum": {"optimizer": "SGD", "momentum": 0.9, "untested": True},
    "sgd": {"optimizer": "SGD", "untested": True},
}
"""pstar_sim's name -> the values that say it. ZeRO takes SGD as an untested optimizer alone."""
_GROUPS = 20
"""Least number of sub-groups with which a ratio is exported."""
_NVME_PATH = "/local_nvme"


def read(content: object, file: str) -> Configuration:
    """Raises PstarError as `read_keys`, and for values that exclude each other."""
    found = read_keys(KEYS, content, file, "a DeepSpeed configuration")
    if all(map(found.known, _HALF)):
        raise PstarError(f"{file}: bf16.enabled and fp16.enabled are both true; DeepSpeed takes one of them")
    stage, states, params = found["stage"], _states(found), _params(found)
    stage = 2 if stage == AUTO else stage
    if states == "nvme" and stage != 3:
        raise PstarError(f"{file}: offload_optimizer to nvme needs stage 3, not stage {stage}")
    notes = [*found.notes, *_notes(found, stage, states, params)]
    params = "cpu" if (states, params) == ("none", "nvme") else params
    optimizer, said = _optimizer(found)
    clip = found.known("clip")
    policy = _policy(found, stage, states, params)
    spread = Parallelism(tensor=max(1, found["tensor"]), context=found["context"])
    return Configuration(
        framework=DEEPSPEED,
        policy=policy,
        dtype=_dtype(found),
        batch_per_gpu=found.known("batch_per_gpu"),
        micro_batches=_micro_batches(found),
        train_batch=found.known("train_batch"),
        train_batch_key="train_batch_size",
        clip=None if clip is None else clip > 0,
        optimizer=optimizer,
        parallelism=spread if spread != Parallelism() else None,
        pinned=states == "none" or found.usual("pinned", True),
        pinned_params=params == "none" or found.usual("pinned_params", True),
        loading=_loading(stage),
        details=_details(found, stage, states, params),
        left_open=tuple(name for name in ("bucket", "prefetch") if found[name] == AUTO and name in in_full(policy)),
        notes=(*notes, *said),
        without_effect=found.without_effect,
    )


def driver(configuration: Configuration) -> str:
    """Hooks of parameters and modules come with stage 3."""
    return "deepspeed" if configuration.detail["stage"] == 3 else "pytorch"


def _loading(stage: int) -> str:
    """With stage 3, zero.Init (of the HF Trainer) slices the model while it is made; else every process loads it
    whole."""
    return "whole" if stage == 3 else "each"


def _micro_batches(found: KeyReading) -> int | None:
    alone = found.known("train_batch") is not None and not {"batch_per_gpu", "micro_batches"} & found.named
    return 1 if alone else found.known("micro_batches")


def _states(found: KeyReading) -> str:
    if "states" not in found.named and found["cpu_offload"] is True:
        return "cpu"
    return str(found.usual("states", "none"))


def _params(found: KeyReading) -> str:
    if "params" not in found.named and found["cpu_offload_param"] is True:
        return "cpu"
    return str(found.usual("params", "none"))


def _dtype(found: KeyReading) -> str | None:
    for dtype in _HALF:
        if found.known(dtype):
            return dtype
    open_ = any(found[dtype] == AUTO for dtype in _HALF) or not found.named.intersection(_HALF)
    return None if open_ else MASTER


def _optimizer(found: KeyReading) -> tuple[str | None, list[str]]:
    """Name here (None where the script brings its own), and notes on what is not modelled."""
    if found["bf16_states"] is True:
        return "adamw-bf16-states", []
    written = found.known("optimizer")
    if written is None:
        return None, []
    sgd = "sgd-momentum" if found.usual("momentum", 0.0) else "sgd"
    names = {
        "adamw": "adamw",
        "muadamw": "adamw",
        "adam": "adamw" if found.usual("decoupled", True) else "adam",
        "muadam": "adam",
        "lion": "lion",
        "muon": "muon",
        "sgd": sgd,
        "musgd": sgd,
    }
    name = names.get(str(written).lower())
    if name is None:
        return "adamw", [f"not modelled: optimizer.type = {written}: predicted as AdamW"]
    return name, []


def _policy(found: KeyReading, stage: int, states: str, params: str) -> str:
    if stage == 0:
        return "all_on_gpu"
    if states == "none" and (stage < 3 or params == "none"):
        return "zero3_resident" if stage == 3 else spec("zero3_resident", {"reshard": False})
    if stage < 3:
        return "zero_offload"
    options = {name: found.usual(name, default) for name, default in _SIZES.items()}
    options["subgroup"] = max(1, options["subgroup"])  # 0: a sub-group for each parameter
    if "nvme" in (states, params):
        return spec("zero_infinity", {**options, "params": "nvme" if params == "nvme" else "cpu", "states": states})
    pinned = found.usual("pinned", True)
    how = {"flush": "async" if pinned else "blocking", "pinned": pinned, "params": "cpu" if params == "cpu" else "gpu"}
    how["checkpoints"] = "host" if found["checkpoints_on_host"] is True else "gpu"
    ratio = 0.0 if states == "none" else float(found.usual("ratio", 1.0))
    return spec("zero3_offload", {**options, **how, "ratio": ratio})


_SIZES = {
    "subgroup": SUB_GROUP_PARAMS,
    "bucket": REDUCE_BUCKET_PARAMS,
    "reuse": MAX_REUSE_PARAMS,
    "prefetch": PREFETCH_PARAMS,
}


def _notes(found: KeyReading, stage: int, states: str, params: str) -> list[str]:
    zero3, zero12 = stage == 3, stage in (1, 2)
    on_host = found["checkpoints_on_host"] is True
    offloaded3 = zero3 and states == "cpu" and params != "nvme"
    disks, offloads = "nvme" in (states, params), (states, params) != ("none", "none")
    said = {
        "not modelled: sequence_parallel_size exchanges heads; predicted with gathers of keys and values": (
            found["context"] > 1
        ),
        "offloading has no effect with stage 0": stage == 0 and offloads,
        "not modelled: stage 1 keeps whole gradients on every GPU; predicted as stage 2": (stage, states)
        == (1, "none"),
        f"offload_param has no effect with stage {stage}": zero12 and params != "none",
        "not modelled: parameters on disks without offload_optimizer; predicted with parameters on the host": (
            zero3 and (states, params) == ("none", "nvme")
        ),
        "not modelled: states on disks with parameters on the GPU; predicted with parameters on the host": (
            zero3 and (states, params) == ("nvme", "none")
        ),
        "not modelled: disks without pipeline_read and pipeline_write; predicted with both": (
            disks and not (found["read_ahead"] and found["write_behind"])
        ),
        "not modelled: waits of the backward pass for collectives; predicted with gathers ahead, as ZeRO-Infinity's "
        "paper has them": zero3 and disks and states != "none",
        "offload_optimizer.ratio needs stage 3; DeepSpeed refuses it": zero12 and found["ratio"] not in (1.0, AUTO),
        "gradient_clipping is not in the file: DeepSpeed clips at 1.0 since version 0.19, not before": (
            "clip" not in found.named
        ),
        "not modelled: activation_checkpointing.cpu_checkpointing without stage 3 and the optimizer on the CPU; kept "
        "activations are taken to stay on the GPU": on_host and not offloaded3,
        "cpu_checkpointing is DeepSpeed's own checkpointing; models that recompute by PyTorch's ignore it": (
            on_host and offloaded3
        ),
        "not modelled: 16-bit master weights; predicted with fp32 masters, which take more memory": (
            True in (found["bf16_masters"], found["fp16_masters"])
        ),
    }
    return [text for text, applies in said.items() if applies]


def _details(found: KeyReading, stage: int, states: str, params: str) -> tuple[tuple[str, object], ...]:
    kept: dict[str, object] = {"stage": stage, "states": states, "params": params}
    if states == "nvme":
        kept["states_buffers"] = found.usual("states_buffers", 4)
    if params == "nvme":
        for name, usual in (("params_buffers", 5), ("params_buffer", 10**8), ("params_in_cpu", 10**9)):
            kept[name] = found.usual(name, usual)
    if found.known("sums") is not None:
        kept["sums"] = found["sums"]
    if stage == 3 and found.known("gathers"):
        kept["gathers"] = True
    return tuple(sorted(kept.items()))


def values_of(configuration: Configuration) -> dict[str, object]:
    """`read` of these values gives the configuration back."""
    c, detail, options = configuration, configuration.detail, configuration.options
    values: dict[str, object] = {
        "batch_per_gpu": c.batch_per_gpu,
        "micro_batches": c.micro_batches,
        "train_batch": c.train_batch,
        "clip": AUTO if c.clip is None else 1.0 if c.clip else 0.0,
        "stage": detail["stage"],
        **_OPTIMIZERS.get(c.optimizer or "", {}),
        "sums": detail.get("sums"),
        "gathers": detail.get("gathers"),
    }
    if c.dtype is not None:
        values |= {dtype: c.dtype == dtype for dtype in _HALF}
    values |= _values_of_places(c)
    if options.get("checkpoints") == "host":
        values["checkpoints_on_host"] = True
    values |= {name: detail[name] for name in detail if name.startswith(("states_", "params_"))}
    for name in (*_SIZES, *(["ratio"] if detail["states"] != "none" else [])):
        if name in options:
            values[name] = AUTO if name in c.left_open else options[name]
    return values


def _values_of_places(c: Configuration) -> dict[str, object]:
    values: dict[str, object] = {}
    for what, key, pinned in (("states", "pinned", c.pinned), ("params", "pinned_params", c.pinned_params)):
        place = c.detail[what]
        if place != "none":
            values |= {what: place, key: pinned}
        if place == "nvme":
            values[f"{what}_path"] = _NVME_PATH
    if c.detail["states"] == "nvme":
        values |= {"read_ahead": True, "write_behind": True}
    return values


def write(configuration: Configuration) -> str:
    """As JSON, without what is left to the script."""
    content = nested(KEYS, values_of(configuration))
    zero = content[_ZERO]
    zero |= {"overlap_comm": True, "contiguous_gradients": True}
    return json.dumps(content, indent=2) + "\n"


def _allocations(configuration: Configuration, workload: Workload, ranks: int) -> tuple[Allocation, ...]:
    """One rank's: [Note: pinned blocks] in host_memory.py.

    Stages 1 and 2 have flat buffers of slices, stage 3 masters, gradients and moments by sub-group, gradients in the
    working dtype and offloaded parameters one buffer each.
    """
    detail = configuration.detail
    offloads = detail["states"] != "none" or (detail["stage"] == 3 and detail["params"] != "none")
    if detail["stage"] == 0 or not offloads:
        return ()
    tensors = trained(workload)
    numels = rank_sizes(tensors, ranks)
    own, width = sum(numels), DTYPES[workload.dtype].bytes
    moments = moments_bytes_per_param(workload)
    pinned = configuration.pinned
    if detail["stage"] != 3:
        allocations = [
            allocation("fp32 masters", 4 * own, pinned=pinned),
            allocation("updated parameters on their way", width * own, pinned=pinned),
            allocation("fp32 gradients", 4 * own, pinned=pinned),
            allocation("the optimizer's moments", moments * own, pinned=False),
            allocation("a gradient on its way", width * max((t.numel for t in tensors), default=0), pinned=pinned),
        ]
        if workload.micro_batches > 1:
            allocations.append(tensor_allocations("gradients of micro-batches", numels, width, pinned=pinned))
        return tuple(allocations)
    states = [] if detail["states"] == "none" else _stage3_allocations(configuration, numels, moments, width)
    as_stored = [-(-t.bytes // ranks) for t in frozen(workload)]
    return (*states, *_parameters(configuration, numels, width, as_stored))


def _stage3_allocations(
    configuration: Configuration, numels: list[int], moments: float, width: int
) -> list[Allocation]:
    options, detail = configuration.options, configuration.detail
    groups = sub_groups(numels, _whole(options["subgroup"]))
    if detail["states"] == "nvme":
        buffers = [max(groups, default=0)] * _whole(detail["states_buffers"])
        allocations = [tensor_allocations("buffers between host and disks", buffers, 4, pinned=True)]
    else:
        ratio = options.get("ratio", 1.0)
        assert isinstance(ratio, float)
        held = groups[int((1 - ratio) * len(groups)) :]
        allocations = [
            tensor_allocations("fp32 masters", held, 4, pinned=False),
            tensor_allocations("fp32 gradients", held, 4, pinned=configuration.pinned),
            tensor_allocations("the optimizer's moments", held, moments, pinned=False),
        ]
    sums = DTYPES[str(detail["sums"])].bytes if "sums" in detail else width
    return [*allocations, allocation("gradients before the step", sums * sum(numels), pinned=configuration.pinned)]


def _parameters(configuration: Configuration, numels: list[int], width: int, as_stored: list[int]) -> list[Allocation]:
    """Parameters are pinned one by one, then trained ones moved into one buffer; PyTorch keeps the small blocks.

    as_stored: bytes of frozen ones.
    """
    detail = configuration.detail
    if detail["params"] == "none":
        return []
    own = sum(numels)
    if detail["params"] == "cpu":
        held = allocation("parameters", width * own, pinned=True)
        name = "parameters as they came, which PyTorch keeps"
        moved = replace(tensor_allocations(name, numels, width, pinned=True), freed=True)
        kept = tensor_allocations("frozen parameters", as_stored, 1, pinned=configuration.pinned_params)
        return [held, *([moved] if configuration.pinned_params else []), *([kept] if as_stored else [])]
    buffers = [_whole(detail["params_buffer"])] * _whole(detail["params_buffers"])
    in_cpu = min(own, _whole(detail["params_in_cpu"]))
    return [
        allocation("parameters kept on the host", width * in_cpu, pinned=True),
        tensor_allocations("buffers of parameters between host and disks", buffers, width, pinned=True),
    ]


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value


def _gpu_beyond_bytes(configuration: Configuration, workload: Workload, ranks: int) -> int:
    """Stage 0 in 16 bits has working and fp32 gradients, with several micro-batches already in all_on_gpu's lists."""
    if configuration.detail["stage"] != 0 or workload.dtype == MASTER:
        return 0
    return workload.trainable_params * (2 if workload.micro_batches > 1 else 6)


def _unpinned(configuration: Configuration) -> str:
    """Pins less memory. accelerate's file (which says its type) can only name one of DeepSpeed's."""
    sections = {"states": "offload_optimizer", "params": "offload_param"}
    offloading = " and ".join(name for what, name in sections.items() if configuration.detail[what] != "none")
    file = "a deepspeed_config_file that has " if "type" in configuration.detail else ""
    return f'with {file}"pin_memory": false in its {offloading}'


def _copies(configuration: Configuration, workload: Workload, ranks: int, local_ranks: int) -> Copies | None:
    """Each rank writes its states, those of the GPU list by list, and reads them on the CPU beside the live ones
    (engine.py: _save_zero_checkpoint, _get_all_zero_checkpoint_state_dicts). Before stage 3 each first reads the
    model's file. Gathered weights are copied to the first process (_zero3_consolidated_16bit_state_dict). States on
    disks are not counted."""
    detail = configuration.detail
    if detail["states"] == "nvme":
        return None
    stage, trained_params, moments = detail["stage"], workload.trainable_params, moments_bytes_per_param(workload)
    slices = -(-trained_params // (ranks if stage else 1))
    own, weights = int((4 + moments) * slices), workload.weights_bytes
    listed = 0 if detail["states"] == "cpu" else 4 * slices * local_ranks
    gathered = weights if detail.get("gathers") else 0
    saved = "each rank's fp32 masters, on their way to its file" if listed else ""
    if gathered > listed:
        saved = "the weights, gathered on one process"
    whole = stage != 3 and weights > own
    read = "the file of the model, whole on every process" if whole else "each rank's states as read, beside the live"
    if stage == 0:
        own, read = own + weights, "the file of model and states, whole on every process"
    return Copies(
        saving_bytes=max(listed, gathered),
        saved=saved,
        resuming_bytes=local_ranks * (weights if whole and stage else own),
        read=read,
        instead="stage3_gather_16bit_weights_on_model_save: false" if gathered > listed else "",
    )


MEMORY = MemoryRules(
    allocations=_allocations,
    copies=_copies,
    gpu_beyond_bytes=_gpu_beyond_bytes,
    unpinned=_unpinned,
)
"""Rules by which DeepSpeed allocates."""

_OWN = (
    "all_on_gpu",
    "zero_offload",
    "zero3_resident",
    "zero3_offload",
    "zero_infinity",
    "deep_optimizer_states",
)


def express(plan: Plan) -> Expressed:
    """A policy of DeepSpeed's gives the options; for others, model data are kept where the plan keeps most."""
    w, settings = plan.workload, plan.settings
    base, options, cannot = _nearest(plan)
    stage, states, params = _placing(base, options, sliced=plan.machine.data_parallel_size > 1)
    if stage == 0:
        base, options = "all_on_gpu", {}
    if params == "cpu" and (kept := whereabouts(plan).params_on_gpu) > 0:
        cannot.append(f"the {kept:.0%} of the parameters that stay on the GPU: with offload_param none stay")
    optimizer = w.optimizer.name if w.optimizer.name in _OPTIMIZERS else "adamw"
    if optimizer == "adamw-bf16-states" and (states != "cpu" or w.compute_dtype != WORKING):
        optimizer = "adamw"
    cannot += optimizer_limits(w, DEEPSPEED, optimizer)
    if w.checkpointing or w.recompute:
        what = f" ({w.recompute})" if w.recompute else ""
        cannot.append(f"recomputed activations{what}: the script switches them on (gradient_checkpointing_enable)")
    details: dict[str, object] = {"stage": stage, "states": states, "params": params}
    if states == "nvme":
        details["states_buffers"] = 4
    if params == "nvme":
        details |= {"params_buffers": 5, "params_buffer": 10**8, "params_in_cpu": 10**9}
    if w.micro_batches > 1 and settings.sums == "32-bit" and w.compute_dtype != MASTER:
        details["sums"] = MASTER
    configuration = Configuration(
        framework=DEEPSPEED,
        policy=spec(base, options),
        dtype=w.compute_dtype,
        batch_per_gpu=w.batch,
        micro_batches=w.micro_batches,
        clip=settings.clip,
        optimizer=optimizer,
        loading=_loading(stage),
        details=tuple(sorted(details.items())),
    )
    says = [*common_says(plan), _says(stage, states, params), f"clipping {'at 1.0' if settings.clip else 'off'}"]
    if MEMORY.pins_too_much(configuration, w, plan.machine):
        configuration = _without_pinning(configuration)
        says.append(NOT_PINNED)
    return Expressed(configuration=configuration, says=tuple(says), cannot=tuple(cannot))


def _without_pinning(configuration: Configuration) -> Configuration:
    c = configuration
    policy = spec(c.policy_base, {**c.options, "pinned": False, "flush": "blocking"})
    return replace(c, policy=policy, pinned=c.detail["states"] == "none", pinned_params=c.detail["params"] == "none")


def _nearest(plan: Plan) -> tuple[str, dict[str, object], list[str]]:
    known = options_of_plan(plan, *_OWN)
    cannot = common_limits(plan, DEEPSPEED, *_OWN)
    if known is None:
        base, options = placed(plan, zero_offload=True)
        if options.get("ratio", 1.0) != 1.0:  # only whole sub-groups stay on the GPU, so that the ratio needs this many
            own = plan.workload.trainable_params // plan.machine.data_parallel_size
            options["subgroup"] = max(1, min(SUB_GROUP_PARAMS, own // _GROUPS))
    else:
        base, options = split_spec(plan.policy)[0], dict(known)
    if options.get("bucket") == 0:
        options["bucket"] = REDUCE_BUCKET_PARAMS
        cannot.append("gradients that leave one by one: DeepSpeed's leave in buckets")
    if base == "zero_infinity" and "nvme" not in (options["params"], options["states"]):
        kept = {name: options[name] for name in ("subgroup", "bucket", "reuse")}
        base, options = "zero3_offload", {**kept, "params": "cpu"}
        cannot.append("parameters fetched by operators: without disks DeepSpeed fetches by their number")
    if base == "deep_optimizer_states":
        base = "zero3_offload"
        cannot.append(f"updates on the GPU (one sub-group in {options['every']}): DeepSpeed updates all on the CPU")
    if base == "zero3_offload":
        if options.get("flush") == "blocking":
            cannot.append("gradients that the GPU waits for: DeepSpeed copies them asynchronously since version 0.19")
        options |= {"flush": "async", "pinned": True}
    return base, options, cannot


def _placing(base: str, options: Mapping[str, object], *, sliced: bool) -> tuple[int, str, str]:
    if base == "zero_infinity":
        return 3, str(options["states"]), str(options["params"])
    if base == "zero3_offload":
        return 3, "none" if options.get("ratio") == 0 else "cpu", "cpu" if options.get("params") == "cpu" else "none"
    if base == "zero_offload":
        return 2, "cpu", "none"
    if base == "all_on_gpu" or not sliced:
        return 0, "none", "none"
    return (3 if options.get("reshard", True) else 2), "none", "none"


def _says(stage: int, states: str, params: str) -> str:
    names = {"none": "on the GPU", "cpu": "on the host", "nvme": "on disks"}
    return f"ZeRO stage {stage}, optimizer {names[states]}, parameters {names[params]}"
