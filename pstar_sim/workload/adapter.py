"""Adapter: what LoRA trains beside a model, as the user states it (lora.py writes it down)."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from pstar_sim.arguments import refused, whole
from pstar_sim.errors import ModelError

__all__ = ["Adapter", "adapter"]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A low-rank adapter.

    rank: columns of A^T and B.
    targets: last names of the modules inside the layers that get an adapter (such as "q_proj"), or ("all-linear",) for
        every matrix there; None: the family's usual targets.
    """

    rank: int = 16
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        whole("lora: rank", self.rank, error=ModelError)
        named = self.targets
        if named is not None and not (
            isinstance(named, (tuple, list)) and named and all(isinstance(t, str) and t for t in named)
        ):
            raise refused("lora: targets", named, "a tuple of names, such as ('q_proj', 'v_proj')", ModelError)

    def __str__(self) -> str:
        """As `adapter` reads it."""
        return f"r={self.rank}" + (f",targets={'+'.join(self.targets)}" if self.targets else "")


def adapter(given: Adapter | str | int) -> Adapter:
    """Of "r=16", "16", "r=8,targets=q_proj+v_proj", or a rank. Raises ModelError for anything else."""
    if isinstance(given, Adapter):
        return given
    number: object = given  # numbers of numpy are numbers too
    if not isinstance(number, bool) and isinstance(number, Integral):
        return Adapter(rank=int(number))
    if not isinstance(given, str):
        raise refused("lora", given, "an adapter, such as 'r=16'", ModelError)
    rank, targets = 0, None
    for part in given.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            key, value = "r", part
        if key.strip() in ("r", "rank") and value.strip().isdecimal():
            rank = int(value)
            if rank < 1:
                raise ModelError(f"lora {given}: rank must be at least 1, not {rank}")
        elif key.strip() == "targets" and value.strip():
            targets = tuple(name.strip() for name in value.split("+"))
        else:
            raise ModelError(f"lora {given}: {part!r} is not r=RANK or targets=NAME+NAME; write r=16")
    if not rank:
        raise ModelError(f"lora {given}: a rank is needed, such as r=16")
    return Adapter(rank=rank, targets=targets)
