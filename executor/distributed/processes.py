"""Processes that run one program together, as torchrun starts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pstar_sim.errors import PstarError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Processes:
    count: int
    rank: int
    device: str

    def gathered(self, value: T) -> list[T]:
        """Of all processes, by rank; every rank calls this at the same point."""
        if not dist.is_initialized():
            return [value]
        rows: list[Any] = [None] * self.count
        dist.all_gather_object(rows, value)
        return rows

    def of_first(self, value: T) -> T:
        return self.gathered(value)[0]

    def on_all(self, action: Callable[[], T]) -> T:
        """A failure on some rank raises PstarError on all, so none waits for it."""
        failed: Exception | None = None
        try:
            done = action()
        except Exception as error:  # raised below, on every rank
            failed = error
        for rank, text in enumerate(self.gathered("" if failed is None else f"{failed}" or type(failed).__name__)):
            if text and failed is None:
                raise PstarError(f"rank {rank}: {text}")
        if failed is not None:
            raise failed
        return done

    def group_of_first(self) -> dist.ProcessGroup | None:
        """None if there is no other process. Every process calls this."""
        return dist.new_group([0]) if self.count > 1 else None


@contextmanager
def processes_of(device: str) -> Iterator[Processes]:
    """The device "cuda" gives each process the card of its number."""
    started = dist.is_torchelastic_launched() and not dist.is_initialized()
    if started:
        dist.init_process_group("gloo" if device == "virtual" else "cpu:gloo,cuda:nccl")
    try:
        count, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if device == "cuda" and count > 1:
            device = f"cuda:{rank % torch.cuda.device_count()}"
            torch.cuda.set_device(device)
        yield Processes(count=count, rank=rank, device=device)
    finally:
        if started:
            dist.destroy_process_group()
