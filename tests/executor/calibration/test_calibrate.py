"""Calibration: the arithmetic of each measurement on clocks and backends passed in, and one short real run."""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from executor import calibrate as calibration
from executor.calibration import compute, copies, host, shapes, together, wire
from executor.calibration.bench import Bench, Effort
from executor.calibration.folders import DiskPoint, FolderRates
from executor.calibration.measured_device import CudaDevice, VirtualDevice, open_device
from executor.recording import moment_costs
from pstar_sim.catalog.loader import load_machine, resize
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.product_shape import ProductShape
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Queue
from pstar_sim.errors import CatalogError, PlanError
from pstar_sim.planner.compare import compare
from pstar_sim.testing import chain_workload

SMALL = Effort(point_s=0.0, rounds=2, least=2, most=3, window_s=0.01, memory_bytes=8 << 20)


class Ticks:
    """A clock that goes on by `step_s` at each look; `now_s` may be set."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


class FakeLink:
    """A backend whose copies take 1 ms and 1 ns a byte on a clock of its own."""

    name = "fake"
    device = torch.device("cpu")

    def __init__(self, clock: Ticks) -> None:
        self.clock = clock
        self.copied = {"h2d": 0, "d2h": 0}
        self.parts: list[int] = []

    def host_slab(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def gpu_payload(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        payload = torch.empty(numel, dtype=dtype)
        payload.untyped_storage().resize_(0)
        return payload

    def take(self, payload: torch.Tensor) -> None:
        payload.untyped_storage().resize_(payload.numel() * payload.element_size())

    def give(self, payload: torch.Tensor) -> None:
        payload.untyped_storage().resize_(0)

    def copy(self, target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None:
        target.copy_(source)
        self.clock.now_s += 1e-3 + target.numel() * 1e-9
        self.copied[direction.value] += target.numel()
        self.parts.append((source if direction is Queue.H2D else target).storage_offset())

    def fence(self, queue: Queue) -> None:
        return None

    def enter_thread(self) -> None:
        return None

    @property
    def copied_bytes(self) -> dict[str, int]:
        return dict(self.copied)


def bench() -> Bench:
    return Bench(SMALL)


# -- bench ------------------------------------------------------------------------------------------------------------


def scripted(seconds: Mapping[object, list[float]]) -> tuple[dict[object, Callable[[], object]], Callable[..., float]]:
    """Actions by key, and a timer that hands out each one's seconds in turn."""
    left: dict[object, Iterator[float]] = {key: iter(values) for key, values in seconds.items()}
    actions: dict[object, Callable[[], object]] = {key: (lambda key=key: key) for key in seconds}  # type: ignore[misc]
    return actions, lambda action: next(left[action()])


def test_medians_leave_the_first_call_out_and_take_all_rounds() -> None:
    # The first, 9 s, warms up. Two rounds of two calls: 1, 2 and 3, 4.
    actions, timed = scripted({"a": [0.9, 0.1, 0.2, 0.3, 0.4]})
    assert Bench(SMALL).medians(actions, timed) == {"a": pytest.approx(0.25)}


def test_rounds_go_over_all_points_in_turn() -> None:
    order: list[str] = []

    def timed(action: Callable[[], object]) -> float:
        action()
        return 0.1

    actions = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}  # type: ignore[misc]
    Bench(Effort(point_s=0.0, rounds=2, least=1, most=1)).medians(actions, timed)
    assert order == ["a", "a", "b", "b", "a", "b"]  # the first of each is the warm-up


def test_a_curve_ends_where_a_call_takes_too_long() -> None:
    actions, timed = scripted({1: [0.1] * 9, 2: [2.0] * 9, 3: [0.1] * 9})
    assert Bench(SMALL).medians(actions, timed, longest_s=1.0) == {1: pytest.approx(0.1), 2: pytest.approx(2.0)}


def test_a_point_takes_its_time_but_no_more_calls_than_allowed() -> None:
    calls = count()
    effort = Effort(point_s=1.0, rounds=1, least=1, most=7)
    Bench(effort).medians({"a": lambda: next(calls)}, lambda action: (action(), 0.001)[1])  # type: ignore[func-returns-value]
    assert next(calls) == 8  # one warm-up and seven


# -- compute ----------------------------------------------------------------------------------------------------------


