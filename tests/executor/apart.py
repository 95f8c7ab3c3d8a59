"""Evaluations in which the ranks do different things, and training in between: what a process of rank_worker.py does
for a case with "apart"."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conftest as kit
import torch

import executor
from pstar_sim.core.plan import Plan

LR, EPS = 1e-3, 1e-3
STEPS = 3


def calls(kind: str, rank: int, model: Any, batch: Callable[[], Any]) -> list[Callable[[Any], Any]]:
    """What this rank evaluates, in order, each as a function of the model."""
    x, row = torch.linspace(-1, 1, 48).reshape(2, 24), batch()

    def layer(number: int) -> Callable[[Any], Any]:
        return lambda m: m.layers[number](torch.ones(2, m.layers[number].in_features))

    def whole(m: Any) -> Any:
        return kit.loss_of(m, row)

    if kind == "modules":  # the last layers alone; the whole model, then the first layer
        return [layer(-1), layer(-2)] if rank == 0 else [whole, lambda m: m.layers[0](x)]
    if kind == "order":
        numbers = range(len(model.layers))
        return [layer(n) for n in (numbers if rank == 0 else reversed(numbers))]
    if kind == "numbers":  # rank 0 none, rank 1 two, rank 2 four
        return [whole] * (2 * rank)
    assert kind == "alone"
    return [whole] * 2 if rank == 0 else []


def train(case: dict[str, Any], plan: Plan, rank: int, group: Any, backend: Any) -> dict[str, Any]:
    kind, ranks = case["apart"], case["ranks"]
    model, draw = kit.build(case.get("model", "mlp-4"), seed=0)
    twin, plain = copy.deepcopy(model), copy.deepcopy(model)
    spec = executor.AdamW(lr=LR, eps=EPS, weight_decay=0.1, max_grad_norm=0.05)
    model, optimizer = executor.prepare(model, plan, spec, group=group, watchdog_s=5.0, backend=backend)
    generator, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(7 + rank)
    reference = kit.Reference(plain, LR, 0.1, 0.05, eps=EPS)
    equal: list[bool] = []

    def evaluate(*, exactly: bool = True) -> None:
        other = twin if exactly else plain
        with torch.no_grad():
            for call in calls(kind, rank, twin, lambda: draw(own)):
                found, expected = call(model), call(other)
                equal.append(torch.equal(found, expected) if exactly else kit.distance(found, expected) < 1e-5)

    for step in range(STEPS + 1):
        # Every other time nothing is read before: updates of the step may still be on their way, on ranks that do not
        # evaluate too.
        if step % 2:
            values = {name: value.clone() for name, value in model.state_dict().items()}
            twin.load_state_dict(values)
        evaluate(exactly=step % 2 == 1)
        if step == STEPS:
            break
        batches = [draw(generator) for _ in range(ranks)]
        kit.loss_of(model, batches[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        kit.loss_of(plain, {k: torch.cat([b[k] for b in batches]) for k in batches[0]}).backward()
        reference.step()
        reference.optimizer.zero_grad()
    # While others still evaluate, this rank reads everything, or saves it and loads it again.
    if "save" in case:
        optimizer.save(Path(case["save"]))
        evaluate()
        optimizer.load(Path(case["save"]))
        evaluate()
    again = model.state_dict()
    result = {
        "equal": equal,
        "unchanged": all(torch.equal(again[name], values[name]) for name in values),
        "parameters": max(
            float((again[n] - p.detach()).abs().max()) / max(float(p.detach().abs().max()), LR)
            for n, p in plain.named_parameters()
        ),
        "deviations": list(optimizer.session.deviation_log),
        "sliced": optimizer.session.contents.sliced,
    }
    optimizer.session.close()
    result["restored"] = all(torch.equal(p.detach(), values[n]) for n, p in model.named_parameters())
    return result
