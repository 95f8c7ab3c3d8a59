"""Presets: the workload of a known transformer, computed from its shape without torch.

One file per family writes its models down operator by operator: parameters, flops and live bytes, in the order of one
iteration. Each `write_*` follows PyTorch and transformers (module names, operators, the tensors that autograd saves,
the end of local variables), so that a preset is close to a capture of the same model. The units are `u`, the bytes of
one activation of the hidden size (batch x sequence x hidden, working dtype), and `f`, those of the feed-forward size. A
residual stream value counts from its creation until no operator needs it. [Note: early stop] Non-reentrant
checkpointing ends a recompute when the last tensor that backward needs exists. So a last matmul whose output only feeds
the residual sum is not recomputed.

Source: transformers 5 models gpt2, llama (qwen2), bert, vit; torch 2.13 autograd formulas; sizes compared with storages
counted under fake tensors. Bytes of the attention mask are left out, because without padding no mask is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pstar_sim.arguments import flag, whole
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry, model_entry, model_names
from pstar_sim.dtypes import DTYPES, MASTER, NATIVE, WORKING
from pstar_sim.errors import ModelError
from pstar_sim.workload.experts import experts_note
from pstar_sim.workload.kernels import FLAVOURS, KERNELS
from pstar_sim.workload.lora import AdaptedTape, Adapter, adapter, adapter_of
from pstar_sim.workload.optimizers import optimizer_spec
from pstar_sim.workload.presets.bert import write_bert
from pstar_sim.workload.presets.gpt import write_gpt
from pstar_sim.workload.presets.llama import write_llama
from pstar_sim.workload.presets.shared import Shape
from pstar_sim.workload.presets.vit import write_vit
from pstar_sim.workload.tape import Tape
from pstar_sim.workload.workload import Workload, repeat_micro_batch

__all__ = ["ATTENTION", "can_vary", "default_dtype", "has_kernels", "kernels_of", "preset", "variant", "workload_of"]

ATTENTION = ("flash", "efficient", "math")

_WRITERS: dict[str, Callable[[Tape, Shape], None]] = {
    "gpt": write_gpt,
    "llama": write_llama,
    "bert": write_bert,
    "vit": write_vit,
}


def preset(
    name: str,
    *,
    batch: int,
    seq: int | None = None,
    micro_batches: int = 1,
    dtype: str | None = None,
    checkpointing: bool = True,
    attention: str = "flash",
    kernels: str | None = None,
    lora: Adapter | str | int | None = None,
    optimizer: str = "adamw",
) -> Workload:
    """Returns one iteration of a model of the catalog, trained with its usual loss.

    batch: sequences (images) per micro-batch, of all GPUs together. A comparison divides it among the GPUs of the
        machine.
    dtype: None for the dtype of the machine's GPU (bf16, else fp16, else fp32), written as bf16 until a machine is
        known.
    seq: tokens per sequence; None: all positions of the model, which a ViT requires.
    checkpointing: whether every layer is a checkpoint (non-reentrant, so a recompute stops early).
    kernels: flavour of the operators beside attention, one of KERNELS (kernels.py); None for the flavour of the model's
        catalog entry, which its users run. A BERT or ViT is written for eager alone.
    lora: trains adapters and freezes the model itself (lora.py): an Adapter, a rank, or a text such as "r=16" or
        "r=8,targets=q_proj+v_proj".
    optimizer: a name of optimizers.py.

    There is no dropout and no padding. The GPT family stands for the PatrickStar table, whose parameter counts have no
    head of their own. So the head is the token embedding (tied) and the loss is the language model's, as the planning
    figures assume, though the published runs classified sequences. Non-model bytes are logical bytes of live storages.
    The accelerator's context is a term of the machine, not of the workload.

    Raises UnknownName (with the nearest names), and ModelError for a batch, sequence, dtype, attention or kernels that
    the model cannot have.
    """
    entry = model_entry(name)
    made = workload_of(
        entry,
        batch=batch,
        sequence=entry.max_seq if seq is None else seq,
        micro_batches=micro_batches,
        dtype=WORKING if dtype is None else dtype,
        checkpointing=checkpointing,
        attention=attention,
        kernels=kernels,
        lora=None if lora is None else adapter(lora),
        optimizer=optimizer,
    )
    return replace(made, dtype_open=True) if dtype is None else made


def default_dtype(machine: Machine) -> str:
    """Returns the first that the GPU has natively: bf16, fp16, fp32."""
    return next((dtype for dtype in NATIVE if dtype in machine.gpu.flops_per_s), MASTER)


def workload_of(
    entry: ModelEntry,
    *,
    batch: int,
    sequence: int,
    micro_batches: int = 1,
    dtype: str = WORKING,
    checkpointing: bool = True,
    attention: str = "flash",
    kernels: str | None = None,
    lora: Adapter | None = None,
    optimizer: str = "adamw",
    model: str | None = None,
    language_head: bool = True,
    early_stop: bool = True,
) -> Workload:
    """Returns the same as `preset`, for a shape that need not be in the catalog.

    language_head: False for a GPT that classifies sequences, without logits over the vocabulary.
    early_stop: False for reentrant checkpoints of a gpt or llama, which run the whole layer again.

    Raises ModelError.
    """
    name = model or entry.name

    refuse = partial(_refusal, name)
    batch = whole(f"model {name}: batch", batch, error=ModelError)
    sequence = whole(f"model {name}: sequence", sequence, error=ModelError)
    micro_batches = whole(f"model {name}: micro_batches", micro_batches, error=ModelError)
    for what, switch in (
        ("checkpointing", checkpointing),
        ("language_head", language_head),
        ("early_stop", early_stop),
    ):
        flag(f"model {name}: {what}", switch, error=ModelError)
    _check_sequence(name, entry, sequence)
    _check_kinds(name, dtype, attention)
    kernels = kernels_of(entry, kernels, model=name)
    spec = optimizer_spec(optimizer)
    adapted = None if lora is None else AdaptedTape(dtype, lora, family=entry.family, tokens=batch * sequence)
    tape = adapted or Tape(dtype)
    if not language_head and entry.family != "gpt":
        raise refuse("language_head", language_head, "only a gpt can leave it out")
    if not early_stop and entry.family not in ("gpt", "llama"):
        raise refuse("early_stop", early_stop, "only a gpt or llama can leave it out")
    shape = Shape(
        model=entry,
        batch=batch,
        sequence=sequence,
        checkpointing=checkpointing,
        attention=attention,
        flavour=FLAVOURS[kernels],
        language_head=language_head,
        early_stop=early_stop,
    )
    _WRITERS[entry.family](tape, shape)
    tape.close()
    if adapted is not None and not adapted.adapted:
        raise refuse("lora targets", ", ".join(adapted.names), f"no matrix has such a name; try {_matrices(tape)}")
    workload = Workload(
        model=name,
        dtype=dtype,
        batch=batch,
        sequence=sequence,
        micro_batches=1,
        checkpointing=checkpointing,
        attention=attention,
        kernels=kernels,
        source="preset",
        tensors=tuple(tape.tensors),
        moments=tuple(tape.moments),
        uses=tuple(tape.uses),
        optimizer=spec,
        notes=", ".join(note for note in (experts_note(entry), "" if adapted is None else _lora_note(adapted)) if note),
    )
    return repeat_micro_batch(workload, micro_batches) if micro_batches > 1 else workload


def _lora_note(adapted: AdaptedTape) -> str:
    return f"LoRA r={adapted.adapter.rank} on {', '.join(adapted.names)}"


def _refusal(model: str, what: str, value: object, want: str) -> ModelError:
    return ModelError(f"model {model}: {what} is {value!r}; {want}")


def has_kernels(entry: ModelEntry, kernels: str) -> bool:
    """A gpt or llama is written for all flavours, a bert or vit for eager alone."""
    return kernels == "eager" or entry.family in ("gpt", "llama")


def kernels_of(entry: ModelEntry, kernels: object, *, model: str | None = None) -> str:
    """Returns the flavour in which a model runs: `kernels`, or with None the usual flavour of its entry.

    model: name for messages.

    Raises ModelError for an unknown flavour, and for one for which the family is not written.
    """
    name = model or entry.name
    chosen = entry.kernels if kernels is None else kernels
    if not isinstance(chosen, str) or chosen not in KERNELS:
        raise _refusal(name, "kernels", chosen, f"known flavours are {', '.join(KERNELS)}")
    if not has_kernels(entry, chosen):
        want = f"presets of the {entry.family} family have eager kernels only; trace the model to plan for others"
        raise _refusal(name, "kernels", chosen, want)
    return chosen


def _check_kinds(model: str, dtype: object, attention: object) -> None:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _refusal(model, "dtype", dtype, f"known dtypes are {', '.join(DTYPES)}")
    if not isinstance(attention, str) or attention not in ATTENTION:
        raise _refusal(model, "attention", attention, f"known kernels are {', '.join(ATTENTION)}")


def _check_sequence(model: str, entry: ModelEntry, sequence: int) -> None:
    if entry.family == "vit" and sequence != entry.max_seq:
        raise _refusal(model, "sequence", sequence, f"an image of this model is {entry.max_seq} tokens")
    if sequence > entry.max_seq:
        raise _refusal(model, "sequence", sequence, f"the model has {entry.max_seq} positions")


def can_vary(workload: Workload, shape: ModelEntry | None = None) -> bool:
    """Whether `variant` can write the workload anew: a preset whose shape is given or in the catalog, not one of
    another catalog or written by hand."""
    return workload.source == "preset" and (shape is not None or workload.model in model_names())


def variant(
    workload: Workload,
    *,
    batch: int | None = None,
    micro_batches: int | None = None,
    checkpointing: bool | None = None,
    dtype: str | None = None,
    shape: ModelEntry | None = None,
) -> Workload:
    """Keeps preset, adapter and optimizer.

    shape: the model's shape, if it is not in the catalog.

    Raises ModelError for no preset, and UnknownName for a shape neither given nor in the catalog.
    """
    if workload.source != "preset":
        raise ModelError(
            f"workload {workload.model!r} comes from a {workload.source}; trace the model with the other settings"
        )
    made = workload_of(
        model_entry(workload.model) if shape is None else shape,
        model=workload.model,
        batch=workload.batch if batch is None else batch,
        sequence=workload.sequence,
        micro_batches=workload.micro_batches if micro_batches is None else micro_batches,
        dtype=workload.dtype if dtype is None else dtype,
        checkpointing=workload.checkpointing if checkpointing is None else checkpointing,
        attention=workload.attention,
        kernels=workload.kernels or None,
        lora=adapter_of(workload),
    )
    return replace(made, optimizer=workload.optimizer)


def _matrices(tape: Tape) -> str:
    names = (t.name.removesuffix(".weight").rpartition(".")[2] for t in tape.tensors if len(t.shape) == 2)
    return ", ".join(dict.fromkeys(names))
