"""MomentClock: module and autograd hooks turned into events; the one clock of capture and engine.

[Note: the clock] Units are modules that own a parameter directly (tied ones included) and the root. An event closes the
current moment and opens the next, of the phase named last:

    begin:MODULE    forward pre-hook, before any other pre-hook           FWD; RECOMPUTE inside backward
    end:MODULE      forward hook                                          FWD; RECOMPUTE inside backward
    grad:MODULE     the first gradient to reach an output of one call     BWD
    backward-end    the outermost backward has run every gradient         BWD
    step            `step()`, which the optimizer calls                   ADAM

Operations outside units belong to the moment in which they happen. Non-reentrant checkpointing stops a recomputation
early, so an "end" may be missing. Outputs have tensor hooks: full backward hooks wrap outputs in views, which breaks
in-place operations after a module.

[Note: several models] A loop may call one model inside another's forward (a teacher), or between its forward and
backward (a GAN). An operator belongs to the model whose event came last, until its moments are over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from executor.devices.torch_private import call_of, replace_call
from pstar_sim.errors import ContractError, ModelError
from pstar_sim.workload.workload import Phase

ROOT = "<root>"


@dataclass(frozen=True, slots=True)
class ModuleEvent:
    """kind: "begin", "end", "grad", "backward-end" or "step".
    module: in `named_modules()`, "" for the root and the last two kinds.
    name: as in `Moment.name`.
    micro_batch: -1 for the gradient of an evaluation's output.
    """

    kind: str
    module: str
    name: str
    phase: Phase
    micro_batch: int


class _ModuleEvents(dict[int, ModuleEvent]):
    def __init__(self, kind: str, module: str, phase: Phase) -> None:
        super().__init__()
        self._made = functools.partial(ModuleEvent, kind, module, f"{kind}:{module or ROOT}", phase)

    def __missing__(self, micro_batch: int) -> ModuleEvent:
        event = self[micro_batch] = self._made(micro_batch)
        return event


def units(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that own a parameter, by name, and the root (""); one reached twice has its first name."""
    return {
        name: module
        for name, module in model.named_modules()
        if name == "" or next(module.named_parameters(recurse=False), None) is not None
    }


_MODELS_AT_TURN: dict[int, list[weakref.ref[MomentClock]]] = {}
"""Thread -> clocks whose moments are open there, that of the latest event last: [Note: several models]."""


@dataclass
class _ClockLink:
    """Hooks on outputs hold the clock weakly: a model that keeps an output would never be collected."""

    clock: weakref.ref[MomentClock]
    closed: bool = False


