"""Axes: how a model of a given shape runs and what of it is trained. Flags, grids, presets, captures and published runs
take them from the fields of `Axes` (`AxesGiven` repeats names and types for signatures).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, TypedDict, get_type_hints

from pstar_sim.catalog.attention import ATTENTION, USUAL
from pstar_sim.dtypes import AUTOCAST, BASES, DTYPES, PRODUCTS
from pstar_sim.python310 import Unpack
from pstar_sim.workload.adapter import Adapter
from pstar_sim.workload.kernels import FUSED, KERNELS, LOSSES
from pstar_sim.workload.optimizers import MASTERS, OPTIMIZERS


@dataclass(frozen=True, kw_only=True)
class Axis:
    """help: of its flag; "" for an axis of published runs only.
    metavar: the value's name in the help.
    values: words for its values in a grid.
    names, plural: the values, if they are names, and their name.
    suggested: some values, if others are possible.
    default: of a preset.
    noted: answers say a value that is not the default; other axes have words of their own.
    of_modules: help where a module is captured or run, "" if it does not take the axis.
    words: other spellings, in lower case.
    not_of_traces: what would do for a trace, which cannot take the axis; "" if it can.
    """

    help: str = ""
    metavar: str | None = None
    values: str = ""
    names: tuple[str, ...] = ()
    plural: str = ""
    suggested: tuple[str, ...] = ()
    default: Any = None
    noted: bool = False
    of_modules: str = ""
    not_of_traces: str = ""
    words: Mapping[str, str] = field(default_factory=dict)


def _words(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


_RECOMPUTE = "recompute activations in the backward pass"
_LORA = (
    "freeze the model and train adapters of rank R: r=16; behind it targets=NAME+NAME, all-linear or a regular "
    "expression, save=NAME+NAME for modules trained whole, alpha=N, rs, dora"
)
_KERNELS = "kernels of a preset, attention aside: eager, fused, compiled or megatron (default: the usual)"
_OPTIMIZERS = _words(OPTIMIZERS)
_DTYPE_WORDS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_BASES = ("bf16", *BASES)
_BASE_WORDS = {
    **{name: name for name in _BASES},
    **dict.fromkeys(("qlora", "4bit", "4-bit", "load_in_4bit"), "nf4"),
    **dict.fromkeys(("8bit", "8-bit", "load_in_8bit"), "int8"),
}


@dataclass(frozen=True, kw_only=True)
class Axes:
    """None: nothing said, so a preset's default, or the choice of a trace or a machine."""

    dtype: Annotated[
        str | None,
        Axis(
            help="working dtype (default: bf16 where the GPU has it, else fp16, or the trace's)",
            values="fp32, bf16 or fp16 (default: what the GPU has)",
            names=tuple(DTYPES),
            plural="dtypes",
            words=_DTYPE_WORDS,
            of_modules="working dtype (default: bf16; of a py: factory, the module's own)",
        ),
    ] = None
    autocast: Annotated[
        str | None,
        Axis(
            help="torch.autocast (AMP) to bf16 or fp16 over fp32 weights and gradients (default: none)",
            metavar="DTYPE",
            values=_words(AUTOCAST),
            names=AUTOCAST,
            plural="dtypes",
            noted=True,
            of_modules="run the forward pass under torch.autocast to bf16 or fp16; the weights are fp32",
            not_of_traces="a trace has the dtypes that ran; trace the model under autocast instead",
        ),
    ] = None
    products: Annotated[
        str | None,
        Axis(
            help="fp8: products of the layers' linear modules in fp8, all else in the working dtype (planned only)",
            metavar="DTYPE",
            values=_words(("", *PRODUCTS)).removeprefix(" or "),
            names=PRODUCTS,
            plural="dtypes of products",
            not_of_traces="a trace has the products that ran; give --model, a preset",
        ),
    ] = None
    checkpointing: Annotated[
        bool | None,
        Axis(
            help=f"{_RECOMPUTE} (default: on for presets; with --trace: picks a variant)",
            values="true or false",
            default=True,
            of_modules=f"{_RECOMPUTE} (default: off, as transformers models come)",
        ),
    ] = None
    recompute: Annotated[
        str | None,
        Axis(
            help="recompute less than all blocks of a preset: attention (scores and softmax alone, Megatron's "
            "selective) or every-N blocks, such as every-2 (torchtitan's selective)",
            metavar="WHAT",
            values="attention or every-N",
            suggested=("attention", "every-2"),
            noted=True,
            not_of_traces="a trace has the recomputations that ran; trace the model with others instead",
        ),
    ] = None
    attention: Annotated[
        str | None,
        Axis(
            help=f"attention kernel of a preset: {_words(ATTENTION)} (default: {USUAL}, torch's own)",
            values=_words(ATTENTION),
            metavar="KERNEL",
            names=tuple(ATTENTION),
            plural="kernels",
            default=USUAL,
            noted=True,
            words={"flash_attention_2": "fa2", "flash_attention_3": "fa3", "sdpa": USUAL, "xformers": "efficient"},
            of_modules="attention kernel (default: torch's choice)",
            not_of_traces="a trace has the kernels that ran; trace the model with another attention instead",
        ),
    ] = None
    kernels: Annotated[
        str | None,
        Axis(
            help=_KERNELS,
            metavar="K",
            values="eager, fused, compiled or megatron",
            names=KERNELS,
            plural="flavours",
            words={"liger": FUSED, "compile": "compiled", "torch.compile": "compiled"},
            not_of_traces="a trace has the kernels that ran; trace the model with other kernels instead",
        ),
    ] = None
    dropout: Annotated[
        str | float | None,
        Axis(
            help="masks of a gpt, or of a llama with megatron kernels: of hidden states and of scores, or hidden=RATE "
            "or attention=RATE alone (default: none)",
            metavar="RATE",
            values="a rate, such as 0.1, or hidden=0.1 or attention=0.1 for those alone",
            suggested=("0.1", "hidden=0.1", "attention=0.1"),
            noted=True,
            not_of_traces="a trace has the masks that ran; trace the model with another dropout instead",
        ),
    ] = None
    lora: Annotated[
        Adapter | str | int | None,
        Axis(
            help=_LORA,
            metavar="r=R",
            suggested=("r=8", "r=16", "r=64"),
            values="adapters, such as r=16, or none",
            of_modules=_LORA,
        ),
    ] = None
    base: Annotated[
        str | None,
        Axis(
            help="what the frozen matrices beside --lora are stored in: bf16 (the working dtype, default), int8, nf4 "
            "(QLoRA: 4 bits, double quantisation), nf4-single (without), fp8 or nf4-experts (of stacks of experts too)",
            metavar="B",
            values=_words(_BASES),
            names=_BASES,
            plural="bases",
            default=_BASES[0],
            words=_BASE_WORDS,
            of_modules="with --lora: what the frozen matrices are stored in, such as nf4 (default: the working dtype)",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        Axis(
            help=f"{_OPTIMIZERS} (default: adamw, or the trace's)",
            metavar="O",
            values=_OPTIMIZERS,
            suggested=tuple(OPTIMIZERS),
            default="adamw",
        ),
    ] = None
    masters: Annotated[
        str | None,
        Axis(
            help="masters of 16-bit parameters: fp32 (default), or none (pure bf16, as torchtune trains)",
            values=_words(MASTERS),
            names=MASTERS,
            plural="kinds of masters",
            default=MASTERS[0],
        ),
    ] = None
    loss: Annotated[
        str | None,
        Axis(
            help="loss of a language model's preset: whole (default), chunked (torchtune, TRL) or fused (Liger)",
            values=_words(LOSSES),
            names=LOSSES,
            plural="losses",
            words={"liger": FUSED},
            default=LOSSES[0],
            noted=True,
            not_of_traces="a trace has the loss that ran; trace the model with another loss instead",
        ),
    ] = None
    language_head: Annotated[bool | None, Axis(default=True)] = None
    early_stop: Annotated[bool | None, Axis(default=True)] = None

    @property
    def given(self) -> AxesGiven:
        """Of which something was said, in the names used here."""
        said = [(name, getattr(self, name), axis) for name, axis in all_axes().items()]
        values = {name: axis.words.get(str(value).lower(), value) for name, value, axis in said}
        return {name: value for name, value in values.items() if value is not None}  # type: ignore[return-value]

    def but(self, **changes: Unpack[AxesGiven]) -> Axes:
        """Changed where something else is said."""
        said = {name: value for name, value in changes.items() if value is not None}
        return Axes(**(self.given | said))  # type: ignore[arg-type]

    @property
    def notes(self) -> list[str]:
        """Such as "math attention", for answers."""
        stated = ((name, getattr(self, name), axis) for name, axis in all_axes().items() if axis.noted)
        return [f"{value} {name}" for name, value, axis in stated if value not in (None, axis.default)]

    @property
    def words(self) -> list[str]:
        """Such as "lora r=16" and "no checkpointing"."""
        said = [(name.replace("_", " "), value) for name, value in self.given.items()]
        flags = {True: "", False: "no "}
        return [f"{flags[v]}{name}" if isinstance(v, bool) else f"{name} {v}" for name, v in said]

    def filled(self) -> Axes:
        """With the defaults of a preset where nothing was said."""
        return Axes(**{name: axis.default for name, axis in all_axes().items()}).but(**self.given)


class AxesGiven(TypedDict, total=False):
    """Keyword arguments of functions that take axes: see `Axes`."""

    dtype: str | None
    autocast: str | None
    products: str | None
    checkpointing: bool | None
    recompute: str | None
    attention: str | None
    kernels: str | None
    dropout: str | float | None
    lora: Adapter | str | int | None
    base: str | None
    optimizer: str | None
    masters: str | None
    loss: str | None
    language_head: bool | None
    early_stop: bool | None


@cache
def all_axes() -> dict[str, Axis]:
    """In the order of declaration."""
    hints = get_type_hints(Axes, include_extras=True)
    return {field.name: hints[field.name].__metadata__[0] for field in fields(Axes)}
