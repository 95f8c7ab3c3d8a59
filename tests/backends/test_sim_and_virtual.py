"""One plan, two interpreters: the virtual accelerator does what the simulator says, in order and in bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from thinned import by_turns

from pstar_sim.core.step import Queue
from pstar_sim.sim.play import play

POLICIES = [("zero_offload",), ("static_partition",), ("patrickstar",), ("tide",)]


def iterate(kit: Any, run: Any, micro_batches: int) -> Callable[[], None]:
    def one() -> None:
        kit.train_alone(run.model, run.optimizer, run.batches, micro_batches)

    return one


@pytest.mark.parametrize(
    ("model", "micro_batches", "policy"), by_turns([("mlp", 3), ("gpt2", 1), ("llama", 2)], POLICIES, most=2)
)
def test_order_edges_and_bytes(
    kit: Any, start: Callable[..., Any], policy: str, model: str, micro_batches: int
) -> None:
    run = start(model, policy, micro_batches=micro_batches, clip=1.0)
    iterations = 6
    for _ in range(iterations):
        iterate(kit, run, micro_batches)()
    session, plan = run.session, run.plan
    session.drain()
    assert session.deviations == 0

    ended = {(row.step.id, row.iteration): row.end_s for row in session.steps.span_log}
    executed: dict[tuple[Queue, int], list[int]] = defaultdict(list)
    for row in session.steps.span_log:  # appended as steps end, one queue's in its own order
        executed[row.step.queue, row.iteration].append(row.step.id)
        for ref in row.step.after:
            before = row.iteration - ref.back
            if before >= 0:
                assert ended[ref.id, before] <= row.start_s, (row.step, ref)
    for k in range(iterations):
        for queue in {step.queue for step in plan.steps}:
            assert executed[queue, k] == [step.id for step in plan.steps if step.queue is queue]

    predicted = play(plan)
    for k in range(iterations):
        for direction in ("h2d", "d2h"):
            copied = sum(
                row.copied_bytes for row in session.steps.span_log if row.iteration == k and row.step.queue == direction
            )
            assert copied == predicted.moved_bytes[direction] == plan.moved_bytes[direction]
    # The copy primitive counted nothing that no step asked for, either.
    total = sum(row.copied_bytes for row in session.steps.span_log)
    assert total == sum(session.backend.copied_bytes.values())


@pytest.mark.parametrize(
    ("model", "micro_batches", "policy"),
    by_turns([("mlp", 1), ("gpt2", 2), ("llama", 1), ("bert", 1)], POLICIES, most=2),
)
def test_payload_bytes_are_the_plans(
    kit: Any, start: Callable[..., Any], policy: str, model: str, micro_batches: int
) -> None:
    """At each event of the predicted order the arena holds what the simulator says; the total is within 2 % when the
    tide comes from a fake capture."""
    run = start(model, policy, micro_batches=micro_batches, clip=1.0)
    predicted = play(run.plan)
    iterate(kit, run, micro_batches)()
    measured = run.session.measure_iteration(iterate(kit, run, micro_batches), predicted)
    assert measured.on_plan
    assert measured.moved_bytes == predicted.moved_bytes
    payload = {"gpu": 0, "host": 0}
    held: dict[tuple[str, str], int] = {}
    for sample in predicted.samples:
        held[sample.place, sample.category] = sample.bytes
        for place in payload:
            now = sum(size for (spot, category), size in held.items() if spot == place and category != "non-model")
            payload[place] = max(payload[place], now)
    assert measured.payload_peak_bytes == payload["gpu"]
    assert measured.peak_host_bytes == payload["host"]
    assert measured.peak_gpu_bytes == pytest.approx(predicted.peak_bytes["gpu"], rel=0.02)
    assert measured.peak_gpu_bytes <= run.plan.gpu_budget_bytes * 1.02
