"""FSDP configurations: accelerate's YAML, loaded by the real package too; FSDP 2 as code; host memory by hand."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec.yaml
import pytest
import torch
import torch.distributed as dist
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

import pstar_sim as ps
from pstar_sim import Plan, PstarError, Settings
from pstar_sim.frameworks import accelerate, fsdp, fsdp2
from pstar_sim.frameworks.configuration import Configuration
from pstar_sim.frameworks.express import NOT_PINNED, job_left
from pstar_sim.frameworks.load import load_configuration
from pstar_sim.frameworks.prediction import predict
from pstar_sim.frameworks.targets import TARGETS, target_of
from pstar_sim.policy.registry import find_policy
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.workload.presets import preset

MIB = 2**20
ONE_GPU = round_machine()
YAML = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 1
fsdp_config:
  fsdp_version: {version}
  fsdp_offload_params: {offload}
  {key}: {reshard}
  fsdp_activation_checkpointing: true
"""


def yaml(version: int, offload: str, reshard: str) -> str:
    key = "fsdp_sharding_strategy" if version == 1 else "fsdp_reshard_after_forward"
    return YAML.format(version=version, offload=offload, reshard=reshard, key=key)


def read(text: str) -> Configuration:
    return accelerate.read(msgspec.yaml.decode(text), "fsdp.yaml")


@pytest.mark.parametrize(
    ("version", "offload", "reshard", "policy"),
    [
        (2, "true", "true", "zero_infinity:bucket=0,reuse=0"),
        (2, "true", "false", "zero_infinity:bucket=0"),
        (2, "false", "true", "zero3_resident"),
        (1, "false", "SHARD_GRAD_OP", "zero3_resident:reshard=off"),
        (1, "true", "FULL_SHARD", "zero_infinity:bucket=0,reuse=0"),
    ],
)
def test_a_configuration_is_a_policy_and_the_real_package_loads_what_is_written(
    version: int, offload: str, reshard: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read(yaml(version=version, offload=offload, reshard=reshard))
    assert (found.policy, found.dtype, found.checkpointing) == (policy, "bf16", True)
    assert find_policy(found.policy)
    path = tmp_path / "again.yaml"
    path.write_text(accelerate.write(found))
    assert load_configuration(str(path)) == found
    loaded = ClusterConfig.from_yaml_file(str(path))
    assert loaded.distributed_type == "FSDP" and loaded.mixed_precision == "bf16"
    for key, value in loaded.fsdp_config.items():  # as `accelerate launch` hands them on
        monkeypatch.setenv(key.upper(), str(value).lower() if key != "fsdp_auto_wrap_policy" else value)
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == version
    if version == 1:
        assert plugin.cpu_offload.offload_params is (offload == "true") and plugin.sharding_strategy.name == reshard
    else:
        assert (type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy") is (offload == "true")
        assert plugin.reshard_after_forward is (reshard == "true")
    assert plugin.activation_checkpointing


@pytest.mark.parametrize(("line", "checkpointing"), [("true", True), ("false", False), (None, None)])
def test_a_file_that_names_recomputation_decides_it(
    line: str | None, checkpointing: bool | None, tmp_path: Path
) -> None:
    """A file without the key leaves recomputation to the model's preset."""
    key = "" if line is None else f", fsdp_activation_checkpointing: {line}"
    found = read(f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2{key}}}")
    assert found.checkpointing is checkpointing
    path = tmp_path / "again.yaml"
    path.write_text(accelerate.write(found))
    assert load_configuration(str(path)).checkpointing is checkpointing


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("distributed_type: FSPD", "did you mean FSDP?"),
        ("distributed_type: TPU", "is not modelled"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_ofload_params: true}", "did you mean fsdp_config.fsdp_off"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FUL_SHARD}", "did you mean FULL_SHARD?"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: n.json}", "cannot be read: No"),
        ("- 1", "is not an accelerate configuration"),
    ],
)  # fmt: skip
def test_a_mistake_names_file_and_key(text: str, said: str) -> None:
    with pytest.raises(PstarError) as error:
        read(text)
    assert str(error.value).startswith("fsdp.yaml: ") and said in str(error.value)


