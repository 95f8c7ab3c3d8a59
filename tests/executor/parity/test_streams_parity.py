"""Training on asynchronous streams: the same numbers as plain torch, whatever the streams' delays."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import executor
from executor.contract import ChunkParameter
from executor.devices.virtual_streams import VirtualStreams
from executor.queues.streams import StreamQueues
from pstar_sim.core.step import Kind, Place, Queue
from pstar_sim.errors import OutOfMemory, PstarError

RELATIVE = 1e-6
LIMIT_S = 60.0  # of what is held until something else has happened, should that never happen


def jittery(seed: int, most_s: float = 4e-4) -> VirtualStreams:
    """Streams that now and then wait before what they do; compute events come late too."""
    rng = random.Random(seed)
    return VirtualStreams(delays=lambda queue: rng.random() * most_s if rng.random() < 0.5 else 0.0)


def same(kit: Any, run: Any, *, steps: int = 3, micro_batches: int = 1) -> None:
    mine, theirs = kit.train_both(
        run.model, run.reference, run.optimizer, run.batches, steps=steps, micro_batches=micro_batches
    )
    assert mine == pytest.approx(theirs, rel=RELATIVE, abs=0)
    assert run.session.deviations == 0
    values = run.model.state_dict()
    for name, parameter in run.reference.model.named_parameters():
        assert kit.distance(values[name], parameter.detach()) <= RELATIVE, name


@pytest.mark.parametrize(
    ("model", "policy", "micro_batches", "update", "clip"),
    [
        ("mlp", "tide", 1, "step", 0.5),
        ("mlp", "zero_offload", 2, "step", 0.5),
        ("mlp", "patrickstar", 1, "step", None),
        ("mlp", "static_partition", 2, "step", None),
        ("gpt2", "tide", 3, "step", 0.5),
        ("gpt2", "optimal", 1, "eager", None),
        ("gpt2", "optimal", 2, "step", 0.5),
    ],
)
def test_random_delays(
    kit: Any, start: Callable[..., Any], model: str, policy: str, micro_batches: int, update: str, clip: float | None
) -> None:
    plan = None
    for seed in range(2):
        run = start(
            model, policy, micro_batches=micro_batches, update=update, clip=clip, plan=plan, backend=jittery(seed)
        )
        plan = run.plan
        assert isinstance(run.session.queues, StreamQueues)
        same(kit, run, micro_batches=micro_batches)
        run.session.close(restore=False)


@pytest.mark.parametrize(("update", "micro_batches", "clip"), [("eager", 1, None), ("step", 2, 0.5)])
@pytest.mark.usefixtures("streaming")
def test_states_that_visit(
    kit: Any,
    start: Callable[..., Any],
    update: str,
    micro_batches: int,
    clip: float | None,
) -> None:
    run = start("gpt2", "optimal", update=update, micro_batches=micro_batches, clip=clip, backend=jittery(5))
    assert run.plan.modes.count("stream") > 2
    same(kit, run, micro_batches=micro_batches)


class TestAdamThatComesLast:
    """The edge from CPU Adam to the next fetch is a wait of the issuing thread, not one for an event. The first update
    is held until all else stands still, and what was issued by then has happened."""

    def test_the_next_fetch_waits_for_it(
        self, kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = start("mlp", "tide", clip=0.5, backend=VirtualStreams())
        held = self._hold_one(kit, run, monkeypatch)
        same(kit, run)
        assert held == [True]
        queues = run.session.queues
        assert queues.host_waits > 0
        assert queues.host_wait_s > 0  # the training thread stood still for it, and says so

    def test_without_the_wait_it_is_found_out(
        self, kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The harness's teeth: host steps are announced when they are issued, as if an event stood for them."""
        run = start("mlp", "tide", clip=0.5, backend=VirtualStreams())
        held = self._hold_one(kit, run, monkeypatch)
        plain = StreamQueues._arrive

        def too_early(queues: Any, queue: Queue, i: int, iteration: int) -> None:
            plain(queues, queue, i, iteration)
            if queue is Queue.ADAM:
                with queues._lock:
                    queues._mark(i, iteration)

        monkeypatch.setattr(StreamQueues, "_arrive", too_early)
        spoiled(kit, run)
        assert held == [True]

    @staticmethod
    def _hold_one(kit: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        """Whether all else stood still, once the first update has begun."""
        session, plain, held = run.session, run.session.contents.adam, []

        def last(chunk: int, place: Place, *rest: Any) -> None:
            if not held and place is Place.HOST:
                held.append(kit.stands_still(session.queues, but=Queue.ADAM))
                session.backend.synchronize(session.backend.record(Queue.H2D))
            plain(chunk, place, *rest)

        monkeypatch.setattr(session.contents, "adam", last)
        return held


def held(free: threading.Event) -> bool:
    """Return when the event is set: True, or False after LIMIT_S."""
    return free.wait(LIMIT_S)


def spoiled(kit: Any, run: Any) -> None:
    """The numbers are wrong or the engine says what is. Where the numbers are, a stream may find its own fault later,
    when the session is closed."""
    with pytest.raises((PstarError, AssertionError)):
        same(kit, run)
    told = run.session.queues.failure
    try:
        run.session.close(restore=False)
    except PstarError as found_late:
        assert told is None
        assert "while the work was in flight" in str(found_late)


class TestWrongEdgesAreFoundOut:
    """Every hazard is real on these streams: take one guard away and the numbers are wrong, or the engine says so. The
    stream is held until the guard would have been asked, however fast the threads are."""

    @staticmethod
    def gated(stream: Queue) -> tuple[VirtualStreams, threading.Event]:
        """Streams of which one stands still while the event is not set."""
        free = threading.Event()
        free.set()
        return VirtualStreams(delays=lambda queue: 0.0 * (queue is stream and held(free))), free

    def test_compute_that_does_not_wait_for_the_copy(
        self, kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No copy to the GPU happens before the first forward has ended."""
        backend, free = self.gated(Queue.H2D)
        free.clear()
        run = start("mlp", "tide", clip=0.5, backend=backend)
        run.model.register_forward_hook(lambda *_: free.set())

        class Deaf:
            def __getattr__(self, name: str) -> Any:
                return getattr(backend, name)

            def wait_event(self, queue: Queue, event: Any) -> None:
                if queue is not Queue.COMPUTE:
                    backend.wait_event(queue, event)

        monkeypatch.setattr(run.session.queues, "_backend", Deaf())
        spoiled(kit, run)

    def test_cpu_adam_that_does_not_wait_for_the_gradient(
        self, kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The gradient that comes last reaches the host when the CPU has updated all chunks of the iteration."""
        backend, free = self.gated(Queue.D2H)
        run = start("mlp", "tide", clip=0.5, backend=backend)
        wait, adam = backend.synchronize, run.session.contents.adam
        updates = [step.id for step in run.plan.steps if step.kind is Kind.CPU_UPDATE]

        def impatient(event: Any) -> None:
            if threading.current_thread().name != "executor-adam":
                wait(event)

        def counted(chunk: int, place: Place, *rest: Any) -> None:
            adam(chunk, place, *rest)
            if place is Place.HOST and updates:
                updates.pop()
            if not updates:
                free.set()

        monkeypatch.setattr(backend, "synchronize", impatient)
        monkeypatch.setattr(run.session.contents, "adam", counted)
        handle = run.model.layers[0].weight.register_hook(lambda _: free.clear() if updates else None)
        spoiled(kit, run)
        handle.remove()
        assert not updates

    def test_memory_used_again_while_a_copy_reads_it(
        self, kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without the gate: what is given back is its next owner's at once. (It is overwritten, not freed: freed memory
        that a copy is reading would end the process.)"""
        backend, free = self.gated(Queue.D2H)
        run = start("mlp", "tide", clip=0.5, backend=backend)
        copy, plain, owners = backend.copy, backend.gate.give, []

        def copy_later(target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None:
            if direction is Queue.D2H and not owners:
                free.clear()
            copy(target, source, direction)

        def give(payload: torch.Tensor, queue: Queue) -> None:
            if payload.untyped_storage().nbytes():
                payload.fill_(float("nan"))
                if queue is Queue.D2H:
                    owners.append(queue)
                    free.set()
            plain(payload, queue)

        monkeypatch.setattr(backend, "copy", copy_later)
        monkeypatch.setattr(backend.gate, "give", give)
        spoiled(kit, run)
        assert owners

    def test_with_every_guard_delays_do_no_harm(self, kit: Any, start: Callable[..., Any]) -> None:
        run = start("mlp", "tide", clip=0.5, backend=VirtualStreams(delays=lambda queue: 3e-3))
        same(kit, run)


class TestTheGateInARun:
    def test_memory_in_use_and_pending_stays_within_the_budget(self, kit: Any, start: Callable[..., Any]) -> None:
        """Nothing is copied to the host before a take waits for it."""
        rng, asked = random.Random(3), threading.Event()
        backend = VirtualStreams(delays=lambda queue: 2e-3 * rng.random() * (queue is not Queue.D2H or held(asked)))
        run = start("gpt2", "tide", clip=0.5, backend=backend)
        gate, most = backend.gate, [0]
        grow, wait = gate._grow, gate._wait

        def watched(payload: Any) -> None:
            grow(payload)
            size = payload.untyped_storage().nbytes()
            most.append(gate.held_bytes + gate.pending_bytes + size - gate._room_bytes)

        def waited(*who: Any) -> None:
            asked.set()
            wait(*who)

        gate._grow, gate._wait = watched, waited
        same(kit, run, steps=4)
        assert len(most) > 10
        assert max(most) <= 0
        assert gate.host_waits + gate.stream_waits > 0  # it did have to wait for work in flight

    def test_what_a_chunk_still_holds_is_used_again(self, kit: Any, start: Callable[..., Any]) -> None:
        """2,000 takes later nothing has piled up."""
        backend = VirtualStreams(poison=False)
        run = start("mlp", "patrickstar", backend=backend)
        for _ in range(40):
            kit.train_alone(run.model, run.optimizer, run.batches, 1)
        run.session.drain()
        backend.gate.flush()
        assert backend.gate.pending_bytes == 0
        held = sum(
            run.plan.layout.payload_bytes(r.chunk, r.list) for r in run.session.arena.present if r.place.value == "gpu"
        )
        assert backend.gate.held_bytes == held
        run.session.queues.resume()


class TestTheGateAlone:
    """Two payloads of 400 bytes on a device of 500; a copy is under way when its payload is given back, and is done
    when somebody waits for it."""

    @pytest.fixture
    def backend(self, monkeypatch: pytest.MonkeyPatch) -> VirtualStreams:
        awaited = threading.Event()
        made = VirtualStreams(gpu_bytes=500, delays=lambda queue: 0.0 * (queue is Queue.D2H and held(awaited)))

        def asked(word: str) -> Callable[..., None]:
            plain = getattr(made, word)

            def ask(*given: Any) -> None:
                awaited.set()
                plain(*given)

            return ask

        for word in ("wait_event", "synchronize"):
            monkeypatch.setattr(made, word, asked(word))
        return made

    @pytest.mark.parametrize("queue", [Queue.COMPUTE, Queue.H2D])
    def test_what_is_pending_is_waited_for_before_memory_has_run_out(
        self, backend: VirtualStreams, queue: Queue
    ) -> None:
        one, other = (backend.gpu_payload(100, torch.float32) for _ in range(2))
        backend.gate.take(one, Queue.COMPUTE)
        backend.gate.give(one, Queue.D2H)
        assert backend.gate.pending_bytes == 400
        backend.gate.take(other, queue)
        assert (backend.gate.held_bytes, backend.gate.pending_bytes) == (400, 0)
        assert (backend.gate.stream_waits, backend.gate.host_waits) == ((1, 0) if queue is Queue.COMPUTE else (0, 1))
        with pytest.raises(OutOfMemory, match="a chunk asked for 400 B"):
            backend.gate.take(one, queue)
        backend.gate.give(other, Queue.COMPUTE)
        backend.gate.flush()
        backend.close()

    def test_taken_again_before_it_was_free(self, backend: VirtualStreams) -> None:
        """Its memory is still its own: nothing is allocated, and what follows waits for what was under way."""
        payload = backend.gpu_payload(100, torch.float32)
        backend.gate.take(payload, Queue.COMPUTE)
        payload.fill_(3.0)
        backend.gate.give(payload, Queue.D2H)
        backend.gate.take(payload, Queue.COMPUTE)
        assert payload.tolist() == [3.0] * 100
        assert (backend.gate.held_bytes, backend.gate.pending_bytes) == (400, 0)
        backend.close()


class TestTheTrainingThread:
    def test_steady_iterations_allocate_nothing_on_the_host_and_wait_only_for_host_steps(
        self, kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = VirtualStreams()
        run = start("gpt2", "tide", clip=0.5, backend=backend)
        for _ in range(2):
            kit.train_alone(run.model, run.optimizer, run.batches, 1)
        trainer = threading.get_ident()
        slabs: list[int] = []
        synchronised: list[int] = []
        plain = backend.synchronize

        def synchronize(event: Any) -> None:
            if threading.get_ident() == trainer:
                synchronised.append(1)
            plain(event)

        monkeypatch.setattr(backend, "host_slab", slabs.append)
        monkeypatch.setattr(backend, "synchronize", synchronize)
        for _ in range(3):
            kit.train_alone(run.model, run.optimizer, run.batches, 1)
        assert slabs == []
        assert synchronised == []
        monkeypatch.undo()

    def test_the_timeline_is_in_the_time_things_happened(self, kit: Any, start: Callable[..., Any]) -> None:
        """Each copy lasts 4 ms on its stream and microseconds to issue; its edges hold in the times measured."""
        backend = VirtualStreams(h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e12, latency_s=4e-3)
        run = start("mlp", "tide", clip=0.5, backend=backend)
        for _ in range(3):
            kit.train_alone(run.model, run.optimizer, run.batches, 1)
        run.session.drain()
        timeline = run.session.timeline()
        run.session.queues.resume()
        copies = [s for s in timeline.spans if s.kind in (Kind.FETCH, Kind.WRITEBACK)]
        assert copies
        assert min(s.end_s - s.start_s for s in copies) >= 3.9e-3
        at = {(s.step, s.iteration): s for s in timeline.spans}
        checked = 0
        for step in run.plan.steps:
            for ref in step.after:
                for iteration in range(timeline.iterations):
                    one, other = at.get((step.id, iteration)), at.get((ref.id, iteration - ref.back))
                    if one is not None and other is not None:
                        assert one.start_s >= other.end_s - 1e-6, (step, ref)
                        checked += 1
        assert checked > 20
        for place in ("gpu", "host"):
            assert 0 < timeline.peak_bytes[place] <= timeline.budget_bytes[place]


def _fall_off() -> None:
    raise OSError("the link fell off")


class TestTrouble:
    def test_a_stream_that_dies_raises_in_the_training_thread(
        self, kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = VirtualStreams()
        run = start("mlp", "tide", clip=0.5, backend=backend)
        kit.train_alone(run.model, run.optimizer, run.batches, 1)

        monkeypatch.setattr(backend.link, "carry", lambda *_: _fall_off())
        with pytest.raises(OSError, match="the link fell off"):
            for _ in range(3):
                kit.train_alone(run.model, run.optimizer, run.batches, 1)
        run.session.close(restore=False)
        assert not [t for t in run.session.queues._crew.threads if t.is_alive()]

    def test_one_that_dies_unnoticed_is_told_when_the_session_is_closed_once(
        self, kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And everything has been let go by then: hooks, parameters, memory."""
        backend = VirtualStreams()
        run = start("mlp", "tide", clip=0.5, backend=backend)
        kit.train_alone(run.model, run.optimizer, run.batches, 1)
        run.session.drain()
        backend._stream(Queue.H2D).issue(_fall_off)
        with pytest.raises(OSError, match="the link fell off"):
            run.session.close(restore=False)
        assert run.session.closed
        assert not any(isinstance(p, ChunkParameter) for p in run.model.parameters())
        assert not any(module._forward_pre_hooks for module in run.model.modules())
        assert not run.session.arena.present
        run.session.close(restore=False)
        run.session.queues.stop()  # as at the interpreter's end

    def test_measured_bytes_without_threads(self, kit: Any, start: Callable[..., Any]) -> None:
        """measure_iteration takes the queues away and gives them back."""
        run = start("mlp", "tide", clip=0.5, backend=jittery(1))
        same(kit, run, steps=1)
        batches = iter([next(run.batches) for _ in range(2)])
        measured = run.session.measure_iteration(lambda: kit.train_alone(run.model, run.optimizer, batches, 1))
        assert measured.on_plan
        assert measured.peak_gpu_bytes <= run.plan.gpu_budget_bytes
        for _ in range(2):
            kit.train_alone(run.model, run.optimizer, run.batches, 1)
        assert run.session.deviations == 0


def test_an_unplanned_read_of_what_is_in_flight_waits(kit: Any, start: Callable[..., Any]) -> None:
    """A layer's hook looks at the next layer's weight, whose copy is under way: the right value, not memory that a copy
    is filling."""
    backend = VirtualStreams(delays=lambda queue: 2e-3 if queue is Queue.H2D else 0.0)
    run = start("mlp", "tide", clip=0.5, backend=backend)
    same(kit, run, steps=2)
    seen: list[float] = []

    def look(module: Any, args: Any, output: Any) -> None:
        with torch.no_grad():
            total, expected = (model.layers[2].weight.sum() for model in (run.model, run.reference.model))
            seen.append(abs(float(total - expected)) / (1 + abs(float(expected))))

    handle = run.model.layers[1].register_forward_hook(look)
    mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=2, micro_batches=1)
    handle.remove()
    assert mine == pytest.approx(theirs, rel=RELATIVE)
    assert len(seen) == 2
    assert max(seen) < 1e-6


def test_public_names() -> None:
    assert executor.StreamQueues is StreamQueues
    assert executor.VirtualStreams is VirtualStreams
