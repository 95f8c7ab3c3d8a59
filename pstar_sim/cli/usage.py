"""Usage of commands in this project's words, not click's: checks flags, reports a mistake in one line with the thing,
the value and what would do, and prints help in sections."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_current_context  # type: ignore[attr-defined]

from pstar_sim.cli.flag_values import did_you_mean
from pstar_sim.errors import PstarError, UnknownName
from pstar_sim.terminal import terminal_width
from pstar_sim.words import meant


def run_app(app: typer.Typer, program: str, arguments: Sequence[str]) -> int:
    """Runs a command line and returns the exit status. Raises PstarError for a mistake, SystemExit after help."""
    command = _command(app)
    try:
        with command.make_context(
            program, list(arguments), terminal_width=terminal_width(), obj=(program, *arguments)
        ) as context:
            status: int = command.invoke(context)
            return status
    except typer.Exit as done:  # help, version, completion
        raise SystemExit(done.exit_code) from None
    except typer.TyperException as error:
        raise PstarError(_words(error)) from None


_command: Callable[[typer.Typer], Any] = cache(get_command)  # typer reads the signature of each command anew


def words_typed() -> tuple[str, ...]:
    """Of the running command line, its program first; none outside of `run_app`."""
    context = get_current_context(silent=True)
    return () if context is None else tuple(context.find_root().obj)


def _words(error: typer.TyperException) -> str:
    text, context = error.message.rstrip("."), getattr(error, "ctx", None)
    if (parameter := getattr(error, "param", None)) is not None:
        text = f"argument {_name(parameter)}: {text}"
    return text if context is None else _see(context, text)


def _see(context: Any, text: str) -> str:
    return f"{text} (see `{context.command_path} --help`)"


def _name(parameter: Any) -> str:
    return "/".join(parameter.opts) if parameter.param_type_name == "option" else str(parameter.display_name_raw)


def _check_words(context: Any, parameters: Sequence[Any], words: Sequence[str], *, until_word: bool) -> None:
    """click would take the next flag for a value, and names one missing flag at a time."""
    flags = {name: p for p in parameters for name in (*p.opts, *p.secondary_opts) if p.param_type_name == "option"}
    places = [p for p in parameters if p.param_type_name == "argument"]
    left, given, arguments = list(words), set(), 0
    only_arguments = False
    while left:
        word = left.pop(0)
        if word == "--" and not only_arguments:
            only_arguments = True
            continue
        if only_arguments or not _is_flag(word):
            if until_word:
                return
            arguments += 1
            _check_number(context, places, arguments, word)
            continue
        flag = _flag_of(context, word, flags)
        if flag.name == "help":
            return
        given.add(flag.name)
        _take_value(context, flag, word, left, flags)
    _check_required(context, [*places[arguments:], *(p for p in flags.values() if p.name not in given)])


def _is_flag(word: str) -> bool:
    """The word "-" alone stands for a file."""
    return word.startswith("-") and word != "-"


def _check_number(context: Any, places: Sequence[Any], number: int, word: str) -> None:
    if number > len(places) and all(p.nargs == 1 for p in places):
        raise PstarError(_see(context, f"unexpected argument {word!r}"))


def _check_required(context: Any, left_out: Sequence[Any]) -> None:
    names = dict.fromkeys(_name(p) for p in left_out if p.required)
    if names:
        raise PstarError(_see(context, f"the following arguments are required: {', '.join(names)}"))


def _flag_of(context: Any, word: str, flags: Mapping[str, Any]) -> Any:
    name = word.partition("=")[0]
    flag = flags.get(name) or (None if word.startswith("--") else flags.get(word[:2]))
    if flag is None:
        others = _commands_with(context, name)
        hint = did_you_mean(name, flags)
        hint = f"; it is a flag of {' and '.join(others)}" if others and meant(name) is None else hint
        raise PstarError(_see(context, f"unknown flag {name!r}{hint}"))
    return flag


def _commands_with(context: Any, name: str) -> list[str]:
    within = f"{context.command.name} " if hasattr(context.command, "commands") else ""
    group = context.command if within else getattr(context.parent, "command", None)
    commands = getattr(group, "commands", {}).items()
    return [f"{within}{other}" for other, one in commands if any(name in p.opts for p in one.get_params(context))][:3]


def _take_value(context: Any, flag: Any, word: str, left: list[str], flags: Collection[str]) -> None:
    name, equals, value = word.partition("=")
    if flag.is_flag:
        if equals:
            raise PstarError(_see(context, f"argument {name}: takes no value, not {value!r}"))
    elif not equals and name in flags:  # -oFILE: only -o is the flag's name
        if not left or left[0].partition("=")[0] in flags:
            wanted = f", {flag.metavar}" if flag.metavar else ""
            raise PstarError(_see(context, f"argument {_name(flag)}: needs a value{wanted}"))
        left.pop(0)


class _OwnParser:
    """The flag's parser or none, of texts alone: Typer's parses defaults too, and imports pydantic, a tenth of a second
    of CPU time per command."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        parse = param.type_descriptor.parameter_info.parser
        if param.multiple or param.nargs == -1:
            return [parse(one) if parse else one for one in value or ()]
        return parse(value) if parse and isinstance(value, str) else value


def _read_values(parameters: Sequence[Any]) -> None:
    for parameter in parameters:
        parameter.get_runtime_param = _OwnParser


def _write_options(command: Any, context: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {"arguments": []}
    others: list[tuple[str, str]] = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None:
            continue
        if parameter.param_type_name == "argument":
            sections["arguments"].append((_argument_name(parameter), record[1]))
        elif parameter.rich_help_panel:
            sections.setdefault(parameter.rich_help_panel, []).append(record)
        else:
            others.append(record)
    sections["options"] = others
    for heading, records in sections.items():
        if records:
            with formatter.section(heading):
                formatter.write_dl(records, col_max=_column(formatter.width))


def _argument_name(parameter: Any) -> str:
    return f"{parameter.display_name_raw}{'...' if parameter.nargs != 1 else ''}"


def _column(width: int) -> int:
    return min(26, width // 3)


def _write_epilog(command: Any, formatter: Any) -> None:
    for line in (command.epilog or "").splitlines():
        formatter.write("\n")
        formatter.write(f"{line}\n") if line.startswith("example") else formatter.write_text(line)


class Command(TyperCommand):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "rich_markup_mode": None})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            _check_words(ctx, self.get_params(ctx), args, until_word=False)
        _read_values(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_epilog(self, formatter)


class CommandGroup(TyperGroup):
    """Its metavar, such as COMMAND, is the word for one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "rich_markup_mode": None})

    @property
    def _kind(self) -> str:
        return self.subcommand_metavar.split()[0].lower()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            _check_words(ctx, self.get_params(ctx), args, until_word=True)
            if not args and not self.invoke_without_command:
                raise PstarError(_see(ctx, f"say which {self._kind}: {', '.join(self.commands)}"))
        _read_values(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and not ctx.resilient_parsing:
            raise UnknownName(self._kind, args[0], tuple(self.commands))
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        with formatter.section(f"{self._kind}s"):
            rows = [(name, (one.help or "").rstrip(".")) for name, one in self.commands.items()]
            formatter.write_dl(rows, col_max=_column(formatter.width))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_epilog(self, formatter)
