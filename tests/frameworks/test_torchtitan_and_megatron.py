"""torchtitan's TOML and Megatron-LM's flags, by their published interfaces."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pstar_sim as ps
from pstar_sim import PstarError, Settings
from pstar_sim.catalog.loader import load_machine
from pstar_sim.frameworks import accelerate, deepspeed, megatron, torchtitan
from pstar_sim.frameworks.express import express_set
from pstar_sim.frameworks.follows import Follows, stands_for
from pstar_sim.frameworks.prediction import predict
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.stages import plan_stages
from pstar_sim.planner.stages_cut import Cut
from pstar_sim.python310 import toml_loads
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.workload.parallelism import Parallelism

MIB = 2**20


def test_torchtitan_is_read_as_it_is_written() -> None:
    found = torchtitan.read({"training": {"enable_cpu_offload": True, "max_norm": 0, "seq_len": 64}}, "x.toml")
    assert found.policy == "zero_infinity:bucket=0,reuse=0"
    assert (found.batch_per_gpu, found.clip, found.dtype, found.checkpointing) == (8, False, "bf16", True)
    whole = replace(found, checkpointing=False, recompute=None)
    for configuration in (found, whole):
        assert torchtitan.read(toml_loads(torchtitan.write(configuration)), "x.toml") == configuration
    named = torchtitan.read(
        {
            "parallelism": {
                "tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2, "fsdp_reshard_after_forward": "never"
            },
            "model": {"name": "x"},
        },
        "x.toml",
    )  # fmt: skip
    assert named.policy == "zero3_resident:reshard=off,replicas=2" and named.without_effect == ("model.name",)
    assert "data_parallel_replicate_degree = 2" in torchtitan.write(named)
    assert str(named.parallelism) == "tp=2,sp" and "tensor_parallel_degree = 2" in torchtitan.write(named)
    for name, optimizer in {"Adam": "adam", "AdamW": "adamw", "Muon": "muon"}.items():
        named = torchtitan.read({"optimizer": {"name": name}}, "x.toml")
        assert named.optimizer == optimizer and f'name = "{name}"' in torchtitan.write(named)
    other = torchtitan.read({"optimizer": {"name": "Dion"}}, "x.toml")
    assert "not modelled: optimizer.name = Dion: predicted as AdamW" in other.notes
    with pytest.raises(PstarError, match=r"x\.toml: trainin is not a known key .* did you mean training\?"):
        torchtitan.read({"trainin": {}}, "x.toml")


def test_a_pipelined_batch_of_torchtitan_is_cut_into_micro_batches() -> None:
    degrees = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 4, "pipeline_parallel_schedule": "GPipe"}
    found = torchtitan.read({"training": {"local_batch_size": 6}, "parallelism": degrees}, "x.toml")
    assert (found.batch_per_gpu, found.micro_batches, str(found.parallelism)) == (1, 6, "tp=2,sp,pp=4,schedule=gpipe")
    assert torchtitan.read(toml_loads(torchtitan.write(found)), "x.toml") == found
    for reshard, policy in (("default", "all_on_gpu:shard=states"), ("always", "zero3_resident")):
        asked = {"parallelism": degrees | {"fsdp_reshard_after_forward": reshard}}
        assert torchtitan.read(asked, "x.toml").policy == policy  # by default stages gather once, and sum once
    twice = torchtitan.read({"parallelism": degrees | {"pipeline_parallel_schedule": "Interleaved1F1B"}}, "x.toml")
    assert str(twice.parallelism) == "tp=2,sp,pp=4,schedule=interleaved,v=2"
    assert torchtitan.read(toml_loads(torchtitan.write(twice)), "x.toml") == twice
    with pytest.raises(PstarError, match=r"local_batch_size = 6 is no multiple of .*microbatch_size = 4"):
        more = degrees | {"pipeline_parallel_microbatch_size": 4}
        torchtitan.read({"training": {"local_batch_size": 6}, "parallelism": more}, "x.toml")


SCRIPT = """#!/bin/bash
TP=4  # of a node
export SEQ="4096"
ARGS=(
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size=2 --sequence-parallel \\
    --micro-batch-size 1 --global-batch-size 32 --seq-length $SEQ --bf16 --lr 1e-4
    --recompute-granularity selective
)
torchrun --nproc_per_node 8 pretrain_gpt.py ${ARGS[@]}
"""


def test_flags_of_megatron_are_read_from_a_script() -> None:
    found = megatron.read(SCRIPT, "x.sh")
    assert str(found.parallelism) == "tp=4,sp,pp=2" and found.policy == "all_on_gpu" and found.kernels == "megatron"
    assert (found.batch_per_gpu, found.train_batch, found.detail["sequence"], found.dtype) == (1, 32, 4096, "bf16")
    assert (found.checkpointing, found.recompute, found.clip, found.optimizer) == (False, "attention", True, "adamw")
    missing = "the file has no --hidden-dropout and no --attention-dropout: Megatron-LM's default, 0.1 each, unless"
    assert found.notes == ("not read: --lr, --nproc_per_node", f"{missing} --dropout says another")
    assert found.dropout == "0.1" and found.defaults == ("clip", "optimizer", "dropout")
    for flags, rates in (
        ("--hidden-dropout 0 --attention-dropout 0", "0"),
        ("--hidden-dropout 0.2", "hidden=0.2,attention=0.1"),
        ("--attention-dropout 0", "hidden=0.1"),
    ):
        given = megatron.read(flags, "x.sh")
        again = megatron.read(megatron.write(given), "x.sh")
        assert given.dropout == rates == again.dropout and "dropout" not in given.defaults + again.defaults
        assert any("dropout: Megatron-LM's default, 0.1" in note for note in given.notes) is (
            flags.count("-dropout") == 1
        )
    assert str(megatron.read("--tensor-model-parallel-size ${TP:-8}", "x.sh").parallelism) == "tp=8"
    assert megatron.read("--sequence-parallel", "x.sh").parallelism is None  # without ranks that split layers
    assert megatron.read("--use-distributed-optimizer", "x.sh").policy == "all_on_gpu:shard=states"
    assert megatron.read("--optimizer-cpu-offload --fp16", "x.sh").policy == "zero_offload"
    for flags, sums in (("--fp16", "16-bit"), (f"--fp16 {WIDE}", "32-bit"), ("--bf16", "32-bit"), ("", "32-bit")):
        given = megatron.read(flags, "x.sh")
        assert given.sums == sums == megatron.read(megatron.write(given), "x.sh").sums
        assert (WIDE in megatron.write(given)) is (WIDE in flags)
    half = megatron.read("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", "x.sh")
    assert half.policy.startswith("zero3_offload:") and "ratio=0.5" in half.policy and half.dtype == "fp32"
    assert megatron.read(megatron.write(half), "x.sh").policy == half.policy
    for flags, parts in (("--num-virtual-stages-per-pipeline-rank 2", 2), (f"{EACH} 4 --num-layers 32", 4)):
        found = megatron.read(f"--pipeline-model-parallel-size 2 {flags}", "x.sh")
        assert str(found.parallelism) == f"pp=2,schedule=interleaved,v={parts}"
        assert megatron.read(megatron.write(found), "x.sh").parallelism == found.parallelism
    assert megatron.read(ARRAYS, "x.sh") == megatron.read(
        "--tensor-model-parallel-size 4 --bf16 --pipeline-model-parallel-size 2 --sequence-parallel --seq-length 64 "
        "--recompute-granularity selective",
        "x.sh",
    )


WIDE = "--accumulate-allreduce-grads-in-fp32"
EACH = "--num-layers-per-virtual-pipeline-stage"
ARRAYS = """
TP=${TP:-4}; PP=2
ARGS=(--tensor-model-parallel-size $TP --bf16)
ARGS+=(--pipeline-model-parallel-size "${PP}")
GPT="--sequence-parallel --recompute-activations"
torchrun x.py "${ARGS[@]}" $GPT --seq-length ${SEQ:-64}
"""


def test_slices_of_states_need_ranks_that_share_a_batch() -> None:
    spread = "--pipeline-model-parallel-size 2 --use-distributed-optimizer"
    for flags, data, policy in (
        (spread, 4, "all_on_gpu:shard=states"),
        (spread, 1, "all_on_gpu"),
        (f"{spread} --optimizer-cpu-offload", 4, "zero_offload"),
        ("--tensor-model-parallel-size 2 --use-distributed-optimizer", 4, "all_on_gpu:shard=states"),
        ("--tensor-model-parallel-size 2 --use-distributed-optimizer", 1, "all_on_gpu"),
        ("--tensor-model-parallel-size 2 --optimizer-cpu-offload", 1, "zero_offload"),
    ):
        assert stands_for(megatron.read(flags, "x.sh"), data) == policy


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--seq-length $SEQ", r"x\.sh: --seq-length \$SEQ is a value that the shell computes; write the number"),
        ("S=$(wc -l f)\n--seq-length $S", r"x\.sh: --seq-length \$S is a value that the shell computes"),
        ("A=$B\nB=$A\n--seq-length $A", r"x\.sh: --seq-length .* is a value that the shell computes"),
        ("S=1\nS=2\n--seq-length $S", r"x\.sh: --seq-length \$S: S is 1 and 2; leave the one that runs"),
        ("--seq-length 1 --seq-length 2", r"x\.sh: --seq-length is 1 and 2; leave the one that runs"),
        ("--seq-length --bf16", r"x\.sh: --seq-length has no value"),
        ("--seq-length", r"x\.sh: --seq-length has no value"),
        ("--seq-length 0", r"x\.sh: --seq-length = 0; it must be a whole number of at least 1"),
        ("--bf16 --fp16", r"x\.sh: --bf16 and --fp16 are both given"),
        (f"--pipeline-model-parallel-size 2 {EACH} 4", rf"x\.sh: {EACH} 4 needs --num-layers beside it"),
        (f"--pipeline-model-parallel-size 2 {EACH} 4 --num-layers 30", "do not divide --num-layers 30"),
        ("--seq-length 'x", r"x\.sh: is no list of flags and no shell script: No closing quotation"),
    ],
)
def test_flags_that_cannot_be_read_are_named(flags: str, said: str) -> None:
    with pytest.raises(PstarError, match=said):
        megatron.read(flags, "x.sh")


def test_degrees_of_deepspeed_and_accelerate() -> None:
    found = deepspeed.read({"tensor_parallel": {"autotp_size": 4}, "zero_optimization": {"stage": 2}}, "ds.json")
    assert str(found.parallelism) == "tp=4" and not any("autotp" in note for note in found.notes)
    keys = {"parallelism_config": {"parallelism_config_tp_size": 2}, "distributed_type": "FSDP", "fsdp_config": {}}
    assert str(accelerate.read(keys, "a.yaml").parallelism) == "tp=2"
    keys["parallelism_config"] |= {"parallelism_config_cp_size": 4}  # type: ignore[operator]
    assert str(accelerate.read(keys, "a.yaml").parallelism) == "tp=2,cp=4"
    found = deepspeed.read({"sequence_parallel_size": 2}, "ds.json")
    assert str(found.parallelism) == "cp=2" and any("exchanges heads" in note for note in found.notes)


def test_ranks_that_split_a_sequence_are_written_and_read() -> None:
    """Two of four GPUs: the batch is that of two ranks, the sequence whole."""
    job, machine = Job(model="tiny-gpt2", batch=4, seq=64), load_machine("a100-40x8", gpus=4)
    plans = plan_stages(job, machine, "zero3_resident", Parallelism.parse("cp=2,dp=2")).plans
    flags = "--expert-model-parallel-size 4 --context-parallel-size 2"
    assert str(megatron.read(flags, "x.sh").parallelism) == "cp=2,ep=4"
    assert flags.split()[0] in megatron.write(megatron.read(flags, "x.sh"))
    shared = torchtitan.read({"parallelism": {"expert_parallel_degree": 8}}, "x.toml")
    assert str(shared.parallelism) == "ep=8" and "expert_parallel_degree = 8" in torchtitan.write(shared)
    for framework in (torchtitan, megatron):
        made = express_set(plans, framework.express, framework.degrees).configuration
        assert (made.train_batch, made.batch_per_gpu, made.detail["sequence"]) == (4, 2, 64)
        text = framework.write(made)
        content = toml_loads(text) if framework is torchtitan else text
        found = framework.read(content, "x")
        assert str(found.parallelism) == "cp=2" and found.detail["sequence"] == 64 and found.train_batch == 4


@pytest.mark.parametrize("leaves", [None, 0, 1])
def test_a_file_for_all_stages_offloads_if_any_does(leaves: int | None) -> None:
    """Two stages, of which one leaves the GPU, or none."""
    job, machine = Job(model="tiny-gpt2", batch=4, seq=64, micro_batches=4), load_machine("a100-40x8", gpus=4)
    stays, goes = (
        plan_stages(job, machine, policy, Parallelism(pipeline=2)).plans for policy in ("all_on_gpu", "zero_infinity")
    )
    plans = replace(stays, plans=tuple((goes if n == leaves else stays).plans[n] for n in (0, 1)))
    for framework, words in ((torchtitan, "enable_cpu_offload = true"), (megatron, "--optimizer-cpu-offload")):
        made = express_set(plans, framework.express, framework.degrees)
        assert (words in framework.write(made.configuration)) is (leaves is not None)
        assert any(f"beyond stage {leaves}: the file" in what for what in made.cannot) is (leaves is not None)


def test_megatron_keeps_parameters_and_gradients_on_the_gpu() -> None:
    """4 layers of 100,000 parameters; a quarter of the optimizer on the host."""
    w = chain_workload(4, 100_000)
    machine = round_machine()
    plan = ps.compare(w, machine, policies="zero3_offload:ratio=0.75,subgroup=100000").best().plan
    found = megatron.express(plan)
    flags = megatron.write(found.configuration).splitlines()
    assert "--optimizer-offload-fraction 0.75" in flags and "--micro-batch-size 1" in flags and "--bf16" in flags
    assert found.configuration.policy.startswith("zero3_offload:subgroup=20000,ratio=0.75")
    need = megatron.MEMORY.host_need(found.configuration, w, round_machine())
    assert [b.asked_bytes for b in need.allocations] == [1_200_000, 1_200_000, 2_400_000]
    assert need.allocations[0].taken_bytes == 4 * 2**19  # 300,000 bytes each
    with_gradients = predict(found.configuration, w, machine, Settings(), label="megatron")
    assert with_gradients.gpu_needed_bytes is not None and with_gradients.plan is not None
    assert sum(size for name, _, size in with_gradients.plan.buffers if name.endswith("gradients")) == 4 * w.params
    with_gradients.plan.check()
    narrow = replace(found.configuration, sums="16-bit")
    assert megatron.MEMORY.gpu_beyond_bytes(narrow, w, 1) == 2 * w.params  # as Megatron adds up fp16
    everything = ps.compare(w, machine, policies="all_on_gpu").best().plan
    assert "--optimizer-cpu-offload" not in megatron.write(megatron.express(everything).configuration)
    gone = ps.compare(w, machine, policies="zero_infinity").best().plan
    assert any("100% of the parameters that leave" in line for line in megatron.express(gone).cannot)


def test_rates_of_dropout_are_not_said_of_a_trace() -> None:
    """A preset without any has flags of 0: Megatron-LM's default is 0.1."""
    preset = chain_workload(4, 100_000)
    for w, flags in (
        (preset, ["--hidden-dropout 0", "--attention-dropout 0"]),
        (replace(preset, source="capture"), []),
    ):
        found = megatron.express(ps.compare(w, round_machine(), policies="all_on_gpu").best().plan)
        assert [line for line in megatron.write(found.configuration).splitlines() if "dropout" in line] == flags
        assert any(line.startswith("dropout: a trace has its masks") for line in found.cannot) is (w is not preset)


