"""Texts of the ContractErrors that acts of the loop raise; `cursor.py` decides which."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from pstar_sim.errors import ContractError


class Refusal(Enum):
    CLOSED = "closed"
    INTERRUPTED = "interrupted"
    HALF_LOADED = "half loaded"
    SWITCHED_FORWARD = "switched forward"
    SWITCHED_BACKWARD = "switched backward"
    OUTSIDE = "outside"
    LAYER_MAJOR = "layer major"
    OUT_OF_MEMORY = "out of memory"
    UPDATING = "updating"
    OF_EVALUATION = "of evaluation"
    NOT_CLEARED = "not cleared"
    SURPLUS = "surplus"
    TWICE = "twice"
    UNDUE = "undue"
    CHANGED = "changed"
    KEEPS = "keeps"
    UPDATED = "updated"
    SUMMED = "summed"
    GRAD = "grad"
    GRAD_IN_BACKWARD = "grad in backward"
    GRAD_SET = "grad set"
    GRAD_LEFT = "grad left"
    BORDER = "border"
    NO_GRADIENT = "no gradient"
    SCALED = "scaled"
    TRANSFORMED = "transformed"
    WRITTEN = "written"
    DOUBLE = "double"
    ADDRESS = "address"


_SWITCHED = (
    " while requires_grad of {f.switched_name!r} ({f.switched_count} parameters) is not what it was at prepare: the "
    "plan was made for what was trainable then; put it back after the evaluation it was changed for, or freeze before "
    "planning and prepare again"
)

TEXTS: Mapping[Refusal, str] = MappingProxyType(
    {
        Refusal.CLOSED: "the session is closed; call executor.prepare again",
        Refusal.INTERRUPTED: (
            "iteration {f.iteration} was interrupted; call optimizer.zero_grad() to drop what it has left of its "
            "gradients, and run its forward and backward again"
        ),
        Refusal.HALF_LOADED: (
            "{f.loading} has begun and did not end: some values are loaded and others are not; call {f.loading} again"
        ),
        Refusal.SWITCHED_FORWARD: "a forward of {f.forward} with gradients" + _SWITCHED,
        Refusal.SWITCHED_BACKWARD: "a backward" + _SWITCHED,
        Refusal.OUTSIDE: (
            "{f.module!r} is called with gradients outside a forward of the prepared model: loss scaling acts at that "
            "model's inputs and outputs; call the prepared model itself, or train in bf16 or fp32"
        ),
        Refusal.LAYER_MAJOR: (
            "a forward of {f.forward} with gradients, and the plan of {f.policy} is layer-major: its iterations run in "
            "session.step(micro_batches, order='relay'); for a loop of your own make a plan in depth-first order (tide)"
        ),
        Refusal.OUT_OF_MEMORY: (
            "the iteration that ran out of memory has left some of its gradients; call optimizer.zero_grad() and run "
            "its forward and backward again"
        ),
        Refusal.UPDATING: (
            "{f.what} between the last backward and optimizer.step() with eager updates: some parameters are updated "
            "already; do it after step(), or use AdamW(eager=False)"
        ),
        Refusal.OF_EVALUATION: (
            "a backward from an output of {f.source} that was computed while requires_grad of every trainable "
            "parameter was off: that was an evaluation; compute the loss again"
        ),
        Refusal.NOT_CLEARED: (
            "a backward after optimizer.step() without zero_grad(): plain torch would add to gradients that are gone "
            "here; call optimizer.zero_grad() after each step"
        ),
        Refusal.SURPLUS: (
            "backward number {f.backward} of an iteration that the plan made for {f.planned} micro-batches: call "
            "optimizer.step() and zero_grad() first, or make the plan for as many micro-batches as the loop "
            "accumulates ({f.setting})"
        ),
        Refusal.TWICE: (
            "optimizer.step() twice for one backward: the gradients are gone after the first; run a backward in between"
        ),
        Refusal.UNDUE: (
            "optimizer.step() where accelerator.sync_gradients is False: no step is due, and an optimizer of "
            "accelerate's skips it; wrap this one (optimizer = accelerator.prepare(optimizer)), or call step() and "
            "zero_grad() under `if accelerator.sync_gradients:`"
        ),
        Refusal.CHANGED: (
            "param_groups changed between the forward and optimizer.step() with eager updates: chunks were updated "
            "with the old values; change them after step() and before the next forward"
        ),
        Refusal.KEEPS: (
            "zero_grad(set_to_none=False) keeps gradient tensors, which live in chunks here; call zero_grad()"
        ),
        Refusal.UPDATED: (
            "zero_grad() before step() with eager updates, in the last backward or after it: parameters are updated in "
            "that backward and their gradients cannot be dropped any more; call step(), or use AdamW(eager=False)"
        ),
        Refusal.SUMMED: (
            "zero_grad() before step() on several ranks: the gradients are summed already, and the other ranks count "
            "on the update; call step()"
        ),
        Refusal.GRAD: (
            "the gradient of {f.name!r} is not in .grad: it left for its chunk as soon as it was final. To see or "
            "change it on its way, register a hook before prepare, or p.register_hook. To clip, give "
            "AdamW(max_grad_norm=...) instead of clip_grad_norm_ (executor.hf.connect for a transformers Trainer); its "
            "norm is optimizer.session.grad_norm. Loss scaling is AdamW(loss_scale=...), on by itself in fp16, instead "
            "of GradScaler"
        ),
        Refusal.GRAD_IN_BACKWARD: (
            "the gradient of {f.name!r} is not in .grad inside a backward: it left for its chunk as soon as it was "
            "final. To update parameters in backward, make the plan with update='eager' and give AdamW(eager=True); to "
            "see or change gradients, {f.hooking}"
        ),
        Refusal.GRAD_SET: (
            "the gradient of {f.name!r} cannot be set: gradients live in chunks; change the loss instead"
        ),
        Refusal.GRAD_LEFT: (
            "the gradient of {f.name!r} has left for its chunk; call optimizer.zero_grad() to drop the gradients of "
            "all parameters"
        ),
        Refusal.BORDER: (
            "{f.name!r} is read inside an iteration, outside every module: on several ranks each holds a part of it; "
            "read it between optimizer.step() and the next forward, on all ranks"
        ),
        Refusal.NO_GRADIENT: (
            "optimizer.step() would train nothing: no parameter got a gradient in the iteration's {f.backwards}; call "
            "loss.backward(), or zero_grad() to begin the iteration anew (torch.autograd.grad returns gradients and "
            "leaves none; backward(inputs=...) leaves them in its inputs alone)"
        ),
        Refusal.SCALED: (
            "torch.autograd.grad of parameters under loss scaling would return gradients multiplied by the scale; call "
            "loss.backward(), or train in bf16 or fp32"
        ),
        Refusal.TRANSFORMED: (
            "{f.subject} inside a transform of torch.func (grad, vjp, jvp, vmap, ...), which hides parameters from the "
            "session; use a copy of the model and torch.func.functional_call(copy, model.state_dict(), ...), or "
            "torch.autograd"
        ),
        Refusal.WRITTEN: (
            "parameter {f.written_name!r} has been written by a forward (max_norm= of an embedding, or the model's own "
            "code): the master copy keeps its old value, and the write would be lost; write parameters before "
            "executor.prepare, or compute the changed value in the forward without writing it"
        ),
        Refusal.DOUBLE: (
            "a backward with create_graph=True, and the plan of {f.policy} moves parameters, or writes gradients over "
            "them, before a backward through its graph has read them; make the plan with a policy that leaves them in "
            "their places (zero_offload)"
        ),
        Refusal.ADDRESS: (
            "data_ptr() of {f.name!r} outside every module: its memory moves with its chunk; compare parameters with "
            "`is`, or read model.state_dict()"
        ),
    }
)


def refused(refusal: Refusal, facts: object) -> ContractError:
    """facts: an attribute per word `{f.WORD}` of the text."""
    return ContractError(TEXTS[refusal].format(f=facts))
