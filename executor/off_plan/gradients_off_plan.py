"""Gradients off the plan: where the gradients of an iteration off the plan go, and how they come back for the
update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from executor.contract import raw_grad, set_raw_grad
from executor.memory.shares import Shares
from executor.off_plan.inline import Inline
from executor.off_plan.states import States
from executor.scaling import LossScaling
from executor.session.hosting import BytesHost
from executor.session.reader import Reader
from executor.session.updates import Updates
from pstar_sim.core.step import Place
from pstar_sim.errors import ContractError, PlanError

__all__ = ["Host", "OffPlanGradients"]

GPU, HOST = Place.GPU, Place.HOST


class Host(BytesHost, Protocol):
    """The part of the session that this file uses."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]: ...
    @property
    def reader(self) -> Reader: ...
    @property
    def scaling(self) -> LossScaling | None: ...
    @property
    def updates(self) -> Updates: ...


class OffPlanGradients:
    def __init__(self, host: Host, inline: Inline, shares: Shares, states: States) -> None:
        self.host = host
        self.inline = inline
        self.shares = shares
        self.states = states

    def leave_gpu(self) -> None:
        """Move every gradient off the gpu's working and grad lists, so that parameters can be read again, and move sums
        to the chunk's states."""
        host, perform, drop = self.host, self.inline.perform, self.inline.drop
        for chunk in range(len(host.plan.layout.chunks)):
            self._sum_leaves_gpu(chunk)
            self._add_on_host(chunk)
            pinned = self.states.pinned(chunk)
            self.shares.leave_gpu(chunk, "param", restored=pinned)
            self.shares.leave_gpu(chunk, "grad", restored=False)
            if host.arena.has(GPU, chunk, "grad") and (GPU, chunk, "grad") not in host.timetable.cut:
                perform(drop(GPU, chunk, "grad"))
            current = GPU in host.contents.chunks[chunk].current
            if host.arena.has(GPU, chunk, "param") and not current and not pinned:
                perform(drop(GPU, chunk, "param"))

    def _sum_leaves_gpu(self, chunk: int) -> None:
        """Move the sum of a chunk whose states live on the host to the host. If the plan never has a sum there, the
        chunk gets the list, because off the plan all its gradients add up on the host."""
        host, inline = self.host, self.inline
        if host.plan.modes[chunk] not in ("cpu", "stream") or (GPU, chunk, "grad32") in host.timetable.cut:
            return
        if host.arena.has(GPU, chunk, "grad32"):
            if host.contents.chunks[chunk].where(GPU, "grad32"):
                inline.perform(inline.copy(HOST, chunk, "grad32"))
            inline.perform(inline.drop(GPU, chunk, "grad32"))
        several = host.plan.workload.micro_batches > 1
        if several and host.plan.modes[chunk] == "stream" and not host.arena.has(HOST, chunk, "grad32"):
            inline.bring(HOST, chunk, "grad32")

    def _add_on_host(self, chunk: int) -> None:
        """Add gradients on the host whose step has not run yet to the sum there: gradients that come later are added
        after them, as autograd does."""
        contents = self.host.contents
        if self.host.arena.has(HOST, chunk, "grad32"):
            for list_name in ("grad", "param"):
                if contents.chunks[chunk].where(HOST, list_name):
                    contents.gradients.add_on_host(chunk, list_name)

    def accept(self, tensor: int, gradient: torch.Tensor) -> None:
        """Take an accumulated gradient and add it to the tensor's earlier gradients. Raises ContractError after the
        tensor's eager update, PlanError where the plan has no optimizer states for it."""
        host = self.host
        if tensor in host.updates.begun:
            raise ContractError(
                f"another gradient of {host.reader.name_of(tensor)!r} after its eager update: with AdamW(eager=True) a "
                "parameter has one backward per iteration; use eager=False"
            )
        chunk = host.timetable.chunk_of[tensor]
        if not host.plan.workload.tensors[tensor].frozen and host.plan.modes[chunk] == "frozen":
            raise PlanError(
                f"{host.reader.name_of(tensor)!r} gets a gradient, but the plan was made from a trace in which it "
                "never does, and has no optimizer states for it; trace the model again with batches that use it, and "
                "with no layers left out at random (a layerdrop of 0 while the plan is made)"
            )
        self.shares.accept(tensor, gradient)

    def collect_left_over(self) -> None:
        """Take gradients that autograd still holds because they arrived less often than the plan counted."""
        host = self.host
        for t in host.timetable.chunk_of:
            grad = raw_grad(host.parameters[t])
            if grad is not None and not host.plan.workload.tensors[t].frozen:
                if host.scaling is not None:
                    host.scaling.see(grad)
                self.accept(t, grad)
                set_raw_grad(host.parameters[t], None)
