"""Names of other tools and other spellings: answered as the same thing, or said not to be modelled."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.model_shapes import model_entry
from pstar_sim.cli import main
from pstar_sim.errors import ModelError, UnknownName
from pstar_sim.policy.registry import own_words

JOB = ["--model", "1B", "--batch", "8", "--machine", "a100-80x8"]


@pytest.mark.parametrize(
    ("typed", "own"),
    [
        ("fsdp", "zero3_resident"),
        ("FSDP2", "zero3_resident"),
        ("zero3", "zero3_resident"),
        ("ZeRO-2", "zero3_resident:reshard=off"),
        ("ddp", "all_on_gpu"),
        ("zero-offload", "zero_offload"),
        ("Zero3-Offload", "zero3_offload"),
        ("zero2:adam=foreach", "zero3_resident:reshard=off,adam=foreach"),
        ("tide:capacity=peak", "tide:capacity=peak"),
        ("mine", "mine"),
        ("auto", "auto"),
    ],
)
def test_a_policy_has_other_names_elsewhere(typed: str, own: str) -> None:
    assert own_words(typed) == own


def test_an_answer_is_that_of_the_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for policies, seq in ((["ddp", "fsdp"], "512"), (["all_on_gpu", "zero3_resident"], "512")):
        flags = [word for name in policies for word in ("--policy", name)]
        assert main(["compare", *JOB, "--seq", seq, *flags, "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["rows"] == answers[1]["rows"]
    assert any("zero3_resident is FSDP" in note for note in answers[0]["notes"])


@pytest.mark.parametrize(("typed", "count"), [("16k", 16384), ("4K", 4096), ("1M", 1048576), ("300", 300)])
def test_tokens_as_people_count_them(typed: str, count: int) -> None:
    from pstar_sim.cli.flag_values import tokens

    assert tokens(typed) == count


@pytest.mark.parametrize(
    ("typed", "own"),
    [
        ("8xA100-80", "a100-80x8"), ("8 x A100-80", "a100-80x8"), ("H100", "h100-80"), ("8xH100", "h100-80x8"),
        ("h100x8", "h100-80x8"), ("H100-80GB", "h100-80"), ("RTX 3090", "rtx3090-64gb"), ("3090", "rtx3090-64gb"),
        ("rtx3090", "rtx3090-64gb"), ("rtx 3090", "rtx3090-64gb"), ("8 x rtx3090", "rtx3090x8"),
        ("H100 SXM", "h100-80"), ("H100 SXM5", "h100-80"),
    ],
)  # fmt: skip
def test_a_gpu_is_the_only_machine_that_has_so_many_of_it(typed: str, own: str) -> None:
    assert load_machine(typed).name == own


@pytest.mark.parametrize("typed", ["A100", "8xA100", "v100", "4090", "10", "x8", "8x"])
def test_a_gpu_of_several_machines_is_none_of_them(typed: str) -> None:
    with pytest.raises(UnknownName, match=f"unknown machine '{typed}'; did you mean|known: "):
        load_machine(typed)


def test_near_names_are_near_in_letters_alone() -> None:
    for typed, near in (("Gemma 3", "gemma-3-12b"), ("qwen 2.5", "qwen2.5-0.5b"), ("deepseek v3.1", "deepseek-v3")):
        with pytest.raises(UnknownName, match=f"did you mean {re.escape(near)}"):
            model_entry(typed)


@pytest.mark.parametrize(
    ("typed", "own"),
    [
        ("Llama 3.1 8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
    ],
)
def test_a_model_as_the_hub_names_it(typed: str, own: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where its configuration is not in the local cache; another model of the hub has no such name here."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert model_entry(typed).name == own
    with pytest.raises(ModelError, match=r"no config\.json of 'foo/bar'"):
        model_entry("foo/bar")


@pytest.mark.parametrize(
    ("typed", "own"),
    [
        (["--kernels", "liger", "--loss", "liger"], ["--kernels", "fused", "--loss", "fused"]),
        (["--dtype", "bfloat16", "--attention", "flash_attention_2"], ["--dtype", "bf16", "--attention", "fa2"]),
    ],
)
def test_values_of_flags_have_other_names_elsewhere(
    typed: list[str], own: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for flags in (typed, own):
        assert main(["fits", *JOB, "--seq", "512", "--policy", "ddp", *flags, "--json"]) == 0
        rows.append(json.loads(capsys.readouterr().out)["rows"])
    assert rows[0] == rows[1]


def test_another_number_of_gpus_names_the_flag() -> None:
    with pytest.raises(UnknownName, match=r"'7xa100-80'; known: a100-80, a100-80x8 \(with --gpus 7, "):
        load_machine("7xa100-80")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--policy", "megatron"],
            "tensor, context and pipeline parallelism are no policies: `pstar compare --parallel auto`",
        ),
        (["--policy", "TP"], "tensor, context and pipeline parallelism are no policies"),
        (["--pp", "2"], "unknown flag '--pp'; tensor, context and pipeline parallelism are no policies"),
        (["--liger"], "Liger's kernels are --kernels fused, and its loss is --loss fused"),
        (["--policy", "qlora"], "unknown policy 'qlora'; a base in 4 bits is --base nf4 beside --lora r=16"),
        (["--load-in-4bit"], "a base in 4 bits is --base nf4 beside --lora r=16"),
        (["--lora", "qlora"], "--lora qlora: 'qlora' is not r=RANK"),
        (["--lora", "QLoRA"], "a base in 4 bits is --base nf4 beside --lora r=16"),
        (["--model", "7b"], "unknown model '7b'; did you mean mpt-7b, qwen-7b, llama-7b?"),
        (["--machine", "TPU-v5e"], "unknown machine 'TPU-v5e'; not modelled: accelerators that are no GPUs"),
        (["--deepspeed"], "unknown flag '--deepspeed'; stages are --policy zero1, zero2, zero3"),
        (["--zero", "3"], "unknown flag '--zero'; stages are --policy zero1, zero2, zero3"),
        (["--fsdp"], "it is --policy ddp (all_on_gpu), zero2 or fsdp (zero3_resident)"),
        (["--dtype", "fp8"], "products in fp8 are --products fp8, and frozen weights in fp8 --base fp8"),
        (["--ep", "8"], "unknown flag '--ep'; ranks that share experts are --parallel ep=N"),
        (["--vram", "24GB"], "the GPU's memory is --gpu-memory SIZE"),
        (["--grad-accum", "4"], "accumulation is --micro-batches N"),
        (["--optimizer", "galore"], "unknown optimizer 'galore'; known: "),
        (["--optimizer", "8bit-adam"], "(AdamW in 8 bits is --optimizer adamw-8bit)"),
        (["--seq", "16q"], "argument --seq: must be a whole number, not '16q'"),
        (["--seq", "0k"], "argument --seq: must be at least 1 and less than a billion, not 0k"),
        (["--machine", "A100"], "unknown machine 'A100'; did you mean a100-40, a100-80? ("),
        (["--machine", "8xA100"], "unknown machine '8xA100'; did you mean a100-80x8, a100-40x8? ("),
        (["--machine", "2x3090"], "unknown machine '2x3090'; known: rtx3090-64gb, rtx3090x8 (with --gpus 2, "),
        (["--machine", "16xV100"], "unknown machine '16xV100'; known: dgx2 ("),
    ],
)
def test_what_is_not_modelled_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["compare", *JOB, "--seq", "512", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
