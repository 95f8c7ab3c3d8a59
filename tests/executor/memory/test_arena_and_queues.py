"""Parts of the executor on their own: slabs, eviction, runs of Adam, copies, and queues that die or wait."""

from __future__ import annotations

import _thread
import ctypes
import itertools
import logging
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn

import executor
from executor.devices.backend import (
    VirtualBackend,
    available_host_bytes,
    claim_holes,
    give_freed_pages_back,
    keep_freed_pages,
    map_large_blocks,
)
from executor.devices.rules import RULES
from executor.devices.updates import (
    BLOCK,
    Scratch,
    UpdateRange,
    _lanes,
    add,
    clip_coefficient,
    norm_of,
    ranges_of,
    update,
)
from executor.memory import arena as arena_module
from executor.memory.arena import Arena
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.slabs import PAGE_BYTES, pack_slabs
from pstar_sim.core.step import Place, Queue
from pstar_sim.errors import ContractError, DoesNotFit, PlanError

KIB = 1024

ADAMW = RULES["adamw"]


class TestSlabs:
    def test_payloads_are_aligned_and_do_not_overlap(self) -> None:
        sizes = {(c, name): size for c, size in enumerate((1000, 4096, 70, 300)) for name in ("param", "momentum")}
        room = pack_slabs(sizes.items())
        assert set(room.where) == set(sizes)
        assert all(size & (size - 1) == 0 for size in room.slab_bytes)
        taken: dict[int, list[tuple[int, int]]] = {}
        for key, (slab, offset) in room.where.items():
            assert offset % 256 == 0
            assert offset + sizes[key] <= room.slab_bytes[slab]
            taken.setdefault(slab, []).append((offset, offset + sizes[key]))
        for rows in taken.values():
            rows.sort()
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(rows))

    def test_rounding_up_is_cheap(self) -> None:
        """40 payloads of 3 MiB: 120 MiB, where rounding each up to a power of two would take 160."""
        room = pack_slabs({(c, "param"): 3 << 20 for c in range(40)}.items())
        assert room.total_bytes < 130 << 20

    def test_payloads_above_half_of_a_slab_share_larger_ones(self) -> None:
        """1 GiB holds one of 600 MiB, 2 GiB hold three, 4 GiB six: 30 take 20 GiB rather than 30."""
        room = pack_slabs({(c, "param"): 600 << 20 for c in range(30)}.items())
        assert room.slab_bytes == (2 << 30,) * 10
        assert Counter(slab for slab, _ in room.where.values()) == dict.fromkeys(range(10), 3)

    def test_largest_slab(self) -> None:
        room = pack_slabs({(c, "param"): 100 * KIB for c in range(64)}.items(), largest_bytes=1 << 20)
        assert max(room.slab_bytes) == 1 << 20

    def test_nothing(self) -> None:
        assert pack_slabs([]).total_bytes == 0


@pytest.fixture
def small(kit: Any) -> Plan:
    model, draw = kit.build("mlp")
    return kit.tight_plan("tide", kit.workload_of(model, draw(torch.Generator())), Settings(clip=False))


class TestArena:
    def test_eviction_lowers_allocated_bytes(self, small: Plan) -> None:
        arena = Arena(small, VirtualBackend())
        payload = arena.at(Place.GPU, 1, "param")
        size = small.layout.payload_bytes(1, "param")
        assert payload.untyped_storage().nbytes() == 0
        arena.take(Place.GPU, 1, "param")
        assert payload.untyped_storage().nbytes() == size == arena.payload_bytes(Place.GPU)
        payload.fill_(3.0)
        view = payload[:4].view(2, 2)
        arena.free(Place.GPU, 1, "param")
        assert view.untyped_storage().nbytes() == 0 == arena.payload_bytes(Place.GPU)
        arena.take(Place.GPU, 1, "param")
        payload.fill_(5.0)
        assert view.tolist() == [[5.0, 5.0], [5.0, 5.0]]  # views stay valid

    def test_budget(self, small: Plan) -> None:
        size = small.layout.payload_bytes(1, "param")
        arena = Arena(replace(small, gpu_budget_bytes=size + 100), VirtualBackend())
        arena.set_tide(101)
        with pytest.raises(PlanError, match="gpu over budget: param of chunk 1"):
            arena.take(Place.GPU, 1, "param")
        arena.set_tide(100)
        arena.take(Place.GPU, 1, "param")
        with pytest.raises(PlanError, match="101 of non-model data are 1 more"):
            arena.set_tide(101)
        with pytest.raises(PlanError, match="already has memory"):
            arena.take(Place.GPU, 1, "param")
        arena.free(Place.GPU, 1, "param")
        with pytest.raises(PlanError, match="no memory on the gpu to free"):
            arena.free(Place.GPU, 1, "param")

    def test_a_run_evicts_memory(self, kit: Any, start: Callable[..., Any]) -> None:
        run = start("mlp", "tide", clip=0.5)
        chunks = range(len(run.plan.layout.chunks))
        kit.train_alone(run.model, run.optimizer, run.batches, 1)
        run.session.drain()
        allocated = sum(run.session.arena.at(Place.GPU, c, "param").untyped_storage().nbytes() for c in chunks)
        everything = sum(run.plan.layout.payload_bytes(c, "param") for c in chunks)
        assert allocated < everything
        run.session.queues.resume()


