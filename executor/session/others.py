"""Others: the calls of a session to the other ranks. `distributed.ranks.Ranks` implements them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from pstar_sim.errors import PlanError

__all__ = ["CountOf", "Others"]

CountOf = Callable[[Any, Any], float]
"""(args, kwargs) of the model's forward -> number of items (sequences, tokens) that the loss of this rank is a mean
over."""


class Life(Protocol):
    """The connection over which ranks learn of each other's end."""

    def fail(self, what: str) -> None: ...


class Others(Protocol):
    """The other ranks, as a session calls them. `distributed/ranks.py` documents the methods."""

    @property
    def rank(self) -> int: ...
    @property
    def life(self) -> Life: ...

    def any(self, here: bool) -> bool: ...

    def meet(self, row: Sequence[float]) -> list[list[float]]: ...

    def agree(self, norm: torch.Tensor) -> torch.Tensor: ...

    def weight(self, count: float) -> float: ...

    def come_to_read(self, number: float) -> object: ...

    def slices_of(self, chunk: int) -> torch.Tensor | None: ...

    def cannot_leave(self, reason: str) -> PlanError: ...

    def ends(self, text: str) -> PlanError: ...

    def announce(self, error: BaseException | None, iteration: int) -> None: ...

    def close(self) -> None: ...
