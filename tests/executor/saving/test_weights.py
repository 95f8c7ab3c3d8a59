"""Real weights: folders of safetensors go straight into chunks, with fp32 masters made on the way."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash
from torch import nn

import executor
from executor.saving.tensor_files import (
    StoredFile,
    TensorFile,
    TensorToStore,
    piece_buffer,
    stored_file,
    write_tensor_file,
)
from executor.saving.weights import Weights
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Place
from pstar_sim.errors import WeightsError


def saved(model: Any, folder: Path, **options: Any) -> Path:
    """The folder that transformers writes."""
    model.save_pretrained(folder, **options)
    return folder


def empty_twin(kit: Any, name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same model with other values, its parameters on meta."""
    with executor.parameters_on_meta():
        model, _ = kit.build(name, seed=7)
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    return model.to(dtype)


def plan_of(kit: Any, name: str, dtype: torch.dtype, policy: str = "tide") -> tuple[Any, Any]:
    model, draw = kit.build(name)
    batch = draw(torch.Generator().manual_seed(9))
    return kit.tight_plan(policy, kit.workload_of(model.to(dtype), batch, name=name), Settings(clip=False)), draw


# -- the format -------------------------------------------------------------------------------------------------------


def test_what_we_write_safetensors_reads_and_the_other_way_round(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.randn(5).bfloat16(),
        "c": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
    }
    rows = [TensorToStore(n, t.dtype, tuple(t.shape), lambda t=t: [t]) for n, t in tensors.items()]
    written = write_tensor_file(tmp_path / "ours.safetensors", rows, piece_buffer(16), {"format": "pt"})
    content = (tmp_path / "ours.safetensors").read_bytes()
    assert written == StoredFile(len(content), xxhash.xxh3_64_hexdigest(content))
    assert written == stored_file(tmp_path / "ours.safetensors", piece_buffer(16))
    theirs = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours = TensorFile(tmp_path / "theirs.safetensors")
    assert theirs.keys() == tensors.keys() == ours.entries.keys()
    for name, tensor in tensors.items():
        assert torch.equal(theirs[name], tensor) and theirs[name].dtype == tensor.dtype
        assert torch.equal(ours.read(name), tensor) and ours.read(name).dtype == tensor.dtype


def test_a_tensor_comes_in_pieces_of_the_buffer(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.arange(10, dtype=torch.float32)}, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path / "x.safetensors")
    with file.opened() as descriptor:  # 16 bytes hold four of them: elements 3..6 and 7..8
        pieces = [(i, p.tolist()) for i, p in file.pieces(descriptor, "x", piece_buffer(16), 3, 9)]
    assert pieces == [(3, [3.0, 4.0, 5.0, 6.0]), (7, [7.0, 8.0])]


def test_a_row_of_another_dtype_is_cast_piece_by_piece(tmp_path: Path) -> None:
    value = torch.randn(37)
    rows = [TensorToStore("x", torch.bfloat16, (37,), lambda: [value[:20], value[20:]])]
    write_tensor_file(tmp_path / "x.safetensors", rows, piece_buffer(16))
    assert torch.equal(safetensors.torch.load_file(tmp_path / "x.safetensors")["x"], value.bfloat16())


# -- into chunks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("shards", [False, True])
def test_a_model_without_memory_trains_as_the_one_whose_weights_were_saved(
    kit: Any, tmp_path: Path, name: str, shards: bool
) -> None:
    plan, draw = plan_of(kit, name, torch.float32)
    model, _ = kit.build(name)
    folder = saved(model, tmp_path / "w", **({"max_shard_size": "20KB"} if shards else {}))
    assert (folder / "model.safetensors.index.json").exists() is shards
    losses = []
    for one, weights in ((model, None), (empty_twin(kit, name), folder)):
        one, optimizer = executor.prepare(one, plan, executor.AdamW(lr=1e-2), weights=weights)
        rows = kit.batches(draw)
        losses.append([kit.train_alone(one, optimizer, rows, 1) for _ in range(3)])
        optimizer.session.close()
    assert losses[0] == losses[1]


def test_parameters_stay_the_objects_they_were(kit: Any, tmp_path: Path) -> None:
    plan, _ = plan_of(kit, "gpt2", torch.float32)
    model, _ = kit.build("gpt2")
    folder = saved(model, tmp_path / "w")
    twin = empty_twin(kit, "gpt2")
    before = [id(p) for p in twin.parameters()]
    groups = [{"params": list(twin.parameters()), "lr": 1e-3}]
    twin, optimizer = executor.prepare(twin, plan, executor.AdamW(groups), weights=folder)
    assert [id(p) for p in twin.parameters()] == before
    assert twin.lm_head.weight is twin.transformer.wte.weight
    optimizer.session.close()
    assert all(torch.equal(p, q) for p, q in zip(twin.parameters(), model.parameters()))


