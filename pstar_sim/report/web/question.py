"""Job, machine and policies in texts, named after `pstar compare`'s flags, as fields of the app, in its address, and
for the command line.

Axes are workload/axes.py's.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pstar_sim.arguments import refused, whole
from pstar_sim.catalog.listing_rows import list_machines
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import model_names
from pstar_sim.planner.jobs import Job
from pstar_sim.policy.registry import built_in
from pstar_sim.workload.axes import AxesGiven, Axis, all_axes

MACHINE, PARTS, JOB, TRAINING = "machine", "parts of the machine", "job", "how it trains"
POLICIES = ("zero_offload", "tide")
YES, NO = "yes", "no"
WIDTH = 36  # of a command: what a phone shows


@dataclass(frozen=True, kw_only=True)
class Field:
    """name: the flag's, with "_".
    choices: "" leaves it out.
    open: others are accepted.
    initial: the app's.
    """

    name: str
    group: str
    help: str
    choices: tuple[str, ...]
    open: bool = True
    initial: str = ""

    @property
    def flag(self) -> str:
        return self.name.replace("_", "-")


def _powers(least: int, most: int) -> tuple[str, ...]:
    return tuple(str(2**n) for n in range(least, most + 1))


@cache
def fields() -> tuple[Field, ...]:
    machines = tuple(str(row["machine"]) for row in list_machines())
    sizes = ("", *(f"{size}GB" for size in (8, 12, 16, 24, 32, 48, 80, 141)))
    hosts = ("", *(f"{size}GB" for size in (16, 32, 64, 128, 256, 512, 1024, 2048)))
    links = ("", *(f"link.bandwidth={factor}" for factor in ("x0.5", "+10%", "x2", "x4")))
    own = (
        Field(name="machine", group=MACHINE, help="of the catalog", choices=machines, initial="rtx4090-128gb"),
        Field(name="gpus", group=PARTS, help="per node", choices=("", *_powers(0, 3))),
        Field(name="nodes", group=PARTS, help="all alike", choices=("", *_powers(0, 6))),
        Field(name="gpu_memory", group=PARTS, help="of each GPU", choices=sizes),
        Field(name="host_memory", group=PARTS, help="of each node", choices=hosts),
        Field(name="set", group=PARTS, help="another figure, such as link.bandwidth=x2", choices=links),
        Field(name="model", group=JOB, help="a preset, or hf:FOLDER of a configuration", choices=model_names(),
              initial="qwen3-4b"),
        Field(name="batch", group=JOB, help="sequences per micro-batch, of all GPUs together",
              choices=_powers(0, 7), initial="1"),
        Field(name="seq", group=JOB, help="tokens per sequence", choices=_powers(7, 17), initial="2048"),
        Field(name="micro_batches", group=JOB, help="per iteration", choices=("", *_powers(0, 6))),
    )  # fmt: skip
    return (*own, *(_of_axis(name, axis) for name, axis in all_axes().items() if axis.help))


def _of_axis(name: str, axis: Axis) -> Field:
    offered = (YES, NO) if isinstance(axis.default, bool) else axis.names or axis.suggested
    return Field(
        name=name, group=TRAINING, help=axis.help, choices=("", *offered), open=offered not in ((YES, NO), axis.names)
    )


@dataclass(frozen=True)
class Question:
    """texts: (field, text), those without left out.

    Raises PstarError for what a field does not take.
    """

    texts: tuple[tuple[str, str], ...]
    policies: tuple[str, ...] = POLICIES

    @classmethod
    def of(cls, texts: Mapping[str, str], policies: tuple[str, ...] = POLICIES) -> Question:
        for field in fields():
            text = texts.get(field.name, field.initial)
            if not field.open and text not in field.choices:
                raise refused(field.flag, text, f"one of {', '.join(filter(None, field.choices))}")
        for policy in policies:
            if policy.partition(":")[0] not in built_in():
                raise refused("policy", policy, f"one of {', '.join(built_in())}")
        said = ((field.name, texts.get(field.name, field.initial).strip()) for field in fields())
        return cls(tuple((name, text) for name, text in said if text), policies)

    def job(self) -> Job:
        """Raises PstarError for an impossible value."""
        known = dict(self.texts)
        axes: AxesGiven = {name: _axis_value(known[name]) for name in all_axes() if name in known}  # type: ignore[assignment]
        return Job(
            model=known.get("model"),
            batch=self._count("batch"),
            seq=self._count("seq"),
            micro_batches=self._count("micro_batches"),
            **axes,
        )

    def machine(self) -> Machine:
        """Raises PstarError for an impossible value."""
        known = dict(self.texts)
        return load_machine(
            known.get("machine", ""),
            gpu_memory=known.get("gpu_memory"),
            host_memory=known.get("host_memory"),
            nodes=self._count("nodes"),
            gpus=self._count("gpus"),
            overrides=[known["set"]] if "set" in known else (),
        )

    def _count(self, name: str) -> int | None:
        text = dict(self.texts).get(name)
        if text is None:
            return None
        return whole(name, int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text)

    def address(self) -> dict[str, Any]:
        """By flag, the texts it does not open with."""
        initial = {field.name: field.initial for field in fields()}
        known = dict(self.texts)
        said = {f.flag: known.get(f.name, "") for f in fields() if known.get(f.name, "") != initial[f.name]}
        return said | ({"policy": list(self.policies)} if self.policies != POLICIES else {})

    def command(self) -> str:
        """In lines that a shell joins."""
        known = dict(self.texts)
        flags = [_flag(field, known[field.name]) for field in fields() if field.name in known]
        flags += [["--policy", policy] for policy in self.policies]
        lines = ["pstar compare"]
        for flag in map(shlex.join, flags):
            if len(lines[-1]) + len(flag) < WIDTH:
                lines[-1] += f" {flag}"
            else:
                lines.append(f"  {flag}")
        return " \\\n".join(lines)


def _flag(field: Field, text: str) -> list[str]:
    if field.choices == ("", YES, NO):
        return [f"--{'' if text == YES else 'no-'}{field.flag}"]
    return [f"--{field.flag}", text]


def _axis_value(text: str) -> str | bool:
    return {YES: True, NO: False}.get(text, text)
