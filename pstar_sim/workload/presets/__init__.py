"""Presets: the workload of a known transformer, computed from its shape without torch.

One file per family. Each `write_*` follows PyTorch and transformers (module names, operators, tensors that autograd
saves, the end of local variables), so a preset is close to a capture. Units are `u`, the bytes of one activation of the
hidden size (batch x sequence x hidden, working dtype), and `f`, of the feed-forward size. A residual stream value
counts until no operator needs it. [Note: early stop] Non-reentrant checkpointing ends a recompute with the last tensor
that backward needs, so a last matmul that only feeds the residual sum is not recomputed.

Source: transformers 5 models gpt2, llama (qwen2), bert, vit; torch 2.13 autograd formulas; sizes compared with storages
counted under fake tensors. There is no attention mask without padding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from functools import cache, lru_cache, partial
from math import ceil, gcd, lcm

from msgspec import structs

from pstar_sim.arguments import flag, whole
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry, is_model, model_entry
from pstar_sim.dtypes import BASES, DTYPES, MASTER, NATIVE, WORKING
from pstar_sim.errors import ModelError
from pstar_sim.python310 import Unpack
from pstar_sim.workload.adapter import Adapter, adapter
from pstar_sim.workload.axes import Axes, AxesGiven, all_axes
from pstar_sim.workload.experts import experts_note
from pstar_sim.workload.kernels import KERNELS, LOSSES, dropout
from pstar_sim.workload.lora import AdaptedTape, adapter_note, adapter_of, base_of
from pstar_sim.workload.optimizers import optimizer_spec
from pstar_sim.workload.presets.bert import write_bert
from pstar_sim.workload.presets.gpt import write_gpt
from pstar_sim.workload.presets.llama import write_llama
from pstar_sim.workload.presets.shared import Shape, Stage
from pstar_sim.workload.presets.vit import write_vit
from pstar_sim.workload.tape import Crossing, Tape
from pstar_sim.workload.workload import ATTENTION_ALONE, Workload, repeat_micro_batch

__all__ = [
    "axes_of",
    "axes_of_variant",
    "can_vary",
    "check_blocks",
    "check_split",
    "default_dtype",
    "has_kernels",
    "kernels_of",
    "kinds_of_layers",
    "preset",
    "stage_of",
    "taped_stage",
    "variant",
    "without_autocast",
    "workload_of",
]

_WRITERS: dict[str, Callable[[Tape, Shape], None]] = {
    "gpt": write_gpt,
    "llama": write_llama,
    "bert": write_bert,
    "vit": write_vit,
}
_EVERY = "every-([1-9][0-9]{0,3})"


def preset(
    name: str,
    *,
    batch: int,
    seq: int | None = None,
    micro_batches: int = 1,
    **axes: Unpack[AxesGiven],
) -> Workload:
    """Returns one iteration of a model of the catalog, trained with its usual loss.

    batch: sequences (images) per micro-batch, of all GPUs together. A comparison divides it among the GPUs of the
        machine.
    seq: tokens per sequence; None: all positions of the model, which a ViT requires.

    Axes, each with a default:

    dtype: None for the dtype of the machine's GPU (bf16, else fp16, else fp32), written as bf16 until a machine is
        known.
    autocast: dtype of torch.autocast over weights and gradients in fp32, of a dense gpt or llama; None by default.
    checkpointing: whether every layer is a checkpoint; True by default.
    attention: a kernel of catalog/attention.py; "flash", that of torch, by default.
    kernels: flavour of the operators beside attention, one of KERNELS (kernels.py); None for the flavour of the model's
        catalog entry, which its users run. A BERT or ViT is written for eager alone.
    loss: of a language model: whole, chunked or fused (kernels.py).
    lora: trains adapters and freezes the model itself (lora.py): an Adapter, a rank, or a text such as "r=16" or
        "r=8,targets=q_proj+v_proj".
    base: of adapters: what the frozen matrices are stored in, one of BASES (dtypes.py) or "bf16", the working dtype.
    optimizer: a name of optimizers.py; "adamw" by default.
    masters: of 16-bit parameters: "fp32", or "none" for pure bf16.
    language_head: False for a GPT that classifies sequences, without logits over the vocabulary.
    early_stop: False for reentrant checkpoints of a gpt or llama, which run the whole layer again; by default they are
        non-reentrant, so a recompute stops early.

    recompute: less than all blocks: "attention" (its core alone), or "every-N" for the last of each N blocks.

    dropout: a rate, or "hidden=0.1" or "attention=0.1", of a gpt, or of a llama with megatron kernels; none by default.

    There is no padding. The GPT family stands for the PatrickStar table, whose parameter counts have no
    head of their own: the head is the token embedding (tied) and the loss is the language model's, though the published
    runs classified sequences. Non-model bytes are logical bytes of live storages.

    Raises UnknownName (with the nearest names), and ModelError for a batch, sequence, dtype, attention or kernels that
    the model cannot have.
    """
    entry = model_entry(name)
    check_blocks(entry, Axes(**axes))
    sequence = entry.max_seq if seq is None else seq
    is_open = axes.get("dtype") is axes.get("autocast") is None
    return workload_of(entry, batch=batch, sequence=sequence, micro_batches=micro_batches, dtype_open=is_open, **axes)


def default_dtype(machine: Machine, autocast: str | None = None) -> str:
    """The first native one of bf16, fp16, fp32; fp32 weights under autocast."""
    return MASTER if autocast else next((dtype for dtype in NATIVE if dtype in machine.gpu.flops_per_s), MASTER)


def workload_of(
    entry: ModelEntry,
    *,
    batch: int,
    sequence: int,
    micro_batches: int = 1,
    model: str | None = None,
    dtype_open: bool = False,
    **given: Unpack[AxesGiven],
) -> Workload:
    """As `preset`, for a shape perhaps not in the catalog. Raises ModelError."""
    name = model or entry.name
    micro_batches = whole(f"model {name}: micro_batches", micro_batches, error=ModelError)
    workload, _ = _written(entry, name, Axes(**given), batch=batch, sequence=sequence, dtype_open=dtype_open)
    return repeat_micro_batch(workload, micro_batches) if micro_batches > 1 else workload


def stage_of(
    entry: ModelEntry,
    stage: Stage,
    *,
    batch: int,
    sequence: int,
    model: str | None = None,
    **given: Unpack[AxesGiven],
) -> tuple[Workload, Sequence[Crossing]]:
    """One micro-batch of a part of a model, and what crosses its borders. Raises ModelError."""
    workload, tape = taped_stage(entry, stage, batch=batch, sequence=sequence, model=model, **given)
    return workload, tape.crossings


def taped_stage(
    entry: ModelEntry,
    stage: Stage,
    *,
    batch: int,
    sequence: int,
    model: str | None = None,
    **given: Unpack[AxesGiven],
) -> tuple[Workload, Tape]:
    """As `stage_of`."""
    name = model or entry.name
    _check_experts(entry, name, stage)
    if not stage.whole and (lora := given.get("lora")) is not None:
        _check_adapter(entry, adapter(lora))
    return _written(entry, name, Axes(**given), batch=batch, sequence=sequence, stage=stage)


@cache
def _check_adapter(entry: ModelEntry, lora: Adapter) -> None:
    """On the whole model: a part need not have what the adapter names."""
    workload_of(entry, batch=1, sequence=entry.max_seq, lora=lora)


def _share_of(entry: ModelEntry, model: str, stage: Stage) -> ModelEntry:
    """A rank's heads, widths and vocabulary. Raises ModelError, with the nearest number that works."""
    ranks = stage.tensor
    if ranks == 1:
        return entry
    widths, share = _split_widths(entry), stage.share or Fraction(1, ranks)
    if any((size * share).denominator > 1 for size in widths.values()):
        near = [n for n in range(1, entry.kv_heads + 1) if not any(size % n for size in widths.values())]
        alike = [n for n in near[1:] if ranks % n == 0] or [n for n in near[1:] if n.bit_count() == 1] or near
        best = min(alike, key=lambda n: (abs(n - ranks), n))
        *first, last = (
            f"{size} {what}" if size > 1 else f"{size} {what.replace('heads', 'head')}" for what, size in widths.items()
        )
        where = "" if best.bit_count() == 1 or ranks % best == 0 else f" on a multiple of {best} GPUs"
        would = f"as {best} would{where}" if best > 1 else "which only 1 would: leave tp out"
        raise _refusal(model, "tp", ranks, f"it divides {', '.join(first)} and {last}, {would}")
    x = entry.experts
    return structs.replace(
        entry,
        heads=int(entry.heads * share),
        kv_heads=int(entry.kv_heads * share),
        own_head_dim=entry.head_dim,
        ffn=int(entry.ffn * share),
        vocab=ceil(entry.vocab * share),
        experts=None if x is None else structs.replace(x, ffn=int(x.ffn * share)),
    )


