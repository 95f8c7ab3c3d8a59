"""A command is a function: parameters are flags, the docstring is help, the result the exit status. Several commands'
flags are a frozen dataclass, and a parameter of that type."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from pstar_sim.cli.flag_values import one_of
from pstar_sim.cli.usage import Command
from pstar_sim.workload.axes import Axis, all_axes

Function = Callable[..., int]


def command(app: typer.Typer, example: str) -> Callable[[Function], Function]:
    """A decorator that adds a command.

    example: below the help.
    """

    def declare(function: Function) -> Function:
        app.command(cls=Command, epilog=f"example: {example}")(flat(function))
        return function

    return declare


def flat(function: Function) -> Function:
    """For typer: a dataclass of flags is replaced by them, under its heading SECTION, if any. It raises
    typer.BadParameter for flags that exclude each other."""
    groups: dict[str, Any] = {}
    taken: list[inspect.Parameter] = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        kind = parameter.annotation
        if is_dataclass(kind):
            groups[parameter.name] = kind
            taken += _flags_of(groups[parameter.name])
        else:
            taken.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def call(**given: Any) -> int:
        made = {name: kind(**{f.name: given.pop(f.name) for f in _stated(kind)}) for name, kind in groups.items()}
        return function(**made, **given)

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in taken}
    call.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    return call


@cache
def _flags_of(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    section = getattr(kind, "SECTION", None)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=_in_section(_as_flag(kind, field.name, hints[field.name]), section),
        )
        for field in _stated(kind)
    ]


def _stated(kind: Any) -> list[Field[Any]]:
    axes = all_axes()
    stated = [field for field in fields(kind) if field.name not in axes or _help(kind, axes[field.name])]
    return sorted(stated, key=lambda field: field.name in axes)


def _help(kind: Any, axis: Axis) -> str:
    return axis.of_modules if getattr(kind, "OF_MODULES", False) else axis.help


def _as_flag(kind: Any, name: str, annotation: Any) -> Any:
    axis = getattr(annotation, "__metadata__", (None,))[0]
    if not isinstance(axis, Axis):
        return annotation
    help_ = _help(kind, axis)
    if isinstance(axis.default, bool):
        return Annotated[bool | None, typer.Option(f"--{name}/--no-{name}", help=help_)]
    if not axis.names:
        return Annotated[str | None, typer.Option(metavar=axis.metavar, help=help_)]
    names: Any = Literal[axis.names]
    return Annotated[names | None, typer.Option(parser=one_of(names, axis.words), metavar=axis.metavar, help=help_)]


def _in_section(annotation: Any, section: str | None) -> Any:
    if section is None or get_origin(annotation) is not Annotated:
        return annotation
    kind, info = get_args(annotation)
    info = copy(info)
    info.rich_help_panel = section
    return Annotated[kind, info]
