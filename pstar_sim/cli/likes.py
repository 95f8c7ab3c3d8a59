"""--like: configurations of other frameworks, which fill in flags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pstar_sim.catalog.configurations import NoPreset
from pstar_sim.catalog.model_shapes import is_model, model_entry
from pstar_sim.cli.flags import SettingFlags
from pstar_sim.dtypes import MASTER
from pstar_sim.errors import ModelError, PstarError, UnknownName
from pstar_sim.units import format_count
from pstar_sim.workload.adapter import adapter
from pstar_sim.workload.axes import all_axes

if TYPE_CHECKING:
    from pstar_sim.catalog.machine import Machine
    from pstar_sim.frameworks.configuration import Configuration
    from pstar_sim.frameworks.prediction import ConfigurationPrediction
    from pstar_sim.workload.workload import Workload

Like = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="simulate this configuration too, host memory first: DeepSpeed's JSON, accelerate's YAML (FSDP), "
        "torchtitan's TOML, Megatron-LM's flags (.sh, .args), the YAML of axolotl or LLaMA-Factory, or the config.json "
        "of a quantised model; it also gives what no flag does, such as batch, dtype, clipping, LoRA and its base; may "
        "be given several times (`compare` has optimal beside it, `fits` only the policies that are named)",
    ),
]

OURS = ("optimal",)
"""Policies that `compare` has beside configurations."""


_PLAIN = "predicted with weights in {}: autocast over fp32 weights takes more memory"


def _not_under_autocast(job: Any) -> bool:
    from pstar_sim.workload.presets import without_autocast

    model = getattr(job, "model", None)
    return model is not None and is_model(model) and bool(without_autocast(model_entry(model), job))


@dataclass(frozen=True, kw_only=True)
class Likes:
    """(label, configuration) of each --like."""

    configurations: tuple[tuple[str, Configuration], ...]

    def fill(self, job: Any, setting: SettingFlags, machine: Machine) -> tuple[Any, SettingFlags]:
        """Flags not given get their values. Raises PstarError for contradictions between configurations or with
        flags."""
        given = {name: getattr(job, name) for name in _JOB}
        asked = {name: say(machine) for name, say in _JOB.items()}
        if getattr(job, "trace", None) is not None:  # it has what ran
            asked = {name: say for name, say in asked.items() if name not in _OF_PRESETS}
        elif given["dtype"] not in (None, MASTER):
            del asked["autocast"]  # the weights are in 16 bits
        if given["checkpointing"] is not None and all("recompute" in c.defaults for _, c in self.configurations):
            asked.pop("recompute", None)  # of all blocks, or of none
        filled = {name: self._answer(name, say, given[name]) for name, say in asked.items()}
        if filled.get("autocast") and given["autocast"] is None and _not_under_autocast(job):
            filled |= {"autocast": None, "dtype": filled["autocast"]}  # predict() notes it
        if getattr(job, "model", "") is None and getattr(job, "trace", None) is None:
            filled["model"] = self._model()
        clip = self._answer("clip", lambda c: c.clip, setting.clip)
        sums = self._answer("sums", lambda c: c.sums, setting.sums)
        for label, c in self.configurations:
            _check_train_batch(label, c, filled, c.data_on(machine))
            _check_processes(label, c, machine)
        return replace(job, **filled), replace(setting, clip=clip, sums=sums)

    def _model(self) -> str | None:
        """The first that a configuration names. Raises PstarError for one that is neither a preset nor in the local
        cache."""
        label, name = next(((label, c.model) for label, c in self.configurations if c.model is not None), ("", None))
        if name is None:
            return None
        try:
            model_entry(name)
        except NoPreset:  # it is captured
            pass
        except (ModelError, UnknownName):
            raise PstarError(
                f"{label} names the model {name!r}, which is no preset and has no config.json in the local cache; give "
                "--model NAME (see `pstar models`) or --model hf:FILE"
            ) from None
        return name

    def loaded(self, flag: str | None) -> tuple[Likes, str | None]:
        """Loading as they agree, or as the flag; else None."""
        from pstar_sim.frameworks.targets import target_of

        read = self.configurations
        if flag is not None:
            read = tuple((label, replace(c, loading=flag)) for label, c in read)
        ways = {str(target_of(c).memory.loading(c)) for _, c in read}
        return Likes(configurations=read), ways.pop() if len(ways) == 1 else flag

    @property
    def spread(self) -> tuple[str, Configuration] | None:
        """The one with degrees beside data parallelism, which stands alone, or None. Raises PstarError for one beside
        others."""
        one = next((pair for pair in self.configurations if pair[1].parallelism is not None), None)
        if one is not None and len(self.configurations) > 1:
            raise PstarError(
                f"--like {one[0]} spreads the model ({one[1].parallelism}): give it alone, its answer is another table"
            )
        return one

    def _answer(self, name: str, say: Callable[[Configuration], Any], flag: Any) -> Any:
        value, source = _as_here(name, flag), _flag(name, flag)
        for label, configuration in self.configurations:
            said = say(configuration)
            if said is None or (flag is not None and name in configuration.defaults):
                continue
            if value is not None and value != said:
                raise PstarError(
                    f"{source}, but {label} says {_words(name, said)}; iterations of different work cannot be compared"
                )
            value, source = said, f"{label} says {_words(name, said)}"
        return value

    def predict(
        self, workloads: Sequence[Workload], machine: Machine, job: Any, setting: SettingFlags
    ) -> tuple[ConfigurationPrediction, ...]:
        """Raises PstarError, naming the file, where the machine cannot run one at all, for example without disks.

        job, setting: from `fill`.
        """
        from pstar_sim.cli.inputs import settings_of
        from pstar_sim.frameworks.prediction import predict

        settings = settings_of(setting)
        found = []
        for label, configuration in self.configurations:
            try:
                made = predict(configuration, workloads, machine, settings, label=label)
            except PstarError as error:
                raise PstarError(f"{label}: {error}") from error
            if configuration.autocast and not job.autocast and job.dtype == configuration.autocast:
                made = made.noted(_PLAIN.format(configuration.autocast))
            made = made.noted(*decided(configuration, machine, job, setting))
            if job.lora is not None:
                made = made.noted(workloads[0].notes)
            if job.checkpointing is None:
                made = made.noted(_assumed(recomputed=workloads[0].checkpointing))
            found.append(made)
        return tuple(found)


def decided(c: Configuration, machine: Machine, job: Any, setting: SettingFlags) -> Iterator[str]:
    """In what a prediction differs from the file."""
    settings = {name: getattr(setting, name) for name in ("clip", "sums")}
    values = {name: getattr(job, name) for name in _JOB} | settings
    for name in c.defaults:
        said = getattr(c, name) if name in settings else _JOB[name](machine)(c)
        if None not in (said, values[name]) and said != values[name]:
            yield f"{_flag(name, values[name])} in place of {c.framework}'s default, {_words(name, said)}"
    traced = [name for name in _OF_PRESETS if vars(c).get(name)] if getattr(job, "trace", None) is not None else []
    if traced:
        yield f"{' and '.join(traced)} are those of the trace, whatever the file says"


def _as_here(name: str, value: Any) -> Any:
    """What is no adapter is refused elsewhere."""
    try:
        return value if name != "lora" or value is None else str(adapter(value))
    except ModelError:
        return value


def _assumed(*, recomputed: bool) -> str:
    if recomputed:
        return "activations are taken as recomputed, which no file says; --no-checkpointing if the script keeps them"
    return "activations are taken as kept, which no file says; --checkpointing if the script recomputes them"


def _total_batch(machine: Machine) -> Callable[[Configuration], int | None]:
    def say(c: Configuration) -> int | None:
        if c.batch_per_gpu is not None:
            return c.batch_per_gpu * c.data_on(machine)
        if c.train_batch is not None and c.micro_batches is not None and c.train_batch % c.micro_batches == 0:
            return c.train_batch // c.micro_batches
        return None

    return say


def _micro_batches(machine: Machine) -> Callable[[Configuration], int | None]:
    def say(c: Configuration) -> int | None:
        if c.micro_batches is None and c.train_batch is not None and c.batch_per_gpu is not None:
            return max(1, c.train_batch // (c.batch_per_gpu * c.data_on(machine)))
        return c.micro_batches

    return say


def _axis(name: str, machine: Machine) -> Callable[[Configuration], Any]:
    return lambda c: vars(c).get(name)  # its fields: a property may have the name of an axis


_JOB: dict[str, Callable[[Machine], Callable[[Configuration], Any]]] = {
    "batch": _total_batch,
    "micro_batches": _micro_batches,
    "seq": lambda machine: lambda c: c.detail.get("sequence"),
    **{name: partial(_axis, name) for name in all_axes()},
}


_OF_PRESETS = tuple(name for name, axis in all_axes().items() if axis.not_of_traces)


def _check_train_batch(label: str, c: Configuration, filled: dict[str, Any], ranks: int) -> None:
    batch, micro_batches = filled["batch"], filled["micro_batches"] or 1
    if c.train_batch is not None and batch is not None and c.train_batch != batch * micro_batches:
        raise PstarError(
            f"{label}: {c.train_batch_key} = {c.train_batch} sequences per iteration, but "
            f"{format_count(batch // ranks, 'sequence')} per GPU x {format_count(micro_batches, 'micro-batch')} x "
            f"{format_count(ranks, 'GPU')} make {batch * micro_batches}; {c.framework} refuses it"
        )


def _check_processes(label: str, c: Configuration, machine: Machine) -> None:
    detail: dict[str, Any] = dict(c.details)
    said = " on ".join(f"num_{name} = {detail[name]}" for name in ("processes", "machines") if name in detail)
    nodes = detail.get("machines", machine.nodes)
    local_ranks, uneven = divmod(detail.get("processes", nodes * machine.local_ranks), nodes)
    if uneven:
        raise PstarError(f"{label}: {said}: every machine must have the same number of processes")
    flags = [f"--nodes {nodes}"] if nodes != machine.nodes else []
    flags += [f"--gpus {local_ranks}"] if local_ranks != machine.local_ranks else []
    if flags:
        there = f"{format_count(machine.world_size, 'GPU')} in {format_count(machine.nodes, 'node')}"
        raise PstarError(f"{label}: {said}, but {machine.name} has {there}; give {' '.join(flags)}")


def _words(name: str, value: Any) -> str:
    if name in ("clip", "checkpointing"):
        return f"{'' if value else 'no '}{'clipping' if name == 'clip' else 'checkpointing'}"
    if name == "batch":
        return f"{format_count(value, 'sequence')} on all GPUs together"
    if name == "micro_batches":
        return format_count(value, "micro-batch")
    return f"sequences of {value}" if name == "seq" else str(value)


def _flag(name: str, value: Any) -> str:
    flag = "--" + name.replace("_", "-")
    return f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"{flag} {value}"


def read_likes(paths: Sequence[str] | None) -> Likes | None:
    """None for no files. Raises PstarError as `load_configuration`, and for a file given twice."""
    if not paths:
        return None
    from pstar_sim.frameworks.load import load_configuration

    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise PstarError(f"--like {twice[0]}: the same file is given twice; give it once")
    names = [Path(path).name for path in paths]
    labels = names if len(set(names)) == len(names) else list(paths)
    return Likes(configurations=tuple((label, load_configuration(path)) for label, path in zip(labels, paths)))
