"""accelerate: the YAML of `accelerate config` with FSDP 1 or 2, one process or DDP; DeepSpeed's is only read, by
deepspeed.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec.yaml

from pstar_sim.core.plan import Plan
from pstar_sim.dtypes import AUTOCAST, DTYPES, MASTER, WORKING
from pstar_sim.errors import PstarError
from pstar_sim.frameworks import deepspeed, fsdp
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.frameworks.express import Expressed, common_limits, optimizer_limits
from pstar_sim.frameworks.fsdp import express_as, fsdp_policy, offloads, reshards
from pstar_sim.frameworks.host_memory import Copies
from pstar_sim.frameworks.keys import AUTO, PARALLELISM, Count, KeyReading, ignored, nested, read_keys, unmodelled, used
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.schema.fields import least
from pstar_sim.schema.parsing import parse_json
from pstar_sim.schema.reading import Fault, brief, nearest
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.workload import Workload

ACCELERATE = "accelerate"
_FSDP = "fsdp_config"
_DS = "deepspeed_config"
_PARALLEL = "parallelism_config.parallelism_config"
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_NAMES_OF_TORCH = {"_HYBRID_SHARD_ZERO2": "HYBRID_SHARD_ZERO2"}
_StateDict = Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"]
_DTYPES = {"no" if dtype == MASTER else dtype: dtype for dtype in DTYPES}

KEYS = (
    used("distributed_type", "type", str, "NO"),
    used("mixed_precision", "precision", Literal["no", "bf16", "fp16", "fp8"]),
    used("num_processes", "processes", Count),
    used("num_machines", "machines", Count),
    used(f"{_FSDP}.fsdp_version", "version", Literal[1, 2], 1),
    used(f"{_FSDP}.fsdp_offload_params", "offload", bool, False),
    used(f"{_FSDP}.fsdp_reshard_after_forward", "reshard", None),
    used(f"{_FSDP}.fsdp_sharding_strategy", "strategy", None),
    used(f"{_PARALLEL}_dp_replicate_size", "replicas", Count, 1),
    used(f"{_PARALLEL}_dp_shard_size", "slices", None),
    used(f"{_PARALLEL}_tp_size", "tensor", Count, 1),
    used(f"{_PARALLEL}_cp_size", "context", Count, 1),
    used(f"{_FSDP}.fsdp_cpu_ram_efficient_loading", "loads_once", bool, False),
    used(f"{_FSDP}.fsdp_state_dict_type", "saves", _StateDict),
    used(f"{_FSDP}.fsdp_activation_checkpointing", "checkpointing", bool, False),
    used(f"{_FSDP}.fsdp_auto_wrap_policy", "wrap", Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]),
    used(f"{_DS}.zero_stage", "ds_stage", Literal[0, 1, 2, 3]),
    used(f"{_DS}.offload_optimizer_device", "ds_states", str),
    used(f"{_DS}.offload_param_device", "ds_params", str),
    used(f"{_DS}.gradient_accumulation_steps", "ds_micro_batches", Count),
    used(f"{_DS}.gradient_clipping", "ds_clip", Annotated[float, least(0)]),
    used(f"{_DS}.deepspeed_config_file", "ds_file", str),
    used(f"{_DS}.zero3_init_flag", "ds_init", bool),
    used(f"{_DS}.zero3_save_16bit_model", "ds_gathers", bool),
    unmodelled(
        f"{_FSDP}.fsdp_activation_checkpointing_offload", "inputs of recomputed blocks are taken to stay on the GPU"
    ),
    unmodelled(
        f"{_FSDP}.fsdp_backward_prefetch", "the next block is taken to be gathered beside this one", "BACKWARD_PRE"
    ),
    unmodelled(
        f"{_FSDP}.fsdp_backward_prefetch_policy",  # the key's name before accelerate 0.26
        "the next block is taken to be gathered beside this one",
        "BACKWARD_PRE",
    ),
    unmodelled(f"{_FSDP}.fsdp_ignored_modules", "all modules are taken to be sliced", off=None),
    unmodelled("parallelism_config.*", PARALLELISM, off=1),
    unmodelled("megatron_lm_config.*", PARALLELISM, off=None),
    unmodelled("fp8_config.*", "products are taken to be torchao's, with a scale per tensor", off=None),
    unmodelled("dynamo_config.*", "compiled kernels are a choice of the model's preset (--kernels compiled)", off="NO"),
    unmodelled("downcast_bf16", "TPUs are not modelled", off="no"),
    unmodelled("use_cpu", "the machine is that of the question"),
    *ignored(
        f"{_FSDP}.fsdp_forward_prefetch",
        f"{_FSDP}.fsdp_limit_all_gathers",
        f"{_FSDP}.fsdp_min_num_params",
        f"{_FSDP}.fsdp_sync_module_states",
        f"{_FSDP}.fsdp_transformer_layer_cls_to_wrap",
        f"{_FSDP}.fsdp_use_orig_params",
        f"{_DS}.offload_optimizer_nvme_path",
        f"{_DS}.offload_param_nvme_path",
        f"{_DS}.deepspeed_multinode_launcher",
        f"{_DS}.deepspeed_hostfile",
        f"{_DS}.deepspeed_exclusion_filter",
        f"{_DS}.deepspeed_inclusion_filter",
        f"{_DS}.deepspeed_moe_layer_cls_names",
        "compute_environment",
        "debug",
        "enable_cpu_affinity",
        "gpu_ids",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "main_training_function",
        "mpirun_config.*",
        "rdzv_backend",
        "same_network",
        "tpu_env",
        "tpu_name",
        "tpu_use_cluster",
        "tpu_use_sudo",
        "tpu_vm",
        "tpu_zone",
        "command_file",
        "commands",
    ),
)

_TYPES = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")
_AUTOCAST = "mixed_precision = {0} is torch.autocast over weights in fp32; --dtype {0} if the script loads them in {0}"
_UNQUOTED = {"distributed_type": "NO", "mixed_precision": "no"}
"""Keys whose value "no" is false in YAML, where it has no quotes."""


def read(content: object, file: str) -> Configuration:
    """Raises PstarError as `read_keys`, and for an unknown distributed type or strategy."""
    if isinstance(content, dict):
        content = {key: _UNQUOTED.get(key, value) if value is False else value for key, value in content.items()}
    found = read_keys(KEYS, content, file, "an accelerate configuration")
    kind = str(found["type"]).upper()
    if kind not in _TYPES:
        raise PstarError(f"{file}: distributed_type = {brief(found['type'])} is not modelled; {_hint(kind, _TYPES)}")
    notes = list(found.notes)
    products = "fp8" if found["precision"] == "fp8" else None
    if kind == "DEEPSPEED":
        return replace(_as_deepspeed(found, file, notes), products=products)
    if kind != "FSDP":
        dtype = _dtype(found)
        autocast = dtype if dtype in AUTOCAST else None
        if autocast is not None:
            notes.append(_AUTOCAST.format(autocast))
        return Configuration(
            framework=ACCELERATE,
            policy="all_on_gpu",
            dtype=None if autocast else dtype,
            autocast=autocast,
            products=products,
            details=_details(found, {"type": kind}),
            notes=tuple(notes),
            without_effect=found.without_effect,
        )
    reshard, replicas, said = _sharding(found, file)
    notes += said
    if found["wrap"] == "NO_WRAP":
        notes.append("not modelled: NO_WRAP gathers the whole model at once; predicted block by block")
    version = found.usual("version", 1)
    spread = Parallelism(tensor=found["tensor"], context=found["context"])
    return Configuration(
        framework=ACCELERATE,
        policy=fsdp_policy(offload=found.usual("offload", False), reshard=reshard, replicas=replicas),
        dtype=_dtype(found),
        products=products,
        checkpointing=found.known("checkpointing") if "checkpointing" in found.named else None,
        parallelism=spread if spread != Parallelism() else None,
        loading="whole" if found.usual("loads_once", False) else "each",
        details=_details(found, {"type": kind, "version": version, **_saves(found)}),
        notes=tuple(notes),
        without_effect=found.without_effect,
    )


def _saves(found: KeyReading) -> dict[str, object]:
    return {} if found.known("saves") is None else {"saves": found["saves"]}


def _hint(word: str, known: tuple[str, ...]) -> str:
    near = nearest(word, known)
    return f"did you mean {near}?" if near else f"it must be one of {', '.join(known)}"


def _dtype(found: KeyReading) -> str | None:
    precision = found.known("precision")
    return None if precision is None else _DTYPES.get(precision, WORKING)


def _details(found: KeyReading, details: dict[str, object]) -> tuple[tuple[str, object], ...]:
    counts = {name: found[name] for name in ("machines", "processes") if found.known(name) is not None}
    details.update(counts)
    return tuple(sorted(details.items()))


def _sharding(found: KeyReading, file: str) -> tuple[bool, int | str, list[str]]:
    """(whether parameters go after forward, replicas, notes on what is not modelled). FSDP 1 says the first by sharding
    strategy (a word or number), FSDP 2 by fsdp_reshard_after_forward. A hybrid strategy has a replica per node."""
    one = found.usual("version", 1) == 1
    notes = []
    if found["reshard" if one else "strategy"] not in (None, AUTO):
        keys = ("fsdp_reshard_after_forward", "fsdp_sharding_strategy")
        without, taken = keys if one else keys[::-1]
        notes.append(f"{_FSDP}.{without} has no effect with FSDP {2 - one}: accelerate takes {taken}")
    value = found["strategy" if one else "reshard"]
    replicas = 1 if one else found.usual("replicas", 1)
    if value in (None, AUTO) or isinstance(value, bool):
        return value is not False, replicas, notes
    if isinstance(value, int) and 1 <= value <= len(_STRATEGIES):
        value = _STRATEGIES[value - 1]
    word = _NAMES_OF_TORCH.get(str(value).upper(), str(value).upper())
    if word in ("TRUE", "FALSE"):
        return word == "TRUE", replicas, notes
    if word not in _STRATEGIES:
        raise PstarError(f"{file}: {_FSDP}: sharding strategy {brief(value)} is not known; {_hint(word, _STRATEGIES)}")
    if word == "NO_SHARD":
        notes.append("not modelled: NO_SHARD: predicted as SHARD_GRAD_OP, which holds less on several GPUs")
    replicas = "nodes" if word.startswith("HYBRID") else replicas
    return word not in ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD_ZERO2"), replicas, notes


def _as_deepspeed(found: KeyReading, file: str, notes: list[str]) -> Configuration:
    """A file of DeepSpeed's stands for all keys beside it, as in accelerate."""
    if found.known("ds_file") is not None:
        path = Path(file).parent / Path(str(found["ds_file"])).expanduser()
        made = deepspeed.read(_read_file(path, file), str(path))
        details = _details(found, {**made.detail, "type": "DEEPSPEED"})
        loading = "each" if found.known("ds_init") is False else made.loading
        said = [*notes, f"deepspeed_config_file: {path}", *made.notes]
        return replace(made, dtype=made.dtype or _dtype(found), details=details, loading=loading, notes=tuple(said))
    zero: dict[str, Any] = {"stage": found.usual("ds_stage", 2)}
    for device, name in (("offload_optimizer", "ds_states"), ("offload_param", "ds_params")):
        if found.known(name) is not None:
            zero[device] = {"device": found[name]}
    if found.known("ds_gathers") is not None:
        zero["stage3_gather_16bit_weights_on_model_save"] = found["ds_gathers"]
    content: dict[str, Any] = {"zero_optimization": zero, "gradient_clipping": AUTO}
    for name, key in (("ds_micro_batches", "gradient_accumulation_steps"), ("ds_clip", "gradient_clipping")):
        if found.known(name) is not None:
            content[key] = found[name]
    dtype = _dtype(found)
    if dtype is not None:
        content[WORKING if dtype == MASTER else dtype] = {"enabled": dtype != MASTER}
    made = deepspeed.read(content, file)
    details = _details(found, {**made.detail, "type": "DEEPSPEED"})
    loading = "each" if found.known("ds_init") is False else made.loading
    return replace(
        made, details=details, loading=loading, notes=(*notes, *made.notes), without_effect=found.without_effect
    )


