"""Adapter: what LoRA trains beside a model, as the user states it, in the words of peft (lora.py writes it down)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from pstar_sim.arguments import flag, refused, whole
from pstar_sim.errors import ModelError

ALL_LINEAR = "all-linear"
_USUAL = (
    ("q_proj", "v_proj"),
    ("query", "value"),
    ("c_attn",),
    ("query_key_value",),
    ("qkv_proj",),
    ("q", "v"),
    ("Wqkv",),
    ("q_lin", "v_lin"),
    ("query_proj", "value_proj"),
    ("qkv",),
    ("in_proj", "out_proj"),
)
"""What peft adapts when none is named: query and value, or the matrix that holds them."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A low-rank adapter.

    rank: columns of A^T and B.
    targets: modules that get an adapter, as peft's target_modules: ends of their paths (such as "q_proj"),
        "all-linear", alone or in a tuple, for every linear module but the head, or a regular expression that matches
        whole paths; None: query and value.
    save: ends of the paths of modules that are trained in full, a copy beside the frozen original (peft's
        modules_to_save).
    alpha, rs: scale of the adapters (lora_alpha, use_rslora). They cost nothing.
    dora: a magnitude is trained for each output, which is scaled by it over the norm of base and adapter (use_dora).
    """

    rank: int = 16
    targets: tuple[str, ...] | str | None = None
    save: tuple[str, ...] = ()
    alpha: float | None = None
    rs: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        whole("lora: rank", self.rank, error=ModelError)
        for name in ("rs", "dora"):
            flag(f"lora: {name}", getattr(self, name), error=ModelError)
        if isinstance(self.targets, str) and self.targets:
            if self.targets == ALL_LINEAR:
                object.__setattr__(self, "targets", (ALL_LINEAR,))
            else:
                _compiled(self.targets)
        elif self.targets is not None and not _are_names(self.targets):
            want = "a tuple of names, such as ('q_proj', 'v_proj'), or a regular expression"
            raise refused("lora: targets", self.targets, want, ModelError)
        if self.save and not _are_names(self.save):
            raise refused("lora: save", self.save, "a tuple of names, such as ('lm_head',)", ModelError)
        for name in ("targets", "save"):
            if isinstance(names := getattr(self, name), list):
                object.__setattr__(self, name, tuple(names))

    def __str__(self) -> str:
        """As `adapter` reads it."""
        targets = self.targets if isinstance(self.targets, str) else "+".join(self.targets or ())
        said = {"targets": targets, "save": "+".join(self.save), "alpha": self.alpha, "rs": self.rs, "dora": self.dora}
        words = (name if value is True else f"{name}={value}" for name, value in said.items() if value)
        return ",".join((f"r={self.rank}", *words))


def _are_names(value: object) -> bool:
    return isinstance(value, (tuple, list)) and bool(value) and all(isinstance(t, str) and t for t in value)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ModelError(
            f"lora targets: {pattern!r} is no regular expression ({error}); write names, such as q_proj+v_proj, or an "
            r"expression that matches whole paths, such as .*\.(q|v)_proj"
        ) from None


_KEYS = {
    **dict.fromkeys(("r", "rank", "lora_r"), "rank"),
    **dict.fromkeys(("targets", "target_modules"), "targets"),
    **dict.fromkeys(("save", "modules_to_save"), "save"),
    **dict.fromkeys(("alpha", "lora_alpha"), "alpha"),
    **dict.fromkeys(("rs", "rslora", "use_rslora"), "rs"),
    **dict.fromkeys(("dora", "use_dora"), "dora"),
}
_WORDS = {"true": True, "false": False}
_EXPRESSION = re.compile(r"[\\^$*?()\[\]{}|]")
_FORM = "write r=16, and behind it targets=NAME+NAME, save=NAME+NAME, alpha=N, rs or dora"


def adapter(given: Adapter | str | int) -> Adapter:
    """Of "r=16", "r=8,targets=q_proj+v_proj,save=lm_head,dora", or a rank. Raises ModelError for anything else."""
    if isinstance(given, Adapter):
        return given
    number: object = given  # numbers of numpy are numbers too
    if not isinstance(number, bool) and isinstance(number, Integral):
        return Adapter(rank=int(number))
    if not isinstance(given, str):
        raise refused("lora", given, "an adapter, such as 'r=16'", ModelError)
    said: dict[str, Any] = {}
    for part in re.split(r",(?=\s*\w+\s*(?:[=,]|$))", given):  # a regular expression may have commas of its own
        key, equals, text = (word.strip() for word in part.partition("="))
        name = _KEYS.get(key) if equals or not key.isdecimal() else "rank"
        value = _value_of(name, text if equals else key if name == "rank" else "true")
        if name is None or value is None:
            raise ModelError(f"lora {given}: {part!r} is not r=RANK or what may stand behind it; {_FORM}")
        if name in said:
            raise ModelError(f"lora {given}: {part!r} says {name} once more; say it once")
        said[name] = value
    if "rank" not in said:
        raise ModelError(f"lora {given}: a rank is needed, such as r=16")
    if said["rank"] < 1:
        raise ModelError(f"lora {given}: rank must be at least 1, not {said['rank']}")
    return Adapter(**said)


def is_expression(text: str) -> bool:
    """Whether it has signs of regular expressions, which no name has."""
    return _EXPRESSION.search(text) is not None


def _value_of(name: str | None, text: str) -> Any:
    if name in ("rs", "dora"):
        return _WORDS.get(text.lower())
    if name == "rank":
        return int(text) if text.isdecimal() else None
    if name == "alpha":
        return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None
    if name == "targets" and is_expression(text):
        return text
    names = tuple(part.strip() for part in text.split("+"))
    return names if all(names) else None


def saved_part(given: Adapter, parameter: str) -> str | None:
    """The module of `save` that holds a parameter; None: it is not trained in full. As in peft a name is the end of a
    path, so that "norm" means input_layernorm too."""
    parts = parameter.split(".")[:-1]
    paths = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((path for path in paths if path.endswith(given.save)), None) if given.save else None


def check_save(given: Adapter, parameters: Iterable[str]) -> None:
    """Raises ModelError for a name of `save` that no module has."""
    parts = [parameter.split(".")[:-1] for parameter in parameters]
    paths = dict.fromkeys(".".join(path[:count]) for path in parts for count in range(1, len(path) + 1))
    for name in given.save:
        if not any(path.endswith(name) for path in paths):
            names = last_names(path for path in paths if not path.rpartition(".")[2].isdigit())
            raise ModelError(f"lora save: no module is {name}; try {names}")


def is_target(targets: Sequence[str] | str, module: str, heads: Collection[str] = ()) -> bool:
    """Whether a linear module gets an adapter.

    heads: modules that make the logits.
    """
    if isinstance(targets, str):
        return _compiled(targets).fullmatch(module) is not None
    return any(_means(target, module, heads) for target in targets)


def _means(target: str, module: str, heads: Collection[str]) -> bool:
    if target == ALL_LINEAR:
        return module not in heads
    return module == target or module.endswith(f".{target}")


def chosen_modules(given: Adapter, linear: Iterable[str], heads: Collection[str] = ()) -> tuple[str, ...]:
    """The linear modules that get an adapter, in their order.

    heads: those that make the logits.

    Raises ModelError for a target that none of them is.
    """
    free = [path for path in linear if saved_part(given, f"{path}.weight") is None]
    targets = usual_targets(free) if given.targets is None else given.targets
    for target in (targets,) if isinstance(targets, str) else targets:
        means = [target] if target is not targets else target
        if not any(is_target(means, path, heads) for path in free):
            raise ModelError(f"lora targets: no linear module is {target}; try {last_names(free)}")
    return tuple(path for path in free if is_target(targets, path, heads))


def usual_targets(linear: Iterable[str]) -> tuple[str, ...]:
    """Raises ModelError if none is there."""
    paths = list(linear)
    there = {path.rpartition(".")[2] for path in paths}
    for names in _USUAL:
        if there.issuperset(names):
            return names
    raise ModelError(f"lora: name the targets, such as targets=all-linear, or some of {last_names(paths)}")


def last_names(paths: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in paths)) or "another model"


def named_by(paths: Collection[str], linear: Iterable[str]) -> tuple[str, ...]:
    """The shortest targets that mean these of the linear modules."""
    names = dict.fromkeys(path.rpartition(".")[2] for path in paths)
    meant = {path for path in linear if path.rpartition(".")[2] in names}
    return tuple(names if meant == set(paths) else paths)
