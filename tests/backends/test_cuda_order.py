"""Waits of the CUDA backend, one at a time: work is held up on the device where this wait alone keeps it from reading
what is not there yet, or from being overwritten. Needs a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from executor.devices.cuda import CudaBackend
from pstar_sim.core.step import Queue

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch finds none"),
]

CYCLES = 1_000_000_000  # of the device's clock: half a second and more, in which a busy host issues what follows
NUMEL = 1 << 16  # 256 KiB of fp32


def held_up(cycles: int = CYCLES) -> None:
    torch.cuda._sleep(cycles)


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    made = CudaBackend(torch.device("cuda", torch.cuda.current_device()), adam_threads=1)
    made._blocks.expect((0, 0), 1 << 30)  # nothing goes back to the driver meanwhile, which stops the device
    yield made
    made.close()


def as_queue(backend: CudaBackend, queue: Queue, action: Callable[[], None]) -> None:
    """In a thread that issues for the queue; returns when all is issued."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            backend.enter_thread(queue)
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def full(backend: CudaBackend, value: float, numel: int = NUMEL) -> torch.Tensor:
    """A payload with memory, filled with the value."""
    payload = backend.gpu_payload(numel, torch.float32)
    backend.take(payload)
    payload.fill_(value)
    torch.cuda.synchronize()
    return payload


def write_back(backend: CudaBackend, payload: torch.Tensor) -> torch.Tensor:
    """A copy to the host that is held up; the payload's memory is given back behind it."""
    host = torch.zeros(payload.numel(), pin_memory=True)

    def issue() -> None:
        held_up()
        backend.copy(host, payload, Queue.D2H)
        backend.give(payload)

    as_queue(backend, Queue.D2H, issue)
    return host


def all_are(host: torch.Tensor, value: float) -> bool:
    torch.cuda.synchronize()
    return bool((host == value).all())


class TestGate:
    """Memory that was given back and is still read: who takes it waits for the reader."""

    def test_a_payload_that_takes_its_own_memory_again(self, backend: CudaBackend) -> None:
        payload = full(backend, 1.0)
        host = write_back(backend, payload)
        backend.take(payload)
        payload.fill_(2.0)
        assert all_are(host, 1.0)

    def test_compute_that_takes_it_early(self, backend: CudaBackend) -> None:
        """The room is one payload's: what compute takes has the memory of the one that is given back."""
        first, second = full(backend, 1.0), backend.gpu_payload(NUMEL, torch.float32)
        host = write_back(backend, first)
        backend.gate.room(NUMEL * 4, Queue.COMPUTE)
        backend.take(second)
        second.fill_(2.0)
        assert backend.gate.stream_waits == 1
        assert all_are(host, 1.0)

    def test_a_tide_that_takes_the_room(self, backend: CudaBackend) -> None:
        """What operators do from then on happens when the payload's bytes are free, so that the budget holds."""
        host = write_back(backend, full(backend, 1.0))
        backend.gate.room(0, Queue.COMPUTE)
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        assert bool((host == 1.0).all())

    def test_torch_that_unmaps_it(self, backend: CudaBackend) -> None:
        """torch waits for the payloads' own stream before it unmaps their pages."""
        host = write_back(backend, full(backend, 1.0))
        backend.gate.room(0, Queue.COMPUTE)
        backend._blocks._stream.synchronize()
        assert bool((host == 1.0).all())

    def test_a_copy_that_takes_what_compute_has_freed_early(self, backend: CudaBackend) -> None:
        """Compute takes a payload of another size, and leaves the block to the next who asks."""
        first, third = full(backend, 1.0), backend.gpu_payload(NUMEL, torch.float32)
        large, source = backend.gpu_payload(16 * NUMEL, torch.float32), torch.full((NUMEL,), 2.0, pin_memory=True)
        torch.cuda.synchronize()
        host = write_back(backend, first)
        backend.gate.room(16 * NUMEL * 4, Queue.COMPUTE)
        backend.take(large)
        backend.gate.room(17 * NUMEL * 4, Queue.COMPUTE)

        def fetch() -> None:
            backend.take(third)
            backend.copy(third, source, Queue.H2D)

        as_queue(backend, Queue.H2D, fetch)
        assert backend.gate.host_waits == 0
        assert all_are(host, 1.0)

    def test_a_copy_that_needs_the_room(self, backend: CudaBackend) -> None:
        """Its thread waits on the host, and takes when the memory is free."""
        first, second = full(backend, 1.0), backend.gpu_payload(NUMEL, torch.float32)
        host = write_back(backend, first)
        backend.gate.room(NUMEL * 4, Queue.COMPUTE)

        def fetch() -> None:
            backend.take(second)
            assert bool((host == 1.0).all()), "taken before the copy that reads it has happened"

        as_queue(backend, Queue.H2D, fetch)
        assert backend.gate.host_waits == 1


