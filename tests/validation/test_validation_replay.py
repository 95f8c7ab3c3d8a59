"""A published run becomes a job, and what is read off its timeline are the metrics of its rows."""

from dataclasses import replace

import pytest

from pstar_sim.catalog.efficiency import fitted, read_efficiency
from pstar_sim.catalog.generations import generations
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.step import Kind, Queue
from pstar_sim.core.timeline import Span, Timeline
from pstar_sim.cost import CostModel
from pstar_sim.errors import CatalogError
from pstar_sim.validation.experiments import experiment_of, runs_of
from pstar_sim.validation.replay import phases_of, predict, replay
from pstar_sim.validation.rows import PublishedRow, published_rows
from pstar_sim.validation.setups import first_ranks, published_machine
from pstar_sim.workload.presets import preset
from pstar_sim.workload.workload import Workload

GB = 10**9


def run_at(line: int) -> tuple[PublishedRow, ...]:
    """The published run that the row of this line is part of."""
    return next(run for run in runs_of(published_rows()) if any(row.line == line for row in run))


def test_an_experiment_by_hand() -> None:
    """Row 226: Polaris, 4 GPUs, 16 sequences in all, 4 at a time: one micro-batch of 4 a rank."""
    x = experiment_of(run_at(226))
    assert x.policy == "zero3_offload:flush=blocking,subgroup=100000000"
    assert x.machine.name == "polaris-dos (4 in use)"
    assert (x.batches, x.micro_batches, x.sequence, x.dtype) == ((4,), 1, 2048, "bf16")
    # 40 layers of q, o 2 x 5120^2, k, v 2 x 5120 x 4 x 128, feed-forward 3 x 5120 x 13632, two norms; two embeddings
    layer = 2 * 5120**2 + 2 * 5120 * 512 + 3 * 5120 * 13632 + 2 * 5120
    assert x.sizes[0].params == 40 * layer + 2 * 50304 * 5120 + 5120 == 11_197_895_680
    assert x.workload(4).tokens == 4 * 2048
    # 28 cores bound by 7 a rank: DRAM binds, not the cores
    e = fitted()
    assert x.machine.host.adam_params_per_s == min(204.8e9 * e.adam_dram / 28, 28 * e.adam_params_per_core_s)


def test_accumulation_and_options_come_from_the_row() -> None:
    accumulated = experiment_of(run_at(264))  # gbs64 mbs4 on one GPU
    assert (accumulated.batches, accumulated.micro_batches, len(accumulated.machine.ranks)) == ((4,), 16, 1)
    mixed = experiment_of(run_at(349))  # Deep Optimizer States gap2 ratio1.0
    assert mixed.policy.startswith("deep_optimizer_states:every=2,")
    assert "ratio=1" in mixed.policy


def run_in(file: str, line: int) -> tuple[PublishedRow, ...]:
    return next(run for run in runs_of(published_rows()) if any((r.file, r.line) == (file, line) for r in run))


def test_a_whole_step_of_fsdp_by_hand() -> None:
    """Row 1: 48 layers of 7168 and 2048 positions, 4096 sequences on 512 GPUs, 8 of them at a time."""
    x = experiment_of(run_in("fsdp_steps.csv", 1))
    assert (x.policy, x.machine.nodes, len(x.machine.ranks)) == ("zero3_resident", 64, 512)
    assert (x.batches, x.micro_batches, x.settings.clip) == ((8,), 1, True)
    # a block: 12 h^2 of matrices, 9 h of their biases, 4 h of two norms; tables of tokens and positions; the last norm
    block = 12 * 7168**2 + 13 * 7168
    assert x.sizes[0].params == 48 * block + (50368 + 2048) * 7168 + 2 * 7168 == 29_975_214_080
    assert x.checkpointing and x.early_stop
    kept = experiment_of(run_in("fsdp_steps.csv", 7))
    assert kept.policy == "zero3_resident:reshard=off" and not kept.checkpointing
    accumulated = experiment_of(run_in("fsdp_steps.csv", 10))  # 168 sequences on 8 GPUs, 1 at a time
    assert (accumulated.micro_batches, accumulated.machine.name) == (21, "h100-80x8")


