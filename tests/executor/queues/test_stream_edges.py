"""Single edges between streams, each held up where it matters: slices that change their place, the norm and its
coefficient, sums that another thread waits for; and what the host reckons beside them."""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import pstar_sim as ps
from executor.devices.updates import GPU_BLOCK, scratch_bytes
from executor.devices.virtual_streams import VirtualStreams
from executor.distributed.ranks import Ranks
from executor.memory.arena import Arena
from executor.memory.slices import GpuPayload, Steady
from executor.memory.update import Update
from executor.queues.device_time import DeviceTimes
from executor.queues.streams import StreamQueues
from executor.scaling import LossScale, LossScaling
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Place, Queue
from pstar_sim.errors import ModelError, PlanError
from pstar_sim.policy.registry import find_policy
from pstar_sim.workload.workload import with_optimizer

WAIT_S = 100.0


def as_queue(backend: VirtualStreams, queue: Queue, action: Callable[[], None]) -> None:
    """In a thread that issues for the queue; returns when all is issued."""

    def run() -> None:
        backend.enter_thread(queue)
        action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()


class TestSlicesThatMove:
    """Slice 1 of 2 of four elements each, [1, 2, 3, 4] on the gpu."""

    @pytest.fixture
    def backend(self) -> Any:
        made = VirtualStreams()
        yield made
        made.close()

    @staticmethod
    def slices(backend: VirtualStreams) -> tuple[GpuPayload, Steady]:
        steady = Steady(backend)
        payload = GpuPayload(backend, 4, 2, 1, torch.float32, steady, threading.Lock(), lambda change: None)
        payload.take_own()
        payload.own.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        return payload, steady

    def test_a_write_back_that_still_reads_the_place_it_leaves(self, backend: VirtualStreams) -> None:
        payload, steady = self.slices(backend)
        held, host = threading.Event(), torch.zeros(4)
        alone = payload.own

        def write_back() -> None:
            with steady:
                backend.issue(lambda: held.wait(WAIT_S))
                backend.copy(host, payload.own, Queue.D2H)

        as_queue(backend, Queue.D2H, write_back)
        as_queue(backend, Queue.NET, payload.take_others)  # the gather begins
        self.does_not_happen(backend, Queue.NET)
        backend.gate._collect()
        assert alone.untyped_storage().nbytes() == 16  # the copy has not happened: nothing is given back
        held.set()
        self.settle(backend)
        assert host.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert payload.own.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert payload.own.data_ptr() == payload.whole.data_ptr() + 16
        backend.gate.flush()
        assert alone.untyped_storage().nbytes() == 0

    def test_a_write_back_of_a_slice_that_is_on_its_way(self, backend: VirtualStreams) -> None:
        payload, steady = self.slices(backend)
        held, host = threading.Event(), torch.zeros(4)

        def gather() -> None:
            backend.issue(lambda: held.wait(WAIT_S))
            payload.take_others()

        def write_back() -> None:
            with steady:
                backend.copy(host, payload.own, Queue.D2H)

        as_queue(backend, Queue.NET, gather)
        as_queue(backend, Queue.D2H, write_back)
        self.does_not_happen(backend, Queue.D2H)
        held.set()
        self.settle(backend)
        assert host.tolist() == [1.0, 2.0, 3.0, 4.0]

    @staticmethod
    def does_not_happen(backend: VirtualStreams, queue: Queue) -> None:
        event = backend.record(queue)
        assert not event._done.wait(0.4), "what was issued has happened, though what it follows has not"

    @staticmethod
    def settle(backend: VirtualStreams) -> None:
        for queue in (Queue.NET, Queue.D2H):
            backend.synchronize(backend.record(queue))


class Recorder:
    """Of events only. queue: for which the thread issues."""

    host_queues = frozenset({Queue.ADAM})

    def __init__(self) -> None:
        self.queue = Queue.COMPUTE
        self.calls: list[str] = []
        self.done: set[str] = set()

    def record(self, queue: Queue) -> str:
        self.calls.append(f"record {queue}")
        return f"event of {queue}"

    def synchronize(self, event: str) -> None:
        self.calls.append(f"synchronize {event}")

    def wait_event(self, queue: Queue, event: str) -> None:
        self.calls.append(f"{queue} waits for {event}")

    def query(self, event: str) -> bool:
        return event in self.done

    def time_of(self, event: str) -> float:
        assert event in self.done, "the time of an event that has not happened"
        return 1.0


