"""Updates in parts train as plain PyTorch does: rows of the semantics table with every update on the CPU in parts, on
queues of threads and on asynchronous streams, in any interleaving, and where an iteration leaves the plan among the
parts of an update."""

from __future__ import annotations

import copy
import importlib.util
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import executor
from executor.devices.virtual_streams import VirtualStreams
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.policy.passes.parts import in_parts

_spec = importlib.util.spec_from_file_location("semantics_rows", Path(__file__).parents[1] / "semantics_rows.py")
assert _spec is not None and _spec.loader is not None
rows: Any = importlib.util.module_from_spec(_spec)
sys.modules["semantics_rows"] = rows
_spec.loader.exec_module(rows)

CELLS = [
    ("overflow and skipped steps", "fp16", "tide"),
    ("parameter groups and a schedule", "fp32", "tide"),
    ("clipping, accumulation", "bf16", "optimal"),
    ("states in bf16", "bf16", "tide"),
    ("unused parameters", "fp32", "optimal"),
    ("LoRA in fp32 on its base", "bf16", "tide"),
    ("routed experts, unused in some steps", "fp32", "tide"),
    ("evaluation between micro-batches", "bf16", "tide"),
]


def parted(plan: Plan, seed: int) -> Plan:
    """The plan with every update on the CPU in a random number of parts."""
    rng = random.Random(seed)
    made = in_parts(plan, {c.index: rng.choice((2, 3, 5)) for c in plan.layout.chunks})
    assert sum(step.part is not None for step in made.steps) >= 6
    made = replace(made, predictions={})
    made.check()
    return made


@pytest.mark.parametrize(("name", "dtype", "policy"), CELLS)
def test_equals_plain_pytorch(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, policy: str) -> None:
    number = [cell[0] for cell in CELLS].index(name)
    whole = rows.plan_for
    monkeypatch.setattr(rows, "plan_for", lambda *arguments: parted(whole(*arguments), number))
    (row,) = [row for row in rows.ROWS if row.name == name]
    streams = {"backend": VirtualStreams()} if number % 2 else {}
    cell = rows.run_cell(row, dtype, policy, **streams)
    assert cell.worst == 0.0, cell


@pytest.mark.parametrize(
    ("micro_batches", "update", "clip"), [(1, "eager", None), (3, "eager", None), (2, "step", 0.5)]
)
def test_interleavings_are_bit_identical(kit: Any, micro_batches: int, update: str, clip: float | None) -> None:
    module, draw = kit.build("mlp")
    w = kit.workload_of(module, draw(torch.Generator().manual_seed(9)), micro_batches=micro_batches)
    settings = Settings(update=update, clip=clip is not None)
    whole = kit.tight_plan("tide", w, settings)
    expected = None
    for seed in range(8):
        rng = random.Random(seed)

        def choose(possible: Any, compute: Any, may: bool, rng: random.Random = rng) -> int | None:
            pick = rng.randrange(len(possible) + 1)
            return None if pick == len(possible) else pick

        queues = executor.SerialQueues(choose, works_early=lambda step, rng=rng: rng.random() < 0.5)
        plan = whole if seed == 0 else parted(whole, seed)
        spec = executor.AdamW(lr=1e-2, max_grad_norm=clip, eager=update == "eager")
        model, optimizer = executor.prepare(copy.deepcopy(module), plan, spec, queues=queues, check=False)
        batches = kit.batches(draw)
        losses = [kit.train_alone(model, optimizer, batches, micro_batches) for _ in range(3)]
        values = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.session.close(restore=False)
        expected = expected or (losses, values)
        assert losses == expected[0], seed
        assert all(torch.equal(values[name], expected[1][name]) for name in values), seed


def test_an_iteration_that_leaves_the_plan_among_the_parts_ends_them(kit: Any, start: Callable[..., Any]) -> None:
    """Eager updates, and queues that stop behind the first part of an update: the plan is left in the backward when
    some elements of a chunk are updated and others are not."""
    module, draw = kit.build("mlp")
    w = kit.workload_of(module, draw(torch.Generator().manual_seed(9)))
    plan = parted(kit.tight_plan("tide", w, Settings(update="eager", clip=False)), 4)
    contents: list[Any] = []

    def choose(possible: Any, compute: Any, may: bool) -> int | None:
        begun = contents and any(state.updated for state in contents[0].chunks)
        return None if (may and begun) or not possible else 0

    run = start("mlp", "tide", update="eager", plan=plan, queues=executor.SerialQueues(choose))
    session = run.session
    contents.append(session.contents)
    half: list[int] = []

    def leave(gradient: torch.Tensor) -> None:
        if session.iteration == 1 and not half:
            half.extend(state.updated for state in session.contents.chunks if state.updated)
            session.state.run.demand.leave("the test asks for it")

    def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(leave)

    run.model.layers[0].register_forward_hook(hook)
    mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=4, micro_batches=1)
    assert len(half) == 1
    assert session.deviations == 1
    assert mine == theirs
    values = run.model.state_dict()
    assert all(torch.equal(values[name], p) for name, p in run.reference.model.named_parameters())
