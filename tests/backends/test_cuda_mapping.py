"""The CUDA mapping without a GPU: its arithmetic, its refusals, and its calls, made against a driver that does each
thing at once. What only hardware can tell is in the tests marked gpu."""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import executor
import executor.run as jobs
from executor.devices import cuda, cuda_blocks
from executor.devices.cuda import CudaBackend, cuda_device, default_adam_threads
from executor.devices.cuda_blocks import MIB, Blocks, block_bytes, pool_shape, segment_of
from executor.devices.opening import DeviceOptions, check_placement, move_buffers, open_backend
from executor.devices.rules import RULES
from executor.devices.updates import UpdateRange, update
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.plan import Settings
from pstar_sim.errors import ContractError, DoesNotFit, OutOfMemory, PlanError

WHOLE = "expandable_segments:False,max_split_size_mb:128,"
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
        self.set: list[str] = []  # settings of the allocator, by us
        self.maps_pages = False  # as expandable_segments:True needs it
        self.routed: list[Any] = []
        self.pinned_emptied: list[int] = []
        self.split = 0  # free, of segments that are in part in use
        self.frees_bytes = 0  # what the next empty_cache gives back
        self.outside = 0  # in use on the card, and not torch's
        self.capturing = False


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
    """torch.cuda as far as the backend calls it, on a card of 10 GB whose memory is the host's."""
    made = Card(10**10)
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
        "memory_stats": lambda device=None: {"inactive_split_bytes.all.current": made.split},
        "memory_stats_as_nested_dict": lambda device=None: {
            "reserved_bytes": {"all": {"current": made.reserved}},
            "allocated_bytes": {"all": {"current": made.allocated}},
        },
        "mem_get_info": lambda device=None: (made.memory_bytes - made.reserved - made.outside, made.memory_bytes),
        "is_current_stream_capturing": lambda: made.capturing,
        "get_device_name": lambda device=None: "a card",
        "init": lambda: None,
        "get_allocator_backend": lambda: made.allocator,
        "set_per_process_memory_fraction": lambda fraction, device=None: made.fractions.append(fraction),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", lambda *_: None, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": made.settings})
    monkeypatch.setattr(cuda_blocks, "_set_last", [])
    monkeypatch.setattr(cuda_blocks, "_in_use", weakref.WeakSet())
    monkeypatch.setattr(cuda_blocks, "set_allocator", made.set.append)
    monkeypatch.setattr(cuda_blocks, "maps_pages", lambda: made.maps_pages)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
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
        card.allocated, card.split = 24 * MIB, 12 * MIB
        blocks.grow(odd)
        assert card.emptied == 0  # 12 MiB could go back, 18 are needed
        blocks.shrink(odd)
        blocks._loose_free.clear()
        card.split = 0
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


