"""Loading: how the weights of a job come into host memory before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pstar_sim.arguments import choice
from pstar_sim.dtypes import BASES, DTYPES, MASTER
from pstar_sim.workload.workload import Tensor, Workload

LOADING = ("whole", "each", "in-place")


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Its text is the way, and after a colon the dtype if given: "each:fp32".

    way: `whole`, once per node, for all processes; `each`, whole by every process; `in-place`, never whole, as in an
        initialisation chunk by chunk.
    dtype: in host memory; None: the working dtype. Matrices of a quantised base (dtypes.py) have their own: each is
        quantised as it comes, as in transformers.
    """

    way: str = LOADING[0]
    dtype: str | None = None

    def __str__(self) -> str:
        return self.way if self.dtype is None else f"{self.way}:{self.dtype}"

    def startup_bytes(self, workload: Workload, local_ranks: int) -> int:
        """Bytes of each of the node's ranks while weights are loaded."""
        return self.of_rank(self.weights_bytes(workload.tensors, workload.dtype), local_ranks)

    def weights_bytes(self, tensors: Iterable[Tensor], working: str) -> int:
        """As they are loaded."""
        width = DTYPES[self.dtype or working].bytes
        return sum(t.bytes if t.dtype in BASES else t.numel * width for t in tensors if t.tied_to is None)

    def of_rank(self, weights_bytes: int, local_ranks: int) -> int:
        if self.way == "in-place":
            return 0
        return weights_bytes if self.way == "each" else -(-weights_bytes // local_ranks)

    def words(self, local_ranks: int, tensors: Iterable[Tensor] = ()) -> str:
        """After "loaded"; empty in the working dtype on one rank."""
        way = {"whole": "once per node", "each": "whole by every process"}.get(self.way, "") if local_ranks > 1 else ""
        base = next((f" and the base in {t.dtype}" for t in tensors if t.dtype in BASES), "")
        return " ".join(part for part in (way, self.dtype and f"in {self.dtype}{base}") if part)


WHOLE = Loading()
"""Assumed where nothing says how."""
EACH_FP32 = Loading(way="each", dtype=MASTER)
"""The most that a framework needs: FSDP, without efficient loading."""


def loading_of(value: Loading | str | None) -> Loading:
    """`WHOLE` for None. Raises PstarError for an unknown way or dtype."""
    if isinstance(value, Loading):
        return value
    if value is None:
        return WHOLE
    way, colon, dtype = str(value).partition(":")
    choice("loading", way if isinstance(value, str) else value, LOADING)
    return Loading(way=way, dtype=choice("loading's dtype", dtype, DTYPES) if colon else None)