class MomentClock:
    """Calls `on_event(event)` from `listen()` until `close()`.

    trains(): the running forward is no evaluation.
    micro_batch: of the current moment, from 0; `step()` starts anew; all forwards before a backward belong to one (a
        loss may compare two).
    """

    def __init__(
        self,
        model: nn.Module,
        on_event: Callable[[ModuleEvent], None],
        *,
        trains: Callable[[], bool] = torch.is_grad_enabled,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda hook: hook,
    ) -> None:
        self.units = units(model)
        self._trains = trains
        self.micro_batch = 0
        self._on_event = on_event
        self._turns = 0  # see `backwards`
        self._open = 0  # units whose forward is running, outside backward
        self._callback_due = False
        self._in_one = False  # several calls of autograd are one backward
        self._before_event: Callable[[], None] | None = None  # while micro-batches run side by side
        self._open_of: dict[int, int] = {}  # suspended micro-batch -> its `_open`
        self._handles: list[Any] = []
        self._link = _ClockLink(weakref.ref(self))
        self._at_turn = _MODELS_AT_TURN.setdefault(threading.get_ident(), [])
        self._hear = wrap(_hearing(self._link))
        self._wrap = wrap
        self._take_call_back: Callable[[], None] | None = None

    def listen(self, on_event: Callable[[ModuleEvent], None] | None = None) -> None:
        """on_event: replaces the constructor's."""
        wrap, self._on_event = self._wrap, on_event or self._on_event
        for name, module in self.units.items():
            self._handles.append(module.register_forward_pre_hook(wrap(self._begin_hook(name)), prepend=True))
            self._handles.append(module.register_forward_hook(wrap(self._end_hook(name))))
        model = self.units[""]
        self._take_call_back = replace_call(model, self._around_root(call_of(model)))

    @property
    def inside(self) -> bool:
        return self._open > 0 or _graph_task() != -1

    @property
    def in_backward(self) -> bool:
        return _graph_task() != -1

    @property
    def at_turn(self) -> bool:
        """The thread's operators belong to this model: [Note: several models]."""
        return bool(self._at_turn) and self._at_turn[-1] is self._link.clock

    @property
    def backwards(self) -> int:
        """Backwards ended since the last `step()`."""
        return self._turns

    def require_backwards(self, count: int, name: str) -> None:
        """Raises ModelError if more backwards than `count` have ended: the loss has run one."""
        if self._turns > count:
            raise ModelError(
                f"{name}: the loss runs a backward of its own (torch.autograd.grad, as in a gradient penalty), and "
                "a plan has one forward and one backward per micro-batch; leave that part of the loss out"
            )

    @property
    def unfinished(self) -> bool:
        """A backward that raised an exception never ends."""
        return self._callback_due

    def outside_root(self, event: ModuleEvent) -> bool:
        """Whether a module's forward begins outside the root's; valid while the event is handled."""
        return event.module != "" and self.outermost(event)

    def outermost(self, event: ModuleEvent) -> bool:
        """Whether a forward begins that no other unit called; valid while the event is handled."""
        return event.kind == "begin" and event.phase is Phase.FWD and self._open == 1

    def step(self) -> None:
        """The root's next forward is micro-batch 0 again."""
        self._tell(ModuleEvent("step", "", "step", Phase.ADAM, self.micro_batch))
        self._end_turn()
        self.reset()

    def reset(self) -> None:
        """After an abandoned iteration or an evaluation."""
        self._turns = 0
        self._open = 0
        self._callback_due = False

    @contextlib.contextmanager
    def one_backward(self) -> Iterator[None]:
        """All calls of autograd count as one backward."""
        self._callback_due = False
        self._in_one = True
        try:
            yield
        finally:
            self._in_one = False
        self._backward_end()

    @property
    def driven(self) -> bool:
        return self._before_event is not None

    @contextlib.contextmanager
    def side_by_side(self, before_event: Callable[[], None]) -> Iterator[None]:
        """Several micro-batches are open; `turn_to` chooses the next events'.

        before_event: of a forward, may let other micro-batches run.
        """
        self._before_event = before_event
        self._in_one = True
        self._callback_due = False
        self.micro_batch = self._open = 0
        try:
            yield
        finally:
            self._before_event = None
            self._in_one = False
            self._open_of.clear()
            self._open = 0

    def turn_to(self, micro_batch: int) -> None:
        self._open_of[self.micro_batch] = self._open
        self.micro_batch = micro_batch
        self._open = self._open_of.get(micro_batch, 0)

    def end_backward(self) -> None:
        self._callback_due = True
        self._backward_end()

    def close(self) -> None:
        """Hooks on outputs, freed with their graph, do nothing from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._take_call_back is not None:
            self._take_call_back()
            self._take_call_back = None
        self._on_event = _ignore
        self._link.closed = True
        self._end_turn()

    def _tell(self, event: ModuleEvent) -> None:
        """Operators now belong to this model."""
        if not self.at_turn:
            clocks, own = self._at_turn, self._link.clock
            below = clocks[: clocks.index(own)] if own in clocks else clocks
            clocks[:] = [*(clock for clock in below if clock() is not None), own]
        self._on_event(event)

    def _end_turn(self) -> None:
        if self.at_turn:
            self._at_turn.pop()

    def _is_called(self) -> bool:
        return any(clock is not None and clock._open > 0 for clock in (ref() for ref in self._at_turn[:-1]))

    def _begin_hook(self, name: str) -> Callable[..., None]:
        forward, recompute = _ModuleEvents("begin", name, Phase.FWD), _ModuleEvents("begin", name, Phase.RECOMPUTE)

        def begin(module: nn.Module, args: Any) -> None:
            if _graph_task() != -1:
                self.watch_backward()
                self._tell(recompute[self.micro_batch])
                return
            if self._before_event is not None:
                self._before_event()
            if name == "":
                self._callback_due = False  # an earlier backward that raised has never ended
                self._open = 0
                if self._before_event is None:
                    self.micro_batch = self._turns
            self._open += 1
            try:
                self._tell(forward[self.micro_batch])
            except BaseException:
                self._open = max(0, self._open - 1)  # the module does not run
                raise

        return begin

    def _end_hook(self, name: str) -> Callable[..., None]:
        forward, recompute = _ModuleEvents("end", name, Phase.FWD), _ModuleEvents("end", name, Phase.RECOMPUTE)
        gradients, hear = _ModuleEvents("grad", name, Phase.BWD), self._hear

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if _graph_task() != -1:
                self.watch_backward()
                event = recompute[self.micro_batch]
            else:
                if self._before_event is not None:
                    self._before_event()
                self._open = self._open - 1 if self._open > 0 and name else 0
                event = forward[self.micro_batch]
            self._tell(event)
            if not self._open and _graph_task() == -1 and (not self._trains() or self._is_called()):
                self._end_turn()
            if torch.is_grad_enabled():
                hook = functools.partial(hear, gradients[self.micro_batch if self._trains() else -1], [])
                if isinstance(output, torch.Tensor):
                    _hook_output(output, hook)
                else:
                    for tensor in {id(t): t for t in tensors_of(output)}.values():
                        _hook_output(tensor, hook)

        return end

    def _around_root(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return plain(*args, **kwargs)
            except BaseException:
                if _graph_task() == -1:
                    self._open = 0  # no unit inside has ended; a forward hook would not run after Ctrl-C
                raise

        return call

    def tell_gradient(self, event: ModuleEvent) -> None:
        """Does nothing after `close`."""
        if not self._callback_due:
            self.watch_backward()
        self._tell(event)

    def watch_backward(self) -> None:
        if not self._callback_due:
            self._callback_due = True
            if self._in_one:
                return
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_end)

    def _backward_end(self) -> None:
        if self._callback_due:
            self._callback_due = False
            self._turns += 1
            self._tell(ModuleEvent("backward-end", "", "backward-end", Phase.BWD, self.micro_batch))
            if not self._in_one:
                self._end_turn()


def _hearing(link: _ClockLink) -> Callable[[ModuleEvent, list[int], torch.Tensor], None]:
    """Each backward's first gradient to reach outputs of one call is the event.

    heard: by the call's hooks: the backward (graph task) whose gradient came last.
    """

    def hear(event: ModuleEvent, heard: list[int], _: torch.Tensor) -> None:
        task = _graph_task()
        if heard and heard[0] == task:
            return
        heard[:] = [task]
        clock = link.clock()
        if clock is not None:
            clock.tell_gradient(event)
        elif not link.closed:
            raise ContractError(
                "a backward runs through a prepared model that no longer exists; keep a reference to its optimizer"
            )

    return hear


def _hook_output(output: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    # A leaf would keep the hook for ever. It is a parameter or an input, not an output.
    if output.requires_grad and not output.is_leaf:
        # Not by the output's own method: the hook changes no gradient (driving/borders.py asks which do).
        torch.Tensor.register_hook(output, hook)  # type: ignore[no-untyped-call]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in tuples, lists, mappings (ModelOutput) and dataclasses, nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from tensors_of(getattr(value, item.name, None))


_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside backward


def _ignore(_: ModuleEvent) -> None:
    return None
