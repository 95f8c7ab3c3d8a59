"""What torch 2.6 does not tell is found out by counting: the same answers as a newer torch gives."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from executor.torch26 import count_hooks, saved_tensor_hooks_in_force


def test_counting_answers_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    where = torch._C._autograd
    for name in ("_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"):
        monkeypatch.setattr(where, name, getattr(where, name))  # put back afterwards
    counted = count_hooks(where)

    def answers() -> tuple[bool, bool]:
        return counted(), saved_tensor_hooks_in_force()

    hooks = saved_tensors_hooks(lambda saved: saved, lambda packed: packed)
    assert answers() == (False, False)
    with hooks:
        assert answers() == (True, True)
        with saved_tensors_hooks(lambda saved: saved, lambda packed: packed):
            assert answers() == (True, True)
        assert answers() == (True, True)
        elsewhere: list[tuple[bool, bool]] = []
        thread = threading.Thread(target=lambda: elsewhere.append(answers()))
        thread.start()
        thread.join()
        assert elsewhere == [(False, False)]
    assert answers() == (False, False)
    with pytest.raises(ZeroDivisionError), hooks:
        raise ZeroDivisionError
    assert answers() == (False, False)
