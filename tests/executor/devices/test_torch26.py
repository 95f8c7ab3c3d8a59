"""What torch 2.6 does not tell is found out by watching: the same answers as a newer torch gives."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from executor.devices.torch26 import saved_tensor_hooks, watch_hooks
from executor.moments.compiled import untraced


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


def test_a_hook_loses_no_reference_to_none() -> None:
    """torch before 2.9 loses one whenever it is asked for the compiler's callback. From Python 3.12 on None counts
    none."""
    heard: list[object] = []
    hook = untraced(lambda module: heard.append(module))
    before = sys.getrefcount(None)
    for _ in range(2000):
        hook(0)
    assert len(heard) == 2000
    assert abs(sys.getrefcount(None) - before) < 1000
