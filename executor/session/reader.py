"""Parameters, gradients and optimizer states as the user's code sees them.

A parameter can be read directly (`contract.ChunkParameter`) while a module runs and the gpu holds its value; else it is
parked (`contract.ParkedParameter`), and reads get a copy, taken while nothing moves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from executor.contract import ChunkParameter, ParkedParameter, disown, drop_raw_grads, raw_grad, set_raw_grad
from executor.devices.packed import is_packed, point_at, unpacked
from executor.devices.torch_private import version_of
from executor.memory.arena import PLACES
from executor.memory.slots import list_of
from executor.moments.unseen import unseen
from executor.session.cursor import Act, Answer
from executor.session.standstill import Standstill
from executor.session.state import RunState
from executor.session.updates import Updates
from pstar_sim.workload.optimizers import MASTER_LIST


class Reader:
    """ask(act, tensor=, what=): see `driving.loop.Loop.ask`.
    touch(func, parameters, args, kwargs): see `off_plan.reads.Reads.touch`.
    consumed: tensors whose gradient left autograd, not cleared by `zero_grad` yet.
    switched: tensors whose requires_grad is not the plan's.
    is_open: a module runs, so readable parameters may be read directly.
    """

    def __init__(
        self,
        state: RunState,
        updates: Updates,
        standstill: Standstill,
        parameters: Sequence[nn.Parameter],
        *,
        ask: Callable[..., Answer],
        touch: Callable[[Any, Sequence[nn.Parameter], Any, Any], Any],
    ) -> None:
        self.state = state
        self.updates = updates
        self.standstill = standstill
        self.touch = touch
        self._ask = ask
        self.parameters = parameters
        self.consumed: set[int] = set()
        self.switched: set[int] = set()
        self.is_open = False
        # In memory a parameter may have another order of dimensions (channels_last), which it gets back at the end.
        self._strides = [torch.empty_like(p, device="meta").stride() for p in parameters]
        self._classes = threading.Lock()  # a queue's thread and the user's may change a parameter's class at once

    # -- which parameters may be read directly ------------------------------------------------------------------------

    def refresh(self, chunk: int, tensors: Sequence[int] | None = None) -> None:
        """After values on the gpu became readable or ceased to be.

        tensors: None: all of the chunk.
        """
        run, parameters = self.state.run, self.parameters
        with self._classes:
            values = run.contents.values
            readable = self.is_open and chunk not in run.queues.in_flight and values.readable(chunk)
            overwritten, updated = values.overwritten(chunk), self.updates.begun
            for t in run.timetable.tensors_of[chunk] if tensors is None else tensors:
                as_it_stands = readable and t not in overwritten and t not in updated
                parameters[t].__class__ = ChunkParameter if as_it_stands else ParkedParameter

    def set_open(self, open_: bool) -> None:
        """open_: whether a module runs."""
        if open_ != self.is_open:
            self.is_open = open_
            for chunk in range(len(self.state.run.timetable.tensors_of)):
                self.refresh(chunk)

    @property
    def trains(self) -> bool:
        """A forward now would train: gradients are on, and some trainable parameter is not switched off."""
        return torch.is_grad_enabled() and not (self.switched and self.switched >= self.state.run.timetable.trainable)

    # -- calls of parameters (contract.ParameterAccess) ---------------------------------------------------------------

    def name_of(self, tensor: int) -> str:
        return self.state.run.plan.workload.tensors[tensor].name

    def grad_of(self, tensor: int) -> torch.Tensor | None:
        """`p.grad`. Raises ContractError where it has left for its chunk."""
        self._ask(Act.READ_GRAD, tensor=tensor)
        return raw_grad(self.parameters[tensor])

    def set_grad_of(self, tensor: int, value: torch.Tensor | None) -> None:
        """`p.grad = value`. Raises ContractError for a tensor, except in a hook that runs before the gradient leaves,
        and for None while `optimizer.step()` has not used the gradient in its chunk."""
        self._ask(Act.DROP_GRAD if value is None else Act.SET_GRAD, tensor=tensor)
        self.consumed.discard(tensor)
        set_raw_grad(self.parameters[tensor], value)

    def see_requires_grad(self, tensor: int, value: bool) -> None:
        """Without effect around an evaluation."""
        if value == (not self.state.run.plan.workload.tensors[tensor].frozen):
            self.switched.discard(tensor)
        else:
            self.switched.add(tensor)

    @property
    def written(self) -> int | None:
        """A tensor whose parameter was written in place: by the model's forward, or an `Embedding(max_norm=)`."""
        with torch._C.DisableTorchFunctionSubclass():
            for t in self.state.run.timetable.chunk_of:
                if version_of(self.parameters[t]) != self.parameters[t].plan_version:  # type: ignore[attr-defined]
                    return t
        return None

    def current_value(self, tensor: int) -> torch.Tensor:
        """A copy, in its shape and working dtype, on the host."""
        return self.parts_now(tensor)[0]

    def parts_now(self, tensor: int) -> list[torch.Tensor]:
        """`current_value`; behind it, of a packed parameter, its scales."""
        self._ask(Act.READ_VALUE, tensor=tensor, what=f"{self.name_of(tensor)!r} is read")
        parameter, value = self.parameters[tensor], self.value_now(tensor)
        return self._apart(parameter, value) if is_packed(parameter) else [value]

    def _apart(self, parameter: nn.Parameter, value: torch.Tensor) -> list[torch.Tensor]:
        """In memory of their own: torch.save refuses views of different dtypes."""
        return [view.clone() for view in unpacked(parameter, value)]

    # -- copies of values and states ----------------------------------------------------------------------------------

    def value_now(self, tensor: int) -> torch.Tensor:
        """`current_value`, also where the loop may not read; all bytes of a packed parameter."""
        with unseen(), torch.no_grad(), self.standstill.still():
            run = self.state.run
            contents, chunk = run.contents, run.timetable.chunk_of[tensor]
            self._meet_others(tensor)
            place, list_name = contents.values.source(chunk, (tensor,))
            value = contents.slots.at(place, tensor, list_name)
            if list_name == MASTER_LIST:
                value = value.to(run.arena.dtype(chunk, "param"), copy=True)
            value = contents.exchange.joined(tensor, value)
        return value if is_packed(self.parameters[tensor]) else value.reshape(run.plan.workload.tensors[tensor].shape)

    def state_value(self, tensor: int, field: str) -> torch.Tensor:
        """A copy of a field of a state list, in its shape, on the host. The ranks have met (`meet_for_states`)."""
        self._ask(Act.READ_STATE, tensor=tensor, what=f"the optimizer state of {self.name_of(tensor)!r} is read")
        with unseen(), torch.no_grad(), self.standstill.still():
            run = self.state.run
            value = run.contents.exchange.joined(tensor, run.contents.slots.source(tensor, field), field)
        return value.reshape(run.contents.slots.shape(tensor, field))

    def meet_for_states(self) -> None:
        """Once for all states of a state dict."""
        self._meet_others(-1)

    def _meet_others(self, tensor: int) -> None:
        """tensor: whose parameter all read; -1: all states."""
        ranks = self.state.ranks
        if ranks is not None and self.state.run.contents.sliced:
            ranks.come_to_read(tensor)

    def own_slice(self, chunk: int) -> torch.Tensor:
        """A copy of this rank's slice of a chunk's parameters, flat, on the host."""
        run = self.state.run
        place, list_name = run.contents.values.source(chunk, run.timetable.tensors_of[chunk])
        return run.arena.at(place, chunk, list_name).to("cpu", run.arena.dtype(chunk, "param"), copy=True)

    # -- writes from outside ------------------------------------------------------------------------------------------

    def set_state_value(self, tensor: int, field: str, value: torch.Tensor) -> None:
        """value: any shape, written wherever the list has memory."""
        with unseen(), torch.no_grad(), self.standstill.still():
            self.put_state(tensor, field, value)

    def put_state(self, tensor: int, field: str, value: torch.Tensor) -> None:
        """`set_state_value`, while nothing moves."""
        run = self.state.run
        for place in PLACES:
            if run.arena.has(place, run.timetable.chunk_of[tensor], list_of(field)):
                run.contents.slots.put(place, tensor, field, value)

    # -- gradients that autograd holds, and the end -------------------------------------------------------------------

    def forget_gradients(self) -> None:
        drop_raw_grads(self.parameters[t] for t in self.state.run.timetable.chunk_of)
        self.consumed.clear()

    def make_plain(self, value: Callable[[int], torch.Tensor | None]) -> None:
        """Make the parameters the model's own again, with these values."""
        for t, parameter in enumerate(self.parameters):
            if isinstance(parameter, ChunkParameter):
                disown(parameter)
                found = value(t)
                if found is not None:
                    self.give_back(t, found)

    def give_back(self, tensor: int, value: torch.Tensor) -> None:
        """Give a parameter that is plain again its value."""
        parameter = self.parameters[tensor]
        if is_packed(parameter):
            point_at(parameter, self._apart(parameter, value))
        else:
            parameter.data = self.in_memory_format(tensor, value.reshape(parameter.shape))

    def in_memory_format(self, tensor: int, value: torch.Tensor) -> torch.Tensor:
        """In the parameter's memory format (channels_last) before `prepare`."""
        stride = self._strides[tensor]
        if value.stride() == stride:
            return value
        return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)
