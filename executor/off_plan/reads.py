"""Parameters read while the plan does not say so, and from outside every module.

[Note: reads off plan] In forward (and recompute) every parameter is parked, so torch calls come through `touch`, which
makes its chunk resident. Autograd reads saved parameters without calling Python, so saved-tensor hooks keep (chunk,
view) and fetch the chunk on unpacking. For plain views saved on plan before, each event in backward fetches the chunks
that its moment reads by the plan. `in_use.py` has those that stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from executor.contract import ChunkParameter, map_parameters, snapshot_of, write_refused, written
from executor.devices.torch26 import saved_tensor_hooks
from executor.devices.torch_private import storage_key
from executor.moments.hooks import tensors_of
from executor.moments.unseen import unseen
from executor.off_plan.demand import Demand
from executor.session.cursor import Act, Answer
from executor.session.refusals import Refusal, refused
from pstar_sim.errors import ContractError

_SHOWN = frozenset({torch.Tensor.__repr__, torch.Tensor.__format__})
_OF_THE_GRAPH = frozenset({torch.autograd.backward, torch.autograd.grad})
_ALIASES = frozenset({torch.Tensor.view_as, torch.Tensor.expand_as})


@dataclass(frozen=True)
class Contract:
    """The loop's and the session's word on a read (`driving.loop.Loop`, `Session`)."""

    ask: Callable[..., Answer]
    refuse_while_updating: Callable[[str], None]
    meet_interruption: Callable[[], None]
    end_after_training: Callable[[], bool]
    home: Callable[[], torch.device]


class Reads:
    def __init__(self, demand: Demand, contract: Contract) -> None:
        self.run = demand.run
        self.state = demand.state
        self.cursor = demand.cursor
        self.reader = demand.reader
        self.clock = demand.clock
        self.demand = demand
        self.contract = contract
        self._hooks = _held_weakly(self)
        self._behind: Any = None  # keeps the last alias's node alive, whose Python object does not do so in torch 2.6
        self._storages: dict[int, int] = {}  # storage of a working list -> chunk
        for c in self.run.plan.layout.chunks:
            self._storages[storage_key(self.run.arena.payloads.whole(c.index, "param"))] = c.index

    def touch(self, func: Any, parameters: Sequence[nn.Parameter], args: Any, kwargs: Any) -> Any:
        """[Note: reads off plan]"""
        cursor = self.cursor
        if self.state.closed:
            raise refused(Refusal.CLOSED, self)
        changed = next((p for p in written(func, args, kwargs) if isinstance(p, ChunkParameter)), None)
        if changed is not None:
            if self.contract.end_after_training():
                return func(*args, **kwargs)
            raise write_refused(self.reader.name_of(changed.plan_tensor))
        if func in _SHOWN:
            return self._shown(func, *args, **kwargs)
        if func in _OF_THE_GRAPH:
            return self._of_the_graph(func, args, kwargs)
        if func is torch.Tensor.data_ptr:
            return self._address(args[0])
        if not self.clock.inside:
            return self._outside(func, args, kwargs)
        if not cursor.off_plan and not cursor.visiting and cursor.moment < 0 and not self.reader.trains:
            self.contract.meet_interruption()
            if self.state.run is not self.run:  # mended under another plan
                return self.reader.touch(func, parameters, args, kwargs)
            with self.state.at_work, unseen():
                self.demand.visit()
        pack, unpack = self._hooks
        own = saved_tensor_hooks()
        if own is not None:  # the loop's hooks: activation offload, or checkpointing, which counts saved tensors
            pack, unpack = _beside(own, self._hooks, self.chunk_of_storage)
        with torch._C.DisableTorchFunctionSubclass(), _Calls(self):
            if not torch.is_grad_enabled() or pack is None:
                return func(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return func(*args, **kwargs)

    def read(self, chunks: set[int]) -> None:
        """Make the working lists readable for the next operator."""
        cursor, run, demand = self.cursor, self.run, self.demand
        with self.state.at_work, unseen():
            if self.reader.updates.eager and cursor.moment >= 0:
                self._refuse_updated(chunks)
            if not cursor.off_plan and not cursor.visiting:
                missing = [c for c in sorted(chunks) if not demand.room.held(c)]
                if not missing:
                    for chunk in chunks:
                        run.queues.land(chunk)
                    return
                names = ", ".join(repr(self.reader.name_of(t)) for t in run.timetable.tensors_of[missing[0]][:2])
                where = f"moment {cursor.moment}, where the plan does not have it"
                demand.leave(f"chunk {missing[0]} ({names}, ...) is read in {where}")
            demand.room.ensure(chunks)

    def _refuse_updated(self, chunks: Iterable[int]) -> None:
        tensors_of = self.run.timetable.tensors_of
        updated = self.reader.updates.begun.intersection(t for chunk in chunks for t in tensors_of[chunk])
        if updated:
            self.contract.refuse_while_updating(f"{self.reader.name_of(min(updated))!r} is read")

    def chunk_of_storage(self, tensor: torch.Tensor) -> int | None:
        return self._storages.get(storage_key(tensor))

    def keep(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps of a view of a working list; None for other tensors."""
        if self.chunk_of_storage(tensor) is None:
            return None
        return self.pack(tensor) if self.cursor.off_plan else tensor.detach()

    def pack(self, tensor: torch.Tensor) -> Any:
        chunk = self.chunk_of_storage(tensor)
        return tensor.detach() if chunk is None else (chunk, tensor.detach())

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        chunk, view = packed
        with self.state.at_work, unseen():
            self.demand.room.ensure({chunk})
        assert isinstance(view, torch.Tensor)
        return view

    def _shown(self, func: Any, parameter: ChunkParameter, *args: Any, **kwargs: Any) -> Any:
        """Debuggers and logs may ask for its text at any time."""
        try:
            value = self.reader.current_value(parameter.plan_tensor).to(self.run.backend.device)
        except ContractError as error:
            return f"tensor(..., size={tuple(parameter.shape)}, dtype={parameter.dtype})  # values not shown: {error}"
        return func(value.requires_grad_(parameter.requires_grad), *args, **kwargs)

    def _of_the_graph(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Asked of autograd about parameters' places in the graph. Torch functions stay on: the backward may read
        parameters."""
        inputs, rest = args[1:2], dict(kwargs)
        if func is torch.autograd.grad:
            self.contract.ask(Act.DIFFERENTIATE)
        zeros = rest.get("materialize_grads")
        if zeros:  # torch does not know the shape of a place
            rest.update(materialize_grads=False, allow_unused=True)
        gradients = func(*map_parameters(args, _place), **map_parameters(rest, _place))
        if not zeros:
            return gradients
        return tuple(
            torch.zeros(p.shape, dtype=p.dtype, device=p.device, requires_grad=rest["create_graph"]) if g is None else g
            for g, p in zip(gradients, *inputs)
        )

    def _address(self, parameter: ChunkParameter) -> int:
        """For the user's own kernel in a module's forward."""
        if not self.clock.inside:
            self.contract.ask(Act.LOCATE, tensor=parameter.plan_tensor)
        self.read({self.run.timetable.chunk_of[parameter.plan_tensor]})
        with torch._C.DisableTorchFunctionSubclass():
            return parameter.data_ptr()

    def _outside(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = self.contract.home() if self.state.trained else self.run.backend.device

        def copy(parameter: ChunkParameter) -> torch.Tensor:
            value = self.reader.current_value(parameter.plan_tensor).to(device)
            copied = snapshot_of(value, _adoption(self, parameter, value))
            if not (torch.is_grad_enabled() and parameter.requires_grad):
                return copied
            name = self.reader.name_of(parameter.plan_tensor)
            outside: torch.Tensor = _Outside.apply(parameter, lambda: copied, name)  # type: ignore[no-untyped-call]
            return outside

        if func in _ALIASES and args[0] is args[1] and not kwargs:
            alias = copy(args[0])  # the usual way to a parameter's node in the graph
            with torch._C.DisableTorchFunctionSubclass():
                self._behind = alias.view_as(alias).grad_fn
            return alias
        return func(*map_parameters(args, copy), **map_parameters(kwargs, copy))


def _place(parameter: ChunkParameter) -> torch.autograd.graph.GradientEdge:
    with unseen(), torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(parameter)


class _Outside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, value: Callable[[], torch.Tensor], name: str) -> torch.Tensor:
        ctx.name = name
        return value()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ContractError(
            f"parameter {ctx.name!r} was read outside every module call and the loss depends on it; move that code "
            "into the forward of the model or of one of its modules"
        )


def _adoption(reads: Reads, parameter: nn.Parameter, value: torch.Tensor) -> Callable[[], bool]:
    """Makes `value`, a copy, the parameter's, if this ends the session or it has ended with the same value, and says
    whether it did."""
    state_of, end_of = weakref.ref(reads.state), weakref.WeakMethod(reads.contract.end_after_training)

    def adopt() -> bool:
        state, end = state_of(), end_of()
        ended = state is None or end is None or state.closed or end()
        if not ended or isinstance(parameter, ChunkParameter):
            return False
        with torch.no_grad():
            same = parameter.shape == value.shape and parameter.device == value.device and torch.equal(parameter, value)
        if same:
            parameter.data = value
        return same

    return adopt


class _Calls(TorchDispatchMode):
    """Reports each operator of a call that takes (a view of) a working list; it may end before reading all
    arguments: a recomputation stops once it has restored enough."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        chunks = {
            chunk
            for tensor in tensors_of((args, kwargs))
            if (chunk := self._reads.chunk_of_storage(tensor)) is not None
        }
        if chunks:
            self._reads.read(chunks)
        return func(*args, **kwargs)


def _held_weakly(reads: Reads) -> tuple[Any, Any]:
    keeper = weakref.ref(reads)

    def held() -> Reads:
        found = keeper()
        if found is None:
            raise ContractError(
                "a graph belongs to a prepared model that no longer exists, or to an earlier plan; keep a reference to "
                "the model, and run forward and backward within one iteration"
            )
        return found

    return lambda tensor: held().pack(tensor), lambda packed: held().unpack(packed)


def _beside(own: tuple[Any, Any], mine: tuple[Any, Any], chunk_of: Callable[[torch.Tensor], int | None]) -> Any:
    """Keep working lists by chunk, and leave others to the loop's own hooks; (None, None) if those are
    torch.utils.checkpoint's, which must see all."""
    pack, unpack = own
    if getattr(pack, "__module__", "") == "torch.utils.checkpoint":
        return None, None

    pack_mine, unpack_mine = mine

    def pack_both(tensor: torch.Tensor) -> Any:
        ours = chunk_of(tensor) is not None
        return ours, pack_mine(tensor) if ours else pack(tensor)

    def unpack_both(packed: Any) -> Any:
        ours, kept = packed
        return unpack_mine(kept) if ours else unpack(kept)

    return pack_both, unpack_both