class TestAdam:
    def test_runs(self) -> None:
        slots = [(0, 32, 3), (32, 5, 3), (48, 8, None), (64, 16, 3), (80, 8, 3), (96, 4, 2)]
        assert ranges_of(slots) == [UpdateRange(0, 37, 3), UpdateRange(64, 88, 3), UpdateRange(96, 100, 2)]
        assert ranges_of([(0, 10, 3), (16, 16, 3), (32, 5, 3)]) == [UpdateRange(0, 10, 3), UpdateRange(16, 37, 3)]

    def test_runs_of_two_byte_masters(self) -> None:
        """A vector of 64 bytes has 32 elements: the first tensor ends inside one."""
        assert ranges_of([(0, 48, 1), (64, 32, 1), (96, 32, 1)], 32) == [UpdateRange(0, 48, 1), UpdateRange(64, 128, 1)]

    @pytest.mark.parametrize(("grad_dtype", "state_dtype", "block"), [
        (torch.float32, torch.float32, None), (torch.bfloat16, torch.float32, 64), (torch.bfloat16, torch.bfloat16, 64),
    ])  # fmt: skip
    def test_each_tensor_is_rounded_as_alone(
        self, grad_dtype: torch.dtype, state_dtype: torch.dtype, block: int | None
    ) -> None:
        """Tensors of 1 to 40 elements in one call, and in two calls that are cut at 176 elements, beside torch's AdamW
        of each tensor."""
        torch.manual_seed(0)
        sizes = (1, 16, 7, 40, 15, 17, 32, 33, 9, 16, 31)
        slots, end = [], 0
        for numel in sizes:
            slots.append((end, numel, 0))
            end += -(-numel // 16) * 16
        param, grad = torch.randn(end), torch.randn(end).to(grad_dtype)
        momentum, variance = torch.randn(end).to(state_dtype), torch.rand(end).to(state_dtype)
        plain = [each.clone() for each in (param, momentum, variance)]
        for offset, numel, _ in slots:
            one = nn.Parameter(param[offset : offset + numel].clone())
            one.grad = grad[offset : offset + numel].float().clone()
            torch_adamw = torch.optim.AdamW([one], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
            state = torch_adamw.state[one]
            state["step"] = torch.zeros(())
            state["exp_avg"] = momentum[offset : offset + numel].float().clone()
            state["exp_avg_sq"] = variance[offset : offset + numel].float().clone()
            torch_adamw.step()
            for flat, value in zip(plain, (one.detach(), state["exp_avg"], state["exp_avg_sq"])):
                flat[offset : offset + numel].copy_(value)
        hyper = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
        scratch = None if block is None else Scratch(block)
        for parts in ([(0, end)], [(0, 176), (176, end)]):
            mine = [each.clone() for each in (param, momentum, variance)]
            for first, last in parts:
                spans = [(max(o, first), min(o + n, last)) for o, n, _ in slots]
                update(
                    ADAMW, ranges_of((a, b - a, 0) for a, b in spans if a < b), param=mine[0], grad=grad.clone(),
                    moments=mine[1:], settings=hyper, scratch=scratch,
                )  # fmt: skip
            assert [torch.equal(a, b) for a, b in zip(mine, plain)] == [True] * 3

    def test_one_step_by_hand(self) -> None:
        """lr 0.1, no decay, first step: p - 0.1 * g / (|g| + eps)."""
        param, grad = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -4.0, 9.0])
        momentum, variance = torch.zeros(3), torch.zeros(3)
        hyper = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 0.0, "weight_decay": 0.0}
        update(ADAMW, [UpdateRange(0, 2, 0)], param=param, grad=grad, moments=(momentum, variance), settings=hyper)
        assert param.tolist() == pytest.approx([0.9, 2.1, 3.0])
        assert momentum.tolist() == pytest.approx([0.05, -0.4, 0.0])
        assert variance.tolist() == pytest.approx([0.0025, 0.16, 0.0])

    def test_narrow_gradients(self) -> None:
        n = (1 << 20) + 37  # more than one block
        grad = torch.randn(n).to(torch.bfloat16)
        one, two = torch.randn(n), None
        two = one.clone()
        states = [torch.zeros(n) for _ in range(4)]
        hyper = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
        half = torch.tensor(0.5)
        update(
            ADAMW,
            [UpdateRange(0, n, 0)],
            param=one,
            grad=grad,
            moments=(states[0], states[1]),
            settings=hyper,
            scale=half,
        )
        update(
            ADAMW,
            [UpdateRange(0, n, 0)],
            param=two,
            grad=grad.float(),
            moments=(states[2], states[3]),
            settings=hyper,
            scale=half,
        )
        assert torch.allclose(one, two, rtol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "sgd-momentum"])
    def test_a_gradient_beside_is_added_in_fp32_and_then_scaled(self, name: str, dtype: torch.dtype) -> None:
        """Masters, moments and both gradients of one dtype: as of their sum in fp32, in pieces."""
        torch.manual_seed(0)
        n, rule = 1000, RULES[name]
        first, last, *lists = (torch.rand(n).to(dtype) for _ in range(3 + len(rule.states)))
        last /= 256  # in bf16 most sums would be rounded to `first`
        hyper = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9 * len(rule.states)}
        hyper |= {"dampening": 0.0, "nesterov": False}
        waiting, summed = ([each.clone() for each in lists] for _ in range(2))
        for mine, grad, beside in ((waiting, first.clone(), last), (summed, first.float() + last, None)):
            update(
                rule, [UpdateRange(0, n, 1)], param=mine[0], grad=grad, beside=beside, moments=mine[1:],
                settings=hyper, scale=torch.tensor(0.5), scratch=Scratch(256),
            )  # fmt: skip
        assert [torch.equal(a, b) for a, b in zip(waiting, summed)] == [True] * len(lists)

    def test_a_small_gradient_beside_a_large_one_counts(self) -> None:
        """In bf16 1 + 0.0039 is 1, and the momentum would be 0.1001."""
        param, grad, beside, momentum, variance = torch.tensor(
            [[0.0], [1.0], [0.003875732421875], [0.0], [0.0]], dtype=torch.bfloat16
        )
        hyper = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        moments = (momentum, variance)
        update(ADAMW, [UpdateRange(0, 1, 0)], param=param, grad=grad, beside=beside, moments=moments, settings=hyper)
        assert (momentum.item(), variance.item()) == pytest.approx((0.1005859375, 0.00100708), rel=1e-4)

    def test_clipping_as_torch_does(self) -> None:
        assert float(clip_coefficient(torch.tensor(4.0), 1.0)) == pytest.approx(0.25, rel=1e-5)
        assert float(clip_coefficient(torch.tensor(0.5), 1.0)) == 1.0

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("numel", [100, 4 * BLOCK, 5 * BLOCK + 13])
    def test_norms_and_sums_of_narrow_gradients_piece_by_piece(self, numel: int, dtype: torch.dtype) -> None:
        """To the bit as of the whole tensor."""
        narrow = torch.randn(numel, generator=torch.Generator().manual_seed(3)).to(dtype)
        assert torch.equal(norm_of(narrow, torch.float32), torch.linalg.vector_norm(narrow, dtype=torch.float32))
        total = torch.randn(numel, generator=torch.Generator().manual_seed(4))
        whole = total + narrow.float()
        add(total, narrow)
        assert torch.equal(total, whole)
        narrow[numel // 2] = torch.inf
        assert torch.equal(norm_of(narrow, torch.float32), torch.tensor(torch.inf))

    def test_pieces_of_a_norm_need_the_kernel_of_the_cpu(self) -> None:
        """Torch's own kernel has vectors of eight elements on x86; where none of these numbers has its bits, tensors
        are cast whole."""
        assert _lanes() in (0, 4, 8, 16)
        if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
            assert _lanes() == 8


class TestVirtualBackend:
    def test_copies_are_counted_and_last(self) -> None:
        now, slept = [0.0], []
        backend = VirtualBackend(h2d_bytes_per_s=1000.0, latency_s=0.5, clock=lambda: now[0], sleep=slept.append)
        backend.copy(torch.empty(100), torch.ones(100), Queue.H2D)
        backend.copy(torch.empty(50, dtype=torch.bfloat16), torch.ones(50), Queue.D2H)  # not throttled
        assert slept == [pytest.approx(0.5 + 400 / 1000)]
        assert backend.copied_bytes == {"h2d": 400, "d2h": 100}

    def test_malloc_maps_large_blocks(self) -> None:
        """A mapped block begins behind a header of 16 bytes at the beginning of a page."""
        try:
            set_up = map_large_blocks()
            give_freed_pages_back()
            libc = ctypes.CDLL(None)
            libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
            libc.free.argtypes = [ctypes.c_void_p]
            blocks = [libc.malloc(size) for size in (400 << 20, 401 << 20)]  # untouched, and larger than any hole
            for block in blocks:
                libc.free(block)
            assert not set_up or all(block % PAGE_BYTES == 16 for block in blocks)
        finally:
            keep_freed_pages()
            give_freed_pages_back()
        assert available_host_bytes() > 0

    def test_large_blocks_do_not_fill_claimed_holes(self) -> None:
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]

        def fills_a_hole() -> bool:
            block = libc.malloc(4 << 20)
            libc.free(block)
            return bool(block % PAGE_BYTES != 16)

        set_up = keep_freed_pages()
        hole, behind = libc.malloc(8 << 20), libc.malloc(64)
        libc.free(hole)
        try:
            map_large_blocks()
            before = fills_a_hole()
            give_back = claim_holes()
            claimed = fills_a_hole()
            give_back()
            assert not set_up or (before, claimed) == (True, False)
        finally:
            libc.free(behind)
            keep_freed_pages()
            give_freed_pages_back()


