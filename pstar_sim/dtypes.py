"""Dtypes: the one table of the number formats in which a model is stored, multiplied and summed.

Workloads and tensors name their dtype, so that files are plain text.

[Note: storage] A frozen matrix may be stored in a dtype of `BASES`, with scales. Its elements are then bytes, of which
`Dtype.stored` gives the number. No operator computes in such a dtype. Each linear layer dequantises its matrix to the
working dtype, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtype:
    """name: in files and flags.
    bytes: width of a stored element.
    products: dtypes by whose rate the GPU multiplies it; the first known rate counts.
    scaled: gradients need loss scaling, because small ones are lost and sums may overflow.
    packed: (rows, columns) -> stored elements of a matrix ([Note: storage]); None: one for each element.
    stacks: as a base: of experts' stacks too, not of linear modules alone.
    """

    name: str
    bytes: int
    torch_name: str
    products: tuple[str, ...]
    scaled: bool = False
    packed: Callable[[int, int], int] | None = None
    stacks: bool = False

    def stored(self, shape: Sequence[int]) -> int:
        """Elements of `bytes` in which a tensor is stored. One of more than two dimensions is a stack of matrices."""
        if self.packed is None:
            return prod(shape)
        *stack, columns = shape
        return prod(stack[:-1]) * self.packed(prod(stack[-1:]), columns)

    @property
    def is_master(self) -> bool:
        """A parameter is its own master copy."""
        return self.name == MASTER

    @property
    def can_sum(self) -> bool:
        """Whether gradients may be summed in this dtype instead of `MASTER`."""
        return not self.is_master

    @property
    def bytes_per_param(self) -> float:
        """Bytes of an element of a large matrix."""
        side = 2**14
        return self.bytes * self.stored((side, side)) / side**2


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


def _words(size: int) -> int:
    """Of 4 bytes, as fp32 scales need them."""
    return -(-size // 4) * 4


def _nf4(rows: int, columns: int) -> int:
    """4 bits, an 8-bit scale for each 64 elements, and an fp32 scale for each 256 of these: double quantisation.
    Source: Dettmers et al., QLoRA, 2023."""
    scales = -(-rows * columns // 64)
    return _words(-(-rows * columns // 2)) + _words(scales) + 4 * -(-scales // 256)


def _nf4_single(rows: int, columns: int) -> int:
    """4 bits, and an fp32 scale for each 64 elements: without double quantisation, as bitsandbytes does by default."""
    return _words(-(-rows * columns // 2)) + 4 * -(-rows * columns // 64)


def _int8(rows: int, columns: int) -> int:
    """8 bits, and an fp32 scale for each row. Source: Dettmers et al., LLM.int8(), 2022."""
    return _words(rows * columns) + 4 * rows


def _fp8(rows: int, columns: int) -> int:
    """8 bits, and an fp32 scale for each block of 128 x 128. Source: DeepSeek-V3, 2024."""
    return _words(rows * columns) + 4 * -(-rows // 128) * -(-columns // 128)


BASES = {
    name: Dtype(name=name, bytes=1, torch_name="uint8", products=(), packed=packed, stacks=stacks)
    for name, packed, stacks in (
        ("int8", _int8, False),
        ("nf4", _nf4, False),
        ("nf4-single", _nf4_single, False),
        ("fp8", _fp8, True),
        ("nf4-experts", _nf4, True),
    )
}
"""Name -> dtype of frozen matrices ([Note: storage])."""
STORAGE = DTYPES | BASES
"""Name -> dtype of a tensor or a chunk."""

NATIVE = DTYPES[WORKING].products
"""Dtypes in the order in which a job takes them, the first that a GPU has natively."""

PRODUCTS = ("fp8",)
"""Dtypes of products alone: inputs and weights are cast to them in front of each product of a linear module, which sums
in fp32. Everything else keeps the working dtype, what backward needs included. Source: torchao.float8, tensorwise."""

AUTOCAST = tuple(name for name in NATIVE if name != MASTER)
"""Dtypes to which autocast casts the inputs of products, while parameters and gradients stay in `MASTER`."""


def same_size(one: str, other: str) -> bool:
    """Both are known, with as many bytes per element."""
    return one in DTYPES and other in DTYPES and DTYPES[one].bytes == DTYPES[other].bytes


def unscaled(name: str) -> str:
    """The dtype of the same size whose gradients need no loss scaling: bf16 for fp16."""
    if name not in DTYPES or not DTYPES[name].scaled:
        return name
    return next(row.name for row in DTYPES.values() if not row.scaled and row.bytes == DTYPES[name].bytes)
