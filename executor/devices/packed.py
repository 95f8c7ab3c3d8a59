"""Packed parameters: frozen matrices that bitsandbytes stores with their scales ([Note: storage] in dtypes.py).

The parameter of a `Linear4bit` has the codes, and the quantisation state scales as tensors; an 8-bit linear module
keeps both in a state of its own. In a chunk the parts of a matrix lie one behind the other: codes, fp32 scales, 8-bit
scales, each a view of the chunk. Tables of the code are the same for all matrices and stay where these are used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from executor.devices.torch_private import storage_key
from pstar_sim.dtypes import STORAGE
from pstar_sim.errors import ModelError

_Make = Callable[[torch.Tensor], torch.Tensor]


class _Part(NamedTuple):
    """owner: whose attribute the tensor is; None: it is the parameter itself."""

    owner: Any
    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def room_bytes(self) -> int:
        return -(-self.size_bytes // 4) * 4


def mark_packed(model: nn.Module) -> None:
    """Note where their parts are. Raises ModelError for a form that no chunk holds."""
    for prefix, module in model.named_modules():
        weight = getattr(getattr(module, "base_layer", None), "weight", None)
        if getattr(module, "lora_magnitude_vector", None) and weight is not None and form_of(weight) is not None:
            raise ModelError(
                f"module {prefix!r} has DoRA beside a quantised matrix, whose parameter peft replaces in each forward "
                "pass on a CPU; train LoRA beside it, or DoRA beside a base in bf16"
            )
        for name, parameter in module._parameters.items():
            form = None if parameter is None else form_of(parameter)
            if parameter is None or form is None or is_packed(parameter):
                continue
            scales = [(owner, key, getattr(owner, key)) for owner, key in _scales(module, name)]
            parts = tuple(_Part(owner, key, t.shape, t.dtype) for owner, key, t in [(None, "data", parameter), *scales])
            parameter.plan_parts = parts
            size, (dtype, shape) = sum(part.room_bytes for part in parts), form
            if size != (known := STORAGE[dtype].stored(shape)):
                raise ModelError(
                    f"parameter '{prefix}.{name}' of shape {list(shape)} has {size} bytes with its scales; a chunk "
                    f"holds {known} for {dtype}, with the blocks that bitsandbytes makes by default"
                )


def _scales(module: nn.Module, name: str) -> list[tuple[Any, str]]:
    parameter: Any = module._parameters[name]
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return [(state.state2, "absmax"), (state, "absmax")] if state.nested else [(state, "absmax")]
    if parameter.CB is not None:
        module.init_8bit_state()  # type: ignore[operator]  # as the module's first forward does
    return [(module.state, "SCB")]


def scales_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each scale of the module's own packed parameters, with the name of its parameter."""
    for name, parameter in module._parameters.items():
        if parameter is not None and form_of(parameter) is not None:
            yield from ((name, getattr(owner, key)) for owner, key in _scales(module, name))


def same_elements(value: object, view: torch.Tensor) -> bool:
    """Whether it is a tensor that begins where the view does, in the same storage."""
    if not isinstance(value, torch.Tensor) or storage_key(value) != storage_key(view):
        return False
    return _begin(value) == _begin(view)


def _begin(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def is_packed(parameter: torch.Tensor) -> bool:
    """Whether `mark_packed` has seen it."""
    return bool(_parts(parameter))


def _parts(parameter: torch.Tensor) -> tuple[_Part, ...]:
    parts: tuple[_Part, ...] = getattr(parameter, "plan_parts", ())
    return parts


def form_of(parameter: torch.Tensor) -> tuple[str, tuple[int, ...]] | None:
    """(dtype of BASES, shape of the matrix); None for a parameter that is not packed."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return "nf4" if state.nested else "nf4-single", tuple(int(extent) for extent in state.shape)
    if parameter.dtype is torch.int8 and getattr(parameter, "has_fp16_weights", True) is False:
        return "int8", tuple(int(extent) for extent in parameter.shape)
    return None


def pack(parameter: torch.Tensor) -> torch.Tensor:
    """A packed parameter's bytes as in a chunk, any other's elements, flat."""
    parts = _parts(parameter)
    if not parts:
        return parameter.detach().reshape(-1)
    flat = torch.zeros(sum(part.room_bytes for part in parts), dtype=torch.uint8, device=parameter.device)
    for part, view in _views(parts, flat):
        view.copy_(parameter.detach() if part.owner is None else getattr(part.owner, part.name))
    return flat


def point_at(parameter: nn.Parameter, views: Sequence[torch.Tensor]) -> None:
    """A plain parameter, with its scales, gets new memory: views that `unpacked` makes."""
    parameter.data = views[0]
    for part, view in zip(_parts(parameter)[1:], views[1:]):
        setattr(part.owner, part.name, view)
        _tables_to(part.owner, view.device)
        if hasattr(part.owner, "CB"):
            part.owner.CB = parameter.data


def unpacked(parameter: torch.Tensor, flat: torch.Tensor) -> list[torch.Tensor]:
    """Views of what `pack` returns, or of a chunk's slot: parameter, then scales."""
    parts = _parts(parameter)
    if not parts:
        return [flat.view(parameter.shape)]
    return [view for _, view in _views(parts, flat)]


def twin_of(module: nn.Module, name: str, made: torch.Tensor, make: _Make) -> Callable[[], None]:
    """The twin gets the same form, with scales by `make`, and the module a state that names it. Returns a function that
    gives the module its own state back."""
    parameter: Any = module._parameters[name]
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        made.quant_state = twin = copy.copy(state)  # type: ignore[attr-defined]
        twin.absmax = make(state.absmax)
        if state.nested:
            twin.state2 = copy.copy(state.state2)
            twin.state2.absmax = make(state.state2.absmax)
        return lambda: None
    kept: Any = module.state
    made.has_fp16_weights, made.CB, made.SCB = False, None, None  # type: ignore[attr-defined]
    module.state = copy.copy(kept)
    module.state.CB = made.data  # type: ignore[union-attr]
    module.state.SCB = make(parameter.SCB if kept.SCB is None else kept.SCB)  # type: ignore[union-attr]

    def undo() -> None:
        module.state = kept

    return undo


def skeleton_of(module: nn.Module, name: str, memo: dict[int, Any]) -> None:
    """Lets `copy.deepcopy` copy a packed parameter without memory."""
    parameter: Any = module._parameters[name]
    twin = memo[id(parameter)]
    codes = getattr(getattr(module, "state", None), "CB", None)
    if codes is not None:
        memo[id(codes)] = twin.data
    twin_of(module, name, twin, torch.clone)()


def _views(parts: Sequence[_Part], flat: torch.Tensor) -> Iterator[tuple[_Part, torch.Tensor]]:
    start = 0
    for part in parts:
        yield part, flat[start : start + part.size_bytes].view(part.dtype).view(part.shape)
        start += part.room_bytes


def _tables_to(owner: Any, device: torch.device) -> None:
    for name in ("code", "offset"):
        table = getattr(owner, name, None)
        if isinstance(table, torch.Tensor) and table.device != device:
            setattr(owner, name, table.to(device))
