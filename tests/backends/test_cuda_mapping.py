"""The CUDA mapping without a GPU: its arithmetic, its refusals, and its calls, made against a driver that does each
thing at once. What only hardware can tell is in the tests marked gpu."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import executor
from executor.adam import Hyper, Run, adamw
from executor.devices import cuda_blocks
from executor.devices.cuda import CudaBackend, cuda_device, default_adam_threads
from executor.devices.cuda_blocks import MIB, Blocks, block_bytes, pool_shape, segment_of
from executor.devices.device import DeviceOptions, check_placement, move_buffers, open_backend
from pstar_sim.core.plan import Settings
from pstar_sim.errors import ContractError, DoesNotFit, OutOfMemory, PlanError

NO_CUDA = not torch.cuda.is_available()


class Card:
    """A driver that does everything when it is asked, and counts. memory_bytes: of the card."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.reserved = self.allocated = self.emptied = self.streams = 0
        self.pools: list[Any] = []
        self.fractions: list[float] = []
        self.allocator = "native"
        self.settings: dict[str, Any] = {"expandable_segments": False, "roundup_power2_divisions": {"1": 0, "1024": 1}}
        self.routed: list[Any] = []
        self.pinned_emptied: list[int] = []
        self.frees_bytes = 0  # what the next empty_cache gives back


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        assert event.recorded, "an event that is not recorded waits for nothing"
        self.waited.append(event)

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)

    def synchronize(self) -> None:
        return None


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.recorded = False
        self.time_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.recorded, self.time_s = True, time.perf_counter()

    def query(self) -> bool:
        return self.recorded

    def synchronize(self) -> None:
        assert self.recorded

    def elapsed_time(self, other: Any) -> float:
        return (other.time_s - self.time_s) * 1e3


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """torch.cuda as far as the backend calls it, on a card of 1 GB whose memory is the host's."""
    made = Card(10**9)
    current = Stream()

    @contextlib.contextmanager
    def nothing(*_: Any, **__: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def use_mem_pool(pool: Any, device: Any = None) -> Iterator[None]:
        assert not made.routed, "one pool's context is entered twice"
        made.routed.append(pool)
        try:
            yield
        finally:
            made.routed.pop()

    def mem_pool() -> Any:
        made.pools.append(object())
        return made.pools[-1]

    def empty_cache() -> None:
        assert not made.routed
        made.emptied += 1
        made.reserved -= made.frees_bytes
        made.frees_bytes = 0

    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "MemPool": mem_pool,
        "use_mem_pool": use_mem_pool,
        "device": nothing,
        "stream": nothing,
        "empty_cache": empty_cache,
        "current_stream": lambda device=None: current,
        "set_stream": lambda stream: None,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "memory_reserved": lambda device=None: made.reserved,
        "memory_allocated": lambda device=None: made.allocated,
        "mem_get_info": lambda device=None: (made.memory_bytes - made.reserved, made.memory_bytes),
        "get_device_name": lambda device=None: "a card",
        "init": lambda: None,
        "get_allocator_backend": lambda: made.allocator,
        "set_per_process_memory_fraction": lambda fraction, device=None: made.fractions.append(fraction),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", lambda *_: None, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": made.settings})
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: made.pinned_emptied.append(1), raising=False)
    return made


class TestBlockSizes:
    def test_of_a_block_of_its_own(self) -> None:
        assert block_bytes(1) == 512
        assert block_bytes(512 * 3 + 1) == 2048
        assert block_bytes(MIB) == MIB
        assert block_bytes(MIB + 1) == MIB + 512
        assert block_bytes(10 * MIB - 1) == 10 * MIB
        assert block_bytes(10 * MIB + 1) == 12 * MIB
        assert block_bytes(64 * MIB) == 64 * MIB
        assert block_bytes(64 * MIB + 1) == 66 * MIB

    def test_segments(self) -> None:
        """Small blocks share 2 MiB, middling ones 20 MiB, large ones have their own."""
        assert segment_of(512) == (2 * MIB, 4096)
        assert segment_of(MIB) == (2 * MIB, 2)
        assert segment_of(MIB + 512) == (20 * MIB, 19)
        assert segment_of(4 * MIB) == (20 * MIB, 5)
        assert segment_of(8 * MIB) == (20 * MIB, 2)
        assert segment_of(10 * MIB) == (10 * MIB, 1)
        assert segment_of(66 * MIB) == (66 * MIB, 1)

    def test_the_pool_has_the_size_that_moves_most_and_leaves_the_tide(self, kit: Any) -> None:
        model, draw = kit.build("gpt2")
        plan = kit.tight_plan("tide", kit.workload_of(model, draw(torch.Generator())), Settings(clip=True))
        block, most = pool_shape(plan)
        moving = {s.chunk for s in plan.steps if s.kind.value == "fetch"}
        sizes = [block_bytes(plan.layout.payload_bytes(c, "param")) for c in moving]
        assert block in sizes
        kept = sum(
            block_bytes(plan.layout.payload_bytes(r.chunk, r.list))
            for r in plan.initial
            if r.place.value == "gpu" and r.chunk not in moving
        )
        assert most == max(0, plan.gpu_budget_bytes - plan.workload.peak_non_model_bytes - kept)