def test_an_eager_step_is_forward_and_backward_alone() -> None:
    x = experiment_of(run_in("single_gpu_steps.csv", 24))  # GPT-2 large on an H100
    assert (x.policy, x.dtype, x.checkpointing, x.batches) == ("all_on_gpu", "fp32", False, (1,))
    values = replay(x).predicted
    assert values["fwd_bwd_ms"] == pytest.approx(values["fwd_ms"] + values["bwd_ms"])
    assert values["fwd_bwd_ms"] < values["iter_ms"]
    four = experiment_of(run_in("single_gpu_steps.csv", 19))  # 4 sequences on four H100
    assert (four.batches, len(four.machine.ranks)) == ((1,), 4)


def test_two_nodes_of_polaris() -> None:
    x = experiment_of(run_in("measurements-2.csv", 41))
    assert (len(x.machine.ranks), x.machine.nodes, x.machine.host.cores) == (8, 2, 28)
    assert x.micro_batches == 1  # 32 sequences, 4 at a time
    network = x.machine.network
    assert network is not None and network.rate_of(2e9) == 9e9 and network.rate_of(67.1e6) == pytest.approx(7.24e9)


def test_processes_of_some_logs_are_bound() -> None:
    rows = [r for r in published_rows() if r.hardware.startswith("Polaris")]
    machines = {experiment_of(run).machine.host.name: run[0].source for run in runs_of(rows)}
    assert set(machines) == {"node-epyc-7543p", "epyc-7543p-bound"}
    assert machines["epyc-7543p-bound"].endswith("-gaps-a100")


def test_every_run_in_scope_is_an_experiment() -> None:
    from pstar_sim.validation.scope import published_scope, rule_of

    rules = published_scope()
    rows = [r for r in published_rows() if rule_of(r, rules).use in ("fitted", "to fit", "tested")]
    jobs = [experiment_of(run) for run in runs_of(rows)]
    assert sum(len(x.rows) for x in jobs) == 695
    assert all(len(x.machine.ranks) == x.rows[0].gpus for x in jobs)


def test_a_run_nobody_can_set_up_is_named() -> None:
    with pytest.raises(CatalogError, match="row 598: no experiment is known for ZeRO-Offload on 2xA100"):
        experiment_of(run_at(598))


def test_one_gpu_of_two_sockets_reaches_half_the_dram() -> None:
    node = load_machine("dgx2")
    one = first_ranks(node, 1, sockets=2)
    assert len(one.ranks) == 1 and one.host.memory_bytes == node.host.memory_bytes
    assert one.host.adam_params_per_s == node.host.adam_params_per_s / 2
    assert first_ranks(node, 16, sockets=2) is node
    with pytest.raises(CatalogError, match="has 16 GPUs, so 17 cannot be in use"):
        first_ranks(node, 17)


def test_phases_are_cut_where_timers_wait_for_the_gpu() -> None:
    """Two moments, the update, and a stall before the next iteration."""
    run = replay(experiment_of(run_at(136)))  # Megatron-LM on the VM: any plan will do for its moments
    assert run.predicted["fwd_ms"] + run.predicted["bwd_ms"] + run.predicted["opt_ms"] == pytest.approx(
        run.predicted["iter_ms"]
    )


def test_metrics_of_a_timeline_by_hand() -> None:
    x = experiment_of(run_at(136))
    workload = replace(x.workload(4), moments=x.workload(4).moments)
    moments = workload.moments
    forward = sum(m.phase == "FWD" for m in moments)
    # every moment lasts 1 s, one update of 3 s follows after 0.5 s; the next iteration starts 1 s later
    spans = [
        Span(i, 0, Queue.COMPUTE, Kind.COMPUTE, None, i, 0, i + 0.0, i + 0.0, i + 1.0) for i in range(len(moments))
    ]
    end = len(moments) + 0.5
    spans.append(Span(len(moments), 0, Queue.ADAM, Kind.CPU_UPDATE, 0, None, 0, end, end, end + 3))
    timeline = Timeline(
        source="simulated",
        iterations=1,
        iteration_s=end + 4,
        spans=tuple(spans),
        samples=(),
        peak_bytes={"gpu": 2 * 2**20, "host": 0},
    )

    class Plan:
        pass

    plan = Plan()
    plan.workload = workload  # type: ignore[attr-defined]
    phases = phases_of(plan, timeline)  # type: ignore[arg-type]
    assert (phases.forward_s, phases.backward_s, phases.step_s) == (forward, end - forward, 4.0)
    values = predict(replace(x, loop_s=0.25), plan, timeline, 4)  # type: ignore[arg-type]
    assert values["fwd_ms"] == 1e3 * forward
    assert values["iter_ms"] == 1e3 * (end + 4.25)
    assert values["gpu_max_alloc_MB"] == 2
    # the card shows the reserve too; half of it is the context, which torch does not count as reserved
    assert values["gpu_peak_GB"] == pytest.approx((2 * 2**20 + 1e9) / 1e9)
    assert values["gpu_peak_reserved_GiB"] == pytest.approx((2 * 2**20 + 0.5e9) / 2**30)
    assert values["total_TFLOPS_8N"] == pytest.approx(8 * x.sizes[0].params * 4 * 1024 / (end + 4.25) / 1e12)


