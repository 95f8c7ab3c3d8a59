"""session.step(micro_batches): the engine orders the blocks.

Each micro-batch's forward runs with borders at the blocks (`borders.py`), then backward part by part:

    "depth-first"    for each micro-batch: all blocks forward, then all backward in reverse
    "relay"          each block for all micro-batches before the next, forward and backward: `layer_major.py`

The plan decides (`order=None`); another order is refused.

Moments are the usual loop's: backwards of the parts count as one, and a parameter of several parts (tied weights) gives
its gradient at the last. Losses, gradients and updates are those of the loop

    for batch in micro_batches: (loss(model, batch) / len(micro_batches)).backward()
    optimizer.step(); optimizer.zero_grad()

Whether the model can be cut is found once, on its copy without memory under fake tensors. If not (no list of blocks, a
tensor that goes past its block, a model that cannot be copied or faked, reentrant checkpointing), every micro-batch
runs whole, in the same order, and the result says why.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from executor.capture import RealShapes, fake_module
from executor.driving.again import Before
from executor.driving.borders import OTHER_FORWARD, BlockTape, Borders, find_blocks, shared_part
from executor.driving.layer_major import relay
from executor.driving.loop import Loop
from executor.memory.update import Update
from executor.models import forward_loss, known_masks, quiet, unpacked_sequences, unread_padding
from executor.moments.hooks import tensors_of
from executor.session.state import RunState
from pstar_sim.errors import ContractError, OutOfMemory

log = logging.getLogger("executor")

Loss = Callable[[nn.Module, Any], torch.Tensor]

_DEPTH_FIRST = "make a plan in depth-first order (tide)"


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One iteration of `session.step`.

    loss: mean over the micro-batches.
    time_s: wall time of the call, without work that runs into the next forward.
    tokens: tokens of all micro-batches (rows, where a batch has no tokens).
    blocks: calls of blocks in a micro-batch; 0 where the model ran whole, for the reason in `whole`.
    """

    loss: float
    time_s: float
    tokens: int
    blocks: int
    whole: str = ""
    _norm: float | None = field(default=None, repr=False)
    _ask: Callable[[], float | None] | None = field(default=None, repr=False, compare=False)

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the gradients before clipping; None without clipping. With several micro-batches it is known
        only when the first update begins, so reading waits for the updates."""
        return self._norm if self._ask is None else self._ask()


class Driver:
    """optimizer(): None if gone.
    whole: why the model runs whole, None if it can be cut at its blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        loop: Loop,
        on_close: list[Callable[[], object]],
        optimizer: Callable[[], torch.optim.Optimizer | None],
    ) -> None:
        self.model = model
        self.loop = loop
        self.state = loop.state
        self._optimizer = optimizer
        blocks = find_blocks(model)
        self.whole: str | None = None if blocks else "the model has no list of blocks"
        self._borders = Borders(model, blocks)
        on_close.append(self._borders.close)
        # (micro-batches, signature) of tapes whose parts share no node
        self._clean: set[tuple[int, tuple[tuple[str, int], ...]]] = set()
        self._looked = False

    def step(self, micro_batches: Sequence[Any], loss: Loss, order: str | None) -> StepResult:
        """See `Session.step`."""
        begun_s = time.perf_counter()
        order = self._check(micro_batches, order)
        optimizer = self._optimizer()
        if optimizer is None:
            raise ContractError("the optimizer that executor.prepare returned is gone; keep it while you train")
        self._require_structure(micro_batches[0], loss, order)
        losses, calls = self._run(micro_batches, loss, order)
        number = self.state.iteration
        optimizer.step()
        optimizer.zero_grad()
        update = self.loop.updates.last
        clips = update is not None and update.max_grad_norm is not None
        known = update.norm if update is not None and clips else None
        return StepResult(
            loss=float(torch.stack(losses).sum()),
            time_s=time.perf_counter() - begun_s,
            tokens=sum(_tokens(batch) for batch in micro_batches),
            blocks=calls,
            whole=self.whole or "",
            _norm=None if known is None else float(known),
            _ask=_asking(self.state, update, number) if update is not None and clips and known is None else None,
        )

    def _require_structure(self, batch: Any, loss: Loss, order: str) -> None:
        if not self._looked and self.whole is None:
            self._look(batch, loss, order)
        self._looked = True
        if self.whole is not None and order == "relay":
            raise ContractError(
                f"session.step: order='relay' runs the model block by block, which is not possible: {self.whole}; "
                f"{_DEPTH_FIRST}"
            )

    def _run(self, micro_batches: Sequence[Any], loss: Loss, order: str) -> tuple[list[torch.Tensor], int]:
        before = Before(self.model)
        while True:
            try:
                with torch.enable_grad():
                    return ORDERS[order](self, micro_batches, loss)
            except (OutOfMemory, torch.OutOfMemoryError) as error:
                refused = error.with_traceback(None)  # the error's frames hold the forward's tensors
            self.loop.ladder.recover(refused)
            before.restore()

    def _check(self, micro_batches: Sequence[Any], order: str | None) -> str:
        self.loop.standstill.require_running()
        plan = self.state.run.plan
        w = plan.workload
        if w.micro_batches > 1 and w.boundaries_on_host and w.order.one_by_one:
            raise ContractError(
                f"session.step: the plan of {plan.policy} has the inputs of blocks on the host and runs "
                f"{w.micro_batches} micro-batches one after the other; that runs with one micro-batch only; give "
                "checkpoints=gpu, or make a plan layer by layer (tide:order=relay-host)"
            )
        known_order = self._known_order(order)
        self._check_micro_batches(micro_batches)
        if self.state.cursor.moment >= 0 and self.state.now.arrived:
            raise ContractError(
                "session.step inside an iteration: gradients of a backward wait for optimizer.step(); call it and "
                "zero_grad() first"
            )
        return known_order

    def _known_order(self, order: str | None) -> str:
        plan, w = self.state.run.plan, self.state.run.plan.workload
        planned = "relay" if w.relayed else "depth-first"
        order = planned if order is None else order
        if not isinstance(order, str) or order not in ORDERS:
            raise ContractError(f"session.step: order={order!r} is not known; it is one of {', '.join(ORDERS)}")
        if (w.micro_batches > 1 or w.relayed) and order != planned:
            raise ContractError(
                f"session.step: order={order!r}, and the plan of {plan.policy} is for order={planned!r}; give "
                f"that order, or make a plan for {order!r} ({'l2l, tide:order=relay' if order == 'relay' else 'tide'})"
            )
        return order

    def _check_micro_batches(self, micro_batches: Sequence[Any]) -> None:
        if isinstance(micro_batches, (dict, torch.Tensor)) or not len(micro_batches):
            raise ContractError(
                "session.step takes a list of micro-batches, one or more; for a single one give [batch]"
            )
        planned = self.state.run.timetable.micro_batches
        if len(micro_batches) > planned:
            raise ContractError(
                f"session.step got {len(micro_batches)} micro-batches, the plan was made for {planned}; make the plan "
                f"for as many ({self.state.spelling.micro_batches})"
            )

    # -- structure ----------------------------------------------------------------------------------------------------

    def _look(self, batch: Any, loss: Loss, order: str) -> None:
        """On the copy without memory; in a relay, a model that asks for tensors' values (layer dropping) is examined in
        each forward."""
        shapes_of = self.state.run.batches.shapes
        skeleton = shapes_of.skeleton
        if skeleton is None:
            self.whole = f"{type(self.model).__name__} cannot be copied to look at its structure"
            return
        shapes_of.copy_attributes()
        borders = Borders(skeleton, find_blocks(skeleton))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        guard = self.model.register_forward_pre_hook(_not_this_one, prepend=True)
        try:
            with contextlib.ExitStack() as stack:
                inputs = stack.enter_context(fake_module(skeleton, batch, mode))
                if not (isinstance(batch, dict) and "position_ids" in batch):
                    stack.enter_context(unpacked_sequences())
                stack.enter_context(unread_padding())
                stack.enter_context(quiet("torch._subclasses.fake_tensor"))
                shapes = RealShapes(mode)  # a model that makes a mask of ones may ask whether all elements are one
                stack.enter_context(known_masks(lambda tensor: shapes.value_of(tensor) is not None))
                stack.enter_context(mode)
                stack.enter_context(shapes)
                stack.enter_context(torch.enable_grad())
                stack.enter_context(torch.random.fork_rng(devices=[]))
                with borders.recording() as tape:
                    tape.end(loss(skeleton, inputs))
                self.whole = _obstacle(tape)
        except ContractError:
            raise
        except Exception as error:  # a model may fail under fake tensors for any reason; then it runs whole
            if order == "relay" and isinstance(error, DataDependentOutputException):
                return
            text = " ".join(str(error).split())[:200]
            self.whole = f"its structure cannot be looked at under fake tensors: {type(error).__name__}: {text}"
        finally:
            guard.remove()
            borders.close()
        if self.whole is not None:
            log.info("session.step runs the model whole: %s", self.whole)

    # -- parts of orders ----------------------------------------------------------------------------------------------

    def forward(self, batch: Any, loss: Loss, of: int) -> tuple[BlockTape, torch.Tensor]:
        """Runs one micro-batch's forward, cut at its blocks; raises ContractError if a changed structure cannot be.

        of: micro-batches, by which the loss is divided.
        """
        model, run = self.model, self.state.run
        if self.whole is not None:
            tape, value = BlockTape(), loss(model, batch) / of
            tape.end(value)
            return tape, value.detach()
        saves = run.stashes.boundaries()
        hooks = contextlib.nullcontext() if saves is None else saves.hooks()
        with self._borders.recording(saves) as tape, hooks:
            value = loss(model, batch) / of
            tape.end(value)
        form = (of, tape.signature)
        if form not in self._clean:
            obstacle = _obstacle(tape) if tape.calls else None  # the forward has left out all blocks
            if obstacle is not None:
                relayed = run.timetable.relayed
                instead = _DEPTH_FIRST if relayed else "use loss.backward() in a loop of your own"
                raise ContractError(
                    f"session.step cannot run this micro-batch block by block, although its structure seemed to "
                    f"allow it: {obstacle}; drop it with optimizer.zero_grad() and {instead}"
                )
            self._clean.add(form)
        return tape, value.detach()

    def backward(self, tape: BlockTape) -> None:
        following = self.state.run.following
        following.in_parts = True
        try:
            with self.loop.clock.one_backward():
                while tape.parts:
                    tape.back()
        finally:
            following.in_parts = False


