"""The order in which an iteration runs its micro-batches, and what depends on it."""

from __future__ import annotations

from pstar_sim.python310 import StrEnum


class Order(StrEnum):
    """The order of an iteration, stated by a workload, never inferred from moments.

    DEPTH_FIRST: each micro-batch runs forward and backward before the next begins.
    LAYER_MAJOR: each block runs for all before the next does (relay.py).
    PIPELINED: forwards and backwards alternate by a pipeline's schedule (pipeline.py).
    """

    DEPTH_FIRST = "depth-first"
    LAYER_MAJOR = "layer-major"
    PIPELINED = "pipelined"

    @property
    def of_loop(self) -> bool:
        """A user's own training loop runs it; the engine runs all."""
        return self is Order.DEPTH_FIRST

    @property
    def one_by_one(self) -> bool:
        """A micro-batch is over before the next begins: alike ones can stand for one another, and share room on the
        host. Otherwise all have the same moments."""
        return self is Order.DEPTH_FIRST

    @property
    def sums_leave_gpu(self) -> bool:
        """A chunk's sum of gradients may leave the GPU between two micro-batches. Otherwise they arrive one after the
        other."""
        return self is not Order.LAYER_MAJOR

    @property
    def on_several_ranks(self) -> bool:
        """Whether policies plan it for ranks that share a batch."""
        return self is not Order.LAYER_MAJOR

    @property
    def words(self) -> str:
        """After the number of micro-batches, empty for the usual order."""
        return {Order.DEPTH_FIRST: "", Order.LAYER_MAJOR: ", layer by layer", Order.PIPELINED: ", pipelined"}[self]

    def turns(self, micro_batches: int) -> int:
        """Turns from forward to backward and back, inside an iteration."""
        return 1 if self is Order.LAYER_MAJOR else 2 * micro_batches - 1
