"""Seconds and DRAM bytes of single steps, by hand."""

from dataclasses import replace

import pytest

from pstar_sim.catalog.machine import Framework, Machine
from pstar_sim.core.layout import Layout, build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Kind, Place, Queue, Step
from pstar_sim.cost import CostModel, flops_rate
from pstar_sim.errors import PlanError
from pstar_sim.policy import find_policy
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.workload.optimizers import OptimizerSpec
from pstar_sim.workload.workload import Workload

MPARAM = 2**20

MACHINE = round_machine(
    name="toy",
    hbm_bytes_per_s=28e6,
    flops_per_s={"fp16": 2e9, "fp32": 1e9},
    h2d_bytes_per_s=2e6,
    d2h_bytes_per_s=1e6,
    latency_s=0.25,
    host_memory_bytes=2**40,
    dram_bytes_per_s=1e9,
    adam_params_per_s=MPARAM / 2,
)


def model(w: Workload, m: Machine = MACHINE) -> CostModel:
    layout: Layout = build_layout(w)
    return CostModel(w, m, layout)


def test_a_calibrated_rate_counts_flops_only() -> None:
    """1e9 flops at 2e9/s (fp16): 0.5 s forward, 1 s backward, whatever bytes the moment moves."""
    cost = model(chain_workload(1, MPARAM, dtype="fp16"))
    assert cost.moments_s == (0.5, 1.0, 0.0)


def test_one_formula_adds_products_operators_and_launches() -> None:
    """The moment reads 2 MiB: at 28e6 B/s 0.0749 s, beside 0.5 s of flops and 0.25 s of launches. Python of 0.1 s is
    hidden; of 2 s it is what counts. Waits come on top."""
    w = chain_workload(1, MPARAM, dtype="fp16")
    kernels_s = 0.5 + 2 * MPARAM / 28e6 + 0.25
    launching = replace(MACHINE.gpu, launch_s=0.25)
    machine = replace(MACHINE, ranks=(replace(MACHINE.ranks[0], gpu=launching),))
    assert model(w, machine).moments_s[0] == pytest.approx(kernels_s)
    for python_s, wait_s, expected in ((0.1, 0.0, kernels_s), (2.0, 0.0, 2.0), (0.1, 0.5, kernels_s + 0.5)):
        framework = Framework(name="slow", python_s=python_s, wait_s=wait_s, source="by hand")
        assert model(w, replace(machine, framework=framework)).moments_s[0] == pytest.approx(expected)
        assert model(w, replace(machine, framework=framework)).moments_s[-1] == 0.0  # the optimizer step's
        assert model(w, replace(MACHINE, framework=framework)).moments_s[0] == 0.5  # in the rates of iterations already


def test_whether_a_card_was_measured_does_not_change_the_formula() -> None:
    w = chain_workload(1, MPARAM, dtype="fp16")
    for launch_s in (None, 0.25):
        gpus = [replace(MACHINE.gpu, measured=measured, launch_s=launch_s) for measured in (True, False)]
        one, other = (model(w, replace(MACHINE, ranks=(replace(MACHINE.ranks[0], gpu=gpu),))) for gpu in gpus)
        assert one.moments_s == other.moments_s


def test_measured_durations_hold_on_their_own_machine_only() -> None:
    w = chain_workload(1, MPARAM, dtype="fp16", forward_s=7.0)
    assert model(w).moments_s == (0.5, 1.0, 0.0)
    assert model(w, replace(MACHINE, name="virtual")).moments_s == (7.0, 14.0, 0.0)


def test_a_missing_dtype_takes_the_nearest_rate() -> None:
    assert flops_rate(MACHINE, "bf16") == 2e9
    bare = replace(MACHINE, ranks=(replace(MACHINE.ranks[0], gpu=replace(MACHINE.gpu, flops_per_s={"fp8": 1.0})),))
    with pytest.raises(PlanError, match="no rate for 'fp32'; it has fp8"):
        flops_rate(bare, "fp32")


def test_transfers_have_latency_and_a_rate_each_way() -> None:
    cost = model(chain_workload(1, MPARAM))
    assert cost.transfer_s(2_000_000, "h2d") == 1.25
    assert cost.transfer_s(2_000_000, "d2h") == 2.25
    assert cost.transfer_s(0, "h2d") == 0.0


def test_adam_on_host_and_gpu() -> None:
    """1 Mi parameters: CPU at half a Mi/s: 2 s; gradient accumulation moves 10 of Adam's 28 B/param: 20/28 s; on the
    GPU 28 B/param at 28e6 B/s."""
    cost = model(chain_workload(1, MPARAM))
    assert cost.cpu_adam_s(0) == pytest.approx(2.0)
    assert cost.cpu_add_s(0) == pytest.approx(20 / 28)
    assert cost.gpu_adam_s(0) == pytest.approx(MPARAM / 1e6)
    assert (cost.cpu_adam_bytes(0), cost.cpu_add_bytes(0)) == (28 * MPARAM, 10 * MPARAM)


def test_an_optimizer_with_half_the_traffic_takes_half_the_time() -> None:
    w = replace(chain_workload(1, MPARAM), optimizer=OptimizerSpec(name="mine", dram_bytes_per_param=14))
    assert model(w).cpu_adam_s(0) == pytest.approx(1.0)


