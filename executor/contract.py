"""The loop contract: the acts of a training loop on a prepared model, and their results.

An act that an offloaded optimizer cannot support raises ContractError before any parameter changes and names the
replacement; every other act behaves as in plain torch. `session/cursor.py` has the table.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from executor.devices.packed import is_packed, same_elements
from executor.devices.torch_private import show_wrapped, storage_key, version_of
from pstar_sim.errors import ContractError

# torch's own attributes, below the contract (Any, because torch's stubs type them as their values)
_BASE_GRAD: Any = torch._C.TensorBase.grad
_BASE_REQUIRES_GRAD: Any = torch._C.TensorBase.requires_grad


class ParameterAccess(Protocol):
    """What a prepared parameter, which outlives its run, asks of it (`session.reader.Reader`)."""

    def grad_of(self, tensor: int) -> torch.Tensor | None: ...

    def set_grad_of(self, tensor: int, value: torch.Tensor | None) -> None: ...

    def see_requires_grad(self, tensor: int, value: bool) -> None: ...

    def touch(self, func: Any, parameters: Sequence[nn.Parameter], args: Any, kwargs: Any) -> Any: ...

    def name_of(self, tensor: int) -> str: ...

    def current_value(self, tensor: int) -> torch.Tensor: ...


def raw_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Without the ContractError of `p.grad`."""
    if type(parameter) is ChunkParameter:  # has no torch function
        found: torch.Tensor | None = _BASE_GRAD.__get__(parameter)
        return found
    with torch._C.DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = _BASE_GRAD.__get__(parameter)
        return grad


