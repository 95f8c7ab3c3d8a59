"""Options of policies: `name[:key=value[,key=value...]]`, a policy with some of its options set.

A module offers `OPTIONS`, key -> Option, which its function takes as keyword arguments. A normalised spec has keys in
this order, without defaults, and is the name of the policy, its plans and refusals.

    OPTIONS = {"every": Option(whole_number(least=1), "update every k-th sub-group on the GPU", 2)}

    def deep_optimizer_states(workload, machine, settings, *, every: int = 2) -> Plan: ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import DoesNotFit, PstarError
from pstar_sim.schema.fields import between
from pstar_sim.schema.fields import least as at_least
from pstar_sim.schema.reading import nearest
from pstar_sim.schema.texts import allowed, from_text, words_of
from pstar_sim.workload.workload import Workload


@dataclass(frozen=True)
class Option:
    """kind: type, with its bounds."""

    kind: Any
    help: str
    default: object

    @property
    def allowed(self) -> str:
        return allowed(self.kind)


def one_of(*words: str) -> Any:
    return Literal[words]


def switch() -> Any:
    """A bool, written as on or off."""
    return bool


def whole_number(*, least: int = 0) -> Any:
    """The value may be written as 1e9."""
    return Annotated[int, at_least(least)]


def share() -> Any:
    """A number from 0 to 1."""
    return Annotated[float, between(0, 1)]


def either(*kinds: Any) -> Any:
    """The first kind that accepts the text counts."""
    return Union[kinds]  # noqa: UP007


class Specified:
    """`__name__` is the normalised spec."""

    def __init__(self, policy: Callable[..., Plan], name: str, values: Mapping[str, object]) -> None:
        self.policy = policy
        self.__name__ = name
        self.values = dict(values)

    def __call__(self, workload: Workload, machine: Machine, settings: Settings) -> Plan:
        try:
            plan = self.policy(workload, machine, settings, **self.values)
        except DoesNotFit as short:
            raise short.restated(policy=self.__name__) from short
        return replace(plan, policy=self.__name__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Specified) and (self.policy, self.__name__) == (other.policy, other.__name__)

    def __hash__(self) -> int:
        return hash((self.policy, self.__name__))

    def __repr__(self) -> str:
        return f"<policy {self.__name__}>"


def options_of(policy: Callable[..., Plan]) -> Mapping[str, Option]:
    found: Any = getattr(sys.modules.get(getattr(policy, "__module__", "")), "OPTIONS", {})
    return dict(found)


def split_spec(spec: str) -> tuple[str, str]:
    """(name of the policy, text of its options)."""
    name, _, rest = spec.partition(":")
    return name.strip(), rest.strip()


def specified(name: str, policy: Callable[..., Plan], text: str) -> Callable[..., Plan]:
    """With the options of `text` ("key=value,..."), itself if all are defaults. Raises PstarError for an unknown key or
    a wrong value, naming known and nearest keys."""
    options = options_of(policy)
    if options and not text:
        raise PstarError(f"policy {name!r} is followed by a colon but by no key=value; {_keys(name, options)}")
    given: dict[str, object] = {}
    for part in text.split(","):
        key, equals, written = (piece.strip() for piece in part.partition("="))
        if not options:
            raise PstarError(f"policy {name!r} has no options; use {name} instead of {name}:{text}")
        if not equals or not key:
            raise PstarError(f"policy {name}:{text}: {part.strip()!r} is not key=value; {_keys(name, options)}")
        if key not in options:
            raise PstarError(f"policy {name} has no option {key!r}; {_near(key, tuple(options))}{_keys(name, options)}")
        if key in given:
            raise PstarError(f"policy {name}:{text} sets {key} twice; give it once")
        try:
            given[key] = from_text(options[key].kind, written)
        except ValueError:
            near = _near(written, words_of(options[key].kind))
            raise PstarError(
                f"policy {name}: {key}={written} is not allowed; {near}{key} is {options[key].allowed}"
            ) from None
    turned = {key: given[key] for key in options if key in given and given[key] != options[key].default}
    if not turned:
        return policy
    words = ",".join(f"{key}={show(value)}" for key, value in turned.items())
    return Specified(policy, f"{name}:{words}", turned)


def show(value: object) -> str:
    """As it is written in a spec."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _keys(name: str, options: Mapping[str, Option]) -> str:
    return f"{name} has " + ", ".join(f"{key}=({option.allowed})" for key, option in options.items())


def _near(word: str, known: tuple[str, ...]) -> str:
    near = nearest(word, known, cutoff=0.5)
    return f"did you mean {near}? " if near else ""
