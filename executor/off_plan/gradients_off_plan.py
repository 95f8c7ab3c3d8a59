"""Where gradients go off the plan, and how they come back for the update."""

from __future__ import annotations

import torch

from executor.contract import raw_grad, set_raw_grad
from executor.memory.shares import Shares
from executor.off_plan.inline import Inline
from executor.off_plan.states import States
from executor.session.reader import Reader
from executor.session.state import PlanBytes
from pstar_sim.core.step import Place
from pstar_sim.errors import ContractError, PlanError

GPU, HOST, NVME = Place.GPU, Place.HOST, Place.NVME


class OffPlanGradients:
    def __init__(self, run: PlanBytes, reader: Reader, inline: Inline, shares: Shares, states: States) -> None:
        self.run = run
        self.reader = reader
        self.updates = reader.updates
        self.inline = inline
        self.shares = shares
        self.states = states

    def leave_gpu(self) -> None:
        """Gradients leave working and grad lists, so that parameters can be read; sums to the states."""
        run, perform, drop = self.run, self.inline.perform, self.inline.drop
        for chunk in range(len(run.plan.layout.chunks)):
            self._sum_leaves_gpu(chunk)
            self.states.send_to_disks(chunk)
            self._add_on_host(chunk)
            pinned = self.states.pinned(chunk)
            self.shares.leave_gpu(chunk, "param", restored=pinned)
            self.shares.leave_gpu(chunk, "grad", restored=False)
            if run.arena.has(GPU, chunk, "grad") and (GPU, chunk, "grad") not in run.timetable.cut:
                perform(drop(GPU, chunk, "grad"))
            current = GPU in run.contents.chunks[chunk].current
            if run.arena.has(GPU, chunk, "param") and not current and not pinned:
                perform(drop(GPU, chunk, "param"))

    def _sum_leaves_gpu(self, chunk: int) -> None:
        run, inline = self.run, self.inline
        if run.plan.modes[chunk] not in ("cpu", "stream") or (GPU, chunk, "grad32") in run.timetable.cut:
            return
        if run.arena.has(GPU, chunk, "grad32"):
            if run.contents.chunks[chunk].where(GPU, "grad32"):
                inline.perform(inline.copy(HOST, chunk, "grad32"))
            inline.perform(inline.drop(GPU, chunk, "grad32"))
        several = run.plan.workload.micro_batches > 1
        somewhere = any(run.arena.has(place, chunk, "grad32") for place in (HOST, NVME))
        if several and run.plan.modes[chunk] == "stream" and not somewhere:
            inline.bring(HOST, chunk, "grad32")

    def _add_on_host(self, chunk: int) -> None:
        """Whose step has not run: later ones are added after them, as in autograd."""
        contents = self.run.contents
        if self.run.arena.has(HOST, chunk, "grad32"):
            for list_name in ("grad", "param"):
                if contents.chunks[chunk].where(HOST, list_name):
                    contents.gradients.add_on_host(chunk, list_name)

    def accept(self, tensor: int, gradient: torch.Tensor) -> None:
        """Raises ContractError after the eager update, PlanError where the plan has no states."""
        run = self.run
        if tensor in self.updates.begun:
            raise ContractError(
                f"another gradient of {self.reader.name_of(tensor)!r} after its eager update: with AdamW(eager=True) a "
                "parameter has one backward per iteration; use eager=False"
            )
        chunk = run.timetable.chunk_of[tensor]
        if not run.plan.workload.tensors[tensor].frozen and run.plan.modes[chunk] == "frozen":
            raise PlanError(
                f"{self.reader.name_of(tensor)!r} gets a gradient, but the plan was made from a trace in which it "
                "never does, and has no optimizer states for it; trace the model again with batches that use it, and "
                "with no layers left out at random (a layerdrop of 0 while the plan is made)"
            )
        self.shares.accept(tensor, gradient)

    def collect_left_over(self) -> None:
        """Take gradients that arrived less often than the plan counted."""
        run, parameters, scaling = self.run, self.reader.parameters, self.updates.scaling
        for t in run.timetable.chunk_of:
            grad = raw_grad(parameters[t])
            if grad is not None and not run.plan.workload.tensors[t].frozen:
                if scaling is not None:
                    scaling.see(grad)
                self.accept(t, grad)
                set_raw_grad(parameters[t], None)
