"""Leaving the plan at any point, with the queues anywhere: still plain AdamW's parameters and moments.

Each run trains an MLP for five iterations under queues that run ahead or lag at random, and leaves the plan in some of
them: an evaluation between micro-batches, gradients dropped before the step, a smaller batch, a missing backward.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import executor


def random_queues(seed: int) -> executor.SerialQueues:
    """Each possible event, or letting compute go on, is as likely as any other; every third seed runs ahead as far as
    it can."""
    rng = random.Random(seed)

    def choose(possible: Any, compute: Any, may: bool) -> int | None:
        if seed % 3 == 0:
            return 0 if possible else None
        pick = rng.randrange(len(possible) + 1)
        return None if pick == len(possible) else pick

    return executor.SerialQueues(choose, works_early=lambda step: rng.random() < 0.5)


def smaller(batch: Any) -> Any:
    return {key: value[:1] for key, value in batch.items()}


def train(kit: Any, run: Any, rng: random.Random, micro_batches: int, eager: bool) -> list[str]:
    """Five iterations on both models. Returns what was done to them."""
    done = []
    for _ in range(5):
        kinds = ["plan", "smaller", "evaluate", "missing"] + ([] if eager else ["dropped"])
        kind = rng.choice(kinds)
        done.append(kind)
        at = rng.randrange(micro_batches)
        if kind == "dropped":
            batch = next(run.batches)
            kit.loss_of(run.model, batch).backward()
            run.optimizer.zero_grad()
        for u in range(micro_batches):
            if kind == "missing" and micro_batches > 1 and u == at:
                continue
            batch = next(run.batches)
            if kind == "smaller" and u == at:
                batch = smaller(batch)
            mine = kit.loss_of(run.model, batch) / micro_batches
            if kind == "evaluate" and u == at:
                with torch.no_grad():
                    seen = kit.loss_of(run.model, batch)
                    assert torch.equal(seen, kit.loss_of(run.reference.model, batch))
            mine.backward()
            theirs = kit.loss_of(run.reference.model, batch) / micro_batches
            theirs.backward()
            run.reference.after_backward()
            assert float(mine.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.reference.step()
    return done


POLICIES = ("optimal", "tide", "static_partition", "patrickstar", "zero_offload")
WAYS = (("step", 1, None), ("eager", 1, None), ("step", 3, 0.5))


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize(("update", "micro_batches", "clip"), WAYS)
@pytest.mark.parametrize("policy", POLICIES)
def test_any_deviation_under_any_interleaving_is_plain_adamw(
    kit: Any, start: Callable[..., Any], whole: bool, policy: str, update: str, micro_batches: int, clip: float | None
) -> None:
    """Six seeds with --whole, else two, others in each case: together they have each deviation behind each, but for one
    of 25 pairs."""
    deviations = 0
    plan = None
    first = 2 * (POLICIES.index(policy) + 5 * WAYS.index((update, micro_batches, clip)))
    for seed in range(first, first + (6 if whole else 2)):
        run = start(
            "mlp", policy, update=update, micro_batches=micro_batches, clip=clip, plan=plan, queues=random_queues(seed),
            replan_after=0,
        )  # fmt: skip
        plan = run.plan
        if policy == "optimal":
            assert plan.modes.count("stream") > 1
        done = train(kit, run, random.Random(seed), micro_batches, update == "eager")
        values, plain = run.model.state_dict(), run.reference
        state, expected = run.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
        for number, (name, parameter) in enumerate(plain.model.named_parameters()):
            assert kit.distance(values[name], parameter.detach()) <= 1e-6, (seed, done, name)
            assert int(state[number]["step"]) == int(expected[number]["step"])
            for key in ("exp_avg", "exp_avg_sq"):
                assert kit.distance(state[number][key], expected[number][key]) <= 1e-6, (seed, done, name, key)
        deviations += run.session.deviations
        run.session.close(restore=False)
    assert deviations >= 2