def test_an_fp32_file_under_a_bf16_plan_gives_masters_of_the_files_values(kit: Any, tmp_path: Path) -> None:
    plan, _ = plan_of(kit, "llama", torch.bfloat16)
    model, _ = kit.build("llama")
    folder = saved(model, tmp_path / "w")
    twin, optimizer = executor.prepare(empty_twin(kit, "llama", torch.bfloat16), plan, executor.AdamW(), weights=folder)
    session = optimizer.session
    for index, (name, value) in enumerate(model.named_parameters()):
        assert torch.equal(session.reader.state_value(index, "param32"), value), name
        assert torch.equal(twin.state_dict()[name], value.bfloat16()), name
    assert "float32: fp32 masters from the file's values, working copies in bf16" in optimizer.session.weights_note
    session.close()


def test_a_bf16_file_under_an_fp32_plan(kit: Any, tmp_path: Path) -> None:
    plan, _ = plan_of(kit, "llama", torch.float32)
    model, _ = kit.build("llama")
    folder = saved(copy.deepcopy(model).bfloat16(), tmp_path / "w")
    twin, optimizer = executor.prepare(empty_twin(kit, "llama"), plan, executor.AdamW(), weights=folder)
    for name, value in model.named_parameters():
        assert torch.equal(twin.state_dict()[name], value.bfloat16().float()), name
    optimizer.session.close()


def test_states_of_pinned_chunks_take_no_host_room_and_get_their_values(kit: Any, tmp_path: Path) -> None:
    plan, _ = plan_of(kit, "gpt2", torch.float32, "all_on_gpu")
    model, _ = kit.build("gpt2")
    folder = saved(model, tmp_path / "w")
    _, optimizer = executor.prepare(empty_twin(kit, "gpt2"), plan, executor.AdamW(), weights=folder)
    arena = optimizer.session.arena
    assert arena.slabs.room.total_bytes == 0 and arena.payload_bytes(Place.HOST) == 0
    assert torch.equal(optimizer.session.reader.state_value(0, "param32"), model.transformer.wte.weight)
    optimizer.session.close()


def test_chunks_that_are_not_on_the_gpu_have_no_memory_there_after_prepare(start: Callable[..., Any]) -> None:
    session = start("gpt2", "tide").session
    session.queues.pause()
    held = {(r.chunk, r.list) for r in session.arena.present if r.place is Place.GPU}
    absent = [c.index for c in session.plan.layout.chunks if (c.index, "param") not in held]
    assert absent
    assert all(session.arena.at(Place.GPU, c, "param").untyped_storage().nbytes() == 0 for c in absent)
    session.queues.resume()