def _read_file(path: Path, file: str) -> object:
    what = f"{file}: {_DS}.deepspeed_config_file = {str(path)!r}"
    try:
        return parse_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise PstarError(f"{what}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    except Fault as fault:
        raise PstarError(f"{what}: {fault.in_json()}") from None


def _gpu_beyond_bytes(configuration: Configuration, workload: Workload, ranks: int) -> int:
    """DistributedDataParallel has buckets beside the gradients (gradient_as_bucket_view is off by default)."""
    if configuration.policy_base != "all_on_gpu" or ranks == 1:
        return 0
    return DTYPES[workload.dtype].bytes * workload.trainable_params


def _copies(configuration: Configuration, workload: Workload, ranks: int, local_ranks: int) -> Copies | None:
    """Not of a model that is whole on every GPU: that is the script's."""
    if configuration.detail["type"] != "FSDP":
        return None
    return fsdp.copies(configuration, workload, ranks, local_ranks)


MEMORY = replace(
    fsdp.MEMORY,
    copies=_copies,
    gpu_beyond_bytes=_gpu_beyond_bytes,
    once="with fsdp_cpu_ram_efficient_loading: true",
)
"""Rules by which the types of accelerate allocate: FSDP, a single process, and DistributedDataParallel."""


def values_of(configuration: Configuration) -> dict[str, object]:
    """`read` of these values gives the configuration back."""
    c, detail = configuration, configuration.detail
    precision = {dtype: word for word, dtype in _DTYPES.items()}
    values: dict[str, object] = {
        "type": detail["type"],
        "precision": c.products or c.autocast or (None if c.dtype is None else precision[c.dtype]),
        "processes": detail.get("processes"),
        "machines": detail.get("machines"),
    }
    if detail["type"] != "FSDP":
        return values
    two = detail["version"] == 2
    reshard: bool | str = reshards(c)
    if not two or c.replicas == "nodes":
        reshard = _STRATEGIES[(3 if c.replicas == "nodes" else 0) + (not reshard)]
    replicas = c.replicas if isinstance(c.replicas, int) and c.replicas > 1 else None
    processes = detail.get("processes")
    return {
        **values,
        "version": detail["version"],
        "offload": offloads(c),
        "reshard": reshard if two else None,
        "strategy": None if two else reshard,
        "replicas": replicas,
        "slices": processes // replicas if replicas and isinstance(processes, int) else None,
        "loads_once": c.loading == "whole",
        "saves": detail.get("saves"),
        "checkpointing": c.checkpointing,
        "wrap": "TRANSFORMER_BASED_WRAP",
    }


def write(configuration: Configuration) -> str:
    content = {"compute_environment": "LOCAL_MACHINE", **nested(KEYS, values_of(configuration))}
    return msgspec.yaml.encode(content).decode("utf-8")


def express(plan: Plan) -> Expressed:
    """The nearest FSDP 2 configuration, or one process's or DistributedDataParallel's for `all_on_gpu` under autocast.
    The script sets clipping, batch and micro-batches."""
    if plan.workload.autocast and split_spec(plan.policy)[0] == "all_on_gpu":
        return _express_whole(plan)
    details: dict[str, object] = {
        "type": "FSDP",
        "version": 2,
        "processes": plan.machine.world_size,
        "machines": plan.machine.nodes,
    }
    found = express_as(plan, ACCELERATE, details, says_batch=False)
    found = replace(found, configuration=replace(found.configuration, loading="whole"))
    return replace(found, cannot=(*found.cannot, *_clipping(plan)))


def _express_whole(plan: Plan) -> Expressed:
    w, ranks = plan.workload, plan.machine.world_size
    cannot = common_limits(plan, ACCELERATE, "all_on_gpu", autocast=True)
    cannot.append(fsdp.batch_limit(w))
    if w.checkpointing or w.recompute:
        cannot.append(f"recomputed activations ({w.recompute or 'all blocks'}): the script switches them on")
    cannot += optimizer_limits(w, ACCELERATE, None)
    configuration = Configuration(
        framework=ACCELERATE,
        policy="all_on_gpu",
        autocast=w.autocast,
        details=(
            ("machines", plan.machine.nodes),
            ("processes", ranks),
            ("type", "NO" if ranks == 1 else "MULTI_GPU"),
        ),
    )
    says = (f"{w.autocast} autocast over fp32 weights", "everything whole on every GPU")
    return Expressed(configuration=configuration, says=says, cannot=(*cannot, *_clipping(plan)))


def _clipping(plan: Plan) -> tuple[str, ...]:
    return ("clipping: the script calls accelerator.clip_grad_norm_",) if plan.settings.clip else ()
