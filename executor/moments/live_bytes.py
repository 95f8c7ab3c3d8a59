"""Logical bytes of live storages that are not parameters, on fake and real tensors.

A dispatch mode sees every operator, forward and backward. A storage counts from its making until its last reference is
gone, an earlier one if it is a buffer, or from the first operator that takes it (the batch), and only the part that
operators take: a batch may be a slice of a data set. Parameters never count: an operator that takes one is a read,
views included, because views of an evicted parameter must not be made. Logical bytes are the storage's `nbytes`,
without allocator rounding and workspaces.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from executor.devices.torch_private import LOCAL_SCALAR, RESHAPE_ALIAS, UNSAFE_VIEW, storage_key
from executor.moments.compiled import pause_compiler
from pstar_sim.catalog.attention import AttentionCall, call_flops
from pstar_sim.errors import ModelError
from pstar_sim.workload.workload import Product, product_flops

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default


def _attention_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Keys and values may have fewer heads."""
    return call_flops(_call(args, causal=False, backward=False))


def _attention_backward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return call_flops(_call(args, causal=False, backward=True))


def _call(args: Sequence[Any], *, causal: bool, backward: bool) -> AttentionCall:
    query, key, value = args[1:4] if backward else args[:3]
    heads, rows = math.prod(query.shape[:-2]), query.shape[-2]
    return heads, rows, key.shape[-2], query.shape[-1], value.shape[-1], int(causal), int(backward)


