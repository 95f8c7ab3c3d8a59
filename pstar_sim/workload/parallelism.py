"""How a model is spread over GPUs, as a text, "tp=2,pp=2,dp=4", or of Whale's four primitives:
`replica(pipeline(stage(split(2)), stage(split(2))), count=4)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod

from pstar_sim.arguments import choice, flag, instance, text, whole
from pstar_sim.errors import PstarError
from pstar_sim.units import format_count
from pstar_sim.workload.pipeline import INTERLEAVED, SCHEDULES

__all__ = ["CUTS", "SHARDS", "Parallelism", "pipeline", "replica", "split", "stage"]

_KEYS: Mapping[str, str] = {
    "tp": "tensor", "sp": "sequence", "cp": "context", "ep": "experts", "pp": "pipeline", "dp": "data",
    "schedule": "schedule", "v": "virtual", "cut": "cut", "shard": "shard",
}  # fmt: skip
"""Key of a text -> field. The key of a switch stands alone."""


CUTS = ("even", "speed")
SHARDS = ("none", "states", "parameters")


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Their product is the number of GPUs.

    tensor: ranks that split the tensors of each layer.
    sequence: they also split the sequence beside the products (Megatron's sequence parallelism).
    context: ranks that split each sequence.
    experts: of the ranks that share sequences or split them, those that share each layer's experts.
    pipeline: stages, each with a part of the blocks.
    data: ranks that share a stage's batch, None: as many as GPUs allow.
    schedule: of the pipeline, one of SCHEDULES (pipeline.py).
    virtual: parts of the model that an interleaved stage has; 1 in other schedules.
    cut: of layers into stages, one of CUTS: equal numbers, or by speed.
    shard: what ranks that share a batch slice, one of SHARDS: nothing, optimizer states (ZeRO-1), or also gradients and
        parameters (ZeRO-3); None: as the policy does.

    Raises PstarError for other values.
    """

    tensor: int = 1
    sequence: bool = False
    context: int = 1
    experts: int = 1
    pipeline: int = 1
    data: int | None = None
    schedule: str = SCHEDULES[0]
    virtual: int = 1
    cut: str = CUTS[0]
    shard: str | None = None

    def __post_init__(self) -> None:
        whole("parallelism: tp", self.tensor)
        whole("parallelism: cp", self.context)
        whole("parallelism: ep", self.experts)
        whole("parallelism: pp", self.pipeline)
        if self.data is not None:
            whole("parallelism: dp", self.data)
        choice("parallelism: schedule", self.schedule, SCHEDULES)
        whole("parallelism: v", self.virtual)
        if (self.virtual > 1) != (self.schedule == INTERLEAVED) or (self.virtual > 1 and self.pipeline == 1):
            hint = "pp=2 or more, schedule=interleaved and v=2 or more go together"
            raise PstarError(f"parallelism {self}: v is {self.virtual} and pp is {self.pipeline}; {hint}")
        choice("parallelism: cut", self.cut, CUTS)
        if self.pipeline == 1 and (words := _said(self._of_pipelines)):
            raise PstarError(f"parallelism {self}: {words} is for pipelines; give pp=2 or more, or leave it out")
        if self.virtual > 1 and self.cut != CUTS[0]:
            raise PstarError(f"parallelism {self}: cut={self.cut} is for stages of one part; leave it or v out")
        if self.shard is not None:
            choice("parallelism: shard", self.shard, SHARDS)
        flag("parallelism: sp", self.sequence)

    def __str__(self) -> str:
        """Reverses `parse`, without defaults."""
        usual = {field.name: field.default for field in fields(self)}
        said = {key: getattr(self, name) for key, name in _KEYS.items() if getattr(self, name) != usual[name]}
        return ",".join(key if value is True else f"{key}={value}" for key, value in said.items()) or "pp=1"

    @classmethod
    def parse(cls, words: str) -> Parallelism:
        """Reads "tp=2,sp,pp=4,schedule=gpipe". Raises PstarError, naming the word that is wrong."""
        given: dict[str, object] = {}
        switches = {key for key, name in _KEYS.items() if getattr(cls, name) is False}
        for word in text("parallelism", words, "a text such as tp=2,pp=4").split(","):
            key, equals, value = (part.strip() for part in word.partition("="))
            wrong = None
            if key not in _KEYS:
                known = ", ".join(name if name in switches else f"{name}=" for name in _KEYS)
                wrong = f"is not one of {known}"
            elif _KEYS[key] in given:
                wrong = f"gives {key} again"
            elif bool(equals) == (key in switches):
                wrong = f"has a value; write {key} alone" if equals else f"has no value; write {key}=, with one"
            if wrong:
                raise PstarError(f"parallelism {words!r}: {word.strip()!r} {wrong}")
            number = value.isascii() and value.isdigit()
            given[_KEYS[key]] = True if not equals else int(value) if number else value
        return cls(**given)  # type: ignore[arg-type]

    @property
    def only_shares_batch(self) -> bool:
        """Whether each rank has the whole model, or slices of its chunks, and whole sequences."""
        return self.pipeline == self.tensor == self.context == self.experts == 1

    @property
    def composed(self) -> str:
        """With `replica`, `pipeline`, `stage` and `split`."""
        inner, given = _stage_of(self), self._of_pipelines
        said = "".join(f', {w}="{v}"' if isinstance(v, str) else f", {w}={v}" for w, v in given.items())
        if self.pipeline > 1:
            inner = f"pipeline({', '.join([inner] * self.pipeline)}{said})"
        around = [inner] + ([] if self.data is None else [f"count={self.data}"])
        around += [] if self.shard is None else [f'shard="{self.shard}"']
        return f"replica({', '.join(around)})"

    @property
    def _of_pipelines(self) -> dict[str, object]:
        usual = {"schedule": SCHEDULES[0], "virtual": 1, "cut": CUTS[0]}
        return {what: value for what in usual if (value := getattr(self, what)) != usual[what]}

    def data_on(self, gpus: int) -> int:
        """Ranks that share a stage's batch. Raises PstarError, with the nearest degrees that work."""
        each = self.tensor * self.context * self.pipeline
        data = self.data or max(1, gpus // each)
        if data * each != gpus:
            raise PstarError(f"parallelism {self}: {self._nearest(gpus)}")
        sharing = data * self.context
        if sharing % self.experts:
            near = [n for n in range(1, sharing + 1) if sharing % n == 0]
            best = min(near, key=lambda n: (abs(n - self.experts), n))
            ranks = format_count(sharing, "rank")
            raise PstarError(f"parallelism {self}: ep divides the {ranks} of dp and cp, as ep={best} would")
        return data

    def _nearest(self, gpus: int) -> str:
        """The fewest degrees change, those that divide the GPUs last."""
        degrees = {key: getattr(self, _KEYS[key]) for key in ("tp", "cp", "pp", "dp")}
        degrees = {key: n for key, n in degrees.items() if n is not None and (n > 1 or key == "dp")}
        divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
        distances: dict[str, tuple[int, ...]] = {}
        for numbers in product(divisors, repeat=len(degrees)):
            if (gpus != prod(numbers)) if self.data else gpus % prod(numbers):
                continue
            others = {key: n for key, n in zip(degrees, numbers) if n != degrees[key]}
            able = sum(gpus % degrees[key] == 0 for key in others)
            steps = sum(abs(degrees[key] - other) for key, other in others.items())
            without = ["sp"] if self.sequence and others.get("tp") == 1 else []
            without += [_said(self._of_pipelines)] if self._of_pipelines and others.get("pp") == 1 else []
            words = " without ".join((_said(others), *without))
            distances[words] = (len(without), len(others), able, steps)
        best = min(distances.values())
        near = " or ".join(words for words, distance in distances.items() if distance == best)
        count = format_count(prod(degrees.values()), "GPU")
        return f"{_said(degrees, ' times ')} is {count}, and the machine has {gpus}; {near} would do"


def _said(values: Mapping[str, object], between: str = ",") -> str:
    return between.join(f"{key}={value}" for key, value in values.items())


def _stage_of(spread: Parallelism) -> str:
    ranks = [str(spread.tensor)] if spread.tensor > 1 or spread.sequence else []
    ranks += ["sequence=True"] if spread.sequence else []
    ranks += [f"{name}={getattr(spread, name)}" for name in ("context", "experts") if getattr(spread, name) > 1]
    return f"stage(split({', '.join(ranks)}))" if ranks else "stage()"


def split(ranks: int = 1, *, sequence: bool = False, context: int = 1, experts: int = 1) -> Parallelism:
    """Ranks that split each layer's tensors and, with `sequence`, tokens beside the products.

    context: groups of such ranks that split each sequence.
    experts: groups of such ranks that share each layer's experts.
    """
    return Parallelism(tensor=ranks, sequence=sequence, context=context, experts=experts)


def stage(inner: Parallelism | None = None) -> Parallelism:
    """A part of the blocks, on one GPU or a `split`. Raises PstarError for anything else."""
    inner = Parallelism() if inner is None else instance("stage", inner, Parallelism, "a split(...), or nothing")
    if inner != split(inner.tensor, sequence=inner.sequence, context=inner.context, experts=inner.experts):
        raise PstarError(
            f"stage({inner.composed}): a stage holds a split or nothing; put it around, as in replica(...)"
        )
    return inner


def pipeline(*stages: Parallelism, schedule: str = SCHEDULES[0], virtual: int = 1, cut: str = CUTS[0]) -> Parallelism:
    """The stages one behind the other. Raises PstarError for none, and for stages that differ."""
    if not stages:
        raise PstarError("pipeline(): give its stages, such as pipeline(stage(), stage())")
    for number, other in enumerate(stages):
        if stage(instance("pipeline", other, Parallelism, "of stages, such as stage()")) != stages[0]:
            most = max(stages[: number + 1], key=lambda one: one.tensor * one.context * one.experts)
            raise PstarError(
                f"pipeline: stage {number} is {_stage_of(other)} and stage 0 {_stage_of(stages[0])}; stages are split "
                f"alike, so give {_stage_of(most)} for each"
            )
    return replace(stages[0], pipeline=len(stages), schedule=schedule, virtual=virtual, cut=cut)


def replica(inner: Parallelism, *, count: int | None = None, shard: str | None = None) -> Parallelism:
    """Ranks of each stage that share its batch, None: as many as GPUs allow. Raises PstarError for replicas of
    replicas.

    shard: what they slice, as in Parallelism.
    """
    instance("replica", inner, Parallelism, "a stage(...) or a pipeline(...)")
    if inner.data is not None or inner.shard is not None:
        raise PstarError(f"replica({inner.composed}): replicas of replicas are one replica, of the product of counts")
    return replace(inner, data=count, shard=shard)
