"""Seconds on a machine with measured curves, by hand."""

from dataclasses import replace

import pytest

from pstar_sim.catalog.machine import Machine, Rank
from pstar_sim.core.layout import build_layout
from pstar_sim.core.step import Kind, Place, Queue, Step
from pstar_sim.cost import CostModel, gradient_traffic_bytes
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.workload.workload import Workload

_ROUND = round_machine(
    gpu_memory_bytes=10**9,
    host_memory_bytes=10**10,
    h2d_bytes_per_s=10e9,
    d2h_bytes_per_s=5e9,
    hbm_bytes_per_s=20e9,
    flops_per_s={"fp32": 100e9},
    dram_bytes_per_s=20e9,
    cores=2,
    adam_params_per_s=1e9,
)
GPU = replace(
    _ROUND.gpu,
    launch_s=1e-3,
    matmul_tables={"fp32": ((1e6, 50e9), (1e8, 100e9))},
    operator_bytes_per_s=10e9,
)
LINK = replace(_ROUND.link, h2d_table=((1e6, 5e9), (100e6, 10e9)))
MACHINE = replace(_ROUND, name="my", ranks=(Rank(gpu=GPU, link=LINK),))


def model(w: Workload, machine: Machine = MACHINE) -> CostModel:
    return CostModel(w, machine, build_layout(w))


def with_moment(w: Workload, index: int, **changes: object) -> Workload:
    moments = list(w.moments)
    moments[index] = replace(moments[index], **changes)  # type: ignore[arg-type]
    return replace(w, moments=tuple(moments))


def test_a_moment_is_products_and_bytes_and_a_constant() -> None:
    w = chain_workload(2, 1024, dtype="fp32")
    w = with_moment(w, 0, flops=10**7, bytes_read=10**6, bytes_written=10**6)
    assert not w.gradients[0]
    # 1e7 flops lie half-way between 1e6 and 1e8: 75e9 flops/s; 2 MB at 10 GB/s; 1 ms
    assert model(w).moments_s[0] == pytest.approx(1e7 / 75e9 + 2e6 / 10e9 + 1e-3)


def test_a_changed_rate_keeps_the_curves_form() -> None:
    w = with_moment(chain_workload(2, 1024, dtype="fp32"), 0, flops=10**7, bytes_read=0, bytes_written=0)
    gpu = replace(GPU, flops_per_s={"fp32": 200e9})
    faster = replace(MACHINE, ranks=(replace(MACHINE.ranks[0], gpu=gpu),))
    assert model(w, faster).moments_s[0] == pytest.approx(1e7 / 150e9 + 1e-3)


def test_a_gradient_that_arrives_is_copied_and_its_norm_taken() -> None:
    w = chain_workload(2, 1024, dtype="fp32")
    moment = next(i for i, tensors in enumerate(w.gradients) if tensors)
    arriving = sum(w.tensors[t].bytes for t in w.gradients[moment])
    assert gradient_traffic_bytes(w, moment) == 3 * arriving
    quiet = with_moment(w, moment, flops=10**8, bytes_read=0, bytes_written=0)
    assert model(quiet).moments_s[moment] == pytest.approx(1e8 / 100e9 + 3 * arriving / 10e9 + 1e-3)


def test_a_moment_of_nothing_costs_nothing() -> None:
    w = with_moment(chain_workload(2, 1024, dtype="fp32"), 0, flops=0, bytes_read=0, bytes_written=0)
    assert model(w).moments_s[0] == 0


def test_a_small_copy_takes_longer_than_its_bytes() -> None:
    cost = model(chain_workload(2, 1024, dtype="fp32"))
    assert cost.transfer_s(10**6, "h2d") == pytest.approx(1e6 / 5e9)
    assert cost.transfer_s(10**8, "h2d") == pytest.approx(1e8 / 10e9)
    assert cost.transfer_s(10**6, "d2h") == pytest.approx(1e6 / 5e9)  # no curve that way


def test_on_a_throttled_link_the_extra_stays_the_same() -> None:
    slow = replace(MACHINE, ranks=(replace(MACHINE.ranks[0], link=replace(LINK, h2d_bytes_per_s=1e9)),))
    cost = model(chain_workload(2, 1024, dtype="fp32"), slow)
    extra = 1e6 / 5e9 - 1e6 / 10e9
    assert cost.transfer_s(10**6, "h2d") == pytest.approx(1e6 / 1e9 + extra)


def test_a_copy_never_beats_the_best_rate() -> None:
    cost = model(chain_workload(2, 1024, dtype="fp32"))
    for size in (1, 10**3, 10**6, 10**7, 10**8, 10**10):
        assert cost.transfer_s(size, "h2d") >= size / LINK.h2d_bytes_per_s


def test_duty_of_a_throttled_copy() -> None:
    slow = replace(MACHINE, ranks=(replace(MACHINE.ranks[0], link=replace(LINK, h2d_bytes_per_s=1e9)),))
    cost = model(chain_workload(2, 1024, dtype="fp32"), slow)
    fetch = Step(id=1, queue=Queue.H2D, kind=Kind.FETCH, chunk=0, list="param", place=Place.GPU, bytes=10)
    back = Step(id=2, queue=Queue.D2H, kind=Kind.WRITEBACK, chunk=0, list="param", place=Place.HOST, bytes=10)
    assert cost.duty(fetch) == pytest.approx(0.1)
    assert cost.duty(back) == 1.0  # nothing is known of that direction