def test_products_by_size() -> None:
    # Every look at the clock is a millisecond: an action takes one. n = 64: 16 rows, 3 * 2 * 16 * 64 * 64 flops.
    device = VirtualDevice(clock=Ticks(1e-3), wall_clock=Ticks())
    found = compute.matmul_rates(device, bench(), extents=(64, 128))
    assert set(found) == {"fp32", "bf16"}
    (flops, rate), (more, _) = found["fp32"]
    assert flops == 2 * 16 * 64 * 64 == 131072
    assert more == 2 * 32 * 128 * 128
    assert rate == pytest.approx(3 * 131072 / 1e-3)


def test_bytes_of_operators_are_those_a_capture_counts() -> None:
    device = VirtualDevice()
    with device.using():
        size, action = compute.between_products(device, 4)
        twice, _ = compute.between_products(device, 8)
        action()
    # 4 rows x 1024 fp32 are 16 KiB; the block reads and writes that dozens of times, four times as wide in the GELU.
    assert 50 * 16384 < size < 500 * 16384
    assert twice == pytest.approx(2 * size, rel=0.05)


def test_device_memory_counts_a_copys_bytes_twice() -> None:
    device = VirtualDevice(clock=Ticks(1e-3), wall_clock=Ticks())
    assert compute.memory_rate(device, bench()) == pytest.approx(2 * (4 << 20) / 1e-3)


def test_a_layer_has_three_products() -> None:
    device = VirtualDevice(clock=Ticks(1e-3), wall_clock=Ticks())
    found = shapes.product_seconds(device, bench(), "fp32", [(4, 16, 32)])
    assert found == {product: pytest.approx(1e-3) for product in ((1, 4, 16, 32), (1, 4, 32, 16), (1, 16, 4, 32))}


@pytest.mark.parametrize("sms", [1, 100])
def test_products_by_shape_are_found_again(sms: int) -> None:
    own = ProductShape(
        sms=sms, tile=(128, 256), wave_loss=0.6 if sms > 1 else 0.0, depth=90.0, bytes_per_s=3e10, kernel_s=4e-5
    )
    layers = [(m, k, n) for m in (64, 1000, 5000) for k, n in ((300, 500), (1500, 4000), (4000, 1500))]
    rows = [(1, *layer) for m, k, n in layers for layer in ((m, k, n), (m, n, k), (k, m, n))]
    seconds = {row: own.seconds(row, 1e12, 4 * sum(a * b for a, b in zip(row[1:], (*row[2:], row[1])))) for row in rows}
    found = shapes.fit_products(seconds, flops_per_s=1e12, itemsize=4, sms=sms, tile=(128, 256))
    for row, took_s in seconds.items():
        moved = 4 * sum(a * b for a, b in zip(row[1:], (*row[2:], row[1])))
        assert found.seconds(row, 1e12, moved) == pytest.approx(took_s, rel=0.03)
    assert found.bytes_per_s == pytest.approx(3e10, rel=0.15) and found.kernel_s == pytest.approx(4e-5, rel=0.15)


def test_attention_is_a_share_of_the_rate_of_large_products() -> None:
    # Batch 2, 8 heads, 256 x 256 scores of which the mask leaves half, width 64: two products forward and five
    # backward, in the second of a look.
    flops = 7 * 2 * 2 * 8 * 256 * 256 // 2 * 64
    device = VirtualDevice(clock=Ticks(1.0), wall_clock=Ticks())
    assert shapes.attention_share(device, bench(), "fp32", 2 * flops) == pytest.approx(0.5)
    assert shapes.attention_share(device, bench(), "fp32", flops / 2) == 1.0


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", [Queue.H2D, Queue.D2H])
def test_copies_by_size_go_through_the_backend(queue: Queue) -> None:
    clock = Ticks()
    link = FakeLink(clock)
    device = VirtualDevice(backend=link, clock=clock, wall_clock=Ticks())
    found = copies.copy_rates(device, bench(), queue)
    assert [size for size, _ in found] == [65536, 524288, 2 << 20]  # of a slab of 4 MiB, at most half
    for size, rate in found:
        assert rate == pytest.approx(size / (1e-3 + size * 1e-9))
    other = "d2h" if queue is Queue.H2D else "h2d"
    assert link.copied[queue.value] > 0
    assert link.copied[other] == 0
    assert len(set(link.parts)) > 3  # it goes on through the slab


