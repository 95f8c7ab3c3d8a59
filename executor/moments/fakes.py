"""Results of operators on fake tensors, remembered: torch's own memory is slow and leaves out more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from executor.devices.torch_private import as_parameter, dispatch_keys, fake_twin, storage_key, without_dispatch
from executor.moments.blind import OWN

aten = torch.ops.aten
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_META, _CPU = torch.device("meta"), torch.device("cpu")


class _Result(NamedTuple):
    """of: argument that it is or views, -1 for a new storage.
    form: None for the argument itself.
    """

    of: int
    form: tuple[Any, ...] | None


_Results = tuple[type, list[Any]]  # type of what is returned, its parts: a _Result, None or an int
# Operator and forms of its arguments -> results, None where it has to run.
_KNOWN: dict[tuple[Any, ...], _Results | None] = {}
_MOST = 50_000  # operators known at once, 40 MB: a job captures each new shape of its batches


class Fakes:
    """Answers as `mode`, without symbolic sizes, would."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        mode.cache_enabled = False  # it would be asked once for each answer
        self._states: dict[torch.device, dict[str, Any]] = {}  # attributes of the mode's tensors

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Any:
        return self._part(_Result(-1, (size, stride, 0, dtype, _CPU)), ())

    def parameter(self, made: torch.Tensor, requires_grad: bool) -> Any:
        return as_parameter(self.run(aten.detach.default, (made,), {}), requires_grad)

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), *kwargs]
        tensors: list[Any] = []
        if not (self._read(args, key, tensors) and self._read(kwargs.values(), key, tensors)):
            return func(*args, **kwargs)
        asked = tuple(key)
        known = _KNOWN.get(asked)
        if known is not None:
            return self._made(known, tensors)
        if asked in _KNOWN:
            return func(*args, **kwargs)
        before = [(_form(tensor), storage_key(tensor)) for tensor in tensors]
        out = func(*args, **kwargs)
        changed = before != [(_form(tensor), storage_key(tensor)) for tensor in tensors]
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        # The fake version of another's operator may ask more than its arguments.
        _KNOWN[asked] = self._described(out, tensors) if func.namespace in OWN and not changed else None
        return out

    def _read(self, values: Iterable[Any], key: list[Any], tensors: list[Any]) -> bool:
        """False for a value that no key tells."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not self._is_plain(value):
                    return False
                key += _form(value)
                key += value.requires_grad, value.untyped_storage().nbytes()
                tensors.append(value)
            elif kind in _PLAIN:
                key += kind, value  # 1 == 1.0 == True
            elif kind is list or kind is tuple:
                key += kind, len(value)
                if not self._read(value, key, tensors):
                    return False
            else:
                return False
        return True

    def _is_plain(self, tensor: FakeTensor) -> bool:
        return (
            tensor.fake_mode is self._mode
            and tensor.constant is None
            and tensor.layout is torch.strided
            and not tensor.is_complex()
            and not tensor.is_neg()
            and not tensor.is_inference()
        )

    def _described(self, out: Any, tensors: Sequence[Any]) -> _Results | None:
        """None where `_made` would give something else."""
        places = [storage_key(tensor) for tensor in tensors]
        parts = out if type(out) in (tuple, list) else (out,)
        results: list[Any] = []
        new: set[int] = set()
        for part in parts:
            if part is None or type(part) is int:
                results.append(part)
                continue
            if type(part) is not FakeTensor or not self._is_plain(part):
                return None
            if part.numel() and not part.untyped_storage().nbytes():  # freed by hand; a view takes them back
                return None
            same = [i for i, tensor in enumerate(tensors) if tensor is part]
            place = storage_key(part)
            if len(same) == 1:
                results.append(_Result(same[0], None))
            elif places.count(place) == 1:
                results.append(_Result(places.index(place), _form(part)))
            elif place in places or place in new:
                return None
            else:
                results.append(_Result(-1, _form(part)))
                new.add(place)
        described = type(out), results
        made = self._made(described, tensors)
        alike = all(map(_alike, parts, made if parts is out else (made,)))
        return described if alike else None

    def _made(self, results: _Results, tensors: Sequence[Any]) -> Any:
        kind, described = results
        parts = [self._part(one, tensors) if type(one) is _Result else one for one in described]
        return kind(parts) if kind is tuple or kind is list else parts[0]

    def _part(self, result: _Result, tensors: Sequence[Any]) -> Any:
        of, form = result
        if form is None:
            return tensors[of]
        size, stride, offset, dtype, device = form
        with without_dispatch():
            if of < 0:
                meta = torch.empty_strided(size, stride, dtype=dtype, device=_META)
            else:
                meta = torch.empty(0, dtype=dtype, device=_META)
                meta.set_(tensors[of].untyped_storage(), offset, size, stride)
            state = self._states.get(device)
            if state is None:
                state = self._states[device] = FakeTensor(self._mode, meta, device).__dict__
            return fake_twin(FakeTensor, meta, device, state)


def _form(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device


def _alike(given: Any, made: Any) -> bool:
    return given is made or (
        _form(given) == _form(made)
        and given.requires_grad == made.requires_grad
        and given.untyped_storage().nbytes() == made.untyped_storage().nbytes()
        and dispatch_keys(given) == dispatch_keys(made)
    )
