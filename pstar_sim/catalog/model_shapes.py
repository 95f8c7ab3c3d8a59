"""Shapes of known models, from models.toml."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

from msgspec import field, structs

from pstar_sim.arguments import spelled, text
from pstar_sim.catalog.configurations import MOST_WIDTH, is_configuration, read_configuration, shape_of
from pstar_sim.catalog.entries import Entry
from pstar_sim.errors import CatalogError, ModelError, UnknownName
from pstar_sim.schema.fields import Checked, Table, Text, between, says
from pstar_sim.schema.parsing import parse_toml

__all__ = [
    "MOST_WIDTH",
    "ExpertsShape",
    "LatentShape",
    "ModelEntry",
    "count_params",
    "expert_params",
    "is_model",
    "model_entry",
    "model_names",
    "read_models",
]

_Count = Annotated[int, between(1, MOST_WIDTH)]


class ExpertsShape(Table, frozen=True, kw_only=True):
    """Experts in place of feed-forward layers: a router sends each token to a few of them."""

    count: Annotated[_Count, says("experts of a layer")]
    per_token: Annotated[_Count, says("experts that a token goes through")]
    ffn: Annotated[_Count, says("width of an expert")]
    shared: Annotated[int, between(0, MOST_WIDTH), says("experts that every token goes through, beside the others")] = 0
    dense_layers: Annotated[int, between(0, MOST_WIDTH), says("first layers, which have one feed-forward layer")] = 0
    biases: Annotated[bool, says("biases of router and experts")] = False
    fp32_router: Annotated[bool, says("a router that computes in fp32, on copies of its input and its weights")] = False


class LatentShape(Table, frozen=True, kw_only=True):
    """Multi-head latent attention: queries, keys and values by way of narrow projections (DeepSeek-V3)."""

    q_rank: Annotated[_Count, says("width of the narrow queries")]
    kv_rank: Annotated[_Count, says("width of the narrow keys and values")]
    rotary: Annotated[_Count, says("part of a head's query and key that has a position")]
    plain: Annotated[_Count, says("part of a head's query and key that has none")]
    value: Annotated[_Count, says("width of a head's value")]


class ModelEntry(Table, frozen=True, kw_only=True):
    """An entry of models.toml, whose head describes the families.

    own_head_dim, window, full_every, patch, image and classes are 0 for a model without them, tables None.
    """

    name: str = ""
    family: Annotated[Literal["gpt", "llama", "bert", "vit"], says("which blocks the model is made of")]
    layers: Annotated[_Count, says("number of blocks")]
    hidden: Annotated[_Count, says("width of the residual stream")]
    heads: Annotated[_Count, says("attention heads")]
    kv_heads: Annotated[_Count, says("heads of keys and values; equal to heads outside the llama family")]
    ffn: Annotated[_Count, says("width of the feed-forward layer")]
    vocab: Annotated[int, between(0, 10**7), says("tokens of the vocabulary, 0 for a ViT")]
    max_seq: Annotated[int, between(1, 10**8), says("positions that the model knows, learned or rotary")]
    tied: Annotated[bool, says("the head is the token embedding")]
    attention_bias: Annotated[bool, says("biases of q, k and v in the llama family")] = False
    output_bias: Annotated[bool, says("a bias behind attention, too, in the llama family")] = False
    own_head_dim: Annotated[_Count, says("width of a head, where it is not hidden / heads; llama family")] = field(
        name="head_dim", default=0
    )
    qk_norm: Annotated[bool, says("norms of each head's query and key in the llama family")] = False
    post_norms: Annotated[bool, says("norms behind attention and feed-forward layers, too, in the llama family")] = (
        False
    )
    sinks: Annotated[bool, says("a learned sink per head in the llama family")] = False
    window: Annotated[_Count, says("tokens back that a layer with a sliding window sees; llama family")] = 0
    full_every: Annotated[_Count, says("every such layer sees all tokens in spite of the window")] = 0
    experts: Annotated[ExpertsShape | None, says("experts in place of feed-forward layers; llama family")] = None
    latent: Annotated[LatentShape | None, says("multi-head latent attention; llama family")] = None
    patch: Annotated[_Count, says("pixels of a patch's side, ViT only")] = 0
    image: Annotated[_Count, says("pixels of an image's side, ViT only")] = 0
    classes: Annotated[_Count, says("outputs of the head, ViT only")] = 0
    kernels: Annotated[Literal["eager", "fused", "compiled", "megatron"], says("how its users run it")] = "eager"
    params: Annotated[int, between(1, 10**15), says("true parameter count, tied weights once")]
    aliases: Annotated[tuple[Text, ...], says("other names of the same model")] = ()
    notes: Annotated[Text, says("what `pstar models` prints")] = ""
    stored: Annotated[Text, says("what of the file's quantisation a job leaves out if it says no base")] = ""
    source: Annotated[Text, says("where the figures come from")]

    @property
    def causal(self) -> bool:
        """Whether a token attends to those before it alone."""
        return self.family in ("gpt", "llama")

    @property
    def head_dim(self) -> int:
        if self.latent is not None:
            return self.latent.rotary + self.latent.plain
        return self.own_head_dim or self.hidden // self.heads

    def takes(self, sequence: int) -> bool:
        """Any, with rotary positions: nothing in the model has a sequence's size. An image has its own."""
        return sequence == self.max_seq or (sequence < self.max_seq and not self.image) or self.family == "llama"

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value

    def has_experts(self, layer: int) -> bool:
        """Layers are counted from 0."""
        return self.experts is not None and layer >= self.experts.dense_layers

    def window_of(self, layer: int) -> int:
        """Tokens that a layer (from 0) sees; 0 for all."""
        return 0 if self.full_every and (layer + 1) % self.full_every == 0 else self.window

    @property
    def active_params(self) -> int:
        """All but those of experts that a token is not sent to."""
        if self.experts is None:
            return self.params
        idle = self.experts.count - self.experts.per_token
        layers = sum(self.has_experts(i) for i in range(self.layers))
        return self.params - layers * idle * expert_params(self)


