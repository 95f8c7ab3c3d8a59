"""Compatibility of a plan, a model and an optimizer, checked before anything is allocated or changed.

Each check raises PlanError with one line: the thing, both values, and a remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from executor.descriptions import DESCRIPTIONS, Optimizer, check_groups, described
from executor.devices.rounding import STOCHASTIC
from executor.devices.rules import RULES
from executor.moments.recorder import working_dtype
from executor.scaling import loss_scale_for
from pstar_sim.core.plan import Plan
from pstar_sim.dtypes import DTYPES
from pstar_sim.errors import PlanError
from pstar_sim.workload.lora import adapter_of
from pstar_sim.workload.optimizers import MASTERS, OPTIMIZERS
from pstar_sim.workload.workload import Tensor


def check_model(
    plan: Plan, tensors: Sequence[Tensor], parameters: Sequence[nn.Parameter], groups: dict[int, int]
) -> None:
    """Parameters, dtypes, ties, freezing and groups have to be the plan's.

    groups: see `descriptions.group_of`.
    """
    w = plan.workload
    mine, theirs = {t.name: t for t in tensors}, {t.name: t for t in w.tensors}
    if adapter_of(w) is not None:
        raise PlanError(
            f"the plan has adapters beside {w.model!r}, which planning put there; to run, trace a model that has its "
            "adapters, with peft: pstar trace py:MODULE:FACTORY -o FILE, and plan with --trace FILE"
        )
    if mine.keys() != theirs.keys():
        odd = sorted(mine.keys() ^ theirs.keys())
        whose = "the model" if odd[0] in mine else "the plan"
        raise PlanError(
            f"the plan was made for model {w.model!r} ({len(theirs)} parameters, fingerprint {w.fingerprint}), not "
            f"for this one ({len(mine)} parameters): only {whose} has {odd[0]!r}; make a plan for this model"
        )
    here = working_dtype(tensors)
    if here != w.dtype:
        raise PlanError(
            f"the plan was made for {w.dtype}, the model is in {here}; convert the model first (model.to(...)) or "
            f"make a plan for {here}"
        )
    for name, planned in theirs.items():
        _check_parameter(name, planned, mine[name], w.tensors, tensors)
    order = [t.name for t in w.tensors]
    if order != [t.name for t in tensors]:
        raise PlanError(
            f"the plan was made for model {w.model!r} with its parameters in another order; make a plan for this model"
        )
    for t, parameter in zip(tensors, parameters):
        if t.tied_to is not None and parameters[t.tied_to] is not parameter:
            raise PlanError(
                f"parameters {t.name!r} and {tensors[t.tied_to].name!r} share memory but are two objects, which an "
                "optimizer would update twice; tie them as one Parameter"
            )
    check_groups(tensors, parameters, groups)


def _check_parameter(
    name: str, planned: Tensor, found: Tensor, planned_tensors: Sequence[Tensor], tensors: Sequence[Tensor]
) -> None:
    for what in ("shape", "dtype", "frozen"):
        if getattr(found, what) != getattr(planned, what):
            raise PlanError(
                f"parameter {name!r}: the plan was made for {what} {getattr(planned, what)}, the model has "
                f"{getattr(found, what)}; make a plan for this model"
            )
    tied = None if planned.tied_to is None else planned_tensors[planned.tied_to].name
    tied_here = None if found.tied_to is None else tensors[found.tied_to].name
    if tied != tied_here:
        raise PlanError(
            f"parameter {name!r} is tied to {tied or 'none'} in the plan and to {tied_here or 'none'} in the "
            "model; make a plan for this model (after model.tie_weights())"
        )
    if not found.frozen and found.group != planned.group:
        raise PlanError(
            f"parameter {name!r} is in optimizer group {found.group}, the plan was made for group "
            f"{planned.group}; make the plan for the groups given to the optimizer"
        )


def check_settings(plan: Plan, optimizer: Optimizer) -> None:
    """States, update, clipping and loss scaling have to be the plan's."""
    settings = plan.settings
    _check_states(plan, optimizer)
    wanted = "eager" if optimizer.eager else "step"
    if settings.update != wanted:
        raise PlanError(
            f"the plan was made for update={settings.update!r}, {optimizer.word}(eager={optimizer.eager}) wants "
            f"{wanted!r}; use {optimizer.word}(eager={settings.update == 'eager'}) or make the plan with "
            f"update={wanted!r}"
        )
    if optimizer.rounding == STOCHASTIC:
        _check_rounding(plan, optimizer)
    clips = optimizer.norm_for(clip=settings.clip) is not None
    if settings.clip != clips:
        raise PlanError(
            f"the plan was made {'with' if settings.clip else 'without'} clipping, {optimizer.word} has "
            f"max_grad_norm={optimizer.max_grad_norm}; "
            f"leave max_grad_norm out to do as the plan says, or make the plan with clip={clips}"
        )
    dtype = plan.workload.dtype
    ranks = plan.machine.data_parallel_size
    if settings.sums == "16-bit" and (ranks > 1 or DTYPES[dtype].scaled):
        where = f"on {ranks} GPUs" if ranks > 1 else f"of {dtype} gradients, whose overflow no norm would show"
        raise PlanError(f"sums in 16 bits {where} are planned, not run; make the plan with sums='32-bit'")
    if loss_scale_for(optimizer.loss_scale, plan.workload.tensors) is not None and settings.barrier(dtype) is None:
        why = (
            f"{optimizer.word}(loss_scale={optimizer.loss_scale!r})"
            if optimizer.loss_scale is not None
            else "an fp16 base"
        )
        raise PlanError(
            f"{why}: loss scaling has to see all gradients before any update, the plan was made with "
            f"update={settings.update!r} for {dtype}; make the plan with update='step'"
        )


