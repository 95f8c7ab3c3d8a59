"""Checkpoints: a folder that transformers loads, that appears atomically, and that says what is wrong."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash
from torch import nn

import executor
from executor.saving import whole_folder
from executor.saving.as_json import decode, encode
from executor.saving.checkpoint import save
from executor.saving.manifest import CHECKSUM, MANIFEST, is_checkpoint
from executor.saving.restoring import stored_extra
from pstar_sim.errors import CheckpointError, ContractError, WeightsError


def trained(start: Callable[..., Any], kit: Any, name: str = "gpt2", policy: str = "tide", **options: Any) -> Any:
    """A run with two steps behind it."""
    run = start(name, policy, **options)
    for _ in range(2):
        kit.train_alone(run.model, run.optimizer, run.batches, run.plan.workload.micro_batches)
    return run


def current(run: Any) -> dict[str, torch.Tensor]:
    return {n: torch.as_tensor(t).clone() for n, t in run.model.state_dict().items()}


# -- the folder -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_transformers_loads_it(start: Callable[..., Any], kit: Any, tmp_path: Path, name: str) -> None:
    run = trained(start, kit, name, dtype=torch.bfloat16)
    run.optimizer.save(tmp_path / "c")
    loaded, report = type(run.model).from_pretrained(tmp_path / "c", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert loaded.dtype == torch.bfloat16
    mine = current(run)
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, mine[key]), key
    if name != "llama":
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_shards_have_the_index_that_transformers_reads(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    run = trained(start, kit)
    save(run.optimizer, tmp_path / "c", shard_bytes=30_000)
    names = sorted(p.name for p in tmp_path.joinpath("c").iterdir())
    assert "model.safetensors.index.json" in names and sum(n.startswith("model-0") for n in names) > 2
    assert sum(n.startswith("optimizer-0") for n in names) > 2
    loaded = type(run.model).from_pretrained(tmp_path / "c")
    assert all(torch.equal(v, current(run)[k]) for k, v in loaded.state_dict().items())


def test_states_are_readable_by_name(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    run = trained(start, kit, dtype=torch.bfloat16)
    run.optimizer.save(tmp_path / "c", extra={"epoch": 3})
    states = safetensors.torch.load_file(tmp_path / "c" / "optimizer.safetensors")
    for index, tensor in enumerate(run.plan.workload.tensors):
        if tensor.tied_to is None:
            for list_name in ("param32", "momentum", "variance"):
                assert torch.equal(
                    states[f"{list_name}/{tensor.name}"], run.session.reader.state_value(index, list_name)
                )
    manifest = json.loads((tmp_path / "c" / MANIFEST).read_text())
    assert manifest["iteration"] == 2 and set(manifest["updates"].values()) == {2}
    assert manifest["groups"][0]["numbers"]["lr"] == 1e-2
    assert stored_extra(tmp_path / "c").extra == {"epoch": 3}


def test_fp32_weights_are_the_masters_and_saved_once(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    run = trained(start, kit)
    run.optimizer.save(tmp_path / "c")
    states = safetensors.torch.load_file(tmp_path / "c" / "optimizer.safetensors")
    assert not any(key.startswith("param32/") for key in states)
    numbers = sum(t.numel for t in run.plan.workload.tensors if t.tied_to is None)
    size = sum(p.stat().st_size for p in (tmp_path / "c").glob("*.safetensors"))
    assert 12 * numbers < size < 12 * numbers + 40_000  # 4 B of each list; headers and generators beside


def test_a_tokenizer_in_the_folder_stays_and_a_foreign_folder_is_refused(
    start: Callable[..., Any], kit: Any, tmp_path: Path
) -> None:
    run = trained(start, kit, "mlp")
    run.optimizer.save(tmp_path / "c")
    (tmp_path / "c" / "tokenizer.json").write_text("{}")
    (tmp_path / "c" / "runs").mkdir()
    (tmp_path / "c" / "runs" / "log").write_text("x")
    run.optimizer.save(tmp_path / "c")
    assert (tmp_path / "c" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "c" / "runs" / "log").read_text() == "x"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(CheckpointError, match="holds other files and no checkpoint"):
        run.optimizer.save(tmp_path / "mine")
    with pytest.raises(CheckpointError, match="it is a file"):
        run.optimizer.save(tmp_path / "mine" / "thesis.txt")


def test_a_save_that_fails_leaves_the_one_before(
    start: Callable[..., Any], kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(start, kit, "mlp")
    run.optimizer.save(tmp_path / "c")
    kit.train_alone(run.model, run.optimizer, run.batches, 1)
    full, written = os.write, []

    def disk_full(descriptor: int, content: Any) -> int:
        written.append(len(content))
        if len(written) > 3:
            raise OSError(28, "No space left on device")
        return full(descriptor, bytes(content[:1000]))  # short writes on the way

    monkeypatch.setattr("executor.saving.tensor_files.os.write", disk_full)
    with pytest.raises(
        CheckpointError,
        match=r"cannot be saved in .*/c: No space left on device \(while writing\); what was there before",
    ):
        run.optimizer.save(tmp_path / "c")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert stored_extra(tmp_path / "c").iteration == 2
    run.optimizer.save(tmp_path / "c")
    assert stored_extra(tmp_path / "c").iteration == 3


def test_short_writes_are_gone_on_with(
    start: Callable[..., Any], kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(start, kit, "mlp")
    full = os.write
    monkeypatch.setattr("executor.saving.tensor_files.os.write", lambda d, c: full(d, bytes(c[:777])))
    run.optimizer.save(tmp_path / "c")
    stored = safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")
    assert all(torch.equal(v, stored[k]) for k, v in current(run).items())


# -- whole or not there -----------------------------------------------------------------------------------------------


def fill(folder: Path, word: str) -> None:
    temporary = whole_folder.begin(folder)
    (temporary / "word").write_text(word)


@pytest.mark.parametrize("swap", [None, lambda one, other: False], ids=["exchange", "renames"])
def test_a_folder_is_replaced(tmp_path: Path, swap: Any) -> None:
    for word in ("first", "second", "third"):
        fill(tmp_path / "f", word)
        whole_folder.finish(tmp_path / "f", {"word"}, swap)
        assert [p.name for p in tmp_path.iterdir()] == ["f"]
        assert (tmp_path / "f" / "word").read_text() == word


def test_between_two_renames_the_older_one_is_found(tmp_path: Path) -> None:
    def whole(folder: Path) -> bool:
        return (folder / "word").exists()

    fill(tmp_path / "f", "first")
    whole_folder.finish(tmp_path / "f", ())
    fill(tmp_path / "f", "second")
    (tmp_path / "f").rename(tmp_path / ".f.previous")  # killed here
    assert (whole_folder.find(tmp_path / "f", whole) / "word").read_text() == "first"
    fill(tmp_path / "f", "third")
    whole_folder.finish(tmp_path / "f", ())
    assert (whole_folder.find(tmp_path / "f", whole) / "word").read_text() == "third"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_the_exchange_is_one_system_call_here(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    if not whole_folder.exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange two folders")
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()


# -- a user's own state -----------------------------------------------------------------------------------------------


def test_extra_comes_back_as_it_was(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    run = trained(start, kit, "mlp")
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2)
    extra = {
        "scheduler": scheduler.state_dict(),
        "nested": [(1, 2.5), None, {3: "three"}],
        "average": {"w": torch.arange(3.0), "n": torch.tensor(4)},
    }
    run.optimizer.save(tmp_path / "c", extra=extra)
    found = run.optimizer.load(tmp_path / "c")
    assert found.iteration == 2
    assert found.extra["scheduler"] == extra["scheduler"] and found.extra["nested"] == extra["nested"]
    assert torch.equal(found.extra["average"]["w"], torch.arange(3.0)) and int(found.extra["average"]["n"]) == 4


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"extra\['a'\]\[1\] is a object"):
        encode({"a": [1, object()]}, {}, "extra")
    assert decode(encode({"$tuple": 1}, {}, "x"), {}) == {"$tuple": 1}


# -- what is refused --------------------------------------------------------------------------------------------------


def test_not_inside_an_iteration(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    run = trained(start, kit)
    run.optimizer.save(tmp_path / "c")
    loss = kit.loss_of(run.model, next(run.batches))
    for call in (run.optimizer.save, run.optimizer.load):
        with pytest.raises(ContractError, match="inside an iteration"):
            call(tmp_path / "c")
    loss.backward()
    with pytest.raises(ContractError, match="inside an iteration"):
        run.optimizer.save(tmp_path / "c")
    run.optimizer.step()
    run.optimizer.save(tmp_path / "c")
    assert stored_extra(tmp_path / "c").iteration == 3


def change(folder: Path, **values: Any) -> None:
    """Edit the manifest, whose checksum follows."""
    fields = {**json.loads((folder / MANIFEST).read_text()), **values}
    del fields[CHECKSUM]
    fields[CHECKSUM] = xxhash.xxh3_64_hexdigest(json.dumps(fields).encode())
    (folder / MANIFEST).write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "break_it, match",
    [
        (lambda f: (f / MANIFEST).unlink(), "is not a whole checkpoint: pstar.json, which is written last, is missing"),
        (lambda f: (f / "optimizer.safetensors").unlink(), "is partial: optimizer.safetensors is missing"),
        (lambda f: os.truncate(f / "optimizer.safetensors", 5000), r"optimizer.safetensors has 5000 bytes, \d+ were"),
        (lambda f: (f / MANIFEST).write_text('{"format": "pstar'), "cannot be read"),
        (lambda f: (f / MANIFEST).write_text("[]"), "is not the manifest of a checkpoint"),
        (lambda f: change(f, schema=3), "is of schema 3, written by pstar-sim .* reads up to 2: upgrade"),
        (lambda f: change(f, files={}), "model.safetensors is not one of its files"),
        (lambda f: change(f, files=[]), r"pstar.json: field 'files' is \[\]; it must be an object"),
        (
            lambda f: change(f, updates={"layers.0.weight": "2"}),
            r"field 'updates\.layers\.0\.weight' is \"2\"; it must",
        ),
        (lambda f: change(f, groups=[]), "optimizer groups of .* give AdamW the groups"),
        (lambda f: change(f, extra={"$tensor": "extra"}), "field 'extra' holds the tensor 'extra', which extra.safet"),
    ],
    ids=["partial", "shard", "size", "json", "foreign", "newer", "files", "kind", "number", "groups", "extra"],
)
def test_a_broken_checkpoint_is_refused_and_nothing_changes(
    start: Callable[..., Any], kit: Any, tmp_path: Path, break_it: Callable[[Path], Any], match: str
) -> None:
    run = trained(start, kit, "mlp")
    run.optimizer.save(tmp_path / "c")
    kit.train_alone(run.model, run.optimizer, run.batches, 1)
    before = current(run)
    break_it(tmp_path / "c")
    with pytest.raises(CheckpointError, match=match) as caught:
        run.optimizer.load(tmp_path / "c")
    assert "\n" not in str(caught.value)
    assert all(torch.equal(v, before[k]) for k, v in current(run).items())


def flipped(path: Path, place: int) -> None:
    """One bit of one byte is another."""
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << place % 7
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
    "text": lambda path: path.write_text("not what it was"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "zeros of its size": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    **{f"byte {place}": functools.partial(flipped, place=place) for place in (0, 9, 100, 1003, 4321, -200, -1)},
}


@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 30_000], ids=["whole", "shards"])
def test_every_damage_of_every_file_is_found_before_anything_changes(
    start: Callable[..., Any], kit: Any, tmp_path: Path, shard_bytes: int
) -> None:
    run = trained(start, kit, "mlp")
    folder = save(run.optimizer, tmp_path / "c", extra={"average": torch.ones(3)}, shard_bytes=shard_bytes)
    kit.train_alone(run.model, run.optimizer, run.batches, 1)
    before, generator = current(run), torch.get_rng_state()
    names = sorted(path.name for path in folder.iterdir())
    assert MANIFEST in names and "extra.safetensors" in names and len(names) == (4 if shard_bytes > 10**6 else 12)
    for name in names:
        content = (folder / name).read_bytes()
        for what, damage in DAMAGE.items():
            damage(folder / name)
            with pytest.raises(CheckpointError) as caught:
                run.optimizer.load(folder)
                pytest.fail(f"{name}: {what}")
            said = str(caught.value)
            assert name in said and "\n" not in said, (what, said)
            (shutil.rmtree if (folder / name).is_dir() else Path.unlink)(folder / name, True)
            (folder / name).write_bytes(content)
    assert all(torch.equal(v, before[k]) for k, v in current(run).items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert run.optimizer.load(folder).iteration == 2


def test_files_of_two_checkpoints_are_no_checkpoint(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    """Both files are sound, and of the size that the manifest says."""
    run = trained(start, kit, "mlp")
    run.optimizer.save(tmp_path / "early")
    kit.train_alone(run.model, run.optimizer, run.batches, 1)
    run.optimizer.save(tmp_path / "late")
    shutil.copy(tmp_path / "early" / "model.safetensors", tmp_path / "late")
    with pytest.raises(CheckpointError, match=r"is damaged: model.safetensors has the checksum [0-9a-f]{16}, [0-9a-f]"):
        run.optimizer.load(tmp_path / "late")
    assert run.optimizer.load(tmp_path / "late", checksums=False).iteration == 3


def test_a_checkpoint_without_checksums_loads_and_says_so(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    """As the first schema was: sizes alone. What can be seen without checksums is refused still."""
    run = trained(start, kit, "mlp")
    run.optimizer.save(tmp_path / "c")
    fields = json.loads((tmp_path / "c" / MANIFEST).read_text())
    del fields[CHECKSUM]
    fields |= {"schema": 1, "files": {name: file["bytes"] for name, file in fields["files"].items()}}
    (tmp_path / "c" / MANIFEST).write_text(json.dumps(fields))
    assert run.optimizer.load(tmp_path / "c").note.endswith("no checksums (an earlier version wrote it): damaged "
                                                            "values are not found")  # fmt: skip
    content = (tmp_path / "c" / "optimizer.safetensors").read_bytes()
    states = safetensors.torch.load(content)
    for name, damaged in (("python", b"[3, ["), ("numpy", b'["MT19937", 1'), ("torch", bytes(9))):
        state = bytes(states[f"random.0/{name}"].numpy())
        broken = content.replace(state, damaged.ljust(len(state), b"\0"))
        (tmp_path / "c" / "optimizer.safetensors").write_bytes(broken)
        with pytest.raises(CheckpointError, match=f"optimizer.safetensors is damaged: .* generator '{name}' is "):
            run.optimizer.load(tmp_path / "c")
    (tmp_path / "c" / "optimizer.safetensors").write_bytes(content.replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(CheckpointError, match="is in I32, which no state is"):
        run.optimizer.load(tmp_path / "c")


def test_another_model_is_named(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    trained(start, kit, "gpt2").optimizer.save(tmp_path / "c")
    other = start("mlp", "tide")
    named = r"of another model \('gpt2'\): only the checkpoint has lm_head.weight, .* 25 more"
    with pytest.raises(CheckpointError, match=named):
        other.optimizer.load(tmp_path / "c")
    assert not is_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is not a folder"):
        other.optimizer.load(tmp_path / "nowhere")


def test_a_module_with_a_state_of_its_own_is_named(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    run = trained(start, kit, "mlp")

    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

    run.model.layers[0].__class__ = Counting
    with pytest.raises(CheckpointError, match=r"'layers.0' \(Counting\) has a get_extra_state"):
        run.optimizer.save(tmp_path / "c")


def test_a_checkpoint_is_also_weights(start: Callable[..., Any], kit: Any, tmp_path: Path) -> None:
    run = trained(start, kit)
    run.optimizer.save(tmp_path / "c")
    with executor.parameters_on_meta():
        model, _ = kit.build("gpt2", seed=4)
    twin, optimizer = executor.prepare(model, run.plan, executor.AdamW(), weights=tmp_path / "c")
    assert all(torch.equal(v, current(run)[k]) for k, v in twin.state_dict().items())
    optimizer.session.close()
    flipped(tmp_path / "c" / "model.safetensors", -9)
    with pytest.raises(WeightsError, match=r"model.safetensors has the checksum"):
        executor.prepare(kit.build("gpt2")[0], run.plan, executor.AdamW(), weights=tmp_path / "c")