def parts_of(entry: ModelEntry) -> int:
    """Equal parts of a layer, the most."""
    return gcd(*_split_widths(entry).values())


def _split_widths(entry: ModelEntry) -> dict[str, int]:
    """What each of ranks that split a layer has a part of."""
    widths = {"heads": entry.heads, "heads of keys": entry.kv_heads, "feed-forward columns": entry.ffn}
    return widths if entry.experts is None else widths | {"columns of an expert": entry.experts.ffn}


def check_split(entry: ModelEntry, stage: Stage, *, sequence: int, **given: Unpack[AxesGiven]) -> None:
    """Raises ModelError for degrees that `stage_of` refuses."""
    _check_experts(entry, entry.name, stage)
    _share_of(entry, entry.name, stage)
    if stage.context > 1:
        _part_of_sequence(partial(_refusal, entry.name), entry, stage, sequence, Axes(**given).filled())


def _check_experts(entry: ModelEntry, model: str, stage: Stage) -> None:
    ranks, count = stage.experts, 1 if entry.experts is None else entry.experts.count
    if count % ranks:
        if entry.experts is None:
            raise _refusal(model, "ep", ranks, "the model has no experts; leave ep out")
        best = min((n for n in range(1, count + 1) if count % n == 0), key=lambda n: (abs(n - ranks), n))
        raise _refusal(model, "ep", ranks, f"it divides the {count} experts of a layer, as {best} would")