class OnTheGpu:
    """A scalar there, as far as its way to the host goes."""

    device = torch.device("cuda", 0)

    def __init__(self, streams: Recorder) -> None:
        self._streams = streams

    def cpu(self) -> torch.Tensor:
        self._streams.calls.append("copy")
        return torch.tensor(0.5)


class TestTheCoefficient:
    def test_worked_out_by_the_compute_queue_and_taken_to_the_host(self) -> None:
        streams: Any = Recorder()
        update = Update(hyper=[], max_grad_norm=1.0, streams=streams)
        scale = update.coefficient(lambda: [torch.tensor(3.0), torch.tensor(4.0)])
        assert scale is not None
        assert float(scale) == pytest.approx(0.2, rel=1e-5)
        assert streams.calls == ["record compute"]
        update._coefficient = OnTheGpu(streams)  # type: ignore[assignment]
        streams.queue = Queue.ADAM
        assert float(update.coefficient_on(torch.device("cpu"), list)) == 0.5  # type: ignore[arg-type]
        assert float(update.coefficient_on(torch.device("cpu"), list)) == 0.5  # type: ignore[arg-type]
        assert streams.calls == ["record compute", "synchronize event of compute", "copy"]

    def test_worked_out_by_the_adam_thread_it_is_a_number_on_the_host(self) -> None:
        """Which goes along with whatever kernel the compute queue gives it to: no edge is left."""
        streams: Any = Recorder()
        streams.queue = Queue.ADAM
        update = Update(hyper=[], max_grad_norm=1.0, streams=streams)
        scale = update.coefficient(lambda: [torch.tensor(3.0)])
        assert scale is not None
        assert scale.device.type == "cpu"
        assert update.norm is not None
        assert update.norm.device.type == "cpu"
        assert streams.calls == []


@pytest.mark.parametrize(
    ("queue", "calls"),
    [(Queue.ADAM, ["synchronize sum"]), (Queue.COMPUTE, ["compute waits for sum"])],
)
def test_sums_are_there_for_who_awaits_them(queue: Queue, calls: list[str]) -> None:
    """Issued is not happened: the thread that updates on the host waits, a device queue gets an edge."""
    streams: Any = Recorder()
    streams.queue = queue
    queues = StreamQueues(streams)
    steps = [types.SimpleNamespace(queue=Queue.NET), types.SimpleNamespace(queue=Queue.NET)]
    queues._progress = types.SimpleNamespace(done=[4, 4], steps=steps)  # type: ignore[assignment]
    queues._events = [{4: "sum"}, {4: "an older sum"}]
    streams.done.add("an older sum")
    queues.await_steps([0, 1], 4)
    assert streams.calls == calls


def test_times_are_taken_of_complete_events_only() -> None:
    """A moment's two events may lie on two streams of the user's: the later one says nothing about the earlier."""
    streams: Any = Recorder()
    times = DeviceTimes(streams)
    times.note_begin(0, 0, "begin")
    times.note_end(0, 0, "end")
    streams.done.add("end")
    times.resolve(5)
    assert times._seconds == {}
    streams.done.add("begin")
    times.resolve_all(wait=True)
    assert times._seconds == {(0, 0): (1.0, 1.0)}
    assert streams.calls == ["synchronize begin", "synchronize end"]


