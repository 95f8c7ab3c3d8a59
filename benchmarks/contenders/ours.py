"""The executor, by a plan made here: captured under fake tensors, planned for the task's caps, run by `prepare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contenders.room import model_bytes_per_param
from contenders.task import MAX_GRAD_NORM, Task
from contenders.worker import Built
from executor import AdamW, prepare
from executor.capture import capture
from executor.models import forward_loss
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place
from pstar_sim.planner.memory_needs import least_gpu_bytes, shortage
from pstar_sim.policy.registry import find_policy
from pstar_sim.sim.play import play
from pstar_sim.workload.workload import Workload

__all__ = ["Contender", "imports", "plan_of", "predicted"]


def imports(task: Task) -> None:
    """Import everything that belongs to the baseline of host memory, also the planner."""
    workload = capture("tiny-gpt2", batch=1, sequence=8, dtype=task.dtype)
    find_policy("all_on_gpu")(workload, load_machine("virtual"), Settings())


def workload_of(task: Task) -> Workload:
    return capture(
        task.model,
        batch=task.micro_batch,
        sequence=task.sequence,
        micro_batches=task.micro_batches,
        dtype=task.dtype,
        checkpointing=task.checkpointing,
    )


def machine_of(task: Task, workload: Workload, settings: Mapping[str, Any]) -> Machine:
    """Returns the machine to plan for. On CUDA it is the task's machine file, or this machine by the catalog, within
    the caps. On a CPU it is the virtual accelerator, large enough for everything (or the task's cap). If the settings
    give the share of the model data that `stays`, the accelerator has room for this share beside the peak of the rest;
    with 0 it is the smallest accelerator on which the policy can train.
    """
    if task.device == "cuda":
        return load_machine(task.machine or "here", gpu_memory=task.gpu_cap_bytes, host_memory=task.host_cap_bytes)

    def virtual(gpu_bytes: int) -> Machine:
        return load_machine("virtual", gpu_memory=gpu_bytes, host_memory=task.host_cap_bytes)

    roomy = virtual(task.gpu_cap_bytes or 24 * workload.params + 2 * workload.peak_non_model_bytes + (1 << 30))
    share = settings.get("stays")
    if share is None:
        return roomy
    if share:
        return virtual(workload.peak_non_model_bytes + int(share * model_bytes_per_param(task.dtype) * workload.params))
    policy, asked = settings["policy"]["cpu"], asked_of(task, settings)
    least_bytes = least_gpu_bytes(lambda where: shortage(policy, workload, where, asked), roomy)
    return roomy if least_bytes is None else virtual(least_bytes)


def asked_of(task: Task, settings: Mapping[str, Any]) -> Settings:
    return Settings(update=settings["update"], clip=task.clip)


def plan_of(task: Task, settings: Mapping[str, Any], workload: Workload) -> Plan:
    """Returns the plan. Raises DoesNotFit where nothing fits the caps."""
    machine = machine_of(task, workload, settings)
    return find_policy(settings["policy"][task.device])(workload, machine, asked_of(task, settings))


def predicted(plan: Plan) -> dict[str, Any]:
    """Returns the bytes per parameter between two iterations, and the peaks of the simulated iteration."""
    params = plan.workload.params
    lists = dict.fromkeys((Place.GPU, Place.HOST), 0)
    for resident in plan.initial:
        if resident.chunk >= 0 and resident.place in lists:
            lists[resident.place] += plan.layout.payload_bytes(resident.chunk, resident.list)
    timeline = play(plan)
    return {
        "gpu_bytes_per_param": lists[Place.GPU] / params,
        "host_bytes_per_param": lists[Place.HOST] / params,
        "gpu_peak_bytes": timeline.peak_bytes["gpu"],
        "host_peak_bytes": timeline.peak_bytes["host"],
        "iteration_s": timeline.iteration_s,
        "moved_bytes": plan.moved_bytes,
    }


class Contender:
    def __init__(self, built: Built, settings: Mapping[str, Any]) -> None:
        self.task = task = built.task
        self.params = sum(p.numel() for p in built.module.parameters())
        self.plan = plan_of(task, settings, workload_of(task))
        adamw = AdamW(
            lr=task.lr, max_grad_norm=MAX_GRAD_NORM if task.clip else None, eager=settings["update"] == "eager"
        )
        options: dict[str, Any] = {"threads": task.threads}
        if task.device == "cuda":
            options = {"device": "cuda", "gpu_memory": task.gpu_cap_bytes}
        self.model, self.optimizer = prepare(built.module, self.plan, adamw, **options)

    def step(self, micro_batches: Sequence[Any]) -> float:
        total = 0.0
        for batch in micro_batches:
            loss = forward_loss(self.model, batch) / len(micro_batches)
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def figures(self) -> dict[str, Any]:
        session = self.optimizer.session
        with session.still():
            held = {place: session.arena.payload_bytes(place) for place in (Place.GPU, Place.HOST)}
        return {
            "plan": {
                "policy": self.plan.policy,
                "chunks": len(self.plan.layout.chunks),
                "steps": len(self.plan.steps),
                "gpu_budget_bytes": self.plan.gpu_budget_bytes,
                "deviations": session.deviations,
            },
            "predicted": predicted(self.plan),
            "measured": {
                "gpu_bytes_per_param": held[Place.GPU] / self.params,
                "host_bytes_per_param": held[Place.HOST] / self.params,
            },
        }

    def close(self) -> None:
        self.optimizer.session.close(restore=False)
