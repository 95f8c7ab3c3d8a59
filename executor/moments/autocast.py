"""Autocast of CPU tensors by another device's rules, for captures for CUDA.

[Note: rules of autocast] A capture runs on fake CPU tensors, and CUDA's rules run pow, exp, sum, norms, softmax and
others in fp32, which the CPU's leave in 16 bits. Every build of torch has both kernels, by the dispatch keys
AutocastCUDA and AutocastCPU, but CUDA's cast CUDA tensors alone. Inside `rules_of("cuda")`, each operator with a kernel
of CUDA's key gets one of the CPU's key that does the same to CPU tensors, and the CPU's others get none. What is done
follows from the signature, except for those listed here. CUDA's softmax goes from fp16 to fp32 in one kernel, where the
CPU's first copies to fp32.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from executor.devices.torch_private import autocast_operators, without_autocast

aten = torch.ops.aten

IN_16_BITS = frozenset((
    "_convolution", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "addmv",
    "addr", "chain_matmul", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "einsum", "gru_cell",
    "linalg_multi_dot", "lstm_cell", "mv", "rnn_relu_cell", "rnn_tanh_cell",
))  # fmt: skip
"""Operators of CUDA alone whose arguments are cast to the dtype of autocast."""
IN_THE_WIDEST = frozenset((
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot",
    "vdot",
))  # fmt: skip
"""Operators whose arguments are cast to the widest dtype among them."""
WITH_DTYPE = {aten.norm.Scalar: aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim: aten.norm.ScalarOpt_dim_dtype}
"""Operator -> its form that takes the dtype of the result. Operators that take it run with fp32 where none is given."""
DIFFERENT = frozenset(("grid_sampler", "prod"))
"""Operators that both devices treat, each in its own way."""
FROM_HALF = {"softmax.int": aten._softmax.default, "log_softmax.int": aten._log_softmax.default}
"""Operator -> its kernel, which takes fp16 and gives fp32 where it is told to."""


@contextlib.contextmanager
def rules_of(device: str) -> Iterator[None]:
    """Autocast treats CPU tensors by the rules of "cuda" (any other: the CPU's own), and switches of the device's
    autocast act on them."""
    if device != "cuda":
        yield
        return
    theirs, own = autocast_operators("CUDA"), autocast_operators("CPU")
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # that a kernel takes the place of torch's
        for name, operator in theirs.items():
            if name not in own or _bare(name) in DIFFERENT:
                library.impl(name, _kernel(_bare(name), operator), "AutocastCPU")
        for name, kernel in FROM_HALF.items():
            library.impl(name, _from_half(name, kernel), "AutogradCPU")
        for name in own.keys() - theirs.keys():
            library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        stack.enter_context(_switched_as_the_cpu(device))
        if enabled:
            stack.enter_context(torch.autocast("cpu", dtype, cache_enabled=torch.is_autocast_cache_enabled()))
        yield


def _bare(name: str) -> str:
    return name.partition(".")[0]


def _kernel(name: str, operator: Any) -> Callable[..., Any]:
    with_dtype = WITH_DTYPE.get(operator, operator)
    if all(argument.name != "dtype" for argument in with_dtype._schema.arguments):

        def casting(*args: Any, **kwargs: Any) -> Any:
            dtypes = {t.dtype for t in tree_leaves((args, kwargs)) if _is_cast(t)}
            narrow = name in IN_16_BITS or (name in IN_THE_WIDEST and torch.float32 not in dtypes)
            to = torch.get_autocast_dtype("cpu") if narrow else torch.float32
            with without_autocast("CPU"):
                args, kwargs = tree_map(lambda each: each.to(to) if _is_cast(each) else each, (args, kwargs))
                return operator(*args, **kwargs)

        return casting

    arguments = operator._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}

    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        with without_autocast("CPU"):
            if not _is_cast(args[0]):
                return operator(*args, **kwargs)
            values = {**defaults, **dict(zip((argument.name for argument in arguments), args)), **kwargs}
            values["dtype"] = values.get("dtype") or torch.float32
            return with_dtype(**values)

    return in_fp32


def _from_half(name: str, kernel: Any) -> Callable[..., Any]:
    operator = getattr(getattr(aten, _bare(name)), name.partition(".")[2])

    def softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if tensor.dtype is torch.float16 and dtype is torch.float32:
            return kernel(tensor, dim, True)
        return operator.decompose(tensor, dim, dtype)

    return softmax


def _is_cast(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


@contextlib.contextmanager
def _switched_as_the_cpu(device: str) -> Iterator[None]:
    """torch's switches of the device's autocast are the CPU's, unless torch lacks the device: torch.autocast then
    switches it off anyway."""
    if not torch.cuda.is_available():
        yield
        return
    switches = {name: getattr(torch, name) for name in SWITCHES}

    def of_the_cpu(switch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda kind=device, *value: switch("cpu" if kind == device else kind, *value)

    try:
        for name, switch in switches.items():
            setattr(torch, name, of_the_cpu(switch))
        yield
    finally:
        for name, switch in switches.items():
            setattr(torch, name, switch)


SWITCHES = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")
"""torch's functions whose first argument is a device. (Without one, is_autocast_enabled is of CUDA.)"""