class _Row(ModelEntry, frozen=True, kw_only=True):
    checked: Annotated[Checked, says("date when the figure was looked up")]


def expert_params(m: ModelEntry) -> int:
    """Of one layer; 0 for a model without experts."""
    if m.experts is None:
        return 0
    h, f = m.hidden, m.experts.ffn
    return 3 * h * f + (2 * f + h if m.experts.biases else 0)


def _attention_params(m: ModelEntry) -> int:
    h = m.hidden
    if m.latent is not None:
        x = m.latent
        queries = h * x.q_rank + x.q_rank + x.q_rank * m.heads * m.head_dim
        keys = h * (x.kv_rank + x.rotary) + x.kv_rank + x.kv_rank * m.heads * (x.plain + x.value)
        return queries + keys + m.heads * x.value * h
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    biases = (q + 2 * kv if m.attention_bias else 0) + (h if m.output_bias else 0)
    norms = 2 * m.head_dim if m.qk_norm else 0
    return 2 * h * q + 2 * h * kv + biases + norms + (m.heads if m.sinks else 0)


def _mlp_params(m: ModelEntry, layer: int) -> int:
    x = m.experts
    if x is None or not m.has_experts(layer):
        return 3 * m.hidden * m.ffn
    router = m.hidden * x.count + (x.count if x.biases else 0)
    return router + x.count * expert_params(m) + x.shared * 3 * m.hidden * x.ffn


def count_params(m: ModelEntry) -> int:
    """Tied weights count once; models.toml's head describes the families."""
    h, f, v = m.hidden, m.ffn, m.vocab
    norm = 2 * h
    if m.family == "llama":
        each = _attention_params(m) + (4 if m.post_norms else 2) * h
        return v * h * (1 if m.tied else 2) + sum(each + _mlp_params(m, i) for i in range(m.layers)) + h
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
    e = Entry.read(file, name, raw, _Row)
    m = ModelEntry(**{key: getattr(e.values, key) for key in ModelEntry.__struct_fields__} | {"name": name})
    _check_shape(e, m)
    if count_params(m) != m.params:
        raise e.refuse("params", f"{count_params(m)}, which is what the shape has")
    return m