def _written(
    entry: ModelEntry,
    name: str,
    axes: Axes,
    *,
    batch: int,
    sequence: int,
    stage: Stage | None = None,
    dtype_open: bool = False,
) -> tuple[Workload, Tape]:
    given, axes = axes, axes.filled()
    refuse = partial(_refusal, name)
    batch = whole(f"model {name}: batch", batch, error=ModelError)
    sequence = whole(f"model {name}: sequence", sequence, error=ModelError)
    _check_switches(name, axes)
    _check_sequence(name, entry, sequence)
    _check_names(name, axes)
    positions = _positions_note(entry, sequence)
    if stage is not None and stage.context > 1:
        sequence = _part_of_sequence(refuse, entry, stage, sequence, axes)
    axes = _recomputed(refuse, axes, given.checkpointing)
    dtype = axes.dtype or (MASTER if axes.autocast else WORKING)
    axes = replace(axes, dtype=dtype, kernels=kernels_of(entry, axes.kernels, model=name))
    spec = optimizer_spec(axes.optimizer, masters=axes.masters, width=DTYPES[dtype].bytes)  # type: ignore[arg-type]
    lora = None if axes.lora is None else adapter(axes.lora)
    adapted = (
        None if lora is None else AdaptedTape(dtype, lora, base=axes.base, family=entry.family, tokens=batch * sequence)
    )
    tape = adapted or Tape(dtype, axes.autocast)
    tape.low = axes.products is not None
    if stage is not None:
        tape.tensor, tape.sequence, tape.context = stage.tensor, stage.sequence, stage.context
        tape.experts = stage.experts
    if lora is None and axes.base in BASES:
        raise refuse("base", axes.base, "what is trained is not quantised; train adapters beside it, such as lora r=16")
    if not axes.language_head and entry.family != "gpt":
        raise refuse("language_head", axes.language_head, "only a gpt can leave it out")
    if axes.loss != LOSSES[0] and not entry.causal:
        raise refuse("loss", axes.loss, f"only language models have their logits cut; leave it {LOSSES[0]}")
    if axes.autocast is not None:
        _check_autocast(refuse, entry, axes)
    if axes.products is not None:
        _check_products(refuse, axes)
    axes = replace(axes, dropout=_dropped(refuse, entry, axes))
    if stage is not None and stage.sequence:
        _check_sequence_split(refuse, entry, stage.tensor, sequence, axes)
    if not axes.early_stop and entry.family not in ("gpt", "llama"):
        raise refuse("early_stop", axes.early_stop, "only a gpt or llama can leave it out")
    share = entry if stage is None else _share_of(entry, name, stage)
    shape = Shape(model=share, batch=batch, sequence=sequence, axes=axes, stage=stage)
    _WRITERS[entry.family](tape, shape)
    tape.close()
    if adapted is not None and shape.part.whole:
        adapted.check()
    recorded = {what: getattr(axes, what) for what in _recorded()} | {"optimizer": spec}
    note = "" if lora is None else adapter_note(tape.tensors, lora, dtype)
    stored = "" if given.base else entry.stored
    own = experts_note(entry), positions, note, _flash_note(axes), _low_note(axes), stored
    workload = Workload(
        model=name,
        batch=batch,
        sequence=sequence,
        micro_batches=1,
        source="preset",
        tensors=tuple(tape.tensors),
        moments=tuple(tape.moments),
        uses=tuple(tape.uses),
        dtype_open=dtype_open,
        **recorded,
        notes=", ".join(filter(None, (*own, *axes.notes))),
    )
    return workload, tape


