"""A forward cut at its blocks, so that backward runs block by block.

[Note: borders] A block's inputs and outputs are cut out of the autograd graph. The consumer gets a tensor of the same
memory in a new graph, whose gradient ends in a `Sink`; the producer keeps a `_CutOutput`, from which it later
continues. So a forward leaves one graph per block; operations outside blocks (glue) have their own, the last with the
loss (the tail). `BlockTape` holds them all: in reverse they are the whole backward.

    tail                  from the loss to outputs of blocks
    block of call i       from its outputs to its inputs
    glue before call i    from tensors first cut as an input of call i to outputs of earlier blocks

A tensor that several blocks take (a mask with a gradient, an encoder's output) is cut once, and its gradients add up in
one sink. [Note: the order of sums] Autograd adds the gradients of a tensor's uses one by one, the last use first. A
part with several uses of a cut tensor would add its own first, so its backward begins with the sums that later parts
left in sinks, each at its border.

Not cut are a tensor that a block takes and the model also uses afterwards (a residual stream outside the blocks), and
one inside an object of the model's own. Then two parts share a graph (`shared_part`).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from executor.activations.stashes import ForwardSaves
from executor.devices.torch_private import backward_from, node_class
from executor.moments.compiled import untraced
from executor.moments.nests import map_tensors


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Members (with parameters) of the outermost ModuleLists and Sequentials that have two or more, in the order of
    `named_modules()`. A block inside a block does not count."""
    found: dict[str, nn.Module] = {}

    def look(module: nn.Module, name: str) -> None:
        children = [(key, child) for key, child in module.named_children() if _has_parameters(child)]
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1:
            for key, child in children:
                if isinstance(child, nn.ModuleList):  # a ModuleList is never called itself
                    look(child, _join(name, key))
                else:
                    found[_join(name, key)] = child
            return
        for key, child in children:
            look(child, _join(name, key))

    look(model, "")
    return found


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


class Sink:
    """A cut tensor's gradient, summed over its uses, until backward continues from there.

    closed: the cut was undone; no gradient may arrive.
    hooked: the model's hook on the cut tensor gets each part's gradient, and no sum a second time.
    """

    def __init__(self) -> None:
        self.closed = False
        self.hooked = False
        self.gradient: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def take(self) -> torch.Tensor | None:
        gradient, self.gradient = self.gradient, None
        return gradient


class _BlockBorder(torch.autograd.Function):
    """The consumer's side: no leaf, so modules may work on it in place."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, sink: Sink) -> torch.Tensor:
        ctx.sink = sink
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        if gradients[0] is not None:
            ctx.sink.add(gradients[0])
        return None, None, None


class _CutOutput(torch.autograd.Function):
    """The producer's side: an empty tensor whose backward gives the sink's gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, sink: Sink) -> torch.Tensor:
        ctx.sink = sink
        return value.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return ctx.sink.take(), None


_BEFORE = "before "
_LEAF = "torch::autograd::AccumulateGrad"
_CUT_NODE = node_class(_BlockBorder)


@dataclass(frozen=True, slots=True)
class End:
    """sink: where the gradient arrives, None for the loss.
    border: the consumer's side, whose node `keep` keeps alive.
    """

    root: torch.Tensor
    sink: Sink | None = None
    border: GradientEdge | None = None
    keep: Any = None


@dataclass(slots=True)
class BlockPart:
    """name: "tail", a block, or "before " and the next block for glue."""

    name: str
    ends: list[End] = field(default_factory=list)

    @property
    def before_block(self) -> bool:
        return self.name.startswith(_BEFORE)


@dataclass(frozen=True, slots=True)
class _Known:
    """Noted on one of a border's two tensors.

    node: autograd's at the cut; a tensor changed in place since has another.
    other: on the other side: what the block got, or gave.
    part: that ends here.
    """

    tape: BlockTape
    node: Any
    other: torch.Tensor
    part: BlockPart
    sink: Sink


class _Recorded(threading.local):
    tape: BlockTape | None = None