def test_pageable_copies_where_pinning_means_something() -> None:
    clock = Ticks()

    class Pinning(VirtualDevice):
        def pageable(self, size_bytes: int) -> torch.Tensor | None:
            return torch.zeros(size_bytes, dtype=torch.uint8)

    device = Pinning(backend=FakeLink(clock), clock=clock, wall_clock=Ticks())
    size = 64 << 20
    assert copies.pageable_rate(device, bench()) == pytest.approx(size / (1e-3 + size * 1e-9))
    assert copies.pageable_rate(VirtualDevice(), bench()) is None


# -- host -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_thread_counts(cores: int, counts: list[int]) -> None:
    assert host.thread_counts(cores) == counts


def test_adam_by_threads_reads_two_clocks() -> None:
    rare = Bench(Effort(point_s=0.0, rounds=1, least=1, most=1, memory_bytes=1))
    found = host.adam_rates(rare, [1, 2], clock=Ticks(0.002), wall_clock=Ticks(0.001))
    assert found == ((1, pytest.approx((2 << 20) / 0.002)), (2, pytest.approx((2 << 20) / 0.001)))
    assert torch.get_num_threads() >= 1


def test_updates_of_other_optimizers_beside_adamw() -> None:
    """With a clock that ticks evenly all take as long."""
    rare = Bench(Effort(point_s=0.0, rounds=1, least=1, most=1, memory_bytes=1))
    shares = host.update_shares(rare, 1, clock=Ticks(0.002))
    assert {"lion", "sgd-momentum", "adafactor", "adafactor-vectors"} <= shares.keys()
    assert (
        all(share == pytest.approx(1.0) for share in shares.values()) and "muon" not in shares
    )  # its products are counted


def test_one_adam_update_is_the_executors() -> None:
    params, update = host.adam_update(1)
    before = torch.get_num_threads()
    update()
    assert params == 2 << 20
    assert torch.get_num_threads() == before


def test_host_memory_counts_what_is_read_and_written() -> None:
    # One thread: it looks at the clock when it begins and when it ends, a second apart.
    found = host.dram_rate(Bench(Effort(rounds=1, window_s=0.001, memory_bytes=2 << 20)), [1], clock=Ticks(1.0))
    repeats = max(2, round(0.001 * 4e9 / (1 << 20)))
    assert found == pytest.approx(2 * (1 << 20) * repeats)


# -- collectives -------------------------------------------------------------------------------------------------------


def test_collectives_from_seconds() -> None:
    # 4 KiB take half a millisecond; 1 GB more takes a second more, and 1 MB more two milliseconds more.
    curve, latency_s = wire.from_seconds({4096: 0.0005, 4096 + 10**6: 0.0025, 4096 + 10**9: 1.0005})
    assert curve == ((2 * 4096 + 2e6, pytest.approx(5e8)), (2 * 4096 + 2e9, pytest.approx(1e9)))
    assert latency_s == 0.0005
    # A part that takes no longer than the smallest says nothing about a rate.
    assert wire.from_seconds({4096: 0.1, 8192: 0.1, 4096 + 10**9: 1.1})[0] == ((2 * 4096 + 2e9, pytest.approx(1e9)),)


@pytest.mark.slow
def test_two_processes_gather_for_real(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", python)
    answer = wire.collective_rates()
    if isinstance(answer, str):
        pytest.skip(answer)  # a machine too busy for two processes that wait for each other
    backend, curve, latency_s = answer
    assert backend in ("gloo", "nccl")
    assert all(rate > 1e5 for _, rate in curve) and curve[-1][0] == 64 << 20
    assert 0 < latency_s < 10


def test_collectives_that_do_not_answer_are_skipped_with_the_reason() -> None:
    answer = wire.collective_rates(timeout_s=0.01)
    assert isinstance(answer, str)
    assert "did not answer" in answer or "NCCL needs two" in answer


# -- moments ----------------------------------------------------------------------------------------------------------


def test_the_fit_finds_constant_and_bandwidth_again() -> None:
    rows = [(0.0, 1e6), (1e9, 1e6), (5e8, 4e7), (0.0, 2e7), (2e8, 0.0)]
    samples = [moment_costs.Sample(f / 100e9, b, 8e-5 + f / 100e9 + b / 15e9) for f, b in rows]
    constant_s, bytes_per_s = moment_costs.fit(samples)
    assert constant_s == pytest.approx(8e-5)
    assert bytes_per_s == pytest.approx(15e9)


def test_a_negative_constant_is_none() -> None:
    samples = [
        moment_costs.Sample(0, 1e6, 1e-4),
        moment_costs.Sample(0, 2e6, 3e-4),
    ]  # a line through them starts below zero
    constant_s, bytes_per_s = moment_costs.fit(samples)
    assert constant_s == 0
    # least squares of relative errors of seconds = bytes / B: slope (0.01 + 2/3 * 0.01) * 1e-6...
    ratios = [s.size_bytes / s.seconds for s in samples]
    assert 1 / bytes_per_s == pytest.approx(sum(ratios) / sum(r * r for r in ratios))


def test_samples_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="different sizes"):
        moment_costs.fit([moment_costs.Sample(0, 1e6, 1e-3), moment_costs.Sample(0, 1e6, 1e-3)])
    slow = [moment_costs.Sample(1.0, 1e6, 1e-3), moment_costs.Sample(1.0, 5e6, 1e-3)]
    with pytest.raises(ValueError, match="no time for bytes"):
        moment_costs.fit(slow)