class TestPrepareRefuses:
    """Each before anything is allocated or changed."""

    @pytest.fixture
    def model(self, kit: Any) -> Any:
        return kit.build("mlp")[0]

    def refused(self, model: Any, plan: Plan, error: type[Exception], message: str | None, **spec: Any) -> None:
        kinds = [type(p) for p in model.parameters()]
        with pytest.raises(error, match=message):
            executor.prepare(model, plan, executor.AdamW(**spec))
        assert [type(p) for p in model.parameters()] == kinds

    def test_another_model(self, kit: Any, small: Plan) -> None:
        self.refused(kit.build("gpt2")[0], small, PlanError, "made for model 'test'.*fingerprint")
        other, _ = kit.build("mlp")
        other.layers[1] = torch.nn.Linear(64, 52)
        self.refused(
            other, small, PlanError, r"'layers.1.weight': the plan was made for shape \(48, 64\), .*\(52, 64\)"
        )

    def test_another_dtype(self, model: Any, small: Plan) -> None:
        self.refused(model.to(torch.bfloat16), small, PlanError, "made for fp32, the model is in bf16")

    def test_other_freezing_and_ties(self, kit: Any, model: Any, small: Plan) -> None:
        model.layers[0].bias.requires_grad_(False)
        self.refused(model, small, PlanError, "frozen False, the model has True")

    def test_clipping(self, model: Any, small: Plan) -> None:
        self.refused(model, small, PlanError, "made without clipping, AdamW has max_grad_norm=1.0", max_grad_norm=1.0)

    def test_update(self, model: Any, small: Plan) -> None:
        self.refused(model, small, PlanError, r"update='step', AdamW\(eager=True\) wants 'eager'", eager=True)

    def test_host_too_small(self, model: Any, small: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys.modules["executor.prepare"], "available_host_bytes", lambda: 50_000)

        def never(*_: Any) -> None:
            raise AssertionError("allocated")

        monkeypatch.setattr(arena_module.Arena, "allocate_slabs", never)
        self.refused(model, small, DoesNotFit, "tide does not fit: host needs .* short by")

    def test_an_edited_plan(self, model: Any, small: Plan) -> None:
        steps = tuple(structs.replace(s, after=()) for s in small.steps)
        self.refused(model, replace(small, steps=steps), PlanError, None)

    def test_another_machine(self, kit: Any, model: Any, small: Plan) -> None:
        with pytest.raises(PlanError, match="machine"):
            executor.prepare(model, small, executor.AdamW(), machine=replace(small.machine, name="h200"))
        with pytest.raises(PlanError, match="gpu memory but machine 'virtual' has"):
            executor.prepare(model, small, executor.AdamW(), machine=kit.small_machine(1000))

    def test_device_bandwidth_and_numbers(self, model: Any, small: Plan) -> None:
        with pytest.raises(PlanError, match="device 'tpu' is not known"):
            executor.prepare(model, small, executor.AdamW(), device="tpu")
        with pytest.raises(PlanError, match="bandwidth"):
            executor.prepare(model, small, executor.AdamW(), bandwidth=-1.0)
        with pytest.raises(PlanError, match="max_grad_norm"):
            executor.AdamW(max_grad_norm=0.0)
        with pytest.raises(PlanError, match="betas"):
            executor.AdamW(betas=(1.0, 0.9))

    def test_a_trainable_parameter_in_no_group(self, model: Any, small: Plan) -> None:
        self.refused(model, small, PlanError, "in no group", params_or_groups=list(model.layers[0].parameters()))


