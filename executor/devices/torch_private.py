"""Private names of torch, each in one function or constant.

All are older than torch 2.6, the oldest supported, unless their docstring says otherwise; torch26.py has the
differences of 2.6 and 2.7.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import eager_transforms, vmap
from torch.autograd.graph import GradientEdge
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Operators as a dispatch mode sees them. ATen's names of operators that users do not call begin with an underscore.
LOCAL_SCALAR = torch.ops.aten._local_scalar_dense  # tensor.item()
TO_COPY = torch.ops.aten._to_copy  # tensor.to() another dtype or device
UNSAFE_VIEW = torch.ops.aten._unsafe_view
RESHAPE_ALIAS = torch.ops.aten._reshape_alias
EMBEDDING_BAG = torch.ops.aten._embedding_bag
GROUPED_MM: Any = getattr(torch.ops.aten, "_grouped_mm", None)  # torch 2.6 lacks it


def transforms_running() -> bool:
    """Whether one of torch.func (grad, vjp, jvp, vmap, ...) runs in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def show_wrapped(look: Callable[[Any], object]) -> None:
    """torch.func calls `look` with each argument before it wraps it: operators do not call the wrapper's torch
    function."""
    for module, name in ((eager_transforms, "_wrap_tensor_for_grad"), (vmap, "_add_batch_dim")):
        setattr(module, name, _looked_at(getattr(module, name), look))


def _looked_at(wrap: Callable[..., Any], look: Callable[[Any], object]) -> Callable[..., Any]:
    @functools.wraps(wrap)
    def looked_at(value: Any, *rest: Any, **more: Any) -> Any:
        look(value)
        return wrap(value, *rest, **more)

    return looked_at


def storage_key(of: torch.Tensor | torch.UntypedStorage) -> int:
    """Address of the C++ storage, the same for every view, unique while the storage lives. Raises NotImplementedError
    or RuntimeError for a tensor without storage (sparse, ...).
    """
    storage = of.untyped_storage() if isinstance(of, torch.Tensor) else of
    return int(storage._cdata)


@contextlib.contextmanager
def outside_compiled_code() -> Iterator[None]:
    """torch's compiler does not watch this thread."""
    set_eval_frame: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
    before = set_eval_frame(None)
    try:
        yield
    finally:
        set_eval_frame(before)


def without_dispatch() -> contextlib.AbstractContextManager[None]:
    """No mode or subclass sees operators."""
    return torch._C._DisableTorchDispatch()


def dispatch_keys(tensor: torch.Tensor) -> int:
    return torch._C._dispatch_keys(tensor).raw_repr()  # sets of torch 2.6 are compared by identity


def fake_twin(kind: Any, meta: torch.Tensor, device: torch.device, state: dict[str, Any]) -> Any:
    # As kind(...) with attributes that are known.
    made = torch.Tensor._make_subclass(kind, meta, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    made.__dict__.update(state)
    return made


def as_parameter(tensor: Any, requires_grad: bool) -> Any:
    tensor._is_param = True  # as nn.Parameter does for subclasses
    return tensor.requires_grad_(requires_grad)


def version_of(tensor: torch.Tensor) -> int:
    """In-place writes to the tensor and other views of its storage."""
    return tensor._version


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Name -> own parameter, None where it registered none. Writes change the module."""
    return module._parameters


def buffer_table(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """As `parameter_table`, for buffers."""
    return module._buffers


def non_persistent_buffers(module: nn.Module) -> set[str]:
    return module._non_persistent_buffers_set


def writes_in_place(operator: Any) -> bool:
    return bool(operator._schema.is_mutable)


def node_class(function: type[torch.autograd.Function]) -> type:
    """Of the nodes that the function puts into a graph."""
    found: type = function._backward_cls
    return found


def backward_from(roots: Sequence[torch.Tensor | GradientEdge], gradients: Sequence[torch.Tensor]) -> None:
    """Takes edges of a graph from torch 2.7 on."""
    torch.autograd.graph._engine_run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


_CALL = "_call_impl"


def call_of(module: nn.Module) -> Callable[..., Any]:
    """What `module(...)` calls. A wrapper of it has the hooks inside, unlike a wrapper of `forward`."""
    found: Callable[..., Any] = getattr(module, _CALL)
    return found


def replace_call(module: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Returns a function that undoes this."""
    return override(module, _CALL, call)


def override(module: nn.Module, name: str, value: object) -> Callable[[], None]:
    """An attribute in place of the class's; returns a function that undoes this."""
    module.__dict__[name] = value

    def remove() -> None:
        module.__dict__.pop(name, None)

    return remove


# -- torch.distributed: a process group that was made without `new_group` is unknown to the public functions ----------


def all_gather(group: Any, into: torch.Tensor, mine: torch.Tensor, options: Any) -> Any:
    """Begins to fill `into` [ranks * n] with every rank's `mine` [n]. Returns the work."""
    return group._allgather_base(into, mine, options)


def reduce_scatter(group: Any, into: torch.Tensor, whole: torch.Tensor, options: Any) -> Any:
    """Begins to fill `into` [n] with the sum of this rank's slices of every `whole` [ranks * n]. Returns the work."""
    return group._reduce_scatter_base(into, whole, options)


def default_store() -> Any:
    """The key-value store through which the processes met."""
    return dist.distributed_c10d._get_default_store()


def limit_nccl(options: Any, limit: timedelta) -> None:
    """NCCL's group takes the limit of a collective only in its options."""
    options._timeout = limit


def modes_of_thread() -> contextlib.AbstractContextManager[None]:
    """The calling thread's grad mode, autocast, dispatch and function modes, CUDA device and stream, to be entered once
    in another thread."""
    grad = torch.is_grad_enabled()
    casts = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
        for kind in ("cpu", "cuda")
    ]
    dispatch = _get_current_dispatch_mode_stack()
    function = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            for kind, dtype, enabled, cached in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            for mode in function:
                torch.overrides._push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(torch.overrides._pop_mode)
            for mode in dispatch:
                torch.utils._python_dispatch._push_mode(mode)
                stack.callback(torch.utils._python_dispatch._pop_mode)
            stack.enter_context(torch.set_grad_enabled(grad))
            yield

    return enter()


@functools.cache
def autocast_operators(device: str) -> dict[str, Any]:
    """The operators that autocast treats on "CPU" or "CUDA", by name ("softmax.int")."""
    operators: dict[str, Any] = {}
    for name in torch._C._dispatch_get_all_op_names():
        space, _, bare = name.partition("::")
        if space == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(name, f"Autocast{device}"):
            packet, _, overload = bare.partition(".")
            operators[bare] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return operators


def without_autocast(device: str) -> contextlib.AbstractContextManager[None]:
    """A context in which autocast of the device ("CPU", "CUDA") treats no operator."""
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))
    return torch._C._ExcludeDispatchKeyGuard(key)