def test_other_types_and_what_is_not_modelled() -> None:
    ds = "distributed_type: DEEPSPEED\nmixed_precision: fp16\ndeepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu, gradient_clipping: 1.0}"  # noqa: E501
    found = read(ds)
    assert (found.framework, found.policy, found.dtype, found.clip) == (
        "DeepSpeed", "zero3_offload:flush=async", "fp16", True,
    )  # fmt: skip
    left = read("distributed_type: DEEPSPEED\nmixed_precision: 'no'\nnum_processes: 4")
    assert (left.dtype, left.detail["processes"]) == ("fp32", 4)
    eight = read("distributed_type: DEEPSPEED\nmixed_precision: fp8")
    assert (eight.dtype, eight.products) == ("bf16", "fp8")
    one = read("distributed_type: FSDP\nmixed_precision: fp8\nfsdp_config: {fsdp_version: 2}")
    assert one.products == "fp8" and read(accelerate.write(one)) == one
    keys = "fsdp_backward_prefetch_policy: BACKWARD_PRE, fsdp_version: 2, fsdp_sharding_strategy: 2"
    old = read(f"distributed_type: FSDP\nfsdp_config: {{{keys}}}")
    assert old.policy == "zero3_resident" and "fsdp_sharding_strategy has no effect with FSDP 2" in old.notes[0]
    assert read("distributed_type: MULTI_GPU").policy == "all_on_gpu"
    for unquoted, quoted in (("distributed_type: NO", "distributed_type: 'NO'"), ("mixed_precision: no",) * 2):
        assert read(unquoted) == read(quoted) and read(unquoted).policy == "all_on_gpu"
    assert read("mixed_precision: no").dtype == "fp32"
    hybrid = read(
        "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 4, fsdp_backward_prefetch: NO_PREFETCH}"
    )
    assert hybrid.policy == "zero3_resident:replicas=nodes" and len(hybrid.notes) == 1
    assert "fsdp_backward_prefetch" in hybrid.notes[0]
    for name in ("_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2", "5"):  # torch's name, accelerate's and its number
        zero2 = read(f"distributed_type: FSDP\nfsdp_config: {{fsdp_sharding_strategy: {name}}}")
        assert zero2.policy == "zero3_resident:reshard=off,replicas=nodes"
    degrees = "parallelism_config: {parallelism_config_dp_replicate_size: 4, parallelism_config_dp_shard_size: 2}"
    two = read(f"distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {{fsdp_version: 2}}\n{degrees}")
    assert two.policy == "zero3_resident:replicas=4"
    for found in (hybrid, two):
        assert read(accelerate.write(found)) == found
    assert "parallelism_config_dp_shard_size: 2" in accelerate.write(two)


def test_a_whole_model_on_each_gpu_has_gradients_of_its_own() -> None:
    """Autocast: fp32 parameters, gradients and two moments: 16 bytes per parameter; the buckets of
    DistributedDataParallel are 4 more."""
    alone = read("mixed_precision: bf16\nnum_processes: 1")
    assert (alone.dtype, alone.autocast) == (None, "bf16") and "--dtype bf16 if the script loads" in alone.notes[0]
    w = replace(chain_workload(2, 100_000, dtype="fp32"), autocast="bf16")
    assert predict(alone, w, round_machine(), Settings(), label="no").gpu_needed_bytes == 16 * w.params
    beyond = accelerate.MEMORY.gpu_beyond_bytes
    assert beyond(read("distributed_type: MULTI_GPU\nmixed_precision: bf16"), w, 2) == 4 * w.params
    assert beyond(alone, w, 1) == 0
    assert beyond(read(yaml(version=2, offload="true", reshard="true")), w, 2) == 0