class TestRoom:
    """What a plan may not count on: 1 GB of the card, or what was measured where that is more."""

    def test_the_least_is_kept_however_little_was_measured(self, card: Card) -> None:
        """Of what a plan is made for. One that exists has what was measured against it alone."""
        backend = CudaBackend(torch.device("cpu"))
        assert (backend.plannable_gpu_bytes(), backend.available_gpu_bytes()) == (9 * 10**9, 10**10)
        card.reserved = 10**8
        assert backend.plannable_gpu_bytes() == 9 * 10**9  # what torch reserves is the plan's
        card.outside = 2**30  # by now another program is there
        assert backend.plannable_gpu_bytes() == 10**10 - 2**30 - 256 * MIB
        assert backend.available_gpu_bytes() == 10**10 - 2**30
        assert CudaBackend(torch.device("cpu"), room_bytes=0).plannable_gpu_bytes() == 10**10 - 2**30 - 256 * MIB

    def test_a_warm_up_plans_with_what_is_left(self, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jobs, "cuda_device", lambda name: torch.device("cpu"))
        made = jobs.recording_machine("cuda", None, None)
        assert made.gpu_budget_bytes == 9 * 10**9 - 9 * 10**9 // 64
        small = load_machine("virtual", gpu_memory=10**9)
        assert jobs.recording_machine("cuda", small, None) is small
        card.outside = 10**10
        with pytest.raises(PlanError, match=r"cuda has no memory left for a plan: 10\.27 GB kept"):
            jobs.recording_machine("cuda", None, None)

    def test_context_and_workspaces_are_measured_after_a_product_each_way(
        self, card: Card, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A context of 900 MiB that the first product's kernels make 50 larger; a workspace of 32 MiB when a thread
        multiplies first, in torch's memory. With 256 MiB for fragments: 950 + 2 * 32 + 256 = 1,270 MiB. Held by an
        earlier backend already, the workspaces are seen again, as they are forgotten first."""
        card.outside = 900 * MIB
        held: set[str] = set()
        plain = torch.nn.functional.linear

        def multiplies(where: str) -> None:
            if where not in held:
                held.add(where)
                card.reserved += 32 * MIB
                card.allocated += 32 * MIB
                card.outside = 950 * MIB

        def linear(*given: Any) -> torch.Tensor:
            multiplies("forward")
            out = plain(*given)
            out.register_hook(lambda _: multiplies("backward"))
            return out

        def forget() -> None:
            card.allocated -= 32 * MIB * len(held)
            card.reserved -= 32 * MIB * len(held)
            held.clear()

        monkeypatch.setattr(torch.nn.functional, "linear", linear)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", forget, raising=False)
        for _ in range(2):
            backend = CudaBackend(torch.device("cpu"))
            assert (backend.kept.outside_bytes, backend.kept.workspace_bytes) == (950 * MIB, 64 * MIB)
            assert backend.available_gpu_bytes() == 10**10 - 1014 * MIB
            assert backend.plannable_gpu_bytes() == 10**10 - 1270 * MIB

    def test_torch_gives_idle_blocks_back_beyond_the_budget(self, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
        """A budget of 2 GB, of 5 that torch may reserve under the cap: two fifths. The slack between exchanges may grow
        to the other 3. A budget of 1 MB is a fifth of a thousandth, for which torch has no word."""
        card.outside = 10**9
        backend = CudaBackend(torch.device("cpu"), limit_bytes=6 * 10**9)
        monkeypatch.setattr(cuda, "pool_shape", lambda plan: (0, 0))

        def begin(budget_bytes: int) -> None:
            workload = SimpleNamespace(moments=[SimpleNamespace(peak_bytes=0)], peak_non_model_bytes=0)
            plan = SimpleNamespace(gpu_budget_bytes=budget_bytes, buffers=(), steps=(), workload=workload)
            backend.begin(plan)  # type: ignore[arg-type]

        begin(2 * 10**9)
        begin(10**6)
        assert [text.rpartition(":")[2] for text in card.set[1:]] == ["0.999", "0.360", "0.001"]
        begin(2 * 10**9)
        assert backend._blocks._beyond_bytes == 3 * 10**9

    def test_a_plan_is_refused_what_the_room_needs(self, card: Card, kit: Any) -> None:
        model, draw = kit.build("mlp")
        plan = kit.tight_plan("tide", kit.workload_of(model, draw(torch.Generator())), Settings(clip=False))
        card.outside = 10**10 - plan.gpu_budget_bytes + 1
        with pytest.raises(DoesNotFit, match="gpu needs"):
            executor.prepare(model, plan, executor.AdamW(), backend=CudaBackend(torch.device("cpu")), check=False)

    def test_a_cap_has_the_room_in_it_and_is_torchs_too_less_the_context(self, card: Card) -> None:
        """6 GB of a card of 10, 1 GB of it taken by the context: torch may reserve 5, half the card, and a plan may
        count on that less fragments. It ends with the backend."""
        card.outside = 10**9
        backend = CudaBackend(torch.device("cpu"), limit_bytes=6 * 10**9)
        assert (backend.available_gpu_bytes(), backend.plannable_gpu_bytes()) == (5 * 10**9, 5 * 10**9 - 256 * MIB)
        assert card.fractions == [0.5]
        backend.close()
        assert card.fractions == [0.5, 1.0]
        CudaBackend(torch.device("cpu")).close()
        assert card.fractions == [0.5, 1.0]
        with pytest.raises(PlanError, match=r"--gpu-memory 1.00 GB leaves nothing on a card: 1.27 GB kept for the con"):
            CudaBackend(torch.device("cpu"), limit_bytes=10**9)


class TestExchanges:
    """Each stops the device: they come in few, are counted, and are shown."""

    @staticmethod
    def swings(beyond_bytes: int) -> tuple[int, int]:
        """Exchanges, and most bytes beyond the budget, in 20 swings of the tide. Budget 100 MiB, pool 24 in use, one
        loose block of 12 that comes in each ebb: the tide goes to and fro between 60 and 70, then once to 130."""
        blocks = Blocks(torch.device("cpu"))
        blocks.expect((12 * MIB, 24 * MIB), 100 * MIB, beyond_bytes=beyond_bytes)
        a, b, c = TestBlocks.payloads(blocks, 3, 3 * MIB)
        for payload in (a, b):
            blocks.grow(payload)
        most = 0
        for tide in [*([60, 70] * 20), 130]:
            if tide == 60:
                blocks.make_room(60 * MIB)
                blocks.grow(c)
                blocks.shrink(c)
            else:
                blocks.make_room(tide * MIB)
                most = max(most, blocks.pool_bytes + blocks.loose_free_bytes + (tide - 100) * MIB)
        return blocks.exchanges, most

    def test_swings_within_the_slack_cost_none(self, card: Card) -> None:
        assert self.swings(0)[0] == 20
        exchanges, beyond = self.swings(64 * MIB)
        assert exchanges == 1  # of the large swing
        assert beyond <= 64 * MIB

    def test_each_exchange_makes_the_next_rarer(self, card: Card) -> None:
        """20 swings to 6 MiB beyond the budget. The card has 5 MiB beyond it: one exchange each. It has 40: slacks of
        1, 2 and 4 MiB cost one, and 8 MiB none."""
        for beyond_mib, exchanges in ((5, 20), (40, 3)):
            blocks = Blocks(torch.device("cpu"))
            blocks.expect((12 * MIB, 24 * MIB), 100 * MIB, beyond_bytes=beyond_mib * MIB)
            blocks.slack_bytes = MIB
            a, b, c = TestBlocks.payloads(blocks, 3, 3 * MIB)
            for payload in (a, b):
                blocks.grow(payload)
            for _ in range(20):
                blocks.make_room(58 * MIB)
                blocks.grow(c)
                blocks.shrink(c)
                blocks.make_room(70 * MIB)
            assert blocks.exchanges == exchanges

    def test_the_slack_is_never_more_than_there_is(self, card: Card) -> None:
        """A twentieth of 100 GiB is 5 GiB."""
        blocks = Blocks(torch.device("cpu"))
        for beyond, budget, slack in (
            (0, 1 << 30, 0), (8 * MIB, 1 << 30, 8 * MIB), (1 << 30, 1 << 30, 64 * MIB), (8 << 30, 100 << 30, 5 << 30),
        ):  # fmt: skip
            blocks.expect((12 * MIB, 24 * MIB), budget, beyond_bytes=beyond)
            assert blocks.slack_bytes == slack

    def test_those_of_the_last_iteration_are_in_the_status(
        self, card: Card, kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = on_the_card(monkeypatch)
        run = start("mlp", "tide", backend=backend)
        assert run.session.status().exchanges == 0
        for more in (3, 0, 2):
            before = backend.exchanges
            for _ in range(more):
                backend._blocks._exchange()
            kit.train_alone(run.model, run.optimizer, run.batches, 1)
            assert run.session.status().exchanges == backend.exchanges - before >= more


class TestPages:
    """expandable_segments: what is reserved is asked of torch. A budget of 2000 MiB, of which 4 % are 80."""

    @pytest.fixture
    def blocks(self, card: Card) -> Blocks:
        card.settings["expandable_segments"] = True
        blocks = Blocks(torch.device("cpu"))
        blocks.expect((12 * MIB, 36 * MIB), 2000 * MIB, beyond_bytes=500 * MIB)
        return blocks

    def test_there_is_no_pool(self, card: Card, blocks: Blocks) -> None:
        blocks.grow(blocks.payload(3 * MIB, torch.float32))
        assert (blocks.pool_bytes, card.pools) == (0, [])

    def test_the_slack(self, blocks: Blocks) -> None:
        """4 % of the budget, 64 MiB where those are more, and no more than the card has."""
        slacks = []
        for budget, beyond in ((2000, 500), (200, 500), (2000, 10)):
            blocks.expect((0, 0), budget * MIB, beyond_bytes=beyond * MIB)
            slacks.append(blocks.slack_bytes)
        assert slacks == [80 * MIB, 64 * MIB, 10 * MIB]

    @pytest.mark.parametrize(
        ("reserved", "allocated", "tide", "exchanges"),
        [
            (1900, 1700, 1880, 0),  # 180 more: 2080
            (1900, 1700, 1881, 1),
            (1900, 1870, 2081, 0),  # 30 free: not worth it
            (1900, 1000, 1225, 0),  # 900 free: the rise of 225 finds room in four times as much
            (2081, 1000, 1001, 1),  # nothing rises much, and too much is reserved
        ],
    )
    def test_before_the_tide_rises(
        self, card: Card, blocks: Blocks, reserved: int, allocated: int, tide: int, exchanges: int
    ) -> None:
        card.reserved, card.allocated = reserved * MIB, allocated * MIB
        blocks.make_room(tide * MIB)
        assert (card.emptied, blocks.exchanges) == (exchanges, exchanges)

    def test_before_a_payload_gets_memory(self, card: Card, blocks: Blocks) -> None:
        """What operators leave free, payloads cannot have. 24 MiB are mapped for them; 2070 and 20 more are too many,
        and 40 MiB go back."""
        payload = blocks.payload(6 * MIB, torch.float32)
        other = blocks.payload(5 * MIB, torch.float32)
        card.reserved, card.allocated, card.frees_bytes = 2070 * MIB, 1960 * MIB, 40 * MIB
        blocks.grow(payload)
        assert blocks.exchanges == 0
        blocks.grow(other)
        assert (blocks.exchanges, card.reserved) == (1, 2030 * MIB)
        blocks.shrink(other)
        card.reserved, card.allocated, card.frees_bytes = 2070 * MIB, 1960 * MIB, 40 * MIB
        blocks.grow(other)
        assert blocks.exchanges == 1  # 44 MiB are mapped for payloads

    def test_a_tide_that_comes_again_finds_its_pages(self, card: Card, blocks: Blocks) -> None:
        """Operators need 1900 MiB at most. A rise by 900 may ask for new pages, but not where 1900 are mapped (32 MiB
        more or less), and as much is in use as the last time: with another batch it may."""
        blocks.expect((0, 0), 2000 * MIB, beyond_bytes=500 * MIB, operators_bytes=1900 * MIB)

        def exchanges(allocated: int, reserved: int) -> int:
            card.allocated, card.reserved, before = allocated * MIB, reserved * MIB, blocks.exchanges
            card.frees_bytes = card.reserved - card.allocated
            blocks.make_room(1900 * MIB)
            return blocks.exchanges - before

        assert exchanges(1000, 1900) == 1
        assert exchanges(1000, 1900) == 0
        assert exchanges(1002, 1900) == 1
        assert exchanges(1002, 1869) == 0
        assert exchanges(1002, 1868) == 1

    def test_a_smaller_batch_has_a_lower_tide(self, card: Card, blocks: Blocks) -> None:
        """Where a batch used 800 MiB another uses 400: the tide will be 900 instead of 1800, 500 more."""
        blocks.expect((0, 0), 2000 * MIB, beyond_bytes=500 * MIB, operators_bytes=1900 * MIB)
        for allocated, reserved, exchanges in ((800, 1000, 0), (400, 1580, 0), (400, 1581, 1)):
            card.allocated, card.reserved = allocated * MIB, reserved * MIB
            blocks.make_room(1800 * MIB)
            assert blocks.exchanges == exchanges

    def test_pages_of_payloads_are_none_of_operators(self, card: Card, blocks: Blocks) -> None:
        """Of 1900 MiB payloads have held 400; of the other 1500 operators use 1400. A rise of 200 finds no room."""
        payload = blocks.payload(100 * MIB, torch.float32)
        card.reserved, card.allocated = 1900 * MIB, 1400 * MIB
        blocks.make_room(1600 * MIB)
        assert blocks.exchanges == 1
        card.reserved, card.allocated = 1900 * MIB, 1400 * MIB
        blocks.make_room(1500 * MIB)  # the exchange has unmapped them: of 500 free ones a rise of 100 finds its own
        assert blocks.exchanges == 1
        del payload

    def test_what_others_hold_is_no_part_of_the_budget(self, card: Card, blocks: Blocks) -> None:
        """Between two iterations 100 MiB of the plan's are in use, and 600 of another model. With them 2680 MiB may be
        reserved, until it is gone."""
        blocks.expect((0, 0), 2000 * MIB, beyond_bytes=500 * MIB, resting_bytes=100 * MIB)
        for allocated, reserved, exchanges in ((700, 2680, 0), (700, 2681, 1), (100, 2681, 2)):
            card.allocated, card.reserved, card.frees_bytes = allocated * MIB, reserved * MIB, 500 * MIB
            blocks.make_room(100 * MIB)
            assert blocks.exchanges == exchanges

    def test_parts_of_pages_are_not_asked_for_again(self, card: Card, blocks: Blocks) -> None:
        """Of 300 MiB that are free 60 cannot be unmapped; 33 MiB more can."""
        card.reserved, card.allocated, card.frees_bytes = 2200 * MIB, 1900 * MIB, 240 * MIB
        blocks.make_room(2100 * MIB)
        card.reserved, card.allocated = 2160 * MIB, 2070 * MIB
        blocks.make_room(2100 * MIB)
        assert blocks.exchanges == 1
        card.allocated -= 3 * MIB
        blocks.make_room(2100 * MIB)
        assert (blocks.exchanges, blocks.slack_bytes) == (2, 80 * MIB)

    def test_what_operators_give_back_during_an_exchange_is_not_in_parts(
        self, card: Card, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """300 MiB are free after it, and 60 a moment later: the other 240 were none. With a new plan none are known."""
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(card, "allocated", 1900 * MIB))
        for allocated, exchanges in ((2160, 1), (2140, 1), (2107, 2)):
            card.reserved, card.allocated = 2200 * MIB, allocated * MIB
            blocks.make_room(2100 * MIB)
            assert blocks.exchanges == exchanges
        blocks.expect((0, 0), 2000 * MIB, beyond_bytes=500 * MIB)
        card.allocated = 2160 * MIB
        blocks.make_room(2100 * MIB)
        assert blocks.exchanges == 3


class TestBesideThePool:
    """What torch cannot give an operator while another thread is inside `use_mem_pool`."""

    def test_a_watched_operator_runs_again_when_nobody_is_inside(
        self, card: Card, kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A thread sits in the pool's context; the operator is refused as long as it does, and the thread goes on when
        that has happened. No rung is climbed, no chunk leaves, no deviation counts."""
        backend = on_the_card(monkeypatch)
        run = start("mlp", "tide", backend=backend)
        entered, refused = threading.Event(), threading.Event()
        tries: list[bool] = []

        def inside() -> None:
            entered.set()
            refused.wait()

        def operator(x: torch.Tensor) -> torch.Tensor:
            tries.append(bool(card.routed))
            if card.routed:
                refused.set()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has ...")
            return x.clone()

        library = torch.library.Library("pstar_test", "DEF")
        library.define("beside_the_pool(Tensor x) -> Tensor")
        library.impl("beside_the_pool", operator, "CPU")

        def before_the_first_layer(module: Any, args: Any) -> None:
            def held() -> None:
                with backend._blocks._lock:
                    backend._blocks._allocate(inside, pooled=True, asked_bytes=0)

            thread = threading.Thread(target=held)
            thread.start()
            entered.wait()
            with torch.no_grad():
                torch.ops.pstar_test.beside_the_pool(args[0])
            thread.join()

        run.session.guard_memory(always=True)
        handle = run.model.layers[0].register_forward_pre_hook(before_the_first_layer)
        mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=1)
        handle.remove()
        assert tries == [True, False]
        assert mine == pytest.approx(theirs, rel=1e-6)
        assert (len(run.session.ladder), run.session.deviations) == (0, 0)

    @pytest.mark.parametrize(("idle_bytes", "kept"), [(4096, True), (1024, False)])
    def test_an_unwatched_one_leaves_the_plan_as_it_is_where_enough_was_idle(
        self,
        card: Card,
        kit: Any,
        start: Callable[..., Any],
        monkeypatch: pytest.MonkeyPatch,
        idle_bytes: int,
        kept: bool,
    ) -> None:
        """2,048 bytes are refused. The step runs again, with the numbers of plain torch either way; a smaller plan is
        made only where torch had no such bytes to give."""
        backend = on_the_card(monkeypatch)
        run = start("mlp", "tide", backend=backend)
        refused = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has ...")
        handle = run.model.layers[3].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(refused))
        batch = next(run.batches)
        with pytest.raises(torch.OutOfMemoryError) as error:
            kit.loss_of(run.model, batch)
        handle.remove()
        monkeypatch.setattr(backend, "idle_bytes", lambda: idle_bytes)
        run.session.ladder.recover(error.value)
        mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, iter([batch]), steps=1, micro_batches=1)
        assert mine == pytest.approx(theirs, rel=1e-6)
        assert (run.session.plan is run.plan) == kept
        assert run.session.ladder[0].asked_bytes == 2048

    @pytest.mark.parametrize(
        ("gives", "rungs", "refusals"), [("at once", 0, 2), ("after the ladder", 1, 2), ("never", 1, 3)]
    )
    def test_a_watched_one_is_tried_again_when_everything_is_given_back(
        self,
        card: Card,
        kit: Any,
        start: Callable[..., Any],
        monkeypatch: pytest.MonkeyPatch,
        gives: str,
        rungs: int,
        refusals: int,
    ) -> None:
        """1 GiB is refused, far more than chunks can give; the inputs have 192 bytes. Enough is free after memory that
        nobody used goes back: the plan stays. Or after the ladder gave all it has: the iteration ends off plan, with
        the numbers of plain torch. Or never: the run says how much was requested."""
        backend = on_the_card(monkeypatch)
        run = start("mlp", "tide", backend=backend)
        run.session.guard_memory(always=True)
        tries: list[int] = []
        given = iter({"at once": [4096], "after the ladder": [0, 4096], "never": [0, 0]}[gives])
        free: list[int] = []

        def give_back() -> int:
            free.append(next(given, 0))
            return free[-1]

        def operator(x: torch.Tensor) -> torch.Tensor:
            tries.append(len(free))
            if not any(free):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has ...")
            return x.clone()

        library = torch.library.Library("pstar_test", "FRAGMENT")
        library.define(f"refused_{rungs}{refusals}{len(gives)}(Tensor x) -> Tensor")
        library.impl(f"refused_{rungs}{refusals}{len(gives)}", operator, "CPU")
        call = getattr(torch.ops.pstar_test, f"refused_{rungs}{refusals}{len(gives)}")
        monkeypatch.setattr(backend, "give_back", give_back)
        monkeypatch.setattr(backend, "idle_bytes", lambda: 1 << 40)

        def before_the_third_layer(module: Any, args: Any) -> None:
            with torch.no_grad():
                call(args[0])

        handle = run.model.layers[2].register_forward_pre_hook(before_the_third_layer)
        batch = next(run.batches)
        if gives == "never":
            with pytest.raises(DoesNotFit, match=r"refused_.* of 1\.07 GB beside"):
                kit.loss_of(run.model, batch)
        else:
            train = kit.train_both
            mine, theirs = train(run.model, run.reference, run.optimizer, iter([batch]), steps=1, micro_batches=1)
            assert mine == pytest.approx(theirs, rel=1e-6)
        handle.remove()
        assert len(tries) == refusals + (gives != "never")
        asked = [rung.asked_bytes for rung in run.session.ladder]
        assert set(asked) <= {1 << 30} and bool(asked) == bool(rungs)
        assert bool(run.session.deviations) == bool(rungs)

    def test_the_next_plan_loses_a_sixteenth_where_only_fragments_were_missing(
        self, card: Card, kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Half of the budget is refused, in fragments (as many bytes are idle) or not at all there. Before, both plans
        lost half of the budget."""
        for idle_bytes, share in ((1 << 40, 15 / 16), (0, 1 / 2)):
            backend = on_the_card(monkeypatch)
            run = start("mlp", "tide", backend=backend)
            monkeypatch.setattr(backend, "idle_bytes", lambda idle_bytes=idle_bytes: idle_bytes)
            budget = run.plan.gpu_budget_bytes
            error = OutOfMemory(
                what="an operator", asked_bytes=budget // 2, payload_bytes=0, other_bytes=0, limit_bytes=None
            )
            run.session.guard_memory(always=True)
            ladder = run.session.ladder
            ladder.shortage.note(error, "", in_fragments=ladder._in_fragments(error))
            assert ladder._available() == pytest.approx(share * budget, abs=1)

    def test_the_plan_stays_where_only_fragments_were_missing_and_no_smaller_plan_fits(
        self, card: Card, kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The ladder had an answer for the iteration; the next ones run on plan, with the numbers of plain torch."""
        backend = on_the_card(monkeypatch)
        run = start("mlp", "tide", backend=backend)
        monkeypatch.setattr(backend, "idle_bytes", lambda: 1 << 40)
        ladder = run.session.ladder
        monkeypatch.setattr(ladder, "_available", lambda: 1)
        error = OutOfMemory(what="an operator", asked_bytes=4096, payload_bytes=0, other_bytes=0, limit_bytes=None)
        ladder.shortage.note(error, "", in_fragments=ladder._in_fragments(error))
        mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=2, micro_batches=1)
        assert mine == pytest.approx(theirs, rel=1e-6)
        assert run.session.plan is run.plan and not ladder.shortage.pending
        assert run.session.deviations == 0

    def test_what_is_idle(self, card: Card) -> None:
        """100 MiB reserved, 60 in use, 24 free in the pool, which operators cannot have: 16 are idle."""
        blocks = Blocks(torch.device("cpu"))
        blocks.expect((12 * MIB, 24 * MIB), 100 * MIB)
        a, b = TestBlocks.payloads(blocks, 2, 3 * MIB)
        for change in (blocks.grow, blocks.shrink):
            for payload in (a, b):
                change(payload)
        card.reserved, card.allocated = 100 * MIB, 60 * MIB
        assert blocks.idle_bytes() == 16 * MIB


