"""Rates of a machine from a trace of torch's profiler, with figures worked out by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pstar_sim.catalog.loader import load_machine
from pstar_sim.cli import main
from pstar_sim.errors import TraceError
from pstar_sim.recorded.profile import load_profile, with_profile

A100 = [{"id": 0, "name": "NVIDIA A100-SXM4-40GB"}]


def span(category: str, name: str, at_us: float, took_us: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": at_us, "dur": took_us, "args": args}


def copy(way: str, size: int, took_us: float) -> dict[str, Any]:
    return span("gpu_memcpy", f"Memcpy {way}", 0, took_us, bytes=size, stream=7)


def product(number: int, dims: list[list[int]], kind: str, took_us: float, operator: str = "aten::mm") -> list[Any]:
    """An operator and its kernel."""
    names = {"External id": number}
    return [
        span("cpu_op", operator, 0, 5, **names, **{"Input Dims": dims, "Input type": [kind] * len(dims)}),
        span("kernel", "gemm", 0, took_us, **names),
    ]


def written(path: Path, events: list[Any], devices: list[Any] = A100) -> Path:
    path.write_text(json.dumps({"deviceProperties": devices, "traceEvents": events, "schemaVersion": 1}))
    return path


def test_copies_by_size_pinned_and_not(tmp_path: Path) -> None:
    """Copies of 1 MB in 50 us are 20 GB/s, of 8 MB in 320 us 25 GB/s; one that took ten times as long is an outlier."""
    events = [copy("HtoD (Pinned -> Device)", 10**6, us) for us in (50, 50, 500)]
    events += [copy("HtoD (Pinned -> Device)", 8 * 10**6, 320)] * 3
    events += [copy("DtoH (Device -> Pinned)", 10**6, 100)] * 3
    events += [copy("HtoD (Pageable -> Device)", 10**6, 200)] * 3
    events += [copy("HtoD (Pinned -> Device)", 4096, 10)] * 9  # all latency
    profile = load_profile(written(tmp_path / "t.json", events))
    assert profile.h2d == ((1e6, pytest.approx(20e9)), (8e6, pytest.approx(25e9)))
    assert profile.d2h == ((1e6, pytest.approx(10e9)),)
    assert profile.pageable_bytes_per_s == pytest.approx(5e9)
    assert profile.gpu == "NVIDIA A100-SXM4-40GB"


def test_products_take_the_seconds_of_their_kernels(tmp_path: Path) -> None:
    """2 x 1,000 ** 3 flops in 20 us are 100 TFLOP/s; a batch of four at 40 us each 50; of a linear layer 200."""
    square = [[1000, 1000], [1000, 1000]]
    events = [event for n in range(3) for event in product(n, square, "c10::BFloat16", 20)]
    many = [[4, 1000, 1000], [4, 1000, 1000]]
    events += [event for n in range(3, 6) for event in product(n, many, "float", 160, "aten::bmm")]
    layer = [[1000], *square]
    events += [event for n in range(6, 9) for event in product(n, layer, "c10::Half", 10, "aten::addmm")]
    profile = load_profile(written(tmp_path / "t.json", events))
    assert profile.products == {
        "bf16": ((2e9, pytest.approx(100e12)),),
        "fp32": ((8e9, pytest.approx(50e12)),),
        "fp16": ((2e9, pytest.approx(200e12)),),
    }


def test_shapes_of_one_size_count_with_their_medians(tmp_path: Path) -> None:
    """The same flops in 10 us as one shape and in 30 us as another: 2 x 2 Gflop in 40 us."""
    one, other = [[1000, 1000], [1000, 1000]], [[500, 2000], [2000, 1000]]
    rows = [(one, 10), (one, 10), (one, 99), (other, 30), (other, 30), (other, 30)]
    events = [event for n, (dims, us) in enumerate(rows) for event in product(n, dims, "float", us)]
    profile = load_profile(written(tmp_path / "t.json", events))
    assert profile.products == {"fp32": ((2e9, pytest.approx(100e12)),)}


def test_a_kernel_begins_and_ends_with_the_gap_to_one_that_waited(tmp_path: Path) -> None:
    """Kernels of 10 us every 12 us, launched long before: a gap of 2. The one launched after the others had ended waits
    for its launch, and does not count."""
    events: list[Any] = [copy("HtoD (Pinned -> Device)", 10**6, 50)]
    for n in range(6):
        at = 100 + 12 * n if n < 5 else 1000
        events.append(span("kernel", "k", at, 10, correlation=n, device=0, stream=7))
        events.append(span("cuda_runtime", "cudaLaunchKernel", n if n < 5 else 990, 1, correlation=n))
    assert load_profile(written(tmp_path / "t.json", events)).kernel_s == pytest.approx(12e-6)


def test_updates_on_the_cpu(tmp_path: Path) -> None:
    """2 million parameters in 2 ms; the update that launches a kernel runs on the GPU."""
    dims = [[[1000, 1000], [1_000_000]], []]
    events = [span("cpu_op", "aten::_fused_adamw_", 0, 2000, **{"Input Dims": dims})]
    events += [span("cpu_op", "aten::_fused_adamw_", 9000, 10, **{"Input Dims": dims})]
    events += [span("cuda_runtime", "cudaLaunchKernel", 9005, 1)]
    assert load_profile(written(tmp_path / "t.json", events)).adam_params_per_s == pytest.approx(1e9)


def test_a_cpu_waits_for_other_programs(tmp_path: Path) -> None:
    """Of eight products, two take 20 ms, and six that another program held up longer: 0.1 TFLOP/s. So for updates."""
    said = {"Input Dims": [[1000, 1000], [1000, 1000]], "Input type": ["float", "float"]}
    took_us = (20_000, 20_000, *range(50_000, 170_000, 20_000))
    events = [span("cpu_op", "aten::mm", 0, us, **said) for us in took_us]
    dims = [[[1000, 1000], [1_000_000]], []]
    events += [span("cpu_op", "aten::_fused_adamw_", 0, us / 10, **{"Input Dims": dims}) for us in took_us]
    profile = load_profile(written(tmp_path / "t.json", events, []))
    assert profile.products == {"fp32": ((2e9, pytest.approx(1e11)),)}
    assert profile.adam_params_per_s == pytest.approx(1e9)


def test_collectives_count_what_a_rank_sends(tmp_path: Path) -> None:
    """Of 4 ranks each gathers 4 million numbers of 2 bytes: it sends 3/4 of 8 MB in 60 us. The other waited."""
    args = {"Collective name": "_allgather_base", "dtype": "BFloat16", "Group size": 4}
    counts = {"In msg nelems": 10**6, "Out msg nelems": 4 * 10**6}
    events = [span("kernel", "ncclDevKernel_AllGather", 0, us, **args, **counts) for us in (60, 60, 60, 900, 900, 900)]
    profile = load_profile(written(tmp_path / "t.json", events))
    assert profile.collectives == ((8e6, pytest.approx(100e9)),)


def test_the_rates_of_a_trace_in_place_of_a_machines_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    square = [[1000, 1000], [1000, 1000]]
    events = [copy("HtoD (Pinned -> Device)", 10**6, 50)] * 3
    events += [event for n in range(3) for event in product(n, square, "c10::BFloat16", 20)]
    trace, path = written(tmp_path / "trace.json", events), tmp_path / "mine.toml"
    assert main(["calibrate", "--from-profile", str(trace), "-o", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["flops_per_s"]["bf16"] == pytest.approx(100e12)
    assert answer["h2d_bytes_per_s"] == pytest.approx(20e9)
    assert "not in the trace: copies to the host" in answer["not_measured"]
    read, base = load_machine(path), load_machine("a100-40")
    assert read.gpu.flops_per_s["bf16"] == pytest.approx(100e12)
    assert read.gpu.flops_per_s["fp32"] == pytest.approx(base.gpu.flops_per_s["fp32"])
    assert read.link.d2h_bytes_per_s == pytest.approx(base.link.d2h_bytes_per_s)
    assert read.host.memory_bytes == base.host.memory_bytes
    assert read.confidence_by_input["link"] == "calibrated"
    assert main(["calibrate", "--from-profile", str(trace), "-o", str(path)]) == 0
    assert "as of a100-40: copies to the host, launches, CPU Adam, collectives" in capsys.readouterr().out


def test_a_real_trace_of_the_cpu(tmp_path: Path) -> None:
    one, two = torch.ones(64, 256), torch.ones(256, 512)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(3):
            one @ two
    path = tmp_path / "cpu.json"
    recorded.export_chrome_trace(str(path))
    (tmp_path / "cpu.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    profile = load_profile(tmp_path / "cpu.json.gz")
    ((flops, rate),) = profile.products["fp32"]
    assert flops == 2 * 64 * 256 * 512
    machine = with_profile(load_machine("virtual"), profile, name="mine")
    assert machine.gpu.flops_per_s["fp32"] == rate
    assert profile.gpu is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not a trace"),
        ("[1, 2]", "is not a trace"),
        ('{"traceEvents": 3}', "is not a trace"),
        ('{"traceEvents": [{"ph": "X", "ts": "late"}]}', "is not a trace"),
        ('{"traceEvents": [{"ph": "X", "dur": 1e999}]}', "is not a trace|has no copies"),
        ('{"traceEvents": []}', "has no copies"),
        ("[" * 100_000, "is not a trace"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=why) as refused:
        load_profile(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


def test_a_gpu_that_nobody_knows_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [copy("HtoD (Pinned -> Device)", 10**6, 50)]
    trace = written(tmp_path / "t.json", events, [{"name": "Graphics 9000"}])
    assert main(["calibrate", "--from-profile", str(trace), "-o", str(tmp_path / "m.toml")]) == 2
    assert "names the GPU 'Graphics 9000', which the catalog does not have; give --machine" in capsys.readouterr().err
