"""DeepSpeed configurations: what is read is what is written, every key is accounted for, host memory by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pstar_sim import PstarError, Settings, compare
from pstar_sim.catalog.efficiency import fitted
from pstar_sim.catalog.loader import load_catalog, load_machine
from pstar_sim.core.step import COPIES, PAGEABLE, Place, Queue
from pstar_sim.frameworks import accelerate, deepspeed
from pstar_sim.frameworks.express import job_left
from pstar_sim.frameworks.keys import KeyEffect
from pstar_sim.frameworks.load import load_configuration
from pstar_sim.frameworks.prediction import predict
from pstar_sim.frameworks.targets import TARGETS
from pstar_sim.policy.registry import find_policy
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.workload.presets import preset

MIB = 2**20
ONE_GPU, TWO_GPUS = round_machine(), round_machine(ranks=2)
CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/disk", "pipeline_read": True, "pipeline_write": True}
ZEROS: list[tuple[dict[str, Any], str]] = [
    ({"stage": 0}, "all_on_gpu"),
    ({"stage": 2}, "zero3_resident:reshard=off"),
    ({"stage": 2, "offload_optimizer": CPU}, "zero_offload"),
    ({"stage": 3}, "zero3_resident"),
    ({"stage": 3, "offload_optimizer": CPU}, "zero3_offload:flush=async"),
    ({"stage": 3, "offload_optimizer": {**CPU, "pin_memory": False}}, "zero3_offload:pinned=off"),
    (
        {"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.75}, "offload_param": CPU, "sub_group_size": 1e8},
        "zero3_offload:subgroup=100000000,ratio=0.75,flush=async,params=cpu",
    ),
    ({"stage": 3, "offload_param": CPU}, "zero3_offload:ratio=0,flush=async,params=cpu"),
    ({"stage": 3, "offload_optimizer": NVME, "offload_param": CPU}, "zero_infinity:states=nvme"),
    (
        {"stage": 3, "offload_optimizer": NVME, "offload_param": {"device": "nvme"}},
        "zero_infinity:params=nvme,states=nvme",
    ),
    ({"stage": 3, "cpu_offload": True, "stage3_max_reuse_distance": 0}, "zero3_offload:flush=async,reuse=0"),
]  # fmt: skip


@pytest.mark.parametrize(("zero", "policy"), ZEROS)
def test_a_configuration_is_a_policy_and_what_is_written_of_it_is_read_again(zero: dict[str, Any], policy: str) -> None:
    content = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
        "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": zero,
    }  # fmt: skip
    found = deepspeed.read(content, "ds.json")
    assert found.policy == policy
    assert find_policy(found.policy)
    assert (found.batch_per_gpu, found.micro_batches, found.clip) == (4, 2, False)
    assert (found.dtype, found.optimizer, found.without_effect) == ("bf16", "adamw", ("optimizer.params.lr",))
    assert deepspeed.read(json.loads(deepspeed.write(found)), "again.json") == found


def test_a_run_has_the_threads_that_its_launcher_leaves_and_the_hooks_of_its_stage() -> None:
    job, node = preset("1B", batch=8, seq=1024, checkpointing=True), load_machine("a100-80x8")
    offload = deepspeed.read({"zero_optimization": {"stage": 3, "offload_optimizer": CPU}}, "ds.json")
    left = predict(offload, job, node, Settings(), label="ds")
    assert left.plan is not None and left.plan.machine.framework == load_catalog().framework("deepspeed")
    assert (left.plan.machine.host.threads, left.plan.machine.adam_params_per_s) == (
        1, fitted().adam_found_params_per_s,
    )  # fmt: skip
    assert any(
        "as torchrun and accelerate leave it; with OMP_NUM_THREADS=16 say" in n for n in left.configuration.notes
    )
    assert left.trust is not None and "class a100 node, CPU steps as found" in left.trust

    said = predict(offload, job, load_machine("a100-80x8", cpu_threads=16), Settings(), label="ds")
    assert said.iteration_s is not None and left.iteration_s is not None and left.iteration_s > 1.5 * said.iteration_s
    assert said.trust is not None and "as found" not in said.trust and "CPU Adam" not in str(said.configuration.notes)

    alone = predict(offload, job, load_machine("a100-80"), Settings(), label="ds")  # one process has all cores
    assert alone.plan is not None and alone.plan.machine.host == load_machine("a100-80").host
    resident = deepspeed.read({"zero_optimization": {"stage": 2}}, "ds.json")  # no hooks, and no CPU Adam
    there = predict(resident, job, node, Settings(), label="ds")
    assert there.plan is not None and there.plan.machine == node


def test_what_zero_infinity_leaves_out_of_deepspeed_is_said() -> None:
    for zero, policy in [
        *ZEROS,
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "zero3_offload:ratio=0,flush=async,params=cpu"),
    ]:
        found = deepspeed.read({"zero_optimization": zero}, "ds.json")
        said = any("waits of the backward pass" in note for note in found.notes)
        assert found.policy == policy and said == policy.startswith("zero_infinity")


def test_checkpoints_on_the_host_are_the_policys_where_the_model_recomputes() -> None:
    content = {
        "activation_checkpointing": {"cpu_checkpointing": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": CPU},
    }
    found = deepspeed.read(content, "ds.json")
    assert found.policy == "zero3_offload:flush=async,checkpoints=host"
    assert any("models that recompute by PyTorch's ignore it" in note for note in found.notes)
    assert deepspeed.read(json.loads(deepspeed.write(found)), "again.json").policy == found.policy
    recomputes, keeps = (chain_workload(4, MIB, checkpointing=on, micro_batches=2) for on in (True, False))
    assert found.for_model(recomputes).policy == found.policy
    assert found.for_model(keeps).policy == "zero3_offload:flush=async"
    resident = deepspeed.read({**content, "zero_optimization": {"stage": 3}}, "ds.json")
    assert resident.policy == "zero3_resident"
    assert any("cpu_checkpointing without stage 3" in note for note in resident.notes)


def test_keys_under_their_other_names() -> None:
    """DeepSpeed takes some keys of stage 3 with and without "stage3_"; both name one thing that is not modelled."""
    for name in ("stage3_max_live_parameters", "max_live_parameters"):
        found = deepspeed.read({"zero_optimization": {"stage": 3, name: 5}}, "ds.json")
        assert any(f"zero_optimization.{name} = 5: gathered parameters are not limited" in note for note in found.notes)
        usual = deepspeed.read({"zero_optimization": {"stage": 3, name: 1e9}}, "ds.json")
        assert not any(name in note for note in usual.notes)
    other = {"cpu_offload_use_pin_memory": True, "save_muon_momentum_buffer_in_memory": False}
    content = {"zero_optimization": {"stage": 2, **other}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    found = deepspeed.read({**content, "vocabulary_size": 32000, "disable_allgather": True}, "ds.json")
    assert set(found.without_effect) == {
        *(f"zero_optimization.{name}" for name in other), "torch_autocast.dtype", "vocabulary_size",
    }  # fmt: skip
    assert any("torch_autocast.enabled" in note for note in found.notes)
    assert any("disable_allgather" in note for note in found.notes)


def test_what_a_file_leaves_to_the_script_is_not_said() -> None:
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    zero = {"stage": 3, "offload_optimizer": CPU, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    found = deepspeed.read({**auto, "bf16": {"enabled": "auto"}, "zero_optimization": zero}, "ds.json")
    assert (found.batch_per_gpu, found.micro_batches, found.clip, found.dtype) == (None, None, None, None)
    # the HF Trainer sets hidden_size**2 and nine tenths of it; the chain's vectors have 1000 elements
    chosen = found.for_model(chain_workload(2, 1000))
    assert chosen.policy == "zero3_offload:flush=async,bucket=1000000,prefetch=900000"
    assert deepspeed.read(json.loads(deepspeed.write(found)), "again.json") == found


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation is not a known key of a DeepSpeed configuration; did you mean "),
        ({"zero_optimization": {"stag": 3}}, "DeepSpeed configuration; did you mean zero_optimization.stage?"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4; it must be"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "offload_param.device = \"gpu\"; it must be"),
        ({"zero_optimization": 3}, "zero_optimization = 3; it must be a table of keys"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both true"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": NVME}}, "needs stage 3, not stage 2"),
        ({"zero_optimization": {"aio": {}}}, "zero_optimization.aio is not a known key"),
        ({"zero_optimization": {"aio": {}}}, "did you mean aio?"),
        ({"stage3_max_live_parameters": 1}, "did you mean zero_optimization.stage3_max_live_parameters?"),
        ([], "is not a DeepSpeed configuration"),
    ],
)  # fmt: skip
def test_a_mistake_names_file_and_key(content: object, said: str) -> None:
    with pytest.raises(PstarError) as error:
        deepspeed.read(content, "ds.json")
    assert str(error.value).startswith("ds.json: ") and said in str(error.value)


def test_a_key_of_another_version_is_a_note() -> None:
    found = deepspeed.read({"zero_optimization": {"stage": 3, "quokka": {"size": 1}}, "quokka": 2}, "ds.json")
    assert 'zero_optimization.quokka = {"size": 1}, quokka = 2: not a known key' in " ".join(found.notes)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("ds.json", b" \n", "is empty"),
        ("titan.toml", b"", "is empty"),
        ("ds.json", b"// mine\n{}", "not a JSON file: line 1, column 1: Expecting value; take the comments out"),
        ("ds.json", b'{"a": 1,}', "not a JSON file: line 1, column 9"),
        ("fsdp.yaml", b"a: b: c", "not a YAML file"),
        ("fsdp.yaml", b"\xff\xfe", "not a text file in UTF-8"),
        ("ds.cfg", b"{}", "no framework has files with its ending"),
        ("ds.json", None, "cannot be read: Is a directory"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(name: str, content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(PstarError) as error:
        load_configuration(str(path))
    assert str(error.value).startswith(f"{path}: ") and said in str(error.value) and "\n" not in str(error.value)


def test_a_file_with_a_mark_of_its_bytes_order_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(b'\xef\xbb\xbf{"train_batch_size": 8}')
    found = load_configuration(str(path))
    assert (found.train_batch, found.micro_batches) == (8, 1), "DeepSpeed runs it as one micro-batch"


def test_keys_of_one_table_that_is_not_modelled_share_a_line() -> None:
    (note, *_) = deepspeed.read({"aio": {"queue_depth": 8, "thread_count": 1}}, "ds.json").notes
    assert note.startswith("not modelled: aio.queue_depth = 8, aio.thread_count = 1: disks are")


def test_what_is_not_modelled_is_named_and_no_key_is_dropped() -> None:
    content = {
        "steps_per_print": 10, "wandb": {"enabled": True}, "sparse_gradients": False,
        "zero_optimization": {"stage": 2, "zero_quantized_weights": True, "overlap_comm": "auto"},
        "optimizer": {"type": "Lamb"},
    }  # fmt: skip
    found = deepspeed.read(content, "ds.json")
    assert found.without_effect == ("steps_per_print", "wandb.enabled")
    named = [note for note in found.notes if note.startswith("not modelled")]
    assert len(named) == 2 and "zero_quantized_weights = true" in named[0] and "Lamb" in named[1]
    assert any("clips at 1.0 since" in note for note in found.notes)
    for key in deepspeed.KEYS:
        assert bool(key.name) is (key.effect is KeyEffect.USED)
        assert bool(key.why) is (key.effect is KeyEffect.NOT_MODELLED)


def test_host_memory_of_stage_2_by_hand() -> None:
    """3 layers of 100,000 parameters, one rank: 300,000 in flat buffers."""
    w = chain_workload(3, 100_000, micro_batches=2)
    found = deepspeed.read({"zero_optimization": {"stage": 2, "offload_optimizer": CPU}}, "ds.json")
    need = deepspeed.MEMORY.host_need(found, w, ONE_GPU)
    asked = {a.name: (a.asked_bytes, a.taken_bytes) for a in need.allocations}
    assert asked == {
        "fp32 masters": (1_200_000, 2 * MIB),
        "updated parameters on their way": (600_000, MIB),
        "fp32 gradients": (1_200_000, 2 * MIB),
        "the optimizer's moments": (2_400_000, 2_400_000),  # not pinned
        "a gradient on its way": (200_000, 2**18),
        "gradients of micro-batches": (600_000, 3 * 2**18),  # a block per tensor
    }
    assert need.startup_bytes == 600_000 and need.host_bytes == 5 * MIB + 4 * 2**18 + 2_400_000
    unpinned = deepspeed.read(
        {"zero_optimization": {"stage": 2, "offload_optimizer": {**CPU, "pin_memory": False}}}, "ds.json"
    )
    assert deepspeed.MEMORY.host_need(unpinned, w, ONE_GPU).host_bytes == need.asked_bytes


def test_a_host_that_pins_less_than_a_file_wants_is_a_no_and_the_value_that_would_do_is_named() -> None:
    """3 layers of 100,000 parameters: 5 MiB and a block of 2**18 bytes are to be pinned, and 5 MB can be."""
    w = chain_workload(3, 100_000)
    little = load_machine("rtx4090-wsl2", overrides={"host.pinned": "5MB"})
    enough = load_machine("rtx4090-wsl2", overrides={"host.pinned": "6MB"})
    pinned, not_pinned = (
        deepspeed.read({"zero_optimization": {"stage": 2, "offload_optimizer": {**CPU, "pin_memory": pin}}}, "ds.json")
        for pin in (True, False)
    )
    no = predict(pinned, w, little, Settings(), label="ds.json")
    wanted = 5 * MIB + 2**18
    assert no.short_of == "pinned" and no.short_bytes == wanted - 5_000_000 and no.reason is not None
    assert no.reason.startswith("ds.json does not fit: host is to pin 5.505 MB (1.2 MB of fp32 masters, ")
    assert no.reason.endswith(
        'but can pin 5 MB, short by 505 kB; fits with "pin_memory": false in its offload_optimizer'
    )
    fast, slow = (predict(c, w, enough, Settings(), label="ds.json") for c in (pinned, not_pinned))
    assert fast.iteration_s is not None and slow.iteration_s is not None and fast.iteration_s < slow.iteration_s
    assert predict(not_pinned, w, little, Settings(), label="ds.json").iteration_s == slow.iteration_s
    (row,) = compare(w, little, policies=[no.as_policy()], barrier_cost=False).rows
    assert row.short_of == "pinned" and row.reason == no.reason


def test_the_value_that_would_do_is_named_in_each_section_of_the_file() -> None:
    """3 layers of 100,000 parameters: their buffer of 2**20 bytes is pinned anyway, and 2 MB can be."""
    zero = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}
    found = deepspeed.read({"zero_optimization": zero, "bf16": {"enabled": True}}, "ds.json")
    little = load_machine("rtx4090-wsl2", overrides={"host.pinned": "2MB"})
    no = predict(found, chain_workload(3, 100_000), little, Settings(), label="ds.json")
    assert no.reason is not None
    assert no.reason.endswith('fits with "pin_memory": false in its offload_optimizer and offload_param')


def test_of_an_accelerate_file_the_file_that_has_the_value_is_named() -> None:
    """3 layers of 100,000 parameters, as above: accelerate's own file has no key for pinned memory."""
    offload = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    content = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": offload}
    little = load_machine("rtx4090-wsl2", overrides={"host.pinned": "2MB"})
    found = accelerate.read(content, "ds.yaml")
    no = predict(found, chain_workload(3, 100_000), little, Settings(), label="ds.yaml")
    assert no.reason is not None and no.reason.endswith(
        'fits with a deepspeed_config_file that has "pin_memory": false in its offload_optimizer and offload_param'
    )
    disks = {"zero_stage": 2, "offload_optimizer_device": "nvme"}
    with pytest.raises(PstarError, match=r"^ds\.yaml: offload_optimizer to nvme needs stage 3, not stage 2$"):
        accelerate.read({**content, "deepspeed_config": disks}, "ds.yaml")


