"""The shapes of a batch, and which need no more memory than another.

[Note: a smaller batch] A batch with the names, dtypes and numbers of dimensions of another's tensors, none longer, is
taken to need no more memory at any moment and to call the same modules in order. It runs on plan without a capture; at
the first event, read or gradient elsewhere the iteration leaves the plan, and the form is captured before it runs
again. Memory is verified where operators are counted (`measuring/first.py`, `off_plan/guard.py`). Results do not depend
on it.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


class FormPart(NamedTuple):
    """A tensor of a batch, or a switch.

    kind: a tensor's dtype, a bool's value.
    differentiated: backward has to reach it, and so reads more parameters.
    """

    name: str
    kind: torch.dtype | bool
    shape: tuple[int, ...] = ()
    differentiated: bool = False


Form = tuple[FormPart, ...]


def names_of(model: nn.Module) -> tuple[str, ...]:
    """Arguments that the model's forward takes by position."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in positional)


def form_of(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> Form:
    """The same by position and by name, in any order; only tensors and bools count."""
    given = {names[number] if number < len(names) else str(number): value for number, value in enumerate(args)}
    return tuple(_parts("", dict(sorted({**given, **kwargs}.items()))))


def _parts(name: str, value: Any) -> Iterator[FormPart]:
    if isinstance(value, torch.Tensor):
        yield FormPart(name, value.dtype, tuple(value.shape), value.requires_grad)
    elif isinstance(value, bool):
        yield FormPart(name, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _parts(f"{name}.{key}", item)
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _parts(f"{name}.{number}", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _parts(f"{name}.{field.name}", getattr(value, field.name, None))


def covers(larger: Form, smaller: Form) -> bool:
    """[Note: a smaller batch]"""
    return len(larger) == len(smaller) and all(
        a.name == b.name
        and (a.kind, a.differentiated) == (b.kind, b.differentiated)
        and len(a.shape) == len(b.shape)
        and all(most >= size for most, size in zip(a.shape, b.shape))
        for a, b in zip(larger, smaller)
    )


def elements(form: Form) -> int:
    return sum(math.prod(part.shape) for part in form if isinstance(part.kind, torch.dtype))
