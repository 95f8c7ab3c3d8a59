"""Gradients in the slots of the master copy, where the working list is fp32 too and nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from executor.saving.checkpoint import save
from pstar_sim.core.step import Place
from pstar_sim.workload.optimizers import MASTER_LIST

GPU = Place.GPU


def backward(run: Any) -> None:
    """One batch forward and backward, on both sides."""
    batch = next(run.batches)
    run.model(**batch).backward()
    run.reference.model(**batch).backward()


def step(run: Any) -> None:
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.reference.step()


def lists(run: Any, read: Callable[..., torch.Tensor], name: str) -> list[torch.Tensor]:
    """Each parameter's slot of a list on the gpu, in the order of the model's parameters."""
    slots, shapes = run.session.contents.slots, [p.shape for p in run.reference.model.parameters()]
    rows = []
    for tensor, shape in enumerate(shapes):
        part = slots.parts[tensor]
        rows.append(read(GPU, slots.chunk_of(tensor), name)[part.offset : part.offset + part.numel].view(shape).clone())
    return rows


def assert_values(run: Any) -> None:
    """Both lists on the gpu hold plain PyTorch's parameters, to the bit."""
    for name in ("param", MASTER_LIST):
        rows = lists(run, run.session.arena.at, name)
        assert all(torch.equal(row, p) for row, p in zip(rows, run.reference.model.parameters())), name


def test_an_update_writes_each_value_once(start: Callable[..., Any]) -> None:
    """The working list has the new values, the master copy the spent gradients, until someone asks for it."""
    run = start("mlp", "all_on_gpu")
    arena = run.session.arena
    backward(run)
    gradients = [p.grad.clone() for p in run.reference.model.parameters()]
    step(run)
    assert set(arena.unsettled) == {c.index for c in run.plan.layout.chunks}
    values = lists(run, arena.unsettled_at, "param")
    spent = lists(run, arena.unsettled_at, MASTER_LIST)
    assert all(torch.equal(value, p) for value, p in zip(values, run.reference.model.parameters()))
    assert all(torch.equal(row, gradient) for row, gradient in zip(spent, gradients))
    assert_values(run)
    assert not arena.unsettled


def test_lists_are_exchanged_before_they_are_met(start: Callable[..., Any]) -> None:
    """Between backward and step, "param" holds gradients and param32 values, as is recorded; the step then updates
    from there, and the next iteration lends the slots again."""
    run = start("mlp", "all_on_gpu", clip=0.5)
    former = [p.detach().clone() for p in run.reference.model.parameters()]
    backward(run)
    gradients = [p.grad.clone() for p in run.reference.model.parameters()]
    arena = run.session.arena
    assert all(torch.equal(row, g) for row, g in zip(lists(run, arena.at, "param"), gradients))
    assert all(torch.equal(row, value) for row, value in zip(lists(run, arena.at, MASTER_LIST), former))
    step(run)
    assert not arena.unsettled
    assert_values(run)
    backward(run)
    assert arena.unsettled
    step(run)
    assert_values(run)


def test_dropped_gradients_leave_the_values(start: Callable[..., Any]) -> None:
    run = start("mlp", "all_on_gpu")
    backward(run)
    run.optimizer.zero_grad()
    run.reference.optimizer.zero_grad()
    assert_values(run)
    for _ in range(2):
        backward(run)
        step(run)
    assert_values(run)


def test_a_payload_is_settled_before_its_memory_goes(start: Callable[..., Any]) -> None:
    run = start("mlp", "all_on_gpu")
    backward(run)
    step(run)
    arena, chunk = run.session.arena, run.plan.layout.chunks[0].index
    run.session.contents.release(GPU, chunk, "param")
    assert chunk not in arena.unsettled
    arena.take(GPU, chunk, "param")
    run.session.contents.values.rewrite(GPU, chunk)
    assert_values(run)


def test_a_checkpoint_has_the_values(start: Callable[..., Any], tmp_path: Any) -> None:
    run = start("mlp", "all_on_gpu")
    backward(run)
    step(run)
    save(run.optimizer, tmp_path / "saved")
    assert_values(run)


@pytest.mark.parametrize(("name", "policy", "dtype"), [
    ("mlp", "all_on_gpu", torch.bfloat16), ("mlp", "zero_offload", torch.float32),
])  # fmt: skip
def test_where_the_lists_differ_or_move_none_is_lent(
    start: Callable[..., Any], name: str, policy: str, dtype: torch.dtype
) -> None:
    run = start(name, policy, dtype=dtype)
    batch = next(run.batches)
    run.model(**batch).backward()
    assert not run.session.arena.unsettled
