"""Orders: the order in which an iteration runs its micro-batches, and what depends on it."""

from __future__ import annotations

from pstar_sim.python310 import StrEnum

__all__ = ["Order"]


class Order(StrEnum):
    """The order of an iteration, as a workload states it; nothing infers it from the moments.

    DEPTH_FIRST: each micro-batch runs forward and backward through the whole model before the next begins.
    LAYER_MAJOR: each block runs for all micro-batches before the next block does (relay.py).
    PIPELINED: forward and backward passes of micro-batches alternate as the schedule of a pipeline says (pipeline.py).
    """

    DEPTH_FIRST = "depth-first"
    LAYER_MAJOR = "layer-major"
    PIPELINED = "pipelined"

    @property
    def of_loop(self) -> bool:
        """Whether a training loop of the user's own runs it; the engine runs every order."""
        return self is Order.DEPTH_FIRST

    @property
    def one_by_one(self) -> bool:
        """Whether a micro-batch is over before the next begins. Then alike micro-batches can stand for one another, and
        their bytes on the host follow each other in the same room. Otherwise all have the same moments."""
        return self is Order.DEPTH_FIRST

    @property
    def sums_leave_gpu(self) -> bool:
        """Whether the sum of a chunk's gradients may leave the GPU between two micro-batches. Otherwise all its
        gradients arrive one after the other."""
        return self is not Order.LAYER_MAJOR

    @property
    def on_several_ranks(self) -> bool:
        """Whether policies plan it for ranks that share a batch."""
        return self is not Order.LAYER_MAJOR

    @property
    def words(self) -> str:
        """Behind the number of micro-batches; empty for the order that every loop has."""
        return {Order.DEPTH_FIRST: "", Order.LAYER_MAJOR: ", layer by layer", Order.PIPELINED: ", pipelined"}[self]

    def turns(self, micro_batches: int) -> int:
        """From forward to backward, and from backward to forward, inside an iteration."""
        return 1 if self is Order.LAYER_MAJOR else 2 * micro_batches - 1
