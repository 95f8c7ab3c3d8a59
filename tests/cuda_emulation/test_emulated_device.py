"""The emulated device itself: that it computes as the CPU does, refuses what it lacks, and lets missing waits show."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.devices.torch26 import set_allocator
from pstar_sim.catalog.here import nvidia_smi

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("EMULATED_CUDA_OPERATORS" not in os.environ, reason="is about the emulated device"),
]

MIB = 1 << 20
HALF_A_SECOND = 700_000_000  # cycles of torch.cuda._sleep


@pytest.fixture
def shim() -> Any:
    library = ctypes.CDLL(None)
    library.emulated_cuda_calls.restype = library.emulated_cuda_total.restype = ctypes.c_uint64
    return library


@pytest.mark.parametrize("fused", [True, False])
def test_an_mlp_trains_as_on_the_cpu_to_the_bit(fused: bool) -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        nn = torch.nn
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        draw = torch.Generator().manual_seed(1)
        for _ in range(3):
            x, y = torch.randn(16, 32, generator=draw), torch.randint(0, 10, (16,), generator=draw)
            torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(train("cpu"), train("cuda")))


@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
def test_attention_and_its_gradients(causal: bool, masked: bool) -> None:
    """Both fused kernels; two heads of keys for four of queries."""
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, heads, 9, 8, generator=draw) for heads in (4, 2, 2))
    mask = torch.randn(2, 4, 9, 9, generator=draw) if masked else None
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        results = []
        for device in ("cpu", "cuda"):
            leaves = [t.to(device, dtype, copy=True).requires_grad_() for t in (q, k, v)]
            bias = None if mask is None else mask.to(device, dtype)
            out = torch.nn.functional.scaled_dot_product_attention(
                *leaves, attn_mask=bias, is_causal=causal, enable_gqa=True
            )
            out.square().sum().backward()
            results.append([out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])  # type: ignore[union-attr]
        for one, other in zip(*results):
            assert float((one.float() - other.float()).abs().max()) < bound


class TestOrder:
    def test_a_missing_wait_shows_as_wrong_numbers(self) -> None:
        def read(*, waits: bool) -> float:
            side, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
            torch.cuda.synchronize()
            torch.cuda._sleep(HALF_A_SECOND)
            x.fill_(1)
            if waits:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x.clone()
            torch.cuda.synchronize()
            return float(y.sum())

        assert read(waits=True) == 1000
        assert read(waits=False) == 0

    def test_memory_that_is_freed_too_early_shows_as_wrong_numbers(self) -> None:
        """A tensor's memory has its next owner while another stream has yet to read it, unless torch hears of that."""

        def read(*, recorded: bool) -> float:
            side, x = torch.cuda.Stream(), torch.ones(4 * MIB, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(HALF_A_SECOND)
                y = x.clone()
            if recorded:
                x.record_stream(side)
            del x
            torch.full((4 * MIB,), 7, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            return float(y[0])

        assert read(recorded=True) == 1
        assert read(recorded=False) == 7

    def test_an_event_is_where_it_was_recorded(self) -> None:
        event, later = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        event.record()
        torch.cuda._sleep(HALF_A_SECOND)
        later.record()
        event.synchronize()
        assert not later.query()
        later.synchronize()
        assert event.elapsed_time(later) >= 490

    def test_a_graph_runs_what_was_captured(self) -> None:
        graph, side, y = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.zeros(8, device="cuda")
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y += 1
            torch.cuda.current_stream().wait_stream(side)
            y *= 2
        assert y.tolist() == [0] * 8
        graph.replay()
        graph.replay()
        assert y.tolist() == [6] * 8


class TestMemory:
    def test_a_device_ends_where_it_ends(self) -> None:
        free, total = torch.cuda.mem_get_info()
        assert free < total
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total, dtype=torch.uint8, device="cuda")

    @pytest.mark.skipif(os.environ.get("EMULATED_CUDA_POISON") != "1", reason="memory is not poisoned")
    def test_fresh_memory_is_not_a_number(self) -> None:
        # A pool of its own: the default one may keep a page whose other bytes a living tensor holds.
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            assert torch.empty(5 * MIB, device="cuda").isnan().all()

    def test_bytes_are_counted_by_their_way(self, shim: Any) -> None:
        names = (b"h2d_bytes", b"d2h_bytes", b"d2d_bytes", b"pageable_bytes")
        before = [shim.emulated_cuda_total(name) for name in names]
        pinned = torch.empty(1000, dtype=torch.uint8).pin_memory()
        there = pinned.to("cuda", non_blocking=True)
        there.clone()
        there.cpu()
        assert [shim.emulated_cuda_total(name) - n for name, n in zip(names, before)] == [1000, 1000, 1000, 1000]
        assert shim.emulated_cuda_calls(b"cudaMemcpyAsync") > 0
        assert shim.emulated_cuda_total(b"no such figure") == 2**64 - 1


def test_a_profiler_sees_calls_and_copies() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    pinned = torch.empty(1000).pin_memory()
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        (pinned.to("cuda", non_blocking=True) * 2).cpu()
    names = [event.name for event in profile.events()]
    assert {"cudaMemcpyAsync", "cudaLaunchKernel"} <= set(names)
    assert {"Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pageable)"} <= set(names)


def test_the_generator_decides_what_is_drawn() -> None:
    drawn = []
    for _ in range(2):
        torch.cuda.manual_seed(3)
        drawn.append((torch.randn(64, device="cuda"), torch.nn.functional.dropout(torch.ones(64, device="cuda"))))
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
    assert not torch.equal(drawn[0][0], torch.randn(64, device="cuda"))


def test_autocast_has_the_rules_of_cuda() -> None:
    """In fp32 on CUDA, in 16 bits on a CPU."""
    x = torch.ones(4, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.pow(x, 3.0).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.pow(x.cpu(), 3.0).dtype == torch.bfloat16


@pytest.fixture
def expandable() -> Iterator[None]:
    set_allocator("expandable_segments:True")
    yield
    torch.cuda.empty_cache()
    set_allocator("expandable_segments:False")


def is_mapped(address: int) -> bool:
    """Whether a task may touch it; another one ends the process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line.split()[1].startswith("rw")
    return False


def test_expandable_segments_grow_by_pages_of_20_mib(shim: Any, expandable: None) -> None:
    """30 MiB take two pages, 15 MiB more the rest of the second and a third; the address stays when they are gone."""
    names = [b"cuMemCreate", b"cuMemMap", b"cuMemUnmap", b"cuMemRelease", b"cudaMalloc"]
    torch.cuda.empty_cache()
    calls, taken = [shim.emulated_cuda_calls(name) for name in names], shim.emulated_cuda_total(b"device_bytes")
    with torch.cuda.stream(torch.cuda.Stream()):
        first = torch.full((30 * MIB,), 7, dtype=torch.uint8, device="cuda")
        second = torch.full((15 * MIB,), 8, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()  # what reads them below is another stream
    address = second.data_ptr()
    assert address == first.data_ptr() + 30 * MIB and is_mapped(address + 10 * MIB)
    assert shim.emulated_cuda_total(b"device_bytes") - taken == 60 * MIB
    assert int(first[-1]) == 7 and int(second[0]) == 8 and int(second[-1]) == 8
    del second
    torch.cuda.empty_cache()  # the second page is still in part in use
    assert is_mapped(address) and not is_mapped(address + 10 * MIB)
    assert shim.emulated_cuda_total(b"device_bytes") - taken == 40 * MIB
    del first
    torch.cuda.empty_cache()
    assert shim.emulated_cuda_total(b"device_bytes") == taken
    assert [shim.emulated_cuda_calls(name) - before for name, before in zip(names, calls)] == [3, 3, 3, 3, 0]


def test_a_device_that_is_full_has_no_page(shim: Any, expandable: None) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(torch.cuda.mem_get_info()[0] + 20 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.ones(30 * MIB, dtype=torch.uint8, device="cuda").sum() == 30 * MIB


def test_nvidia_smi_lists_what_torch_has() -> None:
    """Memory is in MiB there."""
    text = nvidia_smi()
    assert text is not None
    names, memory = zip(*(line.split(", ")[:2] for line in text.splitlines()))
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    assert list(names) == [device.name for device in devices]
    assert [int(mib) for mib in memory] == [device.total_memory >> 20 for device in devices]


RANK = """
import ctypes, os, sys

nccl = ctypes.CDLL("libnccl.so.2")
class Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]
given = Id(sys.argv[1].encode()) if sys.argv[1:] else Id()
assert given.internal or nccl.ncclGetUniqueId(ctypes.byref(given)) == 0
status = nccl.ncclCommInitRank(ctypes.byref(ctypes.c_void_p()), 2, given, len(sys.argv) - 1)
print(given.internal.decode(), status, flush=True)
sys.stdin.read()
"""


class TestRanksThatAreKilled:
    def test_no_file_stays(self) -> None:
        """One of two ranks has joined."""
        shared = Path("/dev/shm")
        before = set(shared.iterdir())
        with subprocess.Popen([sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
            assert rank.stdout is not None
            rank.stdout.readline()
            rank.kill()
        assert not [path for path in set(shared.iterdir()) - before if "emulated_nccl" in path.name]

    def test_the_other_rank_is_told(self) -> None:
        """Of an id whose process has ended; 2 is NCCL's error of the system."""
        first = subprocess.run([sys.executable, "-c", RANK], input="", capture_output=True, text=True, timeout=60)
        shared, status = first.stdout.split()
        assert status == "0"
        other = [sys.executable, "-c", RANK, shared]
        assert subprocess.run(other, input="", capture_output=True, text=True).stdout.split() == [shared, "2"]


def test_what_is_missing_names_itself(shim: Any, capfd: pytest.CaptureFixture[str]) -> None:
    not_supported = 801
    assert shim.cudaIpcGetMemHandle(None, None) == not_supported
    assert shim.cudaLaunchKernel(None, 0, 0, 0, 0, 0, 0, None, 0, None) == not_supported
    shim.cudaGetLastError()
    said = capfd.readouterr().err
    assert "cudaIpcGetMemHandle is not emulated" in said
    assert "no kernel runs here: a kernel that was not registered" in said