def test_kernel_rates_add_up() -> None:
    """A moment that names no products: flops over the plateau, bytes over the bandwidth, launches, waits."""
    machine = published_machine("polaris-a100-40x4", fitted(), "deepspeed")
    e, gpu = fitted(), machine.gpu
    assert gpu.flops_per_s["bf16"] == pytest.approx(312e12 * generations()["a100"].plateau)
    assert gpu.hbm_bytes_per_s == 1555e9 * e.hbm
    workload = preset("1B", batch=1, seq=128)
    moments = tuple(replace(m, products=()) for m in workload.moments)
    workload = replace(workload, moments=moments)
    cost = CostModel(workload, machine, build_layout(workload))
    m = workload.moments[3]
    by_hand = m.flops / gpu.flops_per_s["bf16"] + (m.bytes_read + m.bytes_written) / (1555e9 * e.hbm) + e.launch_s
    assert machine.framework is not None and machine.framework.wait_s > 1e-4
    expected = max(by_hand, machine.framework.python_s) + machine.framework.wait_s
    assert cost.moments_s[3] == pytest.approx(expected)
    assert cost.moments_s[-1] == 0.0  # optimizer.step() has no kernels of its own


def test_other_parameters_make_another_machine_and_figures_that_are_given_stay() -> None:
    slow = replace(fitted(), matmul=0.1, pageable_bytes_per_s=1e9, adam_dram=0.01)
    machine = published_machine("h100-80x4", slow, "deepspeed")
    assert machine.gpu.flops_per_s["fp32"] == pytest.approx(6.7e12)
    assert machine.link.pageable_bytes_per_s == 1e9
    assert machine.host.adam_params_per_s == pytest.approx(614.4e9 * 0.01 / 28)
    given, same = (published_machine("v100-32-vm", e, "deepspeed").host.adam_params_per_s for e in (slow, fitted()))
    assert given == same


def test_a_parameter_out_of_range_is_named() -> None:
    with pytest.raises(CatalogError, match=r"e.toml: \[fitted\] matmul = 1.5"):
        read_efficiency("e.toml", "[fitted]\nmatmul = 1.5\n")


def test_a_gpt_that_classifies_has_no_logits() -> None:
    from pstar_sim.catalog.model_shapes import model_entry
    from pstar_sim.workload.presets import workload_of

    entry = model_entry("1B")
    language = workload_of(entry, batch=1, sequence=1024)
    labels = workload_of(entry, batch=1, sequence=1024, language_head=False)
    assert labels.params == language.params
    assert max(m.peak_bytes for m in labels.moments) < max(m.peak_bytes for m in language.moments)
    # the head's product, forward and twice backward: 6 x tokens x hidden x vocabulary
    flops = sum(m.flops for m in language.moments) - sum(m.flops for m in labels.moments)
    assert flops == 6 * 1024 * 2048 * 50257


def test_a_reentrant_checkpoint_runs_the_whole_layer_again() -> None:
    from pstar_sim.catalog.model_shapes import model_entry
    from pstar_sim.workload.presets import workload_of

    entry = model_entry("1B")
    early = workload_of(entry, batch=1, sequence=1024)
    whole = workload_of(entry, batch=1, sequence=1024, early_stop=False)

    def flops(workload: Workload, phase: str) -> int:
        return sum(m.flops for m in workload.moments if m.phase == phase)

    # of each of the 20 layers the second product of the feed-forward: 2 x tokens x 8192 x 2048
    assert flops(whole, "RECOMPUTE") - flops(early, "RECOMPUTE") == 20 * 2 * 1024 * 8192 * 2048
    assert [m.end_bytes for m in whole.moments] == [m.end_bytes for m in early.moments]