class Heard(logging.Handler):
    """Within it: whether the log of the executor has said the words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words
        self.said = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.said.set()

    def __enter__(self) -> threading.Event:
        logging.getLogger("executor").addHandler(self)
        return self.said

    def __exit__(self, *_: object) -> None:
        logging.getLogger("executor").removeHandler(self)
        self.said.set()


class TestTrouble:
    def test_a_dying_queue_raises_in_the_training_thread(self, kit: Any, start: Callable[..., Any]) -> None:
        run = start("mlp", "tide", clip=0.5)
        kit.train_alone(run.model, run.optimizer, run.batches, 1)

        def broken(*_: Any) -> None:
            raise OSError("the link fell off")

        run.session.contents._copy = broken
        with pytest.raises(OSError, match="the link fell off") as raised:
            for _ in range(3):
                kit.train_alone(run.model, run.optimizer, run.batches, 1)
        assert any("step" in note for note in raised.value.__notes__)
        run.session.close(restore=False)
        assert not [t for t in run.session.queues._crew.threads if t.is_alive()]

    def test_ctrl_c_while_waiting(self, kit: Any, start: Callable[..., Any]) -> None:
        """A link that carries nothing more: the training thread waits for a fetch when Ctrl-C comes."""
        backend, held = VirtualBackend(), threading.Event()
        run = start("mlp", "tide", clip=0.5, backend=backend)
        carry = backend.link.carry

        def carry_later(*copied: Any) -> None:
            held.wait()
            carry(*copied)

        def interrupt(queues: Any) -> None:
            while Queue.COMPUTE not in queues._waiting:
                time.sleep(0.01)
            _thread.interrupt_main()

        kit.train_alone(run.model, run.optimizer, run.batches, 1)
        backend.link.carry = carry_later  # type: ignore[method-assign]
        # A shell that starts the tests in the background has them ignore SIGINT, which is not what is tested.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        striking = threading.Thread(target=interrupt, args=(run.session.queues,), daemon=True)
        try:
            with pytest.raises(KeyboardInterrupt):
                striking.start()
                kit.train_alone(run.model, run.optimizer, run.batches, 1)
        finally:
            signal.signal(signal.SIGINT, before)
            held.set()
        assert run.session.iteration == 1
        run.session.close(restore=False)
        assert not [t for t in run.session.queues._crew.threads if t.is_alive()]

    def test_the_watchdog_names_what_waits(self, kit: Any, small: Plan, caplog: pytest.LogCaptureFixture) -> None:
        """Copies stand still until it does."""
        model, draw = kit.build("mlp")
        backend = VirtualBackend()
        plain_copy = backend.copy
        with caplog.at_level(logging.WARNING, logger="executor"), Heard("h2d executes step") as said:

            def copy(target: Any, source: Any, direction: Queue) -> None:
                said.wait()
                plain_copy(target, source, direction)

            backend.copy = copy  # type: ignore[method-assign]
            model, optimizer = executor.prepare(model, small, executor.AdamW(), backend=backend, watchdog_s=0.1)
            kit.loss_of(model, draw(torch.Generator()))
        optimizer.session.close(restore=False)
        assert "no step has ended for 0.1 s" in caplog.text
        assert "h2d executes step" in caplog.text

    def test_a_thread_that_gets_no_processor_is_waited_for(
        self, kit: Any, small: Plan, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its step may start, and none is being executed: that is no standstill."""
        model, draw = kit.build("mlp")
        queues = executor.ThreadQueues(watchdog_s=0.1)
        plain_run = queues._run
        with caplog.at_level(logging.WARNING, logger="executor"), Heard("no step has ended for 0.1 s; h2d ") as said:

            def run_later(queue: Queue) -> None:
                said.wait()
                plain_run(queue)

            queues._run = run_later  # type: ignore[method-assign]
            model, optimizer = executor.prepare(model, small, executor.AdamW(), queues=queues)
            kit.loss_of(model, draw(torch.Generator()))
        optimizer.session.close(restore=False)
        assert "no step has ended for 0.1 s; h2d " in caplog.text

    @pytest.mark.timeout(120)
    def test_a_thread_that_was_not_woken_is_woken(
        self, kit: Any, small: Plan, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As after a Ctrl-C between the end of a step and word of it."""
        model, draw = kit.build("mlp")
        queues = executor.ThreadQueues(watchdog_s=0.1)
        asleep = queues._conditions[Queue.H2D]
        plain_notify = asleep.notify_all
        with caplog.at_level(logging.WARNING, logger="executor"), Heard("no step has ended for 0.1 s; h2d ") as said:
            asleep.notify_all = lambda: plain_notify() if said.is_set() else None  # type: ignore[method-assign]
            model, optimizer = executor.prepare(model, small, executor.AdamW(), queues=queues)
            kit.loss_of(model, draw(torch.Generator()))
        optimizer.session.close(restore=False)
        assert "no step has ended for 0.1 s; h2d " in caplog.text

    def test_queues_that_can_never_go_on(self, kit: Any, small: Plan) -> None:
        """A plan whose fetch waits for a step that comes after it is stuck: said so, not hung."""
        fetch = next(s for s in small.steps if s.queue is Queue.H2D)
        last = next(s for s in reversed(small.steps) if s.queue is Queue.COMPUTE)
        from pstar_sim.core.step import Ref

        steps = tuple(
            structs.replace(s, after=(*s.after, Ref(last.id))) if s.id == fetch.id else s for s in small.steps
        )
        model, draw = kit.build("mlp")
        model, optimizer = executor.prepare(
            model, replace(small, steps=steps), executor.AdamW(), check=False, watchdog_s=0.2
        )
        with pytest.raises(PlanError, match="the queues are stuck: waiting for step"):
            kit.loss_of(model, draw(torch.Generator()))
        optimizer.session.close(restore=False)

    def test_a_user_exception_in_forward_does_not_spoil_the_next(self, kit: Any, start: Callable[..., Any]) -> None:
        run = start("mlp", "tide", clip=0.5)
        kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=1)

        def fail(*_: Any) -> None:
            raise RuntimeError("mine")

        handle = run.model.layers[3].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="mine"):
            kit.loss_of(run.model, next(run.batches))
        handle.remove()
        mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=3, micro_batches=1)
        assert mine == pytest.approx(theirs, rel=1e-6)
        assert run.session.deviations == 1

    def test_a_closed_session_refuses(self, kit: Any, start: Callable[..., Any]) -> None:
        run = start("mlp", "tide", clip=0.5)
        run.session.close()
        with pytest.raises(ContractError, match="closed"):
            run.optimizer.zero_grad()