def test_megatrons_last_stage_has_states_of_a_shared_table() -> None:
    """tiny-gpt2's table, in 12 bytes per parameter beyond the policy's copy and sum, sliced by the ranks that do."""
    job, machine = Job(model="tiny-gpt2", batch=4, seq=64, micro_batches=4), load_machine("a100-40x8", gpus=4)
    stages = Cut(job=job, machine=machine, parallelism=Parallelism(pipeline=2)).workloads
    params = stages[0].tensors[0].numel
    for flags, ranks, states in (("", 2, 12), ("--use-distributed-optimizer", 2, 6)):
        found = megatron.read(f"--pipeline-model-parallel-size 2 {flags}", "x.sh")
        beyond = [megatron.MEMORY.gpu_beyond_bytes(found, stage, ranks) for stage in stages]
        assert beyond == [0, states * params]
    spread = plan_stages(job, machine, Follows(found, "x.sh"), Parallelism(pipeline=2)).plans.plans
    assert [sum(size for name, _, size in plan.buffers if "gradients" in name) for plan in spread] == [0, 6 * params]


def test_stage_0_holds_gradients_of_its_own() -> None:
    """2 bytes of parameters and 12 of states in the policy, 6 of gradients beyond: 20 per parameter."""
    w, stage_0 = chain_workload(2, 100_000), deepspeed.read({"zero_optimization": {"stage": 0}}, "ds.json")
    tight = predict(stage_0, w, round_machine(gpu_memory_bytes=20 * w.params), Settings(), label="ds.json")
    assert tight.fits and tight.gpu_needed_bytes == 20 * w.params
    short = predict(stage_0, w, round_machine(gpu_memory_bytes=20 * w.params - 100), Settings(), label="ds.json")
    assert (short.short_of, short.short_bytes) == ("gpu", 100)
    assert short.reason is not None and "1.2 MB of gradients" in short.reason
