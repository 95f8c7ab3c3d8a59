"""The loop contract once more, on asynchronous streams with random delays."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executor.devices.virtual_streams import VirtualStreams
from executor.queues.threads import ThreadQueues
from pstar_sim.errors import PlanError

_SPEC = importlib.util.spec_from_file_location(
    "loop_contract_on_streams", Path(__file__).with_name("test_loop_contract.py")
)
assert _SPEC is not None and _SPEC.loader is not None
_CONTRACT: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["loop_contract_on_streams"] = _CONTRACT
_SPEC.loader.exec_module(_CONTRACT)


def jittery() -> VirtualStreams:
    rng = random.Random(11)
    return VirtualStreams(delays=lambda queue: rng.random() * 3e-4 if rng.random() < 0.5 else 0.0)


@pytest.fixture
def run(start: Callable[..., Any]) -> Any:
    return start("mlp", "tide", clip=0.5, backend=jittery())


@pytest.fixture
def eager(start: Callable[..., Any]) -> Any:
    return start("mlp", "tide", update="eager", backend=jittery())


class TestGradientsOnStreams(_CONTRACT.TestGradients):
    pass


class TestZeroGradOnStreams(_CONTRACT.TestZeroGrad):
    pass


class TestStepsOnStreams(_CONTRACT.TestStepsAndBackwards):
    test_fewer_than_planned = None  # starts a run of its own

    def test_fewer_micro_batches_than_planned(self, kit: Any, start: Callable[..., Any]) -> None:
        run = start("mlp", "tide", micro_batches=3, clip=0.5, backend=jittery())
        for micro_batches, deviations in ((3, 0), (2, 1), (3, 1)):
            kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=micro_batches)
            assert run.session.deviations == deviations
        _CONTRACT.assert_same(kit, run)


class TestModelOnStreams(_CONTRACT.TestModel):
    test_writing_parameters = None  # refused before any queue is asked
    test_changing_requires_grad = None
    test_moving = None


class TestOptimizerOnStreams(_CONTRACT.TestOptimizer):
    test_resuming = None  # starts runs of its own


def test_leaving_the_plan_at_every_moment_on_streams(kit: Any, start: Callable[..., Any]) -> None:
    """An unplanned event in the middle of an iteration, wherever the streams stand: as plain torch, then on plan."""
    run = start("mlp", "tide", clip=0.5, backend=jittery())
    for layer in range(6):

        def fail(*_: Any) -> None:
            raise RuntimeError("mine")

        handle = run.model.layers[layer].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="mine"):
            kit.loss_of(run.model, next(run.batches))
        handle.remove()
        mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=2, micro_batches=1)
        assert mine == pytest.approx(theirs, rel=1e-6)


def test_queues_that_would_not_wait_for_copies_are_refused(kit: Any, start: Callable[..., Any]) -> None:
    backend = jittery()
    with pytest.raises(PlanError, match="queues=ThreadQueues on virtual streams: they do not wait for copies"):
        start("mlp", "tide", clip=0.5, backend=backend, queues=ThreadQueues())
    backend.close()