@lru_cache(maxsize=256)
def kinds_of_layers(entry: ModelEntry, axes: Axes) -> tuple[tuple[bool, bool, int], ...]:
    """Of all."""
    shape = Shape(
        model=entry,
        batch=1,
        sequence=1,
        axes=_recomputed(partial(_refusal, entry.name), axes.filled(), axes.checkpointing),
    )
    return tuple(map(shape.kind_of, range(entry.layers)))


@cache
def _recorded() -> tuple[str, ...]:
    return tuple(all_axes().keys() & {field.name for field in fields(Workload)})


def axes_of(workload: Workload) -> Axes:
    """Of a preset, as far as its workload names them."""
    named = {what: getattr(workload, what) for what in _recorded()}
    derived = {"kernels": workload.kernels or None, "lora": adapter_of(workload), "base": base_of(workload)}
    states = workload.optimizer
    return Axes(**(named | derived | {"optimizer": states.name, "masters": states.masters}))


def _refusal(model: str, what: str, value: object, want: str) -> ModelError:
    return ModelError(f"model {model}: {what} is {value!r}; {want}")


def has_kernels(entry: ModelEntry, kernels: str) -> bool:
    """A gpt or llama has all flavours, a bert or vit eager alone."""
    return kernels == "eager" or entry.family in ("gpt", "llama")


def kernels_of(entry: ModelEntry, kernels: object, *, model: str | None = None) -> str:
    """`kernels`, by default the entry's usual flavour.

    Raises ModelError for an unknown one, or one without the family.
    """
    name = model or entry.name
    chosen = entry.kernels if kernels is None else kernels
    if not isinstance(chosen, str) or chosen not in KERNELS:
        raise _refusal(name, "kernels", chosen, f"known flavours are {', '.join(KERNELS)}")
    if not has_kernels(entry, chosen):
        want = f"presets of the {entry.family} family have eager kernels only; trace the model to plan for others"
        raise _refusal(name, "kernels", chosen, want)
    return chosen


