"""Shapes of known models, from models.toml. Knows how many parameters a shape has, not what it computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

from msgspec import structs

from pstar_sim.arguments import spelled, text
from pstar_sim.catalog.entries import Entry
from pstar_sim.errors import CatalogError, ModelError, UnknownName
from pstar_sim.schema.fields import Checked, Table, Text, between, says
from pstar_sim.schema.parsing import parse_toml

__all__ = ["MOST_WIDTH", "ModelEntry", "ModelShape", "count_params", "model_entry", "model_names", "read_models"]

MOST_WIDTH = 10**6
_Count = Annotated[int, between(1, MOST_WIDTH)]


class ModelShape(Table, frozen=True, kw_only=True):
    """An entry of models.toml; families are described at the head of that file."""

    family: Annotated[Literal["gpt", "llama", "bert", "vit"], says("which blocks the model is made of")]
    layers: Annotated[_Count, says("number of blocks")]
    hidden: Annotated[_Count, says("width of the residual stream")]
    heads: Annotated[_Count, says("attention heads")]
    kv_heads: Annotated[_Count, says("heads of keys and values; equal to heads outside the llama family")]
    ffn: Annotated[_Count, says("width of the feed-forward layer")]
    vocab: Annotated[int, between(0, 10**7), says("tokens of the vocabulary, 0 for a ViT")]
    max_seq: Annotated[int, between(1, 10**8), says("positions the model has")]
    tied: Annotated[bool, says("the head is the token embedding")]
    attention_bias: Annotated[bool, says("biases of q, k and v in the llama family")] = False
    patch: Annotated[_Count | None, says("pixels of a patch's side, ViT only")] = None
    image: Annotated[_Count | None, says("pixels of an image's side, ViT only")] = None
    classes: Annotated[_Count | None, says("outputs of the head, ViT only")] = None
    kernels: Annotated[Literal["eager", "fused", "compiled", "megatron"], says("how its users run it")] = "eager"
    params: Annotated[int, between(1, 10**15), says("true parameter count, tied weights once")]
    aliases: Annotated[tuple[Text, ...], says("other names of the same model")] = ()
    notes: Annotated[Text | None, says("what `pstar models` prints")] = None
    source: Annotated[Text, says("where the figures come from")]
    checked: Annotated[Checked, says("date when the figure was looked up")]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEntry:
    """One model shape.

    vocab: 0 for a ViT.
    params: true count, tied weights counted once.
    max_seq: positions the model has (learned ones are parameters).
    tied: whether the head is the token embedding.
    attention_bias: whether q, k and v have biases in the llama family (the others always have all biases).
    kernels: flavour in which its users run it (workload/kernels.py).
    patch, image, classes: pixels of a patch's and an image's side, outputs of the head; ViT only, else 0.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    max_seq: int
    tied: bool
    params: int
    source: str
    attention_bias: bool = False
    kernels: str = "eager"
    patch: int = 0
    image: int = 0
    classes: int = 0
    aliases: tuple[str, ...] = ()
    notes: str = ""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def count_params(m: ModelEntry) -> int:
    """Parameters of the shape, tied weights once; families as described at the head of models.toml."""
    h, f, v = m.hidden, m.ffn, m.vocab
    norm = 2 * h
    if m.family == "llama":
        kv = m.kv_heads * m.head_dim
        attention = 2 * h * h + 2 * h * kv + (h + 2 * kv if m.attention_bias else 0)
        return v * h * (1 if m.tied else 2) + m.layers * (attention + 3 * h * f + 2 * h) + h
    block = 4 * (h * h + h) + (h * f + f) + (f * h + h) + 2 * norm
    if m.family == "gpt":
        return (v + m.max_seq) * h + m.layers * block + norm + (0 if m.tied else v * h)
    if m.family == "bert":
        token_types = 2
        head = h * h + h + norm + v + (0 if m.tied else v * h)
        return (v + m.max_seq + token_types) * h + norm + m.layers * block + head
    patches = 3 * m.patch * m.patch * h + h
    return patches + h + m.max_seq * h + m.layers * block + norm + h * m.classes + m.classes


def _entry(file: str, name: str, raw: object) -> ModelEntry:
    e = Entry.read(file, name, raw, ModelShape)
    given = {field: value for field, value in structs.asdict(e.values).items() if value is not None}
    del given["checked"]
    m = ModelEntry(name=name, **{**given, "aliases": e.values.aliases})
    _check_shape(e, m)
    return m


def _check_shape(e: Entry[ModelShape], m: ModelEntry) -> None:
    """Check the shape. Raises CatalogError, naming the field, for a shape that contradicts itself or has another number
    of parameters than it says."""
    if m.hidden % m.heads:
        raise e.refuse("heads", f"a divisor of hidden = {m.hidden}")
    if m.heads % m.kv_heads or (m.family != "llama" and m.kv_heads != m.heads):
        raise e.refuse("kv_heads", f"a divisor of heads = {m.heads}, and equal to it outside the llama family")
    if m.attention_bias and m.family != "llama":
        raise e.refuse("attention_bias", "left out outside the llama family, where all biases are there anyway")
    _check_image(e, m)
    if count_params(m) != m.params:
        raise e.refuse("params", f"{count_params(m)}, which is what the shape has")


def _check_image(e: Entry[ModelShape], m: ModelEntry) -> None:
    """Only a ViT has patch, image and classes; every other family has a vocabulary."""
    if m.family == "vit":
        if not (m.patch and m.image and m.classes) or m.image % m.patch:
            raise e.refuse("patch", "given for a ViT, with image (a multiple of it) and classes")
        if m.max_seq != (m.image // m.patch) ** 2 + 1:
            raise e.refuse("max_seq", f"{(m.image // m.patch) ** 2 + 1}: the patches of an image and the class token")
    elif m.patch or m.image or m.classes:
        raise e.refuse("patch", "left out outside the vit family, as image and classes")
    if (m.vocab == 0) != (m.family == "vit"):
        raise e.refuse("vocab", "0 for a ViT and positive for any other family")


def read_models(file: str, text: str) -> dict[str, ModelEntry]:
    """Models by name, in the order of the file. Raises CatalogError for an entry that is wrong or a name used twice."""
    models = {name: _entry(file, name, raw) for name, raw in parse_toml(file, text).items()}
    taken = set(models)
    for m in models.values():
        for alias in m.aliases:
            if alias in taken:
                raise CatalogError(f"{file}: [{m.name}] aliases = {list(m.aliases)!r}; {alias!r} is taken already")
            taken.add(alias)
    return models


@cache
def _models() -> dict[str, ModelEntry]:
    return read_models("models.toml", (files("pstar_sim.catalog") / "models.toml").read_text(encoding="utf-8"))


def model_names() -> tuple[str, ...]:
    """Names of all models, in catalog order, aliases left out."""
    return tuple(_models())


def model_entry(name: str) -> ModelEntry:
    """The model of that name or alias. Raises UnknownName, and ModelError for what is not a name."""
    models = _models()
    text("model", name, "the name of a model, such as '12B'", error=ModelError)
    if name in models:
        return models[name]
    name = spelled(name, models)
    if name in models:
        return models[name]
    by_alias = {alias: m for m in models.values() for alias in m.aliases}
    if name in by_alias:
        return by_alias[name]
    raise UnknownName("model", name, (*models, *by_alias))