def test_products_of_a_recorded_moment_are_not_among_its_bytes() -> None:
    """A moment of 3 ms: its product takes 1 ms by shape, and 2 MB are left beside the product's own bytes."""
    w = chain_workload(1, 1024, dtype="fp32")
    product = (1, 100, 100, 100)  # 2e6 flops, 120,000 bytes
    first = replace(
        w.moments[0],
        flops=2 * 10**6,
        bytes_read=2 * 10**6 + 120_000,
        bytes_written=0,
        products=(product,),
        duration_s=3e-3,
    )
    w = replace(w, moments=(first, *w.moments[1:]), recorded_on="virtual")
    shape = ProductShape(sms=1, tile=(1, 1), wave_loss=0.0, depth=0.0, bytes_per_s=1e18, kernel_s=9e-4)
    base = load_machine("virtual")
    gpu = replace(base.gpu, flops_per_s={"fp32": 2e10}, products=shape)
    machine = replace(base, ranks=(replace(base.ranks[0], gpu=gpu),))
    sample = moment_costs.samples_of(w, machine)[0]
    assert sample.flops_s == pytest.approx(1e-3)
    assert sample.size_bytes == pytest.approx(2e6)
    assert sample.seconds == 3e-3


# -- things that run at once ------------------------------------------------------------------------------------------


def test_pace_is_the_median_inside_the_window() -> None:
    rows = [(0.5, 9.0), (1.0, 1.0), (2.0, 3.0), (3.0, 2.0), (9.0, 9.0)]
    assert together.pace(rows, 1.0, 3.0) == 2.0
    with pytest.raises(ValueError, match="1 actions ended"):
        together.pace(rows, 8.0, 9.0)


def test_slowdowns_are_ratios_of_medians_and_at_least_one() -> None:
    def watched(actions: Mapping[str, object], window_s: float) -> dict[str, float]:
        if len(actions) == 1:
            return dict.fromkeys(actions, 1.0)
        return {"compute": 1.25, "adam": 0.9}

    found = together.slowdowns({"compute": lambda: 0, "adam": lambda: 0}, bench(), watched)
    assert found == {"compute_while_adam": 1.25, "adam_while_compute": 1.0}


def test_watching_two_threads_counts_both() -> None:
    seen: set[str] = set()

    def action() -> None:
        seen.add(threading.current_thread().name)

    found = together.watch({"compute": action, "adam": action}, 0.01, work_clock=Ticks(0.5))
    assert seen == {"calibrate-compute", "calibrate-adam"}
    assert set(found) == {"compute", "adam"}
    assert all(seconds >= 0.5 for seconds in found.values())


def test_what_a_watched_action_raises_is_raised() -> None:
    def broken() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        together.watch({"compute": broken, "adam": lambda: None}, 0.01)


# -- the machine ------------------------------------------------------------------------------------------------------

