"""How a model is spread over GPUs, as a text, "tp=2,pp=2,dp=4", or of Whale's four primitives:
`replica(pipeline(stage(split(2)), stage(split(2))), count=4)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from pstar_sim.arguments import choice, flag, whole
from pstar_sim.errors import PstarError
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
        if self.virtual > 1 and self.cut != CUTS[0]:
            raise PstarError(f"parallelism {self}: cut={self.cut} is for stages of one part; leave it or v out")
        choice("parallelism: shard", self.shard or SHARDS[0], SHARDS)
        flag("parallelism: sp", self.sequence)

    def __str__(self) -> str:
        """Reverses `parse`, without defaults."""
        usual = {field.name: field.default for field in fields(self)}
        said = {key: getattr(self, name) for key, name in _KEYS.items() if getattr(self, name) != usual[name]}
        return ",".join(key if value is True else f"{key}={value}" for key, value in said.items()) or "pp=1"

    @classmethod
    def parse(cls, text: str) -> Parallelism:
        """Reads "tp=2,sp,pp=4,schedule=gpipe". Raises PstarError, naming the word that is wrong."""
        given: dict[str, object] = {}
        switches = {key for key, name in _KEYS.items() if getattr(cls, name) is False}
        for word in text.split(","):
            key, equals, value = word.strip().partition("=")
            if key not in _KEYS or bool(equals) == (key in switches) or _KEYS[key] in given:
                known = ", ".join(name if name in switches else f"{name}=" for name in _KEYS)
                raise PstarError(f"parallelism {text!r}: {word.strip()!r} is not one of {known} given once")
            number = value.isascii() and value.isdigit()
            given[_KEYS[key]] = True if not equals else int(value) if number else value
        return cls(**given)  # type: ignore[arg-type]

    @property
    def composed(self) -> str:
        """With `replica`, `pipeline`, `stage` and `split`."""
        ranks = [str(self.tensor)] if self.tensor > 1 or self.sequence else []
        ranks += ["sequence=True"] if self.sequence else []
        ranks += [f"{name}={getattr(self, name)}" for name in ("context", "experts") if getattr(self, name) > 1]
        inner = f"stage(split({', '.join(ranks)}))" if ranks else "stage()"
        usual = {"schedule": SCHEDULES[0], "virtual": 1, "cut": CUTS[0]}
        named = {what: value for what in usual if (value := getattr(self, what)) != usual[what]}
        quoted = {what: f'"{value}"' if isinstance(value, str) else value for what, value in named.items()}
        said = "".join(f", {what}={value}" for what, value in quoted.items())
        if self.pipeline > 1 or said:
            inner = f"pipeline({', '.join([inner] * self.pipeline)}{said})"
        around = [inner] + ([] if self.data is None else [f"count={self.data}"])
        around += [] if self.shard is None else [f'shard="{self.shard}"']
        return f"replica({', '.join(around)})"

    def data_on(self, gpus: int) -> int:
        """Ranks that share a stage's batch. Raises PstarError, with the nearest number of stages that works."""
        each_gpus = self.tensor * self.context
        data = self.data or max(1, gpus // (self.pipeline * each_gpus))
        if data * self.pipeline * each_gpus != gpus:
            near = [p for p in range(1, gpus + 1) if gpus % (p * each_gpus * (self.data or 1)) == 0]
            best = min(near, key=lambda p: (abs(p - self.pipeline), p), default=None)
            hint = f"pp={best} would be" if best is not None else f"take degrees whose product is {gpus}"
            each = f" of {each_gpus} GPUs" if each_gpus > 1 else ""
            raise PstarError(
                f"parallelism {self}: {self.pipeline} stages of {data} ranks{each} are not the {gpus} GPUs; {hint}"
            )
        sharing = data * self.context
        if sharing % self.experts:
            near = [n for n in range(1, sharing + 1) if sharing % n == 0]
            best = min(near, key=lambda n: (abs(n - self.experts), n))
            raise PstarError(f"parallelism {self}: ep divides the {sharing} ranks of dp and cp, as ep={best} would")
        return data


def split(ranks: int = 1, *, sequence: bool = False, context: int = 1, experts: int = 1) -> Parallelism:
    """Ranks that split each layer's tensors and, with `sequence`, tokens beside the products.

    context: groups of such ranks that split each sequence.
    experts: groups of such ranks that share each layer's experts.
    """
    return Parallelism(tensor=ranks, sequence=sequence, context=context, experts=experts)


def stage(inner: Parallelism | None = None) -> Parallelism:
    """A part of the blocks, on one GPU or a `split`. Raises PstarError for anything else."""
    inner = inner or Parallelism()
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
        if stage(other) != stages[0]:
            raise PstarError(
                f"pipeline: stage {number} is of {other} and stage 0 of {stages[0]}; stages are split alike, so give "
                f"each split({max(one.tensor for one in stages)})"
            )
    return replace(stages[0], pipeline=len(stages), schedule=schedule, virtual=virtual, cut=cut)


def replica(inner: Parallelism, *, count: int | None = None, shard: str | None = None) -> Parallelism:
    """Ranks of each stage that share its batch, None: as many as GPUs allow. Raises PstarError for replicas of
    replicas.

    shard: what they slice, as in Parallelism.
    """
    if inner.data is not None or inner.shard is not None:
        raise PstarError(f"replica({inner.composed}): replicas of replicas are one replica, of the product of counts")
    return replace(inner, data=count, shard=shard)