class TestBlocks:
    @staticmethod
    def payloads(blocks: Blocks, count: int, numel: int) -> list[torch.Tensor]:
        return [blocks.payload(numel, torch.float32) for _ in range(count)]

    def test_a_pool_that_is_used_again(self, card: Card) -> None:
        """Blocks of 12 MiB, a pool of 36: four payloads, at most three with memory."""
        blocks = Blocks(torch.device("cpu"))
        blocks.expect((12 * MIB, 36 * MIB), 100 * MIB)
        a, b, c, d = self.payloads(blocks, 4, 3 * MIB)
        assert blocks.pool_bytes == 12 * MIB  # one block made them all, in turn
        for payload in (a, b, c):
            blocks.grow(payload)
        assert blocks.pool_bytes == 36 * MIB
        for _ in range(50):
            blocks.shrink(a)
            blocks.grow(d)
            blocks.shrink(d)
            blocks.grow(a)
        assert blocks.pool_bytes == 36 * MIB
        assert blocks.exchanges == 0
        blocks.grow(d)  # beyond the pool: memory of its own
        assert (blocks.pool_bytes, blocks.loose_free_bytes) == (36 * MIB, 0)
        blocks.shrink(d)
        assert blocks.loose_free_bytes == 12 * MIB

    def test_blocks_that_share_a_segment(self, card: Card) -> None:
        """Five blocks of 4 MiB in 20: the pool grows by 20 MiB, and not at all where it may have 30."""
        blocks = Blocks(torch.device("cpu"))
        blocks.expect((4 * MIB, 30 * MIB), 100 * MIB)
        payloads = self.payloads(blocks, 6, MIB)
        for payload in payloads[:5]:
            blocks.grow(payload)
        assert (blocks.pool_bytes, blocks._free_blocks) == (20 * MIB, 0)
        blocks.grow(payloads[5])
        assert blocks.pool_bytes == 20 * MIB
        assert len(blocks._in_pool) == 5

    def test_free_blocks_go_back_for_operators(self, card: Card) -> None:
        """Three blocks of 12 MiB, two free: the pool is replaced, which gives 24 MiB back; the one in use stays, counts
        against the new pool, and goes with the exchange after it is free."""
        blocks = Blocks(torch.device("cpu"))
        blocks.expect((12 * MIB, 36 * MIB), 100 * MIB)
        a, b, c = self.payloads(blocks, 3, 3 * MIB)
        for payload in (a, b, c):
            blocks.grow(payload)
        a.fill_(7.0)
        for payload in (b, c):
            blocks.shrink(payload)
        pools = len(card.pools)
        card.frees_bytes = 24 * MIB
        card.reserved = 36 * MIB
        assert blocks.give_back() == 24 * MIB
        assert (len(card.pools), card.emptied) == (pools + 1, 1)
        assert (blocks.pool_bytes, blocks.kept_bytes, blocks.loose_free_bytes) == (0, 0, 0)
        assert float(a.sum()) == 7.0 * a.numel()
        blocks.grow(b)
        blocks.grow(c)
        assert blocks.pool_bytes == 24 * MIB  # with the former's 12 the 36 it may have
        blocks.shrink(a)
        assert blocks.loose_free_bytes == 12 * MIB
        blocks.make_room(80 * MIB)
        assert (card.emptied, blocks.loose_free_bytes) == (2, 0)

    def test_a_torch_that_keeps_them(self, card: Card, caplog: pytest.LogCaptureFixture) -> None:
        blocks = Blocks(torch.device("cpu"))
        blocks.expect((12 * MIB, 36 * MIB), 100 * MIB)
        self.payloads(blocks, 1, 3 * MIB)
        card.reserved = 12 * MIB
        assert blocks.give_back() == 0
        assert blocks.kept_bytes == 12 * MIB
        assert "operators cannot have them" in caplog.text

    def test_a_smaller_pool_under_the_next_plan(self, card: Card) -> None:
        blocks = Blocks(torch.device("cpu"))
        blocks.expect((12 * MIB, 36 * MIB), 100 * MIB)
        a, b = self.payloads(blocks, 2, 3 * MIB)
        for payload in (a, b):
            blocks.grow(payload)
        for payload in (a, b):
            blocks.shrink(payload)
        pools = len(card.pools)
        blocks.expect((12 * MIB, 24 * MIB), 90 * MIB)
        assert (len(card.pools), blocks.pool_bytes) == (pools, 24 * MIB)
        blocks.expect((12 * MIB, 12 * MIB), 80 * MIB)
        assert (len(card.pools), blocks.pool_bytes) == (pools + 1, 0)
        emptied = card.emptied
        blocks.grow(a)  # what the former pool left free has gone before the new one takes more
        blocks.shrink(a)
        blocks.grow(b)
        assert (card.emptied, blocks.pool_bytes) == (emptied + 1, 12 * MIB)

    def test_what_is_free_outside_the_pool_goes_when_the_tide_needs_it(self, card: Card) -> None:
        """Budget 60 MiB: pool 24, one loose block of 18 that was given back; a tide of 18 fits beside it, one of 19
        does not."""
        blocks = Blocks(torch.device("cpu"))
        blocks.expect((12 * MIB, 24 * MIB), 60 * MIB)
        a, b = self.payloads(blocks, 2, 3 * MIB)
        odd = blocks.payload(9 * MIB // 2, torch.float32)
        for payload in (a, b, odd):
            blocks.grow(payload)
        blocks.make_room(36 * MIB)
        assert card.emptied == 0  # nothing is free
        blocks.shrink(odd)
        blocks.make_room(18 * MIB)
        assert card.emptied == 0
        blocks.make_room(19 * MIB)
        assert (card.emptied, blocks.exchanges, blocks.loose_free_bytes) == (1, 1, 0)

    def test_before_more_is_reserved_than_the_budget_idle_memory_goes(self, card: Card) -> None:
        blocks = Blocks(torch.device("cpu"))
        blocks.expect((12 * MIB, 12 * MIB), 60 * MIB)
        odd = blocks.payload(9 * MIB // 2, torch.float32)
        blocks._loose_free.clear()
        card.reserved, card.allocated = 48 * MIB, 48 * MIB
        blocks.grow(odd)
        assert card.emptied == 0  # full, but nothing is idle
        blocks.shrink(odd)
        blocks._loose_free.clear()
        card.allocated = 24 * MIB
        blocks.grow(odd)
        assert card.emptied == 1

    def test_refused_memory_is_asked_for_once_more_and_changes_nothing(
        self, card: Card, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        blocks = Blocks(torch.device("cpu"))
        blocks.expect((12 * MIB, 24 * MIB), 60 * MIB)
        (a,) = self.payloads(blocks, 1, 3 * MIB)

        def refuse(*_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(cuda_blocks.Blocks, "_routed", refuse)
        with pytest.raises(OutOfMemory, match=r"a chunk asked for 12.58 MB"):
            blocks.grow(a)
        monkeypatch.undo()
        assert blocks.pool_bytes == 12 * MIB


class TestAgainstThisTorch:
    """The names and arguments the mapping uses exist in the torch that is installed."""

    def test_signatures(self) -> None:
        assert list(inspect.signature(torch.cuda.use_mem_pool).parameters) == ["pool", "device"]
        assert all(
            parameter.default is not inspect.Parameter.empty
            for name, parameter in inspect.signature(torch.cuda.MemPool.__init__).parameters.items()
            if name != "self"
        )
        for name in ("wait_event", "wait_stream", "synchronize"):
            assert callable(getattr(torch.cuda.Stream, name))
        for name in ("record", "query", "synchronize", "elapsed_time"):
            assert callable(getattr(torch.cuda.Event, name))
        assert "priority" in inspect.signature(torch.cuda.Stream.__new__).parameters
        assert {"enable_timing", "blocking"} <= set(inspect.signature(torch.cuda.Event.__new__).parameters)
        assert issubclass(torch.OutOfMemoryError, RuntimeError)


class TestRefusals:
    @pytest.mark.skipif(not NO_CUDA, reason="there is a CUDA device")
    def test_no_device(self) -> None:
        with pytest.raises(PlanError, match=r"device 'cuda' is not there: torch .* finds no CUDA device"):
            cuda_device("cuda")

    @pytest.mark.parametrize("name", ["cuda:x", "cuda:", "gpu", "cuda:-1"])
    def test_words_that_name_no_device(self, name: str) -> None:
        with pytest.raises(PlanError, match=r"use 'virtual', 'cuda' or 'cuda:0'"):
            cuda_device(name)

    def test_a_number_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        with pytest.raises(PlanError, match=r"'cuda:7' is not there: there are 2 CUDA devices, 0 to 1"):
            cuda_device("cuda:7")

    def test_a_cap_larger_than_the_card(self, card: Card) -> None:
        with pytest.raises(PlanError, match=r"--gpu-memory 2.00 GB is more than a card has \(1.00 GB\), by 1.00 GB"):
            CudaBackend(torch.device("cpu"), limit_bytes=2 * 10**9)

    def test_a_cap_leaves_room_for_what_is_not_torchs(self, card: Card) -> None:
        backend = CudaBackend(torch.device("cpu"), limit_bytes=6 * 10**8)
        assert backend.available_gpu_bytes() == 6 * 10**8
        card.reserved = 10**8
        assert backend.available_gpu_bytes() == 6 * 10**8

    def test_the_cap_is_torchs_too_less_the_context(self, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
        """600 MB of a card of 1 GB, 100 MB of it taken by the context: torch may reserve 500 MB, half the card. It ends
        with the backend."""
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (9 * 10**8 - card.reserved, 10**9))
        backend = CudaBackend(torch.device("cpu"), limit_bytes=6 * 10**8)
        assert backend.available_gpu_bytes() == 5 * 10**8
        assert card.fractions == [0.5]
        backend.close()
        assert card.fractions == [0.5, 1.0]
        CudaBackend(torch.device("cpu")).close()
        assert card.fractions == [0.5, 1.0]
        with pytest.raises(PlanError, match=r"--gpu-memory 100 MB leaves nothing: 100 MB of a card are taken by"):
            CudaBackend(torch.device("cpu"), limit_bytes=10**8)

    @pytest.mark.parametrize(
        ("allocator", "settings", "says", "without"),
        [
            ("native", {"expandable_segments": True}, "has expandable_segments:True", "expandable_segments:True"),
            ("native", {"roundup_power2_divisions": {"256": 8}}, "has roundup_power2", "roundup_power2_divisions"),
            ("cudaMallocAsync", {}, "is 'cudaMallocAsync', which has no memory pools", "backend:cudaMallocAsync"),
        ],
    )
    def test_an_allocator_without_pools_or_equal_blocks(
        self, card: Card, allocator: str, settings: dict[str, Any], says: str, without: str
    ) -> None:
        """The error says how to undo the setting, whichever variable it came by."""
        card.allocator = allocator
        card.settings |= settings
        with pytest.raises(PlanError, match=f"torch's CUDA allocator {says}") as error:
            CudaBackend(torch.device("cpu"))
        assert f"take {without} out of PYTORCH_CUDA_ALLOC_CONF and of PYTORCH_ALLOC_CONF" in str(error.value)
        assert "unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF" in str(error.value)
        assert card.pools == []

    def test_a_model_on_another_device(self) -> None:
        model = torch.nn.Linear(2, 2)
        assert check_placement(model, torch.device("cuda", 0)) == torch.device("cpu")
        assert check_placement(model.to("meta"), torch.device("cuda", 0)) == torch.device("cpu")
        there = torch.device("xpu", 1)

        class Elsewhere(torch.nn.Module):
            def parameters(self, recurse: bool = True) -> Any:
                class P:
                    device = there

                return iter([P()])

        with pytest.raises(
            ContractError, match=r"on a wrong device: its parameters are on xpu:1, the run is on cuda:0"
        ):
            check_placement(Elsewhere(), torch.device("cuda", 0))

    def test_options(self, kit: Any) -> None:
        with pytest.raises(PlanError, match="adam_threads=0 must be at least 1"):
            DeviceOptions(adam_threads=0)
        with pytest.raises(PlanError, match="gpu_memory=-5 must be at least 1"):
            DeviceOptions(gpu_memory_bytes=-5)
        with pytest.raises(PlanError, match="cuda has its own"):
            open_backend("cuda", None, DeviceOptions(bandwidth=1e9))  # type: ignore[arg-type]
        assert default_adam_threads() >= 1

    def test_a_plan_for_more_memory_than_the_card_has(self, card: Card, kit: Any) -> None:
        model, draw = kit.build("mlp")
        plan = kit.tight_plan("tide", kit.workload_of(model, draw(torch.Generator())), Settings(clip=False))
        card.memory_bytes = plan.gpu_budget_bytes // 2
        with pytest.raises(DoesNotFit, match=r"gpu needs .* plan again with --gpu-memory .* short by"):
            executor.prepare(model, plan, executor.AdamW(), backend=CudaBackend(torch.device("cpu")))
        assert all(type(p) is torch.nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_the_step_of_an_update_is_fp32_whatever_the_default_dtype(default: torch.dtype) -> None:
    """Update 2,049 is one that neither bf16 nor fp16 can count (it is 2,048 there), and CUDA's kernel reads four
    bytes of the step whatever it is. Seen by the operator, and by what it does."""
    seen: list[torch.Tensor] = []
    hyper = Hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
    found = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._fused_adamw_.default:
                seen.extend(args[5])
            return func(*args, **(kwargs or {}))

    before = torch.get_default_dtype()
    for dtype in (torch.float32, default):
        lists = [torch.full((16,), 0.5, dtype=torch.float32) for _ in range(4)]
        torch.set_default_dtype(dtype)
        try:
            with Watch():
                adamw(
                    [Run(0, 16, 2048)], param=lists[0], grad=lists[1], momentum=lists[2], variance=lists[3], hyper=hyper
                )
        finally:
            torch.set_default_dtype(before)
        found.append(lists[0])
    assert [(step.dtype, float(step)) for step in seen] == [(torch.float32, 2049.0)] * 2
    assert torch.equal(*found)


def test_buffers_move_once_and_come_back() -> None:
    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.arange(4.0)
            self.register_buffer("one", table)
            self.register_buffer("two", table)

    model = Shared()
    back = move_buffers(model, torch.device("meta"))
    assert model.one.is_meta
    assert model.one is model.two
    model = Shared()
    back = move_buffers(model, torch.device("cpu"))
    model.one.add_(1)
    back()
    assert model.two.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_the_clock_takes_a_new_zero_and_counts_from_it_later(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 100 ppm slow: at 11 s a second zero is taken, at 21 s times count from there."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    backend = CudaBackend(torch.device("cpu"))

    def at(seconds: float) -> float:
        now[0] = seconds
        event = Event()
        event.recorded, event.time_s = True, seconds
        return backend.time_of(event)

    def slow(self: Event, other: Event) -> float:
        return (other.time_s - self.time_s) * 1e3 * (1 - 1e-4)

    monkeypatch.setattr(Event, "elapsed_time", slow)
    assert at(5.0) == pytest.approx(5.0 - 5e-4, abs=1e-9)
    assert at(11.0) == pytest.approx(11.0 - 11e-4, abs=1e-9)  # and a zero at 11
    assert at(20.0) == pytest.approx(20.0 - 20e-4, abs=1e-9)
    assert at(21.0) == pytest.approx(21.0 - 10e-4, abs=1e-9)


@pytest.mark.parametrize(
    ("policy", "micro_batches", "clip"), [("tide", 1, 0.5), ("zero_offload", 2, 0.5), ("patrickstar", 1, None)]
)
def test_a_run_through_the_mapping(
    kit: Any,
    start: Callable[..., Any],
    card: Card,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    micro_batches: int,
    clip: float | None,
) -> None:
    """Every call of the backend, in a real run whose driver does each thing at once: right numbers, clean end."""
    backend = CudaBackend(torch.device("cpu"), adam_threads=1)
    monkeypatch.setattr(backend, "host_slab", lambda size: torch.zeros(size, dtype=torch.uint8))
    run = start("mlp", policy, micro_batches=micro_batches, clip=clip, backend=backend)
    mine, theirs = kit.train_both(
        run.model, run.reference, run.optimizer, run.batches, steps=3, micro_batches=micro_batches
    )
    assert mine == pytest.approx(theirs, rel=1e-6)
    run.session.drain()
    timeline = run.session.timeline()
    run.session.queues.resume()
    assert timeline.iteration_s > 0
    assert backend.copied_bytes["h2d"] > 0
    assert run.session.deviations == 0
    assert card.pinned_emptied == []
    run.session.renew(run.plan)
    assert card.pinned_emptied == [1]  # the slabs of the former plan: nobody has them any more
    kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=micro_batches)
    run.session.close()
    assert card.pinned_emptied == [1, 1]
    assert backend.gate.pending_bytes == 0
    for one, other in zip(run.model.parameters(), run.reference.model.parameters()):
        assert kit.distance(one.detach(), other.detach()) <= 1e-6