def _check_switches(model: str, given: Axes) -> None:
    for what, axis in all_axes().items():
        if isinstance(axis.default, bool):
            flag(f"model {model}: {what}", getattr(given, what), error=ModelError)


def _check_names(model: str, given: Axes) -> None:
    for what, axis in all_axes().items():
        value = getattr(given, what)
        if axis.names and value is not None and not (isinstance(value, str) and value in axis.names):
            raise _refusal(model, what, value, f"known {axis.plural} are {', '.join(axis.names)}")


def check_blocks(entry: ModelEntry, axes: Axes) -> None:
    """Raises ModelError for fewer blocks than every-N counts."""
    every = re.fullmatch(_EVERY, axes.recompute) if isinstance(axes.recompute, str) else None
    if every and int(every[1]) > (n := entry.layers):
        want = f"the model has {n} blocks; every-{n} recomputes the last alone, --no-checkpointing none"
        raise _refusal(entry.name, "recompute", axes.recompute, want)


def _recomputed(refuse: Callable[[str, object, str], ModelError], axes: Axes, checkpointing: bool | None) -> Axes:
    what = axes.recompute
    if what is None:
        return axes
    if not isinstance(what, str) or (what != ATTENTION_ALONE and not re.fullmatch(_EVERY, what)):
        raise refuse("recompute", what, f"it is {ATTENTION_ALONE} or every-N, such as every-2")
    if checkpointing is False and what != ATTENTION_ALONE:
        raise refuse("recompute", what, "checkpointing is off; leave one of them out")
    if checkpointing and what == ATTENTION_ALONE:
        raise refuse("recompute", what, "checkpointing is on, which recomputes all of a block; leave one of them out")
    return replace(axes, checkpointing=what != ATTENTION_ALONE)


def without_autocast(entry: ModelEntry, axes: Axes) -> str:
    """What of a job no preset runs under autocast."""
    written = entry.family != "vit" and not (entry.experts or entry.latent or entry.qk_norm or entry.post_norms)
    others = (axes.lora, "adapters"), (axes.loss not in (None, LOSSES[0]), f"a {axes.loss} loss")
    return next((words for value, words in (*others, (not written, "this model")) if value), "")


def _check_autocast(refuse: Callable[[str, object, str], ModelError], entry: ModelEntry, axes: Axes) -> None:
    if axes.dtype not in (None, MASTER):
        raise refuse("dtype", axes.dtype, f"autocast is over weights in {MASTER}; leave the dtype out, or the autocast")
    if what := without_autocast(entry, axes):
        want = "it is written for BERT and for dense GPT and Llama models that are trained whole"
        raise refuse("autocast", axes.autocast, f"{want}, not for {what}; trace the model under autocast instead")


def _check_products(refuse: Callable[[str, object, str], ModelError], axes: Axes) -> None:
    """No library has products in fp8 of what is refused."""
    beside = {
        "LoRA": axes.lora is not None,
        "math attention": axes.attention == "math",
        f"{axes.autocast or axes.dtype}": (axes.autocast or axes.dtype) != WORKING,
    }
    for words, there in beside.items():
        if there:
            raise refuse("products", axes.products, f"they are for {WORKING}, not beside {words}; leave one out")


def _dropped(refuse: Callable[[str, object, str], ModelError], entry: ModelEntry, axes: Axes) -> str | None:
    if not any(rates := dropout(axes.dropout)):
        return None
    want = ""
    if entry.family not in ("gpt", "llama"):
        want = "it is written for a gpt or llama"
    elif entry.family == "llama" and (axes.kernels != "megatron" or axes.autocast is not None):
        want = "of a llama Megatron alone has masks; give kernels megatron without autocast"
    if want:
        raise refuse("dropout", axes.dropout, f"{want}, or trace the model with its masks")
    return str(rates)