_LAUNCHED = "give --like the DeepSpeed file (JSON) or the accelerate file (YAML) that it is launched with"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rate: 1e-4", _LAUNCHED),
        (
            "optim: adamw_bnb_8bit\ndeepspeed: zero3.json",
            (
                "give --like the DeepSpeed file that its key deepspeed names, zero3.json, and --optimizer "
                "adamw_bnb_8bit for its optim"
            ),
        ),
        (
            "lora_r: 8\nload_in_8bit: true",
            f"{_LAUNCHED}, and --lora r=8 for its lora_r, and --base int8 for its load_in_8bit",
        ),
        (
            "fsdp_config: {offload_params: true}",
            "give --like an accelerate file with distributed_type: FSDP and its fsdp_config (keys with fsdp_ before)",
        ),
    ],
)
def test_the_arguments_of_a_script_are_known_by_their_keys(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "train.yml"
    path.write_text(f"model_name_or_path: m\n{text}")
    words = f"{path}: has the arguments of a training script, which are not read; {said}"
    with pytest.raises(PstarError, match=f"^{re.escape(words)}$"):
        load_configuration(str(path))


def test_host_memory_by_hand() -> None:
    """Two layers of two tensors of 50,000: FSDP 2 pins each parameter, FSDP 1 each block."""
    w = chain_workload(2, 100_000, tensors_per_layer=2)
    two = fsdp.MEMORY.host_need(read(yaml(version=2, offload="true", reshard="true")), w, ONE_GPU)
    assert [(b.asked_bytes, b.taken_bytes) for b in two.allocations] == [
        (800_000, 4 * 2**18),  # of 200,000 bytes
        (800_000, 4 * 2**18),
        (1_600_000, 1_600_000),
    ]
    assert two.startup_bytes == 800_000
    names = {t.name.rpartition(".")[0] for t in w.tensors}
    one = fsdp.MEMORY.host_need(read(yaml(version=1, offload="true", reshard="FULL_SHARD")), w, ONE_GPU)
    assert len(names) == 2 and one.allocations[0].taken_bytes == 2 * 2**19  # of 400,000 bytes
    assert fsdp.MEMORY.host_need(read(yaml(version=2, offload="false", reshard="true")), w, ONE_GPU).allocations == ()


@pytest.mark.parametrize("version", [1, 2])
def test_offloaded_frozen_parameters_are_on_the_host_as_they_are_stored(version: int) -> None:
    """So are they in a checkpoint: of 124 M parameters 85 M in half a byte, 0.3 M of adapters in 4 bytes."""
    shard = "FULL_SHARD" if version == 1 else "true"
    offloaded = read(yaml(version=version, offload="true", reshard=shard))
    for base in (None, "nf4"):
        w = preset("gpt2", batch=1, seq=64, lora="r=4", base=base)
        kept_bytes = sum(t.bytes for t in w.tensors if t.frozen and t.tied_to is None)
        need = fsdp.MEMORY.host_need(offloaded, w, ONE_GPU)
        (kept,) = (one for one in need.allocations if one.name == "frozen parameters")
        assert kept.asked_bytes == kept_bytes and need.held_bytes > kept_bytes + 16 * w.trainable_params
        assert need.copies is not None
        if version == 1:
            assert need.copies.saving_bytes == kept_bytes + 4 * w.trainable_params
            assert need.copies.saved == "the weights, whole on one process"


def test_pure_bf16_takes_half_of_the_host() -> None:
    """2 bytes of the parameter, 2 of its gradient and 2 of each moment, where fp32 parameters take 16."""
    offloaded = read(yaml(version=2, offload="true", reshard="true"))
    sizes = []
    for masters in ("fp32", "none"):
        w = preset("gpt2", batch=1, seq=64, masters=masters)
        allocations = fsdp.MEMORY.host_need(offloaded, w, ONE_GPU).allocations
        sizes.append(sum(each.asked_bytes for each in allocations) / w.trainable_params)
        assert ("bf16 parameters" in {each.name for each in allocations}) is (masters == "none")
    assert sizes == [16, 8]


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Three layers of 100,000 parameters where half of the model data fit the GPU."""
    machine = round_machine(gpu_memory_bytes=2_400_000)
    return ps.compare(chain_workload(3, 100_000), machine, policies="tide", settings=Settings()).best().plan


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_says_what_it_cannot_express(name: str, plan: Plan, tmp_path: Path) -> None:
    target = TARGETS[name]
    found = target.express(plan)
    assert found.configuration.framework == name and found.says
    assert any("the order of copies and updates of tide" in line for line in found.cannot)
    text = target.write(found.configuration)
    assert target.write(target.express(plan).configuration) == text
    if target.read is not None:
        path = tmp_path / f"file{target.endings[0]}"
        path.write_text(text)
        read = load_configuration(str(path))
        if name == "Megatron-LM":  # which part of the states moves at once no flag says
            assert (read.policy_base, read.options["ratio"]) == ("zero3_offload", found.configuration.options["ratio"])
            read = replace(read, policy=found.configuration.policy)
        assert read == found.configuration
    assert target_of(found.configuration).memory.host_need(found.configuration, plan.workload, ONE_GPU).host_bytes > 0


OWN = ("all_on_gpu", "zero_offload", "zero3_resident:reshard=off", "zero3_offload:ratio=0.5,subgroup=50000",
       "deep_optimizer_states", "zero_infinity", "static_partition")  # fmt: skip


@pytest.mark.parametrize("policy", OWN)
def test_what_is_exported_of_any_plan_is_read_again(policy: str, tmp_path: Path) -> None:
    for ranks, micro_batches in ((1, 1), (2, 2)):
        machine = round_machine(gpu_memory_bytes=2**24, host_memory_bytes=2**28, ranks=ranks, peer_bytes_per_s=MIB)
        w = chain_workload(3, 100_000, micro_batches=micro_batches)
        made = ps.compare([w] * ranks, machine, policies=policy).best().plan
        for name, ending in (("DeepSpeed", "json"), ("accelerate", "yaml"), ("torchtitan", "toml")):
            found = TARGETS[name].express(made)
            path = tmp_path / f"{ranks}.{ending}"
            path.write_text(TARGETS[name].write(found.configuration))
            assert load_configuration(str(path)) == found.configuration


@pytest.mark.parametrize("policy", OWN)
def test_what_is_exported_pins_nothing_where_the_host_can_pin_too_little(policy: str, tmp_path: Path) -> None:
    """3 layers of 100,000 parameters: their fp32 gradients alone take 2 MiB pinned, and 2 MB can be."""
    w = chain_workload(3, 100_000)
    little = ps.machine("rtx4090-wsl2", overrides={"host.pinned": "2MB"})
    made = ps.compare(w, little, policies=policy).best().plan
    found = {name: TARGETS[name].express(made) for name in ("DeepSpeed", "FSDP2")}
    for name, one in found.items():
        said = TARGETS[name].write(one.configuration)
        offloads = any(a.asked_bytes for a in TARGETS[name].memory.host_need(one.configuration, w, ONE_GPU).allocations)
        assert (NOT_PINNED in one.says) is offloads
        assert not offloads or ('"pin_memory": true' not in said and "PIN = True" not in said)
        assert predict(one.configuration, w, little, made.settings, label=name).short_of != "pinned"
    path = tmp_path / "ds.json"
    path.write_text(TARGETS["DeepSpeed"].write(found["DeepSpeed"].configuration))
    assert load_configuration(str(path)) == found["DeepSpeed"].configuration


def test_the_code_says_the_configuration(plan: Plan) -> None:
    code = fsdp2.write(fsdp2.express(plan).configuration)
    said: dict[str, Any] = {
        node.targets[0].id: ast.unparse(node.value)
        for node in ast.parse(code).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    names: dict[str, Any] = {}
    exec(code, names)
    inner = nn.ModuleList([nn.Linear(2, 2)])
    layer = nn.Module()
    layer.experts = inner
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2), layer])
    assert names["blocks"](model) == [inner[0], layer, model.layers[0]], "blocks within a block come first"
    assert said == {
        "DTYPE": "torch.bfloat16", "OFFLOAD": "True", "PIN": "True", "RESHARD": "True", "REPLICAS": "1",
        "CHECKPOINTING": "False",
    }  # fmt: skip


class Stack(nn.Module):
    """Two blocks that count their forwards; no method of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.forwards = 0
        for layer in self.layers:
            layer[1].register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_the_code_recomputes_blocks_of_a_model_of_ones_own(plan: Plan) -> None:
    """Four forwards of two blocks, and the gradients of a model without FSDP."""
    configuration = replace(fsdp2.express(plan).configuration, checkpointing=True, dtype="fp32")
    names: dict[str, Any] = {}
    exec(fsdp2.write(configuration), names)
    x = torch.arange(8.0).view(2, 4)
    plain = Stack()
    plain(x).backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = names["shard"](Stack())
        model(x).backward()
        gradients = [p.grad.full_tensor() for p in model.parameters()]
    finally:
        dist.destroy_process_group()
    assert (plain.forwards, model.forwards) == (2, 4)
    assert all(torch.equal(p.grad, g) for p, g in zip(plain.parameters(), gradients, strict=True))


READ_AGAIN = {"DeepSpeed": "json", "accelerate": "yaml", "torchtitan": "toml"}


@pytest.mark.parametrize("name", TARGETS)
def test_autocast_becomes_a_cast_of_whole_blocks_in_words(name: str, tmp_path: Path) -> None:
    """Predicted is the job that --like makes of the same file: in bf16, without autocast."""
    machine = ps.machine("h100-80")
    w = preset("gpt2", batch=2, seq=64, autocast="bf16")
    made = find_policy("zero3_offload")(w, machine, Settings())
    found = TARGETS[name].express(made)
    assert found.cannot.count(f"bf16 autocast: {name} casts whole blocks, over fp32 masters") == 1
    assert not any("fp32" in line for line in found.says) and found.configuration.dtype == "bf16"
    job, settings = job_left(made, found.configuration)
    plain = preset("gpt2", batch=2, seq=64, dtype="bf16")
    assert (job.dtype, job.autocast, job.moments, job.notes) == ("bf16", None, plain.moments, plain.notes)
    if name in READ_AGAIN:
        path = tmp_path / f"file.{READ_AGAIN[name]}"
        path.write_text(TARGETS[name].write(found.configuration))
        again = load_configuration(str(path))
        assert again == found.configuration
        mine, theirs = (predict(c, job, machine, settings, label="x") for c in (found.configuration, again))
        assert mine.iteration_s == theirs.iteration_s


@pytest.mark.parametrize(("ranks", "kind"), [(1, "'NO'"), (2, "MULTI_GPU")])
def test_accelerate_has_autocast_without_sharding(ranks: int, kind: str, tmp_path: Path) -> None:
    machine = round_machine(gpu_memory_bytes=2**34, host_memory_bytes=2**34, ranks=ranks, peer_bytes_per_s=MIB)
    w = preset("gpt2", batch=2, seq=64, autocast="bf16", recompute="every-2")
    made = find_policy("all_on_gpu:adam=foreach")(w, machine, Settings())
    found = accelerate.express(made)
    path = tmp_path / "file.yaml"
    path.write_text(accelerate.write(found.configuration))
    assert f"distributed_type: {kind}" in path.read_text().replace('"', "'")
    assert load_configuration(str(path)) == found.configuration and found.configuration.autocast == "bf16"
    assert not any("casts whole blocks" in line for line in found.cannot)
    assert "recomputed activations (every-2): the script switches them on" in found.cannot
    assert job_left(made, found.configuration)[0] is w


@pytest.mark.parametrize(
    ("name", "recompute", "line", "left"),
    [
        ("accelerate", "every-2", "every-2 recompute: the file says all blocks", True),
        ("FSDP2", "every-2", "every-2 recompute: the file says all blocks", True),
        ("torchtitan", "attention", "attention recompute: the file says none", False),
        ("accelerate", "attention", "attention recompute: the file says none", False),
        ("torchtitan", "every-2", "", "every-2"),
        ("DeepSpeed", "attention", "recomputed activations (attention): the script switches them on", "attention"),
        ("Megatron-LM", "every-2", "blocks of which every-2 recomputes: the flags say all of them", True),
    ],
)
def test_less_recomputation_than_of_all_blocks_is_written_or_said(
    name: str, recompute: str, line: str, left: bool | str
) -> None:
    w = preset("gpt2", batch=2, seq=64, dtype="bf16", recompute=recompute)
    made = find_policy("zero3_offload")(w, ps.machine("h100-80"), Settings())
    found = TARGETS[name].express(made)
    said = [one for one in found.cannot if "recompute" in one]
    assert [one[: len(line)] for one in said] == [line] * bool(line)
    job, _ = job_left(made, found.configuration)
    assert (job.recompute or job.checkpointing) == left


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_and_a_quantised_base_are_the_scripts(name: str) -> None:
    """Predicted is the job with the base in the working dtype."""
    machine = ps.machine("h100-80")
    plain, w = (preset("gpt2", batch=2, seq=64, lora="r=4", base=base) for base in (None, "nf4"))
    made = find_policy("zero3_offload")(w, machine, Settings())
    found = TARGETS[name].express(made)
    assert found.cannot.count("adapters (LoRA r=4 on c_attn): the script makes them") == 1
    assert found.cannot.count("frozen matrices in nf4: the script quantises them; predicted in bf16") == 1
    job, _ = job_left(made, found.configuration)
    assert (job.moments, job.tensors) == (plain.moments, plain.tensors)