def _configured(model: str) -> ModelEntry:
    """Of a transformers configuration. Raises NoPreset, and ModelError for an impossible value."""
    path, values = read_configuration(model)
    raw = {**shape_of(model, path, values), "params": 1, "source": str(path)}
    e = Entry.read(str(path), model, raw, ModelEntry)
    m = structs.replace(e.values, name=model)
    _check_shape(e, m)
    return structs.replace(m, params=count_params(m))


def _check_shape(e: Entry[ModelEntry], m: ModelEntry) -> None:
    if m.hidden % m.heads and not (m.own_head_dim or m.latent):
        raise e.refuse("heads", f"a divisor of hidden = {m.hidden}, where head_dim is not given")
    if m.heads % m.kv_heads or (m.family != "llama" and m.kv_heads != m.heads):
        raise e.refuse("kv_heads", f"a divisor of heads = {m.heads}, and equal to it outside the llama family")
    if m.attention_bias and m.family != "llama":
        raise e.refuse("attention_bias", "left out outside the llama family, where all biases are there anyway")
    _check_details(e, m)
    _check_image(e, m)


_DETAILS = (
    "output_bias",
    "own_head_dim",
    "qk_norm",
    "post_norms",
    "sinks",
    "window",
    "full_every",
    "experts",
    "latent",
)


def _check_details(e: Entry[ModelEntry], m: ModelEntry) -> None:
    given = [name for name in _DETAILS if getattr(e.values, name)]
    if given and m.family != "llama":
        raise e.refuse(given[0].removeprefix("own_"), "left out outside the llama family")
    if m.full_every and not m.window:
        raise e.refuse("full_every", "given together with window")
    if m.latent is not None and m.own_head_dim:
        raise e.refuse("head_dim", "left out beside latent, which has widths of its own")
    if m.experts is not None and m.experts.per_token > m.experts.count:
        raise e.refuse("experts.per_token", f"at most count = {m.experts.count}")
    if m.experts is not None and m.experts.dense_layers >= m.layers:
        raise e.refuse("experts.dense_layers", f"below layers = {m.layers}")


def _check_image(e: Entry[ModelEntry], m: ModelEntry) -> None:
    """A ViT has patch, image and classes, every other family a vocabulary."""
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
    """In the file's order. Raises CatalogError for a wrong entry, or a name used twice."""
    models = {name: _entry(file, name, raw) for name, raw in parse_toml(file, text).items()}
    taken = set(models)
    for m in models.values():
        for alias in m.aliases:
            if alias in taken:
                raise CatalogError(
                    f"{file}: [{m.name}] aliases = {list(m.aliases)!r}; {alias!r} is taken already; choose another"
                )
            taken.add(alias)
    return models


@cache
def _models() -> dict[str, ModelEntry]:
    return read_models("models.toml", (files("pstar_sim.catalog") / "models.toml").read_text(encoding="utf-8"))


def model_names() -> tuple[str, ...]:
    """In catalog order, without aliases."""
    return tuple(_models())


def is_model(name: str) -> bool:
    """Whether the catalog has exactly this name, or a preset's configuration."""
    if not is_configuration(name):
        return name in _models()
    try:
        return bool(_configured(name))
    except (ModelError, CatalogError):
        return False


def model_entry(name: str) -> ModelEntry:
    """The model of a name, alias or configuration. Raises UnknownName, and ModelError for no name and for a
    configuration that is unreadable or of no preset."""
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
    if is_configuration(name):
        try:
            return _configured(name)
        except ModelError:
            hub = re.sub(r"-(hf|it|chat|base|instruct)$", "", name.rpartition("/")[2].lower())
            known = spelled(hub, (*models, *by_alias))
            if name.startswith("hf:") or known not in {*models, *by_alias}:
                raise
            return model_entry(known)
    raise UnknownName("model", name, (*models, *by_alias), "any other model: a trace, from pstar trace hf:ORG/NAME")