def _check_sequence_split(
    refuse: Callable[[str, object, str], ModelError], entry: ModelEntry, ranks: int, sequence: int, axes: Axes
) -> None:
    if ranks == 1:
        raise refuse("sp", True, "the ranks of tp split the sequence; give tp of 2 or more, or leave sp out")
    if axes.autocast is not None:
        raise refuse("sp", True, "sequence parallelism is written for weights in 16 bits; leave the autocast or sp out")
    if sequence % ranks:
        best = sequence - sequence % ranks or ranks
        hint = f"{best} would do, or leave sp out" if entry.takes(best) else "leave sp out"
        raise refuse("sequence", sequence, f"{ranks} ranks split it (sp); {hint}")


def _part_of_sequence(
    refuse: Callable[[str, object, str], ModelError], entry: ModelEntry, stage: Stage, sequence: int, axes: Axes
) -> int:
    """A rank's tokens."""
    if axes.attention == "math":
        raise refuse(
            "attention", axes.attention, "ranks that split the sequence (cp) run fused attention, such as flash"
        )
    pieces = stage.context * lcm(2, stage.tensor if stage.sequence else 1)
    if over := sequence % pieces:
        near = [n for n in (sequence - over, sequence - over + pieces) if n and entry.takes(n)]
        best = min(near, key=lambda n: abs(n - sequence), default=None)
        hint = f"{best} would do" if best is not None else "take fewer ranks"
        raise refuse("sequence", sequence, f"cp={stage.context} cuts it into {pieces} equal pieces; {hint}")
    return sequence // stage.context


def _check_sequence(model: str, entry: ModelEntry, sequence: int) -> None:
    if entry.family == "vit" and sequence != entry.max_seq:
        raise _refusal(model, "sequence", sequence, f"an image of this model is {entry.max_seq} tokens")
    if not entry.takes(sequence):
        raise _refusal(model, "sequence", sequence, f"the model has learned {entry.max_seq} positions")


def _flash_note(axes: Axes) -> str:
    fused = axes.recompute == ATTENTION_ALONE and axes.attention != "math"
    return "fused attention keeps no scores, so that recomputing it saves next to nothing" if fused else ""


def _low_note(axes: Axes) -> str:
    if axes.products is None:
        return ""
    return f"products in {axes.products}, all that is stored in {WORKING} as without: it saves seconds, not bytes"


def _positions_note(entry: ModelEntry, sequence: int) -> str:
    return f"beyond its {entry.max_seq:,} positions (rotary)" if sequence > entry.max_seq else ""


def can_vary(workload: Workload, shape: ModelEntry | None = None) -> bool:
    """A preset whose shape is given or in the catalog."""
    return workload.source == "preset" and (shape is not None or is_model(workload.model))


def variant(
    workload: Workload,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    micro_batches: int | None = None,
    shape: ModelEntry | None = None,
    **changes: Unpack[AxesGiven],
) -> Workload:
    """A 16-bit dtype takes the place of autocast; other axes stay.

    shape: of a model not in the catalog.

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
        sequence=workload.sequence if sequence is None else sequence,
        micro_batches=workload.micro_batches if micro_batches is None else micro_batches,
        **axes_of_variant(workload, **changes).given,
    )
    return made if made.optimizer == workload.optimizer else replace(made, optimizer=workload.optimizer)


def axes_of_variant(workload: Workload, **changes: Unpack[AxesGiven]) -> Axes:
    """But for the optimizer."""
    axes = replace(axes_of(workload).but(**changes), optimizer=None)
    if "checkpointing" in changes and "recompute" not in changes:
        axes = replace(axes, recompute=None)
    if changes.get("recompute") is not None and "checkpointing" not in changes:
        axes = replace(axes, checkpointing=None)
    if changes.get("dtype") not in (None, MASTER):
        axes = replace(axes, autocast=None)
    return axes
