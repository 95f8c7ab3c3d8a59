"""Ours beside plain AdamW on the same device: one model, one dtype, several policies and kinds of updates."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from contenders.task import Task
from contenders.worker import Built

from executor import AdamW, prepare
from executor.capture import capture
from executor.models import build, forward_loss
from executor.running.data import batches_like, open_data
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.registry import find_policy
from pstar_sim.workload.workload import Workload

__all__ = ["BOUNDS", "apart", "run"]

# losses: largest relative difference; kernels differ with alignment (64 bytes in a chunk, 512 in torch's own memory).
# update: length of the difference of all parameters, relative to the length of what training changed. Where a gradient
# is zero but for rounding (biases of attention's keys), Adam still moves by lr, in a direction that rounding decides:
# GPT-2 has 9,216 such of 124 M parameters, sqrt(9216 / 124e6) = 0.9 % of the update. In bf16 besides a working copy
# falls to the other side now and then, by an ulp that is as large as the update of lr = 1e-4. A lost micro-batch, or a
# chunk that is not updated, changes far more.
BOUNDS = {"fp32": {"losses": 2e-5, "update": 2e-2}, "bf16": {"losses": 5e-3, "update": 1e-1}}
Values = Mapping[str, torch.Tensor]
SHARES = (0.4, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 12.0)


def apart(mine: Values, theirs: Values, begun: Values) -> tuple[float, str]:
    """Returns (length of the difference over the length of training's change, the parameter with the largest part)."""
    off = {name: float((mine[name].detach().cpu().float() - theirs[name].float()).norm()) for name in theirs}
    changed = math.hypot(*(float((theirs[name].float() - begun[name].float()).norm()) for name in theirs))
    return math.hypot(*off.values()) / changed, max(off, key=lambda name: off[name])


def tight(policy: str, workload: Workload, settings: Settings) -> Plan:
    """Returns a plan at the smallest of a few budgets at which the policy fits, so that chunks move. Raises
    DoesNotFit."""
    params_bytes = sum(t.bytes for t in workload.tensors if t.tied_to is None)
    for share in SHARES:
        room = workload.peak_non_model_bytes + int(share * params_bytes)
        try:
            return find_policy(policy)(workload, load_machine("virtual", gpu_memory=room), settings)
        except DoesNotFit as error:
            last = error
    raise last


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a stage: {"model", "dtype", "batch", "sequence", "micro_batches", "steps", "policies", "updates", "device"} ->
    {"policy, update": differences, deviations, exchanges, or the reason why there are none}."""
    device = job["device"]
    task = Task(
        contender="plain", model=job["model"], global_batch=job["batch"] * job["micro_batches"],
        micro_batch=job["batch"], sequence=job["sequence"], dtype=job["dtype"], checkpointing=False, clip=False,
        device=device, threads=torch.get_num_threads(),
    )  # fmt: skip
    shape = {"batch": task.global_batch, "sequence": task.sequence, "dtype": task.dtype, "checkpointing": False}

    begun_s = time.perf_counter()
    built = build(task.model, seed=0, **shape)  # once: drawing weights takes longer than training

    def made() -> Built:
        batches = batches_like(built.example_batch, open_data(None), vocabulary=built.vocabulary, seed=0)
        return Built(module=copy.deepcopy(built.module), batches=batches, task=task)

    plain = made()
    begun = {name: p.detach() for name, p in built.module.named_parameters()}
    expected = _plain(plain, job["steps"])
    values = {name: p.detach().cpu() for name, p in plain.module.named_parameters()}
    plain.module.cpu()
    print(f"plain: losses {expected}, {time.perf_counter() - begun_s:.1f} s", flush=True)
    workload = capture(task.model, micro_batches=task.micro_batches, **{**shape, "batch": task.micro_batch})
    found: dict[str, Any] = {}
    for policy in job["policies"]:
        for update in job["updates"]:
            begun_s = time.perf_counter()
            row = _one(policy, update, workload, made(), expected, values, begun)
            found[f"{policy}, {update}"] = row = {**row, "s": round(time.perf_counter() - begun_s, 1)}
            print(f"{policy}, {update}: {row}", flush=True)
    return {"losses": expected, "bounds": BOUNDS[task.dtype], "runs": found}


def _plain(built: Built, steps: int) -> list[float]:
    """Returns the losses of torch.optim.AdamW(fused=True) on the device; in bf16 over fp32 masters, gradients summed in
    fp32."""
    model = built.module.to(built.task.device)
    parameters = list(model.parameters())
    masters = parameters
    if built.task.dtype != "fp32":
        masters = [torch.nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=built.task.lr, fused=True)
    losses = []
    for _ in range(steps):
        micro_batches, total = built.micro_batches(next(built.batches)), 0.0
        for batch in micro_batches:
            loss = forward_loss(model, batch) / len(micro_batches)
            loss.backward()
            total += float(loss.detach())
            if masters is not parameters:
                for master, parameter in zip(masters, parameters):
                    if parameter.grad is not None:
                        gradient = parameter.grad.float()
                        master.grad = gradient if master.grad is None else master.grad + gradient
                        parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        if masters is not parameters:
            with torch.no_grad():
                for master, parameter in zip(masters, parameters):
                    parameter.copy_(master)
        losses.append(total)
    return losses


def _one(
    policy: str, update: str, workload: Workload, built: Built, expected: list[float], values: Values, begun: Values
) -> dict[str, Any]:
    task = built.task
    try:
        plan = tight(policy, workload, Settings(update=update, clip=False))
    except DoesNotFit as error:
        return {"no_plan": str(error)}
    where = "cuda" if task.device == "cuda" else "virtual"
    model, optimizer = prepare(built.module, plan, AdamW(lr=task.lr, eager=update == "eager"), device=where)
    session = optimizer.session
    try:
        losses = [sum(_step(model, optimizer, built)) for _ in expected]
        state = model.state_dict()
        off, worst = apart(state, values, begun)
        row = {
            "losses": max(abs(a - b) / abs(b) for a, b in zip(losses, expected)),
            "update": off,
            "worst": worst,
            "modes": {mode: plan.modes.count(mode) for mode in sorted(set(plan.modes))},
            "deviations": session.deviations,
            "exchanges": getattr(session.backend, "exchanges", None),
        }
    finally:
        session.close(restore=False)
    bounds = BOUNDS[task.dtype]
    row["equal"] = not row["deviations"] and all(row[name] <= bound for name, bound in bounds.items())
    return row


def _step(model: Any, optimizer: Any, built: Built) -> Iterator[float]:
    micro_batches = built.micro_batches(next(built.batches))
    for batch in micro_batches:
        loss = forward_loss(model, batch) / len(micro_batches)
        loss.backward()
        yield float(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