def set_raw_grad(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    if type(parameter) is ChunkParameter:
        _BASE_GRAD.__set__(parameter, value)
        return
    with torch._C.DisableTorchFunctionSubclass():
        _BASE_GRAD.__set__(parameter, value)


def drop_raw_grads(parameters: Iterable[torch.Tensor]) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            _BASE_GRAD.__set__(parameter, None)


def tensor_of(parameter: torch.Tensor) -> int | None:
    """Index in the plan; None for a parameter that is not prepared."""
    found: int | None = getattr(parameter, "plan_tensor", None)
    return found


def _changes_nothing(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """As when an 8-bit linear module gives its parameter its own codes after each forward."""
    with torch._C.DisableTorchFunctionSubclass():
        return same_elements(value, parameter)


class ChunkParameter(nn.Parameter):
    """A parameter whose data is a view of a chunk on the gpu. Like nn.Parameter it has torch functions disabled, and
    costs nothing in torch's calls.

    plan_version: the parameter's `_version`, raised by every write in place but not by writes of its chunk.
    """

    plan_reader: weakref.ref[Any]
    plan_tensor: int
    plan_version: int

    @property
    def data(self) -> torch.Tensor:
        return self.detach()  # its writes raise the version

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if type(self) is ChunkParameter and not _changes_nothing(self, value):
            raise write_refused(reader_of(self).name_of(self.plan_tensor))
        _DATA_SET(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        return reader_of(self).grad_of(self.plan_tensor)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        reader_of(self).set_grad_of(self.plan_tensor, value)

    @grad.deleter
    def grad(self) -> None:
        reader_of(self).set_grad_of(self.plan_tensor, None)

    @property
    def requires_grad(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return bool(_BASE_REQUIRES_GRAD.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ChunkParameter:
        reader_of(self).see_requires_grad(self.plan_tensor, bool(requires_grad))
        with torch._C.DisableTorchFunctionSubclass():
            _BASE_REQUIRES_GRAD.__set__(self, bool(requires_grad))
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = copied = self._copied()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _copied(self) -> nn.Parameter:
        if is_packed(self):
            name = reader_of(self).name_of(self.plan_tensor)
            raise ContractError(f"{name!r} is quantised, and its scales are in its chunk; close the session, then copy")
        return nn.Parameter(reader_of(self).current_value(self.plan_tensor), requires_grad=self.requires_grad)


class ParkedParameter(ChunkParameter):
    """A parameter whose data must not be read: its chunk is elsewhere or holds a gradient, or no module is running.
    Torch operations on it go to the session."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found: list[nn.Parameter] = []
        _parameters_in(args, found)
        _parameters_in(kwargs.values(), found)
        return reader_of(next(p for p in found if isinstance(p, ParkedParameter))).touch(func, found, args, kwargs)

    # Two methods that torch does not pass to torch functions.

    def as_subclass(self, cls: Any) -> Any:
        return reader_of(self).touch(torch.Tensor.as_subclass, [self], (self, cls), {})

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self:  # so torch.nn.utils.parametrize keeps a parameter
            return self
        return reader_of(self).touch(torch.Tensor.set_, [self], (self, *args), kwargs)


def _read_if_parked(value: Any) -> None:
    if isinstance(value, ParkedParameter):
        value.detach()  # refused outside every module; inside, its chunk is fetched


show_wrapped(_read_if_parked)


def reader_of(parameter: Any) -> ParameterAccess:
    reader: ParameterAccess | None = parameter.plan_reader()
    if reader is None:
        raise ContractError("this parameter's session is gone; keep the optimizer that executor.prepare returned")
    return reader


def reader_left(parameter: nn.Parameter) -> Any | None:
    """None if the session is gone."""
    return parameter.plan_reader()  # type: ignore[attr-defined]


def adopt(parameter: nn.Parameter, reader: ParameterAccess, tensor: int) -> None:
    """Make a parameter object a parked one."""
    parameter.plan_reader = weakref.ref(reader)  # type: ignore[attr-defined]
    parameter.plan_tensor = tensor  # type: ignore[attr-defined]
    parameter.plan_mark = weakref.ref(parameter)  # type: ignore[attr-defined]  # torch.utils.swap_tensors then refuses
    parameter.plan_version = version_of(parameter)  # type: ignore[attr-defined]
    if not isinstance(parameter, ChunkParameter):
        parameter.plan_class = type(parameter)  # type: ignore[attr-defined]
    parameter.__class__ = ParkedParameter


def disown(parameter: nn.Parameter) -> None:
    parameter.__class__ = parameter.plan_class  # type: ignore[attr-defined]
    for name in ("reader", "tensor", "version", "mark", "class"):
        delattr(parameter, f"plan_{name}")


def _parameters_in(values: Iterable[Any], into: list[nn.Parameter]) -> None:
    for value in values:
        if isinstance(value, ChunkParameter):
            into.append(value)
        elif isinstance(value, (list, tuple)):
            _parameters_in(value, into)
        elif isinstance(value, Mapping):
            _parameters_in(value.values(), into)


def map_parameters(value: Any, replace: Callable[[ChunkParameter], Any]) -> Any:
    """Replace every prepared parameter in arguments of a torch function."""
    if isinstance(value, ChunkParameter):
        return replace(value)
    if type(value) in (list, tuple):
        return type(value)(map_parameters(item, replace) for item in value)
    if isinstance(value, dict):
        return {key: map_parameters(item, replace) for key, item in value.items()}
    return value


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments changed in place: `out=`, or the first. Either may be a list of tensors."""
    target = kwargs.get("out")
    if target is None and (_in_place(func) or kwargs.get("inplace") is True):
        target = args[0] if args else next(iter(kwargs.values()), None)
    return list(target) if isinstance(target, (list, tuple)) else [target]


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "").partition(".")[0]  # an operator's name ends with that of its overload
    if name.startswith("__"):
        return name in _WRITING_DUNDERS or (name == "__set__" and func == _DATA_SET)
    return name.endswith("_") and name != "requires_grad_"


_WRITING_DUNDERS = frozenset(
    f"__{name}__" for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
                               "ilshift", "irshift", "setitem", "delitem")
)  # fmt: skip
_DATA_SET = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Snapshot(torch.Tensor):
    """A copy of a parameter's value, or a view of one. Reading is plain torch; writing raises, because the model would
    not see the change. After a Trainer's training the copy becomes the parameter's value. Its NumPy array is read-only.

    adopt: does so, where the run may end; returns whether it did.
    """

    adopt: Callable[[], bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for target in written(func, args, kwargs):
            if isinstance(target, Snapshot) and not target.adopt():
                raise ContractError(_WRITE.format(name="a prepared model's parameter"))
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if isinstance(out, np.ndarray):
            out.flags.writeable = False
        if type(out) in (list, tuple):
            return type(out)(_still_a_copy(item, args) for item in out)
        return _still_a_copy(out, args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self._plain().clone()
        return copied

    def _plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(torch.Tensor)


def _still_a_copy(out: Any, args: Sequence[Any]) -> Any:
    if not isinstance(out, torch.Tensor) or any(out is argument for argument in args):
        return out
    shared = next((a for a in args if isinstance(a, Snapshot) and _same_storage(a, out)), None)
    return out.as_subclass(torch.Tensor) if shared is None else snapshot_of(out, shared.adopt)


def snapshot_of(value: torch.Tensor, adopt: Callable[[], bool]) -> Snapshot:
    made = value.as_subclass(Snapshot)
    made.adopt = adopt
    return made


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return storage_key(a) == storage_key(b)
        except (NotImplementedError, RuntimeError):  # a tensor without storage (sparse, ...)
            return False


def changes_nothing(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether `fn`, mapped over the module's tensors by Module._apply, changes none, as `to()` for a module already
    there."""
    for dtype, device in {(t.dtype, t.device) for t in (*module.parameters(), *module.buffers())}:
        for shape in ((1,), (1, 2, 2, 2)):  # four dimensions, so that a change of memory format shows
            probe = torch.zeros(shape, dtype=dtype, device=device)
            if fn(probe) is not probe or probe.is_shared():  # type: ignore[no-untyped-call]
                return False
    return True


_WRITE = (
    "{name} is written outside the optimizer: the master copy and the chunk's other copies would not know; change "
    "weights before executor.prepare, or end the session with session.close() and prepare again"
)


def write_refused(name: str) -> ContractError:
    return ContractError(_WRITE.format(name=f"parameter {name!r}"))


def _metadata() -> frozenset[Any]:
    getters = [
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "is_leaf",
        "grad_fn",
        "requires_grad",
        "is_cpu",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "is_sparse_csr",
        "is_quantized",
        "is_nested",
        "is_mkldnn",
        "is_mps",
        "is_xpu",
        "itemsize",
        "nbytes",
        "names",
        "_version",
        "output_nr",
        "retains_grad",
        "name",
        "grad",
        "_backward_hooks",
        "_base",
        "_post_accumulate_grad_hooks",
    ]
    methods = [
        "size",
        "dim",
        "numel",
        "nelement",
        "ndimension",
        "element_size",
        "stride",
        "storage_offset",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "get_device",
        "__len__",
        "__hash__",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "is_same_size",
        "is_signed",
        "has_names",
        "untyped_storage",
        "dim_order",
        "is_inference",
        "retain_grad",
    ]
    found: set[Any] = set()
    for name in getters:
        attribute: Any = getattr(torch.Tensor, name, None)
        if hasattr(attribute, "__get__"):
            found.add(attribute.__get__)
            if name == "grad":
                found.add(attribute.__set__)
    found.update(getattr(torch.Tensor, name) for name in methods if callable(getattr(torch.Tensor, name, None)))
    found.update({torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size})
    return frozenset(found)


_METADATA = _metadata()