def test_a_file_that_accelerate_names_is_followed(tmp_path: Path) -> None:
    """From the folder of the YAML, with the processes and the dtype of the YAML where the file says none."""
    content = {"zero_optimization": {"stage": 3, "offload_param": CPU, "offload_optimizer": CPU}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    (tmp_path / "of.yaml").write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\n"
        "deepspeed_config: {deepspeed_config_file: ds.json, zero3_init_flag: false}\n"
    )
    found = load_configuration(str(tmp_path / "of.yaml"))
    own = load_configuration(str(tmp_path / "ds.json"))
    assert (found.policy, found.dtype, found.loading) == (own.policy, "bf16", "each")
    assert found.detail["processes"] == 4 and found.notes[0] == f"deepspeed_config_file: {tmp_path / 'ds.json'}"
    (tmp_path / "ds.json").write_text("{")
    with pytest.raises(PstarError, match=r"^\S*of\.yaml: deepspeed_config\.deepspeed_config_file = '\S*ds\.json': "):
        load_configuration(str(tmp_path / "of.yaml"))


def test_copies_of_memory_that_is_not_pinned_go_at_the_rate_for_it() -> None:
    """A link of 1 MiB/s, half of it for memory that is not pinned: every copy takes twice as long. A machine without
    that rate times them as pinned."""
    w = chain_workload(2, 2**20)
    for pin, rate, via in ((True, MIB // 2, None), (False, MIB // 2, PAGEABLE), (False, None, None)):
        zero = {"stage": 2, "offload_optimizer": {**CPU, "pin_memory": pin}}
        found = deepspeed.read({"zero_optimization": zero}, "ds.json")
        plan = predict(found, w, round_machine(pageable_bytes_per_s=rate), Settings(), label="ds.json").plan
        assert plan is not None and {step.via for step in plan.steps if step.kind in COPIES} == {via}
        seconds = {span.end_s - span.start_s for span in play(plan).spans if span.queue is Queue.H2D}
        assert max(seconds) == pytest.approx(2 if via is None else 4)  # 2 MiB of parameters


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_parameters_in_one_buffer_are_pinned_whatever_the_file_says(device: str) -> None:
    """With offload_param nothing in the file pins less, so nothing is recommended."""
    zero = {"stage": 3, "offload_optimizer": CPU, "offload_param": {"device": device}}
    found = deepspeed.read({"zero_optimization": zero}, "ds.json")
    little = load_machine("rtx4090-wsl2", overrides={"host.pinned": "1MB"})
    reason = predict(found, chain_workload(8, 100_000), little, Settings(), label="ds.json").reason
    assert reason is not None and ("fits with" in reason) == (device == "none")


def test_offloaded_frozen_parameters_are_on_the_host_as_they_are_stored() -> None:
    w = preset("gpt2", batch=2, seq=64, lora="r=4", base="nf4")
    frozen_bytes = [t.bytes for t in w.tensors if t.frozen and t.tied_to is None]
    for params, kept in (({"device": "none"}, []), (CPU, [sum(-(-size // 2) for size in frozen_bytes)])):
        zero = {"stage": 3, "offload_optimizer": CPU, "offload_param": params}
        need = deepspeed.MEMORY.host_need(deepspeed.read({"zero_optimization": zero}, "ds.json"), w, TWO_GPUS)
        assert [one.asked_bytes for one in need.allocations if one.name == "frozen parameters"] == kept
    zero = {"stage": 3, "offload_optimizer": CPU, "stage3_gather_16bit_weights_on_model_save": True}
    need = deepspeed.MEMORY.host_need(deepspeed.read({"zero_optimization": zero}, "ds.json"), w, TWO_GPUS)
    assert need.copies is not None and need.copies.saving_bytes == sum(frozen_bytes) + 2 * w.trainable_params


def test_host_memory_of_stage_3_by_hand_on_two_ranks() -> None:
    """4 layers of 200,000 parameters: 100,000 of each per rank, sub-groups of two layers."""
    w = chain_workload(4, 200_000)
    zero = {"stage": 3, "sub_group_size": 150_000, "offload_optimizer": CPU, "offload_param": CPU}
    need = deepspeed.MEMORY.host_need(deepspeed.read({"zero_optimization": zero}, "ds.json"), w, TWO_GPUS)
    taken = {a.name.partition(",")[0]: a.taken_bytes for a in need.allocations}
    assert taken == {
        "fp32 masters": 1_600_000,
        "fp32 gradients": 2 * MIB,  # two of 800,000
        "the optimizer's moments": 3_200_000,
        "gradients before the step": MIB,  # one of 800,000
        "parameters": MIB,
        "parameters as they came": 4 * 2**18,  # four of 200,000
    }
    half = {**zero, "offload_optimizer": {**CPU, "ratio": 0.5}, "offload_param": {"device": "none"}}
    need = deepspeed.MEMORY.host_need(deepspeed.read({"zero_optimization": half}, "ds.json"), w, TWO_GPUS)
    assert need.asked_bytes == 16 * 200_000 + 2 * 400_000


def test_a_prediction_asks_the_host_for_the_frameworks_blocks() -> None:
    w = chain_workload(3, 100_000)
    found = deepspeed.read({"zero_optimization": {"stage": 2, "offload_optimizer": CPU}}, "ds.json")
    need = deepspeed.MEMORY.host_need(found, w, ONE_GPU)
    roomy = predict(found, w, round_machine(host_memory_bytes=need.host_bytes), Settings(), label="mine")
    assert roomy.fits and roomy.plan is not None and roomy.plan.policy == "mine"
    assert roomy.plan.check().peak_bytes["host"] == need.host_bytes == roomy.as_fit().host_needed_bytes
    tight = predict(found, w, round_machine(host_memory_bytes=need.host_bytes - 1), Settings(), label="mine")
    assert not tight.fits and (tight.short_of, tight.short_bytes) == ("host", 1)
    assert tight.reason is not None and "rounds pinned blocks up to powers of two" in tight.reason
    small = predict(found, w, round_machine(gpu_memory_bytes=MIB // 4), Settings(), label="mine")
    assert small.short_of == "gpu" and small.reason is not None and small.reason.startswith("mine does not fit")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("ds.txt", "{}", "no framework has files with its ending"),
        ("ds.json", "{", "line 1"),
        ("ds.json", b"\xff", "not a text file"),
        ("ds.json", None, "cannot be read"),
    ],
)
def test_a_file_that_is_none(name: str, text: str | bytes | None, said: str, tmp_path: Any) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(PstarError) as error:
        load_configuration(str(path))
    assert str(path) in str(error.value) and said in str(error.value)


DEVICES = st.sampled_from(["none", "cpu", "nvme"])
SIZES = st.integers(1, 10**9) | st.just("auto")


@settings(max_examples=40, deadline=None)
@given(
    stage=st.sampled_from([0, 1, 2, 3]), states=DEVICES, params=DEVICES, pinned=st.booleans(), ratio=st.floats(0, 1),
    sizes=st.tuples(SIZES, SIZES, SIZES, SIZES), clip=st.sampled_from([0.0, 1.0, "auto"]),
    dtype=st.sampled_from(["bf16", "fp16"]), micro_batches=st.none() | st.integers(1, 64),
    sums=st.none() | st.sampled_from(["fp32", "bf16"]),
)  # fmt: skip
def test_whatever_a_file_says_is_said_again(
    stage: int, states: str, params: str, pinned: bool, ratio: float, sizes: tuple[Any, ...], clip: Any, dtype: str,
    micro_batches: int | None, sums: str | None,
) -> None:  # fmt: skip
    names = ("sub_group_size", "reduce_bucket_size", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
    zero = {
        "stage": stage, "offload_optimizer": {"device": states, "pin_memory": pinned, "ratio": round(ratio, 2)},
        "offload_param": {"device": params, "pin_memory": not pinned}, **dict(zip(names, sizes)),
    }  # fmt: skip
    content = {"zero_optimization": zero, "gradient_clipping": clip, dtype: {"enabled": True}}
    content |= {"gradient_accumulation_steps": micro_batches, "data_types": {"grad_accum_dtype": sums}}
    try:
        found = deepspeed.read(content, "ds.json")
    except PstarError as error:
        assert states == "nvme" and stage < 3 and "needs stage 3" in str(error)
        return
    again = deepspeed.read(json.loads(deepspeed.write(found)), "again.json")
    workload = chain_workload(2, 1000)
    assert again.for_model(workload).policy == found.for_model(workload).policy
    assert again == found
    assert deepspeed.MEMORY.host_need(again, workload, TWO_GPUS) == deepspeed.MEMORY.host_need(
        found, workload, TWO_GPUS
    )


def test_parameters_alone_are_offloaded() -> None:
    """Per rank of 8 with N parameters: 16 N / 8 of states and fp32 gradients on the GPU, 2 N / 8 of parameters on the
    host, which go down once an iteration: the updated ones."""
    content = {
        "zero_optimization": {"stage": 3, "offload_param": CPU},
        "bf16": {"enabled": True},
        "gradient_clipping": 1,
    }
    found = deepspeed.read(content, "ds.json")
    assert found.options["ratio"] == 0 and found.options["params"] == "cpu" and not found.notes
    assert deepspeed.read(json.loads(deepspeed.write(found)), "ds.json") == found
    w, machine = preset("gpt2", batch=1, seq=64, dtype="bf16"), load_machine("a100-80x8")
    plan = find_policy(found.policy)(w, machine, Settings())
    plan.check()
    layout = plan.layout
    own = sum(layout.slice_numel(c) for c in range(len(layout.chunks)))
    kept = sum(layout.slice_numel(c.index) for c in layout.chunks if c.small)  # whole on every GPU
    whole = sum(layout.whole_bytes(c.index) for c in layout.chunks if c.small)
    gpu = sum(layout.payload_bytes(r.chunk, r.list) for r in plan.initial if r.place is Place.GPU)
    buffers = sum(size for name, place, size in plan.buffers if "optimizer" in name)
    assert gpu + buffers == 16 * own + whole
    moved = play(plan).moved_bytes
    assert moved["d2h"] == moved["h2d"] == 2 * (own - kept)  # up once: all is used again soon
    host = deepspeed.MEMORY.host_need(found, w, machine)
    assert {a.name for a in host.allocations} == {"parameters", "parameters as they came, which PyTorch keeps"}
    both = preset("gpt2", batch=1, seq=64, micro_batches=2, dtype="bf16")
    find_policy(found.policy)(both, machine, Settings()).check()


def test_twin_flow_with_offloaded_parameters_keeps_none_of_them_on_the_gpu() -> None:
    w, machine = preset("gpt2", batch=1, seq=64, dtype="bf16"), load_machine("a100-80")
    plan = find_policy("zero3_offload:params=cpu,ratio=0.5,subgroup=10000000")(w, machine, Settings())
    small = {c.index for c in plan.layout.chunks if c.small}
    plan.check()
    assert {r.chunk for r in plan.initial if r.list == "param" and r.place is Place.GPU} == small


@pytest.mark.parametrize(
    ("kind", "params", "name"),
    [
        ("Adam", {}, "adamw"),
        ("Adam", {"adam_w_mode": False}, "adam"),
        ("AdamW", {"adam_w_mode": False}, "adamw"),
        ("Lion", {}, "lion"),
        ("Muon", {"momentum": 0.95}, "muon"),
        ("SGD", {}, "sgd"),
        ("SGD", {"momentum": 0.9}, "sgd-momentum"),
        ("MuAdam", {}, "adam"),
        ("OneBitAdam", {}, None),
        ("Adagrad", {}, None),
    ],
)
def test_optimizers_by_their_types(kind: str, params: dict[str, object], name: str | None) -> None:
    """DeepSpeed's Adam is AdamW unless adam_w_mode is off."""
    content = {"optimizer": {"type": kind, "params": params}, "zero_optimization": {"stage": 3}}
    configuration = deepspeed.read(content, "ds.json")
    assert configuration.optimizer == (name or "adamw")
    notes = [note for note in configuration.notes if "optimizer.type" in note]
    assert notes == ([] if name else [f"not modelled: optimizer.type = {kind}: predicted as AdamW"])


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "adamw-bf16-states", "muon", "sgd", "sgd-momentum"])
def test_a_plan_for_an_optimizer_of_deepspeed_is_written_as_it(name: str) -> None:
    w = preset("gpt2", batch=1, seq=64, optimizer=name)
    plan = find_policy("zero_offload")(w, load_machine("a100-40"), Settings(clip=True))
    expressed = deepspeed.express(plan)
    assert expressed.configuration.optimizer == name
    assert deepspeed.read(json.loads(deepspeed.write(expressed.configuration)), "ds.json").optimizer == name
    assert not [limit for limit in expressed.cannot if "optimizer" in limit]


@pytest.mark.parametrize("name", ["adamw-8bit", "adafactor", "muon"])
def test_each_file_names_the_optimizer_or_says_which_it_names_instead(name: str) -> None:
    """What is predicted is the optimizer of the file; where the script makes the optimizer, that of the plan."""
    w = preset("gpt2", batch=1, seq=64, optimizer=name, masters="none")
    plan = find_policy("zero_offload")(w, load_machine("a100-40"), Settings(clip=True))
    for target in TARGETS.values():
        expressed = target.express(plan)
        written = expressed.configuration.optimizer
        limits = [limit for limit in expressed.cannot if limit.startswith(f"the optimizer {name}: ")]
        assert len(limits) == (written != name)
        assert all(f"{written} instead" in limit or "the script makes" in limit for limit in limits)
        assert f"training without fp32 masters: predicted with those of {target.name}" in expressed.cannot
        job, _ = job_left(plan, expressed.configuration)
        assert (job.optimizer.name, job.optimizer.masters) == (written or name, "fp32")
