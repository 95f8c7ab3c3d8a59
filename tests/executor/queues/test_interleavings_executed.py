"""Any legal interleaving of the queues gives the same bits."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from msgspec import structs

import executor
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Kind, Ref
from pstar_sim.errors import PstarError

WHOLE, USUAL = (200, 33), (24, 8)  # interleavings: of tide on three micro-batches, of each other case


def random_queues(seed: int) -> executor.SerialQueues:
    """Each possible event, or letting compute go on, is as likely as any other; half the steps work when they start."""
    rng = random.Random(seed)

    def choose(possible: Any, compute: Any, may: bool) -> int | None:
        pick = rng.randrange(len(possible) + 1)
        return None if pick == len(possible) else pick

    return executor.SerialQueues(choose, works_early=lambda step: rng.random() < 0.5)


def outcome(kit: Any, model: Any, draw: Any, plan: Any, queues: Any, *, micro_batches: int, clip: float | None) -> Any:
    spec = executor.AdamW(lr=1e-2, max_grad_norm=clip, eager=plan.settings.update == "eager")
    model, optimizer = executor.prepare(model, plan, spec, queues=queues, check=False)
    batches = kit.batches(draw)
    losses = [kit.train_alone(model, optimizer, batches, micro_batches) for _ in range(3)]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    assert optimizer.session.deviations == 0
    optimizer.session.close(restore=False)
    return losses, values


@pytest.mark.parametrize(
    ("policy", "model", "micro_batches", "update", "clip"),
    [
        ("tide", "mlp", 1, "eager", None),
        pytest.param("tide", "mlp", 3, "step", 0.5, marks=pytest.mark.slow),
        ("static_partition", "mlp", 2, "step", None),
        ("zero_offload", "mlp", 2, "step", 0.5),
        ("patrickstar", "mlp", 1, "step", None),
        pytest.param("tide", "gpt2", 1, "step", 0.5, marks=pytest.mark.slow),
    ],
)
def test_interleavings_are_bit_identical(
    kit: Any, whole: bool, policy: str, model: str, micro_batches: int, update: str, clip: float | None
) -> None:
    """WHOLE with --whole, else USUAL: an edge that is missing shows within twenty (the test below)."""
    most, some = WHOLE if whole else USUAL
    module, draw = kit.build(model)
    w = kit.workload_of(module, draw(torch.Generator().manual_seed(9)), micro_batches=micro_batches)
    plan = kit.tight_plan(policy, w, Settings(update=update, clip=clip is not None))
    plan.check()
    expected = None
    for seed in range(most if (policy, model, micro_batches) == ("tide", "mlp", 3) else some):
        losses, values = outcome(
            kit, copy.deepcopy(module), draw, plan, random_queues(seed), micro_batches=micro_batches, clip=clip
        )
        if expected is None:
            expected = losses, values
        assert losses == expected[0], seed
        assert all(torch.equal(values[name], expected[1][name]) for name in values), seed


def test_a_missing_edge_does_not_pass(kit: Any) -> None:
    """The same harness on a plan whose fetches no longer wait for the update: it computes with old values or
    refuses."""
    from dataclasses import replace

    module, draw = kit.build("mlp")
    w = kit.workload_of(module, draw(torch.Generator().manual_seed(9)))
    plan = kit.tight_plan("tide", w, Settings(update="step", clip=False))
    adam = {step.id for step in plan.steps if step.kind is Kind.CPU_UPDATE}
    broken = replace(
        plan,
        steps=tuple(
            structs.replace(step, after=tuple(r for r in step.after if not (r.back and r.id in adam)))
            if step.kind is Kind.FETCH
            else step
            for step in plan.steps
        ),
    )
    assert any(Ref(i, 1) in step.after for step in plan.steps for i in adam)
    good = outcome(kit, copy.deepcopy(module), draw, plan, random_queues(0), micro_batches=1, clip=None)
    seen = 0
    for seed in range(20):
        try:
            bad = outcome(kit, copy.deepcopy(module), draw, broken, random_queues(seed), micro_batches=1, clip=None)
        except PstarError:
            seen += 1
        else:
            seen += bad[0] != good[0]
    assert seen
