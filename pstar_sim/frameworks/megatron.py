"""Megatron-LM's flags. Its distributed optimizer slices states, of which a share may live on the host and is updated
there; parameters and fp32 gradients stay whole on every GPU.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pstar_sim.core.layout import sum_bytes_of
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.dtypes import DTYPES, MASTER
from pstar_sim.errors import PstarError
from pstar_sim.frameworks.configuration import Configuration, spec
from pstar_sim.frameworks.express import Expressed, common_limits, common_says, optimizer_limits, whereabouts
from pstar_sim.frameworks.host_memory import (
    Allocation,
    MemoryRules,
    moments_bytes_per_param,
    rank_sizes,
    tensor_allocations,
    trained,
)
from pstar_sim.frameworks.keys import Count, KeyReading, read_keys, unmodelled, used
from pstar_sim.schema.fields import between, least
from pstar_sim.workload.kernels import Dropout, dropout
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.pipeline import INTERLEAVED, SCHEDULES
from pstar_sim.workload.workload import ATTENTION_ALONE, Workload

MEGATRON = "Megatron-LM"
_SHARE = "share"

_EACH = "--num-layers-per-virtual-pipeline-stage"
_DROPOUTS = tuple(f"{what}_dropout" for what in Dropout._fields)
_DROPPED = 0.1
"""Rate of each, if no flag says another."""
_FACTS = {
    "dtype": ("bf16", "fp16"),
    "clip": ("clip",),
    "checkpointing": ("recompute", "selective"),
    "optimizer": ("optimizer",),
    "dropout": _DROPOUTS,
    "sums": ("wide_sums", "bf16"),
}

KEYS = (
    used("--micro-batch-size", "batch_per_gpu", Count),
    used("--global-batch-size", "train_batch", Count),
    used("--seq-length", "sequence", Count),
    used("--bf16", "bf16", bool, False),
    used("--fp16", "fp16", bool, False),
    used("--accumulate-allreduce-grads-in-fp32", "wide_sums", bool, False),
    used("--clip-grad", "clip", Annotated[float, least(0)], 1.0),
    used("--optimizer", "optimizer", Literal["adam", "sgd"], "adam"),
    used("--tensor-model-parallel-size", "tensor", Count, 1),
    used("--sequence-parallel", "sequence_parallel", bool, False),
    used("--context-parallel-size", "context", Count, 1),
    used("--expert-model-parallel-size", "experts", Count, 1),
    used("--pipeline-model-parallel-size", "pipeline", Count, 1),
    used("--use-distributed-optimizer", "sliced", bool, False),
    used("--optimizer-cpu-offload", "offload", bool, False),
    used("--optimizer-offload-fraction", "fraction", Annotated[float, between(0, 1)], 1.0),
    used("--recompute-granularity", "recompute", Literal["full", "selective"]),
    used("--recompute-activations", "selective", bool, False),
    used("--num-virtual-stages-per-pipeline-rank", "virtual", Count),
    used(_EACH, "each_layers", Count),
    used("--num-layers", "layers", Count),
    used("--hidden-dropout", "hidden_dropout", Annotated[float, between(0, 0.999)], _DROPPED),
    used("--attention-dropout", "attention_dropout", Annotated[float, between(0, 0.999)], _DROPPED),
    unmodelled("--no-scatter-gather-tensors-in-pipeline", "ranks of tp are taken to send slices to other stages"),
    unmodelled("--recompute-method", "every block is taken to be recomputed", off="uniform"),
    unmodelled("--recompute-num-layers", "every block is taken to be recomputed", off=1),
    unmodelled("--expert-tensor-parallel-size", "experts are taken to be split as the layers are", off=None),
    unmodelled("--use-torch-fsdp2", "give accelerate's YAML or torchtitan's TOML for FSDP 2"),
    unmodelled("--fp8-format", "8-bit training is not modelled", off=None),
)
"""Flags that are read, as keys; a file may have others."""
_FLAGS = {key.path: key for key in KEYS}
_ASSIGNED = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=([^\s()]*)\s*(?:#.*)?$", re.MULTILINE)
_ARRAY = re.compile(r"^(?:[A-Za-z_]\w*\+?=)?\(?(?=--|\s|$)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd-momentum"}


def read(content: object, file: str) -> Configuration:
    """From a script or list of flags; variables that the file sets are replaced. Raises PstarError as `read_keys`, for
    flags without a value, and values that only the shell knows."""
    flags, others = _flags_in(str(content), file)
    found = read_keys(KEYS, flags, file, "Megatron-LM's flags")
    notes = list(found.notes)
    if others:
        notes.append(f"not read: {', '.join(others)}")
    unsaid = [key.path for key in KEYS if key.name in _DROPOUTS and key.name not in found.named]
    if unsaid:
        rate = f"{_DROPPED:g} each, unless --dropout says another" if len(unsaid) > 1 else f"{_DROPPED:g}"
        notes.append(f"the file has no {' and no '.join(unsaid)}: Megatron-LM's default, {rate}")
    sums = "16-bit" if found["fp16"] and not found["wide_sums"] else "32-bit"
    if sums == "16-bit":
        notes.append(
            "--fp16 without --accumulate-allreduce-grads-in-fp32: gradients add up in fp16, unless --sums says 32-bit"
        )
    if found["bf16"] and found["fp16"]:
        raise PstarError(f"{file}: --bf16 and --fp16 are both given; Megatron-LM takes one of them")
    virtual = _virtual(found, file)
    spread = degrees(
        Parallelism(
            tensor=found["tensor"],
            sequence=found["sequence_parallel"],
            context=found["context"],
            experts=found["experts"],
            pipeline=found["pipeline"],
            schedule=INTERLEAVED if virtual > 1 else SCHEDULES[0],
            virtual=virtual,
        )
    )
    share = found["fraction"] if found["offload"] else 0.0
    if found["sequence_parallel"] and found["tensor"] == 1:
        notes.append("--sequence-parallel has no effect without --tensor-model-parallel-size of 2 or more")
    policy = {0.0: _SLICED if found["sliced"] else "all_on_gpu", 1.0: "zero_offload"}
    selective = found["recompute"] == "selective" or found["selective"]
    return Configuration(
        framework=MEGATRON,
        policy=policy.get(share) or _partly(share, _ALL),
        dtype=next((dtype for dtype in ("bf16", "fp16") if found[dtype]), MASTER),
        batch_per_gpu=found["batch_per_gpu"],
        train_batch=found["train_batch"],
        train_batch_key="--global-batch-size",
        clip=found["clip"] > 0,
        sums=sums,
        checkpointing=found["recompute"] == "full",
        recompute=ATTENTION_ALONE if selective else None,
        optimizer=_OPTIMIZERS[found["optimizer"]],
        kernels="megatron",
        dropout=str(Dropout(found["hidden_dropout"], found["attention_dropout"])),
        parallelism=None if str(spread) == str(Parallelism()) else spread,
        details=(("sequence", found["sequence"]), (_SHARE, share)),
        defaults=found.unsaid(_FACTS),
        notes=tuple(notes),
    )


_SLICED = spec("all_on_gpu", {"shard": "states"})
_ALL = 20 << 40
"""Parameters of any model, in one sub-group."""


def _virtual(found: KeyReading, file: str) -> int:
    stages, layers, each = found["pipeline"], found["layers"], found["each_layers"]
    if stages == 1 or (found["virtual"] is None and each is None):
        return 1
    if found["virtual"] is not None:
        return int(found["virtual"])
    if layers is None:
        raise PstarError(
            f"{file}: {_EACH} {each} needs --num-layers beside it; or give the parts of a stage instead, "
            "--num-virtual-stages-per-pipeline-rank"
        )
    if layers % (stages * each):
        raise PstarError(f"{file}: {_EACH} {each}: {stages} stages of such parts do not divide --num-layers {layers}")
    return int(layers // (stages * each))


def degrees(spread: Parallelism) -> Parallelism:
    """Pipelines run 1F1B, interleaved or not; ranks that split layers split a sequence."""
    return replace(
        spread,
        schedule=spread.schedule if spread.virtual > 1 else SCHEDULES[0],
        sequence=spread.sequence and spread.tensor > 1,
    )


def _flags_in(text: str, file: str) -> tuple[dict[str, object], list[str]]:
    set_here = _set_in(text)
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise PstarError(f"{file}: is no list of flags and no shell script: {error}") from None
    words = [word for part in words for word in _ARRAY.sub("", part).rstrip(")").split()]
    flags: dict[str, object] = {}
    others: list[str] = []
    known = _FLAGS if any(word.startswith(_EACH) for word in words) else _FLAGS.keys() - {"--num-layers"}
    for n, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name not in known:
            others += [name] if name.startswith("--") and name not in others else []
            continue
        if _FLAGS[name].kind is bool or _FLAGS[name].default is False:
            flags[name] = True
            continue
        value = value if equals else words[n + 1] if n + 1 < len(words) else "--"
        if value.startswith("--"):
            raise PstarError(f"{file}: {name} has no value")
        given = _number(_expanded(value, set_here, file, name))
        if flags.setdefault(name, given) != given:
            raise PstarError(f"{file}: {name} is {flags[name]} and {given}; leave the one that runs")
    return flags, others


def _set_in(text: str) -> dict[str, set[str]]:
    """Variable -> values in the file, or the default in NAME=${NAME:-default}."""
    values: dict[str, set[str]] = {}
    defaults: dict[str, set[str]] = {}
    for name, value in _ASSIGNED.findall(text.replace(";", "\n")):
        value = value.strip("\"'")
        own = _VARIABLE.fullmatch(value)
        if own is not None and own[1] == name and own[2] is not None:
            defaults.setdefault(name, set()).add(own[2])
        else:
            values.setdefault(name, set()).add(value)
    return defaults | values


def _expanded(value: str, set_here: Mapping[str, set[str]], file: str, flag: str) -> str:
    for _ in range(
        2 + len(set_here)
    ):  # as many variables as are set, one with a default alone, and the look at the end
        variable = _VARIABLE.search(value)
        if variable is None:
            return value
        name = variable[1] or variable[3]
        given = set_here.get(name, set())
        if len(given) > 1:
            raise PstarError(
                f"{file}: {flag} {value}: {name} is {' and '.join(sorted(given))}; leave the one that runs"
            )
        known = next(iter(given), variable[2])
        if known is None:
            break
        value = value.replace(variable[0], known)
    raise PstarError(f"{file}: {flag} {value} is a value that the shell computes; write the number in its place")


def _number(value: str) -> object:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def write(configuration: Configuration) -> str:
    """One flag per line."""
    c, detail = configuration, configuration.detail
    share = detail[_SHARE]
    rates = {} if c.dropout is None else dropout(c.dropout)._asdict()
    sizes = {
        "--micro-batch-size": c.batch_per_gpu,
        "--global-batch-size": c.train_batch,
        "--seq-length": detail["sequence"],
    }
    flags = [
        *(f"{flag} {size}" for flag, size in sizes.items() if size is not None),
        *([f"--{c.dtype}"] if c.dtype != MASTER else []),
        *(["--accumulate-allreduce-grads-in-fp32"] if c.dtype == "fp16" and c.sums == Settings.sums else []),
        f"--clip-grad {1.0 if c.clip else 0.0}",
        *(f"--{what}-dropout {rate:g}" for what, rate in rates.items()),
        "--optimizer adam",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    ]
    if share:
        flags += [
            "--optimizer-cpu-offload",
            f"--optimizer-offload-fraction {share:g}",
            "--overlap-cpu-optimizer-d2h-h2d",
            "--use-precision-aware-optimizer",
        ]
    spread = c.parallelism or Parallelism()
    if spread.tensor > 1:
        flags.append(f"--tensor-model-parallel-size {spread.tensor}")
    if spread.sequence:
        flags.append("--sequence-parallel")
    if spread.context > 1:
        flags.append(f"--context-parallel-size {spread.context}")
    if spread.experts > 1:
        flags.append(f"--expert-model-parallel-size {spread.experts}")
    if spread.pipeline > 1:
        flags.append(f"--pipeline-model-parallel-size {spread.pipeline}")
    if spread.virtual > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {spread.virtual}")
    if c.recompute == ATTENTION_ALONE:
        flags += ["--recompute-granularity selective"]
    elif c.checkpointing:
        flags += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    return "\n".join(flags) + "\n"


def express(plan: Plan) -> Expressed:
    w, where = plan.workload, whereabouts(plan)
    share = round(1 - where.states_on_gpu, 2)
    cannot = common_limits(plan, MEGATRON)
    if where.params_on_gpu < 1:
        cannot.append(
            f"the {1 - where.params_on_gpu:.0%} of the parameters that leave the GPU: Megatron keeps all of them there"
        )
    if where.states_on_disks or where.params_on_disks:
        cannot.append("disks: Megatron has none; predicted with the states on the host")
    cannot += optimizer_limits(w, MEGATRON, "adamw")
    if w.recompute and w.checkpointing:
        cannot.append(f"blocks of which {w.recompute} recomputes: the flags say all of them")
    known = w.source == "preset" or w.dropout is not None
    if not known:
        cannot.append(
            f"dropout: a trace has its masks, not its rates, and Megatron-LM takes {_DROPPED:g} each; give "
            "--hidden-dropout and --attention-dropout"
        )
    several = share < 1 and plan.machine.data_parallel_size > 1
    notes = {
        "not modelled: parameters whole on every GPU; predicted as gathered when they are needed": several
        and share > 0,
        "not modelled: sums beside the backward pass; predicted as waited for": several and share > 0,
    }
    configuration = Configuration(
        framework=MEGATRON,
        policy="zero_offload" if share == 1 else _partly(share, w.trainable_params // plan.machine.data_parallel_size),
        dtype=w.compute_dtype,
        batch_per_gpu=w.batch,
        train_batch=w.batch * w.micro_batches * plan.machine.data_parallel_size,
        clip=plan.settings.clip,
        sums=plan.settings.sums if w.compute_dtype == "fp16" else Settings.sums,
        checkpointing=w.checkpointing,
        recompute=w.recompute if w.recompute == ATTENTION_ALONE else None,
        optimizer="adamw",
        kernels="megatron",
        dropout=str(dropout(w.dropout)) if known else None,
        details=(("sequence", w.sequence), (_SHARE, share)),
        notes=tuple(text for text, applies in notes.items() if applies),
    )
    says = [
        *common_says(plan),
        f"{share:.0%} of the optimizer on the host" if share else "optimizer states on the GPUs, in slices",
        f"clipping {'at 1.0' if plan.settings.clip else 'off'}",
        *(["activations recomputed"] if w.checkpointing else []),
    ]
    return Expressed(configuration=configuration, says=tuple(says), cannot=tuple(cannot))


def _partly(share: float, own_params: int) -> str:
    if share == 0:
        return _SLICED
    subgroup = max(1, own_params // 20)
    return spec("zero3_offload", {"ratio": share, "flush": "async", "reuse": 10**12, "subgroup": subgroup})


def _allocations(configuration: Configuration, workload: Workload, ranks: int) -> tuple[Allocation, ...]:
    share = configuration.detail[_SHARE]
    assert isinstance(share, float | int)
    sizes = [int(share * size) for size in rank_sizes(trained(workload), ranks)]
    return (
        tensor_allocations("fp32 masters", sizes, 4, pinned=True),
        tensor_allocations("fp32 gradients", sizes, 4, pinned=True),
        tensor_allocations("the optimizer's moments", sizes, moments_bytes_per_param(workload), pinned=False),
    )


def _gpu_beyond_bytes(configuration: Configuration, workload: Workload, ranks: int) -> int:
    """Sums of all parameters' gradients; with states on the GPU and several micro-batches the policy counts them. Of a
    table that embedding and head share, the last stage has states of its own."""
    resident = configuration.policy_base == "all_on_gpu"
    table = sum(b.bytes for b in workload.borders if b.receives and b.what == "tied weights")
    params = table // DTYPES[workload.dtype].bytes if resident else 0
    slices = ranks if configuration.options.get("shard") == "states" else 1
    states_bytes = int(params * workload.states_bytes_per_param) // slices
    width = sum_bytes_of(workload, configuration.sums or Settings.sums)
    return states_bytes + (0 if resident and workload.micro_batches > 1 else width * workload.trainable_params)


MEMORY = MemoryRules(allocations=_allocations, gpu_beyond_bytes=_gpu_beyond_bytes)
"""Rules by which Megatron-LM allocates."""
