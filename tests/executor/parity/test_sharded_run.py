"""Plans of the ZeRO-3 family for one GPU run on the virtual accelerator and train as plain AdamW does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from thinned import by_turns

from pstar_sim.core.step import Kind

STEPS = 3
SMALL = "bucket=20000,reuse=20000,prefetch=10000"
SPECS = {
    f"zero3_offload:subgroup=30000,{SMALL}": {Kind.CPU_UPDATE},
    f"zero3_offload:ratio=0.5,flush=async,params=cpu,subgroup=30000,{SMALL}": {Kind.CPU_UPDATE, Kind.GPU_UPDATE},
    f"deep_optimizer_states:subgroup=30000,{SMALL}": {Kind.CPU_UPDATE, Kind.GPU_UPDATE},
    "zero_infinity:subgroup=30000,bucket=20000,reuse=20000": {Kind.CPU_UPDATE},
}


@pytest.mark.parametrize(("spec", "micro_batches"), by_turns([(spec,) for spec in SPECS], [(3,), (1,)]))
def test_trains_as_plain_adamw(kit: Any, start: Callable[..., Any], spec: str, micro_batches: int) -> None:
    run = start("gpt2", spec, checkpointing=True, micro_batches=micro_batches, clip=0.5, layers=3)
    assert SPECS[spec] <= {step.kind for step in run.plan.steps}
    mine, theirs = kit.train_both(
        run.model, run.reference, run.optimizer, run.batches, steps=STEPS, micro_batches=micro_batches
    )
    assert mine == pytest.approx(theirs, rel=1e-6, abs=0)
    assert run.session.deviations == 0
    values = run.model.state_dict()
    for name, parameter in run.reference.model.named_parameters():
        assert kit.distance(values[name], parameter.detach()) <= 1e-6, name