def test_payloads_are_apart_from_other_memory_of_the_thread_that_takes_them(backend: CudaBackend) -> None:
    """A block that compute has freed early is still read. What a copy's thread allocates for itself, as for a cast,
    does not ask the gate: it must not get that block, though the same thread had taken the payload."""
    payload, large = backend.gpu_payload(NUMEL, torch.float32), backend.gpu_payload(16 * NUMEL, torch.float32)

    def fetch() -> None:
        backend.take(payload)
        payload.fill_(1.0)

    as_queue(backend, Queue.H2D, fetch)
    torch.cuda.synchronize()
    host = write_back(backend, payload)
    backend.gate.room(16 * NUMEL * 4, Queue.COMPUTE)
    backend.take(large)
    assert payload.untyped_storage().nbytes() == 0

    others: list[torch.Tensor] = []
    as_queue(backend, Queue.H2D, lambda: others.append(torch.full((NUMEL,), 2.0, device="cuda")))
    assert all_are(host, 1.0)


def on_the_device(batches: Iterator[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    return ({name: value.cuda() for name, value in batch.items()} for batch in batches)


@pytest.mark.parametrize("direction", [Queue.D2H, Queue.H2D])
def test_a_copy_of_the_training_thread_has_happened_when_it_returns(backend: CudaBackend, direction: Queue) -> None:
    """Off the plan the host reads next what was copied down, and writes next where was copied from: Adam is there."""
    payload, host = full(backend, 1.0), torch.full((NUMEL,), 2.0, pin_memory=True)
    held_up()
    if direction is Queue.D2H:
        backend.copy(host, payload, direction)
        assert bool((host == 1.0).all())
    else:
        backend.copy(payload, host, direction)
        host.fill_(3.0)
        torch.cuda.synchronize()
        assert bool((payload == 2.0).all())


def test_what_was_done_while_the_queues_stood_has_happened_when_they_go_on(kit: Any, start: Callable[..., Any]) -> None:
    """The steps that go on have no edge to it: between iterations their edges are of steps that have ended."""
    run = start("mlp", "tide", device="cuda", clip=0.5)
    kit.train_alone(run.model, run.optimizer, on_the_device(run.batches), 1)
    with run.session.still():
        held_up()
        done = torch.cuda.Event()
        done.record()
        assert not done.query()
    assert done.query()


def test_a_read_that_no_plan_has_waits_for_the_copy(
    kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's forward reads the weight of a later layer, which is on its way: it is on the gpu as far as the ledger
    says, so the run stays on plan, and no edge of the plan orders the read behind the copy."""
    run = start("mlp", "tide", device="cuda", clip=0.5)
    session, layers = run.session, run.model.layers
    plain = session.backend.copy

    def slow(target: Any, source: Any, direction: Queue) -> None:
        if direction is Queue.H2D and session.backend.queue is direction:
            held_up(CYCLES // 5)
        plain(target, source, direction)

    monkeypatch.setattr(session.contents, "_copy", slow)
    rows = [layer.weight[0].tolist() for layer in layers]
    read: dict[int, list[float]] = {}

    def look(number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            later = number + 1
            chunk = session.timetable.chunk_of[layers[later].weight.plan_tensor]
            until_s = time.monotonic() + 0.3
            while not (in_flight := session.queues._in_flight.get(chunk)) and time.monotonic() < until_s:
                time.sleep(0.001)
            if in_flight and session.state.run.demand.room.held(chunk):
                read[later] = layers[later].weight[0].tolist()

        return hook

    for number in range(len(layers) - 1):
        layers[number].register_forward_pre_hook(look(number))
    kit.train_alone(run.model, run.optimizer, on_the_device(run.batches), 1)
    assert read, "no copy was on its way"
    assert session.deviations == 0
    for later, row in read.items():
        assert row == rows[later], later
