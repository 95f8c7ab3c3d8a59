"""GPU memory on a CUDA device: what is reserved, who allocates and who waits in a steady iteration. Needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import executor
from executor.devices.cuda_blocks import block_bytes, set_up_allocator
from executor.devices.headroom import measure_room
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import DoesNotFit, PlanError
from pstar_sim.policy.registry import find_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch finds none"),
]

MIB, GIB, GB = 1 << 20, 1 << 30, 10**9
LAYERS, WIDTH = 12, 2048  # 16 MiB a layer in fp32: chunks of several blocks of the allocator


class Wide(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def batch(device: str = "cuda") -> torch.Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3)).to(device)


def plan_of(kit: Any, policy: str, chunks: int, *, layers: int = LAYERS, clip: bool = False) -> Plan:
    """Room for that many chunks beside the highest tide."""
    from executor.capture import capture_module

    w = capture_module(Wide(layers), (batch("cpu"),), name="wide", batch=64, sequence=1)
    room = w.peak_non_model_bytes + chunks * WIDTH * WIDTH * 4
    return find_policy(policy)(w, kit.small_machine(room), Settings(clip=clip))


def begin(plan: Plan, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    spec = executor.AdamW(lr=1e-4, max_grad_norm=1.0 if plan.settings.clip else None)
    model, optimizer = executor.prepare(Wide(len(plan.workload.tensors)), plan, spec, device="cuda", **options)
    return model, optimizer, batch()


def iterate(model: Any, optimizer: Any, x: torch.Tensor, count: int) -> None:
    for _ in range(count):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("policy", ["static_partition", "tide", "patrickstar"])
def test_a_steady_iteration_allocates_nothing_and_the_training_thread_never_waits_for_the_device(
    kit: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits inside operators raise (torch's own sync debug mode); waits for events, streams and the device, which that
    mode does not see, are noted by thread. What a plan does that uses room at low tide only is said by a skip."""
    plan = plan_of(kit, policy, 5)
    model, optimizer, x = begin(plan)
    try:
        iterate(model, optimizer, x, 6)
        optimizer.session.drain()
        optimizer.session.queues.resume()
        before = torch.cuda.memory_stats()
        host_before = host_allocations()
        exchanges = optimizer.session.backend.exchanges
        waits = kit.waits_of_training(
            monkeypatch, [(torch.cuda.Event, "Event"), (torch.cuda.Stream, "Stream"), (torch.cuda, "device")]
        )
        torch.cuda.set_sync_debug_mode("error")  # an operator that waits for the device raises, in whatever thread
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            with torch.profiler.record_function("steady"):
                iterate(model, optimizer, x, 4)
            # The profiler waits for the device when it ends, by the very function that notes waits.
            torch.cuda.set_sync_debug_mode("default")
            monkeypatch.undo()
        assert waits == []
        optimizer.session.drain()
        after = torch.cuda.memory_stats()
        assert host_allocations() == host_before
        exchanged = optimizer.session.backend.exchanges - exchanges
        optimizer.session.queues.resume()
        if exchanged:
            assert policy != "static_partition"
            pytest.skip(f"{policy} uses room at low tide that the highest tide needs: {exchanged} exchanges in 4 steps")
        checked = [key for key in ("num_device_alloc", "num_device_free", "num_alloc_retries") if key in after]
        assert {key: after[key] for key in checked} == {key: before[key] for key in checked}
        assert "num_alloc_retries" in checked
        called = kit.names_within(profile.events(), "steady")  # the profile has its own wait for the device, at its end
        assert any(name.startswith("cudaLaunchKernel") for name in called), "the profiler saw no call of the runtime"
        assert not called & {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaDeviceSynchronize"}
    finally:
        torch.cuda.set_sync_debug_mode("default")
        optimizer.session.close(restore=False)


def host_allocations() -> int | None:
    """Pinned allocations of this process; None before torch counts them."""
    stats = getattr(torch.cuda, "host_memory_stats", None)
    return None if stats is None else int(stats().get("num_host_alloc", 0))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_reserved_stays_with_allocated_over_2000_steps(kit: Any) -> None:
    plan = plan_of(kit, "static_partition", 2, layers=3)
    model, optimizer, x = begin(plan)
    backend = optimizer.session.backend
    most = 0
    grow = backend.gate._grow

    def watched(payload: torch.Tensor) -> None:
        nonlocal most
        grow(payload)
        size = block_bytes(payload.numel() * payload.element_size())
        most = max(most, backend.gate.held_bytes + backend.gate.pending_bytes + size)

    backend.gate._grow = watched
    try:
        iterate(model, optimizer, x, 50)
        torch.cuda.synchronize()
        pool, reserved = backend.pool_bytes, torch.cuda.memory_reserved()
        iterate(model, optimizer, x, 1950)
        torch.cuda.synchronize()
        assert backend.pool_bytes == pool
        assert torch.cuda.memory_reserved() <= reserved
        chunk = max(block_bytes(plan.layout.payload_bytes(c.index, "param")) for c in plan.layout.chunks)
        assert pool <= most + chunk
        assert backend.exchanges == 0
    finally:
        optimizer.session.close(restore=False)


@pytest.mark.parametrize("policy", ["static_partition", "tide", "optimal"])
def test_the_budget_is_reserved_bytes(kit: Any, policy: str) -> None:
    """Peak of everything torch reserved during steady iterations: the plan's budget, and at most the slack between two
    exchanges, one chunk and the allocator's rounding of activations (20 MiB pieces) more. cuBLAS takes its workspaces
    through torch: they are in the room that is kept, as they were measured."""
    plan = plan_of(kit, policy, 6)
    torch.cuda.empty_cache()
    outside = torch.cuda.memory_reserved()
    model, optimizer, x = begin(plan)
    try:
        iterate(model, optimizer, x, 4)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        iterate(model, optimizer, x, 6)
        torch.cuda.synchronize()
        chunk = max(block_bytes(plan.layout.payload_bytes(c.index, "param")) for c in plan.layout.chunks)
        backend = optimizer.session.backend
        beside = chunk + 20 * MIB + backend.kept.workspace_bytes + backend.slack_bytes
        assert torch.cuda.max_memory_reserved() - outside <= plan.gpu_budget_bytes + beside
    finally:
        optimizer.session.close(restore=False)


def test_exchanges_settle_beside_a_teacher(kit: Any) -> None:
    """512 MiB of another model are no part of the budget: with them a steady iteration makes the exchanges that it
    makes without, whose pages fit."""
    plan = plan_of(kit, "static_partition", 5)
    exchanges = []
    for size in (0, 512 * MIB):
        teacher = torch.zeros(size, dtype=torch.uint8, device="cuda")
        model, optimizer, x = begin(plan)
        try:
            iterate(model, optimizer, x, 4)
            optimizer.session.drain()
            before = optimizer.session.backend.exchanges
            optimizer.session.queues.resume()
            iterate(model, optimizer, x, 4)
            exchanges.append(optimizer.session.backend.exchanges - before)
        finally:
            optimizer.session.close(restore=False)
        del teacher
    assert exchanges == [0, 0]


def test_memory_comes_back(kit: Any) -> None:
    plan = plan_of(kit, "tide", 5)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, optimizer, x = begin(plan)
    iterate(model, optimizer, x, 2)
    workspaces = optimizer.session.backend.kept.workspace_bytes
    optimizer.session.close(restore=False)
    del model, optimizer, x
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= workspaces


def test_free_blocks_of_the_pool_go_back_for_operators(kit: Any) -> None:
    """While a run stands still: less is reserved by what was free, and training goes on with the same numbers."""
    plan = plan_of(kit, "static_partition", 5)
    losses: list[float] = []
    for gives in (False, True):
        model, optimizer, x = begin(plan)
        backend = optimizer.session.backend
        try:
            iterate(model, optimizer, x, 2)
            with optimizer.session.still():
                backend.gate.flush()
                free = backend._blocks._free_blocks * backend._blocks._block
                before = torch.cuda.memory_reserved()
                if gives:
                    given = backend.give_back()
                    assert given == before - torch.cuda.memory_reserved()
                    assert given >= free
                    assert backend._blocks.kept_bytes == 0
            iterate(model, optimizer, x, 2)
            losses.append(float(model(x).detach()))
        finally:
            optimizer.session.close(restore=False)
    assert losses[0] == losses[1]


def test_the_last_session_leaves_torchs_allocator_as_it_was(kit: Any) -> None:
    """What a run has made stays valid without its settings, and a second run maps pages again."""

    def maps() -> bool:
        return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])

    kept = []
    for _ in range(2):
        assert not maps()
        model, optimizer, x = begin(plan_of(kit, "static_partition", 5))
        try:
            assert maps()
            iterate(model, optimizer, x, 1)
            kept.append(torch.full((10 * MIB,), len(kept), device="cuda"))
        finally:
            optimizer.session.close(restore=False)
    assert not maps()
    kept.append(torch.full((10 * MIB,), 2, device="cuda"))
    assert [int(tensor.sum()) // (10 * MIB) for tensor in kept] == [0, 1, 2]


def test_pinned_memory_goes_back_with_the_session(kit: Any) -> None:
    stats = getattr(torch.cuda, "host_memory_stats", None)
    if stats is None or not hasattr(torch._C, "_host_emptyCache"):
        pytest.skip(f"torch {torch.__version__} does not count pinned memory, or cannot give it back")
    torch._C._host_emptyCache()
    before = stats()["allocated_bytes.current"]
    model, optimizer, x = begin(plan_of(kit, "tide", 5))
    iterate(model, optimizer, x, 2)
    assert stats()["allocated_bytes.current"] > before
    optimizer.session.close(restore=False)
    assert stats()["allocated_bytes.current"] == before


def test_what_is_free_beside_a_small_tensor_can_be_given_back() -> None:
    """24 MiB are cut from 400 that are free: of these two or three pages of 20 MiB stay."""
    set_up_allocator()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with torch.cuda.stream(torch.cuda.Stream()):
        large = torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")
        del large
        small = torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() - before == 400 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before in (40 * MIB, 60 * MIB)
    del small
    torch.cuda.empty_cache()


def test_the_room_is_what_a_run_leaves_free() -> None:
    """Measured 20 times, the same, whatever backward's thread still holds; and torch holds the workspaces that were
    seen."""
    device = torch.device("cuda", 0)
    first, *others, second = [measure_room(device) for _ in range(20)]
    assert {room.workspace_bytes for room in (first, *others)} == {second.workspace_bytes}
    assert second.workspace_bytes > 0
    assert abs(first.outside_bytes - second.outside_bytes) <= 16 * MIB
    assert second.kept_bytes >= max(GB, second.outside_bytes + second.workspace_bytes)
    assert torch.cuda.memory_allocated() >= second.workspace_bytes


def test_a_graph_that_is_captured_refuses_the_run_and_not_the_process(kit: Any) -> None:
    model, optimizer, x = begin(plan_of(kit, "static_partition", 5))
    backend = optimizer.session.backend
    try:
        iterate(model, optimizer, x, 1)
        optimizer.session.drain()
        graph, y = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
        with torch.cuda.graph(graph):
            y += 1
            with pytest.raises(PlanError, match="while a CUDA graph is being captured"):
                backend.give_back()
        graph.replay()
        assert y.sum().item() == 8
        optimizer.session.queues.resume()
        iterate(model, optimizer, x, 1)
        graph.replay()
        assert y.sum().item() == 16
    finally:
        optimizer.session.close(restore=False)


class TestTheCap:
    def test_torch_refuses_what_goes_beyond_it_and_no_longer_after_the_run(self, kit: Any) -> None:
        plan = plan_of(kit, "tide", 5)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        taken = total - free - torch.cuda.memory_reserved()
        cap = max(taken + 512 * MIB, GIB) + plan.gpu_budget_bytes + 256 * MIB
        model, optimizer, x = begin(plan, gpu_memory=cap)
        try:
            iterate(model, optimizer, x, 2)
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(cap, dtype=torch.uint8, device="cuda")
        finally:
            optimizer.session.close(restore=False)
        assert torch.empty(cap, dtype=torch.uint8, device="cuda").is_cuda

    def test_larger_than_the_card(self, kit: Any) -> None:
        total = torch.cuda.mem_get_info()[1]
        plan = plan_of(kit, "tide", 5)
        with pytest.raises(PlanError, match=r"--gpu-memory .* is more than .* has"):
            executor.prepare(
                Wide(len(plan.workload.tensors)), plan, executor.AdamW(), device="cuda", gpu_memory=total + 1
            )

    def test_smaller_than_the_plan(self, kit: Any) -> None:
        plan = plan_of(kit, "tide", 5)
        # Workspaces are as large as half of this plan: with the context alone in the cap, nothing would be left.
        cap = measure_room(torch.device("cuda", 0)).measured_bytes + plan.gpu_budget_bytes // 2
        with pytest.raises(DoesNotFit, match="plan again with --gpu-memory"):
            executor.prepare(Wide(len(plan.workload.tensors)), plan, executor.AdamW(), device="cuda", gpu_memory=cap)

    def test_a_plan_for_a_larger_card(self, kit: Any) -> None:
        from dataclasses import replace

        plan = plan_of(kit, "tide", 5)
        larger = replace(plan, gpu_budget_bytes=2 * torch.cuda.mem_get_info()[1])
        with pytest.raises(DoesNotFit, match="gpu needs"):
            executor.prepare(Wide(LAYERS), larger, executor.AdamW(), device="cuda", check=False)


def test_no_step_begins_before_what_it_waits_for_has_ended(kit: Any) -> None:
    """Spans of the measured timeline, in the device's time. Its offset to the host's clock is measured once a run, and
    is wrong where the machine is busy in that moment: a missing wait shows in every run, and one good run is enough."""
    assert any(not begun_too_early(kit) for _ in range(12))


def begun_too_early(kit: Any) -> list[tuple[Any, Any]]:
    """Returns the steps of a run that begin before one that they wait for has ended, with that one."""
    plan = plan_of(kit, "tide", 5)
    model, optimizer, x = begin(plan)
    try:
        iterate(model, optimizer, x, 5)
        optimizer.session.drain()
        timeline = optimizer.session.timeline()
        at = {(s.step, s.iteration): s for s in timeline.spans}
        ended_s = [span.end_s for span in timeline.spans]
        # Events of two streams are taken a few microseconds apart, and the device's clock and the host's, which
        # Adam's spans are by, run apart by up to 1e-4 of the time.
        slack_s = 5e-5 + 1e-4 * (max(ended_s) - min(ended_s))
        early = [
            (step, ref)
            for step in plan.steps
            for ref in step.after
            for iteration in range(timeline.iterations)
            if (one := at.get((step.id, iteration))) is not None
            and (other := at.get((ref.id, iteration - ref.back))) is not None
            and one.start_s < other.end_s - slack_s
        ]
        optimizer.session.queues.resume()
        return early
    finally:
        optimizer.session.close(restore=False)
