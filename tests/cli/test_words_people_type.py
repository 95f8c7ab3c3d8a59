"""Names of other tools and other spellings: answered as the same thing, or said not to be modelled."""

from __future__ import annotations

import json

import pytest

from pstar_sim.catalog.loader import load_machine
from pstar_sim.cli import main
from pstar_sim.errors import UnknownName
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
        answers.append(json.loads(capsys.readouterr().out)["rows"])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("typed", "count"), [("16k", 16384), ("4K", 4096), ("1M", 1048576), ("300", 300)])
def test_tokens_as_people_count_them(typed: str, count: int) -> None:
    from pstar_sim.cli.flag_values import tokens

    assert tokens(typed) == count


def test_the_number_of_gpus_in_front() -> None:
    assert load_machine("8xA100-80").name == "a100-80x8"
    with pytest.raises(UnknownName, match=r"'7xa100-80'; did you mean a100-80"):
        load_machine("7xa100-80")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "megatron"], "tensor and pipeline parallelism are no policies: `pstar compare --parallel auto`"),
        (["--policy", "TP"], "tensor and pipeline parallelism are no policies"),
        (["--pp", "2"], "unknown flag '--pp'; stages of a pipeline are --parallel pp=N"),
        (["--kernels", "liger"], "Liger's kernels are --kernels fused, and its loss is --loss fused"),
        (["--seq", "16q"], "argument --seq: must be a whole number, not '16q'"),
        (["--seq", "0k"], "argument --seq: must be at least 1 and less than a billion, not 0k"),
        (["--machine", "A100"], "unknown machine 'A100'; did you mean a100-40"),
    ],
)
def test_what_is_not_modelled_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["compare", *JOB, "--seq", "512", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
