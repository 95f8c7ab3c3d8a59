"""Reads: detects parameters that are read while the plan does not say so, and from outside every module.

[Note: reads off plan] In forward (and recompute) every parameter is parked, so that each torch call with a parameter
comes through `touch`, which makes its chunk resident for the call. Autograd reads saved parameters without calling
Python. Therefore the call is made under saved-tensor hooks that keep (chunk, view) instead of the tensor and fetch the
chunk when autograd unpacks it. Code that ran on plan before the deviation saved plain views. For those, each event in
backward fetches the chunks that its moment reads by the plan. Chunks used since the enclosing module began (forward) or
since the last event (backward) stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from executor.contract import ChunkParameter, map_parameters, snapshot_of, write_refused, written
from executor.devices.torch26 import saved_tensor_hooks
from executor.devices.torch_private import storage_key
from executor.moments.hooks import tensors_of
from executor.moments.unseen import unseen
from executor.queues.interface import Landing
from executor.session.cursor import Act
from executor.session.hosting import BytesHost, LoopHost
from executor.session.loop import Loop
from executor.session.reader import Reader
from executor.session.refusals import Refusal, refused
from executor.session.updates import Updates
from pstar_sim.errors import ContractError

__all__ = ["Host", "Reads"]

_SHOWN = frozenset({torch.Tensor.__repr__, torch.Tensor.__format__})
_OF_THE_GRAPH = frozenset({torch.autograd.backward, torch.autograd.grad})
_ALIASES = frozenset({torch.Tensor.view_as, torch.Tensor.expand_as})


class OnDemand(Protocol):
    """The part of `demand.Demand` that this file uses."""

    def visit(self) -> None: ...

    def leave(self, reason: str) -> None: ...

    def held(self, chunk: int) -> bool: ...

    def ensure(self, chunks: Iterable[int]) -> None: ...


class Host(BytesHost, LoopHost, Protocol):
    """The part of the session that this file uses."""

    trained: bool

    @property
    def home(self) -> torch.device: ...

    def end_after_training(self) -> bool: ...

    @property
    def queues(self) -> Landing: ...
    @property
    def reader(self) -> Reader: ...
    @property
    def updates(self) -> Updates: ...
    @property
    def loop(self) -> Loop: ...
    @property
    def demand(self) -> OnDemand: ...


class Reads:
    """Reads of one plan's working lists off the plan."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._hooks = _held_weakly(self)
        self._behind: Any = None  # keeps the last alias's node alive, whose Python object does not do so in torch 2.6
        self._storages: dict[int, int] = {}  # storage of a working list -> chunk
        for c in host.plan.layout.chunks:
            self._storages[storage_key(host.arena.payloads.whole(c.index, "param"))] = c.index

    def touch(self, func: Any, parameters: Sequence[nn.Parameter], args: Any, kwargs: Any) -> Any:
        """Returns the result of a torch function that has parked parameters among its arguments: see [Note: reads off
        plan]."""
        s = self.host
        if s.closed:
            raise refused(Refusal.CLOSED, s)
        changed = next((p for p in written(func, args, kwargs) if isinstance(p, ChunkParameter)), None)
        if changed is not None:
            if s.end_after_training():
                return func(*args, **kwargs)
            raise write_refused(s.reader.name_of(changed.plan_tensor))
        if func in _SHOWN:
            return self._shown(func, *args, **kwargs)
        if func in _OF_THE_GRAPH:
            return self._of_the_graph(func, args, kwargs)
        if func is torch.Tensor.data_ptr:
            return self._address(args[0])
        if not s.clock.inside:
            return self._outside(func, args, kwargs)
        if not s.cursor.off_plan and not s.cursor.visiting and s.cursor.moment < 0 and not s.reader.trains:
            s.loop.meet_interruption()
            with s.at_work, unseen():
                s.demand.visit()
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
        """Make the working lists of `chunks` readable for the next operator."""
        s = self.host
        with s.at_work, unseen():
            if s.updates.eager and s.cursor.moment >= 0:
                self._refuse_updated(chunks)
            if not s.cursor.off_plan and not s.cursor.visiting:
                missing = [c for c in sorted(chunks) if not s.demand.held(c)]
                if not missing:
                    for chunk in chunks:
                        s.queues.land(chunk)
                    return
                names = ", ".join(repr(s.reader.name_of(t)) for t in s.timetable.tensors_of[missing[0]][:2])
                where = f"moment {s.cursor.moment}, where the plan does not have it"
                s.demand.leave(f"chunk {missing[0]} ({names}, ...) is read in {where}")
            s.demand.ensure(chunks)

    def _refuse_updated(self, chunks: Iterable[int]) -> None:
        """Raise ContractError where an eager update of this iteration has changed one of the chunks."""
        s = self.host
        updated = s.updates.begun.intersection(t for chunk in chunks for t in s.timetable.tensors_of[chunk])
        if updated:
            s.loop.refuse_while_updating(f"{s.reader.name_of(min(updated))!r} is read")

    def chunk_of_storage(self, tensor: torch.Tensor) -> int | None:
        return self._storages.get(storage_key(tensor))

    def pack(self, tensor: torch.Tensor) -> Any:
        chunk = self.chunk_of_storage(tensor)
        return tensor.detach() if chunk is None else (chunk, tensor.detach())

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        chunk, view = packed
        with self.host.at_work, unseen():
            self.host.demand.ensure({chunk})
        assert isinstance(view, torch.Tensor)
        return view

    def _shown(self, func: Any, parameter: ChunkParameter, *args: Any, **kwargs: Any) -> Any:
        """Returns the text of a parked parameter. Debuggers and logs may ask for it at any time."""
        s = self.host
        try:
            value = s.reader.current_value(parameter.plan_tensor).to(s.backend.device)
        except ContractError as error:
            return f"tensor(..., size={tuple(parameter.shape)}, dtype={parameter.dtype})  # values not shown: {error}"
        return func(value.requires_grad_(parameter.requires_grad), *args, **kwargs)

    def _of_the_graph(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of autograd that asks for parameters' places in the graph, not for their values. It gets the
        places themselves, and torch functions stay on: the backward may read parameters."""
        inputs, rest = args[1:2], dict(kwargs)
        if func is torch.autograd.grad:
            self.host.loop.ask(Act.DIFFERENTIATE)
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
        """Returns the address of a parameter's first element, for a kernel of the user's own in a module's forward."""
        s = self.host
        if not s.clock.inside:
            s.loop.ask(Act.LOCATE, tensor=parameter.plan_tensor)
        self.read({s.timetable.chunk_of[parameter.plan_tensor]})
        with torch._C.DisableTorchFunctionSubclass():
            return parameter.data_ptr()

    def _outside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call the function with copies of current values, for parameters that are read while no module runs."""
        s = self.host

        def copy(parameter: ChunkParameter) -> torch.Tensor:
            value = s.reader.current_value(parameter.plan_tensor).to(s.home if s.trained else s.backend.device)
            copied = snapshot_of(value, _adoption(s, parameter, value))
            if not (torch.is_grad_enabled() and parameter.requires_grad):
                return copied
            name = s.reader.name_of(parameter.plan_tensor)
            outside: torch.Tensor = _Outside.apply(parameter, lambda: copied, name)  # type: ignore[no-untyped-call]
            return outside

        if func in _ALIASES and args[0] is args[1] and not kwargs:
            alias = copy(args[0])  # the usual way to a parameter's node in the graph
            with torch._C.DisableTorchFunctionSubclass():
                self._behind = alias.view_as(alias).grad_fn
            return alias
        return func(*map_parameters(args, copy), **map_parameters(kwargs, copy))


def _place(parameter: ChunkParameter) -> torch.autograd.graph.GradientEdge:
    """Returns where the parameter's gradients arrive in graphs."""
    with unseen(), torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(parameter)


class _Outside(torch.autograd.Function):
    """A parameter's value, read outside every module. Its node has the parameter's own behind it, and refuses
    gradients."""

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


def _adoption(session: Host, parameter: nn.Parameter, value: torch.Tensor) -> Callable[[], bool]:
    """Returns a function that makes `value`, a copy of the parameter, the parameter's value, if this ends the session,
    or if the session has ended since with the same value. The function returns whether it did so."""
    keeper = weakref.ref(session)

    def adopt() -> bool:
        held = keeper()
        ended = held is None or held.closed or held.end_after_training()
        if not ended or isinstance(parameter, ChunkParameter):
            return False
        with torch.no_grad():
            same = parameter.shape == value.shape and parameter.device == value.device and torch.equal(parameter, value)
        if same:
            parameter.data = value
        return same

    return adopt


class _Calls(TorchDispatchMode):
    """Entered around one call: reports each operator that takes (a view of) a working list to `reads`. A call may end
    before it reads all its arguments: a recomputation that has restored enough stops early."""

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
    """Returns saved-tensor hooks that hold the session weakly, because objects that a graph holds are not collected."""
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
    """Returns saved-tensor hooks that keep working lists by chunk and leave every other tensor to the loop's own hooks.
    Returns (None, None) if the loop's hooks are torch.utils.checkpoint's, which must see all tensors."""
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