def test_seconds_and_dram_bytes_of_steps() -> None:
    cost = model(chain_workload(1, MPARAM, dtype="fp16"))

    def step(queue: Queue, kind: Kind, **fields: object) -> Step:
        return Step(id=0, queue=queue, kind=kind, **fields)  # type: ignore[arg-type]

    fetch = step(Queue.H2D, Kind.FETCH, chunk=0, list="param", bytes=2_000_000)
    assert (cost.seconds(fetch), cost.dram_bytes(fetch)) == (1.25, 2_000_000)
    adam = step(Queue.ADAM, Kind.CPU_UPDATE, chunk=0, bytes=28 * MPARAM)
    assert (cost.seconds(adam), cost.dram_bytes(adam)) == (pytest.approx(2.0), 28 * MPARAM)
    drop = step(Queue.D2H, Kind.DROP, chunk=0, list="param", bytes=5, place=Place.GPU)
    assert (cost.seconds(drop), cost.dram_bytes(drop)) == (0.0, 0)
    moment = step(Queue.COMPUTE, Kind.COMPUTE, moment=1)
    assert (cost.seconds(moment), cost.dram_bytes(moment)) == (1.0, 0)
    with pytest.raises(PlanError, match="has one gpu; collectives need several"):
        cost.seconds(step(Queue.NET, Kind.GATHER, chunk=0, bytes=8))
    with pytest.raises(PlanError, match="has no disks"):
        cost.seconds(step(Queue.NVME, Kind.NVME_READ, chunk=0, list="param", bytes=8))
    with pytest.raises(PlanError, match="no rate for copies of memory that is not pinned"):
        cost.seconds(step(Queue.H2D, Kind.FETCH, chunk=0, list="param", bytes=8, via="pageable"))
    with pytest.raises(PlanError, match="needs a chunk"):
        cost.seconds(step(Queue.ADAM, Kind.CPU_UPDATE))


def test_adds_on_the_gpu_make_the_moments_of_later_micro_batches_longer() -> None:
    """Three micro-batches of one layer, all on the GPU: gradients 2 and 3 read 2 bytes and read and write 4 bytes per
    parameter, 10 MiB at 28e6 B/s each. A recorded moment lasts what was measured, adds included."""
    w = chain_workload(1, MPARAM, dtype="fp16", micro_batches=3)
    roomy = replace(MACHINE.gpu, memory_bytes=2**30, usable_bytes=2**30)
    machine = replace(MACHINE, ranks=(replace(MACHINE.ranks[0], gpu=roomy),))
    plan = find_policy("all_on_gpu")(w, machine, Settings(update="eager", clip=False))
    cost = CostModel(w, machine, plan.layout)
    add_s = 10 * MPARAM / 28e6
    assert cost.gpu_adds.chunks_s == [pytest.approx(2 * add_s)]
    computed = zip(plan.steps, cost.step_costs(plan).seconds)
    assert [s for step, s in computed if step.kind is Kind.COMPUTE] == pytest.approx(
        [0.5, 1.0, 0.5, 1.0 + add_s, 0.5, 1.0 + add_s, 0.0]
    )
    recorded = chain_workload(1, MPARAM, dtype="fp16", micro_batches=3, forward_s=7.0)
    assert CostModel(recorded, replace(machine, name="virtual"), plan.layout).gpu_adds.chunks_s == [0.0]


def adam_s(clip: bool, on_gpu: bool, micro_batches: int) -> list[float]:
    """Seconds of the updates of `tide` for one layer that is not pinned."""
    w = chain_workload(2, MPARAM, dtype="fp16", micro_batches=micro_batches)
    machine = round_machine(gpu_memory_bytes=20 * 2**20, adam_params_per_s=MPARAM / 2, hbm_bytes_per_s=28e6)
    spec = "tide:pins=0,sums=" + ("on" if on_gpu else "off")
    plan = find_policy(spec)(w, machine, Settings(update="eager", clip=clip, chunk_bytes=2**21))
    plan.check()
    costs = CostModel(w, machine, plan.layout).step_costs(plan)
    found = [i for i, step in enumerate(plan.steps) if step.kind is Kind.CPU_UPDATE]
    assert len(found) == 2
    assert [costs.dram_bytes[i] for i in found] == pytest.approx([costs.seconds[i] * 14 * MPARAM for i in found])
    # What a policy reckons with is what the simulator charges.
    assert float(str(plan.predictions["policy_iteration_s"])) == pytest.approx(play(plan).iteration_s)
    return [costs.seconds[i] for i in found]


def test_an_update_takes_the_time_of_the_adds_that_nothing_else_made() -> None:
    """Adam of one layer takes 2 s (28 bytes per parameter). Without clipping the last of three gradients comes to the
    host in the working list, and Adam adds it to the sum: 2 bytes read, 4 read and 4 written."""
    add_s = 2 * 10 / 28
    assert adam_s(clip=False, on_gpu=False, micro_batches=3) == pytest.approx([2 + add_s] * 2)
    for clip, on_gpu, micro_batches in ((True, False, 3), (False, True, 3), (False, False, 1)):
        assert adam_s(clip=clip, on_gpu=on_gpu, micro_batches=micro_batches) == pytest.approx([2.0] * 2)