class TestBesideAGraph:
    """Memory neither comes nor goes while a CUDA graph is captured; nothing has changed when that is said."""

    def test_a_pool_is_not_replaced(self, card: Card) -> None:
        blocks = Blocks(torch.device("cpu"))
        blocks.expect((12 * MIB, 24 * MIB), 100 * MIB)
        (a,) = TestBlocks.payloads(blocks, 1, 3 * MIB)
        pools, pool = len(card.pools), blocks._pool
        card.capturing = True
        for what in (blocks.give_back, blocks.close, lambda: blocks.expect((12 * MIB, 6 * MIB), 100 * MIB)):
            with pytest.raises(PlanError, match="while a CUDA graph is being captured"):
                what()
        assert (len(card.pools), card.emptied, blocks.pool_bytes) == (pools, 0, 12 * MIB)
        assert blocks._pool is pool
        card.capturing = False
        blocks.grow(a)
        assert blocks.pool_bytes == 12 * MIB
        blocks.give_back()

    def test_no_run_begins_and_no_iteration_runs(
        self, card: Card, kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = start("mlp", "tide", backend=on_the_card(monkeypatch))
        kit.train_alone(run.model, run.optimizer, run.batches, 1)
        card.capturing = True
        with pytest.raises(PlanError, match="capture before prepare"):
            CudaBackend(torch.device("cpu"))
        with pytest.raises(PlanError, match="an iteration runs while a CUDA graph is being captured"):
            kit.loss_of(run.model, next(run.batches))
        card.capturing = False


def on_the_card(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """A backend on the card of the fixture, with slabs that are not pinned."""
    backend = CudaBackend(torch.device("cpu"), adam_threads=1)
    monkeypatch.setattr(backend, "host_slab", lambda size: torch.zeros(size, dtype=torch.uint8))
    return backend


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
        with pytest.raises(PlanError, match=r"'cuda:7' is not there: there are 2 CUDA devices; use cuda:0 to cuda:1"):
            cuda_device("cuda:7")

    def test_a_cap_larger_than_the_card(self, card: Card) -> None:
        with pytest.raises(PlanError, match=r"--gpu-memory 20.00 GB is more than a card has \(10.00 GB\), by 10.00"):
            CudaBackend(torch.device("cpu"), limit_bytes=2 * 10**10)

    @pytest.mark.parametrize(
        ("allocator", "settings", "says", "without"),
        [
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

    @pytest.mark.parametrize(
        ("theirs", "expandable", "maps_pages", "ours", "advice"),
        [
            ("", False, True, ["expandable_segments:True"], 0),
            ("", False, False, ["expandable_segments:True", f"{WHOLE}garbage_collection_threshold:0.999"], 0),
            ("garbage_collection_threshold:0.8", False, True, [], 1),
            ("expandable_segments:True,max_split_size_mb:512", True, True, [], 0),
        ],
    )
    def test_pages_else_large_blocks_that_stay_whole_unless_the_user_has_settings(
        self,
        card: Card,
        caplog: pytest.LogCaptureFixture,
        theirs: str,
        expandable: bool,
        maps_pages: bool,
        ours: list[str],
        advice: int,
    ) -> None:
        card.settings |= {"PYTORCH_CUDA_ALLOC_CONF": theirs, "expandable_segments": expandable}
        card.maps_pages = maps_pages
        with caplog.at_level("INFO", logger="executor"):
            CudaBackend(torch.device("cpu"))
        assert card.set == ours
        assert caplog.text.count("with expandable_segments:True added to PYTORCH_ALLOC_CONF") == advice

    def test_the_last_run_gives_torchs_own_settings_back(self, card: Card) -> None:
        card.maps_pages = True
        first, second = CudaBackend(torch.device("cpu")), CudaBackend(torch.device("cpu"))
        first.close()
        assert card.set == ["expandable_segments:True"]
        second.close()
        assert card.set[1:] == ["expandable_segments:False"]
        card.settings |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
        CudaBackend(torch.device("cpu"))
        assert card.set[2:] == ["expandable_segments:True"]

    def test_settings_of_the_users_own_stay(self, card: Card) -> None:
        card.settings |= {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8"}
        CudaBackend(torch.device("cpu")).close()
        assert card.set == []

    def test_an_interruption_while_pages_are_tried(self, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted() -> bool:
            raise KeyboardInterrupt

        monkeypatch.setattr(cuda_blocks, "maps_pages", interrupted)
        with pytest.raises(KeyboardInterrupt):
            CudaBackend(torch.device("cpu"))
        assert card.set == ["expandable_segments:True", "expandable_segments:False"]
        monkeypatch.setattr(cuda_blocks, "maps_pages", lambda: True)
        CudaBackend(torch.device("cpu"))
        assert card.set[2:] == ["expandable_segments:True"]

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
        with pytest.raises(PlanError, match="for the virtual accelerator"):
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
    hyper = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
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
                update(
                    RULES["adamw"],
                    [UpdateRange(0, 16, 2048)],
                    param=lists[0],
                    grad=lists[1],
                    moments=lists[2:],
                    settings=hyper,
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
    backend = on_the_card(monkeypatch)
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