SHAPE = ProductShape(sms=1, tile=(1, 1), wave_loss=0.0, depth=20.0, bytes_per_s=9e9, kernel_s=5e-6, flash=0.5)
DISK = DiskPoint(2, 32 << 20, read_bytes_per_s=2e9, write_bytes_per_s=1e9)
FOUND = calibration.Findings(
    products=SHAPE,
    python_s=2e-5,
    wait_s=3e-5,
    numa=(1, 2),
    matmul={"fp32": ((1e6, 50e9), (1e9, 100e9), (1e10, 90e9))},
    memory_bytes_per_s=20e9,
    constant_s=1e-4,
    operator_bytes_per_s=15e9,
    h2d=((1e6, 5e9), (1e8, 10e9)),
    d2h=((1e6, 4e9), (1e8, 8e9)),
    adam=((1.0, 1e9), (2.0, 1.9e9)),
    dram_bytes_per_s=25e9,
    network=("gloo", ((2e6, 2e8), (2e7, 3e8)), 5e-4),
    disks=(FolderRates((DISK,), DISK, together=(1.5e9, 7e8), latency_s=1e-4), 10**11),
    slowdowns={"compute_while_adam": 1.2},
    skipped=["pinned against pageable: never pinned"],
    taken_by_others=0.3,
)


def machine() -> Machine:
    device = VirtualDevice(clock=Ticks())
    return calibration.machine_of(FOUND, device, name="my", cores=2, memory=(16 * 10**9, 12 * 10**9))


def test_the_machine_has_what_was_found() -> None:
    m = machine()
    assert m.gpu.name == "virtual"  # what `pstar run` asks for
    assert m.gpu.flops_per_s == {"fp32": 100e9}  # the best of the curve
    assert m.gpu.memory_bytes == 3 * 10**9  # a quarter of what is available
    assert m.host.budget_bytes == 12 * 10**9 - 3 * 10**9  # the rest
    assert (m.link.h2d_bytes_per_s, m.link.d2h_bytes_per_s) == (10e9, 8e9)
    assert m.host.adam_params_per_s == 1e9  # one thread, as the executor runs it
    assert m.calibrated
    assert set(m.confidence_by_input.values()) == {"calibrated"}
    assert m.framework is not None and (m.framework.python_s, m.framework.wait_s) == (2e-5, 3e-5)
    assert m.host.source.endswith("process bound to one of 2 NUMA nodes")
    assert "other programs had 30% of the processor time" in m.notes


def test_the_file_says_what_it_is_and_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    calibration.write_machine(machine(), FOUND, file)
    text = file.read_text()
    assert text.startswith("# A machine measured by `pstar calibrate` on ")
    assert f"torch {torch.__version__}" in text
    assert "# pinned against pageable: never pinned" in text
    back = load_machine(file)
    assert back.slowdowns == {"compute_while_adam": 1.2}
    assert back.nvme is not None and back.nvme.memory_bytes == 10**11
    assert (back.nvme.read_bytes_per_s, back.nvme.write_beside_bytes_per_s) == (2e9, 7e8)
    assert back.gpu.products is not None and back.gpu.products.flash == 0.5
    assert back.gpu.products.seconds((1, 64, 64, 64), 1e11, 1e5) == pytest.approx(
        SHAPE.seconds((1, 64, 64, 64), 1e11, 1e5)
    )
    assert back.framework is not None and back.framework.wait_s == pytest.approx(3e-5)
    assert back.peer is not None and back.peer.table == (pytest.approx((2e6, 2e8)), pytest.approx((2e7, 3e8)))
    assert set(back.confidence_by_input.values()) == {"calibrated"}
    assert back.gpu.matmul_tables["fp32"][1] == pytest.approx((1e9, 100e9))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="there is no folder"):
        calibration.write_machine(machine(), FOUND, tmp_path / "none" / "my.toml")


def test_an_interrupted_calibration_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(name: str, number: int, of: int) -> None:
        if number == 1:
            raise KeyboardInterrupt

    file = tmp_path / "my.toml"
    file.write_text("the old one")
    quick = Effort(point_s=0.0, rounds=1, least=1, most=1)
    with pytest.raises(KeyboardInterrupt):
        calibration.measure(VirtualDevice(), quick, cores=1, folder=tmp_path, on_part=interrupt)
    assert file.read_text() == "the old one"
    assert [p.name for p in tmp_path.iterdir()] == ["my.toml"]


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert open_device("auto").kind == "virtual"
    with pytest.raises(PlanError, match="torch finds no CUDA device"):
        CudaDevice()
    with pytest.raises(PlanError, match="'tpu' is not known"):
        open_device("tpu")