@pytest.mark.parametrize("way", ["without", "with"])
def test_the_prefix_of_the_base_model_may_be_there_or_not(kit: Any, tmp_path: Path, way: str) -> None:
    import transformers

    whole, _ = kit.build("gpt2")
    if way == "without":  # as the gpt2 of the hub: wte.weight, and masks that are buffers no more
        values = {n: p.clone() for n, p in whole.transformer.named_parameters()}
        values["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
        model: Any = whole
    else:
        values = {n: p.clone() for n, p in whole.named_parameters()}
        model = transformers.GPT2Model(whole.config)
    safetensors.torch.save_file(values, tmp_path / "model.safetensors")
    weights = Weights(tmp_path)
    weights.match(model, executor.moments.recorder.describe_parameters(model)[0])
    assert weights.note


def test_buffers_of_the_state_dict_come_from_the_file(kit: Any, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))

    model = build()
    model[1].running_mean.copy_(torch.arange(16.0))
    model[1].num_batches_tracked.fill_(5)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        twin = build()
    weights = Weights(tmp_path)
    weights.match(twin, executor.moments.recorder.describe_parameters(twin)[0])
    weights.fill_buffers()
    assert torch.equal(twin[1].running_mean, torch.arange(16.0)) and int(twin[1].num_batches_tracked) == 5


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_adapters_over_a_base_from_a_folder(kit: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, draw = kit.build("llama")
    folder = saved(base, tmp_path / "w")

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    real = adapted(copy.deepcopy(base))
    batch = draw(torch.Generator().manual_seed(9))
    plan = kit.tight_plan("tide", kit.workload_of(real, batch), Settings(update="step", clip=False))
    with executor.parameters_on_meta():
        empty, _ = kit.build("llama", seed=7)
    empty = adapted(empty)
    torch.manual_seed(3)
    empty, optimizer = executor.prepare(empty, plan, executor.AdamW(lr=1e-2), weights=folder)
    values = empty.state_dict()
    for name, value in real.state_dict().items():
        if ".lora_A." in name:  # initialised by peft: not zero, and not what was drawn before
            assert float(values[name].abs().max()) > 0
        else:
            assert torch.equal(values[name], value), name
    before = {n: torch.as_tensor(v).clone() for n, v in values.items()}
    kit.train_alone(empty, optimizer, kit.batches(draw), 1)
    changed = {n for n, v in empty.state_dict().items() if not torch.equal(v, before[n])}
    assert changed and all(".lora_B." in n or ".lora_A." in n for n in changed)
    optimizer.save(tmp_path / "c")
    optimizer.load(tmp_path / "c")
    optimizer.session.close()


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(kit: Any, name: str, folder: Path, match: str, twin: nn.Module | None = None) -> None:
    """prepare raises one clear error, and the model is as it was."""
    plan, _ = plan_of(kit, name, torch.float32)
    twin = empty_twin(kit, name) if twin is None else twin
    with pytest.raises(WeightsError, match=match) as caught:
        executor.prepare(twin, plan, executor.AdamW(), weights=folder)
    assert "\n" not in str(caught.value)
    assert all(p.is_meta and type(p) is nn.Parameter for p in twin.parameters())


def test_missing_extra_and_misshapen_tensors_are_named_in_one_error(kit: Any, tmp_path: Path) -> None:
    model, _ = kit.build("gpt2")
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    del values["transformer.h.0.mlp.c_fc.bias"], values["transformer.ln_f.bias"]
    values["classifier.weight"] = torch.zeros(3)
    values["transformer.wpe.weight"] = torch.zeros(16, 32)
    safetensors.torch.save_file(values, tmp_path / "model.safetensors")
    refused(
        kit, "gpt2", tmp_path,
        r"not those of this GPT2LMHeadModel: 2 of the model's tensors missing: transformer.h.0.mlp.c_fc.bias, "
        r"transformer.ln_f.bias; 1 tensors that the model does not have: classifier.weight; 1 of another shape: "
        r"transformer.wpe.weight \(\[16, 32\] in the file, \[32, 32\] in the model\); give the folder",
    )  # fmt: skip


def test_many_missing_tensors_are_counted(kit: Any, tmp_path: Path) -> None:
    safetensors.torch.save_file({"lm_head.weight": torch.zeros(96, 32)}, tmp_path / "model.safetensors")
    refused(kit, "gpt2", tmp_path, r"27 of the model's tensors missing: .* and 23 more")


@pytest.mark.parametrize(
    "break_it, match",
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-9]), r"is truncated: its tensors end at byte \d+, the file has"),
        (lambda p: p.write_bytes(p.read_bytes()[:5]), "is 5 bytes, too short"),
        (lambda p: p.write_bytes(b"\xff" * 64), "its header claims"),
        (lambda p: p.write_bytes(p.read_bytes()[:8] + b"?" + p.read_bytes()[9:]), "its header is not JSON"),
        (lambda p: p.write_bytes(p.read_bytes() + b"0"), "is not sound"),
        (lambda p: p.write_bytes(p.read_bytes().replace(b'"F32"', b'"F64"', 1)), "is corrupt: tensor"),
        (lambda p: p.unlink(), "holds neither model.safetensors nor model.safetensors.index.json"),
        (lambda p: p.rename(p.with_name("pytorch_model.bin")), "it holds pytorch_model.bin: save the model again"),
    ],
    ids=["truncated", "five-bytes", "foreign", "header", "longer", "dtype", "none", "pickle"],
)
def test_a_broken_file_is_refused_by_name(
    kit: Any, tmp_path: Path, break_it: Callable[[Path], Any], match: str
) -> None:
    model, _ = kit.build("gpt2")
    break_it(saved(model, tmp_path) / "model.safetensors")
    refused(kit, "gpt2", tmp_path, match)


def test_a_missing_shard_and_a_foreign_shard_are_named(kit: Any, tmp_path: Path) -> None:
    model, _ = kit.build("gpt2")
    saved(model, tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    (tmp_path / first).rename(tmp_path / "away")
    refused(kit, "gpt2", tmp_path, f"1 of .* shards missing: {first}")
    (tmp_path / first).write_bytes((tmp_path / second).read_bytes())
    refused(kit, "gpt2", tmp_path, f"says that {first} holds .*, which it does not")


def test_no_folder(kit: Any, tmp_path: Path) -> None:
    refused(kit, "gpt2", tmp_path / "nowhere", "nowhere' is not a folder")


def test_buffers_that_no_file_holds_must_not_be_on_meta(kit: Any, tmp_path: Path) -> None:
    model, _ = kit.build("llama")
    saved(model, tmp_path)
    with torch.device("meta"):
        twin, _ = kit.build("llama")
    refused(kit, "llama", tmp_path, r"buffers are on the meta device and no file holds them: model.rotary", twin)


def test_a_model_without_values_needs_weights(kit: Any) -> None:
    plan, _ = plan_of(kit, "gpt2", torch.float32)
    with pytest.raises(WeightsError, match=r"28 parameters and buffers .* give prepare\(\.\.\., weights=FOLDER\)"):
        executor.prepare(empty_twin(kit, "gpt2"), plan, executor.AdamW())


def test_a_file_that_shrinks_while_it_is_read_ends_the_session(kit: Any, tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.zeros(100)}, tmp_path / "x.safetensors")
    file = TensorFile(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:-100])
    with file.opened() as descriptor, pytest.raises(WeightsError, match="changed while it was read"):
        list(file.pieces(descriptor, "x", piece_buffer()))