class Borders:
    """Hooks, in place until `close()`, that act only inside `recording`: a model that collects its blocks' tensors by
    hooks always collects the same."""

    def __init__(self, model: nn.Module, blocks: dict[str, nn.Module]) -> None:
        self._recorded = _Recorded()
        self._handles: list[Any] = []
        for name, block in blocks.items():
            self._handles.append(block.register_forward_pre_hook(untraced(self._before(name)), with_kwargs=True))
            self._handles.append(block.register_forward_hook(untraced(self._after(name))))
        self._handles.append(model.register_forward_hook(untraced(self._leave), prepend=True))

    @contextlib.contextmanager
    def recording(self, saves: ForwardSaves | None = None) -> Iterator[BlockTape]:
        """Calls of blocks are cut at both ends."""
        self._recorded.tape = tape = BlockTape(saves)
        try:
            yield tape
        finally:
            self._recorded.tape = None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            tape = self._recorded.tape
            return tape.enter(name, args, kwargs) if tape is not None and _cuttable() else None

        return before

    def _after(self, name: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            tape = self._recorded.tape
            return tape.leave(name, output) if tape is not None and _cuttable() else None

        return after

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        tape = self._recorded.tape
        return tape.give_back(output) if tape is not None and _cuttable() else None


class BlockTape:
    """The parts of one micro-batch's forward.

    saves: see `recording`.
    """

    def __init__(self, saves: ForwardSaves | None = None) -> None:
        self.calls = 0
        self._saves = saves
        self.parts: list[BlockPart] = []
        self._anchor = torch.zeros((), requires_grad=True)
        self._open = 0

    @property
    def signature(self) -> tuple[tuple[str, int], ...]:
        """(name, cut tensors) of each part; equal signatures are taken for equal graphs."""
        return tuple((part.name, len(part.ends)) for part in self.parts)

    def end(self, loss: torch.Tensor) -> None:
        """The graph that leads to the loss becomes the tail."""
        self.parts.append(BlockPart("tail", [End(loss)]))

    def back(self) -> None:
        """Backward through the last part, which is dropped; nothing without gradients. [Note: the order of sums]"""
        part = self.parts.pop()
        roots = [end.root for end in part.ends if end.sink is None or end.sink.gradient is not None]
        if not roots:
            return
        part.ends.clear()
        starts: list[torch.Tensor | GradientEdge] = [*roots]
        gradients = [torch.ones_like(root) for root in roots]
        for end in (end for earlier in self.parts for end in earlier.ends):
            if end.border is not None and end.sink is not None and not end.sink.hooked:
                gradient = end.sink.take()
                if gradient is not None:
                    starts.append(end.border)
                    gradients.append(gradient)
        backward_from(starts, gradients)

    def enter(self, name: str, args: Any, kwargs: Any) -> Any:
        """A block's new arguments; None inside another block."""
        self._open += 1
        if self._open > 1:
            return None  # a block that calls another block
        part = BlockPart(f"{_BEFORE}{name}")
        given = map_tensors((args, kwargs), lambda t: self._input(t, part))
        if part.ends:
            self.parts.append(part)
        if self._saves is not None:
            self._saves.begin((args, kwargs))
        return given

    def leave(self, name: str, output: Any) -> Any:
        """A block's new output; None inside another block."""
        self._open -= 1
        if self._open > 0:
            return None
        part = BlockPart(name)
        given = map_tensors(output, lambda t: self._output(t, part))
        self.parts.append(part)
        self.calls += 1
        if self._saves is not None:
            self._saves.end(name)
        return given

    def give_back(self, output: Any) -> Any:
        """Undo cuts of what the last block gave and the model returns: the clock's hooks for both have to be on one
        tensor. The block then belongs to the tail."""
        return map_tensors(output, self._uncut)

    def _input(self, tensor: torch.Tensor, part: BlockPart) -> torch.Tensor:
        if tensor.grad_fn is None:
            return tensor  # no gradient flows through the output
        known = self._known(tensor)
        if known is None:
            made, sink = self._border(tensor, part)
            known = _Known(self, tensor.grad_fn, made, part, sink)
            tensor.pstar_border = known  # type: ignore[attr-defined]
        return known.other if known.part.name.startswith(_BEFORE) else tensor

    def _output(self, tensor: torch.Tensor, part: BlockPart) -> torch.Tensor:
        if tensor.grad_fn is None:
            return tensor
        made, sink = self._border(tensor, part)
        made.pstar_border = _Known(self, made.grad_fn, tensor, part, sink)  # type: ignore[attr-defined]
        return made

    def _known(self, tensor: torch.Tensor) -> _Known | None:
        """A list of cut tensors would keep their memory."""
        known: _Known | None = getattr(tensor, "pstar_border", None)
        return known if known is not None and known.tape is self and known.node is tensor.grad_fn else None

    def _uncut(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._known(tensor)
        if known is None or not self.parts or known.part is not self.parts[-1]:
            return tensor
        known.part.ends = [end for end in known.part.ends if end.sink is not known.sink]
        known.sink.closed = True
        return known.other

    def _border(self, tensor: torch.Tensor, part: BlockPart) -> tuple[torch.Tensor, Sink]:
        sink = Sink()
        root = _CutOutput.apply(tensor, sink)  # type: ignore[no-untyped-call]
        made = _BlockBorder.apply(self._anchor, tensor.detach(), sink)  # type: ignore[no-untyped-call]
        made.register_hook = partial(_hook, weakref.ref(made), sink)
        part.ends.append(End(root, sink, GradientEdge(made.grad_fn, made.output_nr), made.view_as(made).grad_fn))
        return made, sink


def _hook(cut: Callable[[], Any], sink: Sink, hook: Callable[[torch.Tensor], Any]) -> Any:
    sink.hooked = True
    return torch.Tensor.register_hook(cut(), hook)  # type: ignore[no-untyped-call]


def _cuttable() -> bool:
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


OTHER_FORWARD = "another micro-batch"


def shared_part(tape: BlockTape) -> tuple[str, str] | None:
    """Two parts whose graphs share a node (OTHER_FORWARD: another tape's cut tensor), so they cannot run one by one.
    Walks every node once."""
    owner: dict[Any, int] = {}
    sinks = {end.sink for part in tape.parts for end in part.ends}
    for number, part in enumerate(tape.parts):
        waiting = [end.root.grad_fn for end in part.ends]
        while waiting:
            node = waiting.pop()
            if isinstance(node, _CUT_NODE):
                cut: Any = node
                if cut.sink.closed:
                    return "the model's output", part.name
                if cut.sink not in sinks:
                    return OTHER_FORWARD, part.name
                continue
            if node is None or node.name() == _LEAF:
                continue
            if node not in owner:
                owner[node] = number
                waiting.extend(following for following, _ in node.next_functions)
            elif owner[node] != number:
                return tape.parts[owner[node]].name, part.name
    return None