def test_cuda_seconds_come_from_events_and_a_plan_for_a_cap_leaves_the_room_that_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No GPU is needed to see that the right streams are asked in the right order."""
    said: list[str] = []

    class Stream:
        made = 0

        def __init__(self, device: object = None) -> None:
            self.name = f"stream {Stream.made}"
            Stream.made += 1

        def synchronize(self) -> None:
            said.append(f"wait for {self.name}")

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self, stream: Stream) -> None:
            said.append(f"event on {stream.name}")

        def synchronize(self) -> None:
            said.append("wait for the event")

        def elapsed_time(self, other: "Event") -> float:
            return 12.5  # milliseconds

    compute_stream = Stream()
    fakes = {
        "is_available": lambda: True,
        "set_device": lambda device: None,
        "get_device_name": lambda device: "NVIDIA H100 80GB HBM3",
        "device_count": lambda: 2,
        "is_bf16_supported": lambda: True,
        "mem_get_info": lambda device: (70 * 10**9, 80 * 10**9),
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
        "memory_reserved": lambda device: 10**9,
        "memory_allocated": lambda device: 0,
        "synchronize": lambda device: said.append("wait for everything"),
        "current_stream": lambda device: compute_stream,
        "Stream": Stream,
        "Event": Event,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    device = open_device("auto")
    assert isinstance(device, CudaDevice)
    assert device.dtypes == ("fp32", "bf16", "fp16")
    assert device.multiprocessors == (132, (128, 256))
    # 9 GB are not torch's: more than the least that is kept; the allocator's fragments come on top.
    monkeypatch.setattr("executor.devices.headroom._multiply", lambda device: said.append("product"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    assert device.memory() == (80 * 10**9, 9 * 10**9 + (256 << 20))
    assert said == ["product", "wait for everything", "product", "wait for everything"]
    said.clear()
    assert device.timed(lambda: said.append("action")) == 0.0125
    assert said == ["event on stream 0", "action", "event on stream 0", "wait for the event"]
    said.clear()
    device.timed(lambda: device.finish(Queue.D2H), Queue.D2H)
    assert said == ["event on stream 2", "wait for stream 2", "event on stream 2", "wait for the event"]
    m = calibration.machine_of(FOUND, device, name="box", cores=16, memory=(10**11, 9 * 10**10))
    assert len(m.ranks) == 2  # two of the same name
    assert m.gpu.name == "h100-80"  # the catalog knows this device name
    assert m.gpu.budget_bytes == 71 * 10**9 - (256 << 20)
    # A run with that cap has 24 - 9 GB: what is not torch's comes off the cap, as it came off the card.
    assert resize(m, gpu_memory="24GB").gpu_budget_bytes == 15 * 10**9 - (256 << 20)
    assert m.host.adam_params_per_s in (1e9, 1.9e9)


def test_cpu_seconds_tell_what_others_took() -> None:
    device = VirtualDevice(clock=Ticks(0.001), wall_clock=Ticks(0.004))
    device.timed(lambda: None)
    assert device.taken_by_others() == pytest.approx(0.75)


@pytest.mark.slow
def test_a_short_calibration_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "collective_rates", lambda: "collectives: left out here")
    monkeypatch.setattr(moment_costs, "REFERENCE", (512, 1, 4096))
    monkeypatch.setitem(compute._EXTENTS, "virtual", (64, 128, 256, 512))
    monkeypatch.setitem(shapes._WEIGHTS, "virtual", ((64, 64), (64, 256), (256, 64)))
    for module in (compute, shapes):
        monkeypatch.setattr(module, "_COLD_BYTES", 1 << 20)
    parts: list[str] = []
    effort = Effort(point_s=0.002, rounds=1, least=1, most=2, window_s=0.02, memory_bytes=8 << 20)
    device = VirtualDevice()
    found = calibration.measure(
        device, effort, cores=2, folder=tmp_path, on_part=lambda name, number, of: parts.append(name)
    )
    assert len(parts) == 13
    file = tmp_path / "my.toml"
    calibration.write_machine(calibration.machine_of(found, device, name="my", cores=2), found, file)
    assert [p.name for p in tmp_path.iterdir()] == ["my.toml"]
    m = load_machine(file, gpu_memory="100MB")
    assert m.calibrated
    assert len(m.slowdowns) == 12
    assert m.gpu.launch_s is not None and 0 < m.gpu.launch_s < 0.1
    answer = compare(chain_workload(8, 4 << 20, dtype="fp32"), m, settings=Settings(update="step"), policies=["tide"])
    assert answer.best().row.iteration_s is not None
