"""Dtypes: the one table of the number formats in which a model is stored, multiplied and summed.

A workload and its tensors name their dtype, so that files are plain text. Whoever needs a property of a dtype asks its
row here. The optimizer keeps its own states in `MASTER`, or as the optimizer says.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AUTOCAST", "DTYPES", "MASTER", "NATIVE", "WORKING", "Dtype", "same_size", "unscaled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtype:
    """A number format.

    name: in files and flags.
    bytes: width of an element.
    products: dtypes by whose rate the GPU multiplies it; the first known rate counts.
    scaled: gradients need loss scaling, because small ones are lost and sums may overflow.
    """

    name: str
    bytes: int
    torch_name: str
    products: tuple[str, ...]
    scaled: bool = False

    @property
    def is_master(self) -> bool:
        """A parameter is its own master copy."""
        return self.name == MASTER

    @property
    def can_sum(self) -> bool:
        """Whether gradients may be summed in this dtype instead of `MASTER`."""
        return not self.is_master and not self.scaled


MASTER = "fp32"
"""Dtype of the optimizer's master copies, and of sums of gradients."""
WORKING = "bf16"
"""Working dtype where neither a model nor a GPU says another."""

DTYPES = {
    row.name: row
    for row in (
        Dtype(name="fp32", bytes=4, torch_name="float32", products=("fp32",)),
        Dtype(name="bf16", bytes=2, torch_name="bfloat16", products=("bf16", "fp16", "fp32")),
        Dtype(name="fp16", bytes=2, torch_name="float16", products=("fp16", "bf16", "fp32"), scaled=True),
    )
}
"""Name -> dtype."""

NATIVE = DTYPES[WORKING].products
"""Dtypes in the order in which a job takes them, the first that a GPU has natively."""

AUTOCAST = tuple(name for name in NATIVE if name != MASTER)
"""Dtypes to which autocast casts the inputs of products, while parameters and gradients stay in `MASTER`."""


def same_size(one: str, other: str) -> bool:
    """Returns whether both dtypes are known and an element has as many bytes in one as in the other."""
    return one in DTYPES and other in DTYPES and DTYPES[one].bytes == DTYPES[other].bytes


def unscaled(name: str) -> str:
    """Returns the dtype of the same size whose gradients need no loss scaling: bf16 for fp16, else the dtype itself."""
    if name not in DTYPES or not DTYPES[name].scaled:
        return name
    return next(row.name for row in DTYPES.values() if not row.scaled and row.bytes == DTYPES[name].bytes)