def _grouped_flops(a: Any, b: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Of routed experts: rows (2-d by 3-d) or columns (3-d by 2-d) belong to one group, in 2-d by 2-d the inner extent
    does."""
    if a.dim() == 2:
        rows, inner, columns = a.shape[0], a.shape[1], b.shape[-1]
        return int(2 * rows * inner * columns)
    groups = a.shape[0] if b.dim() == 3 else 1
    return int(2 * groups * a.shape[1] * a.shape[2] * b.shape[-1])


def _grouped_backward_flops(a: Any, b: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return 2 * _grouped_flops(a, b)


def _product_of_4_bits(a: Any, codes: Any, shape: Sequence[int]) -> Product:
    """[Note: dequantised]"""
    return 1, a.numel() // shape[1], shape[1], shape[0]


def _flops_of_4_bits(a: Any, codes: Any, shape: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return product_flops(_product_of_4_bits(a, codes, shape))


# Kernels that run attention; each has the same arithmetic, and a backward of the same name.
_ATTENTION = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
_PASSES = dict.fromkeys(_ATTENTION, "forward") | {f"{name}_backward": "backward" for name in _ATTENTION}
# torch's registry lacks the CPU's attention and grouped products; its formula of attention, in torch 2.11 for one, does
# not take grouped-query attention.
_OWN: dict[str, Callable[..., int]] = {
    **dict.fromkeys(_ATTENTION, _attention_flops),
    **{f"{name}_backward": _attention_backward_flops for name in _ATTENTION},
    "_grouped_mm": _grouped_flops,
}
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **{getattr(aten, name): flops for name, flops in _OWN.items() if hasattr(aten, name)},  # torch 2.6 has not all
}
# transformers' own operators of routed experts, for torch without grouped products for the device. They exist where
# transformers is imported.
_FLOPS_BY_NAME: dict[str, Callable[..., int]] = {
    "transformers::grouped_mm_fallback": _grouped_flops,
    "transformers::grouped_mm_fallback_backward": _grouped_backward_flops,
    "bitsandbytes::gemm_4bit": _flops_of_4_bits,
}
_OF_4_BITS = "bitsandbytes::gemm_4bit"
"""[Note: dequantised] For more than a few rows this kernel dequantises its matrix to the dtype of the inputs. The whole
matrix is alive until the product ends."""
# These return (part of) an input's storage although their schema does not say so, or only reserve memory.
_NO_TRAFFIC = frozenset(
    {
        UNSAFE_VIEW,
        RESHAPE_ALIAS,
        aten.lift_fresh,
        aten.empty,
        aten.empty_like,
        aten.empty_strided,
        aten.new_empty,
        aten.new_empty_strided,
        LOCAL_SCALAR,
    }
)
# Operator that is one matrix product -> positions of its two factors among the arguments.
_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}
_ROWS_ONLY = frozenset({aten.embedding, aten.index_select, aten.index, aten.gather})
_RESIZES = frozenset({aten.resize_, aten.resize_as_, aten.set_})


def _argument(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return kwargs.get(name, args[place] if place < len(args) else argument.default_value)
    return None


class _Traits:
    """attention: fused "forward" or "backward", else "".
    product: positions of a product's factors, None if it is none.
    traffic: 0 none (views), 1 inputs and outputs, 2 outputs twice (gathers).
    """

    __slots__ = ("attention", "dequantises", "flops", "product", "resizes", "traffic")

    def __init__(self, func: Any) -> None:
        packet = getattr(func, "_overloadpacket", func)
        self.flops = _FLOPS.get(packet) or _FLOPS_BY_NAME.get(getattr(packet, "_qualified_op_name", ""))
        self.product = _PRODUCTS.get(packet)
        self.dequantises = getattr(packet, "_qualified_op_name", "") == _OF_4_BITS
        self.attention = _PASSES.get(getattr(packet, "__name__", ""), "")
        self.resizes = packet in _RESIZES
        view = bool(getattr(func, "is_view", False)) or packet in _NO_TRAFFIC or self.resizes
        self.traffic = 0 if view else 2 if packet in _ROWS_ONLY else 1


class _Watched(weakref.ref):  # type: ignore[type-arg]
    """in_part: made earlier: `size` may be less than the storage's."""

    __slots__ = ("in_part", "key", "size")
    key: int
    size: int
    in_part: bool


def require_dense(tensor: torch.Tensor, operator: object) -> None:
    if tensor.layout is not torch.strided:
        raise ModelError(
            f"{operator} makes a sparse tensor, and plans hold dense tensors alone; give sparse=False to Embedding and "
            "EmbeddingBag"
        )


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while entered; compiled functions then run as written.

    parameters: by index, never counted; several may share a storage (views of a chunk), told apart by offset.
    buffers: count from the start. on_param_read: called before each operator that takes the parameter.
    costs: also flops and bytes that operators read and write.
    peak: since `reset_peak()`.
    flops, bytes_read, bytes_written, products, attentions, operators: since last emptied (operators without views).
    kernels: operators named attention or softmax.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Iterable[torch.Tensor] = (),
        *,
        on_param_read: Callable[[int], None] | None = None,
        costs: bool = True,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self.flops = 0
        self.products: list[Product] = []
        self.attentions: list[AttentionCall] = []
        self.operators = 0
        self.bytes_read = 0
        self.bytes_written = 0
        self.last_op: Any = None
        self.kernels: set[str] = set()
        self._on_param_read = on_param_read
        self._costs = costs
        self._device = None if device is None or device.type == "cpu" else device
        self._paused = False
        self._live: dict[int, _Watched] = {}
        self._ours: dict[int, tuple[list[int], list[int]]] = {}  # storage -> byte offsets, parameter indices
        self._keep: list[Any] = []  # keeps the storages of `_ours` alive, so that no other storage gets their keys
        self._traits: dict[Any, _Traits] = {}
        self._resumes: list[Callable[[], None]] = []
        for index, tensor in enumerate(parameters):
            self.add_parameter(index, tensor)
        for tensor in buffers:
            self._see(tensor)
        self.peak = self.current

    def __enter__(self) -> LiveStorages:
        self._resumes.append(pause_compiler())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failed: Any) -> None:
        super().__exit__(*failed)  # type: ignore[no-untyped-call]
        if self._resumes:
            self._resumes.pop()()

    def resume_compiler(self) -> None:
        """For a mode that leaves its stack before its context ends."""
        while self._resumes:
            self._resumes.pop()()

    def add_parameter(self, index: int, tensor: torch.Tensor) -> None:
        """`tensor` has moved into a chunk as parameter `index`; its storage counts no more."""
        storage = tensor.untyped_storage()
        self.ignore(storage)
        starts, indices = self._ours[storage_key(storage)]
        start = int(tensor.storage_offset()) * tensor.element_size()
        at = bisect.bisect_left(starts, start)
        starts.insert(at, start)
        indices.insert(at, index)

    def ignore(self, storage: torch.UntypedStorage) -> None:
        """The storage, of a chunk or a gradient, is model data."""
        key = storage_key(storage)
        if key not in self._ours:
            self._ours[key] = ([], [])
            self._keep.append(storage)
            watched = self._live.pop(key, None)
            if watched is not None:
                self.current -= watched.size

    def reset_peak(self) -> None:
        self.peak = self.current

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The engine's own copies neither count nor report reads, and may free storages."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # fake tensors ask for their device with an operator
            return getattr(args[0], "fake_device", None) or func(*args)
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        self.last_op = func
        inputs: list[torch.Tensor] = []
        _collect(args, inputs)
        if kwargs:
            _collect(tuple(kwargs.values()), inputs)
        self._see_inputs(inputs)
        out = func(*args, **kwargs)
        traits = self._traits.get(func) or self._look_up(func)
        outputs: list[torch.Tensor] = []
        _collect((out,), outputs)
        self._see_outputs(outputs, resized=traits.resizes)
        if traits.dequantises:
            self._see_dequantised(*args[:3])
        if self._costs:
            if traits.flops is not None:
                self.flops += int(traits.flops(*args, **kwargs, out_val=out))
            if traits.product is not None:
                self._count_product(*args[traits.product : traits.product + 2])
            if traits.attention:
                causal = bool(_argument(func, "is_causal", args, kwargs))
                call = _call(args, causal=causal, backward=traits.attention == "backward")
                self.attentions += [call] if all(call[:5]) else []
            self.operators += traits.traffic > 0
            self._count_traffic(traits.traffic, inputs, outputs)
        return out

    def _see_dequantised(self, a: torch.Tensor, codes: torch.Tensor, shape: Sequence[int]) -> None:
        """[Note: dequantised]"""
        size = math.prod(shape) * a.element_size()
        self.peak = max(self.peak, self.current + size)
        if self._costs:
            self.products.append(_product_of_4_bits(a, codes, shape))
            self.bytes_written += size
            self.bytes_read += size

    def _count_product(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """([batches,] m, k) by ([batches,] k, n); without elements no work."""
        product = (a.shape[0] if a.dim() == 3 else 1, a.shape[-2], a.shape[-1], b.shape[-1])
        if all(product):
            self.products.append(product)

    def _look_up(self, func: Any) -> _Traits:
        traits = self._traits[func] = _Traits(func)
        if "softmax" in str(func) or "attention" in str(func):
            self.kernels.add(str(func))
        return traits

    def _see_inputs(self, inputs: Iterable[torch.Tensor]) -> None:
        """Reports reads of parameters, and counts earlier storages."""
        live, ours = self._live, self._ours
        for tensor in inputs:
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            watched = live.get(key)
            if watched is not None:
                if watched.in_part:
                    self._count_more(watched, self._size_of_part(tensor))
            elif key in ours:
                self._report_read(key, tensor)
            else:
                self._add(storage, key, self._size_of_part(tensor))

    def _see_outputs(self, outputs: Iterable[torch.Tensor], *, resized: bool) -> None:
        live, ours = self._live, self._ours
        for tensor in outputs:
            require_dense(tensor, self.last_op)
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            if key in live:
                if resized:
                    self._resized(live[key], storage)
            elif key not in ours:
                self._add(storage, key)
        if self.current > self.peak:
            self.peak = self.current

    def _count_traffic(self, traffic: int, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        if traffic:
            written = sum([t.numel() * t.element_size() for t in outputs])
            self.bytes_written += written
            self.bytes_read += written if traffic == 2 else sum([t.numel() * t.element_size() for t in inputs])

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._live and key not in self._ours:
            self._add(storage, key)

    def _add(self, storage: torch.UntypedStorage, key: int, part_bytes: int | None = None) -> None:
        watched = _Watched(storage, self._gone)
        watched.key = key
        whole = self._size(storage)
        watched.size = whole if part_bytes is None else min(part_bytes, whole)
        watched.in_part = watched.size < whole
        self._live[key] = watched
        self.current += watched.size

    def _size(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes() if self._device is None or storage.device == self._device else 0

    def _size_of_part(self, tensor: torch.Tensor) -> int:
        """First to last element, all of the storage where elements have no strides."""
        if tensor.layout is not torch.strided:
            return tensor.untyped_storage().nbytes()
        if not tensor.numel():
            return 0
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        return (int(last) + 1) * tensor.element_size()

    def _count_more(self, watched: _Watched, size: int) -> None:
        if size > watched.size:
            self.current += size - watched.size
            watched.size = size

    def _gone(self, watched: Any) -> None:
        key, size = watched.key, watched.size
        if self._live.get(key) is watched:
            del self._live[key]
            self.current -= size

    def _resized(self, watched: _Watched, storage: torch.UntypedStorage) -> None:
        size = self._size(storage)
        self.current += size - watched.size
        watched.size, watched.in_part = size, False

    def _report_read(self, key: int, tensor: torch.Tensor) -> None:
        starts, indices = self._ours[key]
        if self._on_param_read is None or not indices:
            return
        if len(indices) == 1:
            self._on_param_read(indices[0])
            return
        at = bisect.bisect_right(starts, tensor.storage_offset() * tensor.element_size())
        self._on_param_read(indices[max(0, at - 1)])


def _collect(values: Iterable[Any], into: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            into.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, into)