def test_an_overflow_check_is_time_the_training_thread_waits(
    kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("mlp", "tide", backend=VirtualStreams())
    session, now = run.session, [0.0]
    session.updates.scaling = LossScaling(LossScale())
    monkeypatch.setattr(session.updates, "_clock", lambda: now[0])

    def slow(scaling: LossScaling) -> bool:
        now[0] += 3.0
        return False

    monkeypatch.setattr(LossScaling, "overflowed", slow)
    before_s, before = session.queues.host_wait_s, session.queues.host_waits
    session.updates.decide_scaling(Update(hyper=[]))
    assert session.queues.host_wait_s - before_s == pytest.approx(3.0)
    assert session.queues.host_waits == before + 1


def test_room_for_payloads_is_less_by_the_plans_own_buffers(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draw = kit.build("mlp")
    plan = kit.tight_plan("tide", kit.workload_of(model, draw(torch.Generator())), Settings(clip=False))
    plan = replace(plan, buffers=(("bucket", Place.GPU, 256),), gpu_budget_bytes=plan.gpu_budget_bytes + 256)
    backend, rooms = VirtualStreams(), []
    monkeypatch.setattr(backend, "room", rooms.append)
    Arena(plan, backend).set_tide(64)
    assert rooms == [plan.gpu_budget_bytes - 256 - 64]


def test_scratch_of_updates_on_the_gpu(kit: Any) -> None:
    """Narrow gradients are widened piece by piece: the longest chunk, or 16 MiB, for each narrow list."""
    model, draw = kit.build("mlp")
    w = kit.workload_of(model, draw(torch.Generator()))
    wide = find_policy("all_on_gpu")(w, kit.small_machine(10**8), Settings(clip=False))
    assert scratch_bytes(wide) == 0  # all fp32
    narrow = find_policy("all_on_gpu")(
        kit.workload_of(model.to(torch.bfloat16), {k: v.bfloat16() for k, v in draw(torch.Generator()).items()}),
        kit.small_machine(10**8),
        Settings(clip=False),
    )
    longest = max(narrow.layout.slice_numel(c.index) for c in narrow.layout.chunks)
    assert longest < GPU_BLOCK
    assert scratch_bytes(narrow) == 4 * longest
    assert scratch_bytes(replace(narrow, steps=())) == 0


def test_scratch_of_a_matrix_without_masters() -> None:
    """Sums in fp32 beside parameters and momenta in bf16 widen both for Muon; in one dtype nothing is widened."""
    one, two = (
        find_policy("all_on_gpu")(
            with_optimizer(ps.preset("1B", batch=1, seq=64, micro_batches=count), "muon", "none"),
            ps.machine("h100-80"),
            Settings(clip=False),
        )
        for count in (1, 2)
    )
    matrices = [s.shape for c in one.layout.chunks if one.layout.states_of(c.index).name == "muon" for s in c.slots]
    assert scratch_bytes(two) - scratch_bytes(one) >= 2 * 4 * max(map(math.prod, matrices))


class TestWeights:
    @staticmethod
    def of(counts: list[float], rank: int) -> float:
        ranks = Ranks.__new__(Ranks)
        ranks.meet = lambda row: [[row[0], each] for each in counts]  # type: ignore[method-assign]
        return ranks.weight(counts[rank])

    def test_of_an_empty_batch_beside_others(self) -> None:
        assert [self.of([2.0, 0.0, 6.0], rank) for rank in range(3)] == [0.25, 0.0, 0.75]

    def test_of_empty_batches_only(self) -> None:
        with pytest.raises(ModelError, match="a micro-batch of 0, 0 sequences on ranks 0 to 1: there is nothing"):
            self.of([0.0, 0.0], 0)

    def test_of_counts_that_are_none(self) -> None:
        for rank in range(3):
            with pytest.raises(ModelError, match=r"count=...\) gives -2 on rank 1, nan on rank 2 for a micro-batch"):
                self.of([2.0, -2.0, float("nan")], rank)
        with pytest.raises(ModelError, match="gives inf on rank 0"):
            self.of([float("inf"), 1.0], 1)


def test_two_ranks_on_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known by the card, not by its number: each process may see another one as the first."""
    ranks = Ranks.__new__(Ranks)
    said: list[float] = []
    for uuid in ("GPU-a", "GPU-b", "GPU-a"):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, u=uuid: types.SimpleNamespace(uuid=u))
        ranks.meet = lambda row: [said.append(row[0]), [row]][1]  # type: ignore[method-assign]
        ranks._check_cards(torch.device("cuda", 0))
    ranks.meet = lambda row: [[each] for each in said]  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="ranks 0 and 2 of the job have one and the same CUDA device"):
        ranks._check_cards(torch.device("cuda", 0))


def test_a_recording_keeps_to_the_memory_it_is_given(monkeypatch: pytest.MonkeyPatch, kit: Any) -> None:
    import executor.run as jobs

    asked: list[Any] = []
    monkeypatch.setattr(jobs, "record", lambda *_, **options: asked.append(options["gpu_memory"]))
    monkeypatch.setattr(jobs, "recording_machine", lambda device, machine, memory: asked.append((device, memory)))
    job = jobs.TrainingJob(model="gpt2-tiny", batch=1, sequence=8, dtype=None, checkpointing=False)
    monkeypatch.setattr(
        jobs.TrainingJob, "build", lambda self, empty: types.SimpleNamespace(module=torch.nn.Linear(1, 1))
    )
    monkeypatch.setattr(jobs.TrainingJob, "batches", lambda self, built: iter([1]))
    job.record(kit.small_machine(10**8), device="cuda:0", gpu_memory=5 * 10**8)
    assert asked == [("cuda:0", 5 * 10**8), 5 * 10**8]