def _depth_first(driver: Driver, micro_batches: Sequence[Any], loss: Loss) -> tuple[list[torch.Tensor], int]:
    losses: list[torch.Tensor] = []
    calls = 0
    for batch in micro_batches:
        tape, value = driver.forward(batch, loss, len(micro_batches))
        calls = tape.calls
        losses.append(value)
        driver.backward(tape)
    return losses, calls


def _relay(driver: Driver, micro_batches: Sequence[Any], loss: Loss) -> tuple[list[torch.Tensor], int]:
    runs = [partial(driver.forward, batch, loss, len(micro_batches)) for batch in micro_batches]
    return relay(driver.loop, runs)


ORDERS: dict[str, Callable[[Driver, Sequence[Any], Loss], tuple[list[torch.Tensor], int]]] = {
    "depth-first": _depth_first,
    "relay": _relay,
}


def _obstacle(tape: BlockTape) -> str | None:
    if not tape.calls:
        return "no block was called with gradients (blocks that are checkpointed reentrantly are not)"
    shared = shared_part(tape)
    if shared is None:
        return None
    if shared[0] == OTHER_FORWARD:
        return f"{shared[1]} uses a tensor of another micro-batch, which the model keeps from one block to another"
    return f"a tensor that a block takes is also used past it: {shared[0]} and {shared[1]} share a part of the graph"


def _asking(state: RunState, update: Update, iteration: int) -> Callable[[], float | None]:
    def ask() -> float | None:
        if update.norm is None:
            state.run.queues.settle(iteration)
        return None if update.norm is None else float(update.norm)

    return ask


def _not_this_one(module: nn.Module, args: Any) -> None:
    raise ContractError(
        "session.step: loss(model, batch) has to call the model that it is given, not another reference to it"
    )


def _tokens(batch: Any) -> int:
    shape, integer = next(
        ((t.shape, not t.is_floating_point()) for t in tensors_of(batch) if t.dim()), (torch.Size([1]), False)
    )
    return int(shape[0] * shape[1]) if integer and len(shape) == 2 else int(shape[0])


default_loss: Loss = forward_loss