def _check_rounding(plan: Plan, optimizer: Optimizer) -> None:
    planned = plan.workload.optimizer
    if planned.masters != MASTERS[1]:
        raise PlanError(
            f'{optimizer.word}(rounding="stochastic") is for parameters without fp32 masters; leave it out, or train '
            'in bf16 with masters="none"'
        )
    if planned.name == "muon":
        raise PlanError('Muon(rounding="stochastic") is not supported: its update works on matrices in bf16')


def check_optimizer(plan: Plan) -> None:
    """Raise PlanError for an optimizer that the executor does not know, or whose updates the plan's ranks cut."""
    planned = plan.workload.optimizer
    if planned.name not in DESCRIPTIONS or any(states.name not in RULES for states in planned.all_states):
        newer = " (this torch has no Muon; torch 2.9 has)" if planned.name == "muon" else ""
        raise PlanError(
            f"the plan is for optimizer {planned.name!r}, which the executor does not know{newer}; it runs "
            f"{', '.join(DESCRIPTIONS)}; make the plan with one of them (--optimizer)"
        )
    lacking = next((rule for s in planned.all_states if (rule := RULES[s.name]).needs and not rule.has_plain), None)
    if lacking is not None:
        raise PlanError(
            f"the plan is for optimizer {planned.name!r}, which {lacking.needs} computes; install it (pip install "
            f"{lacking.needs}), or make the plan with another optimizer"
        )
    if planned.masters == MASTERS[1] and DTYPES[plan.workload.dtype].scaled:
        raise PlanError(
            f"{plan.workload.dtype} without fp32 masters: scaled gradients are unscaled in 16 bits, where small ones "
            "become 0; keep the masters, or train in bf16"
        )
    ranks = plan.layout.ranks
    if ranks > 1 and planned.whole:
        raise PlanError(
            f"{planned.name} updates whole tensors, which the slices of {ranks} ranks cut; run it on one GPU, or with "
            "policy all_on_gpu, under which each rank has the whole model"
        )
    spec = OPTIMIZERS[planned.name]
    if planned not in (spec, spec.without_masters(DTYPES[plan.workload.dtype].bytes)):
        raise PlanError(
            f"the plan's optimizer {planned.name!r} has states of {planned.state_bytes} bytes; the executor keeps "
            f"{spec.state_bytes} bytes for it; make the plan anew"
        )


def _check_states(plan: Plan, optimizer: Optimizer) -> None:
    check_optimizer(plan)
    if optimizer.planned != plan.workload.optimizer.name:
        raise PlanError(
            f"the plan is for optimizer {plan.workload.optimizer.name!r}, {optimizer.given} was given; give "
            f"{described(plan.workload.optimizer.name)} or make the plan with --optimizer {optimizer.planned}"
        )


def torchrun_line(plan: Plan, file: str = "PLAN", model: str = "MODEL") -> str:
    nodes = f"--nnodes {plan.machine.nodes} " if plan.machine.nodes > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {plan.machine.local_ranks} -m executor {file} --model {model}"


def check_processes(plan: Plan, found: int, *, file: str = "PLAN", model: str = "MODEL") -> None:
    """The job's processes have to be as many as the plan's ranks, among all of which chunks are sliced.

    file, model: for the message.
    """
    wanted, slices = plan.machine.world_size, plan.layout.ranks
    if 1 < slices < wanted:
        raise PlanError(
            f"the plan slices parameters over {slices} of its {wanted} GPUs (replicas), which FSDP does: "
            "pstar export --fsdp2, or make a plan without replicas"
        )
    if found == wanted:
        return
    if found == 1:
        raise PlanError(
            f"the plan is for {wanted} GPUs ({plan.machine.name}) and this is a single process; start {wanted}: "
            f"{torchrun_line(plan, file, model)} (or your own script with torchrun, and "
            "torch.distributed.init_process_group before prepare)"
        )
    if wanted == 1:
        raise PlanError(
            f"the plan is for a single GPU and this job has {found} processes; make a plan for {found} "
            f"(`pstar plan --gpus {found}`), or give prepare(group=...) a group of this process alone to train {found} "
            "models"
        )
    raise PlanError(
        f"the plan is for {wanted} GPUs ({plan.machine.name}) and this job has {found} processes; start {wanted}: "
        f"{torchrun_line(plan, file, model)}, or make a plan for {found} (`pstar plan --gpus {found}`)"
    )
