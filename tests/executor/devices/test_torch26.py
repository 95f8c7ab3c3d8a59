"""What torch 2.6 does not tell is found out by watching: the same answers as a newer torch gives."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from executor.devices.torch26 import saved_tensor_hooks, watch_hooks


def test_watching_answers_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    where = torch._C._autograd
    for name in ("_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"):
        monkeypatch.setattr(where, name, getattr(where, name))  # put back afterwards
    watched = watch_hooks(where)

    def pair() -> tuple[object, object]:
        return (lambda saved: saved), (lambda packed: packed)

    def agree(expected: tuple[object, object] | None) -> bool:
        return watched() == saved_tensor_hooks() == expected

    outer, inner = pair(), pair()
    assert agree(None)
    with saved_tensors_hooks(*outer):
        assert agree(outer)
        with saved_tensors_hooks(*inner):
            assert agree(inner)
        assert agree(outer)
        elsewhere: list[bool] = []
        thread = threading.Thread(target=lambda: elsewhere.append(agree(None)))
        thread.start()
        thread.join()
        assert elsewhere == [True]
    assert agree(None)
    with pytest.raises(ZeroDivisionError), saved_tensors_hooks(*outer):
        raise ZeroDivisionError
    assert agree(None)
