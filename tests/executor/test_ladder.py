"""Memory runs out while a plan runs: the step in progress is finished, a rung makes the next plan, results stay those
of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import executor
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.policy.registry import find_policy


def train(run: Any, kit: Any, losses: list[list[float]], steps: int, micro_batches: int = 1) -> None:
    """The same batches on the prepared model and, apart from it, on the plain one: what the plain one holds must not
    count."""
    batches = [[next(run.batches) for _ in range(micro_batches)] for _ in range(steps)]
    for step in batches:
        for batch in step:
            loss = kit.loss_of(run.model, batch) / micro_batches
            loss.backward()
            losses[0].append(float(loss.detach()))
            del loss
        run.optimizer.step()
        run.optimizer.zero_grad()
    for step in batches:
        for batch in step:
            loss = kit.loss_of(run.reference.model, batch) / micro_batches
            loss.backward()
            losses[1].append(float(loss.detach()))
            run.reference.after_backward()
        run.reference.step()


def assert_same(run: Any, kit: Any, losses: list[list[float]]) -> None:
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    values = run.model.state_dict()
    for name, parameter in run.reference.model.named_parameters():
        assert kit.distance(values[name], parameter.detach()) <= 1e-6, name
    state, plain = run.optimizer.state_dict()["state"], run.reference.optimizer.state_dict()["state"]
    for number, row in plain.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert kit.distance(state[number][key], row[key]) <= 1e-6, (number, key)


def roomy_plan(kit: Any, name: str, policy: str, *, spare: float = 0.5, **settings: Any) -> Plan:
    model, draw = kit.build(name)
    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)), name=name)
    params = sum(t.bytes for t in w.tensors if t.tied_to is None)
    machine = kit.small_machine(w.peak_non_model_bytes + int((1 + spare) * params))
    return find_policy(policy)(w, machine, Settings(**settings))


@pytest.mark.parametrize(
    ("policy", "at"),
    [
        ("tide", "before"),
        ("tide", "forward"),
        ("tide", "backward"),
        ("static_partition", "forward"),
        ("all_on_gpu", "backward"),
        ("zero_offload", "forward"),
        ("patrickstar", "before"),
    ],
)
def test_less_memory_than_the_plan_counted_on(kit: Any, start: Callable[..., Any], policy: str, at: str) -> None:
    plan = roomy_plan(kit, "gpt2", policy, clip=True, spare=4.0)
    backend = executor.VirtualBackend(gpu_bytes=plan.gpu_budget_bytes)
    run = start("gpt2", policy, clip=0.5, plan=plan, backend=backend)
    losses: list[list[float]] = [[], []]
    train(run, kit, losses, 2)
    assert run.session.deviations == 0 and not run.session.ladder
    less = plan.workload.peak_non_model_bytes + sum(t.bytes for t in plan.workload.tensors) // 2
    if at == "before":
        backend.gpu_bytes = less
    else:
        moments = plan.workload.moments
        phase = "FWD" if at == "forward" else "BWD"
        middle = [i for i, m in enumerate(moments) if m.phase == phase]
        target = middle[len(middle) // 2]
        advance = run.session.advance

        def shrink(moment: int) -> None:
            advance(moment)
            if moment == target:
                backend.gpu_bytes = less
                run.session.advance = advance

        run.session.advance = shrink
    train(run, kit, losses, 3)
    assert run.session.ladder
    assert run.session.plan.gpu_budget_bytes <= less
    assert_same(run, kit, losses)
    run.session.plan.check()
    before = len(run.session.ladder)
    train(run, kit, losses, 2)
    assert len(run.session.ladder) == before
    assert_same(run, kit, losses)
