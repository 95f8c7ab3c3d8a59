"""Shapes of known models, from models.toml. Knows how many parameters a shape has, not what it computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pstar_sim.arguments import spelled, text
from pstar_sim.catalog.fields import Choice, Date, Entry, Field, Flag, Number, Text, Texts, parse_toml
from pstar_sim.errors import CatalogError, ModelError, UnknownName

__all__ = ["ModelEntry", "count_params", "model_entry", "model_names", "read_models"]

_COUNT = Number(1, 1e6, whole=True)
_SOME = Number(1, 1e6, whole=True, required=False)
_FIELDS: dict[str, Field] = {
    "family": Choice(("gpt", "llama", "bert", "vit")),
    "layers": _COUNT,
    "hidden": _COUNT,
    "heads": _COUNT,
    "kv_heads": _COUNT,
    "ffn": _COUNT,
    "vocab": Number(0, 1e7, whole=True),
    "max_seq": Number(1, 1e8, whole=True),
    "tied": Flag(),
    "attention_bias": Flag(required=False),
    "patch": _SOME,
    "image": _SOME,
    "classes": _SOME,
    "params": Number(1, 1e15, whole=True),
    "aliases": Texts(required=False),
    "notes": Text(required=False),
    "source": Text(),
    "checked": Date(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEntry:
    """One model shape. vocab: 0 for a ViT. params: true count, tied weights once.

    max_seq: positions the model has (learned ones are parameters). tied: the head is the token embedding.
    attention_bias: biases of q, k and v in the llama family (the others always have all biases).
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
    e = Entry.read(file, name, raw, _FIELDS)
    m = ModelEntry(
        name=name,
        family=e.text("family"),
        layers=e.whole("layers"),
        hidden=e.whole("hidden"),
        heads=e.whole("heads"),
        kv_heads=e.whole("kv_heads"),
        ffn=e.whole("ffn"),
        vocab=e.whole("vocab"),
        max_seq=e.whole("max_seq"),
        tied=e.flag("tied"),
        params=e.whole("params"),
        source=e.text("source"),
        attention_bias=e.flag("attention_bias"),
        patch=e.whole("patch"),
        image=e.whole("image"),
        classes=e.whole("classes"),
        aliases=e.texts("aliases"),
        notes=e.text("notes"),
    )
    _check_shape(e, m)
    return m


def _check_shape(e: Entry, m: ModelEntry) -> None:
    """Raises CatalogError, naming the field, for a shape that contradicts itself or does not have its parameters."""
    if m.hidden % m.heads:
        raise e.refuse("heads", f"a divisor of hidden = {m.hidden}")
    if m.heads % m.kv_heads or (m.family != "llama" and m.kv_heads != m.heads):
        raise e.refuse("kv_heads", f"a divisor of heads = {m.heads}, and equal to it outside the llama family")
    if m.attention_bias and m.family != "llama":
        raise e.refuse("attention_bias", "left out outside the llama family, where all biases are there anyway")
    _check_image(e, m)
    if count_params(m) != m.params:
        raise e.refuse("params", f"{count_params(m)}, which is what the shape has")


def _check_image(e: Entry, m: ModelEntry) -> None:
    """Patches, image and classes are a ViT's alone, a vocabulary everybody else's."""
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
