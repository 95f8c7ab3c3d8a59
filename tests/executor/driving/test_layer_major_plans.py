"""A plan that the executor does not run is refused before anything is touched."""

from __future__ import annotations

import pytest
from torch import nn

import executor
from pstar_sim.core.plan import Settings
from pstar_sim.errors import PlanError
from pstar_sim.policy import find_policy
from pstar_sim.testing import chain_workload, round_machine


@pytest.mark.parametrize(("spec", "micro_batches"), [("l2l:stash=host", 2), ("tide:order=relay-host", 1)])
def test_boundaries_on_the_host_can_be_simulated_not_run(spec: str, micro_batches: int) -> None:
    tide = [64 * level for level in (1, 2, 3, 4, 4, 4, 3, 3, 2, 2, 1, 1, 0)]
    w = chain_workload(4, 1024, checkpointing=True, micro_batches=micro_batches, tide_bytes=tide)
    plan = find_policy(spec)(w, round_machine(), Settings(clip=False))
    model = nn.Linear(4, 4)
    why = "keeps the boundaries of blocks on the host; it can be simulated, not run: make a plan with the boundaries on"
    with pytest.raises(PlanError, match=f"the plan of {plan.policy} {why}"):
        executor.prepare(model, plan, executor.AdamW(lr=1e-2))
    assert not hasattr(model.weight, "pstar_tensor")
